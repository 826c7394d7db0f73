//! `ballastd`: the manager of a host.
//!
//! | what is looked for | where |
//! | --- | --- |
//! | its state, and promises against it | `manager`, `vm`, `charges`, `totals`; locks: `sync` |
//! | VMs come: started here, by somebody else, run already | `lifecycle`, `starts`, `unpaged`, `attach`, `namesakes`, `refused` |
//! | and go, or are started again | `ending`, `exits`, `vm_files` |
//! | shims: their socket and handshakes, and those that come again | `paging`, `handshakes`, `rejoin`, `shim_link` |
//! | how a VMM is looked at, and what follows | `looks`, `keeping`, `past`, `pace`, `reach`, `driver`, `unreadable` |
//! | a manager after another | `restart`, `survey`, `looks_of_files`, `measured`, `records`, `upgrade` |
//! | the policy's turn, and what it is told | `policy_loop`, `kick`, `inputs`, `tools`, `nodes`, `numa`, `rates` |
//! | what a decision does | `balloon_loop`, `hotplug_loop`, `agent_loop`; pages: the pager |
//! | page sharing | `commons`, `domain` |
//! | swap locations | `swap`, `rooms`, `claim`, `former_boots`, `looks_of_disks` |
//! | settings, and their changes | `config`, `reload`, `change`, `limits`, `pools`, `host_set` |
//! | what is shown | `routes`, `views`, `fault_times`, `metrics`, `journal` |
//! | the run folder | `layout`, `run_dir`, `run_room`, `trust`, `whole_file`, `logs` |
//! | held against what the kernel says | `measure`, `vmm_memory`, `own_process` |

mod agent_loop;
mod attach;
mod balloon_loop;
mod change;
mod charges;
mod claim;
mod commons;
mod config;
mod domain;
mod driver;
mod ending;
mod exits;
mod fault_times;
mod former_boots;
mod handshakes;
mod host_set;
mod hotplug_loop;
mod inputs;
mod journal;
mod keeping;
mod kick;
mod layout;
mod lifecycle;
mod limits;
mod logs;
mod looks;
mod looks_of_disks;
mod looks_of_files;
mod manager;
mod measure;
mod measured;
mod metrics;
mod namesakes;
mod nodes;
mod numa;
mod own_process;
mod pace;
mod paging;
mod past;
mod policy_loop;
mod pools;
mod rates;
mod reach;
mod records;
mod refused;
mod rejoin;
mod reload;
mod restart;
mod rooms;
mod routes;
mod run_dir;
mod run_room;
mod shim_link;
mod starts;
mod survey;
mod swap;
mod sync;
mod tools;
mod totals;
mod trust;
mod unpaged;
mod unreadable;
mod upgrade;
mod views;
mod vm;
mod vm_files;
mod vmm_memory;
mod whole_file;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ballast_shim_proto::Listener;
use ballast_units::Bytes;
use clap::Parser;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::config::{Config, Overrides};
use crate::manager::{Ending, Manager};
use crate::reload::Source;
use crate::run_dir::Folders;

/// A disk that does not answer does not keep the manager from ending.
const JOURNAL_END: Duration = Duration::from_secs(2);
/// How long a thread that has panicked rests.
const ANEW: Duration = Duration::from_secs(1);

/// The memory manager of a Linux/KVM host: hands out, measures, targets and reclaims the memory of
/// its guests.
#[derive(Parser, Debug)]
#[command(name = "ballastd", version, max_term_width = 100)]
struct Args {
    /// Configuration file (TOML); the options below override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Machine memory that guests may use together, such as 384M or 12G [default: the host's
    /// memory less a reserve of a fifth, at least 1 GiB]
    #[arg(long, value_name = "SIZE")]
    budget: Option<Bytes>,
    /// Folder of sockets and of each VM's state; on a tmpfs [default: /run/ballast]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Folder of swap files, on a disk; several are named in the configuration file
    /// [default: /var/lib/ballast/swap, or swap in --run-dir]
    #[arg(long, value_name = "DIR")]
    swap_dir: Option<PathBuf>,
    /// Socket of the API [default: api.sock in --run-dir]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The library that is preloaded into VMMs [default: beside this program, or in
    /// /usr/lib/ballast]
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,
    /// Idle-memory tax rate, from 0 to below 1 [default: 0.75]
    #[arg(long, value_name = "RATE")]
    tax: Option<f64>,
    /// Pages sampled per period [default: 100]
    #[arg(long, value_name = "N")]
    samples: Option<u32>,
    /// Sampling period, seconds of VM execution time [default: 30]
    #[arg(long, value_name = "SECONDS")]
    sample_period: Option<f64>,
    /// Stop all VMs when the manager is ended by SIGTERM or SIGINT. Without it they stay, pausing at
    /// their next fault until a manager comes back
    #[arg(long)]
    stop_vms_on_exit: bool,
    /// Take over from a ballastd that runs on the same folders: it is asked to leave its VMs, which
    /// pause at most until this one has them. With none there, a start as any other
    #[arg(long)]
    take_over: bool,
    /// How long --take-over gives the running ballastd to leave; after that it stays, and this one ends
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, requires = "take_over",
        value_parser = seconds)]
    take_over_within: f64,
    /// Look through all books of a VM before it is taken over, as debug builds do; for tests
    #[arg(long, hide = true)]
    check_takeovers: bool,
    /// Check the configuration and exit
    #[arg(long)]
    check: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(s) if (0.1..=3600.0).contains(&s) => Ok(s),
        _ => Err(format!("'{text}' is not a number of seconds between 0.1 and 3600")),
    }
}

/// Exit status where VMs were to be stopped and do not end: to be started again would not help.
const VMS_LEFT: u8 = 3;

fn main() -> ExitCode {
    let args = Args::parse();
    let (filter, refused) = log_filter(std::env::var_os("BALLAST_LOG").as_deref());
    // Of a log that cannot be written (a terminal that was hung up, a full disk) it would say so on standard error, and
    // panic where that cannot be written either.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let ansi = colours(std::io::stderr().is_terminal(), std::env::var_os("NO_COLOR").as_deref());
    log.with_ansi(ansi).log_internal_errors(false).init();
    if let Some(why) = refused {
        tracing::warn!("BALLAST_LOG: {why}: what is info and above is logged");
    }
    match run(args) {
        Ok(Ending::VmsLeft) => {
            let _ =
                writeln!(std::io::stderr(), "ballastd: VMs do not end, and are left as they are");
            ExitCode::from(VMS_LEFT)
        }
        Ok(_) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "ballastd: {}", in_one_line(&e));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes. Some tell theirs themselves: those are not told again.
fn in_one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}

/// What is logged: `info` and above, unless more or less is asked for; and what is wrong with what was asked for. A single
/// word that is no level would be taken for the name of a module, and let nothing through.
fn log_filter(asked: Option<&OsStr>) -> (EnvFilter, Option<String>) {
    let filter = |text: &str| {
        let word = text.chars().all(char::is_alphanumeric);
        if word && text.parse::<LevelFilter>().is_err() {
            return Err(format!("'{text}' is none of off, error, warn, info, debug, trace"));
        }
        EnvFilter::try_new(text).map_err(|e| format!("'{text}': {e}"))
    };
    let default = || EnvFilter::new("info");
    match asked.filter(|asked| !asked.is_empty()) {
        None => (default(), None),
        Some(asked) => match asked.to_str().ok_or("not UTF-8".to_owned()).and_then(filter) {
            Ok(filter) => (filter, None),
            Err(why) => (default(), Some(why)),
        },
    }
}

/// Whether the log is in colours: their codes are for a terminal, whose user may not want them (`NO_COLOR`). In a file or
/// the system's journal they stand between the words that are looked for.
fn colours(terminal: bool, no_color: Option<&OsStr>) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

fn run(args: Args) -> anyhow::Result<Ending> {
    let overrides = Overrides {
        budget: args.budget,
        run_dir: args.run_dir,
        swap_dir: args.swap_dir,
        socket: args.socket,
        shim: args.shim,
        tax: args.tax,
        samples: args.samples,
        sample_period: args.sample_period,
        check_takeovers: args.check_takeovers,
    };
    let source = Source { file: args.config.clone(), overrides: overrides.clone() };
    let config = Config::load(args.config.as_deref(), overrides)?;
    if args.check {
        if let Some(missing) = swap::missing(&config) {
            anyhow::bail!(missing);
        }
        let mut out = std::io::stdout();
        let said = writeln!(out, "configuration is good: budget {}", config.budget);
        said.and_then(|()| out.flush()).context("standard output")?;
        return Ok(Ending::LeaveVms);
    }
    // Everything that is made from here on is for this user alone.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    own_process::prepare();
    // While there is nothing open that a child must not have.
    if let Err(e) = ballast_qemu::launcher::prepare() {
        tracing::warn!("QEMUs are started by one who has all that ballastd has open: {e}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    // Before anything takes long: it would end the process. What it asks for is done once there is somebody to do it.
    let hup = {
        let _entered = runtime.enter();
        signal(SignalKind::hangup()).context("SIGHUP")?
    };
    let made = Folders::make(&config)?;
    // Held to the end: what is left of this manager then is threads that wait for a disk, with VMs that have no other manager
    // before they have ended.
    let take_over = args.take_over.then(|| Duration::from_secs_f64(args.take_over_within));
    let lock = runtime.block_on(upgrade::lock(&config, take_over));
    let lock = lock.inspect_err(|_| made.leave())?;
    made.make_again(&config)?;
    let served = runtime.block_on(serve(config.clone(), source, hup, args.stop_vms_on_exit));
    match &served {
        // What did not end keeps its files, and what is common.
        Ok(Ending::VmsStopped | Ending::VmsLeft) => made.clear(&config),
        Ok(_) => {}
        Err(_) => made.undo(&config),
    }
    runtime.shutdown_timeout(Duration::from_secs(2));
    // Closing it is not enough: a QEMU whose program hangs before it is there has it open, too.
    if let Err(e) = rustix::fs::flock(&lock, rustix::fs::FlockOperation::Unlock) {
        tracing::warn!("giving up the run folder: {e}");
    }
    served
}

async fn serve(
    config: Config,
    source: Source,
    hup: Signal,
    stop_vms_on_exit: bool,
) -> anyhow::Result<Ending> {
    // From the first moment: an end in order, however early it is asked for.
    let mut signals = Signals::catch(hup)?;
    let survey = survey::survey(&config.run_dir).context("VMs of a former manager")?;
    run_dir::set_format(&config.run_dir)?;
    let manager = Manager::new(config, source)?;
    let config = &manager.config();
    let waiting = restart::announce(&manager, survey).context("VMs of a former manager")?;
    let is_first = waiting.is_empty() && manager.vms().is_empty();
    match swap::missing(config).or_else(|| manager.swap.refused()) {
        // They wait for a manager, and not all of them for what is missing.
        Some(missing) if !is_first => {
            tracing::error!("{missing}");
        }
        Some(missing) => anyhow::bail!(missing),
        None => {}
    }
    let shims = bind_shims(config)?;
    let (listener, socket) = bind_one(config, !is_first)?;
    let threads = start_threads(&manager, shims)?;
    for vm in waiting {
        tokio::spawn(restart::take_over(manager.clone(), vm));
    }
    let server = tokio::spawn(answer(manager.clone(), listener));
    // Whoever started it need not listen.
    let mut out = std::io::stdout();
    let _ = writeln!(out, "ready: {}", socket.display()).and_then(|()| out.flush());
    // A unit of systemd waits for it.
    if let Err(e) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::warn!("telling the service manager that it is ready: {e}");
    }
    let budget = manager.host.ledger.budget();
    tracing::info!("budget {budget}, socket {}", socket.display());
    if let Some(why) = ballast_uffd::missing() {
        tracing::error!("no VM can be paged here: {why}");
    }
    let room = run_room::of(&config.run_dir);
    let too_little = [
        config::of_huge_pages(config, budget),
        is_first
            .then(|| {
                config::of_what_is_available(budget, ballast_qemu::process::available_memory())
            })
            .flatten(),
        room.and_then(|room| run_room::too_small(&room, budget.bytes())),
    ];
    too_little.into_iter().flatten().for_each(|told| tracing::warn!("{told}"));

    let ending = until_ended(&manager, &mut signals, stop_vms_on_exit).await;
    manager.set_stopping();
    // The answer to the request that ended us is on its way.
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.abort();
    for thread in threads {
        if thread.join().is_err() {
            tracing::error!("a thread of the manager had panicked");
        }
    }
    if let Some(journal) = &manager.journal {
        journal.close(JOURNAL_END);
    }
    let _ = std::fs::remove_file(&socket);
    leave_all(&manager);
    // Before the run folder is: who takes over finds all that it needs.
    manager.swap.let_go();
    Ok(ending)
}

/// The manager's own threads, which work for all VMs.
fn start_threads(manager: &Arc<Manager>, shims: Listener) -> anyhow::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    let mut thread = |name: &'static str, body: Box<dyn Fn() + Send>| -> anyhow::Result<()> {
        let m = manager.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || keep_up(name, ANEW, || m.is_stopping(), body));
        threads.push(thread.with_context(|| format!("starting the {name} thread"))?);
        Ok(())
    };
    let m = manager.clone();
    thread("policy", Box::new(move || policy_loop::run(&m)))?;
    let m = manager.clone();
    thread("measure", Box::new(move || measure::run(&m)))?;
    let m = manager.clone();
    thread("unreadable", Box::new(move || unreadable::run(&m)))?;
    let m = manager.clone();
    thread("shims", Box::new(move || paging::serve(&m, &shims)))?;
    let m = manager.clone();
    thread("logs", Box::new(move || logs::watch(&m)))?;
    Ok(threads)
}

/// A VM is waited for so long: one whose disk does not answer keeps all others' guests from the next manager.
const LEAVING: Duration = Duration::from_secs(10);

/// Leaves what is paged for the next manager. All VMs at once: one whose shim hangs is waited for. What is not left in time
/// is, as after a crash, once this process has ended: its shim has no other manager before.
fn leave_all(manager: &Manager) {
    let (done, left) = std::sync::mpsc::channel();
    let mut leaving = BTreeSet::new();
    for vm in manager.vms() {
        let (its, done) = (vm.clone(), done.clone());
        let thread = std::thread::Builder::new().name("leave".into());
        let spawned = thread.spawn(move || {
            leave(&its);
            // Who waited may have given up.
            let _ = done.send(its.name.clone());
        });
        match spawned {
            Ok(_) => _ = leaving.insert(vm.name.clone()),
            Err(e) => {
                tracing::error!(vm = vm.name, "a thread that leaves it: {e}");
                leave(&vm);
            }
        }
    }
    drop(done);
    let end = Instant::now() + LEAVING;
    while let Ok(name) = left.recv_timeout(end.saturating_duration_since(Instant::now())) {
        leaving.remove(&name);
    }
    for name in leaving {
        tracing::error!(vm = name, "not left in order within {} s: as it is", LEAVING.as_secs());
    }
}

/// Does the work of one of the manager's threads, from its beginning again `anew` after it has panicked: without the
/// policy, say, the others would go on half, and ending all of it would stop every guest.
fn keep_up(name: &str, anew: Duration, has_ended: impl Fn() -> bool, body: impl Fn()) {
    while catch_unwind(AssertUnwindSafe(&body)).is_err() && !has_ended() {
        // What makes logging panic is not to end it either.
        let say = || tracing::error!("the {name} thread has panicked: it begins anew");
        let _ = catch_unwind(AssertUnwindSafe(say));
        std::thread::sleep(anew);
    }
}

/// Leaves a VM for the next manager, if it is paged.
fn leave(vm: &vm::Vm) {
    // While its guest is still served.
    if vm.paged().is_some() {
        measured::note(vm);
    }
    if let Some(paged) = vm.take_paged() {
        paged.leave();
        tracing::info!(vm = vm.name, "left for the next manager");
    }
}

struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn catch(hup: Signal) -> anyhow::Result<Signals> {
        let term = signal(SignalKind::terminate()).context("SIGTERM")?;
        let int = signal(SignalKind::interrupt()).context("SIGINT")?;
        Ok(Signals { term, int, hup })
    }
}

async fn until_ended(manager: &Arc<Manager>, signals: &mut Signals, stop_vms: bool) -> Ending {
    let mut ending = manager.ending.subscribe();
    let signalled = loop {
        tokio::select! {
            _ = ending.wait_for(|e| *e != Ending::Running) => break false,
            _ = signals.term.recv() => break true,
            _ = signals.int.recv() => break true,
            _ = signals.hup.recv() => {
                let manager = manager.clone();
                tokio::task::spawn_blocking(move || {
                    if let Err(e) = run_dir::reopen(&manager.config()) {
                        tracing::error!("who may reach the shims' socket: {e:#}");
                    }
                    match manager.reload() {
                        Ok(done) => tracing::info!("{}: read again", done.file),
                        Err(e) => tracing::error!("{e}"),
                    }
                });
            }
        }
    };
    if !signalled {
        return *ending.borrow();
    }
    if stop_vms {
        return manager.stop_all().await;
    }
    manager.leaving()
}

async fn answer(manager: Arc<Manager>, listener: UnixListener) {
    if let Err(e) = axum::serve(listener, routes::router(manager)).await {
        tracing::error!("the API: {e}");
    }
}

/// With the lock held, a socket that is there is a dead manager's.
fn bind_shims(config: &Config) -> anyhow::Result<Listener> {
    let path = &config.run_dir.join(layout::SHIM_SOCKET);
    let _ = std::fs::remove_file(path);
    let listener = Listener::bind(path).with_context(|| format!("socket {}", path.display()))?;
    run_dir::open_socket(config)?;
    Ok(listener)
}

/// The configured socket of the API. Where that cannot be and guests wait for this manager, the run folder's.
fn bind_one(config: &Config, are_waited_for: bool) -> anyhow::Result<(UnixListener, PathBuf)> {
    let (wanted, other) = (&config.socket, config.run_dir.join(layout::API_SOCKET));
    match bind_api(wanted) {
        Err(e) if are_waited_for && *wanted != other => {
            let listener = bind_api(&other).with_context(|| format!("{e:#}"))?;
            tracing::error!("the API is at {}, for there are VMs, and: {e:#}", other.display());
            Ok((listener, other))
        }
        bound => bound.map(|listener| (listener, wanted.clone())),
    }
}

fn bind_api(path: &Path) -> anyhow::Result<UnixListener> {
    if path.exists() && std::os::unix::net::UnixStream::connect(path).is_ok() {
        anyhow::bail!("another ballastd answers at {}", path.display());
    }
    let named = || format!("socket {}", path.display());
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            anyhow::bail!("socket {}: something that is no socket is there", path.display())
        }
        Ok(_) => std::fs::remove_file(path).with_context(named)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).with_context(named)?;
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, mode).with_context(named)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let told = config::ConfigError::Read {
            path: "x.toml".into(),
            source: std::io::Error::other("it hides"),
        };
        let error = anyhow::Error::new(told).context("here");
        assert_eq!(in_one_line(&error), "here: configuration x.toml: it hides");
        let plain = anyhow::Error::new(std::io::Error::other("it\nhides")).context("socket s");
        assert_eq!(in_one_line(&plain), "socket s: it hides");
    }

    #[test]
    fn what_is_logged_is_what_was_asked_for_or_info() {
        let told = |asked: &str| {
            let (filter, refused) = log_filter(Some(OsStr::new(asked)));
            (filter.to_string(), refused)
        };
        assert_eq!(log_filter(None).0.to_string(), "info");
        for plain in ["debug", "WARN", "off", "ballastd=debug,info", "ballastd::looks=trace"] {
            let (filter, refused) = told(plain);
            assert!(refused.is_none(), "{refused:?}");
            assert_eq!(filter.to_lowercase(), plain.to_lowercase());
        }
        assert_eq!(told(""), ("info".to_owned(), None));
        for wrong in ["warning", "verbose", "info=loud", "a=b=c"] {
            let (filter, refused) = told(wrong);
            assert!(filter == "info" && refused.is_some_and(|why| why.contains(wrong)), "{wrong}");
        }
    }

    #[test]
    fn a_log_has_colours_on_a_terminal_that_may_have_them_and_nowhere_else() {
        assert!(colours(true, None) && colours(true, Some(OsStr::new(""))));
        assert!(!colours(true, Some(OsStr::new("1"))));
        assert!(!colours(false, None) && !colours(false, Some(OsStr::new(""))));
    }

    #[test]
    fn a_thread_that_panics_begins_anew_until_the_manager_ends() {
        let runs = Cell::new(0);
        let body = || {
            runs.set(runs.get() + 1);
            assert!(runs.get() > 2, "as it should");
        };
        keep_up("good", Duration::ZERO, || false, body);
        assert_eq!(runs.get(), 3);
        runs.set(0);
        keep_up("bad", Duration::ZERO, || true, body);
        assert_eq!(runs.get(), 1);
    }

    #[test]
    fn a_thread_begins_anew_where_saying_so_panics() {
        let writer = || -> std::io::Stderr { panic!("there is no log") };
        let log = tracing_subscriber::fmt().with_writer(writer).finish();
        let runs = Cell::new(0);
        let body = || {
            runs.set(runs.get() + 1);
            assert!(runs.get() > 2, "as it should");
        };
        tracing::subscriber::with_default(log, || {
            keep_up("mute", Duration::ZERO, || false, body);
        });
        assert_eq!(runs.get(), 3);
    }
}
