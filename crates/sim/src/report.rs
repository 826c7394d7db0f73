//! The outcome as summaries, CSV and plots.

use std::fmt::Write as _;

use ballast_chart::{Chart, Series};
use ballast_policy::State;
use serde::Serialize;

use crate::measure::jain;
use crate::run::{HostPoint, HostResult, VmPoint, VmResult};
use crate::scenario::Scenario;

/// All hosts together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Its name.
    pub scenario: String,
    /// As in configurations: "idle-tax".
    pub policy: String,
    /// That of the scenario, from which each host's follows.
    pub seed: u64,
    /// The hosts.
    pub host: HostSummary,
    /// The VMs, in the order of the scenario.
    pub groups: Vec<GroupSummary>,
}

/// The hosts; times are parts of all time, 0 to 1, unless they are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostSummary {
    /// How many there were.
    pub hosts: u64,
    /// Virtual hours that each ran for.
    pub hours: f64,
    /// The most memory configured at a time, over the machine memory of then, on any host.
    pub overcommitment: f64,
    /// In state soft.
    pub soft: f64,
    /// In state hard.
    pub hard: f64,
    /// In state low.
    pub low: f64,
    /// Of one host.
    pub state_changes_per_day: f64,
    /// The least that was ever free on any host, as a part of its budget of then. Never below 0.
    pub least_free: f64,
    /// In which more was in use than the budget, seconds of all hosts.
    pub overdrawn_s: f64,
    /// Of what guests wanted to do, what they did, 0 to 1; 1 where none wanted anything.
    pub work: f64,
    /// Jain's index over the VMs' work, the least of any host: 1 is equal.
    pub fairness: f64,
    /// Starts that were put off, each attempt counted, on all hosts.
    pub refusals: u64,
    /// VMs that never ran, on all hosts: refused to the end or until their stop, or not due before the end.
    pub never_started: usize,
    /// Decisions of the policy, on all hosts.
    pub decisions: u64,
    /// Steps of virtual time, of all hosts.
    pub steps: u64,
}

/// The VMs of one group, on all hosts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupSummary {
    /// Its name.
    pub group: String,
    /// How many were started.
    pub vms: usize,
    /// Of what they wanted to do, what they did, 0 to 1; 1 where none was started.
    pub work: f64,
    /// The same of the one that did least of it.
    pub worst_work: f64,
    /// Part of the time in which a VM did less than half of what it wanted.
    pub slow: f64,
    /// The longest time in which any did less than a tenth, seconds.
    pub longest_starved_s: f64,
    /// The most that any waited for memory below its min, seconds in all.
    pub robbed_s: f64,
    /// The most that any one's allocations waited in state low, seconds in all.
    pub blocked_s: f64,
    /// In which the balloon wanted more than the guest could give, seconds of all VMs.
    pub distress_s: f64,
    /// Machine memory of one VM, on average over time, MiB.
    pub consumed_mib: f64,
    /// Faults of one VM served from swap, pages per second.
    pub swap_ins_per_s: f64,
    /// Faults of one VM served from the compressed tier, pages per second.
    pub decompressed_per_s: f64,
    /// Pages per second that one guest read again from its own disk, because of its balloon.
    pub guest_reads_per_s: f64,
    /// Times a day that a VM's target went back by 5% of its size.
    pub target_turns_per_day: f64,
    /// The same of its balloon.
    pub balloon_turns_per_day: f64,
    /// The same of what its load has active.
    pub active_turns_per_day: f64,
}

impl Summary {
    /// Of all results of a run of `scenario`.
    pub fn of(scenario: &Scenario, results: &[HostResult]) -> Summary {
        let groups = scenario.groups.iter().enumerate().map(|(g, group)| {
            let vms: Vec<&VmResult> =
                results.iter().flat_map(|r| &r.vms).filter(|vm| vm.group == g).collect();
            GroupSummary::of(&group.name, &vms)
        });
        Summary {
            scenario: scenario.name.clone(),
            policy: scenario.policy().to_string(),
            seed: scenario.seed,
            host: HostSummary::of(scenario, results),
            groups: groups.collect(),
        }
    }
}

impl HostSummary {
    fn of(scenario: &Scenario, results: &[HostResult]) -> HostSummary {
        let sum = |f: &dyn Fn(&HostResult) -> f64| results.iter().map(f).sum::<f64>();
        let ms = sum(&|r| r.measure.ran_ms as f64).max(1.0);
        let part = |state: State| sum(&|r| r.measure.state_ms[state as usize] as f64) / ms;
        let all = |f: &dyn Fn(&VmResult) -> f64| results.iter().flat_map(|r| &r.vms).map(f).sum();
        let (wanted, worked): (f64, f64) =
            (all(&|vm| vm.measure.wanted), all(&|vm| vm.measure.worked));
        let fairness = |r: &HostResult| {
            let work: Vec<f64> = r.vms.iter().map(|vm| vm.measure.work()).collect();
            jain(&work)
        };
        let least = results.iter().filter_map(|r| r.measure.least_free).min_by(f64::total_cmp);
        HostSummary {
            hosts: results.len() as u64,
            hours: scenario.duration as f64 / 3.6e6,
            overcommitment: results.iter().map(|r| r.measure.overcommitment).fold(0.0, f64::max),
            soft: part(State::Soft),
            hard: part(State::Hard),
            low: part(State::Low),
            state_changes_per_day: sum(&|r| r.measure.state_changes as f64) / ms * 8.64e7,
            least_free: least.unwrap_or(0.0),
            overdrawn_s: sum(&|r| r.measure.overdrawn_ms as f64) / 1e3,
            work: if wanted > 0.0 { worked / wanted } else { 1.0 },
            fairness: results.iter().map(fairness).fold(1.0, f64::min),
            refusals: results.iter().map(|r| r.measure.refused).sum(),
            never_started: results.iter().map(|r| r.never_started).sum(),
            decisions: results.iter().map(|r| r.measure.decisions).sum(),
            steps: results.iter().map(|r| r.measure.steps).sum(),
        }
    }
}

impl GroupSummary {
    fn of(name: &str, vms: &[&VmResult]) -> GroupSummary {
        let sum = |f: &dyn Fn(&VmResult) -> f64| vms.iter().map(|vm| f(vm)).sum::<f64>();
        let most = |f: &dyn Fn(&VmResult) -> f64| vms.iter().map(|vm| f(vm)).fold(0.0, f64::max);
        let ms = sum(&|vm| vm.measure.ran_ms as f64).max(1.0);
        let per_s = |f: &dyn Fn(&VmResult) -> f64| sum(f) / ms * 1e3;
        let per_day = |f: &dyn Fn(&VmResult) -> f64| sum(f) / ms * 8.64e7;
        let wanted = sum(&|vm| vm.measure.wanted);
        let worked = sum(&|vm| vm.measure.worked);
        GroupSummary {
            group: name.to_owned(),
            vms: vms.len(),
            work: if wanted > 0.0 { worked / wanted } else { 1.0 },
            worst_work: vms.iter().map(|vm| vm.measure.work()).fold(1.0, f64::min),
            slow: sum(&|vm| vm.measure.slow_ms as f64) / ms,
            longest_starved_s: most(&|vm| vm.measure.longest_starved_ms as f64) / 1e3,
            robbed_s: most(&|vm| vm.measure.robbed_ms as f64) / 1e3,
            blocked_s: most(&|vm| vm.measure.blocked_ms as f64) / 1e3,
            distress_s: sum(&|vm| vm.measure.distress_ms as f64) / 1e3,
            consumed_mib: sum(&|vm| vm.measure.consumed_ms) / ms / 256.0,
            swap_ins_per_s: per_s(&|vm| vm.measure.faults_swapped as f64),
            decompressed_per_s: per_s(&|vm| vm.measure.faults_compressed as f64),
            guest_reads_per_s: per_s(&|vm| vm.measure.guest_reads),
            target_turns_per_day: per_day(&|vm| vm.measure.target.count as f64),
            balloon_turns_per_day: per_day(&|vm| vm.measure.balloon.count as f64),
            active_turns_per_day: per_day(&|vm| vm.measure.active.count as f64),
        }
    }
}

/// One line for each VM of each host, with a header, over the time that it ran: sizes in MiB, times in
/// seconds, the rest in pages or numbers of times.
pub fn vms_csv(scenario: &Scenario, results: &[HostResult]) -> String {
    let mut text = String::from(
        "host,vm,group,size_mib,ran_s,work,slow_s,longest_starved_s,robbed_s,blocked_s,distress_s,\
         evicted,written,swap_ins,decompressed,guest_reads,target_turns,balloon_turns,\
         active_turns,consumed_mib\n",
    );
    for r in results {
        for vm in &r.vms {
            let m = &vm.measure;
            let s = |ms: u64| ms as f64 / 1e3;
            let _ = writeln!(
                text,
                "{},{},{},{:.1},{},{:.4},{},{},{},{},{},{},{},{},{},{:.0},{},{},{},{:.1}",
                r.host,
                vm.name,
                scenario.groups.get(vm.group).map_or("", |g| &g.name),
                vm.size.mib(),
                s(m.ran_ms),
                m.work(),
                s(m.slow_ms),
                s(m.longest_starved_ms),
                s(m.robbed_ms),
                s(m.blocked_ms),
                s(m.distress_ms),
                m.evicted,
                m.written,
                m.faults_swapped,
                m.faults_compressed,
                m.guest_reads,
                m.target.count,
                m.balloon.count,
                m.active.count,
                m.consumed_ms / m.ran_ms.max(1) as f64 / 256.0,
            );
        }
    }
    text
}

/// The VMs of the first host over time, in seconds and bytes, with a header; it can be played back as a
/// recorded trace.
pub fn series_csv(results: &[HostResult]) -> String {
    let mut text = String::from(
        "time,vm,active,consumed,target,estimate,balloon,compressed,swapped,shared,work\n",
    );
    for p in results.iter().flat_map(|r| &r.series) {
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{:.4}",
            p.at as f64 / 1e3,
            p.vm,
            p.active.bytes().0,
            p.consumed.bytes().0,
            p.target.bytes().0,
            p.estimate.bytes().0,
            p.balloon.bytes().0,
            p.compressed.bytes().0,
            p.swapped.bytes().0,
            p.shared.bytes().0,
            p.work,
        );
    }
    text
}

/// All hosts over time, with a header: `time` in seconds, `free` and `work` from 0 to 1.
pub fn hosts_csv(results: &[HostResult]) -> String {
    let mut text = String::from("time,host,state,free,work,swap_ins_per_s\n");
    for r in results {
        for p in &r.points {
            let t = p.at as f64 / 1e3;
            let (state, free, work, ins) = (p.state, p.free, p.work, p.swap_ins);
            let _ = writeln!(text, "{t},{},{state},{free:.4},{work:.4},{ins:.1}", r.host);
        }
    }
    text
}

/// The most lines that can be told apart in one plot.
const LINES: usize = 6;

/// An axis of time: how many ms its unit has, and what is written on it.
type TimeAxis = (f64, &'static str);

/// The first host's VMs (the first six by name), and free memory and work of the median host; of several
/// hosts also the lowest in twenty.
pub fn charts(scenario: &Scenario, results: &[HostResult]) -> Vec<Chart> {
    let time = match scenario.duration {
        d if d > 4 * 86_400_000 => (8.64e7, "time (days)"),
        d if d > 4 * 3_600_000 => (3.6e6, "time (h)"),
        d if d > 4 * 60_000 => (6e4, "time (min)"),
        _ => (1e3, "time (s)"),
    };
    let title = |what: &str| format!("{}, {}: {what}", scenario.name, scenario.policy());
    let mut charts = results.first().map_or_else(Vec::new, |first| vm_charts(first, time, &title));
    charts.push(hosts_chart(results, time, title(&format!("{} hosts", results.len()))));
    charts
}

/// One for each figure of a VM.
fn vm_charts(
    host: &HostResult,
    (unit, word): TimeAxis,
    title: &dyn Fn(&str) -> String,
) -> Vec<Chart> {
    let mut names: Vec<&str> = host.series.iter().map(|p| p.vm.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.truncate(LINES);
    let line = |name: &str, value: &dyn Fn(&VmPoint) -> f64| {
        let of = host.series.iter().filter(|p| p.vm == name);
        Series::new(name, of.map(|p| (p.at as f64 / unit, value(p))).collect())
    };
    /// What is shown, its unit, and where it is from.
    type Plot<'a> = (&'a str, &'a str, &'a dyn Fn(&VmPoint) -> f64);
    let plots: [Plot; 4] = [
        ("memory consumed", "MiB", &|p| p.consumed.mib()),
        ("target", "MiB", &|p| p.target.mib()),
        ("active memory, estimated", "MiB", &|p| p.estimate.mib()),
        ("work done, of what was wanted", "%", &|p| 100.0 * p.work),
    ];
    let chart = |(what, y, value): Plot| Chart {
        title: title(what),
        x: word.to_owned(),
        y: y.to_owned(),
        series: names.iter().map(|name| line(name, value)).collect(),
        ..Chart::default()
    };
    plots.map(chart).into()
}

/// Free memory and work.
fn hosts_chart(results: &[HostResult], (unit, word): TimeAxis, title: String) -> Chart {
    let quantile = |part: f64, value: &dyn Fn(&HostPoint) -> f64| {
        let moments = results.first().map_or(0, |r| r.points.len());
        let at = |i: usize| {
            let mut values: Vec<f64> =
                results.iter().filter_map(|r| r.points.get(i)).map(value).collect();
            values.sort_by(f64::total_cmp);
            let n = ((values.len() - 1) as f64 * part).round() as usize;
            (results[0].points[i].at as f64 / unit, values[n])
        };
        (0..moments).map(at).collect::<Vec<_>>()
    };
    let free = |p: &HostPoint| 100.0 * f64::from(p.free);
    let work = |p: &HostPoint| 100.0 * f64::from(p.work);
    let mut series = vec![
        Series::new("free, median host", quantile(0.5, &free)),
        Series::new("work, median host", quantile(0.5, &work)),
    ];
    if results.len() > 1 {
        series.push(Series::new("free, lowest of 20 hosts", quantile(0.05, &free)));
        series.push(Series::new("work, lowest of 20 hosts", quantile(0.05, &work)));
    }
    Chart { title, x: word.to_owned(), y: "%".to_owned(), series, ..Chart::default() }
}
