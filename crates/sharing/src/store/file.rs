//! The file that holds a domain's common pages. It lies on a tmpfs, sparse, and outlives the
//! manager. The tmpfs must not be mounted with large pages (huge=never, the default): with
//! within_size the first page written takes 2 MiB (seen with Linux 6.18), which nobody booked.
//!
//! The manager reads and writes it with `pread` and `pwrite` and never maps it: whoever gets at the
//! file and truncates it must not be able to kill the manager. VMMs get a descriptor that can only
//! be read from.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ballast_units::{Bytes, PAGE_SIZE, Pages};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::ids::{StorePage, StoreRun};

/// The file grows by this much. It is sparse, but a VMM may read all of it, and a hole that is read has memory.
const STEP: Pages = Pages::from_mib(4);

/// What is wrong with a store file. What was asked for did not happen; pages that were in the
/// store are as they were.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum StoreError {
    /// The host's: a full tmpfs (`StorageFull`), no right to the folder, and the like.
    #[error("store {}: {doing}: {source}", .path.display())]
    Io { path: PathBuf, doing: &'static str, source: std::io::Error },
    #[error("store {} is not a regular file", .path.display())]
    NotAFile { path: PathBuf },
    /// Somebody truncated the file, or the page was never written.
    #[error("store {} ends before {run}", .path.display())]
    TooShort { path: PathBuf, run: StoreRun },
    /// Somebody put another file in its place. Descriptors of the old one are still good.
    #[error("store {} is not the file that was opened", .path.display())]
    Replaced { path: PathBuf },
    #[error("store {}: the descriptor for VMMs could be written to", .path.display())]
    Writable { path: PathBuf },
}

/// The store file of a domain. All methods may be called from any thread; that nobody writes a page
/// while it is read, or is not its owner, is seen to by [`super::StorePages`] and the share table.
pub struct StoreFile {
    file: File,
    path: PathBuf,
    /// The file's length. Held while it is extended, so that it never becomes shorter.
    len: Mutex<Pages>,
}

impl StoreFile {
    /// A new, empty store that only its owner can open.
    ///
    /// # Errors
    /// [`StoreError::Io`], with `AlreadyExists` if there is anything at `path`.
    pub fn create(path: &Path) -> Result<StoreFile, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = options.open(path).map_err(|source| io(path, "creating it", source))?;
        Ok(StoreFile { file, path: path.to_owned(), len: Mutex::new(Pages::ZERO) })
    }

    /// The store of VMs that run already. Which pages are in use is for their pmaps to say.
    ///
    /// # Errors
    /// [`StoreError::Io`], also for a symbolic link, which is not followed; [`StoreError::NotAFile`].
    pub fn open(path: &Path) -> Result<StoreFile, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(open_flags());
        let file = options.open(path).map_err(|source| io(path, "opening it", source))?;
        let meta = file.metadata().map_err(|source| io(path, "its state", source))?;
        if !meta.is_file() {
            return Err(StoreError::NotAFile { path: path.to_owned() });
        }
        let len = Mutex::new(Bytes(meta.len()).pages());
        Ok(StoreFile { file, path: path.to_owned(), len })
    }

    /// Where it was made or opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes consecutive pages, as many as `bytes` holds whole, mostly with one system call. They lie within the
    /// file's length from then on.
    ///
    /// # Errors
    /// [`StoreError::Io`], with `StorageFull` if the tmpfs is; [`StoreError::TooShort`] beyond the largest store. The
    /// pages' contents are unknown then.
    pub fn write_run(&self, first: StorePage, bytes: &[u8]) -> Result<(), StoreError> {
        debug_assert!(bytes.len().is_multiple_of(PAGE_SIZE), "{} bytes", bytes.len());
        let pages = Bytes(bytes.len() as u64).pages();
        match StoreRun::new(first, pages.0) {
            Some(run) => {
                self.reach(run)?;
                self.file
                    .write_all_at(&bytes[..pages.bytes().0 as usize], first.offset())
                    .map_err(|source| self.io("writing pages", source))
            }
            None if pages.is_zero() => Ok(()),
            None => Err(StoreError::TooShort { path: self.path.clone(), run: first.into() }),
        }
    }

    /// Reads a page: zeros where it was punched.
    ///
    /// # Errors
    /// [`StoreError::TooShort`], [`StoreError::Io`]. What `into` holds then is nothing to go by.
    pub fn read(&self, page: StorePage, into: &mut [u8; PAGE_SIZE]) -> Result<(), StoreError> {
        self.read_at(page.into(), into)
    }

    /// Reads consecutive pages, as many as `into` holds whole, mostly with one system call.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub fn read_run(&self, first: StorePage, into: &mut [u8]) -> Result<(), StoreError> {
        debug_assert!(into.len().is_multiple_of(PAGE_SIZE), "{} bytes", into.len());
        let pages = Bytes(into.len() as u64).pages();
        match StoreRun::new(first, pages.0) {
            Some(run) => self.read_at(run, &mut into[..pages.bytes().0 as usize]),
            None if pages.is_zero() => Ok(()),
            None => Err(StoreError::TooShort { path: self.path.clone(), run: first.into() }),
        }
    }

    fn read_at(&self, run: StoreRun, into: &mut [u8]) -> Result<(), StoreError> {
        self.file.read_exact_at(into, run.first().offset()).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => StoreError::TooShort { path: self.path.clone(), run },
            _ => self.io("reading a page", source),
        })
    }

    /// Gives the memory of pages back. They read as zeros until they are written again, also by a
    /// VMM that still maps them.
    ///
    /// # Errors
    /// [`StoreError::Io`]: some of the memory may be there still.
    pub fn punch(&self, run: StoreRun) -> Result<(), StoreError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, end) = run.offsets();
        loop {
            match rustix::fs::fallocate(&self.file, flags, start, end - start) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(self.io("punching pages", e.into())),
            }
        }
    }

    /// Makes sure that a run lies within the file's length, as VMMs want of what they map. The file grows
    /// by 4 MiB at a time, and never shrinks.
    ///
    /// # Errors
    /// [`StoreError::Io`]: the length is as it was.
    pub fn reach(&self, run: StoreRun) -> Result<(), StoreError> {
        let end = Pages(run.first().get().into()) + run.pages();
        let mut len = self.len.lock().unwrap_or_else(PoisonError::into_inner);
        if end <= *len {
            return Ok(());
        }
        let to = Pages(end.0.next_multiple_of(STEP.0));
        rustix::fs::ftruncate(&self.file, to.bytes().0)
            .map_err(|e| self.io("extending it", e.into()))?;
        *len = to;
        Ok(())
    }

    /// A descriptor for VMMs, which may map it privately and read it, and cannot write it.
    ///
    /// # Errors
    /// [`StoreError::Replaced`], [`StoreError::Writable`], [`StoreError::Io`].
    pub fn read_only(&self) -> Result<OwnedFd, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(open_flags());
        let file =
            options.open(&self.path).map_err(|source| self.io("opening it for VMMs", source))?;
        let identity = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino()));
        let ours = identity(&self.file).map_err(|source| self.io("its state", source))?;
        if identity(&file).map_err(|source| self.io("its state", source))? != ours {
            return Err(StoreError::Replaced { path: self.path.clone() });
        }
        let flags = rustix::fs::fcntl_getfl(&file)
            .map_err(|e| self.io("the flags of its descriptor", e.into()))?;
        if flags & OFlags::RWMODE != OFlags::RDONLY {
            return Err(StoreError::Writable { path: self.path.clone() });
        }
        Ok(file.into())
    }

    /// Memory that the store takes now, by the kernel's count.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn measured(&self) -> Result<Bytes, StoreError> {
        let meta = self.file.metadata().map_err(|source| self.io("its state", source))?;
        Ok(Bytes(meta.blocks() * 512))
    }

    /// Deletes the file. What VMMs still map of it stays until they are gone.
    ///
    /// # Errors
    /// [`StoreError::Io`]: it is there still, or was gone before.
    pub fn remove(self) -> Result<(), StoreError> {
        std::fs::remove_file(&self.path).map_err(|source| self.io("deleting it", source))
    }

    fn io(&self, doing: &'static str, source: std::io::Error) -> StoreError {
        io(&self.path, doing, source)
    }
}

/// Never through a symbolic link, and never waiting for the other end of a pipe.
fn open_flags() -> i32 {
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32
}

fn io(path: &Path, doing: &'static str, source: std::io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), doing, source }
}
