//! The journal in plain words: why a VM had what it had at some time, and what was decided when. For
//! the manager's API and, from the same files, for a command line without a manager.

use std::path::Path;
use std::sync::Arc;

use ballast_api::{JournalPage, TurnView, Why};
use ballast_policy::{Decision, Reason, State};
use std::time::{Duration, Instant};

use ballast_units::VmId;

use crate::changes::{Told, changes};
use crate::date::utc;
use crate::outcome::{Aim, End, Outcome, UnderWay, is_let_down};
use crate::reader::{Reader, Sourced, Trouble};
use crate::segment::SegmentError;
use crate::turn::{Names, encode, name_of};

/// Why the journal has no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum TellError {
    #[error("journal {0}")]
    Trouble(#[from] Trouble),
    #[error("journal: {0}")]
    Segment(#[from] SegmentError),
    #[error("the journal holds nothing of that time or before{}{unread}", begins(.begins_ms))]
    TooEarly { begins_ms: Option<u64>, unread: String },
    #[error("{vm} had no part in what was decided then; these VMs had: {others}{unread}")]
    NoPart { vm: String, others: String, unread: String },
}

fn begins(ms: &Option<u64>) -> String {
    ms.map_or_else(String::new, |ms| format!("; it begins at {}", utc(ms)))
}

/// For so long after a decision its outcome is looked for.
const PATIENCE_MS: u64 = 3_600_000;
/// VMs that an error names.
const NAMED: usize = 8;

/// Why `vm` had the memory it had at `at_ms` (milliseconds since 1970): the decision in force then,
/// and what came of it. `now_ms` is for its age.
///
/// # Errors
/// When the journal cannot be read, has nothing of that time, or the VM was not there.
pub fn why_at(folder: &Path, vm: &str, at_ms: u64, now_ms: u64) -> Result<Why, TellError> {
    let Found { hit, after, mut segments, troubles } = in_force(Reader::open(folder)?, at_ms)?;
    let decision = hit.decision()?;
    let mut states = decision.snapshot.vms.iter().map(|state| state.demand.id);
    let Some(id) = states.find(|id| hit.names.get(id).is_some_and(|name| name == vm)) else {
        let notes = troubles.iter().chain(segments.iter().flat_map(Reader::troubles));
        return Err(no_part(vm, &decision, &hit.names, unread(notes)));
    };
    let turns = after.into_iter().chain(segments.iter_mut().flatten());
    let mut turns = turns.peekable();
    let gap = gap(&hit, turns.peek(), at_ms, now_ms);
    let outcomes = came_of(&hit, &decision, id, turns);
    let lost = segments.into_iter().flat_map(Reader::into_troubles);
    let troubles = troubles.into_iter().chain(lost).map(|trouble| format!("not read: {trouble}"));
    let (verdict, steps) = decision.explain(id, |id| name_of(&hit.names, id));
    Ok(Why {
        vm: vm.to_owned(),
        age_s: now_ms.saturating_sub(hit.moment.at_ms) as f64 / 1e3,
        trigger: decision.trigger(),
        verdict,
        steps,
        at_ms: Some(hit.moment.at_ms),
        outcomes,
        notes: troubles.chain(gap).collect(),
    })
}

/// After a last turn so much may pass until the next: several of its pauses, and what waits to be written.
const NEXT_MS: u64 = 15_000;

/// Why a decision after `hit` may have been in force at `at_ms`, if that is later and nothing is known of the time between.
/// A time to come asks for the last turn that there is.
fn gap(hit: &Sourced, next: Option<&Sourced>, at_ms: u64, now_ms: u64) -> Option<String> {
    let later = at_ms.checked_sub(hit.moment.at_ms).filter(|&later| later > 0)?;
    // The next manager says nothing of what this one did at its end.
    let next = next.filter(|next| next.header.manager_ms == hit.header.manager_ms);
    let what = match next.map(|next| missed(hit, next)) {
        Some(0) => return None,
        Some(missed) => format!("{missed} turns after it were not recorded, or cannot be read"),
        None if at_ms > now_ms || later <= NEXT_MS => return None,
        None => format!("nothing was recorded in the {} s after it, or can be read", later / 1000),
    };
    Some(format!("{what}: a later one may have been in force"))
}

/// Turns between two of one manager that were not recorded.
fn missed(before: &Sourced, next: &Sourced) -> u64 {
    let is_same = before.header.manager_ms == next.header.manager_ms;
    if is_same { next.moment.n.saturating_sub(before.moment.n + 1) } else { 0 }
}

/// The last turn up to a moment, and what is read of the journal behind it.
struct Found {
    hit: Sourced,
    /// The turn behind it, if it is in the same segment.
    after: Option<Sourced>,
    /// The segment that has it, read so far, and those behind that.
    segments: Vec<Reader>,
    /// What could not be opened.
    troubles: Vec<Trouble>,
}

/// The last turn up to `at_ms` of all that can be read.
fn in_force(reader: Reader, at_ms: u64) -> Result<Found, TellError> {
    let begins_ms = reader.begins_ms();
    let (mut segments, troubles) = reader.split();
    let begins_in_time = |segment: &Reader| segment.begins_ms().is_some_and(|ms| ms <= at_ms);
    let mut last = segments.iter().rposition(begins_in_time);
    // From the last one that begins in time further back, where of that nothing can be read.
    while let Some(i) = last {
        let (mut hit, mut after) = (None, None);
        for turn in segments[i].by_ref() {
            if turn.moment.at_ms > at_ms {
                after = Some(turn);
                break;
            }
            hit = Some(turn);
        }
        if let Some(hit) = hit {
            segments.drain(..i);
            return Ok(Found { hit, after, segments, troubles });
        }
        last = i.checked_sub(1);
    }
    let notes = troubles.iter().chain(segments.iter().flat_map(Reader::troubles));
    Err(TellError::TooEarly { begins_ms, unread: unread(notes) })
}

/// What came of what `decision`, that of the turn `hit`, asked, as `turns` behind it tell it.
fn came_of(
    hit: &Sourced,
    decision: &Decision,
    id: VmId,
    turns: impl Iterator<Item = Sourced>,
) -> Vec<String> {
    let mut outcomes: Vec<String> = Vec::new();
    let mut expected = expected(decision, id);
    let (mut last_ms, mut last_n) = (hit.moment.at_ms, hit.moment.n);
    let mut is_all = true;
    // What came true in a turn that was not recorded is told by none behind it.
    let mut lost = 0;
    for turn in turns {
        if expected.is_empty() || turn.header.manager_ms != hit.header.manager_ms {
            break;
        }
        if turn.moment.at_ms > hit.moment.at_ms.saturating_add(PATIENCE_MS) {
            is_all = false;
            break;
        }
        lost += turn.moment.n.saturating_sub(last_n + 1);
        (last_ms, last_n) = (turn.moment.at_ms, turn.moment.n);
        for outcome in &turn.outcomes {
            let concerns = outcome.vm.is_none_or(|of| of == id) && outcome.since <= hit.moment.n;
            let kind = std::mem::discriminant(&outcome.aim);
            if concerns && let Some(i) = expected.iter().position(|e| *e == kind) {
                expected.remove(i);
                outcomes.push(ended(outcome, &hit.names));
            }
        }
    }
    if !expected.is_empty() {
        let later = seconds(last_ms.saturating_sub(hit.moment.at_ms));
        let known = if is_all { "the last that is known" } else { "which is as far as was looked" };
        outcomes.push(match lost {
            0 => format!("What else was asked had not come true {later} later, {known}."),
            _ => format!(
                "Of what else was asked it is not known: {lost} turns within the {later} after it were not recorded."
            ),
        });
    }
    outcomes
}

/// What else may have had the answer, as the end of an error.
fn unread<'a>(troubles: impl Iterator<Item = &'a Trouble>) -> String {
    troubles.map(|trouble| format!("; not read: {trouble}")).collect()
}

/// The aims that are under way after a decision, by their kinds.
fn expected(decision: &Decision, id: VmId) -> Vec<std::mem::Discriminant<Aim>> {
    let kind = |aim: Aim| std::mem::discriminant(&aim);
    let (zero, mut found) = (ballast_units::Pages::ZERO, Vec::new());
    if decision.state != State::High {
        found.push(kind(Aim::Relief { worst: decision.state }));
    }
    let rows = decision.snapshot.vms.iter().zip(&decision.results).zip(&decision.plans);
    for ((vm, result), plan) in rows.filter(|(_, plan)| plan.id == id) {
        if is_let_down(vm, result.target, plan) {
            found.push(kind(Aim::Grow { from: zero, target: zero }));
        }
        if matches!(plan.reason, Reason::Reclaim { .. }) {
            found.push(kind(Aim::Reclaim { from: zero, leave: zero }));
        }
        if plan.block {
            found.push(kind(Aim::Block));
        }
    }
    found
}

fn no_part(vm: &str, decision: &Decision, names: &Names, unread: String) -> TellError {
    let all: Vec<String> =
        decision.snapshot.vms.iter().map(|state| name_of(names, state.demand.id)).collect();
    let mut others = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    match all.len() {
        0 => others = "none".to_owned(),
        n if n > NAMED => others.push_str(&format!(" and {} more", n - NAMED)),
        _ => {}
    }
    TellError::NoPart { vm: vm.to_owned(), others, unread }
}

/// An outcome as a sentence.
pub fn ended(outcome: &Outcome, names: &Names) -> String {
    let took = seconds(outcome.took_ms);
    let now = outcome.now;
    let name = outcome.vm.map_or_else(|| "the host".to_owned(), |id| name_of(names, id));
    match (outcome.aim, outcome.end) {
        (_, End::Gone) => {
            format!("{name} ended, or was managed no more, {took} after it was asked.")
        }
        (Aim::Relief { worst }, _) => format!(
            "The host was back in state high, with {now} free, {took} after it had left it; the worst was {worst}."
        ),
        (Aim::Reclaim { from, leave }, End::Reached) => format!(
            "{name} came from {from} down to the {leave} that were to be left of it {took} after it was asked first."
        ),
        (Aim::Reclaim { leave, .. }, End::Dropped) => format!(
            "{took} after it was asked first, {name} had {now} instead of {leave} and was asked no more."
        ),
        (Aim::Grow { target, .. }, End::Reached) => {
            format!("{name} had its target of {target} {took} after its balloon was let down.")
        }
        (Aim::Grow { target, .. }, End::Dropped) => format!(
            "{took} after its balloon was let down, {name} used {now} of its target of {target} and wanted no more, or was to give some back."
        ),
        (Aim::Block, _) => format!("{name}'s allocations went on after {took}."),
    }
}

/// What has not ended, as a sentence.
pub fn under_way(aim: &UnderWay, name: &str) -> String {
    let so_far = seconds(aim.for_ms);
    match aim.aim {
        Aim::Relief { worst } => {
            format!("The host left state high {so_far} ago and is not back; the worst was {worst}.")
        }
        Aim::Reclaim { from, leave } => format!(
            "{name} was asked first {so_far} ago, when it had {from}, and is not down to {leave} yet."
        ),
        Aim::Grow { target, .. } => format!(
            "{name}'s balloon was let down {so_far} ago; it does not use its target of {target} yet."
        ),
        Aim::Block => format!("{name}'s allocations have waited for {so_far}."),
    }
}

/// "0.8 s", "3m12s".
fn seconds(ms: u64) -> String {
    match ms {
        0..60_000 => format!("{:.1} s", ms as f64 / 1e3),
        _ => ballast_units::age(Duration::from_millis(ms)),
    }
}

/// Which turns to list. Moments in milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// Only turns of this moment and later.
    pub since_ms: Option<u64>,
    /// Only turns up to this moment.
    pub until_ms: Option<u64>,
    /// Only turns that changed something of this VM.
    pub vm: Option<String>,
    /// The newest of these at most.
    pub limit: usize,
    /// Turns that changed nothing, too.
    pub all: bool,
    /// What was not looked at by then is left out, and the answer says so. None: all is looked at, however long that takes.
    pub give_up: Option<Instant>,
}

impl Query {
    fn gives_up(&self) -> bool {
        self.give_up.is_some_and(|at| Instant::now() >= at)
    }
}

const GAVE_UP: &str = "what is older, for that takes too long: ask for less (--since, --until)";

/// The newest turns that `query` asks for, in their order.
///
/// # Errors
/// When nothing at all of the journal can be read; what else is lost of it is noted in the answer.
pub fn list(folder: &Path, query: &Query) -> Result<JournalPage, TellError> {
    let reader = Reader::open(folder)?;
    let reader = match query.since_ms {
        Some(since) => reader.since(since),
        None => reader,
    };
    let mut page = JournalPage::default();
    let (segments, mut troubles) = reader.split();
    // Of the segments, newest first.
    let mut lost: Vec<Trouble> = Vec::new();
    let mut any = false;
    let mut begun: Option<Begin> = None;
    // Newest segments first, until there are enough.
    for mut segment in segments.into_iter().rev() {
        let Some(mut listed) = list_segment(&mut segment, query)? else {
            (page.more, begun) = (true, None);
            break;
        };
        any |= listed.seen;
        lost.extend(segment.into_troubles().into_iter().rev());
        // What the first turn of the next one changed shows against the last of this one.
        let same = begun.take().map_or(0, |b| b.put(listed.last.as_ref(), query, &mut page));
        match listed.open {
            Open::Begin => listed.begin.iter_mut().for_each(|begin| begin.repeats += same),
            Open::Last => listed.turns.last_mut().into_iter().for_each(|last| last.repeats += same),
            Open::None => {}
        }
        let mut turns = listed.turns;
        turns.append(&mut page.turns);
        page.turns = turns;
        begun = listed.begin;
        if page.turns.len() > query.limit {
            break;
        }
    }
    if let Some(begin) = begun.filter(|_| page.turns.len() <= query.limit) {
        begin.put(None, query, &mut page);
    }
    troubles.extend(lost.into_iter().rev());
    let gave_up = page.more;
    if page.turns.len() > query.limit {
        page.turns.drain(..page.turns.len() - query.limit);
        page.more = true;
    }
    if !any && !gave_up && !troubles.is_empty() {
        return Err(troubles.swap_remove(0).into());
    }
    page.notes = troubles.iter().map(ToString::to_string).collect();
    page.notes.extend(gave_up.then(|| GAVE_UP.to_owned()));
    Ok(page)
}

/// The turn before another: its decision, its number, and whose it was.
struct Before {
    decision: Decision,
    n: u64,
    manager_ms: u64,
    names: Arc<Names>,
}

/// The first turn of a segment, until the one before it is known.
struct Begin {
    turn: Sourced,
    decision: Decision,
    repeats: u64,
}

impl Begin {
    /// Puts it before all that is on the page, if it is asked for. Where it is but a repeat of the turn before, so often that
    /// one was repeated there.
    fn put(mut self, before: Option<&Before>, query: &Query, page: &mut JournalPage) -> u64 {
        let before = before.filter(|last| last.manager_ms == self.turn.header.manager_ms);
        if let Some(last) = before {
            // Who has left is named in the segment before alone.
            let mut names = (*last.names).clone();
            names.extend(self.turn.names.iter().map(|(id, name)| (*id, name.clone())));
            self.turn.names = names.into();
        }
        let before = before.map(|last| (&last.decision, last.n));
        // A drift is followed within one segment.
        let told = &mut Told::default();
        if let Some(mut view) = view(&self.turn, &self.decision, before, query, told) {
            view.repeats = self.repeats;
            page.turns.insert(0, view);
            return 0;
        }
        // Bit for bit, as within a segment.
        let is_repeat = self.turn.outcomes.is_empty()
            && before.is_some_and(|(last, n)| {
                n + 1 == self.turn.moment.n
                    && encode(last).is_ok_and(|last| last == self.turn.bytes())
            });
        if is_repeat { self.repeats + 1 } else { 0 }
    }
}

/// What one segment has of what is asked for.
#[derive(Default)]
struct Listed {
    /// Its first turn, if it may be asked for.
    begin: Option<Begin>,
    turns: Vec<TurnView>,
    /// What its last turn was listed as.
    open: Open,
    /// Its last turn.
    last: Option<Before>,
    /// Whether it has any turn at all.
    seen: bool,
}

/// None: that took too long.
fn list_segment(reader: &mut Reader, query: &Query) -> Result<Option<Listed>, TellError> {
    let mut listed = Listed::default();
    let mut told = Told::default();
    for turn in reader {
        if query.gives_up() {
            return Ok(None);
        }
        listed.seen = true;
        let at_ms = turn.moment.at_ms;
        if query.until_ms.is_some_and(|until| at_ms > until) {
            break;
        }
        let wanted = query.since_ms.is_none_or(|since| at_ms >= since);
        if turn.again {
            match (&listed.open, listed.begin.as_mut(), listed.turns.last_mut()) {
                (Open::Begin, Some(begin), _) if wanted => begin.repeats += 1,
                (Open::Last, _, Some(last)) if wanted => last.repeats += 1,
                _ => {}
            }
            if let Some(last) = &mut listed.last {
                last.n = turn.moment.n;
            }
            continue;
        }
        let decision = turn.decision()?;
        let before = listed.last.as_ref().map(|last| (&last.decision, last.n));
        listed.open = Open::None;
        if wanted && before.is_none() {
            let (turn, decision) = (turn.clone(), decision.clone());
            listed.begin = Some(Begin { turn, decision, repeats: 0 });
            listed.open = Open::Begin;
        } else if wanted && let Some(view) = view(&turn, &decision, before, query, &mut told) {
            listed.turns.push(view);
            listed.open = Open::Last;
        }
        listed.last = Some(Before {
            decision,
            n: turn.moment.n,
            manager_ms: turn.header.manager_ms,
            names: turn.names.clone(),
        });
    }
    Ok(Some(listed))
}

/// Where repeats of the turn before are counted.
#[derive(Default)]
enum Open {
    #[default]
    None,
    Begin,
    Last,
}

fn view(
    turn: &Sourced,
    decision: &Decision,
    before: Option<(&Decision, u64)>,
    query: &Query,
    told: &mut Told,
) -> Option<TurnView> {
    let concerns = |id: Option<VmId>| match (&query.vm, id) {
        (None, _) => true,
        (Some(name), Some(id)) => turn.names.get(&id) == Some(name),
        (Some(_), None) => false,
    };
    let mut said: Vec<String> = Vec::new();
    match before {
        Some((before, n)) => {
            let lost = turn.moment.n.saturating_sub(n + 1);
            if lost > 0 && query.vm.is_none() {
                said.push(format!("{lost} turns before it were not recorded"));
            }
            let changed = changes(before, decision, &turn.names, told);
            said.extend(changed.into_iter().filter(|c| concerns(c.vm)).map(|c| c.text));
        }
        None if turn.moment.n == 1 && query.vm.is_none() => {
            said.push(format!("the manager (version {}) begins", turn.header.ballast));
        }
        None => {}
    }
    let outcomes = turn.outcomes.iter().filter(|o| concerns(o.vm));
    let outcomes: Vec<String> = outcomes.map(|o| ended(o, &turn.names)).collect();
    let snapshot = &decision.snapshot;
    let has_it = query.vm.is_none() || snapshot.vms.iter().any(|vm| concerns(Some(vm.demand.id)));
    if said.is_empty() && outcomes.is_empty() && !(query.all && has_it) {
        return None;
    }
    Some(TurnView {
        n: turn.moment.n,
        at_ms: turn.moment.at_ms,
        took_us: turn.moment.took_us,
        trigger: decision.trigger(),
        state: state_name(decision.state),
        free: snapshot.free.bytes().0,
        goal: snapshot.thresholds.goal().bytes().0,
        vms: snapshot.vms.len() as u32,
        changes: said,
        outcomes,
        repeats: 0,
    })
}

/// A state as the API names it.
pub fn state_name(state: State) -> ballast_api::StateName {
    match state {
        State::High => ballast_api::StateName::High,
        State::Soft => ballast_api::StateName::Soft,
        State::Hard => ballast_api::StateName::Hard,
        State::Low => ballast_api::StateName::Low,
    }
}

#[cfg(test)]
#[path = "tell_tests.rs"]
mod tests;
