//! How fast pages are looked at: so many a second and so much of a core, for the host and for each
//! VM. What a look cost is known afterwards, so each look pays for the next: whoever has looked rests
//! until all limits allow for what it did.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Limits of one scope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Pages a second.
    pub pages_per_s: f64,
    /// CPU time of the looking threads, in cores.
    pub cores: f64,
}

/// What a look cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Pages that were read and hashed.
    pub pages: u64,
    /// CPU time of the thread that looked.
    pub cpu: Duration,
    /// Time in which the VM's mappings were locked against its own faults.
    pub locked: Duration,
}

/// Largest part of the time in which a VM's mappings may be changed.
const LOCKED: f64 = 0.1;
/// What was not used is not saved up, or a rest would be followed by a burst.
const BURST: Duration = Duration::from_millis(20);
/// What one look cost, however much, is not paid off for longer: those that share a limit would do it.
const DEBT: Duration = Duration::from_secs(10);

/// When the next look is allowed. Shared by all who are limited by it.
#[derive(Debug)]
pub struct Limiter {
    begin: Instant,
    /// Nanoseconds since `begin` that are paid for.
    until: AtomicU64,
}

impl Default for Limiter {
    fn default() -> Limiter {
        Limiter { begin: Instant::now(), until: AtomicU64::new(0) }
    }
}

impl Limiter {
    /// Pays for a look; answers how long to rest from now on.
    pub fn pay(&self, limits: Limits, cost: Cost) -> Duration {
        self.pay_at(self.begin.elapsed(), limits, cost)
    }

    /// How long to rest yet for what was done.
    pub fn owed(&self) -> Duration {
        let until = Duration::from_nanos(self.until.load(Ordering::Relaxed));
        until.saturating_sub(self.begin.elapsed())
    }

    fn pay_at(&self, now: Duration, limits: Limits, cost: Cost) -> Duration {
        let seconds = (cost.pages as f64 / limits.pages_per_s.max(1.0))
            .max(cost.cpu.as_secs_f64() / limits.cores.max(1e-6))
            .max(cost.locked.as_secs_f64() / LOCKED);
        let price = (seconds * 1e9).min(60e9) as u64;
        let now = now.as_nanos() as u64;
        let floor = now.saturating_sub(BURST.as_nanos() as u64);
        let most = now + DEBT.as_nanos() as u64;
        let owed = |until: u64| (until.max(floor) + price).min(most);
        let before = self
            .until
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |t| Some(owed(t)))
            .unwrap_or(0);
        Duration::from_nanos(owed(before).saturating_sub(now))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Pages looked at in `seconds` by one who rests as told.
    fn looks(limits: Limits, cost: Cost, seconds: u64) -> u64 {
        let limiter = Limiter::default();
        let (mut now, mut pages) = (Duration::ZERO, 0);
        while now < Duration::from_secs(seconds) {
            pages += cost.pages;
            now += limiter.pay_at(now, limits, cost) + Duration::from_nanos(1);
        }
        pages
    }

    #[test]
    fn the_tightest_limit_rules() {
        let cost = Cost { pages: 64, cpu: Duration::from_micros(64), locked: Duration::ZERO };
        let near = |got: u64, want: u64| {
            assert!(got.abs_diff(want) <= want / 20, "{got} instead of {want}");
        };
        // 10 s at 1,000 pages/s; at 1 us a page, 1% of a core is 10,000 pages/s.
        near(looks(Limits { pages_per_s: 1000.0, cores: 0.5 }, cost, 10), 10_000);
        near(looks(Limits { pages_per_s: 1e9, cores: 0.01 }, cost, 10), 100_000);
        let locked = Cost { locked: Duration::from_micros(640), ..cost };
        near(looks(Limits { pages_per_s: 1e9, cores: 1.0 }, locked, 10), 100_000);
    }

    /// Whoever is slow is not paid for by everybody for hours.
    #[test]
    fn a_debt_is_bounded() {
        let limiter = Limiter::default();
        let limits = Limits { pages_per_s: 1e9, cores: 1.0 };
        let slow = Cost { locked: Duration::from_secs(2), ..Cost::default() };
        let hour = Duration::from_secs(3600);
        for _ in 0..10 {
            assert!(limiter.pay_at(hour, limits, slow) <= DEBT);
        }
        let quick = Cost { pages: 1, ..Cost::default() };
        assert_eq!(limiter.pay_at(hour, limits, quick), DEBT);
        let later = hour + DEBT + Duration::from_secs(1);
        assert!(limiter.pay_at(later, limits, quick) < Duration::from_millis(1));
    }

    #[test]
    fn what_is_owed_is_known_until_it_is_paid() {
        let limiter = Limiter::default();
        assert_eq!(limiter.owed(), Duration::ZERO);
        let cost = Cost { cpu: Duration::from_secs(1), ..Cost::default() };
        let rest = limiter.pay(Limits { pages_per_s: 1e9, cores: 0.2 }, cost);
        let owed = limiter.owed();
        assert!(owed <= rest && owed > Duration::from_secs(4), "{owed:?} of {rest:?}");
    }

    #[test]
    fn a_rest_is_not_saved_up() {
        let limiter = Limiter::default();
        let limits = Limits { pages_per_s: 1000.0, cores: 1.0 };
        let cost = Cost { pages: 100, ..Cost::default() };
        let hour = Duration::from_secs(3600);
        assert_eq!(limiter.pay_at(hour, limits, cost), Duration::from_millis(80));
        assert_eq!(limiter.pay_at(hour, limits, cost), Duration::from_millis(180));
    }
}
