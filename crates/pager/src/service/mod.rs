//! The threads of a paged VM.
//!
//! - `fault`: reads the userfaultfd; serves faults and discards. It never waits for anything but
//!   its descriptors: what cannot be served now is kept and tried again, because the VMM's own
//!   threads wait until their discard events are read.
//! - `serve`, `pending`: in which order it does so.
//! - `share`: looks for equal pages, brings broken ones home, maps zeros to be read.
//! - `reclaim`: evicts what the policy asks for, writes clusters to the swap file, samples.

mod fault;
pub mod pending;
mod reclaim;
pub mod serve;
mod share;
mod vm;

pub use vm::{Health, PagedVm, PagerConfig, Sample, StartError, VmFiles};
