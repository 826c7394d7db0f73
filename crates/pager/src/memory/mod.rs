//! The page-state machine of one VM: every transition of every page, each under the page's busy
//! bit, over the seam to guest memory.
//!
//! Invariants (`check`, when nothing moves):
//! - one page of machine memory is charged for every Resident, Held and Broken page and for every frame
//!   of the tier, none for others (the store's pages are charged to their domain);
//! - every Compressed word names its own taken slot of the tier, and no other slot is taken;
//! - every Swapped word names its own taken slot of the swap space, and no other slot is taken but
//!   by clusters being written, and those that could not be written and are retired;
//! - every Held word names its own taken hold of the stage;
//! - a page is mapped to the store if and only if it is Shared or Broken, to the zeros if and only if it
//!   is Zero or Broken without a store page, and home otherwise; each word that names a store page
//!   holds one reference to it;
//! - a page of a region that is backed by a large page, or was and is not broken, is Resident or Ballooned, or
//!   Untouched, if the kernel had no memory for all of it.
//!
//! Two pages never wait for one another: an operation that finds a page busy says so and does
//! nothing.
//!
//! | what happens to a page | where |
//! | --- | --- |
//! | it is wanted: for the first time, or from where it is | `fault`, `fresh`, `first_touches`, `around` |
//! | it leaves: to the stage, the tier, or for good | `evict`, `compress`, `discard`, `departures` |
//! | it is shared, comes home from there, reads as zeros | `share`, `homing`, `zeros`, `commons` |
//! | it is taken out of reach, to see whether it is used | `sample` |
//! | a change of its mapping was cut short; another manager comes | `settle`, `recover` |
//! | it is part of a large page | `large`, `latent`, `regions`, `collapse` |
//! | what is remembered of it, for who chooses what leaves | `ages`, `missed`, `probation`; the sets: `page_set` |
//! | all of them: totals, and what must hold | `counters`, `check` |

mod ages;
mod around;
mod check;
mod collapse;
mod commons;
mod compress;
mod counters;
mod departures;
mod discard;
mod evict;
mod fault;
mod first_touches;
mod fresh;
mod homing;
mod large;
mod latent;
mod missed;
mod page_set;
mod probation;
mod recover;
mod regions;
mod sample;
mod settle;
mod share;
mod zeros;

use std::sync::Arc;

use ballast_units::{Pages, SlotId};

pub use commons::{MOVING, Membership};
pub use compress::{Compressed, NotBack};
pub use counters::{CounterValues, Counters};
pub(crate) use departures::Departures;
pub use departures::Mark;
pub use discard::Unbooked;
pub use evict::{Left, NotEvicted};
pub use fault::{Access, Fault, Wait};
pub use large::Broke;
pub(crate) use page_set::PageSet;
pub(crate) use probation::MOST as MOST_ON_PROBATION;
pub use recover::{RecoverError, Recovered};
pub use regions::{LargeCounts, Regions};
pub use sample::Touches;
pub use share::{Contents, Enter, Entered, Scratch};

use self::first_touches::FirstTouches;
use crate::backend::Backend;
use crate::host::Host;
use crate::pmap::Pmap;
use crate::stage::Stage;
use crate::swap::SlotSpace;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::tier::Tier;

/// The paged memory of one VM.
pub struct Memory<B: Backend> {
    pub(crate) pmap: Pmap,
    pub(crate) backend: B,
    pub(crate) stage: Stage,
    pub(crate) tier: Tier,
    pub(crate) host: Arc<Host>,
    slots: Mutex<SlotSpace>,
    departures: departures::Departures,
    charged: AtomicU64,
    target: AtomicU64,
    first_touches: FirstTouches,
    commons: commons::Commons<B>,
    /// How soon the pages of the current sample were touched.
    pub touches: Touches,
    regions: Regions,
    /// What happened to its pages since this manager has it.
    pub counters: Counters,
}

impl<B: Backend> Memory<B> {
    /// `pmap` is fresh: all pages untouched. For one that is not, see `recover`. `fault_around` is a power of two: pages
    /// handed out around a first touch while memory is plentiful, and so many at a time ahead of touches that follow one
    /// another (`run_ahead`).
    pub fn new(
        pmap: Pmap,
        backend: B,
        stage: Stage,
        swap: impl Into<SlotSpace>,
        host: Arc<Host>,
        fault_around: Pages,
    ) -> Memory<B> {
        Memory {
            target: AtomicU64::new(pmap.len().0),
            commons: commons::Commons::new(pmap.len()),
            regions: Regions::new(pmap.len(), backend.large()),
            pmap,
            backend,
            stage,
            tier: Tier::off(),
            host,
            slots: Mutex::new(swap.into()),
            departures: departures::Departures::new(),
            charged: AtomicU64::new(0),
            first_touches: FirstTouches::new(fault_around.0),
            touches: Touches::default(),
            counters: Counters::default(),
        }
    }

    /// With a tier of compressed pages between stage and swap.
    #[must_use]
    pub fn with_tier(self, tier: Tier) -> Memory<B> {
        Memory { tier, ..self }
    }

    /// The word of a page may be another one a moment after it was read, unless the reader holds its busy bit.
    pub fn pmap(&self) -> &Pmap {
        &self.pmap
    }
    /// The guest's memory itself. What changes it is called under busy bits, by this module.
    pub fn backend(&self) -> &B {
        &self.backend
    }
    /// Where pages are on their way to swap, and while they are sampled.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }
    /// Its compressed pages. One that takes nothing unless `with_tier` gave another.
    pub fn tier(&self) -> &Tier {
        &self.tier
    }
    /// What it shares with the other VMs.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }
    /// What is backed by large pages.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }
    /// Machine memory charged to the VM for its pages, those of its compressed ones included.
    pub fn charged(&self) -> Pages {
        Pages(self.charged.load(Ordering::Relaxed))
    }
    /// What the policy grants the VM: above it, allocation waits while the host is low.
    pub fn target(&self) -> Pages {
        Pages(self.target.load(Ordering::Relaxed))
    }
    /// At first all of its size. Takes away nothing: eviction is asked for apart.
    pub fn set_target(&self, target: Pages) {
        self.target.store(target.0, Ordering::Relaxed);
    }
    /// Slots that a page can be written to: those of a location that has failed are among them while it is due to be tried.
    pub fn swap_free(&self) -> Pages {
        lock(&self.slots).free()
    }
    /// Slots that hold pages, or are being written; retired ones are not among them.
    pub fn swap_used(&self) -> Pages {
        lock(&self.slots).used()
    }
    /// Slots that could not be written and are not tried again.
    pub fn swap_retired(&self) -> Pages {
        lock(&self.slots).retired()
    }
    /// Used slots of one file of the swap space; the first is 0.
    pub(crate) fn swap_used_of(&self, part: usize) -> Pages {
        lock(&self.slots).used_of(part)
    }

    /// Takes a run of swap slots for a cluster.
    pub fn take_slots(&self, most: u64) -> Option<(SlotId, u64)> {
        lock(&self.slots).take_run(most)
    }
    /// A write begins to such a run, or to a part of it from here on.
    pub(crate) fn write_begins(&self, slot: SlotId) {
        lock(&self.slots).write_begins(slot);
    }
    /// It has come to its end.
    pub(crate) fn write_ended(&self, slot: SlotId) {
        lock(&self.slots).write_ended(slot);
    }
    #[cfg(test)]
    pub(crate) fn writes_under_way(&self) -> u64 {
        lock(&self.slots).under_way()
    }
    /// Gives back a slot that no page is in, nor is being written to. Twice is a mistake, which debug builds
    /// find.
    pub fn free_slot(&self, slot: SlotId) {
        let freed = lock(&self.slots).release(slot);
        debug_assert!(freed, "{slot:?} freed twice");
    }
    /// The same of one that could not be written, which may not have been to blame: others are tried before it.
    pub(crate) fn pass_slot(&self, slot: SlotId) {
        let freed = lock(&self.slots).pass(slot);
        debug_assert!(freed, "{slot:?} freed twice");
    }
    /// A slot that was taken, and could not be written.
    pub(crate) fn retire_slot(&self, slot: SlotId) {
        lock(&self.slots).retire(slot);
    }

    /// Whether the VM gets no page, for the host is low and it has more than its target. One that has exactly that may exchange
    /// a page for another: what it has above it is taken again.
    pub(crate) fn is_blocked(&self) -> bool {
        // Without the frames of the tier: who is granted all of its size is never blocked.
        let pages = || self.charged().saturating_sub(Pages(self.tier.occupancy().frames));
        self.host.is_low() && pages() > self.target()
    }

    /// Reserves `n` pages for this VM, or says why they must be waited for.
    fn charge(&self, n: u64) -> Result<(), Wait> {
        if self.is_blocked() {
            return Err(Wait::Blocked);
        }
        if !self.host.ledger.try_reserve(Pages(n)) {
            self.host.ledger.ring();
            return Err(Wait::Memory);
        }
        self.charged.fetch_add(n, Ordering::Relaxed);
        Ok(())
    }

    /// Reserves `n` pages only if memory stays plentiful.
    fn charge_if_plentiful(&self, n: u64) -> bool {
        if self.host.is_low() || !self.host.ledger.reserve_leaving(Pages(n), self.host.plenty()) {
            return false;
        }
        self.charged.fetch_add(n, Ordering::Relaxed);
        true
    }

    /// Whether memory is plentiful: pages are handed out before they are asked for.
    pub(crate) fn is_plentiful(&self) -> bool {
        !self.host.is_low() && self.host.ledger.free() >= self.host.plenty()
    }

    /// Whether `n` more pages, and as much as a large page beside them while it is made, leave memory plentiful and the
    /// VM within what the policy grants it: what comes home beyond that would be taken again.
    pub(crate) fn is_granted(&self, n: u64) -> bool {
        let left = self.host.ledger.free().saturating_sub(self.host.plenty());
        left.0 >= n + self.regions.size().0 && self.charged().0 + n <= self.target().0
    }

    fn uncharge(&self, n: u64) {
        if n > 0 {
            self.charged.fetch_sub(n, Ordering::Relaxed);
            self.host.ledger.release(Pages(self.pay_debt(n)));
        }
    }
}
