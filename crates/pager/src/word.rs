//! The pmap word: where one guest page is, in 64 bits.
//!
//! ```text
//!  63                                   8 7   6   5   4 3       0
//! +--------------------------------------+-+---+-------+---------+
//! | payload: stage slot or swap slot     |0| S | busy  |  state  |
//! +--------------------------------------+-+---+-------+---------+
//! ```
//!
//! `S` is set while the page is one of the sampled pages of the current period and has not been
//! touched. A word of zero is an untouched, idle page, so a fresh pmap file is a right one.

use std::fmt;

/// Where a page is. Shared, Broken and Compressed have their place in the word; a pager that
/// meets one it does not implement refuses to touch the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// Never backed, or found all zero and dropped: reads as zeros.
    Untouched = 0,
    /// In its home page: the same offset of the VM's RAM file.
    Resident = 1,
    /// A page of the shared store.
    Shared = 2,
    /// An anonymous page in the VMM, copied from the store on a write.
    Broken = 3,
    /// A slot of the compressed tier.
    Compressed = 4,
    /// Payload: slot of the VM's swap file.
    Swapped = 5,
    /// Given up by the guest: contents are void.
    Ballooned = 6,
    /// Payload: stage slot, on its way to the swap file.
    Staged = 7,
    /// Payload: stage slot, out of its home only so that the next access is seen (sampling). Still
    /// charged to the VM.
    Held = 8,
}

impl State {
    pub const ALL: [State; 9] = [
        State::Untouched,
        State::Resident,
        State::Shared,
        State::Broken,
        State::Compressed,
        State::Swapped,
        State::Ballooned,
        State::Staged,
        State::Held,
    ];

    /// Whether an idle page in this state holds one page of the VM's machine memory.
    pub const fn charged(self) -> bool {
        matches!(self, State::Resident | State::Held)
    }
}

/// Which transition holds the page. Recovery after a crash finishes or rolls back by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Busy {
    Idle = 0,
    /// Leaving its home: write-protected; contents cannot change.
    Evicting = 1,
    /// Coming home: the home page may be there already and hold newer bytes.
    Filling = 2,
    /// Being dropped because the guest gave it up.
    Discarding = 3,
}

/// One pmap word.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word(u64);

const STATE_MASK: u64 = 0xf;
const BUSY_SHIFT: u32 = 4;
const BUSY_MASK: u64 = 0x3 << BUSY_SHIFT;
const SAMPLED: u64 = 1 << 6;
const PAYLOAD_SHIFT: u32 = 8;

/// A word whose bits name no state: the pmap is damaged, or was written by a newer version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pmap word {0:#x} names no page state")]
pub struct BadWord(pub u64);

impl Word {
    pub const UNTOUCHED: Word = Word(0);

    pub const fn new(state: State) -> Word {
        Word(state as u64)
    }
    pub const fn with_slot(state: State, slot: u64) -> Word {
        Word(state as u64 | slot << PAYLOAD_SHIFT)
    }
    /// Checks bits that come from a file.
    pub fn from_bits(bits: u64) -> Result<Word, BadWord> {
        if bits & STATE_MASK > State::Held as u64 || bits & 0x80 != 0 {
            return Err(BadWord(bits));
        }
        Ok(Word(bits))
    }
    /// For words that were checked when the pmap was opened, or that this process wrote.
    pub(crate) const fn trusted(bits: u64) -> Word {
        Word(bits)
    }
    pub const fn bits(self) -> u64 {
        self.0
    }
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
            _ => State::Held,
        }
    }
    pub const fn busy(self) -> Busy {
        match (self.0 & BUSY_MASK) >> BUSY_SHIFT {
            0 => Busy::Idle,
            1 => Busy::Evicting,
            2 => Busy::Filling,
            _ => Busy::Discarding,
        }
    }
    pub const fn is_idle(self) -> bool {
        self.0 & BUSY_MASK == 0
    }
    pub const fn sampled(self) -> bool {
        self.0 & SAMPLED != 0
    }
    /// Stage or swap slot.
    pub const fn slot(self) -> u64 {
        self.0 >> PAYLOAD_SHIFT
    }
    #[must_use]
    pub const fn set_busy(self, busy: Busy) -> Word {
        Word(self.0 & !BUSY_MASK | (busy as u64) << BUSY_SHIFT)
    }
    #[must_use]
    pub const fn set_sampled(self, sampled: bool) -> Word {
        Word(if sampled { self.0 | SAMPLED } else { self.0 & !SAMPLED })
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.state())?;
        if matches!(self.state(), State::Swapped | State::Staged | State::Held) {
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

const _: () = assert!(Word::UNTOUCHED.0 == 0, "a fresh pmap file must read as untouched pages");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_disturb_each_other() {
        for state in State::ALL {
            for busy in [Busy::Idle, Busy::Evicting, Busy::Filling, Busy::Discarding] {
                for sampled in [false, true] {
                    let w =
                        Word::with_slot(state, (1 << 55) + 7).set_sampled(sampled).set_busy(busy);
                    assert_eq!((w.state(), w.busy(), w.sampled()), (state, busy, sampled));
                    assert_eq!(w.slot(), (1 << 55) + 7);
                    assert_eq!(Word::from_bits(w.bits()), Ok(w));
                    assert!(w.set_busy(Busy::Idle).is_idle());
                }
            }
        }
    }

    #[test]
    fn bits_of_no_state_are_refused() {
        for bits in [9, 0xf, 0x80, u64::MAX] {
            assert_eq!(Word::from_bits(bits), Err(BadWord(bits)));
        }
    }
}
