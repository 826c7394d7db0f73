//! Attaching to a VMM that runs already: as much of it is managed as it allows.

use std::sync::Arc;
use std::time::Duration;

use ballast_api::{AttachSpec, ErrorCode, Management, Mode, VmChange, VmView, good_vm_name};
use ballast_policy::{BalloonControl, Promise, TaxRate, WorkingSet};
use ballast_qemu::{Monitor, ProcessHandle, Qmp, listener_pid, process};
use ballast_units::{Bytes, PAGE_SIZE, Pages};

use crate::manager::{Failure, Manager, Pledge, check_pool};
use crate::views;
use crate::vm::{Asked, NewVm, Vm, VmParams};

const DEADLINE: Duration = Duration::from_secs(10);

impl Manager {
    /// Attaches by QMP. A VM whose shim is here already (somebody else started it, with the shim)
    /// gets its balloon by this; any other is balloon-only at best.
    pub async fn attach(self: &Arc<Self>, spec: AttachSpec) -> Result<VmView, Failure> {
        if !good_vm_name(&spec.name) {
            return Err(Failure::bad(format!(
                "name: '{}' is not 1 to 64 of A-Za-z0-9._-, beginning with a letter or digit",
                spec.name
            )));
        }
        if let Some(tax) = spec.tax {
            TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?;
        }
        if spec.shares == Some(0) {
            return Err(Failure::bad("shares: 0 is not at least 1"));
        }
        if !spec.min.is_multiple_of(PAGE_SIZE as u64) {
            return Err(Failure::bad(format!("min: {} is not a multiple of 4 KiB", spec.min)));
        }
        let connect = |e: String| Failure::bad(format!("qmp: {}: {e}", spec.qmp.display()));
        let pid = listener_pid(&spec.qmp, DEADLINE).await.map_err(|e| connect(e.to_string()))?;
        if let Some(vm) = self
            .vms()
            .into_iter()
            .find(|vm| vm.process.pid() == pid && (vm.name != spec.name || vm.monitor().is_some()))
        {
            return Err(Failure::new(
                ErrorCode::Conflict,
                format!("qmp: process {pid} is managed already, as '{}'", vm.name),
            ));
        }
        let known = self.vm(&spec.name).ok();
        if known.as_ref().is_some_and(|vm| vm.process.pid() != pid) {
            return Err(Failure::new(
                ErrorCode::Conflict,
                format!("name: a VM named '{}' runs already", spec.name),
            ));
        }
        let qmp = Qmp::connect(&spec.qmp, DEADLINE).await.map_err(|e| connect(e.to_string()))?;
        let vm = match known {
            Some(vm) => {
                self.change_vm(
                    &vm.name,
                    &VmChange {
                        shares: spec.shares,
                        min: (spec.min > 0).then_some(spec.min),
                        tax: spec.tax,
                        pool: spec.pool.clone(),
                        ..VmChange::default()
                    },
                )?;
                vm
            }
            None => {
                // Nothing is promised to it beyond what it has taken already.
                let nothing = Promise { min: Pages(0), overhead: Pages(0), swap: Pages(0) };
                check_pool(&self.pools.rules(), spec.pool.as_deref())?;
                let nothing = Pledge { promise: nothing, pool: None };
                self.take_name(&spec.name, nothing).await?;
                let attached = self.attach_stranger(&spec, pid, &qmp).await;
                self.promise_settled(&spec.name);
                attached?
            }
        };
        self.connected(&vm, qmp).await;
        vm.has_started();
        Ok(views::vm(self, &vm))
    }

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
        if Bytes(spec.min).pages() > size {
            return Err(Failure::bad(format!(
                "min: {} is above the size of its memory, {size}",
                Bytes(spec.min)
            )));
        }
        let asked = Asked {
            shares: spec.shares,
            min: (spec.min > 0).then(|| Bytes(spec.min).pages()),
            max: None,
            tax: spec.tax,
            pool: spec.pool.clone().map(Some),
        };
        let params = VmParams::resolve(&self.config().vms, &spec.name, size, asked)
            .map_err(|e| Failure::bad(format!("{}: {e}", spec.name)))?;
        let handle = ProcessHandle::open(pid).map_err(|e| internal(e.to_string()))?;
        let folder = self.folder_of(&spec.name);
        std::fs::create_dir_all(&folder).map_err(|e| internal(e.to_string()))?;
        // It is there, whatever the budget: what it has taken counts from now on.
        let external = process::rss(pid).map_or(size, Bytes::pages_ceil).max(Pages(1));
        self.host.ledger.adopt(external);
        Ok(self.admit(NewVm {
            id: self.next_id(),
            name: spec.name.clone(),
            spec: None,
            folder,
            accel: "started by another".into(),
            size,
            overhead: Pages::ZERO,
            params,
            process: handle,
            management: Management { mode: Mode::Unmanaged, reason: Some("not seen yet".into()) },
            external,
            vmm: Pages::ZERO,
            paged: None,
            control: BalloonControl::new(self.config().balloon),
            set: WorkingSet::new(self.config().sampling, size),
        }))
    }
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
    Ok(Bytes(summary.base_memory).pages())
}
