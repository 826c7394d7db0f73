//! For tests of a VM's threads: what these share, over RAM of the test's own process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::fd::AsFd as _;
use std::sync::Arc;

use ballast_uffd::{Features, Modes, Uffd};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages, Ppn};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::reclaim::Reclaim;
use super::shared::Shared;
use crate::clock::Clock;
use crate::guest_ram::{GuestRam, RamPart};
use crate::host::Host;
use crate::ledger::Ledger;
use crate::memory::{Access, Fault, Memory, Recovered};
use crate::pmap::Pmap;
use crate::replacement::Random;
use crate::stage::{Stage, StageLayout};
use crate::swap::SwapSpace;
use crate::tier::{Compression, Tier};

/// A VM of so many pages, of which nobody has touched one, and a host that has memory in plenty. The mapping stays for
/// as long as the process. None, loudly, without the right to make userfaultfds.
pub(super) fn vm(pages: u64, around: u64) -> Option<Arc<Shared>> {
    vm_with(pages, around, Tier::off(), UNTOLD)
}

/// One of which it is told what is given up: whoever does so waits until that is read.
pub(super) fn vm_that_tells(pages: u64) -> Option<Arc<Shared>> {
    vm_with(pages, 1, Tier::off(), ballast_uffd::NEEDED)
}

const UNTOLD: Features =
    Features::PAGEFAULT_FLAG_WP.union(Features::MISSING_SHMEM).union(Features::WP_HUGETLBFS_SHMEM);

/// None, loudly, without the right to make them.
pub(crate) fn uffd() -> Option<Uffd> {
    match Uffd::open() {
        Ok(uffd) => Some(uffd),
        Err(e) => {
            let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
            assert!(required.as_deref() != Ok("1"), "no userfaultfd: {e}");
            eprintln!("SKIPPED: no userfaultfd here: {e}");
            None
        }
    }
}

fn vm_with(pages: u64, around: u64, tier: Tier, told: Features) -> Option<Arc<Shared>> {
    let uffd = uffd()?;
    let len = pages as usize * PAGE_SIZE;
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len as u64).unwrap();
    let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a fresh mapping, never unmapped.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, access, shared, file.as_fd(), 0).unwrap()
    };
    let addr = HostAddr(at as u64);
    uffd.handshake(told).unwrap();
    // SAFETY: a mapping of this process to which nothing refers: it is reached by its address alone.
    unsafe { uffd.register(addr, Bytes(len as u64), Modes::MISSING | Modes::WP) }.unwrap();
    let part = RamPart { base: addr, len: Pages(pages), file_offset: 0 };
    let host = Arc::new(Host::new(Ledger::new(Pages(2 * pages), || {})));
    let stage = Stage::on_heap(StageLayout { cluster: 4, clusters: 1, holds: 2 }).unwrap();
    let (pmap, ram) = (Pmap::on_heap(Pages(pages)), GuestRam::new(uffd, file, part));
    let memory = Memory::new(pmap, ram, stage, Pages(pages), host, Pages(around)).with_tier(tier);
    let dir = tempfile::tempdir().unwrap();
    let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(pages)).unwrap();
    Some(Arc::new(Shared::new("test", Arc::new(memory), swap).unwrap()))
}

/// Of the VM of [`reclaim`].
pub(super) const PAGES: u64 = 1024;
/// Blocks of pages that the kernel has not put on its lists yet, and which count as in use: a batch of 31 of the one
/// processor that touched them.
pub(super) const ON_THEIR_WAY: usize = 5;

fn stay_on_this_processor() {
    let mut here = rustix::thread::CpuSet::new();
    here.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &here).unwrap();
}

/// Where accesses cannot be seen, though it could be done: on a host without swap, with a kernel that tells.
fn skip_unseen() {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let why = "accesses are not seen: this host swaps, or its kernel is too old";
    let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
    assert!(required.as_deref() != Ok("1") || swaps.lines().count() > 1, "{why}");
    eprintln!("SKIPPED: {why}");
}

/// A VM whose pages are all at home, touched in their order. None where accesses are not seen.
pub(super) fn reclaim() -> Option<Reclaim> {
    reclaim_of(vm(PAGES, 1)?)
}

/// The same, whose pages repeat themselves, each in its own way, and are compressed when they leave.
pub(super) fn reclaim_that_compresses() -> Option<Reclaim> {
    let settings = Compression { percent: 50, adaptive: false, ..Compression::default() };
    let tier = Tier::on_heap(Pages(PAGES), settings).unwrap();
    let reclaim = reclaim_of(vm_with(PAGES, 1, tier, UNTOLD)?)?;
    for p in 0..PAGES {
        let at = reclaim.vm.memory.backend().at(Ppn(p)).0 as *mut u64;
        // SAFETY: RAM of this process, that stays, and that nobody else looks at.
        (0..PAGE_SIZE / 8)
            .for_each(|i| unsafe { at.add(i).write_volatile(p * 256 + i as u64 % 16) });
    }
    Some(reclaim)
}

fn reclaim_of(vm: Arc<Shared>) -> Option<Reclaim> {
    stay_on_this_processor();
    vm.memory.backend().see_accesses(std::process::id()).unwrap();
    for p in 0..PAGES {
        assert_eq!(vm.memory.fault(Ppn(p), Access::Missing), Fault::Served);
        touch(&vm.memory, p);
    }
    let (random, clock) = (Box::new(Random::seeded(1)), Clock::new(Pages(PAGES), 1));
    let mut reclaim = Reclaim::new(vm, random, clock, &Recovered::default());
    let seen = reclaim.watch_all(&[Ppn(0)]);
    if !seen {
        skip_unseen();
    }
    seen.then_some(reclaim)
}

pub(super) fn touch(memory: &Memory<GuestRam>, p: u64) {
    let at = memory.backend().at(Ppn(p)).0 as *const u8;
    // SAFETY: RAM of this process, that stays.
    unsafe { at.read_volatile() };
}
