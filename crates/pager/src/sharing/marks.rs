//! Whether pages that were not written since the last look are protected, so that they need not be read again
//! (ADR 11): while that saves more than it costs. Each pass over such a page is a read and a hash less, of a thread that
//! has all the time in the world; each page that is written after all costs its guest a fault. A guest that rests
//! writes next to nothing; one that goes through its memory writes to most of it before the next pass comes by.

use std::time::Duration;

use super::examine::Marking;

/// What it costs to read and to hash a page, nanoseconds.
const READ_NS: u64 = 3_000;
/// What a fault costs, in the threads that serve it and by what the guest waits (ADR 26).
const FAULT_NS: u64 = 50_000;
/// Faults that say something.
const ENOUGH: u64 = 256;
/// Between two looks at what it cost.
const PERIOD: Duration = Duration::from_secs(10);
/// How long pages are not protected at first; longer each time that it did not pay again, up to the second.
const OFF: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(3_600)];

/// Running totals of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
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
    off: Duration,
}

impl Default for Marks {
    fn default() -> Marks {
        Marks { last: (Duration::ZERO, Seen::default()), off_until: None, off: OFF[0] }
    }
}

impl Marks {
    /// What is to be done at `now`, on a clock that never goes back, where `wanted` would be done if it cost nothing.
    pub fn step(&mut self, now: Duration, seen: &Seen, wanted: Marking) -> Marking {
        if wanted != Marking::Unchanged {
            return wanted;
        }
        if let Some(until) = self.off_until {
            if now < until {
                return Marking::Off;
            }
            // Once more: what was protected before, and written meanwhile, is of no account.
            self.off_until = None;
            self.last = (now, *seen);
        }
        let (since, last) = self.last;
        if now.saturating_sub(since) < PERIOD {
            return wanted;
        }
        self.last = (now, *seen);
        let faults = seen.faults.saturating_sub(last.faults);
        let saved = seen.passed.saturating_sub(last.passed) * READ_NS;
        if faults >= ENOUGH && faults * FAULT_NS > saved {
            self.off_until = Some(now + self.off);
            self.off = (2 * self.off).min(OFF[1]);
            return Marking::Off;
        }
        if saved > 2 * faults * FAULT_NS {
            self.off = OFF[0];
        }
        wanted
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// A step every second, in each of which so many pages are passed over and written; answers how many of the
    /// seconds pages were protected in.
    fn run(marks: &mut Marks, from: u64, seconds: u64, passed: u64, faults: u64) -> u64 {
        let mut seen = marks.last.1;
        (1..=seconds)
            .filter(|s| {
                let on = marks.off_until.is_none();
                seen.passed += if on { passed } else { 0 };
                seen.faults += if on { faults } else { 0 };
                let now = Duration::from_secs(from + s);
                marks.step(now, &seen, Marking::Unchanged) == Marking::Unchanged
            })
            .count() as u64
    }

    #[test]
    fn pages_that_are_written_before_the_next_pass_are_not_protected_and_tried_ever_less_often() {
        let mut marks = Marks::default();
        // 2,000 pages passed over save 6 ms; 500 faults cost 25.
        assert_eq!(run(&mut marks, 0, 10, 2_000, 500), 9);
        assert_eq!(run(&mut marks, 10, 59, 2_000, 500), 0);
        // Ten seconds of each try, and twice the rest before the next one.
        assert_eq!(run(&mut marks, 69, 11 + 119, 2_000, 500), 10);
        let day = 24 * 3_600;
        let on = run(&mut marks, 199, day, 2_000, 500);
        assert!(on <= 10 * 32, "{on} of {day} seconds");
    }

    #[test]
    fn where_little_is_written_they_are() {
        let mut marks = Marks::default();
        assert_eq!(run(&mut marks, 0, 600, 2_000, 60), 600);
        // Few faults say nothing, whatever they cost.
        assert_eq!(run(&mut marks, 600, 600, 0, 25), 600);
    }

    #[test]
    fn who_comes_to_rest_is_believed_again() {
        let mut marks = Marks::default();
        run(&mut marks, 0, 10, 0, 500);
        assert_eq!(marks.off, 2 * OFF[0]);
        assert_eq!(run(&mut marks, 70, 100, 2_000, 10), 100);
        assert_eq!(marks.off, OFF[0]);
    }

    #[test]
    fn other_ways_of_marking_are_as_they_are_asked_for() {
        let mut marks = Marks::default();
        run(&mut marks, 0, 10, 0, 500);
        let seen = Seen::default();
        for other in [Marking::None, Marking::All] {
            assert_eq!(marks.step(Duration::from_secs(11), &seen, other), other);
        }
    }
}
