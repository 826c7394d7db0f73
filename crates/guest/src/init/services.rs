//! The workloads of a guest, as children of process 1.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use super::cmdline::words;
use crate::json::Object;
use crate::report;

#[derive(Default)]
pub struct Services {
    running: BTreeMap<libc::pid_t, String>,
}

impl Services {
    /// A workload of this binary by its name, or a program by its absolute path.
    pub fn start(&mut self, command: &str) {
        let words = words(command);
        let mut child = match words.first() {
            Some(program) if program.starts_with('/') => {
                let mut c = Command::new(program);
                c.args(&words[1..]);
                c
            }
            _ => {
                let mut c = Command::new("/proc/self/exe");
                c.args(&words);
                c
            }
        };
        match child.current_dir("/").spawn() {
            Ok(child) => {
                self.running.insert(child.id() as libc::pid_t, command.to_owned());
            }
            Err(e) => exited(command, &format!("not started: {e}"), -1),
        }
    }

    pub fn none_left(&self) -> bool {
        self.running.is_empty()
    }

    /// Collects the children that have ended; true if a workload was among them, or none was there
    /// to begin with.
    pub fn reap(&mut self) -> bool {
        let mut ended = self.running.is_empty();
        let mut status = 0;
        loop {
            // SAFETY: status is a valid place for the result; process 1 is nobody's std::process
            // waiter, so no one else collects these children.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                return ended;
            }
            if let Some(command) = self.running.remove(&pid) {
                let (how, code) = describe(status);
                exited(&command, &how, code);
                ended = true;
            }
        }
    }

    /// SIGTERM, a moment, SIGKILL.
    pub fn end_all(&mut self) {
        for signal in [libc::SIGTERM, libc::SIGKILL] {
            for pid in self.running.keys() {
                // SAFETY: kill touches no memory; the process is our child and not yet collected.
                unsafe { libc::kill(*pid, signal) };
            }
            let until = Instant::now() + Duration::from_secs(2);
            while !self.running.is_empty() && Instant::now() < until {
                self.reap();
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn describe(status: libc::c_int) -> (String, i64) {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        (format!("signal {signal}"), -i64::from(signal))
    } else {
        let code = libc::WEXITSTATUS(status);
        (format!("code {code}"), i64::from(code))
    }
}

fn exited(command: &str, how: &str, code: i64) {
    report::emit(
        Object::new().text("event", "exit").text("run", command).text("how", how).int("code", code),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_told_apart() {
        assert_eq!(describe(0), ("code 0".to_owned(), 0));
        assert_eq!(describe(3 << 8), ("code 3".to_owned(), 3));
        assert_eq!(describe(9), ("signal 9".to_owned(), -9));
    }
}
