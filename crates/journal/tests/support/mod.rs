//! Snapshots for tests. Made from JSON, so that inputs which are added with a default need no change
//! here.
#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]
#![allow(dead_code, reason = "each user of this module uses a part of it")]

use std::sync::Arc;

use ballast_journal::Moment;
use ballast_journal::recorder::Told;
use ballast_policy::{Decision, Snapshot, Thresholds, decide};
use ballast_units::{Pages, VmId};
use proptest::prelude::*;
use serde_json::{Value, json};

pub const MIB: u64 = 256;

/// A VM of 256 MiB with 2,560 shares; `change` makes it another.
pub fn vm(id: u32, consumed_mib: u64, active_mib: u64) -> Value {
    json!({
        "demand": {
            "id": id, "shares": 2560, "min": 0, "max": 256 * MIB, "tax": 0.75,
            "active": active_mib * MIB
        },
        "consumed": consumed_mib * MIB, "size": 256 * MIB, "balloon_goal": 0,
        "balloon_health": "healthy", "balloon_limit": 166 * MIB, "wants_more": false,
        "swap_free": 256 * MIB
    })
}

/// A host of `budget_mib`; what VMs do not consume is free.
pub fn snapshot(trigger: &str, before: &str, budget_mib: u64, vms: &[Value]) -> Snapshot {
    let used: u64 = vms.iter().map(|vm| vm["consumed"].as_u64().unwrap()).sum();
    let budget = budget_mib * MIB;
    serde_json::from_value(json!({
        "trigger": trigger, "before": before,
        "thresholds": Thresholds::default_for(Pages(budget)),
        "budget": budget, "free": budget.saturating_sub(used), "overhead": 0, "vms": vms
    }))
    .unwrap()
}

/// The turn `n` of a manager, a second after the one before, with VMs named "vm-7" and so on.
pub fn told(n: u64, decision: Decision, named: &[u32]) -> Told {
    let names = named.iter().map(|id| (VmId(*id), format!("vm-{id}"))).collect();
    Told { moment: moment(n), decision: Arc::new(decision), names }
}

/// The journal's time begins here.
pub const EPOCH_MS: u64 = 1_800_000_000_000;

pub fn moment(n: u64) -> Moment {
    Moment { n, at_ms: EPOCH_MS + n * 1000, up_ms: n * 1000, took_us: 7 + n % 3 }
}

/// Any snapshot that a manager could take, and many that it could not.
pub fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    let pages = || prop_oneof![Just(0u64), 0u64..100_000, any::<u64>().prop_map(|n| n >> 24)];
    let vm = (
        (any::<u32>(), pages(), pages(), 0.0..1.0f64, pages()),
        (pages(), pages(), pages(), 0usize..4, pages(), any::<bool>(), pages()),
    )
        .prop_map(|(d, v)| {
            let health = ["missing", "healthy", "slow", "stuck"][v.3];
            json!({
                "demand": {
                    "id": 0, "shares": d.0, "min": d.1, "max": d.2, "tax": d.3, "active": d.4
                },
                "consumed": v.0, "size": v.1, "balloon_goal": v.2.min(v.1),
                "balloon_health": health, "balloon_limit": v.4, "wants_more": v.5,
                "swap_free": v.6
            })
        });
    let vms = proptest::collection::vec(vm, 0..9);
    let node = (pages(), pages(), 0usize..4, proptest::collection::vec(0u32..9, 0..9)).prop_map(
        |(size, free, before, bound)| {
            let before = ["high", "soft", "hard", "low"][before];
            json!({"id": 0, "size": size, "free": free, "before": before, "bound": bound})
        },
    );
    let nodes = proptest::collection::vec(node, 0..3);
    (vms, nodes, pages(), pages(), pages(), 0usize..4, "[a-z ]{0,12}").prop_map(
        |(mut vms, mut nodes, budget, free, overhead, before, trigger)| {
            for (i, node) in nodes.iter_mut().enumerate() {
                node["id"] = json!(i);
            }
            for (i, vm) in vms.iter_mut().enumerate() {
                vm["demand"]["id"] = json!(i + 1);
            }
            let before = ["high", "soft", "hard", "low"][before];
            serde_json::from_value(json!({
                "trigger": trigger, "before": before,
                "thresholds": Thresholds::default_for(Pages(budget)),
                "budget": budget, "free": free, "overhead": overhead, "vms": vms, "nodes": nodes
            }))
            .unwrap()
        },
    )
}

/// Decisions as a manager makes them: each begins in the state in which the one before ended.
pub fn chain(snapshots: Vec<Snapshot>) -> Vec<Decision> {
    let mut state = ballast_policy::State::High;
    let next = |mut snapshot: Snapshot| {
        snapshot.before = state;
        let decision = decide(snapshot);
        state = decision.state;
        decision
    };
    snapshots.into_iter().map(next).collect()
}
