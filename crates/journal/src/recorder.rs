//! From turns to segments, within a bound. No threads and no clock: [`Told`] has all moments.
//!
//! Invariants, checked by [`Recorder::check`]:
//! - what is stored never exceeds the limit, segments of newer versions apart;
//! - a segment that is being written has seen every byte of its stream, in order: after an error it
//!   is cut where it was last whole, and given up.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use ballast_policy::Decision;
use ballast_units::VmId;

use crate::outcome::{Outcome, Tracker};
use crate::segment::{Encoder, Header, MOST_REPEATS};
use crate::store::{Append, Store};
use crate::turn::{Head, Moment, Names, encode};

/// A turn as the policy loop tells it.
#[derive(Clone, Debug)]
pub struct Told {
    /// Which turn, and when.
    pub moment: Moment,
    /// What was decided, and from what.
    pub decision: Arc<Decision>,
    /// Of VMs that were not named before.
    pub names: Vec<(VmId, String)>,
}

/// Sizes, in bytes, that follow from the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// All segments together.
    pub limit: u64,
    /// One segment, when it is closed; more where a single turn is large.
    pub segment: u64,
    /// One segment, decompressed: what is read to find a turn.
    pub raw: u64,
}

impl Bound {
    /// A thirty-second of the limit per segment: little goes when the oldest goes, and little is read
    /// to find a turn.
    pub fn of(limit: u64) -> Bound {
        Bound { limit, segment: (limit / 32).clamp(32 << 10, 4 << 20), raw: 512 << 20 }
    }

    /// How large a segment becomes whose first turn, whole, took `first` bytes: with many VMs, the
    /// turns that only say what changed are to be the larger part.
    fn segment_after(&self, first: u64) -> u64 {
        self.segment.max((8 * first).min(self.limit / 4))
    }
}

/// Writes turns.
pub struct Recorder<S: Store> {
    store: S,
    bound: Bound,
    header: Header,
    names: Names,
    tracker: Tracker,
    open: Option<Open<S::Segment>>,
    /// Closed segments, oldest first: number and bytes.
    closed: VecDeque<(u64, u64)>,
    /// `None` until the store was listed.
    next_number: Option<u64>,
    /// The encoded decision of the turn before, if the open segment has it.
    before: Vec<u8>,
    repeats: Vec<Moment>,
    /// Turns that are on the disk.
    written: u64,
}

struct Open<F> {
    file: F,
    number: u64,
    /// Bytes that are whole.
    bytes: u64,
    /// Bytes of its first turn.
    first: u64,
    encoder: Encoder,
}

impl<F> Open<F> {
    /// Whether the next turn begins another.
    fn is_full(&self, bound: &Bound) -> bool {
        self.bytes >= bound.segment_after(self.first) || self.encoder.raw_total() >= bound.raw
    }
}

impl<S: Store> Recorder<S> {
    /// The store is not looked at before the first turn.
    pub fn new(store: S, bound: Bound, header: Header) -> Recorder<S> {
        Recorder {
            store,
            bound,
            header,
            names: Names::new(),
            tracker: Tracker::default(),
            open: None,
            closed: VecDeque::new(),
            next_number: None,
            before: Vec::new(),
            repeats: Vec::new(),
            written: 0,
        }
    }

    /// Takes in a turn. One that repeats the turn before in all but its moment is kept back until
    /// [`flush`](Self::flush), a turn that is different, or 600 of them.
    ///
    /// # Errors
    /// The disk's: this turn and those kept back are lost, those before are not.
    pub fn record(&mut self, told: &Told) -> io::Result<()> {
        let outcomes = self.observe(told);
        let decision = encode(&*told.decision).map_err(io::Error::other)?;
        if self.open.is_some() && outcomes.is_empty() && decision == self.before {
            self.repeats.push(told.moment);
            return if self.repeats.len() < MOST_REPEATS { Ok(()) } else { self.flush() };
        }
        self.flush()?;
        let full = |open: &Open<S::Segment>| {
            open.is_full(&self.bound) || !open.encoder.fits(decision.len())
        };
        let fresh = if self.open.as_ref().is_none_or(full) {
            self.close();
            self.begin(told.moment, decision.len())?;
            true
        } else {
            false
        };
        let known = |id: VmId| Some((id, self.names.get(&id)?.clone()));
        let names = if fresh {
            let here = told.decision.snapshot.vms.iter().map(|vm| vm.demand.id);
            let ended = outcomes.iter().filter_map(|o| o.vm);
            let mut ids: Vec<VmId> = here.chain(ended).collect();
            ids.sort_unstable();
            ids.dedup();
            ids.into_iter().filter_map(known).collect()
        } else {
            told.names.clone()
        };
        let head = Head { moment: told.moment, names, outcomes };
        let frame = match &mut self.open {
            Some(open) => open.encoder.turn(&head, &decision),
            None => return Ok(()),
        };
        // A stream that failed within a frame cannot go on.
        let frame = frame.inspect_err(|_| self.give_up())?;
        self.append(&frame)?;
        if let Some(open) = self.open.as_mut().filter(|_| fresh) {
            open.first = frame.len() as u64;
        }
        self.written += 1;
        self.before = decision;
        Ok(())
    }

    /// Takes in a turn that is not to be written: its names are wanted later, and what it asked.
    pub fn overhear(&mut self, told: &Told) {
        self.observe(told);
    }

    /// What came of earlier turns. However long nothing can be written, the names that are kept are not many more than VMs are
    /// there: VMs that came and went are forgotten, but for what is told of now.
    fn observe(&mut self, told: &Told) -> Vec<Outcome> {
        let outcomes = self.tracker.observe(told.moment, &told.decision);
        if self.names.len() > 2 * told.decision.snapshot.vms.len() + 1024 {
            let of_outcomes = outcomes.iter().filter_map(|o| o.vm);
            self.forget(&told.decision, of_outcomes);
        }
        self.names.extend(told.names.iter().cloned());
        outcomes
    }

    /// Writes what was kept back.
    ///
    /// # Errors
    /// The disk's: what was kept back is lost.
    pub fn flush(&mut self) -> io::Result<()> {
        let repeats = std::mem::take(&mut self.repeats);
        let Some(open) = self.open.as_mut().filter(|_| !repeats.is_empty()) else { return Ok(()) };
        let frame = open.encoder.again(&repeats).inspect_err(|_| self.give_up())?;
        self.append(&frame)?;
        self.written += repeats.len() as u64;
        // Where nothing changes nothing else is written, and one segment would come to be all that there is.
        if self.open.as_ref().is_some_and(|open| open.is_full(&self.bound)) {
            self.close();
        }
        Ok(())
    }

    /// Turns that are kept back.
    pub fn kept_back(&self) -> usize {
        self.repeats.len()
    }

    /// Turns written since it was made.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Bytes of all segments, those of newer versions apart.
    pub fn bytes(&self) -> u64 {
        let closed: u64 = self.closed.iter().map(|(_, bytes)| bytes).sum();
        closed + self.open.as_ref().map_or(0, |open| open.bytes)
    }

    /// Files, that which is being written included.
    pub fn segments(&self) -> usize {
        self.closed.len() + usize::from(self.open.is_some())
    }

    /// What is under way; see [`Tracker`].
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// The invariants; for tests.
    pub fn check(&self) {
        assert!(self.bytes() <= self.bound.limit, "{} of {}", self.bytes(), self.bound.limit);
        let numbers: Vec<u64> = self.closed.iter().map(|(number, _)| *number).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
        assert!(self.repeats.is_empty() || self.open.is_some());
    }

    fn begin(&mut self, moment: Moment, expected: usize) -> io::Result<()> {
        let header = Header { begun_ms: moment.at_ms, ..self.header.clone() };
        let (encoder, bytes) = Encoder::new(header, expected)?;
        let mut number = match self.next_number {
            Some(number) => number,
            None => {
                let all = self.store.list()?;
                let ours = all.iter().filter(|s| !s.newer);
                self.closed = ours.map(|s| (s.number, s.bytes)).collect();
                all.last().map_or(1, |last| last.number + 1)
            }
        };
        let file = loop {
            self.next_number = Some(number + 1);
            match self.store.create(number) {
                Ok(file) => break file,
                // Another manager that is just leaving.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(e),
            }
        };
        self.open = Some(Open { file, number, bytes: 0, first: 0, encoder });
        self.append(&bytes)
    }

    /// Appends to the open segment, making room first.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let more = bytes.len() as u64;
        let header = self.open.as_ref().map_or(0, |open| open.bytes);
        if header + more > self.bound.limit {
            self.give_up();
            return Err(too_large(more));
        }
        while self.bytes() + more > self.bound.limit {
            let Some((oldest, _)) = self.closed.front().copied() else {
                self.give_up();
                return Err(too_large(more));
            };
            if let Err(e) = self.store.remove(oldest) {
                self.give_up();
                return Err(e);
            }
            self.closed.pop_front();
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        match open.file.append(bytes) {
            Ok(()) => {
                open.bytes += more;
                Ok(())
            }
            Err(e) => {
                self.give_up();
                Err(e)
            }
        }
    }

    /// The open segment is what it is; the next turn begins another.
    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.closed.push_back((open.number, open.bytes));
        }
        self.before.clear();
    }

    /// The open segment is not to be written any more: it is cut where it was whole, or removed if
    /// no turn is in it. On a full disk each try would else leave a file.
    fn give_up(&mut self) {
        self.repeats.clear();
        self.before.clear();
        let Some(mut open) = self.open.take() else { return };
        // A reader stops at what is not whole: where cutting fails too, nothing worse comes of it.
        let _ = open.file.cut(open.bytes);
        if open.first == 0 {
            let _ = self.store.remove(open.number);
        } else {
            self.closed.push_back((open.number, open.bytes));
        }
    }

    /// Names of VMs that are not there any more.
    fn forget(&mut self, decision: &Decision, but: impl Iterator<Item = VmId>) {
        let here: std::collections::HashSet<VmId> =
            decision.snapshot.vms.iter().map(|vm| vm.demand.id).chain(but).collect();
        self.names.retain(|id, _| here.contains(id));
    }
}

fn too_large(bytes: u64) -> io::Error {
    let what = format!("a record of {bytes} bytes does not fit the journal's limit");
    io::Error::new(io::ErrorKind::FileTooLarge, what)
}

#[cfg(test)]
#[path = "recorder_tests.rs"]
mod tests;
