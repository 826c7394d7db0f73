//! What comes before a guest that fills memory in order has asked for it: how much, what stops it, and that
//! a manager that dies meanwhile loses nothing.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::backend::{Errno, MemError};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use support::CrashAt;
use support::site::Site;
use support::vm::Vm;

const PAGES: u64 = 64;
const AROUND: u64 = 4;
const REGION: u64 = 8;

/// Four pages around each of two touches that follow one another.
fn filling() -> Vm {
    let mut vm = Vm::new(PAGES, 100, 16, AROUND);
    vm.access(0, Some(10));
    assert!(!vm.memory.runs_ahead(), "one touch is no row");
    vm.access(4, Some(14));
    assert!(vm.memory.runs_ahead());
    assert_eq!(vm.memory.charged(), Pages(8));
    vm
}

/// Lets all come that comes unasked.
fn run_ahead(vm: &Vm) -> u64 {
    let mut parts = 0;
    while vm.memory.runs_ahead() {
        vm.memory.run_ahead().unwrap();
        parts += 1;
        assert!(parts < 100, "it has no end");
    }
    parts
}

#[test]
fn as_much_comes_unasked_as_was_filled_and_no_fault_is_met_there() {
    let mut vm = filling();
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(16));
    let faults = vm.memory.counters.values().faults;
    for p in 8..16 {
        vm.access(p, Some(10 + p));
    }
    assert_eq!(vm.memory.counters.values().faults, faults);
    // The next touch begins where that ended.
    vm.access(16, Some(26));
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(40));
    vm.check();
    for p in 8..17 {
        assert_eq!(vm.access(p, None), 10 + p);
    }
}

#[test]
fn who_fills_memory_downwards_is_run_ahead_of_too() {
    let mut vm = Vm::new(PAGES, 100, 16, AROUND);
    vm.access(PAGES - 1, Some(1));
    vm.access(PAGES - 5, Some(2));
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(16));
    assert_eq!(vm.state(PAGES - 16), State::Resident);
    assert_eq!(vm.state(PAGES - 17), State::Untouched);
    vm.check();
}

#[test]
fn a_short_row_of_small_pages_makes_no_large_page() {
    let mut vm = Vm::with_large_around(PAGES, 200, REGION, 40, AROUND);
    // The first region has small pages, for memory was short.
    vm.host.set_low(true);
    vm.access(1, Some(1));
    vm.host.set_low(false);
    vm.access(2, Some(1));
    vm.access(4, Some(2));
    assert!(vm.memory.runs_ahead());
    run_ahead(&vm);
    assert_eq!(vm.state(REGION - 1), State::Resident);
    assert_eq!(vm.state(REGION), State::Untouched);
    assert_eq!(vm.memory.regions().whole(), Pages(0));
    vm.check();
}

#[test]
fn what_comes_unasked_is_counted() {
    let mut vm = filling();
    run_ahead(&vm);
    let seen = vm.memory.counters.values();
    assert_eq!((seen.faults, seen.unasked), (2, 14), "of 16 pages");
    vm.access(16, Some(26));
    run_ahead(&vm);
    let seen = vm.memory.counters.values();
    assert_eq!(seen.faults + seen.unasked, vm.memory.charged().0);
}

#[test]
fn what_is_at_home_or_sampled_is_passed_by_nobody() {
    let mut vm = filling();
    assert!(vm.memory.sample(Ppn(10)).unwrap());
    run_ahead(&vm);
    assert_eq!(vm.state(9), State::Resident);
    assert_eq!((vm.state(10), vm.state(11)), (State::Untouched, State::Untouched));
    vm.memory.touches.restart();
    // The sample sees its page touched.
    vm.access(10, Some(20));
    assert_eq!(vm.memory.counters.values().touched, 1);
    vm.check();
}

#[test]
fn nothing_comes_unasked_where_memory_is_not_plentiful() {
    for (low, plenty) in [(true, 0), (false, 89)] {
        let vm = filling();
        vm.host.set_low(low);
        vm.host.set_plenty(Pages(plenty));
        run_ahead(&vm);
        assert_eq!(vm.memory.charged(), Pages(8), "low: {low}, plenty: {plenty}");
        vm.check();
    }
}

#[test]
fn nothing_comes_unasked_beyond_what_the_policy_grants() {
    let mut vm = filling();
    vm.memory.set_target(Pages(11));
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(8));
    vm.memory.set_target(Pages(12));
    vm.access(8, Some(1));
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(12));
    vm.check();
}

/// As a migration does, of a guest that has filled four regions.
#[test]
fn who_reads_all_memory_in_order_has_none_of_it_made() {
    let site = Site::new(1000, 1);
    let mut vm = Vm::at_with_large(&site, 4 * PAGES, REGION, AROUND);
    for region in 0..4 {
        vm.access(region * REGION + 3, Some(10 + region));
    }
    run_ahead(&vm);
    let whole = vm.memory.regions().whole();
    assert_eq!(whole, Pages(8 * REGION));
    for p in whole.0..4 * PAGES {
        assert_eq!(vm.access(p, None), 0);
        run_ahead(&vm);
    }
    // The first that is read is; what follows is read as zeros.
    assert!(vm.memory.regions().whole() <= whole + Pages(REGION));
}

#[test]
fn what_the_guest_gave_up_does_not_come_unasked() {
    let mut vm = Vm::with_large_around(PAGES, 200, REGION, 40, AROUND);
    vm.access(4 * REGION, Some(7));
    vm.ram.0.vmm_punch(4 * REGION, REGION);
    vm.ram.0.announce(4 * REGION, REGION);
    vm.pump().unwrap();
    assert_eq!(vm.state(4 * REGION), State::Ballooned);
    for region in 0..4 {
        vm.access(region * REGION, Some(1));
    }
    assert!(vm.memory.runs_ahead());
    run_ahead(&vm);
    assert_eq!(vm.memory.charged(), Pages(4 * REGION));
    vm.check();
}

/// Of memory that was plugged, a guest that uses a block has all of that one, and perhaps no other.
#[test]
fn nothing_comes_unasked_where_the_guest_may_have_no_memory() {
    // What it has for sure: 0..32, 32..46, 46..60.
    let came = |touches: [u64; 2]| {
        let mut vm = Vm::new(PAGES, 100, 16, AROUND);
        vm.ram.0.set_plugged(32, 14);
        for p in touches {
            vm.access(p, Some(p));
        }
        assert!(vm.memory.runs_ahead());
        run_ahead(&vm);
        vm.check();
        let there: Vec<u64> = (0..PAGES).filter(|&p| vm.state(p) == State::Resident).collect();
        (there[0], there[there.len() - 1] + 1, there.len())
    };
    assert_eq!(came([24, 28]), (24, 32, 8), "up to where the first part ends");
    assert_eq!(came([32, 36]), (32, 46, 14), "up to the end of the block");
    assert_eq!(came([59, 55]), (46, 60, 14), "down to its beginning");
    assert_eq!(came([16, 20]), (16, 32, 16));
    assert_eq!(came([35, 31]), (20, 36, 16), "down into the first part");
}

#[test]
fn a_guest_whose_memory_ends_gets_no_more_than_there_is() {
    let mut vm = Vm::new(18, 100, 16, AROUND);
    for p in 0..18 {
        vm.access(p, Some(p + 1));
        run_ahead(&vm);
    }
    assert_eq!(vm.memory.charged(), Pages(18));
    vm.check();
    assert!((0..18).all(|p| vm.access(p, None) == p + 1));
}

/// Four regions in a row.
fn filling_large() -> Vm {
    let mut vm = Vm::with_large_around(PAGES, 200, REGION, 40, AROUND);
    for region in 0..4 {
        assert!(!vm.memory.runs_ahead(), "at {region}");
        vm.access(region * REGION + 3, Some(10 + region));
    }
    assert!(vm.memory.runs_ahead());
    vm
}

#[test]
fn large_pages_come_one_at_a_time() {
    let mut vm = filling_large();
    vm.memory.run_ahead().unwrap();
    assert_eq!(vm.memory.charged(), Pages(5 * REGION));
    assert_eq!(vm.memory.regions().whole(), Pages(5 * REGION));
    vm.check();
    assert_eq!((vm.access(3, None), vm.access(3 * REGION + 3, None)), (10, 13));
    // A region of which the guest has something is left as it is, but for what is around a touch.
    vm.host.set_plenty(Pages(200));
    vm.access(6 * REGION, Some(1));
    vm.host.set_plenty(Pages(40));
    run_ahead(&vm);
    let whole = vm.memory.regions().whole();
    vm.access(6 * REGION + 4, Some(2));
    run_ahead(&vm);
    assert_eq!(vm.memory.regions().whole(), whole);
    assert_eq!((vm.access(6 * REGION, None), vm.access(6 * REGION + 4, None)), (1, 2));
    vm.check();
}

#[test]
fn large_pages_come_before_who_fills_memory_downwards() {
    let mut vm = Vm::with_large_around(PAGES, 200, REGION, 40, AROUND);
    for region in (4..8).rev() {
        vm.access(region * REGION + 3, Some(10 + region));
    }
    vm.memory.run_ahead().unwrap();
    assert_eq!(vm.memory.regions().whole(), Pages(5 * REGION));
    assert!(vm.memory.regions().is_large(Ppn(3 * REGION)));
    assert_eq!(vm.access(7 * REGION + 3, None), 17);
    vm.check();
}

#[test]
fn small_pages_of_a_region_come_unasked_and_no_small_ones_of_the_next() {
    let mut vm = Vm::with_large_around(PAGES, 200, 16, 40, AROUND);
    vm.host.set_low(true);
    vm.access(17, Some(1));
    vm.host.set_low(false);
    for p in [18, 20] {
        vm.access(p, Some(p));
    }
    run_ahead(&vm);
    let there =
        |vm: &Vm| (0..PAGES).filter(|&p| vm.state(p) == State::Resident).collect::<Vec<_>>();
    // As much again as was filled since the touch before.
    assert_eq!(there(&vm), (17..30).collect::<Vec<_>>());
    vm.access(30, Some(30));
    run_ahead(&vm);
    assert_eq!(there(&vm), (17..32).collect::<Vec<_>>());
    vm.check();
}

#[test]
fn a_crash_at_any_call_loses_nothing() {
    let small: fn() -> Vm = filling;
    let small = (small, [0, 4], [10, 14]);
    let large = (filling_large as fn() -> Vm, [3, REGION + 3], [10, 11]);
    for (make, at, wrote) in [small, large] {
        for after in [false, true] {
            for call in 0.. {
                let mut vm = make();
                vm.ram.0.crash_at(CrashAt { call, after });
                let mut result = Ok(());
                while result.is_ok() && vm.memory.runs_ahead() {
                    result = vm.memory.run_ahead();
                }
                let died = vm.ram.0.revive();
                let what = format!("dies at call {call}, after it: {after}");
                assert!(!died || result == Err(MemError::Crash), "{what}: {result:?}");
                vm.take_over().unwrap();
                vm.check();
                vm.memory.check_quiet().unwrap();
                assert_eq!(at.map(|p| vm.access(p, None)), wrote, "{what}");
                for p in 32..PAGES {
                    vm.access(p, Some(100 + p));
                }
                assert!((32..PAGES).all(|p| vm.access(p, None) == 100 + p), "{what}");
                vm.check();
                if !died {
                    assert!(call > 0);
                    break;
                }
            }
        }
    }
}

#[test]
fn a_failure_ends_it_and_leaves_what_did_not_come_as_it_was() {
    for error in [
        MemError::Again,
        MemError::NoMemory,
        MemError::Os { op: "test", ppn: Ppn(8), source: Errno(5) },
    ] {
        let vm = filling();
        vm.ram.0.fail_at(0, error.clone());
        assert_eq!(vm.memory.run_ahead(), Err(error));
        assert!(!vm.memory.runs_ahead());
        assert_eq!(vm.memory.charged(), Pages(8));
        assert_eq!(vm.state(8), State::Untouched);
        vm.memory.check_quiet().unwrap();
        vm.check();
    }
}
