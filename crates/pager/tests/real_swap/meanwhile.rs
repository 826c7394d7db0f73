//! While a disk is at work, or memory is waited for, what else there is to do is done.

use std::time::Instant;

use super::*;

#[test]
fn what_is_asked_for_while_a_write_takes_long_leaves_meanwhile() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("forward", dir.path());
    let late = Verdict { late: Duration::from_secs(15), ..FINE };
    let disk = rig.disk.clone();
    rig.disk.follow(move |op| if op.write && disk.writes() == 1 { late } else { FINE });
    let away = || {
        let pmap = rig.vm().memory().pmap();
        (pmap.in_state(State::Staged).0, pmap.in_state(State::Swapped).0)
    };
    let ask = |n: u64| {
        rig.vm().set_evict_goal(Pages(n));
        wait_for("eviction", || rig.vm().evict_goal().is_zero());
    };
    ask(4);
    wait_for("a write", || rig.disk.writes() == 1);
    // One by one: they wait together for the disk.
    (0..8).for_each(|_| ask(1));
    assert_eq!((away(), rig.disk.writes()), ((12, 0), 1));
    rig.all_written();
    assert_eq!((away(), rig.disk.writes()), ((0, 12), 2));
    rig.pass(1);
    rig.end();
}

/// All is swapped, and the guest reads it while there is no memory. Answers the budget that there was.
fn begin_pass_without_memory(rig: &Rig) -> Pages {
    rig.swap_out(SIZE);
    let ledger = &rig.host.ledger;
    let budget = ledger.budget();
    ledger.set_budget(ledger.used());
    rig.begin_pass();
    budget
}

fn end_pass_with(rig: &Rig, budget: Pages) {
    rig.host.ledger.set_budget(budget);
    rig.vm().memory_freed();
    wait_for("pass", || rig.passed(1));
}

#[test]
fn what_a_fault_wants_from_swap_is_read_while_it_waits_for_memory() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("forward", dir.path());
    let budget = begin_pass_without_memory(&rig);
    let counters = || rig.vm().memory().counters.values();
    wait_for("a fault that waits", || rig.vm().waiting() == 1 && counters().waits > 0);
    wait_for("a read", || counters().read_ahead > 0);
    assert_eq!(rig.vmm.board.get(Cell::Accesses), 0);
    end_pass_with(&rig, budget);
    assert!(counters().read_ahead_hits > 0);
    rig.end();
}

#[test]
fn what_cannot_be_read_meanwhile_is_not_read_over_and_over() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("forward", dir.path());
    rig.disk.follow(|op| if op.write { FINE } else { EIO });
    let begun = Instant::now();
    let budget = begin_pass_without_memory(&rig);
    let errors = || rig.vm().swap_places()[0].0.location.read_errors();
    wait_for("a read that fails", || rig.vm().waiting() == 1 && errors() > 0);
    // It waits for memory all the while, and is tried again each 2 ms; what failed, not before 2 s have passed.
    std::thread::sleep(Duration::from_millis(200));
    let after = errors();
    let most = 3 * (1 + begun.elapsed().as_secs() / 2);
    println!("{after} reads failed");
    assert!(after <= most, "{after} of {most}");
    rig.disk.follow(|_| FINE);
    end_pass_with(&rig, budget);
    rig.end();
}
