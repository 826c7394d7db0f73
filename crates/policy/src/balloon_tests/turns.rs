//! Turns that come early or late.

use super::*;

#[test]
fn late_turns_bring_no_burst_and_time_does_not_run_backwards() {
    let mut g = Guest::new();
    g.input.goal = SIZE;
    g.used = Pages::ZERO;
    g.second(FAST);
    g.input.now += Duration::from_secs(3600);
    let out = g.second(FAST);
    assert_eq!(out.command, Some(BalloonConfig::default().cap(SIZE)));
    let mut g = Guest::new();
    g.input.now = Duration::from_secs(100);
    g.second(FAST);
    g.input.now = Duration::from_secs(5);
    assert_eq!(g.second(FAST).command, None, "no time has passed");
}

/// Other turns may come between those of a second: when the goal changes.
#[test]
fn turns_in_between_move_what_was_let_alone_at_once_and_nothing_faster_than_its_rate() {
    let mut g = Guest::new();
    g.input.goal = Pages::ZERO;
    g.used = Pages::ZERO;
    g.seconds(5, FAST);
    let rate = Pages::from_mib(64);
    let early = Duration::from_millis(200);
    g.input.goal = SIZE;
    g.input.now -= Duration::from_secs(1) - early;
    assert_eq!(g.second(FAST).command, Some(rate), "as much as in any turn");
    for n in 1..=3 {
        g.input.now -= Duration::from_secs(1) - early;
        let fifth = per_pace(rate, early);
        assert_eq!(g.second(FAST).command, Some(rate + Pages(n * fifth.0)), "turn {n}");
    }
    // Back by what it may move in that time, and not by a whole second's worth.
    g.input.goal = Pages::ZERO;
    let (before, back) = (g.asked, per_pace(BalloonConfig::default().deflate_rate, early));
    g.input.now -= Duration::from_secs(1) - early;
    assert_eq!(g.second(FAST).command, Some(before - back));
}
