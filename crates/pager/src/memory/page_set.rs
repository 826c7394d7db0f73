//! Sets of a VM's pages: one bit per page, with memory for those parts alone in which there was ever a page.

use std::sync::OnceLock;

use ballast_units::{Pages, Ppn};

use crate::sync::{AtomicU64, Ordering};

/// One bit per page. Any thread may change it at any time; what each finds is of some moment.
pub(crate) struct PageSet(Box<[OnceLock<Box<[AtomicU64; WORDS]>>]>);

/// Words of 64 bits that get their memory together.
const WORDS: usize = 64;

impl PageSet {
    /// Of none of `len` pages.
    pub fn new(len: Pages) -> PageSet {
        PageSet((0..len.0.div_ceil(64 * WORDS as u64)).map(|_| OnceLock::new()).collect())
    }
    /// The word with the bit of a page, if it has memory.
    fn cell(&self, ppn: Ppn) -> Option<&AtomicU64> {
        let word = ppn.index() / 64;
        self.0[word / WORDS].get().map(|words| &words[word % WORDS])
    }
    /// The page must be below the length that it was made for.
    pub fn insert(&self, ppn: Ppn) {
        let word = ppn.index() / 64;
        let words = self.0[word / WORDS]
            .get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
        words[word % WORDS].fetch_or(1 << (ppn.0 % 64), Ordering::AcqRel);
    }
    /// Whether it is in it or not.
    pub fn remove(&self, ppn: Ppn) {
        let Some(cell) = self.cell(ppn) else { return };
        let bit = 1 << (ppn.0 % 64);
        // Most are not in it, and a look is cheaper than a write.
        if cell.load(Ordering::Acquire) & bit != 0 {
            cell.fetch_and(!bit, Ordering::AcqRel);
        }
    }
    /// The first of it from `from` on, below `end`.
    pub fn next(&self, from: Ppn, end: Ppn) -> Option<Ppn> {
        let mut at = from.0;
        while at < end.0 {
            let word = at as usize / 64;
            let Some(words) = self.0[word / WORDS].get() else {
                at = (word / WORDS + 1) as u64 * WORDS as u64 * 64;
                continue;
            };
            let bits = words[word % WORDS].load(Ordering::Acquire) >> (at % 64);
            if bits != 0 {
                at += u64::from(bits.trailing_zeros());
                return (at < end.0).then_some(Ppn(at));
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
    /// What is put in meanwhile may stay. Memory is kept.
    pub fn clear(&self) {
        let cells = self.0.iter().filter_map(OnceLock::get).flat_map(|words| words.iter());
        cells.for_each(|cell| cell.store(0, Ordering::Release));
    }
    /// Whether it is in it.
    pub fn contains(&self, ppn: Ppn) -> bool {
        self.cell(ppn).is_some_and(|cell| cell.load(Ordering::Acquire) & 1 << (ppn.0 % 64) != 0)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn the_next_of_a_set_is_found_where_most_has_no_memory() {
        let part = 64 * WORDS as u64;
        let len = 3 * part + 70;
        let set = PageSet::new(Pages(len));
        let next = |from, end| set.next(Ppn(from), Ppn(end)).map(|p| p.0);
        assert_eq!(next(0, len), None);
        let members = [0, 63, 64, 200, 2 * part + 5, len - 1];
        members.iter().for_each(|p| set.insert(Ppn(*p)));
        for from in 0..len {
            let first = members.iter().copied().find(|p| *p >= from);
            assert_eq!(next(from, len), first, "from {from}");
        }
        assert_eq!((next(65, 200), next(65, 201), next(len, len)), (None, Some(200), None));
        set.remove(Ppn(200));
        assert_eq!(next(65, len), Some(2 * part + 5));
        let has = |p| set.contains(Ppn(p));
        assert!((0..len).all(|p| has(p) == (p != 200 && members.contains(&p))));
        set.clear();
        assert!(next(0, len).is_none() && !has(63));
        // One that ends where its last part does.
        assert_eq!(PageSet::new(Pages(part)).next(Ppn(part), Ppn(part)), None);
    }
}
