use super::*;

const HEAD: &str = "duration = \"10m\"\n[host]\nmemory = \"1G\"\n";
const VM: &str = "[[vm]]\nname = \"a\"\nsize = \"256M\"\nload = { kind = \"idle\" }\n";

fn parse(text: &str) -> Result<Scenario, String> {
    Scenario::parse(Path::new("x.toml"), text).map_err(|e| e.to_string())
}

#[test]
fn a_short_scenario_has_the_products_defaults() {
    let s = parse(&format!("{HEAD}{VM}")).unwrap();
    assert_eq!((s.name.as_str(), s.hosts, s.duration), ("x", 1, 600_000));
    assert_eq!(s.settings.sampling, SamplingConfig::default());
    assert_eq!(s.settings.balloon, BalloonConfig::default());
    assert_eq!(s.settings.policy, PolicyKind::IdleTax);
    let vm = &s.vms(1)[0];
    assert_eq!((vm.shares, vm.tax, vm.min), (2_560, TaxRate::default(), 0));
    assert_eq!(vm.driver, Driver::Follows);
    assert_eq!((s.settings.memory, vm.nature.size), (Pages::from_mib(1_024), 256 << 8));
}

#[test]
fn groups_are_numbered_and_staggered() {
    let text = format!("{HEAD}{VM}count = 3\nstart = \"5s\"\nstagger = \"2s\"\n")
        .replace("load = { kind = \"idle\" }\n", "");
    let s = parse(&format!("{text}load = {{ kind = \"idle\" }}\n")).unwrap();
    let vms: Vec<_> = s.vms(1).into_iter().map(|v| (v.name, v.start)).collect();
    assert_eq!(vms[0], ("a1".to_owned(), 5_000));
    assert_eq!(vms[2], ("a3".to_owned(), 9_000));
}

#[test]
fn mistakes_are_told_with_their_line_and_key() {
    let with = |vm: &str| format!("{HEAD}[[vm]]\nname = \"a\"\n{vm}");
    let load = |load: &str| with(&format!("size = \"256M\"\nload = {{ {load} }}\n"));
    let event = |event: &str| format!("{HEAD}{VM}[[event]]\n{event}");
    for (text, wanted) in [
        ("duration = 5\n".to_owned(), "line 1"),
        (HEAD.replace("10m", "10y"), "line 1: '10y' is no length"),
        (HEAD.replace("1G", "1M") + VM, "line 3: host.memory: below"),
        (HEAD.to_owned(), "vm: 0 VMs"),
        (format!("{HEAD}colour = 1\n{VM}"), "line 4: unknown field `colour`"),
        (format!("{VM}{HEAD}"), "line"),
        (with("size = \"0\"\nload = { kind = \"idle\" }\n"), "line 4: vm.size"),
        (with("size = \"1G\"\nload = { kind = \"lazy\" }\n"), "line 7"),
        (
            with("size = \"1G\"\nmin = \"50%\"\nmax = \"25%\"\nload = { kind = \"idle\" }\n"),
            "vm.min",
        ),
        (with("size = \"1G\"\nskew = 1.0\nload = { kind = \"idle\" }\n"), "vm.skew"),
        (with("size = \"1G\"\ntax = 1.0\nload = { kind = \"idle\" }\n"), "line 7: tax rate 1"),
        (format!("{HEAD}{VM}{VM}"), "line 8: vm.name: 'a' is there twice"),
        (load("kind = \"steady\""), "line 7: load.active: a load that is steady needs it"),
        (load("kind = \"idle\", low = \"1M\""), "line 7: load.low: means nothing"),
        (load("kind = \"diurnal\", low = \"9M\", high = \"1M\""), "load.low: 9 MiB is above"),
        (
            load("kind = \"bursty\", low = \"1M\", high = \"2M\", on = \"1ms\", off = \"1s\""),
            "load.on",
        ),
        (load("kind = \"leak\", from = \"100%\", per_hour = \"1M\""), "load.from"),
        (load("kind = \"recorded\", vm = \"a\""), "load.file"),
        (load("kind = \"recorded\", vm = \"a\", file = \"none.csv\""), "none.csv"),
        (event("at = \"1s\"\n"), "line 8: event: nothing changes"),
        (event("at = \"1s\"\ntax = 0.5\n"), "line 8: event.vm: which"),
        (event("at = \"1s\"\nvm = \"b*\"\ntax = 0.5\n"), "event.vm: no VM is called 'b*'"),
        (format!("{HEAD}[models]\nevict_page_us = 0\n{VM}"), "models.evict_page_us: 0 is not"),
        (format!("{HEAD}[models]\nevict = 1\n{VM}"), "line 5: unknown field `evict`"),
        (format!("{HEAD}[sampling]\nsamples = 0\n{VM}"), "line 4: sampling"),
        (format!("{HEAD}[sampling]\nsamples = 10001\n{VM}"), "line 4: sampling: samples: more"),
        (format!("{HEAD}[balloon]\nrate_mib_s = 0\n{VM}"), "line 4: balloon.rate: a rate of 0"),
        // Its pages overflow 64 bits.
        (
            format!("{HEAD}[balloon]\nrate_mib_s = 9223372036854775807\n{VM}"),
            "line 4: balloon.rate: above 16 TiB/s",
        ),
        (format!("{HEAD}[policy]\nkind = \"fair\"\n{VM}"), "line 5"),
        (format!("tick = \"1ms\"\n{HEAD}{VM}"), "line 1: tick"),
        (format!("calm = \"10ms\"\n{HEAD}{VM}"), "line 1: calm"),
        (format!("hosts = 0\n{HEAD}{VM}"), "line 1: hosts"),
    ] {
        let error = parse(&text).expect_err(&text);
        assert!(error.contains(wanted), "{text}\n{error}\nwanted: {wanted}");
        assert!(!error.contains('\n') && error.contains("x.toml") || error.contains("none.csv"));
    }
}

/// A VM of that name, with more keys.
fn named(name: &str, more: &str) -> String {
    format!("[[vm]]\nname = \"{name}\"\nsize = \"256M\"\n{more}load = {{ kind = \"idle\" }}\n")
}

#[test]
fn names_are_good_and_each_is_one_vms() {
    let long = "n".repeat(64);
    for (vms, wanted) in [
        (
            named("web1", "") + &named("web", "count = 2\n"),
            "line 8: vm.name: 'web1' is there twice",
        ),
        (named("a", "count = 11\n") + &named("a1", "count = 1\n"), "'a1' is there twice"),
        (named("a,b", ""), "line 4: vm.name: a VM's name is 1 to 64"),
        (named("a\\nb", ""), "line 4: vm.name: a VM's name"),
        (named("", "count = 2\n"), "line 4: vm.name: a VM's name"),
        (named(&long, "count = 2\n"), "n1': a VM's name"),
    ] {
        let error = parse(&format!("{HEAD}{vms}")).expect_err(&vms);
        assert!(error.contains(wanted) && !error.contains('\n'), "{vms}\n{error}");
    }
    let good =
        named("web1", "") + &named("web", "") + &named(&long, "") + &named("w", "count = 2\n");
    assert_eq!(parse(&format!("{HEAD}{good}")).unwrap().vms(1).len(), 5);
}

#[test]
fn a_speed_is_of_a_balloon_that_works_and_every_vm_is_there_for_some_time() {
    for (more, wanted) in [
        ("balloon = \"none\"\nballoon_mib_s = 5\n", "line 4: vm.balloon_mib_s: means nothing"),
        ("balloon = \"dead\"\nballoon_mib_s = 5\n", "line 4: vm.balloon_mib_s: means nothing"),
        ("start = \"1m\"\nstop = \"1m\"\n", "line 4: vm.stop: not after its start"),
        (
            "count = 3\nstagger = \"1m\"\nstop = \"2m\"\n",
            "line 4: vm.stop: not after the last one's start",
        ),
    ] {
        let error = parse(&format!("{HEAD}{}", named("a", more))).expect_err(more);
        assert!(error.contains(wanted), "{more}\n{error}");
    }
    for more in ["balloon_mib_s = 5\n", "count = 3\nstagger = \"1m\"\nstop = \"121s\"\n"] {
        parse(&format!("{HEAD}{}", named("a", more))).unwrap();
    }
}

#[test]
fn events_find_every_vm_of_a_large_group() {
    let vms = named("a", "count = 2000\n") + &named("b7", "");
    let parsed = |vm: &str| {
        parse(&format!("{HEAD}{vms}[[event]]\nat = \"1s\"\nvm = \"{vm}\"\ntax = 0.5\n")).is_ok()
    };
    for good in ["a1", "a1500", "a2000", "a15*", "a*", "*", "b7", "b*", "b7*"] {
        assert!(parsed(good), "{good}");
    }
    for bad in ["a", "a0", "a2001", "a01", "a+1", "a0*", "a2001*", "a1x", "a1x*", "b", "b71", "c*"]
    {
        assert!(!parsed(bad), "{bad}");
    }
}

#[test]
fn events_name_one_vm_or_the_beginning_of_names() {
    let event = |vm: &str| Event { at: 0, vm: vm.to_owned(), changes: vec![] };
    assert!(event("db1").names("db1") && !event("db1").names("db12"));
    assert!(event("db*").names("db12") && event("*").names("x") && !event("db*").names("web"));
}
