//! What goes into a journal comes out of it, and the policy decides the same on it, bit for bit.
#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]

mod support;

use std::path::Path;

use ballast_journal::recorder::{Bound, Recorder};
use ballast_journal::segment::Header;
use ballast_journal::store::Folder;
use ballast_journal::turn::encode;
use ballast_journal::{Reader, Turn, replay};
use ballast_policy::{Decision, State, decide};
use ballast_units::Pages;
use proptest::prelude::*;
use serde_json::Value;
use support::{any_snapshot, chain, snapshot, told, vm};

fn write(folder: &Path, limit: u64, decisions: &[Decision]) {
    let header = Header { ballast: "1".into(), manager_ms: 1, ..Header::default() };
    let mut recorder = Recorder::new(Folder::new(folder), Bound::of(limit), header);
    for (i, decision) in decisions.iter().enumerate() {
        recorder.record(&told(i as u64 + 1, decision.clone(), &[])).unwrap();
        recorder.check();
    }
    recorder.flush().unwrap();
    assert_eq!(recorder.written(), decisions.len() as u64);
}

fn read(folder: &Path) -> Vec<Turn> {
    let mut reader = Reader::open(folder).unwrap();
    let turns = reader.by_ref().map(|turn| turn.turn().unwrap()).collect();
    assert!(reader.troubles().is_empty(), "{:?}", reader.troubles());
    turns
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    /// Random inputs, some of them repeated: all are read back exactly, replayed alike, and a policy
    /// that differs in the last bit of one number is found out.
    #[test]
    fn random_turns_replay_bit_for_bit(
        snapshots in proptest::collection::vec((any_snapshot(), 1usize..4), 1..40)
    ) {
        let repeated = snapshots.into_iter().flat_map(|(s, n)| std::iter::repeat_n(s, n)).collect();
        let decisions = chain(repeated);
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), 64 << 20, &decisions);

        let turns = read(folder.path());
        prop_assert_eq!(turns.len(), decisions.len());
        for (i, (turn, decision)) in turns.iter().zip(&decisions).enumerate() {
            prop_assert_eq!(turn.moment, support::moment(i as u64 + 1));
            prop_assert!(encode(&turn.decision).unwrap() == encode(decision).unwrap());
        }

        let replayed = replay(&mut Reader::open(folder.path()).unwrap(), decide).unwrap();
        prop_assert_eq!((replayed.differing, replayed.missing), (0, 0), "{:?}", &replayed.differences);
        prop_assert_eq!(replayed.turns, decisions.len() as u64);
        prop_assert_eq!(replayed.followed, decisions.len() as u64);

        let off_by_a_bit = |snapshot| {
            let mut decision = decide(snapshot);
            if let Some(last) = decision.results.last_mut() {
                last.rho = f64::from_bits(last.rho.to_bits() ^ 1);
            }
            decision
        };
        let with_vms = decisions.iter().any(|d| !d.results.is_empty());
        let replayed = replay(&mut Reader::open(folder.path()).unwrap(), off_by_a_bit).unwrap();
        prop_assert_eq!(replayed.differing > 0, with_vms);
    }
}

#[test]
fn a_difference_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let vms = [vm(1, 150, 10), vm(2, 150, 140)];
    write(folder.path(), 1 << 20, &chain(vec![snapshot("period", "high", 360, &vms)]));
    let more = |snapshot| {
        let mut decision = decide(snapshot);
        decision.plans[1].evict = Pages(5);
        decision
    };
    let replayed = replay(&mut Reader::open(folder.path()).unwrap(), more).unwrap();
    assert_eq!(replayed.differing, 1);
    let what = &replayed.differences[0].what;
    assert!(what.contains("plan of vm2") && what.contains("evict: Pages(5)"), "{what}");

    let calm = |snapshot| Decision { state: State::High, ..decide(snapshot) };
    let tight = [vm(1, 200, 10), vm(2, 158, 140)];
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1 << 20, &chain(vec![snapshot("period", "high", 360, &tight)]));
    let replayed = replay(&mut Reader::open(folder.path()).unwrap(), calm).unwrap();
    assert_eq!(replayed.differences[0].what, "state: low was recorded, high is decided");
}

/// All that `was` says `is` says, too; it may say more.
fn assert_kept(was: &Value, is: &Value, at: &str) {
    match (was, is) {
        (Value::Object(was), Value::Object(is)) => {
            for (field, was) in was {
                let at = format!("{at}.{field}");
                assert_kept(was, is.get(field).unwrap_or_else(|| panic!("{at} is not read")), &at);
            }
        }
        (Value::Array(was), Value::Array(is)) if was.len() == is.len() => {
            for (i, (was, is)) in was.iter().zip(is).enumerate() {
                assert_kept(was, is, &format!("{at}[{i}]"));
            }
        }
        _ => assert_eq!(was, is, "{at}"),
    }
}

/// The file is what a manager of 0.1.0 wrote: two guests come, one gets more shares, the budget is lowered below what
/// they use, they go. A policy that has learned since may decide otherwise; what was recorded must be read all the same.
#[test]
fn what_an_older_version_wrote_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/of-0.1.0.journal");
    let recorded: Vec<_> = Reader::open(&path).unwrap().collect();
    assert_eq!(recorded.last().unwrap().header.ballast, "0.1.0");
    let mut names: Vec<&str> =
        recorded.last().unwrap().names.values().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["first", "second"]);

    for turn in &recorded {
        let was = rmp_serde::from_slice(turn.bytes()).unwrap();
        let is = rmp_serde::from_slice(&encode(&turn.decision().unwrap()).unwrap()).unwrap();
        assert_kept(&was, &is, &format!("turn {}", turn.moment.n));
    }

    let turns = read(&path);
    assert!(turns.iter().map(|turn| turn.moment.n).eq(1..=39));
    let states = [State::Low, State::Hard, State::Soft, State::High];
    for (n, state) in [14, 23, 24, 26].into_iter().zip(states) {
        assert_eq!(turns[n - 1].decision.state, state, "turn {n}");
    }
    let (before, after) = (&turns[12].decision.snapshot, &turns[13].decision);
    assert_eq!([before.budget, after.snapshot.budget], [224u64, 105].map(|mib| Pages(mib * 256)));
    assert_eq!(
        after.snapshot.vms.iter().map(|vm| vm.demand.shares).collect::<Vec<_>>(),
        [1600, 4000]
    );
    assert!(after.plans.iter().any(|plan| plan.evict > Pages(0)), "{:?}", after.plans);
    assert!(!turns[25].outcomes.is_empty());

    let replayed = replay(&mut Reader::open(&path).unwrap(), decide).unwrap();
    assert_eq!((replayed.turns, replayed.missing), (39, 0));
}
