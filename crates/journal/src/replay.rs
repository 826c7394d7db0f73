//! Feeds recorded inputs to the policy again and compares, bit for bit.

use ballast_policy::{Decision, Snapshot};
use ballast_units::VmId;

use crate::outcome::{Outcome, Tracker};
use crate::reader::{Reader, Sourced};
use crate::segment::SegmentError;
use crate::turn::{Names, encode, name_of};

/// A turn that does not come out as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// Number of the turn, and milliseconds since 1970.
    pub n: u64,
    /// When it was decided, milliseconds since 1970.
    pub at_ms: u64,
    /// Version of Ballast that recorded it.
    pub ballast: String,
    /// What differs first.
    pub what: String,
}

/// What came of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Replayed {
    /// Turns that were compared, repeats included.
    pub turns: u64,
    /// Of those, turns that were decided again; repeats have the inputs of the turn before.
    pub decided: u64,
    /// Turns whose outcomes were followed again: those of managers recorded from their first turn
    /// on without a gap.
    pub followed: u64,
    /// Turns that were not recorded, by the gaps between those that were.
    pub missing: u64,
    /// Turns that came out otherwise.
    pub differing: u64,
    /// The first [`MOST`] of these.
    pub differences: Vec<Difference>,
}

/// So many differences are described.
pub const MOST: usize = 20;

/// Replays all that `reader` gives. `decide` is [`ballast_policy::decide`], unless a test wants
/// another.
///
/// # Errors
/// When a decision cannot be decoded. Segments that end early are the reader's to tell.
pub fn replay(
    reader: &mut Reader,
    mut decide: impl FnMut(Snapshot) -> Decision,
) -> Result<Replayed, SegmentError> {
    let mut replayed = Replayed::default();
    let mut run = Run::default();
    for turn in reader {
        replayed.turns += 1;
        replayed.missing += run.advance(&turn);
        if turn.again && run.decided_before {
            run.follow(&turn, None, &mut replayed);
            continue;
        }
        let recorded = turn.decision()?;
        let again = decide(recorded.snapshot.clone());
        replayed.decided += 1;
        run.decided_before = true;
        let (was, is) = (encode(&recorded), encode(&again));
        if was.is_err() || is.is_err() || was.ok() != is.ok() {
            replayed.differ(&turn, difference(&recorded, &again, &turn.names));
        } else if run.state.is_some_and(|state| state != recorded.snapshot.before) {
            let what = format!(
                "begins in state {}, not where the turn before ended",
                recorded.snapshot.before
            );
            replayed.differ(&turn, what);
        }
        run.state = Some(recorded.state);
        run.follow(&turn, Some(recorded), &mut replayed);
    }
    Ok(replayed)
}

impl Replayed {
    fn differ(&mut self, turn: &Sourced, what: String) {
        self.differing += 1;
        if self.differences.len() < MOST {
            let (n, at_ms) = (turn.moment.n, turn.moment.at_ms);
            let ballast = turn.header.ballast.clone();
            self.differences.push(Difference { n, at_ms, ballast, what });
        }
    }
}

/// The turns of one manager, so far.
#[derive(Default)]
struct Run {
    manager_ms: Option<u64>,
    last: u64,
    /// In which the turn before ended, if it was recorded.
    state: Option<ballast_policy::State>,
    decided_before: bool,
    /// While nothing is missing since the manager's first turn.
    tracker: Option<Tracker>,
    decision: Option<Decision>,
}

impl Run {
    /// Answers how many turns are missing before this one.
    fn advance(&mut self, turn: &Sourced) -> u64 {
        let manager = Some(turn.header.manager_ms);
        let mut missing = 0;
        if self.manager_ms != manager {
            let tracker = (turn.moment.n == 1).then(Tracker::default);
            *self = Run { manager_ms: manager, tracker, ..Run::default() };
        } else if turn.moment.n != self.last + 1 {
            missing = turn.moment.n.saturating_sub(self.last + 1);
            (self.state, self.tracker) = (None, None);
        }
        self.last = turn.moment.n;
        missing
    }

    fn follow(&mut self, turn: &Sourced, decision: Option<Decision>, replayed: &mut Replayed) {
        if decision.is_some() {
            self.decision = decision;
        }
        let (Some(tracker), Some(decision)) = (&mut self.tracker, &self.decision) else { return };
        replayed.followed += 1;
        let outcomes = tracker.observe(turn.moment, decision);
        if outcomes != turn.outcomes {
            let said = |o: &[Outcome]| format!("{o:?}");
            let what = format!(
                "outcomes: {} were recorded, {} follow",
                said(&turn.outcomes),
                said(&outcomes)
            );
            replayed.differ(turn, what);
        }
    }
}

/// The first thing that differs, in the order in which a decision is made.
fn difference(was: &Decision, is: &Decision, names: &Names) -> String {
    if was.state != is.state {
        return format!("state: {} was recorded, {} is decided", was.state, is.state);
    }
    if was.available != is.available {
        let (was, is) = (was.available, is.available);
        return format!("available: {was} was recorded, {is} is decided");
    }
    let bits = |a: &dyn Fn(&Decision) -> Option<Vec<u8>>| a(was) != a(is);
    for i in 0..was.results.len().max(is.results.len()) {
        if bits(&|d| d.results.get(i).and_then(|r| encode(r).ok())) {
            let of = |d: &Decision| format!("{:?}", d.results.get(i));
            let name = at(was, i).map_or_else(|| i.to_string(), |id| name_of(names, id));
            return format!(
                "entitlement of {name}: {} was recorded, {} is decided",
                of(was),
                of(is)
            );
        }
    }
    for i in 0..was.plans.len().max(is.plans.len()) {
        if bits(&|d| d.plans.get(i).and_then(|p| encode(p).ok())) {
            let of = |d: &Decision| format!("{:?}", d.plans.get(i));
            let name = at(was, i).map_or_else(|| i.to_string(), |id| name_of(names, id));
            return format!("plan of {name}: {} was recorded, {} is decided", of(was), of(is));
        }
    }
    "something beside state, entitlements and plans".to_owned()
}

fn at(decision: &Decision, i: usize) -> Option<VmId> {
    decision.snapshot.vms.get(i).map(|vm| vm.demand.id)
}
