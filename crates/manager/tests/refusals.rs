//! VMMs that must not be paged are not, `vm ls` says why, and the balloon still works where there is
//! one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ballast_api::{AttachSpec, ErrorCode, HostChange, Management, Mode, VmChange, VmView};
use ballast_lab::image::Image;
use ballast_lab::plain;
use ballast_units::Bytes;
use support::witness::ram_files;
use support::{Ballastd, MIB, ZEROS, image_or_skip, refused_as, required, signal, wait};

const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const BALLOON: &str = "virtio-balloon-pci,id=bal";
const SHARED: &str = "memory-backend-memfd,id=mem,size=64M,share=on";

/// A QEMU that somebody else started: without the shim, and paused unless it has a kernel.
struct Stranger {
    child: Child,
    qmp: PathBuf,
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stranger {
    fn start(ballastd: &Ballastd, name: &str, mib: u64, object: &str, more: &[&str]) -> Stranger {
        let qmp = ballastd.root.join(format!("{name}.qmp"));
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", "tcg,tb-size=16", "-smp", "1", "-m", &format!("{mib}M")])
            .args(["-machine", "q35,memory-backend=mem", "-object", object])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let stranger = Stranger { child, qmp };
        wait("its QMP socket", || stranger.qmp.exists().then_some(()));
        stranger
    }

    async fn attach(&self, ballastd: &Ballastd, name: &str) -> VmView {
        ballastd.client.attach(&self.spec(name)).await.unwrap()
    }

    fn spec(&self, name: &str) -> AttachSpec {
        AttachSpec {
            name: name.into(),
            qmp: self.qmp.clone(),
            min: 0,
            shares: None,
            tax: None,
            pool: None,
        }
    }
}

#[track_caller]
fn is(seen: &Management, mode: Mode, part: &str) {
    let reason = seen.reason.as_deref().unwrap_or_default();
    assert!(seen.mode == mode && reason.contains(part), "{mode:?}, {part}: {seen:?}");
}

/// What is not in its memory though it was not given up.
fn away(vm: &VmView) -> u64 {
    let of = &vm.memory;
    of.compressed + of.filled + of.staged + of.swapped
}

/// This process maps the RAM of the only VM of `ballastd`.
fn map_its_ram(ballastd: &Ballastd, size: u64) -> File {
    let [path] = &ram_files(&ballastd.root)[..] else { panic!("not one RAM file") };
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    // SAFETY: a new mapping at a place of the kernel's choice; nobody reads or writes it, and it
    // lives as long as this process.
    unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        mmap(std::ptr::null_mut(), size as usize, ProtFlags::READ, MapFlags::SHARED, &file, 0)
            .unwrap();
    }
    file
}

/// The host's pool of huge pages, where nobody has any of it; given back empty. (`./test` empties it if this is killed.)
struct HugePages;

impl HugePages {
    fn reserved() -> u64 {
        std::fs::read_to_string(HUGE_PAGES).ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    /// None where too few are to be had.
    fn reserve() -> Option<HugePages> {
        let pool = HugePages;
        let _ = std::fs::write(HUGE_PAGES, "40");
        (HugePages::reserved() >= 32).then_some(pool)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HUGE_PAGES, "0");
    }
}

async fn one_of_huge_pages_is_left_alone(ballastd: &Ballastd) {
    if HugePages::reserved() > 0 {
        eprintln!("SKIPPED: hugetlb RAM: the host has huge pages of its own");
        return;
    }
    if let Some(_pool) = HugePages::reserve() {
        let object = format!("{SHARED},hugetlb=on,hugetlbsize=2M");
        let huge = Stranger::start(ballastd, "huge", 64, &object, &["-S", "-device", BALLOON]);
        let seen = huge.attach(ballastd, "huge").await.management;
        is(&seen, Mode::Unmanaged, "hugetlb");
    } else {
        eprintln!("SKIPPED: hugetlb RAM: no 40 huge pages to be had");
        assert!(!required());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_managed_as_far_as_they_allow() {
    if image_or_skip().is_none() {
        return;
    }
    let ballastd = Ballastd::start(&["--budget", "512M"]);
    let with = ["-S", "-device", BALLOON];
    let start = |name: &str, object: &str, more: &[&str]| {
        Stranger::start(&ballastd, name, 64, object, more)
    };
    let private = start("private", "memory-backend-ram,id=mem,size=64M", &with);
    let shared = start("shared", SHARED, &with);
    let without = start("without", SHARED, &["-S"]);
    let locked = start("locked", SHARED, &[&with[..], &["-overcommit", "mem-lock=on"]].concat());
    let held = start("held", SHARED, &with);
    let pid = held.child.id();
    let ram = wait("its RAM file", || {
        ram_files(&ballastd.root).into_iter().find(|p| p.starts_with(format!("/proc/{pid}/fd")))
    });
    let _open = OpenOptions::new().read(true).write(true).open(ram).unwrap();

    is(&private.attach(&ballastd, "private").await.management, Mode::BalloonOnly, "private RAM");
    is(&shared.attach(&ballastd, "shared").await.management, Mode::BalloonOnly, "without the shim");
    is(&without.attach(&ballastd, "without").await.management, Mode::Unmanaged, "no balloon");
    is(&locked.attach(&ballastd, "locked").await.management, Mode::Unmanaged, "mem-lock");
    is(&held.attach(&ballastd, "held").await.management, Mode::BalloonOnly, "RAM file open");
    // `vm ls` says the same.
    let listed = ballastd.client.vms().await.unwrap();
    assert_eq!(listed.len(), 5);
    assert!(listed.iter().all(|vm| vm.management.reason.is_some() && vm.memory.consumed > 0));

    one_of_huge_pages_is_left_alone(&ballastd).await;

    // One VMM, one name; one name, one VMM.
    let client = &ballastd.client;
    refused_as(client.attach(&shared.spec("again")).await, ErrorCode::Conflict, "'shared'");
    refused_as(client.attach(&shared.spec("shared")).await, ErrorCode::Conflict, "'shared'");
    let fresh = start("fresh", SHARED, &with);
    refused_as(client.attach(&fresh.spec("shared")).await, ErrorCode::Conflict, "'shared'");
    let (one, two) = (fresh.spec("one"), fresh.spec("two"));
    let (one, two) = tokio::join!(client.attach(&one), client.attach(&two));
    assert!(one.is_ok() != two.is_ok(), "both or neither: {one:?} {two:?}");
    let good = fresh.spec("x");
    for (bad, part) in [
        (AttachSpec { name: "a/b".into(), ..good.clone() }, "name"),
        (AttachSpec { qmp: "/nonexistent.qmp".into(), ..good.clone() }, "/nonexistent.qmp"),
        (AttachSpec { qmp: ballastd.log(), ..good.clone() }, "qmp"),
        (AttachSpec { shares: Some(0), ..good.clone() }, "shares"),
        (AttachSpec { tax: Some(2.0), ..good.clone() }, "tax"),
        (AttachSpec { min: u64::MAX, ..good.clone() }, "min"),
    ] {
        refused_as(client.attach(&bad).await, ErrorCode::BadRequest, part);
    }
    // Its memory is too small for this; found out when it is asked.
    drop(fresh);
    let another = start("another", SHARED, &with);
    let large = AttachSpec { min: 65 * MIB, ..another.spec("another") };
    refused_as(client.attach(&large).await, ErrorCode::BadRequest, "min");

    // They end by themselves; the books are empty then. A stop is the end of one, too.
    client.stop("private", Duration::ZERO).await.unwrap();
    drop((private, shared, without, locked, held, another));
    ballastd
        .eventually("all are gone", async || {
            let host = ballastd.host().await;
            host.vms == 0 && host.free == host.budget - ZEROS
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_min_of_a_vm_that_is_not_paged_is_promised_as_any_other() {
    if image_or_skip().is_none() {
        return;
    }
    // Of it 278 MiB can be promised.
    let ballastd = Ballastd::start(&["--budget", "300M"]);
    let client = &ballastd.client;
    let start = |name: &str| {
        let ram = "memory-backend-ram,id=mem,size=256M";
        Stranger::start(&ballastd, name, 256, ram, &["-S", "-device", BALLOON])
    };
    let (one, two) = (start("one"), start("two"));
    let with = |stranger: &Stranger, name: &str, mib: u64| AttachSpec {
        min: mib * MIB,
        ..stranger.spec(name)
    };
    client.attach(&with(&one, "one", 200)).await.unwrap();
    let most = with(&two, "two", 100);
    refused_as(client.attach(&most).await, ErrorCode::NoRoom, "two: needs 100 MiB unreserved");
    assert!(ballastd.is_gone("two").await && !ballastd.folder("two").exists());
    // It is there all the same, with nothing guaranteed, and gets no guarantee later, either.
    two.attach(&ballastd, "two").await;
    let min = VmChange { min: Some(100 * MIB), ..VmChange::default() };
    refused_as(client.change("two", &min).await, ErrorCode::NoRoom, "two: needs");
    client.change("one", &min).await.unwrap();
    client.change("two", &min).await.unwrap();
}

/// A stranger with a guest in it. It takes nearly all of its memory, and then needs little: a balloon that took what was never
/// touched would give nothing back.
fn guest(ballastd: &Ballastd, image: &Image, name: &str, mib: u64) -> Stranger {
    let mut spec = ballastd.guest(image, name, mib, "idle --mb 36 --busy 1 --every 1000");
    spec.append.push_str(" ballast.run2=\"idle --mb 40 --busy 1 --seconds 1\"");
    let console = format!("file:{}", spec.console.unwrap().display());
    let object = format!("memory-backend-ram,id=mem,size={mib}M");
    let kernel = image.kernel.display().to_string();
    let initrd = image.initrd.display().to_string();
    let more = ["-kernel", &kernel, "-initrd", &initrd, "-append", &spec.append];
    let more = [&more[..], &["-device", BALLOON, "-serial", &console]].concat();
    Stranger::start(ballastd, name, mib, &object, &more)
}

/// Of what it needed once.
async fn has_let_go(ballastd: &Ballastd, name: &str) {
    let mut console = ballastd.console(name);
    ballastd
        .eventually("a load of its guest has ended", async || {
            console.poll().iter().any(|event| event.kind() == "done")
        })
        .await;
}

/// Asked of itself, not of the manager.
async fn its_balloon_is_empty(ballastd: &Ballastd, stranger: &Stranger, mib: u64) {
    let qmp = ballast_qemu::Qmp::connect(&stranger.qmp, Duration::from_secs(60)).await.unwrap();
    ballastd
        .eventually("its balloon is empty", async || {
            let ask = serde_json::Value::Null;
            let said = qmp.execute("query-balloon", ask, Duration::from_secs(60)).await.unwrap();
            said["actual"] == mib * MIB
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_is_ballooned_under_pressure() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "512M"]);
    let client = &ballastd.client.clone();
    // Private RAM, so that what it takes is its RSS.
    let stranger = guest(&ballastd, image, "stranger", 160);
    // All of it counts as active, since nothing is known of it; few shares make it give all the same.
    let few = AttachSpec { shares: Some(50), ..stranger.spec("stranger") };
    client.attach(&few).await.unwrap();
    let work = "verify-torture --mb 24 --threads 2 --seconds 100000";
    client.run(&ballastd.guest(image, "paged", 128, work)).await.unwrap();
    ballastd.checks_go_on(&mut ballastd.console("paged"), 1).await;
    ballastd
        .eventually("its guest has a balloon driver", async || {
            let vm = ballastd.vm("stranger").await;
            vm.guest.is_some() && vm.memory.consumed > 100 * MIB
        })
        .await;
    has_let_go(&ballastd, "stranger").await;
    let before = ballastd.vm("stranger").await;
    is(&before.management, Mode::BalloonOnly, "private RAM");
    // Not all of its process: what an emulator translates grows meanwhile (by 60 MiB with QEMU 10).
    let resident = || plain::held(stranger.child.id(), Bytes(160 * MIB)).unwrap().ram.0;
    let had = resident();
    let (mut pressed, mut step) = (None::<Instant>, 24 * MIB);
    ballastd
        .eventually("the balloon gives memory back", async || {
            // Again where the paged one gave all, before anything was to be had of the balloon; as far as what is promised.
            if pressed.is_none_or(|at| at.elapsed() > Duration::from_secs(5)) {
                let host = ballastd.host().await;
                let lower = host.budget - host.free - step;
                let change = HostChange { budget: Some(lower), ..HostChange::default() };
                if client.change_host(&change).await.is_err() {
                    step = (step / 2).max(MIB);
                }
                pressed = Some(Instant::now());
            }
            let vm = ballastd.vm("stranger").await;
            vm.balloon.reported >= 4 * MIB && resident() + 2 * MIB < had
        })
        .await;
    // A manager that ends leaves a VM that it did not start; the next one has it again, with its balloon.
    client.stop("paged", Duration::ZERO).await.unwrap();
    let limit = VmChange { max: Some(100 * MIB), ..VmChange::default() };
    let params = client.change("stranger", &limit).await.unwrap().params;
    client.shutdown(false).await.unwrap();
    assert!(ballastd.end().success());
    ballastd.restart();
    let again = ballastd.vm("stranger").await;
    assert_eq!((again.pid, again.params), (Some(stranger.child.id()), params));
    assert!(again.memory.consumed > 0, "{:?}", again.memory);
    let host = ballastd.host().await;
    assert!(host.budget - host.free >= again.memory.consumed / 2, "{host:?}");
    ballastd
        .eventually("its balloon is in reach", async || {
            let vm = ballastd.vm("stranger").await;
            vm.guest.is_some() && vm.balloon.reported >= 4 * MIB
        })
        .await;
    is(&ballastd.vm("stranger").await.management, Mode::BalloonOnly, "private RAM");
    // One that is let go of has all its memory.
    client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists());
    let alive = ballast_lab::leftovers::processes(&ballastd.root);
    assert!(alive.contains(&i32::try_from(stranger.child.id()).unwrap()));
    its_balloon_is_empty(&ballastd, &stranger, 160).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paged_vm_that_a_second_process_maps_is_not_evicted_from_any_more() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M", "--sample-period", "1"]);
    let client = &ballastd.client;
    let work = "verify-torture --mb 40 --threads 2 --seconds 100000";
    client.run(&ballastd.guest(image, "mapped", 128, work)).await.unwrap();
    let mut console = ballastd.console("mapped");
    ballastd.checks_go_on(&mut console, 1).await;
    let periods = async || ballastd.vm("mapped").await.active.periods;
    ballastd.eventually("it is sampled", async || periods().await > 0).await;
    let _mapped = map_its_ram(&ballastd, 128 * MIB);
    ballastd
        .eventually("it is balloon-only", async || {
            ballastd.vm("mapped").await.management.mode == Mode::BalloonOnly
        })
        .await;
    let seen = ballastd.vm("mapped").await;
    is(&seen.management, Mode::BalloonOnly, "maps its RAM too");
    // What it used when it was sampled last is not what it uses.
    assert_eq!(periods().await, 0);
    // What it should give up now it can only give up by itself.
    let limit = VmChange { max: Some(72 * MIB), ..VmChange::default() };
    client.change("mapped", &limit).await.unwrap();
    ballastd
        .eventually("its balloon is blown up", async || {
            ballastd.vm("mapped").await.balloon.reported > 4 * MIB
        })
        .await;
    ballastd.checks_go_on(&mut console, 5000).await;
    let vm = ballastd.vm("mapped").await;
    assert_eq!(vm.counters.swapped_out, seen.counters.swapped_out, "evicted from it");
    assert!(away(&vm) <= away(&seen), "evicted from it: {:?}, {:?}", seen.memory, vm.memory);
    // It still gets what it asks for.
    let limit = VmChange { max: Some(128 * MIB), ..VmChange::default() };
    client.change("mapped", &limit).await.unwrap();
    ballastd
        .eventually("its balloon is let out", async || {
            ballastd.vm("mapped").await.balloon.reported < 4 * MIB
        })
        .await;
    ballastd.checks_go_on(&mut console, 5000).await;
    let vm = ballastd.vm("mapped").await;
    assert_eq!(vm.counters.swapped_out, seen.counters.swapped_out);
    assert!(away(&vm) <= away(&seen), "evicted from it: {:?}, {:?}", seen.memory, vm.memory);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_waits_for_memory_that_will_never_come_can_be_stopped() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let client = &ballastd.client;
    let work = "toucher --min-mb 4 --max-mb 60 --period 100 --cycle 1";
    let mut spec = ballastd.guest(image, "stuck", 128, work);
    spec.no_balloon = true;
    client.run(&spec).await.unwrap();
    ballastd.checks_go_on(&mut ballastd.console("stuck"), 1).await;
    // It will soon want more than there is.
    let host = ballastd.host().await;
    let goal = host.thresholds[0].upper;
    let budget = (host.budget - host.free + 2 * goal + 4 * MIB) & !4095;
    let little = HostChange { budget: Some(budget), ..HostChange::default() };
    client.change_host(&little).await.unwrap();
    // Neither eviction nor a balloon: nothing can be taken from it.
    let mapped = map_its_ram(&ballastd, 128 * MIB);
    ballastd
        .eventually("it is unmanaged", async || {
            ballastd.vm("stuck").await.management.mode == Mode::Unmanaged
        })
        .await;
    let evicted = async || {
        let vm = ballastd.vm("stuck").await;
        (vm.counters.swapped_out, away(&vm))
    };
    ballastd
        .eventually("what was being evicted has left", async || {
            let before = evicted().await;
            tokio::time::sleep(Duration::from_millis(1_100)).await;
            before == evicted().await
        })
        .await;
    let seen = ballastd.vm("stuck").await;
    is(&seen.management, Mode::Unmanaged, "maps its RAM too");
    // All that it may take could not be promised to another; that what there is should become more is refused by nobody.
    let less = HostChange { budget: Some(budget - MIB), ..HostChange::default() };
    refused_as(client.change_host(&less).await, ErrorCode::NoRoom, "promised: 13");
    let more = HostChange { budget: Some(budget + MIB), ..HostChange::default() };
    client.change_host(&more).await.unwrap();
    ballastd
        .eventually("it waits for memory", async || {
            let counters = ballastd.vm("stuck").await.counters;
            ballastd.host().await.free < MIB / 4 && counters.waits + counters.blocks > 0
        })
        .await;
    let vm = ballastd.vm("stuck").await;
    assert_eq!(vm.counters.swapped_out, seen.counters.swapped_out, "evicted from it");
    assert!(away(&vm) <= away(&seen), "evicted from it: {:?}, {:?}", seen.memory, vm.memory);
    // A VMM in a fault ignores SIGTERM.
    signal(vm.pid.unwrap(), rustix::process::Signal::TERM);
    let begin = Instant::now();
    client.stop("stuck", Duration::from_secs(1)).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert!(ballastd.is_gone("stuck").await);
    ballastd.assert_nothing_left("stuck");
    // The other process still has the file, and the file has nothing.
    use std::os::unix::fs::MetadataExt;
    assert_eq!(mapped.metadata().unwrap().blocks(), 0);
    let host = ballastd.host().await;
    assert_eq!((host.free, host.overhead), (host.budget - ZEROS, ZEROS));
}
