//! A VM's QMP is kept in reach: as long as a connection lasts, its balloon is driven by it; where it ends and the VMM
//! does not, another one is made, after pauses that grow. Each VM has one task for that at most, whoever connected
//! first.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_api::RunState;
use ballast_policy::{BalloonControl, Health, Tools};
use ballast_qemu::{LaunchError, Monitor, Qmp, QmpError, Vmm};
use ballast_units::Pages;

use crate::inputs::AgentReport;
use crate::lifecycle::{QMP_DEADLINE, START};
use crate::manager::Manager;
use crate::sync::lock;
use crate::vm::Vm;
use crate::{agent_loop, balloon_loop, hotplug_loop};

/// How long a QEMU may take to greet: it may wait in a page fault.
const GREETING: Duration = Duration::from_secs(20);
/// Between two tries to connect, at first.
const FIRST: Duration = Duration::from_secs(1);
/// The same, at most. A connection that lasted as long was a good one.
const MOST: Duration = Duration::from_secs(60);

impl Manager {
    /// QMP is there, and is kept in reach from now on. Who tried to reach it before gives way.
    pub(crate) async fn connected(self: &Arc<Self>, vm: &Arc<Vm>, qmp: Qmp) {
        let mut task = vm.keeper.lock().await;
        if let Some(former) = task.take() {
            former.abort();
            // Until then it may connect, too; that connection ends with it.
            let _ = former.await;
            vm.seeks_qmp.store(true, Ordering::Relaxed);
            vm.set_monitor(None);
        }
        let mut keeper = Keeper::new(self, vm, qmp.socket().to_owned(), FIRST);
        let joined = join(self, vm, qmp).await.inspect_err(|e| {
            keeper.why = Some(e.to_string());
            vm.seeks_qmp.store(false, Ordering::Relaxed);
        });
        *task = Some(tokio::spawn(keeper.run(joined.ok())));
    }

    /// Finds the QMP of a VM at `socket`, and keeps it in reach, if nobody has told of it before.
    pub(crate) async fn find_qmp(self: &Arc<Self>, vm: &Arc<Vm>, socket: PathBuf) {
        let mut task = vm.keeper.lock().await;
        if task.is_none() {
            let keeper = Keeper::new(self, vm, socket, Duration::ZERO);
            *task = Some(tokio::spawn(keeper.run(None)));
        }
    }
}

/// The first connection to a VMM that was started. One that waits for memory which the host does not have, or for a disk,
/// is given more time, for as long as that lasts.
///
/// # Errors
/// It ended, or does not greet though it waits for nothing of ours.
pub(crate) async fn greeted(vm: &Vm, vmm: &Vmm, socket: &Path) -> Result<Qmp, LaunchError> {
    greeted_within(vmm, socket, START, || {
        vm.paged().as_ref().is_some_and(|paged| paged.waiting() > 0)
    })
    .await
}

async fn greeted_within(
    vmm: &Vmm,
    socket: &Path,
    patience: Duration,
    is_waiting: impl Fn() -> bool,
) -> Result<Qmp, LaunchError> {
    let waited = AtomicBool::new(false);
    let watch = async {
        loop {
            tokio::time::sleep(FIRST).await;
            waited.fetch_or(is_waiting(), Ordering::Relaxed);
        }
    };
    tokio::pin!(watch);
    loop {
        let told = tokio::select! {
            told = vmm.connect_qmp(socket, patience) => told,
            _ = &mut watch => continue,
        };
        match &told {
            Err(LaunchError::Qmp(
                e @ (QmpError::NoGreeting { .. } | QmpError::Deadline { .. }),
            )) if waited.swap(false, Ordering::Relaxed) || is_waiting() => {
                tracing::warn!("{e}: it waits for memory, and is waited for");
            }
            _ => return told,
        }
    }
}

/// Makes use of a new connection: events are watched, statistics on, what the balloon holds is learnt, and the VMM
/// looked at.
///
/// # Errors
/// QEMU does not tell what devices it has, or what its balloon holds: the connection is of no use.
async fn join(manager: &Arc<Manager>, vm: &Arc<Vm>, qmp: Qmp) -> Result<Monitor, QmpError> {
    // First of all: the guest may reboot at any moment.
    vm.watch_events(qmp.events());
    let monitor = Monitor::new(qmp, QMP_DEADLINE).await?;
    if let Err(e) = monitor.enable_guest_stats(1).await {
        tracing::warn!(vm = vm.name, "guest statistics: {e}");
    }
    match balloon_loop::size(vm, &monitor).await {
        Ok(holds) => lead_on(manager, vm, &monitor, holds).await,
        // It would be let down at once by who does not know what it holds.
        Err(e) if monitor.has_balloon() && !matches!(e, QmpError::Refused { .. }) => return Err(e),
        Err(_) => {}
    }
    let heard = vm.run_events();
    match monitor.query_status().await {
        // It may have gone on unheard.
        Ok(status) if status.running => vm.was_found(RunState::Running, heard),
        // One of `vm run` does not stay.
        Ok(status) if status.status == "shutdown" && vm.spec.is_some() => vm.has_started(),
        // Stopped before we listened, whatever for: by a person, by an error of its disk, asleep. A former manager was told, or
        // nobody.
        Ok(_) => vm.was_found(RunState::Paused, heard),
        Err(_) => vm.has_started(),
    }
    vm.set_monitor(Some(monitor.clone()));
    vm.seeks_qmp.store(false, Ordering::Relaxed);
    manager.look_at(vm).await;
    ask_agent(manager, vm);
    Ok(monitor)
}

/// What a balloon holds was taken before, by a former manager perhaps: it is led on from there, not given back first.
async fn lead_on(manager: &Manager, vm: &Vm, monitor: &Monitor, holds: Pages) {
    let unplugged = hotplug_loop::look(vm, monitor).await.map(|look| look.less);
    let unplugged = unplugged.unwrap_or_default();
    *lock(&vm.control) = BalloonControl::resume(manager.config().balloon, holds);
    if !holds.is_zero() {
        // Somebody fills it: of one without statistics, or that tells them late, it is known by this alone.
        lock(&vm.driver).holds_something();
    }
    let mut balloon = lock(&vm.balloon);
    balloon.commanded = holds;
    balloon.held = Some((holds, Pages::ZERO));
    // Later on the goal in force is the policy's.
    if !vm.was_led.swap(true, Ordering::Relaxed) {
        balloon.goal = holds + unplugged;
    }
}

/// Has the guest's agent asked, where there is to be one. That goes on whatever becomes of QMP.
fn ask_agent(manager: &Manager, vm: &Arc<Vm>) {
    if vm.spec.as_ref().is_none_or(|spec| spec.guest_agent != Some(true)) {
        return;
    }
    let mut agent = lock(&vm.agent);
    if agent.is_none() {
        *agent = Some(AgentReport::default());
        tokio::spawn(agent_loop::run(vm.clone(), manager.paths(&vm.name).agent_socket));
    }
}

/// Keeps the QMP of one VM in reach.
struct Keeper {
    manager: Arc<Manager>,
    vm: Arc<Vm>,
    socket: PathBuf,
    pauses: Pauses,
    /// Why it is out of reach, where that was not told yet.
    why: Option<String>,
    /// It was told that it is out of reach.
    told: bool,
}

impl Keeper {
    /// `first`: how long to wait before the first try.
    fn new(manager: &Arc<Manager>, vm: &Arc<Vm>, socket: PathBuf, first: Duration) -> Keeper {
        let (manager, vm) = (manager.clone(), vm.clone());
        Keeper { manager, vm, socket, pauses: Pauses(first), why: None, told: false }
    }

    /// Ends with the VM, or when another process is found to listen where the VM's was. `next`: a connection that is
    /// there already.
    async fn run(mut self, mut next: Option<Monitor>) {
        loop {
            let monitor = match next.take() {
                Some(monitor) => monitor,
                None => match self.reach().await {
                    Some(monitor) => monitor,
                    None => return,
                },
            };
            let begun = Instant::now();
            let ended = balloon_loop::run(&self.manager, &self.vm, &monitor).await;
            let Some(why) = ended else { return };
            self.pauses.note(begun.elapsed());
            self.lost(&why);
        }
    }

    fn lost(&mut self, why: &str) {
        {
            // Nobody gives it memory by that balloon now: what is free is not kept for it.
            let output = &mut lock(&self.vm.balloon).output;
            (output.health, output.short) = (Health::Missing, false);
        }
        *lock(&self.vm.tools) = Tools::default();
        self.vm.seeks_qmp.store(true, Ordering::Relaxed);
        self.vm.set_monitor(None);
        self.why = Some(format!("QMP: {why}"));
    }

    /// Tries, again and again, until it answers. None: its VMM or the manager has ended, or another process listens
    /// there.
    async fn reach(&mut self) -> Option<Monitor> {
        loop {
            // First: of a VMM that ends, the connection may end sooner than the process.
            let pause = self.pauses.take();
            tokio::select! {
                _ = self.vm.process.exited() => return None,
                () = tokio::time::sleep(pause) => {}
            }
            if self.manager.is_stopping() {
                return None;
            }
            self.tell();
            let freezes = self.vm.freezes.load(Ordering::Relaxed);
            let connected = tokio::select! {
                _ = self.vm.process.exited() => return None,
                qmp = Qmp::connect(&self.socket, GREETING) => qmp,
            };
            let joined = match connected {
                // By a path that was given, anybody may listen by now.
                Ok(qmp) if qmp.pid() != Some(self.vm.process.pid()) => {
                    let socket = self.socket.display();
                    tracing::warn!(
                        vm = self.vm.name,
                        "{socket}: another process listens there: no balloon until it is attached again"
                    );
                    self.vm.seeks_qmp.store(false, Ordering::Relaxed);
                    return None;
                }
                Ok(qmp) => join(&self.manager, &self.vm, qmp).await,
                Err(e) => Err(e),
            };
            match joined {
                Ok(monitor) => {
                    if std::mem::take(&mut self.told) {
                        tracing::info!(vm = self.vm.name, "QMP: in reach again");
                    }
                    return Some(monitor);
                }
                Err(e) => self.why = Some(e.to_string()),
            }
            self.vm.seeks_qmp.store(false, Ordering::Relaxed);
            // While its process is stopped, for pages that cannot be read, it cannot answer.
            if self.vm.is_frozen() || self.vm.freezes.load(Ordering::Relaxed) != freezes {
                self.pauses.anew();
            }
        }
    }

    /// Says that it is out of reach: once, until it is in reach again.
    fn tell(&mut self) {
        let Some(why) = self.why.take() else { return };
        if self.told || self.vm.is_frozen() {
            tracing::debug!(vm = self.vm.name, "{why}");
        } else {
            tracing::warn!(vm = self.vm.name, "{why}: its balloon is out of reach for now");
            self.told = true;
        }
    }
}

/// Before the next try to connect. They grow from one to the next, also over connections that do not last.
#[derive(Debug)]
struct Pauses(Duration);

impl Pauses {
    fn take(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).clamp(FIRST, MOST);
        pause
    }

    /// From now on as at first.
    fn anew(&mut self) {
        self.0 = FIRST;
    }

    /// Takes note of a connection that has ended: how long it had lasted.
    fn note(&mut self, lasted: Duration) {
        if lasted >= MOST {
            self.anew();
        }
    }
}

#[cfg(test)]
mod tests {
    use ballast_qemu::{Launch, spawn};

    use super::*;
    use crate::vm::{Asked, VmParams};

    #[tokio::test]
    async fn a_vmm_that_waits_for_memory_is_waited_for_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let launch = Launch {
            program: "sleep".into(),
            args: vec!["1000".into()],
            env: vec![],
            dir: dir.path().into(),
            log: dir.path().join("log"),
        };
        let vmm = spawn(&launch).await.unwrap();
        let socket = dir.path().join("qmp.sock");
        let patience = Duration::from_millis(5);
        let asked = std::sync::atomic::AtomicU32::new(0);
        let waits = |times| {
            let asked = &asked;
            move || asked.fetch_add(1, Ordering::Relaxed) < times
        };
        let told = greeted_within(&vmm, &socket, patience, waits(3)).await.unwrap_err();
        assert!(matches!(told, LaunchError::Qmp(QmpError::NoGreeting { .. })), "{told}");
        assert_eq!(asked.load(Ordering::Relaxed), 4);
        // One that ends is not.
        vmm.process.kill().unwrap();
        let told = greeted_within(&vmm, &socket, patience, || true).await.unwrap_err();
        assert!(matches!(told, LaunchError::Ended { .. }), "{told}");
    }

    #[tokio::test]
    async fn nothing_is_kept_for_a_vm_whose_qmp_is_lost_by_what_its_balloon_was() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let size = Pages::from_mib(64);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let vm = Vm::of_tests("a", dir.path().join("a"), size, params);
        let told = Tools { ballooned: Pages(7), ..Tools::default() };
        *lock(&vm.tools) = told;
        lock(&vm.balloon).output.health = Health::Healthy;
        lock(&vm.balloon).output.short = true;
        let mut keeper = Keeper::new(&manager, &vm, dir.path().join("qmp.sock"), FIRST);
        keeper.lost("closed");
        let output = lock(&vm.balloon).output;
        assert_eq!((output.health, output.short), (Health::Missing, false));
        assert_ne!(*lock(&vm.tools), told);
        assert!(vm.seeks_qmp.load(Ordering::Relaxed));
        assert_eq!(keeper.why.as_deref(), Some("QMP: closed"));
    }

    #[test]
    fn pauses_grow_until_a_connection_has_lasted() {
        let mut pauses = Pauses(Duration::ZERO);
        let mut next = |lasted: u64| {
            pauses.note(Duration::from_secs(lasted));
            pauses.take().as_secs()
        };
        assert_eq!([0; 8].map(&mut next), [0, 1, 2, 4, 8, 16, 32, 60]);
        // One that is closed at once, each time, is not made more often for it.
        assert_eq!([59; 2].map(&mut next), [60, 60]);
        assert_eq!([60, 0, 0].map(&mut next), [1, 2, 4]);
    }
}
