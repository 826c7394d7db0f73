//! Which slots of a swap file are free: a bitmap with a summary of full words, searched next-fit
//! so that clusters of pages that leave together lie together.

use ballast_sharing::Bitmap;
use ballast_units::{Pages, SlotId};

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

    /// Takes a run of 1 to `most` neighbouring slots; None when none is free.
    pub fn take_run(&mut self, most: u64) -> Option<(SlotId, u64)> {
        if self.free == 0 || most == 0 {
            return None;
        }
        let taken = &self.taken;
        let word = taken.not_full_from(self.cursor).or_else(|| taken.not_full_from(0))?;
        let start = word as u64 * 64 + u64::from(taken.words()[word].trailing_ones());
        let mut n = 0;
        while n < most && start + n < self.len && !self.is_taken(start + n) {
            self.set(start + n);
            n += 1;
        }
        self.cursor = ((start + n) / 64) as usize % self.taken.words().len();
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
    fn an_empty_map_gives_runs_as_long_as_asked() {
        let mut map = SlotMap::new(Pages(1 << 20));
        let mut next = 0;
        for _ in 0..1000 {
            assert_eq!(map.take_run(32), Some((SlotId(next), 32)));
            next += 32;
        }
    }
}
