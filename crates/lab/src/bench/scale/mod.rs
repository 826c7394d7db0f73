//! What the manager itself costs where there is no pressure, as the number of VMs grows.
//!
//! - `idle`: real guests that do nothing.
//! - `many`: processes with the shim stand in for VMMs. Their memory is mapped and hardly touched, so
//!   what is measured is what the manager does and holds per VM.
//! - `sleeper`: such a process.
//! - `cost`, `growth`: what it took, and how that grows.
//!
//! There is no peer: nothing else keeps such books. The figures are parts of a core, and of memory.

mod cost;
mod growth;
mod idle;
mod many;
mod sleeper;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::figures::Outcome;
use crate::image::Image;
use cost::Cost;

pub use sleeper::{SleeperArgs, run as sleep};

const MIB: f64 = 1_048_576.0;

/// How much of it.
struct Plan {
    /// Guests, and processes, with which it is measured.
    guests: &'static [usize],
    vms: &'static [usize],
    /// After the last start of each: caches settle, scanners have seen all.
    settle: Duration,
    window: Duration,
    /// The window of the most guests: what comes every few minutes alone is to be in it.
    long: Duration,
}

pub(super) async fn run(image: &Image, quick: bool) -> Result<Outcome> {
    let plan = if quick {
        Plan {
            guests: &[0, 1, 10],
            vms: &[0, 1, 10, 50],
            settle: Duration::from_secs(15),
            window: Duration::from_secs(20),
            long: Duration::from_secs(20),
        }
    } else {
        Plan {
            guests: &[0, 1, 10, 50],
            vms: &[0, 1, 10, 50, 100, 200],
            settle: Duration::from_secs(60),
            window: Duration::from_secs(60),
            long: Duration::from_secs(600),
        }
    };
    let mut outcome = Outcome::new("scale");
    many::run(&plan, &mut outcome).await.context("many VMs")?;
    idle::run(image, &plan, &mut outcome).await.context("idle guests")?;
    Ok(outcome)
}

/// The parts of a cost as figures.
fn figures(cost: &Cost) -> Vec<(String, f64)> {
    let mut figures =
        vec![("cpu_percent".to_owned(), cost.cpu), ("policy_turn_ms".to_owned(), cost.turn_ms)];
    figures.extend(cost.kinds.iter().map(|(kind, cpu)| (format!("cpu_{kind}_percent"), *cpu)));
    figures
}

/// "fault 0.012, policy 0.100": what takes anything.
fn told(cost: &Cost) -> String {
    let some = cost.kinds.iter().filter(|(_, cpu)| **cpu >= 0.0005);
    some.map(|(kind, cpu)| format!("{kind} {cpu:.3}")).collect::<Vec<_>>().join(", ")
}
