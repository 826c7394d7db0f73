//! The store file on the kernel's tmpfs: what VMMs and the manager see of it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use ballast_sharing::{StoreError, StoreFile, StorePage, StoreRun};
use ballast_units::{Bytes, PAGE_SIZE, Pages};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// A folder on a tmpfs where there is one: only there is memory given back at once.
fn folder() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() }.unwrap()
}

fn store() -> (tempfile::TempDir, PathBuf, StoreFile) {
    let dir = folder();
    let path = dir.path().join("store");
    let store = StoreFile::create(&path).unwrap();
    (dir, path, store)
}

fn page(n: u64) -> StorePage {
    StorePage::new(n).unwrap()
}
fn run(first: u64, pages: u64) -> StoreRun {
    StoreRun::new(page(first), pages).unwrap()
}
fn bytes(n: u64) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|i| (n as usize * 31 + i / 7) as u8 | 1)
}

#[test]
fn pages_are_read_as_they_were_written_alone_and_in_runs() {
    let (_dir, path, store) = store();
    store.write_run(page(3), &[bytes(3), bytes(4), bytes(5)].concat()).unwrap();
    store.write_run(page(100_000), &bytes(100_000)).unwrap();
    store.write_run(page(1), &[]).unwrap();
    let mut one = [0; PAGE_SIZE];
    store.read(page(100_000), &mut one).unwrap();
    assert_eq!(one, bytes(100_000));
    let mut three = vec![0; 3 * PAGE_SIZE];
    store.read_run(page(3), &mut three).unwrap();
    assert_eq!(three, [bytes(3), bytes(4), bytes(5)].concat());
    // The same file after the manager was restarted.
    drop(store);
    let store = StoreFile::open(&path).unwrap();
    store.read(page(4), &mut one).unwrap();
    assert_eq!(one, bytes(4));
    store.write_run(page(6), &bytes(6)).unwrap();
    store.read(page(100_000), &mut one).unwrap();
    assert_eq!(one, bytes(100_000), "writing low pages does not shorten the file");
    store.remove().unwrap();
    assert!(!path.exists());
}

#[test]
fn the_file_is_its_owners_sparse_and_longer_than_what_is_written() {
    let (_dir, path, store) = store();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    store.write_run(page(70_000), &bytes(1)).unwrap();
    let len = path.metadata().unwrap().len();
    assert!(len >= page(70_001).offset());
    assert!(len.is_multiple_of(Bytes::from_mib(4).0), "{len}: extended in steps");
    assert!(store.measured().unwrap() < Pages(64).bytes(), "{}", store.measured().unwrap());
    store.reach(run(70_000, 1000)).unwrap();
    store.reach(run(0, 1)).unwrap();
    assert!(path.metadata().unwrap().len() >= page(71_000).offset());
    assert!(matches!(StoreFile::create(&path), Err(StoreError::Io { .. })), "never overwritten");
}

/// The file is extended by many threads at once, and never becomes shorter.
#[test]
fn threads_that_extend_the_file_do_not_cut_each_others_pages_off() {
    let (_dir, _path, store) = store();
    let step = Bytes::from_mib(4).pages().0;
    std::thread::scope(|scope| {
        for t in 0..8 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..40 {
                    let at = page(((n * 7 + t) % 40) * step + t);
                    store.write_run(at, &bytes(at.get().into())).unwrap();
                }
            });
        }
    });
    let mut found = [0; PAGE_SIZE];
    for n in (0..40).flat_map(|n| (0..8).map(move |t| n * step + t)) {
        store.read(page(n), &mut found).unwrap();
        assert_eq!(found, bytes(n), "page {n}");
    }
}

#[test]
fn punched_pages_read_zeros_and_their_memory_is_free() {
    let (_dir, _path, store) = store();
    let before = store.measured().unwrap();
    for n in 0..1000 {
        store.write_run(page(n), &bytes(n)).unwrap();
    }
    let full = store.measured().unwrap();
    assert_eq!(full - before, Pages(1000).bytes());
    store.punch(page(10).into()).unwrap();
    store.punch(run(500, 300)).unwrap();
    assert_eq!(store.measured().unwrap() - before, Pages(699).bytes());
    let mut found = [1; PAGE_SIZE];
    for n in [10, 500, 799] {
        store.read(page(n), &mut found).unwrap();
        assert_eq!(found, [0; PAGE_SIZE], "page {n}");
    }
    for n in [9, 11, 499, 800] {
        store.read(page(n), &mut found).unwrap();
        assert_eq!(found, bytes(n), "page {n}");
    }
    store.write_run(page(10), &bytes(10)).unwrap();
    store.read(page(10), &mut found).unwrap();
    assert_eq!(found, bytes(10));
    store.punch(run(1 << 30, 1 << 20)).unwrap();
}

fn map(fd: &OwnedFd, protection: ProtFlags, flags: MapFlags) -> rustix::io::Result<*mut u8> {
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
    let base = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), PAGE_SIZE, protection, flags, fd.as_fd(), 0)
    };
    base.map(<*mut _>::cast)
}

fn unmap(base: *mut u8) {
    // SAFETY: `map` returned it, and nothing refers to it any more.
    unsafe { rustix::mm::munmap(base.cast(), PAGE_SIZE) }.unwrap();
}

#[test]
fn the_descriptor_of_vmms_cannot_change_the_store() {
    let (_dir, path, store) = store();
    store.write_run(page(0), &bytes(0)).unwrap();
    let fd = store.read_only().unwrap();
    assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::BADF));
    assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::INVAL));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::BADF));
    let write = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(&fd, write, MapFlags::SHARED).err(), Some(Errno::ACCESS));
    // A shared mapping that is only readable does not become writable either.
    let base = map(&fd, ProtFlags::READ, MapFlags::SHARED).unwrap();
    // SAFETY: the page is this test's, and only its protection is asked to change.
    let made =
        unsafe { rustix::mm::mprotect(base.cast(), PAGE_SIZE, rustix::mm::MprotectFlags::WRITE) };
    assert_eq!(made, Err(Errno::ACCESS));
    unmap(base);
    // What VMMs do: a private mapping, whose writes are the VMM's own.
    let base = map(&fd, write, MapFlags::PRIVATE).unwrap();
    // SAFETY: a page that is mapped, readable and writable, of this test alone.
    let (before, after) = unsafe {
        let before = base.read();
        base.write_volatile(!before);
        (before, base.read())
    };
    assert_eq!((before, after), (bytes(0)[0], !bytes(0)[0]));
    unmap(base);
    let mut found = [0; PAGE_SIZE];
    store.read(page(0), &mut found).unwrap();
    assert_eq!(found, bytes(0));
    // The descriptor outlives the name, which may come to mean another file.
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(store.read_only(), Err(StoreError::Io { .. })));
    std::fs::File::create(&path).unwrap().write_all(b"another").unwrap();
    assert!(matches!(store.read_only(), Err(StoreError::Replaced { .. })));
    std::fs::remove_file(&path).unwrap();
    symlink("/dev/null", &path).unwrap();
    assert!(matches!(store.read_only(), Err(StoreError::Io { .. })), "links are not followed");
    let file = std::fs::File::from(fd);
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, bytes(0));
}

#[test]
fn a_truncated_file_is_an_error_of_each_page_and_harms_nobody() {
    let (_dir, path, store) = store();
    store.write_run(page(9), &bytes(9)).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(9 * 4096).unwrap();
    let mut found = [0; PAGE_SIZE];
    let error = store.read(page(9), &mut found).unwrap_err();
    assert!(matches!(error, StoreError::TooShort { run, .. } if run == page(9).into()), "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    let mut both = vec![0; 2 * PAGE_SIZE];
    assert!(matches!(store.read_run(page(8), &mut both), Err(StoreError::TooShort { .. })));
    store.read(page(8), &mut found).unwrap();
    store.write_run(page(9), &bytes(1)).unwrap();
    store.read(page(9), &mut found).unwrap();
    assert_eq!(found, bytes(1));
}

#[test]
fn only_a_regular_file_is_opened() {
    let dir = folder();
    let missing = StoreFile::open(&dir.path().join("none")).err().unwrap();
    assert!(
        matches!(missing, StoreError::Io { source, .. } if source.kind() == ErrorKind::NotFound)
    );
    let path = dir.path().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert!(matches!(StoreFile::open(&path), Err(StoreError::NotAFile { .. })));
    let link = dir.path().join("link");
    drop(StoreFile::create(&dir.path().join("store")).unwrap());
    symlink(dir.path().join("store"), &link).unwrap();
    assert!(matches!(StoreFile::open(&link), Err(StoreError::Io { .. })));
}
