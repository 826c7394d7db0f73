//! The peers: private pages that the kernel was asked to reclaim, to zram, through zswap, or to a
//! file.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ballast_qemu::proc_text;
use ballast_units::Bytes;

use super::contents::Kind;
use super::round::{Faulter, Plan, Times};
use crate::peers::cgroup::Cgroup;
use crate::peers::swap::{Request, Space, Swap};
use crate::{say, tools};

/// What the kernel reclaims to; the first three with one page for one fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    Zram,
    Zswap,
    Disk,
    /// As they are without any setting: up to `1 << KERNELS_CLUSTER` pages for one fault.
    ZramDefault,
    ZswapDefault,
    DiskDefault,
}

/// All of them, and those that are best for random order.
pub const TIERS: [Tier; 6] =
    [Tier::Zram, Tier::Zswap, Tier::Disk, Tier::ZramDefault, Tier::ZswapDefault, Tier::DiskDefault];
/// How many of them, from the first on.
pub const ONE_BY_ONE: usize = 3;

/// The kernel's own `vm.page-cluster`.
const KERNELS_CLUSTER: u32 = 3;

/// What is left to the process while its last pages are pushed out.
const REST: Bytes = Bytes::from_mib(8);
/// Before any other swap space that the host may have.
const PRIORITY: u16 = 32_000;

impl Tier {
    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Zram => "zram",
            Tier::Zswap => "zswap",
            Tier::Disk => "disk",
            Tier::ZramDefault => "zram_default",
            Tier::ZswapDefault => "zswap_default",
            Tier::DiskDefault => "disk_default",
        }
    }

    /// The same with the other number of pages for one fault.
    pub fn twin(self) -> Tier {
        match self {
            Tier::Zram => Tier::ZramDefault,
            Tier::ZramDefault => Tier::Zram,
            Tier::Zswap => Tier::ZswapDefault,
            Tier::ZswapDefault => Tier::Zswap,
            Tier::Disk => Tier::DiskDefault,
            Tier::DiskDefault => Tier::Disk,
        }
    }

    /// Whether it needs something of the kernel's that may be missing.
    pub fn is_memory(self) -> bool {
        !matches!(self, Tier::Disk | Tier::DiskDefault)
    }

    /// Swap space, and what it takes; None, with a word, where the kernel does not have it.
    fn start(self, folder: &Path, plan: &Plan) -> Result<Option<Swap>> {
        // As zram's users set it for random access: one page for one fault.
        let cluster = match self {
            Tier::ZramDefault | Tier::ZswapDefault | Tier::DiskDefault => KERNELS_CLUSTER,
            _ => 0,
        };
        let page_cluster = Some(cluster);
        let request = |space| Request { page_cluster, ..Request::new(space, PRIORITY) };
        let size = Bytes::from_mib(plan.mib as u64 * 2);
        let file = || Space::File { path: folder.join("peer.swap"), size };
        let started = match self {
            Tier::Zram | Tier::ZramDefault => Swap::start(&request(Space::Zram { size })),
            Tier::Disk | Tier::DiskDefault => Swap::start(&request(file())),
            Tier::Zswap | Tier::ZswapDefault => {
                let zswap = Some(zswap_compressor().to_owned());
                Swap::start(&Request { zswap, ..request(file()) })
            }
        };
        match started {
            Ok(swap) => Ok(Some(swap)),
            Err(e) if self.is_memory() => {
                say::detail(&format!("{}: left out: {e:#}", self.name()));
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

/// What one tier did with one kind of contents.
pub struct PeerRound {
    /// Of the faults.
    pub times: Times,
    /// Machine memory that the tier took for a byte; NaN of a file. Above 1: it is not worth it; near
    /// 0: it passed the pages on.
    pub taken: f64,
}

/// None if the kernel does not have the tier.
pub async fn round(
    tier: Tier,
    kind: Kind,
    folder: &Path,
    plan: &Plan,
) -> Result<Option<PeerRound>> {
    let Some(swap) = tier.start(folder, plan)? else { return Ok(None) };
    let cgroup = Cgroup::create()?;
    let mut faulter = Faulter::start(plan, kind, false, &BTreeMap::new())?;
    cgroup.add(faulter.pid())?;
    faulter.fill().await?;
    let (before, zswap) = (swap.used()?, zswap_takes()?);
    faulter.page_out().await?;
    // What was written to a file stays in the swap cache until somebody asks for its memory.
    cgroup.limit(REST)?;
    cgroup.unlimit()?;
    let used = swap.used()?.saturating_sub(before);
    ensure!(
        used.0 >= (plan.reads as u64) << 12,
        "only {used} went to the {} space: other swap space is before it",
        tier.name()
    );
    let takes = match tier {
        Tier::Zram | Tier::ZramDefault => swap.zram()?.map(|z| z.used),
        Tier::Zswap | Tier::ZswapDefault => Some(zswap_takes()?.saturating_sub(zswap)),
        Tier::Disk | Tier::DiskDefault => None,
    };
    let taken = takes.map_or(f64::NAN, |takes| takes.0 as f64 / used.0 as f64);
    let times = faulter.read(plan).await.with_context(|| tier.name().to_owned())?;
    drop(cgroup);
    swap.end()?;
    Ok(Some(PeerRound { times, taken }))
}

/// lz4 as with zram, or what the kernel has been built with.
pub fn zswap_compressor() -> &'static str {
    tools::load_module("lz4");
    let crypto = std::fs::read_to_string("/proc/crypto").unwrap_or_default();
    let lz4 = crypto.lines().any(|l| l.starts_with("name") && l.ends_with(": lz4"));
    if lz4 { "lz4" } else { "lzo" }
}

/// Machine memory that zswap takes.
fn zswap_takes() -> Result<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    // Kernels without zswap tell nothing.
    Ok(proc_text::status_field(&text, "Zswap").unwrap_or(Bytes::ZERO))
}
