//! A stage that is full of pages which cannot be written keeps what needs no slot of swap from leaving.

use super::*;

/// The disk fails once all of the stage is on its way to it, and memory is short enough that nothing comes home unasked.
#[test]
fn a_stage_full_of_what_cannot_be_written_is_cleared_for_what_compresses() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (config, host) = half_may_be_compressed(|| {});
    host.set_plenty(Pages(4 * SIZE));
    let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
    let rig = Rig::with(config, "mixed", dir.path(), swap, host, true);
    let late = Verdict { late: Duration::from_millis(300), ..EIO };
    rig.disk.follow(move |op| if op.write { late } else { FINE });
    let tier = || rig.vm().memory().tier().occupancy();
    wait_for("what compresses to leave", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        rig.vm().swap_places()[0].0.location.is_failed() && tier().pages > SIZE / 4
    });
    wait_for("the goal to be given up", || rig.vm().evict_goal().is_zero());
    wait_for("an empty stage", || rig.vm().memory().pmap().in_state(State::Staged).is_zero());
    assert_eq!(rig.swapped(), 0);
    rig.pass(1);
    rig.end();
}

/// A disk that does not answer is no room, as long as it does not; the policy counts on others.
#[test]
fn a_disk_that_does_not_answer_is_no_room() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    let (ask, answered) = (Arc::new(AtomicU64::new(1)), Duration::from_millis(1));
    let hangs = ask.clone();
    rig.disk.follow(move |op| {
        let long = op.write && hangs.load(Ordering::SeqCst) > 0;
        Verdict { late: if long { Duration::from_secs(14) } else { answered }, ..FINE }
    });
    rig.vm().set_evict_goal(Pages(SIZE));
    assert!(!rig.vm().swap_room().is_zero());
    wait_for("it to be seen", || rig.vm().swap_room().is_zero());
    ask.store(0, Ordering::SeqCst);
    wait_for("an answer", || !rig.vm().swap_room().is_zero());
    rig.swap_out(SIZE);
    rig.pass(2);
    rig.end();
}
