//! Where a new userfaultfd comes from.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::mm::UserfaultfdFlags;

use crate::{Uffd, abi};

/// Whoever may open it may create userfaultfds that handle kernel-mode faults too (6.1).
pub const DEVICE_PATH: &str = "/dev/userfaultfd";

/// Whether a link in /proc/PID/fd is that of a userfaultfd: what has a path begins with a slash, so no file is taken for
/// one. `ballast_shim_proto`, which may not depend on this, goes by the same.
pub fn is_link(link: &[u8]) -> bool {
    link == b"anon_inode:[userfaultfd]"
}

impl Uffd {
    /// A new userfaultfd of the calling process from an open /dev/userfaultfd, which may have been
    /// opened by, and received from, a process with more rights.
    ///
    /// # Errors
    /// ENOTTY: `dev` is not that device.
    pub fn from_device(dev: BorrowedFd<'_>) -> io::Result<Uffd> {
        let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as libc::c_ulong;
        // SAFETY: this ioctl takes an integer and touches no memory of ours.
        let fd = unsafe { libc::ioctl(dev.as_raw_fd(), abi::NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us alone.
        Ok(Uffd { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// A new userfaultfd of the calling process: from the device, else by the system call (which
    /// needs CAP_SYS_PTRACE, unless vm.unprivileged_userfaultfd is set). One that could not handle
    /// kernel-mode faults is never returned: KVM and system calls touch guest memory from there.
    ///
    /// # Errors
    /// What the system call said: EPERM without the right, ENOSYS without the feature.
    pub fn open() -> io::Result<Uffd> {
        match rustix::fs::open(DEVICE_PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(dev) => Uffd::from_device(dev.as_fd()),
            Err(_) => {
                // SAFETY: creating a userfaultfd has no effect until ranges are registered.
                let fd = unsafe {
                    rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK)
                }?;
                Ok(Uffd { fd })
            }
        }
    }

    /// Takes a descriptor that came from another process, which is not trusted to have sent what it
    /// should: it is looked at, and made non-blocking.
    ///
    /// # Errors
    /// `InvalidInput`: it is not a userfaultfd.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Uffd> {
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        if !is_link(link.to_bytes()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("expected a userfaultfd, got {}", link.to_string_lossy()),
            ));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Uffd { fd })
    }
}
