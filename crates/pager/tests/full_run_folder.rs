//! The run folder's file system is full: words of pages get no memory, and nothing waits for ever.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use ballast_pager::memory::Unbooked;
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use support::vm::Vm;

/// Words of so many pages get their memory together, and more.
const PART: u64 = 1 << 14;

/// A small file system, unmounted with the test.
struct Small(PathBuf);

impl Small {
    /// None where one may not be mounted, if that is allowed.
    fn mount(at: PathBuf) -> Option<Small> {
        std::fs::create_dir(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=512k", "none"]).arg(&at);
        if mount.status().is_ok_and(|status| status.success()) {
            return Some(Small(at));
        }
        let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED").as_deref() == Ok("1");
        assert!(!required, "a tmpfs cannot be mounted");
        eprintln!("SKIPPED: a tmpfs cannot be mounted here");
        None
    }

    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.join("filler")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn what_a_guest_gives_up_and_never_touched_needs_no_word() {
    let dir = tempfile::tempdir().unwrap();
    let Some(small) = Small::mount(dir.path().join("small")) else { return };
    let mut vm = Vm::run_in(&small.0, 4 * PART, 10);
    vm.access(0, Some(5));
    small.fill();
    let memory = vm.memory.clone();
    let (done, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let left = memory.discard(Ppn(2 * PART), 20, memory.mark());
        done.send(left).unwrap();
    });
    let left = answer.recv_timeout(Duration::from_secs(30)).expect("it never ends");
    assert_eq!(left, (Unbooked::default(), Ok(())));
    let ballooned = || vm.memory.pmap().in_state(State::Ballooned);
    assert_eq!((vm.state(2 * PART), ballooned()), (State::Untouched, Pages(0)));
    // What has a word is booked as ever, and so is the rest when there is memory again.
    vm.memory.discard(Ppn(1), 3, vm.memory.mark()).1.unwrap();
    assert_eq!(ballooned(), Pages(3));
    std::fs::remove_file(small.0.join("filler")).unwrap();
    vm.memory.discard(Ppn(2 * PART), 20, vm.memory.mark()).1.unwrap();
    assert_eq!(ballooned(), Pages(23));
    vm.memory.pmap().check().unwrap();
    assert_eq!(vm.access(0, None), 5);
}
