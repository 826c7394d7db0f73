//! Hosts in virtual time: Ballast's own policy ([`ballast_policy::decide`], `BalloonControl`,
//! `WorkingSet`), and models of guests and mechanisms in place of real ones. The same scenario and seed
//! always give the same result.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `file`, `amount`, `check`, `scenario`, `recorded` | scenarios in TOML, recorded traces, and what is wrong with them |
//! | `load` | what guests want over time |
//! | `models` | what mechanisms cost, and where that was measured |
//! | `guest`, `places` | a guest's memory, and what is done to it |
//! | `vm` | what is known of a VM, and its balloon |
//! | `host` | one host, step by step |
//! | [`measure`] | what is measured |
//! | [`random`] | numbers that a seed decides |
//! | [`soak`] | scenarios drawn from a seed, and what must hold of each |
//! | [`run`](mod@run), [`report`] | many hosts on several threads; tables, CSV, plots |
//!
//! What is modelled, and what is not: docs/simulator.md.

#![warn(missing_docs)]

mod amount;
mod check;
mod file;
mod guest;
mod host;
mod load;
pub mod measure;
mod models;
mod places;
pub mod random;
mod recorded;
pub mod report;
pub mod run;
mod scenario;
pub mod soak;
mod vm;

pub use models::Models;
pub use report::{GroupSummary, HostSummary, Summary};
pub use run::{HostResult, run};
pub use scenario::{Scenario, ScenarioError};

/// Virtual time, in milliseconds.
pub type Millis = u64;
