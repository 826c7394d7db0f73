use std::path::Path;
use std::time::Duration;

use ballast_api::client::{Client, ClientError};

use super::Output;
use crate::args::StopArgs;
use crate::failure::Failure;
use crate::figures::{age, size};
use crate::offline;

/// How long the guest may take to power itself off unless told otherwise.
const GRACE: Duration = Duration::from_secs(30);
/// What the manager may need beyond the grace to end a VMM and release its memory.
const RELEASE: Duration = Duration::from_secs(60);

pub async fn run(client: Client, args: StopArgs, out: Output) -> Result<(), Failure> {
    let wanted = if args.force { Some(Duration::ZERO) } else { args.grace };
    let grace = wanted.unwrap_or(GRACE);
    let client = client.with_timeout(grace + RELEASE);
    let vm = match client.stop(&args.name, grace).await {
        Ok(vm) => vm,
        Err(e @ ClientError::Unreachable { .. }) => {
            let run_dir = args.run_dir.as_deref().or(client.socket().parent());
            let run_dir = run_dir.unwrap_or(Path::new("."));
            return match offline::stop(run_dir, &args.name, wanted.unwrap_or(offline::GRACE))? {
                Some(ended) => out.print(&ended, offline::Ended::text),
                None => Err(e.into()),
            };
        }
        Err(e) => return Err(e.into()),
    };
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
