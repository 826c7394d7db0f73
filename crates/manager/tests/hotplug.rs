//! Memory that is plugged while the guest runs, by virtio-mem: the guest uses it, it is paged out and back,
//! outlives the manager, and its budget comes back when it is unplugged.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::time::Duration;

use ballast_api::{ErrorCode, HostChange, Mode, RunState, StateName, VmChange};
use ballast_lab::console::Console;
use support::{Ballastd, MIB, image_or_skip, large_not_to_be_had, refused_as};

fn to(max: u64) -> VmChange {
    VmChange { max: Some(max), ..VmChange::default() }
}

async fn has_plugged(ballastd: &Ballastd, vm: &str, bytes: u64) {
    ballastd
        .eventually("it is plugged", async || {
            ballastd.vm(vm).await.hotplug.is_some_and(|hotplug| hotplug.plugged == Some(bytes))
        })
        .await;
}

async fn withheld(ballastd: &Ballastd, vm: &str) -> u64 {
    ballastd.vm(vm).await.hotplug.map_or(0, |hotplug| hotplug.withheld)
}

/// What cannot be plugged is refused; what is plugged is used.
async fn what_is_plugged_is_used(ballastd: &Ballastd, console: &mut Console) {
    let client = &ballastd.client;
    let beyond = client.change("grows", &to(385 * MIB)).await;
    refused_as(beyond, ErrorCode::BadRequest, "256 MiB that can be plugged");
    let odd = client.change("grows", &to(129 * MIB)).await;
    refused_as(odd, ErrorCode::BadRequest, "multiple of 2 MiB");

    client.change("grows", &to(256 * MIB)).await.unwrap();
    has_plugged(ballastd, "grows", 128 * MIB).await;
    ballastd.checks_go_on(console, 2000).await;
    ballastd
        .eventually("it uses more than it booted with", async || {
            ballastd.vm("grows").await.memory.consumed > 160 * MIB
        })
        .await;
    let vm = ballastd.vm("grows").await;
    assert_eq!((vm.management.mode, vm.params.max), (Mode::Paged, 256 * MIB), "{vm:?}");
}

/// Out and back, and managers that die or leave meanwhile.
async fn it_is_paged_under_several_managers(
    ballastd: &mut Ballastd,
    console: &mut Console,
    vmm: Option<u32>,
) {
    let client = ballastd.client.clone();
    let little = HostChange { budget: Some(160 * MIB), ..HostChange::default() };
    client.change_host(&little).await.unwrap();
    let is_paged = async || {
        let c = ballastd.vm("grows").await.counters;
        c.swapped_out > 8 * MIB && c.swapped_in > MIB
    };
    ballastd.eventually("pages move both ways", is_paged).await;
    ballastd.checks_go_on(console, 500).await;
    ballastd.kill();
    ballastd.restart();
    ballastd
        .eventually("it is paged again", async || {
            ballastd.vm("grows").await.management.mode == Mode::Paged
        })
        .await;
    ballastd.checks_go_on(console, 500).await;
    has_plugged(ballastd, "grows", 128 * MIB).await;
    let vm = ballastd.vm("grows").await;
    assert_eq!((vm.pid, vm.params.max), (vmm, 256 * MIB));
    let plenty = HostChange { budget: Some(512 * MIB), ..HostChange::default() };
    client.change_host(&plenty).await.unwrap();
    assert!(ballastd.take_over().success());
    ballastd
        .eventually("it is paged once more", async || {
            ballastd.vm("grows").await.management.mode == Mode::Paged
        })
        .await;
    ballastd.checks_go_on(console, 500).await;
}

/// More, with which its work is done; then back to what it booted with.
async fn it_ends_as_it_booted(ballastd: &Ballastd, console: &mut Console) {
    let client = &ballastd.client;
    client.change("grows", &to(384 * MIB)).await.unwrap();
    has_plugged(ballastd, "grows", 256 * MIB).await;
    ballastd
        .eventually("its work is done", async || {
            console.poll();
            !console.story.exits.is_empty()
        })
        .await;
    assert_eq!(console.story.trouble, None);
    client.change("grows", &to(128 * MIB)).await.unwrap();
    has_plugged(ballastd, "grows", 0).await;
    ballastd
        .eventually("what it had comes back", async || {
            ballastd.vm("grows").await.memory.consumed <= 128 * MIB
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_plugged_is_used_paged_taken_over_and_comes_back() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start_configured(
        &["--budget", "512M", "--sample-period", "2"],
        support::BALLOON_FIRST,
    );
    let client = ballastd.client.clone();
    // It begins when so much is there as it did not boot with, and ends when there is more still.
    let torture = "verify-torture --mb 150 --threads 2 --seconds 100000 --when-total-mb 200 \
                   --until-total-mb 300";
    let mut spec = ballastd.guest(image, "grows", 128, torture);
    spec.hotplug = 256 * MIB;
    // Where memory may come beyond 4 GiB, a kernel keeps 64 MiB for devices that do not reach that far.
    spec.append += " swiotlb=2048";
    let seen = client.run(&spec).await.unwrap();
    assert_eq!((seen.state, seen.management.mode), (RunState::Running, Mode::Paged), "{seen:?}");
    assert_eq!((seen.params.size, seen.params.max), (384 * MIB, 128 * MIB));
    assert_eq!(seen.hotplug.unwrap().size, 256 * MIB);
    // Swap for all that it may ever have.
    assert_eq!(seen.memory.swap_reserved, 384 * MIB);
    let mut console = ballastd.console("grows");
    ballastd
        .eventually("it has booted", async || {
            console.poll();
            console.story.ready.is_some()
        })
        .await;
    has_plugged(&ballastd, "grows", 0).await;
    assert!(ballastd.vm("grows").await.memory.consumed <= 128 * MIB);

    what_is_plugged_is_used(&ballastd, &mut console).await;
    ballastd.assert_books_balance().await;
    it_is_paged_under_several_managers(&mut ballastd, &mut console, seen.pid).await;
    it_ends_as_it_booted(&ballastd, &mut console).await;
    ballastd.assert_books_balance().await;
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert!(!log.contains("panicked"), "{log}");
}

/// Little by little, until it is enough: what is missing all at once is paged, and then nothing is missing.
async fn lower_the_budget(ballastd: &Ballastd, enough: impl AsyncFn() -> bool) {
    for budget in (10..=24).rev().map(|n| n * 16 * MIB) {
        let less = HostChange { budget: Some(budget), ..HostChange::default() };
        ballastd.client.change_host(&less).await.unwrap();
        // Its balloon turns once a second.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let is_high = async || ballastd.host().await.state == StateName::High;
        ballastd.eventually("there is enough again", is_high).await;
        if enough().await {
            break;
        }
    }
}

/// What was given by plugging is taken back by unplugging where that is beyond the balloon, is led on by the next
/// manager, and comes home when there is plenty.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_balloon_does_not_reach_is_unplugged_and_comes_back() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start_configured(&["--budget", "512M"], support::BALLOON_FIRST);
    let client = ballastd.client.clone();
    // It uses more than it booted with, once, and then nearly nothing: all of that is the host's to take.
    let torture = "verify-torture --mb 250 --threads 2 --seconds 5 --when-total-mb 300";
    let mut spec = ballastd.guest(image, "lends", 128, torture);
    spec.hotplug = 256 * MIB;
    spec.append += " swiotlb=2048";
    client.run(&spec).await.unwrap();
    client.change("lends", &to(384 * MIB)).await.unwrap();
    let mut console = ballastd.console("lends");
    ballastd
        .eventually("it has used what it got", async || {
            console.poll();
            !console.story.exits.is_empty()
        })
        .await;
    assert_eq!(console.story.trouble, None);
    has_plugged(&ballastd, "lends", 256 * MIB).await;
    let vm = ballastd.vm("lends").await;
    assert!(vm.memory.consumed > 200 * MIB, "{vm:?}");
    assert_eq!(vm.hotplug.unwrap().withheld, 0);

    lower_the_budget(&ballastd, async || withheld(&ballastd, "lends").await >= 64 * MIB).await;
    assert!(withheld(&ballastd, "lends").await >= 64 * MIB, "{:?}", ballastd.vm("lends").await);
    ballastd
        .eventually("its balloon holds its part", async || {
            ballastd.vm("lends").await.balloon.reported > 60 * MIB
        })
        .await;
    let vm = ballastd.vm("lends").await;
    let hotplug = vm.hotplug.unwrap();
    assert_eq!(vm.params.max, 384 * MIB, "what its owner gave is as it was");
    assert!(hotplug.requested <= 192 * MIB && vm.balloon.reported > 60 * MIB, "{vm:?}");
    assert!(vm.balloon.limit <= (128 + 256) * MIB * 65 / 100, "{vm:?}");
    ballastd.assert_books_balance().await;

    ballastd.kill();
    ballastd.restart();
    ballastd
        .eventually("it is paged again", async || {
            ballastd.vm("lends").await.management.mode == Mode::Paged
        })
        .await;
    let taken = async || withheld(&ballastd, "lends").await >= 64 * MIB;
    ballastd.eventually("so much is away", taken).await;
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert!(!log.contains("panicked"), "{log}");

    let plenty = HostChange { budget: Some(512 * MIB), ..HostChange::default() };
    client.change_host(&plenty).await.unwrap();
    has_plugged(&ballastd, "lends", 256 * MIB).await;
    ballastd
        .eventually("nothing is withheld", async || withheld(&ballastd, "lends").await == 0)
        .await;
    ballastd.assert_books_balance().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_plugged_is_in_large_pages_where_the_rest_is() {
    let Some(image) = image_or_skip() else { return };
    let before = large_not_to_be_had();
    let ballastd = Ballastd::start(&["--budget", "768M"]);
    let client = &ballastd.client;
    let torture = "verify-torture --mb 150 --threads 2 --seconds 100000 --when-total-mb 200";
    let mut spec = ballastd.guest(image, "large", 128, torture);
    spec.append += " swiotlb=2048";
    (spec.hotplug, spec.large_pages) = (128 * MIB, Some(true));
    client.run(&spec).await.unwrap();
    client.change("large", &to(256 * MIB)).await.unwrap();
    has_plugged(&ballastd, "large", 128 * MIB).await;
    ballastd.checks_go_on(&mut ballastd.console("large"), 2000).await;
    let vm = ballastd.vm("large").await;
    assert_eq!(vm.management.mode, Mode::Paged, "{vm:?}");
    // More than it booted with is in such pages, but for those that the kernel did not have.
    let wanted = (130 * MIB).saturating_sub((large_not_to_be_had() - before) * 2 * MIB);
    if wanted < 66 * MIB {
        eprintln!("SKIPPED: the kernel had no large pages: {wanted} bytes could be in such");
    }
    assert!(vm.memory.large >= wanted, "{wanted}: {vm:?}");
    ballastd.assert_books_balance().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_without_memory_to_plug_says_so() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let client = &ballastd.client;
    client.run(&ballastd.guest(image, "fixed", 96, "")).await.unwrap();
    assert_eq!(ballastd.vm("fixed").await.hotplug, None);
    let more = client.change("fixed", &to(128 * MIB)).await;
    refused_as(more, ErrorCode::BadRequest, "started without memory to plug");
    let mut odd = ballastd.guest(image, "odd", 96, "");
    odd.hotplug = MIB;
    refused_as(client.run(&odd).await, ErrorCode::BadRequest, "hotplug 1048576 bytes");
}
