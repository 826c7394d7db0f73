//! NUMA nodes that run short while the host does not.
//!
//! A guest whose memory is bound to one node gets no page of another: where that node is full, the kernel reclaims what it
//! can, and then kills somebody. So a node with such guests has the states and thresholds of a host of its size, by its own
//! free memory; and what it lacks is taken from the VMs that are bound to it, as on a host that has nothing but that node
//! and those VMs: entitlements, min-funding revocation, and tools are the same. While a node lacks nothing, its VMs are
//! entitled to what there is on it, and get back of their balloons what it has to spare: else it would lack it again. Of what
//! is decided for the host and for the node, a VM gets what leaves it less.
//!
//! In low nobody is blocked for a node: whose faults wait is decided for the host as a whole.

use std::collections::BTreeSet;

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::plan::{Reason, Seen, Supply, VmPlan, VmState, plan_in};
use crate::pools::Tree;
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

/// Decides the states of the nodes, and makes entitlements and plans of VMs that are bound to them smaller, where a node
/// has less for them than the host. All are in the order of the snapshot's VMs.
pub(crate) fn relieve(
    snapshot: &Snapshot,
    demands: &[VmDemand],
    results: &mut [Entitlement],
    plans: &mut [VmPlan],
) -> Vec<NodeState> {
    let decide = |node: &Node| {
        let supply = supply(snapshot, node);
        let state = StateMachine::at(supply.thresholds, node.before).update(node.free);
        let missing = supply.deficit(state);
        relieve_one(snapshot, node, state, &supply, (demands, results, plans));
        NodeState { id: node.id, state, missing }
    };
    snapshot.nodes.iter().map(decide).collect()
}

fn relieve_one(
    snapshot: &Snapshot,
    node: &Node,
    state: State,
    supply: &Supply,
    (demands, results, plans): (&[VmDemand], &mut [Entitlement], &mut [VmPlan]),
) {
    let bound: BTreeSet<VmId> = node.bound.iter().copied().collect();
    let is_bound = |vm: &VmState| bound.contains(&vm.demand.id);
    let at: Vec<usize> = (0..snapshot.vms.len()).filter(|&i| is_bound(&snapshot.vms[i])).collect();
    if at.is_empty() {
        return;
    }
    let consumed: Pages = at.iter().map(|&i| snapshot.vms[i].consumed).sum();
    let tree = Tree::new(&snapshot.pools, at.iter().map(|&i| snapshot.vms[i].member()));
    let demands: Vec<VmDemand> = at.iter().map(|&i| demands[i]).collect();
    // What they may have there together.
    let available = (consumed + supply.free).saturating_sub(supply.goal());
    let vms: Vec<&VmState> = at.iter().map(|&i| &snapshot.vms[i]).collect();
    let (entitled, _) = entitle(&tree, available, &snapshot.pools, &vms, &demands);
    let standing: Vec<Seen> = at
        .iter()
        .zip(&demands)
        .zip(&entitled)
        .map(|((&i, demand), entitled)| {
            let target = entitled.target.min(results[i].target);
            Seen { vm: &snapshot.vms[i], demand, target }
        })
        .collect();
    let asked = plan_in(&tree, state.min(State::Hard), supply, &standing);
    for ((&i, entitled), asked) in at.iter().zip(entitled).zip(asked) {
        if entitled.target < results[i].target {
            results[i] = entitled;
        }
        plans[i] = stricter(plans[i], asked);
    }
}

/// What both ask for. What is evicted in exchange for a balloon that is let down is not evicted where that stays.
fn stricter(host: VmPlan, node: VmPlan) -> VmPlan {
    let exchanged = |plan: &VmPlan| matches!(plan.reason, Reason::Exchanged { .. });
    if exchanged(&host) && node.balloon_goal > host.balloon_goal {
        return node;
    }
    if exchanged(&node) && host.balloon_goal > node.balloon_goal {
        return host;
    }
    let by_node = (node.leave, host.balloon_goal) < (host.leave, node.balloon_goal);
    let reason = if by_node { node.reason } else { host.reason };
    VmPlan {
        id: host.id,
        balloon_goal: host.balloon_goal.max(node.balloon_goal),
        evict: host.evict.max(node.evict),
        leave: host.leave.min(node.leave),
        block: host.block || node.block,
        reason,
    }
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
