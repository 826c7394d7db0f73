//! What VMMs take beside their guests' RAM, booked as it is measured (`admission.vmm_memory = "budget"`):
//! overhead memory as OSDI'02 s.6.2 means it. A VM that starts is promised, beside the rest, what the VMMs
//! of VMs like it were seen to take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ballast_api::VmSpec;
use ballast_pager::ledger::Ledger;
use ballast_units::{Bytes, Pages};

use crate::manager::Manager;
use crate::views;
use crate::vm::{ENDED, Vm};

/// Where no VM tells: Debian 12's QEMU under TCG takes 36 MiB when it starts and 49 MiB when its guest has
/// booted (ADR 7).
const FIRST: Pages = Pages::from_mib(48);
/// A VMM grows while its guest boots: until then what was expected stays booked for it.
const SETTLED: Duration = Duration::from_secs(60);

impl Manager {
    /// What the VMM of a VM that starts is expected to take: the most that those of VMs with the same
    /// accelerator and as many vCPUs take, else the most that any does.
    pub(crate) fn expected_vmm(&self, spec: &VmSpec) -> Pages {
        if !self.config().books_vmms {
            return Pages::ZERO;
        }
        let like = |other: &VmSpec| {
            other.accel == spec.accel && other.vcpus.unwrap_or(1) == spec.vcpus.unwrap_or(1)
        };
        let settled: Vec<_> = self
            .vms()
            .into_iter()
            .filter(|vm| vm.started.elapsed() >= SETTLED && !vm.booked_vmm().is_zero())
            .collect();
        let most = |similar: bool| {
            let good = |vm: &&std::sync::Arc<Vm>| !similar || vm.spec.as_ref().is_some_and(like);
            settled.iter().filter(good).map(|vm| vm.booked_vmm()).max()
        };
        most(true).or_else(|| most(false)).unwrap_or(FIRST)
    }

    /// Books what the VMMs of paged VMs take now, by the kernel's count.
    pub(crate) fn book_vmms(&self) {
        if !self.config().books_vmms {
            return;
        }
        for vm in self.vms().iter().filter(|vm| vm.paged().is_some()) {
            let booked = vm.vmm.load(Ordering::Relaxed);
            if booked == ENDED || !vm.process.is_alive() {
                continue;
            }
            let now = Bytes(views::vmm_overhead(vm)).pages_ceil().0;
            let now = if vm.started.elapsed() < SETTLED { now.max(booked) } else { now };
            rebook(&self.host.ledger, &vm.vmm, booked, now);
        }
    }
}

/// Books `now` pages in place of the `before` that `booked` said, which are in the ledger. Growth is in there before
/// the VM's end can take it from there; if that was sooner, nothing is booked.
pub(crate) fn rebook(ledger: &Ledger, booked: &AtomicU64, before: u64, now: u64) {
    let more = Pages(now.saturating_sub(before));
    ledger.adopt(more);
    let swapped = booked.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed);
    ledger.release(if swapped.is_ok() { Pages(before.saturating_sub(now)) } else { more });
}
