//! The share thread of one VM: it looks for equal pages, brings broken ones home, and maps zeros
//! where the guest reads what it never wrote. All of it goes through the VM's shim, so a VMM that
//! hangs holds up this thread and no other VM's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_uffd::procmap::max_map_count;
use ballast_units::{Pages, Ppn};

use super::mapping_count::MappingCount;
use super::shared::Shared;
use super::vm::DomainChange;
use crate::backend::{Backend, MemError};
use crate::memory::MOVING;
use crate::sharing::control::{Control, Settings};
use crate::sharing::examine::{BATCH, Examined, Examiner, Marking};
use crate::sharing::limit::{Cost, Limiter};
use crate::sharing::marks::{Marks, Seen};
use crate::sharing::order::{EXTENT, Walk};
use crate::sharing::passes::Passes;
use crate::word::State;

/// Extents looked through for pages worth reading before the thread looks at other things.
const EXTENTS: usize = 256;
/// Of these, so many are looked at together: what matches in them goes to the shim in few batches, each of which costs two
/// changes of thread.
const TOGETHER: usize = 8;
/// One at a time for so long after a guest has read what it never wrote.
const READS_GO_ON: Duration = Duration::from_secs(1);
/// Pages whose protection is lifted in one turn.
const LIFTED: u64 = 1 << 14;
/// Zeros are mapped so far ahead of the first read, and twice as far each time reads go on there.
const ZEROS_AHEAD: u64 = 16;
/// How long a VM that is not to be looked at is let alone. Whoever wants something of it earlier signals.
const IDLE: Duration = Duration::from_secs(2);
/// The same of one whose passes have become seldom, for it does little.
const CALM: Duration = Duration::from_secs(5);
/// What is seldom.
const SELDOM: Duration = Duration::from_secs(60);
/// How long nothing more is mapped in a VMM that had no descriptor left for it.
const NO_FILES: Duration = Duration::from_secs(10);
/// For so long the mappings are changed at once to bring pages home; then that is paid for.
const HOMING: Duration = Duration::from_millis(20);
/// The longest rest of a pass that is under way.
const BETWEEN: Duration = Duration::from_millis(500);

pub(super) struct ShareService {
    pub(super) vm: Arc<Shared>,
    control: Arc<Control>,
    limiter: Limiter,
    pub(super) examiner: Examiner,
    walk: Walk,
    order: crate::sharing::order::Order,
    begun: Instant,
    marks: Marks,
    /// The last turn's.
    marked: Marking,
    /// From where on pages are still protected that are no longer to be.
    lifting: Option<Ppn>,
    /// Pages that were not read because they were not written.
    passed: u64,
    passes: Passes,
    pass: Pass,
    zeros: Zeros,
    mappings: MappingCount,
    /// When its VMM had no descriptor left for a file to map.
    no_files: Option<Instant>,
    rehome_at: Instant,
    /// Hashing what a former manager had shared.
    unhashed: bool,
    /// Other VMs may know of its pages.
    known: bool,
}

/// One pass over the VM.
struct Pass {
    began: Instant,
    done: Examined,
    /// What it took of the processor so far.
    cpu: Duration,
    over: bool,
    /// Pages that had come to the guest when it began.
    came: u64,
    /// How long after the one before it began.
    after: Duration,
}

/// Reads of untouched pages that follow one another.
struct Zeros {
    next: Ppn,
    ahead: u64,
    /// When there were some last.
    at: Option<Instant>,
}

impl Zeros {
    /// How many extents are looked at together: whoever reads what it never wrote waits for the end of that.
    fn together(&self) -> usize {
        let go_on = self.at.is_some_and(|at| at.elapsed() < READS_GO_ON);
        if go_on { 1 } else { TOGETHER }
    }
}

impl Pass {
    fn begin(came: u64, after: Duration) -> Pass {
        Pass {
            began: Instant::now(),
            done: Examined::default(),
            cpu: Duration::ZERO,
            over: false,
            came,
            after,
        }
    }
}

impl ShareService {
    /// `seed` is of the order in which pages are looked at.
    pub fn new(vm: Arc<Shared>, control: Arc<Control>, seed: u64) -> ShareService {
        let order = control.settings().order;
        let len = vm.memory.pmap().len();
        ShareService {
            control,
            limiter: Limiter::default(),
            examiner: Examiner::default(),
            walk: Walk::new(len, order, seed),
            order,
            begun: Instant::now(),
            marks: Marks::default(),
            marked: Marking::None,
            lifting: None,
            passed: 0,
            passes: Passes::default(),
            pass: Pass::begin(0, Duration::ZERO),
            zeros: Zeros { next: Ppn(0), ahead: ZEROS_AHEAD, at: None },
            mappings: MappingCount::of(len, max_map_count().ok()),
            no_files: None,
            rehome_at: Instant::now(),
            unhashed: true,
            known: false,
            vm,
        }
    }

    /// Until the VM is stopped.
    pub fn run(mut self) {
        while !self.vm.is_stopping() {
            let begun = thread_cpu();
            let rest = match self.turn() {
                Ok(rest) => rest,
                // Of the way to the shim, or of the process: whoever watches that one stops this thread. Until
                // then pages are settled and its guest's reads answered.
                Err(MemError::Gone) => IDLE,
                // A discard is being read: its pages are looked at later.
                Err(MemError::Again) => Duration::from_millis(1),
                Err(e) => {
                    self.vm.set_ill(format!("sharing pages: {e}"));
                    Duration::from_secs(1)
                }
            };
            let spent = thread_cpu().saturating_sub(begun);
            self.control.spent(spent);
            let total = &self.vm.memory.counters.share_cpu_ns;
            total.fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
            self.vm.wait_for_share_work(rest);
        }
    }

    fn turn(&mut self) -> Result<Duration, MemError> {
        if self.vm.memory.is_parked() && self.vm.memory.settle_parked()? > 0 {
            // Whatever else is asked for would not be answered either.
            let what = match self.vm.memory.backend().can_remap() {
                true => "QEMU does not answer",
                false => "its shim broke the conversation off, and has not come again",
            };
            self.vm.set_share_note(Some(what.into()));
            return Ok(Duration::from_millis(100));
        }
        self.map_zeros()?;
        self.be_forgotten();
        let settings = self.control.settings();
        if self.vm.is_to_change_domain() {
            return self.leave_store();
        }
        // More than one turn's worth was done.
        let owed = self.limiter.owed();
        if !owed.is_zero() {
            return Ok(owed.min(BETWEEN));
        }
        let rest = self.rehome(&settings)?;
        // What looks of all VMs together have taken, whichever of them did.
        let rest = rest.max(self.control.owed());
        if rest.is_zero() { self.scan(&settings) } else { Ok(rest.min(BETWEEN)) }
    }

    /// What this thread has taken so far: CPU time, and time in which the VM's mappings were being changed.
    fn meter(&self) -> (Duration, Duration) {
        let locked = self.vm.memory.counters.remap_ns.load(Ordering::Relaxed);
        (thread_cpu(), Duration::from_nanos(locked))
    }

    /// Pays for what was done since the meter read so, and for pages that were read. Answers how long to rest.
    fn pay(&self, settings: &Settings, since: (Duration, Duration), pages: u64) -> Duration {
        let now = self.meter();
        let cost = Cost { pages, cpu: now.0 - since.0, locked: now.1 - since.1 };
        // How long this VM's mappings were locked, or its VMM did not answer, is no other VM's to wait for.
        let of_host = Cost { locked: Duration::ZERO, ..cost };
        self.limiter.pay(settings.vm, cost).max(self.control.pay(settings.host, of_host))
    }

    fn map_zeros(&mut self) -> Result<(), MemError> {
        for ppn in self.vm.memory.take_reads_of_untouched() {
            let ahead = if ppn == self.zeros.next { self.zeros.ahead * 2 } else { ZEROS_AHEAD };
            let mapped = self.vm.memory.map_zeros(ppn, ahead)?;
            let next = Ppn(ppn.0 + mapped);
            self.zeros = Zeros { next, ahead: ahead.min(1 << 20), at: Some(Instant::now()) };
        }
        Ok(())
    }

    /// Where pages may not move, or enter the store, nobody needs to find them.
    fn be_forgotten(&mut self) {
        let memory = &self.vm.memory;
        if memory.may_move() && !memory.is_leaving() {
            self.known = true;
        } else if std::mem::take(&mut self.known)
            && let Some(member) = memory.membership()
        {
            member.domain.forget(member.base, memory.pmap().len());
        }
    }

    /// Brings pages home that the guest has written to, some at a time. Answers how long to rest for that.
    fn rehome(&mut self, settings: &Settings) -> Result<Duration, MemError> {
        if !self.vm.memory.may_move()
            || self.rehome_at.elapsed() < settings.rehome_after
            || self.vm.memory.broken_waiting() == 0
        {
            return Ok(Duration::ZERO);
        }
        let began = self.meter();
        let mut stuck = Vec::new();
        let mut is_over = true;
        let result = loop {
            if self.meter().1 - began.1 >= HOMING {
                is_over = false;
                break Ok(());
            }
            if self.vm.memory.has_reads_of_untouched() || self.vm.is_stopping() {
                break Ok(());
            }
            let some = match self.vm.memory.may_go_home(MOVING.0) {
                true => self.vm.memory.take_broken(MOVING.0 as usize),
                // Where a page broke it may stay; its VMM needs what mappings are left.
                false => Vec::new(),
            };
            if some.is_empty() {
                break Ok(());
            }
            let home = self.vm.memory.go_home(&some);
            let word = |p: &Ppn| self.vm.memory.pmap().load(*p).state();
            stuck.extend(some.into_iter().filter(|p| word(p) == State::Broken));
            match home {
                // Nothing moves at the moment: no room, or a discard that is being read.
                Ok(0) => break Ok(()),
                Ok(_) => {}
                Err(e) => break Err(e),
            }
        };
        self.vm.memory.give_back_broken(stuck);
        if is_over {
            self.rehome_at = Instant::now();
        }
        let rest = self.pay(settings, began, 0);
        result.map(|()| rest)
    }

    /// Everything goes home, as fast as there is memory for it. Nothing is passed over any more: where it goes, nobody
    /// knows of it yet.
    fn leave_store(&mut self) -> Result<Duration, MemError> {
        self.mark(Marking::Off)?;
        let memory = &self.vm.memory;
        let what = match memory.may_move() {
            true => "its pages leave the store: its salt was changed",
            false => {
                "its salt was changed: its pages leave the store, but those that its guest wrote to \
                 stay until it may be paged"
            }
        };
        self.vm.set_share_note(Some(what.into()));
        let state = |p: Ppn| memory.pmap().load(p).state();
        let away = |p: &Ppn| match state(*p) {
            State::Shared => true,
            State::Broken => memory.may_move(),
            _ => false,
        };
        let pages: Vec<Ppn> =
            memory.pmap().known().filter(away).take(64 * MOVING.0 as usize).collect();
        for some in pages.chunks(MOVING.0 as usize) {
            if memory.go_home(some)? == 0 || self.vm.is_stopping() {
                return Ok(IDLE);
            }
        }
        if !pages.is_empty() || self.lifting.is_some() {
            return Ok(Duration::from_millis(1));
        }
        self.change_domain();
        Ok(if self.vm.is_to_change_domain() { IDLE } else { Duration::ZERO })
    }

    /// Nothing of it is in the store, or nothing that may leave it.
    fn change_domain(&mut self) {
        let Some(DomainChange { to, switch }) = self.vm.take_domain_change() else { return };
        let mut switch = Some(switch);
        let mappings = self.vm.memory.backend().mappings();
        let switch_once = || switch.take().is_some_and(|switch| switch(mappings));
        let changed = self.vm.memory.change_domain(&to, switch_once);
        match (changed, switch) {
            (Ok(true), _) => {
                self.vm.moved.store(true, Ordering::Relaxed);
                self.vm.has_changed_domain();
                self.vm.set_share_note(None);
            }
            (Ok(false), Some(switch)) => {
                self.vm.give_back_domain_change(DomainChange { to, switch })
            }
            // It could not be booked; whoever wants it asks again.
            (Ok(false), None) => {}
            (Err(e), _) => {
                self.vm.has_changed_domain();
                self.vm.set_ill(format!("changing its salt: {e}"));
            }
        }
    }

    /// Looks at some pages. Answers how long to rest.
    fn scan(&mut self, settings: &Settings) -> Result<Duration, MemError> {
        let memory = &self.vm.memory.clone();
        let room_for_mappings = self.room_for_mappings();
        if !settings.enabled || !self.vm.is_to_share() {
            self.vm.set_share_note((!settings.enabled).then(|| "switched off".into()));
            self.mark(Marking::Off)?;
            let rest = if self.lifting.is_some() { BETWEEN } else { IDLE };
            return Ok(rest.min(settings.rehome_after));
        }
        let Some(member) = memory.membership() else { return Ok(IDLE) };
        if !memory.backend().can_remap() {
            let why = "no way to its shim, or an older one, or the run folder is not on a tmpfs";
            self.vm.set_share_note(Some(why.into()));
            return Ok(IDLE);
        }
        if !memory.backend().sees_copies() {
            let why = "ballastd has no CAP_SYS_ADMIN: it could not tell copies from shared pages";
            self.vm.set_share_note(Some(why.into()));
            return Ok(IDLE);
        }
        if memory.backend().may_leave_holes() {
            let why = "vm.overcommit_memory is 2, where Linux before 6.12 may unmap what it cannot map anew";
            self.vm.set_share_note(Some(why.into()));
            return Ok(IDLE);
        }
        if settings.order != self.order {
            self.order = settings.order;
            self.walk = Walk::new(memory.pmap().len(), self.order, self.pass.came | 1);
        }
        if !room_for_mappings {
            return Ok(IDLE);
        }
        if let Some(rest) = self.rest_before_pass(settings) {
            return Ok(rest);
        }
        let began = self.meter();
        if self.unhashed {
            self.unhashed = member.domain.hash_some(BATCH) > 0;
        }
        let marking = self.marking(settings)?;
        let done = self.look_at_extents(marking)?;
        self.pass.done += done;
        self.passed += done.passed;
        self.pass.cpu += thread_cpu().saturating_sub(began.0);
        if self.pass.over {
            let Pass { cpu, after, .. } = self.pass;
            self.passes.ended(&self.pass.done, cpu, after, settings.scan_time);
            memory.counters.passes.fetch_add(1, Ordering::Relaxed);
            let (vm, done, cpu) = (&self.vm.name, &self.pass.done, self.pass.cpu);
            tracing::debug!(%vm, ?done, ?cpu, ?marking, "a pass for equal pages");
        }
        Ok(self.pay(settings, began, done.scanned).min(BETWEEN))
    }

    /// When a pass is over, the next begins after a rest: what is left of it; None once a pass has begun.
    fn rest_before_pass(&mut self, settings: &Settings) -> Option<Duration> {
        if !self.pass.over {
            return None;
        }
        let came = self.came();
        let since = came.saturating_sub(self.pass.came);
        let (pages, plentiful) = (self.vm.memory.pmap().len().0, self.vm.memory.is_plentiful());
        let wait = self.passes.interval(since, pages, settings.scan_time, plentiful);
        if plentiful && self.vm.memory.regions().whole() > Pages(0) {
            self.passes.leave();
        }
        let after = self.pass.began.elapsed();
        let left = wait.saturating_sub(after);
        if !left.is_zero() {
            return Some(left.min(if wait < SELDOM { IDLE } else { CALM }));
        }
        self.pass = Pass::begin(came, after);
        None
    }

    /// The next extents of the pass, up to one turn's pages.
    fn look_at_extents(&mut self, marking: Marking) -> Result<Examined, MemError> {
        let memory = &self.vm.memory.clone();
        let mut done = Examined::default();
        let together = self.zeros.together();
        let mut extents = Vec::with_capacity(together);
        for n in 1..=EXTENTS {
            let first = self.walk.next_extent();
            self.pass.over = first.is_none();
            if let Some(first) = first
                && !self.passes_over_large(first, &mut done)?
            {
                extents.push(first);
            }
            // Large pages that were weighed count as well.
            let last = self.pass.over
                || n == EXTENTS
                || done.scanned >= BATCH as u64
                || memory.has_reads_of_untouched();
            if last || extents.len() == together {
                done += self.look_at(&mut extents, marking)?;
            }
            if last || done.scanned >= BATCH as u64 {
                break;
            }
        }
        Ok(done)
    }

    /// Extents in any order, of which none is left.
    fn look_at(&mut self, extents: &mut Vec<Ppn>, marking: Marking) -> Result<Examined, MemError> {
        let memory = &self.vm.memory.clone();
        let len = memory.pmap().len().0;
        extents.sort_unstable();
        let pages: Vec<Ppn> = extents
            .drain(..)
            .flat_map(|first| (first.0..(first.0 + EXTENT).min(len)).map(Ppn))
            .collect();
        self.examiner.examine(memory, &pages, marking)
    }

    /// Which pages this turn protects.
    fn marking(&mut self, settings: &Settings) -> Result<Marking, MemError> {
        let counted = self.vm.memory.counters.values();
        let seen =
            Seen { passes: counted.passes, passed: self.passed, faults: counted.unwritten_faults };
        let marking = self.marks.step(self.begun.elapsed(), &seen, settings.marking());
        self.mark(marking)?;
        Ok(marking)
    }

    /// Where none is to be protected any more, those that are cease to be, some at each turn: each would cost its guest a
    /// fault yet. To the last, also if some are to be again by then: what others knew of them may have been forgotten.
    fn mark(&mut self, marking: Marking) -> Result<(), MemError> {
        if marking != self.marked {
            self.marked = marking;
            if marking == Marking::Off {
                self.lifting = Some(Ppn(0));
            }
        }
        if let Some(from) = self.lifting {
            self.lifting = self.vm.memory.lift_unwritten(from, LIFTED)?;
        }
        Ok(())
    }

    /// Pages that came to the guest so far: at a write to one that it has, nothing does.
    fn came(&self) -> u64 {
        let counted = self.vm.memory.counters.values();
        counted.faults.saturating_sub(counted.unwritten_faults) + counted.unasked
    }

    /// Whether the VMM has mappings to spare.
    fn room_for_mappings(&mut self) -> bool {
        let changes = self.vm.memory.counters.values().remaps;
        let begun = Instant::now();
        if self.mappings.is_due(changes, begun) {
            let counted = self.vm.memory.backend().mappings().count();
            self.mappings.note(counted, changes, begun, Instant::now());
        }
        let room = self.mappings.has_room(changes);
        if self.vm.memory.take_no_files() {
            self.no_files = Some(begun);
        }
        let no_files = self.no_files.is_some_and(|at| at.elapsed() < NO_FILES);
        // Also for those that share its pages past this thread.
        let until = if no_files { 0 } else { self.mappings.until() };
        self.vm.memory.allow_remaps(until, self.mappings.homes_until());
        let estimate = self.mappings.estimate(changes);
        self.vm.set_share_note(match (no_files, room) {
            (true, _) => {
                Some("QEMU has no descriptor left: more needs a higher RLIMIT_NOFILE".into())
            }
            (false, true) => None,
            (false, false) => {
                Some(format!("{estimate} mappings: more needs {}", self.mappings.more_needs()))
            }
        });
        self.vm.mappings.store(self.mappings.counted(), Ordering::Relaxed);
        room && !no_files
    }
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "shuttle"))]
    #[test]
    fn broken_pages_that_cannot_go_home_now_are_taken_another_time() {
        use crate::word::{NO_STORE_PAGE, Word};

        let Some(vm) = crate::service::testing::vm(16, 1) else { return };
        let memory = vm.memory.clone();
        let broken = Word::with_slot(State::Broken, NO_STORE_PAGE);
        memory.pmap().store(Ppn(0), broken);
        memory.give_back_broken([Ppn(0)]);
        let settings = Settings { rehome_after: Duration::ZERO, ..Settings::default() };
        let control = Arc::new(Control::new(settings));
        let mut service = ShareService::new(vm, control, 1);
        assert!(memory.may_move() && memory.may_go_home(MOVING.0));
        service.rehome(&settings).unwrap();
        assert_eq!(memory.take_broken(9), [Ppn(0)], "it has no shim");
    }

    #[test]
    fn extents_are_looked_at_one_by_one_while_a_guest_reads_what_it_never_wrote() {
        let zeros = |at| Zeros { next: Ppn(0), ahead: ZEROS_AHEAD, at };
        assert_eq!(zeros(None).together(), TOGETHER);
        assert_eq!(zeros(Some(Instant::now())).together(), 1);
        let before = Instant::now().checked_sub(READS_GO_ON);
        assert_eq!(before.map(|at| zeros(Some(at)).together()), Some(TOGETHER));
    }
}
