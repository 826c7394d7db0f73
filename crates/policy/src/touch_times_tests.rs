//! The predicted curve against random replacement that is simulated page by page.

use proptest::prelude::*;

use super::*;
use crate::working_set::choose_samples;

/// Of the VM; the guest uses some of them.
const SIZE: u64 = 4_000;
/// One access takes so long.
const ACCESS: Duration = Duration::from_millis(1);

/// xorshift64* (S. Vigna), enough for a test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Which page is accessed, of the guest's own numbers from 0 on.
enum Stream {
    Uniform(u64),
    /// Sums of weights, for a draw by bisection.
    Zipf(Vec<f64>),
    Loop {
        pages: u64,
        at: u64,
    },
    /// The part `hot` of accesses goes to the first pages.
    HotAndCold {
        hot_pages: u64,
        pages: u64,
        hot: f64,
    },
}

impl Stream {
    fn zipf(pages: u64, s: f64) -> Stream {
        let mut sum = 0.0;
        let weights = (1..=pages).map(|i| {
            sum += (i as f64).powf(-s);
            sum
        });
        Stream::Zipf(weights.collect())
    }
    fn pages(&self) -> u64 {
        match self {
            Stream::Uniform(pages)
            | Stream::Loop { pages, .. }
            | Stream::HotAndCold { pages, .. } => *pages,
            Stream::Zipf(sums) => sums.len() as u64,
        }
    }
    fn next(&mut self, random: &mut Random) -> u64 {
        match self {
            Stream::Uniform(pages) => random.below(*pages),
            Stream::Zipf(sums) => {
                let draw = random.unit() * sums.last().unwrap();
                sums.partition_point(|sum| *sum < draw).min(sums.len() - 1) as u64
            }
            Stream::Loop { pages, at } => {
                *at = (*at + 1) % *pages;
                *at
            }
            Stream::HotAndCold { hot_pages, pages, hot } => {
                if random.unit() < *hot {
                    random.below(*hot_pages)
                } else {
                    *hot_pages + random.below(*pages - *hot_pages)
                }
            }
        }
    }
}

/// The guest's page 0 may be any of the VM's.
fn place(page: u64) -> u64 {
    page * 7 % SIZE
}

/// The sampler, over so many periods of the stream.
fn sampled(stream: &mut Stream, samples: u32, seed: u64) -> TouchTimes {
    let config =
        SamplingConfig { samples, period: Duration::from_secs(20), ..SamplingConfig::default() };
    let mut times = TouchTimes::new(config);
    let mut random = Random(seed);
    let accesses = (config.period.as_nanos() / ACCESS.as_nanos()) as u32;
    for period in 0..60 {
        let samples = choose_samples(seed, period, Pages(SIZE), config.samples);
        let mut under = vec![false; SIZE as usize];
        samples.iter().for_each(|p| under[p.0 as usize] = true);
        times.begin_period(samples.len() as u32);
        for n in 1..=accesses {
            let page = place(stream.next(&mut random)) as usize;
            if std::mem::take(&mut under[page]) {
                times.touched(ACCESS * n);
            }
        }
        times.end_period();
    }
    times
}

/// Misses per access of a memory of `room` pages from which a random one leaves.
fn replaced(stream: &mut Stream, room: u64, seed: u64) -> f64 {
    let mut random = Random(seed);
    let mut held: Vec<u64> = Vec::new();
    let mut is_in = vec![false; SIZE as usize];
    let (warm, counted) = (60_000, 200_000);
    let mut misses = 0u64;
    for n in 0..warm + counted {
        let page = stream.next(&mut random);
        if is_in[page as usize] {
            continue;
        }
        misses += u64::from(n >= warm);
        is_in[page as usize] = true;
        if held.len() < room as usize {
            held.push(page);
        } else {
            let out = random.below(room) as usize;
            is_in[std::mem::replace(&mut held[out], page) as usize] = false;
        }
    }
    misses as f64 / f64::from(counted)
}

/// As the policy reads it: straight between points.
fn at(curve: &[(Pages, f64)], pages: f64) -> f64 {
    let after = curve.partition_point(|p| (p.0.0 as f64) < pages);
    let Some(b) = curve.get(after) else { return 0.0 };
    let Some(a) = after.checked_sub(1).map(|i| curve[i]) else { return b.1 };
    let (x, y) = ((a.0.0 as f64, a.1), (b.0.0 as f64, b.1));
    x.1 + (y.1 - x.1) * (pages - x.0) / (y.0 - x.0)
}

/// The largest difference of predicted and simulated miss ratios, over allocations from a tenth to all
/// of the pages in use.
fn worst(name: &str, stream: fn() -> Stream, samples: u32, seed: u64) -> f64 {
    let curve = sampled(&mut stream(), samples, seed).curve(Pages(SIZE)).unwrap();
    TouchTimes::check(&curve).unwrap();
    let mut worst = 0.0f64;
    for percent in [10, 25, 50, 75, 90, 100] {
        let pages = stream().pages() * percent / 100;
        let predicted = at(&curve, pages as f64) * ACCESS.as_secs_f64();
        let simulated = replaced(&mut stream(), pages, seed * 1_000 + percent);
        eprintln!("{name}, seed {seed}, {percent}%: {predicted:.3}, simulated {simulated:.3}");
        worst = worst.max((predicted - simulated).abs());
    }
    worst
}

type Named = (&'static str, fn() -> Stream);

const STREAMS: [Named; 5] = [
    ("uniform", || Stream::Uniform(1_000)),
    ("zipf 0.8", || Stream::zipf(1_000, 0.8)),
    ("zipf 1.1", || Stream::zipf(1_500, 1.1)),
    ("loop", || Stream::Loop { pages: 1_200, at: 0 }),
    ("hot and cold", || Stream::HotAndCold { hot_pages: 150, pages: 1_500, hot: 0.8 }),
];

/// With many samples, what is left is the error of the model. Stated: 0.06 of the miss ratio.
#[test]
fn predicted_misses_are_those_of_simulated_random_replacement() {
    for (name, stream) in STREAMS {
        for seed in [1, 2] {
            let worst = worst(name, stream, 2_000, seed);
            eprintln!("{name}, seed {seed}: worst {worst:.3}");
            assert!(worst < 0.06, "{name}, seed {seed}: {worst}");
        }
    }
}

/// With 100 samples a period, of which a quarter hit what the guest uses at all, sampling adds its own.
/// Stated: 0.15 of the miss ratio in half of the cases, 0.35 at worst.
#[test]
fn a_hundred_samples_tell_the_curve_roughly() {
    let mut all = Vec::new();
    for (name, stream) in STREAMS {
        for seed in 1..=4 {
            let worst = worst(name, stream, 100, seed);
            all.push(worst);
        }
    }
    all.sort_by(f64::total_cmp);
    let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
    assert!(median < 0.15 && worst < 0.35, "{median} {worst}");
}

/// All samples touched, and no telling when in the period: R is spread evenly over it, so with T in periods
/// C(T) = N * T * (1 - exp(-1/T)) exactly.
#[test]
fn the_curve_of_touches_that_are_spread_evenly_is_exact() {
    const N: u64 = 1 << 30;
    let config = SamplingConfig::default();
    let mut times = TouchTimes::new(config);
    after(&mut times, 100, &[29.9; 100]);
    times.end_period();
    let curve = times.curve(Pages(N)).unwrap();
    let period_s = config.period.as_secs_f64();
    let near = |found: f64, exact: f64| (found - exact).abs() <= 1e-6 * exact.max(1.0);
    assert!(near(curve[0].1, N as f64 / period_s), "{:?}", curve[0]);
    assert_eq!(curve.len(), 1 + POINTS + 1);
    for (i, (pages, misses)) in curve[1..=POINTS].iter().enumerate() {
        // From 10 ms of 30 s on, in steps of the square root of 2; up to 8 periods.
        let t = 8.0 * 2f64.powf((i as f64 + 1.0 - POINTS as f64) / 2.0);
        let exact = N as f64 * t * (1.0 - (-1.0 / t).exp());
        assert!((pages.0 as f64 - exact).abs() <= 1.0, "{i}: {pages:?}, {exact}");
        assert!(near(*misses, exact / (t * period_s)), "{i}: {misses}");
    }
    assert_eq!(curve.last(), Some(&(Pages(N), 0.0)));
}

#[test]
fn the_buckets_end_with_the_period() {
    assert_eq!(end_of(BUCKETS - 1), 1.0);
    assert!((30.0 * end_of(0) - 0.0104).abs() < 1e-4, "{}", end_of(0));
}

/// As many periods as a gain looks back on: 15 of 1/8, 3 of 1/2, and the one that runs.
#[test]
fn averages_count_for_the_periods_that_are_in_them() {
    let mut times = TouchTimes::new(SamplingConfig::default());
    for seconds in [0.001, 29.0] {
        after(&mut times, 100, &[seconds; 100]);
        times.end_period();
    }
    after(&mut times, 100, &[10.5; 50]);
    let parts = times.parts().unwrap();
    let (early, late) = (15.0 * 7.0 / 8.0 + 3.0 / 2.0, 15.0 / 8.0 + 3.0 / 2.0);
    let all = early + late + 0.5;
    let running = parts[1..BUCKETS - 1].iter().sum::<f64>();
    for (found, exact) in [(parts[0], early), (parts[BUCKETS - 1], late), (running, 0.5)] {
        assert!((found - exact / all).abs() < 1e-12, "{parts:?}");
    }
}

fn after(times: &mut TouchTimes, sampled: u32, seconds: &[f64]) {
    times.begin_period(sampled);
    seconds.iter().for_each(|s| times.touched(Duration::from_secs_f64(*s)));
}

#[test]
fn there_is_a_curve_once_a_period_is_complete_and_it_ends_at_active_memory() {
    let mut times = TouchTimes::new(SamplingConfig::default());
    after(&mut times, 0, &[]);
    times.end_period();
    after(&mut times, 100, &[1.0; 30]);
    assert_eq!(times.curve(Pages(1_000)), None);
    times.end_period();
    let curve = times.curve(Pages(1_000)).unwrap();
    assert_eq!(curve.last(), Some(&(Pages(300), 0.0)));
    // 30% of the pages, each touched within the second before at a rate that never rises.
    assert!((200.0..600.0).contains(&curve[0].1), "{curve:?}");
    // A page touched seldom costs less than one touched often.
    let mut seldom = TouchTimes::new(SamplingConfig::default());
    after(&mut seldom, 100, &[20.0; 30]);
    seldom.end_period();
    let seldom = seldom.curve(Pages(1_000)).unwrap();
    assert_eq!(seldom.last(), curve.last());
    assert!(seldom[0].1 * 10.0 < curve[0].1, "{seldom:?} {curve:?}");
}

#[test]
fn it_rises_within_a_period_and_falls_slowly() {
    let mut times = TouchTimes::new(SamplingConfig::default());
    let active = |times: &TouchTimes| times.curve(Pages(1_000)).unwrap().last().unwrap().0;
    after(&mut times, 100, &[]);
    times.end_period();
    assert_eq!(times.curve(Pages(1_000)), Some(vec![(Pages(0), 0.0)]));
    after(&mut times, 100, &[0.1; 80]);
    assert_eq!(active(&times), Pages(400));
    times.end_period();
    assert_eq!(active(&times), Pages(400));
    after(&mut times, 100, &[]);
    times.end_period();
    assert_eq!(active(&times), Pages(200));
}

#[test]
fn another_period_begins_anew_and_other_gains_do_not() {
    let config = SamplingConfig::default();
    let mut times = TouchTimes::new(config);
    after(&mut times, 100, &[1.0]);
    times.end_period();
    times.set_config(SamplingConfig { slow_gain: 0.25, ..config });
    assert!(times.curve(Pages(1_000)).is_some());
    times.set_config(SamplingConfig { period: Duration::from_secs(10), ..config });
    assert_eq!(times.curve(Pages(1_000)), None);
}

proptest! {
    #[test]
    fn any_touches_make_a_curve_that_falls(
        size in 1u64..1 << 40,
        sampled in 0u32..300,
        periods in proptest::collection::vec(
            proptest::collection::vec(0.0f64..100.0, 0..200), 1..5
        ),
    ) {
        let mut times = TouchTimes::new(SamplingConfig::default());
        for period in periods {
            after(&mut times, sampled, &period);
            times.end_period();
        }
        if let Some(curve) = times.curve(Pages(size)) {
            prop_assert_eq!(TouchTimes::check(&curve), Ok(()));
            prop_assert!(curve[0].0.is_zero() && curve.last().unwrap().0 <= Pages(size));
            prop_assert!(curve.iter().all(|p| p.1.is_finite() && p.1 >= 0.0));
            prop_assert_eq!(curve.last().unwrap().1, 0.0);
        }
    }
}

#[test]
fn what_was_found_is_gone_on_with() {
    let config = SamplingConfig::default();
    let mut times = TouchTimes::new(config);
    assert_eq!(times.averages(), None);
    times.begin_period(10);
    for ms in [1, 50, 700, 20_000] {
        times.touched(Duration::from_millis(ms));
    }
    times.end_period();
    let found = times.averages().unwrap();
    let curve = |times: &TouchTimes| times.curve(Pages(SIZE));
    let mut next = TouchTimes::new(config);
    next.resume(&found);
    assert_eq!(curve(&next), curve(&times));
    assert!(curve(&next).is_some());
    // Of other periods it says nothing, nor does nonsense.
    let mut other = TouchTimes::new(SamplingConfig { period: config.period * 2, ..config });
    other.resume(&found);
    let mut odd = TouchTimes::new(config);
    for (i, part) in [f64::NAN, -0.1, 1.1, 0.9].into_iter().enumerate() {
        let mut parts = found.slow;
        parts[i] = part;
        odd.resume(&TouchAverages { slow: parts, ..found });
        odd.resume(&TouchAverages { fast: parts, ..found });
    }
    assert_eq!((other.averages(), odd.averages()), (None, None));
}
