//! What a controller remembers of its balloon: enough for the longest patience, and no more.

use super::*;

/// More turns than are kept: they count as fewer, over all of the time.
#[test]
fn patience_of_many_turns_ends_too() {
    let mut g = Guest::new();
    let patience = Duration::from_secs(1_800);
    g.control = BalloonControl::new(BalloonConfig { patience, ..BalloonConfig::default() });
    assert_eq!(g.seconds(1_790, Driver::Dead).health, Health::Healthy);
    assert_eq!(g.seconds(30, Driver::Dead).health, Health::Stuck);
    assert_eq!(g.seconds(5_000, Driver::Dead).health, Health::Stuck);
    g.seconds(2, FAST);
    assert_eq!(g.second(FAST).health, Health::Healthy);
}

/// However long it is watched, and however often.
#[test]
fn what_it_remembers_is_bounded() {
    let mut g = Guest::new();
    g.seconds(100, FAST);
    assert!(g.control.moments.len() < 20, "{} moments", g.control.moments.len());
    for _ in 0..2 * MAX_MOMENTS {
        g.input.now += Duration::from_millis(1);
        g.control.step(&g.input);
    }
    assert!(g.control.moments.len() <= MAX_MOMENTS, "{} moments", g.control.moments.len());
}
