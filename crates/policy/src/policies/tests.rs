use super::*;
use crate::balloon::Health;
use crate::pools::PoolId;
use crate::shares::{TaxRate, targets};
use proptest::prelude::*;

fn vm(id: u32, shares: u32, min: u64, max: u64, active: u64) -> VmState {
    VmState {
        demand: VmDemand {
            id: VmId(id),
            shares,
            min: Pages(min),
            max: Pages(max),
            tax: TaxRate::default(),
            active: Pages(active),
        },
        consumed: Pages(max),
        size: Pages(max),
        balloon_goal: Pages(0),
        balloon_health: Health::Healthy,
        balloon_limit: Pages(max),
        balloon_rate: None,
        short: false,
        pool: None,
        overhead: Pages(0),
        beyond: Pages::ZERO,
        saved: Pages::ZERO,
        tools: crate::Tools::default(),
        wants_more: false,
        swap_free: Pages(max),
    }
}

fn shared_out(policy: &Policy, available: u64, vms: &[VmState]) -> Vec<u64> {
    let read = policy.demands(Pages(available), &[], vms);
    targets(Pages(available), &read).iter().map(|e| e.target.0).collect()
}

fn of(kind: PolicyKind) -> Policy {
    Policy { kind, ..Policy::default() }
}

#[test]
fn kinds_have_one_name_everywhere() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
        assert_eq!(kind.to_string(), kind.name());
    }
    let wants = |of: fn(PolicyKind) -> bool| PolicyKind::ALL.map(of);
    assert_eq!(wants(PolicyKind::wants_misses), [false, false, true, false]);
    assert_eq!(wants(PolicyKind::wants_pressure), [false, false, false, true]);
    let error = "ratio".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.contains("'ratio'") && error.contains("idle-tax"), "{error}");
}

#[test]
fn the_papers_reading_changes_nothing() {
    let vms = [vm(1, 100, 10, 1_000, 50), vm(2, 200, 0, 500, 500)];
    let own: Vec<VmDemand> = vms.iter().map(|v| v.demand).collect();
    assert_eq!(Policy::default().demands(Pages(700), &[], &vms), own);
    assert_eq!(Policy::default().note(&own[0], &own[0]), None);
}

#[test]
fn the_graduated_rate_is_the_operators_at_half_idle() {
    let rate = |active| graduated::read(vm(1, 100, 0, 1_000, active).demand).tax.get();
    assert_eq!([rate(1_000), rate(500), rate(0)], [0.0, 0.75, 0.938]);
    let none = VmDemand { tax: TaxRate::NONE, ..vm(1, 100, 0, 1_000, 0).demand };
    assert_eq!(graduated::read(none).tax, TaxRate::NONE);
    // So the idler one of two gets less than under the flat tax, and the busier one more.
    let vms = [vm(1, 100, 0, 1_000, 50), vm(2, 100, 0, 1_000, 600)];
    let flat = shared_out(&of(PolicyKind::IdleTax), 900, &vms);
    let graduated = shared_out(&of(PolicyKind::GraduatedTax), 900, &vms);
    assert!(graduated[0] < flat[0] && graduated[1] > flat[1], "{flat:?} {graduated:?}");
}

#[test]
fn pressure_moves_memory_to_who_waits() {
    let vms = [vm(1, 1_000, 0, 1_000, 1_000), vm(2, 1_000, 0, 1_000, 1_000)];
    let mut policy = of(PolicyKind::Pressure);
    assert_eq!(shared_out(&policy, 1_000, &vms), [500, 500], "no report: shares");
    policy.pressure = vec![VmPressure { id: VmId(2), some: 0.21 }];
    assert_eq!(shared_out(&policy, 900, &vms), [300, 600]);
    policy.pressure = vec![VmPressure { id: VmId(2), some: f64::NAN }];
    assert_eq!(shared_out(&policy, 1_000, &vms), [500, 500]);
    policy.pressure = vec![VmPressure { id: VmId(9), some: 1.0 }];
    assert_eq!(shared_out(&policy, 1_000, &vms), [500, 500], "a VM that is gone");
}

#[test]
fn misses_move_memory_to_where_it_spares_most() {
    let vms = [vm(1, 1_000, 0, 1_000, 900), vm(2, 1_000, 0, 1_000, 900)];
    let mut policy = of(PolicyKind::MissRatio);
    // The first saves 10 a page up to 600; the second 1 a page up to 200 and 5 on average to 400.
    policy.misses = vec![
        VmMisses { id: VmId(1), points: vec![(Pages(0), 6_000.0), (Pages(600), 0.0)] },
        VmMisses {
            id: VmId(2),
            points: vec![(Pages(400), 0.0), (Pages(0), 2_000.0), (Pages(200), 1_800.0)],
        },
    ];
    let out = shared_out(&policy, 800, &vms);
    assert!(out[0].abs_diff(600) <= 1 && out[1].abs_diff(200) <= 1, "{out:?}");
    let out = shared_out(&policy, 1_200, &vms);
    assert!(out[0].abs_diff(600) <= 1 && out[1].abs_diff(600) <= 1, "the rest by shares: {out:?}");
    let note = policy.note(&vms[1].demand, &vms[1].demand).unwrap();
    assert!(note.contains("by 3 points of its miss curve"), "{note}");
    // A guarantee is given first.
    let mut guaranteed = vms;
    guaranteed[1].demand.min = Pages(500);
    assert_eq!(shared_out(&policy, 800, &guaranteed)[1], 500);
    // Who gains as much gets as much.
    for m in &mut policy.misses {
        m.points = vec![(Pages(0), 6_000.0), (Pages(600), 0.0)];
    }
    let out = shared_out(&policy, 801, &vms);
    assert!(out[0].abs_diff(out[1]) <= 1 && out[0] + out[1] == 801, "{out:?}");
}

/// What VMs with these curves get of so much; VMs are numbered from 1.
fn by_misses(available: u64, vms: &[VmState], curves: &[&[(u64, f64)]]) -> Vec<u64> {
    let points = |curve: &[(u64, f64)]| curve.iter().map(|&(p, m)| (Pages(p), m)).collect();
    let misses = (1..).zip(curves);
    let misses = misses.map(|(id, curve)| VmMisses { id: VmId(id), points: points(curve) });
    let policy = Policy { misses: misses.collect(), ..of(PolicyKind::MissRatio) };
    shared_out(&policy, available, vms)
}

fn near(out: &[u64], wanted: &[u64]) {
    let off = out.iter().zip(wanted).any(|(a, b)| a.abs_diff(*b) > 1);
    assert!(!off && out.len() == wanted.len(), "{out:?}, not {wanted:?}");
}

/// Of 600, 75 each are not at stake.
#[test]
fn a_curves_hull_decides_neither_a_plateau_nor_a_cliff_alone() {
    let vms = [vm(1, 1_000, 0, 1_000, 900), vm(2, 1_000, 0, 1_000, 900)];
    // 1 a page at first, but 5 a page in all.
    let cliff: &[(u64, f64)] = &[(0, 2_000.0), (200, 1_800.0), (400, 0.0)];
    near(&by_misses(600, &vms, &[&[(0, 3_000.0), (1_000, 0.0)], cliff]), &[200, 400]);
    // 50 a page at first, then 2.
    let bent: &[(u64, f64)] = &[(0, 6_000.0), (100, 1_000.0), (600, 0.0)];
    near(&by_misses(600, &vms, &[bent, &[(0, 5_000.0), (1_000, 0.0)]]), &[100, 500]);
    near(&by_misses(600, &vms, &[bent, &[(0, 1_700.0), (1_000, 0.0)]]), &[525, 75]);
    // What is no number of misses is passed over.
    let odd: &[(u64, f64)] = &[
        (0, 6_000.0),
        (90, f64::NAN),
        (95, f64::INFINITY),
        (100, 1_000.0),
        (300, -1e9),
        (600, 0.0),
    ];
    near(&by_misses(600, &vms, &[odd, &[(0, 5_000.0), (1_000, 0.0)]]), &[100, 500]);
    // Where more spares nothing it is shared out as by default.
    let level: &[(u64, f64)] = &[(0, 5.0), (1_000, 5.0)];
    near(&by_misses(800, &vms, &[level, &[(0, 9.0), (100, 0.0)]]), &[400, 400]);
}

/// Idle-tax gives the smaller VM its 100, and the larger one 500: 25 and 125 are not at stake.
#[test]
fn misses_count_by_shares_for_each_page_of_max() {
    let vms = [vm(1, 1_000, 0, 1_000, 900), vm(2, 1_000, 0, 100, 100)];
    let of = |gain: f64| {
        by_misses(600, &vms, &[&[(0, 50_000.0), (1_000, 0.0)], &[(0, 100.0 * gain), (100, 0.0)]])
    };
    // 50 at one share a page, against 6 and 4 at ten.
    near(&of(6.0), &[500, 100]);
    near(&of(4.0), &[575, 25]);
}

/// Of 900, 75 each are not at stake.
#[test]
fn equal_gains_share_all_there_is_before_a_smaller_one_gets_any() {
    let vms = [1, 2, 3].map(|id| vm(id, 1_000, 0, 1_000, 900));
    let steep: &[(u64, f64)] = &[(0, 6_000.0), (600, 0.0)];
    let out = by_misses(900, &vms, &[steep, steep, &[(0, 5_000.0), (1_000, 0.0)]]);
    near(&out, &[412, 412, 75]);
}

/// What pools have is by shares, whatever the scale of misses; inside, and among the VMs beside them, misses decide.
#[test]
fn beside_pools_misses_decide_among_siblings_alone() {
    let steep = |id, misses| VmMisses {
        id: VmId(id),
        points: vec![(Pages(0), misses), (Pages(100_000), 0.0)],
    };
    let mut vms = Vec::from([1, 2, 3, 4].map(|id| vm(id, 1_000, 0, 100_000, 100_000)));
    vms.iter_mut().for_each(|vm| vm.demand.tax = TaxRate::NONE);
    let pool = |id, parent| Pool {
        id: PoolId(id),
        name: format!("p{id}"),
        parent,
        shares: 2_000,
        min: Pages::ZERO,
        max: None,
        expandable: false,
        tax: None,
    };
    // 1 and 2 beside a pool with 3, and one within it with 4.
    let pools = [pool(0, None), pool(1, Some(PoolId(0)))];
    (vms[2].pool, vms[3].pool) = (Some(PoolId(0)), Some(PoolId(1)));
    let misses = vec![steep(1, 1e6), steep(2, 1.0), steep(3, 1e3), steep(4, 1e3)];
    let policy = Policy { misses, ..of(PolicyKind::MissRatio) };
    let available = Pages(100_000);
    let read = policy.demands(available, &pools, &vms);
    assert_eq!(read[0].shares + read[1].shares, 2_000, "their own: {read:?}");
    assert_eq!(read[2].shares, 1_000);
    assert!(read[0].shares > 1_700, "{read:?}");
    let members: Vec<_> = vms.iter().map(VmState::member).collect();
    let given = |read: &[VmDemand]| {
        let (got, _) = crate::pools::divide(available, &pools, read, &members);
        got.iter().map(|e| e.target.0).collect::<Vec<u64>>()
    };
    let got = given(&read);
    near(&[got[0] + got[1], got[2] + got[3]], &[50_000, 50_000]);
    near(&[got[2], got[3]], &[16_667, 33_333]);
    // With a tax, memory that spares the VMs of the pool less counts as idle: they lose no more by it than by idleness.
    let mut taxed = read;
    taxed.iter_mut().for_each(|vm| vm.tax = TaxRate::default());
    let got = given(&taxed);
    assert!((50_000..=80_000).contains(&(got[0] + got[1])), "at a price of 4: {got:?}");
    // A pool whose parent is not there is the host's, and so are its siblings.
    let astray = [pool(0, Some(PoolId(9)))];
    vms[3].pool = Some(PoolId(8));
    let read = policy.demands(available, &astray, &vms);
    assert_eq!(read[2].shares, policy.demands(available, &[], &vms)[2].shares, "alone in its pool");
    assert_eq!([0, 1, 3].map(|i| read[i].shares).iter().sum::<u32>(), 3_000, "{read:?}");
}

/// Not how much of it was seen to be active, and to the page whatever the numbers are.
#[test]
fn what_misses_give_counts_as_active() {
    let vms = [vm(1, 1_000, 0, 1_000, 0), vm(2, 1_000, 0, 1_000, 1_000)];
    // By default the first, which is idle, gets 128 of 640, and the other 512: 32 and 128 are not at stake.
    let out = by_misses(640, &vms, &[&[(0, 5_120.0), (512, 0.0)], &[(0, 1.0), (1_000, 0.0)]]);
    near(&out, &[512, 128]);
}

#[test]
fn a_quarter_of_what_the_default_gives_is_not_at_stake() {
    let vms = [vm(1, 1_000, 0, 1_000, 1_000), vm(2, 1_000, 0, 1_000, 1_000)];
    let mut policy = of(PolicyKind::MissRatio);
    let steep = |id, misses| VmMisses {
        id: VmId(id),
        points: vec![(Pages(0), misses), (Pages(1_000), 0.0)],
    };
    policy.misses = vec![steep(1, 1e9), steep(2, 1.0)];
    let out = shared_out(&policy, 800, &vms);
    assert!(out[0].abs_diff(700) <= 1 && out[1].abs_diff(100) <= 1, "{out:?}");
    // What is not known of the one does not cost the other more.
    policy.misses.pop();
    assert_eq!(shared_out(&policy, 800, &vms), [400, 400]);
}

#[test]
fn without_a_curve_misses_give_what_the_default_gives() {
    let vms = [vm(1, 1_000, 0, 1_000, 1_000), vm(2, 1_000, 0, 1_000, 1_000)];
    let mut policy = of(PolicyKind::MissRatio);
    assert_eq!(shared_out(&policy, 900, &vms), [450, 450], "none is known");
    // However steep the curve of the other.
    policy.misses =
        vec![VmMisses { id: VmId(1), points: vec![(Pages(0), 1e9), (Pages(1_000), 0.0)] }];
    assert_eq!(shared_out(&policy, 900, &vms), [450, 450]);
    // What the other can use no more is not left over.
    policy.misses[0].points = vec![(Pages(0), 1e9), (Pages(100), 0.0)];
    assert_eq!(shared_out(&policy, 900, &vms).iter().sum::<u64>(), 900);
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let points = proptest::collection::vec((0u64..9_000, 0.0f64..1e6), 0..6);
    let misses = proptest::collection::vec((0u32..8, points), 0..8);
    let pressure = proptest::collection::vec((0u32..8, -1.0f64..2.0), 0..8);
    (0usize..4, misses, pressure).prop_map(|(kind, misses, pressure)| Policy {
        kind: PolicyKind::ALL[kind],
        misses: misses
            .into_iter()
            .map(|(id, points)| VmMisses {
                id: VmId(id),
                points: points.into_iter().map(|(p, m)| (Pages(p), m)).collect(),
            })
            .collect(),
        pressure: pressure
            .into_iter()
            .map(|(id, some)| VmPressure { id: VmId(id), some })
            .collect(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is reported: min and max hold, and all that is available is shared out.
    #[test]
    fn guarantees_hold_under_every_policy(
        policy in any_policy(),
        list in proptest::collection::vec((1u32..5_000, 0u64..4_000, 1u64..8_000, 0u64..9_000), 1..8),
        part in 0.0f64..1.2,
    ) {
        let vms: Vec<VmState> = list
            .iter()
            .enumerate()
            .map(|(i, &(shares, min, max, active))| vm(i as u32, shares, min, max, active))
            .collect();
        let floor: u64 = vms.iter().map(|v| v.demand.min.min(v.demand.max).0).sum();
        let ceil: u64 = vms.iter().map(|v| v.demand.max.0).sum();
        let available = (ceil as f64 * part) as u64;
        let out = shared_out(&policy, available, &vms);
        for (vm, target) in vms.iter().zip(&out) {
            prop_assert!(*target >= vm.demand.min.min(vm.demand.max).0, "{:?}", out);
            prop_assert!(*target <= vm.demand.max.0, "{:?}", out);
        }
        prop_assert_eq!(out.iter().sum::<u64>(), available.clamp(floor, ceil));
    }

    /// More shares never bring less, under the readings that use them.
    #[test]
    fn shares_are_monotone(
        kind in prop_oneof![Just(PolicyKind::GraduatedTax), Just(PolicyKind::Pressure)],
        list in proptest::collection::vec((1u32..5_000, 0u64..500, 1u64..8_000, 0u64..9_000), 2..8),
        more in 1u32..5_000, part in 0.0f64..1.0,
    ) {
        let mut vms: Vec<VmState> = list
            .iter()
            .enumerate()
            .map(|(i, &(shares, min, max, active))| vm(i as u32, shares, min, max, active))
            .collect();
        let ceil: u64 = vms.iter().map(|v| v.demand.max.0).sum();
        let available = (ceil as f64 * part) as u64;
        let before = shared_out(&of(kind), available, &vms)[0];
        vms[0].demand.shares += more;
        prop_assert!(shared_out(&of(kind), available, &vms)[0] >= before);
    }
}
