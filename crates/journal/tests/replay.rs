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
