//! A page leaves its home. The order that must hold: write-protect; copy out; make the copy
//! durable in the pmap; punch the hole; wake. A write in between waits on the protection and finds
//! the page gone when it may go on.

use ballast_sharing::is_zero;
use ballast_units::Ppn;

use super::{Counters, Memory};
use crate::backend::{Backend, MemError, PageBuf};
use crate::swap::Stored;
use crate::word::{Busy, State, Word};

/// A page that left its home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Which it was.
    pub ppn: Ppn,
    /// The stage slot that has its contents; None if it was all zero, and dropped.
    pub slot: Option<u64>,
}

/// Why the page stayed where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotEvicted {
    /// It is not in its home, or another transition holds it: try another page.
    NotEligible,
    /// Something failed on the way: it is at home, whole.
    Failed(MemError),
}

impl Left {
    fn word(self, into: State) -> Word {
        self.slot.map_or(Word::UNTOUCHED, |slot| Word::with_slot(into, slot))
    }
}

impl<B: Backend> Memory<B> {
    /// Moves up to `n` resident neighbours, at least one, into stage slots from `stage_slot` on, as many, all free and
    /// the caller's, and gives their machine pages back to the host: each step is one call of the kernel, and one flush
    /// of the guest's translations, for all.
    /// Answers which have left, at least one: those from `first` on that could, as far as none could not; their slots
    /// rise with their numbers.
    ///
    /// # Errors
    /// None has left: the first is none that may, or an operation on the VMM's memory failed. They are where they were.
    pub fn evict_run(&self, first: Ppn, n: u64, stage_slot: u64) -> Result<Vec<Left>, NotEvicted> {
        let homes = self.claim_homes(first, n);
        let left = self.leave_home(first, &homes, State::Staged, stage_slot)?;
        self.uncharge(left.len() as u64);
        Counters::add(&self.counters.evicted, left.len() as u64);
        let zeros = left.iter().filter(|page| page.slot.is_none()).count();
        Counters::add(&self.counters.zero_dropped, zeros as u64);
        Ok(left)
    }

    /// The same of each for itself. Their slots follow one another.
    fn leave_apart(&self, first: Ppn, n: u64, stage_slot: u64) -> Result<Vec<Left>, NotEvicted> {
        let (mut left, mut why) = (Vec::new(), NotEvicted::NotEligible);
        for ppn in (first.0..first.0 + n).map(Ppn) {
            let slots = left.iter().filter(|page: &&Left| page.slot.is_some()).count() as u64;
            let homes = self.claim_homes(ppn, 1);
            match self.leave_home(ppn, &homes, State::Staged, stage_slot + slots) {
                Ok(page) => left.extend(page),
                Err(NotEvicted::NotEligible) => {}
                Err(e @ NotEvicted::Failed(MemError::Crash)) => return Err(e),
                Err(e) => why = e,
            }
        }
        if left.is_empty() { Err(why) } else { Ok(left) }
    }

    /// Drops what holds zeros only of neighbours at home, as many as `pages` has room for; each step is one call for all
    /// that lie together. Answers how many were. What another transition has is left alone, and all where pages may not
    /// move.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory, but for one that will pass. What was not dropped is at home, whole.
    pub fn drop_zeros(&self, first: Ppn, pages: &mut [PageBuf]) -> Result<u64, MemError> {
        let (mut at, end) = (first.0, first.0 + pages.len() as u64);
        let mut dropped = 0;
        while at < end && self.may_move() {
            let homes = self.claim_homes(Ppn(at), end - at);
            if !homes.is_empty() {
                dropped += self.drop_claimed(Ppn(at), &homes, &mut pages[..homes.len()])?;
            }
            // Where none was claimed, the first could not be.
            at += homes.len().max(1) as u64;
        }
        Ok(dropped)
    }

    /// What it does with neighbours that are claimed, whose words were `homes`.
    fn drop_claimed(
        &self,
        first: Ppn,
        homes: &[Word],
        pages: &mut [PageBuf],
    ) -> Result<u64, MemError> {
        let protected = self.backend.protect_run(first, homes.len() as u64);
        if let Err(e) = protected.and_then(|()| self.backend.read_homes(first, pages)) {
            return unless_it_passes(self.stay_home(first, homes, e)).map(|()| 0);
        }
        let zero: Vec<bool> = pages.iter().map(is_zero).collect();
        let (mut at, mut dropped, mut result) = (0, 0, Ok(()));
        for run in zero.chunk_by(|a, b| a == b) {
            let homes = &homes[at..at + run.len()];
            let of = |i: usize| Left { ppn: Ppn(first.0 + (at + i) as u64), slot: None };
            let left = match run[0] {
                true => self.free_home((0..run.len()).map(of).collect(), homes, State::Staged),
                false => Err(self.stay_home(of(0).ppn, homes, MemError::Again)),
            };
            match left {
                Ok(left) => dropped += left.len() as u64,
                Err(NotEvicted::Failed(MemError::Crash)) => return Err(MemError::Crash),
                Err(why) => result = result.and(unless_it_passes(why)),
            }
            at += run.len();
        }
        self.uncharge(dropped);
        Counters::add(&self.counters.zero_dropped, dropped);
        result.map(|()| dropped)
    }

    /// The words of neighbours at home before they were made busy: as far as none could not be.
    fn claim_homes(&self, first: Ppn, n: u64) -> Vec<Word> {
        let claimed = |ppn: Ppn| {
            let home = self.pmap.load(ppn);
            let may = home.state() == State::Resident && home.is_idle();
            (may && self.claim_small(ppn, home, home.set_busy(Busy::Evicting))).then_some(home)
        };
        (first.0..first.0 + n).map_while(|p| claimed(Ppn(p))).collect()
    }

    /// The steps that eviction and sampling share, for neighbours whose words were `homes` before the caller made them
    /// busy. `into` is Staged or Held; a page all zero is dropped where it would be staged. Answers which have left:
    /// at least one. None is busy any more.
    pub(super) fn leave_home(
        &self,
        first: Ppn,
        homes: &[Word],
        into: State,
        stage_slot: u64,
    ) -> Result<Vec<Left>, NotEvicted> {
        let n = homes.len() as u64;
        if n == 0 {
            return Err(NotEvicted::NotEligible);
        }
        // SAFETY: the slots are free and the caller's, so no word names them and nobody reads them.
        let pages = unsafe { self.stage.pages_mut(stage_slot, homes.len()) };
        let protected = self.backend.protect_run(first, n);
        if let Err(e) = protected.and_then(|()| self.backend.read_homes(first, pages)) {
            return match self.stay_home(first, homes, e) {
                // One of them that cannot be read or protected keeps none of the others.
                NotEvicted::Failed(MemError::Os { .. }) if n > 1 && into == State::Staged => {
                    self.leave_apart(first, n, stage_slot)
                }
                why => Err(why),
            };
        }
        let mut left = Vec::with_capacity(homes.len());
        let mut used = 0;
        for i in 0..homes.len() {
            let zero = into == State::Staged && is_zero(&pages[i]);
            if !zero && used < i {
                // The slots of pages of zeros are not left out.
                pages.copy_within(i..=i, used);
            }
            let slot = (!zero).then_some(stage_slot + used as u64);
            used += usize::from(!zero);
            left.push(Left { ppn: Ppn(first.0 + i as u64), slot });
        }
        self.free_home(left, homes, into)
    }

    /// Neighbours that are protected and copied out, or all zero: the copies become what the pmap knows of them, and
    /// their homes are freed. Answers which have left: at least one.
    fn free_home(
        &self,
        left: Vec<Left>,
        homes: &[Word],
        into: State,
    ) -> Result<Vec<Left>, NotEvicted> {
        let (first, n) = (left[0].ppn, left.len() as u64);
        for page in &left {
            self.departures.note(page.ppn);
            self.commons.unwritten.remove(page.ppn);
            self.commons.missed.remove(page.ppn);
            self.pmap.store(page.ppn, page.word(into).set_busy(Busy::Evicting));
        }
        match self.backend.punch(first, n) {
            Ok(()) => {
                left.iter().for_each(|page| self.pmap.store(page.ppn, page.word(into)));
                Ok(left)
            }
            Err(e) if n == 1 || e == MemError::Crash => Err(self.stay_home(first, homes, e)),
            // Some of them may be gone all the same: each for itself.
            Err(_) => self.leave_one_by_one(left, homes, into),
        }
    }

    /// The last step of pages whose copies are in the pmap.
    fn leave_one_by_one(
        &self,
        pages: Vec<Left>,
        homes: &[Word],
        into: State,
    ) -> Result<Vec<Left>, NotEvicted> {
        let (mut left, mut why) = (Vec::new(), NotEvicted::NotEligible);
        for (page, home) in pages.into_iter().zip(homes) {
            match self.backend.punch(page.ppn, 1) {
                Ok(()) => {
                    self.pmap.store(page.ppn, page.word(into));
                    left.push(page);
                }
                Err(MemError::Crash) => return Err(NotEvicted::Failed(MemError::Crash)),
                Err(e) => why = self.stay_home(page.ppn, &[*home], e),
            }
        }
        if left.is_empty() { Err(why) } else { Ok(left) }
    }

    /// Rolls back: the home pages are there, whole. Should lifting the protection fail too (a discard
    /// is pending), the next write faults and lifts it.
    fn stay_home(&self, first: Ppn, homes: &[Word], e: MemError) -> NotEvicted {
        if e == MemError::Crash {
            return NotEvicted::Failed(e);
        }
        let pages = || (first.0..).map(Ppn).zip(homes);
        // First of all: what the guest writes when the protection is lifted, a successor is to find at home.
        pages().for_each(|(ppn, home)| self.pmap.store(ppn, home.set_busy(Busy::Evicting)));
        if self.backend.unprotect_run(first, homes.len() as u64) == Err(MemError::Crash) {
            return NotEvicted::Failed(MemError::Crash);
        }
        // Who protects it for that meanwhile is not believed: a write meets a fault for nothing.
        pages().for_each(|(ppn, _)| self.commons.unwritten.remove(ppn));
        pages().for_each(|(ppn, home)| self.pmap.store(ppn, *home));
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

/// Why pages stayed where they were, unless they are to be tried again.
fn unless_it_passes(why: NotEvicted) -> Result<(), MemError> {
    match why {
        NotEvicted::Failed(MemError::Again) | NotEvicted::NotEligible => Ok(()),
        NotEvicted::Failed(e) => Err(e),
    }
}
