//! qemu-guest-agent, asked for the guest's memory pressure over its virtio-serial port.
//!
//! The protocol is JSON in lines, like QMP, but not QMP's: no greeting, no events, one command at a
//! time, and whoever connects must first find where answers to the one before end
//! (`guest-sync-delimited`). Answers are written by the guest, which is not trusted: a line has a
//! bounded length, everything together has a deadline, and after any error but a refusal the
//! connection is of no more use. Nothing here can hold up anybody but its caller.

mod base64;
mod pressure;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

use crate::shown::shown;

pub use pressure::MemoryPressure;

/// The port's name: what agents look for.
pub const AGENT_PORT: &str = "org.qemu.guest_agent.0";
/// Of the guest's file, bytes. It has some 120.
const MOST: usize = 4096;
/// The longest line accepted: the file in base 64, and what is around it.
const MAX_LINE: usize = 2 * MOST;
/// Bytes that may come before the answer to a synchronisation, whatever they are: what is left of another's answers.
const MAX_STALE: usize = 1 << 20;
const FILE: &str = "/proc/pressure/memory";
/// How much of what a guest wrote is told.
const SHOWN: usize = 80;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AgentError {
    #[error("its guest agent's socket {}: {source}", .socket.display())]
    Socket { socket: PathBuf, source: io::Error },
    #[error("no guest agent answers within {} s", .0.as_secs())]
    Deadline(Duration),
    /// The agent understood and refused.
    #[error("its guest agent refuses {command}: {why}")]
    Refused { command: &'static str, why: String },
    #[error("its guest agent's answer to {command} is none: {answer}")]
    Unexpected { command: &'static str, answer: String },
    /// Who sends, and nothing that can be used, may go on without end.
    #[error("{source}; of {bytes} bytes that came, none were an answer")]
    Noise { bytes: usize, source: Box<AgentError> },
}

impl AgentError {
    /// Whether the connection can be used further.
    pub fn is_refusal(&self) -> bool {
        matches!(self, AgentError::Refused { .. })
    }
}

/// A connection to the agent of one guest.
#[derive(Debug)]
pub struct GuestAgent {
    socket: PathBuf,
    stream: UnixStream,
    /// What has been read and is not yet a whole line.
    input: Vec<u8>,
    /// Bytes that have been read.
    read: usize,
}

impl GuestAgent {
    /// Connects, and waits until the agent answers.
    ///
    /// # Errors
    /// No socket, or no agent, within the deadline. [`AgentError::Noise`], however it failed, where anything came.
    pub async fn connect(socket: &Path, deadline: Duration) -> Result<GuestAgent, AgentError> {
        let end = Instant::now() + deadline;
        let late = |_| AgentError::Deadline(deadline);
        let stream = timeout_at(end, UnixStream::connect(socket))
            .await
            .map_err(late)?
            .map_err(|source| AgentError::Socket { socket: socket.to_owned(), source })?;
        let input = Vec::with_capacity(1024);
        let mut agent = GuestAgent { socket: socket.to_owned(), stream, input, read: 0 };
        match timeout_at(end, agent.synchronise()).await.map_err(late).flatten() {
            Ok(()) => Ok(agent),
            Err(e) if agent.read == 0 => Err(e),
            Err(e) => Err(AgentError::Noise { bytes: agent.read, source: Box::new(e) }),
        }
    }

    /// The guest's memory pressure now. Opens, reads and closes one file in the guest.
    ///
    /// # Errors
    /// After any but a refusal, the connection is of no use any more.
    pub async fn memory_pressure(
        &mut self,
        deadline: Duration,
    ) -> Result<MemoryPressure, AgentError> {
        timeout(deadline, self.read_pressure()).await.map_err(|_| AgentError::Deadline(deadline))?
    }

    async fn read_pressure(&mut self) -> Result<MemoryPressure, AgentError> {
        let open = json!({ "path": FILE, "mode": "r" });
        let file = self.execute("guest-file-open", open).await?;
        let Some(handle) = file.as_i64() else {
            return Err(unexpected("guest-file-open", file.to_string().as_bytes()));
        };
        let read = json!({ "handle": handle, "count": MOST });
        let read = self.execute("guest-file-read", read).await;
        // Whatever was read: the agent has room for few open files.
        self.execute("guest-file-close", json!({ "handle": handle })).await?;
        let read = read?;
        contents(&read).and_then(|text| MemoryPressure::parse(&text)).ok_or_else(|| {
            // In the guest's own words where they are text.
            let text = contents(&read).unwrap_or_else(|| read.to_string().into_bytes());
            unexpected("guest-file-read", &text)
        })
    }

    async fn execute(&mut self, command: &'static str, args: Value) -> Result<Value, AgentError> {
        let request = json!({ "execute": command, "arguments": args });
        self.send(format!("{request}\n").as_bytes()).await?;
        let line = self.line(command).await?;
        answer(command, &line)
    }

    /// Everything before the answer to this is somebody else's.
    async fn synchronise(&mut self) -> Result<(), AgentError> {
        const COMMAND: &str = "guest-sync-delimited";
        // Of the moment: an answer to an earlier one is told apart.
        let id = u32::from(std::process::id() as u16)
            ^ std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.subsec_nanos());
        // The first byte makes the agent drop what half a command it may have got.
        let mut request = vec![0xff];
        let sync = json!({ "execute": COMMAND, "arguments": { "id": id } });
        request.extend_from_slice(sync.to_string().as_bytes());
        request.push(b'\n');
        self.send(&request).await?;
        loop {
            // To the delimiter.
            while let Some(at) = self.input.iter().position(|&b| b == 0xff) {
                self.input.drain(..=at);
                let line = self.line(COMMAND).await?;
                if answer(COMMAND, &line).is_ok_and(|told| told.as_u64() == Some(u64::from(id))) {
                    return Ok(());
                }
                self.bear_stale(COMMAND, &line)?;
            }
            let stale = std::mem::take(&mut self.input);
            self.bear_stale(COMMAND, &stale)?;
            self.more().await?;
        }
    }

    /// Whether more can be thrown away: all that was read before counts, delimited or not. `last`: to be shown.
    fn bear_stale(&self, command: &'static str, last: &[u8]) -> Result<(), AgentError> {
        let thrown_away = self.read - self.input.len();
        if thrown_away > MAX_STALE { Err(unexpected(command, last)) } else { Ok(()) }
    }

    async fn line(&mut self, command: &'static str) -> Result<Vec<u8>, AgentError> {
        loop {
            if let Some(end) = self.input.iter().position(|&b| b == b'\n') {
                let mut line: Vec<u8> = self.input.drain(..=end).collect();
                line.pop();
                return Ok(line);
            }
            if self.input.len() > MAX_LINE {
                return Err(unexpected(command, &self.input));
            }
            self.more().await?;
        }
    }

    async fn more(&mut self) -> Result<(), AgentError> {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk).await {
            Ok(0) => Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => {
                self.read += n;
                self.input.extend_from_slice(&chunk[..n]);
                Ok(())
            }
            Err(e) => Err(self.failed(e)),
        }
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(bytes).await.map_err(|e| self.failed(e))
    }

    fn failed(&self, source: io::Error) -> AgentError {
        AgentError::Socket { socket: self.socket.clone(), source }
    }
}

/// What a line answers.
fn answer(command: &'static str, line: &[u8]) -> Result<Value, AgentError> {
    let Ok(Value::Object(mut message)) = serde_json::from_slice(line.trim_ascii()) else {
        return Err(unexpected(command, line));
    };
    if let Some(value) = message.remove("return") {
        return Ok(value);
    }
    match message.get("error").and_then(|e| e.get("desc")).and_then(Value::as_str) {
        Some(why) => Err(AgentError::Refused { command, why: shown(why.as_bytes(), SHOWN) }),
        None => Err(unexpected(command, line)),
    }
}

/// The bytes of an answer to guest-file-read.
fn contents(read: &Value) -> Option<Vec<u8>> {
    base64::decode(read.get("buf-b64")?.as_str()?, MOST)
}

fn unexpected(command: &'static str, answer: &[u8]) -> AgentError {
    AgentError::Unexpected { command, answer: shown(answer, SHOWN) }
}

/// What bytes of a guest lead to, as text: for the fuzzer, and to compare.
pub(crate) fn heard(line: &[u8]) -> String {
    match answer("guest-file-read", line) {
        Ok(read) => match contents(&read) {
            Some(text) => format!("{:?}", MemoryPressure::parse(&text)),
            None => "no contents".to_owned(),
        },
        Err(e) => e.to_string(),
    }
}

#[cfg(test)]
#[path = "agent/tests.rs"]
mod tests;
