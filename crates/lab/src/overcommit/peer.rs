//! Guests under plain QEMU, in a memory cgroup.
//!
//! The budget is for the guests' RAM, as it is under Ballast. QEMU's own memory is all that is charged
//! to the cgroup, less what of the guests' RAM is in memory, mapped or in the kernel's swap cache. The cgroup's limit is the
//! budget and that much more, twice a second: the kernel swaps out most of QEMU's own memory, and what it gains by that is
//! nobody's. (Measured once at the beginning, it was: guests of a budget of 449 MiB had 603.) What of QEMU's own is in the
//! swap cache counts as guests' RAM: the kernel does not tell them apart. While a window is measured, the limit follows every
//! five seconds: to look takes CPU, which nothing takes from Ballast's guests.
//!
//! zram's memory belongs to no cgroup. Whatever it takes is taken off the limit.

use std::fmt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_units::Bytes;

use super::{Lost, Plan, Reclaimed, Side, warm_up};
use crate::bench::sharing::cpu;
use crate::bench::sharing::ksm::{self, Ksm};
use crate::console::{Event, Story};
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::leftovers;
use crate::manager::disk_folder;
use crate::peers::cgroup::{Cgroup, Unreclaimable};
use crate::peers::swap::{Request, Space, Swap, ZramUse};
use crate::plain::{PlainVm, Ram, Style};
use crate::say;

/// Before any other swap space that the host may have.
const PRIORITY: u16 = 32_000;
/// A limit this near to the one that is set is not set.
const NEAR: Bytes = Bytes::from_mib(1);
/// How often the limit follows while a window is measured: it is set by all mappings of all VMMs.
const ADJUSTED_EVERY: Duration = Duration::from_secs(5);
/// Swap space, in guests' configured memory: QEMU's own goes there as well.
const SWAP_TIMES: u64 = 2;
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// All of 1.25 GiB within about seven seconds, as Ballast's scan is set here; the default of 100
/// pages would take minutes.
const KSM: ksm::Mode =
    ksm::Mode { name: "overcommit", pages_to_scan: 1000, sleep_millisecs: 20, advisor: false };

/// How long the kernel may take to reclaim down to a limit. It writes to zram, which takes memory itself: for some
/// limits it goes on for as long as one lets it, and guests do nothing meanwhile.
const RECLAIMED: Duration = Duration::from_secs(180);

/// The guests are lost: a VMM has ended that nobody asked to, or none gets on.
#[derive(Debug)]
pub struct Gone {
    /// Which of the two.
    pub how: Lost,
    words: String,
}

impl Gone {
    fn ended(name: &str, how: ExitStatus) -> Gone {
        let words = format!("{name}: QEMU ended with {how} (the cgroup's out-of-memory killer?)");
        Gone { how: Lost::Killed, words }
    }
    fn thrashing(limit: Bytes) -> Gone {
        let s = RECLAIMED.as_secs();
        let words = format!("the kernel has not reclaimed down to {limit} after {s} s");
        Gone { how: Lost::Thrashing, words }
    }
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

impl std::error::Error for Gone {}

/// This host does not have what the side needs; the reason in words.
#[derive(Debug)]
pub struct Unavailable(String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Fields are dropped in order: guests, then what they used.
pub struct Peer {
    vms: Vec<(String, PlainVm)>,
    ksm: Option<Ksm>,
    cgroup: Arc<Cgroup>,
    swap: Swap,
    /// None: as much as there is.
    budget: Option<Bytes>,
    limit: Bytes,
    /// The kernel cannot get down to this budget.
    stuck: bool,
    /// When the limit was looked at last.
    adjusted: Instant,
    /// A window is being measured.
    measuring: bool,
    /// Swap file, disks, consoles.
    folder: Folder,
}

/// What the cgroup is charged, and for what.
struct Charged {
    all: Bytes,
    /// Of the guests' RAM, what is resident: shared pages count for each guest.
    at_hand: Bytes,
    merged: Bytes,
    /// In the swap cache, and mapped by nobody.
    passing: Bytes,
    /// Of QEMU's own memory, what is in swap.
    own_swapped: Bytes,
}

impl Charged {
    /// Machine memory that holds guests' RAM.
    fn ram(&self) -> Bytes {
        self.at_hand.saturating_sub(self.merged) + self.passing
    }

    /// Of QEMU, and of the kernel on its behalf.
    fn own(&self) -> Bytes {
        self.all.saturating_sub(self.ram())
    }

    /// What zram takes for guests' RAM: what it has of QEMU's own memory is beside the budget, as the rest of that is, and
    /// taken to compress as well as all.
    fn of_zram(&self, zram: &ZramUse) -> Bytes {
        let own = self.own_swapped.0 as f64 / zram.original.0.max(1) as f64;
        Bytes((zram.used.0 as f64 * (1.0 - own).max(0.0)) as u64)
    }
}

struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is in use; its keeper removes it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Peer {
    /// Booted when this returns, with as much memory as there is. Err: [`Unavailable`], among others.
    pub async fn start(side: Side, plan: &Plan, image: &Image) -> Result<Peer> {
        let folder = Folder(leftovers::private_folder(&disk_folder())?);
        let size = Bytes(plan.configured().0 * SWAP_TIMES);
        let file = Space::File { path: folder.0.join("peer.swap"), size };
        let request = match side {
            // One page for one fault, as zram's users set it.
            Side::Zram => {
                Request { page_cluster: Some(0), ..Request::new(Space::Zram { size }, PRIORITY) }
            }
            _ => Request::new(file, PRIORITY),
        };
        let unavailable = |e: anyhow::Error| Unavailable(format!("{e:#}"));
        let ksm = (side == Side::Ksm).then(Ksm::take).transpose().map_err(unavailable)?;
        if let Some(ksm) = &ksm {
            // From the start, as Ballast shares: where guests take all of the processors, it gets little done later.
            ensure!(ksm.start(KSM)?, "KSM does not start");
        }
        let swap = Swap::start(&request).map_err(unavailable)?;
        let cgroup = Arc::new(Cgroup::create()?);
        let mut peer = Peer {
            vms: Vec::new(),
            ksm,
            cgroup,
            swap,
            budget: None,
            limit: Bytes(u64::MAX),
            stuck: false,
            adjusted: Instant::now(),
            measuring: false,
            folder,
        };
        for (n, load) in plan.guests.iter().enumerate() {
            let name = format!("{}{}", load.work, n + 1);
            let dir = &peer.folder.0;
            let mut guest = Guest::new(&name, plan.memory, dir).run(&load.command);
            if let Some(size) = load.disk {
                let disk = dir.join(format!("{name}.img"));
                image::empty_disk(&disk, size)?;
                warm_up(&disk)?;
                guest = guest.disk(disk);
            }
            let entrance = peer.cgroup.entrance()?;
            // RAM as QEMU has it unless told otherwise: private, and open to KSM. But no large pages:
            // with them, guests were killed for want of memory while half of the swap file was free.
            let style = Style { ram: Ram::Private, cgroup: Some(entrance), small_pages: true };
            let vm = PlainVm::start_as(&guest, image, &style)?;
            peer.vms.push((name, vm));
        }
        let begin = Instant::now();
        loop {
            peer.poll().await?;
            let waiting = peer.vms.iter().find(|(_, vm)| vm.console.story.ready.is_none());
            let Some((name, vm)) = waiting else { return Ok(peer) };
            ensure!(
                begin.elapsed() < BOOT_LIMIT,
                "{name} is not ready after {} s: {}",
                BOOT_LIMIT.as_secs(),
                vm.console.tail(3)
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Err: [`Gone`], or a guest's trouble.
    pub async fn poll(&mut self) -> Result<Vec<(usize, Event)>> {
        for (name, vm) in &mut self.vms {
            if let Some(how) = vm.ended()? {
                return Err(Gone::ended(name, how).into());
            }
        }
        if !self.measuring || self.adjusted.elapsed() >= ADJUSTED_EVERY {
            self.adjust().await?;
            self.adjusted = Instant::now();
        }
        // Last: that may have taken minutes, and what guests have told meanwhile is of now.
        let mut events = Vec::new();
        for (n, (name, vm)) in self.vms.iter_mut().enumerate() {
            events.extend(vm.console.poll().into_iter().map(|e| (n, e)));
            if let Some(trouble) = &vm.console.story.trouble {
                bail!("{name}: {trouble}");
            }
        }
        Ok(events)
    }

    /// Whether a window is measured from now on.
    pub fn measure(&mut self, measuring: bool) {
        self.measuring = measuring;
    }

    /// In the order of the plan's guests.
    pub fn stories(&self) -> Vec<&Story> {
        self.vms.iter().map(|(_, vm)| &vm.console.story).collect()
    }

    /// The kernel has reclaimed down to it when this returns, or cannot.
    pub async fn set_budget(&mut self, budget: Bytes) -> Result<()> {
        self.budget = Some(budget);
        self.stuck = false;
        self.adjust().await
    }

    fn usage_and_ram(&self) -> Result<Charged> {
        let (mut at_hand, mut own_swapped) = (Bytes::default(), Bytes::default());
        for (name, vm) in &self.vms {
            let held = vm.held().with_context(|| name.clone())?;
            at_hand += held.ram;
            own_swapped += held.own_swapped;
        }
        // Resident in several guests, and one page all the same.
        let merged = if self.ksm.is_some() { ksm::counters()?.sharing << 12 } else { 0 };
        let (all, passing) = (self.cgroup.usage()?, self.cgroup.in_swap_cache()?);
        Ok(Charged { all, at_hand, merged: Bytes(merged), passing, own_swapped })
    }

    /// Brings the limit to what the budget, QEMU's own memory and zram make of it.
    async fn adjust(&mut self) -> Result<()> {
        let Some(budget) = self.budget else { return Ok(()) };
        let charged = self.usage_and_ram()?;
        let own = charged.own();
        let zram = self.swap.zram()?.map_or(0, |z| charged.of_zram(&z).0);
        // If zram took nearly all of it, there would be nothing to run in; then it has more than
        // its share, and "used" shows that.
        let guests = budget.0.saturating_sub(zram).max(budget.0 / 4);
        let limit = Bytes((guests + own.0) >> 12 << 12);
        if self.stuck || limit.0.abs_diff(self.limit.0) < NEAR.0 {
            return Ok(());
        }
        self.limit = limit;
        let cgroup = self.cgroup.clone();
        // The kernel reclaims before it returns.
        let reclaiming = tokio::task::spawn_blocking(move || cgroup.limit(limit));
        let Ok(reclaimed) = tokio::time::timeout(RECLAIMED, reclaiming).await else {
            return Err(Gone::thrashing(limit).into());
        };
        match reclaimed.context("limit")? {
            // What is in use shows that it has more than its budget.
            Err(e) if e.downcast_ref::<Unreclaimable>().is_some() => {
                say::detail(&format!("{e:#}: it gets no more than it has"));
                self.stuck = true;
                self.limit = Bytes((self.cgroup.usage()?.0 + NEAR.0) >> 12 << 12);
                self.cgroup.limit(self.limit)
            }
            done => done,
        }
    }

    /// Of the VMMs.
    pub fn pids(&self) -> Vec<u32> {
        self.vms.iter().map(|(_, vm)| vm.pid()).collect()
    }

    /// CPU seconds of the guests' processes and of KSM; what the kernel does for others' sake, such as
    /// writing to swap, is not told apart.
    pub fn cpu_s(&self) -> Result<f64> {
        let mut sum = self.ksm.as_ref().map_or(Ok(0.0), Ksm::cpu_s)?;
        for (_, vm) in &self.vms {
            // Those of threads that have ended, too, as Ballast's VMMs are counted.
            sum += cpu::process_s(vm.pid() as i32)?;
        }
        Ok(sum)
    }

    /// Now.
    pub fn reclaimed(&self) -> Result<Reclaimed> {
        let zram = self.swap.zram()?;
        let out = self.swap.used()?;
        let charged = self.usage_and_ram()?;
        let in_zram = zram.map_or(Bytes::default(), |_| out);
        let of_zram = zram.map_or(Bytes::default(), |z| charged.of_zram(&z));
        // The rest of it is QEMU's own.
        let of_vmms = zram.map_or(Bytes::default(), |z| z.used).saturating_sub(of_zram);
        Ok(Reclaimed {
            ballooned: Bytes::default(),
            compressed: in_zram,
            swapped: out.saturating_sub(in_zram),
            saved: charged.merged,
            used: charged.ram() + of_zram,
            at_hand: charged.at_hand,
            passing: charged.passing,
            vmms: charged.own() + of_vmms,
        })
    }

    /// Ends the guests, then what they used. Err: the host is not as it was before.
    pub fn end(self) -> Result<()> {
        let Peer { vms, ksm, cgroup, swap, folder, .. } = self;
        drop(vms);
        let ksm = ksm.map_or(Ok(()), Ksm::end);
        drop(cgroup);
        let swap = swap.end();
        drop(folder);
        ksm.and(swap)
    }
}
