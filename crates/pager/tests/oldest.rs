//! Where much has to leave at once, what was used longest ago goes: over the kernel's page tables, and a VMM process of
//! its own.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/vmm.rs"]
mod vmm;

use std::ops::Range;
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
const QUARTER: u64 = SIZE / 4;

/// Writes all pages in their order, and reads those that it is told to.
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
    guest.board.add(Cell::Step, 1);
    while guest.board.get(Cell::Stop) == 0 {
        match guest.board.get(Cell::Wanted) {
            0 => std::thread::yield_now(),
            wanted => {
                check(wanted - 1);
                guest.board.set(Cell::Wanted, 0);
            }
        }
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
        let vmm = Vmm::start("", SIZE);
        let dir = tempfile::tempdir().unwrap();
        let config = PagerConfig { seed: 7, ..PagerConfig::default() };
        let overhead = config.overhead(Pages(SIZE));
        let host = Arc::new(Host::new(Ledger::new(Pages(2 * SIZE) + overhead, || {})));
        assert!(host.ledger.try_reserve(overhead));
        let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
        let files = VmFiles::new(dir.path(), swap);
        let vm = PagedVm::start("aged", config, files, vmm.guest_ram(), overhead, host).unwrap();
        vmm.board.set(Cell::Go, 1);
        let rig = Rig { vmm, vm, _dir: dir };
        wait_for("the guest", || rig.vmm.board.get(Cell::Step) == 1);
        let seen = rig.vm.memory().backend().watch(&[Ppn(0)]);
        if !seen {
            eprintln!("SKIPPED: accesses are not seen: this host swaps, or its kernel is too old");
        }
        seen.then_some(rig)
    }

    fn read(&self, pages: Range<u64>) {
        for ppn in pages {
            self.vmm.board.set(Cell::Wanted, ppn + 1);
            wait_for("the guest", || self.vmm.board.get(Cell::Wanted) == 0);
        }
    }

    fn evict(&self, n: u64) {
        self.vm.set_evict_goal(Pages(n));
        wait_for("eviction", || self.vm.evict_goal().is_zero());
    }

    /// How many pages of each quarter are not at home.
    fn away(&self) -> [u64; 4] {
        let pmap = self.vm.memory().pmap();
        let is_away = |p: &u64| pmap.load(Ppn(*p)).state() != State::Resident;
        std::array::from_fn(|n| {
            let first = n as u64 * QUARTER;
            (first..first + QUARTER).filter(is_away).count() as u64
        })
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
fn what_was_touched_first_leaves_first_and_what_came_back_stays() {
    let Some(_alone) = alone() else { return };
    let Some(rig) = Rig::start() else { return };
    rig.evict(QUARTER);
    let away = rig.away();
    println!("away after the first quarter left: {away:?}");
    // Of the others by the ends of generations, and for what is still on its way to the kernel's lists.
    assert!(away[0] >= QUARTER * 9 / 10, "{away:?}");

    rig.read(0..QUARTER / 2);
    rig.evict(QUARTER);
    let away = rig.away();
    println!("away after half of it came back, and as much left again: {away:?}");
    // Those on probation that are too many, a sixteenth of what is at home, leave before.
    assert!(away[0] <= QUARTER * 7 / 10 && away[1] >= QUARTER * 7 / 10, "{away:?}");
    rig.end();
}

#[test]
fn a_little_leaves_by_the_clock() {
    let Some(_alone) = alone() else { return };
    let Some(rig) = Rig::start() else { return };
    for _ in 0..QUARTER / 32 {
        rig.evict(32);
    }
    let away = rig.away();
    println!("away after a quarter left bit by bit: {away:?}");
    // Binomial(1024, 1/4): sigma 14; far beyond, for blocks of eight leave together.
    assert!(away.iter().all(|&n| n >= QUARTER / 8), "{away:?}");
    rig.end();
}
