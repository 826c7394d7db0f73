//! Shared and broken pages go home: the VMM copies what the guest sees into the RAM file and maps
//! that again. Write-protected meanwhile, so nothing is missed; the store's page keeps its reference
//! until no mapping shows it.

use ballast_units::Ppn;

use super::{Counters, Memory};
use crate::backend::{Backend, MemError, Place, Remap};
use crate::word::{Busy, State, Word};

impl<B: Backend> Memory<B> {
    /// Brings pages home, as many as may be under way at one time (`MOVING`), in the order given.
    /// Answers how many came. Those that did not are where they were; so are all broken ones where pages may
    /// not move: a device may be writing to the copy. To what is shared none can: it would be broken.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. Pages that did not come are where they were, or parked (`settle_parked`).
    pub fn go_home(&self, pages: &[Ppn]) -> Result<usize, MemError> {
        let Some(_turn) = self.commons.turn() else { return Ok(0) };
        if !self.can_change()? {
            return Ok(0);
        }
        self.settle_debt();
        let room = self.room_to_move() as usize;
        let mut runs = Vec::new();
        let mut set_out = 0;
        for &ppn in pages {
            if set_out >= room {
                break;
            }
            match self.set_out(ppn) {
                Ok(true) => {
                    Remap::push(&mut runs, ppn, Place::Home);
                    set_out += 1;
                }
                Ok(false) | Err(MemError::Again) => {}
                Err(MemError::Crash) => return Err(MemError::Crash),
                Err(e) => {
                    self.arrive(&runs)?;
                    return Err(e);
                }
            }
        }
        let home = self.arrive(&runs)?;
        self.settle_debt();
        Counters::add(&self.counters.homed, home as u64);
        Ok(home)
    }

    /// Claims a page for the way home.
    fn set_out(&self, ppn: Ppn) -> Result<bool, MemError> {
        let word = self.pmap.load(ppn);
        let may = match word.state() {
            State::Shared => true,
            State::Broken => self.may_move(),
            _ => false,
        };
        if !may || !word.is_idle() {
            return Ok(false);
        }
        if self.pmap.exchange(ppn, word, word.set_busy(Busy::Homing)).is_err() {
            return Ok(false);
        }
        match word.state() {
            State::Shared => self.charge_moving(1),
            // What the guest writes must wait from here on.
            _ => {
                if let Err(e) = self.backend.protect(ppn) {
                    if e != MemError::Crash {
                        self.pmap.store(ppn, word);
                    }
                    return Err(e);
                }
            }
        }
        Ok(true)
    }

    /// Has claimed pages mapped home. Answers how many were.
    pub(super) fn arrive(&self, runs: &[Remap]) -> Result<usize, MemError> {
        if runs.is_empty() {
            return Ok(0);
        }
        let (done, result) = self.remap(runs);
        self.arrived(runs, done, result)
    }

    /// So many runs are mapped home, and what became of the rest. Answers how many pages came.
    pub(super) fn arrived(
        &self,
        runs: &[Remap],
        done: usize,
        result: Result<(), MemError>,
    ) -> Result<usize, MemError> {
        if result == Err(MemError::Crash) {
            return Err(MemError::Crash);
        }
        let (whole, rest) = runs.split_at(done);
        let mut home = 0;
        for run in whole {
            self.arrived_home(run)?;
            home += run.n as usize;
        }
        let Err(e) = result else { return Ok(home) };
        match e {
            MemError::Unanswered | MemError::Gone => {
                self.commons.park(rest.iter().flat_map(Remap::pages));
            }
            _ => self.settle_runs(rest, |change| {
                if let Some((before, after)) = change {
                    self.release_left(before, after);
                    home += usize::from(after.state() == State::Resident);
                }
            })?,
        }
        match e {
            MemError::Again | MemError::Unanswered | MemError::NoMemory => Ok(home),
            e => Err(e),
        }
    }

    fn arrived_home(&self, run: &Remap) -> Result<(), MemError> {
        for ppn in run.pages() {
            let word = self.pmap.load(ppn);
            self.is_home(ppn, word.sampled());
            if word.state() == State::Broken {
                self.has_been_written(ppn);
            }
            if let Some(page) = word.store_page() {
                self.release_store_page(page);
            }
        }
        // Who is not woken here is when what he waits for is tried again.
        match self.backend.wake(run.first, run.n) {
            Err(MemError::Crash) => Err(MemError::Crash),
            _ => Ok(()),
        }
    }

    /// A write to a page of the store or of the zeros, which the policy has room for: its protection
    /// is lifted, and the kernel copies it for whoever waits.
    pub(super) fn let_break(&self, ppn: Ppn, word: Word) -> Result<(), MemError> {
        let payload = match word.state() {
            State::Zero => crate::word::NO_STORE_PAGE,
            _ => word.slot(),
        };
        let broken = Word::with_slot(State::Broken, payload);
        self.pmap.store(ppn, broken.set_busy(Busy::Breaking));
        if let Err(e) = self.backend.unprotect(ppn) {
            if e != MemError::Crash {
                self.pmap.store(ppn, word.set_busy(Busy::Idle));
            }
            return Err(e);
        }
        self.pmap.store(ppn, broken);
        self.commons.add_broken(ppn);
        Counters::add(&self.counters.breaks, 1);
        if word.sampled() {
            self.was_touched(ppn);
        }
        Ok(())
    }
}
