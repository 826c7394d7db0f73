//! The share table (OSDI'02 s.4.3, figure 3): one table for all scanned pages of a domain. A
//! *shared frame* counts the guest pages that a store page stands for; a *hint frame* remembers
//! the hash of a guest page that matched nothing when it was scanned.
//!
//! | file | what is there |
//! | --- | --- |
//! | `frame` | the two kinds of frame, 16 bytes each, and the links between them |
//! | `chunks` | where frames lie: memory follows what is scanned |
//! | `buckets`, `chains` | from a hash to its frames |
//! | `overflow` | large reference counts |
//! | `hints`, `shared` | the operations |
//! | `check` | what must hold |

mod buckets;
mod chains;
mod check;
mod chunks;
mod frame;
mod hints;
mod overflow;
mod shared;

#[cfg(test)]
mod oracle;
#[cfg(test)]
mod table_tests;

use std::ops::Range;

use ballast_units::Bytes;

use crate::hash::PageHash;
use crate::ids::{PageId, StorePage};
use buckets::Buckets;
use chunks::Chunks;
use frame::{HintFrame, Place, SharedFrame};
use overflow::Overflow;

/// What the table knows of a hash. Either way the contents must be compared before they are
/// shared; those of a hint may have changed since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// A store page has it.
    Shared(StorePage),
    /// No store page has it, but this guest page had it when it was scanned.
    Hint(PageId),
    /// Neither is known.
    Nothing,
}

/// A request that contradicts the table: a mistake of the caller. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TableError {
    #[error("{0} has no shared frame")]
    NotShared(StorePage),
    #[error("{0} has a shared frame already")]
    Shared(StorePage),
    #[error("the hash of {0} is known already")]
    Hashed(StorePage),
}

/// What a table holds at one moment: numbers of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Store pages in use: "common" in ESX's terms.
    pub shared: u64,
    /// Guest pages that they stand for: "shared" in ESX's terms. The difference is what is saved.
    pub references: u64,
    /// Of `shared`, those that cannot be found because their hash is not known again yet.
    pub unhashed: u64,
    /// Guest pages that can be found by their hash.
    pub hints: u64,
    /// Guest pages that cannot, because of a false match.
    pub ineligible: u64,
}

/// Frames, chains and counts of one domain (OSDI'02 s.4.3).
///
/// Invariants (`check`): every hint frame is either chained or ineligible; a shared frame is
/// chained exactly when its hash is known; a chained frame is in the chain of its hash, once,
/// shared frames before hint frames; the counts are those of the frames.
pub struct ShareTable {
    hints: Chunks<HintFrame>,
    shared: Chunks<SharedFrame>,
    overflow: Overflow,
    buckets: Buckets,
    /// Frames in chains.
    chained: u64,
    /// No page below it has a frame without a hash.
    first_unhashed: u32,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    shared: u64,
    references: u64,
    unhashed: u64,
    hints: u64,
    ineligible: u64,
}

impl Default for ShareTable {
    fn default() -> ShareTable {
        ShareTable::new()
    }
}

impl ShareTable {
    /// Nothing is known.
    pub fn new() -> ShareTable {
        ShareTable {
            hints: Chunks::new(),
            shared: Chunks::new(),
            overflow: Overflow::default(),
            buckets: Buckets::new(),
            chained: 0,
            first_unhashed: u32::MAX,
            counts: Counts::default(),
        }
    }

    /// Tests: a store page with this hash, else a guest page that had it when it was scanned.
    pub fn find(&self, hash: PageHash) -> Match {
        self.search(hash, |_| true)
    }

    /// The same, but never the guest page `me`, and of the others only those with numbers in `among`: what is
    /// known of the rest stays, and is passed over.
    pub fn find_other_among(&self, hash: PageHash, me: PageId, among: Range<u32>) -> Match {
        self.search(hash, |page| page != me && among.contains(&page.get()))
    }

    /// A store page with this hash.
    pub fn find_shared(&self, hash: PageHash) -> Option<StorePage> {
        match self.search(hash, |_| false) {
            Match::Shared(page) => Some(page),
            Match::Hint(_) | Match::Nothing => None,
        }
    }

    fn search(&self, hash: PageHash, may_be: impl Fn(PageId) -> bool) -> Match {
        let mut next = self.buckets.get(self.buckets.of(hash));
        while let Some(place) = next.place() {
            let (found, after) = self.look(place);
            if found == hash {
                match place {
                    Place::Shared(page) => return Match::Shared(page),
                    Place::Hint(page) if may_be(page) => return Match::Hint(page),
                    Place::Hint(_) => {}
                }
            }
            next = after;
        }
        Match::Nothing
    }

    /// Counts that are kept, so this takes no time to speak of.
    pub fn stats(&self) -> TableStats {
        let Counts { shared, references, unhashed, hints, ineligible } = self.counts;
        TableStats { shared, references, unhashed, hints, ineligible }
    }

    /// Heap memory of the table: frames, buckets, overflow table and their directories, as asked
    /// of the allocator.
    pub fn memory_bytes(&self) -> Bytes {
        self.hints.memory() + self.shared.memory() + self.buckets.memory() + self.overflow.memory()
    }
}
