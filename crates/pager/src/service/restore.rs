//! What a shortage took from a region of large pages comes home unasked, once memory has been plentiful for a while:
//! a few pages that are away keep 2 MiB small, for as long as the guest does not touch them. Nobody waits for them, so
//! they come slowly, and only while nobody waits for anything else; by the thread that serves faults, for it knows which
//! pages the guest has given up.

use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::large::STEADY;
use crate::backend::Backend;
use crate::memory::Memory;

/// Pages that are asked for at a time.
const TOGETHER: usize = 8;
/// Between two such steps: 6 MiB a second at most.
const APART: Duration = Duration::from_millis(5);
/// Steps in which no page of a region came until it is given up: a page cannot be read, or not be told from others.
const PATIENCE: u32 = 40;
/// Between two looks at all of the memory, if there was nothing to be done.
const LOOKS: Duration = Duration::from_secs(30);
/// Regions that are looked at in one go.
const LOOKED_AT: usize = 16;

/// Which pages come next, and when.
#[derive(Debug, Default)]
pub(super) struct Restore {
    plentiful_since: Option<Instant>,
    next: Option<Instant>,
    /// The region that is looked at next, or worked on, and how many there were in vain.
    at: usize,
    in_vain: usize,
    /// Steps in the region since a page of it came, and how many were away then.
    steps: u32,
    away: usize,
    /// The pages of the last step.
    last: Vec<Ppn>,
}

impl Restore {
    /// How long until there may be something to do.
    pub fn rest(&self, now: Instant) -> Duration {
        self.next.map_or(Duration::MAX, |next| next.saturating_duration_since(now))
    }

    /// Pages that are to come home now, away at this moment, and whether they are others than the last time; most of
    /// the time none.
    pub fn next<B: Backend>(&mut self, memory: &Memory<B>, now: Instant) -> (Vec<Ppn>, bool) {
        let pages = self.look(memory, now);
        let new = pages != self.last;
        self.last.clone_from(&pages);
        (pages, new)
    }

    /// There is nothing to be done for any more: no large page will be made.
    pub fn end(&mut self) {
        self.next = None;
    }

    /// No more of the region for now.
    pub fn give_up(&mut self) {
        self.steps = PATIENCE;
    }

    fn look<B: Backend>(&mut self, memory: &Memory<B>, now: Instant) -> Vec<Ppn> {
        let regions = memory.regions().len();
        if regions == 0 || self.next.is_some_and(|next| now < next) {
            return Vec::new();
        }
        if !self.is_steady(memory, now) {
            return Vec::new();
        }
        for _ in 0..LOOKED_AT.min(regions) {
            let mut away = memory.away_in(self.at % regions);
            if away.len() < self.away && self.steps < PATIENCE {
                self.steps = 0;
                self.in_vain = 0;
            }
            self.away = away.len();
            if !away.is_empty() && self.steps < PATIENCE {
                away.truncate(TOGETHER);
                self.steps += 1;
                self.next = Some(now + APART);
                return away;
            }
            self.at = (self.at + 1) % regions;
            (self.steps, self.away) = (0, 0);
            self.in_vain += 1;
            if self.in_vain >= regions {
                self.in_vain = 0;
                self.next = Some(now + LOOKS);
                return Vec::new();
            }
        }
        self.next = Some(now + APART);
        Vec::new()
    }

    /// Whether memory has been plentiful for long enough; if not, it says when to look again.
    fn is_steady<B: Backend>(&mut self, memory: &Memory<B>, now: Instant) -> bool {
        if !memory.is_plentiful() {
            self.plentiful_since = None;
            self.next = Some(now + STEADY);
            return false;
        }
        let since = *self.plentiful_since.get_or_insert(now);
        let steady = now.saturating_duration_since(since) >= STEADY;
        if !steady {
            self.next = Some(since + STEADY);
        }
        steady
    }
}
