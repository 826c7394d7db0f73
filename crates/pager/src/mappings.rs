//! How a VM's pages are mapped elsewhere: through its shim, which is the only one that can, and what
//! the kernel tells of how they are mapped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ballast_sharing::StorePage;
use ballast_uffd::procmap::{Maps, Pagemap};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages, Ppn};

use crate::backend::{Errno, MemError, Place, Remap};
use crate::guest_ram::RamLayout;
use crate::sync::{Mutex, lock};

/// One change, as the VMM process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub addr: HostAddr,
    pub len: Bytes,
    pub to: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// What is seen there now goes into the RAM file, which is mapped again.
    Home,
    /// The file of this number among those given, privately, and write-protected.
    File { index: u8, offset: u64 },
}

/// Why changes were not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemapError {
    /// The first `done` changes are made, the next one failed; or those that are made could not be
    /// registered and protected.
    Stopped { done: usize, errno: i32 },
    /// Whether any was made is not known, now and until `settled` says so.
    Unanswered,
    /// There is nobody any more who could.
    Gone,
}

/// The way to a VM's shim.
pub trait Remapper: Send {
    /// Makes changes in order.
    fn remap(&mut self, changes: &[Change], files: &[BorrowedFd<'_>]) -> Result<(), RemapError>;
    /// Whether nothing that was asked for is under way any more.
    fn settled(&mut self) -> bool;
    /// The most changes of one call.
    fn most(&self) -> usize;
}

/// A file that VMs map to read.
pub struct View {
    fd: OwnedFd,
    /// Device and inode.
    identity: (u64, u64),
}

impl View {
    pub fn new(fd: OwnedFd) -> std::io::Result<View> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(View { fd, identity: (stat.st_dev, stat.st_ino) })
    }
    /// Device and inode of the file.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }
    pub fn try_clone(&self) -> std::io::Result<View> {
        Ok(View { fd: self.fd.try_clone()?, identity: self.identity })
    }
}

/// What can be changed in a VM.
#[derive(Default)]
pub struct Mappings {
    link: Mutex<Option<Link>>,
    views: Mutex<Views>,
}

struct Link {
    remapper: Box<dyn Remapper>,
    pid: u32,
    pagemap: Pagemap,
    /// Home: the RAM file.
    home: (u64, u64),
}

#[derive(Default)]
struct Views {
    store: Option<View>,
    zeros: Option<View>,
}

/// Pages of the file of zeros: a run of pages that nobody wrote maps it from its start on.
pub const ZERO_RUN: Pages = Pages::from_mib(2);

impl Mappings {
    /// From now on the VM's mappings can be changed. `home` is device and inode of its RAM file.
    pub fn connect(
        &self,
        remapper: Box<dyn Remapper>,
        pid: u32,
        home: (u64, u64),
    ) -> std::io::Result<()> {
        let pagemap = Pagemap::open(pid)?;
        *lock(&self.link) = Some(Link { remapper, pid, pagemap, home });
        Ok(())
    }
    pub fn is_connected(&self) -> bool {
        lock(&self.link).is_some()
    }
    /// How many mappings the VMM has. Reads all of them.
    pub fn count(&self) -> Option<u64> {
        let pid = lock(&self.link).as_ref()?.pid;
        Maps::count_all(pid).ok()
    }
    pub fn set_store(&self, view: View) {
        lock(&self.views).store = Some(view);
    }
    pub fn set_zeros(&self, view: View) {
        lock(&self.views).zeros = Some(view);
    }

    pub fn remap(&self, layout: RamLayout, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        let mut link = lock(&self.link);
        let Some(link) = link.as_mut() else { return (0, Err(MemError::Fixed)) };
        let views = lock(&self.views);
        // Those that are needed, in this order.
        let needs = |zeros: bool| {
            runs.iter().any(|run| match run.to {
                Place::Home => false,
                Place::Store(_) => !zeros,
                Place::Zeros => zeros,
            })
        };
        let store = views.store.as_ref().filter(|_| needs(false));
        let zeros = views.zeros.as_ref().filter(|_| needs(true));
        let files: Vec<BorrowedFd<'_>> =
            store.into_iter().chain(zeros).map(|view| view.fd.as_fd()).collect();
        let mut changes = Vec::with_capacity(runs.len());
        for run in runs {
            let to = match run.to {
                Place::Home => Some(Target::Home),
                Place::Store(page) => {
                    store.map(|_| Target::File { index: 0, offset: page.offset() })
                }
                Place::Zeros => zeros.map(|_| Target::File {
                    index: u8::from(store.is_some()),
                    offset: zero_offset(run.first),
                }),
            };
            let Some(to) = to else { return (0, Err(MemError::Fixed)) };
            changes.push(Change {
                addr: layout.base.page(run.first),
                len: Pages(run.n).bytes(),
                to,
            });
        }
        let most = link.remapper.most().max(1);
        let mut done = 0;
        for some in changes.chunks(most) {
            match link.remapper.remap(some, &files) {
                Ok(()) => done += some.len(),
                // Those that were changed may not be registered and protected: they are looked up too.
                Err(RemapError::Stopped { done: n, errno }) => {
                    let stopped = runs[(done + n).min(runs.len() - 1)];
                    return (done, Err(from_errno(errno, stopped)));
                }
                Err(RemapError::Unanswered) => return (done, Err(MemError::Unanswered)),
                Err(RemapError::Gone) => return (done, Err(MemError::Gone)),
            }
        }
        (done, Ok(()))
    }

    pub fn copied(&self, layout: RamLayout, first: Ppn, n: u64) -> Result<Vec<bool>, MemError> {
        let link = lock(&self.link);
        let link = link.as_ref().ok_or(MemError::Fixed)?;
        link.pagemap
            .copies(layout.base.page(first), Pages(n))
            .map_err(|e| from_io(&e, "/proc/PID/pagemap", first))
    }

    pub fn places(&self, layout: RamLayout, first: Ppn, n: u64) -> Result<Vec<Place>, MemError> {
        let mut link = lock(&self.link);
        let link = link.as_mut().ok_or(MemError::Fixed)?;
        if !link.remapper.settled() {
            return Err(MemError::Unanswered);
        }
        let (start, end) = (layout.base.page(first), layout.base.page(Ppn(first.0 + n)));
        let maps =
            Maps::read(link.pid, start..end).map_err(|e| from_io(&e, "/proc/PID/maps", first))?;
        let views = lock(&self.views);
        let is = |view: &Option<View>, id: (u64, u64)| {
            view.as_ref().is_some_and(|view| view.identity == id)
        };
        (first.0..first.0 + n)
            .map(Ppn)
            .map(|ppn| {
                let addr = layout.base.page(ppn);
                let strange = MemError::Os {
                    op: "a mapping of the VMM's own making",
                    ppn,
                    source: Errno(libc::EINVAL),
                };
                let part = maps.at(addr).ok_or_else(|| strange.clone())?;
                let (id, offset) = ((part.dev, part.inode), part.offset_of(addr));
                if id == link.home && part.shared {
                    Ok(Place::Home)
                } else if is(&views.zeros, id) {
                    Ok(Place::Zeros)
                } else if is(&views.store, id) {
                    StorePage::new(offset / PAGE_SIZE as u64).map(Place::Store).ok_or(strange)
                } else {
                    Err(strange)
                }
            })
            .collect()
    }
}

/// Neighbours map neighbours, so that a run can be continued by the next.
fn zero_offset(ppn: Ppn) -> u64 {
    ppn.0 % ZERO_RUN.0 * PAGE_SIZE as u64
}

/// Pages from `ppn` on that one run of zeros can cover.
pub fn zero_run(ppn: Ppn) -> u64 {
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
