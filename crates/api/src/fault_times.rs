//! How long faults took, in buckets.

use ballast_units::{FAULT_BUCKETS, fault_bucket_end_us};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How long faults of a VM took to be served, from when they were read; those that had to wait for memory, and
/// those on swapped pages, are not among them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FaultTimesView {
    /// Faults served within 1, 2, 3, 4, 6, 8, 12, ... us, each counted once; the last are those that took longer. Other
    /// versions have other buckets, and another number of them.
    pub counts: Vec<u64>,
    /// Seconds, summed.
    pub sum_s: f64,
}

impl FaultTimesView {
    /// Faults that were served, a count.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Whether the buckets are those that this program knows the ends of.
    pub fn is_known(&self) -> bool {
        self.counts.is_empty() || self.counts.len() == FAULT_BUCKETS
    }

    /// Microseconds within which this part of all faults was served, rounded up to the end of a bucket. None if
    /// it is more than the last, if there were no faults, or if it is not known.
    pub fn within_us(&self, part: f64) -> Option<u64> {
        if !self.is_known() {
            return None;
        }
        let wanted = self.total() as f64 * part;
        let last = self.counts.len().checked_sub(1)?;
        let mut sum = 0;
        let bucket = self.counts[..last].iter().position(|n| {
            sum += n;
            sum as f64 >= wanted
        })?;
        fault_bucket_end_us(bucket).filter(|_| self.total() > 0)
    }

    /// Those that were counted since `before`; all, where that was counted in other buckets: by another ballastd, whose
    /// counts ended with it.
    #[must_use]
    pub fn since(&self, before: &FaultTimesView) -> FaultTimesView {
        if before.counts.len() != self.counts.len() {
            return self.clone();
        }
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

    fn times(first: &[u64], sum_s: f64) -> FaultTimesView {
        let mut counts = first.to_vec();
        counts.resize(FAULT_BUCKETS, 0);
        FaultTimesView { counts, sum_s }
    }

    #[test]
    fn a_part_of_the_faults_was_served_within_the_end_of_its_bucket() {
        let mut some = times(&[50, 0, 49], 1.0);
        some.counts[FAULT_BUCKETS - 1] = 1;
        assert_eq!(some.within_us(0.5), Some(1));
        assert_eq!(some.within_us(0.51), Some(3));
        assert_eq!(some.within_us(0.99), Some(3));
        assert_eq!(some.within_us(0.999), None);
        assert_eq!(FaultTimesView::default().within_us(0.5), None);
        assert_eq!(times(&[], 0.0).within_us(0.5), None);
        let mut later = times(&[50, 1, 50], 1.5);
        later.counts[FAULT_BUCKETS - 1] = 1;
        assert_eq!(later.since(&some), times(&[0, 1, 1], 0.5));
        assert!(some.is_known() && FaultTimesView::default().is_known());
    }

    #[test]
    fn buckets_of_another_version_are_counted_and_not_told_as_times() {
        let others = FaultTimesView { counts: vec![5; 18], sum_s: 1.0 };
        assert_eq!((others.total(), others.is_known()), (90, false));
        assert_eq!([0.5, 0.99].map(|part| others.within_us(part)), [None; 2]);
        let later = times(&[7, 3], 0.5);
        assert_eq!(later.since(&others), later, "it counts from its own beginning");
        assert_eq!(later.since(&FaultTimesView::default()), later);
    }
}
