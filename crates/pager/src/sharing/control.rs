//! What the operator says about sharing, and what all VMs' share threads spend together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use super::examine::Marking;
use super::limit::{Cost, Limiter, Limits};
use super::order::Order;

/// What the operator says. Each share thread looks at it at each of its turns, between which it rests for
/// five seconds at most; each reclaim thread, before it looks up what is to leave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Whether pages are looked for, and enter the store when they are to leave memory. Pages that are shared already
    /// stay so.
    pub enabled: bool,
    /// In which each VM's pages are looked at.
    pub order: Order,
    /// Pages are write-protected at the first look, and passed over until they are written, so that each pass is over what
    /// was written since the last; else where they were found unchanged.
    pub eager: bool,
    /// Of all VMs together.
    pub host: Limits,
    /// Of each VM.
    pub vm: Limits,
    /// The longest time from the beginning of one pass over a VM to the next. By default ESX's: Mem.ShareScanTime, 60 minutes.
    pub scan_time: Duration,
    /// Between two rounds in which broken pages are brought home.
    pub rehome_after: Duration,
}

impl Settings {
    pub(crate) fn marking(&self) -> Marking {
        if self.eager { Marking::All } else { Marking::Unchanged }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            enabled: true,
            order: Order::Random,
            eager: false,
            host: Limits { pages_per_s: 65536.0, cores: 0.1 },
            vm: Limits { pages_per_s: 32768.0, cores: 0.1 },
            scan_time: Duration::from_secs(3600),
            rehome_after: Duration::from_secs(2),
        }
    }
}

/// Shared by the share threads of all VMs.
#[derive(Debug, Default)]
pub struct Control {
    settings: RwLock<Settings>,
    limiter: Limiter,
    cpu_ns: AtomicU64,
}

impl Control {
    /// Nothing is spent yet.
    pub fn new(settings: Settings) -> Control {
        Control { settings: RwLock::new(settings), ..Control::default() }
    }
    /// As they are now.
    pub fn settings(&self) -> Settings {
        *self.settings.read().unwrap_or_else(PoisonError::into_inner)
    }
    /// For all VMs, from their threads' next look on.
    pub fn set(&self, settings: Settings) {
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = settings;
    }
    /// CPU time of all share threads so far.
    pub fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }
    /// Pays for a look within the host's limits; answers how long to rest.
    pub(crate) fn pay(&self, limits: Limits, cost: Cost) -> Duration {
        self.limiter.pay(limits, cost)
    }
    /// How long to rest yet for what was done.
    pub(crate) fn owed(&self) -> Duration {
        self.limiter.owed()
    }
    pub(crate) fn spent(&self, cpu: Duration) {
        self.cpu_ns.fetch_add(cpu.as_nanos() as u64, Ordering::Relaxed);
    }
}
