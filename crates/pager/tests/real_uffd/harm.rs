//! VMMs that mean harm: none of them harms anybody else.

use super::*;

#[test]
fn a_vmm_that_truncates_its_ram_harms_only_itself() {
    let Some(_alone) = alone() else { return };
    let (dir, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut vmm = Vmm::start("truncate", SIZE);
    let manager = start(&vmm, dir.path(), ROOM + SIZE + overhead().0);
    wait_for("truncation", || vmm.board.get(Cell::Step) == 1);
    manager.drive(&vmm, Duration::from_millis(300), || false);
    wait_for("eviction to notice", || {
        // As the policy does: again and again. Once is too early if the page is not booked yet.
        manager.vm.set_evict_goal(Pages(100));
        manager.vm.health() != Health::Well
    });
    // Another VM of the same host has what it needs, gives it up, and has it back, meanwhile and when that one is gone.
    assert!(manager.host.ledger.try_reserve(overhead()));
    let other = Vmm::start("touch", SIZE);
    let good = start_on(manager.host.clone(), &other, beside.path());
    wait_for("all pages", || other.board.get(Cell::Step) == SIZE);
    let evict = || {
        good.vm.set_evict_goal(Pages(SIZE / 2));
        wait_for("eviction", || good.vm.evict_goal().is_zero());
    };
    evict();
    for ppn in 0..SIZE {
        other.board.set(Cell::Wanted, ppn + 1);
        wait_for("a page to be read", || other.board.get(Cell::Wanted) == 0);
    }
    assert_ne!(manager.vm.health(), Health::Well);
    evict();
    vmm.kill();
    manager.vm.release();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
    other.board.set(Cell::Stop, 1);
    wait_for("verification", || other.board.get(Cell::Done) == 1);
    assert_eq!(other.board.get(Cell::Errors), 0);
    assert_eq!(good.vm.health(), Health::Well);
    good.settle();
    // With the books of both.
    good.release(beside.path());
}

#[test]
fn a_vmm_that_seals_its_ram_keeps_its_pages() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("seal", SIZE);
    let manager = start(&vmm, dir.path(), ROOM);
    wait_for("seal", || vmm.board.get(Cell::Step) == 1);
    wait_for("eviction to notice", || {
        // As the policy does: again and again. Once is too early if the page is not booked yet.
        manager.vm.set_evict_goal(Pages(100));
        manager.vm.health() != Health::Well
    });
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    manager.release(dir.path());
}

#[test]
fn a_vmm_that_makes_its_userfaultfd_blocking_does_not_hang_the_manager() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("block", SIZE);
    let manager = start(&vmm, dir.path(), ROOM);
    wait_for("fault served", || vmm.board.get(Cell::Step) == 1);
    manager.release(dir.path());
}

#[test]
fn a_vmm_that_announces_all_of_its_pages_and_keeps_them_waits_for_its_own_sake() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("announce", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let told = || match manager.vm.health() {
        Health::Ill { last, .. } => last,
        _ => String::new(),
    };
    wait_for("rest", || told().contains("given up stay"));
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    assert_eq!(manager.vm.memory().charged(), Pages(SIZE));
    manager.settle();
    manager.release(dir.path());
}
