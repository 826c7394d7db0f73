//! The table `[tools]`: which tool of reclamation is used first, and what is not measured of their costs.

use std::time::Duration;

use ballast_policy::ToolOrder;
use serde::Deserialize;

use crate::limits::Wrong;

/// As it is written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    order: Option<ToolOrder>,
    tcg_read_us: Option<f64>,
    kvm_read_us: Option<f64>,
    refault_us: Option<f64>,
}

/// Checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolSettings {
    /// By what they cost, or always the balloon first.
    pub order: ToolOrder,
    /// CPU time of a page that an emulated guest reads from its disk, beside what the disk takes
    /// (experiments/vtj-memory-f6/NOTES.md: 0.6 ms).
    pub tcg_read: Duration,
    /// The same where the processor virtualizes. Assumed.
    pub kvm_read: Duration,
    /// What a fault costs beside what serving it takes: a round trip between two threads
    /// (docs/adr/0026: from 6 us on), and the eviction of another page (docs/adr/0005: 4.4 us).
    pub refault: Duration,
}

impl Default for ToolSettings {
    fn default() -> ToolSettings {
        ToolSettings {
            order: ToolOrder::default(),
            tcg_read: Duration::from_micros(600),
            kvm_read: Duration::from_micros(20),
            refault: Duration::from_micros(15),
        }
    }
}

impl Table {
    /// An error names its key.
    pub(super) fn check(&self) -> Result<ToolSettings, Wrong> {
        let d = ToolSettings::default();
        let time = |key, us: Option<f64>, default: Duration| match us {
            None => Ok(default),
            Some(us) if (0.0..=100_000.0).contains(&us) => Ok(Duration::from_secs_f64(us / 1e6)),
            Some(us) => Err((key, format!("{us} is not between 0 and 100000"))),
        };
        Ok(ToolSettings {
            order: self.order.unwrap_or(d.order),
            tcg_read: time("tools.tcg_read_us", self.tcg_read_us, d.tcg_read)?,
            kvm_read: time("tools.kvm_read_us", self.kvm_read_us, d.kvm_read)?,
            refault: time("tools.refault_us", self.refault_us, d.refault)?,
        })
    }
}
