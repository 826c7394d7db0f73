//! A private `ballastd` for a demo, an experiment or a benchmark: started in a folder of its own, and
//! gone without a trace afterwards.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::HostView;
use ballast_api::client::Client;
use ballast_units::Bytes;

use crate::{leftovers, tools};

/// How long ballastd may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How to start the manager; None leaves its default.
#[derive(Clone, Debug)]
pub struct Options {
    /// Machine memory for guests.
    pub budget: Bytes,
    /// 0 <= tax < 1.
    pub tax: Option<f64>,
    /// In VM execution time.
    pub sample_period: Option<Duration>,
    /// Pages a period.
    pub samples: Option<u32>,
    /// How fast pages to share are looked for.
    pub sharing: Option<SharingOptions>,
    /// Which tool of reclamation is used first. The sources' guests run on processors that virtualize, where it is the
    /// balloon; here guests may be emulated, so it is said.
    pub tools_order: &'static str,
    /// More of its configuration, as TOML.
    pub more: String,
    /// Swap files go to a file system of this size first, in memory and mounted for this manager.
    pub small_swap: Option<Bytes>,
    /// Whether a VM is looked through before it is taken over, and refused if its books are not sound.
    pub check_takeovers: bool,
}

impl Options {
    /// Defaults, but for the budget, and balloons first.
    pub fn budget(budget: Bytes) -> Options {
        Options {
            budget,
            tax: None,
            sample_period: None,
            samples: None,
            sharing: None,
            tools_order: "balloon-first",
            more: String::new(),
            small_swap: None,
            check_takeovers: false,
        }
    }

    /// What goes into the configuration file.
    fn toml(&self) -> String {
        let sharing = self.sharing.map_or(String::new(), |s| s.toml());
        let tools = format!("[tools]\norder = \"{}\"\n", self.tools_order);
        format!("{}\n{sharing}\n{tools}", self.more)
    }
}

/// The table `[sharing]` of the manager's configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharingOptions {
    /// Whether any are looked for.
    pub enabled: bool,
    /// MiB per second, of all VMs together.
    pub rate_mib_s: u64,
    /// The same, of one VM.
    pub vm_rate_mib_s: u64,
    /// Of one core.
    pub cpu_percent: f64,
    /// In which all memory is looked at once, if the limits above allow it; seconds.
    pub scan_time_s: f64,
}

impl SharingOptions {
    /// None are looked for.
    pub fn off() -> SharingOptions {
        SharingOptions { enabled: false, ..SharingOptions::as_fast_as_it_goes() }
    }

    /// Limited by a whole core alone.
    pub fn as_fast_as_it_goes() -> SharingOptions {
        SharingOptions {
            enabled: true,
            rate_mib_s: 1 << 20,
            vm_rate_mib_s: 1 << 20,
            cpu_percent: 100.0,
            scan_time_s: 0.1,
        }
    }

    /// Quick enough to see memory settle within minutes, and most of the CPU left to the guests.
    pub fn brisk() -> SharingOptions {
        SharingOptions {
            cpu_percent: 30.0,
            scan_time_s: 10.0,
            ..SharingOptions::as_fast_as_it_goes()
        }
    }

    fn toml(&self) -> String {
        let SharingOptions { enabled, rate_mib_s, vm_rate_mib_s, cpu_percent, scan_time_s } = self;
        format!(
            "[sharing]\nenabled = {enabled}\nrate_mib_s = {rate_mib_s}\n\
             vm_rate_mib_s = {vm_rate_mib_s}\ncpu_percent = {cpu_percent:?}\n\
             scan_time_s = {scan_time_s:?}\n"
        )
    }
}

/// Where the manager's state belongs: on a tmpfs, which /run is on most systems, but not in every
/// container.
fn runtime_folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places: Vec<PathBuf> = std::iter::once(PathBuf::from("/run"))
        .chain(own)
        .chain([PathBuf::from("/dev/shm"), std::env::temp_dir()])
        .filter(|dir| dir.is_dir() && writable(dir))
        .collect();
    let tmpfs = places.iter().find(|dir| on_tmpfs(dir)).or(places.first());
    tmpfs.cloned().unwrap_or_else(std::env::temp_dir)
}

fn on_tmpfs(dir: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()) else { return false };
    // SAFETY: all-zero is a valid statfs, which the call fills; a NUL-ended path.
    unsafe {
        let mut fs: libc::statfs = std::mem::zeroed();
        libc::statfs(path.as_ptr(), &mut fs) == 0 && fs.f_type == libc::TMPFS_MAGIC
    }
}

/// Swap and disk images belong on a disk, which /tmp need not be.
pub(crate) fn disk_folder() -> PathBuf {
    let disk = PathBuf::from("/var/tmp");
    if writable(&disk) { disk } else { std::env::temp_dir() }
}

fn writable(dir: &Path) -> bool {
    let Ok(path) = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()) else { return false };
    // SAFETY: a NUL-ended path that lives through the call.
    unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// Unmounted with the folder that it is in, when that is swept.
fn mount_tmpfs(at: &Path, size: Bytes) -> Result<()> {
    std::fs::create_dir(at).with_context(|| at.display().to_string())?;
    let size = format!("size={},mode=0700", size.0);
    let mut mount = Command::new(tools::find("mount", "mount")?);
    tools::run(mount.args(["-t", "tmpfs", "-o", &size, "none"]).arg(at)).map(drop)
}

fn wait_for_end(child: &mut Child, limit: Duration) -> Result<std::process::ExitStatus> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("ballastd")? {
            return Ok(status);
        }
        if begin.elapsed() > limit {
            bail!("ballastd has not ended within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Dropped, it stops its VMs and ballastd, by force if need be, and removes its folders.
pub struct Manager {
    child: Option<Child>,
    client: Client,
    /// Private to this run, in memory: sockets, the manager's state, consoles.
    root: PathBuf,
    /// Private to this run, on a disk: swap files and disk images.
    disks: PathBuf,
}

impl Manager {
    /// Starts ballastd and waits until it listens.
    pub fn start(options: &Options) -> Result<Manager> {
        let program = tools::sibling("ballastd")?;
        let root = leftovers::private_folder(&runtime_folder())?;
        let disks = leftovers::private_folder(&disk_folder()).inspect_err(|_| {
            let _ = std::fs::remove_dir_all(&root);
        })?;
        let socket = root.join("run/api.sock");
        let mut manager = Manager { child: None, client: Client::new(socket), root, disks };
        // From here on, dropping `manager` removes what was made.
        for folder in [manager.run_dir(), manager.consoles(), manager.swap_dir(), manager.images()]
        {
            std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        }
        if let Some(size) = options.small_swap {
            mount_tmpfs(&manager.small_swap(), size)?;
        }
        manager.spawn(&program, options, &[])?;
        Ok(manager)
    }

    /// Writes the configuration file; None if there is nothing to say.
    fn configure(&self, options: &Options) -> Result<Option<PathBuf>> {
        let mut configuration = options.toml();
        if options.small_swap.is_some() {
            for (path, priority) in [(self.swap_dir(), 0), (self.small_swap(), 1)] {
                let table = format!("[[swap.location]]\npath = {path:?}\npriority = {priority}\n");
                configuration.push_str(&table);
            }
        }
        if configuration.trim().is_empty() {
            return Ok(None);
        }
        let file = self.root.join("ballast.toml");
        std::fs::write(&file, configuration).with_context(|| file.display().to_string())?;
        Ok(Some(file))
    }

    /// Makes what `options` say in the configuration file count, while it runs. It must have been
    /// started with such a file.
    pub async fn reload(&self, options: &Options) -> Result<()> {
        self.configure(options)?;
        self.client.reload().await.context("the configuration").map(drop)
    }

    /// SIGKILL. Its VMs stay.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("ballastd was not started")?;
        child.kill().context("killing ballastd")?;
        child.wait().context("ballastd").map(drop)
    }

    /// Starts it again where it was, after `kill`.
    pub fn restart(&mut self, options: &Options) -> Result<()> {
        anyhow::ensure!(self.child.is_none(), "ballastd runs");
        self.spawn(&tools::sibling("ballastd")?, options, &[])
    }

    /// Another one takes over from the one that runs, which must end well.
    pub fn take_over(&mut self, options: &Options) -> Result<()> {
        let mut old = self.child.take().context("ballastd was not started")?;
        let taken = self.spawn(&tools::sibling("ballastd")?, options, &["--take-over"]);
        let ended = taken.and_then(|()| wait_for_end(&mut old, START_LIMIT));
        if ended.is_err() {
            let _ = old.kill();
            let _ = old.wait();
        }
        let status = ended?;
        anyhow::ensure!(status.success(), "the former ballastd ended with {status}");
        Ok(())
    }

    /// It leaves its VMs to the next one, which must come at once, and ends.
    pub async fn leave(&mut self) -> Result<()> {
        let until = ballast_qemu::process::since_boot() + START_LIMIT;
        self.client.leave(until.as_millis() as u64).await.context("asking ballastd to leave")?;
        let mut child = self.child.take().context("ballastd was not started")?;
        let status = wait_for_end(&mut child, START_LIMIT).inspect_err(|_| {
            let _ = child.kill();
        })?;
        anyhow::ensure!(status.success(), "ballastd left, and ended with {status}");
        Ok(())
    }

    fn spawn(&mut self, program: &Path, options: &Options, more: &[&str]) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log());
        let log = log.context("ballastd.log")?;
        let mut command = self.command(program, options, more)?;
        // Its own group, so that Ctrl-C reaches this program alone, which then ends it in order.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        // SAFETY: prctl is async-signal-safe and touches no memory. If this program is killed, the
        // manager gets the signal on which it stops its VMs and cleans up.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut child =
            command.spawn().with_context(|| format!("starting {}", program.display()))?;
        let output = child.stdout.take();
        self.child = Some(child);
        self.wait_until_ready(output.context("ballastd has no standard output")?)
    }

    /// With what is asked of it, on its command line and in its configuration.
    fn command(&self, program: &Path, options: &Options, more: &[&str]) -> Result<Command> {
        let mut command = Command::new(program);
        command
            .arg("--budget")
            .arg(options.budget.0.to_string())
            .arg("--run-dir")
            .arg(self.run_dir())
            .arg("--socket")
            .arg(self.client.socket())
            .arg("--stop-vms-on-exit")
            .args(more);
        if options.small_swap.is_none() {
            command.arg("--swap-dir").arg(self.swap_dir());
        }
        if options.check_takeovers {
            command.arg("--check-takeovers");
        }
        if let Some(tax) = options.tax {
            command.arg("--tax").arg(tax.to_string());
        }
        if let Some(period) = options.sample_period {
            command.arg("--sample-period").arg(period.as_secs_f64().to_string());
        }
        if let Some(samples) = options.samples {
            command.arg("--samples").arg(samples.to_string());
        }
        if let Some(file) = self.configure(options)? {
            command.arg("--config").arg(file);
        }
        Ok(command)
    }

    /// Until it says so.
    fn wait_until_ready(&self, output: ChildStdout) -> Result<()> {
        let mut lines = BufReader::new(output).lines();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let ready = lines.any(|line| line.is_ok_and(|l| l.starts_with("ready:")));
            // Nobody listens any more once START_LIMIT is over.
            let _ = tell.send(ready);
            // What it prints later must not fill the pipe.
            lines.for_each(drop);
        });
        match told.recv_timeout(START_LIMIT) {
            Ok(true) => {}
            Ok(false) => bail!("ballastd did not start: {}", self.last_words()),
            Err(_) => bail!(
                "ballastd is not ready after {} s: {}",
                START_LIMIT.as_secs(),
                self.last_words()
            ),
        }
        Ok(())
    }

    /// Its API.
    pub fn client(&self) -> &Client {
        &self.client
    }
    /// Of its API.
    pub fn socket(&self) -> &Path {
        self.client.socket()
    }
    /// Where shims of processes that somebody else starts find it.
    pub fn shim_socket(&self) -> PathBuf {
        self.run_dir().join("shim.sock")
    }
    /// The process of ballastd.
    pub fn pid(&self) -> Result<i32> {
        self.child.as_ref().map(|c| c.id() as i32).context("ballastd was not started")
    }
    /// Where guests' consoles are logged.
    pub fn consoles(&self) -> PathBuf {
        self.root.join("console")
    }
    /// Where to make a disk image; it goes with the manager.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.images().join(format!("{name}.img"))
    }
    fn images(&self) -> PathBuf {
        self.disks.join("images")
    }
    /// Where swap files are.
    pub fn swap_dir(&self) -> PathBuf {
        self.disks.join("swap")
    }
    /// Where they are first, if it was asked for: a mount point of its own.
    pub fn small_swap(&self) -> PathBuf {
        self.root.join("small")
    }
    /// Sockets, and the state of VMs.
    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }
    /// What ballastd says; those that came one after the other, all in one file.
    pub fn log(&self) -> PathBuf {
        self.root.join("ballastd.log")
    }

    /// The last lines of the manager's log.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        match lines.len() {
            0 => "(it logged nothing)".to_owned(),
            n => lines[n.saturating_sub(5)..].join(" | "),
        }
    }

    /// False once ballastd has ended.
    pub fn alive(&mut self) -> bool {
        self.child.as_mut().is_some_and(|c| matches!(c.try_wait(), Ok(None)))
    }

    /// Stops the VMs and the manager, then removes the folders. Returns the host's last figures, and
    /// what had been left behind (which is removed too).
    pub async fn finish(mut self) -> Result<(HostView, Vec<String>)> {
        let last = self.client.shutdown(true).await.context("stopping ballastd");
        let last = match last {
            Ok(view) => view,
            Err(e) => bail!("{e:#}; its last words: {}", self.last_words()),
        };
        let mut left = Vec::new();
        if !self.wait(Duration::from_secs(60)) {
            left.push("ballastd still runs 60 s after its shutdown".to_owned());
        }
        left.extend(leftovers::describe(&self.run_dir()));
        left.extend(leftovers::describe(&self.swap_dir()));
        let small = leftovers::files(&self.small_swap());
        left.extend(small.iter().map(|file| format!("file {}", file.display())));
        for process in leftovers::processes(&self.root) {
            left.push(format!("process {process} of this run"));
        }
        self.remove();
        for folder in [&self.root, &self.disks] {
            if folder.exists() {
                left.push(format!("{} cannot be removed", folder.display()));
            }
        }
        left.sort();
        left.dedup();
        Ok((last, left))
    }

    /// True if it has ended within `limit`.
    fn wait(&mut self, limit: Duration) -> bool {
        let begin = Instant::now();
        while self.alive() {
            if begin.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// Asks with SIGTERM first, then takes by force. Does nothing the second time.
    fn remove(&mut self) {
        if self.alive() {
            if let Some(pid) = self.child.as_ref().map(Child::id) {
                // SAFETY: kill touches no memory; the child was not collected yet, so the number is
                // still its own.
                unsafe {
                    libc::kill(pid as i32, libc::SIGTERM);
                    // One that was stopped would not hear it.
                    libc::kill(pid as i32, libc::SIGCONT);
                }
            }
            self.wait(Duration::from_secs(30));
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for folder in [&self.root, &self.disks] {
            leftovers::sweep(folder);
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.remove();
    }
}
