//! Ours: the pager's sharing over the memory of a process that is paged like a VMM.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ballast_units::{Bytes, PAGE_SIZE};

use super::super::paged;
use super::cpu;
use super::hold::{Holder, Shape};
use super::round::{Plan, Round};
use super::watch::{self, Look};
use crate::manager::{Manager, Options, SharingOptions};
use crate::tools;

const NAME: &str = "holder";
const LIMIT: Duration = Duration::from_secs(900);
const QUIET: Duration = Duration::from_secs(20);
/// What the kernel needs for one mapping, bytes: a vm_area_struct with its place in the maple tree,
/// as measured on Linux 6.18 with 200,000 mappings.
const PER_MAPPING: f64 = 222.0;

/// A round, and what of its CPU time (while merging) was spent inside the paged process.
pub struct OurRound {
    /// As of the peers.
    pub round: Round,
    /// CPU seconds of the shim's threads while merging.
    pub shim_cpu_s: f64,
    /// The whole manager's CPU time while merging, whatever it did.
    pub manager_cpu_s: f64,
    /// Machine memory that came free, as the kernel counts it, bytes.
    pub measured: f64,
}

/// The scanner goes as fast as it can: what is compared is what its work costs.
pub async fn round(shape: Shape, plan: &Plan) -> Result<OurRound> {
    let size = Bytes((shape.pages() * PAGE_SIZE) as u64);
    let mut options = Options::budget(Bytes(size.0 * 2 + (512 << 20)));
    options.sharing = Some(SharingOptions::as_fast_as_it_goes());
    // Pages that are held to see whether they are used cannot be shared meanwhile; estimating working
    // sets is not what is compared.
    options.samples = Some(1);
    let manager = Manager::start(&options)?;
    let environment = BTreeMap::from([
        ("LD_PRELOAD", OsString::from(tools::sibling("libballast_shim.so")?)),
        ("BALLAST_VM", NAME.into()),
        ("BALLAST_SHIM_SOCKET", manager.shim_socket().into()),
        ("BALLAST_RAM_SIZE", size.0.to_string().into()),
    ]);
    let mut holder = Holder::start(shape, true, &environment)?;
    paged::wait(&manager, NAME).await?;
    let (me, vmm) = (manager.pid()?, holder.pid as i32);
    let client = manager.client().clone();
    let look = async || {
        let host = client.host().await?;
        let sharing = host.sharing;
        Ok(Look {
            cpu_s: sharing.cpu_s + shim_s(vmm)?,
            // All pages were written: what is not in use any more is saved, however.
            saved: size.0.saturating_sub(host.consumed) as f64 / PAGE_SIZE as f64,
            scanned: sharing.scanned as f64,
            passes: sharing.passes as f64,
        })
    };
    // What is found while the memory is being filled counts too.
    let (begin, start) = (Instant::now(), Look { saved: 0.0, ..look().await? });
    let (shim, whole) = (shim_s(vmm)?, cpu::sum_s(me, |_, _| true)?);
    holder.fill().await?;
    let merge = watch::merge(begin, start, look, shape.contents().saving() as f64, LIMIT).await?;
    let shim_cpu_s = shim_s(vmm)? - shim;
    let manager_cpu_s = cpu::sum_s(me, |_, _| true)? - whole;
    let quiet = watch::quiet(look, QUIET, plan.passes, LIMIT).await?;
    let saved_in_the_end = look().await?.saved;
    let host = client.host().await?;
    let used = host.measured_used.saturating_sub(host.overhead);
    let twin = holder.write("twin", plan.writes, shape.seed).await?;
    let zero = holder.write("zero", plan.writes, shape.seed).await?;
    let own = holder.write("unique", plan.writes, shape.seed).await?;
    holder.check().await?;
    holder.end().await?;
    let (_, left) = manager.finish().await?;
    ensure!(left.is_empty(), "left behind: {}", left.join(", "));
    Ok(OurRound {
        round: Round {
            merge,
            quiet,
            saved: saved_in_the_end,
            metadata: host.sharing.metadata as f64,
            mappings: host.sharing.mappings as f64 * PER_MAPPING,
            twin,
            zero,
            own,
        },
        shim_cpu_s,
        manager_cpu_s,
        measured: size.0 as f64 - used as f64,
    })
}

/// The holder's own thread holds and writes; every other one is the shim's.
fn shim_s(vmm: i32) -> Result<f64> {
    cpu::sum_s(vmm, |tid, _| tid != vmm)
}
