//! Estimating active memory by sampling (OSDI'02 s.5.3).
//!
//! In each sampling period n random pages of the VM are made to fault on their next access; t of
//! them do. f = t / n estimates the fraction of the VM's whole size that it uses, whichever state
//! its pages are in: a sampled page that is untouched, swapped or ballooned counts like any other.
//!
//! Estimates are smoothed by two exponentially weighted moving averages. A third value, the fast
//! average updated with what the running period has counted so far, reacts within a period: since
//! t only grows while a period runs, that count is a lower bound, so it may raise the estimate and
//! not lower it. The estimate is the largest of the three: up quickly, down slowly.

use std::collections::BTreeSet;
use std::time::Duration;

use ballast_units::{Pages, Ppn, SplitMix64};
use serde::{Deserialize, Serialize};

/// How to sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingConfig {
    /// Pages under sample at a time, 1 to [`MOST_SAMPLES`].
    pub samples: u32,
    /// Length of a period of VM execution time, above zero.
    pub period: Duration,
    /// Weight of the newest period in the slow average, above 0 and at most `fast_gain`.
    pub slow_gain: f64,
    /// Weight of the newest period in the fast average, at most 1.
    pub fast_gain: f64,
}

impl Default for SamplingConfig {
    /// 100 samples in 30 s as the paper; it leaves the gains open. One period of 100 samples has a
    /// standard error of up to 5% of the size. A slow gain of 1/8 averages that down to 1.3% and
    /// follows a fall with a time constant of 8 periods (4 minutes of execution), so a pause in a
    /// guest's work does not cost it its memory at once. A fast gain of 1/2 shows half of a rise
    /// inside the period in which it happens and three quarters one period later.
    fn default() -> SamplingConfig {
        SamplingConfig {
            samples: 100,
            period: Duration::from_secs(30),
            slow_gain: 1.0 / 8.0,
            fast_gain: 1.0 / 2.0,
        }
    }
}

/// The most pages under sample at a time: each is taken from its home until its next access.
pub const MOST_SAMPLES: u32 = 10_000;

/// A sampling configuration that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SamplingError {
    #[error("sampling needs at least 1 page per period")]
    NoSamples,
    #[error("samples: more than {MOST_SAMPLES}")]
    ManySamples,
    #[error("the sampling period must be longer than 0 s")]
    NoPeriod,
    #[error("sampling gains must satisfy 0 < slow <= fast <= 1, but slow is {slow}, fast {fast}")]
    Gains { slow: f64, fast: f64 },
}

impl SamplingConfig {
    /// # Errors
    /// The first field that is out of range.
    pub fn check(&self) -> Result<(), SamplingError> {
        let (slow, fast) = (self.slow_gain, self.fast_gain);
        if self.samples == 0 {
            Err(SamplingError::NoSamples)
        } else if self.samples > MOST_SAMPLES {
            Err(SamplingError::ManySamples)
        } else if self.period.is_zero() {
            Err(SamplingError::NoPeriod)
        } else if slow > 0.0 && slow <= fast && fast <= 1.0 {
            Ok(())
        } else {
            Err(SamplingError::Gains { slow, fast })
        }
    }
}

/// Active memory by each of the three averages, and the estimate: the largest of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActiveEstimate {
    /// The slow average.
    pub slow: Pages,
    /// The fast average.
    pub fast: Pages,
    /// The fast average, updated with the counts of the running period.
    pub current: Pages,
    /// The largest of the three.
    pub estimate: Pages,
    /// Periods that were completed with samples.
    pub periods: u64,
}

/// The averages, as fractions of the VM's size, 0 to 1: what one estimator hands on to the next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Averages {
    /// The slow one.
    pub slow: f64,
    /// The fast one.
    pub fast: f64,
    /// Periods behind them, at least 1.
    pub periods: u64,
}

/// The period that runs.
#[derive(Clone, Copy, Debug)]
struct Period {
    sampled: u32,
    touched: u32,
}

impl Period {
    fn fraction(&self) -> f64 {
        f64::from(self.touched) / f64::from(self.sampled.max(1))
    }
}

/// The estimator of one VM. Counts pages and VM execution time, both told by the caller, who also
/// does the sampling.
///
/// Until its first period is complete a VM counts as fully active: a VM that has just begun is
/// about to use its memory, and taxing what was never measured would starve it. The first complete
/// period then sets both averages to what it found.
///
/// What counts as execution time is the caller's choice. CPU time makes a period of a guest that
/// only waits for interrupts last for hours, and its first one keep it fully active for as long;
/// time in which the VM was able to run does not.
#[derive(Clone, Debug)]
pub struct WorkingSet {
    config: SamplingConfig,
    size: Pages,
    averages: Option<Averages>,
    period: Option<Period>,
    elapsed: Duration,
}

impl WorkingSet {
    /// For a VM of `size` pages. `config` should have passed [`SamplingConfig::check`]; gains out
    /// of range are brought into it.
    pub fn new(config: SamplingConfig, size: Pages) -> WorkingSet {
        WorkingSet {
            config: checked(config),
            size,
            averages: None,
            period: None,
            elapsed: Duration::ZERO,
        }
    }

    /// The averages, without the period that runs. None before the first is complete.
    pub fn averages(&self) -> Option<Averages> {
        self.averages
    }

    /// Goes on with what another estimator of this VM has found. Fractions are brought into their range; what is no number
    /// tells nothing.
    pub fn resume(&mut self, found: Averages) {
        if found.slow.is_finite() && found.fast.is_finite() {
            let [slow, fast] = [found.slow, found.fast].map(|f| f.clamp(0.0, 1.0));
            self.averages = Some(Averages { slow, fast, periods: found.periods.max(1) });
        }
    }

    /// For the period that runs and those to come.
    pub fn set_config(&mut self, config: SamplingConfig) {
        self.config = checked(config);
    }

    /// How it samples.
    pub fn config(&self) -> &SamplingConfig {
        &self.config
    }

    /// A new period begins with `sampled` pages really under sample. A period that still runs is
    /// dropped without counting.
    pub fn begin_period(&mut self, sampled: u32) {
        self.period = Some(Period { sampled, touched: 0 });
        self.elapsed = Duration::ZERO;
    }

    /// `n` more sampled pages were touched, each counted once. Never more than are under sample;
    /// without a period it has no effect.
    pub fn touched(&mut self, n: u32) {
        if let Some(period) = &mut self.period {
            period.touched = period.touched.saturating_add(n).min(period.sampled);
        }
    }

    /// The VM executed for `exec` longer. True when the period is over, or none has begun: the
    /// caller then ends it and begins the next.
    pub fn advance(&mut self, exec: Duration) -> bool {
        self.elapsed = self.elapsed.saturating_add(exec);
        self.period.is_none() || self.elapsed >= self.config.period
    }

    /// Ends the period and takes it into the averages. A period without samples tells nothing.
    pub fn end_period(&mut self) {
        let Some(period) = self.period.take().filter(|p| p.sampled > 0) else { return };
        let f = period.fraction();
        let toward = |average: f64, gain: f64| average + gain * (f - average);
        self.averages = Some(match self.averages {
            None => Averages { slow: f, fast: f, periods: 1 },
            Some(old) => Averages {
                slow: toward(old.slow, self.config.slow_gain),
                fast: toward(old.fast, self.config.fast_gain),
                periods: old.periods.saturating_add(1),
            },
        });
    }

    /// The averages now.
    pub fn estimate(&self) -> ActiveEstimate {
        let Some(averages) = self.averages else {
            let all = self.size;
            return ActiveEstimate {
                slow: all,
                fast: all,
                current: all,
                estimate: all,
                periods: 0,
            };
        };
        let so_far = self.period.as_ref().map_or(0.0, Period::fraction);
        let rise = self.config.fast_gain * (so_far - averages.fast);
        let current = averages.fast + rise.max(0.0);
        let pages = |fraction: f64| {
            Pages(((fraction * self.size.0 as f64).round() as u64).min(self.size.0))
        };
        let (slow, fast, current) = (pages(averages.slow), pages(averages.fast), pages(current));
        ActiveEstimate {
            slow,
            fast,
            current,
            estimate: slow.max(fast).max(current),
            periods: averages.periods,
        }
    }
}

/// With gains brought into their range.
fn checked(config: SamplingConfig) -> SamplingConfig {
    let gain = |g: f64, default: f64| {
        if g.is_nan() { default } else { g.clamp(f64::MIN_POSITIVE, 1.0) }
    };
    let default = SamplingConfig::default();
    SamplingConfig {
        slow_gain: gain(config.slow_gain, default.slow_gain),
        fast_gain: gain(config.fast_gain, default.fast_gain),
        ..config
    }
}

/// The pages to sample in a period: `n` different ones of `size`, every set of them equally
/// likely, in ascending order; all pages when there are no more than `n`. The same `seed` and
/// `period` always choose the same pages; different ones choose independently.
pub fn choose_samples(seed: u64, period: u64, size: Pages, n: u32) -> Vec<Ppn> {
    let n = u64::from(n);
    if n >= size.0 {
        return (0..size.0).map(Ppn).collect();
    }
    let mut random = SplitMix64::of_stream(seed, period);
    // Floyd's algorithm: n draws, none wasted.
    let mut chosen = BTreeSet::new();
    for last in size.0 - n..size.0 {
        let draw = random.below(last + 1);
        if !chosen.insert(draw) {
            chosen.insert(last);
        }
    }
    chosen.into_iter().map(Ppn).collect()
}

#[cfg(test)]
#[path = "working_set_tests.rs"]
mod tests;
