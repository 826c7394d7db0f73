//! Small statistics.

/// Median; NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The value below which the part `q` of them lies; NaN of nothing.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (q * sorted.len().saturating_sub(1) as f64).ceil() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Mean; NaN of nothing.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Smallest and largest; NaN of nothing.
pub fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::NAN, f64::min);
    (low, values.iter().copied().fold(f64::NAN, f64::max))
}

/// Three decimals are enough for a figure.
pub fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_means_and_ranges() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.99), 3.0);
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), 2.0);
        assert!(quantile(&[], 0.5).is_nan());
        assert!(mean(&[]).is_nan());
        assert_eq!(range(&[2.0, -1.0, 5.0]), (-1.0, 5.0));
    }
}
