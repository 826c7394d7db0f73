//! The view for anything but a terminal: a table every interval, or lines of JSON.

use std::io::Write;
use std::time::Instant;

use ballast_api::client::{Client, ClientError};
use serde_json::json;
use tokio::time::MissedTickBehavior;

use super::rates::{Rates, Totals};
use super::source::{Snapshot, look};
use crate::args::TopArgs;
use crate::aside;
use crate::commands::printable;
use crate::failure::{Failure, manager_message};
use crate::figures::{age, frequency, rate, size};
use crate::table;

pub async fn run(client: &Client, args: &TopArgs, json: bool) -> Result<(), Failure> {
    let start = Instant::now();
    let mut ticks = tokio::time::interval(args.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut seen = look(client, start).await?;
    let mut rates = Rates::default();
    let mut away = false;
    print(&seen, &rates, json)?;
    if args.once {
        return Ok(());
    }
    loop {
        ticks.tick().await;
        match look(client, start).await {
            Ok(next) => {
                rates = Rates::default();
                if next.host.pid == seen.host.pid {
                    let (before, now): (Totals, Totals) =
                        ((&seen.host.counters).into(), (&next.host.counters).into());
                    rates = Rates::between(before, now, next.at - seen.at);
                }
                seen = next;
                away = false;
                print(&seen, &rates, json)?;
            }
            Err(e) if !away => {
                away = true;
                aside::line(is_away(e, json));
            }
            Err(_) => {}
        }
    }
}

/// In JSON, an error as any other: the view goes on behind it.
fn is_away(error: ClientError, as_json: bool) -> String {
    if as_json {
        Failure::from(error).report(true)
    } else {
        format!("ballast: ballastd is away, retrying: {}", manager_message(&error))
    }
}

fn print(seen: &Snapshot, rates: &Rates, as_json: bool) -> Result<(), Failure> {
    let text = if as_json {
        format!("{}\n", json!({"host": seen.host, "vms": seen.vms}))
    } else {
        let sharing = table::sharing(&seen.host);
        printable(&format!("{}{sharing}{}\n", summary(seen, rates), table::vms(&seen.vms)))
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::output)
}

fn summary(seen: &Snapshot, rates: &Rates) -> String {
    let h = &seen.host;
    format!(
        "up {}  state {}  free {} of {}  overcommit {:.2}  swap in {} out {}  balloon {}  \
         faults {}  waits {}  blocks {}\n",
        age(h.uptime_s),
        h.state,
        size(h.free),
        size(h.budget),
        h.overcommit,
        rate(rates.swapped_in),
        rate(rates.swapped_out),
        rate(rates.ballooned),
        frequency(rates.faults),
        frequency(rates.waits),
        frequency(rates.blocks),
    )
}
