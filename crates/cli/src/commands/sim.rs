//! `ballast sim`: scenarios are played in virtual time, under each policy that is asked for.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_sim::{HostResult, Scenario, Summary, report, run as simulate};

use super::Output;
use crate::args::SimArgs;
use crate::failure::{Failure, one_line};
use crate::saved::save;
use crate::table::columns;

pub fn run(args: &SimArgs, out: Output) -> Result<(), Failure> {
    let mut scenario = Scenario::load(&args.scenario)?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    scenario.hosts = args.hosts.unwrap_or(scenario.hosts);
    let threads = match args.threads {
        Some(n) => n as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let mut policies = args.policy.clone();
    if policies.is_empty() {
        policies.push(scenario.policy());
    }
    let mut summaries = Vec::new();
    for &policy in &policies {
        let scenario = scenario.under(policy);
        let progress = Progress::new(&scenario, out.json);
        let results = simulate(&scenario, threads, &|ms| progress.add(ms));
        progress.end();
        let summary = Summary::of(&scenario, &results);
        if let Some(dir) = &args.out {
            // One policy's files lie in the folder itself, those of several in one each.
            let dir = match policies.len() {
                1 => dir.clone(),
                _ => dir.join(policy.name()),
            };
            write(&dir, &scenario, &results, &summary)?;
        }
        summaries.push(summary);
    }
    out.print(&summaries, |s| described(s))
}

fn write(
    dir: &Path,
    scenario: &Scenario,
    results: &[HostResult],
    summary: &Summary,
) -> Result<(), Failure> {
    let failed = |path: &Path, source| Failure::File { path: path.to_owned(), source };
    std::fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
    let svg = ballast_chart::svg(&report::charts(scenario, results))
        .map_err(|e| failed(&dir.join("plot.svg"), std::io::Error::other(e.to_string())))?;
    let json = serde_json::to_string_pretty(summary).map_err(|e| failed(dir, e.into()))? + "\n";
    for (name, text) in [
        ("summary.json", json),
        ("vms.csv", report::vms_csv(scenario, results)),
        ("series.csv", report::series_csv(results)),
        ("hosts.csv", report::hosts_csv(results)),
        ("plot.svg", svg),
    ] {
        let path = dir.join(name);
        save(&path, &text).map_err(|e| failed(&path, e))?;
    }
    Ok(())
}

fn described(summaries: &[Summary]) -> String {
    let scenario = summaries.first().map(scenario_line).unwrap_or_default();
    format!("{scenario}{}\n{}", host_table(summaries), vm_table(summaries))
}

/// What all of them have in common: the scenario, and a blank line.
fn scenario_line(s: &Summary) -> String {
    let h = &s.host;
    format!(
        "{}: {} host{} for {} h, {:.0}% of machine memory configured at most, seed {}\n\n",
        one_line(&s.scenario),
        h.hosts,
        if h.hosts == 1 { "" } else { "s" },
        short(h.hours),
        100.0 * h.overcommitment,
        s.seed
    )
}

/// A line for each policy.
fn host_table(summaries: &[Summary]) -> String {
    columns(
        &[
            ("POLICY", false),
            ("WORK", true),
            ("FAIRNESS", true),
            ("SOFT", true),
            ("HARD", true),
            ("LOW", true),
            ("STATES/DAY", true),
            ("LEAST FREE", true),
            ("PUT OFF", true),
            ("NEVER STARTED", true),
        ],
        summaries.iter().map(|s| {
            let h = &s.host;
            vec![
                s.policy.clone(),
                percent(h.work),
                format!("{:.3}", h.fairness),
                percent(h.soft),
                percent(h.hard),
                percent(h.low),
                short(h.state_changes_per_day),
                percent(h.least_free),
                h.refusals.to_string(),
                h.never_started.to_string(),
            ]
        }),
    )
}

/// A line for each group of VMs under each policy.
fn vm_table(summaries: &[Summary]) -> String {
    let groups = summaries.iter().flat_map(|s| s.groups.iter().map(|g| (s.policy.clone(), g)));
    columns(
        &[
            ("POLICY", false),
            ("VMS", false),
            ("COUNT", true),
            ("WORK", true),
            ("WORST", true),
            ("SLOW", true),
            ("STARVED", true),
            ("ROBBED", true),
            ("BLOCKED", true),
            ("DISTRESS", true),
            ("CONSUMED", true),
            ("SWAP-IN/S", true),
            ("UNZIP/S", true),
            ("REREAD/S", true),
            ("TURNS/DAY", true),
            ("BALLOON", true),
            ("LOAD", true),
        ],
        groups.map(|(policy, g)| {
            vec![
                policy,
                g.group.clone(),
                g.vms.to_string(),
                of_some(g, g.work),
                of_some(g, g.worst_work),
                of_some(g, g.slow),
                format!("{} s", short(g.longest_starved_s)),
                format!("{} s", short(g.robbed_s)),
                format!("{} s", short(g.blocked_s)),
                format!("{} s", short(g.distress_s)),
                format!("{} MiB", short(g.consumed_mib)),
                short(g.swap_ins_per_s),
                short(g.decompressed_per_s),
                short(g.guest_reads_per_s),
                short(g.target_turns_per_day),
                short(g.balloon_turns_per_day),
                short(g.active_turns_per_day),
            ]
        }),
    )
}

/// Of a group of which no VM was started nothing is known.
fn of_some(group: &report::GroupSummary, part: f64) -> String {
    if group.vms == 0 { "-".to_owned() } else { percent(part) }
}

fn percent(part: f64) -> String {
    format!("{:.1}%", 100.0 * part)
}

/// At most three figures behind the point, and none where there are enough before it.
fn short(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        0.0 => "0".to_owned(),
        v => format!("{v:.2}"),
    }
}

/// Tells on standard error how far it is: on a terminal on one line, elsewhere now and then.
struct Progress {
    total: u64,
    done: AtomicU64,
    begun: Instant,
    every: Duration,
    told: Mutex<Instant>,
    terminal: bool,
    quiet: bool,
    what: String,
}

impl Progress {
    fn new(scenario: &Scenario, quiet: bool) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        let now = Instant::now();
        Progress {
            total: scenario.duration.saturating_mul(scenario.hosts).max(1),
            done: AtomicU64::new(0),
            begun: now,
            every: if terminal { Duration::from_millis(500) } else { Duration::from_secs(10) },
            told: Mutex::new(now),
            terminal,
            quiet,
            // The name is whatever its writer chose.
            what: one_line(&format!("{} under {}", scenario.name, scenario.policy())),
        }
    }

    fn add(&self, ms: u64) {
        let done = self.done.fetch_add(ms, Ordering::Relaxed) + ms;
        // Whoever finds another thread telling has nothing to add.
        let Ok(mut told) = self.told.try_lock() else { return };
        if self.quiet || told.elapsed() < self.every {
            return;
        }
        *told = Instant::now();
        let part = done as f64 / self.total as f64;
        let left = self.begun.elapsed().as_secs_f64() * (1.0 - part) / part.max(1e-9);
        let line = format!("{}: {:.0}%, {left:.0} s left", self.what, 100.0 * part);
        let _ = match self.terminal {
            true => write!(std::io::stderr(), "\r\x1b[K{line}"),
            false => writeln!(std::io::stderr(), "{line}"),
        };
    }

    fn end(&self) {
        if self.terminal && !self.quiet {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_scenario_commands_no_terminal() {
        let text = "name = \"a\\u001b[2Jb\\nc\"\nduration = \"1m\"\n[host]\nmemory = \"64M\"\n\
                    [[vm]]\nname = \"v\"\nsize = \"16M\"\nload = { kind = \"idle\" }\n";
        let scenario = Scenario::parse(Path::new("x.toml"), text).unwrap();
        assert_eq!(Progress::new(&scenario, false).what, "a[2Jb c under idle-tax");
    }
}
