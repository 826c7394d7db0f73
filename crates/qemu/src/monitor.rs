//! The QMP commands that the manager uses, typed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_api::GuestStats;
use ballast_units::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::command_line::HOTPLUG_MEMDEV;
use crate::ram_blocks::{self, RamBlock};
use crate::spec::HOTPLUG_PATH;
use crate::{Qmp, QmpError};

/// What QEMU sends for a statistic that the guest did not.
const NO_STAT: u64 = u64::MAX;
/// Seconds by which a moment may be ahead of another process' clock: both are rounded.
const AHEAD: u64 = 1;

/// QEMU's run state.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RunStatus {
    /// Whether vCPUs run.
    pub running: bool,
    /// "running", "paused", "prelaunch", "shutdown", "guest-panicked", ...
    pub status: String,
}

/// One backend of guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Memdev {
    /// Its name, if it has one.
    pub id: Option<String>,
    /// Bytes.
    pub size: u64,
    /// None before QEMU 6.1, which did not tell.
    pub share: Option<bool>,
}

/// One device of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// QOM path.
    pub path: String,
    /// QOM type: "virtio-balloon-pci".
    pub kind: String,
}

/// Totals over a guest's disks since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskReads {
    /// Bytes that were read.
    pub bytes: u64,
    /// How long its reads took, summed.
    pub nanos: u64,
}

/// A QMP connection with one deadline for every command, and the VM's balloon device.
#[derive(Clone, Debug)]
pub struct Monitor {
    qmp: Qmp,
    deadline: Duration,
    balloon: Option<String>,
    hotplug: Option<String>,
}

impl Monitor {
    /// Looks for the balloon device, whatever its id is.
    ///
    /// # Errors
    /// As of [`Qmp::execute`], of looking for devices. No balloon is no error.
    pub async fn new(qmp: Qmp, deadline: Duration) -> Result<Monitor, QmpError> {
        let mut monitor = Monitor::without_balloon(qmp, deadline);
        let devices = monitor.devices().await?;
        let path = |device: Option<&Device>| device.map(|d| d.path.clone());
        monitor.hotplug = path(devices.iter().find(|d| d.is_own_hotplug()));
        monitor.balloon = path(devices.iter().find(|d| d.is_balloon()));
        Ok(monitor)
    }

    /// For questions that are not about the balloon.
    pub(crate) fn without_balloon(qmp: Qmp, deadline: Duration) -> Monitor {
        Monitor { qmp, deadline, balloon: None, hotplug: None }
    }

    /// The connection.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Whether the VM has a balloon device.
    pub fn has_balloon(&self) -> bool {
        self.balloon.is_some()
    }

    /// Asks the guest to plug or unplug memory until it has `size` beside its RAM; None if the VM has no such
    /// device of Ballast's. Success says only that QEMU passed the wish on.
    ///
    /// # Errors
    /// As of [`Qmp::execute`].
    pub async fn request_hotplug(&self, size: Bytes) -> Option<Result<(), QmpError>> {
        let path = self.hotplug.as_ref()?;
        let args = json!({ "path": path, "property": "requested-size", "value": size.0 });
        Some(self.run("qom-set", args).await)
    }

    /// What was last asked for so, and what is plugged now, by QEMU's own books; None as above.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn hotplug(&self) -> Option<Result<(Bytes, Bytes), QmpError>> {
        let path = self.hotplug.as_ref()?;
        let read = async |property: &str| {
            self.ask("qom-get", json!({ "path": path, "property": property })).await.map(Bytes)
        };
        Some(match read("requested-size").await {
            Ok(requested) => read("size").await.map(|plugged| (requested, plugged)),
            Err(e) => Err(e),
        })
    }

    /// Whether what Ballast's own virtio-mem device plugs is the memory that Ballast supplied for it.
    pub(crate) async fn hotplug_is_own(&self) -> Result<bool, QmpError> {
        let args = json!({ "path": HOTPLUG_PATH, "property": "memdev" });
        let memdev: String = self.ask("qom-get", args).await?;
        Ok(memdev == format!("/objects/{HOTPLUG_MEMDEV}"))
    }

    /// Whether a virtio-blk passes its guest's SCSI commands through (`scsi=on`, of QEMUs that have it).
    pub(crate) async fn passes_scsi(&self, device: &Device) -> Result<bool, QmpError> {
        let args = json!({ "path": device.path, "property": "scsi" });
        match self.ask::<Value>("qom-get", args).await {
            Ok(value) => Ok(value == Value::Bool(true)),
            Err(QmpError::Refused { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Asks the guest to keep `guest_memory` bytes and to give up the rest. Success says only that
    /// QEMU passed the wish on.
    ///
    /// # Errors
    /// As of [`Qmp::execute`].
    pub async fn balloon(&self, guest_memory: Bytes) -> Result<(), QmpError> {
        self.run("balloon", json!({ "value": guest_memory.0 })).await
    }

    /// The guest's memory less what its balloon holds, as QEMU believes. Stale whenever the guest
    /// is slow: to be shown, never to be computed with.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn query_balloon(&self) -> Result<Bytes, QmpError> {
        #[derive(Deserialize)]
        struct Info {
            actual: u64,
        }
        let info: Info = self.ask("query-balloon", Value::Null).await?;
        Ok(Bytes(info.actual))
    }

    /// The memory of its DIMMs, which QEMU counts among what a balloon takes from, beside what the guest began with: not that of
    /// an nvdimm or a virtio-mem. A QEMU that does not know the question has none.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn dimms(&self) -> Result<Bytes, QmpError> {
        const COMMAND: &str = "query-memory-devices";
        let answer: Value = match self.ask(COMMAND, Value::Null).await {
            Err(QmpError::Refused { .. }) => return Ok(Bytes::ZERO),
            other => other?,
        };
        dimms(&answer).ok_or_else(|| self.qmp.unexpected(COMMAND, &answer))
    }

    /// Makes the guest send statistics every `interval_s` seconds; 0 ends it. Without a balloon
    /// nothing happens.
    ///
    /// # Errors
    /// As of [`Qmp::execute`].
    pub async fn enable_guest_stats(&self, interval_s: u32) -> Result<(), QmpError> {
        let Some(path) = &self.balloon else { return Ok(()) };
        let property = "guest-stats-polling-interval";
        self.run("qom-set", json!({ "path": path, "property": property, "value": interval_s }))
            .await
    }

    /// The guest's latest statistics; None if it never sent any (no balloon, or no driver).
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn guest_stats(&self) -> Result<Option<GuestStats>, QmpError> {
        let Some(path) = &self.balloon else { return Ok(None) };
        let args = json!({ "path": path, "property": "guest-stats" });
        let answer: Value = self.ask("qom-get", args).await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        stats(&answer, now).map_err(|()| self.qmp.unexpected("qom-get guest-stats", &answer))
    }

    /// What the guest has read from its disks so far. Of drives, not of what lies beneath them. A QEMU
    /// that does not tell how long reads took tells 0.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn disk_reads(&self) -> Result<DiskReads, QmpError> {
        let answer: Value = self.ask("query-blockstats", Value::Null).await?;
        disk_reads(&answer).ok_or_else(|| self.qmp.unexpected("query-blockstats", &answer))
    }

    /// Whether the guest runs under KVM.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn has_kvm(&self) -> Result<bool, QmpError> {
        #[derive(Deserialize)]
        struct Kvm {
            enabled: bool,
        }
        Ok(self.ask::<Kvm>("query-kvm", Value::Null).await?.enabled)
    }

    /// Whether the VM runs.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn query_status(&self) -> Result<RunStatus, QmpError> {
        self.ask("query-status", Value::Null).await
    }

    /// Presses the power button; the guest may take its time, or ignore it.
    ///
    /// # Errors
    /// As of [`Qmp::execute`].
    pub async fn system_powerdown(&self) -> Result<(), QmpError> {
        self.run("system_powerdown", Value::Null).await
    }

    /// The backends of its memory.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn memdevs(&self) -> Result<Vec<Memdev>, QmpError> {
        self.ask("query-memdev", Value::Null).await
    }

    /// The devices that were asked for on the command line or plugged in since.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn devices(&self) -> Result<Vec<Device>, QmpError> {
        #[derive(Deserialize)]
        struct Property {
            name: String,
            #[serde(rename = "type")]
            kind: String,
        }
        let mut devices = Vec::new();
        for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let properties: Vec<Property> = self.ask("qom-list", json!({ "path": parent })).await?;
            devices.extend(properties.into_iter().filter_map(|property| {
                let kind = property.kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned();
                Some(Device { path: format!("{parent}/{}", property.name), kind })
            }));
        }
        Ok(devices)
    }

    /// All memory that QEMU gave to the guest.
    ///
    /// # Errors
    /// As of [`Qmp::execute`]; an answer that is not understood.
    pub async fn ram_blocks(&self) -> Result<Vec<RamBlock>, QmpError> {
        let args = json!({ "command-line": "info ramblock" });
        let table: String = self.ask("human-monitor-command", args).await?;
        Ok(ram_blocks::parse(&table))
    }

    async fn run(&self, command: &str, args: Value) -> Result<(), QmpError> {
        self.qmp.execute(command, args, self.deadline).await.map(drop)
    }

    async fn ask<T: DeserializeOwned>(&self, command: &str, args: Value) -> Result<T, QmpError> {
        let answer = self.qmp.execute(command, args, self.deadline).await?;
        T::deserialize(&answer).map_err(|_| self.qmp.unexpected(command, &answer))
    }
}

impl Device {
    /// Whether it is, by its name, the virtio-mem device of a VM that Ballast started.
    pub(crate) fn is_own_hotplug(&self) -> bool {
        self.path == HOTPLUG_PATH && self.kind == "virtio-mem-pci"
    }

    /// Whether the command line names it as what is behind a device (a network backend, a block node, an object): QMP does not list
    /// those with the devices.
    pub(crate) fn is_backend(&self) -> bool {
        matches!(&*self.path, "-netdev" | "-net" | "-nic" | "-blockdev" | "-object")
    }

    /// Whether it is a virtio balloon, on whatever bus.
    pub fn is_balloon(&self) -> bool {
        self.kind.starts_with("virtio-balloon")
    }
}

/// Reads `{"stats": {...}, "last-update": s}` at the time `now`, both in seconds since 1970. Of what came later than now
/// (the clock was set back since) nobody can tell how old it is: it counts as none.
fn stats(answer: &Value, now: u64) -> Result<Option<GuestStats>, ()> {
    let sent = answer.get("last-update").and_then(Value::as_u64).ok_or(())?;
    let stats = answer.get("stats").and_then(Value::as_object).ok_or(())?;
    if sent == 0 || sent > now.saturating_add(AHEAD) {
        return Ok(None);
    }
    let stat = |key| stats.get(key).and_then(Value::as_u64).filter(|&value| value != NO_STAT);
    Ok(Some(GuestStats {
        total: stat("stat-total-memory"),
        free: stat("stat-free-memory"),
        available: stat("stat-available-memory"),
        disk_caches: stat("stat-disk-caches"),
        swap_in: stat("stat-swap-in"),
        swap_out: stat("stat-swap-out"),
        major_faults: stat("stat-major-faults"),
        age_s: now.saturating_sub(sent),
    }))
}

/// Sums `[{"type": "dimm", "data": {"size": n, ...}}, ...]`.
fn dimms(answer: &Value) -> Option<Bytes> {
    let kind = |device: &Value| device.get("type").and_then(Value::as_str).map(str::to_owned);
    answer.as_array()?.iter().try_fold(Bytes::ZERO, |sum, device| {
        if kind(device)? != "dimm" {
            return Some(sum);
        }
        let size = device.get("data")?.get("size")?.as_u64()?;
        Some(Bytes(sum.0.saturating_add(size)))
    })
}

/// Sums `[{"stats": {"rd_bytes": n, "rd_total_time_ns": n, ...}}, ...]`.
fn disk_reads(answer: &Value) -> Option<DiskReads> {
    answer.as_array()?.iter().try_fold(DiskReads::default(), |sum, drive| {
        let stat = |key: &str| drive.get("stats")?.get(key)?.as_u64();
        Some(DiskReads {
            bytes: sum.bytes.saturating_add(stat("rd_bytes")?),
            nanos: sum.nanos.saturating_add(stat("rd_total_time_ns").unwrap_or(0)),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_that_the_guest_did_not_send_are_none() {
        let answer = json!({
            "stats": { "stat-total-memory": 1000, "stat-free-memory": 18446744073709551615u64 },
            "last-update": 90,
        });
        let stats = stats(&answer, 100).unwrap().unwrap();
        assert_eq!((stats.total, stats.free, stats.swap_in), (Some(1000), None, None));
        assert_eq!(stats.age_s, 10);
    }

    #[test]
    fn reads_are_summed_over_drives_of_any_qemu() {
        let drive = |stats: Value| json!({ "device": "virtio0", "stats": stats, "parent": {} });
        let two = json!([
            drive(json!({ "rd_bytes": 8192, "rd_operations": 1, "rd_total_time_ns": 500 })),
            drive(json!({ "rd_bytes": 4096 })),
        ]);
        assert_eq!(disk_reads(&two), Some(DiskReads { bytes: 12_288, nanos: 500 }));
        assert_eq!(disk_reads(&json!([])), Some(DiskReads::default()));
        let most = json!([drive(json!({ "rd_bytes": u64::MAX })), drive(json!({ "rd_bytes": 1 }))]);
        assert_eq!(disk_reads(&most).map(|r| r.bytes), Some(u64::MAX));
        for bad in [
            json!(null),
            json!({}),
            json!([1]),
            json!([drive(json!({}))]),
            json!([drive(json!({ "rd_bytes": -1 }))]),
        ] {
            assert_eq!(disk_reads(&bad), None, "{bad}");
        }
    }

    #[test]
    fn dimms_are_summed_and_no_other_memory() {
        let device = |kind: &str, size: u64| json!({ "type": kind, "data": { "size": size } });
        let all = json!([
            device("dimm", 64),
            device("nvdimm", 32),
            json!({ "type": "virtio-mem", "data": { "size": 8, "max-size": 16 } }),
            device("dimm", 4),
        ]);
        assert_eq!(dimms(&all), Some(Bytes(68)));
        assert_eq!(dimms(&json!([])), Some(Bytes::ZERO));
        let most = json!([device("dimm", u64::MAX), device("dimm", 1)]);
        assert_eq!(dimms(&most), Some(Bytes(u64::MAX)));
        for bad in [json!({}), json!([1]), json!([{ "type": "dimm" }]), json!([{ "data": {} }])] {
            assert_eq!(dimms(&bad), None, "{bad}");
        }
    }

    #[test]
    fn no_update_is_no_statistics_nor_is_one_of_a_clock_that_was_set_back() {
        assert_eq!(stats(&json!({ "stats": {}, "last-update": 0 }), 100), Ok(None));
        assert_eq!(stats(&json!({ "stats": {}, "last-update": 200 }), 100), Ok(None));
        let ahead = stats(&json!({ "stats": {}, "last-update": 101 }), 100).unwrap().unwrap();
        assert_eq!(ahead.age_s, 0);
    }

    #[test]
    fn other_answers_are_refused() {
        for bad in [
            json!(null),
            json!([]),
            json!({ "stats": {} }),
            json!({ "last-update": 1 }),
            json!({ "stats": [], "last-update": 1 }),
            json!({ "stats": {}, "last-update": -1 }),
        ] {
            assert_eq!(stats(&bad, 1), Err(()), "{bad}");
        }
    }
}
