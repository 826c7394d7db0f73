//! `ballast pool`: resource pools are shown, defined, changed and taken back.

use ballast_api::client::Client;
use ballast_api::{PoolChange, PoolView};

use super::Output;
use crate::args::PoolSetArgs;
use crate::failure::Failure;
use crate::figures::size;
use crate::table::{columns, section};

pub async fn ls(client: &Client, out: Output) -> Result<(), Failure> {
    let pools = client.pools().await?;
    out.print(&pools, |pools| table(pools))
}

pub async fn show(client: &Client, name: &str, out: Output) -> Result<(), Failure> {
    let pools = client.pools().await?;
    let Some(pool) = pools.into_iter().find(|pool| pool.name == name) else {
        return Err(Failure::no_such_pool(name));
    };
    out.print(&pool, described)
}

pub async fn set(client: &Client, args: PoolSetArgs, out: Output) -> Result<(), Failure> {
    if let (Some(min), Some(max)) = (args.min, args.max)
        && min > max
    {
        return Err(Failure::Usage(format!("--min {min} is above --max {max}")));
    }
    let change = PoolChange {
        shares: args.shares,
        min: args.min.map(|b| b.0),
        max: args.max.map(|b| b.0),
        no_max: args.no_max,
        expandable: args.expandable,
        tax: args.tax,
        no_tax: args.no_tax,
    };
    let pool = client.change_pool(&args.name, &change).await?;
    out.print(&pool, described)
}

pub async fn rm(client: &Client, name: &str, out: Output) -> Result<(), Failure> {
    let left = client.remove_pool(name).await?;
    out.print(&left, |left| match left.iter().find(|pool| pool.name == name) {
        Some(pool) => format!("{name}: as the configuration file says again\n{}", described(pool)),
        None => format!("{name}: removed\n"),
    })
}

fn limit(pool: &PoolView) -> String {
    pool.max.map_or("none".to_owned(), size)
}

fn unreserved(pool: &PoolView) -> String {
    pool.unreserved.map_or("its parent's".to_owned(), size)
}

fn table(pools: &[PoolView]) -> String {
    if pools.is_empty() {
        return "no pools (define one with: ballast pool set NAME, or in the configuration)\n"
            .into();
    }
    let headings = [
        ("NAME", false),
        ("SHARES", true),
        ("MIN", true),
        ("MAX", true),
        ("EXPANDABLE", false),
        ("TAX", true),
        ("RESERVED", true),
        ("UNRESERVED", true),
        ("TARGET", true),
        ("CONSUMED", true),
        ("VMS", true),
    ];
    let rows = pools.iter().map(|p| {
        vec![
            p.name.clone(),
            p.shares.to_string(),
            size(p.min),
            limit(p),
            if p.expandable { "yes" } else { "no" }.to_owned(),
            p.tax.map_or("-".to_owned(), |tax| tax.to_string()),
            size(p.reserved),
            unreserved(p),
            size(p.target),
            size(p.consumed),
            p.vms.len().to_string(),
        ]
    });
    columns(&headings, rows)
}

fn described(p: &PoolView) -> String {
    let list = |names: &[String]| match names {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let defined = if p.configured { "in the configuration file" } else { "by command" };
    section(
        &format!("pool {}", p.name),
        &[
            ("defined", defined.to_owned()),
            ("shares", p.shares.to_string()),
            ("min", size(p.min)),
            ("max", limit(p)),
            ("expandable", if p.expandable { "yes" } else { "no" }.to_owned()),
            ("tax", p.tax.map_or("its parent's".to_owned(), |tax| tax.to_string())),
            ("reserved for its VMs", size(p.reserved)),
            ("unreserved", unreserved(p)),
            ("target", size(p.target)),
            ("consumed", size(p.consumed)),
            ("VMs", list(&p.vms)),
            ("pools", list(&p.pools)),
        ],
    )
}
