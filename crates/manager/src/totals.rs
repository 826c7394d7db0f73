//! Running totals over all VMs, those that ended included: none of them ever falls.

use ballast_api::{CompressionView, HostCounters};
use ballast_units::Pages;

use crate::vm::Vm;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub host: HostCounters,
    /// Shared pages that were written to.
    pub breaks: u64,
    /// Pages looked at in search of equal ones.
    pub scanned: u64,
    /// Times that a VM's pages were gone through for that.
    pub passes: u64,
    /// Bytes, as of [`CompressionView`].
    stored: u64,
    restored: u64,
    written_back: u64,
    incompressible: u64,
}

impl Totals {
    pub fn add(&mut self, vm: &Vm) {
        let Some(paged) = &*vm.paged() else { return };
        let c = paged.memory().counters.values();
        let bytes = |pages: u64| Pages(pages).bytes().0;
        self.host.ballooned += bytes(c.discarded);
        self.host.swapped_out += bytes(c.swap_outs);
        self.host.swapped_in += bytes(c.swap_ins);
        self.host.zero_dropped += bytes(c.zero_dropped);
        self.host.faults += c.faults;
        self.host.waits += c.waits;
        self.host.blocks += c.blocks;
        self.breaks += c.breaks;
        self.scanned += c.scanned;
        self.passes += c.passes;
        self.stored += bytes(c.compressed + c.filled);
        self.restored += bytes(c.decompressed);
        self.written_back += bytes(c.written_back);
        self.incompressible += bytes(c.incompressible);
    }

    /// A sum over the VMs that are there, with these totals instead of theirs.
    pub fn compression(&self, now: CompressionView) -> CompressionView {
        CompressionView {
            stored: self.stored,
            restored: self.restored,
            written_back: self.written_back,
            incompressible: self.incompressible,
            ..now
        }
    }
}
