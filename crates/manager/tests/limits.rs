//! Parameters that change while VMs run, and a budget that holds throughout.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::path::PathBuf;
use std::time::Duration;

use ballast_api::{ErrorCode, HostChange, VmChange};
use support::http::refusal;
use support::witness::Witness;
use support::{Ballastd, MIB, image_or_skip, refused_as};

const BUDGET: u64 = 224;

fn some_shares() -> VmChange {
    VmChange { shares: Some(9), ..VmChange::default() }
}

/// Bad values change nothing, not even what is good beside them.
async fn bad_changes_are_refused_as_a_whole(ballastd: &Ballastd) {
    let client = &ballastd.client;
    let before = ballastd.vm("swap").await.params;
    for (change, code, part) in [
        (VmChange { shares: Some(0), ..some_shares() }, ErrorCode::BadRequest, "shares"),
        (VmChange { tax: Some(1.0), ..some_shares() }, ErrorCode::BadRequest, "tax"),
        (VmChange { max: Some(129 * MIB), ..some_shares() }, ErrorCode::BadRequest, "max"),
        (VmChange { max: Some(0), ..some_shares() }, ErrorCode::BadRequest, "max"),
        (VmChange { min: Some(u64::MAX), ..some_shares() }, ErrorCode::BadRequest, "min"),
        (VmChange { max: Some(8 * MIB), ..some_shares() }, ErrorCode::BadRequest, "min"),
        (VmChange { min: Some(0), ..some_shares() }, ErrorCode::Conflict, "swap"),
    ] {
        refused_as(client.change("swap", &change).await, code, part);
    }
    for body in [
        "{\"share\":1}",
        "{\"shares\":-1}",
        "{\"shares\":4294967296}",
        "[]",
        "{\"salt\":\"\"}",
        "{\"salt\":\"a\\nb\"}",
        "{\"salt\":\"a\",\"no_salt\":true}",
    ] {
        assert_eq!(refusal(client.socket(), "PATCH", "/v1/vms/swap", body).0, 400, "{body}");
    }
    // What cannot be written down for the next manager is not done.
    let in_the_way = ballastd.folder("swap").join("vm.json.new");
    std::fs::create_dir(&in_the_way).unwrap();
    refused_as(client.change("swap", &some_shares()).await, ErrorCode::Internal, "vm.json");
    std::fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(ballastd.vm("swap").await.params, before);
}

/// What a salt is goes in, and does not come out.
async fn a_salt_stays_secret(ballastd: &Ballastd) {
    let client = &ballastd.client;
    let blue = VmChange { salt: Some("team blue".try_into().unwrap()), ..VmChange::default() };
    let names = ["swap", "balloon"];
    // It is shown where it is, which is not at once where it is to be.
    let becomes = async |vm: &str, domain: &str| {
        let there = async || ballastd.vm(vm).await.sharing.domain.starts_with(domain);
        ballastd.eventually(&format!("{vm} is in {domain}"), there).await;
    };
    for vm in names {
        let changed = client.change(vm, &blue).await.unwrap();
        assert!(!serde_json::to_string(&changed).unwrap().contains("blue"));
        becomes(vm, "salt:").await;
    }
    let (one, two) = (ballastd.vm(names[0]).await, ballastd.vm(names[1]).await);
    assert_eq!(one.sharing.domain, two.sharing.domain);
    assert!(!serde_json::to_string(&[one, two]).unwrap().contains("blue"));
    let stores = std::fs::read_dir(ballastd.run_dir().join("store")).unwrap();
    let of_salt = |path: &PathBuf| path.to_string_lossy().contains("/salt-");
    let store = stores.map(|entry| entry.unwrap().path()).find(of_salt).unwrap();
    let none = VmChange { no_salt: true, ..VmChange::default() };
    for vm in names {
        client.change(vm, &none).await.unwrap();
        becomes(vm, "own").await;
    }

    // Where there is no place for it, it stays where it is, and says so, once; and goes on when there is one.
    ballastd.eventually("the store is gone", async || !store.exists()).await;
    std::fs::create_dir(&store).unwrap();
    client.change("swap", &blue).await.unwrap();
    let stays = async || {
        let sharing = ballastd.vm("swap").await.sharing;
        sharing.domain == "own" && sharing.note.is_some_and(|n| n.contains("what it shares stays"))
    };
    ballastd.eventually("it cannot go", stays).await;
    // For some turns of the policy.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert_eq!(log.matches("changing its salt").count(), 1, "{log}");
    std::fs::remove_dir(&store).unwrap();
    becomes("swap", "salt:").await;
    client.change("swap", &none).await.unwrap();
    becomes("swap", "own").await;
}

/// Taken back in the end.
async fn mins_are_promised_as_far_as_they_fit(ballastd: &Ballastd) {
    let client = &ballastd.client;
    // 120 and the other's 16 fit; 128 and 96 do not.
    let high = VmChange { min: Some(120 * MIB), ..VmChange::default() };
    client.change("balloon", &high).await.unwrap();
    let more = VmChange { min: Some(96 * MIB), ..some_shares() };
    refused_as(client.change("swap", &more).await, ErrorCode::NoRoom, "swap");
    let back = VmChange { min: Some(0), ..VmChange::default() };
    client.change("balloon", &back).await.unwrap();
}

/// A limit below what it has: the balloon brings one there, eviction the other. Lifted in the end.
async fn limits_are_reached(ballastd: &Ballastd) {
    let client = &ballastd.client;
    for (vm, limit) in [("balloon", 72), ("swap", 80)] {
        let change = VmChange { max: Some(limit * MIB), ..VmChange::default() };
        assert_eq!(client.change(vm, &change).await.unwrap().params.max, limit * MIB);
    }
    ballastd
        .eventually("both are within their limits", async || {
            let (a, b) = (ballastd.vm("balloon").await, ballastd.vm("swap").await);
            a.memory.consumed <= 72 * MIB && b.memory.consumed <= 80 * MIB
        })
        .await;
    let (a, b) = (ballastd.vm("balloon").await, ballastd.vm("swap").await);
    assert!(a.memory.ballooned > 0 && a.balloon.target > 0, "{:?} {:?}", a.memory, a.balloon);
    assert!(b.memory.swapped > 0 && b.balloon.target == 0, "{:?}", b.memory);
    decisions_are_explained(ballastd).await;
    for vm in ["balloon", "swap"] {
        let change = VmChange { max: Some(128 * MIB), ..VmChange::default() };
        client.change(vm, &change).await.unwrap();
    }
}

async fn decisions_are_explained(ballastd: &Ballastd) {
    let client = &ballastd.client;
    for vm in ["balloon", "swap"] {
        let why = client.why(vm).await.unwrap();
        assert_eq!(why.vm, vm);
        assert!(!why.steps.is_empty() && why.verdict.contains(vm), "{why:?}");
        assert!(why.age_s < 60.0 && !why.trigger.is_empty(), "{why:?}");
    }
    refused_as(client.why("nobody").await, ErrorCode::NotFound, "nobody");
}

async fn bad_budgets_change_nothing(ballastd: &Ballastd) {
    let client = &ballastd.client;
    for (budget, code) in [
        (0, ErrorCode::BadRequest),
        (u64::MAX, ErrorCode::BadRequest),
        (16 * MIB, ErrorCode::BadRequest),
    ] {
        let change = HostChange { budget: Some(budget), tax: Some(0.5), ..HostChange::default() };
        refused_as(client.change_host(&change).await, code, "budget");
    }
    let bad = HostChange { tax: Some(-1.0), budget: Some(300 * MIB), ..HostChange::default() };
    refused_as(client.change_host(&bad).await, ErrorCode::BadRequest, "tax");
    let guarantee = VmChange { min: Some(64 * MIB), ..VmChange::default() };
    client.change("swap", &guarantee).await.unwrap();
    let below = HostChange { budget: Some(64 * MIB), ..HostChange::default() };
    refused_as(client.change_host(&below).await, ErrorCode::NoRoom, "promised");
    let host = ballastd.host().await;
    assert_eq!((host.budget, host.tax), (BUDGET * MIB, 0.75));
}

/// Less for both: shares decide. And it is as much as before in the end.
async fn a_lower_budget_is_divided_by_shares(ballastd: &Ballastd) {
    let client = &ballastd.client;
    for (vm, shares) in [("balloon", 100), ("swap", 900)] {
        let change = VmChange { shares: Some(shares), tax: Some(0.0), ..VmChange::default() };
        client.change(vm, &change).await.unwrap();
    }
    bad_budgets_change_nothing(ballastd).await;

    let lower = HostChange { budget: Some(128 * MIB), ..HostChange::default() };
    assert_eq!(client.change_host(&lower).await.unwrap().budget, 128 * MIB);
    ballastd
        .eventually("they are within the lower budget", async || {
            let host = ballastd.host().await;
            host.measured_used <= 128 * MIB && host.free > 0
        })
        .await;
    ballastd
        .eventually("shares decide", async || {
            let (a, b) = (ballastd.vm("balloon").await, ballastd.vm("swap").await);
            b.memory.target > 2 * a.memory.target && b.memory.consumed > a.memory.consumed
        })
        .await;
    let higher = HostChange { budget: Some(BUDGET * MIB), tax: Some(0.5), ..HostChange::default() };
    let host = client.change_host(&higher).await.unwrap();
    assert_eq!((host.budget, host.tax), (BUDGET * MIB, 0.5));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_shares_and_budgets_are_carried_out() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start_without_sharing(&[
        "--budget",
        &format!("{BUDGET}M"),
        "--sample-period",
        "2",
    ]);
    let witness = Witness::watch(&ballastd.root, BUDGET * MIB);
    let client = &ballastd.client;
    let work = "verify-torture --mb 40 --threads 2 --seconds 100000";
    let with = ballastd.guest(image, "balloon", 128, "toucher --min-mb 8 --max-mb 16");
    let mut without = ballastd.guest(image, "swap", 128, work);
    without.no_balloon = true;
    without.min = 16 * MIB;
    for spec in [&with, &without] {
        client.run(spec).await.unwrap();
    }
    let mut consoles = ["balloon", "swap"].map(|name| ballastd.console(name));
    for console in &mut consoles {
        ballastd.checks_go_on(console, 1).await;
    }

    let before = [ballastd.vm("balloon").await.params, ballastd.vm("swap").await.params];
    bad_changes_are_refused_as_a_whole(&ballastd).await;
    a_salt_stays_secret(&ballastd).await;
    mins_are_promised_as_far_as_they_fit(&ballastd).await;
    let after = [ballastd.vm("balloon").await.params, ballastd.vm("swap").await.params];
    assert_eq!(before, after);
    limits_are_reached(&ballastd).await;
    a_lower_budget_is_divided_by_shares(&ballastd).await;
    for console in &mut consoles {
        ballastd.checks_go_on(console, 1000).await;
    }
    ballastd.assert_books_balance().await;
    let host = ballastd.host().await;
    assert!(host.measured_peak <= BUDGET * MIB && host.peak_used <= BUDGET * MIB, "{host:?}");
    assert!(witness.peak() <= BUDGET * MIB && witness.peak() > 100 * MIB, "{}", witness.peak());
}
