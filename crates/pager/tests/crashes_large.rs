//! Large pages on a double whose kernel never splits one for the manager: what is punched of a part of one
//! stays, zeroed. The manager dies at every call of every operation, and its successor in its recovery.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::backend::{Backend, MemError};
use ballast_pager::memory::{Broke, NotEvicted};
use ballast_pager::word::{State, Word};
use ballast_units::{Pages, Ppn};
use support::every_call::{EveryCall, Op, gone, missing};
use support::evict::evict;
use support::vm::{LARGE, Vm};

const REGION: u64 = 4;
/// Four regions and a half.
const PAGES: u64 = 18;

/// A region that was touched once, one that was written whole, one of which a part was given up, one
/// untouched.
fn vm() -> (Vm, Vec<u64>) {
    let mut vm = Vm::with_large(PAGES, 100, REGION, 40);
    vm.access(1, Some(11));
    for p in 4..8 {
        vm.access(p, Some(LARGE * (p % 2) + 10 + p));
    }
    vm.access(9, Some(19));
    vm.access(11, Some(21));
    vm.ram.0.vmm_punch(10, 1);
    vm.ram.0.announce(10, 1);
    vm.pump().unwrap();
    vm.access(16, Some(26));
    for p in 0..12 {
        let state = if p == 10 { State::Ballooned } else { State::Resident };
        assert_eq!(vm.state(p), state, "ppn {p}");
        assert!(vm.memory.regions().is_large(Ppn(p)), "ppn {p}");
    }
    assert_eq!(vm.state(17), State::Untouched);
    assert_eq!(vm.memory.charged(), Pages(12));
    assert_eq!(vm.memory.regions().whole(), Pages(8));
    vm.check();
    let wrote = |p: u64| match p {
        1 | 9 | 11 | 16 => 10 + p,
        4..=7 => LARGE * (p % 2) + 10 + p,
        _ => 0,
    };
    (vm, (0..PAGES).map(wrote).collect())
}

/// By a VMM that maps its RAM anew.
fn whole(vm: &mut Vm, region: usize) -> Result<(), MemError> {
    vm.ram.0.set_can_remap(true);
    let result = vm.memory.collapse(region);
    vm.ram.0.set_can_remap(false);
    result.map(drop)
}

const OPS: &[(&str, Op)] = &[
    ("fault on an untouched region", |vm| missing(vm, 14)),
    ("fault beyond the last region", |vm| missing(vm, 17)),
    ("fault on a region given up", |vm| {
        gone(vm, 0, REGION)?;
        missing(vm, 2)
    }),
    ("fault on a page given up", |vm| missing(vm, 10)),
    ("break a region touched once", |vm| vm.break_large(0).map(drop)),
    ("break a region written whole", |vm| vm.break_large(5).map(drop)),
    ("break a torn region", |vm| vm.break_large(8).map(drop)),
    ("break what was just allocated", |vm| {
        missing(vm, 14)?;
        vm.break_large(14).map(drop)
    }),
    ("make a region whole again", |vm| {
        vm.break_large(5)?;
        whole(vm, 1)
    }),
    ("make one whole again of which a page was never touched", |vm| {
        vm.break_large(0)?;
        missing(vm, 0)?;
        missing(vm, 3)?;
        whole(vm, 0)
    }),
    ("evict", |vm| match vm.evict(6) {
        Err(NotEvicted::Failed(e)) => Err(e),
        // It could not be broken.
        Err(NotEvicted::NotEligible) | Ok(_) => Ok(()),
    }),
    ("give up a part", |vm| gone(vm, 5, 2)),
    ("give up everything", |vm| gone(vm, 0, PAGES)),
    ("give up what was just allocated", |vm| {
        missing(vm, 14)?;
        gone(vm, 12, 2)
    }),
    ("announced, punched later", |vm| {
        missing(vm, 14)?;
        vm.ram.0.announce(0, PAGES);
        vm.pump()
    }),
];

/// What the guest may find: what it wrote, or zeros where it gave the page up.
fn expected(op: &str, wrote: &[u64]) -> Vec<Vec<u64>> {
    let void = match op {
        "give up everything" | "announced, punched later" => 0..PAGES,
        "give up a part" => 5..7,
        "fault on a region given up" => 0..REGION,
        _ => 0..0,
    };
    let may = |(p, &token): (usize, &u64)| {
        if void.contains(&(p as u64)) { vec![token, 0] } else { vec![token] }
    };
    wrote.iter().enumerate().map(may).collect()
}

fn finish(vm: &mut Vm, expected: &[Vec<u64>], what: &str) {
    vm.check();
    assert_eq!(vm.ram.0.waiting(), 0, "{what}: somebody was not woken");
    vm.memory.bring_back().unwrap();
    vm.write_cluster();
    vm.memory.check_quiet().unwrap();
    let seen = |vm: &mut Vm| {
        for p in 0..PAGES {
            let seen = vm.access(p, None);
            assert!(expected[p as usize].contains(&seen), "{what}: ppn {p} reads {seen}");
        }
    };
    seen(vm);
    // All of it out, and back.
    for round in 0..2 {
        for p in 0..PAGES {
            if vm.state(p) == State::Resident {
                let evicted = vm.evict(p);
                // A page of zeros goes when its large page is broken.
                let dropped = vm.state(p) == State::Untouched;
                assert!(evicted.is_ok() || dropped, "{what}: ppn {p}: {evicted:?}");
            }
        }
        vm.check();
        assert_eq!(vm.memory.regions().whole(), Pages(0), "{what}");
        if round == 0 {
            seen(vm);
            for p in 0..PAGES {
                vm.access(p, Some(100 + p));
            }
        }
    }
    for p in 0..PAGES {
        assert_eq!(vm.access(p, None), 100 + p, "{what}: ppn {p}, written after");
    }
    vm.check();
}

/// Each operation on [`vm`], and what it must be like in the end.
fn each(ops: &[(&str, Op)], happens: impl Fn(&EveryCall) -> u32) -> u32 {
    let each = |&(name, op): &(&str, Op)| {
        let expected = expected(name, &vm().1);
        let finish = |vm: &mut Vm, what: &str| finish(vm, &expected, what);
        happens(&EveryCall { name, op, vm: || vm().0, finish: &finish })
    };
    ops.iter().map(each).sum()
}

#[test]
fn a_crash_at_any_call_of_any_operation_loses_nothing() {
    let crashes = each(OPS, |every| every.dies(false));
    println!("{crashes} crashes");
    assert!(crashes >= 100, "{crashes}");
}

#[test]
fn a_crash_in_the_recovery_from_a_crash_loses_nothing() {
    // One that begins each of the steps that recovery looks at.
    const SOME: [&str; 4] = [
        "fault on an untouched region",
        "break a region touched once",
        "break a torn region",
        "give up what was just allocated",
    ];
    let some: Vec<(&str, Op)> = OPS.iter().filter(|op| SOME.contains(&op.0)).copied().collect();
    // After one call is before the next.
    let crashes = each(&some, |every| every.dies_twice(&[(false, false), (true, true)]));
    println!("{crashes} crashes in recovery");
    assert!(crashes > 300, "{crashes}");
}

/// The same with errors that come and go: nothing is lost, no restart needed.
#[test]
fn a_failure_at_any_call_of_any_operation_loses_nothing() {
    let failures = each(OPS, |every| every.fails(false));
    println!("{failures} failures");
    assert!(failures >= 50, "{failures}");
}

#[test]
fn a_broken_region_is_made_whole_again_if_nothing_of_it_was_taken() {
    let (mut vm, wrote) = vm();
    let whole = |vm: &mut Vm, region: usize| {
        vm.ram.0.set_can_remap(true);
        let done = vm.memory.collapse(region);
        vm.ram.0.set_can_remap(false);
        vm.check();
        done
    };
    // It is large already; the VMM must map it anew.
    assert_eq!(whole(&mut vm, 1), Ok(false));
    vm.break_large(4).unwrap();
    assert_eq!(vm.memory.can_collapse(1), Some(vec![]));
    assert_eq!(vm.memory.collapse(1), Ok(false));
    let before = vm.memory.charged();
    assert_eq!(whole(&mut vm, 1), Ok(true));
    assert!((4..8).all(|p| vm.memory.regions().is_large(Ppn(p)) && vm.state(p) == State::Resident));
    assert_eq!((vm.memory.charged(), vm.memory.regions().counts().collapses), (before, 1));
    assert_eq!(
        evict(&vm.memory, Ppn(5), 0),
        Err(NotEvicted::NotEligible),
        "as a whole or not at all"
    );

    // A page of four at home: most of it was zeros.
    vm.break_large(0).unwrap();
    assert_eq!(vm.memory.can_collapse(0), None);
    for p in [0, 3] {
        vm.access(p, Some(wrote[p as usize]));
    }
    assert_eq!((vm.state(2), vm.memory.charged()), (State::Untouched, before - Pages(1)));
    // Not while memory is short: the kernel has both for a while.
    vm.host.set_plenty(Pages(90));
    assert_eq!(whole(&mut vm, 0), Ok(false));
    vm.host.set_plenty(Pages(40));
    // Nor where its VM may not have what it lacks.
    vm.memory.set_target(before - Pages(1));
    assert_eq!(whole(&mut vm, 0), Ok(false));
    vm.memory.set_target(before);
    assert_eq!(whole(&mut vm, 0), Ok(true));
    assert_eq!((vm.state(2), vm.memory.charged()), (State::Resident, before));

    // What was given up, sampled or swapped keeps a region small.
    vm.break_large(8).unwrap();
    assert_eq!(vm.memory.can_collapse(2), None);
    vm.break_large(4).unwrap();
    vm.evict(5).unwrap();
    assert_eq!(vm.memory.can_collapse(1), None);
    finish(&mut vm, &expected("", &wrote), "whole again");
}

#[test]
fn a_region_of_which_the_guest_has_touched_no_more_than_half_stays_small() {
    let mut vm = Vm::with_large(16, 100, 8, 40);
    vm.access(0, Some(1));
    vm.break_large(0).unwrap();
    for p in 1..4 {
        vm.access(p, Some(1 + p));
    }
    assert_eq!(vm.memory.charged(), Pages(4));
    assert_eq!(vm.memory.can_collapse(0), None);
    vm.access(4, Some(5));
    assert_eq!(vm.memory.can_collapse(0), Some(vec![]));
}

#[test]
fn what_is_away_keeps_a_region_small_and_what_is_under_sample_does_not() {
    let (mut vm, _) = vm();
    vm.break_large(4).unwrap();
    vm.evict(5).unwrap();
    // Only a VMM that can map its RAM anew has anything of it.
    assert_eq!(vm.memory.away_in(1), []);
    vm.ram.0.set_can_remap(true);
    assert_eq!(vm.memory.away_in(1), [Ppn(5)]);
    // What its VM may not have would be taken again.
    let (target, charged) = (vm.memory.target(), vm.memory.charged());
    vm.memory.set_target(charged);
    assert_eq!(vm.memory.away_in(1), []);
    vm.memory.set_target(charged + Pages(1));
    assert_eq!(vm.memory.away_in(1), [Ppn(5)]);
    vm.memory.set_target(target);
    assert!(vm.memory.sample(Ppn(6)).unwrap());
    assert_eq!(vm.state(6), State::Held);
    assert_eq!(vm.memory.away_in(1), [Ppn(5)], "it comes home by itself");
    assert!(vm.memory.sample(Ppn(7)).unwrap());
    assert_eq!(vm.memory.away_in(1), [Ppn(5)], "as does another one");
    // As many away as at home, as the one under sample is: not worth it.
    vm.evict(4).unwrap();
    assert_eq!(vm.memory.away_in(1), []);
    // Of a region that is large, and of one that nobody touched, nothing is away.
    assert_eq!((vm.memory.away_in(0), vm.memory.away_in(3)), (vec![], vec![]));
    // An untouched page under sample is none that is away.
    vm.break_large(0).unwrap();
    vm.access(0, Some(1));
    vm.access(2, Some(3));
    assert!(vm.memory.sample(Ppn(3)).unwrap());
    vm.evict(2).unwrap();
    assert_eq!(vm.memory.away_in(0), [Ppn(2)]);
    // What was given up does not come, and keeps its region small.
    vm.break_large(8).unwrap();
    vm.access(8, Some(9));
    assert_eq!(vm.state(10), State::Ballooned);
    assert_eq!(vm.memory.away_in(2), []);
}

/// Of eight: more than half at home or away, most of those at home, and memory for all that is not at home.
#[test]
fn pages_come_home_for_a_large_one_where_that_is_worth_it() {
    const REGION: u64 = 8;
    let mut vm = Vm::with_large(2 * REGION, 100, REGION, 40);
    vm.ram.0.set_can_remap(true);
    vm.access(0, Some(1));
    vm.break_large(0).unwrap();
    for p in 1..4 {
        vm.access(p, Some(1 + p));
    }
    vm.evict(3).unwrap();
    assert_eq!(vm.memory.away_in(0), [], "half of it is known");
    vm.access(4, Some(5));
    assert_eq!(vm.memory.away_in(0), [Ppn(3)]);
    // Four at home: the large page takes four more.
    let charged = vm.memory.charged();
    for (more, away) in [(3, vec![]), (4, vec![Ppn(3)])] {
        vm.memory.set_target(charged + Pages(more));
        assert_eq!(vm.memory.away_in(0), away, "{more} more may be had");
    }
    vm.memory.set_target(Pages(2 * REGION));
    assert_eq!(vm.access(3, None), 4);
    let charged = vm.memory.charged();
    for (more, whole) in [(2, false), (3, true)] {
        vm.memory.set_target(charged + Pages(more));
        assert_eq!(vm.memory.collapse(0), Ok(whole), "{more} more may be had");
    }
    vm.check();
}

#[test]
fn a_fault_brings_a_whole_region_only_while_memory_is_plentiful() {
    let mut vm = Vm::with_large(16, 13, REGION, 4);
    assert_eq!(vm.access(1, None), 0);
    assert_eq!((vm.memory.charged(), vm.memory.regions().whole()), (Pages(4), Pages(4)));
    // A guest that goes on there meets no fault.
    let faults = vm.memory.counters.values().faults;
    for p in 0..4 {
        vm.access(p, Some(p));
    }
    assert_eq!(vm.memory.counters.values().faults, faults);
    vm.access(4, Some(4));
    assert_eq!((vm.memory.charged(), vm.host.ledger.free()), (Pages(8), Pages(5)));
    // One more would leave less than what is to remain free.
    vm.access(8, Some(8));
    assert_eq!((vm.memory.charged(), vm.memory.regions().whole()), (Pages(9), Pages(8)));
    vm.host.set_low(true);
    vm.memory.set_target(Pages(16));
    vm.access(12, Some(12));
    assert_eq!((vm.memory.charged(), vm.memory.regions().counts().fills), (Pages(10), 2));
    vm.check();
}

#[test]
fn breaking_gives_back_what_was_never_touched() {
    let (mut vm, _) = vm();
    assert_eq!(vm.break_large(2), Ok(Broke::Done { freed: 3 }));
    assert_eq!(vm.memory.charged(), Pages(9));
    assert_eq!(vm.break_large(2), Ok(Broke::Small));
    assert_eq!(vm.break_large(5), Ok(Broke::Done { freed: 0 }));
    assert_eq!(vm.break_large(17), Ok(Broke::Small));
    // Torn: page 8 was never written, 10 is given up.
    assert_eq!(vm.break_large(10), Ok(Broke::Done { freed: 1 }));
    let counts = vm.memory.regions().counts();
    assert_eq!((counts.fills, counts.breaks, counts.dropped), (3, 3, 4));
    assert_eq!(vm.memory.regions().whole(), Pages(0));
    vm.check();
}

#[test]
fn a_region_with_a_page_in_transition_is_not_broken() {
    let (mut vm, wrote) = vm();
    // Holds for a page less than the region has.
    let taken: Vec<u64> = std::iter::from_fn(|| vm.memory.stage().take_hold()).skip(3).collect();
    assert!(!taken.is_empty());
    assert_eq!(vm.break_large(5), Ok(Broke::Busy));
    assert!(vm.memory.regions().is_large(Ppn(5)));
    for (p, &token) in wrote.iter().enumerate() {
        assert_eq!(vm.access(p as u64, None), token, "ppn {p}");
    }
}

#[test]
fn a_page_of_a_large_one_leaves_only_after_it_was_broken() {
    let (vm, _) = vm();
    assert_eq!(evict(&vm.memory, Ppn(5), 0), Err(NotEvicted::NotEligible));
    assert_eq!(vm.memory.sample(Ppn(5)), Ok(false));
    assert_eq!(vm.state(5), State::Resident);
    vm.check();
}

/// What the guest gives up of a large page is booked later where the kernel cannot tell what is left of it just now.
#[test]
fn a_part_of_a_large_page_whose_discard_has_to_wait_is_discarded_again() {
    let (vm, _) = vm();
    let other = MemError::Os { op: "test", ppn: Ppn(0), source: ballast_pager::backend::Errno(5) };
    vm.ram.0.vmm_punch(5, 2);
    for (error, told) in [(MemError::Again, Ok(())), (other.clone(), Err(other))] {
        vm.ram.0.fail_at(0, error);
        let (left, result) = vm.memory.discard(Ppn(4), 4, vm.memory.mark());
        assert_eq!((left.busy, result), (vec![(Ppn(4), 4)], told));
        assert!((4..8).all(|p| vm.state(p) == State::Resident));
    }
    let discarded = || vm.memory.counters.values().discarded;
    let before = discarded();
    let (left, result) = vm.memory.discard(Ppn(4), 4, vm.memory.mark());
    assert_eq!(discarded() - before, 2);
    assert_eq!((left.busy, left.present, result), (vec![], vec![(Ppn(4), 1), (Ppn(7), 1)], Ok(())));
    assert!((5..7).all(|p| vm.state(p) == State::Ballooned));
    // Neighbours are one range.
    let (left, _) = vm.memory.discard(Ppn(0), 4, vm.memory.mark());
    assert_eq!(left.present, [(Ppn(0), 4)]);
    vm.check();
}

/// A discard that was read before the region was broken says nothing of what has come into it since.
#[test]
fn what_leaves_a_large_page_is_not_given_up_by_what_was_said_before() {
    for (before, state, charged) in [(true, State::Held, 12), (false, State::Ballooned, 11)] {
        let (mut vm, _) = vm();
        let early = vm.memory.mark();
        // Protected, four pages read, punched; the first of them does not come back.
        vm.ram.0.fail_at(6, MemError::Again);
        assert_eq!(vm.memory.break_large(Ppn(4)), Ok(Broke::Done { freed: 0 }));
        assert_eq!(vm.state(4), State::Held);
        let mark = if before { early } else { vm.memory.mark() };
        vm.memory.discard(Ppn(4), 1, mark).1.unwrap();
        assert_eq!((vm.state(4), vm.memory.charged()), (state, Pages(charged)));
        assert_eq!(vm.access(4, None), if before { 14 } else { 0 });
        vm.check();
    }
}

/// What does not come back at once is not forgotten.
#[test]
fn a_page_of_a_broken_region_that_could_not_come_back_comes_later() {
    let (vm, _) = vm();
    for tries in 1..4 {
        vm.ram.0.fail_at(6, MemError::Again);
        (0..tries).for_each(|n| vm.ram.0.fail_also_at(10 + n, MemError::Again));
        vm.memory.break_large(Ppn(4)).unwrap();
        while vm.memory.regions().is_any_away() {
            vm.memory.bring_back().unwrap();
        }
        assert!((4..8).all(|p| vm.state(p) == State::Resident), "{tries}");
        vm.ram.0.set_can_remap(true);
        assert_eq!(vm.memory.collapse(1), Ok(true));
        vm.ram.0.set_can_remap(false);
    }
    vm.check();
}

/// One that is under sample meanwhile stays where it is, and is seen to be touched.
#[test]
fn a_page_of_a_broken_region_that_is_sampled_stays_away_until_it_is_touched() {
    let (mut vm, _) = vm();
    vm.ram.0.fail_at(6, MemError::Again);
    vm.memory.break_large(Ppn(4)).unwrap();
    assert!(vm.memory.regions().is_any_away());
    assert!(vm.memory.sample(Ppn(4)).unwrap());
    assert_eq!((vm.memory.bring_back(), vm.state(4)), (Ok(0), State::Held));
    assert!(!vm.memory.regions().is_any_away());
    let touched = vm.memory.counters.values().touched;
    assert_eq!(vm.access(4, None), 14);
    assert_eq!(vm.memory.counters.values().touched, touched + 1);
    vm.check();
}

/// Of what the guest gives up beyond a region, what was allocated with it and never seen goes, too.
#[test]
fn what_was_allocated_unseen_goes_with_what_is_given_up_before_it() {
    let (mut vm, _) = vm();
    for p in [0, 4, 8] {
        vm.break_large(p).unwrap();
    }
    missing(&mut vm, 14).unwrap();
    assert!(vm.memory.regions().is_large(Ppn(12)));
    // Announced, and not punched: what was touched stays.
    vm.ram.0.announce(11, 5);
    vm.pump().unwrap();
    for p in 11..16 {
        let state = if p == 11 { State::Resident } else { State::Ballooned };
        assert_eq!((vm.state(p), vm.ram.0.is_part_of_large(p)), (state, false), "ppn {p}");
    }
    assert_eq!(vm.memory.charged().0, vm.ram.0.present());
    vm.check();
}

/// A balloon of small pages gives a region up piece by piece.
#[test]
fn a_region_that_is_given_up_page_by_page_is_no_large_page() {
    let (mut vm, _) = vm();
    for p in [5, 7, 4] {
        gone(&mut vm, p, 1).unwrap();
        assert!(vm.memory.regions().is_large(Ppn(4)), "a part of it is there");
    }
    gone(&mut vm, 6, 1).unwrap();
    assert!(!vm.memory.regions().is_large(Ppn(4)));
    assert_eq!(vm.memory.regions().whole(), Pages(4));
    vm.check();
    // It can be one again.
    vm.access(6, Some(1));
    assert_eq!(vm.memory.regions().whole(), Pages(8));
    vm.check();
}

/// What the VMM wrote into the file past the guest is kept, and the rest of its region is not charged for.
#[test]
fn a_region_with_a_page_that_nobody_knew_of_is_filled_page_by_page() {
    let (mut vm, _) = vm();
    vm.break_large(0).unwrap();
    assert!(vm.memory.sample(Ppn(1)).unwrap());
    let charged = vm.memory.charged();
    vm.ram.0.vmm_write(13, 77);
    missing(&mut vm, 13).unwrap();
    let states = [12, 13, 14, 15].map(|p| vm.state(p));
    use State::{Resident, Untouched};
    assert_eq!(states, [Untouched, Resident, Untouched, Untouched]);
    assert_eq!(vm.memory.charged(), charged + Pages(1));
    assert_eq!(vm.access(13, None), 77);
    vm.check();
}

/// Protected and then given up as a whole, a region is small, for the next manager as well; filled again, it meets no fault.
#[test]
fn a_protected_region_that_was_given_up_and_comes_back_meets_no_faults() {
    let (mut vm, _) = vm();
    Backend::protect_run(&vm.ram, Ppn(4), 4).unwrap();
    gone(&mut vm, 4, 4).unwrap();
    let regions = |vm: &Vm, whole: u64| {
        let regions = vm.memory.regions();
        assert_eq!(regions.whole(), Pages(whole));
        assert!(regions.is_large(Ppn(0)) && regions.is_large(Ppn(8)));
        assert_eq!(regions.is_large(Ppn(4)), whole == 8);
    };
    regions(&vm, 4);
    vm.take_over().unwrap();
    regions(&vm, 4);
    vm.access(6, Some(7));
    regions(&vm, 8);
    let faults = vm.memory.counters.values().faults;
    for p in 4..8 {
        vm.access(p, Some(p));
    }
    assert_eq!(vm.memory.counters.values().faults, faults);
    vm.check();
}

/// A sample of any size leaves what it takes to break a large page.
#[test]
fn a_sample_leaves_holds_for_a_large_page() {
    let (mut vm, _) = vm();
    vm.break_large(0).unwrap();
    for p in 0..4 {
        vm.access(p, Some(p));
    }
    let sampled = (0..4).filter(|&p| vm.memory.sample(Ppn(p)).unwrap()).count();
    assert_eq!(sampled as u64, support::vm::LAYOUT.holds);
    assert_eq!(vm.break_large(4), Ok(Broke::Done { freed: 0 }));
    vm.check();
}

/// Some of its pages are there, and may have been written: they are booked, and the others not.
#[test]
fn what_the_kernel_had_of_a_large_page_is_booked_page_by_page() {
    for (has, states, charged) in [
        (1, [State::Resident, State::Untouched, State::Resident, State::Untouched], 2),
        (0, [State::Untouched, State::Untouched, State::Resident, State::Untouched], 1),
    ] {
        let (mut vm, _) = vm();
        let before = vm.memory.charged();
        vm.ram.0.set_short_of(has);
        missing(&mut vm, 14).unwrap();
        assert_eq!([12, 13, 14, 15].map(|p| vm.state(p)), states, "{has}");
        assert_eq!(vm.memory.charged(), before + Pages(charged), "{has}");
        assert_eq!(
            vm.memory.regions().is_large(Ppn(12)),
            has > 0,
            "freed as a whole, if it is one"
        );
        vm.check();
        for p in 12..16 {
            vm.access(p, Some(p));
            assert_eq!(vm.access(p, None), p);
        }
        vm.check();
    }
}

#[test]
fn the_check_finds_a_page_that_is_away_from_a_large_one() {
    let (vm, _) = vm();
    vm.memory.check().unwrap();
    let before = vm.memory.pmap().load(Ppn(5));
    vm.memory.pmap().store(Ppn(5), Word::with_slot(State::Filled, 7));
    let error = vm.memory.check().unwrap_err();
    assert!(error.contains("in a region that was not broken"), "{error}");
    vm.memory.pmap().store(Ppn(5), before);
    vm.memory.check().unwrap();
}
