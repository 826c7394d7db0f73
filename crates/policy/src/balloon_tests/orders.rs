//! What a balloon is asked for, when, and how much of that is said to come.

use super::*;

/// What it lacks would grow otherwise, until it counts as slow, and others do it.
#[test]
fn a_driver_that_is_still_at_it_is_asked_for_no_more_than_it_brings() {
    let config = BalloonConfig::default();
    let mut g = Guest::new();
    (g.input.size, g.input.goal) = (Pages::from_mib(8_192), Pages::from_mib(4_096));
    let told = |g: &mut Guest, driver| {
        let left = g.input.size - g.real;
        (g.input.consumed, g.input.guest_available) = (Some(left), Some(left));
        (g.input.reported, g.input.guest_stats_age) = (Some(g.real), Some(Duration::ZERO));
        let out = g.control.step(&g.input);
        g.asked = out.command.unwrap_or(g.asked);
        g.real += g.asked.saturating_sub(g.real).min(Pages(driver));
        g.input.now += Duration::from_secs(1);
        out.health
    };
    // Half of what it is first asked for.
    let brings = config.rate.0 / 2;
    for second in 0..40 {
        assert_eq!(told(&mut g, brings), Health::Healthy, "{second}");
        assert_eq!(g.asked, config.rate + Pages(second * brings), "{second}");
    }
    // One that has brought nothing is asked for a little, and one that is done for all that may be again.
    let (asked, real) = (g.asked, g.real);
    told(&mut g, 0);
    told(&mut g, u64::MAX);
    assert_eq!(g.asked, asked + Pages(brings + config.rate.0 / CAREFUL), "{real}");
    let asked = g.asked;
    told(&mut g, 0);
    assert_eq!(g.asked, (asked + config.rate).min(g.input.goal));
}

/// What was not asked for in a second is not asked for beside the next.
#[test]
fn it_grows_no_faster_for_being_looked_at_more_often() {
    for (ms, looks) in [(100, 30), (250, 12), (1_000, 3)] {
        let mut g = Guest::new();
        (g.input.size, g.input.goal) = (Pages::from_mib(8_192), Pages::ZERO);
        (g.used, g.stats) = (Pages::ZERO, true);
        let mut look = |at: u64, goal: Pages| {
            (g.input.now, g.input.goal) = (Duration::from_millis(at), goal);
            (g.input.guest_available, g.input.guest_stats_age) =
                (Some(g.input.size - g.real), Some(Duration::ZERO));
            g.asked = g.control.step(&g.input).command.unwrap_or(g.asked);
            g.real = g.asked;
            (g.input.reported, g.input.consumed) = (Some(g.real), Some(g.input.size - g.real));
            g.asked
        };
        let rate = BalloonConfig::default().rate.0;
        for idle in 0..20 {
            look(idle * 10_000, Pages::ZERO);
        }
        // A second's worth at once, however long nothing was asked.
        let begun = 200_000;
        assert_eq!(look(begun, Pages::from_mib(4_096)).0, rate, "{ms} ms");
        for n in 1..=looks {
            let asked = look(begun + n * ms, Pages::from_mib(4_096)).0;
            let most = rate + rate * n * ms / 1_000;
            assert!(asked <= most && asked + rate / 100 >= most, "{ms} ms, {n}: {asked} of {most}");
        }
    }
}

/// What has come of a large order is in the statistics already, and is not to be given back for that.
#[test]
fn an_order_that_is_half_done_is_not_taken_back() {
    for brings in [5, 25, 45, 100, 175] {
        for every in 1..4 {
            let mut g = Guest::new();
            g.stats_every = every;
            (g.input.size, g.input.goal) = (SIZE, Pages::from_mib(160));
            g.used = Pages::from_mib(60);
            let mut last = Pages::ZERO;
            for second in 0..60 {
                g.second(Driver::Follows(Pages::from_mib(brings).0));
                assert!(g.real >= last, "{brings} MiB/s, {second} s: {} after {last}", g.real);
                last = g.real;
            }
            assert_eq!(last, g.input.goal, "{brings} MiB/s");
            assert!(g.available() >= Pages::from_mib(16));
        }
    }
}

/// A processor of its guest that stands still for a second is not what its balloon brings.
#[test]
fn its_rate_is_by_time_and_not_by_looks() {
    let rate = |ms: u64| {
        let mut g = Guest::new();
        g.input.goal = Pages::from_mib(160);
        g.second(Driver::Follows(Pages::from_mib(40).0));
        g.second(Driver::Dead);
        for at in (2_000 + ms..=3_000).step_by(ms as usize) {
            g.input.now = Duration::from_millis(at);
            g.control.step(&g.input);
        }
        g.control.rate.unwrap()
    };
    let after = |seconds| Pages::from_mib(40).0 as f64 * RATE_KEPT.powf(seconds);
    // The last that it did was seen 2 s before; looks that follow one another closely count together.
    for (ms, seconds) in [(1_000, 2.0), (500, 2.0), (100, 1.6)] {
        assert!((rate(ms) - after(seconds)).abs() < 1.0, "{ms} ms: {}", rate(ms));
    }
}

/// However closely it is looked at, and from the first look on.
#[test]
fn its_rate_is_told_by_looks_that_follow_one_another_closely() {
    for ms in [10, 100, 200, 400, 600, 1_000] {
        let mut g = Guest::new();
        (g.input.size, g.input.goal) = (Pages::from_mib(8_192), Pages::from_mib(4_096));
        let brings = Pages::from_mib(60).0;
        let mut rate = None;
        for at in (0..=6_000).step_by(ms as usize) {
            g.input.now = Duration::from_millis(at);
            (g.input.reported, g.input.consumed) = (Some(g.real), Some(g.input.size - g.real));
            (g.input.guest_available, g.input.guest_stats_age) =
                (Some(g.input.size - g.real), Some(Duration::ZERO));
            let out = g.control.step(&g.input);
            (g.asked, rate) = (out.command.unwrap_or(g.asked), out.rate);
            g.real += g.asked.saturating_sub(g.real).min(Pages(brings * ms / 1_000));
        }
        let rate = rate.unwrap();
        assert!(rate.0.abs_diff(brings) <= brings / 50, "{ms} ms: {rate} of {brings}");
    }
}

/// What was asked before was done at once; then nothing was, for long.
#[test]
fn time_in_which_it_had_nothing_to_do_is_none_that_it_takes_for_an_order() {
    for idle_ms in [0, 100, 10_000] {
        let mut g = Guest::new();
        (g.input.size, g.input.goal) = (Pages::from_mib(8_192), Pages::from_mib(4));
        let look = |g: &mut Guest, ms: u64, brings: u64| {
            g.input.now += Duration::from_millis(ms);
            (g.input.reported, g.input.consumed) = (Some(g.real), Some(g.input.size - g.real));
            (g.input.guest_available, g.input.guest_stats_age) =
                (Some(g.input.size - g.real), Some(Duration::ZERO));
            let out = g.control.step(&g.input);
            g.asked = out.command.unwrap_or(g.asked);
            g.real += g.asked.saturating_sub(g.real).min(Pages(brings));
            out.rate
        };
        look(&mut g, 0, u64::MAX);
        if idle_ms > 0 {
            look(&mut g, 400, u64::MAX);
        }
        g.input.goal = Pages::from_mib(4_096);
        look(&mut g, idle_ms + 400, 0);
        // It has not begun yet.
        assert_eq!(look(&mut g, 100, Pages::from_mib(40).0), None, "{idle_ms} ms");
        let rate = look(&mut g, 900, 0).unwrap();
        assert_eq!(rate, Pages::from_mib(40), "{idle_ms} ms");
    }
}

/// A guest that tells nothing is asked for a part of what others are, and is not counted on for more.
#[test]
fn a_guest_that_tells_nothing_is_as_fast_as_it_is_asked_to_be() {
    let part = Pages(BalloonConfig::default().rate.0 / CAREFUL);
    let mut g = Guest::new();
    g.stats = false;
    for second in 1..10 {
        let out = g.second(FAST);
        assert_eq!(g.asked.0, (part.0 * second).min(GOAL.0));
        assert_eq!(out.rate, Some(part), "{second}");
    }
    // Once it tells, all that it is asked for then comes in time.
    (g.stats, g.input.goal) = (true, Pages::from_mib(180));
    g.seconds(3, FAST);
    g.stats = false;
    assert_eq!(g.second(FAST).rate, Some(part));
}

/// That it did all of the part that it was asked for says nothing of the rest.
#[test]
fn a_guest_that_begins_to_tell_has_the_rate_that_it_is_then_seen_to_have() {
    let (part, brings) = (BalloonConfig::default().rate.0 / CAREFUL, Pages::from_mib(20));
    assert!((part..2 * part).contains(&brings.0));
    let mut g = Guest::new();
    (g.input.goal, g.used, g.stats) = (Pages::from_mib(160), Pages::from_mib(10), false);
    g.seconds(2, Driver::Follows(brings.0));
    g.stats = true;
    // The first of these asks for more than the part; it is seen at the next.
    g.second(Driver::Follows(brings.0));
    for second in 0..4 {
        let rate = g.second(Driver::Follows(brings.0)).rate;
        assert_eq!(rate, Some(brings), "{second}");
    }
}

/// Nor is what it was seen to have before that held against it, where the part came faster.
#[test]
fn a_guest_that_was_slow_once_is_not_taken_for_as_slow_as_the_part_that_it_did_since() {
    let mut g = Guest::new();
    (g.input.goal, g.used) = (Pages::from_mib(200), Pages::from_mib(10));
    let slow = Pages::from_mib(3);
    g.seconds(4, Driver::Follows(slow.0));
    // Until what it said is too old to be believed.
    g.stats = false;
    g.seconds(12, Driver::Follows(slow.0));
    assert_eq!(g.second(Driver::Follows(slow.0)).rate, Some(slow));
    g.seconds(2, FAST);
    g.stats = true;
    assert_eq!(g.second(FAST).rate, None);
}

/// Its guest takes more while an order is under way: what has not come yet is called off as soon as that is told. What is told
/// at a look was so a fifth of a second after the last one.
#[test]
fn a_guest_that_grows_while_its_balloon_does_keeps_some() {
    for brings in [10, 20, 40, 60] {
        for from in 0..4 {
            let mut g = Guest::new();
            (g.input.goal, g.used) = (Pages::from_mib(160), Pages::from_mib(60));
            let mut told = g.available();
            for second in 0..20 {
                g.input.now = Duration::from_secs(second);
                (g.input.reported, g.input.consumed) = (Some(g.real), Some(SIZE - g.real));
                (g.input.guest_available, g.input.guest_stats_age) =
                    (Some(told), Some(Duration::ZERO));
                g.asked = g.control.step(&g.input).command.unwrap_or(g.asked);
                if second == from {
                    g.used = Pages::from_mib(105);
                }
                let before = g.real;
                if g.asked > g.real {
                    g.real += (g.asked - g.real).min(Pages::from_mib(brings));
                } else {
                    g.real = g.asked;
                }
                let soon = before.max(g.real) - before;
                told = SIZE.saturating_sub(before + Pages(soon.0 / 5)).saturating_sub(g.used);
                let left = g.available();
                assert!(
                    left >= Pages::from_mib(16),
                    "{brings} MiB/s from {from}: {left} at {second}"
                );
            }
        }
    }
}

/// Statistics may be from before it was led on: what it grew by since is in none.
#[test]
fn a_balloon_that_is_led_on_grows_when_statistics_know_of_it() {
    let mut g = Guest::new();
    g.control = BalloonControl::resume(BalloonConfig::default(), GOAL);
    (g.input.goal, g.real, g.asked) = (Pages::from_mib(150), GOAL, GOAL);
    (g.input.reported, g.used) = (Some(GOAL), Pages::from_mib(60));
    let told = BalloonConfig::default().settle.as_secs();
    for second in 0..=told + 1 {
        let asked = g.second(FAST).command;
        assert_eq!(asked.is_some(), second == told, "{second} s: {asked:?}");
    }
}

/// What it has done says more than what one look missed; and of what was done in time nobody knows how much more it can.
#[test]
fn a_driver_that_is_done_in_time_is_as_fast_as_it_is_asked_to_be() {
    let most = BalloonConfig::default().rate;
    let mut g = Guest::new();
    g.input.goal = Pages(500);
    assert_eq!(g.seconds(3, FAST).rate, None, "too little to tell");
    g.input.goal = Pages::from_mib(40);
    assert_eq!(g.seconds(3, FAST).rate, Some(most));
    g.input.goal = GOAL;
    g.second(Driver::Dead);
    assert_eq!(g.second(FAST).rate, Some(Pages((most.0 as f64 * RATE_KEPT) as u64)));
    // One that crawled, and then did more than it was known for; and one that did not.
    let cases = [
        (100.0, 6_200, most),
        (100.0, 5_000, Pages(3_000)),
        (100.0, 2_050, Pages(100)),
        (4_000.0, 6_200, Pages(4_200)),
    ];
    for (known, goal, rate) in cases {
        let mut g = Guest::new();
        g.input.goal = Pages(2_000);
        let crawls = g.seconds(20, Driver::Follows(100)).rate;
        assert_eq!(crawls, Some(Pages(100)));
        g.seconds(3, FAST);
        g.control.rate = Some(known);
        g.input.goal = Pages(goal);
        assert_eq!(g.seconds(3, FAST).rate, Some(rate), "{goal}");
    }
}

/// QEMU did not answer in time, or its guest has paused: neither is a reason to let its balloon down, nor to wait for more of it.
#[test]
fn who_does_not_answer_keeps_its_balloon_and_is_not_counted_on() {
    let mut g = Guest::new();
    (g.input.goal, g.used) = (GOAL, Pages::from_mib(100));
    g.seconds(20, FAST);
    let reported = std::mem::take(&mut g.input.reported);
    g.input.consumed = None;
    for _ in 0..9 {
        g.input.now += Duration::from_secs(5);
        g.control.step(&g.input);
        assert_eq!(g.control.command(), GOAL);
    }
    g.input.reported = reported;
    // Half of an order is done when it stands still, and then tells no more, or nothing new.
    for last_told in [0, 60] {
        let mut g = Guest::new();
        (g.input.goal, g.used) = (Pages::ZERO, Pages::from_mib(100));
        g.seconds(5, FAST);
        g.input.goal = Pages::from_mib(128);
        g.second(FAST);
        let stands = Pages::from_mib(70);
        (g.real, g.input.reported, g.input.consumed) = (stands, Some(stands), Some(SIZE - stands));
        g.input.guest_available = Some(Pages::from_mib(86));
        for second in 0..60 {
            g.input.now = Duration::from_secs(second + 6);
            g.input.guest_stats_age = Some(Duration::from_secs(second));
            if second > last_told {
                g.input.guest_available = None;
            }
            let out = g.control.step(&g.input);
            assert!(second < 12 || out.health != Health::Healthy || out.limit <= stands, "{out:?}");
        }
    }
}

/// However slowly a balloon may be let down.
#[test]
fn what_has_not_come_is_called_off_at_once() {
    let mut g = Guest::new();
    let slowly = BalloonConfig { deflate_rate: Pages(10), ..BalloonConfig::default() };
    g.control.set_config(slowly);
    g.second(Driver::Follows(1_000));
    g.input.goal = Pages::ZERO;
    assert_eq!(g.second(Driver::Follows(1_000)).command, Some(Pages(990)));
}
