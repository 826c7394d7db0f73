//! Reads a guest's console log: the lines of `@ballast {json}`, and signs of trouble.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::Value;

const MARK: &str = "@ballast ";
/// Of a workload's end, between what was run and how.
pub const ENDED: &str = "' ended with ";

/// One `@ballast` line.
#[derive(Clone, Debug, PartialEq)]
pub struct Event(pub Value);

impl Event {
    /// None for other lines, and for such a line that another writer has torn.
    pub fn parse(line: &str) -> Option<Event> {
        let at = line.find(MARK)?;
        let value: Value = serde_json::from_str(line[at + MARK.len()..].trim()).ok()?;
        value.is_object().then_some(Event(value))
    }

    /// A field that is text; empty if it has no such.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).and_then(Value::as_str).unwrap_or("")
    }

    /// A field that is a number.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(Value::as_f64)
    }

    /// Its field `event`.
    pub fn kind(&self) -> &str {
        self.text("event")
    }
}

/// What a guest has told so far.
#[derive(Clone, Debug, Default)]
pub struct Story {
    /// It has booted: its first program runs.
    pub ready: Option<Event>,
    /// The latest progress of the (first) workload.
    pub progress: Option<Event>,
    /// Checks passed, summed over its workloads.
    pub checks: u64,
    /// How often a workload has told of its checks: what is told once may have been done before whatever came in between.
    pub reports: u64,
    /// The first thing that went wrong: an integrity failure, a workload that ended badly, a kernel
    /// panic, or the guest's out-of-memory killer. A bad end gives way to any of the others.
    pub trouble: Option<String>,
    /// Workloads that have ended, with their exit codes.
    pub exits: Vec<(String, i64)>,
    by_work: std::collections::BTreeMap<String, u64>,
}

impl Story {
    /// Tests: checks passed by one workload.
    pub fn checks_of(&self, work: &str) -> u64 {
        self.by_work.get(work).copied().unwrap_or(0)
    }

    fn take(&mut self, line: &str) -> Option<Event> {
        let Some(event) = Event::parse(line) else {
            const SIGNS: [&str; 7] = [
                "Kernel panic",
                "Out of memory:",
                "BUG: ",
                "kernel BUG at",
                "general protection fault",
                "EXT4-fs error",
                "invoked oom-killer",
            ];
            if SIGNS.iter().any(|s| line.contains(s)) {
                self.found(line.trim().to_owned());
            }
            return None;
        };
        if event.text("integrity") == "FAILED" {
            self.found(format!("integrity FAILED: {}", event.text("what")));
        }
        match event.kind() {
            "boot" => self.ready = Some(event.clone()),
            "progress" | "done" => {
                if let Some(checks) = event.number("checks") {
                    self.reports += 1;
                    self.by_work.insert(event.text("work").to_owned(), checks as u64);
                    self.checks = self.by_work.values().sum();
                }
                self.progress = Some(event.clone());
            }
            "failed" => {
                self.found(format!("{}: {}", event.text("work"), event.text("message")));
            }
            "exit" => {
                let code = event.number("code").unwrap_or(-1.0) as i64;
                if code != 0 {
                    let what = format!("'{}{ENDED}{}", event.text("run"), event.text("how"));
                    self.trouble.get_or_insert(what);
                }
                self.exits.push((event.text("run").to_owned(), code));
            }
            _ => {}
        }
        Some(event)
    }

    /// Something that is wrong, and no mere end.
    fn found(&mut self, what: String) {
        if self.trouble.as_ref().is_none_or(|trouble| trouble.contains(ENDED)) {
            self.trouble = Some(what);
        }
    }
}

/// Follows a console log as it grows.
#[derive(Debug)]
pub struct Console {
    path: PathBuf,
    read: u64,
    /// The beginning of a line whose end is not there yet.
    partial: Vec<u8>,
    /// What was read so far.
    pub story: Story,
}

impl Console {
    /// Reads nothing yet.
    pub fn new(path: &Path) -> Console {
        Console { path: path.to_owned(), read: 0, partial: Vec::new(), story: Story::default() }
    }

    /// Reads what is new and returns its events. A log that is not there yet has none.
    pub fn poll(&mut self) -> Vec<Event> {
        let mut bytes = Vec::new();
        if let Ok(mut file) = std::fs::File::open(&self.path)
            && file.seek(SeekFrom::Start(self.read)).is_ok()
        {
            self.read += file.read_to_end(&mut bytes).unwrap_or(0) as u64;
        }
        self.partial.extend(bytes);
        let Some(end) = self.partial.iter().rposition(|b| *b == b'\n') else { return Vec::new() };
        let rest = self.partial.split_off(end + 1);
        let whole = std::mem::replace(&mut self.partial, rest);
        let text = String::from_utf8_lossy(&whole);
        text.lines().filter_map(|line| self.story.take(line)).collect()
    }

    /// The last lines, for a person who asks what went wrong.
    pub fn tail(&self, lines: usize) -> String {
        let bytes = std::fs::read(&self.path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_are_found_behind_other_output() {
        let e = Event::parse("[ 1.2] x @ballast {\"event\":\"boot\",\"uptime\":1.5}\r").unwrap();
        assert_eq!(e.kind(), "boot");
        assert_eq!(e.number("uptime"), Some(1.5));
        for line in ["", "@ballast", "@ballast {", "@ballast [1]", "ballast {}"] {
            assert_eq!(Event::parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_log_is_followed_across_torn_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut console = Console::new(&path);
        assert!(console.poll().is_empty());
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(b"noise\n@ballast {\"event\":\"boot\"}\n@ballast {\"event\":\"prog")
            .unwrap();
        assert_eq!(console.poll().len(), 1);
        assert!(console.story.ready.is_some());
        file.write_all(b"ress\",\"work\":\"a\",\"checks\":5}\n").unwrap();
        file.write_all(b"@ballast {\"event\":\"done\",\"work\":\"b\",\"checks\":7}\n").unwrap();
        file.write_all(b"@ballast {\"event\":\"progress\",\"work\":\"a\",\"checks\":6}\n").unwrap();
        assert_eq!(console.poll().len(), 3);
        assert_eq!((console.story.checks, console.story.reports), (13, 3));
        assert_eq!(console.story.trouble, None);
        assert!(console.tail(1).contains("\"checks\":6"));
    }

    #[test]
    fn trouble_is_the_first_thing_that_went_wrong() {
        let trouble = |lines: &[&str]| {
            let mut story = Story::default();
            lines.iter().for_each(|l| drop(story.take(l)));
            story.trouble
        };
        assert_eq!(trouble(&["@ballast {\"event\":\"exit\",\"code\":0}"]), None);
        let failed = trouble(&[
            "@ballast {\"event\":\"progress\",\"integrity\":\"FAILED\",\"what\":\"page 3\"}",
            "@ballast {\"event\":\"exit\",\"run\":\"t\",\"how\":\"code 1\",\"code\":1}",
        ]);
        assert_eq!(failed.unwrap(), "integrity FAILED: page 3");
        assert!(trouble(&["[ 3.1] Out of memory: Killed process 50"]).is_some());
        assert!(trouble(&["Kernel panic - not syncing: x"]).is_some());
        let exit = "@ballast {\"event\":\"exit\",\"run\":\"t\",\"how\":\"signal 9\",\"code\":-9}";
        assert_eq!(trouble(&[exit]).unwrap(), "'t' ended with signal 9");
        // What comes after a bad end is worse.
        let later = "@ballast {\"event\":\"failed\",\"work\":\"t\",\"message\":\"page 3\"}";
        assert_eq!(trouble(&[exit, later, exit]).unwrap(), "t: page 3");
        assert_eq!(trouble(&[exit, "BUG: x", later]).unwrap(), "BUG: x");
    }
}
