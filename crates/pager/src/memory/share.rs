//! A page leaves its home for a page of the store that equals it (OSDI'02 s.4.1). The order that must
//! hold: write-protect; compare all of it; put the store's page over it, which is registered and
//! protected in the same step; book it; punch the home page; wake who waits. A write in the instant
//! between mapping and protection is copied by the kernel: right data, found by `copied` and booked
//! as Broken.

use ballast_sharing::{PageHash, StorePage};
use ballast_units::{Pages, Ppn};

use super::{Counters, Membership, Memory};
use crate::backend::{Backend, Errno, MemError, PageBuf, Place, Remap};
use crate::sync::MutexGuard;
use crate::word::{Busy, State, Word};

/// What a page must hold to enter the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// What the store's page holds.
    Common,
    /// Something with this hash: the store's page is free, and will hold it from now on.
    New(PageHash),
}

/// A page that is to enter the store. The caller has a reference to the store's page, or has
/// allocated it; either becomes the pmap word's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enter {
    /// The page of the VM, at home.
    pub ppn: Ppn,
    /// The page of the store that takes its place.
    pub page: StorePage,
    /// What both must hold for that.
    pub contents: Contents,
}

/// What became of it. Unless it is in the store, the caller has its reference again (of a page that
/// was to be new and is not published: the allocation).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entered {
    /// It is mapped from the store; its home page is free.
    Shared,
    /// Not at home, or held by another transition; or none of its VM may enter.
    NotEligible,
    /// It holds something else by now.
    Changed,
    /// Another content with the same hash.
    FalseMatch,
    /// It was to be a new page of the store, which has one like it by now.
    Doubled,
    /// Why not. It is where it was.
    Failed(MemError),
    /// Where it is mapped is not known yet; the reference stays with the pmap word.
    Parked,
}

/// Pages of the store that are read to be compared at once.
const COMPARED: usize = 16;

/// Pages to work in.
pub struct Scratch {
    pub(crate) pages: Vec<PageBuf>,
    others: Vec<PageBuf>,
}

impl Scratch {
    /// Pages that are read together.
    pub(crate) const TOGETHER: usize = 64;
    /// Its memory.
    pub(crate) const PAGES: Pages = Pages((Self::TOGETHER + COMPARED) as u64);
}

impl Default for Scratch {
    fn default() -> Scratch {
        let zeros = |n| vec![[0; ballast_units::PAGE_SIZE]; n];
        Scratch { pages: zeros(Self::TOGETHER), others: zeros(COMPARED) }
    }
}

impl<B: Backend> Memory<B> {
    /// Moves pages into the store, in the order given; neighbours that go to neighbouring pages of
    /// the store are mapped with one call. Answers one outcome for each.
    pub fn enter_store(
        &self,
        member: &Membership<B>,
        wanted: &[Enter],
        scratch: &mut Scratch,
    ) -> Vec<Entered> {
        self.enter_in_turn(self.commons.turn(), member, wanted, scratch)
    }

    /// As `enter_store`, by a thread of another VM: nothing enters while somebody else changes this one's
    /// mappings, who may be waiting for its VMM.
    pub(crate) fn enter_store_if_free(
        &self,
        member: &Membership<B>,
        wanted: &[Enter],
        scratch: &mut Scratch,
    ) -> Vec<Entered> {
        self.enter_in_turn(self.commons.try_turn(), member, wanted, scratch)
    }

    fn enter_in_turn(
        &self,
        turn: Option<MutexGuard<'_, bool>>,
        member: &Membership<B>,
        wanted: &[Enter],
        scratch: &mut Scratch,
    ) -> Vec<Entered> {
        // It may have moved to another domain since it was looked up.
        let still = |now: Membership<B>| std::sync::Arc::ptr_eq(&now.domain, &member.domain);
        let may = self.may_move() && !self.is_leaving() && self.may_remap(wanted.len() as u64);
        if turn.is_none() || !may || !self.membership().is_some_and(still) {
            return vec![Entered::NotEligible; wanted.len()];
        }
        match self.can_change() {
            Ok(true) => {}
            Ok(false) => return vec![Entered::NotEligible; wanted.len()],
            Err(e) => return vec![Entered::Failed(e); wanted.len()],
        }
        let mut outcomes: Vec<Entered> =
            wanted.iter().map(|enter| self.claim_home(enter)).collect();
        for run in neighbours(wanted, &outcomes) {
            self.prepare(member, &wanted[run.clone()], &mut outcomes[run], scratch);
            if outcomes.contains(&Entered::Failed(MemError::Crash)) {
                return vec![Entered::Failed(MemError::Crash); wanted.len()];
            }
        }
        let mut runs = Vec::new();
        let mut indices = Vec::new();
        for (i, enter) in wanted.iter().enumerate() {
            if outcomes[i] == Entered::Shared {
                Remap::push(&mut runs, enter.ppn, Place::Store(enter.page));
                indices.push(i);
            }
        }
        if runs.is_empty() {
            return outcomes;
        }
        let (done, result) = self.remap(&runs);
        if result == Err(MemError::Crash) {
            return vec![Entered::Failed(MemError::Crash); wanted.len()];
        }
        let (whole, rest) = runs.split_at(done);
        let mut reached = Vec::with_capacity(indices.len());
        for runs in whole.chunk_by(|a, b| a.first.0 + a.n == b.first.0) {
            reached.extend(self.entered(runs));
            if reached.last() == Some(&Entered::Failed(MemError::Crash)) {
                return vec![Entered::Failed(MemError::Crash); wanted.len()];
            }
        }
        reached.extend(self.not_entered(rest, result.err().unwrap_or(MemError::Fixed)));
        for (i, outcome) in indices.into_iter().zip(reached) {
            outcomes[i] = outcome;
        }
        let shared = outcomes.iter().filter(|o| **o == Entered::Shared).count();
        Counters::add(&self.counters.shares, shared as u64);
        outcomes
    }

    /// Claims a page. `Shared` stands for success here and in `prepare`.
    fn claim_home(&self, enter: &Enter) -> Entered {
        let home = self.pmap.load(enter.ppn);
        if home.state() != State::Resident || !home.is_idle() || home.sampled() {
            return Entered::NotEligible;
        }
        let busy = Word::with_slot(State::Resident, u64::from(enter.page.get()));
        if self.claim_small(enter.ppn, home, busy.set_busy(Busy::Sharing)) {
            Entered::Shared
        } else {
            Entered::NotEligible
        }
    }

    /// Protects claimed neighbours and looks at what they hold. What cannot enter stays at home, with
    /// the reason in its outcome; after a crash nothing more is done.
    fn prepare(
        &self,
        member: &Membership<B>,
        wanted: &[Enter],
        outcomes: &mut [Entered],
        scratch: &mut Scratch,
    ) {
        let (first, n) = (wanted[0].ppn, wanted.len());
        let pages = &mut scratch.pages[..n];
        let protected = self
            .backend
            .protect_run(first, n as u64)
            .and_then(|()| self.backend.read_homes(first, pages));
        if let Err(e) = protected {
            for (enter, outcome) in wanted.iter().zip(outcomes) {
                *outcome = self.refused(enter.ppn, Entered::Failed(e.clone()));
                if *outcome == Entered::Failed(MemError::Crash) {
                    return;
                }
            }
            return;
        }
        let mut at = 0;
        while at < n {
            let run = at..at + run_in_store(&wanted[at..], &pages[at..], member);
            let why = match wanted[at].contents {
                Contents::Common => {
                    let others = &mut scratch.others[..run.len()];
                    compare(member, wanted[at].page, &pages[run.clone()], others)
                }
                Contents::New(hash) if member.domain.hash(&pages[at]) != hash => {
                    vec![Err(Entered::Changed)]
                }
                Contents::New(_) => publish(member, &wanted[run.clone()], &pages[run.clone()]),
            };
            at = run.end;
            for (i, why) in run.zip(why) {
                if let Err(why) = why {
                    outcomes[i] = self.refused(wanted[i].ppn, why);
                    if outcomes[i] == Entered::Failed(MemError::Crash) {
                        return;
                    }
                }
            }
        }
    }

    /// The page stays at home; why.
    fn refused(&self, ppn: Ppn, why: Entered) -> Entered {
        match why {
            Entered::Failed(MemError::Crash) => why,
            why => self.stays(ppn).map_or_else(Entered::Failed, |()| why),
        }
    }

    /// The page stays at home, which nobody has touched. Err only when the manager dies.
    pub(super) fn stays(&self, ppn: Ppn) -> Result<(), MemError> {
        self.lift(ppn)?;
        // Afterwards: what is marked and not protected would be passed over though it is written.
        self.commons.unwritten.remove(ppn);
        self.pmap.store(ppn, Word::new(State::Resident));
        Ok(())
    }

    /// The mapping of runs that lie side by side is changed: books them and frees the home pages.
    fn entered(&self, runs: &[Remap]) -> Vec<Entered> {
        let (first, n) = (runs[0].first, runs.iter().map(|run| run.n).sum());
        let park =
            |e: MemError| runs.iter().flat_map(|run| self.park_run(run, e.clone())).collect();
        let copied = match self.backend.copied(first, n) {
            Ok(copied) => copied,
            Err(e) => return park(e),
        };
        let mut words = Vec::with_capacity(copied.len());
        for run in runs {
            let Place::Store(page) = run.to else { return Vec::new() };
            for at in u64::from(page.get())..u64::from(page.get()) + run.n {
                let state = if copied[words.len()] { State::Broken } else { State::Shared };
                words.push(Word::with_slot(state, at));
            }
        }
        let booked = || (first.0..).map(Ppn).zip(words.iter());
        for (ppn, word) in booked() {
            self.commons.unwritten.remove(ppn);
            self.pmap.store(ppn, word.set_busy(Busy::Sharing));
        }
        if let Err(e) = self.backend.punch(first, n) {
            return park(e);
        }
        let mut freed = 0;
        for (ppn, word) in booked() {
            self.pmap.store(ppn, *word);
            if word.state() == State::Broken {
                // The page that its home gave back is the copy's.
                Counters::add(&self.counters.breaks, 1);
                self.commons.add_broken(ppn);
            } else {
                freed += 1;
            }
        }
        self.uncharge(freed);
        match self.backend.wake(first, n) {
            Err(MemError::Crash) => vec![Entered::Failed(MemError::Crash); n as usize],
            _ => vec![Entered::Shared; n as usize],
        }
    }

    /// The mappings of these runs were not changed, or in part.
    fn not_entered(&self, runs: &[Remap], e: MemError) -> Vec<Entered> {
        let pages = runs.iter().map(|run| run.n as usize).sum();
        if matches!(e, MemError::Unanswered | MemError::Gone) {
            return runs.iter().flat_map(|run| self.park_run(run, e.clone())).collect();
        }
        let mut outcomes = Vec::with_capacity(pages);
        let settled = self.settle_runs(runs, |change| {
            outcomes.push(match change {
                None => Entered::Parked,
                Some((_, after)) if after.store_page().is_some() => Entered::Shared,
                Some(_) => Entered::Failed(e.clone()),
            });
        });
        match settled {
            Ok(()) => outcomes,
            Err(dead) => vec![Entered::Failed(dead); pages],
        }
    }

    fn park_run(&self, run: &Remap, e: MemError) -> Vec<Entered> {
        if e == MemError::Crash {
            return vec![Entered::Failed(e); run.n as usize];
        }
        self.commons.park(run.pages());
        vec![Entered::Parked; run.n as usize]
    }

    /// Changes mappings, and counts it.
    pub(super) fn remap(&self, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        self.count_remap(runs.len(), || self.backend.remap(runs))
    }

    /// Of `n` runs, how many are done, and why no more: of those that are not, mappings may have been made.
    pub(super) fn count_remap(
        &self,
        n: usize,
        change: impl FnOnce() -> (usize, Result<(), MemError>),
    ) -> (usize, Result<(), MemError>) {
        let begun = std::time::Instant::now();
        let (made, result) = change();
        Counters::add(&self.counters.remap_ns, begun.elapsed().as_nanos() as u64);
        let asked = !matches!(result, Ok(()) | Err(MemError::Fixed));
        Counters::add(&self.counters.remaps, if asked { n } else { made } as u64);
        match result {
            Err(MemError::Os { source: Errno(libc::EMFILE), .. }) => {
                self.has_no_files();
                (made, Err(MemError::NoMemory))
            }
            result => (made, result),
        }
    }

    /// Write-protects pages whose contents did not change since they were hashed, so that they need
    /// not be looked at again before they are written. A write in between the hash and this is missed:
    /// then the page is looked up under an old hash, which is found out when that matches.
    ///
    /// # Errors
    /// Of the protection; none of them is passed over then.
    pub fn protect_unwritten(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        // A mapping that is being changed is not registered for a moment, and cannot be protected.
        let Some(_turn) = self.commons.turn() else { return Ok(()) };
        let pages = (first.0..first.0 + n).map(Ppn);
        for ppn in pages.clone() {
            // Before the protection: a fault that lifts it removes the bit again.
            self.commons.unwritten.insert(ppn);
        }
        if let Err(e) = self.backend.protect_run(first, n) {
            for ppn in pages {
                self.commons.unwritten.remove(ppn);
            }
            return match e {
                MemError::Again => Ok(()),
                e => Err(e),
            };
        }
        Ok(())
    }
    /// Lifts the protection of up to `most` pages from `from` on that have it for that alone: their next writes meet no
    /// fault, and they are looked at again. What is busy, or under a discard, keeps it. Answers where to go on; None at
    /// the end.
    ///
    /// # Errors
    /// The VMM's, or of an injected crash: the page is as it was.
    pub fn lift_unwritten(&self, from: Ppn, most: u64) -> Result<Option<Ppn>, MemError> {
        let end = Ppn(self.pmap.len().0);
        let claim = |ppn: Ppn| {
            let home = self.pmap.load(ppn);
            let may = home.state() == State::Resident && home.is_idle();
            let busy = home.set_busy(Busy::Evicting);
            (may && self.claim_small(ppn, home, busy)).then_some(home)
        };
        let (mut at, mut left) = (from, most);
        while left > 0 {
            let Some(first) = self.commons.unwritten.next(at, end) else { return Ok(None) };
            let is_next = |p: &u64| *p < end.0 && self.commons.unwritten.contains(Ppn(*p));
            let homes: Vec<Word> = (first.0..first.0 + left.min(Scratch::TOGETHER as u64))
                .take_while(is_next)
                .map_while(|p| claim(Ppn(p)))
                .collect();
            let n = homes.len() as u64;
            // One that cannot be claimed is left alone.
            let passed = n.max(1);
            (at, left) = (Ppn(first.0 + passed), left - passed);
            if n == 0 {
                continue;
            }
            let lifted = self.backend.unprotect_run(first, n);
            if lifted == Err(MemError::Crash) {
                return Err(MemError::Crash);
            }
            for (ppn, home) in (first.0..).map(Ppn).zip(homes) {
                if lifted.is_ok() {
                    self.commons.unwritten.remove(ppn);
                }
                self.pmap.store(ppn, home);
            }
            match lifted {
                Ok(()) | Err(MemError::Again) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(Some(at))
    }

    /// The page is to be looked at again.
    pub(crate) fn forget_unwritten(&self, ppn: Ppn) {
        self.commons.unwritten.remove(ppn);
    }
}

/// Runs of neighbours among those that were claimed, as indices; none is longer than `Scratch::TOGETHER`.
fn neighbours(wanted: &[Enter], outcomes: &[Entered]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (i, enter) in wanted.iter().enumerate() {
        if outcomes[i] != Entered::Shared {
            continue;
        }
        match runs.last_mut() {
            Some(run)
                if run.end == i
                    && run.len() < Scratch::TOGETHER
                    && wanted[i - 1].ppn.0 + 1 == enter.ppn.0 =>
            {
                run.end += 1;
            }
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// How many pages from the first on go to neighbouring pages of the store, and are dealt with together: those that are to
/// equal them; or those that hold what the store is to get. One at least.
fn run_in_store<B: Backend>(wanted: &[Enter], pages: &[PageBuf], member: &Membership<B>) -> usize {
    let first = u64::from(wanted[0].page.get());
    let side_by_side = wanted.iter().zip(pages).zip(first..);
    let run = side_by_side.take_while(|((enter, page), at)| {
        u64::from(enter.page.get()) == *at
            && match (wanted[0].contents, enter.contents) {
                (Contents::Common, Contents::Common) => *at - first < COMPARED as u64,
                (Contents::New(_), Contents::New(hash)) => member.domain.hash(page) == hash,
                _ => false,
            }
    });
    run.count().max(1)
}

/// Whether protected pages equal neighbouring pages of the store, which are read into `others`.
fn compare<B: Backend>(
    member: &Membership<B>,
    first: StorePage,
    pages: &[PageBuf],
    others: &mut [PageBuf],
) -> Vec<Result<(), Entered>> {
    let domain = &member.domain;
    if let Err(e) = domain.read_run(first, others) {
        return vec![Err(Entered::Failed(e)); pages.len()];
    }
    let equal = |(page, other): (&PageBuf, &PageBuf)| match page == other {
        true => Ok(()),
        false if domain.hash(page) == domain.hash(other) => Err(Entered::FalseMatch),
        false => Err(Entered::Changed),
    };
    pages.iter().zip(&*others).map(equal).collect()
}

/// Writes protected pages to neighbouring new pages of the store.
fn publish<B: Backend>(
    member: &Membership<B>,
    wanted: &[Enter],
    pages: &[PageBuf],
) -> Vec<Result<(), Entered>> {
    let hashes = wanted.iter().filter_map(|enter| match enter.contents {
        Contents::New(hash) => Some(hash),
        Contents::Common => None,
    });
    let published = member.domain.publish(wanted[0].page, hashes, pages);
    let outcome = |published: Result<bool, MemError>| match published {
        Ok(true) => Ok(()),
        Ok(false) => Err(Entered::Doubled),
        Err(e) => Err(Entered::Failed(e)),
    };
    published.into_iter().map(outcome).collect()
}
