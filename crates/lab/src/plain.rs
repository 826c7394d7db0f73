//! A sample guest under plain QEMU, without Ballast: the image's own test, and the peer of the
//! benchmarks.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_qemu::proc_text::kilobytes;
use ballast_units::Bytes;
use serde_json::Value;

use crate::console::{Console, Story};
use crate::guest::Guest;
use crate::image::Image;
use crate::tools;

/// What guest memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ram {
    /// A shared memfd, as under Ballast.
    Shared,
    /// A shared file with large pages, as under Ballast where it uses them.
    Large,
    /// QEMU's default.
    Private,
}

/// TCG's buffer for translated code: as the manager sets it.
const TRANSLATIONS_MIB: u32 = 16;

/// How a plain VM is run.
#[derive(Debug)]
pub struct Style {
    /// Private RAM is what KSM can merge.
    pub ram: Ram,
    /// Where it enters a cgroup, before it is QEMU.
    pub cgroup: Option<File>,
    /// Pages of 4 KiB alone: the kernel swaps, and merges, those.
    pub small_pages: bool,
}

impl Default for Style {
    fn default() -> Style {
        Style { ram: Ram::Shared, cgroup: None, small_pages: false }
    }
}

/// Killed when it is dropped.
pub struct PlainVm {
    child: Child,
    memory: Bytes,
    qmp: PathBuf,
    /// What its guest tells.
    pub console: Console,
    /// Sockets and QEMU's messages.
    folder: tempfile::TempDir,
    /// Its name leads through our descriptor.
    _ram: Option<OwnedFd>,
}

impl PlainVm {
    /// With the default style. Nothing is waited for.
    pub fn start(guest: &Guest, image: &Image) -> Result<PlainVm> {
        PlainVm::start_as(guest, image, &Style::default())
    }

    /// Under TCG, with one vCPU. Nothing is waited for.
    pub fn start_as(guest: &Guest, image: &Image, style: &Style) -> Result<PlainVm> {
        let qemu = tools::find("qemu-system-x86_64", "qemu-system-x86")?;
        let folder = tempfile::Builder::new().prefix("ballast-plain-").tempdir()?;
        let qmp = folder.path().join("qmp.sock");
        let mib = guest.memory.0 >> 20;
        let errors = std::fs::File::create(folder.path().join("qemu.log"))?;
        let mut file = None;
        let ram = match style.ram {
            Ram::Large => {
                let made = ballast_qemu::ram_file(guest.memory, ballast_qemu::Huge::Advise)
                    .context("its RAM file")?;
                let path = format!("/proc/{}/fd/{}", std::process::id(), made.as_raw_fd());
                file = Some(made);
                format!("memory-backend-file,id=mem,size={mib}M,share=on,align=2M,mem-path={path}")
            }
            Ram::Shared => format!("memory-backend-memfd,id=mem,size={mib}M,share=on"),
            Ram::Private => format!("memory-backend-ram,id=mem,size={mib}M"),
        };
        let tcg = format!("tcg,tb-size={TRANSLATIONS_MIB}");
        let mut command = Command::new(qemu);
        enter(&mut command, style);
        let child = command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-accel", &tcg, "-machine", "q35,memory-backend=mem", "-smp", "1"])
            .args(["-m", &format!("{mib}M"), "-object", &ram])
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
        let console = Console::new(&guest.console);
        Ok(PlainVm { child, memory: guest.memory, qmp, console, folder, _ram: file })
    }

    /// Whether, and how, QEMU has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Of its process.
    pub fn held(&self) -> Result<Held> {
        held(self.child.id(), self.memory)
    }

    /// Of QEMU.
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

    /// Tests: presses the guest's power button.
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

/// In the child: into the cgroup, and not longer than this program.
fn enter(command: &mut Command, style: &Style) {
    let entrance = style.cgroup.as_ref().map(AsRawFd::as_raw_fd);
    let small_pages = style.small_pages;
    let enter = move || {
        // SAFETY: system calls that touch no memory but a constant; the descriptor is open in the
        // parent for as long as the command is used.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
                || small_pages && libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0
                || entrance.is_some_and(|fd| libc::write(fd, c"0".as_ptr().cast(), 1) != 1)
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: `enter` makes system calls only.
    unsafe { command.pre_exec(enter) };
}

/// Of a process that has a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Held {
    /// What is resident of that.
    pub ram: Bytes,
    /// What is in swap of all else.
    pub own_swapped: Bytes,
}

/// Of a process, whose mappings of this size are guest memory.
///
/// # Errors
/// /proc/PID/smaps cannot be read, or has none.
pub fn held(pid: u32, size: Bytes) -> Result<Held> {
    let path = format!("/proc/{pid}/smaps");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    // Nothing else that QEMU maps is as large, but address space that it only keeps for itself.
    held_by(&text, size).with_context(|| format!("{path}: no mapping of guest memory"))
}

fn held_by(smaps: &str, size: Bytes) -> Option<Held> {
    let (mut found, mut held, mut here) = (false, Held::default(), false);
    for line in smaps.lines() {
        if let Some(mapped) = kilobytes(line, "Size") {
            here = mapped == size;
            found |= here;
        } else if let Some(rss) = kilobytes(line, "Rss").filter(|_| here) {
            held.ram += rss;
        } else if let Some(swapped) = kilobytes(line, "Swap").filter(|_| !here) {
            held.own_swapped += swapped;
        }
    }
    found.then_some(held)
}

impl Drop for PlainVm {
    fn drop(&mut self) {
        // Already gone is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_found_by_its_size() {
        let text = "7f00-7f10 rw-p 0 00:00 0\nSize:   1024 kB\nRss:   40 kB\nSwap:  1024 kB\nSwapPss:  512 kB\n\
                    7f20-7f30 rw-p 0 00:00 0\nSize:  262144 kB\nKernelPageSize: 4 kB\nRss:  2048 kB\nSwap:  8 kB\n";
        let held = Held { ram: Bytes::from_mib(2), own_swapped: Bytes::from_mib(1) };
        assert_eq!(held_by(text, Bytes::from_mib(256)), Some(held));
        assert_eq!(held_by(text, Bytes::from_mib(128)), None);
    }
}
