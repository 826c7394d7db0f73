//! VMware Technical Journal, Winter 2013, "Memory Overcommitment in the ESX Server", figures 5a to
//! 5c: two VMs of 24 GB each on 28 GB available, with hypervisor swapping as the only mechanism.
//!
//! | | each workload writes | then reads | the paper saw |
//! | --- | --- | --- | --- |
//! | a | 12 GB | all of it | no swap-in at any time |
//! | b | 15 GB | one fixed block of 1.875 GB | swap-in until the block is back, then none |
//! | c | 15 GB | all of it | steady swap-in |
//!
//! Here at 64 MiB per GB. What the guests' own system holds (1 GB there) does not shrink with the
//! scale, and most of it is idle: once swapped out it makes room. Granted in full beside the paper's
//! 28 GB, it let the working sets of case c fit after a minute. So the memory available is what case
//! a maps, and half a GB of the scale.

use std::time::Duration;

use anyhow::{Result, bail};
use ballast_units::Bytes;

use super::Measured;
use super::stage::Stage;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::Options;
use crate::say;

const NAME: &str = "vtj-memory-f5";
const VMS: usize = 2;
/// MiB that stand for one of the paper's GB.
const SCALE: f64 = 64.0;
const CONFIGURED_GB: f64 = 24.0;
/// Available beyond what case a maps; the paper had 2 GB.
const SLACK_GB: f64 = 0.5;

struct Case {
    letter: &'static str,
    write_gb: f64,
    read_gb: f64,
}

const CASES: [Case; 3] = [
    Case { letter: "a", write_gb: 12.0, read_gb: 12.0 },
    Case { letter: "b", write_gb: 15.0, read_gb: 1.875 },
    Case { letter: "c", write_gb: 15.0, read_gb: 15.0 },
];

const fn mib(gb: f64) -> f64 {
    gb * SCALE
}

fn memory() -> Bytes {
    Bytes::from_mib(mib(CONFIGURED_GB) as u64)
}

/// Budget of which `available` MiB can be used, after `overhead`, before anything is reclaimed.
fn budget(available: f64, overhead: f64) -> Bytes {
    // Reclamation begins below 4% free.
    Bytes::from_mib(((available + overhead) / 0.95).ceil() as u64)
}

/// What a case showed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Seen {
    /// MiB swapped in altogether, and within the first and the last third of the reading.
    total: f64,
    first: f64,
    last: f64,
    /// Length of one third, seconds.
    third_s: f64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let seconds = if quick { 45 } else { 150 };
    let (system, overhead) = footprint(image).await?;
    let available = VMS as f64 * (mib(CASES[0].write_gb) + system) + mib(SLACK_GB);
    say::detail(&format!(
        "a booted guest holds {system:.0} MiB; available to the guests: {available:.0} MiB"
    ));
    let budget = budget(available, overhead * VMS as f64);
    let mut table =
        Table::new(&["case", "time_s", "mapped1_mib", "mapped2_mib", "swapin1_mib", "swapin2_mib"]);
    let mut seen = Vec::new();
    for (n, case) in CASES.iter().enumerate() {
        say::step(&format!(
            "Figure 5{}: {VMS} guests of {} on {budget}; each writes {:.0} MiB and reads {:.0} MiB",
            case.letter,
            memory(),
            mib(case.write_gb),
            mib(case.read_gb)
        ));
        seen.push(one(image, n, case, budget, seconds, &mut table).await?);
    }
    let mut measured = evaluate(table, &seen);
    measured.outcome.figure("available_mib", available);
    measured.outcome.figure("budget_mib", budget.mib());
    measured.outcome.figure("guest_system_mib", system);
    Ok(measured)
}

/// MiB that a booted guest of this size holds, and its declared overhead.
async fn footprint(image: &Image) -> Result<(f64, f64)> {
    say::step("Measuring what a booted guest holds");
    let mut stage = Stage::new(&alone(Bytes(memory().0 * 2)))?;
    let guest = Guest::new("empty", memory(), &stage.manager.consoles());
    stage.add(&guest, image, |spec| spec.no_balloon = true).await?;
    stage.wait_for_boot().await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let vm = stage.manager.client().vm(&guest.name).await?;
    stage.end().await?;
    Ok((Bytes(vm.memory.consumed).mib(), Bytes(vm.memory.overhead).mib()))
}

/// Swapping is all that there is: nothing is compressed, nor shared.
fn alone(budget: Bytes) -> Options {
    Options {
        more: "[compression]\nenabled = false\n[sharing]\nenabled = false\n".to_owned(),
        ..Options::budget(budget)
    }
}

async fn one(
    image: &Image,
    number: usize,
    case: &Case,
    budget: Bytes,
    seconds: u64,
    table: &mut Table,
) -> Result<Seen> {
    let mut stage = Stage::new(&alone(budget))?;
    for n in 1..=VMS {
        let guest =
            Guest::new(&format!("reader{n}"), memory(), &stage.manager.consoles()).run(format!(
                "reader --mb {:.0} --block-mb {:.0} --fill-rate-mb 60 --rate-mb 200 --seed {n}",
                mib(case.write_gb),
                mib(case.read_gb)
            ));
        stage.add(&guest, image, |spec| spec.no_balloon = true).await?;
    }
    stage.wait_for_boot().await?;
    let begin = stage.elapsed();
    let mut filled = [false; VMS];
    let mut reading_since = f64::NAN;
    let mut told = 0;
    let mut points: Vec<(f64, f64)> = Vec::new();
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        for (n, event) in stage.poll()? {
            filled[n] |= matches!(event.text("phase"), "filled" | "read");
        }
        let t = stage.elapsed().saturating_sub(begin).as_secs_f64();
        let (_, vms) = stage.views().await?;
        if vms.len() != VMS {
            bail!("{} of {VMS} guests are left", vms.len());
        }
        if reading_since.is_nan() && filled.iter().all(|f| *f) {
            reading_since = t;
        }
        let mapped = |n: usize| {
            let m = &vms[n].memory;
            Bytes(m.consumed + m.swapped).mib()
        };
        let swap_in = |n: usize| Bytes(vms[n].counters.swapped_in).mib();
        table.push(&[number as f64, t, mapped(0), mapped(1), swap_in(0), swap_in(1)]);
        points.push((t, swap_in(0) + swap_in(1)));
        if t as u64 / 20 > told {
            told = t as u64 / 20;
            say::detail(&format!(
                "{t:>4.0} s: mapped {:.0} + {:.0} MiB, swapped in {:.0} MiB{}",
                mapped(0),
                mapped(1),
                swap_in(0) + swap_in(1),
                if reading_since.is_nan() { ", writing" } else { ", reading" }
            ));
        }
        if t - reading_since >= seconds as f64 {
            break;
        }
        if t > seconds as f64 + 900.0 {
            bail!("the guests have not written their memory after {t:.0} s");
        }
    }
    stage.end().await?;
    Ok(split(&points, reading_since))
}

/// Cumulative swap-in over the thirds of the time after `from`.
fn split(points: &[(f64, f64)], from: f64) -> Seen {
    let end = points.last().map_or(from, |p| p.0);
    let third = (end - from) / 3.0;
    let at = |t: f64| points.iter().rev().find(|p| p.0 <= t).map_or(0.0, |p| p.1);
    Seen {
        total: at(end),
        first: at(from + third) - at(from),
        last: at(end) - at(end - third),
        third_s: third,
    }
}

fn evaluate(table: Table, seen: &[Seen]) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let case = |n: usize| seen.get(n).copied().unwrap_or_default();
    let (a, b, c) = (case(0), case(1), case(2));
    for (letter, s) in [("a", a), ("b", b), ("c", c)] {
        outcome.figure(&format!("{letter}_swapin_mib"), s.total);
        outcome.figure(&format!("{letter}_first_third_mib_per_s"), s.first / s.third_s.max(1.0));
        outcome.figure(&format!("{letter}_last_third_mib_per_s"), s.last / s.third_s.max(1.0));
    }
    outcome.paper("a_swapin_mib", 0.0);
    outcome.paper("b_last_third_mib_per_s", 0.0);
    outcome.at_most("a_swapin_mib", a.total, 1.0);
    // A burst while the block comes back...
    outcome.at_least("b_swapin_mib", b.total, 1.0);
    // ...and then next to none: what the guest's own system still touches now and then.
    outcome.at_most("b_last_third_of_total_percent", 100.0 * b.last / b.total.max(1.0), 3.0);
    // Steady: the end is about as busy as the beginning.
    outcome.at_least("c_last_third_of_first_percent", 100.0 * c.last / c.first.max(1.0), 50.0);
    outcome.at_least("c_last_third_mib_per_s", c.last / c.third_s.max(1.0), 1.0);
    let charts = CASES.iter().enumerate().map(|(n, case)| chart(&table, n, case)).collect();
    Measured { outcome, table, charts }
}

fn chart(table: &Table, number: usize, case: &Case) -> Chart {
    let own = Table {
        columns: table.columns.clone(),
        rows: table.rows.iter().filter(|r| r[0] == Some(number as f64)).cloned().collect(),
    };
    let line = |label: &str, column: &str| Series::new(label, own.series("time_s", column));
    let what = match case.letter {
        "a" => "mapped and working set fit",
        "b" => "mapped exceeds memory, the working set fits",
        _ => "the working set exceeds memory",
    };
    Chart {
        title: format!("5{}: {what}", case.letter),
        x: "time (s)".to_owned(),
        y: "mapped (MiB)".to_owned(),
        y_right: Some("cumulative swap-in (MiB)".to_owned()),
        series: vec![
            line("mapped, VM 1", "mapped1_mib"),
            line("mapped, VM 2", "mapped2_mib"),
            line("swap-in, VM 1 (right)", "swapin1_mib").right(),
            line("swap-in, VM 2 (right)", "swapin2_mib").right(),
        ],
        bars: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(rate: impl Fn(f64) -> f64) -> Seen {
        let mut sum = 0.0;
        let points: Vec<(f64, f64)> = (0..100)
            .map(|s| {
                sum += rate(f64::from(s));
                (f64::from(s), sum)
            })
            .collect();
        split(&points, 10.0)
    }

    fn ok(seen: [Seen; 3]) -> bool {
        evaluate(Table::new(&["case"]), &seen).outcome.ok
    }

    #[test]
    fn the_three_situations_are_told_apart() {
        let none = curve(|_| 0.0);
        let burst = curve(|t| if (10.0..30.0).contains(&t) { 5.0 } else { 0.0 });
        let steady = curve(|t| if t < 10.0 { 0.0 } else { 5.0 });
        assert_eq!((burst.total, burst.last), (100.0, 0.0));
        assert!(ok([none, burst, steady]));
        assert!(!ok([burst, burst, steady]));
        assert!(!ok([none, steady, steady]));
        assert!(!ok([none, burst, burst]));
        assert!(!ok([none, none, none]));
    }

    #[test]
    fn the_scale_keeps_the_papers_proportions() {
        assert_eq!(memory(), Bytes::from_mib(1536));
        assert!(budget(950.0, 0.0) >= Bytes::from_mib(1000));
        // What is granted beyond case a is less than what case c reads beyond it.
        assert!(SLACK_GB > 0.0 && CASES[1].read_gb < CASES[0].read_gb);
        assert!(SLACK_GB < VMS as f64 * (CASES[2].read_gb - CASES[0].write_gb) / 2.0);
    }
}
