//! How much room there is where swap files are made. A file system may hang: each location has a thread of its own that
//! looks, which nobody waits for, and one that does not answer is left alone until it does.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ballast_pager::swap::{Location, check_folder};
use ballast_units::Pages;

use crate::claim::Claim;
use crate::looks_of_disks::is_mute;
use crate::sync::lock;

/// How often the room is looked at.
pub const LOOK: Duration = Duration::from_millis(500);
/// A look that takes longer is not waited for: its file system does not answer.
pub const SILENT: Duration = Duration::from_secs(3);

/// What there is in a folder.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Its number.
    pub file_system: u64,
    /// For files that are yet to be made.
    pub free: Pages,
}

/// The calls in which a file system may hang, beside those on files that are open.
pub trait Files: Send + Sync {
    /// None where it is not to be told.
    fn room(&self, location: &Location) -> Option<Room>;
    /// Makes a location the manager's.
    fn claim(&self, folder: &Path) -> anyhow::Result<Claim>;
    /// A file that is not there is removed.
    fn remove(&self, path: &Path) -> std::io::Result<()>;
}

/// Those of the kernel.
pub struct Disks {
    /// Whose VMs' files are made.
    pub run_dir: PathBuf,
}

impl Files for Disks {
    fn room(&self, location: &Location) -> Option<Room> {
        // What could not be made there is no room.
        let free = location.room()?;
        let free = if check_folder(location.folder()).is_ok() { free } else { Pages::ZERO };
        Some(Room { file_system: location.file_system()?, free })
    }
    fn claim(&self, folder: &Path) -> anyhow::Result<Claim> {
        let claim = Claim::new(folder, &self.run_dir)?;
        if let Err(e) = check_folder(folder) {
            tracing::error!("{}: no pages are swapped there: {e}", folder.display());
        }
        Ok(claim)
    }
    fn remove(&self, path: &Path) -> std::io::Result<()> {
        // A file system that is frozen, or whose disk hangs, answers a look and no removal, be there a file or not.
        if std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
        {
            return Ok(());
        }
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(std::io::Error::new(e.kind(), format!("{}: {e}", path.display())))
            }
            _ => Ok(()),
        }
    }
}

/// Whether files may be made in a location.
#[derive(Default)]
enum Entry {
    /// There is no such folder, as far as is known.
    #[default]
    Missing,
    Ours(Arc<Claim>),
    /// It is another's, or not to be trusted.
    Refused(String),
}

#[derive(Default)]
struct Known {
    entry: Entry,
    /// None: not looked at yet, or not to be told.
    room: Option<Room>,
    /// When the look began that is under way.
    asked: Option<Instant>,
    /// Counts what was taken: a look that was under way meanwhile may not know of it.
    taken: u64,
}

/// As last looked at.
#[derive(Default)]
pub struct Rooms {
    /// By folder. Its lock is held for a look or a change alone.
    known: Mutex<HashMap<PathBuf, Known>>,
    /// No location is taken any more.
    over: AtomicBool,
}

impl Rooms {
    /// None: not known, or its file system does not answer.
    pub fn of(&self, folder: &Path) -> Option<Room> {
        lock(&self.known).get(folder).filter(|known| known.answers() && !is_mute(folder))?.room
    }

    /// Whether its file system answers, as far as is known.
    pub fn answers(&self, folder: &Path) -> bool {
        !is_mute(folder) && lock(&self.known).get(folder).is_none_or(Known::answers)
    }

    /// Why no files may be made there, if it is there.
    pub fn refusal(&self, folder: &Path) -> Option<String> {
        match &lock(&self.known).get(folder)?.entry {
            Entry::Refused(why) => Some(why.clone()),
            Entry::Missing | Entry::Ours(_) => None,
        }
    }

    /// Whether files may be made there. One that is missing may be tried: that tells best what is wrong.
    pub fn may_be_used(&self, folder: &Path) -> bool {
        match lock(&self.known).get(folder).map(|known| &known.entry) {
            Some(Entry::Ours(_)) => return true,
            Some(Entry::Refused(_)) => return false,
            Some(Entry::Missing) | None => {}
        }
        // It may have come since it was looked at.
        !folder.exists()
    }

    /// Whether a file there that is in no record is nobody's.
    pub fn is_ours_alone(&self, folder: &Path) -> bool {
        let all = lock(&self.known);
        let entry = all.get(folder).map(|known| &known.entry);
        matches!(entry, Some(Entry::Ours(claim)) if !claim.has_others)
    }

    /// From now on each location is whoever's that takes it.
    pub fn let_go(&self) {
        let mut all = lock(&self.known);
        self.over.store(true, Ordering::Relaxed);
        for known in all.values_mut() {
            known.entry = Entry::Missing;
        }
    }

    /// Takes the folder, or looks whether it is still the one that was taken. False: it is not ours.
    fn enter(&self, files: &dyn Files, folder: &Path) -> bool {
        let taken = match lock(&self.known).get(folder).map(|known| &known.entry) {
            Some(Entry::Ours(claim)) => Some(claim.clone()),
            _ => None,
        };
        if taken.is_some_and(|claim| claim.is_of(folder)) {
            return true;
        }
        let entry = match files.claim(folder) {
            Ok(claim) => Entry::Ours(Arc::new(claim)),
            Err(_) if !folder.exists() => Entry::Missing,
            Err(e) => Entry::Refused(format!("{e:#}")),
        };
        let mut all = lock(&self.known);
        if self.over.load(Ordering::Relaxed) {
            return false;
        }
        let known = all.entry(folder.to_owned()).or_default();
        if let Entry::Refused(why) = &entry
            && !matches!(&known.entry, Entry::Refused(before) if before == why)
        {
            tracing::error!("{}: no swap files are made there: {why}", folder.display());
        }
        known.entry = entry;
        matches!(known.entry, Entry::Ours(_))
    }

    /// What was made there is not free any more, also for other folders of the same file system.
    pub fn take(&self, folder: &Path, pages: Pages) {
        let mut all = lock(&self.known);
        let Some(here) = all.get(folder).and_then(|known| known.room) else { return };
        for known in all.values_mut() {
            if let Some(room) = known.room.as_mut().filter(|r| r.file_system == here.file_system) {
                room.free = room.free.saturating_sub(pages);
                known.taken += 1;
            }
        }
    }

    fn begin(&self, folder: &Path) -> u64 {
        let mut all = lock(&self.known);
        let known = all.entry(folder.to_owned()).or_default();
        known.asked = Some(Instant::now());
        known.taken
    }

    /// False: some was taken meanwhile, and it is to be looked at again.
    fn end(&self, folder: &Path, taken: u64, room: Option<Room>) -> bool {
        let mut all = lock(&self.known);
        let known = all.entry(folder.to_owned()).or_default();
        known.asked = None;
        let is_new = known.taken == taken;
        if is_new {
            known.room = room;
        }
        is_new
    }
}

impl Known {
    fn answers(&self) -> bool {
        self.asked.is_none_or(|asked| asked.elapsed() < SILENT)
    }
}

/// Looks at a location from now on, for as long as there is somebody who wants to know. Told once it has been looked at.
/// With `claims` it is taken first, as soon as it can be: files are to be made there.
pub fn watch(
    rooms: &Arc<Rooms>,
    files: &Arc<dyn Files>,
    location: &Arc<Location>,
    claims: bool,
) -> Receiver<()> {
    let (told, looked_at) = channel();
    let (rooms, files, location) = (Arc::downgrade(rooms), files.clone(), location.clone());
    let folder = location.folder().to_owned();
    let thread = std::thread::Builder::new().name("rooms".into());
    if let Err(e) = thread.spawn(move || run(&rooms, &*files, &location, claims, &told)) {
        tracing::error!("a thread that looks at {}: {e}: it is not used", folder.display());
    }
    looked_at
}

fn run(
    rooms: &Weak<Rooms>,
    files: &dyn Files,
    location: &Location,
    claims: bool,
    told: &Sender<()>,
) {
    let folder = location.folder();
    loop {
        let Some(taken) = rooms.upgrade().map(|rooms| rooms.begin(folder)) else { return };
        let Some(may_look) = rooms.upgrade().map(|rooms| !claims || rooms.enter(files, folder))
        else {
            return;
        };
        let room = if may_look { files.room(location) } else { None };
        let Some(is_new) = rooms.upgrade().map(|rooms| rooms.end(folder, taken, room)) else {
            return;
        };
        let _ = told.send(());
        if is_new {
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_known_to_hang_does_not_answer_while_its_first_look_is_under_way() {
        let (rooms, hung) = (Rooms::default(), Path::new("/hung since the start"));
        let (go_on, hangs) = channel::<()>();
        let look = crate::looks_of_disks::Look::begin(hung, move |_| hangs.recv().is_err());
        assert_eq!(look.unwrap().wait(), None);
        rooms.begin(hung);
        assert!(!rooms.answers(hung) && rooms.of(hung).is_none());
        drop(go_on);
        while is_mute(hung) {
            std::thread::yield_now();
        }
        assert!(rooms.answers(hung));
    }

    #[test]
    fn what_was_taken_counts_before_the_next_look_and_a_look_from_before_does_not() {
        let rooms = Rooms::default();
        let [a, b, other] = ["/a", "/b", "/other"].map(Path::new);
        let room = |file_system| Some(Room { file_system, free: Pages(100) });
        for (folder, file_system) in [(a, 1), (b, 1), (other, 2)] {
            assert_eq!(rooms.of(folder).map(|room| room.free), None);
            let taken = rooms.begin(folder);
            assert!(rooms.end(folder, taken, room(file_system)));
        }
        let free = |folder| rooms.of(folder).unwrap().free;
        let under_way = rooms.begin(b);
        rooms.take(a, Pages(30));
        assert_eq!((free(a), free(b), free(other)), (Pages(70), Pages(70), Pages(100)));
        assert!(!rooms.end(b, under_way, room(1)));
        assert_eq!(free(b), Pages(70));
        let again = rooms.begin(b);
        assert!(rooms.end(b, again, room(1)) && rooms.answers(b));
        assert_eq!(free(b), Pages(100));
    }
}
