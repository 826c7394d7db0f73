//! `ballast vm attach`: a VMM that somebody else started is managed, as far as it allows.

use ballast_api::client::Client;
use ballast_api::{AttachSpec, VmView};

use super::{Output, for_manager, given, pid};
use crate::args::AttachArgs;
use crate::failure::Failure;

pub async fn run(client: &Client, args: AttachArgs, out: Output) -> Result<(), Failure> {
    let spec = AttachSpec {
        name: args.name,
        qmp: for_manager(&args.qmp)?,
        min: args.min.0,
        shares: args.shares,
        tax: args.tax,
        pool: args.pool,
    };
    let vm = client.attach(&spec).await?;
    out.print(&vm, attached)
}

fn attached(vm: &VmView) -> String {
    format!("{}: attached, {}{}\n{}", vm.name, vm.management.mode, pid(vm), given(vm))
}
