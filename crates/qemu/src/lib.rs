//! QEMU, seen from the manager: how a VM is started ([`command`], [`spawn`], [`launcher`]), what it runs on
//! ([`probe_accel`]), how one talks to it ([`Qmp`], [`Monitor`]) and to its guest ([`GuestAgent`]), whether its memory may be paged
//! ([`inspect()`]) and what the process costs ([`process`]).
//!
//! Nothing here waits for QEMU without a deadline: its main thread may be inside a page fault that
//! the manager has yet to serve.

#![warn(missing_docs)]

mod accel;
mod agent;
mod bounded;
mod command_line;
#[doc(hidden)]
pub mod fuzzing;
mod handle;
mod inspect;
mod launch;
pub mod launcher;
mod monitor;
pub mod proc_text;
pub mod process;
mod qmp;
mod ram_blocks;
mod ram_file;
mod reports;
mod shmem;
mod shown;
mod spec;
#[cfg(test)]
mod testing;

pub use accel::{AccelChoice, probe_accel, probe_accel_cached};
pub use agent::{AGENT_PORT, AgentError, GuestAgent, MemoryPressure};
pub use command_line::{BALLOON_ID, HOTPLUG_ID, Launch, LaunchPaths, command};
pub use handle::{Exit, ProcessHandle};
pub use inspect::{
    Facts, Holder, Inspection, RamMapping, Verdict, counts_on_zeros, decide, inspect,
    inspect_since, maps_memory, pinning_device,
};
pub use launch::{LaunchError, Vmm, last_log_line, spawn};
pub use monitor::{Device, DiskReads, Memdev, Monitor, RunStatus};
pub use qmp::{MAX_LINE, Qmp, QmpError, QmpEvent, listener_pid};
pub use ram_blocks::RamBlock;
pub use ram_file::{Huge, ram_file};
pub use shmem::{unasked_large_memfds, unasked_large_pages};
pub use spec::{SpecError, check_spec};
