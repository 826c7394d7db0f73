//! The real guest memory: a userfaultfd over the RAM mapping of a VMM, and the RAM file itself.
//!
//! The file is read with `pread` and never mapped: the VMM can change it at will, and a truncated
//! mapping would kill the manager.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::OnceLock;

use ballast_uffd::{CopyOpts, Modes, Uffd, UffdError};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages, Ppn};
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno as Sys;

use crate::accesses::Accesses;
use crate::backend::{Backend, Errno, MemError, PageBuf, Place, Remap};
use crate::mappings::Mappings;

/// Where a VM's RAM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamLayout {
    /// Where the VMM mapped it.
    pub base: HostAddr,
    /// How large it is: its pages are numbered from 0 on.
    pub len: Pages,
    /// Where in the file it begins.
    pub file_offset: u64,
}

impl RamLayout {
    /// The page in which an address of the VMM lies; None outside the RAM.
    pub fn ppn(&self, addr: HostAddr) -> Option<Ppn> {
        addr.ppn_from(self.base).filter(|p| p.0 < self.len.0)
    }

    /// The pages that lie whole in `[start, end)` of the VMM, as first and number; None if none.
    pub(crate) fn pages_within(&self, start: HostAddr, end: HostAddr) -> Option<(Ppn, u64)> {
        let page = PAGE_SIZE as u64;
        let from = start.0.saturating_sub(self.base.0).div_ceil(page);
        let to = (end.0.saturating_sub(self.base.0) / page).min(self.len.0);
        (from < to).then(|| (Ppn(from), to - from))
    }

    /// What comes from a VMM is checked before anything is computed from it. Err says what cannot be.
    pub fn check(&self) -> Result<(), &'static str> {
        let page = PAGE_SIZE as u64;
        if self.len.is_zero() {
            return Err("it is empty");
        }
        if !self.base.0.is_multiple_of(page) || !self.file_offset.is_multiple_of(page) {
            return Err("it does not begin at a page boundary");
        }
        let bytes = self.len.0.checked_mul(page);
        let fits = |from: u64| {
            bytes.and_then(|n| from.checked_add(n)).is_some_and(|end| end <= i64::MAX as u64)
        };
        if fits(self.base.0) && fits(self.file_offset) {
            Ok(())
        } else {
            Err("its end is beyond the end of the address space or of any file")
        }
    }
}

/// A VM's RAM: descriptors of its userfaultfd and of its RAM file, both its own, and the way to its shim.
pub struct GuestRam {
    uffd: Uffd,
    file: std::fs::File,
    layout: RamLayout,
    mappings: Mappings,
    accesses: OnceLock<Accesses>,
    /// Pages of a large page, or 1.
    large: u64,
}

/// Pages of a large page where they are used.
pub const LARGE_PAGE: Pages = Pages::from_mib(2);

impl GuestRam {
    /// `uffd` sees missing and write-protected pages of the mapping that `layout` tells of; `file` is the
    /// RAM file, open for reading and writing. Nothing is looked at: see `check`. Without large pages, and
    /// without a way to the shim until `mappings().connect`.
    pub fn new(uffd: Uffd, file: OwnedFd, layout: RamLayout) -> GuestRam {
        let (mappings, accesses) = (Mappings::default(), OnceLock::new());
        GuestRam { uffd, file: file.into(), layout, mappings, accesses, large: 1 }
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

    /// The same, allocated as large pages where it can be: if the file is not a memfd (which the host's
    /// settings are for), and the VMM mapped it so that they can be mapped as such.
    #[must_use]
    pub(crate) fn with_large_pages(self) -> GuestRam {
        let unit = LARGE_PAGE.bytes().0;
        let of = |file: &std::fs::File| file.metadata().map(|meta| meta.dev());
        let memfd = rustix::fs::memfd_create("like", rustix::fs::MemfdFlags::CLOEXEC)
            .map(std::fs::File::from)
            .map_err(Into::into)
            .and_then(|file| of(&file));
        let has = of(&self.file).is_ok_and(|dev| memfd.is_ok_and(|memfd| memfd != dev));
        let fits =
            self.layout.base.0.is_multiple_of(unit) && self.layout.file_offset.is_multiple_of(unit);
        GuestRam { large: if has && fits { LARGE_PAGE.0 } else { 1 }, ..self }
    }

    /// For its events, which one thread reads at a time: each is delivered once.
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }
    /// The RAM file. Not to be mapped: its VMM may truncate it at any time.
    pub fn file(&self) -> &std::fs::File {
        &self.file
    }
    /// As it was given; whether it can be is for `check` to say.
    pub fn layout(&self) -> RamLayout {
        self.layout
    }
    /// How its pages are mapped elsewhere.
    pub fn mappings(&self) -> &Mappings {
        &self.mappings
    }

    /// Refuses a layout that cannot be, or that the RAM file is too short for.
    pub fn check(&self) -> Result<(), String> {
        self.layout.check().map_err(str::to_owned)?;
        let len = self.file.metadata().map_err(|e| format!("its file: {e}"))?.len();
        let end = self.layout.file_offset + self.layout.len.bytes().0;
        if len < end {
            return Err(format!("its file has {len} bytes, the mapping ends at {end}"));
        }
        Ok(())
    }

    /// Machine memory that the RAM file takes now, by the kernel's count.
    pub fn measured(&self) -> std::io::Result<Bytes> {
        Ok(Bytes(self.file.metadata()?.blocks() * 512))
    }

    /// Device and inode of the RAM file.
    pub fn identity(&self) -> std::io::Result<(u64, u64)> {
        let meta = self.file.metadata()?;
        Ok((meta.dev(), meta.ino()))
    }

    /// Frees every page of the file, whoever else still holds it open.
    pub(crate) fn release_all(&self) -> std::io::Result<()> {
        self.punch_bytes(self.layout.file_offset, self.layout.len.bytes().0).map_err(Into::into)
    }

    fn punch_bytes(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(self.file.as_fd(), flags, offset, len) {
                Err(Sys::INTR) => {}
                other => return other,
            }
        }
    }

    /// The page that a seek from `ppn` on finds, at most `end`.
    fn next(&self, what: SeekFrom, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        match rustix::fs::seek(&self.file, what) {
            // A file that was truncated meanwhile ends before it began.
            Ok(at) => {
                let page = at.saturating_sub(self.layout.file_offset) / PAGE_SIZE as u64;
                Ok(page.clamp(ppn.0, end))
            }
            Err(Sys::NXIO) => Ok(end),
            Err(e) => Err(from_errno(e, "seeking in the RAM file", ppn)),
        }
    }

    fn at(&self, ppn: Ppn) -> HostAddr {
        self.layout.base.page(ppn)
    }
    fn offset(&self, ppn: Ppn) -> u64 {
        self.layout.file_offset + ppn.offset()
    }
}

const ONE: Bytes = Bytes(PAGE_SIZE as u64);

impl Backend for GuestRam {
    fn protect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.uffd.protect(self.at(ppn), ONE).map_err(|e| from_uffd(e, ppn))
    }

    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.uffd.unprotect(self.at(ppn), ONE, true).map_err(|e| from_uffd(e, ppn))
    }

    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError> {
        self.file.read_exact_at(into, self.offset(ppn)).map_err(|e| MemError::Os {
            op: "read of the RAM file",
            ppn,
            source: Errno(e.raw_os_error().unwrap_or(libc::EIO)),
        })
    }

    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.punch_bytes(self.offset(ppn), Pages(n).bytes().0)
            .map_err(|e| from_errno(e, "punching the RAM file", ppn))
    }

    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError> {
        match self.uffd.zeropage(self.at(ppn), n as usize * PAGE_SIZE, true) {
            Ok(bytes) => Ok((bytes / PAGE_SIZE) as u64),
            // A call is about one mapping only, and one may end between two of the pages.
            Err(UffdError::NotRegistered | UffdError::Other { .. }) if n > 1 => self.zero(ppn, 1),
            Err(e) => Err(from_uffd(e, ppn)),
        }
    }

    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError> {
        let opts = CopyOpts { wake: true, protect: false };
        self.uffd.copy(self.at(ppn), bytes, opts).map(drop).map_err(|e| from_uffd(e, ppn))
    }

    fn fill_run(&self, first: Ppn, pages: &[PageBuf]) -> Result<u64, MemError> {
        let opts = CopyOpts { wake: true, protect: false };
        match self.uffd.copy(self.at(first), pages.as_flattened(), opts) {
            Ok(bytes) => Ok((bytes / PAGE_SIZE) as u64),
            // As in `zero`.
            Err(UffdError::NotRegistered | UffdError::Other { .. }) if pages.len() > 1 => {
                self.fill(first, &pages[0]).map(|()| 1)
            }
            Err(e) => Err(from_uffd(e, first)),
        }
    }

    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.uffd.wake(self.at(ppn), Pages(n).bytes()).map_err(|e| from_uffd(e, ppn))
    }

    fn read_homes(&self, first: Ppn, into: &mut [PageBuf]) -> Result<(), MemError> {
        self.file.read_exact_at(into.as_flattened_mut(), self.offset(first)).map_err(|e| {
            MemError::Os {
                op: "read of the RAM file",
                ppn: first,
                source: Errno(e.raw_os_error().unwrap_or(libc::EIO)),
            }
        })
    }

    fn protect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        match self.uffd.protect(self.at(first), Pages(n).bytes()) {
            Ok(()) => Ok(()),
            Err(UffdError::Again) => Err(MemError::Again),
            // Before Linux 6.3 a call is about one mapping only, and here one may end between two pages.
            Err(_) if n > 1 => (first.0..first.0 + n).try_for_each(|p| self.protect(Ppn(p))),
            Err(e) => Err(from_uffd(e, first)),
        }
    }

    fn unprotect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        match self.uffd.unprotect(self.at(first), Pages(n).bytes(), true) {
            Ok(()) => Ok(()),
            Err(UffdError::Again) => Err(MemError::Again),
            // As in `protect_run`.
            Err(_) if n > 1 => (first.0..first.0 + n).try_for_each(|p| self.unprotect(Ppn(p))),
            Err(e) => Err(from_uffd(e, first)),
        }
    }

    fn large(&self) -> u64 {
        self.large
    }

    fn allocate(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let (offset, len) = (self.offset(first), Pages(n).bytes().0);
        populate(&self.file, offset, len as usize)
            .map_err(|e| from_errno(e, "allocating a large page", first))
    }

    fn collapse(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let (offset, len) = (self.offset(first), Pages(n).bytes().0);
        match collapse(&self.file, offset, len as usize) {
            Ok(()) => Ok(true),
            // There is no large page, or no memory, or somebody holds a page.
            Err(Sys::AGAIN | Sys::BUSY | Sys::NOMEM) => Ok(false),
            Err(e) => Err(from_errno(e, "collapsing into a large page", first)),
        }
    }

    fn can_remap(&self) -> bool {
        self.mappings.is_connected()
    }

    fn remap(&self, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        self.mappings.remap(self.layout, runs)
    }

    fn places(&self, pages: &[Ppn]) -> Result<Vec<Result<Place, MemError>>, MemError> {
        self.mappings.places(self.layout, pages)
    }

    fn copied(&self, first: Ppn, n: u64) -> Result<Vec<bool>, MemError> {
        self.mappings.copied(self.layout, first, n)
    }

    fn rearm(&self, ppn: Ppn) -> Result<(), MemError> {
        let modes = Modes::MISSING | Modes::WP;
        self.uffd.register(self.at(ppn), ONE, modes).map_err(|e| from_uffd(e, ppn))?;
        self.protect(ppn)
    }

    fn watch(&self, pages: &[Ppn]) -> bool {
        let at: Vec<HostAddr> = pages.iter().map(|&ppn| self.at(ppn)).collect();
        self.accesses.get().is_some_and(|accesses| accesses.watch(&at))
    }

    fn accessed(&self, first: Ppn, n: u64) -> Vec<bool> {
        let seen =
            self.accesses.get().and_then(|accesses| accesses.since(self.at(first), Pages(n)));
        seen.unwrap_or_else(|| vec![true; n as usize])
    }

    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.next(SeekFrom::Data(self.offset(ppn)), ppn, end)
    }

    fn next_absent(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.next(SeekFrom::Hole(self.offset(ppn)), ppn, end)
    }
}

/// Has the kernel allocate a part of a file as one large page, as it does for a mapping that asks for such.
/// Nothing is read or written through the mapping, so nobody who truncates the file harms us. Answers whether
/// it is one: that is told by how often the kernel had to be asked, as nothing else tells it in all kernels.
fn populate(file: &std::fs::File, offset: u64, len: usize) -> Result<bool, Sys> {
    let before = faults_of_this_thread();
    advise_part(file, offset, len, &[libc::MADV_HUGEPAGE, libc::MADV_POPULATE_WRITE])?;
    Ok(faults_of_this_thread().saturating_sub(before) <= FAULTS_OF_ONE)
}

/// Has the kernel make one large page of a part of a file (Linux 6.1).
fn collapse(file: &std::fs::File, offset: u64, len: usize) -> Result<(), Sys> {
    advise_part(file, offset, len, &[libc::MADV_COLLAPSE])
}

/// Maps a part of a file for a moment, as a large page can be mapped, and gives the kernel advice about it.
fn advise_part(
    file: &std::fs::File,
    offset: u64,
    len: usize,
    advice: &[libc::c_int],
) -> Result<(), Sys> {
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
