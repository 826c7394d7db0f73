use proptest::prelude::*;

use super::*;

const SIZE: Pages = Pages(65_536);
const PERIOD: Duration = Duration::from_secs(30);

/// A guest that touches each of its first `active` pages in every period.
fn run_period(ws: &mut WorkingSet, seed: u64, period: u64, active: u64) {
    let samples = choose_samples(seed, period, SIZE, ws.config().samples);
    ws.begin_period(samples.len() as u32);
    ws.touched(samples.iter().filter(|p| p.0 < active).count() as u32);
    assert!(ws.advance(PERIOD));
    ws.end_period();
}

fn fraction(ws: &WorkingSet) -> f64 {
    ws.estimate().estimate.0 as f64 / SIZE.0 as f64
}

#[test]
fn a_new_vm_counts_as_fully_active_until_its_first_period_is_complete() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    assert_eq!(ws.estimate().estimate, SIZE);
    ws.begin_period(100);
    ws.touched(3);
    assert_eq!((ws.estimate().estimate, ws.estimate().periods), (SIZE, 0));
    ws.end_period();
    let e = ws.estimate();
    assert_eq!((e.estimate, e.slow, e.fast, e.periods), (Pages(1966), Pages(1966), Pages(1966), 1));
}

#[test]
fn what_was_found_is_gone_on_with() {
    let config = SamplingConfig::default();
    let mut ws = WorkingSet::new(config, SIZE);
    assert_eq!(ws.averages(), None);
    for period in 0..3 {
        run_period(&mut ws, 7, period, SIZE.0 / 5);
    }
    let mut next = WorkingSet::new(config, SIZE);
    next.resume(ws.averages().unwrap());
    assert_eq!(next.estimate(), ws.estimate());
    for ws in [&mut ws, &mut next] {
        run_period(ws, 7, 3, SIZE.0 / 2);
    }
    assert_eq!(next.estimate(), ws.estimate());
    // What is nonsense is none, or brought into its range.
    let mut odd = WorkingSet::new(config, SIZE);
    odd.resume(Averages { slow: f64::NAN, fast: 0.5, periods: 3 });
    odd.resume(Averages { slow: 0.5, fast: f64::INFINITY, periods: 3 });
    assert_eq!(odd.averages(), None);
    odd.resume(Averages { slow: -1.0, fast: 7.0, periods: 0 });
    assert_eq!(odd.averages(), Some(Averages { slow: 0.0, fast: 1.0, periods: 1 }));
    assert_eq!(odd.estimate().estimate, SIZE);
}

#[test]
fn the_period_counts_execution_time() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    assert!(ws.advance(Duration::ZERO), "no period runs: the caller begins one");
    ws.begin_period(100);
    assert!(!ws.advance(Duration::from_secs(29)));
    assert!(ws.advance(Duration::from_secs(1)));
    ws.end_period();
    ws.begin_period(100);
    assert!(!ws.advance(Duration::from_secs(29)), "a new period starts from zero");
}

#[test]
fn in_the_period_counts_raise_and_never_lower() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    run_period(&mut ws, 1, 0, SIZE.0 / 2);
    let before = ws.estimate();
    ws.begin_period(100);
    assert_eq!(ws.estimate().current, before.fast, "nothing counted yet: no evidence of a fall");
    let mut last = before.estimate;
    for _ in 0..100 {
        ws.touched(1);
        let now = ws.estimate();
        assert!(now.estimate >= last && now.fast == before.fast);
        last = now.estimate;
    }
    // Half the way from about 1/2 to 1 inside the very first period.
    assert!(last.0 > SIZE.0 * 70 / 100, "{last}");
    ws.touched(50);
    assert_eq!(ws.estimate().estimate, last, "no more touched than sampled");
}

/// Half of the way, by the fast gain, from what the last period found.
#[test]
fn what_a_period_found_so_far_raises_by_its_gain() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), Pages(1_000));
    for touched in [50, 80] {
        ws.begin_period(100);
        ws.touched(touched);
        if touched == 50 {
            ws.end_period();
        }
    }
    assert_eq!((ws.estimate().fast, ws.estimate().current), (Pages(500), Pages(650)));
}

#[test]
fn periods_without_samples_tell_nothing() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    ws.touched(5);
    ws.end_period();
    ws.begin_period(0);
    ws.touched(5);
    ws.end_period();
    assert_eq!((ws.estimate().estimate, ws.estimate().periods), (SIZE, 0));
    run_period(&mut ws, 1, 0, SIZE.0 / 4);
    let before = ws.estimate();
    ws.begin_period(0);
    ws.end_period();
    assert_eq!(ws.estimate(), before);
}

#[test]
fn up_is_fast_and_down_is_slow() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    for p in 0..40 {
        run_period(&mut ws, 5, p, SIZE.0 / 10);
    }
    let mut up = 0;
    while fraction(&ws) < 0.8 {
        run_period(&mut ws, 5, 40 + up, SIZE.0 * 9 / 10);
        up += 1;
    }
    for p in 50..90 {
        run_period(&mut ws, 5, p, SIZE.0 * 9 / 10);
    }
    let mut down = 0;
    while fraction(&ws) > 0.2 {
        run_period(&mut ws, 5, 90 + down, SIZE.0 / 10);
        down += 1;
    }
    // By the slow average: 8 ln(0.8 / 0.1) = 17 periods.
    assert!(up <= 4, "{up} periods up");
    assert!((10..=25).contains(&down), "{down} periods down");
}

#[test]
fn configurations_are_checked() {
    let good = SamplingConfig::default();
    assert_eq!(good.check(), Ok(()));
    assert_eq!(SamplingConfig { samples: 0, ..good }.check(), Err(SamplingError::NoSamples));
    assert_eq!(
        SamplingConfig { period: Duration::ZERO, ..good }.check(),
        Err(SamplingError::NoPeriod)
    );
    let samples = |samples| SamplingConfig { samples, ..good }.check();
    assert_eq!(samples(MOST_SAMPLES), Ok(()));
    assert_eq!(samples(MOST_SAMPLES + 1), Err(SamplingError::ManySamples));
    assert_eq!(samples(u32::MAX), Err(SamplingError::ManySamples));
    for (slow, fast) in [(0.0, 0.5), (0.6, 0.5), (0.1, 1.1), (f64::NAN, 0.5), (0.1, f64::NAN)] {
        let bad = SamplingConfig { slow_gain: slow, fast_gain: fast, ..good };
        assert!(bad.check().is_err());
        let mut ws = WorkingSet::new(bad, SIZE);
        for p in 0..5 {
            run_period(&mut ws, 1, p, SIZE.0 / 2);
            assert!(ws.estimate().estimate <= SIZE);
        }
    }
}

#[test]
fn gains_that_are_none_are_replaced_and_those_out_of_range_brought_into_it() {
    let period = Duration::from_secs(7);
    let bad = SamplingConfig { samples: 9, period, slow_gain: f64::NAN, fast_gain: 7.0 };
    let made = SamplingConfig { slow_gain: 1.0 / 8.0, fast_gain: 1.0, ..bad };
    let mut ws = WorkingSet::new(bad, SIZE);
    assert_eq!(*ws.config(), made);
    ws.set_config(SamplingConfig { slow_gain: -1.0, fast_gain: f64::NAN, ..bad });
    let made = SamplingConfig { slow_gain: f64::MIN_POSITIVE, fast_gain: 0.5, ..bad };
    assert_eq!(*ws.config(), made);
}

#[test]
fn another_configuration_counts_for_the_period_that_runs() {
    let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
    ws.begin_period(100);
    assert!(!ws.advance(PERIOD / 2));
    ws.set_config(SamplingConfig { period: PERIOD / 2, ..SamplingConfig::default() });
    assert!(ws.advance(Duration::ZERO));
}

#[test]
fn samples_differ_and_repeat() {
    let all = choose_samples(1, 1, Pages(50), 100);
    assert_eq!(all, (0..50).map(Ppn).collect::<Vec<_>>());
    assert!(choose_samples(1, 1, Pages(0), 100).is_empty());
    assert!(choose_samples(1, 1, Pages(100), 0).is_empty());
    assert_eq!(choose_samples(7, 9, SIZE, 100), choose_samples(7, 9, SIZE, 100));
    assert_ne!(choose_samples(7, 9, SIZE, 100), choose_samples(7, 10, SIZE, 100));
    assert_ne!(choose_samples(7, 9, SIZE, 100), choose_samples(8, 9, SIZE, 100));
}

/// Each page is chosen equally often: chi-square over 40 pages, 10 of them in each of 8,000 draws.
#[test]
fn samples_are_uniform() {
    let mut counts = [0u64; 40];
    for period in 0..8_000 {
        for ppn in choose_samples(99, period, Pages(40), 10) {
            counts[ppn.index()] += 1;
        }
    }
    let expected = 8_000.0 * 10.0 / 40.0;
    let chi: f64 = counts.iter().map(|&c| (c as f64 - expected).powi(2) / expected).sum();
    // 39 degrees of freedom (fewer in effect, without replacement): mean 39, far tail above 90.
    assert!(chi < 90.0, "chi-square {chi}: {counts:?}");
}

/// The mean over many periods of what single periods find is the truth: unbiased.
#[test]
fn single_periods_are_unbiased() {
    for active in [0, SIZE.0 / 20, SIZE.0 / 3, SIZE.0] {
        let config = SamplingConfig { slow_gain: 1.0, fast_gain: 1.0, ..SamplingConfig::default() };
        let mut ws = WorkingSet::new(config, SIZE);
        let mut sum = 0.0;
        for period in 0..400 {
            run_period(&mut ws, 2, period, active);
            sum += fraction(&ws);
        }
        let (mean, truth) = (sum / 400.0, active as f64 / SIZE.0 as f64);
        // 5 standard errors of 40,000 draws: at most 1.25%.
        assert!((mean - truth).abs() < 0.0125, "{mean} against {truth}");
    }
}

proptest! {
    /// Against a guest of known activity: after some periods the estimate lies within five
    /// standard errors of a single period around the truth (the smoothing narrows it, taking the
    /// largest of three averages shifts it up by less than one).
    #[test]
    fn finds_a_known_active_set(seed in any::<u64>(), percent in 0u64..=100) {
        let mut ws = WorkingSet::new(SamplingConfig::default(), SIZE);
        let truth = percent as f64 / 100.0;
        for period in 0..30 {
            run_period(&mut ws, seed, period, SIZE.0 * percent / 100);
        }
        let tolerance = 5.0 * (truth * (1.0 - truth) / 100.0).sqrt() + 0.005;
        prop_assert!((fraction(&ws) - truth).abs() < tolerance, "{} {truth}", fraction(&ws));
    }

    #[test]
    fn never_beyond_the_size_and_never_below_its_parts(
        size in 0u64..1 << 40,
        steps in proptest::collection::vec((0u32..200, 0u32..400, any::<bool>()), 0..40),
    ) {
        let mut ws = WorkingSet::new(SamplingConfig::default(), Pages(size));
        for (sampled, touched, end) in steps {
            ws.begin_period(sampled);
            ws.touched(touched);
            if end {
                ws.end_period();
            }
            let e = ws.estimate();
            prop_assert!(e.estimate.0 <= size);
            prop_assert_eq!(e.estimate, e.slow.max(e.fast).max(e.current));
            prop_assert!(e.current >= e.fast);
        }
    }

    #[test]
    fn samples_are_distinct_ascending_and_in_range(
        seed in any::<u64>(), period in any::<u64>(), size in 0u64..100_000, n in 0u32..300,
    ) {
        let chosen = choose_samples(seed, period, Pages(size), n);
        prop_assert_eq!(chosen.len() as u64, size.min(u64::from(n)));
        prop_assert!(chosen.windows(2).all(|w| w[0] < w[1]));
        prop_assert!(chosen.iter().all(|p| p.0 < size));
    }
}
