//! What a process costs, from /proc. Every answer is None when the process is gone (or a zombie,
//! which has no memory, or /proc does not let us look): processes vanish, and that is no error.

use std::fs;
use std::time::Duration;

use ballast_units::Bytes;

use crate::proc_text;

/// A tick of /proc/PID/stat: USER_HZ is 100 on x86 by ABI.
const TICK: Duration = Duration::from_millis(10);

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

/// The name of the process, 15 bytes at most.
pub fn comm(pid: u32) -> Option<String> {
    proc_text::stat(&read(pid, "stat")?).map(|stat| stat.comm)
}

fn ticks(ticks: u64) -> Duration {
    TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
}

fn read(pid: u32, file: &str) -> Option<String> {
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
    }

    #[test]
    fn a_process_that_is_gone_is_none() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!((rss_anon(pid), rss(pid), cpu_time(pid)), (None, None, None));
        assert_eq!(comm(pid), None);
        assert_eq!(rss_anon(u32::MAX), None);
    }
}
