//! OSDI'02, figure 7: the idle memory tax. Two VMs of 256 MB with equal shares have 360 MB: the first
//! has touched all of its memory and is idle, the second runs dbench. Without a tax each has 179 MB;
//! with one of 75%, set in mid-run, memory moves to the second, whose throughput grows by over 30%.
//!
//! Here the first guest is a Linux that writes nearly all of its memory once (the paper's Windows
//! clears its free pages itself). The second's disk is limited to what a disk of those days gave: from
//! the host's page cache, reading a file again would cost next to nothing, and memory would be worth
//! as little. Shared pages are out of the picture, as in the paper's two systems that had hardly a
//! page in common.

use std::time::Duration;

use anyhow::{Context, Result};
use ballast_api::HostChange;
use ballast_units::Bytes;

use super::Measured;
use super::stage::Stage;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};
use crate::say;
use crate::stats::{mean, median};

const NAME: &str = "osdi02-f7";
const MEMORY: Bytes = Bytes::from_mib(256);
/// For VMs, without what they cost beside their pages.
const FOR_VMS: Bytes = Bytes::from_mib(360);
/// What the idle guest writes: what its system leaves.
const IDLE_MIB: u64 = 176;
const CLIENTS: u32 = 40;
/// The disk of the second VM: bytes and operations per second.
const DISK: (u64, u32) = (20 << 20, 400);
/// The paper's period is 30 s; with a shorter one the estimate settles sooner, at the same value.
const PERIOD: Duration = Duration::from_secs(10);
/// The paper's: what each VM has without the tax, MB, and what VM2 gains by it.
const PAPER_MB: f64 = 179.0;
const PAPER_GAIN_PERCENT: f64 = 30.0;

const COLUMNS: [&str; 9] = [
    "time_s",
    "tax",
    "idle_mib",
    "busy_mib",
    "idle_target_mib",
    "busy_target_mib",
    "idle_active_mib",
    "busy_active_mib",
    "mb_per_s",
];

/// How long things take, seconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// One run of dbench, the next of which follows at once.
    burst: u64,
    /// Without the tax.
    before: u64,
    /// With it.
    after: u64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let times = if quick {
        Times { burst: 10, before: 60, after: 80 }
    } else {
        Times { burst: 20, before: 240, after: 300 }
    };
    let template = tempfile::Builder::new().prefix("ballast-disk-").tempdir()?;
    let disk = template.path().join("dbench.img");
    say::step("Building the disk with dbench");
    image::dbench_disk(&disk, Bytes::from_mib(2048))?;

    let mut stage = Stage::new(&Options {
        tax: Some(0.0),
        sample_period: Some(PERIOD),
        sharing: Some(SharingOptions::off()),
        ..Options::budget(Bytes::from_mib(1024))
    })?;
    say::step(&format!("VM1: {MEMORY}, idle, having written {IDLE_MIB} MiB"));
    let idle =
        Guest::new("vm1", MEMORY, &stage.manager.consoles()).run(format!("hog --mb {IDLE_MIB}"));
    stage.add(&idle, image, |_| {}).await?;
    stage.wait_for_boot().await?;
    while !stage.poll()?.iter().any(|(_, e)| e.number("held_mb").is_some()) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    say::step(&format!("VM2: {MEMORY}, dbench with {CLIENTS} clients, without end"));
    let repeats = (times.before + times.after) / times.burst + 1;
    let busy = Guest::new("vm2", MEMORY, &stage.manager.consoles())
        .run(format!("dbench --clients {CLIENTS} --seconds {} --repeat {repeats}", times.burst))
        .disk(disk);
    stage.add(&busy, image, |spec| slow_down(&mut spec.extra)).await?;
    stage.wait_for_boot().await?;
    limit(&stage).await?;

    let table = watch(&mut stage, times).await?;
    stage.end().await?;
    Ok(evaluate(table, times))
}

/// Makes the guest's drive as slow as a disk.
fn slow_down(arguments: &mut [String]) {
    let (bytes, operations) = DISK;
    for drive in arguments.iter_mut().filter(|a| a.starts_with("file=")) {
        drive.push_str(&format!(
            ",throttling.bps-total={bytes},throttling.iops-total={operations},\
             throttling.bps-total-max={bytes},throttling.iops-total-max={operations}"
        ));
    }
}

/// Lowers the budget so far that just `FOR_VMS` can be given to VMs.
async fn limit(stage: &Stage) -> Result<()> {
    let host = stage.manager.client().host().await?;
    // Reclamation aims at 6.5% of the budget.
    let budget = Bytes(((FOR_VMS.0 + host.overhead) as f64 / 0.935) as u64 >> 12 << 12);
    let change = HostChange { budget: Some(budget.0), ..HostChange::default() };
    stage.manager.client().change_host(&change).await.context("the budget")?;
    Ok(())
}

async fn watch(stage: &mut Stage, times: Times) -> Result<Table> {
    let mut table = Table::new(&COLUMNS);
    let begin = stage.elapsed();
    let mut tax = 0.0;
    let mut told = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let t = (stage.elapsed() - begin).as_secs_f64();
        let throughput = stage
            .poll()?
            .into_iter()
            .filter_map(|(_, e)| if e.kind() == "dbench" { e.number("mb_per_s") } else { None })
            .next_back();
        if t >= (times.before + times.after) as f64 {
            return Ok(table);
        }
        if t >= times.before as f64 && tax == 0.0 {
            tax = 0.75;
            say::step("The tax goes from 0 to 75%");
            let change = HostChange { tax: Some(tax), ..HostChange::default() };
            stage.manager.client().change_host(&change).await.context("the tax")?;
        }
        let (_, vms) = stage.views().await?;
        let of = |name: &str, what: fn(&ballast_api::VmView) -> u64| {
            vms.iter().find(|vm| vm.name == name).map_or(f64::NAN, |vm| Bytes(what(vm)).mib())
        };
        let row = [
            t,
            tax,
            of("vm1", |vm| vm.memory.consumed),
            of("vm2", |vm| vm.memory.consumed),
            of("vm1", |vm| vm.memory.target),
            of("vm2", |vm| vm.memory.target),
            of("vm1", |vm| vm.active.estimate),
            of("vm2", |vm| vm.active.estimate),
            throughput.unwrap_or(f64::NAN),
        ];
        table.push(&row);
        if t as u64 / 20 > told {
            told = t as u64 / 20;
            say::detail(&format!(
                "{t:>4.0} s, tax {:.0}%: idle {:.0} MiB (active {:.0}), busy {:.0} MiB (active {:.0})",
                tax * 100.0,
                row[2],
                row[6],
                row[3],
                row[7]
            ));
        }
    }
}

/// The last third of a phase.
fn late(series: &[(f64, f64)], from: u64, to: u64) -> Vec<f64> {
    let (from, to) = (from as f64, to as f64);
    let start = to - (to - from) / 3.0;
    series.iter().filter(|(t, _)| *t > start && *t <= to).map(|(_, v)| *v).collect()
}

fn evaluate(table: Table, times: Times) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let phases = [(0, times.before), (times.before, times.before + times.after)];
    let at = |column: &str, phase: usize| {
        late(&table.series("time_s", column), phases[phase].0, phases[phase].1)
    };
    for (phase, name) in [(0, "untaxed"), (1, "taxed")] {
        for vm in ["idle", "busy"] {
            outcome.figure(&format!("{vm}_{name}_mib"), mean(&at(&format!("{vm}_mib"), phase)));
            let target = mean(&at(&format!("{vm}_target_mib"), phase));
            outcome.figure(&format!("{vm}_target_{name}_mib"), target);
        }
        outcome.figure(&format!("{name}_mb_per_s"), median(&at("mb_per_s", phase)));
    }
    let gain = 100.0 * (median(&at("mb_per_s", 1)) / median(&at("mb_per_s", 0)) - 1.0);
    outcome.figure("gain_percent", gain);
    // The paper's MB are taken for MiB.
    outcome.paper("idle_untaxed_mib", PAPER_MB);
    outcome.paper("busy_untaxed_mib", PAPER_MB);
    outcome.paper("gain_percent", PAPER_GAIN_PERCENT);
    for vm in ["idle", "busy"] {
        let error = mean(&at(&format!("{vm}_target_mib"), 0)) - FOR_VMS.mib() / 2.0;
        outcome.at_most(&format!("{vm}_untaxed_from_half_mib"), error.abs(), 6.0);
    }
    let moved = mean(&at("busy_mib", 1)) - mean(&at("busy_mib", 0));
    outcome.at_least("moved_mib", moved, 30.0);
    outcome.at_least("gain_percent", gain, PAPER_GAIN_PERCENT);
    let charts = charts(&table, times);
    Measured { outcome, table, charts }
}

fn charts(table: &Table, times: Times) -> Vec<Chart> {
    let line = |label: &str, column: &str| Series::new(label, table.series("time_s", column));
    let end = (times.before + times.after) as f64;
    vec![
        Chart {
            title: format!("Idle memory tax: 0, and 75% from {} s on", times.before),
            x: "time (s)".to_owned(),
            y: "memory (MiB)".to_owned(),
            series: vec![
                line("VM1 (idle): allocation", "idle_mib"),
                line("VM2 (dbench): allocation", "busy_mib"),
                line("VM1: estimated active", "idle_active_mib"),
                line("VM2: estimated active", "busy_active_mib"),
                Series::new(
                    "OSDI'02: 179 MB each, untaxed",
                    vec![(0.0, PAPER_MB), (times.before as f64, PAPER_MB)],
                )
                .reference(),
            ],
            ..Chart::default()
        },
        Chart {
            title: "dbench in VM2".to_owned(),
            x: "time (s)".to_owned(),
            y: "MB/s".to_owned(),
            series: vec![
                line("throughput", "mb_per_s"),
                Series::new("tax raised", vec![(times.before as f64, 0.0), (end, 0.0)]).reference(),
            ],
            ..Chart::default()
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Times = Times { burst: 20, before: 240, after: 300 };

    /// Both have half, then `moved` MiB go to the busy one, which gets `gain` more done.
    fn measured(moved: f64, gain: f64) -> Measured {
        let mut t = Table::new(&COLUMNS);
        for s in 1..540 {
            let taxed = s >= 240;
            let shift = if taxed { moved } else { 0.0 };
            let rate = if taxed { 10.0 * gain } else { 10.0 };
            let rate = if s % 20 == 0 { rate } else { f64::NAN };
            let (idle, busy) = (180.0 - shift, 180.0 + shift);
            t.push(&[f64::from(s), 0.0, idle, busy, idle, busy, 5.0, 150.0, rate]);
        }
        evaluate(t, TIMES)
    }

    #[test]
    fn what_moved_and_what_it_brought_is_read_from_the_end_of_each_phase() {
        let good = measured(60.0, 1.35).outcome;
        assert!(good.ok, "{:?}", good.targets);
        assert_eq!(good.figures["busy_taxed_mib"], 240.0);
        assert!((good.figures["gain_percent"] - 35.0).abs() < 0.01);
        assert!(!measured(60.0, 1.1).outcome.ok);
        assert!(!measured(5.0, 1.35).outcome.ok);
    }

    #[test]
    fn only_the_drive_is_slowed_down() {
        let mut arguments = vec!["-drive".to_owned(), "file=/a,if=none".to_owned()];
        slow_down(&mut arguments);
        assert_eq!(arguments[0], "-drive");
        assert!(arguments[1].starts_with("file=/a,if=none,throttling.bps-total=20971520,"));
    }
}
