//! Which pages came home after they had been away for long. Most of them were wanted once, and do not earn the
//! place of one that is in use: they are on probation (`service::trial`). One that comes back soon after it left had
//! better have stayed, and is a page as any other at once.
//!
//! A hint: lost with the manager, and never needed for anything to be right.

use std::collections::VecDeque;

use ballast_units::{Pages, Ppn};

use super::Memory;
use super::page_set::PageSet;
use crate::backend::Backend;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::word::State;

/// Soon is before this part of the pages at home, or up to twice that, have left after it.
const SOON: u64 = 8;
/// At most one page in so many of a VM is remembered to be on probation, and never more than `MOST`.
const PART: u64 = 16;
pub(crate) const MOST: u64 = 1 << 16;

pub(super) struct Probation {
    on: PageSet,
    /// Pages that left lately, in two turns: one is filled, the other was before.
    left: [PageSet; 2],
    /// Pages that have left in all the turns so far, and when the last one began.
    departures: AtomicU64,
    turn: AtomicU64,
    since: AtomicU64,
    /// In the order they came, for the reclaim thread to take.
    came: Mutex<VecDeque<Ppn>>,
    most: usize,
}

impl Probation {
    pub fn new(len: Pages) -> Probation {
        Probation {
            on: PageSet::new(len),
            left: [PageSet::new(len), PageSet::new(len)],
            departures: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            since: AtomicU64::new(0),
            came: Mutex::new(VecDeque::new()),
            most: (len.0 / PART).clamp(1, MOST) as usize,
        }
    }

    fn left_lately(&self, ppn: Ppn) -> bool {
        self.left.iter().any(|left| left.contains(ppn))
    }

    /// The page leaves, of so many that are at home. One thread at a time.
    fn left(&self, ppn: Ppn, at_home: Pages) {
        let departures = self.departures.fetch_add(1, Ordering::Relaxed) + 1;
        let since = departures - self.since.load(Ordering::Relaxed);
        let mut turn = self.turn.load(Ordering::Relaxed);
        if since > (at_home.0 / SOON).max(1) {
            self.since.store(departures, Ordering::Relaxed);
            turn += 1;
            self.left[turn as usize % 2].clear();
            self.turn.store(turn, Ordering::Relaxed);
        }
        self.left[turn as usize % 2].insert(ppn);
    }

    /// The page comes home, because it is wanted.
    pub fn came(&self, ppn: Ppn) {
        if self.left_lately(ppn) {
            self.left.iter().for_each(|left| left.remove(ppn));
            self.on.remove(ppn);
            return;
        }
        self.on.insert(ppn);
        let mut came = lock(&self.came);
        if came.len() == self.most
            && let Some(first) = came.pop_front()
        {
            self.on.remove(first);
        }
        came.push_back(ppn);
    }
}

impl<B: Backend> Memory<B> {
    /// A page has been evicted. By the reclaim thread.
    pub(crate) fn note_left(&self, ppn: Ppn) {
        self.commons.probation.left(ppn, self.pmap.in_state(State::Resident));
    }

    /// Pages that came home after they had been away for long, since this was asked last, in the order they came.
    pub(crate) fn take_returned(&self) -> VecDeque<Ppn> {
        std::mem::take(&mut *lock(&self.commons.probation.came))
    }
    /// Whether the page came home like that, and `end_probation` was not called for it yet.
    pub(crate) fn is_on_probation(&self, ppn: Ppn) -> bool {
        self.commons.probation.on.contains(ppn)
    }
    /// It is a page as any other from now on.
    pub(crate) fn end_probation(&self, ppn: Ppn) {
        self.commons.probation.on.remove(ppn);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_remembered_than_may_be_and_the_first_are_forgotten() {
        let probation = Probation::new(Pages(64));
        (0..6).for_each(|n| probation.came(Ppn(n)));
        assert_eq!(*lock(&probation.came), [2, 3, 4, 5].map(Ppn));
        let on: Vec<u64> = (0..64).filter(|&n| probation.on.contains(Ppn(n))).collect();
        assert_eq!(on, [2, 3, 4, 5]);
    }

    /// An eighth of 24 and up to twice that.
    #[test]
    fn what_left_is_remembered_until_a_part_of_those_at_home_have_left_after_it() {
        let probation = Probation::new(Pages(64));
        let lately = |after: u64| -> Vec<u64> {
            let left = (0..64).filter(|&n| probation.left_lately(Ppn(n))).collect();
            assert!(probation.departures.load(Ordering::Relaxed) == after);
            left
        };
        for (ppn, first) in [
            (0, 0),
            (1, 0),
            (2, 0),
            (3, 0),
            (4, 0),
            (5, 0),
            (6, 0),
            (7, 3),
            (8, 3),
            (9, 3),
            (10, 3),
            (11, 7),
        ] {
            probation.left(Ppn(ppn), Pages(24));
            assert_eq!(lately(ppn + 1), (first..=ppn).collect::<Vec<_>>(), "{ppn} has left");
        }
        // Of few at home, the one before, or two.
        let few = Probation::new(Pages(64));
        (0..4).for_each(|n| few.left(Ppn(n), Pages(7)));
        assert_eq!([0, 1, 2, 3].map(|n| few.left_lately(Ppn(n))), [false, true, true, true]);
    }

    #[test]
    fn what_left_lately_is_not_on_probation_when_it_comes_and_is_the_next_time() {
        let probation = Probation::new(Pages(64));
        probation.left[1].insert(Ppn(7));
        probation.came(Ppn(7));
        assert!(!probation.on.contains(Ppn(7)) && lock(&probation.came).is_empty());
        probation.came(Ppn(7));
        assert!(probation.on.contains(Ppn(7)));
        // It left by chance, and comes again.
        probation.left[0].insert(Ppn(7));
        probation.came(Ppn(7));
        assert!(!probation.on.contains(Ppn(7)));
    }
}
