use ballast_units::Bytes;

use super::*;
use crate::config::Overrides;

pub(crate) fn manager(dir: &std::path::Path) -> Arc<Manager> {
    let [run_dir, swap_dir] = ["run", "swap"].map(|name| Some(dir.join(name)));
    std::fs::create_dir(dir.join("swap")).unwrap();
    let budget = Some(Bytes::from_mib(256));
    let shim = std::env::current_exe().ok();
    let overrides = Overrides { run_dir, swap_dir, budget, shim, ..Overrides::default() };
    Manager::new(Config::load(None, overrides).unwrap(), Source::default()).unwrap()
}

#[tokio::test]
async fn a_vm_that_is_there_already_is_promised_to_once() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let min = Pages::from_mib(100);
    let promise = Promise { min, overhead: Pages::ZERO, swap: Pages::ZERO };
    let pledge = || Pledge { promise, pool: None, rebooted: None };
    manager.promise("a", pledge()).unwrap();
    // Who asks for it, or for its name, is told that it is on its way.
    let unknown = manager.vm("a").err().unwrap();
    assert!(unknown.to_string().contains("is being started"), "{unknown}");
    let again = manager.take_name("a", pledge()).await.unwrap_err();
    assert!(again.to_string().contains("is being started"), "{again}");
    // Its QMP has not answered yet.
    let asked = crate::vm::Asked { min: Some(min), ..Default::default() };
    let params = VmParams::resolve(&[], "a", min.into(), asked).unwrap();
    manager.insert(Vm::of_tests("a", dir.path().join("a"), min, params));
    manager.promise("b", pledge()).unwrap();
    let refused = manager.promise("c", pledge()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
}

#[tokio::test]
async fn the_peak_of_overcommitment_counts_a_budget_that_was_lowered_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let size = Pages::from_mib(128);
    let params = VmParams::resolve(&[], "a", size.into(), Default::default()).unwrap();
    manager.insert(Vm::of_tests("a", dir.path().join("a"), size, params));
    assert_eq!((manager.overcommit(), manager.overcommit_peak()), (0.5, 0.5));
    manager.host.ledger.set_budget(Pages::from_mib(64));
    assert_eq!(manager.overcommit_peak(), 2.0);
    manager.host.ledger.set_budget(Pages::from_mib(256));
    assert_eq!((manager.overcommit(), manager.overcommit_peak()), (0.5, 2.0));
}

/// Where more is promised than can be kept, it is not the one whose guest reboots that pays.
#[tokio::test]
async fn what_is_held_for_a_vm_that_reboots_is_promised_to_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let pledge = |mib, rebooted| {
        let min = Pages::from_mib(mib);
        let promise = Promise { min, overhead: Pages::ZERO, swap: Pages::ZERO };
        Pledge { promise, pool: None, rebooted }
    };
    // As after a min that was raised before a restart.
    let all = {
        let mut starting = lock(&manager.starting);
        starting.insert("big".into(), pledge(300, None));
        starting.insert("again".into(), pledge(64, Some(VmId(7))));
        starting.clone()
    };
    let refused = manager.promise("other", pledge(1, None)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
    assert_eq!(lock(&manager.starting).len(), all.len(), "what is held stays held");
    // Its overhead has grown by a little.
    manager.promise("again", pledge(65, None)).unwrap();
    // What nobody can be left without is not waited for.
    let promised = || lock(&manager.starting)["again"].promise.min;
    assert_eq!(promised(), Pages::ZERO);
    {
        let mut starting = lock(&manager.starting);
        starting.insert("big".into(), pledge(200, None));
        starting.insert("again".into(), pledge(64, Some(VmId(7))));
    }
    manager.promise("again", pledge(65, None)).unwrap();
    let capacity = capacity(Pages::from_mib(256), &manager.highest_thresholds());
    assert_eq!(promised(), capacity - Pages::from_mib(200));
    lock(&manager.starting).insert("big".into(), pledge(100, None));
    lock(&manager.starting).insert("again".into(), pledge(64, Some(VmId(7))));
    manager.promise("again", pledge(65, None)).unwrap();
    assert_eq!(promised(), Pages::from_mib(65));
    lock(&manager.starting).insert("big".into(), pledge(300, None));
    // Of who has its name alone nothing was promised yet.
    lock(&manager.starting).insert("attached".into(), pledge(0, None));
    let refused = manager.promise("attached", pledge(10, None)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
}

/// Nothing would keep it from what was promised to others.
#[tokio::test]
async fn a_vm_that_turns_out_not_to_be_pageable_is_promised_all_or_does_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let pledge = |mib| {
        let (min, overhead) = (Pages::from_mib(mib), Pages::from_mib(3));
        Pledge { promise: Promise { min, overhead, swap: Pages::ZERO }, pool: None, rebooted: None }
    };
    manager.promise("first", pledge(120)).unwrap();
    manager.promise("whole", pledge(10)).unwrap();
    let refused = manager.promise_all("whole", Pages::from_mib(128)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
    assert!(refused.to_string().contains("needs 131 MiB unreserved"), "{refused}");
    assert_eq!(lock(&manager.starting)["whole"].promise.min, Pages::from_mib(10));
    manager.promise_all("whole", Pages::from_mib(110)).unwrap();
    let refused = manager.promise("other", pledge(20)).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
}

/// Its guest may take it at any moment, and nothing but its balloon keeps it from that.
#[tokio::test]
async fn a_vm_that_is_not_paged_is_promised_all_that_its_balloon_does_not_hold() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let (size, min) = (Pages::from_mib(100), Pages::from_mib(10));
    let asked = crate::vm::Asked { min: Some(min), ..Default::default() };
    let params = VmParams::resolve(&[], "a", size.into(), asked).unwrap();
    let mut vm = Vm::of_tests("a", dir.path().join("a"), size, params.clone());
    let promised = |vm: &Vm| manager.promised_to(vm, &params).2;
    // Of one that somebody else started is known what it has.
    assert_eq!(promised(&vm), min);
    Arc::get_mut(&mut vm).unwrap().spec = Some(Default::default());
    assert_eq!(promised(&vm), size, "what is not known yet may be nothing");
    lock(&vm.balloon).held = Some((Pages::ZERO, Pages::ZERO));
    assert_eq!(promised(&vm), size);
    lock(&vm.balloon).held = Some((Pages::from_mib(40), Pages::ZERO));
    assert_eq!(promised(&vm), Pages::from_mib(60));
    // When it has rebooted its balloon is empty: that much it needs, to start.
    assert_eq!(all_of(&vm, &params), size);
    vm.uses.store(Pages::from_mib(70).0, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(promised(&vm), Pages::from_mib(70));
    lock(&vm.balloon).held = Some((size, Pages::ZERO));
    vm.uses.store(0, std::sync::atomic::Ordering::Relaxed);
    // What is booked for what it was promised is no promise.
    vm.external.store(size.0, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(promised(&vm), min);
    lock(&vm.balloon).held = None;
    let spec = ballast_api::VmSpec { no_balloon: true, ..Default::default() };
    Arc::get_mut(&mut vm).unwrap().spec = Some(spec);
    assert_eq!(promised(&vm), size);
    // Its pager is taken from it before what it had is given back.
    vm.set_run_state(RunState::Stopped);
    assert_eq!(promised(&vm), min);
}

#[tokio::test]
async fn swap_is_promised_once() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let most = Pages(manager.swap.room().0 / 2 + 1);
    let promise = Promise { min: Pages::ZERO, overhead: Pages::ZERO, swap: most };
    let pledge = || Pledge { promise, pool: None, rebooted: None };
    manager.promise("a", pledge()).unwrap();
    let refused = manager.promise("b", pledge()).unwrap_err();
    assert_eq!(refused.code, ErrorCode::NoRoom, "{refused}");
    // Its files are there: the room that is left is what is left of it.
    manager.swap_made("a");
    manager.promise("b", pledge()).unwrap();
    manager.promise_settled("b");
    manager.promise("c", pledge()).unwrap();
}

/// It is not there any more, and its name is to be had by nobody else.
#[tokio::test]
async fn what_is_held_for_a_reboot_counts_while_its_vm_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let min = Pages::from_mib(10);
    let asked = crate::vm::Asked { min: Some(min), ..Default::default() };
    let params = VmParams::resolve(&[], "a", Pages::from_mib(128).into(), asked).unwrap();
    let vm = Vm::of_tests("a", dir.path().join("a"), Pages::from_mib(128), params);
    manager.insert(vm.clone());
    let promised = || -> Vec<Pages> {
        let starting = lock(&manager.starting);
        manager.promises(&starting).into_iter().map(|(_, _, pages)| pages).collect()
    };
    // Once, as long as it has not ended.
    let promise = Promise { min: Pages::from_mib(128), overhead: Pages::ZERO, swap: Pages::ZERO };
    let pledge = || Pledge { promise, pool: None, rebooted: Some(vm.id) };
    manager.promise_held("a", pledge());
    assert_eq!(promised(), [min]);
    manager.promise_settled("a");
    // While it starts, what it is to start with: whether it may be paged is known later.
    lock(&manager.starting).insert("a".into(), Pledge { rebooted: None, ..pledge() });
    assert_eq!(promised(), [Pages::from_mib(128)]);
    manager.promise_settled("a");
    vm.set_run_state(RunState::Stopped);
    assert_eq!(promised(), [min]);
    // It was not paged, and had all that it may take.
    manager.promise_held("a", pledge());
    assert_eq!(promised(), [Pages::from_mib(128)]);
}

/// What its pool has of its own is there for it, however much is promised beside it.
#[tokio::test]
async fn a_vm_that_reboots_has_the_min_of_its_pool() {
    let dir = tempfile::tempdir().unwrap();
    let manager = manager(dir.path());
    let min = ballast_api::PoolChange {
        min: Some(Bytes::from_mib(100).0),
        ..ballast_api::PoolChange::default()
    };
    manager.change_pool("p", &min).unwrap();
    let pledge = |mib, pool: Option<&str>, rebooted| {
        let promise =
            Promise { min: Pages::from_mib(mib), overhead: Pages::ZERO, swap: Pages::ZERO };
        Pledge { promise, pool: pool.map(str::to_owned), rebooted }
    };
    // As after a min that was raised before a restart.
    lock(&manager.starting).insert("big".into(), pledge(200, None, None));
    manager.promise_held("again", pledge(150, Some("p"), Some(VmId(7))));
    manager.promise("again", pledge(150, Some("p"), None)).unwrap();
    assert_eq!(lock(&manager.starting)["again"].promise.min, Pages::from_mib(100));
}
