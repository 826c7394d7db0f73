//! Which crate may depend on which: the table and the drawing in ARCHITECTURE.md say it, and Cargo's own
//! view must be the same. What the layers are for is held beside it, whatever the table says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::files;
use crate::paths::{code, paths};

type Names = BTreeSet<String>;

/// What a crate needs: crates of this repository, those of its tests, and those of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Needs {
    ours: Names,
    in_tests: Names,
    others: Names,
}

/// By the folder below `crates`.
fn by_cargo() -> BTreeMap<String, Needs> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(files::root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    packages.iter().map(|package| (room(package), needs(package))).collect()
}

fn room(package: &Value) -> String {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    let room = manifest.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(package["name"], format!("ballast-{room}"), "a crate is named as its folder");
    room
}

fn needs(package: &Value) -> Needs {
    let mut needs = Needs::default();
    for dependency in package["dependencies"].as_array().unwrap() {
        let name = dependency["name"].as_str().unwrap();
        let in_tests = dependency["kind"] == "dev";
        match (name.strip_prefix("ballast-"), in_tests) {
            (Some(ours), false) => needs.ours.insert(ours.to_owned()),
            (Some(ours), true) => needs.in_tests.insert(ours.to_owned()),
            (None, false) => needs.others.insert(name.to_owned()),
            (None, true) => continue,
        };
    }
    needs
}

/// "units, api (types); in tests: lab"; a dash: none.
fn cell(text: &str) -> (Names, Names) {
    let list = |text: &str| -> Names {
        let names = text.split(',').map(|item| item.split('(').next().unwrap().trim());
        names.filter(|name| !name.is_empty() && *name != "-").map(str::to_owned).collect()
    };
    match text.split_once("; in tests:") {
        Some((normal, tests)) => (list(normal), list(tests)),
        None => (list(text), Names::new()),
    }
}

fn architecture() -> String {
    files::read(&files::root().join("ARCHITECTURE.md"))
}

/// The table under "Rooms".
fn by_table(text: &str) -> BTreeMap<String, (Names, Names)> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `crates/")?.strip_suffix(" |"));
    rows.map(|row| {
        let (name, rest) = row.split_once('`').unwrap();
        let (_, needed) = rest.rsplit_once(" | ").unwrap();
        (name.to_owned(), cell(needed))
    })
    .collect()
}

/// The lines `a --> b & c` of the drawing, without units, on which nearly all depend.
fn by_drawing(text: &str) -> BTreeMap<String, (Names, Names)> {
    let mut drawn: BTreeMap<String, (Names, Names)> = BTreeMap::new();
    let list = |text: &str| text.split('&').map(|name| name.trim().to_owned()).collect::<Names>();
    for line in text.lines() {
        if let Some((from, to)) = line.split_once(" --> ") {
            drawn.entry(from.trim().to_owned()).or_default().0.extend(list(to));
        } else if let Some((from, to)) = line.split_once(" -. tests .-> ") {
            drawn.entry(from.trim().to_owned()).or_default().1.extend(list(to));
        }
    }
    drawn
}

#[test]
fn crates_depend_on_what_architecture_md_says_and_on_nothing_else() {
    let cargo = by_cargo();
    let text = architecture();
    let table = by_table(&text);
    let all: Vec<&String> = cargo.keys().collect();
    assert_eq!(table.keys().collect::<Vec<_>>(), all, "crates in the table and in the workspace");
    for (room, needs) in &cargo {
        let said = &table[room];
        assert_eq!(needs.ours, said.0, "{room} depends on (left: Cargo, right: ARCHITECTURE.md)");
        assert_eq!(needs.in_tests, said.1, "{room}, in its tests");
    }
    let mut drawn = by_drawing(&text);
    for (room, needs) in &cargo {
        let (normal, tests) = drawn.remove(room).unwrap_or_default();
        let mut ours = needs.ours.clone();
        ours.remove("units");
        assert_eq!(
            ours, normal,
            "{room} (left: Cargo, right: the drawing, which leaves out units)"
        );
        assert_eq!(needs.in_tests, tests, "{room}, in its tests (right: the drawing)");
    }
    assert!(drawn.is_empty(), "drawn, and no crates: {drawn:?}");
}

/// What the table may not be changed to.
#[test]
fn the_layers_are_what_they_are_for() {
    let cargo = by_cargo();
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Names>();
    let policy = &cargo["policy"];
    assert_eq!(policy.ours, set(&["units"]), "the policy is pure");
    assert!(policy.others.is_subset(&set(&["serde", "thiserror"])), "{:?}", policy.others);
    // Who decides is above who moves pages, and beside who asks.
    for (room, never) in [
        ("pager", &["policy", "api", "journal", "qemu", "manager"][..]),
        ("sharing", &["policy", "pager", "api"]),
        ("shim", &["policy", "pager", "api", "manager"]),
        ("cli", &["pager", "uffd", "sharing", "compress", "qemu", "shim-proto", "manager"]),
    ] {
        let found: Vec<&str> = never
            .iter()
            .copied()
            .filter(|name| cargo[room].ours.contains(*name) || cargo[room].in_tests.contains(*name))
            .collect();
        assert!(found.is_empty(), "{room} depends on {found:?}");
    }
    // Its mechanisms are in crates of their own: it asks the kernel for nothing itself.
    for never in ["rustix", "libc"] {
        assert!(!cargo["cli"].others.contains(never), "cli depends on {never}");
    }
}

/// Neither files, nor clocks, nor threads.
const IMPURE: [&str; 10] = [
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::time::UNIX_EPOCH",
];

fn impure(text: &str) -> Vec<String> {
    let code = code(text);
    let mut found = paths(&code, "std");
    found.retain(|path| {
        // `std::time` and `std::time::*` could hide a clock.
        path == "std::time"
            || path == "std::time::*"
            || path == "std::*"
            || IMPURE.iter().any(|bad| path == bad || path.starts_with(&format!("{bad}::")))
    });
    for other in ["tokio", "rustix", "libc"] {
        found.extend(paths(&code, other));
    }
    for shout in ["print!", "println!", "eprint!", "eprintln!"] {
        if code.split(|c: char| c.is_whitespace() || "(){};".contains(c)).any(|word| word == shout)
        {
            found.push(shout.to_owned());
        }
    }
    found
}

#[test]
fn what_is_impure_is_seen() {
    let found =
        impure("use std::{fs::File, time::{Duration, Instant}};\nfn f() { println!(\"\") }");
    assert_eq!(found, ["std::fs::File", "std::time::Instant", "println!"]);
    assert_eq!(impure("std::time::UNIX_EPOCH.elapsed()").len(), 1);
    assert!(impure("use std::time::Duration; // std::fs").is_empty());
}

#[test]
fn the_policy_has_no_files_clocks_or_threads() {
    let mut wrong = Vec::new();
    for path in files::with_ending(&files::root().join("crates/policy/src"), "rs") {
        // Tests may read and print.
        if path.file_stem().unwrap().to_str().unwrap().ends_with("_tests") {
            continue;
        }
        let text = files::read(&path);
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        wrong.extend(impure(text).into_iter().map(|item| format!("{}: {item}", path.display())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_pager_names_no_policy() {
    for path in files::with_ending(&files::root().join("crates/pager"), "rs") {
        let found = paths(&code(&files::read(&path)), "ballast_policy");
        assert!(found.is_empty(), "{}: {found:?}", path.display());
    }
}
