//! The operations on a userfaultfd, one kernel call each.

use std::ffi::c_ulong;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;

use ballast_units::{Bytes, HostAddr};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, ReadWriteFlags};

use crate::{Event, Features, HandshakeError, Ioctls, Modes, Uffd, UffdError, abi};

/// Messages fetched by one [`Uffd::read_events`] at most.
pub const EVENTS_PER_READ: usize = 64;

/// Threads that stand still for their pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiters {
    /// Their faults have not been read yet.
    pub unread: u64,
    /// Their faults have been read, and nobody has woken them since.
    pub read: u64,
}

/// How a page is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOpts {
    /// Wake the threads that wait for it.
    pub wake: bool,
    /// Write-protect it in the same step, so that no write is missed in between.
    pub protect: bool,
}

impl Uffd {
    /// Agrees on features, once in a userfaultfd's life and before all else. Returns all that the
    /// kernel has, which includes `wanted`.
    ///
    /// # Errors
    /// As [`HandshakeError`] says. A refusal leaves the userfaultfd as it was: fewer may be asked for.
    pub fn handshake(&self, wanted: Features) -> Result<Features, HandshakeError> {
        let mut arg = abi::ApiArg { api: abi::API_VERSION, features: wanted.bits(), ioctls: 0 };
        self.ioctl(abi::API, &mut arg).map_err(|e| HandshakeError::new(wanted, e))?;
        Ok(Features::from_bits_retain(arg.features))
    }

    /// Delivers the faults of [start, start + len) here: of the process that created the fd, whoever
    /// calls. Registering again adds nothing and does no harm.
    ///
    /// # Errors
    /// `Other` with EINVAL (not one whole run of mappings that can be registered), EBUSY (belongs
    /// to another userfaultfd), EPERM (shared mapping of a file that was not opened for writing);
    /// `NoMemory` also when the process is gone.
    ///
    /// # Safety
    /// Where this is the process that made the userfaultfd, no reference leads into the range, but to atomics: what is missing there
    /// becomes whatever is copied to it, at any time, by whoever holds the descriptor.
    pub unsafe fn register(
        &self,
        start: HostAddr,
        len: Bytes,
        modes: Modes,
    ) -> Result<Ioctls, UffdError> {
        let mut arg =
            abi::RegisterArg { range: range(start, len.0), mode: modes.bits(), ioctls: 0 };
        self.op("register", abi::REGISTER, &mut arg)?;
        Ok(Ioctls::from_bits_retain(arg.ioctls))
    }

    /// Ends the delivery of faults of [start, start + len), and wakes who waits there.
    ///
    /// # Errors
    /// `Other` with EINVAL (not whole pages, or nothing is mapped there that could be registered),
    /// `NoMemory` also when the process is gone.
    pub fn unregister(&self, start: HostAddr, len: Bytes) -> Result<(), UffdError> {
        self.op("unregister", abi::UNREGISTER, &mut range(start, len.0))
    }

    /// Fills missing pages from `dst` on with `src` (whole pages), atomically for each page.
    ///
    /// Returns the bytes done, at least one page. Less than `src.len()` means that the next page
    /// could not be filled: calling again with the rest tells why. Pages done are also woken
    /// (if asked) when not all was done; none is woken on an error.
    ///
    /// # Errors
    /// No page was filled. Any [`UffdError`]: `Exists` for a first page that is there, `Again` while the
    /// process changes its mappings, `Other` with EINVAL for a `dst` or length that is not whole pages.
    pub fn copy(&self, dst: HostAddr, src: &[u8], opts: CopyOpts) -> Result<usize, UffdError> {
        let mut mode = 0;
        if !opts.wake {
            mode |= abi::COPY_MODE_DONTWAKE;
        }
        if opts.protect {
            mode |= abi::COPY_MODE_WP;
        }
        let mut arg = abi::CopyArg {
            dst: dst.0,
            src: src.as_ptr() as u64,
            len: src.len() as u64,
            mode,
            copy: 0,
        };
        let result = self.ioctl(abi::COPY, &mut arg);
        bytes_done("copy", result, arg.copy, src.len())
    }

    /// Fills `len` bytes of missing pages from `dst` on with zeros. In shared memory this allocates
    /// pages; in private memory it maps the kernel's zero page. Returns the bytes done, as of
    /// [`Uffd::copy`].
    ///
    /// # Errors
    /// As of [`Uffd::copy`].
    pub fn zeropage(&self, dst: HostAddr, len: usize, wake: bool) -> Result<usize, UffdError> {
        let mode = if wake { 0 } else { abi::ZEROPAGE_MODE_DONTWAKE };
        let mut arg = abi::ZeropageArg { range: range(dst, len as u64), mode, zeropage: 0 };
        let result = self.ioctl(abi::ZEROPAGE, &mut arg);
        bytes_done("zeropage", result, arg.zeropage, len)
    }

    /// From its return on, no write to [start, start + len) succeeds before it is unprotected.
    /// Pages of shared memory that are not in the page table are protected too; a page that is
    /// filled later, by [`Uffd::copy`] without `protect`, is not.
    ///
    /// # Errors
    /// `NotRegistered` (part of the range is not, with [`Modes::WP`]), `Again`, `Gone`, or `Other` with
    /// EINVAL (not whole pages). Part of the range may be protected then.
    pub fn protect(&self, start: HostAddr, len: Bytes) -> Result<(), UffdError> {
        let mut arg =
            abi::WriteprotectArg { range: range(start, len.0), mode: abi::WRITEPROTECT_MODE_WP };
        self.op("write-protect", abi::WRITEPROTECT, &mut arg)
    }

    /// Allows writes to [start, start + len) again. Without `wake`, writers that wait go on waiting.
    ///
    /// # Errors
    /// As of [`Uffd::protect`].
    pub fn unprotect(&self, start: HostAddr, len: Bytes, wake: bool) -> Result<(), UffdError> {
        let mode = if wake { 0 } else { abi::WRITEPROTECT_MODE_DONTWAKE };
        let mut arg = abi::WriteprotectArg { range: range(start, len.0), mode };
        self.op("un-protect", abi::WRITEPROTECT, &mut arg)
    }

    /// Lets the threads that wait in [start, start + len) try their access again. A thread that
    /// finds its page still missing or protected faults again, with a new event.
    ///
    /// # Errors
    /// `Other` with EINVAL: not whole pages.
    pub fn wake(&self, start: HostAddr, len: Bytes) -> Result<(), UffdError> {
        self.op("wake", abi::WAKE, &mut range(start, len.0))
    }

    /// Who waits just now, in any part of it: as the kernel tells in `/proc/self/fdinfo`.
    ///
    /// # Errors
    /// There is no `/proc` to be read, or it tells something else.
    pub fn waiters(&self) -> io::Result<Waiters> {
        let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.as_raw_fd()))?;
        waiters_in(&told).ok_or_else(|| io::Error::other("its fdinfo does not tell who waits"))
    }

    /// Appends what the kernel has to tell, up to [`EVENTS_PER_READ`] events, and returns how many;
    /// Ok(0) means nothing now (poll for readability). Never blocks, even where another process that holds this
    /// userfaultfd makes it blocking. (Before Linux 6.10, it can if that happens just then.)
    ///
    /// # Errors
    /// EINVAL before the handshake; EMFILE where a fork's descriptor finds no place.
    pub fn read_events(&self, out: &mut Vec<Event>) -> io::Result<usize> {
        let mut buf = [[0u8; abi::MSG_SIZE]; EVENTS_PER_READ];
        // What comes out of the kernel owns descriptors (fork), so nothing may fail after the read.
        out.reserve(EVENTS_PER_READ);
        let bytes = loop {
            match self.read_now(buf.as_flattened_mut()) {
                Ok(n) => break n,
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
        };
        let count = bytes / abi::MSG_SIZE;
        for msg in &buf[..count] {
            // SAFETY: read from a userfaultfd just now, decoded here only.
            out.push(unsafe { Event::decode(msg) });
        }
        Ok(count)
    }

    /// As `read` of a descriptor that is not blocking, whether this one is or not: that is a property it has in common
    /// with all its duplicates, a hostile VMM's among them.
    fn read_now(&self, buf: &mut [u8]) -> Result<usize, Errno> {
        // Where it is, for a file that has no places.
        let here = u64::MAX;
        let parts = &mut [IoSliceMut::new(buf)];
        match rustix::io::preadv2(&self.fd, parts, here, ReadWriteFlags::NOWAIT) {
            // Not of a userfaultfd, before Linux 6.10.
            Err(Errno::OPNOTSUPP) => {}
            other => return other,
        }
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default()))?;
        // An error tells of one that is blocking.
        if fds[0].revents() != PollFlags::IN {
            return Err(Errno::AGAIN);
        }
        rustix::io::read(&self.fd, buf)
    }

    fn op<T>(&self, op: &'static str, request: c_ulong, arg: &mut T) -> Result<(), UffdError> {
        self.ioctl(request, arg).map_err(|e| UffdError::new(op, e))
    }

    /// One ioctl. Private: `request` and `T` must belong together, as the const assertions of
    /// [`abi`] tie them.
    fn ioctl<T>(&self, request: c_ulong, arg: &mut T) -> Result<(), Errno> {
        // SAFETY: every caller passes the structure that the request's number was computed from, so
        // the kernel reads and writes inside `arg`. What the request does to the memory of the
        // process is fill pages that are missing or change protections, in what was registered: its
        // registration says that nothing refers to it. A page that is present never changes content.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, std::ptr::from_mut(arg)) };
        if result < 0 {
            return Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO));
        }
        Ok(())
    }
}

/// "pending" are those that have not been read, "total" all.
fn waiters_in(told: &str) -> Option<Waiters> {
    let number = |name: &str| -> Option<u64> {
        let rest = told.lines().find_map(|line| line.strip_prefix(name))?;
        rest.trim().parse().ok()
    };
    let (unread, all) = (number("pending:")?, number("total:")?);
    Some(Waiters { unread, read: all.checked_sub(unread)? })
}

fn range(start: HostAddr, len: u64) -> abi::Range {
    abi::Range { start: start.0, len }
}

/// The kernel answers a part done with EAGAIN and the count, as it answers "mappings are changing"
/// with EAGAIN and no count.
fn bytes_done(
    op: &'static str,
    result: Result<(), Errno>,
    done: i64,
    len: usize,
) -> Result<usize, UffdError> {
    match result {
        Ok(()) => Ok(len),
        Err(_) if done > 0 => Ok(done as usize),
        Err(e) => Err(UffdError::new(op, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_told_by_the_kernel_in_words() {
        let told = "pos:\t0\nflags:\t02000002\npending:\t3\ntotal:\t5\nAPI:\taa:1:2\n";
        assert_eq!(waiters_in(told), Some(Waiters { unread: 3, read: 2 }));
        for wrong in ["", "pending:\t3\n", "pending:\t3\ntotal:\tx\n", "pending:\t3\ntotal:\t2\n"] {
            assert_eq!(waiters_in(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn partial_progress_is_told_from_changing_mappings() {
        assert_eq!(bytes_done("copy", Ok(()), 8192, 8192), Ok(8192));
        assert_eq!(bytes_done("copy", Err(Errno::AGAIN), 4096, 8192), Ok(4096));
        assert_eq!(bytes_done("copy", Err(Errno::AGAIN), 0, 8192), Err(UffdError::Again));
        let changing = -i64::from(libc::EAGAIN);
        assert_eq!(bytes_done("copy", Err(Errno::AGAIN), changing, 8192), Err(UffdError::Again));
        assert_eq!(bytes_done("copy", Err(Errno::EXIST), -17, 8192), Err(UffdError::Exists));
        assert_eq!(
            bytes_done("copy", Err(Errno::INVAL), 0, 1),
            Err(UffdError::Other { op: "copy", errno: libc::EINVAL })
        );
    }
}
