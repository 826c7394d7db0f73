//! A QEMU without a guest, and fake QMP servers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]
#![allow(dead_code, reason = "each test program uses its part")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_api::VmSpec;
use ballast_qemu::{AccelChoice, Launch, LaunchPaths, Monitor, Qmp, Vmm, command, spawn};

pub const PATIENT: Duration = Duration::from_secs(60);

/// Says loudly that a test did not run; where everything must run, that is a failure.
pub fn skip(why: &str) {
    eprintln!("SKIPPED: {why}");
    assert!(std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_none_or(|v| v != "1"), "{why}");
}

pub fn qemu_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("qemu-system-x86_64")).find(|q| q.is_file())
}

/// A kernel to boot: $BALLAST_TEST_KERNEL, or one that is installed.
pub fn stock_kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("BALLAST_TEST_KERNEL") {
        return Some(path.into());
    }
    let boot = std::fs::read_dir("/boot").ok()?;
    let mut files = boot.filter_map(|entry| Some(entry.ok()?.path()));
    files.find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-")))
}

pub fn have_qemu() -> bool {
    let found = qemu_path().is_some();
    if !found {
        skip("qemu-system-x86_64 is not in PATH");
    }
    found
}

/// A running QEMU, killed when the test ends, however it ends.
pub struct Guestless {
    pub vmm: Vmm,
    pub dir: tempfile::TempDir,
    pub qmp_socket: PathBuf,
}

impl Drop for Guestless {
    fn drop(&mut self) {
        let _ = self.vmm.process.kill();
    }
}

impl Guestless {
    pub async fn qmp(&self) -> Qmp {
        self.vmm.connect_qmp(&self.qmp_socket, PATIENT).await.unwrap()
    }
    pub async fn monitor(&self) -> Monitor {
        Monitor::new(self.qmp().await, PATIENT).await.unwrap()
    }
}

pub fn paths(dir: &Path) -> LaunchPaths {
    LaunchPaths {
        ram: None,
        hotplug: None,
        run_dir: dir.into(),
        shim: dir.join("no-shim.so"),
        shim_socket: dir.join("shim.sock"),
        qmp_socket: dir.join("qmp.sock"),
        agent_socket: dir.join("agent.sock"),
        console: dir.join("console.log"),
        qemu_log: dir.join("qemu.log"),
    }
}

/// The command line of the product, without shim and kernel, and paused: `change` gets the spec.
pub fn launch(dir: &Path, change: impl FnOnce(&mut VmSpec)) -> Launch {
    let mut spec = VmSpec {
        name: "t".into(),
        max: 64 << 20,
        kernel: "/nonexistent".into(),
        extra: vec!["-S".into()],
        ..VmSpec::default()
    };
    change(&mut spec);
    let accel = AccelChoice::Tcg { why: "test".into() };
    let mut launch = command(&spec, &accel, &paths(dir));
    // Without the shim.
    launch.env.clear();
    remove_pair(&mut launch, "-kernel");
    remove_pair(&mut launch, "-append");
    launch
}

pub fn remove_pair(launch: &mut Launch, option: &str) {
    let at = launch.args.iter().position(|arg| arg == option).unwrap();
    launch.args.drain(at..at + 2);
}

pub fn replace(launch: &mut Launch, option: &str, value: &str) {
    let at = launch.args.iter().position(|arg| arg == option).unwrap();
    launch.args[at + 1] = OsString::from(value);
}

pub async fn start(change: impl FnOnce(&mut VmSpec)) -> Guestless {
    start_changed(change, |_| ()).await
}

pub async fn start_changed(
    spec: impl FnOnce(&mut VmSpec),
    change: impl FnOnce(&mut Launch),
) -> Guestless {
    let dir = tempfile::tempdir().unwrap();
    let mut launch = launch(dir.path(), spec);
    change(&mut launch);
    let vmm = spawn(&launch).await.unwrap();
    Guestless { vmm, qmp_socket: paths(dir.path()).qmp_socket, dir }
}
