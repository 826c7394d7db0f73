//! The table `[journal]`: whether decisions are kept, where, and how much of them.

use std::path::{Path, PathBuf};

use ballast_journal::Settings;
use ballast_journal::journal::LEAST;
use ballast_units::Bytes;
use serde::Deserialize;

use crate::layout::{JOURNAL, RUN_DIR, SERVICE_JOURNAL};
use crate::limits::Wrong;

/// As it is written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    enabled: Option<bool>,
    folder: Option<PathBuf>,
    limit: Option<String>,
}

const DEFAULT_LIMIT: u64 = 64 << 20;

/// Checks the table: `None` keeps no journal.
///
/// # Errors
/// The key, and what is wrong with its value.
pub(super) fn check(table: &Table, run_dir: &Path) -> Result<Option<Settings>, Wrong> {
    let limit = match &table.limit {
        None => DEFAULT_LIMIT,
        Some(text) => text.parse::<Bytes>().map_err(|e| ("journal.limit", e.to_string()))?.0,
    };
    if limit < LEAST {
        let what = format!("{} is below {}", Bytes(limit), Bytes(LEAST));
        return Err(("journal.limit", what));
    }
    let folder = match &table.folder {
        Some(folder) => std::path::absolute(folder)
            .map_err(|e| ("journal.folder", format!("{}: {e}", folder.display())))?,
        None if run_dir == Path::new(RUN_DIR) => SERVICE_JOURNAL.into(),
        None => run_dir.join(JOURNAL),
    };
    Ok((table.enabled != Some(false)).then_some(Settings { folder, limit }))
}
