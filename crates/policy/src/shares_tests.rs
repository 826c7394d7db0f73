use proptest::prelude::*;

use super::*;

fn vm(id: u32, shares: u32, min: u64, max: u64, tau: f64, active: u64) -> VmDemand {
    VmDemand {
        id: VmId(id),
        shares,
        min: Pages(min),
        max: Pages(max),
        tax: TaxRate::new(tau).unwrap(),
        active: Pages(active),
    }
}

fn pages(result: &[Entitlement]) -> Vec<u64> {
    result.iter().map(|e| e.target.0).collect()
}

/// The paper's formula, letter by letter.
fn paper_rho(vm: &VmDemand, held: u64) -> f64 {
    let p = held as f64;
    let f = (vm.active.0 as f64 / p).min(1.0);
    let k = 1.0 / (1.0 - vm.tax.get());
    f64::from(vm.shares) / (p * (f + k * (1.0 - f)))
}

/// Oracle: grant page by page to the largest rho.
fn grant_page_by_page(available: u64, vms: &[VmDemand]) -> Vec<u64> {
    let mut held: Vec<u64> = vms.iter().map(|v| v.min.0).collect();
    let mut left = available.saturating_sub(held.iter().sum());
    while left > 0 {
        let best = (0..vms.len()).filter(|&i| held[i] < vms[i].max.0).max_by(|&a, &b| {
            let rho = |i: usize| paper_rho(&vms[i], held[i] + 1);
            rho(a).total_cmp(&rho(b)).then(b.cmp(&a))
        });
        let Some(i) = best else { break };
        held[i] += 1;
        left -= 1;
    }
    held
}

/// Oracle: everyone starts with everything; revoke page by page from the smallest rho.
fn revoke_page_by_page(available: u64, vms: &[VmDemand]) -> Vec<u64> {
    let mut held: Vec<u64> = vms.iter().map(|v| v.max.0).collect();
    while held.iter().sum::<u64>() > available {
        let victim = (0..vms.len()).filter(|&i| held[i] > vms[i].min.0).min_by(|&a, &b| {
            paper_rho(&vms[a], held[a]).total_cmp(&paper_rho(&vms[b], held[b])).then(b.cmp(&a))
        });
        let Some(i) = victim else { break };
        held[i] -= 1;
    }
    held
}

/// Oracle for tau = 0: proportional shares, with those at a bound set aside until none is left.
fn proportional(available: u64, vms: &[VmDemand]) -> Vec<f64> {
    let mut fixed: Vec<Option<f64>> = vec![None; vms.len()];
    loop {
        let left = available as f64 - fixed.iter().flatten().sum::<f64>();
        let shares: f64 =
            (0..vms.len()).filter(|&i| fixed[i].is_none()).map(|i| f64::from(vms[i].shares)).sum();
        let part = |i: usize| left * f64::from(vms[i].shares) / shares;
        let free = || (0..vms.len()).filter(|&i| fixed[i].is_none());
        let (min, max) = (|i: usize| vms[i].min.0 as f64, |i: usize| vms[i].max.0 as f64);
        let lacking: f64 = free().map(|i| (min(i) - part(i)).max(0.0)).sum();
        let spare: f64 = free().map(|i| (part(i) - max(i)).max(0.0)).sum();
        let set: Vec<(usize, f64)> = if lacking > spare {
            free().filter(|&i| part(i) < min(i)).map(|i| (i, min(i))).collect()
        } else {
            free().filter(|&i| part(i) > max(i)).map(|i| (i, max(i))).collect()
        };
        if set.is_empty() {
            return (0..vms.len()).map(|i| fixed[i].unwrap_or_else(|| part(i))).collect();
        }
        for (i, value) in set {
            fixed[i] = Some(value);
        }
    }
}

#[test]
fn tax_rates_are_checked() {
    for tau in [0.0, 0.5, 0.75, 0.999_999] {
        let tax = TaxRate::new(tau).unwrap();
        assert!((tax.k() * (1.0 - tau) - 1.0).abs() < 1e-6);
    }
    for tau in [1.0, -0.1, 7.5, f64::NAN, f64::INFINITY] {
        let error = TaxRate::new(tau).unwrap_err();
        assert!(error.to_string().contains("at least 0 and below 1"), "{error}");
    }
    assert_eq!(TaxRate::default().k(), 4.0);
    assert_eq!(TaxRate::NONE.k(), 1.0);
    assert_eq!(TaxRate::default().to_string(), "75%");
    // As in journals.
    assert_eq!(TaxRate::try_from(0.3).map(f64::from), Ok(0.3));
    assert!(TaxRate::try_from(1.0).is_err());
}

#[test]
fn rho_is_the_papers_formula() {
    let v = vm(1, 1_000, 0, 10_000, 0.75, 2_000);
    for held in [1, 1_000, 2_000, 2_001, 8_000] {
        assert!((v.rho(Pages(held)) / paper_rho(&v, held) - 1.0).abs() < 1e-9);
    }
    // 2,000 active and 2,000 idle pages at k = 4 are charged as 10,000.
    assert!((v.rho(Pages(4_000)) - 0.1).abs() < 1e-12);
    assert!(v.rho(Pages(0)).is_finite());
}

/// OSDI'02 s.5.4: two VMs of 256 MB with equal shares, about 360 MB available. Without tax each
/// got 179 MB, whatever it used.
#[test]
fn paper_figure_7_before_the_tax() {
    let mib = |n| Pages::from_mib(n).0;
    let (idle, busy) =
        (vm(1, 100, 0, mib(256), 0.0, mib(10)), vm(2, 100, 0, mib(256), 0.0, mib(256)));
    let result = targets(Pages::from_mib(360), &[idle, busy]);
    assert_eq!(pages(&result), [mib(180), mib(180)]);
    assert!(result.iter().all(|e| e.bound == Bound::Shares));
}

/// With tau = 0.75 an idle page costs four active ones. With a of A MiB active in the idle VM, the
/// fixed point without maxima is 4P - 3a = 360 - P, P = (360 + 3a)/5: 78 MiB for a = 10. The busy
/// VM then stops at its 256 MiB and the idle one keeps 104; in a larger busy VM nothing stops it.
#[test]
fn paper_figure_7_after_the_tax() {
    let mib = |n| Pages::from_mib(n).0;
    let idle = vm(1, 100, 0, mib(256), 0.75, mib(10));
    let result = targets(Pages::from_mib(360), &[idle, vm(2, 100, 0, mib(256), 0.75, mib(256))]);
    assert_eq!(pages(&result), [mib(104), mib(256)]);
    assert_eq!(result[1].bound, Bound::Max);
    assert!(result[0].rho < result[1].rho);
    let result = targets(Pages::from_mib(360), &[idle, vm(2, 100, 0, mib(512), 0.75, mib(512))]);
    assert_eq!(pages(&result), [mib(78), mib(282)]);
    assert!((result[0].rho / result[1].rho - 1.0).abs() < 1e-3);
    // A guarantee is kept against any tax.
    let promised = VmDemand { min: Pages::from_mib(128), ..idle };
    let result =
        targets(Pages::from_mib(360), &[promised, vm(2, 100, 0, mib(512), 0.75, mib(512))]);
    assert_eq!(pages(&result), [mib(128), mib(232)]);
    assert_eq!((result[0].bound, result[1].bound), (Bound::Min, Bound::Shares));
}

#[test]
fn plenty_gives_everyone_max_and_want_gives_everyone_min() {
    let vms = [vm(1, 1, 10, 100, 0.75, 5), vm(2, 9, 20, 50, 0.0, 50)];
    let rich = targets(Pages(150), &vms);
    assert_eq!(pages(&rich), [100, 50]);
    assert!(rich.iter().all(|e| e.bound == Bound::Max));
    let poor = targets(Pages(29), &vms);
    assert_eq!(pages(&poor), [10, 20]);
    assert!(poor.iter().all(|e| e.bound == Bound::Min));
    assert_eq!(pages(&targets(Pages(30), &vms)), [10, 20]);
    assert!(targets(Pages(30), &[]).is_empty());
}

#[test]
fn a_guarantee_decides_only_where_shares_would_give_less() {
    let bounds = |available, vms: &[VmDemand]| -> Vec<Bound> {
        targets(Pages(available), vms).iter().map(|e| e.bound).collect()
    };
    let pair = |min| [vm(1, 1, min, 100, 0.0, 0), vm(2, 1, 0, 100, 0.0, 0)];
    assert_eq!(bounds(100, &pair(50)), [Bound::Shares, Bound::Shares], "as much as by shares");
    assert_eq!(bounds(100, &pair(51)), [Bound::Min, Bound::Shares]);
    // What is all guaranteed is all it can use, where there is plenty.
    assert_eq!(bounds(200, &pair(100)), [Bound::Max, Bound::Max]);
}

#[test]
fn odd_demands_are_answered_within_bounds() {
    let vms = [
        vm(1, 0, 0, 100, 0.0, 100),       // no shares: counts as one
        vm(2, 1, 200, 100, 0.0, 0),       // min above max
        vm(3, 1, 0, 0, 0.75, 10),         // no size
        vm(4, u32::MAX, 0, 50, 0.75, 90), // more active than it may hold
    ];
    assert_eq!(pages(&targets(Pages(180), &vms)), [30, 100, 0, 50]);
    let result = targets(Pages(0), &[vm(1, 5, 0, 10, 0.5, 1)]);
    assert_eq!((result[0].target, result[0].bound), (Pages(0), Bound::Shares));
    assert!(result[0].rho.is_finite());
}

#[test]
fn a_remainder_goes_to_the_lowest_ids() {
    let vms = [vm(7, 1, 0, 99, 0.0, 0), vm(3, 1, 0, 99, 0.0, 0), vm(5, 1, 0, 99, 0.0, 0)];
    assert_eq!(pages(&targets(Pages(100), &vms)), [33, 34, 33]);
    assert_eq!(pages(&targets(Pages(101), &vms)), [33, 34, 34]);
}

#[test]
fn ten_thousand_vms_sum_up_exactly() {
    let vms: Vec<VmDemand> = (0..10_000u32)
        .map(|i| {
            let max = 65_536 + u64::from(i % 97) * 1_024;
            vm(i, 1 + i % 1_000, u64::from(i % 7) * 1_000, max, 0.75, u64::from(i % 61) * 1_000)
        })
        .collect();
    let available = vms.iter().map(|v| v.max).sum::<Pages>().0 / 2;
    let result = targets(Pages(available), &vms);
    assert_eq!(result.iter().map(|e| e.target.0).sum::<u64>(), available);
    // The fixed point itself: no page is worth moving.
    let next = |v: &VmDemand, e: &Entitlement| paper_rho(v, e.target.0 + 1);
    let gain = vms
        .iter()
        .zip(&result)
        .filter(|(v, e)| e.target < v.max)
        .map(|(v, e)| next(v, e))
        .fold(0.0, f64::max);
    let loss = vms
        .iter()
        .zip(&result)
        .filter(|(v, e)| e.target > v.min)
        .map(|(v, e)| paper_rho(v, e.target.0))
        .fold(f64::INFINITY, f64::min);
    assert!(gain <= loss * (1.0 + 1e-6), "moving a page would gain: {gain} > {loss}");
}

prop_compose! {
    fn any_vm(id: u32)(
        shares in 1u32..5_000, max in 1u64..400, min in 0.0f64..1.0, active in 0u64..500,
        tau in prop_oneof![Just(0.0), Just(0.75), 0.0f64..0.99], reserve in any::<bool>(),
    ) -> VmDemand {
        let min = if reserve { (max as f64 * min) as u64 } else { 0 };
        vm(id, shares, min, max, tau, active)
    }
}

fn some_vms() -> impl Strategy<Value = Vec<VmDemand>> {
    (1usize..8).prop_flat_map(|n| (0..n as u32).map(any_vm).collect::<Vec<_>>())
}

fn with_available() -> impl Strategy<Value = (Vec<VmDemand>, u64)> {
    some_vms().prop_flat_map(|vms| {
        let all = vms.iter().map(|v| v.max.0).sum::<u64>();
        (Just(vms), 0..all + 50)
    })
}

proptest! {
    /// At the very price of a page it is held, and just below it is not.
    #[test]
    fn a_price_holds_exactly_the_pages_that_cost_no_more(v in any_vm(1), pages in 1u64..450) {
        let claim = Claim::of_vm(&v);
        let price = claim.price(pages);
        for price in [price.next_down(), price, price.next_up()] {
            let dearest = (v.min.0..=v.max.0).rev().find(|&n| claim.price(n) <= price);
            prop_assert_eq!(claim.held(price), dearest.unwrap_or(v.min.0));
        }
    }

    #[test]
    fn bounds_hold_and_pages_are_conserved((vms, available) in with_available()) {
        let result = targets(Pages(available), &vms);
        let (min, max): (u64, u64) =
            (vms.iter().map(|v| v.min.0).sum(), vms.iter().map(|v| v.max.0).sum());
        for (v, e) in vms.iter().zip(&result) {
            prop_assert_eq!(v.id, e.id);
            prop_assert!(v.min <= e.target && e.target <= v.max);
            match e.bound {
                Bound::Min => prop_assert_eq!(e.target, v.min),
                Bound::Max => prop_assert_eq!(e.target, v.max),
                Bound::Shares => prop_assert!(e.target < v.max),
            }
        }
        let total: u64 = pages(&result).iter().sum();
        prop_assert_eq!(total, if min > available { min } else { available.min(max) });
    }

    #[test]
    fn agrees_with_both_page_by_page_oracles((vms, available) in with_available()) {
        let result = pages(&targets(Pages(available), &vms));
        let granted = grant_page_by_page(available, &vms);
        let revoked = revoke_page_by_page(available, &vms);
        for i in 0..vms.len() {
            // A page of rounding: the oracles use the formula as printed, in floating point.
            prop_assert!(result[i].abs_diff(granted[i]) <= 1, "{result:?} {granted:?}");
            prop_assert!(result[i].abs_diff(revoked[i]) <= 1, "{result:?} {revoked:?}");
        }
    }

    #[test]
    fn no_tax_is_proportional_share((mut vms, available) in with_available()) {
        for v in &mut vms {
            v.tax = TaxRate::NONE;
        }
        let available = available
            .max(vms.iter().map(|v| v.min.0).sum())
            .min(vms.iter().map(|v| v.max.0).sum());
        let naive = proportional(available, &vms);
        for (e, part) in targets(Pages(available), &vms).iter().zip(naive) {
            // Whole pages go to the highest bidder one by one (d'Hondt's method), which may favour
            // many shares by up to a page for each of the others.
            let rounding = vms.len() as f64;
            prop_assert!((e.target.0 as f64 - part).abs() <= rounding, "{e:?} {part}");
        }
    }

    /// Raising a VM's own shares, min, max or activity never lowers its own target.
    #[test]
    fn monotone(
        (vms, available) in with_available(), pick in any::<prop::sample::Index>(),
        more in 1u64..300,
    ) {
        let i = pick.index(vms.len());
        let before = targets(Pages(available), &vms)[i].target;
        let changes: [fn(&mut VmDemand, u64); 4] = [
            |v, n| v.shares += n as u32,
            |v, n| v.active += Pages(n),
            |v, n| v.max += Pages(n),
            |v, n| v.min = Pages((v.min.0 + n).min(v.max.0)),
        ];
        for (which, change) in changes.iter().enumerate() {
            let mut changed = vms.clone();
            change(&mut changed[i], more);
            let after = targets(Pages(available), &changed)[i].target;
            prop_assert!(after >= before, "change {which}: {before:?} fell to {after:?}");
        }
        let richer = targets(Pages(available + more), &vms);
        for (e, old) in richer.iter().zip(targets(Pages(available), &vms)) {
            prop_assert!(e.target >= old.target, "more memory, smaller target");
        }
    }

    #[test]
    fn order_does_not_matter(
        (vms, order) in some_vms().prop_flat_map(|v| (Just(v.clone()), Just(v).prop_shuffle())),
        part in 0.0f64..1.0,
    ) {
        let available = Pages((vms.iter().map(|v| v.max.0).sum::<u64>() as f64 * part) as u64);
        let mut one = targets(available, &vms);
        let mut other = targets(available, &order);
        one.sort_by_key(|e| e.id);
        other.sort_by_key(|e| e.id);
        prop_assert_eq!(one, other);
    }

    #[test]
    fn scale_does_not_matter((vms, available) in with_available(), by in 2u64..1_000) {
        // More shares for everyone: nothing moves (powers of two are exact in floating point).
        let mut richer = vms.clone();
        richer.iter_mut().for_each(|v| v.shares *= 64);
        let base = pages(&targets(Pages(available), &vms));
        prop_assert_eq!(&base, &pages(&targets(Pages(available), &richer)));
        // Everything larger: the outcome is larger by as much, to within the rounding to whole pages.
        // Handing out page by page to the largest ratio is the D'Hondt method of apportionment, which
        // may leave a claimant's exact share by more than one page: up to about one for each other.
        let rounding = vms.len().max(2) as u64 * by;
        let mut larger = vms.clone();
        for v in &mut larger {
            v.min = Pages(v.min.0 * by);
            v.max = Pages(v.max.0 * by);
            v.active = Pages(v.active.0 * by);
        }
        for (large, small) in pages(&targets(Pages(available * by), &larger)).iter().zip(base) {
            prop_assert!(large.abs_diff(small * by) <= rounding, "{large} {small} x {by}");
        }
    }

    /// Between equals, the tax takes at most the fraction tau of what is idle, and gives it to the
    /// one that uses all it holds.
    #[test]
    fn tax_moves_memory_from_idle_to_active(
        size in 50u64..400, idle_active in 0u64..50, part in 0.3f64..0.95, tau in 0.01f64..0.95,
    ) {
        let available = Pages((2.0 * size as f64 * part) as u64);
        let pair = |tau| [vm(1, 9, 0, size, tau, idle_active), vm(2, 9, 0, size, tau, size)];
        let untaxed = pages(&targets(available, &pair(0.0)));
        let taxed = pages(&targets(available, &pair(tau)));
        prop_assert!(taxed[0] <= untaxed[0] && taxed[1] >= untaxed[1]);
        let idle = untaxed[0].saturating_sub(idle_active) as f64;
        let lost = (untaxed[0] - taxed[0]) as f64;
        prop_assert!(lost <= tau * idle + 2.0, "lost {lost} of {idle} idle at {tau}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    /// At real sizes too, against both oracles by chunks: the ratios of VMs bound by shares agree.
    #[test]
    fn ratios_are_equal_at_real_sizes(seed in any::<u64>()) {
        let mut word = seed;
        let mut next = |bound: u64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (word >> 33) % bound
        };
        let vms: Vec<VmDemand> = (0..300)
            .map(|i| {
                let max = (1 + next(64)) << 16;
                vm(i, 1 + next(10_000) as u32, next(max / 4), max, 0.75, next(max))
            })
            .collect();
        let available = vms.iter().map(|v| v.max.0).sum::<u64>() / 2;
        let result = targets(Pages(available), &vms);
        prop_assert_eq!(pages(&result).iter().sum::<u64>(), available);
        let rhos = || result.iter().filter(|e| e.bound == Bound::Shares).map(|e| e.rho);
        let (low, high) = (rhos().fold(f64::INFINITY, f64::min), rhos().fold(0.0, f64::max));
        prop_assert!(high / low < 1.01, "{low} {high}");
        for e in &result {
            match e.bound {
                Bound::Min => prop_assert!(e.rho <= high * 1.001),
                Bound::Max => prop_assert!(e.rho >= low * 0.999),
                Bound::Shares => (),
            }
        }
    }
}
