//! `ballast config`: a configuration is checked by ballastd itself, or read again by the one that runs.

use std::path::{Path, PathBuf};
use std::process::Command;

use ballast_api::ConfigReloaded;
use ballast_api::client::Client;

use super::Output;
use crate::failure::Failure;

/// Asks ballastd itself, which need not run: it alone knows what its configuration may be.
pub fn check(file: &Path, out: Output) -> Result<(), Failure> {
    let program = ballastd();
    let run = Command::new(&program).arg("--check").arg("--config").arg(file).output();
    let run = run.map_err(|source| Failure::Program { program: program.clone(), source })?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().replace('\n', " ");
    if !run.status.success() {
        let why = said(&run.stderr);
        let why = why.strip_prefix("ballastd: ").unwrap_or(&why);
        return Err(Failure::Config(why.to_owned()));
    }
    let answer = serde_json::json!({ "file": file.to_string_lossy(), "good": true });
    out.print(&answer, |_| format!("{}: {}\n", file.display(), said(&run.stdout)))
}

pub async fn reload(client: &Client, out: Output) -> Result<(), Failure> {
    let done = client.reload().await?;
    out.print(&done, reloaded)
}

fn reloaded(done: &ConfigReloaded) -> String {
    let mut text = match done.changes.len() {
        0 => format!("{}: read again, nothing is different\n", done.file),
        _ => format!("{}: read again; what is different:\n", done.file),
    };
    for change in &done.changes {
        text.push_str(&format!("  {change}\n"));
    }
    text
}

/// Beside this program, as a build or a package leaves it, else in the PATH.
fn ballastd() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name("ballastd"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "ballastd".into())
}
