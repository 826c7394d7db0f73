//! The pmap: one word per guest page, in a file on the runtime tmpfs so that it outlives the
//! manager. It is the single source of truth; all else is derived from it.
//!
//! ```text
//! page 0     magic "BLSTPMAP", version u32, reserved u32, pages u64; zeros
//! page 1..   words, 8 bytes each, little-endian, one per PPN
//! ```
//!
//! The file is sparse: a hole is the words of pages that nobody touched. Nothing that is done once a
//! period, or once for a guest that is taken over, walks over holes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use ballast_units::{Bytes, PAGE_SIZE, Pages, Ppn};

use crate::mapped_file::{Fresh, Mapping, is_begun};
use crate::sparse::{PART, Parts};
use crate::sync::{AtomicI64, AtomicU64, Ordering};
use crate::word::{BadWord, State, Word};

const MAGIC: &[u8; 8] = b"BLSTPMAP";
/// Versions 1 and 2 knew fewer states, and no checksums in the words of swapped pages: their files are
/// right ones of version 3, whose zero checksum means that there is none.
pub const VERSION: u32 = 3;
/// The first with checksums.
const SUMS: u32 = 3;

/// Why a pmap file cannot be used. Nothing has been changed in it.
#[allow(missing_docs, reason = "the messages say it")]
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
    File(Mapping, Parts, Marks),
    Heap(Box<[AtomicU64]>),
}

/// Pages under sample that have no word yet: a sample of a large guest would give words to all of it.
#[derive(Default)]
struct Marks {
    pages: std::sync::Mutex<BTreeSet<Ppn>>,
    /// How many, so that most looks need no lock.
    some: AtomicUsize,
}

const MARKED: Word = Word::UNTOUCHED.set_sampled(true);

impl Marks {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<Ppn>> {
        self.pages.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
    /// The word that a page without one would have.
    fn word(&self, ppn: Ppn) -> Word {
        if self.some.load(Acquire) > 0 && self.lock().contains(&ppn) {
            return MARKED;
        }
        Word::UNTOUCHED
    }
}

/// The pmap of one VM, with a count of pages per state, and of those that refer to the store.
pub struct Pmap {
    words: Words,
    len: Pages,
    counts: [AtomicI64; State::ALL.len()],
    /// Words that refer to a page of the store.
    references: AtomicI64,
    /// That a word got no memory was said once.
    complained: AtomicBool,
}

impl Pmap {
    /// A pmap that dies with the process, for tests.
    pub fn on_heap(len: Pages) -> Pmap {
        let words = (0..len.0).map(|_| AtomicU64::new(0)).collect();
        Pmap::count(Words::Heap(words), len)
    }

    /// Creates the file, all pages untouched. Once it is there it is whole.
    ///
    /// # Errors
    /// The file exists, or cannot be made.
    pub fn create(path: &Path, len: Pages) -> Result<Pmap, PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        let fresh = Fresh::beside(path).map_err(io)?;
        let made = Mapping::create_sparse(fresh.path(), file_bytes(len));
        let (mut mapping, file) = made.map_err(io)?;
        let parts = Parts::of(file).and_then(|parts| parts.give(0).map(|()| parts)).map_err(io)?;
        let header = mapping.bytes_mut(0, 24);
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[16..24].copy_from_slice(&len.0.to_le_bytes());
        fresh.name(path).map_err(io)?;
        Ok(Pmap::count(Words::File(mapping, parts, Marks::default()), len))
    }

    /// Opens the pmap of a VM that runs already; every word is checked.
    ///
    /// # Errors
    /// The file cannot be opened, is no pmap or one of a newer version or another size, or has a word that cannot be.
    pub fn open(path: &Path, len: Pages) -> Result<Pmap, PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        Pmap::verify(path)?;
        let (mut mapping, file) = Mapping::open_with_file(path).map_err(io)?;
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
        let parts = Parts::of(file).map_err(io)?;
        let mut pmap = Pmap::count(Words::File(mapping, parts, Marks::default()), len);
        for ppn in pmap.known() {
            let bits = pmap.cell(ppn).load(Ordering::Relaxed);
            Word::from_bits(bits)
                .and_then(
                    |w| if has_sums || w.has_room_for_sum() { Ok(w) } else { Err(BadWord(bits)) },
                )
                .map_err(|source| PmapError::Word { path: path.to_owned(), ppn, source })?;
        }
        if let Words::File(mapping, ..) = &mut pmap.words {
            // From now on it may hold what an older manager would not understand. One store: a manager
            // that dies here leaves a right file of either version.
            mapping.bytes_mut(8, 4).copy_from_slice(&VERSION.to_le_bytes());
        }
        pmap.recount();
        Ok(pmap)
    }

    /// Whether this manager understands the file.
    ///
    /// # Errors
    /// The file cannot be read, or is no pmap, or one of a newer version.
    pub fn verify(path: &Path) -> Result<(), PmapError> {
        let header = crate::mapped_file::first_bytes(path)
            .map_err(|source| PmapError::Io { path: path.to_owned(), source })?;
        check_version(path, &header)
    }

    /// The words of a VM that nobody has taken over yet, read from its file: changes nothing.
    /// Holes, whose pages nobody touched, are passed over. A file that was not even begun has no words.
    ///
    /// # Errors
    /// As of `open`, but for its size. Words before the one that is wrong have been told.
    pub fn peek(path: &Path, mut each: impl FnMut(Ppn, Word)) -> Result<(), PmapError> {
        let io = |source| PmapError::Io { path: path.to_owned(), source };
        if !is_begun(path).map_err(io)? {
            return Ok(());
        }
        let file = std::fs::File::open(path).map_err(io)?;
        let mut bytes = vec![0; PART];
        let mut pages = None;
        let mut at = 0;
        loop {
            let read = read_at(&file, &mut bytes, at).map_err(io)?;
            let mut words = &bytes[..read];
            let pages = match pages {
                Some(pages) => pages,
                None => {
                    let found = pages.insert(pages_in(path, words)?);
                    words = &words[PAGE_SIZE..];
                    at = PAGE_SIZE as u64;
                    *found
                }
            };
            peek_words(path, words, (at - PAGE_SIZE as u64) / 8, pages, &mut each)?;
            at += words.len() as u64;
            match crate::sparse::next_data(&file, at).map_err(io)? {
                Some(next) => at = at.max(next / PAGE_SIZE as u64 * PAGE_SIZE as u64),
                None => return Ok(()),
            }
        }
    }

    /// The same of bytes that are there already; `path` is for the error.
    pub(crate) fn peek_bytes(
        path: &Path,
        bytes: &[u8],
        mut each: impl FnMut(Ppn, Word),
    ) -> Result<(), PmapError> {
        let pages = pages_in(path, bytes)?;
        peek_words(path, &bytes[PAGE_SIZE..], 0, pages, &mut each)
    }

    fn count(words: Words, len: Pages) -> Pmap {
        let counts = State::ALL.map(|_| AtomicI64::new(0));
        counts[State::Untouched as usize].store(len.0 as i64, Ordering::Relaxed);
        let references = AtomicI64::new(0);
        Pmap { words, len, counts, references, complained: AtomicBool::new(false) }
    }

    fn cell(&self, ppn: Ppn) -> &AtomicU64 {
        match &self.words {
            Words::Heap(words) => &words[ppn.index()],
            Words::File(mapping, ..) => mapping.atomic(at(ppn)),
        }
    }

    /// Moves a page that has no word. None: it has one now, and is as it was.
    fn exchange_unknown(&self, ppn: Ppn, from: Word, to: Word) -> Option<Result<(), Word>> {
        let Words::File(mapping, parts, marks) = &self.words else { return None };
        let mut marked = marks.lock();
        if parts.has(at(ppn)) {
            return None;
        }
        let now = if marked.contains(&ppn) { MARKED } else { Word::UNTOUCHED };
        if from != now {
            return Some(Err(now));
        }
        if to == MARKED || to == Word::UNTOUCHED {
            if to == MARKED {
                marked.insert(ppn)
            } else {
                marked.remove(&ppn)
            };
            marks.some.store(marked.len(), Release);
            return Some(Ok(()));
        }
        let given = parts.give_and(at(ppn), |bytes| {
            let first = Ppn((bytes.start.max(PAGE_SIZE) - PAGE_SIZE) as u64 / 8);
            let end = Ppn((bytes.end - PAGE_SIZE) as u64 / 8);
            marked.range(first..end).for_each(|&p| {
                mapping.atomic(at(p)).store(MARKED.bits(), Ordering::Release);
            });
            marked.retain(|p| !(first..end).contains(p));
        });
        marks.some.store(marked.len(), Release);
        match given {
            Ok(()) => {
                self.complained.store(false, Relaxed);
                None
            }
            Err(e) => {
                if !self.complained.swap(true, Relaxed) {
                    tracing::error!("no memory for a pmap (guests that touch new pages wait): {e}");
                }
                Some(Err(now))
            }
        }
    }

    /// The pages that have a word; the others are untouched. Takes as long as the guest has been seen
    /// to use memory, not as long as it is large.
    pub fn known(&self) -> impl Iterator<Item = Ppn> + use<> {
        let header = PAGE_SIZE / 8;
        let ranges: Vec<std::ops::Range<usize>> = match &self.words {
            Words::Heap(words) => std::iter::once(header..header + words.len()).collect(),
            Words::File(_, parts, _) => parts.ranges().map(|r| r.start / 8..r.end / 8).collect(),
        };
        let len = self.len.0 as usize;
        ranges.into_iter().flat_map(move |words| {
            let pages = words.start.max(header) - header..(words.end - header).min(len);
            pages.map(|n| Ppn(n as u64))
        })
    }

    /// Whether a page's word, or one near it, was ever written: else it is untouched, and so is all around it.
    pub(crate) fn is_known(&self, ppn: Ppn) -> bool {
        match &self.words {
            Words::Heap(_) => true,
            Words::File(_, parts, _) => parts.has(at(ppn)),
        }
    }

    /// One past the last of the pages from here on of which none is known; None if this one is.
    pub(crate) fn unknown_until(&self, ppn: Ppn) -> Option<Ppn> {
        let Words::File(_, parts, _) = &self.words else { return None };
        let next = (at(ppn) / PART + 1) * PART;
        (!parts.has(at(ppn))).then(|| Ppn(((next - PAGE_SIZE) as u64 / 8).min(self.len.0)))
    }

    /// The first page that will do, from one on and around; what is untouched is passed over by the part.
    pub(crate) fn find_from(&self, from: Ppn, mut will_do: impl FnMut(Ppn) -> bool) -> Option<Ppn> {
        let (mut at, mut left) = (from, self.len.0);
        while left > 0 {
            let next = match self.unknown_until(at) {
                Some(next) => next,
                None if will_do(at) => return Some(at),
                None => Ppn(at.0 + 1),
            };
            left = left.saturating_sub(next.0 - at.0);
            at = if next.0 < self.len.0 { next } else { Ppn(0) };
        }
        None
    }

    /// Memory that the words take.
    pub fn bytes(&self) -> Bytes {
        match &self.words {
            Words::Heap(words) => Bytes(words.len() as u64 * 8),
            Words::File(_, parts, _) => Bytes(parts.bytes() as u64),
        }
    }

    /// Pages of the VM, those without a word included.
    pub fn len(&self) -> Pages {
        self.len
    }
    /// Whether it is of a VM without pages, of which there is none.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// # Panics
    /// If `ppn` is not below `len()`: callers check what comes from outside.
    pub fn load(&self, ppn: Ppn) -> Word {
        assert!(ppn.0 < self.len.0, "{ppn} beyond {}", self.len.0);
        if let Words::File(_, parts, marks) = &self.words
            && !parts.has(at(ppn))
        {
            return marks.word(ppn);
        }
        Word::trusted(self.cell(ppn).load(Ordering::Acquire))
    }

    /// Moves a page from `from` to `to` if it is still in `from`; answers what it is otherwise. An
    /// untouched page whose word gets no memory stays what it is, and that is answered.
    ///
    /// # Errors
    /// What the page is; nothing was changed.
    pub fn exchange(&self, ppn: Ppn, from: Word, to: Word) -> Result<(), Word> {
        if let Words::File(_, parts, _) = &self.words
            && !parts.has(at(ppn))
            && let Some(done) = self.exchange_unknown(ppn, from, to)
        {
            return done;
        }
        match self.cell(ppn).compare_exchange(
            from.bits(),
            to.bits(),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => {
                self.moved(from, to);
                Ok(())
            }
            Err(now) => Err(Word::trusted(now)),
        }
    }

    /// Sets a page whose busy bit the caller holds, so that it has a word.
    pub fn store(&self, ppn: Ppn, to: Word) {
        if let Words::File(_, parts, _) = &self.words
            && !parts.has(at(ppn))
        {
            let given = parts.give(at(ppn));
            debug_assert!(given.is_ok(), "{ppn} was never claimed: {given:?}");
        }
        let from = Word::trusted(self.cell(ppn).swap(to.bits(), Ordering::AcqRel));
        self.moved(from, to);
    }

    fn moved(&self, from: Word, to: Word) {
        let referred =
            i64::from(to.store_page().is_some()) - i64::from(from.store_page().is_some());
        if referred != 0 {
            self.references.fetch_add(referred, Ordering::Relaxed);
        }
        let (from, to) = (from.state(), to.state());
        if from != to {
            self.counts[from as usize].fetch_sub(1, Ordering::Relaxed);
            self.counts[to as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Pages in a state now, busy ones included.
    pub fn in_state(&self, state: State) -> Pages {
        Pages(self.counts[state as usize].load(Ordering::Relaxed).max(0) as u64)
    }

    /// Pages that refer to a page of the store now: what `Domain::counts` counts of this VM.
    pub fn references(&self) -> Pages {
        Pages(self.references.load(Ordering::Relaxed).max(0) as u64)
    }

    /// Of the words as they are: pages per state, and how many refer to the store.
    fn tally(&self) -> ([i64; State::ALL.len()], i64) {
        let mut counts = [0i64; State::ALL.len()];
        let mut references = 0;
        counts[State::Untouched as usize] = self.len.0 as i64;
        for ppn in self.known() {
            let word = self.load(ppn);
            counts[State::Untouched as usize] -= 1;
            counts[word.state() as usize] += 1;
            references += i64::from(word.store_page().is_some());
        }
        (counts, references)
    }

    fn recount(&self) {
        let (counts, references) = self.tally();
        for (cell, n) in self.counts.iter().zip(counts) {
            cell.store(n, Ordering::Relaxed);
        }
        self.references.store(references, Ordering::Relaxed);
    }

    /// Invariant, when nothing moves: the counts are those of the words.
    ///
    /// # Errors
    /// The first count that is not, in words.
    pub fn check(&self) -> Result<(), String> {
        let (counts, references) = self.tally();
        for state in State::ALL {
            let booked = self.counts[state as usize].load(Ordering::Relaxed);
            if booked != counts[state as usize] {
                return Err(format!(
                    "{state:?}: {} pages, {booked} booked",
                    counts[state as usize]
                ));
            }
        }
        let booked = self.references.load(Ordering::Relaxed);
        if booked != references {
            return Err(format!("{references} pages refer to the store, {booked} booked"));
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

/// Offset of a page's word in the file.
fn at(ppn: Ppn) -> usize {
    PAGE_SIZE + ppn.index() * 8
}

/// Of how many pages a file is that begins with these bytes.
fn pages_in(path: &Path, bytes: &[u8]) -> Result<u64, PmapError> {
    check_version(path, bytes)?;
    if bytes.len() < PAGE_SIZE {
        return Err(PmapError::Magic { path: path.to_owned() });
    }
    let mut count = [0u8; 8];
    count.copy_from_slice(&bytes[16..24]);
    Ok(u64::from_le_bytes(count))
}

/// Words that begin with that of page `first`, as far as there are `pages`.
fn peek_words(
    path: &Path,
    bytes: &[u8],
    first: u64,
    pages: u64,
    each: &mut impl FnMut(Ppn, Word),
) -> Result<(), PmapError> {
    for (ppn, raw) in (first..pages).map(Ppn).zip(bytes.chunks_exact(8)) {
        let mut word = [0u8; 8];
        word.copy_from_slice(raw);
        let word = Word::from_bits(u64::from_le_bytes(word)).map_err(|source| PmapError::Word {
            path: path.to_owned(),
            ppn,
            source,
        })?;
        each(ppn, word);
    }
    Ok(())
}

/// As much as there is, up to the length of `bytes`.
fn read_at(file: &std::fs::File, bytes: &mut [u8], at: u64) -> std::io::Result<usize> {
    use std::os::unix::fs::FileExt;
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
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
        // The header's page, and whole pages of words.
        assert_eq!(std::fs::metadata(&path).unwrap().len(), (1 + 2) * PAGE_SIZE as u64);
        let pmap = Pmap::open(&path, Pages(1000)).unwrap();
        assert_eq!(pmap.load(Ppn(7)), Word::with_slot(State::Swapped, 42));
        assert_eq!(pmap.in_state(State::Untouched), Pages(998));
        assert_eq!(pmap.in_state(State::Resident), Pages(1));
        pmap.check().unwrap();
        assert!(Pmap::create(&path, Pages(1000)).is_err(), "an existing pmap is never overwritten");
    }

    #[test]
    fn a_large_guest_has_words_only_where_it_has_pages() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let path = dir.path().join("pmap");
        // A tebibyte.
        let len = Pages(1 << 28);
        let pmap = Pmap::create(&path, len).unwrap();
        let taken = |words: [u64; 3]| words.map(|p| (Ppn(p), Word::new(State::Resident)));
        for (ppn, word) in taken([5, 1 << 27, (1 << 28) - 1]) {
            assert_eq!(pmap.load(ppn), Word::UNTOUCHED);
            assert_eq!(pmap.exchange(ppn, Word::new(State::Swapped), word), Err(Word::UNTOUCHED));
            pmap.exchange(ppn, Word::UNTOUCHED, word).unwrap();
        }
        let few = Bytes(3 * PART as u64 + PAGE_SIZE as u64);
        assert!(pmap.bytes() <= few, "{:?}", pmap.bytes());
        assert_eq!(pmap.in_state(State::Untouched), Pages(len.0 - 3));
        pmap.check().unwrap();
        drop(pmap);
        let (mut seen, mut told) = (Vec::new(), 0);
        Pmap::peek(&path, |ppn, word| {
            told += 1;
            if word != Word::UNTOUCHED {
                seen.push((ppn, word));
            }
        })
        .unwrap();
        assert_eq!(seen, taken([5, 1 << 27, (1 << 28) - 1]));
        assert!(told < 8 * PART / 8, "{told} words: holes were read");
        let pmap = Pmap::open(&path, len).unwrap();
        assert!(pmap.bytes() <= few, "{:?}", pmap.bytes());
        assert_eq!(pmap.in_state(State::Resident), Pages(3));
        assert!(pmap.known().count() < 4 * PART / 8);
        assert!(pmap.known().any(|ppn| ppn == Ppn((1 << 28) - 1)));
        pmap.check().unwrap();
    }

    #[test]
    fn a_sample_of_pages_without_words_gives_them_none_and_is_kept_when_they_get_one() {
        let dir = tempfile::tempdir().unwrap();
        let pmap = Pmap::create(&dir.path().join("pmap"), Pages(1 << 20)).unwrap();
        let before = pmap.bytes();
        let far = |n: u64| Ppn((1 << 19) + n);
        for n in 0..3 {
            pmap.exchange(far(n), Word::UNTOUCHED, MARKED).unwrap();
            assert_eq!(pmap.load(far(n)), MARKED);
            assert_eq!(pmap.exchange(far(n), Word::UNTOUCHED, MARKED), Err(MARKED));
        }
        assert_eq!(pmap.bytes(), before);
        pmap.exchange(far(0), MARKED, Word::UNTOUCHED).unwrap();
        // A neighbour of theirs is touched.
        let home = Word::new(State::Resident);
        pmap.exchange(far(9), Word::UNTOUCHED, home).unwrap();
        assert!(pmap.bytes() > before);
        let now = [0, 1, 2, 9].map(|n| pmap.load(far(n)));
        assert_eq!(now, [Word::UNTOUCHED, MARKED, MARKED, home]);
        // As any word from now on.
        assert_eq!(pmap.exchange(far(1), Word::UNTOUCHED, home), Err(MARKED));
        pmap.exchange(far(1), MARKED, home).unwrap();
        pmap.check().unwrap();
    }

    /// Memory comes in parts, and the words begin one page into the first.
    #[test]
    fn a_part_gets_words_with_its_marks_and_its_neighbours_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let len = Pages(1 << 16);
        let pmap = Pmap::create(&dir.path().join("pmap"), len).unwrap();
        let first = |part: u64| Ppn((part * PART as u64 - PAGE_SIZE as u64) / 8);
        let (begin, end) = (first(2), first(3));
        let marked = [Ppn(begin.0 - 1), begin, Ppn(end.0 - 1), end];
        marked.iter().for_each(|&p| pmap.exchange(p, Word::UNTOUCHED, MARKED).unwrap());
        let known = |pages: [Ppn; 4]| pages.map(|p| pmap.is_known(p));
        assert_eq!(known(marked), [false; 4]);
        assert_eq!(pmap.unknown_until(begin), Some(end));
        assert_eq!(pmap.unknown_until(Ppn(end.0 - 1)), Some(end));
        let bytes = pmap.bytes();

        let home = Word::new(State::Resident);
        pmap.exchange(Ppn(begin.0 + 1), Word::UNTOUCHED, home).unwrap();
        assert_eq!(pmap.bytes(), bytes + Bytes(PART as u64));
        assert_eq!(known(marked), [false, true, true, false]);
        assert_eq!(marked.map(|p| pmap.load(p)), [MARKED; 4]);
        assert_eq!((pmap.unknown_until(begin), pmap.unknown_until(end)), (None, Some(first(4))));
        // Who looks around comes over what is known alone.
        let looked = |from: Ppn| {
            let mut seen = 0;
            let found = pmap.find_from(from, |p| {
                seen += 1;
                pmap.load(p) == home
            });
            (found, seen < 3 * PART as u64 / 8)
        };
        assert_eq!(looked(end), (Some(Ppn(begin.0 + 1)), true));
        assert_eq!(looked(Ppn(begin.0 + 1)), (Some(Ppn(begin.0 + 1)), true));
        assert_eq!(looked(Ppn(begin.0 + 2)), (Some(Ppn(begin.0 + 1)), true));
        assert_eq!(pmap.find_from(begin, |_| false), None);
        // The first part is there from the beginning; the last ends with the guest.
        assert!(pmap.is_known(Ppn(0)) && pmap.unknown_until(Ppn(0)).is_none());
        assert_eq!(pmap.unknown_until(Ppn(len.0 - 1)), Some(Ppn(len.0)));
        // Those of the neighbours go with theirs, and all are counted once.
        for p in marked {
            pmap.exchange(p, MARKED, home).unwrap();
        }
        assert_eq!(pmap.in_state(State::Resident), Pages(5));
        // A word that is set gets its memory as well.
        let far = first(6);
        assert!(!pmap.is_known(far));
        pmap.store(far, home);
        assert_eq!((pmap.load(far), pmap.is_known(far)), (home, true));
        pmap.check().unwrap();
    }

    #[test]
    fn counts_are_those_of_the_words_and_the_check_finds_it_where_they_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pmap");
        let pmap = Pmap::create(&path, Pages(100)).unwrap();
        let shared = Word::with_slot(State::Shared, 3);
        pmap.store(Ppn(1), shared);
        pmap.exchange(Ppn(2), Word::UNTOUCHED, shared).unwrap();
        pmap.store(Ppn(2), Word::new(State::Resident));
        assert_eq!((pmap.references(), pmap.in_state(State::Shared)), (Pages(1), Pages(1)));
        drop(pmap);
        let pmap = Pmap::open(&path, Pages(100)).unwrap();
        assert_eq!((pmap.references(), pmap.in_state(State::Shared)), (Pages(1), Pages(1)));
        pmap.check().unwrap();
        for (count, said) in [
            (&pmap.counts[State::Swapped as usize], "Swapped: 0 pages, 1 booked"),
            (&pmap.references, "1 pages refer to the store, 2 booked"),
        ] {
            count.fetch_add(1, Ordering::Relaxed);
            assert_eq!(pmap.check().unwrap_err(), said);
            count.fetch_sub(1, Ordering::Relaxed);
            pmap.check().unwrap();
        }
        assert_eq!(Pmap::on_heap(Pages(10)).bytes(), Bytes(80));
        assert!(Pmap::on_heap(Pages(0)).is_empty() && !Pmap::on_heap(Pages(10)).is_empty());
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
        assert!(matches!(Pmap::open(&path, Pages(16)), Err(PmapError::Magic { .. })));
        // Its words are missing.
        std::fs::write(&path, &good[..PAGE_SIZE]).unwrap();
        assert!(matches!(Pmap::open(&path, Pages(16)), Err(PmapError::Size { found: 16, .. })));
        std::fs::write(&path, b"").unwrap();
        assert!(Pmap::open(&path, Pages(16)).is_err());
        assert!(Pmap::open(&dir.path().join("none"), Pages(16)).is_err());
    }
}
