//! Whether pages that were not written since the last look are protected, so that they need not be read again
//! (ADR 11): while that saves more than it costs. Each pass over such a page is a read and a hash less, of a thread that
//! has all the time in the world; each page that is written after all costs its guest a fault. A guest that rests
//! writes next to nothing, and what it waits for its few faults is nothing, either; one that goes through its memory writes
//! to most of it before the next pass comes by.

use std::time::Duration;

use super::examine::Marking;
use crate::worth::FAULT_NS;

/// What it costs to read and to hash a page, nanoseconds.
const READ_NS: u64 = 3_000;
/// So many a second are counted as that: a guest waits for them for a ten-thousandth of its time.
const UNNOTICED: u64 = 2;
/// All others so many times: a guest waits for them, and nobody waits for a read.
const WAITED_FOR: u64 = 16;
/// Faults that say something.
const ENOUGH: u64 = 32;
/// Between two looks at what it cost, at least; a pass came to its end in between, or nothing could have been saved.
const PERIOD: Duration = Duration::from_secs(10);
/// For so many times what was looked at pages are not protected at first; twice as long each time that it did not pay
/// again, up to the second, and to a day.
const OFF: [u32; 2] = [6, 360];
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

/// Running totals of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Passes that came to their end.
    pub passes: u64,
    /// Pages that were not read because they were not written.
    pub passed: u64,
    /// Pages that were written and were protected for that.
    pub faults: u64,
}

/// Follows one VM.
#[derive(Debug)]
pub(crate) struct Marks {
    last: (Duration, Seen),
    /// Until when none is protected.
    off_until: Option<Duration>,
    off: u32,
}

impl Default for Marks {
    fn default() -> Marks {
        Marks { last: (Duration::ZERO, Seen::default()), off_until: None, off: OFF[0] }
    }
}

impl Marks {
    /// What is to be done at `now`, on a clock that never goes back, where `wanted` would be done if it cost nothing.
    /// When that becomes Off, the protection of all pages is to be lifted.
    pub fn step(&mut self, now: Duration, seen: &Seen, wanted: Marking) -> Marking {
        if wanted != Marking::Unchanged {
            return wanted;
        }
        if let Some(until) = self.off_until {
            if now < until {
                return Marking::Off;
            }
            // Once more: what was written meanwhile is of no account.
            self.off_until = None;
            self.last = (now, *seen);
        }
        let (since, last) = self.last;
        let looked = now.saturating_sub(since);
        if looked < PERIOD || seen.passes == last.passes {
            return wanted;
        }
        self.last = (now, *seen);
        let faults = seen.faults.saturating_sub(last.faults);
        let saved = seen.passed.saturating_sub(last.passed) * READ_NS;
        let cost = cost(faults, looked);
        if faults >= ENOUGH && cost > saved {
            self.off_until = Some(now + (looked * self.off).min(LONGEST));
            self.off = (2 * self.off).min(OFF[1]);
            return Marking::Off;
        }
        if saved > 2 * cost {
            self.off = OFF[0];
        }
        wanted
    }
}

/// What so many faults in that time count, nanoseconds.
fn cost(faults: u64, time: Duration) -> u64 {
    let unnoticed = faults.min(UNNOTICED.saturating_mul(time.as_secs()));
    (unnoticed + (faults - unnoticed) * WAITED_FOR) * FAULT_NS
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// A step every second, in each of which so many pages are passed over and written, and a pass ends every `pass`
    /// seconds; answers how many of the seconds pages were protected in.
    fn run(
        marks: &mut Marks,
        seconds: std::ops::Range<u64>,
        pass: u64,
        [passed, faults]: [u64; 2],
    ) -> u64 {
        let mut seen = marks.last.1;
        seconds
            .filter(|s| {
                let on = marks.off_until.is_none();
                seen.passes += u64::from(s % pass == 0);
                seen.passed += if on { passed } else { 0 };
                seen.faults += if on { faults } else { 0 };
                let now = Duration::from_secs(*s);
                marks.step(now, &seen, Marking::Unchanged) == Marking::Unchanged
            })
            .count() as u64
    }

    #[test]
    fn pages_that_are_written_before_the_next_pass_are_not_protected_and_tried_ever_less_often() {
        let mut marks = Marks::default();
        // 3,000 pages passed over save 9 ms; 20 faults cost 14.5.
        let busy = [3_000, 20];
        assert_eq!(run(&mut marks, 1..11, 1, busy), 9);
        assert_eq!(run(&mut marks, 11..70, 1, busy), 0);
        // Ten seconds of each try, and twice the rest before the next one.
        assert_eq!(run(&mut marks, 70..200, 1, busy), 10);
        let day = 24 * 3_600;
        let on = run(&mut marks, 200..day, 1, busy);
        assert!(on <= 10 * 32, "{on} of {day} seconds");
    }

    #[test]
    fn where_little_is_written_they_are() {
        let mut marks = Marks::default();
        assert_eq!(run(&mut marks, 1..600, 1, [3_000, 10]), 599);
        // Few faults say nothing, whatever they cost.
        assert_eq!(run(&mut marks, 600..1_200, 1, [0, 3]), 600);
    }

    /// 96 MiB that are gone through every five minutes, and of which 300 pages are written meanwhile: 45 ms of reads are saved,
    /// and the guest waits 15 ms of those five minutes.
    #[test]
    fn what_a_guest_does_not_notice_counts_as_what_it_takes() {
        let mut marks = Marks::default();
        assert_eq!(run(&mut marks, 1..3_600, 300, [50, 1]), 3_599);
        assert_eq!(marks.off, OFF[0]);
        assert_eq!(cost(600, Duration::from_secs(300)), 600 * 50_000);
        assert_eq!(cost(601, Duration::from_secs(300)), (600 + 16) * 50_000);
        // Nor does it save anything where nothing is passed over.
        let mut marks = Marks::default();
        assert_eq!(run(&mut marks, 1..700, 300, [10, 1]), 300 - 1);
    }

    #[test]
    fn what_was_saved_is_known_after_a_pass_only() {
        let mut marks = Marks::default();
        // All of what ten minutes save is saved in the pass at their end: 2,000,000 pages, for 6,000 faults.
        let mut seen = Seen::default();
        for s in 1..6_000 {
            seen.faults += 10;
            if s % 600 == 0 {
                seen.passes += 1;
                seen.passed += 2_000_000;
            }
            assert_eq!(
                marks.step(Duration::from_secs(s), &seen, Marking::Unchanged),
                Marking::Unchanged
            );
        }
        // Not worth it: off for six times as long as it was looked at.
        let mut marks = Marks::default();
        assert_eq!(run(&mut marks, 1..600 * 6, 600, [50, 10]), 599);
        assert_eq!(marks.off_until, Some(Duration::from_secs(600 + 6 * 600)));
    }

    #[test]
    fn who_comes_to_rest_is_believed_again() {
        let mut marks = Marks::default();
        run(&mut marks, 1..11, 1, [0, 500]);
        assert_eq!(marks.off, 2 * OFF[0]);
        // That it pays a little is not enough.
        assert_eq!(run(&mut marks, 70..170, 1, [3_000, 10]), 100);
        assert_eq!(marks.off, 2 * OFF[0]);
        assert_eq!(run(&mut marks, 170..270, 1, [3_000, 1]), 100);
        assert_eq!(marks.off, OFF[0]);
    }

    #[test]
    fn other_ways_of_marking_are_as_they_are_asked_for() {
        let mut marks = Marks::default();
        run(&mut marks, 1..11, 1, [0, 500]);
        let seen = Seen::default();
        for other in [Marking::None, Marking::All] {
            assert_eq!(marks.step(Duration::from_secs(11), &seen, other), other);
        }
    }
}
