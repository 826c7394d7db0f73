use super::*;
use crate::balloon::Health;
use crate::plan::Reason;
use crate::pools::PoolId;
use crate::shares::TaxRate;
use crate::state::Thresholds;
use crate::{Decision, Tools, decide};
use proptest::prelude::*;

const GIB: u64 = 1 << 18;

fn vm(id: u32, consumed: u64, min: u64) -> VmState {
    VmState {
        demand: VmDemand {
            id: VmId(id),
            shares: 1_000,
            min: Pages(min),
            max: Pages(8 * GIB),
            tax: TaxRate::new(0.75).unwrap(),
            active: Pages(consumed / 2),
        },
        consumed: Pages(consumed),
        size: Pages(8 * GIB),
        balloon_goal: Pages::ZERO,
        balloon_health: Health::Healthy,
        balloon_limit: Pages(8 * GIB),
        balloon_rate: None,
        short: false,
        wants_more: false,
        swap_free: Pages(8 * GIB),
        pool: None,
        overhead: Pages::ZERO,
        beyond: Pages::ZERO,
        saved: Pages::ZERO,
        tools: Tools::default(),
    }
}

fn node(id: u32, free: u64, before: State, bound: &[u32]) -> Node {
    let bound = bound.iter().copied().map(VmId).collect();
    Node { id, size: Pages(16 * GIB), free: Pages(free), before, bound }
}

/// Of a node.
fn thresholds() -> Thresholds {
    Thresholds::default_for(Pages(32 * GIB)).scaled(Pages(32 * GIB), Pages(16 * GIB))
}

fn host(vms: Vec<VmState>, nodes: Vec<Node>) -> Decision {
    pooled(vms, Vec::new(), nodes)
}

/// Two nodes of 16 GiB; the host has plenty.
fn pooled(vms: Vec<VmState>, pools: Vec<Pool>, nodes: Vec<Node>) -> Decision {
    let budget = Pages(32 * GIB);
    let used: Pages = vms.iter().map(|vm| vm.consumed).sum();
    decide(Snapshot {
        trigger: "period".into(),
        before: State::High,
        thresholds: Thresholds::default_for(budget),
        budget,
        free: budget.saturating_sub(used),
        overhead: Pages::ZERO,
        starting: Pages::ZERO,
        room: Pages::ZERO,
        vms,
        pools,
        outside: Vec::new(),
        policy: crate::Policy::default(),
        nodes,
    })
}

#[test]
fn a_node_that_is_short_takes_from_those_bound_to_it_and_nobody_else() {
    let vms = || vec![vm(0, 7 * GIB, 0), vm(1, 7 * GIB, 0), vm(2, 7 * GIB, 0)];
    // 2% of it: between the lower edges of soft and of hard.
    let free = 16 * GIB / 40;
    let d =
        host(vms(), vec![node(0, free, State::High, &[0, 1]), node(1, 8 * GIB, State::High, &[2])]);
    assert_eq!(d.state, State::High);
    let missing = thresholds().goal() - Pages(free);
    assert_eq!(
        d.nodes,
        [
            NodeState { id: 0, state: State::Soft, missing },
            NodeState { id: 1, state: State::High, missing: Pages::ZERO }
        ]
    );
    let asked = |i: usize| d.plans[i].balloon_goal.saturating_sub(Pages(GIB));
    assert_eq!(asked(0) + asked(1), missing, "{:?}", d.plans);
    assert_eq!((d.plans[2].balloon_goal, d.plans[2].evict), (Pages::ZERO, Pages::ZERO));
    assert!(d.results[0].target < Pages(8 * GIB) && d.results[2].target == Pages(8 * GIB));
    assert!(
        d.plans.iter().all(|plan| plan.evict.is_zero() && !plan.block),
        "soft is the balloon's"
    );
    // Without the nodes nothing is taken from anybody.
    let calm = host(vms(), Vec::new());
    assert!(calm.plans.iter().all(|plan| plan.balloon_goal.is_zero()) && calm.nodes.is_empty());
}

#[test]
fn in_hard_it_pages_in_low_it_blocks_nobody_and_mins_are_kept() {
    let vms = vec![vm(0, 7 * GIB, 7 * GIB), vm(1, 7 * GIB, 0)];
    for (free, state) in [(16 * GIB / 70, State::Hard), (0, State::Low)] {
        let d = host(vms.clone(), vec![node(0, free, State::High, &[0, 1])]);
        assert_eq!(d.nodes[0].state, state);
        assert_eq!(d.plans[0].evict, Pages::ZERO, "its min");
        assert_eq!(d.plans[1].evict, d.nodes[0].missing);
        assert!(d.plans.iter().all(|plan| !plan.block));
    }
}

#[test]
fn a_node_comes_back_by_the_upper_edge_and_one_without_vms_does_nothing() {
    let (t, vms) = (thresholds(), vec![vm(0, 7 * GIB, 0)]);
    for (free, before, state) in [
        (t.lower_edge(State::High), State::High, State::High),
        (t.upper_edge(State::High) - Pages(1), State::Soft, State::Soft),
        (t.upper_edge(State::High), State::Soft, State::High),
    ] {
        let d = host(vms.clone(), vec![node(0, free.0, before, &[0])]);
        assert_eq!(d.nodes[0].state, state);
        assert_eq!(d.plans[0].balloon_goal.is_zero(), state == State::High);
    }
    let d = host(vms, vec![node(0, 0, State::High, &[]), node(1, 0, State::High, &[7])]);
    assert!(d.nodes.iter().all(|n| n.state == State::Low));
    assert!(d.plans[0].evict.is_zero() && d.plans[0].balloon_goal.is_zero());
}

/// Guests that want all of a node which has too little for them, on a host that has plenty: once they have given what is
/// missing, nothing is given back that would be missing again.
#[test]
fn balloons_on_a_full_node_come_to_rest() {
    let mut vms = vec![vm(0, 8 * GIB, 0), vm(1, 8 * GIB, 0), vm(2, 4 * GIB, 0)];
    let mut before = State::High;
    let mut last = Vec::new();
    for turn in 0..200 {
        let used: u64 = vms[..2].iter().map(|vm| vm.consumed.0).sum();
        let node = node(0, (16 * GIB).saturating_sub(used), before, &[0, 1]);
        let d = host(vms.clone(), vec![node]);
        before = d.nodes[0].state;
        let goals: Vec<Pages> = d.plans.iter().map(|plan| plan.balloon_goal).collect();
        for (vm, plan) in vms.iter_mut().zip(&d.plans) {
            // A second of a driver, and of a guest that uses what it has.
            let step = Pages(GIB / 16);
            let goal = plan.balloon_goal;
            vm.balloon_goal =
                goal.clamp(vm.balloon_goal.saturating_sub(step), vm.balloon_goal + step);
            vm.wants_more = true;
            vm.consumed = vm.left_by(vm.balloon_goal).min(vm.consumed + step);
        }
        assert!(turn < 40 || goals == last, "turn {turn}: {last:?}, then {goals:?}");
        last = goals;
    }
    let free = Pages(16 * GIB) - vms[0].consumed - vms[1].consumed;
    assert!(
        free >= thresholds().lower_edge(State::High) && free.0 <= thresholds().goal().0 + GIB / 4,
        "{free:?}"
    );
    assert_eq!(last[2], Pages::ZERO, "who is not bound to it has all of its memory");
    // One of them is gone: the other gets its memory back.
    vms.remove(1);
    for _ in 0..200 {
        let node = node(0, 16 * GIB - vms[0].consumed.0, before, &[0]);
        let d = host(vms.clone(), vec![node]);
        before = d.nodes[0].state;
        vms[0].balloon_goal = d.plans[0].balloon_goal;
        vms[0].consumed = vms[0].left_by(vms[0].balloon_goal);
    }
    assert_eq!(vms[0].balloon_goal, Pages::ZERO);
}

fn pool(id: u32, shares: u32, min: u64) -> Pool {
    Pool {
        id: PoolId(id),
        name: format!("p{id}"),
        parent: None,
        shares,
        min: Pages(min),
        max: None,
        expandable: false,
        tax: None,
    }
}

/// What a pool's min promises its VMs have elsewhere, too.
#[test]
fn a_pools_min_does_not_keep_its_vms_on_a_full_node_from_giving() {
    for (min, takes) in [(8, true), (16, false)] {
        let mut vms = vec![vm(0, 8 * GIB, 0), vm(1, 8 * GIB, 0)];
        vms.iter_mut().for_each(|vm| vm.pool = Some(PoolId(0)));
        let d = pooled(vms, vec![pool(0, 1_000, min * GIB)], vec![node(0, 0, State::High, &[0])]);
        let missing = if takes { d.nodes[0].missing } else { Pages::ZERO };
        assert_eq!(d.plans[0].evict, missing, "a min of {min} GiB");
        assert_eq!(d.plans[1].evict, Pages::ZERO);
    }
}

/// What the host does not give to one, the others on its node have.
#[test]
fn what_a_full_node_takes_goes_by_what_the_host_gives() {
    let mut vms: Vec<VmState> = (0..9).map(|id| vm(id, 2 * GIB, 0)).collect();
    vms.iter_mut().for_each(|vm| {
        vm.demand.tax = TaxRate::NONE;
        vm.pool = Some(PoolId(0));
    });
    (vms[8].pool, vms[8].consumed, vms[8].demand.shares) = (None, Pages(8 * GIB), 4_000);
    let d = pooled(vms, vec![pool(0, 4_000, 0)], vec![node(0, GIB / 4, State::High, &[0, 8])]);
    assert_eq!(d.nodes[0].state, State::Hard);
    let left = 10 * GIB - d.nodes[0].missing.0;
    let got = [0, 8].map(|i| d.results[i].target.0);
    // As many shares as the pool, of which the one in it is alone there; but the host gives that less than half of it.
    assert!(got[0] + got[1] >= left - 2, "nothing of {left} is nobody's: {got:?}");
    let mut snapshot = d.snapshot.clone();
    snapshot.nodes.clear();
    assert_eq!(got[0], decide(snapshot).results[0].target.0, "{got:?}");
}

/// Its own VMs elsewhere are no reason to take all from the one here: turn after turn it stays where it is.
#[test]
fn a_pools_vm_on_a_full_node_comes_to_rest_above_its_min() {
    let mut vms = vec![vm(0, 7 * GIB, 0), vm(1, 8 * GIB, 0)];
    vms.extend((2..6).map(|id| vm(id, 8 * GIB, 0)));
    for (i, vm) in vms.iter_mut().enumerate() {
        (vm.demand.tax, vm.demand.shares) = (TaxRate::NONE, 4_000);
        vm.pool = (i != 1).then_some(PoolId(0));
        vm.wants_more = true;
    }
    let mut before = State::High;
    let mut least = 8 * GIB;
    for _ in 0..100 {
        let free = (16 * GIB).saturating_sub(vms[0].consumed.0 + vms[1].consumed.0);
        let mut snapshot =
            pooled(vms.clone(), vec![pool(0, 4_000, 0)], vec![node(0, free, before, &[0, 1])])
                .snapshot;
        (snapshot.budget, snapshot.free) = (Pages(64 * GIB), Pages(17 * GIB));
        let d = decide(snapshot);
        before = d.nodes[0].state;
        for (vm, plan) in vms.iter_mut().zip(&d.plans).take(2) {
            vm.balloon_goal = plan.balloon_goal;
            vm.consumed = vm.left_by(vm.balloon_goal);
            vm.tools.ballooned = vm.balloon_goal;
        }
        least = least.min(vms[0].consumed.0);
    }
    assert!(least > 6 * GIB, "{least}");
}

/// What several nodes take of a pool leaves it its min.
#[test]
fn two_full_nodes_leave_a_pool_its_min() {
    let mut vms = vec![vm(0, 6 * GIB, 0), vm(1, 7 * GIB, 0)];
    vms.iter_mut().for_each(|vm| vm.pool = Some(PoolId(0)));
    let nodes = [0, 1].map(|id| node(id, 0, State::High, &[id]));
    let d = pooled(vms, vec![pool(0, 1_000, 12 * GIB)], Vec::from(nodes));
    let left = |d: &Decision| d.plans.iter().map(|plan| plan.leave).sum::<Pages>();
    let is_min = |left: Pages| left >= Pages(12 * GIB) && left <= Pages(12 * GIB + 2);
    assert!(is_min(left(&d)), "{:?}", d.plans);
    // What a VM costs beside its pages is of the min, too.
    let mut snapshot = d.snapshot;
    (snapshot.vms[0].consumed, snapshot.vms[0].overhead) = (Pages(4 * GIB), Pages(3 * GIB));
    let d = decide(snapshot);
    assert!(is_min(left(&d) + Pages(3 * GIB)), "{:?}", d.plans);
}

/// What cannot be taken from one is not there for the others, whatever the host would give it.
#[test]
fn what_one_cannot_give_on_a_node_is_asked_of_the_others_there() {
    let mut vms = vec![vm(0, 8 * GIB, 0), vm(1, 7 * GIB + GIB / 2, 0), vm(2, 8 * GIB, 0)];
    vms.iter_mut().for_each(|vm| vm.demand.tax = TaxRate::NONE);
    (vms[0].demand.shares, vms[0].swap_free, vms[0].balloon_health) =
        (1, Pages::ZERO, Health::Stuck);
    vms[2].demand.shares = 100_000;
    let mut snapshot = host(vms, vec![node(0, GIB / 2, State::High, &[0, 1])]).snapshot;
    snapshot.budget = Pages(24 * GIB);
    let d = decide(snapshot);
    assert!(!d.nodes[0].missing.is_zero());
    assert!(d.results[0].target < Pages(7 * GIB), "{:?}", d.results);
    let asked = d.plans[1].balloon_goal.saturating_sub(Pages(GIB / 2)).max(d.plans[1].evict);
    assert_eq!(asked, d.nodes[0].missing, "{:?}", d.plans);
}

#[test]
fn a_node_that_lacks_nothing_takes_nothing_from_what_the_host_gives() {
    let mut vms = vec![vm(0, 6 * GIB, 0), vm(1, 2 * GIB, 0), vm(2, 15 * GIB, 0)];
    vms[2].size = Pages(16 * GIB);
    vms[2].demand.max = Pages(16 * GIB);
    let nodes = || vec![node(0, 3 * GIB, State::High, &[0, 1])];
    let mut snapshot = host(vms, nodes()).snapshot;
    (snapshot.budget, snapshot.free) = (Pages(24 * GIB), Pages(GIB / 10));
    let with = decide(snapshot.clone());
    assert_eq!((with.state, with.nodes[0].missing), (State::Low, Pages::ZERO));
    snapshot.nodes.clear();
    let without = decide(snapshot);
    assert_eq!((&with.results, &with.plans), (&without.results, &without.plans));
}

/// Memory that the host gives nobody: who is below what the host entitles it to has it first.
#[test]
fn what_a_node_has_to_spare_goes_to_whom_the_host_gives_it() {
    let mut vms = vec![vm(0, 4 * GIB, 0), vm(1, 4 * GIB, 0), vm(2, 16 * GIB, 0)];
    for vm in &mut vms[..2] {
        (vm.balloon_goal, vm.wants_more) = (Pages(4 * GIB), true);
        vm.tools.ballooned = Pages(4 * GIB);
    }
    (vms[0].demand.shares, vms[1].short) = (100_000, true);
    (vms[2].size, vms[2].demand.max) = (Pages(16 * GIB), Pages(16 * GIB));
    let mut snapshot = host(vms, vec![node(0, 3 * GIB, State::High, &[0, 1])]).snapshot;
    // The host is in soft.
    (snapshot.budget, snapshot.free) = (Pages(25 * GIB), Pages(25 * GIB / 33));
    let d = decide(snapshot);
    assert_eq!((d.state, d.nodes[0].state), (State::Soft, State::High));
    assert!(d.results[0].target >= Pages(7 * GIB), "{:?}", d.results);
    assert!(d.plans[0].balloon_goal < Pages(3 * GIB), "{:?}", d.plans);
}

/// The max of a pool is the host's to see to: what its VMs elsewhere have is taken there.
#[test]
fn a_pools_max_takes_nothing_on_a_node_that_lacks_nothing() {
    let mut vms = vec![vm(0, 5 * GIB, 0), vm(1, 6 * GIB, 0), vm(2, GIB, 0)];
    vms[..2].iter_mut().for_each(|vm| vm.pool = Some(PoolId(0)));
    (vms[0].balloon_goal, vms[0].wants_more) = (Pages(3 * GIB), true);
    let limited = Pool { max: Some(Pages(10 * GIB)), ..pool(0, 1_000, 0) };
    let nodes = vec![node(0, 8 * GIB, State::High, &[0, 2]), node(1, 8 * GIB, State::High, &[1])];
    let mut snapshot = pooled(vms, vec![limited], nodes).snapshot;
    let with = decide(snapshot.clone());
    snapshot.nodes.clear();
    assert_eq!(with.plans, decide(snapshot).plans);
}

/// Nor is what its pool lets a VM not have kept from the others on its node.
#[test]
fn what_a_pool_lets_none_have_is_given_to_others_on_the_node() {
    let mut vms = vec![vm(1, 2 * GIB, 0), vm(2, 4 * GIB, 0), vm(3, GIB, 0)];
    for (vm, (balloon, shares)) in vms.iter_mut().zip([(6, 1_000), (4, 81_920), (0, 655_360)]) {
        (vm.balloon_goal, vm.demand.shares) = (Pages(balloon * GIB), shares);
        (vm.demand.active, vm.wants_more) = (vm.demand.max, balloon > 0);
        vm.tools.ballooned = vm.balloon_goal;
    }
    (vms[0].pool, vms[0].overhead) = (Some(PoolId(0)), Pages(GIB));
    (vms[2].size, vms[2].demand.max) = (Pages(64 * GIB), Pages(64 * GIB));
    vms[2].demand.active = Pages(64 * GIB);
    let limited = Pool { max: Some(Pages(3 * GIB)), ..pool(0, 163_840, 0) };
    let d = pooled(vms, vec![limited], vec![node(0, 5 * GIB, State::High, &[1, 2])]);
    assert_eq!(d.results[0].target, Pages(2 * GIB), "its pool's max");
    assert_eq!(d.plans[0].balloon_goal, Pages(6 * GIB));
    assert!(d.plans[1].balloon_goal < Pages(GIB), "{:?}", d.plans);
}

/// An exchange needs no memory to spare, on a node either.
#[test]
fn a_dear_balloon_of_a_bound_vm_is_exchanged_as_any_other() {
    let mut dear = vm(0, 4 * GIB, 0);
    (dear.balloon_goal, dear.tools.ballooned) = (Pages(4 * GIB), Pages(4 * GIB));
    (dear.tools.first, dear.tools.ceiling) = (crate::Tool::Paging, Some(Pages(3 * GIB)));
    let mut other = vm(1, 26 * GIB, 0);
    (other.size, other.demand.max) = (Pages(27 * GIB), Pages(27 * GIB));
    (other.demand.shares, other.demand.active) = (10_000, Pages(26 * GIB));
    let mut snapshot = host(vec![dear, other], vec![node(0, 8 * GIB, State::High, &[0])]).snapshot;
    assert!(snapshot.free < snapshot.thresholds.goal(), "{}", snapshot.free);
    let bound = decide(snapshot.clone());
    snapshot.nodes.clear();
    let free = decide(snapshot);
    assert!(is_exchange(&free.plans[0]) && free.plans[0].balloon_goal < Pages(4 * GIB));
    assert_eq!(bound.plans, free.plans);
}

/// The pager goes by targets, and what is decided says the same.
#[test]
fn whom_a_node_entitles_to_less_waits_in_low_and_is_said_to() {
    let mut vms = vec![vm(0, 7 * GIB, 0), vm(1, 7 * GIB, 0), vm(2, 16 * GIB, 0)];
    vms.iter_mut().for_each(|vm| vm.demand.tax = TaxRate::NONE);
    (vms[2].size, vms[2].demand.max) = (Pages(16 * GIB), Pages(16 * GIB));
    let mut snapshot = host(vms, vec![node(0, GIB / 8, State::High, &[0, 1])]).snapshot;
    snapshot.vms[2].demand.shares = 1;
    (snapshot.free, snapshot.before) = (Pages(GIB / 4), State::Low);
    let mut without = snapshot.clone();
    without.nodes.clear();
    assert!(!decide(without).plans[0].block);
    let d = decide(snapshot);
    assert_eq!(d.state, State::Low);
    assert!(d.results[0].target < Pages(7 * GIB), "{:?}", d.results);
    let Reason::Reclaim { block, .. } = d.plans[0].reason else { panic!("{:?}", d.plans[0]) };
    assert!(d.plans[0].block && block, "{:?}", d.plans[0]);
}

/// What is left of its entitlement by the node that lacks something counts on the host, too: who has more waits in low, and who has as
/// much does not.
#[test]
fn in_low_who_has_no_more_than_a_node_entitles_it_to_does_not_wait() {
    let d = host(vec![vm(0, 7 * GIB, 0)], Vec::new());
    for (consumed, target, min, waits) in
        [(101, 100, 0, true), (100, 100, 0, false), (101, 100, 101, false), (102, 100, 101, true)]
    {
        let entitled = Entitlement { target: Pages(target), ..d.results[0] };
        let plan = VmPlan { block: false, ..d.plans[0] };
        let on = |lacks_nothing| OnNode {
            vm: 0,
            node: 0,
            lacks_nothing,
            consumed: Pages(consumed),
            min: Pages(min),
            entitled,
            plan,
        };
        let relieved = |state, lacks_nothing| {
            let (mut results, mut plans) = (d.results.clone(), vec![plan]);
            relieve(state, &[on(lacks_nothing)], &mut results, &mut plans);
            (plans[0].block, results[0].target)
        };
        let host = d.results[0].target;
        assert_eq!(relieved(State::Low, false), (waits, Pages(target)), "{consumed} of {target}");
        assert_eq!(relieved(State::Hard, false), (false, Pages(target)));
        assert_eq!(relieved(State::Low, true), (false, host), "it lacks nothing");
    }
}

/// What a node keeps one VM from having, the host gives to the others.
#[test]
fn memory_that_a_node_keeps_from_a_vm_is_there_for_the_others() {
    let mut vms = vec![
        vm(0, 6 * GIB, 0),
        vm(1, 6 * GIB, 0),
        vm(2, 9 * GIB, 9 * GIB),
        vm(3, 2 * GIB, 12 * GIB),
    ];
    for vm in &mut vms {
        (vm.size, vm.demand.max) = (Pages(16 * GIB), Pages(16 * GIB));
        vm.balloon_limit = Pages(16 * GIB);
        (vm.demand.tax, vm.demand.active) = (TaxRate::NONE, Pages(16 * GIB));
    }
    for vm in &mut vms[..2] {
        (vm.balloon_goal, vm.wants_more, vm.demand.shares) = (Pages(10 * GIB), true, 2_000);
        vm.tools.ballooned = Pages(10 * GIB);
    }
    let mut before = State::High;
    // The first is bound to a node whose other memory the third has.
    for _ in 0..60 {
        let free = (16 * GIB).saturating_sub(vms[0].consumed.0 + 9 * GIB);
        let d = host(vms.clone(), vec![node(0, free, before, &[0])]);
        before = d.nodes[0].state;
        for (vm, plan) in vms.iter_mut().zip(&d.plans).take(2) {
            vm.balloon_goal = plan.balloon_goal;
            vm.consumed = vm.left_by(vm.balloon_goal);
            vm.tools.ballooned = vm.balloon_goal;
        }
    }
    assert!(vms[0].consumed <= Pages(6 * GIB), "{:?}", vms[0].consumed);
    let free = Pages(32 * GIB) - vms.iter().map(|vm| vm.consumed).sum::<Pages>();
    let goal = Thresholds::default_for(Pages(32 * GIB)).goal();
    assert!(free.0 <= goal.0 + GIB / 2, "{free} free, and the second has {:?}", vms[1].consumed);
}

/// Where both exchange, the node's part is evicted, too; where the node does not, nothing is.
#[test]
fn an_exchange_on_a_node_that_lacks_nothing_is_one_of_both() {
    let (balloon, paging) = (None, None);
    let exchange = |to, evict| {
        let (from, to, evict) = (Pages(20), Pages(to), Pages(evict));
        VmPlan {
            id: VmId(3),
            balloon_goal: to,
            evict,
            leave: Pages(100) - evict,
            block: false,
            reason: Reason::Exchanged { from, to, evict, balloon, paging },
        }
    };
    let got = held(exchange(10, 0), exchange(10, 6), 3);
    assert_eq!((got.balloon_goal, got.evict, got.leave), (Pages(10), Pages(6), Pages(94)));
    assert!(got.reason.to_string().contains(&format!("({} evicted)", Pages(6))), "{}", got.reason);
    let stays = VmPlan {
        balloon_goal: Pages(20),
        evict: Pages::ZERO,
        leave: Pages(100),
        reason: Reason::WithinTarget { consumed: Pages(100), target: Pages(200) },
        ..exchange(10, 0)
    };
    let got = held(exchange(10, 6), stays, 3);
    assert_eq!((got.balloon_goal, got.evict, got.leave), (Pages(20), Pages::ZERO, Pages(100)));
    assert_eq!(got.reason, Reason::NodeFull { node: 3, host: Pages(10), to: Pages(20) });
    assert_eq!(held(stays, exchange(10, 6), 3), stays, "the host exchanges nothing");
}

/// What is told is what it is asked for: by the node where that takes more, by the host where that does.
#[test]
fn of_host_and_node_the_stricter_counts_and_is_told() {
    let stricter = |host, node| stricter(host, node, 3);
    let by_host = Reason::Plenty { consumed: Pages(10), target: Pages(9) };
    let by_node = Reason::WithinTarget { consumed: Pages(10), target: Pages(20) };
    let plan = |balloon_goal, evict, leave, block, reason| VmPlan {
        id: VmId(3),
        balloon_goal: Pages(balloon_goal),
        evict: Pages(evict),
        leave: Pages(leave),
        block,
        reason,
    };
    let host = plan(10, 5, 100, true, by_host);
    assert_eq!(
        stricter(host, plan(20, 4, 90, false, by_node)),
        plan(20, 5, 90, true, by_node),
        "the node leaves less"
    );
    assert_eq!(
        stricter(host, plan(20, 4, 100, false, by_node)),
        plan(20, 5, 100, true, Reason::NodeFull { node: 3, host: Pages(10), to: Pages(20) }),
        "the node keeps its balloon"
    );
    for leave in [100, 110] {
        let node = plan(4, 6, leave, false, by_node);
        assert_eq!(stricter(host, node), plan(10, 6, 100, true, by_host), "the host does");
    }
    let (balloon, paging) = (None, None);
    let exchange =
        Reason::Exchanged { from: Pages(20), to: Pages(10), evict: Pages(5), balloon, paging };
    let exchanged = plan(10, 5, 100, false, exchange);
    for (other, counts) in [(20, false), (10, true)] {
        let other = plan(other, 0, 120, false, by_node);
        let wanted = if counts { plan(10, 5, 100, false, exchange) } else { other };
        assert_eq!(stricter(exchanged, other), wanted, "the host exchanges");
        assert_eq!(stricter(other, exchanged), wanted, "the node does");
    }
    // What is told is what is asked for together.
    let reclaim = |balloon: u64, evict: u64| Reason::Reclaim {
        state: State::Hard,
        deficit: Pages(50),
        over_max: Pages::ZERO,
        over_pool: Pages::ZERO,
        consumed: Pages(150),
        leave: Pages(100),
        balloon: Pages(balloon),
        evict: Pages(evict),
        cause: None,
        no_swap_for: Pages::ZERO,
        block: false,
    };
    let got = stricter(plan(10, 5, 100, false, reclaim(10, 5)), plan(20, 7, 110, false, by_node));
    assert_eq!(got, plan(20, 7, 100, false, reclaim(20, 7)));
    let got = held(plan(10, 5, 100, false, reclaim(10, 5)), plan(20, 0, 150, false, by_node), 3);
    assert_eq!(got, plan(20, 5, 100, false, reclaim(20, 5)));
    let free = VmPlan { block: false, ..host };
    assert!(!stricter(free, free).block && stricter(free, host).block);
}

proptest! {
    /// Whatever a node lacks: nobody gets more than without it, no min is broken, and what is asked is no more than is
    /// missing.
    #[test]
    fn nodes_only_ever_ask_for_more(
        consumed in prop::collection::vec(0..8 * GIB, 1..8),
        mins in prop::collection::vec(0..4 * GIB, 8),
        free in 0..2 * GIB,
        host_free in 0..8 * GIB,
        on_node in prop::collection::vec(any::<bool>(), 8),
        in_pool in prop::collection::vec(any::<bool>(), 8),
        balloons in prop::collection::vec(any::<bool>(), 8),
        pool_max in 0u64..20,
    ) {
        let vms: Vec<VmState> = consumed
            .iter()
            .zip(&mins)
            .enumerate()
            .map(|(i, (&c, &min))| {
                let pool = in_pool[i].then_some(PoolId(0));
                let goal = Pages(if balloons[i] { 8 * GIB - c } else { 0 });
                VmState { pool, balloon_goal: goal, wants_more: balloons[i], ..vm(i as u32, c, min) }
            })
            .collect();
        let pools = vec![Pool { max: (pool_max < 16).then_some(Pages(pool_max * GIB)), ..pool(0, 2_000, 0) }];
        let bound: Vec<u32> = (0..vms.len() as u32).filter(|&i| on_node[i as usize]).collect();
        let with = pooled(vms.clone(), pools, vec![node(0, free, State::High, &bound)]);
        let mut snapshot = with.snapshot.clone();
        snapshot.free = Pages(host_free);
        let with = decide(snapshot.clone());
        snapshot.nodes.clear();
        let without = decide(snapshot);
        let mut more = Pages::ZERO;
        let kept_from_one = balloons.iter().zip(&vms).any(|(ballooned, _)| *ballooned);
        let lacks_nothing = with.nodes[0].missing.is_zero();
        for (i, vm) in vms.iter().enumerate() {
            let (a, b) = (&with.plans[i], &without.plans[i]);
            // Where a node lacks nothing, it keeps balloons, and nothing else.
            if lacks_nothing {
                prop_assert_eq!((a.evict, a.leave, a.block), (b.evict, b.leave, b.block));
                prop_assert_eq!(with.results[i], without.results[i]);
                prop_assert!(a.balloon_goal <= b.balloon_goal.max(vm.balloon_goal));
            }
            prop_assert!(with.results[i].target <= without.results[i].target);
            prop_assert!(a.evict >= b.evict && a.leave <= b.leave);
            // What is kept from one VM others may be given.
            prop_assert!(kept_from_one || a.balloon_goal >= b.balloon_goal);
            prop_assert!(a.leave >= vm.demand.min.min(vm.consumed));
            if !bound.contains(&(i as u32)) {
                prop_assert_eq!((a.evict, a.leave, a.block), (b.evict, b.leave, b.block));
                prop_assert!(kept_from_one || a == b);
            } else if without.state == State::High {
                more += a.evict;
            }
        }
        prop_assert!(more <= with.nodes[0].missing);
    }
}
