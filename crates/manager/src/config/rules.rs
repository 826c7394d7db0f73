//! What the configuration says of VMs, by name or pattern, and of pools.

use ballast_policy::TaxRate;
use ballast_policy::pools::DEFAULT_SHARES;
use ballast_units::{Bytes, Pages, good_pool_name};
use serde::{Deserialize, Serialize};

use super::accounts;
use crate::limits;

/// A table `[[vm]]`, or `[defaults]` without a name.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VmTable {
    name: Option<String>,
    pool: Option<String>,
    shares: Option<u32>,
    min: Option<String>,
    max: Option<String>,
    tax: Option<f64>,
    guest_agent: Option<bool>,
    users: Option<Vec<String>>,
}

/// A table `[pool.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolTable {
    shares: Option<u32>,
    min: Option<String>,
    max: Option<String>,
    expandable: Option<bool>,
    tax: Option<f64>,
}

/// A size, or a part of the VM's. Scenarios say the same, within other bounds (`crates/sim/src/amount.rs`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// As large as that, whatever the VM's size.
    Size(Pages),
    /// Per cent, 0 to 100.
    Percent(f64),
}

impl Amount {
    fn parse(text: &str) -> Result<Amount, String> {
        match text.strip_suffix('%') {
            None => text
                .parse::<Bytes>()
                .map(|bytes| Amount::Size(bytes.pages_ceil()))
                .map_err(|e| e.to_string()),
            Some(percent) => match percent.trim().parse::<f64>() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Amount::Percent(percent)),
                _ => Err(format!("'{text}' is not a size, nor a part from 0% to 100%")),
            },
        }
    }

    /// Of a VM of `size`.
    pub fn of(self, size: Pages) -> Pages {
        match self {
            Amount::Size(pages) => pages,
            Amount::Percent(percent) => Pages((size.0 as f64 * percent / 100.0).round() as u64),
        }
    }
}

/// What VMs get whose names match, where nothing else was said of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmRule {
    /// A name, or a pattern: `*` stands for any characters, `?` for one.
    pub pattern: String,
    /// One that is defined in the file.
    pub pool: Option<String>,
    /// At least 1.
    pub shares: Option<u32>,
    /// Guaranteed memory.
    pub min: Option<Amount>,
    /// A limit; what is above the VM's size limits nothing.
    pub max: Option<Amount>,
    /// 0 <= rate < 1.
    pub tax: Option<f64>,
    /// Whether one that is started gets a port for its guest's agent.
    pub guest_agent: Option<bool>,
    /// Whose processes may come by its name, where others start VMs. None: anybody's.
    pub users: Option<Vec<u32>>,
}

/// A pool as it was defined, in the file or by a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolRule {
    /// "prod/db": db inside prod.
    pub name: String,
    /// At least 1, against those of the VMs and pools beside it.
    pub shares: u32,
    /// Reserved for what is inside of it.
    pub min: Pages,
    /// What is inside of it gets no more together; at least `min`. None: no limit.
    pub max: Option<Pages>,
    /// Whether promises that its own `min` does not cover are taken from what it is inside of.
    pub expandable: bool,
    /// Of VMs inside of it without one. None: its parent's, or the host's.
    pub tax: Option<TaxRate>,
}

impl PoolRule {
    /// vSphere's defaults: "normal" shares, nothing reserved, no limit, expandable.
    pub fn new(name: &str) -> PoolRule {
        PoolRule {
            name: name.to_owned(),
            shares: DEFAULT_SHARES,
            min: Pages::ZERO,
            max: None,
            expandable: true,
            tax: None,
        }
    }

    /// The pool that it is inside of.
    pub fn parent(&self) -> Option<&str> {
        self.name.rsplit_once('/').map(|(parent, _)| parent)
    }

    /// The keys of which another says something else.
    pub fn differing(&self, other: &PoolRule) -> impl Iterator<Item = &'static str> {
        let keys = [
            ("shares", self.shares != other.shares),
            ("min", self.min != other.min),
            ("max", self.max != other.max),
            ("expandable", self.expandable != other.expandable),
            ("tax", self.tax != other.tax),
        ];
        keys.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key)
    }

    /// # Errors
    /// The key, and what is wrong with it.
    pub fn check(&self) -> Result<(), limits::Wrong> {
        if !good_pool_name(&self.name) {
            return Err((
                "name",
                format!(
                    "'{}' is not a name of A-Za-z0-9._-, or several joined by slashes",
                    self.name
                ),
            ));
        }
        limits::shares(self.shares)?;
        self.max.map(limits::max).transpose()?;
        if let Some(max) = self.max.filter(|max| *max < self.min) {
            return Err(("max", format!("{max} is below min, {}", self.min)));
        }
        Ok(())
    }
}

/// Whether a VM's name matches.
pub fn matches(pattern: &str, name: &str) -> bool {
    // Where the last star was, and how much of the name it stands for: it is given more when what
    // comes behind it does not match.
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, stood)) => {
                    star = Some((at, stood + 1));
                    (p, n) = (at + 1, stood + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

/// What all matching rules say together: of each key, the last that has it.
pub fn rule_for(rules: &[VmRule], name: &str) -> VmRule {
    let mut found = VmRule { pattern: name.to_owned(), ..VmRule::default() };
    for rule in rules.iter().filter(|rule| matches(&rule.pattern, name)) {
        found.pool = rule.pool.clone().or(found.pool);
        found.shares = rule.shares.or(found.shares);
        found.min = rule.min.or(found.min);
        found.max = rule.max.or(found.max);
        found.tax = rule.tax.or(found.tax);
        found.guest_agent = rule.guest_agent.or(found.guest_agent);
        found.users = rule.users.clone().or(found.users);
    }
    found
}

type Wrong = (String, String);

/// Checks the tables; an error names its key.
pub(super) fn vm_rules(
    defaults: Option<VmTable>,
    tables: Vec<VmTable>,
    pools: &[PoolRule],
) -> Result<Vec<VmRule>, Wrong> {
    let mut rules = Vec::new();
    if let Some(table) = defaults {
        if table.name.is_some() {
            return Err(("defaults.name".into(), "defaults are for all VMs".into()));
        }
        let table = VmTable { name: Some("*".into()), ..table };
        rules.push(vm_rule("defaults", table, pools)?);
    }
    for (i, table) in tables.into_iter().enumerate() {
        rules.push(vm_rule(&format!("vm[{i}]"), table, pools)?);
    }
    Ok(rules)
}

fn vm_rule(at: &str, table: VmTable, pools: &[PoolRule]) -> Result<VmRule, Wrong> {
    let wrong = |key: &str, what: String| (format!("{at}.{key}"), what);
    let pattern = table.name.ok_or_else(|| {
        (at.to_owned(), "without a name: a VM's, or a pattern of them".to_owned())
    })?;
    let good = |c: char| c.is_ascii_alphanumeric() || "._-*?".contains(c);
    if pattern.is_empty() || !pattern.chars().all(good) {
        return Err(wrong(
            "name",
            format!("'{pattern}' is not a name or pattern of A-Za-z0-9._-*?"),
        ));
    }
    if let Some(pool) = &table.pool
        && !pools.iter().any(|p| p.name == *pool)
    {
        return Err(wrong("pool", format!("no pool '{pool}' is defined")));
    }
    table.shares.map(limits::shares).transpose().map_err(|(key, what)| wrong(key, what))?;
    if let Some(tax) = table.tax {
        TaxRate::new(tax).map_err(|e| wrong("tax", e.to_string()))?;
    }
    let amount = |key: &str, text: Option<String>| {
        text.map(|text| Amount::parse(&text).map_err(|e| wrong(key, e))).transpose()
    };
    let (min, max) = (amount("min", table.min)?, amount("max", table.max)?);
    // Of a VM however large.
    max.map(|max| limits::max(max.of(Pages(u64::MAX >> 1))))
        .transpose()
        .map_err(|(key, what)| wrong(key, what))?;
    let above = match (min, max) {
        (Some(Amount::Size(min)), Some(Amount::Size(max))) => min > max,
        (Some(Amount::Percent(min)), Some(Amount::Percent(max))) => min > max,
        _ => false,
    };
    if above {
        return Err(wrong("min", "above max".into()));
    }
    let numbers = |names: Vec<String>| names.iter().map(|name| accounts::user(name)).collect();
    let users = table.users.map(numbers).transpose().map_err(|e| wrong("users", e))?;
    let VmTable { pool, shares, tax, guest_agent, .. } = table;
    Ok(VmRule { pattern, pool, shares, min, max, tax, guest_agent, users })
}

/// Checks the tables; an error names its key.
pub(super) fn pool_rules(
    tables: impl IntoIterator<Item = (String, PoolTable)>,
) -> Result<Vec<PoolRule>, Wrong> {
    let mut rules = Vec::new();
    for (name, table) in tables {
        let wrong = |key: &str, what: String| (pool_key(&name, key), what);
        let size = |key: &str, text: Option<String>| {
            let parse = |text: String| text.parse::<Bytes>().map_err(|e| wrong(key, e.to_string()));
            text.map(parse).transpose()
        };
        let tax = table.tax.map(TaxRate::new).transpose();
        let d = PoolRule::new(&name);
        let rule = PoolRule {
            shares: table.shares.unwrap_or(d.shares),
            min: size("min", table.min)?.map_or(d.min, Bytes::pages_ceil),
            max: size("max", table.max)?.map(|max| max.pages()),
            expandable: table.expandable.unwrap_or(d.expandable),
            tax: tax.map_err(|e| wrong("tax", e.to_string()))?,
            name: d.name,
        };
        rule.check().map_err(|(key, what)| match key {
            "name" => (pool_key(&name, ""), what),
            key => wrong(key, what),
        })?;
        rules.push(rule);
    }
    for rule in &rules {
        if let Some(parent) = rule.parent()
            && !rules.iter().any(|other| other.name == parent)
        {
            let what = format!("the pool '{parent}' that it is in is not defined");
            return Err((pool_key(&rule.name, ""), what));
        }
    }
    Ok(rules)
}

/// `pool."prod/db".min`, as it is written in the file.
pub(super) fn pool_key(pool: &str, key: &str) -> String {
    let bare = pool.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    let table = if bare { format!("pool.{pool}") } else { format!("pool.\"{pool}\"") };
    if key.is_empty() { table } else { format!("{table}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("db1", "db1", true),
            ("db1", "db12", false),
            ("*", "", true),
            ("*", "anything", true),
            ("db-*", "db-", true),
            ("db-*", "db", false),
            ("*-a-*b", "x-a-b-a-ab", true),
            ("*-a-*b", "x-a-b-a-ac", false),
            ("?b?", "abc", true),
            ("?b?", "ab", false),
            ("", "a", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn of_each_key_the_last_rule_counts_that_has_it() {
        let rule = |pattern: &str| VmRule { pattern: pattern.into(), ..VmRule::default() };
        let rules = [
            VmRule { shares: Some(1), tax: Some(0.5), guest_agent: Some(true), ..rule("*") },
            VmRule { users: Some(vec![1, 2]), ..rule("*-1") },
            VmRule { shares: Some(2), min: Some(Amount::Percent(50.0)), ..rule("db-*") },
            VmRule { shares: Some(9), ..rule("web") },
        ];
        let found = rule_for(&rules, "db-1");
        assert_eq!((found.shares, found.tax), (Some(2), Some(0.5)));
        assert_eq!(found.guest_agent, Some(true));
        assert_eq!(found.min.map(|min| min.of(Pages(300))), Some(Pages(150)));
        assert_eq!(rule_for(&rules, "x").shares, Some(1));
    }
}
