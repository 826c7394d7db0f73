//! The fault service of one VM.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_uffd::Event;
use ballast_units::{HostAddr, PAGE_SIZE, Ppn, SlotId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::pending::Pending;
use super::vm::Shared;
use crate::backend::{MemError, PageBuf};
use crate::mapping::Mapping;
use crate::memory::{Access, Counters, Fault, Wait};
use crate::swap::{Completion, Ring};

/// Pages being read from the swap file at one time. Their buffers are overhead memory.
pub(super) const READS: usize = 64;

/// How often a read that fails is tried again at once, before the VM is declared ill.
const READ_ATTEMPTS: u32 = 3;

/// What is read into one buffer.
#[derive(Clone, Copy, Debug)]
struct Read {
    ppn: Ppn,
    slot: SlotId,
    attempts: u32,
}

pub(super) struct FaultService {
    vm: Arc<Shared>,
    ring: Ring,
    buffers: Mapping,
    /// By buffer: what is being read, or waits to be filled.
    reads: [Option<Read>; READS],
    /// Buffers whose bytes are here but could not be put in place yet.
    unfilled: Vec<usize>,
    /// Pages claimed for reading that no buffer was free for.
    queued: VecDeque<Read>,
    /// Reads that failed for good, and when to try them again.
    failed: Vec<(Ppn, Instant)>,
    pending: Pending,
}

impl FaultService {
    pub fn new(vm: Arc<Shared>) -> std::io::Result<FaultService> {
        Ok(FaultService {
            vm,
            ring: Ring::new(READS as u32),
            buffers: Mapping::anonymous(READS * PAGE_SIZE)?,
            reads: [None; READS],
            unfilled: Vec::new(),
            queued: VecDeque::new(),
            failed: Vec::new(),
            pending: Pending::default(),
        })
    }

    /// Serves until the VM is stopped or gone.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        while !self.vm.is_stopping() {
            self.wait();
            loop {
                match self.vm.memory.backend().uffd().read_events(&mut events) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) => {
                        self.vm.set_ill(format!("reading faults: {e}"));
                        return;
                    }
                }
                for event in events.drain(..) {
                    self.event(event);
                }
            }
            self.reap();
            self.retry();
        }
    }

    fn wait(&self) {
        let uffd = self.vm.memory.backend().uffd();
        let mut fds = vec![
            PollFd::new(uffd, PollFlags::IN),
            PollFd::from_borrowed_fd(self.vm.wake_fd.as_fd(), PollFlags::IN),
        ];
        let ring = self.ring.poll_fd();
        if let (Some(fd), true) = (ring, self.ring.in_flight() > 0) {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let timeout = Timespec::try_from(self.patience()).ok();
        // An error (EINTR) or a timeout: look again at everything.
        let _ = poll(&mut fds, timeout.as_ref());
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.vm.wake_fd, &mut count);
    }

    /// How long nothing needs to be tried again.
    fn patience(&self) -> Duration {
        let brief = !self.unfilled.is_empty()
            || self
                .pending
                .waiting()
                .iter()
                .filter_map(|&p| self.pending.fault(p))
                .any(|f| matches!(f.why, Wait::Busy | Wait::Discard));
        if brief {
            Duration::from_micros(50)
        } else if !self.pending.is_empty() || !self.queued.is_empty() {
            // Waiting for memory: whoever frees some also wakes us; this is the safety net.
            Duration::from_millis(2)
        } else if !self.failed.is_empty() {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Missing { addr, .. } | Event::Minor { addr } => {
                self.fault_at(addr, Access::Missing);
            }
            Event::Protected { addr } => self.fault_at(addr, Access::Protected),
            Event::Remove { start, end } => self.discard(start, end),
            other => self.vm.set_ill(format!("the VMM changed its RAM mapping: {other:?}")),
        }
    }

    fn fault_at(&mut self, addr: HostAddr, access: Access) {
        match self.ppn(addr) {
            Some(ppn) => self.fault(ppn, access),
            // Only a kernel that misreports gets here; there is no page to act on.
            None => tracing::error!(vm = %self.vm.name, "fault at {addr}, outside the RAM"),
        }
    }

    fn ppn(&self, addr: HostAddr) -> Option<Ppn> {
        let layout = self.vm.memory.backend().layout();
        addr.ppn_from(layout.base).filter(|p| p.0 < layout.len.0)
    }

    fn fault(&mut self, ppn: Ppn, access: Access) {
        if self.is_coming(ppn) {
            // Putting the page in place wakes everyone who waits for it.
            return;
        }
        if self.pending.discard_outstanding(ppn) {
            self.keep(ppn, access, Wait::Busy);
            return;
        }
        match self.vm.memory.fault(ppn, access) {
            Fault::Served => self.served(ppn),
            Fault::Wait(why) => self.keep(ppn, access, why),
            Fault::Read(slot) => {
                self.served(ppn);
                self.queued.push_back(Read { ppn, slot, attempts: 0 });
                self.submit_reads();
            }
            Fault::Failed(e) => self.broken(ppn, access, e),
        }
    }

    fn is_coming(&self, ppn: Ppn) -> bool {
        self.reads.iter().flatten().any(|r| r.ppn == ppn)
            || self.queued.iter().any(|r| r.ppn == ppn)
    }

    fn keep(&mut self, ppn: Ppn, access: Access, why: Wait) {
        let before = self.pending.fault(ppn).map(|f| f.why);
        self.pending.keep_fault(ppn, access, why);
        if before != Some(why) {
            let counters = &self.vm.memory.counters;
            match why {
                Wait::Memory => Counters::add(&counters.waits, 1),
                Wait::Blocked => Counters::add(&counters.blocks, 1),
                Wait::Busy | Wait::Discard | Wait::Kernel => {}
            }
        }
    }

    fn served(&mut self, ppn: Ppn) {
        if let Some(fault) = self.pending.drop_fault(ppn) {
            let waited = fault.since.elapsed().as_nanos() as u64;
            Counters::add(&self.vm.memory.counters.wait_ns, waited);
        }
    }

    fn broken(&mut self, ppn: Ppn, access: Access, e: MemError) {
        if e == MemError::Gone {
            // The VMM is exiting; its process handle tells the manager.
            self.pending.drop_fault(ppn);
            return;
        }
        self.vm.set_ill(format!("fault on {ppn}: {e}"));
        self.keep(ppn, access, Wait::Kernel);
    }

    fn discard(&mut self, start: HostAddr, end: HostAddr) {
        let layout = self.vm.memory.backend().layout();
        let from = start.0.max(layout.base.0);
        let to = end.0.min(layout.base.page(Ppn(layout.len.0)).0);
        if from >= to {
            return;
        }
        let first = (from - layout.base.0).div_ceil(PAGE_SIZE as u64);
        let last = (to - layout.base.0) / PAGE_SIZE as u64;
        self.discard_pages(Ppn(first), last.saturating_sub(first));
    }

    fn discard_pages(&mut self, first: Ppn, n: u64) {
        let (busy, result) = self.vm.memory.discard(first, n);
        self.pending.keep_discards(busy);
        if let Err(e) = result {
            self.vm.set_ill(format!("discarding {n} pages at {first}: {e}"));
        }
    }

    fn submit_reads(&mut self) {
        while !self.ring.is_full()
            && let Some(free) = self.reads.iter().position(Option::is_none)
            && let Some(read) = self.queued.pop_front()
        {
            self.reads[free] = Some(read);
            if let Err(e) = self.submit(free, read) {
                self.vm.set_ill(format!("reading swap: {e}"));
                self.reads[free] = None;
                self.give_up(read);
            }
        }
    }

    fn submit(&mut self, buffer: usize, read: Read) -> std::io::Result<()> {
        // SAFETY: the buffer lies in a mapping that self owns and that outlives the ring's operations
        // (the ring waits for them on drop, and is declared first); `reads[buffer]` keeps it from
        // other use until the completion is reaped.
        unsafe {
            let into = self.buffers.as_ptr().add(buffer * PAGE_SIZE);
            self.ring.read(&self.vm.swap, into, PAGE_SIZE as u32, read.slot.offset(), buffer as u64)
        }
    }

    fn reap(&mut self) {
        if self.ring.in_flight() == 0 {
            return;
        }
        let mut done = Vec::new();
        if let Err(e) = self.ring.reap(false, &mut done) {
            self.vm.set_ill(format!("swap I/O: {e}"));
        }
        for Completion { tag, result } in done {
            let buffer = tag as usize;
            let Some(read) = self.reads.get(buffer).copied().flatten() else { continue };
            if result == Ok(PAGE_SIZE as u32) {
                self.put_in_place(buffer);
            } else {
                self.reread(buffer, read, result);
            }
        }
        self.submit_reads();
    }

    fn reread(&mut self, buffer: usize, read: Read, result: Result<u32, i32>) {
        let read = Read { attempts: read.attempts + 1, ..read };
        self.reads[buffer] = Some(read);
        let again = read.attempts < READ_ATTEMPTS && self.submit(buffer, read).is_ok();
        if !again {
            let what = match result {
                Ok(n) => format!("{n} bytes of a page"),
                Err(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
            };
            let path = self.vm.swap.path().display().to_string();
            self.vm.set_ill(format!("{path}: slot {}: {what}; the guest waits", read.slot.0));
            self.reads[buffer] = None;
            self.give_up(read);
        }
    }

    /// The page stays swapped and its fault unanswered; it is tried again later.
    fn give_up(&mut self, read: Read) {
        self.vm.memory.swapped_in(read.ppn, None);
        self.failed.push((read.ppn, Instant::now() + Duration::from_secs(1)));
    }

    fn put_in_place(&mut self, buffer: usize) {
        let Some(read) = self.reads[buffer] else { return };
        // SAFETY: the read into this buffer is complete, and `reads[buffer]` keeps it from other use.
        let bytes = unsafe { self.buffers.slice(buffer * PAGE_SIZE, PAGE_SIZE) };
        let Ok(page) = <&PageBuf>::try_from(bytes) else { return };
        match self.vm.memory.swapped_in(read.ppn, Some(page)) {
            Fault::Served => self.reads[buffer] = None,
            // Gone: the VMM is exiting, and everything with it.
            Fault::Failed(MemError::Gone) => self.reads[buffer] = None,
            Fault::Failed(e) => {
                self.vm.set_ill(format!("fault on {}: {e}", read.ppn));
                self.unfilled.push(buffer);
            }
            Fault::Wait(_) | Fault::Read(_) => self.unfilled.push(buffer),
        }
    }

    /// Everything that had to wait, discards first.
    fn retry(&mut self) {
        for buffer in std::mem::take(&mut self.unfilled) {
            self.put_in_place(buffer);
        }
        for (first, n) in self.pending.take_discards() {
            self.discard_pages(first, n);
        }
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.failed).into_iter().partition(|f| f.1 <= now);
        self.failed = later;
        let due: Vec<(Ppn, Instant)> = due;
        for (ppn, _) in due {
            self.fault(ppn, Access::Missing);
        }
        for ppn in self.pending.waiting() {
            if let Some(fault) = self.pending.fault(ppn) {
                self.fault(ppn, fault.access);
            }
        }
        self.vm.waiting.store(self.pending.faults() as u64, std::sync::atomic::Ordering::Relaxed);
        self.submit_reads();
    }
}
