//! A swap file: space that was reserved at admission, read and written past the host's page cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ballast_units::{PAGE_SIZE, Pages, SlotId};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::backend::PageBuf;
use crate::file_memory;

/// Why a VM's swap files cannot be made, or not be opened. What was made for it before is removed again; what
/// was there stays.
#[allow(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The folder is missing, not writable, or its file system has no room for the reservation.
    #[error("swap file {} of {}: {source}", .path.display(), .size)]
    Create { path: PathBuf, size: Pages, source: std::io::Error },
    #[error("swap file {}: {source}", .path.display())]
    Open { path: PathBuf, source: std::io::Error },
    /// Of all locations together.
    #[error("swap files of {size}: there is room for {had} only")]
    NoRoom { size: Pages, had: Pages },
    #[error("swap files of {size}: more than {most}, all that a VM can have")]
    TooLarge { size: Pages, most: Pages },
}

/// One VM's swap file. Removed by `remove`, not on drop: it must outlive the manager.
#[derive(Debug)]
pub struct SwapFile {
    file: File,
    path: PathBuf,
    direct: bool,
    in_memory: bool,
    len: Pages,
    /// It was to be opened for writing, too.
    unwritable: Option<std::io::Error>,
}

impl SwapFile {
    /// Creates the file with all its blocks allocated: once a VM is admitted, its pages have a
    /// place to go (OSDI'02 s.6.2).
    ///
    /// # Errors
    /// The file exists, there is no room for all of it, or its file system cannot tell when writes have ended: no file is left then.
    pub fn create(path: &Path, len: Pages) -> Result<SwapFile, SwapError> {
        let fail = |source| SwapError::Create { path: path.to_owned(), size: len, source };
        let (file, direct) = open(path, Mode::Create).map_err(fail)?;
        let bytes = len.bytes().0;
        if bytes > 0
            && let Err(e) = file_memory::allocate(&file, 0, bytes)
        {
            let _ = std::fs::remove_file(path);
            return Err(fail(e.into()));
        }
        // There are none yet: whether it can be told.
        if let Err(e) = wait_for_writes(&file, len.min(Pages(1))) {
            let _ = std::fs::remove_file(path);
            return Err(fail(e));
        }
        Ok(SwapFile::of(file, path, (direct, None), len))
    }

    /// A file of `len` slots, or of as many as it has. One that has become shorter is not refused: what
    /// is missing cannot be read, and the rest can. Nor is one that can be read alone (its file system was mounted anew after
    /// errors): its pages are as good as ever.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: &Path, len: Option<Pages>) -> Result<SwapFile, SwapError> {
        let fail = |source| SwapError::Open { path: path.to_owned(), source };
        let (file, direct, unwritable) = match open(path, Mode::Write) {
            Ok((file, direct)) => (file, direct, None),
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EROFS | libc::EACCES | libc::EPERM)) =>
            {
                let (file, direct) = open(path, Mode::Read).map_err(fail)?;
                (file, direct, Some(e))
            }
            Err(e) => return Err(fail(e)),
        };
        let has = Pages(file.metadata().map_err(fail)?.len() / PAGE_SIZE as u64);
        let len = len.unwrap_or(has);
        // A manager that was killed may have left writes under way, and its successor could use their
        // slots at once.
        if let Err(e) = wait_for_writes(&file, len)
            && unwritable.is_none()
        {
            tracing::error!(
                "{}: {e}: one of a manager that was killed may hit a new page",
                path.display()
            );
        }
        Ok(SwapFile::of(file, path, (direct, unwritable), len))
    }

    fn of(
        file: File,
        path: &Path,
        (direct, unwritable): (bool, Option<std::io::Error>),
        len: Pages,
    ) -> SwapFile {
        let in_memory = file_memory::is_in_memory(&file).unwrap_or(false);
        SwapFile { file, path: path.to_owned(), direct, in_memory, len, unwritable }
    }

    /// Why it cannot be written to; None: it can.
    pub(super) fn unwritable(&self) -> Option<&std::io::Error> {
        self.unwritable.as_ref()
    }

    /// Slots that it was made with, or was said to have; it may be shorter by now.
    pub fn len(&self) -> Pages {
        self.len
    }
    /// Whether I/O passes by the host's page cache. Where the file system cannot (some network file systems), swapped
    /// pages may stay in host memory outside the budget.
    pub fn is_direct(&self) -> bool {
        self.direct
    }
    /// Whether it is on a tmpfs or a ramfs: what is swapped there stays in host memory, outside the budget.
    pub fn is_in_memory(&self) -> bool {
        self.in_memory
    }
    /// As it was made or opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// For the ring: I/O on it is of whole pages, from memory that is aligned to pages, if `is_direct`.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Reads one slot, waiting for it. For recovery and tests; faults go through a ring.
    ///
    /// # Errors
    /// What the disk said, or that the file has become shorter.
    pub fn read(&self, slot: SlotId, into: &mut PageBuf) -> std::io::Result<()> {
        if self.direct {
            let mut aligned = crate::mapped_file::Mapping::anonymous(PAGE_SIZE)?;
            self.file.read_exact_at(aligned.bytes_mut(0, PAGE_SIZE), slot.offset())?;
            into.copy_from_slice(aligned.bytes_mut(0, PAGE_SIZE));
            return Ok(());
        }
        self.file.read_exact_at(into, slot.offset())
    }
}

/// Returns when writes that others began to the file of `len` have ended. File systems wait for direct writes before they allocate.
///
/// # Errors
/// This one does not.
fn wait_for_writes(file: &File, len: Pages) -> std::io::Result<()> {
    if len.is_zero() {
        return Ok(());
    }
    wait_on(rustix::fs::fstatfs(file)?.f_type, file, len)
}

/// Of file systems that statfs tells apart. By the kernel's code an allocation is sent to the servers of the first three, whatever else
/// is on its way there; NFS has none that keeps sizes.
const FUSE: i64 = 0x6573_5546;
const CIFS: i64 = 0xff53_4d42;
const SMB2: i64 = 0xfe53_4d42;
const NFS: i64 = 0x6969;

fn cannot_tell() -> std::io::Error {
    let why = "its file system cannot tell when writes have ended";
    std::io::Error::new(std::io::ErrorKind::Unsupported, why)
}

/// Whether swap files can be made in `folder`, by the kind of its file system; of others the first file tells.
///
/// # Errors
/// They cannot (NFS, SMB, FUSE), or it is not known.
pub fn check_folder(folder: &Path) -> std::io::Result<()> {
    check_kind(rustix::fs::statfs(folder)?.f_type)
}

fn check_kind(kind: i64) -> std::io::Result<()> {
    if [FUSE, CIFS, SMB2, NFS].contains(&kind) { Err(cannot_tell()) } else { Ok(()) }
}

/// The same as `wait_for_writes`, on a file system of the `kind` that statfs tells.
fn wait_on(kind: i64, file: &File, len: Pages) -> std::io::Result<()> {
    let done = if check_kind(kind).is_err() {
        Err(Errno::OPNOTSUPP)
    } else {
        let flags = FallocateFlags::KEEP_SIZE;
        retry_on_intr(|| rustix::fs::fallocate(file, flags, 0, len.bytes().0))
    };
    match done {
        // XFS asks for room again for what has it, once it has waited.
        Ok(()) | Err(Errno::NOSPC | Errno::DQUOT) => Ok(()),
        Err(Errno::OPNOTSUPP) => Err(cannot_tell()),
        Err(e) => Err(e.into()),
    }
}

/// What a file is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Create,
    Write,
    Read,
}

fn open(path: &Path, mode: Mode) -> std::io::Result<(File, bool)> {
    let create = mode == Mode::Create;
    let mut options = OpenOptions::new();
    options.read(true).write(mode != Mode::Read).create_new(create).mode(0o600);
    // Whoever could put a link there could have a guest's pages written elsewhere.
    let [direct, no_link] = [OFlags::DIRECT, OFlags::NOFOLLOW].map(|flag| flag.bits() as i32);
    options.custom_flags(no_link);
    match options.clone().custom_flags(direct | no_link).open(path) {
        Ok(file) => Ok((file, true)),
        // tmpfs before Linux 6.6, and some network file systems: no O_DIRECT.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            if create {
                // An O_DIRECT open that fails may have made the file.
                let _ = std::fs::remove_file(path);
            }
            Ok((options.open(path)?, false))
        }
        Err(e) => Err(e),
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn one_on_a_file_system_that_can_be_read_alone_is_read() {
        use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let none = MountFlags::empty();
        if let Err(e) = mount("tmpfs", dir.path(), "tmpfs", none, None) {
            let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
            assert!(required.as_deref() != Ok("1"), "mounting a tmpfs: {e}");
            eprintln!("SKIPPED: mounting a tmpfs: {e}");
            return;
        }
        let path = dir.path().join("a.swap");
        let made = SwapFile::create(&path, Pages(2)).unwrap();
        assert!(made.unwritable().is_none());
        let mut page: PageBuf = [7; PAGE_SIZE];
        made.file().write_all_at(&page, SlotId(1).offset()).unwrap_or_else(|_| {
            let plain = OpenOptions::new().write(true).open(&path).unwrap();
            plain.write_all_at(&page, SlotId(1).offset()).unwrap();
        });
        drop(made);
        mount_remount(dir.path(), MountFlags::RDONLY, "").unwrap();
        let opened = SwapFile::open(&path, Some(Pages(2))).unwrap();
        page.fill(0);
        let read = opened.read(SlotId(1), &mut page);
        let why = opened.unwritable().map(std::io::Error::raw_os_error);
        drop(opened);
        let location = crate::swap::Location::new(dir.path(), 0);
        let place = crate::swap::Place {
            path: path.clone(),
            location: location.clone(),
            len: Some(Pages(2)),
        };
        let space = crate::swap::SwapSpace::open(&[place]).map(drop);
        unmount(dir.path(), UnmountFlags::DETACH).unwrap();
        read.unwrap();
        space.unwrap();
        // Nothing is written there any more, and no other's file is made.
        assert!(location.is_failed() && !location.is_tried());
        assert_eq!((why, page), (Some(Some(libc::EROFS)), [7; PAGE_SIZE]));
    }

    #[test]
    fn a_link_is_not_followed() {
        for folder in ["/var/tmp", "/dev/shm"] {
            let dir = tempfile::tempdir_in(folder).unwrap();
            let [file, link] = ["file", "link"].map(|name| dir.path().join(name));
            std::fs::write(&file, [0; PAGE_SIZE]).unwrap();
            std::os::unix::fs::symlink(&file, &link).unwrap();
            SwapFile::open(&file, None).unwrap();
            assert!(SwapFile::open(&link, None).is_err());
            assert!(SwapFile::create(&link, Pages(1)).is_err());
        }
    }

    #[test]
    fn space_is_allocated_at_creation() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.swap");
        let swap = SwapFile::create(&path, Pages(256)).unwrap();
        assert!(swap.file().metadata().unwrap().blocks() * 512 >= 1 << 20);
        assert_eq!(SwapFile::open(&path, None).unwrap().len(), Pages(256));
        assert!(SwapFile::create(&path, Pages(1)).is_err(), "never overwritten");
        wait_for_writes(swap.file(), swap.len()).unwrap();
        // A file of /proc takes no allocation, as one of NFS takes none that keeps its size.
        let comm = OpenOptions::new().write(true).open("/proc/self/comm").unwrap();
        let kind = |waited: std::io::Result<()>| waited.map_err(|e| e.kind());
        let refused = Err(std::io::ErrorKind::Unsupported);
        assert_eq!(kind(wait_for_writes(&comm, Pages(1))), refused);
        // What is sent to a server is not waited for: FUSE, SMB.
        for sent in [FUSE, CIFS, SMB2] {
            assert_eq!(kind(wait_on(sent, swap.file(), Pages(1))), refused, "{sent:x}");
            assert_eq!(kind(check_kind(sent)), refused, "{sent:x}");
        }
        const EXT4: i64 = 0xef53;
        wait_on(EXT4, swap.file(), Pages(1)).unwrap();
        check_kind(EXT4).unwrap();
        check_folder(dir.path()).unwrap();
        assert!(check_folder(&path.join("none")).is_err());
    }

    /// An allocation, by which it waits for writes, is seen where there was none.
    #[test]
    fn writes_are_waited_for_in_all_of_a_file_that_is_opened_however_short_it_is_by_now() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        for len in [1_u64 << 20, 0] {
            let path = dir.path().join(format!("{len}.swap"));
            File::create(&path).unwrap().set_len(len).unwrap();
            let swap = SwapFile::open(&path, Some(Pages(256))).unwrap();
            let meta = swap.file().metadata().unwrap();
            assert!(meta.blocks() * 512 >= 1 << 20, "{len}: {} blocks", meta.blocks());
            assert_eq!((meta.len(), swap.len()), (len, Pages(256)));
        }
    }

    #[test]
    fn a_reservation_that_does_not_fit_is_refused_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.swap");
        let error = SwapFile::create(&path, Pages(1 << 40)).unwrap_err();
        assert!(error.to_string().contains("a.swap"), "{error}");
        assert!(!path.exists());
    }
}
