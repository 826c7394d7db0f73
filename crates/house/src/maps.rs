//! A module whose first lines map those below it maps all of them.

use std::collections::BTreeSet;

use crate::files;

/// Words in backticks of the lines of a table or a list at the head of a file; a folder's with its slash.
fn mapped(text: &str) -> BTreeSet<&str> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! "));
    let rows = rows.filter(|row| row.starts_with("| ") || row.starts_with("- `"));
    rows.flat_map(|row| row.split('`').skip(1).step_by(2))
        .map(|w| w.trim_end_matches('/'))
        .collect()
}

/// The modules that a file declares, but for those of tests alone and those that are hidden.
fn declared(text: &str) -> Vec<&str> {
    let mut modules = Vec::new();
    let mut attributes = Vec::new();
    for line in text.lines() {
        if line.starts_with("#[") {
            attributes.push(line);
            continue;
        }
        let name = line.strip_suffix(';').and_then(|line| line.split_once("mod "));
        let is_left_out = |a: &&str| a.contains("test") || a.contains("doc(hidden)");
        if let Some((before, name)) = name
            && (before.is_empty() || before.starts_with("pub"))
            && !attributes.iter().any(is_left_out)
        {
            modules.push(name);
        }
        attributes.clear();
    }
    modules
}

#[test]
fn modules_and_their_maps_are_seen() {
    let text = "//! | [`a`](mod@a), `b/` | x `d` |\n//! - `c`: y `e`\n//! `f`\n#[cfg(test)]\nmod t;\nmod a;\npub(crate) mod g;";
    assert!(mapped(text).is_superset(&BTreeSet::from(["a", "b", "c"])));
    assert!(!mapped(text).contains("f"));
    assert_eq!(declared(text), ["a", "g"]);
}

#[test]
fn a_map_of_modules_has_all_of_them() {
    let mut wrong = Vec::new();
    for path in files::with_ending(&files::root().join("crates"), "rs") {
        let text = files::read(&path);
        let (mapped, modules) = (mapped(&text), declared(&text));
        if !modules.iter().any(|m| mapped.contains(m)) {
            continue;
        }
        let left_out = modules.into_iter().filter(|m| !mapped.contains(m));
        wrong.extend(left_out.map(|m| format!("{}: {m}", path.display())));
    }
    assert!(wrong.is_empty(), "not in the map at the head of their file:\n{}", wrong.join("\n"));
}
