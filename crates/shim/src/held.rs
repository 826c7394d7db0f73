//! What children of a fork must not keep: descriptors, and pages of the guest.
//!
//! A child that kept the connection would look to the manager like a VMM that lives on; one that kept
//! the userfaultfd or the RAM file would keep memory from being freed. An exec closes them
//! (close-on-exec); a child that only forks closes them by a pthread_atfork handler, which must know
//! them at every instant. So opening one and noting it happens under a lock that fork takes too.
//!
//! A child that kept pages that the guest made of shared ones would keep them from being freed, too.
//! They are in mappings that come and go by the ten thousands, and forks are rare: so mappings are
//! kept from the child when it is made, not when they are. What is mapped in the moment between is
//! the child's as well; that is a few pages, of which it knows nothing.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use ballast_shim_proto::MAX_PARTS;

use crate::ram::Ram;
use crate::sent;

/// Where one kind of descriptor is noted.
pub struct Slot(AtomicI32);

pub static SOCKET: Slot = Slot(AtomicI32::new(-1));
pub static UFFD: Slot = Slot(AtomicI32::new(-1));
/// Of each part of the RAM.
pub static RAM_FILES: [Slot; MAX_PARTS] = [const { Slot(AtomicI32::new(-1)) }; MAX_PARTS];

/// The guest's RAM, once it is managed or about to be: address and length of each part, or 0.
static RAM: [[AtomicU64; 2]; MAX_PARTS] = [const { [const { AtomicU64::new(0) }; 2] }; MAX_PARTS];
/// The VMM asked for large pages in some of it, and was not heard.
static UNHEARD: AtomicBool = AtomicBool::new(false);

/// A spin lock, held for one or two system calls: a mutex that the child of a fork could unlock.
static LOCK: AtomicBool = AtomicBool::new(false);

fn lock() {
    while LOCK.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
}

fn unlock() {
    LOCK.store(false, Ordering::Release);
}

/// Something with a descriptor that is noted while it lives.
pub struct Held<T: AsFd> {
    value: ManuallyDrop<T>,
    slot: &'static Slot,
}

impl<T: AsFd> Held<T> {
    /// Opens by `open`, which must be short and must not panic or fork.
    ///
    /// # Errors
    /// Of `open`.
    pub fn open(slot: &'static Slot, open: impl FnOnce() -> io::Result<T>) -> io::Result<Held<T>> {
        lock();
        let opened = open();
        if let Ok(value) = &opened {
            slot.0.store(value.as_fd().as_raw_fd(), Ordering::Release);
        }
        unlock();
        Ok(Held { value: ManuallyDrop::new(opened?), slot })
    }
}

impl<T: AsFd> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: AsFd> Drop for Held<T> {
    fn drop(&mut self) {
        lock();
        self.slot.0.store(-1, Ordering::Relaxed);
        // SAFETY: dropped here only, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.value) };
        unlock();
    }
}

/// Device and inode of the RAM file of each part that is noted.
pub fn ram_files() -> [Option<(u64, u64)>; MAX_PARTS] {
    RAM_FILES.each_ref().map(|slot| sent::identity(slot.0.load(Ordering::Acquire)))
}

/// From now on no child gets any of this part, whatever will be mapped there.
pub fn keep(part: usize, ram: Ram) {
    if let Some([addr, len]) = RAM.get(part) {
        addr.store(ram.addr.0, Ordering::Relaxed);
        len.store(ram.len.0, Ordering::Release);
    }
}

/// Address and length of what is kept.
fn kept() -> impl Iterator<Item = (u64, u64)> {
    let parts = RAM.iter().map(|[addr, len]| {
        let len = len.load(Ordering::Acquire);
        (addr.load(Ordering::Relaxed), len)
    });
    parts.filter(|&(_, len)| len != 0)
}

/// It is the VMM's alone after all, with the large pages that it asked for.
pub fn give_back() {
    let parts: Vec<(u64, u64)> = kept().collect();
    RAM.iter().for_each(|[_, len]| len.store(0, Ordering::Release));
    if UNHEARD.swap(false, Ordering::Relaxed) {
        for (addr, len) in parts {
            // SAFETY: advice on mappings of this process that keeps their content.
            unsafe { libc::madvise(addr as *mut libc::c_void, len as usize, libc::MADV_HUGEPAGE) };
        }
    }
}

/// Whether a range, for which large pages are asked, has a part of the managed RAM.
pub fn is_kept(addr: u64, len: u64) -> bool {
    let meets = |(ram, ram_len): (u64, u64)| {
        addr < ram.saturating_add(ram_len) && ram < addr.saturating_add(len)
    };
    let is = kept().any(meets);
    if is {
        UNHEARD.store(true, Ordering::Relaxed);
    }
    is
}

/// From now on forks are watched.
///
/// # Errors
/// There is no memory for that.
pub fn install() -> io::Result<()> {
    // SAFETY: the handlers stay loaded as long as the process: an LD_PRELOAD library is never
    // unloaded. They use atomics and close(2) only, as a child of a threaded process must.
    match unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) } {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(e)),
    }
}

extern "C" fn prepare() {
    for (addr, len) in kept() {
        // SAFETY: advice on mappings of this process that keeps their content.
        unsafe { libc::madvise(addr as *mut libc::c_void, len as usize, libc::MADV_DONTFORK) };
    }
    lock();
}

extern "C" fn parent() {
    unlock();
}

extern "C" fn child() {
    let mut had_any = false;
    for slot in [&SOCKET, &UFFD].into_iter().chain(&RAM_FILES) {
        let fd = slot.0.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            had_any = true;
            // SAFETY: the descriptor is this child's copy of one whose owner is a thread that does
            // not exist in the child, so nobody will use or close it again.
            unsafe { libc::close(fd) };
        }
    }
    RAM.iter().for_each(|[_, len]| len.store(0, Ordering::Relaxed));
    // A child from before the RAM was mapped stays armed: -daemonize is two forks, then the VMM.
    if had_any {
        crate::STATE.store(crate::INACTIVE, Ordering::Release);
    }
    unlock();
}
