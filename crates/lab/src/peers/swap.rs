//! Swap space for a peer, held by a process of its own ([`super::keep`]): when this value is dropped,
//! and when this program is killed, swapping ends and the space is given back.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail, ensure};
use ballast_units::Bytes;

use crate::tools;

/// What to swap to.
#[allow(missing_docs, reason = "told with the variants")]
#[derive(Clone, Debug)]
pub enum Space {
    /// A file that is made for it.
    File { path: PathBuf, size: Bytes },
    /// A zram device that is made for it, with lz4; `size` counts pages before they are compressed.
    Zram { size: Bytes },
}

/// What swap space to make.
#[derive(Clone, Debug)]
pub struct Request {
    /// Made for it, and removed with it.
    pub space: Space,
    /// Of two, the higher is used first; 0 to 32767.
    pub priority: u16,
    /// With zswap before it, and this compressor.
    pub zswap: Option<String>,
    /// The kernel reads so many pages (as a power of two) at once; None leaves its setting.
    pub page_cluster: Option<u32>,
}

impl Request {
    /// Without zswap, and with the kernel's own reading ahead.
    pub fn new(space: Space, priority: u16) -> Request {
        Request { space, priority, zswap: None, page_cluster: None }
    }
}

/// Swap space in use. The host's other programs may be swapped to it as well.
#[derive(Debug)]
pub struct Swap {
    keeper: Child,
    input: Option<ChildStdin>,
    /// As in /proc/swaps.
    device: PathBuf,
}

/// What zram says about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ZramUse {
    /// Of what was put in.
    pub original: Bytes,
    /// What became of that.
    pub compressed: Bytes,
    /// Of machine memory that it takes, its own waste included.
    pub used: Bytes,
}

impl Swap {
    /// Swaps from now on. Needs root.
    pub fn start(request: &Request) -> Result<Swap> {
        let mut command = Command::new(tools::sibling("ballast-lab")?);
        command.arg("swap-keeper").arg("--priority").arg(request.priority.to_string());
        match &request.space {
            Space::File { path, size } => {
                command.arg("--file").arg(path).arg("--bytes").arg(size.0.to_string());
            }
            Space::Zram { size } => {
                command.arg("--bytes").arg(size.0.to_string());
            }
        }
        if let Some(compressor) = &request.zswap {
            command.arg("--zswap").arg(compressor);
        }
        if let Some(cluster) = request.page_cluster {
            command.arg("--page-cluster").arg(cluster.to_string());
        }
        // Ctrl-C is for this program; the keeper ends after it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut keeper = command.spawn().context("starting the keeper of swap space")?;
        let input = keeper.stdin.take();
        let output = keeper.stdout.take().context("the keeper has no output")?;
        let mut swap = Swap { keeper, input, device: PathBuf::new() };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).context("the keeper of swap space")?;
        match line.trim_end().strip_prefix("swapping ") {
            Some(device) => swap.device = PathBuf::from(device),
            None => bail!("no swap space: {}", line.trim_end()),
        }
        Ok(swap)
    }

    /// As /proc/swaps names it.
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// Pages that are in it, as many as they were in memory.
    pub fn used(&self) -> Result<Bytes> {
        let text = fs::read_to_string("/proc/swaps").context("/proc/swaps")?;
        let device = self.device.display().to_string();
        used(&text, &device).with_context(|| format!("{device} is not in /proc/swaps any more"))
    }

    /// None if it is not zram.
    pub fn zram(&self) -> Result<Option<ZramUse>> {
        let name = self.device.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("/sys/block/{name}/mm_stat");
        match fs::read_to_string(&path) {
            Ok(text) => mm_stat(&text).map(Some).with_context(|| format!("{path}: '{text}'")),
            Err(_) => Ok(None),
        }
    }

    /// Ends it, and waits until all is as it was before. Err: not all is; what is not, the keeper has said
    /// on standard error.
    pub fn end(mut self) -> Result<()> {
        let told = format!("the keeper of swap space {}", self.device.display());
        let status = self.stop().with_context(|| told.clone())?;
        ensure!(status.success(), "{told} ended with {status}: not all was put back");
        Ok(())
    }

    fn stop(&mut self) -> std::io::Result<ExitStatus> {
        drop(self.input.take());
        self.keeper.wait()
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // For who cannot act on it; `end` tells.
        let _ = self.stop();
    }
}

/// From /proc/swaps: device, type, KiB of size, KiB used, priority.
fn used(text: &str, device: &str) -> Option<Bytes> {
    let line = text.lines().find(|l| l.split_whitespace().next() == Some(device))?;
    line.split_whitespace().nth(3)?.parse::<u64>().ok().map(|kib| Bytes(kib << 10))
}

/// "original compressed used ..."
fn mm_stat(text: &str) -> Option<ZramUse> {
    let mut words = text.split_whitespace().map(|w| w.parse::<u64>().map(Bytes));
    let mut next = || words.next()?.ok();
    Some(ZramUse { original: next()?, compressed: next()?, used: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_are_read() {
        let text =
            "Filename Type Size Used Priority\n/var/a file 1020 12 5\n/dev/zram1 partition 8 4 9\n";
        assert_eq!(used(text, "/dev/zram1"), Some(Bytes(4096)));
        assert_eq!(used(text, "/var/a"), Some(Bytes(12 << 10)));
        assert_eq!(used(text, "/var/b"), None);
        let z = mm_stat("  409600 100000 122880 0 122880 0 0 0 0\n").unwrap();
        assert_eq!(
            (z.original, z.compressed, z.used),
            (Bytes(409600), Bytes(100000), Bytes(122880))
        );
        assert_eq!(mm_stat("1 2"), None);
    }
}
