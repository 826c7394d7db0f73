//! `ballast vm ls`: all VMs, and what waits or was refused.

use ballast_api::client::Client;

use super::Output;
use crate::failure::Failure;
use crate::table;

pub async fn run(client: &Client, out: Output) -> Result<(), Failure> {
    let vms = client.vms().await?;
    // The answer is VMs alone; people see beside them what runs without Ballast.
    let refused = if out.json { Vec::new() } else { client.host().await?.refused };
    out.print(&vms, |vms| table::vms(vms) + &table::refused(&refused))
}
