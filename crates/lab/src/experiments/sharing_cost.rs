//! OSDI'02, section 4.4: what page sharing costs guests that compute. The paper ran SPEC95 in its VMs
//! with sharing and without: throughput with sharing was between 1.6% lower and 1.8% higher, 0.5%
//! higher over all runs.
//!
//! Two guests of one salt run the same programs; runs with and without sharing alternate, each with a
//! manager and guests of its own. The programs start 15 s after the guests, when most of what the
//! guests' systems have in common has been found; what the programs write is found, shared and
//! written again while they are measured. Sharing is set to look at all memory every ten seconds, far
//! more often than by default.
//!
//! Beside throughput, rounds per second of the VMMs' CPU time are given: what another load on the host
//! takes from the guests does not change them, but neither does what guests wait for.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::Salt;
use ballast_units::Bytes;

use super::Measured;
use super::stage::Stage;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::{Options, SharingOptions};
use crate::say;
use crate::stats::{median, range};

const NAME: &str = "sharing-cost";
const GUESTS: usize = 2;
const MEMORY: Bytes = Bytes::from_mib(128);
const BUDGET: Bytes = Bytes::from_mib(768);
/// Throughput with sharing against without, percent: the paper's worst, best and overall.
const PAPER: (f64, f64, f64) = (-1.6, 1.8, 0.5);
/// Spread of the runs of one variant, percent of their median, with which a difference of a few
/// percent says anything.
const MOST_SPREAD: f64 = 8.0;

const COLUMNS: [&str; 7] =
    ["sharing", "repeat", "rounds_per_s", "rounds_per_cpu_s", "saved_mib", "breaks", "scan_cpu_s"];

struct Run {
    rounds_per_s: f64,
    rounds_per_cpu_s: f64,
    saved_mib: f64,
    breaks: f64,
    scan_cpu_s: f64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let (repeats, seconds) = if quick { (1, 15) } else { (6, 90) };
    let mut table = Table::new(&COLUMNS);
    for repeat in 0..repeats {
        // Alternating order, so that neither variant always comes first.
        for sharing in [repeat % 2 == 1, repeat % 2 == 0] {
            let kind = if sharing { "with sharing" } else { "without sharing" };
            say::step(&format!("Run {} of {repeats}, {kind}", repeat + 1));
            let run = one(image, sharing, seconds).await.context(kind)?;
            say::detail(&format!(
                "{:.3} rounds/s; saved {:.0} MiB, {:.0} pages broken, {:.2} s of scanning",
                run.rounds_per_s, run.saved_mib, run.breaks, run.scan_cpu_s
            ));
            let kind = f64::from(u8::from(sharing));
            table.push(&[
                kind,
                repeat as f64,
                run.rounds_per_s,
                run.rounds_per_cpu_s,
                run.saved_mib,
                run.breaks,
                run.scan_cpu_s,
            ]);
        }
    }
    Ok(evaluate(table, quick))
}

async fn one(image: &Image, sharing: bool, seconds: u64) -> Result<Run> {
    let options = if sharing { SharingOptions::brisk() } else { SharingOptions::off() };
    let mut stage = Stage::new(&Options { sharing: Some(options), ..Options::budget(BUDGET) })?;
    // Guests that start at different times would measure their neighbour's boot: the programs wait
    // until all are there.
    let delay = 15;
    for n in 1..=GUESTS {
        let load = format!("compute --mb 8 --seconds {seconds} --delay {delay}");
        let name = format!("spec{n}");
        let guest = Guest::new(&name, MEMORY, &stage.manager.consoles()).run(load);
        let salt = Salt::try_from(NAME)?;
        stage.add(&guest, image, |spec| spec.salt = Some(salt)).await?;
    }
    stage.wait_for_boot().await?;
    let begin = Instant::now();
    let limit = Duration::from_secs(delay + seconds * 2 + 60);
    let mut first = None;
    let last = loop {
        let look = look(&mut stage).await?;
        if first.is_none() && look.reporting == GUESTS {
            first = Some((look.rounds, look.cpu_s));
        }
        if look.rates.len() == GUESTS {
            break look;
        }
        ensure!(begin.elapsed() < limit, "not done after {} s", limit.as_secs());
        tokio::time::sleep(Duration::from_millis(250)).await;
    };
    let host = stage.manager.client().host().await?;
    stage.end().await?;
    let (rounds, cpu_s) = first.context("the guests did not compute")?;
    Ok(Run {
        rounds_per_s: last.rates.iter().sum(),
        rounds_per_cpu_s: (last.rounds - rounds) / (last.cpu_s - cpu_s),
        saved_mib: Bytes(host.sharing.saved).mib(),
        breaks: host.sharing.breaks as f64,
        scan_cpu_s: host.sharing.cpu_s,
    })
}

struct Look {
    /// Guests that have computed something.
    reporting: usize,
    /// Of all guests together, so far.
    rounds: f64,
    cpu_s: f64,
    /// Rounds per second of the guests that are done.
    rates: Vec<f64>,
}

async fn look(stage: &mut Stage) -> Result<Look> {
    stage.poll()?;
    let cpu_s = stage.views().await?.1.iter().map(|vm| vm.counters.cpu_s).sum();
    let events = || stage.guests.iter().filter_map(|(_, console)| console.story.progress.as_ref());
    let done = events().filter(|event| event.kind() == "done");
    let rounds: Vec<f64> = events().filter_map(|event| event.number("passes")).collect();
    Ok(Look {
        reporting: rounds.len(),
        rounds: rounds.iter().sum(),
        cpu_s,
        rates: done.filter_map(|event| event.number("rounds_per_s")).collect(),
    })
}

fn evaluate(table: Table, quick: bool) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let values = |kind: f64, column: &str| -> Vec<f64> {
        let of = table.series("sharing", column);
        of.iter().filter(|p| p.0 == kind).map(|p| p.1).collect()
    };
    let (off, on) = (values(0.0, "rounds_per_s"), values(1.0, "rounds_per_s"));
    let mut noise: f64 = 0.0;
    for (kind, values) in [("off", &off), ("on", &on)] {
        let (low, high) = range(values);
        let spread = 100.0 * (high - low) / median(values);
        noise = noise.max(spread / 2.0);
        outcome.figure(&format!("{kind}_rounds_per_s"), median(values));
        outcome.figure(&format!("{kind}_spread_percent"), spread);
        if !quick {
            outcome.at_most(&format!("{kind}_spread_percent"), spread, MOST_SPREAD);
        }
    }
    let of_medians =
        |column: &str| 100.0 * (median(&values(1.0, column)) / median(&values(0.0, column)) - 1.0);
    let change = of_medians("rounds_per_s");
    outcome.figure("change_percent", change);
    outcome.figure("change_per_cpu_percent", of_medians("rounds_per_cpu_s"));
    outcome.figure("saved_mib", median(&values(1.0, "saved_mib")));
    outcome.figure("breaks", median(&values(1.0, "breaks")));
    outcome.figure("scan_cpu_s", median(&values(1.0, "scan_cpu_s")));
    let pairs: Vec<f64> = off.iter().zip(&on).map(|(a, b)| 100.0 * (b / a - 1.0)).collect();
    let (worst, best) = range(&pairs);
    outcome.figure("worst_pair_percent", worst);
    outcome.figure("best_pair_percent", best);
    outcome.paper("change_percent", PAPER.2);
    outcome.paper("worst_pair_percent", PAPER.0);
    outcome.paper("best_pair_percent", PAPER.1);
    if !quick {
        // The paper's worst, and as much again as the runs of one variant differ from their middle.
        outcome.at_least("change_percent", change, PAPER.0 - noise);
        // Without anything shared there is nothing whose cost could be measured.
        outcome.at_least("saved_mib", median(&values(1.0, "saved_mib")), MEMORY.mib() * 0.2);
    }
    let by_repeat = |kind: f64| -> Vec<(f64, f64)> {
        let rows = table.rows.iter().filter(|r| r[0] == Some(kind));
        rows.filter_map(|r| Some((r[1]? + 1.0, r[2]?))).collect()
    };
    let chart = Chart {
        title: "CPU-bound throughput of two guests, page sharing off and on".to_owned(),
        x: "run".to_owned(),
        y: "rounds per second".to_owned(),
        series: vec![
            Series::new("sharing off", by_repeat(0.0)),
            Series::new("sharing on", by_repeat(1.0)),
        ],
        bars: true,
        ..Chart::default()
    };
    Measured { outcome, table, charts: vec![chart] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(on: f64, noise: f64, saved: f64) -> Table {
        let mut t = Table::new(&COLUMNS);
        for repeat in 0..6 {
            let r = f64::from(repeat);
            let wobble = 1.0 + noise * (r % 3.0 - 1.0);
            t.push(&[0.0, r, 4.0 * wobble, 2.0, 0.0, 0.0, 0.0]);
            t.push(&[1.0, r, 4.0 * on * wobble, 2.0, saved, 100.0, 0.5]);
        }
        t
    }

    #[test]
    fn the_papers_cost_passes_and_more_does_not() {
        assert!(evaluate(table(0.99, 0.002, 60.0), false).outcome.ok);
        assert!(!evaluate(table(0.95, 0.002, 60.0), false).outcome.ok);
        let m = evaluate(table(1.01, 0.002, 60.0), false);
        assert!((m.outcome.figures["change_percent"] - 1.0).abs() < 0.001);
    }

    #[test]
    fn runs_that_disagree_and_runs_without_sharing_say_nothing() {
        assert!(!evaluate(table(0.99, 0.06, 60.0), false).outcome.ok);
        assert!(!evaluate(table(0.99, 0.002, 1.0), false).outcome.ok);
    }
}
