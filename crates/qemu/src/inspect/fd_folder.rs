//! The descriptors of a process, one after the other. Each is looked at from their folder: from the root of /proc it would be
//! four names to it, for tens of thousands of them on a host with many VMs.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir, StatxFlags, openat, readlinkat, statx};
use rustix::io::Errno;

use super::census::FileId;

/// What the kernel tells at a time, bytes: some three hundred.
const TOGETHER: usize = 8 << 10;

/// The folder /proc/PID/fd.
pub(super) struct FdFolder(OwnedFd);

impl FdFolder {
    /// # Errors
    /// The process is gone, or not ours to see; or the manager has no descriptor left.
    pub fn of(pid: u32) -> io::Result<FdFolder> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(FdFolder(openat(CWD, format!("/proc/{pid}/fd"), flags, Mode::empty())?))
    }

    /// Gives `look` the number of each, as text, until it answers false. One whose process ends meanwhile has no more.
    ///
    /// # Errors
    /// Of `look`.
    pub fn each(&self, mut look: impl FnMut(&CStr) -> io::Result<bool>) -> io::Result<()> {
        let mut buffer = Vec::with_capacity(TOGETHER);
        let mut all = RawDir::new(&self.0, buffer.spare_capacity_mut());
        while let Some(Ok(entry)) = all.next() {
            let fd = entry.file_name();
            if fd != c"." && fd != c".." && !look(fd)? {
                break;
            }
        }
        Ok(())
    }

    /// What a descriptor is of: "/images/a.qcow2", "socket:[123]".
    ///
    /// # Errors
    /// It is gone.
    pub fn target(&self, fd: &CStr) -> Result<CString, Errno> {
        readlinkat(&self.0, fd, Vec::new())
    }

    /// The file behind it. An error is of its file system, which may be another user's: it fails no look.
    pub fn file(&self, fd: &CStr) -> Option<FileId> {
        // Without DONT_SYNC, one file on a dead network server would stop the scan.
        let stat = statx(&self.0, fd, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
        Some(((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn all_are_given_however_many_there_are_and_none_after_a_no() {
        let files: Vec<File> = (0..700).map(|_| File::open("/proc/self/stat").unwrap()).collect();
        let folder = FdFolder::of(std::process::id()).unwrap();
        let mut seen = BTreeSet::new();
        let each = folder.each(|fd| {
            // Only numbers.
            assert!(seen.insert(fd.to_str().unwrap().parse::<i32>().unwrap()));
            Ok(true)
        });
        each.unwrap();
        assert!(files.iter().all(|file| seen.contains(&file.as_raw_fd())));
        let mut given = 0;
        let folder = FdFolder::of(std::process::id()).unwrap();
        let stop = folder.each(|_| {
            given += 1;
            Ok(given < 3)
        });
        assert_eq!((stop.is_ok(), given), (true, 3));
        let folder = FdFolder::of(std::process::id()).unwrap();
        assert!(folder.each(|_| Err(io::Error::from(Errno::MFILE))).is_err());
        assert!(FdFolder::of(u32::MAX).is_err());
    }

    #[test]
    fn a_descriptor_tells_its_file_and_the_name_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let file = File::create(&path).unwrap();
        let fd = CString::new(file.as_raw_fd().to_string()).unwrap();
        let folder = FdFolder::of(std::process::id()).unwrap();
        assert_eq!(folder.target(&fd).unwrap().to_str().unwrap(), path.to_str().unwrap());
        let (_, inode) = folder.file(&fd).unwrap();
        assert_eq!(inode, file.metadata().unwrap().ino());
        assert!(folder.target(c"99999999").is_err() && folder.file(c"99999999").is_none());
    }
}
