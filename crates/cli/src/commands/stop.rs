//! `ballast vm stop`: a VM is ended, by its record where no manager runs.

use std::path::Path;
use std::time::{Duration, Instant};

use ballast_api::client::{Client, ClientError};
use ballast_api::layout::API_SOCKET;
use ballast_api::record::ProcessRecord;
use ballast_api::{ErrorCode, VmView};
use ballast_offline::{self as offline, End, Ended};
use serde::Serialize;

use super::Output;
use crate::args::StopArgs;
use crate::aside;
use crate::failure::Failure;
use crate::figures::{age, size};

/// How long the guest may take to power itself off unless told otherwise.
const GRACE: Duration = Duration::from_secs(30);
/// What the manager may need beyond the grace to end a VMM and release its memory.
const RELEASE: Duration = Duration::from_secs(60);

/// How long a manager may take to come back: one that is started again asks guests to power off, which nobody else can.
const COMES_BACK: Duration = Duration::from_secs(5);
/// How many that leave are asked: what breaks off time and again does not leave.
const MANAGERS: u32 = 5;
/// After which that is told.
const TOLD: Duration = Duration::from_secs(1);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(200);

pub async fn run(client: Client, args: StopArgs, out: Output) -> Result<(), Failure> {
    let wanted = if args.force { Some(Duration::ZERO) } else { args.grace };
    let grace = wanted.unwrap_or(GRACE);
    // Of the manager of that folder, if one runs there: what another has of that name is another VM.
    let of_folder = args.run_dir.as_deref().map(|dir| Client::new(dir.join(API_SOCKET)));
    let client = of_folder.unwrap_or(client).with_timeout(grace + RELEASE);
    let run_dir = client.socket().parent().unwrap_or(Path::new("."));
    // Before anything is asked: whether it has ended, when nobody knows it any more, that process tells.
    let known = ProcessRecord::load(run_dir, &args.name).ok().flatten();
    let begun = Instant::now();
    let mut answer = ask(&client, &args.name, grace, out).await;
    // One that leaves its VMs to the next takes with it that this one was to end.
    let mut left = 0;
    while answer.as_ref().is_err_and(has_broken_off) && begun.elapsed() < grace && left < MANAGERS {
        if left == 0 && !out.json {
            aside::line(format_args!("ballastd has left: asking the next one"));
        }
        left += 1;
        tokio::time::sleep(LOOK).await;
        let rest = grace.saturating_sub(begun.elapsed());
        answer = ask(&client, &args.name, rest, out).await;
    }
    let vm = match answer {
        Ok(vm) => vm,
        Err(e) if left > 0 && is_unknown(&e) && known.is_some_and(has_ended) => {
            let ended = EndedMeanwhile { name: args.name, ended: "while ballastd was replaced" };
            return out.print(&ended, |e| format!("{}: ended, {}\n", e.name, e.ended));
        }
        Err(e) if e.is_no_manager() => {
            return match offline::stop(run_dir, &args.name, wanted.unwrap_or(offline::GRACE))? {
                Some(ended) => out.print(&ended, ended_text),
                None => Err(Failure::Unnoted { unreachable: e, run_dir: run_dir.to_owned() }),
            };
        }
        Err(e) => return Err(e.into()),
    };
    out.print(&vm, |vm| {
        if let (None, Some(how)) = (vm.pid, &vm.ended) {
            // It never was.
            return format!("{}: {how}\n", vm.name);
        }
        let how = vm.ended.as_ref().map_or(String::new(), |how| format!("; {how}"));
        format!(
            "{}: stopped{}; it held {} of memory and {} of swap{how}\n",
            vm.name,
            vm.vmm_uptime_s.map_or_else(String::new, |up| format!(" after {}", age(up))),
            size(vm.memory.consumed),
            size(vm.memory.swapped)
        )
    })
}

/// What is told of a VM that had ended before the next manager came.
#[derive(Serialize)]
struct EndedMeanwhile {
    name: String,
    ended: &'static str,
}

/// Asks the manager to end a VM; where none answers that could, one is waited for.
async fn ask(
    client: &Client,
    name: &str,
    grace: Duration,
    out: Output,
) -> Result<VmView, ClientError> {
    let mut answer = client.stop(name, grace).await;
    let run_dir = client.socket().parent().unwrap_or(Path::new("."));
    if answer.as_ref().is_err_and(ClientError::is_no_manager)
        && !grace.is_zero()
        && matches!(ProcessRecord::load(run_dir, name), Ok(Some(_)))
    {
        let (begun, at_most) = (Instant::now(), COMES_BACK.min(grace / 2));
        let mut told = false;
        while begun.elapsed() < at_most && answer.as_ref().is_err_and(ClientError::is_no_manager) {
            tokio::time::sleep(LOOK.min(at_most)).await;
            if begun.elapsed() >= TOLD && !std::mem::replace(&mut told, true) {
                let s = at_most.as_secs_f64();
                if !out.json {
                    aside::line(format_args!(
                        "no ballastd answers: waiting up to {s} s for one to come back"
                    ));
                }
            }
            answer = client.stop(name, grace).await;
        }
    }
    answer
}

/// Whether a manager was there, and left before it was done.
fn has_broken_off(error: &ClientError) -> bool {
    matches!(error, ClientError::Broken { .. })
}

fn is_unknown(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused(body) if body.code == ErrorCode::NotFound)
}

fn has_ended(process: ProcessRecord) -> bool {
    process.is_alive().is_ok_and(|alive| !alive)
}

fn ended_text(ended: &Ended) -> String {
    let Ended { name, pid, .. } = ended;
    let how = match ended.end {
        End::Gone => "had ended already".to_owned(),
        End::Asked => "was told to end (SIGTERM), and has".to_owned(),
        End::Killed if ended.grace_ms == 0 => "was killed".to_owned(),
        End::Killed => {
            let s = ended.grace_ms as f64 / 1e3;
            format!("did not obey SIGTERM within {s} s, as one that waits in a page fault; killed")
        }
    };
    format!(
        "{name}: no ballastd runs: its VMM (pid {pid}) {how}; the next ballastd clears its files\n"
    )
}
