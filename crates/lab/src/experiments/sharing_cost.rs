//! OSDI'02, section 4.4: what page sharing costs guests that compute. The paper ran SPEC95 in its VMs
//! with sharing and without: throughput with sharing was between 1.6% lower and 1.8% higher, 0.5%
//! higher over all runs.
//!
//! Two pairs of guests run the same programs, one pair under a manager that shares, one under a manager
//! that does not. They take turns of a second ([`crate::turns`]). They write little of what is shared: this is what sharing costs at rest. Sharing is set to look at all memory every ten seconds, far more often than by default.
//!
//! Beside throughput, rounds per second of CPU time of VMMs and manager are given.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::Salt;
use ballast_qemu::process;
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
use crate::turns::Players;

const NAME: &str = "sharing-cost";
const GUESTS: usize = 2;
const MEMORY: Bytes = Bytes::from_mib(128);
const BUDGET: Bytes = Bytes::from_mib(768);
/// Throughput with sharing against without, percent: the paper's worst, best and overall.
const PAPER: (f64, f64, f64) = (-1.6, 1.8, 0.5);
/// Between the best and the worst block, percent, with which a difference of a few percent says anything.
const MOST_SPREAD: f64 = 4.0;
/// Before the first turn: most of what the guests' systems have in common is found in it.
const WARM_UP: Duration = Duration::from_secs(30);

const COLUMNS: [&str; 7] =
    ["sharing", "block", "rounds_per_s", "rounds_per_cpu_s", "saved_mib", "breaks", "scan_cpu_s"];

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let (blocks, turns) = if quick { (2, 12) } else { (8, 30) };
    say::step("Starting a pair of guests that do not share, and one that does");
    let mut pairs = [Pair::start(image, false).await?, Pair::start(image, true).await?];
    for pair in &mut pairs {
        pair.stage.wait_for_boot().await?;
    }
    let begin = Instant::now();
    while pairs.iter().any(|p| p.rounds < 1.0) || begin.elapsed() < WARM_UP {
        ensure!(begin.elapsed() < 5 * WARM_UP, "the guests do not compute");
        tokio::time::sleep(Duration::from_millis(250)).await;
        pairs.iter_mut().try_for_each(Pair::poll)?;
    }
    pairs.iter().for_each(|pair| pair.players.stop());
    let mut table = Table::new(&COLUMNS);
    for block in 0..blocks {
        say::step(&format!("Block {} of {blocks}", block + 1));
        let mut before = Vec::new();
        for pair in &mut pairs {
            pair.poll()?;
            before.push((pair.rounds, pair.cpu_s()?));
        }
        let mut ran = [Duration::ZERO; 2];
        for turn in 0..turns {
            // Alternating order, so that neither pair always comes first.
            for first in [turn % 2 == 0, turn % 2 == 1].map(usize::from) {
                ran[first] += pairs[first].players.turn().await;
            }
        }
        for ((pair, (rounds, cpu_s)), ran) in pairs.iter_mut().zip(before).zip(ran) {
            pair.poll()?;
            let host = pair.host().await?;
            let done = pair.rounds - rounds;
            let rate = done / ran.as_secs_f64();
            say::detail(&format!(
                "{}: {rate:.3} rounds/s; saved {:.0} MiB, {} pages broken, {:.2} s of scanning so far",
                if pair.sharing { "with sharing" } else { "without" },
                Bytes(host.sharing.saved).mib(),
                host.sharing.breaks,
                host.sharing.cpu_s
            ));
            table.push(&[
                f64::from(u8::from(pair.sharing)),
                f64::from(block),
                rate,
                done / (pair.cpu_s()? - cpu_s),
                Bytes(host.sharing.saved).mib(),
                host.sharing.breaks as f64,
                host.sharing.cpu_s,
            ]);
        }
    }
    for pair in pairs {
        pair.players.go_on();
        pair.stage.end().await?;
    }
    Ok(evaluate(table, quick))
}

/// Guests of one salt, and their manager.
struct Pair {
    sharing: bool,
    stage: Stage,
    players: Players,
    /// Of both guests, so far.
    rounds: f64,
}

impl Pair {
    async fn start(image: &Image, sharing: bool) -> Result<Pair> {
        let options = if sharing { SharingOptions::brisk() } else { SharingOptions::off() };
        let options = Options { sharing: Some(options), ..Options::budget(BUDGET) };
        let mut stage = Stage::new(&options)?;
        let mut vmms = Vec::new();
        for n in 1..=GUESTS {
            let name = format!("spec{n}");
            let guest = Guest::new(&name, MEMORY, &stage.manager.consoles())
                .run("compute --mb 8 --every 0 --delay 5");
            let salt = Salt::try_from(NAME)?;
            let view = stage.add(&guest, image, |spec| spec.salt = Some(salt)).await?;
            vmms.push(view.pid.context("a VMM without a process")? as i32);
        }
        let manager = Some(stage.manager.pid()?);
        Ok(Pair { sharing, stage, players: Players { manager, vmms }, rounds: 0.0 })
    }

    fn poll(&mut self) -> Result<()> {
        self.stage.poll()?;
        let events = self.stage.guests.iter().filter_map(|(_, c)| c.story.progress.as_ref());
        self.rounds = events.filter_map(|event| event.number("passes")).sum();
        Ok(())
    }

    /// What the manager says, which runs for that moment alone.
    async fn host(&self) -> Result<ballast_api::HostView> {
        self.players.manager_goes_on();
        let host = self.stage.manager.client().host().await;
        self.players.stop();
        Ok(host?)
    }

    /// CPU time of manager and VMMs.
    fn cpu_s(&self) -> Result<f64> {
        self.players.vmms.iter().chain(&self.players.manager).map(|&pid| cpu_s(pid)).sum()
    }
}

fn cpu_s(pid: i32) -> Result<f64> {
    let time = process::cpu_time(pid as u32);
    Ok(time.with_context(|| format!("process {pid} has no CPU times"))?.as_secs_f64())
}

fn evaluate(table: Table, quick: bool) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let values = |kind: f64, column: &str| -> Vec<f64> {
        let of = table.series("sharing", column);
        of.iter().filter(|p| p.0 == kind).map(|p| p.1).collect()
    };
    let (off, on) = (values(0.0, "rounds_per_s"), values(1.0, "rounds_per_s"));
    outcome.figure("off_rounds_per_s", median(&off));
    outcome.figure("on_rounds_per_s", median(&on));
    let changes = |column: &str| -> Vec<f64> {
        let pairs = values(0.0, column).into_iter().zip(values(1.0, column));
        pairs.map(|(off, on)| 100.0 * (on / off - 1.0)).collect()
    };
    let blocks = changes("rounds_per_s");
    let (worst, best) = range(&blocks);
    outcome.figure("change_percent", median(&blocks));
    outcome.figure("change_per_cpu_percent", median(&changes("rounds_per_cpu_s")));
    outcome.figure("worst_block_percent", worst);
    outcome.figure("best_block_percent", best);
    outcome.figure("saved_mib", median(&values(1.0, "saved_mib")));
    // Totals so far: those of the last block are all.
    let last = |column: &str| values(1.0, column).last().copied().unwrap_or(0.0);
    outcome.figure("breaks", last("breaks"));
    outcome.figure("scan_cpu_s", last("scan_cpu_s"));
    outcome.paper("change_percent", PAPER.2);
    outcome.paper("worst_block_percent", PAPER.0);
    outcome.paper("best_block_percent", PAPER.1);
    if !quick {
        outcome.at_most("spread_percent", best - worst, MOST_SPREAD);
        // The paper's worst.
        outcome.at_least("change_percent", median(&blocks), PAPER.0);
        // Without anything shared there is nothing whose cost could be measured.
        outcome.at_least("saved_mib", median(&values(1.0, "saved_mib")), MEMORY.mib() * 0.2);
    }
    let by_repeat = |kind: f64| -> Vec<(f64, f64)> {
        let rows = table.rows.iter().filter(|r| r[0] == Some(kind));
        rows.filter_map(|r| Some((r[1]? + 1.0, r[2]?))).collect()
    };
    let chart = Chart {
        title: "CPU-bound throughput of two guests, page sharing off and on".to_owned(),
        x: "block of turns".to_owned(),
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
        for block in 0..6 {
            let b = f64::from(block);
            // The machine's speed varies, and falls on both alike.
            let speed = 4.0 + b % 2.0;
            t.push(&[0.0, b, speed, 2.0, 0.0, 0.0, 0.0]);
            let on = on * (1.0 + noise * (b % 3.0 - 1.0));
            t.push(&[1.0, b, speed * on, 2.0, saved, 100.0, 0.5]);
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
    fn blocks_that_disagree_and_runs_without_sharing_say_nothing() {
        assert!(!evaluate(table(0.99, 0.06, 60.0), false).outcome.ok);
        assert!(!evaluate(table(0.99, 0.002, 1.0), false).outcome.ok);
    }
}
