//! Keeps a loop to a rate, without catching up after a stall.

use std::time::{Duration, Instant};

pub struct Pace {
    /// Units per second; zero for as fast as it goes.
    rate: f64,
    due: Instant,
}

impl Pace {
    pub fn new(rate: f64) -> Pace {
        Pace { rate, due: Instant::now() }
    }

    pub fn set_rate(&mut self, rate: f64) {
        self.rate = rate;
    }

    /// Call after `units` of work: sleeps until they are due.
    pub fn spent(&mut self, units: u64) {
        if self.rate <= 0.0 {
            return;
        }
        let now = Instant::now();
        // At most a second of debt: a guest that was held up does not rush afterwards.
        let earliest = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        self.due = self.due.max(earliest) + Duration::from_secs_f64(units as f64 / self.rate);
        let wait = self.due.saturating_duration_since(now);
        // Timers of a guest are coarse; short sleeps cost more than they pace.
        if wait >= Duration::from_millis(10) {
            std::thread::sleep(wait);
        }
    }
}
