//! Guests that report the pages that are free in them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use support::{Ballastd, MIB, image_or_skip};

/// Where pages are shared, what is reported does not come back as zeros. So who counts on that reports nothing, with the
/// balloon that it gets here, and shares nothing, with one that offers it to be told. Before, its programs found in fresh
/// memory what they had shared: in four runs of two guests, two ended by a signal.
#[tokio::test(flavor = "multi_thread")]
async fn who_counts_on_zeros_reports_nothing_or_shares_nothing() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "512M"]);
    // Frees all that it had, and is free of work then.
    let work = "verify-torture --mb 40 --threads 1 --seconds 4";
    let own = "virtio-balloon-pci,free-page-reporting=on";
    for (name, zeroes, theirs) in
        [("plain", false, false), ("ours", true, false), ("theirs", true, true)]
    {
        let mut spec = ballastd.guest(image, name, 128, work);
        spec.append.push_str(" ballast.reporting_order=0");
        if zeroes {
            spec.append.push_str(" init_on_free=1");
        }
        spec.salt = Some("one".try_into().unwrap());
        spec.free_page_reporting = !theirs;
        if theirs {
            spec.no_balloon = true;
            spec.extra = vec!["-device".into(), own.into()];
        }
        ballastd.client.run(&spec).await.unwrap();
    }
    let given_up = async |name: &str| ballastd.vm(name).await.counters.ballooned;
    for name in ["plain", "theirs"] {
        ballastd.eventually("it reports", async || given_up(name).await > 16 * MIB).await;
    }
    for name in ["plain", "ours", "theirs"] {
        let mut console = ballastd.console(name);
        ballastd
            .eventually("its work has ended", async || {
                console.poll();
                !console.story.exits.is_empty()
            })
            .await;
        let story = &console.story;
        assert_eq!(story.trouble, None, "{name}");
        assert!(story.exits[0].1 == 0 && story.checks > 0, "{name}: {story:?}");
    }
    // Its driver reports what is free every two seconds.
    tokio::time::sleep(std::time::Duration::from_secs(6)).await;
    assert_eq!(given_up("ours").await, 0);
    let shared = async |name: &str| ballastd.vm(name).await.sharing;
    for name in ["plain", "ours"] {
        let sharing = shared(name).await;
        assert_eq!((sharing.note, sharing.scanned > 0), (None, true), "{name}");
    }
    let theirs = shared("theirs").await;
    assert!(theirs.note.as_ref().unwrap().contains("page-poison=off lets it share"), "{theirs:?}");
    assert_eq!((theirs.scanned, theirs.shared), (0, 0), "{theirs:?}");
    ballastd.assert_books_balance().await;
}
