//! KVM or TCG? A /dev/kvm that opens proves little: there are hosts whose KVM runs small payloads
//! but no stock kernel. So the probe boots one, under the options that VMs will have.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::{Instant, timeout, timeout_at};

use crate::command_line::SANDBOX;

const DEVICE: &str = "/dev/kvm";
/// KVM_GET_API_VERSION, _IO(0xAE, 0), and the only answer since Linux 2.6.22.
const GET_API_VERSION: libc::Ioctl = 0xAE00;
const API_VERSION: i32 = 12;
/// The kernel's first line on real hardware virtualization comes within half a second.
const BOOT: Duration = Duration::from_secs(5);
/// For a killed QEMU to let go of its VM.
const REAP: Duration = Duration::from_millis(500);
/// How long a host is said not to boot a kernel that it did not boot once.
const KEPT: Duration = Duration::from_secs(600);
/// The first line of every Linux console.
const MARKER: &[u8] = b"Linux version";
/// More output than this without the marker is not a kernel that starts.
const MOST_OUTPUT: usize = 256 << 10;

/// What VMs run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccelChoice {
    /// Hardware virtualization.
    Kvm,
    /// QEMU's emulator.
    Tcg {
        /// Why not KVM.
        why: String,
    },
}

/// In records, in place of a reason: of a VM that somebody else started, nobody knows what it runs on.
const ANOTHER: &str = "started by another";

impl AccelChoice {
    /// Of a VM that somebody else started.
    pub fn started_by_another() -> AccelChoice {
        AccelChoice::Tcg { why: ANOTHER.to_owned() }
    }
}

impl fmt::Display for AccelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AccelChoice::Kvm => f.write_str("kvm"),
            AccelChoice::Tcg { why } if why == ANOTHER => f.write_str(ANOTHER),
            AccelChoice::Tcg { why } => write!(f, "tcg ({why})"),
        }
    }
}

/// KVM if it boots `kernel` with `qemu` (without a kernel: if it answers at all), else TCG and why.
/// Takes less than 6 s whatever KVM does.
pub async fn probe_accel(qemu: &Path, kernel: Option<&Path>) -> AccelChoice {
    let device = tokio::task::spawn_blocking(probe_device).await;
    let opened = device.unwrap_or_else(|_| Err("the probe of /dev/kvm was ended".into()));
    let verdict = match (opened, kernel) {
        (Err(why), _) => Err(why),
        (Ok(()), None) => Ok(()),
        (Ok(()), Some(kernel)) => probe_boot(qemu, kernel).await,
    };
    match verdict {
        Ok(()) => AccelChoice::Kvm,
        Err(why) => AccelChoice::Tcg { why },
    }
}

fn probe_device() -> Result<(), String> {
    let device = match OpenOptions::new().read(true).write(true).open(DEVICE) {
        Ok(device) => device,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err("no /dev/kvm".into()),
        Err(error) => return Err(format!("/dev/kvm: {error}")),
    };
    // SAFETY: KVM_GET_API_VERSION takes no argument and touches no memory of this process; on a
    // device that is not KVM an unknown ioctl without argument fails.
    let version = unsafe { libc::ioctl(device.as_raw_fd(), GET_API_VERSION, 0) };
    match version {
        API_VERSION => Ok(()),
        -1 => Err(format!("/dev/kvm: {}", io::Error::last_os_error())),
        other => Err(format!("/dev/kvm speaks version {other} of its interface, not 12")),
    }
}

async fn probe_boot(qemu: &Path, kernel: &Path) -> Result<(), String> {
    let end = Instant::now() + BOOT;
    let mut command = Command::new(qemu);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "128M", "-smp", "1"])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        // As VMs run.
        .args(["-sandbox", SANDBOX])
        .args(["-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1", "-kernel"])
        .arg(kernel)
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    // It blocks for as long as the disk takes that QEMU is on.
    let runtime = tokio::runtime::Handle::current();
    let spawning = tokio::task::spawn_blocking(move || {
        let _entered = runtime.enter();
        command.spawn()
    });
    let spawned = spawning.await.map_err(|error| error.to_string())?;
    let mut child = spawned.map_err(|error| format!("cannot start {}: {error}", qemu.display()))?;
    // Some KVMs make QEMU abort: that is an answer, not worth a core file.
    if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        let _ = prlimit(Some(pid), Resource::Core, none);
    }
    let (Some(console), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err("QEMU started without its output".into());
    };
    let errors = tokio::spawn(read_all(errors, end));
    let booted = watch_console(console, end).await;
    let timed_out = booted.is_none();
    let _ = child.start_kill();
    let _ = timeout(REAP, child.wait()).await;
    if booted == Some(true) {
        errors.abort();
        return Ok(());
    }
    let name = kernel.file_name().unwrap_or(kernel.as_os_str()).display();
    if timed_out {
        errors.abort();
        let limit = BOOT.as_secs();
        return Err(format!("{name} does not boot on this /dev/kvm within {limit} s"));
    }
    let errors = timeout(REAP, errors).await.ok().and_then(Result::ok).unwrap_or_default();
    Err(match last_line(&errors) {
        Some(line) => format!("{name} does not boot on this /dev/kvm: {line}"),
        None => format!("{name} does not boot on this /dev/kvm"),
    })
}

/// Whether the marker came before the console ended; None if neither did in time.
async fn watch_console(mut console: impl AsyncRead + Unpin, end: Instant) -> Option<bool> {
    let mut seen = Vec::new();
    while seen.len() < MOST_OUTPUT {
        match timeout_at(end, console.read_buf(&mut seen)).await {
            Err(_) => return None,
            Ok(Ok(n)) if n > 0 => {
                if seen.windows(MARKER.len()).any(|window| window == MARKER) {
                    return Some(true);
                }
            }
            Ok(_) => return Some(false),
        }
    }
    Some(false)
}

async fn read_all(mut from: impl AsyncRead + Unpin, end: Instant) -> Vec<u8> {
    let mut text = Vec::new();
    while text.len() < MOST_OUTPUT {
        match timeout_at(end, from.read_buf(&mut text)).await {
            Ok(Ok(n)) if n > 0 => {}
            _ => break,
        }
    }
    text
}

/// The last words of QEMU, without its name.
fn last_line(text: &[u8]) -> Option<String> {
    const SHOWN: usize = 90;
    let text = String::from_utf8_lossy(text);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
    let words = line.split_once(": ").map_or(line, |(_program, words)| words);
    // An assertion in QEMU's source means nothing to whoever reads this.
    let words = if words.contains("Assertion") { "QEMU aborts" } else { words };
    Some(words.chars().filter(|c| !c.is_control()).take(SHOWN).collect())
}

/// What an earlier answer is good for.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cached {
    host_kernel: String,
    kvm_present: bool,
    qemu: FileStamp,
    kernel: Option<FileStamp>,
}

/// A file as it was: another one of the same name differs in one of these.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    path: PathBuf,
    bytes: u64,
    modified_s: u64,
}

#[derive(Serialize, Deserialize)]
struct CacheFile {
    host: Cached,
    choice: AccelChoice,
}

/// [`probe_accel`], unless `cache` holds the answer for this host kernel, presence of /dev/kvm, QEMU
/// and guest kernel. That a kernel does not boot is believed for [`KEPT`] only: it may have been the host that was busy,
/// or a permission that was missing. A cache that cannot be read or written costs a probe, nothing more.
pub async fn probe_accel_cached(cache: &Path, qemu: &Path, kernel: Option<&Path>) -> AccelChoice {
    let (program, image) = (qemu.to_owned(), kernel.map(Path::to_owned));
    let stamps = move || Cached {
        host_kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default(),
        kvm_present: Path::new(DEVICE).exists(),
        qemu: stamp(&program),
        kernel: image.as_deref().map(stamp),
    };
    // Their file systems may hang, and the caller's thread has other work.
    let Ok(host) = tokio::task::spawn_blocking(stamps).await else {
        return probe_accel(qemu, kernel).await;
    };
    let known =
        File::open(cache).ok().and_then(|f| serde_json::from_reader::<_, CacheFile>(f).ok());
    let is_old = || {
        let written = fs::metadata(cache).and_then(|file| file.modified()).ok();
        written.and_then(|at| at.elapsed().ok()).is_none_or(|age| age > KEPT)
    };
    let good = |known: &CacheFile| {
        known.host == host && (known.choice == AccelChoice::Kvm || !host.kvm_present || !is_old())
    };
    if let Some(known) = known.filter(good) {
        return known.choice;
    }
    let choice = probe_accel(qemu, kernel).await;
    let file = CacheFile { host, choice };
    if let Ok(text) = serde_json::to_vec(&file)
        && let Err(error) = fs::write(cache, text)
    {
        tracing::warn!(cache = %cache.display(), %error, "the accelerator's probe is not cached");
    }
    file.choice
}

/// A name without a folder is stamped as it is: which file it means depends on PATH.
fn stamp(path: &Path) -> FileStamp {
    let metadata = fs::metadata(path).ok();
    let modified = metadata.as_ref().and_then(|m| m.modified().ok());
    FileStamp {
        path: path.to_owned(),
        bytes: metadata.as_ref().map_or(0, fs::Metadata::len),
        modified_s: modified
            .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
            .map_or(0, |since| since.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_says_why() {
        assert_eq!(AccelChoice::Kvm.to_string(), "kvm");
        assert_eq!(AccelChoice::Tcg { why: "no /dev/kvm".into() }.to_string(), "tcg (no /dev/kvm)");
        assert_eq!(AccelChoice::started_by_another().to_string(), "started by another");
    }

    #[test]
    fn qemus_last_words_are_one_short_line() {
        let abort = b"qemu: warning: x\nqemu: ../kvm.c:3183: f: Assertion `a == b' failed.\n\n";
        assert_eq!(last_line(abort).as_deref(), Some("QEMU aborts"));
        assert_eq!(last_line(b"qemu: no \x1bkernel").as_deref(), Some("no kernel"));
        assert_eq!(last_line(b"\xff\n").as_deref(), Some("\u{fffd}"));
        assert_eq!(last_line(b" \n"), None);
        assert_eq!(last_line(&[b'x'; 500]).map(|line| line.len()), Some(90));
    }

    #[tokio::test]
    async fn the_console_is_watched_for_the_first_line_even_in_pieces() {
        let end = Instant::now() + Duration::from_secs(60);
        let (mut writer, reader) = tokio::io::duplex(4);
        let feed = tokio::spawn(async move {
            use tokio::io::AsyncWriteExt;
            let _ = writer.write_all(b"garbage\xff\n[0.0] Linux version 6.1").await;
            writer
        });
        assert_eq!(watch_console(reader, end).await, Some(true));
        drop(feed);
        assert_eq!(watch_console(&b"SeaBIOS"[..], end).await, Some(false));
        assert_eq!(watch_console(&vec![b'x'; MOST_OUTPUT + 1][..], end).await, Some(false));
        let (_open, reader) = tokio::io::duplex(4);
        assert_eq!(watch_console(reader, Instant::now()).await, None);
    }
}
