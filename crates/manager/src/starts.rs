//! VMs that wait for the memory that they are promised to be made free: who is first, how much is
//! still missing, and what is done about it.
//!
//! A start is admitted when its promise can be kept; it begins when min + overhead are free beside what
//! keeps the host out of soft. The policy is told to make that room, from VMs above what they are
//! entitled to beside the newcomer. Whoever came first is served first, but that VMs whose guests rebooted
//! come before those that never ran; what was made free for one that has begun and does not use it yet is not
//! taken for the next.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_api::{ErrorCode, RunState, StartView, VmView};
use ballast_policy::plan::Reason;
use ballast_policy::pools::Member;
use ballast_policy::{Promise, State};
use ballast_units::Pages;

use crate::manager::{Failure, Manager, Pledge};
use crate::sync::lock;
use crate::views;
use crate::vm::{Vm, VmParams};

/// How long what was made free for a VM is kept for it, once it has begun.
const KEPT: Duration = Duration::from_secs(60);
/// How long a start that is called off may take to end. Another of its name may wait by then.
const CALLED_OFF: Duration = Duration::from_secs(2);
/// How often a start looks whether there is room.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
struct Start {
    name: String,
    size: Pages,
    params: VmParams,
    promise: Promise,
    since: Instant,
    /// None: until it has its room, for its guest rebooted.
    wait: Option<Duration>,
    /// When it was given its room.
    begun: Option<Instant>,
    /// By `vm stop`: it is given none.
    called_off: bool,
}

impl Start {
    /// What is to be free for it, if it has `consumed` so much.
    fn room(&self, consumed: Pages) -> Pages {
        match self.begun {
            // Its overhead is reserved by now.
            Some(_) => self.promise.min.saturating_sub(consumed),
            None => self.promise.memory(),
        }
    }
}

/// In order of arrival.
#[derive(Default)]
pub struct Starts {
    waiting: Mutex<Vec<Start>>,
    /// Pages that VMMs wait for which are there already.
    wanted: AtomicU64,
}

/// Memory of a VMM that is there already.
pub(crate) struct Room<'a> {
    /// Of its VM.
    pub name: &'a str,
    /// To be reserved.
    pub need: Pages,
    /// It is all of its memory: none of it can be taken from it.
    pub unpaged: bool,
}

/// Memory is made free for a VMM that is there already, for as long as this lives.
pub(crate) struct Wanted<'a>(&'a AtomicU64, Pages);

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1.0, Ordering::Relaxed);
    }
}

impl Starts {
    /// So much is to be free, beside what starts are to have.
    pub(crate) fn want(&self, pages: Pages) -> Wanted<'_> {
        self.wanted.fetch_add(pages.0, Ordering::Relaxed);
        Wanted(&self.wanted, pages)
    }

    /// What those before `name` are to have, and `name` itself; of all, without a name.
    fn room(&self, name: Option<&str>, consumed: &impl Fn(&str) -> Pages) -> (Pages, Pages) {
        let starts = lock(&self.waiting);
        // Those that are there already come before all.
        let mut ahead = Pages(self.wanted.load(Ordering::Relaxed));
        for start in starts.iter() {
            // Of those that are no VMs yet it is not asked: each waiting start asks for all, many times a second.
            let has = start.begun.map_or(Pages::ZERO, |_| consumed(&start.name));
            let room = start.room(has);
            if name == Some(&start.name) {
                return (ahead, room);
            }
            ahead += room;
        }
        (ahead, Pages::ZERO)
    }

    fn enter(&self, start: Start) {
        let mut starts = lock(&self.waiting);
        // One of that name that has ended again.
        starts.retain(|other| other.name != start.name);
        // One that reboots had what it needs, and has just given it back.
        let newcomers = |other: &Start| other.begun.is_none() && other.wait.is_some();
        let at = starts.iter().position(newcomers).filter(|_| start.wait.is_none());
        let at = at.unwrap_or(starts.len());
        starts.insert(at, start);
    }

    /// Gives it its room, unless it was called off.
    fn begin(&self, name: &str) -> bool {
        let mut starts = lock(&self.waiting);
        let start = starts.iter_mut().find(|start| start.name == name && !start.called_off);
        start.map(|start| start.begun = Some(Instant::now())).is_some()
    }

    /// As it was; None if no start of that name waits.
    fn call_off(&self, name: &str) -> Option<Start> {
        let mut starts = lock(&self.waiting);
        let start = starts.iter_mut().find(|start| start.name == name && start.begun.is_none())?;
        start.called_off = true;
        Some(start.clone())
    }

    fn is_called_off(&self, name: &str) -> bool {
        lock(&self.waiting).iter().any(|start| start.name == name && start.called_off)
    }
}

/// Takes a start off the list, however it ends, unless it has begun.
struct Waiting<'a>(&'a Starts, &'a str);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.waiting).retain(|start| start.name != self.1 || start.begun.is_some());
    }
}

impl Manager {
    /// What a VM consumes; nothing, if it is not there yet.
    fn consumed_by(&self, name: &str) -> Pages {
        self.find(name).map_or(Pages::ZERO, |vm| vm.consumed())
    }

    /// Promised to VMs that are not there yet.
    pub(crate) fn promised_to_starts(&self) -> Vec<Member> {
        let vms = self.vms();
        let starting = lock(&self.starting);
        let coming = starting.iter().filter(|(name, _)| !vms.iter().any(|vm| vm.name == **name));
        let member = |pledge: &Pledge| Member {
            pool: self.pools.id(pledge.pool.as_deref()),
            overhead: pledge.promise.memory(),
        };
        coming.map(|(_, pledge)| member(pledge)).collect()
    }

    /// Whether it is being started; not where its name is held for a next start.
    fn is_starting(&self, name: &str) -> bool {
        lock(&self.starting).get(name).is_some_and(|pledge| pledge.rebooted.is_none())
    }

    /// The overhead of those that were given their room, and are no VMs yet.
    pub(crate) fn reserved_for_starts(&self) -> Pages {
        let vms = self.vms();
        let coming = |start: &&Start| {
            start.begun.is_some()
                && !vms.iter().any(|vm| vm.name == start.name)
                && self.is_starting(&start.name)
        };
        lock(&self.starts.waiting).iter().filter(coming).map(|start| start.promise.overhead).sum()
    }

    /// What is booked for VMs that are not among `vms` yet: of those that wait to be taken over at least what they are
    /// promised, for it moves from one book to another as they are; of those that start, or that others start, their overhead.
    pub(crate) fn booked_for_coming(&self, vms: &[Arc<Vm>]) -> Pages {
        let waiting = self.waiting();
        let starting = lock(&self.starting);
        let coming = starting
            .iter()
            .filter(|(name, of)| of.rebooted.is_none() && !vms.iter().any(|vm| vm.name == **name));
        let booked = |(name, of): (&String, &Pledge)| {
            let waits = waiting.iter().find(|waits| waits.record.name == *name);
            waits.map_or(of.promise.overhead, |waits| {
                (waits.held.pages() + waits.record.overhead).max(of.promise.memory())
            })
        };
        coming.map(booked).sum()
    }

    /// What is to be free for VMs that start, beside the goal.
    pub(crate) fn room_for_starts(&self) -> Pages {
        let there = |name: &str| self.find(name).is_some() || self.is_starting(name);
        lock(&self.starts.waiting).retain(|start| match start.begun {
            Some(begun) => begun.elapsed() < KEPT && there(&start.name),
            None => true,
        });
        self.starts.room(None, &|name| self.consumed_by(name)).0
    }

    /// Reserves memory for a VMM that is there already; the policy makes it free if it must.
    ///
    /// # Errors
    /// NoRoom: it was not free within so long.
    pub(crate) async fn make_room(&self, room: Room<'_>, within: Duration) -> Result<(), Failure> {
        let Room { name, need, unpaged } = room;
        let (keep, counted) = match unpaged {
            // It may take it all at once, and the host is not to be short by that. What was made free for its start, it has
            // not used.
            true => {
                let own = self.starts.room(Some(name), &|name| self.consumed_by(name)).1;
                (self.highest_thresholds().lower_edge(State::High), own)
            }
            false => (Pages::ZERO, Pages::ZERO),
        };
        let deadline = tokio::time::Instant::now() + within;
        let _wanted = self.starts.want(need.saturating_sub(counted));
        let ledger = &self.host.ledger;
        let mut told = false;
        while ledger.free() < need + keep || !ledger.try_reserve(need) {
            if tokio::time::Instant::now() > deadline {
                // Better short of memory than without the VM.
                if ledger.try_reserve(need) {
                    return Ok(());
                }
                let what = if unpaged { "all that it may have" } else { "overhead memory" };
                let (within, free) = (within.as_secs(), ledger.free());
                let why = format!("no room for {what}, {need}, within {within} s ({free} free)");
                return Err(Failure::new(ErrorCode::NoRoom, why));
            }
            // The policy looks by itself once a second.
            if !std::mem::replace(&mut told, true) {
                self.kick.ring(format!("{name} waits for room"));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until there is room for a VM of this size that was promised memory, and reserves its overhead. Without a limit
    /// for `wait` its guest rebooted.
    ///
    /// # Errors
    /// No room within `wait`; says how much was missing. Or it was called off, or the manager ends.
    pub(crate) async fn wait_for_room(
        &self,
        name: &str,
        newcomer: (Pages, &VmParams),
        promise: Promise,
        wait: Option<Duration>,
    ) -> Result<(), Failure> {
        let since = Instant::now();
        self.starts.enter(Start {
            name: name.to_owned(),
            size: newcomer.0,
            params: newcomer.1.clone(),
            promise,
            since,
            wait,
            begun: None,
            called_off: false,
        });
        let _waiting = Waiting(&self.starts, name);
        // What was kept for those that have ended since is nobody's any more.
        self.room_for_starts();
        let mut told = false;
        let mut asked = None;
        loop {
            let (ahead, own) = self.starts.room(Some(name), &|name| self.consumed_by(name));
            let keep = self.highest_thresholds().lower_edge(State::High);
            let free = self.host.ledger.free();
            if free >= ahead + own + keep && self.host.ledger.try_reserve(promise.overhead) {
                if self.starts.begin(name) {
                    return Ok(());
                }
                self.host.ledger.release(promise.overhead);
            }
            let ends = if self.starts.is_called_off(name) {
                Some("its start was called off (vm stop)")
            } else {
                self.is_closed_to(wait.is_none()).then_some("the manager is ending")
            };
            if let Some(why) = ends {
                return Err(Failure::new(ErrorCode::Conflict, format!("{name}: {why}")));
            }
            if let Some(wait) = wait.filter(|wait| since.elapsed() >= *wait) {
                return Err(no_room(name, promise, (ahead, keep, free), wait));
            }
            if !std::mem::replace(&mut told, true) {
                tracing::info!(vm = name, "waits for {own} to be made free ({free} are free)");
            }
            // The policy looks by itself once a second; what it is to make free is new.
            if asked.replace((ahead, own, keep)) != Some((ahead, own, keep)) {
                self.kick.ring(format!("{name} waits for room"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Calls a start off that waits for room. Its name is free when this returns. What it was to be; None if none of
    /// that name waits.
    pub(crate) async fn call_off(&self, name: &str) -> Option<VmView> {
        let start = self.starts.call_off(name)?;
        let how = format!(
            "its start was called off; it had waited {} s",
            start.since.elapsed().as_secs()
        );
        tracing::info!(vm = name, "{how}");
        let begun = Instant::now();
        while lock(&self.starting).contains_key(name) && begun.elapsed() < CALLED_OFF {
            tokio::time::sleep(LOOK).await;
        }
        let view = views::never_was(self, name, start.size, &start.params);
        Some(VmView { ended: Some(how), ..view })
    }

    /// VMs that wait for room, in the order in which they get it.
    pub fn waiting_starts(&self) -> Vec<StartView> {
        let starts: Vec<Start> = lock(&self.starts.waiting).clone();
        let keep = self.highest_thresholds().lower_edge(State::High);
        let free = self.host.ledger.free();
        let freeing = self.being_freed();
        let bytes = |pages: Pages| pages.bytes().0;
        starts
            .iter()
            .filter(|start| start.begun.is_none())
            .map(|start| {
                let (ahead, own) =
                    self.starts.room(Some(&start.name), &|name| self.consumed_by(name));
                StartView {
                    name: start.name.clone(),
                    need: bytes(own),
                    ahead: bytes(ahead),
                    keep: bytes(keep),
                    free: bytes(free),
                    missing: bytes((own + ahead + keep).saturating_sub(free)),
                    waited_s: start.since.elapsed().as_secs_f64(),
                    wait_s: start.wait.map(|wait| wait.as_secs_f64()),
                    freeing: freeing.clone(),
                }
            })
            .collect()
    }

    /// What is asked of VMs now, in words.
    fn being_freed(&self) -> Vec<String> {
        let Some((_, decision)) = self.decision() else { return Vec::new() };
        let vms = self.vms();
        let running = vms.iter().filter(|vm| vm.run_state() != RunState::Stopped);
        let mut told = Vec::new();
        for vm in running {
            let Some(plan) = decision.plans.iter().find(|plan| plan.id == vm.id) else { continue };
            let Reason::Reclaim { consumed, leave, balloon, evict, .. } = plan.reason else {
                continue;
            };
            let mut how = Vec::new();
            if vm.configured().saturating_sub(balloon) < consumed {
                how.push(format!("balloon to {balloon}"));
            }
            if !evict.is_zero() {
                how.push(format!("{evict} evicted"));
            }
            let by = if how.is_empty() { "by its balloon".into() } else { how.join(", ") };
            told.push(format!("{}: {} ({by})", vm.name, consumed.saturating_sub(leave)));
        }
        told
    }
}

/// Why a VM does not start after it has waited; what VMs before it need, what the host keeps free, and what is free.
fn no_room(
    name: &str,
    promise: Promise,
    (ahead, keep, free): (Pages, Pages, Pages),
    waited: Duration,
) -> Failure {
    let others =
        if ahead.is_zero() { String::new() } else { format!(", {ahead} for VMs that came before") };
    let why = format!(
        "{name}: needs {} free (min {} and {} of overhead) beside the {keep} that the host keeps free{others}; {free} \
         were free after {} s",
        promise.memory(),
        promise.min,
        promise.overhead,
        waited.as_secs()
    );
    Failure::new(ErrorCode::NoRoom, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Asked;

    #[test]
    fn the_first_comes_first_and_what_is_free_is_counted_once() {
        let starts = Starts::default();
        let start = |name: &str, min: u64, begun: bool| Start {
            name: name.into(),
            promise: Promise { min: Pages(min), overhead: Pages(10), swap: Pages::ZERO },
            since: Instant::now(),
            wait: Some(KEPT),
            begun: begun.then(Instant::now),
            called_off: false,
            size: Pages(200),
            params: VmParams::resolve(&[], name, Pages(200).into(), Asked::default()).unwrap(),
        };
        lock(&starts.waiting).extend([
            start("begun", 100, true),
            start("second", 50, false),
            start("third", 5, false),
        ]);
        let none = |_: &str| Pages::ZERO;
        assert_eq!(starts.room(Some("second"), &none), (Pages(100), Pages(60)));
        assert_eq!(starts.room(Some("third"), &none), (Pages(160), Pages(15)));
        // What it uses by now is its own.
        let some = |name: &str| if name == "begun" { Pages(70) } else { Pages::ZERO };
        assert_eq!(starts.room(Some("second"), &some), (Pages(30), Pages(60)));
        assert_eq!(starts.room(None, &some).0, Pages(105));
        // Who was called off is given no room; who has begun is a VM, or will be.
        assert!(starts.call_off("second").is_some() && !starts.begin("second"));
        assert!(starts.call_off("begun").is_none() && starts.call_off("nobody").is_none());
        // Who gives up leaves; who has begun stays.
        drop(Waiting(&starts, "second"));
        drop(Waiting(&starts, "begun"));
        assert_eq!(starts.room(None, &none).0, Pages(115));
        // A VMM that is there already comes before all, for as long as it waits.
        let wanted = starts.want(Pages(7));
        assert_eq!(starts.room(None, &none).0, Pages(122));
        assert_eq!(starts.room(Some("third"), &none), (Pages(107), Pages(15)));
        drop(wanted);
        assert_eq!(starts.room(None, &none).0, Pages(115));

        // Whose guest rebooted comes before who never ran, and behind others like it.
        for name in ["rebooted", "after it"] {
            starts.enter(Start { wait: None, ..start(name, 1, false) });
        }
        starts.enter(start("last", 1, false));
        let names: Vec<String> =
            lock(&starts.waiting).iter().map(|start| start.name.clone()).collect();
        assert_eq!(names, ["begun", "rebooted", "after it", "third", "last"]);
    }

    /// It is there already, and may take its memory at any moment.
    #[tokio::test]
    async fn what_is_not_paged_is_booked_though_the_host_is_short_by_it_then() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let ledger = &manager.host.ledger;
        let need = Pages::from_mib(64);
        let within = Duration::from_millis(60);
        let room = |unpaged| manager.make_room(Room { name: "a", need, unpaged }, within);
        ledger.adopt(ledger.free().saturating_sub(need));
        // One that is paged keeps nothing free beside its overhead.
        room(false).await.unwrap();
        assert_eq!(ledger.free(), Pages::ZERO);
        ledger.release(need);
        // What keeps the host out of soft is waited for, and not insisted on.
        room(true).await.unwrap();
        assert_eq!(ledger.free(), Pages::ZERO);
        ledger.release(need - Pages(1));
        for unpaged in [false, true] {
            let refused = room(unpaged).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
            assert_eq!(ledger.free(), need - Pages(1));
        }
        assert_eq!(manager.room_for_starts(), Pages::ZERO, "nobody waits any more");
    }

    #[tokio::test]
    async fn what_was_made_free_for_a_start_is_not_made_free_twice() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let (size, min) = (Pages::from_mib(64), Pages::from_mib(24));
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let promise = Promise { min, overhead: Pages(10), swap: Pages::ZERO };
        manager.promise("a", Pledge { promise, pool: None, rebooted: None }).unwrap();
        manager.wait_for_room("a", (size, &params), promise, Some(KEPT)).await.unwrap();
        manager.host.ledger.adopt(manager.host.ledger.free());
        assert_eq!(manager.room_for_starts(), min);
        let waits = manager.clone();
        let waits = tokio::spawn(async move {
            let room = Room { name: "a", need: size, unpaged: true };
            waits.make_room(room, Duration::from_millis(200)).await
        });
        while manager.room_for_starts() == min {
            tokio::task::yield_now().await;
        }
        assert_eq!(manager.room_for_starts(), size);
        waits.await.unwrap().unwrap_err();
        assert_eq!(manager.room_for_starts(), min);
        // It is kept for a while, and for as long as its start is not done with.
        let start = lock(&manager.starts.waiting)[0].clone();
        lock(&manager.starts.waiting)[0].begun = Some(Instant::now().checked_sub(KEPT).unwrap());
        assert_eq!(manager.room_for_starts(), Pages::ZERO);
        lock(&manager.starts.waiting).push(start);
        assert_eq!(manager.room_for_starts(), min);
        manager.promise_settled("a");
        assert_eq!(manager.room_for_starts(), Pages::ZERO);
    }

    #[tokio::test]
    async fn a_start_that_is_called_off_as_its_room_comes_takes_none() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let ledger = &manager.host.ledger;
        let (size, min) = (Pages::from_mib(64), Pages::from_mib(24));
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let promise = Promise { min, overhead: Pages(10), swap: Pages::ZERO };
        let (used, free) = (ledger.used(), ledger.free());
        ledger.adopt(free);
        let waits = manager.clone();
        let waits = tokio::spawn(async move {
            waits.wait_for_room("a", (size, &params), promise, Some(KEPT)).await
        });
        while manager.waiting_starts().is_empty() {
            tokio::task::yield_now().await;
        }
        // It looks for room at no time between the two: this thread is its, too.
        assert!(manager.starts.call_off("a").is_some());
        ledger.release(free);
        let refused = waits.await.unwrap().unwrap_err();
        assert!(refused.message.contains("called off"), "{refused}");
        assert_eq!(ledger.used(), used);
    }
}
