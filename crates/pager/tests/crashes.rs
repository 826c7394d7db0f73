//! The manager dies at every call of every operation, before and after the call took effect, and
//! its successor dies at every call of its recovery. Afterwards the guest reads what it wrote.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_compress::{Algorithm, Compressor, Place};
use ballast_pager::backend::{Backend, Errno, MemError};
use ballast_pager::memory::{
    Access, Compressed, Left, NotBack, NotEvicted, RecoverError, Unbooked,
};
use ballast_pager::service::serve::{Landed, Task};
use ballast_pager::swap::{Stored, Sum};
use ballast_pager::word::{Busy, State, Word};
use ballast_units::{Pages, Ppn, SlotId};
use support::every_call::{EveryCall, Op, gone, missing};
use support::vm::{LARGE, Vm};
use support::{CrashAt, page_of};

const PAGES: u64 = 18;

/// Neighbours, and what is in them.
const RUN: [(u64, u64); 4] = [(12, 22), (13, 0), (14, LARGE + 24), (15, 25)];

/// One page in every state, with contents by page number.
fn vm() -> (Vm, Vec<u64>) {
    let mut vm = Vm::new(PAGES, 100, 16, 4);
    for p in 0..4 {
        vm.access(p, Some(10 + p));
    }
    vm.access(7, Some(0));
    // Neighbours at home, one of them of zeros.
    for (p, token) in RUN {
        vm.access(p, Some(token));
    }
    // Compressed, and one number.
    vm.access(10, Some(LARGE + 10));
    vm.access(11, Some(11));
    assert!(matches!(vm.compress(10), Ok(Some(Compressed::Stored { new_frame: true }))));
    assert_eq!(vm.compress(11), Ok(Some(Compressed::Filled)));
    vm.evict(8).unwrap();
    vm.evict(9).unwrap();
    // Swapped, staged, held, resident (0), and a resident page of zeros (7).
    vm.evict(2).unwrap();
    vm.write_cluster();
    vm.evict(1).unwrap();
    assert!(vm.memory.sample(Ppn(3)).unwrap());
    // Fault-around brought 4..7 too: to Untouched, and one given up.
    vm.evict(4).unwrap();
    vm.evict(5).unwrap();
    vm.ram.0.vmm_punch(6, 1);
    vm.ram.0.announce(6, 1);
    vm.pump().unwrap();
    let states = [
        State::Resident,
        State::Staged,
        State::Swapped,
        State::Held,
        State::Untouched,
        State::Untouched,
        State::Ballooned,
        State::Resident,
        State::Untouched,
        State::Untouched,
        State::Compressed,
        State::Filled,
        State::Resident,
        State::Resident,
        State::Resident,
        State::Resident,
        State::Untouched,
        State::Untouched,
    ];
    for (p, state) in states.into_iter().enumerate() {
        assert_eq!(vm.state(p as u64), state, "ppn {p}");
    }
    vm.check();
    let mut wrote = vec![10, 11, 12, 13, 0, 0, 0, 0, 0, 0, LARGE + 10, 11];
    wrote.extend(RUN.map(|(_, token)| token));
    wrote.extend([0, 0]);
    (vm, wrote)
}

fn evicted<T>(result: Result<T, NotEvicted>) -> Result<(), MemError> {
    match result {
        Err(NotEvicted::Failed(e)) => Err(e),
        Err(e) => panic!("{e:?}"),
        Ok(_) => Ok(()),
    }
}

const OPS: &[(&str, Op)] = &[
    ("evict", |vm| evicted(vm.evict(0))),
    ("evict a page of zeros", |vm| evicted(vm.evict(7))),
    ("evict neighbours", |vm| evicted(vm.evict_run(12, 4))),
    ("evict neighbours, the last of which is not at home", |vm| evicted(vm.evict_run(14, 3))),
    ("fault on a page at home", |vm| missing(vm, 0)),
    ("fault on a protected page", |vm| {
        vm.ram.protect(Ppn(0))?;
        vm.ram.0.park(0, Access::Protected);
        vm.pump()
    }),
    ("fault on a page punched unannounced", |vm| {
        vm.ram.0.vmm_punch(7, 1);
        missing(vm, 7)
    }),
    ("fault on a staged page", |vm| missing(vm, 1)),
    ("fault on a swapped page", |vm| missing(vm, 2)),
    ("fault on a held page", |vm| missing(vm, 3)),
    ("fault and its neighbours", |vm| missing(vm, 4)),
    ("fault at the short end", |vm| missing(vm, 17)),
    ("fault on a compressed page", |vm| missing(vm, 10)),
    ("fault on a filled page", |vm| missing(vm, 11)),
    ("compress", |vm| evicted(vm.compress(0))),
    ("write back", |vm| {
        vm.write_back();
        missing(vm, 10)
    }),
    ("fault on a ballooned page", |vm| missing(vm, 6)),
    ("fault and neighbours that are there", |vm| {
        vm.ram.0.vmm_punch(7, 1);
        vm.memory.reconcile(Ppn(7), 1).1?;
        missing(vm, 5)
    }),
    ("discard of everything", |vm| gone(vm, 0, PAGES)),
    ("discard of residents", |vm| gone(vm, 7, 1)),
    // Of pages that the guest uses again: its discard was read, and what it wrote since is there.
    ("a late look at pages that were given up", |vm| vm.memory.reconcile(Ppn(0), PAGES).1),
    ("announced, punched later", |vm| {
        vm.ram.0.announce(0, PAGES);
        vm.pump()
    }),
    ("sample", |vm| vm.memory.sample(Ppn(0)).map(drop)),
    ("unsample", |vm| vm.memory.unsample(Ppn(3)).map(drop)),
    ("written", |vm| {
        vm.write_cluster();
        Ok(())
    }),
    ("swap-in of a page given up", |vm| {
        let fault = vm.memory.fault(Ppn(2), Access::Missing);
        assert!(matches!(fault, ballast_pager::memory::Fault::Read(_)));
        gone(vm, 2, 1)
    }),
];

/// What the guest may find: what it wrote, or zeros where it gave the page up.
fn expected(op: &str, wrote: &[u64]) -> Vec<Vec<u64>> {
    let void: &[u64] = match op {
        "discard of everything" | "announced, punched later" => {
            &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
        }
        "swap-in of a page given up" => &[2],
        _ => &[],
    };
    let may = |(p, &token): (usize, &u64)| {
        if void.contains(&(p as u64)) { vec![token, 0] } else { vec![token] }
    };
    wrote.iter().enumerate().map(may).collect()
}

fn finish(vm: &mut Vm, expected: &[Vec<u64>], what: &str) {
    vm.check();
    assert_eq!(vm.ram.0.waiting(), 0, "{what}: somebody was not woken");
    let again: Vec<_> = vm.cluster.iter().map(|(slot, ppn)| (*slot, *ppn)).collect();
    for (slot, ppn) in again {
        // SAFETY: one thread.
        let bytes = Box::new(*unsafe { vm.memory.stage().page(slot) });
        assert!(expected[ppn.index()].contains(&support::token_of(&bytes)), "{what}: stage");
    }
    vm.write_cluster();
    vm.check();
    vm.memory.check_quiet().unwrap();
    for p in 0..PAGES {
        let seen = vm.access(p, None);
        assert!(expected[p as usize].contains(&seen), "{what}: ppn {p} reads {seen}");
        vm.access(p, Some(LARGE * (p % 2) + 100 + p));
    }
    for p in 0..PAGES {
        vm.compress(p).unwrap();
    }
    for p in 0..PAGES {
        let wrote = LARGE * (p % 2) + 100 + p;
        assert_eq!(vm.access(p, None), wrote, "{what}: ppn {p}, written after");
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
    let idle = |name: &str| ["written", "swap-in of a page given up"].contains(&name);
    let crashes = each(OPS, |every| every.dies(idle(every.name)));
    println!("{crashes} crashes");
    assert!(crashes >= 50, "{crashes}");
}

#[test]
fn a_crash_in_the_recovery_from_a_crash_loses_nothing() {
    let when = [(false, false), (true, false), (false, true), (true, true)];
    let crashes = each(OPS, |every| every.dies_twice(&when));
    println!("{crashes} crashes in recovery");
    assert!(crashes > 300, "{crashes}");
}

/// The same enumeration with errors that come and go: nothing is lost, no restart needed.
#[test]
fn a_failure_at_any_call_of_any_operation_loses_nothing() {
    let failures = each(OPS, |every| {
        // Its read is in nobody's hands here.
        if every.name == "swap-in of a page given up" {
            0
        } else {
            every.fails(every.name == "written")
        }
    });
    println!("{failures} failures");
    assert!(failures >= 50, "{failures}");
}

#[test]
fn neighbours_leave_together_and_those_of_zeros_take_no_slot() {
    let (mut vm, _) = vm();
    let of = |ppn, slot| Left { ppn: Ppn(ppn), slot };
    let left = vm.evict_run(12, 4).unwrap();
    assert_eq!(left, [of(12, Some(0)), of(13, None), of(14, Some(1)), of(15, Some(2))]);
    assert_eq!(vm.state(13), State::Untouched);
    // What is not at home ends the run, and one that is not is none.
    assert_eq!(vm.evict_run(12, 2), Err(NotEvicted::NotEligible));
    for (p, token) in RUN {
        assert_eq!(vm.access(p, None), token);
    }
    vm.check();
}

/// Of neighbours whose pages the kernel did not free together, each that it frees alone leaves.
#[test]
fn neighbours_that_the_kernel_does_not_free_or_read_stay_at_home() {
    let failed = || MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) };
    let (mut vm, wrote) = vm();
    vm.write_cluster();
    let before = vm.memory.charged();
    // All are protected, each is read; then all are freed together (call 5), then one by one.
    vm.ram.0.fail_at(5, failed());
    vm.ram.0.fail_also_at(8, failed());
    let left: Vec<u64> = vm.evict_run(12, 4).unwrap().iter().map(|page| page.ppn.0).collect();
    assert_eq!(left, [12, 13, 15]);
    assert_eq!((vm.state(14), vm.memory.charged().0), (State::Resident, before.0 - 3));
    finish(&mut vm, &expected("", &wrote), "one stays");

    // Or one cannot be read: together (call 3), nor for itself.
    let (mut vm, wrote) = self::vm();
    vm.write_cluster();
    let before = vm.memory.charged();
    vm.ram.0.fail_at(3, failed());
    vm.ram.0.fail_also_at(12, failed());
    let left = vm.evict_run(12, 4).unwrap();
    assert!(vm.ram.0.has_failed());
    let of = |ppn, slot| Left { ppn: Ppn(ppn), slot };
    assert_eq!(left, [of(12, Some(0)), of(13, None), of(15, Some(1))]);
    assert_eq!((vm.state(14), vm.memory.charged().0), (State::Resident, before.0 - 3));
    finish(&mut vm, &expected("", &wrote), "one cannot be read");

    let (mut vm, wrote) = self::vm();
    vm.write_cluster();
    vm.ram.0.fail_at(5, failed());
    for call in [6, 8, 10, 12] {
        // Lifting the protection of each is a call in between.
        vm.ram.0.fail_also_at(call, failed());
    }
    assert_eq!(vm.evict_run(12, 4), Err(NotEvicted::Failed(failed())));
    assert!((12..16).all(|p| vm.state(p) == State::Resident));
    finish(&mut vm, &expected("", &wrote), "all stay");
}

#[test]
fn recovery_reports_what_it_found() {
    let (mut vm, _) = vm();
    vm.ram.0.vmm_punch(7, 1);
    vm.ram.0.crash_at(CrashAt { call: 1, after: false });
    vm.evict(0).unwrap_err();
    let found = vm.take_over().unwrap();
    assert_eq!((found.busy, found.absent), (1, 1));
    assert_eq!(found.staged, [(Ppn(1), 0)]);
    assert_eq!(found.held, [Ppn(3)]);
    assert_eq!(vm.state(7), State::Ballooned);
}

/// Once its discard was read, the guest may have written to a page again: what left home after that is kept. What left
/// before is dropped, and all that it had is free.
#[test]
fn what_is_away_is_dropped_if_it_left_before_its_discard_was_read_and_kept_if_after() {
    type Leave = fn(&mut Vm);
    let leave: [(State, Leave); 5] = [
        (State::Staged, |vm| {
            vm.evict(0).unwrap();
        }),
        (State::Swapped, |vm| {
            vm.evict(0).unwrap();
            vm.write_cluster();
        }),
        (State::Held, |vm| assert!(vm.memory.sample(Ppn(0)).unwrap())),
        (State::Compressed, |vm| {
            vm.compress(0).unwrap();
        }),
        (State::Filled, |vm| {
            vm.compress(0).unwrap();
        }),
    ];
    for (state, leave) in leave {
        let token = if state == State::Compressed { LARGE + 7 } else { 7 };
        for is_read_before in [true, false] {
            let mut vm = Vm::new(4, 20, 16, 1);
            vm.access(0, Some(token));
            let mark = vm.memory.mark();
            leave(&mut vm);
            let mark = if is_read_before { mark } else { vm.memory.mark() };
            assert_eq!(vm.state(0), state);
            let before = vm.memory.charged();
            let (left, result) = vm.memory.discard(Ppn(0), 1, mark);
            assert_eq!((left, result), (Unbooked::default(), Ok(())));
            if is_read_before {
                assert_eq!((vm.state(0), vm.memory.charged()), (state, before));
                assert_eq!(vm.access(0, None), token, "{state:?}");
            } else {
                assert_eq!((vm.state(0), vm.memory.charged()), (State::Ballooned, Pages(0)));
                assert_eq!(vm.access(0, None), 0, "{state:?}");
                // A sample sees that it is touched.
                assert_eq!(vm.memory.counters.values().touched, u64::from(state == State::Held));
            }
            vm.write_cluster();
            vm.check();
            vm.memory.check_quiet().unwrap();
        }
    }
}

/// Its page may have come back, been written and left again between the mark and the reading.
#[test]
fn what_leaves_while_events_are_read_is_none_of_what_was_given_up() {
    let mut vm = Vm::new(4, 20, 16, 1);
    vm.access(0, Some(7));
    let memory = vm.memory.clone();
    let (mark, evicted) = memory.read_marked(|| vm.evict(0));
    evicted.unwrap();
    let (left, result) = memory.discard(Ppn(0), 1, mark);
    assert_eq!((left, result, vm.state(0)), (Unbooked::default(), Ok(()), State::Staged));
    assert_eq!(vm.access(0, None), 7);
}

/// A whole region that nobody touched, as a guest with virtio-mem gives it up, costs no words; of a few pages it is known
/// that they were given up.
#[test]
fn what_nobody_touched_gets_no_words_when_much_of_it_is_given_up() {
    /// Words of so many pages get their memory together; before the first ones is the header.
    const PART: u64 = 1 << 13;
    const FIRST: u64 = PART - 512;
    let mut vm = Vm::new(4 * PART, 10, 0, 1);
    vm.access(0, Some(5));
    let bytes = vm.memory.pmap().bytes();
    let give_up = |first, n| {
        let (left, result) = vm.memory.discard(Ppn(first), n, vm.memory.mark());
        (left.busy, left.present, result, vm.memory.pmap().in_state(State::Ballooned).0)
    };
    // The first part has words; the page that is there will be looked at again.
    assert_eq!(give_up(0, 4 * PART), (vec![], vec![(Ppn(0), 1)], Ok(()), FIRST - 1));
    assert_eq!(give_up(2 * PART, 512), (vec![], vec![], Ok(()), FIRST - 1));
    assert_eq!(vm.memory.pmap().bytes(), bytes);
    assert_eq!(give_up(2 * PART, 511), (vec![], vec![], Ok(()), FIRST - 1 + 511));
    assert!(vm.memory.pmap().bytes() > bytes);
    assert_eq!(vm.access(0, None), 5);
    vm.memory.check().unwrap();
}

/// A word may name what is there, is of the right kind, and no other page's.
#[test]
fn words_that_name_what_is_not_theirs_are_refused() {
    let swapped = |slot| Word::swapped(Stored { slot: SlotId(slot), sum: Sum::NONE });
    let named = Word::with_slot;
    let take_over = |words: &[Word]| {
        let mut vm = Vm::new(PAGES, 100, 16, 1);
        for (p, &word) in words.iter().enumerate() {
            vm.memory.pmap().store(Ppn(p as u64), word);
        }
        let found = vm.take_over();
        if found.is_ok() {
            vm.memory.check().unwrap();
        }
        found.map(drop)
    };
    // Four slots for clusters, two holds.
    for word in [0, 3].map(|slot| named(State::Staged, slot)) {
        take_over(&[word]).unwrap();
    }
    for word in [4, 5].map(|slot| named(State::Held, slot)) {
        take_over(&[word]).unwrap();
    }
    for word in [(State::Staged, 4), (State::Held, 3), (State::Held, 6)] {
        let refused = take_over(&[Word::UNTOUCHED, named(word.0, word.1)]);
        let Err(RecoverError::Stage { ppn: Ppn(1), slot }) = refused else { panic!("{refused:?}") };
        assert_eq!(slot, word.1);
    }
    // Sixteen slots of swap.
    take_over(&[swapped(0), swapped(15)]).unwrap();
    for (words, wrong) in [([swapped(15), swapped(16)], 16), ([swapped(7), swapped(7)], 7)] {
        let refused = take_over(&words);
        let Err(RecoverError::Slot { ppn: Ppn(1), slot }) = refused else { panic!("{refused:?}") };
        assert_eq!(slot.0, wrong);
    }
    // Nobody has put anything into the tier: a word is all that is known of it.
    let (mut vm, _) = vm();
    let place = vm.memory.pmap().load(Ppn(10));
    assert_eq!(place.state(), State::Compressed);
    vm.memory.pmap().store(Ppn(17), place);
    let refused = vm.take_over();
    assert!(matches!(refused, Err(RecoverError::Tier { ppn: Ppn(17), .. })), "{refused:?}");
}

/// What a VMM wrote past the pager is the guest's, charged, and whoever waited goes on.
#[test]
fn a_page_that_is_there_already_ends_the_fault() {
    for ppn in [1, 2, 3, 4, 6] {
        let (mut vm, _) = vm();
        vm.ram.0.park(ppn, Access::Missing);
        vm.ram.0.vmm_write(ppn, 99);
        vm.pump().unwrap();
        assert_eq!(vm.ram.0.waiting(), 0, "ppn {ppn}");
        assert_eq!(vm.access(ppn, None), 99, "ppn {ppn}");
        vm.check();
    }
}

#[test]
fn contents_are_whole_pages() {
    assert_eq!(support::token_of(&page_of(77)), 77);
}

/// A page that the guest gave up while it came from swap: a fault that is met before the discard can be
/// booked waits for it, and is answered with zeros, not with what was given up.
#[test]
fn a_fault_behind_a_discard_waits_for_it() {
    let (mut vm, _) = vm();
    let mut tasks = Vec::new();
    vm.ram.0.park(2, Access::Missing);
    vm.serve.fault(&vm.memory, Ppn(2), Access::Missing, &mut tasks);
    let [Task::Read(Ppn(2), stored)] = tasks[..] else { panic!("{tasks:?}") };
    // Given up now: its discard has to wait until the read is over.
    let mark = vm.memory.mark();
    vm.ram.0.announce(2, 1);
    tasks.clear();
    vm.serve.take(&vm.memory, &vm.ram.0.read_events(), mark, &mut tasks, |_, _| false);
    assert!(vm.serve.pending().discard_outstanding(Ppn(2)));
    let bytes = vm.swap[&stored.slot.0].clone();
    let landed = vm.serve.arrived(&vm.memory, Ppn(2), Some(&bytes), &mut tasks);
    assert_eq!((landed, vm.state(2)), (Landed::Done, State::Swapped), "void bytes put in place");
    // Before the discard is tried again, the guest touches the page.
    vm.serve.fault(&vm.memory, Ppn(2), Access::Missing, &mut tasks);
    assert!(tasks.is_empty() && vm.state(2) == State::Swapped, "{tasks:?}");
    vm.serve.retry(&vm.memory, &mut tasks);
    assert!(tasks.is_empty(), "{tasks:?}");
    assert_eq!((vm.ram.0.waiting(), vm.access(2, None)), (0, 0));
    assert_eq!(vm.memory.counters.values().swap_ins, 0);
    vm.write_cluster();
    vm.memory.check_quiet().unwrap();
}

/// Its home could not be given back: what the guest writes there from then on is what a successor finds.
#[test]
fn what_is_written_to_a_page_that_stays_after_all_is_not_lost() {
    let (mut vm, _) = vm();
    let failed = MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) };
    vm.ram.0.fail_at(2, failed);
    // Protected, read, not punched, no longer protected.
    vm.ram.0.crash_at(CrashAt { call: 3, after: true });
    let left = vm.memory.evict_run(Ppn(0), 1, 0);
    assert_eq!(left, Err(NotEvicted::Failed(MemError::Crash)));
    assert!(vm.ram.0.try_access(0, Some(99)).is_ok());
    vm.take_over().unwrap();
    assert_eq!((vm.state(0), vm.access(0, None)), (State::Resident, 99));
    vm.check();
}

/// The pages of `vm()` that are away, by their words.
fn away(vm: &Vm) -> impl Fn(State) -> (Ppn, Word) + use<> {
    let words = vm.words();
    move |state| {
        let at = words.iter().position(|word| word.state() == state).unwrap();
        (Ppn(at as u64), words[at])
    }
}

#[test]
fn the_check_finds_words_and_books_that_disagree() {
    let (vm, _) = vm();
    let of = away(&vm);
    vm.memory.check_quiet().unwrap();
    let found = |what: &str, said: &str| {
        let error = vm.memory.check().expect_err(what);
        assert!(error.contains(said), "{what}: {error}");
    };
    // What a page's word says instead of what is so.
    let (untouched, home) = (Ppn(17), Ppn(0));
    let (compressed, swapped, staged, held) =
        (of(State::Compressed), of(State::Swapped), of(State::Staged), of(State::Held));
    let resident = Word::new(State::Resident);
    let free_slot = Word::swapped(Stored { slot: SlotId(9), sum: Sum::NONE });
    let other_tier = Word::with_slot(State::Compressed, 1 << 20);
    for (what, ppn, word, said) in [
        ("a page that no transition has", home, resident.set_busy(Busy::Homing), "busy"),
        ("a page that is not there is charged", untouched, resident, "booked"),
        ("a page that is there is not", home, Word::UNTOUCHED, "booked"),
        ("a slot that is free", swapped.0, free_slot, "the slot is free"),
        ("a slot twice", untouched, swapped.1, "another page's slot"),
        ("a stage slot twice", untouched, staged.1, "another page's stage slot"),
        ("a hold twice", untouched, held.1, "another page's stage slot"),
        ("a compressed slot twice", untouched, compressed.1, "a slot of"),
        ("a compressed slot that is free", untouched, other_tier, "the slot is free"),
        ("a compressed slot that no page has", compressed.0, Word::UNTOUCHED, "slots taken"),
        ("a hold that no page has", held.0, resident, "holds taken"),
    ] {
        let before = vm.memory.pmap().load(ppn);
        vm.memory.pmap().store(ppn, word);
        found(what, said);
        vm.memory.pmap().store(ppn, before);
        vm.memory.check_quiet().unwrap();
    }
    // A slot that was taken for nobody: it may be on its way to one, so that is told by the quiet check alone.
    let (slot, _) = vm.memory.take_slots(1).unwrap();
    vm.memory.check().unwrap();
    let error = vm.memory.check_quiet().unwrap_err();
    assert!(error.contains("2 swap slots taken, 1 pages swapped"), "{error}");
    vm.memory.free_slot(slot);
    vm.memory.check_quiet().unwrap();
}

#[test]
fn only_what_is_in_a_slot_is_compressed_out_of_it_or_goes_back_to_it() {
    let (mut vm, wrote) = vm();
    let of = away(&vm);
    let mut compressor = Compressor::new(Algorithm::Lz4).unwrap();
    let (staged, word) = of(State::Staged);
    let (held, held_word) = of(State::Held);
    let mut compress = |ppn, slot| vm.memory.compress(ppn, slot, Some(&mut compressor));
    assert_eq!(compress(staged, word.slot() + 1), Compressed::Left, "it is in another");
    assert_eq!(compress(held, held_word.slot()), Compressed::Left, "it is held");
    assert_eq!(compress(Ppn(0), word.slot()), Compressed::Left, "it is at home");
    assert_eq!(vm.memory.pmap().load(staged), word);

    // The page that the tier has there is somewhere else by its word.
    let (ppn, word) = of(State::Compressed);
    let (slot, place) = (3, Place::from_bits(word.slot()).unwrap());
    for elsewhere in [
        Word::with_slot(State::Compressed, word.slot() + 1),
        Word::with_slot(State::Staged, word.slot()),
        word.set_busy(Busy::Filling),
    ] {
        vm.memory.pmap().store(ppn, elsewhere);
        assert_eq!(vm.memory.write_back(place, slot), Err(NotBack::Left), "{elsewhere:?}");
        assert_eq!(vm.memory.pmap().load(ppn), elsewhere);
    }
    vm.memory.pmap().store(ppn, word);
    assert_eq!(vm.memory.write_back(place, slot), Ok(ppn));
    assert_eq!(vm.memory.pmap().load(ppn), Word::with_slot(State::Staged, slot));
    assert_eq!(vm.memory.write_back(place, slot), Err(NotBack::Left), "it has left");
    vm.check();
    assert_eq!(vm.access(ppn.0, None), wrote[ppn.0 as usize]);
}

#[test]
fn a_page_is_taken_into_a_sample_once_and_out_of_it_wherever_it_is() {
    let (vm, _) = vm();
    let of = away(&vm);
    let held = of(State::Held);
    assert_eq!(vm.memory.sample(held.0), Ok(false), "it is in it already");
    for state in [State::Swapped, State::Staged, State::Compressed, State::Untouched] {
        let (ppn, word) = of(state);
        assert_eq!(vm.memory.unsample(ppn), Ok(true), "{state:?}: it is in none");
        assert_eq!(vm.memory.sample(ppn), Ok(true));
        assert_eq!(vm.memory.pmap().load(ppn), word.set_sampled(true));
        assert_eq!(vm.memory.sample(ppn), Ok(false));
        assert_eq!(vm.memory.unsample(ppn), Ok(true));
        assert_eq!(vm.memory.pmap().load(ppn), word);
    }
    assert_eq!(vm.memory.unsample(held.0), Ok(true));
    assert_eq!(vm.memory.pmap().load(held.0), Word::new(State::Resident));
    vm.check();
}
