//! How long ago pages were last known to be in use, a byte for each block of neighbours: generations, as MGLRU of the
//! kernel has them (Documentation/mm/multigen_lru.rst). What a guest asks for is known anyway; what it uses at home is
//! found by who looks (`service::oldest`, `service::cold`). Neighbours were most often touched for the first time
//! together, and are used together: a block tells more of a page than what was seen of the page alone.
//!
//! A hint: lost with the manager, and never needed for anything to be right.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use ballast_units::{Pages, Ppn};

use super::Memory;
use crate::backend::Backend;
use crate::clock::BLOCK;

/// A generation is over when this part of all blocks that have one came into it.
const PART: u64 = 8;
/// Of fewer blocks than that a generation is as large as of so many.
const FEW: u64 = 16;
/// So many generations become one when there are no numbers left.
const LATE: u8 = u8::MAX / 2;
/// It has had nothing at home, or nothing of it could leave when that was looked at.
const NOTHING: u8 = 0;
/// Those that nothing is known of but that they have.
const FIRST: u8 = 1;
/// Blocks that get their memory together.
const TOGETHER: usize = 1024;

/// Generations of a VM's blocks, with memory for those parts alone in which something was ever at home.
pub(super) struct Ages {
    stamps: Box<[OnceLock<Box<[AtomicU8; TOGETHER]>>]>,
    now: AtomicU8,
    /// Blocks that have a generation, and those that came into the one of now.
    known: AtomicU64,
    young: AtomicU64,
    /// Held by who begins the next one.
    turning: Mutex<()>,
}

impl Ages {
    pub fn new(len: Pages) -> Ages {
        let parts = len.0.div_ceil(BLOCK).div_ceil(TOGETHER as u64);
        Ages {
            stamps: (0..parts).map(|_| OnceLock::new()).collect(),
            now: AtomicU8::new(FIRST + 1),
            known: AtomicU64::new(0),
            young: AtomicU64::new(0),
            turning: Mutex::new(()),
        }
    }

    /// The stamp of a page's block, which gets memory.
    fn stamp(&self, ppn: Ppn) -> &AtomicU8 {
        let block = (ppn.0 / BLOCK) as usize;
        let none = || Box::new(std::array::from_fn(|_| AtomicU8::new(NOTHING)));
        &self.stamps[block / TOGETHER].get_or_init(none)[block % TOGETHER]
    }

    fn all(&self) -> impl Iterator<Item = &AtomicU8> {
        self.stamps.iter().filter_map(OnceLock::get).flat_map(|some| some.iter())
    }

    /// The page is in use. Any thread.
    pub fn note(&self, ppn: Ppn) {
        let stamp = self.stamp(ppn);
        let now = self.now.load(Ordering::Relaxed);
        if stamp.load(Ordering::Relaxed) == now {
            return;
        }
        let new = stamp.swap(now, Ordering::Relaxed) == NOTHING;
        let known = self.known.fetch_add(u64::from(new), Ordering::Relaxed);
        // It may be wrong by a moment, also below none.
        let known = known.wrapping_add(u64::from(new)).max(FEW);
        if (self.young.fetch_add(1, Ordering::Relaxed) + 1) * PART >= known {
            self.go_on(now);
        }
    }

    /// The page is at home. If nothing was known of its block, it is one of the oldest.
    pub fn found(&self, ppn: Ppn) {
        let stamp = self.stamp(ppn);
        let (one, other) = (Ordering::Relaxed, Ordering::Relaxed);
        if stamp.load(Ordering::Relaxed) == NOTHING
            && stamp.compare_exchange(NOTHING, FIRST, one, other).is_ok()
        {
            self.known.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Nothing of the page's block can leave, until something of it comes home or is used.
    fn note_nothing(&self, ppn: Ppn) {
        if self.of(ppn).is_some() && self.stamp(ppn).swap(NOTHING, Ordering::Relaxed) != NOTHING {
            self.known.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The generation of the block that the page is in.
    fn of(&self, ppn: Ppn) -> Option<u8> {
        let block = (ppn.0 / BLOCK) as usize;
        let stamps = self.stamps[block / TOGETHER].get()?;
        Some(stamps[block % TOGETHER].load(Ordering::Relaxed)).filter(|&stamp| stamp != NOTHING)
    }

    /// How many blocks from the one of a page on lie in a part that has no memory.
    fn unknown_from(&self, ppn: Ppn) -> u64 {
        let block = (ppn.0 / BLOCK) as usize;
        let is_known = self.stamps[block / TOGETHER].get().is_some();
        if is_known { 0 } else { (TOGETHER - block % TOGETHER) as u64 }
    }

    /// The generation after `now`, if that is still the one.
    fn go_on(&self, now: u8) {
        // Hints all: std's lock and atomics, whatever else is explored.
        let Ok(_turning) = self.turning.try_lock() else { return };
        if self.now.load(Ordering::Relaxed) != now {
            return;
        }
        let next = now.checked_add(1).unwrap_or_else(|| {
            // Those of half of the time are one from now on.
            self.change(|old| old.saturating_sub(LATE).max(FIRST));
            u8::MAX - LATE + 1
        });
        self.now.store(next, Ordering::Relaxed);
        self.young.store(0, Ordering::Relaxed);
        if now == u8::MAX {
            // What was noted meanwhile.
            self.change(|old| old.min(next));
        }
    }

    fn change(&self, to: impl Fn(u8) -> u8) {
        for stamp in self.all() {
            let old = stamp.load(Ordering::Relaxed);
            if old != NOTHING && to(old) != old {
                // It may have been noted in between.
                let (one, other) = (Ordering::Relaxed, Ordering::Relaxed);
                let _ = stamp.compare_exchange(old, to(old), one, other);
            }
        }
    }

    /// The generation up to which at least so many blocks are, or so many beyond that, as far as fewer than half of all
    /// blocks are of these: else it is not known which are the oldest. And whether there are no more beyond it.
    fn up_to(&self, blocks: u64, beyond: u8) -> Option<(u8, bool)> {
        let mut of = [0u64; 256];
        for stamp in self.all() {
            of[usize::from(stamp.load(Ordering::Relaxed))] += 1;
        }
        let known: u64 = of[usize::from(FIRST)..].iter().sum();
        let up_to = |least: u64| {
            let mut sum = 0;
            (FIRST..=u8::MAX).find(|&generation| {
                sum += of[usize::from(generation)];
                sum >= least
            })
        };
        let first = up_to(blocks.min(known))?;
        let last = up_to(known.div_ceil(2))?.checked_sub(1)?;
        let wanted = first.saturating_add(beyond);
        (first <= last).then_some((wanted.min(last), wanted >= last))
    }
}

impl<B: Backend> Memory<B> {
    /// The page is in use, or cannot leave now.
    pub(crate) fn note_used(&self, ppn: Ppn) {
        self.commons.ages.note(ppn);
    }

    /// The page is at home; when it was used is not known.
    pub(crate) fn note_found(&self, ppn: Ppn) {
        self.commons.ages.found(ppn);
    }

    /// The generation up to which at least so many blocks are, or so many beyond that, and whether it is the last in question.
    /// None if which are the oldest is not known.
    pub(crate) fn oldest_generation(&self, blocks: u64, beyond: u8) -> Option<(u8, bool)> {
        self.commons.ages.up_to(blocks, beyond)
    }

    /// The generation of the block that the page is in. None if nothing of it could leave when that was said last.
    pub(crate) fn generation(&self, ppn: Ppn) -> Option<u8> {
        self.commons.ages.of(ppn)
    }

    /// How many blocks from the one of a page on have no generation, for sure: there may be more.
    pub(crate) fn ageless_from(&self, ppn: Ppn) -> u64 {
        self.commons.ages.unknown_from(ppn)
    }

    /// Nothing of the block can leave, until something of it comes home or is used.
    pub(crate) fn note_nothing(&self, ppn: Ppn) {
        self.commons.ages.note_nothing(ppn);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "ages_squeeze.rs"]
mod squeeze;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Of the first blocks.
    fn stamps(ages: &Ages) -> Vec<u8> {
        ages.all().map(|stamp| stamp.load(Ordering::Relaxed)).take(16).collect()
    }

    /// Of so many blocks, all of which are found at home.
    fn ages(blocks: u64) -> Ages {
        let ages = Ages::new(Pages(blocks * BLOCK));
        (0..blocks).for_each(|block| ages.found(Ppn(block * BLOCK)));
        ages
    }

    #[test]
    fn a_generation_ends_when_an_eighth_of_all_blocks_came_into_it() {
        let ages = ages(16);
        // Again and again counts once, and so do neighbours.
        (0..BLOCK).for_each(|p| ages.note(Ppn(p)));
        ages.note(Ppn(5 * BLOCK));
        ages.note(Ppn(7 * BLOCK));
        assert_eq!(stamps(&ages)[..9], [2, 1, 1, 1, 1, 2, 1, 3, 1]);
        ages.note(Ppn(0));
        ages.note(Ppn(BLOCK));
        assert_eq!(stamps(&ages)[..9], [3, 4, 1, 1, 1, 2, 1, 3, 1]);
        // Of those that have something, however many there could be.
        let sparse = Ages::new(Pages(1 << 20));
        (0..32).for_each(|block| sparse.note(Ppn(block * BLOCK)));
        let seen: Vec<u8> = sparse.all().map(|stamp| stamp.load(Ordering::Relaxed)).collect();
        assert_eq!(seen.len(), TOGETHER);
        assert!(seen[..32].is_sorted() && seen[31] > seen[8], "{:?}", &seen[..32]);
    }

    #[test]
    fn the_oldest_are_found_where_it_is_known_which_they_are() {
        let ages = ages(16);
        let up_to = |blocks| ages.up_to(blocks, 0);
        assert_eq!([1, 16].map(up_to), [None, None], "all are");
        (4..16).for_each(|block| ages.note(Ppn(block * BLOCK)));
        assert_eq!(stamps(&ages), [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]);
        let up_to = [1, 4, 5, 6, 7, 16, 17].map(|blocks| ages.up_to(blocks, 0));
        let (first, second) = (Some((1, false)), Some((2, true)));
        assert_eq!(up_to, [first, first, second, second, None, None, None]);
        let farther = [0, 1, 2, 255].map(|beyond| ages.up_to(1, beyond));
        assert_eq!(farther, [first, second, second, second]);
        // What has nothing to give is no block.
        ages.note_nothing(Ppn(BLOCK));
        assert_eq!([0, 1, 4].map(|block| ages.of(Ppn(block * BLOCK))), [Some(1), None, Some(2)]);
        // And three of seven generations are fewer than half of the rest.
        assert_eq!([3, 4].map(|blocks| ages.up_to(blocks, 0)), [first, Some((2, false))]);
        // Until something of it comes home.
        ages.found(Ppn(BLOCK + 3));
        ages.found(Ppn(5 * BLOCK));
        assert_eq!([1, 5].map(|block| ages.of(Ppn(block * BLOCK))), [Some(1), Some(2)]);
        assert_eq!(ages.known.load(Ordering::Relaxed), 16);
    }

    #[test]
    fn generations_that_have_run_out_go_on_with_their_order_kept() {
        let ages = ages(16);
        ages.note(Ppn(0));
        ages.note_nothing(Ppn(3 * BLOCK));
        ages.found(Ppn(2 * BLOCK));
        // Two blocks are a generation.
        let mut last = 0;
        for n in 0..2 * 254 - 1 {
            last = 4 + n % 12;
            ages.note(Ppn(last * BLOCK));
        }
        let now = ages.now.load(Ordering::Relaxed);
        assert_eq!((now, stamps(&ages)[last as usize]), (129, 128), "{:?}", stamps(&ages));
        assert_eq!(stamps(&ages)[..4], [1, 1, 1, NOTHING], "the first are one");
        let rest = &stamps(&ages)[4..16];
        assert!(rest.iter().all(|&stamp| (122..=128).contains(&stamp)), "{rest:?}");
        ages.note(Ppn(0));
        assert_eq!(stamps(&ages)[0], 129);
    }

    #[test]
    fn what_was_never_at_home_has_no_memory() {
        let part = TOGETHER as u64 * BLOCK;
        let ages = Ages::new(Pages(10 * part));
        assert_eq!((ages.all().count(), ages.of(Ppn(5)), ages.up_to(1, 0)), (0, None, None));
        assert_eq!(ages.unknown_from(Ppn(part + 3 * BLOCK + 1)), TOGETHER as u64 - 3);
        ages.note_nothing(Ppn(7 * part));
        ages.note(Ppn(3 * part));
        assert_eq!((ages.all().count(), ages.unknown_from(Ppn(3 * part + 77))), (TOGETHER, 0));
    }
}
