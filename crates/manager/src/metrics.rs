//! Prometheus text of what the API shows.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use ballast_api::{HostView, VmView};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};

use crate::manager::{Failure, Manager};
use crate::views;

const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Prometheus and OpenMetrics text.
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = TYPE, body = String)))]
pub async fn serve(State(manager): State<Arc<Manager>>) -> Result<impl IntoResponse, Failure> {
    let vms: Vec<VmView> = manager.vms().iter().map(|vm| views::vm(&manager, vm)).collect();
    let text = render(&views::host(&manager), &vms)
        .map_err(|e| Failure::internal(format!("metrics: {e}")))?;
    Ok(([(CONTENT_TYPE, TYPE)], text))
}

fn render(host: &HostView, vms: &[VmView]) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::with_prefix("ballast");
    let mut gauge = |name: &str, help: &str, value: u64| {
        let value = ConstGauge::new(value as f64);
        registry.register_with_unit(name, help, Unit::Bytes, value);
    };
    gauge("budget", "Machine memory that guests may use", host.budget);
    gauge("free", "Budget not handed out", host.free);
    gauge("consumed", "Machine memory of guests' pages", host.consumed);
    gauge("overhead", "Overhead memory in the budget", host.overhead);
    gauge("measured_used", "Machine memory in use by the kernel's count", host.measured_used);
    gauge("swap_used", "Swap space that holds pages", host.swap_used);
    registry.register(
        "state",
        "Reclamation state: 0 high, 1 soft, 2 hard, 3 low",
        ConstGauge::new(host.state as u64 as f64),
    );
    let mut counter = |name: &str, help: &str, value: u64| {
        registry.register(name, help, ConstCounter::new(value));
    };
    counter("swapped_in_bytes", "Read back from swap files", host.counters.swapped_in);
    counter("swapped_out_bytes", "Written to swap files", host.counters.swapped_out);
    counter("ballooned_bytes", "Backed pages that guests gave up", host.counters.ballooned);
    counter("zero_dropped_bytes", "Pages found all zero and dropped", host.counters.zero_dropped);
    counter("faults", "Faults served", host.counters.faults);
    counter("waits", "Allocations that waited for memory", host.counters.waits);
    counter("blocks", "Allocations that waited in state low", host.counters.blocks);

    type PerVm = Family<[(&'static str, String); 1], Gauge<u64, AtomicU64>>;
    type Field = fn(&VmView) -> u64;
    let fields: [(&str, &str, Field); 8] = [
        ("vm_consumed", "Machine memory of a VM's pages", |v| v.memory.consumed),
        ("vm_target", "Machine memory that the policy grants", |v| v.memory.target),
        ("vm_active", "Estimate of active memory", |v| v.active.estimate),
        ("vm_ballooned", "Memory the guest gave up", |v| v.memory.ballooned),
        ("vm_swapped", "Memory in the swap file", |v| v.memory.swapped),
        ("vm_min", "Guaranteed memory", |v| v.params.min),
        ("vm_max", "Configured size or limit", |v| v.params.max),
        ("vm_shares", "Memory shares", |v| u64::from(v.params.shares)),
    ];
    for (name, help, field) in fields {
        let family = PerVm::default();
        for vm in vms {
            family.get_or_create(&[("vm", vm.name.clone())]).set(field(vm));
        }
        if name == "vm_shares" {
            registry.register(name, help, family);
        } else {
            registry.register_with_unit(name, help, Unit::Bytes, family);
        }
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}
