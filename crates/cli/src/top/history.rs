//! The last samples of one VM, for the small charts.

use std::collections::VecDeque;

use ballast_api::VmView;

use crate::table;

/// Two minutes at the default interval.
pub const CAPACITY: usize = 120;

/// Bytes, at one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub consumed: u64,
    pub target: u64,
    /// None while nothing is sampled.
    pub active: Option<u64>,
}

impl Sample {
    pub fn of(vm: &VmView) -> Sample {
        Sample {
            consumed: vm.memory.consumed,
            target: vm.memory.target,
            active: table::estimate(vm),
        }
    }
}

/// At most [`CAPACITY`] samples, oldest first.
#[derive(Clone, Debug, Default)]
pub struct History {
    samples: VecDeque<Sample>,
}

impl History {
    pub fn push(&mut self, sample: Sample) {
        while self.samples.len() >= CAPACITY {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// The newest `n` values of one kind, oldest first.
    pub fn last<T>(&self, n: usize, value: impl Fn(&Sample) -> T) -> Vec<T> {
        let skip = self.samples.len().saturating_sub(n);
        self.samples.iter().skip(skip).map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_samples_leave_first() {
        let mut history = History::default();
        for i in 0..CAPACITY as u64 + 5 {
            history.push(Sample { consumed: i, target: 0, active: None });
        }
        let all = history.last(usize::MAX, |s| s.consumed);
        assert_eq!((all.len(), all[0]), (CAPACITY, 5));
        assert_eq!(history.last(2, |s| s.consumed), [123, 124]);
    }
}
