//! The capacity planner: recorded history of hosts in, how far their memory can be overcommitted at a
//! stated risk out. docs/planner.md says what is assumed and what the figures mean.
//!
//! | module | question |
//! | --- | --- |
//! | [`history`] | what did each VM need, slice of time by slice? |
//! | [`series`] | how many independent looks is that? blocks to draw again |
//! | [`curve`] | with the same VMs on less memory, how often would it have been short? |
//! | [`fit`] | how many VMs like these fit into the host's memory? |
//! | [`plan()`] | all of that for some hosts |
//! | [`output`] | as text, CSV, and a plot |
//!
//! Nothing here draws a random number that its seed does not determine.

#![warn(missing_docs)]

pub mod curve;
pub mod fit;
pub mod history;
pub mod output;
pub mod series;

use std::path::PathBuf;

use ballast_journal::Trouble;
use ballast_journal::segment::SegmentError;
use serde::Serialize;

pub use curve::{Curve, Point};
pub use fit::Fit;
pub use history::{Demand, History, Slot, Span};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PlanError {
    #[error("journal {0}")]
    Journal(#[from] Trouble),
    #[error("journal {}: {what}", .path.display())]
    Segment { path: PathBuf, what: SegmentError },
    #[error("journal {}: no VM ran in the time that was asked for{}", .path.display(), not_read(.notes))]
    Empty { path: PathBuf, notes: Vec<String> },
    #[error("journal {}: {what}: longer slices (--slot) or less time (--since, --until) do", .path.display())]
    Large { path: PathBuf, what: String },
    #[error("journals {} and {} were recorded by one run of one manager: each host counts once", .a.display(), .b.display())]
    Twice { a: PathBuf, b: PathBuf },
    #[error("plot: {0}")]
    Plot(String),
}

fn not_read(notes: &[String]) -> String {
    notes.iter().map(|note| format!("; not read: {note}")).collect()
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Question {
    /// The part of the time in which memory may be short, above 0 and below 1.
    pub risk: f64,
    /// Of the bands, above 0 and below 1.
    pub confidence: f64,
    /// Of the random draws.
    pub seed: u64,
}

/// What one host's history says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostPlan {
    /// What was recorded.
    pub facts: history::Facts,
    /// Factor over risk.
    pub curve: Curve,
    /// How many VMs like these fit.
    pub fit: Fit,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// What was asked.
    pub question: Question,
    /// The answer for each host.
    pub hosts: Vec<HostPlan>,
    /// Of all hosts as one record, where there are several.
    pub together: Option<Curve>,
}

/// Reads the record of each host.
///
/// # Errors
/// As of [`History::read`]; two of them are of one host at one time.
pub fn read_all(journals: &[PathBuf], span: Span) -> Result<Vec<History>, PlanError> {
    let mut histories: Vec<History> = Vec::new();
    for journal in journals {
        let history = History::read(journal, span)?;
        for (other, before) in journals.iter().zip(&histories) {
            if !before.runs.is_disjoint(&history.runs) {
                return Err(PlanError::Twice { a: other.clone(), b: journal.clone() });
            }
        }
        histories.push(history);
    }
    Ok(histories)
}

/// Plans from the histories of hosts, at least one; each has a slot with VMs, and a factor above 0 in every slot.
pub fn plan(question: Question, histories: &[History]) -> Plan {
    let hosts = histories
        .iter()
        .map(|history| HostPlan {
            facts: history.facts(),
            curve: curve::curve(&question, std::slice::from_ref(history)),
            fit: fit::fit(&question, history),
        })
        .collect();
    let together = (histories.len() > 1).then(|| curve::curve(&question, histories));
    Plan { question, hosts, together }
}
