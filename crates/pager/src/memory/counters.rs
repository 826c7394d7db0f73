//! Running totals of one VM, in pages or events.

use crate::sync::{AtomicU64, Ordering};

/// Any thread adds to them and reads them; two that are read one after the other are not of one moment.
#[derive(Default)]
pub struct Counters {
    /// Faults served.
    pub faults: AtomicU64,
    /// Tests: of these, by threads beside the fault thread.
    pub helped: AtomicU64,
    /// Pages of zeros that came beside one that was touched, or ahead of it: no fault tells of them.
    pub unasked: AtomicU64,
    /// Pages brought back from the swap file.
    pub swap_ins: AtomicU64,
    /// Of these, pages that their guest waited for.
    pub swap_waits: AtomicU64,
    /// Nanoseconds from the beginning of the read until they were home, summed over those that a fault waited
    /// for. (What such a fault waited for before that is in `wait_ns`.)
    pub swap_in_ns: AtomicU64,
    /// Pages that were read from swap files, whoever wanted them. Not among the values, nor are the nanoseconds.
    pub disk_reads: AtomicU64,
    /// Nanoseconds that this took, from when the kernel was given each read until it was done.
    pub disk_read_ns: AtomicU64,
    /// Pages of the VM's own that their guest waited for, from wherever they had gone.
    pub own_back: AtomicU64,
    /// The same of pages that were in the store before they left.
    pub shared_back: AtomicU64,
    /// Pages written to the swap file.
    pub swap_outs: AtomicU64,
    /// Pages that went from the stage into the compressed tier.
    pub compressed: AtomicU64,
    /// Pages that were found to repeat one number.
    pub filled: AtomicU64,
    /// Compressed and filled pages that came home.
    pub decompressed: AtomicU64,
    /// Nanoseconds that this took, summed over those that a fault waited for.
    pub decompress_ns: AtomicU64,
    /// Compressed pages that made room for others, on their way to swap.
    pub written_back: AtomicU64,
    /// Pages that were too large when compressed.
    pub incompressible: AtomicU64,
    /// Swapped pages that were read before they were wanted.
    pub read_ahead: AtomicU64,
    /// Of those, pages that were wanted then, or came home because a neighbour was.
    pub read_ahead_hits: AtomicU64,
    /// Pages that came home before they were wanted, because a neighbour was.
    pub brought: AtomicU64,
    /// Pages that left their homes by eviction.
    pub evicted: AtomicU64,
    /// Tests: of those, pages that had come back after long, and were not accessed again.
    pub failed_probation: AtomicU64,
    /// Nanoseconds in which there were pages to be evicted.
    pub evict_ns: AtomicU64,
    /// Pages at home that were found all zero, and dropped: by eviction (`evicted` has these, too), in search of
    /// equal pages, and when large pages were broken.
    pub zero_dropped: AtomicU64,
    /// Pages at home that the guest gave up; those that were elsewhere are not counted.
    pub discarded: AtomicU64,
    /// Sampled pages touched.
    pub touched: AtomicU64,
    /// Allocations that had to wait for free memory.
    pub waits: AtomicU64,
    /// Allocations that waited because the host was low.
    pub blocks: AtomicU64,
    /// Nanoseconds that faults which could not be served at once waited, for memory or for anything else,
    /// summed when they are served. Reads from swap are not in it.
    pub wait_ns: AtomicU64,
    /// Nanoseconds in which any fault waited for memory, or because the host was low.
    pub starved_ns: AtomicU64,
    /// Writes to shared pages, and to zeros that had been read, each of which made a copy.
    pub breaks: AtomicU64,
    /// Pages that came home with nobody waiting for them, nor for a neighbour (`service::restore`). Those from swap and
    /// from the compressed tier are counted there, too.
    pub restored: AtomicU64,
    /// Writes to pages that were protected only so as not to be looked at again before they are written.
    pub unwritten_faults: AtomicU64,
    /// Pages that entered the store.
    pub shares: AtomicU64,
    /// Tests: shared and broken pages that went home again.
    pub homed: AtomicU64,
    /// Pages that were hashed to find others like them.
    pub scanned: AtomicU64,
    /// Runs of pages that were mapped elsewhere.
    pub remaps: AtomicU64,
    /// Nanoseconds that this took, summed: so long the VMM's mappings were not to be had. Not among the values.
    pub remap_ns: AtomicU64,
    /// CPU time of the VM's share thread in nanoseconds.
    pub share_cpu_ns: AtomicU64,
    /// Passes over all pages in search of equal ones.
    pub passes: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Reads of swap files, and the nanoseconds that they took.
    pub fn disk_reads(&self) -> (u64, u64) {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        (get(&self.disk_reads), get(&self.disk_read_ns))
    }

    /// All of them now.
    pub fn values(&self) -> CounterValues {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        CounterValues {
            faults: get(&self.faults),
            helped: get(&self.helped),
            swap_ins: get(&self.swap_ins),
            swap_waits: get(&self.swap_waits),
            swap_in_ns: get(&self.swap_in_ns),
            own_back: get(&self.own_back),
            shared_back: get(&self.shared_back),
            swap_outs: get(&self.swap_outs),
            compressed: get(&self.compressed),
            filled: get(&self.filled),
            decompressed: get(&self.decompressed),
            decompress_ns: get(&self.decompress_ns),
            written_back: get(&self.written_back),
            incompressible: get(&self.incompressible),
            read_ahead: get(&self.read_ahead),
            read_ahead_hits: get(&self.read_ahead_hits),
            brought: get(&self.brought),
            evicted: get(&self.evicted),
            failed_probation: get(&self.failed_probation),
            evict_ns: get(&self.evict_ns),
            zero_dropped: get(&self.zero_dropped),
            discarded: get(&self.discarded),
            touched: get(&self.touched),
            waits: get(&self.waits),
            blocks: get(&self.blocks),
            wait_ns: get(&self.wait_ns),
            starved_ns: get(&self.starved_ns),
            breaks: get(&self.breaks),
            restored: get(&self.restored),
            unwritten_faults: get(&self.unwritten_faults),
            unasked: get(&self.unasked),
            shares: get(&self.shares),
            homed: get(&self.homed),
            scanned: get(&self.scanned),
            remaps: get(&self.remaps),
            share_cpu_ns: get(&self.share_cpu_ns),
            passes: get(&self.passes),
        }
    }
}

/// What `Counters` held at one moment; units as there.
#[allow(missing_docs, reason = "told with the fields of `Counters`")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterValues {
    pub faults: u64,
    pub helped: u64,
    pub swap_ins: u64,
    pub swap_waits: u64,
    pub swap_in_ns: u64,
    pub own_back: u64,
    pub shared_back: u64,
    pub swap_outs: u64,
    pub compressed: u64,
    pub filled: u64,
    pub decompressed: u64,
    pub decompress_ns: u64,
    pub written_back: u64,
    pub incompressible: u64,
    pub read_ahead: u64,
    pub read_ahead_hits: u64,
    pub brought: u64,
    pub evicted: u64,
    pub failed_probation: u64,
    pub evict_ns: u64,
    pub zero_dropped: u64,
    pub discarded: u64,
    pub touched: u64,
    pub waits: u64,
    pub blocks: u64,
    pub wait_ns: u64,
    pub starved_ns: u64,
    pub breaks: u64,
    pub restored: u64,
    pub unwritten_faults: u64,
    /// Pages of zeros that came beside one that was touched, or ahead of it.
    pub unasked: u64,
    pub shares: u64,
    pub homed: u64,
    pub scanned: u64,
    pub remaps: u64,
    pub share_cpu_ns: u64,
    pub passes: u64,
}
