//! A location that failed is tried again after a while, and used where that goes.

use super::*;

#[test]
fn a_location_that_fails_for_a_while_is_used_again_after_that() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [place, _] = two_places_with_rest(dir.path(), Duration::from_millis(50));
    SwapSpace::create_at(&place.path, Pages(SIZE)).unwrap();
    let swap = SwapSpace::open(std::slice::from_ref(&place)).unwrap();
    let rig = Rig::over("halves", dir.path(), swap, host(1), true);
    let failing = Arc::new(AtomicU64::new(1));
    let fails = failing.clone();
    rig.disk.follow(
        move |op| {
            if op.write && fails.load(Ordering::SeqCst) > 0 { ENOSPC } else { FINE }
        },
    );
    wait_for("the location to be given up", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        place.location.is_failed()
    });
    let errors = place.location.write_errors();
    wait_for("more tries", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        place.location.write_errors() > errors + 1
    });
    assert_eq!(rig.swapped(), 0);
    rig.pass(2);
    let retired = rig.vm().memory().swap_retired();
    failing.store(0, Ordering::SeqCst);
    wait_for("the location to be used again", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        rig.swapped() > SIZE / 2
    });
    assert!(!place.location.is_failed());
    // Of the first row alone, page by page: a location that has failed says nothing of its slots.
    assert!(retired.0 < 8 && rig.vm().memory().swap_retired() == retired, "{retired:?}");
    rig.pass(2);
    // It can be asked for what it has again.
    rig.vm().set_evict_goal(Pages(0));
    wait_for("room", || !rig.vm().swap_room().is_zero());
    rig.end();
}

/// A disk that fails may not answer either.
#[test]
fn a_try_of_a_failed_location_that_does_not_end_is_the_only_one_and_holds_up_nothing_else() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let places = two_places_with_rest(dir.path(), Duration::from_millis(50));
    for place in &places {
        SwapSpace::create_at(&place.path, Pages(SIZE)).unwrap();
    }
    let swap = SwapSpace::open(&places).unwrap();
    let rig = Rig::over("halves", dir.path(), swap, host(1), true);
    let [failing, sound] = places;
    let (tries, answers) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (at, counted, says) = (failing.clone(), tries.clone(), answers.clone());
    rig.disk.follow(move |op| {
        if !op.write || op.path != at.path {
            return FINE;
        }
        if !at.location.is_failed() || says.load(Ordering::SeqCst) > 0 {
            return ENOSPC;
        }
        counted.fetch_add(1, Ordering::SeqCst);
        Verdict { late: Duration::from_secs(12), ..ENOSPC }
    });
    wait_for("the location to be given up", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        failing.location.is_failed()
    });
    wait_for("a try", || {
        rig.vm().set_evict_goal(Pages(8));
        tries.load(Ordering::SeqCst) > 0
    });
    let used = || rig.vm().swap_places()[1].1.0;
    for _ in 0..10 {
        // Part of a cluster at a time, as a policy that asks for little does.
        rig.pass(2);
        let before = used();
        rig.vm().set_evict_goal(Pages(8));
        wait_for("pages to go to the sound one", || used() > before);
        std::thread::sleep(Duration::from_millis(60));
        assert!(rig.vm().swap_room().0 > 0);
    }
    assert_eq!((tries.load(Ordering::SeqCst), sound.location.write_errors()), (1, 0));
    answers.store(1, Ordering::SeqCst);
    rig.pass(2);
    rig.end();
}
