//! Plans of VMs that share pages: what they consume is less than what they use.

use super::tests::{one, supply, vm};
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

/// 1,500 pages consumed, as many again saved by sharing.
fn halves() -> VmState {
    VmState { consumed: Pages(1_500), saved: Pages(1_500), balloon_limit: Pages(2_300), ..vm(1) }
}

#[test]
fn a_small_shortage_asks_a_balloon_for_little_though_much_is_shared() {
    let soft = |free: u64, vm: VmState| {
        let standing = [Standing { vm, target: Pages(1_000) }];
        plan(State::Soft, &supply(free), &[], &standing)[0]
    };
    let tools = Tools { grown: Pages(1_000), ..Tools::default() };
    let held = VmState { balloon_goal: Pages(1_000), tools, ..halves() };
    // One page of two is free when it is gone, so that 20 bring the 10 that are missing.
    let p = soft(640, held);
    assert_eq!((p.balloon_goal, p.evict, p.leave), (Pages(1_020), Pages(0), Pages(1_490)));
    // What it holds freed nothing, and what it is yet to bring is not relied upon.
    let vain = Tools { in_vain: Pages(1_000), unsaved: Pages(1_000), ..tools };
    let p = soft(640, VmState { tools: vain, saved: Pages(2_500), ..held });
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_020), Pages(10)));
    assert!(matches!(p.reason, Reason::Reclaim { cause: Some(EvictCause::BalloonInVain), .. }));
    // Where there is no room in swap, its balloon can bring 1,300 of the 3,000 that its guest has, and half of that is free.
    let full = VmState { swap_free: Pages(0), ..held };
    assert_eq!(full.fixed(), Pages(850));
    // One that is slow is late by what it was to bring before, not by what is shared.
    let slow = VmState { balloon_health: Health::Slow, balloon_goal: Pages(1_100), ..held };
    assert_eq!(soft(540, slow).evict, Pages(50));
}

/// Shared pages that a guest gives up are in no book but the balloon's.
#[test]
fn no_more_is_given_back_than_is_to_spare_though_much_was_given_up_in_vain() {
    let tools = Tools {
        grown: Pages(2_000),
        ballooned: Pages(1_400),
        in_vain: Pages(600),
        unsaved: Pages(600),
        ..Tools::default()
    };
    let mut vm = VmState {
        consumed: Pages(1_340),
        saved: Pages(1_260),
        balloon_goal: Pages(2_000),
        wants_more: true,
        tools,
        ..vm(1)
    };
    let mut turn = |grown: u64| {
        vm.tools.grown = Pages(grown);
        vm.balloon_goal = one(State::High, 828, vm).balloon_goal;
        vm.balloon_goal
    };
    assert_eq!(turn(2_000), Pages(1_900), "100 are to spare");
    // The balloon has followed, or not yet, and the guest has not touched what it got.
    assert_eq!((turn(2_000), turn(1_950), turn(1_900)), (Pages(1_900), Pages(1_900), Pages(1_900)));
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

/// What was given back is used at once, and QEMU says so a second later.
#[test]
fn a_balloon_that_was_let_down_is_not_asked_for_that_again_by_a_late_word() {
    let soft = |grown: u64| {
        let vm = VmState {
            balloon_goal: Pages(500),
            tools: Tools { grown: Pages(grown), ..Tools::default() },
            ..halves()
        };
        let standing = [Standing { vm, target: Pages(1_000) }];
        let p = plan(State::Soft, &supply(640), &[], &standing)[0];
        (p.balloon_goal, p.evict)
    };
    // Nor is that evicted which it is yet to bring.
    assert_eq!((soft(1_500), soft(500)), ((Pages(1_020), Pages(0)), (Pages(1_020), Pages(0))));
}

/// A guest whose free memory was found to be zeros, and taken: it saves nothing by them.
#[test]
fn zeros_in_a_balloon_are_none_of_what_is_saved() {
    let tools = Tools { grown: Pages(1_000), in_vain: Pages(1_000), ..Tools::default() };
    let vm = VmState { balloon_goal: Pages(1_000), tools, ..halves() };
    assert_eq!(vm.used(), Pages(3_000));
    let tools = Tools { unsaved: Pages(400), ..tools };
    assert_eq!(VmState { tools, ..vm }.used(), Pages(2_600));
}

/// A page of its guest that is given up frees half of one, however soon it comes.
#[test]
fn what_a_balloon_brings_in_time_counts_as_what_it_frees() {
    // 60 a second for ten seconds.
    let rate = Some(Pages(60));
    let slow = VmState { balloon_health: Health::Slow, balloon_rate: rate, ..halves() };
    let full = VmState { swap_free: Pages(0), ..slow };
    assert_eq!(full.fixed_for_now(), Pages(1_200));
    let tools = Tools { grown: Pages(1_000), ..Tools::default() };
    let healthy = VmState { balloon_rate: rate, balloon_goal: Pages(1_000), tools, ..halves() };
    let standing = [Standing { vm: healthy, target: Pages(1_000) }];
    let p = plan(State::Soft, &supply(250), &[], &standing)[0];
    // Of 400 that are missing its balloon brings 300 in time.
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_800), Pages(100)));
}
