//! A VM's miss curve, from the moments at which its sampled pages are touched.
//!
//! The sampler (`working_set`) takes a random page at a random moment and sees whether it is touched
//! within the period. When it is touched, R after that moment, says more: how many misses the VM
//! would have with any allocation, under the replacement that the pager does.
//!
//! Replacement is random: a page that is in memory leaves it at the same rate 1/T whatever its age
//! and use. Think of marks that come to each page at that rate, always, and put it out if it is in.
//! Then a page is in memory at a moment exactly if no mark came since it was last touched, which has
//! the probability E[exp(-A/T)], A being the time since. In any stationary sequence of touches, A and
//! R, the time until the next touch, have the same distribution. So of N pages
//!
//! ```text
//!   C(T) = N * E[exp(-R/T)]      are in memory (the allocation),
//!   M(T) = C(T) / T              leave it per second, and so many come: the misses.
//! ```
//!
//! T is the parameter of the curve. This is Che's approximation for random replacement (C. Fricker et
//! al., "A versatile and accurate approximation for LRU cache performance", ITC'12; its one assumption
//! is that T hardly varies, which holds for many pages). The average-eviction-time model (X. Hu et al.,
//! "Kinetic Modeling of Data Eviction in Cache", ATC'16) is the same for LRU, where M is the slope of C:
//! a slope of sampled counts is noisy, the quotient is not. docs/adr/0020-inputs-of-policies.md.
//!
//! A sampled page that is swapped or ballooned counts as any other, so that touches of pages that
//! were evicted long ago are among the samples already. One that is not touched in its period counts
//! as never touched, as it counts as idle in `working_set`.

use std::time::Duration;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::working_set::SamplingConfig;

/// Buckets of R, each `STEP` times as long as the one before; the last ends with the period, the first
/// (10 ms of 30 s) begins at zero.
const BUCKETS: usize = 24;
const STEP: f64 = std::f64::consts::SQRT_2;
/// Values of T, from that of the first bucket on, each `STEP` times the one before: up to 8 periods.
const POINTS: usize = BUCKETS + 6;

/// The end of a bucket in periods.
fn end_of(bucket: usize) -> f64 {
    STEP.powi(bucket as i32 + 1 - BUCKETS as i32)
}

/// Parts of the samples that were touched, by R.
type Parts = [f64; BUCKETS];

fn touched_part(parts: &Parts) -> f64 {
    parts.iter().sum()
}

fn toward(average: &Parts, now: &Parts, gain: f64) -> Parts {
    std::array::from_fn(|i| average[i] + gain * (now[i] - average[i]))
}

#[derive(Clone, Copy, Debug)]
struct Period {
    sampled: u32,
    touched: u32,
    counts: [u32; BUCKETS],
}

impl Period {
    fn parts(&self) -> Parts {
        self.counts.map(|count| f64::from(count) / f64::from(self.sampled.max(1)))
    }
}

/// Averages of when pages are touched: what one estimator hands on to the next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TouchAverages {
    /// Of the periods behind them: they say nothing of others.
    period: Duration,
    slow: Parts,
    fast: Parts,
}

/// What is known of one VM: averages as of [`WorkingSet`](crate::WorkingSet), so that a VM's curve rises
/// as quickly as its active memory.
#[derive(Clone, Debug)]
pub struct TouchTimes {
    config: SamplingConfig,
    /// Slow and fast.
    averages: Option<(Parts, Parts)>,
    period: Option<Period>,
}

impl TouchTimes {
    /// `config` should have passed [`SamplingConfig::check`].
    pub fn new(config: SamplingConfig) -> TouchTimes {
        TouchTimes { config, averages: None, period: None }
    }

    /// The averages, without the period that runs. None before the first is complete.
    pub fn averages(&self) -> Option<TouchAverages> {
        let (slow, fast) = self.averages?;
        Some(TouchAverages { period: self.config.period, slow, fast })
    }

    /// Goes on with what another estimator of this VM has found, unless that had another period, or is nonsense.
    pub fn resume(&mut self, found: &TouchAverages) {
        // Sums of what is a part of a whole may be off by the last digit.
        let is_good = |parts: &Parts| {
            parts.iter().all(|part| (0.0..=1.0).contains(part)) && touched_part(parts) <= 1.001
        };
        if found.period == self.config.period && is_good(&found.slow) && is_good(&found.fast) {
            self.averages = Some((found.slow, found.fast));
        }
    }

    /// For what comes. With another length of period, what was measured says nothing any more.
    pub fn set_config(&mut self, config: SamplingConfig) {
        if config.period != self.config.period {
            *self = TouchTimes::new(config);
        }
        self.config = config;
    }

    /// A new period begins with `sampled` pages under sample; one that runs is dropped.
    pub fn begin_period(&mut self, sampled: u32) {
        self.period = Some(Period { sampled, touched: 0, counts: [0; BUCKETS] });
    }

    /// A sampled page was touched, so much VM execution time after it came under sample. Never more
    /// pages than are under sample; without a period it has no effect.
    pub fn touched(&mut self, after: Duration) {
        let Some(period) = self.period.as_mut().filter(|p| p.touched < p.sampled) else { return };
        let after = after.as_secs_f64() / self.config.period.as_secs_f64().max(1e-9);
        let bucket = (0..BUCKETS).find(|&i| after <= end_of(i)).unwrap_or(BUCKETS - 1);
        period.touched += 1;
        period.counts[bucket] += 1;
    }

    /// Ends the period and takes it into the averages. One without samples tells nothing.
    pub fn end_period(&mut self) {
        let Some(period) = self.period.take().filter(|p| p.sampled > 0) else { return };
        let now = period.parts();
        self.averages = Some(match &self.averages {
            None => (now, now),
            Some((slow, fast)) => (
                toward(slow, &now, self.config.slow_gain),
                toward(fast, &now, self.config.fast_gain),
            ),
        });
    }

    /// The part that is touched is the largest of three averages, as in `working_set`; when it is
    /// touched, all of them tell, each as much as there are periods behind it.
    fn parts(&self) -> Option<Parts> {
        let (slow, fast) = self.averages.as_ref()?;
        let running = self.period.as_ref().map_or([0.0; BUCKETS], Period::parts);
        // What the running period has counted so far only grows: it may raise, and not lower.
        let rise = (touched_part(&running) - touched_part(fast)).max(0.0);
        let current = touched_part(fast) + self.config.fast_gain * rise;
        let touched = touched_part(slow).max(touched_part(fast)).max(current);
        let periods = |gain: f64| (2.0 - gain) / gain.max(1e-3);
        let (of_slow, of_fast) = (periods(self.config.slow_gain), periods(self.config.fast_gain));
        let all: Parts =
            std::array::from_fn(|i| of_slow * slow[i] + of_fast * fast[i] + running[i]);
        let scale = touched / touched_part(&all).max(f64::MIN_POSITIVE);
        Some(all.map(|part| part * scale))
    }

    /// Pages, and misses per second of execution with so many, of a VM of `size`: pages rise from 0 and
    /// misses fall to 0. None before the first period is complete.
    pub fn curve(&self, size: Pages) -> Option<Vec<(Pages, f64)>> {
        let parts = self.parts()?;
        let period_s = self.config.period.as_secs_f64().max(1e-9);
        let density = falling(&parts);
        let size_f = size.0 as f64;
        // exp(-R/T) at the ends of buckets, by their distance from T in steps, from far below on.
        let left: [f64; POINTS + BUCKETS] =
            std::array::from_fn(|k| (-STEP.powi(k as i32 + 1 - POINTS as i32)).exp());
        let mut points = vec![(Pages(0), size_f * density[0] / period_s)];
        for i in 0..POINTS {
            // In periods; C is summed over buckets in which R is spread evenly.
            let t = end_of(0) * STEP.powi(i as i32);
            let ends = &left[POINTS - 1 - i..];
            let mut before = 1.0;
            let mut there = 0.0;
            for (density, end) in density.iter().zip(ends) {
                there += density * t * (before - end);
                before = *end;
            }
            let pages = Pages((size_f * there).round() as u64);
            let misses = size_f * there / (t * period_s);
            if let Some(last) = points.last().filter(|last| last.0 < pages) {
                // Where it is level, rounding could make it rise.
                points.push((pages, misses.min(last.1)));
            }
        }
        let active = Pages((size_f * touched_part(&parts)).round() as u64);
        points.push((active.min(size).max(points.last().map_or(Pages(0), |p| p.0)), 0.0));
        points.dedup_by(|later, earlier| {
            // Where two say how many misses so many pages have, the lower one does.
            let same = later.0 == earlier.0;
            if same {
                earlier.1 = earlier.1.min(later.1);
            }
            same
        });
        Some(points)
    }

    /// What must hold of any curve; an error are the points that contradict each other.
    #[cfg(test)]
    pub fn check(points: &[(Pages, f64)]) -> Result<(), String> {
        let falls = |pair: &[(Pages, f64)]| pair[0].0 < pair[1].0 && pair[0].1 >= pair[1].1;
        match points.windows(2).find(|pair| !falls(pair)) {
            Some(pair) => Err(format!("{:?} then {:?}", pair[0], pair[1])),
            None => Ok(()),
        }
    }
}

/// Touches per page and period at each R, as they must be: the density of R never rises (it is the
/// rate of touches times the chance that the next one takes longer), so a bucket with more than the one
/// before it is noise, and the two have their average (pool adjacent violators: U. Grenander's maximum
/// likelihood estimate of a falling density, 1956).
fn falling(parts: &Parts) -> Parts {
    // (parts, width, buckets) of what was put together.
    let mut pools: Vec<(f64, f64, usize)> = Vec::with_capacity(BUCKETS);
    let mut begin = 0.0;
    for (bucket, part) in parts.iter().enumerate() {
        let end = end_of(bucket);
        pools.push((*part, end - begin, 1));
        begin = end;
        while let [.., a, b] = pools[..] {
            if a.0 / a.1 >= b.0 / b.1 {
                break;
            }
            pools.truncate(pools.len() - 2);
            pools.push((a.0 + b.0, a.1 + b.1, a.2 + b.2));
        }
    }
    let mut density = [0.0; BUCKETS];
    let mut bucket = 0;
    for (part, width, n) in pools {
        density[bucket..bucket + n].fill(part / width);
        bucket += n;
    }
    density
}

#[cfg(test)]
#[path = "touch_times_tests.rs"]
mod tests;
