//! One look at the manager.

use std::time::Instant;

use ballast_api::client::{Client, ClientError};
use ballast_api::{HostView, VmView};

/// What the manager said, and when.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Seconds since the view started.
    pub at: f64,
    pub host: HostView,
    pub vms: Vec<VmView>,
}

/// Looks once. `start` is when the view started.
pub async fn look(client: &Client, start: Instant) -> Result<Snapshot, ClientError> {
    let (host, vms) = tokio::try_join!(client.host(), client.vms())?;
    Ok(Snapshot { at: start.elapsed().as_secs_f64(), host, vms })
}
