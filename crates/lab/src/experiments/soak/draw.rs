//! What is done next: drawn from a seed, by weight.

use ballast_policy::policies::PolicyKind;
use ballast_units::SplitMix64;

/// The same seed, the same draws.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    pub fn seeded(seed: u64) -> Random {
        Random(SplitMix64::seeded(seed))
    }

    /// Below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound.max(1))
    }

    /// From `from` up to and with `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from) + 1)
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `all`; None if there are none.
    pub fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len() as u64) as usize)
    }
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Starts a VM.
    Start,
    /// Stops one.
    Stop,
    /// SIGKILL to a VM's QEMU.
    KillVm,
    /// SIGKILL to ballastd; it is started again, at times with other settings that need a restart.
    KillManager,
    /// ballastd leaves its VMs, and is started again.
    Restart,
    /// Another ballastd takes over from the one that runs.
    Upgrade,
    /// A VM's shares, min, max, tax or pool.
    SetVm,
    /// The budget, or the host's tax.
    SetHost,
    /// The configuration file is changed, and read again.
    Reload,
    /// The small swap location is full for some seconds.
    FillSwap,
    /// A VM's QEMU stands still for some seconds (SIGSTOP).
    Pause,
    /// A pool is made, changed or removed.
    Pool,
    /// Nothing, for some seconds.
    Wait,
}

impl Action {
    /// All of them, with how often they are drawn against one another.
    pub const WEIGHTS: [(Action, u64); 13] = [
        (Action::Start, 24),
        (Action::Stop, 5),
        (Action::KillVm, 5),
        (Action::KillManager, 9),
        (Action::Restart, 4),
        (Action::Upgrade, 5),
        (Action::SetVm, 14),
        (Action::SetHost, 12),
        (Action::Reload, 8),
        (Action::FillSwap, 5),
        (Action::Pause, 5),
        (Action::Pool, 8),
        (Action::Wait, 6),
    ];

    /// In figures and data.
    pub fn name(self) -> &'static str {
        match self {
            Action::Start => "start",
            Action::Stop => "stop",
            Action::KillVm => "kill_vm",
            Action::KillManager => "kill_manager",
            Action::Restart => "restart",
            Action::Upgrade => "upgrade",
            Action::SetVm => "set_vm",
            Action::SetHost => "set_host",
            Action::Reload => "reload",
            Action::FillSwap => "fill_swap",
            Action::Pause => "pause",
            Action::Pool => "pool",
            Action::Wait => "wait",
        }
    }

    /// In data.csv.
    pub fn number(self) -> f64 {
        Action::WEIGHTS.iter().position(|(a, _)| *a == self).map_or(f64::NAN, |n| n as f64)
    }

    /// Whether there is another manager afterwards.
    pub fn ends_manager(self) -> bool {
        matches!(self, Action::KillManager | Action::Restart | Action::Upgrade)
    }

    fn needs_vm(self) -> bool {
        matches!(self, Action::Stop | Action::KillVm | Action::SetVm | Action::Pause)
    }
}

/// What can be done now.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// VMs that live.
    pub vms: usize,
    /// And the most that may.
    pub most: usize,
    /// Whether the manager may be ended: it is left alone for a while, to see what it grows by.
    pub managers_end: bool,
}

/// Draws again what cannot be done now. With fewer than two VMs, one is started.
pub fn draw(random: &mut Random, now: Now) -> Action {
    if now.vms < 2.min(now.most) {
        return Action::Start;
    }
    let sum = Action::WEIGHTS.iter().map(|(_, weight)| weight).sum();
    loop {
        let mut at = random.below(sum);
        let drawn = Action::WEIGHTS.iter().find(|(_, weight)| {
            let here = at < *weight;
            at = at.wrapping_sub(*weight);
            here
        });
        let action = drawn.map_or(Action::Wait, |(action, _)| *action);
        let full = action == Action::Start && now.vms >= now.most;
        let alone = action.needs_vm() && now.vms == 0;
        let stays = action.ends_manager() && !now.managers_end;
        if !(full || alone || stays) {
            return action;
        }
    }
}

/// What a guest's kernel needs of its memory, and what it keeps free, MiB: it has no swap, and ends who takes more.
const KERNELS_MIB: u64 = 68;

/// A workload of `ballast-guest` that checks every page it reads, for a guest of so many MiB, 112 or more.
pub fn workload(random: &mut Random, guest_mib: u64) -> String {
    let seed = random.between(1, 4);
    match random.below(4) {
        0 | 1 => {
            let (mb, threads) = (random.between(14, 28), random.between(1, 3));
            format!("verify-torture --mb {mb} --threads {threads} --seconds 1000000 --seed {seed}")
        }
        2 => {
            let max = random.between(14, 28);
            format!("toucher --min-mb 4 --max-mb {max} --period 20 --cycle 1 --seed {seed}")
        }
        // Of most of what it has: what is read seldom was away.
        _ => {
            let mb = random.between(14, guest_mib.saturating_sub(KERNELS_MIB).max(28));
            format!("reader --mb {mb} --rate-mb 20 --seed {seed}")
        }
    }
}

/// Settings of the configuration file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Which policy decides.
    pub policy: PolicyKind,
    /// Of VMs that are started or taken over.
    pub compression: bool,
    /// Needs a restart.
    pub sharing: bool,
    /// Seconds of VM execution time.
    pub sample_period_s: f64,
    /// Pages a period.
    pub samples: u64,
    /// Which tool of reclamation comes first.
    pub order: &'static str,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            policy: PolicyKind::default(),
            compression: true,
            sharing: true,
            sample_period_s: 5.0,
            samples: 100,
            order: "balloon-first",
        }
    }
}

impl Settings {
    /// Others that can be applied while the manager runs.
    #[must_use]
    pub fn reloaded(self, random: &mut Random) -> Settings {
        let policies = [
            PolicyKind::IdleTax,
            PolicyKind::GraduatedTax,
            PolicyKind::MissRatio,
            PolicyKind::Pressure,
        ];
        Settings {
            policy: random.of(&policies).copied().unwrap_or_default(),
            compression: !random.once_in(3),
            sharing: self.sharing,
            sample_period_s: random.between(2, 20) as f64,
            samples: random.between(20, 150),
            order: random.of(&["balloon-first", "measured"]).copied().unwrap_or(self.order),
        }
    }

    /// As TOML, without the table of tools and that of sharing.
    pub fn toml(self) -> String {
        format!(
            "[policy]\nkind = \"{}\"\n[compression]\nenabled = {}\n\
             [sampling]\nperiod_s = {:?}\nsamples = {}\n",
            self.policy, self.compression, self.sample_period_s, self.samples
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now { vms: 3, most: 6, managers_end: true };

    fn many(now: Now) -> Vec<Action> {
        let mut random = Random::seeded(7);
        (0..4000).map(|_| draw(&mut random, now)).collect()
    }

    #[test]
    fn a_seed_draws_the_same_again_and_all_actions_as_often_as_they_weigh() {
        let drawn = many(NOW);
        assert_eq!(drawn, many(NOW));
        let sum: u64 = Action::WEIGHTS.iter().map(|(_, weight)| weight).sum();
        for (action, weight) in Action::WEIGHTS {
            let times = drawn.iter().filter(|a| **a == action).count() as f64;
            let want = 4000.0 * weight as f64 / sum as f64;
            assert!((times - want).abs() < 0.25 * want, "{action:?}: {times} of {want}");
        }
        let mut other = Random::seeded(8);
        assert_ne!(drawn, (0..4000).map(|_| draw(&mut other, NOW)).collect::<Vec<_>>());
    }

    #[test]
    fn what_cannot_be_done_is_not_drawn() {
        assert!(!many(Now { vms: 6, ..NOW }).contains(&Action::Start));
        assert!(many(Now { vms: 1, ..NOW }).iter().all(|a| *a == Action::Start));
        assert!(!many(Now { managers_end: false, ..NOW }).iter().any(|a| a.ends_manager()));
        assert!(!many(Now { vms: 0, most: 0, ..NOW }).iter().any(|a| a.needs_vm()));
    }

    #[test]
    fn bounds_are_kept() {
        let mut random = Random::seeded(1);
        for _ in 0..1000 {
            assert!((3..=5).contains(&random.between(3, 5)));
            assert_eq!(random.between(4, 4), 4);
        }
        assert_eq!(random.of::<u8>(&[]), None);
        let all: Vec<String> = (0..200).map(|_| workload(&mut random, 112)).collect();
        for work in ["verify-torture", "toucher", "reader"] {
            assert!(all.iter().any(|w| w.starts_with(work)), "{work}");
        }
        let other = Settings::default().reloaded(&mut random);
        assert!(other.sharing && other.toml().contains("[sampling]"));
    }
}
