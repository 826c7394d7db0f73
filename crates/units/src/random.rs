//! Random numbers that are the same everywhere: one stream per seed and purpose.

/// SplitMix64 (Steele, Lea, Flood, OOPSLA'14): full period, and every seed is a good one. Not for
/// secrets.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The same numbers for the same seed.
    pub const fn seeded(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// Streams of one seed are as good as independent of one another.
    pub fn of_stream(seed: u64, stream: u64) -> SplitMix64 {
        SplitMix64(seed ^ SplitMix64(stream).draw())
    }

    /// 64 bits, all equally likely.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..bound (Lemire, ACM TOMACS 2019), for a bound above 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        loop {
            let product = u128::from(self.draw()) * u128::from(bound);
            // Accepting only above 2^64 mod bound makes every value equally likely.
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }

    /// Uniform in 0 <= x < 1, of the 53 bits that a double has.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_generator() {
        // The first numbers of seed 1234567 by the authors' reference code.
        let mut random = SplitMix64::seeded(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| random.draw()).collect();
        assert_eq!(
            drawn,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn streams_differ_and_bounds_hold() {
        let (mut a, mut b) = (SplitMix64::of_stream(7, 0), SplitMix64::of_stream(7, 1));
        assert_ne!(a.draw(), b.draw());
        let mut seen = [0u32; 5];
        for _ in 0..5_000 {
            seen[a.below(5) as usize] += 1;
            assert!((0.0..1.0).contains(&b.unit()));
        }
        // 1,000 expected; six standard deviations are 170.
        assert!(seen.iter().all(|n| n.abs_diff(1_000) < 170), "{seen:?}");
    }
}
