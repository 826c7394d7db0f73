//! The guest's own view of its memory.

use crate::json::Object;

/// Fields of /proc/meminfo that are worth a report, kB.
const FIELDS: [&str; 9] = [
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Buffers",
    "Cached",
    "AnonPages",
    "Shmem",
    "SwapTotal",
    "SwapFree",
];

pub struct Meminfo(Vec<(&'static str, u64)>);

/// Memory that the guest's kernel has, of whatever was plugged too.
pub fn total_mb() -> Result<u64, String> {
    let total = Meminfo::read()?.0.into_iter().find(|(name, _)| *name == "MemTotal");
    total.map(|(_, kb)| kb >> 10).ok_or_else(|| "/proc/meminfo has no MemTotal".to_owned())
}

impl Meminfo {
    pub fn read() -> Result<Meminfo, String> {
        std::fs::read_to_string("/proc/meminfo")
            .map(|text| Meminfo::parse(&text))
            .map_err(|e| format!("/proc/meminfo: {e}"))
    }

    fn parse(text: &str) -> Meminfo {
        let value = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse().ok()
        };
        Meminfo(FIELDS.iter().filter_map(|n| Some((*n, value(n)?))).collect())
    }

    /// Adds every field as `name_kb`.
    pub fn add_to(&self, object: Object) -> Object {
        self.0
            .iter()
            .fold(object, |o, (name, kb)| o.int(&format!("{}_kb", name.to_ascii_lowercase()), *kb))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_fields_are_read_and_absent_ones_left_out() {
        let m = Meminfo::parse("MemTotal:  123 kB\nMemFree: 45 kB\nCached: x\nOdd: 1 kB\n");
        assert_eq!(m.0, vec![("MemTotal", 123), ("MemFree", 45)]);
        assert_eq!(m.add_to(Object::new()).end(), r#"{"memtotal_kb":123,"memfree_kb":45}"#);
    }
}
