//! How an active set changes with time: from 0 (its smallest) to 1 (its largest), or by steps.

use std::time::Duration;

use crate::args::parse_seconds;

#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    Sine,
    Square,
    /// Sizes in MB, each held for the same time, then over again.
    Steps {
        sizes: Vec<u64>,
        hold: Duration,
    },
}

impl Pattern {
    pub fn parse(text: &str) -> Result<Pattern, String> {
        match text {
            "sine" => return Ok(Pattern::Sine),
            "square" => return Ok(Pattern::Square),
            _ => {}
        }
        let wrong =
            || format!("'{text}' is not a pattern (expected sine, square or steps:50,100,250@30s)");
        let (sizes, hold) =
            text.strip_prefix("steps:").and_then(|t| t.split_once('@')).ok_or_else(wrong)?;
        let sizes: Vec<u64> =
            sizes.split(',').map(|s| s.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
        let hold = parse_seconds(hold).filter(|h| !h.is_zero()).ok_or_else(wrong)?;
        Ok(Pattern::Steps { sizes, hold })
    }

    pub fn largest_step(&self) -> Option<u64> {
        match self {
            Pattern::Steps { sizes, .. } => sizes.iter().copied().max(),
            _ => None,
        }
    }

    /// Size in MB at time `t`; sine begins at its smallest, `phase` is a fraction of the period.
    pub fn at(&self, t: Duration, min: u64, max: u64, period: Duration, phase: f64) -> f64 {
        let (min, span) = (min as f64, max.saturating_sub(min) as f64);
        let turn = (t.as_secs_f64() / period.as_secs_f64().max(0.001) + phase).rem_euclid(1.0);
        match self {
            Pattern::Sine => min + span * (1.0 - (turn * std::f64::consts::TAU).cos()) / 2.0,
            Pattern::Square => min + if turn < 0.5 { 0.0 } else { span },
            Pattern::Steps { sizes, hold } => {
                let step = (t.as_secs_f64() / hold.as_secs_f64()) as usize % sizes.len().max(1);
                sizes.get(step).copied().unwrap_or(0) as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: Duration = Duration::from_secs(60);

    fn at(p: &Pattern, s: u64, phase: f64) -> f64 {
        p.at(Duration::from_secs(s), 40, 120, P, phase)
    }

    #[test]
    fn sine_and_square_span_the_range() {
        assert!((at(&Pattern::Sine, 0, 0.0) - 40.0).abs() < 1e-6);
        assert!((at(&Pattern::Sine, 30, 0.0) - 120.0).abs() < 1e-6);
        assert!((at(&Pattern::Sine, 0, 0.5) - 120.0).abs() < 1e-6);
        assert_eq!(at(&Pattern::Square, 10, 0.0), 40.0);
        assert_eq!(at(&Pattern::Square, 40, 0.0), 120.0);
    }

    #[test]
    fn steps_are_held_and_repeat() {
        let p = Pattern::parse("steps:50,100,250@30s").unwrap();
        assert_eq!([0, 29, 30, 60, 90].map(|s| at(&p, s, 0.0)), [50.0, 50.0, 100.0, 250.0, 50.0]);
        assert_eq!(p.largest_step(), Some(250));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "saw", "steps:", "steps:1,x@3s", "steps:50@0s", "steps:50", "steps:@3s"] {
            assert!(Pattern::parse(text).is_err(), "{text}");
        }
    }
}
