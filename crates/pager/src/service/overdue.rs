//! Faults that stand still. Those that wait for memory are counted; one that waits for long for anything else is told: a
//! read of swap that does not end, a page that somebody has in hand, a kernel that has no memory. And one that was
//! read and is in no book here, of which no reason is known, is met again: whoever waits is let try again.

use std::time::{Duration, Instant};

use ballast_units::Ppn;

use crate::memory::Wait;

/// After this time a fault is told that waits for anything but memory. A shim has 2 s for an answer, and a page is busy
/// meanwhile.
pub(super) const LATE: Duration = Duration::from_secs(5);

/// The fault that has waited longest of those that wait too long, for anything but memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// Where.
    pub page: Ppn,
    /// Since when.
    pub since: Instant,
    /// For what; None: to be read from swap.
    pub why: Option<Wait>,
    /// Pages with such a fault.
    pub pages: usize,
}

impl Overdue {
    /// The oldest of some, whose `pages` do not count.
    pub(super) fn oldest(all: impl Iterator<Item = Overdue>) -> Option<Overdue> {
        all.fold(None, |oldest: Option<Overdue>, one| {
            let pages = oldest.map_or(0, |o| o.pages) + 1;
            let older = oldest.filter(|o| o.since <= one.since).unwrap_or(one);
            Some(Overdue { pages, ..older })
        })
    }

    /// What it waits for.
    pub(super) fn waits_for(&self) -> &'static str {
        match self.why {
            None => "its page to be read from swap",
            Some(Wait::Busy) => "what is being done with its page",
            Some(Wait::Discard) => "its VMM, which is giving up pages",
            Some(Wait::Zeros) => "zeros to be mapped",
            Some(Wait::Kernel) => "memory that the kernel does not give",
            Some(Wait::Memory | Wait::Blocked) => "memory",
        }
    }
}

/// When to look for what stands still.
#[derive(Debug)]
pub(super) struct Watch {
    /// When to look for faults that wait long.
    long: Instant,
    /// When it was looked for those that are in no book: only while no other waits.
    strays: Instant,
    /// Faults were read since a look found none of those.
    read: bool,
    /// Whether one was found that waits long.
    found: bool,
    /// When it was looked for faults that are kept and that nobody waits for, and whether that look found many.
    called_off: Instant,
    many: bool,
    /// Looks one after the other that found a fault which is in no book, and how many are to before it is met again.
    seen: u32,
    #[allow(missing_docs, reason = "told with the field before")]
    enough: u32,
}

impl Watch {
    /// Between two looks.
    const EVERY: Duration = Duration::from_secs(1);
    /// The same for faults in no book, while none was read here: a VMM could read them itself.
    const SELDOM: Duration = Duration::from_secs(30);
    /// At first; each time twice as many. The first may have seen one on its way out: by a signal.
    const ENOUGH: u32 = 2;
    const MOST: u32 = 64;
    /// So many faults that nobody waits for are let be: they are tried again in no time.
    pub const FEW: u64 = 64;

    pub fn new(now: Instant) -> Watch {
        Watch {
            long: now + Watch::EVERY,
            strays: now,
            read: true,
            found: false,
            called_off: now,
            many: false,
            seen: 0,
            enough: Watch::ENOUGH,
        }
    }

    /// Whether it is time to look for faults that wait long: for as long as one does, whenever it may have ended.
    pub fn is_time(&self, now: Instant) -> bool {
        self.found || now >= self.long
    }
    /// Such a look was taken, and found one or not.
    pub fn looked(&mut self, now: Instant, found: bool) {
        self.long = now + Watch::EVERY;
        self.found = found;
    }

    /// Faults were read.
    pub fn has_read(&mut self) {
        self.read = true;
    }
    /// Whether it is time to look for faults that are in no book.
    pub fn is_time_for_strays(&self, now: Instant) -> bool {
        let apart = if self.read { Watch::EVERY } else { Watch::SELDOM };
        now.saturating_duration_since(self.strays) >= apart
    }
    /// Such a look found so many. Answers whether they are to be met again.
    pub fn are_to_be_met_again(&mut self, now: Instant, strays: u64) -> bool {
        (self.strays, self.read) = (now, strays > 0);
        if strays == 0 {
            (self.seen, self.enough) = (0, Watch::ENOUGH);
            return false;
        }
        self.seen += 1;
        let again = self.seen >= self.enough;
        if again {
            self.seen = 0;
            self.enough = (2 * self.enough).min(Watch::MOST);
        }
        again
    }

    /// Whether it is time to look for faults that are kept and were called off, as a VMM's thread can that gets a signal.
    pub fn is_time_for_called_off(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.called_off) >= Watch::EVERY
    }
    /// Such a look found that of those that are kept so many more than threads that wait. Answers whether none is to be
    /// kept any more: if so were two one after the other, for who is on the way to or from a fault is counted in one of both only.
    pub fn are_to_be_let_go(&mut self, now: Instant, beyond: u64) -> bool {
        self.called_off = now;
        let before = std::mem::replace(&mut self.many, beyond > Watch::FEW);
        if before && self.many {
            self.many = false;
            return true;
        }
        false
    }

    /// How long nobody needs to look.
    pub fn rest(&self) -> Duration {
        if self.found || self.seen > 0 { Watch::EVERY } else { Duration::MAX }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_told_and_how_many_there_are() {
        let now = Instant::now();
        let one = |page, ago, why| Overdue {
            page: Ppn(page),
            since: now.checked_sub(Duration::from_secs(ago)).unwrap_or(now),
            why,
            pages: 1,
        };
        assert_eq!(Overdue::oldest([].into_iter()), None);
        let all = [one(1, 6, Some(Wait::Busy)), one(2, 9, None), one(3, 7, Some(Wait::Kernel))];
        assert_eq!(Overdue::oldest(all.into_iter()), Some(Overdue { pages: 3, ..all[1] }));
    }

    #[test]
    fn what_is_in_no_book_is_met_again_when_it_was_seen_twice_and_then_more_and_more_seldom() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun);
        let at = |ms| begun + Duration::from_millis(ms);
        let due = [999, 1_000, 9_000].map(|ms| watch.is_time_for_strays(at(ms)));
        assert_eq!(due, [false, true, true], "until it is taken");
        assert_eq!(watch.rest(), Duration::MAX);
        assert!(!watch.are_to_be_met_again(at(9_000), 1));
        assert_eq!([9_999, 10_000].map(|ms| watch.is_time_for_strays(at(ms))), [false, true]);
        assert_eq!(watch.rest(), Watch::EVERY);
        assert!(watch.are_to_be_met_again(at(10_000), 1));
        let mut met = |strays: &[u64]| -> Vec<bool> {
            strays.iter().map(|&n| watch.are_to_be_met_again(begun, n)).collect()
        };
        assert_eq!(met(&[1, 1, 1, 3]), [false, false, false, true]);
        // None is left: as at first.
        assert_eq!(met(&[0, 1, 0, 1, 1]), [false, false, false, false, true]);
        let again = (0..1_000).filter(|_| watch.are_to_be_met_again(begun, 1)).count();
        assert!((15..=19).contains(&again), "{again}: every {} looks in the end", Watch::MOST);
    }

    #[test]
    fn who_has_read_no_fault_has_lost_none() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun);
        let due = |watch: &Watch, s| watch.is_time_for_strays(begun + Duration::from_secs(s));
        assert!(!watch.are_to_be_met_again(begun, 0));
        // Unless somebody else has.
        assert_eq!([1, 29, 30].map(|s| due(&watch, s)), [false, false, true]);
        watch.has_read();
        assert_eq!([0, 1].map(|s| due(&watch, s)), [false, true]);
        assert!(!watch.are_to_be_met_again(begun, 1));
        assert!(due(&watch, 1), "until there is none");
    }

    #[test]
    fn what_is_kept_for_nobody_is_let_go_when_it_was_seen_twice() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun);
        let second = |n| begun + n * Watch::EVERY;
        let due = |watch: &Watch, n| watch.is_time_for_called_off(second(n));
        assert_eq!([0, 1].map(|n| due(&watch, n)), [false, true]);
        assert!(!watch.are_to_be_let_go(second(1), Watch::FEW + 1));
        assert_eq!([1, 2].map(|n| due(&watch, n)), [false, true]);
        let mut are = |all: &[u64]| -> Vec<bool> {
            all.iter().map(|&beyond| watch.are_to_be_let_go(second(2), beyond)).collect()
        };
        let (few, many) = (Watch::FEW, Watch::FEW + 1);
        assert_eq!(are(&[few, many, 0, many, many, many, many]), {
            [false, false, false, false, true, false, true]
        });
    }

    #[test]
    fn what_waits_long_is_looked_for_each_second_and_its_end_at_once() {
        let begun = Instant::now();
        let mut watch = Watch::new(begun);
        let second = |n| begun + n * Watch::EVERY;
        assert!(!watch.is_time(begun) && watch.is_time(second(1)));
        watch.looked(second(1), true);
        assert!(watch.is_time(second(1)) && watch.rest() == Watch::EVERY);
        watch.looked(second(1), false);
        assert!(!watch.is_time(second(1)) && watch.is_time(second(2)));
    }
}
