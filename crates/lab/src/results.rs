//! `docs/results/README.md`: what all experiments and benchmarks found, of the files that they wrote; what
//! missed its target first.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The folder of benchmarks' results and of the page, from the root of a checkout.
const FOLDER: &str = "docs/results";

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct ResultsArgs {
    /// The root of the checkout
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub root: PathBuf,
    /// Only say whether the page is what it would be
    #[arg(long)]
    pub check: bool,
}

/// An outcome as it was written. What could not be measured is null, or not there.
#[derive(Debug, Deserialize)]
struct Written {
    name: String,
    ok: bool,
    #[serde(default)]
    quick: bool,
    #[serde(default)]
    date: Option<String>,
    #[serde(default)]
    machine: Option<String>,
    #[serde(default)]
    figures: BTreeMap<String, Option<f64>>,
    #[serde(default)]
    paper: BTreeMap<String, Option<f64>>,
    #[serde(default)]
    ratios: BTreeMap<String, Option<f64>>,
    #[serde(default)]
    targets: BTreeMap<String, Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    want: String,
    got: Option<f64>,
    met: bool,
}

/// Writes the page, or says that it is not up to date.
pub fn run(args: &ResultsArgs) -> Result<()> {
    let text = page(&args.root)?;
    let path = args.root.join(FOLDER).join("README.md");
    if args.check {
        let there = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(there == text, "{}: not what `ballast-lab results` makes of it", path.display());
        return Ok(());
    }
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}

/// Makes the page anew, where there is one: what an experiment wrote into a checkout is in it.
pub fn renew(root: &Path) -> Result<()> {
    if !root.join(FOLDER).join("README.md").exists() {
        return Ok(());
    }
    run(&ResultsArgs { root: root.to_owned(), check: false })
}

/// The page, of `experiments/*/figures.json` and `docs/results/*.json`.
fn page(root: &Path) -> Result<String> {
    let mut all = Vec::new();
    for path in files(root)? {
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let written: Written =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        ensure!(!written.quick, "{}: of a run with --quick, which is no result", path.display());
        all.push((path.starts_with(root.join("experiments")), written));
    }
    all.sort_by(|a, b| (a.1.ok, &a.1.name).cmp(&(b.1.ok, &b.1.name)));
    Ok(render(&all))
}

fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let list = |dir: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(dir).with_context(|| dir.display().to_string())?;
        let paths = entries.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>();
        paths.with_context(|| dir.display().to_string())
    };
    let experiments = list(&root.join("experiments"))?.into_iter().map(|d| d.join("figures.json"));
    let benches = list(&root.join(FOLDER))?
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "json"));
    let mut files: Vec<PathBuf> = experiments.filter(|p| p.exists()).chain(benches).collect();
    files.sort();
    Ok(files)
}

/// Outcomes with whether they are experiments'; those that missed a target come first.
fn render(all: &[(bool, Written)]) -> String {
    let mut text = String::from(
        "# Results\n\nMade by `ballast-lab results` of what `./experiment NAME` and `./bench NAME --out docs/results` wrote; do \
         not edit. What missed a target comes first. Machines are shared and noisy: ratios of one run \
         count, and what a losing figure is due to is in the NOTES of its experiment or in \
         [known issues](../known-issues.md).\n\n",
    );
    let (missed, met): (Vec<_>, Vec<_>) = all.iter().partition(|(_, w)| !w.ok);
    let _ = writeln!(
        text,
        "{} of {} missed a target: {}.",
        missed.len(),
        missed.len() + met.len(),
        missed.iter().map(|(_, w)| w.name.as_str()).collect::<Vec<_>>().join(", ")
    );
    let none: Vec<&str> =
        names().filter(|name| !all.iter().any(|(_, w)| w.name == *name)).collect();
    if !none.is_empty() {
        let _ = writeln!(text, "\nWithout a result here: {}.", none.join(", "));
    }
    for (is_experiment, written) in missed.into_iter().chain(met) {
        one(&mut text, *is_experiment, written);
    }
    text
}

/// Of all that there are to run.
fn names() -> impl Iterator<Item = &'static str> {
    let all = crate::experiments::NAMES.iter().chain(&crate::bench::NAMES);
    all.map(|(name, _)| *name)
}

fn one(text: &mut String, is_experiment: bool, w: &Written) {
    let _ = writeln!(text, "\n## {}\n", w.name);
    let when = w.date.as_deref().unwrap_or("date not recorded");
    let machine = w.machine.as_deref().unwrap_or("machine not recorded");
    let _ = writeln!(text, "{when}; {machine}.");
    if is_experiment {
        let _ = writeln!(
            text,
            "[Data](../../experiments/{0}/data.csv), [plot](../../experiments/{0}/plot.svg).",
            w.name
        );
    }
    if !w.targets.is_empty() {
        text.push_str("\n| target | wanted | got | |\n| --- | --- | --- | --- |\n");
        let (missed, met): (Vec<_>, Vec<_>) = w.targets.iter().partition(|(_, t)| !t.met);
        for (name, t) in missed.into_iter().chain(met) {
            let met = if t.met { "met" } else { "**missed**" };
            let _ = writeln!(text, "| {name} | {} | {} | {met} |", t.want, number(t.got));
        }
    }
    if !w.paper.is_empty() {
        text.push_str("\n| figure | here | the source | ratio |\n| --- | --- | --- | --- |\n");
        for (name, paper) in &w.paper {
            let of = |map: &BTreeMap<String, Option<f64>>| number(map.get(name).copied().flatten());
            let (here, ratio) = (of(&w.figures), of(&w.ratios));
            let _ = writeln!(text, "| {name} | {here} | {} | {ratio} |", number(*paper));
        }
    }
    if w.targets.is_empty() && w.paper.is_empty() {
        text.push_str("\n| figure | |\n| --- | --- |\n");
        for (name, value) in &w.figures {
            let _ = writeln!(text, "| {name} | {} |", number(*value));
        }
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "not measured".to_owned(), |v| v.to_string())
}

/// "2 processors, 24 GiB, Linux 6.18 without MGLRU": what figures depend on most.
pub(crate) fn machine() -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let info = rustix::system::sysinfo();
    let gib = (info.totalram as f64 * f64::from(info.mem_unit) / f64::from(1u32 << 30)).round();
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let version = release.split(['.', '-']).take(2).collect::<Vec<_>>().join(".");
    // By which the kernel's own swap, zram and KSM choose what leaves, if it is there.
    let ages = std::fs::read_to_string("/sys/kernel/mm/lru_gen/enabled").unwrap_or_default();
    let has_ages = !matches!(ages.trim(), "" | "0x0000");
    let ages = if has_ages { "with MGLRU" } else { "without MGLRU" };
    format!("{processors} processors, {gib} GiB, Linux {version} {ages}")
}

/// Today, in UTC.
pub(crate) fn today() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Outcome;

    #[test]
    fn what_missed_its_target_comes_first_and_what_was_not_measured_is_said() {
        let written = |o: &Outcome| serde_json::from_str(&o.line().unwrap()).unwrap();
        let mut good = Outcome::new("a-good");
        good.figure("x", 2.0);
        good.paper("x", 4.0);
        good.at_most("x", 2.0, 3.0);
        let mut bad = Outcome::new("b-bad");
        bad.at_least("a", 5.0, 1.0);
        bad.at_least("z", f64::NAN, 1.0);
        let mut all: Vec<(bool, Written)> = vec![(true, written(&good)), (false, written(&bad))];
        all.sort_by_key(|(_, w)| w.ok);
        let text = render(&all);
        assert!(text.contains("1 of 2 missed a target: b-bad."), "{text}");
        assert!(text.contains("\nWithout a result here: osdi02-f2, "), "{text}");
        assert!(text.find("## b-bad") < text.find("## a-good"), "{text}");
        assert!(text.contains("| z | >= 1 | not measured | **missed** |\n| a |"), "{text}");
        assert!(text.contains("| x | 2 | 4 | 0.5 |"), "{text}");
        assert!(text.contains(&machine()) && text.contains(&today()), "{text}");
    }

    /// The page of this repository is what its files make of it.
    #[test]
    fn the_page_is_up_to_date() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        run(&ResultsArgs { root, check: true }).unwrap();
    }
}
