//! One file per command: ask the manager, print the answer.

mod attach;
mod config;
mod host;
mod journal;
mod ls;
mod plan;
mod pool;
mod run;
mod set;
mod share;
mod show;
mod sim;
mod stop;
mod why;

use std::fmt::Display;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use ballast_api::client::Client;
use ballast_api::{Salt, VmView};
use clap::CommandFactory;
use serde::Serialize;

use crate::args::{
    Cli, Command, ConfigCommand, HostCommand, JournalCommand, PoolCommand, SaltArgs, ShareCommand,
    VmCommand,
};
use crate::failure::{Failure, one_line};
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
        Command::Pool(PoolCommand::Ls) => pool::ls(&client, out).await,
        Command::Pool(PoolCommand::Show(args)) => pool::show(&client, &args.name, out).await,
        Command::Pool(PoolCommand::Set(args)) => pool::set(&client, args, out).await,
        Command::Pool(PoolCommand::Rm(args)) => pool::rm(&client, &args.name, out).await,
        Command::Config(ConfigCommand::Check(args)) => config::check(&args.file, out),
        Command::Config(ConfigCommand::Reload) => config::reload(&client, out).await,
        Command::Share(ShareCommand::Ls) => share::ls(&client, out).await,
        Command::Share(ShareCommand::Estimate(args)) => share::estimate(&client, args, out).await,
        Command::Why(args) => why::run(&client, &args, out).await,
        Command::Journal(args) => match args.command {
            None => journal::list(&client, &args, out).await,
            Some(JournalCommand::Replay(args)) => journal::replay(&args.paths, out),
            Some(JournalCommand::Trace(args)) => journal::trace(&args, out),
        },
        Command::Plan(args) => plan::run(&args, out),
        Command::Top(args) => top::run(client, &args, cli.json).await,
        Command::Sim(args) => sim::run(&args, out),
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
            printable(&human(answer))
        };
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::output)
    }
}

/// Lines as they are, and nothing that a terminal obeys: what is told of guests, VMMs and files has names in
/// it that these chose.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| *c == '\n' || !c.is_control()).collect()
}

/// A path as the manager, which has another working folder, will understand it.
fn for_manager(path: &Path) -> Result<PathBuf, Failure> {
    let wrong = |e: &dyn Display| Failure::Usage(format!("path '{}': {e}", path.display()));
    let path = std::path::absolute(path).map_err(|e| wrong(&e))?;
    // What is asked is JSON.
    path.to_str().ok_or_else(|| wrong(&"not UTF-8"))?;
    Ok(path)
}

/// The salt that was asked for, on the command line or in a file.
fn salt(args: SaltArgs) -> Result<Option<Salt>, Failure> {
    let Some(path) = args.salt_file else { return Ok(args.salt) };
    let bad = |what: String| Failure::Usage(format!("--salt-file {}: {what}", path.display()));
    let mut text = String::new();
    // A newline of two bytes, and one more to tell that it is too long.
    let most = Salt::LONGEST as u64 + 3;
    std::fs::File::open(&path)
        .and_then(|file| file.take(most).read_to_string(&mut text))
        .map_err(|e| bad(e.to_string()))?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let line = line.strip_suffix('\r').unwrap_or(line);
    Salt::try_from(line).map(Some).map_err(|e| bad(e.to_string()))
}

/// One line each about what a VM was given, with whom it shares if not with itself, and why it is
/// not paged.
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
    if let Some(pool) = &p.pool {
        text.push_str(&format!("{}: in pool {pool}\n", vm.name));
    }
    if vm.sharing.domain.starts_with("salt:") {
        text.push_str(&format!("{}: shares pages in {}\n", vm.name, vm.sharing.domain));
    }
    // A salt that was just changed is another than that of the pages that it shares.
    if let Some(note) = &vm.sharing.note {
        text.push_str(&format!("{}: {}\n", vm.name, one_line(note)));
    }
    if let Some(reason) = table::unpaged_reason(&vm.management) {
        text.push_str(&format!("{}: {}: {reason}\n", vm.name, vm.management.mode));
    }
    text
}

/// " (pid 4711)", where there is a process.
fn pid(vm: &VmView) -> String {
    vm.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_commands_no_terminal() {
        let hostile = "a\u{1b}]0;owned\u{7}\u{9b}2J\r\tb\nc";
        assert_eq!(printable(hostile), "a]0;owned2Jb\nc");
    }
}
