//! Users and groups of the host, by name or number.

/// A group of `/etc/group`, or any number.
pub fn group(name: &str) -> Result<u32, String> {
    number("group", "/etc/group", name)
}

/// A user of `/etc/passwd`, or any number.
pub fn user(name: &str) -> Result<u32, String> {
    number("user", "/etc/passwd", name)
}

/// Both files have it in their third field.
fn number(kind: &str, path: &str, name: &str) -> Result<u32, String> {
    match name.parse() {
        // To the kernel it says that a file's owner is to stay.
        Ok(u32::MAX) => return Err(format!("{name} is no {kind}")),
        Ok(number) => return Ok(number),
        Err(_) => {}
    }
    let all = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let number = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    all.lines().find_map(number).ok_or_else(|| format!("no {kind} '{name}' in {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_known_by_name_and_by_number() {
        assert_eq!((user("root"), group("root")), (Ok(0), Ok(0)));
        assert_eq!((user("4000000000"), group("7")), (Ok(4_000_000_000), Ok(7)));
        assert_eq!(user("4294967295"), Err("4294967295 is no user".to_owned()));
        assert_eq!(user("no such"), Err("no user 'no such' in /etc/passwd".to_owned()));
    }
}
