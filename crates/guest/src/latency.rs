//! Durations counted in buckets, eight to a doubling: small enough for a line on the console, and
//! exact to an eighth when the lines of several guests are added up.
//!
//! Bucket n holds the microseconds from `8 + n % 8 << n / 8 - 1` on; below 8, bucket n holds n.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

#[derive(Default)]
pub struct Latency {
    buckets: BTreeMap<u32, u64>,
}

impl Latency {
    pub fn add(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        *self.buckets.entry(bucket(us)).or_default() += 1;
    }

    /// "bucket:count,bucket:count", and nothing is left.
    pub fn take(&mut self) -> String {
        let mut text = String::new();
        for (bucket, count) in std::mem::take(&mut self.buckets) {
            let comma = if text.is_empty() { "" } else { "," };
            // Writing to a String cannot fail.
            let _ = write!(text, "{comma}{bucket}:{count}");
        }
        text
    }
}

fn bucket(us: u64) -> u32 {
    match us {
        0..8 => us as u32,
        _ => {
            let doubling = us.ilog2() - 2;
            doubling * 8 + (us >> (doubling - 1) & 7) as u32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_eighths_of_doublings() {
        assert_eq!([0, 7, 8, 9, 15, 16, 17, 18, 32].map(bucket), [0, 7, 8, 9, 15, 16, 16, 17, 24]);
        // No gap, and never backwards.
        let mut last = 0;
        for us in 0..100_000 {
            let now = bucket(us);
            assert!(now == last || now == last + 1, "{us}");
            last = now;
        }
        assert_eq!(bucket(u64::MAX), 495);
    }

    #[test]
    fn taking_empties() {
        let mut latency = Latency::default();
        [3, 3, 900].into_iter().for_each(|us| latency.add(Duration::from_micros(us)));
        let text = latency.take();
        assert!(text.starts_with("3:2,") && text.ends_with(":1"), "{text}");
        assert_eq!(latency.take(), "");
    }
}
