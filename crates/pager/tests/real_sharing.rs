//! Page sharing over the kernel's userfaultfd, store files and mappings, between VMM processes of the
//! tests' own. Skipped, loudly, without the rights (an error where BALLAST_REQUIRE_PRIVILEGED=1).
//! BALLAST_SOAK_SECONDS lengthens the torture.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/manager.rs"]
mod manager;
#[path = "support/remapper.rs"]
mod remapper;
#[path = "support/vmm.rs"]
mod vmm;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_pager::mappings::{Mappings, Reconnected, Remapper, View};
use ballast_pager::memory::MOVING;
use ballast_pager::service::{Health, PagedVm};
use ballast_pager::sharing::Domain;
use ballast_pager::sharing::control::Settings;
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::sharing::limit::Limits;
use ballast_pager::word::State;
use ballast_units::{HostAddr, PAGE_SIZE, Pages, Ppn};
use manager::{Manager, ROOM, SIZE, settings};
use remapper::{Breaking, Lost};
use vmm::{
    Cell, Guest, Random, Vmm, alone, end_on_panic, inherited, kill_managers, soak_seconds, wait_for,
};

const THREADS: u64 = 2;
/// Different pages that guests write.
const KINDS: u64 = 24;

/// Word `i` of a page of this kind; kind 0 is zeros.
fn content(kind: u64, i: usize) -> u64 {
    if kind == 0 { 0 } else { (kind << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) }
}

// ---- the VMM process ----------------------------------------------------------------------------

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| remapper::serve(&guest));
        match guest.role.as_str() {
            "steps" => steps(&guest, |ppn| 1 + ppn % (KINDS - 1)),
            "halves" => steps(&guest, half_kind),
            role => {
                let seed: u64 = role.strip_prefix("torture ").unwrap().parse().unwrap();
                for t in 0..THREADS {
                    let guest = &guest;
                    scope.spawn(move || torture(guest, t, seed));
                }
            }
        }
        // The memory stays until the test has looked at it, and kills.
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}

fn is_kind(guest: &Guest, ppn: u64, kind: u64) -> bool {
    let page = guest.read_page(ppn);
    let is = page.iter().enumerate().all(|(i, &w)| w == content(kind, i));
    if !is {
        let at = page.iter().enumerate().position(|(i, &w)| w != content(kind, i));
        eprintln!("ppn {ppn}: not of kind {kind} from word {at:?} on: {:#x}", page[0]);
    }
    is
}

/// The first half of each VM's pages is the other's, too; the rest is like no other.
fn half_kind(ppn: u64) -> u64 {
    if ppn < SIZE / 2 { 1 + ppn } else { ppn * 0x1_0000 + u64::from(std::process::id()) }
}

/// Does what `Go` says next: 2 reads all, 3 writes all (kinds by page), 4 verifies them, 5 changes one
/// word of every second page and verifies all.
fn steps(guest: &Guest, kind: impl Fn(u64) -> u64) {
    let mut changed = false;
    let verify = |changed: bool| {
        for ppn in 0..guest.pages {
            let page = guest.read_page(ppn);
            let whole = page.iter().enumerate().all(|(i, &w)| {
                w == if i == 7 && changed && ppn % 2 == 0 { ppn } else { content(kind(ppn), i) }
            });
            if !whole {
                guest.board.add(Cell::Errors, 1);
            }
        }
    };
    for step in 2.. {
        while guest.board.get(Cell::Go) < step {
            std::thread::sleep(Duration::from_millis(1));
        }
        match step {
            2 => {
                let zeros = (0..guest.pages).all(|ppn| is_kind(guest, ppn, 0));
                guest.board.add(Cell::Errors, u64::from(!zeros));
            }
            3 => (0..guest.pages).for_each(|p| guest.write_page(p, |i| content(kind(p), i))),
            5 => {
                for ppn in (0..guest.pages).step_by(2) {
                    // SAFETY: this thread is the only one that uses the page.
                    unsafe { guest.word(ppn, 7).write_volatile(ppn) };
                }
                changed = true;
                verify(changed);
            }
            _ => verify(changed),
        }
        guest.board.set(Cell::Step, step);
    }
}

/// Pages of its own, each of one of few kinds: written whole or not at all, changed and changed back,
/// given up, and verified.
fn torture(guest: &Guest, thread: u64, seed: u64) {
    let mut random = Random(seed.wrapping_mul(2 * thread + 0x9e37_79b9) | 1);
    // The kind, or None after a discard: zeros, or whatever the page had once, whole. And all kinds that it had, as bits.
    let mut pages = vec![(Some(0), 1u32); (guest.pages / THREADS) as usize];
    let verify = |at: u64, (kind, had): (Option<u64>, u32)| {
        let ppn = at * THREADS + thread;
        guest.board.add(Cell::Accesses, 1);
        let good = match kind {
            Some(kind) => is_kind(guest, ppn, kind),
            None => {
                let page = guest.read_page(ppn);
                let whole = |k: u64| page.iter().enumerate().all(|(i, &w)| w == content(k, i));
                (0..KINDS).filter(|kind| had >> kind & 1 == 1).any(whole)
            }
        };
        if !good {
            eprintln!("ppn {ppn} is not {kind:?}");
            guest.board.add(Cell::Errors, 1);
        }
    };
    while guest.board.get(Cell::Stop) == 0 {
        let at = random.below(pages.len() as u64);
        let ppn = at * THREADS + thread;
        let page = &mut pages[at as usize];
        verify(at, *page);
        match random.below(100) {
            0..40 => {}
            40..75 => {
                let kind = random.below(KINDS);
                guest.write_page(ppn, |i| content(kind, i));
                *page = (Some(kind), page.1 | 1 << kind);
            }
            75..90 => {
                if let Some(kind) = page.0 {
                    let i = random.below(512) as usize;
                    // SAFETY: this thread is the only one that uses the page.
                    unsafe {
                        guest.word(ppn, i).write_volatile(1);
                        std::thread::yield_now();
                        if guest.word(ppn, i).read_volatile() != 1 {
                            eprintln!("ppn {ppn}: lost a word");
                            guest.board.add(Cell::Errors, 1);
                        }
                        guest.word(ppn, i).write_volatile(content(kind, i));
                    }
                }
            }
            _ => {
                discard(guest, ppn);
                page.0 = None;
            }
        }
    }
    for (at, page) in pages.iter().enumerate() {
        verify(at as u64, *page);
    }
    guest.board.add(Cell::Done, 1);
}

/// As QEMU does it.
fn discard(guest: &Guest, ppn: u64) {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&guest.ram, flags, ppn * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
    // SAFETY: a page of this thread's own.
    if unsafe { libc::madvise(guest.word(ppn, 0).cast(), PAGE_SIZE, libc::MADV_DONTNEED) } != 0 {
        guest.board.add(Cell::Errors, 1);
    }
    guest.board.add(Cell::Discards, 1);
}

// ---- the manager's side ------------------------------------------------------------------------

fn step(vmms: &[Vmm], step: u64) {
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Go, step));
    wait_for("step", || vmms.iter().all(|vmm| vmm.board.get(Cell::Step) == step));
    for vmm in vmms {
        assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted, step {step}");
    }
}

fn vmms(role: &str, n: usize) -> (tempfile::TempDir, Vec<Vmm>) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    (dir, (0..n).map(|_| Vmm::start(role, SIZE)).collect())
}

/// That do as chance has it, each otherwise.
fn torturers(n: u64) -> (tempfile::TempDir, Vec<Vmm>) {
    let given = std::env::var("BALLAST_TEST_SEED").ok().and_then(|s| s.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into();
    let seed: u64 = given.unwrap_or_else(now);
    println!("seed: BALLAST_TEST_SEED={seed}");
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let start = |n: u64| Vmm::start(&format!("torture {}", seed ^ n << 40), SIZE);
    (dir, (0..n).map(start).collect())
}

#[test]
fn pages_are_shared_broken_and_come_home_and_reading_allocates_nothing() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let mut manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 2);
    let homes = || vmms.iter().map(|vmm| vmm.measured().0).sum::<u64>();
    assert_eq!(manager.in_state(State::Zero), 2 * SIZE);
    assert_eq!(homes(), 0, "reading has allocated");
    step(&vmms, 3);
    // All is shared, and pages of one kind are one.
    wait_for("sharing", || manager.in_state(State::Shared) == 2 * SIZE);
    step(&vmms, 4);
    assert_eq!(manager.domain.stats().common, Pages(KINDS - 1));
    assert_eq!(homes(), 0);
    manager.settle(&vmms);
    // What is broken comes home, and only that.
    step(&vmms, 5);
    wait_for("homing", || manager.in_state(State::Resident) == SIZE);
    assert_eq!((manager.in_state(State::Shared), homes()), (SIZE, SIZE));
    let breaks = |vm: &PagedVm| vm.memory().counters.values().breaks;
    assert!(manager.vms.iter().map(breaks).sum::<u64>() >= SIZE);
    step(&vmms, 6);
    manager.settle(&vmms);
    // One goes: its references go with it, and the other one's pages are whole.
    manager.vms.pop().unwrap().release();
    assert_eq!(manager.domain.stats().shared, Pages(SIZE / 2));
    step(&vmms[..1], 7);
    manager.settle(&vmms[..1]);
    assert_eq!(manager.vms[0].health(), Health::Well);
    manager.release();
}

#[test]
fn what_others_have_is_shared_instead_of_swapped() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    manager.control.set(Settings { enabled: false, ..settings() });
    step(&vmms, 3);
    // Of its own accord nobody looks at more than a few pages before all is done.
    let slow = Limits { pages_per_s: 1.0, cores: 64.0 };
    manager.control.set(Settings { vm: slow, ..settings() });
    let c = || manager.vms.iter().map(|vm| vm.memory().counters.values());
    for vm in &manager.vms {
        vm.set_evict_goal(Pages(SIZE - 100));
    }
    wait_for("reclaim", || manager.vms.iter().all(|vm| vm.evict_goal().is_zero()));
    let (shared, evicted) =
        (c().map(|c| c.shares).sum::<u64>(), c().map(|c| c.evicted).sum::<u64>());
    // A page that nothing is known to equal yet is evicted; when a kind is common, none of it is.
    assert!(shared > 2 * evicted, "{shared} shared, {evicted} evicted");
    step(&vmms, 4);
    manager.settle(&vmms);
    manager.release();
}

#[test]
fn what_leaves_memory_is_not_shared_while_sharing_is_switched_off() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    manager.control.set(Settings { enabled: false, ..settings() });
    step(&vmms, 3);
    for vm in &manager.vms {
        vm.set_evict_goal(Pages(SIZE - 100));
    }
    wait_for("reclaim", || manager.vms.iter().all(|vm| vm.evict_goal().is_zero()));
    for vm in &manager.vms {
        let c = vm.memory().counters.values();
        assert!(c.shares == 0 && c.evicted >= SIZE - 100, "{c:?}");
    }
    assert_eq!(manager.domain.stats().common, Pages(0));
    step(&vmms, 4);
    manager.settle(&vmms);
    manager.release();
}

/// Nobody uses the shared half: it leaves beside what is a VM's own, and does not stay to the last.
#[test]
fn shared_pages_that_nobody_uses_leave_too_and_come_back_whole() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("halves", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 3);
    wait_for("sharing", || manager.in_state(State::Shared) == SIZE);
    // A page that left would be shared again where it came back.
    manager.control.set(Settings { enabled: false, ..settings() });
    let common = || manager.domain.stats().common;
    assert_eq!(common(), Pages(SIZE / 2));
    let own = |vm: &PagedVm| vm.memory().pmap().in_state(State::Resident);
    wait_for("shared pages leave", || {
        for vm in &manager.vms {
            assert!(own(vm) > Pages(0), "all else had to leave first: {}", common());
            if vm.evict_goal().is_zero() {
                vm.set_evict_goal(Pages(8));
            }
        }
        common() < Pages(3 * SIZE / 8)
    });
    // Both wait for what they read, and get it.
    step(&vmms, 4);
    manager.settle(&vmms);
    let back = |vm: &PagedVm| vm.memory().counters.values().shared_back;
    assert!(manager.vms.iter().all(|vm| back(vm) > 0));
    manager.release();
}

/// While the host is low, a VM at its target has what it wants for what it has at home: shared pages would have to come there.
#[test]
fn shared_pages_stay_while_pages_are_exchanged_one_for_another() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("halves", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 3);
    wait_for("sharing", || manager.in_state(State::Shared) == SIZE);
    manager.control.set(Settings { enabled: false, ..settings() });
    for vm in &manager.vms {
        vm.set_evict_goal(Pages(SIZE / 4));
        wait_for("eviction", || vm.evict_goal().is_zero());
    }
    wait_for("what is on its way", || manager.in_state(State::Staged) == 0);
    let counters = |vm: &PagedVm| vm.memory().counters.values();
    let home = || manager.vms.iter().map(|vm| counters(vm).homed).sum::<u64>();
    let (shared, homed) = (manager.in_state(State::Shared), home());
    assert!(shared > SIZE / 2, "{shared}");
    let away = |vm: &PagedVm| vm.memory().pmap().in_state(State::Swapped).0;
    let before: Vec<_> = manager.vms.iter().map(|vm| (away(vm), counters(vm).evicted)).collect();
    manager.host.set_low(true);
    let at_home = |vm: &PagedVm| {
        vm.memory().charged().saturating_sub(Pages(vm.memory().tier().occupancy().frames))
    };
    for vm in &manager.vms {
        vm.memory().set_target(at_home(vm));
        vm.exchange_at(at_home(vm), manager.host.ledger.budget());
    }
    // All of their pages: each that is away comes for another.
    step(&vmms, 4);
    for (vm, (away, evicted)) in manager.vms.iter().zip(before) {
        let evicted = counters(vm).evicted - evicted;
        assert!(away > SIZE / 16 && evicted >= away, "{evicted} evicted for {away}");
    }
    assert_eq!((manager.in_state(State::Shared), home()), (shared, homed));
    manager.host.set_low(false);
    manager.settle(&vmms);
    manager.release();
}

/// Nobody tells it, and it is woken by none of its own pages.
#[test]
fn a_fault_that_waits_gets_what_another_vm_gives_up() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let manager = Manager::start(&vmms, dir.path(), SIZE + 64);
    manager.control.set(Settings { enabled: false, ..settings() });
    step(&vmms[..1], 3);
    let [first, second] = &manager.vms[..] else { panic!() };
    vmms[1].board.set(Cell::Go, 3);
    wait_for("a fault that waits", || {
        second.waiting() == 1 && manager.host.ledger.free().is_zero()
    });
    assert_ne!(vmms[1].board.get(Cell::Step), 3);
    first.set_evict_goal(Pages(SIZE));
    step(&vmms[1..], 3);
    // There is room for what both have once it is shared.
    wait_for("eviction", || first.evict_goal().is_zero());
    manager.control.set(settings());
    wait_for("sharing", || manager.in_state(State::Shared) >= SIZE);
    step(&vmms, 4);
    manager.settle(&vmms);
    manager.release();
}

#[test]
fn pages_that_are_protected_cease_to_be_when_sharing_is_switched_off() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("halves", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 3);
    // The half of each that is like no other is not written, and need not be read again.
    let protected = |vm: &PagedVm| {
        let is_protected = |p: &u64| vm.memory().is_unwritten(Ppn(*p));
        (0..SIZE).filter(is_protected).count() as u64
    };
    let all = |n: u64| manager.vms.iter().all(|vm| protected(vm) == n);
    wait_for("protection", || all(SIZE / 2));
    manager.control.set(Settings { enabled: false, ..settings() });
    wait_for("an end of it", || all(0));
    // Each of them is written by its guest without a fault.
    let faults = |vm: &PagedVm| vm.memory().counters.values().unwritten_faults;
    let before: Vec<u64> = manager.vms.iter().map(faults).collect();
    step(&vmms, 4);
    step(&vmms, 5);
    assert_eq!(manager.vms.iter().map(faults).collect::<Vec<_>>(), before);
    manager.control.set(settings());
    wait_for("protection again", || manager.vms.iter().all(|vm| protected(vm) > SIZE / 4));
    step(&vmms, 6);
    manager.settle(&vmms);
    manager.release();
}

/// Without memory for them, pages that come home are paid from what is set aside, and a VM that dies
/// then gives back what it had, and no more.
#[test]
fn a_vm_that_dies_while_it_owes_pages_leaves_exact_books() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 1);
    let manager = Manager::start(&vmms, dir.path(), SIZE + 64);
    step(&vmms, 3);
    wait_for("sharing", || manager.in_state(State::Shared) == SIZE);
    manager.settle(&vmms);
    manager.host.ledger.set_budget(manager.host.ledger.used());
    let memory = manager.vms[0].memory();
    let pages: Vec<Ppn> = (0..100).map(Ppn).collect();
    let home = memory.go_home(&pages).unwrap();
    assert_eq!((Pages(home as u64), memory.owed()), (MOVING, MOVING));
    assert_eq!(memory.go_home(&pages[50..]), Ok(0), "nothing is left to pay from");
    step(&vmms, 4);
    manager.release();
}

fn counts(manager: &Manager, vmms: &[Vmm], what: &str) {
    for (vm, vmm) in manager.vms.iter().zip(vmms) {
        let c = vm.memory().counters.values();
        println!(
            "{what}: {} accesses, {} discards; {} faults, {} shared, {} broken, {} home, {} evicted \
             ({} zero), {} swapped in",
            vmm.board.get(Cell::Accesses),
            vmm.board.get(Cell::Discards),
            c.faults,
            c.shares,
            c.breaks,
            c.homed,
            c.evicted,
            c.zero_dropped,
            c.swap_ins
        );
    }
}

fn finish(manager: Manager, vmms: &[Vmm], what: &str) {
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Stop, 1));
    let done = || vmms.iter().all(|vmm| vmm.board.get(Cell::Done) == THREADS);
    manager.drive(vmms, Duration::from_secs(60), done);
    assert!(done(), "a guest hangs: {:?}", manager.vms[0].health());
    for vmm in vmms {
        assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    }
    manager.settle(vmms);
    counts(&manager, vmms, what);
    for vm in &manager.vms {
        assert_eq!(vm.health(), Health::Well);
    }
    manager.release();
}

#[test]
fn guests_that_write_verify_and_give_up_the_same_pages_lose_nothing() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = torturers(2);
    let manager = Manager::start(&vmms, dir.path(), SIZE);
    manager.drive(&vmms, Duration::from_secs(soak_seconds()), || false);
    let c: Vec<_> = manager.vms.iter().map(|vm| vm.memory().counters.values()).collect();
    assert!(c.iter().all(|c| c.shares > 1000 && c.breaks > 100 && c.homed > 100), "{c:?}");
    finish(manager, &vmms, "torture");
}

/// The way to a VMM is lost in the midst of a change, again and again, and the same manager finds it again.
#[test]
fn ways_to_a_vmm_that_break_off_and_are_found_again_lose_no_page() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = torturers(2);
    let manager = Manager::start(&vmms, dir.path(), SIZE);
    let lead = |vm: &PagedVm, way: Box<dyn Remapper>| {
        let mappings = vm.memory().backend().mappings();
        let again = mappings.reconnect(way, Duration::from_secs(60), || Ok::<(), ()>(()));
        assert_eq!(again, Ok(Reconnected::Connected));
        vm.reconnected();
    };
    let way = |vmm: &Vmm, changes| Box::new(Breaking::new(vmm.link.try_clone().unwrap(), changes));
    let is_lost = |vm: &PagedVm| !vm.memory().backend().mappings().is_connected();
    let mut random = Random(0xb20c);
    for vm in &manager.vms {
        lead(vm, Box::new(Lost));
    }
    for round in 0..40 {
        for (vm, vmm) in manager.vms.iter().zip(&vmms) {
            lead(vm, way(vmm, random.below(40)));
        }
        let all_lost = || manager.vms.iter().all(is_lost);
        manager.drive(&vmms, Duration::from_secs(60), all_lost);
        assert!(all_lost(), "round {round}: nothing is mapped");
        let errors = vmms.iter().map(|vmm| vmm.board.get(Cell::Errors)).sum::<u64>();
        assert_eq!(errors, 0, "memory was corrupted, round {round}");
    }
    for (vm, vmm) in manager.vms.iter().zip(&vmms) {
        lead(vm, way(vmm, u64::MAX));
    }
    let shares = || manager.vms.iter().map(|vm| vm.memory().counters.values().shares).sum::<u64>();
    let before = shares();
    manager.drive(&vmms, Duration::from_secs(60), || shares() > before + 1000);
    assert!(shares() > before + 1000, "pages are shared no more");
    finish(manager, &vmms, "found again");
}

#[test]
fn managers_that_leave_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = torturers(2);
    let mut manager = Manager::start(&vmms, dir.path(), SIZE);
    for _ in 0..8 {
        manager.drive(&vmms, Duration::from_millis(150), || false);
        manager.vms.drain(..).for_each(PagedVm::leave);
        manager = Manager::take_over(&vmms, dir.path(), SIZE);
    }
    finish(manager, &vmms, "last manager");
}

/// A takeover that cannot be completed leaves books, domain and pages as they were for the next one.
#[test]
fn takeovers_that_are_undone_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 1);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 5);
    wait_for("homing", || manager.in_state(State::Resident) > 0);
    manager.vms.into_iter().for_each(PagedVm::leave);
    let manager = Manager::take_over_after(&vmms, dir.path(), ROOM + 64, 2);
    step(&vmms, 6);
    manager.settle(&vmms);
    manager.release();
}

/// It ran before, sharing nothing, and does so again.
#[test]
fn a_vm_for_which_its_domain_has_no_numbers_is_taken_over_all_the_same() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let manager = Manager::start(&vmms[..1], dir.path(), 2 * ROOM);
    let vm = manager.without_number(&vmms[1], 1, false);
    // What is only read is zeros, and costs nothing: that is its share thread's work.
    step(&vmms, 2);
    assert_eq!(vm.memory().charged(), Pages(0));
    step(&vmms, 3);
    assert_eq!(vm.memory().charged(), Pages(SIZE));
    vm.undo_take_over(None);
    let vm = manager.without_number(&vmms[1], 1, true);
    step(&vmms, 4);
    step(&vmms, 5);
    assert_eq!(vm.memory().pmap().in_state(State::Shared), Pages(0));
    assert!(vm.memory().membership().is_none());
    vm.leave();
    manager.vms.into_iter().for_each(PagedVm::leave);
}

/// Its pages leave the store first, by its own thread; who is called back before that stays.
#[test]
fn a_vm_moves_to_another_domain_with_all_it_wrote() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("steps", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 3);
    wait_for("sharing", || manager.in_state(State::Shared) == 2 * SIZE);
    let (path, host) = (dir.path().join("other"), manager.host.clone());
    let other = Arc::new(Domain::create(&path, "other", b"secret", host).unwrap());
    let view = || View::new(other.file().read_only().unwrap()).unwrap();
    let domain_of = |vm: &PagedVm| vm.memory().membership().unwrap().domain.name().to_owned();
    let store = view();
    // What cannot be booked is not done.
    let (refused, was_refused) = std::sync::mpsc::channel();
    assert!(!manager.vms[1].move_to(&other, move |_| refused.send(()).is_err()));
    was_refused.recv().unwrap();
    wait_for("an end of that", || !manager.vms[1].move_to(&other, |_| false));
    assert_ne!(domain_of(&manager.vms[1]), "other");
    manager.vms[1].stay();
    let switch = move |mappings: &Mappings| {
        mappings.set_store(store);
        true
    };
    assert!(!manager.vms[1].move_to(&other, switch));
    assert!(!manager.vms[0].move_to(&other, |_| panic!("it was called back")));
    manager.vms[0].stay();
    wait_for("the move", || domain_of(&manager.vms[1]) == "other");
    wait_for("sharing there", || other.stats().common == Pages(KINDS - 1));
    assert!(manager.vms[1].stay(), "nobody is told that it has moved");
    assert!(!manager.vms[1].stay());
    step(&vmms, 4);
    step(&vmms, 5);
    step(&vmms, 6);
    assert_eq!((manager.domain.members(), other.members()), (1, 1));
    manager.release();
    other.check([]).unwrap();
    assert_eq!(other.measured().pages(), Pages(0));
}

/// What is like nothing in the domain that a VM leaves, and so was passed over, is looked at where it goes.
#[test]
fn pages_of_a_vm_that_has_moved_are_all_known_where_it_went() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = vmms("halves", 2);
    let manager = Manager::start(&vmms, dir.path(), ROOM + 64);
    step(&vmms, 3);
    let memory = manager.vms[1].memory();
    let passed_over = || (0..SIZE).filter(|p| memory.is_unwritten(Ppn(*p))).count() as u64;
    wait_for("protection", || passed_over() == SIZE / 2);
    let (path, host) = (dir.path().join("other"), manager.host.clone());
    let other = Arc::new(Domain::create(&path, "other", b"secret", host).unwrap());
    let store = View::new(other.file().read_only().unwrap()).unwrap();
    let switch = move |mappings: &Mappings| {
        mappings.set_store(store);
        true
    };
    assert!(!manager.vms[1].move_to(&other, switch));
    assert!(memory.is_leaving());
    wait_for("the move", || !memory.is_leaving());
    assert!(manager.vms[1].stay());
    assert_eq!(manager.domain.stats().common, Pages(SIZE / 2), "the other VM's, as it was");
    wait_for("a look at all of it", || other.stats().hints == SIZE);
    step(&vmms, 4);
    manager.settle(&vmms);
    manager.release();
}

#[test]
fn a_killed_vmm_leaves_the_others_whole() {
    let Some(_alone) = alone() else { return };
    let (dir, mut vmms) = torturers(2);
    let mut manager = Manager::start(&vmms, dir.path(), SIZE);
    manager.drive(&vmms, Duration::from_millis(500), || false);
    let mut gone = vmms.pop().unwrap();
    gone.kill();
    // Nobody tells the pager for a while.
    for _ in 0..20 {
        let pages: Vec<Ppn> = (0..64).map(Ppn).collect();
        let _ = Examiner::default().examine(manager.vms[0].memory(), &pages, Marking::None);
    }
    manager.vms.pop().unwrap().release();
    assert_eq!(gone.measured(), Pages(0));
    manager.drive(&vmms, Duration::from_millis(300), || false);
    finish(manager, &vmms, "survivor");
}

/// A manager in a process of its own, to be killed.
#[test]
#[ignore = "the manager process of another test"]
fn manager_process() {
    let Some(uffd) = inherited("MANAGER_UFFD") else { return };
    end_on_panic();
    let of = |name: &str| inherited(name).unwrap();
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let dir = PathBuf::from(std::env::var("MANAGER_DIR").unwrap());
    let (ram, board, link) = (of("MANAGER_RAM"), of("MANAGER_BOARD"), of("MANAGER_LINK"));
    let (base, pid) = (HostAddr(number("MANAGER_BASE")), number("MANAGER_PID") as u32);
    let vmms = [Vmm::adopt(uffd, ram, board, link, pid, base, SIZE)];
    let manager = if dir.join("0/pmap").exists() {
        Manager::take_over(&vmms, dir.as_path(), SIZE / 2)
    } else {
        Manager::start(&vmms, dir.as_path(), SIZE / 2)
    };
    vmms[0].board.add(Cell::Step, 1);
    manager.drive(&vmms, Duration::from_secs(60), || false);
}

#[test]
fn killed_managers_are_followed_without_loss() {
    let Some(_alone) = alone() else { return };
    let (dir, vmms) = torturers(1);
    let vmm = &vmms[0];
    let kills = kill_managers(vmm, dir.path(), Duration::from_micros(150_000));
    let manager = Manager::take_over(&vmms, dir.path(), SIZE / 2);
    println!("{kills} managers killed, {} pages accessed", vmm.board.get(Cell::Accesses));
    finish(manager, &vmms, "last manager");
}
