//! While the host is low, a VM at its target has what it wants for what it has.

use super::*;

/// At its target, while the host is low, a VM exchanges one page for another.
pub fn exchanges(manager: &Manager, step: impl Fn() -> u64) {
    let (target, stuck) = (manager.vm.memory().charged(), step());
    manager.vm.memory().set_target(target);
    let budget = manager.host.ledger.budget();
    // Without another turn: what compressed pages take may become more, or fewer, meanwhile.
    manager.vm.exchange_at(target, budget);
    wait_for("exchanges", || step() >= stuck + 64);
    let memory = manager.vm.memory();
    let at_home = memory.charged() - Pages(memory.tier().occupancy().frames);
    assert!(at_home <= target + Pages(1), "{at_home} pages, where {target} are granted");
    // What it has far above a target is for others to say.
    manager.vm.memory().set_target(Pages(8));
    manager.vm.exchange_at(Pages(8), budget);
    let evicted = manager.vm.memory().counters.values().evicted;
    std::thread::sleep(Duration::from_millis(50));
    // Those that leave together may have been on their way.
    assert!(manager.vm.memory().counters.values().evicted <= evicted + 8);
    manager.vm.hold_down_to(Pages::ZERO, Pages::ZERO, Pages::ZERO);
}

/// What compressed pages take becomes less as they come home: what is exchanged for them leaves all the same.
#[test]
fn at_its_target_a_vm_exchanges_compressed_pages_for_others_without_another_turn() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("squeeze", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let memory = manager.vm.memory();
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    // As far down as the tier is full: pages go on to swap to make room in it.
    let limit = memory.tier().settings().limit(Pages(SIZE)) + Pages(32);
    manager.vm.hold_down_to(Pages(SIZE), limit, Pages::ZERO);
    wait_for("a full tier", || memory.charged() <= limit);
    let frames = || Pages(memory.tier().occupancy().frames);
    assert!(!frames().is_zero());
    let target = memory.charged() - frames();
    memory.set_target(target);
    manager.host.set_low(true);
    manager.vm.exchange_at(target, manager.host.ledger.budget());
    let (away, before) = (SIZE - target.0, memory.counters.values().evicted);
    // It reads all of its pages.
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    // Each came home for another one.
    wait_for("its target", || memory.charged() <= target + frames());
    let evicted = memory.counters.values().evicted - before;
    assert!(evicted >= away, "{evicted} evicted for {away}");
    manager.host.set_low(false);
    manager.settle();
    manager.release(dir.path());
}
