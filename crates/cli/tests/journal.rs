//! `why --at`, `journal` and `plan`, on journals written here and through a stand-in for the manager.
#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]

mod common;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use ballast_journal::Moment;
use ballast_journal::recorder::{Bound, Recorder, Told};
use ballast_journal::segment::Header;
use ballast_journal::store::Folder;
use ballast_policy::{Snapshot, State, Thresholds, decide};
use ballast_units::{Pages, VmId};
use common::Fake;
use serde_json::{Value, json};

const MIB: u64 = 256;
/// 2026-03-01T12:00:00Z.
const NOON_MS: u64 = 1_772_366_400_000;

/// A host of 400 MiB with two VMs, a turn a second for ten minutes; in the second half of each
/// minute "db" gives way to "web".
fn journal(folder: &Path) {
    journal_of("alpha", folder);
}

fn journal_of(host: &str, folder: &Path) {
    let header = Header {
        ballast: "0.1.0".into(),
        host: host.into(),
        manager_ms: NOON_MS,
        ..Header::default()
    };
    let mut recorder = Recorder::new(Folder::new(folder), Bound::of(1 << 20), header);
    let mut state = State::High;
    for n in 1..=600u64 {
        let busy = n / 30 % 2 == 1;
        let vm = |id: u32, consumed: u64, active: u64| {
            json!({
                "demand": {"id": id, "shares": 2560, "min": 0, "max": 256 * MIB, "tax": 0.75,
                           "active": active * MIB},
                "consumed": consumed * MIB, "size": 256 * MIB, "balloon_goal": 0,
                "balloon_health": "healthy", "balloon_limit": 166 * MIB, "wants_more": false,
                "swap_free": 256 * MIB
            })
        };
        let late = n % 30 > 4;
        let vms = match (busy, late) {
            (false, _) => [vm(1, 150, 40), vm(2, 200, 20)],
            (true, false) => [vm(1, 193, 180), vm(2, 200, 20)],
            (true, true) => [vm(1, 193, 180), vm(2, 170, 20)],
        };
        let used: u64 = vms.iter().map(|vm| vm["consumed"].as_u64().unwrap()).sum();
        let snapshot: Snapshot = serde_json::from_value(json!({
            "trigger": "period", "before": state,
            "thresholds": Thresholds::default_for(Pages(400 * MIB)),
            "budget": 400 * MIB, "free": 400 * MIB - used, "overhead": 0, "vms": vms
        }))
        .unwrap();
        let decision = decide(snapshot);
        state = decision.state;
        let moment = Moment { n, at_ms: NOON_MS + n * 1000, up_ms: n * 1000, took_us: 12 };
        let names = vec![(VmId(1), "web".to_owned()), (VmId(2), "db".to_owned())];
        recorder.record(&Told { moment, decision: Arc::new(decision), names }).unwrap();
    }
    recorder.flush().unwrap();
}

fn ballast(socket: &Path, line: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ballast"))
        .args(line)
        .env("BALLAST_SOCKET", socket)
        .env("TZ", "UTC")
        .output()
        .unwrap()
}

fn said(socket: &Path, line: &[&str]) -> (Option<i32>, String, String) {
    let out = ballast(socket, line);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.code(), text(out.stdout), text(out.stderr))
}

fn good(line: &[&str]) -> String {
    let (code, stdout, stderr) = said("/nonexistent/api.sock".as_ref(), line);
    assert_eq!((code, &*stderr), (Some(0), ""), "{line:?}");
    stdout
}

fn contains_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
}

#[test]
fn why_at_a_time_is_read_from_files_where_no_manager_is() {
    let folder = tempfile::tempdir().unwrap();
    journal(&folder.path().join("journal"));
    let path = folder.path().join("journal").display().to_string();
    let text = good(&["why", "db", "--at", "2026-03-01T12:00:31.5Z", "--journal", &path]);
    contains_all(
        &text,
        &[
            "db is entitled to",
            "decided 2026-03-01 12:00:31.000",
            "  1. The host has",
            "what came of it:",
            "The host was back in state high",
            "db came from 200 MiB down to the",
        ],
    );
    // Without being told where: beside the socket.
    let socket = folder.path().join("api.sock");
    let (code, stdout, stderr) = said(&socket, &["why", "db", "--at", "2026-03-01T12:00:31.5Z"]);
    assert_eq!((code, &stdout), (Some(0), &text));
    assert!(stderr.starts_with("ballast: no ballastd answers; read from"), "{stderr}");
    let (code, stdout, stderr) = said(&socket, &["why", "web", "--json"]);
    assert_eq!((code, &*stderr), (Some(0), ""));
    let last: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(last["at_ms"], json!(NOON_MS + 600_000));

    for (line, wanted) in [
        (vec!["why", "db", "--at", "2026-03-01T11:00:00Z", "--journal", &path], "it begins"),
        (vec!["why", "nobody", "--journal", &path], "nobody had no part in what was decided then"),
        (vec!["why", "db", "--journal", "/nonexistent"], "/nonexistent: No such file"),
    ] {
        let (code, stdout, stderr) = said(&socket, &line);
        assert_eq!((code, &*stdout), (Some(1), ""), "{line:?}");
        assert!(stderr.contains(wanted) && stderr.lines().count() == 1, "{stderr}");
    }
    let (code, _, stderr) = said(&socket, &["why", "db", "--at", "noon"]);
    assert!(code == Some(2) && stderr.contains("'noon' is not a time"), "{stderr}");
}

#[test]
fn the_journal_lists_what_changed_and_replays_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    journal(folder.path());
    let path = folder.path().display().to_string();
    let text = good(&["journal", "--journal", &path, "--until", "2026-03-01T12:01:00Z"]);
    contains_all(
        &text,
        &[
            "2026-03-01 12:00:01.000  #1 period: state high, 50 MiB free of the 26 MiB to be kept, 2 VMs",
            "    the manager (version 0.1.0) begins",
            "#30 free memory moved from high to hard",
            "    the host goes from high to hard",
            "    db: 19 MiB are missing",
            "    => The host was back in state high",
        ],
    );
    let of_web = good(&["journal", "--journal", &path, "--vm", "web", "--limit", "3"]);
    assert!(!of_web.contains("db:") && of_web.contains("(older ones:"), "{of_web}");
    let all = ["journal", "--journal", &path, "--all", "--limit", "10000", "--json"];
    let page: Value = serde_json::from_str(&good(&all)).unwrap();
    let turns = page["turns"].as_array().unwrap();
    let counted: u64 = turns.iter().map(|t| 1 + t["repeats"].as_u64().unwrap()).sum();
    assert_eq!(counted, 600);

    let text = good(&["journal", "replay", &path]);
    contains_all(&text, &["600 turns replayed", "the same bit for bit; outcomes of 600 followed"]);
    // Someone changes a number in it: its check does not agree, and it is said.
    let file = folder.path().join("0000000001.journal");
    let bytes_before = std::fs::read(&file).unwrap();
    let mut bytes = bytes_before.clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let (code, stdout, stderr) = said("/none".as_ref(), &["journal", "replay", &path]);
    assert_eq!(code, Some(1), "what is lost cannot be vouched for");
    contains_all(&stdout, &["the same bit for bit", "damaged at byte", "0000000001.journal"]);
    contains_all(&stderr, &["a file of the journal could not be read"]);
    // Nor is an older decision told as if it were the last.
    let text = good(&["why", "db", "--journal", &path]);
    assert!(text.starts_with("not read: ") && text.contains("damaged at byte"), "{text}");
    // A manager that was killed leaves a record that is not whole, and one that writes has one.
    std::fs::write(&file, &bytes_before[..bytes_before.len() - 3]).unwrap();
    contains_all(&good(&["journal", "replay", &path]), &["not whole"]);
    let begun = folder.path().join("0000000009.journal");
    std::fs::write(&begun, &bytes_before[..20]).unwrap();
    contains_all(&good(&["journal", "replay", &path]), &["not whole", "ends within its header"]);
    std::fs::remove_file(&begun).unwrap();
    bytes[8] = 9;
    std::fs::write(&file, &bytes).unwrap();
    let (code, _, stderr) =
        said("/none".as_ref(), &["journal", "replay", &file.display().to_string()]);
    assert_eq!(code, Some(1));
    contains_all(&stderr, &["written by a newer Ballast (journal version 9"]);
    assert_eq!(std::fs::read(&file).unwrap(), bytes);
}

#[test]
fn through_the_manager_the_same_is_asked_of_the_api() {
    let fake = Fake::start();
    let (code, stdout, _) =
        said(&fake.socket, &["journal", "--vm", "web", "--limit", "7", "--all"]);
    assert_eq!(code, Some(0));
    contains_all(&stdout, &["#41 web arrived: state high", "    web arrives: target 90 MiB"]);
    let (_, stdout, _) = said(&fake.socket, &["why", "web", "--at", "2026-03-01T12:00:00Z"]);
    contains_all(&stdout, &["decided 2026-03-01 12:00:00.000", "what came of it:"]);
    let asked: Vec<String> = fake.recorded().into_iter().map(|(what, _)| what).collect();
    let query = "GET journal all=true&limit=7&vm=web".to_owned();
    assert_eq!(asked, [query, format!("GET why web at_ms={NOON_MS}")]);
}

#[test]
fn a_plan_is_of_each_host_once_and_of_a_span_that_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    journal(&a);
    journal_of("beta", &b);
    let [a, b] = [a, b].map(|p| p.display().to_string());
    // Its looks would count twice.
    let (code, _, stderr) = said("/none".as_ref(), &["plan", &a, &b, &a]);
    assert_eq!(code, Some(1));
    contains_all(&stderr, &[&format!("journals {a} and {a} "), "each host counts once"]);
    let late = ["plan", "--since=-1h", "--until=-2h", &a];
    let (code, _, stderr) = said("/none".as_ref(), &late);
    assert!(code == Some(2) && stderr.contains("--since is later"), "{stderr}");
}

#[test]
fn a_plan_is_made_of_journals() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    journal(&a);
    journal_of("beta", &b);
    let (csv, svg) = (folder.path().join("c.csv"), folder.path().join("c.svg"));
    let [a, b, csv, svg] = [a, b, csv, svg].map(|p| p.display().to_string());
    let text = good(&[
        "plan",
        "--risk",
        "40%",
        "--slot",
        "1s",
        "--confidence",
        "90%",
        "--csv",
        &csv,
        "--svg",
        &svg,
        &a,
        &b,
    ]);
    contains_all(
        &text,
        &[
            "alpha: 600 slices of 1 s with VMs in 10 min, 2.0 VMs of 256 MiB on 400 MiB",
            "no two VMs whose needs move",
            "overcommitted 1.28 times",
            "at a risk of 40%: overcommit",
            "all 2 hosts as one record",
            "VMs like these at 40%",
            "Assumed:",
        ],
    );
    let csv = std::fs::read_to_string(csv).unwrap();
    assert!(csv.starts_with("host,risk,factor,factor_low,factor_high\nalpha,0.0001,"), "{csv}");
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));

    // Half of the time VMs need 60 MiB, half of it 200: 512 MiB of VMs, 26 of 400 kept free.
    let json = good(&["plan", "--risk", "60%", "--slot", "1s", "--json", &a]);
    let plan: Value = serde_json::from_str(&json).unwrap();
    let factor = plan["hosts"][0]["curve"]["asked"]["factor"].as_f64().unwrap();
    assert!((factor - 512.0 * (1.0 - 26.0 / 400.0) / 60.0).abs() < 1e-9, "{factor}");
    let json = good(&["plan", "--risk", "1%", "--slot", "1s", "--json", &a]);
    let plan: Value = serde_json::from_str(&json).unwrap();
    let factor = plan["hosts"][0]["curve"]["asked"]["factor"].as_f64().unwrap();
    assert!((factor - 512.0 * (1.0 - 26.0 / 400.0) / 200.0).abs() < 1e-9, "{factor}");
    // Ten minutes of a slow wave are a handful of looks.
    assert_eq!(plan["hosts"][0]["curve"]["asked"]["low"], Value::Null);

    let none = folder.path().join("none");
    std::fs::create_dir(&none).unwrap();
    let (code, _, stderr) = said("/none".as_ref(), &["plan", &none.display().to_string()]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("no VM ran in the time that was asked for"), "{stderr}");
    let (code, _, stderr) = said("/none".as_ref(), &["plan", &a, "--svg", "/nonexistent/x.svg"]);
    assert!(code == Some(1) && stderr.contains("/nonexistent/x.svg: No such file"), "{stderr}");
    for bad in [["--risk", "0"], ["--risk", "101%"], ["--confidence", "20%"], ["--slot", "0"]] {
        let (code, ..) = said("/none".as_ref(), &["plan", &a, bad[0], bad[1]]);
        assert_eq!(code, Some(2), "{bad:?}");
    }
}

#[test]
fn a_journal_becomes_a_load_that_the_simulator_plays() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    journal(&folder.path().join("journal"));
    let (journal, csv) = (at("journal"), at("load.csv"));
    let text = good(&["journal", "trace", &journal, "--csv", &csv, "--every", "30s"]);
    contains_all(&text, &["load.csv: 40 lines of 2 VMs, 570 s"]);
    let lines = std::fs::read_to_string(&csv).unwrap();
    contains_all(
        &lines,
        &[
            "time,vm,active,consumed\n0,web,41943040,157286400\n0,db,20971520,209715200\n30,web,",
            "\n570,db,20971520,",
        ],
    );
    // Parts of it.
    let until = "2026-03-01T12:01:00Z";
    let part =
        good(&["journal", "trace", &journal, "--csv", &csv, "--every", "1s", "--until", until]);
    contains_all(&part, &["120 lines of 2 VMs, 59 s"]);

    let scenario = at("back.toml");
    let text = "name = \"back\"\nduration = \"5m\"\ntick = \"1s\"\n\n[host]\nmemory = \"400M\"\n\
                swap = \"1G\"\n\n[[vm]]\nname = \"web\"\nsize = \"256M\"\n\
                load = { kind = \"recorded\", file = \"load.csv\", vm = \"web\" }\n";
    std::fs::write(&scenario, text).unwrap();
    let played = good(&["--json", "sim", &scenario]);
    let played: Value = serde_json::from_str(&played).unwrap();
    assert_eq!(played.as_array().map(Vec::len), Some(1), "{played}");

    let (code, _, error) =
        said("/x".as_ref(), &["journal", "trace", &journal, "--csv", "/nonexistent/load.csv"]);
    assert_eq!(code, Some(1));
    contains_all(&error, &["/nonexistent/load.csv"]);
    let (code, _, error) = said("/x".as_ref(), &["journal", "trace", "/none", "--csv", &csv]);
    assert_eq!(code, Some(1));
    contains_all(&error, &["/none"]);

    // Where there is nothing to trace, the load of before stays.
    let before = std::fs::read_to_string(&csv).unwrap();
    let since = "2026-03-02T12:00:00Z";
    let line = ["journal", "trace", &journal, "--csv", &csv, "--since", since];
    let (code, stdout, error) = said("/x".as_ref(), &line);
    assert_eq!((code, &*stdout), (Some(1), ""), "{error}");
    contains_all(&error, &[&journal, "no VM ran in the time that was asked for"]);
    assert_eq!(std::fs::read_to_string(&csv).unwrap(), before);
}

/// Neither empty nor good: what could not be read is an error.
#[test]
fn a_journal_that_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    journal(folder.path());
    let files: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
    for file in &files {
        std::fs::write(file, [7; 4096]).unwrap();
    }
    let csv = folder.path().join("load.csv");
    for line in [
        &["journal", "--journal", path][..],
        &["journal", "replay", path],
        &["journal", "trace", path, "--csv", csv.to_str().unwrap()],
        &["plan", path],
    ] {
        let (code, stdout, stderr) = said("/nonexistent/api.sock".as_ref(), line);
        assert_eq!((code, &*stdout), (Some(1), ""), "{line:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{line:?}: {stderr}");
        contains_all(&stderr, &[files[0].to_str().unwrap(), "not a journal of Ballast"]);
    }
    for file in &files {
        std::fs::remove_file(file).unwrap();
    }
    // Nobody is told that all is as it was where nothing was compared.
    let (code, stdout, stderr) = said("/none".as_ref(), &["journal", "replay", path]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    contains_all(&stdout, &["no turns are recorded there"]);
    contains_all(&stderr, &[path, "no turns are recorded there"]);
    let line = ["journal", "trace", path, "--csv", csv.to_str().unwrap()];
    let (code, stdout, stderr) = said("/none".as_ref(), &line);
    assert_eq!((code, &*stdout, csv.exists()), (Some(1), "", false), "{stderr}");
    contains_all(&good(&["journal", "--journal", path]), &["nothing that was asked for"]);
}
