//! What `ballastd` notes of each VM in its run folder, as far as others may rely on it: which process
//! the VM is. Enough to end a VM while no manager runs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::layout::{RECORD, VMS};

/// Grows by one whenever an older program could not understand the file.
pub const RECORD_VERSION: u32 = 5;

/// Why a record cannot be used. Nothing has been changed in it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RecordError {
    #[error("{}: {source}", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{}: {source}", .path.display())]
    Syntax { path: PathBuf, source: serde_json::Error },
    #[error(
        "{}: written by a newer manager (version {found}, this one knows {RECORD_VERSION})",
        .path.display()
    )]
    Newer { path: PathBuf, found: u32 },
    #[error("{}: the record of a VM named '{name}': copied, or moved?", .path.display())]
    Another { path: PathBuf, name: String },
}

/// The part of a VM's record that says which process it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// At most [`RECORD_VERSION`].
    pub version: u32,
    /// Name of the VM.
    pub name: String,
    /// Number of its process.
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot: process numbers are used again.
    pub pid_started: u64,
}

/// Where the record of a VM is, whose name must be a good one.
pub fn record_path(run_dir: &Path, vm: &str) -> PathBuf {
    run_dir.join(VMS).join(vm).join(RECORD)
}

/// The text of a record whose version this program knows; None if there is no record.
///
/// # Errors
/// It cannot be read, is of a newer version, or is no record.
pub fn read_record(path: &Path) -> Result<Option<Vec<u8>>, RecordError> {
    match std::fs::read(path) {
        Ok(text) => check_version(path, &text).map(|()| Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RecordError::Io { path: path.to_owned(), source }),
    }
}

/// Before anything else, which may have changed.
fn check_version(path: &Path, text: &[u8]) -> Result<(), RecordError> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    match serde_json::from_slice(text) {
        Ok(Versioned { version }) if version > RECORD_VERSION => {
            Err(RecordError::Newer { path: path.to_owned(), found: version })
        }
        Ok(Versioned { .. }) => Ok(()),
        Err(source) => Err(RecordError::Syntax { path: path.to_owned(), source }),
    }
}

impl ProcessRecord {
    /// What is noted of a VM; None if nothing is.
    ///
    /// # Errors
    /// As of [`read_record`], or it is another VM's.
    pub fn load(run_dir: &Path, vm: &str) -> Result<Option<ProcessRecord>, RecordError> {
        let path = record_path(run_dir, vm);
        let Some(text) = read_record(&path)? else { return Ok(None) };
        match ProcessRecord::parse(&path, &text)? {
            record if record.name == vm => Ok(Some(record)),
            ProcessRecord { name, .. } => Err(RecordError::Another { path, name }),
        }
    }

    /// The text of a record; `path` is for the error.
    ///
    /// # Errors
    /// It is of a newer version, or no record.
    pub fn parse(path: &Path, text: &[u8]) -> Result<ProcessRecord, RecordError> {
        check_version(path, text)?;
        serde_json::from_slice(text)
            .map_err(|source| RecordError::Syntax { path: path.to_owned(), source })
    }

    /// Whether the process that the record names still runs.
    ///
    /// # Errors
    /// As of [`is_process`].
    pub fn is_alive(&self) -> std::io::Result<bool> {
        is_process(self.pid, self.pid_started)
    }
}

/// Whether the process of this number that was started then runs: a number may be another's by now. `started` 0 stands
/// for a moment that is not known.
///
/// # Errors
/// As of [`process_started`], or one runs and that moment is not known. What cannot be told is not to be taken for an
/// end: what a process left is removed, and what one needs must not be.
pub fn is_process(pid: u32, started: u64) -> std::io::Result<bool> {
    match process_started(pid)? {
        None => Ok(false),
        Some(_) if started == 0 => {
            let why = format!("there is a process {pid}, and which one it was is not noted");
            Err(std::io::Error::other(why))
        }
        Some(now) => Ok(now == started),
    }
}

/// When a process started, in clock ticks since boot. None if there is none, or only a zombie.
///
/// # Errors
/// It cannot be told whether there is one.
pub fn process_started(pid: u32) -> std::io::Result<Option<u64>> {
    let path = format!("/proc/{pid}/stat");
    let failed = |e: std::io::Error| std::io::Error::new(e.kind(), format!("{path}: {e}"));
    let stat = match std::fs::read(&path) {
        Ok(stat) => stat,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(ESRCH) => {
            // No process, or no /proc.
            return if Path::new("/proc/self/stat").exists() { Ok(None) } else { Err(failed(e)) };
        }
        Err(e) => return Err(failed(e)),
    };
    // The name in it is any bytes.
    let stat = String::from_utf8_lossy(&stat);
    started_in(&stat).ok_or_else(|| failed(std::io::Error::other("not as proc(5) says")))
}

/// Of a process that read of its text has ended.
const ESRCH: i32 = 3;

/// In the text of /proc/PID/stat: None within, a zombie; None at all, not such a text.
fn started_in(stat: &str) -> Option<Option<u64>> {
    let (_, mut fields) = stat_fields(stat)?;
    // The third field; the 20th and the 22nd follow.
    let state = fields.next()?;
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let started = fields.nth(1)?.parse().ok()?;
    // Of a process whose first thread has ended alone, only that is a zombie.
    let ended = matches!(state, "Z" | "X") && threads <= 1;
    Some((!ended).then_some(started))
}

/// The name of a process, and the fields from the third on, in the text of /proc/PID/stat. The name stands in
/// parentheses and may hold any character, parentheses and newlines included.
pub fn stat_fields(text: &str) -> Option<(&str, std::str::SplitAsciiWhitespace<'_>)> {
    let (head, tail) = text.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    Some((name, tail.split_ascii_whitespace()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_record_is_told_from_a_damaged_one_whatever_else_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = record_path(dir.path(), "a");
        assert!(ProcessRecord::load(dir.path(), "a").unwrap().is_none());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let with = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let loaded = ProcessRecord::load(dir.path(), "a");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            loaded
        };
        let newer = with("{\"version\":99,\"process\":{\"changed\":true}}");
        assert!(matches!(newer, Err(RecordError::Newer { found: 99, .. })), "{newer:?}");
        for damaged in ["", "[]", "{\"version\":1", "{\"version\":1}", "{\"version\":-1}"] {
            let loaded = with(damaged);
            assert!(matches!(loaded, Err(RecordError::Syntax { .. })), "{damaged}: {loaded:?}");
        }
        let me = std::process::id();
        let started = process_started(me).unwrap().unwrap();
        let good = format!(
            "{{\"version\":1,\"name\":\"a\",\"pid\":{me},\"pid_started\":{started},\"more\":[]}}"
        );
        let record = with(&good).unwrap().unwrap();
        assert!(record.is_alive().unwrap());
        let other = ProcessRecord { pid_started: started + 1, ..record };
        assert!(!other.is_alive().unwrap());
        // One of which nothing was noted may be any.
        assert!(ProcessRecord { pid_started: 0, ..other }.is_alive().is_err());
    }

    #[test]
    fn a_process_is_there_whatever_its_name_is() {
        let own = std::fs::read("/proc/self/comm").unwrap();
        let started = process_started(std::process::id()).unwrap();
        assert!(started.is_some());
        for name in [&b"qemu:Datenbank\xc3"[..], b"\xff\xfe", b") Z 1 (", b"\n", &own] {
            std::fs::write("/proc/self/comm", name).unwrap();
            assert_eq!(process_started(std::process::id()).unwrap(), started, "{name:?}");
        }
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert!(process_started(child.id()).unwrap().is_some());
        child.kill().unwrap();
        // A zombie until it was waited for.
        while process_started(child.id()).unwrap().is_some() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(process_started(child.id()).unwrap(), None);
    }

    #[test]
    fn what_is_not_understood_is_no_end() {
        let line = |state: &str, threads: u32| {
            format!("7 (a) {state} 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 4711 0 0\n")
        };
        assert_eq!(started_in(&line("S", 1)), Some(Some(4711)));
        assert_eq!(started_in(&line("Z", 1)), Some(None));
        // Its first thread has ended, and others go on.
        assert_eq!(started_in(&line("Z", 2)), Some(Some(4711)));
        for torn in ["", "7 (a", "7 (a) S 1", "7 (a) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 x 0 4711"]
        {
            assert_eq!(started_in(torn), None, "{torn}");
        }
    }
}
