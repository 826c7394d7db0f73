//! One turn of the accountable loop as one pure function: a consistent look at the host goes in, a
//! [`Decision`] with all its reasons comes out. The manager, the simulator and the replay of a
//! journal call this and nothing else, so that they cannot come to differ.

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::decision::Decision;
use crate::nodes::{self, Node};
use crate::plan::{Seen, Supply, VmState, plan_in};
use crate::policies::Policy;
use crate::pools::{Member, Pool, PoolShare, Tree, divide_in};
use crate::shares::{Entitlement, VmDemand, available};
use crate::state::{State, StateMachine, Thresholds};

/// All that a decision depends on, taken at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// "period", "parameters of db1 changed", "db1 starts".
    pub trigger: String,
    /// The state that the turn before ended in.
    pub before: State,
    /// Of free memory, by state.
    pub thresholds: Thresholds,
    /// Machine memory for VMs.
    pub budget: Pages,
    /// What of it is handed out to nobody.
    pub free: Pages,
    /// Memory that cannot be shared out: what VMs cost beside their own pages, what VMs out of reach have, and what one
    /// that has ended has not given back.
    pub overhead: Pages,
    /// Promised to VMs that are being started and are not among `vms` yet: min + overhead.
    #[serde(default)]
    pub starting: Pages,
    /// Of what was promised to VMs that start, what is to be free for them beside the goal before they
    /// begin, or begin to use it.
    #[serde(default)]
    pub room: Pages,
    /// All VMs that are managed.
    pub vms: Vec<VmState>,
    /// The groups that VMs are in; none: all are children of the host.
    #[serde(default)]
    pub pools: Vec<Pool>,
    /// What is held in pools by, or promised there to, VMs that are not among `vms`: those that start, and those out of
    /// reach. Their pools' bounds count it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<Member>,
    /// Which policy reads them, and what it knows beside their samples.
    #[serde(default)]
    pub policy: Policy,
    /// NUMA nodes with memory, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<Node>,
}

impl Snapshot {
    /// Whose child each of `vms` is.
    pub(crate) fn tree(&self) -> Tree {
        Tree::new(&self.pools, self.vms.iter().map(VmState::member), &self.outside)
    }
}

/// Decides: the state, what each VM is entitled to, and what is asked of it now. The same snapshot
/// always gives the same decision, bit for bit.
pub fn decide(snapshot: Snapshot) -> Decision {
    let Snapshot { before, thresholds, budget, free, overhead, .. } = snapshot;
    let state = StateMachine::at(thresholds, before).update(free);
    let available = available(budget, overhead, &thresholds).saturating_sub(snapshot.starting);
    let demands = snapshot.policy.demands(available, &snapshot.pools, &snapshot.vms);
    let tree = snapshot.tree();
    let vms: Vec<&VmState> = snapshot.vms.iter().collect();
    let (mut results, pools) = entitle(&tree, available, &snapshot.pools, &vms, &demands);
    let supply = Supply { free, budget, thresholds, room: snapshot.room };
    let (nodes, on_nodes) = nodes::look(&snapshot, supply.surplus(state), &demands, &results);
    let standing: Vec<Seen> = snapshot
        .vms
        .iter()
        .zip(&demands)
        .zip(&results)
        .zip(nodes::most(&snapshot, &on_nodes))
        .map(|(((vm, demand), entitled), most)| Seen {
            most,
            ..Seen::new(vm, demand, entitled.target)
        })
        .collect();
    let mut plans = plan_in(&tree, state, &supply, &standing);
    nodes::relieve(state, &on_nodes, &mut results, &mut plans);
    Decision { snapshot, state, available, results, pools, plans, nodes }
}

/// What each VM and pool is entitled to. What cannot be taken from a VM above its target is not there for the others: they are
/// entitled to what is left, so that one which lacks its share finds it with those that can give. The target of the one stays what
/// it was: it is above it, and no more is given to it than to any other.
pub(crate) fn entitle(
    tree: &Tree,
    available: Pages,
    pools: &[Pool],
    vms: &[&VmState],
    demands: &[VmDemand],
) -> (Vec<Entitlement>, Vec<PoolShare>) {
    let (mut results, mut shares) = divide_in(tree, available, pools, demands);
    let mut held = demands.to_vec();
    let mut is_kept = vec![false; vms.len()];
    // With less for all, one that had no more than its target can have more.
    loop {
        let mut found = false;
        for (i, vm) in vms.iter().enumerate() {
            let fixed = vm.fixed();
            if !is_kept[i] && fixed > results[i].target {
                (found, is_kept[i]) = (true, true);
                // Also what is above its max: nobody else has that.
                held[i].min = held[i].min.max(fixed);
                held[i].max = held[i].max.max(fixed);
            }
        }
        if !found {
            return (results, shares);
        }
        let less;
        (less, shares) = divide_in(tree, available, pools, &held);
        let others = results.iter_mut().zip(less).zip(&is_kept).filter(|(_, kept)| !**kept);
        others.for_each(|((result, less), _)| *result = less);
    }
}
