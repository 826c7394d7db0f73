//! May this VMM's memory be paged? Facts are gathered from /proc and QMP ([`inspect()`]); what
//! follows from them is one pure function ([`decide`]).

mod census;
mod descriptors;
mod fd_folder;
mod readings;
mod scan;
mod unbuffered;

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ballast_units::{Bytes, HostAddr, PAGE_SIZE};
use rustix::io::Errno;

use crate::monitor::{Device, Memdev};
use crate::ram_blocks::RamBlock;
use crate::shown::shown;
use crate::{Monitor, Qmp, QmpError, reports, spec};

/// For each QMP command of an inspection.
const QMP_DEADLINE: Duration = Duration::from_secs(2);
/// Libraries lock a few pages for their keys; a guest's memory, or what a device pinned of it, is
/// more than this.
const HARMLESS_LOCK: Bytes = Bytes::from_mib(1);
const PAGE: Bytes = Bytes(PAGE_SIZE as u64);

/// How far a VMM can be managed. Reasons are one line that a person can act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing speaks against paging.
    Pageable,
    /// Pages must not be taken, but what the guest gives up comes back to the host.
    BalloonOnly(String),
    /// What the guest gives up would not come back either, or there is no balloon.
    Unmanaged(String),
    /// Pages must not be taken, and whether there is a balloon nobody tells, without QMP.
    BalloonUnseen(String),
    /// It could not be found out: somebody did not answer in time, or the look failed. What was known before may be so still.
    Unknown(String),
}

impl Verdict {
    /// The same, of names that a VMM chose as long as they like, with lines in them.
    fn in_one_line(self) -> Verdict {
        /// More than any that names nothing unusual.
        const MOST: usize = 600;
        let line = |reason: String| shown(reason.as_bytes(), MOST);
        match self {
            Verdict::Pageable => Verdict::Pageable,
            Verdict::BalloonOnly(reason) => Verdict::BalloonOnly(line(reason)),
            Verdict::Unmanaged(reason) => Verdict::Unmanaged(line(reason)),
            Verdict::BalloonUnseen(reason) => Verdict::BalloonUnseen(line(reason)),
            Verdict::Unknown(reason) => Verdict::Unknown(line(reason)),
        }
    }
}

/// The guest's RAM, or a part of it, as the shim announced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamMapping {
    /// Major and minor number of the device of the RAM file.
    pub device: (u32, u32),
    /// Of the RAM file.
    pub inode: u64,
    /// Where it is mapped.
    pub addr: HostAddr,
    /// How much of it.
    pub len: Bytes,
}

impl RamMapping {
    /// The mapping at `addr` of the file that `fd` is.
    ///
    /// # Errors
    /// Of fstat.
    pub fn of_file(fd: impl AsFd, addr: HostAddr, len: Bytes) -> io::Result<RamMapping> {
        let stat = rustix::fs::fstat(fd)?;
        let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        Ok(RamMapping { device, inode: stat.st_ino, addr, len })
    }
}

/// The mapping in the VMM's address space that is the guest's RAM; of several, what holds of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedRam {
    /// Mapped MAP_SHARED.
    pub shared: bool,
    /// Has a file of its own, which the manager can open: a memfd or a named one.
    pub file: bool,
    /// 4 KiB, or more on hugetlb.
    pub page_size: Bytes,
    /// Is the file that the shim announced, if it announced one.
    pub as_announced: bool,
}

/// Another process that has the RAM file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Mapped; else merely open.
    pub maps: bool,
}

/// Everything that a verdict depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Parts of the RAM that its shim announced.
    pub announced: usize,
    /// From QMP; empty without it.
    pub devices: Vec<Device>,
    /// From QMP; None without it.
    pub memdevs: Option<Vec<Memdev>>,
    /// From QMP; empty without it.
    pub ram_blocks: Vec<RamBlock>,
    /// From its command line: those it was started with. They count where QMP does not tell, and those that are no
    /// devices to it (a network backend, a block node) in any case.
    pub commanded: Vec<Device>,
    /// Files of the process by which commands are passed through, whose transfers reach guest memory past the
    /// pager: "/dev/sg3".
    pub passing_files: Vec<String>,
    /// Files of the process by which devices, or KVM, pin memory: "/dev/vfio/12".
    pub pinning_files: Vec<String>,
    /// Files it has open with O_DIRECT: what a disk reads there lands in guest pages by DMA.
    pub direct_files: Vec<String>,
    /// Files it can read on file systems that may do the same without O_DIRECT, each with its type.
    pub unbuffered_files: Vec<String>,
    /// Locked and pinned memory of the process.
    pub locked: Bytes,
    /// The guest's RAM among the mappings of the process; None if it was not found.
    pub ram: Option<MappedRam>,
    /// Other processes that have the RAM file.
    pub holders: Vec<Holder>,
}

impl Facts {
    /// What QMP has told, as if nothing else spoke against anything.
    fn of_qmp(&self) -> Facts {
        let ram = MappedRam { shared: true, file: true, page_size: PAGE, as_announced: true };
        Facts {
            announced: self.announced,
            devices: self.devices.clone(),
            memdevs: self.memdevs.clone(),
            ram_blocks: self.ram_blocks.clone(),
            ram: Some(ram),
            ..Facts::default()
        }
    }

    /// What QMP has told, and what was found in /proc.
    fn with(self, found: scan::Found) -> Facts {
        Facts {
            commanded: found.commanded,
            passing_files: found.open.passing,
            pinning_files: found.open.pinning,
            direct_files: found.open.direct,
            unbuffered_files: found.open.unbuffered,
            locked: found.locked,
            ram: found.ram,
            holders: found.holders,
            ..self
        }
    }

    /// The devices, as far as they are known.
    fn known_devices(&self) -> impl Iterator<Item = &Device> {
        let told = self.memdevs.is_some();
        let untold = self.commanded.iter().filter(move |d| !told || d.is_backend());
        let known = self.devices.iter().chain(untold);
        // Its memory was announced with the rest.
        known.filter(|device| !(self.announced > 1 && device.is_own_hotplug()))
    }
}

/// What the facts allow. The gravest objection is named.
pub fn decide(facts: &Facts) -> Verdict {
    if let Some(reason) = nothing_comes_back(facts) {
        return Verdict::Unmanaged(reason);
    }
    let Some(reason) = must_not_be_paged(facts) else { return Verdict::Pageable };
    if facts.known_devices().any(Device::is_balloon) {
        Verdict::BalloonOnly(reason)
    } else if facts.memdevs.is_some() {
        Verdict::Unmanaged(format!("{reason}; and it has no balloon device"))
    } else {
        // Balloons are not looked for on the command line.
        Verdict::BalloonUnseen(reason)
    }
}

/// Where even a balloon frees no machine memory.
fn nothing_comes_back(facts: &Facts) -> Option<String> {
    // QEMU keeps ballooned pages as long as a device may do DMA to them.
    if let Some(device) = facts.known_devices().find(|d| spec::pins_memory(&d.kind)) {
        return Some(format!(
            "device {} ({}) pins guest memory: remove it",
            device.path, device.kind
        ));
    }
    if let Some(file) = facts.pinning_files.iter().find(|file| scan::is_confidential(file)) {
        return Some(format!(
            "{file} is open, so the guest is a confidential one, whose memory KVM pins: start it without \
             -machine confidential-guest-support"
        ));
    }
    if let Some(file) = facts.pinning_files.first() {
        return Some(format!("{file} is open, so a device pins guest memory: remove the device"));
    }
    if facts.locked > HARMLESS_LOCK {
        return Some(format!(
            "{} of its memory is locked or pinned: start it without -overcommit mem-lock=on",
            facts.locked
        ));
    }
    let block = facts.ram_blocks.iter().find(|block| block.page_size > PAGE);
    let huge = block.map(|b| b.page_size);
    let huge = huge.or(facts.ram.as_ref().map(|ram| ram.page_size).filter(|&size| size > PAGE));
    huge.map(|size| {
        format!(
            "hugetlb RAM ({size} pages), which returns to its own pool only: start it without \
             hugetlb=on or a mem-path on hugetlbfs"
        )
    })
}

fn must_not_be_paged(facts: &Facts) -> Option<String> {
    const REMEDY: &str = "start it with -object memory-backend-memfd,share=on";
    if let Some(memdevs) = &facts.memdevs {
        if let Some(memdev) = memdevs.iter().find(|memdev| memdev.share == Some(false)) {
            let id = memdev.id.as_deref().unwrap_or("without id");
            return Some(format!("private RAM (memory backend {id}): {REMEDY}"));
        }
        let (count, paged) = (memdevs.len(), facts.announced.max(1));
        if count > paged {
            let paged = if paged == 1 { "one".to_owned() } else { paged.to_string() };
            return Some(format!(
                "{count} memory backends, and Ballast pages {paged}: use a single one"
            ));
        }
    }
    if let Some(device) = facts.known_devices().find(|d| spec::is_vhost_user(&d.kind)) {
        let (path, kind) = (&device.path, &device.kind);
        return Some(format!("device {path} ({kind}) shares guest memory with a second process"));
    }
    if let Some((device, why)) =
        facts.known_devices().find_map(|d| Some((d, spec::refused_device(&d.kind)?)))
    {
        return Some(format!("device {} ({}): {why}", device.path, device.kind));
    }
    let Some(ram) = &facts.ram else {
        return Some(format!("its RAM was not found among its mappings: {REMEDY}"));
    };
    if !ram.as_announced {
        return Some("the mapping it announced is not of the file it announced".into());
    }
    if !ram.shared {
        return Some(format!("private RAM: {REMEDY}"));
    }
    if !ram.file {
        return Some(format!("RAM without a file: {REMEDY}"));
    }
    transferred_past_the_pager(facts).or_else(|| held_by_another(facts))
}

/// A page that leaves its home while a transfer into it is under way takes the data with it: the
/// kernel pins such pages, and tells nobody.
fn transferred_past_the_pager(facts: &Facts) -> Option<String> {
    if let Some(file) = facts.direct_files.first() {
        return Some(format!(
            "{file} is open with O_DIRECT, so disk transfers reach guest memory past the pager: use \
             cache=writeback or cache=writethrough"
        ));
    }
    if let Some(file) = facts.unbuffered_files.first() {
        return Some(format!(
            "{file} is open, on a file system that may transfer to guest memory past the pager: use a local \
             file system or NFS (with ZFS, set zfs_dio_enabled=0)"
        ));
    }
    if let Some(device) = facts.known_devices().find(|d| spec::passes_scsi_through(&d.kind)) {
        let (path, kind) = (&device.path, &device.kind);
        return Some(format!(
            "device {path} ({kind}) passes SCSI commands through, whose transfers reach guest memory \
             past the pager: use scsi-hd or virtio-blk"
        ));
    }
    let file = facts.passing_files.first()?;
    Some(format!(
        "{file} is open, through which commands are passed whose transfers reach guest memory past \
         the pager: use scsi-hd or virtio-blk"
    ))
}

/// A process besides itself that has its RAM, one that maps it before one that only could.
fn held_by_another(facts: &Facts) -> Option<String> {
    let holder = facts.holders.iter().find(|h| h.maps).or(facts.holders.first())?;
    let (pid, comm) = (holder.pid, &holder.comm);
    Some(if holder.maps {
        format!("process {pid} ({comm}) maps its RAM too, and would read reclaimed pages as zeros")
    } else {
        format!("process {pid} ({comm}) holds its RAM file open, and could map it")
    })
}

/// Inspects the VMM `pid`. Without `qmp` the devices are those of its command line that forbid something, and no
/// balloon is known; where nothing of its `ram` is given, the RAM is looked for by its size, or not found.
///
/// Takes at most some 25 s: what cannot be found out in time is a reason not to begin to page.
pub async fn inspect(pid: u32, qmp: Option<&Qmp>, ram: &[RamMapping]) -> Verdict {
    inspect_since(Instant::now(), pid, qmp, ram).await.verdict
}

/// What a look has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// What may be done.
    pub verdict: Verdict,
    /// What QMP has told, if that by itself forbids paging: a look without it need not find that.
    pub told: Option<Verdict>,
    /// That another process maps its RAM, in one line, if one does: it may come again after it was gone.
    pub mapped: Option<String>,
    /// It came to nothing since QMP did not answer: one without it may come to something.
    pub silent: bool,
}

impl Inspection {
    fn of(facts: &Facts) -> Inspection {
        let told = decide(&facts.of_qmp());
        let told = Some(told).filter(|told| *told != Verdict::Pageable).map(Verdict::in_one_line);
        let is_mapped = facts.holders.iter().any(|holder| holder.maps);
        let mapped = held_by_another(facts).filter(|_| is_mapped);
        Inspection { verdict: decide(facts).in_one_line(), told, mapped, silent: false }
    }
}

impl From<Verdict> for Inspection {
    fn from(verdict: Verdict) -> Inspection {
        Inspection { verdict: verdict.in_one_line(), told: None, mapped: None, silent: false }
    }
}

/// The same, where a look at the host's other processes that began at `since` or later is new enough:
/// one look does for all VMs that are inspected in one round.
pub async fn inspect_since(
    since: Instant,
    pid: u32,
    qmp: Option<&Qmp>,
    ram: &[RamMapping],
) -> Inspection {
    let mut facts = Facts { announced: ram.len(), ..Facts::default() };
    if let Some(qmp) = qmp
        && let Err(error) = ask(qmp, &mut facts).await
    {
        return Inspection { silent: true, ..Verdict::Unknown(error.to_string()).into() };
    }
    let size = match facts.memdevs.as_deref() {
        Some([memdev]) => Some(Bytes(memdev.size)),
        _ => None,
    };
    let announced = ram.iter().map(|&ram| scan::Wanted { announced: Some(ram), size });
    let mut wanted: Vec<_> = announced.collect();
    if wanted.is_empty() {
        wanted.push(scan::Wanted { announced: None, size });
    }
    match readings::read(pid, move || scan::process(pid, &wanted, since)).await {
        Ok(Ok(found)) => Inspection::of(&facts.with(found)),
        Ok(Err(error)) => failed(pid, &error).into(),
        Err(why) => Verdict::Unknown(why).into(),
    }
}

/// What follows from an inspection that failed. A process that is gone, or not ours to see, stays so; what else failed (no
/// descriptor was left, say) tells nothing of the VMM.
fn failed(pid: u32, error: &io::Error) -> Verdict {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::SRCH | Errno::ACCESS | Errno::PERM) => {
            Verdict::Unmanaged(format!("process {pid} cannot be inspected: {error}"))
        }
        _ => Verdict::Unknown(format!("process {pid} could not be inspected: {error}")),
    }
}

/// Whether a VMM's balloon lets its guest count on zeros; see [`crate::reports`]. None: its command line cannot be read, or
/// not in time.
pub async fn counts_on_zeros(pid: u32) -> Option<bool> {
    readings::read(pid, move || reports::counts_on_zeros(pid)).await.ok()?.ok()
}

/// What a VMM's command line asks for that pins all of its guest's memory while it starts: "-device vfio-pci". The kernel does
/// not pin pages that a userfaultfd is to supply: such a VMM would end. None, too: it cannot be read.
///
/// # Errors
/// Why it is not known, in one line: it could not be read in time, or has no end.
pub async fn pinning_device(pid: u32) -> Result<Option<String>, String> {
    let read = readings::read_of_newcomer(pid, move || scan::pinning(pid)).await?;
    match read {
        Err(e) if e.kind() == io::ErrorKind::InvalidData => Err(e.to_string()),
        read => Ok(read.ok().flatten()),
    }
}

/// Whether a process maps memory of that size to write to, as a VMM does its guest's. None: its mappings cannot be read,
/// or not in time.
pub async fn maps_memory(pid: u32, size: Bytes) -> Option<bool> {
    readings::read(pid, move || scan::maps_memory(pid, size)).await.ok()?.ok()
}

async fn ask(qmp: &Qmp, facts: &mut Facts) -> Result<(), QmpError> {
    let monitor = Monitor::without_balloon(qmp.clone(), QMP_DEADLINE);
    facts.devices = monitor.devices().await?;
    facts.memdevs = Some(monitor.memdevs().await?);
    let begun = Instant::now();
    for device in &mut facts.devices {
        // Of however many there are, no longer than three answers may take.
        let left = (QMP_DEADLINE * 3).saturating_sub(begun.elapsed());
        let monitor = Monitor::without_balloon(qmp.clone(), left.min(QMP_DEADLINE));
        // By another name it is no longer Ballast's: it adds memory that nobody announced.
        if facts.announced > 1 && device.is_own_hotplug() && !monitor.hotplug_is_own().await? {
            device.path.push_str(" (of another memory)");
        }
        if spec::is_virtio_blk(&device.kind) && monitor.passes_scsi(device).await? {
            device.kind.push_str(spec::SCSI_ON);
        }
    }
    facts.ram_blocks = monitor.ram_blocks().await?;
    Ok(())
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
