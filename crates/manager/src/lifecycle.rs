//! VMs come and go: admission, start, attachment, exit, stop.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use ballast_api::{Accel, ErrorCode, Management, Mode, RebootAction, RunState, VmSpec, VmView};
use ballast_pager::service::PagedVm;
use ballast_policy::{BalloonControl, Promise, WorkingSet};
use ballast_qemu::{
    AccelChoice, Exit, LaunchPaths, Monitor, ProcessHandle, RamMapping, Verdict, Vmm, check_spec,
    command, inspect, last_log_line, probe_accel_cached, spawn,
};
use ballast_shim_proto::{Hello, Peer};
use ballast_units::{Bytes, Pages};

use crate::manager::{Failure, Manager};
use crate::paging::{Expected, pager_config};
use crate::records::Record;
use crate::vm::{NewVm, Vm, VmParams, lock};
use crate::{balloon_loop, views};

/// Deadline of one QMP command: a QEMU that waits in a page fault answers when it is served.
const QMP_DEADLINE: Duration = Duration::from_secs(5);
/// How long a VMM may take to map its RAM, and to open its QMP socket.
const START: Duration = Duration::from_secs(60);
/// How long a start waits for overhead memory to be made free.
const ROOM: Duration = Duration::from_secs(15);
/// How often a paged VM is looked at again for things that forbid paging.
const INSPECTION: Duration = Duration::from_secs(30);

impl Manager {
    /// Starts a VM: admission, VMM, pager, QMP. Answers when the guest runs.
    pub async fn run_vm(self: &Arc<Self>, spec: VmSpec) -> Result<VmView, Failure> {
        let checked = spec.clone();
        tokio::task::spawn_blocking(move || check_spec(&checked))
            .await
            .map_err(|e| Failure::internal(e.to_string()))?
            .map_err(|e| Failure::bad(e.to_string()))?;
        let size = Bytes(spec.max).pages();
        let params = VmParams {
            shares: spec.shares.unwrap_or_else(|| VmParams::default_shares(size)),
            min: Bytes(spec.min).pages_ceil(),
            max: size,
            tax: spec.tax,
        };
        let overhead = pager_config(&self.config, 0).overhead(size)
            + Bytes(spec.overhead.unwrap_or(0)).pages_ceil();
        let need = Promise::of(params.min, size, overhead);
        self.claim_name(&spec.name, need).await?;
        let name = spec.name.clone();
        let result = self.start_promised(spec, size, params, overhead).await;
        self.promise_settled(&name);
        let vm = result?;
        Ok(views::vm(self, &vm))
    }

    /// A name that nobody has, and a promise that can be kept.
    async fn claim_name(&self, name: &str, need: Promise) -> Result<(), Failure> {
        let _one = self.admission.lock().await;
        if self.is_stopping() {
            return Err(Failure::new(ErrorCode::Conflict, "the manager is ending"));
        }
        if self.vm(name).is_ok() || lock(&self.starting).contains_key(name) {
            return Err(Failure::new(
                ErrorCode::Conflict,
                format!("a VM named '{name}' runs already"),
            ));
        }
        self.promise(name, need)
    }

    async fn start_promised(
        self: &Arc<Self>,
        spec: VmSpec,
        size: Pages,
        params: VmParams,
        overhead: Pages,
    ) -> Result<Arc<Vm>, Failure> {
        let accel = self.choose_accel(&spec).await?;
        self.make_room(overhead).await?;
        // Until the pager has it, the overhead is ours to give back.
        let started = self.start_vmm(&spec, &accel, size, params, overhead).await;
        let (vmm, paged, paths) = match started {
            Ok(parts) => parts,
            Err(e) => {
                self.host.ledger.release(overhead);
                self.remove_files(&spec.name);
                return Err(e);
            }
        };
        let (management, paged) = match paged {
            Ok(paged) => (Management { mode: Mode::Paged, reason: None }, Some(paged)),
            Err(reason) => (Management { mode: Mode::BalloonOnly, reason: Some(reason) }, None),
        };
        let folder = paths.run_dir.clone();
        let vm = self.admit(NewVm {
            id: self.next_id(),
            name: spec.name.clone(),
            spec: Some(spec),
            folder,
            accel: accel.to_string(),
            size,
            overhead,
            params,
            process: vmm.process.clone(),
            management,
            paged,
            control: BalloonControl::new(self.config.balloon),
            set: WorkingSet::new(self.config.sampling, size),
        });
        let qmp = match vmm.connect_qmp(&paths.qmp_socket, START).await {
            Ok(qmp) => qmp,
            Err(e) => {
                // Its end, if it has ended, is seen by the watch; if not, it cannot be managed.
                let _ = vm.process.kill();
                return Err(Failure::internal(format!("{}: {e}", vm.name)));
            }
        };
        self.connected(&vm, qmp).await;
        if vm.run_state() == RunState::Stopped || !vm.process.is_alive() {
            let last = last_log_line(&paths.qemu_log).unwrap_or_else(|| "it said nothing".into());
            return Err(Failure::internal(format!("{}: QEMU ended at once: {last}", vm.name)));
        }
        vm.set_run_state(RunState::Running);
        Ok(vm)
    }

    async fn choose_accel(&self, spec: &VmSpec) -> Result<AccelChoice, Failure> {
        let choice = match spec.accel {
            Accel::Tcg => AccelChoice::Tcg { why: "asked for".into() },
            Accel::Kvm => AccelChoice::Kvm,
            Accel::Auto => {
                let qemu = spec.qemu.clone().unwrap_or_else(|| "qemu-system-x86_64".into());
                let cache = self.config.run_dir.join("accel.json");
                probe_accel_cached(&cache, &qemu, Some(&spec.kernel)).await
            }
        };
        *lock(&self.accel) = choice.to_string();
        Ok(choice)
    }

    /// Reserves overhead memory, waiting for the policy to make room if it must.
    async fn make_room(&self, overhead: Pages) -> Result<(), Failure> {
        let deadline = tokio::time::Instant::now() + ROOM;
        while !self.host.ledger.try_reserve(overhead) {
            if tokio::time::Instant::now() > deadline {
                return Err(Failure::new(
                    ErrorCode::NoRoom,
                    format!(
                        "no {overhead} of overhead memory became free within {} s ({} free)",
                        ROOM.as_secs(),
                        self.host.ledger.free()
                    ),
                ));
            }
            self.kick.ring("a VM waits for room");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// The VMM process, and its RAM in the pager's hands or the reason why not.
    async fn start_vmm(
        self: &Arc<Self>,
        spec: &VmSpec,
        accel: &AccelChoice,
        size: Pages,
        params: VmParams,
        overhead: Pages,
    ) -> Result<(Vmm, Result<PagedVm, String>, LaunchPaths), Failure> {
        let name = &spec.name;
        let paths = self.paths(name);
        let fresh = make_folder(&paths.run_dir);
        fresh.map_err(|e| Failure::internal(format!("{}: {e}", paths.run_dir.display())))?;
        let vmm = spawn(&command(spec, accel, &paths))
            .await
            .map_err(|e| Failure::internal(format!("{name}: {e}")))?;
        let swap = size.saturating_sub(params.min);
        let answer = self.expect_shim(name, vmm.pid, size, swap, overhead);
        let paged = tokio::select! {
            paged = receive(answer) => paged,
            exit = vmm.process.exited() => Err(Failure::internal(format!(
                "{name}: QEMU {exit} before it had mapped its RAM: {}",
                last_log_line(&paths.qemu_log).unwrap_or_else(|| "it said nothing".into())
            ))),
        };
        self.expect_no_longer(name);
        match paged {
            Ok(paged) => {
                let record = Record::new(name, Some(spec), params, size, overhead, vmm.pid, accel);
                record.save(&paths.run_dir);
                Ok((vmm, paged, paths))
            }
            Err(e) => {
                let _ = vmm.process.kill();
                vmm.process.exited().await;
                Err(e)
            }
        }
    }

    pub(crate) fn paths(&self, name: &str) -> LaunchPaths {
        let run_dir = self.folder_of(name);
        LaunchPaths {
            shim: self.config.shim.clone(),
            shim_socket: self.config.run_dir.join("shim.sock"),
            qmp_socket: run_dir.join("qmp.sock"),
            console: run_dir.join("console.log"),
            qemu_log: run_dir.join("qemu.log"),
            run_dir,
        }
    }

    /// Puts a VM among the managed ones and watches over it.
    pub(crate) fn admit(self: &Arc<Self>, new: NewVm) -> Arc<Vm> {
        let vm = Arc::new(Vm::new(new));
        if vm.paged().is_none() {
            // Counted at what it can take, until the kernel has told what it does take.
            vm.external.store(vm.size.0, Ordering::Relaxed);
            self.host.ledger.adopt(vm.size);
        }
        self.insert(vm.clone());
        tokio::spawn(watch_exit(self.clone(), vm.clone()));
        vm
    }

    /// QMP is there: statistics on, events watched, the balloon driven, and a look at what the VMM
    /// is made of.
    pub(crate) async fn connected(self: &Arc<Self>, vm: &Arc<Vm>, qmp: ballast_qemu::Qmp) {
        let monitor = match Monitor::new(qmp, QMP_DEADLINE).await {
            Ok(monitor) => monitor,
            Err(e) => {
                tracing::warn!(vm = vm.name, "{e}: no balloon for this VM");
                return;
            }
        };
        if let Err(e) = monitor.enable_guest_stats(1).await {
            tracing::warn!(vm = vm.name, "guest statistics: {e}");
        }
        if let Ok(left) = monitor.query_balloon().await {
            let holds = vm.size.saturating_sub(left.pages());
            if !holds.is_zero() {
                // A former manager inflated it: it is led on from there, not let down first.
                *lock(&vm.control) = BalloonControl::resume(self.config.balloon, holds);
                let mut balloon = lock(&vm.balloon);
                balloon.goal = holds;
                balloon.commanded = holds;
            }
        }
        vm.set_monitor(Some(monitor.clone()));
        self.look_at(vm).await;
        tokio::spawn(balloon_loop::run(self.clone(), vm.clone(), monitor));
        tokio::spawn(look_again(self.clone(), vm.clone()));
    }

    /// Whether the VM may be paged; one that may not any more keeps its pages, and gets all it
    /// asks for, but nothing is taken from it by eviction.
    async fn look_at(&self, vm: &Vm) {
        let ram = match &*vm.paged() {
            Some(paged) => {
                let ram = paged.memory().backend();
                RamMapping::of_file(ram.file(), ram.layout().base, ram.layout().len.bytes()).ok()
            }
            None => None,
        };
        let monitor = vm.monitor();
        let qmp = monitor.as_ref().map(|m| m.qmp().clone());
        let verdict = inspect(vm.process.pid(), qmp.as_ref(), ram.as_ref()).await;
        if vm.run_state() == RunState::Stopped || !vm.process.is_alive() {
            return;
        }
        let paged = ram.is_some();
        let old = vm.management();
        let management = match verdict {
            Verdict::Pageable if paged => Management { mode: Mode::Paged, reason: None },
            Verdict::Pageable if monitor.as_ref().is_some_and(Monitor::has_balloon) => Management {
                mode: Mode::BalloonOnly,
                reason: old.reason.clone().or(Some(
                    "started without the shim (LD_PRELOAD=libballast_shim.so)".into(),
                )),
            },
            Verdict::Pageable => Management {
                mode: Mode::Unmanaged,
                reason: Some("started without the shim, and it has no balloon device".into()),
            },
            Verdict::BalloonOnly(reason) => {
                Management { mode: Mode::BalloonOnly, reason: Some(reason) }
            }
            Verdict::Unmanaged(reason) => {
                Management { mode: Mode::Unmanaged, reason: Some(reason) }
            }
        };
        if management != old {
            match &management.reason {
                Some(reason) => tracing::warn!(vm = vm.name, "{:?}: {reason}", management.mode),
                None => tracing::info!(vm = vm.name, "{:?}", management.mode),
            }
            vm.set_management(management);
            self.kick.ring(format!("management of {} changed", vm.name));
        }
    }

    /// New parameters, all checked before any is applied.
    pub fn change_vm(
        &self,
        name: &str,
        change: &ballast_api::VmChange,
    ) -> Result<Arc<Vm>, Failure> {
        let vm = self.vm(name)?;
        let mut params = vm.params();
        if let Some(shares) = change.shares {
            if shares == 0 {
                return Err(Failure::bad("shares: 0 is not at least 1"));
            }
            params.shares = shares;
        }
        if let Some(tax) = change.tax {
            ballast_policy::TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?;
            params.tax = Some(tax);
        }
        if let Some(max) = change.max {
            params.max = Bytes(max).pages();
            if params.max > vm.size {
                return Err(Failure::bad(format!(
                    "max: {} is above the configured size of {name}, {}",
                    params.max, vm.size
                )));
            }
            if params.max.is_zero() {
                return Err(Failure::bad("max: below one page"));
            }
        }
        if let Some(min) = change.min {
            params.min = Bytes(min).pages_ceil();
        }
        if params.min > params.max {
            return Err(Failure::bad(format!(
                "min: {} is above max, {}",
                params.min, params.max
            )));
        }
        let old = vm.params();
        if params.min > old.min {
            // More is promised: the same check as for a start, for the difference. The swap that
            // was reserved is enough.
            let more = Promise { min: params.min - old.min, overhead: Pages(0), swap: Pages(0) };
            let key = format!("{name} (more min)");
            self.promise(&key, more)?;
            self.promise_settled(&key);
        }
        if params.min < old.min
            && let Some(paged) = &*vm.paged()
            && paged.swap_len() < vm.size.saturating_sub(params.min)
        {
            return Err(Failure::new(
                ErrorCode::Conflict,
                format!(
                    "min: {} needs {} of swap, {name} was started with {} reserved",
                    params.min,
                    vm.size.saturating_sub(params.min),
                    paged.swap_len()
                ),
            ));
        }
        vm.set_params(params);
        Record::update_params(&vm.folder, params);
        self.kick.ring(format!("parameters of {name} changed"));
        Ok(vm)
    }

    /// Ends a VM: the guest's own way for `grace`, then the VMM's.
    pub async fn stop_vm(self: &Arc<Self>, name: &str, grace: Duration) -> Result<VmView, Failure> {
        let vm = self.vm(name)?;
        let last = views::vm(self, &vm);
        vm.set_run_state(RunState::Stopping);
        if !grace.is_zero()
            && let Some(monitor) = vm.monitor()
        {
            let asked = monitor.system_powerdown().await;
            if asked.is_ok() {
                let _ = tokio::time::timeout(grace, vm.process.exited()).await;
            }
        }
        // SIGTERM would wait for as long as a vCPU waits in a page fault; SIGKILL does not.
        vm.process
            .kill()
            .map_err(|e| Failure::internal(format!("{name}: ending its VMM: {e}")))?;
        vm.process.exited().await;
        self.gone(&vm, None).await;
        Ok(VmView { state: RunState::Stopped, ..last })
    }

    /// Stops all VMs at once.
    pub async fn stop_all(self: &Arc<Self>) {
        let stops = self.vms().into_iter().map(|vm| {
            let manager = self.clone();
            tokio::spawn(async move { manager.stop_vm(&vm.name, Duration::ZERO).await })
        });
        for stop in stops.collect::<Vec<_>>() {
            if let Ok(Err(e)) = stop.await {
                tracing::error!("{e}");
            }
        }
    }

    /// Releases all that a VM had. Idempotent: the first caller does it.
    async fn gone(&self, vm: &Arc<Vm>, exit: Option<Exit>) {
        vm.set_run_state(RunState::Stopped);
        if let Some(exit) = exit {
            let log = last_log_line(&vm.folder.join("qemu.log"));
            tracing::info!(vm = vm.name, "{exit}{}", log.map_or(String::new(), |l| format!(": {l}")));
        }
        self.remove(vm);
        let owner = vm.clone();
        let released = tokio::task::spawn_blocking(move || owner.take_paged().map(PagedVm::release));
        if let Ok(None) = released.await {
            let external = vm.external.swap(0, Ordering::Relaxed);
            if external > 0 {
                self.host.ledger.release(Pages(external) + vm.overhead);
            }
        }
        vm.set_monitor(None);
        Record::remove(&vm.folder);
        let _ = std::fs::remove_file(vm.folder.join("qmp.sock"));
        self.kick.ring(format!("{} left", vm.name));
    }

    fn remove_files(&self, name: &str) {
        let folder = self.folder_of(name);
        Record::remove(&folder);
        let _ = std::fs::remove_file(folder.join("qmp.sock"));
        let _ = std::fs::remove_file(self.swap_path(name));
    }

    /// A shim that nobody announced: a VMM that somebody else started, libvirt for one. It is
    /// admitted with default parameters; `vm attach` gives it a QMP socket and others.
    pub(crate) fn adopt(self: &Arc<Self>, hello: &Hello, peer: Peer) -> Result<Expected, String> {
        let name = hello.vm.as_str().to_owned();
        if hello.reconnect {
            return Err(format!("this manager does not know '{name}'"));
        }
        let size = hello.ram_len.pages();
        let handle = self.runtime.clone();
        let params = VmParams {
            shares: VmParams::default_shares(size),
            min: Pages::ZERO,
            max: size,
            tax: None,
        };
        let overhead = pager_config(&self.config, 0).overhead(size);
        let need = Promise::of(params.min, size, overhead);
        handle.block_on(async {
            self.claim_name(&name, need).await.map_err(|e| e.to_string())?;
            let made = async {
                let process = ProcessHandle::open(peer.pid).map_err(|e| e.to_string())?;
                make_folder(&self.folder_of(&name)).map_err(|e| e.to_string())?;
                self.make_room(overhead).await.map_err(|e| e.to_string())?;
                Ok::<_, String>(process)
            };
            let process = made.await.inspect_err(|_| self.promise_settled(&name))?;
            let (answer, receiver) = std::sync::mpsc::channel();
            tokio::spawn(self.clone().adopted(name, receiver, process, size, params, overhead));
            Ok(Expected { pid: peer.pid, size, swap: need.swap, overhead, answer })
        })
    }

    async fn adopted(
        self: Arc<Self>,
        name: String,
        receiver: Receiver<Result<PagedVm, String>>,
        process: ProcessHandle,
        size: Pages,
        params: VmParams,
        overhead: Pages,
    ) {
        let paged = receive(receiver).await;
        self.promise_settled(&name);
        let Ok(Ok(paged)) = paged else {
            self.host.ledger.release(overhead);
            self.remove_files(&name);
            return;
        };
        let accel = AccelChoice::Tcg { why: "started by another".into() };
        let folder = self.folder_of(&name);
        Record::new(&name, None, params, size, overhead, process.pid(), &accel).save(&folder);
        let vm = self.admit(NewVm {
            id: self.next_id(),
            name,
            spec: None,
            folder,
            accel: "started by another".into(),
            size,
            overhead,
            params,
            process,
            management: Management { mode: Mode::Paged, reason: None },
            paged: Some(paged),
            control: BalloonControl::new(self.config.balloon),
            set: WorkingSet::new(self.config.sampling, size),
        });
        vm.set_run_state(RunState::Running);
    }
}

/// A folder of one VM, without the files that a former VM of that name may have left.
fn make_folder(folder: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    std::fs::create_dir_all(folder)
}

/// Waits for the shim's handshake without holding up a runtime thread.
pub(crate) async fn receive(
    answer: Receiver<Result<PagedVm, String>>,
) -> Result<Result<PagedVm, String>, Failure> {
    let received = tokio::task::spawn_blocking(move || answer.recv_timeout(START)).await;
    match received {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_)) => Err(Failure::internal(format!(
            "its shim did not come within {} s",
            START.as_secs()
        ))),
        Err(e) => Err(Failure::internal(e.to_string())),
    }
}

/// A VM's end, whoever caused it.
async fn watch_exit(manager: Arc<Manager>, vm: Arc<Vm>) {
    let exit = vm.process.exited().await;
    let asked = vm.run_state() == RunState::Stopping;
    manager.gone(&vm, Some(exit)).await;
    let again = vm.spec.as_ref().filter(|spec| {
        spec.on_reboot == RebootAction::Restart && vm.rebooting.load(Ordering::Relaxed) && !asked
    });
    if let Some(spec) = again {
        tracing::info!(vm = vm.name, "the guest rebooted: starting it again");
        // Boxed, since starting a VM spawns this very watch.
        let start: std::pin::Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(restart(manager.clone(), spec.clone()));
        if let Err(e) = start.await {
            tracing::error!(vm = vm.name, "not started again: {e}");
        }
    }
}

async fn restart(manager: Arc<Manager>, spec: VmSpec) -> Result<VmView, Failure> {
    manager.run_vm(spec).await
}

async fn look_again(manager: Arc<Manager>, vm: Arc<Vm>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(INSPECTION) => manager.look_at(&vm).await,
            _ = vm.process.exited() => return,
        }
    }
}
