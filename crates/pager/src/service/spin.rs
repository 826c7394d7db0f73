//! How long the fault service looks for the next fault before it sleeps.
//!
//! Going to sleep and being woken costs more than serving a fault does. A guest that brings back many
//! pages faults again some microseconds after each answer, so looking that long saves the sleep. As
//! with the kernel's `halt_poll_ns`, the time adapts: it grows while faults come soon enough to be
//! caught, and goes to nothing when they do not. So a guest that does not fault costs nothing, and a
//! thread that looks is one that would have had to be woken 20,000 times a second.
//!
//! On a host whose cores are all in use, looking takes them from guests. A thread that lost its core
//! while it looked takes that as a sign, and sleeps at once for the next [`REST`].

use std::time::Duration;

/// The longest look. A fault that comes later than this is not worth waiting for.
const LONGEST: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(6);
/// Two looks further apart than this were not made by a thread that kept its core.
const LOST_CORE: Duration = Duration::from_micros(40);
const REST: Duration = Duration::from_millis(100);

/// What came of one wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// Something came while it looked.
    Caught,
    /// Something came after it had gone to sleep, this long after the wait began.
    Slept(Duration),
    /// It lost its core while it looked.
    Preempted,
}

#[derive(Debug, Default)]
pub(super) struct Spin {
    window: Duration,
    /// Time since the service began until which it only sleeps.
    rest_until: Duration,
}

impl Spin {
    /// How long to look now; `now` is the time since the service began.
    pub fn window(&self, now: Duration) -> Duration {
        if now < self.rest_until { Duration::ZERO } else { self.window }
    }

    /// Whether two looks so far apart show that the core was lost in between.
    pub fn lost_core(gap: Duration) -> bool {
        gap > LOST_CORE
    }

    /// What came of a wait that ended at `now`, the time since the service began.
    pub fn learn(&mut self, now: Duration, waited: Waited) {
        match waited {
            Waited::Caught => {}
            Waited::Slept(time) if time <= LONGEST => {
                self.window = (self.window * 2).clamp(SHORTEST, LONGEST);
            }
            Waited::Slept(_) => self.window = Duration::ZERO,
            Waited::Preempted => {
                self.window = Duration::ZERO;
                self.rest_until = now + REST;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn faults_that_come_soon_are_looked_for_and_others_are_not() {
        let mut spin = Spin::default();
        assert_eq!(spin.window(US), Duration::ZERO);
        for _ in 0..10 {
            spin.learn(US, Waited::Slept(12 * US));
        }
        assert_eq!(spin.window(US), LONGEST);
        spin.learn(US, Waited::Caught);
        assert_eq!(spin.window(US), LONGEST);
        spin.learn(US, Waited::Slept(3_000 * US));
        assert_eq!(spin.window(US), Duration::ZERO);
    }

    #[test]
    fn a_thread_that_loses_its_core_rests() {
        let mut spin = Spin::default();
        spin.learn(US, Waited::Slept(US));
        assert_eq!(spin.window(US), SHORTEST);
        assert!(Spin::lost_core(1_000 * US) && !Spin::lost_core(2 * US));
        spin.learn(US, Waited::Preempted);
        spin.learn(2 * US, Waited::Slept(US));
        assert_eq!(spin.window(2 * US), Duration::ZERO, "it rests");
        assert_eq!(spin.window(2 * US + REST), SHORTEST, "and then looks again");
    }
}
