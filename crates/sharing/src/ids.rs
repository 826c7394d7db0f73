//! Numbers of guest pages and of store pages. Both fit 31 bits, so that a link of the share table
//! names either in 32.

use std::fmt;

use ballast_units::{PAGE_SIZE, Pages};

/// A guest page of a domain: the base that the domain gave its VM, plus the PPN. Frames are kept
/// in chunks by number, so numbers should be dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(u32);

impl PageId {
    /// Numbers are below this: 8 TiB of guest memory in one domain.
    pub const LIMIT: u32 = 1 << 31;

    /// None at and above [`LIMIT`](Self::LIMIT).
    pub const fn new(n: u32) -> Option<PageId> {
        if n < Self::LIMIT { Some(PageId(n)) } else { None }
    }
    /// As it was made, below [`LIMIT`](Self::LIMIT).
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// A page of the store: its offset in the store file divided by 4,096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorePage(u32);

impl StorePage {
    /// Numbers are below this: just under 8 TiB of common pages.
    pub const LIMIT: u32 = (1 << 31) - 1;

    /// None at and above [`LIMIT`](Self::LIMIT). Takes what a pmap word holds.
    pub const fn new(n: u64) -> Option<StorePage> {
        if n < Self::LIMIT as u64 { Some(StorePage(n as u32)) } else { None }
    }
    /// As it was made, below [`LIMIT`](Self::LIMIT).
    pub const fn get(self) -> u32 {
        self.0
    }
    /// The same, as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
    /// Byte offset of the page in the store file.
    pub const fn offset(self) -> u64 {
        self.0 as u64 * PAGE_SIZE as u64
    }
}

impl fmt::Display for StorePage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store page {:#x}", self.0)
    }
}

/// Consecutive store pages; never none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreRun {
    first: StorePage,
    pages: u32,
}

impl StoreRun {
    /// None if `pages` is zero or the run would end above [`StorePage::LIMIT`].
    pub const fn new(first: StorePage, pages: u64) -> Option<StoreRun> {
        if pages == 0 || pages > (StorePage::LIMIT - first.0) as u64 {
            return None;
        }
        Some(StoreRun { first, pages: pages as u32 })
    }
    /// Its page of the lowest number.
    pub const fn first(self) -> StorePage {
        self.first
    }
    /// How many it has, at least 1.
    pub const fn pages(self) -> Pages {
        Pages(self.pages as u64)
    }
    /// Bytes of the run in the store file: first, and first that is not of it.
    pub const fn offsets(self) -> (u64, u64) {
        let start = self.first.offset();
        (start, start + self.pages().bytes().0)
    }
    /// Its pages, the first first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = StorePage> {
        (self.first.0..self.first.0 + self.pages).map(StorePage)
    }
}

impl From<StorePage> for StoreRun {
    fn from(first: StorePage) -> StoreRun {
        StoreRun { first, pages: 1 }
    }
}

impl fmt::Display for StoreRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store pages {:#x}..{:#x}", self.first.0, self.first.0 + self.pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_link_cannot_name_do_not_exist() {
        assert_eq!(PageId::new(PageId::LIMIT), None);
        assert_eq!(PageId::new(PageId::LIMIT - 1).map(PageId::get), Some(0x7fff_ffff));
        assert_eq!(StorePage::new(u64::from(StorePage::LIMIT)), None);
        assert_eq!(StorePage::new(1 << 32), None);
        assert_eq!(StorePage::new(0x7fff_fffe).map(StorePage::offset), Some(0x7fff_fffe * 4096));
    }

    #[test]
    fn numbers_are_printed_as_what_they_are() {
        assert_eq!(PageId(0x1f).to_string(), "page 0x1f");
        assert_eq!(StorePage(0x1f).to_string(), "store page 0x1f");
        let run = StoreRun::new(StorePage(5), 6).unwrap();
        assert_eq!(run.to_string(), "store pages 0x5..0xb");
    }

    #[test]
    fn runs_are_never_empty_and_end_within_the_store() {
        let last = StorePage::new(u64::from(StorePage::LIMIT) - 1).unwrap();
        assert_eq!(StoreRun::new(last, 0), None);
        assert_eq!(StoreRun::new(last, 2), None);
        assert_eq!(StoreRun::new(last, 1), Some(last.into()));
        let run = StoreRun::new(StorePage(5), 3).unwrap();
        assert_eq!(run.iter().collect::<Vec<_>>(), [StorePage(5), StorePage(6), StorePage(7)]);
        assert_eq!(run.offsets(), (5 * 4096, 8 * 4096));
    }
}
