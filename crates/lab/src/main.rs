use std::process::ExitCode;

use anyhow::{Context, Result};
use ballast_lab::{bench, demo, experiments, image, say};
use clap::{Parser, Subcommand};

/// Sample guests of Ballast: the demo, experiments, benchmarks
#[derive(Parser)]
#[command(name = "ballast-lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch and build what sample guests boot, and print where it is
    Image {
        /// A kernel package instead of the one in the cache or the newest
        #[arg(long, value_name = "PACKAGE")]
        kernel_package: Option<String>,
    },
    /// Guests with different workloads, overcommitted, under one manager
    Demo(demo::DemoArgs),
    /// Measure one of the sources' results again
    Experiment(experiments::ExperimentArgs),
    /// Benchmarks on real guests
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ballast-lab: {}", format!("{error:#}").replace('\n', " | "));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<bool> {
    // One thread: the manager's parent-death signal is tied to the thread that starts it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("tokio runtime")?;
    match command {
        Command::Image { kernel_package } => {
            let image = image::prepare(kernel_package.as_deref())?;
            say::line(&format!("package {}", image.package));
            say::line(&format!("kernel  {}", image.kernel.display()));
            say::line(&format!("initrd  {}", image.initrd.display()));
            Ok(true)
        }
        Command::Demo(args) => runtime.block_on(demo::run(&args)),
        Command::Experiment(args) => runtime.block_on(experiments::run(&args)),
        Command::Bench(args) => runtime.block_on(bench::run(&args)),
    }
}
