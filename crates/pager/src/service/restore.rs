//! What a shortage took from a region of large pages comes home unasked, once memory has been plentiful for a while:
//! a few pages that are away keep 2 MiB small, for as long as the guest does not touch them. Nobody waits for them, so
//! they come slowly, and only while nobody waits for anything else; by the thread that serves faults, for it knows which
//! pages the guest has given up.

use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::large::STEADY;

/// Pages that are asked for at a time.
const TOGETHER: usize = 8;
/// Between two such steps: 6 MiB a second at most.
const APART: Duration = Duration::from_millis(5);
/// Steps in which no page of a region came until it is given up: a page cannot be read, or not be told from others.
const PATIENCE: u32 = 40;
/// The same of steps in which pages were being read: a disk that is busy takes its time. Ten seconds.
const READS: u32 = 2000;
/// Steps after which pages that did not come are asked for again: what was read of them made room for what is wanted.
const AGAIN: u32 = 8;
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
    /// Steps in the region since a page of it came, those in which it was being read, and how many were away then.
    steps: u32,
    reading: u32,
    away: usize,
    /// The pages of the last step.
    last: Vec<Ppn>,
}

impl Restore {
    /// How long until there may be something to do.
    pub fn rest(&self, now: Instant) -> Duration {
        self.next.map_or(Duration::MAX, |next| next.saturating_duration_since(now))
    }

    /// Pages that are to come home now, away at this moment, and whether they are to be asked for; most of the time none.
    /// `away_in`: what is away of a region of `regions`, if it is worth bringing home. `is_read`: of pages that were asked
    /// for, whether any is being read.
    pub fn next(
        &mut self,
        regions: usize,
        plentiful: bool,
        away_in: impl Fn(usize) -> Vec<Ppn>,
        is_read: impl Fn(&[Ppn]) -> bool,
        now: Instant,
    ) -> (Vec<Ppn>, bool) {
        if regions == 0 || self.next.is_some_and(|next| now < next) {
            return (Vec::new(), false);
        }
        let reading = is_read(&self.last);
        let steady = self.is_steady(plentiful, now);
        let pages = if steady { self.look(regions, away_in, reading, now) } else { Vec::new() };
        let again = !reading && self.steps.is_multiple_of(AGAIN);
        let ask = !pages.is_empty() && (pages != self.last || again);
        self.last.clone_from(&pages);
        (pages, ask)
    }

    /// There is nothing to be done for any more: no large page will be made.
    pub fn end(&mut self) {
        self.next = None;
    }

    /// No more of the region for now.
    pub fn give_up(&mut self) {
        self.steps = PATIENCE;
    }

    fn look(
        &mut self,
        regions: usize,
        away_in: impl Fn(usize) -> Vec<Ppn>,
        reading: bool,
        now: Instant,
    ) -> Vec<Ppn> {
        for _ in 0..LOOKED_AT.min(regions) {
            let mut away = away_in(self.at % regions);
            if away.len() < self.away && self.steps < PATIENCE {
                (self.steps, self.reading, self.in_vain) = (0, 0, 0);
            }
            self.away = away.len();
            if !away.is_empty() && self.steps < PATIENCE {
                away.truncate(TOGETHER);
                if reading && self.reading < READS {
                    self.reading += 1;
                } else {
                    self.steps += 1;
                }
                self.next = Some(now + APART);
                return away;
            }
            self.at = (self.at + 1) % regions;
            (self.steps, self.reading, self.away) = (0, 0, 0);
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
    fn is_steady(&mut self, plentiful: bool, now: Instant) -> bool {
        if !plentiful {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of two regions, of which the first lacks a page.
    struct Guest {
        restore: Restore,
        now: Instant,
        away: Vec<Ppn>,
    }

    impl Guest {
        fn new() -> Guest {
            let now = Instant::now();
            let mut guest = Guest { restore: Restore::default(), now, away: vec![Ppn(3)] };
            assert_eq!(guest.step(false), (vec![], false));
            guest.now += STEADY;
            guest
        }

        fn step(&mut self, reading: bool) -> (Vec<Ppn>, bool) {
            let away = |region| if region == 0 { self.away.clone() } else { Vec::new() };
            let answer = self.restore.next(2, true, away, |_| reading, self.now);
            self.now += APART;
            answer
        }

        /// Steps until the region is given up, and how often its page was asked for.
        fn steps(&mut self, reading: bool) -> (u32, u32) {
            let (mut steps, mut asked) = (0, 0);
            while let (pages, ask) = self.step(reading)
                && !pages.is_empty()
            {
                (steps, asked) = (steps + 1, asked + u32::from(ask));
            }
            (steps, asked)
        }
    }

    #[test]
    fn a_page_that_does_not_come_is_asked_for_again_and_given_up() {
        let mut guest = Guest::new();
        assert_eq!(guest.steps(false), (PATIENCE, 1 + PATIENCE / AGAIN));
        // Nor is anything looked at until later.
        assert_eq!(guest.steps(false), (0, 0));
        guest.now += LOOKS;
        assert_eq!(guest.steps(false).0, PATIENCE);
    }

    #[test]
    fn a_page_that_is_being_read_is_waited_for() {
        let mut guest = Guest::new();
        for step in 0..10 * PATIENCE {
            assert_eq!(guest.step(true), (vec![Ppn(3)], step == 0));
        }
        // It came, but is not home: something is in the way.
        assert_eq!(guest.steps(false).0, PATIENCE);
        guest.now += LOOKS;
        assert_eq!(guest.steps(true), (READS + PATIENCE, 1), "a disk that does not answer");
    }

    #[test]
    fn a_look_in_between_changes_nothing() {
        let mut guest = Guest::new();
        assert_eq!(guest.step(false), (vec![Ppn(3)], true));
        guest.now -= APART;
        assert_eq!(guest.step(false), (vec![], false));
        assert_eq!(guest.step(false), (vec![Ppn(3)], false));
    }

    #[test]
    fn each_page_that_comes_is_progress() {
        let mut guest = Guest::new();
        guest.away = (0..20).map(Ppn).collect();
        for _ in 0..20 {
            for _ in 0..PATIENCE - 1 {
                assert!(!guest.step(false).0.is_empty());
            }
            guest.away.pop();
        }
        assert_eq!(guest.steps(false), (0, 0));
    }

    #[test]
    fn nothing_comes_before_memory_was_plentiful_for_a_while() {
        let mut guest = Guest::new();
        let away = |_| vec![Ppn(3)];
        let (short, now) = (Duration::from_millis(1), guest.now);
        let mut next = |plentiful, now| guest.restore.next(2, plentiful, away, |_| false, now).0;
        assert_eq!(next(false, now), []);
        assert_eq!(next(true, now + STEADY), []);
        assert_eq!(next(true, now + 2 * STEADY - short), []);
        assert_eq!(next(true, now + 2 * STEADY), [Ppn(3)]);
    }
}
