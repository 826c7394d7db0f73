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

use super::fd_folder::FdFolder;
use super::scan::if_there;
use crate::{proc_text, process};

/// Device, major and minor, and inode.
pub(super) type FileId = ((u32, u32), u64);

pub(super) struct Census {
    begun: Instant,
    processes: Vec<Files>,
}

struct Files {
    process: Process,
    mapped: Mapped,
    open: HashSet<FileId>,
    /// Not all of its descriptors, or of its mappings, were looked at.
    cut: bool,
}

/// A process that is to be looked at.
#[derive(Clone, Copy)]
struct Process {
    pid: u32,
    /// Its real one: who started it, also where it is setuid, or not dumpable (root owns its /proc/PID then).
    user: u32,
    /// Room for so many descriptors: no fewer than it has.
    slots: u64,
}

const ROOT: u32 = 0;

/// What a look goes over, of all processes that are not root's, those with the fewest descriptors first. Without a limit, any
/// user could make it too long for VMs ever to be found fit, and what is kept of it larger than the host.
///
/// What is left out of a VMM's own user is looked at all the same, for that VMM ([`Census::may_have`]). Lost is who has its RAM as
/// another user, among so many: it got that from the VMM or root, as vhost-user's do, which are known by their device; and
/// one that only had it open is seen at the next look once it maps it, as is whoever opens it between two.
#[derive(Clone, Copy)]
struct Left {
    /// Descriptors: a second's worth.
    open: u64,
    /// Mappings, some seconds' worth: each is one, and each file more that is kept of a process `KEPT`.
    mapped: u64,
}

const MOST: Left = Left { open: 1 << 18, mapped: 1 << 22 };
/// Half a million files are kept at most, some 20 MiB.
const KEPT: u64 = 8;

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
            // One that others have waited for in vain is not waited for again: whoever asks keeps places that others want.
            if left.is_zero() || since.elapsed() >= patience {
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
        let processes = pids.filter_map(|pid| Process::of(pid).transpose());
        Census::of(begun, processes.collect::<io::Result<_>>()?, MOST, last)
    }

    fn of(
        begun: Instant,
        mut processes: Vec<Process>,
        most: Left,
        last: Option<&Census>,
    ) -> io::Result<Census> {
        let known: HashMap<u32, &Mapped> = last
            .iter()
            .flat_map(|last| &last.processes)
            .map(|files| (files.process.pid, &files.mapped))
            .collect();
        processes.sort_by_key(|process| process.slots);
        let mut left = most;
        let files = |process: Process| {
            let mut unlimited = Left { open: u64::MAX, mapped: u64::MAX };
            let left = if process.user == ROOT { &mut unlimited } else { &mut left };
            Files::of(process, known.get(&process.pid).copied(), left)
        };
        let processes = processes.into_iter().map(files).collect::<io::Result<_>>()?;
        Ok(Census { begun, processes })
    }

    /// Processes that had the file, by the name it has in maps or by that which stat tells, and those of `user` that may
    /// have had it among what was not looked at.
    pub fn may_have(
        &self,
        mapped: FileId,
        stat: FileId,
        user: Option<u32>,
    ) -> impl Iterator<Item = u32> {
        let ((major, minor), inode) = mapped;
        let mapped = (makedev(major, minor), inode);
        let has = move |files: &&Files| {
            files.mapped.files.contains(&mapped)
                || files.open.contains(&stat)
                || (files.cut && Some(files.process.user) == user)
        };
        self.processes.iter().filter(has).map(|files| files.process.pid)
    }
}

impl Process {
    fn of(pid: u32) -> io::Result<Option<Process>> {
        let Some(status) = if_there(fs::read(format!("/proc/{pid}/status")))? else {
            return Ok(None);
        };
        let status = String::from_utf8_lossy(&status);
        let user = proc_text::status_number(&status, "Uid").unwrap_or(u32::MAX);
        let slots = proc_text::status_number(&status, "FDSize").unwrap_or(u64::MAX);
        Ok(Some(Process { pid, user, slots }))
    }
}

impl Files {
    /// Looks at no more than what is `left`, and takes it off.
    fn of(process: Process, known: Option<&Mapped>, left: &mut Left) -> io::Result<Files> {
        let (mut open, mut cut, mut fds) = (HashSet::new(), left.open == 0, None);
        // The kernel makes hundreds of entries ready for the first that is asked for.
        if !cut {
            fds = if_there(FdFolder::of(process.pid))?;
        }
        if let Some(fds) = fds {
            fds.each(|fd| {
                cut = left.open == 0;
                if !cut {
                    left.open -= 1;
                    open.extend(fds.file(fd));
                }
                Ok(!cut)
            })?;
        }
        let mapped = Mapped::of(process.pid, known, &mut left.mapped)?;
        let cut = cut || mapped.is_none();
        Ok(Files { process, mapped: mapped.unwrap_or_else(Mapped::nothing), open, cut })
    }
}

impl Mapped {
    /// None: it is more than what is `left`, of which nothing is then.
    fn of(pid: u32, known: Option<&Mapped>, left: &mut u64) -> io::Result<Option<Mapped>> {
        // Before its mappings are: what it maps meanwhile makes it larger at the next look.
        let space = Space::of(pid);
        let still = |known: &&Mapped| {
            space.is_some() && known.space == space && known.read.elapsed() < TRUSTED
        };
        let mut take = |n: u64| {
            let enough = *left >= n;
            *left = left.saturating_sub(n);
            enough
        };
        if let Some(known) = known.filter(still) {
            return Ok(take(known.files.len() as u64 * KEPT).then(|| known.clone()));
        }
        let (mut files, mut fits) = (HashSet::new(), true);
        let read = Instant::now();
        let all = if_there(procmap::each_file(pid, |part| {
            let more = files.insert((part.dev, part.inode));
            fits = take(if more { 1 + KEPT } else { 1 });
            fits
        }))?;
        // What was not read to its end is not known.
        let space = space.filter(|_| all.is_some());
        Ok(fits.then(|| Mapped { files: Arc::new(files), read, space }))
    }

    /// Of a process that was not gone over.
    fn nothing() -> Mapped {
        Mapped { files: Arc::default(), read: Instant::now(), space: None }
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
    use std::os::fd::AsRawFd;
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
        assert!(census.may_have(id, id, None).any(|pid| pid == std::process::id()));
        let again = begun_after(asked).unwrap();
        assert!(again.begun >= census.begun);
        drop(file);
        let later = begun_after(Instant::now()).unwrap();
        assert!(!later.may_have(id, id, None).any(|pid| pid == std::process::id()));
    }

    #[test]
    fn who_has_many_descriptors_is_looked_at_last_and_in_full_for_his_own_vmms() {
        const USER: u32 = 1000;
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("many", flags).unwrap());
        let fd = std::ffi::CString::new(file.as_raw_fd().to_string()).unwrap();
        let id = FdFolder::of(std::process::id()).unwrap().file(&fd).unwrap();
        // Not shown as mapped.
        let nothing = ((0, 0), 0);
        let own = Process { pid: std::process::id(), user: USER, slots: 1 << 20 };
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let few = Process { pid: child.id(), user: USER, slots: 64 };
        let look = |processes: &[Process], open| {
            let most = Left { open, ..MOST };
            Census::of(Instant::now(), processes.to_vec(), most, None).unwrap()
        };
        let has = |census: &Census, user| census.may_have(nothing, id, user).next();
        let all = look(&[own, few], MOST.open);
        assert!(all.processes.iter().all(|files| !files.cut && !files.open.is_empty()));
        assert_eq!(has(&all, None), Some(own.pid));
        // Enough for whoever has few.
        let enough = fs::read_dir(format!("/proc/{}/fd", few.pid)).unwrap().count() as u64;
        let cut = look(&[own, few], enough);
        let order: Vec<_> = cut.processes.iter().map(|f| (f.process.pid, f.cut)).collect();
        assert_eq!(order, [(few.pid, false), (own.pid, true)]);
        assert!(!cut.processes[0].open.is_empty());
        assert_eq!((has(&cut, None), has(&cut, Some(USER + 1))), (None, None));
        assert_eq!(has(&cut, Some(USER)), Some(own.pid), "its own user's");
        // Root's are not what others wait for.
        let root = Process { user: ROOT, ..own };
        assert_eq!(has(&look(&[root, few], enough), None), Some(own.pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_has_many_files_mapped_is_looked_at_last_and_in_full_for_his_own_vmms() {
        const USER: u32 = 1000;
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let sleeps = Process { pid: child.id(), user: USER, slots: 64 };
        let look = |processes: &[Process], mapped, last: Option<&Census>| {
            let most = Left { mapped, ..MOST };
            Census::of(Instant::now(), processes.to_vec(), most, last).unwrap()
        };
        // Its libraries; until it has become what it is.
        let told = |census: &Census| census.processes[0].mapped.files.clone();
        let (mut before, mut all) = (Arc::default(), look(&[sleeps], MOST.mapped, None));
        while told(&all).is_empty() || told(&all) != before {
            std::thread::sleep(Duration::from_millis(100));
            (before, all) = (told(&all), look(&[sleeps], MOST.mapped, None));
        }
        let &(dev, inode) = before.iter().next().unwrap();
        let mapped = ((rustix::fs::major(dev), rustix::fs::minor(dev)), inode);
        let has = |census: &Census, user| census.may_have(mapped, ((0, 0), 0), user).next();
        assert_eq!((all.processes[0].cut, has(&all, None)), (false, Some(sleeps.pid)));
        // What is kept counts, whether it was gone over now or before.
        let kept = before.len() as u64 * KEPT;
        for (enough, last) in [(kept, None), (kept - 1, Some(&all))] {
            let cut = look(&[sleeps, sleeps], enough, last);
            assert!(cut.processes.iter().all(|files| files.cut && files.mapped.files.is_empty()));
            assert_eq!((has(&cut, None), has(&cut, Some(USER + 1))), (None, None));
            assert_eq!(has(&cut, Some(USER)), Some(sleeps.pid), "its own user's");
        }
        assert!(!look(&[sleeps], kept, Some(&all)).processes[0].cut, "it is as it was");
        // Nothing is left for the next one, where one took all.
        let two = look(&[sleeps, sleeps], kept, Some(&all));
        assert_eq!([two.processes[0].cut, two.processes[1].cut], [false, true]);
        // Root's are not what others wait for.
        let root = Process { user: ROOT, ..sleeps };
        assert_eq!(has(&look(&[root], 0, None), None), Some(sleeps.pid));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_has_no_more_descriptors_than_room_for_them() {
        // First: other tests may open some at any moment, and room that was made stays.
        let fds = fs::read_dir("/proc/self/fd").unwrap().count();
        let own = Process::of(std::process::id()).unwrap().unwrap();
        assert_eq!(own.user, rustix::process::getuid().as_raw());
        assert!(own.slots >= fds as u64 && own.slots < u64::MAX);
        assert!(Process::of(u32::MAX).unwrap().is_none());
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
            let mapped =
                Mapped::of(child.id(), Some(known), &mut MOST.mapped.clone()).unwrap().unwrap();
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
