//! What policies other than the default read: miss curves from the sampler, and the pressure that a
//! guest's agent reports.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use ballast_api::{Accel, VmView};
use ballast_lab::guest::Guest;
use ballast_lab::image;
use ballast_units::Bytes;
use support::{Ballastd, MIB, cli, image_or_skip};

/// With a configuration of its own.
fn start(options: &[&str], config: &str) -> Ballastd {
    Ballastd::start_configured(options, &format!("[sharing]\nenabled = false\n{config}"))
}

/// `ballast vm show`, as people read it.
fn shown(ballastd: &Ballastd, vm: &str) -> String {
    let socket = ballastd.run_dir().join("api.sock");
    let output =
        Command::new(cli()).arg("--socket").arg(socket).args(["vm", "show", vm]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_under_memory_pressure_is_seen_to_be() {
    let Some(image) = image_or_skip() else { return };
    let disk = image::agent_disk(image).unwrap();
    let mut ballastd = start(
        &["--budget", "400M"],
        "[policy]\nkind = \"pressure\"\n[[vm]]\nname = \"tight\"\nguest_agent = true\n",
    );
    // Files that do not fit into its cache beside what it holds: it reads the same pages again and again.
    let guest = Guest::new("tight", Bytes::from_mib(128), &ballastd.root.join("console"))
        .run("agent")
        .run("hog --mb 40")
        .run("files --dir /disk --mb 96 --rate-mb 0")
        .shared_disk(disk);
    ballastd.client.run(&guest.spec(image, Accel::Tcg)).await.unwrap();
    let socket = ballastd.folder("tight").join("agent.sock");
    let before = ballastd.vm("tight").await.inputs;
    assert!(before.missing.is_some_and(|m| m.contains("policy pressure: its guest reports none")));
    assert!(shown(&ballastd, "tight").contains("policy pressure: its guest reports none"));
    let feels = |vm: &VmView| vm.inputs.pressure.is_some_and(|p| p.some > 0.0);
    ballastd
        .eventually("its pressure is reported", async || {
            let vm = ballastd.vm("tight").await;
            feels(&vm)
        })
        .await;
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = shown(&ballastd, "tight");
    assert!(text.contains("guest's pressure") && text.contains("% of 10 s"), "{text}");
    assert!(!text.contains("reports none"), "{text}");
    // The decision that knows of it may be the next one.
    ballastd
        .eventually("a decision counts it", async || {
            let why = ballastd.client.why("tight").await.unwrap();
            why.steps.iter().any(|s| s.contains("its guest waits for memory"))
        })
        .await;

    // The next manager finds the agent again.
    ballastd.kill();
    ballastd.restart();
    ballastd
        .eventually("its pressure is reported again", async || {
            ballastd.client.vm("tight").await.is_ok_and(|vm| feels(&vm))
        })
        .await;
    ballastd.client.stop("tight", std::time::Duration::ZERO).await.unwrap();
    ballastd.eventually("it is gone", async || ballastd.is_gone("tight").await).await;
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_agent_nothing_is_held_up_and_the_reason_is_shown() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = start(&["--budget", "400M"], "");
    let mut spec = ballastd.guest(image, "mute", 96, "idle --mb 16");
    spec.guest_agent = Some(true);
    ballastd.client.run(&spec).await.unwrap();
    ballastd.client.run(&ballastd.guest(image, "plain", 96, "idle --mb 16")).await.unwrap();
    ballastd
        .eventually("the reason is told", async || {
            let trouble = ballastd.vm("mute").await.inputs.agent_trouble;
            trouble.is_some_and(|t| t.contains("no guest agent answers"))
        })
        .await;
    assert!(shown(&ballastd, "mute").contains("none: no guest agent answers"));
    assert_eq!(ballastd.vm("plain").await.inputs.agent_trouble, None);
    assert!(!ballastd.folder("plain").join("agent.sock").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn under_miss_ratio_the_steeper_curve_gets_more() {
    let Some(image) = image_or_skip() else { return };
    // What the guests did as they started counts for little soon: they do it at length on a busy machine.
    // Less than what both use together: where both fit, neither needs to get more.
    let ballastd = start(
        &["--budget", "90M", "--sample-period", "3"],
        "[policy]\nkind = \"miss-ratio\"\n[sampling]\nslow_gain = 0.5\nfast_gain = 0.75\n",
    );
    let client = &ballastd.client;
    // The one reads its table many times as often, also on a machine where it cannot read as fast as it would.
    let load = |rate: u32| format!("reader --mb 48 --rate-mb {rate}");
    client.run(&ballastd.guest(image, "steep", 128, &load(96))).await.unwrap();
    let first = ballastd.vm("steep").await.inputs;
    assert_eq!(
        first.missing.as_deref(),
        Some(
            "policy miss-ratio: no curve (not sampled yet, it hardly runs, or may not be paged), gives it what idle-tax would"
        )
    );
    assert!(shown(&ballastd, "steep").contains("no curve (not sampled yet"));
    client.run(&ballastd.guest(image, "flat", 128, &load(4))).await.unwrap();
    let misses = |vm: &VmView| vm.inputs.misses_at(vm.active.estimate / 4).unwrap_or(0.0);
    let mut looks = 0u32;
    ballastd
        .eventually("the steeper one gets more", async || {
            let (steep, flat) = (ballastd.vm("steep").await, ballastd.vm("flat").await);
            looks += 1;
            if looks.is_multiple_of(100) {
                // What a failure is told by.
                for vm in [&steep, &flat] {
                    eprintln!(
                        "{}: target {} MiB, active {} MiB, misses {:.0}/s, {:?}",
                        vm.name,
                        vm.memory.target >> 20,
                        vm.active.estimate >> 20,
                        misses(vm),
                        vm.inputs.curve
                    );
                }
            }
            let curves = steep.inputs.missing.is_none() && flat.inputs.missing.is_none();
            curves
                && misses(&steep) > 1.5 * misses(&flat)
                && misses(&flat) > 0.0
                && steep.memory.target > flat.memory.target + 12 * MIB
        })
        .await;
    for name in ["steep", "flat"] {
        let vm = ballastd.vm(name).await;
        let curve = &vm.inputs.curve;
        eprintln!("{name}: target {} MiB, {curve:?}", vm.memory.target >> 20);
        assert!(
            curve
                .windows(2)
                .all(|p| { p[0].memory < p[1].memory && p[0].misses_per_s >= p[1].misses_per_s })
        );
        assert!(shown(&ballastd, name).contains("misses per second"));
        let why = client.why(name).await.unwrap();
        assert!(
            why.steps.iter().any(|s| s.contains("points of its miss curve")),
            "{:?}",
            why.steps
        );
    }
}
