use super::*;
use proptest::prelude::*;

fn nature(size: u64) -> Nature {
    Nature { size, cache: 0.5, share: 0.0, touch_every: 5.0, idle_reuse: 0.0, skew: 0.0 }
}

fn guest(size: u64, active: u64, used: u64) -> Guest {
    let mut g = Guest::new(nature(size));
    g.set_demand(Demand::new(Pages(active), Pages(used)));
    for _ in 0..100 {
        g.work(&Models::default(), 1.0, u64::MAX, u64::MAX, false);
    }
    g
}

#[test]
fn a_guest_touches_what_it_uses_at_its_pace() {
    let m = Models::default();
    let mut g = Guest::new(nature(100_000));
    g.set_demand(Demand::new(Pages(10_000), Pages(50_000)));
    let seen = g.work(&m, 1.0, u64::MAX, u64::MAX, false);
    assert_eq!(seen.touched, 60 * 256);
    assert_eq!(g.consumed(&m), 60 * 256);
    let g = guest(100_000, 10_000, 50_000);
    assert_eq!((g.active.resident, g.idle.resident, g.untouched), (10_000, 40_000, 50_000));
}

#[test]
fn a_balloon_takes_what_can_be_spared_best() {
    let mut g = guest(1_000, 200, 600);
    assert!(!g.set_balloon(300));
    assert_eq!((g.touched(), g.untouched), (600, 100));
    assert!(!g.set_balloon(700));
    assert_eq!((g.active.total(), g.idle.total(), g.discarded), (200, 100, 300));
    assert!(g.set_balloon(900), "300 pages are no cache");
    assert_eq!(g.balloon, 700);
    g.set_balloon(0);
    assert_eq!(g.untouched, 700);
    g.check();
}

#[test]
fn active_pages_that_were_evicted_fault_in_and_cost_time() {
    let m = Models { compress_percent: 0.0, ..Models::default() };
    let mut g = guest(10_000, 10_000, 10_000);
    let (left, written) = g.evict(&m, 4_000, 0, u64::MAX, u64::MAX);
    assert_eq!((left, written, g.consumed(&m)), (4_000, 4_000, 6_000));
    let seen = g.work(&m, 1.0, u64::MAX, u64::MAX, false);
    // 2,000 touches a second, 40% of them faults of 340 us: 0.272 s of waiting for a second of work.
    assert!((seen.work - 1.0 / 1.272).abs() < 0.01, "{seen:?}");
    assert!((seen.swapped as f64 - 800.0 / 1.272).abs() < 2.0, "{seen:?}");
    let held = g.work(&m, 1.0, u64::MAX, u64::MAX, true);
    assert_eq!((held.swapped, held.work), (0, 0.0));
    assert!(held.waited);
    let slow = g.work(&m, 1.0, u64::MAX, 10, false);
    assert_eq!(slow.swapped, 10, "no more than the disk reads");
}

#[test]
fn eviction_shares_before_it_compresses_before_it_swaps() {
    let m = Models { compress_fits: 1.0, compress_percent: 10.0, ..Models::default() };
    let mut g = guest(10_000, 0, 10_000);
    g.nature.share = 0.5;
    let (left, written) = g.evict(&m, 4_000, 0, u64::MAX, u64::MAX);
    assert_eq!(left, 4_000);
    assert_eq!((g.compressed(), written), (2_000, 0), "1,000 frames hold 2,000 pages");
    assert!(g.shared >= 2_000 - 1_000 && g.shared <= 2_000, "{g:?}");
    let before = g.compressed();
    let (_, written) = g.evict(&m, 1_000, 0, u64::MAX, u64::MAX);
    assert_eq!(g.compressed(), before, "the cache is full");
    assert!(written > 0);
    g.check();
}

/// A guest that has nothing at home but compressed pages can be shrunk as well, as far as there is room in swap.
#[test]
fn what_is_compressed_goes_on_to_swap_when_nothing_else_is_left() {
    let m = Models { compress_fits: 1.0, compress_percent: 50.0, ..Models::default() };
    let mut g = guest(1_000, 200, 600);
    assert_eq!(g.evict(&m, 600, 0, 600, 600), (600, 0));
    assert_eq!((g.resident(), g.compressed(), g.consumed(&m)), (0, 600, 300));
    // No room, or nothing can be written.
    assert_eq!(g.evict(&m, 100, 0, 600, 0), (0, 0));
    assert_eq!(g.evict(&m, 100, 0, 0, 600), (0, 0));
    assert_eq!(g.evict(&m, 100, 0, 600, 600), (100, 200));
    assert_eq!((g.compressed(), g.swapped(), g.consumed(&m)), (400, 200, 200));
    // To no less than it is to keep.
    assert_eq!(g.evict(&m, 600, 150, 600, 600), (50, 100));
    assert_eq!(g.consumed(&m), 150);
    g.check();
}

#[test]
fn skew_makes_the_first_pages_worth_most() {
    let mut g = guest(10_000, 1_000, 1_000);
    let flat: Vec<f64> = [0, 250, 500, 1_000].map(|p| g.misses_at(p, 1_000)).to_vec();
    assert_eq!(flat, [200.0, 150.0, 100.0, 0.0]);
    g.nature.skew = 0.5;
    assert!((g.misses_at(250, 1_000) - 100.0).abs() < 1e-9);
    assert_eq!(g.misses_at(1_000, 1_000), 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is done to a guest, its pages are all somewhere, once.
    #[test]
    fn pages_are_neither_lost_nor_made(
        steps in proptest::collection::vec((0u8..5, 0u64..12_000, 0u64..12_000), 1..60),
        share in 0.0f64..0.6,
    ) {
        let m = Models::default();
        let mut g = Guest::new(Nature { share, idle_reuse: 100.0, ..nature(10_000) });
        for (what, a, b) in steps {
            match what {
                0 => { g.set_demand(Demand::new(Pages(a.min(b)), Pages(a.max(b)))); }
                1 => { g.set_balloon(a.min(10_000)); }
                2 => {
                    let before = g.consumed(&m);
                    let (left, _) = g.evict(&m, a, b, a / 2, a);
                    prop_assert!(left <= a);
                    prop_assert!(g.consumed(&m) >= b.min(before), "{:?}", g);
                }
                3 => { g.scan(&m, a as f64); }
                _ => {
                    let before = g.consumed(&m);
                    g.work(&m, 1.0, a, b, false);
                    prop_assert!(g.consumed(&m) <= before + a, "{:?}", g);
                }
            }
            g.check();
        }
    }
}
