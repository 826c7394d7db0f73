//! `sim`: a scenario is played without a manager; what is wrong with one is told in a line.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SHORT: &str = "name = \"two guests\"\nduration = \"2m\"\nhosts = 3\n[host]\nmemory = \"400M\"\n\
    [[vm]]\nname = \"busy\"\nsize = \"256M\"\nload = { kind = \"steady\", active = \"80%\" }\n\
    [[vm]]\nname = \"idle\"\nsize = \"256M\"\nload = { kind = \"idle\" }\n";

fn sim(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.arg("sim").args(arguments).output().unwrap()
}

fn scenario(dir: &Path, text: &str) -> String {
    let path = dir.join("scenario.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn policies_are_compared_and_their_files_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = scenario(dir.path(), SHORT);
    let out = dir.path().join("out");
    let to = out.to_str().unwrap();
    let run = sim(&[&path, "--out", to, "--policy", "idle-tax", "--policy", "pressure"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let table = text(&run.stdout);
    assert!(table.starts_with("two guests: 3 hosts for 0.03 h"), "{table}");
    for word in ["idle-tax", "pressure", "busy", "WORK", "STARVED"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    for policy in ["idle-tax", "pressure"] {
        let read = |name: &str| std::fs::read_to_string(out.join(policy).join(name)).unwrap();
        let summary: Value = serde_json::from_str(&read("summary.json")).unwrap();
        assert_eq!(summary["policy"], policy);
        assert_eq!(read("vms.csv").lines().count(), 1 + 3 * 2);
        assert!(read("series.csv").starts_with("time,vm,active,consumed,"));
        assert!(read("hosts.csv").lines().count() > 3);
        assert!(read("plot.svg").starts_with("<svg"));
    }
}

/// What was simulated can be played back as a recorded trace.
#[test]
fn a_series_is_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = scenario(dir.path(), SHORT);
    assert!(sim(&[&path, "--out", dir.path().to_str().unwrap()]).status.success());
    let text = SHORT.replace(
        "kind = \"steady\", active = \"80%\"",
        "kind = \"recorded\", file = \"series.csv\", vm = \"busy\"",
    );
    let path = scenario(dir.path(), &text);
    let run = sim(&[&path, "--seed", "9", "--hosts", "1"]);
    assert!(run.status.success(), "{}", self::text(&run.stderr));
}

#[test]
fn json_is_the_summaries() {
    let dir = tempfile::tempdir().unwrap();
    let path = scenario(dir.path(), SHORT);
    let run = sim(&["--json", &path, "--seed", "3", "--threads", "1"]);
    let summaries: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(summaries[0]["seed"], 3);
    assert_eq!(summaries[0]["host"]["hosts"], 3);
    assert_eq!(run.stderr, b"", "no progress beside JSON");
}

#[test]
fn of_vms_that_were_never_started_no_part_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let late =
        "[[vm]]\nname = \"late\"\nsize = \"256M\"\nstart = \"1h\"\nload = { kind = \"idle\" }\n";
    let run = sim(&[&scenario(dir.path(), &format!("{SHORT}{late}"))]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let row = |of: &str| {
        let lines = text(&run.stdout).lines();
        let mut rows = lines.map(|l| l.split_whitespace().collect::<Vec<_>>());
        rows.find(|words| words.get(1) == Some(&of)).unwrap()
    };
    // POLICY, VMS, COUNT, WORK, WORST, SLOW.
    assert_eq!(row("late")[2..6], ["0", "-", "-", "-"]);
    assert!(row("idle")[3..6].iter().all(|part| part.ends_with('%')), "{:?}", row("idle"));
}

#[test]
fn what_is_wrong_is_one_line_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = scenario(dir.path(), &SHORT.replace("80%", "180%"));
    let run = sim(&[&path]);
    assert_eq!(run.status.code(), Some(1));
    let error = text(&run.stderr);
    assert!(error.starts_with("ballast: scenario ") && error.contains("line 9: '180%'"), "{error}");
    assert_eq!(error.lines().count(), 1);
    let run = sim(&["--json", &path]);
    let error: Value = serde_json::from_slice(&run.stderr).unwrap();
    assert_eq!(error["error"]["code"], "scenario");
    let run = sim(&["nowhere.toml"]);
    assert_eq!(run.status.code(), Some(1));
    assert!(text(&run.stderr).contains("nowhere.toml"));
    let run = sim(&[&path, "--policy", "kind"]);
    assert_eq!(run.status.code(), Some(2));
    assert!(text(&run.stderr).contains("no policy 'kind'"), "{}", text(&run.stderr));
    let run = sim(&[&scenario(dir.path(), SHORT), "--out", "/proc/none"]);
    assert_eq!(run.status.code(), Some(1));
    assert!(text(&run.stderr).contains("/proc/none"));
}
