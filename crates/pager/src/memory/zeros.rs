//! Reading a page that was never written allocates nothing: the page of zeros that all VMs read is
//! mapped there (a migration or a dump reads all of a guest's memory).

use ballast_units::Ppn;

use super::Memory;
use crate::backend::{Backend, MemError, Place, Remap};
use crate::mappings::zero_run;
use crate::word::{Busy, NO_STORE_PAGE, State, Word};

impl<B: Backend> Memory<B> {
    /// Maps zeros at up to `n` untouched pages from `first` on; stops at the first that is not
    /// untouched. Answers how many were; none where pages may not move, or the VMM has no mappings to spare.
    ///
    /// # Errors
    /// Of the operations on the VMM's memory. Pages of which is not known what came of them are parked.
    pub fn map_zeros(&self, first: Ppn, n: u64) -> Result<u64, MemError> {
        let Some(_turn) = self.commons.turn() else { return Ok(0) };
        if !self.may_move() || !self.may_remap(1) || !self.can_change()? {
            return Ok(0);
        }
        let n = n.min(zero_run(first));
        let end = first.0.saturating_add(n).min(self.pmap.len().0);
        let busy = Word::UNTOUCHED.set_busy(Busy::Sharing);
        let claimed = (first.0..end)
            .take_while(|&p| self.claim_small(Ppn(p), Word::UNTOUCHED, busy))
            .count() as u64;
        if claimed == 0 {
            return Ok(0);
        }
        let run = Remap { first, n: claimed, to: Place::Zeros };
        match self.remap(&[run]) {
            (1, _) => {}
            (_, Err(MemError::Crash)) => return Err(MemError::Crash),
            (_, Err(MemError::Unanswered | MemError::Gone)) => {
                self.commons.park(run.pages());
                return Ok(0);
            }
            (_, result) => {
                self.settle_runs(&[run], |_| {})?;
                return match result {
                    Ok(()) | Err(MemError::Again | MemError::NoMemory | MemError::Fixed) => Ok(0),
                    Err(e) => Err(e),
                };
            }
        }
        let copied = match self.backend.copied(first, claimed) {
            Ok(copied) => copied,
            Err(MemError::Crash) => return Err(MemError::Crash),
            Err(e) => {
                self.commons.park(run.pages());
                return Err(e);
            }
        };
        for (ppn, copied) in run.pages().zip(copied) {
            if copied {
                self.charge_copy();
                self.pmap.store(ppn, Word::with_slot(State::Broken, NO_STORE_PAGE));
                self.commons.add_broken(ppn);
            } else {
                self.pmap.store(ppn, Word::new(State::Zero));
            }
        }
        self.backend.wake(first, claimed)?;
        Ok(claimed)
    }
}
