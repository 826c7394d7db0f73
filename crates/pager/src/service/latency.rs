//! How long faults took to be served: a histogram of two buckets for each power of two. What is counted is the time from the
//! reading of the fault to the end of the reading's work, so that of several read together each is counted
//! with the time of all; of a reading that several threads share, those that were put on their board have a time each.
//! Faults that had to wait, for memory or for whoever has the page in hand, and those on swapped pages are not among
//! them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ballast_units::{FAULT_BUCKETS, fault_bucket_end_us};

/// The end of a bucket, included. None of the last.
pub fn bucket_end(bucket: usize) -> Option<Duration> {
    fault_bucket_end_us(bucket).map(Duration::from_micros)
}

/// Of one VM, since this manager has it: whoever serves its faults notes, any thread reads.
#[derive(Debug)]
pub struct FaultTimes {
    counts: [AtomicU64; FAULT_BUCKETS],
    ns: AtomicU64,
}

impl Default for FaultTimes {
    fn default() -> FaultTimes {
        FaultTimes { counts: std::array::from_fn(|_| AtomicU64::new(0)), ns: AtomicU64::new(0) }
    }
}

impl FaultTimes {
    /// `n` faults were served in `time`.
    pub fn note(&self, time: Duration, n: u64) {
        if n == 0 {
            return;
        }
        let bucket = (0..FAULT_BUCKETS).find(|&b| bucket_end(b).is_none_or(|end| time <= end));
        self.counts[bucket.unwrap_or(FAULT_BUCKETS - 1)].fetch_add(n, Ordering::Relaxed);
        self.ns.fetch_add((time.as_nanos() as u64).saturating_mul(n), Ordering::Relaxed);
    }

    /// Faults in each bucket.
    pub fn counts(&self) -> [u64; FAULT_BUCKETS] {
        std::array::from_fn(|b| self.counts[b].load(Ordering::Relaxed))
    }
    /// All of them, summed.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.ns.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_bucket_that_ends_at_or_above_it() {
        let times = FaultTimes::default();
        for (ns, bucket) in [(0, 0), (1000, 0), (1001, 1), (2000, 1), (64_000, 11), (64_001, 12)] {
            let before = times.counts()[bucket];
            times.note(Duration::from_nanos(ns), 3);
            assert_eq!(times.counts()[bucket], before + 3, "{ns} ns");
        }
        times.note(Duration::from_secs(100), 1);
        assert_eq!(times.counts()[FAULT_BUCKETS - 1], 1);
        times.note(Duration::from_secs(100), 0);
        assert_eq!(times.counts().iter().sum::<u64>(), 19);
        assert_eq!(times.sum(), Duration::from_nanos(3 * 132_002 + 100_000_000_000));
    }
}
