//! Memory where it buys most: pages go to the VM whose next page spares the most misses per second,
//! weighted by its shares per page of max, until no page spares any; the rest is shared out as the
//! paper does. min is given first, max is never passed. Equal gains are shared in proportion.
//!
//! A VM without a curve, one that has just started most of all, can neither win nor lose by what is not
//! known of it: it has what the paper's policy would give it. Of one with a curve a quarter of that is
//! not at stake either: who has nothing does not run, and of who does not run nothing new is learnt, so
//! that a curve that was wrong once would be wrong for ever.
//!
//! A VM's miss curve is a few points of misses per second against allocation. Between points it is
//! a straight line, and only its lower convex hull counts, so that a plateau before a cliff does
//! not hide the cliff (as in C. Waldspurger et al., "Efficient MRC Construction with SHARDS",
//! FAST'15, whose sampling can make such curves). With the hull each VM's marginal gain falls, and
//! giving the largest gain first is optimal.

use std::collections::BTreeSet;

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::plan::VmState;
use crate::policies::by_id;
use crate::pools::{Pool, PoolId};
use crate::shares::{Claim, VmDemand, allocate};

/// A VM's predicted misses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmMisses {
    /// Of which VM.
    pub id: VmId,
    /// Machine pages, and misses per second with so many, in any order. Beyond the last point it
    /// counts as level.
    pub points: Vec<(Pages, f64)>,
}

/// A stretch of a VM's hull: so many pages, each of which spares so much.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    vm: usize,
    pages: u64,
    gain: f64,
}

/// Of what the paper's policy would give a VM, the part that no curve takes from it.
const KEPT_PART: u64 = 4;

/// Demands by which the shares of pages come out as misses want them: shares in proportion to what
/// each VM is to have, all of it active.
pub fn read(available: Pages, vms: &[VmDemand], misses: &[VmMisses]) -> Vec<VmDemand> {
    let known = by_id(misses, |m| m.id);
    let curves: Vec<Option<&VmMisses>> = vms.iter().map(|vm| known.get(&vm.id).copied()).collect();
    let (mut held, _) = allocate(available, &Claim::of_vms(vms));
    for (i, vm) in vms.iter().enumerate().filter(|(i, _)| curves[*i].is_some()) {
        held[i] = (held[i] / KEPT_PART).max(vm.min.min(vm.max).0);
    }
    let mut stretches = Vec::with_capacity(vms.len() * 8);
    for (i, (vm, curve)) in vms.iter().zip(&curves).enumerate() {
        let Some(curve) = curve else { continue };
        let weight = f64::from(vm.shares.max(1)) / vm.max.0.max(1) as f64;
        stretches.extend(marginals(i, &curve.points, weight, held[i], vm.max.0));
    }
    // The largest gain first; a stable sort keeps a VM's own stretches in their order.
    stretches.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    let mut rest = available.0.saturating_sub(held.iter().sum());
    for equal in stretches.chunk_by(|a, b| a.gain == b.gain) {
        let mut wanted: u64 = equal.iter().map(|s| s.pages).sum();
        for s in equal {
            // Of what is left for the rest of them, in proportion: so it adds up. No more than s.pages.
            let part = u128::from(rest.min(wanted)) * u128::from(s.pages) / u128::from(wanted);
            let given = part as u64;
            held[s.vm] += given;
            rest -= given;
            wanted -= s.pages;
        }
    }
    let claims: Vec<Claim> =
        vms.iter().zip(&held).map(|(vm, &held)| Claim::new(vm, Pages(held), vm.max)).collect();
    let (held, _) = allocate(available, &claims);
    let most = held.iter().copied().max().unwrap_or(0).max(1);
    let scale = f64::from(1u32 << 31) / most as f64;
    vms.iter()
        .zip(held)
        .map(|(vm, held)| VmDemand {
            shares: ((held as f64 * scale).round() as u32).max(1),
            active: Pages(held),
            ..*vm
        })
        .collect()
}

/// The same demands, of which VMs that are siblings of pools have together as many shares as their own: what they get of each
/// other is by misses, what pools get beside them by shares and the tax, as ever, which takes what misses give for active. The
/// shares of VMs alone are of no scale.
pub fn beside_pools(mut read: Vec<VmDemand>, pools: &[Pool], vms: &[VmState]) -> Vec<VmDemand> {
    let is_known = |id: &PoolId| pools.iter().any(|pool| pool.id == *id);
    let parents = pools.iter().map(|pool| pool.parent.filter(is_known));
    for parent in parents.collect::<BTreeSet<_>>() {
        let siblings = || (0..vms.len()).filter(|&i| vms[i].pool.filter(is_known) == parent);
        let own: u64 = siblings().map(|i| u64::from(vms[i].demand.shares.max(1))).sum();
        let held: u64 = siblings().map(|i| u64::from(read[i].shares)).sum();
        for i in siblings() {
            let exact = u128::from(read[i].shares) * u128::from(own);
            let part = (exact + u128::from(held / 2)) / u128::from(held.max(1));
            read[i].shares = u32::try_from(part).unwrap_or(u32::MAX).max(1);
        }
    }
    read
}

/// The stretches of a curve's lower convex hull between `floor` and `ceil` that spare anything.
fn marginals(
    vm: usize,
    points: &[(Pages, f64)],
    weight: f64,
    floor: u64,
    ceil: u64,
) -> Vec<Stretch> {
    let mut sorted: Vec<(u64, f64)> =
        points.iter().filter(|(_, m)| m.is_finite() && *m >= 0.0).map(|&(p, m)| (p.0, m)).collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    sorted.dedup_by_key(|p| p.0);
    let slope = |a: (u64, f64), b: (u64, f64)| (b.1 - a.1) / (b.0 - a.0) as f64;
    let mut hull: Vec<(u64, f64)> = Vec::with_capacity(sorted.len());
    for p in sorted {
        while let [.., a, b] = hull[..] {
            if slope(a, b) < slope(b, p) {
                break;
            }
            hull.pop();
        }
        hull.push(p);
    }
    let mut out = Vec::new();
    for pair in hull.windows(2) {
        let gain = -slope(pair[0], pair[1]) * weight;
        let pages = pair[1].0.min(ceil).saturating_sub(pair[0].0.max(floor));
        if gain > 0.0 && pages > 0 {
            out.push(Stretch { vm, pages, gain });
        }
    }
    out
}

/// What it made of a demand, in words.
pub fn note(read: &VmDemand, known: Option<&VmMisses>) -> String {
    let from = match known {
        Some(m) => format!("{} points of its miss curve", m.points.len()),
        None => {
            return format!(
                "The policy is miss-ratio: for want of a miss curve it is to have the {} that idle-tax \
                 would give it; they count as its active memory, and its shares as many as bring them",
                read.active
            );
        }
    };
    format!(
        "The policy is miss-ratio: by {from}, and by what the others would miss, {} spare the \
         most misses; they count as its active memory, and its shares as many as bring them",
        read.active
    )
}
