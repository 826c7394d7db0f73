//! Where much leaves at once, and swap was seen to be near, it goes past the tier of compressed pages.

use super::*;

#[test]
fn what_leaves_at_once_goes_to_swap_once_that_is_known_to_be_near() {
    let Some(_alone) = alone() else { return };
    for late in [Duration::ZERO, Duration::from_millis(4)] {
        let dir = tempfile::tempdir().unwrap();
        let (config, host) = half_may_be_compressed(|| {});
        let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE + 64)).unwrap();
        let rig = Rig::with(config, "mixed", dir.path(), swap, host, true);
        rig.disk.follow(move |op| if op.write { FINE } else { Verdict { late, ..FINE } });
        let counters = || rig.vm().memory().counters.values();
        let all_leave = || {
            rig.vm().set_evict_goal(Pages(SIZE));
            wait_for("all to leave", || rig.vm().evict_goal().is_zero());
            let staged = || rig.vm().memory().pmap().in_state(State::Staged);
            wait_for("what is on its way", || staged().is_zero());
        };
        all_leave();
        let first = counters().compressed;
        assert!(first > SIZE / 4, "before it is known: {first}");
        rig.pass(1);
        assert!(counters().swap_ins > 64);
        let (reads, ns) = rig.vm().memory().counters.disk_reads();
        if late.is_zero() && ns / reads >= 1_000_000 {
            eprintln!("SKIPPED: no swap is near here: a read takes {} us", ns / reads / 1000);
            rig.end();
            continue;
        }
        // It is looked at once a second.
        std::thread::sleep(Duration::from_millis(1_100));
        all_leave();
        let second = counters().compressed - first;
        println!("{late:?} late: {first} compressed, and {second}");
        // What is not chosen by age is compressed as ever.
        let as_ever = first - first / 8;
        assert!(if late.is_zero() { second < first / 2 } else { second > as_ever }, "{second}");
        rig.pass(1);
        rig.end();
    }
}
