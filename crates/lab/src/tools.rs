//! Programs of the system that the lab calls.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Where `program` is in PATH (or in the system folders that root's PATH may lack); the error says
/// which package has it.
pub fn find(program: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|p| p.is_file())
        .with_context(|| format!("{program} is not installed (apt-get install {package})"))
}

/// Runs to the end and returns standard output; a failure brings the last line of standard error.
pub fn run(command: &mut Command) -> Result<Vec<u8>> {
    let name = Path::new(command.get_program()).display().to_string();
    let output = command.stdin(Stdio::null()).output().with_context(|| name.clone())?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("(no message)");
    let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    bail!("{name} {}: {}: {last}", words.join(" "), output.status)
}

/// The binary `name` of this build: beside the one that runs (or one folder up, in tests).
pub fn sibling(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe().context("the path of this program")?;
    me.ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
        .with_context(|| format!("no {name} beside {} (build it first)", me.display()))
}

/// Where the kernel has it as a module that nobody has loaded; it stays. Without it, its user says what is missing.
pub fn load_module(name: &str) {
    if let Ok(modprobe) = find("modprobe", "kmod") {
        let _ = Command::new(modprobe).arg(name).stdin(Stdio::null()).output();
    }
}

/// The ids of all processes, as far as /proc shows them.
pub fn processes() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let error = find("no-such-program", "its-package").unwrap_err().to_string();
        assert!(error.contains("apt-get install its-package"), "{error}");
        assert!(find("sh", "dash").is_ok());
    }

    #[test]
    fn a_failing_program_brings_its_last_words() {
        let error =
            run(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().ends_with("two"), "{error}");
        assert_eq!(run(Command::new("echo").arg("hi")).unwrap(), b"hi\n");
    }
}
