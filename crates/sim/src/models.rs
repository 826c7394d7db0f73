//! What the mechanisms cost and how fast they are. Each figure says where it was measured, or that it
//! is assumed; `[models]` in a scenario replaces any of them.

use ballast_units::Bytes;
use serde::Deserialize;

/// Latencies in microseconds (`_us`), rates per second.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Models {
    /// A guest's driver gives up a page: QEMU's discard is one event per 4 KiB
    /// (docs/adr/0006: about 50 us).
    pub balloon_page_us: f64,
    /// An eviction in the pager: protect, copy, punch (docs/adr/0005: 4.4 us).
    pub evict_page_us: f64,
    /// Seconds in which all memory is looked at once for equal pages: assumed, for the manager's are shorter where much is found, and
    /// up to an hour where nothing is (docs/design/page-sharing.md).
    pub scan_time_s: f64,
    /// Part of the evicted pages, 0 to 1, that fits half a page. The loads of docs/overcommitment.md compress
    /// to 45%; how many single pages fit is assumed.
    pub compress_fits: f64,
    /// Machine pages that a compressed page takes: half a page (docs/adr/0012).
    pub compress_frame: f64,
    /// The compressed cache, per cent of the VM's size (docs/configuration.md: 10).
    pub compress_percent: f64,
    /// A fault on a compressed page: the fill of docs/adr/0005 (4.4 us), and decompression (assumed
    /// to be 2.6 us).
    pub compress_fault_us: f64,
    /// A fault on a swapped page, as its guest sees it (experiments/vtj-memory-f5, last third of case
    /// c, an early run: two guests that did nothing but fault had 23.0 MiB/s between them, 340 us a
    /// page; 45.7 and 67.4 MiB/s in the runs of 2026-11-25 and 28).
    pub swap_fault_us: f64,
    /// The most swapped pages that a host reads per second: what that run reached (23.0 MiB/s). A
    /// faster disk is likely; none was measured.
    pub swap_reads_per_s: f64,
    /// The most that a host writes to swap, MiB per second (assumed).
    pub swap_write_mib_s: f64,
    /// A guest reads a page that it had to drop from its own disk (assumed: as its host's swap).
    pub guest_disk_us: f64,
    /// What such a read takes of the guest's processor beside: 600 us under emulation (docs/adr/0019).
    pub guest_read_cpu_us: f64,
    /// How fast a guest touches memory for the first time, MiB per second
    /// (experiments/vtj-memory-f5/data.csv, case a: 60 MiB in each of the first seconds).
    pub touch_mib_s: f64,
    /// What a VM's pager takes, whatever the VM's size: MiB (`PagerConfig::overhead`).
    pub overhead_mib: f64,
    /// What it takes for each page of the VM's size, bytes (as above).
    pub overhead_page_bytes: f64,
    /// Relative error of a predicted miss ratio, for the policy that uses them (assumed).
    pub curve_error: f64,
}

impl Default for Models {
    fn default() -> Models {
        Models {
            balloon_page_us: 50.0,
            evict_page_us: 4.4,
            scan_time_s: 600.0,
            compress_fits: 0.6,
            compress_frame: 0.5,
            compress_percent: 10.0,
            compress_fault_us: 7.0,
            swap_fault_us: 340.0,
            swap_reads_per_s: 5_888.0,
            swap_write_mib_s: 200.0,
            guest_disk_us: 340.0,
            guest_read_cpu_us: 0.0,
            touch_mib_s: 60.0,
            overhead_mib: 2.2,
            overhead_page_bytes: 35.0,
            curve_error: 0.1,
        }
    }
}

impl Models {
    /// What a VM of `size` pages costs beside its pages: pages.
    pub fn overhead(&self, size: u64) -> u64 {
        let bytes = self.overhead_mib * 1_048_576.0 + size as f64 * self.overhead_page_bytes;
        Bytes(bytes as u64).pages().0
    }

    /// The first figure that is out of range: its key, and what is wrong with it.
    ///
    /// # Errors
    /// A latency or a rate that is not a finite number above 0, a part that is not 0 to 1, a percentage
    /// above 50.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let above_zero = [
            ("balloon_page_us", self.balloon_page_us),
            ("evict_page_us", self.evict_page_us),
            ("scan_time_s", self.scan_time_s),
            ("compress_fault_us", self.compress_fault_us),
            ("swap_fault_us", self.swap_fault_us),
            ("swap_reads_per_s", self.swap_reads_per_s),
            ("swap_write_mib_s", self.swap_write_mib_s),
            ("guest_disk_us", self.guest_disk_us),
            ("touch_mib_s", self.touch_mib_s),
        ];
        for (key, value) in above_zero {
            if !(value.is_finite() && value > 0.0) {
                return Err((key, format!("{value} is not above 0")));
            }
        }
        let ranges = [
            ("compress_fits", self.compress_fits, 1.0),
            ("compress_frame", self.compress_frame, 1.0),
            ("curve_error", self.curve_error, 1.0),
            ("compress_percent", self.compress_percent, 50.0),
            ("overhead_mib", self.overhead_mib, 1e6),
            ("overhead_page_bytes", self.overhead_page_bytes, 4096.0),
            ("guest_read_cpu_us", self.guest_read_cpu_us, 1e6),
        ];
        for (key, value, most) in ranges {
            if !(0.0..=most).contains(&value) {
                return Err((key, format!("{value} is not between 0 and {most}")));
            }
        }
        Ok(())
    }
}
