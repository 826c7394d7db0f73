//! `ballast-lab`: the commands behind `./run`, `./experiment` and `./bench`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use ballast_lab::{bench, demo, experiments, image, peers, results, say};
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
        /// Also the disk with services
        #[arg(long)]
        services: bool,
    },
    /// Guests with different workloads, overcommitted, under one manager
    Demo(demo::DemoArgs),
    /// Measure one of the sources' results again
    Experiment(experiments::ExperimentArgs),
    /// Make docs/results/README.md of what experiments and benchmarks wrote
    Results(results::ResultsArgs),
    /// Benchmarks on real guests
    Bench(bench::BenchArgs),
    /// The process whose memory `bench sharing` is about
    #[command(hide = true)]
    Holder(bench::sharing::HolderArgs),
    /// The process whose memory `bench faults` is about
    #[command(hide = true)]
    Faulter(bench::faults::FaulterArgs),
    /// One of the many processes of `bench scale`
    #[command(hide = true)]
    Sleeper(bench::scale::SleeperArgs),
    /// Holds swap space for a peer
    #[command(hide = true)]
    SwapKeeper(peers::KeeperArgs),
    /// Puts KSM's settings back after `bench sharing`
    #[command(hide = true)]
    KsmKeeper,
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
    match command {
        Command::Holder(args) => return bench::sharing::hold(&args).map(|()| true),
        Command::Faulter(args) => return bench::faults::fault(&args).map(|()| true),
        Command::Sleeper(args) => return bench::scale::sleep(&args).map(|()| true),
        Command::SwapKeeper(args) => return peers::keep(&args),
        Command::Results(args) => return results::run(&args).map(|()| true),
        Command::KsmKeeper => return bench::sharing::keep_ksm().map(|()| true),
        _ => {}
    }
    // One thread: the manager's parent-death signal is tied to the thread that starts it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("tokio runtime")?;
    match command {
        Command::Image { kernel_package, services } => {
            let image = image::prepare(kernel_package.as_deref())?;
            say::line(&format!("package {}", image.package));
            say::line(&format!("kernel  {}", image.kernel.display()));
            say::line(&format!("initrd  {}", image.initrd.display()));
            if services {
                say::line(&format!("services {}", image::services_disk(&image)?.display()));
            }
            Ok(true)
        }
        Command::Demo(args) => runtime.block_on(demo::run(&args)),
        Command::Experiment(args) => runtime.block_on(experiments::run(&args)),
        Command::Bench(args) => runtime.block_on(bench::run(&args)),
        // Done above.
        _ => Ok(true),
    }
}
