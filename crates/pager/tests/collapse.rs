//! A region is made whole and broken again, over and over, under a VMM whose threads write to all of it: by the
//! kernel's own large pages, userfaultfd and mappings. Skipped, loudly, without the rights.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/remapper.rs"]
mod remapper;
#[path = "support/vmm.rs"]
mod vmm;

use ballast_pager::backend::{Backend, MemError};
use ballast_pager::guest_ram::LARGE_PAGE;
use ballast_sharing::StoreFile;
use ballast_units::{PAGE_SIZE, Ppn};
use vmm::{Cell, Guest, Random, Vmm, alone, wait_for};

/// Of the VMM: the region, and as much beside it.
const SIZE: u64 = 2 * LARGE_PAGE.0;
const THREADS: u64 = 2;
const ROUNDS: u64 = 48;

#[test]
#[ignore = "the VMM process of the other test"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| remapper::serve(&guest));
        for t in 0..THREADS {
            let guest = &guest;
            scope.spawn(move || write_and_verify(guest, t));
        }
        loop {
            std::thread::park();
        }
    });
}

/// One word of each of its pages after the other, in random order: what was written last is there.
fn write_and_verify(guest: &Guest, thread: u64) {
    let mut random = Random(0x7031 + thread);
    let mut last = vec![0; (guest.pages / THREADS) as usize];
    let mut step = |at: u64, next: Option<u64>| {
        let ppn = at * THREADS + thread;
        let word = guest.word(ppn, (ppn % 512) as usize);
        // SAFETY: this thread is the only one that uses the page.
        let seen = unsafe { word.read_volatile() };
        if seen != last[at as usize] {
            eprintln!("ppn {ppn}: {seen}, not {}", last[at as usize]);
            guest.board.add(Cell::Errors, 1);
        }
        if let Some(next) = next {
            // SAFETY: as above.
            unsafe { word.write_volatile(next) };
            last[at as usize] = next;
        }
    };
    let mut n = 0;
    while guest.board.get(Cell::Stop) == 0 {
        n += 1;
        step(random.below(guest.pages / THREADS), Some(n));
        if n % 64 == 0 {
            guest.board.add(Cell::Accesses, 64);
        }
    }
    (0..guest.pages / THREADS).for_each(|at| step(at, None));
    guest.board.add(Cell::Done, 1);
}

/// A discard of somebody's stands in the way for a moment.
fn patiently(op: impl Fn() -> Result<(), MemError>) {
    wait_for("the kernel", || match op() {
        Err(MemError::Again) => false,
        other => {
            other.unwrap();
            true
        }
    });
}

/// Debian's 6.1 refuses; on later ones what the kernel answers is not to be excused.
fn collapses() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(2))
}

#[test]
fn a_region_that_is_made_whole_and_broken_loses_no_write() {
    let Some(_alone) = alone() else { return };
    let vmm = Vmm::start("", SIZE);
    // From here on it answers; what it touches waits.
    vmm.board.set(Cell::Go, 1);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = StoreFile::create(&dir.path().join("store")).unwrap();
    let ram = remapper::connected(&vmm, dir.path(), &store);
    let mut filled = 0;
    while filled < SIZE {
        filled += ram.zero(Ppn(filled), SIZE - filled).unwrap();
    }
    let (n, mut whole) = (LARGE_PAGE.0, 0);
    let mut pages = vec![[0; PAGE_SIZE]; n as usize];
    let goes_on = || {
        let until = vmm.board.get(Cell::Accesses) + 1000;
        wait_for("the guest", || vmm.board.get(Cell::Accesses) >= until);
    };
    for round in 0..ROUNDS {
        let first = Ppn(round % 2 * n);
        goes_on();
        match ram.collapse(first, n) {
            Ok(done) => whole += u64::from(done),
            Err(MemError::Os { source, .. }) if source.0 == libc::EINVAL && !collapses() => {
                eprintln!("SKIPPED: this kernel does not collapse shared memory");
                return;
            }
            Err(e) => panic!("{e}"),
        }
        assert_eq!(ram.map_again(first, n), Ok(()));
        goes_on();
        // Broken as `break_large` does it.
        patiently(|| ram.protect_run(first, n));
        ram.read_homes(first, &mut pages).unwrap();
        ram.punch(first, n).unwrap();
        let mut back = 0;
        while back < n {
            back += ram.fill_run(Ppn(first.0 + back), &pages[back as usize..]).unwrap();
        }
    }
    goes_on();
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == THREADS);
    println!("{whole} of {ROUNDS} made whole, {} writes", vmm.board.get(Cell::Accesses));
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    assert!(whole > 0, "the kernel had no large page");
}
