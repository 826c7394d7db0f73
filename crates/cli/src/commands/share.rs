//! `ballast share`: what VMs share, and what any processes would save by it.

use std::collections::HashMap;

use ballast_api::client::Client;
use ballast_api::{HostView, VmView};
use ballast_estimate::{Claims, Estimate, EstimateError, Pace, Process};
use ballast_units::Bytes;
use serde::Serialize;

use super::Output;
use crate::args::EstimateArgs;
use crate::aside;
use crate::failure::{Failure, one_line};
use crate::figures::{frequency, pages_rate, percent, size};
use crate::parse::Target;
use crate::progress::Teller;
use crate::table::{self, columns, section};

#[derive(Serialize)]
struct Shared {
    host: HostView,
    vms: Vec<VmView>,
}

pub async fn ls(client: &Client, out: Output) -> Result<(), Failure> {
    let (host, vms) = tokio::try_join!(client.host(), client.vms())?;
    out.print(&Shared { host, vms }, |s| format!("{}{}", table::sharing(&s.host), vm_table(&s.vms)))
}

fn vm_table(vms: &[VmView]) -> String {
    let paged = || vms.iter().filter(|vm| !vm.sharing.domain.is_empty());
    if paged().next().is_none() {
        return "no VMs whose pages could be shared\n".to_owned();
    }
    let rows = paged().map(|vm| {
        let s = &vm.sharing;
        vec![
            vm.name.clone(),
            s.domain.clone(),
            size(s.shared),
            size(s.saved),
            size(vm.counters.zero_dropped),
            size(s.broken),
            frequency(Some(s.breaks_per_s)),
            pages_rate(s.scan_rate),
            format!("{:.1}%", s.cpu_percent),
        ]
    });
    let mut text = columns(
        &[
            ("NAME", false),
            ("DOMAIN", false),
            ("SHARED", true),
            ("SAVED", true),
            ("ZERO", true),
            ("BROKEN", true),
            ("BRK/S", true),
            ("SCAN", true),
            ("COST", true),
        ],
        rows,
    );
    for vm in paged() {
        if let Some(note) = &vm.sharing.note {
            text.push_str(&format!("{}: {}\n", vm.name, one_line(note)));
        }
    }
    text
}

/// What was found, and what is not in it.
#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    found: Estimate,
    left_out: Vec<LeftOut>,
}

/// A VM, or a process, that is in none of the sums.
#[derive(Serialize)]
struct LeftOut {
    pid: u32,
    vm: Option<String>,
    why: String,
}

pub async fn estimate(client: &Client, args: EstimateArgs, out: Output) -> Result<(), Failure> {
    let (processes, mut left_out) = open(client, &args).await?;
    let names: HashMap<u32, Option<String>> =
        processes.iter().map(|p| (p.pid(), p.vm().map(str::to_owned))).collect();
    let total = Bytes(processes.iter().map(|p| p.guest_ram().0).sum());
    // In JSON, what is on standard error is one error.
    let mut teller = (!out.json).then(Teller::new);
    let mut pace = Pace::new(args.rate_mib_s, total);
    let (found, ended) = ballast_estimate::estimate(processes, &mut pace, |progress| {
        if let Some(teller) = &mut teller {
            teller.tell(progress);
        }
    })?;
    drop(teller);
    if let (Some(pid), true) = (ended.first(), found.processes.is_empty()) {
        Err(EstimateError::Gone { pid: *pid })?;
    }
    left_out.extend(ended.into_iter().map(|pid| {
        let vm = names.get(&pid).cloned().flatten();
        LeftOut { pid, vm, why: "it ended while it was read".to_owned() }
    }));
    if !out.json {
        for LeftOut { pid, vm, why } in &left_out {
            let who = vm.clone().unwrap_or_else(|| format!("process {pid}"));
            aside::line(format_args!("{who}: left out: {why}"));
        }
    }
    out.print(&Found { found, left_out }, described)
}

/// The processes, each of which is known to be readable before the first is read, and the VMs of ballastd that are not among
/// them, where all are asked for.
async fn open(
    client: &Client,
    args: &EstimateArgs,
) -> Result<(Vec<Process>, Vec<LeftOut>), Failure> {
    let ask = args.targets.is_empty() || args.targets.iter().any(|t| matches!(t, Target::Vm(_)));
    let vms = if ask { client.vms().await? } else { Vec::new() };
    let mut claims = Claims::default();
    let mut open = |pid, vm| Process::open(pid, vm, args.min_size, &mut claims);
    let (mut processes, mut left_out) = (Vec::<Process>::new(), Vec::new());
    if args.targets.is_empty() {
        for vm in &vms {
            let Some(pid) = vm.pid else { continue };
            match open(pid, Some(vm.name.clone())) {
                Ok(process) => processes.push(process),
                // It has just ended, or was started with less; of several that map one another's RAM, one counts.
                Err(
                    e @ (EstimateError::Gone { .. }
                    | EstimateError::NoRam { .. }
                    | EstimateError::Counted { .. }),
                ) => left_out.push(LeftOut { pid, vm: Some(vm.name.clone()), why: e.to_string() }),
                Err(e) => return Err(e.into()),
            }
        }
    }
    for target in &args.targets {
        let (pid, name) = match target {
            Target::Pid(pid) => (*pid, None),
            Target::Vm(name) => {
                // The manager words what it does not know.
                let vm = match vms.iter().find(|vm| vm.name == *name) {
                    Some(vm) => vm.clone(),
                    None => client.vm(name).await?,
                };
                let gone = || Failure::NoProcess(name.clone());
                (vm.pid.ok_or_else(gone)?, Some(vm.name))
            }
        };
        if !processes.iter().any(|process| process.pid() == pid) {
            processes.push(open(pid, name)?);
        }
    }
    Ok((processes, left_out))
}

fn nothing(left_out: &[LeftOut]) -> String {
    match left_out {
        [] => "no VMs (name processes by their number: ballast share estimate PID...)\n".into(),
        _ => "none of the VMs could be read\n".into(),
    }
}

fn described(Found { found, left_out }: &Found) -> String {
    if found.processes.is_empty() {
        return nothing(left_out);
    }
    let part = |bytes: u64, of: u64| format!("{} ({})", size(bytes), percent(bytes, of));
    let rows = found.processes.iter().map(|p| {
        vec![
            p.pid.to_string(),
            p.vm.clone().unwrap_or_else(|| "-".to_owned()),
            size(p.guest_ram),
            size(p.present),
            part(p.zero, p.present),
            part(p.repeated_inside, p.present),
            size(p.shared_now),
        ]
    });
    let mut text = columns(
        &[
            ("PID", true),
            ("VM", false),
            ("GUEST RAM", true),
            ("PRESENT", true),
            ("ZERO", true),
            ("REPEATED INSIDE", true),
            ("SHARED NOW", true),
        ],
        rows,
    );
    let t = &found.total;
    let part = |bytes: u64| part(bytes, t.present);
    let count = match found.processes.len() {
        1 => "1 process".to_owned(),
        n => format!("{n} processes"),
    };
    let mut rows = vec![
        ("zero pages", format!("{}: dropped, whatever the salts", part(t.zero))),
        (
            "repeated inside a process",
            format!("{}: saved if each shares inside itself", part(t.repeated_inside)),
        ),
    ];
    if found.processes.len() > 1 {
        let across = part(t.repeated_across);
        rows.push((
            "repeated across them",
            format!("{across}: saved if all have one salt; those inside are among them"),
        ));
    }
    rows.push(("zero and repeated", part(t.zero + t.repeated_across)));
    if !found.most_repeated.is_empty() {
        let copies: Vec<String> =
            found.most_repeated.iter().map(|m| m.copies.to_string()).collect();
        rows.push(("most copies of a page", copies.join(", ")));
    }
    if t.unread > 0 {
        rows.push(("gone before it was read", size(t.unread)));
    }
    text.push('\n');
    text += &section(&format!("{count}, {} present", size(t.present)), &rows);
    text
}
