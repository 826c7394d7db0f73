//! `ballast plan`: how far memory can be overcommitted, from journals.

use std::path::Path;

use ballast_planner::{Demand, Question, Span, output, plan, read_all};

use super::Output;
use super::journal::in_order;
use crate::args::{DemandArg, PlanArgs};
use crate::failure::Failure;
use crate::saved::save;

pub fn run(args: &PlanArgs, out: Output) -> Result<(), Failure> {
    let slot_ms = u64::try_from(args.slot.as_millis()).unwrap_or(u64::MAX);
    if slot_ms == 0 {
        return Err(Failure::Usage(
            "--slot: a slice of time has at least a millisecond".to_owned(),
        ));
    }
    let demand = match args.demand {
        DemandArg::Active => Demand::Active,
        DemandArg::Consumed => Demand::Consumed,
    };
    let span = Span { slot_ms, demand, since_ms: args.since, until_ms: args.until };
    in_order(args.since, args.until)?;
    let histories = read_all(&args.journals, span)?;
    let question = Question { risk: args.risk, confidence: args.confidence, seed: args.seed };
    let plan = plan(question, &histories);
    if let Some(path) = &args.csv {
        write(path, &output::csv(&plan))?;
    }
    if let Some(path) = &args.svg {
        write(path, &output::svg(&plan)?)?;
    }
    out.print(&plan, output::text)
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    save(path, text).map_err(|e| Failure::File { path: path.to_owned(), source: e })
}
