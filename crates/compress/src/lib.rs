//! Pages that left memory without leaving the machine: compressed, or described by one number.
//!
//! | file | what is there |
//! | --- | --- |
//! | `codec` | bytes of a page to fewer, and back |
//! | `filled` | pages that repeat one number and need no bytes at all |
//! | `place`, `frames` | where compressed pages lie: frames of one page, cut into slots of a half and a quarter (vSphere keeps a page that fits half of one; OSDI'02 had no such tier) |
//! | `oldest`, `ages` | in which order they came, and which are the youngest and the oldest of all |
//!
//! Nothing here touches a page's state: what is kept where, and what becomes of it, is the pager's.

#![warn(missing_docs)]

mod ages;
mod codec;
mod filled;
mod frames;
mod oldest;
mod place;

pub use ages::Age;
pub use codec::{Algorithm, Compressor, Damaged, decompress};
pub use filled::Filling;
pub use frames::{Allocated, Frames, Occupancy, Returns};
pub use place::{Place, Size};
