//! What is read while the five VMs run: in ESX's terms, in which zero pages are shared pages. Ballast
//! drops them, and shows them as untouched.

use std::time::Duration;

use anyhow::{Result, bail};
use ballast_api::{HostView, StateName, VmView};
use ballast_units::Bytes;

use super::{SQL, Times, VMS};
use crate::experiments::stage::Stage;
use crate::figures::Table;
use crate::say;

/// How long the database may take until it has its data.
const FILLED: Duration = Duration::from_secs(900);
/// While they boot, states last less than a second.
const BOOT_LOOK: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_secs(1);

/// Of a run under one policy.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// In the order of the policies.
    pub kind: usize,
    /// MiB of a guest that are never touched.
    pub never: f64,
    /// Lengths of the phases.
    pub times: Times,
}

/// What the VMs are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Until the last one's first program runs.
    Boot,
    /// Until the database has its data.
    Fill,
    /// The database answers queries.
    Busy,
    /// The database rests.
    Rest,
    /// It answers again.
    Query,
}

impl Phase {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Boot => "boot",
            Phase::Fill => "fill",
            Phase::Busy => "busy",
            Phase::Rest => "rest",
            Phase::Query => "query",
        }
    }

    /// In tables.
    pub fn number(self) -> f64 {
        f64::from(self as u8)
    }
}

/// Of the host. `state`: 0 high to 3 low. The `_total` are running totals.
const OF_HOST: [&str; 14] = [
    "policy",
    "time_s",
    "phase",
    "state",
    "free_mib",
    "allocated_mib",
    "consumed_mib",
    "active_mib",
    "shared_mib",
    "saved_mib",
    "ballooned_mib",
    "swapped_mib",
    "zero_dropped_total_mib",
    "swapped_out_total_mib",
];
/// Of each VM; the last is a running total of answers that were found right.
const OF_VM: [&str; 8] = [
    "allocated_mib",
    "consumed_mib",
    "target_mib",
    "active_mib",
    "shared_mib",
    "ballooned_mib",
    "swapped_mib",
    "answers",
];

/// Of the table that `watch` fills.
pub fn columns() -> Vec<String> {
    let of_vms = VMS.iter().flat_map(|vm| OF_VM.map(|what| of(vm.name, what)));
    OF_HOST.iter().map(|c| (*c).to_owned()).chain(of_vms).collect()
}

/// The column `what` of a VM.
pub fn of(vm: &str, what: &str) -> String {
    format!("{}_{what}", vm.replace('-', "_"))
}

/// Runs the phases to the end.
pub async fn watch(stage: &mut Stage, about: About, table: &mut Table) -> Result<()> {
    let begin = stage.elapsed();
    let mut phase = Phase::Boot;
    let mut since = begin;
    let mut told = 0;
    loop {
        let mut next = phase;
        for (n, event) in stage.poll()? {
            if stage.guests[n].0 == SQL {
                next = match event.text("phase") {
                    "written" => Phase::Busy,
                    "rest" => Phase::Rest,
                    "again" => Phase::Query,
                    _ => next,
                };
            }
        }
        if next == Phase::Boot && stage.guests.iter().all(|(_, c)| c.story.ready.is_some()) {
            next = Phase::Fill;
        }
        let now = stage.elapsed();
        let t = (now - begin).as_secs_f64();
        if next != phase {
            say::detail(&format!("{t:>4.0} s: {}", next.name()));
            (phase, since) = (next, now);
        }
        if phase < Phase::Busy && now - begin > FILLED {
            bail!("{SQL} has not written its files after {} s", FILLED.as_secs());
        }
        let (host, vms) = stage.views().await?;
        let row = row(about, t, phase, &host, &vms, stage);
        if t as u64 / 20 > told {
            told = t as u64 / 20;
            say::detail(&format!(
                "{t:>4.0} s: {:?}, allocated {:.0}, active {:.0}, saved {:.0}, ballooned {:.0}, swapped {:.0} MiB",
                host.state, row[5], row[7], row[9], row[10], row[11]
            ));
        }
        table.push(&row);
        if phase == Phase::Query && (now - since).as_secs() >= about.times.query {
            return Ok(());
        }
        tokio::time::sleep(if phase == Phase::Boot { BOOT_LOOK } else { LOOK }).await;
    }
}

fn row(
    about: About,
    t: f64,
    phase: Phase,
    host: &HostView,
    vms: &[VmView],
    stage: &Stage,
) -> Vec<f64> {
    let mib = |bytes: u64| Bytes(bytes).mib();
    let mut of_vms = Vec::new();
    // Allocated, active, shared, ballooned, swapped; all VMs together.
    let mut sums = [0.0; 5];
    for (n, one) in VMS.iter().enumerate() {
        let Some(vm) = vms.iter().find(|vm| vm.name == one.name) else {
            of_vms.extend([f64::NAN; OF_VM.len()]);
            continue;
        };
        let m = &vm.memory;
        // Not touched yet while it boots: cannot be told from zeros, and passes within seconds.
        let zero = (mib(m.untouched) - about.never).max(0.0);
        let swapped = mib(m.swapped + m.staged);
        let allocated = mib(vm.params.size) - about.never - mib(m.ballooned) - swapped;
        let shared = mib(m.shared) + zero;
        let active = mib(vm.active.estimate);
        for (sum, value) in
            sums.iter_mut().zip([allocated, active, shared, mib(m.ballooned), swapped])
        {
            *sum += value;
        }
        let answers = stage.guests.get(n).map_or(0, |(_, console)| console.story.checks);
        of_vms.extend([
            allocated,
            mib(m.consumed),
            mib(m.target),
            active,
            shared,
            mib(m.ballooned),
            swapped,
            answers as f64,
        ]);
    }
    let state = match host.state {
        StateName::High => 0.0,
        StateName::Soft => 1.0,
        StateName::Hard => 2.0,
        StateName::Low => 3.0,
    };
    let [allocated, active, shared, ballooned, swapped] = sums;
    let mut row = vec![
        about.kind as f64,
        t,
        phase.number(),
        state,
        mib(host.free),
        allocated,
        mib(host.consumed),
        active,
        shared,
        shared - mib(host.sharing.common),
        ballooned,
        swapped,
        mib(host.counters.zero_dropped),
        mib(host.counters.swapped_out),
    ];
    row.extend(of_vms);
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_distinct_and_in_the_order_of_rows() {
        let columns = columns();
        assert_eq!(columns.len(), OF_HOST.len() + VMS.len() * OF_VM.len());
        let mut sorted = columns.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), columns.len());
        assert_eq!(of("a-b", "c"), "a_b_c");
        assert!(Phase::Boot < Phase::Fill && Phase::Rest < Phase::Query);
    }
}
