//! Victims among the pages that came back after they had been away for long (`memory::probation`): those that were
//! not accessed again. They are few, and the first to go, so that what is wanted once does not drive out what is in
//! use (the queue A1in of 2Q: Johnson and Shasha, VLDB'94, s.3). Each is watched when half of those that are on
//! probation have come after it, and looked at when it is the oldest.

use std::collections::VecDeque;

use ballast_units::Ppn;

use super::cold::may_leave;
use super::reclaim::Reclaim;
use crate::backend::Backend;
use crate::memory::{Counters, MOST_ON_PROBATION};
use crate::word::State;

/// This part of the pages at home is on probation.
const PART: u64 = 16;
/// Pages that are watched together: one system call, and one flush of the guest's translations.
const TOGETHER: usize = 64;
/// Pages that are looked at in vain for one victim.
const ASKED: usize = 64;

/// Pages on probation, the first to come first.
#[derive(Default)]
pub(super) struct Trial {
    fresh: VecDeque<Ppn>,
    watched: VecDeque<Ppn>,
}

impl Reclaim {
    /// A page on probation that was not accessed since it was watched. None: none is due, or it is not known of the
    /// first that are.
    pub(super) fn fails_probation(&mut self) -> Option<Ppn> {
        let memory = self.vm.memory.clone();
        self.trial.fresh.append(&mut memory.take_returned());
        let most = memory.pmap().in_state(State::Resident).0 / PART;
        let most = most.min(MOST_ON_PROBATION) as usize;
        let together = TOGETHER.min(most / 4).max(1);
        while self.trial.fresh.len() > most / 2 + together {
            let first: Vec<Ppn> = self.trial.fresh.drain(..together).collect();
            let (here, gone): (Vec<Ppn>, Vec<Ppn>) = first
                .into_iter()
                .partition(|&ppn| memory.is_on_probation(ppn) && may_leave(&memory, ppn));
            gone.into_iter().for_each(|ppn| memory.end_probation(ppn));
            let mut some = here.clone();
            // The kernel finds neighbours sooner.
            some.sort_unstable();
            if !some.is_empty() && !memory.backend().watch(&some) {
                // Accesses are not seen.
                here.into_iter().for_each(|ppn| memory.end_probation(ppn));
                return None;
            }
            self.trial.watched.extend(here);
        }
        for _ in 0..ASKED {
            if self.trial.fresh.len() + self.trial.watched.len() <= most {
                return None;
            }
            let ppn = self.trial.watched.pop_front()?;
            let here = memory.is_on_probation(ppn) && may_leave(&memory, ppn);
            memory.end_probation(ppn);
            if here && !memory.backend().accessed(ppn, 1)[0] {
                Counters::add(&memory.counters.failed_probation, 1);
                return Some(ppn);
            }
            if here {
                memory.note_used(ppn);
            }
        }
        None
    }
}
