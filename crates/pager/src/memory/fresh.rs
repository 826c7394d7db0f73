//! Pages that the guest has not touched, or has given up: there is nothing to restore. While memory is plentiful
//! their neighbours come too, and where touches follow one another, more behind the guest's back (`first_touches`).

use std::ops::Range;

use ballast_units::Ppn;

use super::fault::Fault;
use super::first_touches::Ahead;
use super::{Counters, Memory};
use crate::backend::{Backend, MemError};
use crate::word::{State, Word};

impl<B: Backend> Memory<B> {
    /// A zero page, and its untouched neighbours while memory is plentiful.
    pub(super) fn fault_fresh(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        self.charge(1).map_err(Fault::Wait)?;
        if let Err(busy) = self.claim(ppn, word) {
            self.uncharge(1);
            return Err(busy);
        }
        let run = self.claim_neighbours(ppn, word);
        match self.fill_zeros(&run, Some(ppn).filter(|_| word.sampled())) {
            Ok(()) => {
                Counters::add(&self.counters.unasked, run.end - run.start - 1);
                Ok(())
            }
            Err((_, MemError::Crash)) => Err(Fault::Failed(MemError::Crash)),
            Err((next, e)) => {
                self.give_back(next..run.end, Some(ppn));
                // The fault itself fails only if its own page did.
                if ppn.0 >= next { Err(self.unclaim(ppn, word, 1, e)) } else { Ok(()) }
            }
        }
    }

    /// Claims and charges the untouched, idle, unsampled neighbours of a claimed page inside its
    /// window.
    fn claim_neighbours(&self, ppn: Ppn, word: Word) -> Range<u64> {
        let alone = ppn.0..ppn.0 + 1;
        if word.state() != State::Untouched {
            return alone;
        }
        let window = self.first_touches.window(ppn);
        let end = window.end.min(self.pmap.len().0);
        let before = self.untouched((window.start..ppn.0).rev());
        let after = self.untouched(ppn.0 + 1..end);
        if before + after > 0 && !self.charge_if_plentiful(before + after) {
            return alone;
        }
        let before_got = self.claim_untouched((ppn.0 - before..ppn.0).rev());
        let after_got = self.claim_untouched(ppn.0 + 1..ppn.0 + 1 + after);
        self.uncharge(before + after - before_got - after_got);
        let run = ppn.0 - before_got..ppn.0 + 1 + after_got;
        self.first_touches.touched(&run);
        run
    }

    /// How many of these pages are untouched, idle and unsampled, up to the first that is not.
    pub(super) fn untouched(&self, pages: impl Iterator<Item = u64>) -> u64 {
        pages.take_while(|&p| self.pmap.load(Ppn(p)) == Word::UNTOUCHED).count() as u64
    }

    /// Claims these pages, up to the first that is not untouched any more. Answers how many.
    fn claim_untouched(&self, pages: impl Iterator<Item = u64>) -> u64 {
        pages.take_while(|&p| self.claim(Ppn(p), Word::UNTOUCHED).is_ok()).count() as u64
    }

    /// Zeros for claimed and charged pages, of which one may be `sampled`. Err: what went wrong, at which page: from
    /// there on they are claimed still.
    fn fill_zeros(&self, run: &Range<u64>, sampled: Option<Ppn>) -> Result<(), (u64, MemError)> {
        let mut next = run.start;
        while next < run.end {
            let done = match self.backend.zero(Ppn(next), run.end - next) {
                Ok(n) => n.clamp(1, run.end - next),
                // Somebody wrote the RAM file past us. It is the guest's page now, and charged.
                Err(MemError::Exists) => {
                    self.backend.wake(Ppn(next), 1).map_err(|e| (next, e))?;
                    1
                }
                Err(e) => return Err((next, e)),
            };
            for p in (next..next + done).map(Ppn) {
                self.came_home(p, Some(p) == sampled);
            }
            next += done;
        }
        Ok(())
    }

    /// What could not be filled goes back, but for the page that was asked for.
    fn give_back(&self, pages: Range<u64>, asked: Option<Ppn>) {
        for p in pages.map(Ppn).filter(|&p| Some(p) != asked) {
            self.pmap.store(p, Word::UNTOUCHED);
            self.uncharge(1);
        }
    }

    /// Whether a guest that touches memory in order may be run ahead of: then `run_ahead` is to be called.
    pub fn runs_ahead(&self) -> bool {
        self.first_touches.has_ahead()
    }

    /// Hands out the next pages that a guest which touches memory in order will touch, while memory is plentiful: a
    /// few, for a fault may come meanwhile, or a large page. Nobody waits for them, or only until they are there.
    ///
    /// # Errors
    /// What a fault on them would have met. What is not there is as it was.
    pub fn run_ahead(&self) -> Result<(), MemError> {
        let Some(ahead) = self.first_touches.ahead() else { return Ok(()) };
        let came = self.bring_ahead(&ahead);
        match &came {
            Ok(Some(run)) => self.first_touches.went(run),
            Err(MemError::Crash) => {}
            _ => self.first_touches.stop(&ahead.pages),
        }
        came.map(drop)
    }

    /// Hands out pages that nobody has asked for, from one end on, or the large page that they are at the edge of. Answers
    /// which came, None if not all that could be expected: then what follows is not to be tried.
    fn bring_ahead(&self, ahead: &Ahead) -> Result<Option<Range<u64>>, MemError> {
        let down = ahead.down;
        let mut pages = ahead.pages.start..ahead.pages.end.min(self.pmap.len().0);
        if pages.is_empty() {
            return Ok(None);
        }
        let edge = if down { pages.end - 1 } else { pages.start };
        // Whether the guest has what follows there is not known.
        let known = self.backend.surely_has(Ppn(if down { pages.end } else { pages.start - 1 }));
        pages = pages.start.max(known.start)..pages.end.min(known.end);
        if !pages.contains(&edge) {
            return Ok(None);
        }
        if let Some(region) = self.regions.of(Ppn(edge)) {
            let (first, n) = (self.regions.first(region).0, self.regions.size().0);
            if edge == if down { first + n - 1 } else { first } {
                if !ahead.is_long_for(n) {
                    return Ok(None);
                }
                let filled = self.is_within_target(n).then(|| self.fill_large(region, None));
                return match filled.flatten() {
                    Some(Ok(())) => Ok(Some(first..first + n)),
                    Some(Err(Fault::Failed(e))) => Err(e),
                    // It is not untouched, or memory is not plentiful any more.
                    _ => Ok(None),
                };
            }
            // It has small pages; the next may become a large one.
            pages = pages.start.max(first)..pages.end.min(first + n);
        }
        let most =
            if down { self.untouched(pages.clone().rev()) } else { self.untouched(pages.clone()) };
        if most == 0 || !self.is_within_target(most) || !self.charge_if_plentiful(most) {
            return Ok(None);
        }
        let run = if down {
            pages.end - self.claim_untouched((pages.end - most..pages.end).rev())..pages.end
        } else {
            pages.start..pages.start + self.claim_untouched(pages.start..pages.start + most)
        };
        self.uncharge(most - (run.end - run.start));
        match self.fill_zeros(&run, None) {
            Ok(()) => {
                Counters::add(&self.counters.unasked, run.end - run.start);
                Ok(Some(run).filter(|run| *run == pages))
            }
            Err((_, MemError::Crash)) => Err(MemError::Crash),
            Err((next, e)) => {
                self.give_back(next..run.end, None);
                Err(e)
            }
        }
    }

    /// Whether `n` pages more are what the policy grants the VM.
    fn is_within_target(&self, n: u64) -> bool {
        self.charged().0 + n <= self.target().0
    }
}
