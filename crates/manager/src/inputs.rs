//! What policies know of VMs beside shares and sampled active memory: miss curves from the sampler, and
//! the pressure that guests report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::{MissPoint, PolicyInputs, PressureView, RunState};
use ballast_policy::{Policy, PolicyKind, VmMisses, VmPressure};
use ballast_qemu::MemoryPressure;
use ballast_units::Pages;

use crate::sync::lock;
use crate::vm::Vm;

/// A report that is older says nothing of now.
const FRESH: Duration = Duration::from_secs(30);

/// Periods.
const STALE: u32 = 4;

/// What was last heard from a guest's agent.
#[derive(Debug, Default)]
pub struct AgentReport {
    /// When it was heard, and what. None: nothing yet.
    pub pressure: Option<(Instant, MemoryPressure)>,
    /// Why nothing was heard the last time.
    pub trouble: Option<String>,
}

impl AgentReport {
    fn fresh(&self) -> Option<(Duration, MemoryPressure)> {
        let (at, pressure) = self.pressure?;
        Some((at.elapsed(), pressure)).filter(|(age, _)| *age < FRESH)
    }
}

/// What the policy is told: only what it reads, so that the journal holds no more.
pub fn policy(kind: PolicyKind, vms: &[&Arc<Vm>]) -> Policy {
    let mut policy = Policy { kind, ..Policy::default() };
    if kind.wants_misses() {
        policy.misses =
            vms.iter().filter_map(|vm| Some(VmMisses { id: vm.id, points: curve(vm)? })).collect();
    }
    if kind.wants_pressure() {
        policy.pressure = vms
            .iter()
            .filter_map(|vm| {
                let (_, pressure) = lock(&vm.agent).as_ref()?.fresh()?;
                Some(VmPressure { id: vm.id, some: pressure.some })
            })
            .collect();
    }
    policy
}

/// None for a VM that is not paged, not yet sampled, or of which the last sample says nothing of now: it
/// runs, but has stood still for [`STALE`] periods since, waiting for memory. A curve by which it has too little to
/// run would never be corrected.
fn curve(vm: &Vm) -> Option<Vec<(Pages, f64)>> {
    vm.paged().as_ref()?;
    // What was sampled before nothing could be taken from it any more is no longer so.
    if !vm.may_be_paged() {
        return None;
    }
    let runs = vm.shown_state() == RunState::Running;
    let sampling = lock(&vm.sampling);
    if runs && sampling.stood_still > sampling.set.config().period.saturating_mul(STALE) {
        return None;
    }
    sampling.times.curve(vm.size)
}

/// What is known of a VM, whether or not the policy of this kind reads it, and what that one lacks.
pub fn view(vm: &Vm, kind: PolicyKind) -> PolicyInputs {
    let curve = curve(vm);
    let agent = lock(&vm.agent);
    let heard = agent.as_ref().and_then(AgentReport::fresh);
    let missing = match kind {
        PolicyKind::MissRatio if curve.is_none() => Some(format!(
            "policy {kind}: no curve (not sampled yet, it hardly runs, or may not be paged), gives it what idle-tax would"
        )),
        PolicyKind::Pressure if heard.is_none() => Some(format!(
            "policy {kind}: its guest reports none{}, uses its shares as they are",
            if agent.is_none() { " (no guest agent's port)" } else { "" }
        )),
        _ => None,
    };
    PolicyInputs {
        policy: kind.to_string(),
        curve: curve
            .unwrap_or_default()
            .into_iter()
            .map(|(pages, misses_per_s)| MissPoint { memory: pages.bytes().0, misses_per_s })
            .collect(),
        pressure: heard.map(|(age, pressure)| PressureView {
            some: pressure.some,
            full: pressure.full,
            age_s: age.as_secs_f64(),
        }),
        agent_trouble: agent.as_ref().and_then(|agent| agent.trouble.clone()),
        missing,
    }
}
