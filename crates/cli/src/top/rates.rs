//! Rates per second from two looks at running totals.

use ballast_api::{HostCounters, VmCounters};

/// Bytes or events per second. All None at the first look, and when totals went backwards (a new
/// manager, or another VM of the same name).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub swapped_in: Option<f64>,
    pub swapped_out: Option<f64>,
    pub ballooned: Option<f64>,
    pub faults: Option<f64>,
    pub waits: Option<f64>,
    pub blocks: Option<f64>,
}

/// The totals that rates are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals([u64; 6]);

impl From<&HostCounters> for Totals {
    fn from(c: &HostCounters) -> Totals {
        Totals([c.swapped_in, c.swapped_out, c.ballooned, c.faults, c.waits, c.blocks])
    }
}

impl From<&VmCounters> for Totals {
    fn from(c: &VmCounters) -> Totals {
        Totals([c.swapped_in, c.swapped_out, c.ballooned, c.faults, c.waits, c.blocks])
    }
}

impl Rates {
    /// From `before` to `now`, `seconds` apart.
    pub fn between(before: Totals, now: Totals, seconds: f64) -> Rates {
        let backwards = before.0.iter().zip(now.0).any(|(b, n)| n < *b);
        if backwards || seconds <= 0.0 {
            return Rates::default();
        }
        let [swapped_in, swapped_out, ballooned, faults, waits, blocks] =
            std::array::from_fn(|i| Some((now.0[i] - before.0[i]) as f64 / seconds));
        Rates { swapped_in, swapped_out, ballooned, faults, waits, blocks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_unknown_after_a_restart() {
        let before = HostCounters { faults: 100, swapped_in: 10 << 20, ..Default::default() };
        let now = HostCounters { faults: 300, swapped_in: 10 << 20, ..Default::default() };
        let rates = Rates::between((&before).into(), (&now).into(), 2.0);
        assert_eq!((rates.faults, rates.swapped_in), (Some(100.0), Some(0.0)));
        assert_eq!(Rates::between((&now).into(), (&before).into(), 2.0), Rates::default());
        assert_eq!(Rates::between((&before).into(), (&now).into(), 0.0), Rates::default());
    }
}
