//! Time from starting the VMM until the guest's init says that it is ready.

use std::time::{Duration, Instant};

use anyhow::Result;
use ballast_units::Bytes;

use crate::experiments::stage::Stage;
use crate::figures::Outcome;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::Options;
use crate::plain::PlainVm;
use crate::say;
use crate::stats::median;

const MEMORY: Bytes = Bytes::from_mib(256);
/// Of plain QEMU's time, at most.
const TARGET: f64 = 1.2;

pub async fn run(image: &Image, repeats: usize) -> Result<Outcome> {
    let (mut plain, mut ballast) = (Vec::new(), Vec::new());
    for n in 0..repeats {
        // Nobody always comes first.
        if n % 2 == 0 {
            plain.push(plain_s(image)?);
        }
        ballast.push(ballast_s(image).await?);
        if n % 2 == 1 {
            plain.push(plain_s(image)?);
        }
        say::detail(&format!("plain {:.2} s, under Ballast {:.2} s", plain[n], ballast[n]));
    }
    let mut outcome = Outcome::new("boot");
    outcome.figure("plain_s", median(&plain));
    outcome.figure("ballast_s", median(&ballast));
    outcome.figure("ballast_over_plain", median(&ballast) / median(&plain));
    outcome.at_most("ballast_over_plain", median(&ballast) / median(&plain), TARGET);
    Ok(outcome)
}

fn plain_s(image: &Image) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let guest = Guest::new("boot0", MEMORY, dir.path());
    let begin = Instant::now();
    let mut vm = PlainVm::start(&guest, image)?;
    vm.wait_until("ready", Duration::from_secs(180), |s| s.ready.is_some())?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Without the manager's own start.
async fn ballast_s(image: &Image) -> Result<f64> {
    let mut stage = Stage::new(&Options::budget(Bytes::from_mib(640)))?;
    let guest = Guest::new("boot1", MEMORY, &stage.manager.consoles());
    let begin = Instant::now();
    stage.add(&guest, image, |_| {}).await?;
    stage.wait_for_boot().await?;
    let seconds = begin.elapsed().as_secs_f64();
    stage.end().await?;
    Ok(seconds)
}
