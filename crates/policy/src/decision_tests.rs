use super::*;
use crate::balloon::Health;
use crate::plan::VmState;
use crate::pools::Member;
use crate::state::Thresholds;

const BUDGET: Pages = Pages::from_mib(400);

fn demand(id: u32, min: u64, active: u64) -> VmDemand {
    VmDemand {
        id: VmId(id),
        shares: 2_560,
        min: Pages::from_mib(min),
        max: Pages::from_mib(256),
        tax: TaxRate::default(),
        active: Pages::from_mib(active),
    }
}

fn name_of(id: VmId) -> String {
    ["web", "batch", "db1"].get(id.0 as usize).map_or(id.to_string(), |&n| n.to_owned())
}

fn decide(available: u64, state: State, free: u64, inputs: Vec<VmDemand>, held: u64) -> Decision {
    let thresholds = Thresholds::default_for(BUDGET);
    let vms = inputs
        .into_iter()
        .map(|demand| VmState {
            demand,
            consumed: Pages::from_mib(held),
            size: Pages::from_mib(256),
            balloon_goal: Pages::ZERO,
            balloon_health: Health::Healthy,
            balloon_limit: Pages::from_mib(166),
            balloon_rate: None,
            short: false,
            wants_more: false,
            swap_free: Pages::from_mib(256),
            pool: None,
            overhead: Pages::ZERO,
            beyond: Pages::ZERO,
            saved: Pages::ZERO,
            tools: crate::Tools::default(),
        })
        .collect();
    let decision = crate::decide(Snapshot {
        trigger: "period".into(),
        before: state,
        thresholds,
        budget: thresholds.goal() + Pages::from_mib(available),
        free: Pages::from_mib(free),
        overhead: Pages::ZERO,
        vms,
        pools: Vec::new(),
        starting: Pages::ZERO,
        room: Pages::ZERO,
        policy: crate::Policy::default(),
        nodes: Vec::new(),
        outside: Vec::new(),
    });
    assert_eq!(decision.state, state);
    decision
}

fn text(d: &Decision, id: u32) -> String {
    let (verdict, steps) = d.explain(VmId(id), name_of);
    format!("{verdict}\n{}", steps.join("\n"))
}

#[test]
fn the_tax_is_explained_to_both_sides() {
    let d = decide(360, State::Soft, 14, vec![demand(0, 0, 10), demand(1, 0, 256)], 190);
    let idle = text(&d, 0);
    for part in [
        "web is entitled to 104 MiB: its shares decide, less the tax on its idle memory; 12 MiB \
         are taken from it, its balloon is asked to hold 78 MiB",
        "The host has 14 MiB free, 12 MiB short of the 26 MiB it aims for; its state is soft",
        "360 MiB can be given to 2 VMs, which may use 512 MiB together",
        "Of 104 MiB, web would use 10 MiB and leave 94 MiB idle",
        "under a tax of 75% an idle page is charged as 4 active ones",
        "they are charged as 386 MiB, and with 2560 shares its rho, the shares behind each page \
         charged, is 0.02591",
        "without the tax, shares alone would give web 180 MiB",
        "moves 76 MiB to VMs that use theirs",
        "The others get: batch 256 MiB (rho 0.03906, its max).",
    ] {
        assert!(idle.contains(part), "missing: {part}\nin: {idle}");
    }
    let busy = text(&d, 1);
    assert!(busy.contains("batch is entitled to 256 MiB: its max decides"), "{busy}");
    assert!(busy.contains("nothing is taken"), "{busy}");
}

#[test]
fn min_max_and_shares_are_told_apart() {
    let d = decide(360, State::High, 30, vec![demand(0, 200, 10), demand(1, 0, 256)], 100);
    assert!(text(&d, 0).contains("its guaranteed min decides"), "{}", text(&d, 0));
    assert!(text(&d, 0).contains("by shares and activity it would get less, but 200 MiB are"));
    assert!(text(&d, 1).contains("its shares decide"), "{}", text(&d, 1));
    let d = decide(600, State::High, 30, vec![demand(0, 0, 10), demand(1, 0, 256)], 100);
    assert!(text(&d, 0).contains("its max decides"), "{}", text(&d, 0));
    assert!(text(&d, 0).contains("everyone can have its max"));
    let d = decide(300, State::High, 30, vec![demand(0, 0, 256), demand(1, 0, 256)], 100);
    assert!(text(&d, 0).contains("the tax makes no difference"), "{}", text(&d, 0));
    let d = decide(150, State::Low, 1, vec![demand(0, 100, 9), demand(1, 100, 256)], 190);
    assert!(text(&d, 0).contains("more than there is, so everyone gets its min"));
    assert!(text(&d, 0).contains("its allocations wait"), "{}", text(&d, 0));
    assert!(text(&d, 0).contains("are to be evicted"), "{}", text(&d, 0));
}

/// What pools have to do with it decides what is said of all.
#[test]
fn what_pools_hold_down_or_guarantee_is_not_told_of_the_host() {
    let pool = |min: u64, max: u64| Pool {
        id: PoolId(0),
        name: "a".into(),
        parent: None,
        shares: 1_000,
        min: Pages::from_mib(min),
        max: Some(Pages::from_mib(max)),
        expandable: true,
        tax: None,
    };
    let vms = || vec![demand(0, 0, 200), demand(1, 0, 200)];
    let inside = |d: &Decision, pool: Pool| {
        with(d, |s| {
            s.vms.iter_mut().for_each(|vm| vm.pool = Some(pool.id));
            s.pools = vec![pool];
        })
    };
    let plenty = decide(600, State::High, 30, vms(), 100);
    let told = text(&inside(&plenty, pool(0, 300)), 0);
    assert!(
        told.contains("it suffices for all, but not everyone's pool may have as much"),
        "{told}"
    );
    let told = text(&inside(&plenty, pool(0, 512)), 0);
    assert!(told.contains("everyone can have its max"), "{told}");
    let little = decide(200, State::Low, 1, vms(), 150);
    let told = text(&inside(&little, pool(300, 512)), 0);
    assert!(told.contains("guaranteed 300 MiB together, their pools' mins among it"), "{told}");
    let told = text(&inside(&little, pool(100, 512)), 0);
    assert!(told.contains("each page goes where it has the most shares behind it"), "{told}");
}

/// What a pool's VMs have that start, or are out of reach, is part of its min and max: it is not there twice.
#[test]
fn what_others_in_a_pool_hold_counts_against_its_bounds() {
    let pool = |id: u32, parent: Option<u32>, min: u64, max: Option<u64>| Pool {
        id: PoolId(id),
        name: id.to_string(),
        parent: parent.map(PoolId),
        shares: 1_000,
        min: Pages::from_mib(min),
        max: max.map(Pages::from_mib),
        expandable: true,
        tax: None,
    };
    let targets = |available: u64, pools: Vec<Pool>, starts: u64| -> Vec<u64> {
        let vms = vec![demand(0, 0, 256), demand(1, 100, 256)];
        let d = decide(available, State::High, 30, vms, 100);
        let d = with(&d, |s| {
            let start = Pages::from_mib(starts);
            s.outside = vec![Member { pool: Some(pools.last().unwrap().id), overhead: start }];
            (s.starting, s.vms[0].pool) = (start, s.outside[0].pool);
            s.pools = pools;
        });
        let told = text(&d, 0).contains("VMs that start or are out of reach have");
        assert_eq!(told, starts > 0, "{}", text(&d, 0));
        d.results.iter().map(|e| e.target.bytes().0 >> 20).collect()
    };
    let one = |max| vec![pool(7, None, 200, max)];
    assert_eq!(targets(300, one(None), 0), [200, 100]);
    assert_eq!(targets(300, one(None), 150), [50, 100]);
    assert_eq!(targets(300, one(None), 200), [0, 100]);
    // And against those of the pool that it is in.
    let inside = |max| vec![pool(7, None, 200, max), pool(9, Some(7), 0, None)];
    assert_eq!(targets(300, inside(None), 150), [50, 100]);
    assert_eq!(targets(600, one(Some(220)), 0), [220, 256]);
    assert_eq!(targets(600, one(Some(220)), 150), [70, 256]);
    assert_eq!(targets(600, inside(Some(220)), 150), [70, 256]);
}

/// Of the same decision with something else in its snapshot.
fn with(d: &Decision, change: impl FnOnce(&mut Snapshot)) -> Decision {
    let mut snapshot = d.snapshot.clone();
    change(&mut snapshot);
    crate::decide(snapshot)
}

#[test]
fn a_change_of_state_is_named_as_the_cause() {
    let d = decide(360, State::Soft, 14, vec![demand(0, 0, 10)], 190);
    assert_eq!(d.trigger(), "period");
    let fell = with(&d, |s| s.before = State::High);
    assert_eq!(fell.trigger(), "free memory moved from high to soft");
}

#[test]
fn in_plenty_it_is_told_whether_anything_is_reclaimed_for_starts() {
    let d = decide(200, State::High, 100, vec![demand(0, 0, 100)], 50);
    let says = |room: Pages, what: &str| text(&with(&d, |s| s.room = room), 0).contains(what);
    let (nothing, starts) = ("nothing needs to be reclaimed", "what VMs that start lack");
    assert!(says(Pages::ZERO, nothing) && !says(Pages::ZERO, starts));
    assert!(says(Pages::from_mib(10), nothing));
    let much = Pages::from_mib(300);
    assert!(says(much, starts) && !says(much, nothing));
}

#[test]
fn what_is_missing_and_what_there_is_for_all_is_told_to_the_page() {
    let d = decide(300, State::High, 30, vec![demand(0, 200, 10), demand(1, 100, 256)], 100);
    let goal = d.snapshot.thresholds.goal();
    let host = |free: Pages, room: Pages| text(&with(&d, |s| (s.free, s.room) = (free, room)), 0);
    let told = host(goal, Pages::ZERO);
    assert!(told.contains(&format!("{goal} free, at least the {goal} it aims for; its")), "{told}");
    let told = host(goal, Pages::from_mib(9));
    let aim = goal + Pages::from_mib(9);
    let part =
        format!("9 MiB short of the {aim} it aims for (9 MiB of it for VMs that start); its");
    assert!(told.contains(&part), "missing: {part}\nin: {told}");
    // The guarantees are just what there is.
    let told = text(&d, 0);
    assert!(
        told.contains("300 MiB can be given to 2 VMs, which may use 512 MiB together"),
        "{told}"
    );
}

/// What a VM would get without the tax is told of that VM, not of another.
#[test]
fn the_tax_gives_to_who_uses_what_it_has() {
    let mut rich = demand(1, 0, 256);
    rich.shares *= 2;
    let d = decide(360, State::High, 30, vec![demand(0, 0, 10), rich, demand(2, 0, 256)], 100);
    assert!(text(&d, 1).contains("would give batch 180 MiB"), "{}", text(&d, 1));
    let told = text(&d, 2);
    for part in [
        "db1 is entitled to 108 MiB: its shares decide, with memory that the tax takes from idle VMs",
        "without the tax, shares alone would give db1 90 MiB; idle pages of others, taxed, bring it \
         18.5 MiB more",
    ] {
        assert!(told.contains(part), "missing: {part}\nin: {told}");
    }
}

#[test]
fn pools_are_told_from_the_outside_in_and_only_neighbours_compete() {
    let pool = |id, parent: Option<u32>, name: &str, max: Option<u64>| Pool {
        id: PoolId(id),
        name: name.into(),
        parent: parent.map(PoolId),
        shares: 1_000,
        min: Pages::ZERO,
        max: max.map(Pages::from_mib),
        expandable: true,
        tax: None,
    };
    let vms = (0..5).map(|id| demand(id, 0, 256)).collect();
    let d = with(&decide(360, State::High, 30, vms, 100), |s| {
        s.pools = vec![
            pool(7, Some(8), "prod/db", None),
            pool(8, None, "prod", Some(200)),
            pool(9, None, "test", None),
        ];
        s.pools[2].min = Pages::from_mib(150);
        // A pool that is not there is the host.
        let pools = [Some(7), Some(7), Some(9), Some(1), None];
        s.vms.iter_mut().zip(pools).for_each(|(vm, pool)| vm.pool = pool.map(PoolId));
    });
    let told = text(&d, 0);
    let steps = ["Pool prod gets", "from the host", "Pool prod/db gets", "from pool prod: "];
    let at = steps.map(|step| told.find(step).unwrap_or_else(|| panic!("{step}: {told}")));
    assert!(at.is_sorted(), "{told}");
    assert!(told.contains("The others in its pool get: batch"), "{told}");
    assert!(!told.contains("db1") && !told.contains("Pool test"), "{told}");
    assert!(
        text(&d, 2).contains("Pool test gets 150 MiB from the host: it gets its min of 150 MiB")
    );
    assert!(!text(&d, 2).contains("The others"), "alone in its pool: {}", text(&d, 2));
    for (id, other) in [(3, "vm4"), (4, "vm3")] {
        let told = text(&d, id);
        assert!(!told.contains("Pool"), "{told}");
        assert!(told.contains(&format!("The others get: {other} ")), "{told}");
    }
}

#[test]
fn many_others_are_cut_short() {
    let vms = (0..12).map(|i| demand(i, 0, 100)).collect();
    let d = decide(900, State::High, 30, vms, 50);
    assert!(text(&d, 0).contains("and 6 more."), "{}", text(&d, 0));
    assert!(text(&d, 0).contains("vm5 75 MiB"), "{}", text(&d, 0));
}

#[test]
fn a_vm_outside_the_decision_is_said_to_be() {
    let d = decide(360, State::High, 30, vec![demand(0, 0, 10)], 50);
    let (verdict, steps) = d.explain(VmId(2), name_of);
    assert!(verdict.contains("db1 has no part in this decision"), "{verdict}");
    assert!(steps.is_empty());
    let (_, steps) = d.explain(VmId(0), name_of);
    assert!(!steps.iter().any(|s| s.contains("others")), "alone: {steps:?}");
}

#[test]
fn numbers_are_short() {
    assert_eq!(ratio(0.039_062_5), "0.03906");
    assert_eq!(ratio(4.0), "4");
    assert_eq!(ratio(12_345.6), "12346");
    assert_eq!(ratio(0.0), "0");
    assert_eq!(ratio(2_000.0), "2000");
}

#[test]
fn another_policy_says_what_it_made_of_the_vm() {
    let d = decide(360, State::Soft, 14, vec![demand(0, 0, 10), demand(1, 0, 256)], 190);
    let under = |policy| {
        let snapshot = Snapshot { policy, ..d.snapshot.clone() };
        text(&crate::decide(snapshot), 0)
    };
    let mut policy = crate::Policy { kind: crate::PolicyKind::GraduatedTax, ..Default::default() };
    let graduated = under(policy.clone());
    assert!(
        graduated.contains("96% of its max is idle, so its rate is 93% in place of 75%"),
        "{graduated}"
    );
    policy.kind = crate::PolicyKind::MissRatio;
    let ratio = under(policy.clone());
    assert!(ratio.contains("miss-ratio: for want of a miss curve it is to have"), "{ratio}");
    policy.kind = crate::PolicyKind::Pressure;
    assert!(under(policy.clone()).contains("its guest reports none"));
    policy.pressure = vec![crate::VmPressure { id: VmId(0), some: 0.21 }];
    assert!(under(policy).contains("21.0% of the time, against a set point of 1%"));
}

#[test]
fn what_its_tools_cost_is_told_where_it_is_known() {
    let mut d = decide(360, State::Soft, 14, vec![demand(0, 0, 10), demand(1, 0, 256)], 190);
    assert!(!text(&d, 0).contains("Its tools"), "{}", text(&d, 0));
    d.snapshot.vms[0].tools = Tools {
        first: Tool::Paging,
        balloon: Some(Cost(12_000)),
        paging: Some(Cost(50)),
        ..Tools::default()
    };
    // One of them suffices.
    let one = with(&d, |s| s.vms[0].tools.paging = None);
    assert!(text(&one, 0).contains("at a cost not measured lately"), "{}", text(&one, 0));
    let told = text(&crate::decide(d.snapshot), 0);
    for part in [
        "it reads again, comes at 12 ms/s per 1000 pages; what is compressed or swapped, and it \
         faults on, at 0.05 ms/s per 1000 pages; paging comes first, the balloon takes",
        "12 MiB are to be evicted",
        "12 MiB evicted, because its balloon costs 12 ms/s per 1000 pages, and paging 0.05 ms/s",
    ] {
        assert!(told.contains(part), "missing: {part}\nin: {told}");
    }
}

/// It has 80 MiB more than it is entitled to, and can give none of it: the others are entitled to what is left, so that the one
/// finds with the other what it is guaranteed.
#[test]
fn what_one_cannot_give_is_not_shared_out() {
    let inputs = vec![demand(0, 0, 256), demand(1, 0, 256), demand(2, 120, 256)];
    let mut snapshot = decide(480, State::Low, 3, inputs, 155).snapshot;
    let targets = |snapshot: &Snapshot| {
        let decided = crate::decide(snapshot.clone());
        (
            decided.results.iter().map(|r| r.target.bytes().0 >> 20).collect::<Vec<_>>(),
            decided.plans,
        )
    };
    snapshot.vms[0].consumed = Pages::from_mib(240);
    snapshot.vms[2].consumed = Pages::from_mib(70);
    let (before, plans) = targets(&snapshot);
    assert_eq!(before, [160, 160, 160]);
    assert!(!plans[0].evict.is_zero() && plans[1].evict.is_zero());
    snapshot.vms[0].swap_free = Pages::ZERO;
    snapshot.vms[0].balloon_health = Health::Missing;
    let (after, plans) = targets(&snapshot);
    assert_eq!(after, [160, 120, 120]);
    assert!(plans[0].evict.is_zero() && plans[0].block, "{:?}", plans[0]);
    assert!(!plans[1].evict.is_zero() && plans[1].leave >= Pages::from_mib(120), "{:?}", plans[1]);
    assert!(plans[2].evict.is_zero() && !plans[2].block);
}

/// A host in low by 23 MiB, of which two VMs can give nothing and the third all: it does not stay there.
#[test]
fn what_cannot_be_given_comes_from_who_can_however_little_that_had() {
    // The second has no more than its share of all, and more than its share of what the first leaves. Or the first has more
    // than its max.
    for (max, held, fixed, targets) in
        [(256, [240, 155, 108], 2, [160, 120, 85]), (170, [240, 130, 133], 1, [160, 120, 120])]
    {
        let inputs = (0..3).map(|id| demand(id, 0, 256)).collect();
        let mut snapshot = decide(480, State::Low, 3, inputs, 155).snapshot;
        snapshot.vms[0].demand.max = Pages::from_mib(max);
        for (i, vm) in snapshot.vms.iter_mut().enumerate() {
            vm.consumed = Pages::from_mib(held[i]);
            if i < fixed {
                (vm.swap_free, vm.balloon_health) = (Pages::ZERO, Health::Missing);
            }
        }
        let d = crate::decide(snapshot);
        let got: Vec<u64> = d.results.iter().map(|r| r.target.bytes().0 >> 20).collect();
        assert_eq!(got, targets);
        let taken: Pages = d.plans.iter().map(|plan| plan.evict).sum();
        assert_eq!(taken, Pages::from_mib(23), "{:?}", d.plans);
        let told = text(&d, 2);
        assert!(told.contains("it would get 160 MiB if others could give"), "{told}");
        assert!(!told.contains("tax on its idle"), "{told}");
    }
}

/// Of a VM that is bound to a node it says so where that is what counts, and only there.
#[test]
fn it_names_the_node_that_is_short_or_keeps_a_balloon() {
    let told = |free: u64, bound: u32, balloon: u64| {
        let demands = vec![demand(0, 0, 100), demand(1, 0, 100)];
        let mut snapshot = decide(600, State::High, 300, demands, 200).snapshot;
        snapshot.vms[0].balloon_goal = Pages::from_mib(balloon);
        snapshot.nodes = vec![crate::Node {
            id: 4,
            size: Pages::from_mib(300),
            free: Pages::from_mib(free),
            before: State::High,
            bound: vec![VmId(bound)],
        }];
        let (first, steps) = crate::decide(snapshot).explain(VmId(0), name_of);
        format!("{first} {}", steps.join(" "))
    };
    let short = told(1, 0, 0);
    let has = "Its memory is bound to node 4, which has 1 MiB of 300 MiB free, 11.5 MiB short of what is aimed for there; its state is low";
    assert!(short.contains(has), "{short}");
    assert!(
        short.starts_with("web is entitled to 189 MiB: what its node has decides; "),
        "{short}"
    );
    let kept = told(15, 0, 40);
    let has = "Now: its balloon is to hold 40 MiB, and not the 0 B that would do for the host: node 4, to which it is bound, has no more";
    assert!(kept.contains(has), "{kept}");
    for (free, bound, balloon) in [(200, 0, 0), (200, 0, 40), (1, 1, 0), (15, 1, 40)] {
        let plain = told(free, bound, balloon);
        assert!(!plain.contains("node"), "{free} {bound} {balloon}: {plain}");
    }
}
