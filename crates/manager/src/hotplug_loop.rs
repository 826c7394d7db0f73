//! Memory that is plugged into one VM while its guest runs: in each turn of the balloon's loop, what is plugged is
//! read, and what is to be plugged is asked for, if that is not what was asked last: what was given to the guest, less
//! what the policy wants back beyond its balloon ([`ballast_policy::unplug`]). What the policy counts on is
//! what the VMM's books say, never what was asked: a guest may take its time, or not do it at all.

use ballast_api::HotplugView;
use ballast_qemu::Monitor;
use ballast_units::Pages;

use crate::sync::lock;
use crate::vm::Vm;

/// What a look at the device found. What was given to the guest is what its parameters say.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    requested: Pages,
    plugged: Pages,
    /// Whoever asked last (a former manager, perhaps) asked for so much less than was given.
    pub less: Pages,
}

/// Reads what is plugged. None where nothing can be, and where it could not be read: then all is left as it is.
pub async fn look(vm: &Vm, monitor: &Monitor) -> Option<Look> {
    if vm.size == vm.boot {
        return None;
    }
    let (requested, plugged) = match monitor.hotplug().await? {
        Ok((requested, plugged)) => (requested.pages(), plugged.pages()),
        Err(e) => {
            tracing::debug!(vm = vm.name, "what it has plugged: {e}");
            return None;
        }
    };
    let mut hotplug = lock(&vm.hotplug);
    if hotplug.plugged != Some(plugged) {
        tracing::info!(vm = vm.name, "{plugged} of {requested} plugged");
    }
    (hotplug.requested, hotplug.plugged) = (Some(requested), Some(plugged));
    drop(hotplug);
    Some(Look { requested, plugged, less: vm.to_plug().saturating_sub(requested) })
}

/// Asks for all that was given but `withhold`, if that is not what was asked last. Answers whether all is plugged
/// that was given.
pub async fn ask(vm: &Vm, monitor: &Monitor, look: &Look, withhold: Pages) -> bool {
    let given = vm.to_plug();
    let wanted = given.saturating_sub(withhold);
    if wanted != look.requested {
        match monitor.request_hotplug(wanted.bytes()).await {
            Some(Ok(())) => {
                tracing::info!(vm = vm.name, "{wanted} to be plugged, after {}", look.requested);
                let mut hotplug = lock(&vm.hotplug);
                (hotplug.requested, hotplug.failed) = (Some(wanted), None);
            }
            Some(Err(e)) => {
                let mut hotplug = lock(&vm.hotplug);
                if hotplug.failed.replace(wanted) != Some(wanted) {
                    tracing::warn!(vm = vm.name, "asking for {wanted} to be plugged: {e}");
                }
            }
            None => {}
        }
    }
    look.plugged == given
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
        withheld: bytes(hotplug.withheld),
    })
}
