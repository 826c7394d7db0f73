//! Views for tests: a host of 384 MiB with VMs of 256 MiB.

use std::path::PathBuf;

use ballast_api::{
    ActiveView, BalloonHealth, BalloonView, GuestStats, HostCounters, HostSharing, HostView,
    Management, MemoryView, Mode, Params, RunState, StateName, Threshold, VmCounters, VmSharing,
    VmView, Why,
};

use super::app::Event;
use super::source::Snapshot;

const MIB: u64 = 1 << 20;

#[expect(clippy::too_many_lines, reason = "one value with all its fields")]
pub fn host() -> HostView {
    let budget = 384 * MIB;
    let threshold = |state, lower: u64, upper: u64| Threshold {
        state,
        lower: budget * lower / 100,
        upper: budget * upper / 100,
    };
    HostView {
        version: "0.1.0".to_owned(),
        pid: 100,
        uptime_s: 192.0,
        budget,
        free: 104 * MIB,
        consumed: 256 * MIB,
        overhead: 24 * MIB,
        peak_used: 380 * MIB,
        measured_used: 270 * MIB,
        measured_peak: 377 * MIB,
        state: StateName::High,
        thresholds: vec![
            threshold(StateName::High, 4, 6),
            threshold(StateName::Soft, 2, 4),
            threshold(StateName::Hard, 1, 2),
            threshold(StateName::Low, 0, 0),
        ],
        overcommit: 2.0,
        overcommit_peak: 2.1,
        tax: 0.75,
        vms: 3,
        waiting: 0,
        refused: Vec::new(),
        swap_reserved: 512 * MIB,
        swap_used: 40 * MIB,
        swap_locations: Vec::new(),
        run_dir: None,
        nodes: Vec::new(),
        accel: "tcg (no stock kernel boots on this /dev/kvm)".to_owned(),
        manager_cpu_s: 1.5,
        awake_s: 0.0,
        manager_rss: 20 * MIB,
        manager_locked: true,
        compression: Default::default(),
        sharing: HostSharing {
            enabled: true,
            shared: 120 * MIB,
            common: 20 * MIB,
            saved: 100 * MIB,
            zero_dropped: 50 * MIB,
            broken: 3 * MIB,
            breaks: 5000,
            breaks_per_s: 12.0,
            scanned: 1_000_000,
            passes: 40,
            scan_rate: 10_000.0,
            cpu_s: 8.5,
            cpu_percent: 3.2,
            metadata: 2 * MIB,
            mappings: 12_000,
        },
        journal: Default::default(),
        counters: HostCounters::default(),
    }
}

#[expect(clippy::too_many_lines, reason = "one value with all its fields")]
pub fn vm(name: &str) -> VmView {
    VmView {
        name: name.to_owned(),
        state: RunState::Running,
        management: Management { mode: Mode::Paged, reason: None },
        pid: Some(4711),
        accel: "tcg".to_owned(),
        uptime_s: 100.0,
        vmm_uptime_s: Some(100.0),
        params: Params {
            size: 256 * MIB,
            min: 64 * MIB,
            max: 256 * MIB,
            shares: 2560,
            tax: 0.75,
            pool: None,
        },
        memory: MemoryView {
            consumed: 128 * MIB,
            target: 160 * MIB,
            resident: 128 * MIB,
            swapped: 64 * MIB,
            ballooned: 32 * MIB,
            untouched: 32 * MIB,
            overhead: 8 * MIB,
            ..Default::default()
        },
        active: ActiveView {
            estimate: 96 * MIB,
            slow: 90 * MIB,
            fast: 96 * MIB,
            current: 80 * MIB,
            periods: 12,
        },
        hotplug: None,
        tools: Default::default(),
        stalled: false,
        ended: None,
        balloon: BalloonView {
            health: BalloonHealth::Healthy,
            target: 64 * MIB,
            reported: 60 * MIB,
            limit: 150 * MIB,
        },
        guest: Some(GuestStats {
            free: Some(30 * MIB),
            available: Some(80 * MIB),
            disk_caches: Some(50 * MIB),
            age_s: 2,
            ..Default::default()
        }),
        inputs: Default::default(),
        trouble: None,
        compression: Default::default(),
        sharing: VmSharing {
            domain: "own".to_owned(),
            shared: 40 * MIB,
            saved: 33 * MIB,
            broken: MIB,
            breaks: 1500,
            breaks_per_s: 4.0,
            scan_rate: 3000.0,
            cpu_percent: 1.1,
            mappings: 4000,
            ..Default::default()
        },
        fault_times: Default::default(),
        counters: VmCounters { faults: 10, ..Default::default() },
        folder: PathBuf::from("/run/ballast/vms/a"),
    }
}

pub fn why(vm: &str) -> Why {
    Why {
        vm: vm.to_owned(),
        age_s: 3.0,
        trigger: "period".to_owned(),
        verdict: "target 160 MiB, 32 MiB more than consumed".to_owned(),
        steps: vec!["idle fraction 0.25".to_owned(), "rho 12.5 per page".to_owned()],
        at_ms: None,
        outcomes: Vec::new(),
        notes: Vec::new(),
    }
}

pub fn seen(at: f64, host: HostView, vms: Vec<VmView>) -> Event {
    Event::Seen(Box::new(Snapshot { at, host, vms }))
}
