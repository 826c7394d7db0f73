//! Runs dbench from the sample disk (see ballast-lab's image) and reports its throughput.

use std::process::{Command, Stdio};

use crate::args::Args;
use crate::json::Object;
use crate::report;

pub fn run(mut args: Args) -> Result<(), String> {
    let root = args.text("dir", crate::init::DISK);
    let clients = args.at_least("clients", 40u32, 1)?;
    let seconds = args.at_least("seconds", 20u32, 1)?;
    let repeat = args.at_least("repeat", 1u32, 1)?;
    args.done()?;
    (0..repeat).try_for_each(|_| once(&root, clients, seconds))
}

/// One run, and its throughput.
fn once(root: &str, clients: u32, seconds: u32) -> Result<(), String> {
    // The disk carries dbench with its own loader and libraries: the guest has none.
    let output = Command::new(format!("{root}/dbench/ld.so"))
        .args(["--library-path", &format!("{root}/dbench"), &format!("{root}/dbench/dbench")])
        .args(["-D", root, "-c", &format!("{root}/dbench/client.txt")])
        .args(["-t", &seconds.to_string()])
        .arg(clients.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{root}/dbench/ld.so: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let last = text.lines().next_back().unwrap_or("");
        return Err(format!("dbench ended with {}: {last}", output.status));
    }
    let result = parse(&text).ok_or("dbench printed no throughput")?;
    report::emit(
        Object::new()
            .text("event", "dbench")
            .text("work", "dbench")
            .num("mb_per_s", result.mb_per_s)
            .int("clients", result.clients)
            .num("max_latency_ms", result.max_latency_ms),
    );
    Ok(())
}

#[derive(Debug, PartialEq)]
struct Throughput {
    mb_per_s: f64,
    clients: u32,
    max_latency_ms: f64,
}

/// The last line that dbench 4 prints:
/// "Throughput 98.1 MB/sec  40 clients  40 procs  max_latency=12.345 ms".
fn parse(text: &str) -> Option<Throughput> {
    let line = text.lines().rev().find_map(|l| l.trim().strip_prefix("Throughput "))?;
    let mut words = line.split_whitespace();
    let mb_per_s = words.next()?.parse().ok()?;
    if words.next()? != "MB/sec" {
        return None;
    }
    let words: Vec<&str> = words.collect();
    let clients = words.iter().position(|w| *w == "clients")?.checked_sub(1)?;
    let latency = words.iter().find_map(|w| w.strip_prefix("max_latency="))?;
    Some(Throughput {
        mb_per_s,
        clients: words[clients].parse().ok()?,
        max_latency_ms: latency.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_read_from_the_last_line() {
        let text = "  40     14000  97.50 MB/sec  execute  19 sec  latency 91.0 ms\n\n \
                    Operation      Count    AvgLat    MaxLat\n NTCreateX     1 0.1 2.0\n\n\
                    Throughput 98.1251 MB/sec  40 clients  40 procs  max_latency=120.345 ms\n";
        let want = Throughput { mb_per_s: 98.1251, clients: 40, max_latency_ms: 120.345 };
        assert_eq!(parse(text), Some(want));
    }

    #[test]
    fn anything_else_is_no_result() {
        for text in ["", "Throughput", "Throughput x MB/sec 1 clients", "Throughput 5 KB/sec"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
