//! Real services in a sample guest under plain QEMU: they start, and what they answer is right.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::time::Duration;

use ballast_lab::guest::Guest;
use ballast_lab::image;
use ballast_lab::plain::PlainVm;
use ballast_units::Bytes;
use common::{image_or_skip, required};

const LIMIT: Duration = Duration::from_secs(400);

#[test]
fn services_of_the_distribution_answer_their_clients() {
    let Some(image) = image_or_skip("services_of_the_distribution", &[]) else { return };
    let disk = match image::services_disk(&image) {
        Ok(disk) => disk,
        Err(why) => {
            assert!(!required(), "services_of_the_distribution must run here, but: {why:#}");
            eprintln!("SKIPPED services_of_the_distribution: {why:#}");
            return;
        }
    };
    // The two web servers have one port, so they are in two guests.
    for kinds in [&["postgresql", "nginx", "redis", "memcached"][..], &["lighttpd"]] {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::new("services", Bytes::from_mib(384), dir.path())
            .shared_disk(disk.clone())
            .power_off_when_done();
        for kind in kinds {
            guest = guest.run(format!("service --kind {kind} --mb 4 --rate 20 --seconds 20"));
        }
        let mut vm = PlainVm::start(&guest, &image).unwrap();
        assert!(vm.wait_for_end(LIMIT).unwrap().success());
        let story = &vm.console.story;
        assert_eq!(story.trouble, None, "{}", vm.console.tail(20));
        assert_eq!(story.exits.len(), kinds.len(), "{}", vm.console.tail(20));
        for kind in kinds {
            assert!(story.checks_of(kind) > 0, "{kind} answered nothing: {}", vm.console.tail(20));
        }
    }
}
