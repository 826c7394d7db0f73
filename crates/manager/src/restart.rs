//! Coming back: VMs that a former manager left running are taken over; what remains of VMs that are
//! gone is cleared away.

use std::sync::Arc;

use ballast_api::{Management, Mode, RunState};
use ballast_pager::service::PagedVm;
use ballast_policy::{BalloonControl, WorkingSet};
use ballast_qemu::{ProcessHandle, Qmp};
use ballast_units::Pages;

use crate::lifecycle::receive;
use crate::manager::Manager;
use crate::records::Record;
use crate::vm::NewVm;

/// The VMs that wait for a manager, announced so that their shims are let in. Call before shims are
/// accepted.
pub fn announce(manager: &Arc<Manager>) -> anyhow::Result<Vec<Waiting>> {
    let mut waiting = Vec::new();
    let folders = match std::fs::read_dir(manager.config.run_dir.join("vms")) {
        Ok(folders) => folders,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(waiting),
        Err(e) => return Err(e.into()),
    };
    for entry in folders {
        let folder = entry?.path();
        // A record that cannot be read may be a newer manager's VM: that one must not be touched.
        let Some(record) = Record::load(&folder).map_err(anyhow::Error::msg)? else { continue };
        if !record.is_alive() {
            tracing::info!(vm = record.name, "ended while no manager ran");
            for path in [
                folder.join("pmap"),
                folder.join("stage"),
                folder.join("qmp.sock"),
                manager.swap_path(&record.name),
            ] {
                let _ = std::fs::remove_file(path);
            }
            Record::remove(&folder);
            continue;
        }
        let process = ProcessHandle::open(record.pid)?;
        let (size, overhead) = (record.size, record.overhead);
        let answer = manager.expect_shim(&record.name, record.pid, size, Pages(0), overhead);
        manager.host.ledger.adopt(overhead);
        waiting.push(Waiting { record, process, answer });
    }
    Ok(waiting)
}

/// A VM whose guest is paused, or will be at its next fault.
pub struct Waiting {
    record: Record,
    process: ProcessHandle,
    answer: std::sync::mpsc::Receiver<Result<PagedVm, String>>,
}

/// Waits for the shim of each and puts the VM back among the managed.
pub async fn take_over(manager: Arc<Manager>, waiting: Waiting) {
    let Waiting { record, process, answer } = waiting;
    let name = record.name.clone();
    let paged = tokio::select! {
        paged = receive(answer) => paged,
        _ = process.exited() => {
            manager.expect_no_longer(&name);
            manager.host.ledger.release(record.overhead);
            return;
        }
    };
    let paged = match paged {
        Ok(Ok(paged)) => paged,
        Ok(Err(why)) => {
            // Its pages are where they were; a manager that understands them can still come.
            tracing::error!(vm = name, "not taken over: {why}; its guest stays paused");
            return;
        }
        Err(e) => {
            tracing::error!(vm = name, "not taken over: {e}");
            return;
        }
    };
    let folder = manager.folder_of(&name);
    let vm = manager.admit(NewVm {
        id: manager.next_id(),
        name,
        spec: record.spec,
        folder,
        accel: record.accel,
        size: record.size,
        overhead: record.overhead,
        params: record.params,
        process,
        management: Management { mode: Mode::Paged, reason: None },
        paged: Some(paged),
        control: BalloonControl::new(manager.config.balloon),
        set: WorkingSet::new(manager.config.sampling, record.size),
    });
    vm.set_run_state(RunState::Running);
    let socket = manager.paths(&vm.name).qmp_socket;
    match Qmp::connect(&socket, std::time::Duration::from_secs(20)).await {
        Ok(qmp) => manager.connected(&vm, qmp).await,
        Err(e) => tracing::warn!(vm = vm.name, "{e}: no balloon for this VM"),
    }
}
