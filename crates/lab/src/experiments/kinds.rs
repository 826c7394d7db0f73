//! The policies that are run beside the default (docs/adr/0015-policies-compared.md).

use ballast_policy::policies::PolicyKind;

/// In the order in which they are run.
pub const ALTERNATIVES: &[PolicyKind] =
    &[PolicyKind::GraduatedTax, PolicyKind::MissRatio, PolicyKind::Pressure];

/// The default, and then the alternatives.
pub fn all() -> Vec<PolicyKind> {
    [PolicyKind::default()].iter().chain(ALTERNATIVES).copied().collect()
}

/// In the manager's configuration.
pub fn toml(kind: PolicyKind) -> String {
    format!("[policy]\nkind = \"{kind}\"\n")
}

/// As part of a figure's name: the default's have none.
pub fn prefix(kind: PolicyKind) -> String {
    match kind {
        PolicyKind::IdleTax => String::new(),
        _ => format!("{}_", kind.name().replace('-', "_")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_comes_first_and_nothing_twice() {
        let all = all();
        assert_eq!(all[0], PolicyKind::IdleTax);
        assert!((1..all.len()).all(|n| !all[..n].contains(&all[n])));
        assert_eq!(toml(PolicyKind::MissRatio), "[policy]\nkind = \"miss-ratio\"\n");
        assert_eq!(prefix(PolicyKind::GraduatedTax), "graduated_tax_");
    }
}
