//! `ballast vm show`: all about one VM.

use ballast_api::client::Client;
use ballast_api::{
    CompressionView, FaultTimesView, GuestStats, MemoryView, Mode, PolicyInputs, ToolName,
    ToolsView, VmView,
};

use super::Output;
use crate::failure::{Failure, one_line};
use crate::figures::{age, frequency, pages_rate, percent, short_count, size};
use crate::table::{self, section};

pub async fn run(client: &Client, name: &str, out: Output) -> Result<(), Failure> {
    let vm = client.vm(name).await?;
    out.print(&vm, described)
}

fn described(vm: &VmView) -> String {
    let parts = [
        heading(vm),
        parameters(vm),
        hotplug(vm),
        memory(vm),
        active(vm),
        inputs(vm),
        balloon(vm),
        tools(&vm.tools),
        sharing(vm),
        compression(&vm.compression),
        guest(vm.guest.as_ref()),
        totals(vm),
    ];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
}

fn heading(vm: &VmView) -> String {
    let pid = vm.pid.map_or("-".to_owned(), |pid| pid.to_string());
    let mut rows = vec![
        ("state", vm.state.to_string()),
        ("mode", vm.management.mode.to_string()),
        ("up", vm.vmm_uptime_s.map_or_else(|| "not known".to_owned(), age)),
        ("managed for", format!("{}, by this ballastd", age(vm.uptime_s))),
        ("runs on", vm.accel.clone()),
        ("pid", pid),
        ("folder", vm.folder.display().to_string()),
    ];
    if let Some(reason) = table::unpaged_reason(&vm.management) {
        rows.insert(2, ("not paged", reason));
    }
    if let Some(trouble) = &vm.trouble {
        rows.insert(2, ("trouble", one_line(trouble)));
    }
    section(&vm.name, &rows)
}

fn parameters(vm: &VmView) -> String {
    let p = &vm.params;
    section(
        "parameters",
        &[
            ("size", size(p.size)),
            ("min", size(p.min)),
            ("max", size(p.max)),
            ("shares", p.shares.to_string()),
            ("tax", p.tax.to_string()),
            ("pool", p.pool.clone().unwrap_or_else(|| "none".to_owned())),
        ],
    )
}

/// Of a VM into which memory can be plugged.
fn hotplug(vm: &VmView) -> String {
    let Some(h) = vm.hotplug else { return String::new() };
    let plugged = h.plugged.map_or_else(|| "not known yet".to_owned(), size);
    section(
        "memory to plug",
        &[
            ("at most", size(h.size)),
            ("requested", size(h.requested)),
            ("plugged", plugged),
            ("taken back", size(h.withheld)),
        ],
    )
}

fn memory(vm: &VmView) -> String {
    let m = &vm.memory;
    let part = |bytes: u64| format!("{} ({})", size(bytes), percent(bytes, vm.params.size));
    section(
        "memory",
        &[
            ("target", part(m.target)),
            ("consumed", part(m.consumed)),
            ("untouched", part(m.untouched)),
            ("resident", part(m.resident)),
            ("in large pages", part(m.large)),
            ("shared", part(m.shared)),
            ("broken", part(m.broken)),
            ("compressed", part(m.compressed)),
            ("filled", part(m.filled)),
            ("staged", part(m.staged)),
            ("swapped", part(m.swapped)),
            ("ballooned", part(m.ballooned)),
            ("swap target", size(m.swap_target)),
            ("swap reserved", size(m.swap_reserved)),
            ("swap not writable", size(m.swap_retired)),
            ("overhead", size(m.overhead)),
            ("VMM's own memory", vmm(vm.management.mode, m)),
        ],
    )
}

fn vmm(mode: Mode, m: &MemoryView) -> String {
    match m.vmm_booked {
        // What its guest has of its process is not known, and all of that is booked.
        0 if m.vmm_overhead == 0 && mode != Mode::Paged => "in its overhead".to_owned(),
        0 => format!("{} (not in the budget)", size(m.vmm_overhead)),
        booked => format!("{} ({} booked in the budget)", size(m.vmm_overhead), size(booked)),
    }
}

fn active(vm: &VmView) -> String {
    let a = &vm.active;
    let sampled = |bytes| table::estimate(vm).map_or("-".to_owned(), |_| size(bytes));
    let estimate = table::estimate(vm)
        .map_or("-".to_owned(), |bytes| format!("{} (the largest of the three)", size(bytes)));
    section(
        "active memory",
        &[
            ("estimate", estimate),
            ("slow average", sampled(a.slow)),
            ("fast average", sampled(a.fast)),
            ("current", sampled(a.current)),
            ("periods", a.periods.to_string()),
        ],
    )
}

/// What policies other than the default read.
fn inputs(vm: &VmView) -> String {
    let i = &vm.inputs;
    let pressure = match (&i.pressure, &i.agent_trouble) {
        (Some(p), _) => format!(
            "some {:.1}%, full {:.1}% of 10 s ({:.0} s ago)",
            100.0 * p.some,
            100.0 * p.full,
            p.age_s
        ),
        (None, Some(trouble)) => format!("none: {trouble}"),
        (None, None) => "none reported".to_owned(),
    };
    let mut rows = vec![("misses per second", misses(i)), ("guest's pressure", pressure)];
    if let Some(missing) = &i.missing {
        rows.push(("missing", missing.clone()));
    }
    section("inputs of other policies", &rows)
}

/// A miss curve in short: with nothing, and with quarters of what is active.
fn misses(inputs: &PolicyInputs) -> String {
    let Some(last) = inputs.curve.last() else { return "no curve yet".to_owned() };
    if last.memory == 0 {
        return "none".to_owned();
    }
    let quarters = (0..=4).map(|quarter| last.memory / 4 * quarter);
    let told = quarters.filter_map(|memory| {
        Some(format!("{} with {}", short_count(inputs.misses_at(memory)?), size(memory)))
    });
    told.collect::<Vec<_>>().join(", ")
}

fn balloon(vm: &VmView) -> String {
    let b = &vm.balloon;
    section(
        "balloon",
        &[
            ("health", b.health.to_string()),
            ("target", size(b.target)),
            ("reported by QEMU", size(b.reported)),
            ("limit", size(b.limit)),
        ],
    )
}

/// "balloon  12 ms/s per 1000 pages".
fn tools(t: &ToolsView) -> String {
    let cost = |ms: Option<f64>| match ms {
        None => "not measured lately".to_owned(),
        Some(ms) if ms >= 10.0 => format!("{ms:.0} ms/s per 1000 pages"),
        Some(ms) => {
            let text = format!("{ms:.3}");
            let text = text.trim_end_matches('0').trim_end_matches('.');
            format!("{text} ms/s per 1000 pages")
        }
    };
    let first = match t.first {
        ToolName::Balloon => "the balloon",
        ToolName::Paging => "paging",
    };
    let mut rows = vec![
        ("balloon", cost(t.balloon_ms)),
        ("paging", cost(t.paging_ms)),
        ("used first", format!("{first}: {}", t.why)),
    ];
    if let Some(ceiling) = t.ceiling {
        rows.push(("exchanged for paging", format!("the balloon, next down to {}", size(ceiling))));
    }
    section("what its tools cost", &rows)
}

fn sharing(vm: &VmView) -> String {
    let s = &vm.sharing;
    if s.domain.is_empty() {
        return "page sharing\n  none, since it is not paged\n".to_owned();
    }
    let mut rows = vec![
        ("domain", s.domain.clone()),
        ("shared", format!("{} ({})", size(s.shared), percent(s.shared, vm.params.size))),
        ("saved", format!("{} ({})", size(s.saved), percent(s.saved, vm.params.size))),
        ("zero pages dropped", size(vm.counters.zero_dropped)),
        ("broken", size(s.broken)),
        ("breaks", format!("{} ({})", s.breaks, frequency(Some(s.breaks_per_s)))),
        ("pages scanned", format!("{} ({})", s.scanned, pages_rate(s.scan_rate))),
        ("CPU time", format!("{:.1} s ({:.1}% of a core now)", s.cpu_s, s.cpu_percent)),
        ("mappings of the VMM", s.mappings.to_string()),
    ];
    if let Some(note) = &s.note {
        rows.push(("held back", one_line(note)));
    }
    section("page sharing", &rows)
}

/// The same for a VM and for the host.
pub fn compression(c: &CompressionView) -> String {
    section(
        "compression",
        &[
            ("compressed", size(c.compressed)),
            ("one number a page", size(c.filled)),
            ("cache", size(c.cache)),
            (
                "cache may take",
                format!("{}, {} at most", size(c.cache_limit_now), size(c.cache_limit)),
            ),
            ("in use of the cache", percent(c.cache_used, c.cache)),
            ("compressed in all", size(c.stored)),
            ("brought back", size(c.restored)),
            ("moved on to swap", size(c.written_back)),
            ("not compressible", size(c.incompressible)),
        ],
    )
}

fn guest(stats: Option<&GuestStats>) -> String {
    let Some(g) = stats else {
        return "guest statistics\n  none sent\n".to_owned();
    };
    let bytes = |v: Option<u64>| v.map_or("-".to_owned(), size);
    section(
        "guest statistics",
        &[
            ("total", bytes(g.total)),
            ("free", bytes(g.free)),
            ("available", bytes(g.available)),
            ("disk caches", bytes(g.disk_caches)),
            ("swapped in", bytes(g.swap_in)),
            ("swapped out", bytes(g.swap_out)),
            ("major faults", g.major_faults.map_or("-".to_owned(), |n| n.to_string())),
            ("age", format!("{} s", g.age_s)),
        ],
    )
}

/// Half, 99% and 99.9% of the faults that were served at once were so within so long.
fn fault_times(times: &FaultTimesView) -> String {
    let within = |part: f64| match times.within_us(part) {
        Some(us) => format!("{us} us"),
        None => "longer".to_owned(),
    };
    if times.total() == 0 {
        return "none".to_owned();
    }
    if !times.is_known() {
        return "not known: this ballastd is of another version, and counts otherwise".to_owned();
    }
    let [half, most, nearly] = [0.5, 0.99, 0.999].map(within);
    format!("50% within {half}, 99% within {most}, 99.9% within {nearly}")
}

fn totals(vm: &VmView) -> String {
    let c = &vm.counters;
    section(
        "totals since this ballastd has it",
        &[
            ("faults served", c.faults.to_string()),
            ("fault service", fault_times(&vm.fault_times)),
            ("swapped in", size(c.swapped_in)),
            ("swapped out", size(c.swapped_out)),
            (
                "read ahead",
                format!("{}, {} of it wanted", size(c.read_ahead), size(c.read_ahead_hits)),
            ),
            ("with neighbours", size(c.brought_around)),
            ("ballooned", size(c.ballooned)),
            ("large pages", {
                let (fills, breaks, made) = (c.large_fills, c.large_breaks, c.large_collapses);
                format!("{fills} handed out, {breaks} broken, {made} made again")
            }),
            ("samples touched", c.sampled.to_string()),
            ("waits for memory", c.waits.to_string()),
            ("blocks", c.blocks.to_string()),
            ("faults waited", format!("{:.1} s, for memory or anything else but swap", c.wait_s)),
            ("CPU time of its VMM", format!("{:.1} s since the VMM's start", c.cpu_s)),
        ],
    )
}

#[cfg(test)]
mod tests {
    use ballast_api::MissPoint;

    use super::*;

    #[test]
    fn a_curve_is_told_at_quarters_of_what_is_active() {
        let told = |points: &[(u64, f64)]| {
            let point = |&(mib, misses_per_s)| MissPoint { memory: mib << 20, misses_per_s };
            misses(&PolicyInputs {
                curve: points.iter().map(point).collect(),
                ..PolicyInputs::default()
            })
        };
        assert_eq!(told(&[]), "no curve yet");
        assert_eq!(told(&[(0, 0.0)]), "none");
        let at = |count: f64, mib: u64| format!("{} with {}", short_count(count), size(mib << 20));
        let expected = [at(900.0, 0), at(500.0, 10), at(100.0, 20), at(50.0, 30), at(0.0, 40)];
        assert_eq!(told(&[(0, 900.0), (20, 100.0), (40, 0.0)]), expected.join(", "));
    }
}
