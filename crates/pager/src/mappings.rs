//! How a VM's pages are mapped elsewhere: through its shim, which is the only one that can, and what
//! the kernel tells of how they are mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_sharing::StorePage;
use ballast_uffd::procmap::{Maps, Pagemap, sees_places};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages, Ppn};

use crate::backend::{Errno, MemError, Place, Remap};
use crate::guest_ram::RamLayout;
use crate::strict_commit;
use crate::sync::{Mutex, MutexGuard, lock, try_lock};

/// One change, as the VMM process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where it begins, in the VMM; a multiple of a page.
    pub addr: HostAddr,
    /// A multiple of a page, at least one.
    pub len: Bytes,
    /// What is to be seen there afterwards.
    pub to: Target,
}

/// What a part of a VM's RAM is to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// What is seen there now goes into the RAM file, which is mapped again.
    Home,
    /// The RAM file, which is seen there already: nothing is read or written.
    HomeAgain,
    /// The file of this number among those given, from this offset on (bytes), privately, and write-protected.
    #[allow(missing_docs, reason = "told with the variant")]
    File { index: u8, offset: u64 },
}

/// Why changes were not made.
#[allow(missing_docs, reason = "told with the variant")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemapError {
    /// The first `done` changes are made, the next one failed; or those that are made could not be
    /// registered and protected.
    Stopped { done: usize, errno: i32 },
    /// Whether any was made is not known, now and until `settled` says so.
    Unanswered,
    /// There is nobody any more who could. Whether any was made is not known either.
    Gone,
}

/// What a VMM answers that is to send its guest's RAM file to no other process from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It will not.
    Kept,
    /// Another process may have it already.
    Sent,
    /// It cannot be asked: its shim is older.
    Unable,
    /// It did not answer, is out of reach for now, or is sending it just now.
    Unanswered,
}

/// What came of a shim that came again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnected {
    /// Mappings can be changed again.
    Connected,
    /// None could be changed before, and none can be now.
    Fixed,
    /// Somebody is at the VMM's mappings, and has not come to an end: all is as it was.
    Busy,
}

/// The way to a VM's shim.
pub trait Remapper: Send {
    /// Makes changes in order.
    fn remap(&mut self, changes: &[Change], files: &[BorrowedFd<'_>]) -> Result<(), RemapError>;
    /// Whether nothing that was asked for is under way any more. No for good, where the way was lost before that could
    /// be known: then another takes its place ([`Mappings::reconnect`]).
    fn settled(&mut self) -> bool;
    /// The most changes of one call.
    fn most(&self) -> usize;
    /// Whether it knows [`Target::HomeAgain`].
    fn maps_again(&self) -> bool {
        true
    }
    /// Has the RAM file kept, of which this is a part.
    fn keep(&mut self, _addr: HostAddr, _len: Bytes) -> Result<Kept, RemapError> {
        Ok(Kept::Unable)
    }
}

/// A file that VMs map to read.
pub struct View {
    fd: OwnedFd,
    /// Device and inode.
    identity: (u64, u64),
}

impl View {
    /// Of the file that the descriptor is of, which stays open with the view.
    ///
    /// # Errors
    /// Of fstat.
    pub fn new(fd: OwnedFd) -> std::io::Result<View> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(View { fd, identity: (stat.st_dev, stat.st_ino) })
    }
    /// Device and inode of the file.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }
    /// The same file, by a descriptor of its own.
    ///
    /// # Errors
    /// Of dup, where too many are open.
    pub fn try_clone(&self) -> std::io::Result<View> {
        Ok(View { fd: self.fd.try_clone()?, identity: self.identity })
    }
}

/// What can be changed in a VM.
#[derive(Default)]
pub struct Mappings {
    /// Held while the VMM is waited for: never taken by the fault service.
    link: Mutex<Option<Link>>,
    /// The way to a shim that maps nothing, where there is no `link`.
    keeper: Mutex<Option<Box<dyn Remapper>>>,
    connected: AtomicBool,
    maps_again: AtomicBool,
    /// Whether its pagemap tells all, in the hands of who opened it.
    sees_copies: AtomicBool,
    views: Mutex<Views>,
}

struct Link {
    remapper: Box<dyn Remapper>,
    pid: u32,
    pagemap: Pagemap,
    /// Homes: the RAM file of each part.
    homes: Vec<(u64, u64)>,
}

#[derive(Default)]
struct Views {
    store: Option<View>,
    zeros: Option<View>,
}

impl Views {
    /// Runs as changes, in order, and the files that these name by their number. None: there is no such file.
    fn changes(
        &self,
        layout: &RamLayout,
        runs: &[Remap],
        home: Target,
    ) -> Option<(Vec<Change>, Vec<BorrowedFd<'_>>)> {
        // Those that are needed, in this order.
        let needs = |zeros: bool| {
            runs.iter().any(|run| match run.to {
                Place::Home => false,
                Place::Store(_) => !zeros,
                Place::Zeros => zeros,
            })
        };
        let store = self.store.as_ref().filter(|_| needs(false));
        let zeros = self.zeros.as_ref().filter(|_| needs(true));
        let mut changes = Vec::with_capacity(runs.len());
        for run in runs {
            // Of a run that goes on in the next part, one for each.
            for (first, n) in layout.split(run.first, run.n) {
                let to = match run.to {
                    Place::Home => Some(home),
                    Place::Store(page) => store.map(|_| {
                        let before = Pages(first.0 - run.first.0).bytes().0;
                        Target::File { index: 0, offset: page.offset() + before }
                    }),
                    Place::Zeros => zeros.map(|_| Target::File {
                        index: u8::from(store.is_some()),
                        offset: zero_offset(first),
                    }),
                };
                let (addr, len) = (layout.at(first).addr, Pages(n).bytes());
                changes.push(Change { addr, len, to: to? });
            }
        }
        let files = store.into_iter().chain(zeros).map(|view| view.fd.as_fd()).collect();
        Some((changes, files))
    }
}

/// Pages of the file of zeros: a run of pages that nobody wrote maps it from its start on.
pub const ZERO_RUN: Pages = Pages::from_mib(2);

impl Mappings {
    /// From now on the VM's mappings can be changed. `homes` are device and inode of the RAM file of each part.
    ///
    /// # Errors
    /// Of opening /proc/PID/pagemap: the VMM is gone, or not ours to look at. Then nothing is connected.
    pub fn connect(
        &self,
        remapper: Box<dyn Remapper>,
        pid: u32,
        homes: Vec<(u64, u64)>,
    ) -> std::io::Result<()> {
        let pagemap = Pagemap::open(pid)?;
        self.maps_again.store(remapper.maps_again(), Ordering::Relaxed);
        self.sees_copies.store(sees_places(), Ordering::Relaxed);
        *lock(&self.link) = Some(Link { remapper, pid, pagemap, homes });
        self.connected.store(true, Ordering::Release);
        Ok(())
    }
    /// The shim can be asked to keep the RAM file, and nothing else: no mapping can be changed, as before.
    pub fn reach(&self, remapper: Box<dyn Remapper>) {
        *lock(&self.keeper) = Some(remapper);
    }
    /// The way to the shim leads over `remapper` from now on: the former was lost, and nothing that was asked for over it
    /// is under way any more. `greet` is called before anything is asked for; after an error of it all is as it was.
    /// Waits for a change that is under way, and not longer than `patience`.
    ///
    /// # Errors
    /// Of `greet`.
    pub fn reconnect<E>(
        &self,
        remapper: Box<dyn Remapper>,
        patience: Duration,
        greet: impl FnOnce() -> Result<(), E>,
    ) -> Result<Reconnected, E> {
        let Some(mut link) = self.link_within(patience) else { return Ok(Reconnected::Busy) };
        greet()?;
        let Some(link) = link.as_mut() else {
            if let Some(keeper) = lock(&self.keeper).as_mut() {
                *keeper = remapper;
            }
            return Ok(Reconnected::Fixed);
        };
        link.remapper = remapper;
        // Under the lock: who finds that this one is lost, too, says so afterwards.
        self.connected.store(true, Ordering::Release);
        Ok(Reconnected::Connected)
    }
    /// Whoever has it may wait for the lock of the VMM's mappings, which has no end where that hangs.
    fn link_within(&self, patience: Duration) -> Option<MutexGuard<'_, Option<Link>>> {
        let begun = Instant::now();
        loop {
            match try_lock(&self.link) {
                Some(link) => return Some(link),
                None if begun.elapsed() >= patience => return None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
    /// Whether mappings can be changed: not before `connect`, and not while the way to the shim is lost. Waits
    /// for nobody.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }
    /// Whether a copy is told from a page of the store. Else what is mapped is taken for one, so nothing more is to be.
    pub fn sees_copies(&self) -> bool {
        self.sees_copies.load(Ordering::Relaxed)
    }
    /// Whether the kernel may refuse a mapping of other pages with what was there before gone.
    pub(crate) fn may_leave_holes(&self) -> bool {
        strict_commit::may_leave_a_hole()
    }
    /// Whether the RAM file can be mapped anew where it is mapped.
    pub(crate) fn can_map_again(&self) -> bool {
        self.is_connected() && self.maps_again.load(Ordering::Relaxed)
    }
    /// Has the VMM send the RAM file, which it maps at `addr`, to no other process from now on: one that maps it would read what
    /// is away as zeros. Waits for the VMM, and not longer than `patience` for a change of mappings that is under way.
    pub fn keep(&self, addr: HostAddr, len: Bytes, patience: Duration) -> Kept {
        let Some(mut link) = self.link_within(patience) else { return Kept::Unanswered };
        let mut keeper = lock(&self.keeper);
        let remapper = link.as_mut().map(|link| &mut link.remapper).or(keeper.as_mut());
        let Some(remapper) = remapper else { return Kept::Unable };
        match remapper.keep(addr, len) {
            Ok(kept) => kept,
            Err(RemapError::Gone) => {
                self.connected.store(false, Ordering::Release);
                Kept::Unanswered
            }
            Err(RemapError::Unanswered | RemapError::Stopped { .. }) => Kept::Unanswered,
        }
    }
    /// How many mappings the VMM has. Reads all of them.
    pub(crate) fn count(&self) -> Option<u64> {
        let pid = lock(&self.link).as_ref()?.pid;
        Maps::count_all(pid).ok()
    }
    /// What `Place::Store` means from now on: pages of the store of the VM's domain. Waits for a change of
    /// mappings that is under way.
    pub fn set_store(&self, view: View) {
        lock(&self.views).store = Some(view);
    }
    /// What `Place::Zeros` means from now on: a file of `ZERO_RUN` pages that read as zeros. Waits as
    /// `set_store` does.
    pub fn set_zeros(&self, view: View) {
        lock(&self.views).zeros = Some(view);
    }

    /// See `Backend::remap`. `MemError::Fixed` where there is no way to the shim, or no file for what is to be
    /// mapped. Waits for the VMM.
    pub(crate) fn remap(
        &self,
        layout: &RamLayout,
        runs: &[Remap],
    ) -> (usize, Result<(), MemError>) {
        self.change(layout, runs, Target::Home)
    }

    /// See `Backend::map_again`; else as `remap`.
    pub(crate) fn map_again(&self, layout: &RamLayout, first: Ppn, n: u64) -> Result<(), MemError> {
        self.change(layout, &[Remap { first, n, to: Place::Home }], Target::HomeAgain).1
    }

    /// `home`: how what goes home is mapped.
    fn change(
        &self,
        layout: &RamLayout,
        runs: &[Remap],
        home: Target,
    ) -> (usize, Result<(), MemError>) {
        let mut link = lock(&self.link);
        let Some(link) = link.as_mut() else { return (0, Err(MemError::Fixed)) };
        let views = lock(&self.views);
        let Some((changes, files)) = views.changes(layout, runs, home) else {
            return (0, Err(MemError::Fixed));
        };
        // Runs that are done whole when so many changes are made.
        let runs_in = |made: usize| {
            let mut left = made;
            let whole = |run: &&Remap| {
                let needs = layout.split(run.first, run.n).count();
                let is_done = needs <= left;
                left = left.saturating_sub(needs);
                is_done
            };
            if changes.len() == runs.len() { made } else { runs.iter().take_while(whole).count() }
        };
        let most = link.remapper.most().max(1);
        let mut done = 0;
        for some in changes.chunks(most) {
            match link.remapper.remap(some, &files) {
                Ok(()) => done += some.len(),
                // Those that were changed may not be registered and protected: they are looked up too.
                Err(RemapError::Stopped { done: n, errno }) => {
                    let stopped = runs[runs_in(done + n).min(runs.len() - 1)];
                    return (runs_in(done), Err(from_errno(errno, stopped)));
                }
                Err(RemapError::Unanswered) => return (runs_in(done), Err(MemError::Unanswered)),
                Err(RemapError::Gone) => {
                    // The VMM may live all the same: where its pages are can be looked up as before.
                    self.connected.store(false, Ordering::Release);
                    return (runs_in(done), Err(MemError::Gone));
                }
            }
        }
        (runs.len(), Ok(()))
    }

    /// See `Backend::copied`. Waits while mappings are changed.
    pub(crate) fn copied(
        &self,
        layout: &RamLayout,
        first: Ppn,
        n: u64,
    ) -> Result<Vec<bool>, MemError> {
        let link = lock(&self.link);
        let link = link.as_ref().ok_or(MemError::Fixed)?;
        let copies = |(first, n)| {
            link.pagemap
                .copies(layout.at(first).addr, Pages(n))
                .map_err(|e| from_io(&e, "/proc/PID/pagemap", first))
        };
        if layout.at(first).left >= n {
            return copies((first, n));
        }
        let mut all = Vec::with_capacity(n as usize);
        for run in layout.split(first, n) {
            all.extend(copies(run)?);
        }
        Ok(all)
    }

    /// Reads the VMM's mappings once for each part, however many pages are asked for.
    pub(crate) fn places(
        &self,
        layout: &RamLayout,
        pages: &[Ppn],
    ) -> Result<Vec<Result<Place, MemError>>, MemError> {
        let mut link = lock(&self.link);
        let link = link.as_mut().ok_or(MemError::Fixed)?;
        if !link.remapper.settled() {
            return Err(MemError::Unanswered);
        }
        let (Some(&first), Some(last)) = (pages.iter().min(), pages.iter().max()) else {
            return Ok(Vec::new());
        };
        let unread = |e| from_io(&e, "/proc/PID/maps", first);
        // Between the parts anything may be mapped.
        let mut maps = Vec::with_capacity(1);
        for (first, n) in layout.split(first, last.0 + 1 - first.0) {
            let at = layout.at(first);
            let range = at.addr..at.addr.page(Ppn(n));
            maps.push((at.part, Maps::read(link.pid, range).map_err(unread)?));
        }
        // A process that is exiting has no mapping at all; one that unmapped its RAM has others.
        if maps.iter().all(|(_, maps)| maps.parts().is_empty())
            && Maps::count_all(link.pid).map_err(unread)? == 0
        {
            return Err(MemError::Gone);
        }
        let views = lock(&self.views);
        let is = |view: &Option<View>, id: (u64, u64)| {
            view.as_ref().is_some_and(|view| view.identity == id)
        };
        let place = |ppn: Ppn| {
            let at = layout.at(ppn);
            let (_, maps) = maps.iter().find(|(part, _)| *part == at.part)?;
            let part = maps.at(at.addr)?;
            let (id, offset) = ((part.dev, part.inode), part.offset_of(at.addr));
            if link.homes.get(at.part) == Some(&id) && part.shared {
                Some(Place::Home)
            } else if is(&views.zeros, id) {
                Some(Place::Zeros)
            } else if is(&views.store, id) {
                StorePage::new(offset / PAGE_SIZE as u64).map(Place::Store)
            } else {
                None
            }
        };
        let strange = |ppn| MemError::Os {
            op: "a mapping of the VMM's own making",
            ppn,
            source: Errno(libc::EINVAL),
        };
        Ok(pages.iter().map(|&ppn| place(ppn).ok_or_else(|| strange(ppn))).collect())
    }
}

/// Neighbours map neighbours, so that a run can be continued by the next.
fn zero_offset(ppn: Ppn) -> u64 {
    ppn.0 % ZERO_RUN.0 * PAGE_SIZE as u64
}

/// Pages from `ppn` on that one run of zeros can cover.
pub(crate) fn zero_run(ppn: Ppn) -> u64 {
    ZERO_RUN.0 - ppn.0 % ZERO_RUN.0
}

fn from_errno(errno: i32, run: Remap) -> MemError {
    match errno {
        libc::EAGAIN => MemError::Again,
        libc::ENOMEM => MemError::NoMemory,
        errno => MemError::Os { op: "changing mappings", ppn: run.first, source: Errno(errno) },
    }
}

fn from_io(e: &std::io::Error, op: &'static str, ppn: Ppn) -> MemError {
    match e.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => MemError::Gone,
        None if e.kind() == std::io::ErrorKind::UnexpectedEof => MemError::Gone,
        errno => MemError::Os { op, ppn, source: Errno(errno.unwrap_or(libc::EIO)) },
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::guest_ram::RamPart;
    use std::collections::VecDeque;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// One that is gone.
    struct Lost;

    impl Remapper for Lost {
        fn remap(&mut self, _: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
            Err(RemapError::Gone)
        }
        fn settled(&mut self) -> bool {
            true
        }
        fn most(&self) -> usize {
            1
        }
    }

    #[test]
    fn each_page_is_looked_up_alone_however_far_apart_they_are() {
        use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
        let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * PAGE_SIZE as u64).unwrap();
        let (null, none) = (std::ptr::null_mut(), ProtFlags::empty());
        // SAFETY: new mappings, the second one over a page of the first; nobody touches them.
        let base = unsafe {
            let base = mmap(null, 4 * PAGE_SIZE, none, MapFlags::SHARED, &file, 0).unwrap();
            let second = base.wrapping_byte_add(PAGE_SIZE);
            mmap_anonymous(second, PAGE_SIZE, none, MapFlags::PRIVATE | MapFlags::FIXED).unwrap();
            base
        };
        let stat = rustix::fs::fstat(&file).unwrap();
        let mappings = Mappings::default();
        let home = (stat.st_dev, stat.st_ino);
        mappings.connect(Box::new(Lost), std::process::id(), vec![home]).unwrap();
        let part = RamPart { base: HostAddr(base as u64), len: Pages(1 << 30), file_offset: 0 };
        let layout = &RamLayout::from(part);
        let far = Ppn((1 << 30) - 1);
        let places = mappings.places(layout, &[Ppn(3), far, Ppn(0), Ppn(1)]).unwrap();
        let strange =
            |i: usize, page| matches!(&places[i], Err(MemError::Os { ppn, .. }) if *ppn == page);
        assert_eq!((&places[0], &places[2]), (&Ok(Place::Home), &Ok(Place::Home)));
        assert!(strange(1, far) && strange(3, Ppn(1)), "{places:?}");
        // The way to the shim is lost: nothing can be changed, and what is can be seen.
        let run = Remap { first: Ppn(0), n: 1, to: Place::Home };
        assert!(mappings.is_connected());
        assert_eq!(mappings.remap(layout, &[run]), (0, Err(MemError::Gone)));
        assert!(!mappings.is_connected());
        assert_eq!(mappings.places(layout, &[Ppn(0)]), Ok(vec![Ok(Place::Home)]));
    }

    /// One that was lost in the midst of a change.
    struct Cut;

    impl Remapper for Cut {
        fn remap(&mut self, _: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
            Err(RemapError::Gone)
        }
        fn settled(&mut self) -> bool {
            false
        }
        fn most(&self) -> usize {
            1
        }
    }

    #[test]
    fn a_way_that_was_lost_is_replaced_and_only_then_is_it_known_where_pages_are() {
        let mappings = Mappings::default();
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(8), file_offset: 0 };
        let layout = &RamLayout::from(part);
        let run = Remap { first: Ppn(0), n: 1, to: Place::Home };
        // Where there was none there is none.
        let again = |greet: Result<(), &str>| {
            mappings.reconnect(Box::new(Lost), Duration::ZERO, || greet.map_err(str::to_owned))
        };
        assert_eq!((again(Ok(())), mappings.is_connected()), (Ok(Reconnected::Fixed), false));
        mappings.connect(Box::new(Cut), std::process::id(), vec![(0, 0)]).unwrap();
        assert_eq!(mappings.remap(layout, &[run]), (0, Err(MemError::Gone)));
        assert_eq!(mappings.places(layout, &[Ppn(0)]), Err(MemError::Unanswered));
        // Who does not hear that he is let in is not.
        assert_eq!(again(Err("deaf")), Err("deaf".to_owned()));
        // Nor is one waited for that hangs in the VMM's mappings.
        let hangs = lock(&mappings.link);
        assert_eq!((again(Ok(())), mappings.is_connected()), (Ok(Reconnected::Busy), false));
        drop(hangs);
        assert!(!mappings.is_connected());
        assert_eq!(mappings.places(layout, &[Ppn(0)]), Err(MemError::Unanswered));
        assert_eq!((again(Ok(())), mappings.is_connected()), (Ok(Reconnected::Connected), true));
        assert!(matches!(mappings.places(layout, &[Ppn(0)]).as_deref(), Ok([_])));
        assert_eq!(mappings.remap(layout, &[run]), (0, Err(MemError::Gone)));
        assert!(!mappings.is_connected());
    }

    #[test]
    fn a_process_that_has_no_mapping_left_is_gone_and_one_that_has_others_lies() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mappings = Mappings::default();
        mappings.connect(Box::new(Lost), child.id(), vec![(0, 0)]).unwrap();
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(8), file_offset: 0 };
        let layout = &RamLayout::from(part);
        let places = mappings.places(layout, &[Ppn(0)]).unwrap();
        assert!(matches!(places[..], [Err(MemError::Os { .. })]), "{places:?}");
        child.kill().unwrap();
        // It stays a zombie until it is waited for: its number is there, and its memory is not.
        let begun = std::time::Instant::now();
        while mappings.places(layout, &[Ppn(0)]) != Err(MemError::Gone) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{places:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert_eq!(mappings.places(layout, &[Ppn(0)]), Err(MemError::Gone));
    }

    /// A shim that answers when it is told to.
    struct Slow(Sender<()>, Receiver<()>);

    impl Remapper for Slow {
        fn remap(&mut self, _: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
            self.0.send(()).map_err(|_| RemapError::Gone)?;
            self.1.recv().map_err(|_| RemapError::Gone)
        }
        fn settled(&mut self) -> bool {
            true
        }
        fn most(&self) -> usize {
            1
        }
    }

    #[test]
    fn whether_mappings_can_be_changed_is_known_while_the_vmm_is_waited_for() {
        let mappings = &Mappings::default();
        assert!(!mappings.is_connected());
        let ((asked, was_asked), (answer, answered)) = (channel(), channel());
        mappings
            .connect(Box::new(Slow(asked, answered)), std::process::id(), vec![(0, 0)])
            .unwrap();
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(8), file_offset: 0 };
        let layout = &RamLayout::from(part);
        let (known, was_known) = channel();
        std::thread::scope(|scope| {
            let run = Remap { first: Ppn(0), n: 1, to: Place::Home };
            scope.spawn(move || assert_eq!(mappings.remap(layout, &[run]), (1, Ok(()))));
            was_asked.recv().unwrap();
            scope.spawn(move || known.send(mappings.is_connected()).unwrap());
            let in_time = was_known.recv_timeout(Duration::from_secs(10));
            let keep = || mappings.keep(HostAddr(1 << 20), Bytes(4096), Duration::ZERO);
            assert_eq!(keep(), Kept::Unanswered, "the way is another's for now");
            answer.send(()).unwrap();
            assert_eq!(in_time, Ok(true));
        });
        let keep =
            |mappings: &Mappings| mappings.keep(HostAddr(1 << 20), Bytes(4096), Duration::ZERO);
        assert_eq!([keep(mappings), keep(&Mappings::default())], [Kept::Unable; 2]);
    }

    /// One that takes so many changes at a time, and answers call by call.
    struct Told {
        most: usize,
        answers: VecDeque<Result<(), RemapError>>,
    }

    impl Remapper for Told {
        fn remap(&mut self, changes: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
            assert!(changes.len() <= self.most, "{changes:?}");
            self.answers.pop_front().unwrap_or(Err(RemapError::Gone))
        }
        fn settled(&mut self) -> bool {
            true
        }
        fn most(&self) -> usize {
            self.most
        }
    }

    /// What comes of runs, each told by its first page and its length, where the shim answers so.
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn remapped(
        layout: &RamLayout,
        runs: &[(u64, u64)],
        most: usize,
        answers: &[Result<(), RemapError>],
    ) -> (usize, Result<(), MemError>) {
        let mappings = Mappings::default();
        let told = Told { most, answers: answers.iter().copied().collect() };
        mappings.connect(Box::new(told), std::process::id(), vec![(0, 0)]).unwrap();
        let runs: Vec<Remap> = runs
            .iter()
            .map(|&(first, n)| Remap { first: Ppn(first), n, to: Place::Home })
            .collect();
        mappings.remap(layout, &runs)
    }

    fn stopped(done: usize, errno: i32) -> Result<(), RemapError> {
        Err(RemapError::Stopped { done, errno })
    }

    /// What was changed of the call that failed may be neither registered nor protected.
    #[test]
    fn of_changes_that_stopped_those_of_the_calls_before_are_done_and_no_others() {
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(16), file_offset: 0 };
        let layout = &RamLayout::from(part);
        let three = &[(0, 2), (3, 1), (5, 3)];
        let again = [Ok(()), stopped(1, libc::EAGAIN)];
        assert_eq!(remapped(layout, three, 2, &again), (2, Err(MemError::Again)));
        assert_eq!(remapped(layout, three, 3, &again[1..]), (0, Err(MemError::Again)));
        assert_eq!(remapped(layout, three, 2, &[Ok(()), Ok(())]), (3, Ok(())));
        // It is about the run that was not made.
        let four = &[(0, 2), (3, 1), (5, 3), (9, 2)];
        let error = MemError::Os { op: "changing mappings", ppn: Ppn(9), source: Errno(libc::EIO) };
        let failed = [Ok(()), stopped(1, libc::EIO)];
        assert_eq!(remapped(layout, four, 2, &failed), (2, Err(error)));
    }

    #[test]
    fn a_run_that_goes_on_in_the_next_part_is_done_when_both_of_its_changes_are() {
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(8), file_offset: 0 };
        let next = RamPart { base: HostAddr(1 << 30), ..part };
        let layout = &RamLayout::new(&[part, next]).unwrap();
        // Where the shim makes one change at a time, and fails after so many.
        let after = |runs: &[(u64, u64)], made: usize| {
            let mut answers = vec![Ok(()); made];
            answers.push(stopped(0, libc::ENOMEM));
            remapped(layout, runs, 1, &answers)
        };
        assert_eq!(after(&[(6, 4)], 1), (0, Err(MemError::NoMemory)));
        assert_eq!(after(&[(6, 4)], 2), (1, Ok(())));
        let three = &[(0, 2), (6, 4), (12, 1)];
        let done: Vec<_> = (0..4).map(|made| after(three, made)).collect();
        assert_eq!(done, [0, 1, 1, 2].map(|done| (done, Err(MemError::NoMemory))));
        assert_eq!(after(three, 4), (3, Ok(())));
    }

    /// One that keeps the RAM file, and is asked for nothing else.
    struct Keeper(Kept);

    impl Remapper for Keeper {
        fn remap(&mut self, _: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
            panic!("nothing is to be mapped");
        }
        fn settled(&mut self) -> bool {
            true
        }
        fn most(&self) -> usize {
            1
        }
        fn keep(&mut self, _: HostAddr, _: Bytes) -> Result<Kept, RemapError> {
            Ok(self.0)
        }
    }

    #[test]
    fn a_shim_that_maps_nothing_can_be_asked_to_keep_the_ram_file() {
        let mappings = Mappings::default();
        let keep = || mappings.keep(HostAddr(1 << 20), Bytes(4096), Duration::ZERO);
        // Where there was no way at all there is none.
        let again = || {
            let keeper = Box::new(Keeper(Kept::Sent));
            mappings.reconnect(keeper, Duration::ZERO, || Ok::<(), ()>(()))
        };
        assert_eq!((again(), keep()), (Ok(Reconnected::Fixed), Kept::Unable));
        mappings.reach(Box::new(Keeper(Kept::Kept)));
        assert_eq!((keep(), mappings.is_connected()), (Kept::Kept, false));
        let run = Remap { first: Ppn(0), n: 1, to: Place::Home };
        let part = RamPart { base: HostAddr(1 << 20), len: Pages(8), file_offset: 0 };
        let layout = &RamLayout::from(part);
        assert_eq!(mappings.remap(layout, &[run]), (0, Err(MemError::Fixed)));
        let again = again();
        assert_eq!(again, Ok(Reconnected::Fixed));
        assert_eq!((keep(), mappings.is_connected()), (Kept::Sent, false));
    }
}
