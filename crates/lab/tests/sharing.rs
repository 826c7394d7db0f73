//! Guests write, check and free identical pages as fast as they can while pages are shared as fast
//! as it goes, and more is handed out than there is. BALLAST_SHARE_TORTURE: seconds of it.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::time::{Duration, Instant};

use ballast_api::{Accel, Salt, VmChange, VmView};
use ballast_lab::console::Console;
use ballast_lab::guest::Guest;
use ballast_lab::manager::{Manager, Options, SharingOptions};
use ballast_units::Bytes;
use common::image_or_skip;

const TORTURE: u64 = 60;

#[tokio::test]
async fn no_write_is_lost_while_twins_are_written_checked_and_freed() {
    let test = "no_write_is_lost";
    let Some(image) = image_or_skip(test, &["ballastd", "libballast_shim.so"]) else { return };
    let seconds: u64 = std::env::var("BALLAST_SHARE_TORTURE")
        .map_or(TORTURE, |s| s.parse().expect("BALLAST_SHARE_TORTURE: seconds"));
    // Three guests of 160 MiB that use about 120 each; with what is shared they fit, or nearly so.
    let budget = Bytes::from_mib(256);
    let options = Options {
        sharing: Some(SharingOptions::as_fast_as_it_goes()),
        sample_period: Some(Duration::from_secs(5)),
        ..Options::budget(budget)
    };
    let mut manager = Manager::start(&options).unwrap();
    let client = manager.client().clone();
    let mut consoles = Vec::new();
    for n in 1..=3 {
        let work =
            format!("share-torture --mb 64 --threads 2 --rest 2 --seconds {seconds} --seed {n}");
        let guest = Guest::new(&format!("twins{n}"), Bytes::from_mib(160), &manager.consoles());
        let guest = guest.run(work);
        let mut spec = guest.spec(&image, Accel::Tcg);
        spec.salt = (n < 3).then(|| Salt::try_from("twins").unwrap());
        client.run(&spec).await.unwrap();
        consoles.push(Console::new(&guest.console));
    }
    let begin = Instant::now();
    let limit = Duration::from_secs(120 + 3 * seconds);
    let mut most = [0; 2];
    let mut salts = ["twins", "others"].into_iter().cycle();
    let mut changed = begin;
    while consoles.iter().any(|c| c.story.exits.is_empty()) {
        for console in &mut consoles {
            console.poll();
            assert_eq!(console.story.trouble, None, "{}", manager.last_words());
        }
        assert!(manager.alive(), "ballastd ended: {}", manager.last_words());
        assert!(begin.elapsed() < limit, "not done: {}", consoles[0].tail(3));
        let sharing = client.host().await.unwrap().sharing;
        most = [most[0].max(sharing.shared), most[1].max(sharing.saved)];
        // Into another domain and back, with all its pages.
        if changed.elapsed() > Duration::from_secs(15) {
            changed = Instant::now();
            let salt = salts.next().map(|salt| Salt::try_from(salt).unwrap());
            let change = VmChange { salt, ..VmChange::default() };
            client.change("twins3", &change).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let vms: Vec<VmView> = client.vms().await.unwrap();
    for (console, vm) in consoles.iter().zip(&vms) {
        assert!(console.story.checks > 20_000, "{}: {:?}", vm.name, console.story.progress);
        assert_eq!(vm.trouble, None, "{}", vm.name);
        // It was put to the test: much was shared, and written while it was.
        assert!(vm.sharing.breaks > 2_000, "{:?}", vm.sharing);
    }
    assert!(most[0] > Bytes::from_mib(64).0, "at most {most:?} bytes shared, saved");
    let (host, left) = manager.finish().await.unwrap();
    assert!(host.measured_peak <= budget.0 && host.peak_used <= budget.0, "{host:?}");
    assert!(left.is_empty(), "{left:?}");
}
