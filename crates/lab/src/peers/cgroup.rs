//! A memory cgroup of our own, version 1 or 2, with a limit that may change.

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_units::Bytes;

/// How long the kernel may take to reclaim down to a new limit.
const PATIENCE: Duration = Duration::from_secs(120);
/// Until it is asked again: guests are to get on meanwhile.
const AGAIN: Duration = Duration::from_millis(20);

/// The kernel did not get there, and has not set the limit.
#[derive(Debug)]
pub struct Unreclaimable(PathBuf, Bytes);

impl fmt::Display for Unreclaimable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the kernel cannot reclaim down to {}", self.0.display(), self.1)
    }
}

impl std::error::Error for Unreclaimable {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Its processes must have ended before it is dropped.
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
    version: Version,
}

impl Cgroup {
    /// A new one below the root of the hierarchy: what limits this process does not limit it.
    pub fn create() -> Result<Cgroup> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
        let (root, version) =
            hierarchy(&mounts).context("no memory cgroup hierarchy is mounted")?;
        if version == Version::Two {
            put(&root.join("cgroup.subtree_control"), "+memory")?;
        }
        let folder = tempfile::Builder::new().prefix("ballast-lab-").tempdir_in(&root);
        let folder = folder.with_context(|| format!("a memory cgroup in {}", root.display()))?;
        Ok(Cgroup { folder: folder.keep(), version })
    }

    /// To which a process writes "0" to be in it.
    pub fn entrance(&self) -> Result<File> {
        let path = self.folder.join("cgroup.procs");
        File::options().write(true).open(&path).with_context(|| path.display().to_string())
    }

    /// Moves a process in; what it has already stays charged where it was.
    pub fn add(&self, pid: u32) -> Result<()> {
        put(&self.folder.join("cgroup.procs"), &pid.to_string())
    }

    /// What was reclaimed stays where it is.
    pub fn unlimit(&self) -> Result<()> {
        match self.version {
            Version::One => put(&self.folder.join("memory.limit_in_bytes"), "-1"),
            Version::Two => put(&self.folder.join("memory.max"), "max"),
        }
    }

    /// Reclaims down to `limit`, if it must: this takes as long as it takes.
    pub fn limit(&self, limit: Bytes) -> Result<()> {
        let path = self.folder.join(match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        });
        let most = limit.0.to_string();
        let begin = Instant::now();
        loop {
            let written = File::options()
                .write(true)
                .open(&path)
                .and_then(|mut f| f.write_all(most.as_bytes()));
            match written {
                Ok(()) => return Ok(()),
                // Version 1 gives up after some rounds of reclaim; what it did stays done.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    if begin.elapsed() >= PATIENCE {
                        return Err(Unreclaimable(path, limit).into());
                    }
                    std::thread::sleep(AGAIN);
                }
                Err(e) => return Err(e).with_context(|| format!("{} = {most}", path.display())),
            }
        }
    }

    /// All that is charged: anonymous memory, page cache, the kernel's own for its processes.
    pub fn usage(&self) -> Result<Bytes> {
        let path = self.folder.join(match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        });
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let bytes = text.trim().parse().with_context(|| format!("{}: '{text}'", path.display()))?;
        Ok(Bytes(bytes))
    }

    /// Of that, the processes' memory that none of them maps: in the kernel's swap cache, on its way out, or brought ahead.
    pub fn in_swap_cache(&self) -> Result<Bytes> {
        let path = self.folder.join("memory.stat");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        in_swap_cache(&text).with_context(|| format!("{}: no counts of memory", path.display()))
    }
}

/// By memory.stat of either version. What the lists have that is mapped by nobody and is no file.
fn in_swap_cache(stat: &str) -> Option<Bytes> {
    let value = |name: &str| {
        let mut words = stat.lines().filter_map(|line| line.split_once(' '));
        words.find(|(word, _)| *word == name).and_then(|(_, n)| n.parse::<u64>().ok())
    };
    let listed = value("inactive_anon")? + value("active_anon")?;
    let mapped = value("anon").or_else(|| value("rss"))?;
    Some(Bytes(listed.saturating_sub(mapped + value("shmem")?)))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that were killed leave it a moment later.
        let until = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir(&self.folder).is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The memory controller's mount point in /proc/self/mounts. Where both versions are mounted, it
/// belongs to one of them.
fn hierarchy(mounts: &str) -> Option<(PathBuf, Version)> {
    let lines = || mounts.lines().map(|l| l.split(' ').collect::<Vec<_>>());
    let one = lines().find(|w| {
        w.len() > 3 && w[2] == "cgroup" && w[3].split(',').any(|option| option == "memory")
    });
    let two = || lines().find(|w| w.len() > 3 && w[2] == "cgroup2");
    match one {
        Some(words) => Some((PathBuf::from(words[1]), Version::One)),
        None => two().map(|words| (PathBuf::from(words[1]), Version::Two)),
    }
}

fn put(path: &Path, text: &str) -> Result<()> {
    File::options()
        .write(true)
        .open(path)
        .and_then(|mut f| f.write_all(text.as_bytes()))
        .with_context(|| format!("{} = {text}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_maps_is_in_the_swap_cache() {
        let one = "cache 61\nrss 700\nrss_huge 0\nshmem 20\ninactive_anon 500\nactive_anon 260\ntotal_rss 9\n";
        let two = "anon 700\nfile 61\nshmem 20\ninactive_anon 500\nactive_anon 260\nanon_thp 0\n";
        assert_eq!(in_swap_cache(one), Some(Bytes(40)));
        assert_eq!(in_swap_cache(two), Some(Bytes(40)));
        // Counts are not of one moment.
        assert_eq!(in_swap_cache(&two.replace("700", "750")), Some(Bytes(0)));
        assert_eq!(in_swap_cache("anon 700\n"), None);
    }

    #[test]
    fn the_memory_controller_is_found_in_either_version() {
        let both = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                    cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                    cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                    cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(hierarchy(both), Some(("/sys/fs/cgroup/memory".into(), Version::One)));
        let two = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(hierarchy(two), Some(("/sys/fs/cgroup".into(), Version::Two)));
        assert_eq!(hierarchy("proc /proc proc rw 0 0\n"), None);
    }
}
