//! What the threads of a VM share: what is asked of them, what they have to say, and how they wake one another.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
// `WaitMutex`: of what is waited for by a `Condvar`, of which `crate::sync` has none.
use std::sync::{Arc, Condvar, Mutex as WaitMutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::latency::FaultTimes;
use super::overdue::Overdue;
use super::slotless::Stubborn;
use super::vm::DomainChange;
use crate::backend::MemError;
use crate::guest_ram::GuestRam;
use crate::memory::Memory;
use crate::sharing::control::Control;
use crate::swap::SwapSpace;
use crate::sync::{Mutex, lock};

/// Whether a VM's pager does its work.
#[allow(missing_docs, reason = "told with the variant")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// No trouble since this manager has the VM, or none but pages that can be read again by now.
    Well,
    /// The last trouble, how long ago that was, and how many there were since this manager has the VM. No page is
    /// lost; pages may be waiting.
    Ill { last: String, ago: Duration, times: u32 },
    /// One of the threads that serve it has ended, which none does by itself: its guest may stand still until another
    /// manager has it.
    Unserved,
    /// A fault waits for long, for anything but memory: its page, how many pages have such a fault, what it waits for, and
    /// since when.
    Overdue { page: Ppn, pages: usize, waits_for: &'static str, waited: Duration },
    /// Pages that the guest waits for cannot be read, or are not what was written: the first of them, how
    /// many there are, and what is wrong with it. They are tried again until they can be.
    Unreadable { page: Ppn, pages: usize, what: String },
}

/// A sample of active memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Samples that have begun so far, this one included.
    pub begun: u64,
    /// Pages in it.
    pub pages: u32,
    /// What `CounterValues::touched` was when it began: what is above belongs to it.
    pub base: u64,
}

/// What the threads of a VM share.
pub(super) struct Shared {
    /// For logs, and the threads' names.
    pub name: String,
    pub memory: Arc<Memory<GuestRam>>,
    /// Its swap files.
    pub swap: SwapSpace,
    /// An eventfd, not blocking: wakes the fault thread.
    pub wake_fd: OwnedFd,
    /// Pages that eviction has yet to deliver.
    pub evict_goal: AtomicU64,
    /// Pages that eviction leaves: of what is charged, or, with `AT_HOME`, of that without frames of the tier.
    pub evict_leave: AtomicU64,
    /// Pages at which the VM is held, counted in the same way, and the free memory of the host up to which it is; 0: it is not.
    pub hold_at: AtomicU64,
    #[allow(missing_docs, reason = "told with the field before")]
    pub hold_until: AtomicU64,
    /// Nothing could leave since it was last said where the VM is held: until that is said again nothing is tried.
    pub in_vain: AtomicBool,
    /// Faults waiting now.
    pub waiting: AtomicU64,
    /// See `PagedVm::fault_times`.
    pub fault_times: FaultTimes,
    /// The kernel makes no large pages of small ones.
    pub no_large_again: AtomicBool,
    /// The stage is full of pages that cannot be written: nothing can leave.
    pub stage_full: AtomicBool,
    /// No compressor could be made.
    pub no_compressor: AtomicBool,
    /// A thread that helped with faults has panicked.
    pub lost_helper: AtomicBool,
    stop: AtomicBool,
    ill: Mutex<Option<(String, Instant)>>,
    ill_times: AtomicU32,
    overdue: Mutex<Option<Overdue>>,
    /// Pages that are waited for and cannot be read, and why.
    unreadable: Mutex<BTreeMap<Ppn, String>>,
    has_unreadable: AtomicBool,
    /// Nothing can be written to the swap space for now.
    swap_stuck: AtomicBool,
    /// Since when none of the writes that are under way came to its end: milliseconds after `begun`, and one more. 0: none is.
    writing_since: AtomicU64,
    begun: Instant,
    /// See `slotless`.
    pub stubborn: Stubborn,
    work: WaitMutex<Work>,
    work_ready: Condvar,
    sample_size: AtomicU32,
    sample_base: AtomicU64,
    samples_begun: AtomicU64,
    /// See `is_to_share`.
    may_share: AtomicBool,
    /// What the operator says of sharing; none where nothing looks for equal pages.
    control: OnceLock<Arc<Control>>,
    /// Where it is to go, when its pages have left the store of the domain that it is in.
    pub domain_change: Mutex<Option<DomainChange>>,
    /// It has moved to another domain, and nobody has asked since.
    pub moved: AtomicBool,
    /// Mappings of the VMM, when they were last counted.
    pub mappings: AtomicU64,
    share_note: Mutex<Option<String>>,
    share_work: WaitMutex<bool>,
    share_ready: Condvar,
}

/// By how much a VM that is held down may grow before pages leave: two clusters; and how many leave then.
pub(super) const HELD_TOGETHER: u64 = 64;
/// With a limit: frames of the tier do not count against it.
pub(super) const AT_HOME: u64 = 1 << 63;
/// Pages that a VM which exchanges is held below its target: it has what it wants at once for what leaves behind it.
pub(super) const EXCHANGED: u64 = 16;

#[derive(Default)]
struct Work {
    ready: bool,
    sample: Option<Vec<Ppn>>,
}

impl Shared {
    /// Nothing is asked of it yet.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn new(
        name: &str,
        memory: Arc<Memory<GuestRam>>,
        swap: SwapSpace,
    ) -> std::io::Result<Shared> {
        use rustix::event::{EventfdFlags, eventfd};
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Shared {
            name: name.to_owned(),
            memory,
            swap,
            wake_fd,
            evict_goal: AtomicU64::new(0),
            evict_leave: AtomicU64::new(0),
            hold_at: AtomicU64::new(0),
            hold_until: AtomicU64::new(0),
            in_vain: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            fault_times: FaultTimes::default(),
            no_large_again: AtomicBool::new(false),
            stage_full: AtomicBool::new(false),
            no_compressor: AtomicBool::new(false),
            lost_helper: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            ill: Mutex::new(None),
            ill_times: AtomicU32::new(0),
            overdue: Mutex::new(None),
            unreadable: Mutex::new(BTreeMap::new()),
            has_unreadable: AtomicBool::new(false),
            swap_stuck: AtomicBool::new(false),
            writing_since: AtomicU64::new(0),
            begun: Instant::now(),
            stubborn: Stubborn::default(),
            work: WaitMutex::new(Work::default()),
            work_ready: Condvar::new(),
            sample_size: AtomicU32::new(0),
            sample_base: AtomicU64::new(0),
            samples_begun: AtomicU64::new(0),
            may_share: AtomicBool::new(false),
            control: OnceLock::new(),
            domain_change: Mutex::new(None),
            moved: AtomicBool::new(false),
            mappings: AtomicU64::new(0),
            share_note: Mutex::new(None),
            share_work: WaitMutex::new(false),
            share_ready: Condvar::new(),
        })
    }

    /// Of one of its threads: 15 characters are all that the kernel keeps of a thread's name.
    pub fn thread_name(&self, what: &str) -> String {
        format!("{what}-{}", self.name).chars().take(15).collect()
    }

    /// Whether pages may be looked for that others have too, and may become common: by whatever thread.
    pub fn is_to_share(&self) -> bool {
        self.may_share.load(Ordering::Relaxed)
            && self.memory.may_move()
            && !self.memory.is_leaving()
            && self.control.get().is_some_and(|control| control.settings().enabled)
    }
    /// By what it shares from now on; what was said first stays.
    pub fn share_by(&self, control: Arc<Control>) {
        let _ = self.control.set(control);
    }

    /// Whether all its threads are to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// All its threads are to end, and hear of it.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake_faults();
        self.signal_reclaim();
        self.signal_share();
    }

    /// Lets the fault thread look at what waits.
    pub fn wake_faults(&self) {
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    /// What could not be done, and why; nothing if the VMM is gone. Its memory goes some time before its process is
    /// seen to have ended.
    pub fn set_ill_unless_gone(&self, what: &str, e: MemError) {
        if e != MemError::Gone {
            self.set_ill(format!("{what}: {e}"));
        }
    }

    /// Trouble that costs no page: for the log, and for `PagedVm::health`.
    pub fn set_ill(&self, what: String) {
        let times = self.ill_times.fetch_add(1, Ordering::Relaxed);
        // The first ones and then powers of two: a disk that fails does not fill the log as well.
        if times < 4 || times.is_power_of_two() {
            tracing::error!(vm = %self.name, "{what}");
        }
        *lock(&self.ill) = Some((what, Instant::now()));
    }

    /// The fault that waits too long, if one does. Said when there is one, and when there is none any more.
    pub fn set_overdue(&self, overdue: Option<Overdue>) {
        let was = std::mem::replace(&mut *lock(&self.overdue), overdue);
        match (was, overdue) {
            (None, Some(o)) => {
                let (page, waits_for, for_s) = (o.page, o.waits_for(), o.since.elapsed().as_secs());
                tracing::error!(vm = %self.name, "{page}: a fault has waited for {for_s} s, for {waits_for}");
            }
            (Some(o), None) => {
                let for_s = o.since.elapsed().as_secs();
                let page = o.page;
                tracing::info!(vm = %self.name, "{page}: the fault waits no more, after {for_s} s");
            }
            _ => {}
        }
    }

    /// The last trouble, if there was any: first what lasts.
    pub fn trouble(&self) -> Health {
        if let Some(overdue) = *lock(&self.overdue) {
            return Health::Overdue {
                page: overdue.page,
                pages: overdue.pages,
                waits_for: overdue.waits_for(),
                waited: overdue.since.elapsed(),
            };
        }
        match &*lock(&self.ill) {
            None => Health::Well,
            Some((last, at)) => Health::Ill {
                last: last.clone(),
                ago: at.elapsed(),
                times: self.ill_times.load(Ordering::Relaxed),
            },
        }
    }

    /// A page that is waited for cannot be read, and why. Said once a page.
    pub fn set_unreadable(&self, ppn: Ppn, what: String) {
        let mut pages = lock(&self.unreadable);
        if !pages.contains_key(&ppn) {
            tracing::error!(vm = %self.name, "{ppn}: {what}; the guest waits for it");
        }
        pages.insert(ppn, what);
        self.set_has_unreadable(true);
    }
    /// The page has been read, or is not needed any more.
    pub fn set_readable(&self, ppn: Ppn) {
        if !self.has_unreadable.load(Ordering::Relaxed) {
            return;
        }
        let mut pages = lock(&self.unreadable);
        if pages.remove(&ppn).is_some() {
            tracing::info!(vm = %self.name, "{ppn} can be read again, or is not needed any more");
        }
        self.set_has_unreadable(!pages.is_empty());
    }
    /// Those that are `away` no more have come some other way than by being read for the fault that found them
    /// unreadable.
    pub fn settle_unreadable(&self, away: impl Fn(Ppn) -> bool) {
        if !self.has_unreadable.load(Ordering::Relaxed) {
            return;
        }
        let here: Vec<Ppn> = lock(&self.unreadable).keys().copied().filter(|p| !away(*p)).collect();
        here.into_iter().for_each(|ppn| self.set_readable(ppn));
    }
    fn set_has_unreadable(&self, has: bool) {
        if self.has_unreadable.swap(has, Ordering::Relaxed) != has {
            self.memory.host().tell_unreadable_change();
        }
    }

    /// Whether there are pages that are waited for and cannot be read: cheap to ask.
    pub fn is_unreadable(&self) -> bool {
        self.has_unreadable.load(Ordering::Relaxed)
    }
    /// The first of them, and how many there are.
    pub fn unreadable(&self) -> Option<Health> {
        let pages = lock(&self.unreadable);
        let (page, what) = pages.first_key_value()?;
        Some(Health::Unreadable { page: *page, pages: pages.len(), what: what.clone() })
    }

    /// As of `set_swap_stuck`.
    pub fn is_swap_stuck(&self) -> bool {
        self.swap_stuck.load(Ordering::Relaxed)
    }
    /// For so long no write to swap came to its end, though some are under way: their disk may not answer, and
    /// whoever waits for them, the reclaim thread, does nothing else.
    pub fn writing_for(&self) -> Duration {
        match self.writing_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.begun.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }
    /// Whether writes are under way. Of some that were, `any_ended` says whether one has come to its end.
    pub fn set_writing(&self, is_writing: bool, any_ended: bool) {
        let was = self.writing_since.load(Ordering::Relaxed) > 0;
        if is_writing != was || any_ended {
            let now = self.begun.elapsed().as_millis() as u64 + 1;
            self.writing_since.store(if is_writing { now } else { 0 }, Ordering::Relaxed);
        }
    }
    /// Whether nothing can be written to swap for now: see `PagedVm::swap_room`.
    pub fn set_swap_stuck(&self, stuck: bool) {
        self.swap_stuck.store(stuck, Ordering::Relaxed);
    }

    /// The current sample is to end, and one of these pages to begin.
    pub fn ask_for_sample(&self, ppns: Vec<Ppn>) {
        self.signal(|work| work.sample = Some(ppns));
    }
    /// Whether a sample is asked for that has not begun.
    pub fn has_sample_request(&self) -> bool {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).sample.is_some()
    }

    /// The pages of it; it is the caller's to begin.
    pub fn take_sample_request(&self) -> Option<Vec<Ppn>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner).sample.take()
    }

    /// The sample has `pages` pages, of which none was touched yet when the counter of touches was `base`.
    pub fn sample_began(&self, pages: u32, base: u64) {
        self.sample_size.store(pages, Ordering::Relaxed);
        self.sample_base.store(base, Ordering::Relaxed);
        self.samples_begun.fetch_add(1, Ordering::Release);
    }

    /// The current one.
    pub fn sample(&self) -> Sample {
        Sample {
            begun: self.samples_begun.load(Ordering::Acquire),
            pages: self.sample_size.load(Ordering::Relaxed),
            base: self.sample_base.load(Ordering::Relaxed),
        }
    }

    /// Eviction has delivered `n` pages.
    pub fn evict_done(&self, n: u64) {
        let _ = self.evict_goal.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |goal| {
            Some(goal.saturating_sub(n))
        });
    }

    /// What the VM has above a limit, `evict_leave` or `hold_at`.
    fn above(&self, limit: &AtomicU64) -> u64 {
        let limit = limit.load(Ordering::Relaxed);
        let charged = self.memory.charged().0;
        if limit & AT_HOME == 0 {
            return charged.saturating_sub(limit);
        }
        charged.saturating_sub(self.memory.tier().occupancy().frames + (limit & !AT_HOME))
    }

    /// What eviction may take, by what it is to leave.
    pub fn above_leave(&self) -> u64 {
        self.above(&self.evict_leave)
    }

    /// Whether pages at home alone count: frames of the tier that become free, or are taken, do not.
    pub fn counts_at_home(&self) -> bool {
        self.evict_leave.load(Ordering::Relaxed) & AT_HOME != 0
    }

    /// By how much the VM may grow before that is asked back. `blocked`: a fault waits for it to leave.
    pub fn grows_by(&self, blocked: bool) -> u64 {
        match blocked {
            true => 1,
            false if self.counts_at_home() => EXCHANGED / 2,
            false => HELD_TOGETHER,
        }
    }

    /// Where all that was asked for is done: asks for what the VM has grown by since, a little at a time, if it is held
    /// down and that is `at_least` so much. Answers whether there is something to do that was not asked for before.
    pub fn hold_down(&self, at_least: u64) -> bool {
        let until = self.hold_until.load(Ordering::Acquire);
        let in_vain = self.in_vain.load(Ordering::Relaxed);
        if until == 0 || in_vain || self.evict_goal.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let missing = until.saturating_sub(self.memory.host().ledger.free().0);
        let grown = self.above(&self.hold_at);
        // Others are held for the same want.
        let n = missing.min(grown).min(HELD_TOGETHER);
        let (mine, none) = (Ordering::AcqRel, Ordering::Relaxed);
        if n < at_least.max(1) || self.evict_goal.compare_exchange(0, n, mine, none).is_err() {
            return false;
        }
        // Who asked for something else meanwhile prevails, also if that is nothing.
        if self.hold_until.load(Ordering::Acquire) != until {
            let _ = self.evict_goal.compare_exchange(n, 0, mine, none);
            return false;
        }
        true
    }

    /// What was asked for is given up, if that was `goal`: what was asked for meanwhile stands. Answers whether it was.
    pub fn give_up_goal(&self, goal: u64) -> bool {
        self.evict_goal.compare_exchange(goal, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The same, since nothing can leave.
    pub fn give_up_in_vain(&self, goal: u64) {
        self.in_vain.store(true, Ordering::Relaxed);
        if !self.give_up_goal(goal) {
            // Nothing of what was asked for meanwhile was tried.
            self.in_vain.store(false, Ordering::Relaxed);
        }
        // Others are to be asked for it, and soon where guests wait for that.
        if self.memory.host().is_low() {
            self.memory.host().ledger.ring();
        }
    }

    /// What was asked for is void.
    pub fn ask_no_more(&self) {
        self.hold_until.store(0, Ordering::Release);
        self.evict_goal.store(0, Ordering::Release);
    }

    /// For the reclaim thread: until it is signalled, or so long at most.
    pub fn wait_for_work(&self, at_most: Option<Duration>) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        while !work.ready && !self.is_stopping() {
            match at_most {
                None => {
                    work = self.work_ready.wait(work).unwrap_or_else(PoisonError::into_inner);
                }
                Some(limit) => {
                    work = self
                        .work_ready
                        .wait_timeout(work, limit)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                    break;
                }
            }
        }
        work.ready = false;
    }

    /// Lets the share thread look at what there is to do.
    pub fn signal_share(&self) {
        *self.share_work.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.share_ready.notify_all();
    }

    /// For the share thread: until it is signalled, or so long at most.
    pub fn wait_for_share_work(&self, at_most: Duration) {
        let work = self.share_work.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut work, _) = self
            .share_ready
            .wait_timeout_while(work, at_most, |ready| !*ready && !self.is_stopping())
            .unwrap_or_else(PoisonError::into_inner);
        *work = false;
    }

    /// Whether it is to go to another domain.
    pub fn is_to_change_domain(&self) -> bool {
        lock(&self.domain_change).is_some()
    }
    /// The caller is to see to it, or to give it back.
    pub fn take_domain_change(&self) -> Option<DomainChange> {
        lock(&self.domain_change).take()
    }
    /// Unless another domain has been asked for meanwhile.
    pub fn give_back_domain_change(&self, change: DomainChange) {
        let mut asked = lock(&self.domain_change);
        asked.get_or_insert(change);
        self.memory.set_leaving(true);
    }
    /// It is in no domain any more that it is to leave, unless another has been asked for meanwhile.
    pub fn has_changed_domain(&self) {
        let asked = lock(&self.domain_change);
        self.memory.set_leaving(asked.is_some());
    }

    /// As of `PagedVm::set_may_share`; answers what it was before.
    pub fn set_may_share(&self, may: bool) -> bool {
        self.may_share.swap(may, Ordering::Relaxed)
    }

    /// See `PagedVm::share_note`.
    pub fn share_note(&self) -> Option<String> {
        lock(&self.share_note).clone()
    }
    /// What it is from now on.
    pub fn set_share_note(&self, note: Option<String>) {
        *lock(&self.share_note) = note;
    }

    /// Lets the reclaim thread look at what there is to do.
    pub fn signal_reclaim(&self) {
        self.signal(|_| {});
    }

    fn signal(&self, change: impl FnOnce(&mut Work)) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut work);
        work.ready = true;
        self.work_ready.notify_all();
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use ballast_units::Ppn;

    use crate::memory::{Access, Fault};
    use crate::service::Health;
    use crate::service::testing::vm;

    #[test]
    fn what_was_asked_for_while_an_older_goal_is_given_up_stands() {
        let Some(vm) = vm(4, 1) else { return };
        let goal = || vm.evict_goal.load(std::sync::atomic::Ordering::Relaxed);
        vm.evict_goal.store(5, std::sync::atomic::Ordering::Relaxed);
        vm.give_up_goal(3);
        assert_eq!(goal(), 5);
        // Nor is it said to be in vain.
        vm.give_up_in_vain(3);
        assert_eq!((goal(), vm.in_vain.load(Ordering::Relaxed)), (5, false));
        vm.give_up_goal(5);
        assert_eq!(goal(), 0);
    }

    #[test]
    fn a_disk_whose_writes_end_one_after_the_other_answers() {
        let Some(vm) = vm(4, 1) else { return };
        let since = || vm.writing_since.load(Ordering::Relaxed);
        vm.set_writing(true, false);
        let begun = since();
        assert!(begun > 0);
        std::thread::sleep(Duration::from_millis(5));
        vm.set_writing(true, false);
        assert_eq!(since(), begun, "none has ended");
        vm.set_writing(true, true);
        assert!(since() > begun);
        vm.set_writing(false, true);
        assert_eq!((since(), vm.writing_for()), (0, Duration::ZERO));
    }

    /// Else it would sleep over it: whoever is signalled may be at something at the time.
    #[test]
    fn who_is_signalled_before_he_waits_does_not_wait() {
        const LONG: Duration = Duration::from_secs(600);
        let Some(vm) = vm(4, 1) else { return };
        let begun = std::time::Instant::now();
        vm.signal_reclaim();
        vm.wait_for_work(Some(LONG));
        vm.signal_share();
        vm.wait_for_share_work(LONG);
        vm.stop();
        vm.wait_for_work(Some(LONG));
        vm.wait_for_share_work(LONG);
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn who_is_held_down_and_can_give_nothing_is_asked_once() {
        let Some(vm) = vm(4, 1) else { return };
        assert_eq!(vm.memory.fault(Ppn(0), Access::Missing), Fault::Served);
        assert!(!vm.hold_down(1), "it is not held");
        vm.hold_until.store(100, Ordering::Relaxed);
        assert!(!vm.hold_down(2), "it has grown by less");
        assert!(vm.hold_down(1) && !vm.hold_down(1), "it is asked already");
        vm.give_up_in_vain(1);
        assert!(!vm.hold_down(1));
        vm.in_vain.store(false, Ordering::Relaxed);
        assert!(vm.hold_down(1));
        vm.give_up_goal(1);
        assert!(vm.hold_down(1), "that was not for want of what can leave");
    }

    #[test]
    fn who_stops_vms_is_told_when_one_begins_or_ceases_to_wait_for_what_cannot_be_read() {
        let Some(vm) = vm(4, 1) else { return };
        let told = || (vm.is_unreadable(), vm.memory.host().unreadable_changes());
        assert_eq!(told(), (false, 0));
        vm.set_readable(Ppn(0));
        assert_eq!(told(), (false, 0), "none was unreadable");
        vm.set_unreadable(Ppn(1), "gone".to_owned());
        assert_eq!(told(), (true, 1));
        // One more, and one fewer: it waits as before.
        vm.set_unreadable(Ppn(2), "gone".to_owned());
        vm.set_readable(Ppn(1));
        assert_eq!(told(), (true, 1));
        vm.set_readable(Ppn(2));
        assert_eq!(told(), (false, 2));
        // What has come some other way is waited for no more.
        vm.set_unreadable(Ppn(1), "gone".to_owned());
        vm.set_unreadable(Ppn(2), "gone".to_owned());
        vm.settle_unreadable(|ppn| ppn == Ppn(2));
        assert_eq!(told(), (true, 3));
        assert!(matches!(vm.unreadable(), Some(Health::Unreadable { page: Ppn(2), pages: 1, .. })));
        vm.settle_unreadable(|_| false);
        assert_eq!(told(), (false, 4));
    }
}
