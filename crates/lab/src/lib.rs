//! Sample guests, and what is done with them: the demo of `./run`, experiments, benchmarks.
//!
//! The lab knows the manager only from outside: its binary and its API.

pub mod console;
pub mod guest;
pub mod image;
pub mod plain;
pub mod say;
pub mod tools;
