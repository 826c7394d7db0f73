//! A sample guest, as told to QEMU or to the manager.

use std::path::{Path, PathBuf};

use ballast_api::{Accel, VmSpec};
use ballast_units::Bytes;

use crate::image::Image;

/// What every sample guest's kernel is told. The timer check fails now and then on a crowded host.
const APPEND: &str = "console=ttyS0 oops=panic panic=-1 quiet loglevel=3 no_timer_check";

/// What it boots, does and has.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Of the VM, and of its console's log.
    pub name: String,
    /// Its RAM; whole MiB.
    pub memory: Bytes,
    /// Workloads, each a `ballast-guest` command line.
    pub run: Vec<String>,
    /// More parameters of its kernel.
    pub kernel: Vec<String>,
    /// When all its workloads have ended.
    pub power_off_when_done: bool,
    /// A raw image, mounted at /disk.
    pub disk: Option<PathBuf>,
    /// What the guest writes to its disk goes to a temporary file of QEMU's: several guests may
    /// have one disk.
    pub disk_is_shared: bool,
    /// Where its serial port is logged.
    pub console: PathBuf,
}

impl Guest {
    /// Does nothing, without a disk; its console is logged in the folder `consoles`, after what an earlier guest of
    /// that name told there.
    pub fn new(name: &str, memory: Bytes, consoles: &Path) -> Guest {
        Guest {
            name: name.to_owned(),
            memory,
            run: Vec::new(),
            kernel: Vec::new(),
            power_off_when_done: false,
            disk: None,
            disk_is_shared: false,
            console: consoles.join(format!("{name}.console.log")),
        }
    }

    /// One workload more.
    #[must_use]
    pub fn run(mut self, workload: impl Into<String>) -> Guest {
        self.run.push(workload.into());
        self
    }

    /// One parameter more.
    #[must_use]
    pub fn kernel(mut self, parameter: &str) -> Guest {
        self.kernel.push(parameter.to_owned());
        self
    }

    /// A guest that writes zeros to all of its memory when it boots, and to whatever it frees later,
    /// as Windows does.
    #[must_use]
    pub fn clears_memory(self) -> Guest {
        self.kernel("init_on_free=1")
    }

    /// A disk of its own.
    #[must_use]
    pub fn disk(mut self, path: PathBuf) -> Guest {
        self.disk = Some(path);
        self
    }

    /// See `disk_is_shared`.
    #[must_use]
    pub fn shared_disk(self, path: PathBuf) -> Guest {
        Guest { disk_is_shared: true, ..self.disk(path) }
    }

    /// See the field.
    #[must_use]
    pub fn power_off_when_done(mut self) -> Guest {
        self.power_off_when_done = true;
        self
    }

    /// Its kernel's command line.
    pub fn append(&self) -> String {
        let mut text = APPEND.to_owned();
        for parameter in &self.kernel {
            text.push_str(&format!(" {parameter}"));
        }
        for (n, run) in self.run.iter().enumerate() {
            let number = if n == 0 { String::new() } else { (n + 1).to_string() };
            text.push_str(&format!(" ballast.run{number}=\"{run}\""));
        }
        if self.power_off_when_done {
            text.push_str(" ballast.then=poweroff");
        }
        text
    }

    /// QEMU's arguments for the disk. What the guest flushes may stay in the host's page cache: the
    /// disk does not outlive the run.
    pub fn disk_arguments(&self) -> Vec<String> {
        let Some(path) = &self.disk else { return Vec::new() };
        // QEMU's option syntax: a comma inside a value is doubled.
        let file = path.display().to_string().replace(',', ",,");
        let snapshot = if self.disk_is_shared { ",snapshot=on" } else { "" };
        vec![
            "-drive".to_owned(),
            format!("file={file},format=raw,if=none,id=disk0,cache=unsafe{snapshot}"),
            "-device".to_owned(),
            "virtio-blk-pci,drive=disk0".to_owned(),
        ]
    }

    /// For the manager: with its defaults, but for what is said here.
    pub fn spec(&self, image: &Image, accel: Accel) -> VmSpec {
        VmSpec {
            name: self.name.clone(),
            max: self.memory.0,
            kernel: image.kernel.clone(),
            initrd: Some(image.initrd.clone()),
            append: self.append(),
            accel,
            console: Some(self.console.clone()),
            extra: self.disk_arguments(),
            ..VmSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workloads_and_disk_become_arguments() {
        let g = Guest::new("a", Bytes::from_mib(128), Path::new("/c"))
            .run("toucher --max-mb 9")
            .run("report")
            .clears_memory()
            .disk("/d/x,y.img".into())
            .power_off_when_done();
        assert!(g.append().ends_with(
            "no_timer_check init_on_free=1 ballast.run=\"toucher --max-mb 9\" ballast.run2=\"report\" \
             ballast.then=poweroff"
        ));
        assert!(g.disk_arguments()[1].starts_with("file=/d/x,,y.img,format=raw"));
        let shared = g.clone().shared_disk("/d/s.img".into()).disk_arguments();
        assert!(shared[1].starts_with("file=/d/s.img,") && shared[1].ends_with(",snapshot=on"));
        assert_eq!(g.console, Path::new("/c/a.console.log"));
    }
}
