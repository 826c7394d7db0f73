//! What /proc tells, asserted against the running kernel: on mappings of the test itself.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use ballast_uffd::procmap::{Maps, Pagemap, Shown, sees_places};
use ballast_uffd::*;
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::{CapabilitySet, CapabilitySets};

const PAGE: u64 = PAGE_SIZE as u64;

/// A file of pages, each of which begins with its number.
fn file(pages: u64) -> File {
    let file = File::from(memfd_create("store", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(pages * PAGE).unwrap();
    for page in 0..pages {
        file.write_all_at(&page.to_ne_bytes(), page * PAGE).unwrap();
    }
    file
}

/// A mapping that is gone with the test.
struct Mapping {
    base: u64,
    pages: u64,
}

impl Mapping {
    fn new(file: &File, flags: MapFlags, pages: u64) -> Mapping {
        // SAFETY: a new mapping, reached through volatile accesses only.
        let base = unsafe { map(std::ptr::null_mut(), file, flags, 0, pages) };
        Mapping { base, pages }
    }

    fn at(&self, page: u64) -> HostAddr {
        HostAddr(self.base + page * PAGE)
    }

    fn end(&self) -> HostAddr {
        self.at(self.pages)
    }

    fn read(&self, page: u64) -> u64 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, as just checked.
        unsafe { (self.at(page).0 as *const u64).read_volatile() }
    }

    fn write(&self, page: u64, value: u64) {
        assert!(page < self.pages);
        // SAFETY: inside the mapping, as just checked.
        unsafe { (self.at(page).0 as *mut u64).write_volatile(value) }
    }

    /// Maps something else over a part.
    fn replace(&self, page: u64, file: &File, flags: MapFlags, offset: u64, pages: u64) {
        assert!(page + pages <= self.pages);
        let flags = flags | MapFlags::FIXED;
        // SAFETY: inside our mapping, of which there are no references.
        unsafe { map(self.at(page).0 as *mut c_void, file, flags, offset, pages) };
    }

    fn shown(&self) -> Vec<Shown> {
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let entries = pagemap.entries(self.at(0), Pages(self.pages)).unwrap();
        entries.iter().map(|entry| entry.shown()).collect()
    }

    fn copies(&self) -> Vec<bool> {
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        pagemap.copies(self.at(0), Pages(self.pages)).unwrap()
    }

    /// (inode, offset in pages, length in pages, shared) of each part.
    fn parts(&self) -> Vec<(u64, u64, u64, bool)> {
        let maps = Maps::read(std::process::id(), self.at(0)..self.end()).unwrap();
        let part = |p: &procmap::Mapped| {
            (p.inode, p.offset / PAGE, (p.end.0 - p.start.0) / PAGE, p.shared)
        };
        maps.parts().iter().map(part).collect()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by us, and not used after.
        unsafe { munmap(self.base as *mut c_void, (self.pages * PAGE) as usize) }.unwrap();
    }
}

/// # Safety
/// As of mmap(2).
unsafe fn map(at: *mut c_void, file: &File, flags: MapFlags, offset: u64, pages: u64) -> u64 {
    let (rw, len) = (ProtFlags::READ | ProtFlags::WRITE, (pages * PAGE) as usize);
    // SAFETY: the caller's promise.
    unsafe { mmap(at, len, rw, flags, file, offset * PAGE) }.unwrap() as u64
}

#[test]
fn a_private_mapping_shows_the_file_until_it_is_written() {
    let store = file(4);
    let private = Mapping::new(&store, MapFlags::PRIVATE, 4);
    // Neighbours may be mapped along with a page that is read: not what this asks for.
    assert_eq!(private.shown(), [Shown::Nothing; 4]);
    private.write(2, 99);
    assert_eq!(private.read(0), 0);
    assert_eq!(private.shown()[0], Shown::File);
    assert_eq!(private.shown()[2], Shown::Copy);
    assert_eq!(private.copies(), [false, false, true, false]);

    let shared = Mapping::new(&store, MapFlags::SHARED, 4);
    shared.write(1, 98);
    assert_eq!(shared.shown()[1], Shown::File);
    assert_eq!(shared.copies(), [false; 4]);
    assert_eq!(private.read(1), 98, "not written there: still the file's");
    assert_eq!(private.read(2), 99);
}

#[test]
fn a_mapping_larger_than_one_read_of_pagemap_is_told_whole() {
    let pages = 10_000;
    let store = File::from(memfd_create("large", MemfdFlags::CLOEXEC).unwrap());
    store.set_len(pages * PAGE).unwrap();
    let private = Mapping::new(&store, MapFlags::PRIVATE, pages);
    let written = [0, 4095, 4096, 8191, 8192, 9999];
    for page in written {
        private.write(page, 1);
    }
    let copies = private.copies();
    assert_eq!(copies.len() as u64, pages);
    for (page, copy) in copies.iter().enumerate() {
        assert_eq!(*copy, written.contains(&(page as u64)), "{page}");
    }
}

/// Pages 0 untouched, 1 read, 2 written, then all write-protected.
fn protected() -> Option<(Mapping, File, Uffd)> {
    let device = match File::options().read(true).write(true).open(DEVICE_PATH) {
        Ok(device) => device,
        Err(e) => {
            let required = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
            assert!(!required, "must not be skipped here: {DEVICE_PATH}: {e}");
            eprintln!("SKIPPED: {DEVICE_PATH}: {e}");
            return None;
        }
    };
    let uffd = Uffd::from_device(device.as_fd()).unwrap();
    uffd.handshake(Features::PAGEFAULT_FLAG_WP | Features::WP_HUGETLBFS_SHMEM).unwrap();
    let store = file(3);
    let private = Mapping::new(&store, MapFlags::PRIVATE, 3);
    // SAFETY: a mapping made for this, reached by its address alone.
    unsafe { uffd.register(private.at(0), Bytes(3 * PAGE), Modes::WP) }.unwrap();
    private.read(1);
    private.write(2, 99);
    uffd.protect(private.at(0), Bytes(3 * PAGE)).unwrap();
    Some((private, store, uffd))
}

#[test]
fn write_protection_of_a_page_that_is_not_there_is_no_copy() {
    let Some((private, _store, _uffd)) = protected() else { return };
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let entries = pagemap.entries(private.at(0), Pages(3)).unwrap();
    assert!(entries.iter().all(|entry| entry.is_protected()), "{entries:?}");
    // The kernel counts such a page as swapped, and not as a file's: exactly as a copy in its swap.
    assert_eq!(private.shown(), [Shown::Nothing, Shown::File, Shown::Copy]);
    assert_eq!(private.copies(), [false, false, true]);
}

#[test]
fn without_the_right_to_see_where_pages_are_no_copy_is_overlooked() {
    let Some((private, _store, _uffd)) = protected() else { return };
    assert!(sees_places());
    // Capabilities are a thread's own, and those that count are those of who opened the file.
    std::thread::spawn(move || {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, none).unwrap();
        assert!(!sees_places());
        assert_eq!(private.shown(), [Shown::Unclear, Shown::File, Shown::Copy]);
        assert_eq!(private.copies(), [true, false, true]);
    })
    .join()
    .unwrap();
}

#[test]
fn what_is_mapped_over_a_file_is_told_with_its_own_file_and_offset() {
    let (ram, store) = (file(8), file(8));
    let mapping = Mapping::new(&ram, MapFlags::SHARED, 8);
    let (home, shared) = (ram.metadata().unwrap(), store.metadata().unwrap());
    assert_eq!(mapping.parts(), [(home.ino(), 0, 8, true)]);
    mapping.replace(2, &store, MapFlags::PRIVATE, 5, 1);
    mapping.replace(4, &store, MapFlags::PRIVATE, 0, 2);
    assert_eq!(
        mapping.parts(),
        [
            (home.ino(), 0, 2, true),
            (shared.ino(), 5, 1, false),
            (home.ino(), 3, 1, true),
            (shared.ino(), 0, 2, false),
            (home.ino(), 6, 2, true),
        ]
    );
    let maps = Maps::read(std::process::id(), mapping.at(1)..mapping.at(5)).unwrap();
    assert_eq!(maps.parts().len(), 4, "cut to what was asked for");
    let part = maps.at(mapping.at(4)).unwrap();
    assert_eq!((part.dev, part.inode), (shared.dev(), shared.ino()));
    assert_eq!(maps.at(mapping.at(5)), None);
    // Home again, it is one mapping as before.
    mapping.replace(2, &ram, MapFlags::SHARED, 2, 1);
    mapping.replace(4, &ram, MapFlags::SHARED, 4, 2);
    assert_eq!(mapping.parts(), [(home.ino(), 0, 8, true)]);
}

/// Whatever another thread does to them meanwhile: parts come in order, without overlaps, and what
/// was never changed is told right.
#[test]
fn mappings_that_change_while_they_are_read_are_told_consistently() {
    const PAGES: u64 = 4000;
    let (ram, store) = (file(PAGES), file(1));
    let mapping = Mapping::new(&ram, MapFlags::SHARED, PAGES);
    let inodes = [ram.metadata().unwrap().ino(), store.metadata().unwrap().ino()];
    let range = mapping.at(0)..mapping.end();
    let reader = std::thread::spawn(move || {
        let mut seen = 0;
        // Until the other thread has come to change something: it may get no processor for a while.
        for read in 0..1_000_000 {
            if read >= 200 && seen > 2 {
                break;
            }
            let maps = Maps::read(std::process::id(), range.clone()).unwrap();
            let mut at = range.start;
            for part in maps.parts() {
                assert_eq!(part.start, at, "without gaps: something is always mapped");
                assert!(part.end > part.start);
                at = part.end;
                let page = (part.start.0 - range.start.0) / PAGE;
                let offset = if part.inode == inodes[0] { page } else { 0 };
                assert_eq!(part.offset, offset * PAGE, "{part:?}");
                assert!(inodes.contains(&part.inode));
            }
            assert_eq!(at, range.end);
            seen = seen.max(maps.parts().len());
        }
        seen
    });
    let mut round = 0;
    while !reader.is_finished() {
        for page in (0..PAGES).step_by(2) {
            match round % 2 {
                0 => mapping.replace(page, &store, MapFlags::PRIVATE, 0, 1),
                _ => mapping.replace(page, &ram, MapFlags::SHARED, page, 1),
            }
        }
        round += 1;
    }
    assert!(reader.join().unwrap() > 2, "it was changing");
}
