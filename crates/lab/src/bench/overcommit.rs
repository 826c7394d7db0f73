//! What overcommitted guests get done: two databases' stand-ins, an interactive user and an idle
//! guest, at rising overcommitment, under Ballast and under what the kernel offers instead.

use std::time::Duration;

use anyhow::Result;
use ballast_units::Bytes;

use crate::figures::{Outcome, Table};
use crate::image::Image;
use crate::overcommit::report::{Compared, at, circumstances, compare, table, tag};
use crate::overcommit::{self, Load, Plan, SIDES};

fn plan(quick: bool) -> Plan {
    let mib = Bytes::from_mib;
    let seconds = Duration::from_secs;
    let guests = |table, memory, idle| {
        vec![
            Load::store(table, memory, 250.0, 1),
            Load::store(table, memory, 250.0, 2),
            Load::office(memory / 2, 0.4, 3),
            Load::hog(idle),
        ]
    };
    if quick {
        let factors = vec![1.0, 2.0];
        let guests = guests(72, 20, 80);
        return Plan {
            guests,
            memory: mib(192),
            factors,
            settle: seconds(8),
            window: seconds(12),
            warm: seconds(3),
        };
    }
    Plan {
        guests: guests(112, 32, 128),
        memory: mib(256),
        factors: vec![1.0, 1.5, 2.0, 2.5],
        settle: seconds(20),
        window: seconds(30),
        warm: seconds(10),
    }
}

pub async fn run(image: &Image, quick: bool) -> Result<Outcome> {
    let plan = plan(quick);
    let steps = overcommit::run_all(&plan, image).await?;
    Ok(evaluate(&table(&steps, "store"), &table(&steps, "office"), &plan.factors))
}

fn evaluate(stores: &Table, offices: &Table, factors: &[f64]) -> Outcome {
    let mut outcome = Outcome::new("overcommit");
    for factor in factors {
        for side in SIDES {
            let name = |what: &str| format!("{}_{what}_{}", side.name(), tag(*factor));
            let served = at(stores, side, *factor, "served_percent");
            outcome.figure(&name("served_percent"), served);
            outcome.figure(&name("ops_per_s"), at(stores, side, *factor, "ops_per_s"));
            outcome.figure(&name("store_p95_ms"), at(stores, side, *factor, "p95_ms"));
            outcome.figure(&name("office_p95_ms"), at(offices, side, *factor, "p95_ms"));
            circumstances(stores, side, *factor, &mut outcome);
        }
    }
    let compared = [
        Compared { what: "served", table: stores, column: "served_percent", more: true },
        Compared { what: "store_p95", table: stores, column: "p95_ms", more: false },
        Compared { what: "office_p95", table: offices, column: "p95_ms", more: false },
    ];
    compare(stores, factors, &compared, &mut outcome);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn being_behind_a_peer_is_a_target_missed() {
        let columns =
            ["side", "factor", "served_percent", "ops_per_s", "p95_ms", "used_mib", "budget_mib"];
        let measured = |ours: f64| {
            let mut t = Table::new(&columns);
            for (side, served) in [(0.0, ours), (1.0, 60.0), (2.0, 80.0), (3.0, 60.0)] {
                t.push(&[side, 1.0, 99.0, 160.0, 5.0, 900.0, 900.0]);
                t.push(&[side, 2.0, served, served, 500.0 / served, 450.0, 450.0]);
            }
            evaluate(&t, &t, &[1.0, 2.0])
        };
        assert!(measured(85.0).ok);
        let behind = measured(70.0);
        assert!(!behind.ok && !behind.targets["served_of_zram_2_00"].met);
        assert!(behind.targets["served_of_swap_2_00"].met);
        assert!(behind.targets.keys().all(|k| !k.ends_with("1_00")));
        assert_eq!(behind.figures["store_p95_of_swap_1_00"], 1.0);
        // A peer within its budget as far as that is known.
        assert!(behind.targets["ballast_used_of_budget_2_00"].met);
    }
}
