//! Real guests that do nothing.

use std::time::Instant;

use anyhow::Result;
use ballast_units::Bytes;

use super::cost::{held, list_ms, watch};
use super::growth::{Point, bend, per_vm, tell};
use super::{MIB, Plan, figures, told};
use crate::experiments::stage::Stage;
use crate::figures::Outcome;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::Options;
use crate::say;

const GUEST: Bytes = Bytes::from_mib(96);
/// Guests that boot at the same time: more only hinder one another.
const AT_ONCE: usize = 4;
/// The target is a hundredth of a core for 50 idle guests, ...
const CPU_PERCENT: f64 = 1.0;
/// ... of which each adds at most this.
const CPU_PERCENT_EACH: f64 = 0.02;

pub async fn run(image: &Image, plan: &Plan, outcome: &mut Outcome) -> Result<()> {
    let most = plan.guests.iter().max().copied().unwrap_or(0);
    let budget = Bytes((GUEST.0 + (16 << 20)) * most as u64 + (512 << 20));
    // Its guests' RAM is all the room that they need: none is taken from them.
    let options = Options {
        more: "[[vm]]\nname = \"*\"\nmin = \"100%\"\n".into(),
        ..Options::budget(budget)
    };
    let mut stage = Stage::new(&options)?;
    let mut points = Vec::new();
    for &guests in plan.guests {
        let mut starts = Vec::new();
        for n in stage.guests.len()..guests {
            let guest = Guest::new(&format!("idle{n}"), GUEST, &stage.manager.consoles());
            let begin = Instant::now();
            stage.add(&guest, image, |_| {}).await?;
            starts.push(begin.elapsed().as_secs_f64() * 1e3);
            if n % AT_ONCE == AT_ONCE - 1 {
                stage.wait_for_boot().await?;
            }
        }
        stage.wait_for_boot().await?;
        // What looks for equal pages looks at all that the boot has written first: that is not idling.
        tokio::time::sleep(plan.settle * if guests == 0 { 1 } else { 4 }).await;
        let window = if guests == most { plan.long } else { plan.window };
        let cost = watch(&stage.manager, window, async || Ok(())).await?;
        stage.poll()?;
        let memory = held(&stage.manager)?;
        let mut all = figures(&cost);
        all.push(("heap_mib".into(), memory.heap as f64 / MIB));
        all.push(("files_mib".into(), memory.files as f64 / MIB));
        all.push(("resident_mib".into(), memory.resident as f64 / MIB));
        all.push(("list_ms".into(), list_ms(stage.manager.client()).await?));
        if guests > 0 {
            all.push(("start_ms".into(), crate::stats::median(&starts)));
        }
        say::detail(&format!(
            "{guests} idle guests: {:.3}% of a core ({}); {} of heap, {} of files; policy turn {:.2} ms",
            cost.cpu,
            told(&cost),
            Bytes(memory.heap),
            Bytes(memory.files),
            cost.turn_ms
        ));
        points.push(Point { vms: guests, figures: all });
    }
    stage.end().await?;
    tell(outcome, "idle", &points);
    let each = per_vm(&points, "cpu_percent");
    outcome.figure("idle_cpu_percent_bend", bend(&points, "cpu_percent"));
    outcome.figure("idle_heap_mib_each", per_vm(&points, "heap_mib"));
    outcome.figure("idle_files_mib_each", per_vm(&points, "files_mib"));
    let all = points.last().map_or(f64::NAN, |last| last.get("cpu_percent"));
    outcome.at_most(&format!("idle_cpu_percent_{most}"), all, CPU_PERCENT);
    outcome.at_most("idle_cpu_percent_each", each, CPU_PERCENT_EACH);
    Ok(())
}
