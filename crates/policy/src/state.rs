//! The four reclamation states and their two-edged thresholds (OSDI'02 s.6.3).
//!
//! The paper gives four thresholds of free memory, by default high 6%, soft 4%, hard 2% and low 1%
//! of machine memory, says that a lower state is entered when free memory drops below the lower
//! threshold, that the way back needs free memory "significantly exceeding the higher threshold",
//! and that reclamation aims above the high threshold. Here that means:
//!
//! ```text
//!   free   1%      2%          4%          6%  6.5%
//!   -------+-------+-----------+-----------+----+------->
//!          |       |           |<- High ---+    goal of reclamation
//!          |       |<- Soft ---+   falls   rises
//!          |<- Hard+   falls   rises
//!          falls   rises
//! ```
//!
//! A state is left for the next lower one when free memory falls below its lower edge, which is
//! the threshold *named after that lower state*, and it is come back to when free memory reaches
//! its upper edge, the threshold of its own name. The way back is thus a whole band above the way
//! down (half as much again, or twice): that is what "significantly" is taken to mean. Free memory
//! between the edges of a state changes nothing. The goal lies a quarter of the top band above the
//! high threshold, so that reaching it always ends in [`State::High`].

use std::fmt;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

/// How short the host is of free machine memory. Ordered by severity: `High < Low`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Enough is free: nothing is reclaimed.
    #[default]
    High,
    /// Reclaim by ballooning, by paging only where ballooning is not possible.
    Soft,
    /// Reclaim by paging as well.
    Hard,
    /// Also block the VMs that are above their targets.
    Low,
}

impl State {
    /// The next state with more free memory; None above [`State::High`].
    pub const fn higher(self) -> Option<State> {
        match self {
            State::High => None,
            State::Soft => Some(State::High),
            State::Hard => Some(State::Soft),
            State::Low => Some(State::Hard),
        }
    }

    /// The next state with less free memory; None below [`State::Low`].
    pub const fn lower(self) -> Option<State> {
        match self {
            State::High => Some(State::Soft),
            State::Soft => Some(State::Hard),
            State::Hard => Some(State::Low),
            State::Low => None,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::High => "high",
            State::Soft => "soft",
            State::Hard => "hard",
            State::Low => "low",
        })
    }
}

/// Thresholds that are out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "free-memory thresholds must fall from high to low and not be zero: \
     high {} pages, soft {}, hard {}, low {}", .high.0, .soft.0, .hard.0, .low.0
)]
pub struct ThresholdError {
    /// Of state high.
    pub high: Pages,
    /// Of state soft.
    pub soft: Pages,
    /// Of state hard.
    pub hard: Pages,
    /// Of state low.
    pub low: Pages,
}

/// The four thresholds of free machine memory; `high > soft > hard > low > 0` always holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unordered")]
pub struct Thresholds {
    high: Pages,
    soft: Pages,
    hard: Pages,
    low: Pages,
}

/// Thresholds as they are read, not yet known to be in order.
#[derive(Deserialize)]
struct Unordered {
    high: Pages,
    soft: Pages,
    hard: Pages,
    low: Pages,
}

impl TryFrom<Unordered> for Thresholds {
    type Error = ThresholdError;
    fn try_from(t: Unordered) -> Result<Thresholds, ThresholdError> {
        Thresholds::custom(t.high, t.soft, t.hard, t.low)
    }
}

impl Thresholds {
    /// 6, 4, 2 and 1% of `budget` (OSDI'02 s.6.3), each at least a page above the next. Budgets
    /// below 1 MiB give thresholds that mean little, but stay in order.
    pub fn default_for(budget: Pages) -> Thresholds {
        Thresholds::spread(
            percent(budget, 600),
            percent(budget, 400),
            percent(budget, 200),
            percent(budget, 100),
        )
    }

    /// ESX's later sliding scale for large hosts: `minFree` is 6% of the first 4 GiB of `budget`,
    /// 4% of the next 8 GiB, 2% of the next 16 GiB and 1% of the rest; it is the high threshold,
    /// and soft, hard and low are 64, 32 and 16% of it.
    pub fn sliding(budget: Pages) -> Thresholds {
        const GIB: u64 = 1 << 18;
        let mut rest = budget;
        let mut min_free = 0;
        for (step, hundredths) in [(4 * GIB, 600), (8 * GIB, 400), (16 * GIB, 200), (u64::MAX, 100)]
        {
            let part = Pages(rest.0.min(step));
            min_free += percent(part, hundredths).0;
            rest = rest.saturating_sub(part);
        }
        let min_free = Pages(min_free);
        Thresholds::spread(
            min_free,
            percent(min_free, 6_400),
            percent(min_free, 3_200),
            percent(min_free, 1_600),
        )
    }

    /// High and soft `part` of [`Thresholds::WHOLE`] of the way from `self` to `more`; hard and low as in `self`, so that
    /// whatever the part is, it makes nobody wait.
    #[must_use]
    pub fn towards(&self, more: &Thresholds, part: u32) -> Thresholds {
        let part = u64::from(part.min(Thresholds::WHOLE));
        let between = |a: Pages, b: Pages| {
            let way =
                u128::from(a.0.abs_diff(b.0)) * u128::from(part) / u128::from(Thresholds::WHOLE);
            // At most their difference.
            let way = Pages(way as u64);
            if b >= a { a + way } else { a.saturating_sub(way) }
        };
        Thresholds::spread(
            between(self.high, more.high),
            between(self.soft, more.soft),
            self.hard,
            self.low,
        )
    }

    /// All of the way of [`Thresholds::towards`].
    pub const WHOLE: u32 = 1 << 16;

    /// A third of each.
    #[must_use]
    pub fn third(&self) -> Thresholds {
        let third = |pages: Pages| Pages(pages.0.div_ceil(3));
        Thresholds::spread(third(self.high), third(self.soft), third(self.hard), third(self.low))
    }

    /// Thresholds of the operator's own.
    ///
    /// # Errors
    /// When they do not fall strictly from high to low, or low is zero.
    pub fn custom(
        high: Pages,
        soft: Pages,
        hard: Pages,
        low: Pages,
    ) -> Result<Thresholds, ThresholdError> {
        if high > soft && soft > hard && hard > low && !low.is_zero() {
            Ok(Thresholds { high, soft, hard, low })
        } else {
            Err(ThresholdError { high, soft, hard, low })
        }
    }

    /// Those that are the same part of `size` as these are of `budget`.
    pub fn scaled(&self, budget: Pages, size: Pages) -> Thresholds {
        let part = |threshold: Pages| {
            let scaled = u128::from(threshold.0) * u128::from(size.0) / u128::from(budget.0.max(1));
            Pages(u64::try_from(scaled).unwrap_or(u64::MAX))
        };
        Thresholds::spread(part(self.high), part(self.soft), part(self.hard), part(self.low))
    }

    fn spread(high: Pages, soft: Pages, hard: Pages, low: Pages) -> Thresholds {
        let low = low.max(Pages(1));
        let hard = hard.max(low + Pages(1));
        let soft = soft.max(hard + Pages(1));
        let high = high.max(soft + Pages(1));
        Thresholds { high, soft, hard, low }
    }

    /// For each state, the free memory below which it is left for the next lower one, and the free
    /// memory at which it is come back to. Low is never left downwards nor come back to: (0, 0).
    pub const fn edges(&self) -> [(State, Pages, Pages); 4] {
        [
            (State::High, self.soft, self.high),
            (State::Soft, self.hard, self.soft),
            (State::Hard, self.low, self.hard),
            (State::Low, Pages(0), Pages(0)),
        ]
    }

    /// Below it, `state` is left for the next lower one.
    pub const fn lower_edge(&self, state: State) -> Pages {
        self.edges()[state as usize].1
    }

    /// At it, `state` is come back to from below.
    pub const fn upper_edge(&self, state: State) -> Pages {
        self.edges()[state as usize].2
    }

    /// The free memory that reclamation aims for: above the high threshold by a quarter of the
    /// band between soft and high (6.5% by default), at least a page.
    pub const fn goal(&self) -> Pages {
        let band = (self.high.0 - self.soft.0) / 4;
        Pages(self.high.0 + if band == 0 { 1 } else { band })
    }
}

/// How thresholds of free memory follow from the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// As large as was needed lately ([`Reserve`](crate::Reserve)): at most those of `Percent`, at least a third of
    /// those of `Sliding`.
    #[default]
    Measured,
    /// 6, 4, 2 and 1 per cent (OSDI'02 s.6.3).
    Percent,
    /// ESX's later sliding scale, for large hosts: [`Thresholds::sliding`].
    Sliding,
}

impl Scale {
    /// The thresholds of a host with this budget: the highest that they may be, which is what promises count with.
    pub fn thresholds(self, budget: Pages) -> Thresholds {
        match self {
            Scale::Measured | Scale::Percent => Thresholds::default_for(budget),
            Scale::Sliding => Thresholds::sliding(budget),
        }
    }

    /// The lowest that they may be.
    pub fn least(self, budget: Pages) -> Thresholds {
        match self {
            Scale::Measured => Thresholds::sliding(budget).third(),
            Scale::Percent | Scale::Sliding => self.thresholds(budget),
        }
    }
}

/// `hundredths` of a percent of `whole`, rounded up: at most all of it.
fn percent(whole: Pages, hundredths: u64) -> Pages {
    let exact = u128::from(whole.0) * u128::from(hundredths);
    Pages(exact.div_ceil(10_000) as u64)
}

/// Follows free memory through the four states.
#[derive(Clone, Debug)]
pub struct StateMachine {
    thresholds: Thresholds,
    state: State,
}

impl StateMachine {
    /// Goes on from `state`.
    pub fn at(thresholds: Thresholds, state: State) -> StateMachine {
        StateMachine { thresholds, state }
    }

    /// The state with `free` pages free; may pass several states in one step, either way.
    pub fn update(&mut self, free: Pages) -> State {
        while let Some(lower) = self.state.lower() {
            if free >= self.thresholds.lower_edge(self.state) {
                break;
            }
            self.state = lower;
        }
        while let Some(higher) = self.state.higher() {
            if free < self.thresholds.upper_edge(higher) {
                break;
            }
            self.state = higher;
        }
        self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: Pages = Pages(100_000);

    fn machine() -> StateMachine {
        StateMachine::at(Thresholds::default_for(BUDGET), State::High)
    }

    #[test]
    fn defaults_are_six_four_two_and_one_percent() {
        let t = Thresholds::default_for(BUDGET);
        assert_eq!(
            t.edges(),
            [
                (State::High, Pages(4_000), Pages(6_000)),
                (State::Soft, Pages(2_000), Pages(4_000)),
                (State::Hard, Pages(1_000), Pages(2_000)),
                (State::Low, Pages(0), Pages(0)),
            ]
        );
        assert_eq!(t.goal(), Pages(6_500));
    }

    #[test]
    fn sliding_scale_gives_the_vendors_figure_for_28_gib() {
        // 6% of 4 + 4% of 8 + 2% of 16 GiB = 901 MiB; the vendor, who subtracts its own kernel
        // first, prints 899 MB.
        let t = Thresholds::sliding(Pages::from_mib(28 << 10));
        let high = t.upper_edge(State::High);
        assert!((high.mib() - 901.12).abs() < 0.1, "{high}");
        assert!((t.lower_edge(State::High).mib() - 0.64 * 901.12).abs() < 0.1);
        assert!((t.lower_edge(State::Soft).mib() - 0.32 * 901.12).abs() < 0.1);
        assert!((t.lower_edge(State::Hard).mib() - 0.16 * 901.12).abs() < 0.1);
        let small = Pages::from_mib(1024);
        assert_eq!(
            Thresholds::sliding(small).upper_edge(State::High),
            Thresholds::default_for(small).upper_edge(State::High)
        );
    }

    #[test]
    fn each_state_is_left_and_regained_at_its_own_edges() {
        let mut m = machine();
        assert_eq!(m.update(Pages(4_000)), State::High);
        assert_eq!(m.update(Pages(3_999)), State::Soft);
        assert_eq!(m.update(Pages(5_999)), State::Soft);
        assert_eq!(m.update(Pages(6_000)), State::High);
        m.update(Pages(3_999));
        assert_eq!(m.update(Pages(2_000)), State::Soft);
        assert_eq!(m.update(Pages(1_999)), State::Hard);
        assert_eq!(m.update(Pages(3_999)), State::Hard);
        assert_eq!(m.update(Pages(4_000)), State::Soft);
        m.update(Pages(1_999));
        assert_eq!(m.update(Pages(1_000)), State::Hard);
        assert_eq!(m.update(Pages(999)), State::Low);
        assert_eq!(m.update(Pages(1_999)), State::Low);
        assert_eq!(m.update(Pages(2_000)), State::Hard);
    }

    #[test]
    fn one_step_may_pass_several_states() {
        let mut m = machine();
        assert_eq!(m.update(Pages(0)), State::Low);
        assert_eq!(m.update(Pages(50_000)), State::High);
        assert_eq!(m.update(Pages(1_500)), State::Hard);
    }

    #[test]
    fn budgets_of_a_few_pages_have_thresholds_in_order_too() {
        for budget in (0..2_000).map(Pages) {
            for t in [Thresholds::default_for(budget), Thresholds::sliding(budget)] {
                let kept = Thresholds::custom(t.high, t.soft, t.hard, t.low);
                assert_eq!(kept, Ok(t), "{budget:?}");
            }
        }
        let least = Thresholds::default_for(Pages::ZERO);
        assert_eq!([least.high, least.soft, least.hard, least.low], [4, 3, 2, 1].map(Pages));
    }

    #[test]
    fn thresholds_out_of_order_are_refused() {
        let t = |a, b, c, d| Thresholds::custom(Pages(a), Pages(b), Pages(c), Pages(d));
        assert!(t(6, 4, 2, 1).is_ok());
        assert!(t(6, 6, 2, 1).is_err());
        assert!(t(6, 4, 4, 1).is_err());
        assert!(t(6, 4, 2, 2).is_err());
        let error = t(6, 4, 2, 0).unwrap_err();
        assert!(error.to_string().contains("low 0"), "{error}");
    }

    proptest! {
        #[test]
        fn edges_stay_in_order_for_any_budget(budget in any::<u64>()) {
            for t in [Thresholds::default_for(Pages(budget)), Thresholds::sliding(Pages(budget))] {
                let mut above = t.goal();
                for (_, lower, upper) in &t.edges()[..3] {
                    prop_assert!(upper > lower);
                    prop_assert!(above >= *upper);
                    above = *lower;
                }
                prop_assert!(t.goal() > t.upper_edge(State::High));
            }
        }

        /// Free memory that moves by less than a band never brings the machine back and forth.
        #[test]
        fn small_noise_changes_the_state_at_most_once(
            start in 0u64..20_000, noise in proptest::collection::vec(0u64..1_000, 1..60)
        ) {
            let mut m = machine();
            m.update(Pages(start));
            let mut changes = 0;
            for n in noise {
                let before = m.state;
                // Within 1% of the budget: no wider than the narrowest band.
                if m.update(Pages(start + n)) != before {
                    changes += 1;
                }
            }
            prop_assert!(changes <= 1, "{changes} changes");
        }

        /// The state never contradicts the edges, whatever came before.
        #[test]
        fn state_agrees_with_the_edges(
            walk in proptest::collection::vec(0u64..12_000, 1..60)
        ) {
            let mut m = machine();
            for free in walk {
                let state = m.update(Pages(free));
                prop_assert!(free >= m.thresholds.lower_edge(state).0);
                if let Some(higher) = state.higher() {
                    prop_assert!(free < m.thresholds.upper_edge(higher).0);
                }
            }
        }
    }
}
