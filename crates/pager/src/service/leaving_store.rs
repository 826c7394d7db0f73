//! Shared pages leave, too. A page that n guest pages share gains a n-th of a page for each that leaves, so
//! it is taken so much more seldom; and what guests shared at boot and never use again is worth taking
//! sooner than what they work on, whereas what all of them run on is not. Which of the two a store holds is
//! measured: how many of the pages that left are wanted back, for a page of memory gained, against the same of
//! the VM's own pages.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::reclaim::Reclaim;
use crate::backend::MemError;
use crate::clock::BLOCK;
use crate::memory::CounterValues;
use crate::word::State;

/// Pages that are brought home to be evicted at one time: one message to the shim.
const TOGETHER: usize = 16;
/// While more than this is asked for, shared pages stay: leaving takes them longer, and gains less.
const HURRY: u64 = 1024;
/// Pages of memory gained of either kind before the two are compared.
const ENOUGH: f64 = 64.0;
/// They are compared this seldom: what left a moment ago is not back yet, and what is back left before.
const PERIOD: Duration = Duration::from_secs(1);
/// What was seen before a comparison counts so much at the next.
const KEPT: f64 = 0.5;
/// How much a comparison moves the balance at most.
const STEP: f64 = 2.0;
/// The chance of a shared page that is proposed, times the pages that share it: its bounds. What comes
/// back is tried seldom, not never: it may have become cold.
const LEAST: f64 = 1.0 / 32.0;
const MOST: f64 = 2.0;

/// What left and was wanted back, of one kind of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Kind {
    /// Pages of memory gained.
    gained: f64,
    /// Pages that their guest waited for.
    back: f64,
}

impl Kind {
    /// Faults for a page gained. What never came back may do so yet: as if half a page of [`ENOUGH`] had.
    fn price(self) -> f64 {
        self.back / self.gained + 0.5 / ENOUGH
    }
}

/// How readily shared pages leave, against a VM's own.
#[derive(Clone, Debug)]
struct Balance {
    chance: f64,
    shared: Kind,
    own: Kind,
    seen: CounterValues,
    /// When they were last compared.
    at: Duration,
}

impl Balance {
    fn new() -> Balance {
        Balance {
            chance: 1.0,
            shared: Kind::default(),
            own: Kind::default(),
            seen: CounterValues::default(),
            at: Duration::ZERO,
        }
    }

    fn own_left(&mut self) {
        self.own.gained += 1.0;
    }
    fn shared_left(&mut self, gained: f64) {
        self.shared.gained += gained;
    }

    /// Whether enough has left to compare the two, and enough time has passed: monotonic, since any fixed moment.
    fn is_due(&self, at: Duration) -> bool {
        let enough = self.shared.gained >= ENOUGH && self.own.gained >= ENOUGH;
        enough && at >= self.at + PERIOD
    }

    fn weigh(&mut self, at: Duration, now: CounterValues) {
        let since = |now: u64, seen: u64| now.saturating_sub(seen) as f64;
        self.shared.back += since(now.shared_back, self.seen.shared_back);
        self.own.back += since(now.own_back, self.seen.own_back);
        let cheaper = self.own.price() / self.shared.price();
        self.chance = (self.chance * cheaper.clamp(1.0 / STEP, STEP)).clamp(LEAST, MOST);
        for kind in [&mut self.shared, &mut self.own] {
            kind.gained *= KEPT;
            kind.back *= KEPT;
        }
        (self.seen, self.at) = (now, at);
    }
}

/// A page that came home to be evicted.
#[derive(Clone, Copy, Debug)]
struct FromStore {
    /// Of a page, by those that shared it when it was chosen.
    gained: f64,
    /// Whether it was the last of them, so that its leaving gains memory.
    last: bool,
}

/// What one reclaim thread knows of shared pages that leave the store.
pub(super) struct LeavingStore {
    begun: Instant,
    balance: Balance,
    chosen: BTreeMap<Ppn, f64>,
    home: BTreeMap<Ppn, FromStore>,
}

impl LeavingStore {
    pub fn new() -> LeavingStore {
        let begun = Instant::now();
        LeavingStore {
            begun,
            balance: Balance::new(),
            chosen: BTreeMap::new(),
            home: BTreeMap::new(),
        }
    }

    /// Whether a page came home to be evicted.
    pub fn came_to_leave(&self, ppn: Ppn) -> bool {
        self.home.contains_key(&ppn)
    }
}

impl Reclaim {
    /// A page was proposed that is not at home: it may be one that leaves the store.
    pub(super) fn consider_shared(&mut self, ppn: Ppn) {
        // Where pages are exchanged one for another it would have more at home than it may.
        if self.vm.evict_goal.load(Ordering::Relaxed) > HURRY || self.vm.counts_at_home() {
            return;
        }
        let memory = self.vm.memory.clone();
        let word = memory.pmap().load(ppn);
        if word.state() != State::Shared || !word.is_idle() || word.sampled() || memory.is_parked()
        {
            return;
        }
        let Some((page, member)) = word.store_page().zip(memory.membership()) else { return };
        let refs = member.domain.refs(page).max(1) as f64;
        if self.replacement.chance(self.leaving_store.balance.chance / refs) && !self.is_spared(ppn)
        {
            self.leaving_store.chosen.insert(ppn, 1.0 / refs);
        }
    }

    /// A page leaves for which the clock did not go on: shared ones are proposed all the same.
    pub(super) fn consider_some_shared(&mut self) {
        let size = self.vm.memory.pmap().len();
        for _ in 0..BLOCK {
            let ppn = self.replacement.propose(size);
            self.consider_shared(ppn);
        }
    }

    /// Once there are some, the shared pages that were chosen come home, and are the next to be evicted.
    pub(super) fn bring_chosen(&mut self) {
        if self.leaving_store.chosen.len() < TOGETHER || self.vm.counts_at_home() {
            return;
        }
        let memory = self.vm.memory.clone();
        let store_page = |ppn: Ppn| memory.pmap().load(ppn).store_page();
        let chosen: Vec<_> = std::mem::take(&mut self.leaving_store.chosen)
            .into_iter()
            .filter_map(|(ppn, gained)| Some((ppn, gained, store_page(ppn)?)))
            .collect();
        let pages: Vec<Ppn> = chosen.iter().map(|c| c.0).collect();
        if !memory.may_go_home(pages.len() as u64) {
            return;
        }
        match memory.go_home(&pages) {
            Ok(_) | Err(MemError::Gone) => {}
            Err(e) => self.vm.set_ill(format!("bringing pages home: {e}")),
        }
        let Some(member) = memory.membership() else { return };
        self.leaving_store.home.clear();
        for (ppn, gained, page) in chosen {
            let word = memory.pmap().load(ppn);
            if word.state() == State::Resident && word.is_idle() {
                let last = member.domain.refs(page) == 0;
                self.leaving_store.home.insert(ppn, FromStore { gained, last });
                self.victims.push(ppn);
            }
        }
    }

    /// A page was evicted, which gained so much of its own memory. Answers how much of the host's.
    pub(super) fn has_left(&mut self, ppn: Ppn, gained: u64) -> u64 {
        self.vm.memory.note_left(ppn);
        let from_store = self.leaving_store.home.remove(&ppn);
        let gained = match from_store {
            Some(from) => {
                self.vm.memory.note_left_store(ppn);
                self.leaving_store.balance.shared_left(from.gained);
                // What others still share stays where it is.
                if from.last { gained } else { gained.saturating_sub(1) }
            }
            None => {
                self.leaving_store.balance.own_left();
                gained
            }
        };
        let at = self.leaving_store.begun.elapsed();
        if self.leaving_store.balance.is_due(at) {
            self.leaving_store.balance.weigh(at, self.vm.memory.counters.values());
            let chance = self.leaving_store.balance.chance;
            tracing::debug!(vm = %self.vm.name, chance, "how readily shared pages leave");
        }
        gained
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// A balance after `rounds` comparisons, of so many pages that come back of each hundred that leave.
    fn after(rounds: u64, refs: f64, shared_back: u64, own_back: u64) -> f64 {
        let mut balance = Balance::new();
        let mut now = CounterValues::default();
        for round in 1..=rounds {
            let at = PERIOD * round as u32;
            while !balance.is_due(at) {
                (0..100).for_each(|_| balance.own_left());
                (0..100).for_each(|_| balance.shared_left(1.0 / refs));
                now.shared_back += shared_back;
                now.own_back += own_back;
            }
            balance.weigh(at, now);
            assert!(!balance.is_due(at + PERIOD / 2));
        }
        balance.chance
    }

    #[test]
    fn what_never_comes_back_leaves_ever_more_readily_and_what_all_need_ever_less() {
        assert_eq!(after(0, 5.0, 0, 50), 1.0);
        assert_eq!(after(1, 5.0, 0, 50), STEP);
        assert_eq!(after(20, 5.0, 0, 50), MOST);
        assert_eq!(after(1, 5.0, 90, 50), 1.0 / STEP);
        assert_eq!(after(20, 5.0, 90, 50), LEAST);
        // Nothing comes back of either: nothing is known, however many share a page.
        assert_eq!((after(20, 1.0, 0, 0), after(20, 5.0, 0, 0)), (1.0, 1.0));
    }

    #[test]
    fn a_page_that_many_share_must_come_back_the_less_often_to_be_worth_taking() {
        // Ten in a hundred of five sharers each: half a fault for a page gained, as of its own.
        let even = after(30, 5.0, 10, 50);
        assert!((0.5..=2.0).contains(&even), "{even}");
        assert!(after(30, 5.0, 20, 50) < 0.1);
        assert_eq!(after(30, 5.0, 5, 50), MOST);
    }
}
