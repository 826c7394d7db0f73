//! Swap files: several locations, and contents that are damaged under a running guest.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ballast_api::{HostChange, LocationState, RunState};
use ballast_lab::image::Image;
use ballast_lab::leftovers;
use rustix::process::Signal;
use support::{Ballastd, MIB, Small, fill, image_or_skip, required, signal, wait};

/// The first bytes of each slot of a swap file, as they were and as they are now.
struct Damage {
    file: File,
    slots: BTreeMap<u64, ([u8; 64], [u8; 64])>,
}

impl Damage {
    /// Of every slot that holds anything, while the manager does nothing.
    fn new(manager: u32, path: &Path) -> Damage {
        signal(manager, Signal::STOP);
        let file = File::options().read(true).write(true).open(path).unwrap();
        settle(&file);
        let mut slots = BTreeMap::new();
        for at in (0..file.metadata().unwrap().len()).step_by(4096) {
            let mut page = [0; 4096];
            file.read_exact_at(&mut page, at).unwrap();
            if page.iter().any(|&b| b != 0) {
                let was: [u8; 64] = page[..64].try_into().unwrap();
                let now = was.map(|b| b ^ 0xa5);
                file.write_all_at(&now, at).unwrap();
                slots.insert(at, (was, now));
            }
        }
        file.sync_all().unwrap();
        signal(manager, Signal::CONT);
        Damage { file, slots }
    }

    /// What has not been written anew since is as it was.
    fn heal(self, manager: u32) {
        signal(manager, Signal::STOP);
        settle(&self.file);
        for (at, (was, now)) in self.slots {
            let mut is = [0; 64];
            self.file.read_exact_at(&mut is, at).unwrap();
            if is == now {
                self.file.write_all_at(&was, at).unwrap();
            }
        }
        self.file.sync_all().unwrap();
        signal(manager, Signal::CONT);
    }
}

/// Waits for direct writes that are under way.
fn settle(file: &File) {
    let len = file.metadata().unwrap().len();
    rustix::fs::fallocate(file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, len).unwrap();
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

async fn is_unreadable(ballastd: &Ballastd, vm: &str) {
    ballastd
        .eventually("it is shown as unreadable", async || {
            ballastd.vm(vm).await.state == RunState::Unreadable
        })
        .await;
    let view = ballastd.vm(vm).await;
    let trouble = view.trouble.unwrap_or_default();
    assert!(trouble.contains(&format!("{vm}.swap")), "{trouble}");
    assert!(trouble.contains("does not hold what was written there"), "{trouble}");
    let pid = view.pid.unwrap();
    ballastd.eventually("it has stopped", async || is_stopped(pid)).await;
}

async fn runs(ballastd: &Ballastd, vm: &str) {
    ballastd.eventually("it runs", async || ballastd.vm(vm).await.state == RunState::Running).await;
}

async fn is_swapped(ballastd: &Ballastd, vm: &str) {
    ballastd
        .eventually("its pages are swapped", async || {
            let memory = ballastd.vm(vm).await.memory;
            memory.swapped > 8 * MIB && ballastd.host().await.counters.swapped_in > MIB
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_pages_are_damaged_stops_and_goes_on_when_they_are_not() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start_without_sharing(&["--budget", "136M"]);
    for name in ["hurt", "well"] {
        let workload = "verify-torture --mb 56 --threads 3 --seconds 100000";
        let mut spec = ballastd.guest(image, name, 128, workload);
        spec.no_balloon = true;
        ballastd.client.run(&spec).await.unwrap();
    }
    let (mut hurt, mut well) = (ballastd.console("hurt"), ballastd.console("well"));
    for console in [&mut hurt, &mut well] {
        ballastd.checks_go_on(console, 1000).await;
    }
    is_swapped(&ballastd, "hurt").await;
    let swap = ballastd.swap_file("hurt");
    let damage = Damage::new(ballastd.pid(), &swap);
    is_unreadable(&ballastd, "hurt").await;
    let location = ballastd.host().await.swap_locations[0].clone();
    assert!(location.read_errors > 0 && location.state == LocationState::Good, "{location:?}");
    ballastd.checks_go_on(&mut well, 1000).await;
    assert_eq!(ballastd.vm("well").await.trouble, None);

    // Another manager finds it stopped, and so it stays.
    let pid = ballastd.vm("hurt").await.pid;
    ballastd.kill();
    ballastd.restart();
    ballastd.eventually("it is taken over", async || !ballastd.is_gone("hurt").await).await;
    is_unreadable(&ballastd, "hurt").await;
    runs(&ballastd, "well").await;
    ballastd.checks_go_on(&mut well, 1000).await;

    damage.heal(ballastd.pid());
    runs(&ballastd, "hurt").await;
    ballastd.checks_go_on(&mut hurt, 1000).await;
    let view = ballastd.vm("hurt").await;
    assert_eq!((view.pid, view.trouble), (pid, None));

    // It can be stopped while it cannot go on, without the guest's help.
    is_swapped(&ballastd, "hurt").await;
    let damage = Damage::new(ballastd.pid(), &swap);
    is_unreadable(&ballastd, "hurt").await;
    ballastd.client.stop("hurt", Duration::from_secs(3600)).await.unwrap();
    assert!(ballastd.is_gone("hurt").await);
    ballastd.assert_nothing_left("hurt");
    drop(damage);
    ballastd.checks_go_on(&mut well, 1000).await;
    ballastd.assert_books_balance().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn swap_files_are_where_their_priorities_say_and_found_again() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::prepare(&["--budget", "88M"]);
    let Some(small) = Small::mount(ballastd.root.join("small"), 48) else { return };
    let large = ballastd.swap_dir();
    std::fs::create_dir_all(&large).unwrap();
    let config = ballastd.root.join("ballast.toml");
    let write_config = |small_priority: i32| {
        let text = format!(
            "[sharing]\nenabled = false\n[compression]\nenabled = false\n\
             [[swap.location]]\npath = {:?}\n\
             [[swap.location]]\npath = {:?}\npriority = {small_priority}\n",
            large, small.0
        );
        std::fs::write(&config, text).unwrap();
    };
    write_config(7);
    ballastd.add_option("--config", &config);
    ballastd.names_swap_dir = false;
    ballastd.restart();
    let mut spec =
        ballastd.guest(image, "a", 128, "verify-torture --mb 56 --threads 2 --seconds 100000");
    spec.no_balloon = true;
    let reserved = ballastd.client.run(&spec).await.unwrap().memory.swap_reserved;
    assert_eq!(reserved, 128 * MIB);
    let mut console = ballastd.console("a");
    let files = [small.0.join("a.swap"), large.join("a.swap")];
    let sizes = files.each_ref().map(|file| std::fs::metadata(file).unwrap().len());
    assert!(sizes[0] >= 40 * MIB && sizes[0] + sizes[1] == reserved, "{sizes:?}");
    ballastd
        .eventually("pages are swapped", async || ballastd.host().await.counters.swapped_in > MIB)
        .await;
    let seen = ballastd.host().await.swap_locations;
    let [first, second] = &seen[..] else { panic!("{seen:?}") };
    assert!(first.path == small.0 && first.priority == 7 && first.used > 0, "{first:?}");
    assert!(second.path == large && second.used == 0, "{second:?}");
    assert_eq!([first.reserved, second.reserved], sizes);

    // In another order now, and the first one gone from the configuration: the VM knows better.
    for round in 0..2 {
        ballastd.checks_go_on(&mut console, 500).await;
        ballastd.kill();
        match round {
            0 => write_config(-7),
            // Nor does it wait because the API cannot be where it should.
            _ => std::fs::write(
                &config,
                format!("socket = \"/nonexistent/a.sock\"\n[[swap.location]]\npath = {large:?}\n"),
            )
            .unwrap(),
        }
        ballastd.restart();
        ballastd.eventually("it is taken over", async || !ballastd.is_gone("a").await).await;
        runs(&ballastd, "a").await;
    }
    ballastd.checks_go_on(&mut console, 500).await;
    assert!(ballastd.host().await.swap_locations.iter().any(|l| l.path == small.0));
    ballastd.client.stop("a", Duration::ZERO).await.unwrap();
    assert!(!files.iter().any(|file| file.exists()));
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    let told = log.lines().find(|line| line.contains("the API is at")).unwrap();
    assert!(told.contains("/nonexistent/a.sock") && told.contains("/run/api.sock"), "{told}");
    // With nobody who waits it is a mistake.
    ballastd.kill();
    assert!(!ballastd.command().output().unwrap().status.success());
}

#[test]
fn a_location_that_is_not_there_is_named() {
    let mut ballastd = Ballastd::prepare(&["--budget", "256M"]);
    let config = ballastd.root.join("ballast.toml");
    std::fs::write(&config, "[[swap.location]]\npath = \"/nonexistent/disk\"\n").unwrap();
    ballastd.add_option("--config", &config);
    ballastd.names_swap_dir = false;
    for check in [false, true] {
        let mut command = ballastd.command();
        let output = if check { command.arg("--check") } else { &mut command }.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or_default();
        assert!(!output.status.success(), "{errors}");
        assert_eq!(
            last,
            "ballastd: swap.location: /nonexistent/disk: No such file or directory (os error 2)"
        );
        assert!(!ballastd.run_dir().exists());
    }
}

/// A file system of its own, which can be told to answer nobody.
struct Disk {
    folder: PathBuf,
    at: PathBuf,
}

impl Disk {
    /// In a folder that `./test` finds, should this be killed. None where none can be made.
    fn mount(mib: u64) -> Option<Disk> {
        let folder = leftovers::private_folder(Path::new("/var/tmp")).unwrap();
        let (at, image) = (folder.join("mounted"), folder.join("image"));
        std::fs::create_dir_all(&at).unwrap();
        File::create(&image).unwrap().set_len(mib * MIB).unwrap();
        let made = run("mkfs.ext4", &["-q", "-F", "-m", "0"], &[&image])
            && run("mount", &["-o", "loop"], &[&image, &at]);
        if !made {
            std::fs::remove_dir_all(&folder).unwrap();
            assert!(!required(), "no ext4 can be mounted here");
            eprintln!("SKIPPED: no ext4 can be mounted here");
        }
        made.then_some(Disk { folder, at })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run("umount", &["-l"], &[&self.at]);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// As long as it is, whoever writes there waits.
struct Frozen<'a>(&'a Path);

impl Frozen<'_> {
    fn freeze(at: &Path) -> Frozen<'_> {
        assert!(run("fsfreeze", &["-f"], &[at]));
        Frozen(at)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let thawed = run("fsfreeze", &["-u"], &[self.0]);
        assert!(thawed || std::thread::panicking(), "{} is frozen", self.0.display());
    }
}

fn run(program: &str, options: &[&str], paths: &[&Path]) -> bool {
    let mut command = Command::new(program);
    // Some are not in the path of everybody.
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(options).args(paths);
    command.output().is_ok_and(|output| output.status.success())
}

/// All that is reclaimed goes to swap: on `disk` first.
fn with_swap_on(disk: &Disk, budget: &str) -> Ballastd {
    let mut ballastd = Ballastd::prepare(&["--budget", budget]);
    let (config, other) = (ballastd.root.join("ballast.toml"), ballastd.swap_dir());
    std::fs::create_dir_all(&other).unwrap();
    let text = format!(
        "[sharing]\nenabled = false\n[compression]\nenabled = false\n[[swap.location]]\npath = {:?}\n\
         priority = 10\n[[swap.location]]\npath = {other:?}\n",
        disk.at,
    );
    std::fs::write(&config, text).unwrap();
    ballastd.names_swap_dir = false;
    ballastd.add_option("--config", &config);
    ballastd.restart();
    ballastd
}

/// Two guests that work on more memory than there is; the first swaps to the disk.
async fn hurt_and_well(ballastd: &Ballastd, image: &Image, disk: &Disk) {
    for name in ["hurt", "well"] {
        let workload = "verify-torture --mb 56 --threads 2 --seconds 100000";
        let mut spec = ballastd.guest(image, name, 128, workload);
        (spec.no_balloon, spec.min) = (true, 48 * MIB);
        // It stands still for as long as its disk does.
        spec.append += " nowatchdog";
        ballastd.client.run(&spec).await.unwrap();
        // The first has all of that disk.
        fill(&disk.at);
    }
    assert!(disk.at.join("hurt.swap").exists() && !disk.at.join("well.swap").exists());
    for mut console in [ballastd.console("hurt"), ballastd.console("well")] {
        ballastd.checks_go_on(&mut console, 1000).await;
    }
    is_swapped(ballastd, "hurt").await;
}

async fn frozen_with_writes_under_way<'a>(ballastd: &Ballastd, disk: &'a Disk) -> Frozen<'a> {
    let frozen = Frozen::freeze(&disk.at);
    let less = HostChange { budget: Some(136 * MIB), ..HostChange::default() };
    ballastd.client.change_host(&less).await.unwrap();
    // Nothing more is asked of it, and the other is not promised what it has.
    ballastd
        .eventually("what cannot be taken is nobody else's", async || {
            let (hurt, host) = (ballastd.vm("hurt").await.memory, ballastd.host().await);
            let target = ballastd.vm("well").await.memory.target;
            hurt.consumed > hurt.target && hurt.consumed + hurt.overhead + target <= host.budget
        })
        .await;
    frozen
}

/// A manager that leaves does not wait for it; the VM that swaps to it waits until the old one's threads have ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_does_not_answer_keeps_no_other_vm_from_the_next_manager() {
    let Some(image) = image_or_skip() else { return };
    let Some(disk) = Disk::mount(64) else { return };
    let mut ballastd = with_swap_on(&disk, "160M");
    hurt_and_well(&ballastd, image, &disk).await;
    let frozen = frozen_with_writes_under_way(&ballastd, &disk).await;
    let mut old = ballastd.take_over_from();
    let (mut hurt, mut well) = (ballastd.console("hurt"), ballastd.console("well"));
    ballastd.checks_go_on(&mut well, 2000).await;
    ballastd.is_paged("well").await;
    drop(frozen);
    wait("the end of the old ballastd", || old.try_wait().unwrap());
    ballastd.is_paged("hurt").await;
    for console in [&mut hurt, &mut well] {
        ballastd.checks_go_on(console, 2000).await;
    }
    ballastd.assert_books_balance().await;
    for name in ["hurt", "well"] {
        ballastd.client.stop(name, Duration::ZERO).await.unwrap();
    }
}

/// Its disk does not answer, so that what one VM has cannot be taken from it, nor given back when it ends. The other is
/// entitled to what is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_does_not_answer_is_one_vms_alone() {
    let Some(image) = image_or_skip() else { return };
    let Some(disk) = Disk::mount(64) else { return };
    let ballastd = with_swap_on(&disk, "160M");
    hurt_and_well(&ballastd, image, &disk).await;
    let client = ballastd.client.clone();
    let mut well = ballastd.console("well");
    let frozen = frozen_with_writes_under_way(&ballastd, &disk).await;
    ballastd.checks_go_on(&mut well, 2000).await;
    let stopping = tokio::spawn(async move { client.stop("hurt", Duration::ZERO).await });
    ballastd
        .eventually("it has ended", async || {
            let hurt = ballastd.client.vm("hurt").await;
            hurt.is_ok_and(|vm| vm.state == RunState::Stopped)
        })
        .await;
    for _ in 0..4 {
        ballastd.checks_go_on(&mut well, 500).await;
        let (host, well) = (ballastd.host().await, ballastd.vm("well").await.memory);
        let adrift = (host.budget - host.free).saturating_sub(well.consumed + well.overhead);
        assert!(adrift > 16 * MIB && !stopping.is_finished(), "{adrift} {host:?}");
        assert!(well.target + adrift <= host.budget, "{adrift} of nobody beside {well:?}");
    }
    drop(frozen);
    stopping.await.unwrap().unwrap();
    ballastd.assert_nothing_left("hurt");
    ballastd.assert_books_balance().await;
    ballastd.checks_go_on(&mut well, 1000).await;
    ballastd.client.stop("well", Duration::ZERO).await.unwrap();
}
