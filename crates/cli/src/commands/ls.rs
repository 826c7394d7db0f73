use ballast_api::client::Client;

use super::Output;
use crate::failure::Failure;
use crate::table;

pub async fn run(client: &Client, out: Output) -> Result<(), Failure> {
    let vms = client.vms().await?;
    out.print(&vms, |vms| table::vms(vms))
}
