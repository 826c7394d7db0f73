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
    rig.end();
}
