//! Large pages: those of zeros are in the way of an eviction that asks for more than they are worth, and a manager
//! that comes must know of all.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/large_ram.rs"]
mod large_ram;
#[path = "support/vmm.rs"]
mod vmm;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, Inherited, PagedVm, PagerConfig, StartError, VmFiles};
use ballast_pager::swap::SwapSpace;
use ballast_units::{Pages, Ppn};
use vmm::{Cell, Guest, Vmm, alone};

/// Of the VMM, by regions of 2 MiB.
const SIZE: u64 = REGIONS * REGION;
const REGIONS: u64 = 32;
const REGION: u64 = 512;
/// One region in so many is written to throughout; the others hold zeros.
const ONE_IN: u64 = 8;

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let write = |ppn: u64, value: u64| {
        // SAFETY: this thread is the only one that uses the RAM.
        unsafe { guest.word(ppn, 0).write_volatile(value) };
    };
    for first in (0..SIZE).step_by(REGION as usize) {
        if is_written(first) {
            (first..first + REGION).for_each(|ppn| write(ppn, ppn + 1));
        } else {
            write(first, 0);
        }
    }
    guest.board.add(Cell::Step, 1);
    while guest.board.get(Cell::Stop) == 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for ppn in 0..SIZE {
        let wanted = if is_written(ppn) { ppn + 1 } else { 0 };
        // SAFETY: as above.
        if unsafe { guest.word(ppn, 0).read_volatile() } != wanted {
            guest.board.add(Cell::Errors, 1);
        }
    }
    guest.board.add(Cell::Done, 1);
    loop {
        std::thread::park();
    }
}

fn is_written(ppn: u64) -> bool {
    ppn / REGION % ONE_IN == ONE_IN - 1
}

fn config() -> PagerConfig {
    PagerConfig { large_pages: true, ..PagerConfig::default() }
}

fn overhead() -> Pages {
    config().overhead(Pages(SIZE))
}

fn new_host() -> Arc<Host> {
    let host = Arc::new(Host::new(Ledger::new(Pages(2 * SIZE) + overhead(), || {})));
    assert!(host.ledger.try_reserve(overhead()));
    host.set_plenty(Pages(SIZE / 8));
    host
}

/// A VM whose guest has touched all of its regions.
fn start(ram: OwnedFd, dir: &Path, host: &Arc<Host>) -> (Vmm, PagedVm) {
    let files = VmFiles::new(dir, SwapSpace::create_at(&dir.join("swap"), Pages(SIZE)).unwrap());
    let vmm = Vmm::start_with(ram, "", SIZE);
    let (ram, host) = (vmm.guest_ram(), host.clone());
    let vm = PagedVm::start("t", config(), files, ram, overhead(), host).unwrap();
    vm.memory().let_pages_move(true);
    vmm.board.set(Cell::Go, 1);
    vmm::wait_for("the guest", || vmm.board.get(Cell::Step) == 1);
    assert_eq!(vm.memory().charged(), Pages(SIZE));
    assert_eq!(vm.memory().regions().counts().fills, REGIONS, "the kernel had no large page");
    (vmm, vm)
}

/// All that is zeros leaves, and half of what was written; then the guest finds all that it wrote.
fn leaves_and_comes_back(vmm: &Vmm, vm: &PagedVm) {
    // Asked for once: an eviction that gives up is not asked again.
    let written = SIZE / ONE_IN;
    vm.set_evict_goal(Pages(SIZE - written / 2));
    vmm::wait_for("the eviction", || vm.evict_goal() == Pages(0));
    // What a cluster holds may be on its way.
    vmm::wait_for("memory to come free", || vm.memory().charged() <= Pages(written / 2));
    assert_eq!(vm.health(), Health::Well);
    vmm.board.set(Cell::Stop, 1);
    vmm::wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    vmm::wait_for("quiet", || {
        vm.memory().reconcile(Ppn(0), SIZE).1.is_ok() && vm.memory().check_quiet().is_ok()
    });
}

#[test]
fn an_eviction_goes_on_at_a_large_page_of_zeros() {
    let Some(_alone) = alone() else { return };
    let Some(ram) = large_ram::create_or_skip(Pages(SIZE)) else { return };
    let (dir, host) = (tempfile::tempdir().unwrap(), new_host());
    let (vmm, vm) = start(ram, dir.path(), &host);
    leaves_and_comes_back(&vmm, &vm);
    vm.release();
    assert_eq!(host.ledger.used(), Pages(0));
}

/// For this thread, and those that it makes, the kernel has no memory files: as where no descriptor is left.
fn have_no_memory_files() {
    let op = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let filter = [
        // The number of the system call.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_memfd_create as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EMFILE as u32),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives through the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program, 0, 0), 0);
    }
}

/// Taken for small ones, large pages would be lost in parts.
#[test]
fn a_vm_is_not_taken_over_while_it_cannot_be_told_whether_it_has_large_pages() {
    let Some(_alone) = alone() else { return };
    let Some(ram) = large_ram::create_or_skip(Pages(SIZE)) else { return };
    let (dir, host) = (tempfile::tempdir().unwrap(), new_host());
    let (vmm, vm) = start(ram, dir.path(), &host);
    vm.leave();
    let host = new_host();
    let take_over = || {
        let swap = SwapSpace::open_at(&dir.path().join("swap")).unwrap();
        let (files, ram) = (VmFiles::new(dir.path(), swap), vmm.guest_ram());
        let (host, inherited) = (host.clone(), Inherited::default());
        PagedVm::take_over("t", config(), files, ram, overhead(), host, inherited)
    };
    let refused = std::thread::scope(|scope| {
        let without = || {
            have_no_memory_files();
            take_over().map(drop)
        };
        scope.spawn(without).join().unwrap()
    });
    assert!(matches!(refused, Err(StartError::LargePages(_))), "{refused:?}");
    assert_eq!(host.ledger.used(), overhead());
    let (vm, _) = take_over().unwrap();
    vm.memory().let_pages_move(true);
    assert_eq!(vm.memory().charged(), Pages(SIZE));
    leaves_and_comes_back(&vmm, &vm);
    vm.release();
    assert_eq!(host.ledger.used(), Pages(0));
}
