//! The balloon of one VM: once a second its state is read, the pure controller asked, and its
//! command carried out. QEMU may be frozen or lie; every call has a deadline, and nothing waits for
//! this task.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_policy::{BalloonInput, Health, Tools};
use ballast_qemu::Monitor;
use ballast_units::{Bytes, Pages};
use tokio::time::MissedTickBehavior;

use crate::manager::Manager;
use crate::tools::Meter;
use crate::vm::{Vm, lock};

const TURN: Duration = Duration::from_secs(1);

pub async fn run(manager: Arc<Manager>, vm: Arc<Vm>, monitor: Monitor) {
    let mut turn = tokio::time::interval(TURN);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut meter = Meter::new(manager.config().tools.order);
    loop {
        tokio::select! {
            _ = vm.process.exited() => return,
            why = monitor.qmp().closed() => {
                tracing::warn!(vm = vm.name, "QMP: {why}: its balloon is out of reach");
                lock(&vm.balloon).output.health = Health::Missing;
                *lock(&vm.tools) = Tools::default();
                vm.set_monitor(None);
                return;
            }
            _ = turn.tick() => {
                step(&manager, &vm, &monitor).await;
                meter.turn(&manager, &vm, &monitor).await;
            }
        }
    }
}

async fn step(manager: &Manager, vm: &Vm, monitor: &Monitor) {
    let stats = monitor.guest_stats().await.unwrap_or(None);
    // Old statistics are kept with their age: a frozen QEMU does not make the guest unknown.
    let reported = match monitor.query_balloon().await {
        Ok(actual) => Some(vm.size.saturating_sub(actual.pages())),
        Err(_) => None,
    };
    if stats.is_some() {
        vm.driver_alive.store(true, Ordering::Relaxed);
    }
    let (consumed, discarded) = match &*vm.paged() {
        Some(paged) => (Some(paged.memory().charged()), paged.memory().counters.values().discarded),
        None => (None, 0),
    };
    let pages = |bytes: Option<u64>| bytes.map(|b| Bytes(b).pages());
    let goal = lock(&vm.balloon).goal;
    let output = lock(&vm.control).step(&BalloonInput {
        now: manager.started.elapsed(),
        size: vm.size,
        goal,
        has_device: monitor.has_balloon(),
        driver_alive: vm.driver_alive.load(Ordering::Relaxed),
        reported,
        discarded,
        consumed,
        guest_available: stats.and_then(|s| pages(s.available)),
        guest_total: stats.and_then(|s| pages(s.total)),
        guest_stats_age: stats.map(|s| Duration::from_secs(s.age_s)),
    });
    {
        let mut balloon = lock(&vm.balloon);
        if balloon.output.health != output.health {
            tracing::info!(vm = vm.name, "balloon: {}", output.health);
            manager.kick.ring(format!("the balloon of {} became {}", vm.name, output.health));
        }
        balloon.output = output;
        balloon.reported = reported;
        if stats.is_some() {
            balloon.stats = stats;
        }
        if let Some(size) = output.command {
            balloon.commanded = size;
        }
    }
    if let Some(size) = output.command {
        let left: Pages = vm.size.saturating_sub(size);
        if let Err(e) = monitor.balloon(left.bytes()).await {
            tracing::debug!(vm = vm.name, "balloon to {size}: {e}");
        }
    }
}
