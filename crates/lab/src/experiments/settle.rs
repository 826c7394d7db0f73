//! Waiting until page sharing has found what there is to find.

use std::time::{Duration, Instant};

use anyhow::Result;
use ballast_api::{HostView, VmView};
use ballast_units::{Bytes, PAGE_SIZE};

use super::stage::Stage;
use crate::say;

/// How patient to be.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// What VMs use must not have fallen for so long, and all of it must have been looked at once.
    pub still: Duration,
    /// After so long what is there is taken.
    pub limit: Duration,
}

/// The host and its VMs in a steady state.
pub struct Steady {
    /// As it was at the end of the wait.
    pub host: HostView,
    /// In order of start.
    pub vms: Vec<VmView>,
    /// Seconds that it took.
    pub after_s: f64,
    /// False if the patience ended first.
    pub settled: bool,
}

/// Growth by less than this part of all VM memory is none.
const GROWTH: f64 = 0.004;

/// Err: a guest's trouble, or the manager has ended.
pub async fn settle(stage: &mut Stage, patience: Patience) -> Result<Steady> {
    let begin = Instant::now();
    let mut still = Stillness::default();
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        stage.poll()?;
        let (host, vms) = stage.views().await?;
        let after = begin.elapsed();
        let memory: u64 = vms.iter().map(|vm| vm.params.size).sum();
        // What was written since is looked at again, what was not is not: one look tells.
        let seen = vms.iter().all(|vm| {
            let touched = vm.params.size - vm.memory.untouched;
            vm.sharing.scanned >= touched / PAGE_SIZE as u64
        });
        // What VMs use, instead of what is saved: zero pages count too, and pages that the guests
        // touch meanwhile count against.
        let quiet = still.feed(after.as_secs_f64(), host.consumed as f64, memory as f64 * GROWTH);
        let settled = seen && quiet >= patience.still.as_secs_f64();
        if settled || after >= patience.limit {
            say::detail(&format!(
                "{} {} VMs after {:.0} s: shared {}, saved {}, {} consumed",
                if settled { "settled:" } else { "not settled:" },
                vms.len(),
                after.as_secs_f64(),
                Bytes(host.sharing.shared),
                Bytes(host.sharing.saved),
                Bytes(host.consumed),
            ));
            return Ok(Steady { host, vms, after_s: after.as_secs_f64(), settled });
        }
    }
}

/// Since when a value has not fallen.
#[derive(Default)]
struct Stillness {
    since: Option<(f64, f64)>,
}

impl Stillness {
    /// Seconds for which `value` has not fallen by `step` below what it was then.
    fn feed(&mut self, t: f64, value: f64, step: f64) -> f64 {
        match self.since {
            Some((since, lowest)) if value > lowest - step => t - since,
            _ => {
                self.since = Some((t, value));
                0.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_still_while_it_does_not_fall() {
        let mut s = Stillness::default();
        assert_eq!(s.feed(0.0, 100.0, 5.0), 0.0);
        assert_eq!(s.feed(1.0, 96.0, 5.0), 1.0);
        assert_eq!(s.feed(2.0, 94.0, 5.0), 0.0);
        assert_eq!(s.feed(3.0, 99.0, 5.0), 1.0);
        assert_eq!(s.feed(4.0, 93.0, 5.0), 2.0);
    }
}
