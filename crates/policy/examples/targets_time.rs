//! Prints how long `targets` takes for 10 to 10,000 VMs: `cargo run --release --example
//! targets_time -p ballast-policy`.

use std::time::Instant;

use ballast_policy::{TaxRate, VmDemand, targets};
use ballast_units::{Pages, VmId};

fn main() {
    for n in [10u32, 100, 1_000, 10_000] {
        for (what, spread) in [("all different", 1), ("all equal", 0)] {
            let vms: Vec<VmDemand> = (0..n).map(|i| demand(i, i * spread)).collect();
            let available = Pages(vms.iter().map(|v| v.max.0).sum::<u64>() * 3 / 5);
            let mut times: Vec<f64> = (0..21)
                .map(|_| {
                    let start = Instant::now();
                    std::hint::black_box(targets(std::hint::black_box(available), &vms));
                    start.elapsed().as_secs_f64() * 1e3
                })
                .collect();
            times.sort_by(f64::total_cmp);
            println!(
                "{n:>6} VMs, {what:<13}: median {:.3} ms, worst {:.3} ms",
                times[10], times[20]
            );
        }
    }
}

fn demand(id: u32, i: u32) -> VmDemand {
    let max = 65_536 + u64::from(i % 97) * 4_099;
    VmDemand {
        id: VmId(id),
        shares: 1 + i % 1_009,
        min: Pages(u64::from(i % 7) * 1_000),
        max: Pages(max),
        tax: TaxRate::default(),
        active: Pages(u64::from(i % 61) * 1_003),
    }
}
