//! The environment: what the shim is told, and what it takes away from the VMM's children.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use ballast_shim_proto::{MAX_PARTS, VmName};

const VM: &str = "BALLAST_VM";
const SOCKET: &str = "BALLAST_SHIM_SOCKET";
const RAM_SIZE: &str = "BALLAST_RAM_SIZE";
const OPTIONAL: &str = "BALLAST_OPTIONAL";
const PRELOAD: &str = "LD_PRELOAD";
const FILE_NAME: &[u8] = b"libballast_shim.so";

pub struct Config {
    pub vm: VmName,
    /// Absolute, because a daemon changes its directory.
    pub socket: PathBuf,
    /// Bytes of each part, in the order in which the VMM maps them.
    pub ram_sizes: Vec<u64>,
    pub optional: bool,
}

pub enum Start {
    /// This process was not asked for.
    Inactive,
    Active(Config),
    /// It was, but wrongly.
    Broken {
        what: String,
        optional: bool,
    },
}

pub fn from_environment() -> Start {
    parse(|name| std::env::var_os(name))
}

fn parse(var: impl Fn(&str) -> Option<OsString>) -> Start {
    let Some(vm) = var(VM) else { return Start::Inactive };
    let optional = var(OPTIONAL).is_some_and(|v| v == "1");
    let broken = |what: String| Start::Broken { what, optional };
    let vm = match vm.to_str().map(VmName::new) {
        Some(Ok(vm)) => vm,
        _ => return broken(format!("{VM}={vm:?} is not a VM's name")),
    };
    let socket = match var(SOCKET) {
        Some(path) if !path.is_empty() => match std::path::absolute(&path) {
            Ok(path) => path,
            Err(e) => return broken(format!("{SOCKET}={path:?}: {e}")),
        },
        _ => return broken(format!("{SOCKET} is not set")),
    };
    let ram_size = var(RAM_SIZE).unwrap_or_default();
    let Some(ram_sizes) = ram_size.to_str().and_then(sizes) else {
        return broken(format!(
            "{RAM_SIZE}={ram_size:?} is not a number of bytes, nor up to {MAX_PARTS} with commas between"
        ));
    };
    Start::Active(Config { vm, socket, ram_sizes, optional })
}

fn sizes(text: &str) -> Option<Vec<u64>> {
    let size = |part: &str| part.parse().ok().filter(|&size: &u64| size > 0);
    let all: Vec<u64> = text.split(',').map(size).collect::<Option<_>>()?;
    (all.len() <= MAX_PARTS).then_some(all)
}

/// Removes what was for this process alone, so that what it executes is left in peace.
pub fn scrub_environment() {
    let own_path = own_path();
    let preload = std::env::var_os(PRELOAD).map(|list| without(&list, &own_path));
    // SAFETY: this runs in the loader, before main: there is no other thread that reads the
    // environment.
    unsafe {
        for name in [VM, SOCKET, RAM_SIZE, OPTIONAL] {
            std::env::remove_var(name);
        }
        match preload {
            Some(rest) if !rest.is_empty() => std::env::set_var(PRELOAD, rest),
            _ => std::env::remove_var(PRELOAD),
        }
    }
}

/// LD_PRELOAD (separated by colons or spaces) without the entries that are this library.
fn without(list: &OsStr, own_path: &[u8]) -> OsString {
    let others: Vec<&[u8]> = list
        .as_bytes()
        .split(|b| matches!(b, b':' | b' '))
        .filter(|e| {
            !e.is_empty() && *e != own_path && e.rsplit(|b| *b == b'/').next() != Some(FILE_NAME)
        })
        .collect();
    OsString::from_vec(others.join(&b':'))
}

/// The path this library was loaded from; empty if the loader does not say.
fn own_path() -> Vec<u8> {
    let address: fn() -> Start = from_environment;
    // SAFETY: all-zero is a valid Dl_info: null pointers and addresses.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is ours to write; any address may be asked about.
    let found = unsafe { libc::dladdr(address as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return Vec::new();
    }
    // SAFETY: the loader's own string, which lives as long as the library is loaded.
    unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(vars: &[(&str, &str)]) -> Start {
        parse(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn without_a_name_nothing_happens_whatever_else_is_set() {
        assert!(matches!(start(&[(RAM_SIZE, "junk"), (SOCKET, "x")]), Start::Inactive));
    }

    #[test]
    fn a_full_environment_is_understood() {
        let vars = [(VM, "web"), (SOCKET, "/run/s"), (RAM_SIZE, "4096"), (OPTIONAL, "1")];
        let Start::Active(config) = start(&vars) else { panic!("not active") };
        assert_eq!(config.vm.as_str(), "web");
        assert_eq!(config.socket, PathBuf::from("/run/s"));
        assert_eq!((config.ram_sizes, config.optional), (vec![4096], true));
        let Start::Active(config) = start(&[(VM, "web"), (SOCKET, "s"), (RAM_SIZE, "1")]) else {
            panic!("not active")
        };
        assert!(config.socket.is_absolute() && !config.optional);
    }

    #[test]
    fn a_ram_may_have_several_parts() {
        let parts = |sizes| match start(&[(VM, "a"), (SOCKET, "s"), (RAM_SIZE, sizes)]) {
            Start::Active(config) => config.ram_sizes,
            _ => Vec::new(),
        };
        assert_eq!(parts("4096,8192"), [4096, 8192]);
        assert_eq!(parts("1,2,3,4"), [1, 2, 3, 4]);
        for bad in ["1,2,3,4,5", "1,", ",1", "1,0", "1,,2", "1 ,2"] {
            assert!(parts(bad).is_empty(), "{bad}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (vars, named) in [
            (vec![(VM, "a/b")], VM),
            (vec![(VM, "a")], SOCKET),
            (vec![(VM, "a"), (SOCKET, "")], SOCKET),
            (vec![(VM, "a"), (SOCKET, "s")], RAM_SIZE),
            (vec![(VM, "a"), (SOCKET, "s"), (RAM_SIZE, "256M")], RAM_SIZE),
            (vec![(VM, "a"), (SOCKET, "s"), (RAM_SIZE, "0")], RAM_SIZE),
        ] {
            let Start::Broken { what, optional: false } = start(&vars) else {
                panic!("{vars:?} was accepted")
            };
            assert!(what.contains(named), "{what}");
        }
    }

    #[test]
    fn only_this_library_leaves_the_preload_list() {
        let rest = |list: &str| without(OsStr::new(list), b"/opt/x/shim.so");
        assert_eq!(rest("/usr/lib/libballast_shim.so"), "");
        assert_eq!(rest("/opt/x/shim.so"), "");
        assert_eq!(rest("/lib/a.so:/usr/lib/libballast_shim.so b.so"), "/lib/a.so:b.so");
        assert_eq!(rest("/lib/notlibballast_shim.so"), "/lib/notlibballast_shim.so");
    }
}
