//! A guest whose threads fault at the same time is served by several threads. Prints how fast; FAULT_THREADS,
//! GUEST_THREADS and EAGER (0 or 1) are for experiments.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/large_ram.rs"]
mod large_ram;
#[path = "support/vmm.rs"]
mod vmm;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{FaultThreads, Health, PagedVm, PagerConfig, VmFiles};
use ballast_pager::swap::SwapSpace;
use ballast_units::{Pages, Ppn};
use vmm::{Cell, Guest, Vmm, alone};

/// Of the VMM, 256 MiB; by regions of 2 MiB.
const SIZE: u64 = 1 << 16;
const REGION: u64 = 512;

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().unwrap())
}

#[test]
#[ignore = "the VMM process of the other test"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let threads = from_env("GUEST_THREADS", 8);
    std::thread::scope(|scope| {
        for t in 0..threads {
            let guest = &guest;
            scope.spawn(move || rounds(guest, t, threads));
        }
    });
    loop {
        std::thread::park();
    }
}

/// Step 1: writes the pages of its regions. Each step after that: checks and changes them.
fn rounds(guest: &Guest, thread: u64, threads: u64) {
    let mut step = 0;
    loop {
        while guest.board.get(Cell::Step) == step {
            std::thread::sleep(Duration::from_micros(200));
        }
        step += 1;
        for first in (0..guest.pages).step_by(REGION as usize).skip(thread as usize) {
            if first / REGION % threads != thread {
                continue;
            }
            for ppn in first..first + REGION {
                let (word, wanted) = (guest.word(ppn, (ppn % REGION) as usize), step - 1);
                // SAFETY: this thread is the only one that uses the page.
                if unsafe { word.read_volatile() } != wanted * (ppn + 1) {
                    guest.board.add(Cell::Errors, 1);
                }
                // SAFETY: as above.
                unsafe { word.write_volatile(step * (ppn + 1)) };
            }
        }
        guest.board.add(Cell::Done, 1);
    }
}

/// Lets the guest's threads do a step; how many faults were served by others than the VM's fault thread.
fn helped(vmm: &Vmm, vm: &PagedVm, step: u64) -> u64 {
    let threads = from_env("GUEST_THREADS", 8);
    let before = vm.memory().counters.values().helped;
    vmm.board.set(Cell::Step, step);
    let begun = Instant::now();
    vmm::wait_for("the guest's threads", || vmm.board.get(Cell::Done) == step * threads);
    let (took, now) = (begun.elapsed(), vm.memory().counters.values());
    println!("step {step}: {:.1} ms, {} helped", took.as_secs_f64() * 1e3, now.helped - before);
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    now.helped - before
}

fn evict_half(vm: &PagedVm) {
    vm.set_evict_goal(Pages(SIZE));
    let begun = Instant::now();
    while vm.memory().charged() > Pages(SIZE / 2) && begun.elapsed().as_secs() < 30 {
        std::thread::sleep(Duration::from_millis(1));
    }
    vm.set_evict_goal(Pages(0));
    assert!(vm.memory().charged() <= Pages(SIZE / 2), "{:?}", vm.memory().charged());
}

fn becomes_quiet(vm: &PagedVm) {
    let quiet = || {
        vm.memory().reconcile(Ppn(0), SIZE).1.map_err(|e| e.to_string())?;
        vm.memory().check_quiet()
    };
    let begun = Instant::now();
    while let Err(e) = quiet() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{e}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn threads_that_fault_together_are_served_together_and_lose_nothing() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = PagerConfig {
        large_pages: true,
        fault_threads: FaultThreads {
            most: from_env("FAULT_THREADS", 4) as usize,
            eager: from_env("EAGER", 1) != 0,
        },
        ..PagerConfig::default()
    };
    let overhead = config.overhead(Pages(SIZE));
    let host = Arc::new(Host::new(Ledger::new(Pages(2 * SIZE) + overhead, || {})));
    assert!(host.ledger.try_reserve(overhead));
    host.set_plenty(Pages(SIZE / 8));
    let files = VmFiles::new(
        dir.path(),
        SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap(),
    );
    let vmm = match large_ram::create(Pages(SIZE)) {
        Some(ram) => Vmm::start_with(ram, "", SIZE),
        None => Vmm::start("", SIZE),
    };
    let vm = PagedVm::start("t", config, files, vmm.guest_ram(), overhead, host.clone()).unwrap();
    vm.memory().let_pages_move(true);
    vmm.board.set(Cell::Go, 1);
    let first = helped(&vmm, &vm, 1);
    let large = vm.memory().regions().counts().fills;
    println!("{large} large pages");
    for _ in 0..3 {
        evict_half(&vm);
        let step = vmm.board.get(Cell::Step) + 1;
        helped(&vmm, &vm, step);
    }
    let all = vm.memory().counters.values().helped;
    if config.fault_threads.most > 1 && config.fault_threads.eager {
        assert!(all > 0 && (first > 0 || large == 0), "nobody helped");
    }
    becomes_quiet(&vm);
    assert_eq!(vm.health(), Health::Well);
    vm.release();
    assert_eq!(host.ledger.used(), Pages(0));
}
