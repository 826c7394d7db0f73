//! Resource pools and the configuration's rules for VMs: by command, by file, and reloaded.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ballast_api::client::Client;
use ballast_api::{ErrorCode, HostChange, PoolChange, VmChange, VmSpec};
use support::http::refusal;
use support::{Ballastd, MIB, cli, image_or_skip, refused, refused_as, signal};

/// A ballastd with a configuration file, and where that is.
fn configured(text: &str) -> (Ballastd, PathBuf) {
    let mut ballastd = Ballastd::prepare(&[]);
    let file = ballastd.root.join("ballast.toml");
    std::fs::write(&file, text).unwrap();
    ballastd.add_option("--config", &file);
    ballastd.restart();
    (ballastd, file)
}

const POOLS: &str = "budget = \"256M\"\n[sharing]\nenabled = false\n\
                     [pool.prod]\nmin = \"100M\"\n\
                     [pool.\"prod/db\"]\nmin = \"60M\"\nexpandable = false\ntax = 0.25\n";

/// All of a change is checked before any of it is applied.
async fn bad_changes_are_refused_as_a_whole(client: &Client) {
    let nothing = PoolChange::default();
    for (name, change, code, part) in [
        ("a b", nothing.clone(), ErrorCode::BadRequest, "name"),
        ("a/b", nothing.clone(), ErrorCode::NotFound, "no pool named 'a'"),
        (
            "test",
            PoolChange { shares: Some(0), ..nothing.clone() },
            ErrorCode::BadRequest,
            "shares",
        ),
        ("test", PoolChange { tax: Some(1.0), ..nothing.clone() }, ErrorCode::BadRequest, "tax"),
        (
            "test",
            PoolChange { min: Some(9 * MIB), max: Some(8 * MIB), ..nothing.clone() },
            ErrorCode::BadRequest,
            "max",
        ),
        (
            "test",
            PoolChange { min: Some(200 * MIB), ..nothing.clone() },
            ErrorCode::NoRoom,
            "free of promises",
        ),
        // db may not borrow: what it lacks, it lacks.
        (
            "prod",
            PoolChange {
                max: Some(100 * MIB),
                min: Some(90 * MIB),
                expandable: Some(false),
                ..nothing.clone()
            },
            ErrorCode::BadRequest,
            "",
        ),
    ] {
        if part.is_empty() {
            client.change_pool(name, &change).await.unwrap();
            continue;
        }
        refused_as(client.change_pool(name, &change).await, code, part);
    }
    let too_much = PoolChange { min: Some(80 * MIB), ..nothing.clone() };
    let why = refused(client.change_pool("prod/db", &too_much).await);
    assert!(why.message.contains("pool prod has"), "{why:?}");
    for body in ["[]", "{\"share\":1}", "{\"max\":1048576,\"no_max\":true}"] {
        assert_eq!(refusal(client.socket(), "PATCH", "/v1/pools/test", body).0, 400, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_are_defined_changed_and_removed_and_survive_the_manager() {
    let (mut ballastd, _) = configured(POOLS);
    let client = ballastd.client.clone();
    let names = |pools: Vec<ballast_api::PoolView>| {
        pools.into_iter().map(|p| p.name).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names(client.pools().await.unwrap()), "prod prod/db");
    let nothing = PoolChange::default();
    let test = client.change_pool("test", &nothing).await.unwrap();
    assert_eq!((test.shares, test.min, test.max, test.expandable), (163_840, 0, None, true));
    let change = PoolChange {
        min: Some(20 * MIB),
        max: Some(40 * MIB),
        shares: Some(7),
        tax: Some(0.5),
        ..nothing.clone()
    };
    let inner = client.change_pool("prod/web", &change).await.unwrap();
    assert_eq!((inner.min, inner.max, inner.tax), (20 * MIB, Some(40 * MIB), Some(0.5)));
    let pools = client.pools().await.unwrap();
    let prod = pools.iter().find(|p| p.name == "prod").unwrap();
    assert_eq!(prod.reserved, 80 * MIB);
    assert_eq!(prod.pools, ["prod/db", "prod/web"]);

    bad_changes_are_refused_as_a_whole(&client).await;

    // What was promised stays promised when the manager dies.
    ballastd.kill();
    ballastd.restart();
    assert_eq!(names(client.pools().await.unwrap()), "prod prod/db prod/web test");
    refused_as(client.remove_pool("none").await, ErrorCode::NotFound, "none");
    refused_as(client.remove_pool("prod/db").await, ErrorCode::Conflict, "configuration file");
    client.remove_pool("prod/web").await.unwrap();
    client.remove_pool("prod").await.unwrap();
    let pools = client.pools().await.unwrap();
    assert!(pools[0].expandable && pools[0].configured && !pools[2].configured, "{pools:?}");
    // And nothing is left in the end.
    assert!(ballastd.term().success() && !ballastd.run_dir().exists());
}

async fn bad_files_change_nothing(ballastd: &Ballastd, file: &Path) {
    let run_dir = ballastd.root.join("elsewhere");
    for (text, code, part) in [
        ("tax = 0.5\nbudget = \"2M\"\n".to_owned(), ErrorCode::BadRequest, "line 2: budget"),
        ("tax = 0.5\nbudgte = \"2M\"\n".to_owned(), ErrorCode::BadRequest, "line 2"),
        (format!("{POOLS}[pool.a]\nmin = \"200M\"\n"), ErrorCode::BadRequest, "do not fit"),
        (
            format!("shim = \"{}\"\n{POOLS}", file.display()),
            ErrorCode::Conflict,
            "shim cannot be changed while ballastd runs",
        ),
        (
            format!("socket = \"{}\"\n{POOLS}", run_dir.display()),
            ErrorCode::Conflict,
            "socket cannot be changed",
        ),
    ] {
        std::fs::write(file, &text).unwrap();
        refused_as(ballastd.client.reload().await, code, part);
        let host = ballastd.host().await;
        assert_eq!((host.budget, host.tax), (256 * MIB, 0.75), "{text}");
        assert_eq!(ballastd.client.pools().await.unwrap().len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_is_whole_or_nothing() {
    let (mut ballastd, file) = configured(POOLS);
    let client = &ballastd.client.clone();
    assert_eq!(client.reload().await.unwrap().changes, Vec::<String>::new());
    bad_files_change_nothing(&ballastd, &file).await;
    let fresh =
        "budget = \"200M\"\ntax = 0.5\n[sharing]\nenabled = false\n[pool.new]\nmin = \"10M\"\n";
    std::fs::write(&file, fresh).unwrap();
    let check = Command::new(cli()).args(["config", "check"]).arg(&file).output().unwrap();
    assert!(check.status.success(), "{check:?}");
    let told = client.reload().await.unwrap().changes.join("; ");
    for part in
        ["budget 256 MiB -> 200 MiB", "tax 0.75 -> 0.5", "pool new is new", "pool prod is gone"]
    {
        assert!(told.contains(part), "{part}: {told}");
    }
    let host = ballastd.host().await;
    assert_eq!((host.budget, host.tax), (200 * MIB, 0.5));

    // By signal too; and what a command said stays.
    let change = HostChange { tax: Some(0.1), ..HostChange::default() };
    client.change_host(&change).await.unwrap();
    std::fs::write(&file, fresh.replace("200M", "220M").replace("0.5", "0.6")).unwrap();
    signal(ballastd.pid(), rustix::process::Signal::HUP);
    ballastd
        .eventually("it was read again", async || ballastd.host().await.budget == 220 * MIB)
        .await;
    assert_eq!(ballastd.host().await.tax, 0.1);
    std::fs::write(&file, fresh.replace("200M", "220M").replace("0.5", "0.7")).unwrap();
    let told = client.reload().await.unwrap().changes;
    assert_eq!(told, ["tax 0.6 -> 0.7 in the file is overridden by command: 0.1"]);
    let change = HostChange { budget: Some(230 * MIB), no_tax: true, ..HostChange::default() };
    client.change_host(&change).await.unwrap();
    let host = ballastd.host().await;
    assert_eq!((host.budget, host.tax), (230 * MIB, 0.7));
    let both = HostChange { no_budget: true, ..change };
    refused_as(client.change_host(&both).await, ErrorCode::BadRequest, "either budget");
    // The next manager knows which was set, and takes that back as well.
    ballastd.kill();
    ballastd.restart();
    let change = HostChange { no_budget: true, ..HostChange::default() };
    let host = client.change_host(&change).await.unwrap();
    assert_eq!((host.budget, host.tax), (220 * MIB, 0.7));
    // A file that is wrong changes nothing, and ends nothing.
    std::fs::write(&file, "budget = \n").unwrap();
    signal(ballastd.pid(), rustix::process::Signal::HUP);
    ballastd.eventually("it is told", async || ballastd.last_words().contains("line 1")).await;
    assert_eq!(ballastd.host().await.budget, 220 * MIB);
    let check = Command::new(cli()).args(["config", "check"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&check.stderr);
    assert_eq!(check.status.code(), Some(1));
    assert!(said.starts_with("ballast: configuration") && said.contains("line 1"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_pool_of_which_a_command_said_something_the_file_says_the_rest() {
    let (mut ballastd, file) = configured(POOLS);
    let client = &ballastd.client.clone();
    let prod = async || client.pools().await.unwrap().swap_remove(0);
    let nothing = PoolChange::default();
    client.change_pool("prod", &PoolChange { shares: Some(9), ..nothing.clone() }).await.unwrap();
    let with = |min: &str| POOLS.replace("min = \"100M\"", &format!("shares = 5\nmin = \"{min}\""));
    std::fs::write(&file, with("90M")).unwrap();
    let told = client.reload().await.unwrap().changes;
    let overridden = "pool prod: shares in the file is overridden by command: 9";
    assert_eq!(told, ["pool prod: min", overridden]);
    ballastd.kill();
    ballastd.restart();
    let view = prod().await;
    assert_eq!((view.name.as_str(), view.shares, view.min), ("prod", 9, 90 * MIB));
    // What cannot be beside a command is refused, as what was commanded is.
    let limit = PoolChange { max: Some(95 * MIB), ..nothing.clone() };
    client.change_pool("prod", &limit).await.unwrap();
    std::fs::write(&file, with("100M")).unwrap();
    let part = "pool prod, with what commands said of it: max";
    refused_as(client.reload().await, ErrorCode::Conflict, part);
    client.remove_pool("prod").await.unwrap();
    let why = client.remove_pool("prod").await;
    refused_as(why, ErrorCode::Conflict, "defined in the configuration file");
    client.change_pool("prod", &nothing).await.unwrap();
    assert_eq!(client.reload().await.unwrap().changes, ["pool prod: min"]);
    let view = prod().await;
    assert_eq!((view.shares, view.min, view.max), (5, 100 * MIB, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_whose_parent_the_file_has_no_more_keeps_nothing_from_being_changed() {
    let (mut ballastd, file) = configured(POOLS);
    let client = &ballastd.client.clone();
    let nothing = PoolChange::default();
    client.change_pool("prod/web", &nothing).await.unwrap();
    // While a manager runs, it is kept.
    let bare = "budget = \"256M\"\n[sharing]\nenabled = false\n";
    std::fs::write(&file, bare).unwrap();
    let part = "pool prod cannot go: pool prod/web is in it";
    refused_as(client.reload().await, ErrorCode::Conflict, part);
    ballastd.kill();
    ballastd.restart();
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert!(log.contains("pool prod/web: there is no pool prod any more"), "{log}");
    let change = HostChange { tax: Some(0.1), ..HostChange::default() };
    client.change_host(&change).await.unwrap();
    client.change_pool("test", &nothing).await.unwrap();
    client.reload().await.unwrap();
    // It is in its pool again, or goes.
    client.change_pool("prod", &nothing).await.unwrap();
    assert_eq!(client.pools().await.unwrap()[0].pools, ["prod/web"]);
    refused_as(client.remove_pool("prod").await, ErrorCode::Conflict, part);
    client.remove_pool("prod/web").await.unwrap();
    client.remove_pool("prod").await.unwrap();
    assert_eq!(client.pools().await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_file_there_is_nothing_to_reload() {
    let ballastd = Ballastd::start(&["--budget", "64M"]);
    refused_as(ballastd.client.reload().await, ErrorCode::Conflict, "without --config");
}

const RULES: &str = "budget = \"256M\"\n[sharing]\nenabled = false\n[defaults]\nshares = 1000\n\
                     [[vm]]\nname = \"db*\"\npool = \"prod/db\"\nmin = \"25%\"\n\
                     [pool.prod]\ntax = 0.5\n\
                     [pool.\"prod/db\"]\nmin = \"70M\"\nexpandable = false\n";

/// In the decision's words too. The pool is gone afterwards, but for what the file says of it.
async fn a_limit_of_its_pool_holds(ballastd: &Ballastd) {
    let client = &ballastd.client;
    let limit = PoolChange { max: Some(48 * MIB), min: Some(40 * MIB), ..PoolChange::default() };
    client.change_pool("prod/db", &limit).await.unwrap();
    ballastd
        .eventually("a pool's limit holds", async || {
            let vm = ballastd.vm("db1").await;
            vm.memory.target <= 48 * MIB && vm.memory.consumed + vm.memory.overhead <= 48 * MIB
        })
        .await;
    let why = client.why("db1").await.unwrap();
    assert!(why.steps.iter().any(|s| s.starts_with("Pool prod/db gets")), "{why:?}");
    let pools = client.pools().await.unwrap();
    let inner = pools.iter().find(|p| p.name == "prod/db").unwrap();
    assert!(
        inner.vms == ["db1"] && inner.consumed <= 48 * MIB && inner.reserved > 32 * MIB,
        "{inner:?}"
    );
    client.remove_pool("prod/db").await.unwrap();
}

/// A reload reaches VMs that run, but not what was asked for, and is refused when a promise breaks.
async fn rules_are_reloaded(ballastd: &Ballastd, file: &Path) {
    let client = &ballastd.client;
    let fresh = RULES.replace("25%", "20%").replace("shares = 1000", "shares = 77");
    std::fs::write(file, &fresh).unwrap();
    let why = refused(client.reload().await);
    assert!(
        why.message.contains("VM db1: min: 25.6 MiB needs"),
        "less min needs more swap: {why:?}"
    );
    assert_eq!(ballastd.vm("db1").await.params.shares, 1000);
    std::fs::write(file, fresh.replace("20%", "60%")).unwrap();
    let why = refused(client.reload().await);
    assert!(
        why.message.contains("pool prod/db") && why.message.contains("nothing is changed"),
        "{why:?}"
    );
    std::fs::write(file, fresh.replace("20%", "30%")).unwrap();
    let told = client.reload().await.unwrap().changes.join("; ");
    assert!(told.contains("VM db1: shares 1000 -> 77, min 32 MiB -> 38.4 MiB"), "{told}");
    let (one, two) = (ballastd.vm("db1").await.params, ballastd.vm("db2").await.params);
    assert_eq!((one.shares, two.shares, two.min), (77, 77, 64 * MIB));
    assert_eq!(two.pool.as_deref(), Some("prod"));
    // A pool that the file put VMs in is renamed with them; one that a command put one in stays.
    let renamed = fresh.replace("20%", "30%").replace("prod/db", "prod/data");
    std::fs::write(file, &renamed).unwrap();
    let told = client.reload().await.unwrap().changes.join("; ");
    for part in ["pool prod/db is gone", "VM db1: pool prod/db -> prod/data"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let without = renamed.replace("prod/data", "data").replace("[pool.prod]\ntax = 0.5\n", "");
    std::fs::write(file, without.replace("[pool.\"data\"]", "[pool.data]")).unwrap();
    refused_as(client.reload().await, ErrorCode::NotFound, "VM db2: pool: no pool named 'prod'");
    assert_eq!(ballastd.vm("db1").await.params.pool.as_deref(), Some("prod/data"));
    std::fs::write(file, &renamed).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_get_what_their_pools_and_rules_say() {
    let Some(image) = image_or_skip() else { return };
    let (ballastd, file) = configured(RULES);
    let client = &ballastd.client;
    let db = client.run(&ballastd.guest(image, "db1", 128, "")).await.unwrap();
    assert_eq!((db.params.min, db.params.shares, db.params.tax), (32 * MIB, 1000, 0.5));
    assert_eq!(db.params.pool.as_deref(), Some("prod/db"));
    // Its pool has no 64 MiB left, although the host has.
    let second = VmSpec { min: 64 * MIB, ..ballastd.guest(image, "db2", 128, "") };
    let why = refused(client.run(&second).await);
    assert_eq!(why.code, ErrorCode::NoRoom);
    for part in
        ["db2: needs 6", "pool prod/db has 3", "left of its min of 70 MiB", "not expandable"]
    {
        assert!(why.message.contains(part), "{part}: {}", why.message);
    }
    let nowhere = VmSpec { pool: Some("none".into()), ..second.clone() };
    refused_as(client.run(&nowhere).await, ErrorCode::NotFound, "no pool named 'none'");
    ballastd.assert_nothing_left("db2");
    // What is said of it in so many words wins.
    let second = VmSpec { pool: Some("prod".into()), ..second };
    let db2 = client.run(&second).await.unwrap();
    assert_eq!((db2.params.pool.as_deref(), db2.params.min), (Some("prod"), 64 * MIB));
    let into = VmChange { pool: Some("prod/db".into()), ..VmChange::default() };
    refused_as(client.change("db2", &into).await, ErrorCode::NoRoom, "pool prod/db");
    refused_as(client.remove_pool("prod/db").await, ErrorCode::Conflict, "configuration");

    a_limit_of_its_pool_holds(&ballastd).await;
    rules_are_reloaded(&ballastd, &file).await;
    let (one, two) = (ballastd.vm("db1").await.params, ballastd.vm("db2").await.params);
    // The next manager knows it all.
    let mut ballastd = ballastd;
    ballastd.kill();
    ballastd.restart();
    let client = &ballastd.client.clone();
    ballastd
        .eventually("they are taken over", async || client.vms().await.unwrap().len() == 2)
        .await;
    assert_eq!(ballastd.vm("db2").await.params, two);
    assert_eq!(ballastd.vm("db1").await.params, one);
    // What its file says by now counts at once, as after a reload. A pool that is gone is none.
    let bare = "budget = \"256M\"\n[sharing]\nenabled = false\n[defaults]\nshares = 55\n\
                [[vm]]\nname = \"db*\"\nmin = \"40%\"\n";
    ballastd.kill();
    std::fs::write(&file, bare).unwrap();
    ballastd.restart();
    ballastd
        .eventually("they are taken over", async || client.vms().await.unwrap().len() == 2)
        .await;
    let (one, two) = (ballastd.vm("db1").await.params, ballastd.vm("db2").await.params);
    assert_eq!((one.shares, one.min / MIB, one.pool), (55, 51, None));
    assert_eq!((two.shares, two.min / MIB, two.pool), (55, 64, None));
    assert!(std::fs::read_to_string(ballastd.log()).unwrap().contains("pool prod, which it was"));
    assert_eq!(client.reload().await.unwrap().changes, Vec::<String>::new());
    for vm in ["db1", "db2"] {
        client.stop(vm, Duration::ZERO).await.unwrap();
    }
}
