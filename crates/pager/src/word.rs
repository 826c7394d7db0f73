//! The pmap word: where one guest page is, in 64 bits.
//!
//! ```text
//!  63                                   8 7   6   5   4 3       0
//! +--------------------------------------+-+---+-------+---------+
//! | payload: a place, or a number        |b| S | busy  |  state  |
//! +--------------------------------------+-+---+-------+---------+
//! ```
//!
//! The payload of a swapped page:
//!
//! ```text
//!  63                        38 37                              8
//! +----------------------------+--------------------------------+
//! | checksum, 0: none          | slot of the VM's swap space    |
//! +----------------------------+--------------------------------+
//! ```
//!
//! `b` is the third bit of busy. `S` is set while the page is one of the sampled pages of the current
//! period and has not been touched. A word of zero is an untouched, idle page, so a fresh pmap file is
//! a right one.

use std::fmt;

use ballast_sharing::StorePage;

use crate::swap::{SLOT_BITS, Stored};

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Never backed, or found all zero and dropped: reads as zeros.
    Untouched = 0,
    /// In its home page: the same offset of the VM's RAM file.
    Resident = 1,
    /// Payload: page of the store, mapped over its home and write-protected.
    Shared = 2,
    /// An anonymous page in the VMM, copied from the store when the guest wrote. Payload: the page of
    /// the store that is still mapped there, or `NO_STORE_PAGE`.
    Broken = 3,
    /// Payload: slot of the VM's compressed tier.
    Compressed = 4,
    /// Payload: slot of the VM's swap space, and the checksum of what is there.
    Swapped = 5,
    /// Given up by the guest: contents are void.
    Ballooned = 6,
    /// Payload: stage slot, on its way to the swap file.
    Staged = 7,
    /// Payload: stage slot, out of its home only so that the next access is seen (sampling). Still
    /// charged to the VM.
    Held = 8,
    /// Read before it was ever written: the page of zeros that all VMs read is mapped there,
    /// write-protected.
    Zero = 9,
    /// Payload: the number that the whole page repeats.
    Filled = 10,
}

/// Payload of a Broken page that was copied from the page of zeros.
pub const NO_STORE_PAGE: u64 = u32::MAX as u64;

impl State {
    /// Each state, at the index that is its number.
    pub const ALL: [State; 11] = [
        State::Untouched,
        State::Resident,
        State::Shared,
        State::Broken,
        State::Compressed,
        State::Swapped,
        State::Ballooned,
        State::Staged,
        State::Held,
        State::Zero,
        State::Filled,
    ];

    /// Whether an idle page in this state holds one page of the VM's machine memory.
    pub const fn charged(self) -> bool {
        matches!(self, State::Resident | State::Held | State::Broken)
    }
}

/// Which transition holds the page. Recovery after a crash finishes or rolls back by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Busy {
    /// None does: whoever exchanges the word has the page.
    Idle = 0,
    /// Leaving its home: write-protected; contents cannot change.
    Evicting = 1,
    /// Coming home: the home page may be there already and hold newer bytes.
    Filling = 2,
    /// Being dropped because the guest gave it up.
    Discarding = 3,
    /// Another mapping is being put over its home (payload: the store's page that it will show, or
    /// shows already). As Shared or Broken: the home page is yet to be punched. Write-protected.
    Sharing = 4,
    /// A shared or broken page on its way home: its home page may be there, perhaps half written,
    /// and its mapping may be home already. Write-protected.
    Homing = 5,
    /// Its protection is being lifted, so that the kernel copies it.
    Breaking = 6,
}

/// One pmap word.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word(u64);

const STATE_MASK: u64 = 0xf;
const BUSY_SHIFT: u32 = 4;
/// The third bit of busy lies apart, where version 1 of the pmap had a zero.
const BUSY_HIGH: u64 = 1 << 7;
const BUSY_MASK: u64 = 0x3 << BUSY_SHIFT | BUSY_HIGH;
const SAMPLED: u64 = 1 << 6;
const PAYLOAD_SHIFT: u32 = 8;

/// A word whose bits mean nothing: the pmap is damaged, or was written by a newer version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pmap word {0:#x} names no page state, or a page that no store has")]
pub struct BadWord(pub u64);

impl Word {
    /// Idle and not sampled, as a hole of the file reads.
    pub const UNTOUCHED: Word = Word(0);

    /// Idle, not sampled, without a payload.
    pub const fn new(state: State) -> Word {
        Word(state as u64)
    }
    /// Idle and not sampled. What `slot`, which is below 2^56, means depends on the state.
    pub const fn with_slot(state: State, slot: u64) -> Word {
        Word(state as u64 | slot << PAYLOAD_SHIFT)
    }
    /// Idle and not sampled.
    pub const fn swapped(stored: Stored) -> Word {
        Word::with_slot(State::Swapped, stored.payload())
    }
    /// Checks bits that come from a file.
    ///
    /// # Errors
    /// They are no word: of no state, with bits that it does not have, or with the number of a page that no store has.
    pub fn from_bits(bits: u64) -> Result<Word, BadWord> {
        let no_busy = bits & BUSY_MASK == BUSY_MASK;
        if bits & STATE_MASK > State::Filled as u64 || no_busy {
            return Err(BadWord(bits));
        }
        let word = Word(bits);
        let of_zeros = word.state() == State::Broken && word.slot() == NO_STORE_PAGE;
        // It would count as no reference, and its page be taken for one of zeros.
        if word.refers_to_store() && word.store_page().is_none() && !of_zeros {
            return Err(BadWord(bits));
        }
        Ok(word)
    }
    /// For words that were checked when the pmap was opened, or that this process wrote.
    pub(crate) const fn trusted(bits: u64) -> Word {
        Word(bits)
    }
    /// As they are in the file.
    pub const fn bits(self) -> u64 {
        self.0
    }
    /// Where the page is by the books; what else may hold while it is busy is told with `Busy`.
    pub const fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Untouched,
            1 => State::Resident,
            2 => State::Shared,
            3 => State::Broken,
            4 => State::Compressed,
            5 => State::Swapped,
            6 => State::Ballooned,
            7 => State::Staged,
            8 => State::Held,
            9 => State::Zero,
            _ => State::Filled,
        }
    }
    /// Which transition holds the page now.
    pub const fn busy(self) -> Busy {
        match (self.0 >> BUSY_SHIFT & 0x3, self.0 & BUSY_HIGH != 0) {
            (0, false) => Busy::Idle,
            (1, false) => Busy::Evicting,
            (2, false) => Busy::Filling,
            (_, false) => Busy::Discarding,
            (0, true) => Busy::Sharing,
            (1, true) => Busy::Homing,
            (_, true) => Busy::Breaking,
        }
    }
    /// Whether no transition holds the page.
    pub const fn is_idle(self) -> bool {
        self.0 & BUSY_MASK == 0
    }
    /// Whether the page's next access is to be counted.
    pub const fn sampled(self) -> bool {
        self.0 & SAMPLED != 0
    }
    /// Stage slot, swap slot or store page.
    pub const fn slot(self) -> u64 {
        match self.state() {
            State::Swapped => self.stored().slot.0,
            _ => self.0 >> PAYLOAD_SHIFT,
        }
    }
    /// Of a swapped page: where it is, and what it must be like.
    pub const fn stored(self) -> Stored {
        Stored::from_payload(self.0 >> PAYLOAD_SHIFT)
    }
    /// Whether a word of a pmap without checksums can be one with them: its slot must leave them room.
    pub(crate) const fn has_room_for_sum(self) -> bool {
        !matches!(self.state(), State::Swapped) || (self.0 >> PAYLOAD_SHIFT) < 1 << SLOT_BITS
    }
    /// The page of the store that the word refers to; each such word counts as one reference.
    pub const fn store_page(self) -> Option<StorePage> {
        // None for `NO_STORE_PAGE`, which is beyond their numbers.
        if self.refers_to_store() { StorePage::new(self.slot()) } else { None }
    }
    const fn refers_to_store(self) -> bool {
        matches!(self.state(), State::Shared | State::Broken)
            || matches!((self.state(), self.busy()), (State::Resident, Busy::Sharing))
    }
    /// The same page, held by that transition; `Idle`: by none any more.
    #[must_use]
    pub const fn set_busy(self, busy: Busy) -> Word {
        let low = (busy as u64 & 0x3) << BUSY_SHIFT;
        let high = if busy as u64 > 3 { BUSY_HIGH } else { 0 };
        Word(self.0 & !BUSY_MASK | low | high)
    }
    /// The same page, in the current sample or not.
    #[must_use]
    pub const fn set_sampled(self, sampled: bool) -> Word {
        Word(if sampled { self.0 | SAMPLED } else { self.0 & !SAMPLED })
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.state())?;
        if self.slot() != 0
            || matches!(self.state(), State::Swapped | State::Staged | State::Held | State::Shared)
        {
            write!(f, "({})", self.slot())?;
        }
        if !self.is_idle() {
            write!(f, "+{:?}", self.busy())?;
        }
        if self.sampled() {
            write!(f, "+Sampled")?;
        }
        Ok(())
    }
}

const _: () = assert!(PAYLOAD_SHIFT + SLOT_BITS + crate::swap::SUM_BITS == u64::BITS);
const _: () = assert!(Word::UNTOUCHED.0 == 0, "a fresh pmap file must read as untouched pages");

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_units::SlotId;

    const BUSY: [Busy; 7] = [
        Busy::Idle,
        Busy::Evicting,
        Busy::Filling,
        Busy::Discarding,
        Busy::Sharing,
        Busy::Homing,
        Busy::Breaking,
    ];

    #[test]
    fn fields_do_not_disturb_each_other() {
        for state in State::ALL {
            for busy in BUSY {
                for sampled in [false, true] {
                    let payload = (1 << 55) + 7;
                    let w = Word::with_slot(state, payload).set_sampled(sampled).set_busy(busy);
                    assert_eq!((w.state(), w.busy(), w.sampled()), (state, busy, sampled));
                    // Of a swapped page, the upper part is the checksum.
                    assert_eq!(w.slot(), if state == State::Swapped { 7 } else { payload });
                    // No store has so many pages.
                    let good = if w.refers_to_store() { Err(BadWord(w.bits())) } else { Ok(w) };
                    assert_eq!(Word::from_bits(w.bits()), good);
                    assert!(w.set_busy(Busy::Idle).is_idle());
                }
            }
        }
    }

    #[test]
    fn a_swapped_word_keeps_slot_and_checksum_apart() {
        for slot in [0, 5, (1 << SLOT_BITS) - 1] {
            let stored = Stored::new(SlotId(slot), &[3; 4096]);
            let w = Word::swapped(stored).set_sampled(true).set_busy(Busy::Filling);
            assert_eq!((w.stored(), w.slot(), w.state()), (stored, slot, State::Swapped));
        }
        let old = Word::with_slot(State::Swapped, 42);
        assert!(old.stored().sum.is_none() && old.has_room_for_sum());
        assert!(Word::with_slot(State::Swapped, (1 << SLOT_BITS) - 1).has_room_for_sum());
        assert!(!Word::with_slot(State::Swapped, 1 << SLOT_BITS).has_room_for_sum());
        assert!(Word::with_slot(State::Broken, NO_STORE_PAGE).has_room_for_sum());
    }

    /// Each such word counts as a reference: one too many keeps a page for ever, one too few frees it
    /// while a guest reads it.
    #[test]
    fn only_words_that_refer_to_the_store_name_a_page_of_it() {
        for state in State::ALL {
            for busy in BUSY {
                let refers = matches!(state, State::Shared | State::Broken)
                    || (state, busy) == (State::Resident, Busy::Sharing);
                let word = Word::with_slot(state, 7).set_busy(busy).set_sampled(true);
                assert_eq!(word.store_page(), StorePage::new(7).filter(|_| refers), "{word:?}");
            }
        }
        assert_eq!(Word::with_slot(State::Broken, NO_STORE_PAGE).store_page(), None);
    }

    #[test]
    fn only_pages_that_have_memory_of_their_own_are_charged() {
        let charged: Vec<State> = State::ALL.into_iter().filter(|s| s.charged()).collect();
        assert_eq!(charged, [State::Resident, State::Broken, State::Held]);
    }

    #[test]
    fn words_are_printed_with_what_matters_of_them() {
        let text = |word: Word| format!("{word:?}");
        assert_eq!(text(Word::UNTOUCHED), "Untouched");
        assert_eq!(text(Word::with_slot(State::Staged, 0)), "Staged(0)");
        assert_eq!(text(Word::with_slot(State::Filled, 9)), "Filled(9)");
        let word = Word::new(State::Resident).set_busy(Busy::Evicting).set_sampled(true);
        assert_eq!(text(word), "Resident+Evicting+Sampled");
    }

    #[test]
    fn pages_that_no_store_has_are_refused() {
        let limit = u64::from(StorePage::LIMIT);
        for slot in [0, limit - 1, limit, NO_STORE_PAGE - 1, NO_STORE_PAGE, 1 << 32, 1 << 55] {
            for busy in BUSY {
                for state in [State::Shared, State::Broken, State::Resident] {
                    let word = Word::with_slot(state, slot).set_busy(busy);
                    let named = slot < limit
                        || (state, slot) == (State::Broken, NO_STORE_PAGE)
                        || state == State::Resident && busy != Busy::Sharing;
                    let read = if named { Ok(word) } else { Err(BadWord(word.bits())) };
                    assert_eq!(Word::from_bits(word.bits()), read, "{word:?}");
                }
            }
        }
    }

    #[test]
    fn bits_of_no_state_are_refused() {
        for bits in [11, 0xf, 0xb0, u64::MAX] {
            assert_eq!(Word::from_bits(bits), Err(BadWord(bits)));
        }
    }
}
