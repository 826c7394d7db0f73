//! `ballast why`: why a VM has the memory that it has, or had what it had.

use ballast_api::Why;
use ballast_api::client::Client;

use super::{Output, journal};
use crate::args::WhyArgs;
use crate::failure::Failure;
use crate::figures::age;
use crate::moment;

pub async fn run(client: &Client, args: &WhyArgs, out: Output) -> Result<(), Failure> {
    let name = &args.name;
    // Of a journal alone, now is its last turn.
    let offline = || (args.at.unwrap_or(u64::MAX), ballast_journal::now_ms());
    let why = match &args.journal {
        Some(path) => {
            let (at, now) = offline();
            ballast_journal::tell::why_at(path, name, at, now)?
        }
        None => {
            let asked = match args.at {
                None => client.why(name).await,
                Some(at) => client.why_at(name, at).await,
            };
            match asked {
                Ok(why) => why,
                Err(e) => {
                    let folder = journal::left_behind(client, e, out)?;
                    let (at, now) = offline();
                    ballast_journal::tell::why_at(&folder, name, at, now)?
                }
            }
        }
    };
    out.print(&why, explained)
}

fn explained(why: &Why) -> String {
    let when = match why.at_ms {
        None => format!("{} ago", age(why.age_s)),
        Some(at) => format!("{} ({} ago)", moment::show(at), age(why.age_s)),
    };
    let mut text: String = why.notes.iter().map(|note| format!("{note}\n")).collect();
    text += &format!("{}\ndecided {when}, because: {}\n", why.verdict, why.trigger);
    for (i, step) in why.steps.iter().enumerate() {
        text.push_str(&format!("{:>3}. {step}\n", i + 1));
    }
    if !why.outcomes.is_empty() {
        text.push_str("what came of it:\n");
        for outcome in &why.outcomes {
            text.push_str(&format!("  -  {outcome}\n"));
        }
    }
    text
}
