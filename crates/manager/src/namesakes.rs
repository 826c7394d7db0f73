//! What passes, and what a VM that somebody else starts waits for: whoever is refused runs without Ballast for good.
//!
//! Of one that begins under the name of one that has just ended, as a guest that libvirt restarts, the predecessor's memory
//! is given back meanwhile, which takes seconds where that was much. And a manager that is asked to leave for another
//! one takes nobody in: that other one does, or it goes on after all.

use std::time::{Duration, Instant};

use crate::manager::Manager;
use crate::sync::lock;

/// How long at most.
const CLEARED: Duration = Duration::from_secs(15);
/// How long a manager may take to decide whether it leaves; it is within the time that a shim waits.
const DECIDED: Duration = Duration::from_secs(20);
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

    /// Waits, from `since` on, while this manager is to leave and may go on yet. Not for the threads of the runtime.
    ///
    /// # Errors
    /// It ends, or took too long: whoever hears nothing tries again, and finds the next one, or none.
    pub(crate) fn wait_for_reopening(&self, since: Instant) -> Result<(), String> {
        while self.is_closing() {
            if self.is_ending_vms() || self.is_stopping() || since.elapsed() >= DECIDED {
                return Err("it came while this manager is ending: left to the next one".to_owned());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Whether who has that name has ended, and gives back what it had.
    fn is_cleared_away(&self, name: &str) -> bool {
        lock(&self.clearing).contains(name)
            || self.find(name).is_some_and(|vm| !vm.process.is_alive())
            || lock(&self.waiting).get(name).is_some_and(|waits| !waits.process.is_alive())
    }
}
