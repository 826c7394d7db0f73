//! How fast a guest's memory is taken when its limit falls: by the balloon where the guest has free
//! memory, by compression and swap where it has no balloon.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ballast_api::VmChange;
use ballast_units::Bytes;

use crate::experiments::stage::Stage;
use crate::figures::Outcome;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::Options;
use crate::say;
use crate::stats::median;

const MEMORY: Bytes = Bytes::from_mib(256);
/// What the guest may keep.
const LIMIT: Bytes = Bytes::from_mib(128);
const PATIENCE: Duration = Duration::from_secs(120);
/// MiB per second, at least.
const TARGET: f64 = 150.0;

pub async fn run(image: &Image, repeats: usize) -> Result<Outcome> {
    let (mut balloon, mut paging) = (Vec::new(), Vec::new());
    for n in 0..repeats {
        balloon.push(one(image, true).await?);
        paging.push(one(image, false).await?);
        say::detail(&format!("balloon {:.0} MiB/s, paging {:.0} MiB/s", balloon[n], paging[n]));
    }
    let mut outcome = Outcome::new("reclaim");
    outcome.figure("balloon_mib_per_s", median(&balloon));
    outcome.figure("paging_mib_per_s", median(&paging));
    outcome.at_least("balloon_mib_per_s", median(&balloon), TARGET);
    outcome.at_least("paging_mib_per_s", median(&paging), TARGET);
    Ok(outcome)
}

/// MiB per second from the change of the limit until the guest is within it.
async fn one(image: &Image, with_balloon: bool) -> Result<f64> {
    let mut stage = Stage::new(&Options::budget(Bytes::from_mib(640)))?;
    // Memory that was used: kept where it is to be paged out, given back to the guest's kernel where
    // the balloon is to find it free.
    let (load, ready) = if with_balloon {
        ("hog --mb 160 --seconds 1", "done")
    } else {
        ("hog --mb 160", "progress")
    };
    let guest = Guest::new("hog1", MEMORY, &stage.manager.consoles()).run(load);
    stage.add(&guest, image, |spec| spec.no_balloon = !with_balloon).await?;
    let begin = Instant::now();
    while !stage.poll()?.iter().any(|(_, e)| e.kind() == ready) {
        ensure!(begin.elapsed() < PATIENCE, "the hog has not taken its memory");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let client = stage.manager.client().clone();
    if with_balloon {
        stage.until_free(&guest.name, MEMORY - LIMIT, PATIENCE).await?;
    }
    let before = client.vm(&guest.name).await?.memory.consumed;
    let begin = Instant::now();
    let change = VmChange { max: Some(LIMIT.0), ..VmChange::default() };
    client.change(&guest.name, &change).await?;
    let after = loop {
        let consumed = client.vm(&guest.name).await?.memory.consumed;
        if consumed <= LIMIT.0 {
            break consumed;
        }
        ensure!(
            begin.elapsed() < PATIENCE,
            "{} still consumed with a limit of {LIMIT}",
            Bytes(consumed)
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let taken = before.saturating_sub(after);
    let rate = Bytes(taken).mib() / begin.elapsed().as_secs_f64();
    let memory = client.vm(&guest.name).await?.memory;
    let paged = memory.swapped + memory.compressed + memory.filled + memory.staged;
    let by = if with_balloon { memory.ballooned } else { paged };
    ensure!(
        by * 10 >= taken * 9,
        "of {} that were taken {} in its balloon, {} paged",
        Bytes(taken),
        Bytes(memory.ballooned),
        Bytes(paged)
    );
    stage.poll()?;
    stage.end().await?;
    Ok(rate)
}
