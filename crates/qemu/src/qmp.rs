//! QMP, QEMU's JSON protocol, with a deadline on every command.
//!
//! One task owns the connection. It never has more than [`WINDOW`] commands at QEMU, so a QEMU
//! that is frozen in a page fault finds no more than these to carry out when it thaws; a command
//! whose caller gave up before it was sent is not sent at all. One that talks without end is hung up on. docs/adr/0003-qmp-client.md says why
//! this is not the `qapi` crate.

mod connection;
mod flood;
mod message;

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

pub(crate) use connection::heard;
use connection::{Connection, Request};

/// The longest line accepted, bytes. QEMU's longest (the schema) has some 200,000.
pub const MAX_LINE: usize = 1 << 20;
/// Commands at QEMU at a time; it queues 8 of them itself.
const WINDOW: usize = 8;
/// Commands that wait to be sent; who finds the queue full waits, up to its deadline.
const QUEUE: usize = 64;
/// Events kept for a receiver that lags.
const EVENTS: usize = 256;

/// Why a command brought no result.
#[derive(Clone, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum QmpError {
    #[error("cannot connect to QMP at {}: {source}", .socket.display())]
    Connect { socket: PathBuf, source: Arc<io::Error> },
    #[error(
        "no QMP greeting at {} within {} ms (QEMU frozen, or another client connected to it)",
        .socket.display(), .after.as_millis()
    )]
    NoGreeting { socket: PathBuf, after: Duration },
    #[error("QEMU at {} did not answer {command} within {} ms", .socket.display(), .after.as_millis())]
    Deadline { socket: PathBuf, command: String, after: Duration },
    /// QEMU understood and refused.
    #[error("QEMU at {} refused {command}: {description}", .socket.display())]
    Refused { socket: PathBuf, command: String, class: String, description: String },
    #[error("QMP at {} is closed: {why}", .socket.display())]
    Closed { socket: PathBuf, why: Arc<str> },
    /// The answer is JSON, but not what this command answers.
    #[error("QEMU at {} answered {command} with {answer}", .socket.display())]
    Unexpected { socket: PathBuf, command: String, answer: String },
}

/// Something that QEMU told unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct QmpEvent {
    /// "SHUTDOWN", "BALLOON_CHANGE", or one that this version of Ballast does not know.
    pub name: String,
    /// Of its data, all that anybody reads: why QEMU shuts down.
    pub reason: Option<String>,
}

/// A connection to one QEMU. Cheap to clone; closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Qmp {
    socket: Arc<Path>,
    pid: Option<u32>,
    requests: mpsc::Sender<Request>,
    /// Weak, so that receivers learn of the end of the connection.
    events: broadcast::WeakSender<QmpEvent>,
    closed: watch::Receiver<Option<Arc<str>>>,
    /// Tells the task that the last clone is gone, also while it takes no requests.
    _in_use: Arc<oneshot::Sender<Infallible>>,
}

/// The process that listens on a QMP socket, whoever started it.
///
/// # Errors
/// There is no such socket, nobody listens on it, or it did not answer in time.
pub async fn listener_pid(socket: &Path, deadline: Duration) -> std::io::Result<u32> {
    let stream = timeout_at(Instant::now() + deadline, dial(socket))
        .await
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    let pid = stream.peer_cred()?.pid();
    pid.map(i32::unsigned_abs).ok_or_else(|| std::io::Error::other("who listens is not told"))
}

/// QEMU lets one client in and one more wait; a third is turned away until it has looked.
async fn dial(socket: &Path) -> std::io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket).await {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    }
}

impl Qmp {
    /// Connects and negotiates, once: a socket that does not exist (yet) is an error at once.
    ///
    /// # Errors
    /// There is no such socket, it did not answer within `deadline`, or not as QMP does.
    pub async fn connect(socket: &Path, deadline: Duration) -> Result<Qmp, QmpError> {
        let end = Instant::now() + deadline;
        let late = || QmpError::NoGreeting { socket: socket.to_owned(), after: deadline };
        let stream = timeout_at(end, dial(socket))
            .await
            .map_err(|_| late())?
            .map_err(|e| QmpError::Connect { socket: socket.to_owned(), source: Arc::new(e) })?;
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).map(i32::unsigned_abs);
        let (requests, queue) = mpsc::channel(QUEUE);
        let (events, _) = broadcast::channel(EVENTS);
        let (closing, closed) = watch::channel(None);
        let (greeted, greeting) = oneshot::channel();
        let (in_use, unused) = oneshot::channel();
        let weak = events.downgrade();
        let connection = Connection::new(queue, unused, events, greeted);
        tokio::spawn(async move {
            let why = connection.run(stream).await;
            tracing::debug!(%why, "QMP connection ended");
            closing.send_replace(Some(why));
        });
        let qmp = Qmp {
            socket: socket.into(),
            pid,
            requests,
            events: weak,
            closed,
            _in_use: in_use.into(),
        };
        match timeout_at(end, greeting).await {
            Err(_) => return Err(late()),
            Ok(Err(_)) => return Err(qmp.closed_error().await),
            Ok(Ok(())) => {}
        }
        let left = end.saturating_duration_since(Instant::now());
        qmp.execute("qmp_capabilities", Value::Null, left).await?;
        Ok(qmp)
    }

    /// The process that listens there, by the kernel's word. None: it was not told.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Runs one command. `args` is an object, or null for none. After an error other than
    /// [`QmpError::Refused`] QEMU may or may not have carried it out, or may do so later.
    ///
    /// # Errors
    /// [`QmpError::Refused`]: QEMU did not do it. All others: no answer came in time, or none that is understood, or QEMU is
    /// gone.
    pub async fn execute(
        &self,
        command: &str,
        args: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let end = Instant::now() + deadline;
        let late = |_| QmpError::Deadline {
            socket: self.socket.to_path_buf(),
            command: command.to_owned(),
            after: deadline,
        };
        let (reply, answer) = oneshot::channel();
        let request = Request { command: command.to_owned(), args, reply };
        if timeout_at(end, self.requests.send(request)).await.map_err(late)?.is_err() {
            return Err(self.closed_error().await);
        }
        match timeout_at(end, answer).await.map_err(late)? {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(refusal)) => Err(QmpError::Refused {
                socket: self.socket.to_path_buf(),
                command: command.to_owned(),
                class: refusal.class,
                description: refusal.description,
            }),
            Err(_) => Err(self.closed_error().await),
        }
    }

    /// Events from now on. A receiver that falls more than 256 behind loses the oldest, and is
    /// told so; one of a connection that ended is told that.
    pub fn events(&self) -> broadcast::Receiver<QmpEvent> {
        match self.events.upgrade() {
            Some(events) => events.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    /// Returns when the connection has ended, with the reason.
    pub async fn closed(&self) -> Arc<str> {
        let mut closed = self.closed.clone();
        match closed.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_else(|| "ended".into()),
            Err(_) => "its task was ended".into(),
        }
    }

    /// Whether it has ended; commands fail from then on.
    pub fn is_closed(&self) -> bool {
        self.closed.borrow().is_some() || self.requests.is_closed()
    }

    /// Where it is connected to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    async fn closed_error(&self) -> QmpError {
        QmpError::Closed { socket: self.socket.to_path_buf(), why: self.closed().await }
    }

    /// The error of a typed command whose answer is of another type.
    pub(crate) fn unexpected(&self, command: &str, answer: &Value) -> QmpError {
        QmpError::Unexpected {
            socket: self.socket.to_path_buf(),
            command: command.to_owned(),
            answer: connection::excerpt(answer.to_string().as_bytes()),
        }
    }
}
