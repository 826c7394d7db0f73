//! Pages whose mapping was being changed when the change was cut short: by the manager's death, by
//! a VMM that did not answer, by an operation that failed half way. Where the page is mapped is the
//! truth; the word says what was meant.

use ballast_units::Ppn;

use super::Memory;
use crate::backend::{Backend, MemError, Place, Remap};
use crate::word::{Busy, State, Word};

impl<B: Backend> Memory<B> {
    /// Whether a word's transition changes the page's mapping.
    pub(super) fn is_moving(word: Word) -> bool {
        matches!(word.busy(), Busy::Sharing | Busy::Homing | Busy::Breaking)
    }

    /// Whether mappings can be changed now: nothing is left unsettled by earlier changes. Under the turn.
    pub(super) fn can_change(&self) -> Result<bool, MemError> {
        Ok(self.backend.can_remap() && self.settle_all_parked()? == 0)
    }

    /// Looks where the pages of `runs` are, and finishes or takes back what was to be done with them;
    /// under the turn. `each` gets a page's word before and after; None when it had to be parked. The
    /// reference that a word does not name any more is the caller's. Err only when the manager dies.
    pub(super) fn settle_runs(
        &self,
        runs: &[Remap],
        mut each: impl FnMut(Option<(Word, Word)>),
    ) -> Result<(), MemError> {
        let pages: Vec<Ppn> = runs.iter().flat_map(Remap::pages).collect();
        let places = match self.places_of(&pages) {
            Err(MemError::Crash) => return Err(MemError::Crash),
            Err(e) => vec![Err(e); pages.len()],
            Ok(places) => places,
        };
        for (ppn, place) in pages.into_iter().zip(places) {
            match place.and_then(|place| self.settle_page(ppn, place)) {
                Ok(change) => each(Some(change)),
                Err(MemError::Crash) => return Err(MemError::Crash),
                Err(_) => {
                    self.commons.park([ppn]);
                    each(None);
                }
            }
        }
        Ok(())
    }

    /// Where pages are; nobody is asked about none.
    pub(super) fn places_of(
        &self,
        pages: &[Ppn],
    ) -> Result<Vec<Result<Place, MemError>>, MemError> {
        if pages.is_empty() { Ok(Vec::new()) } else { self.backend.places(pages) }
    }

    /// Settles one page, wakes who waits for it, and what it was charged. Answers its word before and
    /// after.
    fn settle_page(&self, ppn: Ppn, place: Place) -> Result<(Word, Word), MemError> {
        let word = self.pmap.load(ppn);
        if word.is_idle() || !Self::is_moving(word) {
            return Ok((word, word));
        }
        let next = self.settled(ppn, word, place)?;
        let (before, after) = (word.state(), next.state());
        match (before.charged(), after.charged()) {
            (true, false) => self.uncharge(1),
            (false, true) if word.busy() != Busy::Homing => self.charge_copy(),
            // A shared page is charged when it sets out for home.
            (false, false) if word.busy() == Busy::Homing => self.uncharge(1),
            // Its home page was yet to be freed.
            (false, false) if before == State::Shared => self.uncharge(1),
            _ => {}
        }
        self.commons.unwritten.remove(ppn);
        self.pmap.store(ppn, next);
        if after == State::Resident {
            self.note_found(ppn);
        }
        if after == State::Broken {
            self.commons.add_broken(ppn);
        }
        match self.backend.wake(ppn, 1) {
            Err(MemError::Crash) => Err(MemError::Crash),
            _ => Ok((word, next)),
        }
    }

    /// Does what is left to be done with the page itself. Books nothing.
    pub(super) fn settled(&self, ppn: Ppn, word: Word, place: Place) -> Result<Word, MemError> {
        let idle = word.set_busy(Busy::Idle);
        let payload = word.slot();
        let copy_or = |state| -> Result<Word, MemError> {
            self.backend.rearm(ppn)?;
            let copied = self.backend.copied(ppn, 1)?[0];
            Ok(Word::with_slot(if copied { State::Broken } else { state }, payload))
        };
        Ok(match (word.busy(), word.state(), place) {
            // It never left.
            (Busy::Sharing, State::Resident, Place::Home) => {
                self.backend.rearm(ppn)?;
                self.lift(ppn)?;
                Word::new(State::Resident)
            }
            (Busy::Sharing, State::Untouched, Place::Home) => {
                self.backend.rearm(ppn)?;
                self.lift(ppn)?;
                Word::UNTOUCHED
            }
            // It left: what is at home is the same, or older than the copy.
            (Busy::Sharing, State::Resident, _) => {
                let next = copy_or(State::Shared)?;
                self.backend.punch(ppn, 1)?;
                next
            }
            (Busy::Sharing, State::Untouched, _) => {
                let next = copy_or(State::Zero)?;
                if next.state() == State::Broken {
                    Word::with_slot(State::Broken, crate::word::NO_STORE_PAGE)
                } else {
                    Word::new(State::Zero)
                }
            }
            (Busy::Sharing, _, _) => {
                self.backend.punch(ppn, 1)?;
                idle
            }
            // It came home.
            (Busy::Homing, _, Place::Home) => {
                self.backend.rearm(ppn)?;
                self.lift(ppn)?;
                Word::new(State::Resident).set_sampled(word.sampled())
            }
            // It did not: a copy that is there may be half of one.
            (Busy::Homing, _, _) => {
                self.backend.punch(ppn, 1)?;
                idle
            }
            // Not booked as broken yet, so its protection is as it was.
            (_, State::Shared | State::Zero, _) => idle,
            _ => {
                self.lift(ppn)?;
                idle
            }
        })
    }

    /// Lifts the protection. Should that fail (a discard is pending), the next write faults and lifts it.
    pub(super) fn lift(&self, ppn: Ppn) -> Result<(), MemError> {
        match self.backend.unprotect(ppn) {
            Err(MemError::Crash) => Err(MemError::Crash),
            _ => Ok(()),
        }
    }

    /// Settles what was parked, once the VMM has answered. Answers how many pages still are.
    ///
    /// # Errors
    /// Of looking up where pages are mapped, other than what will pass: those stay parked.
    pub fn settle_parked(&self) -> Result<usize, MemError> {
        match self.commons.turn() {
            Some(_turn) => self.settle_all_parked(),
            None => Ok(0),
        }
    }

    fn settle_all_parked(&self) -> Result<usize, MemError> {
        let parked = self.commons.take_parked();
        let will_pass =
            |e: &MemError| matches!(e, MemError::Again | MemError::NoMemory | MemError::Unanswered);
        let mut left = 0;
        let mut result = Ok(());
        let places = match self.places_of(&parked) {
            Ok(places) => places,
            Err(e) => {
                left = parked.len();
                self.commons.park(parked);
                return if will_pass(&e) { Ok(left) } else { Err(e) };
            }
        };
        for (ppn, place) in parked.into_iter().zip(places) {
            match place.and_then(|place| self.settle_page(ppn, place)) {
                Ok((before, after)) => self.release_left(before, after),
                Err(MemError::Crash) => return Err(MemError::Crash),
                Err(e) => {
                    self.commons.park([ppn]);
                    left += 1;
                    if !will_pass(&e) {
                        result = Err(e);
                    }
                }
            }
        }
        result.map(|()| left)
    }

    /// Releases the reference that a word named, if the next one does not.
    pub(super) fn release_left(&self, before: Word, after: Word) {
        if let (Some(page), None) = (before.store_page(), after.store_page()) {
            self.release_store_page(page);
        }
    }

    /// A copy that the kernel made is there already and must be booked, whatever is free.
    pub(super) fn charge_copy(&self) {
        self.charged.fetch_add(1, crate::sync::Ordering::Relaxed);
        self.host.ledger.adopt(ballast_units::Pages(1));
    }

    pub(super) fn release_store_page(&self, page: ballast_sharing::StorePage) {
        if let Some(member) = self.membership() {
            member.domain.release(page);
        }
    }
}
