//! The share table as slow maps, and the operations that both are put through.

use std::collections::BTreeMap;

use ballast_units::{Pages, SplitMix64};

use super::{Match, ShareTable, TableError};
use crate::hash::PageHash;
use crate::ids::{PageId, StorePage};

#[derive(Clone, Debug)]
pub(super) enum Op {
    Hint(PageId, PageHash),
    /// So many pages from one on, each with a hash of its own.
    HintMany(PageId, u32, u64),
    DropHint(PageId),
    MarkIneligible(PageId, PageHash),
    Forget(PageId, u64),
    Share(StorePage, PageHash),
    Retain(StorePage, u32),
    Release(StorePage, u32),
    Adopt(StorePage),
    SetHash(StorePage, PageHash),
}

#[derive(Clone, Copy, Debug)]
struct Guest {
    hash: PageHash,
    eligible: bool,
}

#[derive(Clone, Copy, Debug)]
struct Common {
    hash: Option<PageHash>,
    refs: u64,
}

#[derive(Default)]
pub(super) struct Oracle {
    guests: BTreeMap<PageId, Guest>,
    commons: BTreeMap<StorePage, Common>,
}

/// The table beside its oracle.
#[derive(Default)]
pub(super) struct Both {
    pub table: ShareTable,
    pub oracle: Oracle,
}

impl Both {
    /// Does one operation on both; what it answers must be the same.
    ///
    /// # Errors
    /// It is not.
    pub fn step(&mut self, op: &Op) -> Result<(), String> {
        let Both { table, oracle } = self;
        match *op {
            Op::Hint(page, hash) => {
                table.hint(page, hash);
                oracle.hint(page, hash);
                Ok(())
            }
            Op::HintMany(first, n, seed) => {
                for i in 0..n {
                    let Some(page) = PageId::new(first.get() + i) else { break };
                    let hash = PageHash(scatter(seed ^ u64::from(i)));
                    table.hint(page, hash);
                    oracle.hint(page, hash);
                }
                Ok(())
            }
            Op::DropHint(page) => {
                same(op, table.drop_hint(page), oracle.guests.remove(&page).is_some())
            }
            Op::MarkIneligible(page, hash) => {
                table.mark_ineligible(page, hash);
                oracle.guests.insert(page, Guest { hash, eligible: false });
                Ok(())
            }
            Op::Forget(first, n) => {
                table.forget_pages(first, Pages(n));
                let gone = u64::from(first.get())..u64::from(first.get()).saturating_add(n);
                oracle.guests.retain(|page, _| !gone.contains(&page.get().into()));
                Ok(())
            }
            Op::Share(page, hash) => same(op, table.share(page, hash), oracle.share(page, hash)),
            Op::Retain(page, times) => (0..times).try_for_each(|_| {
                same(op, table.retain(page), oracle.change(page, |refs| refs + 1))
            }),
            Op::Release(page, times) => (0..times).try_for_each(|_| {
                same(op, table.release(page), oracle.change(page, |refs| refs - 1))
            }),
            Op::Adopt(page) => {
                let common = oracle.commons.entry(page).or_insert(Common { hash: None, refs: 0 });
                common.refs += 1;
                same(op, table.adopt(page), common.refs)
            }
            Op::SetHash(page, hash) => {
                same(op, table.set_hash(page, hash), oracle.set_hash(page, hash))
            }
        }
    }

    /// What can be asked of a guest page.
    ///
    /// # Errors
    /// What the two say of it.
    pub fn compare_page(&self, page: PageId, hash: PageHash) -> Result<(), String> {
        let guest = self.oracle.guests.get(&page);
        let hinted = guest.filter(|guest| guest.eligible).map(|guest| guest.hash);
        same(&page, self.table.hinted(page), hinted)?;
        let ineligible = guest.is_some_and(|guest| !guest.eligible && guest.hash == hash);
        same(&page, self.table.is_ineligible(page, hash), ineligible)
    }

    /// What can be asked of a store page.
    ///
    /// # Errors
    /// What the two say of it.
    pub fn compare_common(&self, page: StorePage) -> Result<(), String> {
        let common = self.oracle.commons.get(&page);
        same(&page, self.table.refs(page), common.map_or(0, |common| common.refs))?;
        same(&page, self.table.hash_of(page), common.and_then(|common| common.hash))
    }

    /// A search must answer one of the pages that have the hash, and a shared one if there is one.
    ///
    /// # Errors
    /// What it answered.
    pub fn compare_find(&self, hash: PageHash, me: PageId) -> Result<(), String> {
        self.judge(hash, None, self.table.find(hash))?;
        self.judge(hash, Some(me), self.table.find_other_among(hash, me, 0..PageId::LIMIT))
    }

    fn judge(&self, hash: PageHash, me: Option<PageId>, found: Match) -> Result<(), String> {
        let common = |page: &StorePage| {
            self.oracle.commons.get(page).is_some_and(|common| common.hash == Some(hash))
        };
        let hinted = |page: &PageId| {
            let guest = self.oracle.guests.get(page);
            Some(*page) != me && guest.is_some_and(|guest| guest.eligible && guest.hash == hash)
        };
        let shared = || self.oracle.commons.keys().any(common);
        let right = match found {
            Match::Shared(page) => common(&page),
            Match::Hint(page) => hinted(&page) && !shared(),
            Match::Nothing => !shared() && !self.oracle.guests.keys().any(hinted),
        };
        if right { Ok(()) } else { Err(format!("{hash:x?} for {me:?}: found {found:?}")) }
    }

    /// Everything, and the table's own invariants.
    ///
    /// # Errors
    /// The first that is different, or does not hold.
    pub fn compare(&self) -> Result<(), String> {
        self.table.check()?;
        let commons = &self.oracle.commons;
        let unhashed = commons.iter().filter(|(_, common)| common.hash.is_none());
        let unhashed: Vec<StorePage> = unhashed.map(|(page, _)| *page).collect();
        same(&"unhashed", self.table.stats().unhashed, unhashed.len() as u64)?;
        same(&"unhashed", self.table.unhashed().collect(), unhashed)?;
        same(
            &"shared pages",
            self.table.shared_pages().collect::<Vec<_>>(),
            commons.iter().map(|(page, common)| (*page, common.refs)).collect(),
        )?;
        let stats = self.table.stats();
        same(&"shared", stats.shared, commons.len() as u64)?;
        same(&"references", stats.references, commons.values().map(|common| common.refs).sum())?;
        let hints = self.oracle.guests.values().filter(|guest| guest.eligible).count() as u64;
        same(&"hints", stats.hints, hints)?;
        same(&"ineligible", stats.ineligible, self.oracle.guests.len() as u64 - hints)
    }
}

impl Oracle {
    fn hint(&mut self, page: PageId, hash: PageHash) {
        let guest = self.guests.entry(page).or_insert(Guest { hash, eligible: true });
        if guest.hash != hash {
            *guest = Guest { hash, eligible: true };
        }
    }

    fn share(&mut self, page: StorePage, hash: PageHash) -> Result<(), TableError> {
        if self.commons.contains_key(&page) {
            return Err(TableError::Shared(page));
        }
        self.commons.insert(page, Common { hash: Some(hash), refs: 1 });
        Ok(())
    }

    fn change(&mut self, page: StorePage, to: fn(u64) -> u64) -> Result<u64, TableError> {
        let common = self.commons.get_mut(&page).ok_or(TableError::NotShared(page))?;
        common.refs = to(common.refs);
        let refs = common.refs;
        if refs == 0 {
            self.commons.remove(&page);
        }
        Ok(refs)
    }

    fn set_hash(&mut self, page: StorePage, hash: PageHash) -> Result<(), TableError> {
        let common = self.commons.get_mut(&page).ok_or(TableError::NotShared(page))?;
        if common.hash.is_some() {
            return Err(TableError::Hashed(page));
        }
        common.hash = Some(hash);
        Ok(())
    }
}

fn same<T: PartialEq + std::fmt::Debug>(
    what: &impl std::fmt::Debug,
    table: T,
    oracle: T,
) -> Result<(), String> {
    if table == oracle {
        return Ok(());
    }
    Err(format!("{what:x?}: the table says {table:x?}, the oracle {oracle:x?}"))
}

/// A number of its own for each number, far from its neighbours.
pub(super) fn scatter(n: u64) -> u64 {
    SplitMix64::seeded(n).draw()
}
