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

pub use file::{SwapError, SwapFile};
pub use location::Location;
pub use ring::{Completion, Ring};
pub use slot_space::SlotSpace;
pub use slots::SlotMap;
pub use space::{Place, SwapSpace, room};
pub use sum::{SLOT_BITS, SUM_BITS, Stored, Sum};
pub use window::Window;
