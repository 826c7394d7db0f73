//! Pages come home before they are wanted: neighbours of one that was, whose contents are at hand.

use ballast_compress::{Filling, Place};
use ballast_units::{Pages, Ppn};

use super::{Counters, Memory};
use crate::backend::{Backend, MemError, PageBuf};
use crate::swap::Stored;
use crate::sync::Ordering;
use crate::word::{State, Word};

impl<B: Backend> Memory<B> {
    /// Whether a page in this state is away, with contents that its next access has to wait for. (A held
    /// one is not: it is out of its home for that access to be seen.)
    pub(crate) const fn is_away(state: State) -> bool {
        matches!(state, State::Compressed | State::Filled | State::Staged | State::Swapped)
    }

    /// Whether a page may come home before it is wanted: an access of a sampled one is to be seen.
    pub(crate) fn may_come(word: Word) -> bool {
        Self::is_away(word.state()) && word.is_idle() && !word.sampled()
    }

    /// Brings home those of `pages`, in rising order, that may come and whose contents are at hand, as
    /// many as there are buffers: from stage and tier, and swapped ones from what `kept` has of them,
    /// which fits their checksum. Only while memory is left over; nobody waits for them. Answers how
    /// many came. Err: what stopped it, other than a want of memory or a discard that is pending. What
    /// did not come is as it was.
    pub(crate) fn bring_home<'a>(
        &self,
        pages: &[Ppn],
        buffers: &mut [PageBuf],
        kept: impl Fn(Ppn, Stored) -> Option<&'a PageBuf>,
    ) -> Result<u64, MemError> {
        let n = pages.len().min(buffers.len());
        if n == 0 || !self.charge_left_over(n as u64) {
            return Ok(0);
        }
        self.bring_charged(&pages[..n], buffers, kept)
    }

    /// Brings a page home from the stage that has no other place to go, with whatever memory is free. As `bring_home`.
    pub(crate) fn bring_from_stage(
        &self,
        ppn: Ppn,
        buffer: &mut PageBuf,
    ) -> Result<bool, MemError> {
        if !self.host.ledger.try_reserve(Pages(1)) {
            return Ok(false);
        }
        self.charged.fetch_add(1, Ordering::Relaxed);
        Ok(self.bring_charged(&[ppn], std::slice::from_mut(buffer), |_, _| None)? > 0)
    }

    /// As `bring_home`, of pages that are charged.
    fn bring_charged<'a>(
        &self,
        pages: &[Ppn],
        buffers: &mut [PageBuf],
        kept: impl Fn(Ppn, Stored) -> Option<&'a PageBuf>,
    ) -> Result<u64, MemError> {
        let n = pages.len();
        let mut claimed: Vec<(Ppn, Word)> = Vec::with_capacity(n);
        for &ppn in pages {
            let word = self.pmap.load(ppn);
            if !Self::may_come(word) || self.claim(ppn, word).is_err() {
                continue;
            }
            if self.contents(ppn, word, &mut buffers[claimed.len()], &kept) {
                claimed.push((ppn, word));
            } else {
                self.pmap.store(ppn, word);
            }
        }
        self.uncharge((n - claimed.len()) as u64);
        let (came, result) = self.put_home(&claimed, buffers);
        if result == Err(MemError::Crash) {
            return Err(MemError::Crash);
        }
        for &(ppn, word) in &claimed[came..] {
            self.pmap.store(ppn, word);
            self.uncharge(1);
        }
        Counters::add(&self.counters.brought, came as u64);
        match result {
            Err(MemError::Again | MemError::NoMemory) | Ok(()) => Ok(came as u64),
            Err(e) => Err(e),
        }
    }

    /// Puts claimed pages in place, neighbours together. Answers how many are, and what stopped it.
    fn put_home(
        &self,
        claimed: &[(Ppn, Word)],
        buffers: &[PageBuf],
    ) -> (usize, Result<(), MemError>) {
        let mut at = 0;
        while at < claimed.len() {
            let first = claimed[at].0;
            let follows = |(i, c): &(usize, &(Ppn, Word))| c.0.0 == first.0 + *i as u64;
            let run = claimed[at..].iter().enumerate().take_while(follows).count();
            let filled = match self.backend.fill_run(first, &buffers[at..at + run]) {
                Ok(filled) => Ok((filled as usize).clamp(1, run)),
                // Somebody wrote the RAM file past us: what is there is the guest's.
                Err(MemError::Exists) => self.backend.wake(first, 1).map(|()| 1),
                Err(e) => Err(e),
            };
            let filled = match filled {
                Ok(filled) => filled,
                Err(e) => return (at, Err(e)),
            };
            for &(ppn, word) in &claimed[at..at + filled] {
                self.came_home(ppn, false);
                self.left(word);
            }
            at += filled;
        }
        (at, Ok(()))
    }

    /// What a claimed page holds; false if that is not to be had without waiting. What is damaged is left
    /// for its own fault to find.
    fn contents<'a>(
        &self,
        ppn: Ppn,
        word: Word,
        into: &mut PageBuf,
        kept: &impl Fn(Ppn, Stored) -> Option<&'a PageBuf>,
    ) -> bool {
        match word.state() {
            State::Staged => {
                // SAFETY: this thread holds the busy bit of the page whose word names the slot: nobody
                // reuses the slot before that word has changed.
                into.copy_from_slice(unsafe { self.stage.page(word.slot()) });
                true
            }
            State::Filled => {
                Filling::from_bits(word.slot()).fill(into);
                true
            }
            State::Compressed => Place::from_bits(word.slot())
                .is_some_and(|place| self.tier.read(ppn, place, into) == Ok(())),
            State::Swapped => match kept(ppn, word.stored()) {
                Some(page) => {
                    debug_assert!(word.stored().sum.fits(page), "{ppn}: not its contents");
                    into.copy_from_slice(page);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }

    /// A page has left where this word says that it was.
    fn left(&self, word: Word) {
        match word.state() {
            State::Swapped => {
                self.free_slot(word.stored().slot);
                Counters::add(&self.counters.swap_ins, 1);
            }
            State::Compressed | State::Filled => {
                self.free_named(word);
                Counters::add(&self.counters.decompressed, 1);
            }
            _ => {}
        }
    }

    /// Reserves `n` pages that nobody waits for: only where the host is well above the states in which
    /// VMs are stopped for want of memory. Less must be left than for pages that are handed out
    /// unasked (`charge_if_plentiful`), of which an overcommitted host has nothing left over for long:
    /// most of these are about to be asked for, and would take the same memory then.
    fn charge_left_over(&self, n: u64) -> bool {
        let floor = Pages(self.host.plenty().0 / 2);
        if self.host.is_low() || !self.host.ledger.reserve_leaving(Pages(n), floor) {
            return false;
        }
        self.charged.fetch_add(n, Ordering::Relaxed);
        true
    }
}
