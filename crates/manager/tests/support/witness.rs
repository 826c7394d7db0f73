//! Counts machine memory without asking the manager: the blocks of the RAM files of all its QEMUs, and of
//! the files of their compressed pages.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_lab::leftovers;

pub struct Witness {
    peak: Arc<AtomicU64>,
    readings: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Witness {
    /// Watches the VMs whose command lines name `root`, until dropped. A reading above `budget` is
    /// taken again, because files are read one after the other while pages move.
    pub fn watch(root: &Path, budget: u64) -> Witness {
        let root = root.to_owned();
        let (peak, readings, stop) = <(Arc<AtomicU64>, Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let (p, r, s) = (peak.clone(), readings.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut files = Vec::new();
            for n in 0.. {
                if s.load(Ordering::Relaxed) {
                    return;
                }
                if n % 20 == 0 {
                    files = ram_files(&root);
                    files.extend(compressed_files(&root));
                }
                let least = (0..4).map(|_| sum(&files)).take_while_inclusive(budget).min();
                p.fetch_max(least.unwrap_or(0), Ordering::Relaxed);
                r.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(25));
            }
        });
        Witness { peak, readings, stop, thread: Some(thread) }
    }

    /// The most that was seen at one time, bytes.
    pub fn peak(&self) -> u64 {
        assert!(self.readings.load(Ordering::Relaxed) > 10, "too few readings to say anything");
        let peak = self.peak.load(Ordering::Relaxed);
        assert!(peak > 0, "no memory of any guest was found");
        peak
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

trait UntilBelow: Iterator<Item = u64> + Sized {
    /// Up to and with the first that is within `limit`.
    fn take_while_inclusive(self, limit: u64) -> impl Iterator<Item = u64> {
        let mut done = false;
        self.take_while(move |value| {
            let goes_on = !done;
            done = *value <= limit;
            goes_on
        })
    }
}
impl<I: Iterator<Item = u64>> UntilBelow for I {}

/// Guest RAM, as it is open in each VMM.
pub fn ram_files(root: &Path) -> Vec<PathBuf> {
    leftovers::processes(root)
        .into_iter()
        .flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten())
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            // ballastd holds them as well: each is counted in its QEMU only.
            let of_qemu = path.ancestors().nth(2).is_some_and(|process| {
                let pid = process.file_name().and_then(|pid| pid.to_str()?.parse().ok());
                pid.is_some_and(|pid| leftovers::runs(pid, leftovers::QEMU))
            });
            of_qemu && std::fs::read_link(path).is_ok_and(|t| is_guest_ram(&t.to_string_lossy()))
        })
        .fold(Vec::new(), |mut files: Vec<(u64, PathBuf)>, path| {
            // The shim holds a duplicate in the same process.
            if let Ok(meta) = std::fs::metadata(&path)
                && !files.iter().any(|(inode, _)| *inode == meta.ino())
            {
                files.push((meta.ino(), path));
            }
            files
        })
        .into_iter()
        .map(|(_, path)| path)
        .collect()
}

/// A memfd of QEMU's, or a file that has never had a name, on a tmpfs of the manager's.
fn is_guest_ram(name: &str) -> bool {
    name.starts_with("/memfd:memory-backend") || name.starts_with("/#")
}

/// Those in the run folders of VMs.
fn compressed_files(root: &Path) -> Vec<PathBuf> {
    let vms = std::fs::read_dir(root.join("run/vms")).into_iter().flatten().flatten();
    vms.map(|vm| vm.path().join("compressed")).filter(|path| path.exists()).collect()
}

fn sum(files: &[PathBuf]) -> u64 {
    files.iter().filter_map(|path| std::fs::metadata(path).ok()).map(|m| m.blocks() * 512).sum()
}
