//! The static `ballast-guest`: given by `$BALLAST_GUEST`, or built from this workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{say, tools};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Err: it cannot be built, or is not static.
pub fn get() -> Result<PathBuf> {
    let path = match std::env::var_os("BALLAST_GUEST") {
        Some(path) => PathBuf::from(path),
        None => build()?,
    };
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    if !is_static(&bytes) {
        bail!("{}: not a static program; a guest has no libraries for it", path.display());
    }
    Ok(path)
}

/// A program without an interpreter needs no dynamic loader.
pub fn is_static(elf: &[u8]) -> bool {
    const LOADER: &[u8] = b"/ld-linux";
    let header = &elf[..elf.len().min(4096)];
    elf.starts_with(b"\x7fELF") && !header.windows(LOADER.len()).any(|w| w == LOADER)
}

/// Cargo decides whether there is anything to do. Its own target folder, because the flags differ.
fn build() -> Result<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !workspace.join("crates/guest/Cargo.toml").is_file() {
        bail!("no ballast-guest: set BALLAST_GUEST to a static build of it");
    }
    let target = target_folder()?;
    let binary = target.join(TARGET).join("release/ballast-guest");
    if !binary.is_file() {
        say::step("Building the guests' program (static)");
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(&workspace)
        .args(["build", "--quiet", "--release", "--locked", "-p", "ballast-guest"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    for setting in ["opt-level=\"s\"", "panic=\"abort\"", "strip=true", "lto=true"] {
        command.args(["--config", &format!("profile.release.{setting}")]);
    }
    tools::run(&mut command).context("building ballast-guest")?;
    Ok(binary)
}

/// `guest` in the folder of this build: the parent of `release` or `debug`.
fn target_folder() -> Result<PathBuf> {
    let me = std::env::current_exe().context("the path of this program")?;
    let profile = me
        .ancestors()
        .find(|d| d.file_name().is_some_and(|n| n == "release" || n == "debug"))
        .with_context(|| {
            format!("{} is not in a target folder; set BALLAST_GUEST", me.display())
        })?;
    Ok(profile.parent().unwrap_or(profile).join("guest"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_a_loader_are_told_apart() {
        let me = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!is_static(&me));
        assert!(is_static(b"\x7fELF and nothing more"));
        assert!(!is_static(b"#!/bin/sh"));
    }
}
