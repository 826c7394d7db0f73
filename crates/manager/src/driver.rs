//! Whether a guest has a balloon driver, as far as it was heard of. A machine that is reset has none until the system that
//! comes up brings one: a balloon that is set before that is inflated without any rate.

use std::time::{Duration, Instant};

use ballast_units::Pages;

/// QEMU tells of a balloon that moves once a second: what it tells so soon after a reset may have been before.
const HELD_BACK: Duration = Duration::from_secs(2);

/// What is known of the driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Driver {
    is_alive: bool,
    /// When the machine was reset last.
    reset: Option<Instant>,
    said: Said,
}

/// What QEMU says of a balloon after a reset, which empties it: what it was before, until its driver tells another size.
#[derive(Clone, Copy, Debug, Default)]
enum Said {
    /// What it is.
    #[default]
    Now,
    /// What it was when the machine was reset, which was not looked at since.
    Before,
    /// The same, which was this.
    Was(Pages),
}

impl Driver {
    /// Whether it was heard of, since the last reset.
    pub fn is_alive(&self) -> bool {
        self.is_alive
    }

    /// The machine was reset.
    pub fn was_reset(&mut self, now: Instant) {
        *self = Driver { is_alive: false, reset: Some(now), said: Said::Before };
    }

    /// There are statistics that the driver sent so many seconds ago, give or take one.
    pub fn has_told(&mut self, age_s: u64, now: Instant) {
        self.is_alive |= self.is_since_reset(Duration::from_secs(age_s.saturating_add(1)), now);
    }

    /// The balloon's size has changed.
    pub fn has_moved(&mut self, now: Instant) {
        if self.is_since_reset(HELD_BACK, now) {
            (self.is_alive, self.said) = (true, Said::Now);
        }
    }

    /// What the balloon holds of which QEMU says that it is `said`.
    pub fn holds(&mut self, said: Pages) -> Pages {
        self.said = match self.said {
            Said::Before => Said::Was(said),
            Said::Was(before) if before == said => return Pages::ZERO,
            Said::Was(_) | Said::Now => Said::Now,
        };
        if matches!(self.said, Said::Now) { said } else { Pages::ZERO }
    }

    /// The balloon holds something, which somebody has filled it with. After a reset it says what it held before.
    pub fn holds_something(&mut self) {
        self.is_alive |= self.reset.is_none();
    }

    /// Whether what is as old as that was not before the reset.
    fn is_since_reset(&self, age: Duration, now: Instant) -> bool {
        self.reset.is_none_or(|reset| age <= now.saturating_duration_since(reset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_heard_of_it_it_is_there_until_a_reset() {
        let now = Instant::now();
        let heard: [fn(&mut Driver, Instant); 3] = [
            |driver, now| driver.has_told(1 << 40, now),
            |driver, now| driver.has_moved(now),
            |driver, _| driver.holds_something(),
        ];
        for hear in heard {
            let mut driver = Driver::default();
            assert!(!driver.is_alive());
            hear(&mut driver, now);
            assert!(driver.is_alive());
            driver.was_reset(now);
            assert!(!driver.is_alive());
        }
    }

    #[test]
    fn what_qemu_says_after_a_reset_is_what_was_before_until_it_says_something_else() {
        let now = Instant::now();
        let mut driver = Driver::default();
        assert_eq!(driver.holds(Pages(7)), Pages(7));
        driver.was_reset(now);
        assert_eq!([7, 7, 8, 7].map(|said| driver.holds(Pages(said)).0), [0, 0, 8, 7]);
        driver.was_reset(now);
        assert_eq!(driver.holds(Pages(7)), Pages::ZERO);
        // Its driver made it as large again between two looks.
        driver.has_moved(now + HELD_BACK);
        assert_eq!(driver.holds(Pages(7)), Pages(7));
    }

    #[test]
    fn what_was_before_the_reset_is_heard_of_no_driver() {
        let reset = Instant::now();
        let after = |ms: u64| reset + Duration::from_millis(ms);
        let alive = |hear: &dyn Fn(&mut Driver)| {
            let mut driver = Driver::default();
            driver.was_reset(reset);
            hear(&mut driver);
            driver.is_alive()
        };
        // Seconds are cut off: one that seems to be of the same moment may be a second old.
        for (age_s, ms, is) in
            [(0, 999, false), (0, 1_000, true), (3, 3_999, false), (3, 4_000, true)]
        {
            assert_eq!(alive(&|driver| driver.has_told(age_s, after(ms))), is, "{age_s} {ms}");
        }
        assert!(!alive(&|driver| driver.has_told(u64::MAX, after(60_000))));
        for (ms, is) in [(0, false), (1_999, false), (2_000, true)] {
            assert_eq!(alive(&|driver| driver.has_moved(after(ms))), is, "{ms}");
        }
        assert!(!alive(&Driver::holds_something));
    }
}
