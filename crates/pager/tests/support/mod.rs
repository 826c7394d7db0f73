//! A deterministic double of guest memory: a few pages that behave as the kernel's do under a
//! userfaultfd (page cache, per-page write protection that survives a punched hole, private mappings
//! and the kernel's copies, faults, discard events, EAGAIN), and that crash on demand. A page's
//! contents are one number, repeated.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

mod backend;
#[cfg(not(feature = "shuttle"))]
pub mod every_call;
pub mod evict;
pub mod site;
#[cfg(not(feature = "shuttle"))]
pub mod vm;

use std::collections::VecDeque;
use std::sync::Arc as StdArc;

use ballast_pager::backend::{Errno, MemError, PageBuf, Place, Remap};
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::memory::Access;
use ballast_pager::service::serve::Notice;
use ballast_sharing::{StoreFile, StorePage};
use ballast_units::{PAGE_SIZE, Pages, Ppn};

#[cfg(feature = "shuttle")]
pub use shuttle::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(feature = "shuttle"))]
pub use std::sync::{Condvar, Mutex, MutexGuard};

/// A page full of this number; zero is the zero page.
pub fn page_of(token: u64) -> Box<PageBuf> {
    let mut page = Box::new([0; PAGE_SIZE]);
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&token.to_le_bytes());
    }
    page
}

/// # Panics
/// If the page is torn.
pub fn token_of(page: &PageBuf) -> u64 {
    let token = u64::from_le_bytes(page[..8].try_into().unwrap());
    assert!(page.chunks_exact(8).all(|w| w == token.to_le_bytes()), "torn page");
    token
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    ppn: u64,
    access: Access,
    read: bool,
    id: u64,
}

/// How a VMM gives pages up. QEMU, by the RAM file's descriptor: punch, then `MADV_DONTNEED`, which
/// tells us and drops only page-table entries. Others: `MADV_REMOVE`, which tells us and then
/// punches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    PunchThenTell,
    TellThenPunch,
}

/// Where the manager dies: at its n-th call, before or after the call took effect.
#[derive(Clone, Copy, Debug)]
pub struct CrashAt {
    pub call: u64,
    pub after: bool,
}

/// What becomes of changes of mapping that the VMM did not answer for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// Done at once, unheard.
    Done,
    /// Done when the VMM answers (`shim_answers`).
    Later,
}

/// What a page holds while it is written half.
const HALF: u64 = 0xbad;

struct World {
    /// The page cache.
    pages: Vec<Option<u64>>,
    /// What is mapped there, and the kernel's copies in private mappings.
    places: Vec<Place>,
    copies: Vec<Option<u64>>,
    /// Whether the mapping is registered with the userfaultfd.
    watched: Vec<bool>,
    protected: Vec<bool>,
    /// Pages of a large page, or 1; of which large page a home page is a part; and which are allocated,
    /// and untouched: the kernel says that they are not there.
    large: u64,
    /// The kernel has memory for so many pages of the next large page, and for no large page.
    short_of: Option<u64>,
    part_of: Vec<Option<u64>>,
    latent: Vec<bool>,
    /// From this page on the guest has memory by blocks of so many pages.
    plugged: Option<(u64, u64)>,
    /// Whether the VMM's mappings can be changed, and how many runs it changes before it registers
    /// and protects them.
    can_remap: bool,
    /// Whether copies are told from what is mapped.
    sees_copies: bool,
    may_leave_holes: bool,
    together: usize,
    unanswered: Option<Unanswered>,
    /// What the guest writes where, between the next new mapping of that page and its protection.
    writes_between: Option<(u64, u64)>,
    outstanding: Option<Vec<Remap>>,
    /// Whether the VMM goes on with what it was asked to change when the manager dies, and that.
    goes_on: bool,
    left: Vec<Remap>,
    /// Changes of mapping fail from the n-th run of the next one on, mapped but not protected.
    unwatched_from: Option<(usize, MemError)>,
    waiters: Vec<Waiter>,
    next_id: u64,
    /// Discards announced and not read.
    removes: VecDeque<(u64, u64, u64)>,
    removes_read: Vec<u64>,
    /// VMM threads inside a discard: operations answer EAGAIN.
    changing: u32,
    calls: u64,
    crash: Option<CrashAt>,
    /// Operation numbers to fail once with these errors.
    fail: Vec<(u64, MemError)>,
    /// The books are being rebuilt: more may be present than is booked.
    recovering: bool,
}

pub struct Double {
    world: Mutex<World>,
    changed: Condvar,
    machine: StdArc<Machine>,
    /// Which VM of the machine.
    number: usize,
}

/// A shared double: the VMM outlives managers.
#[derive(Clone)]
pub struct Ram(pub StdArc<Double>);

/// What all doubles of a host take together, as the kernel would count it.
pub struct Machine {
    host: StdArc<Host>,
    /// Pages of each VM: at home, and copies.
    vms: std::sync::Mutex<Vec<u64>>,
    store: Option<StoreFile>,
    /// The manager of them all has died.
    dead: std::sync::atomic::AtomicBool,
}

impl Machine {
    pub fn new(host: StdArc<Host>, store: Option<StoreFile>) -> StdArc<Machine> {
        let vms = std::sync::Mutex::new(Vec::new());
        StdArc::new(Machine { host, vms, store, dead: false.into() })
    }
    fn die(&self) {
        self.dead.store(true, std::sync::atomic::Ordering::SeqCst);
    }
    pub fn is_dead(&self) -> bool {
        self.dead.load(std::sync::atomic::Ordering::SeqCst)
    }
    pub fn present(&self) -> u64 {
        self.vms.lock().unwrap().iter().sum::<u64>() + self.stored()
    }
    /// Pages that the store's file has.
    pub fn stored(&self) -> u64 {
        self.store.as_ref().map_or(0, |store| store.measured().unwrap().pages().0)
    }
    fn read_store(&self, page: StorePage) -> u64 {
        let mut bytes = Box::new([0; PAGE_SIZE]);
        self.store.as_ref().unwrap().read(page, &mut bytes).unwrap();
        token_of(&bytes)
    }
}

pub fn host(budget: u64) -> StdArc<Host> {
    StdArc::new(Host::new(Ledger::new(Pages(budget), || {})))
}

impl World {
    fn new(pages: u64, can_remap: bool) -> World {
        let n = pages as usize;
        World {
            pages: vec![None; n],
            places: vec![Place::Home; n],
            copies: vec![None; n],
            watched: vec![true; n],
            protected: vec![false; n],
            large: 1,
            short_of: None,
            part_of: vec![None; n],
            latent: vec![false; n],
            plugged: None,
            can_remap,
            sees_copies: true,
            may_leave_holes: false,
            together: 2,
            unanswered: None,
            writes_between: None,
            outstanding: None,
            goes_on: false,
            left: Vec::new(),
            unwatched_from: None,
            waiters: Vec::new(),
            next_id: 0,
            removes: VecDeque::new(),
            removes_read: Vec::new(),
            changing: 0,
            calls: 0,
            crash: None,
            fail: Vec::new(),
            recovering: false,
        }
    }

    /// One access of the guest: what it sees, or the fault that it meets.
    fn access(&mut self, machine: &Machine, ppn: u64, write: Option<u64>) -> Result<u64, Access> {
        let p = ppn as usize;
        if write.is_some() && self.protected[p] && (self.is_mapped(p) || self.latent[p]) {
            return Err(Access::Protected);
        }
        let seen = if self.places[p] == Place::Home {
            if self.latent[p] {
                // The first touch zeroes all of it.
                let of = self.part_of[p];
                for i in 0..self.pages.len() {
                    if self.part_of[i] == of && std::mem::take(&mut self.latent[i]) {
                        self.pages[i] = Some(0);
                    }
                }
            }
            if self.pages[p].is_none() {
                if self.watched[p] {
                    return Err(if write.is_some() { Access::Missing } else { Access::Reading });
                }
                // Nobody hears of it: a fresh page.
                self.pages[p] = Some(0);
            }
            &mut self.pages[p]
        } else {
            &mut self.copies[p]
        };
        if write.is_some() {
            *seen = write;
        }
        Ok(seen.unwrap_or_else(|| match self.places[p] {
            Place::Store(page) => machine.read_store(page),
            Place::Zeros | Place::Home => 0,
        }))
    }

    /// Whether an access finds a page, be it protected.
    fn is_mapped(&self, p: usize) -> bool {
        self.places[p] != Place::Home || self.pages[p].is_some()
    }

    /// What the guest sees, whatever is protected.
    fn shown(&self, machine: &Machine, p: usize) -> Option<u64> {
        match self.places[p] {
            Place::Home => self.pages[p],
            Place::Zeros => Some(self.copies[p].unwrap_or(0)),
            Place::Store(page) => Some(self.copies[p].unwrap_or_else(|| machine.read_store(page))),
        }
    }

    fn present(&self) -> u64 {
        let latent = self.latent.iter().filter(|&&l| l).count();
        (self.pages.iter().flatten().count() + self.copies.iter().flatten().count() + latent) as u64
    }

    /// A hole in the file. A part of a large page stays, zeroed: somebody holds that.
    fn punch(&mut self, first: u64, n: u64) {
        let range = first as usize..(first + n) as usize;
        for p in range.clone() {
            let of = self.part_of[p];
            let whole = of.is_none()
                || (0..self.pages.len()).all(|i| self.part_of[i] != of || range.contains(&i));
            if whole {
                self.pages[p] = None;
                self.latent[p] = false;
            } else if self.pages[p].is_some() {
                self.pages[p] = Some(0);
            }
        }
        for p in range {
            if self.pages[p].is_none() && !self.latent[p] {
                self.part_of[p] = None;
            }
        }
    }

    /// The mapping of a run is new: nothing is copied, nothing watched.
    fn map(&mut self, run: &Remap) {
        for (i, ppn) in run.pages().enumerate() {
            let p = ppn.index();
            self.places[p] = match run.to {
                Place::Store(first) => {
                    Place::Store(StorePage::new(u64::from(first.get()) + i as u64).unwrap())
                }
                other => other,
            };
            self.copies[p] = None;
            self.protected[p] = false;
            self.watched[p] = false;
        }
    }

    fn watch(&mut self, run: &Remap) {
        for ppn in run.pages() {
            self.watched[ppn.index()] = true;
            self.protected[ppn.index()] = run.to != Place::Home;
        }
    }

    fn save(&mut self, machine: &Machine, run: &Remap) {
        for ppn in run.pages() {
            self.pages[ppn.index()] = self.shown(machine, ppn.index());
        }
    }

    /// What is left to do of a run.
    fn finish_remap(&mut self, machine: &Machine, run: &Remap) {
        for (i, ppn) in run.pages().enumerate() {
            let to = match run.to {
                Place::Store(first) => {
                    Place::Store(StorePage::new(u64::from(first.get()) + i as u64).unwrap())
                }
                other => other,
            };
            let one = Remap { first: ppn, n: 1, to };
            if self.places[ppn.index()] != to {
                if to == Place::Home {
                    self.save(machine, &one);
                }
                self.map(&one);
            }
            if !self.watched[ppn.index()] {
                self.watch(&one);
            }
        }
    }
}

impl Double {
    /// Of a host that has no other VM, and whose mappings cannot be changed.
    pub fn ram(pages: u64, host: StdArc<Host>) -> Ram {
        Double::on(&Machine::new(host, None), pages)
    }

    pub fn on(machine: &StdArc<Machine>, pages: u64) -> Ram {
        let mut vms = machine.vms.lock().unwrap();
        vms.push(0);
        Ram(StdArc::new(Double {
            world: Mutex::new(World::new(pages, machine.store.is_some())),
            changed: Condvar::new(),
            machine: machine.clone(),
            number: vms.len() - 1,
        }))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// Tells the machine what there is now; no other thread has run since `world` changed.
    fn count(&self, world: &World) {
        self.machine.vms.lock().unwrap()[self.number] = world.present();
    }

    // ---- the guest's side -------------------------------------------------------------------

    fn access(&self, ppn: u64, write: Option<u64>) -> u64 {
        let mut world = self.world();
        loop {
            let access = match world.access(&self.machine, ppn, write) {
                Ok(seen) => {
                    self.count(&world);
                    return seen;
                }
                Err(access) => access,
            };
            let id = world.next_id;
            world.next_id += 1;
            world.waiters.push(Waiter { ppn, access, read: false, id });
            self.changed.notify_all();
            while world.waiters.iter().any(|w| w.id == id) {
                world = self.changed.wait(world).unwrap();
            }
        }
    }

    /// Waits for as long as the page is not there.
    pub fn guest_read(&self, ppn: u64) -> u64 {
        self.access(ppn, None)
    }
    pub fn guest_write(&self, ppn: u64, token: u64) {
        self.access(ppn, Some(token));
    }

    /// One access of a guest whose manager runs in the same thread: the fault, if it faults.
    pub fn try_access(&self, ppn: u64, write: Option<u64>) -> Result<u64, Access> {
        let mut world = self.world();
        let result = world.access(&self.machine, ppn, write);
        self.count(&world);
        result
    }

    /// Gives pages up and waits until that is known.
    pub fn vmm_discard(&self, first: u64, n: u64, how: Discard) {
        match how {
            Discard::PunchThenTell => self.vmm_punch(first, n),
            // MADV_REMOVE is refused where the mapping is private.
            Discard::TellThenPunch if !self.all_home(first, n) => return,
            Discard::TellThenPunch => {}
        }
        let mut world = self.world();
        world.changing += 1;
        let id = world.next_id;
        world.next_id += 1;
        world.removes.push_back((first, n, id));
        self.changed.notify_all();
        while !world.removes_read.contains(&id) {
            world = self.changed.wait(world).unwrap();
        }
        // The kernel lets operations go on before the thread has punched.
        world.changing -= 1;
        drop(world);
        match how {
            Discard::PunchThenTell => self.vmm_zap(first, n),
            Discard::TellThenPunch => self.vmm_punch(first, n),
        }
    }

    fn all_home(&self, first: u64, n: u64) -> bool {
        let world = self.world();
        (first..first + n).all(|p| world.places[p as usize] == Place::Home)
    }

    /// `MADV_DONTNEED`: the copies in private mappings go; what was protected stays so.
    pub fn vmm_zap(&self, first: u64, n: u64) {
        let mut world = self.world();
        world.copies[first as usize..(first + n) as usize].fill(None);
        self.count(&world);
    }

    /// The announcement alone, without waiting; for tests of one thread.
    pub fn announce(&self, first: u64, n: u64) {
        let mut world = self.world();
        world.removes.push_back((first, n, u64::MAX));
        world.changing += 1;
    }

    /// The kernel can split a large page here; what is left of it stays one.
    pub fn vmm_punch(&self, first: u64, n: u64) {
        let mut world = self.world();
        let range = first as usize..(first + n) as usize;
        world.pages[range.clone()].fill(None);
        world.latent[range.clone()].fill(false);
        world.part_of[range].fill(None);
        self.count(&world);
    }

    /// The VMM writes its RAM file by the descriptor, past the pager.
    pub fn vmm_write(&self, ppn: u64, token: u64) {
        let mut world = self.world();
        world.pages[ppn as usize] = Some(token);
        self.count(&world);
    }

    /// The VMM answers at last; changes that it had yet to make are made.
    pub fn shim_answers(&self) {
        let mut world = self.world();
        for run in world.outstanding.take().unwrap_or_default() {
            world.finish_remap(&self.machine, &run);
        }
        self.count(&world);
    }

    /// RAM that is allocated in large pages of `n` where it can be.
    pub fn set_large(&self, n: u64) {
        self.world().large = n;
    }
    /// Of the next large page the kernel has `n` pages.
    pub fn set_short_of(&self, n: u64) {
        self.world().short_of = Some(n);
    }
    /// The guest writes to a page as soon as it is mapped elsewhere, before it is protected there.
    pub fn write_between(&self, ppn: u64, token: u64) {
        self.world().writes_between = Some((ppn, token));
    }
    /// From `first` on its guest has memory by blocks of `block` pages.
    pub fn set_plugged(&self, first: u64, block: u64) {
        self.world().plugged = Some((first, block));
    }
    /// Whether a home page is a part of a large one.
    pub fn is_part_of_large(&self, ppn: u64) -> bool {
        self.world().part_of[ppn as usize].is_some()
    }

    /// Whether the VMM goes on with what it was asked to change when the manager dies.
    pub fn goes_on(&self, on: bool) {
        self.world().goes_on = on;
    }

    // ---- the manager's side -----------------------------------------------------------------

    /// What a read of the userfaultfd gives: faults first, as the kernel does.
    pub fn read_events(&self) -> Vec<Notice> {
        let mut world = self.world();
        let mut out = Vec::new();
        for waiter in world.waiters.iter_mut().filter(|w| !w.read) {
            waiter.read = true;
            out.push(Notice::Fault(Ppn(waiter.ppn), waiter.access));
        }
        let mut told = false;
        while let Some((first, n, id)) = world.removes.pop_front() {
            out.push(Notice::Discard(Ppn(first), n));
            if id == u64::MAX {
                world.changing -= 1;
            } else {
                world.removes_read.push(id);
            }
            told = true;
        }
        if told {
            self.changed.notify_all();
        }
        out
    }

    /// Pages at home, and copies.
    pub fn present(&self) -> u64 {
        self.world().present()
    }
    pub fn copied_pages(&self) -> u64 {
        self.world().copies.iter().flatten().count() as u64
    }
    pub fn is_present(&self, ppn: u64) -> bool {
        self.world().pages[ppn as usize].is_some()
    }
    pub fn is_protected(&self, ppn: u64) -> bool {
        self.world().protected[ppn as usize]
    }
    pub fn place(&self, ppn: u64) -> Place {
        self.world().places[ppn as usize]
    }
    pub fn has_copy(&self, ppn: u64) -> bool {
        self.world().copies[ppn as usize].is_some()
    }
    pub fn is_watched(&self, ppn: u64) -> bool {
        self.world().watched[ppn as usize]
    }
    pub fn waiting(&self) -> usize {
        self.world().waiters.len()
    }
    pub fn calls(&self) -> u64 {
        self.world().calls
    }

    pub fn crash_at(&self, crash: CrashAt) {
        let mut world = self.world();
        world.calls = 0;
        world.crash = Some(crash);
    }
    pub fn fail_at(&self, call: u64, error: MemError) {
        let mut world = self.world();
        world.calls = 0;
        world.fail = vec![(call, error)];
    }
    /// Whether what `fail_at` said last came to be.
    pub fn has_failed(&self) -> bool {
        self.world().fail.is_empty()
    }
    /// Whether what `be_silent` or `fail_watching` said last did.
    pub fn has_been_silent(&self) -> bool {
        self.world().unanswered.is_none()
    }
    pub fn has_left_unwatched(&self) -> bool {
        self.world().unwatched_from.is_none()
    }
    /// Beside what `fail_at` said last.
    pub fn fail_also_at(&self, call: u64, error: MemError) {
        self.world().fail.push((call, error));
    }
    /// The VMM does not answer when its mappings are next changed.
    pub fn be_silent(&self, how: Unanswered) {
        self.world().unanswered = Some(how);
    }
    /// Whether the VMM's mappings can be changed.
    pub fn set_sees_copies(&self, sees: bool) {
        self.world().sees_copies = sees;
    }
    /// Whether the kernel may unmap what it then does not map anew.
    pub fn set_may_leave_holes(&self, may: bool) {
        self.world().may_leave_holes = may;
    }
    pub fn set_can_remap(&self, can: bool) {
        self.world().can_remap = can;
    }
    /// The next change of mapping stops at its n-th run: those of its group are mapped, and neither
    /// registered nor protected.
    pub fn fail_watching(&self, run: usize, error: MemError) {
        self.world().unwatched_from = Some((run, error));
    }
    /// How many runs the VMM maps before it registers and protects them.
    pub fn set_together(&self, runs: usize) {
        self.world().together = runs;
    }

    /// A new manager comes; whether the old one had died.
    pub fn revive(&self) -> bool {
        let mut world = self.world();
        // A VMM looks for another manager when it has done what it was told.
        let mut left = std::mem::take(&mut world.left);
        left.extend(world.outstanding.take().unwrap_or_default());
        for run in left {
            world.finish_remap(&self.machine, &run);
        }
        self.count(&world);
        world.crash = None;
        world.fail.clear();
        world.unanswered = None;
        world.unwatched_from = None;
        world.recovering = true;
        self.machine.dead.swap(false, std::sync::atomic::Ordering::SeqCst)
    }

    pub fn is_dead(&self) -> bool {
        self.machine.is_dead()
    }
    pub fn recovered(&self) {
        self.world().recovering = false;
    }

    /// A guest thread that waits for a page, without the thread.
    pub fn park(&self, ppn: u64, access: Access) {
        let mut world = self.world();
        let id = world.next_id;
        world.next_id += 1;
        world.waiters.push(Waiter { ppn, access, read: false, id });
    }

    /// One call of the manager.
    fn call<T>(
        &self,
        blocked_by_discards: bool,
        effect: impl FnOnce(&mut World) -> Result<T, MemError>,
    ) -> Result<T, MemError> {
        let mut world = self.world();
        assert!(!self.is_dead(), "a dead manager goes on");
        let call = world.calls;
        world.calls += 1;
        let crash = world.crash.filter(|c| c.call == call);
        if crash.is_some_and(|c| !c.after) {
            self.machine.die();
            return Err(MemError::Crash);
        }
        if let Some(at) = world.fail.iter().position(|f| f.0 == call) {
            return Err(world.fail.swap_remove(at).1);
        }
        let result = if blocked_by_discards && world.changing > 0 {
            Err(MemError::Again)
        } else {
            effect(&mut world)
        };
        if crash.is_some() {
            self.machine.die();
            return Err(MemError::Crash);
        }
        self.count(&world);
        let recovering = world.recovering;
        drop(world);
        self.changed.notify_all();
        if !recovering {
            self.check_accounting();
        }
        result
    }

    /// The machine never holds more than is booked. No other thread runs between the two looks.
    fn check_accounting(&self) {
        let used = self.machine.host.ledger.used();
        let present = self.machine.present();
        assert!(present <= used.0, "{present} pages present, {} booked", used.0);
    }

    /// An operation of the userfaultfd on a mapping that it is to be, and is registered.
    fn of(world: &World, ppn: Ppn, home_only: bool) -> Result<(), MemError> {
        let home = world.places[ppn.index()] == Place::Home;
        assert!(home || !home_only, "{ppn} is to be filled, and mapped elsewhere");
        if world.watched[ppn.index()] {
            return Ok(());
        }
        Err(MemError::Os { op: "not registered", ppn, source: Errno(libc::ENOENT) })
    }

    fn wake_in(world: &mut World, ppn: u64, n: u64) {
        world.waiters.retain(|w| !(ppn..ppn + n).contains(&w.ppn));
    }
}
