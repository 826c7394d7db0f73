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
    pub count: u64,
}

impl Turns {
    pub fn see(&mut self, value: u64, step: u64) {
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

/// One VM, since its start.
#[derive(Clone, Debug, Default)]
pub struct VmMeasure {
    pub ran_ms: Millis,
    /// Active pages times seconds: what it wanted to do, and what it did.
    pub wanted: f64,
    pub worked: f64,
    /// It did less than half of what it wanted; less than a tenth, at a stretch.
    pub slow_ms: Millis,
    pub starved_ms: Millis,
    pub longest_starved_ms: Millis,
    pub waited_ms: Millis,
    pub blocked_ms: Millis,
    /// Its balloon would have had more than the guest could give.
    pub distress_ms: Millis,
    /// It waited for memory below its min.
    pub robbed_ms: Millis,
    pub faults_compressed: u64,
    pub faults_swapped: u64,
    pub guest_reads: f64,
    pub evicted: u64,
    pub written: u64,
    pub target: Turns,
    pub balloon: Turns,
    pub active: Turns,
    /// Consumed pages times milliseconds.
    pub consumed_ms: f64,
}

/// A value has turned when it went back by this part of the VM's size.
pub const TURN: u64 = 20;

/// A VM as it stands at the end of a step.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    pub size: u64,
    pub active: u64,
    pub consumed: u64,
    pub min: u64,
    pub target: u64,
    pub balloon: u64,
    pub blocked: bool,
}

impl VmMeasure {
    pub fn step(&mut self, dt: Millis, seen: &Accesses, at: &Standing) {
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
        self.waited_ms += if seen.waited { dt } else { 0 };
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

    /// The part of its work that it did; 1 if it had none.
    pub fn work(&self) -> f64 {
        if self.wanted > 0.0 { self.worked / self.wanted } else { 1.0 }
    }
}

/// One host.
#[derive(Clone, Debug, Default)]
pub struct HostMeasure {
    pub ran_ms: Millis,
    /// By state, from high to low.
    pub state_ms: [Millis; 4],
    pub state_changes: u64,
    pub decisions: u64,
    pub steps: u64,
    pub least_free: Option<u64>,
    /// More was in use than the budget: for a while after that was lowered, never else.
    pub overdrawn_ms: Millis,
    /// The most memory configured at a time.
    pub most_configured: u64,
    pub refused: u64,
}

impl HostMeasure {
    pub fn step(&mut self, dt: Millis, state: State, free: Option<u64>, configured: u64) {
        self.ran_ms += dt;
        self.overdrawn_ms += if free.is_none() { dt } else { 0 };
        let free = free.unwrap_or(0);
        self.steps += 1;
        self.state_ms[state as usize] += dt;
        self.least_free = Some(self.least_free.map_or(free, |least| least.min(free)));
        self.most_configured = self.most_configured.max(configured);
    }

    /// The part of the time in this state.
    pub fn part(&self, state: State) -> f64 {
        self.state_ms[state as usize] as f64 / self.ran_ms.max(1) as f64
    }
}

/// Jain's index of fairness: 1 if all are equal, 1/n if one has all.
pub fn jain(values: &[f64]) -> f64 {
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
    fn fairness_is_one_for_equals() {
        assert_eq!(jain(&[0.5, 0.5]), 1.0);
        assert_eq!(jain(&[1.0, 0.0]), 0.5);
        assert_eq!(jain(&[]), 1.0);
    }
}
