//! Large pages are allocated before they are touched, and until then the kernel says that nothing is
//! there. Whoever concludes from that that a page is gone must make it so: protected, nothing can be
//! written to it any more; what then still has nothing is punched.

use ballast_units::Ppn;

use super::Memory;
use super::recover::retry;
use crate::backend::{Backend, MemError};
use crate::word::{Busy, State, Word};

impl<B: Backend> Memory<B> {
    /// Frees what of `[first, end)` was allocated and never touched. The caller holds the pages' busy bits, or
    /// is alone; all are mapped home.
    pub(super) fn drop_latent(&self, first: u64, end: u64) -> Result<(), MemError> {
        self.backend.protect_run(Ppn(first), end - first)?;
        let mut at = first;
        while at < end {
            let present = self.backend.next_present(Ppn(at), end)?.clamp(at, end);
            if present > at {
                self.backend.punch(Ppn(at), present - at)?;
            }
            at = match present < end {
                true => self.backend.next_absent(Ppn(present), end)?.clamp(present + 1, end),
                false => end,
            };
        }
        self.backend.unprotect_run(Ppn(first), end - first)
    }

    /// Recovery: where pages may be allocated and unseen, nothing is, afterwards. Where no page has a word, none
    /// was ever allocated.
    pub(super) fn settle_latent(&self, drain: &dyn Fn()) -> Result<(), MemError> {
        for region in self.regions.known(&self.pmap) {
            let first = self.regions.first(region).0;
            let end = first + self.regions.size().0;
            let mut at = first;
            while at < end {
                let run = (at..end).take_while(|&p| at_home(self.pmap.load(Ppn(p)))).count() as u64;
                self.settle_run(at, at + run, drain)?;
                at += run.max(1);
            }
        }
        Ok(())
    }

    fn settle_run(&self, first: u64, end: u64, drain: &dyn Fn()) -> Result<(), MemError> {
        let mut at = first;
        while at < end {
            let present = self.backend.next_present(Ppn(at), end)?.clamp(at, end);
            // What is Untouched or Ballooned, and in no transition, was not allocated.
            let may_be = (at..present)
                .map(|p| self.pmap.load(Ppn(p)))
                .any(|word| !word.is_idle() || word.state() == State::Resident);
            if may_be {
                retry(drain, || self.drop_latent(at, present))?;
            }
            at = match present < end {
                true => self.backend.next_absent(Ppn(present), end)?.clamp(present + 1, end),
                false => end,
            };
        }
        Ok(())
    }
}

/// Whether the page's mapping is home and its home page, if it has one, its only one or the same as the
/// other.
fn at_home(word: Word) -> bool {
    let state = word.state();
    matches!(state, State::Untouched | State::Ballooned | State::Resident | State::Held)
        && matches!(word.busy(), Busy::Idle | Busy::Filling | Busy::Evicting | Busy::Discarding)
}
