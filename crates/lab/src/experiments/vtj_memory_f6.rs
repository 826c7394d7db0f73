//! VMware Technical Journal, Winter 2013, "Memory Overcommitment in the ESX Server", figure 6: five
//! VMs with a database, while a memory hog takes the host from an overcommitment factor of 0.47 to
//! 2.85. The paper: 25,719 operations per minute at 0.47, 21,365 at 1.66 (by ballooning), 8,647 at 2.85
//! (by swapping).
//!
//! Here the databases are purpose-built keyed stores (`ballast-guest store`), light enough for
//! emulated processors: a table in a file on the guest's disk, larger than what is left of the page
//! cache, read and written by Zipf's law, and sessions in memory; each row and each page is checked
//! on every access. What the hog takes is taken off the budget, step by step, with the guests running
//! on. The same guests then run under plain QEMU with kernel swap, with zram, and with KSM, and under
//! Ballast without balloons. All are asked for more than they can do: what they do is what counts.

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

const NAME: &str = "vtj-memory-f6";
/// Factor, and operations per minute. (At 0.90 and 1.17 the paper gives no numbers in words.)
const PAPER: [(f64, f64); 3] = [(0.47, 25_719.0), (1.66, 21_365.0), (2.85, 8_647.0)];

/// Transactions per second that each guest is asked for: five of them do 2,000 each on two processors with some to spare.
const ASKED: f64 = 4000.0;

fn plan(quick: bool) -> Plan {
    let seconds = Duration::from_secs;
    if quick {
        return Plan {
            guests: (1..=3).map(|n| Load::store(72, 20, ASKED, n)).collect(),
            memory: Bytes::from_mib(192),
            factors: vec![0.9, 1.66, 2.85],
            settle: seconds(8),
            window: seconds(10),
            warm: seconds(3),
        };
    }
    Plan {
        guests: (1..=5).map(|n| Load::store(128, 32, ASKED, n)).collect(),
        memory: Bytes::from_mib(256),
        factors: vec![0.47, 0.9, 1.17, 1.66, 2.85],
        settle: seconds(15),
        window: seconds(20),
        warm: seconds(10),
    }
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let plan = plan(quick);
    let steps = overcommit::run_all(&plan, image).await?;
    Ok(evaluate(table(&steps, "store"), &plan.factors))
}

fn evaluate(table: Table, factors: &[f64]) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let first = factors.first().copied().unwrap_or(f64::NAN);
    for factor in factors {
        for side in SIDES {
            let name = |what: &str| format!("{}_{what}_{}", side.name(), tag(*factor));
            let value = |column: &str| at(&table, side, *factor, column);
            outcome.figure(&name("opm"), value("ops_per_s") * 60.0);
            outcome.figure(
                &name("of_first_percent"),
                100.0 * value("ops_per_s") / at(&table, side, first, "ops_per_s"),
            );
            outcome.figure(&name("p95_ms"), value("p95_ms"));
            circumstances(&table, side, *factor, &mut outcome);
        }
    }
    // The paper's throughput as a part of its own first.
    for (factor, opm) in PAPER {
        let name = format!("ballast_of_first_percent_{}", tag(factor));
        outcome.paper(&name, 100.0 * opm / PAPER[0].1);
    }
    let compared = Compared { what: "throughput", table: &table, column: "ops_per_s", more: true };
    compare(&table, factors, &[compared], &mut outcome);
    let charts = charts(&table);
    Measured { outcome, table, charts }
}

fn charts(table: &Table) -> Vec<Chart> {
    let start = series(table, Side::Ballast, "ops_per_s").first().map_or(1.0, |p| p.1);
    let paper = PAPER.map(|(factor, opm)| (factor, start * opm / PAPER[0].1)).to_vec();
    let mut throughput = lines(table, "ops_per_s");
    throughput.push(Series::new("ESX 6.0, to scale (VTJ 2013)", paper).reference());
    vec![
        Chart {
            title: "Five keyed stores: transactions per second".to_owned(),
            x: X.to_owned(),
            y: "transactions per second".to_owned(),
            series: throughput,
            ..Chart::default()
        },
        Chart {
            title: "95th percentile of a transaction".to_owned(),
            x: X.to_owned(),
            y: "ms".to_owned(),
            series: lines(table, "p95_ms"),
            ..Chart::default()
        },
        taken(table),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(ours: f64) -> Measured {
        let mut t =
            Table::new(&["side", "factor", "ops_per_s", "p95_ms", "used_mib", "budget_mib"]);
        for (side, ops) in [(0.0, ours), (1.0, 60.0), (2.0, 80.0), (3.0, 60.0)] {
            t.push(&[side, 0.47, 100.0, 5.0, 9.0, 9.0]);
            t.push(&[side, 1.66, ops, 9.0, 9.0, 9.0]);
        }
        evaluate(t, &[0.47, 1.66])
    }

    #[test]
    fn throughput_is_compared_with_the_paper_and_with_every_peer() {
        let m = measured(83.0);
        assert!(m.outcome.ok);
        assert_eq!(m.outcome.figures["ballast_of_first_percent_1_66"], 83.0);
        assert!((m.outcome.ratios["ballast_of_first_percent_1_66"] - 1.0).abs() < 0.01);
        assert!(!m.outcome.ratios.contains_key("ballast_of_first_percent_2_85"));
        assert!(!measured(79.0).outcome.ok);
    }
}
