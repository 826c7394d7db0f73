//! qemu-guest-agent from /disk (see ballast-lab's agent disk): the distribution's own, at the port that
//! the host gave the guest. Ends with an error when the agent does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::init::{self, DISK};
use crate::json::Object;
use crate::report;

/// What QEMU calls the port.
const PORT: &str = "org.qemu.guest_agent.0";
/// The C library's own, with the loader, and the others': one folder or two, as packages have it.
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const PATIENCE: Duration = Duration::from_secs(60);

pub fn run(args: Args) -> Result<(), String> {
    args.done()?;
    let disk = Path::new(DISK);
    let module = disk.join("virtio_console.ko");
    if module.exists() {
        init::insert_module(&module)?;
    }
    let port = wait_for_port()?;
    let libraries = LIBRARIES.map(|folder| disk.join(folder));
    let status = Command::new(libraries[0].join("ld-linux-x86-64.so.2"))
        .arg("--library-path")
        .arg(format!("{}:{}", libraries[0].display(), libraries[1].display()))
        .arg(disk.join("usr/sbin/qemu-ga"))
        .args(["--method=virtio-serial", "--statedir=/tmp", "--pidfile=/tmp/qemu-ga.pid"])
        .arg(format!("--path={}", port.display()))
        .spawn()
        .and_then(|mut child| {
            report::emit(
                Object::new().text("event", "agent").text("port", &port.to_string_lossy()),
            );
            child.wait()
        })
        .map_err(|e| format!("qemu-ga: {e}"))?;
    Err(format!("qemu-ga ended with {status}"))
}

/// devtmpfs makes /dev/vport1p1; only sysfs knows the port's name.
fn wait_for_port() -> Result<PathBuf, String> {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let device = Path::new("/dev").join(entry.file_name());
            if name.trim() == PORT && device.exists() {
                return Ok(device);
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Err(format!("no port {PORT}: is the VM started with --guest-agent?"))
}
