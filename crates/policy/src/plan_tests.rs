use ballast_units::VmId;
use proptest::prelude::*;

use super::*;
use crate::shares::TaxRate;
use crate::tools::{Cost, Tool};

const BUDGET: Pages = Pages(10_000);
const SIZE: Pages = Pages(4_000);

/// A VM of 4,000 pages that holds 3,000 of them and is entitled to 2,000, with a good balloon.
pub(super) fn vm(id: u32) -> VmState {
    VmState {
        demand: VmDemand {
            id: VmId(id),
            shares: 1_000,
            min: Pages(500),
            max: SIZE,
            tax: TaxRate::default(),
            active: Pages(1_000),
        },
        consumed: Pages(3_000),
        size: SIZE,
        balloon_goal: Pages::ZERO,
        balloon_health: Health::Healthy,
        balloon_limit: Pages(2_600),
        balloon_rate: None,
        short: false,
        wants_more: false,
        swap_free: Pages(4_000),
        pool: None,
        overhead: Pages::ZERO,
        beyond: Pages::ZERO,
        tools: Tools::default(),
        saved: Pages::ZERO,
    }
}

fn thresholds() -> Thresholds {
    Thresholds::default_for(BUDGET) // 600, 400, 200, 100; goal 650
}

pub(super) fn supply(free: u64) -> Supply {
    let (budget, thresholds) = (BUDGET, thresholds());
    Supply { free: Pages(free), budget, thresholds, room: Pages::ZERO }
}

fn run(state: State, free: u64, vms: &[VmState]) -> Vec<VmPlan> {
    let vms: Vec<Standing> = vms.iter().map(|&vm| Standing { vm, target: Pages(2_000) }).collect();
    plan(state, &supply(free), &[], &vms)
}

pub(super) fn one(state: State, free: u64, vm: VmState) -> VmPlan {
    run(state, free, &[vm])[0]
}

#[test]
fn high_takes_nothing_even_below_the_goal() {
    let p = one(State::High, 410, vm(1));
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(0), Pages(0), false));
    assert!(matches!(p.reason, Reason::Plenty { .. }));
}

/// It has the dearest pages, and can give none: no room for them, and its guest bears no larger balloon, or has none.
#[test]
fn what_one_cannot_give_is_asked_of_the_others() {
    let healths = [Health::Healthy, Health::Slow, Health::Stuck, Health::Missing];
    for (health, state) in
        healths.into_iter().zip([State::Soft, State::Hard, State::Low, State::Low])
    {
        let limit = if health == Health::Healthy { Pages(250) } else { Pages::ZERO };
        let fixed = VmState {
            consumed: Pages(3_750),
            swap_free: Pages::ZERO,
            balloon_goal: limit,
            balloon_limit: limit,
            balloon_health: health,
            ..vm(1)
        };
        let gives = VmState { balloon_health: Health::Missing, ..vm(2) };
        let standing = [fixed, gives].map(|vm| Standing { vm, target: Pages(2_500) });
        let plans = plan(state, &supply(50), &[], &standing);
        assert_eq!((plans[0].evict, plans[1].evict), (Pages::ZERO, Pages(500)), "{health:?}");
        assert_eq!(plans[1].leave, Pages(2_500));
        // Nor does what is above its max, and stays there, count as coming.
        let mut limited = standing;
        limited[0].vm.demand.max = Pages(2_500);
        assert_eq!(plan(state, &supply(50), &[], &limited)[1].evict, Pages(500), "{health:?}");
        // A part that it can give is asked of it first.
        let mut some = standing;
        some[0].vm.swap_free = Pages(400);
        let plans = plan(state, &supply(50), &[], &some);
        assert_eq!((plans[0].evict, plans[1].evict), (Pages(400), Pages(200)), "{health:?}");
    }
}

/// Also what a pool has too much of, with memory to spare.
#[test]
fn what_one_of_a_pool_cannot_give_is_asked_of_its_siblings() {
    let pool = Pool {
        id: PoolId(0),
        name: "p".into(),
        parent: None,
        shares: 1_000,
        min: Pages::ZERO,
        max: Some(Pages(5_000)),
        expandable: false,
        tax: None,
    };
    let all = VmState { pool: Some(PoolId(0)), balloon_health: Health::Missing, ..vm(1) };
    let fixed = VmState { consumed: Pages(3_500), swap_free: Pages::ZERO, ..all };
    let mut gives = VmState { consumed: Pages(2_500), ..all };
    gives.demand.id = VmId(2);
    let standing =
        [(fixed, 2_500), (gives, 1_500)].map(|(vm, target)| Standing { vm, target: Pages(target) });
    let plans = plan(State::High, &supply(5_000), &[pool], &standing);
    assert_eq!((plans[0].evict, plans[1].evict), (Pages::ZERO, Pages(1_000)), "{plans:?}");
}

/// One page in ten seconds is a sign of life, and no memory. There is no room for its pages.
#[test]
fn what_a_slow_balloon_does_not_bring_in_time_is_asked_of_the_others() {
    for (rate, of_others) in [(None, 500), (Some(0), 500), (Some(20), 400), (Some(1_000), 0)] {
        let slow = VmState {
            consumed: Pages(3_750),
            swap_free: Pages::ZERO,
            balloon_health: Health::Slow,
            balloon_rate: rate.map(Pages),
            ..vm(1)
        };
        let gives = VmState { balloon_health: Health::Missing, ..vm(2) };
        assert_eq!(slow.fixed(), Pages(1_400), "what it may have in the end is another thing");
        let standing = [slow, gives].map(|vm| Standing { vm, target: Pages(2_500) });
        let plans = plan(State::Low, &supply(50), &[], &standing);
        assert_eq!(plans[1].evict, Pages(of_others), "{rate:?}");
    }
}

/// 650 are the goal, 400 the soft threshold. A start needs 500 more.
#[test]
fn room_for_a_start_is_made_in_plenty_without_blocking_anyone() {
    let with = |free: u64, room: u64, vm: VmState| {
        let standing = [Standing { vm, target: Pages(2_000) }];
        plan(State::High, &Supply { room: Pages(room), ..supply(free) }, &[], &standing)[0]
    };
    // 900 would do; there are 800: up to the goal beside it, 350 are taken.
    let p = with(800, 500, vm(1));
    assert_eq!(
        (p.leave, p.balloon_goal, p.evict, p.block),
        (Pages(2_650), Pages(1_350), Pages(0), false)
    );
    let p = with(800, 500, VmState { balloon_health: Health::Missing, ..vm(1) });
    assert_eq!((p.leave, p.evict, p.block), (Pages(2_650), Pages(350), false));
    let p = with(900, 500, vm(1));
    assert!(matches!(p.reason, Reason::Plenty { .. }), "{p:?}");
    // However much is wanted, it is not taken below what the VM is entitled to.
    let p = with(500, 5_000, vm(1));
    assert_eq!((p.leave, p.balloon_goal), (Pages(2_000), Pages(2_000)));
    // And nothing is given back that is about to be needed.
    let ballooned =
        VmState { balloon_goal: Pages(1_500), consumed: Pages(2_500), wants_more: true, ..vm(1) };
    assert_eq!(with(2_000, 1_400, ballooned).balloon_goal, Pages(1_500));
    assert!(with(2_000, 0, ballooned).balloon_goal < Pages(1_500));
}

#[test]
fn soft_asks_the_balloon_for_the_deficit() {
    // 650 - 350 = 300 are missing: of 3,000 pages 2,700 are to be left, so 1,300 in the balloon.
    let p = one(State::Soft, 350, vm(1));
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(1_300), Pages(0), false));
    assert!(matches!(p.reason, Reason::Reclaim { cause: None, .. }));
    // Half of it has come: the same goal is asked again, not more.
    let on_the_way = VmState { balloon_goal: Pages(1_300), consumed: Pages(2_850), ..vm(1) };
    assert_eq!(one(State::Soft, 500, on_the_way).balloon_goal, Pages(1_300));
}

#[test]
fn soft_pages_only_where_ballooning_is_not_possible() {
    for (health, cause) in
        [(Health::Missing, EvictCause::NoBalloon), (Health::Stuck, EvictCause::BalloonStuck)]
    {
        let p = one(State::Soft, 350, VmState { balloon_health: health, ..vm(1) });
        assert_eq!((p.balloon_goal, p.evict), (Pages(0), Pages(300)));
        assert!(matches!(p.reason, Reason::Reclaim { cause: Some(c), .. } if c == cause));
    }
    // The guest bears 1,100: 2,900 can be left by the balloon, 200 must be evicted.
    let p = one(State::Soft, 350, VmState { balloon_limit: Pages(1_100), ..vm(1) });
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_100), Pages(200)));
    assert!(matches!(p.reason, Reason::Reclaim { cause: Some(EvictCause::BalloonLimit), .. }));
    // It bears 500: what the VM never used. No page comes of it.
    let p = one(State::Soft, 350, VmState { balloon_limit: Pages(500), ..vm(1) });
    assert_eq!((p.balloon_goal, p.evict), (Pages(500), Pages(300)));
}

#[test]
fn a_slow_balloon_gets_its_part_and_eviction_the_shortfall() {
    let slow = VmState { balloon_health: Health::Slow, ..vm(1) };
    // Newly asked: the balloon has its chance.
    let p = one(State::Soft, 350, slow);
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_300), Pages(0)));
    // Asked before for all of it, and 120 are still to come.
    let late = VmState { balloon_goal: Pages(1_120), ..slow };
    let p = one(State::Soft, 350, late);
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_300), Pages(120)));
}

/// 300 are missing. At 20 pages a second 200 come in time.
#[test]
fn what_a_balloon_is_known_to_be_too_slow_for_is_evicted_at_once() {
    let with =
        |rate: u64| one(State::Soft, 350, VmState { balloon_rate: Some(Pages(rate)), ..vm(1) });
    let p = with(20);
    assert_eq!((p.balloon_goal, p.evict), (Pages(1_300), Pages(100)));
    assert!(matches!(p.reason, Reason::Reclaim { cause: Some(EvictCause::BalloonLate), .. }));
    assert_eq!(with(30).evict, Pages(0));
    assert_eq!(with(0).evict, Pages(300));
    // With what the guest does not bear, no more than all of it.
    let both = VmState { balloon_limit: Pages(1_100), balloon_rate: Some(Pages(4)), ..vm(1) };
    assert_eq!(one(State::Soft, 350, both).evict, Pages(200 + 60));
}

#[test]
fn a_guest_in_distress_is_helped_before_others() {
    // 100 pages above the goal and the margin: with equal rho the lower number would get them.
    let ballooned = |id: u32, short: bool| VmState {
        balloon_goal: Pages(1_500),
        consumed: Pages(2_500),
        wants_more: true,
        short,
        ..vm(id)
    };
    let goals = |one: bool, two: bool| -> Vec<u64> {
        let plans = run(State::High, 828, &[ballooned(1, one), ballooned(2, two)]);
        plans.iter().map(|p| p.balloon_goal.0).collect()
    };
    assert_eq!(goals(false, false), [1_450, 1_450]);
    assert_eq!(goals(false, true), [1_500, 1_400]);
    assert_eq!(goals(true, true), [1_450, 1_450]);
}

#[test]
fn hard_evicts_the_whole_deficit_and_low_blocks_too() {
    let p = one(State::Hard, 150, vm(1));
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(1_500), Pages(500), false));
    let p = one(State::Low, 50, vm(1));
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(1_600), Pages(600), true));
    let within = VmState { consumed: Pages(2_000), ..vm(2) };
    let plans = run(State::Low, 50, &[vm(1), within]);
    assert!(plans[0].block && !plans[1].block);
    assert_eq!(plans[1].evict, Pages(0));
}

#[test]
fn nothing_is_taken_below_target_or_min() {
    let p = one(State::Low, 0, VmState { consumed: Pages(2_100), ..vm(1) });
    assert_eq!((p.evict, p.balloon_goal), (Pages(100), Pages(2_000)));
    let mut promised = vm(1);
    promised.demand.min = Pages(2_950); // a target not yet recomputed
    let p = one(State::Low, 0, promised);
    assert_eq!((p.evict, p.balloon_goal), (Pages(50), Pages(1_050)));
}

#[test]
fn eviction_stops_at_the_goal_and_at_the_end_of_swap() {
    for state in [State::Soft, State::Hard, State::Low] {
        for free in [650, 700, 5_000] {
            assert_eq!(one(state, free, vm(1)).evict, Pages(0));
        }
    }
    let p = one(State::Hard, 150, VmState { swap_free: Pages(80), ..vm(1) });
    assert_eq!(p.evict, Pages(80));
    assert!(matches!(p.reason, Reason::Reclaim { no_swap_for: Pages(420), .. }));
}

#[test]
fn the_smallest_rho_pays_first() {
    let mut poor = vm(1);
    poor.demand.shares = 10;
    let rich = vm(2);
    assert!(poor.demand.rho(poor.consumed) < rich.demand.rho(rich.consumed));
    let plans = run(State::Hard, 150, &[rich, poor]);
    assert_eq!((plans[0].evict, plans[1].evict), (Pages(0), Pages(500)));
    assert!(matches!(plans[0].reason, Reason::Spared { .. }));
    // Down to its target, then the next one pays.
    let nearly = VmState { consumed: Pages(2_300), ..poor };
    let plans = run(State::Hard, 150, &[rich, nearly]);
    assert_eq!((plans[0].evict, plans[1].evict), (Pages(200), Pages(300)));
    // Equals share the burden.
    let plans = run(State::Hard, 150, &[vm(1), vm(2)]);
    assert_eq!((plans[0].evict, plans[1].evict), (Pages(250), Pages(250)));
}

#[test]
fn a_balloon_never_keeps_a_vm_from_its_target() {
    for state in [State::High, State::Soft, State::Hard, State::Low] {
        let squeezed = VmState { balloon_goal: Pages(2_500), consumed: Pages(1_500), ..vm(1) };
        let p = one(state, 300, squeezed);
        assert_eq!((p.balloon_goal, p.evict), (Pages(2_000), Pages(0)), "{state}");
        assert!(matches!(p.reason, Reason::Entitled { .. }));
        // Also where the guest bears just that.
        let p = one(state, 300, VmState { balloon_limit: Pages(2_000), ..squeezed });
        assert!(matches!(p.reason, Reason::Entitled { .. }), "{p:?}");
    }
}

#[test]
fn a_guest_that_runs_short_gets_its_balloon_let_down() {
    let short = VmState {
        balloon_goal: Pages(1_500),
        balloon_limit: Pages(900),
        consumed: Pages(2_000),
        ..vm(1)
    };
    let p = one(State::High, 900, short);
    assert_eq!(p.balloon_goal, Pages(900));
    assert!(matches!(p.reason, Reason::GuestShort { .. }));
}

#[test]
fn plenty_is_given_back_to_the_largest_rho_first() {
    let ballooned = |id, shares| {
        let mut v = vm(id);
        v.demand.shares = shares;
        v.balloon_goal = Pages(1_500);
        v.consumed = Pages(2_500);
        v.wants_more = true;
        v
    };
    // Goal 650, margin 78: at 728 free nothing, at 828 a hundred pages.
    let pair = [ballooned(1, 10), ballooned(2, 1_000)];
    let goals = |free| -> Vec<u64> {
        run(State::High, free, &pair).iter().map(|p| p.balloon_goal.0).collect()
    };
    assert_eq!(goals(728), vec![1_500, 1_500]);
    assert_eq!(goals(828), vec![1_500, 1_400]);
    let reasons = run(State::High, 828, &pair).into_iter().map(|p| p.reason);
    let (pages, left) = (Pages(100), Pages(1_400));
    let plenty = Reason::Plenty { consumed: Pages(2_500), target: Pages(2_000) };
    assert!(reasons.eq([plenty, Reason::Released { pages, left }]));
    assert_eq!(goals(9_000), vec![0, 0]);
    // What was released and is not yet used counts as gone.
    let mut owing = pair;
    owing[1].balloon_goal = Pages(1_400);
    owing[1].tools.ballooned = Pages(1_500);
    let goals_of = |vms: &[VmState]| -> Vec<u64> {
        run(State::High, 828, vms).iter().map(|p| p.balloon_goal.0).collect()
    };
    assert_eq!(goals_of(&owing), [1_500, 1_400]);
    // What a guest reports as free was not, beyond a part of its size.
    let mut reports = pair;
    (reports[0].consumed, reports[0].tools.ballooned) = (Pages(500), Pages(3_500));
    let given = |free| 1_500 - run(State::High, free, &reports)[1].balloon_goal.0;
    assert_eq!([828, 978, 1_078].map(given), [0, 0, 100]);
    // What its balloon is yet to let go was.
    reports[0].tools.grown = Pages(2_500);
    let given = |free| 1_500 - run(State::High, free, &reports)[1].balloon_goal.0;
    assert_eq!([1_078, 1_728, 1_828].map(given), [0, 0, 100]);
    // So it is where no pager tells what became of it.
    let unpaged = owing.map(|vm| VmState { swap_free: Pages::ZERO, tools: Tools::default(), ..vm });
    assert_eq!(goals_of(&unpaged), [1_500, 1_400]);
    // What never was its own keeps nothing from the others: shared, swapped, or never touched.
    let mut small = pair;
    small[0].consumed = Pages(1_000);
    assert_eq!(goals_of(&small), [1_500, 1_400]);
    // Nor is more given to who does not use what it has.
    small[1].consumed = Pages(2_450);
    assert_eq!(goals_of(&small), [1_500, 1_450]);
    small[1].consumed = Pages(2_300);
    assert_eq!(goals_of(&small), [1_500, 1_500]);
    // Only in high, and only to those that want it.
    assert_eq!(run(State::Soft, 828, &pair)[1].balloon_goal, Pages(1_500));
    let idle = VmState { wants_more: false, ..pair[1] };
    assert_eq!(one(State::High, 828, idle).balloon_goal, Pages(1_500));
}

/// Who is at its max gains nothing by what is free, however short it is.
#[test]
fn a_short_guest_at_its_max_keeps_memory_from_nobody() {
    let ballooned = |id| VmState {
        balloon_goal: Pages(2_000),
        wants_more: true,
        consumed: Pages(2_000),
        ..vm(id)
    };
    let mut short = VmState { short: true, ..ballooned(1) };
    short.demand.max = Pages(2_000);
    let plans = run(State::High, 1_800, &[short, ballooned(2)]);
    assert_eq!(plans[0].balloon_goal, Pages(2_000));
    assert!(plans[1].balloon_goal < Pages(1_500), "{plans:?}");
}

#[test]
fn a_limit_holds_in_every_state() {
    let mut limited = vm(1);
    limited.demand.max = Pages(1_800);
    for state in [State::High, State::Soft, State::Hard, State::Low] {
        let p = one(state, 5_000, limited);
        assert_eq!(p.balloon_goal, Pages(2_200), "{state}");
        let p = one(state, 5_000, VmState { balloon_health: Health::Missing, ..limited });
        assert_eq!(p.evict, Pages(1_200), "{state}");
    }
    // Plenty does not let it back above its limit.
    let at_limit =
        VmState { consumed: Pages(1_800), balloon_goal: Pages(2_200), wants_more: true, ..limited };
    assert_eq!(one(State::High, 9_000, at_limit).balloon_goal, Pages(2_200));
    // What a limit brings counts towards the deficit.
    let plans = run(State::Hard, 150, &[limited, vm(2)]);
    assert_eq!((plans[0].evict, plans[1].evict), (Pages(1_200), Pages(0)));
}

/// Memory that was never plugged into it, or that it unplugged and uses still.
#[test]
fn what_a_guest_uses_beyond_its_size_no_balloon_brings() {
    let beyond = VmState { consumed: Pages(5_000), beyond: Pages(1_000), ..vm(1) };
    for rate in [None, Some(Pages(1_000))] {
        let beyond = VmState { balloon_rate: rate, ..beyond };
        let p = one(State::High, 5_000, beyond);
        assert_eq!((p.balloon_goal, p.evict), (Pages(0), Pages(1_000)));
        // The balloon's part is its own.
        let a_little = VmState { consumed: Pages(4_100), beyond: Pages(100), ..beyond };
        let p = one(State::Soft, 350, a_little);
        assert_eq!((p.leave, p.balloon_goal, p.evict), (Pages(3_800), Pages(200), Pages(100)));
        // Of what is to be taken at most.
        let p = one(State::Soft, 600, beyond);
        assert_eq!((p.leave, p.evict), (Pages(4_000), Pages(1_000)));
    }
}

#[test]
fn reasons_are_sentences_with_numbers() {
    let text = |p: VmPlan| p.reason.to_string();
    assert_eq!(
        text(one(State::Soft, 350, VmState { balloon_health: Health::Stuck, ..vm(1) })),
        "1.17 MiB are missing, 1.17 MiB of them are taken here, from 11.7 MiB down to \
         10.5 MiB; balloon to 0 B; 1.17 MiB evicted, because its balloon does not move"
    );
    assert_eq!(
        text(one(State::High, 500, VmState { consumed: Pages(1_024), ..vm(1) })),
        "it uses 4 MiB, within its target of 7.81 MiB: nothing is taken"
    );
    let low = text(one(State::Low, 50, VmState { swap_free: Pages(0), ..vm(1) }));
    assert!(low.contains("no swap space for 2.34 MiB"), "{low}");
    assert!(low.ends_with("; its allocations wait, for it is above target"), "{low}");
    assert!(low.contains("; nothing evicted although in state low paging reclaims"), "{low}");
}

/// The same VM where paging was measured to be cheaper.
fn dear(balloon: u64, ballooned: u64) -> VmState {
    let tools = Tools {
        first: Tool::Paging,
        balloon: Some(Cost(70_000)),
        paging: Some(Cost(2_000)),
        ballooned: Pages(ballooned),
        ..Tools::default()
    };
    VmState { tools, balloon_goal: Pages(balloon), ..vm(1) }
}

#[test]
fn a_dear_balloon_comes_second() {
    for (state, free, take) in [(State::Soft, 350, 300), (State::Hard, 150, 500)] {
        let p = one(state, free, dear(100, 100));
        assert_eq!((p.balloon_goal, p.evict), (Pages(100), Pages(take)), "{state}");
        assert!(matches!(
            p.reason,
            Reason::Reclaim { cause: Some(EvictCause::Cheaper { .. }), .. }
        ));
        assert!(p.reason.to_string().ends_with(
            "evicted, because its balloon costs 70 ms/s per 1000 pages, and paging 2.0 ms/s per \
             1000 pages"
        ));
    }
    let p = one(State::Low, 50, dear(100, 100));
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(100), Pages(600), true));
    // In low both are asked for all that is missing, where the VM has been held up.
    let mut late = dear(100, 100);
    late.tools.held_up = true;
    assert_eq!(one(State::Hard, 150, late).balloon_goal, Pages(100));
    let p = one(State::Low, 50, late);
    assert_eq!((p.balloon_goal, p.evict, p.block), (Pages(700), Pages(600), true));
    // What was paged before is not what the balloon is asked for.
    let p = one(State::Low, 50, VmState { size: Pages(9_000), ..late });
    assert_eq!((p.balloon_goal, p.evict), (Pages(700), Pages(600)));
}

#[test]
fn a_dear_balloon_grows_no_further_than_the_moment_of_need() {
    // Asked for 700 in low, 250 have come, and paging is in time again.
    let asked = VmState { balloon_goal: Pages(700), ..dear(250, 250) };
    for (state, free) in [(State::Low, 50), (State::Hard, 150), (State::Soft, 350)] {
        let p = one(state, free, asked);
        assert_eq!(p.balloon_goal, Pages(250), "{state}");
        assert!(!p.evict.is_zero());
    }
    let p = one(State::High, 700, asked);
    assert_eq!((p.balloon_goal, p.evict), (Pages(250), Pages(0)));
    assert_eq!(
        p.reason.to_string(),
        "its balloon, asked for 2.73 MiB, stays at 1000 KiB: paging is enough, and its balloon \
         costs 70 ms/s per 1000 pages, and paging 2.0 ms/s per 1000 pages"
    );
    // What it has grown to by QEMU's word stays, whatever of it was shared when the guest gave it up.
    let grown = Tools { grown: Pages(600), ..asked.tools };
    let p = one(State::Hard, 150, VmState { tools: grown, ..asked });
    assert_eq!(p.balloon_goal, Pages(600));
    let whole = Tools { grown: Pages(700), ..asked.tools };
    assert_eq!(one(State::High, 700, VmState { tools: whole, ..asked }).balloon_goal, Pages(700));
    // One that paging has no room beside, and one that is not dear, go on.
    let full = VmState { swap_free: Pages(0), ..asked };
    assert_eq!(one(State::High, 700, full).balloon_goal, Pages(700));
    let cheap = VmState { tools: Tools { first: Tool::Balloon, ..asked.tools }, ..asked };
    assert_eq!(one(State::High, 700, cheap).balloon_goal, Pages(700));
}

#[test]
fn what_paging_has_no_room_or_time_for_the_balloon_takes() {
    // 300 are missing. Room for 80: the balloon brings 220 beyond what it has.
    let full = VmState { swap_free: Pages(80), ..dear(100, 100) };
    let p = one(State::Soft, 350, full);
    assert_eq!((p.balloon_goal, p.evict), (Pages(320), Pages(80)));
    assert!(matches!(p.reason, Reason::Reclaim { no_swap_for: Pages(0), .. }));
    // A quarter of that has come, and all of the paging: the same is asked again.
    let later = VmState {
        swap_free: Pages(0),
        balloon_goal: Pages(320),
        consumed: Pages(2_865),
        tools: Tools { ballooned: Pages(155), spare_room: Pages(1), ..full.tools },
        ..full
    };
    let p = one(State::Soft, 485, later);
    assert_eq!((p.balloon_goal, p.evict), (Pages(320), Pages(1)));
    // Room in the compressed tier counts.
    let tier = Tools { spare_room: Pages(300), ..full.tools };
    let p = one(State::Soft, 350, VmState { swap_free: Pages(0), tools: tier, ..full });
    assert_eq!((p.balloon_goal, p.evict), (Pages(100), Pages(300)));
    // At 20 pages a second 200 come in time; all is asked for, and the balloon for what is late.
    let slow = Tools { paging_rate: Some(Pages(20)), ..full.tools };
    let p = one(State::Soft, 350, VmState { tools: slow, ..dear(100, 100) });
    assert_eq!((p.balloon_goal, p.evict), (Pages(200), Pages(300)));
    // With neither: as ever.
    let none = VmState { swap_free: Pages(0), ..dear(0, 0) };
    assert_eq!(one(State::Soft, 350, none).balloon_goal, Pages(1_300));
}

/// Goal 650; reclamation begins at 400.
#[test]
fn a_balloon_that_is_much_dearer_is_exchanged_as_memory_is_free_for_it() {
    let with = |free: u64, balloon: u64, ballooned: u64| {
        let mut vm = dear(balloon, ballooned);
        vm.tools.ceiling = Some(Pages(600));
        vm.consumed = Pages(2_500);
        one(State::High, free, vm)
    };
    // 200 down: 50 are free above 400, and 650 + 200 are to be.
    let p = with(450, 800, 800);
    assert_eq!((p.balloon_goal, p.evict, p.leave), (Pages(750), Pages(200), Pages(2_300)));
    assert!(matches!(p.reason, Reason::Exchanged { .. }));
    // They were evicted: the rest follows, and what is not used yet stays made up for.
    let p = with(850, 750, 800);
    assert_eq!((p.balloon_goal, p.evict), (Pages(600), Pages(0)));
    let p = with(650, 600, 800);
    assert_eq!((p.balloon_goal, p.evict), (Pages(600), Pages(200)));
    // Nothing while the guest has not used what it was given back.
    let p = with(2_000, 700, 800);
    assert_eq!(p.balloon_goal, Pages(700));
    // It has used half of that: enough for another step.
    assert_eq!(with(2_000, 800, 900).balloon_goal, Pages(600));
    assert_eq!(with(2_000, 800, 901).balloon_goal, Pages(800));
    // A guest that was given much more back has its free pages reported: a 16th of its size counts.
    assert_eq!(with(650, 600, 1_400).evict, Pages(250));
    // Nor of a balloon that does not move, nor where paging is not the first tool.
    let mut other = VmState { consumed: Pages(2_500), ..dear(800, 800) };
    other.tools.ceiling = Some(Pages(600));
    for spoil in [(|vm| vm.balloon_health = Health::Stuck) as fn(&mut VmState), |vm| {
        vm.tools.first = Tool::Balloon
    }] {
        let mut vm = other;
        spoil(&mut vm);
        let p = one(State::High, 450, vm);
        assert_eq!((p.balloon_goal, p.evict), (Pages(800), Pages(0)), "{p:?}");
    }
    // Nor while memory is missing, nor by eviction below what the VM is entitled to.
    let mut vm = dear(800, 800);
    vm.tools.ceiling = Some(Pages(600));
    assert_eq!(one(State::Soft, 500, vm).balloon_goal, Pages(800));
    vm.consumed = Pages(2_000);
    let p = one(State::High, 410, vm);
    assert_eq!((p.balloon_goal, p.evict), (Pages(790), Pages(0)));
    // Nor without a place for the pages.
    assert_eq!(one(State::High, 900, VmState { swap_free: Pages(0), ..vm }).evict, Pages(0));
}

/// What is free is let down once, and what is lacking is evicted once, however many balloons there are.
#[test]
fn balloons_that_are_exchanged_share_what_is_free_for_it() {
    let with = |free: u64| {
        let pair = [1, 2].map(|id| {
            let mut vm = VmState { consumed: Pages(2_500), ..dear(800, 800) };
            (vm.demand.id, vm.tools.ceiling) = (VmId(id), Some(Pages(600)));
            vm
        });
        let plans = run(State::High, free, &pair);
        [plans[0], plans[1]].map(|p| (p.balloon_goal.0, p.evict.0, p.reason.to_string()))
    };
    let [one, two] = with(450);
    assert_eq!([(one.0, one.1), (two.0, two.1)], [(750, 200), (800, 200)]);
    assert!(one.2.starts_with("its balloon goes from 3.12 MiB down to 2.93 MiB in exchange"));
    assert!(two.2.starts_with("its balloon of 3.12 MiB is to come down when memory is free"));
    let [one, two] = with(850);
    assert_eq!([(one.0, one.1), (two.0, two.1)], [(600, 200), (600, 0)]);
}

fn any_state() -> impl Strategy<Value = State> {
    prop_oneof![Just(State::High), Just(State::Soft), Just(State::Hard), Just(State::Low)]
}

prop_compose! {
    fn any_vm(id: u32)(
        size in 1u64..5_000, min in 0.0f64..1.0, max in 0.0f64..1.0, consumed in 0.0f64..1.0,
        target in 0.0f64..1.0, goal in 0.0f64..1.0, limit in 0.0f64..1.0, swap in 0u64..5_000,
        health in prop_oneof![
            Just(Health::Missing), Just(Health::Healthy), Just(Health::Slow), Just(Health::Stuck)
        ],
        shares in 1u32..10_000, active in 0u64..5_000, wants_more in any::<bool>(),
        (paging, ceiling, rate, ballooned, spare, held_up, grown, saved) in (
            any::<bool>(), proptest::option::of(0.0f64..1.0), proptest::option::of(0u64..100),
            0.0f64..1.0, 0u64..500, any::<bool>(), 0.0f64..1.0, 0.0f64..1.0,
        ),
    ) -> Standing {
        let of = |whole: u64, part: f64| (whole as f64 * part) as u64;
        let max = of(size, max).max(1);
        let min = of(max, min);
        let vm = VmState {
            demand: VmDemand {
                id: VmId(id), shares, min: Pages(min), max: Pages(max),
                tax: TaxRate::default(), active: Pages(active),
            },
            consumed: Pages(of(size, consumed)),
            size: Pages(size),
            balloon_goal: Pages(of(size, goal)),
            balloon_health: health,
            balloon_limit: Pages(of(size, limit)),
            balloon_rate: None,
            short: false,
            wants_more,
            swap_free: Pages(swap),
            pool: None,
            overhead: Pages::ZERO,
            beyond: Pages(of(size, ballooned)),
            tools: Tools {
                first: if paging { Tool::Paging } else { Tool::Balloon },
                ceiling: ceiling.map(|part| Pages(of(size, part))),
                paging_rate: rate.map(Pages),
                held_up,
                ballooned: Pages(of(size, ballooned)),
                spare_room: Pages(spare),
                grown: Pages(of(size, grown)),
                ..Tools::default()
            },
            saved: Pages(of(size, saved)),
        };
        Standing { vm, target: Pages(min + of(max - min, target)) }
    }
}

fn some_vms() -> impl Strategy<Value = Vec<Standing>> {
    (0usize..8).prop_flat_map(|n| (0..n as u32).map(any_vm).collect::<Vec<_>>())
}

fn of(state: State, free: u64, vms: &[Standing]) -> Vec<VmPlan> {
    plan(state, &supply(free), &[], vms)
}

proptest! {
    #[test]
    fn what_holds_of_every_plan(
        state in any_state(), free in 0u64..12_000, vms in some_vms(),
        room in prop_oneof![Just(0u64), 0u64..8_000],
    ) {
        let supply = Supply { room: Pages(room), ..supply(free) };
        let plans = plan(state, &supply, &[], &vms);
        let deficit = supply.goal().saturating_sub(Pages(free));
        let mut taken = Pages::ZERO;
        let (mut down, mut exchanged) = (Pages::ZERO, Pages::ZERO);
        for (Standing { vm: v, target }, p) in vms.iter().zip(&plans) {
            let floor = (*target).max(v.demand.min);
            prop_assert_eq!(p.id, v.demand.id);
            // Never below min or target by eviction, nor by what the balloon may hold.
            prop_assert!(p.evict <= v.consumed.saturating_sub(floor));
            prop_assert!(p.leave >= floor.min(v.consumed) && p.leave + p.evict <= v.consumed);
            prop_assert!(p.evict <= v.swap_free + v.tools.spare_room);
            prop_assert!(v.size - p.balloon_goal.min(v.size) >= floor);
            if v.balloon_health != Health::Missing {
                prop_assert!(p.balloon_goal <= v.balloon_limit);
            }
            if p.balloon_goal > v.balloon_goal {
                prop_assert!(matches!(v.balloon_health, Health::Healthy | Health::Slow));
            }
            prop_assert_eq!(p.block, state == State::Low && v.consumed > floor);
            let over = v.consumed.saturating_sub(v.demand.max);
            if state == State::High && over.is_zero() && room == 0 {
                prop_assert!(p.balloon_goal <= v.balloon_goal);
            }
            if let Reason::Exchanged { from, to, .. } = p.reason {
                // Only while nothing is missing, and no more than a step.
                prop_assert!(supply.deficit(state).is_zero() && v.tools.first == Tool::Paging);
                prop_assert!(p.evict <= v.size);
                exchanged += p.evict;
                down += from - to;
                continue;
            }
            if state == State::High && over.is_zero() && room == 0 {
                prop_assert!(p.evict.is_zero());
            }
            taken += p.evict.saturating_sub(over);
            prop_assert!(!p.reason.to_string().is_empty());
        }
        prop_assert!(taken <= deficit, "evicting {taken:?} for {deficit:?}");
        // What is exchanged makes up for balloons and no more, and is let down within what is free.
        let edge = supply.thresholds.lower_edge(State::High) + supply.room;
        let owed: Pages = vms.iter().map(|s| s.vm.tools.ballooned).sum();
        let most: Pages = vms.iter().map(|s| s.vm.balloon_goal).sum();
        let wanting = (supply.goal() + owed + most).saturating_sub(Pages(free));
        prop_assert!(exchanged <= wanting, "{exchanged:?}");
        let released = down.is_zero() || down <= Pages(free).saturating_sub(edge)
            || vms.iter().any(|s| s.vm.wants_more && !s.vm.balloon_goal.is_zero());
        prop_assert!(released, "{down:?} of {free} above {edge}");
    }

    /// With room for everyone, every shortage is asked for, of one tool or the other, whatever they cost.
    #[test]
    fn what_is_missing_is_asked_for_whatever_it_costs(free in 0u64..600, mut vms in some_vms()) {
        for s in &mut vms {
            s.vm.swap_free = s.vm.size;
            s.vm.tools.first = Tool::Paging;
            s.vm.tools.paging_rate = None;
        }
        let deficit = thresholds().goal() - Pages(free);
        let above: Pages =
            vms.iter().map(|s| s.vm.consumed.saturating_sub(s.target.max(s.vm.demand.min))).sum();
        for state in [State::Soft, State::Hard] {
            let plans = of(state, free, &vms);
            let asked: Pages = plans.iter().zip(&vms).map(|(p, s)| {
                let by_balloon = s.vm.consumed.saturating_sub(s.vm.size - p.balloon_goal.min(s.vm.size));
                p.evict.max(by_balloon)
            }).sum();
            prop_assert!(asked >= deficit.min(above), "{asked:?}");
        }
    }

    /// With swap for everyone, hard and low ask for all that is missing or all that may be taken.
    #[test]
    fn hard_asks_for_enough(free in 0u64..600, mut vms in some_vms()) {
        vms.iter_mut().for_each(|s| s.vm.swap_free = s.vm.size);
        let deficit = thresholds().goal() - Pages(free);
        let above: Pages =
            vms.iter().map(|s| s.vm.consumed.saturating_sub(s.target.max(s.vm.demand.min))).sum();
        let asked: Pages = of(State::Hard, free, &vms).iter().map(|p| p.evict).sum();
        prop_assert!(asked >= deficit.min(above));
    }

    /// Min-funding: what is left of a VM that paid has no larger rho than what others keep.
    #[test]
    fn nobody_pays_before_a_smaller_rho(free in 0u64..600, mut vms in some_vms()) {
        for Standing { vm, .. } in &mut vms {
            vm.swap_free = vm.size;
            vm.demand.max = vm.size;
        }
        let plans = of(State::Hard, free, &vms);
        let left = |i: usize| vms[i].vm.consumed - plans[i].evict;
        for payer in (0..vms.len()).filter(|&i| !plans[i].evict.is_zero()) {
            for other in (0..vms.len()).filter(|&i| left(i) > vms[i].target) {
                let taken = vms[payer].vm.demand.rho(left(payer) + Pages(1));
                let kept = vms[other].vm.demand.rho(left(other));
                prop_assert!(taken <= kept * (1.0 + 1e-9), "{payer} paid {taken}, {other} {kept}");
            }
        }
    }
}
