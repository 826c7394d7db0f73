//! What is measured of each VM and each host.

use ballast_policy::State;

use crate::Millis;
use crate::guest::Accesses;

/// Counts the turns of a value: it went one way by at least `step` and then back by as much.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    low: u64,
    high: u64,
    direction: i8,
    begun: bool,
    /// Turns so far.
    pub count: u64,
}

impl Turns {
    /// The value is `value` now.
    pub(crate) fn see(&mut self, value: u64, step: u64) {
        if !self.begun {
            (self.low, self.high, self.begun) = (value, value, true);
        }
        self.low = self.low.min(value);
        self.high = self.high.max(value);
        if self.direction <= 0 && value >= self.low.saturating_add(step) {
            self.count += u64::from(self.direction < 0);
            (self.direction, self.high) = (1, value);
        } else if self.direction >= 0 && value.saturating_add(step) <= self.high {
            self.count += u64::from(self.direction > 0);
            (self.direction, self.low) = (-1, value);
        }
    }
}

/// One VM, since its start. Times are virtual, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct VmMeasure {
    /// How long it ran.
    pub ran_ms: Millis,
    /// What it wanted to do: active pages times seconds.
    pub wanted: f64,
    /// What it did of that.
    pub worked: f64,
    /// In which it did less than half of what it wanted.
    pub slow_ms: Millis,
    /// The stretch, up to now, in which it did less than a tenth.
    pub starved_ms: Millis,
    /// The longest such stretch.
    pub longest_starved_ms: Millis,
    /// In which its allocations waited, in state low.
    pub blocked_ms: Millis,
    /// In which its balloon would have had more than the guest could give.
    pub distress_ms: Millis,
    /// In which it waited for memory below its min.
    pub robbed_ms: Millis,
    /// Faults served from the compressed tier, a page each.
    pub faults_compressed: u64,
    /// Faults served from swap, a page each.
    pub faults_swapped: u64,
    /// Pages that the guest read again from its own disk, because of its balloon.
    pub guest_reads: f64,
    /// Pages that left their homes: shared, compressed or swapped.
    pub evicted: u64,
    /// Of those, pages written to swap.
    pub written: u64,
    /// Turns of what it is entitled to.
    pub target: Turns,
    /// Turns of its balloon's size.
    pub balloon: Turns,
    /// Turns of what its load has active.
    pub active: Turns,
    /// Consumed pages times milliseconds.
    pub consumed_ms: f64,
}

/// A value has turned when it went back by one part in so many of the VM's size: 5%.
pub(crate) const TURN: u64 = 20;

/// A VM as it stands at the end of a step, in pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub size: u64,
    /// What its load has active.
    pub active: u64,
    pub consumed: u64,
    pub min: u64,
    pub target: u64,
    pub balloon: u64,
    /// Its allocations wait.
    pub blocked: bool,
}

impl VmMeasure {
    pub(crate) fn step(&mut self, dt: Millis, seen: &Accesses, at: &Standing) {
        let s = dt as f64 / 1e3;
        self.ran_ms += dt;
        self.wanted += at.active as f64 * s;
        self.worked += at.active as f64 * s * seen.work;
        self.slow_ms += if seen.work < 0.5 { dt } else { 0 };
        if seen.work < 0.1 {
            self.starved_ms += dt;
            self.longest_starved_ms = self.longest_starved_ms.max(self.starved_ms);
        } else {
            self.starved_ms = 0;
        }
        self.robbed_ms += if seen.waited && at.consumed < at.min { dt } else { 0 };
        self.blocked_ms += if at.blocked { dt } else { 0 };
        self.faults_compressed += seen.compressed;
        self.faults_swapped += seen.swapped;
        self.guest_reads += seen.guest_reads;
        let step = at.size / TURN;
        self.target.see(at.target, step);
        self.balloon.see(at.balloon, step);
        self.active.see(at.active, step);
        self.consumed_ms += at.consumed as f64 * dt as f64;
    }

    /// The part of its work that it did, 0 to 1; 1 if it had none.
    pub fn work(&self) -> f64 {
        if self.wanted > 0.0 { self.worked / self.wanted } else { 1.0 }
    }
}

/// One host. Times are virtual, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct HostMeasure {
    /// How long it ran.
    pub ran_ms: Millis,
    /// Of that, in each state, from high to low.
    pub state_ms: [Millis; 4],
    /// Decisions that ended in another state than the one before.
    pub state_changes: u64,
    /// Decisions of the policy.
    pub decisions: u64,
    /// Steps of virtual time.
    pub steps: u64,
    /// The least part of the budget of then that was free after a step, 0 if it was overdrawn. None before the
    /// first step.
    pub least_free: Option<f64>,
    /// In which more was in use than the budget: for a while after that was lowered, never else.
    pub overdrawn_ms: Millis,
    /// Pages configured at a time, of the VMs that ran, over the budget of then: the most.
    pub overcommitment: f64,
    /// Starts that were put off, each attempt counted.
    pub refused: u64,
}

impl HostMeasure {
    /// A step of `dt` is over, with so much of the `budget` free and `configured`; `free` is None if it is overdrawn.
    pub(crate) fn step(
        &mut self,
        dt: Millis,
        state: State,
        budget: u64,
        free: Option<u64>,
        configured: u64,
    ) {
        self.ran_ms += dt;
        self.overdrawn_ms += if free.is_none() { dt } else { 0 };
        let of_budget = |pages: u64| pages as f64 / budget.max(1) as f64;
        let free = of_budget(free.unwrap_or(0));
        self.steps += 1;
        self.state_ms[state as usize] += dt;
        self.least_free = Some(self.least_free.map_or(free, |least| least.min(free)));
        self.overcommitment = self.overcommitment.max(of_budget(configured));
    }
}

/// Jain's index of fairness (R. Jain, D. Chiu, W. Hawe, 1984): 1 if all are equal, 1/n if one of n has
/// all; 1 of nothing.
pub(crate) fn jain(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v));
    if squares == 0.0 { 1.0 } else { sum * sum / (values.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_moves_as_large_as_the_step_count_as_turns() {
        let count = |values: &[u64]| {
            let mut turns = Turns::default();
            values.iter().for_each(|&v| turns.see(v, 10));
            turns.count
        };
        assert_eq!(count(&[50, 55, 50, 55, 50]), 0, "too small");
        assert_eq!(count(&[50, 60, 70, 80]), 0, "one way");
        assert_eq!(count(&[50, 70, 50]), 1);
        assert_eq!(count(&[50, 70, 65, 75, 50, 61]), 2);
        assert_eq!(count(&[100, 90, 80, 95, 100, 80]), 2);
    }

    #[test]
    fn parts_are_of_the_budget_of_then() {
        let mut host = HostMeasure::default();
        host.step(1, State::High, 2_000, Some(500), 3_000);
        host.step(1, State::High, 1_000, Some(400), 3_000);
        host.step(1, State::High, 4_000, Some(2_000), 3_000);
        assert_eq!((host.least_free, host.overcommitment), (Some(0.25), 3.0));
        host.step(1, State::Low, 1_000, None, 0);
        assert_eq!((host.least_free, host.overdrawn_ms), (Some(0.0), 1));
    }

    #[test]
    fn fairness_is_one_for_equals() {
        assert_eq!(jain(&[0.5, 0.5]), 1.0);
        assert_eq!(jain(&[1.0, 0.0]), 0.5);
        assert_eq!(jain(&[]), 1.0);
    }
}
