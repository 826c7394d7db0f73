//! What all VMs of a host share: the ledger, the reclamation state in force, the mark below which memory is no longer
//! plentiful, and whether idle processors are kept awake.

use std::sync::{Condvar, Mutex as WaitMutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_units::Pages;

use crate::awake::Awake;
use crate::ledger::Ledger;
use crate::sync::{AtomicU64, Ordering};

/// One for all VMs. Whatever it holds, any thread may ask for and change.
pub struct Host {
    /// The budget, and what is handed out of it.
    pub ledger: Ledger,
    /// Keeps idle processors awake for guests that wait.
    pub awake: Awake,
    low: AtomicU64,
    plenty: AtomicU64,
    unreadable_changes: WaitMutex<u64>,
    unreadable_changed: Condvar,
}

impl Host {
    /// Not low, and with plenty of memory however little is free, until it is told otherwise.
    pub fn new(ledger: Ledger) -> Host {
        Host {
            ledger,
            awake: Awake::default(),
            low: AtomicU64::new(0),
            plenty: AtomicU64::new(0),
            unreadable_changes: WaitMutex::new(0),
            unreadable_changed: Condvar::new(),
        }
    }

    /// With processors that can be kept awake; without, none are.
    pub fn with_awake(self, awake: Awake) -> Host {
        Host { awake, ..self }
    }

    /// Whether the host is in state low: VMs above their target wait at their next allocation
    /// (OSDI'02 s.6.3).
    pub fn is_low(&self) -> bool {
        self.low.load(Ordering::Relaxed) != 0
    }
    /// Those that waited because the host was low try again by themselves, within milliseconds.
    pub fn set_low(&self, low: bool) {
        self.low.store(u64::from(low), Ordering::Relaxed);
    }

    /// Free memory that must remain for a page to be handed out before it is asked for.
    pub fn plenty(&self) -> Pages {
        Pages(self.plenty.load(Ordering::Relaxed))
    }
    /// 0: nothing need remain.
    pub fn set_plenty(&self, floor: Pages) {
        self.plenty.store(floor.0, Ordering::Relaxed);
    }

    /// How often so far a VM began or ceased to wait for pages that cannot be read: who stops VMs for that need not ask
    /// each of them while this is what it was.
    pub fn unreadable_changes(&self) -> u64 {
        *self.changes()
    }
    /// Returns once that is no longer `seen`, or after so long.
    pub fn await_unreadable_change(&self, seen: u64, most: Duration) {
        let is_still = |now: &mut u64| *now == seen;
        let waited = self.unreadable_changed.wait_timeout_while(self.changes(), most, is_still);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
    /// After one has; or who waits for that is to look for another reason.
    pub fn tell_unreadable_change(&self) {
        *self.changes() += 1;
        self.unreadable_changed.notify_all();
    }

    fn changes(&self) -> MutexGuard<'_, u64> {
        self.unreadable_changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_change_is_woken_by_it_and_by_one_that_has_come_before() {
        let host = Host::new(Ledger::new(Pages(1), || {}));
        host.await_unreadable_change(0, Duration::from_millis(1));
        assert_eq!(host.unreadable_changes(), 0);
        std::thread::scope(|scope| {
            let (waits, begun) = std::sync::mpsc::channel();
            let host = &host;
            scope.spawn(move || {
                waits.send(()).unwrap();
                // For good, if it is not woken.
                host.await_unreadable_change(0, Duration::MAX);
            });
            begun.recv().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            host.tell_unreadable_change();
        });
        host.await_unreadable_change(0, Duration::MAX);
        assert_eq!(host.unreadable_changes(), 1);
    }
}
