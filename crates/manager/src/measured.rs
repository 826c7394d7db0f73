//! What was measured of a VM, handed on to the next manager: until that has measured by itself, all that a VM has would
//! count as active, and all that its guest reads as its balloon's.
//!
//! It is a part of the record that nobody depends on: whatever cannot be read of it is measured anew.

use std::time::Duration;

use ballast_policy::{Averages, SamplingConfig, TouchAverages, WorkingSet};
use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::records::Record;
use crate::sync::lock;
use crate::upgrade::since_boot_ms;
use crate::vm::Vm;

/// What is older says nothing of now.
const KEPT: Duration = Duration::from_secs(600);

/// As it was when a manager left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Then; milliseconds since boot.
    at_ms: u64,
    active: Option<Averages>,
    touched: Option<TouchAverages>,
    /// Pages per second that its guest reads without a balloon.
    plain_reads: Option<f64>,
}

impl Measured {
    fn of(vm: &Vm) -> Measured {
        let plain_reads = *lock(&vm.plain_reads);
        let sampling = lock(&vm.sampling);
        Measured {
            at_ms: since_boot_ms(),
            active: sampling.set.averages(),
            touched: sampling.times.averages(),
            plain_reads,
        }
    }

    /// What the last manager noted, if that was lately.
    pub fn in_record(record: &Record) -> Option<Measured> {
        let noted = record.measured.clone()?;
        let measured: Measured = serde_json::from_value(noted)
            .inspect_err(|e| tracing::debug!("what was measured of {}: {e}", record.name))
            .ok()?;
        let age = since_boot_ms().checked_sub(measured.at_ms)?;
        (u128::from(age) <= KEPT.as_millis()).then_some(measured)
    }

    /// The estimator of the VM with this record.
    pub fn working_set(of: Option<&Measured>, config: SamplingConfig, size: Pages) -> WorkingSet {
        let mut set = WorkingSet::new(config, size);
        if let Some(active) = of.and_then(|measured| measured.active) {
            set.resume(active);
        }
        set
    }

    /// The rest.
    pub fn tell(&self, vm: &Vm) {
        *lock(&vm.plain_reads) = self.plain_reads;
        if let Some(touched) = &self.touched {
            lock(&vm.sampling).times.resume(touched);
        }
    }
}

/// Notes it, for whoever comes next. Costs nothing but that where it cannot be.
pub fn note(vm: &Vm) {
    let told = serde_json::to_value(Measured::of(vm)).map_err(|e| e.to_string());
    let noted = told.and_then(|told| {
        Record::update(&vm.folder, |record| record.measured = Some(told)).map(drop)
    });
    if let Err(e) = noted {
        tracing::warn!(vm = vm.name, "the next manager measures anew what it uses: {e}");
    }
}

/// It is known, and is not to be told to whoever comes after a manager that was killed.
pub fn forget(vm: &Vm) {
    if let Err(e) = Record::update(&vm.folder, |record| record.measured = None) {
        tracing::debug!(vm = vm.name, "what was measured of it stays noted: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::{Asked, VmParams};
    use ballast_qemu::AccelChoice;

    #[tokio::test]
    async fn what_was_measured_is_known_to_the_next_manager_for_a_while() {
        let (dir, size) = (tempfile::tempdir().unwrap(), Pages::from_mib(64));
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let pid = std::process::id();
        let record = Record::new("a", None, params.clone(), size, Pages(1), pid, &AccelChoice::Kvm);
        record.save(dir.path()).unwrap();
        assert_eq!(Measured::in_record(&record), None);
        let vm = || Vm::of_tests("a", dir.path().to_owned(), size, params.clone());
        let before = vm();
        {
            let mut sampling = lock(&before.sampling);
            sampling.set.begin_period(100);
            sampling.set.touched(25);
            sampling.set.end_period();
            sampling.times.begin_period(100);
            sampling.times.touched(Duration::from_millis(5));
            sampling.times.end_period();
        }
        *lock(&before.plain_reads) = Some(12.0);
        note(&before);
        let noted = Record::load(dir.path()).unwrap().unwrap();
        let found = Measured::in_record(&noted).unwrap();
        assert_eq!(found, Measured { at_ms: found.at_ms, ..Measured::of(&before) });
        let set = Measured::working_set(Some(&found), SamplingConfig::default(), size);
        assert_eq!(set.estimate().estimate, Pages::from_mib(16));
        let after = vm();
        found.tell(&after);
        assert_eq!(*lock(&after.plain_reads), Some(12.0));
        let curve = |vm: &Vm| lock(&vm.sampling).times.curve(size);
        assert_eq!(curve(&after), curve(&before));
        assert!(curve(&after).is_some());
        // Of long ago, of the future, and nonsense.
        let long_ago = since_boot_ms().checked_sub(KEPT.as_millis() as u64 + 1);
        for at_ms in long_ago.into_iter().chain([u64::MAX]) {
            let measured = serde_json::to_value(Measured { at_ms, ..found.clone() }).ok();
            assert_eq!(Measured::in_record(&Record { measured, ..noted.clone() }), None);
        }
        forget(&after);
        let forgotten = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!(Measured::in_record(&forgotten), None);
        let nonsense = Record { measured: Some("much".into()), ..noted };
        nonsense.save(dir.path()).unwrap();
        let nonsense = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!(Measured::in_record(&nonsense), None);
        let set = Measured::working_set(None, SamplingConfig::default(), size);
        assert_eq!(set.estimate().estimate, size);
    }
}
