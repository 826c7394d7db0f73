//! The swap tier: a VM's files in one or more locations, their slots, and their I/O.

mod file;
pub mod inject;
mod location;
mod ring;
mod slot_space;
mod slots;
mod space;
mod sum;
mod window;

pub use file::SwapError;
pub(crate) use file::SwapFile;
pub use location::Location;
pub(crate) use ring::{Completion, Ring};
pub use slot_space::SlotSpace;
pub(crate) use slots::SlotMap;
pub use space::{Place, SwapSpace, kept_back};
pub(crate) use sum::SUM_BITS;
pub use sum::{SLOT_BITS, Stored, Sum};
pub(crate) use window::Window;
