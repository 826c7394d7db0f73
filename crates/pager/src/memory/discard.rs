//! Pages that the guest gave up: inflated into its balloon, or reported free. Their contents are
//! void from the moment the VMM announces it.

use ballast_units::{Ppn, SlotId};

use super::{Counters, Memory};
use crate::backend::{Backend, MemError};
use crate::word::{Busy, State, Word};

impl<B: Backend> Memory<B> {
    /// Drops the pages of `[first, first + n)`. Answers those that another transition holds at the
    /// moment, as ranges: they must be discarded later, and no fault on them may be served before.
    pub fn discard(&self, first: Ppn, n: u64) -> (Vec<(Ppn, u64)>, Result<(), MemError>) {
        let end = first.0.saturating_add(n).min(self.pmap.len().0);
        let mut busy: Vec<(Ppn, u64)> = Vec::new();
        let mut at = first.0;
        while at < end {
            // Resident neighbours are punched with one call.
            let run = (at..end).take_while(|&p| self.claim_discard(Ppn(p))).count() as u64;
            if run > 0 {
                if let Err(e) = self.punch_run(Ppn(at), run) {
                    busy.push((Ppn(at), end - at));
                    return (busy, Err(e));
                }
                at += run;
            } else {
                if !self.discard_unbacked(Ppn(at)) {
                    match busy.last_mut() {
                        Some((p, m)) if p.0 + *m == at => *m += 1,
                        _ => busy.push((Ppn(at), 1)),
                    }
                }
                at += 1;
            }
        }
        (busy, Ok(()))
    }

    fn claim_discard(&self, ppn: Ppn) -> bool {
        let word = self.pmap.load(ppn);
        word.state() == State::Resident
            && word.is_idle()
            && self.pmap.exchange(ppn, word, word.set_busy(Busy::Discarding)).is_ok()
    }

    /// The VMM punches the pages too, before or after this; freeing them here and now is what lets
    /// the ledger count them as free.
    fn punch_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        if let Err(e) = self.backend.punch(first, n) {
            if e != MemError::Crash {
                for p in (first.0..first.0 + n).map(Ppn) {
                    self.pmap.store(p, Word::new(State::Resident));
                }
            }
            return Err(e);
        }
        for p in (first.0..first.0 + n).map(Ppn) {
            self.pmap.store(p, Word::new(State::Ballooned));
        }
        self.uncharge(n);
        Counters::add(&self.counters.discarded, n);
        Ok(())
    }

    /// False if the page is busy, or became resident meanwhile.
    fn discard_unbacked(&self, ppn: Ppn) -> bool {
        loop {
            let word = self.pmap.load(ppn);
            if !word.is_idle() || word.state() == State::Resident {
                return false;
            }
            let void = Word::new(State::Ballooned).set_sampled(word.sampled());
            match word.state() {
                State::Shared | State::Broken | State::Compressed => return true,
                _ if self.pmap.exchange(ppn, word, void).is_err() => continue,
                State::Swapped => self.free_slot(SlotId(word.slot())),
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
