//! The swap tier over the kernel's userfaultfd, with disks that fail: no page is lost, none is fed to the
//! guest that is not its own, and nobody else is touched. Needs the right to create userfaultfds;
//! skipped, loudly, without (an error where BALLAST_REQUIRE_PRIVILEGED=1).
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "real_swap/again.rs"]
mod again;
#[path = "real_swap/full_stage.rs"]
mod full_stage;
#[path = "real_swap/meanwhile.rs"]
mod meanwhile;
#[path = "real_swap/overdue.rs"]
mod overdue;
#[path = "real_swap/past_tier.rs"]
mod past_tier;
#[path = "support/vmm.rs"]
mod vmm;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, Inherited, PagedVm, PagerConfig, VmFiles};
use ballast_pager::swap::inject::{Injector, Op, Verdict};
use ballast_pager::swap::{Location, Place, Stored, SwapSpace};
use ballast_pager::tier::Compression;
use ballast_pager::word::State;
use ballast_units::{PAGE_SIZE, Pages, Ppn};
use vmm::{Cell, Guest, Vmm, alone, wait_for};

const SIZE: u64 = 1024;
const PAGE: u64 = PAGE_SIZE as u64;
/// The page that tests make unreadable, and its number among those of its thread.
const VICTIM: u64 = 100;

// ---- the VMM process ----------------------------------------------------------------------------

fn word(ppn: u64, i: usize) -> u64 {
    (ppn << 20 | i as u64 | 1 << 63).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Where half of the guest's pages compress: the odd ones repeat themselves.
fn mixed(ppn: u64, i: usize) -> u64 {
    word(ppn, if ppn % 2 == 1 { i % 64 } else { i })
}

fn verify(guest: &Guest, ppn: u64) {
    let what = if guest.role == "mixed" { mixed } else { word };
    if !guest.read_page(ppn).iter().enumerate().all(|(i, &w)| w == what(ppn, i)) {
        eprintln!("ppn {ppn}: not what was written");
        guest.board.add(Cell::Errors, 1);
    }
}

/// As often as `Go` says beyond the first time: verifies these pages, counting them.
fn passes(guest: &Guest, pages: impl Fn() -> Box<dyn Iterator<Item = u64>>, counter: Cell) {
    let mut passed = 0;
    while guest.board.get(Cell::Stop) == 0 {
        if passed + 1 >= guest.board.get(Cell::Go) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        for ppn in pages() {
            verify(guest, ppn);
            guest.board.add(counter, 1);
        }
        passed += 1;
        guest.board.add(Cell::Done, 1);
    }
}

/// Pages that compress and do not by turns, each verified before it is written again.
fn flip(guest: &Guest) {
    let at = |turn: u64, ppn: u64, i: usize| mixed(ppn + turn * (guest.pages + 1), i);
    let mut turn = 0;
    while guest.board.get(Cell::Stop) == 0 {
        for ppn in 0..guest.pages {
            if !guest.read_page(ppn).iter().enumerate().all(|(i, &w)| w == at(turn, ppn, i)) {
                eprintln!("ppn {ppn}, turn {turn}: not what was written");
                guest.board.add(Cell::Errors, 1);
            }
            guest.write_page(ppn, |i| at(turn + 1, ppn, i));
            guest.board.add(Cell::Accesses, 1);
        }
        turn += 1;
        guest.board.add(Cell::Done, 1);
    }
}

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    let n = guest.pages;
    let what = if matches!(guest.role.as_str(), "mixed" | "flip") { mixed } else { word };
    for ppn in 0..n {
        guest.write_page(ppn, |i| what(ppn, i));
    }
    guest.board.set(Cell::Step, n);
    match guest.role.as_str() {
        // Two threads, one at the even pages and one at the odd.
        "halves" => std::thread::scope(|scope| {
            for (odd, counter) in [(0, Cell::Accesses), (1, Cell::Discards)] {
                let guest = &guest;
                let pages =
                    move || -> Box<dyn Iterator<Item = u64>> { Box::new((odd..n).step_by(2)) };
                scope.spawn(move || passes(guest, pages, counter));
            }
        }),
        "forward" | "mixed" => passes(&guest, || Box::new(0..n), Cell::Accesses),
        "flip" => flip(&guest),
        // All pages, each far from the last.
        "jump" => passes(&guest, || Box::new((0..n).map(move |i| i * 389 % n)), Cell::Accesses),
        "give up" => std::thread::scope(|scope| {
            let guest = &guest;
            let victim = || -> Box<dyn Iterator<Item = u64>> { Box::new(VICTIM..VICTIM + 1) };
            scope.spawn(move || passes(guest, victim, Cell::Accesses));
            while guest.board.get(Cell::Discards) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            give_up(guest, VICTIM);
            guest.board.add(Cell::Discards, 1);
        }),
        other => panic!("no role {other}"),
    }
    // The memory stays until the test has looked at it, and kills.
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// As QEMU does it.
fn give_up(guest: &Guest, ppn: u64) {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&guest.ram, flags, ppn * PAGE, PAGE).unwrap();
    // SAFETY: a page of this process, whose contents may go.
    let result =
        unsafe { libc::madvise(guest.word(ppn, 0).cast(), PAGE_SIZE, libc::MADV_DONTNEED) };
    assert_eq!(result, 0);
}

// ---- disks that fail ----------------------------------------------------------------------------

type Rule = Box<dyn FnMut(&Op<'_>) -> Verdict + Send>;

/// Does as the rule of the moment says.
struct Disk {
    rule: Mutex<Rule>,
    writes: AtomicU64,
}

impl Disk {
    fn new() -> Arc<Disk> {
        Arc::new(Disk { rule: Mutex::new(Box::new(|_| FINE)), writes: AtomicU64::new(0) })
    }
    fn follow(&self, rule: impl FnMut(&Op<'_>) -> Verdict + Send + 'static) {
        *self.rule.lock().unwrap() = Box::new(rule);
    }
    fn be_well(&self) {
        self.follow(|_| FINE);
    }
    fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }
}

impl Injector for Disk {
    fn verdict(&self, op: &Op<'_>) -> Verdict {
        if op.write {
            self.writes.fetch_add(1, Ordering::SeqCst);
        }
        self.rule.lock().unwrap()(op)
    }
}

const EIO: Verdict =
    Verdict { errno: Some(libc::EIO), moved: None, lies: false, late: Duration::ZERO };
const ENOSPC: Verdict = Verdict { errno: Some(libc::ENOSPC), ..EIO };
const FINE: Verdict = Verdict { errno: None, ..EIO };

/// Whether an operation has anything to do with a slot of a VM's first file.
fn touches(op: &Op<'_>, slot: u64) -> bool {
    (op.offset..op.offset + u64::from(op.len)).contains(&(slot * PAGE))
}

// ---- the manager's side ------------------------------------------------------------------------

struct Rig {
    vmm: Vmm,
    vm: Option<PagedVm>,
    host: Arc<Host>,
    dir: PathBuf,
    disk: Arc<Disk>,
}

/// All that is evicted goes to swap.
fn config() -> PagerConfig {
    PagerConfig { compression: Compression::OFF, ..PagerConfig::default() }
}

fn overhead() -> Pages {
    config().overhead(Pages(SIZE))
}

fn host(vms: u64) -> Arc<Host> {
    let host = Arc::new(Host::new(Ledger::new(Pages((overhead().0 + 2 * SIZE) * vms), || {})));
    assert!(host.ledger.try_reserve(Pages(overhead().0 * vms)));
    host
}

/// Two files, each in a location of its own.
/// Left alone for so long after it has failed that nobody sees it tried.
fn two_places(dir: &Path) -> [Place; 2] {
    two_places_with_rest(dir, Duration::from_secs(3600))
}

fn two_places_with_rest(dir: &Path, rest: Duration) -> [Place; 2] {
    [("fast", 2), ("slow", 1)].map(|(name, priority)| {
        let folder = dir.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let (path, location) = (folder.join("swap"), Location::with_rest(&folder, priority, rest));
        Place { path, location, len: Some(Pages(SIZE)) }
    })
}

/// Half of a VM may be frames of its tier, and its host has twice as much memory as it.
fn half_may_be_compressed(alarm: impl Fn() + Send + Sync + 'static) -> (PagerConfig, Arc<Host>) {
    let compression = Compression { percent: 50, ..Compression::default() };
    let config = PagerConfig { compression, ..PagerConfig::default() };
    let own = config.overhead(Pages(SIZE));
    let host = Arc::new(Host::new(Ledger::new(Pages(own.0 + 2 * SIZE), alarm)));
    assert!(host.ledger.try_reserve(own));
    (config, host)
}

impl Rig {
    fn new(role: &str, dir: &Path) -> Rig {
        let swap = SwapSpace::create_at(&dir.join("swap"), Pages(SIZE + 64)).unwrap();
        Rig::over(role, dir, swap, host(1), true)
    }

    fn over(role: &str, dir: &Path, swap: SwapSpace, host: Arc<Host>, injected: bool) -> Rig {
        Rig::with(config(), role, dir, swap, host, injected)
    }

    /// Half of its size may be frames of the tier.
    fn without_swap(role: &str, dir: &Path) -> Rig {
        Rig::without_swap_watched(role, dir, || {})
    }

    /// `alarm` is the ledger's.
    fn without_swap_watched(
        role: &str,
        dir: &Path,
        alarm: impl Fn() + Send + Sync + 'static,
    ) -> Rig {
        let swap = SwapSpace::create_at(&dir.join("swap"), Pages(0)).unwrap();
        let (config, host) = half_may_be_compressed(alarm);
        Rig::with(config, role, dir, swap, host, false)
    }

    fn with(
        config: PagerConfig,
        role: &str,
        dir: &Path,
        swap: SwapSpace,
        host: Arc<Host>,
        injected: bool,
    ) -> Rig {
        let disk = Disk::new();
        let swap = if injected { swap.injected(disk.clone()) } else { swap };
        let vmm = Vmm::start(role, SIZE);
        let files = VmFiles::new(dir, swap);
        let own = config.overhead(Pages(SIZE));
        let vm = PagedVm::start("t", config, files, vmm.guest_ram(), own, host.clone()).unwrap();
        vmm.board.set(Cell::Go, 1);
        wait_for("pages", || vmm.board.get(Cell::Step) == SIZE);
        Rig { vmm, vm: Some(vm), host, dir: dir.to_owned(), disk }
    }

    /// The manager leaves, and another comes.
    fn take_over(&mut self, swap: impl FnOnce() -> SwapSpace, between: impl FnOnce(&Path)) {
        self.vm.take().unwrap().leave();
        between(&self.dir.join("pmap"));
        self.host = host(1);
        let files = VmFiles::new(&self.dir, swap().injected(self.disk.clone()));
        let (config, ram) = (config(), self.vmm.guest_ram());
        let (vm, _) = PagedVm::take_over(
            "t",
            config,
            files,
            ram,
            overhead(),
            self.host.clone(),
            Inherited::default(),
        )
        .unwrap();
        self.vm = Some(vm);
    }

    fn vm(&self) -> &PagedVm {
        self.vm.as_ref().unwrap()
    }
    fn swapped(&self) -> u64 {
        self.vm().memory().pmap().in_state(State::Swapped).0
    }
    fn stored(&self, ppn: u64) -> Stored {
        let word = self.vm().memory().pmap().load(Ppn(ppn));
        assert_eq!(word.state(), State::Swapped, "ppn {ppn}");
        word.stored()
    }
    fn swap_out(&self, pages: u64) {
        wait_for("pages to be swapped", || {
            self.vm().set_evict_goal(Pages(pages.saturating_sub(self.swapped())));
            self.swapped() >= pages
        });
        self.vm().set_evict_goal(Pages(0));
        self.all_written();
    }
    fn all_written(&self) {
        let pmap = self.vm().memory().pmap();
        wait_for("what is on its way", || pmap.in_state(State::Staged).is_zero());
    }
    fn begin_pass(&self) {
        self.vmm.board.add(Cell::Go, 1);
    }
    /// Whether `n` threads have ended a pass, altogether.
    fn passed(&self, n: u64) -> bool {
        self.vmm.board.get(Cell::Done) >= n
    }
    /// The guest reads all its pages, and they are what it wrote.
    fn pass(&self, threads: u64) {
        let before = self.vmm.board.get(Cell::Done);
        self.begin_pass();
        wait_for("pass", || self.passed(before + threads));
        self.is_right();
    }
    fn is_right(&self) {
        assert_eq!(self.vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    }
    fn unreadable(&self) -> Option<(Ppn, usize, String)> {
        match self.vm().health() {
            Health::Unreadable { page, pages, what } => Some((page, pages, what)),
            _ => None,
        }
    }

    fn end(mut self) {
        self.is_right();
        let vm = self.vm.take().unwrap();
        wait_for("quiet", || vm.memory().check_quiet().is_ok());
        assert_eq!(self.vmm.measured(), vm.memory().charged());
        self.release(vm);
    }
    fn release(mut self, vm: PagedVm) {
        self.vmm.kill();
        let (host, before) = (self.host.clone(), self.host.ledger.used());
        let own = vm.memory().charged() + vm.overhead();
        vm.release();
        assert_eq!(host.ledger.used(), before - own);
        assert!(!self.dir.join("pmap").exists() && !self.dir.join("swap").exists());
    }
}

#[test]
fn slots_that_cannot_be_written_are_given_up_and_no_page_is_lost() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    // Bad spots: 17 slots of 1,088, of which each cluster and then the slot alone fails.
    rig.disk.follow(|op| {
        let bad = (0..).map(|n| n * 64 + 7).take_while(|slot| *slot < SIZE + 64);
        if op.write && bad.into_iter().any(|slot| touches(op, slot)) { EIO } else { FINE }
    });
    for _ in 0..2 {
        rig.swap_out(SIZE);
        let retired = rig.vm().memory().swap_retired();
        assert!((1..=17).contains(&retired.0), "{retired:?}");
        let (place, _) = &rig.vm().swap_places()[0];
        assert!(!place.location.is_failed() && place.location.write_errors() > 0);
        for ppn in 0..SIZE {
            assert_ne!(rig.stored(ppn).slot.0 % 64, 7, "ppn {ppn} is in a slot that failed");
        }
        rig.pass(2);
    }
    assert!(matches!(rig.vm().health(), Health::Ill { .. }));
    rig.end();
}

#[test]
fn writes_that_are_cut_short_are_repeated() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    rig.disk.follow(|op| {
        let short = op.write && op.len > PAGE as u32;
        Verdict { moved: short.then_some(op.len / 2 / PAGE as u32 * PAGE as u32), ..FINE }
    });
    rig.swap_out(SIZE);
    assert_eq!(rig.vm().memory().swap_retired(), Pages(0), "no slot was to blame");
    rig.pass(2);
    rig.end();
}

#[test]
fn errors_that_pass_are_outlived() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    let mut left = 6;
    rig.disk.follow(move |op| {
        left -= u32::from(op.write && left > 0);
        if op.write && left > 0 { EIO } else { FINE }
    });
    rig.swap_out(SIZE);
    rig.pass(2);
    rig.end();
}

#[test]
fn a_location_that_fails_is_left_for_the_next_and_still_read() {
    let Some(_alone) = alone() else { return };
    for verdict in [EIO, ENOSPC] {
        let dir = tempfile::tempdir().unwrap();
        let places = two_places(dir.path());
        for place in &places {
            SwapSpace::create_at(&place.path, Pages(SIZE)).unwrap();
        }
        let swap = SwapSpace::open(&places).unwrap();
        let rig = Rig::over("halves", dir.path(), swap, host(1), true);
        rig.swap_out(SIZE / 2);
        let words = || (0..SIZE).map(|p| rig.vm().memory().pmap().load(Ppn(p)));
        let swapped_in = |slots: std::ops::Range<u64>| {
            words().filter(|w| w.state() == State::Swapped && slots.contains(&w.slot())).count()
        };
        assert_eq!(swapped_in(SIZE..u64::MAX), 0, "not the highest priority first");
        let fast = places[0].path.clone();
        rig.disk.follow(move |op| if op.write && op.path == fast { verdict } else { FINE });
        rig.all_written();
        let before = swapped_in(0..SIZE);
        rig.swap_out(SIZE);
        assert!(places[0].location.is_failed() && !places[1].location.is_failed());
        assert_eq!(swapped_in(0..SIZE), before);
        let tries = places[0].location.write_errors();
        rig.pass(2);
        rig.swap_out(SIZE);
        assert_eq!(places[0].location.write_errors(), tries, "written to after it failed");
        assert_eq!(swapped_in(0..SIZE), 0);
        rig.pass(2);
        rig.end();
        assert!(!places.iter().any(|place| place.path.exists()));
    }
}

#[test]
fn where_nothing_can_be_written_pages_stay_and_faults_are_served() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    rig.swap_out(SIZE / 2);
    let before = rig.disk.writes();
    rig.disk.follow(|op| if op.write { ENOSPC } else { FINE });
    wait_for("the location to be given up", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        rig.vm().swap_places()[0].0.location.is_failed()
    });
    // The policy is told, and asking again does not help.
    wait_for("no room", || rig.vm().swap_room().is_zero());
    rig.vm().set_evict_goal(Pages(SIZE));
    wait_for("the goal to be given up", || rig.vm().evict_goal().is_zero());
    assert!(rig.vm().swap_room().is_zero());
    let layout = config().stage;
    let staged = rig.vm().memory().pmap().in_state(State::Staged).0;
    assert!(staged <= layout.write_slots(), "{staged}");
    for _ in 0..2 {
        rig.pass(2);
    }
    // Each cluster whole, then page by page: no more was tried, however long it was stuck.
    let tried = rig.disk.writes() - before;
    assert!(tried <= layout.clusters * (layout.cluster + 1), "{tried} writes");
    assert_eq!(rig.swapped(), 0);
    rig.end();
}

#[test]
fn without_room_in_swap_what_compresses_is_taken_and_the_rest_stays() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::without_swap("mixed", dir.path());
    let tier = || rig.vm().memory().tier().occupancy();
    assert_eq!((rig.vm().swap_room().0, rig.vm().spare_room().0), (0, SIZE / 2));

    // Less than there is.
    let before = rig.vm().memory().charged().0;
    rig.vm().set_evict_goal(Pages(100));
    wait_for("pages to be compressed", || rig.vm().memory().charged().0 <= before - 100);
    // Each page costs no more than a quarter.
    assert!(tier().frames * 4 <= tier().pages + 3, "{:?}", tier());
    for _ in 0..2 {
        rig.pass(1);
    }

    // More than there is: those that do not compress stay at home, and that is known.
    rig.vm().set_evict_goal(Pages(SIZE));
    wait_for("the goal to be given up", || rig.vm().evict_goal().is_zero());
    wait_for("what is on its way", || rig.vm().memory().pmap().in_state(State::Staged).is_zero());
    assert!(rig.vm().spare_room().is_zero());
    assert!(tier().pages > SIZE / 4, "{:?}", tier());
    for ppn in 0..SIZE {
        let state = rig.vm().memory().pmap().load(Ppn(ppn)).state();
        assert!(ppn % 2 == 1 || state == State::Resident, "{ppn}: {state:?}");
    }
    rig.pass(1);
    rig.end();
}

/// A VMM may cut its RAM file short: what is not there cannot be read, and is not tried for ever.
#[test]
fn without_room_in_swap_pages_that_cannot_be_read_end_a_round() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::without_swap("mixed", dir.path());
    rustix::fs::ftruncate(&rig.vmm.ram, 0).unwrap();
    rig.vm().set_evict_goal(Pages(SIZE));
    wait_for("the goal to be given up", || rig.vm().evict_goal().is_zero());
    assert!(rig.vm().spare_room().is_zero());
    let Health::Ill { last, .. } = rig.vm().health() else { panic!("{:?}", rig.vm().health()) };
    assert!(last.starts_with("reading "), "{last}");
    let vm = rig.vm.take().unwrap();
    rig.release(vm);
}

/// What others may have is not in use any more.
#[test]
fn compressed_pages_are_gone_before_they_are_released() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (file, blocks) = (Arc::new(OnceLock::new()), Arc::new(AtomicU64::new(u64::MAX)));
    let (watched, seen) = (file.clone(), blocks.clone());
    let look = move || {
        let taken = watched.get().map(|file| rustix::fs::fstat(file).unwrap().st_blocks);
        seen.store(taken.map_or(u64::MAX, |n| n as u64), Ordering::SeqCst);
    };
    let mut rig = Rig::without_swap_watched("mixed", dir.path(), look);
    rig.vm().set_evict_goal(Pages(100));
    wait_for("pages to be compressed", || rig.vm().evict_goal().is_zero());
    assert!(rig.vm().memory().tier().occupancy().frames > 0);
    file.set(std::fs::File::open(dir.path().join("compressed")).unwrap()).unwrap();
    let ledger = &rig.host.ledger;
    ledger.set_alarm(Pages(0), ledger.budget());
    let vm = rig.vm.take().unwrap();
    rig.release(vm);
    assert_eq!(blocks.load(Ordering::SeqCst), 0);
}

#[test]
fn without_room_in_swap_pages_that_change_as_they_leave_are_not_lost() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::without_swap("flip", dir.path());
    let counters = || rig.vm().memory().counters.values();
    wait_for("turns", || {
        rig.vm().set_evict_goal(Pages(SIZE));
        rig.passed(20) && counters().compressed > SIZE / 4
    });
    rig.vm().set_evict_goal(Pages(0));
    // What changed on its way does not stay there.
    wait_for("an empty stage", || rig.vm().memory().pmap().in_state(State::Staged).is_zero());
    // A whole turn brings home what was taken behind the guest's back: no frame of the tier is charged.
    let passes = rig.vmm.board.get(Cell::Done) + 2;
    wait_for("a whole turn", || rig.passed(passes));
    rig.vmm.board.set(Cell::Stop, 1);
    eprintln!("{} of {} did not fit", counters().incompressible, counters().evicted);
    rig.end();
}

/// What the disk may do to one page, and what is said of it.
const DAMAGES: [(&str, Verdict); 3] = [
    ("Input/output error", EIO),
    ("ends after 0 bytes", Verdict { moved: Some(0), ..FINE }),
    // Something else is there: what its buffer held before.
    ("does not hold what was written", Verdict { moved: Some(0), lies: true, ..FINE }),
];

#[test]
fn a_page_that_cannot_be_read_is_waited_for_and_nobody_else_waits() {
    let Some(_alone) = alone() else { return };
    let both = host(2);
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [rig, other] = [0, 1].map(|i| {
        let dir = dirs[i].path();
        let swap = SwapSpace::create_at(&dir.join("swap"), Pages(SIZE)).unwrap();
        Rig::over("halves", dir, swap, both.clone(), true)
    });
    for (round, (said, verdict)) in (0..).zip(DAMAGES) {
        rig.swap_out(SIZE);
        other.swap_out(SIZE);
        let slot = rig.stored(VICTIM).slot.0;
        rig.disk.follow(move |op| if touches(op, slot) { verdict } else { FINE });
        rig.begin_pass();
        wait_for("trouble", || rig.unreadable().is_some());
        let (page, pages, what) = rig.unreadable().unwrap();
        assert_eq!((page, pages), (Ppn(VICTIM), 1));
        assert!(what.contains(said) && what.contains("swap"), "{what}");
        // Its other thread ends its pass, and so does the other VM.
        wait_for("the other thread", || rig.passed(round * 2 + 1));
        other.pass(2);
        assert_eq!(other.vm().health(), Health::Well);
        let verified = rig.vmm.board.get(Cell::Accesses);
        assert_eq!(verified, round * SIZE / 2 + VICTIM / 2, "it went on without the page");
        assert_eq!(rig.stored(VICTIM).slot.0, slot);
        assert!(rig.vm().swap_places()[0].0.location.read_errors() >= 3);
        rig.disk.be_well();
        wait_for("the page", || rig.passed(round * 2 + 2));
        wait_for("health", || rig.vm().health() == Health::Well);
        rig.is_right();
    }
    // A VM that is killed while it waits leaves nothing behind.
    rig.swap_out(SIZE);
    rig.disk.follow(|op| if op.write { FINE } else { EIO });
    rig.begin_pass();
    wait_for("trouble", || rig.unreadable().is_some());
    let mut rig = rig;
    let vm = rig.vm.take().unwrap();
    rig.release(vm);
    other.end();
}

#[test]
fn a_write_that_lies_is_found_out_before_the_guest_sees_it() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    // Half of each cluster is lost, by a disk that says that all was written.
    rig.disk.follow(|op| {
        let torn = op.write && op.len > PAGE as u32;
        let moved = torn.then_some(op.len / 2 / PAGE as u32 * PAGE as u32);
        Verdict { moved, lies: torn, ..FINE }
    });
    rig.swap_out(SIZE);
    rig.disk.be_well();
    rig.begin_pass();
    wait_for("trouble of both threads", || {
        rig.unreadable().is_some_and(|(_, pages, _)| pages == 2)
    });
    let (_, _, what) = rig.unreadable().unwrap();
    assert!(what.contains("does not hold"), "{what}");
    rig.is_right();
    // The right bytes come from a backup: it goes on by itself.
    let file = std::fs::File::options().write(true).open(dir.path().join("swap")).unwrap();
    for ppn in 0..SIZE {
        let word_at = rig.vm().memory().pmap().load(Ppn(ppn));
        if word_at.state() == State::Swapped {
            let bytes: Vec<u8> =
                (0..PAGE_SIZE / 8).flat_map(|i| word(ppn, i).to_le_bytes()).collect();
            file.write_all_at(&bytes, word_at.slot() * PAGE).unwrap();
        }
    }
    file.sync_all().unwrap();
    wait_for("the pass", || rig.passed(2));
    wait_for("health", || rig.vm().health() == Health::Well);
    rig.end();
}

#[test]
fn a_file_that_loses_its_contents_costs_no_guest_its_sanity() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("halves", dir.path());
    rig.swap_out(SIZE);
    let path = dir.path().join("swap");
    let saved = std::fs::read(&path).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    rig.begin_pass();
    wait_for("trouble", || rig.unreadable().is_some());
    assert!(rig.unreadable().unwrap().2.contains("ends after 0 bytes"));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&saved, 0).unwrap();
    file.sync_all().unwrap();
    wait_for("the pass", || rig.passed(2));
    wait_for("health", || rig.vm().health() == Health::Well);
    rig.end();
}

#[test]
fn a_page_that_is_given_up_needs_no_reading() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new("give up", dir.path());
    rig.swap_out(SIZE);
    rig.disk.follow(|op| if op.write { FINE } else { EIO });
    rig.begin_pass();
    wait_for("trouble", || rig.unreadable().is_some());
    rig.vmm.board.set(Cell::Discards, 1);
    wait_for("the read of what was given up", || rig.passed(1));
    wait_for("health", || rig.vm().health() == Health::Well);
    // Zeros: not what was written, and not what the disk had.
    assert_eq!(rig.vmm.board.get(Cell::Errors), 1);
    rig.vmm.board.set(Cell::Errors, 0);
    rig.disk.be_well();
    rig.end();
}

#[test]
fn reading_ahead_pays_where_pages_are_read_in_order_and_ceases_where_they_are_not() {
    let Some(_alone) = alone() else { return };
    for role in ["forward", "jump"] {
        let dir = tempfile::tempdir().unwrap();
        let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
        let rig = Rig::over(role, dir.path(), swap, host(1), false);
        for _ in 0..3 {
            rig.swap_out(SIZE);
            rig.pass(1);
        }
        let c = rig.vm().memory().counters.values();
        println!(
            "{role}: {} in, {} ahead, {} of them hits",
            c.swap_ins, c.read_ahead, c.read_ahead_hits
        );
        assert_eq!(c.swap_ins, 3 * SIZE);
        let timed: u64 = rig.vm().fault_times().counts().iter().sum();
        let read = c.swap_ins - c.brought;
        assert!((read..=c.swap_ins).contains(&c.swap_waits), "{read} waited for: {c:?}");
        assert!(timed > 0 && timed + c.swap_waits <= c.faults, "{timed} timed: {c:?}");
        if role == "forward" {
            assert!(c.read_ahead_hits > SIZE && c.swap_waits < c.swap_ins, "{c:?}");
        } else {
            assert!(c.read_ahead < c.swap_ins / 4, "{c:?}");
        }
        rig.end();
    }
}

#[test]
fn another_manager_finds_the_pages_in_all_files() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let places = two_places(dir.path()).map(|p| Place { len: Some(Pages(SIZE / 2)), ..p });
    for place in &places {
        SwapSpace::create_at(&place.path, Pages(SIZE / 2)).unwrap();
    }
    let swap = SwapSpace::open(&places).unwrap();
    let mut rig = Rig::over("halves", dir.path(), swap, host(1), true);
    rig.swap_out(SIZE);
    // Before and after it, a page cannot be read.
    let slot = rig.stored(VICTIM).slot.0;
    let there = (places[usize::from(slot >= SIZE / 2)].path.clone(), slot % (SIZE / 2));
    let damaged = move |op: &Op<'_>| !op.write && op.path == there.0 && touches(op, there.1);
    rig.disk.follow(move |op| if damaged(op) { EIO } else { FINE });
    rig.begin_pass();
    wait_for("trouble", || rig.unreadable().is_some());
    rig.take_over(|| SwapSpace::open(&places).unwrap(), |_| {});
    wait_for("trouble again", || rig.unreadable().is_some());
    assert_eq!(rig.unreadable().unwrap().0, Ppn(VICTIM));
    rig.disk.be_well();
    wait_for("the pass", || rig.passed(2));
    wait_for("health", || rig.vm().health() == Health::Well);
    rig.swap_out(SIZE);
    rig.pass(2);
    rig.end();
    assert!(!places.iter().any(|place| place.path.exists()));
}

/// What a manager left whose words had no checksums: a running guest is taken over from it.
#[test]
fn pages_that_were_swapped_without_checksums_are_taken_over() {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::new("halves", dir.path());
    rig.swap_out(SIZE);
    let path = dir.path().join("swap");
    let swap = || SwapSpace::open_at(&path).unwrap();
    rig.take_over(swap, |pmap| {
        let mut bytes = std::fs::read(pmap).unwrap();
        bytes[8] = 2;
        for word in bytes[PAGE_SIZE..].chunks_exact_mut(8) {
            let bits = u64::from_le_bytes(word.try_into().unwrap());
            if bits & 0xf == State::Swapped as u64 {
                word.copy_from_slice(&(bits & ((1 << 38) - 1)).to_le_bytes());
            }
        }
        std::fs::write(pmap, bytes).unwrap();
    });
    assert!((0..SIZE).all(|ppn| rig.stored(ppn).sum.is_none()));
    rig.pass(2);
    rig.swap_out(SIZE);
    assert!((0..SIZE).all(|ppn| !rig.stored(ppn).sum.is_none()), "written anew without checksums");
    rig.pass(2);
    rig.end();
}
