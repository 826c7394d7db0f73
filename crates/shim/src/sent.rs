//! To whom the RAM file is sent. A process that gets its descriptor (the backend of a vhost-user device, which maps the
//! guest's memory) reads pages that are away as zeros. So a VMM whose guest is paged sends it to nobody
//! (docs/adr/0036-the-ram-file-stays.md).

use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::held;

/// The manager wants it kept.
const KEPT: u32 = 1 << 31;
/// Somebody may have it, for as long as this process runs: what was sent cannot be asked back.
const SENT: u32 = 1 << 30;

/// One of the two, which then stays so, or neither; and how many messages with it are being sent.
static STATE: AtomicU32 = AtomicU32::new(0);

/// From now on it is sent to nobody.
///
/// # Errors
/// EBUSY: somebody may have it already. EAGAIN: it is being sent just now.
pub fn keep() -> Result<(), i32> {
    let change = |state| match state {
        0 | KEPT => Some(KEPT),
        _ => None,
    };
    match STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, change) {
        Ok(_) => Ok(()),
        Err(state) if state & SENT != 0 => Err(libc::EBUSY),
        Err(_) => Err(libc::EAGAIN),
    }
}

/// Messages on their way, with the RAM file among their descriptors or not.
pub struct Sending(bool);

impl Sending {
    /// None: one of them carries it, and it is kept: they must not be sent.
    ///
    /// # Safety
    /// As of the messages of sendmsg(2).
    pub unsafe fn begin<'a>(
        mut messages: impl Iterator<Item = &'a libc::msghdr>,
    ) -> Option<Sending> {
        // SAFETY: the caller's promise.
        if !messages.any(|msg| unsafe { carries_ram(msg) }) {
            return Some(Sending(false));
        }
        let one_more = |state: u32| (state & KEPT == 0).then(|| state + 1);
        if STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            say_once();
            return None;
        }
        Some(Sending(true))
    }

    /// Whether any was sent.
    pub fn end(self, any: bool) {
        if self.0 {
            let sent = |state: u32| Some((state - 1) | if any { SENT } else { 0 });
            let _ = STATE.fetch_update(Ordering::AcqRel, Ordering::Acquire, sent);
        }
    }
}

fn say_once() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        crate::say(
            "the guest's RAM is not given to another process (the backend of a device that was plugged, vhost-user or virtiofs?), \
             which would read pages that are away as zeros; a VM that is started with such a device is not paged, and can have more",
        );
    }
}

/// # Safety
/// As of `msg` in sendmsg(2).
unsafe fn carries_ram(msg: &libc::msghdr) -> bool {
    let (mut at, mut left) = (msg.msg_control.cast::<u8>(), msg.msg_controllen);
    if at.is_null() || left < HEADER {
        return false;
    }
    let homes = held::ram_files();
    if homes.iter().all(Option::is_none) {
        return false;
    }
    // As the kernel goes over it, which refuses what this ends at; by hand, for a VMM may have it anywhere.
    while left >= HEADER {
        // SAFETY: `left` bytes of the caller's buffer are there.
        let header = unsafe { at.cast::<libc::cmsghdr>().read_unaligned() };
        let len = header.cmsg_len;
        if len < HEADER || len > left {
            return false;
        }
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            for n in 0..(len - HEADER) / size_of::<i32>() {
                // SAFETY: inside this message's `len`, which is inside the buffer.
                let fd = unsafe { at.add(HEADER).cast::<i32>().add(n).read_unaligned() };
                if identity(fd).is_some_and(|id| homes.contains(&Some(id))) {
                    return true;
                }
            }
        }
        let step = len.next_multiple_of(size_of::<usize>()).min(left);
        // SAFETY: at most to the end of the buffer.
        at = unsafe { at.add(step) };
        left -= step;
    }
    false
}

/// Of one message among the descriptors, before its data.
const HEADER: usize = size_of::<libc::cmsghdr>();

/// Device and inode of an open file.
pub fn identity(fd: i32) -> Option<(u64, u64)> {
    if fd < 0 {
        return None;
    }
    // SAFETY: of the caller's, or of `held`; where it is no open descriptor, fstat says so.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::held::{Held, RAM_FILES};

    /// Descriptors as a message carries them, behind one of another kind; `len` is what the second says of itself.
    fn control(fds: [i32; 2], len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut one = |len: usize, kind: i32, fds: [i32; 2]| {
            bytes.extend(len.to_ne_bytes());
            bytes.extend([libc::SOL_SOCKET, kind, fds[0], fds[1]].map(i32::to_ne_bytes).concat());
        };
        one(HEADER + 4, libc::SCM_CREDENTIALS, fds);
        one(len, libc::SCM_RIGHTS, fds);
        bytes
    }

    /// From a place that is aligned to nothing.
    fn begin(control: &[u8]) -> Option<Sending> {
        let moved = [&[0], control].concat();
        // SAFETY: a message without data.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_control = moved[1..].as_ptr().cast_mut().cast();
        msg.msg_controllen = control.len();
        // SAFETY: its descriptors are in `moved`.
        unsafe { Sending::begin([&msg].into_iter()) }
    }

    /// All in one, for there is one state.
    #[test]
    fn what_is_sent_is_not_kept_and_what_is_kept_is_not_sent() {
        let file = tempfile::tempfile().unwrap();
        let other = tempfile::tempfile().unwrap();
        let _ram = Held::open(&RAM_FILES[1], || file.try_clone()).unwrap();
        let whole = HEADER + 8;
        let ram = control([other.as_raw_fd(), file.as_raw_fd()], whole);
        // Neither others, nor what the kernel refuses, nor a descriptor that is cut off.
        for harmless in [
            control([other.as_raw_fd(); 2], whole),
            control([file.as_raw_fd(); 2], whole + 1),
            control([file.as_raw_fd(); 2], usize::MAX - 6),
            control([file.as_raw_fd(); 2], 0),
            control([other.as_raw_fd(), file.as_raw_fd()], whole - 1),
            ram[..ram.len() - 9].to_vec(),
            Vec::new(),
        ] {
            assert!(!begin(&harmless).unwrap().0, "{harmless:?}");
        }
        let sending = begin(&ram).unwrap();
        assert_eq!(keep(), Err(libc::EAGAIN));
        let second = begin(&ram).unwrap();
        sending.end(false);
        second.end(false);
        assert_eq!((keep(), keep()), (Ok(()), Ok(())), "none was sent");
        assert!(begin(&ram).is_none());
        STATE.store(0, Ordering::Relaxed);
        begin(&ram).unwrap().end(true);
        assert_eq!(keep(), Err(libc::EBUSY));
        begin(&ram).unwrap().end(false);
        assert_eq!(keep(), Err(libc::EBUSY));
        assert_eq!((identity(-1), identity(i32::MAX)), (None, None));
    }
}
