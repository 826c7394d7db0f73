//! As `crashes`, for what moves pages into the store, to the zeros, and home: the manager dies at
//! every call, the VMM's changes stop half way, answers come late or never. Afterwards the guests
//! read what they wrote, and every reference, page and charge is accounted for.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::cell::RefCell;

use ballast_pager::backend::{Errno, MemError};
use ballast_pager::memory::{Access, Contents, Enter, Entered, MOVING};
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::{PAGE_SIZE, Pages, Ppn};
use support::site::Site;
use support::vm::Vm;
use support::{CrashAt, Unanswered};

const PAGES: u64 = 13;

struct Rig {
    site: Site,
    vms: Vec<Vm>,
    /// By VM and page: what the guest may find there.
    may: Vec<Vec<Vec<u64>>>,
}

/// Two VMs with pages in every state that sharing knows.
fn rig() -> Rig {
    let site = Site::new(60, 2);
    let mut vms = vec![Vm::at(&site, PAGES, 16, 1), Vm::at(&site, PAGES, 16, 1)];
    for (p, token) in [(3, 30), (4, 31), (5, 32)] {
        vms[0].access(p, Some(token));
        vms[1].access(p, Some(token));
    }
    vms[1].access(6, Some(33));
    vms[1].access(7, Some(33));
    examine(&vms[0], 3..6).unwrap();
    examine(&vms[1], 3..8).unwrap();
    vms[0].access(5, Some(132));
    assert_eq!(vms[0].access(6, None), 0);
    vms[0].access(7, Some(70));
    for p in 0..3 {
        vms[0].access(p, Some(20 + p));
        vms[1].access(p, Some(20 + p));
    }
    vms[1].access(9, Some(30));
    for (p, token) in [(9, 0), (10, 0), (11, 50), (12, 0)] {
        vms[0].access(p, Some(token));
    }
    use State::{Broken, Resident, Shared, Untouched, Zero};
    let states = [
        [Resident, Resident, Resident, Shared, Shared, Broken, Zero, Broken, Untouched, Resident],
        [Resident, Resident, Resident, Shared, Shared, Shared, Shared, Shared, Untouched, Resident],
    ];
    for (vm, (states, rest)) in vms.iter().zip(states.into_iter().zip([Resident, Untouched])) {
        for (p, state) in states.into_iter().chain([rest; 3]).enumerate() {
            assert_eq!(vm.state(p as u64), state, "ppn {p}");
        }
    }
    Vm::check_all(&site, &vms);
    let wrote = [
        [20, 21, 22, 30, 31, 132, 0, 70, 0, 0, 0, 50, 0],
        [20, 21, 22, 30, 31, 32, 33, 33, 0, 30, 0, 0, 0],
    ];
    let may = wrote.iter().map(|vm| vm.iter().map(|&token| vec![token]).collect()).collect();
    Rig { site, vms, may }
}

fn examine(vm: &Vm, pages: std::ops::Range<u64>) -> Result<(), MemError> {
    let pages: Vec<Ppn> = pages.map(Ppn).collect();
    // One for all: it is large, and these tests use it a hundred thousand times.
    thread_local!(static EXAMINER: RefCell<Examiner> = RefCell::default());
    EXAMINER.with_borrow_mut(|e| e.examine(&vm.memory, &pages, Marking::All).map(drop))
}

fn go_home(vm: &Vm, pages: &[u64]) -> Result<(), MemError> {
    let pages: Vec<Ppn> = pages.iter().copied().map(Ppn).collect();
    vm.memory.go_home(&pages).map(drop)
}

fn write(vm: &mut Vm, ppn: u64) -> Result<(), MemError> {
    vm.ram.0.park(ppn, Access::Protected);
    vm.pump()
}

type Op = fn(&mut Rig) -> Result<(), MemError>;

const OPS: &[(&str, Op)] = &[
    ("pages that two VMs have", |rig| {
        examine(&rig.vms[0], 0..3)?;
        examine(&rig.vms[1], 0..3)
    }),
    ("a page that the store has", |rig| examine(&rig.vms[1], 9..10)),
    ("a page of zeros", |rig| examine(&rig.vms[0], 9..10)),
    ("neighbours of zeros", |rig| examine(&rig.vms[0], 8..PAGES)),
    ("neighbours of which one is not of zeros any more", |rig| {
        let mut pages = [[0; PAGE_SIZE]; 5];
        rig.vms[0].memory.drop_zeros(Ppn(8), &mut pages).map(drop)
    }),
    ("everything", |rig| {
        examine(&rig.vms[0], 0..PAGES)?;
        examine(&rig.vms[1], 0..PAGES)
    }),
    ("the protection of what matches nothing is lifted", |rig| {
        examine(&rig.vms[0], 0..3)?;
        write(&mut rig.vms[0], 1)?;
        rig.vms[0].memory.lift_unwritten(Ppn(0), PAGES).map(drop)
    }),
    ("write to a shared page", |rig| write(&mut rig.vms[0], 3)),
    ("write to zeros", |rig| write(&mut rig.vms[0], 6)),
    ("write to a protected broken page", |rig| {
        ballast_pager::backend::Backend::protect(&rig.vms[0].ram, Ppn(5))?;
        write(&mut rig.vms[0], 5)
    }),
    ("shared pages go home", |rig| go_home(&rig.vms[0], &[3, 4])),
    ("the last ones go home", |rig| {
        go_home(&rig.vms[0], &[3, 4])?;
        go_home(&rig.vms[1], &[3, 4, 5, 6, 7])
    }),
    ("a broken page goes home", |rig| go_home(&rig.vms[0], &[5])),
    ("broken zeros go home", |rig| go_home(&rig.vms[0], &[7])),
    ("all go home", |rig| go_home(&rig.vms[0], &[3, 4, 5, 7])),
    ("zeros are mapped", |rig| rig.vms[0].memory.map_zeros(Ppn(8), 4).map(drop)),
    ("read of an untouched page", |rig| {
        rig.vms[0].ram.0.park(8, Access::Reading);
        rig.vms[0].pump()?;
        rig.vms[0].map_zeros()?;
        rig.vms[0].pump()
    }),
    ("discard of everything", |rig| {
        rig.vms[0].ram.0.vmm_punch(0, PAGES);
        rig.vms[0].ram.0.announce(0, PAGES);
        rig.vms[0].pump()?;
        rig.vms[0].ram.0.vmm_zap(0, PAGES);
        Ok(())
    }),
    ("discard of broken pages, which go home", |rig| {
        rig.vms[0].ram.0.announce(5, 1);
        rig.vms[0].pump()?;
        rig.vms[0].ram.0.vmm_zap(5, 1);
        go_home(&rig.vms[0], &[5])
    }),
    ("a page that was given up is looked at", |rig| {
        rig.vms[1].ram.0.vmm_punch(9, 1);
        examine(&rig.vms[1], 9..10)?;
        rig.vms[1].ram.0.announce(9, 1);
        rig.vms[1].pump()
    }),
];

/// Pages whose contents become void: VM and page.
fn void(op: &str) -> Vec<(usize, u64)> {
    match op {
        "discard of everything" => (0..PAGES).map(|p| (0, p)).collect(),
        "discard of broken pages, which go home" => vec![(0, 5)],
        "a page that was given up is looked at" => vec![(1, 9)],
        _ => Vec::new(),
    }
}

impl Rig {
    fn begin(name: &str) -> Rig {
        let mut rig = rig();
        for (vm, p) in void(name) {
            // What the store's page holds shows again where a copy is dropped.
            rig.may[vm][p as usize].extend([0, 32]);
        }
        rig
    }

    /// The guests write wherever nothing holds them up.
    fn guests_go_on(&mut self, name: &str) {
        for (v, vm) in self.vms.iter().enumerate() {
            for p in (0..PAGES).filter(|&p| !void(name).contains(&(v, p))) {
                let token = 500 + p;
                if vm.ram.0.try_access(p, Some(token)).is_ok() {
                    self.may[v][p as usize] = vec![token];
                }
            }
        }
    }

    /// As the share and fault threads do, until nothing is left to do.
    fn settle(&mut self, what: &str) {
        for _ in 0..8 {
            for vm in &mut self.vms {
                vm.pump().unwrap();
                let _ = vm.memory.settle_parked();
                vm.map_zeros().unwrap();
            }
        }
        for vm in &self.vms {
            assert!(!vm.memory.is_parked(), "{what}: parked for ever");
            assert_eq!(vm.serve.pending().faults(), 0, "{what}");
        }
    }

    fn finish(&mut self, what: &str) {
        Vm::check_all(&self.site, &self.vms);
        for vm in &self.vms {
            assert_eq!(vm.ram.0.waiting(), 0, "{what}: somebody was not woken");
            vm.memory.check_quiet().unwrap();
        }
        for (v, vm) in self.vms.iter_mut().enumerate() {
            for p in 0..PAGES {
                let seen = vm.access(p, None);
                let may = &self.may[v][p as usize];
                assert!(may.contains(&seen), "{what}: VM {v}, ppn {p} reads {seen}, not {may:?}");
            }
        }
        Vm::check_all(&self.site, &self.vms);
        // Shared again where it can be, written, home, and gone.
        for vm in &self.vms {
            examine(vm, 0..PAGES).unwrap();
        }
        for vm in &mut self.vms {
            for p in 0..PAGES {
                vm.access(p, Some(900 + p % 4));
            }
        }
        Vm::check_all(&self.site, &self.vms);
        for vm in &self.vms {
            go_home(vm, &(0..PAGES).collect::<Vec<_>>()).unwrap();
        }
        Vm::check_all(&self.site, &self.vms);
        assert_eq!(self.site.machine.stored(), 0, "{what}: pages of nobody in the store");
        for vm in &mut self.vms {
            for p in 0..PAGES {
                assert_eq!(vm.access(p, None), 900 + p % 4, "{what}: ppn {p}, written after");
                vm.evict(p).unwrap();
            }
            for p in 0..PAGES {
                assert_eq!(vm.access(p, None), 900 + p % 4, "{what}: ppn {p}, from swap");
            }
        }
        Vm::check_all(&self.site, &self.vms);
    }
}

#[test]
fn nothing_happens_and_all_is_well() {
    for (name, op) in OPS {
        let mut rig = Rig::begin(name);
        op(&mut rig).unwrap();
        rig.settle(name);
        rig.finish(name);
    }
}

#[test]
fn a_crash_at_any_call_of_any_operation_loses_nothing() {
    let mut crashes = 0;
    for (name, op) in OPS {
        for (vm, after, variant) in
            [0, 1].into_iter().flat_map(|vm| (0..8).map(move |v| (vm, v & 1 != 0, v >> 1)))
        {
            for call in 0.. {
                let mut rig = Rig::begin(name);
                for each in &rig.vms {
                    each.ram.0.goes_on(variant & 1 != 0);
                }
                rig.vms[vm].ram.0.crash_at(CrashAt { call, after });
                let result = op(&mut rig);
                let died = rig.site.machine.is_dead();
                let what = format!("{name}, VM {vm} at call {call}, after: {after}, {variant}");
                assert_eq!(died, result == Err(MemError::Crash), "{what}: {result:?}");
                if variant & 2 != 0 {
                    rig.guests_go_on(name);
                }
                Vm::take_over_all(&mut rig.site, &mut rig.vms).unwrap();
                rig.finish(&what);
                if !died {
                    break;
                }
                crashes += 1;
            }
        }
    }
    println!("{crashes} crashes");
    assert!(crashes >= 500, "{crashes}");
}

#[test]
fn a_crash_in_the_recovery_from_a_crash_loses_nothing() {
    let mut crashes = 0;
    for (name, op) in OPS {
        // Half of them: before and after alternate in both.
        for variant in [0b000u32, 0b011, 0b101, 0b110] {
            let (vm, after, again_after) =
                ((variant & 1) as usize, variant & 2 != 0, variant & 4 != 0);
            for call in 0.. {
                let mut first_died = true;
                for again in 0.. {
                    let mut rig = Rig::begin(name);
                    rig.vms[vm].ram.0.crash_at(CrashAt { call, after });
                    let _ = op(&mut rig);
                    first_died = rig.site.machine.is_dead();
                    for each in &rig.vms {
                        each.ram.0.revive();
                    }
                    rig.vms[vm].ram.0.crash_at(CrashAt { call: again, after: again_after });
                    let result = Vm::retry_take_over_all(&mut rig.site, &mut rig.vms);
                    let died = rig.site.machine.is_dead();
                    let what = format!("{name}, VM {vm} at call {call}, in recovery at {again}");
                    assert_eq!(died, result.is_err(), "{what}");
                    if !died || !first_died {
                        break;
                    }
                    Vm::take_over_all(&mut rig.site, &mut rig.vms).unwrap();
                    rig.finish(&what);
                    crashes += 1;
                }
                if !first_died {
                    break;
                }
            }
        }
    }
    println!("{crashes} crashes in recovery");
    assert!(crashes > 500, "{crashes}");
}

/// Errors that come and go: nothing is lost, nothing stays busy, no restart needed.
#[test]
fn a_failure_at_any_call_of_any_operation_loses_nothing() {
    let other = MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) };
    let mut failures = 0;
    for (name, op) in OPS {
        for error in [MemError::Again, MemError::NoMemory, other.clone()] {
            for (vm, call) in [0, 1].into_iter().flat_map(|vm| (0..60).map(move |c| (vm, c))) {
                let mut rig = Rig::begin(name);
                rig.vms[vm].ram.0.fail_at(call, error.clone());
                let result = op(&mut rig);
                let what = format!("{name}: VM {vm}: {error} at call {call}: {result:?}");
                let failed = rig.vms[vm].ram.0.has_failed();
                rig.vms[vm].ram.0.revive();
                rig.vms[vm].ram.0.recovered();
                rig.settle(&what);
                rig.finish(&what);
                failures += u64::from(failed);
            }
        }
    }
    println!("{failures} failures");
    assert!(failures >= 100, "{failures}");
}

/// Mappings that were changed, and neither registered nor protected: the guest writes to them
/// meanwhile, or does not.
#[test]
fn mappings_left_unwatched_are_watched_before_they_are_booked() {
    let mut left = 0;
    for (name, op) in OPS {
        for error in [MemError::Again, MemError::NoMemory] {
            for (vm, run) in [0, 1].into_iter().flat_map(|vm| (0..4).map(move |r| (vm, r))) {
                let mut rig = Rig::begin(name);
                rig.vms[vm].ram.0.set_together(4);
                rig.vms[vm].ram.0.fail_watching(run, error.clone());
                let _ = op(&mut rig);
                left += u64::from(rig.vms[vm].ram.0.has_left_unwatched());
                rig.vms[vm].ram.0.revive();
                rig.vms[vm].ram.0.recovered();
                let what = format!("{name}: VM {vm}: {error}, unwatched from run {run}");
                rig.settle(&what);
                rig.finish(&what);
            }
        }
    }
    println!("{left} times unwatched");
    assert!(left >= 10, "{left}");
}

/// The VMM does not answer: it did what was asked, or does it later.
#[test]
fn a_silent_vmm_loses_nothing() {
    let mut silent = 0;
    for (name, op) in OPS {
        for how in [Unanswered::Done, Unanswered::Later] {
            for (vm, dies) in [(0, false), (1, false), (0, true), (1, true)] {
                let mut rig = Rig::begin(name);
                rig.vms[vm].ram.0.be_silent(how);
                let _ = op(&mut rig);
                silent += u64::from(rig.vms[vm].ram.0.has_been_silent());
                let what = format!("{name}: VM {vm} silent: {how:?}, manager dies: {dies}");
                if dies {
                    Vm::take_over_all(&mut rig.site, &mut rig.vms).unwrap();
                } else {
                    rig.guests_go_on(name);
                    rig.vms[vm].ram.0.shim_answers();
                    rig.vms[vm].ram.0.revive();
                    rig.vms[vm].ram.0.recovered();
                    rig.settle(&what);
                }
                rig.finish(&what);
            }
        }
    }
    println!("{silent} times silent");
    assert!(silent >= 10, "{silent}");
}

/// More pages than one change takes: where the first change fails, the others are not tried, and
/// keep no reference.
#[test]
fn references_of_pages_that_are_not_tried_are_released() {
    let site = Site::new(400, 1);
    let mut vm = Vm::at(&site, 140, 16, 1);
    for p in 0..140 {
        vm.access(p, Some(7));
    }
    examine(&vm, 0..2).unwrap();
    assert_eq!(vm.state(1), State::Shared);
    // All are read; then 64 are protected and read again, and changed.
    vm.ram.0.fail_at(138 + 2 * 64, MemError::NoMemory);
    assert_eq!(examine(&vm, 2..140), Err(MemError::NoMemory));
    assert!(vm.ram.0.calls() > 138 + 2 * 64);
    Vm::check_all(&site, &[vm]);
}

/// A fault that was met on a mapping which is not there any more: who waits is woken, nothing changes.
#[test]
fn stale_faults_are_answered() {
    for access in [Access::Missing, Access::Reading] {
        let mut rig = rig();
        for ppn in [3, 5, 6, 7] {
            let before = rig.vms[0].state(ppn);
            rig.vms[0].ram.0.park(ppn, access);
            rig.vms[0].pump().unwrap();
            assert_eq!(rig.vms[0].state(ppn), before);
        }
        rig.finish("stale faults");
    }
}

/// What is wrong with another VM's memory is not held against the one that finds its pages there.
#[test]
fn a_vm_that_fails_does_not_fail_those_that_find_its_pages() {
    for error in [
        MemError::Gone,
        MemError::NoMemory,
        MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) },
    ] {
        for call in 0.. {
            let mut rig = rig();
            examine(&rig.vms[0], 0..3).unwrap();
            rig.vms[0].ram.0.fail_at(call, error.clone());
            let what = format!("{error} at call {call}");
            assert_eq!(examine(&rig.vms[1], 0..3), Ok(()), "{what}");
            let failed = rig.vms[0].ram.0.calls() > call;
            rig.vms[0].ram.0.revive();
            rig.vms[0].ram.0.recovered();
            rig.settle(&what);
            rig.finish(&what);
            if !failed {
                assert!(call > 3);
                break;
            }
        }
    }
}

/// What was hashed is not what is there any more: the page stays, and the store gets nothing.
#[test]
fn a_page_that_changed_since_it_was_hashed_stays() {
    let site = Site::new(20, 1);
    let mut vm = Vm::at(&site, 3, 16, 1);
    for p in 0..3 {
        vm.access(p, Some(7));
    }
    examine(&vm, 1..3).unwrap();
    let common = vm.memory.pmap().load(Ppn(1)).store_page().unwrap();
    let hash = site.domain.hash(&support::page_of(7));
    vm.access(0, Some(8));
    let member = vm.memory.membership().unwrap();
    let fresh = site.domain.allocate(1).unwrap().first();
    assert!(site.domain.retain(common));
    for (page, contents) in [(fresh, Contents::New(hash)), (common, Contents::Common)] {
        let enter = [Enter { ppn: Ppn(0), page, contents }];
        let outcomes = vm.memory.enter_store(&member, &enter, &mut Default::default());
        assert_eq!(outcomes, [Entered::Changed]);
        site.domain.release(page);
    }
    assert_eq!((vm.state(0), vm.access(0, None)), (State::Resident, 8));
    assert_eq!(site.domain.stats().common, Pages(1));
    Vm::check_all(&site, &[vm]);
}

/// No memory for pages that go home: as many go as are paid from what is set aside, and what is given
/// back pays for that first.
#[test]
fn pages_that_go_home_without_memory_are_paid_for_later() {
    let site = Site::new(200, 1);
    let mut vm = Vm::at(&site, 100, 128, 1);
    for p in 0..100 {
        vm.access(p, Some(7 + p % 2));
    }
    let all: Vec<Ppn> = (0..100).map(Ppn).collect();
    examine(&vm, 0..100).unwrap();
    assert_eq!(site.domain.stats().shared, Pages(100));
    site.host.ledger.set_budget(site.host.ledger.used());
    assert_eq!(vm.memory.go_home(&all), Ok(MOVING.0 as usize));
    assert_eq!((vm.memory.owed(), vm.memory.charged()), (MOVING, MOVING));
    assert_eq!(vm.memory.go_home(&all), Ok(0));
    vm.check_shared(&site);
    // What leaves pays, and makes room for as many others.
    for p in 0..5 {
        vm.evict(p).unwrap();
    }
    assert_eq!(vm.memory.owed(), MOVING - Pages(5));
    vm.check_shared(&site);
    assert_eq!(vm.memory.go_home(&all), Ok(5));
    // Memory that comes free pays for all.
    site.host.ledger.set_budget(site.host.ledger.used() + Pages(200));
    assert_eq!(vm.memory.go_home(&all[5..]), Ok(MOVING.0 as usize));
    assert_eq!(vm.memory.owed(), Pages(0));
    vm.check_shared(&site);
}

/// What was protected so as to be passed over, and is not to be any more, meets no fault; and it is looked at again.
#[test]
fn what_is_no_longer_passed_over_is_written_without_a_fault() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, PAGES, 16, 1);
    for p in 0..PAGES {
        vm.access(p, Some(20 + p));
    }
    examine(&vm, 0..PAGES).unwrap();
    let faults = |vm: &Vm| vm.memory.counters.values().unwritten_faults;
    vm.access(1, Some(90));
    assert_eq!(faults(&vm), 1);
    // Two at a time, one of which has left meanwhile.
    vm.evict(2).unwrap();
    assert_eq!(vm.memory.lift_unwritten(Ppn(0), 2).unwrap(), Some(Ppn(4)));
    assert_eq!(vm.memory.lift_unwritten(Ppn(4), 100).unwrap(), None);
    let before = vm.memory.counters.values().faults;
    for p in (0..PAGES).filter(|p| *p != 2) {
        vm.access(p, Some(50 + p));
    }
    assert_eq!((faults(&vm), vm.memory.counters.values().faults), (1, before));
    assert_eq!(vm.access(2, None), 22);
    // A kernel that cannot just now is asked again by the next write.
    examine(&vm, 0..PAGES).unwrap();
    vm.ram.0.fail_at(0, MemError::Again);
    assert_eq!(vm.memory.lift_unwritten(Ppn(0), 100).unwrap(), None);
    for p in 0..PAGES {
        assert_eq!(vm.access(p, Some(70 + p)), 70 + p);
    }
    Vm::check_all(&site, &[vm]);
}

/// Copies that the kernel made go home under the next manager, which has nothing but words to know them by.
#[test]
fn recovery_knows_which_copies_are_to_go_home() {
    let mut rig = rig();
    assert_eq!(
        rig.vms[0].memory.take_broken(9),
        [Ppn(5), Ppn(7)],
        "nor does the first need to ask"
    );
    rig.vms[0].memory.give_back_broken([5, 7].map(Ppn));
    Vm::take_over_all(&mut rig.site, &mut rig.vms).unwrap();
    assert_eq!(rig.vms[0].memory.take_broken(9), [Ppn(5), Ppn(7)]);
    assert_eq!(rig.vms[1].memory.take_broken(9), []);
    rig.finish("nothing was under way");
}

/// While it is not known what became of a change, or there is no way to the shim, no other is begun.
#[test]
fn nothing_is_moved_while_mappings_cannot_be_changed() {
    let mut rig = rig();
    let stays = |vm: &Vm| {
        let words = vm.words();
        assert_eq!(vm.memory.go_home(&[3, 4, 5].map(Ppn)), Ok(0));
        assert_eq!(vm.memory.map_zeros(Ppn(8), 4), Ok(0));
        examine(vm, 0..3).unwrap();
        assert!(vm.words().into_iter().eq(words), "something was begun");
    };
    rig.vms[0].ram.0.set_can_remap(false);
    stays(&rig.vms[0]);
    rig.vms[0].ram.0.set_can_remap(true);
    rig.vms[0].ram.0.be_silent(Unanswered::Later);
    assert_eq!(go_home(&rig.vms[0], &[7]), Ok(()));
    // What the guest wrote between the copy and its mapping would be lost.
    assert_eq!(rig.vms[0].ram.0.try_access(7, Some(1)), Err(Access::Protected));
    assert!(rig.vms[0].memory.is_parked());
    stays(&rig.vms[0]);
    assert_eq!(rig.vms[0].memory.settle_parked(), Ok(1));
    rig.vms[0].ram.0.shim_answers();
    assert_eq!((rig.vms[0].memory.settle_parked(), rig.vms[0].state(7)), (Ok(0), State::Resident));
    assert_eq!(rig.vms[0].memory.go_home(&[3, 4, 5].map(Ppn)), Ok(3));
    rig.finish("it has answered");
}

/// The guest wrote between the mapping of a page and its protection: there is a copy already, and it is charged.
#[test]
fn a_copy_that_was_made_before_its_page_was_protected_is_charged() {
    let mut rig = rig();
    let vm = &rig.vms[0];
    vm.ram.0.be_silent(Unanswered::Later);
    let _ = vm.memory.map_zeros(Ppn(8), 1);
    assert!(vm.memory.is_parked());
    vm.ram.0.shim_answers();
    ballast_pager::backend::Backend::unprotect(&vm.ram, Ppn(8)).unwrap();
    vm.ram.0.try_access(8, Some(88)).unwrap();
    let before = vm.memory.charged();
    assert_eq!(vm.memory.settle_parked(), Ok(0));
    assert_eq!((vm.state(8), vm.memory.charged()), (State::Broken, before + Pages(1)));
    // It is to go home, as all copies are.
    let copies = vm.memory.take_broken(9);
    assert!(copies.contains(&Ppn(8)), "{copies:?}");
    vm.memory.give_back_broken(copies);
    rig.may[0][8] = vec![88];
    rig.finish("written in between");
}

/// Where large pages are, recovery looks for what was never touched: what is mapped elsewhere is left alone by that.
#[test]
fn recovery_leaves_shared_pages_protected_beside_one_that_is_gone() {
    let mut site = Site::new(200, 1);
    let mut vms = [Vm::at_with_large(&site, 8, 4, 1)];
    for (p, token) in [(0, 5), (1, 7), (2, 7), (3, 9)] {
        vms[0].access(p, Some(token));
    }
    vms[0].break_large(0).unwrap();
    examine(&vms[0], 0..4).unwrap();
    assert_eq!([1, 2].map(|p| vms[0].state(p)), [State::Shared; 2]);
    // Nobody has read that it is given up.
    vms[0].ram.0.vmm_punch(0, 1);
    Vm::take_over_all(&mut site, &mut vms).unwrap();
    assert_eq!(
        [0, 1, 2].map(|p| vms[0].state(p)),
        [State::Ballooned, State::Shared, State::Shared]
    );
    Vm::check_all(&site, &vms);
    assert_eq!([1, 2, 3].map(|p| vms[0].access(p, None)), [7, 7, 9]);
}

/// Two VMs in large pages, of which the second shares one page of its region, and all else of that is at home.
fn one_of_a_region_is_shared() -> (Site, Vec<Vm>) {
    let site = Site::new(200, 2);
    let mut vms: Vec<Vm> = (0..2).map(|_| Vm::at_with_large(&site, 8, 4, 1)).collect();
    for (p, token) in [(0, 5), (1, 7), (2, 8), (3, 9)] {
        vms[0].access(p, Some(10 * token));
        vms[1].access(p, Some(token));
    }
    vms[0].access(2, Some(8));
    for vm in &mut vms {
        vm.break_large(0).unwrap();
    }
    vms.iter().for_each(|vm| examine(vm, 0..4).unwrap());
    use State::{Resident, Shared};
    assert_eq!([0, 1, 2, 3].map(|p| vms[1].state(p)), [Resident, Resident, Shared, Resident]);
    for vm in &vms {
        vm.memory.lift_unwritten(Ppn(0), 4).unwrap();
    }
    Vm::check_all(&site, &vms);
    (site, vms)
}

#[test]
fn one_shared_page_of_a_region_comes_home_for_a_large_one() {
    let (site, mut vms) = one_of_a_region_is_shared();
    assert_eq!(vms[1].memory.can_collapse(0), Some(vec![Ppn(2)]));
    // Not while memory is short, or the policy grants the VM no more.
    site.host.set_plenty(Pages(190));
    assert_eq!(vms[1].memory.collapse(0), Ok(false));
    site.host.set_plenty(Pages(0));
    let target = vms[1].memory.target();
    vms[1].memory.set_target(vms[1].memory.charged());
    assert_eq!((vms[1].memory.collapse(0), vms[1].state(2)), (Ok(false), State::Shared));
    vms[1].memory.set_target(target);
    // What is away comes home beside it.
    vms[1].evict(1).unwrap();
    assert_eq!((vms[1].memory.can_collapse(0), vms[1].memory.away_in(0)), (None, vec![Ppn(1)]));
    assert_eq!(vms[1].access(1, None), 7);
    assert_eq!(vms[1].memory.collapse(0), Ok(true));
    assert!(vms[1].memory.regions().is_large(Ppn(2)));
    Vm::check_all(&site, &vms);
    assert_eq!([0, 1, 2, 3].map(|p| vms[1].access(p, None)), [5, 7, 8, 9]);
    assert_eq!([0, 1, 2, 3].map(|p| vms[0].access(p, None)), [50, 70, 8, 90]);
    // Two of four are more than a few.
    vms[0].access(3, Some(0));
    examine(&vms[0], 0..4).unwrap();
    vms[0].memory.lift_unwritten(Ppn(0), 4).unwrap();
    vms[0].access(1, Some(33));
    vms[0].access(0, Some(33));
    examine(&vms[0], 0..4).unwrap();
    vms[0].memory.lift_unwritten(Ppn(0), 4).unwrap();
    assert_eq!([0, 1].map(|p| vms[0].state(p)), [State::Shared; 2]);
    assert_eq!((vms[0].memory.can_collapse(0), vms[0].memory.away_in(0)), (None, vec![]));
}

#[test]
fn a_shared_page_that_is_on_its_way_keeps_its_region_small() {
    let (site, vms) = one_of_a_region_is_shared();
    let vm = &vms[1];
    vm.memory.let_pages_move(false);
    assert_eq!(vm.memory.can_collapse(0), None, "mappings cannot be changed");
    vm.memory.let_pages_move(true);
    vm.ram.0.be_silent(Unanswered::Later);
    let _ = vm.memory.go_home(&[Ppn(2)]);
    assert!(vm.memory.is_parked());
    assert_eq!(vm.memory.can_collapse(0), None);
    vm.ram.0.shim_answers();
    assert_eq!(vm.memory.settle_parked(), Ok(0));
    assert!(vm.memory.can_collapse(0).is_some());
    Vm::check_all(&site, &vms);
}

/// One in 64.
#[test]
fn a_region_that_shares_more_than_a_few_pages_stays_small() {
    const REGION: u64 = 128;
    let site = Site::new(600, 2);
    let mut vms: Vec<Vm> =
        (0..2).map(|_| Vm::at_with_large(&site, 2 * REGION, REGION, 1)).collect();
    for p in 0..REGION {
        vms[0].access(p, Some(1_000 + p));
        vms[1].access(p, Some(if p < 3 { 1_000 + p } else { 2_000 + p }));
    }
    for vm in &mut vms {
        vm.break_large(0).unwrap();
    }
    for (shared, may) in [(2, Some(vec![Ppn(0), Ppn(1)])), (3, None)] {
        for vm in &vms {
            examine(vm, 0..shared).unwrap();
            vm.memory.lift_unwritten(Ppn(0), REGION).unwrap();
        }
        assert_eq!(vms[1].memory.can_collapse(0), may, "{shared} of {REGION}");
    }
    // The few that are shared are no reason to leave others away; more are.
    assert_eq!(vms[1].memory.away_in(0), []);
    let last = REGION - 1;
    vms[1].evict(last).unwrap();
    assert_eq!(vms[1].memory.away_in(0), [], "three of {REGION}");
    vms[1].access(2, Some(9_000));
    vms[1].memory.go_home(&[Ppn(2)]).unwrap();
    assert_eq!(vms[1].state(2), State::Resident);
    assert_eq!(vms[1].memory.away_in(0), [Ppn(last)], "two of {REGION}");
    Vm::check_all(&site, &vms);
}

#[test]
fn a_crash_while_a_shared_page_comes_home_for_a_large_one_loses_nothing() {
    let mut crashes = 0;
    for (after, variant) in [(false, false), (true, false), (false, true), (true, true)] {
        for call in 0.. {
            let (mut site, mut vms) = one_of_a_region_is_shared();
            vms[1].ram.0.goes_on(variant);
            vms[1].ram.0.crash_at(CrashAt { call, after });
            let result = vms[1].memory.collapse(0);
            let died = site.machine.is_dead();
            let what = format!("at call {call}, after: {after}, {variant}");
            assert_eq!(died, result == Err(MemError::Crash), "{what}: {result:?}");
            Vm::take_over_all(&mut site, &mut vms).unwrap();
            Vm::check_all(&site, &vms);
            assert_eq!([0, 1, 2, 3].map(|p| vms[1].access(p, None)), [5, 7, 8, 9], "{what}");
            assert_eq!([0, 1, 2, 3].map(|p| vms[0].access(p, None)), [50, 70, 8, 90], "{what}");
            for p in 0..4 {
                vms[1].access(p, Some(100 + p));
            }
            assert_eq!(
                [0, 1, 2, 3].map(|p| vms[1].access(p, None)),
                [100, 101, 102, 103],
                "{what}"
            );
            Vm::check_all(&site, &vms);
            vms.iter().for_each(|vm| vm.memory.check_quiet().unwrap());
            if !died {
                break;
            }
            crashes += 1;
        }
    }
    println!("{crashes} crashes");
    assert!(crashes >= 16, "{crashes}");
}
