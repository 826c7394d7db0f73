//! How VMs end: stopped by a person, by their guest, or killed; and started again after a reboot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_api::{
    Accel, ErrorCode, Management, MemoryView, Mode, RebootAction, RunState, VmChange, VmSpec,
    VmView,
};
use ballast_pager::service::PagedVm;
use ballast_policy::{BalloonControl, Promise, WorkingSet};
use ballast_qemu::{AccelChoice, Exit, Monitor, QmpError, last_log_line};
use ballast_units::{Bytes, Pages, VmId};

use crate::config::rules::rule_for;
use crate::exits::{exited, terminate};
use crate::layout::QEMU_LOG;
use crate::lifecycle::built_at;
use crate::looks::Past;
use crate::manager::{Ending, Failure, Manager, Pledge, Waits, all_of};
use crate::records::Record;
use crate::sync::lock;
use crate::vm::{ENDED, NewVm, Vm, VmParams};
use crate::{balloon_loop, views};

/// How long the last words of a QEMU that has ended may take through its socket.
const LAST_WORDS: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(20);
/// Between two tries to make a QEMU hear that its guest is to power off.
const AGAIN: Duration = Duration::from_secs(1);
/// And between two presses of the power button of one that has heard: a guest that goes down already minds no other.
const PRESSED_AGAIN: Duration = Duration::from_secs(5);
/// How long the balloon of a VM that is let go of is waited for. It was told, and goes on by itself.
const DEFLATION: Duration = Duration::from_secs(5);
/// How long a start may look at a VM yet that was stopped meanwhile: at its mappings, and for its QMP.
const LAST_LOOKS: Duration = Duration::from_secs(20);
/// How long VMs that are just being started may take until they can be stopped.
const STARTS: Duration = Duration::from_secs(90);
/// How long files of VMs that ended while no manager ran are waited for, which are being removed: their disk may hang.
const CLEARING: Duration = Duration::from_secs(10);

/// A guest that reboots within this time of its start waits before it is started again.
const REBOOT_LOOP: Duration = Duration::from_secs(10);
const REBOOT_PAUSE: Duration = Duration::from_secs(5);
/// A start after a reboot that fails is tried again: first after this time, then after twice as long, up to the second.
/// Where it is for want of room until it has that, else so often.
const RETRY: Duration = Duration::from_secs(5);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
const RETRIES: u32 = 5;

/// How long the shim of a VM that is to be stopped may take to come, after the manager was replaced.
const SHIM: Duration = Duration::from_secs(10);

impl Manager {
    /// Ends a VM: the guest's own way for `grace`, or without QMP the VMM's; then it is killed. All it had is
    /// released when this returns.
    ///
    /// # Errors
    /// No such VM, or it is not to be ended now, or cannot be killed.
    pub async fn stop_vm(self: &Arc<Self>, name: &str, grace: Duration) -> Result<VmView, Failure> {
        self.stop_within(name, grace, grace).await
    }

    /// The same, of which some has passed: `rest` is left of it.
    async fn stop_within(
        self: &Arc<Self>,
        name: &str,
        grace: Duration,
        rest: Duration,
    ) -> Result<VmView, Failure> {
        let vm = match self.vm(name) {
            Ok(vm) => vm,
            Err(unknown) => {
                let answer = self.stop_absent(name, rest, unknown).await;
                // One that was between two lists, as one that is being taken over.
                match (answer, self.vm(name)) {
                    (Err(e), Ok(vm)) if e.code == ErrorCode::NotFound => vm,
                    (answer, _) => return answer,
                }
            }
        };
        let asked = Instant::now();
        // First: one that reboots now is not started again.
        let before = vm.begin_to_stop();
        let last = views::vm(self, &vm);
        let ended = if rest.is_zero() {
            Some(if grace.is_zero() { "killed, as asked".to_owned() } else { too_late(grace) })
        } else if vm.is_frozen() {
            Some("killed: its pages cannot be read, and it hears nothing".to_owned())
        } else {
            let asked = tokio::time::timeout(rest, ask_to_end(&vm, rest / 2)).await;
            let how = match asked {
                Ok(Asked::Guest) => None,
                // A VM that has none, and one whose guest would have been asked.
                Ok(Asked::Vmm) if !vm.has_qmp() => None,
                Ok(Asked::Vmm) => Some(
                    "its VMM was told to end (SIGTERM), and its guest was not asked: no QMP answered".to_owned(),
                ),
                Err(_) => Some(too_late(grace)),
            };
            how.inspect(|how| tracing::warn!(vm = vm.name, "{how}"))
        };
        // SIGTERM would wait for as long as a vCPU waits in a page fault, or the process is stopped;
        // SIGKILL does not.
        vm.process.kill().map_err(|e| {
            vm.goes_on(before);
            Failure::internal(format!("{name}: ending its VMM: {e}"))
        })?;
        vm.process.exited().await;
        let vmm_uptime_s = last.vmm_uptime_s.map(|up| up + asked.elapsed().as_secs_f64());
        self.gone(&vm).await;
        self.start_is_over(name).await;
        // It may have rebooted just before.
        if let Some(again) = self.stop_between(name, rest).await {
            again?;
        }
        Ok(VmView { state: RunState::Stopped, ended, vmm_uptime_s, ..last })
    }

    /// Whoever was starting a VM that was stopped then has its name, and what it was promised, until he has seen that.
    async fn start_is_over(&self, name: &str) {
        let end = tokio::time::Instant::now() + LAST_LOOKS;
        // What is held for its next start is not his.
        let starts = || lock(&self.starting).get(name).is_some_and(|p| p.rebooted.is_none());
        while starts() && tokio::time::Instant::now() < end {
            tokio::time::sleep(STEP).await;
        }
    }

    /// One that waits to be taken over is ended, and a start that waits for memory called off.
    async fn stop_absent(
        self: &Arc<Self>,
        name: &str,
        grace: Duration,
        unknown: Failure,
    ) -> Result<VmView, Failure> {
        if let Some(last) = self.stop_waiting(name, grace).await {
            return last;
        }
        // Before starts that wait: that of a reboot is not the only one of its name that may.
        if let Some(view) = self.stop_between(name, grace).await {
            return view;
        }
        if let Some(view) = self.call_off(name).await {
            return Ok(view);
        }
        if lock(&self.starting).contains_key(name) {
            let why = format!("'{name}' is being started: stop it when it is there");
            return Err(Failure::new(ErrorCode::Conflict, why));
        }
        Err(self.remains_of(name).map_or(unknown, |why| Failure::new(ErrorCode::Conflict, why)))
    }

    /// A VM that ended while its start was not done with. `exit`: how its VMM ended. Nobody is to try again to start one that
    /// ended by itself.
    pub(crate) async fn ended_at_once(&self, vm: &Vm, exit: Exit) {
        // That it was a reboot is among the last things that QEMU said, and its watch waits for those.
        let begun = Instant::now();
        while !vm.has_said_all.load(Ordering::Relaxed) && begun.elapsed() < LAST_WORDS + STEP {
            tokio::time::sleep(STEP).await;
        }
        let by_itself = exit == Exit::Code(0) && !vm.rebooting.load(Ordering::Relaxed);
        if let Some(reboot) = lock(&self.rebooting).get_mut(&vm.name).filter(|_| by_itself) {
            reboot.ended = true;
        }
    }

    /// One that has ended for a reboot of its guest is not started again; if it was, it is stopped.
    async fn stop_between(
        self: &Arc<Self>,
        name: &str,
        grace: Duration,
    ) -> Option<Result<VmView, Failure>> {
        let last = {
            let mut rebooting = lock(&self.rebooting);
            let reboot = rebooting.get_mut(name)?;
            reboot.called_off = true;
            reboot.last.clone()
        };
        while lock(&self.rebooting).contains_key(name) {
            // Its start may have been on its way to wait for room when that was said; or it is there, and what it waits for comes
            // when it has ended.
            if self.find(name).is_some() {
                break;
            }
            self.call_off(name).await;
            tokio::time::sleep(STEP).await;
        }
        let ended = Some("its guest was rebooting: it is not started again".to_owned());
        Some(match self.find(name) {
            // By somebody else, who came in between.
            None if lock(&self.starting).contains_key(name) => return None,
            Some(_) => Box::pin(self.stop_vm(name, grace)).await,
            None => Ok(VmView { state: RunState::Stopped, ended, ..last }),
        })
    }

    /// Ends a VM that waits to be taken over. Its guest stands still, so there is nobody to be asked, unless its shim
    /// comes soon, as it does where nothing is wrong.
    async fn stop_waiting(
        self: &Arc<Self>,
        name: &str,
        grace: Duration,
    ) -> Option<Result<VmView, Failure>> {
        let waits = lock(&self.waiting).get(name).cloned()?;
        let (process, refused) = (waits.process.clone(), waits.refused);
        let begun = Instant::now();
        let same = |waits: &Waits| waits.process.pid() == process.pid();
        let still_waits = || lock(&self.waiting).get(name).is_some_and(same);
        // One that has come is no longer expected: what it brings is being taken in. Not so where that was refused.
        let comes = || {
            let is_expected = lock(&self.expected).contains_key(name);
            let is_refused = lock(&self.waiting).get(name).is_some_and(|w| w.why.is_some());
            begun.elapsed() < SHIM || !is_expected && !is_refused
        };
        while !refused && begun.elapsed() < grace / 2 && comes() && still_waits() {
            tokio::time::sleep(STEP).await;
        }
        let last = self.view_of_waiting(waits);
        let is_killed = still_waits();
        if is_killed && let Err(e) = process.kill() {
            return Some(Err(Failure::internal(format!("{name}: ending its VMM: {e}"))));
        }
        // Its files go, then its name is free.
        while still_waits() {
            tokio::time::sleep(STEP).await;
        }
        let is_there = self.find(name).is_some_and(|vm| vm.process.pid() == process.pid());
        if !is_killed && (is_there || lock(&self.rebooting).contains_key(name)) {
            let rest = grace.saturating_sub(begun.elapsed());
            return Some(Box::pin(self.stop_within(name, grace, rest)).await);
        }
        process.exited().await;
        // Taken over in the last moment: then it is one that ended.
        if let Some(vm) = self.find(name)
            && vm.process.pid() == process.pid()
        {
            vm.begin_to_stop();
            self.gone(&vm).await;
        }
        let ended = is_killed
            .then(|| "killed: it waited to be taken over, so its guest stood still".to_owned());
        Some(Ok(VmView { state: RunState::Stopped, ended, ..last }))
    }

    /// Seen as it would be if it had been taken over, with what is booked for it.
    fn view_of_waiting(&self, waits: Waits) -> VmView {
        let Waits { process, record, why, held, since, .. } = waits;
        let s = since.elapsed().as_secs();
        let reason = why.as_ref().map_or_else(
            || format!("waits for its shim since {s} s"),
            |why| format!("not taken over: {why}; its guest waits since {s} s"),
        );
        let seen = NewVm {
            id: VmId(0),
            folder: self.folder_of(&record.name),
            name: record.name,
            spec: record.spec,
            accel: record.accel,
            size: record.size,
            boot: record.boot.unwrap_or(record.size),
            plugged: None,
            overhead: record.overhead,
            params: record.params,
            process,
            management: Management { mode: Mode::Unmanaged, reason: Some(reason) },
            past: Past::default(),
            external: held.pages(),
            vmm: Pages::ZERO,
            paged: None,
            control: BalloonControl::new(self.config().balloon),
            set: WorkingSet::new(self.config().sampling, record.size),
            built: built_at(None),
            seeks_qmp: false,
        };
        let seen = Vm::new(seen);
        seen.set_run_state(RunState::Paused);
        let view = views::vm(self, &seen);
        // What it has it keeps until then.
        let memory = MemoryView { target: view.memory.consumed, ..view.memory };
        VmView { trouble: why, memory, ..view }
    }

    /// VMs that are not taken over yet, with the reason.
    pub fn views_of_waiting(&self) -> Vec<VmView> {
        self.waiting().into_iter().map(|waits| self.view_of_waiting(waits)).collect()
    }

    /// A VM, or one that waits to be taken over.
    ///
    /// # Errors
    /// NotFound.
    pub fn view_of(&self, name: &str) -> Result<VmView, Failure> {
        let waiting = || self.views_of_waiting().into_iter().find(|view| view.name == name);
        if let Some(vm) = self.find(name) {
            return Ok(views::vm(self, &vm));
        }
        // Taken over between the two looks: then it is a VM.
        waiting().map_or_else(|| self.vm(name).map(|vm| views::vm(self, &vm)), Ok)
    }

    /// Stops all VMs at once, those that are being started and those that wait to be taken over
    /// included. None can be started afterwards. VMs that somebody else started and that are not
    /// paged do without a manager: they are let go as they are.
    /// Answers whether all have ended.
    pub async fn stop_all(self: &Arc<Self>) -> Ending {
        self.end_vms();
        // Whoever saw before that they are not being ended has its name by then.
        drop(self.admission.lock().await);
        let begun = Instant::now();
        let deadline = tokio::time::Instant::now() + STARTS;
        loop {
            for Waits { process, .. } in lock(&self.waiting).values() {
                if let Err(e) = process.kill() {
                    tracing::error!("ending process {}: {e}", process.pid());
                }
            }
            // One that has ended may be not paged for that: what is left of it is waited for. Its state is set first.
            let does_without = |vm: &Arc<Vm>| {
                vm.spec.is_none() && vm.paged().is_none() && vm.run_state() != RunState::Stopped
            };
            let (strangers, own): (Vec<_>, Vec<_>) = self.vms().into_iter().partition(does_without);
            let let_go = strangers.into_iter().map(|vm| {
                let manager = self.clone();
                tokio::spawn(async move { manager.let_go(&vm).await })
            });
            for done in let_go.collect::<Vec<_>>() {
                let _ = done.await;
            }
            let stops = own.into_iter().map(|vm| {
                let manager = self.clone();
                tokio::spawn(async move { manager.stop_vm(&vm.name, Duration::ZERO).await })
            });
            for stop in stops.collect::<Vec<_>>() {
                // One whose process the kernel does not end goes on in its task.
                if let Ok(Ok(Err(e))) = tokio::time::timeout_at(deadline, stop).await {
                    tracing::debug!("{e}");
                }
            }
            let starting: Vec<String> = lock(&self.starting).keys().cloned().collect();
            let all = self.vms();
            // Their files are removed by name: the next manager's would be of the same.
            let cleared = lock(&self.clearing).is_empty() || begun.elapsed() > CLEARING;
            if all.is_empty() && starting.is_empty() && cleared {
                return Ending::VmsStopped;
            }
            if tokio::time::Instant::now() > deadline {
                let left: Vec<String> =
                    all.iter().map(|vm| vm.name.clone()).chain(starting).collect();
                tracing::error!("VMs that do not end: left as they are: {}", left.join(", "));
                return Ending::VmsLeft;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A VM that does without a manager: nothing is kept of it but its memory, all of it.
    async fn let_go(&self, vm: &Vm) {
        // First: nothing is asked of its balloon any more, nor by a turn that was under way.
        self.remove(vm);
        self.remove_run_files(&vm.name);
        if let Some(keeper) = vm.keeper.lock().await.take() {
            keeper.abort();
            let _ = keeper.await;
        }
        let Some(monitor) = vm.monitor().filter(Monitor::has_balloon) else {
            return tracing::info!(vm = vm.name, "left as it is");
        };
        let deflated = async {
            loop {
                let held = balloon_loop::size(vm, &monitor).await?;
                // Also where it says that it holds nothing: it may be on its way to what it was asked last.
                monitor.balloon(vm.whole().bytes()).await?;
                if held.is_zero() {
                    return Ok::<_, QmpError>(());
                }
                tokio::time::sleep(STEP).await;
            }
        };
        match tokio::time::timeout(DEFLATION, deflated).await {
            Ok(Ok(())) => tracing::info!(vm = vm.name, "left, with all its memory"),
            Ok(Err(e)) => tracing::warn!(vm = vm.name, "left; its balloon: {e}"),
            Err(_) => tracing::info!(vm = vm.name, "left; its balloon was told to go down"),
        }
    }

    /// From now on no VM is started; waits until those that are being started are there, or not.
    ///
    /// # Errors
    /// Those that still are: that took too long, and all is as before.
    pub async fn settle_starts(&self, at_most: Duration) -> Result<(), Vec<String>> {
        self.close();
        // Whoever saw before that it was open has its name by then.
        drop(self.admission.lock().await);
        let deadline = tokio::time::Instant::now() + at_most;
        let starting = || -> Vec<String> {
            let waiting: Vec<String> = lock(&self.waiting).keys().cloned().collect();
            let starting = lock(&self.starting);
            starting.keys().filter(|name| !waiting.contains(name)).cloned().collect()
        };
        loop {
            let names = starting();
            if names.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                self.reopen();
                return Err(names);
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// Releases all that a VM had; whoever comes second waits for the first. Its name is free for
    /// another only when nothing of it is left.
    pub(crate) async fn gone(self: &Arc<Self>, vm: &Arc<Vm>) {
        let mut released = vm.released.lock().await;
        // A manager that has begun to leave leaves this, too, to the next one.
        if *released || self.is_stopping() {
            return;
        }
        *released = true;
        vm.set_run_state(RunState::Stopped);
        vm.set_monitor(None);
        let (manager, owner) = (self.clone(), vm.clone());
        let work = tokio::task::spawn_blocking(move || manager.release(&owner));
        if let Err(e) = work.await {
            tracing::error!(vm = vm.name, "releasing it: {e}");
        }
        self.remove(vm);
    }

    fn release(&self, vm: &Vm) {
        let paged = {
            // What it counted moves into the totals in one step.
            let mut ended = lock(&self.ended);
            ended.add(vm);
            vm.take_paged()
        };
        match vm.vmm.swap(ENDED, Ordering::Relaxed) {
            ENDED => {}
            booked => self.host.ledger.release(Pages(booked)),
        }
        match paged {
            Some(paged) => PagedVm::release(paged),
            None => {
                let external = vm.external.swap(0, Ordering::Relaxed);
                self.host.ledger.release(Pages(external) + vm.overhead);
            }
        }
        // Also of one whose pager did not start: its store was there before.
        self.commons.sweep();
        let record = Record::load(&vm.folder).ok().flatten();
        self.remove_all_but_logs(&vm.name, record.as_ref());
    }
}

fn too_late(grace: Duration) -> String {
    format!("killed: it had not ended within {} s", grace.as_secs_f64())
}

/// Who was asked.
enum Asked {
    Guest,
    Vmm,
}

/// Asks a guest to power off, again until it has ended: QEMU answers late where it waits in a page fault, and a guest
/// that still boots does not see its power button. Where there is no QMP, its VMM is told to end; where there is one that has
/// not answered yet, when that was waited for. Returns when it has ended.
async fn ask_to_end(vm: &Vm, patience: Duration) -> Asked {
    let begun = Instant::now();
    let mut heard = false;
    loop {
        let asked = match vm.monitor() {
            Some(monitor) => monitor.system_powerdown().await,
            None if vm.seeks_qmp.load(Ordering::Relaxed) && begun.elapsed() < patience => {
                if tokio::time::timeout(STEP, vm.process.exited()).await.is_ok() {
                    return Asked::Guest;
                }
                continue;
            }
            None => break,
        };
        match asked {
            Ok(()) => heard = true,
            // It may be in reach again soon.
            Err(QmpError::Closed { .. }) if heard || begun.elapsed() >= patience => break,
            Err(e) => tracing::debug!(vm = vm.name, "{e}"),
        }
        let wait = if heard { PRESSED_AGAIN } else { AGAIN };
        if tokio::time::timeout(wait, vm.process.exited()).await.is_ok() {
            return Asked::Guest;
        }
    }
    // One that was asked may be on its way down, and is not cut short; nor is one whose connection has ended just before it.
    if !heard {
        if vm.has_qmp() && tokio::time::timeout(AGAIN, vm.process.exited()).await.is_ok() {
            return Asked::Guest;
        }
        terminate(vm);
    }
    vm.process.exited().await;
    if heard { Asked::Guest } else { Asked::Vmm }
}

/// A VM's end, whoever caused it.
pub async fn watch_exit(manager: Arc<Manager>, vm: Arc<Vm>) {
    let exit = exited(&manager, &vm).await;
    let log = last_log_line(&vm.folder.join(QEMU_LOG));
    tracing::info!(vm = vm.name, "{exit}{}", log.map_or(String::new(), |l| format!(": {l}")));
    // Whether it was a reboot is among the last things that QEMU said.
    if let Some(events) = vm.take_events() {
        let _ = tokio::time::timeout(LAST_WORDS, events).await;
    }
    vm.has_said_all.store(true, Ordering::Relaxed);
    let again = vm.spec.as_ref().filter(|spec| {
        spec.on_reboot == RebootAction::Restart && vm.rebooting.load(Ordering::Relaxed)
    });
    let Some(spec) = again else { return manager.gone(&vm).await };
    // Its start is told to have failed, or is done with, before it is started again.
    while lock(&manager.starting).contains_key(&vm.name) {
        if *vm.released.lock().await {
            // Whoever started it again tries once more.
            if !lock(&manager.rebooting).contains_key(&vm.name) {
                let what = "rebooted while it was being started: not started again";
                tracing::warn!(vm = vm.name, "{what}");
            }
            return;
        }
        tokio::time::sleep(STEP).await;
    }
    // Before its name is free: from here on it is there, or being started, or here.
    let last = views::vm(&manager, &vm);
    let params = vm.params();
    // One that is not paged begins with an empty balloon, and cannot start with less than all; nor is anything taken but by its
    // balloon from one that has a pager and may not be paged.
    let was_unpaged = vm.paged().is_none();
    let takes_all = was_unpaged || (vm.inspected.load(Ordering::Relaxed) && !vm.may_be_paged());
    let min = if takes_all { all_of(&vm, &params) } else { params.min };
    // Before its files are gone: what they leave free is not others' in between.
    let swap = vm.size.saturating_sub(params.min);
    let promise = Promise { min, overhead: vm.overhead(), swap };
    let pool = params.pool;
    let held = Pledge { promise, pool, rebooted: Some(vm.id) };
    {
        // While nobody can release it: its name would be another's.
        let released = vm.released.lock().await;
        if *released {
            return;
        }
        lock(&manager.starting).insert(vm.name.clone(), held);
        let mut rebooting = lock(&manager.rebooting);
        // One that reboots again before its start was done with: what was said of the one counts for the other.
        let called_off = rebooting.get(&vm.name).is_some_and(|reboot| reboot.called_off);
        let reboot = Reboot { id: vm.id, called_off, ended: false, was_unpaged, last };
        rebooting.insert(vm.name.clone(), reboot);
    }
    manager.gone(&vm).await;
    start_again(&manager, &vm, spec).await;
    manager.reboot_settled(&vm.name, vm.id);
    let mut rebooting = lock(&manager.rebooting);
    if rebooting.get(&vm.name).is_some_and(|reboot| reboot.id == vm.id) {
        rebooting.remove(&vm.name);
    }
}

/// Unless somebody stops it, before or meanwhile. What keeps it from starting may pass: it had run well.
async fn start_again(manager: &Arc<Manager>, vm: &Arc<Vm>, spec: &VmSpec) {
    let is_wanted = || {
        let called_off = lock(&manager.rebooting).get(&vm.name).is_some_and(|r| r.called_off);
        let is_over = manager.is_ending_vms() || manager.is_stopping();
        !called_off && !vm.stop_asked.load(Ordering::Relaxed) && !is_over
    };
    if vm.started.elapsed() < REBOOT_LOOP && is_wanted() {
        // A guest that panics at boot would keep the host busy with nothing else.
        tracing::warn!(vm = vm.name, "rebooted soon after its start: held back for a while");
        pause(REBOOT_PAUSE, is_wanted).await;
    }
    let (mut tries, mut retry) = (0, RETRY);
    while is_wanted() {
        tracing::info!(vm = vm.name, "the guest rebooted: starting it again");
        // Boxed, since starting a VM spawns this very watch.
        let start: std::pin::Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(restart(manager.clone(), spec.clone(), vm.clone()));
        let Err(e) = start.await else { return };
        tries += u32::from(e.code != ErrorCode::NoRoom);
        let has_ended = lock(&manager.rebooting).get(&vm.name).is_some_and(|r| r.ended);
        if has_ended || tries > RETRIES {
            return tracing::error!(vm = vm.name, "not started again: {e}");
        }
        if is_wanted() {
            let in_s = retry.as_secs();
            tracing::warn!(vm = vm.name, "not started again yet, tried again in {in_s} s: {e}");
            pause(retry, is_wanted).await;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    }
    if manager.is_stopping() && !manager.is_ending_vms() {
        return tracing::error!(vm = vm.name, "not started again: ballastd ends first");
    }
    tracing::info!(vm = vm.name, "the guest rebooted: stopped, not started again");
}

async fn pause(at_most: Duration, is_wanted: impl Fn() -> bool) {
    let end = tokio::time::Instant::now() + at_most;
    while is_wanted() && tokio::time::Instant::now() < end {
        tokio::time::sleep(STEP).await;
    }
}

/// A VM between the end of its VMM and its next start, for its guest rebooted.
pub(crate) struct Reboot {
    /// Which of its name ended.
    id: VmId,
    /// It is to stay ended.
    called_off: bool,
    /// It was started again, and ended by itself.
    ended: bool,
    /// Whether it had to be promised all that it may take.
    pub(crate) was_unpaged: bool,
    /// As it was.
    last: VmView,
}

/// With what was asked for, which is not that of its start if somebody changed it.
async fn restart(manager: Arc<Manager>, spec: VmSpec, vm: Arc<Vm>) -> Result<(), Failure> {
    let boot = Bytes(spec.max).pages();
    let rule = rule_for(&manager.config().vms, &spec.name);
    let limit = rule.max.map_or(boot, |max| max.of(boot).min(boot));
    let (spec, changes) = again(spec, &vm.params(), limit);
    let spec = VmSpec { accel: accel_again(spec.accel, &vm.accel), ..spec };
    manager.run(spec, Some(vm.id)).await?;
    // It runs again, and stays: without what it cannot have now.
    for change in changes.iter().filter(|change| **change != VmChange::default()) {
        if let Err(e) = manager.change_apart(&vm.name, change.clone()).await {
            tracing::error!(vm = vm.name, "started again, and not all is as it was: {e}");
        }
    }
    Ok(())
}

/// One that ran under KVM is not emulated from its reboot on, because a busy host was slow when it was tried again.
fn accel_again(asked: Accel, had: &str) -> Accel {
    let was_found = asked == Accel::Auto && had == AccelChoice::Kvm.to_string();
    if was_found { Accel::Kvm } else { asked }
}

/// How a VM with these parameters is started again, where its limit is `limit` then, and what is to be changed when
/// it runs, one after the other: a promise that cannot be kept now costs it nothing else.
fn again(spec: VmSpec, params: &VmParams, limit: Pages) -> (VmSpec, [VmChange; 4]) {
    let asked = params.asked();
    let min = asked.min.map(|min| min.bytes().0);
    // No more is guaranteed than it may have: more was promised when its limit had been raised.
    let first = min.unwrap_or(0).min(limit.bytes().0);
    // What it was asked to be without, whatever the configuration says. A limit may be below that.
    let nothing = VmChange { min: min.filter(|min| *min == 0), ..VmChange::default() };
    let outside = VmChange { no_pool: asked.pool == Some(None), ..VmChange::default() };
    let limited = VmChange { max: asked.max.map(|max| max.bytes().0), ..VmChange::default() };
    let promise = VmChange { min: min.filter(|min| *min != first), ..VmChange::default() };
    let spec = VmSpec {
        shares: asked.shares,
        min: first,
        tax: asked.tax,
        pool: asked.pool.clone().flatten(),
        salt: params.salt.clone(),
        ..spec
    };
    (spec, [nothing, outside, limited, promise])
}

#[cfg(test)]
#[path = "ending_tests.rs"]
mod tests;
