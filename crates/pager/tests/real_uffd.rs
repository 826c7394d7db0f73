//! The pager over the kernel's userfaultfd and a VMM process of its own, flat out. Needs the right
//! to create userfaultfds; skipped, loudly, without (an error where BALLAST_REQUIRE_PRIVILEGED=1).
//! BALLAST_SOAK_SECONDS lengthens the soak.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "real_uffd/exchange.rs"]
mod exchange;
#[path = "real_uffd/harm.rs"]
mod harm;
#[path = "real_uffd/limit.rs"]
mod limit;
#[path = "support/vmm.rs"]
mod vmm;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, Inherited, PagedVm, PagerConfig, StartError, VmFiles};
use ballast_pager::swap::SwapSpace;
use ballast_pager::word::State;
use ballast_units::{HostAddr, PAGE_SIZE, Pages, Ppn};
use vmm::{
    Cell, Guest, Random, Vmm, alone, end_on_panic, inherited, kill_managers, nice_of, soak_seconds,
    threads, wait_for, wait_for_equal,
};

const SIZE: u64 = 8192;
const ROOM: u64 = 2048;
const THREADS: u64 = 4;

// ---- the VMM process ----------------------------------------------------------------------------

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    match guest.role.as_str() {
        "soak" => std::thread::scope(|scope| {
            for t in 0..THREADS {
                let guest = &guest;
                scope.spawn(move || soak(guest, t));
            }
        }),
        "touch" | "squeeze" | "patchwork" => {
            for ppn in (0..guest.pages).step_by(3).filter(|_| guest.role == "patchwork") {
                // One mapping for every one or two pages.
                let page = guest.word(ppn, 0).cast::<libc::c_void>();
                // SAFETY: a page of this process's own, which does not fork.
                let advised = unsafe { libc::madvise(page, PAGE_SIZE, libc::MADV_DONTFORK) };
                assert_eq!(advised, 0);
            }
            for ppn in 0..guest.pages {
                guest.write_page(ppn, |i| touched(&guest, ppn, i));
                guest.board.set(Cell::Step, ppn + 1);
            }
            hold(&guest);
        }
        "announce" => announce(&guest),
        "truncate" => {
            guest.write_page(0, |_| 1);
            guest.write_page(100, |_| 1);
            rustix::fs::ftruncate(&guest.ram, 0).unwrap();
            guest.board.set(Cell::Step, 1);
            hold(&guest);
        }
        "seal" => {
            guest.write_page(0, |i| i as u64);
            let seal = rustix::fs::SealFlags::FUTURE_WRITE;
            rustix::fs::fcntl_add_seals(&guest.ram, seal).unwrap();
            guest.board.set(Cell::Step, 1);
            while guest.board.get(Cell::Stop) == 0 {
                guest.write_page(0, |i| i as u64);
                assert!(guest.read_page(0).iter().enumerate().all(|(i, &w)| w == i as u64));
            }
            guest.board.add(Cell::Done, 1);
        }
        "block" => {
            let flags = rustix::fs::fcntl_getfl(&guest.uffd).unwrap();
            let blocking = flags - rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(&guest.uffd, blocking).unwrap();
            guest.write_page(0, |_| 1);
            guest.board.set(Cell::Step, 1);
            hold(&guest);
        }
        other => panic!("no role {other}"),
    }
    // The memory stays until the test has looked at it, and kills.
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Says again and again that it gives up all of its RAM, and has it still.
fn announce(guest: &Guest) {
    for ppn in 0..guest.pages {
        guest.write_page(ppn, |i| touched(guest, ppn, i));
    }
    let (base, len) = (guest.word(0, 0), guest.pages as usize * PAGE_SIZE);
    while guest.board.get(Cell::Stop) == 0 {
        // SAFETY: the mapping stays, and what is read there is what the file has.
        let advised = unsafe { libc::madvise(base.cast(), len, libc::MADV_DONTNEED) };
        assert_eq!(advised, 0);
        guest.board.add(Cell::Discards, 1);
    }
    guest.board.set(Cell::Step, guest.pages);
    hold(guest);
}

/// What is written once: with a number for each word, or one for sixteen, which compresses.
fn touched(guest: &Guest, ppn: u64, i: usize) -> u64 {
    let i = if guest.role == "touch" { i } else { i / 16 };
    ppn << 32 | i as u64
}

fn hold(guest: &Guest) {
    while guest.board.get(Cell::Stop) == 0 {
        match guest.board.get(Cell::Wanted) {
            0 => std::thread::sleep(Duration::from_micros(100)),
            wanted => {
                std::hint::black_box(guest.read_page(wanted - 1));
                guest.board.set(Cell::Wanted, 0);
            }
        }
    }
    for ppn in 0..guest.pages.min(guest.board.get(Cell::Step)) {
        let page = guest.read_page(ppn);
        if !page.iter().enumerate().all(|(i, &w)| w == touched(guest, ppn, i)) {
            guest.board.add(Cell::Errors, 1);
        }
    }
    guest.board.add(Cell::Done, 1);
}

fn pattern(ppn: u64, version: u64, i: usize) -> u64 {
    if version == 0 {
        return 0;
    }
    let i = match ppn % 4 {
        // A page of one number.
        1 => return version << 20 | ppn,
        // One that compresses.
        2 => i / 16,
        _ => i,
    };
    (ppn << 40 | version << 10 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// One guest thread: pages of its own, each with the version it last wrote.
fn soak(guest: &Guest, thread: u64) {
    let own = guest.pages / THREADS;
    let mut random = Random(0x5eed + thread);
    // The version, and whether an older one may be seen because the page was given up.
    let mut pages = vec![(0u64, false); own as usize];
    let mut next = 1;
    let zeros =
        rustix::fs::open("/dev/zero", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())
            .unwrap();
    let verify = |at: u64, (version, void): (u64, bool)| {
        let ppn = at * THREADS + thread;
        let page = guest.read_page(ppn);
        let is = |v: u64| page.iter().enumerate().all(|(i, &w)| w == pattern(ppn, v, i));
        guest.board.add(Cell::Accesses, 1);
        if !(is(version) || void && is(0)) {
            eprintln!("ppn {ppn}: expected version {version}, got {:#x}", page[0]);
            guest.board.add(Cell::Errors, 1);
        }
    };
    while guest.board.get(Cell::Stop) == 0 {
        // Half of the accesses go to an eighth of the pages.
        let at = if random.below(2) == 0 { random.below(own / 8) } else { random.below(own) };
        let ppn = at * THREADS + thread;
        let page = &mut pages[at as usize];
        match random.below(100) {
            0..40 => verify(at, *page),
            40..90 => {
                verify(at, *page);
                next += 1;
                guest.write_page(ppn, |i| pattern(ppn, next, i));
                *page = (next, false);
            }
            90..94 => {
                // By the kernel, on the VMM's behalf: a fault from inside a system call.
                // SAFETY: a page of this thread's own.
                let n = unsafe {
                    libc::read(
                        std::os::fd::AsRawFd::as_raw_fd(&zeros),
                        guest.word(ppn, 0).cast(),
                        PAGE_SIZE,
                    )
                };
                if n != PAGE_SIZE as isize {
                    guest.board.add(Cell::Errors, 1);
                }
                *page = (0, false);
            }
            kind => {
                let n = if kind < 97 { 1 } else { 1 + random.below(4) };
                if n > 1 {
                    // A range over other threads' pages would void theirs: one's own, one by one.
                    for at in at..(at + n).min(own) {
                        discard(guest, at * THREADS + thread, kind % 2 == 0);
                        pages[at as usize].1 = true;
                    }
                } else {
                    discard(guest, ppn, kind % 2 == 0);
                    page.1 = true;
                }
            }
        }
    }
    for (at, page) in pages.iter().enumerate() {
        verify(at as u64, *page);
    }
    guest.board.add(Cell::Done, 1);
}

/// As QEMU does it, or as others do.
fn discard(guest: &Guest, ppn: u64, as_qemu: bool) {
    use rustix::fs::FallocateFlags;
    let page = guest.word(ppn, 0).cast::<libc::c_void>();
    let advice = if as_qemu {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = ppn * PAGE_SIZE as u64;
        rustix::fs::fallocate(&guest.ram, flags, at, PAGE_SIZE as u64).unwrap();
        libc::MADV_DONTNEED
    } else {
        libc::MADV_REMOVE
    };
    // SAFETY: a page of this thread's own.
    if unsafe { libc::madvise(page, PAGE_SIZE, advice) } != 0 {
        guest.board.add(Cell::Errors, 1);
    }
    guest.board.add(Cell::Discards, 1);
}

// ---- the manager's side ------------------------------------------------------------------------

struct Manager {
    host: Arc<Host>,
    vm: PagedVm,
}

fn overhead() -> Pages {
    PagerConfig::default().overhead(Pages(SIZE))
}

fn new_host(room: u64) -> Arc<Host> {
    let host = Arc::new(Host::new(Ledger::new(Pages(room) + overhead(), || {})));
    assert!(host.ledger.try_reserve(overhead()));
    host.set_plenty(Pages(room / 8));
    host
}

fn start(vmm: &Vmm, dir: &Path, room: u64) -> Manager {
    start_on(new_host(room), vmm, dir)
}

/// On a host that has reserved its overhead.
fn start_on(host: Arc<Host>, vmm: &Vmm, dir: &Path) -> Manager {
    let files = VmFiles::new(dir, SwapSpace::create_at(&dir.join("swap"), Pages(SIZE)).unwrap());
    let config = PagerConfig::default();
    let vm = PagedVm::start("t", config, files, vmm.guest_ram(), overhead(), host.clone()).unwrap();
    vmm.board.set(Cell::Go, 1);
    Manager { host, vm }
}

impl Manager {
    fn take_over(vmm: &Vmm, dir: &Path, room: u64) -> Manager {
        let host = new_host(room);
        let files = VmFiles::new(dir, SwapSpace::open_at(&dir.join("swap")).unwrap());
        let (vm, _) = PagedVm::take_over(
            "t",
            PagerConfig::default(),
            files,
            vmm.guest_ram(),
            overhead(),
            host.clone(),
            Inherited::default(),
        )
        .unwrap();
        Manager { host, vm }
    }

    /// Evicts ahead of need and samples, as fast as a policy ever could, until `done`.
    fn drive(&self, vmm: &Vmm, most: Duration, done: impl Fn() -> bool) -> Pages {
        let mut random = Random(77);
        let begun = Instant::now();
        let mut peak = Pages(0);
        for turn in 0u64.. {
            if done() || begun.elapsed() > most {
                return peak;
            }
            let free = self.host.ledger.free().0;
            self.vm.set_evict_goal(Pages((ROOM / 4).saturating_sub(free)));
            if turn % 8 == 0 {
                self.vm.begin_sample((0..100).map(|_| Ppn(random.below(SIZE))).collect());
            }
            self.vm.memory_freed();
            peak = Pages(peak.0.max(vmm.measured().0));
            std::thread::sleep(Duration::from_millis(1));
        }
        peak
    }

    fn settle(&self) {
        self.vm.set_evict_goal(Pages(0));
        self.vm.begin_sample(Vec::new());
        let memory = self.vm.memory();
        let quiet = || {
            memory.reconcile(Ppn(0), SIZE).1.map_err(|e| e.to_string())?;
            match memory.pmap().in_state(State::Held).0 {
                0 => memory.check_quiet(),
                n => Err(format!("{n} pages held")),
            }
        };
        let begun = Instant::now();
        while let Err(e) = quiet() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{e}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn release(self, dir: &Path) {
        let host = self.host.clone();
        self.vm.release();
        assert_eq!(host.ledger.used(), Pages(0));
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "files are left");
    }
}

/// What the compressed pages take.
fn frames(vm: &PagedVm) -> Pages {
    Pages(vm.memory().tier().occupancy().frames)
}

/// What it takes, at home and compressed, and what is charged for it.
fn books(vmm: &Vmm, vm: &PagedVm) -> (Pages, Pages) {
    (vmm.measured() + frames(vm), vm.memory().charged())
}

fn counts(vm: &PagedVm, vmm: &Vmm, what: &str) {
    let c = vm.memory().counters.values();
    println!(
        "{what}: {} accesses, {} discards; {} faults, {} evicted ({} zero), {} compressed, {} one \
         number, {} back from there, {} on to swap; {} swapped out, {} in, {} touched under sample, \
         {} waits",
        vmm.board.get(Cell::Accesses),
        vmm.board.get(Cell::Discards),
        c.faults,
        c.evicted,
        c.zero_dropped,
        c.compressed,
        c.filled,
        c.decompressed,
        c.written_back,
        c.swap_outs,
        c.swap_ins,
        c.touched,
        c.waits
    );
}

#[test]
fn a_guest_flat_out_keeps_its_memory_in_a_quarter_of_its_size() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("soak", SIZE);
    let manager = start(&vmm, dir.path(), ROOM);
    let peak = manager.drive(&vmm, Duration::from_secs(soak_seconds()), || false);
    vmm.board.set(Cell::Stop, 1);
    let finished = || vmm.board.get(Cell::Done) == THREADS;
    let last = manager.drive(&vmm, Duration::from_secs(60), finished);
    assert!(finished(), "the guest hangs");
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    manager.settle();
    counts(&manager.vm, &vmm, "soak");
    wait_for_equal("books", || books(&vmm, &manager.vm));
    assert!(peak.max(last) <= Pages(ROOM), "{peak:?} {last:?}: more than there is room for");
    assert!(manager.host.ledger.peak() <= manager.host.ledger.budget());
    assert_eq!(manager.vm.health(), Health::Well);
    let c = manager.vm.memory().counters.values();
    assert!(c.swap_ins > 1000 && c.swap_outs > 1000 && c.zero_dropped > 0 && c.discarded > 0);
    assert!(c.compressed > 1000 && c.filled > 1000 && c.decompressed > 1000, "{c:?}");
    assert!(c.touched > 0, "no sampled page was ever touched");
    manager.release(dir.path());
    assert_eq!(vmm.measured(), Pages(0));
}

#[test]
fn who_serves_faults_runs_before_others() {
    let Some(_alone) = alone() else { return };
    // The kernel lists a thread for a moment after it has been joined: those of the tests before this one.
    let before = threads();
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("soak", SIZE);
    let manager = start(&vmm, dir.path(), ROOM);
    manager.drive(&vmm, Duration::from_millis(50), || false);
    let ours = &threads() - &before;
    assert_eq!((nice_of("fault-", &ours), nice_of("reclaim-", &ours)), (vec![-10], vec![-5]));
    finish_soak(&vmm, manager, dir.path());
}

#[test]
fn a_killed_vmm_gives_back_everything() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut vmm = Vmm::start("soak", SIZE);
    let manager = start(&vmm, dir.path(), ROOM);
    manager.drive(&vmm, Duration::from_millis(700), || false);
    vmm.kill();
    // Nobody tells the pager for a while: it goes on evicting and sampling.
    manager.drive(&vmm, Duration::from_millis(200), || false);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    manager.release(dir.path());
    assert_eq!(vmm.measured(), Pages(0));
}

#[test]
fn managers_that_leave_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("soak", SIZE);
    let mut manager = start(&vmm, dir.path(), ROOM);
    for _ in 0..12 {
        manager.drive(&vmm, Duration::from_millis(120), || false);
        manager.vm.leave();
        manager = Manager::take_over(&vmm, dir.path(), ROOM);
    }
    finish_soak(&vmm, manager, dir.path());
}

fn finish_soak(vmm: &Vmm, manager: Manager, dir: &Path) {
    vmm.board.set(Cell::Stop, 1);
    let finished = || vmm.board.get(Cell::Done) == THREADS;
    manager.drive(vmm, Duration::from_secs(60), finished);
    assert!(finished(), "the guest hangs: {:?}", manager.vm.health());
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    manager.settle();
    counts(&manager.vm, vmm, "last manager");
    wait_for_equal("books", || books(vmm, &manager.vm));
    manager.release(dir);
}

/// A manager in a process of its own, to be killed.
#[test]
#[ignore = "the manager process of another test"]
fn manager_process() {
    let Some(uffd) = inherited("MANAGER_UFFD") else { return };
    end_on_panic();
    let ram = inherited("MANAGER_RAM").unwrap();
    let board = inherited("MANAGER_BOARD").unwrap();
    let link = inherited("MANAGER_LINK").unwrap();
    let base: u64 = std::env::var("MANAGER_BASE").unwrap().parse().unwrap();
    let pid: u32 = std::env::var("MANAGER_PID").unwrap().parse().unwrap();
    let dir = std::path::PathBuf::from(std::env::var("MANAGER_DIR").unwrap());
    let vmm = Vmm::adopt(uffd, ram, board, link, pid, HostAddr(base), SIZE);
    let manager = if dir.join("pmap").exists() {
        Manager::take_over(&vmm, &dir, ROOM)
    } else {
        start(&vmm, &dir, ROOM)
    };
    vmm.board.add(Cell::Step, 1);
    manager.drive(&vmm, Duration::from_secs(60), || false);
}

#[test]
fn killed_managers_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("soak", SIZE);
    let kills = kill_managers(&vmm, dir.path(), Duration::from_micros(120_000));
    let manager = Manager::take_over(&vmm, dir.path(), ROOM);
    println!("{kills} managers killed, {} pages accessed", vmm.board.get(Cell::Accesses));
    finish_soak(&vmm, manager, dir.path());
}

#[test]
fn faults_wait_for_memory_and_for_the_low_state_to_end() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("touch", SIZE);
    let manager = start(&vmm, dir.path(), 64);
    let step = || vmm.board.get(Cell::Step);
    // Both: the count of waiting faults alone may be that of a moment ago.
    let full = || manager.vm.waiting() == 1 && manager.host.ledger.free().is_zero();
    wait_for("fault that waits", full);
    let stuck = step();
    assert!(stuck <= 64 && manager.host.ledger.free().is_zero());
    // A budget raised, pages evicted: either lets it go on.
    manager.host.ledger.set_budget(overhead() + Pages(128));
    manager.vm.memory_freed();
    wait_for("progress", || step() > stuck && full());
    let stuck = step();
    manager.vm.set_evict_goal(Pages(64));
    // A page evicted in the middle of being written comes back first, so not all 64 are progress.
    wait_for("progress", || manager.vm.evict_goal().is_zero() && step() >= stuck + 32 && full());
    assert!(vmm.measured() <= Pages(128));
    // Low: above its target it stays blocked though memory is free; below, it goes on.
    manager.host.set_low(true);
    manager.vm.memory().set_target(Pages(100));
    manager.host.ledger.set_budget(overhead() + Pages(SIZE));
    let stuck = step();
    wait_for("block", || manager.vm.memory().counters.values().blocks > 0);
    assert!(step() <= stuck + 1, "{} allocated while blocked", step() - stuck);
    exchange::exchanges(&manager, step);
    manager.vm.memory().set_target(Pages(SIZE));
    wait_for("all pages", || step() == SIZE);
    assert!(manager.vm.memory().counters.values().wait_ns > 0);
    // Eviction ends at what it is told to leave, however much was asked.
    manager.host.set_low(false);
    let leave = Pages(SIZE / 2);
    manager.vm.hold_down_to(Pages(SIZE), leave, Pages::ZERO);
    wait_for("eviction", || manager.vm.evict_goal().is_zero());
    assert_eq!(manager.vm.memory().charged(), leave);
    // Held down it gets what it wants, which is every page, and does not grow.
    let budget = manager.host.ledger.budget();
    manager.vm.hold_down_to(Pages::ZERO, leave, budget);
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    wait_for("it to be held down", || manager.vm.evict_goal().is_zero());
    let charged = manager.vm.memory().charged();
    assert!(charged < leave + Pages(64), "{charged} pages, where {leave} are to be left");
    // Not while as much is free as was to be.
    let free = manager.host.ledger.free();
    manager.vm.hold_down_to(Pages(1), Pages(1), free);
    wait_for("one page", || manager.vm.evict_goal().is_zero());
    assert!(manager.vm.memory().charged() >= charged - Pages(8), "more was taken than asked for");
    // What it was to give up, and no more down to what it is to be left: that is a balloon's.
    let charged = manager.vm.memory().charged();
    manager.vm.hold_down_to(Pages(96), Pages(1), budget);
    wait_for("96 pages", || manager.vm.memory().charged() <= charged - Pages(96));
    std::thread::sleep(Duration::from_millis(50));
    assert!(manager.vm.memory().charged() >= charged - Pages(96 + 8), "more was taken");
    manager.vm.hold_down_to(Pages::ZERO, Pages::ZERO, Pages::ZERO);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    manager.settle();
    manager.release(dir.path());
}

/// Its memory is gone before anybody has seen that it has ended: there is nothing to be evicted any more.
#[test]
fn a_vm_that_is_held_down_and_ends_is_let_alone() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("touch", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    drop(vmm);
    let budget = manager.host.ledger.budget();
    manager.vm.hold_down_to(Pages(1), Pages(1), budget);
    wait_for("the order to be given up", || manager.vm.evict_goal().is_zero());
    for _ in 0..200 {
        std::thread::sleep(Duration::from_micros(100));
        assert!(manager.vm.evict_goal().is_zero(), "it is asked for again");
    }
    manager.vm.release();
}

/// Its shim had given up before it heard that it is managed, and its guest runs on without.
#[test]
fn a_vm_that_is_given_up_keeps_what_is_in_its_ram() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("touch", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    let had = vmm.measured();
    assert_eq!(had, Pages(SIZE));
    let Manager { host, vm, .. } = manager;
    vm.give_up();
    assert_eq!(vmm.measured(), had);
    assert_eq!(host.ledger.used(), Pages(0));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}

/// A guest that reads its pages in order meets one fault for many.
#[test]
fn a_page_that_is_wanted_takes_its_neighbours_home_with_it() {
    let Some(_alone) = alone() else { return };
    takes_neighbours_home("squeeze");
}

/// The kernel fills pages of one mapping with one call.
#[test]
fn neighbours_come_home_across_the_ends_of_mappings() {
    let Some(_alone) = alone() else { return };
    takes_neighbours_home("patchwork");
}

fn takes_neighbours_home(role: &str) {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start(role, SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let memory = manager.vm.memory();
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    let most = memory.tier().settings().limit(Pages(SIZE));
    manager.vm.set_evict_goal(most);
    wait_for("eviction", || manager.vm.evict_goal().is_zero());
    let before = memory.counters.values();
    let away = Pages(SIZE) - memory.pmap().in_state(State::Resident);
    assert!(away > most, "{away:?}");
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    // The guest may have read the last of them before they are booked.
    wait_for("the books", || memory.pmap().in_state(State::Resident) == Pages(SIZE));
    let after = memory.counters.values();
    let (faults, brought) = (after.faults - before.faults, after.brought - before.brought);
    println!("{} away, {faults} faults, {brought} brought", away.0);
    assert!(brought > away.0 / 2, "{away:?}: {faults} faults, {brought} brought");
    assert_eq!(manager.vm.health(), Health::Well);
    manager.settle();
    manager.release(dir.path());
}

/// Compressed pages take memory too: they go on to swap where a VM is to give up more than it has besides.
#[test]
fn what_is_compressed_goes_on_to_swap_when_nothing_else_is_left() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("squeeze", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let memory = manager.vm.memory();
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    let limit = memory.tier().settings().limit(Pages(SIZE));
    manager.vm.hold_down_to(Pages(SIZE), limit, Pages::ZERO);
    wait_for("a full cache", || memory.charged() <= limit);
    assert!(frames(&manager.vm) >= Pages(limit.0 / 2), "{:?}", frames(&manager.vm));
    assert!(memory.pmap().in_state(State::Compressed).0 > limit.0, "no gain");
    wait_for("an empty one", || {
        manager.vm.set_evict_goal(Pages(SIZE));
        memory.charged() == Pages(0)
    });
    assert_eq!((frames(&manager.vm), vmm.measured()), (Pages(0), Pages(0)));
    assert_eq!(memory.tier().measured().0, 0, "a file that holds nothing takes nothing");
    assert!(memory.counters.values().written_back > limit.0);
    manager.vm.set_evict_goal(Pages(0));
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    manager.settle();
    manager.release(dir.path());
}

/// Who is wanted back is seen while pages leave: the young alone, and the tier takes more than it is worth.
#[test]
fn a_tier_whose_young_are_wanted_back_becomes_smaller() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("squeeze", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let (memory, tier) = (manager.vm.memory(), manager.vm.memory().tier());
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    let compressed = || -> std::collections::BTreeSet<u64> {
        let is = |p: &u64| memory.pmap().load(Ppn(*p)).state() == State::Compressed;
        (0..SIZE).filter(is).collect()
    };
    let evict = |n: u64| {
        manager.vm.set_evict_goal(Pages(n));
        wait_for("eviction", || manager.vm.evict_goal().is_zero());
    };
    evict(SIZE / 2);
    assert_eq!(tier.limits().0, tier.limits().1, "nothing has come back");
    wait_for("a smaller tier", || {
        let before = compressed();
        evict(100);
        for ppn in compressed().difference(&before) {
            vmm.board.set(Cell::Wanted, ppn + 1);
            wait_for("a page to be read", || vmm.board.get(Cell::Wanted) == 0);
        }
        tier.limits().0 < tier.limits().1
    });
    vmm.board.set(Cell::Stop, 1);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    manager.settle();
    manager.release(dir.path());
}

/// Bytes that are not what was stored are never a guest's.
#[test]
fn a_damaged_compressed_page_is_waited_for_and_never_fed() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::start("squeeze", SIZE);
    let manager = start(&vmm, dir.path(), 2 * SIZE);
    let memory = manager.vm.memory();
    wait_for("all pages", || vmm.board.get(Cell::Step) == SIZE);
    manager.vm.hold_down_to(Pages(SIZE), Pages(SIZE / 2), Pages::ZERO);
    wait_for("eviction", || memory.charged() <= Pages(SIZE / 2));
    manager.settle();
    let path = dir.path().join("compressed");
    let good = std::fs::read(&path).unwrap();
    let place = memory.tier().oldest(1)[0];
    let mut bad = good.clone();
    bad[place.offset() + 20] ^= 1;
    let write = |bytes: &[u8]| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let at = place.offset();
        let len = place.size().bytes();
        file.write_all_at(&bytes[at..at + len], at as u64).unwrap();
    };
    write(&bad);
    vmm.board.set(Cell::Stop, 1);
    wait_for("damage to be met", || matches!(manager.vm.health(), Health::Unreadable { .. }));
    let Health::Unreadable { pages, what, .. } = manager.vm.health() else { panic!() };
    assert!(pages == 1 && what.contains("damaged"), "{pages} pages, {what}");
    assert_eq!((vmm.board.get(Cell::Done), vmm.board.get(Cell::Errors)), (0, 0));
    // Whole again, and the guest goes on.
    write(&good);
    wait_for("verification", || vmm.board.get(Cell::Done) == 1);
    assert_eq!(vmm.board.get(Cell::Errors), 0);
    wait_for("health", || !matches!(manager.vm.health(), Health::Unreadable { .. }));
    manager.settle();
    manager.release(dir.path());
}

#[test]
fn what_cannot_be_paged_is_refused_and_files_of_others_stay() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let swap = dir.path().join("swap");
    let mut vmm = Vmm::start("touch", SIZE);
    let try_start = |vmm: &Vmm| -> Result<(), StartError> {
        let host = new_host(ROOM);
        let config = PagerConfig::default();
        let files = VmFiles::new(dir.path(), SwapSpace::create_at(&swap, Pages(SIZE))?);
        PagedVm::start("t", config, files, vmm.guest_ram(), overhead(), host).map(drop)
    };
    for (base, len, offset) in [
        (u64::MAX - 4095, SIZE, 0),
        (4097, SIZE, 0),
        (1 << 30, SIZE + 1, 0),
        (1 << 30, SIZE, 4096),
        (1 << 30, SIZE, u64::MAX - 4095),
        (1 << 30, 0, 0),
        (1 << 30, u64::MAX, 0),
    ] {
        let good = vmm.layout;
        vmm.layout.base = HostAddr(base);
        vmm.layout.len = Pages(len);
        vmm.layout.file_offset = offset;
        let e = try_start(&vmm).unwrap_err().to_string();
        assert!(e.contains("RAM mapping"), "{e}");
        vmm.layout = good;
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    // Files of a VM that a former manager may have left running are not this call's to remove.
    std::fs::write(&swap, b"the only copy").unwrap();
    try_start(&vmm).unwrap_err();
    assert_eq!(std::fs::read(&swap).unwrap(), b"the only copy");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "its own files are left");
    std::fs::remove_file(&swap).unwrap();
    std::fs::write(dir.path().join("pmap"), b"words").unwrap();
    try_start(&vmm).unwrap_err();
    assert_eq!(std::fs::read(dir.path().join("pmap")).unwrap(), b"words");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "its own files are left");
}
