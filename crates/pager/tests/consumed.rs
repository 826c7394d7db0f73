//! What a VM consumes of the pages that it shares.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use support::site::Site;
use support::vm::Vm;

/// What is charged, and the part of the common pages.
fn consumed(vm: &Vm) -> (Pages, Pages) {
    (vm.memory.charged(), vm.memory.shared_part())
}

#[test]
fn a_copy_has_a_part_of_a_common_page_while_it_refers_to_one() {
    let site = Site::new(60, 2);
    let mut vms: Vec<Vm> = (0..2).map(|_| Vm::at(&site, 8, 16, 1)).collect();
    for p in [0, 1] {
        vms[1].access(p, Some(7));
    }
    Examiner::default().examine(&vms[1].memory, &[Ppn(0), Ppn(1)], Marking::None).unwrap();
    assert_eq!([0, 1].map(|p| vms[1].state(p)), [State::Shared; 2]);
    assert_eq!(consumed(&vms[1]), (Pages(0), Pages(1)));

    // Copies of the zeros have no part in what others share.
    for p in [4, 5] {
        assert_eq!(vms[0].access(p, None), 0);
        vms[0].access(p, Some(p));
    }
    assert_eq!([4, 5].map(|p| vms[0].state(p)), [State::Broken; 2]);
    assert_eq!(consumed(&vms[0]), (Pages(2), Pages(0)));

    // Both pages are there until the copy goes home.
    vms[1].access(1, Some(8));
    assert_eq!(vms[1].state(1), State::Broken);
    assert_eq!(consumed(&vms[1]), (Pages(1), Pages(1)));
    assert_eq!(vms[1].memory.go_home(&[Ppn(1)]), Ok(1));
    assert_eq!(consumed(&vms[1]), (Pages(1), Pages(1)));
    Vm::check_all(&site, &vms);
}
