//! What the guest does, and what is measured of it.

use anyhow::{Context, Result};
use ballast_units::Bytes;

use crate::console::Event;
use crate::guest::Guest;

/// Of the guest.
pub const MEMORY: Bytes = Bytes::from_mib(1024);
/// Of the disk with dbench.
pub const DISK: Bytes = Bytes::from_mib(256);
/// Memory that is written, then read again and again.
pub const BAND_MIB: u32 = 256;
pub const DBENCH_CLIENTS: u32 = 4;
/// For one load to end before the next begins.
const BETWEEN: u32 = 3;

/// How long each load runs, seconds: one after the other.
pub struct Loads {
    compute: u32,
    memory: u32,
    dbench: u32,
}

impl Loads {
    /// To see that it works.
    pub fn quick() -> Loads {
        Loads { compute: 4, memory: 6, dbench: 4 }
    }
    /// To measure.
    pub fn full() -> Loads {
        Loads { compute: 4, memory: 7, dbench: 5 }
    }

    /// Loads, one workload of the guest each.
    pub const COUNT: usize = 3;

    /// The guest runs them, one after the other, from its boot on.
    pub fn add_to(&self, guest: Guest) -> Guest {
        let memory = self.compute + BETWEEN;
        let dbench = memory + self.memory + BETWEEN;
        guest
            .run(format!("compute --mb 4 --seconds {} --every 0", self.compute))
            .run(format!(
                "reader --mb {BAND_MIB} --block-mb {BAND_MIB} --seconds {} --delay {memory}",
                self.memory
            ))
            .run(format!(
                "dbench --clients {DBENCH_CLIENTS} --seconds {} --delay {dbench}",
                self.dbench
            ))
    }
}

/// One guest on one side. Rates by the guest's clock.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// From the start of the VMM until the guest's init is ready, and the CPU time of VMM, manager and
    /// ksmd until then.
    pub boot_s: f64,
    pub boot_cpu_s: f64,
    /// Pages written for the first time.
    pub fill_pages_per_s: f64,
    pub compute_per_s: f64,
    /// Pages read and checked.
    pub memory_per_s: f64,
    pub dbench_per_s: f64,
    /// CPU time of all, the boot included.
    pub cpu_s: f64,
    /// What the three loads did, in units of 1 round, 10,000 pages and 10 MB, per second of CPU time since the boot.
    pub work_per_cpu_s: f64,
    /// Faults served by Ballast, and the microseconds within which 99% and 99.9% were: from their reading to the end of what was
    /// read with them, without the way there and back.
    pub faults: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    /// In large pages, when the loads had ended.
    pub large_mib: f64,
}

impl Measured {
    /// From what the guest told.
    pub fn read(&mut self, events: &[Event], loads: &Loads) -> Result<()> {
        let last = |work: &str, kind: &str| {
            let found = events.iter().rev().find(|e| e.text("work") == work && e.kind() == kind);
            found.with_context(|| format!("{work} did not tell of its {kind}"))
        };
        let number = |event: &Event, name: &str| {
            event.number(name).with_context(|| format!("'{name}' is missing"))
        };
        let compute = last("compute", "done")?;
        self.compute_per_s = number(compute, "rounds_per_s")?;
        let mut work = self.compute_per_s * number(compute, "t")?;
        let filled =
            events.iter().find(|e| e.text("phase") == "filled").context("nothing filled")?;
        let fill_s = number(filled, "t")?;
        let pages = f64::from(BAND_MIB) * 256.0;
        self.fill_pages_per_s = pages / fill_s.max(1e-3);
        let read = last("reader", "done")?;
        let checks = number(read, "checks")?;
        self.memory_per_s = checks / (number(read, "t")? - fill_s).max(1e-3);
        self.dbench_per_s = number(last("dbench", "dbench")?, "mb_per_s")?;
        work += checks / 1e4 + self.dbench_per_s / 10.0 * f64::from(loads.dbench);
        self.work_per_cpu_s = work / (self.cpu_s - self.boot_cpu_s).max(1e-3);
        Ok(())
    }

    pub fn text(&self) -> String {
        format!(
            "boot {:.2} s ({:.2} of CPU), {:.0} pages/s written, {:.0} read, {:.3} rounds/s, dbench \
             {:.1} MB/s, {:.1} s of CPU; p99 {} us, {:.0} MiB large",
            self.boot_s,
            self.boot_cpu_s,
            self.fill_pages_per_s,
            self.memory_per_s,
            self.compute_per_s,
            self.dbench_per_s,
            self.cpu_s,
            self.p99_us,
            self.large_mib
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_what_the_loads_told() {
        let events: Vec<Event> = [
            r#"{"event":"done","work":"compute","rounds_per_s":2.5,"t":4.0}"#,
            r#"{"event":"progress","work":"reader","phase":"filled","t":2.0}"#,
            r#"{"event":"done","work":"reader","checks":60000,"t":8.0}"#,
            r#"{"event":"dbench","work":"dbench","mb_per_s":50.0}"#,
        ]
        .iter()
        .map(|line| Event::parse(&format!("@ballast {line}")).unwrap())
        .collect();
        let mut m = Measured { boot_cpu_s: 1.0, cpu_s: 11.0, ..Measured::default() };
        m.read(&events, &Loads::full()).unwrap();
        assert_eq!((m.compute_per_s, m.fill_pages_per_s), (2.5, 32768.0));
        assert_eq!((m.memory_per_s, m.dbench_per_s), (10000.0, 50.0));
        // 10 rounds, 60,000 pages, 250 MB in 10 s of CPU time.
        assert_eq!(m.work_per_cpu_s, 4.1);
        assert!(m.read(&events[1..], &Loads::full()).is_err());
    }
}
