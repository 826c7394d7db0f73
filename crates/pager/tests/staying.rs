//! A VM whose pages may not move, since devices reach them past the page tables: neither its own threads
//! nor another VM's put another machine page behind one of its pages.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::memory::Broke;
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::Ppn;
use support::site::Site;
use support::vm::Vm;

const PAGES: u64 = 8;

fn examine(vm: &Vm) {
    let pages: Vec<Ppn> = (0..PAGES).map(Ppn).collect();
    Examiner::default().examine(&vm.memory, &pages, Marking::None).unwrap();
}

fn two() -> (Site, Vec<Vm>) {
    let site = Site::new(60, 2);
    let vms = (0..2).map(|_| Vm::at(&site, PAGES, 16, 1)).collect();
    (site, vms)
}

#[test]
fn pages_that_may_not_move_are_not_shared_by_whoever_finds_them() {
    for may in [false, true] {
        let (site, mut vms) = two();
        vms[0].access(1, Some(7));
        vms[0].access(2, Some(7));
        vms[0].access(3, Some(0));
        examine(&vms[0]);
        // Two of its own are common, if any are; one more can be found by others.
        vms[0].access(4, Some(8));
        examine(&vms[0]);
        let before: Vec<State> = (0..PAGES).map(|p| vms[0].state(p)).collect();
        vms[0].access(5, Some(0));
        vms[0].access(6, Some(9));
        vms[0].memory.let_pages_move(may);
        vms[1].access(0, Some(8));
        vms[1].access(1, Some(9));
        examine(&vms[1]);
        examine(&vms[0]);
        let expected = if may { State::Shared } else { State::Resident };
        assert_eq!(before[4], State::Resident);
        assert_eq!(vms[0].state(4), expected, "found by another VM");
        assert_eq!(vms[0].state(6), expected, "looked for by itself");
        let zero = if may { State::Untouched } else { State::Resident };
        assert_eq!(vms[0].state(5), zero, "zeros");
        assert_eq!(vms[0].access(4, None), 8);
        assert_eq!(vms[1].access(0, None), 8);
        Vm::check_all(&site, &vms);
    }
}

#[test]
fn what_was_never_written_is_read_from_a_page_of_its_own_where_pages_may_not_move() {
    for (may, state) in [(false, State::Resident), (true, State::Zero)] {
        let (site, mut vms) = two();
        vms[0].memory.let_pages_move(may);
        assert_eq!(vms[0].access(3, None), 0);
        assert_eq!(vms[0].state(3), state);
        // Asked for while they did, answered when they do not any more.
        assert_eq!(vms[0].memory.map_zeros(Ppn(5), 2), Ok(if may { 2 } else { 0 }));
        Vm::check_all(&site, &vms);
    }
}

/// Nobody adds to the mappings of a VMM that has none to spare, whoever finds its pages; they go home as before.
#[test]
fn a_vmm_without_mappings_to_spare_gets_no_more() {
    for spare in [0, 100] {
        let (site, mut vms) = two();
        for p in [1, 2] {
            vms[0].access(p, Some(7));
        }
        examine(&vms[0]);
        assert_eq!(vms[0].state(1), State::Shared);
        vms[0].access(4, Some(8));
        vms[0].access(6, Some(9));
        examine(&vms[0]);
        let made = vms[0].memory.counters.values().remaps;
        vms[0].memory.allow_remaps(made + spare, u64::MAX);
        vms[1].access(0, Some(8));
        examine(&vms[1]);
        vms[0].access(5, Some(9));
        examine(&vms[0]);
        let expected = if spare > 0 { State::Shared } else { State::Resident };
        assert_eq!(vms[0].state(4), expected, "found by another VM");
        assert_eq!(vms[0].state(6), expected, "looked for by itself");
        // What the guest reads is its own page then, and not waited for.
        assert_eq!(vms[0].access(3, None), 0);
        assert_eq!(vms[0].state(3), if spare > 0 { State::Zero } else { State::Resident });
        assert_eq!(vms[0].memory.map_zeros(Ppn(7), 1), Ok(spare.min(1)));
        assert_eq!(vms[0].memory.go_home(&[Ppn(1), Ppn(2)]), Ok(2));
        Vm::check_all(&site, &vms);
    }
}

#[test]
fn copies_stay_where_they_are_and_what_is_shared_may_still_be_written_or_go_home() {
    let (site, mut vms) = two();
    assert_eq!(vms[0].access(5, None), 0);
    for p in 0..4 {
        vms[0].access(p, Some(7));
    }
    examine(&vms[0]);
    vms[0].access(0, Some(70));
    vms[0].memory.let_pages_move(false);
    // A device that is to write to a page has it broken first, as the guest does.
    vms[0].access(1, Some(71));
    vms[0].access(5, Some(75));
    let states = |vm: &Vm| [0, 1, 2, 3, 5].map(|p| vm.state(p));
    use State::{Broken, Resident, Shared};
    assert_eq!(states(&vms[0]), [Broken, Broken, Shared, Shared, Broken]);
    let all: Vec<Ppn> = (0..PAGES).map(Ppn).collect();
    assert_eq!(vms[0].memory.go_home(&all), Ok(2));
    assert_eq!(states(&vms[0]), [Broken, Broken, Resident, Resident, Broken]);
    Vm::check_all(&site, &vms);
    vms[0].memory.let_pages_move(true);
    assert_eq!(vms[0].memory.go_home(&all), Ok(3));
    assert_eq!(states(&vms[0]), [Resident; 5]);
    for (p, token) in [(0, 70), (1, 71), (2, 7), (3, 7), (5, 75)] {
        assert_eq!(vms[0].access(p, None), token);
    }
    Vm::check_all(&site, &vms);
}

#[test]
fn large_pages_are_not_broken_where_pages_may_not_move() {
    let mut vm = Vm::with_large(16, 40, 4, 4);
    vm.access(5, Some(1));
    vm.memory.let_pages_move(false);
    assert_eq!(vm.break_large(5), Ok(Broke::Busy));
    assert!(vm.memory.regions().is_large(Ppn(5)));
    vm.memory.let_pages_move(true);
    assert!(matches!(vm.break_large(5), Ok(Broke::Done { .. })));
    assert_eq!(vm.access(5, None), 1);
}
