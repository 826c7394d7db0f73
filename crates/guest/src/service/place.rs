//! Where services run: in the disk's folder as their root, as a user who is not root.

use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::PATIENCE;

const ROOT: &str = crate::init::DISK;
/// As in the disk's /etc/passwd.
const USER: u32 = 1000;
/// The services' own folder, as they see it.
pub const STATE: &str = "/tmp/state";

/// A path of the services, as this process sees it.
pub fn outside(path: &str) -> PathBuf {
    Path::new(ROOT).join(path.trim_start_matches('/'))
}

/// Mounts what programs expect to find, and raises the loopback interface.
pub fn prepare() -> Result<(), String> {
    for (what, kind) in [("/proc", "proc"), ("/dev", "devtmpfs")] {
        mount(kind, &outside(what))?;
    }
    owned(STATE)?;
    raise_loopback().map_err(|e| format!("loopback interface: {e}"))
}

/// A folder of the services' user.
pub fn owned(path: &str) -> Result<(), String> {
    let folder = outside(path);
    fs::create_dir_all(&folder)
        .and_then(|()| std::os::unix::fs::chown(&folder, Some(USER), Some(USER)))
        .map_err(|e| format!("{}: {e}", folder.display()))
}

/// The first path FOLDER/*/REST that is there:
/// versions are part of some paths.
pub fn find(folder: &str, rest: &str) -> Result<String, String> {
    let entries = fs::read_dir(outside(folder)).map_err(|e| format!("{folder}: {e}"))?;
    entries
        .flatten()
        .map(|e| format!("{folder}/{}/{rest}", e.file_name().to_string_lossy()))
        .find(|path| outside(path).exists())
        .ok_or(format!("no {folder}/*/{rest} on the disk"))
}

/// A program of the disk, as its user, in its root.
pub fn command(program: &str) -> Result<Command, String> {
    let root = CString::new(ROOT).map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin").env("LC_ALL", "C").env("HOME", STATE);
    command.stdin(Stdio::null());
    // SAFETY: enter() makes system calls only.
    unsafe { command.pre_exec(move || enter(&root)) };
    Ok(command)
}

fn enter(root: &CStr) -> io::Result<()> {
    // SAFETY: system calls with NUL-ended strings; in the child, before it executes another program.
    let failed = unsafe {
        libc::chroot(root.as_ptr()) != 0
            || libc::chdir(c"/".as_ptr()) != 0
            || libc::setgroups(0, std::ptr::null()) != 0
            || libc::setgid(USER) != 0
            || libc::setuid(USER) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Runs to the end; what it printed, or its last words.
pub fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| format!("{name}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("(no message)");
    Err(format!("{name}: {}: {last}", output.status))
}

pub struct Daemon {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Daemon {
    pub fn start(command: &mut Command) -> Result<Daemon, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let file = Path::new(&name).file_name().unwrap_or_default();
        let log = outside(STATE).join(file).with_extension("log");
        let told = |e: io::Error| format!("{name}: {e}");
        let file = File::create(&log).map_err(told)?;
        let errors = file.try_clone().map_err(told)?;
        let child = command.stdout(file).stderr(errors).spawn().map_err(told)?;
        Ok(Daemon { child, name, log })
    }

    /// Fails once it has ended.
    pub fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let last = log.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("(no message)");
                Err(format!("{} ended with {status}: {last}", self.name))
            }
            Err(e) => Err(format!("{}: {e}", self.name)),
        }
    }

    /// Tries until it works; gives up when the daemon has ended, or after too long.
    pub fn until<T>(
        &mut self,
        mut attempt: impl FnMut() -> Result<T, String>,
    ) -> Result<T, String> {
        let begin = Instant::now();
        loop {
            let error = match attempt() {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            self.check()?;
            if begin.elapsed() > PATIENCE {
                return Err(format!("{} does not answer: {error}", self.name));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn end(mut self) {
        // SAFETY: kill touches no memory; the child was not collected yet.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let until = Instant::now() + Duration::from_secs(10);
        while self.check().is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Nothing to do if it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn mount(kind: &str, target: &Path) -> Result<(), String> {
    let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
    let (fs, to) = (text(kind)?, text(&target.to_string_lossy())?);
    // SAFETY: NUL-ended strings that live through the call.
    let rc = unsafe { libc::mount(fs.as_ptr(), to.as_ptr(), fs.as_ptr(), 0, std::ptr::null()) };
    let error = io::Error::last_os_error();
    // Busy: another service of this guest has done it.
    if rc == 0 || error.raw_os_error() == Some(libc::EBUSY) {
        return Ok(());
    }
    Err(format!("mount {kind} on {}: {error}", target.display()))
}

fn raise_loopback() -> io::Result<()> {
    // SAFETY: all-zero is a valid ifreq; the name fits, and its NUL stays.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request lives through the call; the descriptor is this function's own.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let rc = libc::ioctl(fd, libc::SIOCSIFFLAGS as _, &request);
        let result = if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        libc::close(fd);
        result
    }
}
