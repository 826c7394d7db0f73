//! What is wrong with a [`VmSpec`], told before anything is started.

use std::fs::File;
use std::path::{Path, PathBuf};

use ballast_api::VmSpec;
use ballast_units::{Bytes, VM_NAME_RULE, good_vm_name};

use crate::AccelChoice;
use crate::command_line::{HOTPLUG_ID, HOTPLUG_MEMDEV, kernel_command_line};
use crate::monitor::Device;

/// x86's COMMAND_LINE_SIZE less the closing zero; the kernel drops what exceeds it.
const LONGEST_COMMAND_LINE: usize = 2047;

/// Why a VM cannot be started from this spec. Always the caller's fault: nothing was begun.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SpecError {
    #[error("name '{0}': {VM_NAME_RULE}")]
    Name(String),
    #[error("{vm}: max {size} is too small: at least 16 MiB")]
    TooSmall { vm: String, size: Bytes },
    #[error("{vm}: max {} bytes is not a multiple of 2 MiB", .size.0)]
    SizeUnit { vm: String, size: Bytes },
    #[error("{vm}: hotplug {} bytes is not a multiple of 2 MiB", .size.0)]
    HotplugUnit { vm: String, size: Bytes },
    #[error("{vm}: min {min} is above max {max}")]
    MinAboveMax { vm: String, min: Bytes, max: Bytes },
    #[error("{vm}: shares must be at least 1")]
    Shares { vm: String },
    #[error("{vm}: tax {tax} is not in 0 <= tax < 1")]
    Tax { vm: String, tax: f64 },
    #[error("{vm}: vcpus {vcpus} is not in 1..=255")]
    Vcpus { vm: String, vcpus: u32 },
    #[error("{vm}: {what} {}: {source}", .path.display())]
    File { vm: String, what: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{vm}: {what} {} is not a regular file", .path.display())]
    NotAFile { vm: String, what: &'static str, path: PathBuf },
    #[error("{vm}: {what} contains a zero byte")]
    ZeroByte { vm: String, what: &'static str },
    #[error("{vm}: the kernel command line has {length} bytes; the kernel takes 2047")]
    CommandLine { vm: String, length: usize },
    #[error("{vm}: extra argument '{argument}' is refused: {why}")]
    Argument { vm: String, argument: String, why: &'static str },
}

/// Checks all of `spec`; the files must exist and be readable by the manager.
///
/// # Errors
/// The first thing that is wrong, with the VM's name.
pub fn check_spec(spec: &VmSpec) -> Result<(), SpecError> {
    if !good_vm_name(&spec.name) {
        return Err(SpecError::Name(spec.name.escape_default().to_string()));
    }
    let vm = || spec.name.clone();
    let (max, min) = (Bytes(spec.max), Bytes(spec.min));
    if max < VmSpec::LEAST_SIZE {
        return Err(SpecError::TooSmall { vm: vm(), size: max });
    }
    if !max.0.is_multiple_of(VmSpec::SIZE_STEP.0) {
        return Err(SpecError::SizeUnit { vm: vm(), size: max });
    }
    if !spec.hotplug.is_multiple_of(VmSpec::SIZE_STEP.0) {
        return Err(SpecError::HotplugUnit { vm: vm(), size: Bytes(spec.hotplug) });
    }
    if min > max {
        return Err(SpecError::MinAboveMax { vm: vm(), min, max });
    }
    if spec.shares == Some(0) {
        return Err(SpecError::Shares { vm: vm() });
    }
    if let Some(tax) = spec.tax.filter(|tax| !(0.0..1.0).contains(tax)) {
        return Err(SpecError::Tax { vm: vm(), tax });
    }
    if let Some(vcpus) = spec.vcpus.filter(|n| !(1..=VmSpec::MOST_VCPUS).contains(n)) {
        return Err(SpecError::Vcpus { vm: vm(), vcpus });
    }
    check_command_line(spec)?;
    check_file(spec, "kernel", &spec.kernel)?;
    if let Some(initrd) = &spec.initrd {
        check_file(spec, "initrd", initrd)?;
    }
    // A bare name is looked up in PATH when it is started.
    if let Some(qemu) = spec.qemu.as_deref().filter(|q| q.components().count() > 1) {
        check_file(spec, "qemu", qemu)?;
    }
    check_extra(spec)
}

fn check_command_line(spec: &VmSpec) -> Result<(), SpecError> {
    if spec.append.contains('\0') {
        return Err(SpecError::ZeroByte { vm: spec.name.clone(), what: "append" });
    }
    let longest = kernel_command_line(
        &spec.append,
        &AccelChoice::Tcg { why: String::new() },
        spec.hotplug > 0,
    );
    if longest.len() > LONGEST_COMMAND_LINE {
        return Err(SpecError::CommandLine { vm: spec.name.clone(), length: longest.len() });
    }
    Ok(())
}

fn check_file(spec: &VmSpec, what: &'static str, path: &Path) -> Result<(), SpecError> {
    let failed =
        |source| SpecError::File { vm: spec.name.clone(), what, path: path.to_owned(), source };
    // The kind first: opening a FIFO would wait for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(SpecError::NotAFile { vm: spec.name.clone(), what, path: path.to_owned() });
    }
    File::open(path).map_err(failed)?;
    Ok(())
}

/// The option that `arg` names: QEMU takes one dash or two.
pub(crate) fn option_name(arg: &str) -> Option<&str> {
    let name = arg.strip_prefix('-')?;
    Some(name.strip_prefix('-').unwrap_or(name)).filter(|name| !name.is_empty())
}

fn check_extra(spec: &VmSpec) -> Result<(), SpecError> {
    if spec.extra.iter().any(|arg| arg.contains('\0')) {
        return Err(SpecError::ZeroByte { vm: spec.name.clone(), what: "an extra argument" });
    }
    for (i, arg) in spec.extra.iter().enumerate() {
        let Some(option) = option_name(arg) else { continue };
        let value = spec.extra.get(i + 1).map_or("", String::as_str);
        let (shown, why) = if let Some(why) = refused_option(option) {
            (arg.clone(), why)
        } else if let Some(why) = refused_value(option, value) {
            (format!("{arg} {value}"), why)
        } else {
            continue;
        };
        return Err(SpecError::Argument { vm: spec.name.clone(), argument: shown, why });
    }
    Ok(())
}

/// Options that break paging, or the manager's view of the process, whatever their value.
fn refused_option(option: &str) -> Option<&'static str> {
    Some(match option {
        "m" => "the size of guest memory is 'max', and 'hotplug' what can be plugged",
        "mem-path" | "mem-prealloc" => "Ballast supplies guest memory, page by page",
        "machine" | "M" => "Ballast chooses the machine, to which guest memory belongs",
        "accel" | "enable-kvm" | "no-kvm" => "use 'accel' of the VM",
        "smp" => "use 'vcpus' of the VM",
        "incoming" => "a VM cannot be received by migration",
        "daemonize" => "the manager must see the process it started, and a fork loses its pages",
        "readconfig" => "a configuration file could change guest memory unseen",
        "chroot" => CHROOT,
        "runas" => OTHER_USER,
        "no-shutdown" | "action" => "a guest that ends must end its VMM, or its memory stays",
        _ => return None,
    })
}

fn refused_value(option: &str, value: &str) -> Option<&'static str> {
    match option {
        "object" => refused_object(&kind(value, "qom-type")),
        // The disk itself reads and writes guest memory, by VFIO.
        "blockdev" if kind(value, "driver") == "nvme" => Some(PINNED),
        "device" | "blockdev" => refused_device(&kind(value, "driver")),
        "netdev" | "net" | "nic" => match kind(value, "type").as_str() {
            "vhost-user" => Some(SECOND_PROCESS),
            "vhost-vdpa" => Some(PINNED),
            _ => None,
        },
        "run-with" => value.split(',').find_map(|o| match o.trim().split('=').next()? {
            "chroot" => Some(CHROOT),
            "user" => Some(OTHER_USER),
            _ => None,
        }),
        "overcommit" | "realtime"
            if value.replace(' ', "").split(',').any(|o| {
                matches!(
                    o.split_once('='),
                    Some(("mem-lock" | "mlock", "on" | "yes" | "true" | "y" | "on-fault"))
                ) || matches!(o, "mem-lock" | "mlock")
            }) =>
        {
            Some("locked memory cannot be reclaimed")
        }
        "set" if ["object.mem.", "object.hotmem."].iter().any(|own| value.starts_with(own)) => {
            Some("Ballast supplies guest memory")
        }
        _ => None,
    }
}

const CHROOT: &str = "in it the next ballastd would not be found, and the guest would stand still";
const OTHER_USER: &str =
    "as another user it might not reach the next ballastd, and the guest would stand still";
const SECOND_PROCESS: &str =
    "a second process would map guest memory and read reclaimed pages as zeros";
const PINNED: &str = "the device pins guest memory, which then cannot be reclaimed";

fn refused_object(kind: &str) -> Option<&'static str> {
    if kind.starts_with("memory-backend") {
        Some("Ballast supplies guest memory: one shared memfd, neither private nor hugetlb")
    } else if kind.starts_with("sev-") || kind.starts_with("tdx-") {
        Some("KVM pins the memory of a confidential guest, which then cannot be reclaimed")
    } else if is_vhost_user(kind) {
        Some(SECOND_PROCESS)
    } else {
        None
    }
}

/// Why a device of this QOM type rules out paging.
pub(crate) fn refused_device(kind: &str) -> Option<&'static str> {
    if pins_memory(kind) {
        Some(PINNED)
    } else if is_vhost_user(kind) {
        Some(SECOND_PROCESS)
    } else if matches!(kind, "pc-dimm" | "nvdimm")
        || kind.starts_with("virtio-mem")
        || kind.starts_with("virtio-pmem")
    {
        Some("it adds guest memory that Ballast did not supply")
    } else {
        None
    }
}

pub(crate) fn pins_memory(kind: &str) -> bool {
    kind.starts_with("vfio-") || kind.starts_with("x-vfio-") || kind.contains("vhost-vdpa")
}

pub(crate) fn is_vhost_user(kind: &str) -> bool {
    kind.contains("vhost-user") || kind.contains("virtiofs")
}

pub(crate) fn passes_scsi_through(kind: &str) -> bool {
    matches!(kind, "scsi-block" | "scsi-generic")
        || kind.starts_with("vhost-scsi")
        || kind.ends_with(SCSI_ON)
}

/// Behind the kind of a virtio-blk that passes SCSI commands through, which former versions of QEMU can do.
pub(crate) const SCSI_ON: &str = ",scsi=on";

pub(crate) fn is_virtio_blk(kind: &str) -> bool {
    kind.starts_with("virtio-blk")
}

/// Whether an option gives a virtio-blk that property, by itself or as one of all of a kind.
fn sets_scsi_on(option: &str, value: &str) -> bool {
    let plain = value.replace([' ', '"'], "");
    let has = |wanted: &str, between: &[char]| {
        plain.split(between).any(|part| {
            // A name alone says on, but may be that of a device where one is named.
            let alone = (option == "device").then_some((part, "on"));
            let said = part.split_once(['=', ':']).or(alone);
            said.is_some_and(|(key, on)| key == wanted && matches!(on, "on" | "yes" | "true" | "y"))
        })
    };
    match option {
        "device" => is_virtio_blk(&kind(value, "driver")) && has("scsi", &['{', '}', ',']),
        "global" if plain.contains("property=scsi") => has("value", &[',']),
        "global" | "set" => has("scsi", &['.']),
        _ => false,
    }
}

/// What a VMM's command line names of devices that must be known of before its memory is paged, each with the option
/// that names it. All that is known where QMP does not tell.
pub(crate) fn named_devices(args: &[&str]) -> Vec<Device> {
    let named = |option: &str, value: &str| {
        if sets_scsi_on(option, value) {
            let kind = format!("virtio-blk{SCSI_ON}");
            return Some(Device { path: format!("-{option}"), kind });
        }
        let kind = match option {
            "device" | "blockdev" => kind(value, "driver"),
            "netdev" | "net" | "nic" => kind(value, "type"),
            // Backends of crypto devices; what else it makes is no device.
            "object" => Some(kind(value, "qom-type")).filter(|kind| is_vhost_user(kind))?,
            _ => return None,
        };
        // Whether it is that of Ballast depends on what was announced.
        let name = if is_own_hotplug(option, value) {
            HOTPLUG_PATH.to_owned()
        } else {
            format!("-{option}")
        };
        let matters = refused_device(&kind).is_some() || passes_scsi_through(&kind);
        matters.then_some(Device { path: name, kind })
    };
    let pairs = args.iter().zip(args.iter().skip(1));
    pairs.filter_map(|(arg, value)| named(option_name(arg)?, value)).collect()
}

/// Where Ballast's own virtio-mem device is found by QMP.
pub(crate) const HOTPLUG_PATH: &str = "/machine/peripheral/hotplug";

/// Whether this option is that device, as Ballast asks for it.
fn is_own_hotplug(option: &str, value: &str) -> bool {
    let own = format!("virtio-mem-pci,id={HOTPLUG_ID},memdev={HOTPLUG_MEMDEV},");
    option == "device" && value.starts_with(&own)
}

/// The type in `kind,key=value,...`, `key=kind,...` or `{"key": "kind", ...}`.
pub(crate) fn kind(value: &str, key: &str) -> String {
    let value = value.trim();
    if value.starts_with('{') {
        return serde_json::from_str::<serde_json::Value>(value)
            .ok()
            .and_then(|json| json.get(key)?.as_str().map(str::to_owned))
            .unwrap_or_default();
    }
    let named = value.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('='));
    let first = value.split(',').next().unwrap_or_default();
    named.unwrap_or(first).to_owned()
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
