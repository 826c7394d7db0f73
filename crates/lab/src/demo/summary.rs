//! The demo's verdict.

use std::time::Duration;

use ballast_api::{HostView, RunState, VmView};

use super::table::mib;
use crate::console::Console;
use crate::say;

/// What is printed at the end, and whether all went well.
pub struct Summary {
    lines: Vec<String>,
    failures: Vec<String>,
    /// Guests that have not checked anything yet: a failure only if there was time to.
    unchecked: Vec<String>,
}

impl Summary {
    /// `host`: the manager's last words; `left`: what it left behind; `vms`: as they were before they
    /// were stopped.
    pub fn new(
        host: &HostView,
        left: &[String],
        consoles: &[(String, Console)],
        vms: &[VmView],
        took: Duration,
    ) -> Summary {
        let mut s = Summary { lines: Vec::new(), failures: Vec::new(), unchecked: Vec::new() };
        s.lines.push(format!(
            "peak overcommitment      {:.2} ({} MiB of machine memory; {})",
            host.overcommit_peak,
            mib(host.budget),
            host.accel
        ));
        s.machine_memory(host);
        let c = &host.counters;
        let sum = |f: fn(&VmView) -> u64| mib(vms.iter().map(f).sum());
        s.lines.push(format!(
            "reclaimed                balloon {} MiB, zero pages {} MiB, compressed {} MiB, swap {} MiB",
            mib(c.ballooned),
            mib(c.zero_dropped),
            mib(host.compression.stored),
            mib(c.swapped_out)
        ));
        s.lines.push(format!(
            "page sharing, at the end {} MiB shared, {} MiB saved by it; {} writes to shared pages",
            sum(|vm| vm.sharing.shared),
            sum(|vm| vm.sharing.saved),
            vms.iter().map(|vm| vm.sharing.breaks).sum::<u64>()
        ));
        s.lines.push(format!(
            "given back               {} MiB from compression, {} from swap, in {} faults served; \
             {} allocations waited, {} were blocked",
            mib(host.compression.restored),
            mib(c.swapped_in),
            c.faults,
            c.waits,
            c.blocks
        ));
        for (name, console) in consoles {
            s.guest(name, console, vms.iter().find(|v| v.name == *name));
        }
        s.lines.push(format!(
            "the manager itself       {:.1} CPU-s, {} MiB; whole run {:.0} s",
            host.manager_cpu_s,
            mib(host.manager_rss),
            took.as_secs_f64()
        ));
        if left.is_empty() {
            s.lines.push("left behind              no process, mount, socket or file".to_owned());
        }
        s.failures.extend(left.iter().map(|l| format!("left behind: {l}")));
        s
    }

    fn machine_memory(&mut self, host: &HostView) {
        let peak = host.measured_peak.max(host.peak_used);
        let text = format!(
            "highest use measured {} MiB, handed out {} MiB, of {} MiB",
            mib(host.measured_peak),
            mib(host.peak_used),
            mib(host.budget)
        );
        if peak > host.budget {
            self.failures.push(format!("machine memory exceeded: {text}"));
        } else {
            self.lines.push(format!("machine memory           never exceeded: {text}"));
        }
    }

    fn guest(&mut self, name: &str, console: &Console, vm: Option<&VmView>) {
        let story = &console.story;
        if let Some(trouble) = &story.trouble {
            self.failures.push(format!("{name}: {trouble}"));
            return;
        }
        // A guest that stopped by itself was not asked to. One whose VMM has ended is not known any more.
        match vm.map(|vm| vm.state) {
            Some(RunState::Running | RunState::Starting) => {}
            Some(state) => {
                self.failures.push(format!("{name}: not running any more but {state:?}"));
            }
            None => self.failures.push(format!("{name}: had ended before the guests were stopped")),
        }
        if let Some(vm) = vm.filter(|vm| vm.stalled) {
            let why = vm.trouble.as_deref().unwrap_or("a page that does not come");
            self.failures.push(format!("{name}: it stands still: {why}"));
        }
        if story.checks == 0 {
            self.unchecked.push(name.to_owned());
            return;
        }
        self.lines
            .push(format!("integrity of {name:<12}{} checks passed, none failed", story.checks));
    }

    /// True if nothing failed and, where the demo ran `to_the_end`, every guest has checked
    /// something.
    pub fn passed(&self, to_the_end: bool) -> bool {
        self.failures.is_empty() && (self.unchecked.is_empty() || !to_the_end)
    }

    /// `to_the_end`: as of `passed`.
    pub fn print(&self, to_the_end: bool) {
        say::line("\nSummary");
        self.lines.iter().for_each(|l| say::detail(l));
        for name in &self.unchecked {
            if to_the_end {
                say::line(&format!("FAILED {name}: no integrity check has passed"));
            } else {
                say::detail(&format!("integrity of {name:<12}nothing checked yet"));
            }
        }
        self.failures.iter().for_each(|f| say::line(&format!("FAILED {f}")));
        if self.passed(to_the_end) {
            say::line("all checks passed");
        }
    }
}
