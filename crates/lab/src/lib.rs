//! Sample guests, and what is done with them: the demo of `./run`, experiments, benchmarks.
//!
//! The lab knows the manager only from outside: its binary and its API.

#![warn(missing_docs)]

use ballast_chart as chart;

pub mod bench;
pub mod console;
pub mod demo;
pub mod experiments;
mod figures;
pub mod guest;
pub mod image;
mod latency;
pub mod leftovers;
pub mod manager;
pub mod overcommit;
pub mod peers;
pub mod plain;
pub mod results;
pub mod say;
mod signals;
mod stats;
pub mod tools;
mod turns;
