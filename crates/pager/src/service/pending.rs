//! Faults and discards that could not be done at once, in the order that must hold: a fault on a
//! page is never served while an earlier discard of that page is outstanding, for the discard
//! would then drop what the guest has written since.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use crate::memory::{Access, Mark, Wait};

/// How long a VMM gets to punch pages that it has announced as given up.
const PUNCH_TIME: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, Debug)]
pub struct WaitingFault {
    pub access: Access,
    pub since: Instant,
    /// Why it waits, the last time it was tried.
    pub why: Wait,
}

#[derive(Debug, Default)]
pub struct Pending {
    faults: BTreeMap<Ppn, WaitingFault>,
    discards: Vec<(Ppn, u64, Mark)>,
    /// Given up, but seen at home; to be looked at again, in order of time.
    unpunched: VecDeque<(Ppn, u64, Instant)>,
}

impl Pending {
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.discards.is_empty() && self.unpunched.is_empty()
    }
    pub fn faults(&self) -> usize {
        self.faults.len()
    }

    /// Keeps a fault; answers whether it is new. A second one on the same page joins the first:
    /// Missing covers all, since serving it looks at what is there.
    pub fn keep_fault(&mut self, ppn: Ppn, access: Access, why: Wait) -> bool {
        let mut new = false;
        let fault = self.faults.entry(ppn).or_insert_with(|| {
            new = true;
            WaitingFault { access, since: Instant::now(), why }
        });
        if access == Access::Missing || fault.access == Access::Protected {
            fault.access = access;
        }
        fault.why = why;
        new
    }

    pub fn keep_discards(&mut self, ranges: Vec<(Ppn, u64)>, mark: Mark) {
        self.discards.extend(ranges.into_iter().map(|(first, n)| (first, n, mark)));
    }

    pub fn take_discards(&mut self) -> Vec<(Ppn, u64, Mark)> {
        std::mem::take(&mut self.discards)
    }

    pub fn discard_outstanding(&self, ppn: Ppn) -> bool {
        self.discards.iter().any(|&(first, n, _)| (first.0..first.0 + n).contains(&ppn.0))
    }

    pub fn look_again(&mut self, ranges: Vec<(Ppn, u64)>) {
        let due = Instant::now() + PUNCH_TIME;
        self.unpunched.extend(ranges.into_iter().map(|(first, n)| (first, n, due)));
    }

    /// Ranges to look at now.
    pub fn take_due(&mut self) -> Vec<(Ppn, u64)> {
        let now = Instant::now();
        let due = self.unpunched.iter().take_while(|&&(_, _, at)| at <= now).count();
        self.unpunched.drain(..due).map(|(first, n, _)| (first, n)).collect()
    }

    /// Whether something will be ready for another try very soon.
    pub fn is_brief(&self) -> bool {
        !self.discards.is_empty()
            || self.faults.values().any(|f| matches!(f.why, Wait::Busy | Wait::Discard))
    }

    pub fn fault(&self, ppn: Ppn) -> Option<WaitingFault> {
        self.faults.get(&ppn).copied()
    }
    pub fn waiting(&self) -> Vec<Ppn> {
        self.faults.keys().copied().collect()
    }
    pub fn drop_fault(&mut self, ppn: Ppn) -> Option<WaitingFault> {
        self.faults.remove(&ppn)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::memory::Departures;

    #[test]
    fn a_fault_behind_a_discard_is_seen_to_be() {
        let mut pending = Pending::default();
        assert!(pending.is_empty());
        let mark = Departures::new().mark();
        pending.keep_discards(vec![(Ppn(10), 5)], mark);
        assert!(!pending.discard_outstanding(Ppn(9)));
        assert!(pending.discard_outstanding(Ppn(10)));
        assert!(pending.discard_outstanding(Ppn(14)));
        assert!(!pending.discard_outstanding(Ppn(15)));
        assert_eq!(pending.take_discards(), [(Ppn(10), 5, mark)]);
        assert!(!pending.discard_outstanding(Ppn(10)));
    }

    #[test]
    fn two_faults_on_a_page_are_one_and_missing_wins() {
        let mut pending = Pending::default();
        assert!(pending.keep_fault(Ppn(1), Access::Missing, Wait::Busy));
        assert!(!pending.keep_fault(Ppn(1), Access::Protected, Wait::Memory));
        let fault = pending.fault(Ppn(1)).unwrap();
        assert_eq!((fault.access, fault.why), (Access::Missing, Wait::Memory));
        assert_eq!(pending.waiting(), [Ppn(1)]);
        assert!(pending.drop_fault(Ppn(1)).is_some());
        assert!(pending.is_empty());
    }
}
