//! Large pages of zeros are in the way of an eviction that asks for more than they are worth.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/large_ram.rs"]
mod large_ram;
#[path = "support/vmm.rs"]
mod vmm;

use std::sync::Arc;

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, PagedVm, PagerConfig, VmFiles};
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
#[ignore = "the VMM process of the other test"]
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

#[test]
fn an_eviction_goes_on_at_a_large_page_of_zeros() {
    let Some(_alone) = alone() else { return };
    let Some(ram) = large_ram::create(Pages(SIZE)) else {
        eprintln!("SKIPPED: no tmpfs with large pages");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let config = PagerConfig { large_pages: true, ..PagerConfig::default() };
    let overhead = config.overhead(Pages(SIZE));
    let host = Arc::new(Host::new(Ledger::new(Pages(2 * SIZE) + overhead, || {})));
    assert!(host.ledger.try_reserve(overhead));
    host.set_plenty(Pages(SIZE / 8));
    let files = VmFiles::new(
        dir.path(),
        SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap(),
    );
    let vmm = Vmm::start_with(ram, "", SIZE);
    let vm = PagedVm::start("t", config, files, vmm.guest_ram(), overhead, host.clone()).unwrap();
    vm.memory().let_pages_move(true);
    vmm.board.set(Cell::Go, 1);
    vmm::wait_for("the guest", || vmm.board.get(Cell::Step) == 1);
    assert_eq!(vm.memory().charged(), Pages(SIZE));
    assert_eq!(vm.memory().regions().counts().fills, REGIONS, "the kernel had no large page");
    // All zeros, and half of what was written. Asked for once: an eviction that gives up is not asked again.
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
        vm.memory().reconcile(Ppn(0), SIZE).is_ok() && vm.memory().check_quiet().is_ok()
    });
    vm.release();
    assert_eq!(host.ledger.used(), Pages(0));
}
