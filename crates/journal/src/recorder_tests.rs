use std::collections::BTreeMap;
use std::sync::Mutex;

use ballast_policy::decide;

use super::*;
use crate::reader::Reader;
use crate::segment::SegmentError;
use crate::store::{Folder, Stored};
use crate::support::{moment, snapshot, told, vm};

/// Files in memory on a disk of so many bytes, which can be told to fail.
#[derive(Clone, Default)]
struct Double(Arc<Mutex<Disk>>);

#[derive(Default)]
struct Disk {
    files: BTreeMap<u64, Vec<u8>>,
    room: Option<usize>,
    fails_to_cut: bool,
    /// Of other managers: taken when this one comes for it.
    taken: Option<u64>,
}

struct DoubleFile(Double, u64);

impl Store for Double {
    type Segment = DoubleFile;
    fn list(&mut self) -> io::Result<Vec<Stored>> {
        let disk = self.0.lock().unwrap();
        let stored = |(&number, bytes): (&u64, &Vec<u8>)| Stored {
            number,
            bytes: bytes.len() as u64,
            newer: bytes.starts_with(b"newer"),
        };
        Ok(disk.files.iter().map(stored).collect())
    }
    fn create(&mut self, number: u64) -> io::Result<DoubleFile> {
        let mut disk = self.0.lock().unwrap();
        if disk.taken == Some(number) || disk.files.contains_key(&number) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        disk.files.insert(number, vec![]);
        Ok(DoubleFile(self.clone(), number))
    }
    fn remove(&mut self, number: u64) -> io::Result<()> {
        self.0.lock().unwrap().files.remove(&number);
        Ok(())
    }
}

impl Append for DoubleFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.0.0.lock().unwrap();
        let used: usize = disk.files.values().map(Vec::len).sum();
        let room = disk.room.map_or(bytes.len(), |room| room.saturating_sub(used).min(bytes.len()));
        disk.files.get_mut(&self.1).unwrap().extend(&bytes[..room]);
        if room < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
    fn cut(&mut self, len: u64) -> io::Result<()> {
        let mut disk = self.0.0.lock().unwrap();
        if disk.fails_to_cut {
            return Err(io::ErrorKind::StorageFull.into());
        }
        disk.files.get_mut(&self.1).unwrap().truncate(len as usize);
        Ok(())
    }
}

impl Double {
    /// As a folder, to be read.
    fn folder(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, bytes) in &self.0.lock().unwrap().files {
            std::fs::write(folder.path().join(format!("{number:010}.journal")), bytes).unwrap();
        }
        folder
    }

    /// Numbers of the turns that can be read, and what is wrong with the rest.
    fn read(&self) -> (Vec<u64>, Vec<String>) {
        let folder = self.folder();
        let mut reader = Reader::open(folder.path()).unwrap();
        let turns = reader.by_ref().map(|turn| turn.turn().unwrap().moment.n).collect();
        (turns, reader.troubles().iter().map(|t| t.what.to_string()).collect())
    }
}

fn recorder(store: Double, limit: u64) -> Recorder<Double> {
    Recorder::new(store, Bound::of(limit), Header { manager_ms: 1, ..Header::default() })
}

/// A turn unlike any other.
fn turn(n: u64) -> Told {
    let free = 40 + n % 100;
    let vms = [vm(1, free, 20), vm(2, 100, n % 250)];
    told(n, decide(snapshot(&format!("event {n}"), "high", 360, &vms)), &[1, 2])
}

fn same(n: u64) -> Told {
    told(n, decide(snapshot("period", "high", 360, &[vm(1, 100, 50)])), &[])
}

#[test]
fn repeats_are_kept_back_and_take_next_to_nothing() {
    let store = Double::default();
    let mut recorder = recorder(store.clone(), 1 << 20);
    recorder.record(&same(1)).unwrap();
    let one = recorder.bytes();
    for n in 2..=600 {
        recorder.record(&same(n)).unwrap();
    }
    assert_eq!((recorder.kept_back(), recorder.bytes()), (599, one));
    recorder.record(&same(601)).unwrap();
    assert_eq!((recorder.kept_back(), recorder.written()), (0, 601));
    assert!(recorder.bytes() - one < 601 * 8, "{} bytes", recorder.bytes() - one);
    // Something else comes: what was kept back stands before it.
    recorder.record(&same(602)).unwrap();
    recorder.record(&turn(603)).unwrap();
    assert_eq!(store.read(), ((1..=603).collect(), vec![]));
    // Bit for bit the same, or not the same: 0 and -0 are two numbers.
    let mut other = decide(snapshot("period", "high", 360, &[vm(1, 100, 50)]));
    other.results[0].rho = 0.0;
    recorder.record(&told(604, other.clone(), &[])).unwrap();
    other.results[0].rho = -0.0;
    recorder.record(&told(605, other, &[])).unwrap();
    assert_eq!(recorder.kept_back(), 0);
    recorder.check();
}

/// VMs come and go while the disk takes nothing: their names do not pile up, and those that are there have theirs.
#[test]
fn names_are_not_kept_for_ever_while_nothing_can_be_written() {
    let store = Double::default();
    let mut recorder = recorder(store.clone(), 1 << 20);
    let one_comes = |n: u64| {
        let (stays, comes) = (1, 1 + n as u32);
        let vms = [vm(stays, 100, 50), vm(comes, 100, 50)];
        let names: &[u32] = if n == 1 { &[1, 2] } else { &[comes] };
        told(n, decide(snapshot("period", "high", 360, &vms)), names)
    };
    recorder.record(&one_comes(1)).unwrap();
    store.0.lock().unwrap().room = Some(0);
    for n in 2..4000 {
        assert!(recorder.record(&one_comes(n)).is_err());
        recorder.overhear(&one_comes(n));
        assert!(recorder.names.len() < 1200, "{n}: {}", recorder.names.len());
    }
    store.0.lock().unwrap().room = None;
    recorder.record(&one_comes(4000)).unwrap();
    let folder = store.folder();
    let last = Reader::open(folder.path()).unwrap().split().0.into_iter().flatten().last().unwrap();
    assert_eq!(
        (last.names[&VmId(1)].as_str(), last.names[&VmId(4001)].as_str()),
        ("vm-1", "vm-4001")
    );
}

/// What is kept back is written every few seconds.
#[test]
fn a_host_on_which_nothing_changes_fills_segments_as_any_other() {
    let store = Double::default();
    let mut recorder = recorder(store.clone(), 128 << 10);
    (1..=50).for_each(|n| recorder.record(&turn(n)).unwrap());
    let mut most = 0;
    for n in 51..=12_000 {
        recorder.record(&same(n)).unwrap();
        recorder.flush().unwrap();
        recorder.check();
        most = most.max(recorder.segments());
    }
    assert!(most > 2 && recorder.segments() >= 2, "{most}");
    let (turns, troubles) = store.read();
    assert!(troubles.is_empty(), "{troubles:?}");
    let first = turns[0];
    assert!(first > 1 && turns == (first..=12_000).collect::<Vec<_>>(), "from {first}");
}

#[test]
fn the_oldest_segments_go_and_the_bound_holds() {
    let store = Double::default();
    store.0.lock().unwrap().files.insert(7, b"newer than this one".to_vec());
    let limit = 64 << 10;
    let mut recorder = recorder(store.clone(), limit);
    let mut most = 0;
    for n in 1..=6000 {
        recorder.record(&turn(n)).unwrap();
        recorder.check();
        most = most.max(recorder.bytes());
    }
    assert!(most > limit * 3 / 4, "{most} of {limit} were used");
    let files = store.0.lock().unwrap().files.clone();
    assert_eq!(files[&7], b"newer than this one", "it is not ours to remove");
    assert!(files.len() > 2 && !files.contains_key(&8), "{:?}", files.keys());
    store.0.lock().unwrap().files.remove(&7);
    let (turns, troubles) = store.read();
    assert!(troubles.is_empty(), "{troubles:?}");
    assert_eq!(turns, (turns[0]..=6000).collect::<Vec<_>>());
    assert!(turns[0] > 1 && turns.len() > 100, "{}", turns.len());
    // Each segment stands for itself: names are there from its first turn on.
    let folder = store.folder();
    for segment in Reader::open(folder.path()).unwrap().split().0 {
        for turn in segment {
            assert_eq!(turn.names[&VmId(2)], "vm-2");
        }
    }
}

#[test]
fn what_another_manager_left_counts_and_goes_first() {
    let store = Double::default();
    let mut first = recorder(store.clone(), 64 << 10);
    (1..=3000).for_each(|n| first.record(&turn(n)).unwrap());
    let (before, oldest) = (first.bytes(), *store.0.lock().unwrap().files.keys().next().unwrap());
    drop(first);
    let next = store.0.lock().unwrap().files.keys().next_back().unwrap() + 1;
    store.0.lock().unwrap().taken = Some(next);
    let mut second = recorder(store.clone(), 64 << 10);
    second.record(&turn(1)).unwrap();
    assert!(second.bytes() > before / 2);
    assert!(store.0.lock().unwrap().files.contains_key(&(next + 1)), "the number is taken");
    (2..=1500).for_each(|n| second.record(&turn(n)).unwrap());
    second.check();
    assert!(!store.0.lock().unwrap().files.contains_key(&oldest));
}

#[test]
fn a_full_disk_loses_what_does_not_fit_and_nothing_else() {
    for fails_to_cut in [false, true] {
        let store = Double::default();
        store.0.lock().unwrap().fails_to_cut = fails_to_cut;
        let mut recorder = recorder(store.clone(), 1 << 20);
        for n in 1..=50 {
            recorder.record(&turn(n)).unwrap();
        }
        let full: usize = store.0.lock().unwrap().files.values().map(Vec::len).sum();
        for room in full..full + 900 {
            // Room for a part of a record, or of a header.
            store.0.lock().unwrap().room = Some(room);
            let n = 51 + (room - full) as u64;
            if recorder.record(&turn(n)).is_err() {
                recorder.check();
            }
        }
        let (turns, troubles) = store.read();
        // No file stays that has no turn in it.
        let files = store.0.lock().unwrap().files.len();
        assert!(files <= 1 + turns.len() - 50, "{files} files, {} turns", turns.len());
        let kept: Vec<u64> = (1..=50).collect();
        assert_eq!(turns[..50], kept);
        assert!(troubles.is_empty() || fails_to_cut, "{troubles:?}");
        // There is room again: it goes on, in a new segment.
        store.0.lock().unwrap().room = None;
        let before = recorder.segments();
        recorder.record(&turn(5000)).unwrap();
        recorder.record(&turn(5001)).unwrap();
        assert!(recorder.segments() > before || recorder.segments() == 1);
        assert_eq!(store.read().0[turns.len()..], [5000, 5001]);
        recorder.check();
    }
}

#[test]
fn a_record_that_never_fits_takes_no_older_one_with_it() {
    let store = Double::default();
    let limit = 16 << 10;
    let mut recorder = recorder(store.clone(), limit);
    (1..=20).for_each(|n| recorder.record(&turn(n)).unwrap());
    let before = store.read().0;
    // Numbers that nothing foretells, so that they do not compress.
    let mut x = 1u64;
    let mut odd = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % 100_000
    };
    let vms: Vec<_> = (1..=4_000).map(|id| vm(id, odd(), odd())).collect();
    let large = told(21, decide(snapshot("event", "high", 360, &vms)), &[]);
    assert_eq!(recorder.record(&large).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    recorder.check();
    assert_eq!(store.read().0, before);
    // What became of 4,000 VMs may not fit either; then it goes on.
    let _ = recorder.record(&turn(22));
    recorder.record(&turn(23)).unwrap();
    assert_eq!(store.read().0.last(), Some(&23));
    assert_eq!(store.read().0[..before.len()], before);
}

#[test]
fn killed_at_any_byte_only_the_last_record_is_lost() {
    let store = Double::default();
    let mut recorder = recorder(store.clone(), 1 << 20);
    let mut ends = vec![];
    for n in 1..=12 {
        recorder.record(&turn(n)).unwrap();
        ends.push(recorder.bytes() as usize);
    }
    let whole = store.0.lock().unwrap().files[&1].clone();
    for len in 0..whole.len() {
        store.0.lock().unwrap().files.insert(1, whole[..len].to_vec());
        let (turns, troubles) = store.read();
        let there = ends.iter().filter(|&&end| end <= len).count() as u64;
        assert_eq!(turns, (1..=there).collect::<Vec<_>>(), "cut at {len}");
        assert!(troubles.len() <= 1);
        // The next manager goes on behind it, and loses nothing.
        if len % 97 == 0 {
            let mut next = super::Recorder::new(
                store.clone(),
                Bound::of(1 << 20),
                Header { manager_ms: 2, ..Header::default() },
            );
            next.record(&turn(1)).unwrap();
            let (again, _) = store.read();
            assert_eq!(again.len() as u64, there + 1);
            store.0.lock().unwrap().files.remove(&2);
        }
    }
}

#[test]
fn files_are_for_their_owner_and_a_newer_one_is_left_as_it_is() {
    use std::os::unix::fs::PermissionsExt as _;
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a/journal");
    std::fs::create_dir_all(&path).unwrap();
    let newer = path.join("0000000041.journal");
    let mut text = b"ballastj\x63\0\0\0".to_vec();
    text.extend(vec![7; 3 << 20]);
    std::fs::write(&newer, &text).unwrap();
    std::fs::write(path.join("notes.txt"), "mine").unwrap();

    let header = Header { manager_ms: 1, ..Header::default() };
    let mut recorder = Recorder::new(Folder::new(&path), Bound::of(1 << 20), header);
    // Its 3 MiB are not counted, or nothing would fit.
    for n in 1..=300 {
        recorder.record(&turn(n)).unwrap();
    }
    recorder.check();
    assert_eq!(std::fs::read(&newer).unwrap(), text);
    let ours = path.join("0000000042.journal");
    assert_eq!(std::fs::metadata(&ours).unwrap().permissions().mode() & 0o777, 0o600);
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(reader.by_ref().count(), 300);
    let [trouble] = reader.troubles() else { panic!("{:?}", reader.troubles()) };
    assert!(matches!(trouble.what, SegmentError::Newer { found: 0x63 }) && trouble.path == newer);
    assert!(matches!(Reader::open(&newer).unwrap_err().what, SegmentError::Newer { .. }));
    assert!(matches!(
        Reader::open(&path.join("notes.txt")).unwrap_err().what,
        SegmentError::Foreign
    ));
    assert!(Reader::open(&root.path().join("none")).is_err());
}

#[test]
fn many_vms_make_large_turns_and_the_segments_that_suit_them() {
    let vms = |n: u64| -> Vec<_> {
        (0..2000)
            .map(|id| {
                // One in a hundred has moved since the turn before.
                let moved = u64::from(u64::from(id) % 100 == n);
                vm(id, 50 + u64::from(id) % 17 + moved, u64::from(id) % 60)
            })
            .collect()
    };
    let store = Double::default();
    let mut recorder = recorder(store.clone(), 4 << 20);
    let turn = |n| told(n, decide(snapshot("period", "high", 1 << 20, &vms(n))), &[]);
    recorder.record(&same(1)).unwrap();
    for n in 2..8 {
        recorder.record(&turn(n)).unwrap();
        recorder.check();
    }
    // The first was of one VM: its window does not reach far enough back for these.
    assert_eq!(recorder.segments(), 2);
    assert_eq!(store.read(), ((1..8).collect(), vec![]));
    let open = recorder.open.as_ref().unwrap();
    // Six whole turns would be six times the first.
    let (first, rest) = (open.first, open.bytes - open.first);
    assert!(rest / 5 * 5 < first, "{rest} bytes after the first {first}");
    assert_eq!(recorder.tracker().open_at(moment(8)), []);
}
