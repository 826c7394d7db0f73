//! The journal of decisions: every turn of the policy loop with its inputs, the rule that decided, the
//! outcome, and the time it took to come true. docs/journal.md is for its users,
//! docs/adr/0017-decision-journal.md says why it is as it is.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`turn`] | what is recorded: a [`Turn`] is one decision with its moment and its outcomes |
//! | [`outcome`] | follows what was asked until it has come true |
//! | [`segment`] | the format of a file: header, frames, one compressed stream |
//! | [`store`] | where files are: the seam to the disk |
//! | [`recorder`] | turns to files within the bound, without threads |
//! | [`journal`] | the handle that the policy loop has, and the thread behind it |
//! | [`reader`] | turns back from files |
//! | [`changes`] | what is different from the turn before, in words |
//! | [`tell`] | why a VM had what it had at some time, in words |
//! | `date` | moments, for people |
//! | [`replay`](mod@replay) | the same inputs give the same decisions, bit for bit |
//! | [`trace`](mod@trace) | what each VM used, as loads for the simulator |

#![warn(missing_docs)]

pub mod changes;
mod date;
pub mod journal;
pub mod outcome;
pub mod reader;
pub mod recorder;
pub mod replay;
pub mod segment;
pub mod store;
pub mod tell;
pub mod trace;
pub mod turn;

pub use date::now_ms;
pub use journal::{Health, Journal, Settings};
pub use outcome::{Aim, End, Outcome};
pub use reader::{Reader, Sourced, Trouble};
pub use replay::{Difference, Replayed, replay};
pub use trace::{Excerpt, TraceError, Traced, trace};
pub use turn::{Moment, Names, Turn};

#[cfg(test)]
extern crate self as ballast_journal;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;
