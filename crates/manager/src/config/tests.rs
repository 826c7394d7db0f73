use super::budget::MIN_BUDGET;
use super::*;

fn check(text: &str) -> Result<Config, ConfigError> {
    let shim = std::env::current_exe().ok();
    let over = Overrides { shim, ..Overrides::default() };
    Config::read(
        Path::new("ballast.toml"),
        text,
        over,
        HostMemory { all: Bytes::from_mib(16 << 10), ..HOST },
    )
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = check("").unwrap();
    assert_eq!(config.budget, Bytes((16384 << 20) - (16384 << 20) / 5).pages());
    assert_eq!(config.tax, TaxRate::new(0.75).unwrap());
    assert_eq!(config.sampling, SamplingConfig::default());
    assert_eq!(config.socket, Path::new("/run/ballast/api.sock"));
    assert_eq!(config.sharing, SharingSettings::default());
    assert!(config.sharing.enabled);
}

#[test]
fn sharing_is_read_in_full() {
    let text = "[sharing]\nenabled = false\norder = \"written\"\nrate_mib_s = 64\n\
                vm_rate_mib_s = 16\ncpu_percent = 2.5\nscan_time_s = 1800\n\
                rehome_after_ms = 500\n";
    let expected = SharingSettings {
        enabled: false,
        order: ScanOrder::Written,
        rate: Pages::from_mib(64),
        vm_rate: Pages::from_mib(16),
        cpu_percent: 2.5,
        scan_time: Duration::from_secs(1800),
        rehome_after: Duration::from_millis(500),
    };
    assert_eq!(check(text).unwrap().sharing, expected);
}

#[test]
fn the_other_tables_are_read_in_full() {
    let config = check(
        "thresholds = \"sliding\"\n[policy]\nkind = \"pressure\"\n\
         [sampling]\nsamples = 200\nperiod_s = 45\nslow_gain = 0.25\nfast_gain = 0.75\n\
         [admission]\nwait_s = 90\nvmm_memory = \"budget\"\n[adopt]\nmax = \"3G\"\n\
         [[vm]]\nname = \"db-*\"\nguest_agent = true\n",
    )
    .unwrap();
    assert_eq!((config.scale, config.policy), (Scale::Sliding, PolicyKind::Pressure));
    let sampling = SamplingConfig {
        samples: 200,
        period: Duration::from_secs(45),
        slow_gain: 0.25,
        fast_gain: 0.75,
    };
    assert_eq!(config.sampling, sampling);
    assert_eq!((config.start_wait, config.books_vmms), (Duration::from_secs(90), true));
    assert_eq!(config.adopt_max, Some(Bytes::from_mib(3072)));
    assert_eq!(rules::rule_for(&config.vms, "db-7").guest_agent, Some(true));
    assert_eq!(rules::rule_for(&config.vms, "web").guest_agent, None);
}

#[test]
fn how_memory_is_taken_is_read_in_full() {
    let config = check(
        "[balloon]\nrate_mib_s = 64\ndeflate_rate_mib_s = 96\nmax_fraction = 0.5\n\
         patience_s = 20\nguest_reserve = \"32M\"\n\
         [tools]\norder = \"balloon-first\"\ntcg_read_us = 700\nkvm_read_us = 30\n\
         refault_us = 25\n\
         [pager]\nfault_around = \"32K\"\nlarge_pages_from = \"2G\"\nwakeful = false\n",
    )
    .unwrap();
    let balloon = BalloonConfig {
        rate: Pages::from_mib(64),
        deflate_rate: Pages::from_mib(96),
        max_fraction: 0.5,
        patience: Duration::from_secs(20),
        guest_reserve: Pages::from_mib(32),
        ..BalloonConfig::default()
    };
    assert_eq!(config.balloon, balloon);
    let tools = ToolSettings {
        order: ballast_policy::ToolOrder::BalloonFirst,
        tcg_read: Duration::from_micros(700),
        kvm_read: Duration::from_micros(30),
        refault: Duration::from_micros(25),
    };
    assert_eq!(config.tools, tools);
    assert_eq!((config.fault_around, config.wakeful), (Pages(8), false));
    assert_eq!(config.large_pages_from, Some(Pages::from_mib(2048)));
    let never = check("[pager]\nlarge_pages_from = \"never\"\n").unwrap();
    assert_eq!(never.large_pages_from, None);
}

#[test]
fn compression_is_read_in_full() {
    assert_eq!(check("").unwrap().compression, Compression::default());
    let text = "[compression]\nalgorithm = \"zstd\"\ncache_percent = 25\nadaptive = false\n";
    let expected = Compression {
        algorithm: Some(Algorithm::Zstd),
        percent: 25,
        adaptive: false,
        ..Compression::default()
    };
    assert_eq!(check(text).unwrap().compression, expected);
    let off = check("[compression]\nenabled = false\n").unwrap().compression;
    assert_eq!(off, Compression::OFF);
}

#[test]
fn vms_and_pools_are_read_in_full() {
    let config = check(
        "[defaults]\nshares = 100\n[[vm]]\nname = \"db-*\"\npool = \"prod/db\"\nmin = \"50%\"\n\
         max = \"2G\"\ntax = 0.25\n[pool.prod]\nmin = \"4G\"\nmax = \"8G\"\nshares = 7\n\
         [pool.\"prod/db\"]\nexpandable = false\nmin = \"1G\"\ntax = 0.5\n",
    )
    .unwrap();
    let rule = rules::rule_for(&config.vms, "db-7");
    assert_eq!((rule.shares, rule.tax), (Some(100), Some(0.25)));
    assert_eq!(rule.pool.as_deref(), Some("prod/db"));
    assert_eq!(rule.min.map(|m| m.of(Pages(100))), Some(Pages(50)));
    assert_eq!(rule.max.map(|m| m.of(Pages(100))), Some(Pages::from_mib(2048)));
    assert_eq!(rules::rule_for(&config.vms, "web").pool, None);
    let [prod, db] = &config.pools[..] else { panic!("{:?}", config.pools) };
    assert_eq!((prod.min, prod.max), (Pages::from_mib(4096), Some(Pages::from_mib(8192))));
    assert_eq!((prod.shares, prod.expandable, prod.tax), (7, true, None));
    assert_eq!((db.parent(), db.expandable), (Some("prod"), false));
    assert_eq!(db.tax.map(TaxRate::get), Some(0.5));
}

#[test]
fn the_journal_is_kept_unless_it_is_not_wanted() {
    let default = check("").unwrap().journal.unwrap();
    assert_eq!(
        (default.folder.to_str(), default.limit),
        (Some("/var/lib/ballast/journal"), 64 << 20)
    );
    let elsewhere = check("run_dir = \"/a\"\n").unwrap().journal.unwrap();
    assert_eq!(elsewhere.folder, Path::new("/a/journal"));
    let own = check("[journal]\nfolder = \"/b\"\nlimit = \"2M\"\n").unwrap().journal.unwrap();
    assert_eq!((own.folder.to_str(), own.limit), (Some("/b"), 2 << 20));
    assert_eq!(check("[journal]\nenabled = false\n").unwrap().journal, None);
}

#[test]
fn swap_locations_are_in_order_of_priority() {
    let config = check(
        "[[swap.location]]\npath = \"/disk\"\n[[swap.location]]\npath = \"/ssd\"\n\
         priority = 10\n[[swap.location]]\npath = \"/slow\"\npriority = -1\n",
    )
    .unwrap();
    let places: Vec<_> =
        config.swap.iter().map(|l| (l.path.to_str().unwrap(), l.priority)).collect();
    assert_eq!(places, [("/ssd", 10), ("/disk", 0), ("/slow", -1)]);
    assert_eq!(config.swap_dir, None);
    let lone = check("swap_dir = \"/only\"\n").unwrap();
    assert_eq!(lone.swap_dir.as_deref(), Some(Path::new("/only")));
    assert_eq!(lone.swap, [SwapLocation { path: "/only".into(), priority: 0 }]);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table of mistakes and what is said of each")]
fn mistakes_are_refused_as_a_whole_and_name_their_line_or_key() {
    for (text, wanted) in [
        ("budget = \"1G\"\nshares = 4\n", "line 2"),
        ("budget = \"1G\"\n\n[sampling]\nsamples = \"many\"\n", "line 4"),
        ("budget = \n", "line 1"),
        (
            "budget = 12884901888\n",
            "line 1: budget: invalid type: integer `12884901888`, expected a string (in quotes)",
        ),
        ("budget = \"12Q\"\n", "budget: '12Q' is not a size"),
        ("budget = \"1M\"\n", "budget: 1 MiB is below"),
        ("budget = \"64G\"\n", "more than the host's memory"),
        ("budget = \"1G\"\nreserve = \"1G\"\n", "reserve: give either"),
        ("tax = 1.0\n", "tax"),
        ("[sampling]\nperiod_s = 0\n", "ballast.toml, line 2: sampling.period_s"),
        ("[admission]\nwait_s = 0\n", "line 2: admission.wait_s"),
        ("[admission]\nvmm_memory = \"none\"\n", "line 2"),
        (
            "[vm]\nname = \"a\"\n",
            "line 1: vm: invalid type: map, expected a sequence (write [[vm]])",
        ),
        ("[[vm]]\nname = \"a\"\nmin = 1\n", "line 3: vm[0].min: invalid type"),
        ("[[vm]]\nshares = 4\n", "line 1: vm[0]: without a name"),
        ("[[vm]]\nname = \"a b\"\n", "line 2: vm[0].name: 'a b' is not"),
        ("[[vm]]\nname = \"a\"\n\n[[vm]]\nname = \"b\"\nshares = 0\n", "line 6: vm[1].shares"),
        ("[[vm]]\nname = \"a\"\nmin = \"120%\"\n", "line 3: vm[0].min: '120%' is not"),
        ("[[vm]]\nname = \"a\"\nmin = \"2G\"\nmax = \"1G\"\n", "line 3: vm[0].min: above max"),
        ("[[vm]]\nname = \"a\"\npool = \"x\"\n", "line 3: vm[0].pool: no pool 'x'"),
        ("[[vm]]\nname = \"a\"\nsize = 3\n", "line 3"),
        ("[defaults]\ntax = 1.5\n", "line 2: defaults.tax"),
        ("[defaults]\nname = \"x\"\n", "line 2: defaults.name"),
        ("[pool.\"a/b\"]\n", "line 1: pool.\"a/b\": the pool 'a' that it is in"),
        ("[pool.a]\nmin = \"2G\"\nmax = \"1G\"\n", "line 3: pool.a.max: 1 GiB is below min"),
        ("[pool.\"a//b\"]\n", "is not a name"),
        ("[pool.a]\nexpandable = 1\n", "line 2"),
        ("[pool.a]\nmin = \"99G\"\n", "line 1: pool: its pools' mins do not fit"),
        (
            "[pool.a]\nmin = \"1G\"\nexpandable = false\n[pool.\"a/b\"]\nmin = \"2G\"\n",
            "line 2: pool.a.min: its pools' mins do not fit: needs 2 GiB unreserved, pool a has \
             1 GiB left of its min",
        ),
        ("[sampling]\n\nsamples = 0\n", "ballast.toml, line 3: sampling.samples"),
        ("[sampling]\nfast_gain = 2.0\n", "ballast.toml, line 2: sampling.fast_gain"),
        ("[sampling]\nfast_gain = 0.5\nslow_gain = 0.6\n", "line 3: sampling.slow_gain"),
        ("\nreserve = \"900T\"\n", "ballast.toml, line 2: reserve: of the host's"),
        ("[balloon]\nmax_fraction = 2.0\n", "balloon.max_fraction"),
        ("shim_group = \"no such group\"\n", "shim_group"),
        ("shim_group = \"4294967295\"\n", "shim_group: 4294967295 is no group"),
        ("[[vm]]\nname = \"a\"\nmax = \"0\"\n", "line 3: vm[0].max: below one page"),
        ("[[vm]]\nname = \"a\"\nusers = [\"no one\"]\n", "line 3: vm[0].users: no user 'no one'"),
        ("[defaults]\nmax = \"0%\"\n", "line 2: defaults.max: below one page"),
        ("[balloon]\nrate_mib_s = 0\n", "balloon"),
        ("[balloon]\nrate_mib_s = 72057594037927937\n", "balloon"),
        ("[pager]\nfault_around = \"12K\"\n", "pager.fault_around"),
        ("[pager]\nfault_around = \"5K\"\n", "pager.fault_around: not a power of two"),
        ("[pager]\nfault_around = \"2K\"\n", "pager.fault_around: not a power of two"),
        ("[pager]\nfault_around = \"4M\"\n", "pager.fault_around: not a power of two"),
        ("[pager]\nlarge_pages_from = \"always\"\n", "pager.large_pages_from"),
        ("[adopt]\nmax = \"most\"\n", "adopt.max"),
        ("thresholds = \"steep\"\n", "line 1: thresholds: "),
        ("[policy]\nkind = \"steep\"\n", "line 2: policy.kind: "),
        ("[sharing]\norder = \"alphabetic\"\n", "line 2"),
        ("[sharing]\nenabled = 1\n", "line 2"),
        ("[sharing]\nsalt = \"x\"\n", "line 2"),
        ("[sharing]\nrate_mib_s = 0\n", "sharing.rate_mib_s"),
        ("[sharing]\nvm_rate_mib_s = 99999999999\n", "sharing.vm_rate_mib_s"),
        ("[sharing]\ncpu_percent = 0\n", "sharing.cpu_percent"),
        ("[sharing]\ncpu_percent = nan\n", "sharing.cpu_percent"),
        ("[sharing]\ncpu_percent = 400\n", "sharing.cpu_percent"),
        ("[sharing]\nscan_time_s = -1\n", "sharing.scan_time_s"),
        ("[sharing]\nrehome_after_ms = 0\n", "sharing.rehome_after_ms"),
        ("[journal]\nlimit = \"1K\"\n", "journal.limit: 1 KiB is below 1 MiB"),
        ("[journal]\nsize = \"1M\"\n", "line 2"),
        ("[compression]\nalgorithm = \"lzw\"\n", "line 2"),
        ("[compression]\ncache_percent = 0\n", "compression.cache_percent"),
        ("[compression]\nenabled = false\ncache_percent = 51\n", "compression.cache_percent"),
        ("[[swap.location]]\npriority = 1\n", "line 1: swap.location[0]: "),
        (
            "[[swap.location]]\npath = \"/a\"\npriority = \"x\"\n",
            "line 3: swap.location[0].priority",
        ),
        ("swap_dir = \"/b\"\n[[swap.location]]\npath = \"/a\"\n", "swap.location: give either"),
        (
            "[[swap.location]]\npath = \"/a\"\n[[swap.location]]\npath = \"/a\"\n",
            "swap.location: /a: named twice",
        ),
        ("[[swap.location]]\npath = \"a\"\n", "swap.location: a: not an absolute path"),
    ] {
        let error = check(text).unwrap_err().to_string();
        assert!(error.contains(wanted), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

const HOST: HostMemory = HostMemory { all: Bytes::from_mib(2048), huge: Bytes(0) };

#[test]
fn a_budget_that_the_host_does_not_have_any_more_is_told() {
    let told = |budget, available: Option<u64>| {
        of_what_is_available(Pages::from_mib(budget), available.map(Bytes::from_mib))
    };
    assert_eq!([told(600, None), told(600, Some(600))], [None, None]);
    let why = told(600, Some(599)).unwrap();
    assert!(why.contains("600 MiB") && why.contains("599 MiB") && why.contains("budget"), "{why}");
}

/// Guests may wait for this manager: what is set aside by now makes no mistake of what was none.
#[test]
fn huge_pages_lower_the_default_budget_and_refuse_no_other() {
    let check = |text: &str, huge: u64| {
        let over = Overrides {
            run_dir: Some("/b".into()),
            shim: std::env::current_exe().ok(),
            ..Overrides::default()
        };
        let host = HostMemory { huge: Bytes::from_mib(huge), ..HOST };
        let text = format!("swap_dir = \"/c\"\n{text}");
        let config = Config::read(Path::new("x.toml"), &text, over, host);
        config.map(|config| config.budget).map_err(|e| e.to_string())
    };
    let mib = |mib| Ok(Pages::from_mib(mib));
    assert_eq!(check("", 0), mib(1024));
    assert_eq!(check("", 512), mib(512));
    // A reserve may have them in it, but one that is no larger would leave the host nothing.
    assert_eq!(check("reserve = \"768M\"", 512), mib(1280));
    assert_eq!(check("reserve = \"512M\"", 512), mib(1024));
    assert_eq!(check("reserve = \"256M\"", 512), mib(1280));
    assert_eq!(check("reserve = \"256M\"", 2000), Ok(MIN_BUDGET));
    let with_mins = "[pool.a]\nmin = \"800M\"\n";
    for huge in [0, 512, 2000, 4096] {
        assert_eq!(check("budget = \"1900M\"", huge), mib(1900));
        assert!(check(with_mins, huge).is_ok(), "{huge}");
    }
    assert_eq!((check("", 900), check("", 1000)), (mib(124), Ok(MIN_BUDGET)));
    assert_eq!(check("", 2040), Ok(MIN_BUDGET));
    assert!(check("budget = \"2049M\"", 0).unwrap_err().contains("budget: "));
    assert!(check("reserve = \"2047M\"", 0).unwrap_err().contains("reserve: "));
}

#[test]
fn the_command_line_wins() {
    let file = parse(Path::new("x"), "budget = \"1G\"\ntax = 0.5\nrun_dir = \"/a\"\n").unwrap();
    let over = Overrides {
        budget: Some(Bytes::from_mib(512)),
        run_dir: Some("/b".into()),
        shim: std::env::current_exe().ok(),
        ..Overrides::default()
    };
    let config = Config::check(file, over, "x", HOST).unwrap();
    assert_eq!(config.budget, Pages::from_mib(512));
    assert_eq!(config.run_dir, Path::new("/b"));
    assert_eq!(config.swap_dir.as_deref(), Some(Path::new("/b/swap")));
    assert_eq!(config.tax, TaxRate::new(0.5).unwrap());
}

#[test]
fn a_mistake_is_told_where_it_was_made() {
    let read = |text: &str, over: Overrides| {
        let over = Overrides { shim: std::env::current_exe().ok(), ..over };
        let read = Config::read(Path::new("x.toml"), text, over, HOST);
        read.unwrap_err().to_string()
    };
    let tax = || Overrides { tax: Some(1.5), ..Overrides::default() };
    for text in ["", "tax = 0.5\n"] {
        let error = read(text, tax());
        assert!(error.starts_with("configuration (command line): tax: "), "{error}");
    }
    let error = read("tax = 0.5\n[pager]\nfault_around = \"12K\"\n", Overrides::default());
    assert!(error.starts_with("configuration x.toml, line 3: pager.fault_around: "), "{error}");
    let budget = |mib| Overrides { budget: Some(Bytes::from_mib(mib)), ..Overrides::default() };
    let error = read("budget = \"1G\"\n", budget(1));
    assert!(error.starts_with("configuration (command line): budget: 1 MiB"), "{error}");
    let error = read("budget = \"12Q\"\n", budget(512));
    assert!(error.starts_with("configuration x.toml, line 1: budget: '12Q'"), "{error}");
}

/// What is swapped is to leave memory: nobody's swap is on a tmpfs because nothing else was said.
#[test]
fn no_swap_is_put_on_a_tmpfs_unasked() {
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    // It may be made yet.
    for run_dir in [shm.path().to_owned(), shm.path().join("a/b")] {
        let check = |rest: &str| {
            let over = Overrides {
                run_dir: Some(run_dir.clone()),
                shim: std::env::current_exe().ok(),
                ..Overrides::default()
            };
            let file = parse(Path::new("x"), &format!("budget = \"1G\"\n{rest}")).unwrap();
            Config::check(file, over, "x", HOST).map_err(|e| e.to_string())
        };
        let refused = check("").unwrap_err();
        let part = "/swap would be on a tmpfs, where what is swapped stays in memory";
        assert!(refused.contains("swap_dir: ") && refused.contains(part), "{refused}");
        assert!(check("swap_dir = \"/c\"\n").is_ok());
        for former in ["swap", "vms"] {
            std::fs::create_dir_all(run_dir.join(former)).unwrap();
            assert!(check("").is_ok(), "a former manager's {former}");
            std::fs::remove_dir(run_dir.join(former)).unwrap();
        }
        assert!(check("[[swap.location]]\npath = \"/a\"\n").is_ok());
    }
}
