//! A place for swap files: a folder on some disk, what the operator thinks of it, and what it has been
//! like. One is shared by all VMs that have files there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_units::{Bytes, Pages};

/// Writes that fail one after another before a location is given up for a while.
const ROW: u32 = 8;
/// How long that is the first time, and at most; it doubles with each try that fails.
const REST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(600);
/// Failed writes altogether before it is given up for good, ...
const ALTOGETHER: u32 = 64;
/// ... of which one is forgiven for so many that succeed: bad spots of a disk are met soon again, what happens once a
/// month is not held against it for years.
const FORGIVEN: u32 = 4_096;

/// A location as this manager has met it: the next one counts errors anew.
#[derive(Debug)]
pub struct Location {
    folder: PathBuf,
    /// Higher ones are used first.
    priority: i32,
    write_errors: AtomicU64,
    read_errors: AtomicU64,
    row: AtomicU32,
    /// Failures that are not forgiven, and what has succeeded since the last that was.
    held: AtomicU32,
    good: AtomicU32,
    failed: AtomicBool,
    /// It has failed, and is not tried again.
    for_good: AtomicBool,
    /// While it has failed, in milliseconds since it was made: since when somebody has had a try that has not come to its end
    /// (0: nobody has), how long it is left alone, and until when.
    trying_ms: AtomicU64,
    rest_ms: AtomicU64,
    until_ms: AtomicU64,
    made: Instant,
    first_rest: Duration,
}

impl Default for Location {
    fn default() -> Location {
        Location::without_errors(PathBuf::new(), 0, REST)
    }
}

impl Location {
    /// Without errors. Nothing is looked for there.
    pub fn new(folder: &Path, priority: i32) -> Arc<Location> {
        Location::with_rest(folder, priority, REST)
    }

    /// The same, left alone for so long when it has failed for the first time.
    pub fn with_rest(folder: &Path, priority: i32, first_rest: Duration) -> Arc<Location> {
        Arc::new(Location::without_errors(folder.to_owned(), priority, first_rest))
    }

    fn without_errors(folder: PathBuf, priority: i32, first_rest: Duration) -> Location {
        Location {
            folder,
            priority,
            write_errors: AtomicU64::default(),
            read_errors: AtomicU64::default(),
            row: AtomicU32::default(),
            held: AtomicU32::default(),
            good: AtomicU32::default(),
            failed: AtomicBool::default(),
            for_good: AtomicBool::default(),
            trying_ms: AtomicU64::default(),
            rest_ms: AtomicU64::default(),
            until_ms: AtomicU64::default(),
            made: Instant::now(),
            first_rest,
        }
    }

    /// Where swap files are made.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
    /// Higher ones are used first.
    pub fn priority(&self) -> i32 {
        self.priority
    }
    /// Writes that failed: an error, or fewer bytes than there were to write.
    pub fn write_errors(&self) -> u64 {
        self.write_errors.load(Ordering::Relaxed)
    }
    /// Reads that failed, or brought something else than was written.
    pub fn read_errors(&self) -> u64 {
        self.read_errors.load(Ordering::Relaxed)
    }
    /// Whether it has failed: nothing is written there but to see whether that goes again (`is_tried`), and no files are
    /// made. What is there is read as ever.
    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
    /// Whether pages may be written there now: it has not failed, or was left alone for long enough and nobody tries it.
    pub fn is_tried(&self) -> bool {
        !self.is_failed()
            || self.is_due() && !self.is_trying(self.trying_ms.load(Ordering::Relaxed))
    }

    /// Whether that is a try that may come to its end yet. One that takes longer than any rest is one of a disk that does not
    /// answer, or of a VM whose thread waits for something else, and keeps the location from nobody.
    fn is_trying(&self, since_ms: u64) -> bool {
        since_ms > 0 && self.now_ms().saturating_sub(since_ms) < LONGEST.as_millis() as u64
    }

    fn is_due(&self) -> bool {
        let is_over = || self.now_ms() >= self.until_ms.load(Ordering::Relaxed);
        !self.for_good.load(Ordering::Relaxed) && is_over()
    }

    /// The same, for who writes there next: of one that has failed it is one alone.
    pub(crate) fn may_be_tried(&self) -> bool {
        if !self.is_failed() {
            return true;
        }
        let (mine, none) = (Ordering::Relaxed, Ordering::Relaxed);
        let (before, now) = (self.trying_ms.load(Ordering::Relaxed), self.now_ms().max(1));
        self.is_due()
            && !self.is_trying(before)
            && self.trying_ms.compare_exchange(before, now, mine, none).is_ok()
    }

    /// Who may try it did not write, or does not wait any more for what comes of it.
    pub(crate) fn was_not_tried(&self) {
        self.trying_ms.store(0, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.made.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// A write is complete: failures that follow are in a row of their own.
    pub(crate) fn wrote(&self) {
        self.row.store(0, Ordering::Relaxed);
        // One that has too many bad spots is not asked again, whatever was on its way.
        if self.for_good.load(Ordering::Relaxed) {
            return;
        }
        self.was_not_tried();
        if self.is_failed() && self.failed.swap(false, Ordering::Relaxed) {
            tracing::info!("swap location {} is written to again", self.folder.display());
        }
        if self.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        if self.good.fetch_add(1, Ordering::Relaxed) + 1 >= FORGIVEN {
            self.good.store(0, Ordering::Relaxed);
            let less = |held: u32| held.checked_sub(1);
            let _ = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
    /// After `ROW` in a row the location has failed for a while, after `ALTOGETHER` for good.
    pub(crate) fn write_failed(&self) {
        let all = self.write_errors.fetch_add(1, Ordering::Relaxed) + 1;
        let row = self.row.fetch_add(1, Ordering::Relaxed) + 1;
        if self.is_failed() {
            // What was on its way when it failed is no try.
            if self.trying_ms.swap(0, Ordering::Relaxed) > 0 {
                let longer = self.rest_ms.load(Ordering::Relaxed).saturating_mul(2);
                self.leave_alone(longer.min(LONGEST.as_millis() as u64));
            }
            return;
        }
        let held = self.held.fetch_add(1, Ordering::Relaxed) + 1;
        let for_good = held >= ALTOGETHER;
        if row < ROW && !for_good {
            return;
        }
        let rest = u64::try_from(self.first_rest.as_millis()).unwrap_or(u64::MAX);
        self.leave_alone(rest);
        if for_good {
            self.for_good.store(true, Ordering::Relaxed);
            self.until_ms.store(u64::MAX, Ordering::Relaxed);
        }
        // Nobody has a try of what has not failed.
        self.was_not_tried();
        if !self.failed.swap(true, Ordering::Relaxed) {
            let until = match for_good {
                true => "no more are tried there".to_owned(),
                false => format!("the next is tried in {rest} ms"),
            };
            tracing::error!(
                "swap location {}: {all} writes failed: {until}",
                self.folder.display()
            );
        }
    }

    /// A file there can be read and not be written: as after too many failures.
    pub(crate) fn is_read_only(&self, why: &std::io::Error) {
        self.for_good.store(true, Ordering::Relaxed);
        self.until_ms.store(u64::MAX, Ordering::Relaxed);
        if !self.failed.swap(true, Ordering::Relaxed) {
            let folder = self.folder.display();
            tracing::error!("swap location {folder}: {why}: it is read, and no more written to");
        }
    }

    fn leave_alone(&self, ms: u64) {
        self.rest_ms.store(ms, Ordering::Relaxed);
        self.until_ms.store(self.now_ms().saturating_add(ms), Ordering::Relaxed);
    }

    /// Counted, and no more: what was written there is still wanted.
    pub(crate) fn read_failed(&self) {
        self.read_errors.fetch_add(1, Ordering::Relaxed);
    }

    /// Room for files that are yet to be made. None where it is not to be told: the folder is not there,
    /// or its disk has failed.
    pub fn room(&self) -> Option<Pages> {
        let fs = rustix::fs::statvfs(&self.folder).ok()?;
        Some(Bytes(fs.f_bavail.saturating_mul(fs.f_frsize)).pages())
    }

    /// The number of the file system that it is on: two locations on one have the same room. None where the folder
    /// is not there.
    pub fn file_system(&self) -> Option<u64> {
        Some(rustix::fs::stat(&self.folder).ok()?.st_dev)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn errors_now_and_then_are_borne_longer_than_errors_in_a_row() {
        let location = Location::new(Path::new("/nowhere"), 3);
        for _ in 1..ROW {
            location.write_failed();
        }
        location.wrote();
        assert!(!location.is_failed());
        for _ in 0..ROW {
            assert!(!location.is_failed());
            location.write_failed();
        }
        assert!(location.is_failed());

        let bad_spots = Location::new(Path::new("/nowhere"), 3);
        for n in 1..=ALTOGETHER {
            assert!(!bad_spots.is_failed(), "after {n}");
            bad_spots.write_failed();
            bad_spots.wrote();
        }
        assert!(bad_spots.is_failed());
        assert_eq!((bad_spots.write_errors(), bad_spots.room()), (u64::from(ALTOGETHER), None));

        // That is for good.
        bad_spots.wrote();
        assert!(bad_spots.is_failed() && !bad_spots.is_tried());
        assert_eq!(bad_spots.until_ms.load(Ordering::Relaxed), u64::MAX);

        let seldom = Location::new(Path::new("/nowhere"), 3);
        for n in 0..3 * ALTOGETHER {
            assert!(!seldom.is_failed(), "after {n}");
            seldom.write_failed();
            (0..FORGIVEN).for_each(|_| seldom.wrote());
        }
        assert_eq!(seldom.write_errors(), u64::from(3 * ALTOGETHER));
    }

    #[test]
    fn one_that_has_failed_is_tried_now_and_then_and_ever_less_often() {
        let failed = |rest| {
            let location = Location::with_rest(Path::new("/nowhere"), 3, rest);
            (0..ROW).for_each(|_| location.write_failed());
            assert!(location.is_failed());
            location
        };
        let minute = Duration::from_secs(60);
        let rest_of = |location: &Location| location.rest_ms.load(Ordering::Relaxed);
        // Somebody takes the next try, and nobody else before that has come to its end.
        let over = |location: &Location| {
            location.until_ms.store(0, Ordering::Relaxed);
            assert!(location.is_tried() && location.may_be_tried());
            assert!(!location.is_tried() && !location.may_be_tried());
        };
        let given_up = failed(minute);
        over(&given_up);
        given_up.was_not_tried();
        over(&given_up);
        // Nor is one that does not end waited for by others for longer than any rest.
        let made = Instant::now().checked_sub(2 * LONGEST).unwrap();
        let hung = Location { made, ..Location::default() };
        (0..ROW).for_each(|_| hung.write_failed());
        over(&hung);
        let since = |ago: Duration| {
            let ms = hung.now_ms() - ago.as_millis() as u64;
            hung.trying_ms.store(ms, Ordering::Relaxed);
        };
        since(LONGEST - minute);
        assert!(!hung.is_tried() && !hung.may_be_tried());
        since(LONGEST);
        assert!(hung.is_tried() && hung.may_be_tried());
        assert!(!hung.is_tried() && !hung.may_be_tried());
        let location = failed(minute);
        // What was on its way when it failed is no try.
        location.write_failed();
        assert_eq!((location.is_tried(), rest_of(&location)), (false, 60_000));
        over(&location);
        assert!(location.is_failed());
        location.write_failed();
        assert_eq!((location.is_tried(), rest_of(&location)), (false, 120_000));
        location.write_failed();
        assert_eq!(rest_of(&location), 120_000, "one that hung since it failed");
        for _ in 0..10 {
            over(&location);
            location.write_failed();
        }
        assert_eq!(rest_of(&location), LONGEST.as_millis() as u64);
        over(&location);
        location.wrote();
        assert!(!location.is_failed() && location.is_tried());
        // It begins anew.
        (1..ROW).for_each(|_| location.write_failed());
        assert!(!location.is_failed());
        location.write_failed();
        assert_eq!((location.is_failed(), rest_of(&location)), (true, 60_000));
        assert!(failed(Duration::ZERO).is_tried());
        assert!(location.is_failed() && Location::default().may_be_tried());
    }
}
