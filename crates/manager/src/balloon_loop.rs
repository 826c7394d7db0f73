//! The balloon of one VM, and what is unplugged beside it: about once a second its state is read, the pure controller asked, and its
//! command carried out. QEMU may be frozen or lie; every call has a deadline, and nothing waits for
//! this task.
//!
//! While there is memory in plenty and the balloon is empty and asked for nothing, that is done less often
//! (`pace`). Whoever asks for something stirs it ([`Vm::stir`]), and it turns as soon as a brisk pace allows. One
//! at rest turns to a goal that is far from the last one at once ([`Vm::hasten`]).

use std::sync::Arc;
use std::time::Duration;

use ballast_api::GuestStats;
use ballast_policy::unplug::{balloon_goal, together};
use ballast_policy::{BalloonInput, BalloonOutput, State, UnplugControl, UnplugInput};
use ballast_qemu::{Monitor, QmpError};
use ballast_units::{Bytes, Pages};
use tokio::time::Instant;

use crate::hotplug_loop::{self, Look};
use crate::lifecycle::LARGEST;
use crate::manager::Manager;
use crate::pace::{BRISK, Pace};
use crate::sync::lock;
use crate::tools::Meter;
use crate::vm::Vm;

/// Between a turn and one for a new goal, of a balloon that was at rest.
const HASTE: Duration = Duration::from_millis(200);

/// What a turn found and did.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// All is as it was, and nothing is asked of it.
    still: bool,
    /// All that it was asked for is done.
    at_rest: bool,
}

/// Ends with the connection, and answers why that has ended; None: the VM has. What is known of its balloon and of what
/// is unplugged begins anew with each.
pub async fn run(manager: &Manager, vm: &Vm, monitor: &Monitor) -> Option<Arc<str>> {
    let mut meter = Meter::new(manager.config().tools.order);
    let mut pace = Pace::default();
    let mut unplug = None;
    let mut begun = manager.started.elapsed();
    let mut next = begun;
    let mut at_rest = false;
    loop {
        let at = |time: Duration| (manager.started + time).into();
        let haste = at_rest.then(|| at(manager.started.elapsed() + HASTE));
        let stir = pace.is_calm().then(|| at(begun + BRISK));
        tokio::select! {
            _ = vm.process.exited() => return None,
            why = monitor.qmp().closed() => return Some(why),
            () = next_turn(vm, at(next), stir, haste) => {}
        }
        begun = manager.started.elapsed();
        let turn = step(manager, vm, monitor, &mut unplug).await;
        at_rest = turn.at_rest;
        meter.turn(manager, vm, monitor).await;
        pace.note(turn.still);
        // QEMU may have taken long to answer.
        next = pace.next(begun, vm.id.0).max(manager.started.elapsed());
    }
}

/// Returns when it is time for a turn: at `next`, or once it was stirred or hastened, where it heeds that, no sooner than
/// is given: a VMM may stir it without end, and under pressure goals change many times a second.
async fn next_turn(vm: &Vm, next: Instant, stir: Option<Instant>, haste: Option<Instant>) {
    let rung = async |soonest: Option<Instant>, bell: &tokio::sync::Notify| match soonest {
        Some(soonest) => {
            tokio::time::sleep_until(soonest).await;
            bell.notified().await;
        }
        None => std::future::pending().await,
    };
    tokio::select! {
        () = tokio::time::sleep_until(next) => {}
        () = rung(stir, &vm.bells.stir) => {}
        () = rung(haste, &vm.bells.haste) => {}
    }
    // What was asked for until now is seen to by this turn.
    tokio::select! {
        biased;
        () = vm.bells.haste.notified() => {}
        () = std::future::ready(()) => {}
    }
}

/// One turn.
async fn step(
    manager: &Manager,
    vm: &Vm,
    monitor: &Monitor,
    unplug: &mut Option<UnplugControl>,
) -> Turn {
    let seen = see(vm, monitor).await;
    let config = manager.config().balloon;
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
    let still = note(manager, vm, output, seen.reported, seen.stats) && withheld.is_zero();
    if let Some(size) = output.command {
        let left = vm.whole().saturating_sub(size);
        if let Err(e) = monitor.balloon(left.bytes()).await {
            tracing::debug!(vm = vm.name, "balloon to {size}: {e}");
        }
    }
    let is_high = manager.decision().is_some_and(|(_, decision)| decision.state == State::High);
    let has_it = seen.reported == Some(lock(&vm.balloon).commanded);
    Turn {
        still: still && settled && is_high,
        at_rest: output.command.is_none() && settled && has_it,
    }
}

/// The size of its balloon, as QEMU says.
///
/// # Errors
/// It does not say.
pub async fn size(vm: &Vm, monitor: &Monitor) -> Result<Pages, QmpError> {
    // A DIMM may have been plugged. Where that is not told, they are what they were.
    if let Ok(dimms) = monitor.dimms().await {
        lock(&vm.balloon).dimms = dimms.min(LARGEST).pages();
    }
    let left = monitor.query_balloon().await?;
    Ok(vm.whole().saturating_sub(left.pages()))
}

/// What a turn found.
struct Seen {
    stats: Option<GuestStats>,
    /// The size of the balloon, as QEMU says.
    reported: Option<Pages>,
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
    let age_s = told.as_ref().ok().and_then(|told| told.map(|stats| stats.age_s));
    let stats = told.unwrap_or_else(|_| lock(&vm.balloon).stats_now());
    let reported = size(vm, monitor).await.ok();
    if let Some(age_s) = age_s {
        lock(&vm.driver).has_told(age_s, std::time::Instant::now());
    }
    let hotplug = hotplug_loop::look(vm, monitor).await;
    // After the look: what is unplugged is given up before it is out of the VMM's books.
    let (consumed, discarded) = match &*vm.paged() {
        Some(paged) => (Some(paged.memory().charged()), paged.memory().counters.values().discarded),
        None => (None, 0),
    };
    Seen { stats, reported, hotplug, consumed, discarded }
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
    reported: Option<Pages>,
    stats: Option<GuestStats>,
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
    balloon.held = reported.or(balloon.held);
    if stats.is_some() {
        balloon.stats = stats;
        balloon.stats_at = std::time::Instant::now();
    }
    if let Some(size) = output.command {
        balloon.commanded = size;
    }
    let empty = reported.is_none_or(Pages::is_zero) && balloon.commanded.is_zero();
    same && empty && balloon.goal.is_zero() && !output.short && output.command.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::{Asked, VmParams};

    /// Of a VM whose loop heeds a stir, or haste, from these moments on: whether it turns now.
    async fn turns(vm: &Vm, stir: Option<Instant>, haste: Option<Instant>) -> bool {
        let later = Instant::now() + HOUR;
        tokio::select! {
            biased;
            () = next_turn(vm, later, stir, haste) => true,
            () = tokio::time::sleep(Duration::from_millis(20)) => false,
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    fn vm() -> Arc<Vm> {
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        Vm::of_tests("a", std::env::temp_dir(), size, params)
    }

    #[tokio::test]
    async fn a_stir_is_obeyed_no_sooner_than_the_pace_allows_and_not_lost_until_then() {
        let (vm, now) = (vm(), Instant::now());
        vm.stir();
        assert!(!turns(&vm, None, None).await, "a brisk one");
        assert!(!turns(&vm, Some(now + HOUR), None).await, "at once");
        assert!(turns(&vm, Some(now), None).await);
        assert!(!turns(&vm, Some(now), None).await, "twice");
    }

    #[tokio::test]
    async fn a_balloon_at_rest_turns_to_a_new_goal_and_no_other_does() {
        let (vm, now) = (vm(), Instant::now());
        vm.hasten();
        assert!(!turns(&vm, Some(now), None).await, "one that has something to do");
        assert!(!turns(&vm, None, Some(now + HOUR)).await, "at once");
        assert!(turns(&vm, None, Some(now)).await);
        assert!(!turns(&vm, None, Some(now)).await, "twice");
        // A turn that comes for another reason sees to it, too.
        vm.hasten();
        vm.stir();
        assert!(turns(&vm, Some(now), None).await);
        assert!(!turns(&vm, None, Some(now)).await, "it was seen to");
    }
}
