//! From a [`VmSpec`] to the command line and environment of a QEMU whose RAM Ballast can page.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ballast_api::VmSpec;

use crate::{AGENT_PORT, AccelChoice};

/// QOM id of the balloon device in VMs that Ballast starts.
pub const BALLOON_ID: &str = "bal";

/// QOM id of the virtio-mem device in VMs that Ballast starts with memory to plug, and of its memory.
pub const HOTPLUG_ID: &str = "hotplug";
pub(crate) const HOTPLUG_MEMDEV: &str = "hotmem";

/// What no QEMU of Ballast's may do.
pub(crate) const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny";

/// The QEMU that is looked up in PATH when the spec names none.
const DEFAULT_QEMU: &str = "qemu-system-x86_64";

/// Where the files of one VM are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchPaths {
    /// The VM's run folder; QEMU's working directory.
    pub run_dir: PathBuf,
    /// The library to preload, absolute.
    pub shim: PathBuf,
    /// Where the shim finds the manager.
    pub shim_socket: PathBuf,
    /// Where QEMU is to listen for QMP.
    pub qmp_socket: PathBuf,
    /// Where the guest's agent is reached, if the spec asks for its port.
    pub agent_socket: PathBuf,
    /// The file that is the guest's RAM; a memfd of QEMU's own without one.
    pub ram: Option<PathBuf>,
    /// The same of the memory that can be plugged.
    pub hotplug: Option<PathBuf>,
    /// Where the first serial port is written, unless the spec says otherwise.
    pub console: PathBuf,
    /// QEMU's standard output and error.
    pub qemu_log: PathBuf,
}

/// A command that is ready to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What is started.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Added to the environment of the manager.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    pub dir: PathBuf,
    /// Where standard output and error go.
    pub log: PathBuf,
}

/// The command that starts `spec`, which must have passed [`check_spec`](crate::check_spec).
///
/// The RAM is one shared file, a memfd or the one that is given: the only form in which the manager can read
/// it, punch holes into it and map pages of its own over it. A guest that reboots ends its VMM, so that nothing of the
/// old boot stays charged; `panic=-1` makes a guest's panic such a reboot.
pub fn command(spec: &VmSpec, accel: &AccelChoice, paths: &LaunchPaths) -> Launch {
    let mut args = Args::default();
    args.flag("-nodefaults").flag("-no-user-config");
    args.pair("-display", "none");
    args.pair("-name", format!("{},debug-threads=on", spec.name));
    args.pair("-machine", "q35,memory-backend=mem");
    args.accelerator(spec, accel);
    args.memory(spec, paths);
    args.pair("-smp", spec.vcpus.unwrap_or(1).to_string());
    args.pair("-qmp", with_path("unix:", &paths.qmp_socket, ",server=on,wait=off"));
    args.console(spec, paths);
    args.balloon(spec);
    args.agent(spec, paths);
    args.pair("-action", "reboot=shutdown,panic=shutdown");
    // spawn=deny also rules out a fork, whose child would see guest memory without the pager.
    if !has(spec, "sandbox") {
        args.pair("-sandbox", SANDBOX);
    }
    args.pair("-kernel", &spec.kernel);
    if let Some(initrd) = &spec.initrd {
        args.pair("-initrd", initrd);
    }
    args.pair("-append", kernel_command_line(&spec.append, accel, spec.hotplug > 0));
    args.0.extend(spec.extra.iter().map(OsString::from));

    Launch {
        program: spec.qemu.clone().unwrap_or_else(|| DEFAULT_QEMU.into()),
        args: args.0,
        env: environment(spec, paths),
        dir: paths.run_dir.clone(),
        log: paths.qemu_log.clone(),
    }
}

/// What the shim is told: whom it serves, where the manager is, and how large the RAM and the memory that
/// can be plugged are.
fn environment(spec: &VmSpec, paths: &LaunchPaths) -> Vec<(OsString, OsString)> {
    let sizes = match spec.hotplug {
        0 => spec.max.to_string(),
        more => format!("{},{more}", spec.max),
    };
    vec![
        ("LD_PRELOAD".into(), paths.shim.clone().into()),
        ("BALLAST_VM".into(), spec.name.clone().into()),
        ("BALLAST_SHIM_SOCKET".into(), paths.shim_socket.clone().into()),
        ("BALLAST_RAM_SIZE".into(), sizes.into()),
    ]
}

/// A backend of guest memory: a shared file. dump=off: a core dump of QEMU would otherwise touch, and so
/// allocate, all of it.
fn memory(id: &str, size: u64, file: Option<&Path>) -> OsString {
    let (kind, place): (_, OsString) = match file {
        None => ("memfd", "".into()),
        // Where its pages are large, they are mapped as such only if they begin where it does.
        Some(file) => ("file", with_path(",mem-path=", file, ",align=2M")),
    };
    let mut memory: OsString = format!("memory-backend-{kind},id={id},size={size}").into();
    memory.push(place);
    memory.push(",share=on,merge=off,dump=off");
    memory
}

/// `append` with what a guest of Ballast needs, each only where the user did not decide it.
pub(crate) fn kernel_command_line(append: &str, accel: &AccelChoice, hotplug: bool) -> String {
    let mut words: Vec<&str> = Vec::new();
    let sets = |key: &str| {
        append.split_ascii_whitespace().any(|w| {
            w.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    if !sets("console") {
        words.push("console=ttyS0");
    }
    if !sets("panic") {
        words.push("panic=-1");
    }
    // The timer check counts ticks against a busy loop: crowded TCG guests panic in it at times.
    if matches!(accel, AccelChoice::Tcg { .. }) && !sets("no_timer_check") {
        words.push("no_timer_check");
    }
    // What is plugged is used at once, and as movable memory as far as the guest bears it: only that can be
    // unplugged.
    if hotplug && !sets("memhp_default_state") {
        words.push("memhp_default_state=online");
        if !sets("memory_hotplug.online_policy") {
            words.push("memory_hotplug.online_policy=auto-movable");
        }
    }
    if !append.trim().is_empty() {
        words.push(append.trim());
    }
    words.join(" ")
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, name: &str) -> &mut Args {
        self.0.push(name.into());
        self
    }
    fn pair(&mut self, name: &str, value: impl AsRef<OsStr>) -> &mut Args {
        self.0.push(name.into());
        self.0.push(value.as_ref().into());
        self
    }

    fn accelerator(&mut self, spec: &VmSpec, accel: &AccelChoice) {
        match accel {
            AccelChoice::Kvm => {
                self.pair("-accel", "kvm");
                if !has(spec, "cpu") {
                    // KVM keeps pages of a guest that runs guests itself by physical address, and does not notice when
                    // they are moved.
                    self.pair("-cpu", "host,vmx=off,svm=off");
                }
            }
            // A small translation buffer: 30 MiB less of QEMU's own memory per VM.
            AccelChoice::Tcg { .. } => {
                self.pair("-accel", "tcg,tb-size=16");
            }
        }
    }

    /// The RAM, and what can be plugged beside it.
    fn memory(&mut self, spec: &VmSpec, paths: &LaunchPaths) {
        let boot = spec.max >> 20;
        self.pair(
            "-m",
            match spec.hotplug >> 20 {
                0 => format!("{boot}M"),
                more => format!("size={boot}M,maxmem={}M", boot + more),
            },
        );
        self.pair("-object", memory("mem", spec.max, paths.ram.as_deref()));
        if spec.hotplug > 0 {
            // After the RAM: the shim is told their sizes in this order.
            self.pair("-object", memory(HOTPLUG_MEMDEV, spec.hotplug, paths.hotplug.as_deref()));
            self.pair(
                "-device",
                format!(
                    "virtio-mem-pci,id={HOTPLUG_ID},memdev={HOTPLUG_MEMDEV},block-size=2M,requested-size=0"
                ),
            );
        }
    }

    /// The first serial port, and the file that it is written to.
    fn console(&mut self, spec: &VmSpec, paths: &LaunchPaths) {
        // That in the run folder is cut when it grows long, and goes on at its end then; what a person named has what
        // was told before a reboot, too.
        let console = spec.console.as_deref().unwrap_or(&paths.console);
        self.pair("-chardev", with_path("file,id=console,path=", console, ",append=on"));
        self.pair("-serial", "chardev:console");
    }

    /// Unless the spec leaves it out.
    fn balloon(&mut self, spec: &VmSpec) {
        if spec.no_balloon {
            return;
        }
        // Without page-poison, a guest that counts on zeros reports nothing (`reports`).
        let reporting = if spec.free_page_reporting { "on,page-poison=off" } else { "off" };
        // A guest that grows faster than its statistics tell takes pages back from the balloon
        // before it ends a process of its own.
        self.pair(
            "-device",
            format!(
                "virtio-balloon-pci,id={BALLOON_ID},deflate-on-oom=on,free-page-reporting={reporting}"
            ),
        );
    }

    /// The port of the guest's agent, if the spec asks for it.
    fn agent(&mut self, spec: &VmSpec, paths: &LaunchPaths) {
        if spec.guest_agent != Some(true) {
            return;
        }
        let socket = with_path("socket,id=agent,path=", &paths.agent_socket, ",server=on,wait=off");
        self.pair("-chardev", socket);
        self.pair("-device", "virtio-serial-pci,id=agent-bus,max_ports=2");
        self.pair(
            "-device",
            format!("virtserialport,bus=agent-bus.0,nr=1,chardev=agent,name={AGENT_PORT}"),
        );
    }
}

/// `path` inside an option list, where QEMU wants every comma doubled.
fn with_path(before: &str, path: &Path, after: &str) -> OsString {
    let mut text = before.as_bytes().to_vec();
    for &byte in path.as_os_str().as_bytes() {
        text.push(byte);
        if byte == b',' {
            text.push(b',');
        }
    }
    text.extend_from_slice(after.as_bytes());
    OsString::from_vec(text)
}

fn has(spec: &VmSpec, option: &str) -> bool {
    spec.extra.iter().any(|arg| crate::spec::option_name(arg) == Some(option))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> VmSpec {
        VmSpec {
            name: "db1".into(),
            max: 256 << 20,
            kernel: "/boot/vmlinuz".into(),
            ..VmSpec::default()
        }
    }

    fn paths() -> LaunchPaths {
        LaunchPaths {
            run_dir: "/run/b/db1".into(),
            shim: "/lib/shim.so".into(),
            shim_socket: "/run/b/shim.sock".into(),
            qmp_socket: "/run/b/db1/qmp.sock".into(),
            agent_socket: "/run/b/db1/agent.sock".into(),
            ram: None,
            hotplug: None,
            console: "/run/b/db1/console.log".into(),
            qemu_log: "/run/b/db1/qemu.log".into(),
        }
    }

    fn tcg() -> AccelChoice {
        AccelChoice::Tcg { why: "test".into() }
    }

    fn value<'a>(launch: &'a Launch, option: &str) -> Option<&'a str> {
        let at = launch.args.iter().position(|a| a == option)?;
        launch.args.get(at + 1)?.to_str()
    }

    #[test]
    fn ram_is_the_file_that_is_given_aligned_for_large_pages() {
        let paths = LaunchPaths { ram: Some("/proc/7/fd/9".into()), ..paths() };
        let launch = command(&spec(), &tcg(), &paths);
        assert_eq!(
            value(&launch, "-object"),
            Some(
                "memory-backend-file,id=mem,size=268435456,mem-path=/proc/7/fd/9,align=2M,share=on,\
                 merge=off,dump=off"
            )
        );
        assert_eq!(value(&launch, "-machine"), Some("q35,memory-backend=mem"));
    }

    #[test]
    fn ram_is_one_shared_memfd_of_the_configured_size() {
        let launch = command(&spec(), &tcg(), &paths());
        assert_eq!(value(&launch, "-m"), Some("256M"));
        let object = value(&launch, "-object").unwrap();
        assert!(object.starts_with("memory-backend-memfd,id=mem,size=268435456,share=on"));
        assert_eq!(value(&launch, "-machine"), Some("q35,memory-backend=mem"));
    }

    #[test]
    fn memory_to_plug_is_a_second_file_behind_a_virtio_mem_device() {
        let spec = VmSpec { hotplug: 1 << 30, ..spec() };
        let launch = command(&spec, &tcg(), &paths());
        assert_eq!(value(&launch, "-m"), Some("size=256M,maxmem=1280M"));
        let args: Vec<_> = launch.args.iter().map(|a| a.to_str().unwrap()).collect();
        let at = |what: &str| args.iter().position(|a| a.starts_with(what)).unwrap();
        let (ram, more) =
            (at("memory-backend-memfd,id=mem,"), at("memory-backend-memfd,id=hotmem,"));
        assert!(ram < more);
        assert_eq!(
            args[more],
            "memory-backend-memfd,id=hotmem,size=1073741824,share=on,merge=off,dump=off"
        );
        let device = "virtio-mem-pci,id=hotplug,memdev=hotmem,block-size=2M,requested-size=0";
        assert!(args.contains(&device), "{args:?}");
        let sizes = launch.env.iter().find(|(k, _)| k == "BALLAST_RAM_SIZE").unwrap();
        assert_eq!(sizes.1, "268435456,1073741824");
        let append = value(&launch, "-append").unwrap();
        assert!(append.contains("memhp_default_state=online "), "{append}");
        assert!(append.contains("memory_hotplug.online_policy=auto-movable"), "{append}");
        let own = kernel_command_line("memhp_default_state=offline", &AccelChoice::Kvm, true);
        assert_eq!(own, "console=ttyS0 panic=-1 memhp_default_state=offline");
        let file = LaunchPaths { hotplug: Some("/proc/7/fd/10".into()), ..paths() };
        let args = command(&spec, &tcg(), &file).args;
        let more = "memory-backend-file,id=hotmem,size=1073741824,mem-path=/proc/7/fd/10,align=2M";
        assert!(args.iter().any(|a| a.to_str().unwrap().starts_with(more)), "{args:?}");
    }

    #[test]
    fn the_shim_is_told_whom_it_serves() {
        let launch = command(&spec(), &tcg(), &paths());
        let get = |key: &str| launch.env.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
        assert_eq!(get("LD_PRELOAD"), Some("/lib/shim.so".into()));
        assert_eq!(get("BALLAST_VM"), Some("db1".into()));
        assert_eq!(get("BALLAST_SHIM_SOCKET"), Some("/run/b/shim.sock".into()));
        assert_eq!(get("BALLAST_RAM_SIZE"), Some("268435456".into()));
        assert_eq!(launch.env.len(), 4, "nothing but the shim's");
    }

    #[test]
    fn the_accelerator_decides_cpu_and_timer_check() {
        let launch = command(&spec(), &tcg(), &paths());
        assert_eq!(value(&launch, "-accel"), Some("tcg,tb-size=16"));
        assert_eq!(value(&launch, "-cpu"), None);
        assert_eq!(value(&launch, "-append"), Some("console=ttyS0 panic=-1 no_timer_check"));
        let launch = command(&spec(), &AccelChoice::Kvm, &paths());
        assert_eq!(value(&launch, "-accel"), Some("kvm"));
        assert_eq!(value(&launch, "-cpu"), Some("host,vmx=off,svm=off"), "no guests of its own");
        assert_eq!(value(&launch, "-append"), Some("console=ttyS0 panic=-1"));
    }

    #[test]
    fn what_the_user_decided_stays() {
        let append = "quiet console=tty0 panic=5 no_timer_check";
        assert_eq!(kernel_command_line(append, &tcg(), false), append);
        assert_eq!(
            kernel_command_line("panic_on_oops=1", &AccelChoice::Kvm, false),
            "console=ttyS0 panic=-1 panic_on_oops=1"
        );
        let extra = vec!["--cpu".into(), "max".into(), "-sandbox".into(), "off".into()];
        let launch = command(&VmSpec { extra, ..spec() }, &AccelChoice::Kvm, &paths());
        assert_eq!(value(&launch, "-cpu"), None);
        assert!(launch.args.windows(2).any(|args| args == ["--cpu", "max"]));
        assert!(!launch.args.iter().any(|arg| arg == "host,vmx=off,svm=off"));
        assert_eq!(value(&launch, "-sandbox"), Some("off"));
        assert_eq!(launch.args.last().unwrap(), "off");
    }

    #[test]
    fn the_balloon_follows_the_spec() {
        let launch = command(&spec(), &tcg(), &paths());
        let device = "virtio-balloon-pci,id=bal,deflate-on-oom=on,free-page-reporting=off";
        assert_eq!(value(&launch, "-device"), Some(device));
        let with = VmSpec { free_page_reporting: true, ..spec() };
        let device =
            "virtio-balloon-pci,id=bal,deflate-on-oom=on,free-page-reporting=on,page-poison=off";
        assert_eq!(value(&command(&with, &tcg(), &paths()), "-device"), Some(device));
        let without = VmSpec { no_balloon: true, ..spec() };
        assert_eq!(value(&command(&without, &tcg(), &paths()), "-device"), None);
    }

    #[test]
    fn commas_in_paths_are_doubled_where_qemu_splits_at_commas() {
        let paths = LaunchPaths {
            qmp_socket: "/run/a,b/qmp".into(),
            agent_socket: "/run/a,b/agent".into(),
            console: "/run/a,b/console".into(),
            ..paths()
        };
        let launch = command(&spec(), &tcg(), &paths);
        assert_eq!(value(&launch, "-qmp"), Some("unix:/run/a,,b/qmp,server=on,wait=off"));
        assert_eq!(
            value(&launch, "-chardev"),
            Some("file,id=console,path=/run/a,,b/console,append=on")
        );
    }

    #[test]
    fn the_agents_port_is_there_for_who_asks() {
        let text = |launch: &Launch| {
            let args: Vec<_> = launch.args.iter().map(|a| a.to_string_lossy()).collect();
            args.join(" ")
        };
        assert!(!text(&command(&spec(), &tcg(), &paths())).contains("virtserialport"));
        let with = VmSpec { guest_agent: Some(true), ..spec() };
        let args = text(&command(&with, &tcg(), &paths()));
        assert!(args.contains("chardev=agent,name=org.qemu.guest_agent.0"), "{args}");
        assert!(
            args.contains("socket,id=agent,path=/run/b/db1/agent.sock,server=on,wait=off"),
            "{args}"
        );
    }

    #[test]
    fn the_console_of_the_spec_wins() {
        let spec = VmSpec { console: Some("/tmp/c".into()), ..spec() };
        let launch = command(&spec, &tcg(), &paths());
        assert_eq!(value(&launch, "-chardev"), Some("file,id=console,path=/tmp/c,append=on"));
    }
}
