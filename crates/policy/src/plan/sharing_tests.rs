//! Plans of VMs that share pages: what they consume is less than what they use.

use super::tests::{one, vm};
use super::*;
use crate::tools::Tools;

/// Pages that others share: their guest has given them up, and they are in the store as before.
#[test]
fn what_a_balloon_holds_and_did_not_free_is_evicted() {
    let held = |grown: u64| VmState {
        balloon_goal: Pages(1_300),
        tools: Tools { grown: Pages(grown), ..Tools::default() },
        ..vm(1)
    };
    // 300 are missing, and 1,300 asked for: of these, that many are yet to come.
    for (grown, in_vain) in [(0, 0), (1_000, 0), (1_200, 200), (1_300, 300), (1_400, 300)] {
        let p = one(State::Soft, 350, held(grown));
        assert_eq!(
            (p.balloon_goal, p.evict, p.leave),
            (Pages(1_300), Pages(in_vain), Pages(2_700))
        );
        let told = match p.reason {
            Reason::Reclaim { cause, .. } => cause,
            other => panic!("{other:?}"),
        };
        assert_eq!(told, (in_vain > 0).then_some(EvictCause::BalloonInVain), "{grown}");
    }
    // What its guest bears no more of is told as such, where it frees what it holds.
    let p = one(State::Soft, 350, VmState { balloon_limit: Pages(1_000), ..held(1_000) });
    assert_eq!(p.evict, Pages(300));
    assert!(matches!(p.reason, Reason::Reclaim { cause: Some(EvictCause::BalloonLimit), .. }));
}

/// A guest that shares uses its pages, though it consumes less than its balloon leaves it.
#[test]
fn the_balloon_of_one_that_shares_is_let_down_with_memory_to_spare() {
    let shares = |saved: u64| VmState {
        consumed: Pages(1_150),
        balloon_goal: Pages(2_100),
        wants_more: true,
        saved: Pages(saved),
        ..vm(1)
    };
    let left = |saved: u64, free: u64| one(State::High, free, shares(saved)).balloon_goal;
    // 1,400 less 650 and a margin of 78 are to spare; it is entitled to 2,000.
    assert_eq!(left(0, 1_400), Pages(2_000));
    assert_eq!(left(900, 1_400), Pages(2_000 - 672));
    assert_eq!(left(900, 700), Pages(2_000), "nothing is to spare");
}
