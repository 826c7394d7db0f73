//! Coming back: VMs that a former manager left running are taken over; what remains of VMs that are
//! gone is cleared away.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_api::{Management, Mode};
use ballast_policy::{BalloonControl, Promise, WorkingSet};
use ballast_qemu::{ProcessHandle, Qmp};
use ballast_units::Pages;

use crate::manager::{Manager, Pledge};
use crate::paging::Answer;
use crate::records::Record;
use crate::survey::Left;
use crate::vm::{NewVm, lock};

/// How long a QEMU may take to greet: it may wait in a page fault.
const GREETING: Duration = Duration::from_secs(20);

/// Of the VMs that a former manager left, those that wait for a manager, announced so that their shims
/// are let in. Call before shims are accepted.
pub fn announce(manager: &Arc<Manager>, records: Vec<Left>) -> anyhow::Result<Vec<Waiting>> {
    let mut waiting = Vec::new();
    let mut stores = Vec::new();
    for (folder, record) in records {
        let alive = record.is_alive().then(|| ProcessHandle::open(record.pid));
        let process = match alive {
            Some(Ok(process)) => process,
            // It has just ended, or long ago.
            Some(Err(e)) if e.raw_os_error() != Some(libc::ESRCH) => return Err(e.into()),
            Some(Err(_)) | None => {
                tracing::info!(vm = record.name, "ended while no manager ran");
                clear(manager, &folder, &record);
                continue;
            }
        };
        if record.frozen {
            // Its shim could not answer. If its pages still cannot be read, it is stopped again.
            process.signal(rustix::process::Signal::CONT)?;
            Record::update(&folder, |record| record.frozen = false);
        }
        let (size, overhead, min) = (record.size, record.overhead, record.params.min);
        let swap = size.saturating_sub(min);
        let domain = domain_of(manager, &record);
        stores.push((domain.clone(), folder.join("pmap")));
        let large = record.spec.as_ref().is_some_and(|spec| manager.wants_large_pages(spec));
        let answer =
            manager.expect_shim(&record.name, record.pid, size, swap, overhead, domain, large);
        manager.host.ledger.adopt(overhead);
        let promise = Promise { min, overhead, swap: Pages::ZERO };
        let pool = record.params.pool.clone();
        lock(&manager.starting).insert(record.name.clone(), Pledge { promise, pool });
        let known = (process.clone(), record.clone());
        lock(&manager.waiting).insert(record.name.clone(), known);
        waiting.push(Waiting { folder, record, process, answer });
    }
    manager.commons.recover(&stores)?;
    Ok(waiting)
}

/// Where the pages are that it shares: if its salt was changed, not yet where it says.
fn domain_of(manager: &Manager, record: &Record) -> String {
    let named = || manager.commons.domain_name(&record.name, record.params.salt.as_ref());
    record.domain.clone().unwrap_or_else(named)
}

/// Removes what the pager had of a VM whose VMM is gone; its logs stay.
fn clear(manager: &Manager, folder: &std::path::Path, record: &Record) {
    for path in ["pmap", "stage", "qmp.sock", "agent.sock"].map(|file| folder.join(file)) {
        let _ = std::fs::remove_file(path);
    }
    if let Err(e) = manager.swap.remove(&record.name, record.swap.as_deref()) {
        tracing::warn!(vm = record.name, "removing its swap files: {e}");
    }
    Record::remove(folder);
    let _ = std::fs::remove_dir(folder);
}

/// A VM whose guest is paused, or will be at its next fault.
pub struct Waiting {
    folder: PathBuf,
    record: Record,
    process: ProcessHandle,
    answer: Answer,
}

/// Waits for the shim of a VM, for as long as its VMM lives, and puts it back among the managed.
pub async fn take_over(manager: Arc<Manager>, waiting: Waiting) {
    let Waiting { folder, record, process, mut answer } = waiting;
    let name = record.name.clone();
    let mut said = None;
    let paged = loop {
        let refused = tokio::select! {
            paged = &mut answer => paged,
            _ = process.exited() => {
                manager.expect_no_longer(&name);
                // A handshake that is under way ends now, one way or the other.
                match answer.await {
                    Ok(Ok(paged)) => break Some(paged),
                    Ok(Err(_)) | Err(_) => break None,
                }
            }
        };
        let why = match refused {
            Ok(Ok(paged)) => break Some(paged),
            Ok(Err(why)) => why,
            Err(_) => "its handshake was broken off".to_owned(),
        };
        // Its pages are where they were, and its shim asks again.
        if said.as_ref() != Some(&why) {
            tracing::error!(vm = name, "not taken over yet: {why}; its guest stays paused");
            said = Some(why);
        }
        let swap = record.size.saturating_sub(record.params.min);
        let domain = domain_of(&manager, &record);
        let large = record.spec.as_ref().is_some_and(|spec| manager.wants_large_pages(spec));
        let (size, overhead) = (record.size, record.overhead);
        answer = manager.expect_shim(&name, record.pid, size, swap, overhead, domain, large);
    };
    let settled = || {
        lock(&manager.waiting).remove(&name);
        manager.promise_settled(&name);
    };
    let Some(paged) = paged else {
        tracing::info!(vm = name, "ended before it was taken over");
        manager.host.ledger.release(record.overhead);
        manager.commons.forget(&domain_of(&manager, &record), &folder.join("pmap"));
        // Its swap files may have been made since it was read.
        let record = Record::load(&folder).ok().flatten().unwrap_or(record);
        clear(&manager, &folder, &record);
        settled();
        return;
    };
    *lock(&manager.accel) = record.accel.clone();
    let vm = manager.admit(NewVm {
        id: manager.next_id(),
        name: name.clone(),
        spec: record.spec,
        folder,
        accel: record.accel,
        size: record.size,
        overhead: record.overhead,
        params: record.params,
        process,
        // Much may have happened meanwhile: nothing is taken from it until it was looked at.
        management: Management {
            mode: Mode::BalloonOnly,
            reason: Some("taken over, and not inspected yet".into()),
        },
        external: Pages::ZERO,
        vmm: Pages::ZERO,
        paged: Some(paged),
        control: BalloonControl::new(manager.config().balloon),
        set: WorkingSet::new(manager.config().sampling, record.size),
    });
    settled();
    vm.has_started();
    // First without QEMU, which may wait for memory that only paging can make free.
    manager.look_at(&vm).await;
    let mut freezes = 0;
    loop {
        match Qmp::connect(&manager.paths(&vm.name).qmp_socket, GREETING).await {
            Ok(qmp) => return manager.connected(&vm, qmp).await,
            Err(e) => {
                // While its process is stopped, for pages that cannot be read, it cannot answer.
                let now = vm.freezes.load(Ordering::Relaxed);
                if (now == freezes && !vm.is_frozen()) || !vm.process.is_alive() {
                    return tracing::warn!(vm = vm.name, "{e}: no balloon for this VM");
                }
                freezes = now;
                // A connection that is refused is so at once.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}
