//! A private ballastd on real QEMU guests, ended with all its VMs when the test ends, however it
//! ends.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]
#![allow(dead_code, reason = "each test program uses its part")]

pub mod evil;
pub mod http;
pub mod witness;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ballast_api::client::{Client, ClientError};
use ballast_api::{Accel, ErrorBody, ErrorCode, HostView, Mode, VmSpec, VmView};
use ballast_lab::console::Console;
use ballast_lab::guest::Guest;
use ballast_lab::image::{self, Image};
use ballast_lab::{leftovers, tools};
use ballast_units::Bytes;

pub const MIB: u64 = 1 << 20;
/// The pages of zeros that all VMs read: the host's own overhead.
pub const ZEROS: u64 = 2 * MIB;
/// For whatever must happen at all: crowded machines are slow.
pub const PATIENT: Duration = Duration::from_secs(120);

/// What guests boot; None, loudly, where that is not here and need not be.
pub fn image_or_skip() -> Option<&'static Image> {
    static IMAGE: OnceLock<Result<Image, String>> = OnceLock::new();
    let image = IMAGE.get_or_init(|| {
        tools::find("qemu-system-x86_64", "qemu-system-x86")
            .and_then(|_| {
                File::open("/dev/userfaultfd")
                    .map_err(|e| anyhow(&format!("/dev/userfaultfd: {e}")))
            })
            .and_then(|_| image::prepare(None))
            .map_err(|e| format!("{e:#}"))
    });
    match image {
        Ok(image) => {
            shim();
            Some(image)
        }
        Err(why) => {
            assert!(!required(), "must run here, but: {why}");
            eprintln!("SKIPPED: {why}");
            None
        }
    }
}

fn anyhow(text: &str) -> anyhow::Error {
    anyhow::Error::msg(text.to_owned())
}

/// Large pages of shared memory that the kernel had not, for anybody, since it started.
pub fn large_not_to_be_had() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("thp_file_fallback "));
    count.and_then(|n| n.parse().ok()).unwrap_or(0)
}

pub fn required() -> bool {
    std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1")
}

/// The library to preload, of this build.
pub fn shim() -> PathBuf {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| built("libballast_shim.so", "ballast-shim")).clone()
}

/// What another package makes, which Cargo does not build for a test.
fn built(file: &str, package: &str) -> PathBuf {
    let ballastd = Path::new(env!("CARGO_BIN_EXE_ballastd"));
    let folder = ballastd.parent().unwrap();
    let path = folder.join(file);
    if !path.is_file() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", package, "--target-dir"]);
        build.arg(folder.parent().unwrap());
        if folder.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "building {package}");
    }
    path
}

/// `ballast`, of this build.
pub fn cli() -> PathBuf {
    static CLI: OnceLock<PathBuf> = OnceLock::new();
    CLI.get_or_init(|| built("ballast", "ballast-cli")).clone()
}

/// For tests of balloons: guests are emulated, so it would not be the default.
pub const BALLOON_FIRST: &str = "[tools]\norder = \"balloon-first\"\n";

pub struct Ballastd {
    child: Option<Child>,
    pub client: Client,
    /// Private, in memory.
    pub root: PathBuf,
    /// Private, on a disk.
    disk: PathBuf,
    options: Vec<String>,
    /// Whether it is told where its swap files are; otherwise a configuration file says so.
    pub names_swap_dir: bool,
    pub ended: Option<ExitStatus>,
}

impl Ballastd {
    /// Starts it with `options` beside those of its folders, and waits until it listens.
    pub fn start(options: &[&str]) -> Ballastd {
        let mut ballastd = Ballastd::prepare(options);
        ballastd.restart();
        ballastd
    }

    /// The same, looking for no pages to share: what is reclaimed, balloons and eviction give. Balloons
    /// come first, though guests are emulated.
    pub fn start_without_sharing(options: &[&str]) -> Ballastd {
        let sharing = "[sharing]\nenabled = false\n";
        Ballastd::start_configured(options, &format!("{BALLOON_FIRST}{sharing}"))
    }

    /// With a configuration file.
    pub fn start_configured(options: &[&str], text: &str) -> Ballastd {
        let mut ballastd = Ballastd::prepare(options);
        let config = ballastd.root.join("ballast.toml");
        std::fs::write(&config, text).unwrap();
        ballastd.add_option("--config", &config);
        ballastd.restart();
        ballastd
    }

    pub fn prepare(options: &[&str]) -> Ballastd {
        shim();
        let memory = Path::new("/dev/shm");
        let memory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let root = leftovers::private_folder(&memory).unwrap();
        let disk = leftovers::private_folder(Path::new("/var/tmp")).unwrap();
        std::fs::create_dir(root.join("console")).unwrap();
        let client = Client::new(root.join("run/api.sock")).with_timeout(PATIENT);
        let options = options.iter().map(|o| (*o).to_owned()).collect();
        let names_swap_dir = true;
        Ballastd { child: None, client, root, disk, options, names_swap_dir, ended: None }
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballastd"));
        command.arg("--run-dir").arg(self.run_dir());
        if self.names_swap_dir {
            command.arg("--swap-dir").arg(self.swap_dir());
        }
        command.args(&self.options).env("BALLAST_LOG", "info,ballastd::policy_loop=warn");
        command
    }

    /// Starts it (again), on the same folders.
    pub fn restart(&mut self) {
        assert!(self.child.is_none(), "it runs");
        self.child = Some(self.spawn(&[]));
    }

    /// Another one takes over from the one that runs. How that one ended.
    pub fn take_over(&mut self) -> ExitStatus {
        let mut old = self.take_over_from();
        wait("the end of the old ballastd", || old.try_wait().unwrap())
    }

    /// The same; the old one has left, and need not have ended.
    pub fn take_over_from(&mut self) -> Child {
        let old = self.child.take().unwrap();
        self.child = Some(self.spawn(&["--take-over"]));
        old
    }

    /// Until it listens.
    fn spawn(&self, more: &[&str]) -> Child {
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        let mut command = self.command();
        command.args(more).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().and_then(Result::ok).unwrap_or_default();
        if !first.starts_with("ready:") {
            let _ = child.kill();
            panic!("{first} {} {:?}", self.last_words(), child.wait());
        }
        std::thread::spawn(move || lines.for_each(drop));
        child
    }

    pub fn add_flag(&mut self, name: &str) {
        self.options.push(name.to_owned());
    }
    pub fn add_option(&mut self, name: &str, value: &Path) {
        self.options.extend([name.to_owned(), value.display().to_string()]);
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        self.ended = Some(child.wait().unwrap());
    }
    /// SIGTERM, and its end.
    pub fn term(&mut self) -> ExitStatus {
        signal(self.pid(), rustix::process::Signal::TERM);
        self.end()
    }
    /// Waits for its end.
    pub fn end(&mut self) -> ExitStatus {
        let mut child = self.child.take().unwrap();
        let status = wait("the end of ballastd", || child.try_wait().unwrap());
        self.ended = Some(status);
        status
    }

    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }
    pub fn swap_dir(&self) -> PathBuf {
        self.disk.join("swap")
    }
    pub fn swap_file(&self, vm: &str) -> PathBuf {
        self.swap_dir().join(format!("{vm}.swap"))
    }
    pub fn folder(&self, vm: &str) -> PathBuf {
        self.run_dir().join("vms").join(vm)
    }
    pub fn log(&self) -> PathBuf {
        self.root.join("ballastd.log")
    }
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// What each VM has, where its threads wait, and the end of its console.
    async fn what_vms_do(&self) -> String {
        let mut text = String::new();
        for vm in self.client.vms().await.unwrap_or_default() {
            let _ = writeln!(text, "{vm:?}");
            let threads = vm.pid.map(|pid| format!("/proc/{pid}/task")).map(std::fs::read_dir);
            for thread in threads.and_then(Result::ok).into_iter().flatten().flatten() {
                let read = |name| std::fs::read_to_string(thread.path().join(name));
                let (stat, wchan) = (read("stat"), read("wchan"));
                let _ = writeln!(text, "  {wchan:?} {stat:?}");
            }
            let console = self.root.join(format!("console/{}.console.log", vm.name));
            let console = std::fs::read_to_string(console).unwrap_or_default();
            let tail: Vec<&str> = console.lines().rev().take(5).collect();
            let _ = writeln!(text, "  {tail:#?}");
        }
        text
    }

    /// A guest of `mib` that runs `workload`.
    pub fn guest(&self, image: &Image, name: &str, mib: u64, workload: &str) -> VmSpec {
        let mut guest = Guest::new(name, Bytes::from_mib(mib), &self.root.join("console"));
        if !workload.is_empty() {
            // No two have the same pages.
            let seed =
                name.bytes().fold(11, |seed, byte| (seed * 31 + u64::from(byte)) % 1_000_003);
            let is_given = !workload.starts_with("verify-torture") || workload.contains("--seed");
            let seed = if is_given { String::new() } else { format!(" --seed {seed}") };
            guest = guest.run(format!("{workload}{seed}"));
        }
        guest.spec(image, Accel::Tcg)
    }

    pub fn console(&self, name: &str) -> Console {
        Console::new(&self.root.join(format!("console/{name}.console.log")))
    }

    pub async fn vm(&self, name: &str) -> VmView {
        self.client.vm(name).await.unwrap()
    }
    pub async fn host(&self) -> HostView {
        self.client.host().await.unwrap()
    }
    /// Whether the manager knows no such VM.
    pub async fn is_gone(&self, name: &str) -> bool {
        matches!(self.client.vm(name).await, Err(ClientError::Refused(e)) if e.code == ErrorCode::NotFound)
    }

    /// Waits until a VM is paged. While it waits for its takeover it may not be known.
    pub async fn is_paged(&self, name: &str) {
        self.eventually("it is paged", async || {
            self.client.vm(name).await.is_ok_and(|vm| vm.management.mode == Mode::Paged)
        })
        .await;
    }

    /// Nothing of a VM is left but its logs.
    pub fn assert_nothing_left(&self, vm: &str) {
        assert!(!self.swap_file(vm).exists(), "{vm}: swap file");
        for file in ["qmp.sock", "agent.sock", "vm.json", "pmap", "stage", "compressed"] {
            assert!(!self.folder(vm).join(file).exists(), "{vm}: {file}");
        }
    }

    /// The books say what the VMs say: handed out is what is consumed plus overhead, once nothing is
    /// in flight.
    pub async fn assert_books_balance(&self) {
        self.eventually("the books balance", async || {
            let host = self.host().await;
            let vms = self.client.vms().await.unwrap();
            let used = host.budget - host.free;
            let of_vms: u64 = vms.iter().map(|v| v.memory.consumed + v.memory.overhead).sum();
            // Among it what no VM has for itself.
            let sum = host.consumed + host.overhead;
            // They were not read at one instant.
            used.abs_diff(sum) <= MIB && of_vms <= sum + MIB && host.measured_used <= sum + MIB
        })
        .await;
    }

    /// Waits until `condition` holds.
    pub async fn eventually(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        let begin = Instant::now();
        while !condition().await {
            if begin.elapsed() >= PATIENT {
                panic!("{what}: not so\n{}\n{}", self.last_words(), self.what_vms_do().await);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a guest's workload has done `more` checks from now on.
    pub async fn checks_go_on(&self, console: &mut Console, more: u64) {
        console.poll();
        let reports = console.story.reports;
        let mut before = None;
        self.eventually("its checks go on", async || {
            console.poll();
            let story = &console.story;
            assert_eq!(story.trouble, None, "{}\n{}", console.tail(5), self.last_words());
            // What the next report tells may have been done before.
            if story.reports == reports {
                return false;
            }
            story.checks >= *before.get_or_insert(story.checks) + more
        })
        .await;
    }
}

impl Drop for Ballastd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- ballastd's log\n{}", self.last_words());
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for folder in [&self.root, &self.disk] {
            leftovers::sweep(folder);
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A small file system in memory, unmounted with the test.
pub struct Small(pub PathBuf);

impl Small {
    /// None, loudly, without the right to mount.
    pub fn mount(at: PathBuf, mib: u64) -> Option<Small> {
        std::fs::create_dir(&at).unwrap();
        let size = format!("size={mib}m,mode=0700");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(&at).status();
        if !mount.is_ok_and(|status| status.success()) {
            assert!(!required(), "no tmpfs of {mib} MiB");
            eprintln!("SKIPPED: no tmpfs of {mib} MiB can be mounted here");
            return None;
        }
        Some(Small(at))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Leaves no room in the file system of a folder.
pub fn fill(folder: &Path) {
    let mut file = File::options().create(true).append(true).open(folder.join("full")).unwrap();
    while file.write_all(&[1; 4096]).and_then(|()| file.sync_data()).is_ok() {}
}

pub fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

pub fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(begin.elapsed() < PATIENT, "{what}: not so");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorBody {
    match result {
        Err(ClientError::Refused(body)) => {
            assert!(!body.message.contains('\n') && !body.message.is_empty(), "{body:?}");
            body
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// Refused with this code, and a message that has `part` in it.
#[track_caller]
pub fn refused_as<T: std::fmt::Debug>(result: Result<T, ClientError>, code: ErrorCode, part: &str) {
    let body = refused(result);
    assert!(body.code == code && body.message.contains(part), "{code:?} {part}: {body:?}");
}
