//! A VM that somebody else starts under the name of one that has just ended, as libvirt does with a guest that is
//! restarted: its predecessor's memory is given back meanwhile, which takes seconds where that was much. Whoever is refused
//! runs without Ballast for good: so it waits for that.

use std::time::{Duration, Instant};

use crate::manager::Manager;
use crate::sync::lock;

/// How long at most.
const CLEARED: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(20);

impl Manager {
    /// Waits until nothing is left of a VM of that name that has ended; not for one that lives. Not for the threads of
    /// the runtime.
    pub(crate) fn wait_for_namesake(&self, name: &str) {
        let begun = Instant::now();
        while self.is_cleared_away(name) && !self.is_stopping() && begun.elapsed() < CLEARED {
            std::thread::sleep(LOOK);
        }
    }

    /// Whether who has that name has ended, and gives back what it had.
    fn is_cleared_away(&self, name: &str) -> bool {
        lock(&self.clearing).contains(name)
            || self.vm(name).is_ok_and(|vm| !vm.process.is_alive())
            || lock(&self.waiting).get(name).is_some_and(|waits| !waits.process.is_alive())
    }
}
