//! Histories whose answers are known.
#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]

use ballast_planner::{History, Question, Slot, plan};
use statrs::distribution::{Binomial, DiscreteCDF as _};

const SIZE: u64 = 256;
const QUESTION: Question = Question { risk: 0.01, confidence: 0.95, seed: 7 };

/// A history of slots of a minute; `needs` are those of all VMs, each of [`SIZE`] pages.
fn history(budget: u64, goal: u64, overhead: u64, needs: Vec<Vec<u64>>) -> History {
    let vms = needs[0].len();
    let slot = |(number, needs): (usize, Vec<u64>)| Slot {
        number: number as u64,
        sizes: SIZE * needs.len() as u64,
        most: needs.len(),
        needs: needs.into_iter().enumerate().collect(),
        overhead,
        budget,
        goal,
        was_short: false,
    };
    History {
        host: "h".into(),
        slot_ms: 60_000,
        slots: needs.into_iter().enumerate().map(slot).collect(),
        vms: (0..vms).map(|i| format!("vm-{i}")).collect(),
        ..History::default()
    }
}

/// Twenty VMs that need 20 pages and, in a tenth of the slots, each at its own times, 220.
fn bursts(seed: u64, slots: usize, vms: usize) -> Vec<Vec<u64>> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut one = || if rng.f64() < 0.1 { 220 } else { 20 };
    (0..slots).map(|_| (0..vms).map(|_| one()).collect()).collect()
}

#[test]
fn constant_vms_are_answered_exactly() {
    // 10 VMs of 256 that need 100, 10 of overhead each, 6.5% to stay free.
    let answer = plan(QUESTION, &[history(2000, 130, 100, vec![vec![100; 10]; 500])]);
    let host = &answer.hosts[0];
    let exact = 2560.0 * (1.0 - 0.065) / (1000.0 + 100.0);
    for point in &host.curve.points {
        assert!((point.factor - exact).abs() < 1e-12 && (point.high - exact).abs() < 1e-12);
    }
    assert_eq!(host.curve.asked.low, Some(host.curve.asked.factor));
    // (2000 - 130) / (100 + 10) = 17.
    assert_eq!((host.fit.vms, host.fit.low, host.fit.high, host.fit.now), (17, Some(17), 17, 10));
    assert_eq!(host.fit.factor, 17.0 * 256.0 / 2000.0);
    assert_eq!((host.fit.correlation, host.fit.in_step), (None, 1.0), "nothing moves");
    // 500 slots vouch for 0.6% and above, and say so.
    assert!((host.curve.least_risk - (1.0 - 0.05f64.powf(1.0 / 500.0))).abs() < 1e-6);
    assert!(host.curve.points.iter().all(|p| p.low.is_some() == (p.risk >= host.curve.least_risk)));
}

/// Its memory was another for most of the record: what fits is asked of today's.
#[test]
fn vms_are_to_fit_into_the_memory_of_today() {
    for (before, now, vms) in [(1000, 2000, 18), (2000, 1000, 9), (2000, 2000, 18)] {
        let mut record = history(before, before / 10, 0, vec![vec![100; 10]; 500]);
        for slot in &mut record.slots[400..] {
            (slot.budget, slot.goal) = (now, now / 10);
        }
        let answer = plan(QUESTION, &[record]);
        assert_eq!(answer.hosts[0].fit.vms, vms, "{before} to {now}");
        assert_eq!(answer.hosts[0].fit.factor, vms as f64 * 256.0 / now as f64);
    }
}

/// They need little, and are promised much: no more than that can be promised to are let in.
#[test]
fn no_more_vms_fit_than_mins_can_be_promised_to() {
    for (min, overhead, vms) in [(0, 0, 200), (100, 0, 20), (100, 10 * 25, 16), (3, 0, 200)] {
        let mut record = history(2000, 0, overhead, vec![vec![10; 10]; 500]);
        record.mins = vec![min; 10];
        let answer = plan(QUESTION, &[record]);
        let fit = answer.hosts[0].fit;
        assert_eq!((fit.vms, fit.high), (vms, vms), "min {min}, overhead {overhead}");
    }
}

/// Each at its time: what each costs beside its memory is not divided by all of them.
#[test]
fn vms_that_follow_one_another_are_not_there_together() {
    // Ten names in a slot, five of them at a time, 50 of overhead each.
    let mut record = history(2000, 0, 5 * 50, vec![vec![150; 10]; 500]);
    for slot in &mut record.slots {
        (slot.most, slot.sizes) = (5, 5 * SIZE);
    }
    let host = &plan(QUESTION, &[record]).hosts[0];
    assert_eq!((host.fit.vms, host.fit.now), (2000 / (150 + 50), 5));
    assert_eq!(host.facts.vms_mean, 5.0);
    assert_eq!((host.facts.size_mean, host.facts.need_mean), (SIZE << 12, 150 << 12));
}

/// What was recorded lasts; that VMs which are added are taken at moments of their own makes no more looks of it.
#[test]
fn vms_that_are_added_do_not_lengthen_the_record() {
    // One of four VMs at a time has much to do, for a hundred slots on end; now and then none has.
    let mut rng = fastrand::Rng::with_seed(5);
    let busy: Vec<usize> = (0..40).map(|_| rng.usize(..5)).collect();
    let needs = |slot: usize| {
        (0..4).map(|vm| if busy[slot / 100] == vm { 220 } else { 20 }).collect::<Vec<u64>>()
    };
    let host = &plan(QUESTION, &[history(40_000, 0, 0, (0..4000).map(needs).collect())]).hosts[0];
    let fit = host.fit;
    assert!(
        fit.vms > 200 && fit.in_step == 0.0,
        "most are added, at moments of their own: {fit:?}"
    );
    // Forty looks or so, where 1% at 95% needs 299.
    assert_eq!(fit.low, None, "{fit:?}");
}

#[test]
fn peaks_that_come_together_bring_no_gain() {
    // In every twentieth slot all need 200; at 1% the peak is what counts.
    let needs = |t| vec![if t % 20 == 0 { 200 } else { 20 }; 10];
    let record = history(2000, 0, 0, (0..2000).map(needs).collect());
    let answer = plan(QUESTION, std::slice::from_ref(&record));
    let host = &answer.hosts[0];
    assert_eq!(host.curve.asked.factor, 256.0 / 200.0);
    assert!(
        (host.fit.correlation.unwrap() - 1.0).abs() < 1e-9 && (host.fit.in_step - 1.0).abs() < 1e-9
    );
    assert_eq!(host.fit.vms, 10);
    // At a risk of 10% the peaks, a twentieth, may be left out.
    let often = plan(Question { risk: 0.1, ..QUESTION }, &[record]);
    assert_eq!((often.hosts[0].curve.asked.factor, often.hosts[0].fit.vms), (256.0 / 20.0, 100));
}

#[test]
fn independent_bursts_gain_what_the_binomial_predicts() {
    let (vms, slots) = (20, 40_000);
    for seed in [1, 2, 3] {
        println!("seed {seed}");
        let answer = plan(QUESTION, &[history(1400, 0, 0, bursts(seed, slots, vms))]);
        let host = &answer.hosts[0];
        // At a risk of 1%, so many of 20 burst together at most.
        let together = Binomial::new(0.1, 20).unwrap().inverse_cdf(0.99);
        assert_eq!(together, 6);
        let exact = (20.0 * 256.0) / (20.0 * 20.0 + 200.0 * together as f64);
        assert!((host.curve.asked.factor - exact).abs() < 1e-12, "{:?} {exact}", host.curve.asked);
        assert!(host.curve.asked.factor > 2.5 * 256.0 / 220.0, "more than if they burst together");

        // Of how many does 1,400 hold the bursts, 99 times of 100?
        let holds = |n: u64| {
            let most = (1400 - 20 * n) / 200;
            Binomial::new(0.1, n).unwrap().cdf(most) >= 0.99
        };
        let exact = (1..60).take_while(|&n| holds(n)).last().unwrap();
        assert!(host.fit.correlation.unwrap() < 0.01, "{:?}", host.fit);
        assert!(host.fit.vms.abs_diff(exact) <= 1, "{} VMs, exactly {exact}", host.fit.vms);
        assert!(
            host.fit.low.unwrap() <= exact && exact <= host.fit.high + 1,
            "{:?} {exact}",
            host.fit
        );
    }
}

#[test]
fn more_vms_than_were_recorded_keep_their_correlation() {
    // 8 VMs with two causes of bursts: one common to all, and one of each. r = 0.5.
    let mut rng = fastrand::Rng::with_seed(11);
    let mut slots = Vec::new();
    for _ in 0..30_000 {
        let common = f64::from(u8::from(rng.f64() < 0.5));
        let own = |rng: &mut fastrand::Rng| f64::from(u8::from(rng.f64() < 0.5));
        slots.push((0..8).map(|_| (40.0 + 40.0 * (common + own(&mut rng))) as u64).collect());
    }
    let question = Question { risk: 0.02, ..QUESTION };
    let fit = plan(question, &[history(3000, 0, 0, slots)]).hosts[0].fit;
    assert!((fit.correlation.unwrap() - 0.5).abs() < 0.02, "{fit:?}");
    // n VMs: half of the time 80 n + 40 Bin(n, 1/2), so the risk is half of that of the upper half.
    let holds = |n: u64| {
        let Some(most) = 3000u64.checked_sub(80 * n) else { return false };
        (1.0 - Binomial::new(0.5, n).unwrap().cdf(most / 40)) / 2.0 <= 0.02
    };
    let exact = (1..60).take_while(|&n| holds(n)).last().unwrap();
    assert!(fit.vms.abs_diff(exact) <= 2, "{} VMs, exactly {exact}", fit.vms);
}

#[test]
fn slots_that_follow_one_another_are_not_taken_for_independent() {
    // Of many sizes, so that the ends of bands do not fall together.
    let mut rng = fastrand::Rng::with_seed(12);
    let mut uneven = |mut needs: Vec<u64>| {
        needs.iter_mut().for_each(|need| *need += rng.u64(0..40));
        needs
    };
    let held: Vec<Vec<u64>> = bursts(4, 600, 20)
        .into_iter()
        .map(&mut uneven)
        .flat_map(|needs| std::iter::repeat_n(needs, 20))
        .collect();
    let apart = bursts(4, 12_000, 20).into_iter().map(&mut uneven).collect();
    let apart = plan(Question { risk: 0.05, ..QUESTION }, &[history(1400, 0, 0, apart)]);
    let held = plan(Question { risk: 0.05, ..QUESTION }, &[history(1400, 0, 0, held)]);
    let looks = |p: &ballast_planner::Plan| p.hosts[0].curve.looks;
    assert!((400.0..1000.0).contains(&looks(&held)), "{}", looks(&held));
    assert!(looks(&apart) > 8_000.0, "{}", looks(&apart));
    let width = |p: &ballast_planner::Plan| {
        let asked = p.hosts[0].curve.asked;
        asked.high - asked.low.unwrap()
    };
    assert!(width(&held) > width(&apart));
}

#[test]
fn hosts_are_answered_one_by_one_and_together() {
    let light = history(2000, 0, 0, vec![vec![50; 10]; 300]);
    let heavy = history(2000, 0, 0, vec![vec![200; 10]; 300]);
    let answer = plan(QUESTION, &[light, heavy]);
    assert_eq!(answer.hosts[0].curve.asked.factor, 256.0 / 50.0);
    assert_eq!(answer.hosts[1].curve.asked.factor, 256.0 / 200.0);
    let together = answer.together.unwrap();
    assert_eq!(together.asked.factor, 256.0 / 200.0, "the worse half of the time counts");
    assert!(together.asked.high > 256.0 / 200.0, "but it may be that the next hosts are all light");
    assert!(plan(QUESTION, &[history(2000, 0, 0, vec![vec![50]; 9])]).together.is_none());
}

#[test]
fn the_same_seed_gives_the_same_figures_and_all_outputs_have_them() {
    let question = Question { risk: 0.03, ..QUESTION };
    let once = plan(question, &[history(1400, 90, 10, bursts(6, 3000, 12))]);
    assert_eq!(once, plan(question, &[history(1400, 90, 10, bursts(6, 3000, 12))]));
    let text = ballast_planner::output::text(&once);
    for part in ["at a risk of 3%: overcommit", "<- asked for", "VMs like these", "Assumed:"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let csv = ballast_planner::output::csv(&once);
    assert_eq!(csv.lines().count(), 1 + once.hosts[0].curve.points.len());
    let asked = once.hosts[0].curve.asked;
    assert!(csv.contains(&format!("h,0.03,{},", asked.factor)), "{csv}");
    let svg = ballast_planner::output::svg(&once).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("<polygon") && svg.contains("<polyline"));
    // Factors fall with the risk.
    let factors: Vec<f64> = once.hosts[0].curve.points.iter().map(|p| p.factor).collect();
    assert!(factors.is_sorted(), "{factors:?}");
}

/// Of slots in which all of the budget was to be kept free there is no factor, and no time in which they are alike.
#[test]
fn a_record_that_no_manager_writes_comes_to_an_end() {
    let mut record = history(1400, 0, 0, bursts(9, 200, 10));
    record.slots[100].goal = record.slots[100].budget;
    let answer = plan(QUESTION, &[record]);
    assert_eq!(answer.hosts[0].facts.slots, 200);
    assert_eq!(answer.hosts[0].curve.asked.low, None);
}

#[test]
fn a_short_record_says_what_it_cannot_tell() {
    let answer = plan(QUESTION, &[history(2000, 0, 0, bursts(8, 50, 10))]);
    assert_eq!(answer.hosts[0].curve.asked.low, None);
    let text = ballast_planner::output::text(&answer);
    assert!(text.contains("TOO SHORT") && text.contains("risks of"), "{text}");
    // Nor of how many VMs fit.
    assert_eq!(answer.hosts[0].fit.low, None);
    assert!(text.contains("(at most ") && text.contains("at least nobody can say"), "{text}");
}

/// 95 of 100 bounds are to hold; the middle of the band holds half of the time.
#[test]
fn a_number_that_is_vouched_for_is_seldom_too_large() {
    // Of how many VMs does 1,400 hold the bursts, 95 times of 100?
    let question = Question { risk: 0.05, ..QUESTION };
    let holds = |n: u64| Binomial::new(0.1, n).unwrap().cdf((1400 - 20 * n) / 200) >= 0.95;
    let exact = (1..60).take_while(|&n| holds(n)).last().unwrap();
    let mut bad = 0;
    for seed in 1..=60 {
        let answer = plan(question, &[history(1400, 0, 0, bursts(seed, 120, 20))]);
        let fit = answer.hosts[0].fit;
        assert!(fit.low.is_none_or(|low| low <= fit.vms && fit.vms <= fit.high), "{fit:?}");
        bad += u32::from(fit.low.is_some_and(|low| low > exact));
    }
    // Of 60 trials that fail one time in 20, more than 7 do so less than once in 100.
    assert!(bad <= 7, "{bad}");
}
