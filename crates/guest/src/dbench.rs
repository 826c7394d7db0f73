//! Runs dbench from the sample disk (see ballast-lab's image) and reports its throughput.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::args::Args;
use crate::json::Object;
use crate::report;

pub fn run(mut args: Args) -> Result<(), String> {
    let root = args.text("dir", crate::init::DISK);
    let load = args.text("load", "client.txt");
    let clients = args.at_least("clients", 40u32, 1)?;
    let seconds = args.at_least("seconds", 20u32, 1)?;
    let repeat = args.at_least("repeat", 1u32, 1)?;
    let every = args.seconds("every", 0.0)?.as_secs_f64();
    args.done()?;
    (0..repeat).try_for_each(|_| once(&root, &load, clients, seconds, every))
}

/// One run, and its throughput; with `every`, also that of each so many seconds.
fn once(root: &str, load: &str, clients: u32, seconds: u32, every: f64) -> Result<(), String> {
    // The disk carries dbench with its own loader and libraries: the guest has none.
    let mut child = Command::new(format!("{root}/dbench/ld.so"))
        .args(["--library-path", &format!("{root}/dbench"), &format!("{root}/dbench/dbench")])
        .args(["-D", root, "-c", &format!("{root}/dbench/{load}")])
        .args(["-t", &seconds.to_string()])
        .arg(clients.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|e| format!("{root}/dbench/ld.so: {e}"))?;
    let mut windows = Windows::new(every);
    let mut total = Total::default();
    let (mut result, mut last) = (None, String::new());
    let output = child.stdout.take().ok_or("dbench has no standard output")?;
    for line in BufReader::new(output).lines() {
        let line = line.map_err(|e| format!("dbench's output: {e}"))?;
        if let Some(mb_per_s) = window_of(&line).and_then(|w| windows.feed(w)) {
            report::emit(
                Object::new()
                    .text("event", "dbench-window")
                    .text("work", "dbench")
                    .num("mb_per_s", mb_per_s),
            );
        }
        if let Some(mb) = megabytes_of(&line).filter(|_| every > 0.0) {
            let mb = total.feed(mb);
            report::emit(
                Object::new().text("event", "dbench-total").text("work", "dbench").num("mb", mb),
            );
        }
        result = parse(&line).or(result);
        if !line.trim().is_empty() {
            last = line;
        }
    }
    let status = child.wait().map_err(|e| format!("dbench: {e}"))?;
    if !status.success() {
        return Err(format!("dbench ended with {status}: {last}"));
    }
    let result = result.ok_or("dbench printed no throughput")?;
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
fn parse(line: &str) -> Option<Throughput> {
    let mut words = line.trim().strip_prefix("Throughput ")?.split_whitespace();
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

/// Seconds since the warm-up, and MB since then. The line has the mean since then:
/// "  40     14000  97.50 MB/sec  execute  19 sec  latency 91.0 ms".
fn window_of(line: &str) -> Option<(f64, f64)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, mean, "MB/sec", "execute", seconds, "sec", ..] = words[..] else { return None };
    let (mean, seconds): (f64, f64) = (mean.parse().ok()?, seconds.parse().ok()?);
    Some((seconds, mean * seconds))
}

/// MB since the last line of the warm-up, or in it.
fn megabytes_of(line: &str) -> Option<f64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, mean, "MB/sec", "execute" | "warmup", seconds, "sec", ..] = words[..] else {
        return None;
    };
    Some(mean.parse::<f64>().ok()? * seconds.parse::<f64>().ok()?)
}

/// A running total that goes on where dbench begins anew after its warm-up.
#[derive(Default)]
struct Total {
    before: f64,
    last: f64,
}

impl Total {
    fn feed(&mut self, mb: f64) -> f64 {
        // By the rounding of two numbers it may go back a little.
        if mb < 0.5 * self.last {
            self.before += self.last;
        }
        self.last = mb;
        self.before + mb
    }
}

/// Differences of running totals.
struct Windows {
    every: f64,
    last: (f64, f64),
}

impl Windows {
    fn new(every: f64) -> Windows {
        Windows { every, last: (0.0, 0.0) }
    }

    /// MB/s since the last one, once it is long enough ago.
    fn feed(&mut self, now: (f64, f64)) -> Option<f64> {
        let seconds = now.0 - self.last.0;
        if self.every <= 0.0 || seconds < self.every {
            return None;
        }
        let rate = (now.1 - self.last.1) / seconds;
        self.last = now;
        Some(rate.max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_read_from_its_line() {
        let line = "Throughput 98.1251 MB/sec  40 clients  40 procs  max_latency=120.345 ms";
        let want = Throughput { mb_per_s: 98.1251, clients: 40, max_latency_ms: 120.345 };
        assert_eq!(parse(line), Some(want));
    }

    #[test]
    fn anything_else_is_no_result() {
        let progress = "  40     14000  97.50 MB/sec  execute  19 sec  latency 91.0 ms";
        for text in ["", "Throughput", "Throughput x MB/sec 1 clients", "Throughput 5 KB/sec"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse(progress), None);
        assert_eq!(window_of(progress), Some((19.0, 97.5 * 19.0)));
        assert_eq!(window_of("  40   140  97.50 MB/sec  warmup  3 sec  latency 91.0 ms"), None);
    }

    #[test]
    fn a_total_goes_on_after_the_warm_up() {
        let line = |kind, seconds| {
            format!("  4   140  10.00 MB/sec  {kind}  {seconds} sec  latency 91.0 ms")
        };
        let mut total = Total::default();
        let mut feed = |kind, seconds| total.feed(megabytes_of(&line(kind, seconds)).unwrap());
        assert_eq!([feed("warmup", 1), feed("warmup", 5)], [10.0, 50.0]);
        assert_eq!([feed("execute", 1), feed("execute", 3)], [60.0, 80.0]);
        assert_eq!(megabytes_of("  4  cleanup  3 sec"), None);
    }

    #[test]
    fn windows_are_differences() {
        let mut windows = Windows::new(10.0);
        assert_eq!(windows.feed((5.0, 50.0)), None);
        assert_eq!(windows.feed((10.0, 100.0)), Some(10.0));
        assert_eq!(windows.feed((19.0, 280.0)), None);
        assert_eq!(windows.feed((20.0, 300.0)), Some(20.0));
        assert_eq!(Windows::new(0.0).feed((20.0, 300.0)), None);
    }
}
