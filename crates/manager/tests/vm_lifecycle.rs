//! VMs end in every way there is: all they had comes back, and no other VM notices.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::time::{Duration, Instant};

use ballast_api::{ErrorCode, HostChange, Mode, RebootAction, RunState, VmChange};
use ballast_lab::image::Image;
use support::witness::Witness;
use support::{Ballastd, MIB, ZEROS, image_or_skip, refused_as, signal, wait};

const TORTURE: &str = "verify-torture --mb 24 --threads 2 --seconds 100000";

fn text(ballastd: &Ballastd, vm: &str) -> String {
    let path = ballastd.root.join(format!("console/{vm}.console.log"));
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// What a VM had is in nobody's books any more.
async fn all_is_back(ballastd: &Ballastd, vm: &str) {
    ballastd.eventually(&format!("{vm} is gone"), async || ballastd.is_gone(vm).await).await;
    ballastd.assert_nothing_left(vm);
}

async fn killed(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    client.run(&ballastd.guest(image, "killed", 96, TORTURE)).await.unwrap();
    ballastd.checks_go_on(&mut ballastd.console("killed"), 1).await;
    let vm = ballastd.vm("killed").await;
    assert!(ballastd.swap_file("killed").exists() && vm.memory.consumed > 32 * MIB, "{vm:?}");
    signal(vm.pid.unwrap(), rustix::process::Signal::KILL);
    all_is_back(ballastd, "killed").await;
}

async fn panicked(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    let mut spec = ballastd.guest(image, "panicked", 96, "");
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    client.run(&spec).await.unwrap();
    all_is_back(ballastd, "panicked").await;
    assert!(text(ballastd, "panicked").contains("Kernel panic"));
}

/// The same panic, which ends in a reboot by panic=-1. Its limit was changed meanwhile.
async fn rebooted(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    let mut spec = ballastd.guest(image, "rebooted", 96, "");
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    let first = client.run(&spec).await.unwrap();
    let change = VmChange { shares: Some(77), max: Some(90 * MIB), ..VmChange::default() };
    client.change("rebooted", &change).await.unwrap();
    ballastd
        .eventually("it runs again", async || {
            client.vm("rebooted").await.is_ok_and(|vm| {
                vm.pid.is_some_and(|pid| Some(pid) != first.pid) && vm.params.max == 90 * MIB
            })
        })
        .await;
    assert_eq!(ballastd.vm("rebooted").await.params.shares, 77);
    // Stopped, it stays away, wherever it is in its round.
    client.stop("rebooted", Duration::ZERO).await.unwrap();
    all_is_back(ballastd, "rebooted").await;
}

/// Stopped between its end and its next start.
async fn rebooted_and_stopped(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    let mut spec = ballastd.guest(image, "again", 96, "");
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    client.run(&spec).await.unwrap();
    ballastd.eventually("it reboots", async || client.vm("again").await.is_err()).await;
    let last = client.stop("again", Duration::ZERO).await.unwrap();
    assert_eq!(last.state, RunState::Stopped);
    // For longer than it would have been held back.
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(client.vm("again").await.is_err());
    all_is_back(ballastd, "again").await;
    // Its name is free.
    client.run(&spec).await.unwrap();
    client.stop("again", Duration::ZERO).await.unwrap();
    all_is_back(ballastd, "again").await;
}

/// What keeps a VM from starting again may pass.
async fn rebooted_without_its_kernel(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    let mut spec = ballastd.guest(image, "lost", 96, "");
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    let (kernel, away) = (ballastd.root.join("kernel"), ballastd.root.join("away"));
    std::fs::copy(&spec.kernel, &kernel).unwrap();
    spec.kernel.clone_from(&kernel);
    client.run(&spec).await.unwrap();
    ballastd.eventually("it reboots", async || client.vm("lost").await.is_err()).await;
    std::fs::rename(&kernel, &away).unwrap();
    let log = || std::fs::read_to_string(ballastd.log()).unwrap_or_default();
    let fails = async || log().contains("not started again yet");
    ballastd.eventually("its start fails", fails).await;
    // Its name is held meanwhile.
    let namesake = ballastd.guest(image, "lost", 96, "");
    refused_as(client.run(&namesake).await, ErrorCode::Conflict, "about to be started again");
    std::fs::rename(&away, &kernel).unwrap();
    ballastd.eventually("it is back", async || client.vm("lost").await.is_ok()).await;
    client.stop("lost", Duration::ZERO).await.unwrap();
    all_is_back(ballastd, "lost").await;
}

async fn powered_off(ballastd: &Ballastd, image: &Image) {
    let client = &ballastd.client;
    client.run(&ballastd.guest(image, "polite", 96, "")).await.unwrap();
    let mut console = ballastd.console("polite");
    ballastd
        .eventually("it has booted", async || {
            console.poll();
            console.story.ready.is_some()
        })
        .await;
    let grace = Duration::from_secs(600);
    let last = client.clone().with_timeout(grace).stop("polite", grace).await.unwrap();
    assert_eq!(last.state, RunState::Stopped);
    assert!(last.vmm_uptime_s.unwrap() > 0.0, "{last:?}");
    // At once, not eventually: the answer is the promise.
    assert!(ballastd.is_gone("polite").await);
    ballastd.assert_nothing_left("polite");
    assert!(text(ballastd, "polite").contains("\"power\":\"button\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_end_releases_everything_and_disturbs_nobody() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "512M", "--sample-period", "2"]);
    let witness = Witness::watch(&ballastd.root, 512 * MIB);
    let client = &ballastd.client;
    let mut bystander = ballastd.guest(image, "bystander", 128, TORTURE);
    bystander.min = 32 * MIB;
    let seen = client.run(&bystander).await.unwrap();
    assert_eq!((seen.state, seen.management.mode), (RunState::Running, Mode::Paged));
    assert_eq!(client.vm("bystander").await.unwrap().params.min, 32 * MIB);
    let mut console = ballastd.console("bystander");
    ballastd.checks_go_on(&mut console, 1).await;

    tokio::join!(
        killed(&ballastd, image),
        panicked(&ballastd, image),
        rebooted(&ballastd, image),
        rebooted_and_stopped(&ballastd, image),
        rebooted_without_its_kernel(&ballastd, image),
        powered_off(&ballastd, image)
    );

    // The name is free at once, and the new VM has nothing of the old one.
    for _ in 0..2 {
        client.run(&ballastd.guest(image, "forced", 96, "")).await.unwrap();
        client.stop("forced", Duration::ZERO).await.unwrap();
        assert!(ballastd.is_gone("forced").await);
        ballastd.assert_nothing_left("forced");
    }
    ballastd.checks_go_on(&mut console, 500).await;
    let vms = client.vms().await.unwrap();
    assert_eq!(vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["bystander"]);
    ballastd.assert_books_balance().await;
    let host = ballastd.host().await;
    assert!(host.measured_peak <= host.budget && host.peak_used <= host.budget, "{host:?}");
    assert!(witness.peak() <= host.budget, "{} of {}", witness.peak(), host.budget);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_waits_in_faults_is_stopped_all_the_same() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let client = &ballastd.client;
    for vm in ["a", "b"] {
        client.run(&ballastd.guest(image, vm, 128, TORTURE)).await.unwrap();
    }
    for vm in ["a", "b"] {
        ballastd.checks_go_on(&mut ballastd.console(vm), 1).await;
    }
    // Far below what they use: both are in faults nearly all the time.
    let little = HostChange { budget: Some(40 * MIB), ..HostChange::default() };
    client.change_host(&little).await.unwrap();
    ballastd
        .eventually("both wait for their pages", async || {
            let vms = client.vms().await.unwrap();
            vms.iter().all(|vm| vm.counters.swapped_in > MIB)
        })
        .await;
    let begin = Instant::now();
    client.stop("a", Duration::ZERO).await.unwrap();
    client.stop("b", Duration::from_millis(500)).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(60));
    for vm in ["a", "b"] {
        assert!(ballastd.is_gone(vm).await);
        ballastd.assert_nothing_left(vm);
    }
    let host = ballastd.host().await;
    assert_eq!((host.free, host.consumed, host.overhead), (host.budget - ZEROS, 0, ZEROS));
    wait("the kernel has it back", || {
        support::witness::ram_files(&ballastd.root).is_empty().then_some(())
    });
}
