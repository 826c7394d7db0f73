//! Loads the modules of the initramfs, in the order that `/lib/modules/order` lists them.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

const FOLDER: &str = "/lib/modules";

/// Loads them all; returns what went wrong, for the console.
pub fn load() -> Vec<String> {
    let order = match std::fs::read_to_string(format!("{FOLDER}/order")) {
        Ok(text) => text,
        // A kernel that has everything built in needs none.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(e) => return vec![format!("{FOLDER}/order: {e}")],
    };
    let path = |name: &str| Path::new(FOLDER).join(name);
    order.lines().filter(|l| !l.is_empty()).filter_map(|name| insert(&path(name)).err()).collect()
}

pub fn insert(path: &Path) -> Result<(), String> {
    let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let parameters: &CStr = c"";
    // SAFETY: the descriptor is open for the call and the parameter string ends in a NUL; the
    // kernel copies what it needs.
    let rc =
        unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), parameters.as_ptr(), 0) };
    if rc == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EEXIST) => Ok(()),
        _ => Err(format!("module {}: {error}", path.display())),
    }
}
