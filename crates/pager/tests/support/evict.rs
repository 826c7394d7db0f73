//! One page that leaves its home, as tests want it: a run of one.

use ballast_pager::backend::Backend;
use ballast_pager::memory::{Memory, NotEvicted};
use ballast_units::Ppn;

/// What became of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// Its contents are in the stage slot that was offered.
    Staged,
    /// It was all zero: dropped, the stage slot was not used.
    Zero,
}

/// Moves a resident page into stage slot `stage_slot`, which is free and the caller's.
pub fn evict<B: Backend>(
    memory: &Memory<B>,
    ppn: Ppn,
    stage_slot: u64,
) -> Result<Evicted, NotEvicted> {
    let left = memory.evict_run(ppn, 1, stage_slot)?;
    let staged = left.iter().any(|page| page.slot.is_some());
    Ok(if staged { Evicted::Staged } else { Evicted::Zero })
}
