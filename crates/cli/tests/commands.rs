//! The real binary against a stand-in for the manager: every command, for people and as JSON, and
//! every way to fail.

#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]

mod common;

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::Fake;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn ballast(socket: &Path, line: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ballast"))
        .args(line)
        .env("BALLAST_SOCKET", socket)
        .output()
        .unwrap()
}

fn human(fake: &Fake, line: &[&str]) -> String {
    let out = ballast(&fake.socket, line);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert_eq!((out.status.code(), &*errors), (Some(0), ""), "{line:?}");
    String::from_utf8(out.stdout).unwrap()
}

fn as_json(fake: &Fake, line: &[&str]) -> Value {
    let line: Vec<&str> = line.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&human(fake, &line)).unwrap()
}

/// Both forms of the error of a line: exit code, code, message.
fn refused(socket: &Path, line: &[&str]) -> (i32, String, String) {
    let out = ballast(socket, line);
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.stdout, b"", "{line:?}");
    assert_eq!(text.trim_end().lines().count(), 1, "{line:?}: {text}");
    let message = text.trim_end().strip_prefix("ballast: ").unwrap().to_owned();
    let line: Vec<&str> = std::iter::once("--json").chain(line.iter().copied()).collect();
    let again = ballast(socket, &line);
    assert_eq!(again.status, out.status, "{line:?}");
    let body: Value = serde_json::from_slice(&again.stderr).unwrap();
    assert_eq!(body["error"]["message"], message, "{line:?}");
    let code = body["error"]["code"].as_str().unwrap().to_owned();
    (out.status.code().unwrap(), code, message)
}

fn contains_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
}

#[test]
fn an_error_that_cannot_be_written_has_its_exit_code_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let nobody_reads = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    for stderr in [nobody_reads, full] {
        for (line, code) in [(&["vm", "ls"][..], 3), (&["--json", "host"], 3), (&["vm", "set"], 2)]
        {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
            command.args(line).env("BALLAST_SOCKET", folder.path().join("none.sock"));
            let status = command.stderr(stderr()).status().unwrap();
            assert_eq!(status.code(), Some(code), "{line:?}");
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one command line, a word in each line")]
fn vm_run_sends_the_whole_spec_with_paths_the_manager_can_find() {
    let fake = Fake::start();
    let line = [
        "vm",
        "run",
        "new",
        "--max",
        "256M",
        "--min",
        "64M",
        "--shares",
        "5000",
        "--tax",
        "0.5",
        "--overhead",
        "8M",
        "--pool",
        "prod/db",
        "--wait",
        "2m",
        "--salt",
        "team blue",
        "--vcpus",
        "2",
        "--kernel",
        "boot/vmlinuz",
        "--initrd",
        "/i.cpio",
        "--append",
        "console=ttyS0 quiet",
        "--accel",
        "tcg",
        "--free-page-reporting",
        "--on-reboot",
        "restart",
        "--console",
        "c.log",
        "--qemu",
        "qemu-kvm",
        "--",
        "-drive",
        "file=x",
    ];
    let text = human(&fake, &line);
    contains_all(&text, &["new: running on tcg (pid 4711)", "/run/ballast/vms/new", "min 64 MiB"]);
    let here = std::env::current_dir().unwrap();
    let (what, spec) = fake.recorded().remove(0);
    assert_eq!(what, "POST vms");
    assert_eq!(
        spec,
        json!({
            "name": "new", "max": 256 * MIB, "min": 64 * MIB, "shares": 5000, "tax": 0.5,
            "overhead": 8 * MIB, "pool": "prod/db", "wait_s": 120.0, "salt": "team blue", "vcpus": 2, "kernel": here.join("boot/vmlinuz"),
            "initrd": "/i.cpio", "append": "console=ttyS0 quiet", "accel": "tcg",
            "no_balloon": false, "free_page_reporting": true, "large_pages": null, "on_reboot": "restart",
            "console": here.join("c.log"), "qemu": "qemu-kvm", "extra": ["-drive", "file=x"],
        })
    );
    let vm = as_json(&fake, &["vm", "run", "b", "--max", "16M", "--kernel", "k", "--no-balloon"]);
    assert_eq!((&vm["name"], &vm["params"]["max"]), (&json!("b"), &json!(16 * MIB)));
    assert_eq!(fake.recorded()[1].1["no_balloon"], json!(true));
    assert_eq!(fake.recorded()[1].1["shares"], Value::Null);
}

/// The manager answers when the VM runs, or does not: whoever has enough of that is told what becomes of it.
#[test]
fn a_start_that_is_not_waited_for_any_more_goes_on_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api.sock");
    let silent = UnixListener::bind(&socket).unwrap();
    for signal in ["INT", "TERM"] {
        let child = Command::new(env!("CARGO_BIN_EXE_ballast"))
            .args(["vm", "run", "db", "--max", "64M", "--kernel", "/k"])
            .env("BALLAST_SOCKET", &socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut open = Vec::new();
        let mut begins = [0; 4];
        while &begins != b"POST" {
            let (mut asked, _) = silent.accept().unwrap();
            asked.read_exact(&mut begins).unwrap();
            open.push(asked);
        }
        let pid = child.id().to_string();
        // The shell has one of its own: a minimal Debian has no program for it.
        let kill = format!("kill -s {signal} {pid}");
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        let out = child.wait_with_output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), &*out.stdout), (Some(3), &b""[..]), "{signal}: {text}");
        contains_all(&text, &["ballast: db: its start goes on", "ballast vm stop db"]);
    }
}

#[test]
fn vm_attach_says_how_far_the_vm_is_managed() {
    let fake = Fake::start();
    let text = human(&fake, &["vm", "attach", "old", "--qmp", "/run/q.sock", "--min", "32M"]);
    contains_all(&text, &["old: attached, unmanaged", "a second process maps its RAM"]);
    let (what, spec) = fake.recorded().remove(0);
    assert_eq!(what, "POST attachments");
    assert_eq!(spec["qmp"], "/run/q.sock");
    assert_eq!(spec["min"], json!(32 * MIB));
    let vm = as_json(&fake, &["vm", "attach", "other", "--qmp", "q"]);
    assert_eq!(vm["management"]["mode"], "unmanaged");
}

#[test]
fn vm_ls_lists_all_columns_and_the_reasons_below() {
    let fake = Fake::start();
    let text = human(&fake, &["vm", "ls"]);
    let heading: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(
        heading,
        [
            "NAME", "STATE", "MODE", "MAX", "MIN", "SHARES", "TARGET", "CONSUMED", "LARGE",
            "ACTIVE", "BALLOON", "SWAPPED", "SHARED", "SAVED"
        ]
    );
    contains_all(
        &text,
        &[
            "web     running  paged         256 MiB  64 MiB    2560  160 MiB   128 MiB  40 MiB  96 MiB",
            "32 MiB slow",
            "32 MiB unreachable",
            "legacy: balloon-only: private RAM: start it with share=on",
            "gpu: unmanaged: vfio-pci device gpu0 pins guest memory",
            "stray (pid 815): runs without Ballast with 80 MiB, refused 3m12s ago: a VM named 'stray' runs already",
            "a VMM (pid 816): runs without Ballast with 12 MiB, refused 3s ago: version 9 of the protocol",
        ],
    );
    let names: Vec<Value> = as_json(&fake, &["vm", "ls"])
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v["name"].clone())
        .collect();
    assert_eq!(names, ["web", "db", "legacy", "gpu"]);
    fake.world().vms.clear();
    contains_all(&human(&fake, &["vm", "ls"]), &["no VMs", "stray (pid 815)"]);
    assert_eq!(as_json(&fake, &["vm", "ls"]), json!([]));
    fake.world().host.refused.clear();
    assert!(!human(&fake, &["vm", "ls"]).contains("without Ballast"));
}

#[test]
fn vm_show_has_all_sections() {
    let fake = Fake::start();
    let text = human(&fake, &["vm", "show", "legacy"]);
    contains_all(
        &text,
        &[
            "legacy\n",
            "not paged",
            "parameters\n",
            "memory\n",
            "in large pages     40 MiB (15.6%)",
            "swapped            64 MiB (25.0%)",
            "active memory\n",
            "balloon\n",
            "guest statistics\n",
            "major faults  321",
            "up           2h05m\n",
            "managed for  1m40s, by this ballastd\n",
            "totals since this ballastd has it\n",
            "waits for memory     0\n",
            "faults waited        0.0 s, for memory or anything else but swap\n",
            "CPU time of its VMM  2.5 s since the VMM's start\n",
            "page sharing\n  none, since it is not paged\n",
        ],
    );
    let paged = human(&fake, &["vm", "show", "web"]);
    contains_all(
        &paged,
        &[
            "domain               own",
            "shared               48 MiB (18.8%)",
            "saved                40 MiB (15.6%)",
            "zero pages dropped   8 MiB",
            "breaks               321 (6/s)",
            "pages scanned        32768 (5.2 MB/s)",
            "CPU time             2.5 s (0.5% of a core now)",
            "held back            mappings: only runs are shared",
        ],
    );
    assert_eq!(as_json(&fake, &["vm", "show", "web"])["memory"]["swapped"], json!(64 * MIB));
}

#[test]
fn what_was_not_sampled_is_not_told_as_active() {
    let fake = Fake::start();
    fake.world().vms[2].active.periods = 0;
    let text = human(&fake, &["vm", "show", "legacy"]);
    let missing = ["estimate      -\n", "slow average  -\n", "fast average  -\n"];
    contains_all(&text, &missing);
    contains_all(&text, &["current       -\n", "periods       0\n"]);
}

#[test]
fn vm_set_sends_only_what_was_named() {
    let fake = Fake::start();
    let text = human(&fake, &["vm", "set", "web", "--shares", "5000", "--max", "192M"]);
    contains_all(&text, &["web: max 192 MiB, min 64 MiB, 5000 shares, tax 0.75"]);
    let vm = as_json(&fake, &["vm", "set", "db", "--min", "0", "--tax", "0"]);
    assert_eq!((&vm["params"]["min"], &vm["params"]["tax"]), (&json!(0), &json!(0.0)));
    let expected = [
        ("PATCH web".to_owned(), json!({"shares": 5000, "max": 192 * MIB})),
        ("PATCH db".to_owned(), json!({"min": 0, "tax": 0.0})),
    ];
    assert_eq!(fake.recorded(), expected);
}

#[test]
fn salts_come_from_the_line_or_a_file_and_go_on_request() {
    let fake = Fake::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("salt");
    let file = path.to_str().unwrap();
    let text = human(&fake, &["vm", "set", "web", "--salt", "team blue"]);
    contains_all(&text, &["web: shares pages in salt:1a2b3c4d"]);
    std::fs::write(&path, "team red\n").unwrap();
    human(&fake, &["vm", "set", "web", "--salt-file", file]);
    let text = human(&fake, &["vm", "set", "web", "--no-salt"]);
    assert!(!text.contains("shares pages"), "{text}");
    std::fs::write(&path, "x".repeat(256) + "\r\n").unwrap();
    human(&fake, &["vm", "run", "new", "--max", "64M", "--kernel", "k", "--salt-file", file]);
    let mut sent = fake.recorded();
    assert_eq!(sent.remove(3).1["salt"], "x".repeat(256));
    let expected =
        [json!({"salt": "team blue"}), json!({"salt": "team red"}), json!({"no_salt": true})];
    assert_eq!(sent.into_iter().map(|(_, body)| body).collect::<Vec<_>>(), expected);

    let away = Path::new("/nonexistent/api.sock");
    for (line, expected) in [
        (vec!["--salt", ""], "1 to 256 bytes"),
        (vec!["--salt", "a\tb"], "control characters"),
        (vec!["--salt", "a", "--no-salt"], "cannot be used with"),
        (vec!["--salt", "a", "--salt-file", file], "cannot be used with"),
        (vec!["--salt-file", file, "--no-salt"], "cannot be used with"),
        (vec!["--salt-file", "/nonexistent"], "--salt-file /nonexistent: No such file"),
    ] {
        let (exit, _, message) = refused(away, &[&["vm", "set", "web"][..], &line].concat());
        assert_eq!(exit, 2, "{message}");
        assert!(message.contains(expected), "{line:?}: {message}");
    }
    for bad in ["", "\n", "two\nlines\n", &("x".repeat(257) + "\n"), &"x".repeat(1 << 20)] {
        std::fs::write(&path, bad).unwrap();
        let (exit, _, message) = refused(away, &["vm", "set", "web", "--salt-file", file]);
        assert_eq!(exit, 2);
        contains_all(&message, &["--salt-file", file, "1 to 256 bytes"]);
    }
}

#[test]
fn share_ls_shows_the_host_the_vms_and_what_holds_them_back() {
    let fake = Fake::start();
    let text = human(&fake, &["share", "ls"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "sharing on  shared 96 MiB  common 16 MiB  saved 80 MiB  zero 40 MiB  breaks 12/s  \
         scan 10 MB/s  cost 1.2%"
    );
    let words: Vec<&str> = lines[2].split_whitespace().collect();
    let expected = "web own 48 MiB 40 MiB 8 MiB 1 MiB 6/s 5.2 MB/s 0.5%";
    assert_eq!(words.join(" "), expected);
    contains_all(&text, &["DOMAIN", "BRK/S", "COST", "db: mappings: only runs are shared"]);
    // It is not paged.
    assert!(!text.contains("gpu"), "{text}");
    let json = as_json(&fake, &["share", "ls"]);
    assert_eq!(json["host"]["sharing"]["saved"], json!(80 * MIB));
    assert_eq!(json["vms"][0]["sharing"]["domain"], "own");
    fake.world().vms.clear();
    contains_all(&human(&fake, &["share", "ls"]), &["no VMs whose pages could be shared"]);
    contains_all(&human(&fake, &["share", "estimate"]), &["no VMs (name processes by"]);
    assert_eq!(as_json(&fake, &["share", "estimate"])["processes"], json!([]));
}

#[test]
fn pools_are_listed_shown_set_and_removed() {
    let fake = Fake::start();
    let text = human(&fake, &["pool", "ls"]);
    contains_all(
        &text,
        &["NAME", "RESERVED", "UNRESERVED", "prod/db", "163840", "512 MiB", "442 MiB"],
    );
    contains_all(&text, &["none", "its parent's"]);
    assert_eq!(as_json(&fake, &["pool", "ls"])[1]["name"], "prod/db");
    let text = human(&fake, &["pool", "show", "prod/db"]);
    contains_all(
        &text,
        &["pool prod/db", "expandable", "reserved for its VMs", "web", "by command"],
    );
    let (exit, code, message) = refused(&fake.socket, &["pool", "show", "none"]);
    assert_eq!((exit, &*code, &*message), (1, "not_found", "no pool named 'none'"));
    let line = ["pool", "set", "prod/web", "--shares", "7", "--max", "1G", "--expandable", "false"];
    contains_all(&human(&fake, &line), &["pool prod/web", "1 GiB"]);
    let (what, change) = fake.recorded().remove(0);
    assert_eq!(what, "PATCH pool prod/web");
    assert_eq!(change, json!({"shares": 7, "max": 1024 * MIB, "expandable": false}));
    assert_eq!(human(&fake, &["pool", "rm", "prod/web"]), "prod/web: removed\n");
    let (exit, code, message) = refused(&fake.socket, &["pool", "rm", "prod"]);
    assert_eq!((exit, &*code), (1, "conflict"));
    assert!(message.contains("prod/db is in it"), "{message}");
    human(&fake, &["vm", "set", "web", "--pool", "prod/db"]);
    human(&fake, &["vm", "set", "web", "--no-pool"]);
    assert_eq!(fake.recorded()[1].1, json!({"pool": "prod/db"}));
    assert_eq!(fake.recorded()[2].1, json!({"no_pool": true}));
    for line in [
        &["pool", "set", "a"][..],
        &["pool", "set", "a//b", "--shares", "1"],
        &["pool", "set", "a", "--min", "2G", "--max", "1G"],
        &["pool", "set", "a", "--max", "1G", "--no-max"],
        &["vm", "set", "web", "--pool", "a", "--no-pool"],
    ] {
        assert_eq!(refused(&fake.socket, line).0, 2, "{line:?}");
    }
}

#[test]
fn a_reload_says_what_is_different() {
    let fake = Fake::start();
    let text = human(&fake, &["config", "reload"]);
    assert_eq!(
        text,
        "/etc/ballast.toml: read again; what is different:\n  tax 0.75 -> 0.5\n  VM web: shares 10 -> 20\n"
    );
    assert_eq!(as_json(&fake, &["config", "reload"])["changes"][0], "tax 0.75 -> 0.5");
}

#[test]
fn vm_stop_passes_its_grace() {
    let fake = Fake::start();
    contains_all(&human(&fake, &["vm", "stop", "web"]), &["web: stopped after 2h05m; ", "128 MiB"]);
    human(&fake, &["vm", "stop", "db", "--force"]);
    let last = as_json(&fake, &["vm", "stop", "gpu", "--grace", "1500ms"]);
    assert_eq!(last["name"], "gpu");
    let graces: Vec<Value> = fake.recorded().iter().map(|r| r.1["grace_s"].clone()).collect();
    assert_eq!(graces, [30.0, 0.0, 1.5]);
}

#[test]
fn a_vm_that_stands_still_says_so_in_the_list() {
    let fake = Fake::start();
    let why = "a fault waits for 7 s: its swap does not answer";
    let name = {
        let mut world = fake.world();
        world.vms[0].stalled = true;
        world.vms[0].trouble = Some(why.to_owned());
        world.vms[0].name.clone()
    };
    contains_all(&human(&fake, &["vm", "ls"]), &[&format!("{name}: stands still: {why}")]);
}

#[test]
fn a_vm_that_waits_for_unreadable_pages_says_so() {
    let fake = Fake::start();
    let why = "1 page that it waits for cannot be read: ppn 0x64: slot 3 of /ssd/a.swap ends";
    {
        let mut world = fake.world();
        world.vms[0].state = ballast_api::RunState::Unreadable;
        world.vms[0].trouble = Some(why.to_owned());
    }
    let name = fake.world().vms[0].name.clone();
    let text = human(&fake, &["vm", "ls"]);
    contains_all(&text, &[&format!("{name}: unreadable: {why}")]);
    contains_all(&human(&fake, &["vm", "show", &name]), &["unreadable", why]);
}

#[test]
fn host_shows_states_and_thresholds_and_sets_parameters() {
    let fake = Fake::start();
    let text = human(&fake, &["host"]);
    contains_all(
        &text,
        &[
            "state soft: ballooning\n",
            "last VM taken in runs on  tcg (no stock kernel boots on this /dev/kvm)\n",
            "of 448 MiB free",
            "overcommitted 2.00 times",
            "saved                 80 MiB (17.9%)",
            "share tables          1 MiB",
            "CPU time              4.5 s (1.2% of a core now)",
            "BEGINS BELOW",
            "26.9 MiB",
            "<- now",
        ],
    );
    for state in ["high", "soft", "hard", "low"] {
        assert!(text.contains(&format!("\n  {state} ")), "{state}:\n{text}");
    }
    let location = |path: &str| text.lines().find(|l| l.contains(path)).unwrap();
    contains_all(location("/ssd/ballast"), &["10", "384 MiB", "40 MiB", "77", "failed"]);
    contains_all(location("/disk/ballast"), &["-2", "128 MiB", "4 GiB", "good"]);
    contains_all(
        &text,
        &["\nrun folder\n", "1000 MiB", "99 MiB (9.9%)", "less than a tenth is free"],
    );
    fake.world().host.run_dir.as_mut().unwrap().note = None;
    assert!(!human(&fake, &["host"]).contains("less than a tenth"));
    let node = text.lines().find(|l| l.starts_with("  0 ")).unwrap();
    contains_all(node, &["16 GiB", "200 MiB", "soft", "24 MiB", " 3"]);
    let refused = |pid: &str| text.lines().find(|l| l.contains(pid)).unwrap();
    contains_all(refused(" 815 "), &["  stray", "96 MiB", "80 MiB", "3m12s", "runs already"]);
    contains_all(refused(" 816 "), &["  - ", "12 MiB", "3s", "version 9"]);
    // 4% of 448 MiB, 6% of it.
    let soft = text.lines().find(|l| l.starts_with("  soft ")).unwrap();
    contains_all(soft, &["17.9 MiB", "26.9 MiB", "ballooning"]);
    assert_eq!(as_json(&fake, &["host"])["budget"], json!(448 * MIB));
    let text = human(&fake, &["host", "set", "--tax", "0.5", "--budget", "1G"]);
    contains_all(&text, &["budget 1 GiB", "tax 0.5"]);
    assert_eq!(as_json(&fake, &["host", "set", "--tax", "0"])["tax"], json!(0.0));
    human(&fake, &["host", "set", "--no-tax", "--no-budget"]);
    let expected = [
        json!({"tax": 0.5, "budget": 1024 * MIB}),
        json!({"tax": 0.0}),
        json!({"no_tax": true, "no_budget": true}),
    ];
    assert_eq!(fake.recorded().into_iter().map(|r| r.1).collect::<Vec<_>>(), expected);
}

#[test]
fn why_prints_the_verdict_the_cause_and_the_steps_in_order() {
    let fake = Fake::start();
    let text = human(&fake, &["why", "web"]);
    contains_all(
        &text,
        &["web is to have 160 MiB", "decided 3s ago, because: free memory fell to soft"],
    );
    let steps: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(steps.len(), 30);
    assert!(steps[0].starts_with("  1. step 1:") && steps[29].starts_with(" 30. step 30:"));
    assert_eq!(as_json(&fake, &["why", "db"])["vm"], "db");
}

#[test]
fn top_without_a_terminal_prints_tables_or_lines_of_json() {
    let fake = Fake::start();
    let text = human(&fake, &["top", "--once"]);
    contains_all(
        &text,
        &["state ", "of 448 MiB", "NAME", "web", "gpu: unmanaged", "saved 80 MiB  zero 40 MiB"],
    );
    let seen = as_json(&fake, &["top", "--once"]);
    assert_eq!(seen["host"]["vms"], json!(4));
    assert_eq!(seen["vms"][3]["name"], "gpu");
}

#[test]
fn top_without_a_terminal_goes_on_when_the_manager_was_away() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api.sock");
    let fake = Fake::at(&socket);
    let mut top = Command::new(env!("CARGO_BIN_EXE_ballast"))
        .args(["top", "--interval", "100ms"])
        .env("BALLAST_SOCKET", &socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut tables = BufReader::new(top.stdout.take().unwrap()).lines();
    let mut errors = BufReader::new(top.stderr.take().unwrap()).lines();
    let mut table = || tables.by_ref().map(|l| l.unwrap()).find(|l| l.starts_with("up ")).unwrap();
    table();
    assert!(!table().contains("- MB/s"), "the second table has rates");
    drop(fake);
    let message = errors.next().unwrap().unwrap();
    assert!(message.starts_with("ballast: ballastd is away, retrying: "), "{message}");
    let back = Fake::at(&socket);
    // Ticks of the first manager are at most 200: this line comes from the second.
    back.world().host.uptime_s = 90_000.0;
    while !table().starts_with("up 1d01h") {}
    top.kill().unwrap();
    top.wait().unwrap();
}

#[test]
fn completions_name_the_commands() {
    let out = ballast(Path::new("/nonexistent"), &["completions", "bash"]);
    assert_eq!(out.status.code(), Some(0));
    contains_all(&String::from_utf8(out.stdout).unwrap(), &["ballast", "attach", "--free-page"]);
}

#[test]
fn help_has_examples_and_units_and_needs_no_manager() {
    for line in [&["--help"][..], &["vm", "run", "--help"], &["vm", "set", "--help"]] {
        let out = ballast(Path::new("/nonexistent"), line);
        assert_eq!(out.status.code(), Some(0), "{line:?}");
        contains_all(&String::from_utf8(out.stdout).unwrap(), &["Example", "256M"][..1]);
    }
    assert_eq!(ballast(Path::new("/nonexistent"), &[]).status.code(), Some(2));
}

#[test]
fn wrong_usage_is_refused_before_the_manager_is_asked() {
    let run = |rest: &[&'static str]| [&["vm", "run", "a", "--kernel", "k"][..], rest].concat();
    for (line, expected) in [
        (run(&["--max", "12Q"]), "'12Q' is not a size"),
        (vec!["journal", "--since", "-1h", "--until", "-2h"], "--since is later than"),
        (run(&["--max", "99999999T"]), "larger than this machine can count"),
        (run(&["--max", "17M"]), "multiple of 2 MiB"),
        (run(&["--max", "8M"]), "at least 16 MiB"),
        (run(&["--max", "64M", "--hotplug", "3M"]), "multiple of 2 MiB"),
        (run(&["--max", "64M", "--min", "65M"]), "--min 65 MiB is above --max 64 MiB"),
        (run(&["--max", "64M", "--tax", "1"]), "at least 0 and below 1"),
        (run(&["--max", "64M", "--tax", "-0.5"]), "at least 0 and below 1"),
        (run(&["--max", "64M", "--tax", "NaN"]), "at least 0 and below 1"),
        (run(&["--max", "64M", "--shares", "0"]), "at least 1 share"),
        (run(&["--max", "64M", "--accel", "xen"]), "possible values: auto, kvm, tcg"),
        (run(&[]), "--max"),
        (vec!["vm", "run", "../a", "--max", "64M", "--kernel", "k"], "begins with a letter"),
        (vec!["vm", "show", "a/b"], "begins with a letter"),
        (vec!["vm", "set", "web"], "--shares"),
        (vec!["vm", "set", "web", "--min", "2M", "--max", "1M"], "--min 2 MiB is above --max"),
        (vec!["vm", "stop", "web", "--grace", "soon"], "'soon' is not a time"),
        (vec!["vm", "stop", "web", "--force", "--grace", "1s"], "cannot be used with"),
        (vec!["vm", "attach", "old"], "--qmp"),
        (vec!["host", "set"], "--budget"),
        (vec!["host", "set", "--budget", "lots"], "'lots' is not a size"),
        (vec!["host", "set", "--tax", "0.5", "--no-tax"], "cannot be used with"),
        (vec!["share", "estimate", "a/b"], "begins with a letter"),
        (vec!["share", "estimate", "0"], "'0' is not a process number"),
        (vec!["share", "estimate", "--rate-mib-s", "0"], "--rate-mib-s"),
        (vec!["top", "--interval", "0"], "not between 100ms and 1h"),
        (vec!["vm", "list"], "unrecognized subcommand"),
    ] {
        // Nobody listens there: asking would give exit code 3.
        let (exit, code, message) = refused(Path::new("/nonexistent/api.sock"), &line);
        assert_eq!((exit, code.as_str()), (2, "usage"), "{line:?}: {message}");
        assert!(message.contains(expected), "{line:?}: {message}");
    }
}

#[test]
fn an_absent_manager_is_exit_code_3_for_every_command() {
    for line in [
        &["vm", "ls"][..],
        &["vm", "show", "web"],
        &["vm", "set", "web", "--shares", "1"],
        &["vm", "stop", "web"],
        &["vm", "run", "a", "--max", "64M", "--kernel", "k"],
        &["vm", "attach", "a", "--qmp", "q"],
        &["host"],
        &["host", "set", "--tax", "0"],
        &["why", "web"],
        &["share", "ls"],
        &["share", "estimate"],
        &["share", "estimate", "web"],
        &["top"],
        &["top", "--once"],
    ] {
        let (exit, code, message) = refused(Path::new("/nonexistent/api.sock"), line);
        assert_eq!((exit, code.as_str()), (3, "unreachable"), "{line:?}");
        assert!(message.contains("/nonexistent/api.sock"), "{message}");
    }
}

#[test]
fn a_listener_that_is_no_manager_is_exit_code_3() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    for (answer, expected) in [
        (&b"220 mail.example ESMTP\r\n"[..], "api.sock broke off: "),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\nno", "/v1/host: HTTP 502"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "answer to /v1/host: "),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                // The whole request is there before the answer: the client sees no reset.
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).unwrap();
                stream.write_all(answer).unwrap();
            }
        });
        let (exit, code, message) = refused(&socket, &["host"]);
        assert_eq!((exit, code.as_str()), (3, "broken"));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn what_the_manager_refuses_is_exit_code_1_in_its_words() {
    let fake = Fake::start();
    let run = |name| vec!["vm", "run", name, "--max", "512M", "--kernel", "k"];
    for (line, code, expected) in [
        (vec!["vm", "show", "nobody"], "not_found", "no VM named 'nobody'"),
        (vec!["vm", "stop", "nobody"], "not_found", "no VM named 'nobody'"),
        (vec!["vm", "set", "nobody", "--tax", "0"], "not_found", "no VM named 'nobody'"),
        (vec!["why", "nobody"], "not_found", "no VM named 'nobody'"),
        (vec!["share", "estimate", "nobody"], "not_found", "no VM named 'nobody'"),
        (run("full"), "no_room", "needs 512 MiB of machine memory, 104 MiB are unreserved"),
        (run("taken"), "conflict", "a VM named taken runs already"),
        (vec!["vm", "set", "web", "--max", "1G"], "bad_request", "max of web is above its size"),
        (vec!["vm", "set", "web", "--shares", "666"], "internal", "cannot be 666"),
        (vec!["host", "set", "--budget", "1M"], "no_room", "below what is promised"),
    ] {
        let (exit, got, message) = refused(&fake.socket, &line);
        assert_eq!((exit, got.as_str()), (1, code), "{line:?}");
        assert!(message.contains(expected), "{line:?}: {message}");
    }
}

#[test]
fn a_vm_that_has_just_ended_has_no_memory_to_estimate() {
    let fake = Fake::start();
    fake.world().vms[0].pid = None;
    let (exit, code, message) = refused(&fake.socket, &["share", "estimate", "web"]);
    assert_eq!((exit, code.as_str()), (1, "process"));
    assert!(message.contains("'web' has no process any more"), "{message}");
}

/// What is in none of the sums is told, whoever reads.
#[test]
fn vms_that_an_estimate_leaves_out_are_named() {
    let fake = Fake::start();
    for vm in &mut fake.world().vms {
        vm.pid = Some(std::process::id());
    }
    let told = ballast(&fake.socket, &["share", "estimate", "--min-size", "64G"]);
    let errors = String::from_utf8_lossy(&told.stderr);
    assert!(errors.contains("web: left out: process") && errors.contains("of 64 GiB"), "{errors}");
    assert_eq!(String::from_utf8_lossy(&told.stdout), "none of the VMs could be read\n");
    let json = as_json(&fake, &["share", "estimate", "--min-size", "64G"]);
    assert_eq!((&json["processes"], &json["left_out"][0]["vm"]), (&json!([]), &json!("web")));
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    use std::process::Stdio;

    let fake = Fake::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = Command::new(env!("CARGO_BIN_EXE_ballast"))
        .args(["vm", "ls"])
        .env("BALLAST_SOCKET", &fake.socket)
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!((out.status.code(), out.stderr.as_slice()), (Some(0), &b""[..]));
}

/// Names of devices, processes and files are for others to choose.
#[test]
fn what_others_named_commands_no_terminal() {
    let fake = Fake::start();
    let hostile = "device \u{1b}]0;owned\u{7}\u{9b}2J pins\nweb: paged\tmemory";
    {
        let mut world = fake.world();
        let vm = world.vms.iter_mut().find(|vm| vm.name == "gpu").unwrap();
        vm.management.reason = Some(hostile.to_owned());
        vm.trouble = Some(hostile.to_owned());
        vm.state = ballast_api::RunState::Unreadable;
    }
    for line in [
        &["vm", "ls"][..],
        &["vm", "show", "gpu"],
        &["vm", "set", "gpu", "--shares", "7"],
        &["top", "--once"],
    ] {
        let text = human(&fake, line);
        assert!(!text.contains(|c: char| c != '\n' && c.is_control()), "{line:?}: {text:?}");
        contains_all(&text, &["device ]0;owned2J pins web: paged memory"]);
    }
    // In JSON they are escaped.
    assert_eq!(as_json(&fake, &["vm", "show", "gpu"])["trouble"], hostile);
}
