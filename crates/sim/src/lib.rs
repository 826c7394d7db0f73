//! Hosts in virtual time: Ballast's own policy ([`ballast_policy::decide`], `BalloonControl`,
//! `WorkingSet`), and models of guests and mechanisms in place of real ones. The same scenario and seed
//! always give the same result.
//!
//! | module | what is in it |
//! | --- | --- |
//! | [`file`], [`scenario`], [`recorded`] | scenarios in TOML, recorded traces, and what is wrong with them |
//! | [`load`] | what guests want over time |
//! | [`models`] | what mechanisms cost, and where that was measured |
//! | [`guest`] | a guest's memory, and what is done to it |
//! | [`vm`] | what is known of a VM, and its balloon |
//! | [`host`] | one host, step by step |
//! | [`measure`] | what is measured |
//! | [`run`](mod@run), [`report`] | many hosts on several threads; tables, CSV, plots |
//!
//! What is modelled, and what is not: docs/simulator.md.

pub mod amount;
mod check;
pub mod file;
pub mod guest;
pub mod host;
pub mod load;
pub mod measure;
pub mod models;
mod places;
pub mod random;
pub mod recorded;
pub mod report;
pub mod run;
pub mod scenario;
pub mod vm;

pub use host::Host;
pub use report::{GroupSummary, HostSummary, Summary};
pub use run::{HostResult, run};
pub use scenario::{Scenario, ScenarioError};

/// Virtual time, in milliseconds.
pub type Millis = u64;
