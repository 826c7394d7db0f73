//! How long guests are without a manager when it is killed and started again: until all of them are
//! managed, and until pages that they have waited for meanwhile were served.
//!
//! Five processes of 2 GiB each stand in for VMMs. Their memory is in all the states that a busy host
//! has: less than half at home, some of it swapped (chosen at random, so nothing lies together), some compressed, some
//! shared in runs, some zero.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::client::Client;
use ballast_api::{Mode, RunState, VmView};
use ballast_units::{Bytes, PAGE_SIZE};
use tokio::task::JoinSet;

use super::sharing::{Holder, Shape};
use crate::figures::Outcome;
use crate::manager::{Manager, Options, SharingOptions};
use crate::stats::median;
use crate::{say, tools};

const VMS: usize = 5;
const MIB_EACH: usize = 2048;
/// Some 70% of what the VMs have is unlike anything else, and does not fit in this.
const BUDGET: Bytes = Bytes::from_mib(5632);
const PATIENCE: Duration = Duration::from_secs(300);
/// Seconds per 10 GiB.
const TARGET: f64 = 1.0;

pub async fn run(quick: bool) -> Result<Outcome> {
    let mut options = Options::budget(BUDGET);
    options.sharing = Some(SharingOptions::as_fast_as_it_goes());
    let mut manager = Manager::start(&options)?;
    let mut holders = start_all(&manager).await?;
    let mix = Mix::of(&manager.client().vms().await?);
    let (mut managed, mut served) = (Vec::new(), Vec::new());
    for n in 0..if quick { 1 } else { 5 } {
        say::detail(&Mix::of(&manager.client().vms().await?).text());
        let times = round(&mut manager, &options, &mut holders, n).await?;
        managed.push(times.0);
        served.push(times.1);
    }
    // Not a byte was lost. All of them would take minutes, since half of it must come from the disk.
    holders[0].check().await?;
    for holder in holders {
        holder.end().await?;
    }
    let (_, left) = manager.finish().await?;
    ensure!(left.is_empty(), "left behind: {}", left.join(", "));
    Ok(outcome(&mix, &managed, &served))
}

/// All of them, their memory written and in the states that it is to be in.
async fn start_all(manager: &Manager) -> Result<Vec<Holder>> {
    let mut holders = Vec::new();
    for n in 0..VMS {
        holders.push(start(manager, n).await?);
    }
    all_paged(manager.client()).await?;
    for (n, holder) in holders.iter_mut().enumerate() {
        holder.fill().await?;
        say::detail(&format!("vm{n}: {MIB_EACH} MiB written"));
    }
    settle(manager.client()).await?;
    Ok(holders)
}

/// The manager dies and comes again: seconds until all VMs are managed, and until what they had waited for was served.
async fn round(
    manager: &mut Manager,
    options: &Options,
    holders: &mut Vec<Holder>,
    n: u64,
) -> Result<(f64, f64)> {
    manager.kill()?;
    // Each writes to a page that nothing backs, and waits.
    let mut touching = JoinSet::new();
    for mut holder in holders.drain(..) {
        touching.spawn(async move {
            let written = holder.write("zero", 1, 1000 + n).await;
            (holder, written, Instant::now())
        });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let waiting = touching.len();
    let begin = Instant::now();
    manager.restart(options)?;
    all_paged(manager.client()).await?;
    let managed = begin.elapsed().as_secs_f64();
    let mut last = Duration::ZERO;
    while let Some(done) = touching.join_next().await {
        let (holder, written, at) = done.context("a holder's task")?;
        written?;
        ensure!(at > begin, "a VM did not wait for the manager");
        last = last.max(at.saturating_duration_since(begin));
        holders.push(holder);
    }
    let served = last.as_secs_f64();
    say::detail(&format!("managed after {managed:.3} s, {waiting} VMs served after {served:.3} s"));
    Ok((managed, served))
}

fn outcome(mix: &Mix, managed: &[f64], served: &[f64]) -> Outcome {
    let gib = (VMS * MIB_EACH) as f64 / 1024.0;
    let mut outcome = Outcome::new("restart");
    outcome.figure("guests_gib", gib);
    mix.to_figures(&mut outcome);
    outcome.figure("managed_s", median(managed));
    outcome.figure("served_s", median(served));
    let worst = managed.iter().chain(served).copied().fold(0.0, f64::max);
    outcome.figure("worst_s", worst);
    let both = median(managed).max(median(served));
    outcome.at_most("s_per_10_gib", both * 10.0 / gib, TARGET);
    // Else nothing is said of how long it takes to find compressed pages again.
    outcome.at_least("compressed_part", mix.part("compressed_part"), 0.01);
    outcome
}

async fn start(manager: &Manager, n: usize) -> Result<Holder> {
    let shape = Shape { mib: MIB_EACH, seed: 1 + n as u64, run: 16 };
    let size = shape.pages() * PAGE_SIZE;
    let environment = BTreeMap::from([
        ("LD_PRELOAD", OsString::from(tools::sibling("libballast_shim.so")?)),
        ("BALLAST_VM", format!("vm{n}").into()),
        ("BALLAST_SHIM_SOCKET", manager.shim_socket().into()),
        ("BALLAST_RAM_SIZE", size.to_string().into()),
    ]);
    Holder::start(shape, true, &environment)
}

async fn all_paged(client: &Client) -> Result<()> {
    let begin = Instant::now();
    loop {
        let vms = client.vms().await?;
        let paged =
            |vm: &&VmView| vm.state == RunState::Running && vm.management.mode == Mode::Paged;
        if vms.iter().filter(paged).count() == VMS {
            return Ok(());
        }
        ensure!(begin.elapsed() < PATIENCE, "not all are managed: {vms:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Until sharing finds no more, and no more is written out.
async fn settle(client: &Client) -> Result<()> {
    let begin = Instant::now();
    let mut last = (0, 0);
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let host = client.host().await?;
        let now = (host.sharing.shared >> 24, host.counters.swapped_out >> 24);
        if now == last || begin.elapsed() > Duration::from_secs(120) {
            return Ok(());
        }
        last = now;
    }
}

/// Where the VMs' pages are, in parts of their memory.
struct Mix {
    parts: Vec<(&'static str, f64)>,
}

impl Mix {
    fn of(vms: &[VmView]) -> Mix {
        let size: u64 = vms.iter().map(|vm| vm.params.size).sum();
        let part =
            |of: fn(&VmView) -> u64| vms.iter().map(of).sum::<u64>() as f64 / size.max(1) as f64;
        Mix {
            parts: vec![
                ("resident_part", part(|vm| vm.memory.resident)),
                ("swapped_part", part(|vm| vm.memory.swapped)),
                ("compressed_part", part(|vm| vm.memory.compressed)),
                ("shared_part", part(|vm| vm.memory.shared + vm.memory.broken)),
                ("untouched_part", part(|vm| vm.memory.untouched)),
            ],
        }
    }

    fn text(&self) -> String {
        let parts = self
            .parts
            .iter()
            .map(|(name, part)| format!("{} {:.0}%", name.trim_end_matches("_part"), part * 100.0));
        parts.collect::<Vec<_>>().join(", ")
    }

    fn part(&self, name: &str) -> f64 {
        self.parts.iter().find(|part| part.0 == name).map_or(f64::NAN, |part| part.1)
    }

    fn to_figures(&self, outcome: &mut Outcome) {
        self.parts.iter().for_each(|(name, part)| outcome.figure(name, *part));
    }
}
