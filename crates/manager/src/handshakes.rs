//! How many shims may be in their handshake at one time: in all, and of one process. Whoever connects
//! and says nothing takes none of the places that others need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ballast_shim_proto::Connection;

use crate::commons::hung_up;
use crate::vm::lock;

/// Of all processes that are not expected.
const MOST: usize = 64;
/// Of one process, expected or not: its own, and those of threads that gave up a moment ago.
const MOST_OF_ONE: usize = 4;

/// Handshakes that are under way.
#[derive(Default)]
pub struct Handshakes {
    /// Handshakes that are under way, by process.
    by_pid: Mutex<HashMap<u32, usize>>,
}

/// A place among them, given back when it is dropped.
pub struct Handshake {
    all: Arc<Handshakes>,
    pid: u32,
}

impl Handshakes {
    /// None if there is no place. A VMM that the manager waits for finds one however many others have
    /// come.
    pub fn begin(self: &Arc<Self>, pid: u32, is_expected: bool) -> Option<Handshake> {
        let mut by_pid = lock(&self.by_pid);
        let all: usize = by_pid.values().sum();
        let own = by_pid.get(&pid).copied().unwrap_or_default();
        if own >= MOST_OF_ONE || (all >= MOST && !is_expected) {
            return None;
        }
        by_pid.insert(pid, own + 1);
        Some(Handshake { all: self.clone(), pid })
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut by_pid = lock(&self.all.by_pid);
        match by_pid.get_mut(&self.pid) {
            Some(n) if *n > 1 => *n -= 1,
            _ => {
                by_pid.remove(&self.pid);
            }
        }
    }
}

/// The connections of shims whose VMs are managed, kept for as long as both sides live: a shim takes the
/// closing of its as the manager's death.
#[derive(Default)]
pub struct Connections(Mutex<Vec<Arc<Connection>>>);

impl Connections {
    /// Until it is pruned.
    pub fn keep(&self, connection: Arc<Connection>) {
        lock(&self.0).push(connection);
    }

    /// Lets go of those whose other side is gone.
    pub fn prune(&self) {
        lock(&self.0).retain(|connection| !hung_up(connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_and_all_together_are_limited_and_the_expected_gets_in() {
        let all = Arc::new(Handshakes::default());
        let mut held: Vec<Handshake> =
            (0..MOST_OF_ONE).map(|_| all.begin(1, false).unwrap()).collect();
        assert!(all.begin(1, false).is_none() && all.begin(1, true).is_none());
        for pid in 2.. {
            let Some(place) = all.begin(pid, false) else { break };
            held.push(place);
        }
        assert_eq!(held.len(), MOST);
        let expected = all.begin(5000, true).unwrap();
        assert!(all.begin(5001, false).is_none());
        drop(held);
        assert!(all.begin(1, false).is_some());
        drop(expected);
        assert!(lock(&all.by_pid).is_empty());
    }
}
