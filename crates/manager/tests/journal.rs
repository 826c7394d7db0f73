//! The journal of a manager on real guests: it replays bit for bit, outlives kill -9, answers for times
//! that are past, and stops nothing when it cannot be written.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use ballast_api::client::ClientError;
use ballast_api::{ErrorCode, JournalQuery, RunState, VmChange};
use ballast_journal::segment::SegmentError;
use ballast_journal::{Reader, Replayed, replay};
use ballast_policy::decide;
use support::http::refusal;
use support::{Ballastd, cli, image_or_skip, refused_as};

/// Replays all of it; a record that was being written when the manager was killed is no trouble.
fn replayed(folder: &Path) -> Replayed {
    let mut reader = Reader::open(folder).unwrap();
    let replayed = replay(&mut reader, decide).unwrap();
    for trouble in reader.troubles() {
        assert!(matches!(trouble.what, SegmentError::Torn { .. }), "{trouble}");
    }
    assert_eq!(replayed.differing, 0, "{:#?}", replayed.differences);
    replayed
}

fn offline(ballastd: &Ballastd, line: &[&str]) -> String {
    let mut command = Command::new(cli());
    command.arg("--socket").arg(ballastd.client.socket()).args(line);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// While no manager is there.
fn files_answer(ballastd: &Ballastd, folder: &Path) {
    let said = offline(ballastd, &["why", "web"]);
    assert!(said.contains("web is entitled to") && said.contains("decided 20"), "{said}");
    assert!(offline(ballastd, &["journal", "--vm", "db"]).contains("db: "));
    let said = offline(ballastd, &["journal", "replay", &folder.display().to_string()]);
    assert!(said.contains("the same bit for bit"), "{said}");
    let said = offline(ballastd, &["plan", "--slot", "1s", &folder.display().to_string()]);
    assert!(said.contains("VMs of 128 MiB on 176 MiB"), "{said}");
}

/// Returns when a turn was taken about VMs that share pages.
async fn decides_about_what_shares(ballastd: &Ballastd, all: &JournalQuery) {
    ballastd.eventually("pages are shared", async || ballastd.host().await.sharing.saved > 0).await;
    let turns = async || ballastd.client.journal(all).await.unwrap().turns;
    let at = turns().await.last().map_or(0, |turn| turn.at_ms);
    ballastd
        .eventually("a turn was taken since", async || {
            turns().await.iter().filter(|turn| turn.at_ms > at).count() > 1
        })
        .await;
}

/// What a VM that shares consumes is less than what it uses: the policy is told by how much.
fn tells_what_is_saved(folder: &Path) -> bool {
    let records = Reader::open(folder).unwrap();
    records
        .filter_map(|record| record.decision().ok())
        .any(|decision| decision.snapshot.vms.iter().any(|vm| !vm.saved.is_zero()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_on_guests_replays_bit_for_bit_and_outlives_its_manager() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "176M", "--sample-period", "2"]);
    let folder = ballastd.run_dir().join("journal");
    for name in ["web", "db"] {
        let work = "verify-torture --mb 40 --threads 1 --seconds 100000";
        ballastd.client.run(&ballastd.guest(image, name, 128, work)).await.unwrap();
    }
    for name in ["web", "db"] {
        ballastd.checks_go_on(&mut ballastd.console(name), 1).await;
    }
    let change = VmChange { shares: Some(77), ..VmChange::default() };
    ballastd.client.change("db", &change).await.unwrap();
    // Short of memory, and what was asked has come true at least once.
    let all = JournalQuery { limit: Some(10_000), all: true, ..JournalQuery::default() };
    ballastd
        .eventually("a shortage and its outcome are in the journal", async || {
            let page = ballastd.client.journal(&all).await.unwrap();
            let said =
                |part: &str| page.turns.iter().any(|t| t.changes.iter().any(|c| c.contains(part)));
            assert!(page.notes.is_empty(), "{:?}", page.notes);
            said("web arrives")
                && said("shares 1280 -> 77")
                && said("the host goes from high")
                && page.turns.iter().any(|t| !t.outcomes.is_empty())
        })
        .await;
    let page = ballastd.client.journal(&all).await.unwrap();
    let middle = page.turns[page.turns.len() / 2].at_ms;
    let why = ballastd.client.why_at("web", middle).await.unwrap();
    assert!(why.at_ms.is_some_and(|at| at <= middle), "{why:?}");
    assert!(why.verdict.starts_with("web is entitled to") && why.steps.len() > 3, "{why:?}");
    let of_nobody = ballastd.client.why_at("nobody", middle).await;
    refused_as(of_nobody, ErrorCode::NotFound, "nobody had no part in what was decided then");
    decides_about_what_shares(&ballastd, &all).await;
    let health = ballastd.host().await.journal;
    assert_eq!((health.enabled, health.lost, health.trouble), (true, 0, None));
    assert!(health.written > 0 && health.bytes < health.limit);

    // kill -9, at any moment.
    ballastd.kill();
    let first = replayed(&folder);
    assert!(tells_what_is_saved(&folder));
    assert!(first.turns >= 10 && first.missing == 0, "{first:?}");
    assert_eq!(first.followed, first.turns);
    for file in std::fs::read_dir(&folder).unwrap() {
        assert_eq!(file.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    files_answer(&ballastd, &folder);

    // The next manager goes on in it.
    ballastd.restart();
    ballastd
        .eventually("both are taken over, and decided about", async || {
            let vms = ballastd.client.vms().await.unwrap();
            vms.iter().filter(|vm| vm.state == RunState::Running).count() == 2
                && ballastd.client.why_at("db", u64::MAX).await.is_ok_and(|why| why.age_s < 1e6)
                && ballastd.host().await.journal.written > 3
        })
        .await;
    let _ = ballastd.client.journal(&all).await.unwrap();
    assert!(replayed(&folder).turns > first.turns);
    // What is in the run folder goes with it.
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_that_cannot_be_written_stops_itself_alone() {
    let mut ballastd = Ballastd::prepare(&["--budget", "256M"]);
    let (config, file) = (ballastd.root.join("ballast.toml"), ballastd.root.join("file"));
    std::fs::write(&file, "").unwrap();
    let folder = file.join("journal");
    std::fs::write(&config, format!("[journal]\nfolder = \"{}\"\n", folder.display())).unwrap();
    ballastd.add_option("--config", &config);
    ballastd.restart();
    ballastd
        .eventually("it is shown", async || {
            let journal = ballastd.host().await.journal;
            journal.lost > 1 && journal.trouble.is_some_and(|t| t.contains("Not a directory"))
        })
        .await;
    assert!(offline(&ballastd, &["host"]).contains("Not a directory"));
    if let Some(image) = image_or_skip() {
        ballastd.client.run(&ballastd.guest(image, "a", 96, "")).await.unwrap();
        // Decisions go on, of which none was kept.
        for _ in 0..2 {
            let asked = std::time::Instant::now();
            ballastd
                .eventually("it was decided since", async || {
                    let why = ballastd.client.why("a").await;
                    why.is_ok_and(|why| why.age_s < asked.elapsed().as_secs_f64())
                })
                .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_that_cannot_be_are_refused() {
    let mut ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let config = ballastd.root.join("ballast.toml");
    std::fs::write(&config, "[journal]\nenabled = false\n").unwrap();
    ballastd.restart();
    let socket = ballastd.client.socket().to_owned();
    for query in ["limit=0", "limit=10001", "limit=x", "since=1", "since_ms=-1", "all=maybe"] {
        let (status, said) = refusal(&socket, "GET", &format!("/v1/journal?{query}"), "");
        assert_eq!(status, 400, "{query}: {said}");
    }
    let (status, _) = refusal(&socket, "GET", "/v1/vms/a/why?at_ms=x", "");
    assert_eq!(status, 400);
    assert!(ballastd.term().success());
    ballastd.add_option("--config", &config);
    ballastd.restart();
    let none = ballastd.client.journal(&JournalQuery::default()).await;
    assert!(
        matches!(&none, Err(ClientError::Refused(e)) if e.message.contains("keeps no journal")),
        "{none:?}"
    );
    assert!(!ballastd.host().await.journal.enabled);
}
