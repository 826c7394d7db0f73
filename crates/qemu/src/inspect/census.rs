//! Which processes have which files, mapped or open: one look at all of /proc, shared by all who ask at
//! about the same time. After a restart that is every VM at once, and each VMM may have tens of thousands
//! of mappings.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_uffd::procmap;

use super::scan::identity;

/// Device, major and minor, and inode.
pub(super) type FileId = ((u32, u32), u64);

pub(super) struct Census {
    begun: Instant,
    processes: Vec<Files>,
}

struct Files {
    pid: u32,
    mapped: HashSet<FileId>,
    open: HashSet<FileId>,
}

/// Where censuses are taken, one at a time.
struct Office {
    desk: Mutex<Desk>,
    done: Condvar,
}

/// The last census, and since when one is being taken.
struct Desk {
    last: Option<Arc<Census>>,
    under_way: Option<Instant>,
}

/// For so long a census is waited for that another thread takes.
const PATIENCE: Duration = Duration::from_secs(8);

/// A look that began no earlier than `asked`: who waits for one that runs already shares the next.
///
/// # Errors
/// TimedOut: one is being taken and does not end, because some process of the host cannot be looked at.
pub(super) fn begun_after(asked: Instant) -> io::Result<Arc<Census>> {
    static OFFICE: Office = Office::new();
    OFFICE.begun_after(asked, PATIENCE, Census::take)
}

impl Office {
    const fn new() -> Office {
        let desk = Mutex::new(Desk { last: None, under_way: None });
        Office { desk, done: Condvar::new() }
    }

    fn begun_after(
        &self,
        asked: Instant,
        patience: Duration,
        take: impl FnOnce() -> io::Result<Census>,
    ) -> io::Result<Arc<Census>> {
        let until = Instant::now() + patience;
        let mut desk = self.desk();
        loop {
            if let Some(census) = desk.last.as_ref().filter(|census| census.begun >= asked) {
                return Ok(census.clone());
            }
            let Some(since) = desk.under_way else { break };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let age = since.elapsed().as_secs();
                let what = format!(
                    "the look at all processes of the host is kept by one of them, for {age} s so far"
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            let waited = self.done.wait_timeout(desk, left);
            desk = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        desk.under_way = Some(Instant::now());
        drop(desk);
        let turn = Turn(self);
        let taken = take().map(Arc::new);
        if let Ok(census) = &taken {
            self.desk().last = Some(census.clone());
        }
        drop(turn);
        taken
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// That one is being taken. It ends however the look ends: nobody waits for one that panicked.
struct Turn<'a>(&'a Office);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.desk().under_way = None;
        self.0.done.notify_all();
    }
}

impl Census {
    fn take() -> io::Result<Census> {
        let begun = Instant::now();
        let pids = fs::read_dir("/proc")?
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok()));
        Ok(Census { begun, processes: pids.map(Files::of).collect() })
    }

    /// Processes that had the file, by the name it has in maps or by that which stat tells.
    pub fn holders(&self, mapped: FileId, stat: FileId) -> impl Iterator<Item = u32> {
        self.processes
            .iter()
            .filter(move |files| files.mapped.contains(&mapped) || files.open.contains(&stat))
            .map(|files| files.pid)
    }
}

impl Files {
    /// A process that cannot be read is gone, or not ours to see.
    fn of(pid: u32) -> Files {
        let open = fs::read_dir(format!("/proc/{pid}/fd"))
            .map(|fds| fds.flatten().filter_map(|entry| identity(&entry.path())).collect());
        Files { pid, mapped: mapped(pid).unwrap_or_default(), open: open.unwrap_or_default() }
    }
}

fn mapped(pid: u32) -> io::Result<HashSet<FileId>> {
    let mut found = HashSet::new();
    procmap::each(pid, |vma| {
        // Other memory is of no file.
        if vma.inode != 0 {
            found.insert((vma.device, vma.inode));
        }
        true
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_look_that_does_not_end_keeps_nobody_but_who_takes_it() {
        let office = Arc::new(Office::new());
        let (taking, begun) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let hangs = {
            let office = office.clone();
            std::thread::spawn(move || {
                let take = || {
                    taking.send(()).unwrap();
                    let _ = ended.recv();
                    Ok(Census { begun: Instant::now(), processes: Vec::new() })
                };
                office.begun_after(Instant::now(), PATIENCE, take).unwrap();
            })
        };
        begun.recv().unwrap();
        let asked = Instant::now();
        let nobody = || -> io::Result<Census> { panic!("a second one at a time") };
        for patience in [Duration::ZERO, Duration::from_millis(5)] {
            let late = office.begun_after(asked, patience, nobody);
            assert_eq!(late.err().map(|e| e.kind()), Some(io::ErrorKind::TimedOut));
        }
        end.send(()).unwrap();
        hangs.join().unwrap();
        // The look that ended at last is as good as any that began after it was asked for.
        assert!(office.begun_after(asked, Duration::ZERO, nobody).unwrap().begun >= asked);
        // Nor is one waited for that panicked.
        let office = Arc::new(office_that_panicked());
        let nothing = || Ok(Census { begun: Instant::now(), processes: Vec::new() });
        assert!(office.begun_after(Instant::now(), Duration::ZERO, nothing).is_ok());
        let none = |_| Err::<Census, _>(io::Error::from(io::ErrorKind::PermissionDenied));
        let failed = office.begun_after(Instant::now(), Duration::ZERO, || none(()));
        assert_eq!(failed.err().map(|e| e.kind()), Some(io::ErrorKind::PermissionDenied));
    }

    fn office_that_panicked() -> Office {
        let office = Office::new();
        let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let panics = || -> io::Result<Census> { panic!("on purpose") };
            let _ = office.begun_after(Instant::now(), Duration::ZERO, panics);
        }));
        assert!(ends.is_err());
        office
    }

    #[test]
    fn whoever_asks_gets_a_look_that_began_afterwards_and_sees_what_was_open_by_then() {
        // Not a file of a disk: their inode numbers are used again at once, by other tests too.
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("census", flags).unwrap());
        let meta = file.metadata().unwrap();
        let dev = meta.dev();
        let id = ((rustix::fs::major(dev), rustix::fs::minor(dev)), meta.ino());
        let asked = Instant::now();
        let census = begun_after(asked).unwrap();
        assert!(census.begun >= asked);
        assert!(census.holders(id, id).any(|pid| pid == std::process::id()));
        let again = begun_after(asked).unwrap();
        assert!(again.begun >= census.begun);
        drop(file);
        let later = begun_after(Instant::now()).unwrap();
        assert!(!later.holders(id, id).any(|pid| pid == std::process::id()));
    }
}
