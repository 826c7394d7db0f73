//! Shared memory mappings of the manager's own files: the one place where raw memory is handled.
//!
//! Only files of the manager (mode 0600 in its run folder) are mapped. A RAM file is never: a
//! hostile VMM could truncate it, and touching the mapping would then kill the manager.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::file_memory;
use crate::sync::AtomicU64;

/// The first page of a file, or what there is of it.
///
/// # Errors
/// The file cannot be opened, or not be read.
pub fn first_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    File::open(path)?.take(ballast_units::PAGE_SIZE as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether anything was written into the first page of a file, which is a header. A manager that died over
/// making it may have left nothing there: then nobody relies on it.
///
/// # Errors
/// As of `first_bytes`.
pub fn is_begun(path: &Path) -> std::io::Result<bool> {
    Ok(first_bytes(path)?.iter().any(|&byte| byte != 0))
}

/// A file that is made under another name, so that it is whole once it has its own. Removed when dropped
/// before that.
pub struct Fresh {
    beside: std::path::PathBuf,
    named: bool,
}

impl Fresh {
    /// The file `path` is to be. Removes what a manager left that died over making it.
    ///
    /// # Errors
    /// What was left cannot be removed.
    pub fn beside(path: &Path) -> std::io::Result<Fresh> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let fresh = Fresh { beside: beside.into(), named: false };
        match std::fs::remove_file(fresh.path()) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(fresh),
        }
    }
    pub fn path(&self) -> &Path {
        &self.beside
    }
    /// Gives it its name, which must be free.
    ///
    /// # Errors
    /// EEXIST: something has that name. Others of renameat2.
    pub fn name(mut self, path: &Path) -> std::io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        renameat_with(CWD, &self.beside, CWD, path, RenameFlags::NOREPLACE)?;
        self.named = true;
        Ok(())
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if !self.named {
            let _ = std::fs::remove_file(&self.beside);
        }
    }
}

/// A mapping, readable and writable, unmapped on drop.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to no thread; shared access goes through atomics or through the
// methods whose callers guarantee exclusion.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new file of `len` zero bytes.
    ///
    /// # Errors
    /// EEXIST, ENOSPC, others of the system. No file is left that was not there.
    pub fn create_file(path: &Path, len: usize) -> std::io::Result<Mapping> {
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        // Allocated now: a full tmpfs must be an error here, not a SIGBUS later.
        file_memory::allocate(&file, 0, len as u64)
            .map_err(std::io::Error::from)
            .and_then(|()| Mapping::map(&file, len))
            .inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// An existing file, whole.
    ///
    /// # Errors
    /// As of `open_with_file`.
    pub fn open_file(path: &Path) -> std::io::Result<Mapping> {
        Mapping::open_with_file(path).map(|(mapping, _)| mapping)
    }

    /// An existing file, whole, and the file itself.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, or is empty.
    pub fn open_with_file(path: &Path) -> std::io::Result<(Mapping, File)> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let len = file.metadata()?.len() as usize;
        if len == 0 {
            return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "empty file"));
        }
        Ok((Mapping::map(&file, len)?, file))
    }

    /// A new file of `len` bytes of which nothing is allocated. Whoever writes to it, or reads it through
    /// the mapping, allocates first.
    ///
    /// # Errors
    /// EEXIST, others of the system. No file is left that was not there.
    pub fn create_sparse(path: &Path, len: usize) -> std::io::Result<(Mapping, File)> {
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(len as u64)
            .and_then(|()| Mapping::map(&file, len))
            .map(|mapping| (mapping, file))
            .inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// A file of `len` bytes of which nothing is allocated; one that is there is made longer if need be.
    /// Whoever writes to it allocates first.
    ///
    /// # Errors
    /// The file cannot be opened, made longer, or mapped.
    pub fn open_sparse(path: &Path, len: usize) -> std::io::Result<(Mapping, File)> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = file.open(path)?;
        if file.metadata()?.len() < len as u64 {
            file.set_len(len as u64)?;
        }
        Ok((Mapping::map(&file, len)?, file))
    }

    /// Private memory, page-aligned and zeroed.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn anonymous(len: usize) -> std::io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        Mapping::from_raw(base, len)
    }

    fn map(file: &File, len: usize) -> std::io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )?
        };
        Mapping::from_raw(base, len)
    }

    fn from_raw(base: *mut core::ffi::c_void, len: usize) -> std::io::Result<Mapping> {
        NonNull::new(base.cast())
            .map(|base| Mapping { base, len })
            .ok_or_else(|| std::io::Error::other("mmap answered null"))
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// # Panics
    /// If the range is outside the mapping.
    pub fn bytes_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: the range lies in the mapping, and &mut self excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), len) }
    }

    /// The word at byte offset `at`.
    ///
    /// # Panics
    /// If it is unaligned or outside the mapping.
    pub fn atomic(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len);
        // SAFETY: in bounds and aligned (the base is page-aligned); the memory is valid for self's
        // lifetime and this range is only ever accessed as atomics.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// # Safety
    /// The range lies in the mapping, and nobody writes to it while the slice lives.
    pub unsafe fn slice(&self, at: usize, len: usize) -> &[u8] {
        debug_assert!(at + len <= self.len);
        // SAFETY: as the caller guarantees.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// # Safety
    /// The range lies in the mapping, and nobody else accesses it while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "exclusion is the caller's, as stated above")]
    pub unsafe fn slice_mut(&self, at: usize, len: usize) -> &mut [u8] {
        debug_assert!(at + len <= self.len);
        // SAFETY: as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping, and no reference outlives self.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!("munmap of {} bytes: {e}", self.len);
        }
    }
}
