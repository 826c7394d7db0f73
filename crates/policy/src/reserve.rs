//! How much memory is kept free.
//!
//! OSDI'02 s.6.3 keeps 6% of memory free so that allocation never waits for reclamation. What of it is needed
//! depends on how fast guests allocate and pages leave: where eviction keeps up, most of a fixed reserve is memory
//! that nobody uses, and guests miss it. So the reserve is as large as was needed lately: larger at once when it was
//! nearly used up, smaller by little and little while memory is short of the whole of it and that is enough. In plenty,
//! where it costs nothing, all of it is kept, so that a shortage begins with it; and while room is made for VMs that start.
//! Only how early memory is reclaimed depends on it, by the means of state soft: where hard and low begin does not.

use std::time::Duration;

use ballast_units::Pages;

use crate::state::{Scale, State, Thresholds};

/// What was seen since the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trough {
    /// The least memory that was free at any instant.
    pub free: Pages,
    /// Room is made for VMs that start: they are about to touch all they have.
    pub starting: bool,
}

/// The thresholds of free memory of one host, as they follow what happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Reserve {
    scale: Scale,
    budget: Pages,
    /// Of the way from the lowest to the highest, of [`Thresholds::WHOLE`].
    part: u32,
    /// When it last grew, on the caller's clock; None: never.
    grown: Option<Duration>,
    /// When it last grew or shrank.
    changed: Duration,
    /// The least that was free and has not counted yet.
    least: Option<Pages>,
}

/// Growth where state low was reached: by a half of what may be above the lowest, at least.
const LOW: u32 = Thresholds::WHOLE / 2;
/// Growth where state hard was.
const HARD: u32 = Thresholds::WHOLE / 8;
/// How often a shortage counts.
const ONCE: Duration = Duration::from_millis(250);
/// How long it stays as it is before it shrinks.
const CALM: Duration = Duration::from_secs(1);
/// By which part of what is above the lowest it shrinks then.
const SHRINK: u32 = 7;

impl Reserve {
    /// The least that it may be: of a host that starts nobody knows what it needs, and one that takes over running VMs
    /// has no reason to take memory from them.
    pub fn new(scale: Scale, budget: Pages) -> Reserve {
        Reserve { scale, budget, part: 0, grown: None, changed: Duration::ZERO, least: None }
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
        let least = self.least.map_or(seen.free, |least| least.min(seen.free));
        self.least = Some(least);
        let counts = self.grown.is_none_or(|grown| now.saturating_sub(grown) >= ONCE);
        let plenty = scale.thresholds(budget).goal();
        let grown = if seen.starting || seen.free >= plenty && least >= plenty {
            Some(Thresholds::WHOLE)
        } else if !counts {
            None
        } else {
            self.least = None;
            if least < thresholds.lower_edge(State::Hard) {
                Some(self.part.saturating_add(LOW))
            } else if least < thresholds.lower_edge(State::Soft) {
                Some(self.part.saturating_add(HARD))
            } else {
                None
            }
        };
        if let Some(grown) = grown {
            self.part = grown.min(Thresholds::WHOLE);
            self.grown = Some(now);
            self.changed = now;
        } else if now.saturating_sub(self.changed) >= CALM {
            self.part -= self.part.div_ceil(SHRINK);
            self.changed = now;
        }
        self.thresholds()
    }
}

#[cfg(test)]
#[path = "reserve_tests.rs"]
mod tests;
