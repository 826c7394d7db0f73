//! How much is handed out around a first touch while memory is plentiful.
//!
//! A fixed amount, and of first touches that go on where the last fill ended (or end where it began, going down) twice
//! as much each time: a guest that fills memory in order waits for one fault where it would for eight, and what it
//! has and does not use stays below what it has touched.

use ballast_units::Ppn;

use crate::sync::{AtomicU64, Ordering};

/// The most that a row of touches gets at a time, pages: 512 KiB, which is there within the time that a fault should take.
const MOST: u64 = 128;

/// The last fill of one VM. Threads that serve its faults may be at it together: then a row is not seen, and no more.
pub struct FirstTouches {
    /// Pages around a touch that continues nothing; a power of two.
    least: u64,
    start: AtomicU64,
    end: AtomicU64,
    window: AtomicU64,
}

impl FirstTouches {
    /// `least` pages around a touch: a power of two, 1 for none.
    pub fn new(least: u64) -> FirstTouches {
        let least = least.max(1);
        FirstTouches {
            least,
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            window: AtomicU64::new(least),
        }
    }

    /// The aligned window around a page that is touched for the first time, of which what is untouched may come too.
    pub fn window(&self, ppn: Ppn) -> std::ops::Range<u64> {
        let window = if self.least > 1 && self.continues(ppn) {
            (2 * self.window.load(Ordering::Relaxed)).min(MOST.max(self.least))
        } else {
            self.least
        };
        self.window.store(window, Ordering::Relaxed);
        let start = ppn.0 - ppn.0 % window;
        start..start + window
    }

    fn continues(&self, ppn: Ppn) -> bool {
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        start < end && (ppn.0 == end || ppn.0 + 1 == start)
    }

    /// These came.
    pub fn filled(&self, run: &std::ops::Range<u64>) {
        self.start.store(run.start, Ordering::Relaxed);
        self.end.store(run.end, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Touches `pages` that are all untouched, and answers the fills.
    fn fills(touches: &FirstTouches, pages: &[u64]) -> Vec<std::ops::Range<u64>> {
        let mut there = std::collections::BTreeSet::new();
        let mut fills = Vec::new();
        for &page in pages {
            if !there.contains(&page) {
                let window = touches.window(Ppn(page));
                assert!(window.contains(&page));
                let absent = |p: &u64| !there.contains(p);
                let before = (window.start..page).rev().take_while(absent).count() as u64;
                let after = (page..window.end).take_while(absent).count() as u64;
                let run = page - before..page + after;
                touches.filled(&run);
                there.extend(run.clone());
                fills.push(run);
            }
        }
        fills
    }

    #[test]
    fn touches_in_a_row_get_more_each_time_up_to_a_bound() {
        let up: Vec<u64> = (0..1024).collect();
        let got = fills(&FirstTouches::new(16), &up);
        assert_eq!(got[..5], [0..16, 16..32, 32..64, 64..128, 128..256]);
        assert!(got[5..].iter().all(|run| run.end - run.start == MOST), "{got:?}");
        // What is there never exceeds twice what was touched.
        for run in &got[1..] {
            assert!(run.end <= 2 * run.start.max(16), "{run:?}");
        }
        let down: Vec<u64> = (0..1024).rev().collect();
        let got = fills(&FirstTouches::new(16), &down);
        assert_eq!(got[..4], [1008..1024, 992..1008, 960..992, 896..960]);
    }

    #[test]
    fn other_touches_get_what_they_always_did() {
        let touches = FirstTouches::new(16);
        let far: Vec<u64> = (0..64).map(|i| i * 64).collect();
        assert!(fills(&touches, &far).iter().all(|run| run.end - run.start == 16));
        // A row that is broken off begins anew.
        let got = fills(&touches, &[8_192, 8_208, 8_224, 20_000, 20_016]);
        let sizes: Vec<u64> = got.iter().map(|run| run.end - run.start).collect();
        assert_eq!(sizes, [16, 16, 32, 16, 16]);
    }

    #[test]
    fn none_stays_none_and_more_stays_more() {
        let all: Vec<u64> = (0..32).collect();
        assert!(fills(&FirstTouches::new(1), &all).iter().all(|run| run.end - run.start == 1));
        let all: Vec<u64> = (0..2048).collect();
        let got = fills(&FirstTouches::new(512), &all);
        assert!(got.iter().all(|run| run.end - run.start == 512), "{got:?}");
    }
}
