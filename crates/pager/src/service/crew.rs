//! Threads that serve faults beside the fault thread of a VM whose processors fault at the same time.
//!
//! One thread reads the userfaultfd, books what the guest gave up, and keeps what has to wait: of that the order
//! matters. A fault that nothing is outstanding for can be served by anybody, for the busy bit of its page decides
//! who does. So the fault thread puts such faults on a board when there are several, or when one takes long (a
//! large page is zeroed) and others came meanwhile, and serves what nobody takes. What could not be
//! served at once goes back to it.
//!
//! Helpers begin when there is something for them, and end when there was nothing for a while: a guest whose faults
//! come one by one has none.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::serve::Met;
use super::shared::Shared;
use crate::memory::{Access, Counters, Fault};

/// How many threads serve the faults of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultThreads {
    /// So many at most; more than one only while several faults are there together.
    pub most: usize,
    /// Small faults are given away even where the host has no idle processor.
    pub eager: bool,
}

impl Default for FaultThreads {
    /// Four, or as many as the host has processors.
    fn default() -> FaultThreads {
        FaultThreads { most: processors().min(4), eager: false }
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A helper that has nothing to do looks so often whether its place is wanted elsewhere.
const NAP: Duration = Duration::from_millis(50);
/// It ends after so many of those all the same: 5 s.
const NAPS: u32 = 100;
/// Faults are given away for so long after several were there together.
const CROWDED: Duration = Duration::from_millis(100);
/// Helpers are woken for so many small faults on the board, if the host has a processor for them, or for one that takes
/// long: to wake one takes about as long as to serve a small one.
const WORTH: usize = 4;
/// A fault that no helper has taken so long after it was read is served by the fault thread.
pub(super) const LATE: Duration = Duration::from_micros(200);
/// Whoever took longer than that for one reading may have kept others waiting.
pub(super) const LONG: Duration = Duration::from_micros(50);

/// A fault that anybody may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub ppn: Ppn,
    pub access: Access,
    /// When it was read.
    pub read: Instant,
}

/// Those of all VMs' helpers: never more than there are processors.
static PLACES: Places = Places::new();

/// Places for helpers.
struct Places {
    taken: AtomicUsize,
    /// There was none for a helper that was to begin.
    wanted: AtomicBool,
}

impl Places {
    const fn new() -> Places {
        Places { taken: AtomicUsize::new(0), wanted: AtomicBool::new(false) }
    }

    /// Whether one more helper may begin, beside fewer than `most`; its place is taken then.
    fn take(&self, most: usize) -> bool {
        let more = |n: usize| (n < most).then_some(n + 1);
        let took = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        if !took {
            self.wanted.store(true, Ordering::Relaxed);
        }
        took
    }

    fn free(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a helper that has nothing to do is to make room: the first that asks since there was none.
    fn is_wanted(&self) -> bool {
        self.wanted.swap(false, Ordering::Relaxed)
    }
}

/// Of one helper, for as long as it lives.
struct Place;

impl Drop for Place {
    fn drop(&mut self) {
        PLACES.free();
    }
}

/// What is to be served, and what came of it.
#[derive(Default)]
struct Board {
    jobs: VecDeque<Job>,
    back: Vec<Met>,
    /// Helpers that wait for a job, and those of them that were woken for one.
    idle: usize,
    woken: usize,
    live: usize,
    /// Jobs that helpers have in hand.
    in_hand: usize,
    ended: bool,
}

impl Board {
    /// Wakes helpers for up to `most` jobs. Answers how many are to be woken.
    fn call(&mut self, most: usize) -> usize {
        let call = self.idle.min(self.jobs.len()).min(most).saturating_sub(self.woken);
        self.woken += call;
        call
    }

    /// For the fault thread: the first that nobody was woken for, or that who was woken has not come for in time.
    fn spare(&mut self, now: Instant) -> Option<Job> {
        let late = |job: &Job| now.saturating_duration_since(job.read) >= LATE;
        if self.jobs.front().is_some_and(late) {
            return self.jobs.pop_front();
        }
        self.jobs.remove(self.woken)
    }
}

#[derive(Default)]
struct Office {
    board: Mutex<Board>,
    work: Condvar,
}

impl Office {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a job. None: the helper is to end, which has one of these places.
    fn job(&self, places: &Places) -> Option<(Job, InHand<'_>)> {
        let mut board = self.board();
        let mut naps = 0;
        loop {
            if board.ended {
                return None;
            }
            if let Some(job) = board.jobs.pop_front() {
                board.in_hand += 1;
                return Some((job, InHand(self)));
            }
            if naps >= NAPS || (naps > 0 && places.is_wanted()) {
                board.live -= 1;
                return None;
            }
            board.idle += 1;
            let waited = self.work.wait_timeout_while(board, NAP, |b| !b.ended && b.woken == 0);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            board = guard;
            board.idle -= 1;
            board.woken = board.woken.saturating_sub(1);
            naps = if timeout.timed_out() { naps + 1 } else { 0 };
        }
    }
}

/// A job that a helper has taken, until it is done or the helper has panicked.
struct InHand<'a>(&'a Office);

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        self.0.board().in_hand -= 1;
    }
}

/// The helpers of one VM, as its fault thread has them.
pub(super) struct Crew {
    vm: Arc<Shared>,
    office: Arc<Office>,
    threads: Vec<JoinHandle<()>>,
    most: usize,
    has_begun: bool,
    crowded_until: Option<Instant>,
    eager: bool,
    idle: Idle,
}

/// Whether the host has had a processor lately that nobody used. Where all are in use, a helper takes one from a guest.
struct Idle {
    load: Option<File>,
    processors: f64,
    looked: Option<Instant>,
    /// Threads that ran or could have, on average; each look counts for a quarter.
    running: f64,
}

impl Idle {
    /// Between two looks.
    const APART: Duration = Duration::from_millis(100);

    fn new() -> Idle {
        let processors = processors() as f64;
        Idle { load: None, processors, looked: None, running: processors }
    }

    fn is_idle(&mut self, now: Instant) -> bool {
        if self.looked.is_none_or(|at| now.saturating_duration_since(at) >= Idle::APART) {
            self.looked = Some(now);
            let mut text = [0; 64];
            if self.load.is_none() {
                self.load = File::open("/proc/loadavg").ok();
            }
            let n = self.load.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
            let running = n.and_then(|n| runnable(&text[..n])).map_or(self.processors, f64::from);
            self.running += (running - self.running) / 4.0;
        }
        self.running < self.processors - 1.0
    }
}

/// Threads of the host that run or could: "0.42 1.53 1.85 RUNNABLE/ALL LAST".
fn runnable(loadavg: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(loadavg).ok()?;
    text.split_whitespace().nth(3)?.split_once('/')?.0.parse().ok()
}

impl Crew {
    /// None has begun.
    pub fn new(vm: Arc<Shared>, threads: FaultThreads) -> Crew {
        let (most, eager) = (threads.most.saturating_sub(1), threads.eager);
        Crew {
            vm,
            office: Arc::default(),
            threads: Vec::new(),
            most,
            has_begun: false,
            crowded_until: None,
            eager,
            idle: Idle::new(),
        }
    }

    /// Several faults were there together.
    pub fn crowded(&mut self, now: Instant) {
        self.crowded_until = Some(now + CROWDED);
    }
    /// Whether faults are to be put on the board.
    pub fn is_crowded(&self, now: Instant) -> bool {
        self.most > 0 && self.crowded_until.is_some_and(|until| now < until)
    }

    /// Puts faults on the board, of which the first `long` take long. What no helper takes is the caller's, by `spare`.
    pub fn give(&mut self, jobs: &[Job], long: usize) {
        let all = jobs.len() >= WORTH && (self.eager || self.idle.is_idle(Instant::now()));
        let worth = if all { jobs.len() } else { long };
        let mut board = self.office.board();
        board.jobs.extend(jobs);
        if worth == 0 {
            return;
        }
        let call = board.call(worth);
        let wanting = worth > board.woken && board.live < self.most && PLACES.take(processors());
        if wanting {
            // It takes a job without being called.
            board.live += 1;
        }
        drop(board);
        (0..call).for_each(|_| self.office.work.notify_one());
        if wanting {
            self.begin();
        }
    }

    fn begin(&mut self) {
        self.has_begun = true;
        self.threads.retain(|thread| !thread.is_finished());
        let (vm, office) = (self.vm.clone(), self.office.clone());
        // Its priority and where its memory comes from are those of the thread that begins it.
        let name = self.vm.thread_name("faults");
        let thread = std::thread::Builder::new().name(name).spawn(move || help(&vm, &office));
        match thread {
            Ok(thread) => self.threads.push(thread),
            Err(e) => {
                tracing::debug!(vm = %self.vm.name, "no thread to help with faults: {e}");
                self.office.board().live -= 1;
                PLACES.free();
                self.crowded_until = None;
            }
        }
    }

    /// A fault from the board that is not left to a helper.
    pub fn spare(&self) -> Option<Job> {
        self.office.board().spare(Instant::now())
    }

    /// Whether faults are on the board still, to be looked at before `LATE` is over.
    pub fn has_jobs(&self) -> bool {
        self.has_begun && !self.office.board().jobs.is_empty()
    }

    /// Whether every fault that was put on the board is served, or has been taken back.
    pub fn is_quiet(&self) -> bool {
        if !self.has_begun {
            return true;
        }
        let board = self.office.board();
        board.jobs.is_empty() && board.in_hand == 0 && board.back.is_empty()
    }

    /// What came of faults that helpers could not serve at once, or that brought pages back.
    pub fn take_back(&self) -> Vec<Met> {
        if !self.has_begun {
            return Vec::new();
        }
        std::mem::take(&mut self.office.board().back)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.office.board().ended = true;
        self.office.work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(vm = %self.vm.name, "a thread that helps with faults had panicked");
            }
        }
    }
}

/// Says so of a helper that panics: it may have had a fault that nobody serves now.
struct Lost<'a>(&'a Shared);

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lost_helper.store(true, Ordering::Relaxed);
        }
    }
}

/// Serves what is on the board.
fn help(vm: &Shared, office: &Office) {
    let _place = Place;
    let _lost = Lost(vm);
    while let Some((job, _in_hand)) = office.job(&PLACES) {
        let met = Met::serve(&vm.memory, job.ppn, job.access);
        let served = met.outcome == Fault::Served;
        if served {
            vm.fault_times.note(job.read.elapsed(), 1);
            Counters::add(&vm.memory.counters.helped, 1);
        }
        let is_back = !served || met.away;
        if is_back {
            office.board().back.push(met);
        }
        // The fault thread hands out what comes unasked, and may be asleep.
        if is_back || vm.memory.runs_ahead() {
            let _ = rustix::io::write(&vm.wake_fd, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::word::{Busy, Word};

    fn job(n: u64) -> Job {
        Job { ppn: Ppn(n), access: Access::Missing, read: Instant::now() }
    }

    #[test]
    fn a_host_is_idle_if_fewer_have_run_lately_than_could() {
        assert_eq!(runnable(b"0.42 1.53 1.85 3/412 99871\n"), Some(3));
        assert_eq!(runnable(b"0.42 1.53"), None);
        let mut idle = Idle::new();
        let now = Instant::now();
        (idle.processors, idle.running) = (1e6, 1e6);
        assert!(idle.is_idle(now));
        // It is not looked at again at once.
        let running = idle.running;
        assert!(idle.is_idle(now) && idle.running == running);
        idle.processors = 1.0;
        idle.is_idle(now + Idle::APART);
        assert!(idle.running < running, "{}", idle.running);
        // One that nobody uses is what is asked for, by what is known at the time.
        idle.looked = Some(now);
        for (running, is_idle) in [(2.9, true), (3.0, false), (3.1, false)] {
            (idle.processors, idle.running) = (4.0, running);
            assert_eq!(idle.is_idle(now), is_idle, "{running}");
        }
        (idle.processors, idle.running) = (1.0, 0.0);
        // This thread runs, at least.
        assert!(!idle.is_idle(now + 2 * Idle::APART));
    }

    #[test]
    fn there_are_places_for_so_many_helpers_and_no_more() {
        let places = Places::new();
        assert_eq!([(); 4].map(|()| places.take(3)), [true, true, true, false]);
        assert_eq!(places.taken.load(Ordering::Relaxed), 3);
        places.free();
        assert_eq!([(); 2].map(|()| places.take(3)), [true, false]);
    }

    #[test]
    fn a_helper_with_nothing_to_do_makes_room_for_one_that_found_none() {
        let (office, places) = (Office::default(), Places::new());
        office.board().live = 2;
        assert!(places.take(1) && !places.take(1));
        // Not before it has done what there is, nor before it has had nothing to do for a while.
        office.board().jobs.push_back(job(1));
        assert!(office.job(&places).is_some() && places.wanted.load(Ordering::Relaxed));
        let begun = Instant::now();
        assert!(office.job(&places).is_none());
        assert!(begun.elapsed() >= NAP && office.board().live == 1);
        assert!(!places.is_wanted(), "one for one");
        // Where none is wanted it stays for long.
        std::thread::scope(|scope| {
            let helper = scope.spawn(|| office.job(&places).map(|(job, _)| job.ppn));
            std::thread::sleep(4 * NAP);
            office.board().jobs.push_back(job(2));
            assert_eq!(helper.join().unwrap(), Some(Ppn(2)));
        });
    }

    #[test]
    fn what_nobody_was_woken_for_is_left_to_the_fault_thread() {
        let mut board = Board { idle: 2, ..Board::default() };
        board.jobs.extend((0..4).map(job));
        let now = Instant::now();
        assert_eq!(board.call(4), 2);
        let mut spare = |at| board.spare(at).map(|job| job.ppn.0);
        assert_eq!([spare(now), spare(now), spare(now)], [Some(2), Some(3), None]);
        // Both were woken already.
        assert_eq!(board.call(4), 0);
        board.idle = 3;
        board.jobs.push_back(job(4));
        assert_eq!((board.call(4), board.spare(now).is_none()), (1, true));
        // Nobody came for them.
        let late = Instant::now() + 2 * LATE;
        let mut spare = || board.spare(late).map(|job| job.ppn.0);
        assert_eq!([spare(), spare(), spare(), spare()], [Some(0), Some(1), Some(4), None]);
        let mut board = Board { idle: 3, ..Board::default() };
        board.jobs.extend((0..4).map(job));
        assert_eq!(board.call(1), 1, "one of them takes long");
    }

    #[test]
    fn what_a_helper_has_in_hand_is_not_done_before_it_is() {
        let Some(vm) = super::super::testing::vm(4, 1) else { return };
        let mut crew = Crew::new(vm, FaultThreads::default());
        assert!(crew.is_quiet());
        crew.has_begun = true;
        crew.office.board().jobs.push_back(job(1));
        assert!(!crew.is_quiet());
        let office = crew.office.clone();
        let taken = office.job(&PLACES).unwrap();
        assert!(!crew.has_jobs() && !crew.is_quiet());
        drop(taken);
        assert!(crew.is_quiet());
        // A helper that panics leaves nothing in hand.
        office.board().jobs.push_back(job(2));
        let panics = std::thread::spawn(move || {
            let _taken = office.job(&PLACES);
            panic!("of the test's own");
        });
        assert!(panics.join().is_err() && crew.is_quiet());
        let met = Met { ppn: Ppn(3), access: Access::Missing, away: true, outcome: Fault::Served };
        crew.office.board().back.push(met);
        assert!(!crew.is_quiet());
    }

    #[test]
    fn helpers_take_what_is_there_and_end_when_they_are_told_to() {
        let office = Arc::new(Office::default());
        let helper = {
            let office = office.clone();
            std::thread::spawn(move || {
                let next = || office.job(&PLACES).map(|(job, _)| job.ppn.0);
                std::iter::from_fn(next).collect::<Vec<_>>()
            })
        };
        for n in 0..100 {
            while office.board().idle == 0 {
                std::thread::yield_now();
            }
            let mut board = office.board();
            board.jobs.push_back(job(n));
            let call = board.call(usize::MAX);
            drop(board);
            (0..call).for_each(|_| office.work.notify_one());
            while !office.board().jobs.is_empty() {
                std::thread::yield_now();
            }
        }
        office.board().ended = true;
        office.work.notify_all();
        assert_eq!(helper.join().unwrap(), (0..100).collect::<Vec<_>>());
        let board = office.board();
        assert_eq!((board.idle, board.woken, board.in_hand), (0, 0, 0));
    }

    #[test]
    fn faults_are_given_away_for_a_while_after_several_were_there_together() {
        let Some(vm) = super::super::testing::vm(1, 1) else { return };
        let now = Instant::now();
        for (most, gives) in [(1, false), (2, true)] {
            let mut crew = Crew::new(vm.clone(), FaultThreads { most, eager: false });
            assert!(!crew.is_crowded(now));
            crew.crowded(now);
            let at = [Duration::ZERO, CROWDED - Duration::from_nanos(1), CROWDED];
            assert_eq!(at.map(|after| crew.is_crowded(now + after)), [gives, gives, false]);
        }
    }

    #[test]
    fn a_helper_wakes_the_fault_thread_for_what_comes_back_and_for_what_is_to_come_unasked() {
        let Some(vm) = super::super::testing::vm(64, 4) else { return };
        let office = Office::default();
        // How many come back, and whether the fault thread is woken.
        let help_with = |ppn| {
            assert!(PLACES.take(1));
            *office.board() = Board { jobs: [job(ppn)].into(), ..Board::default() };
            std::thread::scope(|scope| {
                scope.spawn(|| help(&vm, &office));
                while !office.board().jobs.is_empty() {
                    std::thread::yield_now();
                }
                office.board().ended = true;
                office.work.notify_all();
            });
            assert_eq!(PLACES.taken.load(Ordering::Relaxed), 0, "its place is free again");
            let woken = rustix::io::read(&vm.wake_fd, &mut [0u8; 8]).is_ok();
            (std::mem::take(&mut office.board().back).len(), woken)
        };
        // It brings three others, and is no row yet.
        assert_eq!(help_with(0), (0, false));
        assert_eq!(help_with(0), (0, false), "it is there");
        // Somebody has it.
        let busy = Word::UNTOUCHED.set_busy(Busy::Filling);
        vm.memory.pmap().exchange(Ppn(40), Word::UNTOUCHED, busy).unwrap();
        assert_eq!(help_with(40), (1, true));
        // It was away: so may its neighbours be.
        let base = vm.memory.backend().layout().at(Ppn(0)).addr.0;
        // SAFETY: inside the mapping, which stays; the page is there, and nobody else uses it.
        unsafe { (base as *mut u8).write_volatile(1) };
        assert!(vm.memory.evict_run(Ppn(0), 1, 0).unwrap()[0].slot.is_some());
        assert_eq!(help_with(0), (1, true));
        // What follows is served, and goes on where the first ended.
        assert_eq!(help_with(4), (0, true));
        assert!(vm.memory.runs_ahead());
        assert_eq!(vm.memory.counters.values().helped, 4);
        assert_eq!(vm.fault_times.counts().iter().sum::<u64>(), 4);
    }
}
