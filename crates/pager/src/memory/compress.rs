//! The step after eviction: a page in the stage is compressed, and back from there it comes without
//! any I/O.
//!
//! The stage holds the page until the word names its slot in the tier, and the tier until the word names
//! the stage again: at no moment is a page in one place that nothing names.

use std::time::Instant;

use ballast_compress::{Compressor, Damaged, Filling, Place};
use ballast_units::{Pages, Ppn};

use super::fault::Fault;
use super::{Counters, Memory};
use crate::backend::{Backend, MemError, PageBuf};
use crate::sync::Ordering;
use crate::word::{Busy, State, Word};

/// What became of a page that was to be compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compressed {
    /// It repeats one number, and takes no memory. Its stage slot is free.
    Filled,
    /// It is in the tier, which has taken a page of machine memory for it if `new_frame`. Its stage slot
    /// is free.
    #[allow(missing_docs, reason = "told with the variant")]
    Stored { new_frame: bool },
    /// It does not become small enough; it is in the stage still.
    TooLarge,
    /// The tier is full, or the host has no page for it; it is in the stage still.
    NoRoom,
    /// It is on its way home, or there: its stage slot is in use for as long as its word names it.
    Left,
}

/// Why a page did not go back from the tier to the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotBack {
    /// It left the slot, or is about to.
    Left,
    /// It stays there, unread.
    Damaged(Ppn, Damaged),
}

impl<B: Backend> Memory<B> {
    /// Compresses a page that was evicted into `stage_slot`. By the thread that owns the slot. Without a compressor only what
    /// needs none is kept, a page that repeats one number: all others are too large.
    pub fn compress(&self, ppn: Ppn, stage_slot: u64, with: Option<&mut Compressor>) -> Compressed {
        let word = self.pmap.load(ppn);
        if word.state() != State::Staged || word.slot() != stage_slot || !word.is_idle() {
            return Compressed::Left;
        }
        // SAFETY: this thread filled the slot, and nobody writes to it before it is used again.
        let page = unsafe { self.stage.page(stage_slot) };
        if self.tier.settings().same_filled
            && let Some(filling) = Filling::of(page)
        {
            let filled = Word::with_slot(State::Filled, filling.bits()).set_sampled(word.sampled());
            if self.pmap.exchange(ppn, word, filled).is_err() {
                return Compressed::Left;
            }
            Counters::add(&self.counters.filled, 1);
            return Compressed::Filled;
        }
        let Some(with) = with else { return Compressed::TooLarge };
        let Some(bytes) = with.compress(page, self.tier.most()) else {
            Counters::add(&self.counters.incompressible, 1);
            return Compressed::TooLarge;
        };
        let charge = || self.charge_frame();
        let Some(taken) = self.tier.put(ppn, bytes, charge, || self.uncharge(1)) else {
            return Compressed::NoRoom;
        };
        let stored =
            Word::with_slot(State::Compressed, taken.place.bits()).set_sampled(word.sampled());
        if self.pmap.exchange(ppn, word, stored).is_err() {
            self.free_place(taken.place);
            return Compressed::Left;
        }
        Counters::add(&self.counters.compressed, 1);
        Compressed::Stored { new_frame: taken.new_frame }
    }

    /// Moves a compressed page into `stage_slot`, which is free and the caller's, on its way to swap. By the
    /// reclaim thread alone. Answers which page it was.
    ///
    /// # Errors
    /// The page was on its way elsewhere, or has left; or its slot holds something that does not decompress. It stays.
    pub fn write_back(&self, place: Place, stage_slot: u64) -> Result<Ppn, NotBack> {
        let owner = self.tier.owner(place).filter(|p| p.0 < self.pmap.len().0);
        let ppn = owner.ok_or(NotBack::Left)?;
        let word = self.pmap.load(ppn);
        let names = word.state() == State::Compressed && word.slot() == place.bits();
        if !names || !word.is_idle() {
            return Err(NotBack::Left);
        }
        self.pmap.exchange(ppn, word, word.set_busy(Busy::Evicting)).map_err(|_| NotBack::Left)?;
        // SAFETY: the slot is free and the caller's, so no word names it and nobody reads it.
        let page = unsafe { self.stage.page_mut(stage_slot) };
        if let Err(e) = self.tier.read(ppn, place, page) {
            self.pmap.store(ppn, word);
            return Err(NotBack::Damaged(ppn, e));
        }
        let staged = Word::with_slot(State::Staged, stage_slot).set_sampled(word.sampled());
        self.pmap.store(ppn, staged);
        self.free_place(place);
        Counters::add(&self.counters.written_back, 1);
        Ok(ppn)
    }

    /// A page of machine memory for the tier, taken only if one is free.
    fn charge_frame(&self) -> bool {
        let got = self.host.ledger.try_reserve(Pages(1));
        if got {
            self.charged.fetch_add(1, Ordering::Relaxed);
        }
        got
    }

    /// Frees a slot that no word names.
    pub(super) fn free_place(&self, place: Place) {
        self.tier.release(place, || self.uncharge(1));
    }

    /// Frees the slot that a word named, if it did.
    pub(super) fn free_named(&self, word: Word) {
        if word.state() == State::Compressed
            && let Some(place) = Place::from_bits(word.slot())
        {
            self.free_place(place);
        }
    }

    /// The page is in memory, in fewer bytes.
    pub(super) fn fault_compressed(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        let begun = Instant::now();
        self.charge(1).map_err(Fault::Wait)?;
        if let Err(busy) = self.claim(ppn, word) {
            self.uncharge(1);
            return Err(busy);
        }
        let mut page: PageBuf = [0; ballast_units::PAGE_SIZE];
        if word.state() == State::Filled {
            Filling::from_bits(word.slot()).fill(&mut page);
        } else {
            let place = Place::from_bits(word.slot());
            let read = place.map(|place| self.tier.read(ppn, place, &mut page));
            if read != Some(Ok(())) {
                return Err(self.unclaim(ppn, word, 1, MemError::Damaged { ppn }));
            }
        }
        self.fill(ppn, &page).map_err(|e| self.unclaim(ppn, word, 1, e))?;
        // One that repeats a number may have been away for long: it never goes on to swap.
        if word.state() == State::Compressed {
            self.note_missed(ppn);
            if let Some(place) = Place::from_bits(word.slot()) {
                self.tier.wanted_back(place);
            }
        }
        self.note_back(ppn);
        self.came_home(ppn, word.sampled());
        self.free_named(word);
        Counters::add(&self.counters.decompressed, 1);
        Counters::add(&self.counters.decompress_ns, begun.elapsed().as_nanos() as u64);
        Ok(())
    }
}
