//! The messages.

use ballast_units::{Bytes, HostAddr};

use crate::{MAX_OPS, MAX_REASON, MOST_BACK, ONE_PART, VERSION, VmName};

/// One message. `S` from the shim, `M` from the manager; descriptors travel beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "told with the variant")]
pub enum Message {
    /// S: here is a VM's RAM. Descriptors: the RAM file of each part; on reconnection also, last, the
    /// userfaultfd.
    Hello(Hello),
    /// M: make a userfaultfd. Descriptor: /dev/userfaultfd, opened by the manager, so that the VMM
    /// needs no right of its own. `version` is that of Hello: a shim takes no other.
    Welcome { version: u32 },
    /// M: this VM is not paged. The VMM goes on without; the connection ends.
    Refuse { reason: Reason },
    /// S: the RAM is registered. Descriptor: the userfaultfd. `features` are those enabled, of
    /// `UFFD_FEATURE_*`; `ioctls` those of the range, as UFFDIO_REGISTER returned them.
    Ready { features: u64, ioctls: u64 },
    /// S: no userfaultfd, and why.
    Failed { step: Step, errno: i32 },
    /// M: faults are served from now on; the VMM may touch its RAM.
    Managed,
    /// M: do these in order. Descriptors: those the operations index.
    Batch(Batch),
    /// S: the first `done` operations changed the address space (or were Keep), none after them did. `errno` 0: those
    /// were all, and all of each is done. Else it says what failed: doing the next one, or registering
    /// and write-protecting of those that are counted, which the manager then does itself.
    ///
    /// What is counted must not be sent again; what is not may be. docs/design/shim-protocol.md has
    /// the reasons.
    BatchDone { id: u64, done: u32, errno: i32 },
}

/// A part of a VM's RAM: one mapping of one file. Its pages are numbered after those of the parts before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it is mapped in the VMM process.
    pub addr: HostAddr,
    /// Its length.
    pub len: Bytes,
    /// Where the mapping starts in its file.
    pub file_offset: u64,
}

/// How a shim introduces its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Of the protocol that the shim speaks.
    pub version: u32,
    /// The RAM was handed over to an earlier connection (of this manager or one before it).
    pub reconnect: bool,
    /// Its VM.
    pub vm: VmName,
    /// As the process sees itself; the manager believes [`crate::Connection::peer`] only.
    pub pid: u32,
    /// Of its RAM, in the order of its pages: two to [`MAX_PARTS`](crate::MAX_PARTS) in versions 3, 5 and 7, one in others.
    pub parts: Vec<Part>,
    /// Of the VMM process; always 4,096 on x86-64.
    pub page_size: u32,
}

impl Hello {
    /// The version in which a RAM of so many parts is announced.
    pub fn version_for(parts: usize) -> u32 {
        if parts == 1 { ONE_PART } else { VERSION }
    }

    /// So many versions before that one, [`MOST_BACK`] at most: the same, but for [`OpKind::Keep`] and, of the oldest,
    /// [`OpKind::MapAgain`].
    pub fn older_version_for(parts: usize, back: u32) -> u32 {
        Hello::version_for(parts) - 2 * back.min(MOST_BACK)
    }

    /// Length of the RAM, all parts together.
    pub fn ram_len(&self) -> Bytes {
        Bytes(self.parts.iter().fold(0, |sum, part| part.len.0.saturating_add(sum)))
    }

    /// Whether the shim does batches as this version means them. Else the VM is paged, and its pages
    /// are not remapped.
    pub fn remaps(&self) -> bool {
        self.version >= FIRST_TO_REMAP
    }

    /// Whether the shim knows [`OpKind::MapAgain`].
    pub fn maps_again(&self) -> bool {
        self.version >= FIRST_TO_MAP_AGAIN
    }

    /// Whether the shim knows [`OpKind::Keep`].
    pub fn keeps(&self) -> bool {
        self.version >= FIRST_TO_KEEP
    }

    /// Whether a Hello of this version is laid out for several parts.
    pub(crate) fn has_parts(version: u32) -> bool {
        matches!(version, 3 | 5 | VERSION)
    }
}

/// MapHome of version 1 mapped whatever the RAM file had.
const FIRST_TO_REMAP: u32 = 2;
const FIRST_TO_MAP_AGAIN: u32 = 4;
const FIRST_TO_KEEP: u32 = 6;

/// What failed in [`Message::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Step {
    /// Making a userfaultfd from the manager's device.
    Create = 1,
    /// Agreeing on features with the kernel.
    Handshake = 2,
    /// Registering the RAM with it (memory of a kind it cannot handle, say).
    Register = 3,
    /// Making duplicates or the thread that serves batches.
    Prepare = 4,
}

impl Step {
    pub(crate) fn from_wire(step: u16) -> Option<Step> {
        [Step::Create, Step::Handshake, Step::Register, Step::Prepare]
            .into_iter()
            .find(|s| *s as u16 == step)
    }
}

/// Up to [`MAX_OPS`] operations, done in order, up to the first that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Chosen by the manager; the answer repeats it.
    pub id: u64,
    ops: Vec<Op>,
}

/// More than [`MAX_OPS`] operations in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a batch of {0} operations; the limit is {MAX_OPS}")]
pub struct TooManyOps(pub usize);

impl Batch {
    /// A batch of these operations.
    ///
    /// # Errors
    /// There are more than fit into one message.
    pub fn new(id: u64, ops: Vec<Op>) -> Result<Batch, TooManyOps> {
        if ops.len() > MAX_OPS {
            return Err(TooManyOps(ops.len()));
        }
        Ok(Batch { id, ops })
    }

    /// The operations, in order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }
}

/// One change of the VMM's address space, or Keep. MapStore and MapHome must not be repeated once they are done
/// ([`Message::BatchDone`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// What is done.
    pub kind: OpKind,
    /// Page-aligned, inside the RAM.
    pub addr: HostAddr,
    /// Whole pages, at least one.
    pub len: Bytes,
    /// MapStore: where in the store file. Else 0.
    pub file_offset: u64,
    /// MapStore: which of the message's descriptors. Else 0.
    pub fd_index: u8,
}

/// What an [`Op`] does. 3 and 4 are taken: shims of before know them, and no manager ever sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum OpKind {
    /// Map the store's pages over the RAM: privately, from a read-only descriptor; register the
    /// mapping; write-protect it. A write in the window before that is copied by the kernel; a
    /// repetition would drop that copy.
    MapStore = 1,
    /// Copy what the range shows into the RAM file, at the RAM's own offset; map that there again;
    /// register. The manager write-protects the range first, so that nothing is written to it between
    /// the copy and the mapping. A repetition would copy pages onto themselves that the guest writes, and of a page that
    /// the VMM has punched meanwhile it would wait for the manager, which waits for it.
    MapHome = 2,
    /// Map the RAM file at the RAM's own offset, where it is mapped already; register. Nothing is read or
    /// written: the kernel maps a large page as one only where no small page was mapped before. May be repeated.
    MapAgain = 5,
    /// From now on the process sends the RAM file to nobody, of which this is a part: what is away the receiver would read
    /// as zeros. EBUSY: it has sent it to somebody, EAGAIN: it is about to, and nothing is different. No mapping changes. May be repeated.
    Keep = 6,
}

impl OpKind {
    pub(crate) fn from_wire(kind: u8) -> Option<OpKind> {
        let kinds = [OpKind::MapStore, OpKind::MapHome, OpKind::MapAgain, OpKind::Keep];
        kinds.into_iter().find(|k| *k as u8 == kind)
    }
}

/// A refusal's text, cut to [`MAX_REASON`] bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl Reason {
    /// As much of the text as fits.
    pub fn new(text: &str) -> Reason {
        let mut end = text.len().min(MAX_REASON);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        Reason(text[..end].to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Message {
    /// A [`Message::Refuse`] that says why.
    pub fn refuse(reason: &str) -> Message {
        Message::Refuse { reason: Reason::new(reason) }
    }

    /// For errors: what arrived instead of what was expected.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Hello(_) => "Hello",
            Message::Welcome { .. } => "Welcome",
            Message::Refuse { .. } => "Refuse",
            Message::Ready { .. } => "Ready",
            Message::Failed { .. } => "Failed",
            Message::Managed => "Managed",
            Message::Batch(_) => "Batch",
            Message::BatchDone { .. } => "BatchDone",
        }
    }

    /// How many descriptors travel with it: (at least, at most).
    pub(crate) fn descriptors(&self) -> (usize, usize) {
        match self {
            Message::Hello(hello) => {
                let count = hello.parts.len() + usize::from(hello.reconnect);
                (count, count)
            }
            Message::Welcome { .. } | Message::Ready { .. } => (1, 1),
            Message::Batch(_) => (0, crate::MAX_BATCH_FDS),
            _ => (0, 0),
        }
    }
}
