//! Who plays in the demo: a toucher, a file workload and an idler, each out of phase with those of
//! its kind.

use anyhow::Result;
use ballast_units::Bytes;

use crate::guest::Guest;
use crate::image;
use crate::manager::Manager;

/// The guest of number `n` (from 0). Sizes of the workloads follow the guest's memory.
pub fn guest(n: u32, memory: Bytes, manager: &Manager) -> Result<Guest> {
    let number = n / 3 + 1;
    let phase = f64::from(n / 3) * 0.37 % 1.0;
    // What the kernel leaves to a workload: it holds about 40 MiB and 2% of what it manages.
    let mb = ((memory.0 >> 20) * 98 / 100).saturating_sub(48).max(16);
    let new = |kind: &str| Guest::new(&format!("{kind}{number}"), memory, &manager.consoles());
    Ok(match n % 3 {
        0 => new("touch").run(format!(
            "toucher --min-mb {} --max-mb {} --period 60 --phase {phase:.2} --seed {}",
            mb / 5,
            mb * 7 / 10,
            n + 1
        )),
        1 => {
            let guest = new("files");
            let disk = manager.disk(&guest.name);
            image::empty_disk(&disk, Bytes::from_mib(mb * 2 + 64))?;
            guest
                .run(format!(
                    "files --dir /disk --mb {} --period 60 --phase {:.2} --seed {}",
                    mb * 7 / 10,
                    (phase + 0.33) % 1.0,
                    n + 1
                ))
                .disk(disk)
        }
        _ => new("idle").run(format!(
            "idle --mb {} --busy 10 --every 60 --seed {}",
            mb * 6 / 10,
            n + 1
        )),
    })
}
