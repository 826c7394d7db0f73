//! Whether the kernel makes large pages of shared memory that nobody asked for. Where it does, a write of 4 KiB
//! into a hole of a RAM file fills the 511 holes beside it with zeros: pages that are in swap or shared would be
//! there, zeroed, and no fault would bring back what they hold.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, Stat, fstat, major, memfd_create, minor};

use crate::bounded;

/// The setting for memfds, and for everything where it is "deny" or "force".
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Since Linux 6.11 each size has a setting of its own in a folder here, which counts for files without a name, as memfds and
/// RAM files of our own are, whatever the other says, unless that is "deny" or "force".
const SIZES: &str = "/sys/kernel/mm/transparent_hugepage";
/// There where sysfs is.
const MM: &str = "/sys/kernel/mm";

/// Why the pages of this file, which the process `pid` has mapped, cannot be taken without losing others; one
/// line that says what to change. None: they can. What cannot be found out is an objection.
pub fn unasked_large_pages(file: impl AsFd, pid: u32) -> Option<String> {
    let setting = match host_setting() {
        Ok(setting) => setting,
        Err(e) => return Some(unknown(ENABLED, &e)),
    };
    if setting.as_deref() == Some("force") {
        return Some(objection(ENABLED, "force"));
    }
    let stats = |what: &str, fd: BorrowedFd<'_>| fstat(fd).map_err(|e| unknown(what, &e.into()));
    let like = memfd_create("like", MemfdFlags::CLOEXEC).map_err(|e| unknown("a memfd", &e.into()));
    let both = like
        .and_then(|like| Ok((stats("its RAM", file.as_fd())?, stats("a memfd", like.as_fd())?)));
    let (stat, memfd) = match both {
        Ok(both) => both,
        Err(why) => return Some(why),
    };
    if stat.st_nlink == 0 {
        match of_sizes(setting.as_deref(), Path::new(SIZES)) {
            Ok(None) => {}
            Ok(Some((what, setting))) => return Some(objection(&what, &setting)),
            Err(e) => return Some(unknown(SIZES, &e)),
        }
    }
    if memfd.st_dev == stat.st_dev {
        return setting.filter(|s| is_unasked(s)).map(|s| objection(ENABLED, &s));
    }
    // A tmpfs that is mounted neither here nor there is one that `ram_file` made.
    for process in ["self".to_owned(), pid.to_string()] {
        let mut found = None;
        let read = bounded::mounts(&process, |line| {
            found = found.take().or_else(|| mounted(line.trim_end(), &stat));
        });
        match read {
            Ok(()) => {}
            // It has ended.
            Err(e) if e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => {
                continue;
            }
            Err(e) => return Some(unknown(&format!("/proc/{process}/mountinfo"), &e)),
        }
        if let Some((at, huge)) = found {
            let what = format!("the tmpfs on {at}: huge");
            return is_unasked(&huge).then(|| objection(&what, &huge));
        }
    }
    None
}

/// The same of memfds that are yet to be made: true, too, where that cannot be told.
pub fn unasked_large_memfds() -> bool {
    match host_setting() {
        Ok(Some(setting)) => {
            let sizes = of_sizes(Some(&setting), Path::new(SIZES));
            is_unasked(&setting) || !matches!(sizes, Ok(None))
        }
        Ok(None) => false,
        Err(_) => true,
    }
}

/// A setting of one size by which large pages are made unasked, and its file; none where that of all says "deny", or where
/// the kernel makes none.
fn of_sizes(of_all: Option<&str>, folder: &Path) -> std::io::Result<Option<(String, String)>> {
    if matches!(of_all, None | Some("deny")) {
        return Ok(None);
    }
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path().join("shmem_enabled");
        let list = match std::fs::read_to_string(&path) {
            Ok(list) => list,
            // Of an older kernel, or no folder of a size.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                continue;
            }
            Err(e) => return Err(e),
        };
        if let Some(setting) = chosen(&list).filter(|setting| is_unasked(setting)) {
            return Ok(Some((path.display().to_string(), setting.to_owned())));
        }
    }
    Ok(None)
}

fn objection(what: &str, setting: &str) -> String {
    format!(
        "{what} is \"{setting}\", with which the kernel fills holes of its RAM that stand for pages in swap: \
         set it to \"advise\" or \"never\""
    )
}

fn unknown(what: &str, e: &std::io::Error) -> String {
    format!(
        "whether the kernel fills holes of its RAM that stand for pages in swap cannot be told: {what}: {e}"
    )
}

fn is_unasked(setting: &str) -> bool {
    matches!(setting, "always" | "within_size" | "force")
}

/// None of a kernel that makes no large pages.
fn host_setting() -> std::io::Result<Option<String>> {
    setting_of(Path::new(ENABLED), Path::new(MM))
}

fn setting_of(enabled: &Path, mm: &Path) -> std::io::Result<Option<String>> {
    match std::fs::read_to_string(enabled) {
        Ok(list) => Ok(chosen(&list).map(str::to_owned)),
        Err(e) if e.kind() == ErrorKind::NotFound && mm.exists() => Ok(None),
        Err(e) => Err(e),
    }
}

/// Of a list like "always [never]".
fn chosen(list: &str) -> Option<&str> {
    list.split_ascii_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

/// Of a line of mountinfo: where the file system of a file is mounted, if it is that one, and its option `huge`; "never" without one.
fn mounted(line: &str, stat: &Stat) -> Option<(String, String)> {
    let device = format!("{}:{}", major(stat.st_dev), minor(stat.st_dev));
    let mut fields = line.split(' ');
    let at = (fields.nth(2) == Some(device.as_str())).then(|| fields.nth(1))??;
    let options = line.rsplit(' ').next()?;
    let huge = options.split(',').find_map(|option| option.strip_prefix("huge="));
    Some((at.to_owned(), huge.unwrap_or("never").to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Apart;

    #[test]
    fn the_setting_is_the_one_in_brackets() {
        assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
        assert_eq!(chosen("[always] never"), Some("always"));
        assert_eq!(chosen("always never"), None);
        for (setting, unasked) in [
            ("always", true),
            ("within_size", true),
            ("force", true),
            ("advise", false),
            ("deny", false),
        ] {
            assert_eq!(is_unasked(setting), unasked, "{setting}");
        }
    }

    /// With "inherit" a size does as all do, and with "advise" what the shim does not let be advised.
    #[test]
    fn a_size_has_a_setting_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let write = |size: &str, setting: &str| {
            let folder = dir.path().join(size);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("shmem_enabled"), setting).unwrap();
        };
        std::fs::write(dir.path().join("shmem_enabled"), "always [never]").unwrap();
        std::fs::create_dir(dir.path().join("khugepaged")).unwrap();
        write("hugepages-64kB", "always [inherit] within_size advise never");
        write("hugepages-128kB", "always inherit within_size [advise] never");
        let found = |of_all: Option<&str>| of_sizes(of_all, dir.path()).unwrap();
        assert_eq!(found(Some("never")), None);
        write("hugepages-2048kB", "always inherit [within_size] advise never\n");
        let (what, setting) = found(Some("never")).unwrap();
        assert!(what.ends_with("hugepages-2048kB/shmem_enabled") && setting == "within_size");
        assert!(objection(&what, &setting).contains("set it to \"advise\" or \"never\""));
        assert_eq!((found(Some("deny")), found(None)), (None, None));
        assert!(of_sizes(Some("never"), &dir.path().join("none")).is_err());
    }

    /// A kernel without large pages has no setting; where sysfs is not mounted, or cannot be read, nobody knows.
    #[test]
    fn what_cannot_be_read_is_not_taken_for_a_kernel_without() {
        let (there, nowhere) = (Path::new("/proc"), Path::new("/proc/no-such-folder"));
        assert_eq!(setting_of(nowhere, there).unwrap(), None);
        assert!(setting_of(nowhere, nowhere).is_err());
        assert!(setting_of(there, there).is_err(), "a folder");
        let e = setting_of(there, there).unwrap_err();
        assert!(unknown(ENABLED, &e).contains("cannot be told: /sys/kernel/mm/"), "{e}");
    }

    #[test]
    fn a_mount_is_found_by_its_device() {
        let mut stat = fstat(std::fs::File::open("/proc/self/exe").unwrap()).unwrap();
        stat.st_dev = rustix::fs::makedev(0, 29);
        let line = |options: &str| {
            format!("29 22 0:29 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs {options}")
        };
        let found = |options: &str| mounted(&line(options), &stat);
        let at = |huge: &str| Some(("/dev/shm".to_owned(), huge.to_owned()));
        assert_eq!(found("rw,size=8k,huge=within_size,inode64"), at("within_size"));
        assert_eq!(found("rw"), at("never"));
        stat.st_dev = rustix::fs::makedev(0, 30);
        assert_eq!(mounted(&line("rw,huge=always"), &stat), None);
    }

    #[test]
    fn a_tmpfs_that_is_mounted_for_the_vmm_alone_is_objected_to_by_its_option() {
        let setting = host_setting().unwrap();
        if matches!(setting.as_deref(), None | Some("force")) {
            eprintln!("SKIPPED: with the setting {setting:?} no mount has its own way");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        for (huge, is_refused) in [("always", true), ("never", false)] {
            let script = format!("mount -t tmpfs -o huge={huge} none {at}; exec 9<>{at}/ram");
            let Some(vmm) = Apart::once(&script, &[]) else { return };
            let file = std::fs::File::open(format!("/proc/{}/fd/9", vmm.pid())).unwrap();
            let objection = unasked_large_pages(&file, vmm.pid());
            let told = format!("the tmpfs on {at}: huge is \"{huge}\"");
            match &objection {
                Some(why) => assert!(is_refused && why.contains(&told), "{why}"),
                None => assert!(!is_refused, "{huge}"),
            }
        }
    }

    #[test]
    fn ram_files_of_our_own_are_never_objected_to() {
        let Ok(file) = crate::ram_file(ballast_units::Bytes::from_mib(2), crate::Huge::Advise)
        else {
            return;
        };
        if host_setting().unwrap().as_deref() != Some("force") {
            assert_eq!(unasked_large_pages(&file, std::process::id()), None);
        }
        let memfd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        // Neither has a name, and settings of sizes are asked for both.
        assert_eq!((fstat(&memfd).unwrap().st_nlink, fstat(&file).unwrap().st_nlink), (0, 0));
        let objection = unasked_large_pages(&memfd, std::process::id());
        assert_eq!(objection.is_some(), unasked_large_memfds(), "{objection:?}");
    }
}
