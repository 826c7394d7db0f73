//! The journal of decisions: how it is kept, and its turns.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::StateName;

/// The journal of decisions. Sizes in bytes; the counts are since the manager was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalView {
    /// Whether one is kept.
    pub enabled: bool,
    /// Folder of its files.
    #[schema(value_type = String)]
    pub folder: PathBuf,
    /// What its files take together now.
    pub bytes: u64,
    /// The most that its files may take together.
    pub limit: u64,
    /// Files.
    pub segments: u64,
    /// Turns that were written.
    pub written: u64,
    /// Turns that were not recorded: the writer was behind, or the disk failed.
    pub lost: u64,
    /// What keeps it from being written now: "No space left on device". Nothing else stops for it.
    pub trouble: Option<String>,
}

/// One turn of the policy loop, as the journal tells it. Moments in milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TurnView {
    /// The manager's count of its turns, from 1.
    pub n: u64,
    /// When it was decided.
    pub at_ms: u64,
    /// Microseconds that deciding took.
    pub took_us: u64,
    /// What caused it: "period", "free memory moved from high to soft".
    pub trigger: String,
    /// In which it ended.
    pub state: StateName,
    /// Bytes not handed out.
    pub free: u64,
    /// The free memory that reclamation aims for, bytes.
    pub goal: u64,
    /// VMs that it decided about.
    pub vms: u32,
    /// What is different from the turn before, a sentence each.
    pub changes: Vec<String>,
    /// What earlier turns had asked and ended with this one, a sentence each.
    pub outcomes: Vec<String>,
    /// So many turns behind it were the same.
    pub repeats: u64,
}

/// Turns, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalPage {
    /// The turns.
    pub turns: Vec<TurnView>,
    /// There are older ones that were asked for.
    pub more: bool,
    /// What of the journal could not be read.
    pub notes: Vec<String>,
}

/// Which turns are asked for: the newest of those that match. Moments in milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalQuery {
    /// Only turns of this moment and later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Only turns up to this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// Only turns that changed something of this VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// At most so many, 1 to 10,000 (20).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Turns that changed nothing, too.
    #[serde(default)]
    pub all: bool,
}

impl JournalQuery {
    /// `limit` where none is given.
    pub const DEFAULT_LIMIT: u32 = 20;
    /// The highest `limit`.
    pub const MOST: u32 = 10_000;

    /// As the query of a URL, with the question mark.
    pub fn to_url(&self) -> String {
        let mut parts = vec![format!("all={}", self.all)];
        parts.extend(self.since_ms.map(|ms| format!("since_ms={ms}")));
        parts.extend(self.until_ms.map(|ms| format!("until_ms={ms}")));
        parts.extend(self.limit.map(|n| format!("limit={n}")));
        parts.extend(
            self.vm.as_deref().map(|vm| format!("vm={}", crate::client::encoded(vm, b"._-"))),
        );
        format!("?{}", parts.join("&"))
    }
}
