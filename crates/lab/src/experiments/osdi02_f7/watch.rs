//! What is read while the two VMs run.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_api::{HostChange, VmView};
use ballast_units::Bytes;

use super::{Load, Phase, options};
use crate::console::Event;
use crate::experiments::stage::Stage;
use crate::figures::Table;
use crate::say;

/// `load` and `phase` are counted from 0; `mb_per_s` is empty where nothing was reported.
pub const COLUMNS: [&str; 11] = [
    "load",
    "phase",
    "time_s",
    "tax",
    "idle_mib",
    "busy_mib",
    "idle_target_mib",
    "busy_target_mib",
    "idle_active_mib",
    "busy_active_mib",
    "mb_per_s",
];

/// How long the files, or dbench's warm-up, may take.
const READY: Duration = Duration::from_secs(300);
/// Throughput is told for so many seconds at a time.
const WINDOW_S: f64 = 10.0;

/// Waits until the load does what is measured.
pub async fn ready(stage: &mut Stage, load: Load) -> Result<()> {
    let begin = stage.elapsed();
    loop {
        let told = stage.poll()?.into_iter().any(|(_, e)| match load {
            Load::Dbench => e.kind() == "dbench-window",
            Load::Files => e.text("phase") == "written",
        });
        if told {
            return Ok(());
        }
        if stage.elapsed() - begin > READY {
            bail!("{} does not begin within {} s", load.name(), READY.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Throughput from what a load reports.
struct Meter {
    load: Load,
    /// When pages were last counted, and how many.
    last: Option<(f64, f64)>,
}

impl Meter {
    /// MB/s, if `event` at `t` tells it.
    fn feed(&mut self, t: f64, event: &Event) -> Option<f64> {
        if self.load == Load::Dbench {
            return event.number("mb_per_s").filter(|_| event.kind() == "dbench-window");
        }
        let pages = event.number("checks").filter(|_| event.text("work") == "files")?;
        let (since, before) = *self.last.get_or_insert((t, pages));
        if t - since < WINDOW_S {
            return None;
        }
        self.last = Some((t, pages));
        Some((pages - before) * 4096.0 / 1e6 / (t - since))
    }
}

pub async fn watch(
    stage: &mut Stage,
    number: usize,
    phases: &[Phase],
    table: &mut Table,
) -> Result<()> {
    let begin = stage.elapsed();
    let mut meter = Meter { load: Load::ALL[number], last: None };
    let mut end = 0;
    let mut told = 0;
    for (place, phase) in phases.iter().enumerate() {
        say::step(&format!("{}, tax {:.0}%", phase.kind, phase.tax * 100.0));
        if place > 0 {
            enter(stage, *phase).await?;
        }
        end += phase.seconds;
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let t = (stage.elapsed() - begin).as_secs_f64();
            let events = stage.poll()?;
            let rate = events.iter().filter_map(|(_, e)| meter.feed(t, e)).next_back();
            if t >= end as f64 {
                break;
            }
            let (_, vms) = stage.views().await?;
            let of = |name: &str, what: fn(&VmView) -> u64| {
                vms.iter().find(|vm| vm.name == name).map_or(f64::NAN, |vm| Bytes(what(vm)).mib())
            };
            let row = [
                number as f64,
                place as f64,
                t,
                phase.tax,
                of("vm1", |vm| vm.memory.consumed),
                of("vm2", |vm| vm.memory.consumed),
                of("vm1", |vm| vm.memory.target),
                of("vm2", |vm| vm.memory.target),
                of("vm1", |vm| vm.active.estimate),
                of("vm2", |vm| vm.active.estimate),
                rate.unwrap_or(f64::NAN),
            ];
            table.push(&row);
            if t as u64 / 20 > told {
                told = t as u64 / 20;
                say::detail(&format!(
                    "{t:>4.0} s: idle {:.0} MiB (active {:.0}), busy {:.0} MiB (active {:.0})",
                    row[4], row[8], row[5], row[9]
                ));
            }
        }
    }
    Ok(())
}

async fn enter(stage: &Stage, phase: Phase) -> Result<()> {
    stage.manager.reload(&options(phase.kind)).await?;
    let change = HostChange { tax: Some(phase.tax), ..HostChange::default() };
    stage.manager.client().change_host(&change).await.context("the tax").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_told_by_dbench_and_counted_for_files() {
        let event = |text: &str| Event::parse(&format!("@ballast {text}")).unwrap();
        let mut dbench = Meter { load: Load::Dbench, last: None };
        let window = event("{\"event\":\"dbench-window\",\"work\":\"dbench\",\"mb_per_s\":7.5}");
        assert_eq!(dbench.feed(1.0, &window), Some(7.5));
        let mut files = Meter { load: Load::Files, last: None };
        let pages = |n: u32| {
            event(&format!("{{\"event\":\"progress\",\"work\":\"files\",\"checks\":{n}}}"))
        };
        assert_eq!(files.feed(1.0, &window), None);
        assert_eq!(files.feed(1.0, &pages(100)), None);
        assert_eq!(files.feed(5.0, &pages(900)), None);
        assert_eq!(files.feed(11.0, &pages(10_100)), Some(4.096));
    }
}
