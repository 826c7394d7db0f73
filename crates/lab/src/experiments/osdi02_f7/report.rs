//! What the rows of both runs say, beside the paper's figures.

use super::watch::COLUMNS;
use super::{FOR_VMS, Figure, Load, NAME, Phase, TAX};
use crate::chart::{Chart, Series};
use crate::experiments::Measured;
use crate::figures::{Outcome, Table};
use crate::stats::mean;

/// The paper's: what each VM has without the tax, MB, and what VM2 gains by it.
const PAPER_MB: f64 = 179.0;
const PAPER_GAIN_PERCENT: f64 = 30.0;
/// The first part of a phase, in which memory moves.
const MOVING: f64 = 0.4;

/// One load's phases, by number.
struct Run<'a> {
    table: &'a Table,
    load: usize,
    phases: &'a [Phase],
}

impl Run<'_> {
    fn points(&self, column: &str, wanted: impl Fn(usize, f64) -> bool) -> Vec<(f64, f64)> {
        let place = COLUMNS.iter().position(|c| *c == column);
        let cell = |row: &[Option<f64>], at: usize| row.get(at).copied().flatten();
        let rows = self.table.rows.iter().filter(|r| cell(r, 0) == Some(self.load as f64));
        rows.filter_map(|r| {
            let (phase, t) = (cell(r, 1)? as usize, cell(r, 2)?);
            wanted(phase, t).then_some((t, cell(r, place?)?))
        })
        .collect()
    }

    fn series(&self, column: &str) -> Vec<(f64, f64)> {
        self.points(column, |_, _| true)
    }

    /// Mean of a phase, without its beginning.
    fn late(&self, number: usize, column: &str) -> f64 {
        let begin: u64 = self.phases[..number].iter().map(|p| p.seconds).sum();
        let from = begin as f64 + self.phases[number].seconds as f64 * MOVING;
        let points = self.points(column, |phase, t| phase == number && t > from);
        mean(&points.iter().map(|p| p.1).collect::<Vec<_>>())
    }
}

fn name(phase: &Phase) -> Option<String> {
    Some(match phase.figure? {
        Figure::Untaxed => "untaxed".to_owned(),
        Figure::Taxed => "taxed".to_owned(),
        Figure::Alternative => phase.kind.name().replace('-', "_"),
    })
}

pub fn evaluate(table: Table, runs: &[(Load, Vec<Phase>)]) -> Measured {
    let mut outcome = Outcome::new(NAME);
    let mut charts = Vec::new();
    for (number, (load, phases)) in runs.iter().enumerate() {
        let run = Run { table: &table, load: number, phases };
        figures(&mut outcome, &run, load.name());
        charts.extend(charts_of(&run, load.name()));
    }
    Measured { outcome, table, charts }
}

fn figures(outcome: &mut Outcome, run: &Run, load: &str) {
    let untaxed = run.late(0, "mb_per_s");
    for (number, phase) in run.phases.iter().enumerate() {
        let Some(name) = name(phase) else { continue };
        for column in ["idle_mib", "busy_mib", "idle_target_mib", "busy_target_mib"] {
            let figure = column.replace("_mib", &format!("_{name}_mib"));
            outcome.figure(&format!("{load}_{figure}"), run.late(number, column));
        }
        let rate = run.late(number, "mb_per_s");
        outcome.figure(&format!("{load}_{name}_mb_per_s"), rate);
        if phase.figure != Some(Figure::Untaxed) {
            let gain = 100.0 * (rate / untaxed - 1.0);
            let figure = match phase.figure {
                Some(Figure::Taxed) => format!("{load}_gain_percent"),
                _ => format!("{load}_gain_{name}_percent"),
            };
            outcome.figure(&figure, gain);
            if phase.figure == Some(Figure::Taxed) {
                outcome.paper(&figure, PAPER_GAIN_PERCENT);
                outcome.at_least(&figure, gain, PAPER_GAIN_PERCENT);
            }
        }
    }
    for vm in ["idle", "busy"] {
        // The paper's MB are taken for MiB.
        outcome.paper(&format!("{load}_{vm}_untaxed_mib"), PAPER_MB);
        let error = run.late(0, &format!("{vm}_mib")) - FOR_VMS.mib() / 2.0;
        outcome.at_most(&format!("{load}_{vm}_untaxed_from_half_mib"), error.abs(), 8.0);
    }
    let moved = run.late(1, "busy_mib") - run.late(0, "busy_mib");
    outcome.at_least(&format!("{load}_moved_mib"), moved, 30.0);
}

fn charts_of(run: &Run, load: &str) -> [Chart; 2] {
    let line = |label: &str, column: &str| Series::new(label, run.series(column));
    let mut at = 0;
    let told: String = run
        .phases
        .iter()
        .filter_map(|phase| {
            let from = at;
            at += phase.seconds;
            let other = phase.figure == Some(Figure::Alternative);
            other.then(|| format!("; {} from {from} s", phase.kind))
        })
        .collect();
    let first = run.phases.first().map_or(0, |p| p.seconds) as f64;
    let taxed = run.phases.iter().scan(0, |from, phase| {
        *from += phase.seconds;
        let level = if phase.tax == TAX { TAX * 100.0 } else { 0.0 };
        Some([((*from - phase.seconds) as f64, level), (*from as f64, level)])
    });
    [
        Chart {
            title: format!("VM1 idle, {load} in VM2{told}"),
            x: "time (s)".to_owned(),
            y: "memory (MiB)".to_owned(),
            series: vec![
                line("VM1 (idle): allocation", "idle_mib"),
                line(&format!("VM2 ({load}): allocation"), "busy_mib"),
                line("VM1: estimated active", "idle_active_mib"),
                line("VM2: estimated active", "busy_active_mib"),
                Series::new(
                    "OSDI'02: 179 MB each, untaxed",
                    vec![(0.0, PAPER_MB), (first, PAPER_MB)],
                )
                .reference(),
            ],
            ..Chart::default()
        },
        Chart {
            title: format!("{load} in VM2"),
            x: "time (s)".to_owned(),
            y: "MB/s".to_owned(),
            y_right: Some("tax (%)".to_owned()),
            series: vec![
                line("throughput", "mb_per_s"),
                Series::new("tax", taxed.flatten().collect()).right(),
            ],
            ..Chart::default()
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::Times;
    use super::*;
    use ballast_policy::policies::PolicyKind;

    const TIMES: Times = Times { before: 100, after: 100, back: 50, alternative: 100 };

    /// Both have half, then `moved` MiB go to the busy one, which gets `gain` more done.
    fn measured(moved: f64, gain: f64) -> Measured {
        let phases = TIMES.phases(&[PolicyKind::GraduatedTax]);
        let mut t = Table::new(&COLUMNS);
        let mut second = 0.0;
        for (number, phase) in phases.iter().enumerate() {
            for s in 0..phase.seconds {
                second += 1.0;
                let taxed = phase.tax > 0.0;
                let shift = if taxed && s > 10 { moved } else { 0.0 };
                let rate = if shift > 0.0 { 10.0 * gain } else { 10.0 };
                let rate = if s % 10 == 0 { rate } else { f64::NAN };
                let (idle, busy) = (180.0 - shift, 180.0 + shift);
                let (n, p) = (number as f64, phase.tax);
                t.push(&[0.0, n, second, p, idle, busy, idle, busy, 5.0, 150.0, rate]);
            }
        }
        evaluate(t, &[(Load::Files, phases)])
    }

    #[test]
    fn what_moved_and_what_it_brought_is_read_from_the_end_of_each_phase() {
        let m = measured(60.0, 1.35);
        let good = m.outcome;
        assert!(good.ok, "{:?}", good.targets);
        assert_eq!(good.figures["files_busy_taxed_mib"], 240.0);
        assert!((good.figures["files_gain_percent"] - 35.0).abs() < 0.01);
        assert!((good.figures["files_gain_graduated_tax_percent"] - 35.0).abs() < 0.01);
        assert_eq!(m.charts.len(), 2);
        assert!(!measured(60.0, 1.1).outcome.ok);
        assert!(!measured(5.0, 1.35).outcome.ok);
    }
}
