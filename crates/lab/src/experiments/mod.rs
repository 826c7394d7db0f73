//! Experiments: the sources' results, measured again on real guests under Ballast.
//!
//! Each writes data.csv, figures.json and plot.svg, and ends with its outcome as one line of JSON.

mod kinds;
mod osdi02_f2;
mod osdi02_f4;
mod osdi02_f5;
mod osdi02_f6;
mod osdi02_f7;
mod osdi02_f8;
mod settle;
mod sharing_cost;
mod soak;
pub(crate) mod stage;
mod vtj_memory_f5;
mod vtj_memory_f6;
mod vtj_memory_f7;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::chart::{self, Chart};
use crate::figures::{self, Outcome, Table};
use crate::image::{self, Image};
use crate::results;
use crate::say;
use crate::signals::Signals;

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct ExperimentArgs {
    /// Which one; without a name, lists them
    pub name: Option<String>,
    /// Shorter runs and fewer repeats: to see that it works, not to measure
    #[arg(long)]
    pub quick: bool,
    /// Where to write [default: experiments/NAME, with --quick experiments/NAME/run-quick]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// How long `soak` runs [default: 20, with --quick 3]
    #[arg(long, value_name = "N")]
    pub minutes: Option<f64>,
    /// What `soak` draws its steps from [default: the time]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
}

/// Names, and what each shows.
pub(crate) const NAMES: [(&str, &str); 11] = [
    (
        "osdi02-f2",
        "dbench in a guest of 128 to 224 MiB against a 256 MiB guest ballooned to that size",
    ),
    (
        "osdi02-f4",
        "one to ten identical guests under a CPU-bound load: shared, reclaimed and zero pages",
    ),
    ("osdi02-f5", "three sets of guests with real services: percent shared and reclaimed"),
    (
        "osdi02-f6",
        "a toucher between 50 and 250 MB: touched, slow, fast and estimated active memory",
    ),
    ("osdi02-f7", "the idle memory tax: an idle VM and dbench on 360 MiB, tax 0 and then 75%"),
    ("osdi02-f8", "five VMs on 60% too little memory boot, work, and one rests: states and memory"),
    ("sharing-cost", "CPU-bound throughput of two guests with page sharing on against off"),
    (
        "soak",
        "random changes, VM churn, kills and full disks for --minutes N; guests check all they read",
    ),
    (
        "vtj-memory-f5",
        "swap-in over time: working sets fit; mapped exceeds memory; they do not fit",
    ),
    (
        "vtj-memory-f6",
        "five keyed stores while a hog takes the host from factor 0.47 to 2.85; kernel swap, zram, KSM",
    ),
    (
        "vtj-memory-f7",
        "interactive users at factors 1.00 to 3.15: 95th percentile; kernel swap, zram, KSM",
    ),
];

/// What an experiment measured.
struct Measured {
    /// Figures, and whether the targets were met.
    outcome: Outcome,
    /// data.csv.
    table: Table,
    /// plot.svg, one below the other.
    charts: Vec<Chart>,
}

/// True if all targets were met.
pub async fn run(args: &ExperimentArgs) -> Result<bool> {
    let Some(name) = args.name.as_deref() else {
        NAMES.iter().for_each(|(n, what)| say::line(&format!("{n:<16}{what}")));
        return Ok(true);
    };
    if !NAMES.iter().any(|(n, _)| *n == name) {
        let names: Vec<&str> = NAMES.iter().map(|(n, _)| *n).collect();
        bail!("no experiment '{name}' (there are: {})", names.join(", "));
    }
    if name != "soak" && (args.minutes.is_some() || args.seed.is_some()) {
        bail!("--minutes and --seed are of soak alone");
    }
    let mut signals = Signals::listen()?;
    let image = signals.or("image", || image::prepare(None)).await?;
    let out = args
        .out
        .clone()
        .or_else(|| args.quick.then(|| PathBuf::from("experiments").join(name).join("run-quick")));
    // Where it cannot be made, nothing is measured for nothing.
    let dir = figures::folder(name, out.as_deref())?;
    let mut measured = tokio::select! {
        measured = measure(name, &image, args) => measured?,
        signal = signals.any() => bail!("{name}: ended by {signal}"),
    };
    measured.outcome.quick = args.quick;
    let line = measured.outcome.line()?;
    let svg = chart::svg(&measured.charts)?;
    let written = figures::write(&dir, &measured.table, &measured.outcome, &svg);
    if written.is_ok() {
        say::detail(&format!("data.csv, figures.json and plot.svg are in {}", dir.display()));
    }
    say::line(&line);
    written?;
    if out.is_none() {
        results::renew(Path::new("."))?;
    }
    Ok(measured.outcome.ok)
}

async fn measure(name: &str, image: &Image, args: &ExperimentArgs) -> Result<Measured> {
    let quick = args.quick;
    match name {
        "osdi02-f2" => osdi02_f2::run(image, quick).await,
        "osdi02-f4" => osdi02_f4::run(image, quick).await,
        "osdi02-f5" => osdi02_f5::run(image, quick).await,
        "osdi02-f6" => osdi02_f6::run(image, quick).await,
        "osdi02-f7" => osdi02_f7::run(image, quick).await,
        "osdi02-f8" => osdi02_f8::run(image, quick).await,
        "sharing-cost" => sharing_cost::run(image, quick).await,
        "soak" => soak::run(image, &soak::Plan::of(args)?).await,
        "vtj-memory-f6" => vtj_memory_f6::run(image, quick).await,
        "vtj-memory-f7" => vtj_memory_f7::run(image, quick).await,
        _ => vtj_memory_f5::run(image, quick).await,
    }
}
