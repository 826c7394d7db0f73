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
    pub fn rest(&mut self, now: Instant) -> Duration {
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
        let anew = self.ahead.left == 0 || self.ahead.asked > self.ahead.begun;
        let is_past = anew && self.ahead.asked > self.ahead.over;
        let due = if is_past { since } else { self.ahead.next.max(since) };
        if now < due {
            return due - now;
        }
        if anew {
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
            (self.cold, self.cold_since) = (here, Instant::now());
        }
        None
    }

    /// Has the front hand go on, if it may by enough. Answers whether what it passes can be watched.
    fn watch_ahead(&mut self) -> bool {
        if self.clock.room() < TOGETHER.min(self.clock.blocks()) {
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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use ballast_units::Pages;

    use super::*;
    use crate::service::testing::{ON_THEIR_WAY, PAGES, reclaim, touch};

    #[test]
    fn the_longer_nothing_has_to_leave_the_longer_what_was_watched_is_believed() {
        let start = Instant::now();
        let mut ahead = Ahead { asked: start, over: start, ..Ahead::default() };
        let mut now = start;
        let mut rounds = |ahead: &mut Ahead, asked: bool| {
            now += Duration::from_secs(1000);
            if asked {
                ahead.asked = now;
            }
            now += Duration::from_secs(1000);
            let rest = ahead.rest(now);
            assert_eq!((ahead.over, ahead.next, ahead.left), (now, now + rest, 0));
            rest.as_secs()
        };
        // What is used is known after two rounds, whatever had to leave between them.
        let first: Vec<u64> = (0..2).map(|_| rounds(&mut ahead, true)).collect();
        assert_eq!(first, [30, 60]);
        let quiet: Vec<u64> = (0..6).map(|_| rounds(&mut ahead, false)).collect();
        assert_eq!(quiet, [120, 240, 480, 960, 960, 960]);
        assert_eq!(rounds(&mut ahead, true), 60);
        assert_eq!(rounds(&mut ahead, true), 60);
        // At the very end of a round counts as after it.
        assert_eq!(rounds(&mut ahead, false), 120);
        ahead.asked = ahead.over;
        assert_eq!(rounds(&mut ahead, false), 60);
    }

    #[test]
    fn a_round_ahead_waits_for_calm_and_for_what_was_watched_to_be_old() {
        let Some(mut reclaim) = reclaim() else { return };
        assert!(reclaim.vm.memory.host().ledger.try_reserve(Pages(PAGES - 8)));
        let step = |reclaim: &mut Reclaim| {
            let before = reclaim.ahead.left;
            let rest = reclaim.look_ahead();
            (rest, reclaim.ahead.left != before)
        };
        // Pages leave.
        reclaim.ahead.asked = Instant::now();
        let (rest, watched) = step(&mut reclaim);
        assert!(rest > CALM / 2 && rest <= CALM && !watched, "{rest:?}");
        // Not for a while, but all was watched a moment ago.
        let ago = |n: u32| Instant::now().checked_sub(n * CALM).unwrap();
        reclaim.ahead.asked = ago(3);
        reclaim.ahead.rest(ago(2));
        let (rest, watched) = step(&mut reclaim);
        assert!(rest > CALM / 2 && !watched, "{rest:?}");
        // Since then some left: that is of no use any more.
        reclaim.ahead.rest(ago(3));
        reclaim.ahead.asked = ago(2);
        let begun = Instant::now();
        assert_eq!(step(&mut reclaim), (APART, true));
        assert!(reclaim.ahead.next >= begun + APART);
        // One step after the other.
        reclaim.ahead.next += CALM;
        let (rest, watched) = step(&mut reclaim);
        assert!(rest > APART && !watched, "{rest:?}");
    }

    /// Has the hands of the clock a whole turn apart.
    fn watch_all(reclaim: &mut Reclaim) {
        for _ in 0..reclaim.clock.blocks() {
            let block = reclaim.clock.ahead();
            let some = reclaim.look_at(block);
            reclaim.oldest.watched_by_clock(block);
            assert!(reclaim.watch_all(&some));
        }
    }

    #[test]
    fn what_the_clock_finds_in_use_is_noted_and_where_all_is_it_gives_up() {
        let Some(mut reclaim) = reclaim() else { return };
        let generations = |reclaim: &Reclaim| -> Vec<u8> {
            let of = |p| reclaim.vm.memory.generation(Ppn(p)).unwrap();
            (0..PAGES).step_by(BLOCK as usize).map(of).collect()
        };
        let newer = |before: &[u8], after: &[u8]| {
            before.iter().zip(after).filter(|(before, after)| before < after).count()
        };
        // Those that were touched last are of the newest already.
        let before = generations(&reclaim);
        let newest = before.iter().filter(|of| Some(*of) == before.iter().max()).count();
        watch_all(&mut reclaim);
        (0..PAGES).for_each(|p| touch(&reclaim.vm.memory, p));
        let n = (ASKED as u64 / BLOCK) as usize;
        assert_eq!(reclaim.cold(), None);
        let noted = newer(&before, &generations(&reclaim));
        println!("{noted} of {n} were noted, {newest} are of the newest");
        assert!(noted <= n && noted + newest >= n);
        // None of it is used.
        reclaim.clock.forget();
        watch_all(&mut reclaim);
        let before = generations(&reclaim);
        let cold = std::iter::from_fn(|| reclaim.cold()).take(PAGES as usize / 2).count();
        let noted = newer(&before, &generations(&reclaim));
        println!("{cold} were cold; {noted} blocks were noted as in use");
        assert!(cold >= PAGES as usize / 4 && noted <= ON_THEIR_WAY);
    }
}
