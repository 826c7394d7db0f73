//! What the pager costs a guest whose memory is all there: pages checked per second.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_units::Bytes;

use crate::console::Story;
use crate::experiments::stage::Stage;
use crate::figures::Outcome;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::Options;
use crate::plain::PlainVm;
use crate::say;
use crate::stats::median;

const MEMORY: Bytes = Bytes::from_mib(256);
const LOAD: &str = "reader --mb 128 --block-mb 128 --seconds 10";
const LIMIT: Duration = Duration::from_secs(180);

pub async fn run(image: &Image, repeats: usize) -> Result<Outcome> {
    let (mut plain, mut ballast) = (Vec::new(), Vec::new());
    let dir = tempfile::tempdir()?;
    for n in 0..repeats {
        let guest = Guest::new(&format!("plain{n}"), MEMORY, dir.path()).run(LOAD);
        let mut vm = PlainVm::start(&guest, image)?;
        vm.wait_until("the end of the load", LIMIT, |s| !s.exits.is_empty())?;
        plain.push(rate(&vm.console.story)?);
        drop(vm);

        let mut stage = Stage::new(&Options::budget(Bytes::from_mib(640)))?;
        let guest = Guest::new("touch1", MEMORY, &stage.manager.consoles()).run(LOAD);
        stage.add(&guest, image, |_| {}).await?;
        let begin = Instant::now();
        while stage.guests.iter().any(|(_, c)| c.story.exits.is_empty()) {
            stage.poll()?;
            anyhow::ensure!(begin.elapsed() < LIMIT, "the load has not ended");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let story = stage.guests.first().map(|(_, c)| c.story.clone()).unwrap_or_default();
        ballast.push(rate(&story)?);
        stage.end().await?;
        say::detail(&format!("plain {:.0}/s, under Ballast {:.0}/s", plain[n], ballast[n]));
    }
    let mut outcome = Outcome::new("touch");
    outcome.figure("plain_pages_per_s", median(&plain));
    outcome.figure("ballast_pages_per_s", median(&ballast));
    outcome.figure("ballast_over_plain", median(&ballast) / median(&plain));
    outcome.at_least("ballast_over_plain", median(&ballast) / median(&plain), 0.9);
    Ok(outcome)
}

/// Pages checked per second of the load, its writing included.
fn rate(story: &Story) -> Result<f64> {
    let done = story.progress.as_ref().context("the load reported nothing")?;
    let (checks, t) = (done.number("checks"), done.number("t"));
    Ok(checks.context("no checks")? / t.filter(|t| *t > 0.0).context("no time")?)
}
