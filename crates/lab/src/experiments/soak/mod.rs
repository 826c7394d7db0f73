//! An accelerated soak: real guests that check every page they read, under a manager that is overcommitted
//! and never left alone. Each step does one thing, drawn from a seed: VMs come, go and are killed, managers
//! are killed, restarted and replaced, parameters and configuration change, a swap location fills. After
//! each step all guests must go on, the manager must answer, and its books must add up; every manager that
//! takes VMs over looks through all of a VM's pages first (`Memory::check_quiet`), and refuses it if anything
//! is wrong. In the last third managers are left alive, to see what one grows by. At the end all VMs are
//! stopped, and nothing may be left.
//!
//! What can go in virtual time does so first: simulated hosts, of which whatever can be changed is changed (`hosts`).
//!
//! The steps follow from the seed, their moments do not: a run cannot be repeated to the page.

mod acts;
mod books;
mod draw;
mod flat;
mod hosts;
mod report;
mod scene;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use ballast_api::{HostView, VmView};

use super::{ExperimentArgs, Measured};
use crate::figures::Table;
use crate::image::Image;
use crate::say;
use acts::{MOST_VMS, act};
use books::Process;
use draw::{Action, Now, draw};
use report::Row;
use scene::Soak;

const NAME: &str = "soak";
/// Where logs are kept of a run that failed: what begins so is not committed.
const EVIDENCE: &str = "experiments/soak/run-failed";
/// Of the run, in which managers are ended.
const RESTLESS: f64 = 2.0 / 3.0;
/// Between two steps there is less than that.
const LULL_MS: u64 = 2000;
const MINUTE: f64 = 60.0;
/// How long a fresh manager is given to open what it has for as long as it runs: its journal's file comes with its first turn.
const UNFOLDED: Duration = Duration::from_secs(3);
/// How long the manager is given to close what VMs had, once they are gone.
const QUIET: Duration = Duration::from_secs(30);

/// How long, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    minutes: f64,
    seed: u64,
}

impl Plan {
    /// Err: minutes that are none.
    pub fn of(args: &ExperimentArgs) -> Result<Plan> {
        let minutes = args.minutes.unwrap_or(if args.quick { 3.0 } else { 20.0 });
        if !(minutes > 0.0 && minutes <= 100_000.0) {
            bail!("--minutes {minutes}: not a number of minutes");
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Plan { minutes, seed: args.seed.unwrap_or(now.as_secs()) })
    }
}

/// What is to be reported.
struct Record {
    table: Table,
    actions: BTreeMap<Action, u64>,
    fresh: Process,
    end: Process,
}

/// Err: something went wrong; with seed and step.
pub async fn run(image: &Image, plan: &Plan) -> Result<Measured> {
    say::step(&format!("soak of {} minutes: --seed {}", plan.minutes, plan.seed));
    let Plan { minutes, seed } = *plan;
    let hosts = tokio::task::spawn_blocking(move || hosts::play(minutes, seed)).await??;
    let mut soak = Soak::new(image, plan.seed)?;
    soak.sleep(UNFOLDED).await?;
    let mut record = Record {
        table: Table::new(&report::COLUMNS),
        actions: BTreeMap::new(),
        fresh: soak.process()?,
        end: Process::default(),
    };
    let mut at = String::from("the start");
    let ran = match steps(&mut soak, plan, &mut record, &mut at).await {
        Ok(()) => clear(&mut soak, &mut record, &mut at).await,
        Err(e) => Err(e),
    };
    if let Err(e) = ran {
        if let Err(lost) = soak.keep_evidence(Path::new(EVIDENCE)) {
            say::detail(&format!("logs are not kept: {lost:#}"));
        }
        return Err(e.context(format!("seed {}, {at} (logs: {EVIDENCE})", plan.seed)));
    }
    soak.counts.away.add(soak.away);
    let (minutes, checks, counts) =
        (soak.elapsed().as_secs_f64() / MINUTE, soak.checks(), soak.counts);
    let (_, left) = soak.manager.finish().await?;
    left.iter().for_each(|what| say::detail(&format!("left behind: {what}")));
    let told = report::Told { minutes, seed, checks, counts, left: left.len() };
    let mut measured =
        report::evaluate(record.table, &record.actions, record.fresh, record.end, &told);
    hosts.tell(&mut measured.outcome);
    Ok(measured)
}

async fn steps(
    soak: &mut Soak<'_>,
    plan: &Plan,
    record: &mut Record,
    at: &mut String,
) -> Result<()> {
    let whole = Duration::from_secs_f64(plan.minutes * MINUTE);
    let mut step = 0;
    while soak.elapsed() < whole {
        step += 1;
        // What the step before has set off is under way.
        let moment = Duration::from_millis(soak.random.below(LULL_MS));
        soak.sleep(moment).await?;
        let managers_end = soak.elapsed() < whole.mul_f64(RESTLESS);
        let now = Now { vms: soak.guests.len(), most: MOST_VMS, managers_end };
        let action = draw(&mut soak.random, now);
        *at = format!("step {step}, {}", action.name());
        let begin = soak.elapsed();
        let refused = soak.counts.refusals;
        let words = act(soak, action).await?;
        say::detail(&format!("{:>6.1} s {at}: {words}", begin.as_secs_f64()));
        at.push_str(&format!(" ({words})"));
        let seen = soak.settle().await?;
        *record.actions.entry(action).or_default() += 1;
        let row = Row { step, action, begin, refused: soak.counts.refusals - refused };
        note(soak, &mut record.table, &row, &seen)?;
    }
    Ok(())
}

fn note(
    soak: &Soak<'_>,
    table: &mut Table,
    row: &Row,
    seen: &(HostView, Vec<VmView>),
) -> Result<()> {
    let (host, vms) = seen;
    table.push(&row.cells(soak, soak.process()?, host, vms));
    for vm in vms.iter().filter_map(|vm| vm.trouble.as_ref().map(|why| (&vm.name, why))) {
        say::detail(&format!("{}: {}", vm.0, vm.1));
    }
    Ok(())
}

/// All memory is given, all VMs are looked through once more, go on, and end; nothing may be left of them.
async fn clear(soak: &mut Soak<'_>, record: &mut Record, at: &mut String) -> Result<()> {
    *at = "the end".to_owned();
    say::step("memory for all, another manager, and the end of all VMs");
    soak.relieve().await?;
    soak.settle().await?;
    acts::upgrade(soak).await?;
    soak.settle().await?;
    soak.all_check_anew().await?;
    while let Some(name) = soak.guests.first().map(|guest| guest.name.clone()) {
        let guest = soak.leaves(&name)?;
        let stopped = soak.client().stop(&name, Duration::ZERO).await;
        stopped.with_context(|| format!("stopping {name}"))?;
        soak.has_left(guest)?;
    }
    soak.soon(|_, host, vms| books::unserved(vms, &[]).or_else(|| books::left(host))).await?;
    record.end = quiet(soak, record.fresh).await?;
    Ok(())
}

/// The manager's process, once it has closed what VMs had open and its idle threads have ended.
async fn quiet(soak: &mut Soak<'_>, fresh: Process) -> Result<Process> {
    let begin = soak.elapsed();
    loop {
        let now = soak.process()?;
        if now.fds <= fresh.fds && now.threads <= fresh.threads {
            return Ok(now);
        }
        if soak.elapsed() - begin > QUIET {
            books::open(soak.manager.pid()?).iter().for_each(|what| say::detail(what));
            return Ok(now);
        }
        soak.sleep(Duration::from_millis(500)).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_are_some() {
        let args =
            |minutes| ExperimentArgs { name: None, quick: true, out: None, minutes, seed: Some(7) };
        assert_eq!(Plan::of(&args(None)).unwrap(), Plan { minutes: 3.0, seed: 7 });
        assert_eq!(Plan::of(&args(Some(0.5))).unwrap().minutes, 0.5);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Plan::of(&args(Some(bad))).is_err(), "{bad}");
        }
    }
}
