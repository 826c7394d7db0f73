//! How long ago pages were last known to be in use, a byte for each block of neighbours: generations, as MGLRU of the
//! kernel has them (Documentation/mm/multigen_lru.rst). What a guest asks for is known anyway; what it uses at home is
//! found by who looks (`service::oldest`, `service::cold`). Neighbours were most often touched for the first time
//! together, and are used together: a block tells more of a page than what was seen of the page alone.
//!
//! A hint: lost with the manager, and never needed for anything to be right.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ballast_units::{Pages, Ppn};

use super::Memory;
use crate::backend::Backend;
use crate::clock::BLOCK;

/// A generation is over when this part of all blocks is in it.
const PART: u64 = 8;
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
    /// Blocks that are in the generation of now.
    young: AtomicU64,
    most: u64,
}

impl Ages {
    pub fn new(len: Pages) -> Ages {
        let blocks = len.0.div_ceil(BLOCK);
        Ages {
            stamps: (0..blocks.div_ceil(TOGETHER as u64)).map(|_| OnceLock::new()).collect(),
            now: AtomicU8::new(FIRST + 1),
            young: AtomicU64::new(0),
            most: (blocks / PART).max(1),
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
        stamp.store(now, Ordering::Relaxed);
        if self.young.fetch_add(1, Ordering::Relaxed) + 1 == self.most {
            self.go_on(now);
        }
    }

    /// The page is at home, and nothing more is known of its block.
    pub fn found(&self, ppn: Ppn) {
        self.stamp(ppn).store(FIRST, Ordering::Relaxed);
    }

    /// Nothing of the page's block can leave, until something of it is used.
    fn note_nothing(&self, ppn: Ppn) {
        self.stamp(ppn).store(NOTHING, Ordering::Relaxed);
    }

    /// The generation of the block that the page is in.
    fn of(&self, ppn: Ppn) -> Option<u8> {
        let block = (ppn.0 / BLOCK) as usize;
        let stamps = self.stamps[block / TOGETHER].get()?;
        Some(stamps[block % TOGETHER].load(Ordering::Relaxed)).filter(|&stamp| stamp != NOTHING)
    }

    /// The next generation. By the one thread that ended the last.
    fn go_on(&self, now: u8) {
        let next = now.checked_add(1).unwrap_or_else(|| {
            // Those of half of the time are one from now on.
            for stamp in self.all() {
                let old = stamp.load(Ordering::Relaxed);
                if old != NOTHING {
                    stamp.store(old.saturating_sub(u8::MAX / 2).max(FIRST), Ordering::Relaxed);
                }
            }
            u8::MAX - u8::MAX / 2 + 1
        });
        self.now.store(next, Ordering::Relaxed);
        self.young.store(0, Ordering::Relaxed);
    }

    /// The generation up to which at least so many blocks are, of those that may have something to give: the last, if
    /// there are not so many.
    fn up_to(&self, blocks: u64) -> u8 {
        let mut of = [0u64; 256];
        for stamp in self.all() {
            of[usize::from(stamp.load(Ordering::Relaxed))] += 1;
        }
        let mut sum = 0;
        for generation in FIRST..u8::MAX {
            sum += of[usize::from(generation)];
            if sum >= blocks {
                return generation;
            }
        }
        u8::MAX
    }
}

impl<B: Backend> Memory<B> {
    /// The page is in use, or cannot leave now.
    pub(crate) fn note_used(&self, ppn: Ppn) {
        self.commons.ages.note(ppn);
    }

    /// The page is at home; when it was used is not known.
    pub(super) fn note_found(&self, ppn: Ppn) {
        self.commons.ages.found(ppn);
    }

    /// The generation up to which a part of all blocks at home is, one in `part`, and at least `least`.
    pub(crate) fn oldest_generation(&self, at_home: Pages, part: u64, least: u64) -> u8 {
        self.commons.ages.up_to((at_home.0 / BLOCK / part).max(least))
    }

    /// The generation of the block that the page is in. None if nothing of it could leave when that was said last.
    pub(crate) fn generation(&self, ppn: Ppn) -> Option<u8> {
        self.commons.ages.of(ppn)
    }

    /// Nothing of the block can leave, until something of it is used.
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
    fn a_generation_ends_when_an_eighth_of_all_blocks_is_in_it() {
        let ages = ages(16);
        // Again and again counts once, and so do neighbours.
        (0..BLOCK).for_each(|p| ages.note(Ppn(p)));
        ages.note(Ppn(5 * BLOCK));
        ages.note(Ppn(7 * BLOCK));
        assert_eq!(stamps(&ages)[..9], [2, 1, 1, 1, 1, 2, 1, 3, 1]);
        ages.note(Ppn(0));
        ages.note(Ppn(BLOCK));
        assert_eq!(stamps(&ages)[..9], [3, 4, 1, 1, 1, 2, 1, 3, 1]);
        // A few pages only, and not of whole blocks.
        let few = Ages::new(Pages(BLOCK + 1));
        (0..3).for_each(|_| few.note(Ppn(BLOCK)));
        assert_eq!(stamps(&few)[..2], [0, 4]);
    }

    #[test]
    fn the_oldest_are_found_where_there_are_enough_of_them() {
        let ages = ages(16);
        (4..16).for_each(|block| ages.note(Ppn(block * BLOCK)));
        assert_eq!(stamps(&ages), [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]);
        let up_to = [1, 4, 5, 6, 7, 16, 17].map(|blocks| ages.up_to(blocks));
        assert_eq!(up_to, [1, 1, 2, 2, 3, 7, u8::MAX]);
        // What has nothing to give is no block.
        ages.note_nothing(Ppn(BLOCK));
        assert_eq!([0, 1, 4].map(|block| ages.of(Ppn(block * BLOCK))), [Some(1), None, Some(2)]);
        assert_eq!([3, 4].map(|blocks| ages.up_to(blocks)), [1, 2]);
    }

    #[test]
    fn generations_that_have_run_out_go_on_with_their_order_kept() {
        let ages = ages(16);
        ages.note(Ppn(0));
        ages.note_nothing(Ppn(3 * BLOCK));
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
        let ages = Ages::new(Pages(10 * TOGETHER as u64 * BLOCK));
        assert_eq!((ages.all().count(), ages.of(Ppn(5)), ages.up_to(1)), (0, None, u8::MAX));
        ages.note(Ppn(3 * TOGETHER as u64 * BLOCK));
        assert_eq!((ages.all().count(), ages.up_to(1)), (TOGETHER, 2));
    }
}
