//! Which processes have which files, mapped or open: one look at all of /proc, shared by all who ask at
//! about the same time. After a restart that is every VM at once, and each VMM may have tens of thousands
//! of mappings: those of a process are gone over again when its address space has another size than at the last look,
//! and every ten minutes.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_uffd::procmap;
use ballast_units::Bytes;
use rustix::fs::makedev;

use super::scan::identity;
use crate::{proc_text, process};

/// Device, major and minor, and inode.
pub(super) type FileId = ((u32, u32), u64);

pub(super) struct Census {
    begun: Instant,
    processes: Vec<Files>,
}

struct Files {
    pid: u32,
    mapped: Mapped,
    open: HashSet<FileId>,
}

/// The files that a process has mapped.
#[derive(Clone)]
struct Mapped {
    /// As [`procmap::Mapped`] names them.
    files: Arc<HashSet<(u64, u64)>>,
    /// When they were gone over.
    read: Instant,
    /// Of the process by then; None if it could not be told.
    space: Option<Space>,
}

/// What a process keeps while it maps nothing that it had not: since when it is there (ticks), and the size of its address
/// space. Who maps one thing and unmaps as much of another keeps it too.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Space {
    started: u64,
    size: Bytes,
}

/// So long a process of one size is taken to have what it had mapped.
const TRUSTED: Duration = Duration::from_secs(600);

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
        take: impl FnOnce(Option<&Census>) -> io::Result<Census>,
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
        let last = desk.last.clone();
        drop(desk);
        let turn = Turn(self);
        let taken = take(last.as_deref()).map(Arc::new);
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
    fn take(last: Option<&Census>) -> io::Result<Census> {
        let begun = Instant::now();
        let pids = fs::read_dir("/proc")?
            .flatten()
            .filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok()));
        let known: HashMap<u32, &Mapped> = last
            .iter()
            .flat_map(|last| &last.processes)
            .map(|files| (files.pid, &files.mapped))
            .collect();
        let files = |pid| Files::of(pid, known.get(&pid).copied());
        Ok(Census { begun, processes: pids.map(files).collect() })
    }

    /// Processes that had the file, by the name it has in maps or by that which stat tells.
    pub fn holders(&self, mapped: FileId, stat: FileId) -> impl Iterator<Item = u32> {
        let ((major, minor), inode) = mapped;
        let mapped = (makedev(major, minor), inode);
        self.processes
            .iter()
            .filter(move |files| files.mapped.files.contains(&mapped) || files.open.contains(&stat))
            .map(|files| files.pid)
    }
}

impl Files {
    /// A process that cannot be read is gone, or not ours to see.
    fn of(pid: u32, known: Option<&Mapped>) -> Files {
        let open = fs::read_dir(format!("/proc/{pid}/fd"))
            .map(|fds| fds.flatten().filter_map(|entry| identity(&entry.path())).collect());
        Files { pid, mapped: Mapped::of(pid, known), open: open.unwrap_or_default() }
    }
}

impl Mapped {
    fn of(pid: u32, known: Option<&Mapped>) -> Mapped {
        // Before its mappings are: what it maps meanwhile makes it larger at the next look.
        let space = Space::of(pid);
        let still = |known: &&Mapped| {
            space.is_some() && known.space == space && known.read.elapsed() < TRUSTED
        };
        if let Some(known) = known.filter(still) {
            return known.clone();
        }
        let mut files = HashSet::new();
        let read = Instant::now();
        let all = procmap::each_file(pid, |part| {
            files.insert((part.dev, part.inode));
            true
        });
        // What was not read to its end is not known.
        Mapped { files: Arc::new(files), read, space: space.filter(|_| all.is_ok()) }
    }
}

impl Space {
    fn of(pid: u32) -> Option<Space> {
        let stat = proc_text::stat(&process::read(pid, "stat")?)?;
        // Of a process without memory, or whose memory is not ours to see, that is nothing.
        Some(Space { started: stat.started, size: stat.size })
            .filter(|space| space.size > Bytes::ZERO)
    }
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
                let take = |_: Option<&Census>| {
                    taking.send(()).unwrap();
                    let _ = ended.recv();
                    Ok(Census { begun: Instant::now(), processes: Vec::new() })
                };
                office.begun_after(Instant::now(), PATIENCE, take).unwrap();
            })
        };
        begun.recv().unwrap();
        let asked = Instant::now();
        let nobody =
            |_: Option<&Census>| -> io::Result<Census> { panic!("a second one at a time") };
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
        let nothing =
            |_: Option<&Census>| Ok(Census { begun: Instant::now(), processes: Vec::new() });
        assert!(office.begun_after(Instant::now(), Duration::ZERO, nothing).is_ok());
        let none = |_: Option<&Census>| Err(io::Error::from(io::ErrorKind::PermissionDenied));
        let failed = office.begun_after(Instant::now(), Duration::ZERO, none);
        assert_eq!(failed.err().map(|e| e.kind()), Some(io::ErrorKind::PermissionDenied));
    }

    fn office_that_panicked() -> Office {
        let office = Office::new();
        let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let panics = |_: Option<&Census>| -> io::Result<Census> { panic!("on purpose") };
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

    #[test]
    fn what_a_process_of_one_size_has_mapped_is_gone_over_once_in_a_while() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let space = || {
            // Until it has become what it is: it grows no more.
            std::thread::sleep(Duration::from_millis(100));
            Space::of(child.id())
        };
        let (mut before, mut now) = (None, space());
        while now.is_none() || now != before {
            (before, now) = (now, space());
        }
        let told = Arc::new(HashSet::from([(1, 1)]));
        let known = |space, read| Mapped { files: told.clone(), read, space };
        let looked = Instant::now();
        let trusts = |known: &Mapped| {
            let mapped = Mapped::of(child.id(), Some(known));
            assert!(mapped.space == now && (!mapped.files.is_empty()));
            Arc::ptr_eq(&mapped.files, &told)
        };
        assert!(trusts(&known(now, looked)));
        let other = now.map(|space| Space { size: Bytes(space.size.0 + 4096), ..space });
        assert!(!trusts(&known(other, looked)), "it has mapped something since");
        let earlier = now.map(|space| Space { started: space.started - 1, ..space });
        assert!(!trusts(&known(earlier, looked)), "another process");
        assert!(!trusts(&known(None, looked)), "it could not be read to its end");
        if let Some(long_ago) = looked.checked_sub(TRUSTED) {
            assert!(!trusts(&known(now, long_ago)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Space::of(child.id()).is_none());
    }
}
