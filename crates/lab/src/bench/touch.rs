//! What the pager costs a guest whose memory is all there: pages checked per second.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
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
    for n in 0..repeats {
        // Nobody always comes first.
        if n % 2 == 0 {
            plain.push(plain_rate(image)?);
        }
        ballast.push(ballast_rate(image).await?);
        if n % 2 == 1 {
            plain.push(plain_rate(image)?);
        }
        say::detail(&format!("plain {:.0}/s, under Ballast {:.0}/s", plain[n], ballast[n]));
    }
    let mut outcome = Outcome::new("touch");
    outcome.figure("plain_pages_per_s", median(&plain));
    outcome.figure("ballast_pages_per_s", median(&ballast));
    outcome.figure("ballast_over_plain", median(&ballast) / median(&plain));
    outcome.at_least("ballast_over_plain", median(&ballast) / median(&plain), 0.9);
    Ok(outcome)
}

fn plain_rate(image: &Image) -> Result<f64> {
    let dir = tempfile::tempdir()?;
    let guest = Guest::new("touch0", MEMORY, dir.path()).run(LOAD);
    let mut vm = PlainVm::start(&guest, image)?;
    vm.wait_until("the end of the load", LIMIT, |s| !s.exits.is_empty())?;
    rate(&vm.console.story)
}

async fn ballast_rate(image: &Image) -> Result<f64> {
    let mut stage = Stage::new(&Options::budget(Bytes::from_mib(640)))?;
    let guest = Guest::new("touch1", MEMORY, &stage.manager.consoles()).run(LOAD);
    stage.add(&guest, image, |_| {}).await?;
    let begin = Instant::now();
    while stage.guests.iter().any(|(_, c)| c.story.exits.is_empty()) {
        stage.poll()?;
        ensure!(begin.elapsed() < LIMIT, "the load has not ended");
        // As often as of a plain VM.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let story = stage.guests.first().map(|(_, c)| c.story.clone()).unwrap_or_default();
    let rate = rate(&story)?;
    stage.end().await?;
    Ok(rate)
}

/// Pages checked per second of the load, its writing included.
fn rate(story: &Story) -> Result<f64> {
    let done = story.progress.as_ref().context("the load reported nothing")?;
    let (checks, t) = (done.number("checks"), done.number("t"));
    Ok(checks.context("no checks")? / t.filter(|t| *t > 0.0).context("no time")?)
}
