//! The compressed tier of a VM: pages that a guest has not used for a while, in fewer bytes of machine
//! memory, in a file of the VM's run folder so that they outlive the manager.
//!
//! ```text
//! the file:  frame 0 | frame 1 | hole | frame 3 ...      frames that hold nothing are holes
//! a frame:   four quarters, in slots of one or two
//! a slot:    PPN u64, then what the codec made of the page
//! ```
//!
//! Slots are taken by the VM's reclaim thread alone, and freed by any. A slot's bytes do not change from
//! the moment a pmap word names it until none does.

use std::fs::File;
use std::path::Path;

use ballast_compress::{Algorithm, Allocated, Damaged, Frames, Occupancy, Place, Returns, Size};
use ballast_units::{Bytes, PAGE_SIZE, Pages, Ppn};

use crate::backend::PageBuf;
use crate::file_memory;
use crate::mapped_file::Mapping;
use crate::sync::{Mutex, lock};

/// Bytes of a slot before the codec's.
const OWNER: usize = 8;
/// The most that a page may be compressed to.
const MOST: usize = Size::Half.bytes() - OWNER;

/// How a VM's pages are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// None: none are, beyond those that are already.
    pub algorithm: Option<Algorithm>,
    /// Machine memory that compressed pages may take, per cent of the VM's size (vSphere's default
    /// is 10).
    pub percent: u32,
    /// Whether they may take less where that is worth more (see `worth`).
    pub adaptive: bool,
    /// Whether a page that repeats one number is kept as that number.
    pub same_filled: bool,
}

impl Default for Compression {
    fn default() -> Compression {
        Compression {
            algorithm: Some(Algorithm::Lz4),
            percent: 10,
            adaptive: true,
            same_filled: true,
        }
    }
}

impl Compression {
    /// Nothing is compressed, and no number kept.
    pub const OFF: Compression =
        Compression { algorithm: None, percent: 0, adaptive: false, same_filled: false };

    /// The most frames that a VM of `size` may have.
    pub fn limit(self, size: Pages) -> Pages {
        Pages(size.0 * u64::from(self.percent) / 100)
    }
    /// Memory that the books of `limit` frames take.
    pub fn overhead(self, size: Pages) -> Pages {
        Bytes(self.limit(size).0 * 48).pages_ceil()
    }
}

/// The tier of one VM.
pub struct Tier {
    mapping: Option<Mapping>,
    /// None on the heap, where frames are always there.
    file: Option<File>,
    /// Room for so many frames.
    room: Pages,
    /// The most that it may ever have at a time.
    most: u64,
    frames: Mutex<Frames>,
    settings: Compression,
}

impl Tier {
    /// One that takes nothing.
    pub fn off() -> Tier {
        Tier::over(None, None, Pages::ZERO, Pages::ZERO, Compression::OFF)
    }

    /// The tier of a VM of `size`. An existing file is used: which of its slots are taken is told by
    /// `claim`.
    ///
    /// # Errors
    /// The file cannot be made, opened or mapped.
    pub fn open(path: &Path, size: Pages, settings: Compression) -> std::io::Result<Tier> {
        let (mapping, file) = Mapping::open_sparse(path, size.bytes().0 as usize)?;
        Ok(Tier::over(Some(mapping), Some(file), size, size, settings))
    }

    /// One that dies with the process, for tests.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn on_heap(size: Pages, settings: Compression) -> std::io::Result<Tier> {
        let mapping = Mapping::anonymous(size.bytes().0 as usize)?;
        Ok(Tier::over(Some(mapping), None, size, size, settings))
    }

    fn over(
        mapping: Option<Mapping>,
        file: Option<File>,
        room: Pages,
        size: Pages,
        settings: Compression,
    ) -> Tier {
        let limit = settings.limit(size).0.min(room.0);
        Tier { mapping, file, room, most: limit, frames: Mutex::new(Frames::new(limit)), settings }
    }

    /// Those that it was opened with.
    pub fn settings(&self) -> Compression {
        self.settings
    }
    /// What is in it now.
    pub fn occupancy(&self) -> Occupancy {
        lock(&self.frames).occupancy()
    }
    /// Memory that the file takes, as the kernel counts it.
    pub fn measured(&self) -> Bytes {
        let stat = self.file.as_ref().and_then(|file| rustix::fs::fstat(file).ok());
        stat.map_or(Bytes(0), |stat| Bytes(stat.st_blocks as u64 * 512))
    }
    /// Whether a page of any compressed size finds room, if the host has a page to spare.
    pub(crate) fn has_room(&self) -> bool {
        lock(&self.frames).has_room()
    }
    /// The same of `n` pages.
    pub(crate) fn has_room_for(&self, n: u64) -> bool {
        lock(&self.frames).has_room_for(n)
    }
    /// Frames that may still be taken, should the limit be what it may be at most.
    pub(crate) fn frames_left(&self) -> Pages {
        Pages(self.most.saturating_sub(self.occupancy().frames))
    }
    /// The most frames that it may have now, and ever.
    pub fn limits(&self) -> (Pages, Pages) {
        (Pages(lock(&self.frames).limit()), Pages(self.most))
    }
    /// From now on; never above the most that it may ever have. What is there above it stays until it leaves.
    pub(crate) fn set_limit(&self, frames: u64) {
        lock(&self.frames).set_limit(frames.min(self.most));
    }
    /// The guest waits for the page of a slot whose busy bit the caller holds.
    pub(crate) fn wanted_back(&self, place: Place) {
        lock(&self.frames).wanted_back(place);
    }
    /// Who was wanted back so far, and what is in it now.
    pub(crate) fn returns(&self) -> (Returns, Occupancy) {
        let frames = lock(&self.frames);
        (frames.returns(), frames.occupancy())
    }
    /// The most bytes that `put` takes.
    pub fn most(&self) -> usize {
        MOST
    }
    /// The invariants of its frames.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        lock(&self.frames).check()
    }

    /// Stores a compressed page. `charge` is asked for a page of machine memory if it needs another
    /// frame; `uncharge` takes it back if the file system has none. None if there is no room.
    pub fn put(
        &self,
        ppn: Ppn,
        bytes: &[u8],
        charge: impl FnOnce() -> bool,
        uncharge: impl FnOnce(),
    ) -> Option<Allocated> {
        let mapping = self.mapping.as_ref()?;
        let size = Size::holding(OWNER + bytes.len())?;
        let mut refused = false;
        let taken = {
            let mut frames = lock(&self.frames);
            let taken = frames.take(size, charge)?;
            if taken.new_frame && self.allocate(taken.place).is_err() {
                frames.release(taken.place);
                refused = true;
            }
            taken
        };
        if refused {
            uncharge();
            return None;
        }
        let at = taken.place.offset();
        // SAFETY: in bounds, for frames are only taken below the limit, which is below `room`; the
        // slot is taken and no word names it yet, so nobody else is at it.
        let slot = unsafe { mapping.slice_mut(at, size.bytes()) };
        slot[..OWNER].copy_from_slice(&ppn.0.to_le_bytes());
        slot[OWNER..OWNER + bytes.len()].copy_from_slice(bytes);
        Some(taken)
    }

    /// Backs a frame: a full tmpfs must be an error here, not a SIGBUS later.
    fn allocate(&self, place: Place) -> std::io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let at = u64::from(place.frame()) * PAGE_SIZE as u64;
        Ok(file_memory::allocate(file, at, PAGE_SIZE as u64)?)
    }

    fn punch(&self, first: u64, frames: u64) {
        let Some(file) = &self.file else { return };
        let page = PAGE_SIZE as u64;
        if let Err(e) = file_memory::free(file, first * page, frames * page) {
            // It stays allocated until it is used again.
            tracing::error!("freeing a frame of compressed pages: {e}");
        }
    }

    fn slot(&self, place: Place) -> Option<&[u8]> {
        let mapping = self.mapping.as_ref()?;
        if u64::from(place.frame()) >= self.room.0 {
            return None;
        }
        // SAFETY: in bounds; the caller holds the busy bit of the page whose word names the slot, or
        // is the reclaim thread, which alone writes to slots.
        Some(unsafe { mapping.slice(place.offset(), place.size().bytes()) })
    }

    /// The page in a slot that its word names, whose busy bit the caller holds.
    ///
    /// # Errors
    /// What is there is another page's, does not decompress, or not to what was put there.
    pub fn read(&self, ppn: Ppn, place: Place, page: &mut PageBuf) -> Result<(), Damaged> {
        let slot = self.slot(place).unwrap_or_default();
        let (owner, bytes) = slot.split_first_chunk().ok_or(Damaged::because("no such slot"))?;
        if u64::from_le_bytes(*owner) != ppn.0 {
            return Err(Damaged::because("another page's"));
        }
        ballast_compress::decompress(bytes, page)
    }

    /// The page that was stored in a slot; None if the slot is free. For the reclaim thread: somebody may
    /// free the slot meanwhile, but nobody write to it.
    pub fn owner(&self, place: Place) -> Option<Ppn> {
        // Under the lock, so that the frame is there while it is read: a look at a hole would allocate a page
        // that nobody has booked, or, where there is none, end the manager.
        let frames = lock(&self.frames);
        if !frames.is_taken(place) {
            return None;
        }
        let number = self.slot(place)?.first_chunk()?;
        Some(Ppn(u64::from_le_bytes(*number)))
    }

    /// Up to `n` slots, those first that were taken first.
    pub fn oldest(&self, n: usize) -> Vec<Place> {
        lock(&self.frames).oldest().take(n).collect()
    }

    /// The slots of the frame in which the one is that was taken first.
    pub(crate) fn oldest_frame(&self) -> Vec<Place> {
        lock(&self.frames).oldest_frame()
    }
    /// Whether it has more frames than it may have now.
    pub(crate) fn is_over(&self) -> bool {
        let frames = lock(&self.frames);
        frames.occupancy().frames > frames.limit()
    }

    /// Frees a slot that no word names any more. `uncharge` gives back its frame's page, if that holds
    /// nothing more.
    pub fn release(&self, place: Place, uncharge: impl FnOnce()) {
        let emptied = {
            let mut frames = lock(&self.frames);
            let emptied = frames.release(place);
            if emptied {
                // Under the lock: a frame must not be taken again before it is a hole.
                self.punch(u64::from(place.frame()), 1);
            }
            emptied
        };
        if emptied {
            uncharge();
        }
    }

    /// Recovery: a slot that a pmap word names. Answers whether its frame is counted for the first time;
    /// None if it does not exist or another word names it. The number in it is compared when it is read: here that
    /// would bring in every frame, and make those that were lost.
    pub(crate) fn claim(&self, place: Place) -> Option<bool> {
        self.slot(place)?;
        lock(&self.frames).claim(place)
    }

    /// Recovery, after all claims: frees the frames that none was in.
    pub fn trim(&self) {
        let frames = lock(&self.frames);
        let mut used: Vec<u64> = frames.oldest().map(|p| u64::from(p.frame())).collect();
        used.sort_unstable();
        used.dedup();
        let mut next = 0;
        for frame in used.into_iter().chain([self.room.0]) {
            if frame > next {
                self.punch(next, frame - next);
            }
            next = frame + 1;
        }
    }

    /// All of it goes: no word names a slot any more, nor will.
    pub(crate) fn free_all(&self) {
        let _frames = lock(&self.frames);
        self.punch(0, self.room.0);
    }

    /// Whether a slot is taken, for checks.
    pub(crate) fn is_taken(&self, place: Place) -> bool {
        lock(&self.frames).is_taken(place)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn frames_are_limited_and_charged_one_by_one() {
        let settings = Compression { percent: 3, ..Compression::default() };
        assert_eq!(settings.limit(Pages(1_000)), Pages(30));
        // 300 frames, 48 bytes each.
        assert_eq!(settings.overhead(Pages(10_000)), Pages(4));
        let tier = Tier::on_heap(Pages(100), settings).unwrap();
        assert_eq!((tier.settings(), tier.most()), (settings, 2_040));
        assert!(tier.put(Ppn(0), &[1; 2_041], || true, || ()).is_none(), "too large for a half");
        assert!(tier.put(Ppn(0), &[1; 9], || false, || ()).is_none(), "no memory");
        assert_eq!((tier.occupancy(), tier.frames_left()), (Occupancy::default(), Pages(3)));
        let charged = std::cell::Cell::new(0);
        let put = |n: u64| {
            let charge = || {
                charged.set(charged.get() + 1);
                true
            };
            tier.put(Ppn(n), &[n as u8; 2_040], charge, || ()).map(|taken| taken.place)
        };
        let places: Vec<Place> = (0..6).filter_map(put).collect();
        assert_eq!((charged.get(), tier.frames_left(), tier.has_room()), (3, Pages(0), false));
        assert_eq!(put(6), None);
        assert_eq!(tier.oldest(2), places[..2]);
        tier.check().unwrap();
        for (n, &place) in places.iter().enumerate() {
            assert_eq!(tier.owner(place), Some(Ppn(n as u64)));
            tier.release(place, || charged.set(charged.get() - 1));
            assert!(!tier.is_taken(place));
        }
        assert_eq!((charged.get(), tier.frames_left(), tier.has_room()), (0, Pages(3), true));
        assert!(!Tier::off().has_room() && Tier::off().put(Ppn(0), &[1], || true, || ()).is_none());
    }

    #[test]
    fn after_a_takeover_what_is_claimed_is_as_it_was_and_the_rest_is_freed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let page = |n: u64| -> PageBuf { std::array::from_fn(|i| (i as u64 / 64 * n) as u8) };
        let mut compressor = ballast_compress::Compressor::new(Algorithm::Lz4).unwrap();
        let open = || Tier::open(&dir.path().join("t"), Pages(100), Compression::default());
        let tier = open().unwrap();
        let put = |n: u64| {
            let bytes = compressor.compress(&page(n), tier.most()).unwrap();
            tier.put(Ppn(n), bytes, || true, || ()).unwrap().place
        };
        let places: Vec<Place> = (0..24).map(put).collect();
        let frames = |kept: &[usize]| {
            let kept: std::collections::BTreeSet<u32> =
                kept.iter().map(|&n| places[n].frame()).collect();
            Pages(kept.len() as u64)
        };
        assert_eq!(tier.measured().pages(), frames(&(0..24).collect::<Vec<_>>()));
        drop(tier);
        let tier = open().unwrap();
        let kept = [5, 6, 7, 15];
        let counted = kept.iter().filter(|&&n| tier.claim(places[n]).unwrap()).count();
        assert_eq!(Pages(counted as u64), frames(&kept), "each frame is counted once");
        assert_eq!(tier.claim(places[5]), None, "another page's");
        tier.trim();
        assert_eq!(tier.measured().pages(), frames(&kept));
        for n in kept {
            let mut read = [0; PAGE_SIZE];
            tier.read(Ppn(n as u64), places[n], &mut read).unwrap();
            assert!(read == page(n as u64) && tier.owner(places[n]) == Some(Ppn(n as u64)));
        }
        let mut read = [0; PAGE_SIZE];
        let others = tier.read(Ppn(5), places[6], &mut read);
        assert_eq!(others, Err(Damaged::because("another page's")));
        assert!(read == [0; PAGE_SIZE], "nothing is taken from another page's slot");
        tier.check().unwrap();
        // Of a frame beyond the end of the file.
        let at = |frame: u64| Place::from_bits(frame << 3 | places[0].bits() & 7);
        assert_eq!(at(100).and_then(|place| tier.claim(place)), None);
        assert!(at(100).is_some_and(|place| tier.read(Ppn(5), place, &mut read).is_err()));
    }

    #[test]
    fn a_slot_that_was_freed_is_not_looked_into() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let tier = Tier::open(&dir.path().join("t"), Pages(100), Compression::default()).unwrap();
        let place = tier.put(Ppn(7), &[1; 100], || true, || ()).unwrap().place;
        assert_eq!(tier.owner(place), Some(Ppn(7)));
        assert_eq!(tier.measured().pages(), Pages(1));
        tier.release(place, || ());
        assert_eq!(tier.owner(place), None);
        assert_eq!(tier.measured().pages(), Pages(0), "a look has allocated a page");
    }
}
