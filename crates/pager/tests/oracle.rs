//! Random operations on the page-state machine, one thread, against the obvious model: a list of
//! what the guest wrote. All invariants are checked after every step.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::backend::{Errno, MemError};
use ballast_units::Ppn;
use proptest::prelude::*;
use support::vm::{LARGE, Vm};

const PAGES: u64 = 12;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, u64),
    Read(u64),
    Evict(u64),
    EvictRun(u64, u64),
    Compress(u64),
    WriteBack,
    WriteCluster,
    RunAhead,
    Sample(u64),
    Unsample(u64),
    Discard(u64, u64),
    AnnounceThenPunch(u64, u64),
    Low(bool),
    Fail(u64, u8),
    TakeOver,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let page = 0..PAGES;
    let op = prop_oneof![
        6 => (page.clone(), 0u64..5).prop_map(|(p, t)| Op::Write(p, t)),
        3 => (page.clone(), 0u64..5).prop_map(|(p, t)| Op::Write(p, LARGE + t)),
        6 => page.clone().prop_map(Op::Read),
        8 => page.clone().prop_map(Op::Evict),
        4 => (page.clone(), 1u64..=4).prop_map(|(p, n)| Op::EvictRun(p, n.min(PAGES - p))),
        6 => page.clone().prop_map(Op::Compress),
        2 => Just(Op::WriteBack),
        2 => Just(Op::WriteCluster),
        3 => Just(Op::RunAhead),
        2 => page.clone().prop_map(Op::Sample),
        2 => page.clone().prop_map(Op::Unsample),
        1 => (page.clone(), 1u64..5).prop_map(|(p, n)| Op::Discard(p, n.min(PAGES - p))),
        1 => (page.clone(), 1u64..5).prop_map(|(p, n)| Op::AnnounceThenPunch(p, n.min(PAGES - p))),
        1 => any::<bool>().prop_map(Op::Low),
        3 => (0u64..4, 0u8..3).prop_map(|(call, e)| Op::Fail(call, e)),
        1 => Just(Op::TakeOver),
    ];
    prop::collection::vec(op, 1..120)
}

fn step(vm: &mut Vm, wrote: &mut [u64], op: &Op) {
    match *op {
        Op::Write(p, token) => {
            vm.access(p, Some(token));
            wrote[p as usize] = token;
        }
        Op::Read(p) => assert_eq!(vm.access(p, None), wrote[p as usize], "ppn {p}"),
        Op::Evict(p) => drop(vm.evict(p)),
        Op::EvictRun(p, n) => drop(vm.evict_run(p, n)),
        Op::Compress(p) => drop(vm.compress(p)),
        Op::WriteBack => drop(vm.write_back()),
        Op::WriteCluster => vm.write_cluster(),
        // Where a failure is injected nobody waits for what did not come.
        Op::RunAhead => drop(vm.memory.run_ahead()),
        Op::Sample(p) => drop(vm.memory.sample(Ppn(p))),
        Op::Unsample(p) => drop(vm.memory.unsample(Ppn(p))),
        Op::Discard(p, n) => {
            vm.ram.0.vmm_punch(p, n);
            vm.ram.0.announce(p, n);
            vm.pump().unwrap();
            vm.pump().unwrap();
            wrote[p as usize..(p + n) as usize].fill(0);
        }
        Op::AnnounceThenPunch(p, n) => {
            vm.ram.0.announce(p, n);
            vm.pump().unwrap();
            vm.pump().unwrap();
            vm.ram.0.vmm_punch(p, n);
            // Where a failure is injected they stay booked until their next fault.
            let _ = vm.memory.reconcile(Ppn(p), n);
            wrote[p as usize..(p + n) as usize].fill(0);
        }
        Op::Low(low) => {
            vm.host.set_low(low);
            vm.memory.set_target(vm.host.ledger.budget());
        }
        Op::Fail(call, e) => {
            let error = match e {
                0 => MemError::Again,
                1 => MemError::NoMemory,
                _ => MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) },
            };
            vm.ram.0.fail_at(call, error);
        }
        Op::TakeOver => {
            vm.take_over().unwrap();
        }
    }
}

/// In whatever state the page is when it is sampled, its first access tells how long that was after.
#[test]
fn the_first_touch_of_a_sampled_page_is_timed() {
    let mut vm = Vm::new(PAGES, 100, 16, 4);
    vm.access(0, Some(1));
    vm.access(1, Some(2));
    vm.evict(1).unwrap();
    let touches = |vm: &Vm| vm.memory.touches.take();
    vm.memory.touches.restart();
    // Resident, staged, and one that is not touched.
    for ppn in [0, 1, 2] {
        assert!(vm.memory.sample(Ppn(ppn)).unwrap());
    }
    assert_eq!(touches(&vm), []);
    let wait = std::time::Duration::from_millis(20);
    std::thread::sleep(wait);
    for again in [false, true] {
        for ppn in [0, 1] {
            vm.access(ppn, None);
        }
        let told = touches(&vm);
        assert_eq!(told.len(), if again { 0 } else { 2 });
        assert!(told.iter().all(|after| *after >= wait), "{told:?}");
    }
    // A touch of a page that an earlier sample left is counted, and is none of this one's.
    vm.memory.touches.restart();
    vm.access(2, None);
    assert_eq!(touches(&vm), []);
    assert_eq!(vm.memory.counters.values().touched, 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn the_guest_reads_what_it_wrote(
        ops in ops(),
        budget in 3u64..16,
        swap in 8u64..20,
        around in 1u64..6,
    ) {
        let mut vm = Vm::new(PAGES, budget, swap, around);
        vm.host.set_plenty(ballast_units::Pages(1));
        let mut wrote = [0; PAGES as usize];
        for op in &ops {
            step(&mut vm, &mut wrote, op);
            vm.check();
            prop_assert!(vm.host.ledger.peak() <= vm.host.ledger.budget());
        }
        vm.ram.0.revive();
        vm.ram.0.recovered();
        for p in 0..PAGES {
            prop_assert_eq!(vm.access(p, None), wrote[p as usize], "ppn {} at the end", p);
        }
        vm.write_cluster();
        vm.check();
    }

    #[test]
    fn the_guest_reads_what_it_wrote_where_there_are_large_pages(
        ops in ops(),
        budget in 6u64..24,
    ) {
        let mut vm = Vm::with_large(PAGES, budget, 4, 1);
        let mut wrote = [0; PAGES as usize];
        for op in &ops {
            step(&mut vm, &mut wrote, op);
            vm.check();
            prop_assert!(vm.host.ledger.peak() <= vm.host.ledger.budget());
        }
        vm.ram.0.revive();
        vm.ram.0.recovered();
        for p in 0..PAGES {
            prop_assert_eq!(vm.access(p, None), wrote[p as usize], "ppn {} at the end", p);
        }
        vm.write_cluster();
        vm.check();
    }
}
