//! The manager dies, again and again: guests continue where they were, and nothing is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ballast_api::{Mode, RunState, VmChange, VmView};
use ballast_units::SplitMix64;
use support::witness::Witness;
use support::{BALLOON_FIRST, Ballastd, MIB, ZEROS, image_or_skip, refused_as, signal};

/// At least, however slow the machine.
const KILLS: u32 = 5;
/// Starts that are cut short, at least.
const STARTS: u32 = 8;

/// How long guests are kept running while managers die: BALLAST_KILL_GUESTS_SECS, or a minute.
fn long_enough() -> Duration {
    let given = std::env::var("BALLAST_KILL_GUESTS_SECS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(given.unwrap_or(60))
}

fn seed() -> u64 {
    let given = std::env::var("BALLAST_TEST_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into()
    });
    eprintln!("seed: BALLAST_TEST_SEED={seed}");
    seed
}

async fn taken_over(ballastd: &Ballastd, vms: &[&str]) {
    ballastd
        .eventually("all are paged again", async || {
            let views = ballastd.client.vms().await.unwrap();
            let paged = |name: &&str| {
                views.iter().any(|vm| {
                    vm.name == **name
                        && vm.state == RunState::Running
                        && vm.management.mode == Mode::Paged
                })
            };
            vms.iter().all(paged)
        })
        .await;
}

/// While pages leave and come back; the next manager as well, if so, before it has taken over. How many it were.
async fn kill_in_the_midst(
    ballastd: &mut Ballastd,
    random: &mut SplitMix64,
    next_too: bool,
) -> u32 {
    ballastd
        .eventually("pages move both ways", async || {
            let host = ballastd.host().await.counters;
            host.swapped_out > 4 * MIB && host.swapped_in > MIB
        })
        .await;
    tokio::time::sleep(Duration::from_micros(random.below(400_000))).await;
    ballastd.kill();
    // At times the guests have run into their next fault, at times not yet.
    tokio::time::sleep(Duration::from_micros(random.below(600_000))).await;
    ballastd.restart();
    if !next_too {
        return 1;
    }
    tokio::time::sleep(Duration::from_micros(random.below(300_000))).await;
    ballastd.kill();
    ballastd.restart();
    2
}

/// Once, in whichever state it is.
fn every_page_is_counted(vm: &VmView) {
    let m = &vm.memory;
    let states = m.untouched + m.resident + m.shared + m.broken + m.compressed + m.filled;
    let all = states + m.staged + m.swapped + m.ballooned;
    assert!(all.abs_diff(vm.params.size) <= MIB, "{all}: {vm:?}");
    assert!(m.swapped <= m.swap_reserved && m.consumed <= vm.params.size, "{m:?}");
    assert!(vm.counters.swapped_in < 1 << 40 && vm.counters.ballooned < 1 << 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_survive_kills_in_the_midst_of_swapping() {
    let Some(image) = image_or_skip() else { return };
    let mut random = SplitMix64::seeded(seed());
    let mut ballastd = Ballastd::start_configured(&["--budget", "160M"], BALLOON_FIRST);
    let witness = Witness::watch(&ballastd.root, 160 * MIB);
    let workloads = [
        ("torture", "verify-torture --mb 56 --threads 3 --seconds 100000"),
        ("toucher", "toucher --min-mb 20 --max-mb 56 --period 8 --cycle 1"),
    ];
    for (name, workload) in workloads {
        let mut spec = ballastd.guest(image, name, 128, workload);
        spec.no_balloon = name == "torture";
        // A name that the kernel cuts in the midst of a letter.
        spec.extra = vec!["-name".into(), "x,process=0123456789abcdü".into()];
        // They boot the same system: pages of both are shared while they come and go.
        spec.salt = Some("the same".try_into().unwrap());
        ballastd.client.run(&spec).await.unwrap();
    }
    let names = workloads.map(|(name, _)| name);
    let mut consoles = names.map(|name| ballastd.console(name));
    let params = VmChange {
        shares: Some(4321),
        min: Some(24 * MIB),
        max: Some(126 * MIB),
        tax: Some(0.25),
        ..VmChange::default()
    };
    let changed = ballastd.client.change("torture", &params).await.unwrap().params;
    let pids = [ballastd.vm("torture").await.pid, ballastd.vm("toucher").await.pid];

    let begun = Instant::now();
    let (mut round, mut kills) = (0, 0);
    while round < KILLS || begun.elapsed() < long_enough() {
        kills += kill_in_the_midst(&mut ballastd, &mut random, round % 2 == 1).await;
        taken_over(&ballastd, &names).await;
        for console in &mut consoles {
            ballastd.checks_go_on(console, 2000).await;
        }
        let vm = ballastd.vm("torture").await;
        assert_eq!(vm.params, changed, "round {round}");
        assert_eq!([vm.pid, ballastd.vm("toucher").await.pid], pids);
        for vm in ballastd.client.vms().await.unwrap() {
            every_page_is_counted(&vm);
        }
        round += 1;
    }
    println!(
        "KILLED {kills} managers of real guests in {:.0} s; {} checks passed",
        begun.elapsed().as_secs_f64(),
        consoles.iter().map(|console| console.story.checks).sum::<u64>()
    );
    ballastd.assert_books_balance().await;
    for console in &mut consoles {
        ballastd.checks_go_on(console, 20_000).await;
    }
    assert!(witness.peak() <= 160 * MIB, "{} MiB", witness.peak() / MIB);
    let host = ballastd.host().await;
    assert!(host.peak_used <= host.budget && host.measured_peak <= host.budget, "{host:?}");
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
    assert!(ballast_lab::leftovers::processes(&ballastd.root).is_empty());
}

/// This manager does not start on it, and does not touch it. It is this one's own again afterwards.
fn a_newer_managers_record_is_left_alone(ballastd: &Ballastd, vm: &str) {
    let record = ballastd.folder(vm).join("vm.json");
    let ours = std::fs::read_to_string(&record).unwrap();
    let version = |n: u32| format!("\"version\":{n},");
    let known = ballast_api::record::RECORD_VERSION;
    let newer = ours.replacen(&version(known), &version(known + 1), 1);
    assert_ne!(ours, newer);
    std::fs::write(&record, &newer).unwrap();
    let output = ballastd.command().output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("newer manager"), "{errors}");
    assert_eq!(std::fs::read_to_string(&record).unwrap(), newer);
    std::fs::write(&record, &ours).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happened_without_a_manager_is_put_in_order() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    let work = "verify-torture --mb 16 --threads 2 --seconds 100000";
    for name in ["dies", "lives"] {
        ballastd.client.run(&ballastd.guest(image, name, 96, work)).await.unwrap();
    }
    let mut console = ballastd.console("lives");
    ballastd.checks_go_on(&mut console, 1).await;
    let dies = ballastd.vm("dies").await.pid.unwrap();

    // A clean end without --stop-vms-on-exit leaves them.
    refused_as(ballastd.client.shutdown(false).await, ballast_api::ErrorCode::Conflict, "stop_vms");
    assert!(ballastd.term().success());
    assert!(ballastd.swap_file("lives").exists() && ballastd.folder("lives").join("pmap").exists());
    signal(dies, rustix::process::Signal::KILL);
    support::wait("it is gone", || {
        (!std::path::Path::new(&format!("/proc/{dies}/fd/0")).exists()).then_some(())
    });

    a_newer_managers_record_is_left_alone(&ballastd, "lives");
    for vm in ["dies", "lives"] {
        assert!(ballastd.swap_file(vm).exists() && ballastd.folder(vm).join("pmap").exists());
    }

    // One that ends before it has taken over leaves them as well. The VMM is stopped, so that its
    // shim cannot come.
    let record = std::fs::read_to_string(ballastd.folder("lives").join("vm.json")).unwrap();
    let lives: u32 = serde_json::from_str::<serde_json::Value>(&record).unwrap()["pid"]
        .as_u64()
        .unwrap()
        .try_into()
        .unwrap();
    signal(lives, rustix::process::Signal::STOP);
    ballastd.restart();
    ballastd.eventually("what is gone is known", async || ballastd.is_gone("dies").await).await;
    ballastd.assert_nothing_left("dies");
    assert_eq!(ballastd.vm("lives").await.state, RunState::Paused);
    assert_eq!(ballastd.host().await.waiting, 1);
    // Its name and its promise are kept meanwhile.
    refused_as(
        ballastd.client.run(&ballastd.guest(image, "lives", 96, work)).await,
        ballast_api::ErrorCode::Conflict,
        "lives",
    );
    refused_as(ballastd.client.shutdown(false).await, ballast_api::ErrorCode::Conflict, "stop_vms");
    assert!(ballastd.term().success());
    assert!(ballastd.folder("lives").join("pmap").exists());
    signal(lives, rustix::process::Signal::CONT);

    ballastd.restart();
    taken_over(&ballastd, &["lives"]).await;
    ballastd.checks_go_on(&mut console, 1000).await;
    let vm = ballastd.vm("lives").await;
    assert_eq!(vm.pid, Some(lives));
    assert!(vm.vmm_uptime_s.unwrap() > vm.uptime_s + 1.0, "{vm:?}");
    ballastd.assert_books_balance().await;

    // With --stop-vms-on-exit, all is gone.
    assert!(ballastd.term().success());
    ballastd.add_flag("--stop-vms-on-exit");
    ballastd.restart();
    taken_over(&ballastd, &["lives"]).await;
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
    assert!(ballast_lab::leftovers::processes(&ballastd.root).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_a_takeover_can_be_stopped_or_end() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    for name in ["ends", "stopped"] {
        ballastd.client.run(&ballastd.guest(image, name, 96, "")).await.unwrap();
    }
    let mut pids = Vec::new();
    for vm in ["ends", "stopped"] {
        pids.push(ballastd.vm(vm).await.pid.unwrap());
    }
    ballastd.kill();
    for pid in &pids {
        signal(*pid, rustix::process::Signal::STOP);
    }
    ballastd.restart();
    let waiting = ballastd.client.vms().await.unwrap();
    let overhead: Vec<u64> = waiting.iter().map(|vm| vm.memory.overhead).collect();
    assert!(overhead.len() == 2 && overhead.iter().all(|of| *of > 0), "{overhead:?}");
    let booked = 256 * MIB - ballastd.host().await.free;
    assert!(booked >= ZEROS + overhead.iter().sum::<u64>(), "{booked} of {overhead:?}");
    signal(pids[0], rustix::process::Signal::KILL);
    ballastd
        .eventually("its files are cleared away", async || {
            !ballastd.swap_file("ends").exists() && !ballastd.folder("ends").join("pmap").exists()
        })
        .await;
    // The name is free again.
    ballastd
        .eventually("its name is free", async || {
            ballastd.client.run(&ballastd.guest(image, "ends", 96, "")).await.is_ok()
        })
        .await;
    ballastd.client.stop("stopped", Duration::ZERO).await.unwrap();
    ballastd.assert_nothing_left("stopped");
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
    assert!(ballast_lab::leftovers::processes(&ballastd.root).is_empty());
}

/// A manager that dies while it starts a VM: the VM is paged by the next one, or it never was.
#[tokio::test(flavor = "multi_thread")]
async fn starts_that_are_cut_short_are_begun_anew_or_gone() {
    let Some(image) = image_or_skip() else { return };
    let mut random = SplitMix64::seeded(seed());
    let mut ballastd = Ballastd::start(&["--budget", "192M"]);
    let (mut begun, mut never) = (0, 0);
    while begun + never < STARTS || begun == 0 || never == 0 {
        assert!(begun + never < 6 * STARTS, "{begun} begun, {never} never were");
        // As often in its first moments, before anything is there, as later.
        let most = 2_000_000 >> random.below(18);
        let (client, spec) = (ballastd.client.clone(), ballastd.guest(image, "vm", 96, ""));
        let start = tokio::spawn(async move { client.run(&spec).await });
        tokio::time::sleep(Duration::from_micros(random.below(most))).await;
        ballastd.kill();
        start.abort();
        ballastd.restart();
        ballastd
            .eventually("it is paged, or not there", async || {
                match ballastd.client.vm("vm").await {
                    Ok(vm) => vm.state == RunState::Running && vm.management.mode == Mode::Paged,
                    // Its VMM, if there is one, may have yet to come.
                    Err(_) => !ballast_lab::leftovers::processes(&ballastd.root)
                        .iter()
                        .any(|&pid| pid.unsigned_abs() != ballastd.pid()),
                }
            })
            .await;
        if ballastd.client.vm("vm").await.is_ok() {
            begun += 1;
            ballastd.client.stop("vm", Duration::ZERO).await.unwrap();
        } else {
            never += 1;
        }
        ballastd.assert_nothing_left("vm");
    }
    println!("{begun} begun, {never} never were");
    ballastd.assert_books_balance().await;
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}
