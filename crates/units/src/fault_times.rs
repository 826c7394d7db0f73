//! The buckets that times of faults are counted in: two for each power of two.

/// Ends are 1, 2, 3, 4, 6, 8, 12, ... 131,072 us; the last bucket has no end.
pub const FAULT_BUCKETS: usize = 35;

/// The end of a bucket, included, in microseconds. None of the last.
pub fn fault_bucket_end_us(bucket: usize) -> Option<u64> {
    let power = |n: usize| 1 << n;
    match bucket {
        0 => Some(1),
        _ if bucket >= FAULT_BUCKETS - 1 => None,
        _ if bucket % 2 == 1 => Some(power(bucket.div_ceil(2))),
        _ => Some(3 * power(bucket / 2 - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_buckets_for_each_power_of_two() {
        let ends: Vec<u64> = (0..FAULT_BUCKETS).filter_map(fault_bucket_end_us).collect();
        assert_eq!(ends[..9], [1, 2, 3, 4, 6, 8, 12, 16, 24]);
        assert_eq!(ends[FAULT_BUCKETS - 2], 1 << 17);
        assert!(ends.is_sorted() && ends.len() == FAULT_BUCKETS - 1);
        assert_eq!([FAULT_BUCKETS - 1, usize::MAX].map(fault_bucket_end_us), [None; 2]);
    }
}
