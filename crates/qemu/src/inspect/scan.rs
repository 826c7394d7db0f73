//! What /proc tells about a VMM and about who else has its RAM file. Blocking.
//!
//! maps, not smaps: smaps walks the page tables under the lock that the VMM's own faults want.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use ballast_uffd::procmap::{self, Vma};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE};
use rustix::fs::{makedev, statfs};
use rustix::io::Errno;

use super::descriptors::Open;
use super::fd_folder::FdFolder;
use super::{Holder, MappedRam, RamMapping, census};
use crate::bounded;
use crate::monitor::Device;
use crate::proc_text;
use crate::process;
use crate::shown::shown;
use crate::spec;

/// What is shown of a device's name, characters.
const KIND: usize = 80;
/// The manager's own children have its files between fork and exec; then they are gone.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// How the RAM, or a part of it, is recognised among the mappings.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub announced: Option<RamMapping>,
    pub size: Option<Bytes>,
}

pub(super) struct Found {
    pub commanded: Vec<Device>,
    pub open: Open,
    pub locked: Bytes,
    pub ram: Option<MappedRam>,
    pub holders: Vec<Holder>,
}

/// A file, by the two names under which it is met. They are the same except on file systems with
/// several trees (btrfs, overlayfs).
#[derive(Clone, Copy)]
struct Identity {
    /// As in maps.
    mapped: ((u32, u32), u64),
    /// As stat tells.
    stat: ((u32, u32), u64),
}

/// A process, and its real user, as far as that is told.
#[derive(Clone, Copy)]
struct Owned {
    pid: u32,
    user: Option<u32>,
}

/// `since`: see [`inspect_since`](super::inspect_since).
pub(super) fn process(pid: u32, wanted: &[Wanted], since: Instant) -> io::Result<Found> {
    let status = fs::read(format!("/proc/{pid}/status"))?;
    let status = String::from_utf8_lossy(&status);
    let vmm = Owned { pid, user: proc_text::status_number(&status, "Uid") };
    let mut searches: Vec<Search> = wanted.iter().map(|&wanted| Search::new(wanted)).collect();
    for search in &mut searches {
        search.run(pid)?;
    }
    let mut ram = None;
    let mut others: Vec<Holder> = Vec::new();
    for (n, search) in searches.iter().enumerate() {
        let vma = search.found();
        let part = vma.map(|vma| search.wanted.mapped_ram(pid, vma, search.whole));
        ram = if n == 0 { part } else { ram.zip(part).map(|(all, part)| both(all, part)) };
        if let Some(vma) = vma.filter(|vma| vma.shared && vma.inode != 0) {
            others.extend(holders(vmm, search.wanted.identity(vma), since)?);
        }
    }
    Ok(Found {
        commanded: commanded(&bounded::command_line(pid)?),
        open: Open::of(pid)?,
        locked: locked(&status),
        ram,
        holders: others,
    })
}

/// By a process itself, or by devices of its: what the text of its status tells of either.
fn locked(status: &str) -> Bytes {
    let field = |key| proc_text::status_field(status, key).unwrap_or(Bytes::ZERO);
    Bytes(field("VmLck").0.saturating_add(field("VmPin").0))
}

/// What holds of both.
fn both(a: MappedRam, b: MappedRam) -> MappedRam {
    MappedRam {
        shared: a.shared && b.shared,
        file: a.file && b.file,
        page_size: a.page_size.max(b.page_size),
        as_announced: a.as_announced && b.as_announced,
    }
}

/// The search for one part of the RAM.
struct Search {
    wanted: Wanted,
    /// The first that may be it: of its file and shared, shared, and any. A VMM may have tens of thousands, with long names.
    firsts: [Option<Vma>; 3],
    /// Its last page was seen.
    whole: bool,
}

impl Search {
    fn new(wanted: Wanted) -> Search {
        Search { wanted, firsts: [None, None, None], whole: false }
    }

    /// Goes over no more than is needed: RAM that is shared is mapped in thousands of pieces.
    fn run(&mut self, pid: u32) -> io::Result<()> {
        let Some(ram) = self.wanted.announced else {
            return procmap::each(pid, |vma| {
                self.look_at(&vma);
                true
            });
        };
        let end = HostAddr(ram.addr.0.saturating_add(ram.len.0));
        let last = HostAddr(end.0.saturating_sub(1));
        procmap::each_from(pid, ram.addr, |vma| {
            if vma.start >= end {
                return None;
            }
            self.look_at(&vma);
            let is_told = vma.shared && vma.inode == ram.inode;
            Some(if is_told { last.max(vma.end) } else { vma.end })
        })
    }

    fn look_at(&mut self, vma: &Vma) {
        self.whole |= self.wanted.ends_in(vma);
        if !self.wanted.may_be(vma) {
            return;
        }
        let of_file = self.wanted.announced.is_some_and(|ram| ram.inode == vma.inode);
        for (first, is) in self.firsts.iter_mut().zip([vma.shared && of_file, vma.shared, true]) {
            if is && first.is_none() {
                *first = Some(vma.clone());
            }
        }
    }

    fn found(&self) -> Option<&Vma> {
        self.firsts.iter().flatten().next()
    }
}

impl Wanted {
    fn may_be(&self, vma: &Vma) -> bool {
        match (self.announced, self.size) {
            // Pages that are shared are mapped elsewhere, one by one, the first perhaps among them:
            // any part of the RAM that is its file's tells.
            (Some(ram), _) => {
                let home = vma.inode == ram.inode && overlaps(vma, ram);
                home || vma.holds(ram.addr)
            }
            (None, Some(size)) => vma.writable && vma.len() == size,
            (None, None) => false,
        }
    }

    fn identity(&self, vma: &Vma) -> Identity {
        let mapped = (vma.device, vma.inode);
        let stat = self.announced.map_or(mapped, |ram| (ram.device, ram.inode));
        Identity { mapped, stat }
    }

    /// Whether the last page of the RAM lies in this mapping, which is of its file, or a private one of
    /// another: a page that is shared.
    fn ends_in(&self, vma: &Vma) -> bool {
        self.announced.is_none_or(|ram| {
            let last = ram.addr.0.checked_add(ram.len.0).and_then(|end| end.checked_sub(1));
            let its = vma.inode == ram.inode || (!vma.shared && vma.inode != 0);
            its && last.is_some_and(|last| vma.holds(HostAddr(last)))
        })
    }

    /// `whole`: all that was announced is mapped.
    fn mapped_ram(&self, pid: u32, vma: &Vma, whole: bool) -> MappedRam {
        MappedRam {
            shared: vma.shared,
            // Shared memory without a name of its own is shown as this.
            file: vma.inode != 0 && !vma.path.starts_with("/dev/zero"),
            page_size: page_size(pid, vma),
            // The inode alone: the devices of maps and of stat differ on some file systems.
            as_announced: self.announced.is_none_or(|ram| ram.inode == vma.inode && whole),
        }
    }
}

fn overlaps(vma: &Vma, ram: RamMapping) -> bool {
    vma.start.0 < ram.addr.0.saturating_add(ram.len.0) && ram.addr < vma.end
}

fn page_size(pid: u32, vma: &Vma) -> Bytes {
    let file = format!("/proc/{pid}/map_files/{:x}-{:x}", vma.start.0, vma.end.0);
    match statfs(file) {
        Ok(stat) if stat.f_type == libc::HUGETLBFS_MAGIC => Bytes(stat.f_bsize.unsigned_abs()),
        _ => Bytes(PAGE_SIZE as u64),
    }
}

/// What is gone, or not ours to see, is nobody's: None. What the manager itself lacks for a look is no finding.
pub(super) fn if_there<T>(look: io::Result<T>) -> io::Result<Option<T>> {
    match look {
        Ok(found) => Ok(Some(found)),
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Err(e),
            _ => Ok(None),
        },
    }
}

/// Whether a file of this name is one by which a device, or KVM, pins memory.
pub(super) fn pins(target: &str) -> bool {
    // /dev/vfio/vfio is opened before any device is; the pins come with it.
    let pinning = [
        "/dev/vfio/",
        "/dev/vhost-vdpa",
        "anon_inode:[vfio",
        "/dev/iommu",
        "/dev/udmabuf",
        // RDMA, of a migration for one.
        "/dev/infiniband/",
    ];
    pinning.iter().any(|prefix| target.starts_with(prefix)) || is_confidential(target)
}

/// Whether a file of this name is one of a VMM whose guest's memory is encrypted, or none of its own: KVM pins it, and what
/// is read there depends on where it lies.
pub(super) fn is_confidential(target: &str) -> bool {
    // The processor of SEV, which QEMU keeps open; guest_memfd, of SEV-SNP and TDX.
    target == "/dev/sev" || target.starts_with("anon_inode:[kvm-gmem")
}

/// Whether a file of this name passes commands through to a device, which does DMA to guest pages then.
pub(super) fn passes(target: &str) -> bool {
    let numbered = |prefix: &str| {
        let rest = target.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    // SCSI generic, block SCSI generic, NVMe generic.
    numbered("/dev/sg")
        || numbered("/dev/ng")
        || target.starts_with("/dev/bsg/")
        || target.starts_with("/dev/vhost-scsi")
}

/// The devices that the text of /proc/PID/cmdline asks for, of those that forbid paging.
pub(super) fn commanded(text: &str) -> Vec<Device> {
    spec::named_devices(&text.split('\0').collect::<Vec<_>>())
}

/// What of a process' command line pins guest memory, with its option.
pub(super) fn pinning(pid: u32) -> io::Result<Option<String>> {
    let named = commanded(&bounded::command_line(pid)?);
    let pinning = named.into_iter().find(|device| spec::pins_memory(&device.kind));
    Ok(pinning.map(|device| format!("{} {}", device.path, shown(device.kind.as_bytes(), KIND))))
}

fn holders(vmm: Owned, file: Identity, since: Instant) -> io::Result<Vec<Holder>> {
    let census = census::begun_after(since)?;
    let seen = census.may_have(file.mapped, file.stat, vmm.user);
    let others: Vec<u32> =
        seen.filter(|&pid| pid != vmm.pid && pid != std::process::id()).collect();
    if others.is_empty() {
        return Ok(Vec::new());
    }
    std::thread::sleep(SECOND_LOOK);
    others.into_iter().filter_map(|pid| holder(pid, file).transpose()).collect()
}

/// Whether `pid` has the file.
fn holder(pid: u32, file: Identity) -> io::Result<Option<Holder>> {
    let mut maps = false;
    let ((major, minor), inode) = file.mapped;
    let mapped = (makedev(major, minor), inode);
    if_there(procmap::each_file(pid, |part| {
        maps = (part.dev, part.inode) == mapped;
        !maps
    }))?;
    let holds = maps || has_open(pid, file.stat)?;
    let comm = || process::comm(pid).unwrap_or_else(|| "?".into());
    Ok(holds.then(|| Holder { pid, comm: comm(), maps }))
}

fn has_open(pid: u32, file: ((u32, u32), u64)) -> io::Result<bool> {
    let Some(fds) = if_there(FdFolder::of(pid))? else { return Ok(false) };
    let mut has = false;
    fds.each(|fd| {
        has = fds.file(fd) == Some(file);
        Ok(!has)
    })?;
    Ok(has)
}

/// Whether a process has `size` of memory to write to, in one piece or in adjoining ones: of a guest's RAM, pages that it
/// shares are mapped one by one.
pub(super) fn maps_memory(pid: u32, size: Bytes) -> io::Result<bool> {
    let (mut run, mut most) = (Run::NONE, Bytes::ZERO);
    procmap::each(pid, |vma| {
        most = most.max(run.add(&vma));
        most < size
    })?;
    Ok(most >= size)
}

/// Mappings that can be written to and lie next to each other.
struct Run {
    len: u64,
    end: HostAddr,
}

impl Run {
    const NONE: Run = Run { len: 0, end: HostAddr(0) };

    /// How long it is with the next one.
    fn add(&mut self, vma: &Vma) -> Bytes {
        let before = if vma.start == self.end { self.len } else { 0 };
        self.len = if vma.writable { before.saturating_add(vma.len().0) } else { 0 };
        self.end = vma.end;
        Bytes(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;
    use crate::testing::Apart;

    #[test]
    fn what_a_device_pins_counts_as_what_is_locked_does() {
        let told = "VmPeak:\t   90 kB\nVmLck:\t      8 kB\nVmPin:\t     16 kB\n";
        assert_eq!(locked(told), Bytes(24 << 10));
        assert_eq!(locked("VmLck:\t      8 kB\n"), Bytes(8 << 10));
        assert_eq!(locked("VmPin:\t     16 kB\n"), Bytes(16 << 10));
        assert_eq!(locked("VmPeak:\t   90 kB\n"), Bytes::ZERO);
    }

    #[test]
    fn of_many_mappings_three_are_kept() {
        let ram =
            RamMapping { addr: HostAddr(0x1000), len: Bytes(0x9000), device: (0, 1), inode: 7 };
        let mut search = Search::new(Wanted { announced: Some(ram), size: None });
        let maps = "1000-2000 rw-p 0 00:1 7 /a\n2000-3000 rw-p 0 00:1 7 /b\n3000-4000 rw-s 0 00:1 7 /c\n\
                    4000-5000 rw-s 0 00:1 7 /d\n5000-6000 rw-p 0 00:2 8 /e\n9000-a000 rw-s 0 00:1 7 /f\n";
        let seen: Vec<Option<HostAddr>> = maps
            .lines()
            .map(|line| {
                search.look_at(&Vma::parse(line).unwrap());
                search.found().map(|vma| vma.start)
            })
            .collect();
        // One that is shared is the better one, and the first of these stays.
        let [private, shared] = [0x1000, 0x3000].map(|at| Some(HostAddr(at)));
        assert_eq!(seen, [private, private, shared, shared, shared, shared]);
        assert!(search.whole);
        // One of another file is taken where none is of its own.
        let mut search = Search::new(Wanted { announced: Some(ram), size: None });
        search.look_at(&Vma::parse("0-8000 rw-s 0 00:2 8 /g").unwrap());
        assert_eq!(search.found().map(|vma| vma.inode), Some(8));
        search.look_at(&Vma::parse("8000-9000 rw-s 0 00:1 7 /h").unwrap());
        assert_eq!(search.found().map(|vma| vma.inode), Some(7));
        assert!(!search.whole);
    }

    /// Files by those names, in a /dev that nobody else sees, of a process with a VMM's arguments.
    #[test]
    fn what_a_process_was_started_with_and_what_it_has_open_is_found() {
        let script = "mount -t tmpfs none /dev; mkdir /dev/vfio; : >/dev/sg0; : >/dev/vfio/vfio; \
                      exec 8</dev/sg0 9</dev/vfio/vfio";
        let Some(vmm) = Apart::once(script, &["-device", "scsi-generic,drive=d"]) else { return };
        let found = process(vmm.pid(), &[], Instant::now()).unwrap();
        let commanded = found.commanded.iter().map(|device| device.kind.as_str());
        assert_eq!(commanded.collect::<Vec<_>>(), ["scsi-generic"]);
        assert_eq!(found.open.passing, ["/dev/sg0"]);
        assert_eq!(found.open.pinning, ["/dev/vfio/vfio"]);
        assert_eq!(found.open.direct, [""; 0]);
        // And so it is told to who asks.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let verdict = runtime.block_on(crate::inspect(vmm.pid(), None, &[]));
        let Verdict::Unmanaged(why) = verdict else { panic!("{verdict:?}") };
        assert!(why.contains("/dev/vfio/vfio is open"), "{why}");
    }

    #[test]
    fn memory_that_lies_in_pieces_is_one_and_what_cannot_be_written_is_none() {
        let longest = |maps: &str| {
            let mut run = Run::NONE;
            maps.lines().map(|line| run.add(&Vma::parse(line).unwrap()).0).max()
        };
        let pieces =
            "1000-3000 rw-s 0 00:1 7\n3000-4000 rw-p 0 00:2 8\n4000-8000 rw-s 3000 00:1 7\n";
        assert_eq!(longest(pieces), Some(0x7000));
        assert_eq!(longest("1000-3000 rw-p 0 0:0 0\n4000-5000 rw-p 0 0:0 0\n"), Some(0x2000));
        let guarded = "1000-3000 rw-p 0 0:0 0\n3000-9000 ---p 0 0:0 0\n9000-a000 rw-p 0 0:0 0\n";
        assert_eq!(longest(guarded), Some(0x2000));
        assert_eq!(longest("1000-3000 r--s 0 00:1 7"), Some(0));
    }

    #[test]
    fn who_has_a_guests_memory_is_told_from_who_has_not() {
        const RAM: Bytes = Bytes::from_mib(256);
        let memory = std::hint::black_box(vec![0_u8; RAM.0 as usize]);
        assert!(maps_memory(std::process::id(), RAM).unwrap());
        drop(memory);
        let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let maps = maps_memory(other.id(), RAM);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!maps.unwrap());
        assert!(maps_memory(other.id(), RAM).is_err(), "gone");
    }

    #[test]
    fn what_the_manager_lacks_for_a_look_is_not_taken_for_nothing() {
        let look = |errno: Errno| if_there::<()>(Err(errno.into())).map_err(|e| e.kind());
        for lack in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(look(lack).is_err(), "{lack}");
        }
        for gone in [Errno::NOENT, Errno::SRCH, Errno::ACCESS, Errno::PERM, Errno::LOOP] {
            assert_eq!(look(gone), Ok(None), "{gone}");
        }
    }
}
