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
/// A page that is held to see whether it is used counts as staged, for as long as nobody uses it.
const SAMPLED: u64 = 2 * PAGE_SIZE as u64;
/// So many looks in a row must find the same.
const LOOKS: u32 = 6;

/// Where reclaimed pages are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Into a cache large enough for all of them; swap files take what does not compress.
    Compressed,
    /// All into swap files.
    Swap,
}

impl Tier {
    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Compressed => "ballast",
            Tier::Swap => "ballast_swap",
        }
    }

    fn configuration(self) -> String {
        match self {
            Tier::Compressed => "[compression]\ncache_percent = 50\n",
            Tier::Swap => "[compression]\nenabled = false\n",
        }
        .to_owned()
    }

    /// A limit under which about as many pages are out as are to be read, and some more.
    fn limit(self, kind: Kind, plan: &Plan) -> u64 {
        let pages = (plan.mib << 8) as f64;
        let out = plan.reads as f64 + (pages - plan.reads as f64) / 4.0;
        let takes = if self == Tier::Compressed { kind.takes() } else { 0.0 };
        (pages - out * (1.0 - takes)) as u64 * PAGE_SIZE as u64
    }
}

/// What one kind of contents showed.
pub struct OurRound {
    /// Of the faults.
    pub times: Times,
    /// Of the pages that are out, parts in the compressed tier (filled ones included) and in swap
    /// files.
    pub compressed: f64,
    pub swapped: f64,
}

/// Starts a manager of its own. Err, too, where a page came back other than it was.
pub async fn round(tier: Tier, kind: Kind, plan: &Plan) -> Result<OurRound> {
    let size = Bytes::from_mib((plan.mib + plan.spare_mib()) as u64);
    let manager = Manager::start(&Options {
        // No page is like another. And pages that are held to see whether they are used are neither
        // here nor there.
        sharing: Some(SharingOptions::off()),
        samples: Some(1),
        more: tier.configuration(),
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
    let keep = tier.limit(kind, plan);
    let client = manager.client().clone();
    let limit = |max: u64| VmChange { max: Some(max), ..VmChange::default() };
    client.change(NAME, &limit(keep)).await?;
    let out = reclaimed(&manager, plan).await?;
    client.change(NAME, &limit(size.0)).await?;
    let times = faulter.read(plan).await.context("Ballast")?;
    let (_, left) = manager.finish().await?;
    ensure!(left.is_empty(), "left behind: {}", left.join(", "));
    let m = &out.memory;
    let all = (m.compressed + m.filled + m.swapped).max(1) as f64;
    Ok(OurRound {
        times,
        compressed: (m.compressed + m.filled) as f64 / all,
        swapped: m.swapped as f64 / all,
    })
}

/// Waits until enough is out, nothing is on its way, and no more goes. (A limit is reached to within a
/// few pages.)
async fn reclaimed(manager: &Manager, plan: &Plan) -> Result<VmView> {
    let begin = Instant::now();
    let mut still = (0, 0);
    loop {
        let vm = manager.client().vm(NAME).await?;
        let m = &vm.memory;
        let out = m.compressed + m.filled + m.swapped;
        still = if still.0 == out { (out, still.1 + 1) } else { (out, 0) };
        if out >= (plan.reads * PAGE_SIZE) as u64 && m.staged <= SAMPLED && still.1 >= LOOKS {
            return Ok(vm);
        }
        ensure!(
            begin.elapsed() < LIMIT,
            "{} out and {} staged with a limit of {}",
            Bytes(out),
            Bytes(m.staged),
            Bytes(vm.params.max)
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
