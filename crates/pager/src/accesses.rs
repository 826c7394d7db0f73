//! Which of its pages a VMM accesses. The kernel tells nobody the accessed bits of a process by page, but whether a
//! page is mapped; so pages are unmapped, and were accessed if they are mapped again. What unmaps them is
//! MADV_PAGEOUT: it takes a page out of the page tables and then writes it out to swap; a page of shared memory for
//! which there is no swap stays where it is, whole, and is mapped again by the kernel itself at the next access. So
//! this needs a host that has no swap of its own for its VMs, and is a hint: an access is never missed, but a page may
//! count as accessed that was not (the kernel leaves alone what is mapped twice, or locked, or on its way to its lists).

use std::ffi::{c_long, c_ulong};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_uffd::procmap::Pagemap;
use ballast_units::{HostAddr, PAGE_SIZE, Pages};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sync::{Mutex, lock};

/// How long it is believed that a VMM has no swap. Should it get some meanwhile, pages may go there, and come back.
const BELIEVED: Duration = Duration::from_secs(1);
/// Most that the kernel takes in one call (UIO_MAXIOV).
const MOST: usize = 1024;

/// The way to a VMM's page tables.
pub(crate) struct Accesses {
    process: OwnedFd,
    pagemap: Pagemap,
    pid: u32,
    swapless: Mutex<Option<(Instant, bool)>>,
    /// The kernel does not do it, or not for us.
    refused: AtomicBool,
}

impl Accesses {
    /// Of a process that runs.
    ///
    /// # Errors
    /// Of opening /proc/PID/pagemap: the process is gone, or not ours to look at.
    pub fn of(pid: u32) -> std::io::Result<Accesses> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| std::io::Error::from_raw_os_error(libc::ESRCH))?;
        Ok(Accesses {
            process: pidfd_open(number, PidfdFlags::empty())?,
            pagemap: Pagemap::open(pid)?,
            pid,
            swapless: Mutex::new(None),
            refused: AtomicBool::new(false),
        })
    }

    /// From now on `since` tells of the pages at these addresses of the VMM, all in shared memory. Answers whether it
    /// does. Neighbours cost the less the more of them follow one another: the kernel takes them together.
    pub fn watch(&self, pages: &[HostAddr]) -> bool {
        if self.refused.load(Ordering::Relaxed) || !self.is_swapless() {
            return false;
        }
        pages.chunks(MOST).all(|some| match self.unmap(some) {
            Ok(()) => true,
            Err(e) => {
                if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) {
                    self.refused.store(true, Ordering::Relaxed);
                    tracing::info!(pid = self.pid, "accesses of its pages are not seen: {e}");
                }
                false
            }
        })
    }

    /// Which of `n` pages from an address on were accessed since they were last watched. None if that is not known.
    pub fn since(&self, first: HostAddr, n: Pages) -> Option<Vec<bool>> {
        let entries = self.pagemap.entries(first, n).ok()?;
        Some(entries.iter().map(|entry| entry.is_present()).collect())
    }

    fn unmap(&self, pages: &[HostAddr]) -> std::io::Result<()> {
        let mut parts: Vec<libc::iovec> = Vec::new();
        for at in pages {
            match parts.last_mut() {
                Some(last) if last.iov_base as u64 + last.iov_len as u64 == at.0 => {
                    last.iov_len += PAGE_SIZE;
                }
                _ => parts.push(libc::iovec { iov_base: at.0 as *mut _, iov_len: PAGE_SIZE }),
            }
        }
        let advice = c_long::from(libc::MADV_PAGEOUT);
        // SAFETY: the kernel reads `parts` and nothing else of ours; what they name is another process's memory,
        // whose contents this advice never changes.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                c_long::from(self.process.as_raw_fd()),
                parts.as_ptr(),
                parts.len() as c_ulong,
                advice,
                0 as c_long,
            )
        };
        // Pages that it did not come to count as accessed.
        if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    fn is_swapless(&self) -> bool {
        let mut known = lock(&self.swapless);
        match *known {
            Some((since, swapless)) if since.elapsed() < BELIEVED => swapless,
            _ => {
                let swapless = is_swapless(Path::new("/"), self.pid);
                if !swapless && known.is_none_or(|(_, before)| before) {
                    let why = "the host may swap them; memory.swap.max = 0 in its cgroup lets them be seen";
                    tracing::warn!(
                        pid = self.pid,
                        "accesses of its pages are not seen, and they leave at random: {why}"
                    );
                }
                *known = Some((Instant::now(), swapless));
                swapless
            }
        }
    }
}

/// Whether the kernel can swap nothing of this process: there is no swap, or its cgroup (v2) or one above it
/// may not use any. False where it cannot be known.
fn is_swapless(root: &Path, pid: u32) -> bool {
    let read = |path: PathBuf| std::fs::read_to_string(root.join(path));
    // A line of titles, then one for each.
    if read("proc/swaps".into()).is_ok_and(|swaps| swaps.lines().count() <= 1) {
        return true;
    }
    let Ok(groups) = read(format!("proc/{pid}/cgroup").into()) else { return false };
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return false;
    };
    Path::new(group).ancestors().any(|group| {
        let limit = Path::new("sys/fs/cgroup").join(group).join("memory.swap.max");
        read(limit).is_ok_and(|limit| limit.trim() == "0")
    })
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn swap_is_looked_for_in_the_host_and_in_the_groups_above_a_process() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let titles = "Filename\tType\tSize\tUsed\tPriority\n";
        let one = format!("{titles}/dev/zram0\tpartition\t1024\t0\t100\n");
        let swapless = || is_swapless(root.path(), 7);
        assert!(!swapless(), "nothing is known");
        write("proc/swaps", titles);
        assert!(swapless());
        write("proc/swaps", &one);
        assert!(!swapless());
        write("proc/7/cgroup", "1:memory:/machine\n0::/machine.slice/vm.scope\n");
        assert!(!swapless());
        let group = "sys/fs/cgroup/machine.slice";
        write(&format!("{group}/vm.scope/memory.swap.max"), "max\n");
        write(&format!("{group}/memory.swap.max"), "4096\n");
        assert!(!swapless());
        write(&format!("{group}/memory.swap.max"), "0\n");
        assert!(swapless());
        // In version 1 alone.
        write("proc/7/cgroup", "1:memory:/machine.slice\n");
        assert!(!swapless());
    }
}
