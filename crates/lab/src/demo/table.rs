//! The table that is printed where there is no terminal.

use std::fmt::Write;
use std::time::Duration;

use ballast_api::{HostView, VmView};

use crate::console::Console;

/// Whole MiB.
pub fn mib(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / f64::from(1 << 20))
}

/// Several lines, for one moment.
pub fn render(
    at: Duration,
    host: &HostView,
    vms: &[VmView],
    consoles: &[(String, Console)],
) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\n[{:>4} s] machine memory {} MiB: measured {}, highest {}, free {}, overhead {} | state \
         {} | overcommitment {:.2} | swap {} MiB | tax {}",
        at.as_secs(),
        mib(host.budget),
        mib(host.measured_used),
        mib(host.measured_peak),
        mib(host.free),
        mib(host.overhead),
        host.state,
        host.overcommit,
        mib(host.swap_used),
        host.tax,
    );
    let _ = write!(
        text,
        "{:<10} {:>5} {:>5} {:>7} {:>9} {:>7} {:>8} {:>8} {:>9} {:>9} {:>8}  integrity",
        "VM (MiB)",
        "size",
        "min",
        "target",
        "consumed",
        "active",
        "balloon",
        "swapped",
        "sw.in",
        "checks",
        "shares"
    );
    for vm in vms {
        let console = consoles.iter().find(|(name, _)| *name == vm.name).map(|(_, c)| c);
        let story = console.map(|c| &c.story);
        let _ = write!(
            text,
            "\n{:<10} {:>5} {:>5} {:>7} {:>9} {:>7} {:>8} {:>8} {:>9} {:>9} {:>8}  {}",
            vm.name,
            mib(vm.params.size),
            mib(vm.params.min),
            mib(vm.memory.target),
            mib(vm.memory.consumed),
            mib(vm.active.estimate),
            mib(vm.memory.ballooned),
            mib(vm.memory.swapped),
            mib(vm.counters.swapped_in),
            story.map_or(0, |s| s.checks),
            vm.params.shares,
            match story {
                Some(s) if s.trouble.is_some() => "FAILED",
                Some(s) if s.checks > 0 => "ok",
                Some(s) if s.ready.is_some() => "starting",
                _ => "booting",
            }
        );
    }
    text
}
