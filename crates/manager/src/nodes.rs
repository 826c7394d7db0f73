//! The NUMA nodes of the host, as the policy sees them: how much is free on each, and which VMs can have memory of one
//! alone. Hosts with one node have none here.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use ballast_policy::{Node, NodeState, State};
use ballast_units::{Bytes, PAGE_SIZE, Pages};

use crate::numa;
use crate::vm::Vm;

/// Looks at the nodes once a turn, and keeps the states that they were in.
#[derive(Debug)]
pub struct Nodes {
    folder: PathBuf,
    /// Those with memory, when the manager was started.
    ids: Vec<usize>,
    before: BTreeMap<u32, State>,
}

impl Nodes {
    /// Of this host.
    pub fn new() -> Nodes {
        Nodes::at(Path::new(numa::NODES))
    }

    fn at(folder: &Path) -> Nodes {
        let ids: Vec<usize> = numa::nodes(folder).into_iter().map(|node| node.id).collect();
        let ids = if ids.len() < 2 { Vec::new() } else { ids };
        Nodes { folder: folder.to_owned(), ids, before: BTreeMap::new() }
    }

    /// What is on them now. One that cannot be read is left out.
    pub fn look<'a>(&self, vms: impl Iterator<Item = &'a Vm>) -> Vec<Node> {
        if self.ids.is_empty() {
            return Vec::new();
        }
        let mut nodes: Vec<Node> = self.ids.iter().filter_map(|&id| self.node(id)).collect();
        for vm in vms {
            let bound = vm.paged().as_ref().and_then(|paged| {
                // What can be plugged is made as the rest is.
                let (part, file) = paged.memory().backend().parts().next()?;
                bound_node(file, part.file_offset)
            });
            if let Some(node) = nodes.iter_mut().find(|node| Some(node.id) == bound) {
                node.bound.push(vm.id);
            }
        }
        nodes
    }

    /// How a turn left them.
    pub fn left_in(&mut self, states: &[NodeState]) {
        self.before.extend(states.iter().map(|node| (node.id, node.state)));
    }

    fn node(&self, id: usize) -> Option<Node> {
        let text = std::fs::read_to_string(self.folder.join(format!("node{id}/meminfo"))).ok()?;
        let (size, free) = meminfo(&text)?;
        // Set aside for others, used or not.
        let size = size.saturating_sub(huge_pages(&self.folder.join(format!("node{id}"))));
        let id = u32::try_from(id).ok()?;
        let before = self.before.get(&id).copied().unwrap_or_default();
        Some(Node { id, size, free, before, bound: Vec::new() })
    }
}

/// What a node has as huge pages (hugetlbfs), of all sizes.
fn huge_pages(node: &Path) -> Pages {
    let sizes = std::fs::read_dir(node.join("hugepages"));
    let of_size = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        let kib = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        let n = std::fs::read_to_string(entry.path().join("nr_hugepages")).ok()?;
        let bytes = kib.parse::<u64>().ok()?.checked_mul(1024)?;
        Some(Bytes(bytes.checked_mul(n.trim().parse().ok()?)?).pages())
    };
    sizes.into_iter().flatten().flatten().filter_map(of_size).sum()
}

/// All of a node's memory, and what is free or page cache: "Node 0 MemTotal:  131801652 kB".
fn meminfo(text: &str) -> Option<(Pages, Pages)> {
    let value = |key: &str| {
        let mut words = text.lines().map(str::split_whitespace);
        let value = words.find_map(|mut line| (line.nth(2)? == key).then(|| line.next())?)?;
        Some(Bytes(value.parse::<u64>().ok()?.checked_mul(1024)?).pages())
    };
    let free = value("MemFree:")? + value("Active(file):")? + value("Inactive(file):")?;
    Some((value("MemTotal:")?, free))
}

/// The policy of the memory at an address, and not of the thread: of linux/mempolicy.h, and not in libc.
const MPOL_F_ADDR: libc::c_ulong = 2;

/// The one node that pages of the file are from at `offset`, if it is bound to one (`mbind`, QEMU's `policy=bind`).
fn bound_node(file: &File, offset: u64) -> Option<u32> {
    let (mut mode, mut mask) = (0, [0u64; numa::MOST / u64::BITS as usize]);
    let offset = libc::off_t::try_from(offset).ok()?;
    // SAFETY: a new mapping of one page, which nobody can touch, so that it does no harm if its VMM truncates the file.
    let place = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE_SIZE,
            libc::PROT_NONE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset,
        )
    };
    if place == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the kernel writes one number and MOST bits, for which there is room, and looks at a mapping of ours.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            mask.as_mut_ptr(),
            numa::MOST + 1,
            place,
            MPOL_F_ADDR,
        )
    };
    // SAFETY: the mapping that was made above, which nobody else knows of.
    unsafe { libc::munmap(place, PAGE_SIZE) };
    // The upper bits are flags: how the mask is read on a host whose nodes come and go.
    if result < 0 || mode & 0xff != libc::MPOL_BIND {
        return None;
    }
    only(&mask)
}

/// The one node of a mask, if it has one.
fn only(mask: &[u64]) -> Option<u32> {
    let mut set = mask.iter().enumerate().filter(|(_, bits)| **bits != 0);
    let (word, bits) = set.next()?;
    let one = bits.is_power_of_two() && set.next().is_none();
    one.then_some((word as u32) * u64::BITS + bits.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "Node 1 MemTotal:       16384000 kB\nNode 1 MemFree:         1024000 kB\n\
        Node 1 MemUsed:        15360000 kB\nNode 1 Active(file):      40000 kB\n\
        Node 1 Inactive(file):    60000 kB\nNode 1 Shmem:           9000000 kB\n";

    #[test]
    fn memory_that_is_bound_to_several_nodes_is_of_none() {
        let masks: [&[u64]; 7] = [&[1], &[4], &[0, 2], &[3], &[1, 1], &[0, 6], &[0, 0]];
        let found = [Some(0), Some(2), Some(65), None, None, None, None];
        assert_eq!(masks.map(only), found);
    }

    fn fake(nodes: &[usize]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let list: Vec<String> = nodes.iter().map(usize::to_string).collect();
        std::fs::write(dir.path().join("has_memory"), list.join(",")).unwrap();
        for node in nodes {
            let folder = dir.path().join(format!("node{node}"));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), "0-3\n").unwrap();
            std::fs::write(folder.join("meminfo"), MEMINFO).unwrap();
        }
        dir
    }

    #[test]
    fn nodes_have_what_is_free_and_what_can_be_dropped_and_the_state_they_were_left_in() {
        let dir = fake(&[0, 1]);
        let mut nodes = Nodes::at(dir.path());
        let looked = nodes.look(std::iter::empty());
        assert_eq!(looked.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(looked[1].size, Bytes(16_384_000 << 10).pages());
        assert_eq!(looked[1].free, Bytes(1_124_000 << 10).pages());
        assert_eq!(looked[1].before, State::High);
        nodes.left_in(&[NodeState { id: 1, state: State::Hard, missing: Pages(7) }]);
        let before: Vec<State> =
            nodes.look(std::iter::empty()).iter().map(|node| node.before).collect();
        assert_eq!(before, [State::High, State::Hard]);
        for (kib, n) in [(2_048, 100), (1 << 20, 1)] {
            let of_size = dir.path().join(format!("node1/hugepages/hugepages-{kib}kB"));
            std::fs::create_dir_all(&of_size).unwrap();
            std::fs::write(of_size.join("nr_hugepages"), format!("{n}\n")).unwrap();
        }
        let sizes: Vec<Pages> =
            nodes.look(std::iter::empty()).iter().map(|node| node.size).collect();
        let all = Bytes(16_384_000 << 10).pages();
        assert_eq!(sizes, [all, all - Pages::from_mib(200 + 1_024)]);
        // One that says something else, or nothing, is not there.
        std::fs::write(dir.path().join("node0/meminfo"), "Node 0 MemTotal: many kB\n").unwrap();
        assert_eq!(nodes.look(std::iter::empty()).len(), 1);
        assert_eq!(meminfo(""), None);
        assert!(Nodes::at(fake(&[0]).path()).look(std::iter::empty()).is_empty(), "one node");
    }

    #[test]
    fn a_file_that_is_bound_to_a_node_is_seen_to_be() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = File::create_new(dir.path().join("ram")).unwrap();
        file.set_len(4 * PAGE_SIZE as u64).unwrap();
        let file = File::options().read(true).write(true).open(dir.path().join("ram")).unwrap();
        assert_eq!(bound_node(&file, 0), None);
        // SAFETY: a new mapping of the whole file.
        let place = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4 * PAGE_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(place, libc::MAP_FAILED);
        let mask = [1u64; 1];
        // SAFETY: a mapping of ours, and a mask of 64 bits.
        let bind = |mode: libc::c_int| unsafe {
            libc::syscall(libc::SYS_mbind, place, 2 * PAGE_SIZE, mode, mask.as_ptr(), 65, 0)
        };
        if bind(libc::MPOL_PREFERRED) != 0 {
            eprintln!("SKIPPED: no mbind here: {}", std::io::Error::last_os_error());
            return;
        }
        assert_eq!(bound_node(&file, 0), None, "preferred is not bound");
        assert_eq!(bind(libc::MPOL_BIND), 0, "{}", std::io::Error::last_os_error());
        assert_eq!(bound_node(&file, 0), Some(0));
        assert_eq!(bound_node(&file, 3 * PAGE_SIZE as u64), None, "another part of it");
        // SAFETY: the mapping that was made above.
        unsafe { libc::munmap(place, 4 * PAGE_SIZE) };
    }
}
