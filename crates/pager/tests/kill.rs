//! The manager is killed again and again, at random moments: under load, in the middle of recovery, in
//! the middle of its own checks. Two VMMs share pages, swap, and give pages up; their threads
//! verify every byte that they read, and every manager that comes checks slots, references and books
//! before it goes on.
//!
//! BALLAST_KILLS managers are killed (200), at moments drawn from BALLAST_KILL_SEED (the time).
//! Needs the right to create userfaultfds; skipped, loudly, without (an error where
//! BALLAST_REQUIRE_PRIVILEGED=1).
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/manager.rs"]
mod manager;
#[path = "support/remapper.rs"]
mod remapper;
#[path = "support/torture.rs"]
mod torture;
#[path = "support/vmm.rs"]
mod vmm;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ballast_pager::service::Health;
use ballast_pager::word::{State, Word};
use ballast_units::HostAddr;
use manager::{Folders, Manager, SIZE, settings};
use torture::THREADS;
use vmm::{Cell, Guest, Random, Vmm, again, alone, end_on_panic, inherited, wait_for};

const VMS: usize = 2;
/// Far less than the VMs would like: pages must leave.
const ROOM: u64 = 3 * SIZE / 4;
/// A manager that nobody kills ends by itself.
const LONGEST: Duration = Duration::from_secs(120);
/// How far a manager has come.
const BEGUN: u64 = 1;
const RECOVERED: u64 = 2;
const CHECKED: u64 = 3;

#[test]
#[ignore = "the VMM process of the other test"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let seed: u64 = guest.role.parse().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| remapper::serve(&guest));
        for t in 0..THREADS {
            let guest = &guest;
            scope.spawn(move || torture::run(guest, t, seed));
        }
        // The memory stays until the test has looked at it, and kills.
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}

/// A manager in a process of its own, to be killed.
#[test]
#[ignore = "the manager process of the other test"]
fn manager_process() {
    if inherited("MANAGER_IS_ONE").is_none() {
        return;
    }
    end_on_panic();
    let text = |name: &str, n: usize| std::env::var(format!("{name}_{n}")).unwrap();
    let vmms: Vec<Vmm> = (0..VMS)
        .map(|n| {
            let of = |name: &str| inherited(&format!("{name}_{n}")).unwrap();
            let base = HostAddr(text("MANAGER_BASE", n).parse().unwrap());
            let pid = text("MANAGER_PID", n).parse().unwrap();
            let (uffd, ram) = (of("MANAGER_UFFD"), of("MANAGER_RAM"));
            Vmm::adopt(uffd, ram, of("MANAGER_BOARD"), of("MANAGER_LINK"), pid, base, SIZE)
        })
        .collect();
    let folder = |name: &str| PathBuf::from(std::env::var(name).unwrap());
    let folders = Folders { run: folder("MANAGER_RUN"), swap: folder("MANAGER_SWAP") };
    let board = &vmms[0].board;
    board.set(Cell::Phase, BEGUN);
    let mut manager = if folders.run.join("0/pmap").exists() {
        Manager::take_over(&vmms, folders, ROOM)
    } else {
        Manager::start(&vmms, folders, ROOM)
    };
    manager.seed = std::env::var("MANAGER_SEED").unwrap().parse().unwrap();
    board.set(Cell::Phase, RECOVERED);
    check(&manager, &vmms);
    board.set(Cell::Phase, CHECKED);
    manager.drive(&vmms, LONGEST, || false);
}

/// Guests wait; then everything is where the books say, and nothing is lost or leaked.
fn check(manager: &Manager, vmms: &[Vmm]) {
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Pause, 1));
    let paused = || vmms.iter().all(|vmm| vmm.board.get(Cell::Paused) == THREADS);
    manager.drive(vmms, LONGEST, paused);
    assert!(paused(), "a guest hangs: {:?}", health_of(manager));
    manager.settle(vmms);
    manager.control.set(settings());
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Pause, 0));
}

/// How many pages are shared, and how many are out of memory.
fn away(manager: &Manager) -> [u64; 2] {
    let pmaps = manager.vms.iter().map(|vm| vm.memory().pmap());
    let words: Vec<Word> = pmaps.flat_map(|pmap| pmap.known().map(|p| pmap.load(p))).collect();
    let count = |is: fn(State) -> bool| words.iter().filter(|word| is(word.state())).count() as u64;
    [count(|s| s == State::Shared), count(|s| matches!(s, State::Swapped | State::Compressed))]
}

fn health_of(manager: &Manager) -> Vec<Health> {
    manager.vms.iter().map(|vm| vm.health()).collect()
}

fn from_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: '{text}' is not a number")))
}

struct Loop<'a> {
    vmms: &'a [Vmm],
    run: &'a Path,
    swap: &'a Path,
    random: Random,
    /// How long the last recovery, and the last check, took.
    recovery: Duration,
    checking: Duration,
    by_phase: [u64; 3],
}

impl Loop<'_> {
    fn board(&self) -> &vmm::Board {
        &self.vmms[0].board
    }

    fn spawn(&mut self) -> Child {
        self.board().set(Cell::Phase, 0);
        let mut env = vec![
            ("MANAGER_RUN".to_owned(), self.run.display().to_string()),
            ("MANAGER_SWAP".to_owned(), self.swap.display().to_string()),
            ("MANAGER_SEED".to_owned(), (1 + self.random.below(1 << 40)).to_string()),
        ];
        let telltale = self.vmms[0].board_fd.try_clone().unwrap();
        let mut fds: Vec<(String, BorrowedFd<'_>)> =
            vec![("MANAGER_IS_ONE".to_owned(), telltale.as_fd())];
        for (n, vmm) in self.vmms.iter().enumerate() {
            for (name, fd) in [
                ("UFFD", vmm.uffd.as_fd()),
                ("RAM", vmm.ram.as_fd()),
                ("BOARD", vmm.board_fd.as_fd()),
                ("LINK", vmm.link.as_fd()),
            ] {
                fds.push((format!("MANAGER_{name}_{n}"), fd));
            }
            env.push((format!("MANAGER_BASE_{n}"), vmm.layout.base.0.to_string()));
            env.push((format!("MANAGER_PID_{n}"), vmm.pid.to_string()));
        }
        let fds: Vec<_> = fds.iter().map(|(name, fd)| (name.as_str(), *fd)).collect();
        let env: Vec<_> = env.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
        again("manager_process", &fds, &env)
    }

    /// Until the manager has come so far. It must not end by itself.
    fn wait(&self, child: &mut Child, phase: u64) -> Duration {
        let begun = Instant::now();
        while self.board().get(Cell::Phase) < phase {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("a manager ended by itself: {status}");
            }
            assert!(begun.elapsed() < LONGEST, "a manager does not come to phase {phase}");
            std::thread::sleep(Duration::from_micros(200));
        }
        begun.elapsed()
    }

    fn pause_below(&mut self, longest: Duration) {
        let us = self.random.below(longest.as_micros() as u64 + 1);
        std::thread::sleep(Duration::from_micros(us));
    }

    fn kill_one(&mut self, first: bool) {
        let mut child = self.spawn();
        // The first must have begun all VMs: a VMM whose start was broken off is not one yet.
        let when = if first { 9 } else { self.random.below(10) };
        self.wait(&mut child, BEGUN);
        let phase = match when {
            0..3 => {
                self.pause_below(self.recovery * 5 / 4);
                0
            }
            3..5 => {
                self.wait(&mut child, RECOVERED);
                self.pause_below(self.checking * 5 / 4);
                1
            }
            _ => {
                self.recovery = self.wait(&mut child, RECOVERED);
                self.checking = self.wait(&mut child, CHECKED);
                self.pause_below(Duration::from_millis(60));
                2
            }
        };
        self.by_phase[phase] += 1;
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "a manager ended by itself: {status}");
    }

    fn errors(&self) -> u64 {
        self.vmms.iter().map(|vmm| vmm.board.get(Cell::Errors)).sum()
    }
    fn verified(&self) -> u64 {
        self.vmms.iter().map(|vmm| vmm.board.get(Cell::Accesses)).sum()
    }
}

#[test]
fn managers_killed_at_random_moments_lose_and_leak_no_page() {
    let Some(_alone) = alone() else { return };
    let kills = from_environment("BALLAST_KILLS").unwrap_or(200);
    let seed = from_environment("BALLAST_KILL_SEED").unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into()
    });
    // Whatever goes wrong from here on, the seed is told.
    println!("BALLAST_KILL_SEED={seed}");
    let run = tempfile::tempdir_in("/dev/shm").unwrap();
    let swap = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let vmms: Vec<Vmm> = (0..VMS)
        .map(|n| Vmm::start(&(seed.wrapping_add(1 + n as u64)).to_string(), SIZE))
        .collect();
    let mut all = Loop {
        vmms: &vmms,
        run: run.path(),
        swap: swap.path(),
        random: Random(seed | 1),
        recovery: Duration::from_millis(20),
        checking: Duration::from_millis(20),
        by_phase: [0; 3],
    };
    let begun = Instant::now();
    let mut told = begun;
    for kill in 0..kills {
        all.kill_one(kill == 0);
        assert_eq!(all.errors(), 0, "memory was corrupted: kill {kill}, seed {seed}");
        if told.elapsed() > Duration::from_secs(10) {
            told = Instant::now();
            println!("{} of {kills} killed, {} pages verified", kill + 1, all.verified());
        }
    }
    // The last one stays, and sees that the guests end well.
    let folders = Folders { run: run.path().to_owned(), swap: swap.path().to_owned() };
    let manager = Manager::take_over(&vmms, folders, ROOM);
    let away = away(&manager);
    check(&manager, &vmms);
    vmms.iter().for_each(|vmm| vmm.board.set(Cell::Stop, 1));
    let done = || vmms.iter().all(|vmm| vmm.board.get(Cell::Done) == THREADS);
    manager.drive(&vmms, LONGEST, done);
    assert!(done(), "a guest hangs, seed {seed}");
    assert_eq!(all.errors(), 0, "memory was corrupted, seed {seed}");
    manager.settle(&vmms);
    assert!(manager.vms.iter().all(|vm| vm.health() == Health::Well));
    let phases = all.by_phase;
    let [recovering, checking, loaded] = phases;
    let given_up = vmms.iter().map(|vmm| vmm.board.get(Cell::Discards)).sum::<u64>();
    println!(
        "KILLED {kills} managers in {:.0} s ({loaded} under load, {recovering} in recovery, \
         {checking} in their checks); {} pages verified whole, {given_up} given up; the last found {} shared, \
         {} out of memory; seed {seed}",
        begun.elapsed().as_secs_f64(),
        all.verified(),
        away[0],
        away[1],
    );
    // Else nothing was at stake.
    assert!(all.verified() > 0 && given_up > 0, "seed {seed}");
    assert!(kills < 100 || away.iter().chain(&phases).all(|n| *n > 0), "seed {seed}");
    manager.release();
    wait_for("files to go", || std::fs::read_dir(swap.path()).unwrap().count() == 0);
}
