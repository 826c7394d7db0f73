//! How much is handed out around a first touch while memory is plentiful, and ahead of those that follow one another.
//!
//! The guest waits for the page and a few beside it. The rest of a fixed amount around it comes unasked, after the
//! guest was woken. Where touches go on where pages were handed out last (upwards, or downwards), the guest is filling
//! memory in order: then as much again as it has filled so far comes unasked, in parts. So it waits for one fault where
//! it would for many, its memory is made while it works, and what it has and does not use stays below what it has
//! touched. Some rows are known at a time: a guest with several processors fills several places.

use std::ops::Range;

use ballast_units::Ppn;

use crate::sync::{AtomicBool, Mutex, Ordering, lock};

/// What is there before the guest is woken, pages: 16 KiB.
const NEAR: u64 = 4;
/// The most that comes unasked after one fault, pages: 2 MiB.
const MOST: u64 = 512;
/// So many large pages must have been touched one after the other before one comes unasked: it takes long, and all of
/// it is in vain where a row ends.
const LARGE: u64 = 4;
/// Rows that are known at a time.
const ROWS: usize = 4;

/// Pages that were handed out one after the other.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    start: u64,
    end: u64,
    /// Pages that are still to come unasked: behind `end`, or before `start` where it goes down.
    ahead: u64,
    down: bool,
    /// So many more that are to come before `start`, where it goes up.
    below: u64,
}

impl Row {
    /// Whether a touch goes on where this ended, or close behind; `Some(true)` if downwards.
    fn continued_by(&self, run: &Range<u64>, near: u64) -> Option<bool> {
        let up = (self.end..self.end + near).contains(&run.start);
        let down = run.end <= self.start && run.end + near > self.start;
        (self.start < self.end && (up || down)).then_some(down)
    }

    /// Of what is to come unasked, the next `most` pages.
    fn part(&self, most: u64) -> Option<Ahead> {
        let down = self.down || self.ahead == 0;
        let n = most.min(if self.ahead == 0 { self.below } else { self.ahead });
        let pages =
            if down { self.start.saturating_sub(n)..self.start } else { self.end..self.end + n };
        (!pages.is_empty()).then_some(Ahead { pages, down, row: self.end - self.start })
    }

    /// The part that begins there has come, or what there was of it; or it is not to come.
    fn settle(&mut self, came: Option<&Range<u64>>) {
        let left = if self.ahead == 0 { &mut self.below } else { &mut self.ahead };
        *left = came.map_or(0, |run| left.saturating_sub(run.end - run.start));
        if let Some(run) = came {
            self.start = self.start.min(run.start);
            self.end = self.end.max(run.end);
        }
    }
}

/// What may come unasked next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    pub pages: Range<u64>,
    /// From its end on downwards.
    pub down: bool,
    /// Pages that have come one after the other before it.
    pub row: u64,
}

impl Ahead {
    /// Whether what has come is enough for a large page of `n` pages to come unasked.
    pub fn is_long_for(&self, n: u64) -> bool {
        self.row >= LARGE * n
    }
}

/// The rows of one VM.
pub struct FirstTouches {
    /// Pages around a touch; a power of two.
    around: u64,
    /// The one that was continued last comes first.
    rows: Mutex<[Row; ROWS]>,
    /// Whether anything is to come unasked.
    has_ahead: AtomicBool,
}

impl FirstTouches {
    /// `around` pages around a touch: a power of two, 1 for none, and nothing unasked.
    pub fn new(around: u64) -> FirstTouches {
        let rows = Mutex::new([Row::default(); ROWS]);
        FirstTouches { around: around.max(1), rows, has_ahead: AtomicBool::new(false) }
    }

    /// The aligned window around a page that is touched for the first time, of which what is untouched may come
    /// with it: more where the guest is there before what was to come unasked.
    pub fn window(&self, ppn: Ppn) -> Range<u64> {
        let is_late = |row: &Row| {
            let touch = ppn.0..ppn.0 + 1;
            row.part(1).is_some() && row.continued_by(&touch, self.around).is_some()
        };
        let size = if self.has_ahead() && lock(&self.rows).iter().any(is_late) {
            self.around
        } else {
            self.around.min(NEAR)
        };
        let start = ppn.0 - ppn.0 % size;
        start..start + size
    }

    /// These came, for one of them was touched.
    pub fn touched(&self, run: &Range<u64>) {
        if self.around == 1 {
            return;
        }
        let mut rows = lock(&self.rows);
        let near = self.around.max(run.end - run.start);
        let found = rows
            .iter()
            .enumerate()
            .find_map(|(at, row)| row.continued_by(run, near).map(|down| (at, down)));
        let around = run.start - run.start % self.around;
        let above = (around + self.around).saturating_sub(run.end);
        let (at, row) = match found {
            Some((at, down)) => {
                let (start, end) = (rows[at].start.min(run.start), rows[at].end.max(run.end));
                let rest = if down { run.start - around } else { above };
                let large = run.end - run.start > self.around;
                let in_row = !large || end - start >= LARGE * (run.end - run.start);
                let ahead = if in_row { (end - start).min(MOST).max(rest) } else { 0 };
                (at, Row { start, end, ahead, down, below: 0 })
            }
            None => {
                let below = run.start - around;
                (ROWS - 1, Row { start: run.start, end: run.end, ahead: above, down: false, below })
            }
        };
        rows[..=at].rotate_right(1);
        rows[0] = row;
        self.note(&rows);
    }

    fn note(&self, rows: &[Row; ROWS]) {
        let any = rows.iter().any(|row| row.part(1).is_some());
        self.has_ahead.store(any, Ordering::Relaxed);
    }

    /// Whether `ahead` has something.
    pub fn has_ahead(&self) -> bool {
        self.has_ahead.load(Ordering::Relaxed)
    }

    /// What may come unasked next: a part that is soon there.
    pub fn ahead(&self) -> Option<Ahead> {
        let rows = lock(&self.rows);
        let next = rows.iter().find_map(|row| row.part(self.around));
        self.note(&rows);
        next
    }

    /// These came unasked: all of a part, or the large page that it is at the edge of.
    pub fn went(&self, run: &Range<u64>) {
        self.settle(run, Some(run));
    }

    /// That way nothing more comes unasked, until a page is touched again.
    pub fn stop(&self, part: &Range<u64>) {
        self.settle(part, None);
    }

    fn settle(&self, part: &Range<u64>, came: Option<&Range<u64>>) {
        let mut rows = lock(&self.rows);
        let begins = |row: &&mut Row| {
            let next = row.part(1);
            next.is_some_and(|n| {
                if n.down { n.pages.end == part.end } else { n.pages.start == part.start }
            })
        };
        // Another touch may have changed it meanwhile.
        if let Some(row) = rows.iter_mut().find(begins) {
            row.settle(came);
        }
        self.note(&rows);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// A VM none of whose pages was touched.
    struct Guest {
        touches: FirstTouches,
        there: std::collections::BTreeSet<u64>,
        /// Pages that it waited for, and so many that came unasked.
        faults: Vec<u64>,
        unasked: u64,
    }

    impl Guest {
        fn new(around: u64) -> Guest {
            let touches = FirstTouches::new(around);
            Guest { touches, there: std::collections::BTreeSet::new(), faults: vec![], unasked: 0 }
        }

        /// Touches a page; after a fault, up to `parts` parts come unasked.
        fn touch(&mut self, page: u64, parts: usize) {
            if self.there.contains(&page) {
                return;
            }
            self.faults.push(page);
            let window = self.touches.window(Ppn(page));
            assert!(window.contains(&page));
            let absent = |p: &u64| !self.there.contains(p);
            let before = (window.start..page).rev().take_while(absent).count() as u64;
            let after = (page..window.end).take_while(absent).count() as u64;
            let run = page - before..page + after;
            self.there.extend(run.clone());
            self.touches.touched(&run);
            for _ in 0..parts {
                let Some(Ahead { pages, .. }) = self.touches.ahead() else { return };
                assert!(self.touches.has_ahead());
                if pages.clone().any(|p| self.there.contains(&p)) {
                    self.touches.stop(&pages);
                    continue;
                }
                self.there.extend(pages.clone());
                self.unasked += pages.end - pages.start;
                self.touches.went(&pages);
            }
        }
    }

    #[test]
    fn who_fills_memory_in_order_waits_seldom_and_has_less_unused_than_used() {
        let mut guest = Guest::new(16);
        for page in 0..8192 {
            guest.touch(page, usize::MAX);
            assert!(guest.there.len() as u64 <= (2 * (page + 1)).max(32) + 32, "at {page}");
        }
        assert_eq!(guest.faults[..5], [0, 16, 40, 88, 184]);
        assert!(guest.faults.len() < 24, "{:?}", guest.faults);
        let mut guest = Guest::new(16);
        (0..8192).rev().for_each(|page| guest.touch(page, usize::MAX));
        assert!(guest.faults.len() < 24, "{:?}", guest.faults);
        assert!(guest.there.iter().all(|&p| p < 8192));
    }

    #[test]
    fn what_is_around_a_touch_comes_when_the_guest_goes_on() {
        for page in 0..16 {
            let mut guest = Guest::new(16);
            guest.touch(160 + page, 0);
            assert_eq!(guest.there.len(), 4, "at {page}");
            let mut guest = Guest::new(16);
            guest.touch(160 + page, usize::MAX);
            assert_eq!(guest.there, (160..176).collect(), "at {page}");
        }
    }

    #[test]
    fn what_did_not_come_before_it_was_touched_is_handed_out_for_that() {
        // No part comes in time, or one of them.
        for parts in [0, 1] {
            let mut guest = Guest::new(16);
            (0..1024).for_each(|page| guest.touch(page, parts));
            assert!(guest.unasked <= 16 * guest.faults.len() as u64);
            assert!(guest.faults.len() <= 66, "{:?}", guest.faults);
        }
    }

    #[test]
    fn several_rows_are_known_together() {
        let mut guest = Guest::new(16);
        for page in 0..2048 {
            (0..ROWS as u64).for_each(|row| guest.touch(row * 100_000 + page, usize::MAX));
        }
        assert!(guest.faults.len() < 16 * ROWS, "{:?}", guest.faults);
    }

    #[test]
    fn what_is_around_touches_here_and_there_comes_for_each_of_some() {
        let touches = FirstTouches::new(16);
        let at = [1_000, 2_000, 3_000].map(|page| touches.window(Ppn(page)));
        at.iter().for_each(|run| touches.touched(run));
        let mut came = 0;
        while let Some(Ahead { pages, .. }) = touches.ahead() {
            came += pages.end - pages.start;
            touches.went(&pages);
        }
        assert_eq!((came, touches.has_ahead()), (3 * 12, false));
    }

    #[test]
    fn touches_here_and_there_get_what_is_around_them() {
        let mut guest = Guest::new(16);
        (0..64).map(|i| i * 64).for_each(|page| guest.touch(page, usize::MAX));
        assert_eq!((guest.faults.len(), guest.there.len()), (64, 64 * 16));
        // Nor does anybody who is to get nothing around a touch.
        let mut guest = Guest::new(1);
        (0..64).for_each(|page| guest.touch(page, usize::MAX));
        assert_eq!((guest.faults.len(), guest.unasked), (64, 0));
    }

    #[test]
    fn a_row_goes_on_a_little_beyond_its_end_and_no_further() {
        let row = Row { start: 100, end: 108, ..Row::default() };
        let goes_on = |run: Range<u64>| row.continued_by(&run, 16);
        assert_eq!([108, 123, 124].map(|p| goes_on(p..p + 4)), [Some(false), Some(false), None]);
        assert_eq!([100, 85, 84].map(|p| goes_on(p - 4..p)), [Some(true), Some(true), None]);
        assert_eq!((goes_on(99..101), goes_on(107..109)), (None, None), "what is in it");
        assert_eq!(Row::default().continued_by(&(0..4), 16), None, "no row");
    }

    #[test]
    fn more_is_waited_for_only_where_what_was_to_come_is_late() {
        let touches = FirstTouches::new(16);
        let size = |page: u64| {
            let window = touches.window(Ppn(page));
            window.end - window.start
        };
        touches.touched(&(160..164));
        // 164..176 is to come.
        assert_eq!([143, 144, 159, 164, 179, 180].map(size), [4, 16, 16, 16, 16, 4]);
        touches.went(&(164..176));
        assert_eq!([159, 176].map(size), [4, 4]);
        // Downwards, all of what is around it.
        touches.touched(&(336..340));
        touches.touched(&(332..336));
        assert_eq!(touches.ahead(), Some(Ahead { pages: 320..332, down: true, row: 8 }));
    }

    #[test]
    fn large_pages_come_unasked_after_four_in_a_row() {
        let touches = FirstTouches::new(16);
        let regions: Vec<bool> = (10..16)
            .map(|region| {
                touches.touched(&(region * 512..(region + 1) * 512));
                touches.has_ahead()
            })
            .collect();
        assert_eq!(regions, [false, false, false, true, true, true]);
        let ahead = touches.ahead().unwrap();
        assert_eq!(ahead, Ahead { pages: 8192..8208, down: false, row: 6 * 512 });
        assert!(ahead.is_long_for(512) && !ahead.is_long_for(1024));
        touches.went(&(8192..8704));
        assert!(!touches.has_ahead());
    }

    #[test]
    fn what_could_not_come_is_not_tried_again_before_the_next_touch() {
        let touches = FirstTouches::new(16);
        touches.touched(&(0..16));
        assert!(!touches.has_ahead());
        touches.touched(&(16..32));
        assert_eq!(touches.ahead(), Some(Ahead { pages: 32..48, down: false, row: 32 }));
        touches.stop(&(32..48));
        assert_eq!((touches.has_ahead(), touches.ahead()), (false, None));
        touches.touched(&(32..48));
        assert!(touches.has_ahead());
        touches.stop(&(48..64));
        // Above a touch it could not come, below it can.
        touches.touched(&(168..172));
        assert_eq!(touches.ahead(), Some(Ahead { pages: 172..176, down: false, row: 4 }));
        touches.stop(&(172..176));
        assert_eq!(touches.ahead(), Some(Ahead { pages: 160..168, down: true, row: 4 }));
        touches.stop(&(160..168));
        assert!(!touches.has_ahead());
        // Down to the first page, and no further.
        let touches = FirstTouches::new(16);
        touches.touched(&(32..48));
        touches.touched(&(16..32));
        assert_eq!(touches.ahead(), Some(Ahead { pages: 0..16, down: true, row: 32 }));
        touches.went(&(0..16));
        assert_eq!(touches.ahead(), None);
    }
}
