//! What files take: of the disk, or of memory.

use std::os::fd::AsFd;

use rustix::fs::FallocateFlags;
use rustix::io::retry_on_intr;

/// Gives a part of a file its blocks, so that there being none left is an error here, and not a SIGBUS where it is
/// touched.
///
/// # Errors
/// There are none.
pub(crate) fn allocate(file: impl AsFd, at: u64, len: u64) -> rustix::io::Result<()> {
    // A tmpfs gives up where a signal is pending: for who is stopped and goes on, or is looked at by a debugger.
    retry_on_intr(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), at, len))
}

/// Takes those of a part from it; it reads as zeros then.
///
/// # Errors
/// Of the file system.
pub(crate) fn free(file: impl AsFd, at: u64, len: u64) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    retry_on_intr(|| rustix::fs::fallocate(&file, flags, at, len))
}

/// Whether what is written to a file stays in memory: whether it is on a tmpfs or a ramfs.
///
/// # Errors
/// Of the file system.
pub fn is_in_memory(file: impl AsFd) -> rustix::io::Result<bool> {
    const TMPFS: u64 = libc::TMPFS_MAGIC as u64;
    // libc does not have it.
    const RAMFS: u64 = 0x8584_58f6;
    let kind = rustix::fs::fstatfs(file)?.f_type;
    // As wide as a word of the machine, and of whatever sign.
    Ok([TMPFS, RAMFS].contains(&(kind as u64 & 0xffff_ffff)))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_a_tmpfs_is_in_memory_and_other_files_are_not() {
        assert!(is_in_memory(tempfile::tempfile_in("/dev/shm").unwrap()).unwrap());
        assert!(!is_in_memory(std::fs::File::open("/proc/self/stat").unwrap()).unwrap());
    }

    #[test]
    fn what_is_allocated_takes_room_until_it_is_freed() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let bytes = || file.metadata().unwrap().blocks() * 512;
        allocate(&file, 4096, 8192).unwrap();
        assert_eq!((bytes(), file.metadata().unwrap().len()), (8192, 12288));
        free(&file, 4096, 4096).unwrap();
        assert_eq!((bytes(), file.metadata().unwrap().len()), (4096, 12288));
    }
}
