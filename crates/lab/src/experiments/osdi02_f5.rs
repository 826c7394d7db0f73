//! OSDI'02, figure 5: page sharing of three sets of VMs that run real services. The paper's sets were
//! production systems; these run real services of Debian, with real requests, in three mixtures like
//! the paper's:
//!
//! | | the paper's | here |
//! | --- | --- | --- |
//! | A | 10 Windows NT, databases, web servers, others | 10 of one size: 4 databases, 3 web, 3 caches |
//! | B | 9 Linux, 64 to 768 MB, mostly web and mail | 9 of different sizes: 5 web, 3 caches, 1 database |
//! | C | 5 Linux, 32 to 512 MB, each another service | 5 of different sizes, each another service |
//!
//! Every guest has data of its own; what they have in common is the system, and programs of the same
//! service. Percentages are of VM memory, as in the paper. Guests there had touched their memory in
//! months of use; guests here leave some untouched, which can be neither shared nor reclaimed, so the
//! percentages of allocated memory are given as well. Shared and reclaimed are in ESX's terms, zero
//! pages included.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use ballast_api::Salt;
use ballast_units::Bytes;

use super::Measured;
use super::settle::{Patience, settle};
use super::stage::Stage;
use crate::chart::{Chart, Series};
use crate::figures::{Outcome, Table};
use crate::guest::Guest;
use crate::image::{self, Image};
use crate::manager::{Options, SharingOptions};
use crate::say;

const NAME: &str = "osdi02-f5";
const BUDGET: Bytes = Bytes::from_mib(6144);
/// Until a service has started and has its data: a database takes longest.
const FILLED: Duration = Duration::from_secs(600);

/// A service, its guest's memory (MiB), its data (MB).
type Vm = (&'static str, u64, u64);

struct Set {
    letter: &'static str,
    vms: &'static [Vm],
    /// The paper's shared and reclaimed, percent of VM memory.
    paper: (f64, f64),
}

const SETS: [Set; 3] = [
    Set {
        letter: "a",
        vms: &[
            ("postgresql", 192, 32),
            ("nginx", 192, 32),
            ("redis", 192, 16),
            ("postgresql", 192, 32),
            ("lighttpd", 192, 32),
            ("memcached", 192, 16),
            ("postgresql", 192, 32),
            ("nginx", 192, 32),
            ("redis", 192, 16),
            ("postgresql", 192, 32),
        ],
        paper: (42.9, 32.9),
    },
    Set {
        letter: "b",
        vms: &[
            ("nginx", 128, 16),
            ("lighttpd", 128, 16),
            ("nginx", 256, 64),
            ("memcached", 192, 48),
            ("nginx", 384, 192),
            ("redis", 256, 48),
            ("lighttpd", 192, 48),
            ("memcached", 256, 96),
            ("postgresql", 384, 96),
        ],
        paper: (29.2, 18.7),
    },
    Set {
        letter: "c",
        vms: &[
            ("lighttpd", 128, 16),
            ("nginx", 384, 224),
            ("redis", 256, 64),
            ("memcached", 192, 64),
            ("postgresql", 512, 160),
        ],
        paper: (10.0, 7.2),
    },
];

const COLUMNS: [&str; 12] = [
    "set",
    "time_s",
    "vms",
    "vm_memory_mib",
    "allocated_mib",
    "shared_mib",
    "common_mib",
    "zero_mib",
    "reclaimed_mib",
    "measured_reclaimed_mib",
    "breaks_per_s",
    "steady",
];

/// What a set ended with.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    memory: f64,
    allocated: f64,
    shared: f64,
    reclaimed: f64,
    zero: f64,
    /// Allocated less what the kernel counts.
    measured: f64,
}

pub async fn run(image: &Image, quick: bool) -> Result<Measured> {
    say::step("The disk with the services");
    let disk = image::services_disk(image)?;
    let mut table = Table::new(&COLUMNS);
    let mut seen = Vec::new();
    for (n, set) in SETS.iter().enumerate() {
        // Quick: the first few of each.
        let vms = if quick { &set.vms[..3] } else { set.vms };
        say::step(&format!("Set {}: {} VMs", set.letter.to_uppercase(), vms.len()));
        seen.push(one(image, &disk, n, vms, quick, &mut table).await?);
    }
    Ok(evaluate(table, &seen, quick))
}

async fn one(
    image: &Image,
    disk: &Path,
    number: usize,
    vms: &[Vm],
    quick: bool,
    table: &mut Table,
) -> Result<Seen> {
    let still = Duration::from_secs(if quick { 10 } else { 30 });
    let patience = Patience { still, limit: Duration::from_secs(if quick { 60 } else { 180 }) };
    let options = |sharing| Options { sharing: Some(sharing), ..Options::budget(BUDGET) };
    let mut stage = Stage::new(&options(SharingOptions::brisk()))?;
    start(&mut stage, image, disk, vms).await?;
    let steady = settle(&mut stage, patience).await?;
    stage.end().await?;
    // The same without sharing, for as long: what they leave untouched.
    let mut stage = Stage::new(&options(SharingOptions::off()))?;
    start(&mut stage, image, disk, vms).await?;
    tokio::time::sleep(Duration::from_secs_f64(steady.after_s)).await;
    stage.poll()?;
    let (_, alone) = stage.views().await?;
    let never: u64 = alone.iter().map(|vm| vm.memory.untouched).sum();
    stage.end().await?;

    let mib = |bytes: u64| Bytes(bytes).mib();
    let (host, views) = (&steady.host, &steady.vms);
    let memory = mib(views.iter().map(|vm| vm.params.size).sum());
    let untouched: u64 = views.iter().map(|vm| vm.memory.untouched).sum();
    let zero = mib(untouched.saturating_sub(never));
    let (shared, common) = (mib(host.sharing.shared) + zero, mib(host.sharing.common));
    let allocated = memory - mib(never);
    let measured = allocated - mib(host.measured_used.saturating_sub(host.overhead));
    let seen = Seen { memory, allocated, shared, reclaimed: shared - common, zero, measured };
    table.push(&[
        number as f64,
        steady.after_s,
        views.len() as f64,
        memory,
        seen.allocated,
        shared,
        common,
        zero,
        seen.reclaimed,
        measured,
        host.sharing.breaks_per_s,
        f64::from(u8::from(steady.settled)),
    ]);
    Ok(seen)
}

/// Starts the VMs and waits until each serves.
async fn start(stage: &mut Stage, image: &Image, disk: &Path, vms: &[Vm]) -> Result<()> {
    for (n, (kind, memory, data)) in vms.iter().enumerate() {
        let name = format!("{kind}{}", n + 1);
        let guest = Guest::new(&name, Bytes::from_mib(*memory), &stage.manager.consoles())
            .run(format!("service --kind {kind} --mb {data} --rate 15 --seed {}", n + 1))
            .shared_disk(disk.to_owned());
        let salt = Salt::try_from(NAME)?;
        stage.add(&guest, image, |spec| spec.salt = Some(salt)).await?;
        stage.wait_for_boot().await?;
    }
    // A client counts answers once the service has its data.
    let begin = stage.elapsed();
    loop {
        stage.poll()?;
        let late = stage.guests.iter().find(|(_, console)| console.story.checks == 0);
        let Some((name, console)) = late else { return Ok(()) };
        if stage.elapsed() - begin > FILLED {
            bail!("{name} serves nothing after {} s: {}", FILLED.as_secs(), console.tail(3));
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

fn evaluate(table: Table, seen: &[Seen], quick: bool) -> Measured {
    let mut outcome = Outcome::new(NAME);
    for (set, s) in SETS.iter().zip(seen) {
        let l = set.letter;
        outcome.figure(&format!("{l}_vm_memory_mib"), s.memory);
        outcome.figure(&format!("{l}_shared_mib"), s.shared);
        outcome.figure(&format!("{l}_reclaimed_mib"), s.reclaimed);
        outcome.figure(&format!("{l}_measured_reclaimed_mib"), s.measured);
        outcome.figure(&format!("{l}_zero_mib"), s.zero);
        outcome.figure(&format!("{l}_shared_percent"), 100.0 * s.shared / s.memory);
        outcome.figure(&format!("{l}_reclaimed_percent"), 100.0 * s.reclaimed / s.memory);
        let of_allocated = 100.0 * s.reclaimed / s.allocated;
        outcome.figure(&format!("{l}_reclaimed_percent_of_allocated"), of_allocated);
        outcome.paper(&format!("{l}_shared_percent"), set.paper.0);
        outcome.paper(&format!("{l}_reclaimed_percent"), set.paper.1);
        if !quick {
            let reclaimed = 100.0 * s.reclaimed / s.memory;
            outcome.at_least(&format!("{l}_reclaimed_percent"), reclaimed, set.paper.1);
        }
    }
    let bars = |label: &str, of: fn(&Seen) -> f64| {
        let values = seen.iter().enumerate().map(|(n, s)| (n as f64 + 1.0, of(s)));
        Series::new(label, values.collect())
    };
    let paper = |label: &str, of: fn(&Set) -> f64| {
        let values = SETS.iter().enumerate().map(|(n, s)| (n as f64 + 1.0, of(s)));
        Series::new(label, values.collect())
    };
    let chart = Chart {
        title: "Three sets of VMs with real services: A (1), B (2), C (3)".to_owned(),
        x: "set".to_owned(),
        y: "% of VM memory".to_owned(),
        series: vec![
            bars("shared", |s| 100.0 * s.shared / s.memory),
            bars("reclaimed", |s| 100.0 * s.reclaimed / s.memory),
            paper("OSDI'02, shared", |s| s.paper.0),
            paper("OSDI'02, reclaimed", |s| s.paper.1),
        ],
        bars: true,
        ..Chart::default()
    };
    Measured { outcome, table, charts: vec![chart] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_like_the_papers() {
        assert_eq!(SETS.each_ref().map(|s| s.vms.len()), [10, 9, 5]);
        let memory: Vec<u64> =
            SETS.iter().map(|s| s.vms.iter().map(|(_, memory, _)| memory).sum()).collect();
        assert!(memory.iter().all(|m| *m < BUDGET.0 >> 20), "{memory:?}");
        // Room for the system beside the data.
        assert!(SETS.iter().flat_map(|s| s.vms).all(|(_, memory, data)| data + 96 <= *memory));
        // In the last one each is another service.
        let mut kinds: Vec<&str> = SETS[2].vms.iter().map(|(kind, ..)| *kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        assert_eq!(kinds.len(), 5);
    }

    #[test]
    fn percentages_are_of_vm_memory_and_less_than_the_paper_is_a_miss() {
        let seen = |reclaimed: f64| Seen {
            memory: 1000.0,
            allocated: 800.0,
            shared: reclaimed + 100.0,
            reclaimed,
            zero: 10.0,
            measured: reclaimed,
        };
        let m = evaluate(Table::new(&COLUMNS), &[seen(400.0), seen(200.0), seen(80.0)], false);
        assert!(m.outcome.ok);
        assert_eq!(m.outcome.figures["a_reclaimed_percent"], 40.0);
        assert_eq!(m.outcome.figures["a_reclaimed_percent_of_allocated"], 50.0);
        assert!(!evaluate(Table::new(&COLUMNS), &[seen(300.0)], false).outcome.ok);
    }
}
