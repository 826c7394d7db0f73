//! What Ballast costs where memory is plentiful: the same guest, with the same loads, under plain QEMU and
//! under Ballast. What happens once (a boot, memory that is written for the first time) one after the other, in rounds;
//! rates of loads that go on in turns of a second ([`steady`]), so that whatever else the host does falls on all alike.
//!
//! | side | RAM | who looks for equal pages |
//! | --- | --- | --- |
//! | `plain` | a memfd | nobody |
//! | `plain_large` | a file of a tmpfs with large pages | nobody |
//! | `plain_ksm` | anonymous, as QEMU's default | the kernel's KSM, at its defaults |
//! | `ballast` | a memfd | nobody |
//! | `ballast_large` | a file of a tmpfs with large pages | nobody |
//! | `ballast_sharing` | a file of a tmpfs with large pages | Ballast, at its defaults |
//!
//! `kernel_large_page` is what the kernel alone takes to allocate one: no fault that is answered with one takes less.
//!
//! Ballast is compared with plain QEMU on the same kind of memory. Rates are per second that a side had, what the rounds' loads
//! did also per second of CPU time of all that serves the guest (VMM, manager, ksmd): that says what the host
//! spends, also where the host is crowded. Spreads over the rounds, or blocks of turns, are in the figures.

mod floor;
mod loads;
mod side;
mod steady;

use anyhow::{Context, Result};

use super::sharing::ksm::Ksm;
use crate::figures::Outcome;
use crate::image::{self, Image};
use crate::manager::disk_folder;
use crate::say;
use crate::stats::{median, range};
use loads::{Loads, Measured};
use side::Side;

/// Under Ballast without sharing, and with it, at least this part of plain QEMU's.
const OFF: f64 = 0.99;
const ON: f64 = 0.98;
/// Microseconds, within which 99% of the faults are to be served.
const P99: f64 = 100.0;

const SIDES: [Side; 6] = [
    Side::Plain,
    Side::PlainLarge,
    Side::PlainKsm,
    Side::Ballast,
    Side::BallastLarge,
    Side::BallastSharing,
];

/// What is compared: name, value, and whether more is better.
type Figure = (&'static str, fn(&Measured) -> f64, bool);
const FIGURES: [Figure; 5] = [
    ("boot_s", |m| m.boot_s, false),
    ("boot_cpu_s", |m| m.boot_cpu_s, false),
    ("fill_pages_per_s", |m| m.fill_pages_per_s, true),
    ("work_per_cpu_s", |m| m.work_per_cpu_s, true),
    ("cpu_s", |m| m.cpu_s, false),
];

pub async fn run(image: &Image, quick: bool) -> Result<Outcome> {
    let (rounds, loads) = if quick { (1, Loads::quick()) } else { (5, Loads::full()) };
    let (blocks, turns) = if quick { (1, 2) } else { (6, 6) };
    let folder = tempfile::Builder::new().prefix("ballast-plenty-").tempdir_in(disk_folder())?;
    let disk = folder.path().join("dbench.img");
    image::dbench_disk(&disk, loads::DISK)?;
    // The host's page cache is warm for all.
    std::io::copy(&mut std::fs::File::open(&disk)?, &mut std::io::sink())?;
    let ksm = Ksm::take().inspect_err(|e| say::detail(&format!("without KSM: {e}"))).ok();
    let mut measured: Vec<(Side, Measured)> = Vec::new();
    for round in 0..rounds {
        // Each side comes at each place in its turn.
        for i in 0..SIDES.len() {
            let side = SIDES[(i + round) % SIDES.len()];
            if side == Side::PlainKsm && ksm.is_none() {
                continue;
            }
            let m = side.measure(image, &disk, &loads, ksm.as_ref()).await;
            let m = m.with_context(|| side.name().to_owned())?;
            say::detail(&format!("{:<16} {}", side.name(), m.text()));
            measured.push((side, m));
        }
    }
    ksm.map_or(Ok(()), Ksm::end)?;
    let mut outcome = evaluate(&measured);
    for load in &steady::LOADS {
        let rates = steady::measure(load, image, &disk, blocks, turns).await?;
        compare(&mut outcome, load.figure, &rates);
    }
    // After all: its memory is then what the guests had.
    match floor::large_pages() {
        Ok(floor) => {
            outcome.figure("kernel_large_page_p50_us", floor.p50_us);
            outcome.figure("kernel_large_page_p99_us", floor.p99_us);
        }
        Err(e) => say::detail(&format!("without the kernel's own large pages: {e:#}")),
    }
    Ok(outcome)
}

fn evaluate(measured: &[(Side, Measured)]) -> Outcome {
    let mut outcome = Outcome::new("plenty");
    let of = |side: Side, value: fn(&Measured) -> f64| -> Vec<f64> {
        measured.iter().filter(|m| m.0 == side).map(|m| value(&m.1)).collect()
    };
    for side in SIDES {
        if of(side, |_| 0.0).is_empty() {
            continue;
        }
        for (name, value, _) in FIGURES {
            let values = of(side, value);
            let (least, most) = range(&values);
            outcome.figure(&format!("{}_{name}", side.name()), median(&values));
            outcome.figure(&format!("{}_{name}_spread", side.name()), most - least);
        }
        if let Some(peer) = side.peer() {
            for (name, value, more) in FIGURES {
                // Of one round, a few places apart in it; then the median of that is taken.
                let ratios: Vec<f64> = of(side, value)
                    .iter()
                    .zip(&of(peer, value))
                    .map(|(ours, plain)| if more { ours / plain } else { plain / ours })
                    .collect();
                outcome.at_least(
                    &format!("{}_{name}_ratio", side.name()),
                    median(&ratios),
                    side.least(),
                );
            }
            let p99 = of(side, |m| m.p99_us);
            outcome.at_most(&format!("{}_fault_p99_us", side.name()), median(&p99), P99);
            outcome.figure(
                &format!("{}_fault_p999_us", side.name()),
                median(&of(side, |m| m.p999_us)),
            );
            outcome
                .figure(&format!("{}_large_mib", side.name()), median(&of(side, |m| m.large_mib)));
            outcome.figure(&format!("{}_faults", side.name()), median(&of(side, |m| m.faults)));
        }
    }
    outcome
}

/// `rates` of a load: a row for each block of turns. All that a side did counts: a neighbour's burst falls on the turns of all.
fn compare(outcome: &mut Outcome, figure: &str, rates: &[Vec<f64>]) {
    let of = |side: Side| -> Vec<f64> {
        let n = steady::SIDES.iter().position(|s| *s == side).unwrap_or_default();
        rates.iter().map(|row| row[n]).collect()
    };
    let sum = |side: Side| of(side).iter().sum::<f64>();
    for side in steady::SIDES {
        let (least, most) = range(&of(side));
        outcome.figure(&format!("{}_{figure}", side.name()), sum(side) / rates.len() as f64);
        outcome.figure(&format!("{}_{figure}_spread", side.name()), most - least);
        if let Some(peer) = side.peer() {
            let ratio = sum(side) / sum(peer);
            outcome.at_least(&format!("{}_{figure}_ratio", side.name()), ratio, side.least());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(speed: f64) -> Measured {
        Measured {
            boot_s: 2.0 / speed,
            boot_cpu_s: 1.0 / speed,
            fill_pages_per_s: speed,
            compute_per_s: speed,
            memory_per_s: speed,
            dbench_per_s: speed,
            work_per_cpu_s: speed,
            cpu_s: 9.0 / speed,
            p99_us: 16.0,
            ..Measured::default()
        }
    }

    #[test]
    fn as_fast_as_plain_passes_and_slower_does_not() {
        let mut all = Vec::new();
        for round in 0..3 {
            // The host's speed varies, and falls on all alike.
            let speed = 1.0 + f64::from(round);
            SIDES.iter().for_each(|side| all.push((*side, one(speed))));
        }
        assert!(evaluate(&all).ok);
        let slow = |side: Side| {
            let mut all = all.clone();
            all.iter_mut().filter(|m| m.0 == side).for_each(|m| m.1.fill_pages_per_s *= 0.985);
            evaluate(&all)
        };
        assert!(slow(Side::BallastSharing).ok);
        let outcome = slow(Side::BallastLarge);
        assert!(!outcome.ok);
        let missed: Vec<&String> =
            outcome.targets.iter().filter(|t| !t.1.met).map(|t| t.0).collect();
        assert_eq!(missed, ["ballast_large_fill_pages_per_s_ratio"]);
        all.iter_mut().for_each(|m| m.1.p99_us = 128.0);
        assert!(!evaluate(&all).ok);
    }

    #[test]
    fn all_that_a_side_did_in_its_turns_is_compared_with_plain_qemu_on_its_kind_of_memory() {
        let mut outcome = Outcome::new("plenty");
        // Plain, plain_large, ballast, ballast_large, ballast_sharing.
        let rates = [vec![10.0, 20.0, 9.9, 19.7, 19.7], vec![20.0, 40.0, 19.9, 39.4, 39.4]];
        compare(&mut outcome, "rate", &rates);
        let missed: Vec<&String> =
            outcome.targets.iter().filter(|t| !t.1.met).map(|t| t.0).collect();
        assert_eq!(missed, ["ballast_large_rate_ratio"]);
        let figures = ["plain_rate", "ballast_rate", "ballast_rate_spread"];
        let found = figures.map(|name| (outcome.figures[name] * 100.0).round());
        assert_eq!(found, [1500.0, 1490.0, 1000.0]);
    }

    #[test]
    fn without_ksm_its_figures_are_left_out() {
        let all: Vec<_> =
            SIDES.iter().filter(|s| **s != Side::PlainKsm).map(|s| (*s, one(1.0))).collect();
        let outcome = evaluate(&all);
        assert!(outcome.ok && !outcome.figures.keys().any(|k| k.starts_with("plain_ksm")));
    }
}
