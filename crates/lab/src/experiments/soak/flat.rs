//! Whether something grows that should not.

use std::collections::BTreeMap;

use crate::stats::median;

/// One look at a manager.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// Seconds since the soak began.
    pub time_s: f64,
    /// Which manager, counted from 0.
    pub life: usize,
    /// VMs that it had.
    pub vms: usize,
    /// What is judged.
    pub value: f64,
}

/// From the first quarter of the time of these looks to the last one: how much the median has grown among
/// looks at equally many VMs, weighed by how many looks there are. None: no number of VMs was seen in both.
pub fn growth(looks: &[Look]) -> Option<f64> {
    let (first, last) = (looks.first()?.time_s, looks.last()?.time_s);
    let quarter = (last - first) / 4.0;
    let by_vms = |wanted: &dyn Fn(f64) -> bool| {
        let mut values = BTreeMap::<usize, Vec<f64>>::new();
        for look in looks.iter().filter(|look| wanted(look.time_s)) {
            values.entry(look.vms).or_default().push(look.value);
        }
        values
    };
    let early = by_vms(&|t| t <= first + quarter);
    let late = by_vms(&|t| t >= last - quarter);
    let (mut sum, mut weight) = (0.0, 0.0);
    for (vms, before) in &early {
        let Some(after) = late.get(vms) else { continue };
        let looks = before.len().min(after.len()) as f64;
        sum += looks * (median(after) - median(before));
        weight += looks;
    }
    (weight > 0.0).then(|| sum / weight)
}

/// The looks at the manager that lived longest.
pub fn longest(looks: &[Look]) -> Vec<Look> {
    let mut lives = BTreeMap::<usize, Vec<Look>>::new();
    for look in looks {
        lives.entry(look.life).or_default().push(*look);
    }
    let span = |life: &Vec<Look>| match (life.first(), life.last()) {
        (Some(first), Some(last)) => last.time_s - first.time_s,
        _ => 0.0,
    };
    lives.into_values().max_by(|a, b| span(a).total_cmp(&span(b))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(value: impl Fn(f64, usize) -> f64) -> Vec<Look> {
        (0..80)
            .map(|n| {
                let (time_s, vms) = (f64::from(n), 2 + n as usize % 3);
                Look { time_s, life: 0, vms, value: value(time_s, vms) }
            })
            .collect()
    }

    #[test]
    fn what_goes_with_the_number_of_vms_is_no_growth() {
        assert_eq!(growth(&looks(|_, vms| 10.0 + vms as f64)), Some(0.0));
        let leak = growth(&looks(|t, vms| 10.0 + vms as f64 + t / 10.0)).unwrap();
        assert!((leak - 6.0).abs() < 0.3, "{leak}");
        assert_eq!(growth(&[]), None);
        let other = |vms, time_s| Look { time_s, life: 0, vms, value: 1.0 };
        assert_eq!(growth(&[other(1, 0.0), other(2, 9.0)]), None);
    }

    #[test]
    fn the_longest_life_is_by_time() {
        let look = |life, time_s| Look { time_s, life, vms: 0, value: 0.0 };
        let all = [look(0, 0.0), look(0, 1.0), look(0, 2.0), look(1, 3.0), look(1, 9.0)];
        assert_eq!(longest(&all), all[3..]);
        assert!(longest(&[]).is_empty());
    }
}
