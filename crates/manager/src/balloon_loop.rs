//! The balloon of one VM, and what is unplugged beside it: once a second, and as soon as much more is asked of it, its state
//! is read, the pure controller asked, and its command carried out. QEMU may be frozen or lie; every call has a deadline, and nothing waits for
//! this task.
//!
//! While there is memory in plenty and the balloon is empty and asked for nothing, that is done less often
//! (`pace`). Whoever asks for something stirs it, and it turns as soon as a brisk pace allows; where the policy asks for more
//! than it did, within moments.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::GuestStats;
use ballast_policy::unplug::{balloon_goal, together};
use ballast_policy::{BalloonInput, BalloonOutput, State, UnplugControl, UnplugInput};
use ballast_qemu::{Monitor, QmpError};
use ballast_units::{Bytes, Pages};

use crate::hotplug_loop::{self, Look};
use crate::lifecycle::LARGEST;
use crate::manager::Manager;
use crate::pace::Pace;
use crate::sync::lock;
use crate::tools::Meter;
use crate::vm::Vm;

/// Ends with the connection, and answers why that has ended; None: the VM has. What is known of its balloon and of what
/// is unplugged begins anew with each.
pub async fn run(manager: &Manager, vm: &Vm, monitor: &Monitor) -> Option<Arc<str>> {
    let plain_reads = *lock(&vm.plain_reads);
    let mut meter = Meter::new(manager.config().tools.order, plain_reads);
    let mut pace = Pace::default();
    let mut unplug = None;
    let mut begun = manager.started.elapsed();
    let mut next = begun;
    loop {
        tokio::select! {
            _ = vm.process.exited() => return None,
            why = monitor.qmp().closed() => return Some(why),
            () = tokio::time::sleep_until((manager.started + next).into()) => {}
            () = vm.stir.stirred(manager.started + begun, pace.is_calm()) => {}
        }
        begun = manager.started.elapsed();
        let still = step(manager, vm, monitor, &mut unplug).await;
        meter.turn(manager, vm, monitor).await;
        pace.note(still);
        // QEMU may have taken long to answer.
        next = pace.next(begun, vm.id.0).max(manager.started.elapsed());
    }
}

/// One turn. Answers whether all is as it was, and nothing is asked of it.
async fn step(
    manager: &Manager,
    vm: &Vm,
    monitor: &Monitor,
    unplug: &mut Option<UnplugControl>,
) -> bool {
    let seen = see(vm, monitor).await;
    // A reload passes over a balloon that is being made, or found again, just then.
    let config = manager.config().balloon;
    lock(&vm.control).set_config(config);
    if let Some(look) = &seen.hotplug {
        unplug.get_or_insert_with(|| UnplugControl::new(config, look.less)).set_config(config);
    }
    let (given, plugged) = (vm.to_plug(), vm.plugged());
    let withheld = unplug.as_ref().map_or(Pages::ZERO, |unplug| unplug.withheld(given, plugged));
    lock(&vm.hotplug).withheld = withheld;
    let input = input(manager, vm, monitor, &seen, plugged);
    let (mut output, beside) = ask_balloon(vm, input, withheld, given, plugged);
    let mut settled = true;
    if let Some(unplug) = unplug {
        let done = unplug.step(&beside, &output);
        output = together(&output, beside.held, &done);
        // Where QEMU did not answer, the next turn asks.
        if let Some(look) = seen.hotplug {
            settled = hotplug_loop::ask(vm, monitor, &look, done.withhold).await;
        }
    }
    let still = note(manager, vm, output, &seen) && withheld.is_zero();
    if let Some(size) = output.command {
        let left = vm.whole().saturating_sub(size);
        if let Err(e) = monitor.balloon(left.bytes()).await {
            tracing::debug!(vm = vm.name, "balloon to {size}: {e}");
        }
    }
    still
        && settled
        && manager.decision().is_some_and(|(_, decision)| decision.state == State::High)
}

/// The size of its balloon, as QEMU says: nothing, while that is what it was before a reset.
///
/// # Errors
/// It does not say.
pub async fn size(vm: &Vm, monitor: &Monitor) -> Result<Pages, QmpError> {
    // A DIMM may have been plugged. Where that is not told, they are what they were.
    if let Ok(dimms) = monitor.dimms().await {
        lock(&vm.balloon).dimms = dimms.min(LARGEST).pages();
    }
    let left = monitor.query_balloon().await?;
    Ok(lock(&vm.driver).holds(vm.whole().saturating_sub(left.pages())))
}

/// Whether a VM has a balloon, as its QMP says; without that, what was heard holds.
pub fn has_one(vm: &Vm, monitor: Option<&Monitor>) -> bool {
    monitor.map_or_else(|| lock(&vm.balloon).held.is_some(), Monitor::has_balloon)
}

/// What a turn found.
struct Seen {
    stats: Option<GuestStats>,
    /// The size of the balloon, as QEMU says.
    reported: Option<Pages>,
    /// What of it the pager does not have as given up.
    unseen: Pages,
    hotplug: Option<Look>,
    /// None: it is not paged.
    consumed: Option<Pages>,
    /// Pages that its guest has given up so far.
    discarded: u64,
}

async fn see(vm: &Vm, monitor: &Monitor) -> Seen {
    // Old statistics are kept with their age: a frozen QEMU does not make the guest unknown, and one that was short of
    // memory bears no larger balloon for that.
    let told = monitor.guest_stats().await;
    let told_at = Instant::now();
    let age_s = told.as_ref().ok().and_then(|told| told.map(|stats| stats.age_s));
    let reported = size(vm, monitor).await.ok();
    // At once: a guest may use what it got within moments.
    let unseen = reported.map_or(Pages::ZERO, |size| {
        size.saturating_sub(crate::tools::ballooned(vm.paged().as_ref()))
    });
    if let Some(age_s) = age_s {
        // What is said of a time before a reset is no younger for what QEMU took for the rest.
        lock(&vm.driver).has_told(age_s, told_at);
    }
    let hotplug = hotplug_loop::look(vm, monitor).await;
    // As old as they are by now: QEMU may have taken seconds for the rest.
    let mut stats = told.unwrap_or_else(|_| lock(&vm.balloon).stats_now());
    if age_s.is_some()
        && let Some(stats) = &mut stats
    {
        stats.age_s = stats.age_s.saturating_add(told_at.elapsed().as_secs());
    }
    // After the look: what is unplugged is given up before it is out of the VMM's books.
    let (consumed, discarded) = match &*vm.paged() {
        Some(paged) => (Some(paged.memory().charged()), paged.memory().counters.values().discarded),
        None => (None, 0),
    };
    Seen { stats, reported, unseen, hotplug, consumed, discarded }
}

/// What the balloon's controller is to know, but for its part of the goal.
fn input(
    manager: &Manager,
    vm: &Vm,
    monitor: &Monitor,
    seen: &Seen,
    plugged: Pages,
) -> BalloonInput {
    let pages = |bytes: Option<u64>| bytes.map(|b| Bytes(b).pages());
    let goal = lock(&vm.balloon).goal;
    BalloonInput {
        now: manager.started.elapsed(),
        size: vm.boot + plugged,
        // QEMU knows of what the guest began with alone.
        most: Some(vm.boot),
        goal,
        has_device: monitor.has_balloon(),
        driver_alive: lock(&vm.driver).is_alive(),
        reported: seen.reported,
        discarded: seen.discarded,
        consumed: seen.consumed,
        guest_available: seen.stats.and_then(|s| pages(s.available)),
        guest_total: seen.stats.and_then(|s| pages(s.total)),
        guest_stats_age: seen.stats.map(|s| Duration::from_secs(s.age_s)),
    }
}

/// Asks the balloon's controller for its part of the goal. Answers with what the one beside it is to know.
fn ask_balloon(
    vm: &Vm,
    input: BalloonInput,
    withheld: Pages,
    given: Pages,
    plugged: Pages,
) -> (BalloonOutput, UnplugInput) {
    let mut control = lock(&vm.control);
    let most = control.most(&input);
    let part = balloon_goal(&input, withheld, &control, most);
    let output = control.step(&BalloonInput { goal: part, ..input });
    let beside = UnplugInput {
        now: input.now,
        goal: input.goal,
        given,
        plugged,
        size: input.size,
        balloon_most: most,
        balloon: control.holds(),
        held: control.held(&input),
        guest_available: control.available(&input),
    };
    (output, beside)
}

/// Keeps what was seen and said for those outside of the loop. Answers whether all is as it was, and nothing is asked
/// of the balloon.
fn note(
    manager: &Manager,
    vm: &Vm,
    output: BalloonOutput,
    &Seen { reported, unseen, stats, .. }: &Seen,
) -> bool {
    let mut balloon = lock(&vm.balloon);
    let same = (balloon.output.health, balloon.output.limit, balloon.output.short)
        == (output.health, output.limit, output.short);
    if balloon.output.health != output.health {
        tracing::info!(vm = vm.name, "balloon: {}", output.health);
        manager.kick.ring(format!("the balloon of {} became {}", vm.name, output.health));
    }
    balloon.output = output;
    balloon.reported = reported;
    balloon.held = reported.map(|size| (size, unseen)).or(balloon.held);
    if stats.is_some() {
        balloon.stats = stats;
        balloon.stats_at = Instant::now();
    }
    if let Some(size) = output.command {
        balloon.commanded = size;
    }
    let empty = reported.is_none_or(Pages::is_zero) && balloon.commanded.is_zero();
    same && empty && balloon.goal.is_zero() && !output.short && output.command.is_none()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vm::VmParams;

    fn with_vm(dir: &Path) -> (Arc<Manager>, Arc<Vm>) {
        let size = Pages::from_mib(64);
        let params = VmParams::resolve(&[], "a", size.into(), Default::default()).unwrap();
        (crate::manager::tests::manager(dir), Vm::of_tests("a", dir.join("a"), size, params))
    }

    #[tokio::test]
    async fn what_a_balloon_was_said_to_hold_is_kept_while_nothing_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let (manager, vm) = with_vm(dir.path());
        for (reported, unseen) in [(Some(Pages(8)), Pages(3)), (None, Pages::ZERO)] {
            let (stats, hotplug, consumed, discarded) = (None, None, None, 0);
            let seen = Seen { stats, reported, unseen, hotplug, consumed, discarded };
            note(&manager, &vm, BalloonOutput::UNKNOWN, &seen);
            let balloon = *lock(&vm.balloon);
            assert_eq!(balloon.reported, reported);
            assert_eq!(balloon.held, Some((Pages(8), Pages(3))));
        }
    }

    #[tokio::test]
    async fn a_balloon_that_was_heard_of_is_there_while_qmp_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let (_manager, vm) = with_vm(dir.path());
        assert!(!has_one(&vm, None));
        lock(&vm.balloon).held = Some((Pages::ZERO, Pages::ZERO));
        assert!(has_one(&vm, None));
    }

    #[tokio::test]
    async fn what_a_guest_told_grows_old_while_it_tells_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (_manager, vm) = with_vm(dir.path());
        let mut balloon = lock(&vm.balloon);
        assert_eq!(balloon.stats_now(), None);
        balloon.stats = Some(GuestStats { age_s: 3, ..GuestStats::default() });
        balloon.stats_at = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
        assert!(balloon.stats_now().unwrap().age_s >= 13);
    }
}
