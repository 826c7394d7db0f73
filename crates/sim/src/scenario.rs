//! A scenario: a host, its VMs with their loads, and what happens when; read from TOML and checked as
//! a whole.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ballast_policy::{BalloonConfig, PolicyKind, SamplingConfig, Scale, TaxRate, ToolOrder};
use ballast_units::Pages;

use crate::Millis;
use crate::file::File;
use crate::load::{Load, Shape};
use crate::models::Models;
use crate::random::Random;
use crate::vm::{Driver, VmSpec};

/// What is wrong with a scenario.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ScenarioError {
    #[error("scenario {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("scenario {}, line {line}: {what}", .path.display())]
    Wrong { path: PathBuf, line: usize, what: String },
    #[error("recorded trace {}: {what}", .path.display())]
    Trace { path: PathBuf, what: String },
}

/// What all hosts of a scenario have in common.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a step is while anything moves: 10 ms to 60 s.
    pub tick: Millis,
    /// How long a step may become while nothing moves; at least a tick.
    pub calm: Millis,
    /// Each host's budget at first.
    pub memory: Pages,
    /// Room for swap that a host may promise.
    pub swap: Pages,
    /// How thresholds follow from the budget.
    pub scale: Scale,
    /// Which reading of what VMs need decides.
    pub policy: PolicyKind,
    /// Of active memory.
    pub sampling: SamplingConfig,
    /// How balloons are driven.
    pub balloon: BalloonConfig,
    /// Which tool is used first.
    pub tools: ToolOrder,
    /// What mechanisms cost.
    pub models: Models,
    /// What happens, in any order.
    pub events: Vec<Event>,
}

/// Something that happens to a host, or to VMs of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// When, since the scenario began.
    pub at: Millis,
    /// A VM's name, or the beginning of names with `*` behind it; empty if it is about the host alone.
    pub vm: String,
    /// At least one.
    pub changes: Vec<Change>,
}

impl Event {
    /// Whether it is about the VM of this name.
    pub fn names(&self, name: &str) -> bool {
        match self.vm.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == self.vm,
        }
    }
}

/// What an event changes, of the VMs it names or of the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    Shares(u32),
    Min(Pages),
    Max(Pages),
    Tax(TaxRate),
    Driver(Driver),
    /// The host's budget.
    Memory(Pages),
    /// Whether swap files can be written.
    Disk(bool),
}

/// Some VMs that are alike.
#[derive(Clone, Debug)]
pub struct Group {
    /// Unique in its scenario, as its VMs' names are.
    pub name: String,
    /// VMs on each host.
    pub count: u64,
    /// What they have in common; its load is put in place by [`Scenario::vms`].
    pub like: VmSpec,
    /// Of their loads.
    pub shape: Shape,
    /// Between the starts of one and the next.
    pub stagger: Millis,
}

impl Group {
    /// What its VM `i`, from 0, is called: numbered from 1 where there is more than one.
    pub(crate) fn vm_name(&self, i: u64) -> String {
        match self.count {
            1 => self.name.clone(),
            _ => format!("{}{}", self.name, i + 1),
        }
    }
}

/// A scenario that was checked.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// As the file says; else the file's own name, without what follows the point.
    pub name: String,
    /// Virtual time that each host runs for, above 0.
    pub duration: Millis,
    /// Decides all random numbers.
    pub seed: u64,
    /// How many hosts there are, all alike but for their random numbers.
    pub hosts: u64,
    /// The distance of points in the series.
    pub(crate) record: Millis,
    pub(crate) settings: Arc<Settings>,
    pub(crate) groups: Vec<Group>,
}

impl Scenario {
    /// Reads and checks a file; recorded traces are found beside it.
    ///
    /// # Errors
    /// [`ScenarioError::Read`]; else the first thing that is wrong, with its line.
    pub fn load(path: &Path) -> Result<Scenario, ScenarioError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScenarioError::Read { path: path.to_owned(), source })?;
        Scenario::parse(path, &text)
    }

    /// The same of a text that stands at `path`.
    ///
    /// # Errors
    /// As [`Scenario::load`].
    pub fn parse(path: &Path, text: &str) -> Result<Scenario, ScenarioError> {
        let wrong = |at: usize, what: String| ScenarioError::Wrong {
            path: path.to_owned(),
            line: text[..at.min(text.len())].matches('\n').count() + 1,
            what,
        };
        let file: File = toml::from_str(text).map_err(|e| {
            wrong(e.span().map_or(0, |span| span.start), e.message().replace('\n', "; "))
        })?;
        crate::check::check(file, path, &wrong)
    }

    /// Which reading of what VMs need decides.
    pub fn policy(&self) -> PolicyKind {
        self.settings.policy
    }

    /// The VMs of the host with this seed.
    pub(crate) fn vms(&self, seed: u64) -> Vec<VmSpec> {
        let mut specs = Vec::new();
        for (g, group) in self.groups.iter().enumerate() {
            for i in 0..group.count {
                let random = Random::new(seed, ((g as u64 + 1) << 32) | i);
                specs.push(VmSpec {
                    name: group.vm_name(i),
                    group: g,
                    start: group.like.start + group.stagger * i,
                    load: Load::new(group.shape.clone(), random),
                    ..group.like.clone()
                });
            }
        }
        specs
    }

    /// The same scenario under another policy.
    #[must_use]
    pub fn under(&self, policy: PolicyKind) -> Scenario {
        let settings = Settings { policy, ..(*self.settings).clone() };
        Scenario { settings: Arc::new(settings), ..self.clone() }
    }

    /// Tests: the same scenario with another order of the tools.
    #[must_use]
    pub fn ordered(&self, tools: ToolOrder) -> Scenario {
        let settings = Settings { tools, ..(*self.settings).clone() };
        Scenario { settings: Arc::new(settings), ..self.clone() }
    }
}

pub(crate) fn duration(ms: Millis) -> Duration {
    Duration::from_millis(ms)
}

#[cfg(test)]
#[path = "scenario_tests.rs"]
mod tests;
