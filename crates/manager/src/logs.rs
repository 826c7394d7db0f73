//! The logs in the VMs' run folders, `console.log` and `qemu.log`: in memory, so bounded. What a guest says
//! through its serial port must not take the room of pmaps and compressed pages.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::layout::{CONSOLE, QEMU_LOG, RECORD, VMS};
use crate::manager::Manager;
use crate::sync::lock;

/// A log that is longer is cut.
const MOST: u64 = 1 << 20;
/// What is kept of it: its end.
const KEPT: u64 = MOST / 2;
/// VMs that have ended whose logs stay: the last ones.
const ENDED: usize = 32;
const PERIOD: Duration = Duration::from_secs(1);
/// One that was as long at the last look is looked at once in so many.
const STILL: u32 = 3;

/// What is known of one log.
#[derive(Default)]
struct Log {
    /// At the last look.
    len: u64,
    /// For so many periods it is not looked at.
    left_alone: u32,
    /// That it was too long, or could not be cut, was said.
    told: bool,
    is_there: bool,
}

/// The thread that cuts them.
pub fn watch(manager: &Manager) {
    let mut logs = HashMap::new();
    let vms = manager.config().run_dir.join(VMS);
    while !manager.is_stopping() {
        let folders = cut_all(&vms, &mut logs);
        // Only then have more VMs ended than are kept: it saves a look into each folder.
        if folders > manager.vms().len() + ENDED {
            prune_ended(manager, &vms);
        }
        manager.rest(PERIOD);
    }
}

/// Removes what is left of VMs that have ended, but for the last ones.
fn prune_ended(manager: &Manager, vms: &Path) {
    prune(vms, |name, remove| {
        // One that is being started has no record yet. Held, so that none begins to be.
        let starting = lock(&manager.starting);
        if !starting.contains_key(name) && manager.find(name).is_none() {
            remove();
        }
    });
}

/// Cuts what is too long in each VM's folder; answers how many folders there are. `logs`: those that were there the last time.
fn cut_all(vms: &Path, logs: &mut HashMap<PathBuf, Log>) -> usize {
    let mut folders = 0;
    for folder in std::fs::read_dir(vms).into_iter().flatten().flatten() {
        folders += 1;
        for path in [CONSOLE, QEMU_LOG].map(|log| folder.path().join(log)) {
            let log = logs.entry(path.clone()).or_default();
            log.is_there = true;
            log.look(&path);
        }
    }
    logs.retain(|_, log| std::mem::take(&mut log.is_there));
    folders
}

impl Log {
    fn look(&mut self, path: &Path) {
        if self.left_alone > 0 {
            self.left_alone -= 1;
            return;
        }
        let len = length(path);
        if len == self.len {
            self.left_alone = STILL - 1;
        }
        self.len = len;
        let why = match cut(path, len) {
            Ok(false) => return,
            Ok(true) => {
                self.left_alone = 0;
                format!("over {} KiB: its end is kept", MOST >> 10)
            }
            Err(e) => e.to_string(),
        };
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!("{}: {why}", path.display());
        }
    }
}

/// Nothing, of what is no file or not there.
fn length(log: &Path) -> u64 {
    std::fs::symlink_metadata(log).map_or(0, |meta| if meta.is_file() { meta.len() } else { 0 })
}

/// Cuts a log that is too long to its last lines. Its writer appends, so goes on behind them; what it writes
/// in this moment may be lost. Answers whether it was too long.
fn cut(log: &Path, len: u64) -> std::io::Result<bool> {
    if len <= MOST {
        return Ok(false);
    }
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32;
    let mut options = OpenOptions::new();
    let mut file: File = options.read(true).append(true).custom_flags(flags).open(log)?;
    let mut end = vec![0; KEPT as usize];
    file.read_exact_at(&mut end, len - KEPT)?;
    let line = end.iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    file.set_len(0)?;
    file.write_all(&end[line..])?;
    Ok(true)
}

/// Removes the folders of VMs that have ended but for the last ones. `unless_there` calls what it is given unless
/// there is a VM of that name.
fn prune(vms: &Path, unless_there: impl Fn(&str, &dyn Fn())) {
    let folders = std::fs::read_dir(vms).into_iter().flatten().flatten();
    let mut ended: Vec<(SystemTime, std::path::PathBuf)> = folders
        .filter(|folder| !folder.path().join(RECORD).exists())
        .filter_map(|folder| Some((folder.metadata().ok()?.modified().ok()?, folder.path())))
        .collect();
    if ended.len() <= ENDED {
        return;
    }
    ended.sort();
    let more = ended.len() - ENDED;
    for (_, folder) in ended.into_iter().take(more) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        unless_there(&name, &|| {
            if !folder.join(RECORD).exists() {
                let _ = std::fs::remove_dir_all(&folder);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_too_long_keeps_its_end_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console.log");
        assert!(!cut(&log, length(&log)).unwrap());
        let mut writer = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let line = |n: usize| format!("{n:0>62}.\n");
        let lines = MOST as usize / 64;
        for n in 0..lines {
            writer.write_all(line(n).as_bytes()).unwrap();
        }
        assert!(!cut(&log, length(&log)).unwrap(), "as long as it may be");
        writer.write_all(line(lines).as_bytes()).unwrap();
        assert!(cut(&log, length(&log)).unwrap());
        writer.write_all(line(lines + 1).as_bytes()).unwrap();
        let text = std::fs::read_to_string(&log).unwrap();
        assert!(text.len() as u64 <= KEPT + 64 && text.len() as u64 > KEPT - 128);
        assert!(text.starts_with('0') && text.ends_with(&(line(lines) + &line(lines + 1))));
        // Nothing that it is made to point at is cut.
        std::fs::rename(&log, dir.path().join("other")).unwrap();
        std::fs::write(dir.path().join("other"), vec![b'x'; 2 << 20]).unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), &log).unwrap();
        assert!(!cut(&log, length(&log)).unwrap());
    }

    #[test]
    fn one_that_stays_as_it_is_is_looked_at_less_often_until_it_grows() {
        let vms = tempfile::tempdir().unwrap();
        let folder = vms.path().join("vm");
        std::fs::create_dir(&folder).unwrap();
        let log = folder.join(CONSOLE);
        let logs = &mut HashMap::new();
        let turns_until_cut = |logs: &mut _| {
            std::fs::write(&log, vec![b'x'; MOST as usize + 1]).unwrap();
            (1..).find(|_| {
                assert_eq!(cut_all(vms.path(), logs), 1);
                length(&log) < MOST
            })
        };
        assert_eq!([turns_until_cut(logs), turns_until_cut(logs)], [Some(1); 2]);
        // Once it has what it was cut to, and once it has that still.
        assert_eq!([cut_all(vms.path(), logs), cut_all(vms.path(), logs)], [1; 2]);
        assert_eq!(turns_until_cut(logs), Some(STILL));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((cut_all(vms.path(), logs), logs.len()), (0, 0));
    }

    #[test]
    fn of_vms_that_have_ended_the_last_logs_stay() {
        let vms = tempfile::tempdir().unwrap();
        let begun = SystemTime::UNIX_EPOCH;
        for n in 0..ENDED as u64 + 4 {
            let folder = vms.path().join(format!("vm{n}"));
            std::fs::create_dir(&folder).unwrap();
            if n == 0 {
                std::fs::write(folder.join("vm.json"), "").unwrap();
            }
            let at = begun + Duration::from_secs(1000 + n);
            File::open(&folder).unwrap().set_modified(at).unwrap();
        }
        // One runs; of the others one has no record yet.
        prune(vms.path(), |name, remove| match name {
            "vm1" => {}
            // A start that has come so far meanwhile that it has a record.
            "vm2" => {
                std::fs::write(vms.path().join("vm2/vm.json"), "").unwrap();
                remove();
            }
            _ => remove(),
        });
        let there = |n: usize| vms.path().join(format!("vm{n}")).exists();
        assert!(there(0) && there(1) && there(2) && !there(3) && there(4));
        assert_eq!(std::fs::read_dir(vms.path()).unwrap().count(), ENDED + 3);
    }

    /// The manager goes on, where it once waited for itself.
    #[tokio::test]
    async fn more_vms_than_are_kept_end_and_the_manager_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let vms = manager.config().run_dir.join(VMS);
        let more = 3;
        for n in 0..ENDED + more {
            std::fs::create_dir_all(vms.join(format!("vm{n}"))).unwrap();
        }
        // The oldest: one that is being started stays.
        let nothing = ballast_units::Pages::ZERO;
        let promise = ballast_policy::Promise { min: nothing, overhead: nothing, swap: nothing };
        let pledge = crate::manager::Pledge { promise, pool: None, rebooted: None };
        let old = vms.join("vm7");
        File::open(&old).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        lock(&manager.starting).insert("vm7".to_owned(), pledge);
        let (done, is_done) = std::sync::mpsc::channel();
        let (pruned, folder) = (manager.clone(), vms.clone());
        std::thread::spawn(move || {
            prune_ended(&pruned, &folder);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).expect("it waits for itself");
        assert_eq!(std::fs::read_dir(&vms).unwrap().count(), ENDED + 1);
        assert!(old.exists());
    }
}
