//! The peer: the kernel's scanner over private memory.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::hold::{Holder, Shape};
use super::ksm::{self, Ksm, Mode};
use super::round::{Plan, Round};
use super::watch::{self, Look};

/// The slowest setting takes a minute for a pass over 1 GiB.
const LIMIT: Duration = Duration::from_secs(1800);
/// The fast settings pass often in it: the scanner skips pages by how long they were unchanged, so
/// passes differ.
const QUIET: Duration = Duration::from_secs(20);

/// None if this kernel does not have the mode.
pub async fn round(ksm: &Ksm, mode: Mode, shape: Shape, plan: &Plan) -> Result<Option<Round>> {
    let mut holder = Holder::start(shape, false, &BTreeMap::new())?;
    holder.fill().await?;
    holder.mergeable().await?;
    let before = ksm::counters()?;
    let look = async || {
        let now = ksm::counters()?;
        Ok(Look {
            cpu_s: ksm.cpu_s()?,
            saved: now.sharing as f64,
            scanned: (now.scanned - before.scanned) as f64,
            passes: (now.full_scans - before.full_scans) as f64,
        })
    };
    let (begin, start) = (Instant::now(), look().await?);
    if !ksm.start(mode)? {
        return Ok(None);
    }
    let possible = shape.contents().saving() as f64;
    let merge = watch::merge(begin, start, look, possible, LIMIT).await.context("merging")?;
    let quiet = watch::quiet(look, QUIET, plan.passes, LIMIT).await?;
    let saved = look().await?.saved;
    let metadata = ksm::metadata(holder.pid)? as f64;
    let twin = holder.write("twin", plan.writes, shape.seed).await?;
    let zero = holder.write("zero", plan.writes, shape.seed).await?;
    let own = holder.write("unique", plan.writes, shape.seed).await?;
    holder.check().await?;
    holder.end().await?;
    ksm.forget()?;
    Ok(Some(Round { merge, quiet, saved, metadata, mappings: 0.0, twin, zero, own }))
}
