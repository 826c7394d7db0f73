//! What replacement learns from pages that come home, on a double.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use ballast_pager::memory::Access;
use ballast_pager::word::State;
use ballast_units::Ppn;
use support::vm::{LARGE, Vm};

#[test]
fn a_page_was_missed_if_its_guest_waited_for_it_while_it_was_still_at_hand() {
    const PAGES: u64 = 400;
    let mut vm = Vm::new(PAGES, 2 * PAGES, PAGES, 1);
    for p in 0..PAGES {
        vm.access(p, Some(LARGE + p));
    }
    let missed = |vm: &Vm| (0..PAGES).filter(|&p| vm.memory.was_missed(Ppn(p))).collect::<Vec<_>>();
    // Far from one another: none comes home as another's neighbour.
    vm.compress(0).unwrap();
    vm.evict(100).unwrap();
    assert_eq!(missed(&vm), [0; 0], "away is not missed");
    vm.access(0, None);
    vm.access(100, None);
    assert_eq!(missed(&vm), [0, 100], "from the tier, and from the stage");
    vm.evict(200).unwrap();
    vm.write_cluster();
    assert_eq!(vm.state(200), State::Swapped);
    vm.access(200, None);
    assert_eq!(missed(&vm), [0, 100], "whoever comes from swap was away for long");

    // One that is out of its home for a sample has not left.
    assert!(vm.memory.sample(Ppn(300)).unwrap());
    vm.fault(300, Access::Missing).unwrap();
    assert_eq!(missed(&vm), [0, 100]);

    // What it was told lasts until it leaves again, or is told to forget.
    vm.evict(0).unwrap();
    vm.memory.forget_missed(Ppn(100));
    assert_eq!(missed(&vm), [0; 0]);
    vm.check();
}
