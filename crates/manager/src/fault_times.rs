//! How long faults took to be served, as the API and Prometheus tell it.

use ballast_api::{FaultTimesView, VmView};
use ballast_pager::service::{PagedVm, bucket_end};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Of one VM, since this manager has it.
pub fn view(paged: &PagedVm) -> FaultTimesView {
    let times = paged.fault_times();
    FaultTimesView { counts: times.counts().to_vec(), sum_s: times.sum().as_secs_f64() }
}

/// A histogram for each VM that is paged.
#[derive(Debug)]
pub struct FaultTimes(Vec<(String, FaultTimesView)>);

impl FaultTimes {
    /// Of those that are not paged, none: without its last bucket a histogram is not valid OpenMetrics.
    pub fn of(vms: &[VmView]) -> FaultTimes {
        let paged = vms.iter().filter(|vm| !vm.fault_times.counts.is_empty());
        FaultTimes(paged.map(|vm| (vm.name.clone(), vm.fault_times.clone())).collect())
    }
}

impl EncodeMetric for FaultTimes {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, times) in &self.0 {
            let end = |bucket| bucket_end(bucket).map_or(f64::MAX, |end| end.as_secs_f64());
            let buckets: Vec<(f64, u64)> =
                times.counts.iter().enumerate().map(|(b, n)| (end(b), *n)).collect();
            let labels = [("vm", name.clone())];
            encoder.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                times.sum_s,
                times.total(),
                &buckets,
                None,
            )?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use serde_json::json;

    use super::*;

    fn vm(name: &str, counts: &[u64]) -> VmView {
        let vm = json!({
            "name": name, "state": "running", "management": {"mode": "paged", "reason": null},
            "pid": 1, "accel": "", "uptime_s": 0.0,
            "params": {"size": 8192, "min": 0, "max": 1, "shares": 1, "tax": 0.75},
            "memory": {"consumed": 0, "target": 0, "untouched": 0, "resident": 0, "shared": 0,
                       "broken": 0, "compressed": 0, "staged": 0, "swapped": 0, "ballooned": 0,
                       "overhead": 0, "vmm_overhead": 0, "swap_reserved": 0, "swap_target": 0},
            "active": {"estimate": 0, "slow": 0, "fast": 0, "current": 0, "periods": 0},
            "balloon": {"health": "missing", "target": 0, "reported": 0, "limit": 0},
            "guest": null, "folder": "",
            "fault_times": {"counts": counts, "sum_s": 0.0},
            "counters": {"faults": 0, "swapped_in": 0, "swapped_out": 0, "zero_dropped": 0,
                         "ballooned": 0, "sampled": 0, "waits": 0, "blocks": 0, "wait_s": 0.0,
                         "cpu_s": 0.0}
        });
        serde_json::from_value(vm).unwrap()
    }

    #[test]
    fn every_histogram_has_its_last_bucket() {
        let counts = vec![0; ballast_units::FAULT_BUCKETS];
        let mut registry = Registry::default();
        let times = FaultTimes::of(&[vm("paged", &counts), vm("attached", &[])]);
        registry.register("times", "How long", times);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(text.contains("times_bucket{le=\"+Inf\",vm=\"paged\"} 0"), "{text}");
        assert!(!text.contains("attached"), "{text}");
    }
}
