//! What an experiment or a benchmark hands over: data.csv, figures.json, and one line of JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::stats::round;

/// A figure and what was asked of it.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    /// In words, with the number: "<= 20 s".
    pub want: String,
    pub got: f64,
    pub met: bool,
}

/// The outcome of one experiment or benchmark.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    pub name: String,
    /// All targets met.
    pub ok: bool,
    pub figures: BTreeMap<String, f64>,
    /// The source's values of the same figures.
    pub paper: BTreeMap<String, f64>,
    /// Ours / the source's.
    pub ratios: BTreeMap<String, f64>,
    pub targets: BTreeMap<String, Target>,
}

impl Outcome {
    pub fn new(name: &str) -> Outcome {
        Outcome { name: name.to_owned(), ok: true, ..Outcome::default() }
    }

    pub fn figure(&mut self, name: &str, value: f64) {
        self.figures.insert(name.to_owned(), round(value));
    }

    pub fn paper(&mut self, name: &str, value: f64) {
        self.paper.insert(name.to_owned(), value);
        if let Some(ours) = self.figures.get(name)
            && value != 0.0
        {
            self.ratios.insert(name.to_owned(), round(ours / value));
        }
    }

    pub fn at_most(&mut self, name: &str, got: f64, limit: f64) {
        self.target(name, format!("<= {}", round(limit)), got, got <= limit);
    }

    pub fn at_least(&mut self, name: &str, got: f64, limit: f64) {
        self.target(name, format!(">= {}", round(limit)), got, got >= limit);
    }

    fn target(&mut self, name: &str, want: String, got: f64, met: bool) {
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
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Option<f64>>>,
}

impl Table {
    pub fn new(columns: &[&str]) -> Table {
        Table { columns: columns.iter().map(|c| (*c).to_owned()).collect(), rows: Vec::new() }
    }

    pub fn push(&mut self, row: &[f64]) {
        self.rows.push(row.iter().map(|v| v.is_finite().then_some(*v)).collect());
    }

    /// The cells of a column that are filled, with those of `by` in the same rows.
    pub fn series(&self, by: &str, column: &str) -> Vec<(f64, f64)> {
        let at = |name: &str| self.columns.iter().position(|c| c == name);
        let (Some(x), Some(y)) = (at(by), at(column)) else { return Vec::new() };
        self.rows.iter().filter_map(|r| Some(((*r.get(x)?)?, (*r.get(y)?)?))).collect()
    }

    pub fn to_csv(&self) -> String {
        let mut text = self.columns.join(",") + "\n";
        for row in &self.rows {
            let cells: Vec<String> =
                row.iter().map(|c| c.map_or(String::new(), |v| round(v).to_string())).collect();
            let _ = writeln!(text, "{}", cells.join(","));
        }
        text
    }

    /// Reads what [`Table::to_csv`] wrote; the error names the line.
    pub fn from_csv(text: &str) -> Result<Table, String> {
        let mut lines = text.lines();
        let head = lines.next().filter(|h| !h.is_empty()).ok_or("no header line")?;
        let columns: Vec<String> = head.split(',').map(str::to_owned).collect();
        let mut rows = Vec::new();
        for (n, line) in lines.enumerate() {
            let row: Vec<Option<f64>> = line
                .split(',')
                .map(|cell| match cell {
                    "" => Ok(None),
                    _ => cell
                        .parse()
                        .map(Some)
                        .map_err(|_| format!("line {}: '{cell}' is not a number", n + 2)),
                })
                .collect::<Result<_, _>>()?;
            if row.len() != columns.len() {
                return Err(format!("line {}: {} cells, not {}", n + 2, row.len(), columns.len()));
            }
            rows.push(row);
        }
        Ok(Table { columns, rows })
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
    fn csv_goes_both_ways_and_bad_lines_are_named() {
        let mut t = Table::new(&["t", "v"]);
        t.push(&[1.0, 2.5]);
        t.push(&[2.0, f64::NAN]);
        assert_eq!(t.to_csv(), "t,v\n1,2.5\n2,\n");
        assert_eq!(Table::from_csv(&t.to_csv()), Ok(t.clone()));
        assert_eq!(t.series("t", "v"), [(1.0, 2.5)]);
        assert!(t.series("t", "none").is_empty());
        assert!(Table::from_csv("a,b\n1,x\n").unwrap_err().contains("line 2"));
        assert!(Table::from_csv("a,b\n1,2\n1\n").unwrap_err().contains("line 3"));
        assert!(Table::from_csv("").is_err());
    }
}
