//! Targets of VMs in pools.

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use super::tree::{Child, HOST, Member, Tree};
use super::{Pool, PoolId, allocate};
use crate::shares::{Bound, Claim, Entitlement, VmDemand, bound};

/// The outcome for one pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolShare {
    /// Of which pool.
    pub id: PoolId,
    /// Of its VMs together, without their overhead.
    pub target: Pages,
    /// Its shares per page charged; comparable with its siblings', VMs and pools.
    pub rho: f64,
    /// What set the target. Max: its own, or that its VMs can use no more.
    pub bound: Bound,
}

/// Shares out `available` pages from the top of the tree of pools. `members` says where each VM is.
/// The answers are in the order of `vms` and `pools`.
///
/// Without pools this is [`targets`](crate::targets), page for page. `min <= target <= max` holds for
/// every VM, and for every pool as far as its VMs' bounds let it; the targets sum up to exactly
/// `available`, or to what the bounds leave nearest to it. A VM's target never falls when its own, or a
/// pool's above it, shares rise, nor when its own min, max or activity does.
pub fn divide(
    available: Pages,
    pools: &[Pool],
    vms: &[VmDemand],
    members: &[Member],
) -> (Vec<Entitlement>, Vec<PoolShare>) {
    let tree = Tree::new(pools, members.iter().copied(), &[]);
    divide_in(&tree, available, pools, vms)
}

pub(crate) fn divide_in(
    tree: &Tree,
    available: Pages,
    pools: &[Pool],
    vms: &[VmDemand],
) -> (Vec<Entitlement>, Vec<PoolShare>) {
    let claims = Claim::of_vms(vms);
    let found = allocate(tree, available, &claims);
    let mut dearest = vec![None; vms.len()];
    let mut above = vec![HOST; tree.groups.len()];
    for (g, group) in tree.groups.iter().enumerate() {
        for &child in &group.children {
            match child {
                Child::Leaf(i) => dearest[i as usize] = found.groups[g].dearest,
                Child::Group(c) => above[c as usize] = g,
            }
        }
    }
    let entitled = claims
        .iter()
        .zip(&found.held)
        .zip(dearest)
        .map(|((claim, &target), dearest)| claim.entitlement(target, dearest))
        .collect();
    let pools = pools
        .iter()
        .zip(&tree.of_pool)
        .map(|(pool, &g)| {
            let held = &found.groups[g];
            let dearest = found.groups[above[g]].dearest;
            PoolShare {
                id: pool.id,
                target: Pages(held.pages),
                rho: 1.0 / held.price,
                bound: bound(held.pages, held.floor, held.ceil, held.price, dearest),
            }
        })
        .collect();
    (entitled, pools)
}
