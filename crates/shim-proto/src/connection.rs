//! Messages and descriptors over a SOCK_SEQPACKET Unix socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sockopt::Timeout,
};

use crate::{DecodeError, MAX_FDS, MAX_MESSAGE, Message, strangers};

/// How long who connects waits where the queue of those that do is full.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a peer that does not read may hold up a sender.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Room for the descriptors of any message that this side sends.
const CONTROL: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));
/// Room for as many as one message can carry at all (SCM_MAX_FD): those for which there is no room the kernel throws
/// away, in the thread that receives.
const ALL_CONTROL: usize = rustix::cmsg_space!(ScmRights(253));

/// One end of a conversation.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
    /// The user at the other end, if what comes from there is not trusted.
    stranger: Option<u32>,
}

/// Why nothing was sent or received.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ConnectionError {
    /// The other side is gone, or closed the conversation.
    #[error("the other side closed the connection")]
    Closed,
    #[error("no message within {0:?}")]
    TimedOut(Duration),
    /// The other side sent what the protocol does not know.
    #[error("bad message: {0}")]
    Decode(#[from] DecodeError),
    /// What travelled with the message is of no kind that it may have. It stays open.
    #[error("{} with a descriptor that is neither memory (a memfd, a file on a tmpfs) nor a userfaultfd: {what}", message.name())]
    Strange { message: Box<Message>, what: String },
    /// Some of its descriptors are gone.
    #[error("{}: no room for its descriptors, or too many strange ones came of its user", .0.name())]
    Lost(Box<Message>),
    #[error("shim socket: {0}")]
    Io(#[from] std::io::Error),
}

impl ConnectionError {
    /// The number of a batch that came without its descriptors: the conversation is not over.
    pub fn lost_batch(&self) -> Option<u64> {
        match self {
            ConnectionError::Lost(message) => match &**message {
                Message::Batch(batch) => Some(batch.id),
                _ => None,
            },
            _ => None,
        }
    }
}

impl From<Errno> for ConnectionError {
    fn from(e: Errno) -> ConnectionError {
        match e {
            Errno::PIPE | Errno::CONNRESET => ConnectionError::Closed,
            other => ConnectionError::Io(other.into()),
        }
    }
}

/// Who is at the other end, by the kernel's word (SO_PEERCRED): at the time it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Connection {
    /// Tests: a new connection to the socket at `path`.
    ///
    /// # Errors
    /// As of [`Connection::connect_to`]; or there is no descriptor left.
    pub fn connect(path: &Path) -> std::io::Result<Connection> {
        let connection = Connection::from_fd(socket()?);
        connection.connect_to(path)?;
        Ok(connection)
    }

    /// A socket that is not connected yet: for who must know its descriptor before anyone else can
    /// hold the other end (the shim, whose process may fork at any time).
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn unconnected() -> std::io::Result<Connection> {
        Ok(Connection::from_fd(socket()?))
    }

    /// Connects this one.
    ///
    /// # Errors
    /// There is no such socket, nobody listens on it, or it is not ours to connect to; or a path too long for one. Who
    /// listens has taken in nobody for 2 s, and more wait than may.
    pub fn connect_to(&self, path: &Path) -> std::io::Result<()> {
        rustix::net::sockopt::set_socket_timeout(&self.fd, Timeout::Send, Some(CONNECT_TIMEOUT))?;
        rustix::net::connect(&self.fd, &SocketAddrUnix::new(path)?)?;
        Ok(())
    }

    /// Tests: takes a connected SOCK_SEQPACKET socket.
    pub fn from_fd(fd: OwnedFd) -> Connection {
        Connection { fd, stranger: None }
    }

    /// Tests: two ends, connected to one another.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn pair() -> std::io::Result<(Connection, Connection)> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Connection::from_fd(a), Connection::from_fd(b)))
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// What the system said.
    pub fn peer(&self) -> std::io::Result<Peer> {
        // Not by rustix, for which a number cannot be zero: that of a process outside of this PID namespace is.
        let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let (fd, at) = (self.fd.as_raw_fd(), (&raw mut cred).cast());
        // SAFETY: `at` has room for `len` bytes, of which any are a valid ucred.
        let done =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, at, &mut len) };
        if done != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let Some(pid) = u32::try_from(cred.pid).ok().filter(|pid| *pid > 0) else {
            return Err(std::io::Error::other("its process is not to be seen from here"));
        };
        Ok(Peer { pid, uid: cred.uid, gid: cred.gid })
    }

    /// Sends one message with its descriptors (duplicated by the kernel, not closed). Waits up to
    /// 5 s for a peer that does not read.
    ///
    /// # Errors
    /// `Decode(Descriptors)`: not the number of descriptors that belongs to the message; a mistake
    /// of the caller.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), ConnectionError> {
        self.send_within(SEND_TIMEOUT, message, fds)
    }

    /// The same, with `patience` for a peer that does not read.
    ///
    /// # Errors
    /// As of [`Connection::send`].
    pub fn send_within(
        &self,
        patience: Duration,
        message: &Message,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ConnectionError> {
        check_descriptors(message, fds.len())?;
        let bytes = message.encode();
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            // Cannot fail: the space is computed from the limit that was just checked.
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let deadline = Instant::now() + patience;
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::OUT, Some(deadline))? {
                        return Err(ConnectionError::TimedOut(patience));
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The next message with its descriptors (close-on-exec). None: waits for ever.
    ///
    /// After `Decode` the conversation is over; after `TimedOut` it is not.
    ///
    /// What comes over a connection that [`Listener::accept`] gave is memory or a userfaultfd, or the message is an
    /// error: no other descriptor is closed, or looked at, since that may never end.
    ///
    /// # Errors
    /// The other end is gone, sent what is no message or descriptors that do not belong to it, or sent nothing in time.
    pub fn recv(
        &self,
        timeout: Option<Duration>,
    ) -> Result<(Message, Vec<OwnedFd>), ConnectionError> {
        let deadline = timeout.map(|t| Instant::now() + t);
        // One byte more than the longest message, so that a longer one is not taken for one.
        let mut bytes = [0; MAX_MESSAGE + 1];
        let mut space = [MaybeUninit::uninit(); ALL_CONTROL];
        loop {
            // Each time: while this one waited, others may have sent too many.
            let room = match self.stranger {
                Some(uid) if !strangers::is_welcome(uid) => 0,
                _ => ALL_CONTROL,
            };
            let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let mut iov = [IoSliceMut::new(&mut bytes)];
            let received = match rustix::net::recvmsg(&self.fd, &mut iov, &mut control, flags) {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => match self.wait(PollFlags::IN, deadline)? {
                    true => continue,
                    false => return Err(ConnectionError::TimedOut(timeout.unwrap_or_default())),
                },
                Err(e) => return Err(e.into()),
            };
            let mut fds = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            // Before anything else: whatever returns drops them.
            let fds = match self.stranger {
                Some(uid) => strangers::sort_out(fds, uid),
                None => Ok(fds),
            };
            if received.bytes == 0 {
                return Err(ConnectionError::Closed);
            }
            let message = Message::decode(&bytes[..received.bytes])?;
            let fds = match fds {
                Ok(fds) => fds,
                Err(what) => {
                    return Err(ConnectionError::Strange { message: Box::new(message), what });
                }
            };
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(ConnectionError::Lost(Box::new(message)));
            }
            check_descriptors(&message, fds.len())?;
            return Ok((message, fds));
        }
    }

    /// Waits for `what` or the end of the conversation; false: the deadline came first.
    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> Result<bool, ConnectionError> {
        wait(self.fd.as_fd(), what, deadline)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> OwnedFd {
        connection.fd
    }
}

/// Where the manager waits for shims. The socket file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
}

impl Listener {
    /// # Errors
    /// EADDRINUSE: the path exists (whoever binds must know that nobody listens there any more
    /// before removing it).
    pub fn bind(path: &Path) -> std::io::Result<Listener> {
        let fd = socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        let listener = Listener { fd, path: path.to_owned() };
        rustix::net::listen(&listener.fd, 64)?;
        Ok(listener)
    }

    /// The next shim. None: waits for ever.
    ///
    /// # Errors
    /// Nobody came in time, or what the system said.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Connection, ConnectionError> {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            if !wait(self.fd.as_fd(), PollFlags::IN, deadline)? {
                return Err(ConnectionError::TimedOut(timeout.unwrap_or_default()));
            }
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
                Ok(fd) => {
                    let mut connection = Connection::from_fd(fd);
                    // One of whom nothing is known (of another PID namespace) is hung up on, and others are listened to.
                    if let Ok(peer) = connection.peer() {
                        connection.stranger = Some(peer.uid);
                        return Ok(connection);
                    }
                }
                Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Best effort: what remains is a name nobody listens at.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn socket() -> std::io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

fn check_descriptors(message: &Message, got: usize) -> Result<(), DecodeError> {
    let (least, most) = message.descriptors();
    if (least..=most).contains(&got) {
        Ok(())
    } else {
        Err(DecodeError::Descriptors { message: message.name(), got })
    }
}

fn wait(
    fd: BorrowedFd<'_>,
    what: PollFlags,
    deadline: Option<Instant>,
) -> Result<bool, ConnectionError> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|d| Timespec::try_from(d).ok());
        match poll(&mut [PollFd::from_borrowed_fd(fd, what)], timeout.as_ref()) {
            Ok(0) if left.is_some_and(|d| d.is_zero()) => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            // Readable, writable or broken: the next call tells.
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
