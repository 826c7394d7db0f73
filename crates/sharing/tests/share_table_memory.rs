//! What the share table says of its memory is what it asked of the allocator.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ballast_sharing::{PageHash, PageId, ShareTable, StorePage};
use ballast_units::Pages;

struct Counting;

thread_local! {
    static ASKED: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    ASKED.with(|asked| asked.set(asked.get() + bytes));
}

// SAFETY: all is done by the system's allocator; counting touches no memory but a cell of the
// thread that needs neither allocation nor destruction.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's obligations are the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's obligations are the same.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's obligations are the same.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn guest(n: u32) -> PageId {
    PageId::new(n).unwrap()
}
fn common(n: u64) -> StorePage {
    StorePage::new(n).unwrap()
}

#[test]
fn memory_is_reported_to_the_byte() {
    let before = ASKED.get();
    let mut table = ShareTable::new();
    let exact = |table: &ShareTable| {
        assert_eq!(table.memory_bytes().0 as i64, ASKED.get() - before);
    };
    exact(&table);
    for n in 0..50_000u32 {
        // In an order that leaves and fills gaps, with multiplicative hashes.
        let hash = PageHash(u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        table.hint(guest(n.wrapping_mul(7919) % 60_000), hash);
        exact(&table);
    }
    for n in 0..2_000 {
        table.share(common(n * 3), PageHash(n)).unwrap();
        exact(&table);
    }
    // Three pages counted in the overflow table, and then none.
    for page in [0, 3, 6].map(common) {
        (0..70_000).for_each(|_| assert!(table.retain(page).is_ok()));
        exact(&table);
    }
    for page in [0, 3, 6].map(common) {
        (0..70_000).for_each(|_| assert!(table.release(page).is_ok()));
    }
    exact(&table);
    table.forget_pages(guest(100), Pages(30_000));
    exact(&table);
    table.forget_pages(guest(0), Pages(u64::MAX));
    exact(&table);
    for n in 0..2_000 {
        table.release(common(n * 3)).unwrap();
        exact(&table);
    }
    table.check().unwrap();
    drop(table);
    assert_eq!(ASKED.get(), before);
}
