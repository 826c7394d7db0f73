//! What a guest does with its memory over time: how much it uses again and again (active), and how much
//! it holds (used). Synthetic, or recorded.

use std::sync::Arc;

use ballast_units::Pages;

use crate::Millis;
use crate::random::Random;

/// What a guest would use at one moment, if it had it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Touched again and again.
    pub active: Pages,
    /// Held, with what is active: at least as much.
    pub used: Pages,
}

impl Demand {
    /// Raises `used` to `active` where it is below.
    pub fn new(active: Pages, used: Pages) -> Demand {
        Demand { active, used: used.max(active) }
    }
}

/// The shape of a load: what is active, and what is used, at each moment since the VM started. `used` is
/// the same all the time where nothing else is said.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// The same all the time.
    Steady { active: Pages, used: Pages },
    /// Between two levels, for exponentially distributed times with these means.
    Bursty {
        low: Pages,
        high: Pages,
        used: Pages,
        /// Mean time at `high`.
        on: Millis,
        /// Mean time at `low`, where it begins.
        off: Millis,
    },
    /// A sine from `low` to `high` and back, in 288 steps.
    Diurnal {
        low: Pages,
        high: Pages,
        used: Pages,
        period: Millis,
        /// Each VM begins up to this much later in its day.
        jitter: Millis,
    },
    /// Holds more and more, until nothing is left; then it is restarted.
    Leak {
        active: Pages,
        /// Held at first, and after each restart.
        from: Pages,
        /// Where it is restarted.
        to: Pages,
        per_hour: Pages,
    },
    /// Takes a step up or down every so often, between bounds.
    Walk {
        /// The lower bound; it begins about in the middle.
        low: Pages,
        high: Pages,
        step: Pages,
        every: Millis,
        used: Pages,
    },
    /// Levels with the moments they begin at, in order.
    Recorded(Arc<[(Millis, Demand)]>),
}

/// A load as it runs.
#[derive(Clone, Debug)]
pub struct Load {
    shape: Shape,
    random: Random,
    demand: Demand,
    /// When it next changes, since the VM's start.
    next: Millis,
    phase: Millis,
    at: usize,
    high: bool,
}

const STEPS_A_DAY: u64 = 288;
/// A leak grows in steps of this length.
const LEAK_STEP: Millis = 60_000;

impl Load {
    /// At the VM's start.
    pub fn new(shape: Shape, mut random: Random) -> Load {
        let phase = match &shape {
            Shape::Diurnal { jitter, .. } => (random.unit() * *jitter as f64) as Millis,
            _ => 0,
        };
        let mut load =
            Load { shape, random, demand: Demand::default(), next: 0, phase, at: 0, high: false };
        load.demand = load.first();
        load.advance(0);
        load
    }

    fn first(&self) -> Demand {
        match self.shape {
            Shape::Walk { low, high, used, .. } => Demand::new(Pages(low.0.midpoint(high.0)), used),
            _ => Demand::default(),
        }
    }

    /// At the moment that it was last taken to.
    pub fn demand(&self) -> Demand {
        self.demand
    }

    /// When it changes next, since the VM's start; `Millis::MAX`: never.
    pub fn next(&self) -> Millis {
        self.next
    }

    /// Goes on to `now`, since the VM's start, which never goes back.
    pub fn advance(&mut self, now: Millis) {
        while self.next <= now {
            let at = self.next;
            self.change(at);
        }
    }

    fn change(&mut self, at: Millis) {
        match &self.shape {
            Shape::Steady { active, used } => {
                self.demand = Demand::new(*active, *used);
                self.next = Millis::MAX;
            }
            Shape::Bursty { low, high, used, on, off } => {
                self.high = at > 0 && !self.high;
                let (level, mean) = if self.high { (*high, *on) } else { (*low, *off) };
                self.demand = Demand::new(level, *used);
                let length = self.random.exponential(mean as f64) as Millis;
                self.next = at + length.max(1_000);
            }
            Shape::Diurnal { low, high, used, period, .. } => {
                let turn = ((at + self.phase) % period) as f64 / *period as f64;
                let part = 0.5 - 0.5 * (turn * std::f64::consts::TAU).cos();
                let active = low.0 + ((high.0 - low.0) as f64 * part) as u64;
                self.demand = Demand::new(Pages(active), *used);
                self.next = at + (period / STEPS_A_DAY).max(1_000);
            }
            Shape::Leak { active, from, to, per_hour } => {
                let span = to.saturating_sub(*from).0.max(1);
                let grown = (u128::from(per_hour.0) * u128::from(at) / 3_600_000) as u64 % span;
                self.demand = Demand::new(*active, *from + Pages(grown));
                self.next = at + LEAK_STEP;
            }
            Shape::Walk { low, high, step, every, used } => {
                let up = self.random.unit() < 0.5;
                let now = self.demand.active;
                let active =
                    if up { (now + *step).min(*high) } else { now.saturating_sub(*step).max(*low) };
                self.demand = Demand::new(active, *used);
                self.next = at + every;
            }
            Shape::Recorded(points) => {
                while let Some(&(_, demand)) = points.get(self.at).filter(|(t, _)| *t <= at) {
                    self.demand = demand;
                    self.at += 1;
                }
                self.next = points.get(self.at).map_or(Millis::MAX, |(t, _)| *t);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(shape: Shape, until: Millis) -> Vec<(Millis, Demand)> {
        let mut load = Load::new(shape, Random::new(7, 0));
        let mut seen = vec![(0, load.demand())];
        while load.next() <= until {
            let at = load.next();
            load.advance(at);
            seen.push((at, load.demand()));
        }
        seen
    }

    #[test]
    fn a_steady_load_never_changes() {
        let seen = run(Shape::Steady { active: Pages(5), used: Pages(3) }, 1 << 40);
        assert_eq!(seen, [(0, Demand { active: Pages(5), used: Pages(5) })]);
    }

    #[test]
    fn bursts_alternate_with_their_mean_lengths() {
        let shape = Shape::Bursty {
            low: Pages(1),
            high: Pages(9),
            used: Pages(9),
            on: 20_000,
            off: 60_000,
        };
        let seen = run(shape, 80_000_000);
        assert!((seen.len() as f64 - 2_000.0).abs() < 200.0, "{}", seen.len());
        for (a, b) in seen.iter().zip(&seen[1..]) {
            assert_ne!(a.1.active, b.1.active);
        }
        let on: u64 =
            seen.windows(2).filter(|w| w[0].1.active == Pages(9)).map(|w| w[1].0 - w[0].0).sum();
        assert!((on as f64 / 80_000_000.0 - 0.25).abs() < 0.03, "{on}");
    }

    #[test]
    fn a_day_goes_from_low_to_high_and_back() {
        let shape = Shape::Diurnal {
            low: Pages(100),
            high: Pages(900),
            used: Pages(900),
            period: 86_400_000,
            jitter: 0,
        };
        let seen = run(shape, 86_400_000);
        assert_eq!(seen.len(), 289);
        assert_eq!(seen[0].1.active, Pages(100));
        assert_eq!(seen[144].1.active, Pages(900));
        assert_eq!(seen[288].1.active, Pages(100));
    }

    #[test]
    fn a_leak_grows_and_is_restarted() {
        let shape = Shape::Leak {
            active: Pages(10),
            from: Pages(100),
            to: Pages(700),
            per_hour: Pages(600),
        };
        let seen = run(shape, 3_600_000);
        assert_eq!(seen[30].1.used, Pages(400));
        assert_eq!(seen[59].1.used, Pages(690));
        assert_eq!(seen[60].1.used, Pages(100));
    }

    #[test]
    fn a_walk_stays_between_its_bounds() {
        let shape = Shape::Walk {
            low: Pages(10),
            high: Pages(20),
            step: Pages(3),
            every: 1_000,
            used: Pages(25),
        };
        let seen = run(shape, 1_000_000);
        assert!(seen.iter().all(|(_, d)| (10..=20).contains(&d.active.0)));
        assert!(seen.iter().any(|(_, d)| d.active.0 == 10));
        assert!(seen.iter().any(|(_, d)| d.active.0 == 20));
    }

    #[test]
    fn what_was_recorded_is_played_back() {
        let d = |a| Demand::new(Pages(a), Pages(50));
        let points: Arc<[_]> = [(0, d(1)), (5_000, d(2)), (9_000, d(3))].into();
        assert_eq!(run(Shape::Recorded(points.clone()), 1 << 40), points.to_vec());
    }
}
