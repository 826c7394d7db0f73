//! A VM of a simulated host: the guest, its parameters, what is known of it, and its balloon.

use std::time::Duration;

use ballast_policy::{
    BalloonConfig, BalloonControl, BalloonInput, BalloonOutput, SamplingConfig, TaxRate,
    ToolControl, ToolOrder, Tools, ToolsInput, VmDemand, VmState, WorkingSet,
};
use ballast_units::{Pages, VmId};

use crate::Millis;
use crate::guest::{Guest, Nature};
use crate::load::Load;
use crate::measure::VmMeasure;
use crate::models::Models;
use crate::random::Random;

/// What a guest's balloon driver does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Driver {
    /// Follows, at the speed of the model.
    Follows,
    /// Follows, pages per second.
    Slow(u64),
    /// There is none.
    None,
    /// There is one, and it does not move.
    Dead,
}

/// What a VM is started with. Moments are since the scenario began.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Unique on its host.
    pub name: String,
    /// The group it belongs to, by its place in the scenario.
    pub group: usize,
    /// What of its guest does not change.
    pub nature: Nature,
    /// Guaranteed, pages.
    pub min: u64,
    /// The most it may have, pages: at most its size.
    pub max: u64,
    /// At least 1.
    pub shares: u32,
    /// On its idle memory.
    pub tax: TaxRate,
    /// Of its balloon.
    pub driver: Driver,
    /// What its guest wants over time.
    pub load: Load,
    /// When it asks to be started.
    pub start: Millis,
    /// When it is stopped, after `start`. None: never.
    pub stop: Option<Millis>,
    /// For so long after its start it boots, and its balloon has no driver.
    pub boot: Millis,
    /// Meanwhile it holds at least so many pages, and uses half of them.
    pub boot_touch: u64,
}

/// A VM that runs.
#[derive(Debug)]
pub struct Vm {
    /// Its parameters, which events change.
    pub spec: VmSpec,
    /// Unique on its host.
    pub id: VmId,
    /// Its memory.
    pub guest: Guest,
    started: Millis,
    /// Pages that its balloon is to hold, by the last decision.
    pub balloon_goal: u64,
    output: BalloonOutput,
    control: BalloonControl,
    /// Pages that its balloon was last told to hold.
    commanded: u64,
    tool_control: ToolControl,
    tools: Tools,
    set: WorkingSet,
    samples: Samples,
    random: Random,
    /// Pages it is entitled to, by the last decision.
    pub target: u64,
    /// Nanoseconds in which it had pages to evict.
    pub evict_ns: u64,
    /// Pages still to be evicted of what the last decision asked for.
    pub evict: u64,
    /// Pages consumed at which that ends.
    pub leave: u64,
    /// Its allocations wait.
    pub blocked: bool,
    /// It faulted something in from swap in the last step, or waited for memory.
    pub wants: bool,
    /// Its work is held up: the average of the last half minute or so, 0 to 1.
    pub pressure: f64,
    /// What was measured since its start.
    pub measure: VmMeasure,
}

/// The pages under sample.
#[derive(Clone, Copy, Debug, Default)]
struct Samples {
    /// Of them in active memory and not touched yet; touched; all in active memory.
    waiting: u32,
    touched: u32,
    inside: u32,
    active: u64,
}

/// The pressure's time constant, seconds.
const PRESSURE_S: f64 = 30.0;

impl Vm {
    /// One that starts at `now`.
    pub fn new(
        spec: VmSpec,
        id: VmId,
        now: Millis,
        (balloon, order): (BalloonConfig, ToolOrder),
        sampling: SamplingConfig,
        random: Random,
    ) -> Vm {
        let guest = Guest::new(spec.nature);
        let size = Pages(spec.nature.size);
        Vm {
            id,
            guest,
            started: now,
            balloon_goal: 0,
            output: BalloonOutput::UNKNOWN,
            control: BalloonControl::new(balloon),
            commanded: 0,
            tool_control: ToolControl::new(order),
            tools: Tools::default(),
            set: WorkingSet::new(sampling, size),
            samples: Samples::default(),
            random,
            target: spec.max,
            evict: 0,
            evict_ns: 0,
            leave: 0,
            blocked: false,
            wants: false,
            pressure: 0.0,
            measure: VmMeasure::default(),
            spec,
        }
    }

    fn booting(&self, now: Millis) -> bool {
        now - self.started < self.spec.boot
    }

    /// Its load goes on to `now`; true if it demands something else.
    pub fn follow_load(&mut self, now: Millis) -> bool {
        let at = now - self.started;
        self.spec.load.advance(at);
        let mut demand = self.spec.load.demand();
        if self.booting(now) {
            let touch = Pages(self.spec.boot_touch);
            demand.used = demand.used.max(touch);
            demand.active = demand.active.max(Pages(touch.0 / 2));
        }
        self.guest.set_demand(demand)
    }

    /// When its demand changes next.
    pub fn next_change(&self, now: Millis) -> Millis {
        let next = self.spec.load.next().saturating_add(self.started);
        if self.booting(now) { next.min(self.started + self.spec.boot) } else { next }
    }

    /// The sampling of active memory (OSDI'02 s.5.3) over the last `dt` milliseconds: which of the
    /// sampled pages lie in active memory follows it as it grows and shrinks.
    pub fn sample(&mut self, dt: Millis) {
        let size = self.spec.nature.size;
        let active = self.guest.demand.active.0.min(self.guest.room());
        let n = self.set.config().samples.min(u32::try_from(size).unwrap_or(u32::MAX));
        let s = &mut self.samples;
        if active > s.active {
            let part = (active - s.active) as f64 / (size - s.active).max(1) as f64;
            let more = self.random.binomial(n - s.inside, part);
            s.inside += more;
            s.waiting += more.min(n - s.touched - s.waiting);
        } else if active < s.active {
            let part = (s.active - active) as f64 / s.active as f64;
            s.inside -= self.random.binomial(s.inside, part);
            s.waiting -= self.random.binomial(s.waiting, part);
        }
        s.active = active;
        let every = self.spec.nature.touch_every * 1e3;
        let seen = self.random.binomial(s.waiting, 1.0 - (-(dt as f64) / every).exp());
        s.waiting -= seen;
        s.touched += seen;
        self.set.touched(seen);
        if self.set.advance(Duration::from_millis(dt)) {
            self.set.end_period();
            self.set.begin_period(n);
            let inside = self.random.binomial(n, active as f64 / size.max(1) as f64);
            *s = Samples { waiting: inside, touched: 0, inside, active };
        }
    }

    /// Its active memory, as sampling found it.
    pub fn estimate(&self) -> Pages {
        self.set.estimate().estimate
    }

    /// What the policy is told of it; without a `disk` that works it has no room in swap.
    pub fn state(&self, m: &Models, disk: bool) -> VmState {
        let spec = &self.spec;
        let reserved = spec.nature.size - spec.min.min(spec.nature.size);
        VmState {
            demand: VmDemand {
                id: self.id,
                shares: spec.shares,
                min: Pages(spec.min),
                max: Pages(spec.max),
                tax: spec.tax,
                active: self.estimate(),
            },
            consumed: Pages(self.guest.consumed(m)),
            size: Pages(spec.nature.size),
            balloon_goal: Pages(self.balloon_goal),
            balloon_health: self.output.health,
            balloon_limit: self.output.limit,
            balloon_rate: self.output.rate,
            short: self.output.short,
            pool: None,
            overhead: Pages(m.overhead(spec.nature.size)),
            beyond: Pages::ZERO,
            saved: Pages(self.guest.shared),
            tools: Tools {
                spare_room: Pages(self.guest.spare_room(m)),
                grown: Pages(self.guest.balloon),
                ..self.tools
            },
            wants_more: self.wants || self.commanded > 0,
            swap_free: if disk {
                Pages(reserved.saturating_sub(self.guest.swapped()))
            } else {
                Pages::ZERO
            },
        }
    }

    /// One turn of the balloon's control, and what the driver does of it in `dt` milliseconds; true
    /// if anything moved.
    pub fn balloon(&mut self, now: Millis, dt: Millis, m: &Models) -> bool {
        let has_device = self.spec.driver != Driver::None;
        // A driver comes up when its guest has booted.
        let alive = has_device && !self.booting(now);
        let size = Pages(self.spec.nature.size);
        let before = (self.guest.balloon, self.output.health);
        let out = self.control.step(&BalloonInput {
            now: Duration::from_millis(now),
            size,
            most: None,
            goal: Pages(self.balloon_goal),
            has_device,
            driver_alive: alive,
            reported: Some(Pages(self.guest.balloon)),
            discarded: self.guest.discarded,
            consumed: Some(Pages(self.guest.consumed(m))),
            guest_available: alive.then(|| Pages(self.guest.available())),
            guest_total: alive.then_some(size),
            guest_stats_age: alive.then_some(Duration::ZERO),
        });
        if let Some(command) = out.command {
            self.commanded = command.0;
        }
        self.output = out;
        let dead = !alive || self.spec.driver == Driver::Dead;
        let rate = match self.spec.driver {
            Driver::Slow(rate) => rate as f64,
            _ => 1e6 / m.balloon_page_us,
        };
        let step = if dead { 0 } else { (rate * dt as f64 / 1e3) as u64 };
        let now_at = self.guest.balloon;
        let next = if self.commanded > now_at {
            now_at + step.min(self.commanded - now_at)
        } else {
            now_at - step.min(now_at - self.commanded)
        };
        if self.guest.set_balloon(next) {
            self.measure.distress_ms += dt;
        }
        before != (self.guest.balloon, self.output.health)
    }

    /// What its tools cost it so far, as the manager would measure it: reads of its disk and faults, each
    /// with the time that the models give it.
    pub fn measure_tools(&mut self, now: Millis, m: &Models) {
        let Vm { guest, measure, .. } = &*self;
        let nanos = |n: f64, us: f64| (n * us * 1e3) as u64;
        let faults = |n: u64, us: f64| nanos(n as f64, us);
        self.tools = self.tool_control.step(&ToolsInput {
            now: Duration::from_millis(now),
            size: Pages(self.spec.nature.size),
            balloon: Pages(guest.balloon.min(self.commanded)),
            reads: measure.guest_reads as u64,
            read_ns: nanos(measure.guest_reads, m.guest_disk_us),
            read_cpu_ns: nanos(1.0, m.guest_read_cpu_us),
            paged: Pages(guest.compressed() + guest.swapped()),
            refaults: measure.faults_compressed + measure.faults_swapped,
            refault_ns: faults(measure.faults_compressed, m.compress_fault_us)
                + faults(measure.faults_swapped, m.swap_fault_us),
            refault_cpu_ns: 0,
            evicted: measure.evicted,
            evict_ns: self.evict_ns,
            starved_ns: measure.blocked_ms * 1_000_000,
            ballooned: Pages(guest.balloon + guest.to_touch()),
            can_page: true,
        });
    }

    /// Whether its balloon has something left to do.
    pub fn balloon_moves(&self) -> bool {
        self.commanded != self.guest.balloon
            || self.control.command().0 != self.balloon_goal.min(self.output.limit.0)
    }

    /// Takes the part of its work that it did in the last `dt` milliseconds into its pressure.
    pub fn press(&mut self, work: f64, dt: Millis) {
        let weight = 1.0 - (-(dt as f64) / 1e3 / PRESSURE_S).exp();
        self.pressure += weight * ((1.0 - work) - self.pressure);
    }
}
