//! A VM over the double, moved by one thread: page-state machine, fault order, a swap file in
//! memory, and pmap and stage in files that outlive a manager.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_compress::{Algorithm, Compressor};
use ballast_pager::backend::{Backend as _, MemError, PageBuf};
use ballast_pager::host::Host;
use ballast_pager::memory::{
    Access, Broke, Compressed, Left, Memory, NotBack, NotEvicted, RecoverError, Recovered,
};
use ballast_pager::pmap::Pmap;
use ballast_pager::service::around::Around;
use ballast_pager::service::serve::{Landed, Serve, Task};
use ballast_pager::sharing::Domain;
use ballast_pager::stage::{Stage, StageLayout};
use ballast_pager::swap::Stored;
use ballast_pager::tier::{Compression, Tier};
use ballast_pager::word::{State, Word};
use ballast_units::{Pages, Ppn};

use super::evict::{Evicted, evict};
use super::site::Site;
use super::{Double, Ram, host};

pub const LAYOUT: StageLayout = StageLayout { cluster: 4, clusters: 1, holds: 2 };

/// Half of a VM's pages may be frames of its tier.
pub const TIER: Compression = Compression {
    algorithm: Some(Algorithm::Lz4),
    percent: 50,
    adaptive: false,
    same_filled: true,
};
/// A page full of a number with this in it has to be compressed: it has no place in a pmap word.
pub const LARGE: u64 = 1 << 60;

pub struct Vm {
    dir: tempfile::TempDir,
    pub ram: Ram,
    pub host: Arc<Host>,
    pub memory: Arc<Memory<Ram>>,
    pub serve: Serve,
    pub around_faults: Around,
    pub swap: HashMap<u64, Box<PageBuf>>,
    swap_len: Pages,
    /// Stage slot to page, of the one cluster.
    pub cluster: BTreeMap<u64, Ppn>,
    pub troubles: Vec<String>,
    around: Pages,
}

impl Vm {
    pub fn new(pages: u64, budget: u64, swap: u64, around: u64) -> Vm {
        let host = host(budget);
        Vm::over(Double::ram(pages, host.clone()), host, pages, swap, around)
    }

    /// One whose RAM is allocated in large pages of `large` while more than `plenty` is free.
    pub fn with_large(pages: u64, budget: u64, large: u64, plenty: u64) -> Vm {
        Vm::with_large_around(pages, budget, large, plenty, 1)
    }

    /// The same, and of the small pages `around` around a touch.
    pub fn with_large_around(pages: u64, budget: u64, large: u64, plenty: u64, around: u64) -> Vm {
        let host = host(budget);
        host.set_plenty(Pages(plenty));
        let ram = Double::ram(pages, host.clone());
        ram.0.set_large(large);
        Vm::over(ram, host, pages, pages, around)
    }

    /// One whose run folder is on a file system of the caller's.
    pub fn run_in(folder: &Path, pages: u64, budget: u64) -> Vm {
        let (dir, host) = (tempfile::tempdir_in(folder).unwrap(), host(budget));
        Vm::run(dir, Double::ram(pages, host.clone()), host, pages, 0, 1)
    }

    /// One that shares pages with the others of its site.
    pub fn at(site: &Site, pages: u64, swap: u64, around: u64) -> Vm {
        let ram = Double::on(&site.machine, pages);
        let vm = Vm::over(ram, site.host.clone(), pages, swap, around);
        site.domain.join(&vm.memory).unwrap();
        vm
    }

    /// One that shares pages, and whose RAM is allocated in large pages of `large` while memory is plentiful.
    pub fn at_with_large(site: &Site, pages: u64, large: u64, around: u64) -> Vm {
        let ram = Double::on(&site.machine, pages);
        ram.0.set_large(large);
        let vm = Vm::over(ram, site.host.clone(), pages, pages, around);
        site.domain.join(&vm.memory).unwrap();
        vm
    }

    fn over(ram: Ram, host: Arc<Host>, pages: u64, swap: u64, around: u64) -> Vm {
        Vm::run(tempfile::tempdir_in("/dev/shm").unwrap(), ram, host, pages, swap, around)
    }

    fn run(
        dir: tempfile::TempDir,
        ram: Ram,
        host: Arc<Host>,
        pages: u64,
        swap: u64,
        around: u64,
    ) -> Vm {
        let pmap = Pmap::create(&dir.path().join("pmap"), Pages(pages)).unwrap();
        // A hold for each page of a large page, beside the sample's.
        let holds = LAYOUT.holds + if ram.large() > 1 { ram.large() } else { 0 };
        let layout = StageLayout { holds, ..LAYOUT };
        let stage = Stage::create(&dir.path().join("stage"), layout).unwrap();
        let (swap_len, around) = (Pages(swap), Pages(around));
        let tier = Tier::open(&dir.path().join("compressed"), Pages(pages), TIER).unwrap();
        let memory = Memory::new(pmap, ram.clone(), stage, swap_len, host.clone(), around);
        let memory = Arc::new(memory.with_tier(tier));
        Vm {
            dir,
            ram,
            host,
            memory,
            serve: Serve::default(),
            around_faults: Around::default(),
            swap: HashMap::new(),
            swap_len,
            cluster: BTreeMap::new(),
            troubles: Vec::new(),
            around,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn state(&self, ppn: u64) -> State {
        self.memory.pmap().load(Ppn(ppn)).state()
    }

    /// Takes events, serves, and does all I/O, until nothing changes. Err if the manager died.
    pub fn pump(&mut self) -> Result<(), MemError> {
        let mark = self.memory.mark();
        let notices = self.ram.0.read_events();
        let mut tasks = Vec::new();
        self.serve.take(&self.memory, &notices, mark, &mut tasks, |_, _| false);
        if !self.ram.0.is_dead() {
            self.serve.retry(&self.memory, &mut tasks);
        }
        self.work(tasks)
    }

    pub fn fault(&mut self, ppn: u64, access: Access) -> Result<(), MemError> {
        let mut tasks = Vec::new();
        self.serve.fault(&self.memory, Ppn(ppn), access, &mut tasks);
        self.work(tasks)
    }

    fn work(&mut self, mut tasks: Vec<Task>) -> Result<(), MemError> {
        while let Some(task) = tasks.pop() {
            match task {
                Task::Trouble(what) if what.contains("crash injected") => {
                    return Err(MemError::Crash);
                }
                Task::Trouble(what) | Task::Damaged(_, what) => self.troubles.push(what),
                Task::Came(ppn) => {
                    // All of the swap file was read ahead.
                    let (pending, swap) = (self.serve.pending(), &self.swap);
                    let may = |ppn| !pending.discard_outstanding(ppn);
                    let kept = |_, stored: Stored| swap.get(&stored.slot.0).map(|b| &**b);
                    match self.around_faults.came(&self.memory, ppn, may, kept) {
                        Err(MemError::Crash) => return Err(MemError::Crash),
                        Err(e) => self.troubles.push(e.to_string()),
                        Ok(_) => {}
                    }
                }
                Task::Read(ppn, stored) => {
                    let bytes = self.swap[&stored.slot.0].clone();
                    assert!(stored.sum.fits(&bytes), "{ppn}: {stored:?}");
                    let mut tries = 0;
                    while self.serve.arrived(&self.memory, ppn, Some(&bytes), &mut tasks)
                        != Landed::Done
                    {
                        let crashed =
                            |t: &Task| matches!(t, Task::Trouble(w) if w.contains("crash"));
                        if tasks.iter().any(crashed) {
                            return Err(MemError::Crash);
                        }
                        tries += 1;
                        assert!(tries < 10, "{ppn} does not land");
                    }
                }
            }
        }
        Ok(())
    }

    /// One access of the guest, however long it takes; makes room when memory is short.
    pub fn access(&mut self, ppn: u64, write: Option<u64>) -> u64 {
        for _ in 0..100 {
            match self.ram.0.try_access(ppn, write) {
                Ok(seen) => return seen,
                Err(access) => {
                    self.pump().unwrap();
                    self.fault(ppn, access).unwrap();
                    self.map_zeros().unwrap();
                    if self.host.ledger.free().is_zero() {
                        self.evict_any(ppn);
                    }
                }
            }
        }
        panic!("ppn {ppn}: {:?} is never served", self.memory.pmap().load(Ppn(ppn)));
    }

    /// What the share thread does where the guest reads what it never wrote.
    pub fn map_zeros(&mut self) -> Result<(), MemError> {
        for ppn in self.memory.take_reads_of_untouched() {
            self.memory.map_zeros(ppn, 2)?;
        }
        Ok(())
    }

    fn evict_any(&mut self, but: u64) {
        let others = (0..self.memory.pmap().len().0).filter(|&p| p != but);
        let away = |p: &u64| matches!(self.state(*p), State::Shared | State::Broken);
        if !others.clone().any(|p| self.state(p) == State::Resident) {
            let away: Vec<Ppn> = others.clone().filter(away).map(Ppn).take(1).collect();
            let _ = self.memory.go_home(&away);
        }
        if let Some(p) = others.into_iter().find(|&p| self.state(p) == State::Resident) {
            let _ = self.evict(p);
        } else if let Some(p) =
            (0..self.memory.pmap().len().0).find(|&p| self.state(p) == State::Held)
        {
            let _ = self.memory.unsample(Ppn(p));
        } else {
            // What is left is compressed.
            self.write_back();
        }
    }

    /// Evicts into the cluster, which is written when full.
    pub fn evict(&mut self, ppn: u64) -> Result<Evicted, NotEvicted> {
        if self.memory.regions().is_large(Ppn(ppn)) {
            self.break_large(ppn).map_err(NotEvicted::Failed)?;
        }
        if self.cluster.len() as u64 == LAYOUT.cluster {
            self.write_cluster();
        }
        let slot = (0..LAYOUT.cluster).find(|s| !self.cluster.contains_key(s));
        let Some(slot) = slot else { return Err(NotEvicted::NotEligible) };
        let evicted = evict(&self.memory, Ppn(ppn), slot)?;
        if evicted == Evicted::Staged {
            self.cluster.insert(slot, Ppn(ppn));
        }
        Ok(evicted)
    }

    /// Evicts neighbours together, into an empty cluster: `n` is no more than that has slots.
    pub fn evict_run(&mut self, first: u64, n: u64) -> Result<Vec<Left>, NotEvicted> {
        self.write_cluster();
        let left = self.memory.evict_run(Ppn(first), n, 0)?;
        self.cluster.extend(left.iter().filter_map(|page| Some((page.slot?, page.ppn))));
        Ok(left)
    }

    /// Breaks a large page, and has all of it back home.
    pub fn break_large(&mut self, ppn: u64) -> Result<Broke, MemError> {
        let broke = self.memory.break_large(Ppn(ppn))?;
        self.memory.bring_back()?;
        Ok(broke)
    }

    /// Evicts a page and compresses it; it stays in the cluster if that cannot be.
    pub fn compress(&mut self, ppn: u64) -> Result<Option<Compressed>, NotEvicted> {
        if self.evict(ppn)? == Evicted::Zero {
            return Ok(None);
        }
        let slot = *self.cluster.iter().find(|(_, p)| p.0 == ppn).unwrap().0;
        let mut compressor = Compressor::new(Algorithm::Lz4).unwrap();
        let done = self.memory.compress(Ppn(ppn), slot, Some(&mut compressor));
        if matches!(done, Compressed::Filled | Compressed::Stored { .. }) {
            self.cluster.remove(&slot);
        }
        Ok(Some(done))
    }

    /// Moves the page that was compressed longest ago into the cluster.
    pub fn write_back(&mut self) -> Option<Ppn> {
        if self.cluster.len() as u64 == LAYOUT.cluster {
            self.write_cluster();
        }
        let slot = (0..LAYOUT.cluster).find(|s| !self.cluster.contains_key(s))?;
        let place = *self.memory.tier().oldest(1).first()?;
        match self.memory.write_back(place, slot) {
            Ok(ppn) => {
                self.cluster.insert(slot, ppn);
                Some(ppn)
            }
            // A read that nobody ends holds it busy.
            Err(NotBack::Left) => None,
            Err(NotBack::Damaged(ppn, e)) => panic!("{ppn}: {e}"),
        }
    }

    pub fn write_cluster(&mut self) {
        for (slot, ppn) in std::mem::take(&mut self.cluster) {
            let Some((to, _)) = self.memory.take_slots(1) else {
                self.cluster.insert(slot, ppn);
                continue;
            };
            // SAFETY: one thread; the slot is not reused before `written`.
            let bytes = Box::new(*unsafe { self.memory.stage().page(slot) });
            let stored = Stored::new(to, &bytes);
            self.swap.insert(to.0, bytes);
            assert!(self.memory.written(ppn, slot, stored));
        }
    }

    /// The manager is gone, in whatever way; another comes. It may die on the way too.
    pub fn take_over(&mut self) -> Result<Recovered, RecoverError> {
        self.ram.0.revive();
        self.retry_take_over()
    }

    /// As `take_over`, with a crash or failure that was set up before.
    pub fn retry_take_over(&mut self) -> Result<Recovered, RecoverError> {
        self.host.ledger.release(self.host.ledger.used());
        self.adopt(None)
    }

    /// As `take_over`, of all VMs of a site.
    pub fn take_over_all(site: &mut Site, vms: &mut [Vm]) -> Result<(), RecoverError> {
        for vm in vms.iter() {
            vm.ram.0.revive();
        }
        Vm::retry_take_over_all(site, vms)
    }
    pub fn retry_take_over_all(site: &mut Site, vms: &mut [Vm]) -> Result<(), RecoverError> {
        site.recover(vms.iter().flat_map(|vm| vm.words()).collect::<Vec<_>>());
        for vm in vms.iter_mut() {
            vm.adopt(Some(&site.domain))?;
        }
        Ok(())
    }

    fn adopt(&mut self, domain: Option<&Arc<Domain<Ram>>>) -> Result<Recovered, RecoverError> {
        self.serve = Serve::default();
        self.around_faults = Around::default();
        self.cluster.clear();
        let pmap = Pmap::open(&self.path("pmap"), self.memory.pmap().len()).unwrap();
        let stage = Stage::open(&self.path("stage")).unwrap();
        let (ram, host) = (self.ram.clone(), self.host.clone());
        let tier = Tier::open(&self.path("compressed"), self.memory.pmap().len(), TIER).unwrap();
        let memory = Memory::new(pmap, ram, stage, self.swap_len, host, self.around);
        self.memory = Arc::new(memory.with_tier(tier));
        if let Some(domain) = domain {
            domain.join(&self.memory).unwrap();
        }
        let mut discards = Vec::new();
        let mark = self.memory.mark();
        let cell = std::cell::RefCell::new(&mut discards);
        let drain = || {
            for notice in self.ram.0.read_events() {
                if let ballast_pager::service::serve::Notice::Discard(first, n) = notice {
                    cell.borrow_mut().push((first, n));
                }
            }
        };
        drain();
        let found = self.memory.recover(&drain, None)?;
        self.ram.0.recovered();
        for (first, n) in discards {
            self.memory.discard(first, n, mark).1?;
        }
        self.cluster = found.staged.iter().map(|&(ppn, slot)| (slot, ppn)).collect();
        Ok(found)
    }

    pub fn words(&self) -> Vec<Word> {
        (0..self.memory.pmap().len().0).map(|p| self.memory.pmap().load(Ppn(p))).collect()
    }

    /// Every invariant, of the machine and between it and the double.
    pub fn check(&self) {
        assert_eq!(self.host.ledger.used(), self.memory.charged());
        self.check_pages();
    }

    /// `check_all` of the only VM of a site.
    pub fn check_shared(&self, site: &Site) {
        Vm::check_all(site, std::slice::from_ref(self));
    }

    /// `check` of all VMs of a site, and of what they have in common.
    pub fn check_all(site: &Site, vms: &[Vm]) {
        let mut booked = site.reserve() + site.domain.stats().common;
        for vm in vms {
            booked += vm.memory.charged() - vm.memory.owed();
            vm.check_pages();
        }
        site.check(vms.iter().flat_map(|vm| vm.words()));
        assert_eq!(site.host.ledger.used(), booked);
    }

    fn check_pages(&self) {
        self.memory.check().unwrap();
        let held = self.memory.pmap().in_state(State::Held).0;
        let present = self.ram.0.present();
        assert!(
            self.memory.charged().0 >= present + held,
            "{present} present and {held} held, {} charged",
            self.memory.charged().0
        );
        for p in 0..self.memory.pmap().len().0 {
            assert!(
                !self.ram.0.is_part_of_large(p) || self.memory.regions().is_large(Ppn(p)),
                "ppn {p} is a part of a large page, and not known to be"
            );
        }
        super::site::check_places(&self.memory, &self.ram);
    }
}
