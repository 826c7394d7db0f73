//! Single steps of sharing, where a wrong one is not seen by what guests read in the end: what is looked at again, what is
//! charged, and to whom pages go.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::backend::{Errno, MemError};
use ballast_pager::memory::{Contents, Enter, Entered};
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::{PAGE_SIZE, Pages, Ppn};
use support::site::Site;
use support::vm::Vm;

fn examine(vm: &Vm, pages: std::ops::Range<u64>) -> Result<(), MemError> {
    let pages: Vec<Ppn> = pages.map(Ppn).collect();
    Examiner::default().examine(&vm.memory, &pages, Marking::All).map(drop)
}

/// A VM that has changed its domain since a page of the old one was found for it gets none of that.
#[test]
fn a_page_of_a_domain_that_was_left_is_not_entered() {
    let site = Site::new(20, 1);
    let mut vm = Vm::at(&site, 3, 16, 1);
    for p in 0..3 {
        vm.access(p, Some(7));
    }
    examine(&vm, 1..3).unwrap();
    let common = vm.memory.pmap().load(Ppn(1)).store_page().unwrap();
    let member = vm.memory.membership().unwrap();
    assert!(site.domain.retain(common));
    assert_eq!(vm.memory.go_home(&[Ppn(1), Ppn(2)]), Ok(2));
    let other = Site::new(20, 0);
    assert!(vm.memory.change_domain(&other.domain, || true).unwrap());
    let enter = [Enter { ppn: Ppn(0), page: common, contents: Contents::Common }];
    let outcomes = vm.memory.enter_store(&member, &enter, &mut Default::default());
    assert_eq!((outcomes, vm.state(0)), (vec![Entered::NotEligible], State::Resident));
    site.domain.release(common);
    site.domain.check([]).unwrap();
}

/// Who is to leave a domain shares nothing more there, whoever finds the page; who stays after all, does again.
#[test]
fn nothing_of_a_vm_that_is_to_leave_its_domain_enters_the_store() {
    let site = Site::new(60, 2);
    let mut vms = [Vm::at(&site, 3, 16, 1), Vm::at(&site, 3, 16, 1)];
    for vm in &mut vms {
        vm.access(0, Some(20));
        vm.access(1, Some(21));
    }
    // One is common, one is known of the VM that is to leave.
    examine(&vms[0], 0..2).unwrap();
    examine(&vms[1], 0..1).unwrap();
    assert_eq!([vms[0].state(0), vms[1].state(0)], [State::Shared; 2]);
    vms[0].memory.set_leaving(true);
    // By its own threads, which take a page home to evict it.
    assert_eq!(vms[0].memory.go_home(&[Ppn(0)]), Ok(1));
    Examiner::to_itself().examine(&vms[0].memory, &[Ppn(0)], Marking::None).unwrap();
    examine(&vms[0], 0..1).unwrap();
    assert_eq!(vms[0].state(0), State::Resident);
    // By another's.
    examine(&vms[1], 1..2).unwrap();
    assert_eq!([vms[0].state(1), vms[1].state(1)], [State::Resident; 2]);
    Vm::check_all(&site, &vms);
    // It stays, and is looked at again.
    vms[0].memory.set_leaving(false);
    examine(&vms[0], 0..2).unwrap();
    let states = [0, 1].map(|p| [vms[0].state(p), vms[1].state(p)]);
    assert_eq!(states, [[State::Shared; 2]; 2]);
    Vm::check_all(&site, &vms);
}

/// Hints of one hash are in one chain, which is walked whenever one of them goes.
#[test]
fn of_a_vm_one_page_of_each_kind_is_known() {
    let site = Site::new(1_100, 2);
    let mut vms = [Vm::at(&site, 1_000, 16, 1), Vm::at(&site, 3, 16, 1)];
    vms[0].ram.0.set_can_remap(false);
    for p in 0..1_000 {
        vms[0].access(p, Some(20));
    }
    examine(&vms[0], 0..1_000).unwrap();
    assert_eq!(site.domain.stats().hints, 1);
    // Again, after some have been of another kind.
    for p in 500..600 {
        vms[0].access(p, Some(p));
    }
    examine(&vms[0], 0..1_000).unwrap();
    assert_eq!(site.domain.stats().hints, 1 + 100);
    for p in 500..600 {
        vms[0].access(p, Some(20));
    }
    examine(&vms[0], 0..1_000).unwrap();
    assert_eq!(site.domain.stats().hints, 1);
    // One is enough to be found by.
    vms[0].ram.0.set_can_remap(true);
    vms[1].access(1, Some(20));
    examine(&vms[1], 1..2).unwrap();
    assert_eq!(vms[1].state(1), State::Shared);
    Vm::check_all(&site, &vms);
}

/// Only what is protected is passed over.
#[test]
fn a_page_that_could_not_be_protected_is_looked_at_again() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, 3, 16, 1);
    for p in 0..3 {
        vm.access(p, Some(20 + p));
    }
    // Three are read, then protected.
    vm.ram.0.fail_at(3, MemError::Again);
    examine(&vm, 0..3).unwrap();
    assert!(!(0..3).any(|p| vm.memory.is_unwritten(Ppn(p))));
    examine(&vm, 0..3).unwrap();
    assert!((0..3).all(|p| vm.memory.is_unwritten(Ppn(p)) && vm.ram.0.is_protected(p)));
}

/// A page that comes home out of the sample can be written unseen.
#[test]
fn a_page_that_was_marked_while_it_was_sampled_is_looked_at_again() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, 3, 16, 1);
    vm.access(0, Some(20));
    assert!(vm.memory.sample(Ppn(0)).unwrap());
    // By who had looked at it before.
    vm.memory.protect_unwritten(Ppn(0), 1).unwrap();
    assert!(vm.memory.is_unwritten(Ppn(0)));
    assert_eq!((vm.memory.unsample(Ppn(0)), vm.state(0)), (Ok(true), State::Resident));
    assert_eq!(vm.memory.is_unwritten(Ppn(0)), vm.ram.0.is_protected(0));
}

/// What was written since it was shared is shared again only when it has stood still; what came home unwritten, at once.
#[test]
fn what_came_home_for_it_was_written_has_to_rest_first() {
    let site = Site::new(60, 2);
    let mut vms = [Vm::at(&site, 4, 16, 1), Vm::at(&site, 4, 16, 1)];
    for vm in &mut vms {
        for p in 0..2 {
            vm.access(p, Some(30 + p));
        }
    }
    examine(&vms[0], 0..2).unwrap();
    examine(&vms[1], 0..2).unwrap();
    vms[0].access(0, Some(130));
    assert_eq!((vms[0].state(0), vms[0].state(1)), (State::Broken, State::Shared));
    assert_eq!(vms[0].memory.go_home(&[Ppn(0), Ppn(1)]), Ok(2));
    vms[0].access(0, Some(30));
    let after = |vms: &[Vm]| {
        examine(&vms[0], 0..2).unwrap();
        [vms[0].state(0), vms[0].state(1)]
    };
    assert_eq!(after(&vms), [State::Resident, State::Shared]);
    assert_eq!(after(&vms), [State::Shared, State::Shared]);
    Vm::check_all(&site, &vms);
}

/// The copy that the kernel made of a page while it was mapped elsewhere, and not protected yet, is the guest's: it costs what
/// its home did, and goes there.
#[test]
fn a_page_that_is_written_while_it_is_shared_is_charged_and_goes_home() {
    let site = Site::new(60, 2);
    let mut vms = [Vm::at(&site, 4, 16, 1), Vm::at(&site, 4, 16, 1)];
    for vm in &mut vms {
        for p in 0..3 {
            vm.access(p, Some(20 + p));
        }
    }
    examine(&vms[0], 0..3).unwrap();
    let before = vms[1].memory.charged();
    vms[1].ram.0.write_between(1, 99);
    examine(&vms[1], 0..3).unwrap();
    let states = [0, 1, 2].map(|p| vms[1].state(p));
    assert_eq!(states, [State::Shared, State::Broken, State::Shared]);
    assert_eq!(vms[1].memory.charged(), before - Pages(2));
    Vm::check_all(&site, &vms);
    assert_eq!((vms[1].access(1, None), vms[0].access(1, None)), (99, 21));
    assert_eq!(vms[1].memory.take_broken(9), [Ppn(1)]);
    assert_eq!(vms[1].memory.go_home(&[Ppn(1)]), Ok(1));
    assert_eq!((vms[1].state(1), vms[1].access(1, None)), (State::Resident, 99));
    Vm::check_all(&site, &vms);

    // Zeros as well: who never had a page has one then.
    let before = vms[1].memory.charged();
    vms[1].ram.0.write_between(3, 88);
    vms[1].memory.map_zeros(Ppn(3), 1).unwrap();
    assert_eq!((vms[1].state(3), vms[1].memory.charged()), (State::Broken, before + Pages(1)));
    assert_eq!(vms[1].access(3, None), 88);
    Vm::check_all(&site, &vms);
}

/// A VMM may read all of a store's file, and a hole that is read has memory that nobody booked.
#[test]
fn what_a_vmm_fills_of_the_store_is_given_back() {
    let site = Site::new(4000, 1);
    let mut vm = Vm::at(&site, 8, 16, 1);
    for p in 0..8 {
        vm.access(p, Some(7 + p / 2));
    }
    examine(&vm, 0..8).unwrap();
    assert_eq!((0..8).map(|p| vm.state(p)).collect::<Vec<_>>(), [State::Shared; 8]);
    assert_eq!(site.domain.trim().unwrap(), Pages::ZERO);
    let file = std::fs::File::options().write(true).open(site.domain.file().path()).unwrap();
    let (len, used) = (file.metadata().unwrap().len(), site.domain.measured());
    assert!(len <= 4 << 20, "no more of it can be filled: {len}");
    // Zeros, as a read of a mapping leaves them there.
    let from = 100 * PAGE_SIZE as u64;
    let zeros = vec![0; (len - from) as usize];
    std::os::unix::fs::FileExt::write_all_at(&file, &zeros, from).unwrap();
    assert_eq!(site.domain.measured().0, used.0 + len - from);
    assert_eq!(site.domain.trim().unwrap().bytes().0, len - from);
    assert_eq!(site.domain.measured(), used);
    for p in 0..8 {
        assert_eq!(vm.access(p, None), 7 + p / 2);
    }
    Vm::check_all(&site, std::slice::from_ref(&vm));
}

/// Where a copy cannot be told from what is mapped, what is mapped would be charged as the VM's own, whatever the budget: nothing
/// more is mapped, and what is there comes home.
#[test]
fn nothing_is_mapped_where_copies_are_not_seen() {
    nothing_is_mapped_once(|vm| vm.ram.0.set_sees_copies(false));
}

/// Nor where the kernel may unmap a page and then map no other.
#[test]
fn nothing_is_mapped_where_that_may_leave_a_hole() {
    nothing_is_mapped_once(|vm| vm.ram.0.set_may_leave_holes(true));
}

fn nothing_is_mapped_once(so: impl Fn(&Vm)) {
    let site = Site::new(20, 2);
    let mut vm = Vm::at(&site, 4, 16, 1);
    for p in 0..2 {
        vm.access(p, Some(7));
    }
    examine(&vm, 0..2).unwrap();
    assert_eq!([vm.state(0), vm.state(1)], [State::Shared; 2]);
    so(&vm);
    let charged = vm.memory.charged();
    assert_eq!(vm.memory.map_zeros(Ppn(3), 1), Ok(0));
    vm.access(2, Some(7));
    examine(&vm, 2..3).unwrap();
    assert_eq!((vm.state(2), vm.memory.charged()), (State::Resident, charged + Pages(1)));
    // Read, what was never written is its own at once.
    assert_eq!((vm.access(3, None), vm.state(3)), (0, State::Resident));
    assert_eq!(vm.memory.go_home(&[Ppn(0), Ppn(1)]), Ok(2));
    assert_eq!((vm.access(0, None), vm.access(1, None)), (7, 7));
    Vm::check_all(&site, std::slice::from_ref(&vm));
}

/// A guest that reads one page after another is looked through, by a migration perhaps: it is not given all of its memory for
/// that. One read by itself, and any write, gets a large page.
#[test]
fn reads_in_order_make_no_large_pages() {
    let site = Site::new(100, 1);
    let mut vm = Vm::at_with_large(&site, 32, 4, 1);
    let whole = |vm: &Vm| vm.memory.regions().whole().0;
    for (ppn, write, pages) in
        [(9, None, 4), (13, None, 4), (5, None, 8), (17, None, 12), (21, Some(1), 16)]
    {
        vm.access(ppn, write);
        assert_eq!(whole(&vm), pages, "ppn {ppn}");
    }
    assert_eq!(vm.state(13), State::Zero);
    vm.check_shared(&site);
}

#[test]
fn a_page_of_zeros_is_given_back_and_nothing_else_is() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, 3, 16, 1);
    for (p, token) in [(0, 0), (1, 5), (2, 0)] {
        vm.access(p, Some(token));
    }
    let (before, dropped) = (vm.memory.charged(), vm.memory.counters.values().zero_dropped);
    examine(&vm, 0..2).unwrap();
    let states = [0, 1, 2].map(|p| vm.state(p));
    assert_eq!(states, [State::Untouched, State::Resident, State::Resident]);
    assert_eq!(vm.memory.charged(), before - Pages(1));
    assert_eq!(vm.memory.counters.values().zero_dropped, dropped + 1);
    vm.check_shared(&site);
    assert_eq!([0, 1, 2].map(|p| vm.access(p, None)), [0, 5, 0]);
}

/// Pages 1 to 7; the others were never touched.
fn with_zeros() -> (Site, Vm) {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, 9, 16, 1);
    for (p, token) in [(1, 0), (2, 0), (3, 5), (4, 0), (5, 0), (6, 0), (7, 6)] {
        vm.access(p, Some(token));
    }
    (site, vm)
}

fn drop_zeros(vm: &Vm, first: u64, n: usize) -> Result<u64, MemError> {
    vm.memory.drop_zeros(Ppn(first), &mut vec![[0; PAGE_SIZE]; n])
}

/// Which of the pages are at home.
fn home(vm: &Vm) -> Vec<u64> {
    (0..9).filter(|&p| vm.state(p) == State::Resident).collect()
}

#[test]
fn neighbours_of_zeros_are_given_back_and_what_lies_between_them_is_not() {
    let (site, mut vm) = with_zeros();
    let (before, dropped) = (vm.memory.charged(), vm.memory.counters.values().zero_dropped);
    assert_eq!(drop_zeros(&vm, 0, 5), Ok(3));
    assert_eq!(home(&vm), [3, 5, 6, 7]);
    assert_eq!(drop_zeros(&vm, 0, 9), Ok(2));
    assert_eq!(home(&vm), [3, 7]);
    assert_eq!(vm.memory.charged(), before - Pages(5));
    assert_eq!(vm.memory.counters.values().zero_dropped, dropped + 5);
    vm.check_shared(&site);
    // What stayed can be written without a fault.
    assert!([3, 7].iter().all(|&p| vm.ram.0.try_access(p, Some(8)).is_ok()));
    assert_eq!([1, 2, 3, 4, 7].map(|p| vm.access(p, None)), [0, 0, 8, 0, 8]);
    vm.memory.let_pages_move(false);
    vm.access(1, Some(0));
    assert_eq!(drop_zeros(&vm, 0, 9), Ok(0));
}

/// At whatever step: the others go, what did not is at home, and is told of unless it will pass.
#[test]
fn neighbours_of_zeros_that_cannot_be_given_back_stay_at_home() {
    let other = || MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) };
    // Pages 1 to 6: all are protected (call 0), each is read; then 1 and 2 are freed (7), the protection of 3 is lifted,
    // and 4 to 6 are freed (9).
    for (error, result) in [(other(), Err(other())), (MemError::Again, Ok(0))] {
        for call in [0, 1, 6] {
            let (site, mut vm) = with_zeros();
            vm.ram.0.fail_at(call, error.clone());
            assert_eq!(drop_zeros(&vm, 1, 6), result, "call {call}");
            vm.check_shared(&site);
            vm.memory.check_quiet().unwrap();
            let (all, charged) = (Vec::from_iter(1..8), vm.memory.charged());
            assert_eq!((home(&vm), charged), (all, Pages(7)), "call {call}");
            assert_eq!([1, 3].map(|p| vm.access(p, None)), [0, 5]);
        }
    }
    // Where they are not freed together, each is for itself.
    for (alone, left, charged) in
        [(None, vec![3, 7], 2), (Some(10), vec![3, 4, 7], 3), (Some(12), vec![3, 6, 7], 3)]
    {
        let (site, vm) = with_zeros();
        vm.ram.0.fail_at(9, other());
        alone.iter().for_each(|&call| vm.ram.0.fail_also_at(call, other()));
        let result = drop_zeros(&vm, 1, 6);
        assert_eq!(result, if alone.is_some() { Ok(4) } else { Ok(5) }, "{alone:?}");
        assert_eq!((home(&vm), vm.memory.charged().0), (left, charged), "{alone:?}");
        vm.check_shared(&site);
    }
    // None of those that were to be freed together is: the others are gone all the same.
    let (site, vm) = with_zeros();
    vm.ram.0.fail_at(7, other());
    [8, 10].into_iter().for_each(|call| vm.ram.0.fail_also_at(call, other()));
    let dropped = vm.memory.counters.values().zero_dropped;
    assert_eq!(drop_zeros(&vm, 1, 6), Err(other()));
    assert_eq!((home(&vm), vm.memory.charged()), (vec![1, 2, 3, 7], Pages(4)));
    assert_eq!(vm.memory.counters.values().zero_dropped, dropped + 3);
    vm.check_shared(&site);
}

/// Nothing more is asked of a VMM that has no descriptor left for what is to be mapped, until it is looked at again.
#[test]
fn a_vmm_without_descriptors_is_asked_for_nothing_more() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, 6, 16, 1);
    let none = || MemError::Os { op: "test", ppn: Ppn(0), source: Errno(24) };
    for (p, token) in [(0, 5), (1, 5)] {
        vm.access(p, Some(token));
    }
    vm.ram.0.fail_at(0, none());
    assert_eq!(vm.memory.map_zeros(Ppn(3), 2), Ok(0));
    assert!(vm.memory.take_no_files() && !vm.memory.take_no_files());
    let calls = vm.ram.0.calls();
    assert_eq!(vm.memory.map_zeros(Ppn(3), 2), Ok(0));
    assert_eq!(vm.ram.0.calls(), calls, "it is not asked");
    examine(&vm, 0..2).unwrap();
    assert_eq!([0, 1].map(|p| vm.state(p)), [State::Resident; 2]);
    vm.check_shared(&site);
    vm.memory.allow_remaps(100, 100);
    assert_eq!(vm.memory.map_zeros(Ppn(3), 2), Ok(2));
    examine(&vm, 0..2).unwrap();
    assert_eq!([0, 1].map(|p| vm.state(p)), [State::Shared; 2]);
    vm.check_shared(&site);
}
