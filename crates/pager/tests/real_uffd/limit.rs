//! A VM that gives up pages for something else stays within its limit.

use super::*;

#[test]
fn what_a_vm_gives_up_for_others_does_not_free_it_of_its_limit() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("touch", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let charged = || manager.vm.memory().charged();
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    let [leave, limit] = [SIZE / 4, SIZE / 2].map(Pages);
    manager.vm.evict_within(Pages(SIZE), leave, limit);
    wait_for("eviction", || manager.vm.evict_goal().is_zero());
    assert_eq!(charged(), leave);
    // It looks at all of its pages, with more memory free than they are.
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    wait_for("its limit", || manager.vm.evict_goal().is_zero() && charged() < limit + Pages(64));
    assert!(charged() > limit - Pages(64), "{} pages, of {limit} that it may have", charged());
    manager.vm.hold_down_to(Pages::ZERO, Pages::ZERO, Pages::ZERO);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    manager.settle();
    manager.release(dir.path());
}
