//! The reclaim thread of one VM: eviction towards the policy's goal, of each page what it is good for (share
//! before compress before swap), and the sampling of active memory. How pages are written is in `write`.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::cold::{Ahead, may_leave};
use super::large::Collapsing;
use super::leaving_store::LeavingStore;
use super::oldest::Oldest;
use super::shared::Shared;
use super::sizing::Sizing;
use super::trial::Trial;
use super::write::{Cluster, Stuck, Writes};
use crate::backend::MemError;
use crate::clock::{BLOCK, Clock};
use ballast_compress::{Compressor, Place};

use crate::memory::{Compressed, Counters, Left, MOVING, NotBack, NotEvicted, Recovered};
use crate::replacement::Replacement;
use crate::sharing::examine::{Examiner, Marking};
use crate::swap::Ring;
use crate::word::State;

/// Neighbours that leave together, by one call of the kernel for each step.
const RUN: u64 = BLOCK;
/// Random proposals before the pmap is searched in order.
const PROPOSALS: u32 = 128;
/// Victims that are chosen, and looked up in the share table, together.
const LOOKED_UP: u64 = 32;

/// Compressed pages, the oldest, that are tried to be moved on in one go.
const TRIED: usize = 8;
/// The longest rest, and the first, where large pages are in the way that cannot be broken now.
const LARGE_BUSY: Duration = Duration::from_millis(100);
const LARGE_BUSY_AT_FIRST: Duration = Duration::from_millis(2);
/// How long pages that were found unused are believed to be: orders are small where pages are exchanged one for another.
const COLD_FOR: Duration = Duration::from_millis(10);
/// When no cluster was open, or evictions failed, so often one after the other, it gives up for now: the policy asks
/// again.
const REFUSED: u32 = 10_000;
/// For how many of these an eviction counts that failed.
const FAILED: u32 = 100;

pub(super) struct Reclaim {
    // Before what owns the stage that it writes from: it waits for its writes on drop.
    pub(super) ring: Ring,
    pub(super) vm: Arc<Shared>,
    pub(super) clusters: Vec<Cluster>,
    /// See `write`.
    pub(super) writes: Writes,
    pub(super) stuck: Option<Stuck>,
    pub(super) replacement: Box<dyn Replacement>,
    /// In whose order pages are watched, see `cold`.
    pub(super) clock: Clock,
    pub(super) ahead: Ahead,
    /// Pages of the block that the clock came to last, to go first.
    pub(super) cold: Vec<Ppn>,
    pub(super) cold_since: Instant,
    pub(super) trial: Trial,
    pub(super) oldest: Oldest,
    /// Victims, in rising order, that have been looked up in the share table, in vain, or came from the store to leave.
    pub(super) victims: Vec<Ppn>,
    pub(super) leaving_store: LeavingStore,
    examiner: Examiner,
    pub(super) sizing: Sizing,
    /// Since when, or since the last look, there have been pages to evict.
    busy: Option<Instant>,
    /// See `write_back`.
    emptying: Vec<Place>,
    /// None where nothing is compressed.
    pub(super) compressor: Option<Compressor>,
    /// Pages one after the other that did not compress; see `slotless`.
    pub(super) stubborn: u32,
    sampled: Vec<Ppn>,
    /// Where the next walk for a page at home begins, where they are rare.
    walked: Ppn,
    /// Pages of the region that was broken last, to go first.
    pub(super) broken: Vec<Ppn>,
    /// Large pages were there to be broken, and could not be then.
    pub(super) large_busy: bool,
    /// What the kernel refused last was refused for as long as it was tried.
    in_vain: bool,
    /// How long it rests when that is so the next time.
    large_rest: Duration,
    pub(super) collapsing: Collapsing,
}

/// How long what the kernel refuses, for something that is being given up, is tried again at once.
const CHASE: Duration = Duration::from_micros(200);

impl Reclaim {
    /// `found` is what a takeover found in the stage; of a VM that is started, nothing.
    pub fn new(
        vm: Arc<Shared>,
        replacement: Box<dyn Replacement>,
        clock: Clock,
        found: &Recovered,
    ) -> Reclaim {
        let layout = vm.memory.stage().layout();
        let clusters = (0..layout.clusters).map(|c| Cluster::new(c * layout.cluster)).collect();
        let ring = vm.swap.ring(2 * (layout.write_slots() as u32).max(1));
        let compressor = vm.memory.tier().settings().algorithm.and_then(|algorithm| {
            Compressor::new(algorithm)
                .inspect_err(|e| {
                    vm.set_ill(format!("nothing is compressed: {e}"));
                    vm.no_compressor.store(true, Ordering::Relaxed);
                })
                .ok()
        });
        let sizing = Sizing::of(vm.memory.tier());
        let pages = vm.memory.pmap().len().0;
        let mut reclaim = Reclaim {
            vm,
            sizing,
            busy: None,
            emptying: Vec::new(),
            ring,
            clusters,
            writes: Writes::default(),
            stuck: None,
            replacement,
            clock,
            ahead: Ahead::default(),
            cold: Vec::new(),
            cold_since: Instant::now(),
            trial: Trial::default(),
            oldest: Oldest::new(pages),
            victims: Vec::new(),
            leaving_store: LeavingStore::new(),
            examiner: Examiner::to_itself(),
            compressor,
            stubborn: 0,
            // They go home when the next sample begins.
            sampled: found.held.clone(),
            walked: Ppn(0),
            broken: Vec::new(),
            large_busy: false,
            in_vain: false,
            large_rest: LARGE_BUSY_AT_FIRST,
            collapsing: Collapsing::default(),
        };
        reclaim.adopt(&found.staged, layout.cluster);
        reclaim
    }

    /// Pages that a former manager left in the stage go back into their clusters. A slot between
    /// them that no page names is given to the first page of the cluster: that one has left it.
    fn adopt(&mut self, staged: &[(Ppn, u64)], per_cluster: u64) {
        for cluster in &mut self.clusters {
            let mut own: Vec<_> =
                staged.iter().filter(|s| s.1 / per_cluster == cluster.base / per_cluster).collect();
            own.sort_by_key(|s| s.1);
            let Some(&&(filler, _)) = own.first() else { continue };
            for &&(ppn, slot) in &own {
                while cluster.base + (cluster.pages.len() as u64) < slot {
                    cluster.pages.push(filler);
                }
                cluster.pages.push(ppn);
            }
        }
    }

    /// Until the VM is stopped.
    pub fn run(mut self) {
        // What a former manager left goes out first: its clusters may be full.
        self.flush_all();
        while !self.vm.is_stopping() {
            if let Some(request) = self.vm.take_sample_request() {
                self.sample(request);
            }
            self.note_busy();
            self.evict();
            if !self.is_asked() {
                self.oldest.rest();
            }
            self.flush();
            self.settle_all();
            let used = self.look_for_used();
            let away = self.bring_back();
            let rest = if away {
                Some(Duration::from_millis(1))
            } else if let Some(rest) = self.stuck_for() {
                Some(rest)
            } else if self.clusters.iter().any(|c| c.sealed || !c.pages.is_empty()) {
                Some(Duration::from_millis(2))
            } else if self.is_asked() {
                // It gave up for now, or a sample was asked for in between.
                Some(self.rest_before_next_try())
            } else {
                let ahead = self.look_ahead().min(used);
                Some(self.collapse().map_or(ahead, |rest| rest.min(ahead)))
            };
            self.note_busy();
            self.vm.wait_for_work(rest);
        }
    }

    /// Books the time since the last call, if there were pages to be evicted then.
    fn note_busy(&mut self) {
        let now = Instant::now();
        if let Some(since) = self.busy.take() {
            let busy = (now - since).as_nanos() as u64;
            Counters::add(&self.vm.memory.counters.evict_ns, busy);
        }
        self.busy = self.is_asked().then_some(now);
    }

    /// Of what cannot be done now. Large pages are broken one at a time, and another thread may be at one: that takes a
    /// millisecond; what a guest is giving up, or a device holds, may take long.
    fn rest_before_next_try(&mut self) -> Duration {
        if !self.large_busy {
            return Duration::from_millis(10);
        }
        let rest = self.large_rest;
        self.large_rest = (rest * 2).min(LARGE_BUSY);
        rest
    }

    /// Whether there are pages to be evicted.
    pub(super) fn is_asked(&self) -> bool {
        self.vm.evict_goal.load(Ordering::Relaxed) > 0
    }

    /// Whether anything has to leave: what is asked for, or, after that, what it grows by.
    fn goes_on(&mut self) -> bool {
        if self.is_asked() {
            return true;
        }
        self.oldest.rest();
        // As little as the fault service would ask for: page by page each costs several times as much.
        self.vm.hold_down(self.vm.grows_by(self.vm.waiting.load(Ordering::Relaxed) > 0))
    }

    /// Memory has become free: who waits for it may have some now, unless its VM has too much for that.
    fn wake_waiting(&self) {
        // Who finds none says that it waits before it looks.
        fence(Ordering::SeqCst);
        if self.vm.waiting.load(Ordering::Relaxed) > 0 && !self.vm.memory.is_blocked() {
            self.vm.wake_faults();
        }
    }

    /// What was left of an earlier time may be in use by now, but for what came from the store to leave.
    fn forget_chosen(&mut self) {
        if self.cold_since.elapsed() > COLD_FOR {
            self.cold.clear();
            self.victims.retain(|ppn| self.leaving_store.came_to_leave(*ppn));
        }
    }

    fn evict(&mut self) {
        let mut refused = 0u32;
        self.forget_chosen();
        if !std::mem::take(&mut self.large_busy) {
            self.large_rest = LARGE_BUSY_AT_FIRST;
        }
        while self.goes_on() && !self.vm.is_stopping() {
            if self.vm.has_sample_request() {
                // Its period has begun: it does not wait for a long eviction to end.
                break;
            }
            // Before what it is to leave: who asks says that first.
            let goal = self.vm.evict_goal.load(Ordering::Acquire);
            if self.vm.above_leave() == 0 {
                let _ = self.vm.give_up_goal(goal);
                break;
            }
            self.reap(false);
            self.note_busy();
            // Reserved at admission, so only a VM that was given less has none, or one whose locations
            // have failed.
            let slots = self.has_slots();
            self.size_tier(slots);
            if !slots && !self.may_shrink() {
                self.vm.give_up_in_vain(goal);
                break;
            }
            let Some(cluster) = self.open_cluster() else {
                refused += 1;
                if !self.wait_for_cluster() {
                    // Others are asked for it.
                    self.vm.stage_full.store(true, Ordering::Relaxed);
                    self.vm.give_up_in_vain(goal);
                    break;
                }
                if refused > REFUSED {
                    break;
                }
                continue;
            };
            if slots && self.make_room(cluster) {
                continue;
            }
            self.ahead.asked = Instant::now();
            self.oldest.is_asked(goal, self.vm.memory.pmap().in_state(State::Resident).0, slots);
            let Some(ppn) = self.next_victim() else {
                if !self.is_asked() {
                    // What was zeros was enough.
                    continue;
                }
                // Nothing is at home: what is compressed takes memory, too.
                if !(self.bring_home() || slots && self.write_back(cluster)) {
                    // What cannot be broken now can be soon.
                    if !self.large_busy {
                        self.vm.give_up_in_vain(goal);
                    }
                    break;
                }
                continue;
            };
            if !slots && !self.shrinks(ppn) {
                continue;
            }
            if !self.evict_victim(ppn, cluster, slots, &mut refused) {
                break;
            }
        }
    }

    /// All clusters are full: waits until one may be open. False where nothing can be written for now; the policy
    /// is told.
    fn wait_for_cluster(&mut self) -> bool {
        if self.awaits_writes() {
            self.reap(true);
        } else if self.stuck_for().is_some() || self.ring.in_flight() > 0 {
            return false;
        } else {
            self.settle_all();
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    /// Evicts a victim; where there are slots of swap, with its neighbours among the victims. Answers whether to go
    /// on. `refused` is of evictions one after the other.
    fn evict_victim(&mut self, ppn: Ppn, cluster: usize, slots: bool, refused: &mut u32) -> bool {
        // Without slots each is looked at before.
        let (first, n) = if slots { self.with_neighbours(ppn, cluster) } else { (ppn, 1) };
        let slot = self.clusters[cluster].next_slot();
        let mut left = self.vm.memory.evict_run(first, n, slot);
        // Who gives up page after page is between two of them for a moment only.
        let begun = Instant::now();
        let is_refused = |left: &_| matches!(left, Err(NotEvicted::Failed(MemError::Again)));
        while is_refused(&left) && !self.in_vain && begun.elapsed() < CHASE {
            std::thread::yield_now();
            left = self.vm.memory.evict_run(first, n, slot);
        }
        // Where that takes longer, others have the processor, or nobody reads what is given up.
        self.in_vain = is_refused(&left);
        if matches!(&left, Err(NotEvicted::Failed(e)) if !matches!(e, MemError::Again | MemError::Gone))
        {
            // All others are tried before it is again.
            self.vm.memory.note_used(first);
        }
        match left {
            Ok(left) => {
                *refused = 0;
                self.have_left(cluster, &left, slots);
            }
            Err(NotEvicted::NotEligible) => {}
            Err(NotEvicted::Failed(MemError::Gone)) => {
                self.vm.ask_no_more();
                return false;
            }
            Err(NotEvicted::Failed(MemError::Again)) => {
                // The fault service is reading the discard; other pages fare no better.
                std::thread::sleep(Duration::from_micros(50));
            }
            Err(NotEvicted::Failed(e)) => {
                self.vm.set_ill(format!("evicting {ppn}: {e}"));
                std::thread::sleep(Duration::from_millis(10));
                *refused += FAILED;
                return *refused <= REFUSED;
            }
        }
        true
    }

    /// A victim with those of the next victims that lie before it, as many as can leave together: the first of them,
    /// and how many.
    fn with_neighbours(&mut self, victim: Ppn, cluster: usize) -> (Ppn, u64) {
        let cluster = &self.clusters[cluster];
        let room = self.vm.memory.stage().layout().cluster - cluster.pages.len() as u64;
        let goal = self.vm.evict_goal.load(Ordering::Relaxed);
        let most = RUN.min(room).min(goal).min(self.vm.above_leave());
        let (mut first, mut n) = (victim, 1);
        while n < most
            && let Some(&before) = self.victims.last()
            && before.0 + 1 == first.0
            && may_leave(&self.vm.memory, before)
        {
            self.victims.pop();
            (first, n) = (before, n + 1);
        }
        (first, n)
    }

    /// The next step for pages that were evicted into slots of a cluster, where swap has `slots` for them.
    fn have_left(&mut self, cluster: usize, left: &[Left], slots: bool) {
        if slots {
            self.wake_waiting();
        }
        for page in left {
            let gained = page.slot.map_or(1, |slot| self.compress(cluster, page.ppn, slot));
            // Where it takes a frame, it is not at home all the same.
            let gained = if self.vm.counts_at_home() { 1 } else { gained };
            let gained = self.has_left(page.ppn, gained);
            self.vm.evict_done(gained);
        }
        // Without any, what they leave behind is first for the frame that they go to: there is nowhere else for them.
        if !slots {
            self.wake_waiting();
        }
    }

    /// The next step for a page that was evicted into `slot` of a cluster. Answers how many pages of
    /// machine memory the two steps have gained.
    fn compress(&mut self, cluster: usize, ppn: Ppn, slot: u64) -> u64 {
        let past = self.goes_past_tier();
        if let Some(compressor) = &mut self.compressor {
            match self.vm.memory.compress(ppn, slot, Some(compressor).filter(|_| !past)) {
                // The slot takes the next one.
                Compressed::Filled => return 1,
                Compressed::Stored { new_frame } => return u64::from(!new_frame),
                Compressed::TooLarge | Compressed::NoRoom | Compressed::Left => {}
            }
        }
        self.add_to(cluster, ppn, slot);
        1
    }

    /// A page that stays in its slot of the stage to be written. The slots before it that nobody is in any more, of
    /// pages that left beside it and were compressed, are named by it as well: it is in none of them.
    fn add_to(&mut self, cluster: usize, ppn: Ppn, slot: u64) {
        while self.clusters[cluster].next_slot() <= slot {
            self.clusters[cluster].pages.push(ppn);
        }
        if self.clusters[cluster].pages.len() as u64 == self.vm.memory.stage().layout().cluster {
            self.write(cluster);
        }
    }

    /// If the tier is full, a page leaves it. Answers whether one did.
    fn make_room(&mut self, cluster: usize) -> bool {
        let tier = self.vm.memory.tier();
        let goes_there = self.compressor.is_some() && !self.goes_past_tier();
        goes_there && !tier.has_room_for(RUN) && self.write_back(cluster)
    }

    /// Whether what leaves now is not worth a place in the tier: it was used longest ago, and swap is near.
    fn goes_past_tier(&self) -> bool {
        self.oldest.chooses() && self.sizing.is_near()
    }

    /// The page that was compressed longest ago goes on to swap; where the tier is to be smaller, all pages of that
    /// one's frame, one after the other, for only a frame that is empty gains anything. Answers whether one did.
    fn write_back(&mut self, cluster: usize) -> bool {
        let tier = self.vm.memory.tier();
        let frames = tier.occupancy().frames;
        let slot = self.clusters[cluster].next_slot();
        if self.emptying.is_empty() && tier.is_over() {
            self.emptying = tier.oldest_frame();
        }
        let mut oldest = tier.oldest(TRIED).into_iter();
        while let Some(place) = self.emptying.pop().or_else(|| oldest.next()) {
            match self.vm.memory.write_back(place, slot) {
                Ok(ppn) => {
                    self.add_to(cluster, ppn, slot);
                    let left = self.vm.memory.tier().occupancy().frames;
                    if !self.vm.counts_at_home() {
                        self.vm.evict_done(frames.saturating_sub(left));
                    }
                    if left < frames {
                        self.wake_waiting();
                    }
                    return true;
                }
                Err(NotBack::Left) => {}
                Err(NotBack::Damaged(ppn, e)) => self.vm.set_ill(format!("{ppn}: {e}")),
            }
        }
        false
    }

    pub(super) fn open_cluster(&self) -> Option<usize> {
        // A part-filled one first, so that clusters go full.
        let room = self.vm.memory.stage().layout().cluster;
        let open = |c: &Cluster| !c.sealed && (c.pages.len() as u64) < room;
        let best = self.clusters.iter().filter(|c| open(c)).map(|c| c.pages.len()).max()?;
        self.clusters.iter().position(|c| open(c) && c.pages.len() == best)
    }

    /// A page to evict. Victims are chosen some at a time, for neighbours among them leave together. Share before
    /// swap, so they are looked up in the share table first, and those that others have too are not evicted but
    /// shared.
    fn next_victim(&mut self) -> Option<Ppn> {
        let resident = |vm: &Shared, ppn: Ppn| {
            let word = vm.memory.pmap().load(ppn);
            word.state() == State::Resident && word.is_idle()
        };
        self.bring_chosen();
        loop {
            while let Some(ppn) = self.victims.pop() {
                if resident(&self.vm, ppn) {
                    return Some(ppn);
                }
            }
            // Who waits for memory has the first of it after as few as leave together.
            let most = if self.vm.waiting.load(Ordering::Relaxed) > 0 { RUN } else { LOOKED_UP };
            let goal = self.vm.evict_goal.load(Ordering::Relaxed).min(most) as usize;
            if goal == 0 {
                return self.victim();
            }
            let next = |_| if self.vm.is_stopping() { None } else { self.victim() };
            let mut some: Vec<Ppn> = (0..goal).map_while(next).collect();
            some.sort_unstable();
            some.dedup();
            if some.is_empty() {
                return None;
            }
            if !self.vm.is_to_share() || !self.vm.memory.can_map_more() {
                self.victims = some;
                continue;
            }
            if let Err(e) = self.examiner.examine(&self.vm.memory, &some, Marking::None) {
                self.vm.set_ill_unless_gone("sharing before swap", e);
                self.victims = some;
                return self.victims.pop();
            }
            let before = some.len();
            some.retain(|&ppn| self.vm.memory.pmap().load(ppn).state() == State::Resident);
            let shared = (before - some.len()) as u64;
            self.vm.evict_done(shared);
            if shared > 0 {
                self.wake_waiting();
            }
            self.victims = some;
            if self.vm.evict_goal.load(Ordering::Relaxed) == 0 {
                return self.victims.pop();
            }
        }
    }

    /// Nothing is at home: broken pages are brought there, else shared ones, to be evicted from
    /// there. Answers whether any came.
    fn bring_home(&mut self) -> bool {
        let broken = self.vm.memory.take_broken(MOVING.0 as usize);
        let pages = if broken.is_empty() { self.shared_pages() } else { broken };
        if pages.is_empty() {
            return false;
        }
        let came = self.vm.memory.go_home(&pages);
        let state = |p: &Ppn| self.vm.memory.pmap().load(*p).state();
        self.vm.memory.give_back_broken(pages.into_iter().filter(|p| state(p) == State::Broken));
        match came {
            Ok(came) => came > 0,
            Err(e) => {
                self.vm.set_ill_unless_gone("bringing pages home", e);
                false
            }
        }
    }

    fn shared_pages(&mut self) -> Vec<Ppn> {
        let memory = &self.vm.memory;
        if memory.pmap().in_state(State::Shared).is_zero() {
            return Vec::new();
        }
        let start = self.replacement.propose(memory.pmap().len());
        let mut some = Vec::new();
        memory.pmap().find_from(start, |p| {
            if memory.pmap().load(p).state() == State::Shared {
                some.push(p);
            }
            some.len() == MOVING.0 as usize
        });
        some
    }

    /// The next of them, as the ways to choose one say.
    pub(super) fn victim(&mut self) -> Option<Ppn> {
        let size = self.vm.memory.pmap().len();
        if self.vm.memory.pmap().in_state(State::Resident).is_zero() {
            return None;
        }
        let vm = self.vm.clone();
        let eligible = |p: Ppn| may_leave(&vm.memory, p);
        self.oldest.chose(false);
        if let Some(ppn) = std::iter::from_fn(|| self.broken.pop()).find(|&p| eligible(p)) {
            return Some(ppn);
        }
        if let Some(ppn) = self.fails_probation() {
            self.consider_some_shared();
            return Some(ppn);
        }
        let oldest = self.oldest();
        self.oldest.chose(oldest.is_some());
        if oldest.is_some() {
            self.consider_some_shared();
            return oldest;
        }
        if let Some(ppn) = self.cold() {
            return Some(ppn);
        }
        let mut last = Ppn(0);
        for _ in 0..PROPOSALS {
            last = self.replacement.propose(size);
            if eligible(last) && !self.is_spared(last) {
                return Some(last);
            }
            self.consider_shared(last);
        }
        if let Some(ppn) = self.break_from(last) {
            return Some(ppn);
        }
        // Residents are rare: the next one after that which was found so last, for whoever begins elsewhere each time comes over
        // what is not at home to the same one again.
        let found = vm.memory.pmap().find_from(Ppn(self.walked.0 % size.0), eligible)?;
        self.walked = Ppn(found.0 + 1);
        Some(found)
    }

    /// Whether a page that is proposed had better stay: it was missed when it last left.
    pub(super) fn is_spared(&mut self, ppn: Ppn) -> bool {
        let spared = self.vm.memory.was_missed(ppn);
        if spared && self.replacement.last_pass() {
            self.vm.memory.forget_missed(ppn);
        }
        spared
    }

    /// Ends the sample of the last period and begins a new one.
    fn sample(&mut self, ppns: Vec<Ppn>) {
        let mut ppns = self.thin_out(ppns);
        ppns.retain(|p| p.0 < self.vm.memory.pmap().len().0);
        self.end_sample();
        self.bring_samples_home(&ppns);
        let mut taken = 0;
        // A page may be touched before the last one is taken.
        let base = self.vm.memory.counters.values().touched;
        self.vm.memory.touches.restart();
        for ppn in ppns {
            if self.vm.is_stopping() {
                break;
            }
            if self.is_mapped_elsewhere(ppn) {
                continue;
            }
            self.break_at(ppn);
            match self.take(ppn) {
                Ok(true) => {
                    taken += 1;
                    self.sampled.push(ppn);
                }
                Ok(false) => {}
                Err(MemError::Gone) => return,
                Err(e) => self.vm.set_ill(format!("sampling {ppn}: {e}")),
            }
        }
        self.vm.sample_began(taken, base);
    }

    /// Puts back what is left of the sample of the last period, for 40 ms at most.
    fn end_sample(&mut self) {
        let mut left = std::mem::take(&mut self.sampled);
        for _ in 0..200 {
            left.retain(|&ppn| match self.vm.memory.unsample(ppn) {
                Ok(done) => {
                    self.oldest.came_unused(ppn);
                    !done
                }
                Err(MemError::Gone) => false,
                Err(e) => {
                    self.vm.set_ill(format!("ending the sample of {ppn}: {e}"));
                    true
                }
            });
            if left.is_empty() || self.vm.is_stopping() {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.sampled = left;
    }

    /// Reading a shared page is not seen where it is.
    fn bring_samples_home(&self, ppns: &[Ppn]) {
        let away = ppns.iter().copied().filter(|&p| self.is_mapped_elsewhere(p));
        let away: Vec<Ppn> = away.collect();
        for some in away.chunks(MOVING.0 as usize) {
            match self.vm.memory.go_home(some) {
                Ok(_) | Err(MemError::Gone) => {}
                Err(e) => self.vm.set_ill(format!("bringing pages home: {e}")),
            }
        }
    }

    fn is_mapped_elsewhere(&self, ppn: Ppn) -> bool {
        matches!(self.vm.memory.pmap().load(ppn).state(), State::Shared | State::Broken)
    }

    /// Takes a page into the sample, if it is not busy for a millisecond, and there is room for it.
    fn take(&self, ppn: Ppn) -> Result<bool, MemError> {
        for _ in 0..20 {
            if self.vm.memory.sample(ppn)? {
                return Ok(true);
            }
            if !self.vm.memory.may_hold() {
                break;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(false)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "reclaim_tests.rs"]
mod tests;
