use std::path::Path;

use ballast_policy::{Snapshot, decide};
use serde_json::{Value, json};

use super::*;
use crate::recorder::{Bound, Recorder};
use crate::segment::Header;
use crate::store::Folder;
use crate::support::{EPOCH_MS, MIB, snapshot, told, vm};

struct Host {
    recorder: Recorder<Folder>,
    n: u64,
    state: State,
    /// Its turns are so much later.
    late_ms: u64,
}

impl Host {
    fn new(folder: &Path, manager_ms: u64) -> Host {
        Host::bound(folder, manager_ms, Bound::of(1 << 20))
    }

    fn bound(folder: &Path, manager_ms: u64, bound: Bound) -> Host {
        let header = Header { ballast: "0.1".into(), manager_ms, ..Header::default() };
        let recorder = Recorder::new(Folder::new(folder), bound, header);
        Host { recorder, n: 0, state: State::High, late_ms: manager_ms - EPOCH_MS }
    }

    fn turn(&mut self, trigger: &str, vms: &[Value]) {
        self.n += 1;
        let before = self.state;
        let decision = decide(Snapshot { before, ..snapshot(trigger, "high", 400, vms) });
        self.state = decision.state;
        let mut told = told(self.n, decision, &[1, 2]);
        told.moment.at_ms += self.late_ms;
        self.recorder.record(&told).unwrap();
        self.recorder.flush().unwrap();
    }
}

/// Ten quiet seconds, a shortage of three, quiet again.
fn story(folder: &Path) {
    tell_story(Host::new(folder, EPOCH_MS));
}

fn tell_story(mut host: Host) {
    let quiet = [vm(1, 100, 50), vm(2, 200, 20)];
    (0..10).for_each(|_| host.turn("period", &quiet));
    host.turn("period", &[vm(1, 193, 180), vm(2, 200, 20)]);
    host.turn("period", &[vm(1, 193, 180), vm(2, 195, 20)]);
    host.turn("period", &[vm(1, 193, 180), vm(2, 177, 20)]);
    let mut more = vm(1, 193, 180);
    more["demand"]["shares"] = json!(5120);
    host.turn("parameters of vm-1 changed", &[more.clone(), vm(2, 177, 20)]);
    host.turn("vm-2 left", &[more]);
}

#[test]
fn a_node_that_runs_short_and_recovers_is_told() {
    let at = |free: u64, before: State| {
        let mut snapshot = snapshot("period", "high", 400, &[vm(1, 100, 50), vm(2, 100, 50)]);
        let node = json!({
            "id": 1, "size": 256 * MIB, "free": free * MIB, "before": before, "bound": [1]
        });
        snapshot.nodes = vec![serde_json::from_value(node).unwrap()];
        decide(snapshot)
    };
    let (calm, short) = (at(100, State::High), at(3, State::High));
    let again = at(100, State::Hard);
    let texts = |before, now| {
        let (names, mut told) = (crate::turn::Names::new(), crate::changes::Told::default());
        let changes = crate::changes::changes(before, now, &names, &mut told);
        changes.into_iter().map(|change| change.text).collect::<Vec<_>>()
    };
    let said = texts(&calm, &short);
    assert!(said.contains(&"node 1 goes from high to hard".to_owned()), "{said:?}");
    assert!(texts(&short, &again).contains(&"node 1 goes from hard to high".to_owned()));
    assert!(texts(&calm, &calm).is_empty());
    let (_, steps) = short.explain(VmId(1), |id| format!("vm-{id}"));
    let step = steps.iter().find(|step| step.contains("bound to node 1")).unwrap();
    assert!(step.contains("its state is hard"), "{step}");
    assert!(!short.explain(VmId(2), |id| format!("{id}")).1.iter().any(|s| s.contains("node 1")));
}

/// By little in each turn.
#[test]
fn a_target_that_drifts_is_told_of_as_one_that_moves() {
    let at = |shares: u64| {
        let mut first = vm(1, 100, 256);
        first["demand"]["shares"] = json!(shares);
        decide(snapshot("period", "high", 256, &[first, vm(2, 100, 256)]))
    };
    let (mut told, names) = (crate::changes::Told::default(), crate::turn::Names::new());
    let turns: Vec<Decision> = (0..60).map(|i| at(2_560 + i * 16)).collect();
    let target = |decision: &Decision| decision.results[0].target;
    let size = turns[0].snapshot.vms[0].size;
    let mut lines = Vec::new();
    for pair in turns.windows(2) {
        let step = target(&pair[1]).0.abs_diff(target(&pair[0]).0);
        assert!(step * 64 <= size.0, "told at once: {step}");
        let changes = crate::changes::changes(&pair[0], &pair[1], &names, &mut told);
        lines.extend(
            changes.into_iter().filter(|c| c.vm == Some(VmId(1)) && c.text.contains("target")),
        );
    }
    let moved = target(turns.last().unwrap()).0.abs_diff(target(&turns[0]).0);
    assert!(moved * 64 > size.0 * 2, "{moved} of {size}");
    // Each line goes on where the one before it ended, and less than a step is left untold.
    assert!(lines.len() as u64 >= 2, "{lines:?}");
    let ends = |line: &crate::changes::Change| -> (String, String) {
        let (_, both) = line.text.split_once("target ").unwrap();
        let (from, to) = both.split_once(" -> ").unwrap();
        (from.into(), to.into())
    };
    assert!(lines.windows(2).all(|pair| ends(&pair[0]).1 == ends(&pair[1]).0), "{lines:?}");
    assert_eq!(ends(&lines[0]).0, target(&turns[0]).to_string());
}

#[test]
fn why_at_a_time_tells_the_decision_in_force_then_and_what_came_of_it() {
    let folder = tempfile::tempdir().unwrap();
    story(folder.path());
    let now = EPOCH_MS + 100_000;
    let why = |vm: &str, s: u64| why_at(folder.path(), vm, EPOCH_MS + s * 1000 + 500, now);

    let calm = why("vm-2", 5).unwrap();
    assert_eq!((calm.at_ms, calm.age_s), (Some(EPOCH_MS + 5000), 95.0));
    assert_eq!(calm.trigger, "period");
    assert!(calm.outcomes.is_empty() && calm.verdict.contains("vm-2 is entitled"), "{calm:?}");

    let short = why("vm-2", 11).unwrap();
    assert_eq!(short.trigger, "free memory moved from high to hard");
    assert!(short.verdict.contains("are taken from it"), "{}", short.verdict);
    let [relief, reclaim] = &short.outcomes[..] else { panic!("{short:?}") };
    assert!(relief.contains("back in state high") && relief.contains("2.0 s after"), "{relief}");
    assert!(reclaim.starts_with("vm-2 came from 200 MiB down to"), "{reclaim}");
    // The turn after it repeats the order: it is the same one.
    assert_eq!(why("vm-2", 12).unwrap().outcomes, short.outcomes);
    // The other VM was not asked for anything.
    assert_eq!(why("vm-1", 11).unwrap().outcomes.len(), 1);

    let gone = why("vm-2", 15).unwrap_err().to_string();
    assert!(gone.contains("vm-2 had no part") && gone.contains("vm-1"), "{gone}");
    let early = why_at(folder.path(), "vm-1", EPOCH_MS, now).unwrap_err();
    assert!(matches!(early, TellError::TooEarly { begins_ms: Some(_), .. }), "{early}");
    // The last that is known is in force from then on.
    assert_eq!(why("vm-1", 90).unwrap().at_ms, Some(EPOCH_MS + 15_000));
}

#[test]
fn an_order_that_has_not_come_true_is_said_to_have_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::new(folder.path(), EPOCH_MS);
    (0..5).for_each(|_| host.turn("period", &[vm(1, 193, 180), vm(2, 200, 20)]));
    let why = why_at(folder.path(), "vm-2", EPOCH_MS + 1000, EPOCH_MS).unwrap();
    let [open] = &why.outcomes[..] else { panic!("{why:?}") };
    assert!(open.contains("4.0 s later, the last that is known"), "{open}");
    // What comes so late is not looked for.
    host.late_ms += PATIENCE_MS;
    (0..2).for_each(|_| host.turn("period", &[vm(1, 193, 180), vm(2, 100, 20)]));
    let why = why_at(folder.path(), "vm-2", EPOCH_MS + 1000, EPOCH_MS).unwrap();
    let [open] = &why.outcomes[..] else { panic!("{why:?}") };
    assert!(open.contains("4.0 s later, which is as far as was looked"), "{open}");
}

/// A disk that was full: what came true meanwhile is told by no turn behind it.
#[test]
fn turns_that_were_not_recorded_are_not_taken_for_turns_in_which_nothing_happened() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::new(folder.path(), EPOCH_MS);
    (0..5).for_each(|_| host.turn("period", &[vm(1, 193, 180), vm(2, 200, 20)]));
    host.n += 8;
    let down = decide(snapshot("period", "high", 400, &[vm(1, 193, 180), vm(2, 100, 20)]));
    host.recorder.overhear(&told(host.n, down, &[1, 2]));
    (0..5).for_each(|_| host.turn("period", &[vm(1, 193, 180), vm(2, 100, 20)]));
    let why = |s: u64| why_at(folder.path(), "vm-2", EPOCH_MS + s * 1000 + 500, EPOCH_MS).unwrap();
    let before = why(3);
    assert!(before.notes.is_empty());
    let [open] = &before.outcomes[..] else { panic!("{before:?}") };
    assert!(open.contains("not known: 8 turns within"), "{open}");
    // The last of before is all that is known to have been in force.
    let within = why(9);
    assert_eq!(within.at_ms, Some(EPOCH_MS + 5000));
    let [note] = &within.notes[..] else { panic!("{within:?}") };
    assert!(note.starts_with("8 turns after it were not recorded"), "{note}");
    assert!(why(14).notes.is_empty());
}

/// A disk that is full yet, or a manager that was killed.
#[test]
fn a_decision_behind_which_nothing_was_recorded_is_not_said_to_be_in_force_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::new(folder.path(), EPOCH_MS);
    (0..5).for_each(|_| host.turn("period", &[vm(1, 193, 180), vm(2, 200, 20)]));
    let now = EPOCH_MS + 1_200_000;
    let why = |s: u64| why_at(folder.path(), "vm-2", EPOCH_MS + s * 1000 + 500, now).unwrap();
    let [note] = &why(600).notes[..] else { panic!("{:?}", why(600)) };
    assert!(note.starts_with("nothing was recorded in the 595 s after it"), "{note}");
    // The next may be on its way; and a time to come is no question of a time.
    assert!(why(6).notes.is_empty() && why(1_201).notes.is_empty());
    // One that was started long after that one was killed does not know what it did at last.
    Host::new(folder.path(), EPOCH_MS + 700_000).turn("period", &[vm(1, 193, 180)]);
    let [note] = &why(600).notes[..] else { panic!("{:?}", why(600)) };
    assert!(note.starts_with("nothing was recorded in the 595 s after it"), "{note}");
    assert!(why(6).notes.is_empty());
}

#[test]
fn that_a_vm_has_what_its_balloon_was_let_down_for_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::new(folder.path(), EPOCH_MS);
    let mut ballooned = vm(1, 100, 90);
    ballooned["balloon_goal"] = json!(150 * MIB);
    ballooned["wants_more"] = json!(true);
    host.turn("period", &[ballooned]);
    host.turn("period", &[vm(1, 120, 110)]);
    host.turn("period", &[vm(1, 256, 200)]);
    let why = why_at(folder.path(), "vm-1", EPOCH_MS + 1500, EPOCH_MS).unwrap();
    let [grown] = &why.outcomes[..] else { panic!("{why:?}") };
    assert!(grown.contains("after its balloon was let down"), "{grown}");
}

#[test]
fn the_list_has_what_changed_and_leaves_out_what_did_not() {
    let folder = tempfile::tempdir().unwrap();
    story(folder.path());
    // Another manager goes on in the same folder.
    Host::new(folder.path(), EPOCH_MS + 99_000).turn("period", &[vm(1, 100, 50)]);
    let ask = |query: Query| list(folder.path(), &query).unwrap();
    let page = ask(Query { limit: 100, ..Query::default() });
    assert!(page.notes.is_empty() && !page.more, "{:?}", page.notes);
    let lines: Vec<(u64, String, String)> =
        page.turns.iter().map(|t| (t.n, t.changes.join("; "), t.outcomes.join("; "))).collect();
    let numbers: Vec<u64> = lines.iter().map(|l| l.0).collect();
    assert_eq!(numbers, [1, 11, 13, 14, 15, 1], "{lines:#?}");
    assert_eq!(lines[0].1, "the manager (version 0.1) begins");
    assert!(lines[1].1.contains("the host goes from high to hard"), "{lines:#?}");
    assert!(lines[1].1.contains("vm-2: ") && lines[1].1.contains("are missing"));
    assert!(lines[2].1.contains("from hard to high") && lines[2].2.contains("vm-2 came from"));
    assert!(lines[3].1.contains("vm-1: shares 2560 -> 5120"), "{lines:#?}");
    assert!(lines[4].1.contains("vm-2 leaves"), "{lines:#?}");

    let newest = ask(Query { limit: 2, ..Query::default() });
    assert_eq!((newest.turns.len(), newest.more, newest.turns[1].n), (2, true, 1));
    let of_one = ask(Query { limit: 100, vm: Some("vm-1".into()), ..Query::default() });
    assert!(of_one.turns.iter().all(|t| !t.changes.join("").contains("vm-2")), "{of_one:#?}");
    let since_ms = Some(EPOCH_MS + 10_500);
    let until_ms = Some(EPOCH_MS + 13_000);
    let span = ask(Query { limit: 100, since_ms, until_ms, ..Query::default() });
    assert_eq!(span.turns.iter().map(|t| t.n).collect::<Vec<_>>(), [11, 13]);
    let all = ask(Query { limit: 100, all: true, ..Query::default() });
    let counted: u64 = all.turns.iter().map(|t| 1 + t.repeats).sum();
    assert_eq!(counted, 16);
    assert_eq!(all.turns[0].free, 100 * MIB * 4096);
}

/// Each turn is the first of a segment then, the one before it in another file.
#[test]
fn what_the_first_turn_of_a_segment_changed_is_listed_too() {
    let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    story(whole.path());
    let bound = Bound { limit: 1 << 20, segment: 1, raw: 1 };
    tell_story(Host::bound(cut.path(), EPOCH_MS, bound));
    assert!(std::fs::read_dir(cut.path()).unwrap().count() > 5);
    for (vm, since, until) in [
        (None, None, None),
        (Some("vm-1"), None, None),
        (Some("vm-2"), None, None),
        (None, Some(EPOCH_MS + 11_000), None),
        (None, Some(EPOCH_MS + 10_500), Some(EPOCH_MS + 14_000)),
    ] {
        let vm = vm.map(str::to_owned);
        let query = Query { since_ms: since, until_ms: until, vm, limit: 100, ..Query::default() };
        let told = |folder: &Path| -> Vec<_> {
            let page = list(folder, &query).unwrap();
            assert!(page.notes.is_empty() && !page.more);
            page.turns.into_iter().map(|t| (t.n, t.changes, t.outcomes, t.repeats)).collect()
        };
        assert_eq!(told(whole.path()), told(cut.path()), "{query:?}");
    }
    // The newest alone, which is the first of its segment.
    let query = Query { limit: 1, ..Query::default() };
    let page = list(cut.path(), &query).unwrap();
    assert!(page.more && page.turns.len() == 1, "{page:?}");
    assert!(page.turns[0].changes.join("").contains("vm-2 leaves"), "{page:?}");
    // One that takes too long has what it found, and says so.
    let soon = |ms| Some(std::time::Instant::now() + std::time::Duration::from_millis(ms));
    let page = list(cut.path(), &Query { limit: 100, give_up: soon(0), ..Query::default() });
    let page = page.unwrap();
    assert!(page.more && page.turns.is_empty() && page.notes == [GAVE_UP], "{page:?}");
    let page = list(cut.path(), &Query { limit: 100, give_up: soon(600_000), ..Query::default() });
    assert!(!page.unwrap().more);
}

#[test]
fn a_journal_that_cannot_be_read_is_not_an_empty_one() {
    let folder = tempfile::tempdir().unwrap();
    let all = Query { limit: 100, ..Query::default() };
    assert_eq!(list(folder.path(), &all).unwrap(), JournalPage::default());
    story(folder.path());
    let mut files: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let [file] = &files[..] else { panic!("{files:?}") };
    // A second one that is none, beside it: said, and the rest is told.
    let name = file.file_name().unwrap().to_str().unwrap();
    let other = file.with_file_name(name.replacen('1', "2", 1));
    assert_ne!(*file, other);
    std::fs::write(&other, b"no segment").unwrap();
    let page = list(folder.path(), &all).unwrap();
    assert!(page.turns.len() > 3 && page.notes.len() == 1, "{page:?}");
    // Alone it is all there is.
    std::fs::remove_file(file).unwrap();
    let error = list(folder.path(), &all).unwrap_err();
    assert!(matches!(error, TellError::Trouble(_)), "{error}");
    assert!(error.to_string().contains(other.to_str().unwrap()), "{error}");
}

#[test]
fn a_time_before_the_journal_is_told_with_the_date_at_which_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    story(folder.path());
    let early = why_at(folder.path(), "vm-1", EPOCH_MS, EPOCH_MS).unwrap_err().to_string();
    let begin = utc(EPOCH_MS + 1000);
    assert!(early.ends_with(&format!("; it begins at {begin}")), "{early}");
}

/// The files of a journal, oldest first.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn why_at_a_time_says_what_could_not_be_read() {
    let folder = tempfile::tempdir().unwrap();
    story(folder.path());
    let why = |vm: &str, s: u64| why_at(folder.path(), vm, EPOCH_MS + s * 1000 + 500, EPOCH_MS);
    assert_eq!(why("vm-1", 15).unwrap().notes, [""; 0]);
    let [file] = &files(folder.path())[..] else { panic!("one is enough") };
    let whole = std::fs::read(file).unwrap();
    let mut damaged = whole.clone();
    // In the midst of a record that is not the last.
    let at = whole.len() - 200;
    damaged[at] ^= 0x10;
    std::fs::write(file, &damaged).unwrap();
    let old = why("vm-1", 15).unwrap();
    assert!(old.at_ms < Some(EPOCH_MS + 15_000), "{old:?}");
    // Asked long after: what cannot be read is not said to have never been recorded.
    let now = EPOCH_MS + 600_000;
    let later = why_at(folder.path(), "vm-1", EPOCH_MS + 500_000, now).unwrap().notes;
    assert!(later[0].starts_with("not read: ") && later[1].contains("or can be read"), "{later:?}");
    let [note] = &old.notes[..] else { panic!("{old:?}") };
    assert!(note.contains("damaged at byte") && note.contains(file.to_str().unwrap()), "{note}");
    // And when that is why there is no answer.
    let nobody = why("vm-3", 15).unwrap_err().to_string();
    assert!(nobody.contains("had no part") && nobody.contains("damaged at byte"), "{nobody}");
}

#[test]
fn where_a_segment_is_damaged_from_its_begin_the_one_before_it_tells() {
    let folder = tempfile::tempdir().unwrap();
    let bound = Bound { limit: 1 << 20, segment: 1, raw: 1 };
    tell_story(Host::bound(folder.path(), EPOCH_MS, bound));
    let why = |s: u64| why_at(folder.path(), "vm-1", EPOCH_MS + s * 1000 + 500, EPOCH_MS);
    let (before, last) = (why(13).unwrap(), why(15).unwrap());
    assert_eq!((before.at_ms, last.at_ms), (Some(EPOCH_MS + 13_000), Some(EPOCH_MS + 15_000)));
    let files = files(folder.path());
    let [.., _, one, other] = &files[..] else { panic!("{files:?}") };
    damage_from_the_begin(one);
    damage_from_the_begin(other);
    let why_now = why(15).unwrap();
    assert_eq!(why_now.at_ms, Some(EPOCH_MS + 13_000));
    assert_eq!(why_now.notes.len(), 2, "{:?}", why_now.notes);
    // All of them: that is what is said, not that it was too early.
    files[..files.len() - 2].iter().for_each(|file| damage_from_the_begin(file));
    let none = why(15).unwrap_err().to_string();
    assert!(none.contains("holds nothing") && none.contains("not read: "), "{none}");
}

/// In its first record, behind which there is more: not what a writer left that was killed.
fn damage_from_the_begin(file: &Path) {
    let mut bytes = std::fs::read(file).unwrap();
    let (_, first) = crate::segment::read_header(&mut &bytes[..]).unwrap();
    bytes[first as usize + 20] ^= 0x10;
    bytes.extend([0; 64]);
    std::fs::write(file, bytes).unwrap();
}
