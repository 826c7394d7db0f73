//! A process that can be watched, signalled and, if it is a child, reaped, by its pidfd: never by a
//! number that another process may have by now.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this status.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It is gone; only its parent knows how.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(0) => f.write_str("ended normally"),
            Exit::Code(code) => write!(f, "ended with status {code}"),
            Exit::Signal(9) => f.write_str("was killed"),
            Exit::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Exit::Unknown => f.write_str("is gone"),
        }
    }
}

/// Cheap to clone. Dropping it leaves the process alone.
#[derive(Clone, Debug)]
pub struct ProcessHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    /// Set once: by the first caller that finds the process ended.
    exit: Mutex<Option<Exit>>,
}

impl ProcessHandle {
    /// A handle of any process, whoever started it.
    ///
    /// # Errors
    /// ESRCH: there is no such process. Others of pidfd_open; and whenever it is called outside a tokio runtime.
    pub fn open(pid: u32) -> io::Result<ProcessHandle> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let pidfd = pidfd_open(number, PidfdFlags::NONBLOCK)?;
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(io::Error::other("a process can be watched inside a tokio runtime only"));
        }
        // SAFETY: an OwnedFd is an open descriptor that always returns the same number; it is moved
        // into the AsyncFd and only borrowed from it, so it stays open until the AsyncFd is dropped.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(ProcessHandle(Arc::new(Inner { pid, pidfd, exit: Mutex::new(None) })))
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.0.pid
    }

    /// For poll loops of others; readable once the process has ended.
    pub fn pidfd(&self) -> &OwnedFd {
        self.0.pidfd.get_ref()
    }

    /// Returns when the process has ended, at once if it has. A child is reaped.
    pub async fn exited(&self) -> Exit {
        loop {
            // Readiness is never cleared: a pidfd that became readable stays so.
            if self.0.pidfd.readable().await.is_err() {
                // The runtime is shutting down; only then does tokio fail here.
                return Exit::Unknown;
            }
            if let Some(exit) = self.try_exit() {
                return exit;
            }
            tokio::task::yield_now().await;
        }
    }

    /// How the process ended; None while it runs. A child is reaped.
    pub fn try_exit(&self) -> Option<Exit> {
        let mut exit = self.0.exit.lock().unwrap_or_else(PoisonError::into_inner);
        if exit.is_none() && self.has_ended() {
            *exit = Some(self.reap());
        }
        *exit
    }

    /// Whether it lives and has this number: that of one that has ended may be another's.
    pub fn is(&self, pid: u32) -> bool {
        self.pid() == pid && self.is_alive()
    }

    /// Whether it runs still.
    pub fn is_alive(&self) -> bool {
        self.try_exit().is_none()
    }

    /// SIGKILL, the one signal that a VMM whose vCPU waits in a page fault obeys. A process that
    /// has ended already is success.
    ///
    /// # Errors
    /// As of [`ProcessHandle::signal`].
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Sends `signal`; a process that has ended already is success.
    ///
    /// # Errors
    /// EPERM: the process is not ours to signal.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(self.pidfd(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1))
    }

    fn reap(&self) -> Exit {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        match waitid(WaitId::PidFd(self.pidfd().as_fd()), options) {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal(signal),
                (None, None) => Exit::Unknown,
            },
            // ECHILD: somebody else's child.
            Ok(None) | Err(_) => Exit::Unknown,
        }
    }
}
