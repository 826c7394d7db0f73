//! Guests under Ballast, all of one salt.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::{HostChange, Salt, VmView};
use ballast_qemu::proc_text;
use ballast_units::Bytes;

use super::{Load, Plan, Reclaimed, Side, warm_up};
use crate::console::{Event, Story};
use crate::experiments::stage::Stage;
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};

const SALT: &str = "overcommit";
/// The default is 30 s; steps here take less than three of those.
const SAMPLE_PERIOD: Duration = Duration::from_secs(10);

/// Guests that serve somebody tell every two seconds what they did. One that is silent for so long is held up, or lost.
const SILENCE: Duration = Duration::from_secs(30);

/// One manager, with a guest for each load.
pub struct Ours {
    stage: Stage,
    /// When each guest that serves somebody told something last.
    heard: Vec<Option<Instant>>,
}

impl Ours {
    /// Booted when this returns, with twice the memory that they have together. Err, too, where one is not paged.
    pub async fn start(plan: &Plan, image: &Image, side: Side) -> Result<Ours> {
        let order = if side == Side::BalloonFirst { "balloon-first" } else { "automatic" };
        // Plenty, until the first step says how much.
        let mut stage = Stage::new(&Options {
            sharing: Some(SharingOptions::brisk()),
            sample_period: Some(SAMPLE_PERIOD),
            tools_order: order,
            ..Options::budget(Bytes(plan.configured().0 * 2))
        })?;
        for (n, load) in plan.guests.iter().enumerate() {
            let name = format!("{}{}", load.work, n + 1);
            let consoles = stage.manager.consoles();
            let mut guest = Guest::new(&name, plan.memory, &consoles).run(&load.command);
            if let Some(size) = load.disk {
                let disk = stage.manager.disk(&name);
                image::empty_disk(&disk, size)?;
                warm_up(&disk)?;
                guest = guest.disk(disk);
            }
            let salt = Salt::try_from(SALT)?;
            let vm = stage.add(&guest, image, |spec| {
                spec.salt = Some(salt);
                spec.no_balloon = side == Side::Paging;
            });
            let vm = vm.await?;
            if let Some(why) = vm.management.reason {
                anyhow::bail!("{name} is not paged: {why}");
            }
        }
        stage.wait_for_boot().await?;
        let serves = |load: &Load| (load.asked > 0.0).then(Instant::now);
        Ok(Ours { stage, heard: plan.guests.iter().map(serves).collect() })
    }

    /// Err: a guest's trouble, or its silence, or the manager has ended.
    pub async fn poll(&mut self) -> Result<Vec<(usize, Event)>> {
        let events = self.stage.poll()?;
        for (guest, _) in &events {
            self.heard[*guest] = self.heard[*guest].map(|_| Instant::now());
        }
        if let Some(guest) = silent(&self.heard, Instant::now()) {
            bail!("silent for {} s: {}", SILENCE.as_secs(), self.what_it_does(guest).await);
        }
        Ok(events)
    }

    /// What a guest has, where the threads of its VMM wait, how many of them the manager has yet to serve (`pending` are those
    /// of which it has not read, `total` all), and the end of its console.
    async fn what_it_does(&self, guest: usize) -> String {
        let (name, console) = &self.stage.guests[guest];
        let mut text = name.clone();
        let vm = self.stage.manager.client().vm(name).await;
        let _ = writeln!(text, " {vm:?}");
        let pid = vm.ok().and_then(|vm| vm.pid);
        let threads = pid.map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")));
        for thread in threads.and_then(Result::ok).into_iter().flatten().flatten() {
            let read = |name| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let _ =
                writeln!(text, "  {} in {}: {}", read("comm").trim(), read("wchan"), read("stat"));
        }
        let manager = self.stage.manager.pid().ok().map(i32::unsigned_abs);
        for pid in pid.into_iter().chain(manager) {
            let _ = writeln!(text, "  faults that wait, by {pid}: {:?}", faults_that_wait(pid));
        }
        let _ = writeln!(text, "{}\n{}", console.tail(5), self.stage.manager.last_words());
        text
    }

    /// In the order of the plan's guests.
    pub fn stories(&self) -> Vec<&Story> {
        self.stage.guests.iter().map(|(_, console)| &console.story).collect()
    }

    /// In force when this returns; the memory comes free later.
    pub async fn set_budget(&mut self, budget: Bytes) -> Result<()> {
        let change = HostChange { budget: Some(budget.0), ..HostChange::default() };
        let host = self.stage.manager.client().change_host(&change).await?;
        ensure!(host.budget == budget.0, "the budget became {}", Bytes(host.budget));
        Ok(())
    }

    /// Of the VMMs.
    pub async fn pids(&self) -> Result<Vec<u32>> {
        Ok(self.stage.views().await?.1.iter().filter_map(|vm| vm.pid).collect())
    }

    /// CPU seconds of the guests' processes and of the manager.
    pub async fn cpu_s(&self) -> Result<f64> {
        let (host, vms) = self.stage.views().await?;
        Ok(host.manager_cpu_s + vms.iter().map(|vm| vm.counters.cpu_s).sum::<f64>())
    }

    /// Seconds for which idle processors were kept awake.
    pub async fn awake_s(&self) -> Result<f64> {
        Ok(self.stage.manager.client().host().await?.awake_s)
    }

    /// Faults on pages of a tier, without what was brought with them.
    pub async fn returns(&self) -> Result<u64> {
        let of = |vm: &VmView| {
            let (c, back) = (&vm.counters, vm.counters.swapped_in + vm.compression.restored);
            Bytes(back.saturating_sub(c.read_ahead + c.brought_around)).pages().0
        };
        Ok(self.stage.views().await?.1.iter().map(of).sum())
    }

    /// Pages that came back from a tier, those that were brought with others included.
    pub async fn back(&self) -> Result<u64> {
        let of = |vm: &VmView| Bytes(vm.counters.swapped_in + vm.compression.restored).pages().0;
        Ok(self.stage.views().await?.1.iter().map(of).sum())
    }

    /// Now.
    pub async fn reclaimed(&self) -> Result<Reclaimed> {
        let (host, vms) = self.stage.views().await?;
        let sum = |of: fn(&ballast_api::MemoryView) -> u64| {
            Bytes(vms.iter().map(|vm| of(&vm.memory)).sum())
        };
        Ok(Reclaimed {
            ballooned: sum(|m| m.ballooned),
            compressed: sum(|m| m.compressed + m.filled),
            swapped: sum(|m| m.swapped),
            saved: Bytes(host.sharing.saved),
            used: Bytes(host.measured_used),
            at_hand: sum(|m| m.resident + m.shared + m.broken + m.staged),
            passing: Bytes::default(),
            vmms: vms.iter().map(own).sum::<Result<Bytes>>()?,
        })
    }

    /// Err, too, of what was left behind.
    pub async fn end(self) -> Result<()> {
        self.stage.end().await.map(drop).context("ending")
    }
}

/// One that has told nothing for too long by `now`.
fn silent(heard: &[Option<Instant>], now: Instant) -> Option<usize> {
    heard.iter().position(|at| at.is_some_and(|at| now.saturating_duration_since(at) > SILENCE))
}

/// A VMM's own memory. The copies of shared pages are anonymous, too, but the guest's.
fn own(vm: &VmView) -> Result<Bytes> {
    let pid = vm.pid.with_context(|| format!("{} has no process", vm.name))?;
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let own = own_by(&text).with_context(|| format!("{path}: no RssAnon, or no VmPTE"))?;
    Ok(own.saturating_sub(Bytes(vm.memory.broken)))
}

/// By /proc/PID/status: the guest's RAM is a shared file, and all that is anonymous beside it, with the page tables
/// that the kernel keeps for all.
fn own_by(status: &str) -> Option<Bytes> {
    Some(proc_text::status_field(status, "RssAnon")? + proc_text::status_field(status, "VmPTE")?)
}

/// What the kernel tells of the faults that wait on each userfaultfd of a process.
fn faults_that_wait(pid: u32) -> Vec<String> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let waits = files.filter_map(|file| {
        let what = std::fs::read_link(file.path()).ok()?;
        ballast_uffd::is_link(what.as_os_str().as_encoded_bytes()).then_some(())?;
        let number = file.file_name().into_string().ok()?;
        let told = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let counts = told.lines().filter(|l| l.starts_with("pending") || l.starts_with("total"));
        Some(counts.collect::<Vec<_>>().join(" ").replace('\t', " "))
    });
    waits.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_that_wait_are_told_of_each_userfaultfd() {
        let Ok(_one) = ballast_uffd::Uffd::open() else {
            return eprintln!("SKIPPED: no userfaultfd");
        };
        let told = faults_that_wait(std::process::id());
        assert!(told.iter().any(|of| of == "pending: 0 total: 0"), "{told:?}");
        assert!(faults_that_wait(0).is_empty());
    }

    #[test]
    fn one_that_tells_nothing_is_found_and_one_that_serves_nobody_is_not_asked() {
        let now = Instant::now();
        let later = now + SILENCE + Duration::from_secs(1);
        assert_eq!(silent(&[Some(now), None], now + SILENCE), None);
        assert_eq!(silent(&[None, Some(later), Some(now)], later), Some(2));
        assert_eq!(silent(&[None, Some(later)], later), None);
    }

    #[test]
    fn a_vmms_own_memory_is_told_without_its_guests() {
        let status = "Name:\tqemu\nVmRSS:\t  300000 kB\nRssAnon:\t   50000 kB\nRssFile:\t   9000 kB\n\
                      RssShmem:\t  241000 kB\nVmPTE:\t     900 kB\nVmSwap:\t       8 kB\n";
        assert_eq!(own_by(status), Some(Bytes(50_900 << 10)));
        assert_eq!(own_by(&status.replace("VmPTE", "VmPMD")), None);
        let mine = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(own_by(&mine).unwrap() > Bytes::ZERO);
    }
}
