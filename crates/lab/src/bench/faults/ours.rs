//! Ours: pages of a process that is paged like a VMM, reclaimed by a limit below its size, which is
//! lifted before they are read.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::{VmChange, VmView};
use ballast_units::{Bytes, PAGE_SIZE};

use super::super::paged;
use super::contents::Kind;
use super::round::{Faulter, Plan, Times};
use crate::manager::{Manager, Options, SharingOptions};
use crate::tools;

const NAME: &str = "faulter";
const LIMIT: Duration = Duration::from_secs(120);

/// What one kind of contents showed.
pub struct OurRound {
    pub times: Times,
    /// Of the pages that are out, parts in the compressed tier and in swap files.
    pub compressed: f64,
    pub swapped: f64,
}

/// `tiers` is laid over the manager's default configuration (TOML; empty for the default).
pub async fn round(kind: Kind, plan: &Plan, tiers: &str) -> Result<OurRound> {
    let size = Bytes::from_mib(plan.mib as u64);
    let manager = Manager::start(&Options {
        // No page is like another. And pages that are held to see whether they are used are neither
        // here nor there.
        sharing: Some(SharingOptions::off()),
        samples: Some(1),
        more: tiers.to_owned(),
        ..Options::budget(Bytes(size.0 * 2 + (512 << 20)))
    })?;
    let environment = BTreeMap::from([
        ("LD_PRELOAD", OsString::from(tools::sibling("libballast_shim.so")?)),
        ("BALLAST_VM", NAME.into()),
        ("BALLAST_SHIM_SOCKET", manager.shim_socket().into()),
        ("BALLAST_RAM_SIZE", size.0.to_string().into()),
    ]);
    let mut faulter = Faulter::start(plan, kind, true, &environment)?;
    paged::wait(&manager, NAME).await?;
    faulter.fill().await?;
    // Some room beside what is read, for pages that stay.
    let keep = (size.0 - (plan.reads * PAGE_SIZE) as u64) / 2;
    let client = manager.client().clone();
    let limit = |max: u64| VmChange { max: Some(max), ..VmChange::default() };
    client.change(NAME, &limit(keep)).await?;
    let out = reclaimed(&manager, keep).await?;
    client.change(NAME, &limit(size.0)).await?;
    let times = faulter.read(plan).await.context("Ballast")?;
    let (_, left) = manager.finish().await?;
    ensure!(left.is_empty(), "left behind: {}", left.join(", "));
    let all = (size.0 - out.memory.resident).max(1) as f64;
    Ok(OurRound {
        times,
        compressed: out.memory.compressed as f64 / all,
        swapped: out.memory.swapped as f64 / all,
    })
}

/// Waits until no more than `keep` is there, and nothing is on its way.
async fn reclaimed(manager: &Manager, keep: u64) -> Result<VmView> {
    let begin = Instant::now();
    loop {
        let vm = manager.client().vm(NAME).await?;
        if vm.memory.resident <= keep && vm.memory.staged == 0 {
            return Ok(vm);
        }
        ensure!(
            begin.elapsed() < LIMIT,
            "{} still resident and {} staged with a limit of {}",
            Bytes(vm.memory.resident),
            Bytes(vm.memory.staged),
            Bytes(keep)
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
