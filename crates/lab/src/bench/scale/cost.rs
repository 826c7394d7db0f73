//! What the manager takes while a stretch of time passes: CPU by kind of thread, and memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::client::Client;
use ballast_qemu::proc_text;

use super::super::sharing::cpu;
use crate::manager::Manager;
use crate::stats::median;

/// Threads come and go (the runtime's, for calls that block): they are looked at this often.
const LOOK: Duration = Duration::from_secs(1);
/// So many questions make a median.
const ASKED: usize = 9;

const KINDS: [&str; 8] =
    ["fault", "reclaim", "share", "policy", "measure", "journal", "shim", "other"];

/// What a stretch of time took.
pub struct Cost {
    /// Percent of a core, all threads.
    pub cpu: f64,
    /// The same by kind of thread; see `KINDS`.
    pub kinds: BTreeMap<&'static str, f64>,
    /// Milliseconds of CPU that a turn of the policy thread took.
    pub turn_ms: f64,
}

/// Memory of the manager, bytes.
#[derive(Clone, Copy)]
pub struct Held {
    /// Heap and stacks.
    pub heap: u64,
    /// All that is mapped and resident, files included.
    pub resident: u64,
    /// Its files on the runtime tmpfs, mapped or not.
    pub files: u64,
}

/// Nanoseconds on a CPU so far, by thread.
struct Threads(BTreeMap<i32, (String, f64)>);

impl Threads {
    fn look(&mut self, pid: i32) -> Result<()> {
        for (tid, name) in cpu::threads(pid)? {
            // One that has just ended keeps what was seen last.
            if let Ok(seconds) = cpu::thread_s(pid, tid) {
                self.0.insert(tid, (name, seconds));
            }
        }
        Ok(())
    }
}

/// Measures for `window`; `each_second` is called every second.
pub async fn watch<F>(manager: &Manager, window: Duration, mut each_second: F) -> Result<Cost>
where
    F: AsyncFnMut() -> Result<()>,
{
    let pid = manager.pid()?;
    let turns = async || Ok::<_, anyhow::Error>(manager.client().host().await?.journal.written);
    let turns_before = turns().await?;
    let mut before = Threads(BTreeMap::new());
    before.look(pid)?;
    let mut after = Threads(BTreeMap::new());
    let begin = Instant::now();
    let mut second = tokio::time::interval(LOOK);
    while begin.elapsed() < window {
        second.tick().await;
        each_second().await?;
        after.look(pid)?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    after.look(pid)?;
    let turns = turns().await? - turns_before;
    let mut kinds: BTreeMap<&'static str, f64> = KINDS.map(|kind| (kind, 0.0)).into();
    for (tid, (name, spent)) in &after.0 {
        // A thread that was not there before began at nothing.
        let earlier = before.0.get(tid).map_or(0.0, |b| b.1);
        *kinds.entry(kind(name)).or_default() += (spent - earlier).max(0.0);
    }
    let turn_ms = kinds.get("policy").copied().unwrap_or_default() * 1e3 / turns.max(1) as f64;
    for spent in kinds.values_mut() {
        *spent *= 100.0 / seconds;
    }
    Ok(Cost { cpu: kinds.values().sum(), kinds, turn_ms })
}

fn kind(thread: &str) -> &'static str {
    // "shims" takes in, "shim" is one handshake.
    let known = KINDS.iter().find(|kind| thread.starts_with(**kind));
    known.copied().unwrap_or("other")
}

/// Now.
pub fn held(manager: &Manager) -> Result<Held> {
    let status = format!("/proc/{}/status", manager.pid()?);
    let text = std::fs::read_to_string(&status).with_context(|| status.clone())?;
    let field = |key: &str| {
        proc_text::status_field(&text, key).with_context(|| format!("{key} in {status}"))
    };
    Ok(Held {
        heap: field("RssAnon")?.0,
        resident: field("VmRSS")?.0,
        files: taken_below(&manager.run_dir()),
    })
}

/// Bytes that files below a folder take.
fn taken_below(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let taken = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => taken_below(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    });
    taken.sum()
}

/// Milliseconds until all VMs are told, as `ballast vm ls` asks.
pub async fn list_ms(client: &Client) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ASKED {
        let begin = Instant::now();
        client.vms().await?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(&times))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_told_apart_and_files_are_counted() {
        let kinds = ["fault-vm3", "shims", "shim", "tokio-rt-worker", "share-a"].map(kind);
        assert_eq!(kinds, ["fault", "shim", "shim", "other", "share"]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a/b"), [1; 5000]).unwrap();
        assert!(taken_below(dir.path()) >= 5000);
    }
}
