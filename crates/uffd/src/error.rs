//! errno becomes domain meaning, here and nowhere else.

use rustix::io::Errno;

use crate::Features;

/// Why an operation on a range did nothing. (What did something, but not all, is not an error: it
/// returns how much it did.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UffdError {
    /// The process is changing its mappings, or a REMOVE, REMAP, UNMAP or FORK event waits to be
    /// read. Read events, then try again. Caused by the VMM process (a balloon, say), never by us.
    #[error("userfaultfd: the process is changing its mappings; read the pending events and retry")]
    Again,
    /// A page is there already. Waiters were *not* woken.
    #[error("userfaultfd: the page is present already")]
    Exists,
    /// The process (its address space) is gone.
    #[error("userfaultfd: the process is gone")]
    Gone,
    /// Nothing is mapped there, or it is not registered with this userfaultfd in the needed mode.
    #[error("userfaultfd: the range is not registered")]
    NotRegistered,
    /// The kernel had no memory for it, or the file's filesystem or cgroup is full.
    #[error("userfaultfd: no memory for the page")]
    NoMemory,
    /// A mistake in the arguments (EINVAL: not page-aligned, empty; EFAULT: beyond the end of the
    /// mapped file), or a range that belongs to another userfaultfd (EBUSY).
    #[error("userfaultfd: {op}: {}", std::io::Error::from_raw_os_error(*.errno))]
    Other {
        /// The operation: "register", "write-protect".
        op: &'static str,
        /// As the kernel gave it, above 0.
        errno: i32,
    },
}

impl UffdError {
    pub(crate) fn new(op: &'static str, errno: Errno) -> UffdError {
        match errno {
            Errno::AGAIN => UffdError::Again,
            Errno::EXIST => UffdError::Exists,
            Errno::SRCH => UffdError::Gone,
            Errno::NOENT => UffdError::NotRegistered,
            Errno::NOMEM | Errno::NOSPC => UffdError::NoMemory,
            other => UffdError::Other { op, errno: other.raw_os_error() },
        }
    }

    /// The errno the kernel gave (for messages that cross a process boundary); ENOMEM for ENOSPC.
    pub fn errno(&self) -> i32 {
        match self {
            UffdError::Again => Errno::AGAIN.raw_os_error(),
            UffdError::Exists => Errno::EXIST.raw_os_error(),
            UffdError::Gone => Errno::SRCH.raw_os_error(),
            UffdError::NotRegistered => Errno::NOENT.raw_os_error(),
            UffdError::NoMemory => Errno::NOMEM.raw_os_error(),
            UffdError::Other { errno, .. } => *errno,
        }
    }
}

/// Why the kernel and we did not agree on features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The kernel lacks one of them, or the handshake was done already.
    #[error(
        "userfaultfd: the kernel lacks a feature of {wanted:?}, or this fd shook hands already"
    )]
    Unsupported {
        /// All that were asked for; which of them lacks, the kernel does not tell.
        wanted: Features,
    },
    /// EVENT_FORK without CAP_SYS_PTRACE.
    #[error("userfaultfd: no permission for a feature of {wanted:?}")]
    Forbidden {
        /// All that were asked for.
        wanted: Features,
    },
    /// Anything else (EFAULT): a mistake of ours.
    #[error("userfaultfd: handshake: {}", std::io::Error::from_raw_os_error(*.errno))]
    Other {
        /// As the kernel gave it, above 0.
        errno: i32,
    },
}

impl HandshakeError {
    pub(crate) fn new(wanted: Features, errno: Errno) -> HandshakeError {
        match errno {
            Errno::INVAL => HandshakeError::Unsupported { wanted },
            Errno::PERM => HandshakeError::Forbidden { wanted },
            other => HandshakeError::Other { errno: other.raw_os_error() },
        }
    }

    /// The errno the kernel gave, as of [`UffdError::errno`].
    pub fn errno(&self) -> i32 {
        match self {
            HandshakeError::Unsupported { .. } => Errno::INVAL.raw_os_error(),
            HandshakeError::Forbidden { .. } => Errno::PERM.raw_os_error(),
            HandshakeError::Other { errno } => *errno,
        }
    }
}
