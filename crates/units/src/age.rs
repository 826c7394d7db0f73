//! How long something lasts, or ago it was, for people.

use std::time::Duration;

/// The two largest units: "45s", "3m12s", "2h05m", "4d03h".
pub fn age(of: Duration) -> String {
    let s = of.as_secs();
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_use_two_units() {
        let of = |s: f64| age(Duration::from_secs_f64(s));
        assert_eq!([of(45.9), of(192.0), of(7500.0)], ["45s", "3m12s", "2h05m"]);
        assert_eq!([of(59.99), of(60.0), of(356_400.0)], ["59s", "1m00s", "4d03h"]);
    }
}
