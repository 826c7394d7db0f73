//! What the API shows of the host and its VMs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_api::{
    ActiveView, BalloonHealth, BalloonView, CompressionView, FaultTimesView, HostSharing, HostView,
    Management, MemoryView, Mode, NodeView, Params, PolicyInputs, PoolView, RunState, Threshold,
    ToolsView, VmCounters, VmSharing, VmView, Why,
};
use ballast_journal::tell::state_name;
use ballast_pager::mappings::ZERO_RUN;
use ballast_pager::memory::CounterValues;
use ballast_pager::service::{Health as PagerHealth, PagedVm};
use ballast_pager::word::State as Page;
use ballast_policy::{Health, Node, NodeState, Pool, State};
use ballast_qemu::process;
use ballast_units::{Pages, age};

use crate::domain;
use crate::fault_times;
use crate::hotplug_loop;
use crate::inputs;
use crate::journal;
use crate::manager::{Failure, Manager, Waits};
use crate::run_room;
use crate::sync::lock;
use crate::tools;
use crate::totals::Totals;
use crate::vm::{BalloonState, Vm, VmParams};

fn bytes(pages: Pages) -> u64 {
    pages.bytes().0
}

/// Figures that are read one after the other: sums of them may be off by what moves meanwhile.
pub fn host(manager: &Manager) -> HostView {
    let ledger = &manager.host.ledger;
    let (vms, waiting) = manager.with_waiting();
    let sum = |f: &dyn Fn(&Vm) -> Pages| bytes(vms.iter().map(|vm| f(vm)).sum());
    let of_waiting = |f: &dyn Fn(&Waits) -> Pages| bytes(waiting.iter().map(f).sum());
    let swap =
        |f: &dyn Fn(&PagedVm) -> Pages| sum(&|vm| vm.paged().as_ref().map_or(Pages::ZERO, f));
    let own = std::process::id();
    let totals = manager.totals();
    HostView {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: own,
        uptime_s: manager.started.elapsed().as_secs_f64(),
        budget: bytes(ledger.budget()),
        free: bytes(ledger.free()),
        consumed: sum(&Vm::consumed) + of_waiting(&|waits| waits.held.pages()),
        overhead: sum(&|vm| vm.overhead())
            + of_waiting(&|waits| waits.record.overhead)
            + bytes(manager.reserved_for_starts() + ZERO_RUN),
        peak_used: bytes(ledger.peak()),
        measured_used: manager.measured_now.load(Ordering::Relaxed),
        measured_peak: manager.measured_peak.load(Ordering::Relaxed),
        state: state_name(manager.decision().map_or(State::High, |(_, d)| d.state)),
        thresholds: manager
            .thresholds()
            .edges()
            .into_iter()
            .map(|(state, lower, upper)| Threshold {
                state: state_name(state),
                lower: bytes(lower),
                upper: bytes(upper),
            })
            .collect(),
        overcommit: manager.overcommit(),
        overcommit_peak: manager.overcommit_peak(),
        tax: manager.tax().into(),
        vms: (vms.len() + waiting.len()) as u32,
        waiting: waiting.len() as u32,
        refused: manager.refused.views(|pid| {
            vms.iter().any(|vm| vm.process.pid() == pid)
                || waiting.iter().any(|waits| waits.record.pid == pid)
        }),
        swap_reserved: swap(&|p| p.swap_len()),
        swap_used: swap(&|p| p.memory().swap_used()),
        swap_locations: manager.swap.views(&vms),
        run_dir: run_room::of(&manager.config().run_dir),
        nodes: nodes(manager),
        accel: lock(&manager.accel).clone(),
        manager_cpu_s: process::cpu_time(own).unwrap_or_default().as_secs_f64(),
        awake_s: manager.host.awake.total().as_secs_f64(),
        manager_rss: process::rss(own).unwrap_or_default().0,
        manager_locked: process::locked(own).is_some_and(|locked| locked.0 > 0),
        sharing: host_sharing(manager, &vms, &totals),
        compression: host_compression(&vms, &totals),
        journal: journal::view(manager.journal.as_ref()),
        counters: totals.host,
    }
}

/// As the last turn saw them.
fn nodes(manager: &Manager) -> Vec<NodeView> {
    let Some((_, decision)) = manager.decision() else { return Vec::new() };
    let view = |(node, decided): (&Node, &NodeState)| NodeView {
        id: node.id,
        size: bytes(node.size),
        free: bytes(node.free),
        state: state_name(decided.state),
        missing: bytes(decided.missing),
        bound: node.bound.len() as u32,
    };
    decision.snapshot.nodes.iter().zip(&decision.nodes).map(view).collect()
}

/// All VMs in order of start, then those that wait to be taken over.
pub fn vms(manager: &Manager) -> Vec<VmView> {
    // In this order: one that is taken over in between is seen once, or twice, and not missed.
    let waiting = manager.views_of_waiting();
    let mut views: Vec<VmView> = manager.vms().iter().map(|seen| vm(manager, seen)).collect();
    let waiting: Vec<VmView> =
        waiting.into_iter().filter(|view| views.iter().all(|vm| vm.name != view.name)).collect();
    views.extend(waiting);
    views
}

/// All pools, parents first.
pub fn pools(manager: &Manager) -> Vec<PoolView> {
    let rules = manager.pools.rules();
    let pools = manager.pools.pools(&rules);
    let made = manager.promises(&lock(&manager.starting));
    let promised = manager.books(&pools, &made).promised();
    let shares = manager.decision().map(|(_, decision)| decision.pools.clone()).unwrap_or_default();
    let vms = manager.vms();
    let places: Vec<Option<String>> = vms.iter().map(|vm| vm.params().pool).collect();
    let inside = |pool: &str, name: &str| {
        name == pool || name.strip_prefix(pool).is_some_and(|rest| rest.starts_with('/'))
    };
    rules
        .values()
        .zip(pools)
        .zip(promised)
        .map(|((rule, pool), promised)| {
            let members = |which: &dyn Fn(&str) -> bool| {
                vms.iter()
                    .zip(&places)
                    .filter(|(_, place)| place.as_deref().is_some_and(which))
                    .map(|(vm, _)| vm)
                    .collect::<Vec<_>>()
            };
            let all = members(&|place| inside(&rule.name, place));
            PoolView {
                name: rule.name.clone(),
                shares: rule.shares,
                min: bytes(rule.min),
                max: rule.max.map(bytes),
                expandable: rule.expandable,
                tax: rule.tax.map(Into::into),
                configured: manager.pools.configured(&rule.name).is_some(),
                vms: members(&|place| place == rule.name)
                    .into_iter()
                    .map(|vm| vm.name.clone())
                    .collect(),
                pools: rules
                    .values()
                    .filter(|other| other.parent() == Some(&rule.name))
                    .map(|other| other.name.clone())
                    .collect(),
                reserved: bytes(promised.used),
                unreserved: promised.left().map(bytes),
                target: shares
                    .iter()
                    .find(|share| share.id == pool.id)
                    .map_or(0, |share| bytes(share.target)),
                consumed: bytes(all.iter().map(|vm| vm.consumed()).sum()),
            }
        })
        .collect()
}

/// As `host`. Looks into /proc for its process.
pub fn vm(manager: &Manager, vm: &Vm) -> VmView {
    let params = vm.params();
    let pools = manager.pools.pools(&manager.pools.rules());
    let balloon = *lock(&vm.balloon);
    let pid = vm.process.pid();
    let alive = vm.process.is_alive();
    let (memory, counters) = memory_and_counters(manager, vm);
    let active = lock(&vm.sampling).set.estimate();
    // The policy goes by no sample of what may not be paged any more.
    let is_sampled = vm.may_give();
    let PagedViews { trouble, stalled, compression, fault_times, sharing } =
        paged_views(manager, vm);
    VmView {
        name: vm.name.clone(),
        state: vm.shown_state(),
        management: vm.management(),
        pid: alive.then_some(pid),
        accel: vm.accel.clone(),
        uptime_s: vm.started.elapsed().as_secs_f64(),
        vmm_uptime_s: vm
            .vmm_started
            .map(|started| process::since_boot().saturating_sub(started).as_secs_f64()),
        params: shown(manager, vm.size, &params, &pools),
        memory,
        active: ActiveView {
            estimate: bytes(active.estimate),
            slow: bytes(active.slow),
            fast: bytes(active.fast),
            current: bytes(active.current),
            periods: if is_sampled { active.periods } else { 0 },
        },
        balloon: balloon_view(&balloon),
        hotplug: hotplug_loop::view(vm),
        tools: tools::view(manager, vm),
        guest: balloon.stats_now(),
        trouble,
        stalled,
        ended: None,
        compression,
        fault_times,
        sharing,
        inputs: inputs::view(vm, manager.config().policy),
        counters,
        folder: vm.folder.clone(),
    }
}

/// What else its pager tells.
#[derive(Default)]
struct PagedViews {
    trouble: Option<String>,
    stalled: bool,
    compression: CompressionView,
    fault_times: FaultTimesView,
    sharing: VmSharing,
}

/// By one look at it: all that the expressions of one struct hold, they hold together.
fn paged_views(manager: &Manager, vm: &Vm) -> PagedViews {
    let guard = vm.paged();
    let Some(paged) = guard.as_ref() else { return PagedViews::default() };
    let health = paged.health();
    PagedViews {
        stalled: is_stalled(&health),
        trouble: trouble(health),
        compression: compression(paged),
        fault_times: fault_times::view(paged),
        sharing: sharing(manager, vm, paged),
    }
}

/// Both by one look at its pager. Of a VM that has none: what is known without.
fn memory_and_counters(manager: &Manager, vm: &Vm) -> (MemoryView, VmCounters) {
    let overheads = MemoryView {
        consumed: bytes(vm.consumed()),
        overhead: bytes(vm.overhead()),
        vmm_overhead: if vm.paged().is_some() { vmm_overhead(vm) } else { 0 },
        vmm_booked: bytes(vm.booked_vmm()),
        ..MemoryView::default()
    };
    let cpu_s = process::cpu_time(vm.process.pid()).unwrap_or_default().as_secs_f64();
    match &*vm.paged() {
        Some(paged) => {
            let counted = paged.memory().counters.values();
            (paged_memory(paged, vm.size, overheads), paged_counters(paged, &counted, cpu_s))
        }
        None => {
            let target = manager
                .decision()
                .and_then(|(_, d)| d.results.iter().find(|r| r.id == vm.id).map(|r| r.target));
            // Nothing is known of its pages but what its balloon took.
            let (ballooned, _) = lock(&vm.balloon).held.unwrap_or_default();
            let target = bytes(target.unwrap_or(vm.size));
            (
                MemoryView { target, ballooned: bytes(ballooned), ..overheads },
                VmCounters { cpu_s, ..VmCounters::default() },
            )
        }
    }
}

/// What the pager knows of a VM of `size`, beside the `overheads`.
fn paged_memory(paged: &PagedVm, size: Pages, overheads: MemoryView) -> MemoryView {
    let memory = paged.memory();
    let pages = |state| bytes(memory.pmap().in_state(state));
    MemoryView {
        target: bytes((memory.target() + paged.shared_part()).min(size)),
        untouched: pages(Page::Untouched) + pages(Page::Zero),
        resident: pages(Page::Resident),
        large: bytes(memory.regions().whole()),
        shared: pages(Page::Shared),
        broken: pages(Page::Broken),
        compressed: pages(Page::Compressed),
        filled: pages(Page::Filled),
        staged: pages(Page::Staged) + pages(Page::Held),
        swapped: pages(Page::Swapped),
        ballooned: pages(Page::Ballooned),
        swap_reserved: bytes(paged.swap_len()),
        swap_retired: bytes(memory.swap_retired()),
        swap_target: bytes(paged.evict_goal()),
        ..overheads
    }
}

/// What its pager has counted, and the CPU seconds of its VMM.
fn paged_counters(paged: &PagedVm, c: &CounterValues, cpu_s: f64) -> VmCounters {
    let memory = paged.memory();
    let size = |pages: u64| bytes(Pages(pages));
    VmCounters {
        faults: c.faults,
        swapped_in: size(c.swap_ins),
        swapped_out: size(c.swap_outs),
        read_ahead: size(c.read_ahead),
        read_ahead_hits: size(c.read_ahead_hits),
        brought_around: size(c.brought),
        zero_dropped: size(c.zero_dropped),
        ballooned: size(c.discarded),
        large_fills: memory.regions().counts().fills,
        large_breaks: memory.regions().counts().breaks,
        large_collapses: memory.regions().counts().collapses,
        sampled: c.touched,
        waits: c.waits,
        blocks: c.blocks,
        wait_s: c.wait_ns as f64 / 1e9,
        cpu_s,
    }
}

fn balloon_view(balloon: &BalloonState) -> BalloonView {
    BalloonView {
        health: match balloon.output.health {
            Health::Missing => BalloonHealth::Missing,
            Health::Healthy => BalloonHealth::Healthy,
            Health::Slow => BalloonHealth::Slow,
            Health::Stuck => BalloonHealth::Stuck,
        },
        target: bytes(balloon.commanded),
        reported: balloon.held.map_or(0, |(size, _)| bytes(size)),
        limit: bytes(balloon.output.limit),
    }
}

/// A VM whose start came to nothing: what it was to be, and nothing that it has.
pub fn never_was(manager: &Manager, name: &str, size: Pages, params: &VmParams) -> VmView {
    let pools = manager.pools.pools(&manager.pools.rules());
    VmView {
        name: name.to_owned(),
        state: RunState::Stopped,
        management: Management { mode: Mode::Unmanaged, reason: Some("never started".into()) },
        pid: None,
        accel: String::new(),
        uptime_s: 0.0,
        vmm_uptime_s: None,
        params: shown(manager, size, params, &pools),
        memory: MemoryView::default(),
        active: ActiveView::default(),
        balloon: BalloonView { health: BalloonHealth::Missing, target: 0, reported: 0, limit: 0 },
        hotplug: None,
        tools: ToolsView::default(),
        guest: None,
        trouble: None,
        stalled: false,
        ended: None,
        sharing: VmSharing::default(),
        compression: CompressionView::default(),
        inputs: PolicyInputs::default(),
        fault_times: FaultTimesView::default(),
        counters: VmCounters::default(),
        folder: manager.folder_of(name),
    }
}

fn shown(manager: &Manager, size: Pages, params: &VmParams, pools: &[Pool]) -> Params {
    Params {
        size: bytes(size),
        min: bytes(params.min),
        max: bytes(params.max),
        shares: params.shares,
        tax: manager.tax_of(params, pools).into(),
        pool: params.pool.clone(),
    }
}

/// The own memory of the VMM of a paged VM: its private pages, but for the copies of shared ones, which are its guest's.
pub fn vmm_overhead(vm: &Vm) -> u64 {
    let copies = |p: &PagedVm| p.memory().pmap().in_state(Page::Broken).bytes();
    let copies = vm.paged().as_ref().map_or(0, |p| copies(p).0);
    process::rss_anon(vm.process.pid()).unwrap_or_default().0.saturating_sub(copies)
}

fn host_sharing(manager: &Manager, vms: &[Arc<Vm>], totals: &Totals) -> HostSharing {
    let each: Vec<VmSharing> =
        vms.iter().filter_map(|vm| vm.paged().as_ref().map(|p| sharing(manager, vm, p))).collect();
    let sum = |f: &dyn Fn(&VmSharing) -> u64| each.iter().map(f).sum::<u64>();
    let (common, metadata) = manager.commons.common_and_metadata();
    let [breaks_per_s, scan_rate, cores] = manager.share_rates.get();
    HostSharing {
        enabled: manager.config().sharing.enabled,
        shared: sum(&|s| s.shared),
        common: bytes(common),
        saved: sum(&|s| s.shared).saturating_sub(bytes(common)),
        zero_dropped: totals.host.zero_dropped,
        broken: sum(&|s| s.broken),
        breaks: totals.breaks,
        breaks_per_s,
        scanned: totals.scanned,
        passes: totals.passes,
        scan_rate,
        cpu_s: manager.commons.control.cpu().as_secs_f64(),
        cpu_percent: cores * 100.0,
        metadata: metadata.0,
        mappings: sum(&|s| s.mappings),
    }
}

const COUNTS_ON_ZEROS: &str = "its balloon has free-page-reporting and page-poison: a guest with init_on_free would \
                               not get zeros back where it shared; page-poison=off lets it share";

fn sharing(manager: &Manager, vm: &Vm, paged: &PagedVm) -> VmSharing {
    let memory = paged.memory();
    let pages = |state| memory.pmap().in_state(state);
    let counters = memory.counters.values();
    let [breaks_per_s, scan_rate, cores] = vm.share_rates.get();
    let wanted = manager.commons.domain_name(&vm.name, vm.params().salt.as_ref());
    // The one that it is in, which it leaves by and by when its salt is changed.
    let member = memory.membership().map(|member| member.domain.name().to_owned());
    let domain = member.unwrap_or_else(|| wanted.clone());
    let moves = (domain != wanted).then(|| match &*lock(&vm.salt_trouble) {
        Some(why) => {
            format!("its salt was changed: it shares nothing more, and what it shares stays: {why}")
        }
        None => format!("its salt was changed: it is on its way to {}", domain::label(&wanted)),
    });
    VmSharing {
        domain: domain::label(&domain),
        shared: bytes(pages(Page::Shared)),
        saved: bytes(pages(Page::Shared).saturating_sub(paged.shared_part())),
        broken: bytes(pages(Page::Broken)),
        breaks: counters.breaks,
        breaks_per_s,
        scanned: counters.scanned,
        scan_rate,
        cpu_s: counters.share_cpu_ns as f64 / 1e9,
        cpu_percent: cores * 100.0,
        mappings: paged.mappings(),
        note: match vm.counts_on_zeros.get() {
            Some(true) => Some(COUNTS_ON_ZEROS.into()),
            Some(false) | None => moves.or_else(|| paged.share_note()),
        },
    }
}

fn host_compression(vms: &[Arc<Vm>], totals: &Totals) -> CompressionView {
    let mut all = CompressionView::default();
    for vm in vms {
        all += vm.paged().as_ref().map_or_else(CompressionView::default, compression);
    }
    totals.compression(all)
}

fn compression(paged: &PagedVm) -> CompressionView {
    let memory = paged.memory();
    let pages = |state| bytes(memory.pmap().in_state(state));
    let tier = memory.tier().occupancy();
    let (now, most) = memory.tier().limits();
    let c = memory.counters.values();
    let size = |pages: u64| bytes(Pages(pages));
    CompressionView {
        compressed: pages(Page::Compressed),
        filled: pages(Page::Filled),
        cache: size(tier.frames),
        cache_used: size(tier.quarters) / 4,
        cache_limit: bytes(most),
        cache_limit_now: bytes(now),
        stored: size(c.compressed + c.filled),
        restored: size(c.decompressed),
        written_back: size(c.written_back),
        incompressible: size(c.incompressible),
    }
}

/// Whether it lasts, and a guest waits.
fn is_stalled(health: &PagerHealth) -> bool {
    match health {
        PagerHealth::Overdue { .. } | PagerHealth::Unserved | PagerHealth::Unreadable { .. } => {
            true
        }
        PagerHealth::Well | PagerHealth::Ill { .. } => false,
    }
}

fn trouble(health: PagerHealth) -> Option<String> {
    match health {
        PagerHealth::Well => None,
        PagerHealth::Ill { last, ago, times: 1 } => Some(format!("{last} ({} ago)", age(ago))),
        PagerHealth::Ill { last, ago, times } => {
            Some(format!("{last} ({times} times, last {} ago)", age(ago)))
        }
        PagerHealth::Overdue { page, pages, waits_for, waited } => {
            let others = if pages > 1 { format!(", and at {} more", pages - 1) } else { String::new() };
            let waited = age(waited);
            Some(format!("its guest has waited at {page} for {waited}, for {waits_for}{others}"))
        }
        PagerHealth::Unserved => Some(
            "one of the threads that serve it has ended: end ballastd and start it again, and it is taken over"
                .to_owned(),
        ),
        PagerHealth::Unreadable { page, pages, what } => Some(format!(
            "{pages} {} that it waits for cannot be read: {page}: {what}; tried again until it can",
            if pages == 1 { "page" } else { "pages" }
        )),
    }
}

/// # Errors
/// Nothing has been decided yet.
pub fn why(manager: &Manager, vm: &Vm) -> Result<Why, Failure> {
    let (at, decision) = manager
        .decision()
        .ok_or_else(|| Failure::internal("nothing has been decided yet; ask again in a second"))?;
    let vms = manager.vms();
    let name_of =
        |id| vms.iter().find(|v| v.id == id).map_or_else(|| format!("{id}"), |v| v.name.clone());
    let (verdict, steps) = decision.explain(vm.id, name_of);
    Ok(Why {
        vm: vm.name.clone(),
        age_s: at.elapsed().as_secs_f64(),
        trigger: decision.trigger(),
        verdict,
        steps,
        at_ms: None,
        outcomes: journal::under_way(manager.journal.as_ref(), vm),
        notes: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ballast_policy::{Bound, PoolShare, Snapshot, decide};
    use ballast_units::Ppn;

    use super::*;
    use crate::config::rules::PoolRule;

    #[tokio::test]
    async fn a_pool_has_what_is_in_it_and_in_pools_inside_of_it_and_nothing_of_its_neighbour() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        manager.pools.set_configured(&["a", "a/b", "ab"].map(PoolRule::new));
        let size = Pages(8);
        let plain = VmParams::resolve(&[], "", size.into(), Default::default()).unwrap();
        for (name, pool, external) in [("x", "a", 1), ("y", "a/b", 2), ("z", "ab", 4)] {
            let params = VmParams { pool: Some(pool.into()), ..plain.clone() };
            let vm = Vm::of_tests(name, dir.path().join(name), size, params);
            vm.external.store(external, Ordering::Relaxed);
            manager.insert(vm);
        }
        let mut decision = decide(Snapshot {
            trigger: "period".into(),
            before: State::High,
            thresholds: manager.thresholds(),
            budget: manager.host.ledger.budget(),
            free: manager.host.ledger.budget(),
            overhead: Pages::ZERO,
            starting: Pages::ZERO,
            room: Pages::ZERO,
            vms: Vec::new(),
            pools: Vec::new(),
            outside: Vec::new(),
            policy: Default::default(),
            nodes: Vec::new(),
        });
        let defined = manager.pools.pools(&manager.pools.rules());
        let share = |(pool, target): (&Pool, u64)| PoolShare {
            id: pool.id,
            target: Pages(target),
            rho: 1.0,
            bound: Bound::Shares,
        };
        // Not in the order of their names.
        decision.pools = defined.iter().zip([5, 6, 7]).map(share).rev().collect();
        manager.set_decision(Arc::new(decision));
        let views = pools(&manager);
        let pages = |bytes: u64| bytes / Pages(1).bytes().0;
        let seen: Vec<_> = views
            .iter()
            .map(|v| (&*v.name, v.vms.join(" "), pages(v.consumed), pages(v.target)))
            .collect();
        assert_eq!(
            seen,
            [("a", "x".into(), 3, 5), ("a/b", "y".into(), 2, 6), ("ab", "z".into(), 4, 7)]
        );
        let inside: Vec<_> = views.iter().map(|v| v.pools.join(" ")).collect();
        assert_eq!(inside, ["a/b", "", ""]);
    }

    #[test]
    fn what_holds_a_guest_up_is_told_apart_from_what_passes() {
        let (last, ago) = ("a disk failed".to_owned(), Duration::from_secs(7));
        let overdue = |pages| PagerHealth::Overdue {
            page: Ppn(3),
            pages,
            waits_for: "its page to be read from swap",
            waited: Duration::from_secs(65),
        };
        let what = "Input/output error".to_owned();
        let told = [
            (PagerHealth::Well, false, ""),
            (PagerHealth::Ill { last, ago, times: 2 }, false, "a disk failed (2 times, last 7"),
            (overdue(1), true, "waited at ppn 0x3 for 1m05s, for its page to be read from swap"),
            (overdue(4), true, "from swap, and at 3 more"),
            (PagerHealth::Unserved, true, "has ended"),
            (PagerHealth::Unreadable { page: Ppn(3), pages: 2, what }, true, "2 pages"),
        ];
        for (health, stalled, words) in told {
            assert_eq!(is_stalled(&health), stalled, "{health:?}");
            let trouble = trouble(health).unwrap_or_default();
            assert!(trouble.contains(words), "{trouble}");
        }
    }
}
