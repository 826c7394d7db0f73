//! Statistical sampling of active memory (OSDI'02 s.5.3): a sampled page's mapping is invalidated
//! by moving the page into a hold of the stage, so that the next access faults and is counted, with
//! the time since.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::{Counters, Memory, NotEvicted};
use crate::backend::{Backend, MemError};
use crate::sync::{Mutex, lock};
use crate::word::{Busy, State, Word};

/// When the pages of the current sample were taken, and how long after that they were touched. Its lock
/// is taken by who samples and, once for each sampled page, by who serves its fault; it is never held
/// across anything but a push or a look-up.
#[derive(Default)]
pub struct Touches(Mutex<Times>);

#[derive(Default)]
struct Times {
    taken: HashMap<Ppn, Instant>,
    after: Vec<Duration>,
}

impl Touches {
    /// A new sample: what is known of the one before is forgotten.
    pub fn restart(&self) {
        let mut times = lock(&self.0);
        times.taken.clear();
        times.after.clear();
    }

    /// How long after they were taken pages were touched (wall-clock time), since this was last asked;
    /// of the current sample alone.
    pub fn take(&self) -> Vec<Duration> {
        std::mem::take(&mut lock(&self.0).after)
    }

    fn taken(&self, ppn: Ppn) {
        lock(&self.0).taken.insert(ppn, Instant::now());
    }

    fn touched(&self, ppn: Ppn) {
        let mut times = lock(&self.0);
        // One that was left over from the sample before has no place in this one.
        let taken = times.taken.remove(&ppn);
        times.after.extend(taken.map(|at| at.elapsed()));
    }
}

/// So many samples have a quarter as many more holds.
fn sampled_with(holds: u64) -> u64 {
    (holds * 4).div_ceil(5)
}

impl<B: Backend> Memory<B> {
    /// Puts a page under sample. False if it cannot be now (busy, or no hold is free).
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. The page is not under sample.
    pub fn sample(&self, ppn: Ppn) -> Result<bool, MemError> {
        let word = self.pmap.load(ppn);
        if !word.is_idle() || word.sampled() {
            return Ok(false);
        }
        if matches!(word.state(), State::Shared | State::Broken) {
            // Reading it is not seen where it is: `go_home` first.
            return Ok(false);
        }
        self.touches.taken(ppn);
        if word.state() != State::Resident {
            // Its next access faults anyway.
            return Ok(self.pmap.exchange(ppn, word, word.set_sampled(true)).is_ok());
        }
        if !self.may_hold() {
            return Ok(false);
        }
        let Some(hold) = self.stage.take_hold() else { return Ok(false) };
        if !self.claim_small(ppn, word, word.set_busy(Busy::Evicting)) {
            self.stage.free_hold(hold);
            return Ok(false);
        }
        match self.leave_home(ppn, &[word], State::Held, hold) {
            Ok(_) => {
                let held = Word::with_slot(State::Held, hold);
                // Between the two an access may have brought it home already: that is a touch.
                if self.pmap.exchange(ppn, held, held.set_sampled(true)).is_err() {
                    self.was_touched(ppn);
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

    /// Whether a page can be held for a sample: there is room, beside what it takes to break a large page, which is left for
    /// that, however large the sample.
    pub fn may_hold(&self) -> bool {
        self.stage.holds_free() as u64 > self.kept_holds()
    }

    /// The largest sample that it has room for, a quarter left for pages of the sample before: what was asked for when its
    /// stage was made.
    pub fn most_samples(&self) -> u64 {
        sampled_with(self.stage.layout().holds.saturating_sub(self.kept_holds()))
    }

    fn kept_holds(&self) -> u64 {
        if self.regions.is_empty() { 0 } else { self.regions.size().0 }
    }

    /// A sampled page was touched for the first time.
    pub(super) fn was_touched(&self, ppn: Ppn) {
        Counters::add(&self.counters.touched, 1);
        self.touches.touched(ppn);
    }

    /// Takes a page out of the sample: untouched through the period. A held page goes home; it is
    /// charged already. Answers false if it is busy at the moment: ask again.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. The page is as it was.
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
                self.is_home(ppn, false);
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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_room_for_the_samples_that_it_was_made_for() {
        for n in 0..10_000 {
            assert_eq!(sampled_with(n + n / 4), n);
        }
    }

    #[test]
    fn each_page_of_the_sample_tells_once_how_long_it_was_not_touched() {
        let touches = Touches::default();
        let begun = Instant::now();
        (1..4).for_each(|n| touches.taken(Ppn(n)));
        std::thread::sleep(Duration::from_millis(2));
        touches.touched(Ppn(1));
        touches.touched(Ppn(2));
        touches.touched(Ppn(2));
        // It is not of the sample.
        touches.touched(Ppn(9));
        let after = touches.take();
        assert_eq!(after.len(), 2);
        let most = begun.elapsed();
        assert!(after.iter().all(|&t| t >= Duration::from_millis(2) && t <= most), "{after:?}");
        assert!(touches.take().is_empty(), "told once");
        // What is left of it, and what was not asked for, is forgotten with it.
        touches.touched(Ppn(3));
        touches.taken(Ppn(4));
        touches.restart();
        touches.touched(Ppn(4));
        assert!(touches.take().is_empty());
    }
}
