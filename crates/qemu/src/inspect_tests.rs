use super::*;

fn device(kind: &str) -> Device {
    Device { path: format!("/machine/peripheral/{kind}"), kind: kind.into() }
}

fn memdev(id: &str, share: Option<bool>) -> Memdev {
    Memdev { id: Some(id.into()), size: 64 << 20, share }
}

/// A VMM against which nothing speaks.
fn good() -> Facts {
    Facts {
        devices: vec![device("virtio-balloon-pci"), device("virtio-blk-pci")],
        memdevs: Some(vec![memdev("mem", Some(true))]),
        ram_blocks: vec![RamBlock {
            name: "mem".into(),
            page_size: Bytes(4096),
            used: Bytes::from_mib(64),
        }],
        locked: Bytes(32 << 10),
        ram: Some(MappedRam { shared: true, file: true, page_size: PAGE, as_announced: true }),
        ..Facts::default()
    }
}

fn ram(change: impl FnOnce(&mut MappedRam)) -> Facts {
    let mut facts = good();
    change(facts.ram.as_mut().unwrap());
    facts
}

fn with_device(kind: &str) -> Facts {
    let mut facts = good();
    facts.devices.push(device(kind));
    facts
}

#[track_caller]
fn balloon_only(facts: Facts, part: &str) {
    match decide(&facts) {
        Verdict::BalloonOnly(reason) => {
            assert!(reason.contains(part), "{reason}");
            assert!(!reason.contains('\n'));
        }
        other => panic!("{other:?}"),
    }
    let without = Facts {
        devices: facts.devices.iter().filter(|d| !d.is_balloon()).cloned().collect(),
        ..facts
    };
    if without.memdevs.is_none() {
        // Nobody told of one.
        return unseen(without, part);
    }
    unmanaged(without, "no balloon");
}

#[track_caller]
fn unseen(facts: Facts, part: &str) {
    match decide(&facts) {
        Verdict::BalloonUnseen(reason) => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn unmanaged(facts: Facts, part: &str) {
    match decide(&facts) {
        Verdict::Unmanaged(reason) => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_shared_memfd_is_pageable_with_and_without_balloon() {
    assert_eq!(decide(&good()), Verdict::Pageable);
    assert_eq!(decide(&Facts { devices: vec![], ..good() }), Verdict::Pageable);
    let unsaid = Facts { memdevs: Some(vec![memdev("mem", None)]), ..good() };
    assert_eq!(decide(&unsaid), Verdict::Pageable);
}

#[test]
fn a_second_memory_is_paged_if_it_is_ballasts_own_and_was_announced() {
    let own = || Device { path: spec::HOTPLUG_PATH.into(), kind: "virtio-mem-pci".into() };
    let two = || {
        let memdevs = vec![memdev("mem", Some(true)), memdev("hotmem", Some(true))];
        let mut facts = Facts { announced: 2, memdevs: Some(memdevs), ..good() };
        facts.devices.push(own());
        facts
    };
    assert_eq!(decide(&two()), Verdict::Pageable);
    balloon_only(Facts { announced: 1, ..two() }, "2 memory backends, and Ballast pages one");
    let mut third = two();
    third.memdevs.as_mut().unwrap().push(memdev("more", Some(true)));
    balloon_only(third, "3 memory backends, and Ballast pages 2");
    for device in [
        Device { path: "/machine/peripheral/other".into(), ..own() },
        Device { path: format!("{} (of another memory)", spec::HOTPLUG_PATH), ..own() },
        Device { kind: "pc-dimm".into(), ..own() },
    ] {
        let mut facts = two();
        facts.devices.push(device);
        balloon_only(facts, "adds guest memory");
    }
    // Without QMP, by what its command line says.
    let line = |args: &[&str]| Facts {
        commanded: spec::named_devices(args),
        memdevs: None,
        devices: Vec::new(),
        ..two()
    };
    let device = "virtio-mem-pci,id=hotplug,memdev=hotmem,block-size=2M,requested-size=0";
    assert_eq!(decide(&line(&["-device", device])), Verdict::Pageable);
    let one = Facts { announced: 1, ..line(&["-device", device]) };
    unseen(one, "adds guest memory");
    unseen(line(&["-device", "virtio-mem-pci,id=hotplug,memdev=x"]), "adds guest memory");
}

#[test]
fn what_pins_memory_leaves_nothing_to_manage() {
    unmanaged(with_device("vfio-pci"), "vfio-pci");
    unmanaged(with_device("vfio-pci-nohotplug"), "pins guest memory");
    unmanaged(with_device("vhost-vdpa-device-pci"), "pins guest memory");
    unmanaged(Facts { pinning_files: vec!["/dev/vfio/12".into()], ..good() }, "/dev/vfio/12");
    unmanaged(Facts { locked: Bytes::from_mib(64), ..good() }, "64 MiB of its memory is locked");
    unmanaged(ram(|r| r.page_size = Bytes::from_mib(2)), "hugetlb RAM (2 MiB pages)");
    let mut facts = good();
    facts.ram_blocks[0].page_size = Bytes(1 << 30);
    unmanaged(facts, "hugetlb RAM (1 GiB pages)");
}

#[test]
fn what_must_not_be_paged_may_be_ballooned() {
    balloon_only(ram(|r| r.shared = false), "share=on");
    balloon_only(ram(|r| r.file = false), "memory-backend-memfd");
    balloon_only(ram(|r| r.as_announced = false), "announced");
    balloon_only(Facts { ram: None, ..good() }, "not found");
    let private = Facts { memdevs: Some(vec![memdev("pc.ram", Some(false))]), ..good() };
    balloon_only(private, "private RAM (memory backend pc.ram)");
    let two = vec![memdev("a", Some(true)), memdev("b", Some(true))];
    balloon_only(Facts { memdevs: Some(two), ..good() }, "2 memory backends");
    balloon_only(with_device("vhost-user-fs-pci"), "second process");
    balloon_only(with_device("virtio-mem-pci"), "did not supply");
}

#[test]
fn a_process_that_maps_is_named_before_one_that_merely_holds() {
    let holder = |pid, maps| Holder { pid, comm: "virtiofsd".into(), maps };
    let held = Facts { holders: vec![holder(7, false)], ..good() };
    balloon_only(held, "process 7 (virtiofsd) holds its RAM file open");
    let mapped = Facts { holders: vec![holder(7, false), holder(8, true)], ..good() };
    balloon_only(mapped, "process 8 (virtiofsd) maps its RAM too");
}

#[test]
fn files_that_pin_are_told_from_others() {
    for name in [
        "/dev/vfio/vfio",
        "/dev/vfio/12",
        "/dev/vhost-vdpa-0",
        "anon_inode:[vfio-device]",
        "/dev/iommu",
        "/dev/sev",
        "anon_inode:[kvm-gmem]",
    ] {
        assert!(scan::pins(name), "{name}");
    }
    for name in ["", "/dev/kvm", "/dev/vhost-net", "anon_inode:[eventfd]", "/tmp/dev/vfio/1"] {
        assert!(!scan::pins(name), "{name}");
    }
    for name in ["/dev/sev-guest", "/tmp/dev/sev", "anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"] {
        assert!(!scan::pins(name), "{name}");
    }
}

#[test]
fn a_confidential_guest_is_not_managed_and_the_reason_says_so() {
    for file in ["/dev/sev", "anon_inode:[kvm-gmem]"] {
        let facts = Facts { pinning_files: vec![file.into()], ..good() };
        unmanaged(facts, &format!("{file} is open, so the guest is a confidential one"));
    }
}

#[test]
fn an_inspection_that_fails_finds_nothing_but_what_is_gone_or_forbidden() {
    for errno in [Errno::SRCH, Errno::NOENT, Errno::ACCESS, Errno::PERM] {
        let verdict = failed(7, &errno.into());
        assert!(
            matches!(&verdict, Verdict::Unmanaged(why) if why.contains("process 7")),
            "{errno}"
        );
    }
    let late = io::Error::from(io::ErrorKind::TimedOut);
    let lacks = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::INTR, Errno::IO];
    for error in lacks.map(io::Error::from).into_iter().chain([late]) {
        let verdict = failed(7, &error);
        assert!(matches!(&verdict, Verdict::Unknown(why) if why.contains("process 7")), "{error}");
    }
}

#[test]
fn transfers_past_the_pager_forbid_paging() {
    let facts = Facts { direct_files: vec!["/images/db.qcow2".into()], ..good() };
    balloon_only(facts, "/images/db.qcow2 is open with O_DIRECT");
    let facts = Facts { unbuffered_files: vec!["/far/a (fuse.sshfs)".into()], ..good() };
    balloon_only(facts, "/far/a (fuse.sshfs) is open, on a file system that may");
    balloon_only(with_device("scsi-generic"), "passes SCSI commands through");
    balloon_only(with_device("scsi-block"), "passes SCSI commands through");
    balloon_only(with_device("vhost-scsi-pci"), "passes SCSI commands through");
    balloon_only(with_device("virtio-blk-pci,scsi=on"), "passes SCSI commands through");
    for args in [
        ["-device", "virtio-blk-pci,drive=a,scsi=on"],
        ["-device", "{\"driver\": \"virtio-blk-pci\", \"scsi\": true}"],
        ["-global", "virtio-blk-pci.scsi=on"],
        ["-global", "driver=virtio-blk-pci,property=scsi,value=on"],
        ["-set", "device.d0.scsi=on"],
    ] {
        let commanded = spec::named_devices(&args);
        let facts = Facts { commanded, memdevs: None, ..good() };
        balloon_only(facts, "passes SCSI commands through");
    }
    for args in [
        ["-device", "virtio-blk-pci,drive=scsi,scsi=off"],
        ["-device", "virtio-net-pci,scsi=on"],
        ["-device", "{\"driver\": \"virtio-blk-pci\", \"scsi\": false}"],
        ["-global", "driver=virtio-blk-pci,property=scsi,value=off"],
        ["-drive", "file=scsi.on,if=virtio"],
        ["-set", "device.scsi.num_queues=4"],
    ] {
        assert!(spec::named_devices(&args).is_empty(), "{args:?}");
    }
    let facts = Facts { passing_files: vec!["/dev/sg3".into()], ..good() };
    balloon_only(facts, "/dev/sg3 is open");
}

#[test]
fn files_that_commands_are_passed_through_are_told_from_others() {
    for name in ["/dev/sg0", "/dev/sg12", "/dev/bsg/0:0:0:0", "/dev/ng0n1", "/dev/vhost-scsi"] {
        assert!(scan::passes(name), "{name}");
    }
    for name in ["/dev/sgx_enclave", "/dev/sda", "/dev/nvme0n1", "/dev/vhost-net", "/tmp/dev/sg0"] {
        assert!(!scan::passes(name), "{name}");
    }
}

#[test]
fn the_command_line_tells_of_devices_where_qmp_does_not() {
    let text = "qemu-system-x86_64\0-device\0scsi-block,drive=a,id=b\0-name\0-device\0--device\0\
        {\"driver\":\"vfio-pci\",\"host\":\"0\"}\0-device";
    let commanded = scan::commanded(text);
    let kinds: Vec<&str> = commanded.iter().map(|d| d.kind.as_str()).collect();
    assert_eq!(kinds, ["scsi-block", "vfio-pci"]);
    let of = |kind: &str| {
        let device = Device { path: "of its command line".into(), kind: kind.into() };
        Facts { devices: Vec::new(), memdevs: None, commanded: vec![device], ..good() }
    };
    unseen(of("scsi-block"), "passes SCSI commands through");
    unmanaged(of("vfio-pci"), "pins guest memory");
    unseen(of("vhost-user-fs-pci"), "second process");
    assert_eq!(decide(&of("virtio-blk-pci")), Verdict::Pageable);
    // So is its balloon: it goes on being asked what is found out of QMP's reach.
    let mut with_balloon = of("scsi-block");
    with_balloon.commanded.push(device("virtio-balloon-pci"));
    assert!(matches!(decide(&with_balloon), Verdict::BalloonOnly(why) if why.contains("SCSI")));
    // It was unplugged since: QMP knows.
    let facts = Facts { memdevs: good().memdevs, devices: good().devices, ..of("scsi-block") };
    assert_eq!(decide(&facts), Verdict::Pageable);
}

#[test]
fn what_qmp_has_told_is_told_from_what_is_seen_without() {
    let plugged = |facts: Facts| {
        let devices = facts.devices.iter().cloned().chain([device("scsi-block")]).collect();
        Facts { devices, ..facts }
    };
    let told = |facts: &Facts| Inspection::of(facts).told;
    assert_eq!(told(&good()), None);
    let looked = Inspection::of(&plugged(good()));
    assert_eq!(looked.told, Some(looked.verdict));
    // A process that is gone soon, and a file that is closed: the next look sees that by itself. The device stays.
    let holder = Holder { pid: 7, comm: "gdb".into(), maps: false };
    let (holders, direct_files) = (vec![holder], vec!["/disk".to_owned()]);
    let held = Facts { holders, direct_files, ram: None, ..good() };
    assert_ne!(decide(&held), Verdict::Pageable);
    assert_eq!(told(&held), None);
    assert_eq!(told(&plugged(held)), told(&plugged(good())));
}

/// QMP lists devices, not what is behind them: its process may be away at the moment of a look.
#[test]
fn a_backend_that_is_a_second_process_counts_though_qmp_does_not_list_it() {
    let named = |args: &[&str]| Facts { commanded: spec::named_devices(args), ..good() };
    for (option, value) in [
        ("-netdev", "vhost-user,id=n,chardev=c"),
        ("-object", "cryptodev-vhost-user,id=c,chardev=c"),
        ("-netdev", r#"{"type":"vhost-user","id":"n"}"#),
        ("-blockdev", "driver=virtio-blk-vhost-user,node-name=d,path=/s"),
        ("-blockdev", r#"{"driver":"virtio-blk-vhost-user"}"#),
    ] {
        balloon_only(named(&[option, value]), "shares guest memory with a second process");
    }
    unmanaged(named(&["-blockdev", "driver=virtio-blk-vhost-vdpa,path=/d"]), "pins guest memory");
    // What QMP does list is there no more once it does not.
    assert_eq!(decide(&named(&["-device", "vhost-user-fs-pci,chardev=c"])), Verdict::Pageable);
    assert_eq!(
        decide(&named(&["-netdev", "tap,id=n", "-blockdev", "driver=file"])),
        Verdict::Pageable
    );
}

#[test]
fn all_that_a_look_finds_is_a_fact_beside_what_qmp_has_told() {
    let file = |name: &str| vec![name.to_owned()];
    let holder = Holder { pid: 7, comm: "backend".into(), maps: true };
    let found = scan::Found {
        commanded: vec![device("vfio-pci")],
        open: descriptors::Open {
            passing: file("/dev/sg0"),
            pinning: file("/dev/vfio/vfio"),
            direct: file("/direct"),
            unbuffered: file("/unbuffered (fuse)"),
        },
        locked: Bytes::from_mib(3),
        ram: None,
        holders: vec![holder.clone()],
    };
    let facts = Facts {
        commanded: vec![device("vfio-pci")],
        passing_files: file("/dev/sg0"),
        pinning_files: file("/dev/vfio/vfio"),
        direct_files: file("/direct"),
        unbuffered_files: file("/unbuffered (fuse)"),
        locked: Bytes::from_mib(3),
        ram: None,
        holders: vec![holder],
        ..good()
    };
    assert_eq!(good().with(found), facts);
}

#[test]
fn who_maps_the_ram_is_told_beside_what_else_there_is() {
    let holder = |maps| Holder { pid: 7, comm: "backend".into(), maps };
    let of = |holders| Inspection::of(&Facts { holders, ..good() });
    assert_eq!(of(vec![]).mapped, None);
    assert_eq!(of(vec![holder(false)]).mapped, None, "it could, and does not");
    let found = of(vec![holder(false), holder(true)]);
    let reason = found.mapped.as_ref().unwrap();
    assert!(reason.contains("process 7 (backend) maps"), "{reason}");
    assert_eq!(found.told, None);
    // Whatever else is found in this look.
    let direct = Facts { holders: vec![holder(true)], direct_files: vec!["/d".into()], ..good() };
    assert_eq!(Inspection::of(&direct).mapped.as_ref(), Some(reason));
}
