//! A VM as the manager holds it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::config::rules::{VmRule, rule_for};
use crate::driver::Driver;
use crate::inputs::AgentReport;
use crate::limits;
use crate::looks::{PRESUMED, Past};
use crate::pace::Stir;
use crate::rates::Rates;
use crate::sync::{Look, UntilTaken, lock};
use ballast_api::{GuestStats, Management, Mode, RunState, Salt, VmSpec};
use ballast_pager::service::PagedVm;
use ballast_policy::{
    BalloonControl, BalloonOutput, TaxRate, Tools, TouchTimes, WorkingSet, default_shares,
};
use ballast_qemu::{Monitor, ProcessHandle, QmpEvent, process};
use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;

/// What the operator decides about a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmParams {
    /// At least 1.
    pub shares: u32,
    /// Guaranteed; at most `max`.
    pub min: Pages,
    /// Its size, or a limit below it.
    pub max: Pages,
    /// The VM's own tax rate, if it has one.
    pub tax: Option<f64>,
    /// With whom pages are shared; None: with nobody, only inside the VM.
    #[serde(default)]
    pub salt: Option<Salt>,
    /// The resource pool that it belongs to; None: a child of the host.
    #[serde(default)]
    pub pool: Option<String>,
    /// What of it was asked for in so many words, which a new configuration does not change. None, in
    /// records of managers that knew no configuration of VMs: all of it.
    #[serde(default)]
    pub asked: Option<Asked>,
}

/// How large a VM's RAM is and may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What it begins with.
    pub boot: Pages,
    /// The same with what can be plugged.
    pub most: Pages,
}

impl From<Pages> for Sizes {
    fn from(size: Pages) -> Sizes {
        Sizes { boot: size, most: size }
    }
}

/// Parameters of a VM that somebody asked for, when it was started or later.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "AskedRecord", into = "AskedRecord")]
pub struct Asked {
    /// None: as configured, or 10 per MiB.
    pub shares: Option<u32>,
    /// None: as configured, or nothing.
    pub min: Option<Pages>,
    /// None: as configured, or its size.
    pub max: Option<Pages>,
    /// 0 <= rate < 1. None: as configured, or its pool's, or the host's.
    pub tax: Option<f64>,
    /// Some(None): no pool.
    pub pool: Option<Option<String>>,
}

/// The same as it is kept in a record. `pool` is null there where nothing was asked for, as former versions wrote it.
#[derive(Serialize, Deserialize)]
struct AskedRecord {
    shares: Option<u32>,
    min: Option<Pages>,
    max: Option<Pages>,
    tax: Option<f64>,
    pool: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    no_pool: bool,
}

impl From<Asked> for AskedRecord {
    fn from(asked: Asked) -> AskedRecord {
        let Asked { shares, min, max, tax, pool } = asked;
        let no_pool = pool == Some(None);
        AskedRecord { shares, min, max, tax, pool: pool.flatten(), no_pool }
    }
}

impl From<AskedRecord> for Asked {
    fn from(kept: AskedRecord) -> Asked {
        let AskedRecord { shares, min, max, tax, pool, no_pool } = kept;
        let pool = if no_pool { Some(None) } else { pool.map(Some) };
        Asked { shares, min, max, tax, pool }
    }
}

impl VmParams {
    /// What a VM of such sizes gets: what was asked for, else what the configuration says of its name,
    /// else the defaults. Its salt is left open.
    ///
    /// # Errors
    /// One line: which parameter cannot be, and why.
    pub fn resolve(
        rules: &[VmRule],
        name: &str,
        sizes: Sizes,
        asked: Asked,
    ) -> Result<VmParams, String> {
        let Sizes { boot: size, most } = sizes;
        let rule = rule_for(rules, name);
        let shares = asked.shares.or(rule.shares).unwrap_or_else(|| default_shares(size));
        // Nothing is plugged that was not asked for. A limit above its size limits nothing, and no more than that is guaranteed, nor more
        // than the limit, which another table may have given.
        let ruled = || rule.max.map_or(size, |max| max.of(size).min(size));
        let max = asked.max.map_or_else(ruled, |max| max.min(most));
        let ruled = || rule.min.map(|min| min.of(size).min(size).min(max));
        let min = asked.min.or_else(ruled).unwrap_or(Pages::ZERO);
        limits::shares(shares).map_err(limits::line)?;
        limits::max(max).map_err(limits::line)?;
        limits::min_and_max(min, max).map_err(limits::line)?;
        let tax = asked.tax.or(rule.tax);
        if let Some(tax) = tax {
            TaxRate::new(tax).map_err(|e| format!("tax: {e}"))?;
        }
        let pool = asked.pool.clone().unwrap_or(rule.pool);
        Ok(VmParams { shares, min, max, tax, salt: None, pool, asked: Some(asked) })
    }

    /// What was asked for of it.
    pub fn asked(&self) -> Asked {
        self.asked.clone().unwrap_or_else(|| Asked {
            shares: Some(self.shares),
            min: Some(self.min),
            max: Some(self.max),
            tax: self.tax,
            pool: self.pool.clone().map(Some),
        })
    }
}

/// What changed, in words: "min 0 B -> 1 GiB".
pub fn differences(old: &VmParams, new: &VmParams) -> String {
    let none = || "none".to_owned();
    let pairs = [
        ("shares", old.shares.to_string(), new.shares.to_string()),
        ("min", old.min.to_string(), new.min.to_string()),
        ("max", old.max.to_string(), new.max.to_string()),
        (
            "tax",
            old.tax.map_or_else(none, |t| t.to_string()),
            new.tax.map_or_else(none, |t| t.to_string()),
        ),
        ("pool", old.pool.clone().unwrap_or_else(none), new.pool.clone().unwrap_or_else(none)),
    ];
    let told = pairs.into_iter().filter(|(_, old, new)| old != new);
    told.map(|(key, old, new)| format!("{key} {old} -> {new}")).collect::<Vec<_>>().join(", ")
}

/// The balloon as it is seen from outside its loop.
#[derive(Clone, Copy, Debug)]
pub struct BalloonState {
    /// What the policy wants.
    pub goal: Pages,
    /// What the controller said last.
    pub output: BalloonOutput,
    /// What was last commanded.
    pub commanded: Pages,
    /// What QEMU says. Shown only.
    pub reported: Option<Pages>,
    /// What it said last, whenever that was, and how much of it the pager did not have as given up then. None: it never did.
    pub held: Option<(Pages, Pages)>,
    /// The memory of its DIMMs, as QEMU told last: see [`Vm::whole`].
    pub dimms: Pages,
    /// None: its guest has told none.
    pub stats: Option<GuestStats>,
    /// When they were asked for.
    pub stats_at: Instant,
}

impl BalloonState {
    /// Nothing is known of it.
    fn unknown() -> BalloonState {
        BalloonState {
            goal: Pages::ZERO,
            output: BalloonOutput::UNKNOWN,
            commanded: Pages::ZERO,
            reported: None,
            held: None,
            dimms: Pages::ZERO,
            stats: None,
            stats_at: Instant::now(),
        }
    }

    /// The guest's statistics with their age now.
    pub fn stats_now(&self) -> Option<GuestStats> {
        let stats = self.stats?;
        Some(GuestStats { age_s: stats.age_s + self.stats_at.elapsed().as_secs(), ..stats })
    }
}

/// Memory that can be plugged, as it is seen from outside the balloon's loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hotplug {
    /// What the guest was last asked to have plugged. None: not known.
    pub requested: Option<Pages>,
    /// What it has, by its VMM's books. None: not known.
    pub plugged: Option<Pages>,
    /// While that is not known: what it is to have, or uses, if that is more.
    pub assumed: Pages,
    /// Of what was given to the guest, what the policy has taken back: as a balloon takes it.
    pub withheld: Pages,
    /// What could not even be asked for, as was said once.
    pub failed: Option<Pages>,
}

/// Sampling of one VM.
pub struct Sampling {
    /// The estimate of active memory.
    pub set: WorkingSet,
    /// When in a period pages were touched: for miss curves.
    pub times: TouchTimes,
    /// Of the period that runs, the time in which the VM did not.
    pub stood_still: Duration,
    /// Of the choice of pages, with the period.
    pub seed: u64,
    /// Periods for which pages were chosen.
    pub period: u64,
    /// Samples that had begun when the last one was asked for; None before the first.
    pub asked: Option<u64>,
    /// Touches counted so far, of all periods.
    pub touched: u64,
    /// When time was last counted.
    pub last: Instant,
}

impl Sampling {
    fn new(of: VmId, set: WorkingSet) -> Sampling {
        Sampling {
            times: TouchTimes::new(*set.config()),
            set,
            stood_still: Duration::ZERO,
            seed: u64::from(of.0) << 32 | u64::from(std::process::id()),
            period: 0,
            asked: None,
            touched: 0,
            last: Instant::now(),
        }
    }
}

/// Shared by its tasks and the manager's threads. Of its locks, `paged` is taken before the others, but for
/// `released`, which is held throughout the VM's end, and `keeper`, which is held while a QMP connection is put to use.
/// Nobody takes it twice: between the two somebody may come who waits to take the pager away, for whom the second would
/// wait.
pub struct Vm {
    /// Of this manager; the next one gives others.
    pub id: VmId,
    /// What people call it, and its folder.
    pub name: String,
    /// None for a VM that was attached. Without its salt, which is among the parameters.
    pub spec: Option<VmSpec>,
    /// In the run folder: record, pages, sockets, logs.
    pub folder: PathBuf,
    /// In words, for people.
    pub accel: String,
    /// When this manager had it: of one that was taken over, not its start.
    pub started: Instant,
    /// When its VMM was started, since the host's boot; None if that was gone already.
    pub vmm_started: Option<Duration>,
    /// When a VMM without QMP counts as having built its machine.
    pub built: Instant,
    /// Guest RAM, with what can be plugged: so many page numbers it has.
    pub size: Pages,
    /// What of it the guest began with.
    pub boot: Pages,
    /// The rest.
    pub hotplug: Mutex<Hotplug>,
    /// Whether its guest may count on zeros where it reported free pages, which sharing does not keep: it shares nothing,
    /// nor does one of which that is not known yet.
    pub counts_on_zeros: OnceLock<bool>,
    /// Charged beside the pages: the pager's own and what the operator declared.
    pub(crate) overhead: Pages,
    /// Booked for a VM that is not paged: what the kernel says it uses, and what it may take beyond that.
    pub external: AtomicU64,
    /// Of that, what it used when that was looked at last.
    pub uses: AtomicU64,
    /// Of that, pages beyond what its balloon left its guest as it was measured: afterwards the one or the other is of another moment.
    pub own: AtomicU64,
    /// Booked for the VMM of a paged VM; [`ENDED`] when that was given back.
    pub vmm: AtomicU64,
    /// Its VMM.
    pub process: ProcessHandle,
    paged: UntilTaken<PagedVm>,
    params: Mutex<VmParams>,
    run_state: Mutex<RunState>,
    management: Mutex<Management>,
    monitor: Mutex<Option<Monitor>>,
    /// Written by the balloon's loop; the goal by the policy thread.
    pub balloon: Mutex<BalloonState>,
    /// The controller that the balloon's loop asks.
    pub control: Mutex<BalloonControl>,
    /// What its tools cost, as last measured.
    pub tools: Mutex<Tools>,
    /// The policy thread's.
    pub sampling: Mutex<Sampling>,
    /// Pages per second that its guest reads without a balloon: learnt by one connection, and of use to the next.
    pub plain_reads: Mutex<Option<f64>>,
    /// None for a VM without a port for an agent.
    pub agent: Mutex<Option<AgentReport>>,
    /// Its guest's balloon driver.
    pub driver: Mutex<Driver>,
    /// The guest asked for a reboot.
    pub rebooting: AtomicBool,
    /// Its VMM has said that it ends.
    pub shuts_down: tokio::sync::Notify,
    /// Its VMM has ended, and all that QEMU said of that has been heard.
    pub has_said_all: AtomicBool,
    /// Somebody has had it stopped: it is not started again.
    pub stop_asked: AtomicBool,
    /// What looks at its VMM have come to; held by the one that is under way.
    pub looks: tokio::sync::Mutex<Past>,
    /// The VMM was looked at, and nothing was found that forbids paging. Until then, pages are
    /// handed out and none is taken.
    pub inspected: AtomicBool,
    /// The last look, by QMP too, has found that not even its balloon is of use: not only that it could not be looked at.
    pub is_beyond_reach: AtomicBool,
    /// Whether all it had was given back. Held while that is done.
    pub released: tokio::sync::Mutex<bool>,
    /// Whether its process was stopped, because it waits for pages that cannot be read.
    pub frozen: Mutex<bool>,
    /// How often that was so.
    pub freezes: AtomicU32,
    events: Mutex<Option<JoinHandle<()>>>,
    /// Changed under the lock of `run_state`.
    run_events: AtomicU64,
    /// The task that keeps its QMP in reach. None: nobody has told where that is. Whoever makes another one holds this
    /// meanwhile.
    pub keeper: tokio::sync::Mutex<Option<JoinHandle<()>>>,
    /// It has a QMP, and it is not known yet whether that answers.
    pub seeks_qmp: AtomicBool,
    /// Whether its balloon was led by this manager before.
    pub was_led: AtomicBool,
    /// Why it cannot leave the salt that it had, in the last turn.
    pub salt_trouble: Mutex<Option<String>>,
    /// Breaks, pages looked at, and cores that this took, per second.
    pub share_rates: Rates<3>,
    /// For its balloon's loop.
    pub stir: Stir,
}

/// Of what is booked for a VMM: it is not any more, for good.
pub const ENDED: u64 = u64::MAX;

/// What makes a [`Vm`]: see the fields there.
pub struct NewVm {
    pub id: VmId,
    pub name: String,
    pub spec: Option<VmSpec>,
    pub folder: PathBuf,
    pub accel: String,
    pub size: Pages,
    pub boot: Pages,
    /// None: not known yet.
    pub plugged: Option<Pages>,
    pub overhead: Pages,
    pub params: VmParams,
    pub process: ProcessHandle,
    pub management: Management,
    /// See [`Past`].
    pub past: Past,
    pub paged: Option<PagedVm>,
    /// What is booked for a VM that is not paged.
    pub external: Pages,
    /// What is booked for the VMM of a paged VM.
    pub vmm: Pages,
    pub control: BalloonControl,
    pub set: WorkingSet,
    pub built: Instant,
    /// It has a QMP, which will be tried.
    pub seeks_qmp: bool,
}

impl Vm {
    /// One whose process is this one, balloon only, with nothing booked.
    #[cfg(test)]
    pub fn of_tests(name: &str, folder: PathBuf, size: Pages, params: VmParams) -> Arc<Vm> {
        Arc::new(Vm::new(NewVm {
            id: VmId(1),
            name: name.to_owned(),
            spec: None,
            folder,
            accel: String::new(),
            size,
            boot: size,
            plugged: Some(Pages::ZERO),
            overhead: Pages::ZERO,
            params,
            process: ProcessHandle::open(std::process::id()).unwrap(),
            management: Management { mode: Mode::BalloonOnly, reason: None },
            past: Past::default(),
            paged: None,
            external: Pages::ZERO,
            vmm: Pages::ZERO,
            control: BalloonControl::new(ballast_policy::BalloonConfig::default()),
            set: WorkingSet::new(ballast_policy::SamplingConfig::default(), size),
            built: Instant::now(),
            seeks_qmp: false,
        }))
    }

    /// It is starting, without QMP, and not inspected.
    pub fn new(new: NewVm) -> Vm {
        let has = new.paged.as_ref().map_or(Pages::ZERO, |paged| paged.memory().charged());
        let assumed = new.params.max.max(has).saturating_sub(new.boot);
        let refused = new.management.reason.clone().filter(|_| new.paged.is_none());
        let past = Past { refused, ..new.past };
        Vm {
            id: new.id,
            name: new.name,
            spec: new.spec,
            folder: new.folder,
            accel: new.accel,
            started: Instant::now(),
            vmm_started: process::started(new.process.pid()),
            built: new.built,
            size: new.size,
            boot: new.boot,
            counts_on_zeros: OnceLock::new(),
            hotplug: Mutex::new(Hotplug { plugged: new.plugged, assumed, ..Hotplug::default() }),
            overhead: new.overhead,
            external: AtomicU64::new(new.external.0),
            uses: AtomicU64::new(new.external.0),
            own: AtomicU64::new(0),
            vmm: AtomicU64::new(new.vmm.0),
            process: new.process,
            paged: UntilTaken::new(new.paged),
            params: Mutex::new(new.params),
            run_state: Mutex::new(RunState::Starting),
            management: Mutex::new(new.management),
            monitor: Mutex::new(None),
            balloon: Mutex::new(BalloonState::unknown()),
            control: Mutex::new(new.control),
            agent: Mutex::new(None),
            tools: Mutex::new(Tools::default()),
            sampling: Mutex::new(Sampling::new(new.id, new.set)),
            plain_reads: Mutex::new(None),
            driver: Mutex::new(Driver::default()),
            looks: tokio::sync::Mutex::new(past),
            rebooting: AtomicBool::new(false),
            shuts_down: tokio::sync::Notify::new(),
            has_said_all: AtomicBool::new(false),
            stop_asked: AtomicBool::new(false),
            inspected: AtomicBool::new(false),
            is_beyond_reach: AtomicBool::new(false),
            released: tokio::sync::Mutex::new(false),
            frozen: Mutex::new(false),
            freezes: AtomicU32::new(0),
            salt_trouble: Mutex::new(None),
            events: Mutex::new(None),
            run_events: AtomicU64::new(0),
            keeper: tokio::sync::Mutex::new(None),
            seeks_qmp: AtomicBool::new(new.seeks_qmp),
            was_led: AtomicBool::new(false),
            share_rates: Rates::default(),
            stir: Stir::default(),
        }
    }

    /// Takes note of what QEMU tells, to the end of the connection. Its own task: QEMU's last words
    /// count, whatever the balloon loop waits for.
    pub fn watch_events(self: &Arc<Self>, mut events: Receiver<QmpEvent>) {
        let vm = self.clone();
        let task = tokio::spawn(async move {
            loop {
                match events.recv().await {
                    Ok(event) => vm.on_event(&event),
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return,
                }
            }
        });
        *lock(&self.events) = Some(task);
    }
    /// Ends when all events have been noted.
    pub fn take_events(&self) -> Option<JoinHandle<()>> {
        lock(&self.events).take()
    }

    fn on_event(&self, event: &QmpEvent) {
        match event.name.as_str() {
            "MEMORY_DEVICE_SIZE_CHANGE" => self.stir.soon(),
            "BALLOON_CHANGE" => {
                lock(&self.driver).has_moved(Instant::now());
                self.stir.soon();
            }
            "RESET" => {
                lock(&self.driver).was_reset(Instant::now());
                self.stir.soon();
            }
            // A guest that sleeps (S3) stands still, too.
            "STOP" | "SUSPEND" => self.heard(RunState::Paused),
            "RESUME" | "WAKEUP" => self.heard(RunState::Running),
            "SHUTDOWN" => {
                if event.reason.as_deref().is_some_and(crate::exits::is_reboot) {
                    self.rebooting.store(true, Ordering::Relaxed);
                }
                self.shuts_down.notify_one();
            }
            _ => {}
        }
    }

    /// Those in force.
    pub fn params(&self) -> VmParams {
        lock(&self.params).clone()
    }
    /// Under `Manager::changing`, once they are written down.
    pub fn set_params(&self, params: VmParams) {
        *lock(&self.params) = params;
    }
    /// See `shown_state` for VMs that stand still because of unreadable pages.
    pub fn run_state(&self) -> RunState {
        *lock(&self.run_state)
    }
    /// Whether its process is stopped, because it waits for pages that cannot be read.
    pub fn is_frozen(&self) -> bool {
        *lock(&self.frozen)
    }
    /// As people see it.
    pub fn shown_state(&self) -> RunState {
        match self.run_state() {
            RunState::Starting | RunState::Running | RunState::Paused if self.is_frozen() => {
                RunState::Unreadable
            }
            state => state,
        }
    }
    /// A VM that is stopping or stopped does not come back to running, nor one that has stopped to stopping.
    pub fn set_run_state(&self, state: RunState) {
        Vm::change(&mut lock(&self.run_state), state);
    }
    fn change(now: &mut RunState, state: RunState) {
        let final_now = matches!(*now, RunState::Stopping | RunState::Stopped);
        let final_next = matches!(state, RunState::Stopping | RunState::Stopped);
        if *now != RunState::Stopped && (!final_now || final_next) {
            *now = state;
        }
    }
    /// It is being stopped. What it was before, for `goes_on`.
    pub fn begin_to_stop(&self) -> RunState {
        self.stop_asked.store(true, Ordering::Relaxed);
        let mut now = lock(&self.run_state);
        let before = *now;
        Vm::change(&mut now, RunState::Stopping);
        before
    }
    /// It could not be stopped, and is what it was. If others try it too, the first of them says so.
    pub fn goes_on(&self, before: RunState) {
        self.stop_asked.store(false, Ordering::Relaxed);
        let mut now = lock(&self.run_state);
        put_back(&mut now, before);
    }
    /// Its VMM has told of it, unasked.
    fn heard(&self, state: RunState) {
        let mut now = lock(&self.run_state);
        self.run_events.fetch_add(1, Ordering::Relaxed);
        Vm::change(&mut now, state);
    }
    /// How often its VMM has told unasked that it was paused, or goes on.
    pub fn run_events(&self) -> u64 {
        self.run_events.load(Ordering::Relaxed)
    }
    /// Its VMM has answered so to a question that was asked when it had told of `heard` changes. What it has told since is
    /// newer, or the same.
    pub fn was_found(&self, state: RunState, heard: u64) {
        let mut now = lock(&self.run_state);
        if self.run_events() == heard {
            Vm::change(&mut now, state);
        }
    }
    /// From starting to running; a VM that was found paused stays so.
    pub fn has_started(&self) {
        let mut now = lock(&self.run_state);
        if *now == RunState::Starting {
            *now = RunState::Running;
        }
    }
    /// How it is managed, and why not better.
    pub fn management(&self) -> Management {
        lock(&self.management).clone()
    }
    /// What may be done to take memory back.
    pub fn mode(&self) -> Mode {
        lock(&self.management).mode
    }
    /// Whether pages may leave their homes, to be evicted or to be sampled.
    pub fn may_be_paged(&self) -> bool {
        let management = lock(&self.management);
        self.inspected.load(Ordering::Relaxed) && management.mode == Mode::Paged
    }
    /// Whether its pages count as what can be taken: also, for a while, of one that no look has come to an end of yet.
    pub fn may_give(&self) -> bool {
        let is_new = !self.inspected.load(Ordering::Relaxed) && self.built.elapsed() < PRESUMED;
        is_new || self.may_be_paged()
    }
    /// What a look at its VMM has come to; `is_built`: and what it did not find is not there. In one step: whoever finds it
    /// inspected goes by what was found.
    pub fn was_looked_at(&self, found: Management, is_built: bool) {
        let mut management = lock(&self.management);
        *management = found;
        self.inspected.store(is_built, Ordering::Relaxed);
    }
    /// How large its RAM is and may become.
    pub fn sizes(&self) -> Sizes {
        Sizes { boot: self.boot, most: self.size }
    }
    /// What it has plugged, by its VMM's books: what it is to have or uses, while that is not known.
    pub fn plugged(&self) -> Pages {
        let hotplug = lock(&self.hotplug);
        hotplug.plugged.unwrap_or(hotplug.assumed).min(self.size.saturating_sub(self.boot))
    }
    /// Its size as its guest has it now, with what is only withheld from it.
    pub fn configured(&self) -> Pages {
        self.boot + self.plugged() + lock(&self.hotplug).withheld
    }
    /// What its balloon takes from, by QEMU's books: it is told the size of a balloon as what that leaves of this, and tells
    /// it so.
    pub fn whole(&self) -> Pages {
        self.boot + lock(&self.balloon).dimms
    }
    /// What is to be plugged, as its parameters say.
    pub fn to_plug(&self) -> Pages {
        self.params().max.saturating_sub(self.boot)
    }
    /// None while there is no QMP.
    pub fn monitor(&self) -> Option<Monitor> {
        lock(&self.monitor).clone()
    }
    /// None: the connection is closed.
    pub fn set_monitor(&self, monitor: Option<Monitor>) {
        *lock(&self.monitor) = monitor;
    }
    /// Whether it has a QMP that anybody knows of, in reach or not.
    pub fn has_qmp(&self) -> bool {
        // Who holds it is about to connect.
        let has_keeper = self.keeper.try_lock().map_or(true, |keeper| keeper.is_some());
        has_keeper || self.seeks_qmp.load(Ordering::Relaxed)
    }
    /// None inside: it is not paged, or has ended. Nobody may ask for it while it holds one.
    pub fn paged(&self) -> Look<'_, PagedVm> {
        self.paged.look()
    }
    /// Waits for all who hold `paged`. Nobody finds it there afterwards.
    pub fn take_paged(&self) -> Option<PagedVm> {
        self.paged.take()
    }
}

fn put_back(now: &mut RunState, before: RunState) {
    if *now == RunState::Stopping {
        *now = before;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is taken from a VM at a moment when it counts as inspected and what was found is not known yet.
    #[tokio::test]
    async fn what_a_look_found_and_that_there_was_one_are_known_at_once() {
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let vm = Vm::of_tests("a", std::env::temp_dir(), size, params);
        let found = |mode| Management { mode, reason: None };
        let looks = || {
            for _ in 0..20_000 {
                vm.was_looked_at(found(Mode::Paged), false);
                vm.was_looked_at(found(Mode::BalloonOnly), true);
            }
        };
        std::thread::scope(|scope| {
            let looks = scope.spawn(looks);
            while !looks.is_finished() {
                assert!(!vm.may_be_paged());
            }
        });
        vm.was_looked_at(found(Mode::Paged), true);
        assert!(vm.may_be_paged());
    }

    #[test]
    fn what_was_asked_for_is_kept_no_pool_too() {
        for pool in [None, Some(None), Some(Some("a".to_owned()))] {
            let asked = Asked { shares: Some(7), pool, ..Asked::default() };
            let kept = serde_json::to_string(&asked).unwrap();
            assert_eq!(serde_json::from_str::<Asked>(&kept).unwrap(), asked, "{kept}");
        }
        // A record of a former version.
        let kept = r#"{"shares":null,"min":3,"max":null,"tax":0.5,"pool":null}"#;
        let asked = serde_json::from_str::<Asked>(kept).unwrap();
        assert_eq!((asked.pool, asked.min, asked.tax), (None, Some(Pages(3)), Some(0.5)));
    }

    #[tokio::test]
    async fn a_guest_that_sleeps_stands_still_until_it_wakes() {
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let vm = Vm::of_tests("a", std::env::temp_dir(), size, params);
        let hears = |name: &str| {
            vm.on_event(&QmpEvent { name: name.to_owned(), reason: None });
            vm.run_state()
        };
        assert_eq!(["SUSPEND", "WAKEUP"].map(hears), [RunState::Paused, RunState::Running]);
        assert_eq!(["STOP", "RESUME"].map(hears), [RunState::Paused, RunState::Running]);
    }

    #[test]
    fn a_rule_guarantees_a_small_vm_no_more_than_it_has() {
        let amount = |mib| Some(crate::config::rules::Amount::Size(Pages::from_mib(mib)));
        let of = |min, max, size: u64, asked| {
            let rule = VmRule { pattern: "*".into(), min, max, ..VmRule::default() };
            let size = Pages::from_mib(size);
            VmParams::resolve(&[rule], "a", size.into(), asked).map(|params| params.min)
        };
        let nothing = Asked::default;
        assert_eq!(of(amount(1024), None, 512, nothing()).unwrap(), Pages::from_mib(512));
        assert_eq!(of(amount(1024), None, 2048, nothing()).unwrap(), Pages::from_mib(1024));
        // Nor than another table lets it have; but what was asked for is not cut.
        assert_eq!(of(amount(1024), amount(256), 512, nothing()).unwrap(), Pages::from_mib(256));
        let asked = Asked { min: Some(Pages::from_mib(1024)), ..nothing() };
        assert!(of(None, None, 512, asked).is_err());
    }

    #[test]
    fn who_could_not_be_stopped_is_what_he_was() {
        use RunState::{Paused, Running, Stopped, Stopping};
        for before in [Running, Paused] {
            let mut now = before;
            // Two that stop it, and both fail, in either order.
            Vm::change(&mut now, Stopping);
            Vm::change(&mut now, Stopping);
            put_back(&mut now, Stopping);
            Vm::change(&mut now, Running);
            assert_eq!(now, Stopping, "it does not come back by itself");
            put_back(&mut now, before);
            assert_eq!(now, before);
            put_back(&mut now, Stopping);
            assert_eq!(now, before);
        }
        let mut now = Stopped;
        put_back(&mut now, Running);
        // Nor by whoever stops it while it is given back.
        Vm::change(&mut now, Stopping);
        assert_eq!(now, Stopped);
    }
}
