//! The unit for systemd is what the documents say of it, and what systemd takes.

use std::collections::BTreeSet;
use std::process::Command;

use crate::files;

fn unit() -> String {
    files::read(&files::root().join("dist/ballastd.service"))
}

/// All values of a key.
fn values(unit: &str, key: &str) -> Vec<String> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// The first column of the table of capabilities.
fn documented() -> BTreeSet<String> {
    let text = files::read(&files::root().join("docs/configuration.md"));
    let rows = text.lines().filter_map(|line| line.strip_prefix("| CAP_"));
    let name = |row: &str| format!("CAP_{}", row.split(' ').next().unwrap());
    rows.map(name).collect()
}

#[test]
fn it_has_the_capabilities_that_are_documented_and_no_other() {
    let allowed = values(&unit(), "CapabilityBoundingSet").into_iter().collect::<BTreeSet<_>>();
    assert_eq!(allowed, documented());
    assert!(allowed.contains("CAP_SYS_NICE") && allowed.contains("CAP_SYS_PTRACE"));
}

#[test]
fn guests_outlive_a_restart_of_it() {
    let unit = unit();
    for (key, value) in [
        ("KillMode", "process"),
        ("OOMPolicy", "continue"),
        ("ManagedOOMPreference", "omit"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("RuntimeDirectory", "ballast"),
    ] {
        assert_eq!(values(&unit, key), [value], "{key}");
    }
}

#[test]
fn it_writes_where_ballastd_does_by_default() {
    let unit = unit();
    let layout = files::read(&files::root().join("crates/api/src/layout.rs"));
    let writable = values(&unit, "ReadWritePaths");
    assert_eq!(writable, ["/run/ballast", "/var/lib/ballast"]);
    for folder in ["\"/run/ballast\"", "\"/var/lib/ballast/swap\""] {
        assert!(layout.contains(folder), "{folder} is no default any more");
    }
}

/// systemd has a unit wait for mounts on its RuntimeDirectory.
#[test]
fn a_tmpfs_for_the_run_folder_is_mounted_before_it_starts() {
    let text = files::read(&files::root().join("docs/configuration.md"));
    let line = text.lines().find(|line| line.trim().starts_with("tmpfs ")).unwrap();
    let fields: Vec<&str> = line.split_whitespace().collect();
    let folder = format!("/run/{}", values(&unit(), "RuntimeDirectory")[0]);
    assert_eq!((fields[1], fields[2], fields.len()), (&*folder, "tmpfs", 6), "{line}");
    assert!(fields[3].contains("mode=0700"), "others may write there: {line}");
}

#[test]
fn the_readme_installs_what_it_runs() {
    let readme = files::read(&files::root().join("README.md"));
    let program = &values(&unit(), "ExecStart")[..];
    assert_eq!(program, ["/usr/bin/ballastd", "--config", "/etc/ballast.toml"]);
    for line in [
        "install -D -t /usr/bin target/release/ballastd target/release/ballast",
        "-t /usr/lib/ballast target/release/libballast_shim.so",
        "dist/ballast.toml /etc/ballast.toml",
        "dist/ballastd.service /etc/systemd/system/ballastd.service",
    ] {
        assert!(readme.contains(line), "{line}");
    }
}

#[test]
fn systemd_takes_it() {
    // The program is not installed where this runs.
    let here = unit().replace("ExecStart=/usr/bin/ballastd", "ExecStart=/bin/true");
    let path = std::env::temp_dir().join(format!("ballastd-{}.service", std::process::id()));
    std::fs::write(&path, here).unwrap();
    let output = Command::new("systemd-analyze").arg("verify").arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    match output {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            // It complains about what it passes over, and ends well.
            assert!(output.status.success() && !said.contains("ballastd"), "{said}");
        }
        Err(e) => eprintln!("SKIPPED: systemd-analyze: {e}"),
    }
}
