//! How this kernel tells of a page that is write-protected, and not there.

use std::os::fd::AsFd as _;
use std::sync::OnceLock;

use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::pagemap::Pagemap;
use crate::{Features, Modes, Uffd};

/// From Linux 6.3 on. Before, the one after it stood for something else, and it was one less.
const LAST: u64 = 31;

/// The type of a pagemap entry that stands for no page, but remembers that there is something to know about the next one: that
/// it is write-protected. The kernel is asked once, by a page of this process; where it cannot be, it is `LAST`.
pub fn marker() -> u64 {
    static MARKER: OnceLock<u64> = OnceLock::new();
    *MARKER.get_or_init(|| asked().unwrap_or(LAST))
}

/// None: no userfaultfd is to be had, or the kernel does not protect what is not there.
pub(super) fn asked() -> Option<u64> {
    let uffd = Uffd::open().ok()?;
    uffd.handshake(Features::PAGEFAULT_FLAG_WP | Features::WP_HUGETLBFS_SHMEM).ok()?;
    let file = memfd_create("marker", MemfdFlags::CLOEXEC).ok()?;
    ftruncate(&file, PAGE_SIZE as u64).ok()?;
    let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping, at an address of the kernel's choice; nothing refers to it.
    let at = unsafe { mmap(std::ptr::null_mut(), PAGE_SIZE, access, private, file.as_fd(), 0) };
    let at = at.ok()?;
    let addr = HostAddr(at.addr() as u64);
    let len = Bytes(PAGE_SIZE as u64);
    // SAFETY: nobody touches it, so that no fault is ever waited for.
    let registered = unsafe { uffd.register(addr, len, Modes::WP) };
    let told = registered.and_then(|_| uffd.protect(addr, len)).ok().and_then(|()| {
        let entries = Pagemap::open(std::process::id()).and_then(|map| map.entries(addr, Pages(1)));
        entries.ok()?.first()?.type_of_protected()
    });
    // SAFETY: the mapping of above.
    let _ = unsafe { munmap(at, PAGE_SIZE) };
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_its_own_number_the_same_each_time() {
        // Without the right to a userfaultfd nothing is told.
        let told = asked();
        assert_eq!(told.unwrap_or(LAST), marker());
        assert!(told.is_none_or(|kind| kind == LAST || kind == LAST - 1), "{told:?}");
    }
}
