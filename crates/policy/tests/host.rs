//! The whole loop on a toy host: states, targets, plans and balloon control drive VMs whose
//! consumption obeys with a delay. Checked: free memory reaches the goal wherever that is
//! possible, guarantees hold throughout, and constant inputs lead to rest.

use std::time::Duration;

use ballast_policy::{
    BalloonConfig, BalloonControl, BalloonInput, Pool, PoolId, Reason, Snapshot, State, TaxRate,
    Thresholds, Tool, Tools, VmDemand, VmPlan, VmState, decide,
};
use ballast_units::{Pages, VmId};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// What a guest's balloon driver does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Driver {
    /// Follows, so many pages per second.
    Follows(u64),
    /// There is none.
    None,
    /// There is one, and it does not move.
    Dead,
}

struct Vm {
    demand: VmDemand,
    size: u64,
    driver: Driver,
    /// What the guest uses again and again; it asks for it whenever it does not have it.
    used: u64,
    consumed: u64,
    swapped: u64,
    /// Given up to the balloon, and not used again.
    given: u64,
    /// Its balloon was measured to be the dearer tool.
    dear: bool,
    evict: u64,
    leave: u64,
    blocked: bool,
    balloon_goal: u64,
    asked: u64,
    balloon: u64,
    discarded: u64,
    control: BalloonControl,
    /// The last output of the controller.
    health: ballast_policy::Health,
    limit: Pages,
    rate: Option<Pages>,
    short: bool,
    pool: Option<PoolId>,
}

impl Vm {
    fn new(id: u32, shares: u32, min: u64, size: u64, used: u64, driver: Driver) -> Vm {
        let demand = VmDemand {
            id: VmId(id),
            shares,
            min: Pages(min),
            max: Pages(size),
            tax: TaxRate::default(),
            active: Pages(used),
        };
        Vm {
            demand,
            size,
            driver,
            used,
            consumed: 0,
            swapped: 0,
            given: 0,
            dear: false,
            evict: 0,
            leave: 0,
            blocked: false,
            balloon_goal: 0,
            asked: 0,
            balloon: 0,
            discarded: 0,
            control: BalloonControl::new(BalloonConfig {
                guest_reserve: Pages(0),
                guest_reserve_fraction: 0.0,
                max_fraction: 1.0,
                ..BalloonConfig::default()
            }),
            health: ballast_policy::Health::Missing,
            limit: Pages(0),
            rate: None,
            short: false,
            pool: None,
        }
    }

    fn room(&self) -> u64 {
        self.size - self.balloon
    }

    fn tools(&self) -> Tools {
        if !self.dear {
            return Tools::default();
        }
        Tools {
            first: Tool::Paging,
            ceiling: Some(Pages(self.balloon - self.balloon / 4)),
            ballooned: Pages(self.given),
            ..Tools::default()
        }
    }

    fn state(&self) -> VmState {
        VmState {
            demand: self.demand,
            consumed: Pages(self.consumed),
            size: Pages(self.size),
            balloon_goal: Pages(self.balloon_goal),
            balloon_health: self.health,
            balloon_limit: self.limit,
            balloon_rate: self.rate,
            short: self.short,
            wants_more: self.balloon > 0 && self.used > self.consumed,
            swap_free: Pages(self.size - self.swapped),
            pool: self.pool,
            overhead: Pages::ZERO,
            beyond: Pages::ZERO,
            saved: Pages::ZERO,
            tools: self.tools(),
        }
    }
}

struct Host {
    budget: u64,
    thresholds: Thresholds,
    state: State,
    vms: Vec<Vm>,
    pools: Vec<Pool>,
    /// Promised to a VM that starts, and to be free before it does.
    starting: u64,
    now: u64,
    plans: Vec<VmPlan>,
    /// Free memory when the mechanisms have done their part and guests theirs not yet.
    reclaimed: u64,
}

impl Host {
    fn new(budget: u64, vms: Vec<Vm>) -> Host {
        let thresholds = Thresholds::default_for(Pages(budget));
        Host {
            budget,
            thresholds,
            state: State::High,
            vms,
            pools: Vec::new(),
            starting: 0,
            now: 0,
            plans: vec![],
            reclaimed: 0,
        }
    }

    fn free(&self) -> u64 {
        self.budget - self.vms.iter().map(|v| v.consumed).sum::<u64>()
    }

    /// One second: the policy decides, then guests and mechanisms do their part. Guests touch only
    /// a part of what they want per second, and allocation stops when nothing is free.
    fn second(&mut self) {
        let decision = decide(Snapshot {
            trigger: "period".into(),
            before: self.state,
            thresholds: self.thresholds,
            budget: Pages(self.budget),
            free: Pages(self.free()),
            overhead: Pages(0),
            vms: self.vms.iter().map(Vm::state).collect(),
            pools: self.pools.clone(),
            starting: Pages(self.starting),
            room: Pages(self.starting),
            policy: Default::default(),
            nodes: Vec::new(),
            outside: Vec::new(),
        });
        self.state = decision.state;
        self.plans = decision.plans;
        for (vm, p) in self.vms.iter_mut().zip(&self.plans) {
            // Guarantees, at the moment of asking.
            assert!(vm.consumed - p.evict.0 >= vm.demand.min.0.min(vm.consumed), "{p:?}");
            assert!(p.leave.0 >= vm.demand.min.0.min(vm.consumed), "{p:?}");
            assert!(vm.size - p.balloon_goal.0 >= vm.demand.min.0, "{p:?}");
            vm.balloon_goal = p.balloon_goal.0;
            vm.evict = p.evict.0;
            vm.leave = p.leave.0;
            vm.blocked = p.block;
        }
        for i in 0..self.vms.len() {
            self.balloon(i);
            self.evict(i);
        }
        self.reclaimed = self.free();
        for i in 0..self.vms.len() {
            let free = self.free();
            self.touch(i, free);
        }
        self.now += 1;
    }

    fn balloon(&mut self, i: usize) {
        let vm = &mut self.vms[i];
        let out = vm.control.step(&BalloonInput {
            now: Duration::from_secs(self.now),
            size: Pages(vm.size),
            most: None,
            goal: Pages(vm.balloon_goal),
            has_device: vm.driver != Driver::None,
            driver_alive: vm.driver != Driver::None,
            reported: Some(Pages(vm.balloon)),
            discarded: vm.discarded,
            consumed: Some(Pages(vm.consumed)),
            guest_available: Some(Pages(vm.size - vm.balloon)),
            guest_total: Some(Pages(vm.size)),
            guest_stats_age: Some(Duration::ZERO),
        });
        vm.asked = out.command.map_or(vm.asked, |c| c.0);
        (vm.health, vm.limit, vm.rate, vm.short) = (out.health, out.limit, out.rate, out.short);
        if let Driver::Follows(rate) = vm.driver {
            if vm.asked > vm.balloon {
                vm.balloon += rate.min(vm.asked - vm.balloon);
                vm.given = vm.given.max(vm.balloon);
            } else {
                vm.balloon -= rate.min(vm.balloon - vm.asked);
            }
            // The guest gives up what it can spare best: what is backed nowhere, then swapped.
            let given = vm.consumed.saturating_sub(vm.room());
            vm.consumed -= given;
            vm.discarded += given;
            vm.swapped = vm.swapped.min(vm.room() - vm.consumed);
        }
    }

    /// The pager evicts no faster than this, pages per second.
    fn evict(&mut self, i: usize) {
        let vm = &mut self.vms[i];
        let pages = vm.evict.min(500).min(vm.consumed.saturating_sub(vm.leave));
        vm.consumed -= pages;
        vm.swapped += pages;
    }

    fn touch(&mut self, i: usize, free: u64) {
        let vm = &mut self.vms[i];
        let wants = vm.used.min(vm.room()).saturating_sub(vm.consumed);
        if !vm.blocked {
            let pages = wants.min(300).min(free);
            vm.consumed += pages;
            // What its balloon gave back is nearer than what is swapped.
            let returned = pages.min(vm.given - vm.balloon.min(vm.given));
            vm.given -= returned;
            vm.swapped = vm.swapped.saturating_sub(pages - returned);
        }
    }
}

/// Two VMs of 4,096 pages that want all of it, on 5,760: the paper's figure 7 in miniature. The
/// idle one has what it once touched, and gives it up to the balloon.
#[test]
fn idle_memory_moves_to_the_busy_vm() {
    let mut idle = Vm::new(1, 100, 0, 4_096, 4_096, Driver::Follows(400));
    let busy = Vm::new(2, 100, 0, 4_096, 4_096, Driver::Follows(400));
    idle.demand.tax = TaxRate::NONE;
    let mut host = Host::new(5_760, vec![idle, busy]);
    host.vms[1].demand.tax = TaxRate::NONE;
    for _ in 0..100 {
        host.second();
    }
    let half = (5_760 - host.thresholds.goal().0) / 2;
    for vm in &host.vms {
        assert!(vm.consumed.abs_diff(half) < 100, "{} against {half}", vm.consumed);
    }
    // The tax goes up, and one of them turns out to be idle.
    host.vms[0].demand.active = Pages(160);
    host.vms[0].used = 160;
    for vm in &mut host.vms {
        vm.demand.tax = TaxRate::default();
    }
    for _ in 0..200 {
        host.second();
    }
    let (idle, busy) = (host.vms[0].consumed, host.vms[1].consumed);
    assert!(busy > half * 13 / 10, "over 30% more for the busy VM: {busy} from {half}");
    assert!(idle < half * 6 / 10, "{idle}");
    assert_eq!(host.state, State::High);
}

fn any_driver() -> impl Strategy<Value = Driver> {
    prop_oneof![
        4 => (50u64..2_000).prop_map(Driver::Follows),
        1 => Just(Driver::None),
        1 => Just(Driver::Dead),
    ]
}

fn vms(drivers: impl Strategy<Value = Driver>) -> impl Strategy<Value = Vec<Vm>> {
    let one = (1u32..1_000, 500u64..6_000, 0.0f64..1.0, 0.0f64..1.0, drivers);
    proptest::collection::vec(one, 2..7).prop_map(|list| {
        list.into_iter()
            .enumerate()
            .map(|(i, (shares, size, min, used, driver))| {
                let min = (size as f64 * min / 2.0) as u64;
                Vm::new(i as u32, shares, min, size, (size as f64 * used) as u64, driver)
            })
            .collect()
    })
}

/// A budget that admits the VMs: their guarantees and the goal fit.
fn budget(vms: &[Vm], part: f64) -> u64 {
    let size: u64 = vms.iter().map(|v| v.size).sum();
    let min: u64 = vms.iter().map(|v| v.demand.min.0).sum();
    (min as f64 * 1.1) as u64 + ((size - min) as f64 * part) as u64 + 100
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} size {} min {} shares {} used {} {:?} {}: consumed {} balloon {} of {} swapped {}",
            self.demand.id,
            self.size,
            self.demand.min.0,
            self.demand.shares,
            self.used,
            self.driver,
            self.health,
            self.consumed,
            self.balloon,
            self.balloon_goal,
            self.swapped
        )
    }
}

/// A start is given its room while guests go on wanting all they can get, whatever their drivers
/// do; nobody waits that has no more than it is to have beside the newcomer, and nobody falls below its min.
fn room_is_made(vms: Vec<Vm>, part: f64, size: f64) -> Result<(), TestCaseError> {
    let mut host = Host::new(budget(&vms, part), vms);
    for _ in 0..100 {
        host.second();
    }
    let promised: u64 = host.vms.iter().map(|vm| vm.demand.min.0).sum();
    let unreserved = (host.budget - host.thresholds.goal().0).saturating_sub(promised);
    host.starting = (unreserved as f64 * size) as u64;
    let enough = host.starting + host.thresholds.lower_edge(State::High).0;
    let mut given = false;
    for _ in 0..200 {
        let before: Vec<u64> = host.vms.iter().map(|vm| vm.consumed).collect();
        host.second();
        for ((vm, p), had) in host.vms.iter().zip(&host.plans).zip(before) {
            let taken = had.saturating_sub(p.leave.0);
            prop_assert!(taken == 0 || p.leave >= vm.demand.min, "{p:?}");
            // One that has too much, and is not asked for it because others are, is left what it has.
            let is_to_have = match p.reason {
                Reason::Spared { target, .. } => target,
                _ => p.leave,
            };
            prop_assert!(
                !p.block || had > is_to_have.0,
                "it has no more than it is to have: {p:?}"
            );
        }
        given |= host.reclaimed >= enough;
    }
    prop_assert!(given, "{} of {enough}: {:?}", host.reclaimed, host.vms);
    Ok(())
}

/// In low one of four is spared, and waits.
#[test]
fn who_is_spared_and_waits_has_more_than_it_is_to_have() {
    let follows = Driver::Follows(50);
    let vms = vec![
        Vm::new(0, 865, 136, 500, 342, follows),
        Vm::new(1, 779, 790, 1_800, 1_786, Driver::None),
        Vm::new(2, 661, 0, 1_008, 770, follows),
        Vm::new(3, 524, 0, 500, 135, follows),
    ];
    room_is_made(vms, 0.3, 0.1).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// With drivers that follow, constant inputs lead to free memory above the high threshold, in
    /// the high state, and then nothing changes any more.
    #[test]
    fn constant_inputs_lead_to_rest(
        vms in vms((50u64..2_000).prop_map(Driver::Follows)), part in 0.2f64..0.9,
    ) {
        let mut host = Host::new(budget(&vms, part), vms);
        for _ in 0..400 {
            host.second();
        }
        let picture =
            |h: &Host| h.vms.iter().map(|v| (v.consumed, v.balloon, v.asked)).collect::<Vec<_>>();
        let before = picture(&host);
        prop_assert_eq!(host.state, State::High, "{:?}", host.vms);
        for _ in 0..60 {
            host.second();
            prop_assert_eq!(&picture(&host), &before, "{:?}", &host.vms);
            prop_assert!(host.plans.iter().all(|p| p.evict.is_zero() && !p.block));
        }
    }

    /// Whatever the drivers do, and although guests fault everything back in that was evicted:
    /// reclamation brings free memory above the soft threshold nearly every second and above the
    /// high one in time, guarantees hold (asserted in `second`), and what VMs want of their min
    /// they get.
    #[test]
    fn free_memory_reaches_the_goal_whatever_drivers_do(
        vms in vms(any_driver()), part in 0.2f64..0.9,
    ) {
        let mut host = Host::new(budget(&vms, part), vms);
        for _ in 0..100 {
            host.second();
        }
        let (mut high, mut reached, mut most) = (0, false, vec![0; host.vms.len()]);
        for _ in 0..200 {
            host.second();
            high += u32::from(host.reclaimed >= host.thresholds.lower_edge(State::High).0);
            reached |= host.reclaimed >= host.thresholds.upper_edge(State::High).0
                || host.state == State::High;
            for (most, vm) in most.iter_mut().zip(&host.vms) {
                *most = vm.consumed.max(*most);
            }
        }
        prop_assert!(reached && high > 150, "{reached} {high} of 200: {:?}", host.vms);
        for (most, vm) in most.iter().zip(&host.vms) {
            prop_assert!(*most >= vm.used.min(vm.demand.min.0), "{:?}", host.vms);
        }
    }

    /// The guests stop wanting anything: with drivers of all kinds the goal is reached and kept.
    #[test]
    fn pressure_that_ends_leaves_the_host_in_high(
        vms in vms(any_driver()), part in 0.2f64..0.9,
    ) {
        let mut host = Host::new(budget(&vms, part), vms);
        for _ in 0..100 {
            host.second();
        }
        for vm in &mut host.vms {
            vm.used = 0;
        }
        for _ in 0..200 {
            host.second();
        }
        prop_assert_eq!(host.state, State::High);
    }

    /// The same where VMs are in pools: constant inputs lead to rest, and pools that have a limit hold
    /// it as far as guarantees let them.
    #[test]
    fn pools_come_to_rest_within_their_limits(
        vms in vms((50u64..2_000).prop_map(Driver::Follows)), part in 0.2f64..0.9,
        places in proptest::collection::vec(proptest::option::of(0u32..3), 7),
        bounds in proptest::collection::vec((1u32..1_000, 0.0f64..0.3, 0.3f64..1.5), 3),
    ) {
        let mut host = Host::new(budget(&vms, part), vms);
        for (vm, place) in host.vms.iter_mut().zip(&places) {
            vm.pool = place.map(PoolId);
        }
        let free = host.budget - host.thresholds.goal().0;
        let of = |part: f64| Pages((free as f64 * part) as u64);
        host.pools = bounds
            .iter()
            .zip(0..)
            .map(|(&(shares, min, max), i)| Pool {
                id: PoolId(i),
                name: format!("p{i}"),
                parent: (i == 2).then_some(PoolId(0)),
                shares,
                // Guarantees of VMs alone fill the host now and then.
                min: if part > 0.5 { of(min / 3.0) } else { Pages::ZERO },
                max: (max < 1.0).then(|| of(max)),
                expandable: true,
                tax: None,
            })
            .collect();
        for _ in 0..400 {
            host.second();
        }
        let picture =
            |h: &Host| h.vms.iter().map(|v| (v.consumed, v.balloon, v.asked)).collect::<Vec<_>>();
        let before = picture(&host);
        prop_assert_eq!(host.state, State::High, "{:?}", host.vms);
        for _ in 0..60 {
            host.second();
            prop_assert_eq!(&picture(&host), &before, "{:?} {:?}", &host.vms, &host.pools);
        }
        for pool in &host.pools {
            let inside = |vm: &&Vm| {
                vm.pool == Some(pool.id)
                    || (pool.id == PoolId(0) && vm.pool == Some(PoolId(2)))
            };
            let held: u64 = host.vms.iter().filter(inside).map(|vm| vm.consumed).sum();
            let promised: u64 = host.vms.iter().filter(inside).map(|vm| vm.demand.min.0).sum();
            let below: u64 = host.pools.iter().filter(|p| p.parent == Some(pool.id)).map(|p| p.min.0).sum();
            prop_assert!(pool.max.is_none_or(|max| held <= max.0.max(promised + below)), "{pool:?} {held}");
        }
    }

    /// See `room_is_made`.
    #[test]
    fn room_for_a_start_is_made_and_robs_nobody(
        vms in vms(any_driver()), part in 0.3f64..0.9, size in 0.1f64..0.9,
    ) {
        room_is_made(vms, part, size)?;
    }

    /// A limit lowered at run time is enforced, in plenty too.
    #[test]
    fn a_lowered_limit_is_enforced(vms in vms(any_driver()), part in 0.5f64..2.0) {
        let mut host = Host::new(budget(&vms, part), vms);
        for _ in 0..100 {
            host.second();
        }
        let max = host.vms[0].size / 2;
        host.vms[0].demand.max = Pages(max);
        host.vms[0].used = host.vms[0].used.min(max);
        for _ in 0..200 {
            host.second();
        }
        prop_assert!(host.vms[0].consumed <= max, "{:?}", host.vms[0]);
    }
}

/// Balloons that turn out to be dear are let down in exchange for paging while guests go on wanting all
/// they can get; reclamation keeps up as it did before, and guarantees hold (asserted in `second`). Not
/// on every host: where a guest takes back within a second more than is free above the low threshold, low
/// takes by all tools, and balloons may end a little larger (ADR 19). So it is counted.
#[test]
fn dear_balloons_are_exchanged_and_the_goal_is_kept() {
    const HOSTS: usize = 600;
    let mut runner = TestRunner::deterministic();
    let hosts = (vms((50u64..2_000).prop_map(Driver::Follows)), 0.2f64..0.9);
    let (mut grown, mut most, mut sums) = (0, 0.0f64, (0, 0));
    for _ in 0..HOSTS {
        let (vms, part) = hosts.new_tree(&mut runner).unwrap().current();
        let mut host = Host::new(budget(&vms, part), vms);
        for _ in 0..100 {
            host.second();
        }
        let before: u64 = host.vms.iter().map(|vm| vm.balloon).sum();
        host.vms.iter_mut().for_each(|vm| vm.dear = true);
        let (mut high, mut reached) = (0, false);
        for _ in 0..300 {
            host.second();
            high += u32::from(host.reclaimed >= host.thresholds.lower_edge(State::High).0);
            reached |= host.reclaimed >= host.thresholds.upper_edge(State::High).0
                || host.state == State::High;
        }
        assert!(reached && high > 225, "{reached} {high} of 300: {:?}", host.vms);
        let after: u64 = host.vms.iter().map(|vm| vm.balloon).sum();
        if after > before {
            eprintln!("{before} -> {after}: {:?}", host.vms);
            grown += 1;
            most = most.max(after as f64 / before as f64);
        }
        sums = (sums.0 + before, sums.1 + after);
    }
    eprintln!(
        "{grown} of {HOSTS} hosts have larger balloons, {most:.2} times at most; all {sums:?}"
    );
    assert!(grown * 100 <= HOSTS && most < 1.1, "{grown} of {HOSTS}, {most:.2} times");
    assert!(sums.1 * 5 < sums.0 * 4, "{sums:?}");
}
