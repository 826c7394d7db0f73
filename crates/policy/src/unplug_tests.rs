use proptest::prelude::*;

use super::*;
use crate::balloon::{BalloonControl, BalloonInput};

const BOOT: Pages = Pages::from_mib(128);
const GIVEN: Pages = Pages::from_mib(256);
/// All of these is more than a balloon alone can take: 65% of what the guest began with.
const BALLOON: Pages = Pages(BOOT.0 * 65 / 100);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Balloon {
    Works,
    /// It finds no more pages than these.
    Stops(Pages),
    Dead,
    NoDriver,
}

/// A guest with a balloon and memory that was plugged, and the controllers of both.
struct Guest {
    balloon: BalloonControl,
    unplug: UnplugControl,
    driver: Balloon,
    /// Pages a second that it unplugs, in blocks.
    unplugs: u64,
    boot: Pages,
    given: Pages,
    plugged: Pages,
    holds: Pages,
    asked: Pages,
    /// What it uses for good.
    used: Pages,
    /// What the pager counts of it, if it does.
    consumed: Option<Pages>,
    goal: Pages,
    now: Duration,
    /// It tells no statistics any more, and its drivers go on.
    is_mute: bool,
}

impl Guest {
    fn new(driver: Balloon) -> Guest {
        let config = BalloonConfig::default();
        Guest {
            balloon: BalloonControl::new(config),
            unplug: UnplugControl::new(config, Pages::ZERO),
            driver,
            unplugs: 32_768,
            boot: BOOT,
            given: GIVEN,
            plugged: GIVEN,
            holds: Pages::ZERO,
            asked: Pages::ZERO,
            used: Pages::from_mib(60),
            consumed: None,
            goal: Pages::ZERO,
            now: Duration::ZERO,
            is_mute: false,
        }
    }

    fn available(&self) -> Pages {
        (self.boot + self.plugged).saturating_sub(self.holds).saturating_sub(self.used)
    }

    /// One second, as the manager's loop has it. Answers both as one.
    fn second(&mut self) -> (BalloonOutput, UnplugOutput) {
        let size = self.boot + self.plugged;
        let tells = self.driver != Balloon::NoDriver;
        let withheld = self.unplug.withheld(self.given, self.plugged);
        let input = BalloonInput {
            now: self.now,
            size,
            most: Some(self.boot),
            has_device: true,
            consumed: self.consumed,
            driver_alive: tells,
            reported: tells.then_some(self.holds),
            guest_available: (tells && !self.is_mute).then(|| self.available()),
            guest_total: tells.then_some(size),
            guest_stats_age: tells.then_some(Duration::ZERO),
            ..BalloonInput::default()
        };
        let balloon_most = self.balloon.most(&input);
        let input = BalloonInput { goal: self.goal, ..input };
        let goal = balloon_goal(&input, withheld, &self.balloon, balloon_most);
        let balloon = self.balloon.step(&BalloonInput { goal, ..input });
        let unplug = self.unplug.step(
            &UnplugInput {
                now: self.now,
                goal: self.goal,
                given: self.given,
                plugged: self.plugged,
                size,
                balloon_most,
                balloon: self.balloon.holds(),
                held: self.balloon.held(&input),
                guest_available: self.balloon.available(&input),
            },
            &balloon,
        );
        self.asked = balloon.command.unwrap_or(self.asked);
        match self.driver {
            Balloon::Works => self.holds = self.asked,
            Balloon::Stops(most) => self.holds = self.asked.min(most),
            Balloon::Dead | Balloon::NoDriver => {}
        }
        let requested = self.given.saturating_sub(unplug.withhold);
        if requested < self.plugged {
            let step = (self.plugged - requested).min(Pages(self.unplugs));
            self.plugged -= whole(step);
        } else {
            self.plugged = requested;
        }
        self.now += Duration::from_secs(1);
        (together(&balloon, self.balloon.held(&input), &unplug), unplug)
    }

    fn seconds(&mut self, n: usize) -> (BalloonOutput, UnplugOutput) {
        let mut last = self.second();
        for _ in 1..n {
            last = self.second();
        }
        last
    }

    fn withheld(&self) -> Pages {
        self.holds + self.given.saturating_sub(self.plugged)
    }
}

#[test]
fn what_a_balloon_reaches_is_left_to_it() {
    let mut guest = Guest::new(Balloon::Works);
    guest.goal = BALLOON;
    let (both, unplug) = guest.seconds(10);
    assert_eq!((guest.holds, guest.plugged), (BALLOON, GIVEN));
    assert_eq!((unplug.withhold, unplug.withheld), (Pages(0), Pages(0)));
    assert_eq!(both.health, Health::Healthy);
    // As much of what was plugged as of the rest.
    assert_eq!(both.limit, BALLOON + Pages(GIVEN.0 * 65 / 100));
}

#[test]
fn what_is_beyond_a_balloon_is_unplugged_and_comes_back_first() {
    let mut guest = Guest::new(Balloon::Works);
    guest.goal = Pages::from_mib(230);
    let (both, unplug) = guest.seconds(20);
    assert_eq!(guest.holds, BALLOON);
    let beyond = guest.goal - BALLOON;
    assert_eq!(unplug.withheld, whole(beyond));
    assert_eq!(unplug.withheld, GIVEN - guest.plugged);
    assert!(both.limit + BLOCK >= guest.goal && both.health == Health::Healthy, "{both:?}");
    guest.goal = BALLOON;
    guest.seconds(10);
    assert_eq!((guest.holds, guest.plugged), (BALLOON, GIVEN));
    guest.goal = Pages(0);
    guest.seconds(10);
    assert_eq!(guest.withheld(), Pages(0));
}

#[test]
fn what_is_withheld_falls_to_a_goal_and_not_below_it() {
    for goal in [200, 150, 84, 60, 10] {
        let mut guest = Guest::new(Balloon::Works);
        guest.goal = Pages::from_mib(230);
        guest.seconds(20);
        guest.goal = Pages::from_mib(goal);
        for second in 0..20 {
            guest.second();
            let withheld = guest.withheld() + BLOCK;
            assert!(withheld >= guest.goal, "{second}: {withheld:?} of {goal} MiB");
        }
        assert!(guest.withheld() <= guest.goal, "{:?} of {goal} MiB", guest.withheld());
    }
}

#[test]
fn a_balloon_that_wakes_up_does_not_take_what_was_unplugged_in_its_place() {
    let mut guest = Guest::new(Balloon::Dead);
    guest.goal = Pages::from_mib(100);
    guest.seconds(30);
    guest.driver = Balloon::Works;
    for second in 0..30 {
        guest.second();
        assert!(guest.withheld() <= guest.goal + PROBE, "{second}: {:?}", guest.withheld());
    }
    assert!(guest.withheld() + BLOCK > guest.goal, "{:?}", guest.withheld());
    // It does its part of what is asked from then on.
    guest.goal = Pages(0);
    guest.seconds(10);
    guest.goal = Pages::from_mib(60);
    guest.seconds(10);
    assert_eq!((guest.holds, guest.plugged), (guest.goal, GIVEN));
}

#[test]
fn a_balloon_that_stops_part_way_keeps_what_it_holds() {
    for mib in [1, 30, 59] {
        let holds = Pages::from_mib(mib);
        let mut guest = Guest::new(Balloon::Stops(holds));
        guest.goal = Pages::from_mib(60);
        guest.seconds(20);
        let plugged = guest.plugged;
        for second in 20..300 {
            guest.second();
            assert_eq!((guest.holds, guest.plugged), (holds, plugged), "{mib} MiB, {second}");
        }
        assert!(guest.withheld() + BLOCK >= guest.goal, "{:?}", guest.withheld());
    }
}

/// It moves each time just after it was given up.
#[test]
fn a_balloon_that_crawls_does_not_swing_with_what_was_unplugged() {
    let mut guest = Guest::new(Balloon::Stops(Pages::from_mib(10)));
    guest.goal = Pages::from_mib(60);
    guest.seconds(20);
    for step in 1..20 {
        guest.driver = Balloon::Stops(Pages::from_mib(10 + 2 * step));
        for second in 0..15 {
            guest.second();
            let (withheld, goal) = (guest.withheld(), guest.goal);
            assert!(
                withheld + BLOCK + PROBE >= goal && withheld <= goal + PROBE,
                "step {step}, {second}: {withheld:?}"
            );
        }
    }
}

#[test]
fn a_guest_that_goes_on_using_what_it_gave_up_is_left_to_others() {
    for driver in [Balloon::Works, Balloon::NoDriver] {
        let mut guest = Guest::new(driver);
        guest.consumed = Some(BOOT + GIVEN);
        guest.goal = Pages::from_mib(60);
        let (both, _) = guest.seconds(30);
        let books = guest.holds + GIVEN.saturating_sub(guest.plugged);
        assert!(books >= guest.goal, "{driver:?}: {books:?}");
        assert!(matches!(both.health, Health::Stuck | Health::Missing), "{driver:?}: {both:?}");
        // It does as it says.
        guest.consumed = Some((BOOT + GIVEN).saturating_sub(books));
        let (both, _) = guest.seconds(3);
        assert_eq!(both.health, Health::Healthy, "{driver:?}");
    }
}

#[test]
fn a_guest_that_unplugs_slowly_is_slow() {
    let mut guest = Guest::new(Balloon::Works);
    guest.unplugs = BLOCK.0;
    guest.goal = Pages::from_mib(230);
    let (both, unplug) = guest.seconds(9);
    assert_eq!((both.health, unplug.late), (Health::Healthy, false));
    let (both, unplug) = guest.seconds(10);
    assert!(both.health == Health::Slow && unplug.late, "{both:?}");
    let (both, unplug) = guest.seconds(120);
    assert_eq!((both.health, unplug.late), (Health::Healthy, false));
}

#[test]
fn a_balloon_that_does_nothing_is_stood_in_for() {
    for driver in [Balloon::Dead, Balloon::NoDriver] {
        let mut guest = Guest::new(driver);
        guest.goal = Pages::from_mib(100);
        let (both, unplug) = guest.seconds(30);
        assert_eq!(unplug.withheld, Pages::from_mib(100), "{driver:?}");
        assert_eq!(both.health, Health::Healthy, "{driver:?}");
        assert!(both.limit >= guest.goal, "{driver:?} {both:?}");
        guest.goal = Pages(0);
        guest.seconds(10);
        assert_eq!(guest.withheld(), Pages(0), "{driver:?}");
    }
}

#[test]
fn a_guest_that_tells_nothing_is_taken_from_slowly() {
    let mut told = Guest::new(Balloon::Dead);
    let mut untold = Guest::new(Balloon::NoDriver);
    for guest in [&mut told, &mut untold] {
        guest.goal = Pages::from_mib(160);
    }
    // The dead one is found out after its patience.
    told.seconds(13);
    untold.seconds(3);
    assert!(told.withheld() >= Pages::from_mib(128), "{:?}", told.withheld());
    assert!(untold.withheld() <= Pages::from_mib(48), "{:?}", untold.withheld());
}

#[test]
fn from_a_guest_that_tells_nothing_any_more_no_more_is_unplugged() {
    let mut guest = Guest::new(Balloon::Dead);
    guest.goal = Pages::from_mib(96);
    guest.seconds(40);
    let before = guest.withheld();
    assert!(before >= Pages::from_mib(88), "{before}");
    guest.is_mute = true;
    guest.used = BOOT + guest.plugged - Pages::from_mib(8);
    guest.goal = Pages::from_mib(200);
    guest.seconds(60);
    assert_eq!(guest.withheld(), before);
    guest.is_mute = false;
    guest.seconds(10);
    assert!(guest.withheld() < before, "it has told that it runs short: {}", guest.withheld());
}

#[test]
fn a_guest_keeps_its_reserve() {
    let mut guest = Guest::new(Balloon::Works);
    guest.used = Pages::from_mib(250);
    guest.goal = Pages::from_mib(240);
    let config = BalloonConfig::default();
    for second in 0..60 {
        let (both, _) = guest.second();
        assert!(guest.available() >= config.reserve(BOOT), "{second}: {:?}", guest.available());
        assert!(both.limit < Pages::from_mib(130), "{second}: {both:?}");
    }
}

#[test]
fn a_guest_in_distress_gets_back_what_its_balloon_cannot_give() {
    let mut guest = Guest::new(Balloon::Dead);
    guest.goal = Pages::from_mib(160);
    guest.seconds(30);
    assert_eq!(guest.withheld(), Pages::from_mib(160));
    guest.used = Pages::from_mib(220);
    let (both, _) = guest.seconds(10);
    let reserve = BalloonConfig::default().reserve(BOOT + guest.plugged);
    assert!(guest.available().0 >= reserve.0 / 2, "{:?}", guest.available());
    assert!(both.limit < guest.goal);
}

#[test]
fn a_guest_that_cannot_unplug_is_not_asked_on_and_on() {
    let mut guest = Guest::new(Balloon::NoDriver);
    guest.unplugs = 0;
    guest.goal = Pages::from_mib(100);
    let mut asked = 0;
    for _ in 0..200 {
        let (both, unplug) = guest.second();
        asked += usize::from(!unplug.withhold.is_zero());
        if guest.unplug.rests_until > guest.now {
            assert_eq!((unplug.limit, unplug.withhold), (Pages(0), Pages(0)));
            // Nothing comes: others do it.
            assert_eq!((both.health, both.limit), (Health::Missing, Pages(0)));
        }
    }
    assert!((10..50).contains(&asked), "{asked}");
    // It can after all.
    guest.unplugs = 32_768;
    guest.seconds(100);
    assert_eq!(guest.withheld(), Pages::from_mib(100));
}

#[test]
fn what_it_unplugged_of_what_it_was_asked_stays() {
    let mut guest = Guest::new(Balloon::Works);
    guest.goal = Pages::from_mib(240);
    guest.seconds(2);
    guest.unplugs = 0;
    let (both, unplug) = guest.seconds(40);
    assert!(!unplug.withheld.is_zero());
    assert_eq!((unplug.withhold, unplug.limit), (unplug.withheld, unplug.withheld));
    assert_eq!(both.limit, BALLOON + unplug.withheld);
}

#[test]
fn what_its_owner_takes_back_is_not_withheld_from_him() {
    let mut guest = Guest::new(Balloon::Works);
    guest.goal = Pages::from_mib(200);
    guest.seconds(20);
    guest.given = Pages::from_mib(64);
    let (_, unplug) = guest.seconds(10);
    assert!(unplug.withhold <= guest.given);
    assert!(guest.plugged <= guest.given);
    guest.given = Pages(0);
    let (both, unplug) = guest.seconds(10);
    assert_eq!(unplug, UnplugOutput { rate: RATE, ..UnplugOutput::default() });
    assert_eq!(guest.plugged, Pages(0));
    assert!(both.limit <= BALLOON, "{both:?}");
}

#[test]
fn what_a_former_manager_withheld_is_led_on_from_where_it_is() {
    let mut guest = Guest::new(Balloon::Works);
    guest.plugged = Pages::from_mib(156);
    guest.unplug = UnplugControl::new(BalloonConfig::default(), Pages::from_mib(100));
    guest.goal = Pages::from_mib(184);
    let (_, unplug) = guest.second();
    assert_eq!(unplug.withheld, Pages::from_mib(100));
    assert_eq!(guest.plugged, Pages::from_mib(156));
}

/// A guest of 4 GiB beside its 128 MiB, which tells that it needs next to nothing, has no balloon, and of which as
/// much as may be is to be withheld.
fn idle(ms: u64, done: Pages) -> (UnplugInput, BalloonOutput) {
    let given = Pages::from_mib(4_096);
    let plugged = given - done;
    let input = UnplugInput {
        now: Duration::from_millis(ms),
        goal: given,
        given,
        plugged,
        size: BOOT + plugged,
        guest_available: Some(BOOT + plugged),
        ..UnplugInput::default()
    };
    (input, BalloonOutput { health: Health::Missing, ..BalloonOutput::UNKNOWN })
}

#[test]
fn as_much_is_asked_for_as_there_was_time_for_and_no_burst() {
    let rate = RATE.0;
    let turns =
        [(1, BLOCK.0), (250, rate / 4), (1_000, rate), (2_000, 2 * rate), (9_000, 2 * rate)];
    for (ms, more) in turns {
        let mut control = UnplugControl::new(BalloonConfig::default(), Pages::ZERO);
        let (input, balloon) = idle(0, Pages::ZERO);
        control.step(&UnplugInput { goal: Pages::ZERO, ..input }, &balloon);
        let (input, balloon) = idle(ms, Pages::ZERO);
        assert_eq!(control.step(&input, &balloon).withhold, Pages(more), "{ms} ms");
    }
}

#[test]
fn more_is_asked_for_when_the_last_is_done_and_the_guest_does_not_rest() {
    let asked = |withhold: u64, done: u64, rests_until: u64| {
        let mut control = UnplugControl::new(BalloonConfig::default(), Pages(withhold));
        control.rests_until = Duration::from_secs(rests_until);
        // Once it was asked for so much, whatever it is now.
        let (at, once) = (Duration::from_secs(9), Pages(4_096));
        control.moments.push_back(Moment { at, withhold: once, withheld: Pages(done) });
        let (input, balloon) = idle(10_000, Pages(done));
        control.step(&input, &balloon).withhold.0
    };
    let rate = RATE.0;
    assert_eq!(asked(4_096, 4_096 - SLACK.0, 0), 4_096 + rate);
    assert_eq!(asked(4_096, 4_096 - SLACK.0 - 1, 0), 4_096);
    assert_eq!(asked(4_096, 4_096, 10), 4_096 + rate);
    assert_eq!(asked(4_096, 4_096, 11), 4_096);
    assert_eq!(asked(0, 4_096, 11), 0, "what comes late is not asked for while it rests");
}

/// What was asked for as long ago as a balloon has patience, or less since.
#[test]
fn what_was_asked_for_just_now_is_not_late() {
    let second = Duration::from_secs(1);
    let mut control = UnplugControl::new(BalloonConfig::default(), Pages(4_096));
    for (at, withhold) in [(0, 0), (5, 4_096)] {
        let at = second * at;
        control.moments.push_back(Moment { at, withhold: Pages(withhold), withheld: Pages(0) });
    }
    let due = |now: u32| control.due(second * now).0;
    assert_eq!([9, 10, 14, 15, 16].map(due), [0, 0, 0, 4_096, 4_096]);
    control.withhold = Pages(512);
    assert_eq!(control.due(second * 15), Pages(512));
}

#[test]
fn what_is_missing_within_the_slack_is_not_late() {
    for (missing, late) in [(SLACK, false), (SLACK + Pages(1), true)] {
        let asked = Pages(8_192);
        let mut control = UnplugControl::new(BalloonConfig::default(), asked);
        let withheld = asked - missing;
        let at = Duration::ZERO;
        control.moments.push_back(Moment { at, withhold: asked, withheld });
        let (input, balloon) = idle(10_000, withheld);
        assert_eq!(control.step(&input, &balloon).late, late, "{missing:?}");
    }
}

#[test]
fn a_guest_is_behind_when_more_than_the_slack_is_missing() {
    for (missing, behind) in [(SLACK, false), (SLACK + Pages(1), true)] {
        let mut control = UnplugControl::new(BalloonConfig::default(), Pages(8_192));
        let withheld = Pages(8_192) - missing;
        control.judge(Duration::from_secs(1), withheld, Some(withheld));
        assert_eq!(control.idle_since.is_some(), behind, "{missing:?}");
    }
}

#[test]
fn below_half_of_its_reserve_a_guest_gets_back_what_it_lacks_of_all_of_it() {
    let done = Pages(131_072);
    let limit = |available: fn(Pages) -> Pages, holds: u64| {
        let control = UnplugControl::new(BalloonConfig::default(), done);
        let (input, balloon) = idle(0, done);
        let reserve = control.config.reserve(input.size);
        let guest_available = Some(available(reserve));
        let input = UnplugInput { guest_available, balloon: Pages(holds), ..input };
        (control.limit(&input, &balloon, input.now, done), reserve)
    };
    let (at_half, reserve) = limit(|reserve| Pages(reserve.0 / 2), 0);
    assert!(reserve.0.is_multiple_of(2));
    assert_eq!(at_half, done);
    let below = |reserve: Pages| Pages(reserve.0 / 2 - 1);
    assert_eq!(limit(below, 0).0, done - Pages(reserve.0 / 2 + 1));
    assert_eq!(limit(below, 1_000).0, done - Pages(reserve.0 / 2 + 1 - 1_000));
}

#[test]
fn unplugging_stands_in_for_a_balloon_while_another_block_can_come() {
    let both = |health, limit: Pages| {
        let balloon = BalloonOutput { health, limit: Pages(9_000), ..BalloonOutput::UNKNOWN };
        let unplug = UnplugOutput { limit, withheld: Pages(4_096), ..UnplugOutput::default() };
        let both = together(&balloon, Pages(700), &unplug);
        (both.health, both.limit - limit)
    };
    let (none, block) = (Pages(4_096) + BLOCK - Pages(1), Pages(4_096) + BLOCK);
    for health in [Health::Stuck, Health::Missing] {
        assert_eq!(both(health, none), (health, Pages(9_000)));
    }
    assert_eq!(both(Health::Stuck, block), (Health::Healthy, Pages(700)));
    assert_eq!(both(Health::Missing, block), (Health::Healthy, Pages(0)));
}

/// What is beyond the balloon does not come at the balloon's pace.
#[test]
fn the_rest_comes_as_fast_as_it_is_unplugged() {
    let mut guest = Guest::new(Balloon::Works);
    guest.goal = BALLOON;
    let (both, _) = guest.seconds(10);
    assert!(both.limit > guest.goal);
    assert_eq!(both.rate, Some(RATE), "it holds all that it may");
    guest.goal = Pages(0);
    guest.seconds(10);
    guest.goal = BALLOON;
    let (both, _) = guest.second();
    assert_eq!(both.rate, Some(BalloonConfig::default().rate), "it has yet to grow");
    let rate = |health, late| {
        let rate = Some(Pages::from_mib(100));
        let balloon = BalloonOutput { health, limit: Pages(9_000), rate, ..BalloonOutput::UNKNOWN };
        let limit = Pages(9_000);
        let unplug = UnplugOutput { limit, late, rate: RATE, ..UnplugOutput::default() };
        together(&balloon, Pages(700), &unplug).rate
    };
    for late in [false, true] {
        assert_eq!(rate(Health::Healthy, late), Some(Pages::from_mib(100)));
    }
    for health in [Health::Stuck, Health::Missing] {
        // Blocks that come late may come at any rate.
        assert_eq!([rate(health, false), rate(health, true)], [Some(RATE), None], "{health}");
    }
}

#[test]
fn another_configuration_counts_from_then_on() {
    let mut control = UnplugControl::new(BalloonConfig::default(), Pages::ZERO);
    control.set_config(BalloonConfig { rate: BLOCK, ..BalloonConfig::default() });
    let (input, balloon) = idle(0, Pages::ZERO);
    assert_eq!(control.step(&input, &balloon).withhold, BLOCK);
}

proptest! {
    #[test]
    fn whatever_is_seen_what_is_asked_stays_within_what_was_given(
        turns in prop::collection::vec(
            (0u64..10_000, any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), 0u8..4,
             prop::option::of(any::<u32>())),
            1..60,
        ),
    ) {
        let mut control = UnplugControl::new(BalloonConfig::default(), Pages(u64::from(u32::MAX)));
        for (ms, goal, given, plugged, holds, health, available) in turns {
            let health = [Health::Missing, Health::Healthy, Health::Slow, Health::Stuck][usize::from(health)];
            let pages = |n: u32| Pages(u64::from(n));
            let balloon = BalloonOutput { health, limit: pages(holds), ..BalloonOutput::UNKNOWN };
            let given = whole(pages(given));
            let out = control.step(
                &UnplugInput {
                    now: Duration::from_millis(ms),
                    goal: pages(goal),
                    given,
                    plugged: pages(plugged),
                    size: pages(plugged) + BOOT,
                    balloon_most: pages(holds),
                    balloon: pages(holds),
                    held: pages(holds),
                    guest_available: available.map(pages),
                },
                &balloon,
            );
            prop_assert!(out.withhold <= given && out.withheld <= given);
            prop_assert!(out.withhold.0.is_multiple_of(BLOCK.0));
            prop_assert!(out.limit <= given);
        }
    }

    #[test]
    fn honest_guests_keep_half_their_reserve(
        goals in prop::collection::vec(0u64..98_304, 1..20),
        used in prop::collection::vec(1_000u64..60_000, 20),
        unplugs in 512u64..40_000,
        driver in prop_oneof![Just(Balloon::Works), Just(Balloon::Dead)],
    ) {
        let mut guest = Guest::new(driver);
        guest.unplugs = unplugs;
        for (goal, used) in goals.into_iter().zip(used) {
            // What it uses grows by what it has to spare only.
            let most = (guest.used + guest.available()).saturating_sub(Pages::from_mib(24));
            guest.used = Pages(used).min(most.max(guest.used.min(Pages(used))));
            guest.goal = Pages(goal);
            for _ in 0..8 {
                guest.second();
                let half = BalloonConfig::default().reserve(guest.boot + guest.plugged).0 / 2;
                prop_assert!(guest.available().0 >= half, "{:?} of {half}", guest.available());
            }
        }
    }
}
