//! The kernel's userfaultfd interface, as thin and as safe as it can be made.
//!
//! A [`Uffd`] stands for one userfaultfd object: the faults of one process (the one that created
//! it), in the ranges registered with it. The fd may be handed to another process; every call here
//! works from there, and addresses are always addresses *in the process that created it*.
//!
//! | file | concept |
//! | --- | --- |
//! | `abi` | numbers and layouts of `linux/userfaultfd.h`, sizes pinned by const assertions |
//! | `flags` | features, registration modes, available ioctls |
//! | `event` | the 32-byte messages read from the fd, decoded |
//! | `error` | errno becomes domain meaning, in one place |
//! | `device` | where a new userfaultfd comes from |
//! | `ops` | handshake, registration, filling, protecting, waking, reading |
//! | `needed` | what the kernel must be able to do for a VM to be paged |
//! | `procmap` | what /proc tells about the mappings of a process |
//!
//! The kernel's own documentation: `Documentation/admin-guide/mm/userfaultfd.rst`, userfaultfd(2),
//! ioctl_userfaultfd(2). Why not a published wrapper: docs/adr/0002-own-userfaultfd-wrapper.md.

#![warn(missing_docs)]

mod abi;
mod device;
mod error;
mod event;
mod flags;
mod needed;
mod ops;
pub mod procmap;

pub use device::{DEVICE_PATH, is_link};
pub use error::{HandshakeError, UffdError};
pub use event::Event;
pub use flags::{Features, Ioctls, Modes};
pub use needed::{NEEDED, missing};
pub use ops::{CopyOpts, EVENTS_PER_READ, Waiters};

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// A userfaultfd. All operations take `&self` and may be called from any number of threads at once:
/// the kernel serialises what must be.
///
/// Dropping the last descriptor of a userfaultfd, in whatever process, unregisters everything and
/// wakes all waiting threads: their faults then see what the kernel would have shown without us
/// (zeros, for a page that was evicted). Whoever evicted pages must therefore keep a duplicate.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Another descriptor of the same userfaultfd (close-on-exec).
    ///
    /// # Errors
    /// EMFILE, ENFILE: no descriptor is left.
    pub fn try_clone(&self) -> std::io::Result<Uffd> {
        Ok(Uffd { fd: self.fd.try_clone()? })
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> OwnedFd {
        uffd.fd
    }
}
