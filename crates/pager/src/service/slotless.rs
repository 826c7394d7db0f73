//! Eviction without room in swap: for a VM that was given less than its guest can fill, or one whose swap
//! locations have failed. What is all zero, what others have too, and what compresses needs no slot;
//! whatever does not is left where it is.

use std::time::{Duration, Instant};

use ballast_compress::Filling;
use ballast_sharing::is_zero;
use ballast_units::{PAGE_SIZE, Ppn};

use super::reclaim::Reclaim;
use crate::backend::{Backend, PageBuf};
use crate::memory::Compressed;
use crate::sync::{Mutex, lock};

/// So many pages one after the other that do not compress end a round.
const STUBBORN: u32 = 256;
/// For how long it is believed then that others do not either.
const BELIEVED: Duration = Duration::from_secs(30);

/// Until when a VM's pages are believed not to compress.
#[derive(Default)]
pub(super) struct Stubborn(Mutex<Option<Instant>>);

impl Stubborn {
    /// Asked by any thread.
    pub fn is_believed(&self) -> bool {
        lock(&self.0).is_some_and(|until| Instant::now() < until)
    }
    fn believe(&self) {
        *lock(&self.0) = Some(Instant::now() + BELIEVED);
    }
}

impl Reclaim {
    /// Whether every page that is evicted can be written.
    pub(super) fn has_slots(&self) -> bool {
        self.vm.memory.swap_free().0 > self.waiting_for_slots()
    }

    /// Whether pages can be evicted that need no slot.
    pub(super) fn may_shrink(&self) -> bool {
        self.compressor.is_some()
            && self.vm.memory.tier().has_room()
            && !self.vm.stubborn.is_believed()
    }

    /// Whether a page at home needs no slot, as it is now: asked before it is evicted. Should its guest
    /// write it in between, it waits in the stage, whole. After many that do not, or cannot be read, none is looked at
    /// for a while.
    pub(super) fn shrinks(&mut self, ppn: Ppn) -> bool {
        let mut page: PageBuf = [0; PAGE_SIZE];
        let shrinks = match self.vm.memory.backend().read_home(ppn, &mut page) {
            Ok(()) => self.is_small(&page),
            Err(e) => {
                self.vm.set_ill_unless_gone(&format!("reading {ppn}"), e);
                false
            }
        };
        self.stubborn = if shrinks { 0 } else { self.stubborn + 1 };
        if self.stubborn >= STUBBORN {
            self.stubborn = 0;
            self.vm.stubborn.believe();
        }
        shrinks
    }

    /// Whether a page of these contents takes less than a page where it would go.
    fn is_small(&mut self, page: &PageBuf) -> bool {
        let tier = self.vm.memory.tier();
        let filled = tier.settings().same_filled && Filling::of(page).is_some();
        let (most, compressor) = (tier.most(), self.compressor.as_mut());
        is_zero(page) || filled || compressor.is_some_and(|c| c.compress(page, most).is_some())
    }

    /// Pages of the stage that cannot be written would wait there for ever: they are compressed after all, or
    /// come home. As long as they fill the stage nothing else leaves, be it zeros.
    pub(super) fn take_back(&mut self) {
        if self.vm.memory.swap_free().0 > 0 {
            return;
        }
        let memory = &self.vm.memory;
        let mut left: Vec<Ppn> = Vec::new();
        for (ppn, slot) in self.waiting_pages() {
            let compressor = self.compressor.as_mut();
            match compressor.map(|c| memory.compress(ppn, slot, Some(c))) {
                Some(Compressed::Filled | Compressed::Stored { .. } | Compressed::Left) => {}
                Some(Compressed::TooLarge | Compressed::NoRoom) | None => left.push(ppn),
            }
        }
        let mut buffer = [0; PAGE_SIZE];
        for ppn in left {
            match memory.bring_from_stage(ppn, &mut buffer) {
                Ok(_) => {}
                Err(e) => {
                    self.vm.set_ill_unless_gone("bringing pages home", e);
                    break;
                }
            }
        }
    }
}
