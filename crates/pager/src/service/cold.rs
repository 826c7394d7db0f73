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
const ASKED: u32 = 128;
/// Blocks that are passed for one victim: most pages may be elsewhere.
const STEPS: u64 = 8 * ASKED as u64 / BLOCK;

/// Memory is about to be short while less than this part of it is free.
const NEAR: u64 = 8;
/// Pages that are watched ahead in one go, and the time between two: 4,096 a second at most.
const STEP: u64 = 256;
const APART: Duration = Duration::from_micros(62_500);
/// How long pages have to leave no more before all are watched ahead, and how long that is believed then.
const CALM: Duration = Duration::from_secs(5);
const FRESH: Duration = Duration::from_secs(60);

/// Watching ahead of need. What leaves first, when much has to leave at once, is what was left alone since then, and not
/// since a moment ago.
#[derive(Debug)]
pub(super) struct Ahead {
    /// When pages last had to leave.
    pub asked: Instant,
    next: Instant,
    /// All are watched.
    done: bool,
}

impl Default for Ahead {
    fn default() -> Ahead {
        let now = Instant::now();
        Ahead { asked: now, next: now, done: false }
    }
}

impl Reclaim {
    /// While memory is about to be short, and nothing has to leave yet: watches some more pages. Answers how long the
    /// thread may rest.
    pub(super) fn look_ahead(&mut self) -> Duration {
        let memory = self.vm.memory.clone();
        let (ledger, now) = (&memory.host().ledger, Instant::now());
        if ledger.free().0 > ledger.budget().0 / NEAR {
            self.ahead.done = false;
            return CALM;
        }
        let due = self.ahead.next.max(self.ahead.asked + CALM);
        if now < due {
            return due - now;
        }
        if std::mem::take(&mut self.ahead.done) {
            // By now most of what is in use was accessed.
            self.clock.forget();
        }
        let mut some = Vec::with_capacity(STEP as usize);
        for _ in 0..STEP / BLOCK {
            let Some(block) = self.clock.ahead() else {
                self.ahead.done = true;
                break;
            };
            let ours = |ppn: &Ppn| may_leave(&memory, *ppn) && !memory.is_on_probation(*ppn);
            some.extend(block.pages().filter(ours));
        }
        some.sort_unstable();
        let seen = some.is_empty() || memory.backend().watch(&some);
        let rest = if self.ahead.done || !seen { FRESH } else { APART };
        self.ahead.next = now + rest;
        rest
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
            let block_pages = block.pages().filter(|&ppn| !vm.memory.is_on_probation(ppn));
            let (mut here, away) =
                block_pages.partition::<Vec<_>, _>(|&ppn| may_leave(&vm.memory, ppn));
            away.into_iter().for_each(|ppn| self.consider_shared(ppn));
            if here.is_empty() {
                continue;
            }
            let accessed = vm.memory.backend().accessed(block.first, block.n);
            let is_cold = |ppn: &Ppn| !accessed[(ppn.0 - block.first.0) as usize];
            asked += here.len() as u32;
            here.retain(is_cold);
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
        some.is_empty() || memory.backend().watch(&some)
    }
}

/// Whether a page could be evicted, as far as its state tells.
pub(super) fn may_leave<B: Backend>(memory: &Memory<B>, ppn: Ppn) -> bool {
    let word = memory.pmap().load(ppn);
    word.state() == State::Resident && word.is_idle() && !memory.regions().is_large(ppn)
}
