use ballast_shim_proto::{ONE_PART, Part, VmName};
use ballast_units::HostAddr;

use super::*;

#[tokio::test]
async fn a_start_that_lacks_swap_waits_for_the_next_look_and_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let pledge = |swap| {
        let promise = Promise { min: Pages::ZERO, overhead: Pages::ZERO, swap };
        Pledge { promise, pool: None, rebooted: None }
    };
    let room = manager.swap.room();
    manager.promise("ends", pledge(Pages(room.0 - room.0 / 4))).unwrap();
    let (waits, most) = (manager.clone(), Pages(room.0 / 2));
    let waits = tokio::spawn(async move { waits.claim_name("waits", pledge(most)).await });
    tokio::task::yield_now().await;
    assert!(manager.claim_name("needs none", pledge(Pages::ZERO)).await.is_ok());
    assert!(!waits.is_finished());
    manager.promise_settled("ends");
    assert!(waits.await.unwrap().is_ok());
}

/// It may be tried once more.
#[tokio::test]
async fn a_start_after_a_reboot_that_fails_gives_back_what_it_took_and_keeps_its_promise() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let config = manager.config();
    manager.set_config(crate::config::Config { books_vmms: true, ..(*config).clone() });
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, "no kernel").unwrap();
    let spec = VmSpec {
        name: "a".into(),
        max: VmSpec::LEAST_SIZE.0,
        kernel,
        accel: Accel::Tcg,
        large_pages: Some(false),
        qemu: Some("/bin/false".into()),
        ..VmSpec::default()
    };
    assert!(manager.expected_vmm(&spec) > Pages::ZERO);
    // More than the min of its spec: one that could not be paged.
    let (min, again) = (Pages::from_mib(8), Some(VmId(7)));
    let promise = Promise { min, overhead: Pages::ZERO, swap: Pages::ZERO };
    manager.promise_held("a", Pledge { promise, pool: None, rebooted: again });
    let used = manager.host.ledger.used();
    let failed = manager.run(spec, again).await.err().unwrap();
    // It was given its room.
    assert!(failed.message.contains("before it had mapped its RAM"), "{failed}");
    assert_eq!(manager.host.ledger.used(), used);
    let held = lock(&manager.starting)["a"].clone();
    assert_eq!((held.rebooted, held.promise.min), (again, min));
    assert!(held.promise.overhead >= manager.expected_vmm(&VmSpec::default()));
}

/// Each of its folders would be memory of the host.
#[tokio::test]
async fn nothing_is_left_of_a_newcomer_for_whom_there_is_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let manager = crate::manager::tests::manager(dir.path());
    let ledger = &manager.host.ledger;
    ledger.adopt(ledger.free());
    let used = ledger.used();
    let pid = std::process::id();
    let part = Part { addr: HostAddr(1 << 30), len: Bytes(4 << 20), file_offset: 0 };
    let (vm, parts) = (VmName::new("newcomer").unwrap(), vec![part]);
    let hello = Hello { version: ONE_PART, reconnect: false, vm, pid, parts, page_size: 4096 };
    let (taking, long_ago) = (manager.clone(), Instant::now() - ANSWER);
    let adopted = move || taking.adopt(&hello, Peer { pid, uid: 0, gid: 0 }, long_ago);
    let refused = tokio::task::spawn_blocking(adopted).await.unwrap();
    assert!(refused.is_err());
    assert!(!manager.folder_of("newcomer").exists());
    assert!(lock(&manager.starting).is_empty() && lock(&manager.adopting).is_empty());
    assert_eq!(manager.host.ledger.used(), used);
}
