//! `ballast journal`: decisions of the past, from the manager or from files; replays, and traces for the simulator.

use std::path::{Path, PathBuf};

use ballast_api::client::{Client, ClientError};
use ballast_api::layout::{JOURNAL, SERVICE_JOURNAL};
use ballast_api::{DEFAULT_SOCKET, JournalPage, JournalQuery, TurnView};
use ballast_journal::segment::SegmentError;
use ballast_journal::tell::{self, Query};
use ballast_journal::{
    Excerpt, Reader, Replayed, TraceError, Traced, replay as replay_turns, trace as trace_turns,
};
use serde::Serialize;

use super::Output;
use crate::args::{JournalArgs, TraceArgs};
use crate::aside;
use crate::failure::Failure;
use crate::figures::size;
use crate::moment;
use crate::saved::Saved;

pub async fn list(client: &Client, args: &JournalArgs, out: Output) -> Result<(), Failure> {
    in_order(args.since, args.until)?;
    let page = match &args.journal {
        Some(path) => tell::list(path, &query(args))?,
        None => {
            let asked = JournalQuery {
                since_ms: args.since,
                until_ms: args.until,
                vm: args.vm.clone(),
                limit: Some(args.limit),
                all: args.all,
            };
            match client.journal(&asked).await {
                Ok(page) => page,
                Err(e) => tell::list(&left_behind(client, e, out)?, &query(args))?,
            }
        }
    };
    out.print(&page, described)
}

/// Nothing is in a span that ends before it begins.
pub fn in_order(since_ms: Option<u64>, until_ms: Option<u64>) -> Result<(), Failure> {
    match (since_ms, until_ms) {
        (Some(since), Some(until)) if since > until => {
            Err(Failure::Usage("--since is later than --until".to_owned()))
        }
        _ => Ok(()),
    }
}

fn query(args: &JournalArgs) -> Query {
    Query {
        since_ms: args.since,
        until_ms: args.until,
        vm: args.vm.clone(),
        limit: args.limit as usize,
        all: args.all,
        give_up: None,
    }
}

/// The journal of a manager that is not there; `error` is returned if that is not what is wrong, or
/// there is none.
pub fn left_behind(client: &Client, error: ClientError, out: Output) -> Result<PathBuf, Failure> {
    if !error.is_no_manager() {
        return Err(error.into());
    }
    let beside = client.socket().parent().map(|folder| folder.join(JOURNAL));
    let usual =
        (client.socket() == Path::new(DEFAULT_SOCKET)).then(|| PathBuf::from(SERVICE_JOURNAL));
    match [beside, usual].into_iter().flatten().find(|folder| folder.is_dir()) {
        Some(folder) => {
            // In JSON, what is on standard error is one error.
            if !out.json {
                let folder = folder.display();
                aside::line(format_args!("ballast: no ballastd answers; read from {folder}"));
            }
            Ok(folder)
        }
        None => Err(error.into()),
    }
}

fn described(page: &JournalPage) -> String {
    let mut text = String::new();
    for note in &page.notes {
        text.push_str(&format!("not read: {note}\n"));
    }
    if page.turns.is_empty() {
        text.push_str(if page.notes.is_empty() {
            "nothing that was asked for is in the journal\n"
        } else {
            "nothing that was asked for is in what could be read of the journal\n"
        });
    } else if page.more {
        text.push_str("(older ones: --limit, --until)\n");
    }
    for turn in &page.turns {
        text.push_str(&one(turn));
    }
    text
}

fn one(turn: &TurnView) -> String {
    let mut text = format!(
        "{}  #{} {}: state {}, {} free of the {} to be kept, {}, decided in {} us\n",
        moment::show(turn.at_ms),
        turn.n,
        turn.trigger,
        turn.state,
        size(turn.free),
        size(turn.goal),
        crate::figures::vms(turn.vms),
        turn.took_us,
    );
    for change in &turn.changes {
        text.push_str(&format!("    {change}\n"));
    }
    for outcome in &turn.outcomes {
        text.push_str(&format!("    => {outcome}\n"));
    }
    if turn.repeats > 0 {
        text.push_str(&format!("    ({} times more the same)\n", turn.repeats));
    }
    text
}

/// What came of the replay of one journal.
#[derive(Serialize)]
struct Report {
    journal: PathBuf,
    #[serde(flatten)]
    replayed: Replayed,
    /// What could not be read.
    notes: Vec<String>,
}

pub fn replay(paths: &[PathBuf], out: Output) -> Result<(), Failure> {
    let (mut reports, mut lost) = (Vec::new(), 0);
    for path in paths {
        let mut reader = Reader::open(path).map_err(tell::TellError::from)?;
        let replayed =
            replay_turns(&mut reader, ballast_policy::decide).map_err(tell::TellError::from)?;
        lost += reader.troubles().iter().filter(|trouble| !is_last_words(&trouble.what)).count();
        let notes = read_of(reader, replayed.turns)?;
        reports.push(Report { journal: path.clone(), replayed, notes });
    }
    out.print(&reports, |reports| reports.iter().map(report).collect())?;
    let differing: u64 = reports.iter().map(|r| r.replayed.differing).sum();
    let turns: u64 = reports.iter().map(|r| r.replayed.turns).sum();
    if differing > 0 {
        return Err(Failure::Differs { differing, turns });
    }
    if lost > 0 {
        return Err(Failure::Unread { files: lost });
    }
    // Who looks for what differs is not to be told that nothing does.
    match reports.into_iter().find(|report| report.replayed.turns == 0) {
        Some(Report { journal: path, .. }) => Err(Failure::NoTurns { path }),
        None => Ok(()),
    }
}

/// Whether a file is only as a manager leaves it that is killed, or that writes it now.
fn is_last_words(trouble: &SegmentError) -> bool {
    matches!(trouble, SegmentError::Torn { .. } | SegmentError::NoHeader)
}

/// What could not be read, if anything was.
///
/// # Errors
/// When nothing was.
fn read_of(reader: Reader, found: u64) -> Result<Vec<String>, Failure> {
    let mut troubles = reader.into_troubles();
    if found == 0 && !troubles.is_empty() {
        return Err(tell::TellError::from(troubles.swap_remove(0)).into());
    }
    Ok(troubles.iter().map(ToString::to_string).collect())
}

/// A trace that was written.
#[derive(Serialize)]
struct Trace {
    csv: PathBuf,
    #[serde(flatten)]
    traced: Traced,
    /// What could not be read.
    notes: Vec<String>,
}

pub fn trace(args: &TraceArgs, out: Output) -> Result<(), Failure> {
    in_order(args.since, args.until)?;
    let file = |source| Failure::File { path: args.csv.clone(), source };
    let mut reader = Reader::open(&args.path).map_err(tell::TellError::from)?;
    let excerpt = Excerpt {
        since_ms: args.since,
        until_ms: args.until,
        every_ms: u64::try_from(args.every.as_millis()).unwrap_or(u64::MAX),
    };
    let mut csv = Saved::begin(&args.csv).map_err(file)?;
    let traced = trace_turns(&mut reader, excerpt, &mut csv).map_err(|e| match e {
        TraceError::Journal(e) => e.into(),
        TraceError::Write(e) => file(e),
    })?;
    let notes = read_of(reader, traced.lines)?;
    // What was there before stays: a heading alone is no trace.
    if traced.lines == 0 {
        return Err(Failure::Untraced { path: args.path.clone() });
    }
    csv.done().map_err(file)?;
    out.print(&Trace { csv: args.csv.clone(), traced, notes }, |trace| {
        let notes: String = trace.notes.iter().map(|note| format!("not read: {note}\n")).collect();
        let Traced { lines, vms, span_s } = trace.traced;
        let vms = crate::figures::vms(u32::try_from(vms).unwrap_or(u32::MAX));
        format!("{notes}{}: {lines} lines of {vms}, {span_s:.0} s\n", trace.csv.display())
    })
}

fn report(report: &Report) -> String {
    let r = &report.replayed;
    let mut text = format!("{}: ", report.journal.display());
    text += &match r.differing {
        0 if r.turns == 0 => "no turns are recorded there".to_owned(),
        0 => format!(
            "{} turns replayed ({} decided again), the same bit for bit",
            r.turns, r.decided
        ),
        n => format!("{n} of {} turns replayed are DIFFERENT", r.turns),
    };
    text += &format!("; outcomes of {} followed again", r.followed);
    if r.missing > 0 {
        text += &format!("; {} were not recorded", r.missing);
    }
    text.push('\n');
    for d in &r.differences {
        text +=
            &format!("  #{} {} (Ballast {}): {}\n", d.n, moment::show(d.at_ms), d.ballast, d.what);
    }
    for note in &report.notes {
        text += &format!("  not read: {note}\n");
    }
    text
}
