//! Neighbours that come home with a page that was wanted, on a double: which do, which do not, and that
//! those that do not are as they were.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::memory::Access;
use ballast_pager::service::serve::{Notice, Task};
use ballast_pager::word::{State, Word};
use ballast_units::{Pages, Ppn};
use support::vm::{LARGE, Vm};

const PAGES: u64 = 40;

/// Pages with contents by number, those of `away` out of their homes: some in the tier, some as a number,
/// some in the swap file.
fn vm(away: impl IntoIterator<Item = u64>) -> Vm {
    let mut vm = Vm::new(PAGES, 200, PAGES, 1);
    for p in 0..PAGES {
        vm.access(p, Some(token(p)));
    }
    for p in away {
        if p % 4 == 3 {
            vm.evict(p).unwrap();
            vm.write_cluster();
        } else {
            vm.compress(p).unwrap();
        }
    }
    vm.check();
    vm
}

fn token(p: u64) -> u64 {
    if p % 4 == 1 { 100 + p } else { LARGE + p }
}

fn home(vm: &Vm, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
    pages.into_iter().filter(|&p| vm.state(p) == State::Resident).collect()
}

fn read(vm: &mut Vm, p: u64) {
    assert_eq!(vm.access(p, None), token(p), "ppn {p}");
    vm.check();
}

fn brought(vm: &Vm) -> u64 {
    vm.memory.counters.values().brought
}

#[test]
fn a_walk_takes_more_and_more_with_it_whatever_state_they_are_in() {
    for down in [false, true] {
        let mut vm = vm(0..PAGES);
        let faults = vm.memory.counters.values().faults;
        for p in 0..PAGES {
            read(&mut vm, if down { PAGES - 1 - p } else { p });
        }
        let c = vm.memory.counters.values();
        assert!(c.faults - faults < PAGES / 4, "{} faults", c.faults - faults);
        assert_eq!(c.brought + c.faults - faults, PAGES);
        vm.memory.check_quiet().unwrap();
    }
}

/// A cluster that is being filled, or written.
#[test]
fn what_is_on_its_way_to_swap_comes_home_from_there() {
    let mut vm = vm(0..4);
    for p in 4..7 {
        vm.evict(p).unwrap();
        assert_eq!(vm.state(p), State::Staged);
    }
    (0..4).for_each(|p| read(&mut vm, p));
    assert!((4..7).any(|p| vm.state(p) == State::Resident), "{:?}", vm.words());
    (4..7).for_each(|p| read(&mut vm, p));
}

#[test]
fn pages_between_that_are_home_are_passed_over() {
    let mut vm = vm((0..PAGES).step_by(3));
    (0..PAGES).for_each(|p| read(&mut vm, p));
    assert!(brought(&vm) > PAGES / 6, "{}", brought(&vm));
}

#[test]
fn nobody_comes_while_memory_is_short() {
    let mut vm = vm(0..PAGES);
    vm.host.set_low(true);
    (0..10).for_each(|p| read(&mut vm, p));
    assert_eq!(brought(&vm), 0);
    vm.host.set_low(false);
    // Half of it must be left.
    let free = vm.host.ledger.free();
    vm.host.set_plenty(Pages(2 * free.0));
    (10..20).for_each(|p| read(&mut vm, p));
    assert_eq!(brought(&vm), 0);
    vm.host.set_plenty(Pages(free.0));
    (20..PAGES).for_each(|p| read(&mut vm, p));
    assert!(brought(&vm) > 0);
}

#[test]
fn a_sampled_page_is_left_to_be_touched() {
    let mut vm = vm(0..PAGES);
    assert!(vm.memory.sample(Ppn(10)).unwrap());
    (0..10).for_each(|p| read(&mut vm, p));
    assert!(brought(&vm) > 0 && vm.state(10) != State::Resident);
    assert_eq!(vm.memory.counters.values().touched, 0);
    read(&mut vm, 10);
    assert_eq!(vm.memory.counters.values().touched, 1);
}

/// Whose time says how long the service takes, and not the disk, or memory that is short.
#[test]
fn only_faults_that_are_served_at_once_are_told_as_served() {
    let mut vm = vm(1..PAGES);
    let mut tasks = Vec::new();
    let mut served = |ppn| {
        let (mark, notice) = (vm.memory.mark(), Notice::Fault(Ppn(ppn), Access::Missing));
        vm.serve.take(&vm.memory, &[notice, notice], mark, &mut tasks, |_, _| false)
    };
    assert_eq!(served(0), 2, "at home");
    assert_eq!(served(2), 2, "compressed, and at home");
    assert_eq!(served(3), 0, "a read is begun, and is under way");
    assert!(matches!(tasks[..], [Task::Came(Ppn(2)), Task::Read(Ppn(3), _)]), "{tasks:?}");
}

#[test]
fn a_slot_of_another_page_is_not_fed_to_who_faults_or_its_neighbours() {
    let mut vm = vm(0..PAGES);
    let words = [Ppn(0), Ppn(2)].map(|ppn| vm.memory.pmap().load(ppn));
    assert!(words.iter().all(|word| word.state() == State::Compressed));
    let name = |vm: &Vm, words: [Word; 2]| {
        vm.memory.pmap().store(Ppn(0), words[0]);
        vm.memory.pmap().store(Ppn(2), words[1]);
    };
    name(&vm, [words[1], words[0]]);
    vm.fault(0, Access::Missing).unwrap();
    assert_eq!(vm.troubles.len(), 1);
    vm.fault(1, Access::Missing).unwrap();
    assert_eq!(home(&vm, 0..4), [1, 3], "between them: those are left for their own faults");
    vm.fault(2, Access::Missing).unwrap();
    assert!(vm.troubles.len() == 2 && vm.troubles.iter().all(|t| t.contains("damaged")));
    name(&vm, words);
    (0..PAGES).for_each(|p| read(&mut vm, p));
}

/// Given up while it was being read: its discard can be booked only now, and is yet to be.
#[test]
fn a_page_whose_discard_waits_is_left_alone() {
    let mut vm = vm(0..PAGES);
    let mut tasks = Vec::new();
    vm.ram.0.park(3, Access::Missing);
    vm.serve.fault(&vm.memory, Ppn(3), Access::Missing, &mut tasks);
    let Some(Task::Read(Ppn(3), stored)) = tasks.pop() else { panic!("{tasks:?}") };
    let mark = vm.memory.mark();
    vm.ram.0.announce(3, 1);
    vm.serve.take(&vm.memory, &vm.ram.0.read_events(), mark, &mut tasks, |_, _| false);
    let bytes = vm.swap[&stored.slot.0].clone();
    vm.serve.arrived(&vm.memory, Ppn(3), Some(&bytes), &mut tasks);
    assert!(vm.serve.pending().discard_outstanding(Ppn(3)));
    vm.fault(2, Access::Missing).unwrap();
    assert_eq!(home(&vm, 0..PAGES), [2], "it, and those behind it");
    vm.serve.retry(&vm.memory, &mut tasks);
    assert_eq!((vm.access(3, None), vm.ram.0.waiting()), (0, 0));
    vm.check();
}

#[test]
fn what_was_written_past_the_pager_stays() {
    let mut vm = vm(0..PAGES);
    read(&mut vm, 0);
    vm.ram.0.vmm_write(5, 77);
    for p in (1..PAGES).filter(|&p| p != 5) {
        assert_eq!(vm.access(p, None), token(p), "ppn {p}");
    }
    assert_eq!((vm.access(5, None), vm.state(5)), (77, State::Resident));
    vm.check();
}
