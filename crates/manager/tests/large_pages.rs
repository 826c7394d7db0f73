//! A real guest on large pages: handed out while memory is plentiful, as the kernel maps them; broken when it
//! is not, and made whole after samples broke them; and nothing is lost when the manager is killed meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use ballast_api::{Mode, VmChange};
use support::witness::Witness;
use support::{Ballastd, MIB, image_or_skip, large_not_to_be_had};

const TORTURE: &str = "verify-torture --mb 64 --threads 2 --seconds 100000";
const SIZE: u64 = 1024;
/// For it to come home: ten seconds of plenty, thirty between two looks at all of a guest's memory, and some for a busy host.
const COMES_HOME: std::time::Duration = std::time::Duration::from_secs(60);

/// What the kernel has mapped as large pages of a process's shared memory.
fn mapped_large(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let kib = |line: &str| -> Option<u64> {
        line.strip_prefix("ShmemPmdMapped:")?.trim().strip_suffix(" kB")?.parse().ok()
    };
    text.lines().filter_map(kib).sum::<u64>() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn large_pages_come_while_memory_is_plentiful_and_break_when_it_is_not() {
    let Some(image) = image_or_skip() else { return };
    let options = ["--budget", "2G", "--sample-period", "3600"];
    let before = large_not_to_be_had();
    let mut ballastd = Ballastd::start(&options);
    let witness = Witness::watch(&ballastd.root, 2048 * MIB);
    let spec = ballastd.guest(image, "big", SIZE, TORTURE);
    assert_eq!(spec.large_pages, None);
    let vm = ballastd.client.run(&spec).await.unwrap();
    assert_eq!(vm.management.mode, Mode::Paged, "{:?}", vm.management.reason);
    let mut console = ballastd.console("big");
    ballastd.checks_go_on(&mut console, 2000).await;
    let vm = ballastd.vm("big").await;
    let (large, pid) = (vm.memory.large, vm.pid.unwrap());
    // Where the host's memory is in pieces, the kernel has fewer than are asked for.
    let wanted = (100 * MIB).saturating_sub((large_not_to_be_had() - before) * 2 * MIB);
    if wanted < 50 * MIB {
        eprintln!("SKIPPED: the kernel had no large pages: {wanted} bytes could be in such");
    }
    assert!(large >= wanted && large <= vm.memory.resident, "{wanted}: {:?}", vm.memory);
    assert!(vm.counters.large_fills * 2 * MIB >= large, "{:?}", vm.counters);
    // The kernel's count. A guest that first reads a page of a large one may have it mapped small.
    let mapped = mapped_large(pid);
    assert!(
        mapped <= ballastd.vm("big").await.memory.large && mapped * 10 >= large * 9,
        "{mapped} of {large}: {:?}",
        ballastd.vm("big").await
    );
    assert!(ballastd.host().await.measured_used <= 2048 * MIB);
    ballastd.assert_books_balance().await;

    // Less than it works with: what was never touched goes first, then the rest.
    for limit in [160, 96] {
        let change = VmChange { max: Some(limit * MIB), ..VmChange::default() };
        ballastd.client.change("big", &change).await.unwrap();
        ballastd
            .eventually("it is within its limit", async || {
                ballastd.vm("big").await.memory.consumed <= limit * MIB
            })
            .await;
        ballastd.checks_go_on(&mut console, 500).await;
        ballastd.kill();
        ballastd.restart();
        ballastd
            .eventually("it is taken over", async || {
                ballastd.client.vm("big").await.is_ok_and(|vm| vm.management.mode == Mode::Paged)
            })
            .await;
        ballastd.checks_go_on(&mut console, 500).await;
        ballastd.assert_books_balance().await;
    }
    let vm = ballastd.vm("big").await;
    assert!(vm.memory.large < large / 2, "{:?}", vm.memory);
    assert!(mapped_large(pid) <= vm.memory.large, "{:?}", vm.memory);

    assert!(witness.peak() >= large, "it saw {} at most", witness.peak());
    assert!(witness.peak() <= 2048 * MIB);
}

/// Each sample breaks some large pages while memory is plentiful; a guest does not lose them for good.
#[tokio::test(flavor = "multi_thread")]
async fn what_samples_broke_is_made_whole_again() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "2G", "--sample-period", "8"]);
    let workload = "verify-torture --mb 320 --threads 2 --seconds 100000";
    let spec = ballastd.guest(image, "big", SIZE, workload);
    let vm = ballastd.client.run(&spec).await.unwrap();
    assert_eq!(vm.management.mode, Mode::Paged, "{:?}", vm.management.reason);
    let mut console = ballastd.console("big");
    ballastd.checks_go_on(&mut console, 500).await;
    ballastd
        .eventually("regions are broken, and made whole", async || {
            let counters = ballastd.vm("big").await.counters;
            counters.large_breaks >= 4 && counters.large_collapses >= 4
        })
        .await;
    ballastd.checks_go_on(&mut console, 500).await;
    let (vm, mapped) = (ballastd.vm("big").await, mapped_large(vm.pid.unwrap()));
    println!("{:?}; {mapped} mapped as large, {:?}", vm.memory, vm.counters);
    assert!(vm.memory.large <= vm.memory.resident && mapped <= vm.memory.large);
    ballastd.assert_books_balance().await;
}

/// A guest that does not touch what a shortage took from it gets it back all the same where that keeps a large page from
/// being made; its limit is lowered and raised again.
#[tokio::test(flavor = "multi_thread")]
async fn what_keeps_large_pages_from_being_made_comes_home_unasked() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "2G", "--sample-period", "20"]);
    // Most of its large pages are the workload's: no two of their pages are equal, none is left untouched, and it reads eight of
    // them every three seconds, once it is idle.
    let spec = ballastd.guest(image, "big", SIZE, "idle --mb 800 --busy 1 --every 100000");
    let vm = ballastd.client.run(&spec).await.unwrap();
    assert_eq!(vm.management.mode, Mode::Paged, "{:?}", vm.management.reason);
    let mut console = ballastd.console("big");
    ballastd.checks_go_on(&mut console, 20).await;
    let before = ballastd.vm("big").await.counters;
    let mut rounds = 0;
    while !some_goes_and_comes_home(&ballastd).await {
        // It was of one that stays small, with pages that are shared, or half untouched: what was never written leaves first, and
        // more of such a large page behind it.
        rounds += 1;
        assert!(rounds < 6, "{:?}", ballastd.vm("big").await);
    }
    ballastd
        .eventually("large pages are made", async || {
            ballastd.vm("big").await.counters.large_collapses > before.large_collapses
        })
        .await;
    let after = ballastd.vm("big").await.counters;
    println!("{rounds}; {before:?}; {after:?}");
    assert!(after.large_breaks > 0, "{after:?}");
    ballastd.checks_go_on(&mut console, 20).await;
    ballastd.assert_books_balance().await;
}

/// Takes some pages of a large page from a guest, at random, by its limit, and gives them back. Whether most come home.
async fn some_goes_and_comes_home(ballastd: &Ballastd) -> bool {
    let away = async || {
        let memory = ballastd.vm("big").await.memory;
        memory.compressed + memory.filled + memory.staged + memory.swapped
    };
    let limit = async |max| {
        let change = VmChange { max: Some(max), ..VmChange::default() };
        ballastd.client.change("big", &change).await.unwrap();
    };
    let before = away().await;
    // Little by little, for what was never written goes first: until some pages of one large page are away.
    let mut max = ballastd.vm("big").await.memory.consumed;
    while away().await < before + MIB / 8 {
        max -= MIB / 4;
        limit(max).await;
        let within = async || ballastd.vm("big").await.memory.consumed <= max;
        ballastd.eventually("it is within its limit", within).await;
    }
    limit(SIZE * MIB).await;
    let most = away().await - before;
    let begin = std::time::Instant::now();
    while begin.elapsed() < COMES_HOME {
        if away().await <= before + most / 2 {
            return true;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn small_guests_have_large_pages_where_they_are_asked_for() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "1G"]);
    for (name, asked) in [("not", None), ("asked", Some(true))] {
        let mut spec = ballastd.guest(image, name, 128, "");
        spec.large_pages = asked;
        spec.free_page_reporting = true;
        let vm = ballastd.client.run(&spec).await.unwrap();
        assert_eq!(vm.management.mode, Mode::Paged, "{:?}", vm.management.reason);
        let mut console = ballastd.console(name);
        ballastd
            .eventually("it has booted", async || {
                console.poll();
                console.story.ready.is_some()
            })
            .await;
        let large = ballastd.vm(name).await.memory.large;
        assert_eq!(large > 0, asked == Some(true), "{name}: {large}");
    }
    ballastd.assert_books_balance().await;
}
