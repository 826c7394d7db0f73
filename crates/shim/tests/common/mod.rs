//! A manager that is just enough for the shim, and processes under the shim.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

pub mod store;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_shim_proto::{Batch, Connection, ConnectionError, Hello, Listener, Message, Op, Part};
use ballast_uffd::procmap::{Maps, Pagemap};
use ballast_uffd::{CopyOpts, DEVICE_PATH, Event, Uffd, UffdError};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages};

pub const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
pub const PAGE: u64 = PAGE_SIZE as u64;
/// What `managed` maps.
pub const RAM: u64 = 16 << 20;
pub const MAP: &str = "map memfd 16777216";

/// The device, or None after saying loudly that the test is skipped.
pub fn device() -> Option<File> {
    match File::options().read(true).write(true).open(DEVICE_PATH) {
        Ok(device) => Some(device),
        Err(e) => skip(&format!("{DEVICE_PATH}: {e}")),
    }
}

pub fn skip<T>(why: &str) -> Option<T> {
    let required = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
    assert!(!required, "must not be skipped here: {why}");
    eprintln!("SKIPPED: {why}");
    None
}

/// Builds the library (nothing to do, mostly) and says where it is: `cargo test` alone builds it
/// under a name of its own, if at all.
pub fn library() -> PathBuf {
    // .../<target>/<profile>/deps/<test>
    let exe = std::env::current_exe().unwrap();
    let profile = exe.parent().and_then(Path::parent).unwrap();
    let library = profile.join("libballast_shim.so");
    let mut build = Command::new(env!("CARGO"));
    // As `./test` does: with less it has other features of the libraries, and the file would be replaced under who uses it.
    build.args(["build", "--quiet", "--workspace", "--lib", "--bins", "--examples"]);
    build.arg("--manifest-path");
    build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    build.arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    let built = build.status().is_ok_and(|s| s.success());
    assert!(built, "cargo build -p ballast-shim failed");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

pub struct FakeManager {
    pub dir: tempfile::TempDir,
    pub listener: Listener,
    pub device: File,
    pub library: PathBuf,
}

impl FakeManager {
    pub fn start() -> Option<FakeManager> {
        let device = device()?;
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&dir.path().join("shim.sock")).unwrap();
        Some(FakeManager { dir, listener, device, library: library() })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("shim.sock")
    }

    /// The environment of a managed VMM.
    pub fn prepare<'a>(&self, command: &'a mut Command, ram: u64) -> &'a mut Command {
        command
            .env("LD_PRELOAD", &self.library)
            .env("BALLAST_VM", "testvm")
            .env("BALLAST_SHIM_SOCKET", self.socket())
            .env("BALLAST_RAM_SIZE", ram.to_string())
    }

    pub fn puppet(&self, ram: u64) -> Puppet {
        Puppet::spawn(self.prepare(&mut puppet_command(), ram))
    }

    pub fn accept_hello(&self) -> (Connection, Hello, Vec<OwnedFd>) {
        let connection = self.listener.accept(PATIENCE).unwrap();
        let (message, fds) = connection.recv(PATIENCE).unwrap();
        let Message::Hello(hello) = message else { panic!("{message:?} instead of Hello") };
        (connection, hello, fds)
    }

    /// The opening up to Ready.
    pub fn accept_ready(&self) -> (Connection, Hello, File, Uffd) {
        let (connection, hello, mut fds) = self.accept_hello();
        assert!(!hello.reconnect);
        let device = [self.device.as_fd()];
        connection.send(&Message::Welcome { version: hello.version }, &device).unwrap();
        let (message, mut ready) = connection.recv(PATIENCE).unwrap();
        assert!(matches!(message, Message::Ready { .. }), "{message:?} instead of Ready");
        let uffd = Uffd::from_fd(ready.remove(0)).unwrap();
        (connection, hello, File::from(fds.remove(0)), uffd)
    }

    /// A first connection, served with pages whose first word is `stamp` + page number.
    pub fn accept(&self, stamp: u64) -> Managed {
        let (connection, hello, ram_file, uffd) = self.accept_ready();
        Managed::begin(connection, hello, ram_file, uffd, stamp)
    }

    /// The connection of a VM that lost its manager.
    pub fn accept_again(&self, stamp: u64) -> Managed {
        let (connection, hello, mut fds) = self.accept_hello();
        assert!(hello.reconnect, "a VM that was managed says so");
        let uffd = Uffd::from_fd(fds.pop().unwrap()).unwrap();
        Managed::begin(connection, hello, File::from(fds.remove(0)), uffd, stamp)
    }
}

/// A puppet whose missing pages begin with `stamp` + page number.
pub fn managed(stamp: u64) -> Option<(FakeManager, Managed, Puppet)> {
    let manager = FakeManager::start()?;
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let vm = manager.accept(stamp);
    let mapped: u64 = puppet.answer().parse().unwrap();
    assert_eq!(vm.ram().addr.0, mapped);
    Some((manager, vm, puppet))
}

#[derive(Default)]
pub struct Seen {
    /// Write-protect faults are noted only: who writes waits. Locked while one is answered.
    pub hold: Mutex<bool>,
    pub missing: AtomicU64,
    pub protected: AtomicU64,
    pub removed: Mutex<Vec<(u64, u64)>>,
}

/// A VM whose faults a thread serves. Dropping it is the manager's death, as the VM sees it.
pub struct Managed {
    pub connection: Connection,
    pub hello: Hello,
    pub ram_file: File,
    pub uffd: Arc<Uffd>,
    pub seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Managed {
    pub fn begin(
        connection: Connection,
        hello: Hello,
        ram_file: File,
        uffd: Uffd,
        stamp: u64,
    ) -> Managed {
        let (uffd, seen) = (Arc::new(uffd), Arc::new(Seen::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (uffd, seen, stop, base) =
                (uffd.clone(), seen.clone(), stop.clone(), hello.parts[0].addr);
            move || serve(&uffd, &seen, &stop, base, stamp)
        });
        connection.send(&Message::Managed, &[]).unwrap();
        Managed { connection, hello, ram_file, uffd, seen, stop, thread: Some(thread) }
    }

    pub fn batch(&self, id: u64, ops: Vec<Op>, fds: &[&File]) -> (u32, i32) {
        let fds: Vec<_> = fds.iter().map(|f| f.as_fd()).collect();
        let batch = Message::Batch(Batch::new(id, ops).unwrap());
        self.connection.send(&batch, &fds).unwrap();
        match self.connection.recv(PATIENCE).unwrap().0 {
            Message::BatchDone { id: answered, done, errno } => {
                assert_eq!(answered, id);
                (done, errno)
            }
            other => panic!("{other:?} instead of BatchDone"),
        }
    }

    pub fn addr(&self, page: u64) -> HostAddr {
        HostAddr(self.ram().addr.0 + page * PAGE)
    }

    /// Its first part.
    pub fn ram(&self) -> Part {
        self.hello.parts[0]
    }

    pub fn missing(&self) -> u64 {
        self.seen.missing.load(Ordering::Acquire)
    }

    pub fn protected(&self) -> u64 {
        self.seen.protected.load(Ordering::Acquire)
    }

    /// From the return on, who writes to what is protected waits; or no longer.
    pub fn hold(&self, hold: bool) {
        *self.seen.hold.lock().unwrap() = hold;
        if !hold {
            self.uffd.wake(self.ram().addr, self.ram().len).unwrap();
        }
    }

    pub fn protect(&self, page: u64, pages: u64) {
        // Before Linux 6.3 a call is about one mapping only.
        if self.uffd.protect(self.addr(page), Bytes(pages * PAGE)).is_err() {
            (page..page + pages)
                .for_each(|page| self.uffd.protect(self.addr(page), Bytes(PAGE)).unwrap());
        }
    }

    pub fn home_word(&self, page: u64) -> u64 {
        word_of(&self.ram_file, page)
    }

    pub fn pagemap(&self) -> Pagemap {
        Pagemap::open(self.hello.pid).unwrap()
    }

    /// Whether each page is a private copy.
    pub fn copies(&self, page: u64, pages: u64) -> Vec<bool> {
        self.pagemap().copies(self.addr(page), Pages(pages)).unwrap()
    }

    pub fn is_protected(&self, page: u64) -> bool {
        self.pagemap().entries(self.addr(page), Pages(1)).unwrap()[0].is_protected()
    }

    /// What backs `pages` from `page` on.
    pub fn maps(&self, page: u64, pages: u64) -> Maps {
        Maps::read(self.hello.pid, self.addr(page)..self.addr(page + pages)).unwrap()
    }

    /// What the kernel says of the mapping that begins at a page (proc_pid_smaps(5), VmFlags).
    pub fn flags(&self, page: u64) -> String {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.hello.pid)).unwrap();
        let begin = format!("{:x}-", self.addr(page).0);
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&begin));
        lines.find(|line| line.starts_with("VmFlags:")).unwrap().to_owned()
    }

    /// Whether the page is mapped from the RAM file, where it belongs.
    pub fn is_home(&self, page: u64) -> bool {
        let maps = self.maps(page, 1);
        let part = maps.at(self.addr(page)).unwrap();
        part.shared && part.inode == inode(&self.ram_file) && part.offset == page * PAGE
    }

    pub fn wait_for_close(&self) {
        match self.connection.recv(PATIENCE) {
            Err(ConnectionError::Closed) => {}
            other => panic!("{other:?} from a process that was killed"),
        }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(Err(e)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(e);
        }
    }
}

fn serve(uffd: &Uffd, seen: &Seen, stop: &AtomicBool, base: HostAddr, stamp: u64) {
    let mut events = Vec::new();
    while !stop.load(Ordering::Acquire) {
        if uffd.read_events(&mut events).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        for event in events.drain(..) {
            match event {
                Event::Missing { addr, .. } => {
                    let page = HostAddr(addr.0 & !(PAGE - 1));
                    let mut content = vec![0; PAGE_SIZE];
                    if stamp != 0 {
                        let word = stamp + (page.0 - base.0) / PAGE;
                        content[..8].copy_from_slice(&word.to_le_bytes());
                    }
                    seen.missing.fetch_add(1, Ordering::AcqRel);
                    let opts = CopyOpts { wake: true, protect: false };
                    match uffd.copy(page, &content, opts) {
                        Ok(_) | Err(UffdError::Gone) => {}
                        // Faults that are still waiting are told again.
                        Err(UffdError::Again | UffdError::Exists) => {
                            uffd.wake(page, Bytes(PAGE)).unwrap();
                        }
                        Err(e) => panic!("{e}"),
                    }
                }
                Event::Protected { addr } => {
                    seen.protected.fetch_add(1, Ordering::AcqRel);
                    let hold = seen.hold.lock().unwrap();
                    if *hold {
                        continue;
                    }
                    let page = HostAddr(addr.0 & !(PAGE - 1));
                    match uffd.unprotect(page, Bytes(PAGE), true) {
                        Ok(()) | Err(UffdError::Gone) => {}
                        Err(UffdError::Again) => uffd.wake(page, Bytes(PAGE)).unwrap(),
                        Err(e) => panic!("{e}"),
                    }
                }
                Event::Remove { start, end } => {
                    seen.removed.lock().unwrap().push((start.0, end.0));
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }
}

/// The first word of a page of a file.
pub fn word_of(file: &File, page: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, page * PAGE).unwrap();
    u64::from_le_bytes(word)
}

pub fn inode(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

pub fn puppet_command() -> Command {
    let exe = std::env::current_exe().unwrap();
    let profile = exe.parent().and_then(Path::parent).unwrap();
    let puppet = profile.join("examples/puppet");
    assert!(puppet.exists(), "{} is missing: run through cargo test", puppet.display());
    Command::new(puppet)
}

/// A process that maps memory and obeys. Killed when dropped.
pub struct Puppet {
    pub child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Puppet {
    pub fn spawn(command: &mut Command) -> Puppet {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Puppet { child, stdin, stdout: BufReader::new(stdout) }
    }

    /// Starts a command that may wait for the manager; `answer` ends it.
    pub fn order(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
    }

    /// Empty if the process ended.
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.order(command);
        self.answer()
    }

    pub fn read_page(&mut self, page: u64) -> u64 {
        self.ask(&format!("read {}", page * PAGE)).parse().unwrap()
    }

    pub fn write_page(&mut self, page: u64, value: u64) {
        assert_eq!(self.ask(&format!("write {} {value}", page * PAGE)), "ok");
    }

    pub fn end(mut self) -> String {
        let _ = self.child.kill();
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
        said
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
