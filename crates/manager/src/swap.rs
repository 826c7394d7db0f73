//! Where VMs have their swap files: the locations that the configuration names, and those that it named
//! when VMs were started that run still.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_api::{LocationState, SwapLocation};
use ballast_pager::swap::{Location, Place, SwapError, SwapSpace};
use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::manager::Manager;
use crate::vm::{Vm, lock};

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
    /// Room in each folder as last looked at: a file system that hangs holds up nobody but who looks.
    rooms: Mutex<HashMap<PathBuf, Option<Room>>>,
}

/// What there is in a folder.
#[derive(Clone, Copy, Debug)]
struct Room {
    file_system: u64,
    free: Pages,
}

impl Room {
    /// May take as long as the file system does.
    fn of(location: &Location) -> Option<Room> {
        Some(Room { file_system: location.file_system()?, free: location.room()? })
    }
}

/// How often the room is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// The thread that looks. Nobody waits for its end: it may hang with a file system.
pub fn watch(manager: &Manager) {
    while !manager.is_stopping() {
        manager.swap.look();
        std::thread::sleep(LOOK);
    }
}

impl Swap {
    /// Looks how much room there is, which may take as long as a file system does.
    pub fn new(config: &Config) -> Swap {
        let locations =
            config.swap.iter().map(|place| Location::new(&place.path, place.priority)).collect();
        Swap::over(locations)
    }

    fn over(locations: Vec<Arc<Location>>) -> Swap {
        let swap = Swap { locations, others: Mutex::default(), rooms: Mutex::default() };
        swap.look();
        swap
    }

    /// Looks how much room there is. May take as long as a file system does.
    pub fn look(&self) {
        let others = lock(&self.others).clone();
        for location in self.locations.iter().chain(&others) {
            let room = Room::of(location);
            lock(&self.rooms).insert(location.folder().to_owned(), room);
        }
    }

    fn room_in(&self, location: &Location) -> Option<Room> {
        lock(&self.rooms).get(location.folder()).copied().flatten()
    }

    /// Room for files that are yet to be made: that of two locations on one file system counts once. Space
    /// reserved for VMs is allocated already.
    pub fn room(&self) -> Pages {
        let usable = self.locations.iter().filter(|location| !location.is_failed());
        let rooms: HashMap<u64, Pages> = usable
            .filter_map(|location| self.room_in(location))
            .map(|room| (room.file_system, room.free))
            .collect();
        rooms.into_values().sum()
    }

    /// The files of a VM that is being started; those that a former VM of its name may have left are
    /// removed first.
    pub fn create(&self, vm: &str, size: Pages) -> Result<SwapSpace, SwapError> {
        for location in &self.locations {
            let _ = std::fs::remove_file(location.folder().join(file_name(vm)));
        }
        let made = SwapSpace::create(&file_name(vm), size, &self.locations);
        // What it takes is not promised to another.
        self.look();
        made
    }

    /// The files of a VM that runs: those in its record, or the one that managers made who kept none there.
    pub fn open(&self, vm: &str, recorded: Option<&[SwapFile]>) -> Result<SwapSpace, SwapError> {
        let places = match recorded {
            Some(files) => {
                files.iter().map(|file| self.place(&file.path, Some(file.size))).collect()
            }
            None => vec![self.place(&self.lone_file(vm), None)],
        };
        SwapSpace::open(&places)
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
            lock(&self.rooms).insert(folder.to_owned(), Room::of(&other));
            others.push(other.clone());
            other
        });
        Place { path: path.to_owned(), location, len }
    }

    /// Removes the files of a VM that is no more.
    pub fn remove(&self, vm: &str, recorded: Option<&[SwapFile]>) -> std::io::Result<()> {
        let usual = self.locations.iter().map(|l| l.folder().join(file_name(vm)));
        let mut result = Ok(());
        for path in recorded.into_iter().flatten().map(|f| f.path.clone()).chain(usual) {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    result = Err(std::io::Error::new(e.kind(), format!("{}: {e}", path.display())));
                }
                _ => {}
            }
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
            let free = self.room_in(location).map(|room| room.free);
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

fn file_name(vm: &str) -> String {
    format!("{vm}.swap")
}

/// A location that cannot be used: the first, with the reason. One that the manager makes itself is there.
pub fn missing(config: &Config) -> Option<String> {
    let trouble = |path: &Path| {
        let meta = std::fs::metadata(path).map_err(|e| e.to_string());
        match meta {
            Err(e) => Some(e),
            Ok(meta) if !meta.is_dir() => Some("not a folder".to_owned()),
            Ok(_) => {
                let access = rustix::fs::access(path, rustix::fs::Access::WRITE_OK);
                access.err().map(|e| e.to_string())
            }
        }
    };
    let named = config.swap.iter().filter(|place| config.swap_dir.as_ref() != Some(&place.path));
    named
        .map(|place| &place.path)
        .find_map(|path| Some(format!("swap.location: {}: {}", path.display(), trouble(path)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap(dirs: &[&Path]) -> Swap {
        let locations = dirs.iter().map(|dir| Location::new(dir, 0)).collect();
        Swap::over(locations)
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

    #[test]
    fn room_on_one_file_system_counts_once() {
        let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let both = swap(&[a.path(), b.path()]);
        let one = lock(&both.rooms)[a.path()].unwrap();
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
