//! Reads from the swap space: pages that faults wait for, and some of their neighbours, which are kept
//! for a while in case they are wanted next. A page that is read ahead does not come home before it
//! faults, so a wrong guess costs a read and no memory but its buffer's; unless it is known from what came
//! before that the guest is on its way there (`around`).
//!
//! Nothing is handed on that does not fit its checksum.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_units::{PAGE_SIZE, Pages, Ppn};

use super::shared::Shared;
use crate::backend::PageBuf;
use crate::mapped_file::Mapping;
use crate::memory::Counters;
use crate::swap::{Completion, Ring, Stored, Window};
use crate::word::State;

/// Pages being read for faults at one time.
const WANTED: usize = 64;
/// Pages being read ahead, and kept.
pub(super) const AHEAD: usize = 2 * Window::MOST;
/// How long until what could not be read ahead is tried again, and of how many pages that is known.
const NOT_AGAIN: Duration = Duration::from_secs(2);
const UNREAD: usize = 1024;

/// How often a read is tried at once before it has failed.
const ATTEMPTS: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Read {
    ppn: Ppn,
    stored: Stored,
    attempts: u32,
    /// No fault waits for it.
    ahead: bool,
    /// Whatever comes, it is not the page any more.
    stale: bool,
    /// When the kernel was given it.
    begun: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
enum Buffer {
    Free,
    Reading(Read),
    /// Read ahead, with its place in the order of arrival.
    Kept(Read, u64),
    /// What a fault waits for; to be put in place.
    Here(Read),
}

impl Buffer {
    fn read(&self) -> Option<&Read> {
        match self {
            Buffer::Free => None,
            Buffer::Reading(read) | Buffer::Kept(read, _) | Buffer::Here(read) => Some(read),
        }
    }
}

/// What became of a page that a fault waits for.
#[derive(Debug)]
pub(super) enum Arrival {
    /// It is in this buffer until `done`.
    Here(usize),
    /// It could not be had, and why.
    Lost(Ppn, String),
}

pub(super) struct Reads {
    vm: Arc<Shared>,
    // Before the memory: it waits for its operations on drop.
    ring: Ring,
    memory: Mapping,
    /// The first `WANTED` are for faults, the others for what is read ahead.
    buffers: [Buffer; WANTED + AHEAD],
    wanted: VecDeque<Read>,
    ahead: VecDeque<Ppn>,
    /// Pages that could not be read ahead, and until when they are left alone.
    unread: BTreeMap<Ppn, Instant>,
    window: Window,
    arrivals: u64,
}

impl Reads {
    /// Memory of the buffers.
    pub const PAGES: Pages = Pages((WANTED + AHEAD) as u64);

    /// # Errors
    /// No memory for the buffers.
    pub fn new(vm: Arc<Shared>) -> std::io::Result<Reads> {
        Ok(Reads {
            ring: vm.swap.ring((WANTED + AHEAD) as u32),
            vm,
            memory: Mapping::anonymous((WANTED + AHEAD) * PAGE_SIZE)?,
            buffers: [Buffer::Free; WANTED + AHEAD],
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            unread: BTreeMap::new(),
            window: Window::default(),
            arrivals: 0,
        })
    }

    /// Readable when a read is complete; None while nothing is read, or where that is not told.
    pub fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.poll_fd().filter(|_| self.ring.in_flight() > 0)
    }
    /// Whether reads wait for the kernel to take them: it is to be asked again soon.
    pub fn is_behind(&mut self) -> bool {
        self.ring.is_behind()
    }

    /// A fault waits for a page. It is in the buffer of the answer if it was read ahead; otherwise it is
    /// going to be read.
    pub fn want(&mut self, ppn: Ppn, stored: Stored) -> Option<usize> {
        let found = self.guess(ppn);
        match found.map(|i| (i, self.buffers[i])) {
            Some((i, Buffer::Kept(read, _))) if read.stored == stored => {
                self.hit();
                self.buffers[i] = Buffer::Here(read);
                return Some(i);
            }
            Some((i, Buffer::Reading(read))) if read.stored == stored => {
                self.hit();
                self.buffers[i] = Buffer::Reading(Read { ahead: false, ..read });
                return None;
            }
            _ => {}
        }
        // What was read ahead is of a former life of the page.
        self.forget(ppn, 1);
        self.wanted.push_back(Read {
            ppn,
            stored,
            attempts: 0,
            ahead: false,
            stale: false,
            begun: None,
        });
        None
    }

    fn hit(&mut self) {
        self.window.used();
        Counters::add(&self.vm.memory.counters.read_ahead_hits, 1);
    }

    /// The buffer of a page that is read ahead, or was.
    fn guess(&self, ppn: Ppn) -> Option<usize> {
        let ours = |b: &Buffer| match b {
            Buffer::Kept(read, _) => read.ppn == ppn,
            Buffer::Reading(read) => read.ppn == ppn && read.ahead && !read.stale,
            _ => false,
        };
        (WANTED..WANTED + AHEAD).find(|&i| ours(&self.buffers[i]))
    }

    /// The page at `ppn` was wanted: its neighbours may be next.
    pub fn look_ahead(&mut self, ppn: Ppn) {
        if self.ring.is_blocking() {
            return;
        }
        let end = self.vm.memory.pmap().len().0;
        let n = u64::from(self.window.wanted());
        for next in (ppn.0 + 1..end.min(ppn.0 + 1 + n)).map(Ppn) {
            if self.ahead.len() < AHEAD && self.may_guess(next).is_some() {
                self.ahead.push_back(next);
            }
        }
    }

    /// Where a page is that is worth being read ahead. One without a checksum is not: it could not be
    /// told later from what is written there next.
    fn may_guess(&self, ppn: Ppn) -> Option<Stored> {
        let word = self.vm.memory.pmap().load(ppn);
        let rests =
            word.state() == State::Swapped && word.is_idle() && !word.stored().sum.is_none();
        let left_alone = || self.unread.get(&ppn).is_some_and(|until| Instant::now() < *until);
        (rests && self.guess(ppn).is_none() && !left_alone()).then(|| word.stored())
    }

    /// What was read ahead of a page that is stored there, and is here by now.
    pub fn kept(&self, ppn: Ppn, stored: Stored) -> Option<&PageBuf> {
        let i = self.guess(ppn)?;
        match self.buffers[i] {
            Buffer::Kept(read, _) if read.stored == stored => Some(self.page(i)),
            _ => None,
        }
    }

    /// These pages were to come home from what was read ahead of them. Reads on behind those that did.
    pub fn came_home(&mut self, pages: &[Ppn]) {
        let mut last = None;
        for &ppn in pages {
            let home = self.vm.memory.pmap().load(ppn).state() == State::Resident;
            if let Some(i) = self.guess(ppn).filter(|_| home)
                && matches!(self.buffers[i], Buffer::Kept(..))
            {
                // The guest is taken to be on its way there.
                self.hit();
                self.buffers[i] = Buffer::Free;
                last = last.max(Some(ppn));
            }
        }
        if let Some(last) = last {
            self.look_ahead(last);
        }
    }

    /// Reads a page that nobody waits for, to be kept. Pages that are being read, or are kept, are not read again.
    pub fn fetch(&mut self, ppn: Ppn) {
        // What is kept may be of a former life of the page.
        let word = self.vm.memory.pmap().load(ppn);
        if let Some(i) = self.guess(ppn)
            && let Buffer::Kept(read, _) = self.buffers[i]
            && (word.state() != State::Swapped || word.stored() != read.stored)
        {
            self.forget(ppn, 1);
        }
        let asked = self.ahead.contains(&ppn);
        if !self.ring.is_blocking()
            && !asked
            && self.ahead.len() < AHEAD
            && self.may_guess(ppn).is_some()
        {
            self.ahead.push_back(ppn);
        }
    }

    /// Whether any of these that nobody waits for is being read, or waits for that.
    pub fn are_read(&self, pages: &[Ppn]) -> bool {
        let reading = |b: &Buffer| match b {
            Buffer::Reading(read) => read.ahead && !read.stale && pages.contains(&read.ppn),
            _ => false,
        };
        self.buffers[WANTED..].iter().any(reading) || self.ahead.iter().any(|p| pages.contains(p))
    }

    /// These pages are home, or not needed: what was read of them is not kept, right or wrong.
    pub fn release(&mut self, pages: &[Ppn]) {
        for buffer in &mut self.buffers[WANTED..] {
            if let Buffer::Kept(read, _) = buffer
                && pages.contains(&read.ppn)
                && self.vm.memory.pmap().load(read.ppn).state() == State::Resident
            {
                *buffer = Buffer::Free;
            }
        }
    }

    /// Pages that the guest gave up: what was read ahead of them is void.
    pub fn forget(&mut self, first: Ppn, n: u64) {
        let range = first.0..first.0.saturating_add(n);
        for buffer in &mut self.buffers[WANTED..] {
            match buffer {
                Buffer::Kept(read, _) if range.contains(&read.ppn.0) => {
                    *buffer = Buffer::Free;
                    self.window.wasted();
                }
                Buffer::Reading(read) if read.ahead && range.contains(&read.ppn.0) => {
                    read.stale = true;
                }
                _ => {}
            }
        }
    }

    /// Begins as many reads as there are buffers for, those that are waited for first.
    pub fn submit(&mut self, arrivals: &mut Vec<Arrival>) {
        while !self.ring.is_full()
            && let Some(free) = self.buffers[..WANTED].iter().position(|b| b.read().is_none())
            && let Some(read) = self.wanted.pop_front()
        {
            if let Err(e) = self.begin(free, read) {
                arrivals.push(Arrival::Lost(read.ppn, e.to_string()));
            }
        }
        while self.wanted.is_empty()
            && !self.ring.is_full()
            && let Some(ppn) = self.ahead.pop_front()
        {
            let Some(stored) = self.may_guess(ppn) else { continue };
            let Some(free) = self.room_ahead() else { break };
            let read = Read { ppn, stored, attempts: 0, ahead: true, stale: false, begun: None };
            if self.begin(free, read).is_ok() {
                Counters::add(&self.vm.memory.counters.read_ahead, 1);
            }
        }
        self.ring.submit();
    }

    /// A free buffer to read ahead into, the oldest of the kept if need be.
    fn room_ahead(&mut self) -> Option<usize> {
        let age = |i: &usize| match self.buffers[*i] {
            Buffer::Free => Some(0),
            Buffer::Kept(_, arrived) => Some(arrived),
            _ => None,
        };
        let found = (WANTED..WANTED + AHEAD).filter(|i| age(i).is_some()).min_by_key(age)?;
        if self.buffers[found].read().is_some() {
            self.window.wasted();
            self.buffers[found] = Buffer::Free;
        }
        Some(found)
    }

    fn begin(&mut self, buffer: usize, read: Read) -> std::io::Result<()> {
        let Some((file, within, _)) = self.vm.swap.find(read.stored.slot) else {
            return Err(std::io::Error::other(format!("no slot {}", read.stored.slot.0)));
        };
        // SAFETY: the buffer lies in a mapping that self owns and that outlives the ring's operations
        // (the ring waits for them on drop, and is declared first); `buffers[buffer]` keeps it from
        // other use until the completion is reaped.
        unsafe {
            let into = self.memory.as_ptr().add(buffer * PAGE_SIZE);
            self.ring.read(file, into, PAGE_SIZE as u32, within.offset(), buffer as u64)?;
        }
        self.buffers[buffer] = Buffer::Reading(Read { begun: Some(Instant::now()), ..read });
        Ok(())
    }

    /// Takes note of complete reads.
    pub fn reap(&mut self, arrivals: &mut Vec<Arrival>) {
        if self.ring.in_flight() == 0 {
            return;
        }
        let mut done = Vec::new();
        if let Err(e) = self.ring.reap(false, &mut done) {
            self.vm.set_ill(format!("swap I/O: {e}"));
        }
        for Completion { tag, result } in done {
            let i = tag as usize;
            let Some(Buffer::Reading(read)) = self.buffers.get(i).copied() else { continue };
            if let Some(begun) = read.begun {
                let counters = &self.vm.memory.counters;
                Counters::add(&counters.disk_reads, 1);
                Counters::add(&counters.disk_read_ns, begun.elapsed().as_nanos() as u64);
            }
            match self.verify(i, read, result) {
                _ if read.stale => {
                    self.window.wasted();
                    self.buffers[i] = Buffer::Free;
                }
                Ok(()) if read.ahead => {
                    self.arrivals += 1;
                    self.buffers[i] = Buffer::Kept(read, self.arrivals);
                }
                Ok(()) => {
                    self.buffers[i] = Buffer::Here(read);
                    arrivals.push(Arrival::Here(i));
                }
                Err(what) => self.failed(i, read, what, arrivals),
            }
        }
        // Those that are tried again.
        self.ring.submit();
    }

    fn verify(&self, buffer: usize, read: Read, result: Result<u32, i32>) -> Result<(), String> {
        match result {
            Err(errno) => {
                Err(format!("cannot be read: {}", std::io::Error::from_raw_os_error(errno)))
            }
            Ok(n) if n as usize != PAGE_SIZE => Err(format!("ends after {n} bytes")),
            Ok(_) if !read.stored.sum.fits(self.page(buffer)) => {
                Err("does not hold what was written there".to_owned())
            }
            Ok(_) => Ok(()),
        }
    }

    fn failed(&mut self, i: usize, read: Read, what: String, arrivals: &mut Vec<Arrival>) {
        let vm = self.vm.clone();
        let place = vm.swap.find(read.stored.slot);
        self.buffers[i] = Buffer::Free;
        if read.ahead {
            self.window.wasted();
            // The page may have left, and its slot hold another.
            let word = vm.memory.pmap().load(read.ppn);
            if word.state() != State::Swapped || word.stored() != read.stored {
                return;
            }
        }
        if let Some((_, _, location)) = place {
            location.read_failed();
        }
        if read.ahead {
            // Who waits for memory, or for a large page, asks for it over and over.
            let now = Instant::now();
            self.unread.retain(|_, until| *until > now);
            if self.unread.len() < UNREAD {
                self.unread.insert(read.ppn, now + NOT_AGAIN);
            }
            return;
        }
        let again = Read { attempts: read.attempts + 1, ..read };
        if again.attempts < ATTEMPTS && self.begin(i, again).is_ok() {
            return;
        }
        let at = place.map_or("its slot".to_owned(), |(file, within, _)| {
            format!("slot {} of {}", within.0, file.path().display())
        });
        arrivals.push(Arrival::Lost(read.ppn, format!("{at} {what}")));
    }

    /// Whose page is in a buffer, and its bytes.
    pub fn arrived(&self, buffer: usize) -> Option<(Ppn, &PageBuf)> {
        match self.buffers[buffer] {
            Buffer::Here(read) => Some((read.ppn, self.page(buffer))),
            _ => None,
        }
    }

    fn page(&self, buffer: usize) -> &PageBuf {
        // SAFETY: called while no read into the buffer is under way, and `buffers[buffer]` keeps it from
        // other use while the borrow of self lives.
        let bytes = unsafe { self.memory.slice(buffer * PAGE_SIZE, PAGE_SIZE) };
        // SAFETY: the slice is PAGE_SIZE long, and PageBuf has alignment 1.
        unsafe { &*bytes.as_ptr().cast::<PageBuf>() }
    }

    /// The page is in place, or not needed.
    pub fn done(&mut self, buffer: usize) {
        self.buffers[buffer] = Buffer::Free;
    }
}
