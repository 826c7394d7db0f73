//! Which pages left their homes lately, so that a discard can tell contents that are void from
//! contents that the guest wrote after it.
//!
//! Reading a REMOVE event is what lets the VMM go on: from then on the guest may write the page
//! again, while the event waits to be booked. If such a page leaves its home in between, what is in
//! the stage is new, and dropping it would lose it. So a page is noted here after it was protected
//! and before its copy is in the pmap, and a discard drops only what left before its event was
//! read. When in doubt it keeps: giving up a page is the guest's permission, not its command.

use std::collections::HashSet;

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

    /// What has left since `mark`, and leaves from now on.
    pub fn since(&self, mark: Mark) -> Since<'_> {
        Since { departures: self, read: mark.0, pages: HashSet::new(), in_doubt: false }
    }

    /// The page of the `n`th note. Err(true): it was overwritten; Err(false): it is still to come.
    fn nth(&self, n: u64) -> Result<u64, bool> {
        let note = self.last[(n % REMEMBERED) as usize].load(Ordering::Acquire);
        let (is, wanted) = (note >> PAGE_BITS, n / REMEMBERED + 1);
        if is == wanted { Ok(page(Ppn(note))) } else { Err(is > wanted) }
    }
}

/// Departures since a mark. Notes are read as they come, so whoever goes over many pages is in doubt of none, however many
/// leave meanwhile.
pub(crate) struct Since<'a> {
    departures: &'a Departures,
    /// Notes up to here are in `pages`.
    read: u64,
    pages: HashSet<u64>,
    /// A note was overwritten before it was read.
    in_doubt: bool,
}

impl Since<'_> {
    /// Whether a page that was just seen away from home may have left since the mark. The word that
    /// says so was stored after the note, so the note is seen here.
    pub fn may_have(&mut self, ppn: Ppn) -> bool {
        let now = self.departures.count.load(Ordering::Acquire);
        while self.read < now && !self.in_doubt {
            match self.departures.nth(self.read) {
                Ok(page) => {
                    self.pages.insert(page);
                    self.read += 1;
                }
                Err(is_lost) => {
                    self.in_doubt = is_lost;
                    break;
                }
            }
        }
        if self.in_doubt || self.pages.contains(&page(ppn)) {
            return true;
        }
        // Behind one that is still to come, which is not of this page: its word would not be there yet.
        (self.read..now).any(|n| match self.departures.nth(n) {
            Ok(found) => found == page(ppn),
            Err(is_lost) => is_lost,
        })
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
        let since = |ppn| departures.since(mark).may_have(Ppn(ppn));
        assert!(since(7777) && !since(5));
    }

    #[test]
    fn who_reads_on_is_in_doubt_of_none_however_many_leave() {
        let departures = Departures::new();
        let mut since = departures.since(departures.mark());
        for n in 0..5 * REMEMBERED {
            assert!(!since.may_have(Ppn(1_000_000 + n)));
            departures.note(Ppn(n));
            assert!(since.may_have(Ppn(n)) && since.may_have(Ppn(n / 2)));
        }
        // Who does not, is.
        (0..=REMEMBERED).for_each(|n| departures.note(Ppn(n)));
        assert!(since.may_have(Ppn(9_000_000)));
    }

    #[test]
    fn a_note_that_is_still_to_come_hides_none_behind_it_and_is_read_when_it_has_come() {
        let departures = Departures::new();
        let mut since = departures.since(departures.mark());
        let late = departures.count.fetch_add(1, Ordering::AcqRel);
        departures.note(Ppn(7));
        assert!(since.may_have(Ppn(7)) && !since.may_have(Ppn(8)) && !since.may_have(Ppn(5)));
        let note = ((late / REMEMBERED + 1) << PAGE_BITS) | 5;
        departures.last[late as usize].fetch_max(note, Ordering::AcqRel);
        assert!(since.may_have(Ppn(5)) && since.may_have(Ppn(7)) && !since.may_have(Ppn(8)));
        assert_eq!(since.read, 2);
    }

    #[test]
    fn departures_before_the_mark_are_not_recent_and_forgotten_ones_are() {
        let departures = Departures::new();
        departures.note(Ppn(1));
        let mark = departures.mark();
        assert!(!departures.since(mark).may_have(Ppn(1)));
        departures.note(Ppn(2));
        assert!(departures.since(mark).may_have(Ppn(2)));
        assert!(!departures.since(mark).may_have(Ppn(1)));
        for _ in 0..REMEMBERED {
            departures.note(Ppn(3));
        }
        assert!(
            departures.since(mark).may_have(Ppn(1)),
            "more departures than remembered: in doubt"
        );
        // A large page that is broken leaves nobody else in doubt.
        let mark = departures.mark();
        (0..2 * 512).for_each(|n| departures.note(Ppn(10_000 + n)));
        assert!(
            !departures.since(mark).may_have(Ppn(2))
                && departures.since(mark).may_have(Ppn(10_000))
        );
        // As many as are remembered are remembered: the first of them, and no other.
        let mark = departures.mark();
        (0..REMEMBERED).for_each(|n| departures.note(Ppn(1_000 + n)));
        assert!(
            departures.since(mark).may_have(Ppn(1_000)) && !departures.since(mark).may_have(Ppn(3))
        );
        assert!(!departures.since(departures.mark()).may_have(Ppn(1)));
    }
}
