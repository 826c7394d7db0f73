//! How a command fails: one line on stderr, and an exit code.
//!
//! | exit code | meaning |
//! | --- | --- |
//! | 1 | the manager refused or failed, a process cannot be estimated, a journal cannot be used or has nothing to replay, trace or plan from, a replay comes out otherwise or a replayed journal is damaged, a scenario or a configuration file is wrong, a VM that no manager has cannot be ended, there is no `ballastd` to check a configuration with, or the output could not be written |
//! | 2 | wrong usage; the manager was not asked |
//! | 3 | no usable answer from the manager: not there, silent, broken off, or not waited for |

use std::io;
use std::path::PathBuf;

use ballast_api::client::ClientError;
use ballast_api::{ErrorBody, ErrorCode};
use ballast_estimate::EstimateError;
use ballast_journal::tell::TellError;
use ballast_offline::OfflineError;
use ballast_planner::PlanError;
use ballast_sim::ScenarioError;
use serde_json::{Value, json};

#[derive(Debug)]
pub enum Failure {
    Usage(String),
    Manager(ClientError),
    /// Reading the memory of a process.
    Estimate(EstimateError),
    /// The VM of this name has ended, and is still known.
    NoProcess(String),
    /// A signal came while a start was waited for, which goes on.
    NotAwaited {
        name: String,
    },
    /// Ending a VM without a manager.
    Offline(OfflineError),
    /// No manager answers, and none noted the VM in the run folder that was looked into.
    Unnoted {
        unreachable: ClientError,
        run_dir: PathBuf,
    },
    /// The configuration is wrong.
    Config(String),
    /// Another program could not be run.
    Program {
        program: PathBuf,
        source: io::Error,
    },
    /// Reading a journal.
    Journal(TellError),
    /// A replay came out otherwise; what is different was printed.
    Differs {
        differing: u64,
        turns: u64,
    },
    /// Turns that could not be replayed, since parts of the journal cannot be read; which was printed.
    Unread {
        files: usize,
    },
    /// No turn is recorded in what was to be replayed.
    NoTurns {
        path: PathBuf,
    },
    /// No VM is in what was to be traced.
    Untraced {
        path: PathBuf,
    },
    /// Planning from journals.
    Plan(PlanError),
    /// A scenario that cannot be simulated.
    Scenario(ScenarioError),
    /// Writing a file that was asked for.
    File {
        path: PathBuf,
        source: io::Error,
    },
    /// Writing the output, or handling the terminal. `what` names which.
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Failure {
        Failure::Manager(e)
    }
}

impl From<EstimateError> for Failure {
    fn from(e: EstimateError) -> Failure {
        Failure::Estimate(e)
    }
}

impl From<TellError> for Failure {
    fn from(e: TellError) -> Failure {
        Failure::Journal(e)
    }
}

impl From<PlanError> for Failure {
    fn from(e: PlanError) -> Failure {
        Failure::Plan(e)
    }
}

impl From<OfflineError> for Failure {
    fn from(e: OfflineError) -> Failure {
        Failure::Offline(e)
    }
}

impl From<ScenarioError> for Failure {
    fn from(e: ScenarioError) -> Failure {
        Failure::Scenario(e)
    }
}

impl Failure {
    pub fn output(source: io::Error) -> Failure {
        Failure::Io { what: "standard output", source }
    }

    pub fn terminal(source: io::Error) -> Failure {
        Failure::Io { what: "the terminal", source }
    }

    /// As the manager would word it, which was asked for all of them.
    pub fn no_such_pool(name: &str) -> Failure {
        let message = format!("no pool named '{name}'");
        Failure::Manager(ClientError::Refused(ErrorBody { code: ErrorCode::NotFound, message }))
    }

    /// The reader of our output closed it, as `head` does: not an error.
    pub fn is_closed_pipe(&self) -> bool {
        let source = match self {
            Failure::Io { source, .. } | Failure::File { source, .. } => source,
            _ => return false,
        };
        source.kind() == io::ErrorKind::BrokenPipe
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Manager(ClientError::Refused(_))
            | Failure::Estimate(_)
            | Failure::NoProcess(_)
            | Failure::Offline(_)
            | Failure::Config(_)
            | Failure::Program { .. }
            | Failure::Journal(_)
            | Failure::Differs { .. }
            | Failure::Unread { .. }
            | Failure::NoTurns { .. }
            | Failure::Untraced { .. }
            | Failure::Plan(_)
            | Failure::Scenario(_)
            | Failure::File { .. }
            | Failure::Io { .. } => 1,
            Failure::Manager(_) | Failure::Unnoted { .. } | Failure::NotAwaited { .. } => 3,
        }
    }

    /// The stable word for the kind of failure: the API's own code where it gave one.
    fn code(&self) -> Value {
        match self {
            Failure::Usage(_) => json!("usage"),
            Failure::Manager(ClientError::Refused(body)) => json!(body.code),
            Failure::Manager(ClientError::Unreachable { .. }) | Failure::Unnoted { .. } => {
                json!("unreachable")
            }
            Failure::Manager(ClientError::Timeout { .. }) => json!("timeout"),
            Failure::NotAwaited { .. } => json!("interrupted"),
            Failure::Manager(ClientError::Broken { .. }) => json!("broken"),
            Failure::Estimate(_) | Failure::NoProcess(_) | Failure::Offline(_) => json!("process"),
            Failure::Config(_) => json!("bad_request"),
            Failure::Journal(_)
            | Failure::Unread { .. }
            | Failure::NoTurns { .. }
            | Failure::Untraced { .. } => json!("journal"),
            Failure::Differs { .. } => json!("differs"),
            Failure::Plan(_) => json!("plan"),
            Failure::Scenario(_) => json!("scenario"),
            Failure::Program { .. } | Failure::File { .. } | Failure::Io { .. } => json!("io"),
        }
    }

    /// One line, whatever the source put into it.
    pub fn message(&self) -> String {
        let text = match self {
            Failure::Usage(text) => text.clone(),
            Failure::Manager(e) => manager_message(e),
            Failure::Estimate(e) => e.to_string(),
            Failure::NoProcess(name) => format!("'{name}' has no process any more"),
            Failure::NotAwaited { name } => {
                format!(
                    "{name}: its start goes on (ballast vm stop {name} calls it off, or ends it when it is there)"
                )
            }
            Failure::Offline(e) => e.to_string(),
            Failure::Unnoted { unreachable, run_dir } => format!(
                "{}; {} has no record of such a VM either (another run folder: --run-dir)",
                manager_message(unreachable),
                run_dir.display()
            ),
            Failure::Config(text) => text.clone(),
            Failure::Program { program, source } => format!("{}: {source}", program.display()),
            Failure::Journal(e) => e.to_string(),
            Failure::Differs { differing, turns } => {
                format!("{differing} of {turns} turns do not come out as they were recorded")
            }
            Failure::Unread { files: 1 } => {
                "a file of the journal could not be read: not all of it was replayed".to_owned()
            }
            Failure::Unread { files } => {
                format!(
                    "{files} files of the journal could not be read: not all of them was replayed"
                )
            }
            Failure::NoTurns { path } => {
                format!("{}: no turns are recorded there", path.display())
            }
            Failure::Untraced { path } => {
                format!("{}: no VM ran in the time that was asked for", path.display())
            }
            Failure::Plan(e) => e.to_string(),
            Failure::Scenario(e) => e.to_string(),
            Failure::File { path, source } => format!("{}: {source}", path.display()),
            Failure::Io { what, source } => format!("{what}: {source}"),
        };
        one_line(&text)
    }

    /// What goes to stderr.
    pub fn report(&self, as_json: bool) -> String {
        if as_json {
            json!({"error": {"code": self.code(), "message": self.message()}}).to_string()
        } else {
            format!("ballast: {}", self.message())
        }
    }
}

/// The client's words, but for the one case in which its advice would be wrong.
pub fn manager_message(error: &ClientError) -> String {
    match error {
        ClientError::Unreachable { socket, source }
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            format!("may not use {}: {source} (it belongs to ballastd's user)", socket.display())
        }
        _ => one_line(&error.to_string()),
    }
}

/// Lines joined by a blank; other control characters dropped.
pub fn one_line(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    joined.chars().filter(|c| !c.is_control()).collect()
}

/// The usage errors of clap in our form: its first paragraph, with its tip behind it.
pub fn usage(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n").map(one_line);
    let first = paragraphs.next().unwrap_or_default();
    let mut line = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
    for tip in paragraphs.filter(|p| p.starts_with("tip: ")) {
        line.push_str(&format!(" ({tip})"));
    }
    Failure::Usage(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_stay_on_one_line_and_carry_no_escapes() {
        assert_eq!(one_line("a\n  b\tc\u{1b}[2J"), "a b c[2J");
    }

    #[test]
    fn a_socket_that_one_may_not_use_is_not_a_manager_to_start() {
        let e = ClientError::Unreachable {
            socket: PathBuf::from("/run/x.sock"),
            source: io::Error::from(io::ErrorKind::PermissionDenied),
        };
        let f = Failure::from(e);
        assert_eq!(f.exit_code(), 3);
        assert!(f.message().contains("/run/x.sock") && !f.message().contains("start it"));
        let report: Value = serde_json::from_str(&f.report(true)).unwrap();
        assert_eq!(report["error"]["code"], "unreachable");
    }
}
