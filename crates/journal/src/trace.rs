//! A journal as loads for the simulator: what each VM used, as CSV (docs/simulator.md).
//!
//! ```text
//! time,vm,active,consumed
//! 0,db1,104857600,209715200
//! ```
//!
//! Time in seconds since the first line; active and consumed memory in bytes, as the policy saw them.
//! A VM that was short had less than it wanted: its `consumed` is what it was left.

use std::collections::HashMap;
use std::io::Write;

use crate::reader::Reader;
use crate::tell::TellError;
use crate::turn::name_of;

/// What of a journal.
#[derive(Clone, Copy, Debug)]
pub struct Excerpt {
    /// Milliseconds since 1970, both included.
    pub since_ms: Option<u64>,
    /// Only what was recorded up to this moment.
    pub until_ms: Option<u64>,
    /// A VM has a line no sooner than so long after its last, milliseconds.
    pub every_ms: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Traced {
    /// Lines that were written, without the heading.
    pub lines: u64,
    /// VMs that are in them.
    pub vms: u64,
    /// From the first line to the last, seconds.
    pub span_s: f64,
}

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TraceError {
    #[error(transparent)]
    Journal(#[from] TellError),
    #[error("{0}")]
    Write(#[from] std::io::Error),
}

/// # Errors
/// When a decision cannot be decoded, or `out` cannot be written. Segments that end early are the
/// reader's to tell.
pub fn trace(
    reader: &mut Reader,
    excerpt: Excerpt,
    out: &mut impl Write,
) -> Result<Traced, TraceError> {
    writeln!(out, "time,vm,active,consumed")?;
    let (mut begun, mut latest) = (None, 0);
    let mut lines = 0;
    // When each VM had its last line.
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut decision = None;
    for turn in reader {
        if !turn.again || decision.is_none() {
            decision = Some(turn.decision().map_err(TellError::from)?);
        }
        let at = turn.moment.at_ms;
        let wanted = excerpt.since_ms.is_none_or(|since| at >= since)
            && excerpt.until_ms.is_none_or(|until| at <= until);
        // The host's clock may have been set back.
        if !wanted || at < latest {
            continue;
        }
        for vm in decision.iter().flat_map(|d| &d.snapshot.vms) {
            let name = name_of(&turn.names, vm.demand.id);
            if last.get(&name).is_some_and(|before| at < before + excerpt.every_ms) {
                continue;
            }
            let begin = *begun.get_or_insert(at);
            latest = at;
            let seconds = (at - begin) as f64 / 1e3;
            let (active, consumed) = (vm.demand.active.bytes(), vm.consumed.bytes());
            writeln!(out, "{seconds},{name},{},{}", active.0, consumed.0)?;
            last.insert(name, at);
            lines += 1;
        }
    }
    out.flush()?;
    let span_s = begun.map_or(0.0, |begin| (latest - begin) as f64 / 1e3);
    Ok(Traced { lines, vms: last.len() as u64, span_s })
}
