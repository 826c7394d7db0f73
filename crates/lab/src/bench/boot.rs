//! Time from starting the VMM until the guest's init says that it is ready.

use std::time::{Duration, Instant};

use anyhow::Result;
use ballast_api::Accel;
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

pub async fn run(image: &Image, repeats: usize) -> Result<Outcome> {
    let (mut plain, mut ballast) = (Vec::new(), Vec::new());
    let dir = tempfile::tempdir()?;
    for n in 0..repeats {
        let guest = Guest::new(&format!("plain{n}"), MEMORY, dir.path());
        let begin = Instant::now();
        let mut vm = PlainVm::start(&guest, image)?;
        vm.wait_until("ready", Duration::from_secs(180), |s| s.ready.is_some())?;
        plain.push(begin.elapsed().as_secs_f64());
        drop(vm);

        let mut stage = Stage::new(&Options::budget(Bytes::from_mib(640)))?;
        let guest = Guest::new("boot1", MEMORY, &stage.manager.consoles());
        let begin = Instant::now();
        // As the plain one: whether KVM boots this kernel is not looked for.
        stage.add(&guest, image, |spec| spec.accel = Accel::Tcg).await?;
        stage.wait_for_boot().await?;
        ballast.push(begin.elapsed().as_secs_f64());
        stage.end().await?;
        say::detail(&format!("plain {:.2} s, under Ballast {:.2} s", plain[n], ballast[n]));
    }
    let mut outcome = Outcome::new("boot");
    outcome.figure("plain_s", median(&plain));
    outcome.figure("ballast_s", median(&ballast));
    outcome.figure("ballast_over_plain", median(&ballast) / median(&plain));
    outcome.at_most("ballast_over_plain", median(&ballast) / median(&plain), 1.5);
    Ok(outcome)
}
