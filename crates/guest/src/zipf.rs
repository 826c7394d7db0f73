//! Which of many is asked for: a few often, most seldom.

use crate::page::{Random, mix};

/// Ranks with probabilities proportional to 1 / rank^s, scattered over the numbers below `count`.
pub struct Zipf {
    /// Probability that the rank is at most this one.
    cumulative: Vec<f64>,
    /// By rank.
    number: Vec<u32>,
}

impl Zipf {
    /// `count` must not be zero.
    pub fn new(count: u32, s: f64, seed: u64) -> Zipf {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=count)
            .map(|rank| {
                sum += f64::from(rank).powf(-s);
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|c| *c /= sum);
        let mut number: Vec<u32> = (0..count).collect();
        let mut random = Random(mix(seed));
        for at in (1..number.len()).rev() {
            number.swap(at, random.below(at as u64 + 1) as usize);
        }
        Zipf { cumulative, number }
    }

    pub fn next(&self, random: &mut Random) -> u32 {
        let at = random.below(1 << 53) as f64 / (1u64 << 53) as f64;
        let rank = self.cumulative.partition_point(|c| *c <= at);
        self.number[rank.min(self.number.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_asked_for_often_and_all_are_reached() {
        let zipf = Zipf::new(100, 1.0, 3);
        let mut random = Random(1);
        let mut counts = [0u32; 100];
        (0..100_000).for_each(|_| counts[zipf.next(&mut random) as usize] += 1);
        assert!(counts.iter().all(|c| *c > 0));
        // The harmonic number of 100 is 5.187.
        let most = f64::from(*counts.iter().max().unwrap());
        assert!((most / 100_000.0 - 1.0 / 5.187).abs() < 0.01, "{most}");
        assert_ne!(counts.iter().position(|c| f64::from(*c) == most), Some(0));
    }

    #[test]
    fn one_is_always_the_same() {
        assert_eq!(Zipf::new(1, 1.0, 1).next(&mut Random(7)), 0);
    }
}
