//! Time that decisions about many VMs take: targets on a flat host, targets in nested pools, and a whole
//! turn. No guests are needed.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use ballast_policy::{
    Health, Member, Pool, PoolId, Snapshot, State, TaxRate, Thresholds, VmDemand, VmState, decide,
    divide, targets,
};
use ballast_units::{Pages, VmId};

use super::policy_exact;
use crate::figures::Outcome;
use crate::say;
use crate::stats::median;

const VMS: u32 = 10_000;
/// Eight at the top, and the others inside of pools, three levels deep.
const POOLS: u32 = 120;
/// What a decision about so many VMs may take, ms.
const LIMIT_MS: f64 = 10.0;

pub fn run(quick: bool) -> Result<Outcome> {
    let repeats = if quick { 1 } else { 5 };
    let (pools, vms, members) = (pools(), vms(), members());
    let half = Pages(vms.iter().map(|vm| vm.max.0).sum::<u64>() / 2);
    let snapshot = snapshot(half, &pools, &vms, &members);
    let mut outcome = Outcome::new("policy");
    let mut measure = |name: &str, work: &mut dyn FnMut(Snapshot)| {
        // Another amount each time: nothing is found by having been there. The copy that is decided about
        // is made off the clock, as the manager makes it once for each decision anyway.
        let times: Vec<f64> = (0..repeats * 5)
            .map(|i| {
                let budget = Pages(half.0 + i as u64 * 1_009);
                let seen = Snapshot { budget, ..snapshot.clone() };
                let begin = Instant::now();
                work(seen);
                begin.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        say::detail(&format!("{name}: {:.2} ms", median(&times)));
        outcome.figure(name, median(&times));
        median(&times)
    };
    measure("targets_flat_ms", &mut |seen| {
        black_box(targets(seen.budget, &vms));
    });
    let nested = measure("targets_pools_ms", &mut |seen| {
        black_box(divide(seen.budget, &pools, &vms, &members));
    });
    measure("turn_pools_ms", &mut |seen| {
        black_box(decide(seen));
    });
    outcome.at_most("targets_pools_ms", nested, LIMIT_MS);
    policy_exact::add(&mut outcome, quick)?;
    Ok(outcome)
}

fn pools() -> Vec<Pool> {
    (0..POOLS)
        .map(|i| Pool {
            id: PoolId(i),
            name: format!("p{i}"),
            parent: (i >= 8).then(|| PoolId((i - 8) / 14)),
            shares: 500 + i % 7 * 1_000,
            min: Pages(u64::from(i % 5) * 10_000),
            max: (i % 11 == 3).then_some(Pages(4_000_000)),
            expandable: true,
            tax: None,
        })
        .collect()
}

fn vms() -> Vec<VmDemand> {
    (0..VMS)
        .map(|i| VmDemand {
            id: VmId(i),
            shares: 1 + i % 1_000,
            min: Pages(u64::from(i % 7) * 1_000),
            max: Pages(65_536 + u64::from(i % 97) * 1_024),
            tax: TaxRate::default(),
            active: Pages(u64::from(i % 61) * 1_000),
        })
        .collect()
}

/// One in thirteen is in no pool.
fn members() -> Vec<Member> {
    let pool = |i: u32| (i % 130 < POOLS).then_some(PoolId(i % 130));
    (0..VMS).map(|i| Member { pool: pool(i), overhead: Pages(1_000) }).collect()
}

/// The host is short, so that every part of the turn has something to do.
fn snapshot(budget: Pages, pools: &[Pool], vms: &[VmDemand], members: &[Member]) -> Snapshot {
    let thresholds = Thresholds::default_for(budget);
    let state = |(vm, member): (&VmDemand, &Member)| VmState {
        demand: *vm,
        consumed: Pages(vm.max.0 / 2),
        size: vm.max,
        balloon_goal: Pages(vm.max.0 / 4),
        balloon_health: Health::Healthy,
        balloon_limit: Pages(vm.max.0 / 2),
        balloon_rate: None,
        short: false,
        wants_more: true,
        swap_free: vm.max,
        pool: member.pool,
        overhead: member.overhead,
        beyond: Pages::ZERO,
        saved: Pages::ZERO,
        tools: Default::default(),
    };
    Snapshot {
        trigger: "period".into(),
        before: State::Soft,
        thresholds,
        budget,
        free: thresholds.upper_edge(State::Hard),
        overhead: Pages(u64::from(VMS) * 1_000),
        starting: Pages::ZERO,
        room: Pages::ZERO,
        vms: vms.iter().zip(members).map(state).collect(),
        pools: pools.to_vec(),
        policy: Default::default(),
        nodes: Vec::new(),
        outside: Vec::new(),
    }
}
