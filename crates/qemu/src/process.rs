//! What a process costs, and what its host has, from /proc. Every answer about a process is None when it is gone (or
//! a zombie, which has no memory, or /proc does not let us look): processes vanish, and that is no error.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use ballast_api::record::process_started;
use ballast_units::Bytes;
use rustix::time::{ClockId, clock_gettime};

use crate::proc_text;
use crate::shown::shown;

/// What is shown of a process' name, characters.
const COMM: usize = 80;

/// A tick of /proc/PID/stat: USER_HZ is 100 on x86 by ABI.
const TICK_MS: u64 = 10;

/// Anonymous resident memory. Of a VMM whose RAM is a shared file: its own memory, beside the
/// guest's (and the guest's Broken pages, once pages are shared).
pub fn rss_anon(pid: u32) -> Option<Bytes> {
    proc_text::statm(&read(pid, "statm")?).map(|(_, anon)| anon)
}

/// All resident memory, shared pages included.
pub fn rss(pid: u32) -> Option<Bytes> {
    proc_text::statm(&read(pid, "statm")?).map(|(all, _)| all)
}

/// Memory that the host may not swap out.
pub fn locked(pid: u32) -> Option<Bytes> {
    proc_text::status_field(&read(pid, "status")?, "VmLck")
}

/// CPU time of all threads, those that ended included; steps of 10 ms.
pub fn cpu_time(pid: u32) -> Option<Duration> {
    proc_text::stat(&read(pid, "stat")?).map(|stat| ticks(stat.ticks))
}

/// When it was started, since the host's boot; steps of 10 ms.
pub fn started(pid: u32) -> Option<Duration> {
    process_started(pid).ok().flatten().map(ticks)
}

/// What has passed since the host's boot, its sleep included.
pub fn since_boot() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

/// Whether the process is there, and none of its threads has memory any more but those that the kernel runs in its name:
/// nothing of it runs, nor will. False where that cannot be told.
pub fn is_dead(pid: u32) -> bool {
    // Of its first thread: while that has some, nothing else needs to be looked at.
    if read(pid, "statm").is_some_and(|text| !text.starts_with("0 ")) {
        return false;
    }
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let first = pid.to_string();
    let mut seen = false;
    for thread in threads {
        let Ok(thread) = thread else { return false };
        match fs::read_to_string(thread.path().join("statm")) {
            Ok(text) if text.starts_with("0 ") => seen |= *thread.file_name() == *first,
            // Since Linux 6.4 vhost's are threads of their process, which outlive the others.
            Ok(_) if is_of_kernel(&thread.path()) => {}
            // It ended just now.
            Err(e)
                if e.raw_os_error() == Some(libc::ESRCH) || e.kind() == io::ErrorKind::NotFound => {
            }
            _ => return false,
        }
    }
    seen
}

fn is_of_kernel(thread: &Path) -> bool {
    let stat = fs::read(thread.join("stat")).unwrap_or_default();
    proc_text::task_flags(&String::from_utf8_lossy(&stat)).is_some_and(is_user_worker)
}

/// PF_USER_WORKER without PF_IO_WORKER: io_uring's end with their process.
fn is_user_worker(flags: u32) -> bool {
    flags & 0x4000 != 0 && flags & 0x10 == 0
}

/// Faults of all threads, those that ended included, that waited for a page to be read from swap or a file: a count.
pub fn major_faults(pid: u32) -> Option<u64> {
    proc_text::stat(&read(pid, "stat")?).map(|stat| stat.major_faults)
}

/// The name of the process as it may stand in a log: it has chosen its 15 bytes itself.
pub fn comm(pid: u32) -> Option<String> {
    proc_text::stat(&read(pid, "stat")?).map(|stat| shown(stat.comm.as_bytes(), COMM))
}

/// The memory of the host that its kernel can use. None where /proc does not tell.
pub fn host_memory() -> Option<Bytes> {
    proc_text::status_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal")
}

/// What programs could have of it without the host swapping, as its kernel estimates. None as of `host_memory`.
pub fn available_memory() -> Option<Bytes> {
    proc_text::status_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")
}

/// Of that, what is set aside for huge pages (hugetlbfs), used or not: nobody else's. It may change at any time.
pub fn huge_pages() -> Bytes {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    proc_text::status_field(&meminfo, "Hugetlb").unwrap_or_default()
}

fn ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks.saturating_mul(TICK_MS))
}

pub(crate) fn read(pid: u32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(rss_anon(pid).unwrap() > Bytes::ZERO);
        assert!(rss(pid).unwrap() >= rss_anon(pid).unwrap());
        assert!(cpu_time(pid).is_some());
        assert!(!comm(pid).unwrap().is_empty());
        assert!(host_memory().unwrap() > rss(pid).unwrap());
        assert!((Bytes(1)..host_memory().unwrap()).contains(&available_memory().unwrap()));
    }

    #[test]
    fn a_name_that_a_process_has_chosen_is_one_line() {
        use std::io::Read as _;
        use std::process::{Command, Stdio};
        let script = "printf '\\nERROR \\033[2J' >/proc/$$/comm; echo; read -r _";
        let mut sh = Command::new("sh");
        sh.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = sh.spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(comm(child.id()).unwrap(), "\\nERROR \\u{1b}[2J");
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn major_faults_are_told_by_the_kernel() {
        let before = major_faults(std::process::id()).unwrap();
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the call fills what it is given.
        let told = unsafe {
            assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
            usage.assume_init().ru_majflt as u64
        };
        assert!((before..=major_faults(std::process::id()).unwrap()).contains(&told));
    }

    #[test]
    fn memory_that_is_set_aside_for_huge_pages_is_told_beside_the_hosts() {
        let text = "HugePages_Total: 200\nHugepagesize: 2 kB\nHugetlb: 400 kB\n";
        assert_eq!(proc_text::status_field(text, "Hugetlb"), Some(Bytes(400 << 10)));
        assert!(huge_pages() < host_memory().unwrap());
    }

    #[test]
    fn a_process_is_dead_when_nothing_of_it_runs_any_more() {
        assert!(!is_dead(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        assert!(!is_dead(pid));
        child.kill().unwrap();
        // Until somebody waits for it, it is there.
        let begun = std::time::Instant::now();
        while !is_dead(pid) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never dead");
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait().unwrap();
        assert!(!is_dead(pid), "gone");
    }

    #[test]
    fn threads_that_the_kernel_runs_for_vhost_are_told_from_others() {
        // A thread of the VMM, a worker of vhost, and one of io_uring: include/linux/sched.h.
        for (flags, is) in [(0x0040_0040, false), (0x0040_4040, true), (0x0020_4050, false)] {
            assert_eq!(is_user_worker(flags), is, "{flags:x}");
        }
        let own = fs::read_to_string("/proc/thread-self/stat").unwrap();
        assert!(!is_user_worker(proc_text::task_flags(&own).unwrap()));
        let of_vhost = "7 (vhost-1) S 1 7 7 0 -1 4210752 0 0";
        assert!(is_user_worker(proc_text::task_flags(of_vhost).unwrap()));
    }

    #[test]
    fn a_process_that_is_gone_is_none() {
        let mut child = std::process::Command::new("sleep").arg("0.2").spawn().unwrap();
        let pid = child.id();
        let begun = since_boot().checked_sub(started(pid).unwrap()).unwrap();
        assert!(begun < Duration::from_secs(60), "{begun:?}");
        child.wait().unwrap();
        assert_eq!(started(pid), None);
        assert_eq!((rss_anon(pid), rss(pid), cpu_time(pid)), (None, None, None));
        assert_eq!((comm(pid), major_faults(pid)), (None, None));
        assert_eq!(rss_anon(u32::MAX), None);
    }
}
