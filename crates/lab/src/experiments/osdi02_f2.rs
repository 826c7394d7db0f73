//! OSDI'02, figure 2: dbench with 40 clients in one Linux VM, configured with 128 to 224 MB, against
//! the same VM configured with 256 MB and ballooned down to that size. The paper's overhead: 4.4% at
//! 128 MB (a balloon of 128 MB) down to 1.4% at 224 MB.
//!
//! Both variants run under Ballast with memory to spare; the balloon is asked for by a limit (max) below the configured
//! size. It takes no more than is to be taken, so that a guest first touches nearly all that it is configured with, and
//! page sharing is off. Runs are interleaved, each in a freshly booted guest on a fresh disk; medians are compared.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::VmChange;
use ballast_units::Bytes;

use super::Measured;
use super::stage::Stage;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};
use crate::say;
use crate::stats::{median, range};

const NAME: &str = "osdi02-f2";
const CONFIGURED: Bytes = Bytes::from_mib(256);
const CLIENTS: u32 = 40;
/// The paper gives both ends; between them it says no more than "ranging".
const PAPER: [(u64, f64); 2] = [(128, 4.4), (224, 1.4)];
/// Spread of the runs of one variant, percent of their median, with which a comparison says anything.
const MOST_SPREAD: f64 = 15.0;
/// From boot to the start of the load, by when the balloon must be in place.
const DELAY: Duration = Duration::from_secs(20);
/// Free memory of a booted guest is this much less than its size (and a sixteenth, left in peace). It is touched once,
/// before the load.
const SYSTEM_MIB: u64 = 62;

struct Run {
    mb_per_s: f64,
    /// Memory the guest had given up when the load ended, MiB.
    balloon: f64,
    /// Written to swap by the manager during the load, MiB: it should be nothing.
    swapped: f64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let sizes: &[u64] = if quick { &[128, 224] } else { &[128, 176, 224] };
    let (repeats, seconds) = if quick { (1, 8) } else { (3, 12) };
    let template = tempfile::Builder::new().prefix("ballast-disk-").tempdir()?;
    let disk = template.path().join("dbench.img");
    say::step("Building the disk with dbench");
    image::dbench_disk(&disk, Bytes::from_mib(2048))?;

    let total = repeats * sizes.len() * 2;
    let mut done = 0;
    let mut table =
        Table::new(&["size_mib", "ballooned", "repeat", "mb_per_s", "balloon_mib", "swapped_mib"]);
    for repeat in 0..repeats {
        for size in sizes {
            // Alternating order, so that neither variant always comes first.
            for ballooned in [repeat % 2 == 1, repeat % 2 == 0] {
                done += 1;
                let kind = if ballooned { "256 MiB ballooned to" } else { "configured with" };
                say::step(&format!("Run {done} of {total}: {kind} {size} MiB"));
                let run = one(image, &disk, *size, ballooned, seconds)
                    .await
                    .with_context(|| format!("{kind} {size} MiB"))?;
                say::detail(&format!(
                    "{:.1} MB/s, balloon {:.0} MiB, swapped {:.0} MiB",
                    run.mb_per_s, run.balloon, run.swapped
                ));
                let kind = f64::from(u8::from(ballooned));
                let row =
                    [*size as f64, kind, repeat as f64, run.mb_per_s, run.balloon, run.swapped];
                table.push(&row);
            }
        }
    }
    Ok(evaluate(table, sizes))
}

async fn one(
    image: &Image,
    template: &Path,
    size: u64,
    ballooned: bool,
    seconds: u32,
) -> Result<Run> {
    // The guest, its overhead, and enough to stay far above the high threshold.
    let mut stage = Stage::new(&Options {
        // What is shared need not be given up: the balloon would be smaller by that.
        sharing: Some(SharingOptions::off()),
        ..Options::budget(Bytes::from_mib(768))
    })?;
    let memory = if ballooned { CONFIGURED } else { Bytes::from_mib(size) };
    let configured = if ballooned { CONFIGURED.mib() as u64 } else { size };
    let touched = configured - configured / 16 - SYSTEM_MIB;
    let disk = stage.manager.disk("dbench");
    let copied = crate::tools::run(
        std::process::Command::new("cp").arg("--sparse=always").arg(template).arg(&disk),
    );
    copied.context("copying the disk")?;
    let guest = Guest::new("dbench1", memory, &stage.manager.consoles())
        .run(format!("dbench --clients {CLIENTS} --seconds {seconds} --delay {}", DELAY.as_secs()))
        .run(format!("hog --mb {touched} --seconds 1"))
        .disk(disk);
    stage.add(&guest, image, |_| {}).await?;
    stage.wait_for_boot().await?;
    let ready = Instant::now();
    while !stage.poll()?.iter().any(|(_, e)| e.kind() == "exit") {
        if ready.elapsed() > DELAY {
            bail!("the guest has not touched its memory after {} s", DELAY.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    if ballooned {
        stage.until_free(&guest.name, memory - Bytes::from_mib(size), DELAY).await?;
        let change = VmChange { max: Some(Bytes::from_mib(size).0), ..VmChange::default() };
        stage.manager.client().change(&guest.name, &change).await?;
    }
    tokio::time::sleep(DELAY.saturating_sub(ready.elapsed() + Duration::from_secs(1))).await;
    let before = stage.manager.client().vm(&guest.name).await?;
    let begin = Instant::now();
    let limit = Duration::from_secs(u64::from(seconds) * 4 + 120);
    let mb_per_s = loop {
        let result = stage.poll()?.into_iter().find(|(_, e)| e.kind() == "dbench");
        if let Some((_, event)) = result {
            break event.number("mb_per_s").context("dbench reported no throughput")?;
        }
        if begin.elapsed() > limit {
            bail!("dbench has not ended after {} s", limit.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    };
    let after = stage.manager.client().vm(&guest.name).await?;
    // The manager asks for no more than it needs, so the last MiB may come with the load.
    let wanted = memory.mib() - size as f64;
    let balloon = Bytes(after.balloon.reported).mib();
    if (balloon - wanted).abs() > 4.0 {
        bail!("the balloon held {balloon:.0} MiB after the load, not {wanted:.0} MiB");
    }
    let swapped = after.counters.swapped_out.saturating_sub(before.counters.swapped_out);
    let swapped = Bytes(swapped).mib();
    stage.end().await?;
    Ok(Run { mb_per_s, balloon, swapped })
}

fn evaluate(table: Table, sizes: &[u64]) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let mut configured = Vec::new();
    let mut ballooned = Vec::new();
    let mut overheads = Vec::new();
    for size in sizes {
        let values = |kind: f64| -> Vec<f64> {
            let rows = table.rows.iter();
            rows.filter(|r| r[0] == Some(*size as f64) && r[1] == Some(kind))
                .filter_map(|r| r[3])
                .collect()
        };
        let (plain, balloon) = (values(0.0), values(1.0));
        let x = *size as f64;
        configured.push((x, median(&plain)));
        ballooned.push((x, median(&balloon)));
        let overhead = 100.0 * (1.0 - median(&balloon) / median(&plain));
        overheads.push((x, overhead));
        outcome.figure(&format!("configured_{size}_mb_per_s"), median(&plain));
        outcome.figure(&format!("ballooned_{size}_mb_per_s"), median(&balloon));
        let mut spreads = Vec::new();
        for (kind, values) in [("configured", &plain), ("ballooned", &balloon)] {
            let (low, high) = range(values);
            let spread = 100.0 * (high - low) / median(values);
            spreads.push(spread);
            let name = format!("{kind}_{size}_spread_percent");
            outcome.figure(&name, spread);
            // Above it, what is compared are not the variants.
            outcome.at_most(&name, spread, MOST_SPREAD);
        }
        let name = format!("overhead_{size}_percent");
        outcome.figure(&name, overhead);
        // Between the ends, a straight line stands in for what the figure showed.
        let paper = 4.4 + (x - 128.0) * (1.4 - 4.4) / (224.0 - 128.0);
        if let Some((_, value)) = PAPER.iter().find(|(s, _)| s == size) {
            outcome.paper(&name, *value);
        }
        // The paper's overhead, and as much again as the runs of one variant differ: half the spread.
        let noise = [&plain, &balloon].map(|v| {
            let (low, high) = range(v);
            50.0 * (high - low) / median(v)
        });
        let noise = noise[0].max(noise[1]).min(MOST_SPREAD / 2.0);
        // Where runs of one variant differ by more than is allowed, the two say nothing of one another.
        let is_told = spreads.iter().all(|spread| *spread <= MOST_SPREAD);
        let told = if is_told { overhead } else { f64::NAN };
        outcome.at_most(&name, told, paper + noise);
    }
    let swapped: f64 = table.series("mb_per_s", "swapped_mib").iter().map(|p| p.1).sum();
    outcome.figure("swapped_mib", swapped);
    outcome.at_most("swapped_mib", swapped, 0.0);
    let charts = charts(configured, ballooned, overheads);
    Measured { outcome, table, charts }
}

/// Of the medians and the overhead at each size.
fn charts(
    configured: Vec<(f64, f64)>,
    ballooned: Vec<(f64, f64)>,
    overheads: Vec<(f64, f64)>,
) -> Vec<Chart> {
    let throughput = Chart {
        title: "dbench, 40 clients: configured size against ballooned size (medians)".to_owned(),
        x: "VM size (MiB)".to_owned(),
        y: "throughput (MB/s)".to_owned(),
        series: vec![
            Series::new("configured with this size", configured),
            Series::new("256 MiB ballooned to this size", ballooned),
        ],
        bars: true,
        ..Chart::default()
    };
    let overhead = Chart {
        title: "Overhead of the ballooned VM".to_owned(),
        x: "VM size (MiB)".to_owned(),
        y: "overhead (%)".to_owned(),
        series: vec![
            Series::new("Ballast", overheads),
            Series::new("OSDI'02, figure 2", PAPER.map(|(x, y)| (x as f64, y)).to_vec())
                .reference(),
        ],
        ..Chart::default()
    };
    vec![throughput, overhead]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(balloon: f64, swapped: f64) -> Table {
        let mut t =
            Table::new(&["size_mib", "ballooned", "repeat", "mb_per_s", "b", "swapped_mib"]);
        for repeat in 0..3 {
            let r = f64::from(repeat);
            t.push(&[128.0, 0.0, r, 30.0 + r * 0.1, 0.0, 0.0]);
            t.push(&[128.0, 1.0, r, balloon + r * 0.1, 128.0, swapped]);
        }
        t
    }

    #[test]
    fn overhead_follows_from_the_medians() {
        let m = evaluate(table(28.7, 0.0), &[128]);
        let got = m.outcome.figures["overhead_128_percent"];
        assert!((got - 100.0 * (1.0 - 28.8 / 30.1)).abs() < 0.01, "{got}");
        assert!(m.outcome.ok && m.outcome.ratios.contains_key("overhead_128_percent"));
    }

    #[test]
    fn a_slow_balloon_or_any_swapping_misses_the_target() {
        assert!(!evaluate(table(20.0, 0.0), &[128]).outcome.ok);
        assert!(!evaluate(table(29.0, 1.0), &[128]).outcome.ok);
    }
}
