//! Guests under Ballast, all of one salt.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ballast_api::{HostChange, Salt, VmView};
use ballast_qemu::proc_text;
use ballast_units::Bytes;

use super::{Plan, Reclaimed, Side, warm_up};
use crate::console::{Event, Story};
use crate::experiments::stage::Stage;
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};

const SALT: &str = "overcommit";
/// The default is 30 s; steps here take less than three of those.
const SAMPLE_PERIOD: Duration = Duration::from_secs(10);

/// One manager, with a guest for each load.
pub struct Ours {
    stage: Stage,
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
        Ok(Ours { stage })
    }

    /// Err: a guest's trouble, or the manager has ended.
    pub fn poll(&mut self) -> Result<Vec<(usize, Event)>> {
        self.stage.poll()
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

#[cfg(test)]
mod tests {
    use super::*;

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
