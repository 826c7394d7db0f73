//! What is where in the run folder, which is on a tmpfs.
//!
//! ```text
//! lock                     of the manager that runs
//! format                   the version of what has none of its own
//! host.json                what commands set of the host
//! pools.json               what commands said of pools
//! accel.json               which kernels boot under KVM
//! api.sock                 unless it is configured elsewhere
//! shim.sock                where shims come
//! store/                   key of the hashes, zeros, store of each domain
//! journal/                 unless it is configured elsewhere
//! swap/                    NAME.swap of each VM, unless it is configured elsewhere
//! vms/NAME/vm.json         the record of a VM that lives
//!          qmp.sock        of its VMM
//!          agent.sock      of its guest's agent
//!          console.log     the guest's serial port, unless it is put elsewhere
//!          qemu.log        what its VMM says
//!          pmap, stage, compressed
//!                          the pager's (`ballast_pager::run_files`)
//! ```
//!
//! A file that is being written has `.new` behind its name, and gets it when it is whole.

pub use ballast_api::layout::{
    API_SOCKET, JOURNAL, LOCK, RECORD, RUN_DIR, SERVICE_JOURNAL, SERVICE_SWAP, VMS,
};

/// The version of what has none of its own.
pub const FORMAT: &str = "format";
/// What commands set of the host.
pub const HOST: &str = "host.json";
/// What commands said of pools.
pub const POOLS: &str = "pools.json";
/// Which kernels boot under KVM.
pub const ACCEL: &str = "accel.json";
/// Where shims come.
pub const SHIM_SOCKET: &str = "shim.sock";
/// The folder of what VMs share.
pub const STORE: &str = "store";
/// In it: the key of the hashes.
pub const KEY: &str = "key";
/// In it: the pages of zeros that all VMs read.
pub const ZEROS: &str = "zeros";
/// The folder of swap files, where none is configured.
pub const SWAP: &str = "swap";
/// Of a VM: its VMM's QMP.
pub const QMP_SOCKET: &str = "qmp.sock";
/// Of a VM: its guest's agent.
pub const AGENT_SOCKET: &str = "agent.sock";
/// Of a VM: its guest's serial port.
pub const CONSOLE: &str = "console.log";
/// Of a VM: what its VMM says.
pub const QEMU_LOG: &str = "qemu.log";
