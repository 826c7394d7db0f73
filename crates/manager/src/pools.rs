//! The host's resource pools: those of the configuration file, and what commands said of pools, key by key, which
//! wins. The latter is kept in a file of the run folder, for the next manager.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ballast_api::{ErrorCode, PoolChange};
use ballast_policy::pools::{Books, Shortage};
use ballast_policy::{Pool, PoolId, TaxRate};
use ballast_units::{Bytes, Pages};
use serde::{Deserialize, Deserializer, Serialize};

use crate::change::either;
use crate::config::rules::PoolRule;
use crate::layout::POOLS;
use crate::manager::Failure;
use crate::sync::lock;
use crate::whole_file;

/// Pools under their names.
pub type Rules = BTreeMap<String, PoolRule>;

/// What commands said of a pool; None: it is as configured, or by default. Older versions wrote all keys of a pool of
/// which a command said anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolSet {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<Pages>,
    /// Some(None): no limit.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "said")]
    pub max: Option<Option<Pages>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expandable: Option<bool>,
    /// Some(None): none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "said")]
    pub tax: Option<Option<TaxRate>>,
}

/// A key that is there, be it with null.
fn said<'de, T: Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<Option<T>, D::Error> {
    T::deserialize(value).map(Some)
}

impl PoolSet {
    /// With what is asked for now.
    ///
    /// # Errors
    /// It cannot be; what is wrong only beside other keys is not looked at.
    pub fn changed(mut self, change: &PoolChange) -> Result<PoolSet, Failure> {
        self.shares = change.shares.or(self.shares);
        self.min = change.min.map(|min| Bytes(min).pages_ceil()).or(self.min);
        self.expandable = change.expandable.or(self.expandable);
        if let Some(max) = either("max", change.max, change.no_max)? {
            self.max = Some(max.map(|max| Bytes(max).pages()));
        }
        if let Some(tax) = either("tax", change.tax, change.no_tax)? {
            let rate = tax.map(TaxRate::new).transpose();
            self.tax = Some(rate.map_err(|e| Failure::bad(format!("tax: {e}")))?);
        }
        Ok(self)
    }

    /// `rule`, but for what commands said.
    pub fn over(&self, rule: PoolRule) -> PoolRule {
        PoolRule {
            name: rule.name,
            shares: self.shares.unwrap_or(rule.shares),
            min: self.min.unwrap_or(rule.min),
            max: self.max.unwrap_or(rule.max),
            expandable: self.expandable.unwrap_or(rule.expandable),
            tax: self.tax.unwrap_or(rule.tax),
        }
    }

    /// What commands said of a key, in words.
    fn of_key(&self, key: &str) -> Option<String> {
        match key {
            "shares" => self.shares.map(|shares| shares.to_string()),
            "min" => self.min.map(|min| min.to_string()),
            "max" => self.max.map(|max| max.map_or("none".into(), |max| max.to_string())),
            "expandable" => self.expandable.map(|expandable| expandable.to_string()),
            "tax" => self.tax.map(|tax| tax.map_or("none".into(), |tax| tax.get().to_string())),
            _ => None,
        }
    }

    fn says_nothing(&self) -> bool {
        *self == PoolSet::default()
    }
}

/// As it is kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    name: String,
    #[serde(flatten)]
    set: PoolSet,
}

type Sets = BTreeMap<String, PoolSet>;

/// Whoever changes what is defined holds `Manager::changing`.
pub struct Pools {
    /// Where what commands said is kept.
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Clone, Debug, Default)]
struct State {
    configured: Rules,
    commanded: Sets,
    /// A name keeps its number for as long as the manager lives.
    ids: HashMap<String, PoolId>,
}

impl Pools {
    /// # Errors
    /// What a former manager left cannot be read.
    pub fn open(run_dir: &Path, configured: &[PoolRule]) -> anyhow::Result<Pools> {
        let path = run_dir.join(POOLS);
        let kept = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice::<Vec<Kept>>(&text)
                .map_err(|e| anyhow::anyhow!("{}: {e}", path.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => anyhow::bail!("{}: {e}", path.display()),
        };
        for Kept { name, set } in &kept {
            set.over(PoolRule::new(name)).check().map_err(|(key, what)| {
                anyhow::anyhow!("{}: pool {name}: {key}: {what}", path.display())
            })?;
        }
        let commanded: Sets = kept.into_iter().map(|kept| (kept.name, kept.set)).collect();
        let configured = by_name(configured);
        let (rules, wrong) = merged(&configured, &commanded);
        // A reload would be refused for it.
        for (name, why) in wrong {
            tracing::error!("pool {name}: {why}: what commands said of it is left out");
        }
        for rule in rules.values() {
            if let Some(parent) = rule.parent().filter(|parent| !rules.contains_key(*parent)) {
                let name = &rule.name;
                tracing::error!("pool {name}: there is no pool {parent} any more: it is in none");
            }
        }
        let state = State { configured, commanded, ..State::default() };
        Ok(Pools { path, state: Mutex::new(state) })
    }

    /// In force now. Where what commands said cannot be beside what the file says by now, the file counts alone.
    pub fn rules(&self) -> Rules {
        let state = lock(&self.state);
        merged(&state.configured, &state.commanded).0
    }

    /// What would be in force with another configuration file.
    ///
    /// # Errors
    /// What commands said of a pool cannot be beside it.
    pub fn rules_with(&self, configured: &[PoolRule]) -> Result<Rules, Failure> {
        let (rules, wrong) = merged(&by_name(configured), &lock(&self.state).commanded);
        match wrong.first() {
            None => Ok(rules),
            Some((name, why)) => Err(Failure::new(
                ErrorCode::Conflict,
                format!("pool {name}, with what commands said of it: {why}"),
            )),
        }
    }

    /// What the configuration file says of a pool, if it defines it.
    pub fn configured(&self, name: &str) -> Option<PoolRule> {
        lock(&self.state).configured.get(name).cloned()
    }

    /// What commands said of a pool, if they did.
    pub fn commanded(&self, name: &str) -> Option<PoolSet> {
        lock(&self.state).commanded.get(name).cloned()
    }

    /// Another configuration file is in force.
    pub fn set_configured(&self, configured: &[PoolRule]) {
        lock(&self.state).configured = by_name(configured);
    }

    /// What is different in `new`, a configuration file, from `old`: of what counts from now on, and of what would if
    /// commands did not say otherwise.
    pub fn differences(&self, old: &[PoolRule], new: &[PoolRule]) -> Vec<String> {
        let (old, new) = (by_name(old), by_name(new));
        let state = lock(&self.state);
        let mut told = Vec::new();
        for (name, rule) in &new {
            let set = state.commanded.get(name);
            let Some(before) = old.get(name) else {
                let but = set.map_or("", |_| ", but for what commands said of it");
                told.push(format!("pool {name} is new{but}"));
                continue;
            };
            let (mut counts, mut overridden) = (Vec::new(), Vec::new());
            for key in rule.differing(before) {
                match set.and_then(|set| set.of_key(key)) {
                    None => counts.push(key),
                    Some(set) => overridden.push(format!(
                        "pool {name}: {key} in the file is overridden by command: {set}"
                    )),
                }
            }
            if !counts.is_empty() {
                told.push(format!("pool {name}: {}", counts.join(", ")));
            }
            told.extend(overridden);
        }
        for name in old.keys().filter(|name| !new.contains_key(*name)) {
            let but = match state.commanded.contains_key(name) {
                true => " from the file, and stays by command",
                false => "",
            };
            told.push(format!("pool {name} is gone{but}"));
        }
        told
    }

    /// Notes what commands said of a pool, or that it was taken back. Nothing, of a pool of the file, is nothing to take
    /// back.
    ///
    /// # Errors
    /// It could not be written down; then nothing is changed.
    pub fn command(&self, name: &str, set: Option<PoolSet>) -> std::io::Result<()> {
        let mut state = lock(&self.state);
        let mut commanded = state.commanded.clone();
        let is_configured = state.configured.contains_key(name);
        match set.filter(|set| !is_configured || !set.says_nothing()) {
            Some(set) => commanded.insert(name.to_owned(), set),
            None => commanded.remove(name),
        };
        let kept = |(name, set): (&String, &PoolSet)| Kept { name: name.clone(), set: set.clone() };
        let all: Vec<Kept> = commanded.iter().map(kept).collect();
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

/// What is in force, and of which pools the configuration alone, with why what commands said of them cannot be.
fn merged(configured: &Rules, commanded: &Sets) -> (Rules, Vec<(String, String)>) {
    let (mut all, mut wrong) = (configured.clone(), Vec::new());
    for (name, set) in commanded {
        let base = configured.get(name).cloned().unwrap_or_else(|| PoolRule::new(name));
        let rule = set.over(base.clone());
        let rule = rule.check().map(|()| rule).unwrap_or_else(|(key, what)| {
            wrong.push((name.clone(), format!("{key}: {what}")));
            base
        });
        all.insert(name.clone(), rule);
    }
    (all, wrong)
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

    fn shares(shares: u32) -> Option<PoolSet> {
        Some(PoolSet { shares: Some(shares), ..PoolSet::default() })
    }

    #[test]
    fn commands_win_key_by_key_and_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let min = Pages::from_mib(1);
        let file = [PoolRule { shares: 7, min, ..PoolRule::new("a") }, PoolRule::new("a/b")];
        let pools = Pools::open(dir.path(), &file).unwrap();
        let parents: Vec<_> =
            pools.pools(&pools.rules()).into_iter().map(|p| (p.name, p.id.0, p.parent)).collect();
        assert_eq!(parents, [("a".into(), 1, None), ("a/b".into(), 2, Some(PoolId(1)))]);
        pools.command("a", shares(9)).unwrap();
        pools.command("c", Some(PoolSet::default())).unwrap();
        // Nothing that could be taken back.
        pools.command("a/b", Some(PoolSet::default())).unwrap();
        assert_eq!(pools.commanded("a/b"), None);
        drop(pools);
        let more = [PoolRule { shares: 8, min: Pages::from_mib(2), ..PoolRule::new("a") }];
        let again = Pools::open(dir.path(), &more).unwrap();
        let rules = again.rules();
        assert_eq!(rules.keys().collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!((rules["a"].shares, rules["a"].min), (9, Pages::from_mib(2)));
        assert_eq!(
            again.differences(&file, &more),
            [
                "pool a: min",
                "pool a: shares in the file is overridden by command: 9",
                "pool a/b is gone"
            ]
        );
        again.command("a", None).unwrap();
        assert_eq!((again.rules()["a"].shares, again.commanded("a")), (8, None));
    }

    #[test]
    fn what_former_versions_left_counts_and_nonsense_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let open = |text: &str| {
            std::fs::write(dir.path().join(POOLS), text).unwrap();
            Pools::open(
                dir.path(),
                &[PoolRule { tax: TaxRate::new(0.5).ok(), ..PoolRule::new("a") }],
            )
        };
        // The whole of a pool: all of it was said by command, "no limit" and "no tax" too.
        let whole = PoolRule { shares: 9, ..PoolRule::new("a") };
        let text = serde_json::to_string(&[&whole]).unwrap();
        assert!(text.contains("\"tax\":null"), "{text}");
        let pools = open(&text).unwrap();
        assert_eq!(pools.rules()["a"], whole);
        assert_eq!(
            pools.commanded("a").map(|set| (set.max, set.tax)),
            Some((Some(None), Some(None)))
        );
        // As it is kept by now, it is the same.
        pools.command("b", None).unwrap();
        let kept = std::fs::read_to_string(dir.path().join(POOLS)).unwrap();
        assert_eq!(open(&kept).unwrap().commanded("a"), pools.commanded("a"));
        assert!(open("[{").is_err());
        let error = open(r#"[{"name":"a","shares":0}]"#).err().unwrap().to_string();
        assert!(error.contains("pools.json: pool a: shares"), "{error}");
    }

    #[test]
    fn where_a_command_cannot_be_beside_the_file_a_reload_is_refused_and_a_start_has_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let max = Some(Some(Pages::from_mib(4)));
        let file = |mib| [PoolRule { min: Pages::from_mib(mib), ..PoolRule::new("a") }];
        let pools = Pools::open(dir.path(), &file(1)).unwrap();
        pools.command("a", Some(PoolSet { max, ..PoolSet::default() })).unwrap();
        assert_eq!(pools.rules()["a"].max, Some(Pages::from_mib(4)));
        let refused = pools.rules_with(&file(8)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Conflict);
        assert!(refused.message.contains("pool a, ") && refused.message.contains("max"));
        let again = Pools::open(dir.path(), &file(8)).unwrap();
        assert_eq!(again.rules()["a"], file(8)[0]);
        // And is in force again with a file beside which it can be.
        again.set_configured(&file(2));
        assert_eq!(again.rules()["a"].max, Some(Pages::from_mib(4)));
    }

    #[test]
    fn what_pools_reserve_must_fit() {
        let rule = |name: &str, mib| PoolRule { min: Pages::from_mib(mib), ..PoolRule::new(name) };
        let both = [rule("a", 300), rule("a/b", 200), rule("c", 300)];
        assert_eq!(check_rules(&both, Pages::from_mib(600)), Ok(()));
        assert!(check_rules(&both, Pages::from_mib(599)).is_err());
    }
}
