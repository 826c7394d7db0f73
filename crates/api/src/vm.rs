use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CompressionView, FaultTimesView, PolicyInputs, Salt, VmSharing};

/// Whether VMs may have this name: 1 to 64 of `[A-Za-z0-9._-]`, beginning with a letter or digit.
pub fn good_vm_name(name: &str) -> bool {
    name.len() <= 64
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// What a guest runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM where a stock kernel boots on it, else TCG.
    #[default]
    Auto,
    Kvm,
    Tcg,
}

/// What happens when the guest reboots. Either way the VMM ends and all its memory is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RebootAction {
    #[default]
    Stop,
    /// Started again, through admission.
    Restart,
}

/// A VM to start. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// 1 to 64 of `[A-Za-z0-9._-]`, beginning with a letter or digit.
    pub name: String,
    /// Configured memory: what the guest sees as its RAM; a multiple of 2 MiB, at least 16 MiB.
    pub max: u64,
    /// Guaranteed memory, at most `max`. 0: as the configuration says, else nothing.
    #[serde(default)]
    pub min: u64,
    /// Default: as the configuration says, else 10 per MiB of `max` (as vSphere's "normal").
    #[serde(default)]
    pub shares: Option<u32>,
    /// Overrides the host's tax rate; 0 <= tax < 1.
    #[serde(default)]
    pub tax: Option<f64>,
    /// Overhead memory charged to the budget for as long as the VM runs, beside its pages.
    #[serde(default)]
    pub overhead: Option<u64>,
    /// The resource pool that it belongs to; default: as the configuration says, else none.
    #[serde(default)]
    pub pool: Option<String>,
    /// Pages are shared with the VMs that were given the same; without one, inside the VM alone.
    #[serde(default)]
    pub salt: Option<Salt>,
    /// Default 1.
    #[serde(default)]
    pub vcpus: Option<u32>,
    #[schema(value_type = String)]
    pub kernel: PathBuf,
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line; `no_timer_check` is added under TCG.
    #[serde(default)]
    pub append: String,
    #[serde(default)]
    pub accel: Accel,
    /// Leave out the balloon device.
    #[serde(default)]
    pub no_balloon: bool,
    /// Let the guest report free pages (virtio-balloon's free-page-reporting).
    #[serde(default)]
    pub free_page_reporting: bool,
    /// A port for qemu-guest-agent, over which the guest's memory pressure is read. Default: as the
    /// configuration says, else no port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_agent: Option<bool>,
    /// Whether its RAM is backed by large pages while memory is plentiful; default: as the configuration says,
    /// by its size.
    #[serde(default)]
    pub large_pages: Option<bool>,
    #[serde(default)]
    pub on_reboot: RebootAction,
    /// Where the guest's first serial port is written; default: console.log in the VM's run folder.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub console: Option<PathBuf>,
    /// The QEMU to run; default: qemu-system-x86_64 from PATH.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub qemu: Option<PathBuf>,
    /// More QEMU arguments, passed as they are.
    #[serde(default)]
    pub extra: Vec<String>,
    /// How long the start may wait for the memory that it is promised to be made free, seconds from 0 to
    /// 86400; default: as the configuration says (`admission.wait_s`).
    #[serde(default)]
    pub wait_s: Option<f64>,
}

/// A start that waits for memory to be made free. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StartView {
    pub name: String,
    /// min and overhead.
    pub need: u64,
    /// What those before it are still to be given.
    pub ahead: u64,
    /// What the host keeps free.
    pub keep: u64,
    pub free: u64,
    /// Of all these, what is not free yet.
    pub missing: u64,
    /// Seconds: since it waits, and how long it may.
    pub waited_s: f64,
    pub wait_s: f64,
    /// What others are giving up now: "db1: 64 MiB (balloon to 100 MiB)".
    pub freeing: Vec<String>,
}

/// A VMM that runs already and is to be managed as far as it allows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSpec {
    pub name: String,
    /// Its QMP socket (one that nobody else is using).
    #[schema(value_type = String)]
    pub qmp: PathBuf,
    #[serde(default)]
    pub min: u64,
    #[serde(default)]
    pub shares: Option<u32>,
    #[serde(default)]
    pub tax: Option<f64>,
    #[serde(default)]
    pub pool: Option<String>,
}

/// New parameters of a running VM; absent fields stay. All are checked before any is applied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmChange {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    /// A limit at or below the configured size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tax: Option<f64>,
    /// Pages are shared with the VMs that have the same. What the VM shares under another salt, or
    /// none, is unshared first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<Salt>,
    /// Take the salt away: pages are shared inside the VM alone. Not with `salt`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_salt: bool,
    /// Move the VM into this resource pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Take it out of its pool: a child of the host. Not with `pool`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_pool: bool,
}

fn is_false(b: &bool) -> bool {
    !b
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Seconds for the guest to power itself off; then the VMM is ended. 0: at once.
    pub grace_s: f64,
}

/// How far the manager's hand reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Pager and balloon: Ballast hands out every page.
    Paged,
    /// The balloon alone.
    BalloonOnly,
    /// Neither: shown, and counted at its full size.
    Unmanaged,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Management {
    pub mode: Mode,
    /// Why it is not paged: "private RAM: start it with share=on". None for a paged VM.
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    Starting,
    Running,
    /// Paused by somebody (QMP `stop`), not by memory.
    Paused,
    /// Stopped because pages that it waits for cannot be read from its swap files, or are damaged there:
    /// `trouble` says which and why. It goes on by itself once they can be read.
    Unreadable,
    Stopping,
    Stopped,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Params {
    /// Size of the guest's RAM, bytes.
    pub size: u64,
    pub min: u64,
    /// `size`, or a limit below it.
    pub max: u64,
    pub shares: u32,
    /// The rate in force: the VM's own, its nearest pool's, or the host's.
    pub tax: f64,
    /// The resource pool that it belongs to.
    #[serde(default)]
    pub pool: Option<String>,
}

/// Active memory, bytes (OSDI'02 s.5.3): the estimate is the largest of the three averages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ActiveView {
    pub estimate: u64,
    pub slow: u64,
    pub fast: u64,
    /// The fast average updated inside the period.
    pub current: u64,
    /// Periods completed.
    pub periods: u64,
}

/// Where a VM's pages are. Bytes; the page states sum up to the configured size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryView {
    /// Machine memory charged to the VM for guest pages.
    pub consumed: u64,
    pub target: u64,
    pub untouched: u64,
    pub resident: u64,
    /// Of that, what is backed by large pages.
    #[serde(default)]
    pub large: u64,
    pub shared: u64,
    pub broken: u64,
    pub compressed: u64,
    /// Pages that repeat one number, kept as that number.
    #[serde(default)]
    pub filled: u64,
    /// In the staging pool: being written to swap, or sampled.
    pub staged: u64,
    pub swapped: u64,
    pub ballooned: u64,
    /// Overhead in the budget: the pager's own, what was declared, and `vmm_booked`.
    pub overhead: u64,
    /// Memory of the VMM process beside the guest's RAM (anonymous RSS).
    pub vmm_overhead: u64,
    /// What is booked for it in the budget; 0 unless the configuration says that it is
    /// (`admission.vmm_memory`).
    #[serde(default)]
    pub vmm_booked: u64,
    pub swap_reserved: u64,
    /// Swap space that could not be written and is not used any more.
    #[serde(default)]
    pub swap_retired: u64,
    /// Eviction asked for by the policy and not yet done.
    pub swap_target: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BalloonHealth {
    /// No such device, or no driver has answered yet.
    Missing,
    Healthy,
    /// Moving, but behind what was asked: the next tier takes the rest.
    Slow,
    /// Not moving: the next tier takes all.
    Stuck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BalloonView {
    pub health: BalloonHealth,
    /// Bytes the guest is asked to give up.
    pub target: u64,
    /// Bytes QEMU says it holds. Shown, never computed with.
    pub reported: u64,
    /// The largest balloon this guest bears now, bytes.
    pub limit: u64,
}

/// A tool of reclamation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolName {
    #[default]
    Balloon,
    /// Compressing and swapping by the host.
    Paging,
}

/// What the tools of reclamation cost a VM now: milliseconds per second of its guest's or the host's
/// time, for each thousand pages that a tool holds. None: not measured lately.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolsView {
    /// The one that is used first; the other takes what remains.
    pub first: ToolName,
    /// Why that one.
    pub why: String,
    /// Pages that the guest reads again because its balloon made it drop them.
    pub balloon_ms: Option<f64>,
    /// Faults on pages that are compressed or swapped.
    pub paging_ms: Option<f64>,
    /// The balloon is being exchanged for paging, next down to this, bytes.
    pub ceiling: Option<u64>,
}

/// The guest's own statistics through virtio-balloon; a field the guest does not send is None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestStats {
    pub total: Option<u64>,
    pub free: Option<u64>,
    pub available: Option<u64>,
    pub disk_caches: Option<u64>,
    pub swap_in: Option<u64>,
    pub swap_out: Option<u64>,
    pub major_faults: Option<u64>,
    /// Seconds since the guest sent them.
    pub age_s: u64,
}

/// Running totals of one VM. Bytes, but `faults`, `large_*`, `sampled`, `waits` and `blocks` are counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmCounters {
    pub faults: u64,
    pub swapped_in: u64,
    pub swapped_out: u64,
    /// Swapped pages that were read before they were wanted, and those of them that were wanted then.
    #[serde(default)]
    pub read_ahead: u64,
    #[serde(default)]
    pub read_ahead_hits: u64,
    /// Pages that came home before they were wanted, because a neighbour was.
    #[serde(default)]
    pub brought_around: u64,
    pub zero_dropped: u64,
    /// Backed pages that the guest gave up (balloon or free-page reporting).
    pub ballooned: u64,
    /// Large pages handed out, and such that were broken into small ones: counts.
    #[serde(default)]
    pub large_fills: u64,
    #[serde(default)]
    pub large_breaks: u64,
    /// Sampled pages that were touched.
    pub sampled: u64,
    pub waits: u64,
    pub blocks: u64,
    /// Seconds that allocations of this VM waited for memory, summed.
    pub wait_s: f64,
    /// CPU seconds of the VMM process.
    pub cpu_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    pub name: String,
    pub state: RunState,
    pub management: Management,
    pub pid: Option<u32>,
    pub accel: String,
    pub uptime_s: f64,
    pub params: Params,
    pub memory: MemoryView,
    pub active: ActiveView,
    pub balloon: BalloonView,
    #[serde(default)]
    pub tools: ToolsView,
    pub guest: Option<GuestStats>,
    /// The last trouble that its pager had, and how often there was any: "/swap/a.swap:
    /// Input/output error; its pages stay (3 times)". No page is lost, but some may be waited for.
    #[serde(default)]
    pub trouble: Option<String>,
    #[serde(default)]
    pub sharing: VmSharing,
    #[serde(default)]
    pub compression: CompressionView,
    /// Miss curve and pressure.
    #[serde(default)]
    pub inputs: PolicyInputs,
    /// How long its faults took to be served.
    #[serde(default)]
    pub fault_times: FaultTimesView,
    pub counters: VmCounters,
    /// The VM's run folder: console.log, qemu.log.
    #[schema(value_type = String)]
    pub folder: PathBuf,
}

/// Why a VM has what it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Why {
    pub vm: String,
    /// Seconds since the decision.
    pub age_s: f64,
    /// What caused it: "period", "parameters of db1 changed", "free memory fell to soft".
    pub trigger: String,
    /// One sentence: what was decided.
    pub verdict: String,
    /// The steps that led to it, with their numbers, in order.
    pub steps: Vec<String>,
    /// When it was decided, milliseconds since 1970; absent where it was asked of now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_ms: Option<u64>,
    /// What came of what was asked, and how long it took; a sentence each.
    #[serde(default)]
    pub outcomes: Vec<String>,
}
