//! What the manager itself costs where there is no pressure: with idle guests, and with as many and as
//! large VMs as a big host has.
//!
//! - `idle`: real guests that do nothing.
//! - `many`: processes with the shim stand in for VMMs. Their memory is mapped and hardly touched, so
//!   what is measured is what the manager does and holds per VM and per gigabyte of configured size.
//!
//! There is no peer: nothing else keeps such books. The figures are parts of a core, and of memory.

mod sleeper;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::client::Client;
use ballast_api::{Mode, RunState};
use ballast_units::Bytes;

use super::child::Child;
use crate::experiments::stage::Stage;
use crate::figures::Outcome;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::{Manager, Options};
use crate::{say, tools};

pub use sleeper::{SleeperArgs, run as sleep};

/// The targets: a hundredth of a core for 50 idle guests; memory, as a part of what is managed.
const IDLE_CPU_PERCENT: f64 = 1.0;
const MEMORY_PERCENT: f64 = 0.75;
const GUEST: Bytes = Bytes::from_mib(96);
/// What becomes of guests after their boot: their caches settle, scanners have seen all.
const SETTLE: Duration = Duration::from_secs(30);
const PATIENCE: Duration = Duration::from_secs(300);
/// Stretches of 2 MiB that each of the many touches: at the beginning, and then each second.
const TOUCHED: usize = 64;
const TOUCHED_PER_S: usize = 4;

/// How much of it.
struct Plan {
    guests: usize,
    vms: usize,
    gib: usize,
    window: Duration,
}

pub async fn run(image: &Image, quick: bool) -> Result<Outcome> {
    let plan = if quick {
        Plan { guests: 10, vms: 100, gib: 4, window: Duration::from_secs(15) }
    } else {
        Plan { guests: 50, vms: 500, gib: 4, window: Duration::from_secs(60) }
    };
    let mut outcome = Outcome::new("scale");
    idle(image, &plan, &mut outcome).await.context("idle guests")?;
    many(&plan, &mut outcome).await.context("many VMs")?;
    Ok(outcome)
}

/// What the manager takes: its process, and its files that are not mapped into it.
struct Cost {
    cpu_s: f64,
    at: Instant,
    rss: u64,
}

async fn cost(client: &Client) -> Result<Cost> {
    let host = client.host().await?;
    Ok(Cost { cpu_s: host.manager_cpu_s, at: Instant::now(), rss: host.manager_rss })
}

impl Cost {
    /// Percent of a core since `before`.
    fn percent_since(&self, before: &Cost) -> f64 {
        (self.cpu_s - before.cpu_s) / (self.at - before.at).as_secs_f64() * 100.0
    }
}

fn host_memory() -> Result<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let total = text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.split_whitespace().next());
    let kib: u64 = total.context("no MemTotal in /proc/meminfo")?.parse()?;
    Ok(Bytes(kib << 10))
}

/// Bytes that files below a folder take.
fn taken_below(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let taken = entries.flatten().map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => taken_below(&entry.path()),
        Ok(found) => found.blocks() * 512,
        Err(_) => 0,
    });
    taken.sum()
}

async fn idle(image: &Image, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let budget = Bytes((GUEST.0 + (16 << 20)) * plan.guests as u64 + (512 << 20));
    let mut stage = Stage::new(&Options::budget(budget))?;
    for n in 0..plan.guests {
        let guest = Guest::new(&format!("idle{n}"), GUEST, &stage.manager.consoles());
        stage.add(&guest, image, |_| {}).await?;
        // A few at a time: more only hinder one another.
        if n % 4 == 3 {
            stage.wait_for_boot().await?;
            say::detail(&format!("{} of {} guests booted", n + 1, plan.guests));
        }
    }
    stage.wait_for_boot().await?;
    tokio::time::sleep(SETTLE).await;
    let before = cost(stage.manager.client()).await?;
    tokio::time::sleep(plan.window).await;
    let after = cost(stage.manager.client()).await?;
    stage.poll()?;
    let percent = after.percent_since(&before);
    let managed = GUEST.0 * plan.guests as u64;
    say::detail(&format!(
        "{} idle guests: {percent:.2}% of a core, {} of memory",
        plan.guests,
        Bytes(after.rss)
    ));
    outcome.figure("idle_guests", plan.guests as f64);
    outcome.figure("idle_cpu_percent", percent);
    outcome.figure("idle_rss_mib", after.rss as f64 / 1_048_576.0);
    outcome.figure("idle_rss_percent_of_managed", after.rss as f64 / managed as f64 * 100.0);
    outcome.at_most("idle_cpu_percent", percent, IDLE_CPU_PERCENT);
    stage.end().await?;
    Ok(())
}

async fn many(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    // Nearly all the host has: what the manager may come to need for each VM is set aside at its start.
    let options = Options::budget(Bytes(host_memory()?.0 / 10 * 9));
    let mut manager = Manager::start(&options)?;
    let empty = cost(manager.client()).await?;
    let begin = Instant::now();
    let mut sleepers = Vec::new();
    for n in 0..plan.vms {
        let environment = BTreeMap::from([
            ("LD_PRELOAD", OsString::from(tools::sibling("libballast_shim.so")?)),
            ("BALLAST_VM", format!("vm{n}").into()),
            ("BALLAST_SHIM_SOCKET", manager.shim_socket().into()),
            ("BALLAST_RAM_SIZE", ((plan.gib as u64) << 30).to_string().into()),
        ]);
        let words = ["--mib".to_owned(), (plan.gib << 10).to_string()];
        sleepers.push(Child::start("sleeper", &words, &environment)?);
        if n % 50 == 49 {
            all_paged(manager.client(), n + 1).await?;
            say::detail(&format!("{} of {} VMs taken in", n + 1, plan.vms));
        }
    }
    all_paged(manager.client(), plan.vms).await?;
    let taken_in = begin.elapsed().as_secs_f64();
    for (n, sleeper) in sleepers.iter_mut().enumerate() {
        sleeper.ask(&format!("touch {TOUCHED} {n}")).await?;
    }
    let quiet = watch(&manager, plan, &mut []).await?;
    let busy = watch(&manager, plan, &mut sleepers).await?;
    let after = cost(manager.client()).await?;
    let files = taken_below(&manager.run_dir());
    manager.kill()?;
    let begin = Instant::now();
    manager.restart(&options)?;
    all_paged(manager.client(), plan.vms).await?;
    let taken_over = begin.elapsed().as_secs_f64();
    for sleeper in &mut sleepers {
        sleeper.ask("check").await?;
    }
    let managed = (plan.vms as u64 * plan.gib as u64) << 30;
    // What is mapped of the files is in both.
    let most = (after.rss + files) as f64;
    say::detail(&format!(
        "{} VMs of {} GiB: {quiet:.2}% of a core idle, {busy:.2}% at {TOUCHED_PER_S} pages/s each; {} and \
         {} of files; taken over in {taken_over:.2} s",
        plan.vms,
        plan.gib,
        Bytes(after.rss),
        Bytes(files)
    ));
    outcome.figure("vms", plan.vms as f64);
    outcome.figure("gib_each", plan.gib as f64);
    outcome.figure("taken_in_s", taken_in);
    outcome.figure("taken_over_s", taken_over);
    outcome.figure("many_idle_cpu_percent", quiet);
    outcome.figure("many_busy_cpu_percent", busy);
    outcome.figure("many_rss_mib", (after.rss - empty.rss.min(after.rss)) as f64 / 1_048_576.0);
    outcome.figure("many_files_mib", files as f64 / 1_048_576.0);
    outcome.at_most("memory_percent_of_managed", most / managed as f64 * 100.0, MEMORY_PERCENT);
    for sleeper in sleepers {
        sleeper.end().await?;
    }
    let (_, left) = manager.finish().await?;
    ensure!(left.is_empty(), "left behind: {}", left.join(", "));
    Ok(())
}

/// Percent of a core that the manager takes while each of `active` touches a few pages a second.
async fn watch(manager: &Manager, plan: &Plan, active: &mut [Child]) -> Result<f64> {
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = cost(manager.client()).await?;
    let mut second = tokio::time::interval(Duration::from_secs(1));
    let begin = Instant::now();
    let mut seed = 1_000_000;
    while begin.elapsed() < plan.window {
        second.tick().await;
        for sleeper in active.iter_mut() {
            seed += 1;
            sleeper.ask(&format!("touch {TOUCHED_PER_S} {seed}")).await?;
        }
    }
    Ok(cost(manager.client()).await?.percent_since(&before))
}

async fn all_paged(client: &Client, count: usize) -> Result<()> {
    let begin = Instant::now();
    loop {
        let vms = client.vms().await?;
        let paged = vms
            .iter()
            .filter(|vm| vm.state == RunState::Running && vm.management.mode == Mode::Paged)
            .count();
        if paged >= count {
            return Ok(());
        }
        let why = vms.iter().find_map(|vm| vm.management.reason.clone()).unwrap_or_default();
        ensure!(begin.elapsed() < PATIENCE, "{paged} of {count} are managed: {why}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
