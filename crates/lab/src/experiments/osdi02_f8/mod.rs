//! OSDI'02, figure 8: dynamic reallocation. Five VMs, 60% more memory than the machine has, min half of
//! max, shares as max. They boot together, work, and one of them goes idle and is queried again.
//!
//! | the paper's VM | MB | service here | and files |
//! | --- | --- | --- | --- |
//! | Exchange server | 256 | redis | 90 MB |
//! | its load generator | 256 | memcached | 80 MB |
//! | MetaFrame server | 320 | nginx | 140 MB |
//! | its load generator | 320 | lighttpd | 120 MB |
//! | SQL Server | 320 | none: a table in files that is scanned | 170 MB |
//!
//! Real services of Debian put little weight on memory when an emulated processor runs them, and a real
//! database takes minutes to start on one: each guest also reads files of known content, a quarter to
//! all of them in turns of a minute or two, which make its page cache its working set. The last guest's
//! are the database: all of them are read, then none, then all again. Each guest has its client inside,
//! since sample guests have no network.
//!
//! The paper's ran Windows, which writes zeros to all of its memory when it boots, before its balloon
//! driver runs. These run Debian's kernel with `init_on_free=1`, which does the same: all memory is
//! cleared before the first program runs, and whatever is freed later is cleared too. Page sharing is
//! on, compression off: the paper's system had none.

mod report;
mod watch;

use std::time::Duration;

use anyhow::Result;
use ballast_api::{Accel, Salt};
use ballast_policy::policies::PolicyKind;
use ballast_units::Bytes;

use super::Measured;
use super::kinds;
use super::stage::Stage;
use crate::figures::Table;
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};
use crate::say;

const NAME: &str = "osdi02-f8";
/// The machine's memory for VMs, what they cost beside their pages included.
const BUDGET: Bytes = Bytes::from_mib(1024);
/// What a VM costs beside its pages; the paper's.
const OVERHEAD: Bytes = Bytes::from_mib(32);
/// The paper's period is 30 s, and its run most of an hour.
const PERIOD: Duration = Duration::from_secs(5);

/// One guest. Sizes in MiB.
#[derive(Clone, Copy, Debug)]
struct Vm {
    name: &'static str,
    memory: u64,
    /// Its kind and data.
    service: Option<(&'static str, u64)>,
    files: u64,
    /// MB of them that are read per second.
    rate: u64,
}

/// Requests per second of each service.
const REQUESTS: u32 = 5;

/// The last one rests.
const VMS: [Vm; 5] = [
    Vm { name: "exchange", memory: 256, service: Some(("redis", 40)), files: 90, rate: 12 },
    Vm {
        name: "exchange-load",
        memory: 256,
        service: Some(("memcached", 40)),
        files: 80,
        rate: 12,
    },
    Vm { name: "metaframe", memory: 320, service: Some(("nginx", 48)), files: 140, rate: 20 },
    Vm {
        name: "metaframe-load",
        memory: 320,
        service: Some(("lighttpd", 40)),
        files: 120,
        rate: 15,
    },
    Vm { name: "sql", memory: 320, service: None, files: 170, rate: 25 },
];
/// In figure 8(c).
const METAFRAME: &str = VMS[2].name;
/// In figure 8(d).
const SQL: &str = VMS[4].name;

/// How long the database works, rests, and is queried; seconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    busy: u64,
    rest: u64,
    query: u64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    say::step("The disk with the services");
    let disk = image::services_disk(image)?;
    let default = if quick {
        Times { busy: 20, rest: 40, query: 20 }
    } else {
        Times { busy: 90, rest: 130, query: 90 }
    };
    // Beside one another the policies need no more than the phase that tells them apart.
    let shorter = Times { busy: 60, rest: 110, query: 60 };
    let kinds = if quick { vec![PolicyKind::default()] } else { kinds::all() };
    let never = untouched(image).await?;
    let mut table = Table::new(&watch::columns().iter().map(String::as_str).collect::<Vec<_>>());
    for (number, kind) in kinds.iter().enumerate() {
        say::step(&format!("Five VMs under {kind}"));
        let times = if number == 0 { default } else { shorter };
        let mut stage = Stage::new(&options(*kind))?;
        stage.add_at_once(guests(&stage, image, &disk, times)?).await?;
        let about = watch::About { kind: number, never, times };
        watch::watch(&mut stage, about, &mut table).await?;
        stage.end().await?;
    }
    Ok(report::evaluate(table, &kinds, quick))
}

fn options(kind: PolicyKind) -> Options {
    Options {
        sample_period: Some(PERIOD),
        sharing: Some(SharingOptions::brisk()),
        more: format!("{}[compression]\nenabled = false\n", kinds::toml(kind)),
        ..Options::budget(BUDGET)
    }
}

/// MiB of a guest that clears its memory which it never touches: what its firmware and kernel leave out.
async fn untouched(image: &Image) -> Result<f64> {
    let mut stage =
        Stage::new(&Options { sharing: Some(SharingOptions::off()), ..Options::budget(BUDGET) })?;
    let memory = Bytes::from_mib(VMS[0].memory);
    let guest = Guest::new("alone", memory, &stage.manager.consoles()).clears_memory();
    stage.add(&guest, image, |_| {}).await?;
    stage.wait_for_boot().await?;
    let view = stage.manager.client().vm(&guest.name).await?;
    stage.end().await?;
    let never = Bytes(view.memory.untouched).mib();
    say::detail(&format!("A guest of {memory} clears all but {never:.1} MiB of it"));
    Ok(never)
}

fn guests(
    stage: &Stage,
    image: &Image,
    disk: &std::path::Path,
    times: Times,
) -> Result<Vec<(Guest, ballast_api::VmSpec)>> {
    let salt = Salt::try_from(NAME)?;
    let one = |(n, vm): (usize, &Vm)| {
        let memory = Bytes::from_mib(vm.memory);
        let guest = Guest::new(vm.name, memory, &stage.manager.consoles())
            .run(files(vm, n, times))
            // Its agent tells what it waits for: `pressure` reads it.
            .run("agent")
            .clears_memory()
            .shared_disk(disk.to_owned());
        let guest = match vm.service {
            None => guest,
            Some((kind, data)) => guest.run(format!(
                "service --kind {kind} --mb {data} --rate {REQUESTS} --seed {}",
                n + 1
            )),
        };
        let mut spec = guest.spec(image, Accel::Tcg);
        spec.min = memory.0 / 2;
        spec.salt = Some(salt.clone());
        spec.guest_agent = Some(true);
        spec.overhead = Some((OVERHEAD.0 - own_overhead(vm.memory).0) >> 12 << 12);
        (guest, spec)
    };
    Ok(VMS.iter().enumerate().map(one).collect())
}

/// The command line of a guest's reader of files.
fn files(vm: &Vm, number: usize, times: Times) -> String {
    // The database's are all read at all times: the sine stays at its top. The others' turn.
    let pattern = if vm.name == SQL {
        format!("--period 1000000 --phase 0.5 --busy {} --rest {}", times.busy, times.rest)
    } else {
        format!("--period {} --phase {}", 60 + 20 * number, 0.25 * number as f64)
    };
    format!(
        "files --dir /disk --mb {} --file-kb 256 --rate-mb {} --seed {} {pattern}",
        vm.files,
        vm.rate,
        number + 10
    )
}

/// What the manager takes for a VM's pager, as measured; `memory` in MiB.
const fn own_overhead(memory: u64) -> Bytes {
    Bytes((1536 + 7 * memory) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vms_are_the_papers() {
        let memory: u64 = VMS.iter().map(|vm| vm.memory).sum();
        assert_eq!(memory, 1472);
        let all = memory as f64 + VMS.len() as f64 * OVERHEAD.mib();
        assert!(all / BUDGET.mib() > 1.59);
        // Room for the system beside the data.
        let data = |vm: &Vm| vm.files + vm.service.map_or(0, |(_, data)| data);
        assert!(VMS.iter().all(|vm| data(vm) + 96 <= vm.memory));
    }
}
