//! Coming back: VMs that a former manager left running are taken over; what remains of VMs that are
//! gone is cleared away.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::{Management, Mode};
use ballast_pager::advance::{self, Advance};
use ballast_pager::run_files::{PMAP, STAGE};
use ballast_pager::service::{PagedVm, PagerConfig};
use ballast_pager::stage::Stage;
use ballast_policy::{BalloonControl, Promise};
use ballast_qemu::{ProcessHandle, process};
use ballast_units::{Bytes, Pages};

use crate::lifecycle::{built_at, parts_of};
use crate::looks::{Past, unseen};
use crate::manager::{Manager, Pledge, Waits};
use crate::measured::{self, Measured};
use crate::paging::{Answer, Expected, pager_config};
use crate::records::Record;
use crate::survey::{Left, Survey, Unread};
use crate::sync::lock;
use crate::vm::{NewVm, Vm};

/// After this time it is said that a shim has not come, and again after each of the other.
const LATE: Duration = Duration::from_secs(10);
const STILL_LATE: Duration = Duration::from_secs(600);

/// Of the VMs that a former manager left, those that wait for a manager, announced so that their shims
/// are let in. Call before shims are accepted.
///
/// # Errors
/// A process cannot be watched, or a newer manager's pmap or the folder of stores not be read.
pub fn announce(manager: &Arc<Manager>, survey: Survey) -> anyhow::Result<Vec<Waiting>> {
    let Survey { left, unread } = survey;
    let is_said = |i: usize| unread[..i].iter().any(|before| before.folder == unread[i].folder);
    for (i, Unread { name, folder, why, may_run }) in unread.iter().enumerate() {
        let folder = folder.display();
        if is_said(i) {
            // It was moved, and holds two names.
        } else if *may_run {
            tracing::error!(
                vm = name,
                "not taken over, and not counted: {why}; if it runs, its guest stays paused. Mend that and restart \
                 ballastd, or end its VMM and remove {folder}"
            );
        } else {
            tracing::warn!("{why} It holds nothing that runs: remove {folder}");
        }
    }
    let keep_all = unread.iter().any(|unread| unread.may_run);
    lock(&manager.unread).extend(unread.into_iter().map(|unread| (unread.name.clone(), unread)));
    let running = running(manager, left)?;
    let stores: Vec<_> = running
        .iter()
        .map(|vm| (domain_of(manager, &vm.record), vm.folder.join(PMAP), vm.damage.clone()))
        .collect();
    let damages = manager.commons.recover(&stores, keep_all)?;
    Ok(running.into_iter().zip(damages).map(|(vm, damage)| book(manager, vm, damage)).collect())
}

/// A VM that a former manager had in its pager, and whose VMM runs.
struct Running {
    folder: PathBuf,
    record: Record,
    process: ProcessHandle,
    /// What is wrong with its files.
    damage: Option<String>,
}

/// Those that wait for a manager. VMs that are not paged are managed again at once; what remains of those that have
/// ended is cleared away.
fn running(manager: &Arc<Manager>, left: Vec<Left>) -> anyhow::Result<Vec<Running>> {
    let (mut running, mut ended) = (Vec::new(), Vec::new());
    for Left { folder, mut record, damage } in left {
        let opened = ProcessHandle::open(record.pid);
        // Looked at after the descriptor was made: from here on they are the same.
        let alive =
            record.is_alive().map_err(|why| anyhow::anyhow!("VM {}: {why}", record.name))?;
        let process = match alive.then_some(opened) {
            Some(Ok(process)) => process,
            // It has just ended, or long ago.
            Some(Err(e)) if e.raw_os_error() != Some(libc::ESRCH) => return Err(e.into()),
            Some(Err(_)) | None => {
                tracing::info!(vm = record.name, "ended while no manager ran");
                ended.push(record);
                continue;
            }
        };
        manager.renew(&folder, &mut record);
        if record.unpaged.is_some() {
            tokio::spawn(reach(
                manager.clone(),
                admit_unpaged(manager, folder, &record, process, None),
                record,
            ));
        } else {
            record.overhead = record.overhead.max(overhead_now(manager, &folder, &record));
            running.push(Running { folder, record, process, damage });
        }
    }
    manager.clear_ended(ended);
    Ok(running)
}

/// What the pager of a VM takes under this manager, which may be more than under the one that started it: its compressed tier
/// may have been made larger since. Its stage stays as it was made, whatever is sampled by now.
fn overhead_now(manager: &Manager, folder: &Path, record: &Record) -> Pages {
    let mut pager = pager_config(&manager.config(), has_large_pages(manager, record));
    if let Ok(stage) = Stage::layout_of(&folder.join(STAGE)) {
        // What large pages take of it is in it.
        pager = PagerConfig { stage, large_pages: false, ..pager };
    }
    let own = record.spec.as_ref().and_then(|spec| spec.overhead).unwrap_or(0);
    pager.overhead(record.size) + Bytes(own).pages_ceil()
}

fn has_large_pages(manager: &Manager, record: &Record) -> bool {
    record.spec.as_ref().is_some_and(|spec| manager.wants_large_pages(spec))
}

/// Books what a VM has, and lets its shim in, unless its pages cannot be read: `damage`.
fn book(manager: &Manager, vm: Running, damage: Option<String>) -> Waiting {
    let Running { folder, record, process, .. } = vm;
    let (overhead, min) = (record.overhead, record.params.min);
    manager.host.ledger.adopt(overhead);
    let held = Arc::new(Advance::book(manager.host.clone(), held(&folder, &record)));
    // What it has it keeps until it is taken over: nobody else is to have it.
    let min = min.max(held.pages());
    // Of a start that was cut short before its swap files were there, others are not promised the room for them.
    let swap = match record.swap {
        Some(_) => Pages::ZERO,
        None => record.size.saturating_sub(record.params.min),
    };
    let promise = Promise { min, overhead, swap };
    let pool = record.params.pool.clone();
    lock(&manager.starting).insert(record.name.clone(), Pledge { promise, pool, rebooted: None });
    let waits = Waits {
        since: Instant::now(),
        held: held.clone(),
        process: process.clone(),
        record: record.clone(),
        refused: damage.is_some(),
        why: damage.clone(),
    };
    lock(&manager.waiting).insert(record.name.clone(), waits);
    if let Some(why) = &damage {
        tracing::error!(vm = record.name, "not taken over: {why}; its guest stays paused");
    } else if record.frozen {
        // Its shim could not answer. If its pages still cannot be read, it is stopped again.
        let goes_on = process.signal(rustix::process::Signal::CONT).map_err(|e| e.to_string());
        let noted = goes_on
            .and_then(|()| Record::update(&folder, |record| record.frozen = false).map(drop));
        if let Err(e) = noted {
            tracing::warn!(vm = record.name, "letting it go on: {e}");
        }
    }
    let answer = damage.is_none().then(|| expect(manager, &record, &held));
    Waiting { folder, record, process, held, answer }
}

/// What a VM has that waits to be taken over. Where its pages cannot be read, what its VMM has.
fn held(folder: &Path, record: &Record) -> Pages {
    match advance::held(&folder.join(PMAP)) {
        Ok(held) => held,
        Err(_) => process::rss(record.pid).map_or(record.size, Bytes::pages_ceil).min(record.size),
    }
}

/// Lets its shim in.
fn expect(manager: &Manager, record: &Record, held: &Arc<Advance>) -> Answer {
    let swap = record.size.saturating_sub(record.params.min);
    let domain = domain_of(manager, record);
    let (sizes, overhead) = (parts_of(record.boot(), record.size), record.overhead);
    let (pid, held) = (record.pid, Some(held.clone()));
    let pager = pager_config(&manager.config(), has_large_pages(manager, record));
    manager.expect_shim(&record.name, |answer| Expected {
        pid,
        sizes,
        swap,
        overhead,
        domain,
        pager,
        held,
        answer,
    })
}

/// Where the pages are that it shares: if its salt was changed, not yet where it says.
fn domain_of(manager: &Manager, record: &Record) -> String {
    let named = || manager.commons.domain_name(&record.name, record.params.salt.as_ref());
    record.domain.clone().unwrap_or_else(named)
}

/// A VM whose guest is paused, or will be at its next fault.
pub struct Waiting {
    folder: PathBuf,
    record: Record,
    process: ProcessHandle,
    /// Booked for it until it is taken over or ends.
    held: Arc<Advance>,
    /// None: it is damaged, and its shim is not let in.
    answer: Option<Answer>,
}

/// What became of a VM that waited.
enum Outcome {
    /// Its pages are in the pager's hands.
    Paged(PagedVm),
    /// Its start had been cut short: it goes on without a pager.
    Unpaged,
    /// Its VMM ended before.
    Ended,
}

/// Waits for the shim of a VM, for as long as its VMM lives, and puts it back among the managed.
pub async fn take_over(manager: Arc<Manager>, mut waiting: Waiting) {
    let outcome = waiting.outcome(&manager).await;
    match outcome {
        Outcome::Paged(paged) => go_on_paged(manager, waiting, paged).await,
        Outcome::Unpaged => go_on_unpaged(manager, waiting).await,
        Outcome::Ended => clear_away(manager, waiting).await,
    }
}

/// What was said of a VM whose shim is to come.
struct Said {
    /// Since when it is waited for.
    since: tokio::time::Instant,
    /// When it is to be said that its shim has not come.
    late: tokio::time::Instant,
    /// Why it was not taken over, the last time.
    why: Option<String>,
}

impl Waiting {
    /// Waits for its shim, again whenever that is refused.
    async fn outcome(&mut self, manager: &Manager) -> Outcome {
        let begun = tokio::time::Instant::now();
        let mut said = Said { since: begun, late: begun + LATE, why: None };
        loop {
            let Some(coming) = &mut self.answer else {
                self.process.exited().await;
                return Outcome::Ended;
            };
            let name = &self.record.name;
            let why = match next_answer(manager, name, &self.process, coming, &mut said).await {
                Ok(Some(paged)) => return Outcome::Paged(paged),
                Ok(None) => return Outcome::Ended,
                Err(why) => why,
            };
            // Its start was cut short, and is refused now: it goes on without a pager.
            if let Ok(Some(record)) = Record::load(&self.folder)
                && record.unpaged.is_some()
            {
                // What is booked for it is what was booked, whatever its files say.
                self.record = Record { overhead: self.record.overhead, ..record };
                return Outcome::Unpaged;
            }
            // Its pages are where they were, and its shim asks again.
            said.refused(manager, name, why);
            // A takeover may have come far enough to find otherwise before it was undone.
            let (folder, record) = (self.folder.clone(), self.record.clone());
            // All that there is of its words is read, and others wait for this thread.
            let look = tokio::task::spawn_blocking(move || held(&folder, &record));
            self.held.renew(look.await.unwrap_or(self.record.size));
            self.answer = Some(expect(manager, &self.record, &self.held));
        }
    }
}

impl Said {
    /// Why it is not taken over yet, if that was not said last.
    fn refused(&mut self, manager: &Manager, name: &str, why: String) {
        if self.why.as_ref() != Some(&why) {
            tracing::error!(vm = name, "not taken over yet: {why}; its guest stays paused");
            if let Some(waits) = lock(&manager.waiting).get_mut(name) {
                waits.why = Some(why.clone());
            }
            self.why = Some(why);
        }
    }
}

/// The paged VM, or why its shim was refused. None: its VMM has ended. That its shim is late is said meanwhile, unless
/// it was refused before.
async fn next_answer(
    manager: &Manager,
    name: &str,
    process: &ProcessHandle,
    coming: &mut Answer,
    said: &mut Said,
) -> Result<Option<PagedVm>, String> {
    loop {
        tokio::select! {
            paged = &mut *coming => return match paged {
                Ok(Ok(paged)) => Ok(Some(paged)),
                Ok(Err(why)) => Err(why),
                Err(_) => Err("its handshake was broken off".to_owned()),
            },
            () = tokio::time::sleep_until(said.late), if said.why.is_none() => {
                tracing::warn!(
                    vm = name,
                    "its shim has not come for {} s: is its VMM stopped, or may it not reach the socket?",
                    said.since.elapsed().as_secs()
                );
                said.late = tokio::time::Instant::now() + STILL_LATE;
            }
            _ = process.exited() => return Ok(manager.last_answer(name, coming).await),
        }
    }
}

/// Puts a VM whose pages are in the pager's hands back among the managed.
async fn go_on_paged(manager: Arc<Manager>, waiting: Waiting, paged: PagedVm) {
    let Waiting { folder, record, process, .. } = waiting;
    // What others started tells nothing of the host.
    if record.spec.is_some() {
        *lock(&manager.accel) = record.accel.clone();
    }
    // Much may have happened meanwhile: nothing is taken from it until it was looked at.
    let vm = admit(
        &manager,
        folder,
        &record,
        process,
        unseen("just taken over"),
        (Some(paged), Pages::ZERO),
    );
    settled(&manager, &record.name);
    vm.has_started();
    // First without QEMU, which may wait for memory that only paging can make free.
    manager.look_at(&vm).await;
    reach(manager, vm, record).await;
}

/// Puts a VM whose start was cut short among the managed, without a pager. One of `vm run` is promised all that it may take
/// then, as where its start goes on by itself: it was admitted with its min.
async fn go_on_unpaged(manager: Arc<Manager>, waiting: Waiting) {
    let booked = match &waiting.record.spec {
        Some(spec) => manager.room_unpaged(spec).await.map(Some),
        None => Ok(None),
    };
    let booked = match booked {
        Ok(booked) => booked,
        Err(e) => {
            let why = waiting.record.unpaged.as_deref().unwrap_or_default();
            tracing::error!(
                vm = waiting.record.name,
                "ended: it cannot be paged ({why}), and unpaged: {e}"
            );
            let _ = waiting.process.kill();
            waiting.process.exited().await;
            return clear_away(manager, waiting).await;
        }
    };
    let Waiting { folder, record, process, held, .. } = waiting;
    manager.host.ledger.release(record.overhead);
    drop(held);
    let vm = admit_unpaged(&manager, folder, &record, process, booked);
    // Only now: whoever looks for it finds it here or there.
    settled(&manager, &record.name);
    reach(manager, vm, record).await;
}

/// Clears away what remains of a VM that has ended.
async fn clear_away(manager: Arc<Manager>, waiting: Waiting) {
    let Waiting { folder, record, answer, .. } = waiting;
    let name = record.name.clone();
    tracing::info!(vm = name, "ended before it was taken over");
    manager.host.ledger.release(record.overhead);
    if answer.is_some() {
        let (manager, domain) = (manager.clone(), domain_of(&manager, &record));
        let pmap = folder.join(PMAP);
        let work = tokio::task::spawn_blocking(move || manager.commons.forget(&domain, &pmap));
        if let Err(e) = work.await {
            tracing::error!(vm = name, "what it shared: {e}");
        }
    }
    // Its swap files may have been made since it was read.
    let record = Record::load(&folder).ok().flatten().unwrap_or(record);
    manager.clear(&name, record).await;
    settled(&manager, &name);
}

/// It waits no longer, and its name is not held for it any more.
fn settled(manager: &Manager, name: &str) {
    lock(&manager.waiting).remove(name);
    manager.promise_settled(name);
}

fn admit(
    manager: &Arc<Manager>,
    folder: PathBuf,
    record: &Record,
    process: ProcessHandle,
    management: Management,
    (paged, external): (Option<PagedVm>, Pages),
) -> Arc<Vm> {
    // Its start may have been begun anew since the record was read.
    let mapped_ms = Record::load(&folder).ok().flatten().and_then(|record| record.mapped_ms);
    let measured = Measured::in_record(record);
    let (objection, mapped) = (record.objection.clone(), record.mapped.clone());
    let past = Past { objection, mapped, ..Past::default() };
    let config = manager.config();
    let vm = manager.admit(NewVm {
        id: manager.next_id(),
        name: record.name.clone(),
        spec: record.spec.clone(),
        folder,
        accel: record.accel.clone(),
        size: record.size,
        boot: record.boot(),
        plugged: None,
        overhead: record.overhead,
        params: record.params.clone(),
        process,
        management,
        past,
        external,
        vmm: Pages::ZERO,
        paged,
        control: BalloonControl::new(config.balloon),
        set: Measured::working_set(measured.as_ref(), config.sampling, record.size),
        built: built_at(mapped_ms),
        seeks_qmp: in_reach(record),
    });
    if let Some(measured) = measured {
        measured.tell(&vm);
        // What is measured from now on is newer.
        measured::forget(&vm);
    }
    vm
}

/// What its VMM has. At least a page: nothing booked means that it has ended.
fn uses_now(record: &Record) -> Pages {
    process::rss(record.pid).map_or(record.size, Bytes::pages_ceil).max(Pages(1))
}

/// A VM that never was paged needs nobody to go on: it is there at once, with all that it takes booked; or what was booked for
/// it before, which it may take.
fn admit_unpaged(
    manager: &Arc<Manager>,
    folder: PathBuf,
    record: &Record,
    process: ProcessHandle,
    booked: Option<Pages>,
) -> Arc<Vm> {
    let external = booked.unwrap_or_else(|| {
        let uses = uses_now(record);
        manager.host.ledger.adopt(uses);
        uses
    });
    manager.host.ledger.adopt(record.overhead);
    // One that somebody else started may have no balloon that anybody knows of.
    let mode = if in_reach(record) { Mode::BalloonOnly } else { Mode::Unmanaged };
    let management = Management { mode, reason: record.unpaged.clone() };
    let vm = admit(manager, folder, record, process, management, (None, external));
    vm.has_started();
    vm
}

/// Whether somebody has said where its QMP is.
fn in_reach(record: &Record) -> bool {
    record.spec.is_some() || record.qmp.is_some()
}

/// Finds its QMP again, where it has one.
async fn reach(manager: Arc<Manager>, vm: Arc<Vm>, record: Record) {
    let own = record.spec.is_some().then(|| manager.paths(&vm.name).qmp_socket);
    // Nobody has said where it is, so far.
    let Some(socket) = record.qmp.or(own) else { return };
    manager.find_qmp(&vm, socket).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::VmSpec;
    use ballast_pager::stage::StageLayout;

    use crate::vm::{Asked, VmParams};

    /// A manager that samples more books nothing for that: there may be no memory for it.
    #[tokio::test]
    async fn the_stage_of_a_vm_that_is_taken_over_is_booked_as_it_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let size = Pages::from_mib(64);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let (pid, accel) = (std::process::id(), ballast_qemu::AccelChoice::Kvm);
        let record = Record::new("a", None, params, size, Pages(5), pid, &accel);
        let pager = pager_config(&manager.config(), false);
        let booked = || overhead_now(&manager, dir.path(), &record);
        assert_eq!(booked(), pager.overhead(size), "without a file it is made as all are now");
        for holds in [pager.stage.holds - 100, pager.stage.holds + 512] {
            let path = dir.path().join(STAGE);
            let layout = StageLayout { holds, ..pager.stage };
            drop(Stage::create(&path, layout).unwrap());
            assert_eq!(booked(), PagerConfig { stage: layout, ..pager }.overhead(size));
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// Nobody knows what those hold that may run; a copy of a folder holds nothing.
    #[tokio::test]
    async fn pages_that_nobody_names_stay_for_who_may_run_and_not_for_a_copy() {
        for may_run in [true, false] {
            let dir = tempfile::tempdir_in("/dev/shm").unwrap();
            let manager = crate::manager::tests::manager(dir.path());
            let store = manager.config().run_dir.join("store/vm-b.pages");
            std::fs::write(&store, [7; 3 * 4096]).unwrap();
            let (folder, why) = (manager.folder_of("a.old"), "a copy".to_owned());
            let unread = vec![Unread { name: "a.old".into(), folder, why, may_run }];
            announce(&manager, Survey { unread, ..Survey::default() }).unwrap();
            assert_eq!(store.exists(), may_run);
            let kept = if may_run { Pages(3) } else { Pages::ZERO };
            assert_eq!(manager.commons.domain("vm-b").unwrap().counts().1, kept);
        }
    }

    /// Its files say what the manager that started it booked; this one may have booked more.
    #[tokio::test]
    async fn a_start_that_was_cut_short_gives_back_what_was_booked_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let (folder, size) = (manager.folder_of("a"), Pages::from_mib(1 << 12));
        std::fs::create_dir_all(&folder).unwrap();
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let (pid, accel) = (std::process::id(), ballast_qemu::AccelChoice::Kvm);
        let old = Record::new("a", None, params, size, Pages(5), pid, &accel);
        let (used, booked) = (manager.host.ledger.used(), Pages(9));
        manager.host.ledger.adopt(booked);
        let (said, answer) = tokio::sync::oneshot::channel();
        let waiting = Waiting {
            folder: folder.clone(),
            record: Record { overhead: booked, ..old.clone() },
            process: ProcessHandle::open(pid).unwrap(),
            held: Arc::new(Advance::book(manager.host.clone(), Pages(3))),
            answer: Some(answer),
        };
        Record { unpaged: Some("cut short".to_owned()), ..old }.save(&folder).unwrap();
        let _ = said.send(Err("cut short".to_owned()));
        take_over(manager.clone(), waiting).await;
        let vm = manager.vm("a").unwrap();
        assert_eq!((vm.overhead(), vm.paged().is_some()), (booked, false));
        assert_eq!(manager.host.ledger.used(), used + booked + vm.consumed());
    }

    /// One of `vm run` that is started with a pager, and refused it by the next manager, with its VMM.
    fn cut_short(manager: &Manager, max: Bytes) -> (Waiting, std::process::Child) {
        let vmm = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let folder = manager.folder_of("a");
        std::fs::create_dir_all(&folder).unwrap();
        let params = VmParams::resolve(&[], "a", max.pages().into(), Asked::default()).unwrap();
        let spec = VmSpec { name: "a".into(), max: max.0, ..VmSpec::default() };
        let accel = ballast_qemu::AccelChoice::Kvm;
        let record = Record::new("a", Some(&spec), params, max.pages(), Pages(9), vmm.id(), &accel);
        record.save(&folder).unwrap();
        let process = ProcessHandle::open(vmm.id()).unwrap();
        let waiting = book(manager, Running { folder, record, process, damage: None }, None);
        (waiting, vmm)
    }

    #[tokio::test]
    async fn what_a_start_was_promised_of_swap_is_not_promised_again_after_it_was_cut_short() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let swap = || lock(&manager.starting)["a"].promise.swap;
        let (mut waiting, mut vmm) = cut_short(&manager, Bytes::from_mib(64));
        assert_eq!(swap(), Pages::from_mib(64));
        // Where its files are there, they have that room.
        waiting.record.swap = Some(Vec::new());
        let Waiting { folder, record, process, .. } = waiting;
        book(&manager, Running { folder, record, process, damage: None }, None);
        assert_eq!(swap(), Pages::ZERO);
        vmm.kill().unwrap();
        vmm.wait().unwrap();
    }

    /// As where its start goes on by itself: nothing but its balloon could take any of it.
    #[tokio::test]
    async fn a_start_that_was_cut_short_and_has_no_pager_is_promised_all_of_it_or_ended() {
        for (mib, fits) in [(64, true), (1 << 12, false)] {
            let dir = tempfile::tempdir().unwrap();
            let manager = crate::manager::tests::manager(dir.path());
            let used = manager.host.ledger.used();
            let (mut waiting, mut vmm) = cut_short(&manager, Bytes::from_mib(mib));
            // Its shim has come.
            lock(&manager.expected).remove("a");
            let (said, answer) = tokio::sync::oneshot::channel();
            waiting.answer = Some(answer);
            let unpaged = Some("no room for its swap".to_owned());
            Record::update(&manager.folder_of("a"), |record| record.unpaged = unpaged).unwrap();
            let _ = said.send(Err("no room for its swap".to_owned()));
            // Its QMP is looked for as long as it lives.
            let end = tokio::spawn(take_over(manager.clone(), waiting));
            while !lock(&manager.starting).is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(lock(&manager.waiting).is_empty());
            if fits {
                let vm = manager.vm("a").unwrap();
                assert!(vm.paged().is_none());
                assert_eq!(vm.consumed(), Pages::from_mib(mib));
                let promised = manager.promised_to(&vm, &vm.params()).2;
                assert_eq!(promised, Pages::from_mib(mib) + vm.overhead());
                assert_eq!(manager.host.ledger.used(), used + promised);
                vmm.kill().unwrap();
            } else {
                assert!(manager.vm("a").is_err() && !manager.folder_of("a").exists());
                assert_eq!(manager.host.ledger.used(), used);
            }
            // Whoever looked at it first has its status.
            let _ = vmm.wait();
            assert!(!Path::new(&format!("/proc/{}", vmm.id())).exists());
            end.abort();
        }
    }
}
