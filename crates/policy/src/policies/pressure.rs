//! A proportional set point for pressure: a VM that waits for memory more than [`SET_POINT`] counts
//! with more shares than it has, one that waits less with fewer. A guest that reports nothing
//! keeps its shares.
//!
//! Pressure is what Linux calls memory pressure, `some`: the part of the time in which some task
//! waited for memory (Documentation/accounting/psi.rst).

use ballast_units::VmId;
use serde::{Deserialize, Serialize};

use crate::shares::VmDemand;

/// What a guest reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmPressure {
    /// Of which VM.
    pub id: VmId,
    /// 0 to 1, an average over some ten seconds or more; what is outside counts as the nearest.
    pub some: f64,
}

/// The pressure at which shares count as they are.
pub const SET_POINT: f64 = 0.01;
/// By how much a VM's weight grows with each 100% of pressure beyond it.
pub const GAIN: f64 = 5.0;
/// The weight's bounds.
pub const WEIGHTS: (f64, f64) = (0.5, 4.0);

fn weight(some: f64) -> f64 {
    let some = if some.is_nan() { SET_POINT } else { some.clamp(0.0, 1.0) };
    (1.0 + GAIN * (some - SET_POINT)).clamp(WEIGHTS.0, WEIGHTS.1)
}

/// The demand with the shares that its pressure gives it.
pub fn read(vm: VmDemand, some: Option<f64>) -> VmDemand {
    let Some(some) = some else { return vm };
    // A cast of a float saturates: shares stay below 2^32.
    VmDemand { shares: (f64::from(vm.shares.max(1)) * weight(some)).round().max(1.0) as u32, ..vm }
}

/// What it made of a demand, in words.
pub fn note(own: &VmDemand, read: &VmDemand, some: Option<f64>) -> String {
    match some {
        None => "The policy is pressure, and its guest reports none: its shares count".to_owned(),
        Some(some) => format!(
            "The policy is pressure: its guest waits for memory {:.1}% of the time, against a set \
             point of {:.0}%, so it counts with {} shares in place of {}",
            100.0 * some,
            100.0 * SET_POINT,
            read.shares,
            own.shares
        ),
    }
}
