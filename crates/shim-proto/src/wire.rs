//! Bytes to messages and back. Layouts: docs/design/shim-protocol.md.

use ballast_units::{Bytes, HostAddr};

use crate::{
    Batch, Hello, MAX_NAME, MAX_OPS, MAX_PARTS, MAX_REASON, Message, OLDEST_VERSION, Op, OpKind,
    Part, Reason, Step, VERSION, VmName,
};

/// "BLST", first in every message.
const MAGIC: u32 = u32::from_le_bytes(*b"BLST");
const FLAG_RECONNECT: u32 = 1;

const HEADER: usize = 8;
const OP: usize = 32;
/// Of a part in Hello.
const PART: usize = 24;
/// The longest message: a full batch.
pub const MAX_MESSAGE: usize = HEADER + 16 + MAX_OPS * OP;

const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const REFUSE: u16 = 3;
const READY: u16 = 4;
const FAILED: u16 = 5;
const MANAGED: u16 = 6;
const BATCH: u16 = 7;
const BATCH_DONE: u16 = 8;

const _: () = assert!(MAX_MESSAGE == 8216 && MAX_NAME <= u8::MAX as usize);

/// What is wrong with a message. Only the peer can cause it: it is broken, hostile or of another
/// version; the connection is closed after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DecodeError {
    #[error("not a message of this protocol")]
    Magic,
    #[error("protocol version {0}; this side speaks versions {OLDEST_VERSION} to {VERSION}")]
    Version(u32),
    #[error("message kind {0} is unknown")]
    Kind(u16),
    #[error("message kind {kind} of {len} bytes: wrong length")]
    Length { kind: u16, len: usize },
    #[error("message kind {kind}: field '{field}' is out of range")]
    Field { kind: u16, field: &'static str },
    #[error("{message} with {got} descriptors")]
    Descriptors { message: &'static str, got: usize },
}

impl Message {
    /// The bytes of the message, without its descriptors.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        match self {
            Message::Hello(hello) => w.hello(hello),
            Message::Welcome { version } => {
                w.header(WELCOME);
                w.u32(*version);
                w.zeros(4);
            }
            Message::Refuse { reason } => {
                w.header(REFUSE);
                w.u16(reason.as_str().len() as u16);
                w.zeros(6);
                w.text(reason.as_str(), MAX_REASON);
            }
            Message::Ready { features, ioctls } => {
                w.header(READY);
                w.u64(*features);
                w.u64(*ioctls);
            }
            Message::Failed { step, errno } => {
                w.header(FAILED);
                w.u16(*step as u16);
                w.zeros(2);
                w.u32(*errno as u32);
            }
            Message::Managed => w.header(MANAGED),
            Message::Batch(batch) => {
                w.0.reserve(HEADER + 16 + batch.ops().len() * OP);
                w.header(BATCH);
                w.u64(batch.id);
                w.u16(batch.ops().len() as u16);
                w.zeros(6);
                for op in batch.ops() {
                    w.u8(op.kind as u8);
                    w.u8(op.fd_index);
                    w.zeros(6);
                    w.u64(op.addr.0);
                    w.u64(op.len.0);
                    w.u64(op.file_offset);
                }
            }
            Message::BatchDone { id, done, errno } => {
                w.header(BATCH_DONE);
                w.u64(*id);
                w.u32(*done);
                w.u32(*errno as u32);
            }
        }
        w.0
    }

    /// Accepts exactly what [`Message::encode`] makes, nothing else. Addresses and lengths are
    /// carried as they are: whoever uses them checks them against what it knows.
    ///
    /// # Errors
    /// It is no message of a version that is known, and where it is not.
    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let mut r = Reader { kind: 0, len: bytes.len(), rest: bytes };
        if r.u32().map_err(|_| DecodeError::Magic)? != MAGIC {
            return Err(DecodeError::Magic);
        }
        r.kind = r.u16()?;
        r.zeros(2)?;
        let message = match r.kind {
            HELLO => Message::Hello(r.hello()?),
            WELCOME => {
                let version = r.u32()?;
                r.zeros(4)?;
                Message::Welcome { version }
            }
            REFUSE => {
                let len = r.u16()?;
                r.zeros(6)?;
                Message::Refuse { reason: Reason::new(r.text(len.into(), MAX_REASON, "reason")?) }
            }
            READY => Message::Ready { features: r.u64()?, ioctls: r.u64()? },
            FAILED => {
                let step = Step::from_wire(r.u16()?).ok_or_else(|| r.field("step"))?;
                r.zeros(2)?;
                Message::Failed { step, errno: r.u32()? as i32 }
            }
            MANAGED => Message::Managed,
            BATCH => Message::Batch(r.batch()?),
            BATCH_DONE => {
                Message::BatchDone { id: r.u64()?, done: r.u32()?, errno: r.u32()? as i32 }
            }
            unknown => return Err(DecodeError::Kind(unknown)),
        };
        if r.rest.is_empty() { Ok(message) } else { Err(r.length()) }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn hello(&mut self, hello: &Hello) {
        self.header(HELLO);
        self.u32(hello.version);
        self.u32(if hello.reconnect { FLAG_RECONNECT } else { 0 });
        let name = hello.vm.as_str();
        let ids = |w: &mut Writer| {
            w.u32(hello.page_size);
            w.u32(hello.pid);
            w.u8(name.len() as u8);
        };
        if !Hello::has_parts(hello.version) {
            self.parts(&hello.parts, 1);
            ids(self);
            self.zeros(7);
            self.text(name, MAX_NAME);
        } else {
            ids(self);
            self.u8(hello.parts.len() as u8);
            self.zeros(6);
            self.text(name, MAX_NAME);
            self.parts(&hello.parts, MAX_PARTS);
        }
    }
    /// Room for `room` parts; what is not there is zero.
    fn parts(&mut self, parts: &[Part], room: usize) {
        for part in parts.iter().take(room) {
            self.u64(part.addr.0);
            self.u64(part.len.0);
            self.u64(part.file_offset);
        }
        self.zeros(PART * room.saturating_sub(parts.len()));
    }
    fn header(&mut self, kind: u16) {
        self.u32(MAGIC);
        self.u16(kind);
        self.zeros(2);
    }
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u16(&mut self, v: u16) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn zeros(&mut self, n: usize) {
        self.0.resize(self.0.len() + n, 0);
    }
    /// `text`, padded to `width`. Its type keeps it within that.
    fn text(&mut self, text: &str, width: usize) {
        let end = self.0.len() + width;
        self.0.extend_from_slice(text.as_bytes());
        self.0.resize(end, 0);
    }
}

struct Reader<'a> {
    kind: u16,
    len: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn hello(&mut self) -> Result<Hello, DecodeError> {
        let version = self.u32()?;
        // First of all: what follows may mean something else in another version.
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            return Err(DecodeError::Version(version));
        }
        let flags = self.u32()?;
        if flags & !FLAG_RECONNECT != 0 {
            return Err(self.field("flags"));
        }
        let reconnect = flags & FLAG_RECONNECT != 0;
        if !Hello::has_parts(version) {
            let parts = vec![self.part()?];
            let page_size = self.u32()?;
            let pid = self.u32()?;
            let name_len = self.u8()?;
            self.zeros(7)?;
            let vm = self.name(name_len)?;
            return Ok(Hello { version, reconnect, vm, pid, parts, page_size });
        }
        let page_size = self.u32()?;
        let pid = self.u32()?;
        let name_len = self.u8()?;
        let count = usize::from(self.u8()?);
        self.zeros(6)?;
        let vm = self.name(name_len)?;
        if !(2..=MAX_PARTS).contains(&count) {
            return Err(self.field("parts"));
        }
        let parts = (0..count).map(|_| self.part()).collect::<Result<_, _>>()?;
        self.zeros(PART * (MAX_PARTS - count))?;
        Ok(Hello { version, reconnect, vm, pid, parts, page_size })
    }

    fn part(&mut self) -> Result<Part, DecodeError> {
        let addr = HostAddr(self.u64()?);
        let len = Bytes(self.u64()?);
        Ok(Part { addr, len, file_offset: self.u64()? })
    }

    fn name(&mut self, len: u8) -> Result<VmName, DecodeError> {
        VmName::new(self.text(len.into(), MAX_NAME, "name")?).map_err(|_| self.field("name"))
    }

    fn batch(&mut self) -> Result<Batch, DecodeError> {
        let id = self.u64()?;
        let count = usize::from(self.u16()?);
        self.zeros(6)?;
        if count > MAX_OPS {
            return Err(self.field("count"));
        }
        let mut ops = Vec::with_capacity(count);
        for _ in 0..count {
            let kind = OpKind::from_wire(self.u8()?).ok_or_else(|| self.field("op"))?;
            let fd_index = self.u8()?;
            self.zeros(6)?;
            let addr = HostAddr(self.u64()?);
            let len = Bytes(self.u64()?);
            ops.push(Op { kind, addr, len, file_offset: self.u64()?, fd_index });
        }
        Batch::new(id, ops).map_err(|_| self.field("count"))
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or_else(|| self.length())?;
        self.rest = rest;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.length())?;
        self.rest = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(|[b]| b)
    }
    fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }
    fn zeros(&mut self, n: usize) -> Result<(), DecodeError> {
        match self.take(n)?.iter().all(|b| *b == 0) {
            true => Ok(()),
            false => Err(self.field("reserved")),
        }
    }
    fn text(
        &mut self,
        len: usize,
        width: usize,
        field: &'static str,
    ) -> Result<&'a str, DecodeError> {
        let (text, padding) =
            self.take(width)?.split_at_checked(len).ok_or_else(|| self.field(field))?;
        if padding.iter().any(|b| *b != 0) {
            return Err(self.field(field));
        }
        std::str::from_utf8(text).map_err(|_| self.field(field))
    }
    fn field(&self, field: &'static str) -> DecodeError {
        DecodeError::Field { kind: self.kind, field }
    }
    fn length(&self) -> DecodeError {
        DecodeError::Length { kind: self.kind, len: self.len }
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
