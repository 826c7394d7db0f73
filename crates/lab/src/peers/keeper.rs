//! The process that holds swap space for another: it makes it, waits until its input ends, and takes
//! it away again.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

const PAGE: usize = 4096;
/// linux/swap.h
const SWAP_FLAG_PREFER: i32 = 0x8000;
const SWAP_PRIORITY_MASK: i32 = 0x7fff;

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct KeeperArgs {
    /// A file to make; without it, a zram device
    #[arg(long)]
    file: Option<PathBuf>,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    priority: i32,
    /// Switch zswap on, with this compressor
    #[arg(long)]
    zswap: Option<String>,
    #[arg(long)]
    page_cluster: Option<u32>,
}

/// The keeper's whole life. False if there was no swap space to be had: its first line tells why. Err: not all
/// could be put back.
pub fn keep(args: &KeeperArgs) -> Result<bool> {
    // SAFETY: ignoring a signal runs no code. What ends the other program ends this one by its input.
    unsafe {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    // Undone in reverse order, also when a later step fails.
    let mut undo: Vec<Undo> = Vec::new();
    let begun = begin(args, &mut undo);
    let told = match &begun {
        Ok(device) => format!("swapping {}", device.display()),
        Err(e) => format!("{e:#}").replace('\n', " | "),
    };
    // If nobody is there to hear it, the input has ended too.
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{told}").and_then(|()| out.flush());
    if begun.is_ok() {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    }
    let mut result = Ok(());
    while let Some(step) = undo.pop() {
        result = result.and(step.run());
    }
    result.map(|()| begun.is_ok())
}

enum Undo {
    Setting {
        path: PathBuf,
        was: String,
    },
    SwapOff(PathBuf),
    Remove(PathBuf),
    /// Its number.
    Zram(u32),
}

impl Undo {
    fn run(self) -> Result<()> {
        match self {
            Undo::Setting { path, was } => put(&path, &was),
            Undo::SwapOff(device) => {
                let path = c_path(&device)?;
                // SAFETY: a NUL-ended path that lives through the call.
                let rc = unsafe { libc::swapoff(path.as_ptr()) };
                let error = std::io::Error::last_os_error();
                ensure!(rc == 0, "swapoff {}: {error}", device.display());
                Ok(())
            }
            Undo::Remove(path) => {
                fs::remove_file(&path).with_context(|| path.display().to_string())
            }
            Undo::Zram(number) => {
                put(Path::new(&format!("/sys/block/zram{number}/reset")), "1")?;
                put(Path::new("/sys/class/zram-control/hot_remove"), &number.to_string())
            }
        }
    }
}

fn begin(args: &KeeperArgs, undo: &mut Vec<Undo>) -> Result<PathBuf> {
    if let Some(compressor) = &args.zswap {
        let folder = Path::new("/sys/module/zswap/parameters");
        ensure!(folder.is_dir(), "this kernel has no zswap ({})", folder.display());
        set(&folder.join("compressor"), compressor, undo)?;
        set(&folder.join("enabled"), "Y", undo)?;
        // Before it was first used it takes any name, and then its own choice.
        let path = folder.join("compressor");
        let chosen = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(chosen.trim() == compressor, "zswap has no {compressor} in this kernel");
    }
    if let Some(cluster) = args.page_cluster {
        set(Path::new("/proc/sys/vm/page-cluster"), &cluster.to_string(), undo)?;
    }
    let device = match &args.file {
        Some(path) => swap_file(path, args.bytes, undo)?,
        None => zram(args.bytes, undo)?,
    };
    let path = c_path(&device)?;
    let flags = SWAP_FLAG_PREFER | args.priority & SWAP_PRIORITY_MASK;
    // SAFETY: a NUL-ended path that lives through the call.
    let rc = unsafe { libc::swapon(path.as_ptr(), flags) };
    let error = std::io::Error::last_os_error();
    ensure!(rc == 0, "swapon {}: {error}", device.display());
    undo.push(Undo::SwapOff(device.clone()));
    Ok(device)
}

fn swap_file(path: &Path, bytes: u64, undo: &mut Vec<Undo>) -> Result<PathBuf> {
    let told = || format!("swap file {} of {bytes} bytes", path.display());
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let mut file = {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).open(path).with_context(told)?
    };
    undo.push(Undo::Remove(path.to_owned()));
    // SAFETY: plain call on an open descriptor.
    let rc = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
    ensure!(rc == 0, "{}: {}", told(), std::io::Error::from_raw_os_error(rc));
    format(&mut file, bytes).with_context(told)?;
    Ok(path.to_owned())
}

fn zram(bytes: u64, undo: &mut Vec<Undo>) -> Result<PathBuf> {
    crate::tools::load_module("zram");
    let path = Path::new("/sys/class/zram-control/hot_add");
    let number =
        fs::read_to_string(path).context("this kernel has no zram, or you are not root")?;
    let number: u32 = number.trim().parse().with_context(|| path.display().to_string())?;
    undo.push(Undo::Zram(number));
    let block = PathBuf::from(format!("/sys/block/zram{number}"));
    put(&block.join("comp_algorithm"), "lz4")?;
    put(&block.join("disksize"), &bytes.to_string())?;
    let device = PathBuf::from(format!("/dev/zram{number}"));
    if !device.exists() {
        // No devtmpfs here, nor anybody who makes nodes.
        node(&device, &block.join("dev"))?;
        undo.push(Undo::Remove(device.clone()));
    }
    let mut file = File::options().read(true).write(true).open(&device);
    let file = file.as_mut().map_err(|e| anyhow::anyhow!("{}: {e}", device.display()))?;
    format(file, bytes).with_context(|| device.display().to_string())?;
    Ok(device)
}

/// A block device's node; `numbers` holds "major:minor".
fn node(device: &Path, numbers: &Path) -> Result<()> {
    let text = fs::read_to_string(numbers).with_context(|| numbers.display().to_string())?;
    let parse = || {
        let (major, minor) = text.trim().split_once(':')?;
        Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    let number = parse().with_context(|| format!("{}: '{text}'", numbers.display()))?;
    let path = c_path(device)?;
    // SAFETY: a NUL-ended path that lives through the call.
    let rc = unsafe { libc::mknod(path.as_ptr(), libc::S_IFBLK | 0o600, number) };
    let error = std::io::Error::last_os_error();
    ensure!(rc == 0, "{}: {error}", device.display());
    Ok(())
}

/// The header of swap space, version 1 (linux/swap.h, union swap_header).
fn format(file: &mut File, bytes: u64) -> Result<()> {
    let mut header = vec![0; PAGE];
    let last_page = u32::try_from(bytes / PAGE as u64)?.saturating_sub(1);
    ensure!(last_page > 0, "too small");
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&header)?;
    file.sync_all()?;
    Ok(())
}

/// Changes a setting, to be put back later.
fn set(path: &Path, value: &str, undo: &mut Vec<Undo>) -> Result<()> {
    let was = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    put(path, value)?;
    undo.push(Undo::Setting { path: path.to_owned(), was: was.trim().to_owned() });
    Ok(())
}

fn put(path: &Path, value: &str) -> Result<()> {
    File::options()
        .write(true)
        .open(path)
        .and_then(|mut f| f.write_all(value.as_bytes()))
        .with_context(|| format!("{} = {value}", path.display()))
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_undone_when_a_later_step_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        let mut undo = Vec::new();
        swap_file(&path, 1 << 20, &mut undo).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        assert_eq!(&bytes[PAGE - 10..PAGE], b"SWAPSPACE2");
        // It must not be there yet.
        assert!(swap_file(&path, 1 << 20, &mut Vec::new()).is_err());
        undo.into_iter().rev().for_each(|step| step.run().unwrap());
        assert!(!path.exists());
        assert!(swap_file(&dir.path().join("no/swap"), 1 << 20, &mut Vec::new()).is_err());
    }

    #[test]
    fn settings_are_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("setting");
        fs::write(&path, "3\n").unwrap();
        let mut undo = Vec::new();
        set(&path, "0", &mut undo).unwrap();
        assert!(fs::read_to_string(&path).unwrap().starts_with('0'));
        undo.into_iter().for_each(|step| step.run().unwrap());
        assert!(fs::read_to_string(&path).unwrap().starts_with('3'));
    }
}
