//! What the operations of the share table cost on this machine: nanoseconds each, on a table of a
//! million frames (or as many as the first argument says), in random order. One run says little on
//! a busy machine: take the median of several.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on ends")]

use std::hint::black_box;
use std::time::Instant;

use ballast_sharing::{Hasher, Match, PageHash, PageId, ShareTable, StorePage, is_zero};
use ballast_units::{PAGE_SIZE, Pages};

fn scatter(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn measure<T>(what: &str, times: u64, mut each: impl FnMut(u64) -> T) {
    let start = Instant::now();
    for i in 0..times {
        black_box(each(i));
    }
    println!("{what:<44}{:>8.1} ns", start.elapsed().as_nanos() as f64 / times as f64);
}

fn main() {
    let frames = std::env::args().nth(1).map_or(1 << 20, |n| n.parse().unwrap());
    // Powers of two: an odd factor then visits every page once, far from the one before.
    assert!(u32::is_power_of_two(frames), "a power of two");
    let n = u64::from(frames);
    let guest = |i: u64| PageId::new((i.wrapping_mul(0x9e37_79b1) % n) as u32).unwrap();
    let hash = |i: u64| PageHash(scatter(i % n));

    let mut page = Box::new([0u8; PAGE_SIZE]);
    measure("is_zero, a page of zeros", 1 << 20, |_| is_zero(black_box(&page)));
    page[17] = 1;
    measure("is_zero, another", 1 << 20, |_| is_zero(black_box(&page)));
    let hasher = Hasher::new(b"secret", "domain");
    measure("hash of a page, in cache", 1 << 20, |_| hasher.page(black_box(&page)));
    let pages: Vec<[u8; PAGE_SIZE]> = vec![[5; PAGE_SIZE]; 1 << 16];
    measure("hash of a page, in memory", 1 << 16, |i| {
        hasher.page(&pages[(i * 40_503 % (1 << 16)) as usize])
    });
    drop(pages);

    let mut table = ShareTable::new();
    measure("hint, the table grows", n, |i| table.hint(guest(i), hash(i)));
    let memory = table.memory_bytes();
    let scanned = Pages(n).bytes();
    println!(
        "  {n} frames: {memory}, {:.3} % of {scanned}",
        memory.0 as f64 * 100. / scanned.0 as f64
    );
    measure("find, a hint", n, |i| assert!(table.find(hash(i * 5 + 3)) != Match::Nothing));
    measure("find, nothing", n, |i| assert!(table.find(PageHash(!scatter(i))) == Match::Nothing));
    measure("hint, the same again", n, |i| table.hint(guest(i), hash(i)));
    measure("hint, other contents", n, |i| table.hint(guest(i), PageHash(scatter(n + i))));
    measure("share: drop a hint, new shared frame", n / 2, |i| {
        table.drop_hint(guest(i));
        table.share(StorePage::new(i).unwrap(), PageHash(scatter(n + i))).unwrap();
    });
    measure("retain", n / 2, |i| table.retain(StorePage::new(i * 5 % (n / 2)).unwrap()));
    measure("release", n / 2, |i| table.release(StorePage::new(i * 5 % (n / 2)).unwrap()));
    measure("release, the last reference", n / 2, |i| {
        table.release(StorePage::new(i * 5 % (n / 2)).unwrap())
    });
    let start = Instant::now();
    table.forget_pages(PageId::new(0).unwrap(), Pages(n));
    println!(
        "{:<44}{:>8.1} ns",
        "forget, each page of all",
        start.elapsed().as_nanos() as f64 / (n / 2) as f64
    );
    assert_eq!(table.stats().hints, 0);
}
