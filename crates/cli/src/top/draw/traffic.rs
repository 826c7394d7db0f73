//! Rates in one line: with units behind each number where there is room, else in groups.

use crate::figures::{frequency, rate, short_count};
use crate::top::rates::Rates;

pub fn host(r: &Rates, width: usize) -> String {
    let bytes = [("swap in", r.swapped_in), ("out", r.swapped_out), ("balloon", r.ballooned)];
    line(&bytes, r, width)
}

pub fn vm(r: &Rates, width: usize) -> String {
    line(&[("swap in", r.swapped_in), ("out", r.swapped_out)], r, width)
}

fn line(bytes: &[(&str, Option<f64>)], r: &Rates, width: usize) -> String {
    let counts = [("faults", r.faults), ("waits", r.waits), ("blocks", r.blocks)];
    let joined = |rates: &[(&str, Option<f64>)], gap, form: fn(Option<f64>) -> String| {
        rates.iter().map(|(name, r)| format!("{name} {}", form(*r))).collect::<Vec<_>>().join(gap)
    };
    let long = format!("{}  {}", joined(bytes, "  ", rate), joined(&counts, "  ", frequency));
    if long.chars().count() <= width {
        return long;
    }
    let megabytes: fn(Option<f64>) -> String =
        |r| r.map_or("-".to_owned(), |r| rate(Some(r)).trim_end_matches(" MB/s").to_owned());
    let number: fn(Option<f64>) -> String = |r| r.map_or("-".to_owned(), short_count);
    format!("MB/s: {}  per s: {}", joined(bytes, " ", megabytes), joined(&counts, " ", number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_rates_fit_a_screen_of_80_columns() {
        let rates = Rates {
            swapped_in: Some(123.4e6),
            swapped_out: Some(1.23e6),
            ballooned: Some(456e6),
            faults: Some(12_345.0),
            waits: Some(999.0),
            blocks: None,
        };
        let short = host(&rates, 78);
        assert!(short.chars().count() <= 78, "{short}");
        assert_eq!(
            short,
            "MB/s: swap in 123 out 1.2 balloon 456  per s: faults 12k waits 999 blocks -"
        );
        assert!(
            host(&rates, 100).contains("swap in 123 MB/s") && host(&rates, 100).contains("-/s")
        );
    }
}
