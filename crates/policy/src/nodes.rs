//! NUMA nodes that run short while the host does not.
//!
//! A guest whose memory is bound to one node gets no page of another: where that node is full, the kernel reclaims what it
//! can, and then kills somebody. So a node with such guests has the states and thresholds of a host of its size, by its own
//! free memory; and what it lacks is taken from the VMs that are bound to it, as on a host that has nothing but that node
//! and those VMs: entitlements, min-funding revocation, and tools are the same. While a node lacks nothing, it decides what of
//! their balloons they get back, for there is no more on it: else it would lack it again. Of what is decided for the host and for
//! the node, a VM gets what leaves it less; what it does not get of the host's memory, the host gives to others.
//!
//! In low nobody is blocked for a node: whose faults wait is decided for the host as a whole. Only where that is in low itself, what
//! a node that lacks something leaves a VM counts as its target there, too.

use std::collections::BTreeSet;

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::plan::{Reason, Seen, Supply, VmPlan, VmState, plan_in};
use crate::pools::{Pool, Tree, ancestors};
use crate::shares::{Entitlement, VmDemand};
use crate::state::{State, StateMachine};
use crate::turn::{Snapshot, entitle};

/// A NUMA node as it is seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// The kernel's number of it.
    pub id: u32,
    /// Its machine memory.
    pub size: Pages,
    /// What of it is free, or is page cache that the kernel drops when it is asked for memory.
    pub free: Pages,
    /// The state that the turn before ended in.
    pub before: State,
    /// VMs all of whose memory must be there.
    pub bound: Vec<VmId>,
}

/// What was decided for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Which one.
    pub id: u32,
    /// The state that it is in from here on.
    pub state: State,
    /// What is missing to the free memory that is aimed for; zero in plenty.
    pub missing: Pages,
}

/// The memory of a node, with thresholds that are the same part of it as the host's are of the budget.
fn supply(snapshot: &Snapshot, node: &Node) -> Supply {
    let thresholds = snapshot.thresholds.scaled(snapshot.budget, node.size);
    Supply { free: node.free, budget: node.size, thresholds, room: Pages::ZERO }
}

/// What a node has for one VM that is bound to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OnNode {
    /// The place of the VM in the snapshot.
    vm: usize,
    node: u32,
    /// The node lacks nothing: its entitlement says what of a balloon it has to give back, and nothing else.
    lacks_nothing: bool,
    consumed: Pages,
    min: Pages,
    entitled: Entitlement,
    plan: VmPlan,
}

/// The states of the nodes, and what they ask of the VMs that are bound to them. `results`: what the host entitles VMs to;
/// `surplus`: what it may let balloons down by beyond that.
pub(crate) fn look(
    snapshot: &Snapshot,
    surplus: Pages,
    demands: &[VmDemand],
    results: &[Entitlement],
) -> (Vec<NodeState>, Vec<OnNode>) {
    let mut asked = Vec::new();
    let decide = |node: &Node| {
        let supply = supply(snapshot, node);
        let state = StateMachine::at(supply.thresholds, node.before).update(node.free);
        let missing = supply.deficit(state);
        asked.extend(look_at((snapshot, surplus), node, state, &supply, (demands, results)));
        NodeState { id: node.id, state, missing }
    };
    let states = snapshot.nodes.iter().map(decide).collect();
    (states, asked)
}

/// What each VM of the snapshot can have at most by its balloon: as much as its node lets it. Else all.
pub(crate) fn most(snapshot: &Snapshot, asked: &[OnNode]) -> Vec<Pages> {
    let mut most = vec![Pages(u64::MAX); snapshot.vms.len()];
    for on in asked {
        most[on.vm] = snapshot.vms[on.vm].left_by(on.plan.balloon_goal);
    }
    most
}

/// Makes what is asked of VMs that are bound to a node as strict as the node wants it, and their entitlements smaller, where it lacks
/// something; where it does not, their balloons stay as they are on it, or are exchanged by both, and nothing else. Both are in the
/// order of the snapshot's VMs. `state`: the host's.
pub(crate) fn relieve(
    state: State,
    asked: &[OnNode],
    results: &mut [Entitlement],
    plans: &mut [VmPlan],
) {
    for on in asked {
        let plan = &mut plans[on.vm];
        if on.lacks_nothing {
            *plan = held(*plan, on.plan, on.node);
            continue;
        }
        if on.entitled.target < results[on.vm].target {
            results[on.vm] = on.entitled;
        }
        *plan = stricter(*plan, on.plan, on.node);
        plan.block |= state == State::Low && on.consumed > results[on.vm].target.max(on.min);
        match &mut plan.reason {
            Reason::Reclaim { block, .. } | Reason::Spared { block, .. } => *block = plan.block,
            _ => {}
        }
    }
}

fn is_exchange(plan: &VmPlan) -> bool {
    matches!(plan.reason, Reason::Exchanged { .. })
}

/// The host's plan, with a balloon that is let down no further than the node wants. What would have been evicted in exchange
/// stays; where both exchange, the node wants its part evicted, too.
fn held(host: VmPlan, node: VmPlan, id: u32) -> VmPlan {
    if is_exchange(&host) && is_exchange(&node) {
        return both(host, node, host.reason);
    }
    let balloon_goal = node.balloon_goal;
    if balloon_goal <= host.balloon_goal {
        return host;
    }
    let reason = kept(&host, &node, id);
    match host.reason {
        Reason::Exchanged { evict, .. } => {
            VmPlan { balloon_goal, evict: Pages::ZERO, leave: host.leave + evict, reason, ..host }
        }
        Reason::Entitled { .. } | Reason::Released { .. } | Reason::Enough { .. } => {
            VmPlan { balloon_goal, reason, ..host }
        }
        mut reason => {
            if let Reason::Reclaim { balloon, .. } = &mut reason {
                *balloon = balloon_goal;
            }
            VmPlan { balloon_goal, reason, ..host }
        }
    }
}

/// Why a balloon is larger than the host wants it.
fn kept(host: &VmPlan, node: &VmPlan, id: u32) -> Reason {
    Reason::NodeFull { node: id, host: host.balloon_goal, to: node.balloon_goal }
}

fn look_at<'a>(
    (snapshot, surplus): (&'a Snapshot, Pages),
    node: &Node,
    state: State,
    supply: &Supply,
    (demands, results): (&'a [VmDemand], &[Entitlement]),
) -> Vec<OnNode> {
    let bound: BTreeSet<VmId> = node.bound.iter().copied().collect();
    let is_bound = |vm: &VmState| bound.contains(&vm.demand.id);
    let at: Vec<usize> = (0..snapshot.vms.len()).filter(|&i| is_bound(&snapshot.vms[i])).collect();
    if at.is_empty() {
        return Vec::new();
    }
    let pools = on_node(snapshot, results, is_bound);
    let vms: Vec<&'a VmState> = at.iter().map(|&i| &snapshot.vms[i]).collect();
    let tree = Tree::new(&pools, vms.iter().map(|vm| vm.member()), &[]);
    // What the host does not give them is there for others.
    let within = |&i: &usize| {
        let demand = demands[i];
        let most = results[i].target.max(demand.min).min(demand.max);
        // But for what cannot be taken from it, which is not there for them.
        VmDemand { max: most.max(snapshot.vms[i].fixed()), ..demand }
    };
    let within: Vec<VmDemand> = at.iter().map(within).collect();
    // What they may have there together.
    let consumed: Pages = vms.iter().map(|vm| vm.consumed).sum();
    let available = (consumed + supply.free).saturating_sub(supply.goal());
    let (entitled, _) = entitle(&tree, available, &pools, &vms, &within);
    let seen = |((&i, vm), entitled): ((&usize, &&'a VmState), &Entitlement)| {
        let target = entitled.target.min(results[i].target);
        // What the host gives nobody is not given on paper, while others wait for it.
        let of_host = vm.left_by(vm.balloon_goal).max(results[i].target) + surplus;
        Seen { most_released: of_host, ..Seen::new(vm, &demands[i], target) }
    };
    let standing: Vec<Seen> = at.iter().zip(&vms).zip(&entitled).map(seen).collect();
    let asked = plan_in(&tree, state.min(State::Hard), supply, &standing);
    let lacks_nothing = supply.deficit(state).is_zero();
    let on = |((i, entitled), plan): ((usize, Entitlement), VmPlan)| OnNode {
        vm: i,
        node: node.id,
        lacks_nothing,
        consumed: snapshot.vms[i].consumed,
        min: demands[i].min,
        entitled,
        plan,
    };
    at.into_iter().zip(entitled).zip(asked).map(on).collect()
}

/// What a pool has on a node, and elsewhere.
#[derive(Clone, Copy, Default)]
struct Held {
    here: Pages,
    all: Pages,
    /// What its VMs may have: what they use, are entitled to, or their balloons leave them.
    may_here: Pages,
    may_elsewhere: Pages,
}

/// The pools as they are for those of their VMs that are bound to a node: of their min those have the part that they have of the
/// pools' memory, so that it is kept whatever several nodes take. Their max is the host's to see to, and only keeps the node from
/// giving back to their VMs what they may not have: else nobody would get it.
fn on_node(
    snapshot: &Snapshot,
    results: &[Entitlement],
    is_bound: impl Fn(&VmState) -> bool,
) -> Vec<Pool> {
    let Snapshot { pools, vms, outside, .. } = snapshot;
    let mut held = vec![Held::default(); pools.len()];
    for member in outside {
        for i in ancestors(pools, member.pool) {
            held[i].all += member.overhead;
            held[i].may_elsewhere += member.overhead;
        }
    }
    for (vm, entitled) in vms.iter().zip(results) {
        let has = vm.consumed + vm.overhead;
        let room = vm.left_by(vm.balloon_goal).max(entitled.target).max(vm.demand.min);
        let may = vm.consumed.max(room) + vm.overhead;
        for i in ancestors(pools, vm.pool) {
            held[i].all += has;
            if is_bound(vm) {
                held[i].here += has;
                held[i].may_here += may;
            } else {
                held[i].may_elsewhere += may;
            }
        }
    }
    let part = |(pool, held): (&Pool, Held)| {
        let (min, here, all) = (u128::from(pool.min.0), held.here.0, held.all.0.max(1));
        let min = Pages((min * u128::from(here)).div_ceil(u128::from(all)) as u64);
        let max = pool.max.map(|max| max.saturating_sub(held.may_elsewhere).max(held.may_here));
        Pool { min, max, ..pool.clone() }
    };
    pools.iter().zip(held).map(part).collect()
}

/// What both ask for. What is evicted in exchange for a balloon that is let down is not evicted where that stays.
fn stricter(host: VmPlan, node: VmPlan, id: u32) -> VmPlan {
    if is_exchange(&host) && node.balloon_goal > host.balloon_goal {
        return node;
    }
    if is_exchange(&node) && host.balloon_goal > node.balloon_goal {
        return host;
    }
    let by_node = (node.leave, host.balloon_goal) < (host.leave, node.balloon_goal);
    let reason = match node.reason {
        _ if !by_node => host.reason,
        Reason::WithinTarget { .. } | Reason::Plenty { .. } if node.leave == host.leave => {
            kept(&host, &node, id)
        }
        reason => reason,
    };
    both(host, node, reason)
}

/// All that either asks for.
fn both(host: VmPlan, node: VmPlan, mut reason: Reason) -> VmPlan {
    let balloon_goal = host.balloon_goal.max(node.balloon_goal);
    let evicted = host.evict.max(node.evict);
    match &mut reason {
        Reason::Reclaim { balloon, evict, .. } => (*balloon, *evict) = (balloon_goal, evicted),
        Reason::Exchanged { to, evict, .. } => (*to, *evict) = (balloon_goal, evicted),
        _ => {}
    }
    VmPlan {
        id: host.id,
        balloon_goal,
        evict: evicted,
        leave: host.leave.min(node.leave),
        block: host.block || node.block,
        reason,
    }
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
