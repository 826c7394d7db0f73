//! Files of /proc/PID that are as long as their process makes them: a command line may be moved to anywhere in its memory
//! (prctl, PR_SET_MM_MAP), mounts are many in a namespace of its own, and a descriptor tells all that it watches. What is read of
//! them lies in memory that is not swapped.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

/// Of a command line. Linux starts no process with arguments and an environment of over 6 MiB, by default of over 2 MiB.
const COMMAND_LINE: usize = 2 << 20;
/// Arguments in it.
const ARGUMENTS: usize = 1 << 16;
/// What is told of a descriptor first, its flags and its mount among it, is the same of all.
const FD_INFO: u64 = 4 << 10;
/// Of a table of mounts: some 50,000 of them.
const MOUNTS: u64 = 16 << 20;

/// The text of /proc/PID/cmdline: arguments that end in a NUL each.
///
/// # Errors
/// There is no such process, or it is not ours to see; it has more arguments, or longer ones, than a VMM is started with.
pub fn command_line(pid: u32) -> io::Result<String> {
    let mut text = Vec::new();
    let file = File::open(format!("/proc/{pid}/cmdline"))?;
    file.take(COMMAND_LINE as u64 + 1).read_to_end(&mut text)?;
    if text.len() > COMMAND_LINE || text.iter().filter(|byte| **byte == 0).count() > ARGUMENTS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a command line without an end"));
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// What is told first of a descriptor, in /proc/PID/fdinfo/N.
///
/// # Errors
/// Of the file.
pub fn fd_info(pid: u32, fd: &str) -> io::Result<String> {
    let mut text = Vec::new();
    File::open(format!("/proc/{pid}/fdinfo/{fd}"))?.take(FD_INFO).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Each line of /proc/PID/mountinfo. Names in it are bytes: those of a mount that anybody made must not keep us from the others.
///
/// # Errors
/// Of the file, or it is longer than any that is meant to be read.
pub fn mounts(process: &str, line: impl FnMut(&str)) -> io::Result<()> {
    lines(File::open(format!("/proc/{process}/mountinfo"))?, MOUNTS, line)
}

fn lines(file: impl Read, most: u64, mut line: impl FnMut(&str)) -> io::Result<()> {
    // One more byte than may be shows that there is one.
    let mut file = BufReader::new(file.take(most + 1));
    let (mut text, mut read) = (Vec::new(), 0);
    while let n @ 1.. = file.read_until(b'\n', &mut text)? {
        read += n as u64;
        if read > most {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a table of mounts without an end",
            ));
        }
        line(&String::from_utf8_lossy(&text));
        text.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// Of `sh` with these arguments. A process has none for a moment after it was started.
    fn of_shell(arguments: &[&str]) -> io::Result<String> {
        let mut shell = Command::new("sh");
        shell.args(["-c", "read line; :"]).args(arguments).stdin(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let line = loop {
            match command_line(child.id()) {
                Ok(line) if line.is_empty() => std::thread::yield_now(),
                line => break line,
            }
        };
        child.kill().unwrap();
        child.wait().unwrap();
        line
    }

    #[test]
    fn a_command_line_is_read_with_its_ends() {
        assert_eq!(of_shell(&["1", "", "2"]).unwrap(), "sh\0-c\0read line; :\x001\0\x002\0");
        assert!(command_line(u32::MAX).is_err());
    }

    #[test]
    fn one_with_more_arguments_than_any_vmm_has_is_refused() {
        let refused = of_shell(&vec![""; ARGUMENTS]).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_is_told_first_of_a_descriptor_has_its_flags() {
        let file = File::open("/proc/self/stat").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file).to_string();
        let info = fd_info(std::process::id(), &fd).unwrap();
        assert!(crate::proc_text::open_flags(&info).is_some(), "{info}");
        assert!(crate::proc_text::mount_id(&info).is_some(), "{info}");
        assert!(fd_info(std::process::id(), "99999999").is_err());
    }

    #[test]
    fn mounts_are_read_to_the_last_and_no_further_than_they_may_be_long() {
        let all = |most| {
            let mut seen = Vec::new();
            let read =
                lines(&b"1 a\n2 \xff\n3"[..], most, |line| seen.push(line.trim_end().to_owned()));
            (read.map_err(|e| e.kind()), seen)
        };
        let told = ["1 a", "2 \u{fffd}", "3"].map(str::to_owned);
        assert_eq!(all(9), (Ok(()), told.to_vec()));
        assert_eq!(all(8), (Err(io::ErrorKind::InvalidData), told[..2].to_vec()));
        let mut some = 0;
        mounts("self", |_| some += 1).unwrap();
        assert!(some > 0);
    }
}
