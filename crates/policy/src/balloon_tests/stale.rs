//! Statistics that are old, or make no sense.

use super::*;

#[test]
fn stale_or_senseless_statistics_make_careful_and_do_not_paralyse() {
    let quarter = Pages::from_mib(16);
    for spoil in [
        (|i: &mut BalloonInput| i.guest_stats_age = None) as fn(&mut BalloonInput),
        |i| i.guest_stats_age = Some(Duration::from_secs(11)),
        |i| i.guest_available = None,
        |i| i.guest_available = Some(Pages(u64::MAX)),
        |i| i.guest_total = Some(Pages(1)),
    ] {
        let mut g = Guest::new();
        g.input.guest_available = Some(SIZE);
        g.input.guest_total = Some(SIZE);
        g.input.guest_stats_age = Some(Duration::ZERO);
        spoil(&mut g.input);
        let out = g.control.step(&g.input);
        assert_eq!(out.command, Some(quarter));
        assert_eq!(out.limit, BalloonConfig::default().cap(SIZE));
    }
}

/// A guest that is paused tells nothing more: it is not asked for what it could not spare when it was heard of last, to find
/// that when it goes on.
#[test]
fn a_guest_that_tells_nothing_new_bears_what_it_bore() {
    let mut g = Guest::new();
    g.used = SIZE - GOAL - Pages::from_mib(20);
    g.input.goal = SIZE;
    g.seconds(20, FAST);
    let (asked, left) = (g.control.command(), g.available());
    assert!((Pages::from_mib(16)..Pages::from_mib(17)).contains(&left), "{left}");
    g.input.guest_stats_age = Some(Duration::ZERO);
    for _ in 0..120 {
        g.input.now += Duration::from_secs(1);
        *g.input.guest_stats_age.as_mut().unwrap() += Duration::from_secs(1);
        g.control.step(&g.input);
        assert_eq!(g.control.command(), asked);
    }
    // Nor by the next manager, who finds old statistics alone.
    let mut next = BalloonControl::resume(BalloonConfig::default(), asked);
    for _ in 0..60 {
        g.input.now += Duration::from_secs(1);
        next.step(&g.input);
        assert!(next.command() <= asked + Pages::from_mib(5), "{}", next.command());
    }
    // With room left it is asked for that much, and no more, slowly.
    let mut g = Guest::new();
    (g.used, g.input.goal) = (Pages::from_mib(150), SIZE);
    g.second(FAST);
    g.input.guest_stats_age = Some(Duration::from_secs(60));
    for _ in 0..60 {
        g.input.now += Duration::from_secs(1);
        let out = g.control.step(&g.input);
        assert_eq!(out.limit, Pages::from_mib(90), "256 - 150 - 16");
    }
    assert!(g.control.command() <= Pages::from_mib(90));
    // Nor where it tells nothing at all any more (its clock, or the host's, was set back).
    let asked = g.control.command();
    g.input.guest_stats_age = None;
    for _ in 0..60 {
        g.input.now += Duration::from_secs(1);
        assert_eq!(g.control.step(&g.input).limit, Pages::from_mib(90));
    }
    assert!(g.control.command() <= Pages::from_mib(90), "{asked}");
}
