//! Which large pages are broken, and when. While memory is plentiful: none but a few, to be sampled. Below
//! that, before the memory is needed, those in which much can be shared or is all zero; and when pages are
//! to be evicted, one after another at random, its pages going first. And when they are made whole again: one after
//! the other, once memory has been plentiful for a while.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::reclaim::Reclaim;
use super::share::ShareService;
use crate::backend::MemError;
use crate::memory::Broke;
use crate::sharing::examine::Examined;
use crate::sharing::order::EXTENT;
use crate::word::State;

/// Large pages that a sample may break while memory is plentiful.
const SAMPLED: usize = 8;
/// Large pages that are tried to be broken at a time: one with a page in another transition cannot be.
const TRIED: usize = 4;
/// A large page is broken to be shared if one of so many of its pages can be.
const WORTH: u64 = 8;

/// How long memory has been plentiful before large pages are made: what is broken again soon was not worth it.
pub(super) const STEADY: Duration = Duration::from_secs(10);
/// What lasts so long was worth it: a host that is short every now and then would else break and make the same ones over and
/// over, and bring shared pages home that are shared again.
const LASTING: Duration = Duration::from_secs(600);
/// Between two of them: the kernel takes some milliseconds for each, in which who touches it may wait.
const APART: Duration = Duration::from_millis(100);
/// Between two looks at all of the memory, if there was nothing to be done.
const LOOKS: Duration = Duration::from_secs(30);
/// Regions that are looked at in one go.
const LOOKED_AT: usize = 64;
/// Regions in a row that the kernel refuses until none is tried any more.
const REFUSALS: u32 = 8;

/// The making of large pages.
#[derive(Debug, Default)]
pub(super) struct Collapsing {
    plentiful_since: Option<Instant>,
    next: Option<Instant>,
    /// The region that is looked at next, and how many were in vain.
    at: usize,
    in_vain: usize,
    /// For how long memory is to have been plentiful: longer, where it was not for long over and over.
    steady: Option<Duration>,
    /// Regions whose shared pages came home for nothing, and when.
    for_nothing: BTreeMap<usize, Instant>,
    /// Regions in a row that the kernel could not make whole, for a reason that does not pass.
    refusals: u32,
    /// It cannot at all.
    refused: bool,
}

impl Collapsing {
    /// How long until regions are to be looked at; zero: now.
    fn rest(&mut self, plentiful: bool, now: Instant) -> Duration {
        let steady = self.steady.unwrap_or(STEADY);
        if !plentiful {
            if let Some(since) = self.plentiful_since.take() {
                let lasted = now.saturating_duration_since(since) >= LASTING;
                self.steady = Some(if lasted { STEADY } else { (2 * steady).min(LASTING) });
            }
            return STEADY;
        }
        let since = *self.plentiful_since.get_or_insert(now);
        let due = self.next.map_or(since + steady, |next| next.max(since + steady));
        due.saturating_duration_since(now)
    }

    /// The kernel has made one, or refused it for a reason that does not pass. Whether that is now to be believed: it says the
    /// same of a region that its guest gives up meanwhile.
    fn answered(&mut self, refused: bool) -> bool {
        self.refusals = if refused { self.refusals + 1 } else { 0 };
        self.refused = self.refusals >= REFUSALS;
        self.refused
    }

    /// Whether a region is tried of which so many pages are shared.
    fn may(&mut self, region: usize, shared: usize, now: Instant) -> bool {
        let rests = |since: &Instant| shared > 0 && now.saturating_duration_since(*since) < LASTING;
        self.for_nothing.get(&region).is_none_or(|since| !rests(since))
    }

    /// Shared pages of a region came home, and it is whole now, or is not.
    fn came_home(&mut self, region: usize, whole: bool, now: Instant) {
        if whole {
            self.for_nothing.remove(&region);
        } else {
            self.for_nothing.insert(region, now);
        }
    }

    /// One region was looked at: it was not worth it (None), or was tried, and is whole or not.
    fn looked(&mut self, tried: Option<bool>, regions: usize, now: Instant) {
        self.in_vain = if tried == Some(true) { 0 } else { self.in_vain + 1 };
        if self.in_vain >= regions {
            self.in_vain = 0;
            self.next = Some(now + LOOKS);
        } else if tried.is_some() {
            self.next = Some(now + APART);
        }
    }
}

impl Reclaim {
    /// Makes the next region whole that can be, if it is time. Answers how long the thread may rest; None: for as
    /// long as nobody wants anything.
    pub(super) fn collapse(&mut self) -> Option<Duration> {
        let memory = self.vm.memory.clone();
        let regions = memory.regions().len();
        if regions == 0 || self.collapsing.refused {
            return None;
        }
        let rest = self.collapsing.rest(memory.is_plentiful(), Instant::now());
        if !rest.is_zero() {
            return Some(rest);
        }
        for _ in 0..LOOKED_AT.min(regions) {
            let region = self.collapsing.at % regions;
            self.collapsing.at = region + 1;
            let shared = memory.can_collapse(region);
            let may = |s: &Vec<Ppn>| self.collapsing.may(region, s.len(), Instant::now());
            let shared = shared.filter(may);
            let tried = shared.as_ref().map(|_| memory.collapse(region));
            let refusal = match &tried {
                Some(Err(e @ (MemError::Os { .. } | MemError::Fixed))) => Some(e),
                _ => None,
            };
            let counts = refusal.is_some() || tried == Some(Ok(true));
            if counts && self.collapsing.answered(refusal.is_some()) {
                // Its guest goes on with small ones. Before Linux 6.1 there is no way.
                let why = refusal.map(ToString::to_string).unwrap_or_default();
                tracing::warn!(vm = %self.vm.name, "no large pages are made again: {why}");
                self.vm.no_large_again.store(true, std::sync::atomic::Ordering::Relaxed);
                return None;
            }
            let tried = tried.map(|result| result == Ok(true));
            let home = |p: &Ppn| memory.pmap().load(*p).state() != State::Shared;
            if shared.is_some_and(|shared| shared.iter().any(home)) {
                self.collapsing.came_home(region, tried == Some(true), Instant::now());
            }
            self.collapsing.looked(tried, regions, Instant::now());
            if !self.collapsing.rest(true, Instant::now()).is_zero() {
                break;
            }
        }
        Some(self.collapsing.rest(true, Instant::now()).max(Duration::from_millis(1)))
    }

    /// Breaks the large page that a page is a part of. Whether it is small now.
    pub(super) fn break_at(&self, ppn: Ppn) -> bool {
        let vm = &self.vm;
        match vm.memory.break_large(ppn) {
            Ok(Broke::Done { freed }) => {
                vm.evict_done(freed);
                true
            }
            Ok(Broke::Small) => true,
            Ok(Broke::Busy) | Err(MemError::Gone | MemError::Again) => false,
            Err(e) => {
                vm.set_ill(format!("breaking the large page of {ppn}: {e}"));
                false
            }
        }
    }

    /// Breaks large pages from `start` on until one has pages to propose, or what they had of zeros was enough. None: there
    /// is none, it cannot be broken now (`large_busy`), or nothing is asked for any more.
    pub(super) fn break_from(&mut self, start: Ppn) -> Option<Ppn> {
        let memory = self.vm.memory.clone();
        let regions = memory.regions();
        let n = regions.len();
        let from = regions.of(start).unwrap_or(0);
        let mut failed = 0;
        let large = (0..n).map(|i| regions.first((from + i) % n)).filter(|&r| regions.is_large(r));
        for (i, first) in large.enumerate() {
            // A balloon may have been faster.
            let is_left = self.vm.above_leave() > 0;
            let wanted = self.is_asked() && is_left;
            if failed == TRIED || i > 0 && !wanted || self.vm.is_stopping() {
                break;
            }
            if !self.break_at(first) {
                failed += 1;
                continue;
            }
            let at_home = |p: &Ppn| memory.pmap().load(*p).state() == State::Resident;
            self.broken = (first.0..first.0 + regions.size().0).map(Ppn).filter(at_home).collect();
            if let Some(ppn) = self.broken.pop() {
                return Some(ppn);
            }
        }
        self.large_busy = failed > 0;
        None
    }

    /// Brings pages of broken regions home that are still away. Whether there are such.
    pub(super) fn bring_back(&mut self) -> bool {
        if !self.vm.memory.regions().is_any_away() {
            return false;
        }
        match self.vm.memory.bring_back() {
            Ok(left) => left > 0,
            Err(MemError::Gone) => false,
            Err(e) => {
                self.vm.set_ill(format!("bringing pages of a broken region back: {e}"));
                true
            }
        }
    }

    /// While memory is plentiful, a sample is not to break many large pages. It is made smaller then, and so
    /// less exact, but not one of other pages.
    pub(super) fn thin_out(&self, ppns: Vec<Ppn>) -> Vec<Ppn> {
        let memory = &self.vm.memory;
        let large = ppns.iter().filter(|&&p| memory.regions().is_large(p)).count();
        if large <= SAMPLED || !memory.is_plentiful() {
            return ppns;
        }
        // Evenly over the whole, whatever order they are in.
        let taken = |i: usize| i * SAMPLED / large;
        ppns.into_iter()
            .enumerate()
            .filter(|(i, _)| taken(*i) != taken(i + 1))
            .map(|p| p.1)
            .collect()
    }
}

impl ShareService {
    /// Whether an extent is passed over as a part of a large page. It is broken if it is worth that and memory
    /// is not plentiful any more.
    pub(super) fn passes_over_large(
        &mut self,
        extent: Ppn,
        done: &mut Examined,
    ) -> Result<bool, MemError> {
        let memory = self.vm.memory.clone();
        let regions = memory.regions();
        let Some(region) = regions.of(extent).filter(|_| regions.is_large(extent)) else {
            return Ok(false);
        };
        if memory.is_plentiful() {
            done.large += EXTENT;
            return Ok(true);
        }
        let (first, n) = (regions.first(region), regions.size().0);
        // Each of its extents comes up in a pass; one look is enough.
        if extent != first {
            return Ok(true);
        }
        let (alike, read) = self.examiner.weigh(&memory, first, n)?;
        done.scanned += read;
        if alike * WORTH < n {
            return Ok(true);
        }
        match memory.break_large(first)? {
            Broke::Done { freed } => {
                self.vm.evict_done(freed);
                done.zero += freed;
                Ok(false)
            }
            Broke::Small => Ok(false),
            Broke::Busy => Ok(true),
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn regions_that_cannot_be_made_whole_are_not_tried_without_end() {
        let (mut collapsing, begun) = (Collapsing::default(), Instant::now());
        let at = |s: u64| begun + Duration::from_secs(s);
        assert_eq!(collapsing.rest(true, begun), STEADY);
        assert_eq!(collapsing.rest(true, at(10)), Duration::ZERO);
        // Three regions: one is done, then none can be, though each is tried.
        collapsing.looked(Some(true), 3, at(10));
        assert_eq!(collapsing.rest(true, at(10)), APART);
        for _ in 0..2 {
            collapsing.looked(Some(false), 3, at(11));
            assert_eq!(collapsing.rest(true, at(11)), APART);
        }
        collapsing.looked(None, 3, at(12));
        assert_eq!(collapsing.rest(true, at(12)), LOOKS);
        // A shortage in between begins it anew.
        assert_eq!(collapsing.rest(false, at(50)), STEADY);
        // That was not for long: the next time it is to be for longer.
        assert_eq!(collapsing.rest(true, at(51)), 2 * STEADY);
        assert_eq!(collapsing.rest(false, at(60)), STEADY);
        assert_eq!(collapsing.rest(true, at(61)), 4 * STEADY);
        assert_eq!(collapsing.rest(true, at(661)), Duration::ZERO);
        assert_eq!(collapsing.rest(false, at(662)), STEADY);
        assert_eq!(collapsing.rest(true, at(663)), STEADY);
        for n in 0..10 {
            collapsing.rest(false, at(700 + 2 * n));
            collapsing.rest(true, at(701 + 2 * n));
        }
        assert_eq!(collapsing.rest(true, at(719)), LASTING);
    }

    #[test]
    fn the_kernel_is_believed_when_it_has_refused_some_in_a_row() {
        let mut collapsing = Collapsing::default();
        for _ in 0..3 {
            assert!((1..REFUSALS).all(|_| !collapsing.answered(true)));
            assert!(!collapsing.answered(false));
        }
        assert!((1..REFUSALS).all(|_| !collapsing.answered(true)));
        assert!(collapsing.answered(true));
    }

    #[test]
    fn shared_pages_come_home_for_nothing_every_ten_minutes_at_most() {
        let begun = Instant::now();
        let at = |s| begun + Duration::from_secs(s);
        let mut collapsing = Collapsing::default();
        assert!(collapsing.may(7, 3, begun));
        collapsing.came_home(7, false, begun);
        assert!(!collapsing.may(7, 3, at(599)));
        // Without shared pages it is as any other, and so are the others.
        assert!(collapsing.may(7, 0, at(1)) && collapsing.may(8, 3, at(1)));
        assert!(collapsing.may(7, 3, at(600)));
        collapsing.came_home(7, false, at(600));
        assert!(!collapsing.may(7, 3, at(1199)));
        collapsing.came_home(7, true, at(1199));
        assert!(collapsing.may(7, 3, at(1199)));
    }
}
