//! Pages that the guest gave up: inflated into its balloon, or reported free.
//!
//! Two facts shape this. The VMM discards the page itself: it punches the hole and then announces
//! it, or announces it and then punches. And once its announcement is read, the guest may use the
//! page again before we have booked anything. So a discard is booked, never done: a home page that
//! is there stays (it is new, or the VMM is about to punch it: `reconcile` books it later), one
//! that is gone is released, and a copy elsewhere is dropped if it left home before the event was
//! read.

use ballast_units::Ppn;

use super::departures::{Mark, Since};
use super::{Counters, Memory};
use crate::backend::{Backend, MemError};
use crate::word::{Busy, State, Word};

/// Of so many neighbours that nobody touched, none gets a word because it was given up: a block of virtio-mem.
const PASSED_OVER: u64 = 512;

/// What a discard could not book, as ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unbooked {
    /// Held by another transition at the moment: to be discarded again, with the same mark.
    pub busy: Vec<(Ppn, u64)>,
    /// At home, against expectation: to be reconciled when the VMM has had time to punch.
    pub present: Vec<(Ppn, u64)>,
}

impl<B: Backend> Memory<B> {
    /// To be taken before events are read, and given to the discards among them.
    pub fn mark(&self) -> Mark {
        self.departures.mark()
    }

    /// Reads events by `read`; with what came of it, the mark for the discards among them, which is taken before that: what
    /// leaves home while they are read may have been written since it was given up.
    pub fn read_marked<T>(&self, read: impl FnOnce() -> T) -> (Mark, T) {
        let mark = self.mark();
        (mark, read())
    }

    /// Books that the VMM gave up `[first, first + n)`, in an event read after `mark`.
    ///
    /// # Errors
    /// Of looking up which pages are gone; those that are not booked are in `Unbooked`.
    pub fn discard(&self, first: Ppn, n: u64, mark: Mark) -> (Unbooked, Result<(), MemError>) {
        let mut left = Unbooked::default();
        let mut since = self.departures.since(mark);
        let away = |memory: &Self, ppn| memory.discard_away(ppn, &mut since);
        let result = self.book(first, n, &mut left, away);
        (left, result)
    }

    /// Books home pages of `[first, first + n)` that are gone; passes over everything else, also over what another step holds.
    /// What the kernel refused to look at is `busy` in what it answers; what is `present` is the guest's.
    ///
    /// # Errors
    /// Of looking up which pages are gone.
    pub fn reconcile(&self, first: Ppn, n: u64) -> (Unbooked, Result<(), MemError>) {
        let mut left = Unbooked::default();
        let result = self.book(first, n, &mut left, |_, _| true);
        (left, result)
    }

    fn book(
        &self,
        first: Ppn,
        n: u64,
        left: &mut Unbooked,
        mut away: impl FnMut(&Self, Ppn) -> bool,
    ) -> Result<(), MemError> {
        let end = first.0.saturating_add(n).min(self.pmap.len().0);
        let mut at = first.0;
        while at < end {
            // What nobody touched has nothing to give up: a whole region, as virtio-mem gives it up when its guest
            // begins, costs what is known of it.
            if let Some(until) = self.pmap.unknown_until(Ppn(at))
                && until.0.min(end) - at >= PASSED_OVER
            {
                at = until.0.min(end);
                continue;
            }
            // Neighbours at home are looked up with one call.
            let run = (at..end).take_while(|&p| self.claim_discard(Ppn(p))).count() as u64;
            if run > 0 {
                if let Err(e) = self.book_home(at, at + run, left) {
                    push(&mut left.busy, at, end);
                    return Err(e);
                }
                at += run;
            } else {
                if !away(self, Ppn(at)) {
                    push(&mut left.busy, at, at + 1);
                }
                at += 1;
            }
        }
        Ok(())
    }

    fn claim_discard(&self, ppn: Ppn) -> bool {
        let word = self.pmap.load(ppn);
        word.state() == State::Resident
            && word.is_idle()
            && self.pmap.exchange(ppn, word, word.set_busy(Busy::Discarding)).is_ok()
    }

    /// Releases those of the claimed pages that are gone.
    fn book_home(&self, first: u64, end: u64, left: &mut Unbooked) -> Result<(), MemError> {
        if self.regions.any_large(first, end) {
            match self.drop_latent(first, end) {
                Ok(()) => {}
                Err(MemError::Crash) => return Err(MemError::Crash),
                Err(e) => {
                    self.store_run(first, end, State::Resident);
                    if e != MemError::Again {
                        return Err(e);
                    }
                    push(&mut left.busy, first, end);
                    return Ok(());
                }
            }
        }
        let mut at = first;
        while at < end {
            let present = self.known(self.backend.next_present(Ppn(at), end), at, end)?;
            self.regions.tear(&self.pmap, at, present);
            self.store_run(at, present, State::Ballooned);
            self.uncharge(present - at);
            Counters::add(&self.counters.discarded, present - at);
            if present == end {
                break;
            }
            // A second one side by side: there may be many, of a VMM that has punched none.
            let is_second = at > first && present == at;
            at = present;
            let until = match is_second {
                true => self.known(self.backend.next_absent(Ppn(at), end), at, end)?.max(at + 1),
                false => at + 1,
            };
            self.store_run(at, until, State::Resident);
            push(&mut left.present, at, until);
            at = until;
        }
        Ok(())
    }

    /// What the kernel tells of claimed pages; where it refuses to, they are at home, as far as is known.
    fn known(&self, told: Result<u64, MemError>, at: u64, end: u64) -> Result<u64, MemError> {
        match told {
            Ok(found) => Ok(found.clamp(at, end)),
            Err(e) => {
                if e != MemError::Crash {
                    self.store_run(at, end, State::Resident);
                }
                Err(e)
            }
        }
    }

    fn store_run(&self, first: u64, end: u64, state: State) {
        for p in (first..end).map(Ppn) {
            if state == State::Resident {
                // Its protection may have been lifted.
                self.commons.unwritten.remove(p);
            }
            self.pmap.store(p, Word::new(state));
        }
    }

    /// False if the page is busy, or became resident meanwhile.
    fn discard_away(&self, ppn: Ppn, since: &mut Since<'_>) -> bool {
        loop {
            let word = self.pmap.load(ppn);
            if !word.is_idle() || word.state() == State::Resident {
                return false;
            }
            let void = Word::new(State::Ballooned).set_sampled(word.sampled());
            // It is asked when it left while nobody else has it: it may come home, be written, and leave again, to the same
            // place.
            let (claimed, is_away) = match word.state() {
                // Shared with others, the page costs nothing; a copy is dropped when it has gone home.
                State::Shared | State::Zero | State::Broken => return true,
                State::Untouched | State::Ballooned | State::Resident => (void, false),
                State::Staged
                | State::Held
                | State::Swapped
                | State::Compressed
                | State::Filled => (word.set_busy(Busy::Discarding), true),
            };
            match self.pmap.exchange(ppn, word, claimed) {
                Ok(()) => {}
                // The run folder has no memory for its word. It has nothing to give up either.
                Err(now) if now == word => return true,
                Err(_) => continue,
            }
            if is_away {
                if since.may_have(ppn) {
                    self.pmap.store(ppn, word);
                    return true;
                }
                self.pmap.store(ppn, void);
            }
            match word.state() {
                State::Swapped => self.free_slot(word.stored().slot),
                State::Compressed => self.free_named(word),
                State::Held => {
                    self.stage.free_hold(word.slot());
                    self.uncharge(1);
                }
                _ => {}
            }
            return true;
        }
    }
}

fn push(ranges: &mut Vec<(Ppn, u64)>, at: u64, end: u64) {
    match ranges.last_mut() {
        Some((p, n)) if p.0 + *n == at => *n += end - at,
        _ => ranges.push((Ppn(at), end - at)),
    }
}
