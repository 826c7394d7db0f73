//! What is refused before anything is started, and starts that fail: nothing of them is left.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::path::PathBuf;
use std::time::Duration;

use ballast_api::{Accel, ErrorCode, RebootAction, VmSpec};
use support::http::refusal;
use support::{Ballastd, MIB, ZEROS, image_or_skip, refused, refused_as};

/// A spec that is good but for what each test does to it.
fn spec(name: &str) -> VmSpec {
    VmSpec {
        name: name.into(),
        max: 64 * MIB,
        kernel: "/etc/hostname".into(),
        accel: Accel::Tcg,
        ..VmSpec::default()
    }
}

/// No promise, no memory, no file but logs of QEMUs that ran.
async fn assert_untouched(ballastd: &Ballastd) {
    let host = ballastd.host().await;
    assert_eq!((host.vms, host.free, host.overhead), (0, host.budget - ZEROS, ZEROS), "{host:?}");
    let there = |folder: PathBuf| -> Vec<PathBuf> {
        let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
        found.map(|entry| entry.path()).collect()
    };
    assert_eq!(there(ballastd.swap_dir()), Vec::<PathBuf>::new());
    let of_vms = there(ballastd.run_dir().join("vms")).into_iter().flat_map(there);
    let left: Vec<_> = of_vms.filter(|file| file.extension().is_none_or(|e| e != "log")).collect();
    assert!(left.is_empty(), "{left:?}");
    // All that can be promised can still be promised, with room for the overhead of such a VM.
    let goal = host.thresholds[0].upper;
    let all = VmSpec {
        min: (host.budget - goal - ZEROS - 6 * MIB) & !4095,
        max: host.budget,
        qemu: Some("/bin/false".into()),
        ..spec("most")
    };
    refused_as(ballastd.client.run(&all).await, ErrorCode::Internal, "QEMU");
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_named_and_begin_nothing() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let good = spec("a");
    type Change = fn(&mut VmSpec);
    let mistakes: [(&str, Change); 21] = [
        ("name", |s| s.name = "a/b".into()),
        ("name", |s| s.name = "..".into()),
        ("name", |s| s.name = String::new()),
        ("name", |s| s.name = "n".repeat(65)),
        ("max", |s| s.max = 0),
        ("max", |s| s.max = 64 * MIB + 4096),
        ("min", |s| s.min = 65 * MIB),
        ("shares", |s| s.shares = Some(0)),
        ("tax", |s| s.tax = Some(1.0)),
        ("tax", |s| s.tax = Some(-0.1)),
        ("vcpus", |s| s.vcpus = Some(0)),
        ("kernel", |s| s.kernel = "/nonexistent/vmlinuz".into()),
        ("kernel", |s| s.kernel = "/tmp".into()),
        ("kernel", |s| s.kernel = "Cargo.toml".into()),
        ("initrd", |s| s.initrd = Some("/nonexistent/initrd".into())),
        ("console", |s| s.console = Some("console.log".into())),
        ("qemu", |s| s.qemu = Some("/nonexistent/qemu".into())),
        ("-daemonize", |s| s.extra = vec!["-daemonize".into()]),
        ("mem-lock", |s| s.extra = vec!["-overcommit".into(), "mem-lock=on".into()]),
        ("memory-backend", |s| {
            s.extra = vec!["-object".into(), "memory-backend-ram,id=x,size=1M".into()];
        }),
        ("vfio", |s| s.extra = vec!["-device".into(), "vfio-pci,host=00:01.0".into()]),
    ];
    for (named, change) in mistakes {
        let mut bad = good.clone();
        change(&mut bad);
        refused_as(ballastd.client.run(&bad).await, ErrorCode::BadRequest, named);
    }
    let socket = ballastd.client.socket();
    for (body, named) in [
        ("{\"name\":\"a\",\"max\":67108864,\"kernel\":\"/k\",\"memory\":1}", "memory"),
        ("{\"name\":\"a\",\"max\":\"64M\",\"kernel\":\"/k\"}", "max"),
        ("{\"name\":\"a\",\"max\":-1,\"kernel\":\"/k\"}", "max"),
        ("{\"name\":\"a\"}", "max"),
        ("{", "JSON"),
        ("", "JSON"),
    ] {
        let (status, message) = refusal(socket, "POST", "/v1/vms", body);
        assert!(status == 400 && message.contains(named), "{body}: {status} {message}");
    }
    for (method, path) in
        [("GET", "/v1/vms/none"), ("DELETE", "/v1/vms"), ("GET", "/v2"), ("GET", "/v1/vms/%2e%2e")]
    {
        assert_eq!(refusal(socket, method, path, "").0, 404, "{method} {path}");
    }
    assert_eq!(refusal(socket, "POST", "/v1/vms/none/stop", "{\"grace_s\":0}").0, 404);
    // A name that is no text.
    assert_eq!(refusal(socket, "GET", "/v1/vms/%ff", "").0, 400);
    assert_untouched(&ballastd).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_leaves_nothing() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let client = &ballastd.client;
    let failing = [
        VmSpec { qemu: Some("/bin/false".into()), ..spec("false") },
        VmSpec { qemu: Some("/etc/hostname".into()), ..spec("noexec") },
        VmSpec { qemu: Some("no-such-qemu".into()), ..spec("nopath") },
    ];
    for spec in &failing {
        refused_as(client.run(spec).await, ErrorCode::Internal, &spec.name);
        assert!(ballastd.is_gone(&spec.name).await);
    }
    assert_untouched(&ballastd).await;
    let Some(image) = image_or_skip() else { return };
    let good = ballastd.guest(image, "g", 96, "");
    for extra in
        [vec!["-nonsense"], vec!["-device", "no-such-device"], vec!["-drive", "file=/none"]]
    {
        let extra = extra.into_iter().map(str::to_owned).collect();
        let body = refused(client.run(&VmSpec { extra, ..good.clone() }).await);
        assert_eq!(body.code, ErrorCode::Internal);
        // What QEMU said is what helps.
        assert!(body.message.contains("qemu-system") || body.message.contains("none"), "{body:?}");
    }
    // A file that is no kernel: QEMU ends after its RAM was handed over.
    let kernel = "/etc/hostname".into();
    let ended = refused(client.run(&VmSpec { kernel, ..good }).await).message;
    let logs = ballastd.run_dir().join("vms/g");
    assert!(ended.starts_with("g: ") && ended.contains(&logs.display().to_string()), "{ended}");
    assert!(logs.join("qemu.log").exists());
    assert_untouched(&ballastd).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn promises_are_kept_and_names_belong_to_one() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "160M"]);
    let client = &ballastd.client;
    let mut first = ballastd.guest(image, "first", 128, "");
    first.min = 64 * MIB;
    // Two at once: one of them wins, the other is told why.
    let (one, two) = tokio::join!(client.run(&first), client.run(&first));
    let (won, lost) = if one.is_ok() { (one, two) } else { (two, one) };
    assert_eq!(won.unwrap().params.min, 64 * MIB);
    refused_as(lost, ErrorCode::Conflict, "first");
    refused_as(client.run(&first).await, ErrorCode::Conflict, "first");

    let mut greedy = ballastd.guest(image, "greedy", 128, "");
    greedy.min = 96 * MIB;
    let refusal = refused(client.run(&greedy).await);
    assert_eq!(refusal.code, ErrorCode::NoRoom);
    for number in ["greedy: needs 99", "MiB unreserved", "largest reservation: first, 67"] {
        assert!(refusal.message.contains(number), "{number}: {}", refusal.message);
    }
    // Declared overhead is promised, too.
    let declared = VmSpec { min: 0, overhead: Some(96 * MIB), ..greedy.clone() };
    refused_as(client.run(&declared).await, ErrorCode::NoRoom, "greedy");
    let absurd = VmSpec { overhead: Some(u64::MAX), max: 1 << 60, min: 1 << 59, ..greedy.clone() };
    refused_as(client.run(&absurd).await, ErrorCode::BadRequest, "max");
    // No disk has this much swap.
    let endless = VmSpec { max: 1 << 45, min: 0, ..greedy.clone() };
    assert_eq!(refused(client.run(&endless).await).code, ErrorCode::NoRoom);
    assert!(ballastd.is_gone("greedy").await);
    ballastd.assert_nothing_left("greedy");

    let fits = VmSpec { min: 32 * MIB, ..greedy };
    client.run(&fits).await.unwrap();
    let vm = ballastd.vm("greedy").await;
    assert!(vm.memory.swap_reserved == 96 * MIB && vm.params.min == 32 * MIB, "{vm:?}");
    for vm in ["first", "greedy"] {
        client.stop(vm, Duration::ZERO).await.unwrap();
    }
    let host = ballastd.host().await;
    assert_eq!((host.free, host.swap_reserved), (host.budget - ZEROS, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_swap_is_replaced_and_a_vm_that_cannot_be_paged_says_why() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let client = &ballastd.client;
    // The swap file of a VM that a crash of the host has ended is nobody's.
    let stale = ballastd.swap_file("a");
    std::fs::write(&stale, "old").unwrap();
    let vm = client.run(&ballastd.guest(image, "a", 96, "")).await.unwrap();
    assert_eq!(vm.management.mode, ballast_api::Mode::Paged, "{:?}", vm.management);
    client.stop("a", Duration::ZERO).await.unwrap();
    assert!(!stale.exists());
    // No folder for swap files, and a VM that needs none: the pager still wants its file, so this VM
    // runs unpaged, with room for all of it.
    std::fs::remove_dir(ballastd.swap_dir()).unwrap();
    let whole = VmSpec { min: 128 * MIB, ..ballastd.guest(image, "b", 128, "") };
    let vm = client.run(&whole).await.unwrap();
    assert_eq!(vm.management.mode, ballast_api::Mode::BalloonOnly, "{:?}", vm.management);
    assert!(vm.management.reason.is_some_and(|why| why.contains("b.swap")));
    // What it does not use yet nobody else gets: it is measured once a second.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let host = ballastd.host().await;
    assert!(host.free <= host.budget - 128 * MIB && host.consumed >= 128 * MIB, "{host:?}");
    let swapped = ballastd.guest(image, "c", 96, "");
    refused_as(client.run(&swapped).await, ErrorCode::NoRoom, "swap");
    client.stop("b", Duration::ZERO).await.unwrap();
    let host = ballastd.host().await;
    assert_eq!((host.free, host.vms), (host.budget - ZEROS, 0));
    assert!(host.peak_used <= host.budget, "{host:?}");
}

/// Such a disk is seen when QEMU is there: what nothing but a balloon takes from it is promised before its start is done with.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_has_a_pager_and_may_not_be_paged_is_promised_all_or_is_not_started() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start_without_sharing(&["--budget", "192M"]);
    let client = &ballastd.client;
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = dir.path().join("disk");
    std::fs::write(&disk, [0; 4096]).unwrap();
    let drive = format!("file={},format=raw,if=virtio,cache=none", disk.display());
    let mut whole = ballastd.guest(image, "whole", 128, "");
    whole.extra = vec!["-drive".to_owned(), drive];
    let other = VmSpec { min: 80 * MIB, wait_s: Some(0.0), ..ballastd.guest(image, "o", 96, "") };
    client.run(&other).await.unwrap();
    let refusal = refused(client.run(&whole).await);
    assert_eq!(refusal.code, ErrorCode::NoRoom);
    for part in ["whole: it cannot be paged", "disk", "unpaged: "] {
        assert!(refusal.message.contains(part), "{part}: {}", refusal.message);
    }
    assert!(ballastd.is_gone("whole").await);
    ballastd.assert_nothing_left("whole");
    client.stop("o", Duration::ZERO).await.unwrap();
    let vm = client.run(&whole).await.unwrap();
    assert_eq!(vm.management.mode, ballast_api::Mode::BalloonOnly, "{:?}", vm.management);
    refused_as(client.run(&other).await, ErrorCode::NoRoom, "unreserved");
    client.stop("whole", Duration::ZERO).await.unwrap();
    let host = ballastd.host().await;
    assert_eq!((host.free, host.vms), (host.budget - ZEROS, 0));
}

/// Nothing could be taken from it: what it was promised nobody else is, also between its end and its next start.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_not_paged_finds_what_it_was_promised_when_it_has_rebooted() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start_without_sharing(&["--budget", "192M"]);
    let client = &ballastd.client;
    // The store of what it shares cannot be made.
    std::fs::create_dir(ballastd.run_dir().join("store/vm-u.pages")).unwrap();
    let mut spec = ballastd.guest(image, "u", 96, "");
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    let first = client.run(&spec).await.unwrap();
    assert_eq!(first.management.mode, ballast_api::Mode::BalloonOnly, "{:?}", first.management);
    let other = VmSpec { min: 80 * MIB, wait_s: Some(0.0), ..ballastd.guest(image, "o", 96, "") };
    refused_as(client.run(&other).await, ErrorCode::NoRoom, "unreserved");
    ballastd.eventually("it reboots", async || client.vm("u").await.is_err()).await;
    // It is held back for some seconds.
    refused_as(client.run(&other).await, ErrorCode::NoRoom, "unreserved");
    let is_back = async || client.vm("u").await.is_ok_and(|vm| vm.pid != first.pid);
    ballastd.eventually("it runs again", is_back).await;
    refused_as(client.run(&other).await, ErrorCode::NoRoom, "unreserved");
    client.stop("u", Duration::ZERO).await.unwrap();
    client.run(&other).await.unwrap();
    client.stop("o", Duration::ZERO).await.unwrap();
    let host = ballastd.host().await;
    assert_eq!((host.free, host.vms), (host.budget - ZEROS, 0));
}

/// A guest holds most of the memory without being promised any: who is promised some gets it before it
/// starts, and waits for that no longer than it may.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_waits_until_what_it_was_promised_is_free() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start_without_sharing(&["--budget", "208M", "--sample-period", "2"]);
    let client = &ballastd.client;
    let mut hog = ballastd.guest(image, "hog", 160, "toucher --min-mb 40 --max-mb 60");
    hog.min = 32 * MIB;
    client.run(&hog).await.unwrap();
    let mut console = ballastd.console("hog");
    ballastd.checks_go_on(&mut console, 1).await;
    ballastd
        .eventually("the hog has most of it", async || ballastd.host().await.free < 96 * MIB)
        .await;
    let mut new = ballastd.guest(image, "new", 128, "");
    new.min = 104 * MIB;
    new.no_balloon = true;
    // At once it cannot be.
    let now = VmSpec { wait_s: Some(0.0), ..new.clone() };
    let refusal = refused(client.run(&now).await);
    assert_eq!(refusal.code, ErrorCode::NoRoom);
    for part in ["new: needs 10", "min 104 MiB", "that the host keeps free", "were free after 0 s"]
    {
        assert!(refusal.message.contains(part), "{part}: {}", refusal.message);
    }
    ballastd.assert_nothing_left("new");
    assert!(client.starts().await.unwrap().is_empty());
    let bad = VmSpec { wait_s: Some(-1.0), ..new.clone() };
    refused_as(client.run(&bad).await, ErrorCode::BadRequest, "wait_s");

    let patient = VmSpec { wait_s: Some(100.0), ..new };
    let start = client.run(&patient);
    tokio::pin!(start);
    let mut seen = Vec::new();
    let vm = loop {
        tokio::select! {
            vm = &mut start => break vm.unwrap(),
            () = tokio::time::sleep(Duration::from_millis(10)) => {
                seen.extend(client.starts().await.unwrap());
            }
        }
    };
    // It was seen to wait, for its memory and for nobody before it.
    assert!(!seen.is_empty());
    assert!(seen.iter().all(|s| s.name == "new" && s.need > 104 * MIB && s.ahead == 0), "{seen:?}");
    assert!(seen[0].missing > 0 && seen[0].wait_s == Some(100.0), "{seen:?}");
    assert!(seen.iter().any(|s| s.freeing.iter().any(|f| f.starts_with("hog: "))), "{seen:?}");
    assert_eq!(vm.params.min, 104 * MIB);
    // The hog paid, but not with what it was promised.
    let hog = ballastd.vm("hog").await;
    assert!(
        hog.memory.ballooned + hog.memory.swapped + hog.memory.compressed > 0,
        "{:?}",
        hog.memory
    );
    assert!(hog.memory.consumed >= 32 * MIB, "{:?}", hog.memory);
    ballastd.checks_go_on(&mut console, 10).await;
    let host = ballastd.host().await;
    assert!(host.measured_peak <= host.budget && host.peak_used <= host.budget, "{host:?}");
    for vm in ["hog", "new"] {
        client.stop(vm, Duration::ZERO).await.unwrap();
    }
}

/// Where VMMs are booked, a VM costs what its VMM takes, from its promise to its end.
#[tokio::test(flavor = "multi_thread")]
async fn what_vmms_take_is_booked_where_the_configuration_says_so() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::prepare(&[]);
    let file = ballastd.root.join("ballast.toml");
    let text = "budget = \"256M\"\n[admission]\nvmm_memory = \"budget\"\n";
    std::fs::write(&file, text).unwrap();
    ballastd.add_option("--config", &file);
    ballastd.restart();
    let client = &ballastd.client;
    let mut first = ballastd.guest(image, "first", 96, "");
    first.min = 32 * MIB;
    let vm = client.run(&first).await.unwrap();
    // What was expected of it, as long as it boots.
    assert!(vm.memory.vmm_booked >= 48 * MIB, "{:?}", vm.memory);
    ballastd
        .eventually("its VMM is measured", async || {
            let memory = ballastd.vm("first").await.memory;
            memory.vmm_overhead > 8 * MIB && memory.overhead >= memory.vmm_booked + MIB
        })
        .await;
    ballastd.assert_books_balance().await;
    // 120 and its pager's own would fit beside it, but not what its VMM will take.
    let second = VmSpec { min: 120 * MIB, ..ballastd.guest(image, "second", 128, "") };
    let refusal = refused(client.run(&second).await);
    assert_eq!(refusal.code, ErrorCode::NoRoom);
    assert!(refusal.message.contains("second: needs 17"), "{refusal:?}");
    // The next manager measures anew, and nothing is booked twice or stays.
    ballastd.kill();
    ballastd.restart();
    ballastd
        .eventually("it is booked again", async || {
            let vms = ballastd.client.vms().await.unwrap();
            vms.iter().any(|vm| vm.memory.vmm_booked > 8 * MIB)
        })
        .await;
    ballastd.assert_books_balance().await;
    ballastd.client.stop("first", Duration::ZERO).await.unwrap();
    let host = ballastd.host().await;
    assert_eq!((host.free, host.overhead), (host.budget - ZEROS, ZEROS));
}

/// It may run; whatever it has stays as it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_record_cannot_be_read_keeps_its_name_and_its_files_and_no_other_from_a_manager()
{
    let mut ballastd = Ballastd::prepare(&["--budget", "256M"]);
    let folder = ballastd.folder("lost");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("vm.json"), "{\"version\":1,").unwrap();
    std::fs::write(folder.join("pmap"), "words").unwrap();
    let of = |name: &str| VmSpec { qemu: Some("/bin/false".into()), ..spec(name) };
    for _ in 0..2 {
        ballastd.restart();
        refused_as(ballastd.client.run(&of("lost")).await, ErrorCode::Conflict, "vm.json");
        refused_as(ballastd.client.run(&of("other")).await, ErrorCode::Internal, "other");
        assert!(ballastd.term().success());
        assert_eq!(std::fs::read_to_string(folder.join("pmap")).unwrap(), "words");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    ballastd.restart();
    refused_as(ballastd.client.run(&of("lost")).await, ErrorCode::Internal, "lost");
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists());
}
