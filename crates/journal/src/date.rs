//! Moments: milliseconds since 1970, and as dates, where there is no time zone to go by.

use std::time::SystemTime;

/// Milliseconds since 1970, by the host's clock, which may be set back.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// "2026-03-01T14:05:07Z": milliseconds since 1970 in UTC, whole seconds.
pub fn utc(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March, so that the odd day is the last one; eras of 400 years are all alike.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        era * 400 + year + later,
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60
    )
}

#[test]
fn dates_of_all_kinds_of_years() {
    for (ms, date) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_400_000, "2000-02-29T00:00:00Z"),
        (951_868_799_999, "2000-02-29T23:59:59Z"),
        (1_772_366_401_000, "2026-03-01T12:00:01Z"),
        (1_709_164_800_000, "2024-02-29T00:00:00Z"),
        (4_107_542_400_000, "2100-03-01T00:00:00Z"),
        (1_767_225_599_000, "2025-12-31T23:59:59Z"),
    ] {
        assert_eq!(utc(ms), date);
    }
}
