//! A real service from the distribution's packages (see ballast-lab's services disk), and a client
//! that puts load on it and checks what it answers.
//!
//! | `--kind` | service | data |
//! | --- | --- | --- |
//! | `postgresql` | PostgreSQL, with pgbench for a client | pgbench's tables |
//! | `nginx`, `lighttpd` | a web server | files of this guest's own, and the packages' documents |
//! | `redis`, `memcached` | a cache | values of this guest's own |
//!
//! | file | what is there |
//! | --- | --- |
//! | `database`, `web`, `keyed` (by `redis`, `memcached`) | a service and its client |
//! | `content` | what is asked for |
//! | `place`, `wire` | where a service runs, and how it is reached |

mod content;
mod database;
mod keyed;
mod memcached;
mod place;
mod redis;
mod web;
mod wire;

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::pace::Pace;
use crate::page::Random;
use crate::report::{self, Progress};
use content::Content;
use place::Daemon;

const KINDS: [&str; 5] = ["postgresql", "nginx", "lighttpd", "redis", "memcached"];
/// How long a service may take until it answers: a crowded host emulates slowly.
const PATIENCE: Duration = Duration::from_secs(180);

/// What a client does again and again.
trait Load {
    /// One request, or as many as the service's own client makes at a time; says how many answers
    /// were found right. A wrong one is an error.
    fn step(&mut self, random: &mut Random) -> Result<u64, String>;
}

pub fn run(mut args: Args) -> Result<(), String> {
    let kind = args.text("kind", "nginx");
    let mb = args.at_least("mb", 16u64, 1)?;
    let rate = args.at_least("rate", 50.0f64, 1.0)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 1u64)?;
    args.done()?;

    let named = KINDS.into_iter().find(|k| *k == kind);
    let kind = named.ok_or(format!("no service '{kind}' (there are: {})", KINDS.join(", ")))?;
    place::prepare()?;
    let content = Content { seed };
    let mut progress = Progress::new(kind);
    let (mut daemon, mut load): (Daemon, Box<dyn Load>) = match kind {
        "postgresql" => database::start(mb, rate)?,
        "nginx" | "lighttpd" => web::start(kind, content, mb)?,
        "redis" => redis::start(content, mb)?,
        _ => memcached::start(content, mb)?,
    };
    progress.now("progress", |o| o.text("phase", "filled"));
    let mut random = Random(seed);
    // The database's client keeps to the rate itself.
    let mut pace = Pace::new(if kind == "postgresql" { 0.0 } else { rate });
    // From when it serves: filling takes as long as it takes.
    let serving = Instant::now();
    while limit.is_zero() || serving.elapsed() < limit {
        let right = load.step(&mut random).map_err(|what| report::corrupt(kind, &what))?;
        progress.checks += right;
        progress.passes += 1;
        pace.spent(right);
        daemon.check()?;
        let per_second = progress.checks as f64 / serving.elapsed().as_secs_f64();
        progress.tick(|o| o.num("answers_per_s", per_second));
    }
    progress.now("done", |o| o);
    daemon.end();
    Ok(())
}
