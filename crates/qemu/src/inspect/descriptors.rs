//! What a VMM has open that forbids something, by one pass over its descriptors.

use std::ffi::CStr;
use std::io;

use super::fd_folder::FdFolder;
use super::scan::{if_there, passes, pins};
use super::unbuffered::Mounts;
use crate::{bounded, proc_text};

/// Of one kind: one forbids what all of them forbid, and a process may have hundreds of thousands.
const NAMED: usize = 64;

/// Names of files, `NAMED` of each kind at most.
#[derive(Debug, Default)]
pub(super) struct Open {
    /// Through which commands are passed.
    pub passing: Vec<String>,
    /// By which memory is pinned.
    pub pinning: Vec<String>,
    /// Open with O_DIRECT.
    pub direct: Vec<String>,
    /// Read past the page cache all the same, each with its file system: "/images/a.qcow2 (fuse.sshfs)".
    pub unbuffered: Vec<String>,
}

impl Open {
    /// # Errors
    /// The process is gone, or not ours to see; or something that is needed for the look was not to be had.
    pub fn of(pid: u32) -> io::Result<Open> {
        Open::among(pid, || Mounts::of(pid))
    }

    /// `all` the mounts are asked for once there is a file that is read.
    fn among(pid: u32, all: impl Fn() -> io::Result<Mounts>) -> io::Result<Open> {
        let (mut open, mut mounts) = (Open::default(), None);
        let fds = FdFolder::of(pid)?;
        fds.each(|fd| {
            let Some(target) = if_there(fds.target(fd).map_err(io::Error::from))? else {
                return Ok(true);
            };
            let target = target.to_string_lossy();
            if let Some(mount) = open.note(pid, fd, &target)? {
                let mounts = match &mut mounts {
                    Some(mounts) => mounts,
                    none => none.insert(all()?),
                };
                if let Some(kind) = mounts.kind(mount) {
                    note(&mut open.unbuffered, true, || format!("{target} ({kind})"));
                }
            }
            Ok(true)
        })?;
        Ok(open)
    }

    /// Takes note of a descriptor. Answers in which mount it was opened, of one of a file that is read.
    fn note(&mut self, pid: u32, fd: &CStr, target: &str) -> io::Result<Option<u64>> {
        note(&mut self.passing, passes(target), || target.to_owned());
        note(&mut self.pinning, pins(target), || target.to_owned());
        if is_no_file(target) {
            return Ok(None);
        }
        let info = if_there(bounded::fd_info(pid, &fd.to_string_lossy()))?;
        let Some((info, flags)) =
            info.and_then(|info| proc_text::open_flags(&info).map(|flags| (info, flags)))
        else {
            return Ok(None);
        };
        note(&mut self.direct, flags & libc::O_DIRECT as u32 != 0, || target.to_owned());
        Ok(is_read(flags).then(|| proc_text::mount_id(&info)).flatten())
    }
}

fn note(kind: &mut Vec<String>, is_one: bool, name: impl FnOnce() -> String) {
    if is_one && kind.len() < NAMED {
        kind.push(name());
    }
}

/// Whether it is a descriptor that no disk is behind: most of a VMM's. A file has a path, which none of these is.
fn is_no_file(target: &str) -> bool {
    ["anon_inode:", "socket:[", "pipe:["].iter().any(|prefix| target.starts_with(prefix))
}

/// Whether something can be read through the descriptor: what is only written, its log for one, lands nowhere.
fn is_read(flags: u32) -> bool {
    flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_found_by_the_mount_that_it_was_opened_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let written = fs::File::create(&path).unwrap();
        let own = std::process::id();
        let fd = written.as_raw_fd().to_string();
        let mount = proc_text::mount_id(&bounded::fd_info(own, &fd).unwrap()).unwrap();
        let is_found = |mount: u64| {
            let found = Open::among(own, || Ok(Mounts::one(mount, "fuse.far"))).unwrap();
            found.unbuffered.contains(&format!("{} (fuse.far)", path.display()))
        };
        assert!(!is_found(mount), "it is only written");
        let read = fs::File::open(&path).unwrap();
        assert!(is_found(mount));
        assert!(!is_found(u64::MAX));
        drop((read, written));
        assert!(!is_found(mount));
    }

    #[test]
    fn files_with_o_direct_are_found_and_pipes_are_none() {
        // Of packets, as it is called there.
        let packets = rustix::pipe::PipeFlags::DIRECT | rustix::pipe::PipeFlags::CLOEXEC;
        let _pipe = rustix::pipe::pipe_with(packets).unwrap();
        // On a disk: of a tmpfs the kernel may refuse it.
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let direct =
            fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file.path());
        let Ok(_direct) = direct else { return eprintln!("SKIPPED: no O_DIRECT here") };
        let found = Open::of(std::process::id()).unwrap().direct;
        assert!(found.contains(&file.path().display().to_string()), "{found:?}");
        assert!(found.iter().all(|name| !is_no_file(name)), "{found:?}");
    }

    #[test]
    fn what_is_only_written_is_no_disk() {
        for (flags, read) in [(0o100_000, true), (0o2_100_002, true), (0o2_102_001, false)] {
            assert_eq!(is_read(flags), read, "{flags:o}");
        }
    }

    #[test]
    fn of_each_kind_no_more_are_named_than_anybody_reads() {
        let mut kind = Vec::new();
        (0..=NAMED).for_each(|n| note(&mut kind, true, || n.to_string()));
        assert_eq!(kind.len(), NAMED);
        assert!(Open::of(u32::MAX).is_err());
    }
}
