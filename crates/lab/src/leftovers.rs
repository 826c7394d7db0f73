//! Finds, and as a last resort removes, what a run has left behind: processes, mounts and files that
//! name its private folder.

use std::ffi::CString;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::tools;

/// Programs that a run starts, as the kernel shows their names (15 bytes), or their files'. Anything else that names
/// the folder, such as somebody's pager on a console log, is not ours to count or to end.
const PROGRAMS: [&str; 2] = ["ballastd", QEMU];
/// QEMU's.
pub const QEMU: &str = "qemu-system-x86";

/// Processes of a run: one of its programs, with `folder` in the command line.
pub fn processes(folder: &Path) -> Vec<i32> {
    let needle = folder.as_os_str().as_bytes();
    tools::processes()
        .filter(|pid| PROGRAMS.iter().any(|program| runs(*pid, program)))
        .filter(|pid| {
            // A zombie's command line is empty: it holds nothing, and its parent has yet to look.
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.windows(needle.len()).any(|w| w == needle))
        })
        .collect()
}

/// Whether that is what a process runs, by its name or, for it may have given itself another, by its file's.
pub fn runs(pid: i32, program: &str) -> bool {
    let is_named = std::fs::read(format!("/proc/{pid}/comm"))
        .is_ok_and(|name| name.trim_ascii_end() == program.as_bytes());
    let is_its_file = || {
        let file = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        Some(file.file_name()?.as_bytes().starts_with(program.as_bytes()))
    };
    is_named || is_its_file() == Some(true)
}

/// Mount points at or under `folder`, innermost first.
pub fn mounts(folder: &Path) -> Vec<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut found = parse_mounts(&text, folder);
    found.reverse();
    found
}

fn parse_mounts(text: &str, folder: &Path) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|l| l.split(' ').nth(4))
        .map(|p| PathBuf::from(p.replace("\\040", " ")))
        .filter(|p| p.starts_with(folder))
        .collect()
}

/// Everything under `folder` but for plain directories.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return found };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}

/// What is left, in words; empty when all is gone.
pub fn describe(folder: &Path) -> Vec<String> {
    let processes = processes(folder).into_iter().map(|p| format!("process {p}"));
    let mounts = mounts(folder).into_iter().map(|m| format!("mount {}", m.display()));
    let files = files(folder).into_iter().map(|f| format!("file {}", f.display()));
    processes.chain(mounts).chain(files).collect()
}

/// Ends the processes, unmounts the mounts. Files are left to their owner.
pub fn sweep(folder: &Path) {
    for pid in processes(folder) {
        // SAFETY: kill touches no memory; the process names this run's private folder, so it was
        // started for this run.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    let until = Instant::now() + Duration::from_secs(5);
    while !processes(folder).is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    for mount in mounts(folder) {
        if let Ok(path) = CString::new(mount.as_os_str().as_bytes()) {
            // SAFETY: a NUL-ended path that lives through the call.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// A new folder of mode 0700 in `parent`; its name is unlike any other. With BALLAST_TEST_RUN in it, if that is set: `./test`
/// removes what such a run has left.
pub fn private_folder(parent: &Path) -> Result<PathBuf> {
    let run = std::env::var("BALLAST_TEST_RUN").map_or(String::new(), |run| run + "-");
    tempfile::Builder::new()
        .prefix(&format!("ballast-lab-{run}"))
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(parent)
        .map(tempfile::TempDir::keep)
        .with_context(|| format!("a private folder in {}", parent.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_under_the_folder_are_found_innermost_first() {
        let text = "36 35 0:1 / /tmp/b/ram rw - tmpfs t rw\n37 35 0:2 / /tmp/bc rw - tmpfs t rw\n\
                    38 36 0:3 / /tmp/b/ram/x\\040y rw - tmpfs t rw\n";
        let want = ["/tmp/b/ram", "/tmp/b/ram/x y"].map(PathBuf::from);
        assert_eq!(parse_mounts(text, Path::new("/tmp/b")), want);
    }

    #[test]
    fn a_process_and_a_file_of_the_folder_are_found_and_swept() {
        let folder = private_folder(&std::env::temp_dir()).unwrap();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::create_dir(folder.join("sub")).unwrap();
        std::fs::write(folder.join("sub/socket"), "").unwrap();
        let program = folder.join("ballastd");
        // Not a copy: a file that was just written may still be open in a child of another test.
        std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
        let mut child = std::process::Command::new(&program)
            .args(["-c", "read line"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while processes(&folder).is_empty() && begin.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(describe(&folder).len(), 3);
        sweep(&folder);
        assert!(!child.wait().unwrap().success());
        assert!(processes(&folder).is_empty());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(describe(&folder).is_empty());
    }

    /// As QEMU's `-name x,process=...` does; cut in the midst of a letter it is no text.
    #[test]
    fn a_process_that_has_named_itself_otherwise_is_found_by_its_file() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", r"printf '0123456789abcd\303' > /proc/$$/comm; echo; read line"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let mut said = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap();
        assert!(std::str::from_utf8(&comm).is_err(), "{comm:?}");
        let shell = std::fs::canonicalize("/bin/sh").unwrap();
        let shell = shell.file_name().unwrap().to_str().unwrap();
        assert!(runs(pid, shell) && !runs(pid, QEMU));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!runs(pid, shell));
    }
}
