//! Faults that cannot be served at once, on a double: who waits, for what, and what is said of it.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::{Duration, Instant};

use ballast_pager::backend::{Backend as _, MemError};
use ballast_pager::memory::{Access, Wait};
use ballast_pager::service::serve::{Landed, Notice, Task};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use support::page_of;
use support::site::Site;
use support::vm::Vm;

#[test]
fn while_the_host_is_low_a_vm_waits_above_its_target_and_not_at_it() {
    let mut vm = Vm::new(8, 100, 8, 1);
    for p in 0..4 {
        vm.access(p, Some(10 + p));
    }
    vm.host.set_low(true);
    let mut waits = |target, ppn| {
        vm.memory.set_target(Pages(target));
        vm.fault(ppn, Access::Missing).unwrap();
        vm.serve.pending().fault(Ppn(ppn)).map(|fault| fault.why)
    };
    // It has four.
    assert_eq!(waits(3, 4), Some(Wait::Blocked));
    assert_eq!(waits(4, 4), None);
    assert_eq!(waits(4, 5), Some(Wait::Blocked), "it has five now");
    vm.evict(0).unwrap();
    vm.write_cluster();
    vm.pump().unwrap();
    assert_eq!((vm.state(5), vm.serve.is_quiet()), (State::Resident, true));
    vm.check();
}

#[test]
fn pages_that_come_one_by_one_are_had_by_whoever_waits_longest() {
    let mut vm = Vm::new(16, 100, 16, 1);
    for p in 0..4 {
        vm.access(p, Some(10 + p));
    }
    vm.host.set_low(true);
    vm.memory.set_target(Pages(3));
    vm.ram.0.park(12, Access::Missing);
    vm.pump().unwrap();
    assert_eq!(vm.serve.pending().starved(), Some(Wait::Blocked));
    // Others come in before it, and touch what lies before it, each time that a page may be had.
    for p in 5..8 {
        vm.ram.0.park(p, Access::Missing);
        vm.pump().unwrap();
    }
    assert_eq!(vm.serve.pending().oldest_first(), [12, 5, 6, 7].map(Ppn));
    let has = |vm: &Vm| [12, 5, 6, 7, 4].map(|p| vm.state(p) == State::Resident);
    vm.memory.set_target(Pages(4));
    // One that is met only now is behind all of them.
    vm.ram.0.park(4, Access::Missing);
    vm.pump().unwrap();
    assert_eq!(has(&vm), [true, false, false, false, false]);
    vm.memory.set_target(Pages(6));
    vm.pump().unwrap();
    assert_eq!(has(&vm), [true, true, true, false, false]);
    // What needs no memory waits for nobody.
    vm.ram.protect(Ppn(0)).unwrap();
    vm.ram.0.park(0, Access::Protected);
    vm.pump().unwrap();
    assert!(!vm.ram.0.is_protected(0));
    assert_eq!(vm.serve.pending().waiting(), [Ppn(4), Ppn(7)]);
    vm.host.set_low(false);
    vm.pump().unwrap();
    assert_eq!((has(&vm), vm.serve.is_quiet()), ([true; 5], true));
    vm.check();
}

#[test]
fn who_waits_for_a_page_that_is_given_up_meanwhile_gets_none_unless_he_asks_again() {
    let mut vm = Vm::new(8, 10, 8, 1);
    vm.access(0, Some(10));
    vm.access(1, Some(11));
    // No memory is left.
    vm.host.ledger.set_budget(Pages(1));
    for ppn in [2, 3] {
        vm.ram.0.park(ppn, Access::Missing);
    }
    vm.pump().unwrap();
    assert_eq!((vm.serve.pending().waiting(), vm.ram.0.waiting()), (vec![Ppn(2), Ppn(3)], 2));
    vm.ram.0.announce(2, 1);
    vm.pump().unwrap();
    assert_eq!((vm.serve.pending().waiting(), vm.ram.0.waiting()), (vec![Ppn(3)], 1));
    vm.host.ledger.set_budget(Pages(100));
    vm.pump().unwrap();
    assert_eq!((vm.ram.0.is_present(2), vm.ram.0.is_present(3)), (false, true));
    assert_eq!(vm.access(2, Some(5)), 5);

    // One whose page was at home against expectation is kept, and so is one that cannot be woken.
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(4, Access::Missing).unwrap();
    assert_eq!(vm.serve.pending().fault(Ppn(4)).map(|f| f.why), Some(Wait::Kernel));
    vm.ram.protect(Ppn(0)).unwrap();
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(0, Access::Protected).unwrap();
    assert_eq!(vm.serve.pending().waiting(), [Ppn(0), Ppn(4)]);
    let mark = vm.memory.mark();
    let discard = Notice::Discard(Ppn(0), 8);
    vm.ram.0.vmm_punch(1, 1);
    vm.serve.take(&vm.memory, &[discard], mark, &mut Vec::new(), |_, _| false);
    assert_eq!(vm.serve.pending().waiting(), [Ppn(0)], "its page is there");
    assert_eq!((vm.state(0), vm.state(1)), (State::Resident, State::Ballooned));
    vm.pump().unwrap();
    assert!(vm.serve.pending().waiting().is_empty() && !vm.ram.0.is_protected(0));
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(5, Access::Missing).unwrap();
    vm.ram.0.fail_at(0, MemError::Gone);
    let discard = Notice::Discard(Ppn(5), 1);
    vm.serve.take(&vm.memory, &[discard], vm.memory.mark(), &mut Vec::new(), |_, _| false);
    assert_eq!(vm.serve.pending().waiting(), [Ppn(5)]);
}

#[test]
fn what_the_kernel_refused_for_something_that_is_given_up_is_tried_apart() {
    let mut vm = Vm::new(8, 100, 8, 1);
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(1, Access::Missing).unwrap();
    vm.ram.0.announce(7, 1);
    vm.fault(2, Access::Missing).unwrap();
    let whys = |vm: &Vm| -> Vec<Wait> {
        let pending = vm.serve.pending();
        pending.waiting().into_iter().filter_map(|p| Some(pending.fault(p)?.why)).collect()
    };
    assert_eq!(whys(&vm), [Wait::Kernel, Wait::Discard]);
    let mut tasks = Vec::new();
    vm.serve.retry_refused(&vm.memory, &mut tasks);
    assert_eq!(whys(&vm), [Wait::Kernel, Wait::Discard], "nobody has read it");
    assert_eq!(vm.ram.0.read_events(), [Notice::Discard(Ppn(7), 1)]);
    vm.serve.retry_refused(&vm.memory, &mut tasks);
    assert_eq!((whys(&vm), tasks), (vec![Wait::Kernel], Vec::new()));
    assert_eq!((vm.state(1), vm.state(2)), (State::Untouched, State::Resident));
}

#[test]
fn what_waits_for_anything_but_memory_is_told_with_what_it_waits_for() {
    let mut vm = Vm::new(8, 100, 8, 1);
    vm.access(0, Some(10));
    vm.evict(0).unwrap();
    vm.write_cluster();
    assert_eq!(vm.state(0), State::Swapped);
    let begun = Instant::now();
    let overdue = |vm: &Vm, before| vm.serve.overdue(before).map(|o| (o.page.0, o.why, o.pages));
    assert_eq!(overdue(&vm, begun), None);

    // The kernel has no memory for a page.
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(1, Access::Missing).unwrap();
    assert_eq!(overdue(&vm, begun), None, "not for so long");
    assert_eq!(overdue(&vm, Instant::now()), Some((1, Some(Wait::Kernel), 1)));
    // A page on its way from swap, which cannot be put in place then.
    let mut tasks = Vec::new();
    vm.serve.fault(&vm.memory, Ppn(0), Access::Missing, &mut tasks);
    assert!(matches!(tasks[..], [Task::Read(Ppn(0), _)]), "{tasks:?}");
    assert_eq!(overdue(&vm, Instant::now()), Some((1, Some(Wait::Kernel), 2)));
    vm.pump().unwrap();
    assert_eq!(overdue(&vm, Instant::now()), Some((0, None, 1)));
    vm.ram.0.fail_at(0, MemError::NoMemory);
    let bytes = page_of(10);
    let arrives = |vm: &mut Vm| vm.serve.arrived(&vm.memory, Ppn(0), Some(&bytes), &mut Vec::new());
    assert_eq!(arrives(&mut vm), Landed::NotYet(Wait::Kernel));
    assert_eq!(overdue(&vm, Instant::now()), Some((0, Some(Wait::Kernel), 1)));
    assert_eq!(arrives(&mut vm), Landed::Done);
    assert_eq!(overdue(&vm, Instant::now()), None);

    // Memory is waited for as long as it takes; what is waited for after that begins then.
    vm.host.ledger.set_budget(Pages(2));
    vm.fault(2, Access::Missing).unwrap();
    assert_eq!(vm.serve.pending().fault(Ppn(2)).map(|f| f.why), Some(Wait::Memory));
    assert_eq!(overdue(&vm, Instant::now()), None);
    let before = Instant::now();
    vm.host.ledger.set_budget(Pages(100));
    vm.ram.0.fail_at(0, MemError::NoMemory);
    vm.fault(2, Access::Missing).unwrap();
    assert_eq!(overdue(&vm, before), None, "since then");
    assert_eq!(overdue(&vm, Instant::now()), Some((2, Some(Wait::Kernel), 1)));
}

/// Its share thread may hang in the shim of another VM.
#[test]
fn who_reads_what_he_never_wrote_gets_a_page_of_his_own_where_none_of_zeros_is_mapped() {
    let mut vm = Vm::at(&Site::new(20, 1), 4, 16, 1);
    vm.ram.0.park(3, Access::Reading);
    vm.pump().unwrap();
    assert_eq!(vm.serve.pending().fault(Ppn(3)).map(|f| f.why), Some(Wait::Zeros));
    std::thread::sleep(Duration::from_millis(25));
    vm.pump().unwrap();
    assert_eq!((vm.state(3), vm.ram.0.waiting()), (State::Resident, 0));
    vm.memory.check_quiet().unwrap();
}

/// A VMM may say what it gives up before it does so.
#[test]
fn what_is_punched_after_it_was_announced_is_booked_soon_also_where_the_first_look_fails() {
    for fails in [None, Some(MemError::NoMemory)] {
        let mut vm = Vm::new(8, 100, 8, 1);
        (0..4).for_each(|p| _ = vm.access(p, Some(10 + p)));
        vm.ram.0.announce(0, 4);
        vm.pump().unwrap();
        assert_eq!((vm.memory.charged(), vm.serve.is_quiet()), (Pages(4), false));
        vm.ram.0.vmm_punch(0, 4);
        if let Some(error) = fails.clone() {
            std::thread::sleep(Duration::from_millis(5));
            vm.ram.0.fail_at(0, error);
            vm.pump().unwrap();
            assert_eq!((vm.ram.0.has_failed(), vm.troubles.len()), (true, 1));
            assert_eq!(vm.memory.charged(), Pages(4));
        }
        std::thread::sleep(Duration::from_millis(5));
        vm.pump().unwrap();
        assert!((0..4).all(|p| vm.state(p) == State::Ballooned), "{fails:?}");
        assert_eq!((vm.memory.charged(), vm.serve.is_quiet()), (Pages::ZERO, true), "{fails:?}");
    }
}
