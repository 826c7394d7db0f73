//! One file per command: ask the manager, print the answer.

mod attach;
mod host;
mod ls;
mod run;
mod set;
mod show;
mod stop;
mod why;

use std::io::Write;
use std::path::{Path, PathBuf};

use ballast_api::VmView;
use ballast_api::client::Client;
use clap::CommandFactory;
use serde::Serialize;

use crate::args::{Cli, Command, HostCommand, VmCommand};
use crate::failure::Failure;
use crate::figures::size;
use crate::table;
use crate::top;

pub async fn dispatch(cli: Cli) -> Result<(), Failure> {
    let client = Client::new(cli.socket);
    let out = Output { json: cli.json };
    match cli.command {
        Command::Vm(VmCommand::Run(args)) => run::run(&client, *args, out).await,
        Command::Vm(VmCommand::Attach(args)) => attach::run(&client, args, out).await,
        Command::Vm(VmCommand::Ls) => ls::run(&client, out).await,
        Command::Vm(VmCommand::Show(args)) => show::run(&client, &args.name, out).await,
        Command::Vm(VmCommand::Set(args)) => set::run(&client, args, out).await,
        Command::Vm(VmCommand::Stop(args)) => stop::run(client, args, out).await,
        Command::Host(args) => match args.command {
            None => host::show(&client, out).await,
            Some(HostCommand::Set(args)) => host::set(&client, args, out).await,
        },
        Command::Why(args) => why::run(&client, &args.name, out).await,
        Command::Top(args) => top::run(client, &args, cli.json).await,
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "ballast", &mut script);
            std::io::stdout().lock().write_all(&script).map_err(Failure::output)
        }
    }
}

/// Where and how answers are printed.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    json: bool,
}

impl Output {
    /// The answer as JSON, or as `human` words it.
    pub fn print<T: Serialize>(
        self,
        answer: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        let text = if self.json {
            let json = serde_json::to_string_pretty(answer);
            json.map_err(|e| Failure::output(e.into()))? + "\n"
        } else {
            human(answer)
        };
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::output)
    }
}

/// A path as the manager, which has another working folder, will understand it.
fn for_manager(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::Usage(format!("path '{}': {e}", path.display())))
}

/// One line about what a VM was given, and one about why it is not paged.
fn given(vm: &VmView) -> String {
    let p = &vm.params;
    let mut text = format!(
        "{}: max {}, min {}, {} shares, tax {}\n",
        vm.name,
        size(p.max),
        size(p.min),
        p.shares,
        p.tax
    );
    if let Some(reason) = table::unpaged_reason(&vm.management) {
        text.push_str(&format!("{}: {}: {reason}\n", vm.name, table::mode(vm.management.mode)));
    }
    text
}

/// " (pid 4711)", where there is a process.
fn pid(vm: &VmView) -> String {
    vm.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}
