//! VMMs whose shims were refused at their start. They run all the same, without Ballast, and take their whole size beside
//! the budget: so they are remembered for as long as they run, for people to see.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Instant;

use ballast_api::RefusedView;
use ballast_qemu::process;
use ballast_shim_proto::Hello;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sync::lock;

/// So many at most, the last ones: whoever reaches the shims' socket can be refused.
const MOST: usize = 64;

/// In the order in which they were refused.
#[derive(Default)]
pub struct Refused(Mutex<Vec<Refusal>>);

struct Refusal {
    pid: u32,
    /// A pidfd, and not a `ProcessHandle`: that one would take the exit status of a child from whoever waits for it.
    process: OwnedFd,
    /// None: its shim speaks another version of the protocol, whose names nobody knows.
    name: Option<String>,
    /// What its shim said, in bytes.
    size: Option<u64>,
    why: String,
    since: Instant,
}

impl Refused {
    /// The shim in this process was refused, whatever it said of itself, if that was understood.
    pub fn note(&self, pid: u32, hello: Option<&Hello>, why: &str) {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        // One that has ended already needs no remembering.
        let process = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()).ok());
        let Some(process) = process else { return };
        let mut all = lock(&self.0);
        all.retain(|other| other.pid != pid && other.runs());
        if all.len() >= MOST {
            all.remove(0);
        }
        all.push(Refusal {
            pid,
            process,
            name: hello.map(|hello| hello.vm.as_str().to_owned()),
            size: hello.map(|hello| hello.ram_len().0),
            why: why.to_owned(),
            since: Instant::now(),
        });
    }

    /// Those that run still, but for processes that are a VM's by now.
    pub fn views(&self, is_vm: impl Fn(u32) -> bool) -> Vec<RefusedView> {
        let mut all = lock(&self.0);
        all.retain(Refusal::runs);
        all.iter().filter(|one| !is_vm(one.pid)).map(Refusal::view).collect()
    }
}

impl Refusal {
    fn runs(&self) -> bool {
        let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
        // Readable from its end on.
        !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    fn view(&self) -> RefusedView {
        RefusedView {
            pid: self.pid,
            name: self.name.clone(),
            size: self.size,
            resident: process::rss(self.pid).unwrap_or_default().0,
            why: self.why.clone(),
            for_s: self.since.elapsed().as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn pids(refused: &Refused) -> Vec<u32> {
        refused.views(|_| false).into_iter().map(|view| view.pid).collect()
    }

    #[test]
    fn who_was_refused_is_known_until_it_ends_or_is_a_vm() {
        let refused = Refused::default();
        let (mut one, mut other) = (sleeper(), sleeper());
        refused.note(one.id(), None, "first");
        refused.note(other.id(), None, "second");
        // Once a process, with the last reason.
        refused.note(one.id(), None, "third");
        let views = refused.views(|_| false);
        let seen: Vec<_> = views.iter().map(|view| (view.pid, view.why.as_str())).collect();
        assert_eq!(seen, [(other.id(), "second"), (one.id(), "third")]);
        assert!(views.iter().all(|view| view.resident > 0));
        let vm = one.id();
        assert_eq!(refused.views(|pid| pid == vm).len(), 1);
        other.kill().unwrap();
        // It has ended, though nobody has waited for it yet.
        while pids(&refused).len() > 1 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(pids(&refused), [one.id()]);
        other.wait().unwrap();
        one.kill().unwrap();
        one.wait().unwrap();
        assert!(pids(&refused).is_empty());
        refused.note(u32::MAX, None, "no process");
        refused.note(0, None, "of another namespace");
        assert!(pids(&refused).is_empty());
    }

    #[test]
    fn no_more_than_so_many_are_known() {
        let refused = Refused::default();
        let mut all: Vec<Child> = (0..MOST + 2).map(|_| sleeper()).collect();
        all.iter().for_each(|child| refused.note(child.id(), None, ""));
        let last: Vec<u32> = all[2..].iter().map(Child::id).collect();
        assert_eq!(pids(&refused), last);
        for child in &mut all {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(pids(&refused).is_empty());
    }
}
