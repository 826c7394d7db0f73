//! What one scanner did with one memory.

use ballast_units::{Bytes, PAGE_SIZE, Pages};

use super::hold::Times;
use super::watch::{Merge, Quiet};

/// How much is done, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Memory of the holder.
    pub mib: usize,
    /// Pages that are written to after they were shared, of each kind.
    pub writes: usize,
    /// Rounds over a memory in which nothing changes.
    pub passes: f64,
}

/// What one scanner showed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    /// From the beginning until nothing more was saved.
    pub merge: Merge,
    /// Afterwards, while nothing changed.
    pub quiet: Quiet,
    /// Pages saved when all was quiet: both scanners find a last few pages late.
    pub saved: f64,
    /// Bytes: what the scanner keeps about the pages it has seen.
    pub metadata: f64,
    /// Bytes: what the kernel keeps about mappings, where pages are shared by mappings of their own.
    pub mappings: f64,
    /// First writes to shared pages, to merged (or dropped) zero pages, to pages never shared.
    pub twin: Times,
    pub zero: Times,
    pub own: Times,
}

fn gib(pages: f64) -> f64 {
    pages * PAGE_SIZE as f64 / (1u64 << 30) as f64
}

/// A figure's name, and how to get it.
type Figure = (&'static str, fn(&Round) -> f64);

/// Those of each scanner.
pub const FIGURES: [Figure; 16] = [
    ("saved_mib", |r| Pages(r.saved as u64).bytes().mib()),
    ("merge_cpu_s", |r| r.merge.cpu_s),
    ("cpu_s_per_gib_scanned", |r| r.merge.cpu_s / gib(r.merge.scanned)),
    ("cpu_s_per_gib_merged", |r| r.merge.cpu_s / gib(r.merge.saved * 0.99)),
    ("to_90_percent_s", |r| r.merge.to_90_s),
    ("to_90_percent_cpu_s", |r| r.merge.to_90_cpu_s),
    ("quiet_pass_cpu_s", |r| r.quiet.cpu_s / r.quiet.passes),
    ("quiet_cpu_s_per_minute", |r| r.quiet.cpu_s / r.quiet.wall_s * 60.0),
    ("quiet_scanned_gib", |r| gib(r.quiet.scanned)),
    ("metadata_kib", |r| r.metadata / 1024.0),
    ("mappings_kib", |r| r.mappings / 1024.0),
    ("break_p50_us", |r| r.twin.p50),
    ("break_p99_us", |r| r.twin.p99),
    ("zero_break_p50_us", |r| r.zero.p50),
    ("zero_break_p99_us", |r| r.zero.p99),
    ("own_write_p50_us", |r| r.own.p50),
];

impl Round {
    /// For people, while it runs.
    pub fn line(&self, possible: usize) -> String {
        format!(
            "saved {} of {} for {:.2} CPU s, 90% after {:.1} s; quiet pass {:.3} CPU s; a break \
             takes {:.1} us (p99 {:.1})",
            Pages(self.saved as u64).bytes(),
            Bytes((possible * PAGE_SIZE) as u64),
            self.merge.cpu_s,
            self.merge.to_90_s,
            self.quiet.cpu_s / self.quiet.passes,
            self.twin.p50,
            self.twin.p99,
        )
    }
}
