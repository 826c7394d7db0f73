//! A scanner at work, as its own counters show it: how much it has saved by when, for how much CPU.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// One look at a scanner. Running totals.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// CPU seconds.
    pub cpu_s: f64,
    /// Pages of machine memory saved now.
    pub saved: f64,
    /// Pages looked at.
    pub scanned: f64,
    /// Complete rounds over the memory.
    pub passes: f64,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    t: f64,
    look: Look,
}

/// What merging took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Merge {
    /// Pages saved in the end.
    pub saved: f64,
    /// CPU seconds until 99% of that.
    pub cpu_s: f64,
    /// Pages looked at until then.
    pub scanned: f64,
    /// Wall seconds, and CPU seconds, until 90% of what can be saved; NaN if it was not reached.
    pub to_90_s: f64,
    pub to_90_cpu_s: f64,
}

/// What a quiet time took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet {
    /// How long it was.
    pub wall_s: f64,
    /// CPU seconds of the scanner in it.
    pub cpu_s: f64,
    /// Complete rounds over the memory.
    pub passes: f64,
    /// Pages looked at.
    pub scanned: f64,
}

const EVERY: Duration = Duration::from_millis(10);
/// Growth of this part of what can be saved counts as growth.
const GROWTH: f64 = 0.001;

/// Watches until nothing more is saved: for a complete pass (and 2 s), or for 30 s. The clock goes from `begin`, when
/// `start` was seen.
pub async fn merge(
    begin: Instant,
    start: Look,
    mut look: impl AsyncFnMut() -> Result<Look>,
    possible: f64,
    limit: Duration,
) -> Result<Merge> {
    let mut samples = vec![Sample { t: 0.0, look: start }];
    let mut grown = samples[0];
    loop {
        tokio::time::sleep(EVERY).await;
        let sample = Sample { t: begin.elapsed().as_secs_f64(), look: look().await? };
        samples.push(sample);
        if sample.look.saved > grown.look.saved + possible * GROWTH {
            grown = sample;
        }
        let idle = sample.t - grown.t;
        let pass = sample.look.passes - grown.look.passes >= 2.0;
        if grown.look.saved > 0.0 && ((pass && idle > 2.0) || idle > 30.0) {
            return Ok(summary(&samples, possible));
        }
        if begin.elapsed() > limit {
            bail!(
                "after {} s {:.0} of {possible:.0} pages are saved, and more come",
                limit.as_secs(),
                sample.look.saved
            );
        }
    }
}

fn summary(samples: &[Sample], possible: f64) -> Merge {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return Merge::default();
    };
    let reached = |saved: f64| samples.iter().find(|s| s.look.saved >= saved);
    let done = reached(last.look.saved * 0.99).unwrap_or(last);
    let most = reached(possible * 0.9);
    Merge {
        saved: last.look.saved,
        cpu_s: done.look.cpu_s - first.look.cpu_s,
        scanned: done.look.scanned - first.look.scanned,
        to_90_s: most.map_or(f64::NAN, |s| s.t),
        to_90_cpu_s: most.map_or(f64::NAN, |s| s.look.cpu_s - first.look.cpu_s),
    }
}

/// Watches while nothing changes: for `window`, and until `passes` are complete. The last pass is
/// waited for to its end, so that whole passes are counted.
pub async fn quiet(
    mut look: impl AsyncFnMut() -> Result<Look>,
    window: Duration,
    passes: f64,
    limit: Duration,
) -> Result<Quiet> {
    let mut first = look().await?;
    let mut begin = Instant::now();
    let mut started = passes == 0.0;
    loop {
        tokio::time::sleep(EVERY).await;
        let now = look().await?;
        let done = now.passes - first.passes;
        if !started && done >= 1.0 {
            // From the beginning of a pass on.
            (first, begin, started) = (now, Instant::now(), true);
            continue;
        }
        if started && begin.elapsed() >= window && done >= passes {
            return Ok(Quiet {
                wall_s: begin.elapsed().as_secs_f64(),
                cpu_s: now.cpu_s - first.cpu_s,
                passes: done,
                scanned: now.scanned - first.scanned,
            });
        }
        if begin.elapsed() > limit {
            bail!("{passes} quiet passes have not ended after {} s", limit.as_secs());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(t: f64, saved: f64) -> Sample {
        let look = Look { cpu_s: 10.0 + t * 0.5, saved, scanned: t * 100.0, passes: t };
        Sample { t, look }
    }

    #[test]
    fn cpu_counts_until_almost_all_is_saved() {
        let samples = [
            sample(0.0, 0.0),
            sample(1.0, 50.0),
            sample(2.0, 95.0),
            sample(3.0, 96.0),
            sample(9.0, 96.0),
        ];
        let m = summary(&samples, 100.0);
        assert_eq!((m.saved, m.cpu_s, m.scanned), (96.0, 1.5, 300.0));
        assert_eq!((m.to_90_s, m.to_90_cpu_s), (2.0, 1.0));
        let short = summary(&samples[..2], 100.0);
        assert!(short.to_90_s.is_nan() && short.to_90_cpu_s.is_nan());
    }

    #[tokio::test]
    async fn quiet_passes_are_whole() {
        let mut n = 0.0;
        let look = async || {
            n += 0.4;
            Ok(Look { cpu_s: n, passes: f64::floor(n), ..Look::default() })
        };
        let q = quiet(look, Duration::ZERO, 2.0, Duration::from_secs(20)).await.unwrap();
        assert!(q.passes >= 2.0 && q.cpu_s >= q.passes - 0.5, "{q:?}");
    }
}
