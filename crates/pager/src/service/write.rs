//! From the stage to the swap space: clusters of pages, each written with as few writes as the free slots
//! allow. A page leaves the stage only when its write is complete. One that fails costs no page: the
//! slot is given up, and the page, whole in the stage, is written to another.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_units::{PAGE_SIZE, Ppn, SlotId};

use super::reclaim::Reclaim;
use crate::swap::{Completion, Location, Stored};

/// Pauses between two tries while nothing can be written: they double from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How far a page of a sealed cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It has no slot yet, or not any more.
    Waiting,
    Writing(Stored),
    /// Written, and not booked: it was busy.
    Written(Stored),
    /// Booked, or gone from the stage by itself.
    Settled,
}

/// Pages that lie together in the stage and go to the swap space together.
pub(super) struct Cluster {
    /// Its first stage slot.
    pub base: u64,
    /// In the order of their stage slots. A page that has left its slot since is still named.
    pub pages: Vec<Ppn>,
    /// By page, once it is sealed.
    fates: Vec<Fate>,
    /// Whether it is being written: no page is added any more.
    pub sealed: bool,
}

impl Cluster {
    /// Open, and empty.
    pub fn new(base: u64) -> Cluster {
        Cluster { base, pages: Vec::new(), fates: Vec::new(), sealed: false }
    }
    fn seal(&mut self) {
        self.sealed = true;
        self.fates = vec![Fate::Waiting; self.pages.len()];
    }
    fn open(&mut self) {
        self.sealed = false;
        self.pages.clear();
        self.fates.clear();
    }
    /// Where the next page goes, if it is open and not full.
    pub fn next_slot(&self) -> u64 {
        self.stage_slot(self.pages.len())
    }
    fn stage_slot(&self, i: usize) -> u64 {
        self.base + i as u64
    }
    fn is_done(&self) -> bool {
        self.sealed && self.fates.iter().all(|f| *f == Fate::Settled)
    }
    /// Pages that are yet to be given slots.
    fn waiting(&self) -> usize {
        if !self.sealed {
            return self.pages.len();
        }
        self.fates.iter().filter(|f| **f == Fate::Waiting).count()
    }
}

/// Nothing can be written for now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stuck {
    /// When to try again.
    next: Instant,
    pause: Duration,
}

/// A write that is under way.
struct UnderWay {
    tag: u64,
    to: Arc<Location>,
    /// The first.
    slot: SlotId,
    /// Where that had failed before.
    is_try: bool,
}

/// All of them. Those to locations that have failed hold up nothing else: a disk that fails may not answer either.
#[derive(Default)]
pub(super) struct Writes(Vec<UnderWay>);

impl Writes {
    fn ended(&mut self, tag: u64) -> Option<UnderWay> {
        let at = self.0.iter().position(|write| write.tag == tag)?;
        Some(self.0.swap_remove(at))
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        // Others may.
        self.0.iter().filter(|write| write.is_try).for_each(|write| write.to.was_not_tried());
    }
}

impl Reclaim {
    /// Whether writes are under way that are to come to an end soon.
    pub(super) fn awaits_writes(&self) -> bool {
        self.writes.0.iter().any(|write| !write.to.is_failed())
    }

    /// Pages in the stage that still need a slot each.
    pub(super) fn waiting_for_slots(&self) -> u64 {
        self.clusters.iter().map(Cluster::waiting).sum::<usize>() as u64
    }

    /// All that is in the stage is written when this returns, but for what is tried where locations have failed.
    pub(super) fn flush_all(&mut self) {
        self.flush();
        while self.awaits_writes() && !self.vm.is_stopping() {
            self.reap(true);
        }
    }

    /// Part-filled clusters go too, as soon as nothing is being written: a page in the stage is neither here nor there, and
    /// what comes meanwhile goes together. Nobody waits for the disk here: there may be more to do.
    pub(super) fn flush(&mut self) {
        self.reap(false);
        if self.awaits_writes() {
            return;
        }
        for cluster in 0..self.clusters.len() {
            let has_some =
                !self.clusters[cluster].sealed && !self.clusters[cluster].pages.is_empty();
            // While nothing can be written it stays open, for what needs no slot.
            if has_some && self.stuck.is_none() {
                self.write(cluster);
            }
        }
    }

    /// Seals a cluster and submits its pages.
    pub(super) fn write(&mut self, index: usize) {
        self.clusters[index].seal();
        if self.may_try() {
            self.submit_waiting(index);
        }
    }

    /// How long the thread may rest while nothing can be written.
    pub(super) fn stuck_for(&self) -> Option<Duration> {
        self.stuck.map(|stuck| stuck.next.saturating_duration_since(Instant::now()))
    }

    fn may_try(&self) -> bool {
        self.stuck.is_none_or(|stuck| stuck.next <= Instant::now())
    }

    fn set_stuck(&mut self) {
        let (least, most) = PAUSES;
        let pause = self.stuck.map_or(least, |stuck| (stuck.pause * 2).min(most));
        self.stuck = Some(Stuck { next: Instant::now() + pause, pause });
        self.vm.set_swap_stuck(true);
    }

    fn set_unstuck(&mut self) {
        if self.stuck.take().is_some() {
            self.vm.set_swap_stuck(false);
        }
    }

    /// Gives slots to pages that have none, and submits them together.
    fn submit_waiting(&mut self, index: usize) {
        self.settle_gone(index);
        // Before: who gives a write to the kernel may wait there.
        self.vm.set_writing(true, false);
        self.queue_waiting(index);
        self.ring.submit();
        self.vm.set_writing(self.awaits_writes(), false);
    }

    fn queue_waiting(&mut self, index: usize) {
        let mut first = 0;
        while let Some(n) = next_run(&self.clusters[index].fates, &mut first) {
            let Some((slot, n)) = self.vm.memory.take_slots(n) else {
                // Reserved at admission: only where locations have failed, or slots were retired.
                self.set_stuck();
                return;
            };
            let cluster = &mut self.clusters[index];
            for i in 0..n {
                let at = first + i as usize;
                // SAFETY: the slot is not written to before the cluster is open again, which it is not
                // while the page waits to be written.
                let page = unsafe { self.vm.memory.stage().page(cluster.stage_slot(at)) };
                cluster.fates[at] = Fate::Writing(Stored::new(SlotId(slot.0 + i), page));
            }
            if !self.queue(index, first, n as usize, slot) {
                return;
            }
            first += n as usize;
        }
    }

    /// What has gone home again needs no slot.
    fn settle_gone(&mut self, index: usize) {
        let cluster = &mut self.clusters[index];
        for i in 0..cluster.fates.len() {
            if cluster.fates[i] == Fate::Waiting
                && !self.vm.memory.is_staged(cluster.pages[i], cluster.stage_slot(i))
            {
                cluster.fates[i] = Fate::Settled;
            }
        }
    }

    /// Queues pages `first..first + n` of a cluster to neighbouring swap slots from `slot` on. False if
    /// the kernel does not take them: then they wait again.
    fn queue(&mut self, index: usize, first: usize, n: usize, slot: SlotId) -> bool {
        let tag = (index as u64) << 40 | (first as u64) << 20 | n as u64;
        let from = self.vm.memory.stage().slot_ptr(self.clusters[index].stage_slot(first));
        let at = self.vm.swap.find(slot);
        let to = at.map(|(_, _, to)| (to.clone(), to.is_failed()));
        let result = match at {
            // SAFETY: the stage outlives the ring (the VM's shared part, which owns it, is held by this
            // thread, and the ring waits for its writes on drop); the stage slots are not reused before
            // the cluster is settled, which the completion precedes.
            Some((file, within, _)) => unsafe {
                self.ring.write(file, from, (n * PAGE_SIZE) as u32, within.offset(), tag)
            },
            None => Err(std::io::Error::other(format!("no slot {}", slot.0))),
        };
        let Err(e) = result else {
            self.writes.0.extend(to.map(|(to, is_try)| UnderWay { tag, to, slot, is_try }));
            self.vm.memory.write_begins(slot);
            return true;
        };
        if let Some((to, true)) = to {
            to.was_not_tried();
        }
        self.vm.set_ill(format!("writing swap: {e}; its pages stay"));
        for i in first..first + n {
            if let Fate::Writing(stored) = self.clusters[index].fates[i] {
                self.vm.memory.free_slot(stored.slot);
                self.clusters[index].fates[i] = Fate::Waiting;
            }
        }
        self.set_stuck();
        false
    }

    pub(super) fn reap(&mut self, wait: bool) {
        let mut done = Vec::new();
        if let Err(e) = self.ring.reap(wait, &mut done) {
            self.vm.set_ill(format!("swap I/O: {e}"));
            std::thread::sleep(Duration::from_millis(10));
        }
        let any_ended = !done.is_empty();
        for Completion { tag, result } in done {
            if let Some(write) = self.writes.ended(tag) {
                self.vm.memory.write_ended(write.slot);
            }
            let (index, first, n) =
                ((tag >> 40) as usize, (tag >> 20 & 0xf_ffff) as usize, (tag & 0xf_ffff) as usize);
            self.written(index, first, n, result);
        }
        // What is written again.
        self.ring.submit();
        self.vm.set_writing(self.awaits_writes(), any_ended);
        self.settle_all();
    }

    fn written(&mut self, index: usize, first: usize, n: usize, result: Result<u32, i32>) {
        let vm = self.vm.clone();
        let Fate::Writing(stored) = self.clusters[index].fates[first] else { return };
        let Some((file, _, location)) = vm.swap.find(stored.slot) else { return };
        let what = match result {
            Ok(bytes) if bytes as usize == n * PAGE_SIZE => {
                location.wrote();
                self.set_unstuck();
                for fate in &mut self.clusters[index].fates[first..first + n] {
                    if let Fate::Writing(stored) = *fate {
                        *fate = Fate::Written(stored);
                    }
                }
                return;
            }
            Ok(bytes) => format!("{bytes} of {} bytes written", n * PAGE_SIZE),
            Err(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        };
        location.write_failed();
        vm.set_ill(format!("{}: {what}; its pages stay", file.path().display()));
        for i in first..first + n {
            let Fate::Writing(stored) = self.clusters[index].fates[i] else { continue };
            if n > 1 && !location.is_failed() {
                // Which of the slots it was shows when they are written one by one.
                self.queue(index, i, 1, stored.slot);
                continue;
            }
            if n > 1 || location.is_failed() {
                // It may not have been to blame.
                vm.memory.pass_slot(stored.slot);
            } else {
                vm.memory.retire_slot(stored.slot);
            }
            self.clusters[index].fates[i] = Fate::Waiting;
        }
    }

    /// Books what was busy, gives slots to what has none, and opens clusters that are done.
    pub(super) fn settle_all(&mut self) {
        if self.stuck.is_some() && self.may_try() {
            self.take_back();
        }
        for index in 0..self.clusters.len() {
            if !self.clusters[index].sealed {
                continue;
            }
            self.settle(index);
            if self.clusters[index].waiting() > 0 {
                if self.may_try() {
                    self.submit_waiting(index);
                } else {
                    self.settle_gone(index);
                }
            }
            if self.clusters[index].is_done() {
                self.clusters[index].open();
            }
        }
        if self.stuck.is_some() && self.waiting_in_sealed() == 0 {
            // What could not be written has gone home.
            self.set_unstuck();
        }
        if self.open_cluster().is_some() && self.vm.stage_full.swap(false, Ordering::Relaxed) {
            // What was in vain for that is not any more.
            self.vm.in_vain.store(false, Ordering::Relaxed);
        }
    }

    /// Pages of sealed clusters that have no slot, and where in the stage they are.
    pub(super) fn waiting_pages(&self) -> Vec<(Ppn, u64)> {
        let waiting = |c: &Cluster| {
            let waits = |&i: &usize| c.fates[i] == Fate::Waiting;
            (0..c.fates.len()).filter(waits).map(|i| (c.pages[i], c.stage_slot(i))).collect()
        };
        self.clusters.iter().filter(|c| c.sealed).flat_map::<Vec<_>, _>(waiting).collect()
    }

    fn waiting_in_sealed(&self) -> usize {
        self.clusters.iter().filter(|c| c.sealed).map(Cluster::waiting).sum()
    }

    /// Books the pages of complete writes, but for those busy at the moment.
    fn settle(&mut self, index: usize) {
        let cluster = &mut self.clusters[index];
        for i in 0..cluster.fates.len() {
            if let Fate::Written(stored) = cluster.fates[i]
                && self.vm.memory.written(cluster.pages[i], cluster.stage_slot(i), stored)
            {
                cluster.fates[i] = Fate::Settled;
            }
        }
    }
}

/// The next run of waiting pages from `first` on: how many; `first` becomes its first page.
fn next_run(fates: &[Fate], first: &mut usize) -> Option<u64> {
    let waits = |fate: &Fate| *fate == Fate::Waiting;
    *first += fates.get(*first..)?.iter().position(waits)?;
    Some(fates[*first..].iter().take_while(|f| waits(f)).count() as u64)
}
