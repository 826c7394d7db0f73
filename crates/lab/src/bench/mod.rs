//! Benchmarks on real guests. Where the same guest runs under plain QEMU, it does so in the same run,
//! as the peer; where Ballast loses, the line shows it.

mod boot;
mod child;
pub mod faults;
mod memory;
mod overcommit;
mod paged;
mod plenty;
mod policy;
mod policy_exact;
mod reclaim;
mod restart;
pub mod scale;
pub mod sharing;
mod touch;

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::figures::Outcome;
use crate::image::{self, Image};
use crate::say;
use crate::signals::Signals;

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Which one; without a name, lists them
    pub name: Option<String>,
    /// All of them, one after another
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
    /// Fewer repeats
    #[arg(long)]
    pub quick: bool,
    /// Also write each result to DIR/NAME.json
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Names, and what each measures.
pub(crate) const NAMES: [(&str, &str); 10] = [
    (
        "policy",
        "milliseconds to decide about 10,000 VMs, flat, in pools, under each policy; hosts simulated",
    ),
    ("boot", "seconds until a 256 MiB guest is ready: plain QEMU, and under Ballast"),
    ("touch", "pages a guest checks per second, memory plentiful: plain QEMU, and under Ballast"),
    ("plenty", "boots, loads and CPU time, memory plentiful: plain QEMU, KSM, and under Ballast"),
    ("reclaim", "MiB taken from a guest per second: by its balloon, and by paging"),
    (
        "restart",
        "seconds until a ballastd that was killed has 10 GiB of guests again, and serves them",
    ),
    (
        "scale",
        "what the manager takes for up to 50 idle guests, and for up to 200 VMs; how it grows",
    ),
    ("sharing", "CPU, memory and time to share equal pages: the kernel's KSM, and Ballast"),
    ("faults", "time of a fault on a reclaimed page: zram, zswap, a swap file, and Ballast"),
    ("overcommit", "work done by overcommitted guests: kernel swap, zram, KSM, and Ballast"),
];

/// True if all targets of all benchmarks were met.
pub async fn run(args: &BenchArgs) -> Result<bool> {
    if args.name.is_none() && !args.all {
        NAMES.iter().for_each(|(n, what)| say::line(&format!("{n:<12}{what}")));
        return Ok(true);
    }
    if let Some(name) = &args.name
        && !NAMES.iter().any(|(n, _)| n == name)
    {
        let names: Vec<&str> = NAMES.iter().map(|(n, _)| *n).collect();
        bail!("no benchmark '{name}' (there are: {})", names.join(", "));
    }
    // Where it cannot be made, nothing is measured for nothing.
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    let mut signals = Signals::listen()?;
    let mut image = None;
    let (mut ok, mut failed) = (true, Vec::new());
    for (name, what) in NAMES {
        if args.name.as_deref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        say::step(&format!("{name}: {what}"));
        // It needs no guests.
        let measured = if name == "policy" {
            let quick = args.quick;
            signals.or(name, move || policy::run(quick)).await
        } else {
            let image = match &mut image {
                Some(image) => image,
                none => none.insert(signals.or("image", || image::prepare(None)).await?),
            };
            tokio::select! {
                outcome = measure(name, image, args.quick) => outcome,
                signal = signals.any() => bail!("{name}: ended by {signal}"),
            }
        };
        // Others may be possible on this host, though this one is not.
        let outcome = match measured {
            Ok(outcome) => Outcome { quick: args.quick, ..outcome },
            Err(e) if args.all => {
                say::line(&format!("{name}: not measured: {e:#}"));
                failed.push(name);
                continue;
            }
            Err(e) => return Err(e),
        };
        ok &= outcome.ok;
        let line = outcome.line()?;
        say::line(&line);
        if let Some(dir) = &args.out {
            let path = dir.join(format!("{name}.json"));
            let told = || path.display().to_string();
            std::fs::write(&path, format!("{line}\n")).with_context(told)?;
        }
    }
    ensure!(failed.is_empty(), "not measured: {}", failed.join(", "));
    Ok(ok)
}

async fn measure(name: &str, image: &Image, quick: bool) -> Result<Outcome> {
    let repeats = if quick { 1 } else { 5 };
    match name {
        "boot" => boot::run(image, repeats).await,
        "touch" => touch::run(image, repeats).await,
        "plenty" => plenty::run(image, quick).await,
        "restart" => restart::run(quick).await,
        "scale" => scale::run(image, quick).await,
        "sharing" => sharing::run(quick).await,
        "faults" => faults::run(quick).await,
        "overcommit" => overcommit::run(image, quick).await,
        _ => reclaim::run(image, repeats).await,
    }
}
