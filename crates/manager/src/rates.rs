//! What counters grow by in a second.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Rates are of the last stretch of at least this length.
const STRETCH: Duration = Duration::from_secs(1);

/// The rates of `N` counters, as of the last time they were noted.
pub struct Rates<const N: usize>(Mutex<Noted<N>>);

struct Noted<const N: usize> {
    at: Instant,
    counts: [f64; N],
    rates: [f64; N],
}

impl<const N: usize> Default for Rates<N> {
    fn default() -> Rates<N> {
        Rates(Mutex::new(Noted { at: Instant::now(), counts: [0.0; N], rates: [0.0; N] }))
    }
}

impl<const N: usize> Rates<N> {
    /// To be called often; what comes too soon after the last is passed over.
    pub fn note(&self, counts: [f64; N]) {
        self.note_at(Instant::now(), counts);
    }

    fn note_at(&self, now: Instant, counts: [f64; N]) {
        let mut noted = lock(&self.0);
        let passed = now - noted.at;
        if passed >= STRETCH {
            let rate = |i: usize| (counts[i] - noted.counts[i]).max(0.0) / passed.as_secs_f64();
            let rates = std::array::from_fn(rate);
            *noted = Noted { at: now, counts, rates };
        }
    }

    /// Per second.
    pub fn get(&self) -> [f64; N] {
        lock(&self.0).rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_whole_stretches() {
        let rates = Rates::<2>::default();
        let start = lock(&rates.0).at;
        rates.note_at(start + Duration::from_millis(10), [1000.0, 0.0]);
        assert_eq!(rates.get(), [0.0, 0.0], "too soon to tell");
        rates.note_at(start + Duration::from_secs(2), [1000.0, 4.0]);
        assert_eq!(rates.get(), [500.0, 2.0]);
        rates.note_at(start + Duration::from_secs(4), [1000.0, 0.0]);
        assert_eq!(rates.get(), [0.0, 0.0], "a counter that began anew");
    }
}
