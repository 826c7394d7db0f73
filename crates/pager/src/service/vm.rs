//! A paged VM: its memory, its files and its threads.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_uffd::Event;
use ballast_units::{Bytes, Pages, Ppn};

use super::around::Around;
use super::fault::FaultService;
use super::latency::FaultTimes;
use super::priority::Urgency;
use super::reads::Reads;
use super::reclaim::Reclaim;
use super::share::ShareService;
use super::slotless::Stubborn;
use crate::guest_ram::{GuestRam, LARGE_PAGE};
use crate::host::Host;
use crate::memory::{MOVING, Memory, RecoverError, Recovered};
use crate::pmap::{Pmap, PmapError};
use crate::replacement::{Random, Replacement};
use crate::sharing::control::Control;
use crate::sharing::{Domain, DomainError};
use crate::stage::{Stage, StageError, StageLayout};
use crate::swap::{Place, SwapError, SwapSpace};
use crate::tier::{Compression, Tier};
use crate::word::State;

/// Sizes of a VM's pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagerConfig {
    /// Pages handed out around a fault on an untouched page while memory is plentiful; a power of
    /// two, 1 for none.
    pub fault_around: Pages,
    /// Of a VM that is started. One that is taken over has the stage that it was started with.
    pub stage: StageLayout,
    /// Whether RAM is allocated in large pages, where its file and its mapping allow it; the stage has a hold
    /// more for each page of one then. Of a VM that is started, too.
    pub large_pages: bool,
    /// May differ from one manager to the next.
    pub compression: Compression,
    /// Seed of the random replacement.
    pub seed: u64,
}

impl Default for PagerConfig {
    fn default() -> PagerConfig {
        PagerConfig {
            fault_around: Pages(16),
            stage: StageLayout { cluster: 32, clusters: 4, holds: 128 },
            large_pages: false,
            compression: Compression::default(),
            seed: 0,
        }
    }
}

impl PagerConfig {
    /// Of the stage that is made for a VM.
    fn stage_layout(&self) -> StageLayout {
        let holds = if self.large_pages { LARGE_PAGE.0 } else { 0 };
        StageLayout { holds: self.stage.holds + holds, ..self.stage }
    }

    /// Machine memory that the pager itself takes for a VM of `size`: pmap, stage, buffers, what is
    /// set aside for pages on their way home, the share table if all pages are in it, and the books of
    /// the compressed tier (whose frames are charged one by one).
    pub fn overhead(&self, size: Pages) -> Pages {
        let table = Bytes(size.0 * 20).pages_ceil();
        Bytes(size.0 * 8).pages_ceil()
            + Pages(1)
            + self.stage_layout().file_pages()
            + Reads::PAGES
            + Around::PAGES
            + MOVING
            + table
            + self.compression.overhead(size)
    }
}

/// The files of a VM's pager.
pub struct VmFiles {
    pub pmap: PathBuf,
    pub stage: PathBuf,
    pub compressed: PathBuf,
    pub swap: SwapSpace,
}

impl VmFiles {
    /// pmap, stage and compressed pages in the VM's run folder, which is on a tmpfs; the swap files on
    /// disks.
    pub fn new(run: &Path, swap: SwapSpace) -> VmFiles {
        VmFiles {
            pmap: run.join("pmap"),
            stage: run.join("stage"),
            compressed: run.join("compressed"),
            swap,
        }
    }

    /// Whether this manager understands what another one left in a VM's run folder: to be asked before
    /// anything is touched. The swap files have no version: what is in them is for the pmap to say.
    pub fn verify(run: &Path) -> Result<(), StartError> {
        // The stage is made after the pmap. Without it the VM has not mapped its RAM yet.
        if run.join("stage").exists() {
            Pmap::verify(&run.join("pmap"))?;
            Stage::verify(&run.join("stage"))?;
        }
        Ok(())
    }
}

/// Why a VM's pager did not start. Nothing of it is left behind.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Pmap(#[from] PmapError),
    #[error(transparent)]
    Swap(#[from] SwapError),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("compressed pages {}: {source}", .path.display())]
    Tier { path: PathBuf, source: std::io::Error },
    /// Caused by the VMM, or by whoever described its RAM.
    #[error("the RAM mapping cannot be paged: {0}")]
    Layout(String),
    #[error("{0}")]
    Recover(#[from] RecoverError),
    #[error("sharing: {0}")]
    Domain(#[from] DomainError),
    #[error("starting the pager's threads: {0}")]
    Threads(std::io::Error),
}

/// Whether a VM's pager does its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Well,
    /// The last trouble, and how many there were. No page is lost; pages may be waiting.
    Ill {
        last: String,
        times: u32,
    },
    /// Pages that the guest waits for cannot be read, or are not what was written: the first of them, how
    /// many there are, and what is wrong with it. They are tried again until they can be.
    Unreadable {
        page: Ppn,
        pages: usize,
        what: String,
    },
}

/// A sample of active memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Samples that have begun so far, this one included.
    pub begun: u64,
    /// Pages in it.
    pub pages: u32,
    /// What `CounterValues::touched` was when it began: what is above belongs to it.
    pub base: u64,
}

/// What the threads of a VM share.
pub(super) struct Shared {
    pub name: String,
    pub memory: Arc<Memory<GuestRam>>,
    pub swap: SwapSpace,
    pub wake_fd: OwnedFd,
    pub evict_goal: AtomicU64,
    /// Charged pages that eviction leaves.
    pub evict_leave: AtomicU64,
    /// Faults waiting now.
    pub waiting: AtomicU64,
    pub fault_times: FaultTimes,
    stop: AtomicBool,
    ill: Mutex<Option<String>>,
    ill_times: AtomicU32,
    /// Pages that are waited for and cannot be read, and why.
    unreadable: Mutex<BTreeMap<Ppn, String>>,
    has_unreadable: AtomicBool,
    /// Nothing can be written to the swap space for now.
    swap_stuck: AtomicBool,
    pub stubborn: Stubborn,
    work: Mutex<Work>,
    work_ready: Condvar,
    sample_size: AtomicU32,
    sample_base: AtomicU64,
    samples_begun: AtomicU64,
    /// Whether pages may be looked for that others have too.
    pub may_share: AtomicBool,
    /// Whether its pages are to leave the store.
    pub leaving: AtomicBool,
    /// Mappings of the VMM, when they were last counted.
    pub mappings: AtomicU64,
    share_note: Mutex<Option<String>>,
    share_work: Mutex<bool>,
    share_ready: Condvar,
}

#[derive(Default)]
struct Work {
    ready: bool,
    sample: Option<Vec<Ppn>>,
}

impl Shared {
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub fn set_ill(&self, what: String) {
        let times = self.ill_times.fetch_add(1, Ordering::Relaxed);
        // The first ones and then powers of two: a disk that fails does not fill the log as well.
        if times < 4 || times.is_power_of_two() {
            tracing::error!(vm = %self.name, "{what}");
        }
        *self.ill.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
    }

    pub fn set_unreadable(&self, ppn: Ppn, what: String) {
        let mut pages = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        if !pages.contains_key(&ppn) {
            tracing::error!(vm = %self.name, "{ppn}: {what}; the guest waits for it");
        }
        pages.insert(ppn, what);
        self.has_unreadable.store(true, Ordering::Relaxed);
    }
    /// The page has been read, or is not needed any more.
    pub fn set_readable(&self, ppn: Ppn) {
        if !self.has_unreadable.load(Ordering::Relaxed) {
            return;
        }
        let mut pages = self.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        if pages.remove(&ppn).is_some() {
            tracing::info!(vm = %self.name, "{ppn} can be read again, or is not needed any more");
        }
        self.has_unreadable.store(!pages.is_empty(), Ordering::Relaxed);
    }

    pub fn set_swap_stuck(&self, stuck: bool) {
        self.swap_stuck.store(stuck, Ordering::Relaxed);
    }

    pub fn has_sample_request(&self) -> bool {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).sample.is_some()
    }

    pub fn take_sample_request(&self) -> Option<Vec<Ppn>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).sample.take()
    }

    pub fn sample_began(&self, pages: u32, base: u64) {
        self.sample_size.store(pages, Ordering::Relaxed);
        self.sample_base.store(base, Ordering::Relaxed);
        self.samples_begun.fetch_add(1, Ordering::Release);
    }

    pub fn evict_done(&self, n: u64) {
        let _ = self.evict_goal.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |goal| {
            Some(goal.saturating_sub(n))
        });
    }

    pub fn wait_for_work(&self, at_most: Option<Duration>) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        while !work.ready && !self.is_stopping() {
            match at_most {
                None => {
                    work = self.work_ready.wait(work).unwrap_or_else(PoisonError::into_inner);
                }
                Some(limit) => {
                    work = self
                        .work_ready
                        .wait_timeout(work, limit)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                    break;
                }
            }
        }
        work.ready = false;
    }

    /// Lets the share thread look at what there is to do.
    pub fn signal_share(&self) {
        *self.share_work.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.share_ready.notify_all();
    }

    pub fn wait_for_share_work(&self, at_most: Duration) {
        let work = self.share_work.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut work, _) = self
            .share_ready
            .wait_timeout_while(work, at_most, |ready| !*ready && !self.is_stopping())
            .unwrap_or_else(PoisonError::into_inner);
        *work = false;
    }

    pub fn set_share_note(&self, note: Option<String>) {
        *self.share_note.lock().unwrap_or_else(PoisonError::into_inner) = note;
    }

    fn signal(&self, change: impl FnOnce(&mut Work)) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut work);
        work.ready = true;
        self.work_ready.notify_all();
    }
}

/// A VM whose every page the pager hands out.
pub struct PagedVm {
    shared: Arc<Shared>,
    /// pmap, stage and compressed pages.
    files: [PathBuf; 3],
    overhead: Pages,
    threads: Vec<JoinHandle<()>>,
}

impl PagedVm {
    /// Takes charge of a VM that has just mapped its RAM. `overhead` pages must be reserved in the
    /// host's ledger already; they are released with the VM. The swap files have been made for it.
    pub fn start(
        name: &str,
        config: PagerConfig,
        files: VmFiles,
        ram: GuestRam,
        overhead: Pages,
        host: Arc<Host>,
    ) -> Result<PagedVm, StartError> {
        // Each file is removed again if a later step fails; one that was there before never is: it
        // may be all that is left of a running VM's memory.
        let mut made = Undo::default();
        files.swap.places().iter().for_each(|place| made.add(&place.path));
        ram.check().map_err(StartError::Layout)?;
        let pmap = Pmap::create(&files.pmap, ram.layout().len)?;
        made.add(&files.pmap);
        let stage = Stage::create(&files.stage, config.stage_layout())?;
        let ram = if config.large_pages { ram.with_large_pages() } else { ram };
        made.add(&files.stage);
        let tier = open_tier(&files, ram.layout().len, config.compression)?;
        made.add(&files.compressed);
        for path in files.swap.indirect() {
            tracing::warn!(
                vm = name,
                "{}: no O_DIRECT there: swapped pages may stay in the host's \
                page cache, outside the budget",
                path.display()
            );
        }
        let slots = files.swap.slots();
        let memory =
            Memory::new(pmap, ram, stage, slots, host, config.fault_around).with_tier(tier);
        let mut vm = PagedVm::assemble(name, Arc::new(memory), files, overhead)?;
        vm.spawn_faults()?;
        vm.spawn_reclaim(config.seed, &Recovered::default())?;
        made.keep();
        Ok(vm)
    }

    /// Takes over a VM that a former manager left running: fault service first, for discards that
    /// nobody read stand in the way of everything else.
    pub fn take_over(
        name: &str,
        config: PagerConfig,
        files: VmFiles,
        ram: GuestRam,
        overhead: Pages,
        host: Arc<Host>,
        domain: Option<&Arc<Domain<GuestRam>>>,
    ) -> Result<(PagedVm, Recovered), StartError> {
        ram.check().map_err(StartError::Layout)?;
        let pmap = Pmap::open(&files.pmap, ram.layout().len)?;
        let stage = Stage::open(&files.stage)?;
        // Without room to break them, there were none.
        let large = stage.layout().can_break();
        let ram = if large { ram.with_large_pages() } else { ram };
        let slots = files.swap.slots();
        let tier = open_tier(&files, ram.layout().len, config.compression)?;
        let memory = Memory::new(pmap, ram, stage, slots, host, config.fault_around);
        let memory = Arc::new(memory.with_tier(tier));
        if let Some(domain) = domain {
            domain.join(&memory)?;
        }
        let mark = memory.mark();
        let discards = std::cell::RefCell::new(Vec::new());
        let drain = || drain_events(&memory, &mut discards.borrow_mut());
        drain();
        let recovered = memory.recover(&drain)?;
        if cfg!(debug_assertions) {
            memory.check_quiet().map_err(RecoverError::Unsound)?;
        }
        let mut vm = PagedVm::assemble(name, memory, files, overhead)?;
        let ready = discards.take().into_iter().try_for_each(|(first, n)| {
            vm.memory().discard(first, n, mark).1.map_err(RecoverError::Memory)
        });
        let ready = ready
            .map_err(StartError::from)
            .and_then(|()| vm.spawn_faults())
            .and_then(|()| vm.spawn_reclaim(config.seed, &recovered));
        if let Err(e) = ready {
            // The next attempt books these pages again.
            vm.stop_threads();
            vm.memory().host().ledger.release(vm.memory().charged());
            return Err(e);
        }
        Ok((vm, recovered))
    }

    fn assemble(
        name: &str,
        memory: Arc<Memory<GuestRam>>,
        files: VmFiles,
        overhead: Pages,
    ) -> Result<PagedVm, StartError> {
        use rustix::event::{EventfdFlags, eventfd};
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| StartError::Threads(e.into()))?;
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            memory,
            swap: files.swap,
            wake_fd,
            evict_goal: AtomicU64::new(0),
            evict_leave: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            fault_times: FaultTimes::default(),
            stop: AtomicBool::new(false),
            ill: Mutex::new(None),
            ill_times: AtomicU32::new(0),
            unreadable: Mutex::new(BTreeMap::new()),
            has_unreadable: AtomicBool::new(false),
            swap_stuck: AtomicBool::new(false),
            stubborn: Stubborn::default(),
            work: Mutex::new(Work::default()),
            work_ready: Condvar::new(),
            sample_size: AtomicU32::new(0),
            sample_base: AtomicU64::new(0),
            samples_begun: AtomicU64::new(0),
            may_share: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            mappings: AtomicU64::new(0),
            share_note: Mutex::new(None),
            share_work: Mutex::new(false),
            share_ready: Condvar::new(),
        });
        let files = [files.pmap, files.stage, files.compressed];
        Ok(PagedVm { shared, files, overhead, threads: Vec::new() })
    }

    fn spawn_faults(&mut self) -> Result<(), StartError> {
        let service = FaultService::new(self.shared.clone()).map_err(StartError::Threads)?;
        self.spawn("fault", Urgency::Guest, move || service.run())
    }

    fn spawn_reclaim(&mut self, seed: u64, found: &Recovered) -> Result<(), StartError> {
        let replacement: Box<dyn Replacement> = Box::new(Random::seeded(seed));
        let reclaim = Reclaim::new(self.shared.clone(), replacement, found);
        self.spawn("reclaim", Urgency::Host, move || reclaim.run())
    }

    fn spawn(
        &mut self,
        what: &str,
        urgency: Urgency,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let body = move || {
            if let Err(e) = urgency.apply() {
                tracing::debug!("a thread runs with the usual priority: {e}");
            }
            body();
        };
        // 15 characters are all that the kernel keeps of a thread's name.
        let name: String = format!("{what}-{}", self.shared.name).chars().take(15).collect();
        let thread =
            std::thread::Builder::new().name(name).spawn(body).map_err(StartError::Threads)?;
        self.threads.push(thread);
        Ok(())
    }

    pub fn memory(&self) -> &Memory<GuestRam> {
        &self.shared.memory
    }
    pub fn overhead(&self) -> Pages {
        self.overhead
    }
    pub fn swap_len(&self) -> Pages {
        self.shared.swap.len()
    }
    /// Pages that can be evicted now: none while nothing can be written.
    pub fn swap_room(&self) -> Pages {
        if self.shared.swap_stuck.load(Ordering::Relaxed) {
            return Pages::ZERO;
        }
        self.memory().swap_free()
    }
    /// Pages by which eviction can shrink the VM without any room in swap: each frame that its tier may
    /// still take holds at least two pages. None while it is known that they do not compress.
    pub fn spare_room(&self) -> Pages {
        let memory = self.memory();
        if memory.tier().settings().algorithm.is_none() || self.shared.stubborn.is_believed() {
            return Pages::ZERO;
        }
        memory.tier().frames_left()
    }
    /// Its swap files, those of the highest priority first, and how many slots of each are used.
    pub fn swap_places(&self) -> Vec<(Place, Pages)> {
        let used = |(i, place)| (place, self.memory().swap_used_of(i));
        self.shared.swap.places().into_iter().enumerate().map(used).collect()
    }
    /// How long faults took to be served, from when they were read, without those that waited.
    pub fn fault_times(&self) -> &FaultTimes {
        &self.shared.fault_times
    }
    /// Faults that wait at this moment.
    pub fn waiting(&self) -> u64 {
        self.shared.waiting.load(Ordering::Relaxed)
    }
    /// Pages that eviction has yet to deliver.
    pub fn evict_goal(&self) -> Pages {
        Pages(self.shared.evict_goal.load(Ordering::Relaxed))
    }

    /// Asks for `n` pages to be evicted from now on; replaces what was asked before.
    pub fn set_evict_goal(&self, n: Pages) {
        self.evict_down_to(n, Pages::ZERO);
    }

    /// The same, ending early where no more than `leave` pages are charged: what a balloon delivers
    /// meanwhile is not taken twice.
    pub fn evict_down_to(&self, n: Pages, leave: Pages) {
        self.shared.evict_leave.store(leave.0, Ordering::Relaxed);
        self.shared.evict_goal.store(n.0, Ordering::Relaxed);
        // Always: the thread may rest before its goal, from what it could not do.
        if n.0 > 0 {
            self.shared.signal(|_| {});
        }
    }

    /// Lets faults that wait for memory try again now.
    pub fn memory_freed(&self) {
        if self.waiting() > 0 {
            self.wake_faults();
        }
    }

    /// Ends the current sample and begins one of these pages.
    pub fn begin_sample(&self, ppns: Vec<Ppn>) {
        self.shared.signal(|work| work.sample = Some(ppns));
    }
    /// The current sample.
    pub fn sample(&self) -> Sample {
        Sample {
            begun: self.shared.samples_begun.load(Ordering::Acquire),
            pages: self.shared.sample_size.load(Ordering::Relaxed),
            base: self.shared.sample_base.load(Ordering::Relaxed),
        }
    }

    /// Whether [`Health::Unreadable`]: cheap to ask.
    pub fn is_unreadable(&self) -> bool {
        self.shared.has_unreadable.load(Ordering::Relaxed)
    }
    pub fn health(&self) -> Health {
        let unreadable = self.shared.unreadable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((page, what)) = unreadable.first_key_value() {
            return Health::Unreadable { page: *page, pages: unreadable.len(), what: what.clone() };
        }
        drop(unreadable);
        match &*self.shared.ill.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Health::Well,
            Some(last) => Health::Ill {
                last: last.clone(),
                times: self.shared.ill_times.load(Ordering::Relaxed),
            },
        }
    }

    /// Joins a domain, and looks for pages to share in it as `control` allows, once `set_may_share`
    /// allows it too. The way to the shim must be connected, and the domain's store set.
    pub fn share_in(
        &mut self,
        domain: &Arc<Domain<GuestRam>>,
        control: Arc<Control>,
        seed: u64,
    ) -> Result<(), StartError> {
        if self.memory().membership().is_none() {
            domain.join(&self.shared.memory)?;
        }
        let service = ShareService::new(self.shared.clone(), control, seed);
        self.spawn("share", Urgency::Nobody, move || service.run())
    }

    /// Its part of the common pages: a page that n share counts 1/n for each (vSphere's "consumed").
    pub fn shared_part(&self) -> Pages {
        let memory = self.memory();
        let Some(member) = memory.membership() else { return Pages::ZERO };
        let (shared, common) = member.domain.counts();
        let own = memory.pmap().in_state(State::Shared) + memory.pmap().in_state(State::Broken);
        Pages((own.0 * common.0).div_ceil(shared.0.max(1)).min(own.0))
    }

    /// Pages that name a page of the store.
    pub fn in_store(&self) -> Pages {
        let pmap = self.memory().pmap();
        pmap.in_state(State::Shared) + pmap.in_state(State::Broken)
    }
    /// Whether its pages leave the store, as fast as memory allows.
    pub fn set_leaving(&self, leaving: bool) {
        self.shared.leaving.store(leaving, Ordering::Relaxed);
        self.shared.signal_share();
    }
    /// Moves it from one domain to another if none of its pages is in the store; answers whether.
    /// `switch` is called when nothing of it can be on its way into either.
    pub fn change_domain(
        &self,
        domain: &Arc<Domain<GuestRam>>,
        switch: impl FnOnce(),
    ) -> Result<bool, DomainError> {
        self.shared.memory.change_domain(domain, switch)
    }

    pub fn set_may_share(&self, may: bool) {
        if self.shared.may_share.swap(may, Ordering::Relaxed) != may {
            self.shared.signal_share();
        }
    }
    /// Why pages are not looked for at the moment, if they are not.
    pub fn share_note(&self) -> Option<String> {
        self.shared.share_note.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// Mappings of the VMM, when they were last counted.
    pub fn mappings(&self) -> u64 {
        self.shared.mappings.load(Ordering::Relaxed)
    }

    /// Its mappings are gone with the VMM: so are its references.
    fn leave_domain(&self) {
        let memory = self.memory();
        let Some(member) = memory.membership() else { return };
        for ppn in memory.pmap().known() {
            if let Some(page) = memory.pmap().load(ppn).store_page() {
                member.domain.release(page);
            }
        }
        member.domain.leave(memory);
    }

    fn wake_faults(&self) {
        let _ = rustix::io::write(&self.shared.wake_fd, &1u64.to_ne_bytes());
    }

    fn stop_threads(&mut self) {
        // Other VMs' share threads may be at its pages too.
        self.shared.memory.close();
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake_faults();
        self.shared.signal(|_| {});
        self.shared.signal_share();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(vm = %self.shared.name, "a pager thread had panicked");
            }
        }
    }

    /// The VMM process is gone: gives back all its memory and swap, and removes its files.
    pub fn release(mut self) {
        self.stop_threads();
        self.leave_domain();
        if let Err(e) = self.memory().backend().release_all() {
            tracing::warn!(vm = %self.shared.name, "freeing its RAM file: {e}");
        }
        let pages = self.memory().charged() - self.memory().owed() + self.overhead;
        self.memory().host().ledger.release(pages);
        for path in &self.files {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!("removing {}: {e}", path.display());
                }
                _ => {}
            }
        }
        self.shared.swap.remove();
    }

    /// The manager goes, the VM stays: stops the threads between two transitions and leaves
    /// everything for the next manager.
    pub fn leave(mut self) {
        self.stop_threads();
    }
}

impl Drop for PagedVm {
    fn drop(&mut self) {
        self.stop_threads();
    }
}

/// Reads what the kernel has to tell before the fault service runs. Discards are kept for after the
/// recovery; faults are dropped, which is why recovery wakes all waiters at its end.
fn drain_events(memory: &Memory<GuestRam>, discards: &mut Vec<(Ppn, u64)>) {
    let mut events = Vec::new();
    while matches!(memory.backend().uffd().read_events(&mut events), Ok(1..)) {
        for event in events.drain(..) {
            if let Event::Remove { start, end } = event {
                discards.extend(memory.backend().layout().pages_within(start, end));
            }
        }
    }
}

fn open_tier(files: &VmFiles, size: Pages, settings: Compression) -> Result<Tier, StartError> {
    Tier::open(&files.compressed, size, settings)
        .map_err(|source| StartError::Tier { path: files.compressed.clone(), source })
}

/// Files to remove unless all goes well.
#[derive(Default)]
struct Undo {
    paths: Vec<PathBuf>,
}

impl Undo {
    fn add(&mut self, path: &Path) {
        self.paths.push(path.to_owned());
    }
    fn keep(mut self) {
        self.paths.clear();
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for path in &self.paths {
            if let Err(e) = std::fs::remove_file(path) {
                tracing::warn!("removing {}: {e}", path.display());
            }
        }
    }
}
