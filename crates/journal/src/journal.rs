//! The handle that the policy loop has, and the thread that writes.
//!
//! [`Journal::record`] never waits: it puts a reference to the decision into a bounded queue, or
//! counts a turn that was not recorded where the queue is full. All else - comparing, encoding,
//! compressing, writing - is the thread's. What fails there is shown in [`Health`] and stops nothing
//! but the journal, which tries again.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_policy::Decision;
use ballast_units::VmId;

use crate::outcome::UnderWay;
use crate::recorder::{Bound, Recorder, Told};
use crate::segment::Header;
use crate::store::{Folder, Store};
use crate::turn::Moment;

/// How a journal is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Made, mode 0700, when the first turn is written.
    pub folder: PathBuf,
    /// Bytes that all segments together may take, at least [`LEAST`].
    pub limit: u64,
}

/// The smallest limit: below it a segment of a large host would not fit.
pub const LEAST: u64 = 1 << 20;

/// Turns in the queue, and VMs in all turns in the queue: one turn of many VMs always fits.
const QUEUE: usize = 64;
const QUEUE_VMS: usize = 1 << 16;
/// Requests of readers in the queue, beside the turns: these never take a turn's place.
const QUEUE_FLUSHES: usize = 4;
/// Turns that repeat the one before are written after this time at the latest: what a manager that
/// is killed may lose.
const KEPT_BACK: Duration = Duration::from_secs(10);
/// After an error, for so long nothing is written.
const PAUSE: Duration = Duration::from_secs(10);

/// How the journal fares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Turns written, since the manager was started.
    pub written: u64,
    /// Turns that were not recorded: the queue was full, or the disk failed.
    pub lost: u64,
    /// Bytes on the disk, and files.
    pub bytes: u64,
    /// Files.
    pub segments: u64,
    /// What keeps it from writing now.
    pub trouble: Option<String>,
}

#[derive(Debug, Default)]
struct Shared {
    queued_turns: AtomicUsize,
    queued_vms: AtomicUsize,
    /// Since when there is a turn in the queue, and none has been taken from it.
    waits_since: Mutex<Option<Instant>>,
    refused: AtomicU64,
    health: Mutex<Health>,
    /// Of the turn written last: what is under way.
    under_way: Mutex<Vec<(Option<VmId>, UnderWay)>>,
    /// Requests to write what is kept back, and those that are done.
    flushes_asked: AtomicU64,
    flushes: AtomicU64,
}

/// Where the policy loop puts its turns.
#[derive(Debug)]
pub struct Journal {
    settings: Settings,
    shared: Arc<Shared>,
    queue: Mutex<Option<Queue>>,
}

#[derive(Debug)]
struct Queue {
    sender: SyncSender<Message>,
    /// VMs of the turn that was taken last. The thread forgets the names of others in time.
    named: HashSet<VmId>,
    thread: std::thread::JoinHandle<()>,
}

/// Of a request to write what is kept back.
enum Asked {
    /// By this number.
    As(u64),
    /// Enough others wait.
    Later,
    /// Nobody writes any more.
    Never,
}

/// So long after a turn was to be written and none was, the disk is said not to answer.
const SILENT: Duration = Duration::from_secs(10);

const ENDED: &str = "its thread has ended: nothing is written before ballastd is started anew";

enum Message {
    Turn(Told),
    /// Write what is kept back.
    Flush,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Journal {
    /// Starts the thread. The folder is not looked at before the first turn.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(settings: Settings, header: Header) -> std::io::Result<Journal> {
        let store = Folder::new(&settings.folder);
        Journal::start_on(store, settings, header)
    }

    /// The same, on any store.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start_on<S: Store + Send + 'static>(
        store: S,
        settings: Settings,
        header: Header,
    ) -> std::io::Result<Journal>
    where
        S::Segment: Send,
    {
        let shared = Arc::new(Shared::default());
        let (sender, receiver) = sync_channel(QUEUE + QUEUE_FLUSHES);
        let bound = Bound::of(settings.limit.max(LEAST));
        let recorder = Recorder::new(store, bound, header);
        let folder = settings.folder.clone();
        let writer = Writer { shared: shared.clone(), folder, recorder, not_before: None, lost: 0 };
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || writer.run(&receiver))?;
        let queue = Mutex::new(Some(Queue { sender, named: HashSet::new(), thread }));
        Ok(Journal { settings, shared, queue })
    }

    /// Where it is kept, and how much of it.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Records a turn, or counts it as lost; never waits. `name` gives the snapshot's VMs, by their
    /// places in it, their names.
    pub fn record(&self, moment: Moment, decision: Arc<Decision>, name: impl Fn(usize) -> String) {
        let mut queue = lock(&self.queue);
        let Some(queue) = queue.as_mut() else { return };
        let vms = decision.snapshot.vms.len();
        let shared = &self.shared;
        if queue.thread.is_finished() {
            shared.refused.fetch_add(1, Ordering::Relaxed);
            lock(&shared.health).trouble = Some(ENDED.into());
            return;
        }
        let queued = shared.queued_vms.load(Ordering::Relaxed);
        let turns = shared.queued_turns.load(Ordering::Relaxed);
        if turns >= QUEUE || (queued > 0 && queued + vms > QUEUE_VMS) {
            shared.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let ids = decision.snapshot.vms.iter().map(|vm| vm.demand.id);
        let new = ids.clone().enumerate().filter(|(_, id)| !queue.named.contains(id));
        let names: Vec<(VmId, String)> = new.map(|(i, id)| (id, name(i))).collect();
        if !names.is_empty() || queue.named.len() != vms {
            queue.named = ids.collect();
        }
        {
            let mut waits_since = lock(&shared.waits_since);
            waits_since.get_or_insert_with(Instant::now);
            shared.queued_turns.fetch_add(1, Ordering::Relaxed);
        }
        shared.queued_vms.fetch_add(vms, Ordering::Relaxed);
        // There is room, unless the thread ends just now.
        if queue.sender.try_send(Message::Turn(Told { moment, decision, names })).is_err() {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How it fares.
    pub fn health(&self) -> Health {
        let mut health = lock(&self.shared.health).clone();
        health.lost += self.shared.refused.load(Ordering::Relaxed);
        if health.trouble.is_none() && self.is_silent() {
            let folder = self.settings.folder.display();
            health.trouble = Some(format!("{folder}: the disk does not answer"));
        }
        health
    }

    /// Whether turns wait that are not taken.
    fn is_silent(&self) -> bool {
        lock(&self.shared.waits_since).is_some_and(|since| since.elapsed() >= SILENT)
    }

    /// What was asked of a VM and of the host, and had not come true by the turn that was taken in
    /// last; nothing where none has been taken in for long.
    pub fn under_way(&self, vm: VmId) -> Vec<UnderWay> {
        if self.is_silent() {
            return Vec::new();
        }
        let all = lock(&self.shared.under_way);
        all.iter().filter(|(id, _)| id.is_none_or(|id| id == vm)).map(|(_, aim)| *aim).collect()
    }

    /// Has all that was recorded so far written, for whoever reads the files now; waits for it
    /// `at_most` so long. Not for the policy loop.
    pub fn flush(&self, at_most: Duration) {
        let end = Instant::now() + at_most;
        let done = |goal: u64| self.shared.flushes.load(Ordering::Acquire) >= goal;
        let mut goal = None;
        while goal.is_none_or(|goal| !done(goal)) && Instant::now() < end {
            if goal.is_none() {
                match self.ask_to_flush() {
                    Asked::As(number) => goal = Some(number),
                    Asked::Later => {}
                    Asked::Never => return,
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn ask_to_flush(&self) -> Asked {
        // Held while it is numbered and sent: requests are done in the order of their numbers.
        let queue = lock(&self.queue);
        let Some(queue) = queue.as_ref() else { return Asked::Never };
        let asked = self.shared.flushes_asked.load(Ordering::Relaxed);
        if asked - self.shared.flushes.load(Ordering::Acquire) >= QUEUE_FLUSHES as u64 {
            return Asked::Later;
        }
        if queue.sender.try_send(Message::Flush).is_err() {
            return Asked::Never;
        }
        self.shared.flushes_asked.store(asked + 1, Ordering::Relaxed);
        Asked::As(asked + 1)
    }

    /// Writes what is queued and ends the thread. A disk that does not answer is waited for
    /// `at_most` so long, then left to itself.
    pub fn close(&self, at_most: Duration) {
        let Some(Queue { sender, thread, .. }) = lock(&self.queue).take() else { return };
        drop(sender);
        let end = Instant::now() + at_most;
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        if thread.is_finished() && thread.join().is_err() {
            tracing::error!("the journal's thread had panicked");
        }
    }
}

struct Writer<S: Store> {
    shared: Arc<Shared>,
    folder: PathBuf,
    recorder: Recorder<S>,
    not_before: Option<Instant>,
    lost: u64,
}

impl<S: Store> Writer<S> {
    fn run(mut self, receiver: &Receiver<Message>) {
        let mut kept_since: Option<Instant> = None;
        loop {
            let patience = match kept_since {
                Some(since) => KEPT_BACK.saturating_sub(since.elapsed()),
                None => Duration::from_secs(3600),
            };
            match receiver.recv_timeout(patience) {
                Ok(Message::Turn(told)) => {
                    self.take();
                    self.turn(&told);
                    let vms = told.decision.snapshot.vms.len();
                    self.shared.queued_vms.fetch_sub(vms, Ordering::Relaxed);
                }
                Ok(Message::Flush) => {
                    self.flush();
                    self.publish();
                    self.shared.flushes.fetch_add(1, Ordering::Release);
                }
                Err(RecvTimeoutError::Timeout) => self.flush(),
                Err(RecvTimeoutError::Disconnected) => {
                    self.flush();
                    return;
                }
            }
            let kept = self.recorder.kept_back();
            kept_since = (kept > 0).then(|| kept_since.unwrap_or_else(Instant::now));
            if kept_since.is_some_and(|since| since.elapsed() >= KEPT_BACK) {
                self.flush();
                kept_since = None;
            }
            self.publish();
        }
    }

    /// One of the queue.
    fn take(&self) {
        let mut waits_since = lock(&self.shared.waits_since);
        let left = self.shared.queued_turns.fetch_sub(1, Ordering::Relaxed) - 1;
        *waits_since = (left > 0).then(Instant::now);
    }

    fn turn(&mut self, told: &Told) {
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            self.lost += 1;
            self.recorder.overhear(told);
        } else {
            let had = self.at_hand() + 1;
            let done = self.recorder.record(told);
            // What was kept back may have been written before this turn failed, or have gone with it.
            self.lost += had.saturating_sub(self.at_hand());
            self.settle(done);
        }
        let mut under_way = lock(&self.shared.under_way);
        *under_way = self.recorder.tracker().open_at(told.moment);
    }

    fn flush(&mut self) {
        if self.recorder.kept_back() == 0 {
            return;
        }
        let had = self.at_hand();
        let done = self.recorder.flush();
        self.lost += had.saturating_sub(self.at_hand());
        self.settle(done);
    }

    /// Turns that are written or kept back: of those that were taken in, the others are lost.
    fn at_hand(&self) -> u64 {
        self.recorder.written() + self.recorder.kept_back() as u64
    }

    fn settle(&mut self, done: std::io::Result<()>) {
        let mut health = lock(&self.shared.health);
        match done {
            Ok(()) => {
                if self.not_before.take().is_some() {
                    tracing::info!("the journal is written again; {} turns were lost", self.lost);
                    health.trouble = None;
                }
            }
            Err(e) => {
                let e = format!("{}: {e}", self.folder.display());
                if self.not_before.is_none() {
                    tracing::error!("the journal stops: {e}; tried again every {PAUSE:?}");
                }
                self.not_before = Some(Instant::now() + PAUSE);
                health.trouble = Some(e);
            }
        }
    }

    fn publish(&self) {
        let mut health = lock(&self.shared.health);
        health.lost = self.lost;
        health.written = self.recorder.written();
        health.bytes = self.recorder.bytes();
        health.segments = self.recorder.segments() as u64;
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
