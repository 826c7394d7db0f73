//! A RAM of two parts, flat out: pages are evicted, shared, compressed, sampled, given up and brought home on both
//! sides of where the one ends and the other begins, by managers that follow one another. Skipped, loudly, without
//! the rights.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/manager.rs"]
mod manager;
#[path = "support/remapper.rs"]
mod remapper;
#[path = "support/vmm.rs"]
mod vmm;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_pager::backend::Backend;
use ballast_pager::guest_ram::{GuestRam, RamLayout, RamPart};
use ballast_pager::service::{Health, PagedVm};
use ballast_pager::word::State;
use ballast_uffd::Uffd;
use ballast_units::{HostAddr, PAGE_SIZE, Pages, Ppn};
use manager::{Manager, SIZE};
use vmm::{Cell, Guest, Random, Vmm, alone, memfd};

const THREADS: u64 = 2;

/// Of the first part: neither it nor the second is a number of large pages, nor of clusters.
const FIRST: u64 = 1301;

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| remapper::serve(&guest));
        let seed = guest.role.parse().unwrap();
        for t in 0..THREADS {
            let guest = &guest;
            scope.spawn(move || write_and_verify(guest, t, seed));
        }
        loop {
            std::thread::park();
        }
    });
}

/// Word `i` of a page as it is written in a version: one number, what others have too, what compresses, and what
/// does not.
fn content(ppn: u64, version: u64, i: usize) -> u64 {
    let mix = |n: u64| (n ^ n >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    match (version, version % 4) {
        (0, _) => 0,
        (_, 0) => mix((version << 20) ^ ppn),
        (_, 1) => mix(((version % 23) << 9) ^ i as u64),
        (_, 2) => mix((version << 40) ^ (ppn << 8) ^ (i as u64 / 16)),
        _ => mix(mix((version << 30) ^ ppn) ^ i as u64),
    }
}

/// Until it is told to stop: what a page had last is there, or, if it was given up, zeros or what it had at some time.
fn write_and_verify(guest: &Guest, thread: u64, seed: u64) {
    let mut random = Random(seed.wrapping_mul(2 * thread + 0x9e37_79b9) | 1);
    let mut pages = vec![(vec![0], false); (guest.pages / THREADS) as usize];
    let verify = |ppn: u64, (versions, void): &(Vec<u64>, bool)| {
        let found = guest.read_page(ppn);
        let is = |version: u64| (0..found.len()).all(|i| found[i] == content(ppn, version, i));
        let last = versions.last().copied().unwrap_or(0);
        let may_be_old = || *void && versions.iter().any(|&version| is(version));
        if !is(last) && !may_be_old() {
            eprintln!("ppn {ppn}: not version {last} (given up: {void}): {:x?}", &found[..4]);
            guest.board.add(Cell::Errors, 1);
        }
    };
    for version in 1.. {
        if guest.board.get(Cell::Stop) != 0 {
            break;
        }
        let at = random.below(guest.pages / THREADS);
        let (ppn, page) = (at * THREADS + thread, &mut pages[at as usize]);
        verify(ppn, page);
        match random.below(8) {
            0..4 => {
                guest.write_page(ppn, |i| content(ppn, version, i));
                page.0.push(version);
                page.1 = false;
            }
            4 => {
                give_up(guest, ppn);
                page.1 = true;
            }
            _ => {}
        }
    }
    pages.iter().enumerate().for_each(|(at, page)| verify(at as u64 * THREADS + thread, page));
    guest.board.add(Cell::Done, 1);
}

/// As QEMU does it.
fn give_up(guest: &Guest, ppn: u64) {
    use rustix::fs::FallocateFlags;
    let (file, _, at) = guest.part(ppn);
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, at * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
    // SAFETY: a page of this thread's own.
    if unsafe { libc::madvise(guest.word(ppn, 0).cast(), PAGE_SIZE, libc::MADV_DONTNEED) } != 0 {
        guest.board.add(Cell::Errors, 1);
    }
}

fn seed() -> u64 {
    let given = std::env::var("BALLAST_TEST_SEED").ok().and_then(|s| s.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into();
    let seed = given.unwrap_or_else(now);
    println!("seed: BALLAST_TEST_SEED={seed}");
    seed
}

#[test]
fn managers_that_leave_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let seed = seed();
    // The other has one part: the two share pages.
    let role = |n: u64| (seed ^ n << 40).to_string();
    let vmms = [Vmm::start_parts(&role(0), FIRST, SIZE - FIRST), Vmm::start(&role(1), SIZE)];
    let mut manager = Manager::start(&vmms, dir.path(), SIZE);
    for _ in 0..8 {
        manager.drive(&vmms, Duration::from_millis(150), || false);
        manager.vms.drain(..).for_each(PagedVm::leave);
        manager = Manager::take_over(&vmms, dir.path(), SIZE);
    }
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Stop, 1));
    let done = || vmms.iter().all(|vmm| vmm.board.get(Cell::Done) == THREADS);
    manager.drive(&vmms, Duration::from_secs(60), done);
    assert!(done(), "a guest hangs: {:?}", manager.vms[0].health());
    assert!(vmms.iter().all(|vmm| vmm.board.get(Cell::Errors) == 0), "memory was corrupted");
    manager.settle(&vmms);
    assert_eq!(manager.vms[0].health(), Health::Well);
    // Both parts were used, and moved.
    let pmap = manager.vms[0].memory().pmap();
    for pages in [0..FIRST, FIRST..SIZE] {
        let known = |p: &u64| pmap.load(Ppn(*p)).state() != State::Untouched;
        assert!(pages.clone().filter(known).count() > 100, "{pages:?}");
    }
    manager.release();
    assert_eq!(vmms[0].measured(), Pages(0), "pages of a VM that has ended");
}

/// What is asked of runs that go on in the next part is done in both.
#[test]
fn runs_go_on_in_the_next_part() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (memfd("a", 12 * PAGE_SIZE), memfd("b", 16 * PAGE_SIZE));
    let part = |base: u64, len, first: u64| RamPart {
        base: HostAddr(base),
        len: Pages(len),
        file_offset: first * PAGE_SIZE as u64,
    };
    // The second file begins before the part does, and goes on after its end.
    let layout = RamLayout::new(&[part(1 << 30, 8, 0), part(1 << 20, 8, 4)]).unwrap();
    let ram = |a: &OwnedFd, b: &OwnedFd| {
        let files = vec![a.try_clone().unwrap(), b.try_clone().unwrap()];
        GuestRam::of_parts(Uffd::open().unwrap(), files, layout.clone())
    };
    let write = |file: &OwnedFd, page: u64, byte: u8| {
        let file = File::from(file.try_clone().unwrap());
        file.write_all_at(&[byte; PAGE_SIZE], page * PAGE_SIZE as u64).unwrap();
    };
    for (file, page, byte) in
        [(&a, 6, 1), (&a, 7, 2), (&b, 3, 99), (&b, 4, 3), (&b, 7, 4), (&b, 12, 99)]
    {
        write(file, page, byte);
    }
    let both = ram(&a, &b);
    both.check().unwrap();
    let present = |from| both.next_present(Ppn(from), 16).unwrap();
    assert_eq!([0, 6, 7, 8, 9, 11, 12].map(present), [6, 6, 7, 8, 11, 11, 16]);
    assert_eq!(both.next_present(Ppn(0), 5).unwrap(), 5);
    assert_eq!(both.next_present(Ppn(9), 10).unwrap(), 10);
    let absent = |from| both.next_absent(Ppn(from), 16).unwrap();
    assert_eq!([0, 6, 8, 11].map(absent), [0, 9, 9, 12]);
    assert_eq!(both.next_absent(Ppn(6), 8).unwrap(), 8);
    let mut pages = vec![[0; PAGE_SIZE]; 4];
    both.read_homes(Ppn(6), &mut pages).unwrap();
    assert_eq!([0, 1, 2, 3].map(|n: usize| pages[n][17]), [1, 2, 3, 0]);
    assert_eq!(both.measured().unwrap(), Pages(6).bytes());
    both.punch(Ppn(7), 5).unwrap();
    assert_eq!([0, 7].map(present), [6, 16]);
    // What lies in the files beside the parts is not theirs.
    assert_eq!(both.measured().unwrap(), Pages(3).bytes());
    assert!(ram(&a, &a).check().unwrap_err().contains("the same file"));
    let short = memfd("short", 11 * PAGE_SIZE);
    assert!(ram(&a, &short).check().unwrap_err().contains("the mapping ends at"));
}
