//! A vhost-user device that is plugged into a paged guest: its backend would read what is away as zeros.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ballast_api::Mode;
use ballast_qemu::Qmp;
use serde_json::{Value, json};
use support::witness::ram_files;
use support::{Ballastd, MIB, PATIENT, image_or_skip, required, wait};

/// QEMU's own backend of vhost-user disks. Ended when it is dropped.
struct Backend {
    child: Child,
    socket: PathBuf,
}

impl Backend {
    fn start(dir: &Path) -> Option<Backend> {
        let (disk, socket) = (dir.join("disk"), dir.join("vhost.sock"));
        std::fs::write(&disk, vec![7; MIB as usize]).unwrap();
        let started = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("driver=file,node-name=disk,filename={}", disk.display()))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={}",
                socket.display()
            ))
            .stdin(Stdio::null())
            .spawn();
        let child = match started {
            Ok(child) => child,
            Err(e) => {
                assert!(!required(), "qemu-storage-daemon: {e}");
                eprintln!("SKIPPED: qemu-storage-daemon: {e}");
                return None;
            }
        };
        let backend = Backend { child, socket };
        wait("the backend's socket", || backend.socket.exists().then_some(()));
        Some(backend)
    }

    /// Whether it maps any of these files.
    fn has_any(&self, files: &[PathBuf]) -> bool {
        maps_any(self.child.id(), files)
    }
}

/// Whether a process maps any of these files, whatever they are called there.
fn maps_any(pid: u32, files: &[PathBuf]) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let inodes = files.iter().map(|file| std::fs::metadata(file).unwrap());
    // Address, access, offset, device, inode.
    let is = |line: &str, meta: &Metadata| {
        let mut fields = line.split_whitespace().skip(3);
        let (device, inode) = (fields.next().unwrap(), fields.next().unwrap());
        let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        device == format!("{major:02x}:{minor:02x}") && inode == meta.ino().to_string()
    };
    let inodes: Vec<Metadata> = inodes.collect();
    maps.lines().any(|line| inodes.iter().any(|meta| is(line, meta)))
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn ask(qmp: &Qmp, command: &str, arguments: Value) -> Value {
    qmp.execute(command, arguments, PATIENT).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_is_plugged_into_a_paged_guest_gets_no_memory_of_it() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let Some(backend) = Backend::start(&ballastd.root) else { return };
    let mut spec =
        ballastd.guest(image, "plugs", 96, "verify-torture --mb 16 --threads 1 --seconds 600");
    let second = ballastd.root.join("second.qmp");
    let monitor = format!("unix:{},server=on,wait=off", second.display());
    spec.extra = ["-device", "pcie-root-port,id=rp0", "-qmp", &monitor].map(String::from).into();
    ballastd.client.run(&spec).await.unwrap();
    ballastd.is_paged("plugs").await;
    let mut console = ballastd.console("plugs");
    ballastd.checks_go_on(&mut console, 1).await;
    let ram = ram_files(&ballastd.root);
    assert!(maps_any(ballastd.vm("plugs").await.pid.unwrap(), &ram), "{ram:?}");

    let qmp = Qmp::connect(&second, PATIENT).await.unwrap();
    let address = json!({"type": "unix", "data": {"path": backend.socket}});
    let channel = json!({"type": "socket", "data": {"addr": address, "server": false}});
    ask(&qmp, "chardev-add", json!({"id": "channel", "backend": channel})).await;
    let device =
        json!({"driver": "vhost-user-blk-pci", "id": "disk", "chardev": "channel", "bus": "rp0"});
    ask(&qmp, "device_add", device).await;
    let log = ballastd.folder("plugs").join("qemu.log");
    wait("the shim's refusal", || {
        let said = std::fs::read_to_string(&log).unwrap();
        said.contains("not given to another process").then_some(())
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!backend.has_any(&ram));
    // The guest goes on without. The device is there all the same, and QMP tells of it.
    ballastd.checks_go_on(&mut console, 1).await;
    ballastd
        .eventually("it is balloon only", async || {
            let management = ballastd.vm("plugs").await.management;
            let is_for_it = management.reason.is_some_and(|why| why.contains("vhost-user-blk-pci"));
            management.mode == Mode::BalloonOnly && is_for_it
        })
        .await;
    ballastd.checks_go_on(&mut console, 1).await;
    assert!(!backend.has_any(&ram));
    assert_eq!(console.story.trouble, None);
}
