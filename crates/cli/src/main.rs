//! `ballast`: the command line of Ballast and its live view. Talks to `ballastd` only through its
//! API; holds no state.

// What says something beside the answer says it by `aside`: where nobody can be told, the command goes on.
#![cfg_attr(not(test), deny(clippy::print_stderr))]

mod args;
mod aside;
mod commands;
mod failure;
mod figures;
mod moment;
mod parse;
mod progress;
mod saved;
mod table;
mod top;

use std::process::ExitCode;

use clap::Parser;

use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) if is_answer(&e) => {
            // Help and version; a closed pipe behind them is no error.
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
        Err(e) => return fail(&failure::usage(&e), asked_for_json()),
    };
    let json = cli.json;
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(f) if f.is_closed_pipe() => ExitCode::SUCCESS,
        Err(f) => fail(&f, json),
    }
}

fn run(cli: args::Cli) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| Failure::Io { what: "the event loop", source })?;
    runtime.block_on(commands::dispatch(cli))
}

fn fail(failure: &Failure, json: bool) -> ExitCode {
    aside::line(failure.report(json));
    ExitCode::from(failure.exit_code())
}

fn is_answer(e: &clap::Error) -> bool {
    use clap::error::ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion,
    };
    matches!(e.kind(), DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand)
}

/// Whether `--json` was given on a line that could not be parsed.
fn asked_for_json() -> bool {
    std::env::args_os().skip(1).take_while(|a| a != "--").any(|a| a == "--json")
}
