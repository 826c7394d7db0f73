//! `ballast vm set`: parameters of a VM that runs.

use ballast_api::VmChange;
use ballast_api::client::Client;

use super::{Output, given, salt};
use crate::args::SetArgs;
use crate::failure::Failure;

pub async fn run(client: &Client, args: SetArgs, out: Output) -> Result<(), Failure> {
    if let (Some(min), Some(max)) = (args.min, args.max)
        && min > max
    {
        return Err(Failure::Usage(format!("--min {min} is above --max {max}")));
    }
    let change = VmChange {
        shares: args.shares,
        min: args.min.map(|b| b.0),
        max: args.max.map(|b| b.0),
        tax: args.tax,
        salt: salt(args.salt)?,
        no_salt: args.no_salt,
        pool: args.pool,
        no_pool: args.no_pool,
    };
    let vm = client.change(&args.name, &change).await?;
    out.print(&vm, given)
}
