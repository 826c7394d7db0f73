//! The compressed tier of a VM is as large as it is worth (`crate::worth`), where that is asked for.

use std::time::{Duration, Instant};

use super::reclaim::Reclaim;
use crate::tier::Tier;
use crate::worth::{Seen, Worth};

/// How often it is looked at while pages leave.
const PERIOD: Duration = Duration::from_secs(1);
/// So many reads of swap say how long one takes, and less than this is near.
const ENOUGH: u64 = 64;
const NEAR_NS: u64 = 1_000_000;

pub(super) struct Sizing {
    /// None where the tier keeps its size.
    worth: Option<Worth>,
    begun: Instant,
    next: Instant,
    /// Frames that it may have while there is room in swap.
    limit: u64,
    /// Whether there was.
    slots: bool,
    /// Whether swap is read soon, by the last reads, and the totals by then.
    near: bool,
    known: (u64, u64),
}

impl Sizing {
    pub fn of(tier: &Tier) -> Sizing {
        let most = tier.limits().1.0;
        let begun = Instant::now();
        let worth = tier.settings().adaptive.then(|| Worth::new(most));
        Sizing { worth, begun, next: begun, limit: most, slots: true, near: false, known: (0, 0) }
    }

    /// Whether swap is near: what was used longest ago, and leaves because much has to, is no less at hand there than in a
    /// tier that takes the place of pages at home (ADR 38). False where the tier keeps its size.
    pub fn is_near(&self) -> bool {
        self.near && self.worth.is_some()
    }

    /// So many pages were read from swap so far, which took so long together. By the reads themselves: a page may have been
    /// read before it was wanted.
    fn learn(&mut self, reads: u64, ns: u64) {
        let (more, longer) = (reads.saturating_sub(self.known.0), ns.saturating_sub(self.known.1));
        if more >= ENOUGH {
            (self.near, self.known) = (longer / more < NEAR_NS, (reads, ns));
        }
    }
}

impl Reclaim {
    /// Before a page leaves. Without room in swap (`slots`) the tier is all there is, and may be as large as it may
    /// ever be.
    pub(super) fn size_tier(&mut self, slots: bool) {
        let sizing = &mut self.sizing;
        if sizing.worth.is_none() {
            return;
        }
        let tier = self.vm.memory.tier();
        if slots != sizing.slots {
            sizing.slots = slots;
            tier.set_limit(if slots { sizing.limit } else { u64::MAX });
        }
        let now = Instant::now();
        if !slots || now < sizing.next {
            return;
        }
        sizing.next = now + PERIOD;
        let (returns, occupancy) = tier.returns();
        let counters = &self.vm.memory.counters;
        let (reads, ns) = counters.disk_reads();
        sizing.learn(reads, ns);
        let c = counters.values();
        let Some(worth) = &mut sizing.worth else { return };
        let seen = Seen {
            returns,
            occupancy,
            decompressed: c.decompressed,
            decompress_ns: c.decompress_ns,
            swap_ins: c.swap_ins,
            swap_in_ns: c.swap_in_ns,
        };
        let limit = worth.step(now - sizing.begun, &seen);
        if limit != sizing.limit {
            sizing.limit = limit;
            tier.set_limit(limit);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::service::testing::reclaim;

    #[test]
    fn swap_is_near_by_the_last_that_came_back_from_it() {
        let Some(mut reclaim) = reclaim() else { return };
        let sizing = &mut reclaim.sizing;
        sizing.worth = Some(Worth::new(16));
        sizing.learn(ENOUGH - 1, 0);
        assert!(!sizing.is_near(), "not known");
        sizing.learn(ENOUGH, ENOUGH * (NEAR_NS - 1));
        assert!(sizing.is_near());
        let before = sizing.known;
        sizing.learn(before.0 + ENOUGH - 1, before.1 + ENOUGH * 100 * NEAR_NS);
        assert!(sizing.is_near(), "few say nothing");
        sizing.learn(before.0 + ENOUGH, before.1 + ENOUGH * NEAR_NS);
        assert!(!sizing.is_near());
        sizing.learn(before.0 + 3 * ENOUGH, before.1 + ENOUGH * NEAR_NS);
        assert!(sizing.is_near());
        sizing.worth = None;
        assert!(!sizing.is_near(), "the tier keeps its size");
    }
}
