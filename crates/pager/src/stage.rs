//! The stage of a VM: a small area of manager memory, in a file of the VM's run folder so that it
//! outlives the manager, through which pages leave their homes.
//!
//! ```text
//! [0 .. write_slots)                    clusters of pages on their way to the swap file
//! [write_slots .. write_slots + holds)  sampled pages, until their next access
//! ```

use std::path::Path;

use ballast_units::{PAGE_SIZE, Pages};

use crate::backend::PageBuf;
use crate::mapping::Mapping;
use crate::sync::{Mutex, lock};

/// Sizes of a stage. The whole of it is part of a VM's overhead memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageLayout {
    /// Pages per swap write.
    pub cluster: u64,
    pub clusters: u64,
    pub holds: u64,
}

impl StageLayout {
    pub const fn write_slots(self) -> u64 {
        self.cluster * self.clusters
    }
    pub const fn pages(self) -> Pages {
        Pages(self.write_slots() + self.holds)
    }
}

pub struct Stage {
    mapping: Mapping,
    layout: StageLayout,
    free_holds: Mutex<Vec<u64>>,
}

impl Stage {
    pub fn create(path: &Path, layout: StageLayout) -> std::io::Result<Stage> {
        let mapping = Mapping::create_file(path, layout.pages().bytes().0 as usize)?;
        Ok(Stage::over(mapping, layout))
    }

    /// The stage of a VM that runs already. Which holds are free is told by `claim_hold`.
    pub fn open(path: &Path, layout: StageLayout) -> std::io::Result<Stage> {
        let mapping = Mapping::open_file(path)?;
        if mapping.len() as u64 != layout.pages().bytes().0 {
            return Err(std::io::Error::other(format!(
                "stage of {} bytes, expected {}",
                mapping.len(),
                layout.pages().bytes().0
            )));
        }
        Ok(Stage::over(mapping, layout))
    }

    pub fn on_heap(layout: StageLayout) -> std::io::Result<Stage> {
        Ok(Stage::over(Mapping::anonymous(layout.pages().bytes().0 as usize)?, layout))
    }

    fn over(mapping: Mapping, layout: StageLayout) -> Stage {
        let first = layout.write_slots();
        let free_holds = Mutex::new((first..first + layout.holds).rev().collect());
        Stage { mapping, layout, free_holds }
    }

    pub fn layout(&self) -> StageLayout {
        self.layout
    }

    pub fn take_hold(&self) -> Option<u64> {
        lock(&self.free_holds).pop()
    }
    pub fn free_hold(&self, slot: u64) {
        let mut free = lock(&self.free_holds);
        debug_assert!(!free.contains(&slot), "hold {slot} freed twice");
        free.push(slot);
    }
    /// Recovery: a hold that a pmap word names.
    pub fn claim_hold(&self, slot: u64) {
        lock(&self.free_holds).retain(|&s| s != slot);
    }
    pub fn holds_free(&self) -> usize {
        lock(&self.free_holds).len()
    }

    /// # Panics
    /// If there is no such slot: slots come from this process or from checked pmap words.
    fn at(&self, slot: u64) -> usize {
        assert!(slot < self.layout.pages().0, "stage slot {slot}");
        slot as usize * PAGE_SIZE
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
    pub unsafe fn page_mut(&self, slot: u64) -> &mut PageBuf {
        let at = self.at(slot);
        // SAFETY: in bounds; exclusion is the caller's.
        let bytes = unsafe { self.mapping.slice_mut(at, PAGE_SIZE) };
        // SAFETY: the slice is PAGE_SIZE long, and PageBuf has alignment 1.
        unsafe { &mut *bytes.as_mut_ptr().cast::<PageBuf>() }
    }

    /// Start of a slot for I/O that the kernel does.
    pub fn slot_ptr(&self, slot: u64) -> *const u8 {
        let at = self.at(slot);
        // SAFETY: `at` lies inside the mapping.
        unsafe { self.mapping.as_ptr().add(at) }
    }
}
