//! The accountable loop: on every event of OSDI'02 s.6.3 (parameters, arrival, departure, threshold
//! crossings, and once a second) takes one consistent look at the host, asks the pure policy, and
//! passes its orders to the pagers and balloons.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_api::{Mode, RunState};
use ballast_journal::{Moment, now_ms};
use ballast_pager::mappings::ZERO_RUN;
use ballast_pager::service::PagedVm;
use ballast_pager::word::State as Page;
use ballast_policy::pools::Member;
use ballast_policy::{
    Decision, InVain, Pool, SamplingConfig, Snapshot, State, Thresholds, VmDemand, VmState,
    choose_samples, decide,
};
use ballast_qemu::process;
use ballast_units::{Pages, VmId};

use crate::inputs;
use crate::manager::{Manager, unpaged_promise};
use crate::nodes::Nodes;
use crate::records::Record;
use crate::sync::lock;
use crate::tools;
use crate::vm::Vm;
use crate::vmm_memory::rebook;

const PERIOD: Duration = Duration::from_secs(1);
/// While more is handed out than the budget has.
const OVERDRAWN: Duration = Duration::from_millis(20);
/// Turns are never closer than this, however often thresholds are crossed.
const SPACING: Duration = Duration::from_millis(5);

/// The policy thread.
pub fn run(manager: &Arc<Manager>) {
    let mut last = Last {
        state: State::High,
        thresholds: manager.thresholds(),
        turns: 0,
        nodes: Nodes::new(),
        adrift: Pages::ZERO,
    };
    let mut before = HashMap::new();
    // Before the first turn hands out what VMs without a pager may take.
    measure_strangers(manager);
    let mut last_external = Instant::now();
    // The thresholds are in force from the first turn on.
    manager.kick.ring("ballastd started");
    while !manager.is_stopping() {
        // Each turn makes up for what free memory lacks, and that does not fall below zero: what was
        // handed out beyond a budget that was lowered is reclaimed over several.
        let ledger = &manager.host.ledger;
        let overdrawn = ledger.used() > ledger.budget();
        let why = manager.kick.wait(if overdrawn { OVERDRAWN } else { PERIOD });
        if last_external.elapsed() >= PERIOD {
            last_external = Instant::now();
            measure_strangers(manager);
            manager.book_vmms();
        }
        turn(manager, &mut last, &mut before, why);
        std::thread::sleep(SPACING);
    }
}

/// What a turn left behind for the next.
struct Last {
    state: State,
    thresholds: Thresholds,
    /// Turns so far.
    turns: u64,
    nodes: Nodes,
    /// What was handed out by then and in no VM's books.
    adrift: Pages,
}

fn turn(
    manager: &Manager,
    last: &mut Last,
    before: &mut HashMap<VmId, Before>,
    why: Option<String>,
) {
    let host = &manager.host;
    host.awake.allow(manager.config().wakeful);
    let thresholds = manager.step_reserve();
    if last.thresholds != thresholds {
        last.thresholds = thresholds;
        host.set_plenty(thresholds.goal());
    }
    // First: what is handed out meanwhile is not taken for nobody's.
    let used = host.ledger.used();
    let vms: Vec<Arc<Vm>> =
        manager.vms().into_iter().filter(|vm| vm.run_state() != RunState::Stopped).collect();
    for vm in &vms {
        if let Some(paged) = &*vm.paged() {
            sample(vm, paged, manager.config().sampling);
        }
    }

    // A VM out of reach takes what it takes: it is overhead to the others.
    let (managed, strangers): (Vec<_>, Vec<_>) =
        vms.iter().partition(|vm| vm.mode() != Mode::Unmanaged);
    let taken: Vec<Member> = strangers.iter().map(|vm| taken_by(manager, vm)).collect();
    let overhead: Pages = managed.iter().map(|vm| vm.overhead()).sum::<Pages>()
        + taken.iter().map(|member| member.overhead).sum::<Pages>()
        + adrift(manager, used, &vms, &mut last.adrift)
        + ZERO_RUN;
    for vm in &strangers {
        leave_alone(vm);
    }
    let snapshot = look(manager, last, &managed, (overhead, taken), before, why);
    last.turns += 1;
    // Also where nobody looks at it.
    manager.overcommit_peak();
    let (decision, moment) = decide_now(manager, last.turns, snapshot);
    let state = decision.state;
    // Rung when the state may change; see `Ledger::set_alarm`.
    let rise = state.higher().map_or(Pages(u64::MAX), |higher| thresholds.upper_edge(higher));
    host.ledger.set_alarm(thresholds.lower_edge(state), rise);
    host.set_low(state == State::Low);

    carry_out(manager, &managed, &decision, last.state != state);
    last.nodes.left_in(&decision.nodes);
    if last.state != state {
        tracing::info!("{}: {} free", decision.trigger(), decision.snapshot.free);
        last.state = state;
    }
    let here: HashSet<VmId> = vms.iter().map(|vm| vm.id).collect();
    before.retain(|id, _| here.contains(id));
    if let Some(journal) = &manager.journal {
        // In the order of the decision.
        journal.record(moment, decision.clone(), |i| managed[i].name.clone());
    }
    manager.set_decision(decision);
}

/// What is handed out and in the books of no VM that is there, starts or waits to be taken over: it is others' only when
/// it has been given back. Such is the memory of one that has ended, whose last writes may wait for a disk that does not answer.
fn adrift(manager: &Manager, used: Pages, vms: &[Arc<Vm>], before: &mut Pages) -> Pages {
    let known = vms.iter().map(|vm| vm.consumed() + vm.overhead()).sum::<Pages>()
        + manager.booked_for_coming(vms)
        + ZERO_RUN;
    // What was given back meanwhile is nobody's either.
    let now = used.min(manager.host.ledger.used()).saturating_sub(known);
    // What was on its way from one book to another when it was looked at is not so twice.
    now.min(std::mem::replace(before, now))
}

/// What a VM out of reach takes, and from which pool.
fn taken_by(manager: &Manager, vm: &Vm) -> Member {
    let pool = manager.pools.id(vm.params().pool.as_deref());
    Member { pool, overhead: vm.consumed() + vm.overhead() }
}

/// Of a VM out of reach: nothing is taken from it any more, and it gets what it asks for.
fn leave_alone(vm: &Vm) {
    if let Some(paged) = &*vm.paged() {
        paged.set_evict_goal(Pages::ZERO);
        paged.set_may_share(false);
        paged.let_pages_move(false);
        paged.memory().set_target(vm.size);
        paged.memory_freed();
    }
    if vm.is_beyond_reach.load(Ordering::Relaxed) {
        // What it gave up does nobody any good.
        let goal = std::mem::take(&mut lock(&vm.balloon).goal);
        if !goal.is_zero() {
            vm.stir.soon();
        }
    }
}

/// What the host and the VMs that are managed are like now. `overhead`: what cannot be shared out among these; `taken`: what
/// of it others have.
fn look(
    manager: &Manager,
    last: &Last,
    managed: &[&Arc<Vm>],
    (overhead, taken): (Pages, Vec<Member>),
    before: &mut HashMap<VmId, Before>,
    why: Option<String>,
) -> Snapshot {
    let host = &manager.host;
    let starts = manager.promised_to_starts();
    // One look at parameters and pools, of which several may be changed together.
    let changing = lock(&manager.changing);
    let pools = manager.pools.pools(&manager.pools.rules());
    let states = managed
        .iter()
        .map(|vm| vm_state(manager, vm, demand(manager, vm, &pools), before))
        .collect();
    drop(changing);
    Snapshot {
        trigger: why.unwrap_or_else(|| "period".into()),
        before: last.state,
        thresholds: last.thresholds,
        budget: host.ledger.budget(),
        free: host.ledger.free(),
        overhead,
        starting: starts.iter().map(|start| start.overhead).sum(),
        room: manager.room_for_starts(),
        vms: states,
        pools,
        outside: starts.into_iter().chain(taken).filter(|of| of.pool.is_some()).collect(),
        policy: inputs::policy(manager.config().policy, managed),
        nodes: last.nodes.look(managed.iter().map(|vm| &***vm)),
    }
}

/// The decision of the turn `n`, when it was made, and how long that took.
fn decide_now(manager: &Manager, n: u64, snapshot: Snapshot) -> (Arc<Decision>, Moment) {
    let begun = Instant::now();
    let decision = Arc::new(decide(snapshot));
    let moment = Moment {
        n,
        at_ms: now_ms(),
        up_ms: millis(begun - manager.started),
        took_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
    };
    (decision, moment)
}

/// Hands the orders of a decision to the balloons and pagers of the VMs that it is about, in its order.
fn carry_out(manager: &Manager, managed: &[&Arc<Vm>], decision: &Decision, is_new_state: bool) {
    let until = decision.hold_until();
    let vms = managed.iter().zip(&decision.snapshot.vms);
    for (((vm, state), entitlement), plan) in vms.zip(&decision.results).zip(&decision.plans) {
        let (seen, demand) = (state.balloon_goal, &state.demand);
        let is_new = change_goal(&mut lock(&vm.balloon).goal, seen, plan.balloon_goal);
        if is_new && hurries(seen, plan.balloon_goal, state.size) {
            // What is short is not to wait for its turn.
            vm.stir.now();
        } else if is_new || is_new_state {
            vm.stir.soon();
        }
        if let Some(paged) = &*vm.paged() {
            // What the pager charges to the VM leaves out its part of the common pages.
            let part = paged.shared_part();
            let target = entitlement.target.saturating_sub(part);
            paged.memory().set_target(target);
            paged.let_pages_move(vm.may_be_paged());
            // A shim whose process is stopped does not answer.
            let no_zeros = vm.counts_on_zeros.get() == Some(&false);
            paged.set_may_share(vm.may_be_paged() && !vm.is_frozen() && no_zeros);
            change_domain(manager, vm, paged);
            let evict = if vm.may_be_paged() { plan.evict } else { Pages::ZERO };
            let has_room = !(paged.swap_room() + paged.spare_room()).is_zero();
            let exchanges = decision.state == State::Low && vm.may_be_paged() && has_room;
            // A limit below its size holds in plenty, too, and from one turn to the next.
            let limit = (demand.max < state.size && vm.may_be_paged())
                .then(|| demand.max.saturating_sub(part));
            if evict.is_zero() && exchanges {
                // Nothing is asked of it, and what it wants beyond its target it can have for what it has.
                paged.exchange_at(target, until);
            } else {
                let leave = plan.leave.saturating_sub(part);
                match held(evict, leave, until, limit) {
                    Held::Until(n, leave, until) => paged.hold_down_to(n, leave, until),
                    Held::Within(n, leave, limit) => paged.evict_within(n, leave, limit),
                }
            }
            paged.memory_freed();
        }
    }
}

/// What is asked of a VM, and what it is held down to from then on.
#[derive(Debug, PartialEq)]
enum Held {
    /// So many pages, to leave so many, and what it grows by beyond that until so much is free.
    Until(Pages, Pages, Pages),
    /// So many, to leave so many, and what it grows by beyond its limit, as it comes and whatever is free.
    Within(Pages, Pages, Pages),
}

/// Of a VM that is asked for so many pages, to leave so many, until so much is free, and of a limit that it may have.
fn held(evict: Pages, leave: Pages, until: Pages, limit: Option<Pages>) -> Held {
    match limit {
        Some(most) if evict.is_zero() => Held::Within(Pages::ZERO, most, most),
        None if evict.is_zero() => Held::Until(Pages::ZERO, Pages::ZERO, Pages::ZERO),
        // For something else than its limit it is not held in plenty.
        Some(most) if until.is_zero() => Held::Within(evict, leave, leave.max(most)),
        _ => Held::Until(evict, leave, until),
    }
}

/// Whether a goal is raised by so much that the balloon's loop is to turn at once: a few pages more, turn after turn, are not
/// worth that.
fn hurries(from: Pages, to: Pages, size: Pages) -> bool {
    to > from + Pages(size.0 / 128).clamp(Pages::from_mib(2), Pages::from_mib(32))
}

/// Whether another goal is in force now than before. A balloon that was found since it was `seen` is led on from what it
/// holds, of which the decision did not know: its goal stays until the next one.
fn change_goal(goal: &mut Pages, seen: Pages, to: Pages) -> bool {
    let changes = *goal == seen && *goal != to;
    if changes {
        *goal = to;
    }
    changes
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A VM whose salt was changed leaves one domain for another, over several turns.
fn change_domain(manager: &Manager, vm: &Vm, paged: &PagedVm) {
    let name = manager.commons.domain_name(&vm.name, vm.params().salt.as_ref());
    let (folder, domain) = (vm.folder.clone(), name.clone());
    let book = move || {
        let booked = Record::must_update(&folder, |record| record.domain = Some(domain));
        booked
            .inspect_err(|e| tracing::error!("{}: changing its salt: {e}", folder.display()))
            .is_ok()
    };
    let moved = manager.commons.move_to(paged, &name, book);
    // Asked each turn: said once.
    let mut trouble = lock(&vm.salt_trouble);
    let before = std::mem::replace(&mut *trouble, moved.err());
    if let Some(e) = trouble.as_ref().filter(|_| *trouble != before) {
        tracing::error!(vm = vm.name, "changing its salt: {e}");
    }
}

fn demand(manager: &Manager, vm: &Vm, pools: &[Pool]) -> VmDemand {
    let params = vm.params();
    let size = vm.configured();
    let active = match &*vm.paged() {
        Some(_) if vm.may_give() => lock(&vm.sampling).set.estimate().estimate,
        // Nothing is known of it, or no more: it counts as using all it has.
        _ => size,
    };
    // What is to be unplugged is its own until it is; what is to be plugged it cannot use before.
    // Below what it began with, a limit holds whatever is plugged.
    let lag = match params.max >= vm.boot {
        true => vm.plugged().saturating_sub(params.max - vm.boot),
        false => Pages::ZERO,
    };
    let max = (params.max + lag).min(size);
    VmDemand {
        id: vm.id,
        shares: params.shares,
        min: params.min.min(max),
        max,
        tax: manager.tax_of(&params, pools),
        active,
    }
}

fn vm_state(
    manager: &Manager,
    vm: &Vm,
    demand: VmDemand,
    before: &mut HashMap<VmId, Before>,
) -> VmState {
    let balloon = *lock(&vm.balloon);
    let withheld = lock(&vm.hotplug).withheld;
    let mut tools = tools::known(vm, vm.paged().as_ref());
    let before = before.entry(vm.id).or_default();
    let (mut beyond, mut saved) = (Pages::ZERO, Pages::ZERO);
    let (waiting, swapped_in, swap_free) = match &*vm.paged() {
        Some(paged) => {
            beyond = paged.memory().charged().saturating_sub(vm.configured());
            let held = |page| paged.memory().pmap().in_state(page);
            let shared = held(Page::Shared);
            saved = shared.saturating_sub(paged.shared_part());
            let waits = paged.memory().counters.values().swap_waits;
            let swapped_in = before.swap_waits.replace(waits).is_some_and(|before| waits > before);
            let at = manager.started.elapsed();
            let passed_over = shared + held(Page::Zero) + held(Page::Broken);
            let (grown, unseen) = balloon.held.unwrap_or_default();
            tools.in_vain = before.in_vain.step(at, unseen, grown.min(passed_over));
            // What of it is shared nobody knows: as much as of all that is passed over.
            tools.unsaved = tools.in_vain.scaled(shared.min(passed_over), passed_over);
            let mut room = Pages::ZERO;
            // Of one that was not looked at yet it is presumed: it waits for what it has too much of, and not the others for it.
            if vm.may_give() {
                (room, tools.spare_room) = (paged.swap_room(), paged.spare_room());
            }
            (paged.waiting() > 0, swapped_in, room)
        }
        None => (false, false, Pages::ZERO),
    };
    VmState {
        demand,
        consumed: vm.consumed(),
        size: vm.configured(),
        balloon_goal: balloon.goal,
        balloon_health: balloon.output.health,
        balloon_limit: balloon.output.limit,
        balloon_rate: balloon.output.rate,
        short: balloon.output.short,
        wants_more: waiting || swapped_in || !balloon.commanded.is_zero() || !withheld.is_zero(),
        swap_free,
        pool: manager.pools.id(vm.params().pool.as_deref()),
        overhead: vm.overhead(),
        beyond,
        tools,
        saved,
    }
}

/// What was seen of a VM in earlier turns.
#[derive(Default)]
struct Before {
    /// Pages of swap that it had waited for.
    swap_waits: Option<u64>,
    in_vain: InVain,
}

/// One step of the sampling of active memory (OSDI'02 s.5.3). VM execution time is the time in
/// which the VM was not stopped; see docs/adr/0004-execution-time.md.
fn sample(vm: &Vm, paged: &PagedVm, config: SamplingConfig) {
    let mut sampling = lock(&vm.sampling);
    // A reload passes over a VM that comes just then.
    sampling.set.set_config(config);
    sampling.times.set_config(config);
    let now = Instant::now();
    let passed = now - sampling.last;
    sampling.last = now;
    let sample = paged.sample();
    if !vm.may_be_paged() {
        // Sampling takes pages from their homes too. What an earlier sample holds goes back.
        if sample.pages > 0 && sampling.asked.is_none_or(|asked| sample.begun > asked) {
            sampling.asked = Some(sample.begun);
            paged.begin_sample(Vec::new());
        }
        return;
    }
    if let Some(asked) = sampling.asked {
        if sample.begun <= asked {
            return;
        }
        sampling.asked = None;
        sampling.set.begin_period(sample.pages);
        sampling.times.begin_period(sample.pages);
        sampling.stood_still = Duration::ZERO;
        sampling.touched = sample.base;
    }
    let touched = paged.memory().counters.values().touched;
    let fresh = touched.saturating_sub(sampling.touched);
    sampling.touched = touched;
    sampling.set.touched(u32::try_from(fresh).unwrap_or(u32::MAX));
    // One that is being stopped runs until it has ended.
    let runs = matches!(vm.run_state(), RunState::Running | RunState::Stopping) && !vm.is_frozen();
    let running = runs && paged.waiting() == 0;
    // Touches come in wall-clock time; nothing was touched while the VM stood still.
    let stood_still = sampling.stood_still;
    for after in paged.memory().touches.take() {
        sampling.times.touched(after.saturating_sub(stood_still));
    }
    let executed = if running { passed } else { Duration::ZERO };
    sampling.stood_still += passed - executed;
    if sampling.set.advance(executed) {
        sampling.set.end_period();
        sampling.times.end_period();
        sampling.asked = Some(sample.begun);
        sampling.period += 1;
        // Its stage was laid out for so many, whatever was set since.
        let most = u32::try_from(paged.memory().most_samples()).unwrap_or(u32::MAX);
        let n = sampling.set.config().samples.min(most);
        paged.begin_sample(choose_samples(sampling.seed, sampling.period, vm.size, n));
    }
}

/// Books what VMs that are not paged take now, by the kernel's count, and what they may take beyond that at any moment: nothing
/// makes them wait until others have given it.
fn measure_strangers(manager: &Manager) {
    let ledger = &manager.host.ledger;
    // What has come to be promised since is booked as it is left over beyond all that a shortage is to begin with: neither
    // others nor starts are to wait for it.
    let kept = manager.highest_thresholds().goal() + manager.room_for_starts();
    for vm in manager.vms() {
        if vm.paged().is_some() || vm.run_state() == RunState::Stopped {
            continue;
        }
        let Some(rss) = process::rss(vm.process.pid()) else { continue };
        let booked = vm.external.load(Ordering::Relaxed);
        vm.was_measured(rss.pages_ceil());
        let spare = ledger.free().saturating_sub(kept);
        let now = to_be_booked(
            rss.pages_ceil(),
            unpaged_promise(&vm, &vm.params()),
            Pages(booked),
            spare,
        );
        // Its end takes what is booked, once: that never comes back.
        if booked != 0 {
            rebook(ledger, &vm.external, booked, now.0);
        }
    }
}

/// Of a VM that uses so much and was promised so much, where so much is booked and so much is left over. At least a page:
/// nothing booked means that it has ended.
fn to_be_booked(uses: Pages, promised: Pages, booked: Pages, spare: Pages) -> Pages {
    uses.max(promised.min(booked + spare)).max(Pages(1))
}

#[cfg(test)]
mod tests {
    use ballast_api::Management;

    use super::*;
    use crate::looks::PRESUMED;
    use crate::vm::{Asked, Sizes, VmParams};

    #[test]
    fn a_balloon_that_was_found_during_a_turn_is_not_let_down_by_that_turn() {
        let mut goal = Pages(7);
        // The turn began before it was known what the balloon holds.
        assert!(!change_goal(&mut goal, Pages::ZERO, Pages::ZERO));
        assert_eq!(goal, Pages(7));
        assert!(change_goal(&mut goal, Pages(7), Pages(3)));
        assert!(!change_goal(&mut goal, Pages(3), Pages(3)));
        assert_eq!(goal, Pages(3));
    }

    #[tokio::test]
    async fn a_vm_that_was_not_looked_at_is_presumed_to_give_for_a_while() {
        let params = crate::vm::VmParams::resolve(&[], "a", Pages(4).into(), Default::default());
        let vm = Vm::of_tests("a", std::env::temp_dir(), Pages(4), params.unwrap());
        let mut vm = Arc::into_inner(vm).unwrap();
        assert!(vm.may_give() && !vm.may_be_paged());
        vm.built = Instant::now().checked_sub(PRESUMED).unwrap();
        assert!(!vm.may_give(), "what it has is its own until it is known");
        for (mode, gives) in [(Mode::Paged, true), (Mode::BalloonOnly, false)] {
            vm.was_looked_at(Management { mode, reason: None }, true);
            assert_eq!(vm.may_give(), gives, "{mode}");
        }
    }

    #[test]
    fn a_balloon_is_hurried_for_much_more_and_never_for_less() {
        let hurried = |mib: [u64; 3]| {
            let [from, to, size] = mib.map(Pages::from_mib);
            hurries(from, to, size)
        };
        assert_eq!([[10, 13, 128], [10, 12, 128], [10, 0, 128]].map(hurried), [true, false, false]);
        assert_eq!([[0, 9, 1_024], [0, 8, 1_024]].map(hurried), [true, false]);
        // Of a large one a part of what it is asked for in a second is enough.
        assert_eq!([[0, 33, 65_536], [0, 32, 65_536]].map(hurried), [true, false]);
    }

    #[test]
    fn a_limit_is_held_in_plenty_too_and_nothing_else_is() {
        let held = |evict, leave, until, limit: Option<u64>| {
            held(Pages(evict), Pages(leave), Pages(until), limit.map(Pages))
        };
        let until = |n, leave, until| Held::Until(Pages(n), Pages(leave), Pages(until));
        let within = |n, leave, limit| Held::Within(Pages(n), Pages(leave), Pages(limit));
        assert_eq!(held(0, 90, 0, None), until(0, 0, 0));
        assert_eq!(held(0, 90, 0, Some(100)), within(0, 100, 100));
        assert_eq!(held(7, 100, 0, Some(100)), within(7, 100, 100));
        assert_eq!(held(7, 120, 0, Some(100)), within(7, 120, 120), "not down to it yet");
        assert_eq!(held(7, 60, 0, Some(100)), within(7, 60, 100), "room for a start");
        assert_eq!(held(7, 60, 50, Some(100)), until(7, 60, 50));
        assert_eq!(held(7, 60, 0, None), until(7, 60, 0));
    }

    /// What is plugged beyond its limit is its own until it is unplugged; below what it began with nothing is.
    #[tokio::test]
    async fn a_limit_holds_as_far_as_it_can_while_memory_is_plugged() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let [boot, most] = [128, 384].map(Pages::from_mib);
        let of = |max, plugged| {
            let asked = Asked { max: Some(Pages::from_mib(max)), ..Asked::default() };
            let params = VmParams::resolve(&[], "a", Sizes { boot, most }, asked).unwrap();
            let mut vm = Vm::of_tests("a", dir.path().join("a"), most, params);
            Arc::get_mut(&mut vm).unwrap().boot = boot;
            lock(&vm.hotplug).plugged = Some(Pages::from_mib(plugged));
            demand(&manager, &vm, &[]).max
        };
        assert_eq!([of(96, 0), of(96, 256)], [Pages::from_mib(96); 2]);
        assert_eq!(of(256, 256), Pages::from_mib(384));
        assert_eq!([of(256, 128), of(384, 128)], [Pages::from_mib(256); 2]);
        assert_eq!(of(384, 256), Pages::from_mib(384));
    }

    #[test]
    fn what_a_vm_without_a_pager_may_take_is_booked_as_far_as_it_is_left_over() {
        let booked = |uses, promised, booked, spare| {
            to_be_booked(Pages(uses), Pages(promised), Pages(booked), Pages(spare)).0
        };
        assert_eq!(booked(10, 100, 100, 0), 100, "what was reserved for its start stays");
        assert_eq!(booked(10, 60, 100, 50), 60, "what its balloon holds is others'");
        assert_eq!(booked(10, 100, 60, 15), 75);
        assert_eq!(booked(120, 100, 100, 0), 120, "what it uses it has");
        assert_eq!(booked(0, 0, 5, 9), 1);
    }
}
