//! What the journal costs: bytes and CPU time per turn, and what the policy loop pays for it.
//!
//!     cargo run --release -p ballast-journal --example cost
//!
//! Turns of a second as hosts have them: of the VMs that are busy, what they consume moves with every
//! turn; what of their memory is active, every thirtieth.
#![allow(clippy::unwrap_used, reason = "a program for developers")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_journal::recorder::{Bound, Recorder, Told};
use ballast_journal::segment::Header;
use ballast_journal::store::Folder;
use ballast_journal::turn::encode;
use ballast_journal::{Journal, Moment, Reader, Settings, replay};
use ballast_policy::{Decision, Snapshot, Thresholds, decide};
use ballast_units::{Pages, VmId};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

fn main() {
    println!(
        "   VMs  busy  turns   raw B/turn  disk B/turn  MB/day  CPU us/turn  decide us  record() us  64 MiB hold"
    );
    for (vms, busy, turns) in [
        (5, 0.0, 3600),
        (5, 0.4, 3600),
        (5, 1.0, 3600),
        (100, 0.2, 600),
        (1000, 0.2, 120),
        (10_000, 0.0, 60),
        (10_000, 0.1, 60),
        (10_000, 1.0, 60),
    ] {
        measure(vms, busy, turns);
    }
}

/// After so many turns what was kept back is written.
const FLUSHED: u64 = 10;

fn cpu() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn decision(n: u64, vms: u32, busy: f64) -> Decision {
    let mib = 256;
    // Far from the thresholds, as hosts are most of the time.
    let list: Vec<_> = (0..vms)
        .map(|id| {
            let mut rng = fastrand::Rng::with_seed(u64::from(id) << 32 | n);
            let moves = f64::from(id) < busy * f64::from(vms);
            let consumed = 90 * mib + if moves { rng.u64(0..5000) } else { 0 };
            let period = if moves { n / 30 } else { 0 };
            let active = fastrand::Rng::with_seed(u64::from(id) << 32 | period).u64(10..90) * mib;
            json!({
                "demand": {"id": id, "shares": 2560, "min": 0, "max": 256 * mib, "tax": 0.75,
                           "active": active},
                "consumed": consumed, "size": 256 * mib, "balloon_goal": 0,
                "balloon_health": "healthy", "balloon_limit": 166 * mib, "wants_more": false,
                "swap_free": 256 * mib
            })
        })
        .collect();
    let used: u64 = list.iter().map(|vm| vm["consumed"].as_u64().unwrap()).sum();
    let budget = u64::from(vms) * 140 * mib;
    let snapshot: Snapshot = serde_json::from_value(json!({
        "trigger": "period", "before": "high",
        "thresholds": Thresholds::default_for(Pages(budget)),
        "budget": budget, "free": budget - used, "overhead": 0, "vms": list
    }))
    .unwrap();
    decide(snapshot)
}

fn measure(vms: u32, busy: f64, turns: u64) {
    let folder = tempfile::tempdir().unwrap();
    let bound = Bound::of(1 << 30);
    let mut recorder = Recorder::new(Folder::new(folder.path()), bound, Header::default());
    let (mut raw, mut spent, mut deciding) = (0, Duration::ZERO, Duration::ZERO);
    for n in 1..=turns {
        let decision = decision(n, vms, busy);
        let before = cpu();
        std::hint::black_box(decide(decision.snapshot.clone()));
        deciding += cpu() - before;
        raw += encode(&decision).unwrap().len();
        let names = if n == 1 {
            (0..vms).map(|id| (VmId(id), format!("customer-{id}"))).collect()
        } else {
            vec![]
        };
        let moment =
            Moment { n, at_ms: 1_800_000_000_000 + n * 1000, up_ms: n * 1000, took_us: 40 };
        let told = Told { moment, decision: Arc::new(decision), names };
        let before = cpu();
        recorder.record(&told).unwrap();
        // As a manager does: what repeats is on the disk some seconds later.
        if n % FLUSHED == 0 {
            recorder.flush().unwrap();
        }
        spent += cpu() - before;
    }
    recorder.flush().unwrap();
    let replayed = replay(&mut Reader::open(folder.path()).unwrap(), decide).unwrap();
    assert_eq!((replayed.turns, replayed.differing), (turns, 0));

    let per = |x: f64| x / turns as f64;
    let disk = per(recorder.bytes() as f64);
    let us = |t: Duration| per(t.as_secs_f64() * 1e6);
    println!(
        "{vms:6}  {:3.0}%  {turns:5}  {:11.0}  {disk:11.1}  {:6.1}  {:11.1}  {:9.1}  {:11.2}  {:.1} h",
        busy * 100.0,
        per(raw as f64),
        disk * 86_400.0 / 1e6,
        us(spent),
        us(deciding),
        handing_over(vms),
        (64 << 20) as f64 / disk / 3600.0,
    );
}

/// What the policy loop pays for one turn, microseconds: the median of 50.
fn handing_over(vms: u32) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { folder: folder.path().to_owned(), limit: 64 << 20 };
    let journal = Journal::start(settings, Header::default()).unwrap();
    let decision = Arc::new(decision(1, vms, 0.0));
    let mut times = Vec::new();
    for n in 1..=51 {
        let begun = Instant::now();
        let moment = Moment { n, at_ms: n, up_ms: n, took_us: 1 };
        journal.record(moment, decision.clone(), |i| format!("customer-{i}"));
        // The first names all.
        if n > 1 {
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        journal.flush(Duration::from_secs(10));
    }
    journal.close(Duration::from_secs(10));
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
