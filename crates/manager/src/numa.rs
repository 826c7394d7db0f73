//! On which NUMA node a guest's pages are. Linux takes a page from the node of the thread that asks for it;
//! with faults served here, that would be wherever a thread of the manager's happens to run. So those of a
//! VM whose VMM may run on one node only, or have memory of one only, ask for theirs from that node. What
//! QEMU itself binds (`host-nodes`, `policy`) is bound in the RAM file and wins.
//!
//! See docs/design/scale.md.

use std::path::Path;

use rustix::io::Errno;

/// Where the kernel shows them.
pub const NODES: &str = "/sys/devices/system/node";
/// Linux's most are 1,024 (CONFIG_NODES_SHIFT is 10 at most).
pub const MOST: usize = 1024;

/// A node with memory, and its processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number of it.
    pub id: usize,
    cpus: Vec<(usize, usize)>,
}

/// Pages that this thread asks for, and threads that it starts from now on, come from the node of the
/// process `pid` if it has one. Elsewhere, and where all nodes are the same one, nothing changes.
pub fn follow(pid: u32) {
    let nodes = nodes(Path::new(NODES));
    if nodes.len() < 2 {
        return;
    }
    let Ok(status) = std::fs::read(format!("/proc/{pid}/status")) else { return };
    let Some(node) = home(&String::from_utf8_lossy(&status), &nodes) else { return };
    match prefer(node) {
        Ok(()) => tracing::info!(pid, "its pages come from node {node}"),
        Err(e) => tracing::warn!(pid, "its pages come from any node, not from {node}: {e}"),
    }
}

/// Those with memory. What cannot be read is not there.
pub fn nodes(folder: &Path) -> Vec<Node> {
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    let with_memory = read("has_memory").and_then(|text| ranges(&text)).unwrap_or_default();
    let ids = with_memory.into_iter().flat_map(|(first, last)| first..=last.min(MOST - 1));
    ids.filter_map(|id| Some(Node { id, cpus: ranges(&read(&format!("node{id}/cpulist"))?)? }))
        .collect()
}

/// The one node that a process of this /proc/PID/status may have memory of, or else run on.
fn home(status: &str, nodes: &[Node]) -> Option<usize> {
    let list = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        ranges(line).filter(|ranges| !ranges.is_empty())
    };
    let meets =
        |a: &[(usize, usize)], b: (usize, usize)| a.iter().any(|r| r.0 <= b.1 && b.0 <= r.1);
    let only = |fits: &dyn Fn(&Node) -> bool| {
        let mut fitting = nodes.iter().filter(|node| fits(node));
        fitting.next().filter(|_| fitting.next().is_none()).map(|node| node.id)
    };
    let memory = list("Mems_allowed_list")?;
    let cpus = list("Cpus_allowed_list")?;
    let may = |node: &Node| meets(&memory, (node.id, node.id));
    let runs = |node: &Node| node.cpus.iter().any(|&range| meets(&cpus, range));
    only(&may).or_else(|| only(&runs).filter(|id| meets(&memory, (*id, *id))))
}

/// "0-3,8" as ranges. None for what is no such list.
fn ranges(text: &str) -> Option<Vec<(usize, usize)>> {
    let words = text.trim().split(',').filter(|word| !word.is_empty());
    words
        .map(|word| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            let range = (first.parse().ok()?, last.parse().ok()?);
            (range.0 <= range.1).then_some(range)
        })
        .collect()
}

/// Of the calling thread, and of those that it starts: from this node while it has any, else from others.
fn prefer(node: usize) -> rustix::io::Result<()> {
    const BITS: usize = u64::BITS as usize;
    let mut mask = [0u64; MOST / BITS];
    *mask.get_mut(node / BITS).ok_or(Errno::INVAL)? |= 1 << (node % BITS);
    // The kernel reads one bit less than it is told.
    let bits = MOST + 1;
    // SAFETY: the kernel reads MOST bits, all of them in `mask`, and changes nothing but from where it takes
    // pages for this thread.
    let result = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_PREFERRED, mask.as_ptr(), bits)
    };
    if result < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes as the kernel shows them: 0 and 1 with memory, 2 with processors alone.
    fn fake() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("has_memory"), "0-1\n").unwrap();
        for (node, cpus) in [(0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "16-19\n")] {
            let folder = dir.path().join(format!("node{node}"));
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), cpus).unwrap();
        }
        dir
    }

    #[test]
    fn a_vmm_on_one_node_has_its_pages_there_and_others_anywhere() {
        let dir = fake();
        let nodes = nodes(dir.path());
        assert_eq!(nodes.iter().map(|node| node.id).collect::<Vec<_>>(), [0, 1]);
        let home = |cpus: &str, memory: &str| {
            let status =
                format!("Name:\tq\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n");
            home(&status, &nodes)
        };
        assert_eq!(home("0-19", "0-1"), None, "anywhere");
        assert_eq!(home("0-19", "1"), Some(1), "its memory is bound");
        assert_eq!(home("0-3", "1"), Some(1), "memory wins");
        assert_eq!(home("12-13", "0-1"), Some(1), "its processors are");
        assert_eq!(home("3-4", "0-1"), None, "two nodes");
        assert_eq!(home("16-17", "0-1"), None, "a node without memory");
        assert_eq!(home("0-3,16", "0-1"), Some(0), "the one with memory");
        for (cpus, memory) in [("", ""), ("x", "1"), ("3-1", "0-1"), ("0", "")] {
            assert_eq!(home(cpus, memory), None, "'{cpus}' '{memory}'");
        }
        assert_eq!(super::nodes(Path::new("/nonexistent")), []);
    }

    /// The policy of this thread: its mode, and the first nodes of its mask.
    fn policy() -> (libc::c_int, u64) {
        let (mut mode, mut mask) = (0, [0u64; MOST / 64]);
        // SAFETY: the kernel writes one number and MOST bits, for which there is room.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                MOST + 1,
                std::ptr::null_mut::<libc::c_void>(),
                0,
            )
        };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        (mode, mask[0])
    }

    #[test]
    fn threads_inherit_the_node_and_others_are_not_concerned() {
        let before = policy();
        std::thread::spawn(|| match prefer(0) {
            Ok(()) => {
                let inherited = std::thread::spawn(policy).join().unwrap();
                assert_eq!(inherited, (libc::MPOL_PREFERRED, 1));
            }
            // A kernel without NUMA, or a sandbox that forbids it.
            Err(e) => assert!(matches!(e, Errno::NOSYS | Errno::PERM), "{e}"),
        })
        .join()
        .unwrap();
        assert_eq!(policy(), before);
        assert_eq!(prefer(MOST), Err(Errno::INVAL));
    }
}
