//! The host's resource pools: those of the configuration file, and those that commands defined, which
//! win. The latter are kept in a file of the run folder, for the next manager.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ballast_policy::pools::{Books, Shortage};
use ballast_policy::{Pool, PoolId};
use ballast_units::Pages;

use crate::config::rules::PoolRule;
use crate::layout::POOLS;
use crate::sync::lock;
use crate::whole_file;

/// Pools under their names.
pub type Rules = BTreeMap<String, PoolRule>;

/// Whoever changes what is defined holds `Manager::changing`.
pub struct Pools {
    /// Where what commands defined is kept.
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Clone, Debug, Default)]
struct State {
    configured: Rules,
    commanded: Rules,
    /// A name keeps its number for as long as the manager lives.
    ids: HashMap<String, PoolId>,
}

impl Pools {
    /// # Errors
    /// What a former manager left cannot be read.
    pub fn open(run_dir: &Path, configured: &[PoolRule]) -> anyhow::Result<Pools> {
        let path = run_dir.join(POOLS);
        let commanded = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice::<Vec<PoolRule>>(&text)
                .map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => anyhow::bail!("{}: {e}", path.display()),
        };
        for rule in &commanded {
            rule.check().map_err(|(key, what)| {
                anyhow::anyhow!("{}: pool {}: {key}: {what}", path.display(), rule.name)
            })?;
        }
        let state = State { commanded: by_name(&commanded), ..State::default() };
        let pools = Pools { path, state: Mutex::new(state) };
        pools.set_configured(configured);
        Ok(pools)
    }

    /// In force now.
    pub fn rules(&self) -> Rules {
        let state = lock(&self.state);
        merged(&state.configured, &state.commanded)
    }

    /// What would be in force with another configuration file.
    pub fn rules_with(&self, configured: &[PoolRule]) -> Rules {
        merged(&by_name(configured), &lock(&self.state).commanded)
    }

    /// Whether the configuration file defines it, whatever commands say.
    pub fn is_configured(&self, name: &str) -> bool {
        lock(&self.state).configured.contains_key(name)
    }

    /// Another configuration file is in force.
    pub fn set_configured(&self, configured: &[PoolRule]) {
        lock(&self.state).configured = by_name(configured);
    }

    /// Defines a pool by command, or takes that back.
    ///
    /// # Errors
    /// It could not be written down; then nothing is changed.
    pub fn command(&self, name: &str, rule: Option<PoolRule>) -> std::io::Result<()> {
        let mut state = lock(&self.state);
        let mut commanded = state.commanded.clone();
        match rule {
            Some(rule) => commanded.insert(name.to_owned(), rule),
            None => commanded.remove(name),
        };
        let all: Vec<&PoolRule> = commanded.values().collect();
        whole_file::write(&self.path, &serde_json::to_vec(&all)?)?;
        state.commanded = commanded;
        Ok(())
    }

    /// As the policy sees them, in order of their names: parents first.
    pub fn pools(&self, rules: &Rules) -> Vec<Pool> {
        let ids = &mut lock(&self.state).ids;
        for name in rules.keys() {
            let next = PoolId(ids.len() as u32 + 1);
            ids.entry(name.clone()).or_insert(next);
        }
        as_pools(rules, |name| ids.get(name).copied())
    }

    /// The number of a pool that there is.
    pub fn id(&self, name: Option<&str>) -> Option<PoolId> {
        let state = lock(&self.state);
        name.and_then(|name| state.ids.get(name).copied())
    }
}

fn by_name(rules: &[PoolRule]) -> Rules {
    rules.iter().map(|rule| (rule.name.clone(), rule.clone())).collect()
}

fn merged(configured: &Rules, commanded: &Rules) -> Rules {
    let mut all = configured.clone();
    all.extend(commanded.clone());
    all
}

fn as_pools(rules: &Rules, id: impl Fn(&str) -> Option<PoolId>) -> Vec<Pool> {
    let pool = |rule: &PoolRule| {
        Some(Pool {
            id: id(&rule.name)?,
            name: rule.name.clone(),
            parent: rule.parent().and_then(&id),
            shares: rule.shares,
            min: rule.min,
            max: rule.max,
            expandable: rule.expandable,
            tax: rule.tax,
        })
    };
    rules.values().filter_map(pool).collect()
}

/// Whether a host of `capacity` can hold what the pools reserve, before any VM is there.
///
/// # Errors
/// The pool that lacks memory, else the host.
pub fn check_rules(rules: &[PoolRule], capacity: Pages) -> Result<(), Shortage> {
    let rules = by_name(rules);
    let ids: HashMap<&str, PoolId> =
        rules.keys().zip(1u32..).map(|(name, id)| (name.as_str(), PoolId(id))).collect();
    let pools = as_pools(&rules, |name| ids.get(name).copied());
    let nothing = Books { pools: &[], capacity, promises: Vec::new() };
    Books { pools: &pools, capacity, promises: Vec::new() }.no_worse_than(&nothing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_win_and_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let file = [PoolRule { shares: 7, ..PoolRule::new("a") }, PoolRule::new("a/b")];
        let pools = Pools::open(dir.path(), &file).unwrap();
        let parents: Vec<_> =
            pools.pools(&pools.rules()).into_iter().map(|p| (p.name, p.id.0, p.parent)).collect();
        assert_eq!(parents, [("a".into(), 1, None), ("a/b".into(), 2, Some(PoolId(1)))]);
        pools.command("a", Some(PoolRule { shares: 9, ..PoolRule::new("a") })).unwrap();
        pools.command("c", Some(PoolRule::new("c"))).unwrap();
        drop(pools);
        let again = Pools::open(dir.path(), &file[..1]).unwrap();
        let rules = again.rules();
        assert_eq!(rules.keys().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!(rules["a"].shares, 9);
        again.command("a", None).unwrap();
        assert_eq!(again.rules()["a"].shares, 7);
        std::fs::write(dir.path().join(POOLS), "[{").unwrap();
        assert!(Pools::open(dir.path(), &[]).is_err());
        let none = serde_json::to_vec(&[PoolRule { shares: 0, ..PoolRule::new("a") }]).unwrap();
        std::fs::write(dir.path().join(POOLS), none).unwrap();
        let error = Pools::open(dir.path(), &[]).err().unwrap().to_string();
        assert!(error.contains("pools.json: pool a: shares"), "{error}");
    }

    #[test]
    fn what_pools_reserve_must_fit() {
        let rule = |name: &str, mib| PoolRule { min: Pages::from_mib(mib), ..PoolRule::new(name) };
        let both = [rule("a", 300), rule("a/b", 200), rule("c", 300)];
        assert_eq!(check_rules(&both, Pages::from_mib(600)), Ok(()));
        assert!(check_rules(&both, Pages::from_mib(599)).is_err());
    }
}
