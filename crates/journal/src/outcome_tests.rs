use ballast_policy::{Snapshot, decide};
use serde_json::{Value, json};

use super::*;
use crate::support::{MIB, moment, snapshot, vm};

fn pages(mib: u64) -> Pages {
    Pages(mib * MIB)
}

struct Follow {
    tracker: Tracker,
    n: u64,
    state: State,
}

impl Follow {
    fn new() -> Follow {
        Follow { tracker: Tracker::default(), n: 0, state: State::High }
    }

    /// The next second, on a host of 400 MiB.
    fn turn(&mut self, vms: &[Value]) -> (Decision, Vec<Outcome>) {
        self.n += 1;
        let before = self.state;
        let decision = decide(Snapshot { before, ..snapshot("period", "high", 400, vms) });
        self.state = decision.state;
        let outcomes = self.tracker.observe(moment(self.n), &decision);
        (decision, outcomes)
    }
}

#[test]
fn reclamation_is_followed_until_what_is_left_is_no_more_than_was_asked() {
    let mut follow = Follow::new();
    assert_eq!(follow.turn(&[vm(1, 100, 50), vm(2, 200, 20)]).1, []);
    // 7 MiB free of 400: hard.
    let (asked, none) = follow.turn(&[vm(1, 193, 180), vm(2, 200, 20)]);
    assert_eq!((asked.state, none), (State::Hard, vec![]));
    let leave = asked.plans[1].leave;
    assert!(matches!(asked.plans[1].reason, Reason::Reclaim { .. }) && leave < pages(200));
    // Half way.
    assert_eq!(follow.turn(&[vm(1, 193, 180), vm(2, 192, 20)]).1, []);
    let open = follow.tracker.open_at(moment(follow.n));
    assert_eq!(open.len(), 2, "{open:?}");
    assert!(open.iter().all(|(_, aim)| aim.since == 2 && aim.for_ms == 1000), "{open:?}");
    let (_, ended) = follow.turn(&[vm(1, 193, 180), vm(2, 177, 20)]);
    let relief = Outcome {
        vm: None,
        aim: Aim::Relief { worst: State::Hard },
        since: 2,
        took_ms: 2000,
        now: pages(30),
        end: End::Reached,
    };
    let reclaim = Outcome {
        vm: Some(VmId(2)),
        aim: Aim::Reclaim { from: pages(200), leave },
        since: 2,
        took_ms: 2000,
        now: pages(177),
        end: End::Reached,
    };
    assert_eq!(ended, [relief, reclaim]);
    assert_eq!(follow.tracker.open_at(moment(follow.n)), []);
    assert_eq!(follow.turn(&[vm(1, 193, 180), vm(2, 177, 20)]).1, []);
}

#[test]
fn what_is_not_needed_any_more_is_dropped_and_who_leaves_is_gone() {
    let mut follow = Follow::new();
    follow.turn(&[vm(1, 190, 180), vm(2, 200, 20)]);
    // VM 1 gives up 60 MiB by itself: nothing more is asked of VM 2.
    let (_, ended) = follow.turn(&[vm(1, 130, 100), vm(2, 200, 20)]);
    let reclaim = ended.iter().find(|o| o.vm == Some(VmId(2))).unwrap();
    assert_eq!((reclaim.end, reclaim.now, reclaim.took_ms), (End::Dropped, pages(200), 1000));

    follow.turn(&[vm(1, 190, 180), vm(2, 200, 20)]);
    let (_, ended) = follow.turn(&[vm(1, 190, 180)]);
    assert!(ended.iter().any(|o| o.vm == Some(VmId(2)) && o.end == End::Gone), "{ended:?}");
    assert!(ended.iter().any(|o| o.vm.is_none() && o.end == End::Reached), "{ended:?}");
}

#[test]
fn a_blocked_vm_and_one_whose_balloon_is_let_down() {
    let mut follow = Follow::new();
    // Nothing is free: low, and both above their targets wait.
    let (low, _) = follow.turn(&[vm(1, 200, 180), vm(2, 200, 20)]);
    assert_eq!(low.state, State::Low);
    assert!(low.plans[1].block);
    let (_, ended) = follow.turn(&[vm(1, 180, 180), vm(2, 100, 20)]);
    let blocked: Vec<_> = ended.iter().filter(|o| o.aim == Aim::Block).collect();
    assert!(blocked.iter().all(|o| o.end == End::Reached && o.took_ms == 1000), "{ended:?}");
    assert!(blocked.iter().any(|o| o.vm == Some(VmId(2))));

    // It holds a balloon of 150 MiB, is entitled to more than that leaves it, and wants it.
    let mut follow = Follow::new();
    let mut small = vm(1, 100, 100);
    small["balloon_goal"] = json!(150 * MIB);
    small["wants_more"] = json!(true);
    let (gives, _) = follow.turn(&[small.clone()]);
    assert!(gives.plans[0].balloon_goal < gives.snapshot.vms[0].balloon_goal, "{gives:?}");
    let target = gives.results[0].target;
    let aims = follow.tracker.open_at(moment(1));
    assert_eq!(aims[0].1.aim, Aim::Grow { from: pages(100), target });
    small["balloon_goal"] = json!(0);
    assert_eq!(follow.turn(&[small.clone()]).1, []);
    small["consumed"] = json!(target.0);
    let (_, ended) = follow.turn(&[small]);
    assert_eq!((ended[0].end, ended[0].took_ms), (End::Reached, 2000));
}
