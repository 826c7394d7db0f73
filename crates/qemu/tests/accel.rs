//! The probe of KVM on this host, whatever it has: an answer, and a cache that remembers it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use ballast_qemu::{AccelChoice, probe_accel, probe_accel_cached};
use common::{have_qemu, qemu_path, skip, stock_kernel};

/// It ends, however crowded the machine.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn what_is_no_kernel_does_not_boot() {
    if !have_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("vmlinuz");
    std::fs::write(&kernel, vec![0x90; 8192]).unwrap();
    let began = Instant::now();
    let choice = probe_accel(Path::new("qemu-system-x86_64"), Some(&kernel)).await;
    assert!(began.elapsed() < LIMIT);
    match choice {
        AccelChoice::Tcg { why } => assert!(why.contains("kvm"), "{why}"),
        AccelChoice::Kvm => panic!("8 KiB of no-ops were taken for Linux"),
    }
}

#[tokio::test]
async fn a_qemu_that_is_not_there_means_tcg_and_is_named() {
    let qemu = Path::new("/nonexistent/qemu");
    if !Path::new("/dev/kvm").exists() {
        return skip("no /dev/kvm: the probe ends before it starts QEMU");
    }
    match probe_accel(qemu, Some(Path::new("/nonexistent/kernel"))).await {
        AccelChoice::Tcg { why } => {
            let opens = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
            let named = if opens { "/nonexistent/qemu" } else { "/dev/kvm" };
            assert!(why.contains(named), "{why}")
        }
        AccelChoice::Kvm => panic!("no QEMU ran"),
    }
}

#[tokio::test]
async fn a_stock_kernel_decides_and_the_cache_remembers() {
    if !have_qemu() {
        return;
    }
    let Some(kernel) = stock_kernel() else {
        return skip("no kernel in BALLAST_TEST_KERNEL or /boot");
    };
    let qemu = qemu_path().unwrap();
    let began = Instant::now();
    let choice = probe_accel(&qemu, Some(&kernel)).await;
    eprintln!("{choice}, after {:?}", began.elapsed());
    assert!(began.elapsed() < LIMIT);
    if let AccelChoice::Tcg { why } = &choice {
        assert!(!why.is_empty() && !why.contains('\n'), "{why}");
    }

    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("accel.json");
    // Which may be another one, where the kernel boots just in time or not.
    let choice = probe_accel_cached(&cache, &qemu, Some(&kernel)).await;
    let stored = std::fs::read_to_string(&cache).unwrap();
    // The cache is what answers: an answer that was put there comes back.
    let planted = AccelChoice::Tcg { why: "planted".into() };
    let mut json: serde_json::Value = serde_json::from_str(&stored).unwrap();
    assert_eq!(json["choice"], serde_json::to_value(&choice).unwrap());
    json["choice"] = serde_json::to_value(&planted).unwrap();
    std::fs::write(&cache, json.to_string()).unwrap();
    assert_eq!(probe_accel_cached(&cache, &qemu, Some(&kernel)).await, planted);
    // For a while, where there is a KVM that might do it after all.
    let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3_600);
    std::fs::File::options().write(true).open(&cache).unwrap().set_modified(hour_ago).unwrap();
    let kvm = Path::new("/dev/kvm").exists();
    let answer = probe_accel_cached(&cache, &qemu, Some(&kernel)).await;
    assert_eq!(answer == planted, !kvm, "{answer}");
    // But not for another host kernel, nor from a file that is broken.
    json["host"]["host_kernel"] = "2.6.0".into();
    for other in [json.to_string(), "{".into(), String::new()] {
        std::fs::write(&cache, other).unwrap();
        assert_ne!(probe_accel_cached(&cache, &qemu, Some(&kernel)).await, planted);
    }
}

/// A program that is run as QEMU.
fn fake_qemu(script: &str) -> (std::path::PathBuf, tempfile::TempDir) {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qemu");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (path, dir)
}

async fn probe_with(script: &str) -> AccelChoice {
    let (qemu, _dir) = fake_qemu(script);
    probe_accel(&qemu, Some(Path::new("/boot/vmlinuz"))).await
}

#[tokio::test]
async fn the_console_decides() {
    // Without a kernel the device alone is asked.
    if let AccelChoice::Tcg { why } = probe_accel(Path::new("/nonexistent"), None).await {
        return skip(&format!("the probe ends at the device: {why}"));
    }
    let booted = "echo '[    0.000000] Linux version 6.1.0'; exec sleep 1000";
    assert_eq!(probe_with(booted).await, AccelChoice::Kvm);
    let began = Instant::now();
    let AccelChoice::Tcg { why } =
        probe_with("trap '' TERM; echo Probing EDD; exec sleep 1000").await
    else {
        panic!("a hanging kernel was taken for a running one");
    };
    assert!(began.elapsed() < LIMIT);
    assert_eq!(why, "vmlinuz does not boot on this /dev/kvm within 5 s");
    let AccelChoice::Tcg { why } = probe_with("echo 'qemu: no such CPU' >&2; exit 1").await else {
        panic!("a QEMU that failed was taken for one that boots");
    };
    assert_eq!(why, "vmlinuz does not boot on this /dev/kvm: no such CPU");
}
