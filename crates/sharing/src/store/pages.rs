//! Which store pages are free: a bitmap with a summary of full words.
//!
//! Pages that are shared together should lie together, because VMMs map a run of them with one
//! mapping. So runs are searched next-fit, and the store is extended rather than a run broken up,
//! as long as half of it is in use.

use ballast_units::Pages;

use crate::bitmap::{Bitmap, Gap, longer};
use crate::ids::{StorePage, StoreRun};

/// Words that one search looks at, full ones aside, before it takes the best it saw.
const SEARCH: usize = 256;
/// Free pages that are never too many.
const SPARE: u64 = 1024;

/// Which pages of a store are in use.
///
/// Invariants (`check`): `used` counts the ones; the last word is not zero.
#[derive(Clone, Debug)]
pub struct StorePages {
    bits: Bitmap,
    used: u64,
    /// Word at which the next search begins.
    cursor: usize,
    /// Pages that may ever be in use, by number.
    limit: u64,
}

impl Default for StorePages {
    fn default() -> StorePages {
        StorePages::new()
    }
}

impl StorePages {
    /// No page in use, and room for as many as can be numbered.
    pub fn new() -> StorePages {
        StorePages::with_limit(Pages(u64::from(StorePage::LIMIT)))
    }

    /// A store that never has a page at or above number `limit`.
    fn with_limit(limit: Pages) -> StorePages {
        let limit = limit.0.min(StorePage::LIMIT.into());
        StorePages { bits: Bitmap::default(), used: 0, cursor: 0, limit }
    }

    /// How many are in use.
    pub fn used(&self) -> Pages {
        Pages(self.used)
    }

    /// Whether this page is in use; none at or above the limit is.
    pub fn is_used(&self, page: StorePage) -> bool {
        self.bits.is_set(page.get().into())
    }

    /// Takes a run of 1 to `most` pages; None when every page below the limit is in use, or `most` is 0.
    /// Who needs more asks again.
    pub fn allocate(&mut self, most: u64) -> Option<StoreRun> {
        if most == 0 {
            return None;
        }
        let gap = self.bits.gap(self.cursor, self.end(), most, SEARCH);
        let extends = gap.is_none_or(|(_, n)| n < most && self.is_dense());
        let (start, n) = if extends { longer(gap, self.tail(most)) } else { gap }?;
        let run = StoreRun::new(StorePage::new(start)?, n)?;
        run.iter().for_each(|page| self.set(page.get().into()));
        self.cursor = ((start + n) / 64) as usize;
        Some(run)
    }

    /// Recovery: marks a page that a pmap word names. False, changing nothing, if it is in use or
    /// cannot be.
    pub fn claim(&mut self, page: StorePage) -> bool {
        let page_in_store = u64::from(page.get()) < self.limit;
        if !page_in_store || self.is_used(page) {
            return false;
        }
        self.set(page.get().into());
        true
    }

    /// Frees a page, which must have been punched. False, changing nothing, if it was free.
    pub fn free(&mut self, page: StorePage) -> bool {
        if !self.is_used(page) {
            return false;
        }
        self.bits.clear(page.get().into());
        self.bits.trim();
        self.used -= 1;
        true
    }

    /// Pages in use, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = StorePage> + '_ {
        self.bits.words().iter().enumerate().flat_map(|(w, word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .filter_map(move |bit| StorePage::new(w as u64 * 64 + bit))
        })
    }

    /// Whether free pages below the last one in use are few enough to leave them be.
    fn is_dense(&self) -> bool {
        self.end() - self.used <= self.used + SPARE
    }

    /// One above the number of the last page in use.
    fn end(&self) -> u64 {
        let words = self.bits.words();
        match words.last() {
            Some(last) => words.len() as u64 * 64 - u64::from(last.leading_zeros()),
            None => 0,
        }
    }

    /// Up to `most` pages after the last one in use.
    fn tail(&self, most: u64) -> Option<Gap> {
        let start = self.end();
        let n = most.min(self.limit.saturating_sub(start));
        (n > 0).then_some((start, n))
    }

    fn set(&mut self, page: u64) {
        self.bits.set(page);
        self.used += 1;
    }

    /// Whether the invariants hold; walks the whole bitmap.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub fn check(&self) -> Result<(), String> {
        let words = self.bits.words();
        let ones: u64 = words.iter().map(|w| u64::from(w.count_ones())).sum();
        if ones != self.used {
            return Err(format!("{ones} pages used, {} booked", self.used));
        }
        if words.last() == Some(&0) {
            return Err(format!("the last of {} words is zero", words.len()));
        }
        self.bits.check()?;
        if self.end() > self.limit {
            return Err(format!("pages up to {} of {}", self.end(), self.limit));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn page(n: u64) -> StorePage {
        StorePage::new(n).unwrap()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(u64),
        Free(u64, u64),
        Claim(u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let number = || prop_oneof![3 => 0u64..300, 1 => 0u64..9000];
        let op = prop_oneof![
            4 => prop_oneof![0u64..70, 0u64..3000].prop_map(Op::Allocate),
            4 => (number(), prop_oneof![1u64..4, 1u64..400]).prop_map(|(p, n)| Op::Free(p, n)),
            1 => number().prop_map(Op::Claim),
        ];
        prop::collection::vec(op, 1..200)
    }

    /// The longest run of free pages below the last one in use.
    fn longest_gap(used: &BTreeSet<u64>) -> u64 {
        let mut next = 0;
        let mut longest = 0;
        for n in used {
            longest = longest.max(n - next);
            next = n + 1;
        }
        longest
    }

    proptest! {
        /// Against the obvious set of pages in use.
        #[test]
        fn behaves_as_a_set(
            limit in prop_oneof![0u64..700, Just(u64::MAX)],
            ops in ops(),
        ) {
            let mut pages = StorePages::with_limit(Pages(limit));
            let mut used = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Allocate(most) => {
                        let gap = longest_gap(&used);
                        match pages.allocate(most) {
                            Some(run) => {
                                prop_assert!(run.pages().0 <= most);
                                prop_assert!(run.pages().0 >= gap.min(most), "{run}, gap {gap}");
                                for page in run.iter().map(|page| u64::from(page.get())) {
                                    prop_assert!(page < limit && used.insert(page));
                                }
                            }
                            None => prop_assert!(most == 0 || used.len() as u64 == limit),
                        }
                    }
                    Op::Free(first, n) => for n in first..first + n {
                        prop_assert_eq!(pages.free(page(n)), used.remove(&n));
                    },
                    Op::Claim(n) => {
                        let fresh = n < limit && used.insert(n);
                        prop_assert_eq!(pages.claim(page(n)), fresh);
                    }
                }
                pages.check().map_err(TestCaseError::fail)?;
                prop_assert_eq!(pages.used(), Pages(used.len() as u64));
            }
            prop_assert!(pages.iter().map(|page| u64::from(page.get())).eq(used));
        }
    }

    #[test]
    fn runs_are_whole_while_half_of_the_store_is_in_use() {
        let mut pages = StorePages::new();
        let run = pages.allocate(20_000).unwrap();
        assert_eq!((run.first(), run.pages()), (page(0), Pages(20_000)));
        // Every third page free: no run of two.
        run.iter().step_by(3).for_each(|page| assert!(pages.free(page)));
        let first = pages.allocate(64).unwrap();
        assert_eq!((first.first(), first.pages()), (page(20_000), Pages(64)));
        // Three of four free, or more: now gaps are filled, the longest first.
        run.iter().filter(|page| page.get() % 4 != 1).for_each(|page| {
            pages.free(page);
        });
        let gap = pages.allocate(64).unwrap();
        assert_eq!(gap.pages(), Pages(7));
        assert!(gap.first() < page(20_000));
        pages.check().unwrap();
    }

    #[test]
    fn freed_runs_are_found_again_across_word_boundaries() {
        let mut pages = StorePages::new();
        pages.allocate(10_000).unwrap();
        (1000..1300).for_each(|n| assert!(pages.free(page(n))));
        let run = pages.allocate(300).unwrap();
        assert_eq!((run.first(), run.pages()), (page(1000), Pages(300)));
        assert_eq!(pages.allocate(1).map(StoreRun::first), Some(page(10_000)));
    }

    /// Pages that come one after the other lie so, though there is room elsewhere.
    #[test]
    fn the_search_goes_on_where_it_ended() {
        let mut pages = StorePages::new();
        pages.allocate(10_000).unwrap();
        (5000..5100).for_each(|n| assert!(pages.free(page(n))));
        assert_eq!(pages.allocate(10).map(StoreRun::first), Some(page(5000)));
        (50..100).for_each(|n| assert!(pages.free(page(n))));
        assert_eq!(pages.allocate(10).map(StoreRun::first), Some(page(5010)));
        assert_eq!(pages.allocate(80).map(StoreRun::first), Some(page(5020)));
        assert_eq!(pages.allocate(10).map(StoreRun::first), Some(page(50)));
    }

    #[test]
    fn the_check_finds_what_contradicts_the_invariants() {
        let damages: [fn(&mut StorePages); 4] = [
            |p| p.used += 1,
            |p| p.bits.clear(3),
            |p| {
                (64..66).for_each(|page| p.bits.clear(page));
                p.used -= 2;
            },
            |p| p.limit = 65,
        ];
        for (i, damage) in damages.iter().enumerate() {
            let mut pages = StorePages::new();
            pages.allocate(66).unwrap();
            pages.check().unwrap();
            damage(&mut pages);
            assert!(pages.check().is_err(), "damage {i}");
        }
        let mut full = StorePages::with_limit(Pages(66));
        full.allocate(66).unwrap();
        full.check().unwrap();
    }

    #[test]
    fn a_store_that_empties_begins_anew() {
        let mut pages = StorePages::new();
        let run = pages.allocate(100_000).unwrap();
        run.iter().for_each(|page| assert!(pages.free(page)));
        assert_eq!(pages.allocate(10).map(StoreRun::first), Some(page(0)));
        pages.check().unwrap();
    }
}
