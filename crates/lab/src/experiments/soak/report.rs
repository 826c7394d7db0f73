//! What a soak says in the end.

use std::collections::BTreeMap;
use std::time::Duration;

use ballast_api::{HostView, VmView};
use ballast_units::Bytes;

use super::NAME;
use super::books::Process;
use super::draw::Action;
use super::flat::{Look, growth, longest};
use super::scene::{Counts, Soak};
use crate::chart::{Chart, Series};
use crate::experiments::Measured;
use crate::figures::{Outcome, Table};
use crate::stats::quantile;

/// A row for each step, after it. `action` is a place in `Action::WEIGHTS`; `life` counts managers.
pub const COLUMNS: [&str; 25] = [
    "step",
    "time_s",
    "action",
    "took_s",
    "refused",
    "life",
    "vms",
    "budget_mib",
    "free_mib",
    "consumed_mib",
    "resident_mib",
    "shared_mib",
    "compressed_mib",
    "swapped_mib",
    "ballooned_mib",
    "manager_rss_mib",
    "manager_anon_mib",
    "share_tables_mib",
    "manager_fds",
    "manager_threads",
    "manager_threads_runtime",
    "manager_threads_uring",
    "checks",
    "reliefs",
    "sharing_on",
];

/// What a manager's memory may grow by from the first to the last quarter of its life, MiB: a third of what it
/// has for one VM. What it has for each is page tables, share tables and buffers, which come and go with VMs.
const GROWTH_MIB: f64 = 1.0;
/// The same of descriptors, and of threads that are not the runtime's or io_uring's, of which idle ones come and go.
const GROWTH_COUNT: f64 = 0.5;

/// A life of so many seconds is long enough to tell.
const LONG_S: f64 = 180.0;

/// What a row is about.
pub struct Row {
    /// From 1 on.
    pub step: u64,
    /// What was done.
    pub action: Action,
    /// When, since the soak began.
    pub begin: Duration,
    /// What the manager refused of it, a count.
    pub refused: u64,
}

impl Row {
    /// In the order of the columns.
    pub fn cells(
        &self,
        soak: &Soak,
        process: Process,
        host: &HostView,
        vms: &[VmView],
    ) -> Vec<f64> {
        let sum = |what: fn(&VmView) -> u64| Bytes(vms.iter().map(what).sum()).mib();
        vec![
            self.step as f64,
            soak.elapsed().as_secs_f64(),
            self.action.number(),
            (soak.elapsed() - self.begin).as_secs_f64(),
            self.refused as f64,
            soak.life as f64,
            vms.len() as f64,
            Bytes(host.budget).mib(),
            Bytes(host.free).mib(),
            Bytes(host.consumed).mib(),
            sum(|vm| vm.memory.resident),
            sum(|vm| vm.memory.shared),
            sum(|vm| vm.memory.compressed),
            sum(|vm| vm.memory.swapped),
            sum(|vm| vm.memory.ballooned),
            process.rss.mib(),
            process.anon.mib(),
            Bytes(host.sharing.metadata).mib(),
            process.fds as f64,
            process.threads as f64,
            process.runtime as f64,
            process.uring as f64,
            soak.checks() as f64,
            soak.counts.reliefs as f64,
            f64::from(u8::from(soak.settings.sharing)),
        ]
    }
}

/// Beside the rows.
pub struct Told {
    /// That it ran.
    pub minutes: f64,
    /// What was drawn from.
    pub seed: u64,
    /// Pages that guests found as they had written them, a count.
    pub checks: u64,
    /// What happened.
    pub counts: Counts,
    /// Processes, mounts and files that were left behind, a count.
    pub left: usize,
}

/// Figures, targets and plots.
pub fn evaluate(
    table: Table,
    actions: &BTreeMap<Action, u64>,
    fresh: Process,
    end: Process,
    told: &Told,
) -> Measured {
    let mut outcome = Outcome::new(NAME);
    outcome.figure("minutes", told.minutes);
    outcome.figure("seed", told.seed as f64);
    outcome.figure("steps", table.rows.len() as f64);
    for (action, _) in Action::WEIGHTS {
        let times = actions.get(&action).copied().unwrap_or(0);
        outcome.figure(&format!("action_{}", action.name()), times as f64);
    }
    let counts = told.counts;
    outcome.figure("checks", told.checks as f64);
    // Without these a check says nothing of pages that were away.
    for (name, pages) in [
        ("pages_read_from_swap", counts.away.swapped),
        ("pages_decompressed", counts.away.compressed),
        ("shared_pages_copied", counts.away.shared),
    ] {
        outcome.at_least(name, pages as f64, 1.0);
    }
    outcome.figure("refusals", counts.refusals as f64);
    outcome.figure("reliefs", counts.reliefs as f64);
    outcome.figure("vms_killed_without_manager", counts.orphans_killed as f64);
    outcome.figure("takeovers_looked_through", counts.looked_through as f64);
    outcome.at_most("errors_logged", counts.errors as f64, 0.0);
    let most = |column: &str| quantile(&values(&table, column), 1.0);
    outcome.figure("managers", most("life") + 1.0);
    outcome.figure("vms_most", most("vms"));
    outcome.figure("swapped_most_mib", most("swapped_mib"));
    outcome.figure("compressed_most_mib", most("compressed_mib"));
    outcome.figure("shared_most_mib", most("shared_mib"));
    outcome.figure("manager_rss_most_mib", most("manager_rss_mib"));
    outcome.figure("manager_rss_fresh_mib", fresh.rss.mib());
    outcome.figure("manager_rss_end_mib", end.rss.mib());
    growths(&mut outcome, &table);
    outcome.figure("budget_overruns", counts.overruns as f64);
    // What was handed out at an instant is known at its most, and no moment with it: it is held against the largest budget that
    // this manager has had. A budget that was lowered is met before the next step (`books::unmet`).
    outcome.at_most("over_largest_budget_mib", Bytes(counts.over_most).mib(), 0.0);
    outcome.at_most("left_behind", told.left as f64, 0.0);
    // One that has just taken over and lost all its VMs has what one had that never had any.
    let more = |a: usize, b: usize| a as f64 - b as f64;
    outcome.at_most("fds_more_at_end", more(end.fds, fresh.fds), 0.0);
    outcome.at_most("threads_more_at_end", more(end.threads, fresh.threads), 0.0);
    let charts = charts(&table, actions);
    Measured { outcome, table, charts }
}

/// Threads that are neither the runtime's nor io_uring's: not a column, but of three.
const OWN_THREADS: &str = "own threads";

fn values(table: &Table, column: &str) -> Vec<f64> {
    table.series("time_s", column).iter().map(|(_, value)| *value).collect()
}

/// A column over time, or what is made of some.
fn over_time(table: &Table, column: &str) -> Vec<(f64, f64)> {
    if column != OWN_THREADS {
        return table.series("time_s", column);
    }
    let mut own = table.series("time_s", "manager_threads");
    for others in ["manager_threads_runtime", "manager_threads_uring"] {
        own.iter_mut().zip(values(table, others)).for_each(|((_, own), other)| *own -= other);
    }
    own
}

fn looks(table: &Table, column: &str) -> Vec<Look> {
    let (lives, vms) = (values(table, "life"), values(table, "vms"));
    let rows = over_time(table, column).into_iter().zip(lives).zip(vms);
    rows.map(|(((time_s, value), life), vms)| Look {
        time_s,
        life: life as usize,
        vms: vms as usize,
        value,
    })
    .collect()
}

/// At equal numbers of VMs, within the life of one manager; and over all managers.
fn growths(outcome: &mut Outcome, table: &Table) {
    let longest_of = |column| longest(&looks(table, column));
    let life = longest_of("manager_rss_mib");
    let span = match (life.first(), life.last()) {
        (Some(first), Some(last)) => last.time_s - first.time_s,
        _ => f64::NAN,
    };
    outcome.figure("longest_life_minutes", span / 60.0);
    for (name, column, limit) in [
        ("rss_growth_mib", "manager_rss_mib", GROWTH_MIB),
        ("anon_growth_mib", "manager_anon_mib", GROWTH_MIB),
        ("fds_growth", "manager_fds", GROWTH_COUNT),
        ("threads_growth", OWN_THREADS, GROWTH_COUNT),
    ] {
        let grown = growth(&longest_of(column)).unwrap_or(f64::NAN);
        outcome.figure(name, grown);
        // A shorter run is to see that it works.
        if span >= LONG_S {
            outcome.at_most(name, grown, limit);
        }
        let all = growth(&looks(table, column)).unwrap_or(f64::NAN);
        outcome.figure(&format!("{name}_over_all_managers"), all);
    }
    // What is in books of it, as large as what is known of guests' pages; and what other threads there are more of.
    for (name, column) in [
        ("share_tables_growth_mib", "share_tables_mib"),
        ("threads_growth_all", "manager_threads"),
        ("threads_growth_runtime", "manager_threads_runtime"),
        ("threads_growth_uring", "manager_threads_uring"),
    ] {
        outcome.figure(name, growth(&longest_of(column)).unwrap_or(f64::NAN));
    }
}

fn charts(table: &Table, actions: &BTreeMap<Action, u64>) -> Vec<Chart> {
    let line = |label: &str, column: &str| Series::new(label, table.series("time_s", column));
    let x = || "time (s)".to_owned();
    let memory = [
        ("budget", "budget_mib"),
        ("consumed", "consumed_mib"),
        ("shared", "shared_mib"),
        ("compressed", "compressed_mib"),
        ("swapped", "swapped_mib"),
        ("ballooned", "ballooned_mib"),
    ];
    vec![
        Chart {
            title: "The manager's memory".to_owned(),
            x: x(),
            y: "memory (MiB)".to_owned(),
            y_right: Some("VMs".to_owned()),
            series: vec![
                line("RSS", "manager_rss_mib"),
                line("anonymous", "manager_anon_mib"),
                line("share tables", "share_tables_mib"),
                line("VMs", "vms").right(),
            ],
            ..Chart::default()
        },
        Chart {
            title: "The guests' memory".to_owned(),
            x: x(),
            y: "memory (MiB)".to_owned(),
            series: memory.map(|(label, column)| line(label, column)).to_vec(),
            ..Chart::default()
        },
        Chart {
            title: "Steps so far".to_owned(),
            x: x(),
            y: "steps".to_owned(),
            series: kinds(table, actions),
            ..Chart::default()
        },
    ]
}

/// Steps of a kind, as they add up.
fn kinds(table: &Table, actions: &BTreeMap<Action, u64>) -> Vec<Series> {
    use Action::{FillSwap, KillManager, KillVm, Pause, Pool, Reload, Restart, SetHost, SetVm};
    let kinds: [(&str, &[Action]); 6] = [
        ("VMs started", &[Action::Start]),
        ("VMs stopped", &[Action::Stop]),
        ("VMs killed", &[KillVm]),
        ("managers killed or replaced", &[KillManager, Restart, Action::Upgrade]),
        ("settings", &[SetVm, SetHost, Reload, Pool]),
        ("full disks, pauses", &[FillSwap, Pause]),
    ];
    let done = |of: &[Action]| of.iter().any(|action| actions.contains_key(action));
    let series = kinds.iter().filter(|(_, of)| done(of)).map(|(label, of)| {
        let mut so_far = 0.0;
        let points = table.series("time_s", "action").into_iter().map(|(t, number)| {
            so_far += f64::from(u8::from(of.iter().any(|action| action.number() == number)));
            (t, so_far)
        });
        Series::new(label, points.collect())
    });
    series.collect()
}

#[cfg(test)]
mod tests {
    use super::super::scene::Away;
    use super::*;

    fn measured(leak: f64, left: usize) -> Measured {
        let mut table = Table::new(&COLUMNS);
        for step in 0..60 {
            let cells = COLUMNS.map(|column| match column {
                "time_s" => 20.0 * f64::from(step),
                "life" => f64::from(step / 20),
                "vms" => f64::from(2 + step % 2),
                "manager_rss_mib" => 20.0 + f64::from(step % 2) + leak * f64::from(step % 20),
                "manager_anon_mib" | "manager_fds" => 10.0,
                _ => 1.0,
            });
            table.push(&cells);
        }
        let actions = BTreeMap::from([(Action::Start, 3)]);
        let away = Away { swapped: 9, compressed: 9, shared: 9 };
        let counts = Counts { away, ..Counts::default() };
        let told = Told { minutes: 1.0, seed: 7, checks: 99, counts, left };
        evaluate(table, &actions, Process::default(), Process::default(), &told)
    }

    #[test]
    fn threads_of_the_runtime_are_none_of_its_own() {
        let mut table = Table::new(&COLUMNS);
        for step in 0..4 {
            table.push(&COLUMNS.map(|column| match column {
                "time_s" => f64::from(step),
                "manager_threads" => 20.0 + 3.0 * f64::from(step),
                "manager_threads_runtime" => 2.0 * f64::from(step),
                "manager_threads_uring" => 5.0,
                _ => 1.0,
            }));
        }
        let own: Vec<f64> = over_time(&table, OWN_THREADS).iter().map(|(_, n)| *n).collect();
        assert_eq!(own, [15.0, 16.0, 17.0, 18.0]);
    }

    #[test]
    fn a_manager_that_grows_or_leaves_something_misses() {
        let good = measured(0.0, 0).outcome;
        assert!(good.ok, "{:?}", good.targets);
        assert_eq!(good.figures["action_start"], 3.0);
        assert_eq!(good.figures["managers"], 3.0);
        let leaks = measured(0.2, 0).outcome;
        assert!(!leaks.ok && !leaks.targets["rss_growth_mib"].met);
        assert!(!measured(0.0, 1).outcome.ok);
        assert_eq!(measured(0.0, 0).charts.len(), 3);
        assert_eq!(measured(0.0, 0).charts[2].series.len(), 1);
    }
}
