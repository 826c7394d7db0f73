use proptest::prelude::*;

use super::*;

#[path = "balloon_tests/memory.rs"]
mod memory;
#[path = "balloon_tests/orders.rs"]
mod orders;
#[path = "balloon_tests/stale.rs"]
mod stale;

const SIZE: Pages = Pages::from_mib(256);
const GOAL: Pages = Pages::from_mib(100);

/// What the simulated guest's driver does with its orders.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Driver {
    /// Follows at so many pages per second.
    Follows(u64),
    /// Says it followed, and gives nothing.
    Lies,
    /// Does nothing.
    Dead,
}

/// A guest with a balloon, all its memory backed, and its controller.
struct Guest {
    control: BalloonControl,
    input: BalloonInput,
    asked: Pages,
    real: Pages,
    /// What the guest uses for good; the rest is available.
    used: Pages,
    stats: bool,
    /// The guest sends its statistics every so many seconds.
    stats_every: u64,
}

impl Guest {
    fn new() -> Guest {
        let input = BalloonInput {
            size: SIZE,
            goal: GOAL,
            has_device: true,
            driver_alive: true,
            reported: Some(Pages::ZERO),
            consumed: Some(SIZE),
            ..BalloonInput::default()
        };
        Guest {
            control: BalloonControl::new(BalloonConfig::default()),
            input,
            asked: Pages::ZERO,
            real: Pages::ZERO,
            used: Pages::from_mib(60),
            stats: true,
            stats_every: 1,
        }
    }

    fn available(&self) -> Pages {
        SIZE.saturating_sub(self.real).saturating_sub(self.used)
    }

    /// One second.
    fn second(&mut self, driver: Driver) -> BalloonOutput {
        let age = self.input.now.as_secs() % self.stats_every;
        if age == 0 {
            self.input.guest_available = self.stats.then(|| self.available());
        }
        self.input.guest_total = self.stats.then_some(SIZE);
        self.input.guest_stats_age = self.stats.then_some(Duration::from_secs(age));
        let out = self.control.step(&self.input);
        self.asked = out.command.unwrap_or(self.asked);
        match driver {
            Driver::Follows(rate) => {
                if self.asked > self.real {
                    let step = (self.asked - self.real).min(Pages(rate));
                    self.real += step;
                    self.input.discarded += step.0;
                } else {
                    self.real = self.real.saturating_sub(Pages(rate)).max(self.asked);
                }
                self.input.reported = Some(self.real);
            }
            Driver::Lies => self.input.reported = Some(self.asked),
            Driver::Dead => {}
        }
        self.input.consumed = Some(self.input.size - self.real);
        self.input.now += Duration::from_secs(1);
        out
    }

    fn seconds(&mut self, n: usize, driver: Driver) -> BalloonOutput {
        let mut last = self.second(driver);
        for _ in 1..n {
            last = self.second(driver);
        }
        last
    }
}

const FAST: Driver = Driver::Follows(100_000);

#[test]
fn inflates_at_its_rate_and_deflates_faster() {
    let mut g = Guest::new();
    let rate = Pages::from_mib(64);
    g.control.set_config(BalloonConfig { rate, ..BalloonConfig::default() });
    assert_eq!(g.second(FAST).command, Some(rate));
    assert_eq!(g.second(FAST).command, Some(GOAL));
    assert_eq!(g.second(FAST).command, None, "nothing new to say");
    g.input.goal = Pages::ZERO;
    assert_eq!(g.second(FAST).command, Some(Pages::ZERO), "100 MiB back in one second");
}

#[test]
fn late_turns_bring_no_burst_and_time_does_not_run_backwards() {
    let mut g = Guest::new();
    let rate = Pages::from_mib(16);
    g.control.set_config(BalloonConfig { rate, ..BalloonConfig::default() });
    g.second(FAST);
    g.input.now += Duration::from_secs(3600);
    assert_eq!(g.second(FAST).command, Some(rate + rate));
    let mut g = Guest::new();
    g.control.set_config(BalloonConfig { rate, ..BalloonConfig::default() });
    g.input.now = Duration::from_secs(100);
    g.second(FAST);
    g.input.now = Duration::from_secs(5);
    assert_eq!(g.second(FAST).command, None, "no time has passed");
    g.input.now = Duration::from_secs(101);
    assert_eq!(g.second(FAST).command, Some(rate + rate));
}

#[test]
fn never_beyond_the_cap() {
    let mut g = Guest::new();
    g.input.goal = SIZE;
    g.used = Pages::ZERO;
    let out = g.seconds(30, FAST);
    assert_eq!(g.asked, Pages((SIZE.0 as f64 * 0.65) as u64));
    assert_eq!(out.limit, g.asked);
    g.stats = false;
    assert_eq!(g.seconds(30, FAST).limit, g.asked, "without statistics the same cap");
}

#[test]
fn without_device_or_driver_nothing_is_asked() {
    for (device, driver) in [(false, false), (false, true), (true, false)] {
        let mut g = Guest::new();
        g.input.has_device = device;
        g.input.driver_alive = driver;
        for _ in 0..30 {
            let out = g.second(Driver::Dead);
            assert_eq!((out.command, out.health), (None, Health::Missing));
            assert_eq!(out.limit, Pages::ZERO);
        }
    }
}

#[test]
fn a_driver_that_appears_is_used_and_one_that_vanishes_is_let_go() {
    let mut g = Guest::new();
    g.input.driver_alive = false;
    g.seconds(20, Driver::Dead);
    g.input.driver_alive = true;
    assert_eq!(g.second(FAST).health, Health::Healthy);
    g.seconds(20, FAST);
    assert_eq!(g.real, GOAL);
    // The guest reboots: the next driver must not find an order waiting.
    g.input.driver_alive = false;
    let out = g.second(FAST);
    assert_eq!((out.command, out.health), (Some(Pages::ZERO), Health::Missing));
    assert_eq!(g.second(FAST).command, None);
}

#[test]
fn a_dead_driver_is_stuck_after_its_patience_and_no_sooner() {
    let mut g = Guest::new();
    for second in 0..10 {
        assert_eq!(g.second(Driver::Dead).health, Health::Healthy, "second {second}");
    }
    let out = g.second(Driver::Dead);
    assert_eq!(out.health, Health::Stuck);
    let asked = g.asked;
    g.input.goal = SIZE;
    g.seconds(60, Driver::Dead);
    assert_eq!(g.asked, asked, "no more is piled up on it");
    // Nor sooner where the clock began long ago.
    let mut g = Guest::new();
    g.input.now = Duration::from_secs(1_000);
    assert_eq!(g.seconds(10, Driver::Dead).health, Health::Healthy);
    assert_eq!(g.second(Driver::Dead).health, Health::Stuck);
}

/// Less is wanted of it than it was asked before, so that it is not behind any more. That is no movement.
#[test]
fn a_stuck_balloon_that_is_asked_for_less_must_show_that_it_can_be_trusted() {
    let released = |reported: Option<Pages>| {
        let mut g = Guest::new();
        g.input.reported = reported;
        assert_eq!(g.seconds(15, Driver::Dead).health, Health::Stuck);
        g.input.goal = Pages::ZERO;
        g.seconds(2, Driver::Dead).health
    };
    assert_eq!(released(None), Health::Stuck, "nothing tells how large it is");
    assert_eq!(released(Some(Pages::ZERO)), Health::Healthy);
    // It has done all it was asked since the last look.
    let mut g = Guest::new();
    assert_eq!(g.seconds(20, Driver::Dead).health, Health::Stuck);
    g.second(FAST);
    assert_eq!(g.second(FAST).health, Health::Healthy);
}

/// What was asked is done before the next look: as fast as it may be asked. A crawling driver shows its own
/// rate; a guest that was asked nothing shows none.
#[test]
fn its_rate_is_measured_while_it_has_something_to_do() {
    let mut guest = Guest::new();
    guest.input.goal = Pages::ZERO;
    assert_eq!(guest.seconds(5, FAST).rate, None);
    guest.input.goal = GOAL;
    let rate = guest.seconds(8, FAST).rate;
    assert_eq!(
        rate,
        Some(BalloonConfig::default().rate),
        "all in one second, and the rest is short"
    );
    let rate = Guest::new().seconds(30, Driver::Follows(100)).rate.unwrap();
    assert!((50..=150).contains(&rate.0), "{rate:?}");
}

/// A new rate counts a quarter, and so much per second, however long the look was in coming.
#[test]
fn its_rate_follows_what_is_seen_and_not_what_is_said() {
    let mut g = Guest::new();
    g.second(Driver::Follows(4_000));
    assert_eq!(g.second(Driver::Follows(1_000)).rate, Some(Pages(4_000)));
    assert_eq!(g.second(Driver::Follows(1_000)).rate, Some(Pages(4_000 - 3_000 / 4)));
    let mut g = Guest::new();
    g.second(Driver::Follows(1_000));
    g.input.now += Duration::from_secs(1);
    assert_eq!(g.second(Driver::Dead).rate, Some(Pages(500)));
    assert_eq!(Guest::new().seconds(5, Driver::Lies).rate, Some(Pages::ZERO));
}

/// Its reserve is 16 MiB.
#[test]
fn a_guest_with_less_than_half_its_reserve_is_short() {
    let short = |available: u64, age: u64| {
        let mut g = Guest::new();
        g.input.guest_available = Some(Pages(available));
        g.input.guest_stats_age = Some(Duration::from_secs(age));
        g.control.step(&g.input).short
    };
    let half = Pages::from_mib(8).0;
    assert_eq!([short(half - 1, 0), short(half, 0), short(half - 1, 11)], [true, false, false]);
}

#[test]
fn a_new_configuration_counts_from_the_next_step() {
    let mut g = Guest::new();
    g.control.set_config(BalloonConfig { rate: Pages(100), ..BalloonConfig::default() });
    assert_eq!(g.second(FAST).command, Some(Pages(100)));
    assert_eq!(
        (g.control.health(), g.control.health().to_string()),
        (Health::Healthy, "healthy".into())
    );
}

#[test]
fn what_a_guest_uses_refutes_what_it_says_but_for_pages_in_flight() {
    let uses = |consumed: u64, claim: u64| {
        refuted(
            &BalloonInput {
                size: SIZE,
                consumed: Some(Pages(consumed)),
                ..BalloonInput::default()
            },
            Pages(claim),
        )
    };
    // A 64th of its size.
    assert_eq!(
        [uses(SIZE.0 - 5_000 + 1_024, 5_000), uses(SIZE.0 - 5_000 + 1_025, 5_000)],
        [false, true]
    );
    assert!(per_pace(Pages(u64::MAX), Duration::from_secs(2)) > Pages(u64::MAX / 4));
}

#[test]
fn a_stuck_balloon_recovers_when_it_moves() {
    let mut g = Guest::new();
    assert_eq!(g.seconds(20, Driver::Dead).health, Health::Stuck);
    g.second(Driver::Follows(1_000));
    assert_eq!(g.second(Driver::Follows(1_000)).health, Health::Slow);
    g.seconds(60, FAST);
    let out = g.second(FAST);
    assert_eq!(out.health, Health::Healthy);
    assert_eq!(g.real, GOAL);
    // Moved by what it had to, then told to move again, and dead: stuck again.
    g.input.goal = Pages::from_mib(120);
    assert_eq!(g.seconds(12, Driver::Dead).health, Health::Stuck);
}

#[test]
fn a_crawling_driver_is_slow_until_it_has_caught_up() {
    let mut g = Guest::new();
    let out = g.seconds(30, Driver::Follows(100));
    assert_eq!(out.health, Health::Slow);
    let out = g.seconds(20, Driver::Dead);
    assert_eq!(out.health, Health::Stuck);
    let out = g.seconds(10, Driver::Follows(100));
    assert_eq!(out.health, Health::Slow);
    g.input.goal = Pages(1_000);
    assert_eq!(g.seconds(30, Driver::Follows(100)).health, Health::Healthy);
}

/// A report that stands still does not hide that pages come.
#[test]
fn pages_given_up_count_as_movement_when_reports_stall() {
    let mut g = Guest::new();
    for second in 0..40 {
        let out = g.second(Driver::Follows(300));
        g.input.reported = Some(Pages::ZERO);
        let expected = if second < 10 { Health::Healthy } else { Health::Slow };
        assert_eq!(out.health, expected, "second {second}");
    }
    assert_eq!(g.seconds(12, Driver::Dead).health, Health::Stuck);
}

/// Pages the guest never touched leave no trace when it gives them up: the report is evidence.
#[test]
fn giving_up_untouched_pages_counts_as_movement() {
    let mut g = Guest::new();
    for _ in 0..40 {
        let out = g.second(Driver::Follows(5_000));
        g.input.discarded = 0;
        g.input.consumed = Some(Pages::from_mib(80));
        assert_eq!(out.health, Health::Healthy);
    }
    let mut g = Guest::new();
    for second in 0..40 {
        let out = g.second(Driver::Follows(100));
        (g.input.discarded, g.input.consumed) = (0, Some(Pages::from_mib(80)));
        assert_eq!(
            out.health,
            if second < 10 { Health::Healthy } else { Health::Slow },
            "{second}"
        );
    }
}

#[test]
fn a_balloon_that_only_claims_to_have_followed_is_found_out() {
    let mut g = Guest::new();
    let out = g.seconds(12, Driver::Lies);
    assert_eq!(out.health, Health::Stuck);
    // Whatever it claims next.
    for claim in [u64::MAX, 0, SIZE.0, 1, GOAL.0] {
        g.input.reported = Some(Pages(claim));
        let out = g.second(Driver::Dead);
        assert_ne!(out.health, Health::Healthy, "claims {claim}");
    }
}

#[test]
fn a_report_that_jumps_gains_nothing() {
    let (mut honest, mut liar) = (Guest::new(), Guest::new());
    for g in [&mut honest, &mut liar] {
        g.seconds(15, FAST);
    }
    for (second, claim) in [u64::MAX, 0, 77, SIZE.0 * 3, 0, 1].into_iter().enumerate() {
        liar.input.reported = Some(Pages(claim));
        let out = liar.second(Driver::Dead);
        honest.second(FAST);
        assert!(liar.control.command() <= honest.control.command(), "second {second}");
        assert!(out.limit <= BalloonConfig::default().cap(SIZE));
    }
}

#[test]
fn a_guest_that_takes_pages_back_is_found_out() {
    let mut g = Guest::new();
    g.seconds(20, FAST);
    g.real = Pages::ZERO;
    g.input.reported = Some(Pages::ZERO);
    g.input.consumed = Some(SIZE);
    let out = g.seconds(2, Driver::Dead);
    assert_ne!(out.health, Health::Healthy);
    assert_eq!(g.seconds(15, Driver::Dead).health, Health::Stuck);
}

/// The pager books what a balloon gave up some seconds later: nothing swings meanwhile.
/// Linux takes back 1 MiB when it would have to kill somebody (`VIRTIO_BALLOON_OOM_NR_PAGES`), and leaves it so until its
/// balloon is told a size again.
#[test]
fn a_guest_that_takes_a_little_back_keeps_the_rest_and_is_not_stuck() {
    for stats in [true, false] {
        let mut g = Guest::new();
        g.stats = stats;
        g.seconds(60, FAST);
        assert_eq!((g.control.command(), g.control.health()), (GOAL, Health::Healthy));
        g.real = GOAL - Pages::from_mib(3);
        (g.input.reported, g.input.consumed) = (Some(g.real), Some(SIZE - g.real));
        let out = g.second(FAST);
        assert_eq!((out.health, out.command), (Health::Slow, Some(GOAL)), "asked for again");
        assert_eq!(
            (g.control.holds(), g.control.proven),
            (GOAL - Pages::from_mib(3), g.control.holds())
        );
        assert_eq!(g.second(FAST).health, Health::Healthy);
        // One that does not give it again is stuck in the end, with what it has.
        g.seconds(15, FAST);
        g.real = GOAL - Pages::from_mib(3);
        (g.input.reported, g.input.consumed) = (Some(g.real), Some(SIZE - g.real));
        assert_eq!(g.seconds(9, Driver::Dead).health, Health::Slow);
        assert_eq!(g.seconds(5, Driver::Dead).health, Health::Stuck);
        assert_eq!(g.control.holds(), GOAL - Pages::from_mib(3));
        assert_eq!(g.control.command(), GOAL);
    }
}

/// A page now and then, as a guest reports that it has freed one, is no balloon that moves.
#[test]
fn a_page_now_and_then_is_no_movement() {
    let mut g = Guest::new();
    for second in 0..60 {
        let out = g.second(Driver::Dead);
        g.input.discarded += 20;
        assert_eq!(out.health == Health::Stuck, second >= 10, "second {second}");
    }
}

/// 2.3 MiB in ten seconds are something of 128 MiB, and nothing of a GiB.
#[test]
fn a_pace_that_takes_for_ever_is_none() {
    for (size, moves) in [(256, true), (2_048, false)] {
        let mut g = Guest::new();
        (g.input.size, g.input.consumed) = (Pages::from_mib(size), Some(Pages::from_mib(size)));
        g.input.goal = Pages::from_mib(size / 2);
        for second in 0..60 {
            let out = g.control.step(&g.input);
            g.input.discarded += 60;
            g.input.now += Duration::from_secs(1);
            assert!(second < 40 || (out.health == Health::Slow) == moves, "{size} MiB: {out:?}");
        }
    }
}

/// Whatever its pace: what it is, it stays.
#[test]
fn a_driver_at_a_steady_pace_is_not_slow_and_stuck_by_turns() {
    for kib in (256..20_480).step_by(256) {
        let mut g = Guest::new();
        (g.input.size, g.input.goal, g.stats) =
            (Pages::from_mib(8_192), Pages::from_mib(4_096), false);
        let mut turns = 0;
        let mut last = Health::Healthy;
        for _ in 0..4_000 {
            let asked = g.asked;
            let health = g.second(Driver::Follows(kib / 4)).health;
            let quarter = Pages(BalloonConfig::default().rate.0 / 4);
            assert!(health != Health::Slow || g.asked.saturating_sub(asked) <= quarter);
            turns += u32::from(health != last);
            last = health;
        }
        // Slow once it is behind; or stuck, and slow when it has not much to do any more; and healthy when it is done.
        assert!(turns <= 4, "{kib} KiB/s: {turns} turns");
    }
}

#[test]
fn an_empty_balloon_that_is_not_believed_is_stuck() {
    let mut g = Guest::new();
    g.input.goal = Pages::ZERO;
    g.input.consumed = Some(SIZE + SIZE);
    for _ in 0..15 {
        let out = g.control.step(&g.input);
        g.input.now += Duration::from_secs(1);
        assert!(g.input.now.as_secs() < 12 || out.health == Health::Stuck, "{out:?}");
    }
}

/// It had filled its balloon as fast as any, and uses the pages all the same.
#[test]
fn the_rate_of_a_liar_falls() {
    let mut g = Guest::new();
    let honest = g.seconds(30, Driver::Follows(5_000)).rate.unwrap();
    for _ in 0..40 {
        g.input.consumed = Some(SIZE);
        let real = g.real;
        g.second(Driver::Lies);
        g.real = real;
    }
    g.input.consumed = Some(SIZE);
    let now = g.control.step(&g.input).rate.unwrap();
    assert!(now.0 * 20 < honest.0, "{now} of {honest}");
}

#[test]
fn a_part_that_is_taken_back_while_nobody_looks_costs_a_resumed_balloon_nothing_else() {
    let mut g = Guest::new();
    g.control = BalloonControl::resume(BalloonConfig::default(), GOAL);
    g.real = GOAL - Pages::from_mib(1);
    g.asked = GOAL;
    (g.input.reported, g.input.consumed) = (Some(g.real), Some(SIZE - g.real));
    // As much as leaves it its reserve.
    g.used = SIZE - GOAL - BalloonConfig::default().reserve(SIZE);
    for _ in 0..12 {
        g.second(FAST);
        assert_eq!(g.control.command(), GOAL);
    }
    assert_eq!((g.real, g.control.health()), (GOAL, Health::Healthy));
}

/// What is believed of a smaller balloon was believed of the larger one before.
#[test]
fn a_liar_that_takes_a_little_back_is_believed_no_more_than_before() {
    let mut g = Guest::new();
    assert_eq!(g.seconds(30, Driver::Lies).health, Health::Stuck);
    g.input.reported = Some(g.control.command() - Pages::from_mib(1));
    let out = g.second(Driver::Dead);
    assert_eq!((out.health, g.control.proven), (Health::Stuck, Pages::ZERO));
    assert_eq!(g.control.held(&g.input), Pages::ZERO);
}

#[test]
fn books_that_lag_do_not_move_the_balloon() {
    let mut g = Guest::new();
    let mut booked = std::collections::VecDeque::from([SIZE; 3]);
    for second in 0..30 {
        let before = g.control.command();
        let out = g.second(FAST);
        assert!(g.control.command() >= before && out.health == Health::Healthy, "{second}");
        booked.push_back(SIZE - g.real);
        g.input.consumed = booked.pop_front();
    }
    assert_eq!(g.real, GOAL);
}

#[test]
fn without_reports_the_books_are_evidence() {
    let mut g = Guest::new();
    for _ in 0..30 {
        let out = g.second(FAST);
        g.input.reported = None;
        assert_eq!(out.health, Health::Healthy);
    }
    let mut g = Guest::new();
    g.input.reported = None;
    assert_eq!(g.seconds(15, Driver::Dead).health, Health::Stuck);
    // Without either there is none.
    let mut g = Guest::new();
    for _ in 0..15 {
        (g.input.reported, g.input.consumed) = (None, None);
        g.second(Driver::Dead);
    }
    assert_eq!(g.control.health(), Health::Stuck);
}

#[test]
fn the_guest_keeps_its_reserve() {
    let mut g = Guest::new();
    g.used = Pages::from_mib(200);
    for _ in 0..60 {
        g.second(FAST);
        assert!(g.available() >= Pages::from_mib(16), "{}", g.available());
    }
    assert_eq!(g.real, Pages::from_mib(40), "256 - 200 - 16");
}

/// The driver answers only after some seconds: orders already given are counted.
#[test]
fn the_guest_keeps_its_reserve_with_a_driver_that_lags() {
    for rate in [500, 1_000, 3_000] {
        let mut g = Guest::new();
        g.used = Pages::from_mib(180);
        for _ in 0..200 {
            g.second(Driver::Follows(rate));
            assert!(g.available() >= Pages::from_mib(16), "{} at {rate}/s", g.available());
        }
    }
}

/// Orders given since the statistics were taken are not in them, and count as taken too.
#[test]
fn the_guest_keeps_its_reserve_when_its_statistics_are_old() {
    for every in [2, 3, 5, 9] {
        let mut g = Guest::new();
        (g.stats_every, g.used) = (every, Pages::from_mib(150));
        g.input.goal = SIZE;
        for _ in 0..60 {
            g.second(FAST);
            assert!(g.available() >= Pages::from_mib(16), "{} every {every} s", g.available());
        }
        assert_eq!(g.real, Pages::from_mib(90), "256 - 150 - 16, statistics every {every} s");
    }
}

#[test]
fn a_guest_in_distress_gets_memory_back_against_the_goal() {
    let mut g = Guest::new();
    g.seconds(20, FAST);
    assert_eq!(g.real, GOAL);
    // It begins to use all but 12 MiB: above half the reserve, the balloon stays as it is.
    g.used = SIZE - GOAL - Pages::from_mib(12);
    let out = g.seconds(5, FAST);
    assert_eq!((g.real, out.limit), (GOAL, GOAL));
    // All but 2 MiB: the balloon makes room for the reserve.
    g.used = SIZE - GOAL - Pages::from_mib(2);
    let out = g.second(FAST);
    assert!(g.real <= Pages::from_mib(86), "{} {out:?}", g.real);
    assert_eq!(out.limit, Pages::from_mib(86), "14 of its 16 MiB are missing");
    let out = g.seconds(30, FAST);
    assert!(out.limit < GOAL && g.available() >= Pages::from_mib(16), "{out:?}");
    let settled = g.real;
    assert!(g.available() >= Pages::from_mib(16));
    g.seconds(30, FAST);
    assert_eq!(g.real, settled, "it does not swing");
}

#[test]
fn an_order_that_is_not_followed_is_repeated() {
    let mut g = Guest::new();
    let sent = (0..30).filter(|_| g.second(Driver::Dead).command.is_some()).count();
    assert!((3..=5).contains(&sent), "{sent} orders: the rise, then one each 10 s");
}

#[test]
fn absurd_configurations_do_no_harm() {
    for fraction in [f64::NAN, -1.0, 9.0] {
        let config = BalloonConfig {
            max_fraction: fraction,
            guest_reserve_fraction: f64::NAN,
            rate: Pages(u64::MAX),
            fresh: Duration::MAX,
            patience: Duration::MAX,
            ..BalloonConfig::default()
        };
        let mut g = Guest::new();
        g.control = BalloonControl::new(config);
        for _ in 0..5 {
            g.input.goal = Pages(u64::MAX);
            assert!(g.second(FAST).limit <= SIZE);
        }
    }
}

prop_compose! {
    fn any_second()(
        goal in 0u64..100_000, reported in proptest::option::of(any::<u64>()),
        discarded in 0u64..10_000, available in proptest::option::of(0u64..100_000),
        age in 0u64..20, wait in 0u64..5_000, alive in prop::bool::weighted(0.95),
        consumed in proptest::option::of(0u64..100_000),
    ) -> BalloonInput {
        BalloonInput {
            now: Duration::from_millis(wait),
            size: SIZE,
            most: None,
            goal: Pages(goal),
            has_device: true,
            driver_alive: alive,
            reported: reported.map(Pages),
            discarded,
            consumed: consumed.map(Pages),
            guest_available: available.map(Pages),
            guest_total: Some(SIZE),
            guest_stats_age: Some(Duration::from_secs(age)),
        }
    }
}

proptest! {
    /// Whatever guests say: commands stay below the cap, within the rate and the limit.
    #[test]
    fn commands_stay_within_bounds(inputs in proptest::collection::vec(any_second(), 1..80)) {
        let config = BalloonConfig { rate: Pages::from_mib(32), ..BalloonConfig::default() };
        let mut control = BalloonControl::new(config);
        let (mut now, mut discarded) = (Duration::ZERO, 0);
        for mut input in inputs {
            now += input.now;
            discarded += input.discarded;
            (input.now, input.discarded) = (now, discarded);
            let before = control.command();
            let out = control.step(&input);
            let after = control.command();
            prop_assert!(out.limit <= config.cap(SIZE));
            prop_assert!(after <= config.cap(SIZE));
            prop_assert!(after <= before + config.rate);
            prop_assert!(after <= before || after <= out.limit.min(input.goal));
            if after != before && input.driver_alive {
                prop_assert_eq!(out.command, Some(after));
            }
        }
    }

    /// A guest that says it followed and gives nothing is never taken for healthy, whatever
    /// it is asked: the pager knows what it uses.
    #[test]
    fn lies_are_not_health(goals in proptest::collection::vec(2_000u64..60_000, 12..40)) {
        let mut g = Guest::new();
        for (second, goal) in goals.into_iter().enumerate() {
            g.input.goal = Pages(goal);
            let out = g.second(Driver::Lies);
            if second > 10 {
                prop_assert_ne!(out.health, Health::Healthy);
            }
        }
    }

    /// An honest guest, whatever it uses and however fast its driver, keeps half its reserve.
    #[test]
    fn honest_guests_are_not_driven_out_of_memory(
        used in 0u64..200, rate in 100u64..30_000, goal in 0u64..256, wait in 0usize..3,
        every in 1u64..6,
    ) {
        let mut g = Guest::new();
        g.stats_every = every;
        g.used = Pages::from_mib(used);
        g.input.goal = Pages::from_mib(goal);
        for second in 0..120 {
            // Reports may be a turn or two old.
            let reported = g.input.reported;
            g.second(Driver::Follows(rate));
            if second % 3 < wait {
                g.input.reported = reported;
            }
            prop_assert!(g.available() >= Pages::from_mib(8), "{}", g.available());
        }
    }
}

#[test]
fn a_balloon_that_was_driven_before_is_led_on_from_where_it_is() {
    let config = BalloonConfig::default();
    let holds = Pages::from_mib(100);
    let input = BalloonInput {
        size: Pages::from_mib(1024),
        goal: Pages::from_mib(120),
        has_device: true,
        driver_alive: true,
        reported: Some(holds),
        ..BalloonInput::default()
    };
    let mut resumed = BalloonControl::resume(config, holds);
    let first = resumed.step(&input);
    assert_eq!(first.command, Some(resumed.command()));
    assert!(resumed.command() > holds && resumed.command() <= input.goal, "{resumed:?}");
}

#[test]
fn a_configuration_that_cannot_work_names_its_field() {
    let good = BalloonConfig::default();
    assert_eq!(good.check(), Ok(()));
    assert_eq!(BalloonConfig { rate: BalloonConfig::MOST_RATE, ..good }.check(), Ok(()));
    for (field, bad) in [
        ("rate", BalloonConfig { rate: Pages::ZERO, ..good }),
        ("rate", BalloonConfig { rate: Pages(u64::MAX), ..good }),
        ("deflate_rate", BalloonConfig { deflate_rate: Pages(1 << 33), ..good }),
        ("max_fraction", BalloonConfig { max_fraction: 0.96, ..good }),
        ("max_fraction", BalloonConfig { max_fraction: f64::NAN, ..good }),
        ("patience", BalloonConfig { patience: Duration::ZERO, ..good }),
        ("patience", BalloonConfig { patience: Duration::from_secs(86_401), ..good }),
    ] {
        assert_eq!(bad.check().unwrap_err().field, field, "{bad:?}");
    }
}
