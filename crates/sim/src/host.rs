//! A host in virtual time. Each step: loads, samples, a decision of the policy, what the mechanisms do of
//! it, and what the guests touch meanwhile; a threshold that is crossed within a step brings another
//! decision in it, as it rings the manager's policy thread.
//!
//! Steps are a `tick` long while anything moves, and grow to `calm` while nothing does; they end where
//! an event or a change of a load is due.

use std::sync::Arc;
use std::time::Duration;

use ballast_policy::{
    Policy, Promise, Reserve, Snapshot, State, Trough, VmMisses, VmPressure, VmState, admit, decide,
};
use ballast_units::{Pages, VmId};

use crate::Millis;
use crate::measure::{HostMeasure, Standing};
use crate::random::Random;
use crate::scenario::{Change, Event, Settings};
use crate::vm::{Driver, Vm, VmSpec};

/// One host and its VMs.
#[derive(Debug)]
pub struct Host {
    settings: Arc<Settings>,
    seed: u64,
    /// Virtual time since the scenario began.
    pub now: Millis,
    /// Machine pages for VMs; an event may change it.
    pub budget: u64,
    reserve: Reserve,
    /// The least that was free since the last decision.
    trough: u64,
    /// VMs have started since.
    arrived: bool,
    /// As of the last decision.
    pub state: State,
    /// Those that run.
    pub vms: Vec<Vm>,
    /// VMs that are gone, with what was measured of them.
    gone: Vec<Vm>,
    /// To start, the next last.
    coming: Vec<VmSpec>,
    /// VMs that were refused until they were to be stopped.
    missed: usize,
    events: Vec<Event>,
    /// Swap can be written.
    disk: bool,
    next_id: u32,
    /// How long the next step may be.
    stride: Millis,
    /// Which VM is served first in this step.
    turn: usize,
    /// What was measured so far.
    pub measure: HostMeasure,
}

/// A VM that was refused asks again after this long.
const RETRY: Millis = 10_000;
/// A threshold may be crossed this often within one step.
const CROSSINGS: usize = 3;

impl Host {
    /// `specs` in any order.
    pub fn new(settings: Arc<Settings>, mut specs: Vec<VmSpec>, seed: u64) -> Host {
        specs.sort_by_key(|s| std::cmp::Reverse(s.start));
        let mut events = settings.events.clone();
        events.sort_by_key(|e| std::cmp::Reverse(e.at));
        let budget = settings.memory.0;
        Host {
            seed,
            now: 0,
            budget,
            reserve: Reserve::new(settings.scale, Pages(budget)),
            trough: budget,
            arrived: false,
            state: State::High,
            vms: Vec::new(),
            gone: Vec::new(),
            coming: specs,
            missed: 0,
            events,
            disk: true,
            next_id: 1,
            stride: settings.tick,
            turn: 0,
            measure: HostMeasure::default(),
            settings,
        }
    }

    fn overhead(&self) -> u64 {
        self.vms.iter().map(|vm| self.settings.models.overhead(vm.spec.nature.size)).sum()
    }

    /// Machine pages charged to VMs.
    fn consumed(&self) -> u64 {
        self.vms.iter().map(|vm| vm.guest.consumed(&self.settings.models)).sum()
    }

    /// Pages of the budget that are left beside that and the VMs' overhead.
    pub fn free(&self) -> u64 {
        self.budget.saturating_sub(self.overhead() + self.consumed())
    }

    /// Goes on to `until`, in any number of steps.
    pub fn run(&mut self, until: Millis) {
        while self.now < until {
            self.step(until);
        }
    }

    /// One step, which ends at `until` at the latest.
    fn step(&mut self, until: Millis) {
        let mut moved = self.take_events();
        moved |= self.depart_and_arrive();
        for vm in &mut self.vms {
            moved |= vm.follow_load(self.now);
        }
        let tick = self.settings.tick;
        self.stride = if moved { tick } else { self.stride };
        let due = self.vms.iter().map(|vm| vm.next_change(self.now)).min().unwrap_or(Millis::MAX);
        let due = due.min(self.events.last().map_or(Millis::MAX, |e| e.at));
        let due = due.min(self.coming.last().map_or(Millis::MAX, |s| s.start)).min(until);
        let stop = self.vms.iter().filter_map(|vm| vm.spec.stop).min().unwrap_or(Millis::MAX);
        let due = due.min(stop).max(self.now + 1);
        let dt = self.stride.min(due - self.now);

        for vm in &mut self.vms {
            vm.sample(dt);
        }
        let mut still = self.decide("period");
        for vm in &mut self.vms {
            still &= !vm.balloon(self.now, dt, &self.settings.models) && !vm.balloon_moves();
            vm.measure_tools(self.now, &self.settings.models);
        }
        still &= self.touch(dt);
        self.now += dt;
        let configured = self.vms.iter().map(|vm| vm.spec.nature.size).sum();
        // Parts of pages are rounded: by a page of each VM at most.
        let rounding = self.vms.len() as u64;
        let free = (self.budget + rounding).checked_sub(self.overhead() + self.consumed());
        let free = free.map(|free| free.saturating_sub(rounding));
        self.measure.step(dt, self.state, self.budget, free, configured);
        if cfg!(debug_assertions) {
            self.vms.iter().for_each(|vm| vm.guest.check());
        }
        self.stride =
            if still { (self.stride * 2).min(self.settings.calm.max(tick)) } else { tick };
    }

    /// One decision, and its orders; true if it asks for nothing new and takes from nobody.
    fn decide(&mut self, trigger: &str) -> bool {
        if self.vms.is_empty() {
            return true;
        }
        let m = &self.settings.models;
        let states: Vec<VmState> = self.vms.iter().map(|vm| vm.state(m, self.disk)).collect();
        let overhead = self.overhead();
        let free = self.free();
        let seen = Trough { free: Pages(self.trough.min(free)), starting: self.arrived };
        (self.trough, self.arrived) = (free, false);
        let now = Duration::from_millis(self.now);
        let scale = self.settings.scale;
        let thresholds = self.reserve.step(now, scale, Pages(self.budget), &seen);
        let decision = decide(Snapshot {
            trigger: trigger.to_owned(),
            before: self.state,
            thresholds,
            budget: Pages(self.budget),
            free: Pages(free),
            overhead: Pages(overhead),
            starting: Pages::ZERO,
            room: Pages::ZERO,
            vms: states,
            pools: Vec::new(),
            policy: self.policy(),
            nodes: Vec::new(),
            outside: Vec::new(),
        });
        self.measure.decisions += 1;
        self.measure.state_changes += u64::from(decision.state != self.state);
        self.state = decision.state;
        let mut still = self.state == State::High;
        for ((vm, plan), result) in self.vms.iter_mut().zip(&decision.plans).zip(&decision.results)
        {
            still &= vm.balloon_goal == plan.balloon_goal.0 && plan.evict.is_zero() && !plan.block;
            vm.target = result.target.0;
            vm.balloon_goal = plan.balloon_goal.0;
            vm.evict = plan.evict.0;
            vm.leave = plan.leave.0;
            vm.blocked = plan.block;
        }
        still
    }

    /// The policy that decides, and what it knows beside the samples.
    fn policy(&self) -> Policy {
        let kind = self.settings.policy;
        let mut policy = Policy { kind, ..Policy::default() };
        if kind.wants_misses() {
            policy.misses = self.vms.iter().map(|vm| self.curve(vm)).collect();
        }
        if kind.wants_pressure() {
            let report = |vm: &Vm| VmPressure { id: vm.id, some: vm.pressure };
            policy.pressure = self.vms.iter().map(report).collect();
        }
        policy
    }

    /// The predicted misses of a VM: of the shape of its accesses, with the active memory that
    /// sampling found, and an error of the prediction that changes every half hour.
    fn curve(&self, vm: &Vm) -> VmMisses {
        const POINTS: u64 = 8;
        let active = vm.estimate().0;
        let slot = self.now / 1_800_000;
        let mut random = Random::new(self.seed ^ slot, u64::from(vm.id.0) << 32);
        let factor = 1.0 + self.settings.models.curve_error * random.signed();
        let at = |i: u64| {
            let pages = active * i / POINTS;
            (Pages(pages), factor * vm.guest.misses_at(pages, active))
        };
        VmMisses { id: vm.id, points: (0..=POINTS).map(at).collect() }
    }

    /// Guests touch, mechanisms reclaim; true if next to nothing moved.
    fn touch(&mut self, dt: Millis) -> bool {
        let settings = Arc::clone(&self.settings);
        let m = &settings.models;
        let s = dt as f64 / 1e3;
        let mut evictions = (s * 1e6 / m.evict_page_us) as u64;
        let writable = if self.disk { m.swap_write_mib_s * 256.0 } else { 0.0 };
        let mut writes = (s * writable) as u64;
        let mut reads = (s * m.swap_reads_per_s) as u64;
        let before: Vec<u64> = self.vms.iter().map(|vm| vm.measure.evicted).collect();
        self.reclaim(&mut evictions, &mut writes);
        for vm in &mut self.vms {
            vm.guest.scan(m, s);
        }
        let n = self.vms.len();
        self.turn = self.turn.wrapping_add(1);
        let mut still = true;
        let mut crossings = 0;
        for i in 0..n {
            // Nobody is always first.
            let i = (i + self.turn) % n;
            let mut free = self.free();
            self.trough = self.trough.min(free);
            if free < self.reserve.thresholds().lower_edge(self.state).0 && crossings < CROSSINGS {
                crossings += 1;
                self.decide("a threshold was crossed");
                self.reclaim(&mut evictions, &mut writes);
                free = self.free();
            }
            let vm = &mut self.vms[i];
            let seen = vm.guest.work(m, s, free, reads, vm.blocked);
            reads -= seen.swapped.min(reads);
            vm.wants = seen.waited || seen.swapped > 0;
            vm.press(seen.work, dt);
            let moved = seen.touched + seen.compressed + seen.swapped;
            still &= moved * 1_000 <= vm.spec.nature.size && !seen.waited;
            let at = Standing {
                size: vm.spec.nature.size,
                active: vm.guest.demand.active.0,
                consumed: vm.guest.consumed(m),
                min: vm.spec.min,
                target: vm.target,
                balloon: vm.guest.balloon,
                blocked: vm.blocked,
            };
            vm.measure.step(dt, &seen, &at);
        }
        for (vm, before) in self.vms.iter_mut().zip(before) {
            let took = (vm.measure.evicted - before) as f64 * m.evict_page_us * 1e3;
            vm.evict_ns += if vm.evict > 0 { dt * 1_000_000 } else { took as u64 };
        }
        still
    }

    /// Evicts what the last decision asked for.
    fn reclaim(&mut self, evictions: &mut u64, writes: &mut u64) {
        let m = &self.settings.models;
        let n = self.vms.len();
        for i in 0..n {
            let vm = &mut self.vms[(i + self.turn) % n];
            let min = vm.spec.min.min(vm.spec.nature.size);
            let room = (vm.spec.nature.size - min).saturating_sub(vm.guest.swapped());
            let pages = vm.evict.min(*evictions);
            let (left, written) = vm.guest.evict(m, pages, vm.leave, *writes, room);
            vm.evict -= left.min(vm.evict);
            *evictions -= left.min(*evictions);
            *writes -= written.min(*writes);
            vm.measure.evicted += left;
            vm.measure.written += written;
        }
    }

    fn take_events(&mut self) -> bool {
        let mut any = false;
        while self.events.last().is_some_and(|e| e.at <= self.now) {
            let Some(event) = self.events.pop() else { break };
            self.apply(&event);
            any = true;
        }
        any
    }

    fn apply(&mut self, event: &Event) {
        for change in &event.changes {
            match *change {
                Change::Memory(pages) => {
                    self.budget = pages.0;
                }
                Change::Disk(works) => self.disk = works,
                _ => {}
            }
        }
        let running = self.vms.iter_mut().map(|vm| &mut vm.spec);
        for spec in running.chain(self.coming.iter_mut()).filter(|s| event.names(&s.name)) {
            for change in &event.changes {
                match *change {
                    Change::Shares(shares) => spec.shares = shares,
                    Change::Min(min) => spec.min = min.0.min(spec.nature.size),
                    Change::Max(max) => spec.max = max.0.min(spec.nature.size),
                    Change::Tax(tax) => spec.tax = tax,
                    Change::Driver(driver) => {
                        // A guest cannot grow a device.
                        if spec.driver != Driver::None {
                            spec.driver = driver;
                        }
                    }
                    Change::Memory(_) | Change::Disk(_) => {}
                }
            }
        }
    }

    fn depart_and_arrive(&mut self) -> bool {
        let now = self.now;
        let before = self.vms.len();
        let departs = |vm: &mut Vm| vm.spec.stop.is_some_and(|stop| stop <= now);
        self.gone.extend(self.vms.extract_if(.., departs));
        let mut changed = self.vms.len() != before;
        while self.coming.last().is_some_and(|s| s.start <= now) {
            let Some(mut spec) = self.coming.pop() else { break };
            if spec.stop.is_some_and(|stop| stop <= now) {
                self.missed += 1;
                continue;
            }
            if self.admit(&spec) {
                self.start(spec);
                changed = true;
            } else {
                self.measure.refused += 1;
                spec.start = now + RETRY;
                let at = self.coming.partition_point(|s| s.start > spec.start);
                self.coming.insert(at, spec);
            }
        }
        changed
    }

    /// Whether min and overhead can be promised (OSDI'02 s.6.2).
    fn admit(&self, spec: &VmSpec) -> bool {
        let m = &self.settings.models;
        let promise = |s: &VmSpec| {
            Promise::of(Pages(s.min), Pages(s.nature.size), Pages(m.overhead(s.nature.size)))
        };
        let need = promise(spec);
        let given: Vec<Promise> = self.vms.iter().map(|vm| promise(&vm.spec)).collect();
        let memory: Pages = given.iter().map(Promise::memory).sum();
        let swap: Pages = given.iter().map(|p| p.swap).sum();
        let goal = self.settings.scale.thresholds(Pages(self.budget)).goal();
        let unreserved = Pages(self.budget).saturating_sub(memory).saturating_sub(goal);
        admit(unreserved, self.settings.swap.saturating_sub(swap), &need, None).is_ok()
            // Its overhead is allocated before it starts.
            && self.free() > need.overhead.0
    }

    fn start(&mut self, spec: VmSpec) {
        let id = VmId(self.next_id);
        self.next_id += 1;
        self.arrived = true;
        let random = Random::new(self.seed, 0x5a11 + u64::from(id.0));
        let s = &self.settings;
        self.vms.push(Vm::new(spec, id, self.now, (s.balloon, s.tools), s.sampling, random));
    }

    /// All VMs there were: those that are gone, then those that run.
    pub fn all(&self) -> impl Iterator<Item = &Vm> {
        self.gone.iter().chain(&self.vms)
    }

    /// VMs that were not started so far: refused, or not due yet.
    pub fn never_started(&self) -> usize {
        self.coming.len() + self.missed
    }
}
