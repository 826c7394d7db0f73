//! The compressed tier of a VM is as large as it is worth (`crate::worth`), where that is asked for.

use std::time::{Duration, Instant};

use super::reclaim::Reclaim;
use crate::tier::Tier;
use crate::worth::{Seen, Worth};

/// How often it is looked at while pages leave.
const PERIOD: Duration = Duration::from_secs(1);

pub(super) struct Sizing {
    /// None where the tier keeps its size.
    worth: Option<Worth>,
    begun: Instant,
    next: Instant,
    /// Frames that it may have while there is room in swap.
    limit: u64,
    /// Whether there was.
    slots: bool,
}

impl Sizing {
    pub fn of(tier: &Tier) -> Sizing {
        let most = tier.limits().1.0;
        let begun = Instant::now();
        let worth = tier.settings().adaptive.then(|| Worth::new(most));
        Sizing { worth, begun, next: begun, limit: most, slots: true }
    }
}

impl Reclaim {
    /// Before a page leaves. Without room in swap (`slots`) the tier is all there is, and may be as large as it may
    /// ever be.
    pub(super) fn size_tier(&mut self, slots: bool) {
        let sizing = &mut self.sizing;
        let Some(worth) = &mut sizing.worth else { return };
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
        let c = self.vm.memory.counters.values();
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
