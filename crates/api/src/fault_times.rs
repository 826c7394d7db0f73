//! How long faults took, in buckets.

use ballast_units::fault_bucket_end_us;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How long faults of a VM took to be served, from when they were read; those that had to wait for memory or
/// a disk are not among them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FaultTimesView {
    /// Faults served within 1, 2, 3, 4, 6, 8, 12, ... us, each counted once; the last are those that took longer.
    pub counts: Vec<u64>,
    /// Seconds, summed.
    pub sum_s: f64,
}

impl FaultTimesView {
    /// Faults that were served, a count.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Microseconds within which this part of all faults was served, rounded up to the end of a bucket. None if
    /// it is more than the last, or if there were no faults.
    pub fn within_us(&self, part: f64) -> Option<u64> {
        let wanted = self.total() as f64 * part;
        let last = self.counts.len().checked_sub(1)?;
        let mut sum = 0;
        let bucket = self.counts[..last].iter().position(|n| {
            sum += n;
            sum as f64 >= wanted
        })?;
        fault_bucket_end_us(bucket).filter(|_| self.total() > 0)
    }

    /// Those that were counted since `before`.
    #[must_use]
    pub fn since(&self, before: &FaultTimesView) -> FaultTimesView {
        let was = |i: usize| before.counts.get(i).copied().unwrap_or(0);
        FaultTimesView {
            counts: self.counts.iter().enumerate().map(|(i, n)| n.saturating_sub(was(i))).collect(),
            sum_s: self.sum_s - before.sum_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_faults_was_served_within_the_end_of_its_bucket() {
        let times = FaultTimesView { counts: vec![50, 0, 49, 0, 1], sum_s: 1.0 };
        assert_eq!(times.within_us(0.5), Some(1));
        assert_eq!(times.within_us(0.51), Some(3));
        assert_eq!(times.within_us(0.99), Some(3));
        assert_eq!(times.within_us(0.999), None);
        assert_eq!(FaultTimesView::default().within_us(0.5), None);
        let none = FaultTimesView { counts: vec![0, 0], sum_s: 0.0 };
        assert_eq!(none.within_us(0.5), None);
        let later = FaultTimesView { counts: vec![50, 1, 50, 0, 1], sum_s: 1.5 };
        let between = FaultTimesView { counts: vec![0, 1, 1, 0, 0], sum_s: 0.5 };
        assert_eq!(later.since(&times), between);
    }
}
