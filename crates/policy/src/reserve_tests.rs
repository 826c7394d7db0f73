use super::*;
use proptest::prelude::*;

const BUDGET: Pages = Pages(100_000);
/// Less than the whole reserve, more than the least.
const CALM_FREE: Trough = Trough { free: Pages(5_000), starting: false };

fn high(t: &Thresholds) -> Pages {
    t.upper_edge(State::High)
}

/// Calm for so many seconds, a step each second.
fn calm(reserve: &mut Reserve, from_s: u64, for_s: u64) -> Thresholds {
    let mut last = reserve.thresholds();
    for s in from_s + 1..=from_s + for_s {
        last = reserve.step(Duration::from_secs(s), Scale::Measured, BUDGET, &CALM_FREE);
    }
    last
}

fn whole(budget: Pages) -> Thresholds {
    Scale::Measured.least(budget).towards(&Thresholds::default_for(budget), Thresholds::WHOLE)
}

fn started() -> Reserve {
    let mut reserve = Reserve::new(Scale::Measured, BUDGET);
    let seen = Trough { starting: true, ..CALM_FREE };
    assert_eq!(reserve.step(Duration::ZERO, Scale::Measured, BUDGET, &seen), whole(BUDGET));
    reserve
}

#[test]
fn starts_have_all_of_it_and_it_comes_down_to_a_third_in_calm() {
    let mut reserve = started();
    assert_eq!(high(&reserve.thresholds()), Pages(6_000));
    assert_eq!(reserve.thresholds().lower_edge(State::High), Pages(4_000));
    let soon = calm(&mut reserve, 0, 10);
    assert!(high(&soon) < Pages(3_000) && high(&soon) > Pages(2_500), "{soon:?}");
    let later = calm(&mut reserve, 10, 600);
    assert_eq!(later, Scale::Measured.least(BUDGET));
    assert_eq!(high(&later), Pages(2_000));
    assert_eq!(Reserve::new(Scale::Measured, BUDGET).thresholds(), later);
}

#[test]
fn what_was_needed_comes_back_at_once_and_more_of_it_the_less_was_left() {
    let mut reserve = Reserve::new(Scale::Measured, BUDGET);
    let least = calm(&mut reserve, 0, 600);
    let at = |ms| Duration::from_secs(600) + Duration::from_millis(ms);
    let short = |free| Trough { free, starting: false };
    let mut hard = reserve.clone();
    let below_hard = least.lower_edge(State::Soft) - Pages(1);
    let after_hard = hard.step(at(300), Scale::Measured, BUDGET, &short(below_hard));
    let mut low = reserve.clone();
    let below_low = least.lower_edge(State::Hard) - Pages(1);
    let after_low = low.step(at(300), Scale::Measured, BUDGET, &short(below_low));
    assert!(high(&least) < high(&after_hard) && high(&after_hard) < high(&after_low));
    assert_eq!(high(&after_low), Pages(4_000));
    // Soon after it does not count again, but is not forgotten.
    assert_eq!(low.step(at(400), Scale::Measured, BUDGET, &short(Pages(0))), after_low);
    assert_eq!(low.step(at(600), Scale::Measured, BUDGET, &CALM_FREE), whole(BUDGET));
    // Nor is one that is over when it has just shrunk.
    let mut shrunk = started();
    let before = shrunk.step(at(0), Scale::Measured, BUDGET, &CALM_FREE);
    let after = shrunk.step(at(100), Scale::Measured, BUDGET, &short(Pages(0)));
    assert!(high(&before) < high(&after), "{before:?}, {after:?}");
    // At its edge nothing was short.
    let at_edge = short(least.lower_edge(State::Soft));
    assert!(high(&reserve.step(at(300), Scale::Measured, BUDGET, &at_edge)) <= high(&least));
}

#[test]
fn in_plenty_all_of_it_is_kept_and_no_sooner() {
    let goal = Scale::Measured.thresholds(BUDGET).goal();
    let mut reserve = Reserve::new(Scale::Measured, BUDGET);
    let step = |reserve: &mut Reserve, s: u64, free: Pages| {
        let seen = Trough { free, starting: false };
        reserve.step(Duration::from_secs(s), Scale::Measured, BUDGET, &seen)
    };
    assert_eq!(step(&mut reserve, 1, goal - Pages(1)), Scale::Measured.least(BUDGET));
    assert_eq!(step(&mut reserve, 2, goal), whole(BUDGET));
    for s in 3..100 {
        assert_eq!(step(&mut reserve, s, goal + Pages(s)), whole(BUDGET));
    }
    assert!(high(&step(&mut reserve, 101, goal - Pages(1))) < high(&whole(BUDGET)));
}

#[test]
fn another_budget_has_the_same_part() {
    let mut reserve = Reserve::new(Scale::Measured, BUDGET);
    let now = Duration::from_secs(600);
    let half = Pages(BUDGET.0 / 2);
    let seen = Trough { free: Pages(2_000), starting: false };
    let least = Scale::Measured.least(half);
    assert_eq!(reserve.step(now, Scale::Measured, half, &seen), least);
}

/// What is kept is a matter of how early memory is reclaimed. That more is to be kept makes nobody wait.
#[test]
fn a_start_or_a_shortage_alone_never_makes_the_state_hard_or_low() {
    for gib in [1, 36, 64, 1_024] {
        let budget = Pages::from_mib(gib << 10);
        let least = Scale::Measured.least(budget);
        for starting in [true, false] {
            let mut reserve = Reserve::new(Scale::Measured, budget);
            let free = least.lower_edge(State::Soft);
            let dip = if starting { free } else { Pages::ZERO };
            let seen = Trough { free: dip, starting };
            let raised = reserve.step(Duration::from_secs(9), Scale::Measured, budget, &seen);
            assert!(high(&raised) > high(&least), "{gib} GiB");
            let state = crate::StateMachine::at(raised, State::High).update(free);
            assert_eq!(state, State::Soft, "{gib} GiB, {free:?} free: {raised:?}");
        }
    }
}

#[test]
fn fixed_scales_stay_as_they_are_whatever_happens() {
    for scale in [Scale::Percent, Scale::Sliding] {
        let mut reserve = Reserve::new(scale, BUDGET);
        for s in 1..100 {
            let free = Pages(if s % 7 == 0 { 0 } else { BUDGET.0 });
            let seen = Trough { free, starting: s % 13 == 0 };
            let now = reserve.step(Duration::from_secs(s), scale, BUDGET, &seen);
            assert_eq!(now, scale.thresholds(BUDGET));
        }
    }
}

#[test]
fn of_a_large_host_the_least_is_a_third_of_the_sliding_scale() {
    let large = Pages::from_mib(1 << 20);
    // 6% of 4 GiB, 4% of 8, 2% of 16, 1% of the rest: 0.24 + 0.32 + 0.32 + 9.96 GiB, a third of it.
    let least = high(&Scale::Measured.least(large)).bytes().0 >> 20;
    assert!((3_690..=3_710).contains(&least), "{least} MiB");
    assert_eq!(Scale::Measured.thresholds(large), Thresholds::default_for(large));
}

proptest! {
    /// Whatever is seen, they are in order, and between the least and the most.
    #[test]
    fn they_stay_in_order_and_between(
        steps in proptest::collection::vec((0u64..3_000, 0u64..200_000, 100u64..10_000_000, any::<bool>()), 1..200),
    ) {
        let mut reserve = Reserve::new(Scale::Measured, BUDGET);
        let mut now = Duration::ZERO;
        for (ms, free, budget, starting) in steps {
            now += Duration::from_millis(ms);
            let budget = Pages(budget);
            let seen = Trough { free: Pages(free), starting };
            let t = reserve.step(now, Scale::Measured, budget, &seen);
            let (least, most) = (Scale::Measured.least(budget), Scale::Measured.thresholds(budget));
            for ((_, low, high), ((_, least, floor), (_, most, ceiling))) in
                t.edges().into_iter().zip(least.edges().into_iter().zip(most.edges()))
            {
                prop_assert!(least <= low && low <= most, "{t:?}");
                prop_assert!(floor <= high && high <= ceiling, "{t:?}");
            }
        }
    }
}
