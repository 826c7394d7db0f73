//! Keeps the host's idle processors from sleeping while guests wait for page after page (ADR 37): a fault is a round
//! trip between two threads, and where the processor that the other one is to run on sleeps, waking it takes several times as
//! long as all the rest. The kernel is asked by its own interface for that (Documentation/power/pm_qos_interface.rst:
//! `/dev/cpu_dma_latency`), and forgets it when this process ends, however that does.
//!
//! Asked by the fault services of VMs (`service::wakeful`), one request for all of them.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where there are more processors than this, none are kept awake: all that are idle would be.
const MOST: usize = 64;
/// The same where they do not sleep a little less, but poll.
const MOST_POLLING: usize = 16;
/// How long idle processors may take to wake, in microseconds: what the shallow states of processors take (1 to 10), and
/// deeper ones do not (50 and more). In a virtual machine any state at all leaves for the hypervisor.
const SHALLOW: i32 = 10;
const NONE: i32 = 0;
/// What the kernel takes for no request.
const NO_REQUEST: i32 = -1;

/// One for all VMs of a manager.
#[derive(Default)]
pub struct Awake {
    /// None where nothing can be asked for, or would come of it.
    request: Option<File>,
    latency: i32,
    allowed: AtomicBool,
    asking: Mutex<Asking>,
    /// How long processors were kept awake, by the requests that have ended.
    ns: AtomicU64,
}

#[derive(Default)]
struct Asking {
    services: u32,
    since: Option<Instant>,
}

impl Awake {
    /// Of this host; nothing is asked for before it is allowed.
    pub fn of_host() -> Awake {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).unwrap_or_default()
        };
        // All of the host's: those that are not this process' to run on are kept awake with the others.
        let processors = count(read("online").trim()).unwrap_or(usize::MAX);
        match latency(read("cpuidle/current_driver").trim(), processors) {
            Some(latency) => Awake::by("/dev/cpu_dma_latency", latency),
            None => Awake::default(),
        }
    }

    pub(crate) fn by(path: &str, latency: i32) -> Awake {
        let opened = OpenOptions::new().write(true).open(path);
        let request = opened
            .inspect_err(|e| tracing::debug!("{path}: {e}: idle processors sleep as they like"))
            .ok();
        Awake { request, latency, ..Awake::default() }
    }

    /// Whether processors may be kept awake from now on. Those that are so now may be for some milliseconds more.
    pub fn allow(&self, allowed: bool) {
        self.allowed.store(allowed, Ordering::Relaxed);
    }

    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed.load(Ordering::Relaxed)
    }

    /// How long they were so far.
    pub fn total(&self) -> Duration {
        let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let now = asking.since.map_or(Duration::ZERO, |since| since.elapsed());
        Duration::from_nanos(self.ns.load(Ordering::Relaxed)) + now
    }

    /// From now on, until as many have let go. False, and nothing is to be let go: it is not allowed, or cannot be.
    pub(crate) fn ask(&self) -> bool {
        if !self.is_allowed() || self.request.is_none() {
            return false;
        }
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if asking.services == 0 {
            self.tell(self.latency);
            asking.since = Some(Instant::now());
        }
        asking.services += 1;
        true
    }

    /// Of one that has asked.
    pub(crate) fn let_go(&self) {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        asking.services = asking.services.saturating_sub(1);
        if asking.services > 0 {
            return;
        }
        if let Some(since) = asking.since.take() {
            self.tell(NO_REQUEST);
            self.ns.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }

    fn tell(&self, latency: i32) {
        // A hint: where the kernel does not take it, faults take as long as they did.
        let told = self.request.as_ref().map(|mut file| file.write_all(&latency.to_ne_bytes()));
        if let Some(Err(e)) = told {
            tracing::debug!("/dev/cpu_dma_latency: {e}");
        }
    }
}

/// How many processors a list of the kernel's names: "0-3,8".
fn count(list: &str) -> Option<usize> {
    let of = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(last.checked_sub(first)? + 1)
    };
    list.split(',').map(of).sum()
}

/// What to ask for, by the driver of idle processors and by how many there are; None where that is none of it.
fn latency(driver: &str, processors: usize) -> Option<i32> {
    let (latency, most) = match driver {
        // Processors halt, or do whatever they do, with nobody to be asked.
        "" | "none" => return None,
        "haltpoll" => (NONE, MOST_POLLING),
        _ => (SHALLOW, MOST),
    };
    (processors <= most).then_some(latency)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    /// What was written to it.
    fn told(file: &tempfile::NamedTempFile) -> Vec<i32> {
        let bytes = std::fs::read(file.path()).unwrap();
        let (values, _) = bytes.as_chunks::<4>();
        values.iter().map(|value| i32::from_ne_bytes(*value)).collect()
    }

    #[test]
    fn one_request_stands_for_all_that_ask_until_the_last_has_let_go() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let awake = Awake::by(file.path().to_str().unwrap(), 7);
        assert!(!awake.ask(), "not allowed yet");
        awake.allow(true);
        assert!(awake.ask() && awake.ask());
        awake.let_go();
        assert_eq!(told(&file), [7]);
        awake.allow(false);
        assert!(!awake.ask());
        std::thread::sleep(Duration::from_millis(2));
        let before = awake.total();
        assert!(before >= Duration::from_millis(2), "it goes on");
        awake.let_go();
        assert_eq!(told(&file), [7, NO_REQUEST]);
        let total = awake.total();
        assert!(total >= before && awake.total() == total);
        // One too many is none.
        awake.let_go();
        awake.allow(true);
        assert!(awake.ask());
        assert_eq!(told(&file), [7, NO_REQUEST, 7]);
    }

    #[test]
    fn processors_of_the_host_are_counted_by_the_kernels_list() {
        let counts = ["0", "0-3", "0-3,8", "2-4,6,8-11"].map(count);
        assert_eq!(counts, [Some(1), Some(4), Some(5), Some(8)]);
        assert_eq!(["", "x", "4-2", "1,"].map(count), [None; 4]);
    }

    #[test]
    fn nothing_is_asked_for_where_nothing_would_come_of_it_or_too_much() {
        assert_eq!(["", "none"].map(|driver| latency(driver, 2)), [None, None]);
        assert_eq!(latency("haltpoll", MOST_POLLING), Some(NONE));
        assert_eq!(latency("haltpoll", MOST_POLLING + 1), None);
        assert_eq!(latency("intel_idle", MOST), Some(SHALLOW));
        assert_eq!(latency("acpi_idle", MOST + 1), None);
        let nowhere = Awake::by("/nowhere/cpu_dma_latency", 0);
        nowhere.allow(true);
        assert!(!nowhere.ask());
    }
}
