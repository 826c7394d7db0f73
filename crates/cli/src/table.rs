//! Tables for people: plain columns, two blanks apart, numbers to the right.

use ballast_api::{
    BalloonHealth, HostView, Management, Mode, RefusedView, RunState, StateName, VmView,
};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::failure::one_line;
use crate::figures::{age, frequency, pages_rate, size};

/// The columns of `vm ls`: heading, and whether it holds a number.
const COLUMNS: [(&str, bool); 14] = [
    ("NAME", false),
    ("STATE", false),
    ("MODE", false),
    ("MAX", true),
    ("MIN", true),
    ("SHARES", true),
    ("TARGET", true),
    ("CONSUMED", true),
    ("LARGE", true),
    ("ACTIVE", true),
    ("BALLOON", true),
    ("SWAPPED", true),
    ("SHARED", true),
    ("SAVED", true),
];

/// Columns under headings; `true` marks a column of numbers. Ends with a newline.
pub fn columns(headings: &[(&str, bool)], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|(h, _)| *h));
    for row in rows {
        table.add_row(row);
    }
    for (i, (_, number)) in headings.iter().enumerate() {
        if let Some(column) = table.column_mut(i) {
            column.set_padding((0, 2));
            if *number {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }
    table.trim_fmt() + "\n"
}

/// The table of `vm ls`, and below it why VMs are not fully managed.
pub fn vms(views: &[VmView]) -> String {
    if views.is_empty() {
        return "no VMs (start one with: ballast vm run, or ballast vm attach)\n".to_owned();
    }
    let mut text = columns(&COLUMNS, views.iter().map(vm_row));
    for vm in views {
        if let Some(reason) = unpaged_reason(&vm.management) {
            text.push_str(&format!("{}: {}: {reason}\n", vm.name, vm.management.mode));
        }
        if vm.state == RunState::Unreadable {
            let trouble = vm.trouble.as_deref().unwrap_or("its pages can be read again");
            text.push_str(&format!("{}: unreadable: {}\n", vm.name, one_line(trouble)));
        } else if vm.stalled {
            let trouble = vm.trouble.as_deref().unwrap_or("a fault of its guest is not served");
            text.push_str(&format!("{}: stands still: {}\n", vm.name, one_line(trouble)));
        }
    }
    text
}

/// A line for each VMM that was refused at its start and runs on.
pub fn refused(all: &[RefusedView]) -> String {
    let line = |one: &RefusedView| {
        let name = one.name.as_deref().unwrap_or("a VMM");
        let (pid, held, why) = (one.pid, size(one.resident), one_line(&one.why));
        let ago = age(one.for_s);
        format!("{name} (pid {pid}): runs without Ballast with {held}, refused {ago} ago: {why}\n")
    };
    all.iter().map(line).collect()
}

fn vm_row(vm: &VmView) -> Vec<String> {
    vec![
        vm.name.clone(),
        vm.state.to_string(),
        vm.management.mode.to_string(),
        size(vm.params.max),
        size(vm.params.min),
        vm.params.shares.to_string(),
        size(vm.memory.target),
        size(vm.memory.consumed),
        size(vm.memory.large),
        active(vm),
        balloon(vm),
        size(vm.memory.swapped),
        size(vm.sharing.shared),
        size(vm.sharing.saved),
    ]
}

fn active(vm: &VmView) -> String {
    estimate(vm).map_or("-".to_owned(), size)
}

/// Active memory, bytes; None while nothing is sampled, as of a VM that is not paged: the policy takes the whole of its
/// memory for active then, which nobody measured.
pub fn estimate(vm: &VmView) -> Option<u64> {
    (vm.active.periods > 0).then_some(vm.active.estimate)
}

/// The host's page sharing in one line.
pub fn sharing(host: &HostView) -> String {
    let s = &host.sharing;
    format!(
        "sharing {}  shared {}  common {}  saved {}  zero {}  breaks {}  scan {}  cost {:.1}%\n",
        if s.enabled { "on" } else { "off" },
        size(s.shared),
        size(s.common),
        size(s.saved),
        size(s.zero_dropped),
        frequency(Some(s.breaks_per_s)),
        pages_rate(s.scan_rate),
        s.cpu_percent,
    )
}

/// What the balloon holds, with its health where that is not good.
pub fn balloon(vm: &VmView) -> String {
    let held = size(balloon_size(vm));
    match vm.balloon.health {
        BalloonHealth::Healthy => held,
        // One that is out of reach may hold memory all the same.
        BalloonHealth::Missing if balloon_size(vm) == 0 => "none".to_owned(),
        BalloonHealth::Missing => format!("{held} unreachable"),
        sick => format!("{held} {sick}"),
    }
}

/// Bytes in the balloon: the manager's own books where it hands out the pages, else what QEMU said last.
pub fn balloon_size(vm: &VmView) -> u64 {
    vm.memory.ballooned
}

/// Why a VM is not paged; None for a paged one.
/// On one line: names that a guest, a VMM or a file chose are in it.
pub fn unpaged_reason(management: &Management) -> Option<String> {
    match management.mode {
        Mode::Paged => None,
        Mode::BalloonOnly | Mode::Unmanaged => {
            Some(one_line(management.reason.as_deref().unwrap_or("no reason given")))
        }
    }
}

/// What the manager does in a state of free memory (OSDI'02 s.6.3).
pub fn host_state_meaning(state: StateName) -> &'static str {
    match state {
        StateName::High => "nothing is reclaimed, but for starts and limits",
        StateName::Soft => "ballooning",
        StateName::Hard => "ballooning and swapping",
        StateName::Low => "ballooning and swapping, and VMs above target wait",
    }
}

/// Where a state of free machine memory begins and ends, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edges {
    pub state: StateName,
    /// Free memory that falls below it brings the host from the state above into this one; None
    /// for the highest.
    pub begins_below: Option<u64>,
    /// Free memory that rises to it brings the host back to the state above.
    pub ends_at: Option<u64>,
}

/// The states from plenty to need. The API tells of each state how it is left downwards and come
/// back to, which are the begin and the end of the next lower one.
pub fn edges(host: &HostView) -> Vec<Edges> {
    let mut thresholds = host.thresholds.clone();
    thresholds.sort_by_key(|t| t.state);
    let above = std::iter::once(None).chain(thresholds.iter().map(Some));
    let pairs = thresholds.iter().zip(above);
    pairs
        .map(|(t, above)| Edges {
            state: t.state,
            begins_below: above.map(|a| a.lower),
            ends_at: above.map(|a| a.upper),
        })
        .collect()
}

/// Used machine memory: all of the budget that is not free.
pub fn used(host: &HostView) -> u64 {
    host.budget.saturating_sub(host.free)
}

/// Lines "  key   value" under a title, keys aligned.
pub fn section(title: &str, rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(k, _)| k.chars().count()).max().unwrap_or(0);
    let mut text = format!("{title}\n");
    for (key, value) in rows {
        text.push_str(format!("  {key:<width$}  {value}").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_right_aligned_and_nothing_trails() {
        let rows = vec![vec!["a".to_owned(), "1".to_owned()], vec!["bb".into(), "22".into()]];
        assert_eq!(columns(&[("N", false), ("V", true)], rows), "N    V\na    1\nbb  22\n");
    }

    #[test]
    fn sections_align_their_values() {
        let text = section("memory", &[("a", "1".into()), ("long", "2".into())]);
        assert_eq!(text, "memory\n  a     1\n  long  2\n");
    }
}
