//! A VM that waits for pages which cannot be read, or are damaged, is stopped as a whole: there is nothing
//! true to go on with. Its process is, not its vCPUs by QMP: QEMU does not answer while one of them waits
//! in a fault. When all pages can be read again, it goes on.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_api::RunState;
use rustix::process::Signal;

use crate::manager::Manager;
use crate::records::Record;
use crate::vm::{Vm, lock};

/// How often VMs are looked at.
const PERIOD: Duration = Duration::from_millis(100);

/// The thread that stops them and lets them go on.
pub fn run(manager: &Manager) {
    while !manager.is_stopping() {
        for vm in manager.vms() {
            look(manager, &vm);
        }
        std::thread::sleep(PERIOD);
    }
}

fn look(manager: &Manager, vm: &Vm) {
    if matches!(vm.run_state(), RunState::Stopping | RunState::Stopped) {
        return;
    }
    let unreadable = match &*vm.paged() {
        Some(paged) => paged.is_unreadable(),
        None => false,
    };
    let mut frozen = lock(&vm.frozen);
    if unreadable == *frozen {
        return;
    }
    let signal = if unreadable { Signal::STOP } else { Signal::CONT };
    if unreadable {
        // First: a manager that comes after must know that it is to be let go on.
        Record::update(&vm.folder, |record| record.frozen = true);
    }
    if let Err(e) = vm.process.signal(signal) {
        tracing::error!(vm = vm.name, "{signal:?}: {e}");
        return;
    }
    *frozen = unreadable;
    if unreadable {
        vm.freezes.fetch_add(1, Ordering::Relaxed);
        tracing::error!(vm = vm.name, "stopped: it waits for pages that cannot be read");
    } else {
        Record::update(&vm.folder, |record| record.frozen = false);
        tracing::info!(vm = vm.name, "all its pages can be read again: it goes on");
    }
    drop(frozen);
    manager.kick.ring(format!("{} was stopped or goes on", vm.name));
}
