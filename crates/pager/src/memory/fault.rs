//! Serving faults: a page comes home.

use ballast_units::Ppn;

use super::{Counters, Memory};
use crate::backend::{Backend, MemError, PageBuf};
use crate::swap::Stored;
use crate::word::{Busy, State, Word};

/// What the guest met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No page at its home, to a write (or to who knows what).
    Missing,
    /// No page at its home, to a read.
    Reading,
    /// A write to a protected home page.
    Protected,
}

/// Why a fault must be tried again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another transition holds the page.
    Busy,
    /// A discard is pending: read events first.
    Discard,
    /// Zeros are to be mapped there, to be read.
    Zeros,
    /// No free memory.
    Memory,
    /// The host is low and this VM above its target.
    Blocked,
    /// The host kernel had no memory for the page.
    Kernel,
}

/// The outcome of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The guest goes on.
    Served,
    /// Nothing has changed: try again when that has passed.
    Wait(Wait),
    /// The page must be read from this swap slot; hand what was read, if it fits the checksum, to
    /// `swapped_in`. Until then the page is busy and memory for it is reserved.
    Read(Stored),
    /// It cannot be served, and nothing has changed. The guest still waits.
    Failed(MemError),
}

impl<B: Backend> Memory<B> {
    /// Serves one fault as far as it can be served without waiting for anything.
    pub fn fault(&self, ppn: Ppn, access: Access) -> Fault {
        let word = self.pmap.load(ppn);
        if !word.is_idle() {
            return Fault::Wait(Wait::Busy);
        }
        if let Some(outcome) = self.fault_large(ppn, word, access) {
            return match outcome {
                Ok(()) => {
                    Counters::add(&self.counters.faults, 1);
                    Fault::Served
                }
                Err(fault) => fault,
            };
        }
        let outcome = match word.state() {
            State::Resident => self.fault_resident(ppn, word, access),
            // A sampled one gets a page of its own: its zeros would be read unseen.
            State::Untouched
                if access == Access::Reading
                    && !word.sampled()
                    && self.reads_zeros()
                    && !self.regions.is_large(ppn) =>
            {
                self.commons.ask_zeros(ppn);
                return Fault::Wait(Wait::Zeros);
            }
            State::Untouched | State::Ballooned => self.fault_fresh(ppn, word),
            State::Shared | State::Zero => self.fault_shared(ppn, word, access),
            State::Broken => self.fault_broken(ppn, word),
            State::Staged | State::Held => self.fault_staged(ppn, word),
            State::Swapped => self.fault_swapped(ppn, word),
            State::Compressed | State::Filled => self.fault_compressed(ppn, word),
        };
        match outcome {
            Ok(()) => {
                Counters::add(&self.counters.faults, 1);
                Fault::Served
            }
            Err(fault) => fault,
        }
    }

    /// Takes the page's busy bit for filling.
    pub(super) fn claim(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        self.pmap
            .exchange(ppn, word, word.set_busy(Busy::Filling))
            .map_err(|_| Fault::Wait(Wait::Busy))
    }

    /// Gives the page back as it was. After an injected crash nothing more may happen.
    pub(super) fn unclaim(&self, ppn: Ppn, word: Word, charged: u64, e: MemError) -> Fault {
        if e == MemError::Crash {
            return Fault::Failed(e);
        }
        self.pmap.store(ppn, word);
        self.uncharge(charged);
        failed(e)
    }

    /// The page has come home, to be used.
    pub(super) fn came_home(&self, ppn: Ppn, sampled: bool) {
        self.note_used(ppn);
        self.is_home(ppn, sampled);
    }

    /// The page is at home again, whether it is used or not.
    pub(super) fn is_home(&self, ppn: Ppn, sampled: bool) {
        self.commons.unwritten.remove(ppn);
        self.pmap.store(ppn, Word::new(State::Resident));
        self.note_found(ppn);
        if sampled {
            self.was_touched(ppn);
        }
    }

    /// At home by the books: protected by an eviction that was rolled back, served already by an
    /// earlier fault, or punched by the VMM before its discard was announced.
    fn fault_resident(&self, ppn: Ppn, word: Word, access: Access) -> Result<(), Fault> {
        self.claim(ppn, word)?;
        if access != Access::Protected {
            match self.backend.zero(ppn, 1) {
                Ok(_) => {
                    // The VMM had discarded it; it stays charged.
                    Counters::add(&self.counters.discarded, 1);
                    self.came_home(ppn, word.sampled());
                    return Ok(());
                }
                Err(MemError::Exists) => {}
                Err(e) => return Err(self.unclaim(ppn, word, 0, e)),
            }
        }
        self.backend.unprotect(ppn).map_err(|e| self.unclaim(ppn, word, 0, e))?;
        if self.commons.unwritten.contains(ppn) {
            Counters::add(&self.counters.unwritten_faults, 1);
        }
        self.came_home(ppn, word.sampled());
        Ok(())
    }

    /// The bytes are at hand, in the stage.
    fn fault_staged(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        let charge = u64::from(!word.state().charged());
        if charge > 0 {
            self.charge(1).map_err(Fault::Wait)?;
        }
        if let Err(busy) = self.claim(ppn, word) {
            self.uncharge(charge);
            return Err(busy);
        }
        // SAFETY: this thread holds the busy bit of the page whose word names the slot: nobody
        // reuses the slot before that word has changed.
        let page = unsafe { self.stage.page(word.slot()) };
        self.fill(ppn, page).map_err(|e| self.unclaim(ppn, word, charge, e))?;
        if word.state() == State::Held {
            self.came_home(ppn, word.sampled());
            self.stage.free_hold(word.slot());
        } else {
            self.note_missed(ppn);
            self.note_back(ppn);
            self.came_home(ppn, word.sampled());
        }
        Ok(())
    }

    /// A write to what others may share: the kernel copies it once there is room for the copy. (A page that nobody has touched
    /// since it was mapped it has copied before it tells: one for each thread that waits, not booked before it is let on.)
    /// Anything else was met on a mapping that is not there any more.
    fn fault_shared(&self, ppn: Ppn, word: Word, access: Access) -> Result<(), Fault> {
        if access != Access::Protected {
            return self.backend.wake(ppn, 1).map_err(failed);
        }
        self.charge(1).map_err(Fault::Wait)?;
        if self.pmap.exchange(ppn, word, word.set_busy(Busy::Breaking)).is_err() {
            self.uncharge(1);
            return Err(Fault::Wait(Wait::Busy));
        }
        self.let_break(ppn, word).map_err(|e| {
            if e != MemError::Crash {
                self.uncharge(1);
            }
            failed(e)
        })
    }

    /// It has its own page already; a move home that was taken back may have left it protected.
    fn fault_broken(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        if self.pmap.exchange(ppn, word, word.set_busy(Busy::Breaking)).is_err() {
            return Err(Fault::Wait(Wait::Busy));
        }
        let result = self.backend.unprotect(ppn);
        if result != Err(MemError::Crash) {
            self.pmap.store(ppn, word);
        }
        result.map_err(failed)
    }

    fn fault_swapped(&self, ppn: Ppn, word: Word) -> Result<(), Fault> {
        self.charge(1).map_err(Fault::Wait)?;
        if let Err(busy) = self.claim(ppn, word) {
            self.uncharge(1);
            return Err(busy);
        }
        Err(Fault::Read(word.stored()))
    }

    /// The read that `Fault::Read` asked for is done. `Wait` means: keep the bytes, call again.
    /// `None` as bytes means that the read failed for good: the page stays swapped, and its fault
    /// unanswered, for there is nothing true to answer it with.
    pub fn swapped_in(&self, ppn: Ppn, bytes: Option<&PageBuf>) -> Fault {
        let word = self.pmap.load(ppn);
        debug_assert!(word.state() == State::Swapped && word.busy() == Busy::Filling, "{word:?}");
        debug_assert!(bytes.is_none_or(|b| word.stored().sum.fits(b)), "{ppn}: not its contents");
        let Some(bytes) = bytes else {
            self.pmap.store(ppn, word.set_busy(Busy::Idle));
            self.uncharge(1);
            return Fault::Served;
        };
        match self.fill(ppn, bytes) {
            Ok(()) => {
                self.note_back(ppn);
                self.came_home(ppn, word.sampled());
                self.free_slot(word.stored().slot);
                Counters::add(&self.counters.swap_ins, 1);
                Counters::add(&self.counters.swap_waits, 1);
                Counters::add(&self.counters.faults, 1);
                Fault::Served
            }
            Err(e) => failed(e),
        }
    }

    pub(super) fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError> {
        match self.backend.fill(ppn, bytes) {
            // Somebody wrote the RAM file past us: what is there is the guest's.
            Err(MemError::Exists) => self.backend.wake(ppn, 1),
            other => other,
        }
    }
}

pub(super) fn failed(e: MemError) -> Fault {
    match e {
        MemError::Again => Fault::Wait(Wait::Discard),
        MemError::NoMemory => Fault::Wait(Wait::Kernel),
        other => Fault::Failed(other),
    }
}
