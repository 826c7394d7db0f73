//! When a VM's fault service has the host's idle processors kept awake (`crate::awake`): from the second fault on of
//! those that follow one another, until none came for a moment. A fault that is alone is none of it: what it would gain is
//! over by then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::host::Host;

/// Faults no further apart than this follow one another.
const FOLLOWS: Duration = Duration::from_micros(500);
/// While something is being read, or waited for, the next one may come this much later.
const BUSY: Duration = Duration::from_millis(5);

pub(super) struct Wakeful {
    host: Arc<Host>,
    last: Option<Instant>,
    asks: bool,
}

impl Wakeful {
    pub fn new(host: Arc<Host>) -> Wakeful {
        Wakeful { host, last: None, asks: false }
    }

    /// Faults were read then, and are served, or on their way.
    pub fn faulted(&mut self, at: Instant) {
        let follows = self.last.replace(at).is_some_and(|last| at.duration_since(last) <= FOLLOWS);
        if follows && !self.asks {
            self.asks = self.host.awake.ask();
        }
    }

    /// How long until that is to be looked at again; `busy` while something is being read, or waited for.
    pub fn rest(&self, now: Instant, busy: bool) -> Duration {
        match self.last.filter(|_| self.asks) {
            Some(last) => (last + linger(busy)).saturating_duration_since(now),
            None => Duration::MAX,
        }
    }

    /// Lets go where no fault came for long enough.
    pub fn settle(&mut self, now: Instant, busy: bool) {
        if self.asks && self.rest(now, busy).is_zero() {
            self.asks = false;
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

fn linger(busy: bool) -> Duration {
    if busy { BUSY } else { FOLLOWS }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use ballast_units::Pages;

    use super::*;
    use crate::awake::Awake;
    use crate::ledger::Ledger;

    #[test]
    fn processors_are_kept_awake_from_the_second_fault_on_until_none_came_for_a_moment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let awake = Awake::by(file.path().to_str().unwrap(), 0);
        awake.allow(true);
        let host = Arc::new(Host::new(Ledger::new(Pages(1), || {})).with_awake(awake));
        let told = || std::fs::read(file.path()).unwrap().len() / 4;
        let (mut wakeful, begun) = (Wakeful::new(host.clone()), Instant::now());
        let after = |us: u64| begun + Duration::from_micros(us);
        wakeful.faulted(after(0));
        wakeful.faulted(after(501));
        assert_eq!((told(), wakeful.rest(after(501), false)), (0, Duration::MAX));
        wakeful.faulted(after(1_001));
        wakeful.faulted(after(1_101));
        assert_eq!(told(), 1);
        assert_eq!(wakeful.rest(after(1_201), false), Duration::from_micros(400));
        wakeful.settle(after(1_600), false);
        // What is being read is waited for.
        wakeful.settle(after(6_100), true);
        assert_eq!(told(), 1);
        wakeful.settle(after(6_101), true);
        assert_eq!((told(), wakeful.rest(after(7_000), false)), (2, Duration::MAX));
        // The next one is alone again.
        wakeful.faulted(after(7_000));
        assert_eq!(told(), 2);
        wakeful.faulted(after(7_001));
        drop(wakeful);
        assert_eq!(told(), 4);
        assert!(!host.awake.total().is_zero());
    }
}
