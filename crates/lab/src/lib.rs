//! Sample guests, and what is done with them: the demo of `./run`, experiments, benchmarks.
//!
//! The lab knows the manager only from outside: its binary and its API.

pub use ballast_chart as chart;

pub mod bench;
pub mod console;
pub mod demo;
pub mod experiments;
pub mod figures;
pub mod guest;
pub mod image;
pub mod latency;
pub mod leftovers;
pub mod manager;
pub mod overcommit;
pub mod peers;
pub mod plain;
pub mod say;
pub mod signals;
pub mod stats;
pub mod tools;
