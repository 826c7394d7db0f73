//! What a VM's tools cost it, as it is measured: what its guest reads again because of its balloon, and
//! what the pager's faults take. Asked of QEMU every few seconds; one that does not answer, or tells
//! nothing of its disks, makes its balloon unmeasured and no more.

use std::time::Duration;

use ballast_api::{GuestStats, ToolName, ToolsView};
use ballast_pager::service::PagedVm;
use ballast_pager::word::State;
use ballast_policy::{Cost, Tool, ToolControl, ToolOrder, Tools, ToolsInput};
use ballast_qemu::{DiskReads, Monitor};
use ballast_units::{Bytes, PAGE_SIZE, Pages};

use crate::manager::Manager;
use crate::sync::lock;
use crate::vm::Vm;

/// Turns of the balloon's loop, a second each, between two looks.
const EVERY: u32 = 2;

/// One VM's, in its balloon's loop.
#[derive(Debug)]
pub struct Meter {
    control: ToolControl,
    turns: u32,
    /// None: not asked yet, or not told.
    kvm: Option<bool>,
    last: Option<Sources>,
    /// Pages that the guest was seen to read, and how long that took its disks.
    reads: u64,
    nanos: u64,
}

/// Running totals of where reads can be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sources {
    disks: Option<DiskReads>,
    /// Pages that the guest says it brought back from its own swap, and faults that made it read.
    swapped_in: Option<u64>,
    major_faults: Option<u64>,
}

impl Sources {
    fn of(disks: Option<DiskReads>, stats: Option<&GuestStats>) -> Sources {
        Sources {
            disks,
            swapped_in: stats.and_then(|s| s.swap_in).map(|bytes| Bytes(bytes).pages().0),
            major_faults: stats.and_then(|s| s.major_faults),
        }
    }

    /// Pages read since `last`, and how long its disks took: what the disks tell, or, where they do not
    /// tell or tell less, what the guest does.
    fn since(&self, last: &Sources) -> (u64, u64) {
        let grown = |now: Option<u64>, then: Option<u64>| {
            now.zip(then).map_or(0, |(now, then)| now.saturating_sub(then))
        };
        let bytes = grown(self.disks.map(|d| d.bytes), last.disks.map(|d| d.bytes));
        let nanos = grown(self.disks.map(|d| d.nanos), last.disks.map(|d| d.nanos));
        let pages = bytes / PAGE_SIZE as u64;
        let told = grown(self.swapped_in, last.swapped_in);
        let faults = grown(self.major_faults, last.major_faults);
        (pages.max(told).max(faults), nanos)
    }
}

impl Meter {
    /// Nothing is measured yet, but what its guest reads without a balloon.
    pub fn new(order: ToolOrder, plain_reads: Option<f64>) -> Meter {
        Meter {
            control: ToolControl::new(order).with_plain_reads(plain_reads),
            turns: 0,
            kvm: None,
            last: None,
            reads: 0,
            nanos: 0,
        }
    }

    /// One turn.
    pub async fn turn(&mut self, manager: &Manager, vm: &Vm, monitor: &Monitor) {
        self.turns += 1;
        if !self.turns.is_multiple_of(EVERY) {
            return;
        }
        if self.kvm.is_none() {
            self.kvm = monitor.has_kvm().await.ok();
        }
        // Which tool comes first depends on it: nothing is measured before it is known.
        let Some(kvm) = self.kvm else { return };
        let disks = monitor.disk_reads().await.ok();
        let stats = lock(&vm.balloon).stats;
        let now = Sources::of(disks, stats.as_ref());
        if let Some(last) = self.last {
            let (pages, nanos) = now.since(&last);
            // The guest may say what it likes.
            self.reads = self.reads.saturating_add(pages);
            self.nanos = self.nanos.saturating_add(nanos);
        }
        self.last = Some(now);
        let settings = manager.config().tools;
        let read = if kvm { settings.kvm_read } else { settings.tcg_read };
        let input = self.input(manager.started.elapsed(), vm, read, settings.refault);
        self.control.set_order(settings.order);
        *lock(&vm.tools) = self.control.step(&input);
        *lock(&vm.plain_reads) = self.control.plain_reads();
    }

    fn input(&self, now: Duration, vm: &Vm, read: Duration, refault: Duration) -> ToolsInput {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let asked = lock(&vm.balloon).commanded + lock(&vm.hotplug).withheld;
        let input = ToolsInput {
            now,
            size: vm.configured(),
            balloon: asked,
            reads: self.reads,
            read_ns: self.nanos,
            read_cpu_ns: nanos(read),
            refault_cpu_ns: nanos(refault),
            can_page: vm.may_be_paged(),
            ..ToolsInput::default()
        };
        let paged = vm.paged();
        let Some(paged) = &*paged else { return input };
        let counters = paged.memory().counters.values();
        let held = |state| paged.memory().pmap().in_state(state);
        let ballooned = ballooned(Some(paged));
        ToolsInput {
            balloon: asked.min(ballooned),
            paged: held(State::Swapped) + held(State::Compressed) + held(State::Filled),
            // What came unasked cost its guest nothing.
            refaults: (counters.swap_ins + counters.decompressed).saturating_sub(counters.restored),
            refault_ns: counters.swap_in_ns + counters.decompress_ns,
            evicted: counters.evicted,
            evict_ns: counters.evict_ns,
            starved_ns: counters.starved_ns,
            ballooned,
            ..input
        }
    }
}

/// What a plan is to know now: costs as they were last measured, and the pager's books of this moment.
pub fn known(vm: &Vm, paged: Option<&PagedVm>) -> Tools {
    // What QEMU did not tell this time is as it was.
    let (grown, _) = lock(&vm.balloon).held.unwrap_or_default();
    let grown = grown + lock(&vm.hotplug).withheld;
    Tools { ballooned: ballooned(paged), grown, ..*lock(&vm.tools) }
}

/// What its guest has given up and not used again, by the pager's books.
pub fn ballooned(paged: Option<&PagedVm>) -> Pages {
    paged.map_or(Pages::ZERO, |paged| paged.memory().pmap().in_state(State::Ballooned))
}

/// What is known, and why one of them comes first.
pub fn view(manager: &Manager, vm: &Vm) -> ToolsView {
    let tools = *lock(&vm.tools);
    let cost = |cost: Option<Cost>| cost.map(Cost::ms_per_1000);
    let first = match tools.first {
        Tool::Balloon => ToolName::Balloon,
        Tool::Paging => ToolName::Paging,
    };
    let order = manager.config().tools.order;
    let why = match (order, first, tools.balloon, tools.paging) {
        (ToolOrder::BalloonFirst, ..) => "the configuration says so",
        _ if !vm.may_be_paged() => "its pages cannot be paged",
        (ToolOrder::Automatic, ToolName::Balloon, None, _) => {
            "the balloon is not found to cost anything yet; where reads do not cost its guest far more \
             than faults, it comes first whatever it costs"
        }
        (ToolOrder::Automatic, ToolName::Balloon, ..) => {
            "the order is automatic: it comes first where reads do not cost its guest far more than \
             faults, and elsewhere where it was not measured to be the dearer one"
        }
        (_, ToolName::Balloon, None, _) => "the balloon is not found to cost anything yet",
        (_, ToolName::Balloon, ..) => "it was not measured to be the dearer one",
        (_, ToolName::Paging, None, None) => {
            "reads take far more of its guest's processor than faults; neither tool is measured yet"
        }
        (_, ToolName::Paging, _, None) => {
            "the balloon costs something; what paging does is to be seen"
        }
        (_, ToolName::Paging, None, Some(_)) => {
            "the balloon was the dearer one when it was measured last, or is presumed to be: its guest's \
             reads take far more of its processor than faults"
        }
        (_, ToolName::Paging, ..) => "the balloon was measured to be the dearer one",
    };
    ToolsView {
        first,
        why: why.to_owned(),
        balloon_ms: cost(tools.balloon),
        paging_ms: cost(tools.paging),
        ceiling: tools.ceiling.map(|pages| pages.bytes().0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn reads_are_what_disks_tell_or_else_what_the_guest_does() {
        let disks = |pages: u64, nanos| Some(DiskReads { bytes: pages * PAGE, nanos });
        let guest = |swapped: u64, major_faults| GuestStats {
            swap_in: Some(swapped * PAGE),
            major_faults: Some(major_faults),
            ..GuestStats::default()
        };
        let at = |disks, stats: Option<GuestStats>| Sources::of(disks, stats.as_ref());
        let before = at(disks(100, 1_000), Some(guest(10, 20)));
        assert_eq!(at(disks(150, 3_000), Some(guest(11, 22))).since(&before), (50, 2_000));
        assert_eq!(at(None, Some(guest(15, 90))).since(&before), (70, 0));
        assert_eq!(at(None, Some(guest(95, 21))).since(&before), (85, 0));
        assert_eq!(at(None, None).since(&before), (0, 0));
        assert_eq!(before.since(&at(None, None)), (0, 0), "a first word is no growth");
        assert_eq!(at(disks(1, 1), None).since(&before), (0, 0), "counters that begin anew");
    }
}
