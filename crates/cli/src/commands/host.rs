//! `ballast host`: the host as the manager sees it, and changes of what holds for all of it.

use ballast_api::client::Client;
use ballast_api::{HostChange, HostCounters, HostView, JournalView, LocationState};

use super::Output;
use super::show::compression;
use crate::args::HostSetArgs;
use crate::failure::{Failure, one_line};
use crate::figures::{age, frequency, pages_rate, percent, size, vms};
use crate::table::{self, columns, section};

pub async fn show(client: &Client, out: Output) -> Result<(), Failure> {
    let host = client.host().await?;
    out.print(&host, summary)
}

pub async fn set(client: &Client, args: HostSetArgs, out: Output) -> Result<(), Failure> {
    let change = HostChange {
        tax: args.tax,
        no_tax: args.no_tax,
        budget: args.budget.map(|b| b.0),
        no_budget: args.no_budget,
    };
    let host = client.change_host(&change).await?;
    out.print(&host, |h| {
        format!(
            "host: budget {}, {} free, tax {}, state {}\n",
            size(h.budget),
            size(h.free),
            h.tax,
            h.state
        )
    })
}

fn summary(h: &HostView) -> String {
    let state = h.state;
    let meaning = table::host_state_meaning(h.state);
    let waiting = match h.waiting {
        0 => String::new(),
        n => format!(" ({n} not taken over yet)"),
    };
    let mut text = format!(
        "state {state}: {meaning}\n\
         {} of {} free; {}{waiting}, overcommitted {:.2} times (peak {:.2})\n\n",
        size(h.free),
        size(h.budget),
        vms(h.vms),
        h.overcommit,
        h.overcommit_peak
    );
    text += &machine_memory(h);
    text += "\nstates of free memory\n";
    text += &thresholds(h);
    text += &nodes(h);
    text += &refused(h);
    text += "\n";
    text += &totals(&h.counters);
    text += "\n";
    text += &section("swap", &[("reserved", size(h.swap_reserved)), ("used", size(h.swap_used))]);
    text += &locations(h);
    text += &run_dir(h);
    text += "\n";
    text += &sharing(h);
    text += "\n";
    text += &compression(&h.compression);
    text += "\n";
    text += &journal(&h.journal);
    text += "\n";
    text += &manager(h);
    text
}

fn machine_memory(h: &HostView) -> String {
    let share = |bytes: u64| format!("{} ({})", size(bytes), percent(bytes, h.budget));
    section(
        "machine memory",
        &[
            ("budget", size(h.budget)),
            ("consumed by guests", share(h.consumed)),
            ("overhead", share(h.overhead)),
            ("free", share(h.free)),
            ("used at most", share(h.peak_used)),
            ("in use, as measured", share(h.measured_used)),
            ("measured at most", share(h.measured_peak)),
        ],
    )
}

fn totals(c: &HostCounters) -> String {
    section(
        "totals since the start",
        &[
            ("ballooned", size(c.ballooned)),
            ("swapped out", size(c.swapped_out)),
            ("swapped in", size(c.swapped_in)),
            ("faults served", c.faults.to_string()),
            ("allocations that waited", c.waits.to_string()),
            ("allocations blocked", c.blocks.to_string()),
        ],
    )
}

fn manager(h: &HostView) -> String {
    section(
        "manager",
        &[
            ("version", format!("{} (pid {})", h.version, h.pid)),
            ("up", age(h.uptime_s)),
            ("CPU time", format!("{:.1} s", h.manager_cpu_s)),
            ("idle CPUs kept awake", format!("{:.1} s", h.awake_s)),
            ("memory", manager_memory(h)),
            ("default tax", h.tax.to_string()),
            ("last VM taken in runs on", h.accel.clone()),
        ],
    )
}

fn run_dir(h: &HostView) -> String {
    let Some(room) = &h.run_dir else { return String::new() };
    let mut rows = vec![
        ("folder", room.path.display().to_string()),
        ("size", size(room.size)),
        ("free", format!("{} ({})", size(room.free), percent(room.free, room.size))),
    ];
    rows.extend(room.note.iter().map(|note| ("note", note.clone())));
    format!("\n{}", section("run folder", &rows))
}

fn manager_memory(h: &HostView) -> String {
    let may = if h.manager_locked { "locked" } else { "the host may swap it out" };
    format!("{}, {may}", size(h.manager_rss))
}

fn journal(j: &JournalView) -> String {
    if !j.enabled {
        return "journal\n  none is kept\n".to_owned();
    }
    let mut rows = vec![
        ("folder", j.folder.display().to_string()),
        (
            "size",
            format!("{} of at most {}, in {} files", size(j.bytes), size(j.limit), j.segments),
        ),
        ("turns written", j.written.to_string()),
        ("turns lost", j.lost.to_string()),
    ];
    if let Some(trouble) = &j.trouble {
        rows.push(("not written now", trouble.clone()));
    }
    section("journal", &rows)
}

fn nodes(h: &HostView) -> String {
    if h.nodes.is_empty() {
        return String::new();
    }
    let rows = h.nodes.iter().map(|n| {
        vec![
            format!("  {}", n.id),
            size(n.size),
            size(n.free),
            n.state.to_string(),
            size(n.missing),
            n.bound.to_string(),
        ]
    });
    let table = columns(
        &[
            ("  NODE", false),
            ("SIZE", true),
            ("FREE", true),
            ("STATE", false),
            ("MISSING", true),
            ("BOUND VMS", true),
        ],
        rows,
    );
    format!("\nNUMA nodes\n{table}")
}

fn refused(h: &HostView) -> String {
    if h.refused.is_empty() {
        return String::new();
    }
    let unknown = || "-".to_owned();
    let rows = h.refused.iter().map(|one| {
        vec![
            format!("  {}", one.name.clone().unwrap_or_else(unknown)),
            one.pid.to_string(),
            one.size.map_or_else(unknown, size),
            size(one.resident),
            age(one.for_s),
            one_line(&one.why),
        ]
    });
    let table = columns(
        &[
            ("  NAME", false),
            ("PID", true),
            ("SIZE", true),
            ("RESIDENT", true),
            ("SINCE", true),
            ("WHY", false),
        ],
        rows,
    );
    format!("\nVMMs that were refused, and run beside the budget\n{table}")
}

fn locations(h: &HostView) -> String {
    if h.swap_locations.is_empty() {
        return String::new();
    }
    let rows = h.swap_locations.iter().map(|l| {
        let state = match l.state {
            LocationState::Good => "good",
            LocationState::Failed => "failed: not written to",
            LocationState::Missing => "missing",
        };
        vec![
            format!("  {}", l.path.display()),
            l.priority.to_string(),
            size(l.reserved),
            size(l.used),
            size(l.free),
            l.write_errors.to_string(),
            l.read_errors.to_string(),
            state.to_owned(),
        ]
    });
    columns(
        &[
            ("  LOCATION", false),
            ("PRIORITY", true),
            ("RESERVED", true),
            ("USED", true),
            ("FREE", true),
            ("WRITE ERRORS", true),
            ("READ ERRORS", true),
            ("STATE", false),
        ],
        rows,
    )
}

fn sharing(h: &HostView) -> String {
    let s = &h.sharing;
    let share = |bytes: u64| format!("{} ({})", size(bytes), percent(bytes, h.budget));
    section(
        "page sharing",
        &[
            ("looks for pages", if s.enabled { "yes" } else { "no" }.to_owned()),
            ("shared", share(s.shared)),
            ("common", share(s.common)),
            ("saved", share(s.saved)),
            ("zero pages dropped", size(s.zero_dropped)),
            ("broken", size(s.broken)),
            ("breaks", format!("{} ({})", s.breaks, frequency(Some(s.breaks_per_s)))),
            ("pages scanned", format!("{} ({})", s.scanned, pages_rate(s.scan_rate))),
            ("CPU time", format!("{:.1} s ({:.1}% of a core now)", s.cpu_s, s.cpu_percent)),
            ("share tables", size(s.metadata)),
            ("mappings of all VMMs", s.mappings.to_string()),
        ],
    )
}

fn thresholds(h: &HostView) -> String {
    let edge = |bytes: Option<u64>| bytes.map_or("-".to_owned(), size);
    let rows = table::edges(h).into_iter().map(|e| {
        let here = if e.state == h.state { "<- now" } else { "" };
        vec![
            format!("  {}", e.state),
            edge(e.begins_below),
            edge(e.ends_at),
            table::host_state_meaning(e.state).to_owned(),
            here.to_owned(),
        ]
    });
    columns(
        &[
            ("  STATE", false),
            ("BEGINS BELOW", true),
            ("ENDS AT", true),
            ("IN IT", false),
            ("", false),
        ],
        rows,
    )
}
