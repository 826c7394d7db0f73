//! Many VMs, which processes with the shim stand in for, and some large ones.
//!
//! All of a VM's memory is reserved for it (min = max): none is ever taken from it, so that it needs no
//! room in swap, of which no machine that runs this has enough for hundreds of VMs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::client::Client;
use ballast_api::{Mode, RunState, VmView};
use ballast_qemu::process;
use ballast_units::{Bytes, PAGE_SIZE};

use super::cost::{Held, held, list_ms, watch};
use super::growth::{Point, bend, per_vm, tell};
use super::{MIB, Plan, figures, told};
use crate::bench::child::Child;
use crate::figures::Outcome;
use crate::manager::{Manager, Options, SharingOptions};
use crate::stats::median;
use crate::{say, tools};

const SIZE: Bytes = Bytes::from_mib(64);
const LARGE: Bytes = Bytes::from_mib(4096);
/// Part of the host's memory that the large ones together may have.
const LARGE_PART: u64 = 2;
/// The target: memory of the manager, as a part of what it manages. What it takes for small VMs is
/// a fixed amount, so it is asked of the large ones.
const MEMORY_PERCENT: f64 = 0.75;
const PATIENCE: Duration = Duration::from_secs(300);
/// Memory that grows by no more within this time is at rest; bytes.
const REST: Duration = Duration::from_secs(10);
const GROWTH: u64 = 64 << 10;
/// Pages that each VM touches: at the beginning, and then each second while it is busy.
const TOUCHED: usize = 64;
const TOUCHED_PER_S: usize = 2;
/// Starts that are timed, of each number of VMs.
const TIMED: usize = 9;

pub async fn run(plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let host = process::host_memory().context("no MemTotal in /proc/meminfo")?;
    let options = Options {
        more: "[[vm]]\nname = \"*\"\nmin = \"100%\"\n".into(),
        // What the manager may come to need for each VM is set aside at its start.
        ..Options::budget(Bytes(host.0 / 10 * 9))
    };
    let mut crowd = Crowd { manager: Manager::start(&options)?, vms: Vec::new() };
    let mut points = Vec::new();
    for &vms in plan.vms {
        let start_ms = crowd.grow(vms, SIZE).await?;
        tokio::time::sleep(plan.settle).await;
        let cost = watch(&crowd.manager, plan.window, async || Ok(())).await?;
        let memory = held(&crowd.manager)?;
        let mut all = figures(&cost);
        all.push(("heap_mib".into(), memory.heap as f64 / MIB));
        all.push(("files_mib".into(), memory.files as f64 / MIB));
        all.push(("list_ms".into(), list_ms(crowd.manager.client()).await?));
        if let Some(ms) = start_ms {
            all.push(("start_ms".into(), ms));
        }
        say::detail(&format!(
            "{vms} VMs of {SIZE}: {:.3}% of a core ({}); {} of heap, {} of files; policy turn {:.2} ms{}",
            cost.cpu,
            told(&cost),
            Bytes(memory.heap),
            Bytes(memory.files),
            cost.turn_ms,
            start_ms.map_or(String::new(), |ms| format!("; started in {ms:.1} ms")),
        ));
        points.push(Point { vms, figures: all });
    }
    tell(outcome, "many", &points);
    for name in ["cpu_percent", "policy_turn_ms", "heap_mib", "files_mib", "list_ms"] {
        outcome.figure(&format!("many_{name}_each"), per_vm(&points, name));
    }
    outcome.figure("many_cpu_percent_bend", bend(&points, "cpu_percent"));

    let (manager, vms) = (&crowd.manager, &mut crowd.vms);
    let mut seed = 1_000_000;
    let busy = watch(manager, plan.window, async || {
        for vm in vms.iter_mut() {
            seed += 1;
            vm.ask(&format!("touch {TOUCHED_PER_S} {seed}")).await?;
        }
        Ok(())
    });
    let busy = busy.await?.cpu;
    let taken_over = crowd.kill_and_restart(&options).await?;
    say::detail(&format!(
        "each touches {TOUCHED_PER_S} pages/s: {busy:.2}% of a core; taken over in {taken_over:.2} s"
    ));
    outcome.figure("many_busy_cpu_percent", busy);
    outcome.figure("many_taken_over_s", taken_over);
    crowd.end().await?;
    large(host, &options, outcome).await
}

/// As many large ones as half the host's memory has room for.
async fn large(host: Bytes, options: &Options, outcome: &mut Outcome) -> Result<()> {
    let count = (host.0 / LARGE_PART / LARGE.0) as usize;
    if count == 0 {
        say::detail(&format!("this host is too small for VMs of {LARGE}"));
        outcome.at_most("large_memory_percent_of_managed", f64::NAN, MEMORY_PERCENT);
        return Ok(());
    }
    let options = Options {
        more: options.more.clone(),
        sharing: Some(SharingOptions::as_fast_as_it_goes()),
        ..Options::budget(Bytes(host.0 / 10 * 9))
    };
    let mut crowd = Crowd { manager: Manager::start(&options)?, vms: Vec::new() };
    let empty = held(&crowd.manager)?;
    crowd.grow(count, LARGE).await?;
    let untouched = held(&crowd.manager)?;
    for (n, vm) in crowd.vms.iter_mut().enumerate() {
        vm.ask(&format!("fill {n}")).await?;
    }
    let now = at_rest(&crowd.manager).await?;
    let before =
        untouched.heap.saturating_sub(empty.heap) + untouched.files.saturating_sub(empty.files);
    let before = before as f64 / (count as u64 * LARGE.0) as f64 * 100.0;
    outcome.figure("large_memory_untouched_percent_of_managed", before);
    let taken = now.heap.saturating_sub(empty.heap) + now.files.saturating_sub(empty.files);
    let percent = taken as f64 / (count as u64 * LARGE.0) as f64 * 100.0;
    say::detail(&format!("{count} VMs of {LARGE}: {} of memory, {percent:.3}%", Bytes(taken)));
    outcome.figure("large_vms", count as f64);
    outcome.at_most("large_memory_percent_of_managed", percent, MEMORY_PERCENT);
    crowd.end().await
}

/// When as many pages as were touched have been looked at, and it takes no more than it did. Err: not within
/// the patience.
async fn at_rest(manager: &Manager) -> Result<Held> {
    let begin = Instant::now();
    let mut last = held(manager)?;
    loop {
        tokio::time::sleep(REST).await;
        let vms = manager.client().vms().await?;
        let now = held(manager)?;
        let grown = (now.heap + now.files).saturating_sub(last.heap + last.files);
        let unseen = vms.iter().find(|vm| vm.sharing.scanned < touched(vm));
        if unseen.is_none() && grown <= GROWTH {
            return Ok(now);
        }
        let waits = unseen.map(|vm| {
            let (name, seen, all) = (&vm.name, vm.sharing.scanned, touched(vm));
            let note = vm.sharing.note.as_deref().unwrap_or("no note");
            format!("; {seen} of {all} pages of {name} were looked at ({note})")
        });
        ensure!(
            begin.elapsed() < PATIENCE,
            "not at rest after {} s: {} more within {} s{}",
            PATIENCE.as_secs(),
            Bytes(grown),
            REST.as_secs(),
            waits.unwrap_or_default()
        );
        last = now;
    }
}

/// Pages that a VM has touched.
fn touched(vm: &VmView) -> u64 {
    vm.params.size.saturating_sub(vm.memory.untouched) / PAGE_SIZE as u64
}

struct Crowd {
    manager: Manager,
    vms: Vec<Child>,
}

impl Crowd {
    /// Starts VMs until there are `count`. Answers milliseconds from the start of the process until its
    /// memory was in the manager's hands; None where none was started.
    async fn grow(&mut self, count: usize, size: Bytes) -> Result<Option<f64>> {
        let mut times = Vec::new();
        for n in self.vms.len()..count {
            let environment = BTreeMap::from([
                ("LD_PRELOAD", OsString::from(tools::sibling("libballast_shim.so")?)),
                ("BALLAST_VM", format!("vm{n}").into()),
                ("BALLAST_SHIM_SOCKET", self.manager.shim_socket().into()),
                ("BALLAST_RAM_SIZE", size.0.to_string().into()),
            ]);
            let begin = Instant::now();
            let words = ["--mib".to_owned(), (size.0 >> 20).to_string()];
            let mut vm = Child::start("sleeper", &words, &environment)?;
            // It answers once its memory is mapped, which is when the manager has it.
            vm.ask("check").await?;
            if count - n <= TIMED {
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
            vm.ask(&format!("touch {TOUCHED} {n}")).await?;
            self.vms.push(vm);
        }
        all_paged(self.manager.client(), count).await?;
        Ok((!times.is_empty()).then(|| median(&times)))
    }

    /// Answers seconds until all VMs are in the new manager's hands.
    async fn kill_and_restart(&mut self, options: &Options) -> Result<f64> {
        self.manager.kill()?;
        let begin = Instant::now();
        self.manager.restart(options)?;
        all_paged(self.manager.client(), self.vms.len()).await?;
        let taken_over = begin.elapsed().as_secs_f64();
        for vm in &mut self.vms {
            vm.ask("check").await?;
        }
        Ok(taken_over)
    }

    async fn end(self) -> Result<()> {
        for vm in self.vms {
            vm.end().await?;
        }
        let (_, left) = self.manager.finish().await?;
        ensure!(left.is_empty(), "left behind: {}", left.join(", "));
        Ok(())
    }
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
