//! The fault service of one VM.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_uffd::{EVENTS_PER_READ, Event};
use ballast_units::{HostAddr, PAGE_SIZE, Ppn, SlotId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use super::serve::{Landed, Notice, Serve, Task};
use super::vm::Shared;
use crate::backend::PageBuf;
use crate::guest_ram::GuestRam;
use crate::mapping::Mapping;
use crate::memory::{Access, Memory, Wait};
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
    unfilled: Vec<(usize, Wait)>,
    /// Pages claimed for reading that no buffer was free for.
    queued: VecDeque<Read>,
    /// Reads that failed for good, and when to try them again.
    failed: Vec<(Ppn, Instant)>,
    serve: Serve,
    tasks: Vec<Task>,
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
            serve: Serve::default(),
            tasks: Vec::new(),
        })
    }

    /// Serves until the VM is stopped or gone. One reading of events at a time, so that pages that
    /// arrive from the disk find their turn however many faults there are.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_PER_READ);
        while !self.vm.is_stopping() {
            if self.wait()
                && let Err(e) = self.take_events(&mut events)
            {
                self.vm.set_ill(format!("reading faults: {e}"));
                return;
            }
            self.reap();
            self.retry();
        }
    }

    /// Waits for anything to do; answers whether there are events to read.
    fn wait(&self) -> bool {
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
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // EINTR: look again at everything.
            return false;
        }
        if fds[1].revents().contains(PollFlags::IN) {
            let mut count = [0u8; 8];
            let _ = rustix::io::read(&self.vm.wake_fd, &mut count);
        }
        if fds[0].revents().contains(PollFlags::ERR) {
            // The VMM holds a duplicate and made it blocking. A read would hang this thread.
            self.vm.set_ill("the VMM made its userfaultfd blocking".to_owned());
            if let Ok(flags) = rustix::fs::fcntl_getfl(uffd) {
                let _ = rustix::fs::fcntl_setfl(uffd, flags | OFlags::NONBLOCK);
            }
            return false;
        }
        fds[0].revents().contains(PollFlags::IN)
    }

    /// How long nothing needs to be tried again.
    fn patience(&self) -> Duration {
        let brief = |why| matches!(why, Wait::Busy | Wait::Discard);
        if self.serve.pending().is_brief() || self.unfilled.iter().any(|u| brief(u.1)) {
            Duration::from_micros(50)
        } else if !self.serve.is_quiet() {
            // Waiting for memory: whoever frees some also wakes us; this is the safety net.
            Duration::from_millis(2)
        } else if !self.failed.is_empty() {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    /// What an event means for pages; None for those that mean nothing.
    fn notice(&self, event: Event) -> Option<Notice> {
        let layout = self.vm.memory.backend().layout();
        let fault = |addr: HostAddr, access| match layout.ppn(addr) {
            Some(ppn) => Some(Notice::Fault(ppn, access)),
            // Only a kernel that misreports gets here; there is no page to act on.
            None => {
                tracing::error!(vm = %self.vm.name, "fault at {addr}, outside the RAM");
                None
            }
        };
        match event {
            Event::Missing { addr, write: false } => fault(addr, Access::Reading),
            Event::Missing { addr, .. } | Event::Minor { addr } => fault(addr, Access::Missing),
            Event::Protected { addr } => fault(addr, Access::Protected),
            Event::Remove { start, end } => {
                layout.pages_within(start, end).map(|(first, n)| Notice::Discard(first, n))
            }
            other => {
                self.vm.set_ill(format!("the VMM changed its RAM mapping: {other:?}"));
                None
            }
        }
    }

    fn take_events(&mut self, events: &mut Vec<Event>) -> std::io::Result<()> {
        let mark = self.vm.memory.mark();
        self.vm.memory.backend().uffd().read_events(events)?;
        let notices: Vec<Notice> = events.drain(..).filter_map(|e| self.notice(e)).collect();
        self.with_serve(|serve, memory, tasks| serve.take(memory, &notices, mark, tasks));
        Ok(())
    }

    fn with_serve<T>(
        &mut self,
        act: impl FnOnce(&mut Serve, &Memory<GuestRam>, &mut Vec<Task>) -> T,
    ) -> T {
        let mut tasks = std::mem::take(&mut self.tasks);
        let result = act(&mut self.serve, &self.vm.memory, &mut tasks);
        for task in tasks.drain(..) {
            match task {
                Task::Read(ppn, slot) => self.queued.push_back(Read { ppn, slot, attempts: 0 }),
                Task::Trouble(what) => self.vm.set_ill(what),
            }
        }
        self.tasks = tasks;
        if self.vm.memory.has_reads_of_untouched() {
            self.vm.signal_share();
        }
        self.submit_reads();
        result
    }

    fn submit_reads(&mut self) {
        let mut refused = Vec::new();
        while !self.ring.is_full()
            && let Some(free) = self.reads.iter().position(Option::is_none)
            && let Some(read) = self.queued.pop_front()
        {
            match self.submit(free, read) {
                Ok(()) => self.reads[free] = Some(read),
                Err(e) => {
                    self.vm.set_ill(format!("reading swap: {e}"));
                    refused.push(read);
                }
            }
        }
        for read in refused {
            self.give_up(read);
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
        self.with_serve(|serve, memory, tasks| serve.arrived(memory, read.ppn, None, tasks));
        self.failed.push((read.ppn, Instant::now() + Duration::from_secs(1)));
    }

    fn put_in_place(&mut self, buffer: usize) {
        let Some(read) = self.reads[buffer] else { return };
        // SAFETY: the read into this buffer is complete, and `reads[buffer]` keeps it from other use.
        let bytes = unsafe { self.buffers.slice(buffer * PAGE_SIZE, PAGE_SIZE) };
        let Ok(page) = <&PageBuf>::try_from(bytes) else { return };
        // Tasks are kept for the caller's end, so that no new read takes this buffer meanwhile.
        let landed = self.serve.arrived(&self.vm.memory, read.ppn, Some(page), &mut self.tasks);
        match landed {
            Landed::Done => self.reads[buffer] = None,
            Landed::NotYet(why) => self.unfilled.push((buffer, why)),
        }
    }

    /// Everything that had to wait.
    fn retry(&mut self) {
        for (buffer, _) in std::mem::take(&mut self.unfilled) {
            self.put_in_place(buffer);
        }
        let now = Instant::now();
        let due: Vec<Ppn> = self.failed.extract_if(.., |f| f.1 <= now).map(|f| f.0).collect();
        self.with_serve(|serve, memory, tasks| {
            serve.retry(memory, tasks);
            for ppn in due {
                serve.fault(memory, ppn, Access::Missing, tasks);
            }
        });
        let waiting = self.serve.pending().faults() as u64;
        self.vm.waiting.store(waiting, std::sync::atomic::Ordering::Relaxed);
    }
}
