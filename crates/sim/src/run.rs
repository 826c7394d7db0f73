//! Runs the hosts of a scenario, several at a time. Each host has random numbers of its own, so that the
//! outcome does not depend on which thread runs it when.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_policy::State;
use ballast_units::Pages;

use crate::Millis;
use crate::host::Host;
use crate::measure::{HostMeasure, VmMeasure};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::vm::Vm;

/// What became of one host.
#[derive(Clone, Debug)]
pub struct HostResult {
    /// Its number, from 0.
    pub host: u64,
    /// What was measured of it as a whole.
    pub measure: HostMeasure,
    /// Those that were stopped, in that order; then those that ran to the end, in the order of their starts.
    pub vms: Vec<VmResult>,
    /// VMs that were refused to the end, or until they were to be stopped, or were not due before the end.
    pub never_started: usize,
    /// The host over time, a point at the end of each `record` of the scenario.
    pub points: Vec<HostPoint>,
    /// Its VMs at the same moments. Of the first host alone, empty of others.
    pub series: Vec<VmPoint>,
}

/// What became of one VM.
#[derive(Clone, Debug)]
pub struct VmResult {
    /// Unique on its host.
    pub name: String,
    /// By its place in the scenario.
    pub group: usize,
    /// As configured.
    pub size: Pages,
    /// What was measured of it while it ran.
    pub measure: VmMeasure,
}

/// A host at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostPoint {
    /// Since the scenario began.
    pub at: Millis,
    /// As of the last decision.
    pub state: State,
    /// Part of the budget that is free, 0 to 1.
    pub free: f32,
    /// Part of what guests wanted to do since the point before that they did, 0 to 1; 1 if they wanted
    /// nothing.
    pub work: f32,
    /// Faults served from swap, pages per second since the point before.
    pub swap_ins: f32,
}

/// A VM of the first host at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct VmPoint {
    /// Since the scenario began.
    pub at: Millis,
    /// Its name.
    pub vm: String,
    /// What it is entitled to.
    pub target: Pages,
    /// Machine pages charged to it.
    pub consumed: Pages,
    /// What its load has active.
    pub active: Pages,
    /// What sampling says of that.
    pub estimate: Pages,
    /// Held by its balloon.
    pub balloon: Pages,
    /// In the compressed tier; as many guest pages.
    pub compressed: Pages,
    /// In swap.
    pub swapped: Pages,
    /// Resident and backed by common pages, which cost it nothing.
    pub shared: Pages,
    /// Part of what it wanted to do since the point before that it did, 0 to 1; 1 if it wanted nothing.
    pub work: f64,
}

/// Runs all hosts on `threads` threads (1 to 64; what is outside counts as the nearest), and answers in
/// the order of their numbers. `progress` hears of every bit of virtual time that is over, in
/// milliseconds, from any of the threads; in all, of `duration` for each host.
pub fn run(
    scenario: &Scenario,
    threads: usize,
    progress: &(dyn Fn(Millis) + Sync),
) -> Vec<HostResult> {
    let next = AtomicU64::new(0);
    let done: Mutex<Vec<HostResult>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, 64) {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= scenario.hosts {
                        break;
                    }
                    let result = one(scenario, n, progress);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(result);
                }
            });
        }
    });
    let mut results = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by_key(|r| r.host);
    results
}

fn one(scenario: &Scenario, n: u64, progress: &(dyn Fn(Millis) + Sync)) -> HostResult {
    let seed = Random::new(scenario.seed, n).draw();
    let mut host = Host::new(scenario.settings.clone(), scenario.vms(seed), seed);
    let mut points = Vec::new();
    let mut series = Vec::new();
    let mut before = Sums::default();
    let mut worked = std::collections::BTreeMap::new();
    while host.now < scenario.duration {
        let until = (host.now + scenario.record).min(scenario.duration);
        let from = host.now;
        host.run(until);
        let sums = Sums::of(&host);
        points.push(sums.since(&before, &host, (until - from) as f64 / 1e3));
        before = sums;
        if n == 0 {
            for vm in &host.vms {
                let m = &vm.measure;
                let (w0, d0) = worked.insert(vm.id, (m.wanted, m.worked)).unwrap_or_default();
                let wanted = m.wanted - w0;
                let work = if wanted > 0.0 { (m.worked - d0) / wanted } else { 1.0 };
                series.push(VmPoint::of(vm, scenario, host.now, work));
            }
        }
        progress(until - from);
    }
    let result = |vm: &Vm| VmResult {
        name: vm.spec.name.clone(),
        group: vm.spec.group,
        size: Pages(vm.spec.nature.size),
        measure: vm.measure.clone(),
    };
    HostResult {
        host: n,
        vms: host.all().map(result).collect(),
        never_started: host.never_started(),
        measure: host.measure,
        points,
        series,
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    wanted: f64,
    worked: f64,
    swap_ins: u64,
}

impl Sums {
    fn of(host: &Host) -> Sums {
        host.all().fold(Sums::default(), |s, vm| Sums {
            wanted: s.wanted + vm.measure.wanted,
            worked: s.worked + vm.measure.worked,
            swap_ins: s.swap_ins + vm.measure.faults_swapped,
        })
    }

    fn since(&self, before: &Sums, host: &Host, seconds: f64) -> HostPoint {
        let wanted = self.wanted - before.wanted;
        let work = if wanted > 0.0 { (self.worked - before.worked) / wanted } else { 1.0 };
        HostPoint {
            at: host.now,
            state: host.state,
            free: (host.free() as f64 / host.budget.max(1) as f64) as f32,
            work: work as f32,
            swap_ins: ((self.swap_ins - before.swap_ins) as f64 / seconds) as f32,
        }
    }
}

impl VmPoint {
    fn of(vm: &Vm, scenario: &Scenario, at: Millis, work: f64) -> VmPoint {
        VmPoint {
            at,
            vm: vm.spec.name.clone(),
            target: Pages(vm.target),
            consumed: Pages(vm.guest.consumed(&scenario.settings.models)),
            active: vm.guest.demand.active,
            estimate: vm.estimate(),
            balloon: Pages(vm.guest.balloon),
            compressed: Pages(vm.guest.compressed()),
            swapped: Pages(vm.guest.swapped()),
            shared: Pages(vm.guest.shared),
            work,
        }
    }
}
