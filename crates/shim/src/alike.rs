//! What makes a mapping of the RAM file like those beside it.
//!
//! The kernel makes one mapping of neighbours only if they are alike in everything. A page that comes
//! home and is not would stay a mapping of its own, and a process may have only so many of them
//! (vm.max_map_count). How the VMM wants its RAM (in huge pages, not in core dumps) is its own
//! business and comes after it mapped it, so it is read off a mapping that is as the VMM left it.

use std::ffi::c_int;
use std::fs::File;
use std::io::{self, BufRead, BufReader};

use ballast_uffd::procmap::Vma;
use ballast_units::HostAddr;
use rustix::mm::MapFlags;

use crate::placement::Placement;
use crate::ram::Ram;

/// What madvise(2) takes for a flag of smaps.
const ADVICE: [(&str, c_int); 6] = [
    ("dc", libc::MADV_DONTFORK),
    ("dd", libc::MADV_DONTDUMP),
    ("hg", libc::MADV_HUGEPAGE),
    ("nh", libc::MADV_NOHUGEPAGE),
    ("rr", libc::MADV_RANDOM),
    ("sr", libc::MADV_SEQUENTIAL),
];
/// Of a mapping made with MAP_NORESERVE.
const NORESERVE: &str = "nr";

/// How the RAM is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alike {
    advice: Vec<c_int>,
    noreserve: bool,
    placement: Option<Placement>,
}

impl Alike {
    /// Reads it from /proc. The kernel walks the page tables of what it passes, the RAM included: the
    /// earlier in the VM's life, the cheaper.
    pub fn of(ram: Ram) -> Alike {
        let smaps = File::open("/proc/self/smaps").and_then(|file| find(BufReader::new(file), ram));
        // As QEMU maps RAM by default, and the shim leaves it.
        let Some((at, flags)) = smaps.ok().flatten() else { return Alike::from_flags("dc") };
        Alike { placement: Placement::at(at), ..flags }
    }

    pub fn advice(&self) -> &[c_int] {
        &self.advice
    }

    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    pub fn flags(&self) -> MapFlags {
        if self.noreserve { MapFlags::NORESERVE } else { MapFlags::empty() }
    }

    fn from_flags(flags: &str) -> Alike {
        let has = |flag: &str| flags.split_ascii_whitespace().any(|f| f == flag);
        Alike {
            advice: ADVICE
                .iter()
                .filter(|(flag, _)| has(flag))
                .map(|(_, advice)| *advice)
                .collect(),
            noreserve: has(NORESERVE),
            placement: None,
        }
    }
}

/// The first shared mapping inside the RAM, and its flags: what is mapped from the store is private.
fn find(mut smaps: impl BufRead, ram: Ram) -> io::Result<Option<(HostAddr, Alike)>> {
    let mut inside = None;
    let mut line = Vec::new();
    while smaps.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if let Some(vma) = Vma::parse(&text) {
            let is_home = vma.shared && ram.contains(vma.start, vma.len());
            inside = is_home.then_some(vma.start);
        } else if let Some(flags) = text.strip_prefix("VmFlags:")
            && let Some(at) = inside
        {
            return Ok(Some((at, Alike::from_flags(flags))));
        }
        line.clear();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_units::Bytes;

    const SMAPS: &str = "\
1000-3000 rw-s 00000000 00:01 7 /memfd:other
Size:                  8 kB
VmFlags: rd wr sh mr mw me ms rr
4000-5000 rw-p 00000000 00:01 9 /dev/shm/store
VmFlags: rd wr mr mw me nr um uw
5000-8000 rw-s 00001000 00:01 8 /memfd:ram (deleted)
Size:                 12 kB
THPeligible:           0
VmFlags: rd wr sh mr mw me ms dc dd hg um uw
";

    #[test]
    fn the_flags_are_those_of_a_home_mapping_inside_the_ram() {
        let ram = Ram { addr: HostAddr(0x4000), len: Bytes(0x4000), file_offset: 0 };
        let (at, found) = find(SMAPS.as_bytes(), ram).unwrap().unwrap();
        assert_eq!(at, HostAddr(0x5000));
        let advice = [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, libc::MADV_HUGEPAGE];
        // One that was managed before the shim kept that from the kernel.
        assert_eq!(found.advice(), advice);
        assert_eq!(found.flags(), MapFlags::empty());
        let elsewhere = Ram { addr: HostAddr(0x9000), ..ram };
        assert_eq!(find(SMAPS.as_bytes(), elsewhere).unwrap(), None);
        assert_eq!(Alike::from_flags("rd nr").flags(), MapFlags::NORESERVE);
    }

    #[test]
    fn without_any_the_default_is_taken() {
        let ram = Ram { addr: HostAddr(0), len: Bytes(0x1000), file_offset: 0 };
        assert_eq!(Alike::of(ram).advice(), [libc::MADV_DONTFORK]);
    }
}
