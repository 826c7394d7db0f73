//! A file to map pages from, and the operations that do.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::File;
use std::io::Write;

use ballast_shim_proto::{Op, OpKind};
use ballast_units::Bytes;
use rustix::fs::{FallocateFlags, fallocate};

use super::{Managed, PAGE, Puppet};

pub const STORE: u64 = 64;
/// The first word of the store's first page; the next page has the next.
pub const STAMP: u64 = 900;

/// A file of pages, read-only and of shmem, filled with words that count on from page to page.
pub fn store() -> (tempfile::TempDir, File) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("store");
    let mut file = File::create(&path).unwrap();
    for page in 0..STORE {
        file.write_all(&content(STAMP + page)).unwrap();
    }
    let store = File::open(&path).unwrap();
    (dir, store)
}

pub fn content(word: u64) -> Vec<u8> {
    (0..PAGE / 8).flat_map(|i| (word + (i << 32)).to_le_bytes()).collect()
}

pub fn op(vm: &Managed, kind: OpKind, page: u64, pages: u64) -> Op {
    Op { kind, addr: vm.addr(page), len: Bytes(pages * PAGE), file_offset: 0, fd_index: 0 }
}

pub fn map_store(vm: &Managed, page: u64, pages: u64, store_page: u64) -> Op {
    Op { file_offset: store_page * PAGE, ..op(vm, OpKind::MapStore, page, pages) }
}

pub fn map_home(vm: &Managed, page: u64, pages: u64) -> Op {
    op(vm, OpKind::MapHome, page, pages)
}

pub fn map_again(vm: &Managed, page: u64, pages: u64) -> Op {
    op(vm, OpKind::MapAgain, page, pages)
}

/// The store once more, by a descriptor from which nothing can be mapped: what fails while it is done, and no sooner.
pub fn unreadable(dir: &tempfile::TempDir) -> File {
    File::options().write(true).open(dir.path().join("store")).unwrap()
}

/// Pages that were written, so that they are in the RAM file.
pub fn resident(puppet: &mut Puppet, pages: std::ops::Range<u64>) {
    for page in pages {
        puppet.write_page(page, 1);
    }
}

pub fn punch(vm: &Managed, page: u64, pages: u64) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&vm.ram_file, hole, page * PAGE, pages * PAGE).unwrap();
}
