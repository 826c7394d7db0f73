//! The task that owns a QMP connection: frames lines, matches answers to commands by id.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot};

use super::flood::Flood;
use super::message::{self, Message, Refusal};
use super::{MAX_LINE, QmpEvent, WINDOW};

const READ: usize = 64 << 10;
/// How long what QEMU has said is read on after it hears no more, if it does not end.
const LAST_WORDS: Duration = Duration::from_secs(1);

type Reply = oneshot::Sender<Result<Value, Refusal>>;

pub(super) struct Request {
    pub command: String,
    pub args: Value,
    pub reply: Reply,
}

pub(super) struct Connection {
    queue: mpsc::Receiver<Request>,
    /// Ends when the last client is gone.
    unused: oneshot::Receiver<Infallible>,
    events: broadcast::Sender<QmpEvent>,
    /// Until QEMU has greeted.
    greeted: Option<oneshot::Sender<()>>,
    /// Sent and not answered; the caller may have given up.
    in_flight: HashMap<u64, Reply>,
    next_id: u64,
    /// What has been read and is not yet a whole line.
    input: Vec<u8>,
    /// What is to be written.
    output: Vec<u8>,
}

impl Connection {
    pub fn new(
        queue: mpsc::Receiver<Request>,
        unused: oneshot::Receiver<Infallible>,
        events: broadcast::Sender<QmpEvent>,
        greeted: oneshot::Sender<()>,
    ) -> Connection {
        Connection {
            queue,
            unused,
            events,
            greeted: Some(greeted),
            in_flight: HashMap::new(),
            next_id: 1,
            input: Vec::new(),
            output: Vec::new(),
        }
    }

    /// Runs until the connection ends; says why. Whoever waits for an answer is told by the drop
    /// of its channel.
    pub async fn run(mut self, stream: UnixStream) -> Arc<str> {
        let (mut reader, mut writer) = stream.into_split();
        let mut chunk = vec![0; READ];
        let mut flood = Flood::new(Instant::now());
        // It hears no more; what it said before, such as why it shuts down, is still to be read.
        let mut deaf: Option<(Arc<str>, tokio::time::Instant)> = None;
        loop {
            tokio::select! {
                read = reader.read(&mut chunk) => match read {
                    Ok(0) if self.input.is_empty() => return "QEMU closed it".into(),
                    Ok(0) => return "QEMU closed it in the middle of a line".into(),
                    Ok(n) => {
                        let came = chunk.get(..n).unwrap_or_default();
                        let noted = flood.note(came, Instant::now());
                        if let Err(why) = noted.and_then(|()| self.take(came)) {
                            return why;
                        }
                        // One that talks all the time holds up nobody.
                        tokio::task::yield_now().await;
                    }
                    Err(error) => return text(&error),
                },
                written = writer.write(&self.output), if !self.output.is_empty() => match written {
                    Ok(n) => drop(self.output.drain(..n)),
                    Err(error) => {
                        self.output.clear();
                        deaf = Some((text(&error), tokio::time::Instant::now() + LAST_WORDS));
                    }
                },
                // None together with `unused` below.
                Some(request) = self.queue.recv(), if deaf.is_none() && self.may_send() => {
                    self.send(request);
                }
                why = end_of(deaf.as_ref()), if deaf.is_some() => return why,
                _ = &mut self.unused => return "no longer used".into(),
            }
        }
    }

    fn may_send(&self) -> bool {
        self.greeted.is_none() && self.output.is_empty() && self.in_flight.len() < WINDOW
    }

    fn send(&mut self, request: Request) {
        if request.reply.is_closed() {
            return;
        }
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "execute": request.command, "id": id });
        if let (Some(fields), false) = (message.as_object_mut(), request.args.is_null()) {
            fields.insert("arguments".into(), request.args);
        }
        self.output = message.to_string().into_bytes();
        self.output.push(b'\n');
        self.in_flight.insert(id, request.reply);
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Arc<str>> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&b| b == b'\n') {
            let (head, tail) = rest.split_at(end);
            rest = tail.get(1..).unwrap_or_default();
            if self.input.len() + head.len() > MAX_LINE {
                return Err(too_long());
            }
            if self.input.is_empty() {
                self.line(head)?;
            } else {
                let mut line = std::mem::take(&mut self.input);
                line.extend_from_slice(head);
                self.line(&line)?;
            }
        }
        if self.input.len() + rest.len() > MAX_LINE {
            return Err(too_long());
        }
        self.input.extend_from_slice(rest);
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Arc<str>> {
        let line = line.trim_ascii();
        if line.is_empty() {
            return Ok(());
        }
        let not_qmp = || Arc::from(format!("not QMP: {}", excerpt(line)));
        let message = Message::parse(line).ok_or_else(not_qmp)?;
        if let Some(event) = message.event() {
            // Fails when nobody listens, which is nobody's loss.
            let _ = self.events.send(event);
        } else if message.greeting.is_some() {
            if let Some(greeted) = self.greeted.take() {
                let _ = greeted.send(());
            }
        } else if let Some(answer) = message.answer {
            if let Some(reply) = self.asked(&message) {
                let value = message::value(answer).ok_or_else(not_qmp)?;
                let _ = reply.send(Ok(value));
            }
        } else if let Some(error) = message.error {
            if let Some(reply) = self.asked(&message) {
                let _ = reply.send(Err(message::refusal(error)));
            }
        } else {
            return Err(format!("neither answer nor event: {}", excerpt(line)).into());
        }
        Ok(())
    }

    /// Who waits for this answer. None: nobody asked for it, or the caller's deadline has passed.
    fn asked(&mut self, message: &Message<'_>) -> Option<Reply> {
        let id = message.id();
        let reply = id.and_then(|id| self.in_flight.remove(&id));
        if reply.is_none() {
            tracing::debug!(?id, "QMP answer to a question that was not asked");
        }
        reply.filter(|reply| !reply.is_closed())
    }
}

/// What bytes from QEMU lead to, when two questions wait for answers: all of it as text, for comparison.
pub(crate) fn heard(pieces: &[&[u8]]) -> Vec<String> {
    let (_asking, queue) = mpsc::channel(1);
    let (_in_use, unused) = oneshot::channel();
    let (events, mut told) = broadcast::channel(64);
    let (greeted, mut greeting) = oneshot::channel();
    let mut connection = Connection::new(queue, unused, events, greeted);
    let mut answers: Vec<_> = (1..=2)
        .map(|id| {
            let (reply, answer) = oneshot::channel();
            connection.in_flight.insert(id, reply);
            answer
        })
        .collect();
    let ended = pieces.iter().try_for_each(|piece| connection.take(piece));
    assert!(connection.input.len() <= MAX_LINE, "more is kept than the longest line");
    let mut all = vec![format!("{ended:?}"), format!("greeted {:?}", greeting.try_recv())];
    if ended.is_ok() {
        all.push(format!("{} bytes kept", connection.input.len()));
    }
    all.extend(answers.iter_mut().map(|answer| match answer.try_recv() {
        Ok(Ok(value)) => value.to_string(),
        Ok(Err(refusal)) => format!("{} {}", refusal.class, refusal.description),
        Err(e) => e.to_string(),
    }));
    while let Ok(event) = told.try_recv() {
        all.push(format!("{event:?}"));
    }
    all
}

/// Returns when one that hears no more has been listened to for long enough, with what is wrong.
async fn end_of(deaf: Option<&(Arc<str>, tokio::time::Instant)>) -> Arc<str> {
    let Some((why, end)) = deaf else { return std::future::pending().await };
    tokio::time::sleep_until(*end).await;
    why.clone()
}

fn too_long() -> Arc<str> {
    format!("a line of more than {MAX_LINE} bytes").into()
}

fn text(error: &io::Error) -> Arc<str> {
    error.to_string().into()
}

/// The beginning of `bytes` as one line of text.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    const SHOWN: usize = 80;
    let shown = String::from_utf8_lossy(bytes.get(..SHOWN).unwrap_or(bytes));
    let dots = if bytes.len() > SHOWN { "..." } else { "" };
    format!("'{}{dots}'", shown.escape_debug())
}
