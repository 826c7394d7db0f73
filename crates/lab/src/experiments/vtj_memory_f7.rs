//! VMware Technical Journal, Winter 2013, "Memory Overcommitment in the ESX Server", figure 7:
//! fifteen virtual desktops, while a memory hog takes the host from an overcommitment factor of 1.00
//! to 3.15. The paper: the 95th percentile of a user's operations grew 1.06, 1.22 and 2.0 times at
//! 1.87, 2.72 and 3.15.
//!
//! Here the users are `ballast-guest office`: each works in one of six programs, now and then turns
//! to another, and waits for every action; each page that an action touches is checked. What the hog
//! takes is taken off the budget, step by step. The same guests then run under plain QEMU with kernel
//! swap, with zram, and with KSM, and under Ballast without balloons.

use std::time::Duration;

use anyhow::Result;
use ballast_units::Bytes;

use super::Measured;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::image::Image;
use crate::overcommit::report::{
    Compared, X, at, circumstances, compare, lines, series, table, tag, taken,
};
use crate::overcommit::{self, Load, Plan, SIDES, Side};

const NAME: &str = "vtj-memory-f7";
/// Factor, and the 95th percentile as a multiple of the first.
const PAPER: [(f64, f64); 4] = [(1.0, 1.0), (1.87, 1.06), (2.72, 1.22), (3.15, 2.0)];

fn plan(quick: bool) -> Plan {
    let seconds = Duration::from_secs;
    if quick {
        return Plan {
            guests: (1..=3).map(|n| Load::office(10, 0.4, n)).collect(),
            memory: Bytes::from_mib(160),
            factors: vec![1.0, 1.87, 3.15],
            settle: seconds(8),
            window: seconds(12),
            warm: seconds(3),
        };
    }
    Plan {
        guests: (1..=6).map(|n| Load::office(16, 0.5, n)).collect(),
        memory: Bytes::from_mib(192),
        factors: PAPER.map(|(factor, _)| factor).to_vec(),
        settle: seconds(15),
        window: seconds(30),
        warm: seconds(10),
    }
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let plan = plan(quick);
    let steps = overcommit::run_all(&plan, image).await?;
    Ok(evaluate(table(&steps, "office"), &plan.factors))
}

fn evaluate(table: Table, factors: &[f64]) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let first = factors.first().copied().unwrap_or(f64::NAN);
    for factor in factors {
        for side in SIDES {
            let name = |what: &str| format!("{}_{what}_{}", side.name(), tag(*factor));
            let value = |column: &str| at(&table, side, *factor, column);
            outcome.figure(&name("p95_ms"), value("p95_ms"));
            let times = value("p95_ms") / at(&table, side, first, "p95_ms");
            outcome.figure(&name("times_first"), times);
            outcome.figure(&name("actions_per_s"), value("ops_per_s"));
            outcome.figure(&name("p50_ms"), value("p50_ms"));
            circumstances(&table, side, *factor, &mut outcome);
        }
    }
    for (factor, times) in PAPER {
        outcome.paper(&format!("ballast_times_first_{}", tag(factor)), times);
    }
    let compared = Compared { what: "p95", table: &table, column: "p95_ms", more: false };
    compare(&table, factors, &[compared], &mut outcome);
    let charts = charts(&table);
    Measured { outcome, table, charts }
}

fn charts(table: &Table) -> Vec<Chart> {
    let start = series(table, Side::Ballast, "p95_ms").first().map_or(1.0, |p| p.1);
    let paper = PAPER.map(|(factor, times)| (factor, start * times)).to_vec();
    let mut latency = lines(table, "p95_ms");
    latency.push(Series::new("ESX 6.0, to scale (VTJ 2013)", paper).reference());
    vec![
        Chart {
            title: "Interactive users: 95th percentile of an action".to_owned(),
            x: X.to_owned(),
            y: "ms".to_owned(),
            series: latency,
            ..Chart::default()
        },
        taken(table),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_is_compared_with_the_first_and_with_every_peer() {
        let measured = |ours: f64| {
            let mut t =
                Table::new(&["side", "factor", "ops_per_s", "p95_ms", "used_mib", "budget_mib"]);
            for (side, p95) in [(0.0, ours), (1.0, 80.0), (2.0, 20.0), (3.0, 70.0)] {
                t.push(&[side, 1.0, 15.0, 10.0, 9.0, 9.0]);
                t.push(&[side, 1.87, 15.0, p95, 9.0, 9.0]);
            }
            evaluate(t, &[1.0, 1.87])
        };
        let good = measured(10.6);
        assert!(good.outcome.ok);
        assert_eq!(good.outcome.ratios["ballast_times_first_1_87"], 1.0);
        let bad = measured(30.0).outcome;
        assert!(!bad.ok && !bad.targets["p95_of_zram_1_87"].met);
        assert!(bad.targets["p95_of_swap_1_87"].met);
    }
}
