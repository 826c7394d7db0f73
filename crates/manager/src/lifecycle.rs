//! VMs come: admission, start, adoption of those that somebody else started (attachment is in `attach`, their end in `ending`).

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_api::{Accel, ErrorCode, Management, Mode, RunState, VmSpec, VmView};
use ballast_pager::service::{PagedVm, PagerConfig};
use ballast_policy::{BalloonControl, Promise, WorkingSet};
use ballast_qemu::{
    AccelChoice, Huge, Inspection, LaunchPaths, ProcessHandle, RamMapping, Verdict, Vmm,
    check_spec, command, counts_on_zeros, inspect_since, last_log_line, pinning_device,
    probe_accel_cached, ram_file, spawn, unasked_large_memfds,
};
use ballast_shim_proto::{Hello, Peer};
use ballast_units::{Bytes, Pages, VmId};

use crate::config::rules::rule_for;
use crate::looks::{Heard, Known, Past, is_taken_again, objection_of, of_both, unseen};
use crate::manager::{Failure, Manager, NotTaken, Pledge};
use crate::pace::{round_of, slot_after};
use crate::paging::{Answer, Expected, pager_config};
use crate::reach::greeted;
use crate::records::Record;
use crate::rooms::LOOK;
use crate::starts::Room;
use crate::survey::Unread;
use crate::sync::lock;
use crate::upgrade::since_boot_ms;
use crate::vm::{Asked, NewVm, Vm, VmParams};
use crate::{balloon_loop, ending, keeping, layout, looks_of_files, past, views};

/// Deadline of one QMP command: a QEMU that waits in a page fault answers when it is served.
pub(crate) const QMP_DEADLINE: Duration = Duration::from_secs(5);
/// No host has more; sums of such sizes do not overflow.
pub(crate) const LARGEST: Bytes = Bytes(1 << 46);
/// How long a VMM may take to map its RAM, and to open its QMP socket.
pub(crate) const START: Duration = Duration::from_secs(60);
/// How long a VMM that runs already waits for memory to be made free.
pub(crate) const ROOM: Duration = Duration::from_secs(15);
/// How long a shim that nobody announced waits for its answer, by which time it is to have one: it waits for 30 s.
const ANSWER: Duration = Duration::from_secs(25);
/// How often a VM is looked at again for things that forbid paging.
const INSPECTION: Duration = Duration::from_secs(30);
/// Looks, a second apart, at a VMM of which something was not found out at the first.
const SOON: u32 = 5;
/// How long a VMM may take, once it has mapped its RAM, to build its machine. One whose QMP answers has built it.
const BUILDING: Duration = Duration::from_secs(10);

impl Manager {
    /// Starts a VM: admission, VMM, pager, QMP. Answers when the guest runs.
    ///
    /// # Errors
    /// The spec, what it names, or its promise cannot be; no room within its time; or its VMM did not start. Nothing is left of it
    /// but its logs.
    pub async fn run_vm(self: &Arc<Self>, spec: VmSpec) -> Result<VmView, Failure> {
        self.run(spec, None).await
    }

    /// The same, also of a VM whose guest rebooted: `again`, for whom its name is held.
    pub(crate) async fn run(
        self: &Arc<Self>,
        mut spec: VmSpec,
        again: Option<VmId>,
    ) -> Result<VmView, Failure> {
        let checked = spec.clone();
        // One that ran waits for as long as it takes.
        looks_of_files::look(again.is_some(), move || check_spec(&checked))
            .await?
            .map_err(|e| Failure::bad(e.to_string()))?;
        refuse_relative(&spec)?;
        let overhead = spec.overhead.unwrap_or(0);
        let sizes = [("max", spec.max), ("hotplug", spec.hotplug), ("overhead", overhead)];
        for (what, size) in sizes {
            if size > LARGEST.0 {
                return Err(Failure::bad(format!("{}: {what} is above {LARGEST}", spec.name)));
            }
        }
        if let Some(wait) = spec.wait_s.filter(|wait| !(0.0..=86_400.0).contains(wait)) {
            return Err(Failure::bad(format!("wait_s: {wait} is not between 0 and 86400")));
        }
        // Whatever will be plugged, its pages have a place to go, and words, from the start.
        let boot = Bytes(spec.max).pages();
        let size = boot + Bytes(spec.hotplug).pages();
        let asked = Asked {
            shares: spec.shares,
            min: (spec.min > 0).then(|| Bytes(spec.min).pages_ceil()),
            max: None,
            tax: spec.tax,
            pool: spec.pool.clone().map(Some),
        };
        let params = VmParams::resolve(&self.config().vms, &spec.name, boot.into(), asked)
            .map_err(|e| Failure::bad(format!("{}: {e}", spec.name)))?;
        spec.guest_agent =
            spec.guest_agent.or(rule_for(&self.config().vms, &spec.name).guest_agent);
        // From here on among the parameters alone, where it can be changed.
        let params = VmParams { salt: spec.salt.take(), ..params };
        let large_pages = self.wants_large_pages(&spec);
        let pager = pager_config(&self.config(), large_pages);
        let overhead = pager.overhead(size) + Bytes(spec.overhead.unwrap_or(0)).pages_ceil();
        let vmm = self.expected_vmm(&spec);
        let mut promise = Promise::of(params.min, size, overhead + vmm);
        // One that was not paged before it rebooted was promised more than its min.
        promise.min = promise.min.max(self.held_for(&spec.name, again));
        let pledge = Pledge { promise, pool: params.pool.clone(), rebooted: again };
        self.claim_name(&spec.name, pledge.clone()).await?;
        let name = spec.name.clone();
        let result =
            self.start_promised(spec, size, params, (pager, overhead, vmm), again.is_some()).await;
        match again {
            // It may be tried once more.
            Some(_) if result.is_err() => self.promise_held(&name, pledge),
            _ => self.promise_settled(&name),
        }
        let vm = result?;
        Ok(views::vm(self, &vm))
    }

    /// What was promised beside its overhead to a VM that rebooted, and is held for its next start.
    fn held_for(&self, name: &str, again: Option<VmId>) -> Pages {
        let starting = lock(&self.starting);
        let held = starting.get(name).filter(|pledge| again.is_some() && pledge.rebooted == again);
        held.map_or(Pages::ZERO, |pledge| pledge.promise.min)
    }

    /// A name that nobody has, and a promise that can be kept.
    async fn claim_name(&self, name: &str, need: Pledge) -> Result<(), NotTaken> {
        self.take(name, need, true).await
    }

    /// The name alone, for a VM that runs already.
    ///
    /// # Errors
    /// Conflict: somebody has it, or may have, or the manager is ending.
    pub(crate) async fn take_name(&self, name: &str, has: Pledge) -> Result<(), Failure> {
        Ok(self.take(name, has, false).await?)
    }

    async fn take(&self, name: &str, need: Pledge, admission: bool) -> Result<(), NotTaken> {
        if admission {
            // Before it is anybody's turn: nobody else waits for that.
            self.wait_for_swap(name, need.promise.swap).await;
        }
        let _one = self.admission.lock().await;
        if self.is_closed_to(need.rebooted.is_some()) {
            return Err(NotTaken::Ending);
        }
        if let Some(why) = self.remains_of(name) {
            return Err(Failure::new(ErrorCode::Conflict, why).into());
        }
        let held = lock(&self.starting).get(name).map(|pledge| pledge.rebooted);
        let why = match held {
            _ if self.find(name).is_some() => Some("runs already"),
            // Held for this very start.
            Some(of) if of.is_some() && of == need.rebooted => None,
            Some(Some(_)) => Some("is about to be started again, for its guest rebooted"),
            Some(None) => Some("is being started"),
            None => None,
        };
        if let Some(why) = why {
            let why = format!("a VM named '{name}' {why}");
            return Err(Failure::new(ErrorCode::Conflict, why).into());
        }
        let need = Pledge { rebooted: None, ..need };
        if admission {
            return Ok(self.promise(name, need)?);
        }
        lock(&self.starting).insert(name.to_owned(), need);
        Ok(())
    }

    /// What keeps a name from being anybody's, though no VM of it is known: something of a former one is there.
    pub(crate) fn remains_of(&self, name: &str) -> Option<String> {
        if lock(&self.clearing).contains(name) {
            return Some(format!("files of a former VM named '{name}' are being removed"));
        }
        let mut unread = lock(&self.unread);
        let Unread { folder, why, may_run, .. } = unread.get(name)?;
        // It was removed, as the log says.
        if matches!(folder.try_exists(), Ok(false)) {
            unread.remove(name);
            return None;
        }
        Some(match may_run {
            true => format!("a VM named '{name}' may run already: {why}"),
            false => format!("what would be its folder is there already: {why}"),
        })
    }

    /// What one that has just ended had on a disk is seen to be free by the next look: that is waited for.
    async fn wait_for_swap(&self, name: &str, need: Pages) {
        let end = tokio::time::Instant::now() + LOOK * 2;
        while self.is_short_of_swap(name, need) && tokio::time::Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn start_promised(
        self: &Arc<Self>,
        spec: VmSpec,
        size: Pages,
        params: VmParams,
        (pager, overhead, vmm_memory): (PagerConfig, Pages, Pages),
        again: bool,
    ) -> Result<Arc<Vm>, Failure> {
        let accel = self.choose_accel(&spec).await?;
        let wait = spec.wait_s.map_or(self.config().start_wait, Duration::from_secs_f64);
        let wait = (!again).then_some(wait);
        let promise = Promise::of(params.min, size, overhead + vmm_memory);
        // One that rebooted may have been promised less than its min.
        let promise = lock(&self.starting).get(&spec.name).map_or(promise, |pledge| pledge.promise);
        self.wait_for_room(&spec.name, (size, &params), promise, wait).await?;
        // Until the pager has it, the overhead is ours to give back.
        let started = self.start_vmm(&spec, &accel, size, params.clone(), (pager, overhead)).await;
        let (vmm, paged, paths) = match started {
            Ok(parts) => parts,
            Err(e) => {
                self.host.ledger.release(overhead + vmm_memory);
                self.remove_files(&spec.name).await;
                return Err(e);
            }
        };
        let (management, paged, external) = match paged {
            Ok(paged) => (Management { mode: Mode::Paged, reason: None }, Some(paged), Pages::ZERO),
            Err(reason) => {
                // Its whole process is booked, this included.
                self.host.ledger.release(vmm_memory);
                let booked = self.book_unpaged(&spec, &vmm, overhead, &reason).await?;
                (Management { mode: Mode::BalloonOnly, reason: Some(reason) }, None, booked)
            }
        };
        let folder = paths.run_dir.clone();
        let boot = Bytes(spec.max).pages();
        let vm = self.admit(NewVm {
            id: self.next_id(),
            name: spec.name.clone(),
            spec: Some(spec),
            folder,
            accel: accel.to_string(),
            size,
            boot,
            plugged: Some(Pages::ZERO),
            overhead,
            params,
            process: vmm.process.clone(),
            management,
            past: Past::default(),
            external,
            vmm: if paged.is_some() { vmm_memory } else { Pages::ZERO },
            paged,
            control: BalloonControl::new(self.config().balloon),
            set: WorkingSet::new(self.config().sampling, size),
            built: built_at(None),
            seeks_qmp: true,
        });
        self.connect_started(&vm, &vmm, &paths).await?;
        if !again {
            self.admit_unfit(&vm).await?;
        }
        vm.has_started();
        Ok(vm)
    }

    /// The QMP connection of a VM that was started and admitted. Where there is none, or the VM ends at once, it is
    /// gone.
    async fn connect_started(
        self: &Arc<Self>,
        vm: &Arc<Vm>,
        vmm: &Vmm,
        paths: &LaunchPaths,
    ) -> Result<(), Failure> {
        let qmp = match greeted(vm, vmm, &paths.qmp_socket).await {
            Ok(qmp) => qmp,
            Err(e) => {
                // A socket that broke may be the first that is seen of its end. If it does not end by
                // itself, it cannot be managed.
                let _ = tokio::time::timeout(QMP_DEADLINE, vm.process.exited()).await;
                let _ = vm.process.kill();
                self.ended_at_once(vm, vm.process.exited().await).await;
                let last =
                    last_log_line(&paths.qemu_log).map_or(String::new(), |l| format!(": {l}"));
                self.gone(vm).await;
                return Err(Failure::internal(format!("{}: {e}{last}{}", vm.name, logs_of(paths))));
            }
        };
        self.connected(vm, qmp).await;
        if vm.run_state() == RunState::Stopped || !vm.process.is_alive() {
            let last = last_log_line(&paths.qemu_log).unwrap_or_else(|| "it said nothing".into());
            self.ended_at_once(vm, vm.process.exited().await).await;
            self.gone(vm).await;
            let logs = logs_of(paths);
            return Err(Failure::internal(format!(
                "{}: QEMU ended at once: {last}{logs}",
                vm.name
            )));
        }
        Ok(())
    }

    async fn choose_accel(&self, spec: &VmSpec) -> Result<AccelChoice, Failure> {
        let choice = match spec.accel {
            Accel::Tcg => AccelChoice::Tcg { why: "asked for".into() },
            Accel::Kvm => AccelChoice::Kvm,
            Accel::Auto => {
                let qemu = spec.qemu.clone().unwrap_or_else(|| "qemu-system-x86_64".into());
                let cache = self.config().run_dir.join(layout::ACCEL);
                probe_accel_cached(&cache, &qemu, Some(&spec.kernel)).await
            }
        };
        *lock(&self.accel) = choice.to_string();
        Ok(choice)
    }

    /// The VMM process, and its RAM in the pager's hands or the reason why not.
    async fn start_vmm(
        self: &Arc<Self>,
        spec: &VmSpec,
        accel: &AccelChoice,
        size: Pages,
        params: VmParams,
        (pager, overhead): (PagerConfig, Pages),
    ) -> Result<(Vmm, Result<PagedVm, String>, LaunchPaths), Failure> {
        let name = &spec.name;
        let mut paths = self.paths(name);
        // Open until QEMU has mapped them; then they live as long as QEMU has.
        let boot = Bytes(spec.max).pages();
        let sizes = parts_of(boot, size);
        let files: Vec<Option<OwnedFd>> =
            sizes.iter().map(|&size| own_ram_file(name, size, pager.large_pages)).collect();
        let path = |file: &Option<OwnedFd>| {
            let fd = file.as_ref()?.as_raw_fd();
            Some(format!("/proc/{}/fd/{fd}", std::process::id()).into())
        };
        paths.ram = files.first().and_then(path);
        paths.hotplug = files.get(1).and_then(path);
        self.fresh_folder(name).await.map_err(|e| Failure::internal(format!("{name}: {e}")))?;
        let vmm = spawn(&command(spec, accel, &paths))
            .await
            .map_err(|e| Failure::internal(format!("{name}: {e}")))?;
        let swap = size.saturating_sub(params.min);
        // Before its shim is let in: a manager that dies in between must find it.
        let domain = self.commons.domain_name(name, params.salt.as_ref());
        let record = Record::new(name, Some(spec), params, size, overhead, vmm.pid, accel);
        let shim = Hello::version_for(parts_of(boot, size).len());
        let record = record.begun_with(boot).in_domain(&domain).with_shim(shim);
        if let Err(e) = record.save(&paths.run_dir) {
            let _ = vmm.process.kill();
            vmm.process.exited().await;
            return Err(Failure::internal(format!("{name}: {e}")));
        }
        let pid = vmm.pid;
        let answer = self.expect_shim(name, |answer| Expected {
            pid,
            sizes,
            swap,
            overhead,
            domain,
            pager,
            held: None,
            answer,
        });
        let paged = self.answer_in_time(name, &vmm, &paths, answer).await?;
        Ok((vmm, paged, paths))
    }

    /// Waits for the shim of a VMM that was started: the paged VM, or the refusal. If neither comes in time, the VMM
    /// is ended.
    async fn answer_in_time(
        &self,
        name: &str,
        vmm: &Vmm,
        paths: &LaunchPaths,
        mut answer: Answer,
    ) -> Result<Result<PagedVm, String>, Failure> {
        let (failed, answered) = tokio::select! {
            paged = &mut answer => match paged {
                Ok(paged) => return Ok(paged),
                Err(_) => (format!("{name}: its shim's handshake was broken off"), true),
            },
            () = tokio::time::sleep(START) => {
                (format!("{name}: its shim did not come within {} s", START.as_secs()), false)
            }
            exit = vmm.process.exited() => {
                let last = last_log_line(&paths.qemu_log).unwrap_or_else(|| "it said nothing".into());
                (format!("{name}: QEMU {exit} before it had mapped its RAM: {last}"), false)
            }
        };
        let _ = vmm.process.kill();
        vmm.process.exited().await;
        // If the handshake ended well, the VM is released as any other whose VMM ended.
        let paged = if answered { None } else { self.last_answer(name, &mut answer).await };
        paged.map(Ok).ok_or_else(|| Failure::internal(failed))
    }

    pub(crate) fn paths(&self, name: &str) -> LaunchPaths {
        let run_dir = self.folder_of(name);
        LaunchPaths {
            shim: self.config().shim.clone(),
            ram: None,
            hotplug: None,
            shim_socket: self.config().run_dir.join(layout::SHIM_SOCKET),
            qmp_socket: run_dir.join(layout::QMP_SOCKET),
            agent_socket: run_dir.join(layout::AGENT_SOCKET),
            console: run_dir.join(layout::CONSOLE),
            qemu_log: run_dir.join(layout::QEMU_LOG),
            run_dir,
        }
    }

    /// Puts a VM among the managed ones and watches over it.
    pub(crate) fn admit(self: &Arc<Self>, new: NewVm) -> Arc<Vm> {
        let vm = Arc::new(Vm::new(new));
        self.insert(vm.clone());
        tokio::spawn(ending::watch_exit(self.clone(), vm.clone()));
        tokio::spawn(look_again(self.clone(), vm.clone()));
        let (manager, late) = (self.clone(), vm.clone());
        tokio::task::spawn_blocking(move || manager.catch_up(&late));
        vm
    }

    /// Whether the VM may be paged; one that may not any more keeps its pages, and gets all it
    /// asks for, but nothing is taken from it by eviction.
    pub(crate) async fn look_at(&self, vm: &Vm) {
        self.look_at_since(Instant::now(), vm).await;
    }

    /// The same; what other processes have may have been found out at `since`.
    async fn look_at_since(&self, since: Instant, vm: &Vm) {
        // One after the other: what one has found is not lifted by one that had begun before.
        let mut past = vm.looks.lock().await;
        let ram = ram_of(vm);
        let mapped = ram.as_deref().unwrap_or_default();
        let monitor = vm.monitor();
        // Before the look: what it does not find may come while the machine is built.
        let is_built =
            monitor.is_some() || vm.inspected.load(Ordering::Relaxed) || Instant::now() >= vm.built;
        let qmp = monitor.as_ref().map(|m| m.qmp().clone());
        let pid = vm.process.pid();
        let Inspection { verdict: first, told, mapped: seen, silent } =
            inspect_since(since, pid, qmp.as_ref(), mapped).await;
        let old = vm.management();
        let is_unsure = matches!(first, Verdict::Unknown(_));
        let is_inspected = vm.inspected.load(Ordering::Relaxed);
        let again = silent && is_taken_again(old.mode, is_inspected);
        let second = if again && ram.is_some() {
            Some(inspect_since(since, pid, None, mapped).await.verdict)
        } else {
            None
        };
        let heard = match &qmp {
            None => Heard::Nobody,
            Some(_) if is_unsure => Heard::InVain,
            Some(_) => Heard::Told,
        };
        let verdict = of_both(first, second);
        if self.is_left(vm) {
            return;
        }
        if ram.is_some() {
            past::note_mapped(vm, &mut past, seen);
        }
        if let (Verdict::Unknown(reason), Mode::Paged | Mode::BalloonOnly) = (&verdict, old.mode) {
            tracing::warn!(vm = vm.name, "{reason}; it stays {}, and is looked at again", old.mode);
        }
        let known = Known {
            paged: ram.is_some(),
            is_built,
            has_balloon: balloon_loop::has_one(vm, monitor.as_ref()),
            started_here: vm.spec.is_some(),
            qmp: heard,
        };
        let is_beyond_reach = known.is_beyond_reach(&verdict);
        let found = keeping::managed_and_kept(vm, verdict, &old, &mut past, known).await;
        let Some(management) = found else { return };
        // That may have taken its time.
        if self.is_left(vm) {
            return;
        }
        vm.was_looked_at(management.clone(), is_built);
        if heard == Heard::Told && ram.is_some() {
            past::note_objection(vm, &mut past, told.and_then(objection_of));
        }
        vm.is_beyond_reach.store(is_beyond_reach, Ordering::Relaxed);
        if management != old {
            self.is_managed_as(vm, &management);
        }
    }

    /// It has ended, or is left to the next manager: nothing is to be noted of it.
    fn is_left(&self, vm: &Vm) -> bool {
        vm.run_state() == RunState::Stopped || !vm.process.is_alive() || self.is_stopping()
    }

    fn is_managed_as(&self, vm: &Vm, management: &Management) {
        match &management.reason {
            Some(reason) => tracing::warn!(vm = vm.name, "{:?}: {reason}", management.mode),
            None => tracing::info!(vm = vm.name, "{:?}", management.mode),
        }
        self.kick.ring(format!("management of {} changed", vm.name));
    }

    /// A shim that nobody announced: a VMM that somebody else started, libvirt for one. It is
    /// admitted with default parameters; `vm attach` gives it a QMP socket and others. It waits for its answer `since` then.
    ///
    /// # Errors
    /// This manager ends, or why not in one line: its process is known already, its RAM cannot be paged, its name is taken, or there is no room.
    /// Nothing is left of it.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        hello: &Hello,
        peer: Peer,
        since: Instant,
    ) -> Result<Expected, NotTaken> {
        // A VMM has one guest: more names would be more memory than it is entitled to.
        if let Some(vm) = self.vms().into_iter().find(|vm| vm.process.is(peer.pid)) {
            return Err(format!("process {} is managed already, as '{}'", peer.pid, vm.name).into());
        }
        if let Some(why) = self.waits_as(peer.pid) {
            return Err(why.into());
        }
        if let Some((name, _)) = lock(&self.expected).iter().find(|(_, e)| e.pid == peer.pid) {
            return Err(format!("process {} is expected, as '{name}'", peer.pid).into());
        }
        if !lock(&self.adopting).insert(peer.pid) {
            return Err(format!("process {} is being taken in already", peer.pid).into());
        }
        let adopted = self.adopt_new(hello, peer, since);
        if adopted.is_err() {
            lock(&self.adopting).remove(&peer.pid);
        }
        adopted
    }

    /// How much memory a newcomer has, if that may be.
    fn size_of_newcomer(&self, hello: &Hello) -> Result<Pages, String> {
        if let parts @ 2.. = hello.parts.len() {
            return Err(format!(
                "its RAM has {parts} parts, and only one that Ballast started may"
            ));
        }
        let size = hello.ram_len().pages();
        if size.is_zero() {
            return Err("its RAM is empty".to_owned());
        }
        if hello.ram_len() > LARGEST {
            return Err(format!("its RAM, {}, is above {LARGEST}", hello.ram_len()));
        }
        if let Some(most) = self.config().adopt_max.filter(|most| hello.ram_len() > *most) {
            return Err(format!("its RAM, {}, is above adopt.max, {most}", hello.ram_len()));
        }
        Ok(size)
    }

    fn adopt_new(
        self: &Arc<Self>,
        hello: &Hello,
        peer: Peer,
        since: Instant,
    ) -> Result<Expected, NotTaken> {
        let name = hello.vm.as_str().to_owned();
        let users = rule_for(&self.config().vms, &name).users;
        if users.is_some_and(|users| !users.contains(&peer.uid)) {
            let why = format!("'{name}' is not for user {} (users of [[vm]])", peer.uid);
            return Err(why.into());
        }
        let size = self.size_of_newcomer(hello)?;
        let handle = self.runtime.clone();
        let params = VmParams::resolve(&self.config().vms, &name, size.into(), Asked::default())?;
        let pager = pager_config(&self.config(), false);
        let overhead = pager.overhead(size);
        let need = Promise::of(params.min, size, overhead);
        let pledge = Pledge { promise: need, pool: params.pool.clone(), rebooted: None };
        handle.block_on(async {
            // One that keeps who looks waiting is not taken in: it could not be looked at later.
            if let Some(device) = pinning_device(peer.pid).await? {
                let why = format!("{device}: the kernel pins no pages that Ballast is to supply");
                return Err(why.into());
            }
            self.claim_name(&name, pledge).await?;
            let process = ProcessHandle::open(peer.pid)
                .map_err(|e| e.to_string())
                .inspect_err(|_| self.promise_settled(&name))?;
            let made = async {
                self.fresh_folder(&name).await.map_err(|e| e.to_string())?;
                let room = ANSWER.saturating_sub(since.elapsed()).min(ROOM);
                let what = Room { name: &name, need: overhead, unpaged: false };
                self.make_room(what, room).await.map_err(|e| e.to_string())
            };
            if let Err(why) = made.await {
                self.remove_files(&name).await;
                self.promise_settled(&name);
                return Err(why.into());
            }
            let accel = AccelChoice::started_by_another();
            let domain = self.commons.domain_name(&name, None);
            let record = Record::new(&name, None, params.clone(), size, overhead, peer.pid, &accel);
            let record = record.in_domain(&domain).with_shim(hello.version);
            if let Err(e) = record.save(&self.folder_of(&name)) {
                self.host.ledger.release(overhead);
                self.remove_files(&name).await;
                self.promise_settled(&name);
                return Err(e.into());
            }
            let (answer, receiver) = tokio::sync::oneshot::channel();
            tokio::spawn(self.clone().adopted(name, receiver, process, size, params, overhead));
            Ok(Expected {
                pid: peer.pid,
                sizes: vec![size],
                swap: need.swap,
                overhead,
                domain,
                pager,
                held: None,
                answer,
            })
        })
    }

    async fn adopted(
        self: Arc<Self>,
        name: String,
        receiver: Answer,
        process: ProcessHandle,
        size: Pages,
        params: VmParams,
        overhead: Pages,
    ) {
        let Ok(Ok(paged)) = receiver.await else {
            self.host.ledger.release(overhead);
            self.remove_files(&name).await;
            self.commons.sweep();
            self.promise_settled(&name);
            lock(&self.adopting).remove(&process.pid());
            return;
        };
        let folder = self.folder_of(&name);
        let vm = self.admit(NewVm {
            id: self.next_id(),
            name,
            spec: None,
            folder,
            accel: AccelChoice::started_by_another().to_string(),
            size,
            boot: size,
            plugged: Some(Pages::ZERO),
            overhead,
            params,
            process,
            management: unseen("its VMM may still be building its machine"),
            past: Past::default(),
            external: Pages::ZERO,
            vmm: Pages::ZERO,
            paged: Some(paged),
            control: BalloonControl::new(self.config().balloon),
            set: WorkingSet::new(self.config().sampling, size),
            built: built_at(None),
            seeks_qmp: false,
        });
        self.promise_settled(&vm.name);
        lock(&self.adopting).remove(&vm.process.pid());
        self.look_at(&vm).await;
        vm.has_started();
    }
}

/// The sizes of the parts of a RAM that begins with `boot` and may become `size`.
pub(crate) fn parts_of(boot: Pages, size: Pages) -> Vec<Pages> {
    if boot == size { vec![size] } else { vec![boot, size.saturating_sub(boot)] }
}

/// Where what a VM and its QEMU said is kept.
fn logs_of(paths: &LaunchPaths) -> String {
    format!(" (its logs: {})", paths.run_dir.display())
}

/// A file for a VM's RAM, where a memfd of QEMU's own will not do: for large pages, and where the host makes large
/// pages of memfds unasked. None: a memfd must do.
fn own_ram_file(name: &str, size: Pages, large_pages: bool) -> Option<OwnedFd> {
    if !large_pages && !unasked_large_memfds() {
        return None;
    }
    let huge = if large_pages { Huge::Advise } else { Huge::Never };
    ram_file(size.bytes(), huge)
        .inspect_err(|e| tracing::warn!(vm = name, "no tmpfs of its own for its RAM: {e}"))
        .ok()
}

/// QEMU's working folder is not the manager's, nor is either of them the client's.
fn refuse_relative(spec: &VmSpec) -> Result<(), Failure> {
    let qemu = spec.qemu.as_deref().filter(|q| q.components().count() > 1);
    let paths = [
        ("kernel", Some(spec.kernel.as_path())),
        ("initrd", spec.initrd.as_deref()),
        ("console", spec.console.as_deref()),
        ("qemu", qemu),
    ];
    for (what, path) in paths {
        if let Some(path) = path.filter(|path| path.is_relative()) {
            return Err(Failure::bad(format!(
                "{}: {what} {} is not an absolute path",
                spec.name,
                path.display()
            )));
        }
    }
    Ok(())
}

/// From when on a VMM without QMP counts as having built its machine: devices that pin its guest's memory, and memory
/// that it locks, come after the RAM.
pub(crate) fn built_at(mapped_ms: Option<u64>) -> Instant {
    let now = since_boot_ms();
    let age = Duration::from_millis(now.saturating_sub(mapped_ms.unwrap_or(now)));
    Instant::now() + BUILDING.saturating_sub(age)
}

/// Where the pager has its RAM. None: it has no pager, or its files cannot be looked at.
fn ram_of(vm: &Vm) -> Option<Vec<RamMapping>> {
    let paged = vm.paged();
    let parts = paged.as_ref()?.memory().backend().parts();
    parts.map(|(part, file)| RamMapping::of_file(file, part.base, part.len.bytes()).ok()).collect()
}

/// Until that is known it shares nothing. A process whose command line cannot be read is asked again in each round.
async fn learn_of_zeros(vm: &Vm) {
    if vm.counts_on_zeros.get().is_none()
        && let Some(counts) = counts_on_zeros(vm.process.pid()).await
    {
        // Nobody else asks.
        let _ = vm.counts_on_zeros.set(counts);
    }
}

/// All VMs are looked at in the same rounds: what is known of the host's other processes is found out once
/// for all of them.
async fn look_again(manager: Arc<Manager>, vm: Arc<Vm>) {
    learn_of_zeros(&vm).await;
    tokio::select! {
        () = tokio::time::sleep_until(vm.built.into()) => {}
        _ = vm.process.exited() => return,
    }
    for _ in 0..SOON {
        if vm.inspected.load(Ordering::Relaxed) {
            break;
        }
        manager.look_at(&vm).await;
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            _ = vm.process.exited() => return,
        }
    }
    loop {
        let next = slot_after(manager.started.elapsed(), INSPECTION, vm.id.0);
        tokio::select! {
            () = tokio::time::sleep_until((manager.started + next).into()) => {}
            _ = vm.process.exited() => return,
        }
        learn_of_zeros(&vm).await;
        let round = round_of(manager.started.elapsed(), INSPECTION, Duration::ZERO);
        manager.look_at_since(manager.started + round, &vm).await;
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
