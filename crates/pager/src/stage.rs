//! The stage of a VM: a small area of manager memory, in a file of the VM's run folder so that it
//! outlives the manager, through which pages leave their homes.
//!
//! ```text
//! page 0     magic "BLSTSTAG", version u32, reserved u32, cluster u64, clusters u64, holds u64; zeros
//! page 1..   slots, a page each:
//!            [0 .. write_slots)                    clusters of pages on their way to the swap file
//!            [write_slots .. write_slots + holds)  sampled pages, until their next access
//! ```

use std::path::{Path, PathBuf};

use ballast_units::{PAGE_SIZE, Pages};

use crate::backend::PageBuf;
use crate::guest_ram::LARGE_PAGE;
use crate::mapped_file::{Fresh, Mapping};
use crate::sync::{Mutex, lock};

const MAGIC: &[u8; 8] = b"BLSTSTAG";
/// Version 2 is the same, of a VM that may have large pages: a manager that knows version 1 alone would free
/// parts of them.
pub const VERSION: u32 = 2;
/// More slots than any configuration asks for.
const MOST_SLOTS: u64 = 1 << 24;

/// Why a stage cannot be used. Nothing has been changed in it.
#[allow(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    #[error("stage {}: {source}", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("stage {} is not a stage", .path.display())]
    Magic { path: PathBuf },
    #[error("stage {} has version {found}; this manager knows {VERSION}", .path.display())]
    Version { path: PathBuf, found: u32 },
    #[error("stage {} has {found} bytes, its header says otherwise", .path.display())]
    Size { path: PathBuf, found: usize },
}

/// Sizes of a stage. The whole of it is part of a VM's overhead memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageLayout {
    /// Pages per swap write.
    pub cluster: u64,
    /// Clusters that can be filled or written at a time.
    pub clusters: u64,
    /// Slots of pages that are sampled, or in a large page that is being broken.
    pub holds: u64,
}

impl StageLayout {
    /// Slots of all clusters, the first of the stage.
    pub const fn write_slots(self) -> u64 {
        self.cluster * self.clusters
    }
    /// The slots.
    pub const fn pages(self) -> Pages {
        Pages(self.write_slots() + self.holds)
    }
    /// Whether there are holds enough to break a large page.
    pub(crate) const fn can_break(self) -> bool {
        self.holds >= LARGE_PAGE.0
    }
    /// The whole file.
    pub(crate) const fn file_pages(self) -> Pages {
        Pages(self.pages().0 + 1)
    }

    /// What a header says; None for what no manager wrote.
    pub(crate) fn parse(header: &[u8]) -> Option<StageLayout> {
        let number = |at: usize| {
            Some(u64::from_le_bytes(*header.get(at..)?.first_chunk::<8>()?))
                .filter(|&n| n <= MOST_SLOTS)
        };
        let layout =
            StageLayout { cluster: number(16)?, clusters: number(24)?, holds: number(32)? };
        let slots = layout.cluster.checked_mul(layout.clusters)?.checked_add(layout.holds)?;
        (slots <= MOST_SLOTS).then_some(layout)
    }
}

/// The version in a file of the manager that begins with `magic`; None if it does not.
pub(crate) fn version_in(header: &[u8], magic: &[u8; 8]) -> Option<u32> {
    let rest = header.strip_prefix(magic)?;
    Some(u32::from_le_bytes(*rest.first_chunk::<4>()?))
}

fn header(path: &Path) -> Result<Vec<u8>, StageError> {
    let header = crate::mapped_file::first_bytes(path)
        .map_err(|source| StageError::Io { path: path.to_owned(), source })?;
    match version_in(&header, MAGIC) {
        None => Err(StageError::Magic { path: path.to_owned() }),
        Some(1..=VERSION) => Ok(header),
        Some(found) => Err(StageError::Version { path: path.to_owned(), found }),
    }
}

/// Any thread may take and free holds. The slots of clusters are filled by the VM's reclaim thread alone.
pub struct Stage {
    mapping: Mapping,
    layout: StageLayout,
    free_holds: Mutex<Vec<u64>>,
}

impl Stage {
    /// Creates the file. Once it is there it is whole.
    ///
    /// # Errors
    /// The file exists, or cannot be made: a full tmpfs.
    pub fn create(path: &Path, layout: StageLayout) -> Result<Stage, StageError> {
        let io = |source| StageError::Io { path: path.to_owned(), source };
        let len = layout.file_pages().bytes().0 as usize;
        let fresh = Fresh::beside(path).map_err(io)?;
        let mut mapping = Mapping::create_file(fresh.path(), len).map_err(io)?;
        let header = mapping.bytes_mut(0, 40);
        header[..8].copy_from_slice(MAGIC);
        let version = if layout.can_break() { VERSION } else { 1 };
        header[8..12].copy_from_slice(&version.to_le_bytes());
        for (at, n) in [(16, layout.cluster), (24, layout.clusters), (32, layout.holds)] {
            header[at..at + 8].copy_from_slice(&n.to_le_bytes());
        }
        fresh.name(path).map_err(io)?;
        Ok(Stage::over(mapping, layout))
    }

    /// The stage of a VM that runs already, as large as it was made. Which holds are free is told by
    /// `claim_hold`.
    ///
    /// # Errors
    /// The file cannot be opened, or is no stage, or one of a newer version.
    pub fn open(path: &Path) -> Result<Stage, StageError> {
        let header = header(path)?;
        let mapping = Mapping::open_file(path)
            .map_err(|source| StageError::Io { path: path.to_owned(), source })?;
        let found = mapping.len();
        match StageLayout::parse(&header) {
            Some(layout) if layout.file_pages().bytes().0 == found as u64 => {
                Ok(Stage::over(mapping, layout))
            }
            _ => Err(StageError::Size { path: path.to_owned(), found }),
        }
    }

    /// Whether this manager understands the file.
    ///
    /// # Errors
    /// The file cannot be read, or is no stage, or one of a newer version.
    pub fn verify(path: &Path) -> Result<(), StageError> {
        header(path).map(drop)
    }

    /// As the file was made.
    ///
    /// # Errors
    /// As of `verify`; or it is not as long as that makes it.
    pub fn layout_of(path: &Path) -> Result<StageLayout, StageError> {
        let layout = StageLayout::parse(&header(path)?);
        let meta = std::fs::metadata(path);
        let found = meta.map_err(|source| StageError::Io { path: path.to_owned(), source })?.len();
        let is_so = |layout: &StageLayout| layout.file_pages().bytes().0 == found;
        let wrong = || StageError::Size { path: path.to_owned(), found: found as usize };
        layout.filter(is_so).ok_or_else(wrong)
    }

    /// One that dies with the process, for tests.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn on_heap(layout: StageLayout) -> std::io::Result<Stage> {
        let len = layout.file_pages().bytes().0 as usize;
        Ok(Stage::over(Mapping::anonymous(len)?, layout))
    }

    fn over(mapping: Mapping, layout: StageLayout) -> Stage {
        let first = layout.write_slots();
        let free_holds = Mutex::new((first..first + layout.holds).rev().collect());
        Stage { mapping, layout, free_holds }
    }

    /// Of an opened one: as it was made.
    pub fn layout(&self) -> StageLayout {
        self.layout
    }

    /// A free hold, from now on the caller's; None if all are taken.
    pub fn take_hold(&self) -> Option<u64> {
        lock(&self.free_holds).pop()
    }
    /// Gives back a hold that no word names.
    pub(crate) fn free_hold(&self, slot: u64) {
        let mut free = lock(&self.free_holds);
        debug_assert!(!free.contains(&slot), "hold {slot} freed twice");
        free.push(slot);
    }
    /// Recovery: a hold that a pmap word names. Answers false if another word names it, or there is none.
    pub(crate) fn claim_hold(&self, slot: u64) -> bool {
        let mut free = lock(&self.free_holds);
        let Some(at) = free.iter().position(|&s| s == slot) else { return false };
        free.remove(at);
        true
    }
    /// Holds that can be taken now.
    pub(crate) fn holds_free(&self) -> usize {
        lock(&self.free_holds).len()
    }

    /// # Panics
    /// If there is no such slot: slots come from this process or from checked pmap words.
    fn at(&self, slot: u64) -> usize {
        assert!(slot < self.layout.pages().0, "stage slot {slot}");
        (slot as usize + 1) * PAGE_SIZE
    }

    /// # Safety
    /// Nobody writes the slot while the reference lives: the caller holds the busy bit of the page
    /// whose word names the slot.
    pub unsafe fn page(&self, slot: u64) -> &PageBuf {
        let at = self.at(slot);
        // SAFETY: in bounds; exclusion is the caller's.
        let bytes = unsafe { self.mapping.slice(at, PAGE_SIZE) };
        // SAFETY: the slice is PAGE_SIZE long, and PageBuf has alignment 1.
        unsafe { &*bytes.as_ptr().cast::<PageBuf>() }
    }

    /// # Safety
    /// Nobody else accesses the slot while the reference lives: it is free, and only the caller
    /// takes free slots.
    #[allow(clippy::mut_from_ref, reason = "exclusion is the caller's, as stated above")]
    pub(crate) unsafe fn page_mut(&self, slot: u64) -> &mut PageBuf {
        // SAFETY: the caller's, as stated above.
        let pages = unsafe { self.pages_mut(slot, 1) };
        &mut pages[0]
    }

    /// Neighbouring slots.
    ///
    /// # Safety
    /// As of `page_mut`, for each of them.
    #[allow(clippy::mut_from_ref, reason = "exclusion is the caller's, as stated above")]
    pub(crate) unsafe fn pages_mut(&self, first: u64, n: usize) -> &mut [PageBuf] {
        let (at, last) = (self.at(first), first + n as u64 - 1);
        assert!(last < self.layout.pages().0, "stage slot {last}");
        // SAFETY: in bounds; exclusion is the caller's.
        let bytes = unsafe { self.mapping.slice_mut(at, n * PAGE_SIZE) };
        bytes.as_chunks_mut().0
    }

    /// Start of a slot for I/O that the kernel does.
    pub(crate) fn slot_ptr(&self, slot: u64) -> *const u8 {
        let at = self.at(slot);
        // SAFETY: `at` lies inside the mapping.
        unsafe { self.mapping.as_ptr().add(at) }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const LAYOUT: StageLayout = StageLayout { cluster: 4, clusters: 2, holds: 3 };

    #[test]
    fn one_of_a_vm_with_large_pages_is_refused_by_managers_that_know_none() {
        let dir = tempfile::tempdir().unwrap();
        for (holds, version) in [(511, 1), (512, 2)] {
            let path = dir.path().join(holds.to_string());
            drop(Stage::create(&path, StageLayout { holds, ..LAYOUT }).unwrap());
            assert_eq!(std::fs::read(&path).unwrap()[8], version);
            Stage::verify(&path).unwrap();
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[8] = 3;
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(Stage::verify(&path), Err(StageError::Version { found: 3, .. })));
        }
    }

    #[test]
    fn a_stage_is_as_large_as_it_was_made_whatever_is_configured_now() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stage");
        let stage = Stage::create(&path, LAYOUT).unwrap();
        // SAFETY: this thread alone uses the stage.
        unsafe { stage.page_mut(10) }.fill(7);
        drop(stage);
        let stage = Stage::open(&path).unwrap();
        assert_eq!(stage.layout(), LAYOUT);
        // SAFETY: as above.
        assert!(unsafe { stage.page(10) }.iter().all(|&b| b == 7));
        assert!(Stage::create(&path, LAYOUT).is_err(), "never overwritten");
        // A manager died over making it: what it left is in nobody's way.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(dir.path().join("stage.new"), [0; 9]).unwrap();
        drop(Stage::create(&path, LAYOUT).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn newer_damaged_and_foreign_stages_are_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stage");
        drop(Stage::create(&path, LAYOUT).unwrap());
        let good = std::fs::read(&path).unwrap();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            std::fs::write(&path, &bytes).unwrap();
            let error = Stage::open(&path).map(drop).unwrap_err();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            error
        };
        assert!(matches!(with(8, 3), StageError::Version { found: 3, .. }));
        assert!(matches!(with(0, b'x'), StageError::Magic { .. }));
        for at in [16, 24, 32, 39] {
            assert!(matches!(with(at, 9), StageError::Size { .. }), "{at}");
        }
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(matches!(Stage::open(&path), Err(StageError::Size { .. })));
        std::fs::write(&path, b"").unwrap();
        assert!(matches!(Stage::open(&path), Err(StageError::Magic { .. })));
    }
}
