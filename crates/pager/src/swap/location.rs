//! A place for swap files: a folder on some disk, what the operator thinks of it, and what it has been
//! like. One is shared by all VMs that have files there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ballast_units::{Bytes, Pages};

/// Writes that fail one after another before a location is given up.
const ROW: u32 = 8;
/// Failed writes altogether before it is, ...
const ALTOGETHER: u32 = 64;
/// ... of which one is forgiven for so many that succeed: bad spots of a disk are met soon again, what happens once a
/// month is not held against it for years.
const FORGIVEN: u32 = 4_096;

/// A location as this manager has met it: the next one counts errors anew.
#[derive(Debug, Default)]
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
}

impl Location {
    /// Without errors. Nothing is looked for there.
    pub fn new(folder: &Path, priority: i32) -> Arc<Location> {
        Arc::new(Location { folder: folder.to_owned(), priority, ..Location::default() })
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
    /// Whether it has failed: nothing more is written there while this manager lives. What is there is
    /// read as ever.
    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// A write is complete: failures that follow are in a row of their own.
    pub(crate) fn wrote(&self) {
        self.row.store(0, Ordering::Relaxed);
        if self.held.load(Ordering::Relaxed) == 0 {
            return;
        }
        if self.good.fetch_add(1, Ordering::Relaxed) + 1 >= FORGIVEN {
            self.good.store(0, Ordering::Relaxed);
            let less = |held: u32| held.checked_sub(1);
            let _ = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
    /// After `ROW` in a row, or `ALTOGETHER`, the location has failed.
    pub(crate) fn write_failed(&self) {
        let all = self.write_errors.fetch_add(1, Ordering::Relaxed) + 1;
        let row = self.row.fetch_add(1, Ordering::Relaxed) + 1;
        let held = self.held.fetch_add(1, Ordering::Relaxed) + 1;
        if (row >= ROW || held >= ALTOGETHER) && !self.failed.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "swap location {}: {all} writes failed: no more are tried there",
                self.folder.display()
            );
        }
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

        let seldom = Location::new(Path::new("/nowhere"), 3);
        for n in 0..3 * ALTOGETHER {
            assert!(!seldom.is_failed(), "after {n}");
            seldom.write_failed();
            (0..FORGIVEN).for_each(|_| seldom.wrote());
        }
        assert_eq!(seldom.write_errors(), u64::from(3 * ALTOGETHER));
    }
}
