//! The manager's folders: made, locked, and cleared when nothing is left to be managed.

use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{XattrFlags, getxattr, setxattr};

use ballast_journal::store::segments_in;

use crate::commons;
use crate::config::Config;
use crate::layout;
use crate::looks_of_disks::{Look, is_mute};
use crate::trust::trusted;
use crate::whole_file;

/// Of all in the run folder and of the swap files that has no version of its own: the stores, their
/// key, the zeros. Grows by one whenever an older manager could not understand them.
pub const FORMAT: u32 = 1;
/// An attribute of a folder for swap files that a manager has made: one without was made for it, with what is set of a
/// folder (no copies on write, a quota), and stays.
const MADE: &str = "user.ballast.made";
const FORMAT_TEXT: &str = "ballast run folder ";

/// Folders that the manager needs, and which of them it made.
pub struct Folders {
    /// Made by this process.
    fresh: Vec<PathBuf>,
    /// Those, the run folder, and one for swap files that a former manager made.
    own: Vec<PathBuf>,
    /// Whether there were stores, and a format, of a former manager.
    had_stores: bool,
    had_format: bool,
}

impl Folders {
    /// Makes those that are missing, and looks whether nobody else can write to those that are there.
    ///
    /// # Errors
    /// A folder that cannot be made, or that is not to be trusted. Those that were made are gone.
    pub fn make(config: &Config) -> anyhow::Result<Folders> {
        let (mut fresh, mut former) = (Vec::new(), Vec::new());
        let had_stores = config.run_dir.join(layout::STORE).exists();
        let had_format = config.run_dir.join(layout::FORMAT).exists();
        fresh.extend(missing(&config.run_dir));
        if let Some(dir) = &config.swap_dir {
            // Where that hangs, nothing can be made, nor removed.
            let look = Look::begin(dir, |dir| (missing(dir), was_made(dir))).context("a thread")?;
            let (to_make, is_ours) = look.wait().unwrap_or_default();
            fresh.extend(to_make);
            former.extend(Some(dir.clone()).filter(|_| is_ours));
        }
        create(config).inspect_err(|_| remove_empty(&fresh))?;
        let mut own = fresh.clone();
        own.push(config.run_dir.clone());
        // In the run folder it is a manager's in any case; one that hangs is not waited for.
        let inside = |dir: &PathBuf| dir.starts_with(&config.run_dir) && !is_mute(dir);
        own.extend(config.swap_dir.clone().filter(inside));
        own.extend(former);
        Ok(Folders { fresh, own, had_stores, had_format })
    }

    /// It has the folder to itself: another one that ended a moment ago may have cleared it.
    ///
    /// # Errors
    /// A folder cannot be made, or is not to be trusted.
    pub fn make_again(&self, config: &Config) -> anyhow::Result<()> {
        open(config, &create(config)?)
    }

    /// Nothing is left to be managed: nothing is left behind.
    pub fn clear(&self, config: &Config) {
        let vms = config.run_dir.join(layout::VMS);
        for folder in std::fs::read_dir(&vms).into_iter().flatten().flatten() {
            // One with a record is of a VM that did not end.
            if !folder.path().join(layout::RECORD).exists() {
                let _ = std::fs::remove_dir_all(folder.path());
            }
        }
        let _ = std::fs::remove_dir(&vms);
        // What did not end may share pages.
        if !vms.exists() {
            commons::Commons::clear(&config.run_dir);
        }
        // A journal elsewhere is to outlive its manager, and what did not end is to be explained.
        if let Some(journal) = &config.journal
            && journal.folder == config.run_dir.join(layout::JOURNAL)
            && !vms.exists()
        {
            for (_, path) in segments_in(&journal.folder).into_iter().flatten() {
                let _ = std::fs::remove_file(path);
            }
            let _ = std::fs::remove_dir(&journal.folder);
        }
        // What did not end is the next manager's, with all that was set.
        if !vms.exists() {
            for file in [layout::ACCEL, layout::POOLS, layout::HOST, layout::FORMAT] {
                let _ = std::fs::remove_file(config.run_dir.join(file));
            }
        }
        give_up(&config.run_dir, &self.own);
    }

    /// It has the folder to itself, but did not start: what it found is as it was.
    pub fn undo(&self, config: &Config) {
        if !self.had_stores {
            commons::Commons::undo(&config.run_dir);
        }
        if !self.had_format && !config.run_dir.join(layout::STORE).exists() {
            let _ = std::fs::remove_file(config.run_dir.join(layout::FORMAT));
        }
        // Swap folders that were there may be another manager's.
        let mut made = self.fresh.clone();
        made.push(config.run_dir.clone());
        give_up(&config.run_dir, &made);
    }

    /// Another manager has the folders: what it did not need is gone.
    pub fn leave(&self) {
        remove_empty(&self.fresh);
    }
}

/// The run folder. One that is there stays as it is: it may be another manager's, who runs.
fn create(config: &Config) -> anyhow::Result<File> {
    // A group that may reach the shims' socket goes through those above it, too.
    make(&config.run_dir, if config.shim_group.is_some() { 0o711 } else { 0o700 })?;
    if let Some(dir) = &config.swap_dir {
        // VMs may wait that have no files there: it is missing, as any other location may be.
        Look::begin(dir, make_swap_dir).context("a thread")?.wait().unwrap_or(Ok(()))?;
    }
    let folder = trusted(&config.run_dir, false)?;
    look_at_swap(config)?;
    Ok(folder)
}

/// Lets a group that may reach the shims' socket go through the run folder, and see nothing in it; else nobody.
fn open(config: &Config, folder: &File) -> anyhow::Result<()> {
    let (given, mode) = match config.shim_group {
        Some(group) => (std::os::unix::fs::fchown(folder, None, Some(group)), 0o710),
        None => (Ok(()), 0o700),
    };
    given
        .and_then(|()| folder.set_permissions(Permissions::from_mode(mode)))
        .with_context(|| format!("folder {}", config.run_dir.display()))
}

/// Says once more who may go through the run folder and reach the shims' socket: systemd makes both root's alone when it runs an
/// ExecReload= of a unit with a RuntimeDirectory=, and that is what sends SIGHUP.
///
/// # Errors
/// The folder is not to be trusted any more, or they cannot be given to the group.
pub fn reopen(config: &Config) -> anyhow::Result<()> {
    open(config, &trusted(&config.run_dir, false)?)?;
    open_socket(config)
}

/// Whoever may connect to the shims' socket may write to it.
///
/// # Errors
/// It cannot be given to the group.
pub fn open_socket(config: &Config) -> anyhow::Result<()> {
    let path = config.run_dir.join(layout::SHIM_SOCKET);
    let mode = if config.shim_group.is_some() { 0o660 } else { 0o600 };
    open_to(&path, config.shim_group, mode).with_context(|| format!("socket {}", path.display()))
}

/// The swap locations that are there are to be trusted. One whose file system hangs is not waited for long: it is looked
/// at again before the first file is made there ([`crate::claim`]).
fn look_at_swap(config: &Config) -> anyhow::Result<()> {
    let look = |path: &Path| if path.exists() { trusted(path, true).map(drop) } else { Ok(()) };
    let looks: Vec<_> = config
        .swap
        .iter()
        .map(|place| Look::begin(&place.path, look))
        .collect::<Result<_, _>>()
        .context("a thread")?;
    looks.into_iter().filter_map(Look::wait).collect()
}

/// Which folders are to be made so that this one is there: itself first.
fn missing(dir: &Path) -> Vec<PathBuf> {
    dir.ancestors().take_while(|dir| !dir.exists()).map(Path::to_owned).collect()
}

fn make_swap_dir(dir: &Path) -> anyhow::Result<()> {
    let is_new = !dir.exists();
    make(dir, 0o700)?;
    if is_new {
        // Without attributes it stays if this manager does not come to its end.
        let _ = setxattr(dir, MADE, b"1", XattrFlags::empty());
    }
    Ok(())
}

fn was_made(dir: &Path) -> bool {
    getxattr(dir, MADE, &mut [0; 8][..]).is_ok()
}

/// Makes a folder for this user alone; those above it that are missing get the mode `above`.
fn make(dir: &Path, above: u32) -> anyhow::Result<()> {
    for folder in missing(dir).iter().rev() {
        let named = || format!("folder {}", folder.display());
        match std::fs::create_dir(folder) {
            // Another manager is making it, too.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            made => made.with_context(named)?,
        }
        let mode = if folder == dir { 0o700 } else { above };
        std::fs::set_permissions(folder, Permissions::from_mode(mode)).with_context(named)?;
    }
    Ok(())
}

/// Gives a file to a group, if there is one, and sets its mode.
///
/// # Errors
/// It is not ours to give.
fn open_to(path: &Path, group: Option<u32>, mode: u32) -> std::io::Result<()> {
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Gives the run folder up, and removes those of the folders that nothing is in. Whoever waits for the lock has all to itself
/// from its end on: what is removed after it is empty also of that one's.
fn give_up(run_dir: &Path, folders: &[PathBuf]) {
    let _ = std::fs::remove_file(run_dir.join(layout::SHIM_SOCKET));
    let (last, first): (Vec<_>, Vec<_>) =
        folders.iter().cloned().partition(|dir| run_dir.starts_with(dir));
    remove_empty(&first);
    let _ = std::fs::remove_file(run_dir.join(layout::LOCK));
    remove_empty(&last);
}

/// Removes those of the folders that nothing is in.
fn remove_empty(folders: &[PathBuf]) {
    // Deepest first; a folder with something of another's in it stays.
    let mut folders = folders.to_vec();
    folders.sort_by_key(|dir| std::cmp::Reverse(dir.as_os_str().len()));
    for dir in folders {
        let _ = std::fs::remove_dir(dir);
    }
}

/// Two managers on one run folder would page the same guests: None if there is one already.
///
/// # Errors
/// The file cannot be opened or locked.
pub fn try_lock(run_dir: &Path) -> anyhow::Result<Option<File>> {
    let path = run_dir.join(layout::LOCK);
    let named = || path.display().to_string();
    // A manager that ends without VMs removes the file that it holds: then it is another's lock.
    for _ in 0..100 {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.with_context(named)?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            other => other.with_context(named)?,
        }
        let held = rustix::fs::fstat(&file).with_context(named)?;
        match rustix::fs::stat(&path) {
            Ok(there) if (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino) => {
                return Ok(Some(file));
            }
            _ => {}
        }
    }
    bail!("{}: it comes and goes", path.display())
}

/// Whether this manager understands what is in the folder. Changes nothing.
///
/// # Errors
/// A newer manager wrote it, or none did.
pub fn check_format(run_dir: &Path) -> anyhow::Result<()> {
    let path = run_dir.join(layout::FORMAT);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(|| path.display().to_string()),
    };
    let version: Option<u32> =
        text.strip_prefix(FORMAT_TEXT).and_then(|rest| rest.trim_end().parse().ok());
    match version {
        None => bail!("{}: not a format that a manager wrote", path.display()),
        Some(version) if version > FORMAT => bail!(
            "{}: written by a newer manager (version {version}, this one knows {FORMAT})",
            path.display()
        ),
        Some(_) => Ok(()),
    }
}

/// From now on the folder is of this manager's format. Where it is so already nothing is written: a full folder has no room
/// for it, and VMs wait there.
///
/// # Errors
/// The file cannot be written.
pub fn set_format(run_dir: &Path) -> anyhow::Result<()> {
    let path = run_dir.join(layout::FORMAT);
    let text = format!("{FORMAT_TEXT}{FORMAT}\n");
    if std::fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    whole_file::write(&path, text.as_bytes()).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_locked_by_one_at_a_time_also_when_the_file_was_removed() {
        let dir = tempfile::tempdir().unwrap();
        let first = try_lock(dir.path()).unwrap().unwrap();
        assert!(try_lock(dir.path()).unwrap().is_none());
        std::fs::remove_file(dir.path().join("lock")).unwrap();
        let second = try_lock(dir.path()).unwrap().unwrap();
        drop(first);
        assert!(try_lock(dir.path()).unwrap().is_none());
        drop(second);
        assert!(try_lock(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_newer_format_is_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        check_format(dir.path()).unwrap();
        set_format(dir.path()).unwrap();
        check_format(dir.path()).unwrap();
        let path = dir.path().join(layout::FORMAT);
        for (text, part) in [
            ("ballast run folder 2\n", "newer manager (version 2"),
            ("ballast run folder\n", "not a format"),
            ("", "not a format"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = check_format(dir.path()).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_folder_of_this_format_is_not_written_to() {
        let dir = tempfile::tempdir().unwrap();
        set_format(dir.path()).unwrap();
        let path = dir.path().join(layout::FORMAT);
        let text = std::fs::read(&path).unwrap();
        // Nothing can be written any more.
        std::fs::create_dir(dir.path().join("format.new")).unwrap();
        set_format(dir.path()).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), text);
        std::fs::write(&path, "ballast run folder 0\n").unwrap();
        assert!(set_format(dir.path()).is_err(), "an older manager would go by that");
    }

    #[test]
    fn what_was_set_stays_as_long_as_a_vm_does() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run");
        let overrides = crate::config::Overrides {
            budget: Some(ballast_units::Bytes(64 << 20)),
            swap_dir: Some(run_dir.join(layout::SWAP)),
            run_dir: Some(run_dir.clone()),
            ..crate::config::Overrides::default()
        };
        let config = Config::load(None, overrides).unwrap();
        let folders = Folders::make(&config).unwrap();
        set_format(&run_dir).unwrap();
        let set = [layout::FORMAT, layout::POOLS, layout::HOST];
        for file in &set[1..] {
            std::fs::write(run_dir.join(file), "{}").unwrap();
        }
        for name in ["stays", "ended"] {
            std::fs::create_dir_all(run_dir.join("vms").join(name)).unwrap();
        }
        let record = run_dir.join("vms/stays/vm.json");
        std::fs::write(&record, "{}").unwrap();
        folders.clear(&config);
        assert!(record.exists() && !run_dir.join("vms/ended").exists());
        assert!(set.iter().all(|file| run_dir.join(file).exists()));
        std::fs::remove_file(&record).unwrap();
        folders.clear(&config);
        assert!(!run_dir.exists());
    }

    #[test]
    fn a_folder_for_swap_files_that_was_there_stays() {
        for there in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let [run_dir, swap_dir] = ["run", "swap"].map(|name| dir.path().join(name));
            if there {
                std::fs::create_dir(&swap_dir).unwrap();
                std::fs::set_permissions(&swap_dir, Permissions::from_mode(0o750)).unwrap();
            }
            let overrides = crate::config::Overrides {
                budget: Some(ballast_units::Bytes(64 << 20)),
                swap_dir: Some(swap_dir.clone()),
                run_dir: Some(run_dir.clone()),
                ..crate::config::Overrides::default()
            };
            let config = Config::load(None, overrides).unwrap();
            // The first one is killed.
            Folders::make(&config).unwrap();
            let is_noted = was_made(&swap_dir);
            if !there && !is_noted {
                eprintln!("SKIPPED: no attributes in {}", dir.path().display());
            }
            Folders::make(&config).unwrap().clear(&config);
            assert_eq!((run_dir.exists(), swap_dir.exists()), (false, !is_noted));
            assert!(!there || !is_noted);
        }
    }

    /// Another manager has the lock in the very moment in which the file is removed.
    #[test]
    fn nothing_but_empty_folders_is_removed_once_the_lock_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("run");
        let lock = run_dir.join(layout::LOCK);
        std::fs::create_dir(&run_dir).unwrap();
        let inotify = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).unwrap();
        let events = rustix::fs::inotify::WatchFlags::DELETE;
        for folder in [&run_dir, &dir.path().to_owned()] {
            rustix::fs::inotify::add_watch(&inotify, folder, events).unwrap();
        }
        let swaps = [run_dir.join("swap"), dir.path().join("swap"), run_dir.join(layout::FORMAT)];
        std::fs::create_dir(&swaps[0]).unwrap();
        std::fs::create_dir(&swaps[1]).unwrap();
        for file in [&lock, &swaps[2], &run_dir.join(layout::SHIM_SOCKET)] {
            std::fs::write(file, "").unwrap();
        }
        let own = vec![run_dir.clone(), swaps[0].clone(), swaps[1].clone()];
        let overrides = crate::config::Overrides {
            budget: Some(ballast_units::Bytes(64 << 20)),
            swap_dir: Some(swaps[1].clone()),
            run_dir: Some(run_dir.clone()),
            ..crate::config::Overrides::default()
        };
        let config = Config::load(None, overrides).unwrap();
        Folders { fresh: own.clone(), own, had_stores: false, had_format: false }.clear(&config);
        assert!(!run_dir.exists());
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut reader = rustix::fs::inotify::Reader::new(&inotify, &mut buffer);
        let mut removed = Vec::new();
        while removed.last().is_none_or(|last| last != "run") {
            let event = reader.next().unwrap();
            removed.extend(event.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
        assert_eq!(removed[removed.len() - 2..], [layout::LOCK, "run"], "{removed:?}");
        assert_eq!(removed.iter().filter(|name| *name == "swap").count(), 2, "{removed:?}");
    }
}
