//! Pages by content: which are zero, and which repeat others.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ballast_sharing::{Hasher, PageHash, is_zero};
use ballast_units::{PAGE_SIZE, Pages};
use serde::Serialize;

/// How many of the most repeated contents are told.
const MOST_REPEATED: usize = 5;

/// Contents of the pages of one process: 8 bytes for each that is not zero.
#[derive(Debug)]
pub(crate) struct Contents {
    hasher: Hasher,
    zero: Pages,
    hashes: Vec<PageHash>,
}

impl Contents {
    /// Contents that are to be counted together need equal hashers.
    pub fn new(hasher: Hasher) -> Contents {
        Contents { hasher, zero: Pages::ZERO, hashes: Vec::new() }
    }

    pub fn add(&mut self, page: &[u8; PAGE_SIZE]) {
        if is_zero(page) {
            self.zero += Pages(1);
        } else {
            self.hashes.push(self.hasher.page(page));
        }
    }

    pub fn zero(&self) -> Pages {
        self.zero
    }

    pub fn sorted(mut self) -> Sorted {
        self.hashes.sort_unstable();
        Sorted(self.hashes)
    }
}

/// Hashes of the pages that are not zero, in order.
#[derive(Debug)]
pub(crate) struct Sorted(Vec<PageHash>);

impl Sorted {
    /// All but one of each content.
    pub fn repeated(&self) -> Pages {
        self.0.chunk_by(PageHash::eq).map(|equal| Pages(equal.len() as u64 - 1)).sum()
    }
}

/// A content that occurs more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Repeated {
    /// How often, in all processes together.
    pub copies: u64,
    /// What one copy less than all of them take.
    pub saved: u64,
}

/// What repeats itself in all processes taken together, and what does so most. They are merged where they are: all
/// hashes in one list would take their memory twice.
pub(crate) fn across(processes: &[Sorted]) -> (Pages, Vec<Repeated>) {
    let mut rest: Vec<&[PageHash]> = processes.iter().map(|p| &p.0[..]).collect();
    // The smallest hash that each process has left.
    let heads = rest.iter().enumerate().filter_map(|(i, left)| Some(Reverse((*left.first()?, i))));
    let mut heads: BinaryHeap<_> = heads.collect();
    let mut repeated = Pages::ZERO;
    // The largest so far, largest first.
    let mut most: Vec<u64> = Vec::new();
    while let Some(&Reverse((hash, _))) = heads.peek() {
        let mut copies = 0;
        while let Some(&Reverse((other, i))) = heads.peek()
            && other == hash
        {
            heads.pop();
            let equal = rest[i].iter().take_while(|next| **next == hash).count();
            copies += equal as u64;
            rest[i] = &rest[i][equal..];
            heads.extend(rest[i].first().map(|next| Reverse((*next, i))));
        }
        repeated += Pages(copies - 1);
        let place = most.partition_point(|more| *more >= copies);
        if copies > 1 && place < MOST_REPEATED {
            most.insert(place, copies);
            most.truncate(MOST_REPEATED);
        }
    }
    let told = |copies| Repeated { copies, saved: Pages(copies - 1).bytes().0 };
    (repeated, most.into_iter().map(told).collect())
}

#[cfg(test)]
mod tests {
    use ballast_units::SplitMix64;

    use super::*;

    fn page(content: u32) -> [u8; PAGE_SIZE] {
        let mut page = [0; PAGE_SIZE];
        // At the end, where a hash of a part would miss it.
        page[PAGE_SIZE - 4..].copy_from_slice(&content.to_le_bytes());
        page
    }

    fn contents(pages: &[u32]) -> Contents {
        let mut contents = Contents::new(Hasher::new(b"test", "count"));
        pages.iter().for_each(|content| contents.add(&page(*content)));
        contents
    }

    #[test]
    fn zero_pages_are_counted_apart_and_repeat_nothing() {
        let found = contents(&[0, 1, 0, 2, 1, 0, 1]);
        assert_eq!(found.zero(), Pages(3));
        assert_eq!(found.sorted().repeated(), Pages(2));
        let none = contents(&[]);
        assert_eq!((none.zero(), none.sorted().repeated()), (Pages(0), Pages(0)));
    }

    #[test]
    fn across_counts_what_is_inside_too_and_each_content_keeps_one_page() {
        // 1 is in both, 2 twice in one, 3 once.
        let (a, b) = (contents(&[1, 2, 2, 0]).sorted(), contents(&[3, 1, 1, 1]).sorted());
        assert_eq!((a.repeated(), b.repeated()), (Pages(1), Pages(2)));
        let (repeated, most) = across(&[a, b]);
        assert_eq!(repeated, Pages(7 - 3));
        let told = |copies, pages| Repeated { copies, saved: pages * PAGE_SIZE as u64 };
        assert_eq!(most, [told(4, 3), told(2, 1)]);
        assert_eq!(across(&[]), (Pages(0), Vec::new()));
    }

    #[test]
    fn only_the_most_repeated_are_told_most_first() {
        let mut pages = Vec::new();
        for content in 1..=20 {
            // 1 to 20 copies, in an order of hashes that has nothing to do with it.
            pages.extend(std::iter::repeat_n(content, content as usize));
        }
        let (repeated, most) = across(&[contents(&pages).sorted()]);
        assert_eq!(repeated, Pages((0..20).sum()));
        let copies: Vec<u64> = most.iter().map(|m| m.copies).collect();
        assert_eq!(copies, [20, 19, 18, 17, 16]);
    }

    /// Against all contents in one list.
    #[test]
    fn processes_are_merged_as_one() {
        let mut rng = SplitMix64::seeded(7);
        for of in 1..=6 {
            let processes: Vec<Vec<u32>> = (0..of)
                .map(|_| (0..rng.below(200)).map(|_| 1 + rng.below(60) as u32).collect())
                .collect();
            let mut all = processes.concat();
            all.sort_unstable();
            let copies: Vec<u64> = all.chunk_by(u32::eq).map(|equal| equal.len() as u64).collect();
            let mut most = copies.clone();
            most.retain(|copies| *copies > 1);
            most.sort_unstable_by_key(|copies| Reverse(*copies));
            most.truncate(MOST_REPEATED);
            let sorted: Vec<Sorted> = processes.iter().map(|p| contents(p).sorted()).collect();
            let (repeated, told) = across(&sorted);
            assert_eq!(repeated, Pages(copies.iter().map(|copies| copies - 1).sum()));
            assert_eq!(told.iter().map(|m| m.copies).collect::<Vec<_>>(), most);
        }
    }
}
