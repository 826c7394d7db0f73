//! The pager's books at the size of a large host: 500 VMs of 64 GiB, each of which uses a little. What
//! they take must follow what is used, not what is configured, and no round of work may walk over a
//! guest's whole memory: at this size that would not end within the test's patience.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/evict.rs"]
mod evict;

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ballast_compress::{Algorithm, Compressor};
use ballast_pager::backend::{Backend, MemError, PageBuf};
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::memory::{Access, Compressed, Fault, Memory, Unbooked};
use ballast_pager::pmap::Pmap;
use ballast_pager::stage::{Stage, StageLayout};
use ballast_pager::tier::{Compression, Tier};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use evict::{Evicted, evict};

/// Counts what is allocated and not freed.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does everything; only sizes are counted beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Guest memory of which only is known which pages are there; all hold the same text.
struct Present {
    pages: Mutex<BTreeSet<u64>>,
    large: u64,
}

impl Present {
    fn set(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.pages.lock().unwrap()
    }
}

impl Default for Present {
    fn default() -> Present {
        Present { pages: Mutex::default(), large: 1 }
    }
}

impl Backend for Present {
    fn protect(&self, _: Ppn) -> Result<(), MemError> {
        Ok(())
    }
    fn unprotect(&self, _: Ppn) -> Result<(), MemError> {
        Ok(())
    }
    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError> {
        into.fill(0);
        into[..8].copy_from_slice(&ppn.0.to_le_bytes());
        into[8] = u8::from(self.set().contains(&ppn.0));
        Ok(())
    }
    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        let mut set = self.set();
        set.retain(|p| !(ppn.0..ppn.0 + n).contains(p));
        Ok(())
    }
    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError> {
        self.set().extend(ppn.0..ppn.0 + n);
        Ok(n)
    }
    fn fill(&self, ppn: Ppn, _: &PageBuf) -> Result<(), MemError> {
        if self.set().insert(ppn.0) { Ok(()) } else { Err(MemError::Exists) }
    }
    fn wake(&self, _: Ppn, _: u64) -> Result<(), MemError> {
        Ok(())
    }
    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        Ok(self.set().range(ppn.0..end).next().copied().unwrap_or(end))
    }
    fn large(&self) -> u64 {
        self.large
    }
}

const LAYOUT: StageLayout = StageLayout { cluster: 32, clusters: 2, holds: 64 };
const TIER: Compression = Compression {
    algorithm: Some(Algorithm::Lz4),
    percent: 10,
    adaptive: false,
    same_filled: true,
};
const GIB: u64 = 1 << 18;
/// Pages that a guest touches, each in another part of its memory.
const TOUCHED: u64 = 60;

struct Vm {
    folder: tempfile::TempDir,
    memory: Memory<Present>,
    size: u64,
}

impl Vm {
    fn new(size: u64, host: &Arc<Host>) -> Vm {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let at = |name| folder.path().join(name);
        let pmap = Pmap::create(&at("pmap"), Pages(size)).unwrap();
        let stage = Stage::create(&at("stage"), LAYOUT).unwrap();
        let tier = Tier::open(&at("compressed"), Pages(size), TIER).unwrap();
        let memory =
            Memory::new(pmap, Present::default(), stage, Pages(size), host.clone(), Pages(1));
        Vm { memory: memory.with_tier(tier), folder, size }
    }

    fn page(&self, n: u64) -> Ppn {
        Ppn(n * (self.size / TOUCHED))
    }

    /// First touches, a sample of a hundred pages, an eviction of some, and their return.
    fn live(&self, with: &mut Compressor) {
        for n in 0..TOUCHED {
            assert_eq!(self.memory.fault(self.page(n), Access::Missing), Fault::Served);
        }
        for n in 0..100 {
            let far = Ppn((n * 7919 + 31) * (self.size / 1_000_000).max(1) % self.size);
            let sampled = self.memory.sample(far).unwrap();
            assert!(sampled || self.memory.pmap().load(far).sampled(), "{far}");
            assert!(self.memory.unsample(far).unwrap());
        }
        for n in 0..20 {
            let ppn = self.page(n * 3);
            assert_eq!(evict(&self.memory, ppn, 0).unwrap(), Evicted::Staged);
            let stored = self.memory.compress(ppn, 0, Some(with));
            assert!(matches!(stored, Compressed::Stored { .. }), "{stored:?}");
            assert_eq!(self.memory.fault(ppn, Access::Missing), Fault::Served);
        }
    }
}

/// Bytes on the heap, and of files, that `count` VMs take once they have lived.
fn taken_by(count: usize, size: u64) -> (u64, u64) {
    let host = Arc::new(Host::new(Ledger::new(Pages(1 << 40), || {})));
    let mut with = Compressor::new(Algorithm::Lz4).unwrap();
    let before = HELD.load(Ordering::Relaxed);
    let begin = Instant::now();
    let vms: Vec<Vm> = (0..count).map(|_| Vm::new(size, &host)).collect();
    vms.iter().for_each(|vm| vm.live(&mut with));
    for vm in &vms {
        assert!(vm.memory.pmap().in_state(State::Resident) >= Pages(TOUCHED));
    }
    vms[0].memory.check().unwrap();
    vms[count - 1].memory.check().unwrap();
    let heap = (HELD.load(Ordering::Relaxed) - before) as u64;
    let files: u64 = vms.iter().map(|vm| vm.files()).sum();
    println!(
        "{count} VMs of {} GiB, {TOUCHED} pages each: {} KiB of heap and {} KiB of files each, {:.2} s in all",
        size / GIB,
        heap / 1024 / count as u64,
        files / 1024 / count as u64,
        begin.elapsed().as_secs_f64()
    );
    (heap / count as u64, files / count as u64)
}

impl Vm {
    fn files(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
    }
}

/// What is held is counted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn what_five_hundred_large_guests_take_follows_what_they_use() {
    let _turn = ONE_AT_A_TIME.lock();
    let (small_heap, small_files) = taken_by(20, 4 * GIB);
    let (heap, files) = taken_by(500, 64 * GIB);
    // Sixteen times the size. What is used is the same: a word for each page touched, in parts of 64 KiB
    // (32 MiB of guest), of which a larger guest's pages lie in more; and a bit per page of swap space.
    let bits = 64 * GIB / 8;
    assert!(heap <= 3 * small_heap + bits + bits / 32, "{heap} against {small_heap} bytes of heap");
    let parts = TOUCHED * (64 << 10) + (1 << 20);
    assert!(files <= small_files.max(parts), "{files} against {small_files} bytes of files");
    // A quarter of a per mille of what is configured; 7.5 per mille is what all may take.
    assert!((heap + files) * 4000 < 64 * GIB * 4096, "{heap} + {files}");
}

/// virtio-mem gives up all of its region when its guest begins, and when it is reset.
#[test]
fn a_region_that_nobody_touched_is_given_up_without_a_word_for_it() {
    let _turn = ONE_AT_A_TIME.lock();
    let host = Arc::new(Host::new(Ledger::new(Pages(1 << 40), || {})));
    let vm = Vm::new(1024 * GIB, &host);
    let (first, n) = (Ppn(GIB + 512), 1000 * GIB);
    let touched = Ppn(500 * GIB + 3);
    assert_eq!(vm.memory.fault(touched, Access::Missing), Fault::Served);
    vm.memory.backend().set().clear();
    let before = vm.memory.pmap().bytes();
    let (left, result) = vm.memory.discard(first, n, vm.memory.mark());
    assert_eq!((left, result), (Unbooked::default(), Ok(())));
    // It ends in the midst of a part, of which a few pages are looked at one by one.
    assert!(vm.memory.pmap().bytes().0 <= before.0 + (128 << 10));
    assert_eq!(vm.memory.pmap().load(touched).state(), State::Ballooned);
    assert_eq!(vm.memory.pmap().load(Ppn(900 * GIB)).state(), State::Untouched);
    assert_eq!(vm.memory.charged(), Pages(0));
    vm.memory.check().unwrap();
}

#[test]
fn a_guest_of_two_tebibytes_is_taken_over_by_what_it_uses() {
    let _turn = ONE_AT_A_TIME.lock();
    let host = Arc::new(Host::new(Ledger::new(Pages(1 << 40), || {})));
    let vm = Vm::new(2048 * GIB, &host);
    vm.live(&mut Compressor::new(Algorithm::Lz4).unwrap());
    let Vm { folder, memory, size } = vm;
    // Each of its pages may be a part of a large one, for all that its successor knows.
    let pages = Mutex::new(memory.backend().set().clone());
    let present = Present { pages, large: 512 };
    let (resident, charged) = (memory.pmap().in_state(State::Resident), memory.charged());
    drop(memory);
    let at = |name| folder.path().join(name);
    let pmap = Pmap::open(&at("pmap"), Pages(size)).unwrap();
    assert!(pmap.bytes().0 <= TOUCHED * (64 << 10) + (1 << 20), "{:?}", pmap.bytes());
    let stage = Stage::open(&at("stage")).unwrap();
    let tier = Tier::open(&at("compressed"), Pages(size), TIER).unwrap();
    let memory = Memory::new(pmap, present, stage, Pages(size), host.clone(), Pages(1));
    let memory = memory.with_tier(tier);
    memory.recover(&|| {}, None).unwrap();
    memory.check().unwrap();
    assert_eq!((memory.pmap().in_state(State::Resident), memory.charged()), (resident, charged));
}
