use proptest::prelude::*;

use super::*;

const SIZE: Pages = Pages(64_000);
const READ_CPU: u64 = 100_000;
const FAULT_CPU: u64 = 15_000;

/// A VM whose totals grow by given rates.
struct Vm {
    control: ToolControl,
    input: ToolsInput,
    tools: Tools,
    changes: u32,
}

impl Vm {
    fn new() -> Vm {
        Vm::under(ToolOrder::Measured)
    }

    fn under(order: ToolOrder) -> Vm {
        let input = ToolsInput {
            size: SIZE,
            read_cpu_ns: READ_CPU,
            refault_cpu_ns: FAULT_CPU,
            can_page: true,
            ..ToolsInput::default()
        };
        let mut control = ToolControl::new(order);
        let tools = control.step(&input);
        Vm { control, input, tools, changes: 0 }
    }

    /// So many seconds, with so many reads and refaults in each.
    fn pass(&mut self, seconds: u64, reads: u64, refaults: u64) -> Tools {
        for _ in 0..seconds {
            let i = &mut self.input;
            i.now += Duration::from_secs(1);
            i.reads += reads;
            i.read_ns += reads * 600_000;
            i.refaults += refaults;
            i.refault_ns += refaults * 5_000;
            let before = self.tools.first;
            self.tools = self.control.step(&self.input);
            self.changes += u32::from(self.tools.first != before);
        }
        self.tools
    }

    fn hold(&mut self, balloon: u64, paged: u64) {
        (self.input.balloon, self.input.paged) = (Pages(balloon), Pages(paged));
        self.input.ballooned = self.input.balloon;
    }
}

#[test]
fn costs_have_two_digits() {
    let costs = [(0.0, 0), (7.4, 7), (99.0, 99), (123.0, 120), (1_006.0, 1_000), (1_250.0, 1_300)];
    for (exact, rounded) in costs {
        assert_eq!(Cost::of(exact), Cost(rounded), "{exact}");
    }
    assert_eq!(Cost::of(f64::NAN), Cost(0));
    assert_eq!(Cost(12_000).to_string(), "12 ms/s per 1000 pages");
    assert_eq!(Cost(10_000).to_string(), "10 ms/s per 1000 pages");
    assert_eq!(Cost(1_200).to_string(), "1.2 ms/s per 1000 pages");
    assert_eq!(Cost(1_000).to_string(), "1.0 ms/s per 1000 pages");
    assert_eq!(Cost(50).to_string(), "0.05 ms/s per 1000 pages");
    assert_eq!(Cost(0).to_string(), "0 ms/s per 1000 pages");
    assert_eq!(Cost(10_000).of_all(Pages(100_000)), 1.0);
}

#[test]
fn orders_have_the_names_of_the_configuration() {
    let orders = [ToolOrder::Automatic, ToolOrder::Measured, ToolOrder::BalloonFirst];
    assert_eq!(orders.map(|o| o.to_string()), ["automatic", "measured", "balloon-first"]);
    assert_eq!(format!("{:>9}", ToolOrder::Measured), " measured");
}

#[test]
fn a_cost_is_known_when_it_was_measured_often_and_forgotten_after_ten_minutes() {
    let now = Duration::from_secs(7);
    let rested = |samples: u32, after: Duration| {
        let mut average = Average::default();
        (0..samples).for_each(|_| average.see(now, 5_000.0));
        average.rest(now + after);
        average.samples
    };
    let nanosecond = Duration::from_nanos(1);
    assert_eq!(rested(SETTLED - 1, nanosecond), 0);
    assert_eq!(rested(SETTLED, FORGET), SETTLED);
    assert_eq!(rested(SETTLED, FORGET + nanosecond), 0);
    assert_eq!(rested(SETTLED, FORGET * 2), 0);
}

#[test]
fn with_nothing_measured_the_balloon_comes_first() {
    let mut vm = Vm::new();
    assert_eq!(vm.pass(100, 5_000, 0), Tools::default());
}

/// As after a takeover, or with a new connection to its VMM.
#[test]
fn a_balloon_that_was_met_is_not_blamed_for_what_its_guest_is_known_to_read_for_itself() {
    let mut vm = Vm::new();
    assert_eq!(vm.control.plain_reads(), None);
    vm.pass(60, 2_000, 0);
    let told = vm.control.plain_reads();
    assert!(told.is_some_and(|reads| (reads - 2_000.0).abs() < 1.0), "{told:?}");
    let met = |known: Option<f64>| {
        let mut next = Vm::new();
        next.control = ToolControl::new(ToolOrder::Measured).with_plain_reads(known);
        next.hold(20_000, 0);
        next.control.step(&next.input);
        next
    };
    let mut next = met(told);
    let tools = next.pass(60, 2_000, 0);
    assert!(tools.first == Tool::Balloon && tools.balloon < Some(Cost(100)), "{tools:?}");
    assert_eq!(next.control.plain_reads(), told);
    // But for what comes beside.
    assert_eq!(next.pass(60, 4_000, 0).first, Tool::Paging);
    // Of whom nobody tells, all is laid to the balloon, and that is no knowledge to hand on.
    for unknown in [None, Some(f64::NAN), Some(-1.0), Some(f64::INFINITY)] {
        let mut next = met(unknown);
        assert_eq!(next.pass(60, 2_000, 0).first, Tool::Paging, "{unknown:?}");
        assert_eq!(next.control.plain_reads(), None);
    }
}

/// 2,000 reads a second of 0.7 ms, over 20,000 pages; 2,000 faults of 20 us over as many.
#[test]
fn a_balloon_that_is_dear_gives_way_and_is_let_down_in_steps() {
    let mut vm = Vm::new();
    vm.pass(20, 0, 0);
    vm.hold(20_000, 0);
    let tools = vm.pass(20, 2_000, 0);
    assert_eq!((tools.first, tools.balloon), (Tool::Paging, Some(Cost(70_000))));
    vm.hold(20_000, 20_000);
    let tools = vm.pass(30, 2_000, 2_000);
    assert_eq!((tools.paging, tools.ceiling), (Some(Cost(2_000)), Some(Pages(15_000))));
    assert_eq!(vm.pass(10, 2_000, 2_000).ceiling, Some(Pages(15_000)), "not before it is there");
    vm.hold(15_000, 25_000);
    assert_eq!(vm.pass(2, 1_500, 2_000).ceiling, Some(Pages(11_250)));
    // What it holds now costs nothing any more: it stays, and does not grow for that.
    assert_eq!(vm.pass(60, 0, 2_000).ceiling, None);
    assert_eq!((vm.tools.first, vm.changes), (Tool::Paging, 1));
    // Paging costs more than the balloon did.
    vm.pass(20, 0, 200_000);
    assert_eq!((vm.tools.first, vm.changes), (Tool::Balloon, 2));
}

#[test]
fn a_ceiling_stays_until_the_balloon_is_below_it_and_steps_are_not_too_small() {
    let ceiling = |balloon: u64, before: Option<u64>| {
        let mut vm = Vm::new();
        vm.hold(balloon, 20_000);
        vm.control.first = Tool::Paging;
        vm.control.balloon = Average { nanos: 70_000.0, samples: SETTLED, ..Average::default() };
        vm.control.ceiling = before.map(Pages);
        vm.control.choose(&vm.input);
        vm.control.ceiling.map(|pages| pages.0)
    };
    assert_eq!(ceiling(20_000, None), Some(15_000));
    assert_eq!(ceiling(18_000, Some(15_000)), Some(15_000), "it is on its way");
    assert_eq!(ceiling(15_000, Some(15_000)), Some(11_250));
    // A 64th of the guest at least, and no more than there is.
    assert_eq!((ceiling(2_000, None), ceiling(600, None)), (Some(1_000), Some(0)));
}

/// A tool that holds less than a 64th of its guest, at one look or the other, tells nothing.
#[test]
fn a_tool_is_measured_when_it_holds_enough() {
    let enough = SIZE.0 / ENOUGH;
    for (before, after, measured) in [(0, 0, 1), (1, 0, 0), (0, 1, 0)] {
        let mut vm = Vm::new();
        vm.hold(enough - before, enough - before);
        vm.control.step(&ToolsInput { now: POLL, ..vm.input });
        vm.hold(enough - after, enough - after);
        (vm.control.balloon, vm.control.paging) = (Average::default(), Average::default());
        vm.control.step(&ToolsInput { now: POLL * 2, ..vm.input });
        let samples = [vm.control.balloon.samples, vm.control.paging.samples];
        assert_eq!(samples, [measured; 2], "{before} too few, then {after}");
    }
}

/// By what the guest reads while its balloon is next to nothing, before and after; or reads less than.
#[test]
fn what_a_guest_reads_without_a_balloon_is_learnt_without_one() {
    let enough = SIZE.0 / ENOUGH;
    let learnt = |known: f64, before: u64, after: u64, reads: u64| {
        let mut vm = Vm::new();
        vm.control.plain_reads = known;
        vm.hold(before, 0);
        vm.control.last = Some(vm.input);
        vm.hold(after, 0);
        vm.pass(2, reads, 0);
        vm.control.plain_reads
    };
    assert_eq!(learnt(0.0, enough - 1, enough - 1, 1_000), 300.0);
    assert_eq!(learnt(0.0, enough, enough - 1, 1_000), 0.0);
    assert_eq!(learnt(0.0, enough - 1, enough, 1_000), 0.0);
    assert_eq!(learnt(0.0, enough, enough, 1_000), 0.0);
    assert_eq!(learnt(1_000.0, enough, enough, 500), 850.0);
    assert_eq!(learnt(1_000.0, enough, enough - 1, 500), 1_000.0);
}

#[test]
fn how_long_disks_take_is_averaged_and_forgotten() {
    let mut vm = Vm::new();
    let mut see = |seconds: u64, reads: f64, nanos: f64| {
        vm.control.see_device(Duration::from_secs(seconds), reads, nanos);
        vm.control.device.map(|(nanos, at)| (nanos.round(), at.as_secs()))
    };
    assert_eq!(see(1, SOME_READS - 1.0, 9e9), None);
    assert_eq!(see(2, SOME_READS, 600_000.0), Some((600_000.0, 2)));
    assert_eq!(see(3, 1_000.0, 800_000.0), Some((660_000.0, 3)));
    assert_eq!(see(603, 0.0, 0.0), Some((660_000.0, 3)));
    assert_eq!(see(604, 0.0, 0.0), None);
    assert_eq!(see(605, SOME_READS, 700_000.0), Some((700_000.0, 605)));
    assert_eq!(see(2_000, 0.0, 0.0), None);
}

#[test]
fn a_balloon_that_was_dear_is_taken_for_dear_until_it_is_seen_again_or_forgotten() {
    let (size, cost, now) = (Pages(8_000), Cost(50), Cost(3));
    let dear = |balloon: u64, after: Duration| {
        let mut vm = Vm::new();
        vm.control.dear = Some((size, cost, Duration::ZERO));
        vm.hold(balloon, 0);
        vm.input.now = after;
        (vm.control.once_dear(now, &vm.input), vm.control.dear)
    };
    let second = Duration::from_secs(1);
    assert_eq!(dear(7_000, second), (now, Some((size, now, second))));
    assert_eq!(dear(6_999, second), (cost, Some((size, cost, Duration::ZERO))));
    assert_eq!(dear(6_999, FORGET), (cost, Some((size, cost, Duration::ZERO))));
    assert_eq!(dear(6_999, FORGET + second), (now, None));
    assert_eq!(dear(6_999, FORGET * 2), (now, None));
}

#[test]
fn a_balloon_that_costs_nothing_stays_first_whatever_the_guest_reads_by_itself() {
    let mut vm = Vm::new();
    vm.pass(60, 2_000, 0);
    vm.hold(20_000, 0);
    let tools = vm.pass(200, 2_000, 0);
    assert_eq!(tools.first, Tool::Balloon);
    assert!(tools.balloon.is_some_and(|cost| cost < Cost(100)), "{tools:?}");
    // It ends: from now on more would be the balloon's.
    vm.pass(60, 0, 0);
    assert_eq!(vm.pass(40, 2_000, 0).first, Tool::Paging);
}

/// Nothing was seen of it without its balloon (its manager is new), and it reads whatever that does.
#[test]
fn reads_that_are_not_the_balloons_are_found_out_by_letting_it_down() {
    let mut vm = Vm::new();
    vm.hold(20_000, 0);
    assert_eq!(vm.pass(30, 1_000, 0).first, Tool::Paging);
    while let Some(ceiling) = vm.tools.ceiling {
        vm.hold(ceiling.0, 20_000 - ceiling.0);
        vm.pass(2, 1_000, 0);
    }
    vm.pass(60, 1_000, 100);
    vm.hold(20_000, 0);
    let tools = vm.pass(60, 1_000, 0);
    assert!(tools.balloon.is_some_and(|cost| cost < Cost(100)), "{tools:?}");
}

#[test]
fn paging_that_turns_out_dearer_gives_the_balloon_its_place_back() {
    let mut vm = Vm::new();
    vm.hold(20_000, 0);
    vm.pass(20, 50, 0);
    assert_eq!(vm.tools.first, Tool::Paging, "tried, for nothing was known of it");
    vm.hold(20_000, 10_000);
    vm.pass(40, 50, 10_000);
    assert_eq!(vm.tools.first, Tool::Balloon);
    // Its cost is remembered: no other trial for ten minutes.
    vm.hold(20_000, 0);
    vm.pass(500, 50, 0);
    assert_eq!((vm.tools.first, vm.changes), (Tool::Balloon, 2));
    vm.pass(200, 50, 0);
    assert_eq!((vm.tools.first, vm.changes), (Tool::Paging, 3), "then it is");
}

/// 2,000 faults a second over 20,000 pages, where a read costs the guest 0.6 ms of its processor.
#[test]
fn where_reads_are_dear_paging_comes_first_until_it_is_seen_to_cost_more() {
    let mut vm = Vm::new();
    vm.input.read_cpu_ns = 600_000;
    vm.control = ToolControl::new(ToolOrder::Measured);
    assert_eq!(vm.pass(1, 0, 0).first, Tool::Paging);
    vm.hold(0, 20_000);
    vm.pass(1_000, 0, 2_000);
    assert_eq!((vm.tools.first, vm.tools.paging), (Tool::Paging, Some(Cost(2_000))), "no trial");
    // Its pages take 5 ms each: their disk is slow, or the host's processors are busy. So may reads be for all that is known.
    let slow = |vm: &mut Vm, reads| {
        for _ in 0..60 {
            vm.input.refault_ns += 200 * 5_000_000;
            vm.pass(1, reads, 200);
        }
        vm.tools.first
    };
    assert_eq!(slow(&mut vm, 0), Tool::Paging, "no trial");
    // Its own disk is seen to be faster: a balloon is tried.
    assert_eq!(slow(&mut vm, 10), Tool::Balloon);
    // It turns out to cost more all the same.
    vm.hold(10_000, 10_000);
    vm.pass(60, 5_000, 10);
    assert_eq!(vm.tools.first, Tool::Paging);
    // The configuration may say otherwise.
    vm.control.set_order(ToolOrder::BalloonFirst);
    assert_eq!(vm.pass(1, 0, 0).first, Tool::Balloon);
}

/// A read is not presumed to wait for as long as a fault that no disk is to blame for: guests without a disk would
/// never be rid of it.
#[test]
fn no_disk_is_presumed_to_be_slower_than_disks_are() {
    for (ms, first) in [(10, Tool::Paging), (60, Tool::Balloon)] {
        let mut vm = Vm::new();
        vm.input.read_cpu_ns = 600_000;
        vm.control = ToolControl::new(ToolOrder::Measured);
        vm.pass(1, 0, 0);
        vm.hold(0, 20_000);
        for _ in 0..60 {
            vm.input.refault_ns += 200 * ms * 1_000_000;
            vm.pass(1, 0, 200);
        }
        assert_eq!(vm.tools.first, first, "{ms} ms");
    }
}

#[test]
fn half_as_much_again_is_not_enough_for_a_change() {
    for (balloon, first) in [(3_000.0, Tool::Balloon), (3_100.0, Tool::Paging)] {
        let mut vm = Vm::new();
        vm.hold(20_000, 20_000);
        vm.input.now = HOLD;
        let known = |nanos: f64| Average { nanos, samples: SETTLED, ..Average::default() };
        (vm.control.balloon, vm.control.paging) = (known(balloon), known(2_000.0));
        vm.control.choose(&vm.input);
        assert_eq!(vm.control.first, first, "{balloon}");
    }
}

/// After each four holds without a change it is halved, down to the shortest.
#[test]
fn an_order_that_nothing_speaks_against_is_held_for_less_and_less() {
    let mut vm = Vm::new();
    vm.control.hold = HOLD * 8;
    let mut held = |seconds: u64| {
        vm.pass(seconds, 0, 0);
        (vm.control.hold, vm.control.since.as_secs())
    };
    assert_eq!(held(318), (HOLD * 8, 0));
    assert_eq!(held(2), (HOLD * 4, 320));
    assert_eq!(held(160), (HOLD * 2, 480));
    assert_eq!(held(80), (HOLD, 560));
    assert_eq!(held(1_000), (HOLD, 560), "the next change comes at once");
}

#[test]
fn trifles_change_nothing() {
    let mut vm = Vm::new();
    vm.hold(20_000, 0);
    // 5 reads of 0.7 ms: 3.5 ms a second.
    assert_eq!(vm.pass(300, 5, 0).first, Tool::Balloon);
}

#[test]
fn an_order_that_is_fixed_is_not_changed_by_what_is_measured() {
    let mut vm = Vm::under(ToolOrder::BalloonFirst);
    vm.hold(20_000, 20_000);
    let tools = vm.pass(100, 2_000, 2_000);
    assert_eq!((tools.first, tools.ceiling), (Tool::Balloon, None));
    assert!(tools.balloon > tools.paging && tools.paging.is_some(), "and still shown: {tools:?}");
    vm.control.set_order(ToolOrder::Measured);
    assert_eq!(vm.pass(2, 2_000, 2_000).first, Tool::Paging);
    vm.input.can_page = false;
    assert_eq!(vm.pass(2, 2_000, 2_000).first, Tool::Balloon);
}

/// By default what is measured counts where reads are dear, as under emulation, and nowhere else.
#[test]
fn an_automatic_order_is_measured_where_reads_are_dear() {
    let orders = [ToolOrder::default(), ToolOrder::Measured, ToolOrder::BalloonFirst];
    let firsts = |read_cpu_ns: u64| {
        orders.map(|order| {
            let mut vm = Vm::under(order);
            vm.input.read_cpu_ns = read_cpu_ns;
            vm.control = ToolControl::new(order);
            let before = vm.pass(1, 0, 0).first;
            vm.hold(20_000, 20_000);
            (before, vm.pass(100, 2_000, 2_000).first)
        })
    };
    let (balloon, paging) = (Tool::Balloon, Tool::Paging);
    let cheap = firsts(PRESUMED * FAULT_CPU);
    assert_eq!(cheap, [(balloon, balloon), (balloon, paging), (balloon, balloon)]);
    let dear = firsts(PRESUMED * FAULT_CPU + 1);
    assert_eq!(dear, [(paging, paging), (paging, paging), (balloon, balloon)]);
}

#[test]
fn how_fast_paging_is_shows_while_it_has_something_to_do() {
    let mut vm = Vm::new();
    let mut look = |busy_ms: u64, done: u64| {
        vm.input.evict_ns += busy_ms * 1_000_000;
        vm.input.evicted += done;
        vm.pass(2, 0, 0).paging_rate
    };
    assert_eq!(look(9, 100), None, "too little to tell");
    assert_eq!(look(500, 50), Some(Pages(100)));
    assert_eq!(look(2_000, 0), Some(Pages(70)), "something is in its way");
    assert_eq!(look(0, 0), Some(Pages(70)));
    assert_eq!(look(100, 1_000), Some(Pages(3_049)));
}

#[test]
fn a_vm_is_held_up_when_it_waits_for_a_while_and_not_for_a_moment() {
    let mut vm = Vm::new();
    let mut look = |waited_ms: u64| {
        vm.input.starved_ns += waited_ms * 1_000_000;
        vm.pass(2, 0, 0).held_up
    };
    assert_eq!([100, 1_200, 0, 0].map(&mut look), [false; 4], "a moment");
    assert_eq!([600, 1_000, 1_000].map(&mut look), [false, true, true]);
    assert_eq!([0, 0, 0, 0].map(&mut look), [true, false, false, false]);
}

#[test]
fn counters_that_begin_anew_and_clocks_that_go_back_do_no_harm() {
    let mut vm = Vm::new();
    vm.hold(20_000, 20_000);
    vm.pass(60, 2_000, 2_000);
    (vm.input.reads, vm.input.read_ns, vm.input.refaults) = (0, 0, 0);
    vm.pass(2, 0, 0);
    let before = vm.tools;
    vm.input.now = Duration::from_secs(1);
    assert_eq!(vm.control.step(&vm.input), before);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Costs that waver by less than the hysteresis between two tools that both hold pages: one change
    /// at most, ever.
    #[test]
    fn costs_that_stay_where_they_are_change_the_order_once_at_most(
        reads in 1u64..3_000, refaults in 1u64..30_000,
        noise in proptest::collection::vec((0.9f64..1.1, 0.9f64..1.1), 600),
    ) {
        let mut vm = Vm::new();
        vm.hold(20_000, 20_000);
        for (a, b) in noise {
            vm.pass(2, (reads as f64 * a) as u64, (refaults as f64 * b) as u64);
        }
        prop_assert!(vm.changes <= 1, "{} changes", vm.changes);
    }

    /// Whatever is measured, a day sees few changes: after each the next is twice as far, and it takes
    /// four times as long without any until it comes nearer again.
    #[test]
    fn the_order_cannot_swing(
        steps in proptest::collection::vec(
            (1u64..300, 0u64..5_000, 0u64..50_000, 0u64..30_000, 0u64..30_000), 1..300),
    ) {
        let mut vm = Vm::new();
        for (seconds, reads, refaults, balloon, paged) in steps {
            vm.hold(balloon, paged);
            vm.pass(seconds, reads, refaults);
        }
        let passed = vm.input.now.as_secs();
        prop_assert!(u64::from(vm.changes) <= 4 + passed / 40, "{} in {passed} s", vm.changes);
    }

    /// Load that is always against the tool in use.
    #[test]
    fn an_adversary_gets_ever_fewer_changes(hours in 1u64..24) {
        let mut vm = Vm::new();
        vm.hold(20_000, 20_000);
        while vm.input.now.as_secs() < hours * 3_600 {
            match vm.tools.first {
                Tool::Balloon => vm.pass(2, 3_000, 1),
                Tool::Paging => vm.pass(2, 0, 50_000),
            };
        }
        prop_assert!(u64::from(vm.changes) <= 10 + hours, "{} in {hours} h", vm.changes);
    }

    /// The ceiling is below the balloon, only with paging first, and steps are bounded.
    #[test]
    fn ceilings_are_steps(
        steps in proptest::collection::vec((0u64..5_000, 0u64..50_000, 0u64..60_000, 0u64..30_000), 1..100),
    ) {
        let mut vm = Vm::new();
        for (reads, refaults, balloon, paged) in steps {
            vm.hold(balloon, paged);
            let before = vm.tools.ceiling;
            let tools = vm.pass(2, reads, refaults);
            if let Some(ceiling) = tools.ceiling {
                prop_assert_eq!(tools.first, Tool::Paging);
                prop_assert!(ceiling.0 < balloon);
                let step = (balloon / 4).max(1_000);
                prop_assert!(before == tools.ceiling || ceiling.0 + step >= balloon);
            }
        }
    }
}
