//! What the trust domain of a VM's page sharing is called where people see it.

/// "own", or "salt:" and 8 hexadecimal digits, from a domain's name ([`crate::commons`]), which is a
/// hash of the salt under the host's key: the digits tell which VMs belong together, and nothing of
/// the salt.
pub fn label(name: &str) -> String {
    match name.strip_prefix("salt-") {
        Some(digits) => format!("salt:{}", digits.get(..8).unwrap_or(digits)),
        None => "own".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_and_tell_domains_of_salts_from_a_vms_own() {
        assert_eq!(label("salt-0123456789abcdef0123456789abcdef"), "salt:01234567");
        // A VM may be called anything.
        assert_eq!(label("vm-salt-01234567"), "own");
        assert_eq!(label("vm-a"), "own");
    }
}
