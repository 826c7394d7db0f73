//! The pmap: one word per guest page, in a file on the runtime tmpfs so that it outlives the
//! manager. It is the single source of truth; all else is derived from it.
//!
//! ```text
//! page 0     magic "BLSTPMAP", version u32, reserved u32, pages u64; zeros
//! page 1..   words, 8 bytes each, little-endian, one per PPN
//! ```

use std::path::{Path, PathBuf};

use ballast_units::{PAGE_SIZE, Pages, Ppn};

use crate::mapping::Mapping;
use crate::sync::{AtomicI64, AtomicU64, Ordering};
use crate::word::{BadWord, State, Word};

const MAGIC: &[u8; 8] = b"BLSTPMAP";
/// Versions 1 and 2 knew fewer states, and no checksums in the words of swapped pages: their files are
/// right ones of version 3, whose zero checksum means that there is none.
pub const VERSION: u32 = 3;
/// The first with checksums.
const SUMS: u32 = 3;

/// Why a pmap file cannot be used. Nothing has been changed in it.
#[derive(Debug, thiserror::Error)]
pub enum PmapError {
    #[error("pmap {}: {source}", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("pmap {} is not a pmap file", .path.display())]
    Magic { path: PathBuf },
    #[error("pmap {} has version {found}; this manager knows {VERSION}", .path.display())]
    Version { path: PathBuf, found: u32 },
    #[error("pmap {} is for {found} pages, the VM has {}", .path.display(), .wanted.0)]
    Size { path: PathBuf, found: u64, wanted: Pages },
    #[error("pmap {}: {ppn}: {source}", .path.display())]
    Word { path: PathBuf, ppn: Ppn, source: BadWord },
}

enum Words {
    File(Mapping),
    Heap(Box<[AtomicU64]>),
}

/// The pmap of one VM, with a count of pages per state.
pub struct Pmap {
    words: Words,
    len: Pages,
    counts: [AtomicI64; State::ALL.len()],
}

impl Pmap {
    /// A pmap that dies with the process, for tests.
    pub fn on_heap(len: Pages) -> Pmap {
        let words = (0..len.0).map(|_| AtomicU64::new(0)).collect();
        Pmap::count(Words::Heap(words), len)
    }

    /// Creates the file, all pages untouched. Fails if it exists.
    pub fn create(path: &Path, len: Pages) -> Result<Pmap, PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        let mut mapping = Mapping::create_file(path, file_bytes(len)).map_err(io)?;
        let header = mapping.bytes_mut(0, 24);
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[16..24].copy_from_slice(&len.0.to_le_bytes());
        Ok(Pmap::count(Words::File(mapping), len))
    }

    /// Opens the pmap of a VM that runs already; every word is checked.
    pub fn open(path: &Path, len: Pages) -> Result<Pmap, PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        Pmap::verify(path)?;
        let mut mapping = Mapping::open_file(path).map_err(io)?;
        if mapping.len() < PAGE_SIZE {
            return Err(PmapError::Magic { path: path.to_owned() });
        }
        let header = mapping.bytes_mut(0, 24);
        let found = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let has_sums = found >= SUMS;
        let mut count = [0u8; 8];
        count.copy_from_slice(&header[16..24]);
        let found = u64::from_le_bytes(count);
        if found != len.0 || mapping.len() < file_bytes(len) {
            return Err(PmapError::Size { path: path.to_owned(), found, wanted: len });
        }
        let mut pmap = Pmap::count(Words::File(mapping), len);
        for ppn in (0..len.0).map(Ppn) {
            let bits = pmap.cell(ppn).load(Ordering::Relaxed);
            Word::from_bits(bits)
                .and_then(
                    |w| if has_sums || w.has_room_for_sum() { Ok(w) } else { Err(BadWord(bits)) },
                )
                .map_err(|source| PmapError::Word { path: path.to_owned(), ppn, source })?;
        }
        if let Words::File(mapping) = &mut pmap.words {
            // From now on it may hold what an older manager would not understand. One store: a manager
            // that dies here leaves a right file of either version.
            mapping.bytes_mut(8, 4).copy_from_slice(&VERSION.to_le_bytes());
        }
        pmap.recount();
        Ok(pmap)
    }

    /// Whether this manager understands the file.
    pub fn verify(path: &Path) -> Result<(), PmapError> {
        let header = crate::mapping::first_bytes(path)
            .map_err(|source| PmapError::Io { path: path.to_owned(), source })?;
        check_version(path, &header)
    }

    /// The words of a VM that nobody has taken over yet, read from its file: changes nothing.
    pub fn peek(path: &Path, each: impl FnMut(Ppn, Word)) -> Result<(), PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        Pmap::peek_bytes(path, &std::fs::read(path).map_err(io)?, each)
    }

    /// The same of bytes that are there already; `path` is for the error.
    pub(crate) fn peek_bytes(
        path: &Path,
        bytes: &[u8],
        mut each: impl FnMut(Ppn, Word),
    ) -> Result<(), PmapError> {
        check_version(path, bytes)?;
        if bytes.len() < PAGE_SIZE {
            return Err(PmapError::Magic { path: path.to_owned() });
        }
        let mut count = [0u8; 8];
        count.copy_from_slice(&bytes[16..24]);
        let words = bytes[PAGE_SIZE..].chunks_exact(8).take(u64::from_le_bytes(count) as usize);
        for (ppn, raw) in words.enumerate() {
            let mut word = [0u8; 8];
            word.copy_from_slice(raw);
            let word = Word::from_bits(u64::from_le_bytes(word)).map_err(|source| {
                PmapError::Word { path: path.to_owned(), ppn: Ppn(ppn as u64), source }
            })?;
            each(Ppn(ppn as u64), word);
        }
        Ok(())
    }

    fn count(words: Words, len: Pages) -> Pmap {
        let counts = State::ALL.map(|_| AtomicI64::new(0));
        counts[State::Untouched as usize].store(len.0 as i64, Ordering::Relaxed);
        Pmap { words, len, counts }
    }

    fn cell(&self, ppn: Ppn) -> &AtomicU64 {
        match &self.words {
            Words::Heap(words) => &words[ppn.index()],
            Words::File(mapping) => mapping.atomic(PAGE_SIZE + ppn.index() * 8),
        }
    }

    pub fn len(&self) -> Pages {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// # Panics
    /// If `ppn` is not below `len()`: callers check what comes from outside.
    pub fn load(&self, ppn: Ppn) -> Word {
        assert!(ppn.0 < self.len.0, "{ppn} beyond {}", self.len.0);
        Word::trusted(self.cell(ppn).load(Ordering::Acquire))
    }

    /// Moves a page from `from` to `to` if it is still in `from`; answers what it is otherwise.
    pub fn exchange(&self, ppn: Ppn, from: Word, to: Word) -> Result<(), Word> {
        match self.cell(ppn).compare_exchange(
            from.bits(),
            to.bits(),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => {
                self.moved(from.state(), to.state());
                Ok(())
            }
            Err(now) => Err(Word::trusted(now)),
        }
    }

    /// Sets a page whose busy bit the caller holds.
    pub fn store(&self, ppn: Ppn, to: Word) {
        let from = Word::trusted(self.cell(ppn).swap(to.bits(), Ordering::AcqRel));
        self.moved(from.state(), to.state());
    }

    fn moved(&self, from: State, to: State) {
        if from != to {
            self.counts[from as usize].fetch_sub(1, Ordering::Relaxed);
            self.counts[to as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Pages in a state now, busy ones included.
    pub fn in_state(&self, state: State) -> Pages {
        Pages(self.counts[state as usize].load(Ordering::Relaxed).max(0) as u64)
    }

    fn recount(&self) {
        let mut counts = [0i64; State::ALL.len()];
        for ppn in (0..self.len.0).map(Ppn) {
            counts[self.load(ppn).state() as usize] += 1;
        }
        for (cell, n) in self.counts.iter().zip(counts) {
            cell.store(n, Ordering::Relaxed);
        }
    }

    /// Invariant, when nothing moves: the counts are those of the words.
    pub fn check(&self) -> Result<(), String> {
        let mut counts = [0i64; State::ALL.len()];
        for ppn in (0..self.len.0).map(Ppn) {
            counts[self.load(ppn).state() as usize] += 1;
        }
        for state in State::ALL {
            let booked = self.counts[state as usize].load(Ordering::Relaxed);
            if booked != counts[state as usize] {
                return Err(format!(
                    "{state:?}: {} pages, {booked} booked",
                    counts[state as usize]
                ));
            }
        }
        Ok(())
    }
}

fn check_version(path: &Path, header: &[u8]) -> Result<(), PmapError> {
    match crate::stage::version_in(header, MAGIC) {
        None => Err(PmapError::Magic { path: path.to_owned() }),
        Some(1..=VERSION) => Ok(()),
        Some(found) => Err(PmapError::Version { path: path.to_owned(), found }),
    }
}

fn file_bytes(len: Pages) -> usize {
    PAGE_SIZE + (len.0 as usize * 8).next_multiple_of(PAGE_SIZE)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_pmap_file_keeps_its_words_and_counts_over_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pmap");
        let pmap = Pmap::create(&path, Pages(1000)).unwrap();
        pmap.store(Ppn(7), Word::with_slot(State::Swapped, 42));
        pmap.store(Ppn(999), Word::new(State::Resident));
        pmap.check().unwrap();
        drop(pmap);
        let pmap = Pmap::open(&path, Pages(1000)).unwrap();
        assert_eq!(pmap.load(Ppn(7)), Word::with_slot(State::Swapped, 42));
        assert_eq!(pmap.in_state(State::Untouched), Pages(998));
        assert_eq!(pmap.in_state(State::Resident), Pages(1));
        pmap.check().unwrap();
        assert!(Pmap::create(&path, Pages(1000)).is_err(), "an existing pmap is never overwritten");
    }

    #[test]
    fn a_file_of_an_older_version_becomes_one_of_this_with_its_slots_unchecked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pmap");
        let old = |version: u8, slot: u64| {
            let _ = std::fs::remove_file(&path);
            let pmap = Pmap::create(&path, Pages(16)).unwrap();
            pmap.store(Ppn(3), Word::with_slot(State::Swapped, slot));
            pmap.store(Ppn(4), Word::with_slot(State::Broken, crate::word::NO_STORE_PAGE));
            drop(pmap);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[8] = version;
            std::fs::write(&path, bytes).unwrap();
        };
        for version in [1, 2] {
            old(version, 42);
            for _ in 0..2 {
                let pmap = Pmap::open(&path, Pages(16)).unwrap();
                let stored = pmap.load(Ppn(3)).stored();
                assert!(stored.slot.0 == 42 && stored.sum.is_none(), "{stored:?}");
                assert_eq!(std::fs::read(&path).unwrap()[8], VERSION as u8);
            }
            // Its slot would be taken for a checksum.
            old(version, 1 << 30);
            let refused = Pmap::open(&path, Pages(16));
            assert!(matches!(refused, Err(PmapError::Word { ppn: Ppn(3), .. })));
            assert_eq!(std::fs::read(&path).unwrap()[8], version, "a refused file was changed");
        }
    }

    #[test]
    fn damaged_and_foreign_files_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pmap");
        drop(Pmap::create(&path, Pages(16)).unwrap());
        assert!(matches!(Pmap::open(&path, Pages(17)), Err(PmapError::Size { .. })));
        let good = std::fs::read(&path).unwrap();
        let damage = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            std::fs::write(&path, bytes).unwrap();
        };
        damage(8, 9);
        assert!(matches!(Pmap::open(&path, Pages(16)), Err(PmapError::Version { found: 9, .. })));
        damage(0, b'x');
        assert!(matches!(Pmap::open(&path, Pages(16)), Err(PmapError::Magic { .. })));
        damage(PAGE_SIZE + 8 * 3, 0x0c); // no state
        assert!(matches!(Pmap::open(&path, Pages(16)), Err(PmapError::Word { ppn: Ppn(3), .. })));
        std::fs::write(&path, &good[..100]).unwrap();
        assert!(Pmap::open(&path, Pages(16)).is_err());
        std::fs::write(&path, b"").unwrap();
        assert!(Pmap::open(&path, Pages(16)).is_err());
        assert!(Pmap::open(&dir.path().join("none"), Pages(16)).is_err());
    }
}
