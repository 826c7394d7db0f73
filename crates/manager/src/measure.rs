//! A witness: ten times a second, what the kernel says that guests' memory takes is held against the budget. The books
//! say the same in advance; this is how they are caught lying about pages of paged VMs. The rest is booked here as there
//! (ARCHITECTURE.md, "Accounting").
//! While there is memory in plenty and the books hardly change, once a second does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_pager::service::PagedVm;
use ballast_pager::word::State;
use ballast_units::{Bytes, Pages};

use crate::manager::Manager;

const INTERVAL: Duration = Duration::from_millis(100);
/// Intervals between two looks in quiet times.
const QUIET: u32 = 10;
/// Intervals between two looks whether stores have memory that is in none of their pages.
const TRIM: u32 = 100;
/// Changes of the books that are less than this part of the budget are quiet.
const LITTLE: u64 = 512;

/// The thread that measures.
pub fn run(manager: &Arc<Manager>) {
    let mut last = Pages::ZERO;
    let (mut passed, mut untrimmed) = (QUIET, 0);
    while !manager.is_stopping() {
        let ledger = &manager.host.ledger;
        let (used, budget) = (ledger.used(), ledger.budget());
        let plenty = ledger.free() >= manager.thresholds().goal();
        let little = used.0.abs_diff(last.0) < budget.0 / LITTLE;
        if passed >= QUIET || !plenty || !little {
            (last, passed) = (used, 0);
            let used = measure(manager);
            note_rates(manager);
            manager.measured_now.store(used.0, Ordering::Relaxed);
            manager.measured_peak.fetch_max(used.0, Ordering::Relaxed);
        }
        passed += 1;
        untrimmed += 1;
        if untrimmed >= TRIM {
            untrimmed = 0;
            manager.commons.trim();
        }
        std::thread::sleep(INTERVAL);
    }
}

fn note_rates(manager: &Manager) {
    let mut all = [0.0; 3];
    for vm in manager.vms() {
        let Some(counters) = vm.paged().as_ref().map(|p| p.memory().counters.values()) else {
            continue;
        };
        let counts =
            [counters.breaks as f64, counters.scanned as f64, counters.share_cpu_ns as f64 / 1e9];
        vm.share_rates.note(counts);
        all = std::array::from_fn(|i| all[i] + counts[i]);
    }
    manager.share_rates.note(all);
}

/// RAM files are read one after the other, so pages that move from a VM read early to one read late
/// are seen twice. Such a sum is read again: only what is above the budget each time is above it.
fn measure(manager: &Manager) -> Bytes {
    let budget = manager.host.ledger.budget().bytes();
    let mut least = sum(manager);
    for _ in 0..3 {
        if least <= budget {
            break;
        }
        least = least.min(sum(manager));
    }
    least
}

fn sum(manager: &Manager) -> Bytes {
    let (vms, waiting) = manager.with_waiting();
    let own: Bytes = vms
        .iter()
        .map(|vm| {
            let measured = |paged: &PagedVm| {
                let memory = paged.memory();
                // Copies of shared pages are the VMM's own memory, which is not counted by range
                // anywhere: these the pager counts.
                let copies = memory.pmap().in_state(State::Broken).bytes();
                memory.backend().measured().unwrap_or_default() + copies + memory.tier().measured()
            };
            let pages = vm.paged().as_ref().map(measured);
            // With the lock given back, which this takes: see `Vm`.
            pages.unwrap_or_else(|| vm.consumed().bytes()) + vm.overhead().bytes()
        })
        .sum();
    // Their files are not in this manager's hands yet: what their words say that they hold.
    let waiting: Pages =
        waiting.iter().map(|waits| waits.held.pages() + waits.record.overhead).sum();
    own + waiting.bytes() + manager.commons.measured()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ballast_pager::advance::Advance;
    use ballast_qemu::{AccelChoice, ProcessHandle};

    use super::*;
    use crate::manager::Waits;
    use crate::records::Record;
    use crate::sync::lock;
    use crate::vm::{Asked, Vm, VmParams};

    /// What it left out could be beyond the budget, and nobody would know.
    #[tokio::test]
    async fn what_vms_have_that_are_managed_or_wait_for_it_is_all_in_the_sum() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let pages = || Pages(sum(&manager).0 / Pages(1).bytes().0);
        let base = pages();
        assert!(base > Pages::ZERO, "the run of zeros is there");
        let size = Pages(64);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let mut vm =
            Arc::into_inner(Vm::of_tests("a", dir.path().join("a"), size, params.clone())).unwrap();
        vm.overhead = Pages(7);
        vm.external.store(5, Ordering::Relaxed);
        manager.insert(Arc::new(vm));
        assert_eq!(pages(), base + Pages(5 + 7));
        let (pid, accel) = (std::process::id(), AccelChoice::Kvm);
        let waits = Waits {
            since: Instant::now(),
            held: Arc::new(Advance::book(manager.host.clone(), Pages(3))),
            process: ProcessHandle::open(pid).unwrap(),
            record: Record::new("b", None, params, size, Pages(9), pid, &accel),
            why: None,
            refused: false,
        };
        lock(&manager.waiting).insert("b".into(), waits);
        assert_eq!(pages(), base + Pages(5 + 7 + 3 + 9));
    }
}
