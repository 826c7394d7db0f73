//! What page sharing would save: the present pages of guests are read and counted by content.
//!
//! It only reads, and only pages that are there: an absent page is not touched, so nothing is
//! allocated, swapped in or waited for. A page that leaves in the moment between the look and the
//! read is passed over where a userfaultfd watches it, as in every VM that is paged; elsewhere the
//! kernel brings it back. Pages of one hash count as equal without being compared: of
//! n pages, n² / 2^65 pairs are expected to be taken for equal wrongly, once in 50,000
//! readings of 100 GiB.
//!
//! | file | concept |
//! | --- | --- |
//! | `ram` | which mappings of a process are its guest's RAM |
//! | `process` | the present pages of one process |
//! | `store` | the files of pages that are shared already |
//! | `count` | zero, repeated inside, repeated across |
//! | `pace` | the rate limit, and how far the reading is |

#![warn(missing_docs)]

mod count;
mod pace;
mod process;
mod ram;
mod store;

use std::hash::{BuildHasher, RandomState};

use ballast_sharing::Hasher;
use ballast_units::Bytes;
use serde::Serialize;

pub use count::Repeated;
pub use pace::{Pace, Progress};
pub use process::Process;
pub use ram::Claims;

use count::{Contents, Sorted, across};

/// Why a process cannot be estimated.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum EstimateError {
    #[error("there is no process {pid}")]
    Gone { pid: u32 },
    #[error(
        "process {pid} may not be read: {source} (it takes root, or CAP_SYS_PTRACE, or its own \
         user where ptrace_scope allows it)"
    )]
    Refused { pid: u32, source: std::io::Error },
    #[error("process {pid} has no mapping of {min} or more that could be a guest's RAM")]
    NoRam { pid: u32, min: Bytes },
    #[error("process {pid} maps the RAM of process {by}, which is counted already")]
    Counted { pid: u32, by: u32 },
    #[error("process {pid}: {what}: {source}")]
    Read { pid: u32, what: &'static str, source: std::io::Error },
}

/// One process. Bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessEstimate {
    /// Its number.
    pub pid: u32,
    /// Its name, where it is one of the manager's VMs.
    pub vm: Option<String>,
    /// The mappings that were taken for guest RAM.
    pub guest_ram: u64,
    /// What of them is there and could be read. All that follows is among it.
    pub present: u64,
    /// Pages full of zeros.
    pub zero: u64,
    /// All but one of each content that occurs more than once here, zero pages apart.
    pub repeated_inside: u64,
    /// Backed by common pages already; all of them where the stores may be opened.
    pub shared_now: u64,
    /// Present by the kernel's word, and gone when it was to be read.
    pub unread: u64,
}

/// All processes together. Bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    /// The mappings that were taken for guest RAM.
    pub guest_ram: u64,
    /// What of them is there and could be read.
    pub present: u64,
    /// Would be dropped, whatever the salts.
    pub zero: u64,
    /// Would be saved by sharing inside each process alone.
    pub repeated_inside: u64,
    /// Would be saved if all had one salt; `repeated_inside` is among it.
    pub repeated_across: u64,
    /// Backed by common pages already.
    pub shared_now: u64,
    /// Gone before it was read.
    pub unread: u64,
}

/// What sharing would save.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// One by one, in the order they were read.
    pub processes: Vec<ProcessEstimate>,
    /// All together.
    pub total: Total,
    /// The contents with the most copies, most first, zero pages apart.
    pub most_repeated: Vec<Repeated>,
}

/// Reads one process after the other; `tell` hears after every MiB how far it is. Those that end meanwhile are
/// left out, and returned by number.
///
/// # Errors
/// What the kernel refuses, other than for a process that ended.
pub fn estimate(
    processes: Vec<Process>,
    pace: &mut Pace,
    mut tell: impl FnMut(Progress),
) -> Result<(Estimate, Vec<u32>), EstimateError> {
    let hasher = Hasher::new(&RandomState::new().hash_one(0u8).to_le_bytes(), "estimate");
    let mut all = Estimate::default();
    let mut ended = Vec::new();
    let mut contents: Vec<Sorted> = Vec::new();
    for process in processes {
        let mut found = Contents::new(hasher.clone());
        let read = match process.read(&mut found, pace, &mut tell) {
            Ok(read) => read,
            Err(EstimateError::Gone { pid }) => {
                ended.push(pid);
                continue;
            }
            Err(e) => return Err(e),
        };
        let zero = found.zero();
        let sorted = found.sorted();
        all.processes.push(ProcessEstimate {
            pid: process.pid(),
            vm: process.vm,
            guest_ram: read.guest_ram.0,
            present: read.present.bytes().0,
            zero: zero.bytes().0,
            repeated_inside: sorted.repeated().bytes().0,
            shared_now: read.shared_now.bytes().0,
            unread: read.unread.bytes().0,
        });
        contents.push(sorted);
    }
    let (repeated_across, most_repeated) = across(&contents);
    let sum = |f: fn(&ProcessEstimate) -> u64| all.processes.iter().map(f).sum();
    all.total = Total {
        guest_ram: sum(|p| p.guest_ram),
        present: sum(|p| p.present),
        zero: sum(|p| p.zero),
        repeated_inside: sum(|p| p.repeated_inside),
        repeated_across: repeated_across.bytes().0,
        shared_now: sum(|p| p.shared_now),
        unread: sum(|p| p.unread),
    };
    all.most_repeated = most_repeated;
    Ok((all, ended))
}
