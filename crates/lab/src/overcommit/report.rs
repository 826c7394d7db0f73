//! Steps as a table, and as lines over the factor.

use super::{Lost, PEERS, SIDES, Side, Step};
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};

/// Above it, Ballast is to be ahead of every peer.
const AHEAD_FROM: f64 = 1.5;

/// What charts are drawn over.
pub const X: &str = "overcommitment factor";

/// A side that used more of its budget than this was measured on other terms.
const MOST_USED: f64 = 1.02;
/// With fewer peers that were measured within their budgets, Ballast was held against next to nothing.
const LEAST_COMPARED: f64 = 2.0;

const COLUMNS: [&str; 26] = [
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
    "lost",
    "read_mib_per_s",
    "stolen_percent",
    "speed_steps_per_us",
    "at_hand_mib",
    "returns_per_s",
    "back_per_s",
    "swap_cache_mib",
    "vmms_mib",
    "window_s",
    "lab_cpu_percent",
    "awake_percent",
];

/// What a step's figures are to be judged by.
const CIRCUMSTANCES: [&str; 15] = [
    "budget_mib",
    "used_mib",
    "shared_mib",
    "at_hand_mib",
    "swap_cache_mib",
    "vmms_mib",
    "read_mib_per_s",
    "returns_per_s",
    "back_per_s",
    "cpu_percent",
    "stolen_percent",
    "speed_steps_per_us",
    "window_s",
    "lab_cpu_percent",
    "awake_percent",
];

/// One row a step; operations and latencies are those of `work`.
pub fn table(steps: &[Step], work: &str) -> Table {
    let mut table = Table::new(&COLUMNS);
    for step in steps {
        let (latency, r) = (step.tally.latency(work), &step.reclaimed);
        let mut row = [
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
            step.lost.map_or(0.0, Lost::number),
            step.reads.mib(),
            step.speed.stolen_percent,
            step.speed.steps_per_us,
            r.at_hand.mib(),
            step.returns,
            step.back,
            r.passing.mib(),
            r.vmms.mib(),
            step.tally.seconds,
            step.lab_cpu_percent,
            step.awake_percent,
        ];
        if step.lost.is_some() {
            for (name, cell) in COLUMNS.iter().zip(&mut row) {
                if !["side", "factor", "budget_mib", "lost"].contains(name) {
                    *cell = f64::NAN;
                }
            }
        }
        table.push(&row);
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

/// Adds what a side's figures at a factor are to be judged by: memory, paging, CPU, and the length of the window.
pub fn circumstances(table: &Table, side: Side, factor: f64, outcome: &mut Outcome) {
    for column in CIRCUMSTANCES {
        let name = format!("{}_{column}_{}", side.name(), tag(factor));
        outcome.figure(&name, at(table, side, factor, column));
    }
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

/// What is held against what peers do: a column of a table.
pub struct Compared<'a> {
    /// In a figure's name: "store_p95".
    pub what: &'a str,
    /// With what every side did.
    pub table: &'a Table,
    /// Of it.
    pub column: &'a str,
    /// More of it is better.
    pub more: bool,
}

/// Ballast's side as parts of each peer's: as good at least, where it is to be ahead and the peer is one to be held against; of
/// the others, a figure says what was. `table` has what both took.
pub fn compare(table: &Table, factors: &[f64], all: &[Compared], outcome: &mut Outcome) {
    for &factor in factors {
        let fair = if factor > AHEAD_FROM { peers(table, factor, outcome) } else { Vec::new() };
        for peer in PEERS {
            let is_fair = fair.contains(&peer);
            if is_fair {
                costs(table, factor, peer, outcome);
            }
            for Compared { what, table, column, more } in all {
                let of = |side| at(table, side, factor, column);
                let ratio = of(Side::Ballast) / of(peer);
                let name = format!("{what}_of_{}_{}", peer.name(), tag(factor));
                match (is_fair, more) {
                    (true, true) => outcome.at_least(&name, ratio, 1.0),
                    (true, false) => outcome.at_most(&name, ratio, 1.0),
                    (false, _) if ratio.is_finite() => outcome.figure(&name, ratio),
                    (false, _) => {}
                }
            }
        }
    }
}

/// Peers to be held against at this factor: their guests lived, within the budget, or with no more machine memory than Ballast takes, VMMs'
/// own included; of the others, a figure says what was. Ballast is to be within the budget, too. That there are enough of them that were measured is a target of its own.
fn peers(table: &Table, factor: f64, outcome: &mut Outcome) -> Vec<Side> {
    let of_budget =
        |side| at(table, side, factor, "used_mib") / at(table, side, factor, "budget_mib");
    let name = |side: Side, what: &str| format!("{}_{what}_{}", side.name(), tag(factor));
    outcome.at_most(&name(Side::Ballast, "used_of_budget"), of_budget(Side::Ballast), MOST_USED);
    let is_fair = |peer: &Side| {
        let lost = at(table, *peer, factor, "lost");
        let how = [Lost::Killed, Lost::Thrashing, Lost::NotRun];
        if let Some(how) = how.into_iter().find(|how| how.number() == lost) {
            outcome.figure(&name(*peer, how.name()), 1.0);
            return false;
        }
        let used = of_budget(*peer);
        outcome.figure(&name(*peer, "used_of_budget"), used);
        let more = machine(table, *peer, factor) / machine(table, Side::Ballast, factor);
        // Not so if that is not known.
        used.is_nan() || used <= MOST_USED || more <= MOST_USED
    };
    let fair: Vec<Side> = PEERS.into_iter().filter(is_fair).collect();
    let compared = fair.iter().filter(|peer| of_budget(**peer).is_finite()).count();
    let name = format!("peers_compared_{}", tag(factor));
    outcome.at_least(&name, compared as f64, LEAST_COMPARED);
    fair
}

/// What Ballast's side took, as parts of what a peer's did: processor time of guests and of whoever manages their memory, and
/// machine memory, that of VMMs beside the budget included. Nothing is asked of them.
fn costs(table: &Table, factor: f64, peer: Side, outcome: &mut Outcome) {
    let of = |side, column| at(table, side, factor, column);
    let name = |what: &str| format!("{what}_of_{}_{}", peer.name(), tag(factor));
    let (cpu, peers) = (of(Side::Ballast, "cpu_percent"), of(peer, "cpu_percent"));
    outcome.figure(&name("cpu"), cpu / peers);
    // Idle processors that are kept awake for guests that wait may poll all that time: no peer has them do so.
    let awake = of(Side::Ballast, "awake_percent");
    outcome.figure(&name("cpu_and_awake"), (cpu + awake).min(100.0) / peers);
    let machine = |side| machine(table, side, factor);
    outcome.figure(&name("machine_memory"), machine(Side::Ballast) / machine(peer));
}

/// What guests and their VMMs have of the host, MiB.
fn machine(table: &Table, side: Side, factor: f64) -> f64 {
    at(table, side, factor, "used_mib") + at(table, side, factor, "vmms_mib")
}

/// A factor in a figure's name: 1.66 is "1_66".
pub fn tag(factor: f64) -> String {
    format!("{factor:.2}").replace('.', "_")
}

#[cfg(test)]
mod tests {
    use ballast_units::Bytes;

    use super::*;

    #[test]
    fn columns_are_picked_by_side_and_factor() {
        let mut table = Table::new(&COLUMNS);
        for (side, factor, ops) in [(0.0, 1.0, 10.0), (0.0, 2.0, 8.0), (2.0, 2.0, 4.0)] {
            let mut row = [0.0; COLUMNS.len()];
            (row[0], row[1], row[4]) = (side, factor, ops);
            table.push(&row);
        }
        assert_eq!(series(&table, Side::Ballast, "ops_per_s"), [(1.0, 10.0), (2.0, 8.0)]);
        assert_eq!(at(&table, Side::Zram, 2.0, "ops_per_s"), 4.0);
        assert!(at(&table, Side::Ksm, 2.0, "ops_per_s").is_nan());
        assert_eq!(lines(&table, "ops_per_s").len(), 2);
        assert_eq!(tag(1.66), "1_66");
        let mut outcome = Outcome::new("x");
        circumstances(&table, Side::Zram, 2.0, &mut outcome);
        assert_eq!(outcome.figures.len(), CIRCUMSTANCES.len());
        // All of them are columns.
        assert!(outcome.figures.values().all(|v| *v == 0.0), "{:?}", outcome.figures);
        assert!(outcome.figures.contains_key("zram_window_s_2_00"));
    }

    #[test]
    fn a_peer_that_lost_its_guests_or_is_over_its_budget_is_no_measure() {
        let mut table = Table::new(&COLUMNS);
        let mut push = |side: Side, factor, used, lost| {
            let mut row = [0.0; COLUMNS.len()];
            (row[0], row[1], row[2], row[12]) = (side.number(), factor, 500.0, used);
            // VMMs' own, which at one factor zram has less of.
            row[22] =
                if factor < 3.0 { 0.0 } else { 200.0 - 120.0 * f64::from(side == Side::Zram) };
            row[14] = lost;
            table.push(&row);
        };
        push(Side::Ballast, 3.0, 495.0, 0.0);
        push(Side::Zram, 3.0, 620.0, 0.0);
        push(Side::Ballast, 2.0, 495.0, 0.0);
        push(Side::Ballast, 2.5, 511.0, 0.0);
        push(Side::Swap, 2.0, 500.0, 0.0);
        push(Side::Zram, 2.0, 511.0, 0.0);
        push(Side::Ksm, 2.0, 509.0, 0.0);
        push(Side::Ksm, 2.5, 500.0, 0.0);
        push(Side::Zram, 2.5, f64::NAN, Lost::Thrashing.number());
        let mut outcome = Outcome::new("x");
        assert_eq!(peers(&table, 2.0, &mut outcome), [Side::Swap, Side::Ksm]);
        assert_eq!(outcome.figures["zram_used_of_budget_2_00"], 1.022);
        assert!(outcome.ok && outcome.targets["peers_compared_2_00"].got == 2.0);
        // With no more of the host than Ballast it is one all the same.
        assert!(peers(&table, 3.0, &mut outcome).contains(&Side::Zram));
        // Swap was not measured there: nobody knows that it was over its budget, but it is none of two.
        assert_eq!(peers(&table, 2.5, &mut outcome), [Side::Swap, Side::Ksm]);
        assert_eq!(outcome.figures["zram_thrashing_2_50"], 1.0);
        assert!(!outcome.targets["ballast_used_of_budget_2_50"].met);
        assert!(!outcome.targets["peers_compared_2_50"].met);
    }

    #[test]
    fn what_it_took_is_told_beside_what_was_gained() {
        let mut table =
            Table::new(&["side", "factor", "used_mib", "vmms_mib", "cpu_percent", "budget_mib"]);
        table.push(&[Side::Ballast.number(), 2.0, 400.0, 200.0, 15.0, 400.0]);
        table.push(&[Side::Swap.number(), 2.0, 390.0, 10.0, 10.0, 400.0]);
        let mut outcome = Outcome::new("x");
        costs(&table, 2.0, Side::Swap, &mut outcome);
        assert_eq!(outcome.figures["cpu_of_swap_2_00"], 1.5);
        assert_eq!(outcome.figures["machine_memory_of_swap_2_00"], 1.5);
        assert!(outcome.targets.is_empty());
    }

    #[test]
    fn of_a_side_that_was_lost_there_is_nothing_but_that() {
        let step = Step {
            side: Side::Zram,
            factor: 2.0,
            budget: Bytes::from_mib(500),
            tally: crate::overcommit::Tally::new(&[]),
            reclaimed: crate::overcommit::Reclaimed::default(),
            cpu_percent: f64::NAN,
            lab_cpu_percent: f64::NAN,
            awake_percent: f64::NAN,
            reads: Bytes::default(),
            returns: f64::NAN,
            back: f64::NAN,
            speed: crate::overcommit::yardstick::Speed::default(),
            lost: Some(Lost::Killed),
        };
        let table = table(&[step], "store");
        let cells: Vec<f64> = table.rows[0].iter().flatten().copied().collect();
        assert_eq!(cells, [2.0, 2.0, 500.0, 1.0]);
        assert_eq!(table.rows[0].len(), COLUMNS.len());
    }
}
