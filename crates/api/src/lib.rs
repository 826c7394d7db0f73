//! The API of `ballastd`: HTTP/1.1 with JSON bodies over a Unix socket of mode 0600, under `/v1`.
//!
//! | method and path | body | answer |
//! | --- | --- | --- |
//! | `GET /v1/host` | - | [`HostView`] |
//! | `PATCH /v1/host` | [`HostChange`] | [`HostView`] |
//! | `GET /v1/vms` | - | `[VmView]`, in order of start; then those that wait to be taken over |
//! | `POST /v1/vms` | [`VmSpec`] | [`VmView`], once the VMM runs |
//! | `GET /v1/starts` | - | `[StartView]`: starts that wait for memory, in the order in which they get it |
//! | `POST /v1/attachments` | [`AttachSpec`] | [`VmView`] |
//! | `GET /v1/vms/{name}` | - | [`VmView`] |
//! | `PATCH /v1/vms/{name}` | [`VmChange`] | [`VmView`] |
//! | `POST /v1/vms/{name}/stop` | [`StopRequest`] | [`VmView`] of its last moment |
//! | `GET /v1/vms/{name}/why` | - | [`Why`]; of an earlier time with `?at_ms=` |
//! | `GET /v1/pools` | - | `[PoolView]` |
//! | `PATCH /v1/pools/{name}` | [`PoolChange`] | [`PoolView`]; the slashes of a pool's name stay as they are |
//! | `DELETE /v1/pools/{name}` | - | `[PoolView]` of all that are left |
//! | `POST /v1/config/reload` | - | [`ConfigReloaded`] |
//! | `GET /v1/journal` | - | [`JournalPage`]; `?since_ms=&until_ms=&vm=&limit=&all=` |
//! | `POST /v1/shutdown` | [`ShutdownRequest`] | [`HostView`] |
//! | `GET /v1/openapi.json` | - | the OpenAPI document |
//! | `GET /metrics` | - | Prometheus text |
//!
//! A manager that is to be followed by another at once is ended with `leave_vms`: see [`ShutdownRequest`].
//! [`record`] is what it notes of each VM for whoever must end one without it.
//!
//! Sizes are integers of bytes unless a field's name says pages. Errors are an [`ErrorBody`] with
//! status 400 (bad request), 404 (no such VM, pool, path, or method on that path; nothing in the journal of
//! that time), 409 (not in this state), 507 (admission refused) or 500 (the manager or a VMM failed).

#![warn(missing_docs)]

pub mod client;
mod compression;
mod error;
mod fault_times;
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod inputs;
mod journal;
pub mod layout;
mod names;
mod pool;
pub mod record;
mod salt;
mod sharing;
mod vm;

pub use compression::CompressionView;
pub use error::{ErrorBody, ErrorCode};
pub use fault_times::FaultTimesView;
pub use host::{
    HostChange, HostCounters, HostView, LocationState, NodeView, RefusedView, RunDirView,
    ShutdownRequest, StateName, SwapLocation, Threshold,
};
pub use inputs::{MissPoint, PolicyInputs, PressureView};
pub use journal::{JournalPage, JournalQuery, JournalView, TurnView};
pub use pool::{ConfigReloaded, PoolChange, PoolView};
pub use salt::{BadSalt, Salt};
pub use sharing::{HostSharing, VmSharing};
pub use vm::{
    Accel, ActiveView, AttachSpec, BalloonHealth, BalloonView, GuestStats, HotplugView, Management,
    MemoryView, Mode, Params, RebootAction, RunState, StartView, StopRequest, ToolName, ToolsView,
    VmChange, VmCounters, VmSpec, VmView, Why,
};

/// Where `ballastd` listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/ballast/api.sock";

/// For `serde(skip_serializing_if)`.
fn is_false(b: &bool) -> bool {
    !b
}
