//! The swap tier: a VM's files in one or more locations, their slots, and their I/O.
//!
//! | what is looked for | where |
//! | --- | --- |
//! | a location, and when it is written to | `location` |
//! | the files of a VM there, as one range of slots | `space`, `file` |
//! | which slots are free | `slot_space`, `slots` |
//! | how they are read and written; errors of tests | `ring`, `inject` |
//! | how far to read ahead | `window` |
//! | what a pmap word says of a swapped page | `sum` |

mod file;
pub mod inject;
mod location;
mod ring;
mod slot_space;
mod slots;
mod space;
mod sum;
mod window;

pub(crate) use file::SwapFile;
pub use file::{SwapError, check_folder};
pub use location::Location;
pub(crate) use ring::{Completion, Ring};
pub use slot_space::SlotSpace;
pub(crate) use slots::SlotMap;
pub use space::{Place, SwapSpace, kept_back};
pub(crate) use sum::SUM_BITS;
pub use sum::{SLOT_BITS, Stored, Sum};
pub(crate) use window::Window;
