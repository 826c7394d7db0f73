//! Guests verify checksums of their memory through a minute of forced eviction.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::time::{Duration, Instant};

use ballast_api::{Accel, VmView};
use ballast_lab::console::Console;
use ballast_lab::guest::Guest;
use ballast_lab::manager::{Manager, Options};
use ballast_units::Bytes;
use common::image_or_skip;

/// Seconds of torture; a crowded machine may take several times as long. Hours of it are the soak's.
const TORTURE: u64 = 60;
const LIMIT: Duration = Duration::from_secs(420);

#[tokio::test]
async fn checksums_hold_while_a_third_of_memory_is_always_swapped_out() {
    let test = "checksums_hold";
    let Some(image) = image_or_skip(test, &["ballastd", "libballast_shim.so"]) else { return };
    // Two guests of 192 MiB, each of which uses about 170; no balloon, so swapping must do it all.
    let budget = Bytes::from_mib(216);
    let mut manager = Manager::start(&Options::budget(budget)).unwrap();
    let client = manager.client().clone();
    let mut consoles = Vec::new();
    for n in 1..=2 {
        let guest = Guest::new(&format!("torture{n}"), Bytes::from_mib(192), &manager.consoles())
            .run(format!("verify-torture --mb 112 --threads 3 --seconds {TORTURE} --seed {n}"));
        let mut spec = guest.spec(&image, Accel::Tcg);
        spec.no_balloon = true;
        client.run(&spec).await.unwrap();
        consoles.push(Console::new(&guest.console));
    }
    let begin = Instant::now();
    while consoles.iter().any(|c| c.story.exits.is_empty()) {
        for console in &mut consoles {
            console.poll();
            assert_eq!(console.story.trouble, None, "{}", manager.last_words());
        }
        assert!(manager.alive(), "ballastd ended: {}", manager.last_words());
        assert!(begin.elapsed() < LIMIT, "not done: {}", consoles[0].tail(3));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let vms: Vec<VmView> = client.vms().await.unwrap();
    for (console, vm) in consoles.iter().zip(&vms) {
        assert!(console.story.checks > 50_000, "{}: {:?}", vm.name, console.story.progress);
        // It was put to the test: much was written out, and came back.
        assert!(vm.counters.swapped_out > Bytes::from_mib(64).0, "{:?}", vm.counters);
        assert!(vm.counters.swapped_in > Bytes::from_mib(64).0, "{:?}", vm.counters);
        let compression = vm.compression;
        assert!(compression.stored > 0 && compression.restored > 0, "{compression:?}");
    }
    // What was counted stays counted when a VM ends.
    client.stop(&vms[0].name, Duration::ZERO).await.unwrap();
    while client.vms().await.unwrap().len() > 1 {
        assert!(begin.elapsed() < LIMIT, "{} does not end", vms[0].name);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let totals = client.host().await.unwrap();
    let sum = |f: &dyn Fn(&VmView) -> u64| vms.iter().map(f).sum::<u64>();
    assert!(totals.compression.stored >= sum(&|vm| vm.compression.stored), "{totals:?}");
    assert!(totals.compression.restored >= sum(&|vm| vm.compression.restored), "{totals:?}");
    assert!(totals.counters.swapped_out >= sum(&|vm| vm.counters.swapped_out), "{totals:?}");
    assert!(totals.sharing.scanned >= sum(&|vm| vm.sharing.scanned), "{totals:?}");
    let (host, left) = manager.finish().await.unwrap();
    assert!(host.measured_peak <= budget.0 && host.peak_used <= budget.0, "{host:?}");
    assert!(left.is_empty(), "{left:?}");
}
