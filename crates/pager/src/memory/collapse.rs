//! Regions that were broken are made whole again, while memory is plentiful: by the kernel, which copies their pages
//! into a large one while nobody is kept from them but those who write. The VMM maps the RAM file there anew
//! afterwards, for the kernel maps a large page as one only where no small page was mapped before.

use ballast_units::Ppn;

use super::Memory;
use super::regions::Backing;
use crate::backend::{Backend, MemError, Place, Remap};
use crate::word::{Busy, State, Word};

/// Of so many pages of a region one may be shared: it comes home for the large page. An eighth is what a large one is broken
/// for (`service::large`); what is between stays as it is.
const FEW: u64 = 64;

impl<B: Backend> Memory<B> {
    /// Whether a region is worth making whole: small, most of its pages at home, the others never touched, or shared and
    /// few; those are the answer, in rising order. What was taken from a guest, or more that is shared, keeps it small (None).
    pub fn can_collapse(&self, region: usize) -> Option<Vec<Ppn>> {
        let is_known = self.pmap.is_known(self.regions.first(region));
        if self.regions.get(region) != Backing::Small || !is_known || !self.may_move() {
            return None;
        }
        let (mut untouched, mut shared) = (0, Vec::new());
        let fits = self.regions.pages(region).all(|ppn| {
            let word = self.pmap.load(ppn);
            match word.state() {
                State::Shared if word.is_idle() && !word.sampled() => shared.push(ppn),
                _ if word == Word::UNTOUCHED => untouched += 1,
                _ if word == Word::new(State::Resident) => {}
                _ => return false,
            }
            untouched * 2 < self.regions.size().0 && shared.len() <= self.few_of_a_region()
        });
        fits.then_some(shared)
    }

    fn few_of_a_region(&self) -> usize {
        self.regions.size().0.div_ceil(FEW) as usize
    }

    /// Pages that are away and alone keep a region small, if bringing them home is worth it: fewer than are at home, half
    /// of the region with those, they can come, and there would be memory for the large page. Else none. In rising order.
    /// What is under sample keeps it small for a while only; a few that are shared, not at all.
    pub fn away_in(&self, region: usize) -> Vec<Ppn> {
        let is_known = self.pmap.is_known(self.regions.first(region));
        let may = self.may_move() && self.backend.can_map_again();
        if self.regions.get(region) != Backing::Small || !is_known || !may {
            return Vec::new();
        }
        let (mut away, mut home, mut shared) = (Vec::new(), 0, 0);
        for ppn in self.regions.pages(region) {
            let word = self.pmap.load(ppn);
            match word.state() {
                State::Resident if word.is_idle() => home += 1,
                State::Held if word.sampled() => home += 1,
                State::Untouched if word.is_idle() => {}
                State::Shared if shared < self.few_of_a_region() => shared += 1,
                _ if Self::may_come(word) => away.push(ppn),
                _ => return Vec::new(),
            }
        }
        let known = home + away.len() as u64;
        let size = self.regions.size().0;
        let worth = 2 * known > size && home > away.len() as u64 && self.is_granted(size - home);
        if worth { away } else { Vec::new() }
    }

    /// Makes a region whole; what is shared of it comes home. Answers whether it is: not if it is not worth it, if memory
    /// is not plentiful, or if the kernel cannot just now, because it has no large page or somebody holds one of the small
    /// ones.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. What the guest has there is as it was.
    pub fn collapse(&self, region: usize) -> Result<bool, MemError> {
        if !self.backend.can_map_again() {
            return Ok(false);
        }
        let Some(shared) = self.can_collapse(region) else { return Ok(false) };
        if self.host.is_low() || !self.is_granted(self.lacking(region)) {
            return Ok(false);
        }
        if !self.unshare(&shared)? || !self.fill_holes(region)? {
            return Ok(false);
        }
        // The kernel has both for a while, the large page and the small ones.
        let n = self.regions.size().0;
        if !self.charge_if_plentiful(n) {
            return Ok(false);
        }
        let done = self.collapse_filled(region);
        self.uncharge(n);
        done
    }

    /// Pages of a region that are not at home: the large page has memory for them, too.
    fn lacking(&self, region: usize) -> u64 {
        let away = |ppn: &Ppn| self.pmap.load(*ppn).state() != State::Resident;
        self.regions.pages(region).filter(away).count() as u64
    }

    /// Has these shared pages come home. Whether all did.
    fn unshare(&self, shared: &[Ppn]) -> Result<bool, MemError> {
        if shared.is_empty() {
            return Ok(true);
        }
        match self.go_home(shared) {
            Ok(home) => Ok(home == shared.len()),
            Err(e @ (MemError::Crash | MemError::Gone)) => Err(e),
            // It says nothing of large pages; whoever shares them meets it, too, and tells.
            Err(_) => Ok(false),
        }
    }

    /// The kernel collapses no region with a hole.
    fn fill_holes(&self, region: usize) -> Result<bool, MemError> {
        for ppn in self.regions.pages(region) {
            if self.pmap.load(ppn) != Word::UNTOUCHED {
                continue;
            }
            if !self.charge_if_plentiful(1) {
                return Ok(false);
            }
            if self.claim(ppn, Word::UNTOUCHED).is_err() {
                self.uncharge(1);
                return Ok(false);
            }
            match self.backend.zero(ppn, 1) {
                // Or somebody wrote the RAM file past us: it is the guest's page now.
                Ok(_) | Err(MemError::Exists) => self.is_home(ppn, false),
                Err(MemError::Crash) => return Err(MemError::Crash),
                Err(e) => {
                    self.pmap.store(ppn, Word::UNTOUCHED);
                    self.uncharge(1);
                    return if e == MemError::Again { Ok(false) } else { Err(e) };
                }
            }
        }
        Ok(true)
    }

    fn collapse_filled(&self, region: usize) -> Result<bool, MemError> {
        let (first, n) = (self.regions.first(region), self.regions.size().0);
        let Some(_turn) = self.commons.turn() else { return Ok(false) };
        if !self.may_move() || !self.can_change()? || !self.claim_at_home(region) {
            return Ok(false);
        }
        // Before it can be a large page: from here on no part of it is freed alone.
        self.regions.set(region, Backing::Torn);
        match self.backend.collapse(first, n) {
            Ok(true) => {}
            Err(MemError::Crash) => return Err(MemError::Crash),
            Ok(false) | Err(MemError::Again) => {
                self.regions.set(region, Backing::Small);
                self.stay_small(region);
                return Ok(false);
            }
            // It may be a large page all the same, and is broken first, as those are.
            Err(e) => {
                self.stay_small(region);
                return Err(e);
            }
        }
        self.regions.set(region, Backing::Whole);
        self.regions.collapsed();
        let run = Remap { first, n, to: Place::Home };
        let (done, mapped) = self.count_remap(1, || {
            let mapped = self.backend.map_again(first, n);
            (usize::from(mapped.is_ok()), mapped)
        });
        self.arrived(&[run], done, mapped)?;
        Ok(true)
    }

    /// Takes the busy bits of all pages of a region, which are at home. False: of none.
    fn claim_at_home(&self, region: usize) -> bool {
        let home = Word::new(State::Resident);
        let claim = |ppn: Ppn| self.pmap.exchange(ppn, home, home.set_busy(Busy::Homing)).is_ok();
        let claimed = self.regions.pages(region).take_while(|&ppn| claim(ppn)).count();
        let all = claimed as u64 == self.regions.size().0;
        if !all {
            self.regions.pages(region).take(claimed).for_each(|ppn| self.pmap.store(ppn, home));
        }
        all
    }

    /// Rolls back: nothing of its mapping was changed. Whoever met a page of it meanwhile tries again.
    fn stay_small(&self, region: usize) {
        let home = Word::new(State::Resident);
        self.regions.pages(region).for_each(|ppn| self.pmap.store(ppn, home));
    }
}
