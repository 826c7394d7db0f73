//! What must be refused is refused, on real VMMs, with a reason.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod common;

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use ballast_qemu::{Launch, Qmp, RamMapping, Verdict, inspect};
use ballast_uffd::procmap::Vma;
use ballast_units::{Bytes, HostAddr};
use common::{Guestless, PATIENT, have_qemu, remove_pair, replace, skip, start, start_changed};

const SIZE: Bytes = Bytes::from_mib(64);
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// The guest's RAM, found without the code under test: the path of its fd in the VMM, and the
/// mapping as the shim would announce it. The VMM must have answered on QMP.
fn ram_of(vm: &Guestless) -> (PathBuf, RamMapping) {
    let pid = vm.vmm.pid;
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let fd = fds
        .map(|entry| entry.unwrap().path())
        .find(|fd| fs::metadata(fd).is_ok_and(|m| m.is_file() && m.len() == SIZE.0))
        .expect("a file of the RAM's size");
    let inode = fs::metadata(&fd).unwrap().ino();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let vma = maps.lines().filter_map(Vma::parse).find(|v| v.inode == inode).unwrap();
    let file = File::open(&fd).unwrap();
    let ram = RamMapping::of_file(file.as_fd(), vma.start, SIZE).unwrap();
    (fd, ram)
}

async fn verdict(vm: &Guestless) -> Verdict {
    inspect(vm.vmm.pid, Some(&vm.qmp().await), &[]).await
}

#[track_caller]
fn balloon_only(verdict: &Verdict, part: &str) {
    assert!(matches!(verdict, Verdict::BalloonOnly(why) if why.contains(part)), "{verdict:?}");
}

/// Without QMP nobody tells of a balloon.
#[track_caller]
fn unseen(verdict: &Verdict, part: &str) {
    assert!(matches!(verdict, Verdict::BalloonUnseen(why) if why.contains(part)), "{verdict:?}");
}

#[track_caller]
fn unmanaged(verdict: &Verdict, part: &str) {
    assert!(matches!(verdict, Verdict::Unmanaged(why) if why.contains(part)), "{verdict:?}");
}

/// A process of the test, ended with it.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A second process that has the RAM file open (the shell's fd 9) and does nothing else.
fn holder_of(file: &std::path::Path) -> Helper {
    let script = format!("exec 9<>{}; echo ready; read -r _", file.display());
    let mut child = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 5];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
    Helper(child)
}

/// Without backend of ours: plain `-m 64M`, as most VMs in the world are started.
fn private(launch: &mut Launch) {
    remove_pair(launch, "-object");
    replace(launch, "-machine", "q35");
}

fn backend(launch: &mut Launch, options: &str) {
    replace(launch, "-object", &format!("{options},id=mem,size=64M"));
}

#[tokio::test]
async fn the_products_own_command_line_is_pageable() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let qmp = vm.qmp().await;
    assert_eq!(inspect(vm.vmm.pid, Some(&qmp), &[]).await, Verdict::Pageable);
    let (_, ram) = ram_of(&vm);
    assert_eq!(inspect(vm.vmm.pid, Some(&qmp), &[ram]).await, Verdict::Pageable);
    assert_eq!(inspect(vm.vmm.pid, None, &[ram]).await, Verdict::Pageable);
    unseen(&inspect(vm.vmm.pid, None, &[]).await, "not found");
}

#[tokio::test]
async fn a_file_backend_on_tmpfs_is_pageable() {
    if !have_qemu() {
        return;
    }
    let vm = start_changed(
        |_| (),
        |launch| {
            backend(launch, "memory-backend-file,mem-path=/dev/shm,share=on");
        },
    )
    .await;
    assert_eq!(verdict(&vm).await, Verdict::Pageable);
}

#[tokio::test]
async fn private_ram_is_for_the_balloon_or_not_managed() {
    if !have_qemu() {
        return;
    }
    let vm = start_changed(|_| (), private).await;
    balloon_only(&verdict(&vm).await, "private RAM");
    let vm = start_changed(|spec| spec.no_balloon = true, private).await;
    unmanaged(&verdict(&vm).await, "no balloon");
    let private_memfd = |launch: &mut Launch| backend(launch, "memory-backend-memfd,share=off");
    let vm = start_changed(|_| (), private_memfd).await;
    balloon_only(&verdict(&vm).await, "private RAM (memory backend mem)");
    // A shim that announces it nevertheless is not believed.
    let (_, ram) = ram_of(&vm);
    unseen(&inspect(vm.vmm.pid, None, &[ram]).await, "private RAM");
}

#[tokio::test]
async fn shared_ram_without_a_file_is_not_paged() {
    if !have_qemu() {
        return;
    }
    let vm = start_changed(|_| (), |launch| backend(launch, "memory-backend-ram,share=on")).await;
    // Answered by QMP: its RAM is mapped by then.
    let verdict = verdict(&vm).await;
    let maps = fs::read_to_string(format!("/proc/{}/maps", vm.vmm.pid)).unwrap();
    // What the kernel shows of shared memory that is nobody's file.
    let is_file = |vma: &Vma| vma.inode != 0 && !vma.path.starts_with("/dev/zero");
    let is_ram = |vma: &Vma| vma.end.0 - vma.start.0 == SIZE.0 && is_file(vma);
    // From version 10 on QEMU backs it with a file: a memfd, or one that it has made in /dev/shm and unlinked.
    if maps.lines().filter_map(Vma::parse).any(|vma| is_ram(&vma)) {
        assert_eq!(verdict, Verdict::Pageable);
    } else {
        balloon_only(&verdict, "RAM without a file");
    }
}

#[tokio::test]
async fn more_than_one_backend_is_not_paged() {
    if !have_qemu() {
        return;
    }
    let vm = start_changed(
        |_| (),
        |launch| {
            let second = "memory-backend-memfd,id=second,size=16M,share=on";
            launch.args.extend(["-object", second].map(OsString::from));
        },
    )
    .await;
    balloon_only(&verdict(&vm).await, "2 memory backends");
}

#[tokio::test]
async fn another_file_than_the_announced_is_not_paged() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let _ready = vm.qmp().await;
    let (_, ram) = ram_of(&vm);
    for wrong in [
        RamMapping { inode: ram.inode + 1_000_000, ..ram },
        RamMapping { len: Bytes(ram.len.0 * 2), ..ram },
        RamMapping { len: Bytes(u64::MAX), ..ram },
    ] {
        let verdict = inspect(vm.vmm.pid, None, &[wrong]).await;
        unseen(&verdict, "not of the file it announced");
    }
    let nowhere = RamMapping { addr: HostAddr(4096), ..ram };
    unseen(&inspect(vm.vmm.pid, None, &[nowhere]).await, "not found");
}

#[tokio::test]
async fn a_second_process_with_the_ram_is_named() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let qmp = vm.qmp().await;
    let (fd, ram) = ram_of(&vm);
    // The manager itself may have it, open and mapped.
    let own = File::options().read(true).write(true).open(&fd).unwrap();
    assert_eq!(inspect(vm.vmm.pid, Some(&qmp), &[ram]).await, Verdict::Pageable);
    drop(own);

    let holder = holder_of(&fd);
    let found = inspect(vm.vmm.pid, Some(&qmp), &[ram]).await;
    balloon_only(&found, &format!("process {} (sh) holds its RAM file open", holder.0.id()));
    drop(holder);
    assert_eq!(inspect(vm.vmm.pid, Some(&qmp), &[ram]).await, Verdict::Pageable);

    // A second QEMU that maps the file as its RAM: as vhost-user and virtiofsd do it.
    let path = fd.display().to_string();
    let mapper = start_changed(
        |_| (),
        |launch| {
            backend(launch, &format!("memory-backend-file,mem-path={path},share=on"));
        },
    )
    .await;
    let _connected = mapper.qmp().await;
    let found = inspect(vm.vmm.pid, Some(&qmp), &[]).await;
    balloon_only(&found, &format!("process {} (qemu", mapper.vmm.pid));
    balloon_only(&found, "maps its RAM too");
}

#[tokio::test]
async fn locked_memory_is_not_managed() {
    if !have_qemu() {
        return;
    }
    let vm = start(|spec| {
        spec.extra.extend(["-overcommit".into(), "mem-lock=on".into()]);
    })
    .await;
    match vm.vmm.connect_qmp(&vm.qmp_socket, PATIENT).await {
        Ok(qmp) => unmanaged(&inspect(vm.vmm.pid, Some(&qmp), &[]).await, "locked or pinned"),
        Err(error) => skip(&format!("memory cannot be locked here: {error}")),
    }
}

#[tokio::test]
async fn a_disk_opened_with_o_direct_forbids_paging() {
    if !have_qemu() {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let image = dir.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    for (cache, direct) in [("writeback", false), ("none", true)] {
        let drive = format!("file={},format=raw,if=none,id=d,cache={cache}", image.display());
        let vm = start(|spec| {
            spec.extra.extend(["-drive".into(), drive.clone()]);
            spec.extra.extend(["-device".into(), "virtio-blk-pci,drive=d".into()]);
        })
        .await;
        let qmp = vm.qmp().await;
        let found = inspect(vm.vmm.pid, Some(&qmp), &[]).await;
        if direct {
            balloon_only(&found, "disk.img is open with O_DIRECT");
        } else {
            assert_eq!(found, Verdict::Pageable);
        }
    }
}

/// The host's pool of huge pages, where nobody has any of it; given back empty. (`./test` empties it if this is killed.)
struct HugePages;

impl HugePages {
    fn reserved() -> u32 {
        fs::read_to_string(HUGE_PAGES).ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    fn reserve() -> Result<HugePages, String> {
        let pool = HugePages;
        fs::write(HUGE_PAGES, "40").map_err(|e| e.to_string())?;
        match HugePages::reserved() {
            32.. => Ok(pool),
            got => Err(format!("the kernel reserved {got} of 40")),
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(HUGE_PAGES, "0");
    }
}

#[tokio::test]
async fn hugetlb_ram_is_not_managed() {
    if !have_qemu() {
        return;
    }
    if HugePages::reserved() > 0 {
        eprintln!("SKIPPED: the host has huge pages of its own");
        return;
    }
    let _pool = match HugePages::reserve() {
        Ok(pool) => pool,
        Err(why) => return skip(&format!("no huge pages: {why}")),
    };
    let vm = start_changed(
        |_| (),
        |launch| {
            backend(launch, "memory-backend-memfd,hugetlb=on,hugetlbsize=2M,share=on");
        },
    )
    .await;
    unmanaged(&verdict(&vm).await, "hugetlb RAM (2 MiB pages)");
    // /proc alone shows it too.
    let (_, ram) = ram_of(&vm);
    unmanaged(&inspect(vm.vmm.pid, None, &[ram]).await, "hugetlb RAM (2 MiB pages)");
    // The VMM has to let go of its pages before the pool is restored.
    vm.vmm.process.kill().unwrap();
    vm.vmm.process.exited().await;
}

#[tokio::test]
async fn a_process_that_is_gone_or_frozen_is_no_hang() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let qmp: Qmp = vm.qmp().await;
    vm.vmm.process.signal(rustix::process::Signal::STOP).unwrap();
    // Nothing is known of it; what was known before may be so still.
    let frozen = inspect(vm.vmm.pid, Some(&qmp), &[]).await;
    assert!(
        matches!(&frozen, Verdict::Unknown(why) if why.contains("did not answer")),
        "{frozen:?}"
    );
    vm.vmm.process.kill().unwrap();
    vm.vmm.process.exited().await;
    unmanaged(&inspect(vm.vmm.pid, None, &[]).await, "cannot be inspected");
}
