//! A deterministic double of guest memory: a few pages that behave as the kernel's do under a
//! userfaultfd (page cache, per-page write protection that survives a punched hole, faults, discard
//! events, EAGAIN), and that crash on demand. A page's contents are one number, repeated.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

#[cfg(not(feature = "shuttle"))]
pub mod vm;

use std::collections::VecDeque;
use std::sync::Arc as StdArc;

use ballast_pager::backend::{Backend, MemError, PageBuf};
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::memory::Access;
use ballast_pager::service::serve::Notice;
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

#[derive(Default)]
struct World {
    /// The page cache.
    pages: Vec<Option<u64>>,
    protected: Vec<bool>,
    waiters: Vec<Waiter>,
    next_id: u64,
    /// Discards announced and not read.
    removes: VecDeque<(u64, u64, u64)>,
    removes_read: Vec<u64>,
    /// VMM threads inside a discard: operations answer EAGAIN.
    changing: u32,
    calls: u64,
    crash: Option<CrashAt>,
    dead: bool,
    /// Operation number to fail once with this error.
    fail: Option<(u64, MemError)>,
    /// The books are being rebuilt: more may be present than is booked.
    recovering: bool,
}

pub struct Double {
    world: Mutex<World>,
    changed: Condvar,
    host: StdArc<Host>,
}

/// A shared double: the VMM outlives managers.
#[derive(Clone)]
pub struct Ram(pub StdArc<Double>);

pub fn host(budget: u64) -> StdArc<Host> {
    StdArc::new(Host::new(Ledger::new(Pages(budget), || {})))
}

impl Double {
    pub fn ram(pages: u64, host: StdArc<Host>) -> Ram {
        let n = pages as usize;
        let world = World { pages: vec![None; n], protected: vec![false; n], ..World::default() };
        Ram(StdArc::new(Double { world: Mutex::new(world), changed: Condvar::new(), host }))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    // ---- the guest's side -------------------------------------------------------------------

    fn access(&self, ppn: u64, write: Option<u64>) -> u64 {
        let mut world = self.world();
        loop {
            let access = match (world.pages[ppn as usize], world.protected[ppn as usize]) {
                (None, _) => Access::Missing,
                (Some(_), true) if write.is_some() => Access::Protected,
                (Some(now), _) => {
                    if write.is_some() {
                        world.pages[ppn as usize] = write;
                    }
                    return write.unwrap_or(now);
                }
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
        match (world.pages[ppn as usize], world.protected[ppn as usize]) {
            (None, _) => Err(Access::Missing),
            (Some(_), true) if write.is_some() => Err(Access::Protected),
            (Some(now), _) => {
                if write.is_some() {
                    world.pages[ppn as usize] = write;
                }
                Ok(write.unwrap_or(now))
            }
        }
    }

    /// Gives pages up and waits until that is known.
    pub fn vmm_discard(&self, first: u64, n: u64, how: Discard) {
        if how == Discard::PunchThenTell {
            self.vmm_punch(first, n);
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
        if how == Discard::TellThenPunch {
            self.vmm_punch(first, n);
        }
    }

    /// The announcement alone, without waiting; for tests of one thread.
    pub fn announce(&self, first: u64, n: u64) {
        let mut world = self.world();
        world.removes.push_back((first, n, u64::MAX));
        world.changing += 1;
    }

    pub fn vmm_punch(&self, first: u64, n: u64) {
        let mut world = self.world();
        for p in first..first + n {
            world.pages[p as usize] = None;
        }
    }

    /// The VMM writes its RAM file by the descriptor, past the pager.
    pub fn vmm_write(&self, ppn: u64, token: u64) {
        self.world().pages[ppn as usize] = Some(token);
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

    pub fn present(&self) -> u64 {
        self.world().pages.iter().flatten().count() as u64
    }
    pub fn is_present(&self, ppn: u64) -> bool {
        self.world().pages[ppn as usize].is_some()
    }
    pub fn is_protected(&self, ppn: u64) -> bool {
        self.world().protected[ppn as usize]
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
        world.fail = Some((call, error));
    }
    /// A new manager comes; whether the old one had died.
    pub fn revive(&self) -> bool {
        let mut world = self.world();
        world.crash = None;
        world.fail = None;
        world.recovering = true;
        std::mem::take(&mut world.dead)
    }

    pub fn is_dead(&self) -> bool {
        self.world().dead
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
        assert!(!world.dead, "a dead manager goes on");
        let call = world.calls;
        world.calls += 1;
        let crash = world.crash.filter(|c| c.call == call);
        if crash.is_some_and(|c| !c.after) {
            world.dead = true;
            return Err(MemError::Crash);
        }
        if let Some((_, e)) = world.fail.take_if(|f| f.0 == call) {
            return Err(e);
        }
        let result = if blocked_by_discards && world.changing > 0 {
            Err(MemError::Again)
        } else {
            effect(&mut world)
        };
        if crash.is_some() {
            world.dead = true;
            return Err(MemError::Crash);
        }
        let present = world.pages.iter().flatten().count() as u64;
        let recovering = world.recovering;
        drop(world);
        self.changed.notify_all();
        if recovering {
            return result;
        }
        let used = self.host.ledger.used();
        // Others may free pages between the two looks, never book fewer than are there; so a
        // shortfall is looked at twice.
        assert!(
            present <= used.0 || self.present() <= self.host.ledger.used().0,
            "{present} pages present, {} booked",
            used.0
        );
        result
    }

    fn wake_in(world: &mut World, ppn: u64, n: u64) {
        world.waiters.retain(|w| !(ppn..ppn + n).contains(&w.ppn));
    }
}

impl Backend for Ram {
    fn protect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.0.call(true, |world| {
            world.protected[ppn.index()] = true;
            Ok(())
        })
    }

    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError> {
        self.0.call(true, |world| {
            world.protected[ppn.index()] = false;
            Double::wake_in(world, ppn.0, 1);
            Ok(())
        })
    }

    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError> {
        self.0.call(false, |world| {
            into.copy_from_slice(&page_of(world.pages[ppn.index()].unwrap_or(0))[..]);
            Ok(())
        })
    }

    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(false, |world| {
            for p in ppn.0..ppn.0 + n {
                world.pages[p as usize] = None;
            }
            Ok(())
        })
    }

    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError> {
        self.0.call(true, |world| {
            if world.pages[ppn.index()].is_some() {
                return Err(MemError::Exists);
            }
            let run = (ppn.0..ppn.0 + n).take_while(|&p| world.pages[p as usize].is_none()).count()
                as u64;
            for p in ppn.0..ppn.0 + run {
                world.pages[p as usize] = Some(0);
                world.protected[p as usize] = false;
            }
            Double::wake_in(world, ppn.0, run);
            Ok(run)
        })
    }

    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError> {
        let token = token_of(bytes);
        self.0.call(true, |world| {
            if world.pages[ppn.index()].is_some() {
                return Err(MemError::Exists);
            }
            world.pages[ppn.index()] = Some(token);
            world.protected[ppn.index()] = false;
            Double::wake_in(world, ppn.0, 1);
            Ok(())
        })
    }

    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError> {
        self.0.call(false, |world| {
            Double::wake_in(world, ppn.0, n);
            Ok(())
        })
    }

    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        self.0.call(false, |world| {
            Ok((ppn.0..end).find(|&p| world.pages[p as usize].is_some()).unwrap_or(end))
        })
    }
}
