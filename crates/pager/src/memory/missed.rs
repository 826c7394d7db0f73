//! Which pages came home because they were wanted again soon after they had left: what replacement can
//! know of a guest without looking at it.

use ballast_units::Ppn;

use super::{Counters, Memory};
use crate::backend::Backend;

impl<B: Backend> Memory<B> {
    /// Whether the page, since it last came home, is known to have been wanted soon after it had left: it
    /// was in the stage or in the tier, which pages pass through on their way to swap. A hint: lost
    /// with the manager, and never needed for anything to be right.
    pub fn was_missed(&self, ppn: Ppn) -> bool {
        self.commons.missed.contains(ppn)
    }

    /// It is a page as any other from now on.
    pub fn forget_missed(&self, ppn: Ppn) {
        self.commons.missed.remove(ppn);
    }

    /// Its guest waited for it, and it had left lately.
    pub(super) fn note_missed(&self, ppn: Ppn) {
        self.commons.missed.insert(ppn);
    }

    /// It has just been evicted, and was shared before. A hint as the other.
    pub(crate) fn note_left_store(&self, ppn: Ppn) {
        self.commons.left_store.insert(ppn);
    }

    /// Its guest waited for it, wherever it was.
    pub(super) fn note_back(&self, ppn: Ppn) {
        let counter = match self.commons.left_store.contains(ppn) {
            true => {
                self.commons.left_store.remove(ppn);
                &self.counters.shared_back
            }
            false => &self.counters.own_back,
        };
        Counters::add(counter, 1);
        self.commons.probation.came(ppn);
    }
}
