//! Which large pages are broken, and when. While memory is plentiful: none but a few, to be sampled. Below
//! that, before the memory is needed, those in which much can be shared or is all zero; and when pages are
//! to be evicted, one after another at random, its pages going first.

use ballast_units::Ppn;

use super::reclaim::Reclaim;
use super::share::ShareService;
use crate::backend::MemError;
use crate::memory::Broke;
use crate::sharing::examine::Examined;
use crate::word::State;

/// Large pages that a sample may break while memory is plentiful.
const SAMPLED: usize = 8;
/// Large pages that are tried to be broken at a time: one with a page in another transition cannot be.
const TRIED: usize = 4;
/// A large page is broken to be shared if one of so many of its pages can be.
const WORTH: u64 = 8;

impl Reclaim {
    /// Breaks the large page that a page is a part of. Whether it is small now.
    pub(super) fn break_at(&self, ppn: Ppn) -> bool {
        let vm = &self.vm;
        match vm.memory.break_large(ppn) {
            Ok(Broke::Done { freed }) => {
                vm.evict_done(freed);
                true
            }
            Ok(Broke::Small) => true,
            Ok(Broke::Busy) | Err(MemError::Gone | MemError::Again) => false,
            Err(e) => {
                vm.set_ill(format!("breaking the large page of {ppn}: {e}"));
                false
            }
        }
    }

    /// Breaks the next large page from `start` on, and proposes one of its pages. None: there is none, or
    /// it cannot be broken now.
    pub(super) fn break_from(&mut self, start: Ppn) -> Option<Ppn> {
        let memory = self.vm.memory.clone();
        let regions = memory.regions();
        let n = regions.len();
        let from = regions.of(start).unwrap_or(0);
        let first = (0..n)
            .map(|i| regions.first((from + i) % n))
            .filter(|&first| regions.is_large(first))
            .take(TRIED)
            .find(|&first| self.break_at(first))?;
        let at_home = |p: &Ppn| memory.pmap().load(*p).state() == State::Resident;
        self.broken = (first.0..first.0 + regions.size().0).map(Ppn).filter(at_home).collect();
        self.broken.pop()
    }

    /// Brings pages of broken regions home that are still away. Whether there are such.
    pub(super) fn bring_back(&mut self) -> bool {
        if !self.vm.memory.regions().is_any_away() {
            return false;
        }
        match self.vm.memory.bring_back() {
            Ok(left) => left > 0,
            Err(MemError::Gone) => false,
            Err(e) => {
                self.vm.set_ill(format!("bringing pages of a broken region back: {e}"));
                true
            }
        }
    }

    /// While memory is plentiful, a sample is not to break many large pages. It is made smaller then, and so
    /// less exact, but not one of other pages.
    pub(super) fn thin_out(&self, ppns: Vec<Ppn>) -> Vec<Ppn> {
        let memory = &self.vm.memory;
        let large = ppns.iter().filter(|&&p| memory.regions().is_large(p)).count();
        if large <= SAMPLED || !memory.is_plentiful() {
            return ppns;
        }
        // Evenly over the whole, whatever order they are in.
        let taken = |i: usize| i * SAMPLED / large;
        ppns.into_iter()
            .enumerate()
            .filter(|(i, _)| taken(*i) != taken(i + 1))
            .map(|p| p.1)
            .collect()
    }
}

impl ShareService {
    /// Whether an extent is passed over as a part of a large page. It is broken if it is worth that and memory
    /// is not plentiful any more.
    pub(super) fn passes_over_large(
        &mut self,
        extent: Ppn,
        done: &mut Examined,
    ) -> Result<bool, MemError> {
        let memory = self.vm.memory.clone();
        let regions = memory.regions();
        let Some(region) = regions.of(extent).filter(|_| regions.is_large(extent)) else {
            return Ok(false);
        };
        if memory.is_plentiful() {
            return Ok(true);
        }
        let (first, n) = (regions.first(region), regions.size().0);
        // Each of its extents comes up in a pass; one look is enough.
        if extent != first {
            return Ok(true);
        }
        let (alike, read) = self.examiner.weigh(&memory, first, n)?;
        done.scanned += read;
        if alike * WORTH < n {
            return Ok(true);
        }
        match memory.break_large(first)? {
            Broke::Done { freed } => {
                self.vm.evict_done(freed);
                done.zero += freed;
                Ok(false)
            }
            Broke::Small => Ok(false),
            Broke::Busy => Ok(true),
        }
    }
}
