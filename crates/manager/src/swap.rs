//! Where VMs have their swap files: the locations that the configuration names, and those that it named
//! when VMs were started that run still.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_api::layout::VMS;
use ballast_api::{LocationState, SwapLocation};
use ballast_pager::swap::{Location, Place, SwapError, SwapSpace, kept_back};
use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::former_boots;
use crate::looks_of_disks::{Look, is_mute};
use crate::rooms::{Disks, Files, Rooms, SILENT, watch};
use crate::sync::lock;
use crate::vm::Vm;

/// A swap file of a VM, as its record keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapFile {
    /// Absolute.
    pub path: PathBuf,
    /// Its slots.
    pub size: Pages,
}

/// All locations, each known once however many VMs have files there.
pub struct Swap {
    /// Highest priority first.
    locations: Vec<Arc<Location>>,
    /// Of former configurations.
    others: Mutex<Vec<Arc<Location>>>,
    rooms: Arc<Rooms>,
    files: Arc<dyn Files>,
}

/// How long the first look waits for what former boots have left to be removed.
const SWEEP: Duration = Duration::from_secs(60);

impl Swap {
    /// Looks how much room there is. A file system that does not answer is not waited for long.
    pub fn new(config: &Config) -> Swap {
        let locations =
            config.swap.iter().map(|place| Location::new(&place.path, place.priority)).collect();
        // Where there is no record of a VM, nobody waits for this manager but those who want room.
        let vms = std::fs::read_dir(config.run_dir.join(VMS));
        let is_waited_for = vms.is_ok_and(|mut vms| vms.next().is_some());
        let patience = if is_waited_for { SILENT } else { SWEEP };
        let files = Arc::new(Disks { run_dir: config.run_dir.clone() });
        Swap::over(locations, files, patience)
    }

    /// What former boots have left is waited for so long, until it is removed.
    fn over(locations: Vec<Arc<Location>>, files: Arc<dyn Files>, patience: Duration) -> Swap {
        let rooms = Arc::new(Rooms::default());
        let looks: Vec<_> =
            locations.iter().map(|location| watch(&rooms, &files, location, true)).collect();
        let begun = Instant::now();
        for (look, location) in looks.into_iter().zip(&locations) {
            if is_mute(location.folder()) {
                continue;
            }
            let mut seen = look.recv_timeout(SILENT.saturating_sub(begun.elapsed()));
            // What a reboot has left is no room yet for those who come first.
            let mut goes_on = former_boots::are_swept();
            while goes_on && seen == Err(RecvTimeoutError::Timeout) && begun.elapsed() < patience {
                goes_on = former_boots::are_swept();
                seen = look.recv_timeout(SILENT / 3);
            }
        }
        Swap { locations, others: Mutex::default(), rooms, files }
    }

    /// Those of the configuration whose file systems answer: what is done in another, whoever does it waits for.
    fn that_answer(&self) -> impl Iterator<Item = &Arc<Location>> + Clone {
        self.locations.iter().filter(|location| self.rooms.answers(location.folder()))
    }

    /// Where a VM of this name may have had a file that no record names, and that nobody else can have made.
    fn left_by(&self, vm: &str) -> Vec<PathBuf> {
        let ours = self.that_answer().filter(|l| self.rooms.is_ours_alone(l.folder()));
        ours.map(|location| location.folder().join(file_name(vm))).collect()
    }

    /// A location of the configuration that cannot be used, with the reason: another manager's, or not to be trusted.
    pub fn refused(&self) -> Option<String> {
        self.locations.iter().map(|location| location.folder()).find_map(|folder| {
            let why = self.rooms.refusal(folder)?;
            Some(format!("swap.location: {}: {why}", folder.display()))
        })
    }

    /// At the end: the next manager may take the locations.
    pub fn let_go(&self) {
        self.rooms.let_go();
    }

    /// Room for files that are yet to be made: that of two locations on one file system counts once. Space
    /// reserved for VMs is allocated already.
    pub fn room(&self) -> Pages {
        let usable = self.locations.iter().filter(|location| !location.is_failed());
        let mut seen = HashSet::new();
        let rooms = usable.filter_map(|location| self.rooms.of(location.folder()));
        most_over(rooms.filter(|room| seen.insert(room.file_system)).map(|room| room.free))
    }

    /// The files of a VM that is being started; those that a former VM of its name may have left are
    /// removed first.
    ///
    /// # Errors
    /// No location has room, or there is a file of that name that cannot be removed, or may be another manager's.
    pub fn create(&self, vm: &str, size: Pages) -> Result<SwapSpace, SwapError> {
        for path in self.left_by(vm) {
            let _ = self.files.remove(&path);
        }
        let usable = self.that_answer().filter(|l| self.rooms.may_be_used(l.folder()));
        let locations: Vec<Arc<Location>> = usable.cloned().collect();
        let made = SwapSpace::create(&file_name(vm), size, &locations)?;
        // What it takes is not promised to another.
        for place in made.places() {
            former_boots::note(&place.path);
            self.rooms.take(place.location.folder(), place.len.unwrap_or_default());
        }
        Ok(made)
    }

    /// The files of a VM that runs: those in its record, or the one that managers made who kept none there.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(&self, vm: &str, recorded: Option<&[SwapFile]>) -> Result<SwapSpace, SwapError> {
        let places = match recorded {
            Some(files) => {
                files.iter().map(|file| self.place(&file.path, Some(file.size))).collect()
            }
            None => vec![self.place(&self.lone_file(vm), None)],
        };
        let opened = SwapSpace::open(&places)?;
        // They may be of a version that noted nothing, or of when the host had another name.
        for place in &places {
            former_boots::note(&place.path);
        }
        Ok(opened)
    }

    fn lone_file(&self, vm: &str) -> PathBuf {
        let mut paths = self.locations.iter().map(|l| l.folder().join(file_name(vm)));
        let first = paths.clone().next().unwrap_or_default();
        paths.find(|path| path.exists()).unwrap_or(first)
    }

    fn place(&self, path: &Path, len: Option<Pages>) -> Place {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let is_it = |l: &&Arc<Location>| l.folder() == folder;
        let mut others = lock(&self.others);
        let known =
            self.locations.iter().find(is_it).or_else(|| others.iter().find(is_it)).cloned();
        let location = known.unwrap_or_else(|| {
            let other = Location::new(folder, i32::MIN);
            // Looked at by its own thread: nobody waits for it here.
            drop(watch(&self.rooms, &self.files, &other, false));
            others.push(other.clone());
            other
        });
        Place { path: path.to_owned(), location, len }
    }

    /// Removes the files of a VM that is no more: those of its record; if that has none, those that it may have. May
    /// take as long as their file systems do.
    ///
    /// # Errors
    /// One that cannot be removed; all others are.
    pub fn remove(&self, vm: &str, recorded: Option<&[SwapFile]>) -> std::io::Result<()> {
        let paths: Vec<PathBuf> = match recorded {
            Some(files) => files.iter().map(|file| file.path.clone()).collect(),
            None => self.left_by(vm),
        };
        let mut result = Ok(());
        for path in paths {
            result = self.files.remove(&path).and(result);
        }
        result
    }

    /// How each location fares.
    pub fn views(&self, vms: &[Arc<Vm>]) -> Vec<SwapLocation> {
        let files: Vec<(Place, Pages)> = vms
            .iter()
            .flat_map(|vm| vm.paged().as_ref().map_or_else(Vec::new, |p| p.swap_places()))
            .collect();
        let others = lock(&self.others).clone();
        let view = |location: &Arc<Location>| {
            let here = || files.iter().filter(|(place, _)| Arc::ptr_eq(&place.location, location));
            let free = self.rooms.of(location.folder()).map(|room| room.free);
            SwapLocation {
                path: location.folder().to_owned(),
                priority: location.priority(),
                state: match free {
                    _ if location.is_failed() => LocationState::Failed,
                    None => LocationState::Missing,
                    Some(_) => LocationState::Good,
                },
                reserved: here().filter_map(|(place, _)| place.len).sum::<Pages>().bytes().0,
                used: here().map(|(_, used)| *used).sum::<Pages>().bytes().0,
                free: free.unwrap_or_default().bytes().0,
                write_errors: location.write_errors(),
                read_errors: location.read_errors(),
            }
        };
        self.locations.iter().chain(&others).map(view).collect()
    }
}

/// As the record of a VM keeps them.
pub fn files(space: &SwapSpace) -> Vec<SwapFile> {
    let file = |place: Place| SwapFile { path: place.path, size: place.len.unwrap_or_default() };
    space.places().into_iter().map(file).collect()
}

/// The most that one VM can have over locations with so much room, in that order: each keeps some back but the one in
/// which the rest fits.
fn most_over(rooms: impl Iterator<Item = Pages>) -> Pages {
    let (mut before, mut most) = (Pages::ZERO, Pages::ZERO);
    for room in rooms {
        most = most.max(before + room);
        before += room - kept_back(room);
    }
    most
}

fn file_name(vm: &str) -> String {
    format!("{vm}.swap")
}

/// A location that cannot be used: the first, with the reason. One that the manager makes itself is there.
pub fn missing(config: &Config) -> Option<String> {
    let named = config.swap.iter().filter(|place| config.swap_dir.as_ref() != Some(&place.path));
    named
        .map(|place| &place.path)
        .find_map(|path| Some(format!("swap.location: {}: {}", path.display(), trouble(path)?)))
}

fn trouble(path: &Path) -> Option<String> {
    let silent = || Some(format!("its file system does not answer within {} s", SILENT.as_secs()));
    match Look::begin(path, trouble_of) {
        Ok(look) => look.wait().unwrap_or_else(silent),
        Err(e) => Some(format!("a thread that looks at it: {e}")),
    }
}

fn trouble_of(path: &Path) -> Option<String> {
    match std::fs::metadata(path) {
        Err(e) => Some(e.to_string()),
        Ok(meta) if !meta.is_dir() => Some("not a folder".to_owned()),
        Ok(_) => {
            let access = rustix::fs::access(path, rustix::fs::Access::WRITE_OK);
            access.err().map(|e| e.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::Claim;
    use crate::rooms::Room;

    fn swap(dirs: &[&Path]) -> Swap {
        let locations = dirs.iter().map(|dir| Location::new(dir, 0)).collect();
        Swap::over(locations, Arc::new(Disks { run_dir: "/run/x".into() }), SILENT)
    }

    /// Every file system hangs but that of these folders.
    struct Hangs(Vec<PathBuf>);

    impl Hangs {
        fn unless_good(&self, folder: Option<&Path>) {
            while !self.0.iter().any(|good| Some(good.as_path()) == folder) {
                std::thread::park();
            }
        }
    }

    impl Files for Hangs {
        fn room(&self, location: &Location) -> Option<Room> {
            self.unless_good(Some(location.folder()));
            Some(Room { file_system: 1, free: Pages(1000) })
        }
        fn claim(&self, folder: &Path) -> anyhow::Result<Claim> {
            self.unless_good(Some(folder));
            Claim::new(folder, Path::new("/run/x"))
        }
        fn remove(&self, path: &Path) -> std::io::Result<()> {
            self.unless_good(path.parent());
            Disks { run_dir: PathBuf::new() }.remove(path)
        }
    }

    #[test]
    fn a_file_system_that_hangs_holds_up_nobody_who_does_not_use_it() {
        let [good, hung] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        // The one that hangs would be used first.
        let locations = vec![Location::new(hung.path(), 2), Location::new(good.path(), 1)];
        let begun = Instant::now();
        let swap = Swap::over(locations, Arc::new(Hangs(vec![good.path().to_owned()])), SILENT);
        assert!(begun.elapsed() < SILENT * 3);
        // Its thread may have begun its look a little later.
        while swap.rooms.answers(hung.path()) {
            assert!(begun.elapsed() < SILENT * 20);
            std::thread::sleep(Duration::from_millis(10));
        }
        let states: Vec<_> = swap.views(&[]).into_iter().map(|view| view.state).collect();
        assert_eq!(states, [LocationState::Missing, LocationState::Good]);
        assert_eq!(swap.room(), Pages(1000));
        swap.remove("v", None).unwrap();
        let made = files(&swap.create("v", Pages(8)).unwrap());
        assert_eq!(made[0].path, good.path().join("v.swap"));
        swap.remove("v", Some(&made)).unwrap();
        assert!(!made[0].path.exists());
        // A file of a former configuration, where all hangs: others are not kept waiting.
        let former = swap.place(Path::new("/hangs/as/well/v.swap"), None);
        assert_eq!(former.location.folder(), Path::new("/hangs/as/well"));
        assert_eq!(swap.views(&[]).len(), 3);
        assert!(swap.room() >= Pages(992), "{}", swap.room());
    }

    #[test]
    fn no_more_is_promised_than_can_be_laid_out() {
        let most = |rooms: &[u64]| most_over(rooms.iter().map(|room| Pages(*room))).0;
        assert_eq!(most(&[]), 0);
        assert_eq!(most(&[6400]), 6400);
        // The last one keeps nothing back, and one that is full takes nothing from others.
        assert_eq!(most(&[6400, 12_800]), 6300 + 12_800);
        assert_eq!(most(&[0, 6400]), 6400);
        assert_eq!(most(&[6400, 0]), 6400);
        // All of it fits into the first.
        assert_eq!(most(&[64_000, 100]), 64_000);
        assert_eq!(most(&[6400, 6400, 6400]), 2 * 6300 + 6400);
    }

    #[test]
    fn a_file_that_may_be_another_managers_is_not_replaced() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("v.swap");
        std::fs::write(&path, "theirs").unwrap();
        drop(Claim::new(dir.path(), Path::new("/run/theirs")).unwrap());
        let ours = swap(&[dir.path()]);
        if ours.rooms.is_ours_alone(dir.path()) {
            eprintln!("SKIPPED: no attributes in /var/tmp");
            return;
        }
        ours.remove("v", None).unwrap();
        let error = ours.create("v", Pages(8)).err().unwrap().to_string();
        assert!(error.contains("v.swap") && error.contains("exists"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
        // Its own are there as ever.
        let made = files(&ours.create("w", Pages(8)).unwrap());
        ours.remove("w", Some(&made)).unwrap();
        assert!(!made[0].path.exists());
    }

    #[test]
    fn files_are_found_where_the_record_says_whatever_the_configuration_says_now() {
        let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let first = swap(&[a.path()]);
        let made = files(&first.create("v", Pages(8)).unwrap());
        let later = swap(&[b.path()]);
        let found = later.open("v", Some(&made)).unwrap();
        assert_eq!(files(&found), made);
        assert_eq!(made[0].path, a.path().join("v.swap"));
        let again = later.open("v", Some(&made)).unwrap();
        assert!(Arc::ptr_eq(&found.places()[0].location, &again.places()[0].location));
        later.remove("v", Some(&made)).unwrap();
        assert!(!made[0].path.exists());
    }

    /// It has its VM's whole reservation, which would be missing for good.
    #[test]
    fn a_file_that_a_reboot_of_the_host_has_left_is_no_room_that_is_missing() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let [old, now] = ["old", "now"].map(|vm| {
            let made = files(&swap(&[dir.path()]).create(vm, Pages(8)).unwrap());
            made[0].path.clone()
        });
        if !former_boots::age(&old) {
            eprintln!("SKIPPED: no attributes in /var/tmp, or no /etc/machine-id");
            return;
        }
        let next = swap(&[dir.path()]);
        assert!(!old.exists() && now.exists() && !next.room().is_zero());
    }

    #[test]
    fn room_on_one_file_system_counts_once() {
        let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let both = swap(&[a.path(), b.path()]);
        let one = both.rooms.of(a.path()).unwrap();
        // Others write to it meanwhile.
        assert!(!one.free.is_zero());
        assert!(both.room() < one.free + Pages(one.free.0 / 2), "{} of {}", both.room(), one.free);
        assert_eq!(swap(&[a.path(), Path::new("/nowhere")]).views(&[]).len(), 2);
    }

    #[test]
    fn a_record_of_old_means_the_file_of_the_vms_name() {
        let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let old = files(&swap(&[b.path()]).create("v", Pages(8)).unwrap());
        let now = swap(&[a.path(), b.path()]);
        assert_eq!(files(&now.open("v", None).unwrap()), old);
        // A file that a crash of the host has left is replaced.
        assert_eq!(files(&now.create("v", Pages(4)).unwrap())[0].path, a.path().join("v.swap"));
        assert!(!old[0].path.exists());
        let error = now.open("w", None).err().unwrap().to_string();
        assert!(error.contains("w.swap"), "{error}");
    }
}
