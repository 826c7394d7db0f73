//! How fast the other policies decide, whether targets are exactly what sharing out page by page gives,
//! and how many hosts the simulator plays. The peer is that sharing out: each page in its turn to the VM with
//! the largest rho, from a heap.
//!
//! Times are CPU time of the thread that decides: what the policy takes, whoever else is at work on
//! this machine. The time on the wall is beside it. What is decided about is made before the clock runs:
//! `decide` takes it by value, and the manager makes it once for each decision.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use ballast_policy::{
    Health, Policy, PolicyKind, Snapshot, State, TaxRate, Thresholds, VmDemand, VmState, decide,
    targets,
};
use ballast_sim::random::Random;
use ballast_sim::{Scenario, run as simulate};
use ballast_units::{Pages, VmId};
use rustix::time::{ClockId, clock_gettime};

use crate::figures::Outcome;
use crate::say;
use crate::stats::{median, quantile};

/// CPU and wall milliseconds of one call.
type Times = Vec<(f64, f64)>;

const VMS: u32 = 10_000;
const FLEET: &str = include_str!("../../../../scenarios/fleet.toml");

/// Adds its figures to those of the benchmark `policy`.
pub fn add(outcome: &mut Outcome, quick: bool) -> Result<()> {
    let rounds = if quick { 50 } else { 500 };
    let vms = vms(VMS, 1 << 18);
    let sizes: u64 = vms.iter().map(|vm| vm.size.0).sum();
    let demands: Vec<VmDemand> = vms.iter().map(|vm| vm.demand).collect();
    let budget = Pages(sizes / 2);
    let times = timed(rounds, || (), |()| targets(budget, &demands).len());
    report(outcome, "targets_10k", &times);
    for kind in PolicyKind::ALL {
        let snapshot = snapshot(budget, vms.clone(), kind);
        let times = timed(rounds / 5, || snapshot.clone(), |seen| decide(seen).plans.len());
        let name = format!("decide_10k_{}", kind.name().replace('-', "_"));
        report(outcome, &name, &times);
    }
    for key in ["targets_10k_median_ms", "decide_10k_idle_tax_median_ms"] {
        let got = outcome.figures.get(key).copied().unwrap_or(f64::NAN);
        outcome.at_most(key, got, 10.0);
    }

    // Literally page by page, where that is feasible.
    let small = self::vms(1_000, 512);
    let demands: Vec<VmDemand> = small.iter().map(|vm| vm.demand).collect();
    let available = Pages(small.iter().map(|vm| vm.size.0).sum::<u64>() / 2);
    let mut literal = Vec::new();
    let peer = median_cpu(&timed(1, || (), |()| literal = page_by_page(available, &demands)));
    let mut ours = Vec::new();
    let own = median_cpu(&timed(rounds, || (), |()| ours = targets(available, &demands)));
    let off = ours.iter().zip(&literal).filter(|(a, b)| a.target.0 != **b).count();
    outcome.figure("literal_1k_ms", peer);
    outcome.figure("targets_1k_ms", own);
    outcome.at_most("targets_unlike_page_by_page", off as f64, 0.0);
    say::detail(&format!(
        "1,000 VMs page by page: {peer:.1} ms, targets: {own:.2} ms, {off} differ"
    ));

    let mut fleet = Scenario::parse(Path::new("scenarios/fleet.toml"), FLEET)
        .context("the bench's own scenario")?;
    fleet.hosts = if quick { 20 } else { 200 };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (begin, cpu) = (Instant::now(), cpu_s(ClockId::ProcessCPUTime));
    let hosts = simulate(&fleet, threads, &|_| {}).len() as f64;
    let (wall, cpu) = (begin.elapsed().as_secs_f64(), cpu_s(ClockId::ProcessCPUTime) - cpu);
    outcome.figure("threads", threads as f64);
    outcome.figure("host_days_per_wall_minute", hosts / wall * 60.0);
    outcome.figure("host_days_per_cpu_minute", hosts / cpu * 60.0);
    // Thousands of hosts in minutes on two processors.
    outcome.at_least("host_days_per_cpu_minute", hosts / cpu * 60.0, 500.0);
    say::detail(&format!("{hosts} hosts of 10 VMs, a day each: {wall:.1} s, {cpu:.1} s of CPU"));
    Ok(())
}

fn vms(count: u32, largest: u64) -> Vec<VmState> {
    let mut random = Random::new(u64::from(count), 0);
    let mut below = |n: u64| random.draw() % n;
    (0..count)
        .map(|id| {
            let size = 64 + below(largest);
            let demand = VmDemand {
                id: VmId(id),
                shares: 1 + below(10_000) as u32,
                min: Pages(size * below(40) / 100),
                max: Pages(size),
                tax: TaxRate::default(),
                active: Pages(size * below(101) / 100),
            };
            VmState {
                demand,
                consumed: Pages(size * (40 + below(40)) / 100),
                size: Pages(size),
                balloon_goal: Pages(size * below(30) / 100),
                balloon_health: Health::Healthy,
                balloon_limit: Pages(size * 65 / 100),
                balloon_rate: None,
                short: false,
                pool: None,
                overhead: Pages(1_000),
                beyond: Pages::ZERO,
                saved: Pages::ZERO,
                tools: Default::default(),
                wants_more: below(2) == 1,
                swap_free: Pages(size / 2),
            }
        })
        .collect()
}

fn snapshot(budget: Pages, vms: Vec<VmState>, kind: PolicyKind) -> Snapshot {
    let thresholds = Thresholds::default_for(budget);
    Snapshot {
        trigger: "period".to_owned(),
        before: State::Soft,
        thresholds,
        budget,
        // Soft: something is to be taken from nearly everybody, which is the most work.
        free: Pages(budget.0 * 3 / 100),
        overhead: Pages::ZERO,
        starting: Pages::ZERO,
        room: Pages::ZERO,
        vms,
        pools: Vec::new(),
        policy: Policy { kind, ..Policy::default() },
        nodes: Vec::new(),
        outside: Vec::new(),
    }
}

/// Times of `call`, each with what `prepare` made for it off the clock.
fn timed<I, T>(rounds: usize, prepare: impl Fn() -> I, mut call: impl FnMut(I) -> T) -> Times {
    let one = |_| {
        let input = prepare();
        let (begin, cpu) = (Instant::now(), cpu_s(ClockId::ThreadCPUTime));
        std::hint::black_box(call(input));
        ((cpu_s(ClockId::ThreadCPUTime) - cpu) * 1e3, begin.elapsed().as_secs_f64() * 1e3)
    };
    (0..rounds.max(10)).map(one).collect()
}

fn cpu_s(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

fn median_cpu(times: &Times) -> f64 {
    median(&times.iter().map(|t| t.0).collect::<Vec<_>>())
}

fn report(outcome: &mut Outcome, name: &str, times: &Times) {
    let (cpu, wall): (Vec<f64>, Vec<f64>) = times.iter().copied().unzip();
    let (middle, most) = (median(&cpu), quantile(&cpu, 0.99));
    outcome.figure(&format!("{name}_median_ms"), middle);
    outcome.figure(&format!("{name}_p99_ms"), most);
    outcome.figure(&format!("{name}_wall_median_ms"), median(&wall));
    say::detail(&format!("{name}: median {middle:.3} ms, p99 {most:.3} ms of CPU time"));
}

/// Floors first; then each page to the VM whose ratio with it is the largest, the lower id first.
fn page_by_page(available: Pages, vms: &[VmDemand]) -> Vec<u64> {
    let mut held: Vec<u64> = vms.iter().map(|vm| vm.min.min(vm.max).0).collect();
    let bid = |i: usize, pages: u64| {
        // Ratios are positive, so their bits are in their order.
        (pages < vms[i].max.0)
            .then(|| (vms[i].rho(Pages(pages + 1)).to_bits(), Reverse(vms[i].id), i))
    };
    let mut heap: BinaryHeap<_> =
        held.iter().enumerate().filter_map(|(i, &pages)| bid(i, pages)).collect();
    let mut rest = available.0.saturating_sub(held.iter().sum());
    while rest > 0
        && let Some((_, _, i)) = heap.pop()
    {
        held[i] += 1;
        rest -= 1;
        heap.extend(bid(i, held[i]));
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_and_the_policy_agree() {
        let vms = vms(60, 300);
        let demands: Vec<VmDemand> = vms.iter().map(|vm| vm.demand).collect();
        let sum: u64 = vms.iter().map(|vm| vm.size.0).sum();
        for part in [3, 5, 8] {
            let available = Pages(sum * part / 10);
            let ours: Vec<u64> = targets(available, &demands).iter().map(|e| e.target.0).collect();
            assert_eq!(ours, page_by_page(available, &demands));
        }
    }

    #[test]
    fn the_fleet_is_read() {
        Scenario::parse(Path::new("fleet.toml"), FLEET).unwrap();
    }
}
