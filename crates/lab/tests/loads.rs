//! The loads of overcommitted guests, in a guest under plain QEMU: they fill, they serve, and what
//! they report is read.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::time::Duration;

use ballast_lab::guest::Guest;
use ballast_lab::image;
use ballast_lab::overcommit::{Load, Tally};
use ballast_lab::plain::{PlainVm, Ram, Style};
use ballast_units::Bytes;
use common::image_or_skip;

const LIMIT: Duration = Duration::from_secs(400);

#[test]
fn stores_and_offices_tell_what_they_did() {
    let Some(image) = image_or_skip("stores_and_offices", &[]) else { return };
    for load in [Load::store(24, 8, 40.0, 1), Load::office(4, 0.1, 1)] {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::new("load", Bytes::from_mib(160), dir.path())
            .run(format!("{} --seconds 12", load.command))
            .power_off_when_done();
        if let Some(size) = load.disk {
            let disk = dir.path().join("disk.img");
            image::empty_disk(&disk, size).unwrap();
            guest = guest.disk(disk);
        }
        let style = Style { ram: Ram::Private, ..Style::default() };
        let mut vm = PlainVm::start_as(&guest, &image, &style).unwrap();
        let mut tally = Tally::new(std::slice::from_ref(&load));
        let mut resident = Bytes::default();
        let begin = std::time::Instant::now();
        while vm.ended().unwrap().is_none() {
            assert!(begin.elapsed() < LIMIT, "{}", vm.console.tail(5));
            for event in vm.console.poll() {
                tally.take(0, &event);
            }
            resident = vm.held().map_or(resident, |held| held.ram);
            std::thread::sleep(Duration::from_millis(50));
        }
        for event in vm.console.poll() {
            tally.take(0, &event);
        }
        tally.seconds = 12.0;
        assert_eq!(vm.console.story.trouble, None, "{}", vm.console.tail(20));
        assert!(tally.rate(load.work) > 0.0, "{}", vm.console.tail(20));
        let latency = tally.latency(load.work);
        assert_eq!(latency.count() as f64, tally.operations(load.work));
        assert!(latency.quantile_ms(0.5) > 0.0);
        // It was found by its size, and it is most of what the guest has.
        assert!(resident > Bytes::from_mib(40) && resident <= Bytes::from_mib(160), "{resident}");
    }
}
