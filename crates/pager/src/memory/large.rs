//! Large pages: handed out while memory is plentiful, broken before anything is taken from them.
//!
//! A large page is freed whole or not at all. The kernel can free a part of one only if it can split it, and
//! cannot if somebody holds it (direct I/O holds its pages): then it zeroes the part, leaves it in place,
//! and says nothing; the guest would read those zeros. So a region is broken by moving it out of its home
//! and back: protect it; copy it out, into holds of the stage; book that in the pmap; punch the whole; bring
//! it back, page by page. What is all zero (most of what the guest never touched) does not come back.

use ballast_sharing::is_zero;
use ballast_units::Ppn;

use super::fault::{Access, Fault, Wait, failed};
use super::regions::Backing;
use super::{Counters, Memory};
use crate::backend::{Backend, MemError};
use crate::word::{Busy, State, Word};

/// What came of the wish to break a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broke {
    /// Its pages are small now, and so many of them, all zero, are free.
    #[allow(missing_docs, reason = "told with the variant")]
    Done { freed: u64 },
    /// It is not backed by a large page.
    Small,
    /// One of its pages is in another transition, or no hold is free, or pages may not move: later.
    Busy,
}

/// A page of a region that is being broken: its word before, and the hold it goes to.
struct RegionPage {
    ppn: Ppn,
    word: Word,
    hold: Option<u64>,
}

impl<B: Backend> Memory<B> {
    /// Answers a fault with a large page, if its region has nothing yet and memory is plentiful. None: it
    /// is to be answered otherwise.
    pub(super) fn fault_large(
        &self,
        ppn: Ppn,
        word: Word,
        access: Access,
    ) -> Option<Result<(), Fault>> {
        let region = self.regions.of(ppn).filter(|_| is_fresh(word))?;
        if access == Access::Reading
            && word.state() == State::Untouched
            && self.reads_zeros()
            && self.regions.is_read_in_order(region)
        {
            return None;
        }
        let filled = self.fill_large(region, Some(ppn));
        // Of one that was only read nothing follows: a migration reads all, and what is not there it reads as zeros.
        if filled == Some(Ok(())) && !(access == Access::Reading && self.reads_zeros()) {
            let first = self.regions.first(region).0;
            self.first_touches.touched(&(first..first + self.regions.size().0));
        }
        filled
    }

    /// Fills a region with a large page, for the page that is `asked` for or before one is: then only one that was never
    /// touched. None: it cannot be, or not as one.
    pub(super) fn fill_large(
        &self,
        region: usize,
        asked: Option<Ppn>,
    ) -> Option<Result<(), Fault>> {
        if asked.is_none()
            && self.untouched(self.regions.pages(region).map(|p| p.0)) < self.regions.size().0
        {
            return None;
        }
        // Another thread is at it, to make it large perhaps: a small page would be in its way.
        if self.is_being_filled(region)? {
            return Some(Err(Fault::Wait(Wait::Busy)));
        }
        let (first, n) = (self.regions.first(region), self.regions.size().0);
        if !self.charge_if_plentiful(n) {
            return None;
        }
        let claimed = self.claim_fresh(region, asked.is_some());
        if claimed.len() as u64 != n {
            self.give_back_fresh(&claimed);
            return Some(Err(Fault::Wait(Wait::Busy)));
        }
        match self.backend.next_present(first, first.0 + n) {
            Ok(found) if found == first.0 + n => self.fill_claimed(region, claimed, asked),
            Err(MemError::Crash) => Some(Err(Fault::Failed(MemError::Crash))),
            // Somebody wrote the RAM file past us: page by page, then.
            _ => {
                self.give_back_fresh(&claimed);
                None
            }
        }
    }

    /// Whether pages of a region that has nothing yet are being filled. None: it has something, or is in another
    /// transition.
    fn is_being_filled(&self, region: usize) -> Option<bool> {
        let mut filling = false;
        for word in self.regions.pages(region).map(|p| self.pmap.load(p)) {
            if !is_fresh(word.set_busy(Busy::Idle))
                || !is_fresh(word) && word.busy() != Busy::Filling
            {
                return None;
            }
            filling |= word.busy() == Busy::Filling;
        }
        Some(filling)
    }

    /// Claims the pages of a region that has nothing yet, up to the first that has, or that somebody else has
    /// claimed; with their words before. Where none is `wanted`, up to the first that is not untouched: a page under
    /// sample would lose it, unseen.
    fn claim_fresh(&self, region: usize, wanted: bool) -> Vec<(Ppn, Word)> {
        let mut claimed = Vec::with_capacity(self.regions.size().0 as usize);
        for ppn in self.regions.pages(region) {
            let word = self.pmap.load(ppn);
            let may = is_fresh(word) && (wanted || word == Word::UNTOUCHED);
            if !may || self.claim(ppn, word).is_err() {
                break;
            }
            claimed.push((ppn, word));
        }
        claimed
    }

    /// Nothing was put into what was claimed of a region, for all of which was charged.
    fn give_back_fresh(&self, claimed: &[(Ppn, Word)]) {
        claimed.iter().for_each(|&(ppn, word)| self.pmap.store(ppn, word));
        self.uncharge(self.regions.size().0);
    }

    /// Fills a region, all of which is claimed and charged. Otherwise as `fill_large`.
    fn fill_claimed(
        &self,
        region: usize,
        claimed: Vec<(Ppn, Word)>,
        asked: Option<Ppn>,
    ) -> Option<Result<(), Fault>> {
        let (first, n) = (self.regions.first(region), self.regions.size().0);
        // Before any of its pages can be seen to be Resident.
        self.regions.set(region, Backing::Whole);
        match self.backend.allocate(first, n) {
            Ok(true) => self.regions.filled(),
            // It is not a large page, most likely. Nothing is lost if it is still broken first.
            Ok(false) => self.regions.set(region, Backing::Torn),
            Err(MemError::Crash) => return Some(Err(Fault::Failed(MemError::Crash))),
            Err(_) => return self.filled_in_part(region, &claimed),
        }
        // Protection that was left by pages that went away would trap writes one by one. While the pages are claimed: it
        // may be somebody else's afterwards, who moves them.
        let lifted = self.backend.unprotect_run(first, n);
        if lifted == Err(MemError::Crash) {
            return Some(Err(Fault::Failed(MemError::Crash)));
        }
        for (p, word) in claimed {
            self.came_home(p, Some(p) == asked && word.sampled());
        }
        Counters::add(&self.counters.unasked, n - u64::from(asked.is_some()));
        let woken = if lifted.is_ok() { Ok(()) } else { self.backend.wake(first, n) };
        Some(woken.map_err(failed))
    }

    /// The kernel has no memory for all of a region. What is there may have been touched: it stays.
    fn filled_in_part(&self, region: usize, claimed: &[(Ppn, Word)]) -> Option<Result<(), Fault>> {
        self.regions.set(region, Backing::Torn);
        let mut here = Vec::with_capacity(claimed.len());
        for &(p, _) in claimed {
            match self.backend.present(p) {
                Err(MemError::Crash) => return Some(Err(Fault::Failed(MemError::Crash))),
                // In doubt it is booked, and its fault answered as that of any page at home.
                found => here.push(found != Ok(false)),
            }
        }
        if !here.contains(&true) {
            // Before anybody else can claim its pages, and make it large.
            self.regions.set(region, Backing::Small);
        }
        for (&(p, word), here) in claimed.iter().zip(here) {
            if here {
                self.came_home(p, false);
            } else {
                self.pmap.store(p, word);
                self.uncharge(1);
            }
        }
        None
    }

    /// Whether a fault on the page is likely to be answered with a large page, which takes long.
    pub(crate) fn may_fill_large(&self, ppn: Ppn) -> bool {
        let Some(region) = self.regions.of(ppn) else { return false };
        let first = self.regions.first(region).0;
        let ends = [first, first + self.regions.size().0 - 1, ppn.0].map(Ppn);
        ends.into_iter().all(|p| is_fresh(self.pmap.load(p))) && self.is_plentiful()
    }

    /// Breaks the region of a page into small pages.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory; the region is as it was then, or broken with some of its
    /// pages away (`bring_back`).
    pub fn break_large(&self, ppn: Ppn) -> Result<Broke, MemError> {
        let Some(region) = self.regions.of(ppn) else { return Ok(Broke::Small) };
        if self.regions.get(region) == Backing::Small {
            return Ok(Broke::Small);
        }
        if !self.may_move() {
            return Ok(Broke::Busy);
        }
        let first = self.regions.first(region);
        let Some(mut pages) = self.claim_region(first) else { return Ok(Broke::Busy) };
        if self.regions.get(region) == Backing::Small {
            self.stay_large(first, &pages)?;
            return Ok(Broke::Small);
        }
        let n = self.regions.size().0;
        let copied = self.backend.protect_run(first, n).and_then(|()| self.copy_out(&mut pages));
        match copied {
            Ok(()) => {}
            Err(MemError::Crash) => return Err(MemError::Crash),
            Err(e) => {
                self.stay_large(first, &pages)?;
                return if e == MemError::Again { Ok(Broke::Busy) } else { Err(e) };
            }
        }
        for page in &pages {
            self.departures.note(page.ppn);
            self.commons.unwritten.remove(page.ppn);
            self.pmap.store(page.ppn, page.next().set_busy(Busy::Evicting));
        }
        if let Err(e) = self.backend.punch(first, n) {
            if e != MemError::Crash {
                self.stay_large(first, &pages)?;
            }
            return Err(e);
        }
        self.regions.set(region, Backing::Small);
        let mut freed = 0;
        for page in &pages {
            let next = page.next();
            freed += u64::from(page.word.state().charged() && !next.state().charged());
            self.pmap.store(page.ppn, next);
        }
        self.uncharge(freed);
        Counters::add(&self.counters.zero_dropped, freed);
        self.regions.broke(freed);
        self.regions.add_away(pages.iter().filter(|p| p.hold.is_some()).map(|p| p.ppn));
        self.bring_back()?;
        Ok(Broke::Done { freed })
    }

    /// Brings pages of broken regions home that are still in their holds. Answers how many are left.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. What did not come is tried again by the next call.
    pub fn bring_back(&self) -> Result<usize, MemError> {
        let mut left = self.regions.take_away();
        let mut result = Ok(());
        left.retain(|&ppn| {
            let word = self.pmap.load(ppn);
            let is_away = word.state() == State::Held && !word.sampled();
            if result.is_err() || !is_away {
                return is_away;
            }
            match self.unsample(ppn) {
                Ok(back) => !back,
                Err(e) => {
                    result = Err(e);
                    true
                }
            }
        });
        let n = left.len();
        self.regions.add_away(left);
        result.map(|()| n)
    }

    /// Takes the busy bit of an idle page that is no part of a large page. What is part of one cannot be freed, or
    /// mapped elsewhere, alone: see `break_large`. Looked up under the busy bit, which no region becomes large
    /// without: the word alone may be the one that was read before the page was given up and came back large.
    pub(super) fn claim_small(&self, ppn: Ppn, word: Word, busy: Word) -> bool {
        if self.regions.is_large(ppn) || self.pmap.exchange(ppn, word, busy).is_err() {
            return false;
        }
        if self.regions.is_large(ppn) {
            self.pmap.store(ppn, word);
            return false;
        }
        true
    }

    /// Claims all pages of a region, with a hold for each that is at home. None if that cannot be now.
    fn claim_region(&self, first: Ppn) -> Option<Vec<RegionPage>> {
        let n = self.regions.size().0;
        let mut claimed = Vec::with_capacity(n as usize);
        for ppn in (first.0..first.0 + n).map(Ppn) {
            let word = self.pmap.load(ppn);
            let needs = word.state() == State::Resident;
            let hold = if needs { self.stage.take_hold() } else { None };
            // In any other state the region was broken meanwhile.
            let is_part = needs || is_fresh(word);
            let claim = |to: Word| self.pmap.exchange(ppn, word, to).is_ok();
            if needs != hold.is_some()
                || !is_part
                || !word.is_idle()
                || !claim(word.set_busy(Busy::Evicting))
            {
                hold.into_iter().for_each(|hold| self.stage.free_hold(hold));
                self.unclaim_region(&claimed);
                return None;
            }
            claimed.push(RegionPage { ppn, word, hold });
        }
        Some(claimed)
    }

    fn unclaim_region(&self, claimed: &[RegionPage]) {
        for page in claimed {
            page.hold.into_iter().for_each(|hold| self.stage.free_hold(hold));
            self.pmap.store(page.ppn, page.word);
        }
    }

    /// Copies what is at home into the holds; what is all zero needs none.
    fn copy_out(&self, pages: &mut [RegionPage]) -> Result<(), MemError> {
        for page in pages {
            let Some(hold) = page.hold else { continue };
            // SAFETY: the hold is free and ours, so no word names it and nobody reads it.
            let bytes = unsafe { self.stage.page_mut(hold) };
            self.backend.read_home(page.ppn, bytes)?;
            if is_zero(bytes) {
                self.stage.free_hold(hold);
                page.hold = None;
            }
        }
        Ok(())
    }

    /// Rolls back: the region is there, whole. Should lifting the protection fail (a discard is pending),
    /// writes fault and lift it. Err only when the manager dies.
    fn stay_large(&self, first: Ppn, pages: &[RegionPage]) -> Result<(), MemError> {
        let lifted = self.backend.unprotect_run(first, self.regions.size().0);
        if lifted == Err(MemError::Crash) {
            return Err(MemError::Crash);
        }
        for page in pages {
            self.commons.unwritten.remove(page.ppn);
        }
        self.unclaim_region(pages);
        Ok(())
    }
}

impl RegionPage {
    /// Its word when it has left.
    fn next(&self) -> Word {
        let next = match (self.word.state(), self.hold) {
            (_, Some(hold)) => Word::with_slot(State::Held, hold),
            (State::Resident, None) => Word::UNTOUCHED,
            (_, None) => self.word,
        };
        next.set_sampled(self.word.sampled())
    }
}

/// Whether a page has nothing, so that it can become part of a large page.
fn is_fresh(word: Word) -> bool {
    word.is_idle() && matches!(word.state(), State::Untouched | State::Ballooned)
}
