//! Workloads that run inside sample guests, and the guests' init.
//!
//! One static binary: as process 1 it is the guest's init ([`init`]); otherwise its first argument
//! names a workload. Every workload checks the memory or the files that it uses, and reports in
//! lines of `@ballast {json}` on standard output, which in a guest is the serial console.

mod agent;
mod args;
mod compute;
mod dbench;
mod files;
mod idle;
mod init;
mod json;
mod latency;
mod meminfo;
mod memory;
mod office;
mod pace;
mod page;
mod pattern;
mod reader;
mod report;
mod row;
mod service;
mod share;
mod simple;
mod store;
mod torture;
mod toucher;
mod zipf;

use std::process::ExitCode;

use args::Args;

const HELP: &str = "ballast-guest WORKLOAD [OPTIONS]: workloads of Ballast's sample guests

  toucher        an active set that rises and falls in memory that is checked on every touch
                 --min-mb 40 --max-mb 120 --period 60 --phase 0 --cycle 1.5 --scrub 50
                 --pattern sine|square|steps:50,100,250@30s  --seconds 0 (for ever)
  files          files with known content, written once, then read back and checked
                 --dir /tmp --mb 64 --file-kb 1024 --period 60 --phase 0 --rate-mb 40 --seconds 0
                 --busy 60 --rest 0 (once, after so long, it reads nothing for so long)
  idle           fills memory, works, then goes idle  --mb 80 --busy 15 --every 20 --seconds 0
  reader         writes --mb, then reads its first --block-mb round-robin  --rate-mb 0 --seconds 0
  verify-torture threads that write, check, free and refill pages as fast as they can
                 --mb 64 --seconds 60 --threads 3 --until-total-mb 0 (ends when the guest has so much)
  share-torture  the same with pages of few different contents, which a host may share: writes,
                 copies, frees, and single bytes of what was left alone
                 --mb 48 --seconds 60 --threads 2 --contents 16 --rest 5 --seed 11
  compute        sorts, compresses, searches: rounds per second  --mb 8 --seconds 0 --seed 1 --every 3
  service        a service from /disk, and a client that checks its answers
                 --kind postgresql|nginx|lighttpd|redis|memcached --mb 16 --rate 50 --seconds 0
  store          a keyed store: a table in a file, sessions in memory, both checked, by Zipf's law
                 --dir /disk --mb 64 --sessions-mb 16 --rate 0 (transactions/s) --reads 4
                 --zipf 0.9 --every 2 --seconds 0 --seed 1
  office         a user of several programs, who waits for each action and thinks between them
                 --programs 6 --program-mb 12 --touch 96 --think 0.4 --every 2 --seconds 0
  agent          qemu-guest-agent from /disk, at the VM's port for it
  dbench         dbench from /disk  --clients 40 --seconds 20 --repeat 1 --dir /disk
                 --load client.txt|unflushed.txt --every 0 (throughput of every so many seconds)
  hog            takes memory and keeps it  --mb 100 --seconds 0
  dirty          writes pages all the time  --mb 50 --rate-mb 50 --seconds 0
  report         /proc/meminfo, once or every --every seconds

Every workload takes --delay S: seconds to wait before it starts; and --when-total-mb N: it waits until the guest
has so much memory.";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        return init::run();
    }
    let mut words = std::env::args().skip(1);
    let Some(name) = words.next() else {
        eprintln!("{HELP}");
        return ExitCode::from(2);
    };
    match run(&name, words.collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            report::failed(&name, &message);
            eprintln!("ballast-guest {name}: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: &str, words: Vec<String>) -> Result<(), String> {
    if matches!(name, "help" | "--help" | "-h") {
        println!("{HELP}");
        return Ok(());
    }
    let mut args = Args::parse(words)?;
    let delay = args.seconds("delay", 0.0)?;
    let total = args.number("when-total-mb", 0u64)?;
    let workload: fn(Args) -> Result<(), String> = match name {
        "toucher" => toucher::run,
        "files" => files::run,
        "idle" => idle::run,
        "reader" => reader::run,
        "verify-torture" => torture::run,
        "share-torture" => share::run,
        "compute" => compute::run,
        "service" => service::run,
        "store" => store::run,
        "office" => office::run,
        "dbench" => dbench::run,
        "agent" => agent::run,
        "hog" => simple::hog,
        "dirty" => simple::dirty,
        "report" => simple::report,
        _ => return Err(format!("no workload '{name}' (see ballast-guest help)")),
    };
    std::thread::sleep(delay);
    while meminfo::total_mb()? < total {
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    workload(args)
}
