//! Hosts that are never left alone, in virtual time; `./experiment soak` runs more of them, for longer.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;

use ballast_sim::{Scenario, run, soak};

const HOSTS: u64 = 16;
const HOURS: u64 = 4;

#[test]
fn whatever_is_done_to_a_host_it_keeps_its_promises() {
    let base = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let base = base.as_nanos() as u64;
    println!("seeds from {base}");
    let (mut vms, mut events, mut decisions, mut refused) = (0, 0, 0, 0);
    for seed in (0..HOSTS).map(|n| base.wrapping_add(n)) {
        let drawn = soak::draw(seed, HOURS);
        assert_eq!(drawn, soak::draw(seed, HOURS));
        let scenario = Scenario::parse(Path::new("soak.toml"), &drawn.text)
            .unwrap_or_else(|e| panic!("seed {seed}: {e}\n{}", drawn.text));
        for result in run(&scenario, 1, &|_| {}) {
            let wrong = soak::wrong(&drawn, &result);
            assert!(wrong.is_empty(), "seed {seed}: {wrong:?}");
            decisions += result.measure.decisions;
            refused += result.measure.refused;
        }
        (vms, events) = (vms + drawn.vms, events + drawn.events);
    }
    println!(
        "{HOSTS} hosts, {HOURS} h each: {vms} VMs, {events} changes, {decisions} decisions, {refused} refusals"
    );
    assert!(decisions > HOSTS * HOURS * 3600 / 2, "{decisions}");
}
