//! Which slots of a swap file are free: a bitmap with a summary of full words, searched next-fit for runs, so that clusters
//! of pages that leave together lie together, also once free slots are scattered.

use ballast_sharing::Bitmap;
use ballast_units::{Pages, SlotId};

/// Words with free slots that one search looks at before it takes the longest run that it saw.
const SEARCH: usize = 64;

/// Free-slot management of one swap file.
///
/// Invariants (`check`): `free` counts the zero bits below `len`; bits at and above `len` are set.
#[derive(Clone, Debug)]
pub struct SlotMap {
    taken: Bitmap,
    len: u64,
    free: u64,
    /// Word at which the next search begins.
    cursor: usize,
}

impl SlotMap {
    /// All free.
    pub fn new(len: Pages) -> SlotMap {
        let words = len.0.div_ceil(64);
        let mut taken = Bitmap::new(words as usize);
        (len.0..words * 64).for_each(|slot| taken.set(slot));
        SlotMap { taken, len: len.0, free: len.0, cursor: 0 }
    }

    /// Slots, free or not.
    pub fn len(&self) -> Pages {
        Pages(self.len)
    }
    /// Slots that can be taken.
    pub fn free(&self) -> Pages {
        Pages(self.free)
    }
    /// Slots that are taken.
    pub fn used(&self) -> Pages {
        Pages(self.len - self.free)
    }

    /// Takes a run of 1 to `most` neighbouring slots, the first of `most` or the longest of those that are near; None when
    /// none is free.
    pub fn take_run(&mut self, most: u64) -> Option<(SlotId, u64)> {
        if self.free == 0 || most == 0 {
            return None;
        }
        let (start, n) = self.taken.gap(self.cursor, self.len, most, SEARCH)?;
        (start..start + n).for_each(|slot| self.set(slot));
        self.cursor = ((start + n) / 64) as usize;
        Some((SlotId(start), n))
    }

    /// Frees a slot. Answers false, changing nothing, if it was free or does not exist.
    pub fn release(&mut self, slot: SlotId) -> bool {
        if slot.0 >= self.len || !self.is_taken(slot.0) {
            return false;
        }
        self.taken.clear(slot.0);
        self.free += 1;
        true
    }

    /// The same, of one that could not be written: the next search begins beyond it.
    pub fn pass(&mut self, slot: SlotId) -> bool {
        let freed = self.release(slot);
        if freed {
            self.cursor = (slot.0 / 64) as usize + 1;
        }
        freed
    }

    /// Recovery: marks a slot that a pmap word names. False if it is taken or does not exist.
    pub fn claim(&mut self, slot: SlotId) -> bool {
        if slot.0 >= self.len || self.is_taken(slot.0) {
            return false;
        }
        self.set(slot.0);
        true
    }

    /// Of a slot below `len`.
    pub fn is_taken(&self, slot: u64) -> bool {
        self.taken.is_set(slot)
    }

    fn set(&mut self, slot: u64) {
        self.taken.set(slot);
        self.free -= 1;
    }

    /// The invariants of the type.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let zeros: u64 = self.taken.words().iter().map(|w| u64::from(w.count_zeros())).sum();
        if zeros != self.free {
            return Err(format!("{zeros} free slots, {} booked", self.free));
        }
        self.taken.check()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Debug)]
    enum Op {
        Take(u64),
        Release(u64),
        Claim(u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        prop::collection::vec(
            prop_oneof![
                (0u64..40).prop_map(Op::Take),
                (0u64..10_000).prop_map(Op::Release),
                (0u64..10_000).prop_map(Op::Claim),
            ],
            1..400,
        )
    }

    proptest! {
        /// Against the obvious set of taken slots.
        #[test]
        fn behaves_as_a_set(len in 0u64..9000, ops in ops()) {
            let mut map = SlotMap::new(Pages(len));
            let mut taken = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Take(most) => match map.take_run(most) {
                        Some((SlotId(start), n)) => {
                            prop_assert!((1..=most).contains(&n));
                            for slot in start..start + n {
                                prop_assert!(slot < len && taken.insert(slot));
                            }
                        }
                        None => prop_assert!(most == 0 || taken.len() as u64 == len),
                    },
                    Op::Release(slot) => {
                        prop_assert_eq!(map.release(SlotId(slot)), taken.remove(&slot));
                    }
                    Op::Claim(slot) => {
                        let fresh = slot < len && taken.insert(slot);
                        prop_assert_eq!(map.claim(SlotId(slot)), fresh);
                    }
                }
                prop_assert_eq!(map.used(), Pages(taken.len() as u64));
                map.check().map_err(TestCaseError::fail)?;
            }
        }
    }

    #[test]
    fn what_leaves_together_is_written_in_few_pieces_though_free_slots_are_scattered() {
        const LEN: u64 = 1 << 16;
        for (taken_of_16, most) in [(8, 6.0), (13, 18.5)] {
            let mut numbers = ballast_units::SplitMix64::seeded(7);
            let mut map = SlotMap::new(Pages(LEN));
            let mut taken = Vec::new();
            let take = |map: &mut SlotMap, taken: &mut Vec<u64>| {
                let (mut left, mut pieces) = (32, 0);
                while left > 0 {
                    let (SlotId(first), n) = map.take_run(left).unwrap();
                    taken.extend(first..first + n);
                    (left, pieces) = (left - n, pieces + 1);
                }
                pieces
            };
            // Pages leave together, and come back one by one.
            let mut pieces = 0;
            for n in 0..20_000 {
                while map.used().0 + 32 > LEN / 16 * taken_of_16 {
                    let back = taken.swap_remove(numbers.below(taken.len() as u64) as usize);
                    assert!(map.release(SlotId(back)));
                }
                let now = take(&mut map, &mut taken);
                pieces += if n < 10_000 { 0 } else { now };
            }
            let mean = f64::from(pieces) / 10_000.0;
            println!("{taken_of_16} of 16 taken: {mean:.1} pieces for 32 pages");
            assert!(mean <= most, "{mean}");
        }
    }

    #[test]
    fn what_could_not_be_written_is_not_the_next_to_be_tried() {
        let mut map = SlotMap::new(Pages(1_000));
        let (SlotId(first), n) = map.take_run(32).unwrap();
        (first..first + n).for_each(|slot| assert!(map.pass(SlotId(slot))));
        assert!(!map.pass(SlotId(first)), "it is free");
        assert_eq!((map.take_run(32), map.free()), (Some((SlotId(64), 32)), Pages(968)));
        // Round about, they are.
        (0..28).for_each(|_| {
            assert!(map.take_run(32).is_some_and(|(slot, n)| slot.0 > 64 && n == 32))
        });
        assert_eq!(map.take_run(32), Some((SlotId(0), 32)));
        map.check().unwrap();
    }

    #[test]
    fn an_empty_map_gives_runs_as_long_as_asked() {
        let mut map = SlotMap::new(Pages(1 << 20));
        let mut next = 0;
        for _ in 0..1000 {
            assert_eq!(map.take_run(32), Some((SlotId(next), 32)));
            next += 32;
        }
    }
}
