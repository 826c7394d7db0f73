//! Statistical sampling of active memory (OSDI'02 s.5.3): a sampled page's mapping is invalidated
//! by moving the page into a hold of the stage, so that the next access faults and is counted.

use ballast_units::Ppn;

use super::{Counters, Memory, NotEvicted};
use crate::backend::{Backend, MemError};
use crate::word::{Busy, State, Word};

impl<B: Backend> Memory<B> {
    /// Puts a page under sample. False if it cannot be now (busy, or no hold is free).
    pub fn sample(&self, ppn: Ppn) -> Result<bool, MemError> {
        let word = self.pmap.load(ppn);
        if !word.is_idle() || word.sampled() {
            return Ok(false);
        }
        if matches!(word.state(), State::Shared | State::Broken) {
            // Reading it is not seen where it is: `go_home` first.
            return Ok(false);
        }
        if word.state() != State::Resident {
            // Its next access faults anyway.
            return Ok(self.pmap.exchange(ppn, word, word.set_sampled(true)).is_ok());
        }
        let Some(hold) = self.stage.take_hold() else { return Ok(false) };
        match self.leave_home(ppn, word, State::Held, hold) {
            Ok(held) => {
                // Between the two an access may have brought it home already: that is a touch.
                if self.pmap.exchange(ppn, held, held.set_sampled(true)).is_err() {
                    Counters::add(&self.counters.touched, 1);
                }
                Ok(true)
            }
            Err(NotEvicted::NotEligible) => {
                self.stage.free_hold(hold);
                Ok(false)
            }
            Err(NotEvicted::Failed(MemError::Crash)) => Err(MemError::Crash),
            Err(NotEvicted::Failed(e)) => {
                self.stage.free_hold(hold);
                match e {
                    MemError::Again => Ok(false),
                    e => Err(e),
                }
            }
        }
    }

    /// Takes a page out of the sample: untouched through the period. A held page goes home; it is
    /// charged already. Answers false if it is busy at the moment: ask again.
    pub fn unsample(&self, ppn: Ppn) -> Result<bool, MemError> {
        let word = self.pmap.load(ppn);
        if !word.is_idle() {
            return Ok(false);
        }
        if word.state() != State::Held {
            let plain = word.set_sampled(false);
            return Ok(word == plain || self.pmap.exchange(ppn, word, plain).is_ok());
        }
        if self.pmap.exchange(ppn, word, word.set_busy(Busy::Filling)).is_err() {
            return Ok(false);
        }
        // SAFETY: this thread holds the busy bit of the page whose word names the hold.
        let page = unsafe { self.stage.page(word.slot()) };
        match self.fill(ppn, page) {
            Ok(()) => {
                self.pmap.store(ppn, Word::new(State::Resident));
                self.stage.free_hold(word.slot());
                Ok(true)
            }
            Err(MemError::Crash) => Err(MemError::Crash),
            Err(e) => {
                self.pmap.store(ppn, word);
                match e {
                    MemError::Again | MemError::NoMemory => Ok(false),
                    e => Err(e),
                }
            }
        }
    }
}
