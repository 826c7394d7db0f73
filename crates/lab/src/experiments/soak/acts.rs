//! What each action does.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::client::ClientError;
use ballast_api::{Accel, ErrorCode, HostChange, PoolChange, Salt, VmChange, VmSpec};
use ballast_units::Bytes;
use rustix::process::{Pid, Signal, kill_process};

use super::draw::{Action, workload};
use super::scene::Soak;
use crate::guest::Guest;

const MIB: u64 = 1 << 20;
/// The most VMs at one time.
pub const MOST_VMS: usize = 6;
/// Names of pools.
const POOLS: [&str; 3] = ["red", "green", "red/inner"];

/// Does it. What the manager refuses is counted, and no error. In words: what was done.
pub async fn act(soak: &mut Soak<'_>, action: Action) -> Result<String> {
    match action {
        Action::Start => start(soak).await,
        Action::Stop => stop(soak).await,
        Action::KillVm => kill_vm(soak).await,
        Action::KillManager => kill_manager(soak).await,
        Action::Restart => restart(soak).await,
        Action::Upgrade => upgrade(soak).await,
        Action::SetVm => set_vm(soak).await,
        Action::SetHost => set_host(soak).await,
        Action::Reload => reload(soak).await,
        Action::FillSwap => fill_swap(soak).await,
        Action::Pause => pause(soak).await,
        Action::Pool => pool(soak).await,
        Action::Wait => {
            let time = Duration::from_millis(soak.random.between(1000, 8000));
            soak.sleep(time).await?;
            Ok(format!("{:.1} s", time.as_secs_f64()))
        }
    }
}

/// True if it was done. A refusal that is the manager's right is counted; a failure is an error.
fn done<T>(soak: &mut Soak, what: &str, result: Result<T, ClientError>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(ClientError::Refused(body)) if body.code != ErrorCode::Internal => {
            soak.counts.refusals += 1;
            Ok(false)
        }
        Err(e) => Err(e).with_context(|| what.to_owned()),
    }
}

fn told(done: bool, what: String) -> String {
    if done { what } else { format!("{what}: refused") }
}

fn any_vm(soak: &mut Soak) -> Result<String> {
    let at = soak.random.below(soak.guests.len() as u64) as usize;
    soak.guests.get(at).map(|guest| guest.name.clone()).context("no VM is there")
}

async fn start(soak: &mut Soak<'_>) -> Result<String> {
    soak.made += 1;
    let name = format!("vm{}", soak.made);
    let mib = *soak.random.of(&[112, 128]).unwrap_or(&128);
    let work = workload(&mut soak.random, mib);
    let mut guest = Guest::new(&name, Bytes::from_mib(mib), &soak.manager.consoles());
    guest = guest.run(work.clone());
    let salt = Salt::try_from("soak").context("the salt")?;
    let random = &mut soak.random;
    let spec = VmSpec {
        min: random.between(0, 3) * 8 * MIB,
        shares: Some(random.between(500, 4000) as u32),
        salt: (!random.once_in(3)).then_some(salt),
        no_balloon: random.once_in(4),
        free_page_reporting: random.once_in(3),
        wait_s: Some(15.0),
        ..guest.spec(soak.image(), Accel::Tcg)
    };
    let started = soak.client().run(&spec).await;
    let ok = done(soak, "starting a VM", started)?;
    if ok {
        soak.joined(name.clone(), &guest.console);
    }
    Ok(told(ok, format!("{name}, {mib} MiB, {work}")))
}

async fn stop(soak: &mut Soak<'_>) -> Result<String> {
    let name = any_vm(soak)?;
    let grace = Duration::from_secs(*soak.random.of(&[0, 0, 5]).unwrap_or(&0));
    let guest = soak.leaves(&name)?;
    soak.client().stop(&name, grace).await.with_context(|| format!("stopping {name}"))?;
    soak.has_left(guest)?;
    Ok(format!("{name}, grace {} s", grace.as_secs()))
}

async fn pid_of(soak: &Soak<'_>, name: &str) -> Result<Pid> {
    let view = soak.client().vm(name).await.with_context(|| format!("looking at {name}"))?;
    let raw = view.pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    raw.with_context(|| format!("{name} has no process"))
}

async fn kill_vm(soak: &mut Soak<'_>) -> Result<String> {
    let name = any_vm(soak)?;
    let pid = pid_of(soak, &name).await?;
    let guest = soak.leaves(&name)?;
    kill_process(pid, Signal::KILL).with_context(|| format!("killing {name}"))?;
    soak.has_left(guest)?;
    Ok(name)
}

/// At times a VM dies while there is no manager; at times the next one shares pages, or does not.
async fn kill_manager(soak: &mut Soak<'_>) -> Result<String> {
    // At any moment of whatever it does.
    let moment = Duration::from_millis(soak.random.below(500));
    let orphan = soak.random.once_in(4) && soak.guests.len() > 1;
    let victim = if orphan { Some(any_vm(soak)?) } else { None };
    let pid = match &victim {
        Some(name) => Some(pid_of(soak, name).await?),
        None => None,
    };
    soak.sleep(moment).await?;
    soak.manager.kill()?;
    if let (Some(name), Some(pid)) = (&victim, pid) {
        let guest = soak.leaves(name)?;
        soak.counts.orphans_killed += 1;
        kill_process(pid, Signal::KILL).with_context(|| format!("killing {name}"))?;
        soak.has_left(guest)?;
    }
    let alone = Duration::from_millis(soak.random.below(800));
    soak.sleep(alone).await?;
    begin_again(soak)?;
    let mut words = format!("{:.1} s without a manager", alone.as_secs_f64());
    if soak.random.once_in(4) {
        // In the midst of its takeovers.
        let moment = Duration::from_millis(soak.random.below(300));
        soak.sleep(moment).await?;
        soak.manager.kill()?;
        begin_again(soak)?;
        words.push_str(", and again");
    }
    if let Some(name) = victim {
        words.push_str(&format!(", {name} killed meanwhile"));
    }
    soak.counts.looked_through += 1;
    Ok(words)
}

fn begin_again(soak: &mut Soak) -> Result<()> {
    if soak.random.once_in(4) {
        soak.settings.sharing = !soak.settings.sharing;
    }
    let options = soak.options();
    soak.manager.restart(&options)?;
    soak.has_new_manager();
    Ok(())
}

async fn restart(soak: &mut Soak<'_>) -> Result<String> {
    soak.all_served().await?;
    soak.manager.leave().await?;
    begin_again(soak)?;
    soak.counts.looked_through += 1;
    Ok(format!("sharing {}", soak.settings.sharing))
}

/// Another manager, while all goes on.
pub async fn upgrade(soak: &mut Soak<'_>) -> Result<String> {
    soak.all_served().await?;
    let options = soak.options();
    soak.manager.take_over(&options)?;
    soak.has_new_manager();
    soak.counts.looked_through += 1;
    Ok(format!("{} VMs", soak.guests.len()))
}

async fn set_vm(soak: &mut Soak<'_>) -> Result<String> {
    let name = any_vm(soak)?;
    let size = soak.client().vm(&name).await.context("looking at it")?.params.size;
    let random = &mut soak.random;
    let mut change = VmChange::default();
    match random.below(6) {
        0 => change.shares = Some(random.between(100, 5000) as u32),
        1 => change.min = Some(random.between(0, 6) * 8 * MIB),
        2 => change.max = Some((random.between(72, 128) * MIB).min(size)),
        3 => change.tax = Some(random.below(96) as f64 / 100.0),
        4 => change.pool = random.of(&POOLS).map(|pool| (*pool).to_owned()),
        _ => change.no_pool = true,
    }
    let words = format!("{name} {}", serde_json::to_string(&change)?);
    let changed = soak.client().change(&name, &change).await;
    Ok(told(done(soak, "changing a VM", changed)?, words))
}

async fn set_host(soak: &mut Soak<'_>) -> Result<String> {
    if soak.random.once_in(4) {
        let tax = soak.random.below(96) as f64 / 100.0;
        let change = HostChange { tax: Some(tax), ..HostChange::default() };
        let changed = soak.client().change_host(&change).await;
        return Ok(told(done(soak, "the host's tax", changed)?, format!("tax {tax}")));
    }
    let budget = Bytes::from_mib(soak.random.between(208, 480));
    let change = HostChange { budget: Some(budget.0), ..HostChange::default() };
    let changed = soak.client().change_host(&change).await;
    let ok = done(soak, "the budget", changed)?;
    if ok {
        soak.has_budget(budget);
    }
    Ok(told(ok, format!("budget {:.0} MiB", budget.mib())))
}

async fn reload(soak: &mut Soak<'_>) -> Result<String> {
    soak.settings = soak.settings.reloaded(&mut soak.random);
    let options = soak.options();
    soak.manager.reload(&options).await?;
    Ok(format!("{:?}", soak.settings))
}

/// The file that fills a file system; gone when it is dropped.
struct Filler(std::path::PathBuf);

impl Filler {
    fn fill(folder: &Path) -> Result<Filler> {
        let filler = Filler(folder.join("filler"));
        let mut file = std::fs::File::create(&filler.0).context("filling the small location")?;
        let bytes = vec![0xa5; 1 << 16];
        loop {
            match file.write(&bytes) {
                Ok(0) => return Ok(filler),
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => return Ok(filler),
                Err(e) => return Err(e).context("filling the small location"),
            }
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// At times a VM is started meanwhile, whose swap file has to be elsewhere.
async fn fill_swap(soak: &mut Soak<'_>) -> Result<String> {
    let filler = Filler::fill(&soak.manager.small_swap())?;
    let mut words = String::from("full");
    if soak.guests.len() < MOST_VMS && soak.random.once_in(2) {
        words = format!("full, start {}", start(soak).await?);
    }
    let time = Duration::from_millis(soak.random.between(2000, 8000));
    soak.sleep(time).await?;
    soak.all_served().await?;
    drop(filler);
    Ok(words)
}

/// Meanwhile the manager answers, though the VM's shim, QMP and guest do not.
async fn pause(soak: &mut Soak<'_>) -> Result<String> {
    let name = any_vm(soak)?;
    let pid = pid_of(soak, &name).await?;
    let time = Duration::from_millis(soak.random.between(500, 5000));
    kill_process(pid, Signal::STOP).with_context(|| format!("pausing {name}"))?;
    let begin = Instant::now();
    let answered = loop {
        if let Err(e) = soak.sleep(Duration::from_millis(200)).await {
            break Err(e);
        }
        let asked = Instant::now();
        if let Err(e) = soak.client().vms().await {
            break Err(e.into());
        }
        if asked.elapsed() > Duration::from_secs(10) {
            break Err(anyhow::anyhow!("an answer after {} s", asked.elapsed().as_secs()));
        }
        if begin.elapsed() > time {
            break Ok(());
        }
    };
    kill_process(pid, Signal::CONT).with_context(|| format!("resuming {name}"))?;
    if let Err(e) = answered {
        bail!("while {name} stood still: {e:#}");
    }
    Ok(format!("{name}, {:.1} s", time.as_secs_f64()))
}

async fn pool(soak: &mut Soak<'_>) -> Result<String> {
    let name = *soak.random.of(&POOLS).unwrap_or(&POOLS[0]);
    if soak.random.once_in(4) {
        let removed = soak.client().remove_pool(name).await;
        return Ok(told(done(soak, "removing a pool", removed)?, format!("{name} removed")));
    }
    let random = &mut soak.random;
    let mut change = PoolChange::default();
    match random.below(5) {
        0 => change.shares = Some(random.between(1000, 300_000) as u32),
        1 => change.min = Some(random.between(0, 4) * 16 * MIB),
        2 => change.max = Some(random.between(128, 400) * MIB),
        3 => change.no_max = true,
        _ => change.tax = Some(random.below(96) as f64 / 100.0),
    }
    let words = format!("{name} {}", serde_json::to_string(&change)?);
    let changed = soak.client().change_pool(name, &change).await;
    Ok(told(done(soak, "changing a pool", changed)?, words))
}
