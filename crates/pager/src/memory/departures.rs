//! Which pages left their homes lately, so that a discard can tell contents that are void from
//! contents that the guest wrote after it.
//!
//! Reading a REMOVE event is what lets the VMM go on: from then on the guest may write the page
//! again, while the event waits to be booked. If such a page leaves its home in between, what is in
//! the stage is new, and dropping it would lose it. So a page is noted here after it was protected
//! and before its copy is in the pmap, and a discard drops only what left before its event was
//! read. When in doubt it keeps: giving up a page is the guest's permission, not its command.

use ballast_units::{PAGE_SIZE, Pages, Ppn};

use crate::sync::{AtomicU64, Ordering};

/// A large page that is broken is 512 at once; some ten thousand a second leave at most. Fewer where each is modelled.
const REMEMBERED: u64 = if cfg!(feature = "shuttle") { 256 } else { 4096 };
/// Of a note, what is its page: more than the largest VM has. Above is which round it is of.
const PAGE_BITS: u32 = 34;

/// A point in the order of departures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(u64);

/// The last departures, in their order.
pub(crate) struct Departures {
    count: AtomicU64,
    last: Box<[AtomicU64]>,
}

impl Departures {
    /// Machine memory that it takes.
    pub const PAGES: Pages = Pages(REMEMBERED * 8 / PAGE_SIZE as u64);

    /// None yet.
    pub fn new() -> Departures {
        let last = (0..REMEMBERED).map(|_| AtomicU64::new(0)).collect();
        Departures { count: AtomicU64::new(0), last }
    }

    /// Now.
    pub fn mark(&self) -> Mark {
        Mark(self.count.load(Ordering::Acquire))
    }

    /// Called while the page is protected and busy, before its word says that it left.
    pub fn note(&self, ppn: Ppn) {
        let n = self.count.fetch_add(1, Ordering::AcqRel);
        // Who was held up here for a round does not take the place of whoever came after.
        let note = ((n / REMEMBERED + 1) << PAGE_BITS) | page(ppn);
        self.last[(n % REMEMBERED) as usize].fetch_max(note, Ordering::AcqRel);
    }

    /// Whether a page that was just seen away from home may have left since `mark`. The word that
    /// says so was stored after the note, so the note is seen here.
    pub fn since(&self, mark: Mark, ppn: Ppn) -> bool {
        let now = self.count.load(Ordering::Acquire);
        if now - mark.0 > REMEMBERED {
            return true;
        }
        (mark.0..now)
            .map(|n| self.last[(n % REMEMBERED) as usize].load(Ordering::Acquire))
            .any(|note| page(Ppn(note)) == page(ppn))
            // A note overwritten while we looked is one we may have missed.
            || self.count.load(Ordering::Acquire) - mark.0 > REMEMBERED
    }
}

fn page(ppn: Ppn) -> u64 {
    ppn.0 & ((1 << PAGE_BITS) - 1)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_note_that_comes_a_round_late_hides_none_that_came_after_it() {
        let departures = Departures::new();
        let late = departures.count.fetch_add(1, Ordering::AcqRel);
        (1..REMEMBERED).for_each(|n| departures.note(Ppn(n)));
        let mark = departures.mark();
        departures.note(Ppn(7777));
        let note = ((late / REMEMBERED + 1) << PAGE_BITS) | 5;
        departures.last[late as usize].fetch_max(note, Ordering::AcqRel);
        assert!(departures.since(mark, Ppn(7777)) && !departures.since(mark, Ppn(5)));
    }

    #[test]
    fn departures_before_the_mark_are_not_recent_and_forgotten_ones_are() {
        let departures = Departures::new();
        departures.note(Ppn(1));
        let mark = departures.mark();
        assert!(!departures.since(mark, Ppn(1)));
        departures.note(Ppn(2));
        assert!(departures.since(mark, Ppn(2)));
        assert!(!departures.since(mark, Ppn(1)));
        for _ in 0..REMEMBERED {
            departures.note(Ppn(3));
        }
        assert!(departures.since(mark, Ppn(1)), "more departures than remembered: in doubt");
        // A large page that is broken leaves nobody else in doubt.
        let mark = departures.mark();
        (0..2 * 512).for_each(|n| departures.note(Ppn(10_000 + n)));
        assert!(!departures.since(mark, Ppn(2)) && departures.since(mark, Ppn(10_000)));
        // As many as are remembered are remembered: the first of them, and no other.
        let mark = departures.mark();
        (0..REMEMBERED).for_each(|n| departures.note(Ppn(1_000 + n)));
        assert!(departures.since(mark, Ppn(1_000)) && !departures.since(mark, Ppn(3)));
        assert!(!departures.since(departures.mark(), Ppn(1)));
    }
}
