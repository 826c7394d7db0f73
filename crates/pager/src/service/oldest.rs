//! Victims where much has to leave at once (a budget is lowered, a guest starts): what was used longest ago, by
//! generations of blocks (`memory::ages`). The clock (`cold`) can tell only what was left alone since it passed by a
//! moment ago, which most of what a guest uses now and then was, too. A page that is touched between being watched and
//! being asked about stays, as ever.
//!
//! While memory is short and pages leave, what is used is looked for all the time, by the way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ballast_units::{Pages, Ppn};

use super::cold::{ASKED, CALM, may_leave};
use super::reclaim::Reclaim;
use crate::backend::Backend;
use crate::clock::{BLOCK, Block};
use crate::memory::PageSet;
use crate::word::State;

/// Much is more than this part of what is at home, within these bounds.
const MUCH: u64 = 32;
const BOUNDS: (u64, u64) = (64, 1 << 14);
/// The oldest are this part of what is at home, and at least so many blocks.
const OLDEST: u64 = 16;
const AT_LEAST: u64 = 32;
/// Most blocks that are watched before they are asked about, and that are passed for it in one go.
const WATCHED: usize = 512;
const PASSED: u64 = 1 << 16;

/// How long nothing is looked for where there was nothing.
const VAIN: Duration = Duration::from_millis(10);

/// All blocks are looked at in this time, in steps; blocks of a step at most.
const ROUND: Duration = Duration::from_secs(20);
const APART: Duration = Duration::from_micros(62_500);
const STEP: u64 = 32;

pub(super) struct Oldest {
    /// Much has to leave.
    is_much: bool,
    /// Blocks that are watched and to be asked about, the first first.
    watched: VecDeque<Block>,
    /// Up to which generation blocks are taken, from which block on they are looked for, and how many are left of
    /// the round.
    generation: u8,
    at: u64,
    left: u64,
    /// Blocks that were watched, and not asked about since.
    seen: Blocks,
    /// What of it the clock is to ask about, some way on: nobody else watches it.
    between: Blocks,
    /// Before then there is nothing to be found.
    vain_until: Instant,
    /// The block that is looked at next, and when.
    look: u64,
    due: Instant,
}

/// Sets of blocks, by their numbers.
struct Blocks(PageSet);

impl Blocks {
    fn of(pages: u64) -> Blocks {
        Blocks(PageSet::new(Pages(pages.div_ceil(BLOCK))))
    }
    fn contains(&self, block: Block) -> bool {
        self.0.contains(Ppn(block.first.0 / BLOCK))
    }
    fn insert(&self, block: Block) {
        self.0.insert(Ppn(block.first.0 / BLOCK));
    }
    fn remove(&self, block: Block) {
        self.0.remove(Ppn(block.first.0 / BLOCK));
    }
}

impl Oldest {
    /// Of a VM of so many pages.
    pub fn new(pages: u64) -> Oldest {
        Oldest {
            is_much: false,
            watched: VecDeque::new(),
            generation: 0,
            at: 0,
            left: 0,
            seen: Blocks::of(pages),
            between: Blocks::of(pages),
            vain_until: Instant::now(),
            look: 0,
            due: Instant::now(),
        }
    }

    /// The front hand of the clock passes a block.
    pub fn watched_by_clock(&self, block: Block) {
        self.between.insert(block);
    }

    /// The back hand does.
    pub fn asked_by_clock(&self, block: Block) {
        self.between.remove(block);
    }

    /// So many pages are to leave, of so many at home.
    pub fn is_asked(&mut self, goal: u64, at_home: u64) {
        self.is_much |= goal > (at_home / MUCH).clamp(BOUNDS.0, BOUNDS.1);
    }

    /// Nothing is to leave any more. What was watched may be in use by the next time.
    pub fn rest(&mut self) {
        self.is_much = false;
        self.watched.clear();
        self.left = 0;
    }
}

impl Reclaim {
    /// Where much has to leave, a page of those that were used longest ago and were not accessed since they were
    /// watched. None: little has to, or that is not known, or there was none among those that were asked about.
    pub(super) fn oldest(&mut self) -> Option<Ppn> {
        if !self.oldest.is_much || Instant::now() < self.oldest.vain_until {
            return None;
        }
        let memory = self.vm.memory.clone();
        let mut asked = 0;
        loop {
            while let Some(ppn) = self.cold.pop() {
                if may_leave(&memory, ppn) {
                    return Some(ppn);
                }
            }
            if asked >= ASKED || self.oldest.watched.len() < WATCHED / 2 && !self.watch_oldest() {
                return None;
            }
            let Some(block) = self.oldest.watched.pop_front() else {
                self.oldest.vain_until = Instant::now() + VAIN;
                return None;
            };
            let (here, accessed) = self.ask(block);
            asked += here.len() as u32;
            if accessed.contains(&true) {
                memory.note_used(block.first);
            }
            let is_cold = |&ppn: &Ppn| !accessed[(ppn.0 - block.first.0) as usize];
            self.cold = here.into_iter().filter(is_cold).collect();
            self.oldest.seen.remove(block);
        }
    }

    /// The pages of a block that could leave, and which of all were accessed.
    fn ask(&self, block: Block) -> (Vec<Ppn>, Vec<bool>) {
        let here = self.here(block);
        if here.is_empty() {
            return (here, Vec::new());
        }
        (here, self.vm.memory.backend().accessed(block.first, block.n))
    }

    fn here(&self, block: Block) -> Vec<Ppn> {
        let memory = &self.vm.memory;
        let ours = |ppn: &Ppn| may_leave(memory, *ppn) && !memory.is_on_probation(*ppn);
        block.pages().filter(ours).collect()
    }

    /// Some more of the oldest blocks are watched, or were; none where there are none within a round. Answers whether
    /// accesses are seen.
    fn watch_oldest(&mut self) -> bool {
        let memory = self.vm.memory.clone();
        let blocks = self.clock.blocks();
        let mut some = Vec::new();
        for _ in 0..PASSED {
            if self.oldest.watched.len() >= WATCHED {
                break;
            }
            if self.oldest.left == 0 {
                if !self.oldest.watched.is_empty() {
                    break;
                }
                let at_home = memory.pmap().in_state(State::Resident);
                self.oldest.generation = memory.oldest_generation(at_home, OLDEST, AT_LEAST);
                self.oldest.left = blocks;
            }
            self.oldest.left -= 1;
            let block = self.clock.numbered(self.oldest.at);
            self.oldest.at = (self.oldest.at + 1) % blocks;
            if memory.generation(block.first).is_none_or(|g| g > self.oldest.generation) {
                continue;
            }
            let here = self.here(block);
            if here.is_empty() {
                memory.note_nothing(block.first);
                continue;
            }
            if !self.oldest.seen.contains(block) {
                self.oldest.seen.insert(block);
                some.extend(here);
            }
            self.oldest.watched.push_back(block);
        }
        self.watch_all(&some)
    }

    /// What is not seen is forgotten.
    pub(super) fn watch_all(&mut self, pages: &[Ppn]) -> bool {
        if pages.is_empty() || self.vm.memory.backend().watch(pages) {
            return true;
        }
        self.oldest.vain_until = Instant::now() + ROUND;
        self.oldest.watched.clear();
        self.oldest.seen.0.clear();
        false
    }

    /// While pages leave, and memory is short: what was used since the last round is noted. Answers how long the thread may
    /// rest.
    pub(super) fn look_for_used(&mut self) -> Duration {
        let now = Instant::now();
        if self.ahead.asked + CALM < now || !self.is_near() {
            return CALM;
        }
        if now < self.oldest.due {
            return self.oldest.due - now;
        }
        let blocks = self.clock.blocks();
        let each = blocks.div_ceil((ROUND.as_micros() / APART.as_micros()) as u64);
        let mut some = Vec::new();
        for _ in 0..each.min(STEP) {
            let block = self.clock.numbered(self.oldest.look);
            self.oldest.look = (self.oldest.look + 1) % blocks;
            if !self.oldest.between.contains(block) {
                some.extend(self.look_at(block));
            }
        }
        let rest = if self.watch_all(&some) { APART } else { ROUND };
        self.oldest.due = now + rest;
        rest
    }

    /// Notes whether a block was used since it was watched, if it was. Answers the pages that are to be watched now.
    pub(super) fn look_at(&mut self, block: Block) -> Vec<Ppn> {
        if !self.oldest.seen.contains(block) {
            self.oldest.seen.insert(block);
            return self.here(block);
        }
        let (here, accessed) = self.ask(block);
        if here.iter().any(|ppn| accessed[(ppn.0 - block.first.0) as usize]) {
            self.vm.memory.note_used(block.first);
        }
        here
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;
    use crate::clock::Clock;
    use crate::memory::{Access, Fault, Recovered};
    use crate::replacement::Random;
    use crate::service::testing;

    const PAGES: u64 = 1024;
    /// Pages that the kernel has not put on its lists yet count as in use: a batch of each processor.
    const ON_THEIR_WAY: usize = 31;

    /// A VM whose pages are all at home, touched in their order. None where accesses are not seen.
    fn reclaim() -> Option<Reclaim> {
        let vm = testing::vm(PAGES, 1)?;
        vm.memory.backend().see_accesses(std::process::id()).ok()?;
        for p in 0..PAGES {
            assert_eq!(vm.memory.fault(Ppn(p), Access::Missing), Fault::Served);
            touch(&vm.memory, p);
        }
        let (random, clock) = (Box::new(Random::seeded(1)), Clock::new(Pages(PAGES), 1));
        let mut reclaim = Reclaim::new(vm, random, clock, &Recovered::default());
        let seen = reclaim.watch_all(&[Ppn(0)]);
        if !seen {
            eprintln!("SKIPPED: accesses are not seen: this host swaps, or its kernel is too old");
        }
        seen.then_some(reclaim)
    }

    fn touch(memory: &crate::memory::Memory<crate::guest_ram::GuestRam>, p: u64) {
        let at = memory.backend().at(Ppn(p)).0 as *const u8;
        // SAFETY: RAM of this process, that stays.
        unsafe { at.read_volatile() };
    }

    fn look_at_all(reclaim: &mut Reclaim) -> u64 {
        let blocks = reclaim.clock.blocks();
        let mut pages = 0;
        for number in 0..blocks {
            let block = reclaim.clock.numbered(number);
            let some = reclaim.look_at(block);
            pages += some.len() as u64;
            assert!(reclaim.watch_all(&some));
        }
        pages
    }

    fn generations(reclaim: &Reclaim) -> Vec<u8> {
        let of = |block| reclaim.vm.memory.generation(Ppn(block * BLOCK)).unwrap();
        (0..reclaim.clock.blocks()).map(of).collect()
    }

    #[test]
    fn what_is_used_between_two_looks_is_noted_and_nothing_else() {
        let Some(mut reclaim) = reclaim() else { return };
        let before = generations(&reclaim);
        assert!(before.is_sorted(), "in the order of first touches: {before:?}");
        // Whether it was used before is not known.
        assert_eq!(look_at_all(&mut reclaim), PAGES);
        assert_eq!(generations(&reclaim), before);
        let used = [3, 40, 41];
        used.iter().for_each(|block| touch(&reclaim.vm.memory, block * BLOCK + 5));
        look_at_all(&mut reclaim);
        let after = generations(&reclaim);
        let newer: Vec<u64> = (0..)
            .zip(before.iter().zip(&after))
            .filter(|(_, (b, a))| a > b)
            .map(|(n, _)| n)
            .collect();
        println!("noted: {newer:?}");
        assert!(used.iter().all(|block| newer.contains(block)), "{newer:?}");
        assert!(newer.len() <= used.len() + ON_THEIR_WAY * 2, "{newer:?}");
    }

    #[test]
    fn the_oldest_go_where_much_has_to_and_none_of_what_is_used_meanwhile() {
        let Some(mut reclaim) = reclaim() else { return };
        reclaim.oldest.is_asked(BOUNDS.0, PAGES);
        assert_eq!(reclaim.oldest(), None, "little has to leave");
        reclaim.oldest.is_asked(BOUNDS.0 + 1, PAGES);
        let first = reclaim.oldest().unwrap();
        // It is watched from now on.
        touch(&reclaim.vm.memory, 7 * BLOCK + 2);
        let mut victims = vec![first.0];
        victims.extend(std::iter::from_fn(|| reclaim.oldest()).take(99).map(|ppn| ppn.0));
        victims.sort_unstable();
        victims.dedup();
        println!("victims: {victims:?}");
        assert_eq!(victims.len(), 100, "each once");
        assert!(*victims.last().unwrap() < PAGES / 2, "of the oldest");
        assert!(!victims.contains(&(7 * BLOCK + 2)));
        assert!(generations(&reclaim)[7] > generations(&reclaim)[6]);
        reclaim.oldest.rest();
        assert_eq!(reclaim.oldest(), None);
    }

    #[test]
    fn what_can_be_taken_is_looked_for_in_rounds_until_there_is_none() {
        let Some(mut reclaim) = reclaim() else { return };
        reclaim.oldest.is_asked(PAGES, PAGES);
        let mut victims = std::collections::BTreeSet::new();
        for _ in 0..4 * PAGES {
            let Some(ppn) = reclaim.oldest() else { break };
            // Its memory is given back.
            let left = reclaim.vm.memory.evict_run(ppn, 1, 0).unwrap();
            assert_eq!(left.len(), 1);
            assert!(victims.insert(ppn), "{ppn} twice");
        }
        println!("{} of {PAGES} found", victims.len());
        assert!(victims.len() as u64 >= PAGES * 9 / 10);
        let nothing = |block: &u64| reclaim.vm.memory.generation(Ppn(block * BLOCK)).is_none();
        assert!((0..PAGES / BLOCK).filter(nothing).count() > 0);
        // One that is used again has a generation.
        let back = *victims.first().unwrap();
        assert_eq!(reclaim.vm.memory.fault(back, Access::Missing), Fault::Served);
        assert!(reclaim.vm.memory.generation(back).is_some());
    }
}
