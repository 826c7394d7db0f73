//! When a VM's fault service has the host's idle processors kept awake (`crate::awake`): from the third call on of those
//! that follow one another, faults or pages that a balloon gives up one by one, until none came for a moment. To ask, and to
//! let go, wakes all of them, so that it is for rows of calls: of one that is alone what it would gain is over by then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::host::Host;

/// Calls no further apart than this follow one another, whatever was read for them in between, and so many are a row.
const FOLLOWS: Duration = Duration::from_millis(1);
const ROW: u32 = 3;
/// How long after the last of a row processors are kept awake.
const KEPT: Duration = Duration::from_millis(2);
/// While something is being read, or waited for, the next one may come this much later.
const BUSY: Duration = Duration::from_millis(5);

pub(super) struct Wakeful {
    host: Arc<Host>,
    /// When the last call was read, and when something was last waited for because of it.
    last: Option<Instant>,
    busy: Option<Instant>,
    row: u32,
    asks: bool,
}

impl Wakeful {
    pub fn new(host: Arc<Host>) -> Wakeful {
        Wakeful { host, last: None, busy: None, row: 0, asks: false }
    }

    /// Faults were read then, and are served, or on their way, or pages that were given up.
    pub fn called(&mut self, at: Instant) {
        let follows = self.latest().is_some_and(|last| at.duration_since(last) <= FOLLOWS);
        self.row = if follows { self.row.saturating_add(1) } else { 1 };
        self.last = Some(at);
        if self.row >= ROW && !self.asks {
            self.asks = self.host.awake.ask();
        }
    }

    fn latest(&self) -> Option<Instant> {
        self.last.max(self.busy)
    }

    /// Something is being read, or waited for.
    pub fn is_busy(&mut self, now: Instant) {
        if self.last.is_some_and(|last| now.duration_since(last) <= BUSY) {
            self.busy = Some(now);
        }
    }

    /// How long until that is to be looked at again.
    pub fn rest(&self, now: Instant) -> Duration {
        match self.latest().filter(|_| self.asks) {
            Some(last) => (last + KEPT).saturating_duration_since(now),
            None => Duration::MAX,
        }
    }

    /// Lets go where no call came for long enough, or it is not allowed any more.
    pub fn settle(&mut self, now: Instant) {
        if self.asks && (self.rest(now).is_zero() || !self.host.awake.is_allowed()) {
            (self.asks, self.row) = (false, 0);
            self.host.awake.let_go();
        }
    }
}

impl Drop for Wakeful {
    fn drop(&mut self) {
        if self.asks {
            self.host.awake.let_go();
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use ballast_units::Pages;

    use super::*;
    use crate::awake::Awake;
    use crate::ledger::Ledger;

    #[test]
    fn processors_are_kept_awake_from_the_third_fault_on_until_none_came_for_a_moment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let awake = Awake::by(file.path().to_str().unwrap(), 0);
        awake.allow(true);
        let host = Arc::new(Host::new(Ledger::new(Pages(1), || {})).with_awake(awake));
        let told = || std::fs::read(file.path()).unwrap().len() / 4;
        let (mut wakeful, begun) = (Wakeful::new(host.clone()), Instant::now());
        let after = |us: u64| begun + Duration::from_micros(us);
        [0, 900, 2_000, 2_900].iter().for_each(|us| wakeful.called(after(*us)));
        assert_eq!((told(), wakeful.rest(after(2_900))), (0, Duration::MAX), "two, and two");
        wakeful.called(after(3_000));
        assert_eq!(told(), 1);
        assert_eq!(wakeful.rest(after(3_100)), Duration::from_micros(1_900));
        wakeful.settle(after(4_999));
        // What is being read is waited for, and the next fault follows that.
        wakeful.is_busy(after(7_000));
        wakeful.settle(after(8_900));
        wakeful.called(after(7_900));
        assert_eq!((told(), wakeful.row), (1, 4));
        // Not for ever.
        wakeful.is_busy(after(12_900));
        wakeful.is_busy(after(13_000));
        wakeful.settle(after(14_899));
        assert_eq!(told(), 1);
        wakeful.settle(after(14_900));
        assert_eq!((told(), wakeful.rest(after(15_000))), (2, Duration::MAX));
        // The next row begins anew.
        [15_000, 15_001].iter().for_each(|us| wakeful.called(after(*us)));
        assert_eq!(told(), 2);
        wakeful.called(after(15_002));
        assert_eq!(told(), 3);
        host.awake.allow(false);
        wakeful.settle(after(15_003));
        assert_eq!(told(), 4);
        (0..9).for_each(|us| wakeful.called(after(15_010 + us)));
        assert_eq!(told(), 4);
        host.awake.allow(true);
        (0..9).for_each(|us| wakeful.called(after(15_020 + us)));
        drop(wakeful);
        assert_eq!(told(), 6);
        assert!(!host.awake.total().is_zero());
    }
}
