//! The demo of `./run`: three guests on less memory than they were promised, each with a workload of
//! its own, under one manager.

mod cast;
mod screen;
mod summary;
mod table;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::Accel;
use ballast_units::Bytes;

use crate::console::Console;
use crate::manager::{Manager, Options};
use crate::signals::Signals;
use crate::{image, say};

/// How long guests may take until they report that they are ready.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Shorter than the manager's default, so that a short demo shows the estimates at work.
const SAMPLE_PERIOD: Duration = Duration::from_secs(4);
const TABLE_EVERY: Duration = Duration::from_secs(5);

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// End after so many seconds with a summary [default: 90; on a terminal: when you quit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub seconds: Option<u64>,
    /// Machine memory for all guests together
    #[arg(long, value_name = "SIZE", default_value = "384M")]
    pub budget: Bytes,
    /// Number of guests
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub guests: u32,
    /// Configured memory (max) of each guest
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub guest_memory: Bytes,
    /// Guaranteed memory (min) of each guest [default: 64M, or all of less]
    #[arg(long, value_name = "SIZE")]
    pub guest_min: Option<Bytes>,
    /// Idle memory tax, 0 <= tax < 1 [default: the manager's]
    #[arg(long, value_name = "RATE")]
    pub tax: Option<f64>,
    /// What guests run on: auto, kvm or tcg
    #[arg(long, default_value = "auto", value_parser = parse_accel)]
    pub accel: Accel,
    /// Print the table even on a terminal
    #[arg(long)]
    pub plain: bool,
    /// A kernel package to use instead of the newest
    #[arg(long, value_name = "PACKAGE")]
    pub kernel_package: Option<String>,
}

fn parse_accel(text: &str) -> Result<Accel, String> {
    match text {
        "auto" => Ok(Accel::Auto),
        "kvm" => Ok(Accel::Kvm),
        "tcg" => Ok(Accel::Tcg),
        _ => Err("expected auto, kvm or tcg".to_owned()),
    }
}

/// Why the demo's middle part ended.
enum End {
    Time,
    Quit,
    Signal(&'static str),
    ManagerGone,
}

/// True if every check passed.
pub async fn run(args: &DemoArgs) -> Result<bool> {
    if let Some(min) = args.guest_min {
        let max = args.guest_memory;
        ensure!(min <= max, "--guest-min {min} is above --guest-memory {max}");
    }
    let mut signals = Signals::listen()?;
    let begin = Instant::now();
    let package = args.kernel_package.clone();
    let image = signals.or("image", move || image::prepare(package.as_deref())).await?;
    say::detail(&format!("guests boot {}", image.package));
    say::step(&format!("Starting ballastd with {} of machine memory", args.budget));
    let options = Options {
        tax: args.tax,
        sample_period: Some(SAMPLE_PERIOD),
        ..Options::budget(args.budget)
    };
    let mut manager = Manager::start(&options)?;

    // Every way out from here ends the manager and its guests: in order, or by `manager`'s drop.
    let mut consoles = Vec::new();
    let end = tokio::select! {
        name = signals.any() => Ok(End::Signal(name)),
        end = play(args, &image, &mut manager, &mut consoles) => end,
    };
    let end = end?;
    consoles.iter_mut().for_each(|c: &mut (String, Console)| drop(c.1.poll()));
    if matches!(end, End::ManagerGone) {
        bail!("ballastd ended by itself: {}", manager.last_words());
    }
    let states = manager.client().vms().await.context("the VMs, before they are stopped")?;
    say::step("Stopping the guests and the manager");
    let finished = tokio::select! {
        finished = manager.finish() => finished?,
        name = signals.any() => bail!("{name} while stopping; the rest is ended by force"),
    };
    let summary =
        summary::Summary::new(&finished.0, &finished.1, &consoles, &states, begin.elapsed());
    // Whoever ends it early has not asked for every guest to have checked something.
    let to_the_end = matches!(end, End::Time);
    summary.print(to_the_end);
    if let End::Signal(name) = end {
        say::line(&format!("ended by {name}"));
    }
    Ok(summary.passed(to_the_end))
}

/// Starts the guests, waits until they are ready, and shows what becomes of them.
async fn play(
    args: &DemoArgs,
    image: &image::Image,
    manager: &mut Manager,
    consoles: &mut Vec<(String, Console)>,
) -> Result<End> {
    start(args, image, manager, consoles).await?;
    if let Some(end) = boot(manager, consoles).await? {
        return Ok(end);
    }
    if !args.plain && std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        let limit = args.seconds.map(Duration::from_secs);
        return screen::top(manager, limit).await;
    }
    let limit = Duration::from_secs(args.seconds.unwrap_or(90));
    print(limit, manager, consoles).await
}

/// Starts all guests; their consoles are followed from now on.
async fn start(
    args: &DemoArgs,
    image: &image::Image,
    manager: &mut Manager,
    consoles: &mut Vec<(String, Console)>,
) -> Result<()> {
    for n in 0..args.guests {
        let guest = cast::guest(n, args.guest_memory, manager)?;
        let mut spec = guest.spec(image, args.accel);
        spec.min = args.guest_min.unwrap_or(Bytes::from_mib(64).min(args.guest_memory)).0;
        say::step(&format!("Starting guest {} ({})", guest.name, guest.run.join("; ")));
        let view = manager
            .client()
            .run(&spec)
            .await
            .with_context(|| format!("starting {}", guest.name))?;
        if n == 0 {
            say::detail(&format!("guests run on {}", view.accel));
        }
        if let Some(reason) = &view.management.reason {
            say::detail(&format!("{} is not paged: {reason}", guest.name));
        }
        consoles.push((guest.name.clone(), Console::new(&guest.console)));
    }
    let host = manager.client().host().await?;
    say::detail(&format!("accelerator: {}", host.accel));
    Ok(())
}

/// Until all guests are ready; or how it ends before that.
async fn boot(manager: &mut Manager, consoles: &mut [(String, Console)]) -> Result<Option<End>> {
    say::step("Waiting for the guests to boot");
    let booting = Instant::now();
    while !consoles.iter().all(|(_, c)| c.story.ready.is_some()) {
        if let Some((name, console)) = consoles
            .iter()
            .find(|(_, c)| c.story.ready.is_none())
            .filter(|_| booting.elapsed() > BOOT_LIMIT)
        {
            bail!("{name} is not ready after {} s: {}", BOOT_LIMIT.as_secs(), console.tail(3));
        }
        if !manager.alive() {
            return Ok(Some(End::ManagerGone));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        consoles.iter_mut().for_each(|(_, c)| drop(c.poll()));
    }
    say::detail(&format!("all ready after {:.1} s", booting.elapsed().as_secs_f64()));
    Ok(None)
}

/// Prints a table now and then, until the time is over.
async fn print(
    limit: Duration,
    manager: &mut Manager,
    consoles: &mut [(String, Console)],
) -> Result<End> {
    let playing = Instant::now();
    let mut shown = false;
    while playing.elapsed() < limit {
        let rest = limit.saturating_sub(playing.elapsed());
        if shown {
            tokio::time::sleep(TABLE_EVERY.min(rest)).await;
        }
        shown = true;
        if !manager.alive() {
            return Ok(End::ManagerGone);
        }
        consoles.iter_mut().for_each(|(_, c)| drop(c.poll()));
        let host = manager.client().host().await?;
        let vms = manager.client().vms().await?;
        say::line(&table::render(playing.elapsed(), &host, &vms, consoles));
    }
    Ok(End::Time)
}
