//! Random operations on two VMs that share pages, one thread, against the obvious model: a list of what
//! the guests wrote. All invariants of VMs, store and ledger are checked after every step.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::backend::{Errno, MemError};
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_units::{Pages, Ppn};
use proptest::prelude::*;
use support::site::Site;
use support::vm::Vm;
use support::{CrashAt, Unanswered};

const PAGES: u64 = 8;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, u64),
    Read(u64),
    Evict(u64),
    WriteCluster,
    Sample(u64),
    Unsample(u64),
    Examine(u64, u64, u8),
    Lift(u64, u64),
    GoHome(u64, u64),
    Rehome,
    MapZeros(u64, u64),
    Discard(u64, u64),
    Budget(u64),
    Fail(u64, u8),
    FailWatching(usize),
    Silent(bool),
    Answer,
    TakeOver,
    DieAndTakeOver(u64, bool),
}

fn ops() -> impl Strategy<Value = Vec<(usize, Op)>> {
    let page = 0..PAGES;
    let run = (page.clone(), 1u64..PAGES).prop_map(|(p, n)| (p, n.min(PAGES - p)));
    let op = prop_oneof![
        8 => (page.clone(), 0u64..4).prop_map(|(p, t)| Op::Write(p, t)),
        6 => page.clone().prop_map(Op::Read),
        3 => page.clone().prop_map(Op::Evict),
        1 => Just(Op::WriteCluster),
        1 => page.clone().prop_map(Op::Sample),
        1 => page.clone().prop_map(Op::Unsample),
        10 => (run.clone(), 0u8..3).prop_map(|((p, n), m)| Op::Examine(p, n, m)),
        2 => run.clone().prop_map(|(p, n)| Op::Lift(p, n)),
        3 => run.clone().prop_map(|(p, n)| Op::GoHome(p, n)),
        2 => Just(Op::Rehome),
        2 => run.clone().prop_map(|(p, n)| Op::MapZeros(p, n)),
        2 => run.prop_map(|(p, n)| Op::Discard(p, n)),
        1 => (0u64..8).prop_map(Op::Budget),
        3 => (0u64..12, 0u8..3).prop_map(|(call, e)| Op::Fail(call, e)),
        1 => (0usize..3).prop_map(Op::FailWatching),
        1 => any::<bool>().prop_map(Op::Silent),
        2 => Just(Op::Answer),
        1 => Just(Op::TakeOver),
        1 => (0u64..12, any::<bool>()).prop_map(|(call, after)| Op::DieAndTakeOver(call, after)),
    ];
    prop::collection::vec((0usize..2, op), 1..80)
}

struct Rig {
    site: Site,
    vms: Vec<Vm>,
    /// By VM and page what was written; None where it was given up.
    wrote: Vec<Vec<Option<u64>>>,
    /// By VM and page, as bits, all that it ever held of its own: never what only the other VM wrote.
    held: Vec<Vec<u64>>,
    budget: u64,
}

fn pages(first: u64, n: u64) -> Vec<Ppn> {
    (first..first + n).map(Ppn).collect()
}

/// On the way home or, if there are too few calls in that, while pages are shared.
fn die_at(vm: &mut Vm, crash: CrashAt) {
    vm.ram.0.crash_at(crash);
    let home = vm.memory.go_home(&pages(0, 3));
    if home != Err(MemError::Crash) {
        let all = pages(0, PAGES);
        let _ = Examiner::default().examine(&vm.memory, &all, Marking::All);
    }
}

impl Rig {
    fn step(&mut self, v: usize, op: &Op) {
        let (vm, wrote) = (&mut self.vms[v], &mut self.wrote[v]);
        match *op {
            Op::Write(p, token) => {
                self.heal();
                self.room(v);
                self.vms[v].access(p, Some(token));
                self.wrote[v][p as usize] = Some(token);
                self.held[v][p as usize] |= 1 << token;
            }
            Op::Read(p) => self.read(v, p),
            Op::Evict(p) => drop(vm.evict(p)),
            Op::WriteCluster => vm.write_cluster(),
            Op::Sample(p) => drop(vm.memory.sample(Ppn(p))),
            Op::Unsample(p) => drop(vm.memory.unsample(Ppn(p))),
            Op::Examine(p, n, marking) => {
                let marking = [Marking::None, Marking::Unchanged, Marking::All][marking as usize];
                let _ = Examiner::default().examine(&vm.memory, &pages(p, n), marking);
            }
            Op::Lift(p, n) => drop(vm.memory.lift_unwritten(Ppn(p), n)),
            Op::GoHome(p, n) => drop(vm.memory.go_home(&pages(p, n))),
            Op::Rehome => {
                let broken = vm.memory.take_broken(4);
                let _ = vm.memory.go_home(&broken);
                vm.memory.give_back_broken(broken);
            }
            Op::MapZeros(p, n) => drop(vm.memory.map_zeros(Ppn(p), n)),
            Op::Discard(p, n) => {
                vm.ram.0.vmm_punch(p, n);
                vm.ram.0.announce(p, n);
                vm.pump().unwrap();
                vm.pump().unwrap();
                vm.ram.0.vmm_zap(p, n);
                wrote[p as usize..(p + n) as usize].fill(None);
            }
            Op::Budget(less) => {
                let budget = self.site.reserve() + Pages(self.budget - less.min(self.budget / 2));
                self.site.host.ledger.set_budget(budget);
            }
            Op::Fail(call, e) => {
                let error = match e {
                    0 => MemError::Again,
                    1 => MemError::NoMemory,
                    _ => MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) },
                };
                vm.ram.0.fail_at(call, error);
            }
            Op::FailWatching(run) => vm.ram.0.fail_watching(run, MemError::Again),
            Op::Silent(done) => {
                vm.ram.0.be_silent(if done { Unanswered::Done } else { Unanswered::Later });
            }
            Op::Answer => {
                vm.ram.0.shim_answers();
                let _ = vm.memory.settle_parked();
            }
            Op::TakeOver => Vm::take_over_all(&mut self.site, &mut self.vms).unwrap(),
            Op::DieAndTakeOver(call, after) => {
                die_at(vm, CrashAt { call, after });
                Vm::take_over_all(&mut self.site, &mut self.vms).unwrap();
            }
        }
    }

    /// No failure is set, nothing waits for an answer.
    fn heal(&mut self) {
        for vm in &mut self.vms {
            vm.ram.0.shim_answers();
            vm.ram.0.revive();
            vm.ram.0.recovered();
            vm.pump().unwrap();
            assert_eq!(vm.memory.settle_parked(), Ok(0));
        }
    }

    /// Takes from the other VM what one access may need.
    fn room(&mut self, v: usize) {
        let other = &mut self.vms[1 - v];
        for p in 0..PAGES {
            if self.site.host.ledger.free().0 >= 2 {
                return;
            }
            let _ = other.memory.go_home(&[Ppn(p)]);
            let _ = other.memory.unsample(Ppn(p));
            let _ = other.evict(p);
        }
    }

    fn read(&mut self, v: usize, p: u64) {
        self.heal();
        self.room(v);
        let seen = self.vms[v].access(p, None);
        match self.wrote[v][p as usize] {
            Some(token) => assert_eq!(seen, token, "VM {v}, ppn {p}"),
            // Zeros, or something that was there once.
            None => assert!(self.held[v][p as usize] >> seen & 1 == 1, "VM {v}, ppn {p}: {seen}"),
        }
        // It stays what it was seen to be.
        self.wrote[v][p as usize] = Some(seen);
    }

    /// What holds when nothing is parked.
    fn check(&self) {
        if !self.vms.iter().any(|vm| vm.memory.is_parked()) {
            Vm::check_all(&self.site, &self.vms);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_guests_read_what_they_wrote(ops in ops(), budget in 8u64..24, around in 1u64..4) {
        play(&ops, budget, around);
    }
}

fn play(ops: &[(usize, Op)], budget: u64, around: u64) {
    let site = Site::new(budget, 2);
    site.host.set_plenty(Pages(1));
    let vms = vec![Vm::at(&site, PAGES, 16, around), Vm::at(&site, PAGES, 16, around)];
    let wrote = vec![vec![Some(0); PAGES as usize]; 2];
    // Zeros at first.
    let held = vec![vec![1; PAGES as usize]; 2];
    let mut rig = Rig { site, vms, wrote, held, budget };
    for (v, op) in ops {
        rig.step(*v, op);
        rig.check();
    }
    for v in 0..2 {
        for p in 0..PAGES {
            rig.read(v, p);
        }
    }
    rig.heal();
    rig.check();
}

/// Two neighbours cannot enter, and the manager dies as the first is left at home.
#[test]
fn a_manager_that_dies_between_pages_that_do_not_enter_goes_no_further() {
    let ops = [
        (1, Op::Write(1, 1)),
        (1, Op::Write(0, 1)),
        (0, Op::Write(2, 1)),
        (1, Op::Examine(2, 1, 0)),
        (1, Op::Fail(2, 0)),
        (0, Op::Examine(2, 1, 0)),
        (1, Op::DieAndTakeOver(3, false)),
    ];
    play(&ops, 8, 1);
}
