//! Series in time: how many independent looks they are worth, and blocks of them to draw again.
//!
//! Neighbouring slots are alike, so n slots are worth fewer than n looks. The integrated
//! autocorrelation time T = 1 + 2 * sum of the autocorrelations (summed over a window of five times
//! T, after A. Sokal) gives n / T of them, and 2 T the length of the blocks of the moving-block
//! bootstrap (H. Kunsch 1989), which keeps what belongs together in time together.

use fastrand::Rng;
use statrs::distribution::{Beta, ContinuousCDF as _};

/// The integrated autocorrelation time, in slots, 1 to a quarter of the series.
pub fn correlation_time(series: &[f64]) -> f64 {
    let n = series.len();
    if n < 8 {
        return 1.0;
    }
    let mean = series.iter().sum::<f64>() / n as f64;
    let covariance = |lag: usize| -> f64 {
        series[lag..].iter().zip(series).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>()
            / n as f64
    };
    let variance = covariance(0);
    // Nothing moves (but by rounding): every slot says the same, and one would do.
    if variance <= 1e-18 * mean * mean {
        return 1.0;
    }
    let longest = n / 4;
    let mut time = 1.0;
    for lag in 1..=longest.min(LAGS) {
        time += 2.0 * covariance(lag) / variance;
        if lag as f64 >= 5.0 * time {
            return time.clamp(1.0, longest as f64);
        }
    }
    if longest <= LAGS {
        return time.clamp(1.0, longest as f64);
    }
    // A long memory: that of the means of short blocks tells, since n / T, and so the variance of the
    // mean of all, is the same for both.
    let means: Vec<f64> =
        series.chunks_exact(BLOCK).map(|c| c.iter().sum::<f64>() / BLOCK as f64).collect();
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    let of_means = means.iter().map(|m| (m - mean) * (m - mean)).sum::<f64>() / means.len() as f64;
    let time = BLOCK as f64 * correlation_time(&means) * of_means / variance;
    time.clamp(1.0, longest as f64)
}

/// Lags that are summed one by one.
const LAGS: usize = 500;
/// Slots of one block where that is not enough.
const BLOCK: usize = 8;

/// Length of the blocks to draw, at least 1; 1 also for a time that is no number.
pub fn block_len(time: f64) -> usize {
    if time > 1.0 { (2.0 * time).ceil() as usize } else { 1 }
}

/// Indices of `n` slots, in blocks of `block` that begin anywhere; the series is closed to a ring.
pub fn draw(rng: &mut Rng, n: usize, block: usize) -> Vec<usize> {
    let mut drawn = Vec::with_capacity(n + block);
    while drawn.len() < n {
        let start = rng.usize(..n);
        drawn.extend((start..start + block).map(|i| i % n));
    }
    drawn.truncate(n);
    drawn
}

/// The upper limit of a probability at `confidence`, when `hits` of `looks` independent looks were
/// hits (C. Clopper and E. Pearson 1934; both may be fractions).
pub fn upper_limit(hits: f64, looks: f64, confidence: f64) -> f64 {
    if looks <= 0.0 || hits >= looks {
        return 1.0;
    }
    Beta::new(hits + 1.0, looks - hits).map_or(1.0, |beta| beta.inverse_cdf(confidence))
}

/// The largest of some sorted values, seen in so many independent looks, of which it can be said with `confidence` that
/// no more than the part `risk` of what comes is below it. None where there were too few looks to say so of any.
pub fn vouched(sorted: &[f64], looks: f64, risk: f64, confidence: f64) -> Option<f64> {
    let n = sorted.len();
    // At the value of place k, k of them are below.
    let fits = |k: usize| upper_limit(k as f64 * looks / n as f64, looks, confidence) <= risk;
    if !fits(0) {
        return None;
    }
    let (mut good, mut bad) = (0, n);
    while bad - good > 1 {
        let middle = usize::midpoint(good, bad);
        if fits(middle) { good = middle } else { bad = middle }
    }
    // As many may lie at one value: the first place of it counts.
    Some(sorted[good])
}

/// The value below which no more than the part `risk` of the sorted values is.
pub fn quantile(sorted: &[f64], risk: f64) -> f64 {
    sorted[place(sorted.len(), risk)]
}

/// Its place among `n` sorted values.
pub fn place(n: usize, risk: f64) -> usize {
    // A part that is meant to be whole is not lost to rounding.
    let below = (risk * n as f64 + 1e-9).floor() as usize;
    below.min(n - 1)
}

/// How often each of some values, known by their ranks, was drawn.
pub struct Tally {
    counts: Vec<u32>,
    total: usize,
}

impl Tally {
    /// Of nothing yet; ranks are below `ranks`.
    pub fn new(ranks: usize) -> Tally {
        Tally { counts: vec![0; ranks], total: 0 }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        self.total = 0;
    }

    /// Counts one.
    pub fn add(&mut self, rank: usize) {
        self.counts[rank] += 1;
        self.total += 1;
    }

    /// The ranks of the quantiles of `risks`, which rise.
    pub fn quantiles(&self, risks: &[f64]) -> Vec<usize> {
        let mut wanted = risks.iter().map(|risk| place(self.total, *risk)).peekable();
        let (mut found, mut below) = (Vec::with_capacity(risks.len()), 0);
        for (rank, count) in self.counts.iter().enumerate() {
            below += *count as usize;
            while wanted.next_if(|place| *place < below).is_some() {
                found.push(rank);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn independent_values_count_in_full_and_repeated_ones_once() {
        let mut rng = Rng::with_seed(5);
        let independent: Vec<f64> = (0..4000).map(|_| rng.f64()).collect();
        let time = correlation_time(&independent);
        assert!((0.99..1.3).contains(&time), "{time}");
        // Each held for ten slots: T = 1 + 2 * sum (1 - k / 10) = 10.
        let held: Vec<f64> = (0..40_000).map(|i| independent[i / 10]).collect();
        let time = correlation_time(&held);
        assert!((8.5..12.0).contains(&time), "{time}");
        // And for 400, which is found by blocks.
        let long: Vec<f64> = (0..800_000).map(|i| independent[i / 400]).collect();
        let time = correlation_time(&long);
        assert!((280.0..560.0).contains(&time), "{time}");
        assert_eq!(correlation_time(&[3.3; 100]), 1.0);
        assert_eq!((block_len(1.0), block_len(10.2), block_len(f64::NAN)), (1, 21, 1));
    }

    #[test]
    fn blocks_keep_neighbours_and_every_slot_is_as_likely() {
        let mut rng = Rng::with_seed(9);
        let mut seen = vec![0u32; 50];
        let mut torn = 0;
        for _ in 0..2000 {
            let drawn = draw(&mut rng, 50, 10);
            assert_eq!(drawn.len(), 50);
            drawn.iter().for_each(|&i| seen[i] += 1);
            torn += drawn.windows(2).filter(|w| w[1] != (w[0] + 1) % 50).count();
        }
        assert!(seen.iter().all(|&n| (1700..2300).contains(&n)), "{seen:?}");
        // Four seams, of which few close by chance.
        assert!((3.7..=4.0).contains(&(torn as f64 / 2000.0)), "{torn}");
    }

    #[test]
    fn limits_are_those_of_the_tables() {
        // The rule of three, exactly: 1 - 0.05^(1/n).
        for looks in [10.0, 59.0, 299.0] {
            let exact = 1.0 - 0.05f64.powf(1.0 / looks);
            assert!((upper_limit(0.0, looks, 0.95) - exact).abs() < 1e-6);
        }
        // 2 of 20, one-sided 95%: 0.2826 (tables of the binomial).
        assert!((upper_limit(2.0, 20.0, 0.95) - 0.2826).abs() < 1e-3);
        assert_eq!(upper_limit(5.0, 5.0, 0.95), 1.0);
    }

    #[test]
    fn a_quantile_leaves_no_more_below_it_than_the_risk() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.01), 1.0);
        assert_eq!(quantile(&values, 0.009), 0.0);
        assert_eq!(quantile(&values, 0.29), 29.0);
        assert_eq!(quantile(&values, 1.0), 99.0);
        let mut tally = Tally::new(100);
        (0..100).for_each(|rank| tally.add(rank));
        let risks = [0.0, 0.009, 0.01, 0.29, 1.0];
        assert_eq!(tally.quantiles(&risks), [0, 0, 1, 29, 99]);
        tally.clear();
        [7, 3, 7].into_iter().for_each(|rank| tally.add(rank));
        assert_eq!(tally.quantiles(&[0.3, 0.4]), [3, 7]);
    }
}
