//! What a VM needs besides its pmap to share pages: its place in a domain, which pages have not been
//! written since they were last looked at, which copies wait to go home, and the few pages of machine
//! memory that a move home takes while both copies exist.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ballast_units::{Pages, Ppn};

use super::Memory;
use super::ages::Ages;
use super::page_set::PageSet;
use super::probation::Probation;
use crate::backend::Backend;
use crate::sharing::Domain;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock, try_lock};
use crate::word::State;

/// Machine memory set aside in each VM's overhead for pages that are on their way home: the copy
/// there and the page that is still mapped.
pub const MOVING: Pages = Pages(32);

/// One page in so many may be remembered as restless; more are not worth the memory.
const RESTLESS_PART: usize = 64;

/// A VM's place in the domain whose pages it may share.
pub struct Membership<B: Backend> {
    /// The one that it is in.
    pub domain: Arc<Domain<B>>,
    /// Number of its PPN 0 among all pages of the domain.
    pub base: u32,
}

impl<B: Backend> Clone for Membership<B> {
    fn clone(&self) -> Self {
        Membership { domain: self.domain.clone(), base: self.base }
    }
}

pub(super) struct Commons<B: Backend> {
    membership: Mutex<Option<Membership<B>>>,
    /// Write-protected since their contents were hashed: not to be looked at again before the guest
    /// writes to them.
    pub unwritten: PageSet,
    /// See `missed`.
    pub missed: PageSet,
    /// Pages away that left the store. A hint.
    pub left_store: PageSet,
    pub probation: Probation,
    pub ages: Ages,
    /// Broken pages, and perhaps some that were.
    broken: Mutex<BTreeSet<Ppn>>,
    /// Pages that broke and came home, with a part of their hash at the first look since. A page that is
    /// written again and again is not worth sharing each time it equals another.
    restless: Mutex<HashMap<Ppn, Option<u32>>>,
    restless_most: usize,
    /// Pages whose mapping is unknown because the VMM has not answered.
    parked: Mutex<Vec<Ppn>>,
    /// Untouched pages that the guest reads.
    read_untouched: Mutex<BTreeSet<Ppn>>,
    /// One change of the VM's mappings at a time; false when there are to be no more. Never taken by
    /// the fault service.
    turn: Mutex<bool>,
    /// See `Memory::let_pages_move`.
    may_move: AtomicBool,
    /// See `Memory::set_leaving`.
    leaving: AtomicBool,
    /// See `Memory::allow_remaps`.
    remaps_until: AtomicU64,
    homes_until: AtomicU64,
    no_files: AtomicBool,
    /// Pages charged to the VM that are paid from `MOVING` for now.
    debt: AtomicU64,
}

impl<B: Backend> Commons<B> {
    pub fn new(len: Pages) -> Commons<B> {
        Commons {
            membership: Mutex::new(None),
            unwritten: PageSet::new(len),
            missed: PageSet::new(len),
            left_store: PageSet::new(len),
            probation: Probation::new(len),
            ages: Ages::new(len),
            broken: Mutex::new(BTreeSet::new()),
            restless: Mutex::new(HashMap::new()),
            restless_most: (len.0 as usize / RESTLESS_PART).max(64),
            parked: Mutex::new(Vec::new()),
            read_untouched: Mutex::new(BTreeSet::new()),
            turn: Mutex::new(true),
            may_move: AtomicBool::new(true),
            leaving: AtomicBool::new(false),
            remaps_until: AtomicU64::new(u64::MAX),
            homes_until: AtomicU64::new(u64::MAX),
            no_files: AtomicBool::new(false),
            debt: AtomicU64::new(0),
        }
    }

    /// None when the VM is not to be touched any more.
    pub fn turn(&self) -> Option<MutexGuard<'_, bool>> {
        Some(lock(&self.turn)).filter(|open| **open)
    }
    /// As `turn`; none either while somebody else has it.
    pub fn try_turn(&self) -> Option<MutexGuard<'_, bool>> {
        try_lock(&self.turn).filter(|open| **open)
    }
    pub fn close(&self) {
        *lock(&self.turn) = false;
    }
    pub fn add_broken(&self, ppn: Ppn) {
        lock(&self.broken).insert(ppn);
    }
    pub fn park(&self, pages: impl IntoIterator<Item = Ppn>) {
        lock(&self.parked).extend(pages);
    }
    pub fn take_parked(&self) -> Vec<Ppn> {
        std::mem::take(&mut *lock(&self.parked))
    }
    pub fn ask_zeros(&self, ppn: Ppn) {
        lock(&self.read_untouched).insert(ppn);
    }
}

impl<B: Backend> Memory<B> {
    /// None before it has joined a domain, and when it has left.
    pub fn membership(&self) -> Option<Membership<B>> {
        lock(&self.commons.membership).clone()
    }
    pub(crate) fn set_membership(&self, membership: Option<Membership<B>>) {
        *lock(&self.commons.membership) = membership;
    }

    /// The VM's part of the common pages: of one that n pages refer to, each has 1/n (vSphere's "consumed").
    ///
    /// A broken page refers to the common page until it has gone home: until then there are both, and its copy is
    /// charged besides. A copy of the zeros refers to nothing.
    pub fn shared_part(&self) -> Pages {
        let Some(member) = self.membership() else { return Pages::ZERO };
        let (references, common) = member.domain.counts();
        let own = self.pmap.references();
        Pages((own.0 * common.0).div_ceil(references.0.max(1)).min(own.0))
    }

    /// Moves the VM to another domain, if no page of it names one of the old one's. Under the turn, so
    /// that none can any more; `switch` is called before the first can in the new one. If that answers false,
    /// the VM stays where it is. Answers whether it moved. Looks at all words.
    ///
    /// # Errors
    /// The new domain has no numbers left for so many pages; the VM is in none then.
    pub fn change_domain(
        self: &Arc<Self>,
        domain: &Arc<Domain<B>>,
        switch: impl FnOnce() -> bool,
    ) -> Result<bool, crate::sharing::DomainError> {
        let Some(_turn) = self.commons.turn() else { return Ok(false) };
        let in_state = |state| self.pmap.in_state(state);
        if !(in_state(State::Shared) + in_state(State::Broken)).is_zero() {
            return Ok(false);
        }
        // The counts lag behind the words, and a parked page may name one before it is counted.
        if self.pmap.known().any(|p| self.pmap.load(p).store_page().is_some()) || !switch() {
            return Ok(false);
        }
        // Its store is switched: where the new domain is full, it is in none, and shares nothing.
        if let Some(old) = self.membership() {
            old.domain.leave(self);
        }
        domain.join(self)?;
        Ok(true)
    }

    /// Whether the machine page behind a guest page may become another one, by whatever thread's doing. Not
    /// where devices reach guest memory past the page tables: a transfer that is under way would end in the
    /// page that was left. What is in the store then, or shows zeros, stays there until the guest writes to it
    /// (which copies it before any device gets to write to it) or it goes home, which it may; a copy stays
    /// where the kernel made it.
    ///
    /// Eviction and sampling are not held up by it: they are ordered, and whoever orders them knows. A move
    /// that has begun is completed.
    pub fn let_pages_move(&self, may: bool) {
        self.commons.may_move.store(may, Ordering::Release);
    }
    /// See `let_pages_move`. True at first.
    pub fn may_move(&self) -> bool {
        self.commons.may_move.load(Ordering::Acquire)
    }
    /// Whether it is to go to another domain. From then on none of its pages enters the store, by whatever thread's doing: it
    /// would be shared with whom it is to part from, and would keep it there.
    pub fn set_leaving(&self, leaving: bool) {
        self.commons.leaving.store(leaving, Ordering::Release);
    }
    /// See `set_leaving`. False at first.
    pub fn is_leaving(&self) -> bool {
        self.commons.leaving.load(Ordering::Acquire)
    }
    /// Changes of mappings that add to them, however many were made: up to so many, counted from the first. Each may cost
    /// the VMM mappings, of which the kernel lets it have only so many: without, it cannot even start a thread. Pages go
    /// home a little longer, up to `homes_until`: one from within a run splits it, which adds two. What must go
    /// home does so all the same.
    pub fn allow_remaps(&self, until: u64, homes_until: u64) {
        self.commons.remaps_until.store(until, Ordering::Relaxed);
        self.commons.homes_until.store(homes_until, Ordering::Relaxed);
    }
    /// Its VMM has no descriptor left for the files to map: no more is asked of it, by whomever, until `allow_remaps`.
    pub(super) fn has_no_files(&self) {
        self.commons.remaps_until.store(0, Ordering::Relaxed);
        self.commons.no_files.store(true, Ordering::Relaxed);
    }
    /// Whether it had none since this was asked last.
    pub fn take_no_files(&self) -> bool {
        self.commons.no_files.swap(false, Ordering::Relaxed)
    }
    /// Whether `n` more may be made. None where what is mapped would be taken for the VM's own copies: those are charged,
    /// whatever the budget, and brought home; nor where what is there could be lost.
    pub(crate) fn may_remap(&self, n: u64) -> bool {
        let made = self.counters.remaps.load(Ordering::Relaxed);
        self.backend.sees_copies()
            && !self.backend.may_leave_holes()
            && made.saturating_add(n) <= self.commons.remaps_until.load(Ordering::Relaxed)
    }
    /// Whether `n` pages may go home that could as well stay where they are.
    pub(crate) fn may_go_home(&self, n: u64) -> bool {
        let made = self.counters.remaps.load(Ordering::Relaxed);
        made.saturating_add(n) <= self.commons.homes_until.load(Ordering::Relaxed)
    }
    /// Whether its VMM lets other pages be mapped: into the store, or of zeros.
    pub(crate) fn can_map_more(&self) -> bool {
        self.backend.can_remap() && self.may_remap(1)
    }
    /// Whether what the guest reads and never wrote is backed by the page of zeros. Not while the shim does not answer:
    /// what is asked for would only be waited for; nor where the VMM has no mappings to spare.
    pub(super) fn reads_zeros(&self) -> bool {
        self.may_move() && self.can_map_more() && !self.is_parked()
    }

    /// Ends all changes of mapping, by whatever thread: those of other VMs' pages included.
    pub fn close(&self) {
        self.commons.close();
    }

    /// Up to `n` broken pages; those that do not go home are to be given back. What went home another way is passed over.
    pub fn take_broken(&self, n: usize) -> Vec<Ppn> {
        let mut broken = lock(&self.commons.broken);
        let mut taken = Vec::with_capacity(n);
        while taken.len() < n
            && let Some(ppn) = broken.pop_first()
        {
            let word = self.pmap.load(ppn);
            if word.state() == State::Broken || !word.is_idle() {
                taken.push(ppn);
            }
        }
        taken
    }
    /// Pages of `take_broken` that did not go home, to be taken again.
    pub fn give_back_broken(&self, pages: impl IntoIterator<Item = Ppn>) {
        lock(&self.commons.broken).extend(pages);
    }
    /// A page that broke has come home.
    pub(super) fn has_been_written(&self, ppn: Ppn) {
        let mut restless = lock(&self.commons.restless);
        if restless.len() >= self.commons.restless_most {
            // Most of these left long ago, or rest by now.
            restless.clear();
        }
        restless.insert(ppn, None);
    }
    /// Whether there are any of which `is_restless` could say so.
    pub(crate) fn has_restless(&self) -> bool {
        !lock(&self.commons.restless).is_empty()
    }
    /// Whether a page broke and has not been seen unchanged since: such a one is left alone. This
    /// look counts as one.
    pub(crate) fn is_restless(&self, ppn: Ppn, hash: u64) -> bool {
        let mut restless = lock(&self.commons.restless);
        let Some(seen) = restless.get_mut(&ppn) else { return false };
        let hash = hash as u32;
        if *seen == Some(hash) {
            restless.remove(&ppn);
            return false;
        }
        *seen = Some(hash);
        true
    }
    /// Broken pages that wait to go home.
    pub(crate) fn broken_waiting(&self) -> usize {
        lock(&self.commons.broken).len()
    }
    /// Whether a page is known not to have been written since it was hashed: it is protected for that.
    pub fn is_unwritten(&self, ppn: Ppn) -> bool {
        self.commons.unwritten.contains(ppn)
    }
    /// Untouched pages that the guest waits to read.
    pub fn take_reads_of_untouched(&self) -> Vec<Ppn> {
        std::mem::take(&mut *lock(&self.commons.read_untouched)).into_iter().collect()
    }
    /// Whether there are any to be taken.
    pub(crate) fn has_reads_of_untouched(&self) -> bool {
        !lock(&self.commons.read_untouched).is_empty()
    }
    /// Whether the mapping of a page is unknown: `settle_parked` looks it up.
    pub fn is_parked(&self) -> bool {
        !lock(&self.commons.parked).is_empty()
    }

    /// Charged pages that the ledger does not have on this VM's account: they are paid from `MOVING` until
    /// there is free memory for them.
    pub fn owed(&self) -> Pages {
        Pages(self.commons.debt.load(Ordering::Relaxed))
    }

    /// How many pages may be on their way home now.
    pub(super) fn room_to_move(&self) -> u64 {
        MOVING.0.saturating_sub(self.commons.debt.load(Ordering::Relaxed))
    }

    /// Charges pages that are paid from what is set aside for moves; under the turn.
    pub(super) fn charge_moving(&self, n: u64) {
        self.commons.debt.fetch_add(n, Ordering::Relaxed);
        self.charged.fetch_add(n, Ordering::Relaxed);
    }

    /// What is released pays the debt first. Answers what is left to release.
    pub(super) fn pay_debt(&self, n: u64) -> u64 {
        let mut paid = 0;
        let _ = self.commons.debt.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |debt| {
            paid = debt.min(n);
            (paid > 0).then(|| debt - paid)
        });
        n - paid
    }

    /// Pays what free memory allows.
    pub(super) fn settle_debt(&self) {
        while self.commons.debt.load(Ordering::Relaxed) > 0
            && self.host.ledger.try_reserve(Pages(1))
        {
            if self.pay_debt(1) == 1 {
                self.host.ledger.release(Pages(1));
            }
        }
    }
}
