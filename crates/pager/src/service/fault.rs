//! The fault service of one VM.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ballast_uffd::{EVENTS_PER_READ, Event};
use ballast_units::{HostAddr, Ppn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use super::around::Around;
use super::crew::{Crew, Job, LATE, LONG};
use super::overdue::{self, Watch};
use super::reads::{AHEAD, Arrival, Reads};
use super::restore::Restore;
use super::serve::{Landed, Notice, Serve, Task};
use super::shared::Shared;
use super::spin::{Spin, await_any};
use super::vain::Vain;
use super::wakeful::Wakeful;
use crate::backend::{Backend, MemError};
use crate::guest_ram::GuestRam;
use crate::memory::{Access, Counters, Mark, Memory, Unbooked, Wait};
use crate::word::State;

/// How long until a page that could not be read is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// How long until reads are offered to the kernel again that it did not take.
const BEHIND: Duration = Duration::from_millis(1);
/// How long what the kernel refuses is tried again at once.
const CHASE: Duration = Duration::from_micros(100);
/// How often pages whose mapping is unknown are to be settled while a guest waits for one.
const SETTLE: Duration = Duration::from_millis(20);
/// How long a thread that rests does not see that it is to end.
const NAP: Duration = Duration::from_millis(50);
/// How long until events that could not be read are tried again.
const UNREADABLE: Duration = Duration::from_millis(100);

/// What the fault thread of a VM has.
pub(super) struct FaultService {
    vm: Arc<Shared>,
    reads: Reads,
    /// Buffers whose bytes are here but could not be put in place yet.
    unfilled: Vec<(usize, Wait)>,
    /// Pages that could not be read, and when to try them again.
    failed: BTreeMap<Ppn, Instant>,
    serve: Serve,
    tries: Tries,
    vain: Vain,
    crew: Crew,
    around: Around,
    restore: Restore,
    tasks: Vec<Task>,
    spin: Spin,
    wakeful: Wakeful,
    watch: Watch,
    /// Faults that were read, and are of something that the VMM registered besides its RAM.
    outside: u64,
    begun: Instant,
    /// Since when, or since the last look, a fault has waited for memory.
    starved: Option<Instant>,
    /// Since when faults may have waited that are read next: the thread was at something that nobody had asked for.
    kept_since: Option<Instant>,
    /// When the share thread was last woken to settle what its shim did not answer for.
    settle_asked: Instant,
}

/// How often something is tried again that is ready very soon, most of the time.
#[derive(Debug, Default)]
struct Tries {
    /// What waits, how much of each kind, and since when it is so much.
    waits: Option<((usize, usize, usize), Instant)>,
}

impl Tries {
    const OFTEN: Duration = Duration::from_micros(50);
    const SELDOM: Duration = Duration::from_millis(2);
    /// One part of the time for which nothing came of it.
    const PART: u32 = 16;

    /// How long until the next try. A page of a VMM that does not answer may be busy for ever.
    fn patience(&mut self, state: (usize, usize, usize), now: Instant) -> Duration {
        match self.waits {
            Some((before, since)) if before == state => {
                (now.saturating_duration_since(since) / Self::PART).clamp(Self::OFTEN, Self::SELDOM)
            }
            _ => {
                self.waits = Some((state, now));
                Self::OFTEN
            }
        }
    }

    fn begin_anew(&mut self) {
        self.waits = None;
    }
}

impl FaultService {
    /// `unbooked` is what a takeover could not book of the discards that it read.
    ///
    /// # Errors
    /// No memory for buffers.
    pub fn new(
        vm: Arc<Shared>,
        unbooked: Vec<(Unbooked, Mark)>,
        crew: Crew,
    ) -> std::io::Result<FaultService> {
        let mut serve = Serve::default();
        unbooked.into_iter().for_each(|(left, mark)| serve.resume(left, mark));
        Ok(FaultService {
            reads: Reads::new(vm.clone())?,
            wakeful: Wakeful::new(vm.memory.host().clone()),
            crew,
            vm,
            unfilled: Vec::new(),
            failed: BTreeMap::new(),
            serve,
            tries: Tries::default(),
            vain: Vain::new(Instant::now()),
            around: Around::default(),
            restore: Restore::default(),
            tasks: Vec::new(),
            spin: Spin::default(),
            watch: Watch::new(Instant::now()),
            outside: 0,
            begun: Instant::now(),
            starved: None,
            kept_since: None,
            settle_asked: Instant::now(),
        })
    }

    /// Serves until the VM is stopped or gone. One reading of events at a time, so that pages that
    /// arrive from the disk find their turn however many faults there are.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS_PER_READ);
        while !self.vm.is_stopping() {
            let ahead = self.vm.memory.runs_ahead();
            let has_events = self.wait(ahead);
            if !has_events && ahead {
                self.run_ahead();
            }
            if has_events && let Err(e) = self.take_events(&mut events) {
                // Whatever it is: a guest whose faults nobody reads stands still for good.
                self.vm.set_ill(format!("reading faults: {e}; tried again"));
                std::thread::sleep(UNREADABLE);
            }
            self.reap();
            self.take_back();
            self.retry();
            if has_events {
                self.chase();
            }
            self.restore();
            self.look_for_overdue(Instant::now());
            self.rest_from_vain();
            // One that waits for what it has above its target to leave does not grow by more.
            let blocked = self.serve.pending().is_blocked();
            if self.vm.hold_down(self.vm.grows_by(blocked)) {
                self.vm.signal_reclaim();
            }
        }
    }

    /// Waits for anything to do, unless it only `looks`; answers whether there are events to read.
    fn wait(&mut self, looks: bool) -> bool {
        let (now, is_quiet) = (Instant::now(), self.serve.is_quiet());
        if !is_quiet {
            self.wakeful.is_busy(now);
        }
        self.wakeful.settle(now);
        let rest = self.wakeful.rest(now);
        let patience = if looks { Duration::ZERO } else { self.patience().min(rest) };
        // What is to be tried again has its own time, and so has what is being read: neither says when the next fault comes.
        let for_fault = is_quiet && !looks;
        let window = self.spin.window(self.begun.elapsed());
        let spin = if for_fault { window } else { Duration::ZERO };
        let uffd = self.vm.memory.backend().uffd();
        let mut fds = vec![
            PollFd::new(uffd, PollFlags::IN),
            PollFd::from_borrowed_fd(self.vm.wake_fd.as_fd(), PollFlags::IN),
        ];
        if let Some(fd) = self.reads.poll_fd() {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        let Ok(waited) = await_any(&mut fds, spin, patience) else {
            // EINTR: look again at everything.
            return false;
        };
        if !is_quiet {
            // The next fault follows what was read until now.
            self.wakeful.is_busy(Instant::now());
        }
        if for_fault {
            self.spin.learn(self.begun.elapsed(), !spin.is_zero(), waited);
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
            // One that does so over and over is not to keep a processor busy.
            std::thread::sleep(Duration::from_millis(1));
            return false;
        }
        fds[0].revents().contains(PollFlags::IN)
    }

    /// Hands out what a guest that fills memory in order will want next. Other faults come first: a part at a time.
    fn run_ahead(&mut self) {
        let begun = Instant::now();
        let came = self.vm.memory.run_ahead();
        self.kept_from(begun);
        match came {
            // The VMM is exiting, or discards something: then a fault will be met with the same.
            Ok(()) | Err(MemError::Gone | MemError::Again | MemError::NoMemory) => {}
            Err(e) => self.vm.set_ill(format!("pages ahead of first touches: {e}")),
        }
    }

    /// Since `begun` the thread was at something that nobody had asked for: a large page takes long, and who came meanwhile
    /// has waited.
    fn kept_from(&mut self, begun: Instant) {
        if begun.elapsed() > LONG && self.has_events() {
            self.crew.crowded(Instant::now());
            self.kept_since = Some(begun);
        }
    }

    /// How long nothing needs to be looked at again.
    fn patience(&mut self) -> Duration {
        let patience = self.retry_after();
        let patience = if self.reads.is_behind() { patience.min(BEHIND) } else { patience };
        if self.crew.has_jobs() { patience.min(LATE) } else { patience }
    }

    /// How long nothing needs to be tried again.
    fn retry_after(&mut self) -> Duration {
        let brief = |why| matches!(why, Wait::Busy | Wait::Discard);
        if self.serve.pending().is_brief() || self.unfilled.iter().any(|u| brief(u.1)) {
            let pending = self.serve.pending();
            let state = (pending.faults(), pending.discards(), self.unfilled.len());
            self.tries.patience(state, Instant::now())
        } else if !self.serve.is_quiet() {
            // Waiting for memory: whoever frees some also wakes us; this is the safety net.
            Duration::from_millis(2)
        } else if !self.failed.is_empty() {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5).min(self.restore.rest(Instant::now())).min(self.watch.rest())
        }
    }

    /// What an event means for pages; nothing, for some.
    fn notice(&self, event: Event, notices: &mut Vec<Notice>) {
        let layout = self.vm.memory.backend().layout();
        let fault = |addr: HostAddr, access| match layout.ppn(addr) {
            Some(ppn) => Some(Notice::Fault(ppn, access)),
            // The VMM registered memory of its own: it may wait there, or wake itself.
            None => {
                self.vm.set_ill(format!("a fault at {addr}, outside the RAM"));
                None
            }
        };
        notices.extend(match event {
            Event::Missing { addr, write: false } => fault(addr, Access::Reading),
            Event::Missing { addr, .. } | Event::Minor { addr } => fault(addr, Access::Missing),
            Event::Protected { addr } => fault(addr, Access::Protected),
            Event::Remove { start, end } => {
                let given_up = layout.pages_within(start, end);
                return notices.extend(given_up.map(|(first, n)| Notice::Discard(first, n)));
            }
            other => {
                self.vm.set_ill(format!("the VMM changed its RAM mapping: {other:?}"));
                None
            }
        });
    }

    fn take_events(&mut self, events: &mut Vec<Event>) -> std::io::Result<()> {
        self.tries.begin_anew();
        let memory = &self.vm.memory;
        let (mark, read) = memory.read_marked(|| memory.backend().uffd().read_events(events));
        if read? > 0 {
            self.watch.has_read();
        }
        let begun = Instant::now();
        let since = self.kept_since.take().unwrap_or(begun);
        let mut notices = Vec::with_capacity(events.len());
        events.drain(..).for_each(|event| self.notice(event, &mut notices));
        for notice in &notices {
            if let Notice::Discard(first, n) = *notice {
                self.reads.forget(first, n);
            }
        }
        let faults = notices.iter().filter(|n| matches!(n, Notice::Fault(..))).count();
        if faults > 1 {
            self.crew.crowded(begun);
        }
        let crowded = self.crew.is_crowded(begun);
        let (mut long, mut small) = (Vec::new(), Vec::new());
        let (memory, tasks) = (&self.vm.memory, &mut self.tasks);
        let mut served = self.serve.take(memory, &notices, mark, tasks, |ppn, access| {
            if crowded {
                let kind = if memory.may_fill_large(ppn) { &mut long } else { &mut small };
                kind.push(Job { ppn, access, read: begun });
            }
            crowded
        });
        served += usize::from(self.share_out(long, &small));
        self.with_serve(|_, _, _| {});
        let took = begun.elapsed();
        self.vm.fault_times.note(since.elapsed(), served as u64);
        if !notices.is_empty() {
            // Who waited goes on by now: a guest, or a VMM that gives up page after page.
            self.wakeful.called(begun);
        }
        if took > LONG && self.has_events() {
            self.crew.crowded(Instant::now());
        }
        Ok(())
    }

    /// Gives faults away, and serves one of its own and those that nobody takes. Answers whether its own was served
    /// at once; the others are noted one by one.
    fn share_out(&mut self, mut long: Vec<Job>, small: &[Job]) -> bool {
        // To give away a small one that is alone gains nothing.
        let (own, rest) = small.split_at(small.len().min(1));
        let n = long.len();
        long.extend(rest);
        if !long.is_empty() {
            self.crew.give(&long, n);
        }
        let (memory, tasks) = (&self.vm.memory, &mut self.tasks);
        let own = own.first();
        let served = own.is_some_and(|job| self.serve.fault(memory, job.ppn, job.access, tasks));
        self.serve_spare();
        served
    }

    /// Serves what is on the board and not left to helpers. Answers how many those were.
    fn serve_spare(&mut self) -> usize {
        let mut served = 0;
        while let Some(job) = self.crew.spare() {
            // It may be of an earlier reading.
            if self.serve.fault(&self.vm.memory, job.ppn, job.access, &mut self.tasks) {
                self.vm.fault_times.note(job.read.elapsed(), 1);
            }
            served += 1;
        }
        served
    }

    /// What came of faults that others served.
    fn take_back(&mut self) {
        let late = if self.crew.has_jobs() { self.serve_spare() } else { 0 };
        let back = self.crew.take_back();
        if late > 0 || !back.is_empty() {
            self.with_serve(|serve, memory, tasks| {
                back.into_iter().for_each(|met| serve.met(memory, met, tasks));
            });
        }
    }

    /// Whether faults wait to be read.
    fn has_events(&self) -> bool {
        let mut fds = [PollFd::new(self.vm.memory.backend().uffd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    fn with_serve(&mut self, act: impl FnOnce(&mut Serve, &Memory<GuestRam>, &mut Vec<Task>)) {
        act(&mut self.serve, &self.vm.memory, &mut self.tasks);
        self.work();
        let parked = self.vm.memory.is_parked() && self.serve.pending().is_brief();
        let settle = parked && self.settle_asked.elapsed() > SETTLE;
        if settle {
            self.settle_asked = Instant::now();
        }
        if settle || self.vm.memory.has_reads_of_untouched() {
            self.vm.signal_share();
        }
    }

    /// Does what is to be done, and begins to read what is to be read.
    fn work(&mut self) {
        loop {
            for task in std::mem::take(&mut self.tasks) {
                match task {
                    Task::Read(ppn, stored) => {
                        if let Some(buffer) = self.reads.want(ppn, stored) {
                            self.put_in_place(buffer);
                        }
                        self.reads.look_ahead(ppn);
                    }
                    Task::Came(ppn) => self.bring_neighbours(ppn),
                    Task::Damaged(ppn, what) => {
                        self.failed.insert(ppn, Instant::now() + RETRY);
                        self.vm.set_unreadable(ppn, what);
                    }
                    Task::Trouble(what) => self.vm.set_ill(what),
                }
            }
            let mut lost = Vec::new();
            self.reads.submit(&mut lost);
            self.take(lost);
            if self.tasks.is_empty() {
                return;
            }
        }
    }

    fn bring_neighbours(&mut self, ppn: Ppn) {
        let (serve, reads) = (&self.serve, &self.reads);
        let may = |ppn| may_come(serve, ppn);
        let kept = |ppn, stored| reads.kept(ppn, stored);
        match self.around.came(&self.vm.memory, ppn, may, kept) {
            Ok(brought) => self.reads.came_home(brought),
            // The VMM is exiting; its process handle tells the manager.
            Err(MemError::Gone) => {}
            Err(e) => self.vm.set_ill(format!("pages around {ppn}: {e}")),
        }
    }

    /// Brings home what keeps large pages from being made, if it is time.
    fn restore(&mut self) {
        if self.vm.no_large_again.load(std::sync::atomic::Ordering::Relaxed) {
            return self.restore.end();
        }
        if !self.serve.is_quiet() {
            return;
        }
        let (memory, reads) = (&self.vm.memory, &self.reads);
        let (regions, away) = (memory.regions().len(), |region| memory.away_in(region));
        let is_read = |pages: &[Ppn]| reads.are_read(pages);
        let (plentiful, now) = (memory.is_plentiful(), Instant::now());
        let (pages, ask) = self.restore.next(regions, plentiful, away, is_read, now);
        if pages.is_empty() {
            return;
        }
        if ask {
            pages.iter().for_each(|&ppn| self.reads.fetch(ppn));
        }
        let mut lost = Vec::new();
        self.reads.submit(&mut lost);
        self.take(lost);
        let (serve, reads) = (&self.serve, &self.reads);
        let may = |ppn| may_come(serve, ppn);
        let kept = |ppn, stored| reads.kept(ppn, stored);
        match self.around.bring(&self.vm.memory, &pages, may, kept) {
            Ok(brought) => {
                Counters::add(&self.vm.memory.counters.restored, brought);
                self.reads.release(&pages);
            }
            // The VMM is exiting; its process handle tells the manager.
            Err(MemError::Gone) => self.restore.give_up(),
            Err(e) => {
                self.restore.give_up();
                self.vm.set_ill(format!("pages that keep large ones from being made: {e}"));
            }
        }
    }

    /// Of what its VMM has it do for nothing.
    fn rest_from_vain(&self) {
        let told = self.vain.rest(Instant::now());
        if !told.is_zero() {
            let why = "pages that were given up stay, or faults are tried for nobody";
            self.vm.set_ill(format!("its faults wait for {told:.1?}: {why}"));
        }
        loop {
            let rest = self.vain.rest(Instant::now());
            if rest.is_zero() || self.vm.is_stopping() {
                return;
            }
            std::thread::sleep(rest.min(NAP));
        }
    }

    /// What the kernel refuses while something is being given up can be done as soon as whoever gives it up goes on; and where
    /// page after page is given up, not for long: the next is under way then.
    fn chase(&mut self) {
        let begun = Instant::now();
        let mut last = begun;
        while last - begun < CHASE && self.is_refused() && !self.has_events() {
            std::thread::yield_now();
            for (buffer, why) in std::mem::take(&mut self.unfilled) {
                match why {
                    Wait::Discard => self.put_in_place(buffer),
                    _ => self.unfilled.push((buffer, why)),
                }
            }
            self.with_serve(Serve::retry_refused);
            let now = Instant::now();
            if Spin::lost_core(now - last) {
                return;
            }
            last = now;
        }
    }

    fn is_refused(&self) -> bool {
        !self.serve.pending().refused().is_empty()
            || self.unfilled.iter().any(|u| u.1 == Wait::Discard)
    }

    /// From time to time: tells of a fault that waits for long, and meets again what was read and is in no book.
    fn look_for_overdue(&mut self, now: Instant) {
        if self.watch.is_time(now) {
            let before = now.checked_sub(overdue::LATE);
            let found = before.and_then(|before| self.serve.overdue(before));
            self.watch.looked(now, found.is_some());
            self.vm.set_overdue(found);
        }
        if self.watch.is_time_for_called_off(now) {
            self.let_go_of_called_off(now);
        }
        let is_quiet = self.serve.is_quiet() && self.failed.is_empty() && self.unfilled.is_empty();
        if !self.watch.is_time_for_strays(now) || !is_quiet || !self.crew.is_quiet() {
            return;
        }
        // All that was read is served, and all of those have been woken.
        let ram = self.vm.memory.backend();
        let read = || ram.uffd().waiters().map_or(0, |waiters| waiters.read);
        let before = read();
        self.outside = self.outside.min(before);
        if self.watch.are_to_be_met_again(now, before - self.outside) {
            if let Err(e) = ram.wake(Ppn(0), self.vm.memory.pmap().len().0) {
                return self.vm.set_ill_unless_gone("meeting faults again", e);
            }
            // Nobody has read any since.
            self.outside = read();
            let met = before.saturating_sub(self.outside);
            if met > 0 {
                self.vm.set_ill(format!("{met} faults were read and not served; met again"));
            }
        }
    }

    /// A thread that waits for memory may stop to: by a signal. What is kept for it would be tried for as long as memory is
    /// short, and a VMM can have that of all of its pages.
    fn let_go_of_called_off(&mut self, now: Instant) {
        let kept = self.serve.pending().faults() as u64;
        let uffd = self.vm.memory.backend().uffd();
        // Not to be told is to be taken for as many as are kept.
        let wait = || uffd.waiters().map_or(kept, |waiters| waiters.read);
        let beyond = if kept > Watch::FEW { kept.saturating_sub(wait()) } else { 0 };
        if self.watch.are_to_be_let_go(now, beyond)
            && let Err(e) = self.serve.meet_anew(&self.vm.memory)
        {
            self.vm.set_ill_unless_gone("meeting faults anew", e);
        }
    }

    fn reap(&mut self) {
        let mut arrivals = Vec::new();
        self.reads.reap(&mut arrivals);
        self.take(arrivals);
        self.work();
    }

    fn take(&mut self, arrivals: Vec<Arrival>) {
        for arrival in arrivals {
            match arrival {
                Arrival::Here(buffer) => self.put_in_place(buffer),
                Arrival::Lost(ppn, what) => {
                    // The page stays swapped and its fault unanswered: there is nothing true to answer
                    // it with. It is tried again later.
                    self.serve.arrived(&self.vm.memory, ppn, None, &mut self.tasks);
                    self.failed.insert(ppn, Instant::now() + RETRY);
                    self.vm.set_unreadable(ppn, what);
                }
            }
        }
    }

    fn put_in_place(&mut self, buffer: usize) {
        let Some((ppn, page)) = self.reads.arrived(buffer) else { return };
        match self.serve.arrived(&self.vm.memory, ppn, Some(page), &mut self.tasks) {
            Landed::Done => {
                self.reads.done(buffer);
                self.failed.remove(&ppn);
                self.vm.set_readable(ppn);
            }
            Landed::NotYet(why) => self.unfilled.push((buffer, why)),
        }
    }

    /// Reads what faults that wait for memory want from the swap space, for that takes as long again.
    fn read_meanwhile(&mut self) {
        if self.serve.pending().starved().is_none() {
            return;
        }
        // No more than there are buffers for, or they would make room for one another.
        for ppn in self.serve.pending().starving().into_iter().take(AHEAD) {
            self.reads.fetch(ppn);
        }
        let mut lost = Vec::new();
        self.reads.submit(&mut lost);
        self.take(lost);
    }

    fn note_waiting(&self) {
        let waiting = self.serve.pending().faults() as u64;
        self.vm.waiting.store(waiting, Ordering::Relaxed);
    }

    /// Everything that had to wait.
    fn retry(&mut self) {
        // Before it is tried: who frees memory afterwards wakes this thread.
        self.note_waiting();
        fence(Ordering::SeqCst);
        for (buffer, _) in std::mem::take(&mut self.unfilled) {
            self.put_in_place(buffer);
        }
        let now = Instant::now();
        // One that the guest gave up meanwhile needs no reading, and somebody may wait for it.
        let is_due = |ppn: Ppn, at: Instant| at <= now || !is_kept(&self.vm.memory, ppn);
        let due: Vec<Ppn> =
            self.failed.iter().filter(|f| is_due(*f.0, *f.1)).map(|f| *f.0).collect();
        self.failed.retain(|ppn, _| !due.contains(ppn));
        let before = self.serve.pending().faults();
        self.with_serve(|serve, memory, tasks| {
            serve.retry(memory, tasks);
            for &ppn in &due {
                // Who still waits for what need not be read any more says so again: it may be in the balloon.
                if is_kept(memory, ppn) || memory.backend().wake(ppn, 1).is_err() {
                    serve.fault(memory, ppn, Access::Missing, tasks);
                }
            }
        });
        let is_in_vain = before as u64 > Watch::FEW && self.serve.pending().faults() >= before;
        let tried = if is_in_vain { now.elapsed() } else { Duration::ZERO };
        let looked = self.serve.take_vain();
        if !(tried + looked).is_zero() {
            self.vain.note(Instant::now(), tried + looked);
        }
        self.read_meanwhile();
        self.vm.settle_unreadable(|ppn| is_kept(&self.vm.memory, ppn));
        self.note_waiting();
        let now = self.serve.pending().is_starved().then(Instant::now);
        if let Some(since) = std::mem::replace(&mut self.starved, now) {
            let starved = since.elapsed().as_nanos() as u64;
            Counters::add(&self.vm.memory.counters.starved_ns, starved);
        }
    }
}

/// Whether a page may come home unasked: not while it is being given up.
fn may_come(serve: &Serve, ppn: Ppn) -> bool {
    !serve.pending().discard_outstanding(ppn)
}

/// Whether the only copy of a page is where it must be read from.
fn is_kept<B: Backend>(memory: &Memory<B>, ppn: Ppn) -> bool {
    matches!(memory.pmap().load(ppn).state(), State::Swapped | State::Compressed)
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "fault_tests.rs"]
mod tests;
