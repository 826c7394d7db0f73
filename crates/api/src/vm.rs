//! VMs: how they are started, attached, changed and stopped, and all that is shown of them.

use std::path::PathBuf;

use ballast_units::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CompressionView, FaultTimesView, PolicyInputs, Salt, VmSharing};

/// What a guest runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// KVM if a trial boot of its kernel prints "Linux version" on its serial port within 5 s, else TCG.
    #[default]
    Auto,
    /// Hardware virtualization.
    Kvm,
    /// QEMU's emulator.
    Tcg,
}

/// What happens when the guest reboots. Either way the VMM ends and all its memory is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RebootAction {
    /// The VM is gone.
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
    /// Configured memory: what the guest sees as its RAM; a multiple of 2 MiB, 16 MiB to 64 TiB.
    pub max: u64,
    /// Memory that can be plugged while the guest runs, beside `max`; a multiple of 2 MiB, at most 64 TiB. 0: none. It has a
    /// virtio-mem device then, whose driver the guest needs, and swap space and overhead are reserved for all of
    /// it at the start.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hotplug: u64,
    /// Guaranteed memory, at most `max`; rounded up to whole pages of 4 KiB. 0: as the configuration says, else nothing.
    #[serde(default)]
    pub min: u64,
    /// Default: as the configuration says, else 10 per MiB of `max` (as vSphere's "normal").
    #[serde(default)]
    pub shares: Option<u32>,
    /// Tax on its idle memory, 0 <= tax < 1. Default: as the configuration says, else its pool's, else the host's.
    #[serde(default)]
    pub tax: Option<f64>,
    /// Overhead memory charged to the budget for as long as the VM runs, beside its pages and what Ballast takes for it; at
    /// most 64 TiB. Default: none.
    #[serde(default)]
    pub overhead: Option<u64>,
    /// The resource pool that it belongs to; default: as the configuration says, else none.
    #[serde(default)]
    pub pool: Option<String>,
    /// Pages are shared with the VMs that were given the same; without one, inside the VM alone.
    #[serde(default)]
    pub salt: Option<Salt>,
    /// Virtual CPUs, 1 to 255; default 1.
    #[serde(default)]
    pub vcpus: Option<u32>,
    /// Linux kernel image to boot.
    #[schema(value_type = String)]
    pub kernel: PathBuf,
    /// Initial RAM disk.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, at most 2,047 bytes with what is put before it: `console=ttyS0`, `panic=-1`, under TCG `no_timer_check`, and with `hotplug`
    /// `memhp_default_state=online memory_hotplug.online_policy=auto-movable`: each unless it sets that itself, and of the
    /// last two neither where it sets `memhp_default_state`.
    #[serde(default)]
    pub append: String,
    /// What the guest runs on.
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
    /// What happens when the guest reboots, panics, or is reset by a monitor.
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

impl VmSpec {
    /// The least of [`max`](VmSpec::max).
    pub const LEAST_SIZE: Bytes = Bytes::from_mib(16);
    /// What [`max`](VmSpec::max) is a multiple of, so that it can be backed by large pages throughout.
    pub const SIZE_STEP: Bytes = Bytes::from_mib(2);
    /// The most virtual CPUs: QEMU's limit for q35.
    pub const MOST_VCPUS: u32 = 255;
}

/// A start that waits for memory to be made free. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StartView {
    /// Name of the VM.
    pub name: String,
    /// min and overhead.
    pub need: u64,
    /// What those before it are still to be given.
    pub ahead: u64,
    /// What the host keeps free.
    pub keep: u64,
    /// What is free now.
    pub free: u64,
    /// Of all these, what is not free yet.
    pub missing: u64,
    /// How long it has waited, seconds.
    pub waited_s: f64,
    /// How long it may wait, seconds; null: until it has its room, or is stopped, for its guest rebooted.
    pub wait_s: Option<f64>,
    /// What others are giving up now: "db1: 64 MiB (balloon to 100 MiB)".
    pub freeing: Vec<String>,
}

/// A VMM that runs already and is to be managed as far as it allows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSpec {
    /// Name to give the VM: 1 to 64 of `[A-Za-z0-9._-]`, beginning with a letter or digit.
    pub name: String,
    /// Its QMP socket (one that nobody else is using).
    #[schema(value_type = String)]
    pub qmp: PathBuf,
    /// Guaranteed memory, bytes, rounded up to whole pages; 0: as the configuration says, else nothing.
    #[serde(default)]
    pub min: u64,
    /// At least 1; default: as the configuration says, else 10 per MiB of its size.
    #[serde(default)]
    pub shares: Option<u32>,
    /// 0 <= tax < 1; default: as the configuration says, else its pool's, else the host's.
    #[serde(default)]
    pub tax: Option<f64>,
    /// The resource pool that it belongs to; default: as the configuration says, else none.
    #[serde(default)]
    pub pool: Option<String>,
}

/// New parameters of a running VM; absent fields stay. All are checked before any is applied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmChange {
    /// At least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u32>,
    /// Guaranteed memory, bytes, rounded up to whole pages; at most `max`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    /// In bytes, rounded down to whole pages, at least one. A limit at or below the configured size; of a VM with memory to plug, also a size beyond it in steps of
    /// 2 MiB, up to what it can have: memory is plugged, or unplugged, until the guest has that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// 0 <= tax < 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tax: Option<f64>,
    /// Pages are shared with the VMs that have the same. What the VM shares under another salt, or
    /// none, is unshared first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<Salt>,
    /// Take the salt away: pages are shared inside the VM alone. Not with `salt`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_salt: bool,
    /// Move the VM into this resource pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Take it out of its pool: a child of the host. Not with `pool`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_pool: bool,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// How to stop a VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Seconds for the guest to power itself off, or, without QMP, for the VMM to obey SIGTERM; then it is killed.
    /// 0 to 86400; 0: at once.
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
    /// Neither: shown, and counted at what its VMM takes; where it might have been paged, at its full size.
    Unmanaged,
}

/// How far a VM is managed, and why not further.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Management {
    /// How far.
    pub mode: Mode,
    /// Why it is not paged: "private RAM: start it with share=on". None for a paged VM.
    pub reason: Option<String>,
}

/// What a VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Its VMM has been started and its guest does not run yet.
    Starting,
    /// Its guest runs.
    Running,
    /// Its guest stands still, though not for memory: paused by somebody (QMP `stop`), stopped by its VMM (an error of its
    /// disk), or asleep.
    Paused,
    /// Stopped because pages that it waits for cannot be read from its swap files, or are damaged there:
    /// `trouble` says which and why. It goes on by itself once they can be read.
    Unreadable,
    /// Its guest was asked to power off, or its VMM to end.
    Stopping,
    /// Its VMM has ended.
    Stopped,
}

/// A VM's parameters in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Params {
    /// Size of the guest's RAM, bytes, with what can be plugged.
    pub size: u64,
    /// Guaranteed memory, bytes.
    pub min: u64,
    /// `size`, or a limit below it.
    pub max: u64,
    /// At least 1.
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
    /// What the policy takes for active, where the VM is paged; one of which nothing is known, or no more, counts as
    /// using all it has.
    pub estimate: u64,
    /// The slow average over sampling periods.
    pub slow: u64,
    /// The fast average.
    pub fast: u64,
    /// The fast average updated inside the period.
    pub current: u64,
    /// Periods completed.
    pub periods: u64,
}

/// Where a VM's pages are. Bytes; of a paged VM the page states sum up to the configured size, of another all but `ballooned` are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryView {
    /// Machine memory charged to the VM for guest pages.
    pub consumed: u64,
    /// What the policy entitles it to.
    pub target: u64,
    /// Never touched: backed by nothing.
    pub untouched: u64,
    /// Backed by pages of its own, in their place.
    pub resident: u64,
    /// Of that, what is backed by large pages.
    #[serde(default)]
    pub large: u64,
    /// Backed by common pages.
    pub shared: u64,
    /// Copies of common pages that were written, not yet taken home.
    pub broken: u64,
    /// Kept compressed.
    pub compressed: u64,
    /// Pages that repeat one number, kept as that number.
    #[serde(default)]
    pub filled: u64,
    /// In the staging pool: being written to swap, or sampled.
    pub staged: u64,
    /// In its swap files.
    pub swapped: u64,
    /// Given up by the guest. Of a VM that is not paged, whose pages nothing else is known of: what its balloon said last.
    pub ballooned: u64,
    /// Overhead in the budget: the pager's own, what was declared, and `vmm_booked`.
    pub overhead: u64,
    /// Memory of the VMM process beside the guest's RAM (anonymous RSS). 0 of a VM that is not paged: all of its process is
    /// booked, and what of it cannot be its guest's is in `overhead`.
    pub vmm_overhead: u64,
    /// What is booked for it in the budget; 0 unless the configuration says that it is
    /// (`admission.vmm_memory`).
    #[serde(default)]
    pub vmm_booked: u64,
    /// Swap space reserved for it.
    pub swap_reserved: u64,
    /// Swap space that could not be written and is not used any more.
    #[serde(default)]
    pub swap_retired: u64,
    /// Eviction asked for by the policy and not yet done.
    pub swap_target: u64,
}

/// How a balloon does what it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BalloonHealth {
    /// No such device, no driver has answered yet, or its VMM's QMP is out of reach.
    Missing,
    /// It does.
    Healthy,
    /// Moving, but behind what was asked: the next tier takes the rest.
    Slow,
    /// Not moving: the next tier takes all.
    Stuck,
}

/// A guest's balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BalloonView {
    /// How it does what it is asked.
    pub health: BalloonHealth,
    /// Bytes the guest is asked to give up.
    pub target: u64,
    /// Bytes QEMU says it holds; what it said last while it does not answer. Shown, never computed with.
    pub reported: u64,
    /// The largest balloon this guest bears now, bytes.
    pub limit: u64,
}

/// Memory that can be plugged while the guest runs, by virtio-mem. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HotplugView {
    /// The most.
    pub size: u64,
    /// What the guest is asked to have plugged.
    pub requested: u64,
    /// What it has plugged, by its VMM's books; None: not known yet.
    pub plugged: Option<u64>,
    /// What reclamation has unplugged, which its balloon did not deliver; part of what the balloon's goal and limit
    /// say.
    #[serde(default)]
    pub withheld: u64,
}

/// A tool of reclamation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolName {
    /// The guest's balloon.
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
    /// Memory that the guest sees, bytes.
    pub total: Option<u64>,
    /// Of that, what is unused, bytes.
    pub free: Option<u64>,
    /// What it could use without swapping, bytes.
    pub available: Option<u64>,
    /// What holds contents of its disks, bytes.
    pub disk_caches: Option<u64>,
    /// Read from its own swap since it booted, bytes.
    pub swap_in: Option<u64>,
    /// Written to its own swap, bytes.
    pub swap_out: Option<u64>,
    /// Its faults that waited for a disk, a count.
    pub major_faults: Option<u64>,
    /// Seconds since the guest sent them.
    pub age_s: u64,
}

/// Running totals of one VM. Bytes, but `faults`, `large_*`, `sampled`, `waits` and `blocks` are counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmCounters {
    /// Faults that were served.
    pub faults: u64,
    /// Read back from its swap files.
    pub swapped_in: u64,
    /// Written to its swap files.
    pub swapped_out: u64,
    /// Swapped pages that were read before they were wanted.
    #[serde(default)]
    pub read_ahead: u64,
    /// Of what was read ahead, what was wanted then, or came home because a neighbour was.
    #[serde(default)]
    pub read_ahead_hits: u64,
    /// Pages that came home before they were wanted, because a neighbour was.
    #[serde(default)]
    pub brought_around: u64,
    /// Pages that were found all zero, and dropped.
    pub zero_dropped: u64,
    /// Pages in its memory that the guest gave up (balloon or free-page reporting): not those that were compressed or
    /// swapped by then.
    pub ballooned: u64,
    /// Large pages handed out.
    #[serde(default)]
    pub large_fills: u64,
    /// Large pages that were broken into small ones.
    #[serde(default)]
    pub large_breaks: u64,
    /// Large pages made of small ones, after a shortage.
    #[serde(default)]
    pub large_collapses: u64,
    /// Sampled pages that were touched.
    pub sampled: u64,
    /// Allocations that had to wait for memory.
    pub waits: u64,
    /// Allocations that waited because the host was low and the VM above its target.
    pub blocks: u64,
    /// Seconds that faults of this VM waited before they could be served, for memory or for anything else, summed.
    /// Reads from swap are not in it.
    pub wait_s: f64,
    /// CPU seconds of the VMM process since its start.
    pub cpu_s: f64,
}

/// All about one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// Name of the VM.
    pub name: String,
    /// What it is doing.
    pub state: RunState,
    /// How far it is managed.
    pub management: Management,
    /// Process of its VMM; None before it runs.
    pub pid: Option<u32>,
    /// What it runs on: "kvm", or "tcg" with the reason: "tcg (no /dev/kvm)". Of a VM that somebody else started it
    /// only tells so: "started by another".
    pub accel: String,
    /// Seconds since this ballastd has it: of a VM that was attached or taken over, not since its start.
    pub uptime_s: f64,
    /// Seconds since its VMM was started, as the kernel tells. In the answer to a stop, until then. None where that was
    /// gone before it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm_uptime_s: Option<f64>,
    /// Its parameters in force.
    pub params: Params,
    /// Where its pages are.
    pub memory: MemoryView,
    /// Its active memory.
    pub active: ActiveView,
    /// Its balloon.
    pub balloon: BalloonView,
    /// Its memory that can be plugged; None if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug: Option<HotplugView>,
    /// What its tools of reclamation cost it.
    #[serde(default)]
    pub tools: ToolsView,
    /// What the guest says of its memory; None if it says nothing.
    pub guest: Option<GuestStats>,
    /// The last trouble that its pager had, how often there was any since this ballastd has the VM, and when:
    /// "/swap/a.swap: Input/output error; its pages stay (3 times, last 2m05s ago)". No page is lost, but some may
    /// be waited for.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Whether its guest waits for a page that does not come, and not for want of memory: it cannot be read, or has not been for
    /// 5 s, or nobody serves it. `trouble` says which.
    #[serde(default)]
    pub stalled: bool,
    /// In the answer to a stop: how it ended, where that was not in its own way: "killed: it had not ended within
    /// 30 s".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// What it shares.
    #[serde(default)]
    pub sharing: VmSharing,
    /// What of it is compressed.
    #[serde(default)]
    pub compression: CompressionView,
    /// Miss curve and pressure.
    #[serde(default)]
    pub inputs: PolicyInputs,
    /// How long its faults took to be served.
    #[serde(default)]
    pub fault_times: FaultTimesView,
    /// Running totals. They begin with its pager, which each ballastd makes anew; `cpu_s` begins with its VMM.
    pub counters: VmCounters,
    /// The VM's run folder: console.log, qemu.log.
    #[schema(value_type = String)]
    pub folder: PathBuf,
}

/// Why a VM has what it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Why {
    /// Name of the VM.
    pub vm: String,
    /// Seconds since the decision.
    pub age_s: f64,
    /// What caused it: "period", "parameters of db1 changed", "free memory moved from high to soft".
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
    /// What of the journal could not be read, or was not recorded: a later decision may have been in force.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}
