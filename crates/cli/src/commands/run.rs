//! `ballast vm run`: a VM is started, and its room waited for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_api::client::{Client, ClientError};
use ballast_api::{Accel, RebootAction, StartView, VmSpec, VmView};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::{Output, for_manager, given, pid, salt};
use crate::args::{AccelArg, RebootArg, RunArgs};
use crate::aside;
use crate::failure::Failure;
use crate::figures::size;

pub async fn run(client: &Client, args: RunArgs, out: Output) -> Result<(), Failure> {
    let spec = spec(args)?;
    // The manager knows the deadline; with it goes the time that QEMU may take.
    let patient = client.clone().with_timeout(LONGEST);
    let start = patient.run(&spec);
    tokio::pin!(start);
    let signals = |kind| signal(kind).map_err(|source| Failure::Io { what: "signals", source });
    let (mut interrupt, mut terminate) =
        (signals(SignalKind::interrupt())?, signals(SignalKind::terminate())?);
    let watch = watch(client, &spec.name, out);
    tokio::pin!(watch);
    let vm = tokio::select! {
        vm = &mut start => vm?,
        error = &mut watch => return Err(error.into()),
        _ = interrupt.recv() => return Err(Failure::NotAwaited { name: spec.name.clone() }),
        _ = terminate.recv() => return Err(Failure::NotAwaited { name: spec.name.clone() }),
    };
    out.print(&vm, started)
}

/// No start takes longer: the longest wait, and the start of QEMU.
const LONGEST: Duration = Duration::from_secs(86_400 + 120);
const LOOK: Duration = Duration::from_secs(1);
/// Whoever has much to do may take so long for one answer.
const ANSWER: Duration = Duration::from_secs(10);
/// As long as other commands wait for an answer.
const SILENT: Duration = Duration::from_secs(120);

/// Says on standard error what the start waits for, if it does; once, that nobody answers. Ends where nobody has for long.
async fn watch(client: &Client, name: &str, out: Output) -> ClientError {
    let mut silent_since = None;
    loop {
        tokio::time::sleep(LOOK).await;
        let begun = Instant::now();
        let error = match client.clone().with_timeout(ANSWER).starts().await {
            Ok(starts) => {
                silent_since = None;
                if let Some(start) = starts.iter().find(|start| start.name == name && !out.json) {
                    aside::line(waiting(start));
                }
                continue;
            }
            // That is an answer, too.
            Err(ClientError::Refused(_)) => {
                silent_since = None;
                continue;
            }
            Err(error) => error,
        };
        if silent_since.is_none() && !out.json {
            let what = "no answer of what it waits for; interrupt to wait no longer";
            aside::line(format!("{name}: {what}"));
        }
        let after = silent_since.get_or_insert(begun).elapsed();
        if after >= SILENT {
            return match error {
                ClientError::Timeout { socket, path, .. } => {
                    ClientError::Timeout { socket, path, after }
                }
                error => error,
            };
        }
    }
}

fn waiting(s: &StartView) -> String {
    let ahead = match s.ahead {
        0 => String::new(),
        ahead => format!(", after {} for VMs that came before", size(ahead)),
    };
    let freeing = match &s.freeing[..] {
        [] => "nothing is being freed".to_owned(),
        list => format!("being freed: {}", list.join("; ")),
    };
    let limit = s.wait_s.map_or(String::new(), |most| format!(" of {most:.0} s"));
    format!(
        "{}: waits for {} beside the {} kept free{ahead}: {} missing, {:.0} s{limit}; {freeing}",
        s.name,
        size(s.need),
        size(s.keep),
        size(s.missing),
        s.waited_s,
    )
}

fn spec(args: RunArgs) -> Result<VmSpec, Failure> {
    if args.min > args.max {
        return Err(Failure::Usage(format!("--min {} is above --max {}", args.min, args.max)));
    }
    Ok(VmSpec {
        name: args.name,
        max: args.max.0,
        hotplug: args.hotplug.0,
        min: args.min.0,
        shares: args.shares,
        tax: args.tax,
        overhead: args.overhead.map(|b| b.0),
        pool: args.pool,
        salt: salt(args.salt)?,
        vcpus: args.vcpus,
        kernel: for_manager(&args.kernel)?,
        initrd: args.initrd.as_deref().map(for_manager).transpose()?,
        append: args.append,
        accel: match args.accel {
            AccelArg::Auto => Accel::Auto,
            AccelArg::Kvm => Accel::Kvm,
            AccelArg::Tcg => Accel::Tcg,
        },
        no_balloon: args.no_balloon,
        free_page_reporting: args.free_page_reporting,
        guest_agent: args.guest_agent.then_some(true),
        large_pages: args.large_pages,
        on_reboot: match args.on_reboot {
            RebootArg::Stop => RebootAction::Stop,
            RebootArg::Restart => RebootAction::Restart,
        },
        console: args.console.as_deref().map(for_manager).transpose()?,
        qemu: args.qemu.as_deref().map(program).transpose()?,
        extra: args.extra,
        wait_s: args.wait.map(|wait| wait.as_secs_f64()),
    })
}

/// A bare name is looked up in the manager's PATH; anything with a slash is a file of ours.
fn program(path: &Path) -> Result<PathBuf, Failure> {
    if path.components().count() > 1 || path.has_root() || path.starts_with(".") {
        for_manager(path)
    } else {
        Ok(path.to_owned())
    }
}

fn started(vm: &VmView) -> String {
    format!(
        "{}: {} on {}{}, files in {}\n{}",
        vm.name,
        vm.state,
        vm.accel,
        pid(vm),
        vm.folder.display(),
        given(vm)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its socket is there, and nobody reads what is sent to it.
    #[tokio::test(start_paused = true)]
    async fn whoever_answers_nothing_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let _hangs = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = watch(&Client::new(&socket), "a", Output { json: true }).await;
        let ClientError::Timeout { after, .. } = &error else { panic!("{error}") };
        assert!((SILENT..SILENT + ANSWER + LOOK).contains(after), "{error}");
    }

    #[test]
    fn programs_without_a_slash_stay_for_the_path() {
        assert_eq!(program(Path::new("qemu-kvm")).unwrap(), Path::new("qemu-kvm"));
        assert!(program(Path::new("./qemu-kvm")).unwrap().is_absolute());
        assert!(program(Path::new("bin/qemu")).unwrap().is_absolute());
    }
}
