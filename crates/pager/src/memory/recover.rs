//! A manager takes over a VM that runs: from the pmap alone, every page found busy is finished or
//! rolled back, and everything derived is rebuilt.

use ballast_compress::Place;
use ballast_units::{Pages, Ppn, SlotId};

use super::Memory;
use crate::advance::{Advance, Tally};
use crate::backend::{Backend, MemError};
use crate::sync::{Ordering, lock};
use crate::word::{Busy, State, Word};

/// What recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Pages that were in the middle of a transition.
    pub busy: u64,
    /// Pages in write clusters of the stage; they must be written again.
    pub staged: Vec<(Ppn, u64)>,
    /// Pages in holds; the sample they belonged to is over.
    pub held: Vec<Ppn>,
    /// Resident by the books, not there: discarded while nobody listened.
    pub absent: u64,
}

impl<B: Backend> Memory<B> {
    /// Called once, before any other operation, with nobody else at the pages. Guests that wait are
    /// woken at the end: they fault again, to the new manager. `drain` reads the events that stand
    /// in the way (EAGAIN). What it finds is booked in place of what was booked in advance.
    ///
    /// # Errors
    /// Words name what does not exist or is another page's, or it cannot be told what is in the VMM's memory. Words before
    /// that are settled.
    pub fn recover(
        &self,
        drain: &dyn Fn(),
        advance: Option<&Advance>,
    ) -> Result<Recovered, RecoverError> {
        let mut found = Recovered::default();
        let mut charged = 0;
        let most = cfg!(debug_assertions).then(|| self.tally());
        self.settle_latent(drain)?;
        let moving: Vec<Ppn> =
            self.pmap.known().filter(|&p| Self::is_moving(self.pmap.load(p))).collect();
        let mut moving = moving.iter().zip(self.places_of(&moving)?).peekable();
        let mut home = Presence::default();
        for ppn in self.pmap.known() {
            let mut word = self.pmap.load(ppn);
            if let Some((_, place)) = moving.next_if(|m| *m.0 == ppn) {
                let place = place?;
                let next = retry(drain, || self.settled(ppn, word, place))?;
                // In this order: a reference without a word is one that is lost.
                self.pmap.store(ppn, next);
                self.release_left(word, next);
                word = next;
                found.busy += 1;
            } else if !word.is_idle() {
                word = self.settle(ppn, word, drain)?;
                found.busy += 1;
            }
            if word.sampled() {
                // The period it belonged to is over.
                word = word.set_sampled(false);
            }
            if word.state() == State::Resident && !home.has(&self.backend, ppn, self.pmap.len())? {
                word = Word::new(State::Ballooned);
                found.absent += 1;
            }
            charged += self.claim_named(ppn, word, &mut found)?;
            self.pmap.store(ppn, word);
        }
        self.regions.rebuild(&self.pmap);
        self.tier.trim();
        debug_assert!(most.is_none_or(|most| charged <= most.0), "{charged} of {most:?}");
        match advance {
            Some(advance) => advance.settle(Pages(charged)),
            None => self.host.ledger.adopt(Pages(charged)),
        }
        self.charged.store(charged, Ordering::Relaxed);
        retry(drain, || self.backend.wake(Ppn(0), self.pmap.len().0))?;
        Ok(found)
    }

    /// Claims what an idle word names: a slot of swap, of the stage, of the tier. Answers what is charged for the page.
    fn claim_named(
        &self,
        ppn: Ppn,
        word: Word,
        found: &mut Recovered,
    ) -> Result<u64, RecoverError> {
        let (slot, layout) = (word.slot(), self.stage.layout());
        let mut charged = u64::from(word.state().charged());
        match word.state() {
            State::Swapped if !lock(&self.slots).claim(word.stored().slot) => {
                return Err(RecoverError::Slot { ppn, slot: word.stored().slot });
            }
            State::Staged if slot >= layout.write_slots() => {
                return Err(RecoverError::Stage { ppn, slot });
            }
            State::Held if !(layout.write_slots()..layout.pages().0).contains(&slot) => {
                return Err(RecoverError::Stage { ppn, slot });
            }
            State::Compressed => {
                let claimed = Place::from_bits(slot).and_then(|place| self.tier.claim(place));
                charged += u64::from(claimed.ok_or(RecoverError::Tier { ppn, slot })?);
            }
            State::Broken => self.commons.add_broken(ppn),
            State::Staged => found.staged.push((ppn, slot)),
            State::Held => {
                self.stage.claim_hold(slot);
                found.held.push(ppn);
            }
            _ => {}
        }
        Ok(charged)
    }

    /// What an advance for it would be.
    fn tally(&self) -> Pages {
        let mut tally = Tally::default();
        self.pmap.known().for_each(|ppn| tally.add(self.pmap.load(ppn)));
        tally.pages()
    }

    /// Takes the VM out of the books again, for the next `recover` to book it anew: its machine memory
    /// leaves the ledger, it leaves its domain, and no page of it is moved any more. The references that its
    /// words hold stay. No thread of its own may be at it any more.
    pub(crate) fn disown(&self) {
        self.close();
        if let Some(member) = self.membership() {
            member.domain.leave(self);
        }
        let charged = self.charged.swap(0, Ordering::Relaxed);
        self.host.ledger.release(Pages(self.pay_debt(charged)));
    }

    /// The idle word of a page whose transition was cut short.
    fn settle(&self, ppn: Ppn, word: Word, drain: &dyn Fn()) -> Result<Word, RecoverError> {
        let idle = word.set_busy(Busy::Idle);
        Ok(match (word.busy(), word.state()) {
            // Not copied yet, or not known to be: the home page is whole.
            (Busy::Evicting, State::Resident) => {
                retry(drain, || self.backend.unprotect(ppn))?;
                idle
            }
            // The home page was protected all the while: it is the same. It may be a part of a large page,
            // which is freed whole or not at all.
            (Busy::Evicting, State::Held | State::Untouched) if self.backend.present(ppn)? => {
                retry(drain, || self.backend.unprotect(ppn))?;
                Word::new(State::Resident)
            }
            // Copied. The home page, if there still, was protected all the while: it is the same.
            (Busy::Evicting, _) => {
                retry(drain, || self.backend.punch(ppn, 1))?;
                idle
            }
            // The home page may be there, and the guest may have written to it since.
            (Busy::Filling, _) if self.backend.present(ppn)? => {
                retry(drain, || self.backend.unprotect(ppn))?;
                Word::new(State::Resident)
            }
            (Busy::Filling, _) => idle,
            // Its event had been read, so the guest may have used the page again: what is there stays,
            // what is not is booked as given up.
            (Busy::Discarding, _) => idle,
            // The others change the mapping: see `settled`.
            _ => idle,
        })
    }
}

/// Which home pages are there, looked up by whole runs. What recovery itself does to home pages, it does
/// to pages that are not Resident then; what the guest gives up meanwhile is announced, and booked when
/// that is read.
#[derive(Default)]
struct Presence {
    /// The run of present pages that was found last: `[from, until)`, and none between the page that
    /// was asked about then and `from`.
    from: u64,
    until: u64,
}

impl Presence {
    /// Asked in rising order.
    fn has<B: Backend>(&mut self, backend: &B, ppn: Ppn, len: Pages) -> Result<bool, MemError> {
        if ppn.0 >= self.until {
            self.from = backend.next_present(ppn, len.0)?;
            self.until = match self.from < len.0 {
                true => backend.next_absent(Ppn(self.from), len.0)?.max(self.from + 1),
                false => len.0,
            };
        }
        Ok(ppn.0 >= self.from)
    }
}

/// EAGAIN lasts as long as an unread REMOVE event.
pub(super) fn retry<T>(
    drain: &dyn Fn(),
    op: impl Fn() -> Result<T, MemError>,
) -> Result<T, MemError> {
    for _ in 0..2000 {
        match op() {
            Err(MemError::Again) => {
                drain();
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            other => return other,
        }
    }
    Err(MemError::Again)
}

/// Why a VM cannot be taken over. Its guest stays paused at its next fault, whole.
#[allow(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Memory(#[from] MemError),
    #[error("pmap: {ppn} names swap slot {}, which does not exist or is another page's", .slot.0)]
    Slot { ppn: Ppn, slot: SlotId },
    #[error(
        "pmap: {ppn} names slot {slot} of the compressed tier, which does not exist or is another page's"
    )]
    Tier { ppn: Ppn, slot: u64 },
    #[error("pmap: {ppn} names stage slot {slot}, which is not one of its kind")]
    Stage { ppn: Ppn, slot: u64 },
    /// A mistake of this program's, found by a debug build before it did harm.
    #[error("what was recovered breaks an invariant: {0}")]
    Unsound(String),
}
