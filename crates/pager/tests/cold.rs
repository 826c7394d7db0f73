//! What a guest goes on using stays where it is, while what it leaves alone goes: over the kernel's page tables, and a
//! VMM process of its own.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/vmm.rs"]
mod vmm;

use std::sync::Arc;

use ballast_pager::backend::Backend;
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, PagedVm, PagerConfig, VmFiles};
use ballast_pager::swap::SwapSpace;
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use vmm::{Cell, Guest, Vmm, alone, wait_for};

const SIZE: u64 = 4096;
/// Pages that leave at a time, and how often.
const SOME: u64 = 32;
const TIMES: u64 = 32;

/// Writes all pages, then goes through every second one, over and over.
#[test]
#[ignore = "the VMM process of the other test"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let word = |ppn: u64, i: usize| ppn << 32 | i as u64;
    (0..guest.pages).for_each(|ppn| guest.write_page(ppn, |i| word(ppn, i)));
    let check = |ppn: u64| {
        let page = guest.read_page(ppn);
        let good = page.iter().enumerate().all(|(i, &w)| w == word(ppn, i));
        guest.board.add(Cell::Errors, u64::from(!good));
    };
    while guest.board.get(Cell::Stop) == 0 {
        (0..guest.pages).step_by(2).for_each(check);
        guest.board.add(Cell::Step, 1);
    }
    (0..guest.pages).for_each(check);
    guest.board.add(Cell::Done, 1);
    loop {
        std::thread::park();
    }
}

#[test]
fn what_is_in_use_stays_and_what_is_not_goes() {
    let Some(_alone) = alone() else { return };
    let vmm = Vmm::start("", SIZE);
    let dir = tempfile::tempdir().unwrap();
    let config = PagerConfig { seed: 7, ..PagerConfig::default() };
    let overhead = config.overhead(Pages(SIZE));
    let host = Arc::new(Host::new(Ledger::new(Pages(2 * SIZE) + overhead, || {})));
    assert!(host.ledger.try_reserve(overhead));
    let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
    let files = VmFiles::new(dir.path(), swap);
    let vm = PagedVm::start("warm", config, files, vmm.guest_ram(), overhead, host).unwrap();
    let memory = vm.memory();
    vmm.board.set(Cell::Go, 1);
    let turns = |n: u64| {
        let until = vmm.board.get(Cell::Step) + n;
        wait_for("the guest", || vmm.board.get(Cell::Step) >= until);
    };
    turns(1);
    if !memory.backend().watch(&[Ppn(0)]) {
        eprintln!("SKIPPED: accesses are not seen here: this host swaps, or its kernel is too old");
        return;
    }
    // So that nothing is known of a page but whether it is used.
    let at_home = || memory.pmap().in_state(State::Resident);
    let before = memory.counters.values();
    for _ in 0..TIMES {
        vm.set_evict_goal(Pages(SOME));
        wait_for("eviction", || vm.evict_goal().is_zero());
        turns(2);
    }
    let after = memory.counters.values();
    let (left, back) = (after.evicted - before.evicted, after.own_back - before.own_back);
    println!("{left} left, {back} were missed; {} of {SIZE} at home", at_home().0);
    assert!(left >= SOME * TIMES, "{left}");
    // At random half of them and more. The first have been watched for a moment only.
    assert!(back <= left / 5, "{back} of {left} were in use");
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!((vmm.board.get(Cell::Errors), vm.health()), (0, Health::Well));
    drop(vmm);
    vm.release();
}
