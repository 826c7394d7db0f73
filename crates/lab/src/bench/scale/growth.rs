//! How figures grow with the number of VMs.

use crate::figures::Outcome;

/// Measured with a number of VMs.
pub struct Point {
    /// So many of them.
    pub vms: usize,
    /// Name and value; the same names at each point.
    pub figures: Vec<(String, f64)>,
}

impl Point {
    /// NaN of what was not measured.
    pub fn get(&self, name: &str) -> f64 {
        let found = self.figures.iter().find(|(known, _)| known == name);
        found.map_or(f64::NAN, |(_, value)| *value)
    }
}

/// What each VM adds, from the first point to the last; NaN of less than two.
pub fn per_vm(points: &[Point], name: &str) -> f64 {
    match points {
        [first, .., last] if last.vms > first.vms => {
            (last.get(name) - first.get(name)) / (last.vms - first.vms) as f64
        }
        _ => f64::NAN,
    }
}

/// What each VM of the last stretch adds against one of the first: 1 is linear, much above it is not.
pub fn bend(points: &[Point], name: &str) -> f64 {
    match points {
        [first, .., before, last] => {
            let early = (before.get(name) - first.get(name)) / (before.vms - first.vms) as f64;
            let late = (last.get(name) - before.get(name)) / (last.vms - before.vms) as f64;
            late / early
        }
        _ => f64::NAN,
    }
}

/// All points, as "PART_FIGURE_N".
pub fn tell(outcome: &mut Outcome, part: &str, points: &[Point]) {
    for point in points {
        for (name, value) in &point.figures {
            outcome.figure(&format!("{part}_{name}_{}", point.vms), *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: &[(usize, f64)]) -> Vec<Point> {
        let point = |&(vms, value)| Point { vms, figures: vec![("a".to_owned(), value)] };
        values.iter().map(point).collect()
    }

    #[test]
    fn growth_is_per_vm_and_what_bends_is_seen() {
        let linear = points(&[(0, 5.0), (10, 25.0), (50, 105.0)]);
        assert_eq!(per_vm(&linear, "a"), 2.0);
        assert!((bend(&linear, "a") - 1.0).abs() < 1e-9);
        let squares = points(&[(0, 0.0), (10, 100.0), (50, 2500.0)]);
        assert!(bend(&squares, "a") > 5.0);
        assert!(per_vm(&linear[..1], "a").is_nan() && bend(&linear[..2], "a").is_nan());
        assert!(per_vm(&linear, "b").is_nan());
        let mut outcome = Outcome::new("x");
        tell(&mut outcome, "idle", &linear);
        assert_eq!(outcome.figures["idle_a_50"], 105.0);
    }
}
