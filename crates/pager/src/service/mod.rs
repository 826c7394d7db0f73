//! The threads of a paged VM.
//!
//! - `fault`: reads the userfaultfd; serves faults and discards. It never waits for anything but
//!   its descriptors: what cannot be served now is kept and tried again, because the VMM's own
//!   threads wait until their discard events are read.
//! - `serve`, `pending`: in which order it does so.
//! - `priority`: how urgent these threads are.
//! - `spin`: how long it looks for the next fault before it sleeps.
//! - `share`: looks for equal pages, brings broken ones home, maps zeros to be read.
//! - `reads`: what is read from the swap space for it, and read ahead.
//! - `reclaim`: evicts what the policy asks for, samples.
//! - `write`: how it writes clusters to the swap space, whatever fails.

mod fault;
pub mod pending;
mod priority;
mod reads;
mod reclaim;
pub mod serve;
mod share;
mod spin;
mod vm;
mod write;

pub use vm::{Health, PagedVm, PagerConfig, Sample, StartError, VmFiles};
