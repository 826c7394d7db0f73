//! The manager's state: the host, its VMs, and what was last decided.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_api::{ErrorBody, ErrorCode, Mode, RunState};
use ballast_journal::Journal;
use ballast_pager::advance::Advance;
use ballast_pager::awake::Awake;
use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::mappings::ZERO_RUN;
use ballast_policy::pools::{Books, tax as pool_tax};
use ballast_policy::{
    Decision, Pool, PoolId, Promise, Reserve, TaxRate, Thresholds, Trough, admit,
};
use ballast_qemu::ProcessHandle;
use ballast_units::{Pages, VmId};
use tokio::sync::watch;

use crate::commons::Commons;
use crate::config::Config;
use crate::ending::Reboot;
use crate::host_set::HostSet;
use crate::kick::Kick;
use crate::layout::VMS;
use crate::paging::Expected;
use crate::pools::Pools;
use crate::rates::Rates;
use crate::records::Record;
use crate::refused::Refused;
use crate::reload::Source;
use crate::starts::Starts;
use crate::survey::Unread;
use crate::swap::Swap;
use crate::sync::{Ended, lock};
use crate::totals::Totals;
use crate::vm::{Vm, VmParams};

/// How the manager is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is not to end.
    Running,
    /// VMs stay as they are, for the next manager.
    LeaveVms,
    /// All VMs were stopped.
    VmsStopped,
    /// All were to be, but some do not end.
    VmsLeft,
}

/// What is promised to a name.
#[derive(Clone, Debug)]
pub(crate) struct Pledge {
    /// Swap becomes zero in it when its files are made.
    pub promise: Promise,
    /// The pool that it is taken from.
    pub pool: Option<String>,
    /// Held for the next start of this VM, whose guest rebooted.
    pub rebooted: Option<VmId>,
}

/// One a process, in the hands of all its threads and tasks. Of its locks, `admission` and `changing` are taken
/// before `starting`, and these and `ended` before those of VMs and of `pools`. The others are held for a look or a
/// change alone.
pub struct Manager {
    config: RwLock<Arc<Config>>,
    pub(crate) source: Source,
    /// Resource pools: configured, and defined by command.
    pub pools: Pools,
    /// What its pagers share: the ledger, and the state in force.
    pub host: Arc<Host>,
    /// How much of the budget is kept free.
    reserve: Mutex<Reserve>,
    /// What VMs share pages in.
    pub commons: Commons,
    /// Where swap files are.
    pub swap: Swap,
    /// As of `Vm::share_rates`, of all.
    pub share_rates: Rates<3>,
    /// Wakes the policy thread.
    pub kick: Arc<Kick>,
    /// None: not kept, or its thread could not be started.
    pub journal: Option<Journal>,
    /// Times that the policy sees are since then.
    pub started: Instant,
    /// Set by command, over what the configuration says, and kept for the next manager.
    pub(crate) host_set: Mutex<HostSet>,
    vms: RwLock<Vec<Arc<Vm>>>,
    next_id: AtomicU32,
    /// One admission at a time.
    pub(crate) admission: tokio::sync::Mutex<()>,
    /// Those that wait for room, or have just been given it.
    pub(crate) starts: Starts,
    /// Names that are taken, and what is promised to them, beside the VMs: being started, or waiting
    /// to be taken over.
    pub(crate) starting: Mutex<HashMap<String, Pledge>>,
    /// VMMs that wait to be taken over.
    pub(crate) waiting: Mutex<HashMap<String, Waits>>,
    /// Names of VMs that ended while no manager ran and whose files are still being removed.
    pub(crate) clearing: Mutex<HashSet<String>>,
    /// What is not understood, by names, which are taken. See `survey`.
    pub(crate) unread: Mutex<HashMap<String, Unread>>,
    /// Processes that nobody announced, while they are taken in.
    pub(crate) adopting: Mutex<HashSet<u32>>,
    /// Those whose QMP socket somebody has just named.
    pub(crate) attaching: Mutex<HashSet<u32>>,
    /// VMMs that run without Ballast.
    pub(crate) refused: Refused,
    /// One change of parameters at a time.
    pub(crate) changing: Mutex<()>,
    /// One reading of the configuration at a time; taken before `changing`.
    pub(crate) reloading: Mutex<()>,
    pub(crate) expected: Mutex<HashMap<String, Expected>>,
    /// By name.
    pub(crate) rebooting: Mutex<HashMap<String, Reboot>>,
    decision: Mutex<Option<(Instant, Arc<Decision>)>>,
    /// Of VMs that ended.
    pub(crate) ended: Mutex<Totals>,
    pub(crate) measured_peak: AtomicU64,
    pub(crate) measured_now: AtomicU64,
    overcommit_peak: Mutex<f64>,
    pub(crate) accel: Mutex<String>,
    closing: AtomicBool,
    ending_vms: AtomicBool,
    stopping: Ended,
    /// What the main task waits for.
    pub ending: watch::Sender<Ending>,
    /// Held by whoever leaves all VMs to the next manager.
    pub(crate) leaving: tokio::sync::Mutex<()>,
    /// For threads of their own that must start tasks.
    pub(crate) runtime: tokio::runtime::Handle,
}

/// A VM that waits to be taken over.
#[derive(Clone)]
pub(crate) struct Waits {
    /// Since when.
    pub since: Instant,
    /// What of its pages is booked meanwhile.
    pub held: Arc<Advance>,
    /// Its VMM.
    pub process: ProcessHandle,
    /// As it was when this manager started.
    pub record: Record,
    /// Why it was not yet. None: its shim is to come.
    pub why: Option<String>,
    /// Whether this manager cannot take it over at all.
    pub refused: bool,
}

/// What went wrong with a request, with the status it is answered by.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What the HTTP status comes from.
    pub code: ErrorCode,
    /// One line: what, where, and what follows.
    pub message: String,
}

impl Failure {
    /// Line ends in the message become spaces.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Failure {
        // One line, whatever libraries put into theirs.
        Failure { code, message: message.into().replace('\n', " ") }
    }
    /// The request is wrong: status 400.
    pub fn bad(message: impl Into<String>) -> Failure {
        Failure::new(ErrorCode::BadRequest, message)
    }
    /// The manager or the host failed, or QEMU: status 500.
    pub fn internal(message: impl Into<String>) -> Failure {
        Failure::new(ErrorCode::Internal, message)
    }
    /// As it is answered.
    pub fn body(&self) -> ErrorBody {
        ErrorBody { code: self.code, message: self.message.clone() }
    }
}

/// Why a name was not given to a VM.
pub(crate) enum NotTaken {
    /// This manager ends, or is about to be replaced: by the next one it may be.
    Ending,
    /// What is wrong.
    Refused(Failure),
}

impl From<Failure> for NotTaken {
    fn from(failure: Failure) -> NotTaken {
        NotTaken::Refused(failure)
    }
}

impl From<String> for NotTaken {
    fn from(why: String) -> NotTaken {
        NotTaken::Refused(Failure::internal(why))
    }
}

impl From<NotTaken> for Failure {
    fn from(not: NotTaken) -> Failure {
        match not {
            NotTaken::Ending => Failure::new(ErrorCode::Conflict, "the manager is ending"),
            NotTaken::Refused(failure) => failure,
        }
    }
}

impl Manager {
    /// Must be called inside the runtime.
    ///
    /// # Errors
    /// What a former manager left, or what is configured, cannot be used.
    pub fn new(config: Config, source: Source) -> anyhow::Result<Arc<Manager>> {
        let host_set = HostSet::load(&config.run_dir)?;
        let budget = host_set.budget_or(config.budget);
        match host_set.budget {
            Some(set) if set == budget => {
                tracing::info!("budget {budget}, by command: {} is configured", config.budget);
            }
            Some(set) => {
                tracing::error!("{set} was set as budget, more than the host has now: {budget}");
            }
            None => {}
        }
        let kick = Arc::new(Kick::default());
        let bell = kick.clone();
        let ledger = Ledger::new(budget, move || bell.crossing());
        let host = Arc::new(Host::new(ledger).with_awake(Awake::of_host()));
        host.awake.allow(config.wakeful);
        let reserve = Reserve::new(config.scale, budget);
        host.set_plenty(reserve.thresholds().goal());
        let commons = Commons::open(&config.run_dir, &config.sharing, host.clone())?;
        Ok(Arc::new(Manager {
            commons,
            swap: Swap::new(&config),
            share_rates: Rates::default(),
            pools: Pools::open(&config.run_dir, &config.pools)?,
            host_set: Mutex::new(host_set),
            journal: crate::journal::start(config.journal.as_ref()),
            config: RwLock::new(Arc::new(config)),
            source,
            host,
            reserve: Mutex::new(reserve),
            kick,
            started: Instant::now(),
            vms: RwLock::new(Vec::new()),
            next_id: AtomicU32::new(1),
            admission: tokio::sync::Mutex::new(()),
            starts: Starts::default(),
            starting: Mutex::new(HashMap::new()),
            waiting: Mutex::new(HashMap::new()),
            clearing: Mutex::new(HashSet::new()),
            unread: Mutex::new(HashMap::new()),
            adopting: Mutex::new(HashSet::new()),
            attaching: Mutex::new(HashSet::new()),
            refused: Refused::default(),
            changing: Mutex::new(()),
            reloading: Mutex::new(()),
            expected: Mutex::new(HashMap::new()),
            rebooting: Mutex::default(),
            decision: Mutex::new(None),
            ended: Mutex::default(),
            measured_peak: AtomicU64::new(0),
            measured_now: AtomicU64::new(0),
            overcommit_peak: Mutex::new(0.0),
            accel: Mutex::new("not probed yet".into()),
            closing: AtomicBool::new(false),
            ending_vms: AtomicBool::new(false),
            stopping: Ended::default(),
            ending: watch::Sender::new(Ending::Running),
            leaving: tokio::sync::Mutex::new(()),
            runtime: tokio::runtime::Handle::current(),
        }))
    }

    /// In force now.
    pub fn config(&self) -> Arc<Config> {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn set_config(&self, config: Config) {
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }
    /// Of VMs that have none of their own, nor by their pools: as commanded, else as configured.
    pub fn tax(&self) -> TaxRate {
        lock(&self.host_set).tax.unwrap_or(self.config().tax)
    }
    /// The rate in force for a VM: its own, its nearest pool's, or the host's.
    pub fn tax_of(&self, params: &VmParams, pools: &[Pool]) -> TaxRate {
        let own = params.tax.and_then(|tax| TaxRate::new(tax).ok());
        own.or_else(|| pool_tax(pools, self.pools.id(params.pool.as_deref())))
            .unwrap_or_else(|| self.tax())
    }
    /// Of free memory, as they were in force in the last turn.
    pub fn thresholds(&self) -> Thresholds {
        lock(&self.reserve).thresholds()
    }
    /// The highest that they may be with the budget as it is now: promises are made with these.
    pub fn highest_thresholds(&self) -> Thresholds {
        self.config().scale.thresholds(self.host.ledger.budget())
    }
    /// For the policy's turn: as they are to be from now on.
    pub(crate) fn step_reserve(&self) -> Thresholds {
        let ledger = &self.host.ledger;
        let starting = !self.room_for_starts().is_zero();
        let seen = Trough { free: ledger.take_trough(), starting };
        let scale = self.config().scale;
        lock(&self.reserve).step(self.started.elapsed(), scale, ledger.budget(), &seen)
    }
    /// From now on no VM is started.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }
    /// From now on no VM is started, and there is no way back: all are ended.
    pub(crate) fn end_vms(&self) {
        self.ending_vms.store(true, Ordering::Relaxed);
    }
    /// Whether all VMs are being ended.
    pub(crate) fn is_ending_vms(&self) -> bool {
        self.ending_vms.load(Ordering::Relaxed)
    }
    /// It goes on after all, unless its VMs are being ended.
    pub fn reopen(&self) {
        self.closing.store(false, Ordering::Relaxed);
    }
    /// Whether no VM may be started.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed) || self.is_ending_vms() || self.is_stopping()
    }
    /// Whether a VM may not be started; `again`: one whose guest rebooted. A manager that leaves waits for those.
    pub(crate) fn is_closed_to(&self, again: bool) -> bool {
        if again { self.is_ending_vms() || self.is_stopping() } else { self.is_closing() }
    }
    /// The manager's threads end; VMs are left as they are.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_set()
    }
    /// From now on `is_stopping`: nothing takes that back.
    pub fn set_stopping(&self) {
        self.stopping.set();
        self.kick.ring("the manager ends");
        self.host.tell_unreadable_change();
    }
    /// Returns after so long, or as soon as it `is_stopping`.
    pub fn rest(&self, time: Duration) {
        self.stopping.rest(time);
    }

    /// From 1 on, each once a manager.
    pub fn next_id(&self) -> VmId {
        VmId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// All VMs, in order of start.
    pub fn vms(&self) -> Vec<Arc<Vm>> {
        self.vms.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The VM of that name, if there is one; one that is being started, or waits to be taken over, is none yet. Whatever the
    /// caller holds, it may ask.
    pub fn find(&self, name: &str) -> Option<Arc<Vm>> {
        self.vms().into_iter().find(|vm| vm.name == name)
    }

    /// The same for who is told why there is none. Not to be called with `waiting` or `starting` held.
    ///
    /// # Errors
    /// NotFound.
    pub fn vm(&self, name: &str) -> Result<Arc<Vm>, Failure> {
        self.find(name).ok_or_else(|| {
            let what = if lock(&self.waiting).contains_key(name) {
                format!("VM '{name}' waits to be taken over; `ballast vm ls` says why")
            } else if lock(&self.starting).contains_key(name) {
                format!("VM '{name}' is being started")
            } else {
                format!("no VM named '{name}'")
            };
            Failure::new(ErrorCode::NotFound, what)
        })
    }

    /// Makes a VM one that is managed. Its name was taken before.
    pub fn insert(&self, vm: Arc<Vm>) {
        self.vms.write().unwrap_or_else(PoisonError::into_inner).push(vm.clone());
        self.overcommit_peak();
        self.kick.ring(format!("{} arrived", vm.name));
    }

    /// Takes a VM out, of which nothing is left.
    pub fn remove(&self, vm: &Vm) {
        self.vms.write().unwrap_or_else(PoisonError::into_inner).retain(|other| other.id != vm.id);
        self.kick.ring(format!("{} left", vm.name));
    }

    /// Of all VMs of this manager, those that ended included.
    pub(crate) fn totals(&self) -> Totals {
        // Held throughout: a VM that ends meanwhile is counted once.
        let ended = lock(&self.ended);
        let mut total = *ended;
        for vm in self.vms() {
            total.add(&vm);
        }
        total
    }

    /// VMs that wait to be taken over, by name. One that is taken over in this moment is a VM by now.
    pub(crate) fn waiting(&self) -> Vec<Waits> {
        self.with_waiting().1
    }

    /// The VMs, and those that wait to be taken over, by name: each once, also one that is taken over in this moment.
    pub(crate) fn with_waiting(&self) -> (Vec<Arc<Vm>>, Vec<Waits>) {
        // First these: one that ceases to be among them is a VM before that.
        let mut waiting: Vec<Waits> = lock(&self.waiting).values().cloned().collect();
        waiting.sort_by(|a, b| a.record.name.cmp(&b.record.name));
        let vms = self.vms();
        waiting.retain(|waits| !vms.iter().any(|vm| vm.name == waits.record.name));
        (vms, waiting)
    }

    /// Of a process whose VM waits to be taken over: that it does.
    pub(crate) fn waits_as(&self, pid: u32) -> Option<String> {
        let waits = self.waiting().into_iter().find(|waits| waits.record.pid == pid)?;
        Some(format!("process {pid} waits to be taken over, as '{}'", waits.record.name))
    }

    /// Sum of configured sizes / machine memory.
    pub fn overcommit(&self) -> f64 {
        let (vms, waiting) = self.with_waiting();
        let waiting: Pages = waiting.iter().map(|waits| waits.record.boot()).sum();
        let sizes = vms.iter().map(|vm| vm.configured()).sum::<Pages>() + waiting;
        sizes.0 as f64 / self.host.ledger.budget().0.max(1) as f64
    }
    /// The most that it was so far: when a VM came, the policy took its turn, or somebody asked.
    pub fn overcommit_peak(&self) -> f64 {
        let now = self.overcommit();
        let mut peak = lock(&self.overcommit_peak);
        *peak = peak.max(now);
        *peak
    }

    /// By the policy thread, once its orders are given.
    pub fn set_decision(&self, decision: Arc<Decision>) {
        *lock(&self.decision) = Some((Instant::now(), decision));
    }
    /// The last one, and when it was made. None before the first.
    pub fn decision(&self) -> Option<(Instant, Arc<Decision>)> {
        lock(&self.decision).clone()
    }

    /// In the run folder; a VM of this name need not be there.
    pub fn folder_of(&self, name: &str) -> PathBuf {
        self.config().run_dir.join(VMS).join(name)
    }

    /// Checks promises already made against one more (OSDI'02 s.6.2), and records it under `name`
    /// until the VM is there or the start failed.
    ///
    /// # Errors
    /// There is no such pool; or it, or the host, cannot promise so much more. What is held for a next start is promised again,
    /// as much of it as there is.
    pub fn promise(&self, name: &str, need: Pledge) -> Result<(), Failure> {
        let mut starting = lock(&self.starting);
        // What is held for one that is started again is what is promised now.
        let mut others = starting.clone();
        let held = others.remove(name).is_some_and(|held| held.rebooted.is_some());
        // Under the lock: whoever takes a pool away looks for promises out of it.
        let rules = self.pools.rules();
        check_pool(&rules, need.pool.as_deref())?;
        let pools = self.pools.pools(&rules);
        let made = self.promises(&others);
        let pool = self.pools.id(need.pool.as_deref());
        let refused = |why: String| Failure::new(ErrorCode::NoRoom, format!("{name}: {why}"));
        let books = self.books(&pools, &made);
        // What is held is promised already, and what its overhead is by now is not its guest's to pay, who rebooted: also where
        // more is promised than can be kept.
        let mut need = need;
        if held {
            // It is not to wait for more than others can be left without.
            while !need.promise.min.is_zero()
                && let Err(lack) = books.admit(pool, need.promise.memory())
            {
                // By what is missing: beside it, its pool may keep a min free for it.
                let missing = lack.need.saturating_sub(lack.left);
                need.promise.min = need.promise.min.saturating_sub(missing);
            }
        }
        let (lacking, left) = match books.admit(pool, need.promise.memory()) {
            Ok(()) => (Pages::ZERO, Pages::ZERO),
            Err(_) if held => (Pages::ZERO, Pages::ZERO),
            Err(lack) if lack.pool.is_some() => return Err(refused(lack.to_string())),
            Err(lack) => (lack.need, lack.left),
        };
        let largest = made.into_iter().max_by_key(|(_, _, pages)| *pages);
        let of_host = Promise { min: lacking, overhead: Pages::ZERO, swap: need.promise.swap };
        let largest = largest.map(|(name, _, pages)| (name, pages));
        admit(left, self.free_swap(&others), &of_host, largest)
            .map_err(|refusal| refused(refusal.to_string()))?;
        starting.insert(name.to_owned(), need);
        Ok(())
    }

    /// Swap space that nobody is promised: less what those have been promised who have not made their files yet.
    fn free_swap(&self, others: &HashMap<String, Pledge>) -> Pages {
        let coming: Pages = others.values().map(|pledge| pledge.promise.swap).sum();
        self.swap.room().saturating_sub(coming)
    }

    /// Whether there is too little swap space for a VM called `name`, as far as is known by the last look.
    pub(crate) fn is_short_of_swap(&self, name: &str, need: Pages) -> bool {
        let mut others = lock(&self.starting).clone();
        others.remove(name);
        self.free_swap(&others) < need
    }

    pub(crate) fn books<'a>(&self, pools: &'a [Pool], made: &[Made]) -> Books<'a> {
        Books {
            pools,
            capacity: capacity(self.host.ledger.budget(), &self.highest_thresholds()),
            promises: made.iter().map(|&(_, pool, pages)| (pool, pages)).collect(),
        }
    }

    /// Machine memory that is promised, by name.
    pub(crate) fn promises(&self, starting: &HashMap<String, Pledge>) -> Vec<Made> {
        let mut vms = self.vms();
        // One that has ended, and is to be started again, keeps what is held for that.
        let is_held = |name: &str| starting.get(name).is_some_and(|held| held.rebooted.is_some());
        vms.retain(|vm| vm.run_state() != RunState::Stopped || !is_held(&vm.name));
        // One that is there already, and answers on QMP next, is promised to once.
        let is_there = |name: &str| vms.iter().any(|vm| vm.name == name);
        let coming = starting.iter().filter(|(name, _)| !is_there(name));
        // Until its start is done with it is promised what it was to start with: it was not looked at before.
        let running = vms.iter().map(|vm| {
            let (name, pool, memory) = self.promised_to(vm, &vm.params());
            let start = starting.get(&name).filter(|pledge| pledge.rebooted.is_none());
            let pledged = start.map(|pledge| pledge.promise.memory());
            (name, pool, memory.max(pledged.unwrap_or_default()))
        });
        running
            .chain(coming.map(|(name, pledge)| {
                let pool = self.pools.id(pledge.pool.as_deref());
                (name.clone(), pool, pledge.promise.memory())
            }))
            .collect()
    }

    /// What a VM is promised under `params`.
    pub(crate) fn promised_to(&self, vm: &Vm, params: &VmParams) -> Made {
        let guaranteed = match vm.run_state() {
            // It has ended: what it has is being given back, and nothing more is promised to it than was.
            RunState::Stopped => params.min,
            _ => guaranteed(vm, params),
        };
        (vm.name.clone(), self.pools.id(params.pool.as_deref()), guaranteed + vm.overhead())
    }

    /// Its swap files are there: they are not free room any more, and need not be kept free.
    pub fn swap_made(&self, name: &str) {
        if let Some(pledge) = lock(&self.starting).get_mut(name) {
            pledge.promise.swap = Pages::ZERO;
        }
    }

    /// A VM that rebooted is started again, or will not be: nothing is held for that any more.
    pub(crate) fn reboot_settled(&self, name: &str, of: VmId) {
        let mut starting = lock(&self.starting);
        if starting.get(name).is_some_and(|pledge| pledge.rebooted == Some(of)) {
            starting.remove(name);
        }
    }

    /// The next start of a VM that rebooted failed: its name and promise are held for another one.
    pub(crate) fn promise_held(&self, name: &str, pledge: Pledge) {
        lock(&self.starting).insert(name.to_owned(), pledge);
    }

    /// The VM is there, and promised to as such, or its start failed: its name is no longer held.
    pub fn promise_settled(&self, name: &str) {
        lock(&self.starting).remove(name);
    }

    /// How it ends where it leaves its VMs as they are: as if it had stopped all where there is none. What waits to be taken
    /// over, or is being started, is one too.
    pub fn leaving(&self) -> Ending {
        let nothing = self.vms().is_empty() && !self.has_paged_vms();
        if nothing { Ending::VmsStopped } else { Ending::LeaveVms }
    }

    /// Whether any VM would pause without a manager.
    pub fn has_paged_vms(&self) -> bool {
        !lock(&self.starting).is_empty()
            || self
                .vms()
                .iter()
                .any(|vm| vm.paged().is_some() && vm.run_state() != RunState::Stopped)
    }
}

/// A promise: to whom, from which pool, and how much machine memory.
pub(crate) type Made = (String, Option<PoolId>, Pages);

/// Whether there is such a pool.
///
/// # Errors
/// NotFound.
pub(crate) fn check_pool(rules: &crate::pools::Rules, pool: Option<&str>) -> Result<(), Failure> {
    match pool {
        Some(name) if !rules.contains_key(name) => {
            Err(Failure::new(ErrorCode::NotFound, format!("pool: no pool named '{name}'")))
        }
        _ => Ok(()),
    }
}

/// What a VM that has not ended has, or may take, beside its overhead, that others cannot be promised.
pub(crate) fn guaranteed(vm: &Vm, params: &VmParams) -> Pages {
    let is_paged = vm.paged().is_some();
    // Of one that was not looked at yet it is not known. While its machine is built it cannot be; then it keeps what it has
    // until it is.
    let is_inspected = vm.inspected.load(Ordering::Relaxed);
    let is_presumed = !is_inspected && Instant::now() < vm.built;
    match vm.mode() {
        Mode::Paged | Mode::BalloonOnly if is_paged && (vm.may_be_paged() || is_presumed) => {
            params.min
        }
        Mode::Paged | Mode::BalloonOnly if is_paged && !is_inspected => {
            params.min.max(vm.consumed())
        }
        // It may take all that it asks for.
        Mode::Unmanaged if is_paged && is_inspected => all_of(vm, params),
        // Nothing is taken from it, or only what its guest gives: what it uses it keeps. (It has what it may take, too, and has
        // that as long as it was promised.)
        _ => {
            let uses = match is_paged {
                true => vm.consumed(),
                false => {
                    let uses = Pages(vm.uses.load(Ordering::Relaxed));
                    uses.saturating_sub(vm.own()).min(vm.configured())
                }
            };
            uses.max(unpaged_promise(vm, params))
        }
    }
}

/// What a VM that cannot be paged may take beside its overhead at any moment, whatever it has.
pub(crate) fn unpaged_promise(vm: &Vm, params: &VmParams) -> Pages {
    let Some(spec) = &vm.spec else { return params.min };
    // Nothing but its balloon keeps it within less than its whole size; until that has told, nothing.
    let held = if spec.no_balloon { None } else { lock(&vm.balloon).held.map(|held| held.0) };
    vm.configured().saturating_sub(held.unwrap_or_default()).max(params.min)
}

/// What may be promised of a budget.
pub(crate) fn capacity(budget: Pages, thresholds: &Thresholds) -> Pages {
    budget.saturating_sub(thresholds.goal()).saturating_sub(ZERO_RUN)
}

/// All that a VM may take beside its overhead.
pub(crate) fn all_of(vm: &Vm, params: &VmParams) -> Pages {
    vm.configured().max(vm.consumed()).max(params.min)
}

#[cfg(test)]
pub(crate) mod tests;
