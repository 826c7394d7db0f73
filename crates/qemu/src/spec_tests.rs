use super::*;

/// A spec that passes, with a kernel file that lives as long as the folder.
fn valid() -> (VmSpec, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("vmlinuz");
    std::fs::write(&kernel, b"kernel").unwrap();
    (VmSpec { name: "db-1.a_b".into(), max: 64 << 20, kernel, ..VmSpec::default() }, dir)
}

fn message(change: impl FnOnce(&mut VmSpec)) -> String {
    let (mut spec, _dir) = valid();
    change(&mut spec);
    match check_spec(&spec) {
        Ok(()) => String::new(),
        Err(error) => error.to_string(),
    }
}

fn extra(args: &[&str]) -> String {
    message(|s| s.extra = args.iter().map(|a| (*a).to_owned()).collect())
}

#[test]
fn a_command_line_tells_of_devices_that_forbid_paging() {
    let named = |args: &[&str]| -> Vec<String> {
        named_devices(args).into_iter().map(|d| format!("{} {}", d.path, d.kind)).collect()
    };
    let json = r#"{"driver":"vhost-user-fs-pci","id":"fs0","chardev":"c"}"#;
    let objects = ["qemu", "-object", "cryptodev-vhost-user,id=c", "-object", "rng-random,id=r"];
    assert_eq!(named(&objects), ["-object cryptodev-vhost-user"]);
    assert_eq!(named(&["qemu", "-device", json]), ["-device vhost-user-fs-pci"]);
    assert_eq!(
        named(&["qemu", "--device", "vfio-pci,host=00:1f.0", "-netdev", "type=vhost-user,id=n"]),
        ["-device vfio-pci", "-netdev vhost-user"]
    );
    // What does not forbid it, and names that are no options.
    let harmless = ["qemu", "-device", "virtio-balloon-pci", "-netdev", "tap,id=n", "-name", "-S"];
    assert!(named(&harmless).is_empty());
    assert!(named(&["qemu", "-name", "vfio-pci", "-device"]).is_empty());
}

#[test]
fn a_good_spec_passes() {
    assert_eq!(message(|_| ()), "");
    assert_eq!(
        message(|s| {
            s.min = s.max;
            s.shares = Some(1);
            s.tax = Some(0.0);
            s.vcpus = Some(255);
            s.qemu = Some("qemu-from-path".into());
        }),
        ""
    );
}

#[test]
fn names_that_could_be_paths_or_options_are_refused() {
    for name in ["", ".", "..", "-m", "_a", "a/b", "a b", "a,b", "a\n", "ä", &"x".repeat(65)] {
        let message = message(|s| s.name = name.into());
        assert!(message.starts_with("name '"), "{name:?}: {message}");
        assert!(!message.contains('\n'), "one line: {message:?}");
    }
    assert_eq!(message(|s| s.name = "x".repeat(64)), "");
}

#[test]
fn sizes_out_of_range_are_refused_with_their_numbers() {
    assert!(message(|s| s.max = 0).contains("at least 16 MiB"));
    assert!(message(|s| s.max = 14 << 20).contains("14 MiB"));
    assert!(message(|s| s.max = (64 << 20) + 4096).contains("multiple of 2 MiB"));
    assert!(message(|s| s.max = u64::MAX).contains("multiple of 2 MiB"));
    assert!(message(|s| s.min = 66 << 20).contains("min 66 MiB is above max 64 MiB"));
}

#[test]
fn parameters_out_of_range_are_refused() {
    assert!(message(|s| s.shares = Some(0)).contains("shares"));
    for tax in [-0.1, 1.0, 2.0, f64::NAN, f64::INFINITY] {
        assert!(message(|s| s.tax = Some(tax)).contains("tax"), "{tax}");
    }
    for vcpus in [0, 256, u32::MAX] {
        assert!(message(|s| s.vcpus = Some(vcpus)).contains("vcpus"), "{vcpus}");
    }
}

#[test]
fn files_that_cannot_be_read_are_named() {
    assert!(message(|s| s.kernel = "/nonexistent/k".into()).contains("kernel /nonexistent/k"));
    assert!(message(|s| s.kernel = "/tmp".into()).contains("not a regular file"));
    assert!(message(|s| s.kernel = "".into()).contains("kernel"));
    assert!(
        message(|s| s.initrd = Some("/nonexistent/i".into())).contains("initrd /nonexistent/i")
    );
    assert!(message(|s| s.qemu = Some("/nonexistent/q".into())).contains("qemu /nonexistent/q"));
}

#[test]
fn command_lines_that_would_be_cut_are_refused() {
    assert!(message(|s| s.append = "x".repeat(2048)).contains("2047"));
    assert!(message(|s| s.append = "a\0b".into()).contains("zero byte"));
    assert_eq!(message(|s| s.append = "x".repeat(1900)), "");
}

#[test]
fn arguments_that_break_paging_are_refused_by_name() {
    for args in [
        &["-m", "1G"][..],
        &["--m", "1G"],
        &["-mem-path", "/dev/shm"],
        &["-mem-prealloc"],
        &["-machine", "pc"],
        &["-incoming", "defer"],
        &["-daemonize"],
        &["-chroot", "/srv"],
        &["-runas", "nobody"],
        &["-run-with", "user=nobody"],
        &["-run-with", "async-teardown=on, user=nobody"],
        &["-run-with", "chroot=/srv"],
        &["--run-with", "user=nobody,chroot=/srv"],
        &["-readconfig", "f"],
        &["-object", "memory-backend-memfd,id=x,size=1G,hugetlb=on"],
        &["-object", "memory-backend-ram,id=x,size=1G"],
        &["-object", "qom-type=memory-backend-file,id=x"],
        &["-object", r#"{"qom-type":"memory-backend-file","id":"x"}"#],
        &["-object", "sev-guest,id=sev0,cbitpos=51,reduced-phys-bits=1"],
        &["-object", "qom-type=sev-snp-guest,id=sev0"],
        &["-object", r#"{"qom-type":"tdx-guest","id":"tdx0"}"#],
        &["-device", "vfio-pci,host=00:01.0"],
        &["-device", "driver=vfio-pci,host=00:01.0"],
        &["-device", r#"{"driver":"vfio-pci","host":"00:01.0"}"#],
        &["-blockdev", "nvme,node-name=d,device=0000:01:00.0,namespace=1"],
        &[
            "-blockdev",
            r#"{"driver":"nvme","node-name":"d","device":"0000:01:00.0","namespace":1}"#,
        ],
        &["-device", "vhost-user-fs-pci,chardev=c,tag=t"],
        &["-device", "vhost-user-blk-pci,chardev=c"],
        &["-device", "pc-dimm,memdev=x"],
        &["-netdev", "vhost-user,id=n,chardev=c"],
        &["-object", "cryptodev-vhost-user,id=c,chardev=c"],
        &["-netdev", "type=vhost-vdpa,id=n"],
        &["-overcommit", "mem-lock=on"],
        &["-overcommit", "mem-lock=on-fault"],
        &["-overcommit", "cpu-pm=on,mem-lock=on"],
        &["-set", "object.mem.share=off"],
        &["-set", "object.hotmem.share=off"],
        &["-S", "-no-shutdown"],
    ] {
        let message = extra(args);
        assert!(message.contains("is refused"), "{args:?}: '{message}'");
        let named = args.iter().any(|a| a.starts_with('-') && message.contains(*a));
        assert!(named, "{args:?}: '{message}'");
    }
    assert!(extra(&["-name", "a\0b"]).contains("zero byte"));
}

#[test]
fn harmless_arguments_pass() {
    for args in [
        &["-S"][..],
        &["-device", "virtio-blk-pci,drive=d"],
        &["-device", "nvme,drive=d,serial=1"],
        &["-drive", "file=/x,id=d,if=none"],
        &["-netdev", "user,id=n"],
        &["-netdev", "tap,id=n,vhost=on"],
        &["-overcommit", "mem-lock=off"],
        &["-run-with", "async-teardown=on"],
        &["-object", "secret,id=sev-guest,data=x"],
        &["-object", "rng-random,id=r,filename=/dev/urandom"],
        &["-object", "{not json"],
        &["-device"],
        &["-", "--", ""],
    ] {
        assert_eq!(extra(args), "", "{args:?}");
    }
}
