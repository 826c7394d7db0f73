//! Which mappings are the guest's RAM.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use ballast_units::{Bytes, HostAddr};
use rustix::fs::FileType;

/// The guest's RAM in this process, or one part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ram {
    pub addr: HostAddr,
    pub len: Bytes,
    /// Where it starts in the RAM file.
    pub file_offset: u64,
}

impl Ram {
    /// Looks at a mapping that was just made. QEMU (7.2 to 10) reserves address space with an
    /// anonymous PROT_NONE mapping first, then maps the RAM file over it: shared, writable, as long as
    /// the RAM, from a memfd (memory-backend-memfd) or a regular file (memory-backend-file), both of
    /// which are regular files to fstat. Whether it is memory that can be paged (shmem, not hugetlbfs
    /// or a disk's) is for the manager and the kernel to say.
    ///
    /// `ram_size` is the least that it has; of one part among several, which a manager has chosen, all.
    pub fn recognise(
        ram_size: u64,
        addr: u64,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> Option<Ram> {
        let shared = matches!(flags & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
        let candidate = shared
            && flags & libc::MAP_ANONYMOUS == 0
            && prot & libc::PROT_WRITE != 0
            && len as u64 >= ram_size
            && fd >= 0;
        if !candidate {
            return None;
        }
        // SAFETY: the caller of mmap lent us this descriptor, which is open: it was just mapped.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let stat = rustix::fs::fstat(file).ok()?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || (stat.st_size as u64) < ram_size {
            return None;
        }
        Some(Ram { addr: HostAddr(addr), len: Bytes(len as u64), file_offset: offset as u64 })
    }

    /// Whether [addr, addr + len) lies inside.
    pub fn contains(&self, addr: HostAddr, len: Bytes) -> bool {
        match addr.0.checked_sub(self.addr.0) {
            Some(offset) => offset <= self.len.0 && len.0 <= self.len.0 - offset,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    const RW: c_int = libc::PROT_READ | libc::PROT_WRITE;

    #[test]
    fn only_a_large_shared_writable_file_mapping_is_ram() {
        let file = rustix::fs::memfd_create("any", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let fd = file.as_raw_fd();
        let look =
            |size, len, prot, flags, fd| Ram::recognise(size, 0x1000, len, prot, flags, fd, 0);
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        let ram = Ram { addr: HostAddr(0x1000), len: Bytes(1 << 20), file_offset: 0 };
        assert_eq!(look(1 << 20, 1 << 20, RW, fixed, fd), Some(ram));
        assert_eq!(look(1 << 20, 1 << 20, RW, libc::MAP_PRIVATE, fd), None);
        assert_eq!(look(1 << 20, 1 << 20, libc::PROT_READ, fixed, fd), None);
        assert_eq!(look(1 << 20, 1 << 19, RW, fixed, fd), None);
        assert_eq!(look(2 << 20, 2 << 20, RW, fixed, fd), None, "the file is too short");
        assert_eq!(look(1, 1 << 20, RW, fixed | libc::MAP_ANONYMOUS, -1), None);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(look(1, 1 << 20, RW, fixed, null.as_raw_fd()), None);
    }

    #[test]
    fn containment_does_not_overflow() {
        let ram = Ram { addr: HostAddr(0x10000), len: Bytes(0x4000), file_offset: 0 };
        assert!(ram.contains(HostAddr(0x10000), Bytes(0x4000)));
        assert!(ram.contains(HostAddr(0x13000), Bytes(0x1000)));
        assert!(!ram.contains(HostAddr(0x13000), Bytes(0x2000)));
        assert!(!ram.contains(HostAddr(0xf000), Bytes(0x1000)));
        assert!(!ram.contains(HostAddr(0x14000), Bytes(0x1000)));
        assert!(!ram.contains(HostAddr(0x13000), Bytes(u64::MAX)));
        assert!(!ram.contains(HostAddr(u64::MAX), Bytes(u64::MAX)));
    }
}
