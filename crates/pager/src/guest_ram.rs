//! The real guest memory: a userfaultfd over the RAM mappings of a VMM, and the RAM files themselves, one for
//! each part of the RAM.
//!
//! The files are read with `pread`, never through a mapping: the VMM can change them at will, and touching what was cut
//! short would kill the manager. What asks for large pages maps a part for a moment, and touches nothing.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ballast_uffd::{CopyOpts, Modes, Uffd, UffdError};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages, Ppn};
use rustix::fs::SeekFrom;
use rustix::io::Errno as Sys;

use crate::accesses::Accesses;
use crate::backend::{Backend, Errno, MemError, PageBuf, Place, Remap};
use crate::file_memory;
use crate::mappings::Mappings;
pub use crate::ram_layout::{MAX_PARTS, RamLayout, RamPart};

/// A VM's RAM: descriptors of its userfaultfd and of its RAM files, all its own, and the way to its shim.
pub struct GuestRam {
    uffd: Uffd,
    /// One for each part.
    files: Vec<File>,
    layout: RamLayout,
    mappings: Arc<Mappings>,
    accesses: OnceLock<Accesses>,
    /// Pages of a large page, or 1.
    large: u64,
    /// See `let_go`.
    was_let_go: AtomicBool,
}

/// Pages of a large page where they are used.
pub const LARGE_PAGE: Pages = Pages::from_mib(2);

impl GuestRam {
    /// Tests: of one part. `uffd` sees missing and write-protected pages of the mapping that `part` tells of; `file`
    /// is the RAM file, open for reading and writing. Nothing is looked at: see `check`. Without large pages,
    /// and without a way to the shim until `mappings().connect`.
    pub fn new(uffd: Uffd, file: OwnedFd, part: RamPart) -> GuestRam {
        GuestRam::of_parts(uffd, vec![file], RamLayout::from(part))
    }

    /// The same, of the parts of `layout`, with their files in the same order.
    pub fn of_parts(uffd: Uffd, files: Vec<OwnedFd>, layout: RamLayout) -> GuestRam {
        let (mappings, accesses) = (Arc::new(Mappings::default()), OnceLock::new());
        let files = files.into_iter().map(File::from).collect();
        GuestRam { uffd, files, layout, mappings, accesses, large: 1, was_let_go: false.into() }
    }

    /// From now on the pager can see which pages the VMM touches, if it is the process of this number and the host lets
    /// it: see `accesses`. Without, it evicts at random.
    ///
    /// # Errors
    /// There is no such process, or it is not the caller's to look at.
    pub fn see_accesses(&self, pid: u32) -> std::io::Result<()> {
        let accesses = Accesses::of(pid)?;
        // Once is enough: a VMM's RAM does not go over to another process.
        let _ = self.accesses.set(accesses);
        Ok(())
    }

    /// Whether it can be allocated as large pages: if the file is not a memfd (which the host's
    /// settings are for), and the VMM mapped it so that they can be mapped as such. All parts, or none.
    ///
    /// # Errors
    /// That cannot be told now: there is no descriptor, or no memory, left.
    pub(crate) fn has_large_pages(&self) -> std::io::Result<bool> {
        if !self.layout.is_aligned(LARGE_PAGE) {
            return Ok(false);
        }
        let memfd = rustix::fs::memfd_create("like", rustix::fs::MemfdFlags::CLOEXEC)?;
        let memfd = File::from(memfd).metadata()?.dev();
        for file in &self.files {
            if file.metadata()?.dev() == memfd {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The same, whose pages are large.
    #[must_use]
    pub(crate) fn with_large_pages(self) -> GuestRam {
        GuestRam { large: LARGE_PAGE.0, ..self }
    }

    /// Its VMM was killed: who still waits for a page, or will, gets what the kernel has there, zeros as a rule, and to the pager
    /// the VMM is gone. The kernel's own threads are not ended by SIGKILL (KVM's for asynchronous faults, vhost's), and the VMM
    /// does not end before them.
    ///
    /// May take as long as somebody holds the lock of the VMM's mappings.
    ///
    /// # Errors
    /// Of the kernel, of the first part that it keeps; `Gone` where the VMM has ended.
    pub fn let_go(&self) -> Result<(), UffdError> {
        self.was_let_go.store(true, Ordering::Relaxed);
        // One where something else is mapped by now keeps none of the others.
        let let_go = |part: &RamPart| self.uffd.unregister(part.base, part.len.bytes());
        self.layout.parts().map(let_go).fold(Ok(()), Result::and)
    }

    fn failed(&self, e: UffdError, ppn: Ppn) -> MemError {
        match e {
            UffdError::NotRegistered | UffdError::Other { .. }
                if self.was_let_go.load(Ordering::Relaxed) =>
            {
                MemError::Gone
            }
            e => from_uffd(e, ppn),
        }
    }

    /// For its events, which one thread reads at a time: each is delivered once.
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }
    /// The RAM file of its first part. Not to be mapped: its VMM may truncate it at any time.
    pub fn file(&self) -> &File {
        &self.files[0]
    }
    /// As it was given; whether it can be is for `check` to say.
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }
    /// Its parts with their files, in the order of their pages.
    pub fn parts(&self) -> impl Iterator<Item = (&RamPart, &File)> {
        self.layout.parts().zip(&self.files)
    }
    /// How its pages are mapped elsewhere.
    pub fn mappings(&self) -> &Arc<Mappings> {
        &self.mappings
    }

    /// Refuses a layout that cannot be, or that the RAM files are too short for.
    ///
    /// # Errors
    /// What cannot be, in words.
    pub fn check(&self) -> Result<(), String> {
        self.layout.check().map_err(str::to_owned)?;
        if self.files.len() != self.layout.parts().count() {
            return Err("it has not a file for each part".to_owned());
        }
        let mut seen = Vec::new();
        for (part, file) in self.parts() {
            let meta = file.metadata().map_err(|e| format!("its file: {e}"))?;
            let (len, end) = (meta.len(), part.file_offset + part.len.bytes().0);
            if len < end {
                return Err(format!("its file has {len} bytes, the mapping ends at {end}"));
            }
            // A page that is two pages would be freed under one of them.
            if seen.contains(&(meta.dev(), meta.ino())) {
                return Err("two of its parts are the same file".to_owned());
            }
            seen.push((meta.dev(), meta.ino()));
        }
        Ok(())
    }

    /// Machine memory that the RAM files take now, by the kernel's count.
    ///
    /// # Errors
    /// Of fstat.
    pub fn measured(&self) -> std::io::Result<Bytes> {
        self.files.iter().map(|file| Ok(Bytes(file.metadata()?.blocks() * 512))).sum()
    }

    /// Device and inode of each RAM file.
    ///
    /// # Errors
    /// Of fstat.
    pub fn identities(&self) -> std::io::Result<Vec<(u64, u64)>> {
        let of = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
        self.files.iter().map(of).collect()
    }

    /// Frees every page of the files, whoever else still holds them open.
    pub(crate) fn release_all(&self) -> std::io::Result<()> {
        let mut result = Ok(());
        for (part, file) in self.parts() {
            // One that cannot be freed does not keep the others.
            let freed = file_memory::free(file, part.file_offset, part.len.bytes().0);
            result = result.and(freed.map_err(Into::into));
        }
        result
    }

    /// The page that seeks from `ppn` on find, at most `end`: part by part, for where one has none the next may.
    fn next(&self, what: fn(u64) -> SeekFrom, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        for (first, n) in self.layout.split(ppn, end.saturating_sub(ppn.0)) {
            let (at, until) = (self.layout.at(first), first.0 + n);
            match rustix::fs::seek(&self.files[at.part], what(at.offset)) {
                // A file that was truncated meanwhile ends before it began.
                Ok(found) => {
                    let pages = found.saturating_sub(at.offset) / PAGE_SIZE as u64;
                    if pages < n {
                        return Ok(first.0 + pages);
                    }
                }
                Err(Sys::NXIO) if until < end && matches!(what(0), SeekFrom::Data(_)) => {}
                Err(Sys::NXIO) => return Ok(end),
                Err(e) => return Err(from_errno(e, "seeking in the RAM file", first)),
            }
        }
        Ok(end)
    }

    pub(crate) fn at(&self, ppn: Ppn) -> HostAddr {
        self.layout.at(ppn).addr
    }

    /// Where a page's file has it, and that file.
    fn home(&self, ppn: Ppn) -> (&File, u64) {
        let at = self.layout.at(ppn);
        (&self.files[at.part], at.offset)
    }

    /// Does it for each part of a run.
    fn in_each(
        &self,
        first: Ppn,
        n: u64,
        act: impl FnMut((Ppn, u64)) -> Result<(), MemError>,
    ) -> Result<(), MemError> {
        self.layout.split(first, n).try_for_each(act)
    }
}

const ONE: Bytes = Bytes(PAGE_SIZE as u64);

impl Backend for GuestRam {
    fn surely_has(&self, ppn: Ppn) -> Range<u64> {
        self.layout.had_with(ppn)
    }

    fn protect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.uffd.protect(self.at(ppn), ONE).map_err(|e| self.failed(e, ppn))
    }

    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.uffd.unprotect(self.at(ppn), ONE, true).map_err(|e| self.failed(e, ppn))
    }

    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError> {
        let (file, offset) = self.home(ppn);
        file.read_exact_at(into, offset).map_err(|e| unread(&e, ppn))
    }

    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.in_each(ppn, n, |(first, n)| {
            let (file, offset) = self.home(first);
            file_memory::free(file, offset, Pages(n).bytes().0)
                .map_err(|e| from_errno(e, "punching the RAM file", first))
        })
    }

    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError> {
        let at = self.layout.at(ppn);
        let n = n.min(at.left);
        match self.uffd.zeropage(at.addr, n as usize * PAGE_SIZE, true) {
            Ok(bytes) => Ok((bytes / PAGE_SIZE) as u64),
            // A call is about one mapping only, and one may end between two of the pages.
            Err(UffdError::NotRegistered | UffdError::Other { .. }) if n > 1 => self.zero(ppn, 1),
            Err(e) => Err(self.failed(e, ppn)),
        }
    }

    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError> {
        let opts = CopyOpts { wake: true, protect: false };
        self.uffd.copy(self.at(ppn), bytes, opts).map(drop).map_err(|e| self.failed(e, ppn))
    }

    fn fill_run(&self, first: Ppn, pages: &[PageBuf]) -> Result<u64, MemError> {
        let opts = CopyOpts { wake: true, protect: false };
        let at = self.layout.at(first);
        let pages = &pages[..pages.len().min(at.left as usize)];
        match self.uffd.copy(at.addr, pages.as_flattened(), opts) {
            Ok(bytes) => Ok((bytes / PAGE_SIZE) as u64),
            // As in `zero`.
            Err(UffdError::NotRegistered | UffdError::Other { .. }) if pages.len() > 1 => {
                self.fill(first, &pages[0]).map(|()| 1)
            }
            Err(e) => Err(self.failed(e, first)),
        }
    }

    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.in_each(ppn, n, |(first, n)| {
            self.uffd.wake(self.at(first), Pages(n).bytes()).map_err(|e| self.failed(e, first))
        })
    }

    fn read_homes(&self, first: Ppn, into: &mut [PageBuf]) -> Result<(), MemError> {
        let mut rest = into;
        self.in_each(first, rest.len() as u64, |(first, n)| {
            let (pages, after) = std::mem::take(&mut rest).split_at_mut(n as usize);
            rest = after;
            let (file, offset) = self.home(first);
            file.read_exact_at(pages.as_flattened_mut(), offset).map_err(|e| unread(&e, first))
        })
    }

    fn protect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        self.in_each(first, n, |(first, n)| {
            match self.uffd.protect(self.at(first), Pages(n).bytes()) {
                Ok(()) => Ok(()),
                Err(UffdError::Again) => Err(MemError::Again),
                // Before Linux 6.3 a call is about one mapping only, and here one may end between two pages.
                Err(_) if n > 1 => (first.0..first.0 + n).try_for_each(|p| self.protect(Ppn(p))),
                Err(e) => Err(self.failed(e, first)),
            }
        })
    }

    fn unprotect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        self.in_each(first, n, |(first, n)| {
            match self.uffd.unprotect(self.at(first), Pages(n).bytes(), true) {
                Ok(()) => Ok(()),
                Err(UffdError::Again) => Err(MemError::Again),
                // As in `protect_run`.
                Err(_) if n > 1 => (first.0..first.0 + n).try_for_each(|p| self.unprotect(Ppn(p))),
                Err(e) => Err(self.failed(e, first)),
            }
        })
    }

    fn large(&self) -> u64 {
        self.large
    }

    fn allocate(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let ((file, offset), len) = (self.home(first), Pages(n).bytes().0);
        populate(file, offset, len as usize)
            .map_err(|e| from_errno(e, "allocating a large page", first))
    }

    fn collapse(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let ((file, offset), len) = (self.home(first), Pages(n).bytes().0);
        match collapse(file, offset, len as usize) {
            Ok(()) => Ok(true),
            // There is no large page, or no memory, or somebody holds a page.
            Err(Sys::AGAIN | Sys::BUSY | Sys::NOMEM) => Ok(false),
            Err(e) => Err(from_errno(e, "collapsing into a large page", first)),
        }
    }

    fn sees_copies(&self) -> bool {
        self.mappings.sees_copies()
    }

    fn may_leave_holes(&self) -> bool {
        self.mappings.may_leave_holes()
    }

    fn can_remap(&self) -> bool {
        self.mappings.is_connected()
    }

    fn can_map_again(&self) -> bool {
        self.mappings.can_map_again()
    }

    fn remap(&self, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        self.mappings.remap(&self.layout, runs)
    }

    fn map_again(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        self.mappings.map_again(&self.layout, first, n)
    }

    fn places(&self, pages: &[Ppn]) -> Result<Vec<Result<Place, MemError>>, MemError> {
        self.mappings.places(&self.layout, pages)
    }

    fn copied(&self, first: Ppn, n: u64) -> Result<Vec<bool>, MemError> {
        self.mappings.copied(&self.layout, first, n)
    }

    fn rearm(&self, ppn: Ppn) -> Result<(), MemError> {
        let modes = Modes::MISSING | Modes::WP;
        // SAFETY: it is the VMM's: guest RAM, to which no reference of this process leads.
        unsafe { self.uffd.register(self.at(ppn), ONE, modes) }.map_err(|e| self.failed(e, ppn))?;
        self.protect(ppn)
    }

    fn watch(&self, pages: &[Ppn]) -> bool {
        let at: Vec<HostAddr> = pages.iter().map(|&ppn| self.at(ppn)).collect();
        self.accesses.get().is_some_and(|accesses| accesses.watch(&at))
    }

    fn accessed(&self, first: Ppn, n: u64) -> Vec<bool> {
        let since = |(first, n)| {
            let seen =
                self.accesses.get().and_then(|accesses| accesses.since(self.at(first), Pages(n)));
            seen.unwrap_or_else(|| vec![true; n as usize])
        };
        if self.layout.at(first).left >= n {
            return since((first, n));
        }
        self.layout.split(first, n).flat_map(since).collect()
    }

    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.next(SeekFrom::Data, ppn, end)
    }

    fn next_absent(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.next(SeekFrom::Hole, ppn, end)
    }
}

/// Has the kernel allocate a part of a file as one large page, as it does for a mapping that asks for such.
/// Nothing is read or written through the mapping, so nobody who truncates the file harms us. Answers whether
/// it is one: that is told by how often the kernel had to be asked, as nothing else tells it in all kernels.
fn populate(file: &File, offset: u64, len: usize) -> Result<bool, Sys> {
    let before = faults_of_this_thread();
    advise_part(file, offset, len, &[libc::MADV_HUGEPAGE, libc::MADV_POPULATE_WRITE])?;
    Ok(faults_of_this_thread().saturating_sub(before) <= FAULTS_OF_ONE)
}

/// Has the kernel make one large page of a part of a file (Linux 6.1).
fn collapse(file: &File, offset: u64, len: usize) -> Result<(), Sys> {
    advise_part(file, offset, len, &[libc::MADV_COLLAPSE])
}

/// Maps a part of a file for a moment, as a large page can be mapped, and gives the kernel advice about it.
fn advise_part(file: &File, offset: u64, len: usize, advice: &[libc::c_int]) -> Result<(), Sys> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let room = unsafe {
        mmap_anonymous(std::ptr::null_mut(), 2 * len, ProtFlags::empty(), MapFlags::PRIVATE)?
    };
    let at = room.wrapping_byte_add(room.addr().wrapping_neg() & (len - 1));
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: inside the mapping that was just made, and which nobody else knows.
    let advise = |advice: &libc::c_int| match unsafe { libc::madvise(at, len, *advice) } {
        0 => Ok(()),
        _ => Err(Sys::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Sys::INVAL)),
    };
    // SAFETY: as above.
    let mapped = unsafe { mmap(at, len, prot, flags, file, offset) };
    let advised = mapped.and_then(|_| advice.iter().try_for_each(advise));
    // SAFETY: as above; no reference into it was made.
    unsafe { munmap(room, 2 * len)? };
    advised
}

/// One, and one more that may have come in between. Of the pages that are allocated where no large one is, the
/// largest are of 64 KiB.
const FAULTS_OF_ONE: i64 = 2;

fn faults_of_this_thread() -> i64 {
    // SAFETY: all-zero is a valid rusage, and the kernel only writes to it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_minflt + usage.ru_majflt
    }
}

fn unread(e: &std::io::Error, ppn: Ppn) -> MemError {
    let source = Errno(e.raw_os_error().unwrap_or(libc::EIO));
    MemError::Os { op: "read of the RAM file", ppn, source }
}

fn from_uffd(e: UffdError, ppn: Ppn) -> MemError {
    match e {
        UffdError::Again => MemError::Again,
        UffdError::Exists => MemError::Exists,
        UffdError::Gone => MemError::Gone,
        UffdError::NoMemory => MemError::NoMemory,
        UffdError::NotRegistered => {
            MemError::Os { op: "userfaultfd (not registered)", ppn, source: Errno(libc::ENOENT) }
        }
        UffdError::Other { op, errno } => MemError::Os { op, ppn, source: Errno(errno) },
    }
}

fn from_errno(e: Sys, op: &'static str, ppn: Ppn) -> MemError {
    match e {
        Sys::NOMEM => MemError::NoMemory,
        e => MemError::Os { op, ppn, source: Errno(e.raw_os_error()) },
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use ballast_uffd::Event;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};

    /// Two pages of a file of their own, of which the userfaultfd tells, and where this process has them.
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn two_pages(uffd: &Uffd) -> (OwnedFd, HostAddr) {
        let (len, file) = (2 * PAGE_SIZE, memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, len as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, never unmapped.
        let at =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0).unwrap() };
        let base = HostAddr(at.addr() as u64);
        // SAFETY: it is reached by its address alone.
        unsafe { uffd.register(base, Bytes(len as u64), Modes::MISSING | Modes::WP) }.unwrap();
        (file, base)
    }

    /// Of two pages, of this process, and where they are. None, loudly, without the right to make userfaultfds.
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn ram() -> Option<(GuestRam, HostAddr)> {
        let uffd = crate::service::testing::uffd()?;
        uffd.handshake(ballast_uffd::NEEDED).unwrap();
        let (file, base) = two_pages(&uffd);
        let part = RamPart { base, len: Pages(2), file_offset: 0 };
        Some((GuestRam::new(uffd, file, part), base))
    }

    #[test]
    fn who_waits_for_a_page_of_a_vmm_that_is_let_go_goes_on_and_to_the_pager_it_is_gone() {
        let Some((ram, base)) = ram() else { return };
        let mut bytes: Box<PageBuf> = Box::new([7; PAGE_SIZE]);
        ram.fill(Ppn(1), &bytes).unwrap();
        ram.protect(Ppn(1)).unwrap();
        // SAFETY: words of the mapping of above.
        let read = move |at: u64| unsafe { ((base.0 + at) as *const u8).read_volatile() };
        // SAFETY: as above.
        let write = move |at: u64| unsafe { ((base.0 + at) as *mut u8).write_volatile(1) };
        let waiters = [
            std::thread::spawn(move || read(0)),
            std::thread::spawn(move || {
                write(PAGE_SIZE as u64);
                read(PAGE_SIZE as u64 + 1)
            }),
        ];
        let (mut events, begun) = (Vec::new(), std::time::Instant::now());
        while events.len() < 2 {
            ram.uffd().read_events(&mut events).unwrap();
            assert!(begun.elapsed().as_secs() < 60, "{events:?}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        ram.let_go().unwrap();
        assert_eq!(waiters.map(|waiter| waiter.join().unwrap()), [0, 7]);
        bytes.fill(9);
        assert_eq!(ram.fill(Ppn(0), &bytes), Err(MemError::Gone));
        assert_eq!(ram.protect(Ppn(1)), Err(MemError::Gone));
        assert_eq!((read(0), read(PAGE_SIZE as u64)), (0, 1));
    }

    /// The first event, of a thread that waits for its page.
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn event_of<T>(waiter: &JoinHandle<T>, ram: &GuestRam) -> Event {
        let (mut events, begun) = (Vec::new(), Instant::now());
        while ram.uffd().read_events(&mut events).unwrap() == 0 {
            assert!(!waiter.is_finished(), "it did not wait");
            assert!(begun.elapsed().as_secs() < 60);
            std::thread::sleep(Duration::from_millis(1));
        }
        events.remove(0)
    }

    #[test]
    fn who_waits_in_one_part_goes_on_though_another_is_unmapped() {
        let Some(uffd) = crate::service::testing::uffd() else { return };
        uffd.handshake(ballast_uffd::NEEDED).unwrap();
        let (file, base) = two_pages(&uffd);
        let gone = memfd_create("gone", MemfdFlags::CLOEXEC).unwrap();
        // Where nothing is mapped: the kernel begins at the other end of the address space.
        let unmapped = RamPart { base: HostAddr(1 << 36), len: Pages(2), file_offset: 0 };
        let layout = RamLayout::new(&[unmapped, RamPart { base, ..unmapped }]).unwrap();
        let ram = GuestRam::of_parts(uffd, vec![gone, file], layout);
        // SAFETY: a byte of the mapping of `two_pages`.
        let read = move || unsafe { (base.0 as *const u8).read_volatile() };
        let waiter = std::thread::spawn(read);
        let event = event_of(&waiter, &ram);
        assert!(matches!(event, Event::Missing { addr, .. } if addr == base), "{event:?}");
        assert!(ram.let_go().is_err(), "nothing is mapped there");
        let begun = Instant::now();
        while !waiter.is_finished() {
            assert!(begun.elapsed().as_secs() < 60, "it still waits");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(waiter.join().unwrap(), 0);
    }

    #[test]
    fn a_page_that_is_armed_again_is_written_once_it_is_unprotected_and_not_before() {
        let Some((ram, base)) = ram() else { return };
        let at = base.page(Ppn(1));
        let mut bytes: Box<PageBuf> = Box::new([7; PAGE_SIZE]);
        ram.fill(Ppn(1), &bytes).unwrap();
        ram.uffd().unregister(at, ONE).unwrap();
        ram.rearm(Ppn(1)).unwrap();
        // SAFETY: a byte of the mapping of `two_pages`.
        let write = move || unsafe { (at.0 as *mut u8).write_volatile(1) };
        let writer = std::thread::spawn(write);
        let event = event_of(&writer, &ram);
        assert!(matches!(event, Event::Protected { addr } if addr == at), "{event:?}");
        ram.read_home(Ppn(1), &mut bytes).unwrap();
        assert_eq!(bytes[0], 7);
        ram.unprotect(Ppn(1)).unwrap();
        writer.join().unwrap();
        ram.read_home(Ppn(1), &mut bytes).unwrap();
        assert_eq!(bytes[..2], [1, 7]);
    }

    #[test]
    fn what_is_mapped_for_an_advice_is_unmapped_whatever_comes_of_it() {
        let len = LARGE_PAGE.bytes().0;
        let file = File::from(memfd_create("advised-for-a-moment", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len).unwrap();
        let advised = |advice: &[libc::c_int]| advise_part(&file, 0, len as usize, advice);
        assert_eq!(advised(&[libc::MADV_NORMAL]), Ok(()));
        assert_eq!(advised(&[libc::MADV_NORMAL, -1]), Err(Sys::INVAL));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let left = maps.lines().find(|line| line.contains("advised-for-a-moment"));
        assert_eq!(left, None);
    }
}
