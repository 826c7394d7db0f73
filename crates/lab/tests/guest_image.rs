//! The sample guest under plain QEMU, without Ballast: it boots, its workloads check their memory
//! and their files, and it powers off when asked to.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::path::Path;
use std::time::Duration;

use ballast_lab::guest::Guest;
use ballast_lab::image::{self, Image};
use ballast_lab::plain::PlainVm;
use ballast_units::Bytes;
use common::image_or_skip;

const LIMIT: Duration = Duration::from_secs(180);

fn start(guest: &Guest, image: &Image) -> PlainVm {
    let mut vm = PlainVm::start(guest, image).unwrap();
    vm.wait_until("the guest is ready", LIMIT, |s| s.ready.is_some()).unwrap();
    vm
}

fn guest(name: &str, dir: &Path) -> Guest {
    Guest::new(name, Bytes::from_mib(192), dir)
}

#[test]
fn boots_checks_its_memory_and_powers_off_at_the_button() {
    let Some(image) = image_or_skip("boots_checks_its_memory", &[]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let guest = guest("touch", dir.path()).run("toucher --min-mb 8 --max-mb 24 --period 6");
    let mut vm = start(&guest, &image);
    let ready = vm.console.story.ready.clone().unwrap();
    assert!(ready.number("buttons").unwrap() >= 1.0, "no power button: {ready:?}");
    vm.wait_until("10,000 checks", LIMIT, |s| s.checks > 10_000).unwrap();
    assert_eq!(vm.console.story.trouble, None);
    vm.power_down().unwrap();
    assert!(vm.wait_for_end(LIMIT).unwrap().success());
    assert_eq!(vm.console.story.exits.len(), 1, "the workload was ended: {}", vm.console.tail(5));
}

#[test]
fn workloads_pass_on_disk_and_power_off_when_done() {
    let Some(image) = image_or_skip("workloads_pass_on_disk", &[]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    image::empty_disk(&disk, Bytes::from_mib(128)).unwrap();
    let guest = guest("files", dir.path())
        .run("files --dir /disk --mb 24 --seconds 6")
        .run("verify-torture --mb 32 --seconds 6")
        .run("share-torture --mb 12 --rest 1 --seconds 6")
        .run("idle --mb 8 --busy 2 --seconds 4")
        .run("reader --mb 16 --block-mb 4 --seconds 4")
        .disk(disk)
        .power_off_when_done();
    let mut vm = start(&guest, &image);
    assert_eq!(vm.console.story.ready.as_ref().unwrap().text("disk"), "ext4");
    assert!(vm.wait_for_end(LIMIT).unwrap().success());
    let story = &vm.console.story;
    assert_eq!(story.trouble, None, "{}", vm.console.tail(20));
    assert_eq!(story.exits.iter().filter(|(_, code)| *code == 0).count(), 5);
    assert!(story.checks > 24 * 256, "{} checks", story.checks);
}

#[test]
fn a_workload_that_fails_is_seen_from_outside() {
    let Some(image) = image_or_skip("a_workload_that_fails", &[]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let guest = guest("bad", dir.path()).run("toucher --no-such-option 1").power_off_when_done();
    let mut vm = start(&guest, &image);
    assert!(vm.wait_for_end(LIMIT).unwrap().success());
    let trouble = vm.console.story.trouble.clone().unwrap();
    assert!(trouble.contains("--no-such-option"), "{trouble}");
}
