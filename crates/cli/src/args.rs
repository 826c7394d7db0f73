//! The command line. Everything that can be told wrong from the text alone is refused here, before
//! the manager is asked.

use std::path::PathBuf;
use std::time::Duration;

use ballast_api::{JournalQuery, Salt};
use ballast_units::Bytes;
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::moment;
use crate::parse::{self, Target};

const EXAMPLES: &str = "\
Sizes are whole bytes, or a number with K, M, G or T (powers of 1,024): 256M, 2G.

Examples:
  ballast vm run web --max 256M --min 64M --kernel vmlinuz --initrd guest.cpio
  ballast vm ls
  ballast vm set web --shares 5000 --tax 0.5
  ballast why web
  ballast top

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no answer from ballastd.";

/// Gives each VM of this host its share of machine memory, through ballastd.
#[derive(Debug, Parser)]
#[command(name = "ballast", version, after_help = EXAMPLES)]
pub struct Cli {
    /// Socket of ballastd.
    #[arg(
        long,
        global = true,
        env = "BALLAST_SOCKET",
        value_name = "PATH",
        default_value = ballast_api::DEFAULT_SOCKET,
        help_heading = "Global options"
    )]
    pub socket: PathBuf,
    /// Print the API's JSON; errors become {"error":{"code","message"}} on stderr.
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

fn at_least_one(id: &'static str, of: &[&'static str]) -> ArgGroup {
    ArgGroup::new(id).required(true).multiple(true).args(of)
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start, list, inspect, change and stop VMs.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Show the host: budget, state, thresholds, totals; or change its parameters.
    Host(HostArgs),
    /// Resource pools: groups of VMs that divide what they get among them.
    #[command(subcommand)]
    Pool(PoolCommand),
    /// The manager's configuration file.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Page sharing: what it saves, and what it would save.
    #[command(subcommand)]
    Share(ShareCommand),
    /// Say why a VM has the memory it has.
    Why(WhyArgs),
    /// List what was decided, and what came of it; or replay it.
    Journal(JournalArgs),
    /// Say from recorded history how far memory can be overcommitted.
    Plan(PlanArgs),
    /// Live view of the host and its VMs; a table every interval when not on a terminal.
    Top(TopArgs),
    /// Play a scenario in virtual time, under the manager's own policy; needs no manager.
    Sim(SimArgs),
    /// Print the completion script of a shell.
    #[command(after_help = "Example:\n  ballast completions bash > \
                            /etc/bash_completion.d/ballast")]
    Completions(CompletionsArgs),
}

#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Start a VM under QEMU and manage its memory.
    Run(Box<RunArgs>),
    /// Manage a VM that somebody else started.
    Attach(AttachArgs),
    /// List the VMs.
    Ls,
    /// Show all about one VM.
    #[command(after_help = "Example:\n  ballast vm show web")]
    Show(NameArgs),
    /// Change the parameters of a running VM.
    Set(SetArgs),
    /// Stop a VM: ask the guest to power off, then end it.
    Stop(StopArgs),
}

#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// List the pools.
    Ls,
    /// Show all about one pool.
    Show(PoolArgs),
    /// Define a pool, or change one.
    Set(PoolSetArgs),
    /// Take away what commands said of a pool. One that the configuration file does not define is gone
    /// then; VMs and pools must not be in it.
    Rm(PoolArgs),
}

#[derive(Debug, Args)]
pub struct PoolArgs {
    /// Name of the pool; prod/db is db inside prod.
    #[arg(value_parser = parse::pool)]
    pub name: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
What is not named stays as it is; a new pool has 163840 shares, no min and no max, and is expandable.
Sizes include the overhead memory of the pool's VMs.

Examples:
  ballast pool set prod --shares 400000 --min 8G
  ballast pool set prod/db --min 4G --max 6G --expandable false
  ballast vm set db1 --pool prod/db")]
#[command(group(at_least_one(
    "pool_change",
    &["shares", "min", "max", "no_max", "expandable", "tax", "no_tax"]
)))]
pub struct PoolSetArgs {
    /// Name of the pool; prod/db is db inside prod.
    #[arg(value_parser = parse::pool)]
    pub name: String,
    /// Shares of memory, against its siblings, VMs and pools.
    #[arg(long, value_name = "N", value_parser = parse::shares)]
    pub shares: Option<u32>,
    /// Reservation: guaranteed to its VMs together.
    #[arg(long, value_name = "SIZE")]
    pub min: Option<Bytes>,
    /// Limit to what its VMs use together.
    #[arg(long, value_name = "SIZE")]
    pub max: Option<Bytes>,
    /// Take the limit away.
    #[arg(long, conflicts_with = "max")]
    pub no_max: bool,
    /// Whether its VMs may be promised more than its min, from what its parent has left.
    #[arg(long, value_name = "BOOL")]
    pub expandable: Option<bool>,
    /// Tax on idle memory of its VMs that have no own rate, 0 <= TAX < 1.
    #[arg(long, value_name = "TAX", value_parser = parse::tax, allow_negative_numbers = true)]
    pub tax: Option<f64>,
    /// Take its tax rate away: its parent's counts.
    #[arg(long, conflicts_with = "tax")]
    pub no_tax: bool,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration file as a whole. ballastd need not run.
    #[command(after_help = "Example:\n  ballast config check /etc/ballast.toml")]
    Check(ConfigCheckArgs),
    /// Let ballastd read its file again: all of it counts then, or, when anything is wrong, nothing.
    Reload,
}

#[derive(Debug, Args)]
pub struct ConfigCheckArgs {
    /// The file.
    pub file: PathBuf,
}

#[derive(Debug, Args)]
pub struct NameArgs {
    /// Name of the VM.
    #[arg(value_parser = parse::name)]
    pub name: String,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum AccelArg {
    /// KVM if a trial boot of its kernel prints "Linux version" on its serial port within 5 s, else TCG.
    #[default]
    Auto,
    Kvm,
    Tcg,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum RebootArg {
    /// A guest that reboots is stopped.
    #[default]
    Stop,
    /// A guest that reboots is started again, through admission.
    Restart,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ballast vm run web --max 256M --kernel vmlinuz --initrd guest.cpio --append 'console=ttyS0'
  ballast vm run db --max 1G --min 512M --shares 20000 --kernel vmlinuz \\
    -- -drive file=/srv/db.img,format=raw,if=virtio

QEMU runs in the VM's run folder: paths behind -- must be absolute.")]
pub struct RunArgs {
    /// Name of the VM: 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit.
    #[arg(value_parser = parse::name)]
    pub name: String,
    /// Configured memory, what the guest sees as its RAM: a multiple of 2M, at least 16M.
    #[arg(long, value_name = "SIZE", value_parser = parse::vm_size)]
    pub max: Bytes,
    /// Memory that can be plugged while the guest runs, beside --max, with `vm set --max`; a multiple of 2M. The
    /// guest needs the driver of virtio-mem.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse::hotplug_size)]
    pub hotplug: Bytes,
    /// Guaranteed memory, at most --max; 0: as the configuration says.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub min: Bytes,
    /// Shares of memory [default: as the configuration says, else 10 per MiB of --max].
    #[arg(long, value_name = "N", value_parser = parse::shares)]
    pub shares: Option<u32>,
    /// Tax on idle memory, 0 <= TAX < 1 [default: as the configuration says, else its pool's, else the
    /// host's].
    #[arg(long, value_name = "TAX", value_parser = parse::tax, allow_negative_numbers = true)]
    pub tax: Option<f64>,
    /// Memory charged to the budget for it, beside its pages and what the manager takes for it [default: 0].
    #[arg(long, value_name = "SIZE")]
    pub overhead: Option<Bytes>,
    /// Resource pool that it belongs to [default: as the configuration says, else none].
    #[arg(long, value_name = "POOL", value_parser = parse::pool)]
    pub pool: Option<String>,
    #[command(flatten)]
    pub salt: SaltArgs,
    /// Virtual CPUs, 1 to 255 [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(ballast_api::VmSpec::MOST_VCPUS)))]
    pub vcpus: Option<u32>,
    /// Linux kernel image to boot.
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Initial RAM disk.
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub append: String,
    /// What the guest runs on.
    #[arg(long, value_enum, default_value_t)]
    pub accel: AccelArg,
    /// Leave out the balloon device.
    #[arg(long, conflicts_with = "free_page_reporting")]
    pub no_balloon: bool,
    /// Let the guest report its free pages through the balloon device.
    #[arg(long)]
    pub free_page_reporting: bool,
    /// Give it a port for qemu-guest-agent, over which its memory pressure is read [default: as the
    /// configuration says].
    #[arg(long)]
    pub guest_agent: bool,
    /// Whether its RAM is backed by large pages while memory is plentiful [default: as the configuration
    /// says, by its size].
    #[arg(long, value_name = "on|off", value_parser = parse::switch)]
    pub large_pages: Option<bool>,
    /// What to do when the guest reboots, panics, or is reset by a monitor.
    #[arg(long, value_enum, default_value_t)]
    pub on_reboot: RebootArg,
    /// Where the guest's serial port is written [default: console.log in the VM's run folder].
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// How long to wait for the promised memory to be made free: 30s, 5m, or seconds [default: as the
    /// configuration says, else 60s].
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub wait: Option<Duration>,
    /// The QEMU to run [default: qemu-system-x86_64 from PATH].
    #[arg(long, value_name = "PROGRAM")]
    pub qemu: Option<PathBuf>,
    /// More QEMU arguments, passed as they are; QEMU's working folder is the VM's run folder.
    #[arg(last = true, value_name = "QEMU ARGS")]
    pub extra: Vec<String>,
}

/// The trust domain of page sharing.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct SaltArgs {
    /// Share pages with the VMs that have the same salt, 1 to 256 bytes of text [default: only
    /// inside the VM]. Other users of this host see it in the list of processes.
    #[arg(long, value_name = "TEXT", value_parser = parse::salt)]
    pub salt: Option<Salt>,
    /// The same, read from a file; a newline at its end does not count.
    #[arg(long, value_name = "PATH")]
    pub salt_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The QMP socket must be one that nobody else is using. Only a VM that was started with the shim is
paged; any other is managed by its balloon at best, until it is restarted with the shim, and
`ballast vm ls` says why.

Example:
  ballast vm attach legacy --qmp /run/legacy/qmp.sock --min 128M")]
pub struct AttachArgs {
    /// Name to give the VM.
    #[arg(value_parser = parse::name)]
    pub name: String,
    /// QMP socket of the VM.
    #[arg(long, value_name = "SOCKET")]
    pub qmp: PathBuf,
    /// Guaranteed memory, at most its size; 0: as the configuration says, else nothing.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub min: Bytes,
    /// Shares of memory [default: as the configuration says, else 10 per MiB of its size].
    #[arg(long, value_name = "N", value_parser = parse::shares)]
    pub shares: Option<u32>,
    /// Tax on idle memory, 0 <= TAX < 1 [default: as the configuration says, else its pool's, else the
    /// host's].
    #[arg(long, value_name = "TAX", value_parser = parse::tax, allow_negative_numbers = true)]
    pub tax: Option<f64>,
    /// Resource pool that it belongs to [default: as the configuration says, else none].
    #[arg(long, value_name = "POOL", value_parser = parse::pool)]
    pub pool: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
What is not named stays as it is. All is checked before anything is applied.

Examples:
  ballast vm set web --shares 5000 --min 64M --max 192M
  ballast vm set web --salt-file /etc/ballast/team-blue.salt")]
#[command(group(at_least_one(
    "change",
    &["shares", "min", "max", "tax", "salt", "salt_file", "no_salt", "pool", "no_pool"]
)))]
pub struct SetArgs {
    /// Name of the VM.
    #[arg(value_parser = parse::name)]
    pub name: String,
    /// Shares of memory.
    #[arg(long, value_name = "N", value_parser = parse::shares)]
    pub shares: Option<u32>,
    /// Guaranteed memory. It may be lowered only as far as swap was reserved at the start (size less min): start
    /// with the lowest that you will want, and raise it.
    #[arg(long, value_name = "SIZE")]
    pub min: Option<Bytes>,
    /// A limit below what the VM began with; beyond that, up to --hotplug more is plugged, in steps of 2M.
    #[arg(long, value_name = "SIZE")]
    pub max: Option<Bytes>,
    /// Tax on idle memory, 0 <= TAX < 1.
    #[arg(long, value_name = "TAX", value_parser = parse::tax, allow_negative_numbers = true)]
    pub tax: Option<f64>,
    #[command(flatten)]
    pub salt: SaltArgs,
    /// Take the salt away: share pages only inside the VM.
    #[arg(long, conflicts_with_all = ["salt", "salt_file"])]
    pub no_salt: bool,
    /// Move it into a resource pool.
    #[arg(long, value_name = "POOL", value_parser = parse::pool)]
    pub pool: Option<String>,
    /// Take it out of its pool.
    #[arg(long, conflicts_with = "pool")]
    pub no_pool: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Works without a ballastd, too: the VM's process is found by the record in the run folder, told to end,
and killed if it does not (one that waits in a page fault cannot obey).

Examples:
  ballast vm stop web
  ballast vm stop web --grace 2m
  ballast vm stop web --force")]
pub struct StopArgs {
    /// Name of the VM.
    #[arg(value_parser = parse::name)]
    pub name: String,
    /// How long the guest may take to power itself off: 30s, 500ms, 2m, 1h, or seconds [default: 30s].
    /// Without a ballastd: how long the VMM may take to obey SIGTERM [default: 5s].
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub grace: Option<Duration>,
    /// End it at once, without asking the guest.
    #[arg(long, conflicts_with = "grace")]
    pub force: bool,
    /// Stop the VM of this run folder: by the ballastd that answers at its api.sock, else by the record
    /// there. --socket is not asked then [default: the folder of --socket].
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct HostArgs {
    #[command(subcommand)]
    pub command: Option<HostCommand>,
}

#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Change host-wide parameters.
    Set(HostSetArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  ballast host set --tax 0.75 --budget 8G")]
#[command(group(at_least_one("host_change", &["tax", "no_tax", "budget", "no_budget"])))]
pub struct HostSetArgs {
    /// Tax on idle memory of the VMs that have no own rate, 0 <= TAX < 1.
    #[arg(long, value_name = "TAX", value_parser = parse::tax, allow_negative_numbers = true)]
    pub tax: Option<f64>,
    /// Take back the tax that was set so: what is configured counts again.
    #[arg(long, conflicts_with = "tax")]
    pub no_tax: bool,
    /// Machine memory that guests and overhead may use together.
    #[arg(long, value_name = "SIZE")]
    pub budget: Option<Bytes>,
    /// Take back the budget that was set so: what is configured counts again.
    #[arg(long, conflicts_with = "budget")]
    pub no_budget: bool,
}

#[derive(Debug, Subcommand)]
pub enum ShareCommand {
    /// List what each VM shares, saves and costs.
    Ls,
    /// Read the memory of guests and tell what sharing would save. Nothing is changed.
    Estimate(EstimateArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Reads the pages that are in memory, and no others. It takes the right to trace the processes, which
root has. Processes need not be managed, nor QEMU.

Examples:
  ballast share estimate
  ballast share estimate web db
  ballast share estimate $(pidof qemu-system-x86_64) --rate-mib-s 200")]
pub struct EstimateArgs {
    /// Processes by number, or VMs by name [default: all VMs of the manager].
    #[arg(value_name = "NAME|PID", value_parser = parse::target)]
    pub targets: Vec<Target>,
    /// The smallest piece of memory that is taken for guest RAM.
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    pub min_size: Bytes,
    /// Read no faster than so many MiB per second [default: as fast as it goes].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    pub rate_mib_s: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Keys: q quit, arrows or j/k select a VM, s/m/x/t change its shares, min, max, tax, w why, ? help.
With --json: one line of JSON per interval, {\"host\":...,\"vms\":[...]}.")]
pub struct TopArgs {
    /// Time between two looks: 1, 0.5, 500ms, 2s.
    #[arg(long, value_name = "TIME", value_parser = parse::interval, default_value = "1")]
    pub interval: Duration,
    /// Print one table and end.
    #[arg(long)]
    pub once: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
TIME: -10m (also s, h, d), 14:05 or 14:05:30 (the last one), 2026-03-01T14:05:00Z or with another
offset. Without a ballastd the files are read, those of --journal or where one keeps them.

Examples:
  ballast why web
  ballast why web --at -10m
  ballast why web --at 14:05 --journal /var/lib/ballast/journal")]
pub struct WhyArgs {
    /// Name of the VM. With --at it may be one that has left.
    #[arg(value_parser = parse::name)]
    pub name: String,
    /// Of what was decided last at that time, by the journal [default: now].
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub at: Option<u64>,
    /// Read this journal, a folder or a file, and ask no ballastd.
    #[arg(long, value_name = "PATH")]
    pub journal: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Lists turns of the policy loop that changed something: what caused them, what changed, and what came
of earlier ones. TIME is as of `ballast why --at`.

Examples:
  ballast journal
  ballast journal --vm web --since -1h
  ballast journal --since 14:00 --until 14:05 --all
  ballast journal replay /var/lib/ballast/journal")]
pub struct JournalArgs {
    #[command(subcommand)]
    pub command: Option<JournalCommand>,
    /// Only what concerns this VM.
    #[arg(long, value_name = "NAME", value_parser = parse::name)]
    pub vm: Option<String>,
    /// From this time on.
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub since: Option<u64>,
    /// Up to this time.
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub until: Option<u64>,
    /// The newest so many.
    #[arg(long, value_name = "N", default_value_t = JournalQuery::DEFAULT_LIMIT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(JournalQuery::MOST)))]
    pub limit: u32,
    /// Turns that changed nothing, too.
    #[arg(long)]
    pub all: bool,
    /// Read this journal, a folder or a file, and ask no ballastd.
    #[arg(long, value_name = "PATH")]
    pub journal: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum JournalCommand {
    /// Feed the recorded inputs to the policy again: the decisions must be the same, bit for bit.
    #[command(after_help = "Example:\n  ballast journal replay /var/lib/ballast/journal")]
    Replay(ReplayArgs),
    /// Write what each VM used as CSV, which the simulator plays back (`load.kind = "recorded"`).
    #[command(
        after_help = "Example:\n  ballast journal trace /var/lib/ballast/journal --csv load.csv"
    )]
    Trace(TraceArgs),
}

#[derive(Debug, Args)]
pub struct TraceArgs {
    /// The journal: a folder or a file.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Where to write it.
    #[arg(long, value_name = "FILE")]
    pub csv: PathBuf,
    /// Only what was recorded from this time on (as of `ballast why --at`).
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub since: Option<u64>,
    /// Only what was recorded up to this time.
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub until: Option<u64>,
    /// A VM's lines are at least so far apart.
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "10s")]
    pub every: Duration,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Journals: folders or files.
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Each journal is one host: a folder as ballastd keeps it, or a file of one. What is assumed, and what
the figures mean: docs/planner.md.

Examples:
  ballast plan /var/lib/ballast/journal
  ballast plan --risk 0.1% host-a/ host-b/ --svg curve.svg --csv curve.csv
  ballast plan --risk 1% --demand consumed --since -7d /var/lib/ballast/journal")]
pub struct PlanArgs {
    /// Journals: folders or files, one for each host.
    #[arg(required = true, value_name = "JOURNAL")]
    pub journals: Vec<PathBuf>,
    /// The part of the time in which memory may be short, so that VMs swap in: 1%, 0.001.
    #[arg(long, value_name = "RISK", value_parser = parse::risk, default_value = "1%")]
    pub risk: f64,
    /// What a VM needs: its active memory, or all that it had in memory.
    #[arg(long, value_enum, default_value_t)]
    pub demand: DemandArg,
    /// The length of the slices that time is cut into.
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "60s")]
    pub slot: Duration,
    /// Confidence of the bands, 50% to 99.9%.
    #[arg(long, value_name = "LEVEL", value_parser = parse::level, default_value = "95%")]
    pub confidence: f64,
    /// Only history from this time on (as of `ballast why --at`).
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub since: Option<u64>,
    /// Only history up to this time.
    #[arg(long, value_name = "TIME", value_parser = moment::parse, allow_hyphen_values = true)]
    pub until: Option<u64>,
    /// Of the random draws: the same seed gives the same figures.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write the curve as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the curve as a plot.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum DemandArg {
    /// What it was estimated to use.
    #[default]
    Active,
    /// All that was backed: nothing idle is ever taken away.
    Consumed,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ballast sim scenarios/osdi02-f7.toml --out /tmp/f7
  ballast sim scenarios/fleet.toml --hosts 2000 --seed 7
  ballast sim scenarios/diurnal.toml --policy idle-tax --policy pressure

How scenarios are written, and what is modelled: docs/simulator.md.")]
pub struct SimArgs {
    /// The scenario, in TOML.
    #[arg(value_name = "SCENARIO.toml")]
    pub scenario: PathBuf,
    /// Also write summary.json, vms.csv, series.csv, hosts.csv and plot.svg to this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Another seed than the scenario's; the same seed gives the same result.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Another number of hosts than the scenario's, each with its own random numbers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub hosts: Option<u64>,
    /// Another policy than the scenario's; given several times, they are compared.
    #[arg(long, value_name = "KIND", value_parser = parse::policy)]
    pub policy: Vec<ballast_policy::PolicyKind>,
    /// Threads [default: as many as the machine has processors].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    pub threads: Option<u64>,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_behind_the_dashes_reach_qemu_untouched() {
        let line =
            ["ballast", "vm", "run", "a", "--max", "16M", "--kernel", "k", "--", "-s", "--json"];
        let cli = Cli::try_parse_from(line).unwrap();
        assert!(!cli.json);
        let Command::Vm(VmCommand::Run(run)) = cli.command else { panic!("{:?}", cli.command) };
        assert_eq!(run.extra, ["-s", "--json"]);
        assert_eq!(run.max, Bytes::from_mib(16));
    }

    #[test]
    fn a_change_of_nothing_is_refused() {
        assert!(Cli::try_parse_from(["ballast", "vm", "set", "a"]).is_err());
        assert!(Cli::try_parse_from(["ballast", "host", "set"]).is_err());
        assert!(Cli::try_parse_from(["ballast", "host"]).is_ok());
        assert!(Cli::try_parse_from(["ballast", "vm", "set", "a", "--tax", "0"]).is_ok());
    }
}
