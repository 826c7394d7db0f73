use std::time::Duration;

use ballast_api::client::Client;

use super::Output;
use crate::args::StopArgs;
use crate::failure::Failure;
use crate::figures::{age, size};

/// What the manager may need beyond the grace to end a VMM and release its memory.
const RELEASE: Duration = Duration::from_secs(60);

pub async fn run(client: Client, args: StopArgs, out: Output) -> Result<(), Failure> {
    let grace = if args.force { Duration::ZERO } else { args.grace };
    let client = client.with_timeout(grace + RELEASE);
    let vm = client.stop(&args.name, grace).await?;
    out.print(&vm, |vm| {
        format!(
            "{}: stopped after {}; it held {} of memory and {} of swap\n",
            vm.name,
            age(vm.uptime_s),
            size(vm.memory.consumed),
            size(vm.memory.swapped)
        )
    })
}
