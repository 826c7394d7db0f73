//! A process that does what it is told a line at a time: this program again, under a hidden command.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead as _, Write as _};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};

/// No command takes longer, unless somebody has lost the process's memory.
const PATIENCE: Duration = Duration::from_secs(300);

/// Killed when it is dropped.
pub struct Child {
    name: &'static str,
    child: tokio::process::Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// Of the process, for as long as this lives.
    pub pid: u32,
}

impl Child {
    /// `name` is the hidden command, `words` are its options; `environment` is added to this program's.
    pub fn start(
        name: &'static str,
        words: &[String],
        environment: &BTreeMap<&str, OsString>,
    ) -> Result<Child> {
        let me = std::env::current_exe().context("the path of this program")?;
        let mut child = Command::new(me)
            .arg(name)
            .args(words)
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let input = child.stdin.take().with_context(|| format!("{name} has no input"))?;
        let output = child.stdout.take().with_context(|| format!("{name} has no output"))?;
        let pid = child.id().with_context(|| format!("{name} has ended"))?;
        Ok(Child { name, child, input, output: BufReader::new(output).lines(), pid })
    }

    /// The answer to one line; "error ..." is an error.
    pub async fn ask(&mut self, line: &str) -> Result<String> {
        let name = self.name;
        let talk = async {
            self.input.write_all(format!("{line}\n").as_bytes()).await?;
            self.output.next_line().await
        };
        let answer = tokio::time::timeout(PATIENCE, talk).await;
        let answer = answer.with_context(|| format!("{name}: no answer to '{line}'"))?;
        let answer = answer.with_context(|| format!("{name}: '{line}'"))?;
        let answer = answer.with_context(|| format!("{name} ended at '{line}'"))?;
        match answer.strip_prefix("error ") {
            Some(what) => bail!("{name}: {line}: {what}"),
            None => Ok(answer),
        }
    }

    /// Ends its input and waits for it. Err: it did not end well.
    pub async fn end(mut self) -> Result<()> {
        drop(self.input);
        let status = self.child.wait().await.with_context(|| self.name.to_owned())?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}

/// The process's own side: obeys its standard input, and answers each line with one, until that ends.
pub fn serve(mut obey: impl FnMut(&[&str]) -> Result<String>) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input")?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = obey(&words).unwrap_or_else(|e| format!("error {e:#}"));
        let mut out = std::io::stdout();
        writeln!(out, "{answer}").and_then(|()| out.flush()).context("standard output")?;
    }
    Ok(())
}
