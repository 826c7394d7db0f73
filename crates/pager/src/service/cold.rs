//! Victims that their guest has not touched for a while, where that can be seen (ADR 25).

use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::reclaim::Reclaim;
use crate::backend::Backend;
use crate::clock::BLOCK;
use crate::memory::Memory;
use crate::word::State;

/// Blocks that are watched together: one system call, and one flush of the guest's translations for each.
const TOGETHER: u64 = 8;
/// Pages that are asked about in vain for one victim. If all of them are in use, one is as good as another.
pub(super) const ASKED: u32 = 128;
/// Blocks that are passed for one victim: most pages may be elsewhere.
const STEPS: u64 = 8 * ASKED as u64 / BLOCK;

/// Memory is about to be short while less than this part of it is free.
const NEAR: u64 = 3;
/// Pages that are watched ahead in one go, and the time between two: 4,096 a second at most.
const STEP: u64 = 256;
const APART: Duration = Duration::from_micros(62_500);
/// How long pages have to leave no more before all are watched ahead.
pub(super) const CALM: Duration = Duration::from_secs(5);
/// How long that is believed then; twice as long each time that nothing had to leave meanwhile, up to the second. The
/// first time half as long: what is used is known after two rounds.
const FRESH: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(960)];

/// Watching ahead of need. What leaves first, when much has to leave at once, is what was left alone since then, and not
/// since a moment ago.
#[derive(Debug)]
pub(super) struct Ahead {
    /// When pages last had to leave.
    pub asked: Instant,
    next: Instant,
    /// When the last round was over, and how long it was, or is, believed.
    over: Instant,
    fresh: Duration,
    /// Blocks to be watched in this round, and when that began.
    left: u64,
    pub begun: Instant,
}

impl Default for Ahead {
    fn default() -> Ahead {
        let now = Instant::now();
        Ahead { asked: now, next: now, over: now, fresh: FRESH[0] / 4, left: 0, begun: now }
    }
}

impl Ahead {
    /// The round is over, or cannot be.
    fn rest(&mut self, now: Instant) -> Duration {
        let quiet = self.asked < self.over || self.fresh < FRESH[0];
        self.fresh = if quiet { (2 * self.fresh).min(FRESH[1]) } else { FRESH[0] };
        (self.over, self.next, self.left) = (now, now + self.fresh, 0);
        self.fresh
    }
}

impl Reclaim {
    /// Memory is about to be short, and what there is may move.
    pub(super) fn is_near(&self) -> bool {
        let ledger = &self.vm.memory.host().ledger;
        ledger.free().0 <= ledger.budget().0 / NEAR && self.vm.memory.may_move()
    }

    /// While memory is about to be short, and nothing has to leave yet: watches some more pages. Answers how long the
    /// thread may rest.
    pub(super) fn look_ahead(&mut self) -> Duration {
        let now = Instant::now();
        if !self.is_near() {
            return CALM;
        }
        // Once pages had to leave, what was watched before is of no use any more.
        let since = self.ahead.asked + CALM;
        let next = if self.ahead.asked > self.ahead.over { since } else { self.ahead.next };
        let due = next.max(since);
        if now < due {
            return due - now;
        }
        if self.ahead.left == 0 || self.ahead.asked > self.ahead.begun {
            self.ahead.left = self.clock.blocks();
            self.ahead.begun = now;
        }
        let n = self.ahead.left.min(STEP / BLOCK);
        self.ahead.left -= n;
        let mut some = Vec::with_capacity(STEP as usize);
        for _ in 0..n {
            let block = self.clock.ahead();
            some.extend(self.look_at(block));
            self.oldest.watched_ahead(block, now);
        }
        some.sort_unstable();
        if !self.watch_all(&some) {
            self.clock.forget();
            self.oldest.forget_clock();
            return self.ahead.rest(now);
        }
        if self.ahead.left == 0 {
            return self.ahead.rest(now);
        }
        self.ahead.next = now + APART;
        APART
    }

    /// A page that was not accessed since the front hand passed it. None: that is not known, or there was none
    /// among those that the back hand came to.
    pub(super) fn cold(&mut self) -> Option<Ppn> {
        let vm = self.vm.clone();
        let mut asked = 0;
        for _ in 0..STEPS {
            while let Some(ppn) = self.cold.pop() {
                if may_leave(&vm.memory, ppn) {
                    return Some(ppn);
                }
            }
            if asked >= ASKED || !self.watch_ahead() {
                return None;
            }
            let block = self.clock.back()?;
            self.oldest.asked_by_clock(block);
            let block_pages = block.pages().filter(|&ppn| !vm.memory.is_on_probation(ppn));
            let (mut here, away) =
                block_pages.partition::<Vec<_>, _>(|&ppn| may_leave(&vm.memory, ppn));
            away.into_iter().for_each(|ppn| self.consider_shared(ppn));
            if here.is_empty() {
                continue;
            }
            asked += here.len() as u32;
            if self.retain_idle(block, &mut here) > 0 {
                vm.memory.note_used(block.first);
            }
            self.cold = here;
        }
        None
    }

    /// Has the front hand go on, if it may by enough. Answers whether what it passes can be watched.
    fn watch_ahead(&mut self) -> bool {
        let blocks = self.vm.memory.pmap().len().0.div_ceil(BLOCK);
        if self.clock.room() < TOGETHER.min(blocks) {
            return true;
        }
        let memory = self.vm.memory.clone();
        let mut some = Vec::with_capacity((TOGETHER * BLOCK) as usize);
        for _ in 0..TOGETHER {
            let Some(block) = self.clock.front() else { break };
            self.oldest.watched_by_clock(block);
            // One that is spared is left mapped, and counts as in use: it would be, and what it cost is saved.
            for ppn in block.pages() {
                let ours = may_leave(&memory, ppn) && !memory.is_on_probation(ppn);
                if ours && !self.is_spared(ppn) {
                    some.push(ppn);
                }
            }
        }
        // The kernel finds neighbours sooner.
        some.sort_unstable();
        let is_watched = self.watch_all(&some);
        if !is_watched {
            self.clock.forget();
            self.oldest.forget_clock();
        }
        is_watched
    }
}

/// Whether a page could be evicted, as far as its state tells.
pub(super) fn may_leave<B: Backend>(memory: &Memory<B>, ppn: Ppn) -> bool {
    let word = memory.pmap().load(ppn);
    word.state() == State::Resident && word.is_idle() && !memory.regions().is_large(ppn)
}
