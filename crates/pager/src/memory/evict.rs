//! A page leaves its home. The order that must hold: write-protect; copy out; make the copy
//! durable in the pmap; punch the hole; wake. A write in between waits on the protection and finds
//! the page gone when it may go on.

use ballast_sharing::is_zero;
use ballast_units::Ppn;

use super::{Counters, Memory};
use crate::backend::{Backend, MemError};
use crate::swap::Stored;
use crate::word::{Busy, State, Word};

/// What became of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// Its contents are in the stage slot that was offered.
    Staged,
    /// It was all zero: dropped, the stage slot was not used.
    Zero,
}

/// Why the page stayed where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotEvicted {
    /// It is not in its home, or another transition holds it: try another page.
    NotEligible,
    /// Something failed on the way: it is at home, whole.
    Failed(MemError),
}

impl<B: Backend> Memory<B> {
    /// Moves a resident page into stage slot `stage_slot`, which is free and the caller's, and gives
    /// its machine page back to the host.
    pub fn evict(&self, ppn: Ppn, stage_slot: u64) -> Result<Evicted, NotEvicted> {
        let home = self.pmap.load(ppn);
        if home.state() != State::Resident || !home.is_idle() {
            return Err(NotEvicted::NotEligible);
        }
        let next = self.leave_home(ppn, home, State::Staged, stage_slot)?;
        self.uncharge(1);
        Counters::add(&self.counters.evicted, 1);
        if next.state() == State::Untouched {
            Counters::add(&self.counters.zero_dropped, 1);
            return Ok(Evicted::Zero);
        }
        Ok(Evicted::Staged)
    }

    /// The steps that eviction and sampling share. `into` is Staged or Held; a page all zero is
    /// dropped where it would be staged. Answers the page's new word.
    pub(super) fn leave_home(
        &self,
        ppn: Ppn,
        home: Word,
        into: State,
        stage_slot: u64,
    ) -> Result<Word, NotEvicted> {
        if !self.claim_small(ppn, home, home.set_busy(Busy::Evicting)) {
            return Err(NotEvicted::NotEligible);
        }
        self.backend.protect(ppn).map_err(|e| self.stay_home(ppn, home, e))?;
        // SAFETY: the slot is free and the caller's, so no word names it and nobody reads it.
        let page = unsafe { self.stage.page_mut(stage_slot) };
        self.backend.read_home(ppn, page).map_err(|e| self.stay_home(ppn, home, e))?;
        let next = if into == State::Staged && is_zero(page) {
            Word::UNTOUCHED
        } else {
            Word::with_slot(into, stage_slot)
        };
        self.departures.note(ppn);
        self.commons.unwritten.remove(ppn);
        self.commons.missed.remove(ppn);
        self.pmap.store(ppn, next.set_busy(Busy::Evicting));
        self.backend.punch(ppn, 1).map_err(|e| self.stay_home(ppn, home, e))?;
        self.pmap.store(ppn, next);
        Ok(next)
    }

    /// Rolls back: the home page is there, whole. Should lifting the protection fail too (a discard
    /// is pending), the next write faults and lifts it.
    fn stay_home(&self, ppn: Ppn, home: Word, e: MemError) -> NotEvicted {
        if e != MemError::Crash {
            self.commons.unwritten.remove(ppn);
            let _ = self.backend.unprotect(ppn);
            self.pmap.store(ppn, home);
        }
        NotEvicted::Failed(e)
    }

    /// Whether a page is still in the stage slot that it left its home for. One that is not has no need
    /// of being written.
    pub(crate) fn is_staged(&self, ppn: Ppn, stage_slot: u64) -> bool {
        let word = self.pmap.load(ppn);
        word.state() == State::Staged && word.slot() == stage_slot
    }

    /// The cluster write that carried `ppn` from stage slot `stage_slot` to where `stored` says is complete.
    /// Answers false if the page is busy at the moment: ask again, and keep the stage slot until
    /// then. If the page has left the stage meanwhile, its swap slot is freed.
    #[must_use]
    pub fn written(&self, ppn: Ppn, stage_slot: u64, stored: Stored) -> bool {
        loop {
            let word = self.pmap.load(ppn);
            if word.state() != State::Staged || word.slot() != stage_slot {
                // Shuttles between home and this stage slot are over: it is not reused before now.
                self.free_slot(stored.slot);
                return true;
            }
            if !word.is_idle() {
                return false;
            }
            let swapped = Word::swapped(stored).set_sampled(word.sampled());
            if self.pmap.exchange(ppn, word, swapped).is_ok() {
                Counters::add(&self.counters.swap_outs, 1);
                return true;
            }
        }
    }
}
