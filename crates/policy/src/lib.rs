//! Memory policy as pure functions and small state machines: who is entitled to how much machine
//! memory, how active a guest is, how short the host is, and what to do about it now.
//!
//! Nothing here does I/O, reads a clock, starts a thread or draws a random number: time, seeds and
//! measurements come in as arguments, and the same arguments always give the same answer. The
//! names are those of C. Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI'02.
//!
//! | module | question | source |
//! | --- | --- | --- |
//! | [`shares`] | to how much is each VM entitled? | s.5.1, 5.2 |
//! | [`pools`] | the same, where VMs are in nested groups | vSphere's resource pools |
//! | [`working_set`] | how much of its memory does a guest use? | s.5.3 |
//! | [`touch_times`] | how many misses would it have with less? | ITC'12, ATC'16 |
//! | [`state`] | how short of free memory is the host? | s.6.3 |
//! | [`reserve`] | how much of it is to be kept free? | |
//! | [`admission`] | may one more VM be promised memory? | s.6.2 |
//! | [`balloon`] | how far can this guest's balloon be driven, and trusted? | s.3.2 |
//! | [`unplug`] | what is unplugged where its balloon does not deliver? | |
//! | [`in_vain`] | what of its balloon frees nothing? | |
//! | [`tools`] | what do its balloon and paging cost this guest now? | |
//! | [`policies`] | what does a VM need, read in other ways than the paper's? | |
//! | [`plan`](mod@plan) | what is asked of each VM now? | s.6.3 |
//! | [`nodes`] | what is asked of VMs that are bound to a NUMA node which is short? | |
//! | [`turn`] | all of that at once | s.6.3 |
//! | [`decision`] | why? | |
//!
//! One turn of the loop, once a second and after every event that changes an input, is
//! [`decide`]:
//!
//! 1. [`StateMachine::update`] with the free memory.
//! 2. [`targets`] over [`available`] pages, so that the sum of all targets leaves the goal free.
//! 3. [`plan()`](plan::plan) compares what each VM consumes with its target.
//! 4. A [`Decision`] keeps the [`Snapshot`] and the outcome, and explains them.
//!
//! Between turns, [`BalloonControl::step`] turns each balloon goal into commands that the guest can
//! bear, and [`ToolControl::step`] follows what a VM's tools cost it.

#![warn(missing_docs)]

pub mod admission;
pub mod balloon;
pub mod decision;
pub mod in_vain;
pub mod nodes;
pub mod plan;
pub mod policies;
pub mod pools;
pub mod reserve;
pub mod shares;
pub mod state;
pub mod tools;
pub mod touch_times;
pub mod turn;
pub mod unplug;
pub mod working_set;

pub use admission::{Promise, Refusal, admit};
pub use balloon::{
    BadBalloonConfig, BalloonConfig, BalloonControl, BalloonInput, BalloonOutput, Health,
};
pub use decision::Decision;
pub use in_vain::InVain;
pub use nodes::{Node, NodeState};
pub use plan::{EvictCause, Reason, Standing, Supply, VmPlan, VmState, plan};
pub use policies::{Policy, PolicyKind, UnknownPolicy, VmMisses, VmPressure};
pub use pools::{Member, Pool, PoolId, PoolShare, divide};
pub use reserve::{Reserve, Trough};
pub use shares::{
    Bound, Entitlement, TaxRate, TaxRateError, VmDemand, available, default_shares, targets,
};
pub use state::{Scale, State, StateMachine, ThresholdError, Thresholds};
pub use tools::{Cost, Tool, ToolControl, ToolOrder, Tools, ToolsInput};
pub use touch_times::{TouchAverages, TouchTimes};
pub use turn::{Snapshot, decide};
pub use unplug::{UnplugControl, UnplugInput, UnplugOutput};
pub use working_set::{
    ActiveEstimate, Averages, MOST_SAMPLES, SamplingConfig, SamplingError, WorkingSet,
    choose_samples,
};
