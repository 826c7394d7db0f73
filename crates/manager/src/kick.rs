//! The bell of the policy thread: anyone may ring it, from any thread, without waiting.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::sync::lock;

/// Rings that come before the thread looks are one ring, with the reason of the last.
#[derive(Default)]
pub struct Kick {
    why: Mutex<Option<String>>,
    bell: Condvar,
}

impl Kick {
    /// Rings for a threshold crossing. Cheap, and never waits for a computation that runs.
    pub fn crossing(&self) {
        self.ring_if_quiet("free memory crossed a threshold");
    }

    fn ring_if_quiet(&self, why: &str) {
        let mut slot = lock(&self.why);
        if slot.is_none() {
            *slot = Some(why.to_owned());
            self.bell.notify_one();
        }
    }

    /// Rings for something that a person or a VM did.
    pub fn ring(&self, why: impl Into<String>) {
        *lock(&self.why) = Some(why.into());
        self.bell.notify_one();
    }

    /// Waits for a ring, at most so long. Answers its reason; None for the period.
    pub fn wait(&self, at_most: Duration) -> Option<String> {
        let slot = lock(&self.why);
        let (mut slot, _) = self
            .bell
            .wait_timeout_while(slot, at_most, |why| why.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost_and_events_win_over_crossings() {
        let kick = Kick::default();
        kick.crossing();
        kick.ring("parameters of a changed");
        kick.crossing();
        let why = kick.wait(Duration::from_secs(60));
        assert_eq!(why.as_deref(), Some("parameters of a changed"));
        assert_eq!(kick.wait(Duration::ZERO), None);
    }
}
