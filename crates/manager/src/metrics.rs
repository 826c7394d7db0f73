//! Prometheus text of what the API shows.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use ballast_api::{
    CompressionView, HostView, HotplugView, JournalView, NodeView, RunDirView, VmView,
};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};

use crate::fault_times::FaultTimes;
use crate::manager::{Failure, Manager};
use crate::views;

const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Prometheus and OpenMetrics text.
///
/// # Errors
/// They cannot be encoded.
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = TYPE, body = String)))]
pub async fn serve(State(manager): State<Arc<Manager>>) -> Result<impl IntoResponse, Failure> {
    let text = render(&views::host(&manager), &views::vms(&manager))
        .map_err(|e| Failure::internal(format!("metrics: {e}")))?;
    Ok(([(CONTENT_TYPE, TYPE)], text))
}

/// In the order of docs/api.md.
fn render(host: &HostView, vms: &[VmView]) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("ballast");
    memory(&mut registry, host);
    if let Some(room) = &host.run_dir {
        run_dir(&mut registry, room);
    }
    activity(&mut registry, host);
    nodes(&mut registry, &host.nodes);
    totals(&mut registry, host);
    compression(&mut registry, &host.compression);
    journal(&mut registry, &host.journal);
    per_vm(&mut registry, vms);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Where the host's memory is.
fn memory(registry: &mut Registry, host: &HostView) {
    let sharing = &host.sharing;
    for (name, help, value) in [
        ("budget", "Machine memory that guests may use", host.budget),
        ("free", "Budget not handed out", host.free),
        (
            "consumed",
            "Machine memory of guests' pages, and booked for those without a pager",
            host.consumed,
        ),
        ("overhead", "Overhead memory in the budget", host.overhead),
        (
            "measured_used",
            "Machine memory in use: pages by the kernel's count of files, and what is booked beside them",
            host.measured_used,
        ),
        ("swap_used", "Swap space that holds pages", host.swap_used),
        ("manager_memory", "Resident memory of the manager itself", host.manager_rss),
        ("shared", "Guest memory backed by common pages", sharing.shared),
        ("common", "Machine memory of common pages", sharing.common),
        ("saved", "Shared less common memory", sharing.saved),
        ("broken", "Private copies of pages that were shared", sharing.broken),
        ("sharing_metadata", "Memory of the share tables", sharing.metadata),
    ] {
        registry.register_with_unit(name, help, Unit::Bytes, ConstGauge::new(value as f64));
    }
}

fn run_dir(registry: &mut Registry, room: &RunDirView) {
    for (name, help, value) in [
        ("run_dir", "Size of the run folder's file system", room.size),
        ("run_dir_free", "What of it is free", room.free),
    ] {
        registry.register_with_unit(name, help, Unit::Bytes, ConstGauge::new(value as f64));
    }
}

/// What the manager does, and what that costs.
fn activity(registry: &mut Registry, host: &HostView) {
    let sharing = &host.sharing;
    registry.register(
        "sharing_mappings",
        "Mappings of all VMM processes, when they were last counted",
        ConstGauge::new(sharing.mappings as f64),
    );
    registry.register_with_unit(
        "manager_cpu",
        "CPU time of the manager itself",
        Unit::Seconds,
        ConstCounter::new(host.manager_cpu_s),
    );
    registry.register_with_unit(
        "awake",
        "Time for which idle processors were kept from sleeping, while page after page was waited for, or given up",
        Unit::Seconds,
        ConstCounter::new(host.awake_s),
    );
    registry.register(
        "manager_locked",
        "Whether the host may not swap the manager out",
        ConstGauge::new(f64::from(u8::from(host.manager_locked))),
    );
    registry.register(
        "sharing_enabled",
        "Whether pages to share are looked for",
        ConstGauge::new(f64::from(u8::from(sharing.enabled))),
    );
    registry.register_with_unit(
        "sharing_cpu",
        "CPU time spent on looking and sharing",
        Unit::Seconds,
        ConstCounter::new(sharing.cpu_s),
    );
    registry.register(
        "vms_waiting",
        "VMs that wait to be taken over from a former manager",
        ConstGauge::new(f64::from(host.waiting)),
    );
    registry.register(
        "vmms_refused",
        "VMMs that were refused at their start and run without Ballast",
        ConstGauge::new(host.refused.len() as f64),
    );
    registry.register(
        "state",
        "Reclamation state: 0 high, 1 soft, 2 hard, 3 low",
        ConstGauge::new(host.state as u64 as f64),
    );
}

/// Since the manager was started, of all VMs together.
fn totals(registry: &mut Registry, host: &HostView) {
    let (counters, sharing) = (&host.counters, &host.sharing);
    let errors =
        |of: fn(&ballast_api::SwapLocation) -> u64| host.swap_locations.iter().map(of).sum::<u64>();
    for (name, help, value) in [
        ("swapped_in_bytes", "Read back from swap files", counters.swapped_in),
        ("swap_write_errors", "Writes to swap files that failed", errors(|l| l.write_errors)),
        (
            "swap_read_errors",
            "Reads from swap files that failed, or brought something else than was written",
            errors(|l| l.read_errors),
        ),
        ("swapped_out_bytes", "Written to swap files", counters.swapped_out),
        ("ballooned_bytes", "Backed pages that guests gave up", counters.ballooned),
        ("zero_dropped_bytes", "Pages found all zero and dropped", counters.zero_dropped),
        ("faults", "Faults served", counters.faults),
        ("waits", "Allocations that waited for memory", counters.waits),
        ("blocks", "Allocations that waited in state low", counters.blocks),
        ("share_breaks", "Shared pages that were written", sharing.breaks),
        ("share_scanned_pages", "Pages looked at for sharing", sharing.scanned),
    ] {
        registry.register(name, help, ConstCounter::new(value));
    }
}

fn compression(registry: &mut Registry, compression: &CompressionView) {
    for (name, help, value) in [
        ("compressed", "Guest memory kept compressed", compression.compressed),
        ("filled", "Guest memory kept as one number a page", compression.filled),
        ("compression_cache", "Machine memory of compressed pages", compression.cache),
    ] {
        registry.register_with_unit(name, help, Unit::Bytes, ConstGauge::new(value as f64));
    }
}

fn journal(registry: &mut Registry, journal: &JournalView) {
    for (name, help, value) in [
        ("journal_turns", "Turns of the policy loop that were written down", journal.written),
        ("journal_lost_turns", "Turns that were not: behind, or a failing disk", journal.lost),
    ] {
        registry.register(name, help, ConstCounter::new(value));
    }
    let size = ConstGauge::new(journal.bytes as f64);
    registry.register_with_unit("journal", "The journal's files", Unit::Bytes, size);
    let trouble = ConstGauge::new(f64::from(u8::from(journal.trouble.is_some())));
    registry.register("journal_trouble", "Whether it cannot be written now", trouble);
}

/// Of VMs into which memory can be plugged.
fn hotplug(registry: &mut Registry, vms: &[VmView]) {
    type Field = fn(&HotplugView) -> Option<u64>;
    let parts: [(&str, &str, Field); 4] = [
        ("vm_hotplug_size", "Memory that can be plugged", |h| Some(h.size)),
        ("vm_hotplug_requested", "Memory that is to be plugged", |h| Some(h.requested)),
        ("vm_hotplug_plugged", "Memory that is plugged; absent while not known", |h| h.plugged),
        ("vm_hotplug_withheld", "Memory that reclamation has unplugged", |h| Some(h.withheld)),
    ];
    for (name, help, field) in parts {
        let family = Family::<[(&'static str, String); 1], Gauge<u64, AtomicU64>>::default();
        for vm in vms {
            if let Some(bytes) = vm.hotplug.as_ref().and_then(field) {
                family.get_or_create(&[("vm", vm.name.clone())]).set(bytes);
            }
        }
        registry.register_with_unit(name, help, Unit::Bytes, family);
    }
}

type VmLabel = [(&'static str, String); 1];
type VmField = fn(&VmView) -> u64;

fn label(vm: &VmView) -> VmLabel {
    [("vm", vm.name.clone())]
}

fn per_vm(registry: &mut Registry, vms: &[VmView]) {
    vm_gauges(registry, vms);
    hotplug(registry, vms);
    inputs(registry, vms);
    tools(registry, vms);
    registry.register_with_unit(
        "vm_fault_service",
        "How long faults took to be served that neither waited nor were on swapped pages",
        Unit::Seconds,
        FaultTimes::of(vms),
    );
    vm_totals(registry, vms);
}

/// What each VM has, and what it is to have.
fn vm_gauges(registry: &mut Registry, vms: &[VmView]) {
    let gauges = |field: VmField| {
        let family = Family::<VmLabel, Gauge<u64, AtomicU64>>::default();
        for vm in vms {
            family.get_or_create(&label(vm)).set(field(vm));
        }
        family
    };
    let bytes: [(&str, &str, VmField); 13] = [
        (
            "vm_consumed",
            "Machine memory of a VM's pages; of one without a pager what is booked for it",
            |v| v.memory.consumed,
        ),
        ("vm_large", "Machine memory of it in large pages", |v| v.memory.large),
        ("vm_target", "Machine memory that the policy grants", |v| v.memory.target),
        ("vm_ballooned", "Memory the guest gave up", |v| v.memory.ballooned),
        ("vm_swapped", "Memory in the swap file", |v| v.memory.swapped),
        ("vm_compressed", "Memory kept compressed", |v| v.compression.compressed),
        ("vm_compression_cache", "Machine memory of compressed pages", |v| v.compression.cache),
        ("vm_compression_cache_limit", "Machine memory that compressed pages may take", |v| {
            v.compression.cache_limit_now
        }),
        ("vm_shared", "Memory backed by common pages", |v| v.sharing.shared),
        ("vm_saved", "Shared memory less the VM's part of the common", |v| v.sharing.saved),
        ("vm_broken", "Private copies of pages that were shared", |v| v.sharing.broken),
        ("vm_min", "Guaranteed memory", |v| v.params.min),
        ("vm_max", "Configured size or limit", |v| v.params.max),
    ];
    for (name, help, field) in bytes {
        registry.register_with_unit(name, help, Unit::Bytes, gauges(field));
    }
    let active = Family::<VmLabel, Gauge<u64, AtomicU64>>::default();
    for vm in vms.iter().filter(|vm| vm.active.periods > 0) {
        active.get_or_create(&label(vm)).set(vm.active.estimate);
    }
    let help = "Estimate of active memory; absent before the first sample";
    registry.register_with_unit("vm_active", help, Unit::Bytes, active);
    let counts: [(&str, &str, VmField); 3] = [
        ("vm_shares", "Memory shares", |v| u64::from(v.params.shares)),
        ("vm_mappings", "Mappings of the VMM process, when they were last counted", |v| {
            v.sharing.mappings
        }),
        (
            "vm_stalled",
            "Whether the guest waits for a page that does not come, and not for want of memory",
            |v| u64::from(v.stalled),
        ),
    ];
    for (name, help, field) in counts {
        registry.register(name, help, gauges(field));
    }
}

/// What the tools cost that take memory from a VM, and which is used first.
fn tools(registry: &mut Registry, vms: &[VmView]) {
    type ToolLabel = [(&'static str, String); 2];
    let costs = Family::<ToolLabel, Gauge<f64, AtomicU64>>::default();
    let first = Family::<VmLabel, Gauge<u64, AtomicU64>>::default();
    for vm in vms {
        let tools = [("balloon", vm.tools.balloon_ms), ("paging", vm.tools.paging_ms)];
        for (tool, ms) in tools.into_iter().filter_map(|(tool, ms)| Some((tool, ms?))) {
            let label = [("vm", vm.name.clone()), ("tool", tool.to_owned())];
            costs.get_or_create(&label).set(ms / 1e6);
        }
        let paging = vm.tools.first == ballast_api::ToolName::Paging;
        first.get_or_create(&label(vm)).set(u64::from(paging));
    }
    registry.register(
        "vm_tool_cost",
        "What a page that a tool holds costs, seconds per second; absent while not measured",
        costs,
    );
    registry.register("vm_paging_first", "Whether paging is used before the balloon", first);
}

/// Of each VM, since the manager has it.
fn vm_totals(registry: &mut Registry, vms: &[VmView]) {
    let totals: [(&str, &str, VmField); 12] = [
        ("vm_read_ahead_bytes", "Swapped memory read before it was wanted", |v| {
            v.counters.read_ahead
        }),
        ("vm_read_ahead_hit_bytes", "Memory read ahead that was wanted then", |v| {
            v.counters.read_ahead_hits
        }),
        ("vm_brought_around_bytes", "Memory brought home because its neighbour was wanted", |v| {
            v.counters.brought_around
        }),
        ("vm_zero_dropped_bytes", "Pages found all zero and dropped", |v| v.counters.zero_dropped),
        ("vm_compressed_out_bytes", "Pages that were compressed, or kept as one number", |v| {
            v.compression.stored
        }),
        ("vm_compressed_in_bytes", "Such pages that were brought back", |v| v.compression.restored),
        ("vm_written_back_bytes", "Compressed pages moved on to swap", |v| {
            v.compression.written_back
        }),
        ("vm_large_fills", "Large pages handed out", |v| v.counters.large_fills),
        ("vm_large_breaks", "Large pages broken into small ones", |v| v.counters.large_breaks),
        ("vm_large_collapses", "Large pages made of small ones", |v| v.counters.large_collapses),
        ("vm_share_breaks", "Shared pages that the VM wrote", |v| v.sharing.breaks),
        ("vm_share_scanned_pages", "Pages looked at for sharing", |v| v.sharing.scanned),
    ];
    for (name, help, field) in totals {
        let family = Family::<VmLabel, Counter>::default();
        for vm in vms {
            family.get_or_create(&label(vm)).inc_by(field(vm));
        }
        registry.register(name, help, family);
    }
}

/// NUMA nodes; nothing where there is one.
fn nodes(registry: &mut Registry, nodes: &[NodeView]) {
    if nodes.is_empty() {
        return;
    }
    type Label = [(&'static str, String); 1];
    let family = |of: fn(&NodeView) -> u64| {
        let family = Family::<Label, Gauge<u64, AtomicU64>>::default();
        for node in nodes {
            family.get_or_create(&[("node", node.id.to_string())]).set(of(node));
        }
        family
    };
    let free = "Memory of a NUMA node that is free, or page cache";
    registry.register_with_unit("node_free", free, Unit::Bytes, family(|node| node.free));
    let missing = "What a NUMA node lacks to the free memory that is aimed for";
    registry.register_with_unit("node_missing", missing, Unit::Bytes, family(|node| node.missing));
    let state = "Reclamation state of a NUMA node: 0 high, 1 soft, 2 hard, 3 low";
    registry.register("node_state", state, family(|node| node.state as u64));
}

/// Of the VMs that have them: what is not known is not told as zero.
fn inputs(registry: &mut Registry, vms: &[VmView]) {
    type Part = [(&'static str, String); 2];
    let mut gauge = |name: &str, help: &str, values: Vec<(Part, f64)>| {
        let family = Family::<Part, Gauge<f64, AtomicU64>>::default();
        for (label, value) in values {
            family.get_or_create(&label).set(value);
        }
        registry.register(name, help, family);
    };
    let pressure = vms.iter().filter_map(|vm| {
        let p = vm.inputs.pressure?;
        let label = |kind: &str| [("vm", vm.name.clone()), ("kind", kind.to_owned())];
        Some([(label("some"), p.some), (label("full"), p.full)])
    });
    gauge(
        "vm_pressure",
        "Part of ten seconds in which the guest's tasks waited for memory, 0 to 1",
        pressure.flatten().collect(),
    );
    // At fixed parts: labels that change with the curve would each make a series of their own.
    let misses = vms.iter().flat_map(|vm| {
        ["0", "0.125", "0.25", "0.5", "0.75", "1"].into_iter().filter_map(|part| {
            let memory = vm.params.size as f64 * part.parse::<f64>().ok()?;
            let misses = vm.inputs.misses_at(memory as u64)?;
            Some(([("vm", vm.name.clone()), ("part", part.to_owned())], misses))
        })
    });
    gauge(
        "vm_misses_per_second",
        "Misses predicted per second of execution, with such a part of its configured size",
        misses.collect(),
    );
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// One that has all that there can be, each figure another one.
    fn host() -> Value {
        let mut host = json!({
            "version": "0", "pid": 1, "uptime_s": 0.0, "budget": 301, "free": 302, "consumed": 303,
            "overhead": 304, "peak_used": 305, "measured_used": 306, "measured_peak": 307,
            "state": "low", "thresholds": [], "overcommit": 0.0, "overcommit_peak": 0.0,
            "tax": 0.75, "vms": 1, "swap_reserved": 308, "swap_used": 309, "accel": "",
            "waiting": 3,
            "refused": [{"pid": 9, "name": null, "size": null, "resident": 1, "why": "", "for_s": 0.0}],
            "manager_cpu_s": 2.5, "awake_s": 0.25, "manager_rss": 110, "manager_locked": true,
            "run_dir": {"path": "/run/ballast", "size": 113, "free": 114},
            "nodes": [{"id": 1, "size": 9, "free": 111, "state": "hard", "missing": 112, "bound": 2}],
            "sharing": {"enabled": true, "shared": 101, "common": 102, "saved": 103,
                        "broken": 104, "breaks": 105, "scanned": 106, "cpu_s": 1.5,
                        "metadata": 107, "mappings": 108},
            "counters": {"ballooned": 310, "swapped_out": 311, "swapped_in": 312,
                         "zero_dropped": 109, "faults": 313, "waits": 314, "blocks": 315}
        });
        let location = |path: &str, write_errors: u64, read_errors: u64| {
            json!({"path": path, "priority": 0, "state": "good", "reserved": 1, "used": 1,
                   "free": 1, "write_errors": write_errors, "read_errors": read_errors})
        };
        host["swap_locations"] = json!([location("/a", 70, 1), location("/b", 7, 2)]);
        host["journal"] = json!({
            "enabled": true, "folder": "/j", "bytes": 316, "limit": 317, "segments": 318,
            "written": 319, "lost": 320, "trouble": "No space left on device"
        });
        host["compression"] = json!({
            "compressed": 321, "filled": 322, "cache": 323, "cache_used": 324, "cache_limit": 325,
            "cache_limit_now": 326, "stored": 327, "restored": 328, "written_back": 329,
            "incompressible": 330
        });
        host
    }

    /// As `host`.
    fn vm() -> Value {
        let mut vm = json!({
            "name": "a", "state": "running", "management": {"mode": "paged", "reason": null},
            "pid": 1, "accel": "", "uptime_s": 0.0,
            "params": {"size": 8192, "min": 401, "max": 402, "shares": 403, "tax": 0.75},
            "memory": {"consumed": 404, "target": 405, "untouched": 406, "resident": 407,
                       "shared": 408, "large": 208, "broken": 409, "compressed": 410, "staged": 411,
                       "swapped": 412, "ballooned": 413, "overhead": 414, "vmm_overhead": 415,
                       "swap_reserved": 416, "swap_target": 417},
            "active": {"estimate": 212, "slow": 418, "fast": 419, "current": 420, "periods": 2},
            "balloon": {"health": "missing", "target": 421, "reported": 422, "limit": 423},
            "hotplug": {"size": 4096, "requested": 2048, "plugged": 512, "withheld": 1024},
            "guest": null, "folder": "", "stalled": true,
            "inputs": {"policy": "pressure", "agent_trouble": null, "missing": null,
                       "curve": [{"memory": 0, "misses_per_s": 208.5},
                                 {"memory": 4096, "misses_per_s": 0.0}],
                       "pressure": {"some": 0.25, "full": 0.125, "age_s": 1.0}},
            "sharing": {"domain": "own", "shared": 201, "saved": 202, "broken": 203,
                        "breaks": 204, "scanned": 205, "mappings": 206},
            "tools": {"first": "paging", "why": "", "balloon_ms": 12.0, "paging_ms": null,
                      "ceiling": null},
            "fault_times": {"counts": [2, 3, 4], "sum_s": 0.5},
            "counters": {"faults": 424, "swapped_in": 425, "swapped_out": 426, "zero_dropped": 207,
                         "large_fills": 209, "large_breaks": 210, "large_collapses": 211,
                         "ballooned": 427, "sampled": 428, "waits": 429, "blocks": 430,
                         "wait_s": 0.0, "cpu_s": 0.0}
        });
        vm["counters"]["read_ahead"] = json!(431);
        vm["counters"]["read_ahead_hits"] = json!(432);
        vm["counters"]["brought_around"] = json!(433);
        vm["compression"] = json!({
            "compressed": 434, "filled": 435, "cache": 436, "cache_used": 437, "cache_limit": 438,
            "cache_limit_now": 439, "stored": 440, "restored": 441, "written_back": 442,
            "incompressible": 443
        });
        vm
    }

    fn example() -> String {
        let host = serde_json::from_value(host()).unwrap();
        render(&host, &[serde_json::from_value(vm()).unwrap()]).unwrap()
    }

    fn assert_told(lines: &[&str]) {
        let text = example();
        for line in lines {
            assert!(text.lines().any(|l| l == *line), "{line} is not in:\n{text}");
        }
    }

    #[test]
    fn every_figure_is_told_under_its_name() {
        assert_told(&[
            "ballast_sharing_enabled 1.0",
            "ballast_vms_waiting 3.0",
            "ballast_vmms_refused 1.0",
            "ballast_node_free_bytes{node=\"1\"} 111",
            "ballast_node_missing_bytes{node=\"1\"} 112",
            "ballast_node_state{node=\"1\"} 2",
            "ballast_run_dir_bytes 113.0",
            "ballast_run_dir_free_bytes 114.0",
            "ballast_shared_bytes 101.0",
            "ballast_common_bytes 102.0",
            "ballast_saved_bytes 103.0",
            "ballast_broken_bytes 104.0",
            "ballast_share_breaks_total 105",
            "ballast_share_scanned_pages_total 106",
            "ballast_sharing_cpu_seconds_total 1.5",
            "ballast_manager_memory_bytes 110.0",
            "ballast_manager_cpu_seconds_total 2.5",
            "ballast_awake_seconds_total 0.25",
            "ballast_manager_locked 1.0",
            "ballast_sharing_metadata_bytes 107.0",
            "ballast_sharing_mappings 108.0",
            "ballast_zero_dropped_bytes_total 109",
            "ballast_vm_shared_bytes{vm=\"a\"} 201",
            "ballast_vm_saved_bytes{vm=\"a\"} 202",
            "ballast_vm_broken_bytes{vm=\"a\"} 203",
            "ballast_vm_active_bytes{vm=\"a\"} 212",
            "ballast_vm_share_breaks_total{vm=\"a\"} 204",
            "ballast_vm_share_scanned_pages_total{vm=\"a\"} 205",
            "ballast_vm_mappings{vm=\"a\"} 206",
            "ballast_vm_stalled{vm=\"a\"} 1",
            "ballast_vm_hotplug_requested_bytes{vm=\"a\"} 2048",
            "ballast_vm_hotplug_plugged_bytes{vm=\"a\"} 512",
            "ballast_vm_tool_cost{vm=\"a\",tool=\"balloon\"} 0.000012",
            "ballast_vm_paging_first{vm=\"a\"} 1",
            "ballast_vm_zero_dropped_bytes_total{vm=\"a\"} 207",
            "ballast_vm_pressure{vm=\"a\",kind=\"some\"} 0.25",
            "ballast_vm_pressure{vm=\"a\",kind=\"full\"} 0.125",
            "ballast_vm_misses_per_second{vm=\"a\",part=\"0\"} 208.5",
            "ballast_vm_misses_per_second{vm=\"a\",part=\"0.25\"} 104.25",
            "ballast_vm_misses_per_second{vm=\"a\",part=\"1\"} 0.0",
            "ballast_vm_large_bytes{vm=\"a\"} 208",
            "ballast_vm_large_fills_total{vm=\"a\"} 209",
            "ballast_vm_large_breaks_total{vm=\"a\"} 210",
            "ballast_vm_large_collapses_total{vm=\"a\"} 211",
            "ballast_vm_fault_service_seconds_count{vm=\"a\"} 9",
            "ballast_vm_fault_service_seconds_sum{vm=\"a\"} 0.5",
            "ballast_vm_fault_service_seconds_bucket{le=\"0.000002\",vm=\"a\"} 5",
        ]);
    }

    #[test]
    fn what_is_to_be_watched_of_a_host_is_told_and_nothing_else_in_its_place() {
        assert_told(&[
            "ballast_state 3.0",
            "ballast_budget_bytes 301.0",
            "ballast_free_bytes 302.0",
            "ballast_consumed_bytes 303.0",
            "ballast_overhead_bytes 304.0",
            "ballast_measured_used_bytes 306.0",
            "ballast_swap_used_bytes 309.0",
            "ballast_ballooned_bytes_total 310",
            "ballast_swapped_out_bytes_total 311",
            "ballast_swapped_in_bytes_total 312",
            "ballast_faults_total 313",
            "ballast_waits_total 314",
            "ballast_blocks_total 315",
            "ballast_swap_write_errors_total 77",
            "ballast_swap_read_errors_total 3",
            "ballast_journal_bytes 316.0",
            "ballast_journal_turns_total 319",
            "ballast_journal_lost_turns_total 320",
            "ballast_journal_trouble 1.0",
            "ballast_compressed_bytes 321.0",
            "ballast_filled_bytes 322.0",
            "ballast_compression_cache_bytes 323.0",
        ]);
    }

    #[test]
    fn what_is_to_be_watched_of_a_vm_is_told_and_nothing_else_in_its_place() {
        assert_told(&[
            "ballast_vm_min_bytes{vm=\"a\"} 401",
            "ballast_vm_max_bytes{vm=\"a\"} 402",
            "ballast_vm_shares{vm=\"a\"} 403",
            "ballast_vm_consumed_bytes{vm=\"a\"} 404",
            "ballast_vm_target_bytes{vm=\"a\"} 405",
            "ballast_vm_swapped_bytes{vm=\"a\"} 412",
            "ballast_vm_ballooned_bytes{vm=\"a\"} 413",
            "ballast_vm_hotplug_size_bytes{vm=\"a\"} 4096",
            "ballast_vm_hotplug_withheld_bytes{vm=\"a\"} 1024",
            "ballast_vm_read_ahead_bytes_total{vm=\"a\"} 431",
            "ballast_vm_read_ahead_hit_bytes_total{vm=\"a\"} 432",
            "ballast_vm_brought_around_bytes_total{vm=\"a\"} 433",
            "ballast_vm_compressed_bytes{vm=\"a\"} 434",
            "ballast_vm_compression_cache_bytes{vm=\"a\"} 436",
            "ballast_vm_compression_cache_limit_bytes{vm=\"a\"} 439",
            "ballast_vm_compressed_out_bytes_total{vm=\"a\"} 440",
            "ballast_vm_compressed_in_bytes_total{vm=\"a\"} 441",
            "ballast_vm_written_back_bytes_total{vm=\"a\"} 442",
        ]);
    }

    /// A row of the documents for each metric of a text.
    fn rows(text: &str) -> Vec<String> {
        let of = |start: &str| -> Vec<(&str, &str)> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(start));
            lines.filter_map(|line| line.split_once(' ')).collect()
        };
        let helps = of("# HELP ");
        let row = |(name, kind): (&str, &str)| {
            let (_, help) = helps.iter().find(|(of, _)| *of == name).unwrap();
            let sample = text.lines().find(|line| {
                let rest = line.strip_prefix(name);
                rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_lowercase()))
            });
            let (_, labels) = sample.unwrap().split_once('{').unwrap_or_default();
            let labels = labels.split_once('}').unwrap_or_default().0;
            let labels = labels.split(',').filter_map(|label| Some(label.split_once('=')?.0));
            let labels: Vec<&str> = labels.filter(|label| *label != "le").collect();
            let total = if kind == "counter" { "_total" } else { "" };
            let help = help.trim_end_matches('.');
            format!("| `{name}{total}` | {} | {kind} | {help} |", labels.join(", "))
        };
        of("# TYPE ").into_iter().map(row).collect()
    }

    #[test]
    fn the_documents_have_each_metric() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
        let document = std::fs::read_to_string(path).unwrap();
        let written: Vec<&str> =
            document.lines().filter(|line| line.starts_with("| `ballast_")).collect();
        let wanted = rows(&example());
        assert!(written == wanted, "docs/api.md is to have:\n{}", wanted.join("\n"));
    }
}
