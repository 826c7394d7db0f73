//! What policies know of a VM beside shares and sampled active memory.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is known of a VM, and what the policy in force would like to know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PolicyInputs {
    /// The policy in force: "idle-tax".
    pub policy: String,
    /// The predicted misses, from no memory up to the active memory; none until a sampling period is
    /// complete.
    pub curve: Vec<MissPoint>,
    /// What the guest reports; None if nothing, or nothing of late.
    pub pressure: Option<PressureView>,
    /// Why the guest's agent tells nothing at the moment.
    pub agent_trouble: Option<String>,
    /// What the policy in force goes without, and what it takes in its place.
    pub missing: Option<String>,
}

impl PolicyInputs {
    /// Misses per second with so many bytes, straight between points; None without a curve.
    pub fn misses_at(&self, memory: u64) -> Option<f64> {
        let after = self.curve.partition_point(|p| p.memory < memory);
        let Some(b) = self.curve.get(after) else {
            return self.curve.last().map(|p| p.misses_per_s);
        };
        let a = self.curve.get(after.wrapping_sub(1)).unwrap_or(b);
        let part = (memory.saturating_sub(a.memory)) as f64 / (b.memory - a.memory).max(1) as f64;
        Some(a.misses_per_s + part * (b.misses_per_s - a.misses_per_s))
    }
}

/// A point of a miss curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissPoint {
    /// Machine memory, bytes.
    pub memory: u64,
    /// Misses with so much, per second of execution.
    pub misses_per_s: f64,
}

/// A guest's memory pressure (Linux: /proc/pressure/memory): the parts, 0 to 1, of the ten seconds
/// before it was read in which tasks waited for memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PressureView {
    /// At least one task.
    pub some: f64,
    /// All that had anything to do.
    pub full: f64,
    /// Seconds since it was read.
    pub age_s: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_straight_between_its_points_and_level_beyond() {
        let point = |memory, misses_per_s| MissPoint { memory, misses_per_s };
        let of = |curve| PolicyInputs { curve, ..PolicyInputs::default() };
        assert_eq!(of(vec![]).misses_at(5), None);
        let inputs = of(vec![point(0, 90.0), point(20, 10.0), point(40, 0.0)]);
        for (memory, misses) in [(0, 90.0), (10, 50.0), (20, 10.0), (30, 5.0), (40, 0.0), (99, 0.0)]
        {
            assert_eq!(inputs.misses_at(memory), Some(misses), "{memory}");
        }
        assert_eq!(of(vec![point(8, 3.0)]).misses_at(2), Some(3.0));
    }
}
