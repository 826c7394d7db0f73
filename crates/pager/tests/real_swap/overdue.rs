//! A disk that takes long to answer a read: the fault that waits for it is told, for as long as it waits.

use std::time::Duration;

use ballast_pager::service::Health;
use ballast_pager::swap::SwapSpace;
use ballast_pager::swap::inject::Verdict;
use ballast_units::{Pages, Ppn};

use super::vmm::{Cell, alone, wait_for};
use super::{FINE, PAGE, Rig, SIZE, VICTIM, host, touches};

#[test]
fn a_read_that_takes_long_is_told_until_it_ends_and_nobody_else_waits() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
    let rig = Rig::over("halves", dir.path(), swap, host(1), true);
    rig.swap_out(SIZE);
    let slot = rig.stored(VICTIM).slot.0;
    let late = Verdict { late: Duration::from_secs(15), ..FINE };
    rig.disk.follow(move |op| if touches(op, slot) { late } else { FINE });
    rig.begin_pass();
    wait_for("the other thread", || rig.passed(1));
    wait_for("word of it", || matches!(rig.vm().health(), Health::Overdue { .. }));
    let Health::Overdue { page, pages, waits_for, .. } = rig.vm().health() else { panic!() };
    assert_eq!((page, pages, waits_for), (Ppn(VICTIM), 1, "its page to be read from swap"));
    assert_eq!(rig.vmm.board.get(Cell::Accesses), VICTIM / 2, "it went on without the page");
    wait_for("the page", || rig.passed(2));
    wait_for("health", || rig.vm().health() == Health::Well);
    rig.end();
}

#[test]
fn a_slow_disk_holds_up_only_who_waits_for_it() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    rig.disk.follow(|op| {
        let late = if op.write { Duration::from_millis(30) } else { Duration::ZERO };
        Verdict { late, ..FINE }
    });
    rig.swap_out(SIZE);
    let slot = rig.stored(VICTIM).slot.0;
    // Longer than the others take together, on any machine.
    rig.disk.follow(move |op| {
        let late = if touches(op, slot) { 15_000 } else { (op.offset / PAGE) % 5 };
        Verdict { late: Duration::from_millis(late), ..FINE }
    });
    rig.begin_pass();
    wait_for("the other thread", || rig.passed(1));
    assert_eq!(rig.vmm.board.get(Cell::Accesses), VICTIM / 2, "it went on without the page");
    wait_for("the page", || rig.passed(2));
    wait_for("health", || rig.vm().health() == Health::Well);
    rig.end();
}
