//! Durations in buckets, as `ballast-guest` reports them (its `latency.rs`): bucket n holds the
//! microseconds from `8 + n % 8 << n / 8 - 1` on, and n itself below 8.

use std::collections::BTreeMap;

/// Counts of durations; they add up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latency {
    buckets: BTreeMap<u32, u64>,
}

impl Latency {
    /// Adds a report's "bucket:count,..."; false, and nothing added, if it is not that.
    pub fn add(&mut self, text: &str) -> bool {
        let parse = |part: &str| {
            let (bucket, count) = part.split_once(':')?;
            Some((bucket.parse().ok().filter(|b: &u32| *b < 500)?, count.parse().ok()?))
        };
        let parts = text.split(',').filter(|part| !part.is_empty());
        let Some(parts) = parts.map(parse).collect::<Option<Vec<(u32, u64)>>>() else {
            return false;
        };
        parts.into_iter().for_each(|(b, n)| *self.buckets.entry(b).or_default() += n);
        true
    }

    /// Adds all of another's.
    pub fn merge(&mut self, other: &Latency) {
        other.buckets.iter().for_each(|(b, n)| *self.buckets.entry(*b).or_default() += n);
    }

    /// All of them.
    pub fn count(&self) -> u64 {
        self.buckets.values().sum()
    }

    /// Milliseconds that `part` (0 to 1) of all did not exceed, to a sixteenth; NaN of nothing.
    pub fn quantile_ms(&self, part: f64) -> f64 {
        let wanted = (self.count() as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in &self.buckets {
            seen += count;
            if seen >= wanted {
                return middle_us(*bucket) / 1e3;
            }
        }
        f64::NAN
    }
}

fn middle_us(bucket: u32) -> f64 {
    if bucket < 8 {
        return f64::from(bucket);
    }
    let width = f64::from(bucket / 8 - 1).exp2();
    (f64::from(8 + bucket % 8) + 0.5) * width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_what_guests_report() {
        let mut l = Latency::default();
        assert!(l.quantile_ms(0.5).is_nan());
        // 3 us; 1024 to 1151 us; 2048 to 2303 us.
        assert!(l.add("3:1,64:98,72:1"));
        assert_eq!(l.count(), 100);
        assert_eq!(l.quantile_ms(0.0), 0.003);
        assert!((1.0..1.2).contains(&l.quantile_ms(0.5)));
        assert!((1.0..1.2).contains(&l.quantile_ms(0.99)));
        assert!((2.0..2.4).contains(&l.quantile_ms(1.0)));
        let mut other = l.clone();
        other.merge(&l);
        assert_eq!(other.count(), 200);
    }

    #[test]
    fn what_is_no_report_adds_nothing() {
        let mut l = Latency::default();
        for text in ["x", "1", "1:", "1:2,", "99999:1", "1:2;3:4"] {
            let good = text == "1:2,";
            assert_eq!(l.add(text), good, "{text}");
        }
        assert!(l.add(""));
        assert_eq!(l.count(), 2);
    }
}
