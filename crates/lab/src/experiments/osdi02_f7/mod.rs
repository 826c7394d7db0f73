//! OSDI'02, figure 7: the idle memory tax. Two VMs of 256 MB with equal shares have 360 MB: the first
//! is idle after its boot, the second runs dbench. Without a tax each has 179 MB; with one of 75%, set
//! in mid-run, memory moves to the second, whose throughput grows by over 30%.
//!
//! Here the first guest is a Linux that writes zeros to all of its memory when it boots, as the
//! paper's Windows does. The second runs dbench, and then, in a run of its own, file reads whose rate
//! depends on the page cache: dbench's does not, on an emulated processor (NOTES.md). Its disk is
//! limited to what a disk of those days gave: from the host's page cache, reading a file again would
//! cost next to nothing, and memory would be worth as little. Page sharing is off: it would make of the
//! first guest's zeros what no policy has to move.
//!
//! After the paper's two phases the same guests run under the other policies, each from where no tax
//! had brought them.

mod report;
mod watch;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use ballast_api::HostChange;
use ballast_policy::policies::PolicyKind;
use ballast_units::Bytes;

use super::Measured;
use super::kinds;
use super::stage::Stage;
use crate::figures::Table;
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};
use crate::say;

const NAME: &str = "osdi02-f7";
const MEMORY: Bytes = Bytes::from_mib(256);
/// For VMs, without what they cost beside their pages.
const FOR_VMS: Bytes = Bytes::from_mib(360);
/// The disk of the second VM: bytes and operations per second.
const DISK: (u64, u32) = (20 << 20, 100);
/// The paper's period is 30 s; with a shorter one the estimate settles sooner, at the same value.
const PERIOD: Duration = Duration::from_secs(10);
const TAX: f64 = 0.75;

/// What the second guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Replays what a file server's clients do.
    Dbench,
    /// Reads files of 256 KiB, any of them next, and writes one in sixteen: 160 MiB, more than a page
    /// cache of 179 MiB of memory has, and less than one of 256 MiB.
    Files,
}

impl Load {
    const ALL: [Load; 2] = [Load::Dbench, Load::Files];

    fn name(self) -> &'static str {
        match self {
            Load::Dbench => "dbench",
            Load::Files => "files",
        }
    }

    /// Its command line, for so many seconds.
    fn command(self, seconds: u64) -> String {
        match self {
            // As dbench was in 2002, it does not flush what it has written.
            Load::Dbench => {
                format!("dbench --clients 40 --seconds {seconds} --load unflushed.txt --every 10")
            }
            // All files at all times: the sine that their number follows stays at its top.
            Load::Files => {
                "files --dir /disk --mb 160 --file-kb 256 --rate-mb 0 --period 1000000 --phase 0.5"
                    .to_owned()
            }
        }
    }
}

/// A time under one policy and one tax.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Phase {
    kind: PolicyKind,
    tax: f64,
    seconds: u64,
    /// In figures' names; None: it only brings memory back.
    figure: Option<Figure>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Untaxed,
    Taxed,
    Alternative,
}

/// How long phases take, seconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    before: u64,
    after: u64,
    back: u64,
    alternative: u64,
}

impl Times {
    /// The paper's two phases, and those of the other policies.
    fn phases(self, kinds: &[PolicyKind]) -> Vec<Phase> {
        let default = PolicyKind::default();
        let phase = |kind, tax, seconds, figure| Phase { kind, tax, seconds, figure };
        let mut phases = vec![
            phase(default, 0.0, self.before, Some(Figure::Untaxed)),
            phase(default, TAX, self.after, Some(Figure::Taxed)),
        ];
        for kind in kinds {
            phases.push(phase(default, 0.0, self.back, None));
            phases.push(phase(*kind, TAX, self.alternative, Some(Figure::Alternative)));
        }
        phases
    }
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    let times = if quick {
        Times { before: 30, after: 40, back: 20, alternative: 30 }
    } else {
        Times { before: 110, after: 140, back: 50, alternative: 110 }
    };
    let template = tempfile::Builder::new().prefix("ballast-disk-").tempdir()?;
    let disk = template.path().join("dbench.img");
    say::step("Building the disk with dbench");
    image::dbench_disk(&disk, Bytes::from_mib(2048))?;
    let with_agent = image::agent_disk(image)?;
    let mut table = Table::new(&watch::COLUMNS);
    let mut runs = Vec::new();
    for (number, load) in Load::ALL.into_iter().enumerate() {
        // The other policies with the load that shows what memory is worth.
        let (kinds, disk): (&[PolicyKind], &Path) = match load {
            Load::Files => (kinds::ALTERNATIVES, &with_agent),
            Load::Dbench => (&[], &disk),
        };
        let phases = times.phases(kinds);
        one(image, disk, number, &phases, &mut table).await?;
        runs.push((load, phases));
    }
    Ok(report::evaluate(table, &runs))
}

/// Two guests, the second with one load, through all phases.
async fn one(
    image: &Image,
    disk: &Path,
    number: usize,
    phases: &[Phase],
    table: &mut Table,
) -> Result<()> {
    let load = Load::ALL[number];
    // What guests wait for is told by their agents, where a policy reads it.
    let agent = load == Load::Files;
    let mut stage = Stage::new(&options(PolicyKind::default()))?;
    say::step(&format!("VM1: {MEMORY}, all of it cleared, idle"));
    let mut idle = Guest::new("vm1", MEMORY, &stage.manager.consoles()).clears_memory();
    if agent {
        idle = idle.run("agent").shared_disk(disk.to_owned());
    }
    stage.add(&idle, image, |spec| spec.guest_agent = Some(agent)).await?;
    stage.wait_for_boot().await?;
    say::step(&format!("VM2: {MEMORY}, {}", load.name()));
    // Some more for its warm-up, which dbench takes a fifth of it for, and to last to the end.
    let seconds = phases.iter().map(|p| p.seconds).sum::<u64>() + 120;
    let mut busy = Guest::new("vm2", MEMORY, &stage.manager.consoles())
        .run(load.command(seconds))
        // Linux 2.4 kept more of what is written in memory than today's.
        .kernel("sysctl.vm.dirty_ratio=60")
        .kernel("sysctl.vm.dirty_background_ratio=30")
        .shared_disk(disk.to_owned());
    if agent {
        busy = busy.run("agent");
    }
    let change = |spec: &mut ballast_api::VmSpec| {
        slow_down(&mut spec.extra);
        spec.guest_agent = Some(agent);
    };
    stage.add(&busy, image, change).await?;
    stage.wait_for_boot().await?;
    limit(&stage).await?;
    watch::ready(&mut stage, load).await?;
    watch::watch(&mut stage, number, phases, table).await?;
    stage.end().await.map(drop)
}

fn options(kind: PolicyKind) -> Options {
    Options {
        tax: Some(0.0),
        sample_period: Some(PERIOD),
        sharing: Some(SharingOptions::off()),
        // What is kept free is the paper's, so that `FOR_VMS` can be given and no more: by default less is kept
        // where less is needed.
        more: format!("thresholds = \"percent\"\n{}", kinds::toml(kind)),
        ..Options::budget(Bytes::from_mib(1024))
    }
}

/// Makes the guest's drive as slow as a disk.
fn slow_down(arguments: &mut [String]) {
    let (bytes, operations) = DISK;
    for drive in arguments.iter_mut().filter(|a| a.starts_with("file=")) {
        drive.push_str(&format!(
            ",throttling.bps-total={bytes},throttling.iops-total={operations},\
             throttling.bps-total-max={bytes},throttling.iops-total-max={operations}"
        ));
    }
}

/// Lowers the budget so far that just `FOR_VMS` can be given to VMs.
async fn limit(stage: &Stage) -> Result<()> {
    let host = stage.manager.client().host().await?;
    // Reclamation aims at 6.5% of the budget.
    let budget = Bytes(((FOR_VMS.0 + host.overhead) as f64 / 0.935) as u64 >> 12 << 12);
    let change = HostChange { budget: Some(budget.0), ..HostChange::default() };
    stage.manager.client().change_host(&change).await.context("the budget")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_drive_is_slowed_down() {
        let mut arguments = vec!["-drive".to_owned(), "file=/a,if=none".to_owned()];
        slow_down(&mut arguments);
        assert_eq!(arguments[0], "-drive");
        assert!(arguments[1].starts_with("file=/a,if=none,throttling.bps-total=20971520,"));
    }

    #[test]
    fn every_alternative_starts_from_where_no_tax_leads() {
        let times = Times { before: 1, after: 2, back: 3, alternative: 4 };
        let phases = times.phases(&[PolicyKind::GraduatedTax, PolicyKind::MissRatio]);
        assert_eq!(phases.len(), 6);
        assert!(phases.iter().step_by(2).all(|p| p.tax == 0.0));
        assert!(phases.iter().skip(1).step_by(2).all(|p| p.tax == TAX));
        assert_eq!(phases[5].kind, PolicyKind::MissRatio);
    }
}
