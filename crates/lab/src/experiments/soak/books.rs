//! What the manager says of itself must add up; and what the kernel says of its process.

use anyhow::{Context, Result};
use ballast_api::{HostView, Mode, RunState, VmView};
use ballast_qemu::proc_text;
use ballast_units::Bytes;

/// Answers are not of one instant: pages move between them.
const SLACK: u64 = 1 << 20;

/// What was handed out at one instant beyond `most`, the largest budget that this manager has had; bytes.
pub fn over(host: &HostView, most: u64) -> u64 {
    host.measured_peak.max(host.peak_used).saturating_sub(most)
}

/// What does not add up, in words; None if all does.
pub fn unsound(host: &HostView, vms: &[VmView]) -> Option<String> {
    let booked = host.consumed + host.overhead;
    let used = host.budget.saturating_sub(host.free);
    // Of a budget that was just lowered, nothing is free, and more may be in use.
    if used > booked + SLACK || host.free > 0 && used + SLACK < booked {
        return Some(format!("{used} handed out, {booked} booked"));
    }
    let of_vms: u64 = vms.iter().map(|vm| vm.memory.consumed + vm.memory.overhead).sum();
    if of_vms > booked + SLACK {
        return Some(format!("VMs have {of_vms}, the host {booked}"));
    }
    if host.measured_used > booked + SLACK {
        return Some(format!("the kernel counts {}, the books say {booked}", host.measured_used));
    }
    vms.iter().find_map(unsound_vm)
}

/// What is handed out beyond the budget, in words; None if nothing.
pub fn unmet(host: &HostView) -> Option<String> {
    let booked = host.consumed + host.overhead;
    let (budget, free) = (host.budget, host.free);
    (booked > budget + SLACK)
        .then(|| format!("{booked} booked of a budget of {budget}, {free} free"))
}

fn unsound_vm(vm: &VmView) -> Option<String> {
    let m = &vm.memory;
    let home = m.untouched + m.resident + m.shared + m.broken;
    let all = home + m.compressed + m.filled + m.staged + m.swapped + m.ballooned;
    if all.abs_diff(vm.params.size) > SLACK {
        return Some(format!("{}: pages of {all} bytes, of {}", vm.name, vm.params.size));
    }
    if m.swapped > m.swap_reserved || m.consumed > vm.params.size {
        return Some(format!("{}: more than there is: {m:?}", vm.name));
    }
    None
}

/// Why not all of `names` are served by the manager, and nobody else.
pub fn unserved(vms: &[VmView], names: &[&str]) -> Option<String> {
    for name in names {
        let Some(vm) = vms.iter().find(|vm| vm.name == **name) else {
            return Some(format!("{name} is not there"));
        };
        if vm.state != RunState::Running || vm.management.mode != Mode::Paged || vm.stalled {
            return Some(format!("{name}: {:?}, {:?}, {:?}", vm.state, vm.management, vm.trouble));
        }
    }
    let other = vms.iter().find(|vm| !names.contains(&vm.name.as_str()));
    other.map(|vm| format!("{} is still there", vm.name))
}

/// What a host without VMs still has, in words; None if nothing.
pub fn left(host: &HostView) -> Option<String> {
    let things = [
        ("VMs", u64::from(host.vms)),
        ("consumed", host.consumed),
        ("swap reserved", host.swap_reserved),
        ("swap used", host.swap_used),
        ("shared", host.sharing.shared),
        ("common pages", host.sharing.common),
        ("broken", host.sharing.broken),
        ("compressed", host.compression.compressed),
        ("compressed cache", host.compression.cache),
        ("locations' files", host.swap_locations.iter().map(|l| l.reserved).sum()),
        // The zeros that guests read are there from the start.
        ("overhead beside zeros", host.overhead.saturating_sub(2 << 20)),
        ("handed out", (host.budget - host.free).saturating_sub(host.overhead)),
    ];
    let found: Vec<String> =
        things.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{what}: {n}")).collect();
    (!found.is_empty()).then(|| found.join(", "))
}

/// A process as the kernel sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Process {
    /// All that is resident.
    pub rss: Bytes,
    /// Of that, what no file is behind.
    pub anon: Bytes,
    /// Open descriptors, a count.
    pub fds: usize,
    /// Threads, a count.
    pub threads: usize,
    /// Of those, what the runtime has: for its tasks, and for what blocks (each ends after 10 s without work).
    pub runtime: usize,
    /// And what the kernel started for io_uring requests that would wait (each ends after 5 s without work).
    pub uring: usize,
}

impl Process {
    /// Err: it is gone.
    pub fn read(pid: i32) -> Result<Process> {
        let path = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).context(path)?.count();
        let names = thread_names(pid);
        let of = |kind: &str| names.iter().filter(|name| name.starts_with(kind)).count();
        let (runtime, uring) = (of("tokio-"), of("iou-"));
        Ok(Process { fds, runtime, uring, ..Process::parse(&status) })
    }

    fn parse(status: &str) -> Process {
        let memory = |key: &str| proc_text::status_field(status, key).unwrap_or(Bytes::ZERO);
        Process {
            rss: memory("VmRSS"),
            anon: memory("RssAnon"),
            threads: proc_text::status_number(status, "Threads").unwrap_or(0),
            ..Process::default()
        }
    }
}

fn thread_names(pid: i32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// What a process has open, and its threads' names: for those who look for what it keeps.
pub fn open(pid: i32) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let fds = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let fds = fds.map(|target| format!("open: {}", target.display()));
    let threads = thread_names(pid).into_iter();
    fds.chain(threads.map(|name| format!("thread: {}", name.trim_end()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostView {
        let text = r#"{"version":"0","pid":1,"uptime_s":0,"budget":104857600,"free":62914560,
            "consumed":31457280,"overhead":10485760,"peak_used":41943040,"measured_used":41943040,
            "measured_peak":41943040,"state":"high","thresholds":[],"overcommit":1,
            "overcommit_peak":1,"tax":0.75,"vms":0,"swap_reserved":0,"swap_used":0,"accel":"tcg",
            "manager_cpu_s":0,"manager_rss":0,"counters":{"ballooned":0,"swapped_out":0,
            "swapped_in":0,"zero_dropped":0,"faults":0,"waits":0,"blocks":0}}"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn books_that_do_not_add_up_are_told() {
        let good = host();
        assert_eq!(unsound(&good, &[]), None);
        assert_eq!((over(&good, good.budget), over(&good, 40 << 20)), (0, 0));
        assert_eq!(over(&good, 39 << 20), 1 << 20);
        let lost = HostView { free: good.free - (2 << 20), ..good.clone() };
        assert!(unsound(&lost, &[]).unwrap().contains("booked"));
        let secret = HostView { measured_used: 60 << 20, ..good.clone() };
        assert!(unsound(&secret, &[]).unwrap().contains("kernel"));
        // Lowered below what is in use.
        let lowered = HostView { budget: 32 << 20, free: 0, ..good };
        assert_eq!(unsound(&lowered, &[]), None);
    }

    #[test]
    fn a_host_without_vms_has_nothing_but_its_zeros() {
        let full = host();
        assert!(left(&full).unwrap().contains("consumed"));
        let free = full.budget - (2 << 20);
        let empty = HostView { consumed: 0, overhead: 2 << 20, free, ..full };
        assert_eq!(left(&empty), None);
        let leaked = HostView { free: free - 4096, ..empty };
        assert_eq!(left(&leaked).unwrap(), "handed out: 4096");
        assert_eq!(unserved(&[], &["a"]).unwrap(), "a is not there");
        assert_eq!(unserved(&[], &[]), None);
    }

    #[test]
    fn a_process_is_read() {
        let text = "Name:\tx\nVmRSS:\t    2048 kB\nRssAnon:\t 1024 kB\nThreads:\t7\n";
        let read = Process::parse(text);
        let (rss, anon) = (Bytes(2 << 20), Bytes(1 << 20));
        let want = Process { rss, anon, threads: 7, ..Process::default() };
        assert_eq!(read, want);
        let me = std::process::id() as i32;
        let named = |name: &str| {
            std::thread::Builder::new().name(name.into()).spawn(std::thread::park).unwrap()
        };
        let kinds = |process: Process| (process.runtime, process.uring);
        let before = kinds(Process::read(me).unwrap());
        // A thread names itself when it begins to run.
        let threads = [named("tokio-rt-worker"), named("iou-wrk-1"), named("iou-wrk-2")];
        while kinds(Process::read(me).unwrap()) != (before.0 + 1, before.1 + 2) {
            std::thread::yield_now();
        }
        threads.iter().for_each(|thread| thread.thread().unpark());
        assert!(Process::read(me).unwrap().fds > 2);
        assert!(open(me).iter().any(|what| what.starts_with("thread: ")));
    }
}
