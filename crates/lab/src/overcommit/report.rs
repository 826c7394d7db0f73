//! Steps as a table, and as lines over the factor.

use super::{PEERS, SIDES, Side, Step};
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};

/// Above it, Ballast is to be ahead of every peer.
pub const AHEAD_FROM: f64 = 1.5;

/// What charts are drawn over.
pub const X: &str = "overcommitment factor";

const COLUMNS: [&str; 21] = [
    "side",
    "factor",
    "budget_mib",
    "served_percent",
    "ops_per_s",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "ballooned_mib",
    "compressed_mib",
    "swapped_mib",
    "shared_mib",
    "used_mib",
    "cpu_percent",
    "killed",
    "read_mib_per_s",
    "stolen_percent",
    "speed_steps_per_us",
    "at_hand_mib",
    "returns_per_s",
    "back_per_s",
];

/// One row a step; operations and latencies are those of `work`.
pub fn table(steps: &[Step], work: &str) -> Table {
    let mut table = Table::new(&COLUMNS);
    for step in steps {
        let (latency, r) = (step.tally.latency(work), &step.reclaimed);
        table.push(&[
            step.side.number(),
            step.factor,
            step.budget.mib(),
            step.tally.served_percent(),
            step.tally.rate(work),
            latency.quantile_ms(0.5),
            latency.quantile_ms(0.95),
            latency.quantile_ms(0.99),
            r.ballooned.mib(),
            r.compressed.mib(),
            r.swapped.mib(),
            r.saved.mib(),
            r.used.mib(),
            step.cpu_percent,
            f64::from(u8::from(step.killed)),
            step.reads.mib(),
            step.speed.stolen_percent,
            step.speed.steps_per_us,
            r.at_hand.mib(),
            step.returns,
            step.back,
        ]);
    }
    table
}

/// A column of one side over the factor.
pub fn series(table: &Table, side: Side, column: &str) -> Vec<(f64, f64)> {
    let own = Table {
        columns: table.columns.clone(),
        rows: table.rows.iter().filter(|r| r[0] == Some(side.number())).cloned().collect(),
    };
    own.series("factor", column)
}

/// A column's value of one side at a factor; NaN if it was not measured.
pub fn at(table: &Table, side: Side, factor: f64, column: &str) -> f64 {
    series(table, side, column).iter().find(|p| p.0 == factor).map_or(f64::NAN, |p| p.1)
}

/// One line for each side that was measured.
pub fn lines(table: &Table, column: &str) -> Vec<Series> {
    SIDES
        .iter()
        .map(|side| Series::new(side.title(), series(table, *side, column)))
        .filter(|s| !s.points.is_empty())
        .collect()
}

/// Where Ballast took memory, over the factor.
pub fn taken(table: &Table) -> Chart {
    let own = |label: &str, column: &str| Series::new(label, series(table, Side::Ballast, column));
    Chart {
        title: "Ballast: where memory was taken".to_owned(),
        x: X.to_owned(),
        y: "memory (MiB)".to_owned(),
        series: vec![
            own("ballooned", "ballooned_mib"),
            own("compressed", "compressed_mib"),
            own("swapped", "swapped_mib"),
            own("saved by sharing", "shared_mib"),
        ],
        ..Chart::default()
    }
}

/// The factors above which Ballast is to be ahead.
pub fn crowded(factors: &[f64]) -> impl Iterator<Item = f64> {
    factors.iter().copied().filter(|f| *f > AHEAD_FROM)
}

/// Peers whose guests lived at this factor; of the others, a figure says that they did not.
pub fn living(table: &Table, factor: f64, outcome: &mut Outcome) -> Vec<Side> {
    let (dead, living): (Vec<Side>, Vec<Side>) =
        PEERS.iter().partition(|peer| at(table, **peer, factor, "killed") == 1.0);
    for peer in dead {
        outcome.figure(&format!("{}_killed_{}", peer.name(), tag(factor)), 1.0);
    }
    living
}

/// A factor in a figure's name: 1.66 is "1_66".
pub fn tag(factor: f64) -> String {
    format!("{factor:.2}").replace('.', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_picked_by_side_and_factor() {
        let mut table = Table::new(&COLUMNS);
        for (side, factor, ops) in [(0.0, 1.0, 10.0), (0.0, 2.0, 8.0), (2.0, 2.0, 4.0)] {
            let mut row = [0.0; 20];
            (row[0], row[1], row[4]) = (side, factor, ops);
            table.push(&row);
        }
        assert_eq!(series(&table, Side::Ballast, "ops_per_s"), [(1.0, 10.0), (2.0, 8.0)]);
        assert_eq!(at(&table, Side::Zram, 2.0, "ops_per_s"), 4.0);
        assert!(at(&table, Side::Ksm, 2.0, "ops_per_s").is_nan());
        assert_eq!(lines(&table, "ops_per_s").len(), 2);
        assert_eq!(crowded(&[0.5, 1.5, 1.66]).collect::<Vec<_>>(), [1.66]);
        assert_eq!(tag(1.66), "1_66");
    }

    #[test]
    fn a_peer_that_killed_its_guests_is_no_measure() {
        let mut table = Table::new(&COLUMNS);
        let mut row = [0.0; 20];
        (row[0], row[1], row[14]) = (Side::Zram.number(), 2.0, 1.0);
        table.push(&row);
        let mut outcome = Outcome::new("x");
        assert_eq!(living(&table, 2.0, &mut outcome), [Side::Swap, Side::Ksm]);
        assert_eq!(outcome.figures["zram_killed_2_00"], 1.0);
    }
}
