//! A manager that is just enough: a store that its VMs share, their pagers, and a policy that has pages
//! leave, be sampled and be shared as fast as it goes.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_pager::advance::{self, Advance};
use ballast_pager::guest_ram::GuestRam;
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::pmap::Pmap;
use ballast_pager::service::{Inherited, PagedVm, PagerConfig, VmFiles};
use ballast_pager::sharing::Domain;
use ballast_pager::sharing::control::{Control, Settings};
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::sharing::limit::Limits;
use ballast_pager::swap::SwapSpace;
use ballast_pager::word::{State, Word};
use ballast_units::{Pages, Ppn};

use super::remapper;
use super::vmm::{Cell, Random, Vmm};

/// Pages of a VM.
pub const SIZE: u64 = 2048;
/// Room for two of them.
pub const ROOM: u64 = 2 * SIZE;

pub struct Manager {
    pub host: Arc<Host>,
    pub domain: Arc<Domain<GuestRam>>,
    pub control: Arc<Control>,
    pub vms: Vec<PagedVm>,
    folders: Folders,
    /// Of what is sampled.
    pub seed: u64,
}

pub fn overhead() -> Pages {
    PagerConfig::default().overhead(Pages(SIZE))
}

/// As fast as it can be.
pub fn settings() -> Settings {
    let limits = Limits { pages_per_s: 1e9, cores: 64.0 };
    let (scan_time, rehome_after) = (Duration::from_millis(500), Duration::from_millis(20));
    Settings { host: limits, vm: limits, scan_time, rehome_after, ..Settings::default() }
}

/// Where managers keep their state: one after another, the same.
#[derive(Clone, Debug)]
pub struct Folders {
    /// On a tmpfs.
    pub run: PathBuf,
    pub swap: PathBuf,
}

impl From<&Path> for Folders {
    fn from(both: &Path) -> Folders {
        Folders { run: both.to_owned(), swap: both.to_owned() }
    }
}

impl Folders {
    fn own(&self, n: usize) -> PathBuf {
        self.run.join(n.to_string())
    }
    fn swap(&self, n: usize) -> PathBuf {
        self.swap.join(format!("{n}.swap"))
    }
    fn new_files(&self, n: usize) -> VmFiles {
        std::fs::create_dir(self.own(n)).unwrap();
        VmFiles::new(&self.own(n), SwapSpace::create_at(&self.swap(n), Pages(SIZE)).unwrap())
    }
    fn old_files(&self, n: usize) -> VmFiles {
        VmFiles::new(&self.own(n), SwapSpace::open_at(&self.swap(n)).unwrap())
    }
}

impl Manager {
    /// Of a host with room for `room` pages besides overhead.
    pub fn start(vmms: &[Vmm], folders: impl Into<Folders>, room: u64) -> Manager {
        let (host, folders) = (Manager::host(vmms.len() as u64, room), folders.into());
        let domain =
            Domain::create(&folders.run.join("store"), "salt", b"secret", host.clone()).unwrap();
        let control = Arc::new(Control::new(settings()));
        let domain = Arc::new(domain);
        let mut manager = Manager { host, domain, control, vms: Vec::new(), folders, seed: 77 };
        for (n, vmm) in vmms.iter().enumerate() {
            let (files, host) = (manager.folders.new_files(n), manager.host.clone());
            let config = PagerConfig::default();
            // It answers from here on, and its faults wait.
            vmm.board.set(Cell::Go, 1);
            let ram = remapper::connected(vmm, &manager.folders.run, manager.domain.file());
            let vm = PagedVm::start("t", config, files, ram, overhead(), host).unwrap();
            manager.share(vm, n);
        }
        manager
    }

    pub fn take_over(vmms: &[Vmm], folders: impl Into<Folders>, room: u64) -> Manager {
        Manager::take_over_after(vmms, folders, room, 0)
    }

    /// Each VM is taken over only after `undone` takeovers that could not be completed.
    pub fn take_over_after(
        vmms: &[Vmm],
        folders: impl Into<Folders>,
        room: u64,
        undone: usize,
    ) -> Manager {
        let (host, folders) = (Manager::host(vmms.len() as u64, room), folders.into());
        let mut words: Vec<Word> = Vec::new();
        for n in 0..vmms.len() {
            let pmap = Pmap::open(&folders.own(n).join("pmap"), Pages(SIZE)).unwrap();
            words.extend((0..SIZE).map(|p| pmap.load(Ppn(p))));
        }
        let store = folders.run.join("store");
        let domain = Domain::recover(&store, "salt", b"secret", host.clone(), words).unwrap();
        let control = Arc::new(Control::new(settings()));
        let domain = Arc::new(domain);
        let mut manager = Manager { host, domain, control, vms: Vec::new(), folders, seed: 77 };
        // Booked for all before the first is taken over, as a manager does it.
        let pmaps: Vec<PathBuf> =
            (0..vmms.len()).map(|n| manager.folders.own(n).join("pmap")).collect();
        let held = |n: usize| advance::held(&pmaps[n]).unwrap();
        let advances: Vec<Advance> =
            (0..vmms.len()).map(|n| Advance::book(manager.host.clone(), held(n))).collect();
        for (n, vmm) in vmms.iter().enumerate() {
            let take = || {
                let (files, host) = (manager.folders.old_files(n), manager.host.clone());
                let ram = remapper::connected(vmm, &manager.folders.run, manager.domain.file());
                let config = PagerConfig::default();
                let domain = Some(&manager.domain);
                let inherited = Inherited { domain, advance: Some(&advances[n]) };
                PagedVm::take_over("t", config, files, ram, overhead(), host, inherited).unwrap().0
            };
            for _ in 0..undone {
                // A page that was on its way home gives back the common one that it was.
                let own = || manager.host.ledger.used() - manager.domain.stats().common;
                let before = own();
                let vm = take();
                assert!(vm.memory().charged() > Pages(0));
                assert_eq!(manager.domain.members(), n + 1);
                // Nothing is anybody else's in between.
                vm.undo_take_over(Some(&advances[n]));
                assert_eq!(own(), before);
                assert_eq!(advances[n].pages(), held(n));
                assert_eq!(manager.domain.members(), n);
            }
            let vm = take();
            manager.share(vm, n);
        }
        manager
    }

    fn host(vms: u64, room: u64) -> Arc<Host> {
        let all = Pages(overhead().0 * vms);
        let host = Arc::new(Host::new(Ledger::new(Pages(room) + all, || {})));
        assert!(host.ledger.try_reserve(all));
        host.set_plenty(Pages(room / 8));
        host
    }

    fn share(&mut self, mut vm: PagedVm, n: usize) {
        vm.share_in(&self.domain, self.control.clone(), n as u64 + 1).unwrap();
        vm.let_pages_move(true);
        vm.set_may_share(true);
        self.vms.push(vm);
    }

    /// The n-th VM where the domain has no number left: it starts, or is taken over (`again`), and shares nothing.
    pub fn without_number(&self, vmm: &Vmm, n: usize, again: bool) -> PagedVm {
        self.domain.fill();
        // From then on it answers.
        vmm.board.add(Cell::Go, u64::from(!again));
        let ram = remapper::connected(vmm, &self.folders.run, self.domain.file());
        let (config, host) = (PagerConfig::default(), self.host.clone());
        let mut vm = if again {
            let inherited = Inherited { domain: Some(&self.domain), advance: None };
            let files = self.folders.old_files(n);
            PagedVm::take_over("t", config, files, ram, overhead(), host, inherited).unwrap().0
        } else {
            assert!(host.ledger.try_reserve(overhead()));
            let files = self.folders.new_files(n);
            PagedVm::start("t", config, files, ram, overhead(), host).unwrap()
        };
        let refused = vm.share_in(&self.domain, self.control.clone(), 9).unwrap_err();
        assert!(refused.to_string().contains("together"), "{refused}");
        vm.let_pages_move(true);
        vm.set_may_share(true);
        vm
    }

    /// Looks for equal pages flat out, evicts, samples and brings pages home, until `done`.
    pub fn drive(&self, vmms: &[Vmm], most: Duration, done: impl Fn() -> bool) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for vm in &self.vms {
                let stop = &stop;
                scope.spawn(move || {
                    let (mut examiner, mut first) = (Examiner::default(), 0);
                    while !stop.load(Ordering::Relaxed) {
                        let pages: Vec<Ppn> = (first..first + 64).map(Ppn).collect();
                        let marking = [Marking::None, Marking::All][(first / 64 % 2) as usize];
                        examiner.examine(vm.memory(), &pages, marking).unwrap();
                        // What the look before protected ceases to be.
                        vm.memory().lift_unwritten(pages[0], 16).unwrap();
                        first = (first + 64) % SIZE;
                        std::thread::yield_now();
                    }
                });
            }
            let mut random = Random(self.seed);
            let begun = Instant::now();
            for turn in 0u64.. {
                if done() || begun.elapsed() > most {
                    break;
                }
                for vm in &self.vms {
                    if turn % 8 == 0 {
                        vm.begin_sample((0..20).map(|_| Ppn(random.below(SIZE))).collect());
                    }
                    let free = self.host.ledger.free().0;
                    vm.set_evict_goal(Pages((ROOM / 16).saturating_sub(free).max(turn % 3)));
                    vm.memory_freed();
                }
                self.check_kernel(vmms);
                std::thread::sleep(Duration::from_millis(1));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    /// What the kernel counts is never more than the books say. Copies are in the VMMs, uncounted.
    fn check_kernel(&self, vmms: &[Vmm]) {
        let homes: u64 = vmms.iter().map(|vmm| vmm.measured().0).sum();
        let present = homes + self.domain.measured().pages().0;
        assert!(present <= self.host.ledger.budget().0, "{present} pages present");
    }

    pub fn words(&self) -> Vec<Word> {
        let pmaps = self.vms.iter().map(|vm| vm.memory().pmap());
        pmaps.flat_map(|pmap| (0..SIZE).map(|p| pmap.load(Ppn(p)))).collect()
    }

    pub fn in_state(&self, state: State) -> u64 {
        self.vms.iter().map(|vm| vm.memory().pmap().in_state(state).0).sum()
    }

    /// Waits until nothing moves, then checks everything.
    pub fn settle(&self, vmms: &[Vmm]) {
        self.control.set(Settings { enabled: false, ..settings() });
        for vm in &self.vms {
            vm.set_evict_goal(Pages(0));
            vm.begin_sample(Vec::new());
        }
        let begun = Instant::now();
        while let Err(e) = self.quiet(vmms) {
            assert!(begun.elapsed() < Duration::from_secs(60), "not quiet: {e}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn quiet(&self, vmms: &[Vmm]) -> Result<(), String> {
        let mut booked = Pages(overhead().0 * self.vms.len() as u64) + self.domain.stats().common;
        for (vm, vmm) in self.vms.iter().zip(vmms) {
            let memory = vm.memory();
            memory.reconcile(Ppn(0), SIZE).1.map_err(|e| e.to_string())?;
            memory.check_quiet()?;
            let held = memory.pmap().in_state(State::Held);
            let broken = memory.pmap().in_state(State::Broken);
            let frames = Pages(memory.tier().occupancy().frames);
            if vmm.measured() + held + broken + frames != memory.charged() {
                return Err(format!(
                    "{:?} at home, {held:?} held, {broken:?} broken, {frames:?} frames, {:?} charged",
                    vmm.measured(),
                    memory.charged()
                ));
            }
            booked += memory.charged() - memory.owed();
        }
        self.domain.check(self.words())?;
        if self.domain.measured().pages() != self.domain.stats().common {
            return Err(format!("{:?} in the store", self.domain.measured().pages()));
        }
        if booked != self.host.ledger.used() {
            return Err(format!("{booked:?} booked, {:?} used", self.host.ledger.used()));
        }
        Ok(())
    }

    pub fn release(self) {
        let (host, domain) = (self.host.clone(), self.domain.clone());
        self.vms.into_iter().for_each(PagedVm::release);
        domain.check([]).unwrap();
        assert_eq!((domain.measured().pages(), host.ledger.used()), (Pages(0), Pages(0)));
    }
}
