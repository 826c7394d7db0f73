//! Memory that is plugged into one VM while its guest runs: in each turn of the balloon's loop, what is plugged is
//! read, and what is to be plugged is asked for, if that is not what was asked last. What the policy counts on is
//! what the VMM's books say, never what was asked: a guest may take its time, or not do it at all.

use ballast_api::HotplugView;
use ballast_qemu::Monitor;
use ballast_units::Pages;

use crate::vm::{Vm, lock};

/// One turn. Answers whether all is as it is to be.
pub async fn step(vm: &Vm, monitor: &Monitor) -> bool {
    if vm.size == vm.boot {
        return true;
    }
    let (mut requested, plugged) = match monitor.hotplug().await {
        Some(Ok((requested, plugged))) => (requested.pages(), plugged.pages()),
        Some(Err(e)) => {
            tracing::debug!(vm = vm.name, "what it has plugged: {e}");
            return false;
        }
        None => return true,
    };
    let (wanted, mut failed) = (vm.to_plug(), None);
    if wanted != requested {
        match monitor.request_hotplug(wanted.bytes()).await {
            Some(Ok(())) => {
                tracing::info!(vm = vm.name, "{wanted} to be plugged, after {requested}");
                requested = wanted;
            }
            Some(Err(e)) => {
                failed = Some(wanted);
                if lock(&vm.hotplug).failed != failed {
                    tracing::warn!(vm = vm.name, "asking for {wanted} to be plugged: {e}");
                }
            }
            None => {}
        }
    }
    let mut hotplug = lock(&vm.hotplug);
    if hotplug.plugged != Some(plugged) {
        tracing::info!(vm = vm.name, "{plugged} of {requested} plugged");
    }
    hotplug.failed = failed;
    hotplug.requested = Some(requested);
    hotplug.plugged = Some(plugged);
    plugged == wanted
}

/// As people see it; None for a VM into which nothing can be plugged.
pub fn view(vm: &Vm) -> Option<HotplugView> {
    let room = vm.size.saturating_sub(vm.boot);
    let hotplug = *lock(&vm.hotplug);
    let bytes = |pages: Pages| pages.bytes().0;
    (!room.is_zero()).then(|| HotplugView {
        size: bytes(room),
        requested: bytes(hotplug.requested.unwrap_or_else(|| vm.to_plug())),
        plugged: hotplug.plugged.map(bytes),
    })
}
