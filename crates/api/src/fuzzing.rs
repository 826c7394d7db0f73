//! What must hold of any bytes that are found where a record should be, or that come as a request.
//! Called by the fuzzer, and here with a bounded number of mutations.

use std::path::Path;

use crate::record::{ProcessRecord, RECORD_VERSION};
use crate::{AttachSpec, HostChange, ShutdownRequest, StopRequest, VmChange, VmSpec};

/// Nothing panics, and no record of a newer version is ever understood.
pub fn check(bytes: &[u8]) {
    if let Ok(record) = ProcessRecord::parse(Path::new("vm.json"), bytes) {
        assert!(record.version <= RECORD_VERSION);
    }
    let _ = serde_json::from_slice::<VmSpec>(bytes);
    let _ = serde_json::from_slice::<VmChange>(bytes);
    let _ = serde_json::from_slice::<AttachSpec>(bytes);
    let _ = serde_json::from_slice::<HostChange>(bytes);
    let _ = serde_json::from_slice::<StopRequest>(bytes);
    let _ = serde_json::from_slice::<ShutdownRequest>(bytes);
}

#[cfg(test)]
#[path = "../../../fuzz/mutate.rs"]
mod mutate;

#[cfg(test)]
mod tests {
    #[test]
    fn no_record_and_no_request_does_harm() {
        super::mutate::run("vm_record", 100_000, super::check);
    }
}
