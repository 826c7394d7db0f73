//! Whether a VMM has mappings to spare. The kernel lets a process have only so many, and each change of what its RAM
//! shows may add some. A count goes over its whole list: in between, what changes may have added is added up.

use std::cmp::Ordering;
use std::time::{Duration, Instant};

use ballast_units::Pages;

/// The kernel's default of vm.max_map_count. Distributions set it sixteen times higher and more; each mapping takes some 250
/// bytes of the kernel's memory, which nobody books, and what goes over all of them takes as long as there are many.
const DEFAULT: u64 = 65_530;
/// A VM has more than that if it is as large as this for each: so they take 0.4% of its memory.
const PAGES_PER_MAPPING: u64 = 16;
/// Part of what is allowed that a VMM may have used; the rest is for the VMM itself.
const MAPPINGS: f64 = 0.75;
/// The same where pages are only brought home.
const WITH_HOMES: f64 = 0.875;
/// Changes that are made together at most: with less room than for these, it is full.
const TOGETHER: u64 = 64;
/// Mappings that one change may add: it splits one, and lies between the halves.
const PER_CHANGE: u64 = 2;
/// Between two counts; longer where one takes long.
const RECOUNT: Duration = Duration::from_secs(10);
/// So many times what a count took.
const SELDOM: u32 = 200;
/// A count is good until this part of what was left by then may have been taken since, ...
const LEFT: u64 = 8;
/// ... or for so long, where this part of what was counted may have come, too: it is shown.
const GOOD_FOR: Duration = Duration::from_secs(600);
const SHOWN: u64 = 4;

/// The mappings of one VMM. `changes` is how many were made to them so far.
pub(super) struct MappingCount {
    counted: u64,
    /// Changes made when it was counted.
    changes: u64,
    at: Option<Instant>,
    took: Duration,
    most: u64,
    most_with_homes: u64,
    /// What the kernel lets it have, against what its size does.
    kernels_to_own: Ordering,
}

impl MappingCount {
    /// Not counted yet, of a VM of `len`. `kernels` is what the kernel lets it have, None where that is not known.
    pub fn of(len: Pages, kernels: Option<u64>) -> MappingCount {
        let kernels = kernels.unwrap_or(DEFAULT);
        let own = DEFAULT.max(len.0 / PAGES_PER_MAPPING);
        // What goes home makes fewer of them in the end: that has all that the kernel allows.
        MappingCount {
            most: MappingCount::new(kernels.min(own)).most,
            kernels_to_own: kernels.cmp(&own),
            ..MappingCount::new(kernels)
        }
    }

    fn new(allowed: u64) -> MappingCount {
        let part = |part: f64| (allowed as f64 * part) as u64;
        MappingCount {
            counted: 0,
            changes: 0,
            at: None,
            took: Duration::ZERO,
            most: part(MAPPINGS),
            most_with_homes: part(WITH_HOMES),
            kernels_to_own: Ordering::Less,
        }
    }

    /// What has to change for more.
    pub fn more_needs(&self) -> &'static str {
        match self.kernels_to_own {
            Ordering::Less => "a higher vm.max_map_count",
            Ordering::Equal => "a larger VM, and a higher vm.max_map_count",
            Ordering::Greater => "a larger VM",
        }
    }

    /// Whether they are to be counted now.
    pub fn is_due(&self, changes: u64, now: Instant) -> bool {
        let Some(at) = self.at else { return true };
        let age = now.saturating_duration_since(at);
        let added = self.estimate(changes) - self.counted;
        let is_near = added > self.most.saturating_sub(self.counted) / LEFT;
        let is_old = age > GOOD_FOR && added > self.counted / SHOWN;
        // Others may go by themselves, the VMM's own among them.
        let is_full = !self.has_room(changes);
        age > RECOUNT.max(self.took * SELDOM) && (is_near || is_old || is_full)
    }

    /// They were counted, from `begun` until `now`; None: they could not be.
    pub fn note(&mut self, counted: Option<u64>, changes: u64, begun: Instant, now: Instant) {
        if let Some(counted) = counted {
            (self.counted, self.changes) = (counted, changes);
        }
        (self.at, self.took) = (Some(now), now.saturating_duration_since(begun));
    }

    /// So many when they were last counted.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// So many at most, by what was counted last.
    pub fn estimate(&self, changes: u64) -> u64 {
        self.counted + (changes - self.changes) * PER_CHANGE
    }

    /// Whether more may be made.
    pub fn has_room(&self, changes: u64) -> bool {
        changes + TOGETHER <= self.until()
    }

    /// When so many changes were made, there is no more room.
    pub fn until(&self) -> u64 {
        self.changes + self.most.saturating_sub(self.counted) / PER_CHANGE
    }

    /// The same of changes that bring pages home.
    pub fn homes_until(&self) -> u64 {
        self.changes + self.most_with_homes.saturating_sub(self.counted) / PER_CHANGE
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Of 1,000 allowed, counted at `begun` in no time after 10 changes: so many.
    fn counted(n: u64, begun: Instant) -> MappingCount {
        let mut count = MappingCount::new(1_000);
        assert!(count.is_due(10, begun));
        count.note(Some(n), 10, begun, begun);
        count
    }

    #[test]
    fn a_vm_has_as_many_as_the_kernel_allows_but_no_more_than_its_size_is_worth() {
        let most = |gib: u64, kernels| MappingCount::of(Pages(gib << 18), kernels).most;
        assert_eq!(most(1, Some(65_530)), 49_147);
        assert_eq!(most(1, Some(1_048_576)), 49_147);
        assert_eq!(most(1, None), 49_147);
        assert_eq!(most(16, Some(1_048_576)), 196_608);
        assert_eq!(most(1_024, Some(1_048_576)), 786_432);
        assert_eq!(most(16, Some(1_000)), 750);
        // One that has more since it had a manager that let it, can go back.
        let count = MappingCount::of(Pages(1 << 18), Some(1_048_576));
        assert_eq!(count.most_with_homes, 917_504);
        let told = |kernels| MappingCount::of(Pages(1 << 18), Some(kernels)).more_needs();
        assert_eq!(told(1_048_576), "a larger VM");
        assert_eq!(told(1_000), "a higher vm.max_map_count");
        assert!(told(65_530).contains("VM") && told(65_530).contains("max_map_count"));
    }

    #[test]
    fn there_is_room_until_changes_may_have_taken_three_quarters_of_what_is_allowed() {
        let count = counted(150, Instant::now());
        assert_eq!((count.counted(), count.estimate(10), count.estimate(15)), (150, 150, 160));
        assert!(count.has_room(310 - TOGETHER) && !count.has_room(311 - TOGETHER));
        assert_eq!((count.until(), counted(751, Instant::now()).until()), (310, 10));
        // An eighth more for what only goes home.
        assert_eq!(count.homes_until(), 10 + (875 - 150) / PER_CHANGE);
        assert_eq!(counted(876, Instant::now()).homes_until(), 10);
        let all_but = |n: u64| counted(750 - n * PER_CHANGE, Instant::now());
        assert!(all_but(TOGETHER).has_room(10));
        assert!(!all_but(TOGETHER - 1).has_room(10) && !counted(751, Instant::now()).has_room(10));
    }

    #[test]
    fn they_are_counted_again_when_much_of_what_was_left_may_be_taken_or_after_a_while() {
        let begun = Instant::now();
        // 600 were left, of which 75 are an eighth.
        let count = counted(150, begun);
        let due = |changes, after| count.is_due(changes, begun + after);
        let soon = RECOUNT + Duration::from_nanos(1);
        assert_eq!([10 + 37, 10 + 38].map(|changes| due(changes, soon)), [false, true]);
        assert_eq!([RECOUNT, soon].map(|after| due(100, after)), [false, true]);
        // Few changes: as good as it was.
        let late = GOOD_FOR + Duration::from_nanos(1);
        assert_eq!([GOOD_FOR, late].map(|after| due(29, after)), [false, true]);
        assert_eq!([10, 28].map(|changes| due(changes, 2 * GOOD_FOR)), [false, false]);
        assert!(counted(0, begun).is_due(11, begun + late));
    }

    #[test]
    fn where_there_is_no_room_they_are_counted_again_though_nothing_was_changed() {
        let begun = Instant::now();
        let due = |n, after| counted(n, begun).is_due(10, begun + after);
        assert_eq!([RECOUNT, 2 * RECOUNT].map(|after| due(751, after)), [false, true]);
        assert!(!due(750 - TOGETHER * PER_CHANGE, 2 * RECOUNT));
        // As the gate of those that make changes leaves it.
        assert!(due(750, 2 * RECOUNT) && due(749, 2 * RECOUNT));
    }

    #[test]
    fn what_takes_long_is_seldom_done_and_what_could_not_be_counted_is_known_no_better() {
        let begun = Instant::now();
        let mut count = counted(150, begun);
        let then = begun + Duration::from_secs(1);
        count.note(None, 400, begun, then);
        assert_eq!((count.counted(), count.estimate(400)), (150, 930));
        // It took a second.
        let wait = Duration::from_secs(SELDOM.into());
        assert!(!count.is_due(400, then + wait));
        assert!(count.is_due(400, then + wait + Duration::from_nanos(1)));
        count.note(Some(160), 400, begun, then);
        assert_eq!((count.counted(), count.estimate(400), count.has_room(400)), (160, 160, true));
    }
}
