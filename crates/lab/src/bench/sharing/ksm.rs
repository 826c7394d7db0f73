//! The kernel's scanner: its settings, which are put back whatever happens, and its counters.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::tools;

const FOLDER: &str = "/sys/kernel/mm/ksm";

/// What is changed here, in the order in which it can be put back: with an advisor on, the kernel
/// refuses pages_to_scan.
const SETTINGS: [&str; 3] = ["pages_to_scan", "sleep_millisecs", "advisor_mode"];

/// How the scanner is run.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// In figures' names.
    pub name: &'static str,
    /// In one go.
    pub pages_to_scan: u32,
    /// Between two of them.
    pub sleep_millisecs: u32,
    /// Whether the kernel chooses the pages of one go itself (Linux 6.8 and later).
    pub advisor: bool,
}

/// Those that are compared with.
pub const MODES: [Mode; 3] = [
    // The kernel's own defaults.
    Mode { name: "default", pages_to_scan: 100, sleep_millisecs: 20, advisor: false },
    Mode { name: "fast", pages_to_scan: 5000, sleep_millisecs: 1, advisor: false },
    Mode { name: "advisor", pages_to_scan: 100, sleep_millisecs: 20, advisor: true },
];

/// The kernel's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Passes over all that may be merged.
    pub full_scans: u64,
    /// Pages of machine memory that stand for others, and the pages saved by them.
    pub shared: u64,
    /// Pages saved.
    pub sharing: u64,
    /// Pages looked at.
    pub scanned: u64,
}

/// The scanner, in our hands for the life of this value.
///
/// A process of its own holds the settings as they were and puts them back when its input ends: when
/// this value is dropped, and when this program is killed.
pub struct Ksm {
    keeper: Child,
    input: Option<ChildStdin>,
    ksmd: i32,
}

impl Ksm {
    /// Fails where there is no such scanner, or where somebody else uses it.
    pub fn take() -> Result<Ksm> {
        ensure!(Path::new(FOLDER).is_dir(), "this kernel has no KSM ({FOLDER})");
        let counters = counters()?;
        if read("run")?.trim() == "1" || counters.shared + counters.sharing > 0 {
            bail!("KSM is in use on this host (echo 2 > {FOLDER}/run ends that)");
        }
        if let Some(pid) = tools::processes().find(|pid| is_mergeable(*pid)) {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            bail!("KSM would scan process {pid} ({}) as well: end it first", name.trim_end());
        }
        let ksmd = find_ksmd().context("KSM has no thread ksmd")?;
        let me = std::env::current_exe().context("the path of this program")?;
        let mut keeper = Command::new(me)
            .arg("ksm-keeper")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for this program; the keeper ends after it.
            .process_group(0)
            .spawn()
            .context("starting the keeper of KSM's settings")?;
        let input = keeper.stdin.take();
        let output = keeper.stdout.take().context("the keeper has no output")?;
        let ksm = Ksm { keeper, input, ksmd };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).context("the keeper")?;
        ensure!(line.trim() == "kept", "KSM's settings cannot be kept (run as root)");
        Ok(ksm)
    }

    /// Forgets all merged pages, and starts from nothing. False if the kernel lacks the mode.
    pub fn start(&self, mode: Mode) -> Result<bool> {
        self.forget()?;
        let has_advisor = Path::new(FOLDER).join("advisor_mode").exists();
        if mode.advisor && !has_advisor {
            return Ok(false);
        }
        if has_advisor {
            write("advisor_mode", "none")?;
        }
        write("pages_to_scan", &mode.pages_to_scan.to_string())?;
        write("sleep_millisecs", &mode.sleep_millisecs.to_string())?;
        if mode.advisor {
            write("advisor_mode", "scan-time")?;
        }
        write("run", "1")?;
        Ok(true)
    }

    /// Every page of its own again; the scanner stops.
    pub fn forget(&self) -> Result<()> {
        write("run", "2")
    }

    /// CPU seconds that the scanner has used since boot.
    pub fn cpu_s(&self) -> Result<f64> {
        super::cpu::thread_s(self.ksmd, self.ksmd)
    }

    /// Puts the settings back. Err: not all could be; the keeper has said on standard error why.
    pub fn end(mut self) -> Result<()> {
        let status = self.stop().context("the keeper of KSM's settings")?;
        ensure!(status.success(), "the keeper of KSM's settings ended with {status}");
        Ok(())
    }

    fn stop(&mut self) -> std::io::Result<ExitStatus> {
        drop(self.input.take());
        self.keeper.wait()
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        // For who cannot act on it; `end` tells.
        let _ = self.stop();
    }
}

/// Of the whole host, since its boot.
pub fn counters() -> Result<Counters> {
    Ok(Counters {
        full_scans: number("full_scans")?,
        shared: number("pages_shared")?,
        sharing: number("pages_sharing")?,
        scanned: number("pages_scanned")?,
    })
}

/// Whether a process has memory that the scanner would look at. QEMU has, unless told otherwise: its
/// firmware's, if not its guest's.
fn is_mergeable(pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap_or_default();
    text.lines().any(|l| l.starts_with("ksm_merge") && l.ends_with(": yes"))
}

/// The kernel's memory for the scanned pages of one process: an item per page, and a node per shared
/// page. Bytes.
pub fn metadata(pid: u32) -> Result<u64> {
    // struct ksm_rmap_item and struct ksm_stable_node are 64 bytes each on 64-bit kernels; sysfs knows.
    let size = |cache: &str| -> u64 {
        fs::read_to_string(format!("/sys/kernel/slab/{cache}/object_size"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(64)
    };
    let path = format!("/proc/{pid}/ksm_stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let items = stat(&text, "ksm_rmap_items").with_context(|| format!("{path}: {text}"))?;
    let nodes = counters()?.shared + number("stable_node_chains").unwrap_or(0);
    Ok(items * size("ksm_rmap_item") + nodes * size("ksm_stable_node"))
}

/// "name value" or "name: value".
fn stat(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim_start_matches(':').trim().parse().ok()
}

/// The keeper's whole life: see `Ksm`.
pub fn keep() -> Result<()> {
    // SAFETY: ignoring a signal runs no code. What ends this program ends the keeper by its input.
    unsafe {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    let before = Saved::read()?;
    // Nothing is changed unless it can be put back.
    before.restore()?;
    println!("kept");
    std::io::stdout().flush().context("standard output")?;
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    before.restore()
}

struct Saved(Vec<(&'static str, String)>);

impl Saved {
    fn read() -> Result<Saved> {
        let there = |name: &&str| Path::new(FOLDER).join(name).exists();
        let names = SETTINGS.into_iter().filter(there).chain(["run"]);
        names.map(|name| Ok((name, value(&read(name)?)))).collect::<Result<_>>().map(Saved)
    }

    fn restore(&self) -> Result<()> {
        let advisor = self.0.iter().find(|(name, _)| *name == "advisor_mode");
        let advised = advisor.is_some_and(|(_, value)| value != "none");
        if advisor.is_some() {
            write("advisor_mode", "none")?;
        }
        // What is merged now was merged by us.
        write("run", "2")?;
        for (name, value) in &self.0 {
            // Under an advisor it is the advisor's, who starts over.
            if !(advised && *name == "pages_to_scan") {
                write(name, value)?;
            }
        }
        Ok(())
    }
}

/// Of "[none] scan-time", the one in brackets.
fn value(text: &str) -> String {
    let chosen = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    chosen.unwrap_or(text.trim()).to_owned()
}

fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

fn read(name: &str) -> Result<String> {
    fs::read_to_string(path(name)).with_context(|| path(name).display().to_string())
}

fn number(name: &str) -> Result<u64> {
    let text = read(name)?;
    text.trim().parse().with_context(|| format!("{}: '{text}'", path(name).display()))
}

fn write(name: &str, text: &str) -> Result<()> {
    File::options()
        .write(true)
        .open(path(name))
        .and_then(|mut f| f.write_all(text.as_bytes()))
        .with_context(|| format!("{} = {text}", path(name).display()))
}

fn find_ksmd() -> Option<i32> {
    // A kernel thread: no command line.
    tools::processes().find(|pid| {
        let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        comm.trim_end() == "ksmd"
            && fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_and_plain_values_are_read() {
        assert_eq!(value("[none] scan-time\n"), "none");
        assert_eq!(value("none [scan-time]\n"), "scan-time");
        assert_eq!(value("100\n"), "100");
    }

    #[test]
    fn statistics_are_found_by_name() {
        let text = "ksm_rmap_items 7\nksm_zero_pages 0\nksm_process_profit: -3\n";
        assert_eq!(stat(text, "ksm_rmap_items"), Some(7));
        assert_eq!(stat(text, "ksm_zero_pages"), Some(0));
        assert_eq!(stat(text, "ksm_merging_pages"), None);
    }
}
