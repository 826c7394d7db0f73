//! Swap files that a reboot or a crash of the host has left: the VMs are gone with it, as their records are, and what was reserved
//! for them would be missing for good. Each file has a note of the boot that it was made in; where a file system keeps no such
//! attributes, they stay until a VM of that name comes.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use ballast_api::layout::{RECORD, VMS};
use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};

/// "MACHINE/NAME BOOT": the ids of systemd and of the kernel, and the host's name, for images are copied.
const MADE_IN: &str = "user.ballast.boot";
const LONGEST: usize = 256;

/// Locations from which files are being removed just now.
static SWEPT: AtomicUsize = AtomicUsize::new(0);

/// Whether there is room to come: large files take their time.
pub fn are_swept() -> bool {
    SWEPT.load(Ordering::Relaxed) > 0
}

/// What a file that is made now is noted with; None where the host has no id.
fn this_boot() -> Option<String> {
    let read = |path| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let machine = read("/etc/machine-id").filter(|id| id.len() == 32)?;
    let boot = read("/proc/sys/kernel/random/boot_id").filter(|id| !id.is_empty())?;
    let name = rustix::system::uname().nodename().to_string_lossy().replace(' ', "_");
    Some(format!("{machine}/{name} {boot}"))
}

/// Notes on a swap file which boot it was made in.
pub fn note(path: &Path) {
    let Some(boot) = this_boot() else { return };
    if let Err(e) = lsetxattr(path, MADE_IN, boot.as_bytes(), XattrFlags::empty()) {
        tracing::debug!("{}: when it was made cannot be noted: {e}", path.display());
    }
}

/// Removes the swap files of former boots of this host. Before anybody makes one there. What `run_dir` has a record of is left to
/// those who read it.
pub fn sweep(location: &Path, run_dir: &Path) {
    let Some(boot) = this_boot() else { return };
    SWEPT.fetch_add(1, Ordering::Relaxed);
    if let Err(e) = sweep_before(location, &run_dir.join(VMS), &boot) {
        tracing::warn!("{}: swap files of before this boot: {e}", location.display());
    }
    SWEPT.fetch_sub(1, Ordering::Relaxed);
}

fn sweep_before(location: &Path, vms: &Path, boot: &str) -> std::io::Result<()> {
    for entry in std::fs::read_dir(location)? {
        let path = entry?.path();
        let is_swap = path.extension().is_some_and(|extension| extension == "swap");
        let Some(vm) = path.file_stem().filter(|_| is_swap) else { continue };
        if !is_of_before(&path, boot) || vms.join(vm).join(RECORD).exists() {
            continue;
        }
        match std::fs::remove_file(&path) {
            Ok(()) => {
                tracing::info!("{}: removed, its VM was of a former boot", path.display());
            }
            Err(e) => tracing::warn!("{}: of a former boot: {e}", path.display()),
        }
    }
    Ok(())
}

/// What has no note, or another host's, may be anybody's.
fn is_of_before(path: &Path, boot: &str) -> bool {
    let mut note = vec![0; LONGEST];
    let Ok(len) = lgetxattr(path, MADE_IN, &mut note[..]) else { return false };
    let Ok(made_in) = std::str::from_utf8(&note[..len]) else { return false };
    let machine = |text: &str| text.split_once(' ').map(|(machine, _)| machine.to_owned());
    machine(made_in).is_some() && machine(made_in) == machine(boot) && made_in != boot
}

/// Notes a former boot where this one is noted. False: it is not.
#[cfg(test)]
pub fn age(path: &Path) -> bool {
    let mut note = vec![0; LONGEST];
    let Ok(len) = lgetxattr(path, MADE_IN, &mut note[..]) else { return false };
    note.truncate(len);
    let is_now = this_boot().is_some_and(|boot| boot.as_bytes() == note);
    note[len - 1] = b'x';
    is_now && lsetxattr(path, MADE_IN, &note, XattrFlags::empty()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_former_boot_of_this_host_has_left_goes_and_nothing_else() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let made = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "pages").unwrap();
            path
        };
        let names = ["now", "old", "kept", "theirs", "nobodys"].map(|vm| format!("{vm}.swap"));
        let [now, old, kept, theirs, nobodys] = names.map(|name| made(&name));
        let text = made("old.txt");
        let Some(boot) = this_boot() else { return eprintln!("SKIPPED: no /etc/machine-id") };
        note(&now);
        let (machine, _) = boot.split_once(' ').unwrap();
        let set = |path: &Path, note: &str| {
            lsetxattr(path, MADE_IN, note.as_bytes(), XattrFlags::empty()).is_ok()
        };
        if !set(&old, &format!("{machine} a-former-one")) {
            return eprintln!("SKIPPED: no attributes in /var/tmp");
        }
        assert!(set(&text, &format!("{machine} a-former-one")));
        assert!(set(&kept, &format!("{machine} a-former-one")));
        let run_dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(run_dir.path().join("vms/kept")).unwrap();
        std::fs::write(run_dir.path().join("vms/kept/vm.json"), "").unwrap();
        assert!(set(&theirs, "0123456789abcdef0123456789abcdef a-former-one"));
        std::os::unix::fs::symlink(&old, dir.path().join("link.swap")).unwrap();
        sweep(dir.path(), run_dir.path());
        assert!(!old.exists());
        assert!([&now, &kept, &theirs, &nobodys, &text].iter().all(|path| path.exists()));
        assert!(dir.path().join("link.swap").symlink_metadata().is_ok());
        sweep(&dir.path().join("none"), run_dir.path());
    }
}
