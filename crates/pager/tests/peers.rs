//! What VMs of one domain have to do with one another.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::memory::{Access, Unbooked};
use ballast_pager::service::serve::Serve;
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use support::site::Site;
use support::vm::Vm;

const PAGES: u64 = 8;

fn examine(examiner: &mut Examiner, vm: &Vm) {
    let pages: Vec<Ppn> = (0..PAGES).map(Ppn).collect();
    examiner.examine(&vm.memory, &pages, Marking::None).unwrap();
}

#[test]
fn two_of_a_kind_are_found_where_the_one_that_was_known_has_left() {
    for examiner in [Examiner::default, Examiner::to_itself] {
        let site = Site::new(60, 1);
        let mut vms = vec![Vm::at(&site, PAGES, 16, 1)];
        let mut examiner = examiner();
        vms[0].access(0, Some(7));
        examine(&mut examiner, &vms[0]);
        vms[0].evict(0).unwrap();
        for p in 1..3 {
            vms[0].access(p, Some(7));
        }
        examine(&mut examiner, &vms[0]);
        assert_eq!([1, 2].map(|p| vms[0].state(p)), [State::Shared; 2]);
        Vm::check_all(&site, &vms);
    }
}

#[test]
fn who_keeps_to_itself_joins_what_is_common_and_makes_nobody_elses_page_so() {
    let site = Site::new(60, 2);
    let mut vms: Vec<Vm> = (0..2).map(|_| Vm::at(&site, PAGES, 16, 1)).collect();
    let (mut all, mut own) = (Examiner::default(), Examiner::to_itself());
    vms[0].access(0, Some(7));
    for p in 0..2 {
        vms[1].access(p, Some(7));
    }
    vms[1].access(2, Some(9));
    vms[1].access(3, Some(8));
    vms[1].access(6, Some(9));
    examine(&mut all, &vms[0]);
    examine(&mut own, &vms[1]);
    use State::{Resident, Shared};
    let states = |vm: &Vm| [0, 1, 2, 3].map(|p| vm.state(p));
    assert_eq!(vms[0].state(0), Resident, "waited for another VM");
    // What is equal among its own pages it shares, whoever else is known to have it.
    assert_eq!(states(&vms[1]), [Shared, Shared, Shared, Resident]);
    // What is common it joins; what another one has is left for that one, or for who waits for it.
    vms[0].access(1, Some(9));
    vms[1].access(4, Some(7));
    vms[1].access(5, Some(6));
    vms[0].access(2, Some(6));
    examine(&mut own, &vms[0]);
    assert_eq!([0, 1, 2].map(|p| vms[0].state(p)), [Shared, Shared, Resident]);
    examine(&mut own, &vms[1]);
    assert_eq!((vms[1].state(4), vms[1].state(5)), (Shared, Resident));
    examine(&mut all, &vms[0]);
    assert_eq!((vms[0].state(2), vms[1].state(5)), (Shared, Shared));
    assert_eq!(site.domain.stats().common, Pages(3));
    Vm::check_all(&site, &vms);
}

#[test]
fn a_member_that_ended_without_leaving_gives_its_numbers_back() {
    let site = Site::new(60, 3);
    let first = Vm::at(&site, PAGES, 16, 1);
    for _ in 0..3 {
        let mut ended = Vm::at(&site, PAGES, 16, 1);
        ended.access(0, Some(5));
        examine(&mut Examiner::default(), &ended);
        assert_eq!(ended.memory.membership().unwrap().base, PAGES as u32);
        assert_eq!(site.domain.stats().hints, 1, "hints of who ended before");
    }
    assert_eq!(site.domain.members(), 1);
    drop(first);
}

#[test]
fn what_a_takeover_could_not_book_is_booked_later() {
    let site = Site::new(60, 1);
    let mut vm = Vm::at(&site, PAGES, 16, 1);
    vm.access(1, Some(5));
    vm.ram.0.vmm_punch(1, 1);
    let (mut serve, mark) = (Serve::default(), vm.memory.mark());
    serve.resume(Unbooked { busy: vec![(Ppn(1), 1)], present: Vec::new() }, mark);
    let mut tasks = Vec::new();
    serve.fault(&vm.memory, Ppn(1), Access::Missing, &mut tasks);
    assert_eq!(serve.pending().faults(), 1, "served before the discard that came first");
    serve.retry(&vm.memory, &mut tasks);
    assert_eq!(serve.pending().discards(), 0);
    assert_eq!(vm.access(1, None), 0);
}
