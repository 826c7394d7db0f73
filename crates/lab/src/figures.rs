//! What an experiment or a benchmark hands over: data.csv, figures.json, and one line of JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::results;
use crate::stats::round;

/// A figure and what was asked of it.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// In words, with the number: "<= 20 s".
    pub want: String,
    /// What was measured; in JSON it is left out where that is no number.
    #[serde(skip_serializing_if = "is_no_number")]
    pub got: f64,
    /// False, too, of what could not be measured, and of what was held against nothing (infinite).
    pub met: bool,
}

fn is_no_number(value: &f64) -> bool {
    !value.is_finite()
}

/// The outcome of one experiment or benchmark.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Of the experiment or benchmark.
    pub name: String,
    /// All targets met.
    pub ok: bool,
    /// Smaller, and fewer rounds: to see that it works.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub quick: bool,
    /// When it was measured (UTC), and on what.
    pub date: String,
    /// See [`results::machine`].
    pub machine: String,
    /// By name; three decimals.
    pub figures: BTreeMap<String, f64>,
    /// The source's values of the same figures.
    pub paper: BTreeMap<String, f64>,
    /// Ours / the source's.
    pub ratios: BTreeMap<String, f64>,
    /// By name.
    pub targets: BTreeMap<String, Target>,
}

impl Outcome {
    /// Nothing measured, all targets met.
    pub fn new(name: &str) -> Outcome {
        Outcome {
            name: name.to_owned(),
            ok: true,
            date: results::today(),
            machine: results::machine(),
            ..Outcome::default()
        }
    }

    /// Adds one; NaN (null in JSON) if it could not be measured. One that is infinite was held against
    /// nothing: it is left out.
    pub fn figure(&mut self, name: &str, value: f64) {
        if !value.is_infinite() {
            self.figures.insert(name.to_owned(), round(value));
        }
    }

    /// The source's value of a figure that was added before.
    pub fn paper(&mut self, name: &str, value: f64) {
        self.paper.insert(name.to_owned(), value);
        let ratio = self.figures.get(name).map(|ours| ours / value);
        if let Some(ratio) = ratio.filter(|ratio| ratio.is_finite()) {
            self.ratios.insert(name.to_owned(), round(ratio));
        }
    }

    /// A target. What is NaN or infinite does not meet it.
    pub fn at_most(&mut self, name: &str, got: f64, limit: f64) {
        self.target(name, format!("<= {}", round(limit)), got, got <= limit);
    }

    /// A target. What is NaN or infinite does not meet it.
    pub fn at_least(&mut self, name: &str, got: f64, limit: f64) {
        self.target(name, format!(">= {}", round(limit)), got, got >= limit);
    }

    fn target(&mut self, name: &str, want: String, got: f64, met: bool) {
        let met = met && got.is_finite();
        self.ok &= met;
        self.targets.insert(name.to_owned(), Target { want, got: round(got), met });
    }

    /// The line that ends the output.
    pub fn line(&self) -> Result<String> {
        serde_json::to_string(self).context("the outcome as JSON")
    }
}

/// A table of numbers with names; a cell may be empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Their names; none has a comma.
    pub columns: Vec<String>,
    /// A cell for each column; None: empty.
    pub rows: Vec<Vec<Option<f64>>>,
}

impl Table {
    /// Without rows.
    pub fn new(columns: &[&str]) -> Table {
        Table { columns: columns.iter().map(|c| (*c).to_owned()).collect(), rows: Vec::new() }
    }

    /// A cell for each column, or this panics; one that is not finite is empty.
    pub fn push(&mut self, row: &[f64]) {
        assert_eq!(row.len(), self.columns.len(), "a cell for each column");
        self.rows.push(row.iter().map(|v| v.is_finite().then_some(*v)).collect());
    }

    /// The cells of a column that are filled, with those of `by` in the same rows.
    pub fn series(&self, by: &str, column: &str) -> Vec<(f64, f64)> {
        let at = |name: &str| self.columns.iter().position(|c| c == name);
        let (Some(x), Some(y)) = (at(by), at(column)) else { return Vec::new() };
        self.rows.iter().filter_map(|r| Some(((*r.get(x)?)?, (*r.get(y)?)?))).collect()
    }

    /// With a header; three decimals.
    pub fn to_csv(&self) -> String {
        let mut text = self.columns.join(",") + "\n";
        for row in &self.rows {
            let cells: Vec<String> =
                row.iter().map(|c| c.map_or(String::new(), |v| round(v).to_string())).collect();
            let _ = writeln!(text, "{}", cells.join(","));
        }
        text
    }
}

/// The folder `experiments/NAME` of the checkout in which the program runs, else of the current
/// folder; or `given`.
pub fn folder(name: &str, given: Option<&Path>) -> Result<PathBuf> {
    let base = match given {
        Some(dir) => dir.to_owned(),
        None => Path::new("experiments").join(name),
    };
    std::fs::create_dir_all(&base).with_context(|| base.display().to_string())?;
    Ok(base)
}

/// Writes data.csv, figures.json and plot.svg.
pub fn write(dir: &Path, table: &Table, outcome: &Outcome, svg: &str) -> Result<()> {
    let json = serde_json::to_string_pretty(outcome).context("the outcome as JSON")? + "\n";
    for (name, text) in
        [("data.csv", table.to_csv()), ("figures.json", json), ("plot.svg", svg.to_owned())]
    {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_ok_when_all_its_targets_are_met() {
        let mut o = Outcome::new("x");
        o.figure("a", 2.0);
        o.paper("a", 4.0);
        o.at_most("a", 2.0, 3.0);
        assert!(o.ok);
        assert_eq!(o.ratios["a"], 0.5);
        o.at_least("b", f64::NAN, 0.0);
        assert!(!o.ok, "what could not be measured is not met");
        let line = o.line().unwrap();
        assert!(!line.contains('\n'));
        let back: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(back["targets"]["a"]["want"], "<= 3");
    }

    #[test]
    fn what_is_held_against_nothing_is_not_met_and_no_null() {
        let mut o = Outcome::new("x");
        o.figure("a", f64::INFINITY);
        o.paper("a", 4.0);
        o.figure("b", 2.0);
        o.paper("b", 0.0);
        o.at_least("c", f64::INFINITY, 1.0);
        o.at_most("d", f64::NEG_INFINITY, 1.0);
        o.at_least("e", f64::NAN, 1.0);
        assert!(!o.ok && o.targets.values().all(|t| !t.met));
        assert!(o.ratios.is_empty() && !o.figures.contains_key("a"));
        assert!(!o.line().unwrap().contains("null"), "{}", o.line().unwrap());
        // What could not be measured is, as a figure.
        o.figure("f", f64::NAN);
        assert!(o.line().unwrap().contains("\"f\":null"), "{}", o.line().unwrap());
    }

    #[test]
    fn a_cell_that_is_no_number_is_empty() {
        let mut t = Table::new(&["t", "v"]);
        t.push(&[1.0, 2.5]);
        t.push(&[2.0, f64::NAN]);
        assert_eq!(t.to_csv(), "t,v\n1,2.5\n2,\n");

        assert_eq!(t.series("t", "v"), [(1.0, 2.5)]);
        assert!(t.series("t", "none").is_empty());
    }
}
