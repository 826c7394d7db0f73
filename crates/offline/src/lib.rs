//! Ending a VM while no manager runs. Its guest stands still, or will at its next page fault, and a VMM
//! whose vCPU waits in a page fault does not obey SIGTERM: SIGKILL is what always works.
//!
//! Which process the VM is, its record in the manager's run folder says; that the process is still the
//! one, its start time; and it is signalled by a pidfd, never by a number that may be another's by then.

#![warn(missing_docs)]

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ballast_api::layout::LOCK;
use ballast_api::record::{ProcessRecord, RecordError, record_path};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;

/// How long a VMM may take to obey SIGTERM. One that can does so at once.
pub const GRACE: Duration = Duration::from_secs(5);
/// How long the kernel may take to clear away a killed process.
const KILLED: Duration = Duration::from_secs(60);

/// Why a VM was not ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum OfflineError {
    #[error("no ballastd answers, and the record of the VM cannot be used: {0}")]
    Record(#[from] RecordError),
    #[error(
        "a ballastd that does not answer has {}: it is about to start or to end (try again), or its socket is elsewhere \
         (name it by --socket, without --run-dir)",
        .run_dir.display()
    )]
    Busy { run_dir: PathBuf },
    #[error("no ballastd answers, and {} is of user {user}: what it says of processes is not believed", .path.display())]
    Stranger { path: PathBuf, user: u32 },
    #[error("{name}: process {pid}: {source}")]
    Process { name: String, pid: u32, source: std::io::Error },
    #[error("{name}: process {pid} was killed and is still there after {} s", KILLED.as_secs())]
    Lives { name: String, pid: u32 },
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// It had ended before.
    Gone,
    /// It obeyed SIGTERM.
    Asked,
    /// It did not, and SIGKILL ended it.
    Killed,
}

/// Which VM has ended, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ended {
    /// Name of the VM.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub end: End,
    /// Milliseconds that it had to obey SIGTERM; 0: it was not asked.
    pub grace_ms: u64,
}

/// Ends the VM of this name by what a manager that is gone noted in `run_dir`; None if it noted nothing.
/// With a `grace` of 0 at once.
///
/// # Errors
/// A record that cannot be used, a manager that has the folder after all, or what the kernel refuses.
pub fn stop(run_dir: &Path, name: &str, grace: Duration) -> Result<Option<Ended>, OfflineError> {
    let Some(record) = ProcessRecord::load(run_dir, name)? else { return Ok(None) };
    if !check_owners(run_dir, name)? {
        return Ok(None);
    }
    if has_manager(run_dir) {
        return Err(OfflineError::Busy { run_dir: run_dir.to_owned() });
    }
    let mut ended = Ended { name: name.to_owned(), pid: record.pid, end: End::Gone, grace_ms: 0 };
    let failed = |source: Errno| OfflineError::Process {
        name: name.to_owned(),
        pid: record.pid,
        source: source.into(),
    };
    let number = i32::try_from(record.pid).ok().and_then(Pid::from_raw);
    let process = match number.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => process,
        None | Some(Err(Errno::SRCH)) => return Ok(Some(ended)),
        Some(Err(e)) => return Err(failed(e)),
    };
    // Looked at after the descriptor was made: from here on they are the same.
    let alive = record.is_alive().map_err(|source| OfflineError::Process {
        name: name.to_owned(),
        pid: record.pid,
        source,
    })?;
    if !alive {
        return Ok(Some(ended));
    }
    if !grace.is_zero() {
        ended.grace_ms = grace.as_millis() as u64;
        send(&process, Signal::TERM).map_err(failed)?;
        if has_ended(&process, grace).map_err(failed)? {
            ended.end = End::Asked;
            return Ok(Some(ended));
        }
    }
    send(&process, Signal::KILL).map_err(failed)?;
    if !has_ended(&process, KILLED).map_err(failed)? {
        return Err(OfflineError::Lives { name: name.to_owned(), pid: record.pid });
    }
    ended.end = End::Killed;
    Ok(Some(ended))
}

/// What names a process to be killed is root's, the caller's, or that of whoever has the folder: others may have put it
/// into one where everybody may write. False: it has gone since it was read, as that of a VM that has ended does, and names
/// nothing any more.
fn check_owners(run_dir: &Path, name: &str) -> Result<bool, OfflineError> {
    let record = record_path(run_dir, name);
    let user = |path: &Path| path.symlink_metadata().map(|meta| meta.uid()).ok();
    let believed = [Some(0), Some(rustix::process::geteuid().as_raw()), user(run_dir)];
    for path in record.ancestors().take_while(|path| *path != run_dir) {
        match user(path) {
            None => return Ok(false),
            Some(user) if !believed.contains(&Some(user)) => {
                return Err(OfflineError::Stranger { path: path.to_owned(), user });
            }
            Some(_) => {}
        }
    }
    Ok(true)
}

/// Whether a manager has the folder, though nobody answers yet or any more.
fn has_manager(run_dir: &Path) -> bool {
    let file = match std::fs::File::open(run_dir.join(LOCK)) {
        Ok(file) => file,
        Err(e) => return e.kind() != std::io::ErrorKind::NotFound,
    };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
}

fn send(process: &OwnedFd, signal: Signal) -> Result<(), Errno> {
    match pidfd_send_signal(process, signal) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Waits for its end, `at_most` so long.
fn has_ended(process: &OwnedFd, at_most: Duration) -> Result<bool, Errno> {
    let deadline = Instant::now() + at_most;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(process, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    use super::*;
    use std::os::unix::fs::chown;

    #[test]
    fn a_record_that_somebody_else_put_there_is_not_believed() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIPPED: files of others are made by root alone");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = record_path(dir.path(), "a");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // A process that has ended long ago.
        let record =
            ProcessRecord { version: 1, name: "a".into(), pid: u32::MAX >> 1, pid_started: 1 };
        std::fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
        let stop = || stop(dir.path(), "a", Duration::ZERO);
        assert_eq!(stop().unwrap().unwrap().end, End::Gone);
        for one in [path.as_path(), path.parent().unwrap()] {
            chown(one, Some(4242), None).unwrap();
            let refused = stop().unwrap_err().to_string();
            assert!(refused.contains("is of user 4242"), "{refused}");
            chown(one, Some(0), None).unwrap();
        }
        // One that has gone by now names nothing.
        assert!(check_owners(dir.path(), "a").unwrap());
        assert!(!check_owners(dir.path(), "b").unwrap());
        // A manager that runs as that user.
        for one in [path.as_path(), path.parent().unwrap(), dir.path()] {
            chown(one, Some(4242), None).unwrap();
        }
        assert_eq!(stop().unwrap().unwrap().end, End::Gone);
    }
}
