//! The swap tier: one file per VM, with its slots and its I/O.

mod file;
mod ring;
mod slots;

pub use file::{SwapError, SwapFile};
pub use ring::{Completion, Ring};
pub use slots::SlotMap;
