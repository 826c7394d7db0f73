use ballast_qemu::ProcessHandle;

use super::*;
use crate::survey::Unread;
use crate::vm::{Asked, Sizes};

#[tokio::test]
async fn one_that_was_paged_and_cannot_be_after_its_reboot_is_admitted_as_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let (size, min) = (Pages::from_mib(200), Pages::from_mib(32));
    let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
    let pledge = |min| {
        let promise = Promise { min, overhead: Pages::ZERO, swap: Pages::ZERO };
        Pledge { promise, pool: None, rebooted: None }
    };
    manager.promise("other", pledge(Pages::from_mib(100))).unwrap();
    manager.promise("a", pledge(min)).unwrap();
    let promised = || lock(&manager.starting)["a"].promise.min;
    for (was_unpaged, is_admitted) in [(false, false), (true, true)] {
        let last = views::never_was(&manager, "a", size, &params);
        let id = VmId(1);
        let reboot = Reboot { id, called_off: false, ended: false, was_unpaged, last };
        lock(&manager.rebooting).insert("a".into(), reboot);
        let told = manager.promise_unpaged("a", size);
        // What its balloon held before is others' by now: it finds what they can be left without.
        assert_eq!(told.ok(), is_admitted.then_some(min));
        assert_eq!(promised(), min);
    }
    // One whose promise was cut to nothing finds some: with none it would count as one that has ended.
    manager.promise_held("a", pledge(Pages::ZERO));
    assert_eq!(manager.promise_unpaged("a", size).unwrap(), Pages(1));
    manager.promise_held("a", pledge(min));
    // One that never ran is, where there is room.
    lock(&manager.rebooting).clear();
    assert_eq!(manager.promise_unpaged("a", size).unwrap_err().code, ErrorCode::NoRoom);
    manager.promise_settled("other");
    assert_eq!(manager.promise_unpaged("a", size).unwrap(), size);
    assert_eq!(promised(), size);
}

#[tokio::test]
async fn a_reboot_is_over_for_one_that_ends_by_itself_and_not_for_another_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let size = Pages::from_mib(64);
    let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
    let vm = Vm::of_tests("a", dir.path().join("a"), size, params.clone());
    // Nothing more is waited for.
    vm.has_said_all.store(true, Ordering::Relaxed);
    let ends = [
        (Exit::Code(0), false, true),
        (Exit::Code(0), true, false),
        (Exit::Code(1), false, false),
        (Exit::Signal(9), false, false),
    ];
    for (exit, reboots, is_over) in ends {
        let (id, last) = (vm.id, views::never_was(&manager, "a", size, &params));
        let reboot = Reboot { id, called_off: false, ended: false, was_unpaged: false, last };
        lock(&manager.rebooting).insert("a".into(), reboot);
        vm.rebooting.store(reboots, Ordering::Relaxed);
        manager.ended_at_once(&vm, exit).await;
        let has_ended = lock(&manager.rebooting)["a"].ended;
        assert_eq!(has_ended, is_over, "{exit:?}, reboots: {reboots}");
    }
}

#[tokio::test]
async fn a_manager_whose_starts_do_not_settle_starts_vms_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let promise = Promise { min: Pages(1), overhead: Pages::ZERO, swap: Pages::ZERO };
    manager.promise("a", Pledge { promise, pool: None, rebooted: None }).unwrap();
    let settled = manager.settle_starts(Duration::ZERO).await;
    assert_eq!(settled, Err(vec!["a".to_owned()]));
    assert!(!manager.is_closing());
    manager.promise_settled("a");
    assert_eq!(manager.settle_starts(Duration::ZERO).await, Ok(()));
    assert!(manager.is_closing());
}

#[tokio::test]
async fn what_is_left_of_a_former_vm_is_told_to_who_would_stop_it() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let stop = async |name| manager.stop_vm(name, Duration::ZERO).await.unwrap_err();
    assert_eq!(stop("a").await.code, ErrorCode::NotFound);
    lock(&manager.clearing).insert("a".into());
    let unread = |name: &str, at: &str, may_run| {
        let (name, folder) = (name.to_owned(), manager.folder_of(at));
        std::fs::create_dir_all(&folder).unwrap();
        let why = "its record is damaged".into();
        lock(&manager.unread).insert(name.clone(), Unread { name, folder, why, may_run });
    };
    unread("b", "b", true);
    // Its folder was moved.
    unread("c", "c.old", true);
    unread("d", "d", false);
    let parts = [
        ("a", "being removed"),
        ("b", "may run already: its record is damaged"),
        ("c", "may run already: its record is damaged"),
        ("d", "is there already: its record is damaged"),
    ];
    for (name, part) in parts {
        let told = stop(name).await;
        assert_eq!(told.code, ErrorCode::Conflict, "{told}");
        assert!(told.message.contains(part), "{told}");
    }
    for (name, at) in [("b", "b"), ("c", "c.old"), ("d", "d")] {
        std::fs::remove_dir(manager.folder_of(at)).unwrap();
        assert_eq!(stop(name).await.code, ErrorCode::NotFound);
    }
}

#[test]
fn what_ran_under_kvm_is_not_emulated_after_a_reboot() {
    let tcg = AccelChoice::Tcg { why: "no /dev/kvm".into() }.to_string();
    let kvm = AccelChoice::Kvm.to_string();
    assert_eq!(accel_again(Accel::Auto, &kvm), Accel::Kvm);
    assert_eq!(accel_again(Accel::Auto, &tcg), Accel::Auto);
    assert_eq!(accel_again(Accel::Tcg, &tcg), Accel::Tcg);
}

#[test]
fn a_vm_that_was_promised_more_than_it_began_with_is_started_with_what_it_began_with() {
    let sizes = Sizes { boot: Pages::from_mib(256), most: Pages::from_mib(512) };
    let with = |min: Option<u64>, max: Option<u64>, limit: u64| {
        let pages = |mib: Option<u64>| mib.map(Pages::from_mib);
        let asked = Asked { min: pages(min), max: pages(max), ..Asked::default() };
        let params = VmParams::resolve(&[], "a", sizes, asked).unwrap();
        let (spec, changes) = again(VmSpec::default(), &params, Pages::from_mib(limit));
        let mib = |bytes: Option<u64>| bytes.map(|bytes| bytes >> 20);
        // What cannot be had costs nothing else.
        let wishes = |change: &VmChange| {
            usize::from(change.min.is_some()) + usize::from(change.max.is_some())
        };
        assert!(changes.iter().all(|change| wishes(change) < 2), "{changes:?}");
        let mins: Vec<u64> = changes.iter().filter_map(|change| change.min).collect();
        assert!(mins.len() < 2, "{changes:?}");
        let max = changes.iter().find_map(|change| change.max);
        (spec.min >> 20, mib(mins.first().copied()), mib(max))
    };
    assert_eq!(with(None, None, 256), (0, None, None));
    assert_eq!(with(Some(64), None, 256), (64, None, None));
    assert_eq!(with(Some(0), None, 256), (0, Some(0), None));
    assert_eq!(with(Some(384), Some(512), 256), (256, Some(384), Some(512)));
    // The configuration limits it to less.
    assert_eq!(with(Some(200), Some(256), 128), (128, Some(200), Some(256)));
}

/// What it was promised is others' when that returns, and its name anybody's.
#[tokio::test]
async fn a_vm_is_stopped_when_who_was_starting_it_has_seen_that() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let size = Pages::from_mib(16);
    let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
    let promise = Promise { min: size, overhead: Pages::ZERO, swap: Pages::ZERO };
    manager.promise("a", Pledge { promise, pool: None, rebooted: None }).unwrap();
    let mut vm = Arc::into_inner(Vm::of_tests("a", dir.path().join("a"), size, params)).unwrap();
    let mut guest = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    vm.process = ProcessHandle::open(guest.id()).unwrap();
    manager.insert(Arc::new(vm));
    let stops = manager.clone();
    let stop = tokio::spawn(async move { stops.stop_vm("a", Duration::ZERO).await });
    while manager.find("a").is_some() {
        tokio::time::sleep(STEP).await;
    }
    assert!(!stop.is_finished());
    manager.promise_settled("a");
    assert!(stop.await.unwrap().is_ok());
    // Whoever stopped it may have met its end.
    let _ = guest.wait();
}

/// Its name, and what it is to have again: others would take either between its end and its start.
#[tokio::test]
async fn what_a_vm_has_that_reboots_is_held_until_it_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let (size, min) = (Pages::from_mib(16), Pages::from_mib(8));
    let asked = Asked { min: Some(min), ..Asked::default() };
    let params = VmParams::resolve(&[], "a", size.into(), asked).unwrap();
    let mut vm = Arc::into_inner(Vm::of_tests("a", dir.path().join("a"), size, params)).unwrap();
    let mut guest = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    vm.process = ProcessHandle::open(guest.id()).unwrap();
    let (max, on_reboot) = (size.bytes().0, RebootAction::Restart);
    vm.spec = Some(VmSpec { name: "a".into(), max, on_reboot, ..VmSpec::default() });
    vm.rebooting.store(true, Ordering::Relaxed);
    let vm = Arc::new(vm);
    manager.insert(vm.clone());
    let watch = tokio::spawn(watch_exit(manager.clone(), vm.clone()));
    guest.kill().unwrap();
    let held = || lock(&manager.starting).get("a").map(|p| (p.rebooted, p.promise.swap));
    while vm.run_state() != RunState::Stopped {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    while manager.find("a").is_some() {
        assert_eq!(held(), Some((Some(vm.id), size - min)), "what they leave free is its own");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // It is held back for a while, for it had just been started.
    assert_eq!(held(), Some((Some(vm.id), size - min)));
    // Another of its name: that it is over with the one says nothing of the other.
    manager.reboot_settled("a", VmId(vm.id.0 + 1));
    assert!(held().is_some());
    let stopped = manager.stop_vm("a", Duration::ZERO).await.unwrap();
    assert!(stopped.ended.unwrap().contains("not started again"));
    assert!(lock(&manager.starting).is_empty() && lock(&manager.rebooting).is_empty());
    watch.await.unwrap();
    let _ = guest.wait();
}
