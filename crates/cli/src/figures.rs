//! Numbers for people, short and of one width class.

use std::time::Duration;

use ballast_units::{Bytes, PAGE_SIZE};

/// "384 MiB".
pub fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// At most five characters, powers of 1,024: "384M", "1.5G", "12K", "0".
pub fn short_size(bytes: u64) -> String {
    short(bytes as f64, 1024.0, &["", "K", "M", "G", "T", "P", "E"])
}

/// At most five characters, powers of 1,000: "950", "1.2k", "34M".
pub fn short_count(count: f64) -> String {
    short(count, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

fn short(value: f64, base: f64, units: &[&str]) -> String {
    let mut v = value.max(0.0);
    let mut unit = 0;
    // 999.6 would print as "1000".
    while v.round() >= 1000.0 && unit + 1 < units.len() || v >= base && unit + 1 < units.len() {
        v /= base;
        unit += 1;
    }
    let suffix = units.get(unit).copied().unwrap_or_default();
    if v < 9.95 && v.fract() >= 0.05 && v.fract() < 0.95 {
        format!("{v:.1}{suffix}")
    } else {
        format!("{v:.0}{suffix}")
    }
}

/// Bytes per second in MB/s (10^6 bytes): "1.2 MB/s"; unknown is "-".
pub fn rate(bytes_per_s: Option<f64>) -> String {
    match bytes_per_s {
        Some(r) if r >= 9.95e6 => format!("{:.0} MB/s", r / 1e6),
        Some(r) => format!("{:.1} MB/s", r / 1e6),
        None => "- MB/s".to_owned(),
    }
}

/// Pages per second in MB/s.
pub fn pages_rate(pages_per_s: f64) -> String {
    rate(Some(pages_per_s * PAGE_SIZE as f64))
}

/// Events per second: "1.2k/s"; unknown is "-".
pub fn frequency(per_s: Option<f64>) -> String {
    match per_s {
        Some(r) => format!("{}/s", short_count(r)),
        None => "-/s".to_owned(),
    }
}

/// "1 VM", "3 VMs".
pub fn vms(count: u32) -> String {
    format!("{count} VM{}", if count == 1 { "" } else { "s" })
}

/// [`ballast_units::age`] of seconds; negative and absurd values are 0.
pub fn age(seconds: f64) -> String {
    ballast_units::age(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// `part` of `whole` in percent: "12.5%"; of nothing, "-".
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1}%", part as f64 * 100.0 / whole as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sizes_never_exceed_five_characters() {
        assert_eq!(short_size(0), "0");
        assert_eq!(short_size(384 << 20), "384M");
        assert_eq!(short_size(3 << 29), "1.5G");
        assert_eq!(short_size(1023 << 20), "1G");
        for shift in 0..64 {
            for v in [1u64 << shift, (1u64 << shift) - 1, u64::MAX >> (63 - shift)] {
                assert!(short_size(v).len() <= 5, "{v}: {}", short_size(v));
                assert!(short_count(v as f64).len() <= 5, "{v}: {}", short_count(v as f64));
            }
        }
        assert_eq!(short_count(1234.0), "1.2k");
    }

    #[test]
    fn absurd_ages_are_none() {
        assert_eq!(age(192.0), "3m12s");
        assert_eq!(age(-1.0), "0s");
        assert_eq!(age(f64::NAN), "0s");
    }
}
