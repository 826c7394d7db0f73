//! What a VMM has its fault thread do for nothing: to look for pages that were announced as given up and stay, or to try
//! faults that nobody waits for. Either costs a VMM next to nothing, and the thread goes before others: so it may take a
//! part of a processor, and no more. What is beyond that the thread rests for, and its VM alone waits.

use std::time::{Duration, Instant};

/// Time that came to nothing.
#[derive(Debug)]
pub(super) struct Vain {
    /// What was not made up for, until `at`.
    debt: Duration,
    at: Instant,
}

impl Vain {
    /// One part of the time may come to nothing.
    const PART: u32 = 10;
    /// So much may beside that: of a VMM that does nothing wrong some does, too.
    pub const ALLOWED: Duration = Duration::from_secs(1);

    pub fn new(now: Instant) -> Vain {
        Vain { debt: Duration::ZERO, at: now }
    }

    /// So much has come to nothing.
    pub fn note(&mut self, now: Instant, took: Duration) {
        let passed = now.saturating_duration_since(self.at);
        self.debt = self.debt.saturating_sub(passed / Self::PART) + took;
        self.at = now;
    }

    /// What was not made up for when something was noted last.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub fn debt(&self) -> Duration {
        self.debt
    }

    /// For how long the thread is to rest.
    pub fn rest(&self, now: Instant) -> Duration {
        let owed = self.debt.saturating_sub(Self::ALLOWED) * Self::PART;
        owed.saturating_sub(now.saturating_duration_since(self.at))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn in_the_long_run_a_tenth_of_a_processor_comes_to_nothing() {
        let begun = Instant::now();
        let mut vain = Vain::new(begun);
        let (pass, mut now, mut spent) = (Duration::from_millis(300), begun, Duration::ZERO);
        let rests: Vec<bool> = (0..100)
            .map(|_| {
                now += pass;
                spent += pass;
                vain.note(now, pass);
                let rest = vain.rest(now);
                now += rest;
                assert_eq!(vain.rest(now), Duration::ZERO);
                !rest.is_zero()
            })
            .collect();
        assert_eq!(rests[..4], [false, false, false, true], "at first none");
        assert!(rests[4..].iter().all(|&rest| rest));
        let allowed = Vain::ALLOWED + (now - begun) / Vain::PART;
        assert!(spent <= allowed && spent + 2 * pass > allowed, "{spent:?} of {allowed:?}");
    }

    #[test]
    fn what_comes_to_nothing_now_and_then_is_forgotten() {
        let begun = Instant::now();
        let mut vain = Vain::new(begun);
        for s in 1..1_000 {
            let now = begun + Duration::from_secs(s);
            vain.note(now, Duration::from_millis(100));
            assert_eq!(vain.rest(now), Duration::ZERO);
        }
        let later = begun + Duration::from_secs(10_000);
        vain.note(later, Vain::ALLOWED);
        assert_eq!((vain.debt, vain.rest(later)), (Vain::ALLOWED, Duration::ZERO));
        vain.note(later, Duration::from_millis(1));
        assert_eq!(vain.rest(later), Duration::from_millis(10));
        assert_eq!(vain.rest(later + Duration::from_millis(4)), Duration::from_millis(6));
    }
}
