//! Attaching to a VMM that runs already: as much of it is managed as it allows.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_api::{AttachSpec, ErrorCode, Management, Mode, VmChange, VmView};
use ballast_policy::{BalloonControl, Promise, TaxRate, WorkingSet};
use ballast_qemu::{AccelChoice, Monitor, ProcessHandle, Qmp, listener_pid, maps_memory, process};
use ballast_units::{Bytes, Pages, VM_NAME_RULE, good_vm_name};

use crate::lifecycle::{LARGEST, built_at};
use crate::limits;
use crate::looks::Past;
use crate::manager::{Failure, Manager, Pledge};
use crate::records::Record;
use crate::sync::lock;
use crate::views;
use crate::vm::{Asked, NewVm, Vm, VmParams};

const DEADLINE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(20);

impl Manager {
    /// Attaches by QMP. A VM whose shim is here already (somebody else started it, with the shim)
    /// gets its balloon by this; any other is balloon-only at best.
    ///
    /// # Errors
    /// What is asked for cannot be, nobody answers at that socket, the process or the name is another VM's, or what is to be
    /// guaranteed to it cannot be promised.
    pub async fn attach(self: &Arc<Self>, spec: AttachSpec) -> Result<VmView, Failure> {
        check_spec(&spec)?;
        let connect = |e: String| Failure::bad(format!("qmp: {}: {e}", spec.qmp.display()));
        let pid = listener_pid(&spec.qmp, DEADLINE).await.map_err(|e| connect(e.to_string()))?;
        // QEMU has one client: two at a time would wait for one another.
        let Some(_attaching) = Taken::take(&self.attaching, pid) else {
            let why = format!("qmp: process {pid} is being attached already");
            return Err(Failure::new(ErrorCode::Conflict, why));
        };
        self.known_as(&spec, pid)?;
        let qmp = Qmp::connect(&spec.qmp, DEADLINE).await.map_err(|e| connect(e.to_string()))?;
        if qmp.pid() != Some(pid) {
            return Err(connect(format!("another process than {pid} answers there by now")));
        }
        // Not before: QEMU greets once it has its memory, of which its shim, if it has one, has told by then.
        let Some(_taken) = self.take_in(pid).await else {
            let why = format!("qmp: process {pid} is being taken in by its shim");
            return Err(Failure::new(ErrorCode::Conflict, why));
        };
        let known = self.known_as(&spec, pid)?;
        let vm = match known {
            Some(vm) => {
                let change = VmChange {
                    shares: spec.shares,
                    min: (spec.min > 0).then_some(spec.min),
                    tax: spec.tax,
                    pool: spec.pool.clone(),
                    ..VmChange::default()
                };
                self.change_apart(&vm.name, change).await?;
                vm
            }
            None => {
                // Its name alone, until its size is known.
                let pledge =
                    Pledge { promise: promise_of(Pages::ZERO), pool: None, rebooted: None };
                self.take_name(&spec.name, pledge).await?;
                let attached = self.attach_stranger(&spec, pid, &qmp).await;
                self.promise_settled(&spec.name);
                attached?
            }
        };
        // Of one that was known, it may be another than it was.
        if let Err(e) = Record::update(&vm.folder, |record| record.qmp = absolute(&spec.qmp)) {
            tracing::warn!(vm = vm.name, "{e}: the next manager will not find its QMP");
        }
        self.connected(&vm, qmp).await;
        vm.has_started();
        Ok(views::vm(self, &vm))
    }

    /// The VM that is to be attached to, if it is one already.
    ///
    /// # Errors
    /// Conflict: the process or the name is another's, or its QMP is somebody's.
    fn known_as(&self, spec: &AttachSpec, pid: u32) -> Result<Option<Arc<Vm>>, Failure> {
        let conflict = |why: String| Err(Failure::new(ErrorCode::Conflict, why));
        let is_taken =
            |vm: &Arc<Vm>| vm.process.is(pid) && (vm.name != spec.name || vm.monitor().is_some());
        if let Some(vm) = self.vms().into_iter().find(is_taken) {
            return conflict(format!("qmp: process {pid} is managed already, as '{}'", vm.name));
        }
        if let Some(why) = self.waits_as(pid) {
            return conflict(format!("qmp: {why}"));
        }
        let known = self.find(&spec.name);
        if let Some(other) = known.as_ref().map(|vm| vm.process.pid()).filter(|&it| it != pid) {
            return conflict(format!(
                "name: '{}' runs already, as {other}; {pid} made this socket",
                spec.name
            ));
        }
        Ok(known)
    }

    /// The process, for this attachment alone; its shim, which may just have come, is let in first.
    async fn take_in(&self, pid: u32) -> Option<Taken<'_>> {
        let end = tokio::time::Instant::now() + DEADLINE;
        loop {
            let taken = Taken::take(&self.adopting, pid);
            if taken.is_some() || tokio::time::Instant::now() > end {
                return taken;
            }
            tokio::time::sleep(STEP).await;
        }
    }

    /// Makes a VM of a process that this manager does not know yet: what it says of itself, what it is promised, and what
    /// is written down of it. Its name is taken.
    ///
    /// # Errors
    /// As of `attach`, or the VMM or the host failed.
    async fn attach_stranger(
        self: &Arc<Self>,
        spec: &AttachSpec,
        pid: u32,
        qmp: &Qmp,
    ) -> Result<Arc<Vm>, Failure> {
        let internal = |e: String| Failure::internal(format!("{}: {e}", spec.name));
        let monitor =
            Monitor::new(qmp.clone(), DEADLINE).await.map_err(|e| internal(e.to_string()))?;
        let size = memory_size(&monitor).await.map_err(internal)?;
        check_vmm(pid, memory_piece(&monitor, size.bytes()).await.map_err(internal)?).await?;
        let params = self.params_for(spec, size)?;
        // What it has taken it has, whatever the budget; what is guaranteed beyond that is promised as to any other.
        let pledge =
            Pledge { promise: promise_of(params.min), pool: params.pool.clone(), rebooted: None };
        self.promise(&spec.name, pledge)?;
        let process = ProcessHandle::open(pid).map_err(|e| internal(e.to_string()))?;
        self.fresh_folder(&spec.name).await.map_err(|e| internal(e.to_string()))?;
        let record = stranger(spec, params, size, pid);
        if let Err(e) = record.save(&self.folder_of(&spec.name)) {
            self.remove_files(&spec.name).await;
            return Err(internal(e));
        }
        Ok(self.admit_stranger(record, process))
    }

    /// What one of this size gets.
    ///
    /// # Errors
    /// What is asked for it cannot be.
    fn params_for(&self, spec: &AttachSpec, size: Pages) -> Result<VmParams, Failure> {
        let min = Bytes(spec.min).pages_ceil();
        if min > size {
            return Err(Failure::bad(format!(
                "min: {min} is above the size of its memory, {size}"
            )));
        }
        let asked = Asked {
            shares: spec.shares,
            min: (spec.min > 0).then_some(min),
            max: None,
            tax: spec.tax,
            pool: spec.pool.clone().map(Some),
        };
        VmParams::resolve(&self.config().vms, &spec.name, size.into(), asked)
            .map_err(|e| Failure::bad(format!("{}: {e}", spec.name)))
    }

    /// It is there, whatever the budget: what it has taken counts from now on.
    fn admit_stranger(self: &Arc<Self>, record: Record, process: ProcessHandle) -> Arc<Vm> {
        let Record { name, accel, params, size, .. } = record;
        let external = process::rss(process.pid()).map_or(size, Bytes::pages_ceil).max(Pages(1));
        self.host.ledger.adopt(external);
        self.admit(NewVm {
            id: self.next_id(),
            folder: self.folder_of(&name),
            name,
            spec: None,
            accel,
            size,
            boot: size,
            plugged: Some(Pages::ZERO),
            overhead: Pages::ZERO,
            params,
            process,
            management: Management { mode: Mode::Unmanaged, reason: Some("not seen yet".into()) },
            past: Past::default(),
            external,
            vmm: Pages::ZERO,
            paged: None,
            control: BalloonControl::new(self.config().balloon),
            set: WorkingSet::new(self.config().sampling, size),
            built: built_at(None),
            seeks_qmp: true,
        })
    }
}

/// What is written down of one that somebody else started.
fn stranger(spec: &AttachSpec, params: VmParams, size: Pages, pid: u32) -> Record {
    let accel = AccelChoice::started_by_another();
    let record = Record::new(&spec.name, None, params, size, Pages::ZERO, pid, &accel);
    Record { qmp: absolute(&spec.qmp), ..record.unpaged("attached by QMP") }
}

/// What can be told wrong of a request before the VMM is asked anything.
fn check_spec(spec: &AttachSpec) -> Result<(), Failure> {
    if !good_vm_name(&spec.name) {
        return Err(Failure::bad(format!("name: '{}': {VM_NAME_RULE}", spec.name)));
    }
    if let Some(tax) = spec.tax {
        TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?;
    }
    spec.shares.map(limits::shares).transpose().map_err(|w| Failure::bad(limits::line(w)))?;
    if spec.min > LARGEST.0 {
        return Err(Failure::bad(format!("min: is above {LARGEST}")));
    }
    Ok(())
}

/// A process that is being attached, or taken in; by nobody else until this is dropped.
struct Taken<'a>(&'a Mutex<HashSet<u32>>, u32);

impl Taken<'_> {
    fn take(taken: &Mutex<HashSet<u32>>, pid: u32) -> Option<Taken<'_>> {
        let is_new = lock(taken).insert(pid);
        // Made only then: its end takes the process off the list.
        is_new.then(|| Taken(taken, pid))
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        lock(self.0).remove(&self.1);
    }
}

/// Of a VM that is not paged: no swap files, and no overhead of a pager's.
fn promise_of(min: Pages) -> Promise {
    Promise { min, overhead: Pages::ZERO, swap: Pages::ZERO }
}

fn absolute(path: &Path) -> Option<PathBuf> {
    std::path::absolute(path).ok()
}

async fn memory_size(monitor: &Monitor) -> Result<Pages, String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Summary {
        base_memory: u64,
    }
    let answer = monitor
        .qmp()
        .execute("query-memory-size-summary", serde_json::Value::Null, DEADLINE)
        .await
        .map_err(|e| e.to_string())?;
    let summary: Summary = serde_json::from_value(answer).map_err(|e| e.to_string())?;
    believed(Bytes(summary.base_memory))
}

/// The largest piece of a guest's memory, of `whole`: with NUMA nodes there are several, and DIMMs beside them may be larger.
async fn memory_piece(monitor: &Monitor, whole: Bytes) -> Result<Bytes, String> {
    let memdevs = monitor.memdevs().await.map_err(|e| e.to_string())?;
    let pieces = memdevs.iter().map(|memdev| Bytes(memdev.size)).filter(|&piece| piece <= whole);
    Ok(pieces.max().unwrap_or(whole))
}

/// Whose socket it is, the kernel says of who called listen(): that may be one who only handed it to QEMU, as libvirt does.
async fn check_vmm(pid: u32, memory: Bytes) -> Result<(), Failure> {
    if maps_memory(pid, memory).await != Some(false) {
        return Ok(());
    }
    let comm = process::comm(pid).unwrap_or_else(|| "?".into());
    Err(Failure::bad(format!(
        "qmp: process {pid} ({comm}) made this socket and does not have its guest's memory ({memory}): name one that QEMU made \
         itself (-qmp unix:PATH,server=on,wait=off)"
    )))
}

/// The size that a VMM says its guest has: one that a VM can have, or sums of sizes overflow.
fn believed(said: Bytes) -> Result<Pages, String> {
    match said.pages() {
        Pages::ZERO => Err("its QEMU says that it has no memory".to_owned()),
        _ if said > LARGEST => Err(format!("its QEMU says that it has {said}, above {LARGEST}")),
        size => Ok(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
    use tokio::net::UnixListener;

    /// Its memory is made between its socket and its greeting: whoever attaches meanwhile does not keep its shim out.
    #[tokio::test]
    async fn a_shim_that_comes_while_its_vmm_is_attached_to_is_let_in() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let qmp = dir.path().join("qmp.sock");
        let listener = UnixListener::bind(&qmp).unwrap();
        let pid = std::process::id();
        let attach = || {
            let (name, qmp, manager) = ("a".to_owned(), qmp.clone(), manager.clone());
            let spec = AttachSpec { name, qmp, min: 0, shares: None, tax: None, pool: None };
            tokio::spawn(async move { manager.attach(spec).await.unwrap_err() })
        };
        let attached = attach();
        // The first only looks whose socket it is.
        let _look = listener.accept().await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let second = attach().await.unwrap();
        assert!(second.message.contains("is being attached already"), "{second}");
        // Its shim comes, and is being taken in when it greets.
        assert!(lock(&manager.adopting).insert(pid), "kept out");
        let (words, mut answers) = stream.into_split();
        let mut words = BufReader::new(words).lines();
        answers.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n").await.unwrap();
        assert!(words.next_line().await.unwrap().unwrap().contains("qmp_capabilities"));
        answers.write_all(b"{\"return\": {}, \"id\": 1}\n").await.unwrap();
        tokio::time::sleep(STEP * 5).await;
        assert!(!attached.is_finished());
        // It is a VM of that name.
        let params = VmParams::resolve(&[], "b", Pages(4).into(), Asked::default()).unwrap();
        manager.insert(Vm::of_tests("b", dir.path().join("b"), Pages(4), params));
        lock(&manager.adopting).remove(&pid);
        let told = attached.await.unwrap();
        assert!(told.message.contains("is managed already, as 'b'"), "{told}");
        assert!(lock(&manager.attaching).is_empty() && lock(&manager.adopting).is_empty());
    }

    #[test]
    fn a_size_that_no_vm_has_is_not_believed() {
        assert_eq!(believed(Bytes::from_mib(64)), Ok(Pages::from_mib(64)));
        assert_eq!(believed(LARGEST), Ok(LARGEST.pages()));
        for (said, part) in
            [(0, "no memory"), (4095, "no memory"), (LARGEST.0 + 1, "above"), (u64::MAX, "above")]
        {
            let error = believed(Bytes(said)).unwrap_err();
            assert!(error.contains(part), "{said}: {error}");
        }
    }
}
