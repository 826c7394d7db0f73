//! What a document names is there: links, their anchors, paths, and the tests that hold a promise.

use std::path::{Path, PathBuf};

use crate::files;

/// Folders of the repository that a text may name a path in.
const FOLDERS: [&str; 7] =
    ["crates/", "dist/", "docs/", "experiments/", "scenarios/", "scripts/", "fuzz/"];
const PROGRAMS: [&str; 4] = ["./run", "./test", "./bench", "./experiment"];

fn documents() -> Vec<PathBuf> {
    let root = files::root();
    let mut all = files::with_ending(&root.join("docs"), "md");
    let notes = files::with_ending(&root.join("experiments"), "md").into_iter();
    all.extend(notes.filter(|path| path.ends_with("NOTES.md")));
    all.extend(["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(|name| root.join(name)));
    all
}

/// The targets of the links in a text: `[words](target)`.
fn links(text: &str) -> Vec<&str> {
    let ends = text.split("](").skip(1);
    ends.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// What stands between two backquotes, line by line.
fn quoted(text: &str) -> Vec<&str> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).collect()
}

/// The anchors that a heading gets where documents are shown.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let slug = |line: &str| -> String {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(slug).collect()
}

/// What is wrong with a link of the document `from`.
fn broken_link(from: &Path, target: &str) -> Option<String> {
    if target.starts_with("http://") || target.starts_with("https://") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = match path {
        "" => from.to_owned(),
        path => from.parent().unwrap().join(path),
    };
    if !path.exists() {
        return Some("is not there".to_owned());
    }
    let known = || anchors(&files::read(&path)).iter().any(|known| known == anchor);
    (!anchor.is_empty() && !known()).then(|| "has no such heading".to_owned())
}

/// Whether a quoted text names a path of the repository that is not there.
fn missing_path(root: &Path, text: &str) -> bool {
    let first = text.split_whitespace().next().unwrap_or_default();
    let path = first.split("::").next().unwrap_or_default();
    let path = path.trim_end_matches([',', '.', ':']);
    // A pattern, or a place for a name: "experiments/NAME".
    let is_pattern = path.contains(['*', '<', '{']) || path.contains("NAME") || path.contains("NN");
    let is_path = FOLDERS.iter().any(|folder| path.starts_with(folder)) || PROGRAMS.contains(&path);
    is_path && !is_pattern && !root.join(path).exists()
}

/// Whether a quoted text names a source file or a test that is not there: FILE::NAME, or ::NAME in some
/// file. Files are named from `crates` on, or by the end of their path.
fn missing_test(sources: &[(PathBuf, String)], text: &str) -> bool {
    let (file, name) = text.split_once("::").unwrap_or((text, ""));
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let is_file = file.ends_with(".rs") && file.contains('/') && !file.contains(['{', '*']);
    if !(is_file || file.is_empty() && !name.is_empty()) || !name.chars().all(is_word) {
        return false;
    }
    let named: Vec<&(PathBuf, String)> =
        sources.iter().filter(|(path, _)| !is_file || path.ends_with(file)).collect();
    let has = |text: &str| ["(", "<"].iter().any(|c| text.contains(&format!("fn {name}{c}")));
    // The tests of a file may be in parts, in a folder of its name.
    let parts: Vec<PathBuf> = named.iter().map(|(path, _)| path.with_extension("")).collect();
    let in_part = |path: &Path| parts.iter().any(|folder| path.starts_with(folder));
    named.is_empty()
        || !name.is_empty()
            && !named.iter().any(|(_, text)| has(text))
            && !sources.iter().any(|(path, text)| has(text) && in_part(path))
}

fn check(wrong: impl Fn(&Path, &str) -> Vec<String>) {
    let mut all = Vec::new();
    for path in documents() {
        let text = files::read(&path);
        all.extend(
            wrong(&path, &text).into_iter().map(|what| format!("{}: {what}", path.display())),
        );
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn every_link_leads_somewhere() {
    check(|path, text| {
        let wrong = |target: &&str| Some(format!("({target}) {}", broken_link(path, target)?));
        links(text).iter().filter_map(wrong).collect()
    });
}

#[test]
fn every_path_that_is_named_is_there() {
    let root = files::root();
    check(|_, text| {
        let missing = quoted(text).into_iter().filter(|quoted| missing_path(root, quoted));
        missing.map(|quoted| format!("`{quoted}` is not there")).collect()
    });
}

#[test]
fn every_test_that_holds_a_promise_is_there() {
    let crates = files::root().join("crates");
    let sources: Vec<(PathBuf, String)> = files::with_ending(&crates, "rs")
        .into_iter()
        .map(|path| (path.clone(), files::read(&path)))
        .collect();
    let (mut named, mut missing) = (0, Vec::new());
    for path in documents() {
        let text = files::read(&path);
        for quoted in quoted(&text) {
            named += usize::from(quoted.contains(".rs::"));
            if missing_test(&sources, quoted) {
                missing.push(format!("{}: `{quoted}` is not there", path.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(named > 10, "only {named} tests are named in all documents");
}

#[test]
fn what_is_missing_is_seen() {
    let root = files::root();
    assert_eq!(links("a [b](c.md) [d](e#f)"), ["c.md", "e#f"]);
    assert_eq!(quoted("a `b c` d `e`"), ["b c", "e"]);
    assert_eq!(anchors("# What it is: \"A\" & b\n"), ["what-it-is-a--b"]);
    let readme = root.join("README.md");
    assert_eq!(broken_link(&readme, "LICENSE-MIT"), None);
    assert!(broken_link(&readme, "LICENSE-X").is_some());
    assert!(broken_link(&readme, "README.md#no-such-thing").is_some());
    assert!(missing_path(root, "crates/policy/src/none.rs"));
    assert!(missing_path(root, "scenarios/none.toml --seed 1"));
    assert!(!missing_path(root, "crates/policy/src/lib.rs"));
    assert!(!missing_path(root, "experiments/NAME"));
    let crates = root.join("crates");
    let here = "house/src/documents.rs";
    let sources = [(crates.join(here), "fn a_test() {}".to_owned())];
    assert!(!missing_test(&sources, &format!("{here}::a_test")));
    assert!(missing_test(&sources, &format!("{here}::no_test")));
    assert!(missing_test(&sources, "house/src/none.rs::a_test"));
    assert!(missing_test(&sources, "::no_test") && !missing_test(&sources, "::a_test"));
}
