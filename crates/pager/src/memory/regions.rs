//! Which parts of a VM's memory are backed by large pages: one entry for each region of the size of a
//! large page. Derived: a manager that takes over takes for large what may be.

use ballast_units::{Pages, Ppn};

use crate::pmap::Pmap;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::word::{State, Word};

/// How the home pages of a region are backed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Backing {
    /// Each by a page of its own, if at all.
    Small = 0,
    /// By what the guest left of a large page, or by what may be one: a page of it may not be freed alone.
    Torn = 1,
    /// By one large page.
    Whole = 2,
}

/// Running totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LargeCounts {
    /// Large pages that were handed out.
    pub fills: u64,
    /// Regions that were broken into small pages.
    pub breaks: u64,
    /// Pages all zero that were found and freed by that.
    pub dropped: u64,
    /// Regions that were made whole again.
    pub collapses: u64,
}

/// All regions of a VM. Any thread may ask; who changes one holds busy bits of its pages.
pub struct Regions {
    /// Pages of a region; 1 where there are no large pages.
    size: u64,
    cells: Box<[AtomicU64]>,
    whole: AtomicU64,
    fills: AtomicU64,
    breaks: AtomicU64,
    dropped: AtomicU64,
    collapses: AtomicU64,
    /// The region that was last read before it was written.
    read: AtomicU64,
    /// Held pages of broken regions that could not be brought back at once.
    away: Mutex<Vec<Ppn>>,
}

impl Regions {
    pub(super) fn new(len: Pages, size: u64) -> Regions {
        // What is left at the end is smaller than a large page.
        let n = if size > 1 { len.0 / size } else { 0 };
        Regions {
            size,
            cells: (0..n).map(|_| AtomicU64::new(Backing::Small as u64)).collect(),
            whole: AtomicU64::new(0),
            fills: AtomicU64::new(0),
            breaks: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            collapses: AtomicU64::new(0),
            read: AtomicU64::new(u64::MAX),
            away: Mutex::new(Vec::new()),
        }
    }

    /// Pages of a region.
    pub fn size(&self) -> Pages {
        Pages(self.size)
    }
    /// Regions; none where there are no large pages.
    pub fn len(&self) -> usize {
        self.cells.len()
    }
    /// Whether there are no large pages.
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }
    /// The region of a page, if it has one.
    pub fn of(&self, ppn: Ppn) -> Option<usize> {
        // Asked of each page that is looked at: without a division where there are none.
        if self.cells.is_empty() {
            return None;
        }
        Some((ppn.0 / self.size) as usize).filter(|&r| r < self.cells.len())
    }
    /// The first page of a region.
    pub fn first(&self, region: usize) -> Ppn {
        Ppn(region as u64 * self.size)
    }
    pub(super) fn pages(&self, region: usize) -> impl Iterator<Item = Ppn> + use<> {
        let first = self.first(region).0;
        (first..first + self.size).map(Ppn)
    }
    pub(super) fn get(&self, region: usize) -> Backing {
        match self.cells[region].load(Ordering::Acquire) {
            2 => Backing::Whole,
            1 => Backing::Torn,
            _ => Backing::Small,
        }
    }
    /// Whether a page is, or may be, a part of a large page: then it cannot be freed alone.
    pub fn is_large(&self, ppn: Ppn) -> bool {
        self.of(ppn).is_some_and(|r| self.get(r) != Backing::Small)
    }
    pub(super) fn any_large(&self, first: u64, end: u64) -> bool {
        !self.cells.is_empty()
            && (first / self.size..=(end.max(first + 1) - 1) / self.size)
                .any(|r| self.is_large(Ppn(r * self.size)))
    }
    /// Pages backed by whole large pages.
    pub fn whole(&self) -> Pages {
        Pages(self.whole.load(Ordering::Relaxed) * self.size)
    }
    /// Since this manager has the VM.
    pub fn counts(&self) -> LargeCounts {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        LargeCounts {
            fills: get(&self.fills),
            breaks: get(&self.breaks),
            dropped: get(&self.dropped),
            collapses: get(&self.collapses),
        }
    }

    /// Who changes it holds busy bits of the region's pages.
    pub(super) fn set(&self, region: usize, to: Backing) {
        let from = self.cells[region].swap(to as u64, Ordering::AcqRel);
        let (was, is) = (from == Backing::Whole as u64, to == Backing::Whole);
        if is && !was {
            self.whole.fetch_add(1, Ordering::Relaxed);
        } else if was && !is {
            self.whole.fetch_sub(1, Ordering::Relaxed);
        }
    }
    pub(super) fn filled(&self) {
        self.fills.fetch_add(1, Ordering::Relaxed);
    }
    pub(super) fn collapsed(&self) {
        self.collapses.fetch_add(1, Ordering::Relaxed);
    }
    pub(super) fn broke(&self, dropped: u64) {
        self.breaks.fetch_add(1, Ordering::Relaxed);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }

    /// The guest gave up `[first, end)`, of which nothing is left, and which the caller holds. A region that it has given up
    /// piece by piece is no large page any more.
    pub(super) fn tear(&self, pmap: &Pmap, first: u64, end: u64) {
        if self.cells.is_empty() {
            return;
        }
        let mut at = first;
        while at < end {
            let Some(region) = self.of(Ppn(at)) else { return };
            let until = self.first(region).0 + self.size;
            if self.get(region) != Backing::Small {
                let is_gone = |p: Ppn| {
                    (first..end).contains(&p.0) || pmap.load(p) == Word::new(State::Ballooned)
                };
                let all = self.pages(region).all(is_gone);
                self.set(region, if all { Backing::Small } else { Backing::Torn });
            }
            at = until;
        }
    }

    /// Notes that a region is read before it was written; answers whether reads go from region to region, as
    /// those of a migration do.
    pub(super) fn is_read_in_order(&self, region: usize) -> bool {
        let before = self.read.swap(region as u64, Ordering::Relaxed);
        before == region as u64 || before.wrapping_add(1) == region as u64
    }

    /// The regions with pages that have a word, in order. Takes as long as the guest has been seen to use memory.
    pub(super) fn known(&self, pmap: &Pmap) -> impl Iterator<Item = usize> {
        let mut last = None;
        pmap.known().filter_map(|p| self.of(p)).filter(move |&r| last.replace(r) != Some(r))
    }

    /// What may be a large page is taken for one: a region with a page in any other state was broken. Called
    /// once; regions without words are small.
    pub(super) fn rebuild(&self, pmap: &Pmap) {
        for region in self.known(pmap) {
            let first = self.first(region).0;
            let mut resident = 0;
            let intact = (first..first + self.size).all(|p| match pmap.load(Ppn(p)).state() {
                State::Resident => {
                    resident += 1;
                    true
                }
                state => matches!(state, State::Ballooned | State::Untouched),
            });
            self.set(
                region,
                match intact {
                    true if resident == self.size => Backing::Whole,
                    true if resident > 0 => Backing::Torn,
                    _ => Backing::Small,
                },
            );
        }
    }

    pub(super) fn add_away(&self, pages: impl IntoIterator<Item = Ppn>) {
        lock(&self.away).extend(pages);
    }
    pub(super) fn take_away(&self) -> Vec<Ppn> {
        std::mem::take(&mut *lock(&self.away))
    }
    /// Whether `bring_back` has something to do.
    pub fn is_any_away(&self) -> bool {
        !self.cells.is_empty() && !lock(&self.away).is_empty()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Four regions of four pages, and two pages beyond them.
    const LEN: u64 = 18;

    fn regions() -> Regions {
        Regions::new(Pages(LEN), 4)
    }

    #[test]
    fn a_range_has_large_pages_where_one_of_its_pages_is_in_one() {
        for large in 0..4 {
            let regions = regions();
            regions.set(large, Backing::Torn);
            for first in 0..LEN {
                // An empty range is that of its first page.
                assert_eq!(regions.any_large(first, first), regions.is_large(Ppn(first)));
                for end in first + 1..=LEN {
                    let any = (first..end).any(|p| p / 4 == large as u64);
                    assert_eq!(regions.any_large(first, end), any, "{large}: {first}..{end}");
                }
            }
        }
        let none = Regions::new(Pages(LEN), 1);
        assert!(none.is_empty() && !none.any_large(0, LEN));
        assert!(!regions().is_empty() && regions().len() == 4);
    }

    #[test]
    fn what_is_given_up_tears_the_regions_that_it_is_in_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let pmap = Pmap::create(&dir.path().join("pmap"), Pages(LEN)).unwrap();
        (0..LEN).for_each(|p| pmap.store(Ppn(p), Word::new(State::Resident)));
        for first in 0..LEN {
            for end in first + 1..=LEN {
                let regions = regions();
                (0..4).for_each(|r| regions.set(r, Backing::Whole));
                regions.tear(&pmap, first, end);
                for r in 0..4 {
                    let of = (4 * r as u64..4 * r as u64 + 4).filter(|p| (first..end).contains(p));
                    let is = match of.count() {
                        0 => Backing::Whole,
                        4 => Backing::Small,
                        _ => Backing::Torn,
                    };
                    assert_eq!(regions.get(r), is, "{first}..{end}: {r}");
                }
            }
        }
    }

    #[test]
    fn reads_that_go_on_where_the_last_one_was_are_in_order() {
        let regions = regions();
        let seen = [2, 2, 3, 1, 2, 0].map(|r| regions.is_read_in_order(r));
        assert_eq!(seen, [false, true, true, false, true, false]);
    }
}
