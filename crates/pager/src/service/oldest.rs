//! Victims where much has to leave at once (a budget is lowered, a guest starts): what was used longest ago, by
//! generations of blocks (`memory::ages`). The clock (`cold`) can tell only what was left alone since it passed by a
//! moment ago, which most of what a guest uses now and then was, too.
//!
//! Only of blocks that were looked at twice since anything was known of them: when a page was touched for the first time
//! tells nothing of how it is used. Blocks that are used in part are young: first of any block goes what was left alone from
//! one look to the next as well. While memory is short and pages leave, what is used is looked for by the way, but of what
//! was just watched ahead of need; while memory is about to be short, ahead of need (`cold::Ahead`).

use std::time::{Duration, Instant};

use ballast_units::{Pages, Ppn};

use super::cold::{ASKED, CALM, may_leave};
use super::reclaim::Reclaim;
use crate::backend::Backend;
use crate::clock::{BLOCK, Block};
use crate::memory::{Memory, PageSet};
use crate::word::State;

/// Much is more than this part of what is at home, within these bounds.
const MUCH: u64 = 32;
const BOUNDS: (u64, u64) = (64, 1 << 14);
/// The oldest are this part of what is at home, and at least so many blocks.
const OLDEST: u64 = 16;
const AT_LEAST: u64 = 32;
/// Blocks that are passed for one victim.
const PASSED: u64 = 1 << 12;
/// How long nothing is looked for where all that was asked about was in use, and where no more is known.
const VAIN: Duration = Duration::from_millis(10);
const NO_MORE: Duration = Duration::from_secs(1);

/// How long what was watched ahead of need is left to the clock, for a look forgets what was known before it.
const KEPT: Duration = Duration::from_secs(60);

/// All blocks are looked at in this time, in steps; blocks of a step at most, and those that are passed for them.
const ROUND: Duration = Duration::from_secs(20);
const APART: Duration = Duration::from_micros(62_500);
const STEP: u64 = 32;
const PASSED_FOR_ONE: u64 = 64;

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

pub(super) struct Oldest {
    /// Much has to leave, and the last victim was chosen by age.
    is_much: bool,
    by_age: bool,
    /// Pages that had been accessed when they were asked about last stay, as long as there are others: where all blocks
    /// are used in part, their ages tell nothing.
    spares_used: bool,
    used: PageSet,
    /// Up to which generation blocks are taken, how far that is beyond the first in question, from which block on they are
    /// looked for, how many are left of the round, and how many were passed since the last that was taken.
    generation: u8,
    is_last: bool,
    beyond: u8,
    at: u64,
    left: u64,
    fruitless: u64,
    /// Before then there is nothing to be found.
    vain_until: Instant,
    /// Blocks that were watched and not asked about since, and those that were ever asked about after that.
    seen: Blocks,
    looked_at: Blocks,
    has_looked: bool,
    /// Blocks between the hands of the clock, that nobody else need watch, and until when that is so of those that were
    /// watched ahead of need, from the last of them on: the back hand may take long to come by.
    between: Blocks,
    kept_until: Option<Instant>,
    /// The block that is looked at next, and when.
    look: u64,
    due: Instant,
}

impl Oldest {
    /// Of a VM of so many pages.
    pub fn new(pages: u64) -> Oldest {
        let now = Instant::now();
        Oldest {
            is_much: false,
            by_age: false,
            spares_used: true,
            used: PageSet::new(Pages(pages)),
            generation: 0,
            is_last: false,
            beyond: 0,
            at: 0,
            left: 0,
            fruitless: 0,
            vain_until: now,
            seen: Blocks::of(pages),
            looked_at: Blocks::of(pages),
            has_looked: false,
            between: Blocks::of(pages),
            kept_until: None,
            look: 0,
            due: now,
        }
    }

    /// The front hand of the clock passes a block.
    pub fn watched_by_clock(&self, block: Block) {
        self.between.insert(block);
    }

    /// The back hand does.
    pub fn asked_by_clock(&mut self, block: Block) {
        self.between.remove(block);
        if self.seen.contains(block) {
            self.looked_at.insert(block);
            self.has_looked = true;
        }
    }

    /// Ahead of need.
    pub fn watched_ahead(&mut self, block: Block, now: Instant) {
        self.between.insert(block);
        self.kept_until = Some(now + KEPT);
    }

    /// It is not known any more where the hands are.
    pub fn forget_clock(&mut self) {
        self.between.0.clear();
        self.kept_until = None;
    }

    /// A page has been mapped without being used.
    pub fn came_unused(&self, ppn: Ppn) {
        self.seen.remove(Block { first: ppn, n: 1 });
        self.between.remove(Block { first: ppn, n: 1 });
    }

    /// So many pages are to leave, of so many at home. Where there is no room in swap, those that do not compress stay, and
    /// neighbours are too much alike to be tried one after the other.
    pub fn is_asked(&mut self, goal: u64, at_home: u64, slots: bool) {
        if slots {
            self.is_much |= goal > (at_home / MUCH).clamp(BOUNDS.0, BOUNDS.1);
        } else {
            self.rest();
        }
    }

    /// Whether much has to leave, and what leaves is what was used longest ago.
    pub fn chooses(&self) -> bool {
        self.is_much && self.by_age
    }

    /// The next victim was chosen by age, or in another way.
    pub fn chose(&mut self, by_age: bool) {
        self.by_age = by_age;
    }

    /// Nothing is to leave any more.
    pub fn rest(&mut self) {
        (self.is_much, self.spares_used, self.is_last) = (false, true, false);
        (self.left, self.beyond, self.fruitless) = (0, 0, 0);
    }

    fn in_vain(&mut self, how_long: Duration) {
        self.vain_until = Instant::now() + how_long;
        (self.fruitless, self.beyond, self.spares_used) = (0, 0, true);
    }
}

impl Reclaim {
    /// Where much has to leave, a page of those that were used longest ago, and were not accessed since they were looked
    /// at. None: little has to, or it is not known which they are, or there was none among those that were asked about.
    pub(super) fn oldest(&mut self) -> Option<Ppn> {
        if !self.oldest.is_much {
            return None;
        }
        let memory = self.vm.memory.clone();
        while let Some(ppn) = self.cold.pop() {
            if may_leave(&memory, ppn) {
                return Some(ppn);
            }
        }
        let begun = Instant::now();
        if begun < self.oldest.vain_until || !self.oldest.has_looked {
            return None;
        }
        let (mut asked, mut passed) = (0, 0);
        while asked < ASKED && passed < PASSED {
            let Some(block) = self.next_old(&mut passed) else { continue };
            let mut here = here(&memory, block);
            let oldest = &self.oldest;
            let spared = |ppn: &Ppn| oldest.spares_used && oldest.used.contains(*ppn);
            if !here.is_empty() && here.iter().all(spared) {
                continue;
            }
            let used = self.retain_idle(block, &mut here);
            let idle = here.len();
            here.retain(|ppn| !spared(ppn));
            if here.len() == idle {
                oldest.seen.remove(block);
            }
            asked += here.len() as u32 + used;
            if used > 0 {
                memory.note_used(block.first);
            } else if has_nothing(&memory, block) {
                memory.note_nothing(block.first);
            }
            if let Some(ppn) = here.pop() {
                self.oldest.fruitless = 0;
                (self.cold, self.cold_since) = (here, Instant::now());
                return Some(ppn);
            }
        }
        // Where it takes long to find nothing, the clock chooses for longer.
        let least = if asked >= ASKED { VAIN } else { Duration::ZERO };
        let until = Instant::now() + least.max(begun.elapsed() * 8);
        self.oldest.vain_until = until.max(self.oldest.vain_until);
        None
    }

    /// The next block, if it is one of the oldest, and was looked at. `passed` grows by what that costs.
    fn next_old(&mut self, passed: &mut u64) -> Option<Block> {
        let Reclaim { vm, clock, oldest, .. } = self;
        let (memory, blocks) = (&vm.memory, clock.blocks());
        if oldest.left == 0 {
            // What is counted costs as much as what is passed.
            *passed += blocks / BLOCK;
            let in_vain = std::mem::take(&mut oldest.fruitless) >= blocks;
            if in_vain {
                // Ever farther, or each of many generations would cost a round.
                oldest.beyond = oldest.beyond.saturating_mul(2).max(1);
            }
            let at_home = memory.pmap().in_state(State::Resident);
            let found = memory.oldest_generation(blocks_of_oldest(at_home), oldest.beyond);
            let is_over = in_vain && oldest.is_last && found.is_some_and(|(_, is_last)| is_last);
            if is_over && oldest.spares_used {
                (oldest.spares_used, oldest.beyond, oldest.is_last) = (false, 0, false);
                return None;
            }
            let Some((generation, is_last)) = found.filter(|_| !is_over) else {
                *passed = PASSED;
                oldest.in_vain(NO_MORE);
                return None;
            };
            (oldest.generation, oldest.is_last, oldest.left) = (generation, is_last, blocks);
        }
        let block = clock.block(oldest.at);
        let n = memory.ageless_from(block.first).clamp(1, oldest.left.min(blocks - oldest.at));
        oldest.left -= n;
        oldest.at = (oldest.at + n) % blocks;
        oldest.fruitless += n;
        *passed += 1;
        if memory.generation(block.first).is_none_or(|g| g > oldest.generation) {
            return None;
        }
        let is_watched = oldest.between.contains(block) || oldest.seen.contains(block);
        if is_watched && oldest.looked_at.contains(block) {
            return Some(block);
        }
        if has_nothing(memory, block) {
            memory.note_nothing(block.first);
        }
        None
    }

    /// Leaves of some pages of a block those that were not accessed since they were watched, and answers how many were.
    pub(super) fn retain_idle(&self, block: Block, some: &mut Vec<Ppn>) -> u32 {
        if some.is_empty() {
            return 0;
        }
        let accessed = self.vm.memory.backend().accessed(block.first, block.n);
        let all = some.len();
        some.retain(|&ppn| {
            let used = accessed[(ppn.0 - block.first.0) as usize];
            if used {
                self.oldest.used.insert(ppn);
            }
            !used
        });
        (all - some.len()) as u32
    }

    /// Where that cannot be, what was seen is forgotten.
    pub(super) fn watch_all(&mut self, pages: &[Ppn]) -> bool {
        if pages.is_empty() || self.vm.memory.backend().watch(pages) {
            return true;
        }
        self.oldest.seen.0.clear();
        self.oldest.looked_at.0.clear();
        self.oldest.used.clear();
        self.oldest.has_looked = false;
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
        if self.oldest.kept_until.is_some_and(|until| until <= now) {
            self.oldest.forget_clock();
        }
        let blocks = self.clock.blocks();
        let each = blocks_of_step(blocks);
        let (mut some, mut looked) = (Vec::new(), 0);
        for _ in 0..(each * PASSED_FOR_ONE).min(blocks) {
            if looked == each {
                break;
            }
            let block = self.clock.block(self.oldest.look);
            let n = self.vm.memory.ageless_from(block.first).max(1);
            self.oldest.look = (self.oldest.look + n.min(blocks - self.oldest.look)) % blocks;
            let has_any = self.vm.memory.generation(block.first).is_some();
            if has_any && !self.oldest.between.contains(block) {
                some.extend(self.look_at(block));
                looked += 1;
            }
        }
        let rest = if self.watch_all(&some) { APART } else { ROUND };
        self.oldest.due = now + rest;
        rest
    }

    /// Notes whether a block was used since it was watched, if it was. Answers the pages that are to be watched now.
    pub(super) fn look_at(&mut self, block: Block) -> Vec<Ppn> {
        let here = here(&self.vm.memory, block);
        if here.is_empty() {
            self.oldest.seen.remove(block);
            if has_nothing(&self.vm.memory, block) {
                self.vm.memory.note_nothing(block.first);
            }
            return here;
        }
        self.vm.memory.note_found(block.first);
        if !self.oldest.seen.contains(block) {
            self.oldest.seen.insert(block);
        } else {
            self.oldest.looked_at.insert(block);
            self.oldest.has_looked = true;
            let mut idle = here.clone();
            if self.retain_idle(block, &mut idle) > 0 {
                self.vm.memory.note_used(block.first);
            }
            idle.into_iter().for_each(|ppn| self.oldest.used.remove(ppn));
        }
        here
    }
}

/// How many blocks are the oldest, of so many pages at home.
fn blocks_of_oldest(at_home: Pages) -> u64 {
    (at_home.0 / BLOCK / OLDEST).max(AT_LEAST)
}

/// How many blocks are looked at in a step of a round.
fn blocks_of_step(blocks: u64) -> u64 {
    blocks.div_ceil((ROUND.as_micros() / APART.as_micros()) as u64).min(STEP)
}

/// Those pages of a block that could leave, and are not on probation.
fn here<B: Backend>(memory: &Memory<B>, block: Block) -> Vec<Ppn> {
    let ours = |ppn: &Ppn| may_leave(memory, *ppn) && !memory.is_on_probation(*ppn);
    block.pages().filter(ours).collect()
}

/// Whether no page of a block could leave, now or when what it is in is over.
fn has_nothing<B: Backend>(memory: &Memory<B>, block: Block) -> bool {
    let at_home = |ppn: Ppn| memory.pmap().load(ppn).state() == State::Resident;
    block.pages().all(|ppn| !at_home(ppn) || memory.regions().is_large(ppn))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;
    use crate::memory::{Access, Fault};
    use crate::service::testing::{ON_THEIR_WAY, PAGES, reclaim, touch};

    fn look_at_all(reclaim: &mut Reclaim) -> u64 {
        let blocks = reclaim.clock.blocks();
        let mut pages = 0;
        for number in 0..blocks {
            let block = reclaim.clock.block(number);
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
        assert!(newer.len() <= used.len() + ON_THEIR_WAY, "{newer:?}");
    }

    #[test]
    fn the_oldest_go_where_much_has_to_and_none_of_what_is_used() {
        let Some(mut reclaim) = reclaim() else { return };
        let much = |reclaim: &mut Reclaim| reclaim.oldest.is_asked(BOUNDS.0 + 1, PAGES, true);
        much(&mut reclaim);
        assert_eq!(reclaim.oldest(), None, "nobody has looked");
        look_at_all(&mut reclaim);
        reclaim.oldest.vain_until = Instant::now();
        assert_eq!(reclaim.oldest(), None, "how it is used is not known");
        // The first quarter is used, the next is not, nor are the others.
        let use_some = |reclaim: &Reclaim| {
            (0..PAGES / 4).step_by(4).for_each(|p| touch(&reclaim.vm.memory, p));
        };
        use_some(&reclaim);
        look_at_all(&mut reclaim);
        touch(&reclaim.vm.memory, PAGES / 4 + 7 * BLOCK + 2);
        reclaim.oldest.vain_until = Instant::now();
        reclaim.oldest.rest();
        reclaim.oldest.is_asked(BOUNDS.0, PAGES, true);
        assert_eq!(reclaim.oldest(), None, "little has to leave");
        much(&mut reclaim);
        let mut victims: Vec<u64> =
            std::iter::from_fn(|| reclaim.victim()).take(100).map(|ppn| ppn.0).collect();
        victims.sort_unstable();
        victims.dedup();
        println!("victims: {victims:?}");
        assert_eq!(victims.len(), 100, "each once");
        assert!(
            victims[0] >= PAGES / 4 && victims[99] < PAGES / 2,
            "what was touched first, of those that are not used"
        );
        assert!(!victims.contains(&(PAGES / 4 + 7 * BLOCK + 2)));
        // Without room in swap it is the clock's.
        reclaim.oldest.is_asked(PAGES, PAGES, false);
        assert_eq!(reclaim.oldest(), None);
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        reclaim.oldest.rest();
        assert_eq!(reclaim.oldest(), None);
    }

    #[test]
    fn what_is_watched_ahead_of_need_is_left_to_the_clock_and_begun_anew_when_pages_had_to_leave() {
        let Some(mut reclaim) = reclaim() else { return };
        assert!(reclaim.vm.memory.host().ledger.try_reserve(Pages(PAGES - 8)));
        let calm = Instant::now().checked_sub(2 * CALM).unwrap();
        let blocks = reclaim.clock.blocks();
        let watched = |reclaim: &Reclaim| {
            let of = |n: &u64| reclaim.oldest.between.contains(reclaim.clock.block(*n));
            (0..blocks).filter(of).count() as u64
        };
        reclaim.ahead.asked = calm;
        assert_eq!(reclaim.look_ahead(), APART);
        let step = watched(&reclaim);
        assert!(step > 0 && step < blocks);
        // Pages leave in between, and then no more: what was watched before that is of no use.
        reclaim.ahead.begun = calm;
        reclaim.ahead.asked = calm + CALM / 2;
        let mut steps = 0;
        std::thread::sleep(APART);
        while reclaim.look_ahead() == APART {
            steps += 1;
            std::thread::sleep(APART);
        }
        assert_eq!(steps + 1, blocks / step, "a whole turn");
        assert_eq!(watched(&reclaim), blocks);
        // What is looked at by the way, in a round of that: nothing at first, and all after a while.
        let look = |reclaim: &mut Reclaim| {
            for _ in 0..(ROUND.as_micros() / APART.as_micros()) {
                reclaim.ahead.asked = Instant::now();
                reclaim.oldest.due = Instant::now();
                reclaim.look_for_used();
            }
        };
        let looked_at = |reclaim: &Reclaim| {
            let of = |n: &u64| reclaim.oldest.looked_at.contains(reclaim.clock.block(*n));
            (0..blocks).filter(of).count() as u64
        };
        // Those of the turn that was broken off were seen twice.
        let before = looked_at(&reclaim);
        assert!(before <= step);
        look(&mut reclaim);
        assert_eq!((looked_at(&reclaim), watched(&reclaim)), (before, blocks));
        reclaim.oldest.kept_until = Some(Instant::now());
        look(&mut reclaim);
        assert_eq!((looked_at(&reclaim), watched(&reclaim)), (blocks, 0));
    }

    #[test]
    fn what_was_left_alone_for_two_looks_goes_before_the_rest_of_the_oldest_blocks() {
        let Some(mut reclaim) = reclaim() else { return };
        look_at_all(&mut reclaim);
        // Of each block one page is used: all are of one age.
        (0..PAGES).step_by(BLOCK as usize).for_each(|p| touch(&reclaim.vm.memory, p + 2));
        look_at_all(&mut reclaim);
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        let (mut others, mut in_vain) = (0, 0);
        let spared = loop {
            reclaim.oldest.vain_until = Instant::now();
            let Some(ppn) = reclaim.oldest() else {
                in_vain += 1;
                assert!(in_vain < 20, "{others} others, and then none");
                continue;
            };
            if reclaim.oldest.used.contains(ppn) {
                break ppn;
            }
            others += 1;
            assert_ne!(ppn.0 % BLOCK, 2);
            assert_eq!(reclaim.vm.memory.evict_run(ppn, 1, 0).unwrap().len(), 1);
        };
        println!("{others} others, then {spared}");
        // Less than half of the blocks are in question, and in some all pages count as used.
        assert!(others + ON_THEIR_WAY as u64 * BLOCK >= PAGES / 3, "{others}");
        reclaim.oldest.rest();
        assert!(reclaim.oldest.spares_used);
    }

    #[test]
    fn much_is_a_part_of_what_is_at_home_within_bounds() {
        let is_much = |goal, at_home| {
            let mut oldest = Oldest::new(PAGES);
            oldest.is_asked(goal, at_home, true);
            oldest.is_much
        };
        for (at_home, most) in [(0, 64), (1024, 64), (1 << 14, 512), (1 << 30, 1 << 14)] {
            assert!(!is_much(most, at_home) && is_much(most + 1, at_home), "{at_home}");
        }
    }

    #[test]
    fn what_was_looked_for_in_vain_is_not_looked_for_again_at_once() {
        let Some(mut reclaim) = reclaim() else { return };
        (0..2).for_each(|_| assert!(look_at_all(&mut reclaim) > 0));
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        (reclaim.oldest.fruitless, reclaim.oldest.beyond, reclaim.oldest.spares_used) =
            (1, 2, false);
        reclaim.oldest.in_vain(NO_MORE);
        let oldest = &reclaim.oldest;
        assert_eq!((oldest.fruitless, oldest.beyond, oldest.spares_used), (0, 0, true));
        assert_eq!(reclaim.oldest(), None);
        reclaim.oldest.vain_until = Instant::now();
        assert!(reclaim.oldest().is_some());
    }

    #[test]
    fn of_a_block_that_came_unused_it_is_not_known_how_it_is_used() {
        let Some(mut reclaim) = reclaim() else { return };
        look_at_all(&mut reclaim);
        let (one, other) = (reclaim.clock.block(7), reclaim.clock.block(8));
        [one, other].iter().for_each(|block| reclaim.oldest.watched_by_clock(*block));
        reclaim.oldest.came_unused(Ppn(one.first.0 + 3));
        let known =
            |block| (reclaim.oldest.seen.contains(block), reclaim.oldest.between.contains(block));
        assert_eq!((known(one), known(other)), ((false, false), (true, true)));
    }

    #[test]
    fn where_all_of_the_oldest_are_in_use_so_many_are_asked_about_and_noted() {
        let Some(mut reclaim) = reclaim() else { return };
        (0..2).for_each(|_| assert!(look_at_all(&mut reclaim) > 0));
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        let newer = |before: &[u8], after: &[u8]| {
            before.iter().zip(after).filter(|(before, after)| before < after).count()
        };
        let n = ASKED as usize / BLOCK as usize;
        let before = generations(&reclaim);
        reclaim.oldest.vain_until = Instant::now();
        (0..n as u64 * BLOCK).for_each(|_| assert!(reclaim.oldest().is_some()));
        assert_eq!(reclaim.oldest.beyond, 0, "they need not be looked for farther");
        assert!(newer(&before, &generations(&reclaim)) <= ON_THEIR_WAY, "they are not used");
        reclaim.cold.clear();
        (0..PAGES).for_each(|p| touch(&reclaim.vm.memory, p));
        let (before, begun) = (generations(&reclaim), Instant::now());
        assert_eq!(reclaim.oldest(), None);
        assert_eq!(newer(&before, &generations(&reclaim)), n);
        assert!(reclaim.oldest.vain_until >= begun + VAIN);
    }

    #[test]
    fn a_sixteenth_of_what_is_at_home_is_the_oldest_and_all_is_looked_at_in_a_round() {
        let oldest = [0, 4096, 4224, 1 << 20].map(|pages| blocks_of_oldest(Pages(pages)));
        assert_eq!(oldest, [32, 32, 33, 8192]);
        assert_eq!([1, 320, 321, 3200, 1 << 20].map(blocks_of_step), [1, 1, 2, 10, 32]);
    }

    #[test]
    fn what_was_looked_at_once_is_not_of_the_oldest() {
        let Some(mut reclaim) = reclaim() else { return };
        look_at_all(&mut reclaim);
        for number in 0..4 {
            let some = reclaim.look_at(reclaim.clock.block(number));
            assert!(reclaim.watch_all(&some));
        }
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        let mut victims = Vec::new();
        for _ in 0..20 * BLOCK {
            reclaim.oldest.vain_until = Instant::now();
            victims.extend(reclaim.oldest());
        }
        println!("{} victims", victims.len());
        assert!(!victims.is_empty() && victims.iter().all(|ppn| ppn.0 < 4 * BLOCK));
    }

    #[test]
    fn what_can_be_taken_is_looked_for_until_there_is_none() {
        let Some(mut reclaim) = reclaim() else { return };
        (0..2).for_each(|_| assert!(look_at_all(&mut reclaim) > 0));
        reclaim.oldest.is_asked(PAGES, PAGES, true);
        let mut victims = std::collections::BTreeSet::new();
        let mut in_vain = 0;
        while in_vain < 20 && (victims.len() as u64) < PAGES {
            let Some(ppn) = reclaim.oldest() else {
                in_vain += 1;
                reclaim.oldest.vain_until = Instant::now();
                continue;
            };
            in_vain = 0;
            // Its memory is given back.
            let left = reclaim.vm.memory.evict_run(ppn, 1, 0).unwrap();
            assert_eq!(left.len(), 1);
            assert!(victims.insert(ppn), "{ppn} twice");
        }
        println!("{} of {PAGES} found", victims.len());
        // When half of what is left is of one age it is not known which are the oldest.
        assert!(victims.len() as u64 >= PAGES / 2);
        // The blocks of the first round are known to have nothing when they are passed again.
        let nothing = |block: &u64| reclaim.vm.memory.generation(Ppn(block * BLOCK)).is_none();
        let n = (0..PAGES / BLOCK).filter(nothing).count();
        println!("{n} blocks have nothing");
        assert!(n >= victims.len() / BLOCK as usize / 2);
        // One that is used again has a generation.
        let back = *victims.first().unwrap();
        assert_eq!(reclaim.vm.memory.fault(back, Access::Missing), Fault::Served);
        assert!(reclaim.vm.memory.generation(back).is_some());
    }

    #[test]
    fn while_memory_is_short_and_pages_leave_all_is_looked_at_but_what_the_clock_watches() {
        let Some(mut reclaim) = reclaim() else { return };
        let blocks = reclaim.clock.blocks();
        let count = |set: &Blocks, reclaim: &Reclaim| {
            (0..blocks).filter(|&n| set.contains(reclaim.clock.block(n))).count() as u64
        };
        reclaim.ahead.asked = Instant::now();
        assert_eq!(reclaim.look_for_used(), CALM, "memory is plentiful");
        assert!(reclaim.vm.memory.host().ledger.try_reserve(Pages(PAGES - 8)));
        let block = reclaim.clock.block(5);
        reclaim.oldest.watched_by_clock(block);
        let steps = (ROUND.as_micros() / APART.as_micros()) as u64;
        let rounds = |reclaim: &mut Reclaim| {
            for _ in 0..steps {
                reclaim.ahead.asked = Instant::now();
                reclaim.oldest.due = Instant::now();
                let begun = Instant::now();
                assert_eq!(reclaim.look_for_used(), APART);
                assert!(reclaim.oldest.due >= begun + APART);
                let next = reclaim.oldest.look;
                reclaim.oldest.due += CALM;
                assert!(reclaim.look_for_used() > APART);
                assert_eq!(reclaim.oldest.look, next, "not before it is due");
            }
        };
        assert_eq!(reclaim.look_for_used(), APART);
        assert_eq!(count(&reclaim.oldest.seen, &reclaim), blocks_of_step(blocks));
        rounds(&mut reclaim);
        assert_eq!(count(&reclaim.oldest.seen, &reclaim), blocks - 1);
        assert!(!reclaim.oldest.seen.contains(block));
        rounds(&mut reclaim);
        assert_eq!(count(&reclaim.oldest.looked_at, &reclaim), blocks - 1);
        reclaim.oldest.asked_by_clock(block);
        rounds(&mut reclaim);
        assert_eq!(count(&reclaim.oldest.seen, &reclaim), blocks);
        // Nothing has left for a while.
        reclaim.ahead.asked = Instant::now().checked_sub(2 * CALM).unwrap();
        reclaim.oldest.due = Instant::now();
        assert_eq!(reclaim.look_for_used(), CALM);
    }
}
