//! How much memory is kept free.
//!
//! OSDI'02 s.6.3 keeps 6% of memory free so that allocation never waits for reclamation. What of it is needed
//! depends on how fast guests allocate and pages leave: where eviction keeps up, most of a fixed reserve is memory
//! that nobody uses, and guests miss it. So the reserve is as large as was needed lately: larger at once when it was
//! nearly used up, smaller by little and little while it was not; the whole of it while VMs start.

use std::time::Duration;

use ballast_units::Pages;

use crate::state::{Scale, State, Thresholds};

/// What was seen since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trough {
    /// The least memory that was free at any instant.
    pub free: Pages,
    /// VMs start, or have started: they are about to touch all they have.
    pub starting: bool,
}

/// The thresholds of free memory of one host, as they follow what happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Reserve {
    scale: Scale,
    budget: Pages,
    /// Of the way from the lowest to the highest, of [`Thresholds::WHOLE`].
    part: u32,
    /// When it last grew, or shrank, on the caller's clock.
    since: Duration,
}

/// Growth where state low was reached: by a half of what may be above the lowest, at least.
const LOW: u32 = Thresholds::WHOLE / 2;
/// Growth where state hard was.
const HARD: u32 = Thresholds::WHOLE / 8;
/// How often one instant of shortage counts.
const ONCE: Duration = Duration::from_millis(250);
/// How long nothing of it was needed before it shrinks.
const CALM: Duration = Duration::from_secs(1);
/// By which part of what is above the lowest it shrinks then.
const SHRINK: u32 = 7;

impl Reserve {
    /// All that it may be, as of a host that starts.
    pub fn new(scale: Scale, budget: Pages) -> Reserve {
        Reserve { scale, budget, part: Thresholds::WHOLE, since: Duration::ZERO }
    }

    /// In force now.
    pub fn thresholds(&self) -> Thresholds {
        let most = self.scale.thresholds(self.budget);
        match self.scale {
            Scale::Measured => self.scale.least(self.budget).towards(&most, self.part),
            Scale::Percent | Scale::Sliding => most,
        }
    }

    /// Takes notice, at `now` of a clock that never goes back, of what was seen since the last call and of the
    /// settings as they are.
    pub fn step(
        &mut self,
        now: Duration,
        scale: Scale,
        budget: Pages,
        seen: &Trough,
    ) -> Thresholds {
        let thresholds = self.thresholds();
        self.scale = scale;
        self.budget = budget;
        let passed = now.saturating_sub(self.since);
        let grown = if seen.starting {
            Some(Thresholds::WHOLE)
        } else if passed < ONCE {
            None
        } else if seen.free < thresholds.lower_edge(State::Hard) {
            Some(self.part.saturating_add(LOW))
        } else if seen.free < thresholds.lower_edge(State::Soft) {
            Some(self.part.saturating_add(HARD))
        } else {
            None
        };
        if let Some(grown) = grown {
            self.part = grown.min(Thresholds::WHOLE);
            self.since = now;
        } else if passed >= CALM {
            self.part -= self.part.div_ceil(SHRINK);
            self.since = now;
        }
        self.thresholds()
    }
}

#[cfg(test)]
#[path = "reserve_tests.rs"]
mod tests;
