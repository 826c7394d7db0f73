//! The swap space of a VM: its files, in one or more locations, as one range of slots.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_units::{Pages, SlotId};

use super::inject::Injector;
use super::{Location, Ring, SLOT_BITS, SlotSpace, SwapError, SwapFile};
use crate::backend::PageBuf;

/// Where a swap file of a VM is, for whoever takes the VM over.
#[derive(Clone, Debug)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The location that it was made in, which tells how its disk fares.
    pub location: Arc<Location>,
    /// Its slots; None: as many as the file has.
    pub len: Option<Pages>,
}

struct Part {
    /// Its slot 0 among all.
    first: u64,
    file: SwapFile,
    location: Arc<Location>,
}

/// One VM's swap files, those of the highest priority first. Removed by `remove`, not on drop.
pub struct SwapSpace {
    parts: Vec<Part>,
    injector: Option<Arc<dyn Injector>>,
}

/// Blocks that a file system needs for itself when a file takes all the rest.
const MARGIN: u64 = 64;

impl SwapSpace {
    /// Allocates `len` in files called `name`, in the first of these locations that have room; what does
    /// not fit into one goes to the next. Files that are there already are not touched: that is an error.
    ///
    /// # Errors
    /// The locations have no room for all of it, a file is there already, or it is more than slots have numbers. No file is left
    /// that was made.
    pub fn create(
        name: &str,
        len: Pages,
        locations: &[Arc<Location>],
    ) -> Result<SwapSpace, SwapError> {
        if len.0 > 1 << SLOT_BITS {
            return Err(SwapError::TooLarge { size: len, most: Pages(1 << SLOT_BITS) });
        }
        let mut space = SwapSpace { parts: Vec::new(), injector: None };
        let mut first_error = None;
        let mut left = len;
        for location in locations.iter().filter(|l| !l.is_failed()) {
            if left.is_zero() && !space.parts.is_empty() {
                break;
            }
            match create_in(location, name, left) {
                Ok(Some(file)) => {
                    left -= file.len();
                    space.push(file, location.clone());
                }
                Ok(None) => {}
                Err(e) => drop(first_error.get_or_insert(e)),
            }
        }
        if left.is_zero() && !space.parts.is_empty() {
            return Ok(space);
        }
        let had = len - left;
        space.remove();
        Err(first_error.unwrap_or(SwapError::NoRoom { size: len, had }))
    }

    /// Tests: the one file at `path`, which is made.
    ///
    /// # Errors
    /// As of [`SwapFile::create`].
    pub fn create_at(path: &Path, len: Pages) -> Result<SwapSpace, SwapError> {
        let mut space = SwapSpace { parts: Vec::new(), injector: None };
        space.push(SwapFile::create(path, len)?, lone(path));
        Ok(space)
    }
    /// Tests: the one file at `path`.
    ///
    /// # Errors
    /// As of [`SwapFile::open`].
    pub fn open_at(path: &Path) -> Result<SwapSpace, SwapError> {
        SwapSpace::open(&[Place { path: path.to_owned(), location: lone(path), len: None }])
    }

    /// The files of a VM that runs already, in the order in which they were made.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn open(places: &[Place]) -> Result<SwapSpace, SwapError> {
        let mut space = SwapSpace { parts: Vec::new(), injector: None };
        for place in places {
            let file = SwapFile::open(&place.path, place.len)?;
            if let Some(why) = file.unwritable() {
                place.location.is_read_only(why);
            }
            space.push(file, place.location.clone());
        }
        Ok(space)
    }

    fn push(&mut self, file: SwapFile, location: Arc<Location>) {
        let first = self.len().0;
        self.parts.push(Part { first, file, location });
    }

    /// Tests: from now on, rings of this space ask `injector`.
    #[must_use]
    pub fn injected(self, injector: Arc<dyn Injector>) -> SwapSpace {
        SwapSpace { injector: Some(injector), ..self }
    }

    /// Slots of all files.
    pub fn len(&self) -> Pages {
        self.parts.iter().map(|p| p.file.len()).sum()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }
    /// All slots free.
    pub(crate) fn slots(&self) -> SlotSpace {
        SlotSpace::new(self.parts.iter().map(|p| (p.file.len(), p.location.clone())))
    }
    /// Its files, in the order of their slots.
    pub fn places(&self) -> Vec<Place> {
        let place = |p: &Part| Place {
            path: p.file.path().to_owned(),
            location: p.location.clone(),
            len: Some(p.file.len()),
        };
        self.parts.iter().map(place).collect()
    }
    /// Files whose pages are in the host's memory, or may be, outside the budget; and why.
    pub(crate) fn in_memory(&self) -> impl Iterator<Item = (&Path, &'static str)> {
        self.parts.iter().map(|p| &p.file).filter_map(|file| {
            let why = match (file.is_in_memory(), file.is_direct()) {
                (true, _) => "it is on a tmpfs: what is swapped there stays in the host's memory",
                (false, true) => return None,
                (false, false) => {
                    "no O_DIRECT there: swapped pages may stay in the host's page cache"
                }
            };
            Some((file.path(), why))
        })
    }

    pub(crate) fn ring(&self, depth: u32) -> Ring {
        Ring::with(depth, self.injector.clone())
    }

    /// The file of a slot, where in it the slot is, and how the location fares. None if there is no
    /// such slot.
    pub(crate) fn find(&self, slot: SlotId) -> Option<(&SwapFile, SlotId, &Arc<Location>)> {
        let part = self.parts.iter().rfind(|p| p.first <= slot.0)?;
        let within = SlotId(slot.0 - part.first);
        (within.0 < part.file.len().0).then_some((&part.file, within, &part.location))
    }

    /// Reads one slot, waiting for it. For tests; faults go through a ring.
    ///
    /// # Errors
    /// As of [`SwapFile::read`].
    pub fn read(&self, slot: SlotId, into: &mut PageBuf) -> std::io::Result<()> {
        let (file, within, _) = self.find(slot).ok_or(std::io::ErrorKind::InvalidInput)?;
        file.read(within, into)
    }

    /// Deletes the files; one that is not there is as good.
    pub fn remove(&self) {
        for part in &self.parts {
            match std::fs::remove_file(part.file.path()) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!("removing {}: {e}", part.file.path().display());
                }
                _ => {}
            }
        }
    }
}

/// What is not used of a location with so much room, where that is less than what is asked for: the file system needs
/// some for itself.
pub fn kept_back(room: Pages) -> Pages {
    Pages((room.0 / MARGIN).max(MARGIN)).min(room)
}

fn lone(path: &Path) -> Arc<Location> {
    let never_again = std::time::Duration::MAX;
    Location::with_rest(path.parent().unwrap_or(Path::new("/")), 0, never_again)
}

/// A file of up to `len`; None where there is no room at all.
fn create_in(location: &Location, name: &str, len: Pages) -> Result<Option<SwapFile>, SwapError> {
    let path = location.folder().join(name);
    let room = match location.room() {
        Some(room) if room < len => room - kept_back(room),
        // Unknown: what is wrong there is told best by trying.
        _ => len,
    };
    let mut size = room.min(len);
    loop {
        if size.is_zero() && !len.is_zero() {
            return Ok(None);
        }
        match SwapFile::create(&path, size) {
            // Others were quicker, or the file system needs more for itself.
            Err(SwapError::Create { source, .. }) if is_full(&source) && size < len => {
                size = Pages(size.0 / 2);
            }
            Err(SwapError::Create { source, .. }) if is_full(&source) && !size.is_zero() => {
                size = location.room().unwrap_or(Pages::ZERO).min(Pages(size.0 / 2));
            }
            other => return other.map(Some),
        }
    }
}

fn is_full(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn location(dir: &Path, priority: i32) -> Arc<Location> {
        std::fs::create_dir_all(dir).unwrap();
        Location::new(dir, priority)
    }

    /// A tmpfs of its own, unmounted with the test.
    struct Small(PathBuf);
    impl Small {
        /// None where mounting is not allowed.
        fn mount(at: PathBuf, pages: u64) -> Option<Small> {
            std::fs::create_dir(&at).unwrap();
            let size = CString::new(format!("size={}", pages * 4096)).unwrap();
            let path = CString::new(at.as_os_str().as_bytes()).unwrap();
            // SAFETY: strings that end, and live through the call.
            let mounted = unsafe {
                let (none, tmpfs) = (c"none".as_ptr(), c"tmpfs".as_ptr());
                libc::mount(none, path.as_ptr(), tmpfs, 0, size.as_ptr().cast())
            };
            match if mounted == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) } {
                Ok(()) => Some(Small(at)),
                Err(e) => {
                    let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
                    assert!(required.as_deref() != Ok("1"), "mounting a tmpfs: {e}");
                    eprintln!("SKIPPED: mounting a tmpfs: {e}");
                    None
                }
            }
        }
    }
    impl Drop for Small {
        fn drop(&mut self) {
            let path = CString::new(self.0.as_os_str().as_bytes()).unwrap();
            // SAFETY: a string that ends, and lives through the call.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        }
    }

    #[test]
    fn what_does_not_fit_into_the_first_location_goes_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let Some(small) = Small::mount(dir.path().join("small"), 512) else { return };
        let (small, large) =
            (Location::new(&small.0.clone(), 2), location(&dir.path().join("large"), 1));
        let locations = [small.clone(), large.clone()];
        let space = SwapSpace::create("a.swap", Pages(2048), &locations).unwrap();
        let places = space.places();
        assert_eq!((places.len(), space.len()), (2, Pages(2048)));
        let in_small = places[0].len.unwrap();
        assert!(in_small > Pages(256) && in_small <= Pages(512), "{in_small:?}");
        assert_eq!(places[1].path, dir.path().join("large/a.swap"));
        // A slot lies in the file that it says, and another manager finds it there.
        let again = SwapSpace::open(&places).unwrap();
        for slot in [0, in_small.0 - 1, in_small.0, 2047] {
            let (file, within, _) = again.find(SlotId(slot)).unwrap();
            let there = if slot < in_small.0 { 0 } else { 1 };
            assert_eq!(file.path(), places[there].path);
            assert_eq!(within.0, if there == 0 { slot } else { slot - in_small.0 });
        }
        assert!(again.find(SlotId(2048)).is_none());
        // The second VM finds the first location full.
        let second = SwapSpace::create("b.swap", Pages(256), &locations).unwrap();
        assert!(second.places().iter().any(|p| p.path == dir.path().join("large/b.swap")));
        space.remove();
        second.remove();
        assert!(!places.iter().any(|p| p.path.exists()));
    }

    #[test]
    fn a_reservation_that_fits_nowhere_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let Some(small) = Small::mount(dir.path().join("small"), 256) else { return };
        let only = [Location::new(&small.0, 0)];
        let error = SwapSpace::create("a.swap", Pages(1024), &only).err().unwrap().to_string();
        assert!(error.contains("4 MiB") && !error.contains('\n'), "{error}");
        assert_eq!(std::fs::read_dir(&small.0).unwrap().count(), 0);
        let gone = [Location::new(&dir.path().join("gone"), 0)];
        for len in [0, 10] {
            let error = SwapSpace::create("a.swap", Pages(len), &gone).err().unwrap().to_string();
            assert!(error.contains("gone/a.swap"), "{error}");
        }
        let error = SwapSpace::create("a.swap", Pages(1 << 40), &only).err().unwrap();
        assert!(matches!(error, SwapError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn nothing_is_made_in_a_location_that_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        let [bad, good] =
            [("bad", 2), ("good", 1)].map(|(name, p)| location(&dir.path().join(name), p));
        while !bad.is_failed() {
            bad.write_failed();
        }
        let space = SwapSpace::create("a.swap", Pages(16), &[bad, good]).unwrap();
        assert_eq!(space.places()[0].path, dir.path().join("good/a.swap"));
    }
}
