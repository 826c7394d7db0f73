//! The holder process, from the side that starts it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::contents::Contents;

/// No command takes longer, unless somebody has lost the holder's memory.
const PATIENCE: Duration = Duration::from_secs(300);

/// What memory to hold.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub mib: usize,
    pub seed: u64,
    /// Neighbours that are copied together.
    pub run: usize,
}

impl Shape {
    pub fn pages(self) -> usize {
        self.contents().pages()
    }
    pub fn contents(self) -> Contents {
        Contents::new(self.mib << 8, self.seed, self.run)
    }
}

/// Durations of single writes, microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub p50: f64,
    pub p99: f64,
}

pub struct Holder {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    pub pid: u32,
}

impl Holder {
    /// Starts it with its memory mapped. `environment` is what the shim is told, if it is to be there.
    pub fn start(
        shape: Shape,
        file: bool,
        environment: &BTreeMap<&str, OsString>,
    ) -> Result<Holder> {
        let me = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(me);
        command.args(["holder", "--mib", &shape.mib.to_string()]);
        command.args(["--seed", &shape.seed.to_string(), "--run", &shape.run.to_string()]);
        if file {
            command.arg("--file");
        }
        let mut child = command
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("starting the holder of memory")?;
        let input = child.stdin.take().context("the holder has no input")?;
        let output = child.stdout.take().context("the holder has no output")?;
        let pid = child.id().context("the holder has ended")?;
        Ok(Holder { child, input, output: BufReader::new(output).lines(), pid })
    }

    async fn ask(&mut self, line: &str) -> Result<String> {
        let talk = async {
            self.input.write_all(format!("{line}\n").as_bytes()).await?;
            self.output.next_line().await
        };
        let answer = tokio::time::timeout(PATIENCE, talk).await;
        let answer = answer.with_context(|| format!("holder: no answer to '{line}'"))?;
        let answer = answer.with_context(|| format!("holder: '{line}'"))?;
        let answer = answer.with_context(|| format!("the holder ended at '{line}'"))?;
        match answer.strip_prefix("error ") {
            Some(what) => bail!("holder: {line}: {what}"),
            None => Ok(answer),
        }
    }

    pub async fn fill(&mut self) -> Result<()> {
        self.ask("fill").await.map(drop)
    }

    pub async fn mergeable(&mut self) -> Result<()> {
        self.ask("mergeable").await.map(drop)
    }

    /// Whole memory as written, or an error that names a page that is not.
    pub async fn check(&mut self) -> Result<()> {
        self.ask("check").await.map(drop)
    }

    /// First writes to `count` pages of a kind ("twin", "zero", "unique").
    pub async fn write(&mut self, kind: &str, count: usize, seed: u64) -> Result<Times> {
        let answer = self.ask(&format!("write {kind} {count} {seed}")).await?;
        parse(&answer).with_context(|| format!("holder: '{answer}'"))
    }

    pub async fn end(mut self) -> Result<()> {
        drop(self.input);
        let status = self.child.wait().await.context("the holder")?;
        ensure!(status.success(), "the holder ended with {status}");
        Ok(())
    }
}

fn parse(answer: &str) -> Option<Times> {
    let mut words = answer.strip_prefix("times ")?.split(' ').map(str::parse::<u64>);
    let count = words.next()?.ok()?;
    let mut us = || Some(words.next()?.ok()? as f64 / 1e3);
    (count > 0).then_some(Times { p50: us()?, p99: us()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let t = parse("times 10 1500 2000 3000").unwrap();
        assert_eq!((t.p50, t.p99), (1.5, 2.0));
        for answer in ["times 10 1500", "times 0 0 0 0", "filled 3"] {
            assert!(parse(answer).is_none(), "{answer}");
        }
    }
}
