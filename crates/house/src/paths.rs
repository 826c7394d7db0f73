//! Which items a source file names, as far as text tells: enough for `use` lines and paths.

/// The code of a file, comments and strings blanked.
pub fn code(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let bytes: Vec<char> = text.chars().collect();
    let mut at = 0;
    while let Some(&c) = bytes.get(at) {
        let next = bytes.get(at + 1).copied();
        match (c, next) {
            ('/', Some('/')) => {
                while bytes.get(at).is_some_and(|c| *c != '\n') {
                    at += 1;
                }
            }
            ('/', Some('*')) => {
                at += 2;
                while at < bytes.len() && !(bytes[at] == '*' && bytes.get(at + 1) == Some(&'/')) {
                    at += 1;
                }
                at += 2;
            }
            ('"', _) => {
                at += 1;
                while bytes.get(at).is_some_and(|c| *c != '"') {
                    at += if bytes[at] == '\\' { 2 } else { 1 };
                }
                at += 1;
                code.push(' ');
            }
            // A quote as a character does not begin a string.
            ('\'', Some('"')) if bytes.get(at + 2) == Some(&'\'') => at += 3,
            _ => {
                code.push(c);
                at += 1;
            }
        }
    }
    code
}

/// All paths in `code` that begin with `root` (a crate's name), the groups of `use` spelled out:
/// `use std::{fs, time::Instant}` names `std::fs` and `std::time::Instant`.
pub fn paths(code: &str, root: &str) -> Vec<String> {
    let mut found = Vec::new();
    let word = |c: char| c.is_alphanumeric() || c == '_';
    for (at, _) in code.match_indices(root) {
        let (before, rest) = (&code[..at], &code[at + root.len()..]);
        // Part of a longer word, or of another path.
        if before.ends_with(|c: char| word(c)) || before.trim_end().ends_with("::") {
            continue;
        }
        if rest.trim_start().starts_with("::") {
            tree(root.to_owned(), rest, &mut found);
        } else if !rest.starts_with(|c: char| word(c)) && before.trim_end().ends_with("use") {
            found.push(root.to_owned());
        }
    }
    found
}

/// What `::a`, `::{a, b::c}` behind `path` name; what is behind them.
fn tree<'a>(path: String, rest: &'a str, found: &mut Vec<String>) -> &'a str {
    let Some(rest) = rest.trim_start().strip_prefix("::") else {
        found.push(path);
        return rest;
    };
    let rest = rest.trim_start();
    let Some(mut rest) = rest.strip_prefix('{') else {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        // A glob, or the arguments of a type, end the path.
        if name.is_empty() {
            found.push(format!("{path}::*"));
            return rest.strip_prefix('*').unwrap_or(rest);
        }
        return tree(format!("{path}::{name}"), rest, found);
    };
    loop {
        rest = rest.trim_start();
        if let Some(behind) = rest.strip_prefix('}') {
            return behind;
        }
        if rest.is_empty() {
            return rest;
        }
        rest = tree_item(&path, rest, found);
        // `as name` is passed over, and so is what this does not know.
        let next = rest.find([',', '}']).unwrap_or(rest.len());
        rest = rest[next..].strip_prefix(',').unwrap_or(&rest[next..]);
    }
}

fn tree_item<'a>(path: &str, rest: &'a str, found: &mut Vec<String>) -> &'a str {
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    let (name, behind) = rest.split_at(end);
    match name {
        "" if behind.starts_with('*') => {
            found.push(format!("{path}::*"));
            &behind[1..]
        }
        "" => rest,
        "self" => {
            found.push(path.to_owned());
            behind
        }
        _ => tree(format!("{path}::{name}"), behind, found),
    }
}

#[test]
fn groups_are_spelled_out_and_texts_passed_over() {
    let text = r#"
        //! std::net::TcpStream
        use std::{collections::{BTreeMap, HashMap}, fs as files, io::{self, Read}, time::*};
        /* std::thread */
        use libc;
        fn a() -> std :: time :: Instant { "std::env"; my_std::x(); not::std::y(); '"'; std::fs::read() }
    "#;
    let found = paths(&code(text), "std");
    let expected = [
        "std::collections::BTreeMap",
        "std::collections::HashMap",
        "std::fs",
        "std::io",
        "std::io::Read",
        "std::time::*",
        "std::time::Instant",
        "std::fs::read",
    ];
    assert_eq!(found, expected);
    assert_eq!(paths(&code(text), "libc"), ["libc"]);
}
