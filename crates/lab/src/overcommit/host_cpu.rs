//! How busy the processors are: where they are busy, memory does not decide.

use anyhow::{Context, Result};

pub struct HostCpu {
    busy: u64,
    all: u64,
}

impl HostCpu {
    pub fn now() -> Result<HostCpu> {
        let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        parse(&text).context("/proc/stat has no line 'cpu'")
    }

    pub fn percent_since(&self, then: &HostCpu) -> f64 {
        100.0 * (self.busy - then.busy) as f64 / (self.all - then.all).max(1) as f64
    }
}

/// user nice system idle iowait irq softirq steal; guest time is part of user time.
fn parse(text: &str) -> Option<HostCpu> {
    let line = text.lines().find_map(|l| l.strip_prefix("cpu "))?;
    let times: Vec<u64> = line.split_whitespace().take(8).map_while(|w| w.parse().ok()).collect();
    let idle = times.get(3)? + times.get(4)?;
    let all: u64 = times.iter().sum();
    Some(HostCpu { busy: all - idle, all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_idle() {
        let a = parse("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 2 3 4\n").unwrap();
        let b = parse("cpu  60 0 10 110 20 0 0 0 0 0\n").unwrap();
        assert_eq!(b.percent_since(&a), 50.0);
        assert!(parse("intr 1\n").is_none());
    }
}
