//! The sides, and one guest on each.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::{Accel, VmSpec};
use ballast_units::Bytes;

use super::loads::{Loads, MEMORY, Measured};
use crate::bench::sharing::cpu::process_s;
use crate::bench::sharing::ksm::{self, Ksm};
use crate::experiments::stage::Stage;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::{Options, SharingOptions};
use crate::plain::{PlainVm, Ram, Style};

/// Nothing is ever reclaimed of that.
pub const BUDGET: Bytes = Bytes::from_mib(2048);
const LIMIT: Duration = Duration::from_secs(180);

/// See the table in `plenty`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Plain,
    PlainLarge,
    PlainKsm,
    Ballast,
    BallastLarge,
    BallastSharing,
}

impl Side {
    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Side::Plain => "plain",
            Side::PlainLarge => "plain_large",
            Side::PlainKsm => "plain_ksm",
            Side::Ballast => "ballast",
            Side::BallastLarge => "ballast_large",
            Side::BallastSharing => "ballast_sharing",
        }
    }

    /// Plain QEMU on the same kind of memory.
    pub fn peer(self) -> Option<Side> {
        match self {
            Side::Ballast => Some(Side::Plain),
            Side::BallastLarge | Side::BallastSharing => Some(Side::PlainLarge),
            Side::Plain | Side::PlainLarge | Side::PlainKsm => None,
        }
    }

    /// Of plain QEMU's speed.
    pub fn least(self) -> f64 {
        if self == Side::BallastSharing { super::ON } else { super::OFF }
    }

    /// One guest, from its start until its loads are done. Without `ksm` there is no `PlainKsm`.
    pub async fn measure(
        self,
        image: &Image,
        disk: &Path,
        loads: &Loads,
        ksm: Option<&Ksm>,
    ) -> Result<Measured> {
        match self {
            Side::Plain => plain(Ram::Shared, image, disk, loads, None),
            Side::PlainLarge => plain(Ram::Large, image, disk, loads, None),
            Side::PlainKsm => {
                let ksm = ksm.context("no KSM")?;
                ensure!(ksm.start(ksm::MODES[0])?, "KSM has no default mode");
                let measured = plain(Ram::Private, image, disk, loads, Some(ksm));
                ksm.forget()?;
                measured
            }
            Side::Ballast => ours(false, Some(SharingOptions::off()), image, disk, loads).await,
            Side::BallastLarge => ours(true, Some(SharingOptions::off()), image, disk, loads).await,
            Side::BallastSharing => ours(true, None, image, disk, loads).await,
        }
    }
}

fn plain(
    ram: Ram,
    image: &Image,
    disk: &Path,
    loads: &Loads,
    ksm: Option<&Ksm>,
) -> Result<Measured> {
    let dir = tempfile::tempdir()?;
    let guest = Guest::new("plenty", MEMORY, dir.path()).shared_disk(disk.to_owned());
    let guest = loads.add_to(guest);
    let style = Style { ram, ..Style::default() };
    let ksm_before = ksm.map_or(Ok(0.0), Ksm::cpu_s)?;
    let begun = Instant::now();
    let mut vm = PlainVm::start_as(&guest, image, &style)?;
    let pid = vm.pid() as i32;
    let cpu_s =
        || -> Result<f64> { Ok(process_s(pid)? + ksm.map_or(Ok(0.0), Ksm::cpu_s)? - ksm_before) };
    let mut measured = Measured::default();
    let mut events = Vec::new();
    loop {
        events.extend(vm.console.poll());
        let story = &vm.console.story;
        ensure!(story.trouble.is_none(), "{:?}", story.trouble);
        if story.ready.is_some() && measured.boot_s == 0.0 {
            measured.boot_s = begun.elapsed().as_secs_f64();
            measured.boot_cpu_s = cpu_s()?;
        }
        if story.exits.len() == Loads::COUNT {
            break;
        }
        ensure!(vm.ended()?.is_none(), "QEMU ended: {}", vm.console.tail(5));
        ensure!(begun.elapsed() < LIMIT, "the loads have not ended: {}", vm.console.tail(5));
        std::thread::sleep(Duration::from_millis(10));
    }
    measured.cpu_s = cpu_s()?;
    measured.read(&events, loads)?;
    Ok(measured)
}

async fn ours(
    large: bool,
    sharing: Option<SharingOptions>,
    image: &Image,
    disk: &Path,
    loads: &Loads,
) -> Result<Measured> {
    let options = Options { sharing, ..Options::budget(BUDGET) };
    let mut stage = Stage::new(&options)?;
    let manager = stage.manager.pid()?;
    let guest = Guest::new("plenty", MEMORY, &stage.manager.consoles());
    let guest = loads.add_to(guest.shared_disk(disk.to_owned()));
    // The manager's own start is not the guest's.
    let before = process_s(manager)?;
    let begun = Instant::now();
    // As the others run, and without the manager's look whether a kernel boots under KVM.
    let change = |spec: &mut VmSpec| {
        spec.accel = Accel::Tcg;
        spec.large_pages = Some(large);
    };
    let view = stage.add(&guest, image, change).await?;
    let vmm = view.pid.context("a VMM without a process")? as i32;
    let cpu_s = || -> Result<f64> { Ok(process_s(vmm)? + process_s(manager)? - before) };
    let mut measured = Measured::default();
    let mut events = Vec::new();
    loop {
        events.extend(stage.poll()?.into_iter().map(|(_, event)| event));
        let story = &stage.guests[0].1.story;
        if story.ready.is_some() && measured.boot_s == 0.0 {
            measured.boot_s = begun.elapsed().as_secs_f64();
            measured.boot_cpu_s = cpu_s()?;
        }
        if story.exits.len() == Loads::COUNT {
            break;
        }
        ensure!(begun.elapsed() < LIMIT, "the loads have not ended");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    measured.cpu_s = cpu_s()?;
    let view = stage.manager.client().vm(&guest.name).await?;
    let within = |part| view.fault_times.within_us(part).map_or(f64::INFINITY, |us| us as f64);
    measured.faults = view.counters.faults as f64;
    measured.p99_us = within(0.99);
    measured.p999_us = within(0.999);
    measured.large_mib = Bytes(view.memory.large).mib();
    measured.read(&events, loads)?;
    stage.end().await?;
    Ok(measured)
}
