//! Processes that take turns: those whose turn it is not are stopped (SIGSTOP). So whatever else goes on on the host falls
//! on all alike, which runs of minutes one after the other do not achieve on a machine that has neighbours.

use std::time::{Duration, Instant};

/// Of a turn: short, for a neighbour's bursts to fall on all alike.
const TURN: Duration = Duration::from_secs(1);

/// Who has its turn together: VMMs, and their manager if they have one. All are children of this process, or of the manager that
/// is: their numbers stay theirs while they are measured.
#[derive(Debug)]
pub struct Players {
    /// Their manager.
    pub manager: Option<i32>,
    /// Their processes.
    pub vmms: Vec<i32>,
}

impl Players {
    /// The manager first: what it waits for is answered before its guests stop.
    pub fn stop(&self) {
        self.manager.iter().chain(&self.vmms).for_each(|&pid| signal(pid, libc::SIGSTOP));
    }
    /// The guests first: what the manager waits for is answered before it looks at the clock.
    pub fn go_on(&self) {
        self.vmms.iter().chain(&self.manager).for_each(|&pid| signal(pid, libc::SIGCONT));
    }
    /// The manager alone, until `stop`.
    pub fn manager_goes_on(&self) {
        self.manager.iter().for_each(|&pid| signal(pid, libc::SIGCONT));
    }
    /// One turn, of players that are stopped, and are so afterwards. Answers how long it was: who keeps this process from
    /// ending it has more.
    pub async fn turn(&self) -> Duration {
        let begun = Instant::now();
        self.go_on();
        tokio::time::sleep(TURN).await;
        self.stop();
        begun.elapsed()
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: kill touches no memory; see `Players` for whose number it is.
    unsafe { libc::kill(pid, signal) };
}
