//! The threads of a paged VM.
//!
//! - `vm`: starts them, ends them, and is what the manager has of them.
//! - `shared`: what they share.
//! - `fault`: reads the userfaultfd; serves faults and discards. It never waits for anything but
//!   its descriptors: what cannot be served now is kept and tried again, because the VMM's own
//!   threads wait until their discard events are read.
//! - `serve`, `pending`: in which order it does so.
//! - `overdue`: which faults wait too long, and which are in nobody's book.
//! - `vain`: how much of its time a VMM may have it spend on nothing.
//! - `crew`: the threads that help where several processors of a guest fault together.
//! - `around`, `runs`: which neighbours of a page that was wanted come home with it.
//! - `priority`: how urgent these threads are.
//! - `spin`: how long it looks for the next fault before it sleeps.
//! - `wakeful`: when the host's idle processors are kept awake for it.
//! - `share`: looks for equal pages, brings broken ones home, maps zeros to be read.
//! - `mapping_count`: whether its VMM has mappings to spare for that.
//! - `reads`: what is read from the swap space for it, and read ahead.
//! - `large`: which large pages are broken, and when.
//! - `restore`: what a shortage took of regions of large pages comes home unasked.
//! - `latency`: how long faults took to be served.
//! - `reclaim`: evicts what the policy asks for, samples.
//! - `oldest`: what it evicts where much has to leave at once: by age.
//! - `cold`: what it evicts where accesses are seen.
//! - `trial`: the same of pages that came back after they had been away for long.
//! - `leaving_store`: when it evicts what others share.
//! - `sizing`: how large the tier of compressed pages is.
//! - `slotless`: what it evicts where nothing can be written.
//! - `write`: how it writes clusters to the swap space, whatever fails.

pub mod around;
mod cold;
mod crew;
mod fault;
mod large;
mod latency;
mod leaving_store;
mod mapping_count;
mod oldest;
mod overdue;
mod pending;
mod priority;
mod reads;
mod reclaim;
mod restore;
mod runs;
pub mod serve;
mod share;
mod shared;
mod sizing;
mod slotless;
mod spin;
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) mod testing;
mod trial;
mod vain;
mod vm;
mod wakeful;
mod write;

pub use crew::FaultThreads;
pub use latency::{FaultTimes, bucket_end};
pub use shared::{Health, Sample};
pub use vm::{Inherited, PagedVm, PagerConfig, StartError, VmFiles};
