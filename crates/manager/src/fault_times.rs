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

/// A histogram for each VM.
#[derive(Debug)]
pub struct FaultTimes(Vec<(String, FaultTimesView)>);

impl FaultTimes {
    /// Of those that are not paged, empty ones.
    pub fn of(vms: &[VmView]) -> FaultTimes {
        FaultTimes(vms.iter().map(|vm| (vm.name.clone(), vm.fault_times.clone())).collect())
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
