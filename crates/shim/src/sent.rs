//! To whom the RAM file is sent. A process that gets its descriptor (the backend of a vhost-user device, which maps the
//! guest's memory) reads pages that are away as zeros. So a VMM whose guest is paged sends it to nobody
//! (docs/adr/0036-the-ram-file-stays.md).

use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::held;

/// Neither of the two.
const FREE: u8 = 0;
/// Somebody may have it, for as long as this process runs: what was sent cannot be asked back.
const SENT: u8 = 1;
/// The manager wants it kept.
const KEPT: u8 = 2;

/// Once it is another than `FREE` it stays so.
static STATE: AtomicU8 = AtomicU8::new(FREE);

/// From now on it is sent to nobody.
///
/// # Errors
/// EBUSY: somebody may have it already.
pub fn keep() -> Result<(), i32> {
    match STATE.compare_exchange(FREE, KEPT, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) | Err(KEPT) => Ok(()),
        Err(_) => Err(libc::EBUSY),
    }
}

/// Whether a message must not be sent: it carries the RAM file, and that is kept. One that may be is noted.
///
/// # Safety
/// As of `msg` in sendmsg(2).
pub unsafe fn is_refused(msg: &libc::msghdr) -> bool {
    // SAFETY: the caller's promise.
    if !unsafe { carries_ram(msg) } {
        return false;
    }
    let free = STATE.compare_exchange(FREE, SENT, Ordering::AcqRel, Ordering::Acquire);
    let is_refused = free == Err(KEPT);
    if is_refused {
        say_once();
    }
    is_refused
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
    if msg.msg_control.is_null() || msg.msg_controllen < size_of::<libc::cmsghdr>() {
        return false;
    }
    let homes = held::ram_files();
    if homes.iter().all(Option::is_none) {
        return false;
    }
    // SAFETY: a header of the caller's, which lends it for the call.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(msg) };
    while !at.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR point to headers inside the buffer.
        let header = unsafe { at.read_unaligned() };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: as above; the length is the kernel's to judge, and none beyond the buffer is read here.
            let (data, end) = unsafe {
                let data = libc::CMSG_DATA(at);
                let whole = (at as usize).saturating_add(header.cmsg_len);
                let end = whole.min((msg.msg_control as usize).saturating_add(msg.msg_controllen));
                (data, end)
            };
            let fds = end.saturating_sub(data as usize) / size_of::<i32>();
            for n in 0..fds {
                // SAFETY: inside the buffer, as was just counted.
                let fd = unsafe { data.cast::<i32>().add(n).read_unaligned() };
                if identity(fd).is_some_and(|id| homes.contains(&Some(id))) {
                    return true;
                }
            }
        }
        // SAFETY: as of CMSG_FIRSTHDR.
        at = unsafe { libc::CMSG_NXTHDR(msg, at) };
    }
    false
}

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
    use super::*;

    #[test]
    fn what_is_kept_stays_so_and_what_is_no_message_with_descriptors_goes_by() {
        // SAFETY: a message of nothing.
        let empty: libc::msghdr = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        assert!(!unsafe { is_refused(&empty) });
        assert_eq!((keep(), keep()), (Ok(()), Ok(())));
        // SAFETY: as above.
        assert!(!unsafe { is_refused(&empty) });
        assert_eq!((identity(-1), identity(i32::MAX)), (None, None));
    }
}
