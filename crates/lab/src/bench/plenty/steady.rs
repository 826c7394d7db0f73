//! Loads that go on: all sides at once, in turns of a second. Where one side runs after the other, single runs of one
//! load on one side differ by half under emulation, and nothing is to be said about a percent.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::{Accel, VmSpec};

use super::loads::{BAND_MIB, DBENCH_CLIENTS, MEMORY};
use super::side::{BUDGET, Side};
use crate::console::Event;
use crate::experiments::stage::Stage;
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::{Options, SharingOptions};
use crate::plain::{PlainVm, Ram, Style};
use crate::say;
use crate::turns::Players;

/// Without KSM, whose thread takes no turns.
pub const SIDES: [Side; 5] =
    [Side::Plain, Side::PlainLarge, Side::Ballast, Side::BallastLarge, Side::BallastSharing];
/// Until a guest's load is under way.
const LIMIT: Duration = Duration::from_secs(180);
/// So many turns before what counts: what is translated, and in the guest's page cache, is so by then.
const WARM_UP: u32 = 4;

/// A load, by the name of its rate in the figures, and how much it has done by what it told.
pub struct Load {
    pub figure: &'static str,
    workload: fn() -> String,
    done: fn(&Event) -> Option<f64>,
}

pub const LOADS: [Load; 3] = [
    Load {
        figure: "compute_rounds_per_s",
        workload: || "compute --mb 4 --every 0".to_owned(),
        done: |event| (event.text("work") == "compute").then(|| event.number("passes"))?,
    },
    Load {
        figure: "memory_pages_per_s",
        workload: || format!("reader --mb {BAND_MIB} --block-mb {BAND_MIB}"),
        done: |event| (event.text("phase") == "read").then(|| event.number("checks"))?,
    },
    Load {
        figure: "dbench_mb_per_s",
        workload: || format!("dbench --clients {DBENCH_CLIENTS} --seconds 36000 --every 1"),
        done: |event| (event.kind() == "dbench-total").then(|| event.number("mb"))?,
    },
];

/// Rates of a load, by the time that a side had: a row for each block of turns, a column for each of `SIDES`.
pub async fn measure(
    load: &Load,
    image: &Image,
    disk: &Path,
    blocks: u32,
    turns: u32,
) -> Result<Vec<Vec<f64>>> {
    let mut sides = Vec::new();
    for side in SIDES {
        sides.push(Playing::start(side, load, image, disk).await?);
    }
    // At the same moment: a kernel that stands still for long says so.
    let begun = Instant::now();
    while !sides.iter_mut().all(|playing| matches!(playing.poll(), Ok(done) if done > 0.0)) {
        for playing in &mut sides {
            playing.poll()?;
        }
        ensure!(begun.elapsed() < LIMIT, "not all loads have begun");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    sides.iter().for_each(|playing| playing.players.stop());
    for _ in 0..WARM_UP {
        for playing in &sides {
            playing.players.turn().await;
        }
    }
    let mut rates = Vec::new();
    for block in 0..blocks {
        let mut before = Vec::new();
        for playing in &mut sides {
            before.push(playing.poll()?);
        }
        let mut ran = vec![Duration::ZERO; sides.len()];
        for turn in 0..turns {
            // Each comes at each place in its turn.
            for n in 0..sides.len() {
                let side = (n + (block * turns + turn) as usize) % SIDES.len();
                ran[side] += sides[side].players.turn().await;
            }
        }
        let mut row = Vec::new();
        for ((playing, before), ran) in sides.iter_mut().zip(before).zip(ran) {
            row.push((playing.poll()? - before) / ran.as_secs_f64());
        }
        let text: Vec<String> = row.iter().map(|rate| format!("{rate:.1}")).collect();
        say::detail(&format!("{} of {}: {}", block + 1, load.figure, text.join(", ")));
        rates.push(row);
    }
    for playing in sides {
        playing.end().await?;
    }
    Ok(rates)
}

/// A guest with its load.
struct Playing {
    vm: Vm,
    players: Players,
    load: fn(&Event) -> Option<f64>,
    done: f64,
}

enum Vm {
    Plain(
        Box<PlainVm>,
        #[expect(dead_code, reason = "held: its console is there")] tempfile::TempDir,
    ),
    Ours(Box<Stage>),
}

impl Playing {
    async fn start(side: Side, load: &Load, image: &Image, disk: &Path) -> Result<Playing> {
        let made = |consoles: &Path| {
            let guest = Guest::new("plenty", MEMORY, consoles).run((load.workload)());
            guest.shared_disk(disk.to_owned())
        };
        let (vm, players) = match side {
            Side::Plain | Side::PlainLarge => {
                let ram = if side == Side::Plain { Ram::Shared } else { Ram::Large };
                let dir = tempfile::tempdir()?;
                let style = Style { ram, ..Style::default() };
                let vm = PlainVm::start_as(&made(dir.path()), image, &style)?;
                let players = Players { manager: None, vmms: vec![vm.pid() as i32] };
                (Vm::Plain(Box::new(vm), dir), players)
            }
            Side::Ballast | Side::BallastLarge | Side::BallastSharing => {
                let sharing = (side != Side::BallastSharing).then(SharingOptions::off);
                let mut stage = Stage::new(&Options { sharing, ..Options::budget(BUDGET) })?;
                let guest = made(&stage.manager.consoles());
                let change = |spec: &mut VmSpec| {
                    spec.accel = Accel::Tcg;
                    spec.large_pages = Some(side != Side::Ballast);
                };
                let view = stage.add(&guest, image, change).await?;
                let vmm = view.pid.context("a VMM without a process")? as i32;
                let players = Players { manager: Some(stage.manager.pid()?), vmms: vec![vmm] };
                (Vm::Ours(Box::new(stage)), players)
            }
            Side::PlainKsm => bail!("KSM takes no turns"),
        };
        Ok(Playing { vm, players, load: load.done, done: 0.0 })
    }

    /// What its load has done so far.
    fn poll(&mut self) -> Result<f64> {
        let events = match &mut self.vm {
            Vm::Plain(vm, _) => {
                let events = vm.console.poll();
                let story = &vm.console.story;
                ensure!(story.trouble.is_none(), "{:?}", story.trouble);
                ensure!(vm.ended()?.is_none(), "QEMU ended: {}", vm.console.tail(5));
                events
            }
            Vm::Ours(stage) => stage.poll()?.into_iter().map(|(_, event)| event).collect(),
        };
        self.done = events.iter().rev().find_map(self.load).unwrap_or(self.done);
        Ok(self.done)
    }

    async fn end(self) -> Result<()> {
        self.players.go_on();
        match self.vm {
            Vm::Plain(..) => Ok(()),
            Vm::Ours(stage) => stage.end().await.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_knows_its_own_progress_alone() {
        let told = [
            r#"{"event":"progress","work":"compute","passes":7,"checks":35}"#,
            r#"{"event":"progress","work":"reader","phase":"read","checks":9,"passes":0}"#,
            r#"{"event":"dbench-total","work":"dbench","mb":12.5}"#,
            r#"{"event":"progress","work":"reader","phase":"fill","checks":3}"#,
        ];
        let events = told.map(|line| Event::parse(&format!("@ballast {line}")).unwrap());
        let done =
            LOADS.each_ref().map(|load| events.iter().map(load.done).collect::<Vec<Option<f64>>>());
        assert_eq!(done[0], [Some(7.0), None, None, None]);
        assert_eq!(done[1], [None, Some(9.0), None, None]);
        assert_eq!(done[2], [None, None, Some(12.5), None]);
    }
}
