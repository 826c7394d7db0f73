//! A paged VM: its memory, its files and its threads.

mod domain;
mod takeover;

pub use takeover::Inherited;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_uffd::UffdError;
use ballast_units::{Bytes, Pages, Ppn};

pub(super) use self::domain::DomainChange;
use super::around::Around;
use super::crew::{Crew, FaultThreads};
use super::fault::FaultService;
use super::latency::FaultTimes;
use super::priority::Urgency;
use super::reads::Reads;
use super::reclaim::Reclaim;
use super::shared::{AT_HOME, EXCHANGED, HELD_TOGETHER, Health, Sample, Shared};
use crate::clock::Clock;
use crate::guest_ram::{GuestRam, LARGE_PAGE};
use crate::host::Host;
use crate::mapped_file::is_begun;
use crate::memory::{Departures, MOVING, Mark, Memory, RecoverError, Recovered, Unbooked};
use crate::pmap::{Pmap, PmapError};
use crate::replacement::{Random, Replacement};
use crate::run_files::{COMPRESSED, PMAP, STAGE};
use crate::sharing::DomainError;
use crate::sharing::examine::Examiner;
use crate::stage::{Stage, StageError, StageLayout};
use crate::swap::{Place, SwapError, SwapSpace};
use crate::tier::{Compression, Tier};

/// After this time without an answer to a write, its disk is taken not to give one.
const NO_ANSWER: Duration = Duration::from_secs(10);

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
    /// Of this manager.
    pub fault_threads: FaultThreads,
    /// Seed of the random replacement.
    pub seed: u64,
    /// Whether a VM that is taken over is looked through once it is recovered, and refused if anything about
    /// it is not sound.
    pub check: bool,
}

/// In the name of the thread that evicts.
const RECLAIM: &str = "reclaim";

impl Default for PagerConfig {
    fn default() -> PagerConfig {
        PagerConfig {
            fault_around: Pages(16),
            stage: StageLayout { cluster: 32, clusters: 4, holds: 128 },
            large_pages: false,
            compression: Compression::default(),
            fault_threads: FaultThreads::default(),
            seed: 0,
            check: cfg!(debug_assertions),
        }
    }
}

impl PagerConfig {
    /// Of the stage that is made for a VM.
    fn stage_layout(&self) -> StageLayout {
        let holds = if self.large_pages { LARGE_PAGE.0 } else { 0 };
        StageLayout { holds: self.stage.holds + holds, ..self.stage }
    }

    /// Machine memory that the pager itself takes for a VM of `size`: pmap, stage, buffers, the record of
    /// departures, what is set aside for pages on their way home, the share table if all pages are in it, hints for replacement, and the
    /// books of the compressed tier (whose frames are charged one by one).
    pub fn overhead(&self, size: Pages) -> Pages {
        let table = Bytes(size.0 * 20).pages_ceil();
        // A bit in each of seven sets, a byte and three bits for each block, and places in the queue of those on probation.
        let hints = Bytes(size.0 * 2).pages_ceil();
        Bytes(size.0 * 8).pages_ceil()
            + Pages(1)
            + self.stage_layout().file_pages()
            + Reads::PAGES
            + Around::PAGES
            + Departures::PAGES
            + MOVING
            // Of the share thread, and of the reclaim thread.
            + Examiner::PAGES
            + Examiner::PAGES
            + table
            + hints
            + self.compression.overhead(size)
    }
}

/// The files of a VM's pager.
pub struct VmFiles {
    /// See [`crate::pmap`].
    pub pmap: PathBuf,
    /// See [`crate::stage`].
    pub stage: PathBuf,
    /// See [`crate::tier`].
    pub compressed: PathBuf,
    /// Its swap files, made or opened already.
    pub swap: SwapSpace,
}

impl VmFiles {
    /// pmap, stage and compressed pages in the VM's run folder, which is on a tmpfs; the swap files on
    /// disks.
    pub fn new(run: &Path, swap: SwapSpace) -> VmFiles {
        VmFiles {
            pmap: run.join(PMAP),
            stage: run.join(STAGE),
            compressed: run.join(COMPRESSED),
            swap,
        }
    }

    /// Whether this manager understands what another one left in a VM's run folder: to be asked before
    /// anything is touched. The swap files have no version: what is in them is for the pmap to say.
    ///
    /// # Errors
    /// A file cannot be read, is damaged, or is of a newer manager.
    pub fn verify(run: &Path) -> Result<(), StartError> {
        // The stage is made after the pmap. Without it, or with one that nothing was written into (as managers
        // left that died over making it under its name), the VM has not mapped its RAM yet.
        let stage = run.join(STAGE);
        let begun = stage.exists()
            && is_begun(&stage).map_err(|source| StageError::Io { path: stage.clone(), source })?;
        if begun {
            Pmap::verify(&run.join(PMAP))?;
            Stage::verify(&stage)?;
        }
        Ok(())
    }
}

/// Why a VM's pager did not start. Nothing of it is left behind.
#[allow(missing_docs, reason = "the messages say it")]
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
    /// It had large pages, and whether it has is not known now: as small ones they would be lost in parts.
    #[error("whether its RAM has large pages: {0}")]
    LargePages(std::io::Error),
}

impl StartError {
    /// Whether a newer manager wrote what this one does not know: nothing of its may be touched.
    pub fn is_newer(&self) -> bool {
        matches!(
            self,
            StartError::Pmap(PmapError::Version { .. })
                | StartError::Stage(StageError::Version { .. })
        )
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
    ///
    /// # Errors
    /// The layout cannot be, a file is there already or cannot be made, or a thread cannot be started. No file is left that was
    /// made.
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
        let pmap = Pmap::create(&files.pmap, ram.layout().len())?;
        made.add(&files.pmap);
        let stage = Stage::create(&files.stage, config.stage_layout())?;
        // Where it cannot be told, small ones do for one that begins.
        let large = config.large_pages && ram.has_large_pages().unwrap_or(false);
        let ram = if large { ram.with_large_pages() } else { ram };
        made.add(&files.stage);
        let tier = open_tier(&files, ram.layout().len(), config.compression)?;
        made.add(&files.compressed);
        for (path, why) in files.swap.in_memory() {
            tracing::warn!(vm = name, "{}: {why}, outside the budget", path.display());
        }
        let slots = files.swap.slots();
        let memory =
            Memory::new(pmap, ram, stage, slots, host, config.fault_around).with_tier(tier);
        let mut vm = PagedVm::assemble(name, Arc::new(memory), files, overhead)?;
        // Last whoever hands out pages: should a thread not start, none is booked.
        vm.spawn_reclaim(config.seed, &Recovered::default())?;
        vm.spawn_faults(Vec::new(), config.fault_threads)?;
        made.keep();
        Ok(vm)
    }

    fn assemble(
        name: &str,
        memory: Arc<Memory<GuestRam>>,
        files: VmFiles,
        overhead: Pages,
    ) -> Result<PagedVm, StartError> {
        // Nobody knows yet what devices it has.
        memory.let_pages_move(false);
        let shared = Shared::new(name, memory, files.swap).map_err(StartError::Threads)?;
        let shared = Arc::new(shared);
        let files = [files.pmap, files.stage, files.compressed];
        Ok(PagedVm { shared, files, overhead, threads: Vec::new() })
    }

    /// `unbooked` is what the takeover left to be booked.
    fn spawn_faults(
        &mut self,
        unbooked: Vec<(Unbooked, Mark)>,
        threads: FaultThreads,
    ) -> Result<(), StartError> {
        let crew = Crew::new(self.shared.clone(), threads);
        let service =
            FaultService::new(self.shared.clone(), unbooked, crew).map_err(StartError::Threads)?;
        self.spawn("fault", Urgency::Guest, move || service.run())
    }

    fn spawn_reclaim(&mut self, seed: u64, found: &Recovered) -> Result<(), StartError> {
        let replacement: Box<dyn Replacement> = Box::new(Random::seeded(seed));
        let clock = Clock::new(self.shared.memory.pmap().len(), seed);
        let reclaim = Reclaim::new(self.shared.clone(), replacement, clock, found);
        self.spawn(RECLAIM, Urgency::Host, move || reclaim.run())
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
        let thread = std::thread::Builder::new()
            .name(self.shared.thread_name(what))
            .spawn(body)
            .map_err(StartError::Threads)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Its pages. Of what changes them, only `set_target` is for others than the VM's own threads.
    pub fn memory(&self) -> &Memory<GuestRam> {
        &self.shared.memory
    }
    /// See `GuestRam::let_go`: for one who keeps nobody from this VM meanwhile.
    pub fn letting_go(&self) -> impl FnOnce() -> Result<(), UffdError> + Send + 'static {
        let memory = self.shared.memory.clone();
        move || memory.backend().let_go()
    }
    /// Machine memory reserved for it beside what its pages are charged, as it was started with.
    pub fn overhead(&self) -> Pages {
        self.overhead
    }
    /// Slots of its swap files, free or not.
    pub fn swap_len(&self) -> Pages {
        self.shared.swap.len()
    }
    /// Pages that can be evicted now: none while nothing can be written, or the disk does not answer.
    pub fn swap_room(&self) -> Pages {
        if self.shared.is_swap_stuck() || self.is_jammed() || self.evicts_no_more() {
            return Pages::ZERO;
        }
        self.memory().swap_free()
    }
    /// Nothing can leave: eviction waits for a disk that does not answer, or for room in the stage.
    fn is_jammed(&self) -> bool {
        self.shared.writing_for() >= NO_ANSWER || self.shared.stage_full.load(Ordering::Relaxed)
    }
    /// The thread that evicts has ended, which it does not by itself: others are asked for what is missing.
    fn evicts_no_more(&self) -> bool {
        has_ended(&self.threads, RECLAIM)
    }
    /// Pages by which eviction can shrink the VM without any room in swap: each frame that its tier may
    /// still take holds at least two pages. None while it is known that they do not compress.
    pub fn spare_room(&self) -> Pages {
        let memory = self.memory();
        let compresses = memory.tier().settings().algorithm.is_some()
            && !self.shared.no_compressor.load(Ordering::Relaxed);
        if !compresses
            || self.shared.stubborn.is_believed()
            || self.is_jammed()
            || self.evicts_no_more()
        {
            return Pages::ZERO;
        }
        memory.tier().frames_left()
    }
    /// Its swap files, those of the highest priority first, and how many slots of each are used.
    pub fn swap_places(&self) -> Vec<(Place, Pages)> {
        let used = |(i, place)| (place, self.memory().swap_used_of(i));
        self.shared.swap.places().into_iter().enumerate().map(used).collect()
    }
    /// How long faults took to be served, from when they were read, without those that waited and
    /// those on swapped pages.
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

    /// Tests: `hold_down_to`, of `n` pages and no more.
    pub fn set_evict_goal(&self, n: Pages) {
        self.hold_down_to(n, Pages::ZERO, Pages::ZERO);
    }

    /// Asks for `n` pages to be evicted from now on, ending early where no more than `leave` pages are charged: what a
    /// balloon delivers meanwhile is not taken twice. Replaces what was asked before. What the VM grows by from then on
    /// beyond what it has without these `n`, or beyond `leave`, is evicted too, for as long as fewer than `until` pages of
    /// the host are free.
    pub fn hold_down_to(&self, n: Pages, leave: Pages, until: Pages) {
        let at = leave.max(self.shared.memory.charged().saturating_sub(n));
        self.hold(n, at.0, leave.0, until);
    }

    /// As `hold_down_to`, but what the VM grows by from then on leaves beyond `limit`, `leave` or more, and whatever is free: for
    /// something else it is not held.
    pub fn evict_within(&self, n: Pages, leave: Pages, limit: Pages) {
        let at = limit.max(self.shared.memory.charged().saturating_sub(n));
        self.hold(n, at.0, leave.0, Pages(u64::MAX));
    }

    fn hold(&self, n: Pages, at: u64, leave: u64, until: Pages) {
        let shared = &self.shared;
        // None holds in between.
        shared.hold_until.store(0, Ordering::Release);
        shared.hold_at.store(at, Ordering::Relaxed);
        shared.in_vain.store(false, Ordering::Relaxed);
        shared.evict_leave.store(leave, Ordering::Relaxed);
        shared.evict_goal.store(n.0, Ordering::Release);
        shared.hold_until.store(until.0, Ordering::Release);
        // Always: the thread may rest before its goal, from what it could not do.
        if n.0 > 0 {
            self.shared.signal_reclaim();
        }
    }

    /// As `hold_down_to` at its target, for a VM that has a few pages more than that at most, by the count by which its faults are
    /// blocked: without frames of its tier, which come and go with what is exchanged. They leave, and so does what it grows by,
    /// down to a few less than the target: its guest waits for none of them then. One that has more is left as it is.
    pub fn exchange_at(&self, target: Pages, until: Pages) {
        let memory = self.memory();
        let at_home = memory.charged().saturating_sub(Pages(memory.tier().occupancy().frames));
        let few = Pages(EXCHANGED.min(target.0 / 4));
        let above = at_home.saturating_sub(target.saturating_sub(few));
        if above.0 <= HELD_TOGETHER {
            let at = (target - few).0 | AT_HOME;
            self.hold(above, at, at, until);
        } else {
            self.hold_down_to(Pages::ZERO, Pages::ZERO, Pages::ZERO);
        }
    }

    /// Lets faults that wait for memory try again now.
    pub fn memory_freed(&self) {
        if self.waiting() > 0 {
            self.shared.wake_faults();
        }
    }

    /// Ends the current sample and begins one of these pages.
    pub fn begin_sample(&self, ppns: Vec<Ppn>) {
        self.shared.ask_for_sample(ppns);
    }
    /// The current sample.
    pub fn sample(&self) -> Sample {
        self.shared.sample()
    }

    /// Whether [`Health::Unreadable`]: cheap to ask.
    pub fn is_unreadable(&self) -> bool {
        self.shared.is_unreadable()
    }
    /// Pages that cannot be read first: its guest stands still for them.
    pub fn health(&self) -> Health {
        if let Some(unreadable) = self.shared.unreadable() {
            return unreadable;
        }
        let lost = self.shared.lost_helper.load(Ordering::Relaxed);
        if lost || self.threads.iter().any(JoinHandle::is_finished) {
            return Health::Unserved;
        }
        self.shared.trouble()
    }

    fn stop_threads(&mut self) {
        // Other VMs' share threads may be at its pages too.
        self.shared.memory.close();
        self.shared.stop();
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
        self.forget();
    }

    /// Nothing was taken from it yet, and its VMM goes on without a pager, if it does: as `release`, but what is in its
    /// RAM stays there.
    pub fn give_up(mut self) {
        self.stop_threads();
        self.leave_domain();
        self.forget();
    }

    /// Out of the books, and its files removed. What takes memory first: once it is released it is others', and compressed
    /// pages would be there for as long as their file is mapped. The swap files last: a file system may hang.
    fn forget(&mut self) {
        self.memory().tier().free_all();
        for path in &self.files {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!("removing {}: {e}", path.display());
                }
                _ => {}
            }
        }
        let ledger = &self.memory().host().ledger;
        ledger.release(self.memory().charged() - self.memory().owed());
        self.shared.swap.remove();
        // Its books are there, mapped, until here.
        ledger.release(self.overhead);
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

/// Whether no thread of these that does `what` is at work.
fn has_ended(threads: &[JoinHandle<()>], what: &str) -> bool {
    let does = |t: &&JoinHandle<()>| t.thread().name().is_some_and(|n| n.starts_with(what));
    threads.iter().find(does).is_none_or(JoinHandle::is_finished)
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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_thread_that_has_ended_is_told_from_one_that_waits_and_from_others() -> std::io::Result<()>
    {
        let (go_on, wait) = channel::<()>();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(body)
        };
        let evicts = spawn("reclaim-vm", Box::new(move || _ = wait.recv()))?;
        let threads = [spawn("fault-vm", Box::new(|| ()))?, evicts];
        assert!(!has_ended(&threads, RECLAIM));
        drop(go_on);
        while !threads[1].is_finished() {
            std::thread::yield_now();
        }
        assert!(has_ended(&threads, RECLAIM));
        assert!(has_ended(&threads[..1], RECLAIM), "one that was never started");
        Ok(())
    }
}
