//! Whether the kernel makes large pages of shared memory that nobody asked for. Where it does, a write of 4 KiB
//! into a hole of a RAM file fills the 511 holes beside it with zeros: pages that are in swap or shared would be
//! there, zeroed, and no fault would bring back what they hold.

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, Stat, fstat, major, memfd_create, minor};

/// The setting for memfds, and for everything where it is "deny" or "force".
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Why the pages of this file, which the process `pid` has mapped, cannot be taken without losing others; one
/// line that says what to change. None: they can.
pub fn unasked_large_pages(file: impl AsFd, pid: u32) -> Option<String> {
    let setting = host_setting();
    if setting.as_deref() == Some("force") {
        return Some(objection(ENABLED, "force"));
    }
    let stat = fstat(file).ok()?;
    let memfd = memfd_create("like", MemfdFlags::CLOEXEC).ok().and_then(|fd| fstat(fd).ok());
    if memfd.is_some_and(|memfd| memfd.st_dev == stat.st_dev) {
        return setting.filter(|s| is_unasked(s)).map(|s| objection(ENABLED, &s));
    }
    // A tmpfs that is mounted neither here nor there is one that `ram_file` made.
    ["self".to_owned(), pid.to_string()].iter().find_map(|process| {
        let mounts = std::fs::read_to_string(format!("/proc/{process}/mountinfo")).ok()?;
        let (at, huge) = mounted(&mounts, &stat)?;
        is_unasked(&huge).then(|| objection(&format!("the tmpfs on {at}: huge"), &huge))
    })
}

/// The same of memfds that are yet to be made.
pub fn unasked_large_memfds() -> bool {
    host_setting().is_some_and(|setting| is_unasked(&setting))
}

fn objection(what: &str, setting: &str) -> String {
    format!(
        "{what} is \"{setting}\", with which the kernel fills holes of its RAM that stand for pages in swap: \
         set it to \"advise\" or \"never\""
    )
}

fn is_unasked(setting: &str) -> bool {
    matches!(setting, "always" | "within_size" | "force")
}

fn host_setting() -> Option<String> {
    chosen(&std::fs::read_to_string(ENABLED).ok()?).map(str::to_owned)
}

/// Of a list like "always [never]".
fn chosen(list: &str) -> Option<&str> {
    list.split_ascii_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

/// Where the file system of a file is mounted, and its option `huge`; "never" without one.
fn mounted(mounts: &str, stat: &Stat) -> Option<(String, String)> {
    let device = format!("{}:{}", major(stat.st_dev), minor(stat.st_dev));
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let at = (fields.nth(2) == Some(device.as_str())).then(|| fields.nth(1))??;
        let options = line.rsplit(' ').next()?;
        let huge = options.split(',').find_map(|option| option.strip_prefix("huge="));
        Some((at.to_owned(), huge.unwrap_or("never").to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_mount_is_found_by_its_device() {
        let mut stat = fstat(std::fs::File::open("/proc/self/exe").unwrap()).unwrap();
        stat.st_dev = rustix::fs::makedev(0, 29);
        let line = |options: &str| {
            format!(
                "22 1 254:0 / / rw shared:1 - ext4 /dev/root rw\n\
                 29 22 0:29 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs {options}\n"
            )
        };
        let found = |options: &str| mounted(&line(options), &stat);
        let at = |huge: &str| Some(("/dev/shm".to_owned(), huge.to_owned()));
        assert_eq!(found("rw,size=8k,huge=within_size,inode64"), at("within_size"));
        assert_eq!(found("rw"), at("never"));
        stat.st_dev = rustix::fs::makedev(0, 30);
        assert_eq!(mounted(&line("rw,huge=always"), &stat), None);
    }

    #[test]
    fn ram_files_of_our_own_are_never_objected_to() {
        let Ok(file) = crate::ram_file(ballast_units::Bytes::from_mib(2), crate::Huge::Advise)
        else {
            return;
        };
        if host_setting().as_deref() != Some("force") {
            assert_eq!(unasked_large_pages(&file, std::process::id()), None);
        }
        let memfd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        let objection = unasked_large_pages(&memfd, std::process::id());
        assert_eq!(objection.is_some(), unasked_large_memfds(), "{objection:?}");
    }
}
