use ballast_api::Why;
use ballast_api::client::Client;

use super::Output;
use crate::failure::Failure;
use crate::figures::age;

pub async fn run(client: &Client, name: &str, out: Output) -> Result<(), Failure> {
    let why = client.why(name).await?;
    out.print(&why, explained)
}

fn explained(why: &Why) -> String {
    let mut text =
        format!("{}\ndecided {} ago, because: {}\n", why.verdict, age(why.age_s), why.trigger);
    for (i, step) in why.steps.iter().enumerate() {
        text.push_str(&format!("{:>3}. {step}\n", i + 1));
    }
    text
}
