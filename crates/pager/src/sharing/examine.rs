//! Pages of a VM are looked at: zeros are dropped, and what equals another page moves into the
//! store. Reading and hashing take no lock and hold up nobody; only a page that has a match is
//! protected and compared whole.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_sharing::PageHash;
use ballast_units::{Pages, Ppn};

use super::domain::Known;
use crate::backend::{Backend, MemError};
use crate::memory::{Contents, Counters, Enter, Entered, Membership, Memory, Scratch};
use crate::word::State;

/// Pages read with one call at most.
pub const BATCH: usize = Scratch::TOGETHER;

/// What came of a look at some pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Examined {
    /// Pages read and hashed.
    pub scanned: u64,
    /// Of those, pages all zero, dropped.
    pub zero: u64,
    /// Pages that went into the store, those of other VMs included.
    pub shared: u64,
    /// Pages that were not read: they were not written since they were last looked at.
    pub passed: u64,
    /// Pages that were left alone: of a large one, while memory is plentiful.
    pub large: u64,
}

impl std::ops::AddAssign for Examined {
    fn add_assign(&mut self, other: Examined) {
        self.scanned += other.scanned;
        self.zero += other.zero;
        self.shared += other.shared;
        self.passed += other.passed;
        self.large += other.large;
    }
}

/// Which pages are write-protected after a look, so that they can be passed over until the guest
/// writes to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// The page may go to swap otherwise: those that are written again and again are shared, too.
    None,
    /// None either, while that costs the guest more than it saves; those that are written again and again are left
    /// alone all the same.
    Off,
    /// Those that are as they were at the last look: others may well be written soon.
    Unchanged,
    /// All that are at home and match nothing.
    All,
}

/// Whose pages are looked at, and room to work in.
pub struct Examiner {
    /// What is looked at is read into its pages, and those that enter the store are read again.
    scratch: Scratch,
    hashed: Vec<(Ppn, PageHash)>,
    /// Whether pages of other VMs are made common.
    others: bool,
}

impl Default for Examiner {
    fn default() -> Examiner {
        Examiner { scratch: Scratch::default(), hashed: Vec::with_capacity(BATCH), others: true }
    }
}

/// A page that another one, already seen, may equal.
struct Pair<B: Backend> {
    ppn: Ppn,
    hash: PageHash,
    other: Arc<Memory<B>>,
    seen: Ppn,
}

/// What was found of pages that were looked up.
struct Sorted<B: Backend> {
    /// They are common already; a reference is held for each.
    joins: Vec<(Enter, PageHash)>,
    pairs: Vec<Pair<B>>,
    /// To be passed over until they are written, by their hashes; in rising order.
    marked: Vec<(Ppn, PageHash)>,
}

impl Examiner {
    /// Memory of its buffers.
    pub(crate) const PAGES: Pages = Scratch::PAGES;

    /// One that lets other VMs' pages alone, and waits for no VMM but the one it looks at: a page equal to
    /// what is only known of another VM stays as it is.
    pub fn to_itself() -> Examiner {
        Examiner { others: false, ..Examiner::default() }
    }

    /// Whose pages are found, by their numbers in the domain.
    fn among<B: Backend>(&self, memory: &Memory<B>, member: &Membership<B>) -> Range<u32> {
        if self.others { 0..u32::MAX } else { own(memory, member) }
    }

    /// Looks at pages in ascending order. Those that are not at home, or known not to have been
    /// written since the last look, are passed over.
    ///
    /// # Errors
    /// Of the operations on the VM's own memory. Pages that were looked at before that are as they should be.
    pub fn examine<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        pages: &[Ppn],
        marking: Marking,
    ) -> Result<Examined, MemError> {
        let mut done = Examined::default();
        let Some(member) = memory.membership() else { return Ok(done) };
        let mut zeros = Vec::new();
        self.hash(memory, &member, pages, marking, &mut zeros, &mut done)?;
        for run in neighbours(&zeros, |ppn| *ppn) {
            done.zero += memory.drop_zeros(run[0], &mut self.scratch.pages[..run.len()])?;
        }
        let hashed = std::mem::take(&mut self.hashed);
        let result = self.place(memory, &member, &hashed, marking, &mut done);
        self.hashed = hashed;
        result.map(|()| done)
    }

    /// How many of `n` pages at home, from `first` on, are all zero or match a page that is known, and how
    /// many were read for that. What matches nothing is known afterwards. For pages that cannot be shared
    /// where they are.
    pub(crate) fn weigh<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        first: Ppn,
        n: u64,
    ) -> Result<(u64, u64), MemError> {
        let (mut alike, mut read) = (0, 0);
        let Some(member) = memory.membership() else { return Ok((0, 0)) };
        for at in (first.0..first.0 + n).step_by(BATCH) {
            let some = ((first.0 + n - at) as usize).min(BATCH);
            memory.backend().read_homes(Ppn(at), &mut self.scratch.pages[..some])?;
            let pages = (at..).map(Ppn).zip(&self.scratch.pages[..some]);
            let (zeros, rest): (Vec<_>, Vec<_>) =
                pages.partition(|(_, page)| ballast_sharing::is_zero(page));
            let hashed: Vec<(Ppn, PageHash)> =
                rest.into_iter().map(|(ppn, page)| (ppn, member.domain.hash(page))).collect();
            let known = member.domain.look_up(member.base, &self.among(memory, &member), &hashed);
            let mut matches = 0;
            for known in known {
                match known {
                    // The reference is for who enters it.
                    Known::Common(page) => {
                        member.domain.release(page);
                        matches += 1;
                    }
                    Known::Seen(..) => matches += 1,
                    Known::New { .. } => {}
                }
            }
            alike += zeros.len() as u64 + matches;
            read += some as u64;
        }
        Counters::add(&memory.counters.scanned, read);
        Ok((alike, read))
    }

    /// Reads and hashes what is at home, in runs.
    fn hash<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        member: &Membership<B>,
        pages: &[Ppn],
        marking: Marking,
        zeros: &mut Vec<Ppn>,
        done: &mut Examined,
    ) -> Result<(), MemError> {
        self.hashed.clear();
        let at_hand = |ppn: &Ppn| {
            let word = memory.pmap().load(*ppn);
            word.state() == State::Resident && word.is_idle() && !memory.regions().is_large(*ppn)
        };
        let mut worth = Vec::with_capacity(pages.len());
        for &ppn in pages.iter().filter(|ppn| at_hand(ppn)) {
            if memory.is_unwritten(ppn) {
                done.passed += 1;
            } else {
                worth.push(ppn);
            }
        }
        let heeds_restless = marking != Marking::None && memory.has_restless();
        for run in neighbours(&worth, |ppn| *ppn) {
            memory.backend().read_homes(run[0], &mut self.scratch.pages[..run.len()])?;
            for (&ppn, page) in run.iter().zip(&self.scratch.pages) {
                if ballast_sharing::is_zero(page) {
                    zeros.push(ppn);
                } else {
                    let hash = member.domain.hash(page);
                    if !(heeds_restless && memory.is_restless(ppn, hash.0)) {
                        self.hashed.push((ppn, hash));
                    }
                }
            }
            done.scanned += run.len() as u64;
        }
        Counters::add(&memory.counters.scanned, done.scanned);
        Ok(())
    }

    fn place<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        member: &Membership<B>,
        hashed: &[(Ppn, PageHash)],
        marking: Marking,
        done: &mut Examined,
    ) -> Result<(), MemError> {
        let mut sorted = Sorted { joins: Vec::new(), pairs: Vec::new(), marked: Vec::new() };
        self.sort(memory, member, hashed, marking, &mut sorted);
        let pairs = std::mem::take(&mut sorted.pairs);
        let mut result = match self.pair_up(memory, member, pairs, &mut sorted.joins, done) {
            Ok(left) if left.is_empty() => Ok(()),
            // What was known of these is no longer so; they may well equal one another. Eviction takes the
            // pages that it knew last, and would never see two of a kind otherwise.
            Ok(left) => {
                self.sort(memory, member, &left, marking, &mut sorted);
                let pairs = std::mem::take(&mut sorted.pairs);
                self.pair_up(memory, member, pairs, &mut sorted.joins, done).map(|left| {
                    member.domain.hint_once(member.base, &own(memory, member), &left);
                })
            }
            Err(e) => Err(e),
        };
        if result == Err(MemError::Crash) {
            return result;
        }
        // References are held for these: they are used or released, whatever happened before.
        sorted.joins.sort_by_key(|j| j.0.ppn);
        result = result.and(self.enter(memory, member, &sorted.joins, done));
        if result.is_ok() {
            pass_over(memory, member, &mut sorted.marked)?;
        }
        result
    }

    /// Looks pages up.
    fn sort<B: Backend>(
        &self,
        memory: &Memory<B>,
        member: &Membership<B>,
        hashed: &[(Ppn, PageHash)],
        marking: Marking,
        into: &mut Sorted<B>,
    ) {
        let among = self.among(memory, member);
        // In pieces: others look pages up meanwhile.
        let known =
            hashed.chunks(BATCH).flat_map(|some| member.domain.look_up(member.base, &among, some));
        for (&(ppn, hash), known) in hashed.iter().zip(known) {
            match known {
                Known::Common(page) => {
                    into.joins.push((Enter { ppn, page, contents: Contents::Common }, hash));
                }
                Known::Seen(other, seen) => into.pairs.push(Pair { ppn, hash, other, seen }),
                Known::New { unchanged } => {
                    let mark = match marking {
                        Marking::None | Marking::Off => false,
                        Marking::Unchanged => unchanged,
                        Marking::All => true,
                    };
                    if mark {
                        into.marked.push((ppn, hash));
                    }
                }
            }
        }
    }

    /// Pages that match one that was only seen: that one becomes common first. Answers those for which that came
    /// to nothing.
    fn pair_up<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        member: &Membership<B>,
        pairs: Vec<Pair<B>>,
        joins: &mut Vec<(Enter, PageHash)>,
        done: &mut Examined,
    ) -> Result<Vec<(Ppn, PageHash)>, MemError> {
        if !memory.may_remap(pairs.len() as u64) {
            // Another VM's page would go into the store for nobody else.
            return Ok(pairs.iter().map(|p| (p.ppn, p.hash)).collect());
        }
        let mut left = Vec::new();
        // By VM and page, so that neighbours become neighbours in the store.
        let mut by_owner: BTreeMap<*const Memory<B>, Vec<Pair<B>>> = BTreeMap::new();
        for pair in pairs {
            by_owner.entry(Arc::as_ptr(&pair.other)).or_default().push(pair);
        }
        for (_, mut pairs) in by_owner {
            pairs.sort_by_key(|p| p.seen);
            let owner = pairs[0].other.clone();
            // It may have moved to another domain since, whose pages are not ours.
            let same = |its: &Membership<B>| Arc::ptr_eq(&its.domain, &member.domain);
            let Some(its) = owner.membership().filter(same) else {
                left.extend(pairs.iter().map(|p| (p.ppn, p.hash)));
                continue;
            };
            let mut wanted: Vec<(Ppn, PageHash)> = pairs.iter().map(|p| (p.seen, p.hash)).collect();
            // Several pages may match one.
            wanted.dedup();
            let own = std::ptr::eq(&*owner, memory);
            let entered = match self.publish(&owner, &its, own, &wanted, done) {
                // What is wrong with another VM is for its own threads to find out.
                Err(e) if e != MemError::Crash && !own => {
                    vec![None; wanted.len()]
                }
                other => other?,
            };
            for pair in &pairs {
                let now = wanted.binary_search(&(pair.seen, pair.hash)).ok();
                match now.and_then(|i| entered[i]) {
                    Some(page) if member.domain.retain(page) => joins.push((
                        Enter { ppn: pair.ppn, page, contents: Contents::Common },
                        pair.hash,
                    )),
                    _ => left.push((pair.ppn, pair.hash)),
                }
            }
        }
        left.sort_unstable_by_key(|l| l.0);
        Ok(left)
    }

    /// Makes seen pages common, if they still hold what they did. Answers the store page of each.
    fn publish<B: Backend>(
        &mut self,
        owner: &Memory<B>,
        its: &Membership<B>,
        own: bool,
        wanted: &[(Ppn, PageHash)],
        done: &mut Examined,
    ) -> Result<Vec<Option<ballast_sharing::StorePage>>, MemError> {
        let mut published = vec![None; wanted.len()];
        if !owner.backend().can_remap() {
            return Ok(published);
        }
        let fresh = self.still_as_seen(owner, its, wanted)?;
        let mut at = 0;
        while at < fresh.len() {
            // Pages that are claimed at one time are as many as can be read with one call: who writes to one waits.
            let some = (fresh.len() - at).min(BATCH) as u64;
            let Some(run) = its.domain.allocate(some) else { break };
            let some = &fresh[at..at + run.pages().0 as usize];
            let enter: Vec<Enter> = some
                .iter()
                .zip(run.iter())
                .map(|(&(_, ppn, hash), page)| Enter { ppn, page, contents: Contents::New(hash) })
                .collect();
            let outcomes = match own {
                true => owner.enter_store(its, &enter, &mut self.scratch),
                false => owner.enter_store_if_free(its, &enter, &mut self.scratch),
            };
            for ((&(i, ppn, _), enter), outcome) in some.iter().zip(&enter).zip(&outcomes) {
                match outcome {
                    Entered::Shared => {
                        published[i] = Some(enter.page);
                        done.shared += 1;
                    }
                    Entered::Parked => {}
                    Entered::Failed(MemError::Crash) => return Err(MemError::Crash),
                    _ => its.domain.release(enter.page),
                }
                match outcome {
                    Entered::Shared | Entered::Parked => its.domain.hint_is_stale(its.base, ppn),
                    Entered::Changed => {
                        its.domain.hint_is_stale(its.base, ppn);
                        owner.forget_unwritten(ppn);
                    }
                    // It is what it was, and could not move just now: it stays known. Its own VM may pass it over
                    // until it is written.
                    _ => {}
                }
            }
            at += some.len();
            failure(&outcomes)?;
        }
        Ok(published)
    }

    /// Of pages that were seen with these hashes, those that still have them, each with its place among `wanted`.
    fn still_as_seen<B: Backend>(
        &mut self,
        owner: &Memory<B>,
        its: &Membership<B>,
        wanted: &[(Ppn, PageHash)],
    ) -> Result<Vec<(usize, Ppn, PageHash)>, MemError> {
        let may = owner.may_move() && !owner.is_leaving();
        let is_at_home = |i: &usize| {
            let word = owner.pmap().load(wanted[*i].0);
            word.state() == State::Resident && word.is_idle() && may
        };
        let at_home: Vec<usize> = (0..wanted.len()).filter(is_at_home).collect();
        let mut still = vec![false; wanted.len()];
        for run in neighbours(&at_home, |&i| wanted[i].0) {
            let pages = &mut self.scratch.pages[..run.len()];
            owner.backend().read_homes(wanted[run[0]].0, pages)?;
            for (&i, page) in run.iter().zip(pages) {
                still[i] = its.domain.hash(page) == wanted[i].1;
            }
        }
        for (&(ppn, _), _) in wanted.iter().zip(&still).filter(|(_, still)| !**still) {
            its.domain.hint_is_stale(its.base, ppn);
            owner.forget_unwritten(ppn);
        }
        let fresh = wanted.iter().enumerate().filter(|(i, _)| still[*i]);
        Ok(fresh.map(|(i, &(ppn, hash))| (i, ppn, hash)).collect())
    }

    /// Moves pages into store pages that they hold references to.
    fn enter<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        member: &Membership<B>,
        joins: &[(Enter, PageHash)],
        done: &mut Examined,
    ) -> Result<(), MemError> {
        let mut result = Ok(());
        for some in joins.chunks(BATCH) {
            if result.is_err() {
                // They are not tried, but their references are held.
                some.iter().for_each(|j| member.domain.release(j.0.page));
                continue;
            }
            let enter: Vec<Enter> = some.iter().map(|j| j.0).collect();
            let outcomes = memory.enter_store(member, &enter, &mut self.scratch);
            for ((enter, hash), outcome) in some.iter().zip(&outcomes) {
                match outcome {
                    Entered::Shared => {
                        done.shared += 1;
                        member.domain.hint_is_stale(member.base, enter.ppn);
                    }
                    Entered::Parked => {}
                    Entered::Failed(MemError::Crash) => return Err(MemError::Crash),
                    other => {
                        if *other == Entered::FalseMatch {
                            member.domain.is_false_match(member.base, enter.ppn, *hash);
                        }
                        member.domain.release(enter.page);
                    }
                }
            }
            result = failure(&outcomes);
        }
        result
    }
}

/// Runs of neighbours among what is in the order of its pages; none is longer than can be read with one call.
fn neighbours<T>(of: &[T], ppn: impl Fn(&T) -> Ppn) -> impl Iterator<Item = &[T]> {
    of.chunk_by(move |a, b| ppn(a).0 + 1 == ppn(b).0).flat_map(|run| run.chunks(BATCH))
}

/// Numbers of a VM's pages in its domain.
fn own<B: Backend>(memory: &Memory<B>, member: &Membership<B>) -> Range<u32> {
    // It fits: the VM has joined.
    member.base..member.base + memory.pmap().len().0 as u32
}

/// Write-protects pages that match nothing, so that they are passed over until they are written. Who is passed
/// over must be found by others: one whose hint another VM's thread has taken for stale meanwhile (it takes the hint
/// first, then has the page looked at again) is not.
fn pass_over<B: Backend>(
    memory: &Memory<B>,
    member: &Membership<B>,
    pages: &mut [(Ppn, PageHash)],
) -> Result<(), MemError> {
    pages.sort_unstable_by_key(|page| page.0);
    for run in pages.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
        memory.protect_unwritten(run[0].0, run.len() as u64)?;
    }
    let unfound = member.domain.unfound(member.base, pages);
    unfound.into_iter().for_each(|ppn| memory.forget_unwritten(ppn));
    Ok(())
}

/// An error that calls for a pause, not for another page.
fn failure(outcomes: &[Entered]) -> Result<(), MemError> {
    for outcome in outcomes {
        if let Entered::Failed(e) = outcome
            && !matches!(e, MemError::Again)
        {
            return Err(e.clone());
        }
    }
    Ok(())
}
