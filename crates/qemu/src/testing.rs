//! For tests: what these share.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

/// A shell that sees mounts of its own, to be killed when this is dropped.
pub(crate) struct Apart(Child);

impl Apart {
    /// Once it has done all of the script, with these arguments. None, loudly, without the right to mount.
    pub(crate) fn once(script: &str, arguments: &[&str]) -> Option<Apart> {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.arg("-m");
            command
        };
        let probe = unshare().args(["mount", "-t", "tmpfs", "none", "/dev"]).output();
        if !probe.as_ref().is_ok_and(|done| done.status.success()) {
            let said = |done: &Output| String::from_utf8_lossy(&done.stderr).into_owned();
            let why = probe.as_ref().map_or_else(ToString::to_string, said);
            // Where the root is no mount, as after a chroot, its mounts cannot be made its own.
            let may_be = why.contains("filesystem propagation");
            let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
            assert!(may_be || required.as_deref() != Ok("1"), "no mounts of its own: {why}");
            eprintln!("SKIPPED: no process can have mounts of its own here: {why}");
            return None;
        }
        let script = format!("set -e; {script}; echo ready; read -r _");
        let mut shell = unshare();
        shell.args(["sh", "-c", &script, "sh"]).args(arguments);
        let mut child = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut said, mut line) = (BufReader::new(child.stdout.take().unwrap()), String::new());
        let apart = Apart(child);
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{script}");
        Some(apart)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
