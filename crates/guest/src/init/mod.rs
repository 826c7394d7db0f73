//! Process 1 of a sample guest: mounts, modules, the workloads named on the kernel command line, and
//! a clean power-off when the host asks for one.
//!
//! | kernel parameter | meaning |
//! | --- | --- |
//! | `ballast.run="toucher --max-mb 90"` | a workload to run, or a program by its path; `ballast.run2=` and so on: more, at the same time |
//! | `ballast.then=poweroff` | power off when all have ended (default: stay idle) |
//! | `ballast.reporting_order=N` | the smallest block that free-page reporting reports |

mod cmdline;
mod modules;
mod mounts;
mod power;
mod services;

use std::process::ExitCode;

use crate::json::Object;
use crate::meminfo::Meminfo;
use crate::report;
use cmdline::{Parameters, Then};
pub use modules::insert as insert_module;

/// Where the sample disk (/dev/vda) is mounted.
pub const DISK: &str = "/disk";

pub fn run() -> ExitCode {
    // Process 1 must not end: the kernel would panic. Every failure is told and lived with.
    let mut notes = mounts::basic();
    notes.extend(modules::load());
    let disk = mounts::disk(&mut notes);
    let parameters = match std::fs::read_to_string("/proc/cmdline") {
        Ok(text) => Parameters::parse(&text),
        Err(e) => {
            notes.push(format!("/proc/cmdline: {e}"));
            Parameters::default()
        }
    };
    if let Some(order) = parameters.reporting_order {
        let path = "/sys/module/page_reporting/parameters/page_reporting_order";
        if let Err(e) = std::fs::write(path, order.to_string()) {
            notes.push(format!("{path}: {e}"));
        }
    }
    for note in &notes {
        report::emit(Object::new().text("event", "warning").text("message", note));
    }
    let mut services = services::Services::default();
    let buttons = power::Buttons::open();
    let ready = Object::new()
        .text("event", "boot")
        .text("boot", "ready")
        .num("uptime", mounts::uptime())
        .text("kernel", mounts::kernel_release().trim())
        .text("disk", if disk { "ext4" } else { "none" })
        .int("buttons", buttons.count() as u64);
    report::emit(match Meminfo::read() {
        Ok(info) => info.add_to(ready),
        Err(_) => ready,
    });
    for command in &parameters.run {
        services.start(command);
    }
    loop {
        if buttons.pressed(std::time::Duration::from_millis(200)) {
            report::emit(Object::new().text("event", "power").text("power", "button"));
            break;
        }
        let ended = services.reap();
        if ended && services.none_left() && parameters.then == Then::PowerOff {
            break;
        }
    }
    services.end_all();
    power::off()
}
