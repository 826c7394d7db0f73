//! Random numbers that are the same everywhere: one stream per seed and purpose.

use ballast_units::SplitMix64;

/// A model's numbers.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// Streams of one seed are as good as independent of one another.
    pub fn new(seed: u64, stream: u64) -> Random {
        Random(SplitMix64::of_stream(seed, stream))
    }

    /// 64 bits, all equally likely.
    pub fn draw(&mut self) -> u64 {
        self.0.draw()
    }

    /// Uniform in 0 <= x < 1.
    pub fn unit(&mut self) -> f64 {
        self.0.unit()
    }

    /// Uniform in -1 <= x < 1.
    pub fn signed(&mut self) -> f64 {
        2.0 * self.unit() - 1.0
    }

    /// Exponentially distributed, with this mean; never below 0.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// How many of `n` independent trials succeed, each with probability `p` (to 2^-32). Takes time in
    /// proportion to `n`.
    pub fn binomial(&mut self, n: u32, p: f64) -> u32 {
        if n == 0 || p <= 0.0 {
            return 0;
        }
        if p >= 1.0 {
            return n;
        }
        // Two trials a draw; 32 bits of probability are more than a model's numbers have.
        let bar = (p * 4_294_967_296.0) as u64;
        let mut hits = 0;
        for _ in 0..n / 2 {
            let draw = self.draw();
            hits += u32::from((draw >> 32) < bar) + u32::from((draw & 0xffff_ffff) < bar);
        }
        if n % 2 == 1 {
            hits += u32::from((self.draw() >> 32) < bar);
        }
        hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binomial_has_its_mean_and_variance() {
        let mut random = Random::new(1, 2);
        let draws: Vec<f64> = (0..20_000).map(|_| f64::from(random.binomial(101, 0.3))).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let var = draws.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!((mean - 30.3).abs() < 0.2, "{mean}");
        assert!((var - 21.21).abs() < 1.0, "{var}");
        assert_eq!(random.binomial(7, 0.0), 0);
        assert_eq!(random.binomial(7, 1.0), 7);
    }

    #[test]
    fn streams_repeat_and_differ() {
        let draw = |seed, stream| Random::new(seed, stream).draw();
        assert_eq!(draw(5, 6), draw(5, 6));
        assert_ne!(draw(5, 6), draw(5, 7));
        assert_ne!(draw(5, 6), draw(4, 6));
    }
}
