//! A VM that waits for pages which cannot be read, or are damaged, is stopped as a whole: there is nothing
//! true to go on with. Its process is, not its vCPUs by QMP: QEMU does not answer while one of them waits
//! in a fault. When all pages can be read again, it goes on.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_api::RunState;
use rustix::process::Signal;

use crate::manager::Manager;
use crate::records::Record;
use crate::sync::lock;
use crate::vm::Vm;

/// Between two looks at least, where VMs begin or cease to wait for such pages, ...
const PERIOD: Duration = Duration::from_millis(100);
/// ... and at most where none does: one that could not be stopped is tried again.
const LOOK: Duration = Duration::from_secs(1);

/// The thread that stops them and lets them go on.
pub fn run(manager: &Manager) {
    // VMs of which it was said that they cannot be stopped.
    let mut told = HashSet::new();
    loop {
        let begun = Instant::now();
        // Before they are looked at: what changes meanwhile is looked at again; and an end tells as a change does.
        let seen = manager.host.unreadable_changes();
        if manager.is_stopping() {
            return;
        }
        let vms = manager.vms();
        told.retain(|id| vms.iter().any(|vm| vm.id == *id));
        for vm in vms {
            match look(manager, &vm) {
                Ok(()) => {
                    told.remove(&vm.id);
                }
                Err(e) if told.insert(vm.id) => tracing::error!(vm = vm.name, "{e}"),
                Err(_) => {}
            }
        }
        manager.host.await_unreadable_change(seen, LOOK);
        manager.rest(PERIOD.saturating_sub(begun.elapsed()));
    }
}

fn look(manager: &Manager, vm: &Vm) -> Result<(), String> {
    match vm.run_state() {
        RunState::Stopped => return Ok(()),
        // Until it is killed it runs, and it may not be to be killed.
        RunState::Stopping if !vm.process.is_alive() => return Ok(()),
        _ => {}
    }
    let unreadable = match &*vm.paged() {
        Some(paged) => paged.is_unreadable(),
        None => false,
    };
    let mut frozen = lock(&vm.frozen);
    if unreadable == *frozen {
        return Ok(());
    }
    let signal = if unreadable { Signal::STOP } else { Signal::CONT };
    if unreadable {
        // First: a manager that comes after must know that it is to be let go on. Without that it is not
        // stopped, and those of its vCPUs that want such a page wait alone.
        Record::must_update(&vm.folder, |record| record.frozen = true).map_err(|e| {
            format!("not stopped, though it waits for pages that cannot be read: {e}")
        })?;
    }
    vm.process.signal(signal).map_err(|e| format!("{signal:?}: {e}"))?;
    *frozen = unreadable;
    if unreadable {
        vm.freezes.fetch_add(1, Ordering::Relaxed);
        tracing::error!(vm = vm.name, "stopped: it waits for pages that cannot be read");
    } else {
        if let Err(e) = Record::update(&vm.folder, |record| record.frozen = false) {
            // The next manager lets go on what goes on already.
            tracing::warn!(vm = vm.name, "{e}");
        }
        tracing::info!(vm = vm.name, "all its pages can be read again: it goes on");
    }
    drop(frozen);
    manager.kick.ring(format!("{} was stopped or goes on", vm.name));
    Ok(())
}
