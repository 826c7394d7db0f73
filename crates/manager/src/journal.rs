//! The journal of decisions, as the manager keeps it, and what the API shows of it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::{ErrorCode, JournalPage, JournalQuery, JournalView, Why};
use ballast_journal::segment::Header;
use ballast_journal::tell::{self, Query, TellError};
use ballast_journal::{Journal, Settings, now_ms};
use tokio::sync::Semaphore;

use crate::manager::{Failure, Manager};

/// Whoever reads waits so long for what is queued to be written.
const FLUSH: Duration = Duration::from_secs(2);

/// Starts what keeps it; whatever is wrong with its folder is shown, and stops nothing.
pub fn start(settings: Option<&Settings>) -> Option<Journal> {
    let settings = settings?.clone();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let now = now_ms();
    let header = Header {
        ballast: env!("CARGO_PKG_VERSION").into(),
        host,
        pid: std::process::id(),
        manager_ms: now,
        begun_ms: now,
        window_log: 0,
    };
    Journal::start(settings, header)
        .inspect_err(|e| tracing::error!("the journal is not kept: its thread: {e}"))
        .ok()
}

/// None: it is not kept.
pub fn view(journal: Option<&Journal>) -> JournalView {
    let Some(journal) = journal else { return JournalView::default() };
    let health = journal.health();
    JournalView {
        enabled: true,
        folder: journal.settings().folder.clone(),
        bytes: health.bytes,
        limit: journal.settings().limit,
        segments: health.segments,
        written: health.written,
        lost: health.lost,
        trouble: health.trouble,
    }
}

/// What was asked of a VM and has not come true yet.
pub fn under_way(journal: Option<&Journal>, vm: &crate::vm::Vm) -> Vec<String> {
    let aims = journal.map(|journal| journal.under_way(vm.id)).unwrap_or_default();
    aims.iter().map(|aim| tell::under_way(aim, &vm.name)).collect()
}

fn kept(manager: &Manager) -> Result<&Journal, Failure> {
    let none = || Failure::bad("this manager keeps no journal (journal.enabled = false)");
    manager.journal.as_ref().ok_or_else(none)
}

fn failure(error: TellError) -> Failure {
    match error {
        TellError::NoPart { .. } | TellError::TooEarly { .. } => {
            Failure::new(ballast_api::ErrorCode::NotFound, error.to_string())
        }
        TellError::Trouble(_) | TellError::Segment(_) => Failure::internal(error.to_string()),
    }
}

/// Why a VM, which may have left since, had what it had.
///
/// # Errors
/// No journal is kept, or it cannot be read, or tells nothing of that VM at that time.
pub async fn why_at(manager: Arc<Manager>, vm: String, at_ms: u64) -> Result<Why, Failure> {
    read(manager, move |folder| tell::why_at(folder, &vm, at_ms, now_ms())).await
}

/// What the files tell of the turns in question.
///
/// # Errors
/// The limit cannot be, no journal is kept, or it cannot be read.
pub async fn list(manager: Arc<Manager>, query: JournalQuery) -> Result<JournalPage, Failure> {
    let limit = query.limit.unwrap_or(JournalQuery::DEFAULT_LIMIT);
    if !(1..=JournalQuery::MOST).contains(&limit) {
        return Err(Failure::bad(format!("limit: not between 1 and {}", JournalQuery::MOST)));
    }
    let query = Query {
        since_ms: query.since_ms,
        until_ms: query.until_ms,
        vm: query.vm,
        limit: limit as usize,
        all: query.all,
        give_up: None,
    };
    let list = move |folder: &Path| {
        tell::list(folder, &Query { give_up: Some(Instant::now() + READS), ..query })
    };
    read(manager, list).await
}

/// Readings at a time: on a file system that hangs each keeps its thread, of those that all work shares, for good.
const READINGS: usize = 4;
static READING: Semaphore = Semaphore::const_new(READINGS);
/// How long one may look for turns: whoever asked is there no more after 120 s.
const READS: Duration = Duration::from_secs(60);
/// How long one may wait for its turn.
const TURN: Duration = Duration::from_secs(10);

/// Reads the files in a thread of its own: it may take seconds.
async fn read<T: Send + 'static>(
    manager: Arc<Manager>,
    of: impl FnOnce(&Path) -> Result<T, TellError> + Send + 'static,
) -> Result<T, Failure> {
    in_turn(&READING, TURN, move || {
        let journal = kept(&manager)?;
        journal.flush(FLUSH);
        of(&journal.settings().folder).map_err(failure)
    })
    .await
}

/// Does that in a thread that may block, once one of the turns is free.
async fn in_turn<T: Send + 'static>(
    turns: &'static Semaphore,
    patience: Duration,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let Ok(Ok(turn)) = tokio::time::timeout(patience, turns.acquire()).await else {
        let why = format!(
            "too many readings of the journal at a time: no turn within {} s",
            patience.as_secs()
        );
        return Err(Failure::new(ErrorCode::Conflict, why));
    };
    let work = move || {
        let _turn = turn;
        work()
    };
    tokio::task::spawn_blocking(work).await.map_err(|e| Failure::internal(e.to_string()))?
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]
    use std::sync::mpsc;

    use super::*;

    /// A disk that hangs keeps as many threads as there are turns, and a reading that ends, well or not,
    /// gives its turn back.
    #[tokio::test]
    async fn readings_that_hang_keep_no_more_threads_than_there_are_turns() {
        static TURNS: Semaphore = Semaphore::const_new(2);
        const SHORT: Duration = Duration::from_millis(20);
        const LONG: Duration = Duration::from_secs(60);
        let hang = || {
            let (disk, answers) = mpsc::channel::<()>();
            let reading = tokio::spawn(in_turn(&TURNS, LONG, move || {
                answers.recv().map_err(|e| Failure::internal(e.to_string()))
            }));
            (disk, reading)
        };
        let (first, second) = (hang(), hang());
        while TURNS.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = in_turn(&TURNS, SHORT, || Ok(())).await.expect_err("there is no turn");
        assert_eq!(refused.code, ErrorCode::Conflict);

        first.0.send(()).unwrap();
        first.1.await.unwrap().unwrap();
        in_turn(&TURNS, LONG, || Ok(())).await.unwrap();
        drop(second.0);
        second.1.await.unwrap().expect_err("it came to nothing");
        assert_eq!(TURNS.available_permits(), 2);
    }
}
