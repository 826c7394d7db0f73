//! A sample guest under plain QEMU, without Ballast: the image's own test, and the peer of the
//! benchmarks.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::console::{Console, Story};
use crate::guest::Guest;
use crate::image::Image;
use crate::tools;

pub struct PlainVm {
    child: Child,
    qmp: PathBuf,
    pub console: Console,
    /// Sockets and QEMU's messages.
    folder: tempfile::TempDir,
}

impl PlainVm {
    pub fn start(guest: &Guest, image: &Image) -> Result<PlainVm> {
        let qemu = tools::find("qemu-system-x86_64", "qemu-system-x86")?;
        let folder = tempfile::Builder::new().prefix("ballast-plain-").tempdir()?;
        let qmp = folder.path().join("qmp.sock");
        let mib = guest.memory.0 >> 20;
        let errors = std::fs::File::create(folder.path().join("qemu.log"))?;
        let child = Command::new(qemu)
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-accel", "tcg,tb-size=32", "-machine", "q35,memory-backend=mem", "-smp", "1"])
            .args(["-m", &format!("{mib}M"), "-object"])
            .arg(format!("memory-backend-memfd,id=mem,size={mib}M,share=on"))
            .args(["-device", "virtio-balloon-pci,id=bal"])
            .arg("-serial")
            .arg(format!("file:{}", guest.console.display()))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", qmp.display()))
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd)
            .args(["-append", &guest.append()])
            .args(guest.disk_arguments())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .context("qemu-system-x86_64")?;
        Ok(PlainVm { child, qmp, console: Console::new(&guest.console), folder })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Follows the console until `done` says so; an error if QEMU ends or time runs out before.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&Story) -> bool,
    ) -> Result<()> {
        let begin = Instant::now();
        loop {
            let ended = self.child.try_wait()?;
            self.console.poll();
            if done(&self.console.story) {
                return Ok(());
            }
            if let Some(status) = ended {
                let log = self.folder.path().join("qemu.log");
                let log = std::fs::read_to_string(log).unwrap_or_default();
                let tail = self.console.tail(5);
                bail!("QEMU ended with {status} before {what}: {} {tail}", log.trim());
            }
            if begin.elapsed() > limit {
                bail!("{what}: not within {} s: {}", limit.as_secs(), self.console.tail(5));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses the guest's power button.
    pub fn power_down(&self) -> Result<()> {
        self.command("system_powerdown")
    }

    fn command(&self, name: &str) -> Result<()> {
        let stream = UnixStream::connect(&self.qmp).context("QMP socket")?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let mut out = stream;
        lines.next().context("QMP: no greeting")??;
        for command in ["qmp_capabilities", name] {
            writeln!(out, "{{\"execute\":\"{command}\"}}").context("QMP")?;
            loop {
                let line = lines.next().context("QMP: connection closed")?.context("QMP")?;
                let answer: Value = serde_json::from_str(&line).context("QMP")?;
                if let Some(error) = answer.get("error") {
                    bail!("QMP {command}: {error}");
                }
                if answer.get("return").is_some() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Waits for QEMU to end by itself.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<ExitStatus> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.console.poll();
                return Ok(status);
            }
            if begin.elapsed() > limit {
                bail!("QEMU still runs after {} s: {}", limit.as_secs(), self.console.tail(5));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for PlainVm {
    fn drop(&mut self) {
        // Already gone is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
