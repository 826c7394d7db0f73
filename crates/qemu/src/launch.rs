//! Starting a VMM so that it outlives the manager: guests must survive the manager's death.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::{Exit, Launch, ProcessHandle, Qmp, QmpError, launcher};

/// How long to wait before a socket that QEMU has yet to open is tried again.
const RETRY: Duration = Duration::from_millis(10);
/// The end of the log in which the last line is looked for.
const LOG_TAIL: u64 = 4096;

/// Why a VMM did not start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LaunchError {
    #[error("cannot write QEMU's log {}: {source}", .path.display())]
    Log { path: PathBuf, source: io::Error },
    #[error("cannot start {}: {source}", .program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("QEMU {pid} started, but cannot be watched and was ended: {source}")]
    Watch { pid: u32, source: io::Error },
    #[error("QEMU {exit} before it could be reached: {last_line}{}", of_sandbox(last_line))]
    Ended { exit: Exit, last_line: String },
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// What is to be added to a QEMU's last words: where everybody else can write, it is ballastd's sandbox that forbids it.
fn of_sandbox(last_line: &str) -> &'static str {
    if last_line.contains("Read-only file system") {
        " (as a service, ballastd's unit must name that folder: ReadWritePaths=)"
    } else {
        ""
    }
}

/// A VMM that the manager started.
#[derive(Clone, Debug)]
pub struct Vmm {
    /// Its process.
    pub pid: u32,
    /// The same, by a descriptor that stays right.
    pub process: ProcessHandle,
    log: PathBuf,
}

/// A VMM that nobody has taken over; it is killed with whoever was to do so.
struct Unclaimed(Option<Vmm>);

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(vmm) = self.0.take() {
            let _ = vmm.process.kill();
        }
    }
}

/// Starts `launch` in a session of its own (no terminal, no signals of the manager's group), with
/// its output in the log. It is reaped when it ends, whether or not anybody asks. If this future
/// is dropped before it is done, no process stays behind.
///
/// # Errors
/// The log cannot be opened, or the program not started; no process is left.
pub async fn spawn(launch: &Launch) -> Result<Vmm, LaunchError> {
    let lost = |source| LaunchError::Start { program: launch.program.clone(), source };
    let wanted = launch.clone();
    // A task of its own finishes what it began, whatever happens to the caller.
    let mut vmm = tokio::spawn(begin(wanted)).await.map_err(|e| lost(e.into()))??;
    vmm.0.take().ok_or_else(|| lost(io::ErrorKind::Other.into()))
}

async fn begin(launch: Launch) -> Result<Unclaimed, LaunchError> {
    let log = launch.log.clone();
    let program = launch.program.clone();
    // fork and exec block for as long as the disk takes to bring in the program.
    let started = launcher::run(move || start(&launch)).await;
    let pid = started.map_err(|source| LaunchError::Start { program, source })??;
    let process = ProcessHandle::open(pid).map_err(|source| {
        // The child is ours and not yet reaped, so the number is still its own.
        if let Some(number) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(number, rustix::process::Signal::KILL);
            let _ = rustix::process::waitpid(Some(number), rustix::process::WaitOptions::empty());
        }
        LaunchError::Watch { pid, source }
    })?;
    let reaper = process.clone();
    tokio::spawn(async move { reaper.exited().await });
    Ok(Unclaimed(Some(Vmm { pid, process, log })))
}

fn start(launch: &Launch) -> Result<u32, LaunchError> {
    let log_error = |source| LaunchError::Log { path: launch.log.clone(), source };
    let log = OpenOptions::new().create(true).append(true).open(&launch.log).map_err(log_error)?;
    let error_log = log.try_clone().map_err(log_error)?;
    let mut command = Command::new(&launch.program);
    command
        .args(&launch.args)
        .envs(launch.env.iter().map(|(key, value)| (key, value)))
        .current_dir(&launch.dir)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(error_log);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed: these are bare
    // system calls, and turning an errno into an io::Error does not allocate.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            // From here on nobody's signals reach it but those that it is to have.
            launcher::restore_signals();
            Ok(())
        });
    }
    let child = command
        .spawn()
        .map_err(|source| LaunchError::Start { program: launch.program.clone(), source })?;
    // Dropping a Child neither ends nor reaps it; the pidfd does the latter.
    Ok(child.id())
}

impl Vmm {
    /// Connects to the QMP socket that this VMM is about to open. Ends early, with the last line
    /// of QEMU's log, when the VMM ends.
    ///
    /// # Errors
    /// The VMM ended, or its socket did not answer within `deadline`, or not as QMP does.
    pub async fn connect_qmp(&self, socket: &Path, deadline: Duration) -> Result<Qmp, LaunchError> {
        let end = Instant::now() + deadline;
        tokio::select! {
            exit = self.process.exited() => Err(LaunchError::Ended {
                exit,
                last_line: last_log_line(&self.log).unwrap_or_else(|| "it said nothing".into()),
            }),
            qmp = connect_until(socket, end, deadline) => Ok(qmp?),
        }
    }
}

async fn connect_until(socket: &Path, end: Instant, deadline: Duration) -> Result<Qmp, QmpError> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let error = match Qmp::connect(socket, left).await {
            Ok(qmp) => return Ok(qmp),
            Err(error) => error,
        };
        let early = matches!(&error, QmpError::Connect { source, .. } if matches!(
            source.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
        ));
        if !early {
            return Err(error);
        }
        if timeout_at(end, sleep(RETRY)).await.is_err() {
            return Err(QmpError::NoGreeting { socket: socket.to_owned(), after: deadline });
        }
    }
}

/// The last line of a log that says something, for error messages. None if there is none.
pub fn last_log_line(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL))).ok()?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.chars().filter(|c| !c.is_control()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_sandbox_forbids_a_folder_the_unit_is_named() {
        let told = |words: &str| {
            LaunchError::Ended { exit: Exit::Code(1), last_line: words.into() }.to_string()
        };
        assert!(told("Could not open 'x': Read-only file system").contains("ReadWritePaths="));
        assert!(told("Could not open 'x': No such file").ends_with("No such file"));
    }

    #[tokio::test]
    async fn a_process_that_nobody_takes_over_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let launch = Launch {
            program: "sleep".into(),
            args: vec!["1000".into()],
            env: vec![],
            dir: dir.path().into(),
            log: dir.path().join("log"),
        };
        let vmm = begin(launch).await.unwrap();
        let process = vmm.0.as_ref().unwrap().process.clone();
        assert!(process.is_alive());
        drop(vmm);
        assert_eq!(process.exited().await, Exit::Signal(9));
    }

    #[test]
    fn the_last_line_of_a_log_is_found_whatever_the_log_holds() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        assert_eq!(last_log_line(&log), None);
        std::fs::write(&log, b"").unwrap();
        assert_eq!(last_log_line(&log), None);
        std::fs::write(&log, b"\n \n").unwrap();
        assert_eq!(last_log_line(&log), None);
        std::fs::write(&log, b"first\nqemu: no\x1b such\xff file\n\n").unwrap();
        assert_eq!(last_log_line(&log).unwrap(), "qemu: no such\u{fffd} file");
        std::fs::write(&log, vec![b'x'; 10_000]).unwrap();
        assert_eq!(last_log_line(&log).unwrap().len(), 4096);
    }
}
