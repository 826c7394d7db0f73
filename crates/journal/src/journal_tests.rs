use std::io;
use std::sync::mpsc;

use ballast_policy::State;

use super::*;
use crate::outcome::Aim;
use crate::reader::Reader;
use crate::store::{Append, Stored};
use crate::support::{chain, moment, snapshot, vm};

fn decision(n: u64) -> Arc<Decision> {
    let vms = [vm(1, 40 + n % 100, 20)];
    Arc::new(chain(vec![snapshot(&format!("event {n}"), "high", 360, &vms)]).remove(0))
}

fn settings(folder: &std::path::Path) -> Settings {
    Settings { folder: folder.to_owned(), limit: 1 << 20 }
}

/// A disk whose writes wait until they are let go, each with its result.
struct Gate {
    asks: mpsc::Sender<()>,
    answers: mpsc::Receiver<io::Result<()>>,
}

struct GateStore(Option<Gate>);

impl Store for GateStore {
    type Segment = Gate;
    fn list(&mut self) -> io::Result<Vec<Stored>> {
        Ok(vec![])
    }
    fn create(&mut self, _: u64) -> io::Result<Gate> {
        self.0.take().ok_or_else(|| io::ErrorKind::StorageFull.into())
    }
    fn remove(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

impl Append for Gate {
    fn append(&mut self, _: &[u8]) -> io::Result<()> {
        let _ = self.asks.send(());
        self.answers.recv().unwrap_or(Ok(()))
    }
    fn cut(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_disk_that_does_not_answer_is_not_waited_for_and_what_is_lost_is_counted() {
    let (asks, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let store = GateStore(Some(Gate { asks, answers }));
    let journal = Journal::start_on(store, settings("/none".as_ref()), Header::default()).unwrap();
    journal.record(moment(1), decision(1), |_| "web".into());
    // The thread is in its first write, and stays there.
    asked.recv().unwrap();
    for n in 2..=200 {
        journal.record(moment(n), decision(n), |_| "web".into());
    }
    let lost = journal.health().lost;
    assert_eq!(lost, 199 - QUEUE as u64);
    // It is said so once that has lasted, and what was under way before is not told as if it were so now.
    assert_eq!(journal.health().trouble, None);
    let relief = Aim::Relief { worst: State::Soft };
    let under_way = UnderWay { aim: relief, since: 1, for_ms: 0 };
    *lock(&journal.shared.under_way) = vec![(None, under_way)];
    assert_eq!(journal.under_way(VmId(1)).len(), 1);
    let long_ago = Instant::now().checked_sub(SILENT).unwrap();
    let waits_since = lock(&journal.shared.waits_since).replace(long_ago);
    assert!(waits_since.is_some());
    assert!(journal.health().trouble.is_some_and(|what| what == "/none: the disk does not answer"));
    assert!(journal.under_way(VmId(1)).is_empty());
    // Readers have places of their own, so many and no more.
    let asked: Vec<_> = (0..6).map(|_| journal.ask_to_flush()).collect();
    assert!(matches!(asked[..4], [Asked::As(1), .., Asked::As(4)]));
    assert!(matches!(asked[4..], [Asked::Later, Asked::Later]));
    journal.flush(Duration::from_millis(10));
    // Let go: what was queued is written.
    drop(answer);
    journal.close(Duration::from_secs(60));
    let health = journal.health();
    assert_eq!((health.written, health.lost, health.trouble), (1 + QUEUE as u64, lost, None));
    // It has ended, and takes no more.
    journal.record(moment(201), decision(201), |_| "web".into());
    assert_eq!(journal.health().written, health.written);
}

#[test]
fn readers_take_no_turn_its_place() {
    let (asks, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let store = GateStore(Some(Gate { asks, answers }));
    let journal = Journal::start_on(store, settings("/none".as_ref()), Header::default()).unwrap();
    journal.record(moment(1), decision(1), |_| "web".into());
    asked.recv().unwrap();
    while matches!(journal.ask_to_flush(), Asked::As(_)) {}
    for n in 2..=200 {
        journal.record(moment(n), decision(n), |_| "web".into());
    }
    assert_eq!(journal.health().lost, 199 - QUEUE as u64);
    drop(answer);
    // One that comes last has all before it written.
    journal.flush(Duration::from_secs(60));
    assert_eq!(journal.health().written, 1 + QUEUE as u64);
    journal.close(Duration::from_secs(60));
}

/// A disk on whose first file the thread panics.
struct Deadly;

impl Store for Deadly {
    type Segment = Gate;
    fn list(&mut self) -> io::Result<Vec<Stored>> {
        panic!("a double's");
    }
    fn create(&mut self, _: u64) -> io::Result<Gate> {
        Err(io::ErrorKind::Other.into())
    }
    fn remove(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_journal_whose_thread_has_ended_says_so() {
    let journal = Journal::start_on(Deadly, settings("/none".as_ref()), Header::default()).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    for n in 1.. {
        journal.record(moment(n), decision(n), |_| "web".into());
        if journal.health().trouble.is_some() || Instant::now() > end {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let health = journal.health();
    assert!(health.trouble.is_some_and(|t| t.contains("thread has ended")));
    assert!(health.lost > 0);
    // Nobody is waited for.
    assert!(matches!(journal.ask_to_flush(), Asked::Never));
    journal.close(Duration::from_secs(60));
}

#[test]
fn a_vm_that_comes_back_to_the_policy_has_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::start(settings(folder.path()), Header::default()).unwrap();
    let all: Vec<_> = (1..=1500).map(|id| vm(id, 40, 20)).collect();
    let few = [vm(1500, 40, 20)];
    // So many are gone in the second turn that their names are dropped.
    for (n, (vms, first)) in (1..).zip([(&all[..], 1), (&few[..], 1500), (&all[..], 1)]) {
        let decision = chain(vec![snapshot(&format!("event {n}"), "high", 1 << 20, vms)]).remove(0);
        journal.record(moment(n), Arc::new(decision), |i| format!("vm-{}", first + i));
    }
    journal.close(Duration::from_secs(60));
    let turns: Vec<_> = Reader::open(folder.path()).unwrap().collect();
    assert_eq!(turns.len(), 3);
    assert!((1..=1500).all(|id| turns[2].names[&VmId(id)] == format!("vm-{id}")));
}

#[test]
fn a_full_disk_is_shown_and_stops_the_journal_alone() {
    let (asks, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    answer.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
    let store = GateStore(Some(Gate { asks, answers }));
    let journal = Journal::start_on(store, settings("/none".as_ref()), Header::default()).unwrap();
    journal.record(moment(1), decision(1), |_| "web".into());
    asked.recv().unwrap();
    for n in 2..=20 {
        journal.record(moment(n), decision(n), |_| "web".into());
    }
    journal.close(Duration::from_secs(60));
    let health = journal.health();
    assert_eq!((health.written, health.lost), (0, 20));
    assert!(health.trouble.is_some_and(|t| t.contains("storage")), "the reason is shown");
}

#[test]
fn what_was_kept_back_and_written_is_not_lost_with_the_turn_behind_it() {
    let (asks, _asked) = mpsc::channel();
    let (_, answers) = mpsc::channel();
    // Its first file takes all; there is no second one.
    let store = GateStore(Some(Gate { asks, answers }));
    let journal = Journal::start_on(store, settings("/none".as_ref()), Header::default()).unwrap();
    for n in 1..=5 {
        journal.record(moment(n), decision(1), |_| "web".into());
    }
    // Too large for the window of the first.
    let all: Vec<_> = (1..=1500).map(|id| vm(id, 40, 20)).collect();
    let large = chain(vec![snapshot("many", "high", 1 << 20, &all)]).remove(0);
    journal.record(moment(6), Arc::new(large), |i| format!("vm-{i}"));
    journal.close(Duration::from_secs(60));
    let health = journal.health();
    assert_eq!((health.written, health.lost), (5, 1));
}

#[test]
fn names_and_turns_reach_the_files_and_a_flush_makes_them_readable() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::start(settings(folder.path()), Header::default()).unwrap();
    for n in 1..=30 {
        // The last ten are the same.
        journal.record(moment(n), decision(n.min(21)), |_| "web".into());
    }
    journal.flush(Duration::from_secs(60));
    let turns: Vec<_> = Reader::open(folder.path()).unwrap().collect();
    assert_eq!(turns.len(), 30);
    assert!(turns.iter().all(|turn| turn.names[&VmId(1)] == "web"));
    assert_eq!(turns.iter().filter(|turn| turn.again).count(), 9);
    assert_eq!(journal.health().written, 30);
    assert_eq!(journal.health().segments, 1);
    journal.close(Duration::from_secs(60));
}

#[test]
fn what_is_under_way_is_told_of_the_turn_written_last() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::start(settings(folder.path()), Header::default()).unwrap();
    let tight = [vm(1, 200, 180), vm(2, 155, 20)];
    for n in 1..=3 {
        let decision = chain(vec![snapshot("period", "high", 360, &tight)]).remove(0);
        journal.record(moment(n), Arc::new(decision), |i| format!("vm-{i}"));
    }
    journal.flush(Duration::from_secs(60));
    let aims = journal.under_way(VmId(2));
    assert!(aims.iter().any(|a| matches!(a.aim, crate::Aim::Reclaim { .. })), "{aims:?}");
    assert!(aims.iter().all(|a| a.since == 1 && a.for_ms == 2000), "{aims:?}");
    journal.close(Duration::from_secs(60));
}

#[test]
fn what_was_taken_from_the_queue_has_no_place_in_it_any_more() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::start(settings(folder.path()), Header::default()).unwrap();
    let all: Vec<_> = (1..=1500).map(|id| vm(id, 40, 20)).collect();
    let large = Arc::new(chain(vec![snapshot("many", "high", 1 << 20, &all)]).remove(0));
    // Of more VMs together than the queue has places for.
    let turns = 50_u64;
    assert!(turns as usize * all.len() > QUEUE_VMS);
    for n in 1..=turns {
        journal.record(moment(n), large.clone(), |i| format!("vm-{i}"));
        journal.flush(Duration::from_secs(60));
    }
    let health = journal.health();
    assert_eq!((health.written, health.lost, health.trouble), (turns, 0, None));
    journal.close(Duration::from_secs(60));
}

#[test]
fn after_an_error_nothing_is_written_for_a_while_and_then_it_is_again() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("journal");
    // In the way of the folder.
    std::fs::write(&folder, "").unwrap();
    let shared = Arc::new(Shared::default());
    let recorder = Recorder::new(Folder::new(&folder), Bound::of(LEAST), Header::default());
    let mut writer = Writer { shared, folder: folder.clone(), recorder, not_before: None, lost: 0 };
    let told = |n: u64, names: &[&str]| Told {
        moment: moment(n),
        decision: decision(n),
        names: names.iter().map(|name| (VmId(1), (*name).to_owned())).collect(),
    };
    let trouble = |writer: &Writer<Folder>| lock(&writer.shared.health).trouble.clone();
    writer.turn(&told(1, &[]));
    assert_eq!((writer.lost, writer.recorder.written()), (1, 0));
    assert!(writer.not_before.is_some());
    assert!(trouble(&writer).is_some_and(|what| what.contains("/journal: ")));
    std::fs::remove_file(&folder).unwrap();
    // It could be written, but is not tried yet.
    writer.not_before = Some(Instant::now() + Duration::from_secs(3600));
    writer.turn(&told(2, &["web"]));
    assert_eq!((writer.lost, writer.recorder.written()), (2, 0));
    assert!(trouble(&writer).is_some());
    writer.not_before = Some(Instant::now());
    writer.turn(&told(3, &[]));
    assert_eq!((writer.lost, writer.recorder.written()), (2, 1));
    assert_eq!((writer.not_before, trouble(&writer)), (None, None));
    // The name that was told while nothing was written is there.
    let turns: Vec<_> = Reader::open(&folder).unwrap().collect();
    assert_eq!(turns.len(), 1);
    assert_eq!(turns[0].names[&VmId(1)], "web");
}
