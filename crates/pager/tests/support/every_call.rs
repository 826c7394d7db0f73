//! What may happen at every call that an operation makes: the manager dies there, its successor dies in its
//! recovery from that, or the call fails.

use ballast_pager::backend::{Errno, MemError};
use ballast_pager::memory::Access;
use ballast_units::Ppn;

use super::CrashAt;
use super::vm::Vm;

pub type Op = fn(&mut Vm) -> Result<(), MemError>;

/// An operation on one VM after the other, which are all alike.
pub struct EveryCall<'a> {
    pub name: &'a str,
    pub op: Op,
    pub vm: fn() -> Vm,
    /// What must hold in the end; with what has happened.
    pub finish: &'a dyn Fn(&mut Vm, &str),
}

impl EveryCall<'_> {
    /// The manager dies before and after each. How often it did; never is well only for one that is `idle`.
    pub fn dies(&self, idle: bool) -> u32 {
        let (name, mut crashes) = (self.name, 0);
        for after in [false, true] {
            for call in 0.. {
                let mut vm = (self.vm)();
                vm.ram.0.crash_at(CrashAt { call, after });
                let result = (self.op)(&mut vm);
                let died = vm.ram.0.revive();
                let what = format!("{name}, dies at call {call}, after it: {after}");
                assert!(!died || result == Err(MemError::Crash), "{what}: {result:?}");
                vm.take_over().unwrap();
                (self.finish)(&mut vm, &what);
                if !died {
                    assert!(call > 0 || idle, "{name} made no call");
                    break;
                }
                crashes += 1;
            }
        }
        crashes
    }

    /// The same, and the next manager dies at each call of its recovery; before or after each of them, as `when` says
    /// of both. How often that one did.
    pub fn dies_twice(&self, when: &[(bool, bool)]) -> u32 {
        let (name, mut crashes) = (self.name, 0);
        for &(after, again_after) in when {
            for call in 0.. {
                let mut first_died = true;
                for again in 0.. {
                    let mut vm = (self.vm)();
                    vm.ram.0.crash_at(CrashAt { call, after });
                    let _ = (self.op)(&mut vm);
                    first_died = vm.ram.0.revive();
                    vm.ram.0.crash_at(CrashAt { call: again, after: again_after });
                    let result = vm.retry_take_over();
                    let died = vm.ram.0.revive();
                    let what = format!("{name}, dies at call {call}, then in recovery at {again}");
                    assert_eq!(died, result.is_err(), "{what}: {result:?}");
                    if !died {
                        break;
                    }
                    vm.take_over().unwrap();
                    (self.finish)(&mut vm, &what);
                    crashes += 1;
                }
                if !first_died {
                    break;
                }
            }
        }
        crashes
    }

    /// Errors come and go: no restart is needed. How many calls failed: of each error one at least, but of what is `idle`.
    pub fn fails(&self, idle: bool) -> u32 {
        let mut failed = 0;
        let other = MemError::Os { op: "test", ppn: Ppn(0), source: Errno(5) };
        for error in [MemError::Again, MemError::NoMemory, other] {
            for call in 0.. {
                let mut vm = (self.vm)();
                vm.ram.0.fail_at(call, error.clone());
                let _ = (self.op)(&mut vm);
                let has_failed = vm.ram.0.has_failed();
                vm.ram.0.revive();
                vm.ram.0.recovered();
                for _ in 0..4 {
                    vm.pump().unwrap();
                }
                let what = format!("{}: {error} at call {call}", self.name);
                assert_eq!(vm.serve.pending().faults(), 0, "{what}");
                (self.finish)(&mut vm, &what);
                if !has_failed {
                    assert!(call > 0 || idle, "{} made no call", self.name);
                    break;
                }
                failed += 1;
            }
        }
        failed
    }
}

/// A fault on a page that is not there.
pub fn missing(vm: &mut Vm, ppn: u64) -> Result<(), MemError> {
    vm.ram.0.park(ppn, Access::Missing);
    vm.pump()
}

/// Pages that the guest gave up.
pub fn gone(vm: &mut Vm, first: u64, n: u64) -> Result<(), MemError> {
    vm.ram.0.vmm_punch(first, n);
    vm.ram.0.announce(first, n);
    vm.pump()
}
