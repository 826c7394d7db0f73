//! CPU time of single threads, to the nanosecond.

use std::fs;

use anyhow::{Context, Result};

/// CPU seconds of one thread.
pub fn thread_s(pid: i32, tid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/task/{tid}/schedstat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    parse(&text).with_context(|| format!("{path}: '{}'", text.trim()))
}

/// CPU seconds of a process, threads that have ended included.
pub fn process_s(pid: i32) -> Result<f64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: writes a number.
    let errno = unsafe { libc::clock_getcpuclockid(pid, &mut clock) };
    let failed = |errno| std::io::Error::from_raw_os_error(errno);
    anyhow::ensure!(errno == 0, "process {pid}: {}", failed(errno));
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes a timespec.
    let done = unsafe { libc::clock_gettime(clock, &mut time) };
    anyhow::ensure!(done == 0, "process {pid}: {}", std::io::Error::last_os_error());
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// "ns-on-cpu ns-waiting timeslices"
fn parse(text: &str) -> Option<f64> {
    let ns: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns as f64 / 1e9)
}

/// Threads of a process as (tid, name). A thread that ends meanwhile is left out.
pub fn threads(pid: i32) -> Result<Vec<(i32, String)>> {
    let folder = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&folder).with_context(|| folder.clone())?;
    Ok(entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|tid: i32| {
            let name = fs::read_to_string(format!("{folder}/{tid}/comm")).ok()?;
            Some((tid, name.trim_end().to_owned()))
        })
        .collect())
}

/// CPU seconds of the threads that are `wanted`, by their id and name.
pub fn sum_s(pid: i32, wanted: impl Fn(i32, &str) -> bool) -> Result<f64> {
    let threads = threads(pid)?;
    let chosen = threads.iter().filter(|(tid, name)| wanted(*tid, name));
    Ok(chosen.filter_map(|(tid, _)| thread_s(pid, *tid).ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_thread_uses_cpu() {
        assert_eq!(parse("1500000000 7 3\n"), Some(1.5));
        assert_eq!(parse(""), None);
        let me = std::process::id() as i32;
        let before = sum_s(me, |_, _| true).unwrap();
        let mut x = 1u64;
        while sum_s(me, |_, _| true).unwrap() <= before {
            (0..1_000_000).for_each(|n| x = std::hint::black_box(x.wrapping_mul(n | 1)));
        }
        assert!(!threads(me).unwrap().is_empty());
        assert!(threads(-1).is_err());
    }
}
