//! Readings of /proc that the process which they are about may keep waiting: whoever holds the lock of its mappings keeps each
//! thread that reads them. No more than so many wait so, whoever comes with how many processes.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::{proc_text, process};

/// Under way at a time, of the 512 threads that the runtime has for what blocks: of the manager's own user, and of all others.
const MOST: usize = 64;
/// Of one of those others.
const MOST_OF_USER: usize = 16;
/// For a place, and again for the reading, which is long where other VMMs have many mappings.
const DEADLINE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(20);

static READINGS: Readings = Readings::new();
/// Of who comes in: he waits for no look at those who are there, which all processes of the host may hold up.
static OF_NEWCOMERS: Readings = Readings::new();

/// What `read` finds about a process, in a thread of its own; one at a time of each process.
///
/// # Errors
/// Why it is not known, in one line: no answer in time, and its thread stays until there is one; or no place.
pub(super) async fn read<T: Send + 'static>(
    pid: u32,
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<io::Result<T>, String> {
    READINGS.read(DEADLINE, pid, user_of(pid), read).await
}

/// The same, about a process that asks to be taken in.
///
/// # Errors
/// As of [`read`].
pub(super) async fn read_of_newcomer<T: Send + 'static>(
    pid: u32,
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<io::Result<T>, String> {
    OF_NEWCOMERS.read(DEADLINE, pid, user_of(pid), read).await
}

/// The real one: of a process that is not dumpable root owns its /proc/PID.
fn user_of(pid: u32) -> Option<u32> {
    let status = process::read(pid, "status");
    status.and_then(|status| proc_text::status_number(&status, "Uid"))
}

/// Those that are under way, and whose processes they are about.
struct Readings(Mutex<BTreeMap<u32, Option<u32>>>);

impl Readings {
    const fn new() -> Readings {
        Readings(Mutex::new(BTreeMap::new()))
    }

    async fn read<T: Send + 'static>(
        &'static self,
        patience: Duration,
        pid: u32,
        user: Option<u32>,
        read: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<io::Result<T>, String> {
        let deadline = Instant::now() + patience;
        let place = loop {
            match self.place(pid, user) {
                Ok(place) => break place,
                Err(why) if Instant::now() >= deadline => return Err(why),
                Err(_) => sleep(STEP).await,
            }
        };
        let reading = tokio::task::spawn_blocking(move || {
            // Until it has come back, whoever asked.
            let _place = place;
            read()
        });
        match timeout(patience, reading).await {
            Ok(found) => found.map_err(|_| format!("the look at process {pid} was ended")),
            Err(_) => {
                let s = patience.as_secs();
                Err(format!("process {pid} could not be looked at within {s} s"))
            }
        }
    }

    /// One for a reading, or why there is none.
    fn place(&'static self, pid: u32, user: Option<u32>) -> Result<Place, String> {
        let mut under_way = self.under_way();
        if under_way.contains_key(&pid) {
            return Err(format!("process {pid} is being looked at still, since long ago"));
        }
        let own = Some(rustix::process::getuid().as_raw());
        let of_user = under_way.values().filter(|of| **of == user).count();
        let of_others = under_way.values().filter(|of| **of != own).count();
        let is_full = match user == own {
            true => of_user >= MOST,
            false => of_user >= MOST_OF_USER || of_others >= MOST,
        };
        if is_full {
            return Err(format!("process {pid}: too many others are being looked at"));
        }
        under_way.insert(pid, user);
        Ok(Place { all: self, pid })
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<u32, Option<u32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Given back when it is dropped.
struct Place {
    all: &'static Readings,
    pid: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.under_way().remove(&self.pid);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// With a thread more than all others' processes may keep waiting.
    #[test]
    fn processes_that_do_not_let_themselves_be_looked_at_leave_threads_for_others() {
        static ALL: Readings = Readings::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(MOST + 1)
            .build()
            .unwrap();
        let own = rustix::process::getuid().as_raw();
        let hangs = async |pid: u32, user: u32| -> (Sender<()>, String) {
            let (end, ended) = channel::<()>();
            let read = move || Ok(ended.recv());
            let told = ALL.read(Duration::from_millis(1), pid, Some(user), read).await;
            (end, told.unwrap_err())
        };
        let answers = async |pid: u32, user: u32| {
            ALL.read(DEADLINE, pid, Some(user), || Ok(7))
                .await
                .is_ok_and(|found| found.unwrap() == 7)
        };
        runtime.block_on(async {
            let users = || (own + 1..).take(MOST / MOST_OF_USER + 2);
            let (mut kept, mut refused) = (Vec::new(), 0);
            for (n, user) in users().enumerate() {
                for pid in 0..MOST_OF_USER as u32 + 4 {
                    let (end, why) = hangs(n as u32 * 100 + pid, user).await;
                    refused += usize::from(why.contains("too many others"));
                    kept.push(end);
                }
                // Of the same process there is one, and beside a user's that do not answer there are others'.
                let (_, again) = hangs(n as u32 * 100, user).await;
                assert!(n >= MOST / MOST_OF_USER || again.contains("looked at still"), "{again}");
                assert!(n > 2 || answers(9_999, user + 1).await);
            }
            assert_eq!(kept.len() - refused, MOST);
            assert!(answers(10_000, own).await, "the manager's own");
            assert_eq!(tokio::task::spawn_blocking(|| 7).await.unwrap(), 7);
            drop(kept);
            while !ALL.under_way().is_empty() {
                tokio::task::yield_now().await;
            }
            assert!(answers(0, own + 1).await);
        });
    }
}
