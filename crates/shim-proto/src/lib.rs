//! What the shim in a VMM process and the manager say to each other.
//!
//! Fixed-layout little-endian messages over a SOCK_SEQPACKET Unix socket, descriptors by SCM_RIGHTS.
//! The format, the states and who can cause which error: docs/design/shim-protocol.md.
//!
//! [`Message::encode`] and [`Message::decode`] are pure; [`Connection`] carries them. A VMM process
//! is not trusted: whatever bytes and descriptors it sends, decoding returns an error at worst.

#![warn(missing_docs)]

mod connection;
#[doc(hidden)]
pub mod fuzzing;
mod message;
mod name;
mod strangers;
mod wire;

pub use connection::{Connection, ConnectionError, Listener, Peer};
pub use message::{Batch, Hello, Message, Op, OpKind, Part, Reason, Step, TooManyOps};
pub use name::{BadVmName, VmName};
pub use wire::{DecodeError, MAX_MESSAGE};

/// The protocol's version: that of VMs whose RAM has several parts. One with a single part says [`ONE_PART`].
pub const VERSION: u32 = 7;
/// The version of one with a single part: its Hello is another.
pub const ONE_PART: u32 = 6;
/// The oldest version of a shim that a manager understands: a VM that was started with it may run for
/// months. Version 1 has no batches that could be relied on ([`Hello::remaps`]), and is the same else.
pub const OLDEST_VERSION: u32 = 1;
/// Versions that a shim goes back where a manager of before refuses its own.
pub const MOST_BACK: u32 = 2;
/// What a manager begins with that refuses a shim for the version that it speaks.
pub const REFUSED_VERSION: &str = "protocol version ";
/// Operations in one batch at most.
pub const MAX_OPS: usize = 256;
/// Parts of a VM's RAM at most.
pub const MAX_PARTS: usize = 4;
/// Descriptors in one message at most: a RAM file for each part, and a userfaultfd.
pub const MAX_FDS: usize = MAX_PARTS + 1;
/// Descriptors in one batch at most.
pub const MAX_BATCH_FDS: usize = 4;
/// Bytes of a refusal's text at most; longer ones are cut.
pub const MAX_REASON: usize = 256;
/// Bytes of a VM's name at most.
pub const MAX_NAME: usize = 64;
