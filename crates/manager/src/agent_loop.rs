//! The agent of one guest, asked every few seconds for the guest's memory pressure. It may be missing,
//! slow or hostile: every question has a deadline, and nothing waits for this task.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::RunState;
use ballast_qemu::{AgentError, GuestAgent};
use tokio::time::MissedTickBehavior;

use crate::inputs::AgentReport;
use crate::sync::lock;
use crate::vm::Vm;

/// The kernel's averages are over ten seconds.
const TURN: Duration = Duration::from_secs(5);
/// Of being connected. A guest that is short of memory is slow.
const DEADLINE: Duration = Duration::from_secs(4);
/// Of the question. One that is broken off may leave a file open in the agent, which has room for few: nobody else waits.
const PATIENCE: Duration = Duration::from_secs(20);
/// So long it is not asked again after a question that was broken off, or a port that told nonsense; twice as long after
/// the next, up to the second.
const REST: Duration = Duration::from_secs(15);
const LONGEST_REST: Duration = Duration::from_secs(1920);

/// Ends with the VM.
pub async fn run(vm: Arc<Vm>, socket: std::path::PathBuf) {
    // QEMU has made it as its umask says; the folder is closed to others already.
    let private = std::fs::Permissions::from_mode(0o600);
    if let Err(e) = std::fs::set_permissions(&socket, private) {
        tracing::warn!(vm = vm.name, "{}: {e}", socket.display());
    }
    let mut agent = None;
    let mut rest = Rest::default();
    let mut turn = tokio::time::interval(TURN);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = vm.process.exited() => return,
            _ = turn.tick() => {}
        }
        // A guest that stands still answers nothing, and what it said last is its last word.
        if vm.shown_state() == RunState::Running && !rest.is_on(Instant::now()) {
            step(&vm, &socket, &mut agent, &mut rest).await;
        }
    }
}

/// How long an agent is left alone.
#[derive(Default)]
struct Rest {
    until: Option<Instant>,
    last: Duration,
}

impl Rest {
    fn is_on(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
    /// A question was broken off, or what came was no answer.
    fn begin(&mut self, now: Instant) {
        self.last = (self.last * 2).clamp(REST, LONGEST_REST);
        self.until = Some(now + self.last);
    }
    /// One was answered.
    fn end(&mut self) {
        *self = Rest::default();
    }
}

async fn step(vm: &Vm, socket: &Path, agent: &mut Option<GuestAgent>, rest: &mut Rest) {
    let was_there = agent.is_some();
    let result = ask(socket, agent).await;
    match &result {
        Ok(_) => rest.end(),
        Err(e) if calls_for_rest(e, was_there || agent.is_some()) => rest.begin(Instant::now()),
        Err(_) => {}
    }
    if result.as_ref().is_err_and(|e| !e.is_refusal()) {
        *agent = None;
    }
    let mut report = lock(&vm.agent);
    let report = report.get_or_insert_default();
    match result {
        Ok(pressure) => {
            if report.pressure.is_none() {
                tracing::info!(vm = vm.name, "its guest reports memory pressure");
            }
            *report = AgentReport { pressure: Some((Instant::now(), pressure)), trouble: None };
        }
        Err(e) => {
            let trouble = e.to_string();
            if report.trouble.as_ref() != Some(&trouble) {
                tracing::debug!(vm = vm.name, "{trouble}");
            }
            report.trouble = Some(trouble);
        }
    }
}

/// `was_asked`: it was there, and had a question.
fn calls_for_rest(error: &AgentError, was_asked: bool) -> bool {
    match error {
        AgentError::Deadline(_) => was_asked,
        // A guest that sends without end would have it read at every turn.
        AgentError::Noise { .. } => true,
        _ => false,
    }
}

async fn ask(
    socket: &Path,
    agent: &mut Option<GuestAgent>,
) -> Result<ballast_qemu::MemoryPressure, AgentError> {
    let agent = match agent {
        Some(agent) => agent,
        None => agent.insert(GuestAgent::connect(socket, DEADLINE).await?),
    };
    agent.memory_pressure(PATIENCE).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::{Asked, VmParams};
    use ballast_units::Pages;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn a_port_that_is_flooded_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            while stream.write_all(&b"\xff\n".repeat(1000)).await.is_ok() {}
        });
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let vm = Vm::of_tests("a", dir.path().into(), size, params);
        let (mut agent, mut rest) = (None, Rest::default());
        step(&vm, &socket, &mut agent, &mut rest).await;
        assert_eq!((agent.is_none(), rest.last), (true, REST));
        let trouble = lock(&vm.agent).as_ref().and_then(|report| report.trouble.clone()).unwrap();
        assert!(trouble.contains("bytes that came"), "{trouble}");
    }

    #[test]
    fn who_was_asked_nothing_and_said_nothing_is_tried_again() {
        let late = || AgentError::Deadline(DEADLINE);
        let noise = AgentError::Noise { bytes: 1, source: late().into() };
        let refusal = AgentError::Refused { command: "c", why: String::new() };
        let rests = [(late(), false, false), (late(), true, true), (noise, false, true)];
        for (error, was_asked, rests) in rests.into_iter().chain([(refusal, true, false)]) {
            assert_eq!(calls_for_rest(&error, was_asked), rests, "{error}");
        }
    }

    #[test]
    fn an_agent_that_is_too_slow_is_asked_less_and_less_often() {
        let (mut rest, now) = (Rest::default(), Instant::now());
        assert!(!rest.is_on(now));
        let mut rests = Vec::new();
        for _ in 0..9 {
            rest.begin(now);
            rests.push(rest.last.as_secs());
            assert!(rest.is_on(now + rest.last / 2) && !rest.is_on(now + rest.last));
        }
        assert_eq!(rests, [15, 30, 60, 120, 240, 480, 960, 1920, 1920]);
        rest.end();
        assert!(!rest.is_on(now));
        rest.begin(now);
        assert_eq!(rest.last, REST);
    }
}
