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
use ballast_pager::memory::CounterValues;
use ballast_pager::service::{Health, PagedVm, PagerConfig, VmFiles};
use ballast_pager::swap::SwapSpace;
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use vmm::{Cell, Guest, Vmm, alone, wait_for};

const SIZE: u64 = 4096;
/// Pages that leave at a time, and how often.
const SOME: u64 = 32;
const TIMES: u64 = 32;

/// Writes all pages, then goes through every second one, over and over, and once through those after them that are
/// not multiples of four less one, when it is told to.
#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let word = |ppn: u64, i: usize| ppn << 32 | i as u64;
    (0..guest.pages).for_each(|ppn| guest.write_page(ppn, |i| word(ppn, i)));
    let check = |ppn: u64| {
        let page = guest.read_page(ppn);
        let good = page.iter().enumerate().all(|(i, &w)| w == word(ppn, i));
        guest.board.add(Cell::Errors, u64::from(!good));
    };
    let mut once = false;
    while guest.board.get(Cell::Stop) == 0 {
        (0..guest.pages).step_by(2).for_each(check);
        if guest.board.get(Cell::Phase) == 1 && !once {
            (1..guest.pages).step_by(4).for_each(check);
            once = true;
        }
        guest.board.add(Cell::Step, 1);
    }
    (0..guest.pages).for_each(check);
    guest.board.add(Cell::Done, 1);
    loop {
        std::thread::park();
    }
}

struct Rig {
    vmm: Vmm,
    vm: PagedVm,
    _dir: tempfile::TempDir,
}

impl Rig {
    /// None where accesses are not seen.
    fn start() -> Option<Rig> {
        Rig::with(2 * SIZE)
    }

    /// The same on a host of `room` pages beside the overhead.
    fn with(room: u64) -> Option<Rig> {
        let vmm = Vmm::start("", SIZE);
        let dir = tempfile::tempdir().unwrap();
        let config = PagerConfig { seed: 7, ..PagerConfig::default() };
        let overhead = config.overhead(Pages(SIZE));
        let host = Arc::new(Host::new(Ledger::new(Pages(room) + overhead, || {})));
        assert!(host.ledger.try_reserve(overhead));
        let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
        let files = VmFiles::new(dir.path(), swap);
        let vm = PagedVm::start("warm", config, files, vmm.guest_ram(), overhead, host).unwrap();
        vmm.board.set(Cell::Go, 1);
        let rig = Rig { vmm, vm, _dir: dir };
        rig.turns(1);
        let seen = rig.vm.memory().backend().watch(&[Ppn(0)]);
        if !seen {
            let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
            let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
            assert!(
                required.as_deref() != Ok("1") || swaps.lines().count() > 1,
                "accesses are not seen"
            );
            eprintln!("SKIPPED: accesses are not seen: this host swaps, or its kernel is too old");
        }
        seen.then_some(rig)
    }

    /// Waits until the guest has gone through its pages so often.
    fn turns(&self, n: u64) {
        let until = self.vmm.board.get(Cell::Step) + n;
        wait_for("the guest", || self.vmm.board.get(Cell::Step) >= until);
    }

    fn evict(&self, times: u64) {
        for _ in 0..times {
            self.vm.set_evict_goal(Pages(SOME));
            wait_for("eviction", || self.vm.evict_goal().is_zero());
            self.turns(2);
        }
    }

    fn counters(&self) -> CounterValues {
        self.vm.memory().counters.values()
    }

    fn end(self) {
        self.vmm.board.set(Cell::Stop, 1);
        wait_for("verification", || self.vmm.board.get(Cell::Done) == 1);
        assert_eq!((self.vmm.board.get(Cell::Errors), self.vm.health()), (0, Health::Well));
        drop(self.vmm);
        self.vm.release();
    }
}

#[test]
fn what_is_in_use_stays_and_what_is_not_goes() {
    let Some(_alone) = alone() else { return };
    let Some(rig) = Rig::start() else { return };
    let before = rig.counters();
    rig.evict(TIMES);
    let after = rig.counters();
    let (left, back) = (after.evicted - before.evicted, after.own_back - before.own_back);
    let home = rig.vm.memory().pmap().in_state(State::Resident);
    println!("{left} left, {back} were missed; {home:?} of {SIZE} at home");
    assert!(left >= SOME * TIMES, "{left}");
    // At random half of them and more. The first have been watched for a moment only.
    assert!(back <= left / 5, "{back} of {left} were in use");
    rig.end();
}

/// Nothing has to leave before; then a quarter has to, at once.
#[test]
fn while_memory_is_about_to_be_short_what_is_in_use_is_told_before_anything_has_to_leave() {
    let Some(_alone) = alone() else { return };
    let Some(rig) = Rig::with(SIZE + SIZE / 16) else { return };
    // Not before it is known that they may.
    rig.vm.let_pages_move(true);
    let backend = rig.vm.memory().backend();
    let unused =
        || (1..SIZE).step_by(2).filter(|&p| !backend.accessed(Ppn(p), 1)[0]).count() as u64;
    wait_for("pages to be watched", || unused() >= SIZE / 2 * 9 / 10);
    rig.turns(2);
    let before = rig.counters();
    rig.vm.set_evict_goal(Pages(SOME * TIMES));
    wait_for("eviction", || rig.vm.evict_goal().is_zero());
    rig.turns(2);
    let after = rig.counters();
    let (left, back) = (after.evicted - before.evicted, after.own_back - before.own_back);
    println!("{left} left at once, {back} were missed");
    // At random it would be half of them.
    assert!(left >= SOME * TIMES && back <= left / 5, "{back} of {left} were in use");
    rig.end();
}

#[test]
fn what_was_wanted_once_is_the_first_to_leave_again() {
    let Some(_alone) = alone() else { return };
    let Some(rig) = Rig::start() else { return };
    rig.evict(TIMES * 7 / 4);
    let away = SIZE - rig.vm.memory().pmap().in_state(State::Resident).0;
    rig.vmm.board.set(Cell::Phase, 1);
    rig.turns(2);
    let before = rig.counters();
    rig.evict(2);
    let after = rig.counters();
    let left = after.evicted - before.evicted;
    let failed = after.failed_probation - before.failed_probation;
    println!("{away} were away; of the next {left} that left {failed} had come back, unused since");
    // 256 are remembered, and 200 may stay. Of the others a batch of each processor, 31 pages, may still be on its way
    // to the kernel's lists: those count as in use. None of it would be such a page by chance alone.
    assert!(failed >= left / 4, "{failed} of {left}");
    rig.end();
}
