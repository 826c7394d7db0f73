//! What VMs needed, slice of time by slice, from a journal.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use ballast_journal::Reader;
use ballast_policy::{Decision, State, VmState};
use ballast_units::Pages;
use serde::Serialize;

use crate::PlanError;

/// What a VM is taken to need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Demand {
    /// Its active memory, and what its min keeps from being taken.
    #[default]
    Active,
    /// All that it had in memory, whatever sharing saved of it.
    Consumed,
}

impl Demand {
    /// What `vm` needs now, in pages.
    fn of(self, vm: &VmState, state: State) -> u64 {
        // What others share with it, it needs as well, wherever they are.
        let (active, had) = (vm.demand.active, vm.used());
        // While nothing is kept from it, a VM uses no more than it has: an estimate above that is
        // one that has only begun.
        let squeezed = state != State::High || vm.wants_more || !vm.balloon_goal.is_zero();
        let used = if squeezed { active } else { active.min(had) };
        let need = match self {
            Demand::Active => used.max(vm.demand.min.min(had)),
            Demand::Consumed => used.max(had),
        };
        need.min(vm.size).0
    }
}

/// A plan holds no more slices of a host than two years of minutes, nor more needs than a year of 120 VMs has, of 16 bytes
/// each: a crafted journal repeats a turn over and over for a few bytes.
const MOST_SLOTS: usize = 1 << 20;
const MOST_NEEDS: usize = 1 << 26;

/// One slice of time of one host. Pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slot {
    /// Its number: milliseconds since 1970 by the length of a slot.
    pub number: u64,
    /// Of the VMs that were there, one after another perhaps: which, and the most that it needed. In order of the first.
    pub needs: Vec<(usize, u64)>,
    /// So many of them at one moment, at most.
    pub most: usize,
    /// Sum of the configured sizes of those that were there at one moment, at most.
    pub sizes: u64,
    /// Memory that is not for VMs' pages.
    pub overhead: u64,
    /// Machine memory.
    pub budget: u64,
    /// Free memory that reclamation aims for.
    pub goal: u64,
    /// Reclamation was under way, or a VM waited for memory or swapped in.
    pub was_short: bool,
}

impl Slot {
    /// What all VMs needed, if each had its peak at the same moment of the slot.
    pub fn need(&self) -> u64 {
        self.needs.iter().map(|(_, need)| need).sum()
    }

    /// The part of the budget that VMs and their overhead may fill.
    pub(crate) fn usable(&self) -> f64 {
        1.0 - self.goal as f64 / self.budget.max(1) as f64
    }

    /// The overcommitment factor, sum of sizes / machine memory, up to which memory would have
    /// sufficed in this slot.
    pub fn factor(&self) -> f64 {
        self.sizes as f64 * self.usable() / (self.need() + self.overhead).max(1) as f64
    }

    /// Whether it says how far memory could have been overcommitted. One without VMs does not, nor one with VMs of no
    /// size or with all of the budget to be kept free, which no manager records: its factor is 0.
    fn tells(&self) -> bool {
        !self.needs.is_empty() && self.budget > 0 && self.factor() > 0.0
    }
}

/// A host's record.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Name of the host.
    pub host: String,
    /// Milliseconds.
    pub slot_ms: u64,
    /// Those with VMs, in order of time. Where the manager was away there are none.
    pub slots: Vec<Slot>,
    /// Names of the VMs, by the numbers that slots have for them.
    pub vms: Vec<String>,
    /// What each was promised last whatever others need: its min, pages.
    pub mins: Vec<u64>,
    /// Runs of managers that recorded it: host, and when each was started, milliseconds since 1970.
    pub runs: BTreeSet<(String, u64)>,
    /// What could not be read.
    pub notes: Vec<String>,
}

/// What a record holds, for the reader of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Facts {
    /// Name of the host.
    pub host: String,
    /// Slots with VMs, and the length of one, seconds.
    pub slots: u64,
    /// Length of a slot, seconds.
    pub slot_s: f64,
    /// From the first slot to the last, seconds.
    pub span_s: f64,
    /// VMs that were seen.
    pub vms: u64,
    /// VMs that were there at one moment: the most of a slot, on average.
    pub vms_mean: f64,
    /// Bytes; of the last slot.
    pub budget: u64,
    /// Mean size of a VM, and mean need, bytes.
    pub size_mean: u64,
    /// What a VM needed on average, bytes.
    pub need_mean: u64,
    /// Sum of sizes / budget, on average.
    pub factor_mean: f64,
    /// The part of the slots in which reclamation ran, or a VM waited or swapped in.
    pub was_short: f64,
    /// What could not be read.
    pub notes: Vec<String>,
}

/// How a journal is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Milliseconds, above 0.
    pub slot_ms: u64,
    /// What a VM is taken to need.
    pub demand: Demand,
    /// Milliseconds since 1970.
    pub since_ms: Option<u64>,
    /// Only history up to this moment, milliseconds since 1970.
    pub until_ms: Option<u64>,
}

impl History {
    /// Reads the record of one host.
    ///
    /// # Errors
    /// When the journal cannot be read, no VM ran then, or it has more slices than a plan can hold. What is lost of it is
    /// noted.
    pub fn read(path: &Path, span: Span) -> Result<History, PlanError> {
        let mut reader = Reader::open(path)?;
        if let Some(since) = span.since_ms {
            reader = reader.since(since);
        }
        let mut history = History { slot_ms: span.slot_ms, ..History::default() };
        let mut ids: HashMap<String, usize> = HashMap::new();
        let mut last: Option<Decision> = None;
        let (mut needs, mut header) = (0, None);
        for turn in reader.by_ref() {
            let at = turn.moment.at_ms;
            if span.until_ms.is_some_and(|until| at > until) {
                break;
            }
            if !turn.again || last.is_none() {
                let failed = |what| PlanError::Segment { path: turn.segment().to_owned(), what };
                last = Some(turn.decision().map_err(failed)?);
            }
            if span.since_ms.is_some_and(|since| at < since) {
                continue;
            }
            if history.host.is_empty() {
                history.host.clone_from(&turn.header.host);
            }
            if header.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &turn.header)) {
                history.runs.insert((turn.header.host.clone(), turn.header.manager_ms));
                header = Some(turn.header.clone());
            }
            let Some(decision) = &last else { continue };
            let vms = decision.snapshot.vms.iter().map(|vm| {
                let name = turn.names.get(&vm.demand.id).cloned();
                let name = name.unwrap_or_else(|| vm.demand.id.to_string());
                let next = ids.len();
                (*ids.entry(name).or_insert(next), vm)
            });
            let vms: Vec<(usize, &VmState)> = vms.collect();
            needs += history.add(at / span.slot_ms.max(1), decision, &vms, span.demand);
            too_many(history.slots.len(), needs, (MOST_SLOTS, MOST_NEEDS))
                .map_err(|what| PlanError::Large { path: path.to_owned(), what })?;
        }
        history.vms = vec![String::new(); ids.len()];
        for (name, i) in ids {
            history.vms[i] = name;
        }
        history.notes = reader.troubles().iter().map(ToString::to_string).collect();
        history.slots.retain(Slot::tells);
        if history.slots.is_empty() {
            return Err(PlanError::Empty { path: path.to_owned(), notes: history.notes });
        }
        Ok(history)
    }

    /// How many VMs are new in their slot.
    fn add(
        &mut self,
        number: u64,
        decision: &Decision,
        vms: &[(usize, &VmState)],
        demand: Demand,
    ) -> usize {
        // A clock that was set back goes on in the slot that it left.
        if self.slots.last().is_none_or(|last| last.number < number) {
            self.slots.push(Slot { number, ..Slot::default() });
        }
        let Some(slot) = self.slots.last_mut() else { return 0 };
        let before = slot.needs.len();
        let snapshot = &decision.snapshot;
        slot.most = slot.most.max(vms.len());
        slot.sizes = slot.sizes.max(vms.iter().map(|(_, vm)| vm.size.0).sum());
        for (i, vm) in vms {
            let need = demand.of(vm, decision.state);
            match slot.needs.binary_search_by_key(i, |(i, _)| *i) {
                Ok(at) => slot.needs[at].1 = slot.needs[at].1.max(need),
                Err(at) => slot.needs.insert(at, (*i, need)),
            }
            if self.mins.len() <= *i {
                self.mins.resize(*i + 1, 0);
            }
            self.mins[*i] = vm.demand.min.0;
            slot.was_short |= vm.wants_more && vm.balloon_goal.is_zero();
        }
        slot.overhead = slot.overhead.max(snapshot.overhead.0);
        slot.budget = snapshot.budget.0;
        slot.goal = snapshot.thresholds.goal().0.min(snapshot.budget.0);
        slot.was_short |= decision.state != State::High;
        slot.needs.len() - before
    }

    /// What it holds, for people.
    pub fn facts(&self) -> Facts {
        let n = self.slots.len().max(1) as f64;
        let mean = |of: &dyn Fn(&Slot) -> f64| self.slots.iter().map(of).sum::<f64>() / n;
        let bytes = |pages: f64| Pages(pages as u64).bytes().0;
        let seconds = |slots: u64| (slots * self.slot_ms) as f64 / 1e3;
        let (first, last) = (self.slots.first(), self.slots.last());
        let vms = mean(&|s| s.most as f64);
        let seen = mean(&|s| s.needs.len() as f64);
        Facts {
            host: self.host.clone(),
            slots: self.slots.len() as u64,
            slot_s: seconds(1),
            span_s: first
                .zip(last)
                .map_or(0.0, |(first, last)| seconds(last.number - first.number + 1)),
            vms: self.vms.len() as u64,
            vms_mean: vms,
            budget: bytes(last.map_or(0, |s| s.budget) as f64),
            size_mean: bytes(mean(&|s| s.sizes as f64) / vms.max(1e-9)),
            need_mean: bytes(mean(&|s| s.need() as f64) / seen.max(1e-9)),
            factor_mean: mean(&|s| s.sizes as f64 / s.budget.max(1) as f64),
            was_short: mean(&|s| f64::from(u8::from(s.was_short))),
            notes: self.notes.clone(),
        }
    }
}

/// What there is too much of, if there is.
fn too_many(slots: usize, needs: usize, most: (usize, usize)) -> Result<(), String> {
    if slots > most.0 {
        return Err(format!("it has more than {} slices of time", most.0));
    }
    if needs > most.1 {
        return Err(format!("its slices of time have more than {} needs of VMs", most.1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ballast_policy::{Health, Policy, Snapshot, TaxRate, Thresholds, Tools, VmDemand};
    use ballast_units::VmId;

    use super::*;

    #[test]
    fn a_record_of_more_slices_than_a_plan_can_hold_is_refused() {
        let most = (3, 7);
        assert_eq!(too_many(3, 7, most), Ok(()));
        assert!(too_many(4, 7, most).unwrap_err().contains("more than 3 slices"));
        assert!(too_many(3, 8, most).unwrap_err().contains("more than 7 needs"));
    }

    /// Three quarters of what it uses are shared among four.
    fn vm() -> VmState {
        VmState {
            demand: VmDemand {
                id: VmId(1),
                shares: 1,
                min: Pages::ZERO,
                max: Pages(256),
                tax: TaxRate::default(),
                active: Pages(180),
            },
            consumed: Pages(65),
            size: Pages(256),
            balloon_goal: Pages::ZERO,
            balloon_health: Health::Healthy,
            balloon_limit: Pages(166),
            balloon_rate: None,
            short: false,
            wants_more: false,
            swap_free: Pages(256),
            pool: None,
            overhead: Pages::ZERO,
            beyond: Pages::ZERO,
            tools: Tools::default(),
            saved: Pages(135),
        }
    }

    /// With room for far more.
    fn turn_of(vms: Vec<VmState>) -> Decision {
        let budget = Pages(1 << 20);
        ballast_policy::decide(Snapshot {
            trigger: "period".into(),
            before: State::High,
            thresholds: Thresholds::default_for(budget),
            budget,
            free: budget,
            overhead: Pages(10),
            starting: Pages::ZERO,
            room: Pages::ZERO,
            vms,
            pools: Vec::new(),
            outside: Vec::new(),
            policy: Policy::default(),
            nodes: Vec::new(),
        })
    }

    #[test]
    fn of_vms_that_follow_one_another_in_a_slot_those_count_that_are_there_at_once() {
        let mut history = History { slot_ms: 1000, ..History::default() };
        let with_min = |min| {
            let mut vm = vm();
            vm.demand.min = Pages(min);
            vm
        };
        let turns =
            [vec![(0, with_min(7)), (1, vm())], vec![(1, with_min(9)), (2, vm())], vec![(2, vm())]];
        for turn in turns {
            let decision = turn_of(turn.iter().map(|(_, vm)| *vm).collect());
            let vms: Vec<(usize, &VmState)> = turn.iter().map(|(i, vm)| (*i, vm)).collect();
            history.add(5, &decision, &vms, Demand::Active);
        }
        let [slot] = &history.slots[..] else { panic!("{:?}", history.slots) };
        assert_eq!((slot.most, slot.sizes, slot.needs.len()), (2, 2 * 256, 3));
        assert_eq!(history.mins, [7, 9, 0]);
    }

    #[test]
    fn what_sharing_saves_of_a_vm_it_needs_all_the_same() {
        let mut vm = vm();
        let need =
            |vm: &VmState, state| [Demand::Active, Demand::Consumed].map(|d| d.of(vm, state));
        assert_eq!(need(&vm, State::High), [180, 200]);
        assert_eq!(need(&vm, State::Soft), [180, 200]);
        // An estimate that has only begun.
        vm.demand.active = Pages(250);
        assert_eq!(need(&vm, State::High), [200, 200]);
        (vm.demand.active, vm.demand.min) = (Pages(20), Pages(128));
        assert_eq!(need(&vm, State::High), [128, 200]);
        // What its balloon took and others share is not used by it.
        vm.tools.unsaved = Pages(100);
        assert_eq!(need(&vm, State::High), [100, 100]);
    }

    #[test]
    fn a_slot_whose_factor_is_nothing_tells_nothing() {
        let good = Slot { needs: vec![(0, 5)], sizes: 10, budget: 20, goal: 1, ..Slot::default() };
        assert!(good.tells());
        for bad in [
            Slot { needs: vec![], ..good.clone() },
            Slot { budget: 0, ..good.clone() },
            Slot { sizes: 0, ..good.clone() },
            Slot { goal: good.budget, ..good.clone() },
        ] {
            assert!(!bad.tells(), "{bad:?}");
        }
    }
}
