//! Where shims arrive: the handshake with a VMM that has just mapped its guest's RAM, or that comes
//! back after the manager was restarted, up to the moment its pages are in the pager's hands. One that comes
//! back to the manager that it had is `rejoin`'s.
//!
//! One thread accepts; each connection has a thread for the length of its handshake, so a shim that
//! says nothing, or nonsense, keeps nobody else waiting.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::VmSpec;
use ballast_api::record::process_started;
use ballast_pager::advance::{self, Advance};
use ballast_pager::guest_ram::{GuestRam, RamLayout, RamPart};
use ballast_pager::run_files::PMAP;
use ballast_pager::service::{Inherited, PagedVm, PagerConfig, VmFiles};
use ballast_pager::sharing::Domain;
use ballast_pager::stage::StageLayout;
use ballast_pager::swap::SwapSpace;
use ballast_qemu::unasked_large_pages;
use ballast_shim_proto::{
    Connection, ConnectionError, DecodeError, Hello, Listener, Message, Part, Peer,
};
use ballast_uffd::Uffd;
use ballast_units::{Bytes, PAGE_SIZE, Pages};
use rustix::fs::SealFlags;
use tokio::sync::oneshot;

use crate::config::Config;
use crate::handshakes::{Connections, Handshake, Handshakes, Keeper};
use crate::manager::{Manager, NotTaken};
use crate::numa;
use crate::records::Record;
use crate::rejoin::rejoin;
use crate::shim_link::ShimLink;
use crate::swap;
use crate::sync::lock;
use crate::upgrade::since_boot_ms;

// What a shim may announce can be paged, and the other way round.
const _: () = assert!(ballast_pager::guest_ram::MAX_PARTS == ballast_shim_proto::MAX_PARTS);

/// How long a shim may take for one step of the handshake.
const STEP: Duration = Duration::from_secs(10);
/// After a handshake that led to nothing: no user fills the log faster than this.
const REFUSED: Duration = Duration::from_millis(200);
/// How often connections whose shims are gone are let go of.
const PRUNE: Duration = Duration::from_secs(10);

/// A VMM that the manager has started, or knows from before, and whose shim is to come.
pub struct Expected {
    /// The process that the shim must come from.
    pub pid: u32,
    /// Of its RAM, part by part: what the shim announces must be as large.
    pub sizes: Vec<Pages>,
    /// For the files that are made for it; of one that is taken over, they are there.
    pub swap: Pages,
    /// Reserved by who announces it, whose it is again if the answer is a refusal.
    pub overhead: Pages,
    /// With whom it shares pages.
    pub domain: String,
    /// How its pager is laid out: what was booked for it holds that much, and what was reloaded meanwhile changes neither.
    pub pager: PagerConfig,
    /// What it holds, booked until it is taken over. None: it is new.
    pub held: Option<Arc<Advance>>,
    /// Told once, when the handshake has come to its end.
    pub answer: oneshot::Sender<Result<PagedVm, String>>,
}

/// The paged VM, or the refusal. Must be awaited to its end: a paged VM that nobody takes is lost to
/// the books.
pub type Answer = oneshot::Receiver<Result<PagedVm, String>>;

/// How the pager of a VM that is started is laid out. It is seeded once its process is known.
pub fn pager_config(config: &Config, large_pages: bool) -> PagerConfig {
    let holds = u64::from(config.sampling.samples) + u64::from(config.sampling.samples) / 4;
    PagerConfig {
        fault_around: config.fault_around,
        stage: StageLayout { holds, ..PagerConfig::default().stage },
        large_pages,
        compression: config.compression,
        check: config.check_takeovers || PagerConfig::default().check,
        ..PagerConfig::default()
    }
}

impl Manager {
    /// Whether a VM that is started gets large pages.
    pub fn wants_large_pages(&self, spec: &VmSpec) -> bool {
        let from = self.config().large_pages_from;
        let size = Bytes(spec.max).pages() + Bytes(spec.hotplug).pages();
        spec.large_pages.unwrap_or_else(|| from.is_some_and(|from| size >= from))
    }

    /// Announces a VMM whose shim is to come. The receiver gets the paged VM, or the refusal.
    pub fn expect_shim(
        &self,
        name: &str,
        expected: impl FnOnce(oneshot::Sender<Result<PagedVm, String>>) -> Expected,
    ) -> Answer {
        let (answer, receiver) = oneshot::channel();
        lock(&self.expected).insert(name.to_owned(), expected(answer));
        receiver
    }

    /// Of a VMM that has ended: its shim is expected no longer. A handshake that is under way ends now, one way or
    /// the other: the paged VM, if it ended well.
    pub async fn last_answer(&self, name: &str, answer: &mut Answer) -> Option<PagedVm> {
        lock(&self.expected).remove(name);
        match answer.await {
            Ok(Ok(paged)) => Some(paged),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Removes what a manager that died in the middle of a start had made for it: the VMM has not come out
    /// of its mmap since, and has no page that could be lost.
    fn forget_cut_short(&self, name: &str) {
        let record = Record::load(&self.folder_of(name)).ok().flatten();
        for file in self.remove_pages(name, record.as_ref()) {
            tracing::info!(vm = name, "{file} of a start that was cut short: made anew");
        }
    }

    /// Of a VM that goes on without a pager once its shim hears that. First: the next manager must not wait
    /// for that shim.
    fn note_unpaged(&self, name: &str, why: &str) {
        let note = |record: &mut Record| record.unpaged = Some(why.to_owned());
        if let Err(e) = Record::update(&self.folder_of(name), note) {
            tracing::error!(vm = name, "{e}: the next manager will wait for its shim");
        }
    }

    /// A VMM that hands in somebody else's memory as its own would have it evicted twice.
    fn check_ram_is_its_own(&self, id: (u64, u64)) -> Result<(), String> {
        let owner = self.vms().into_iter().find(|vm| {
            vm.paged().as_ref().is_some_and(|paged| {
                paged.memory().backend().identities().is_ok_and(|others| others.contains(&id))
            })
        });
        if let Some(owner) = owner {
            return Err(format!("its RAM file is the RAM of '{}'", owner.name));
        }
        if self.commons.holds(id) {
            return Err("its RAM file is one of the manager's own".into());
        }
        Ok(())
    }
}

/// Accepts shims until the manager ends.
pub fn serve(manager: &Arc<Manager>, listener: &Listener) {
    let handshakes = Arc::new(Handshakes::default());
    let connections = Arc::new(Connections::default());
    let mut pruned = Instant::now();
    while !manager.is_stopping() {
        if pruned.elapsed() >= PRUNE {
            pruned = Instant::now();
            connections.prune();
        }
        let connection = match listener.accept(Some(Duration::from_millis(250))) {
            Ok(connection) => connection,
            Err(ConnectionError::TimedOut(_)) => continue,
            Err(e) => {
                tracing::error!("accepting a shim: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let Ok(peer) = connection.peer() else { continue };
        let is_expected = lock(&manager.expected).values().any(|vm| vm.pid == peer.pid);
        let connection = Arc::new(connection);
        let Some(place) = handshakes.begin(&connection, peer, is_expected) else {
            tracing::debug!("too many shims in their handshakes: process {} turned away", peer.pid);
            continue;
        };
        let (manager, connections) = (manager.clone(), Keeper::of(&connections));
        let spawned = std::thread::Builder::new()
            .name("shim".into())
            .spawn(move || greet(&manager, connection, peer, place, &connections));
        if let Err(e) = spawned {
            tracing::error!("a thread for a shim: {e}");
        }
    }
}

/// One handshake.
fn greet(
    manager: &Arc<Manager>,
    connection: Arc<Connection>,
    peer: Peer,
    place: Handshake,
    connections: &Keeper,
) {
    if let Err(why) = shake_hands(manager, &connection, peer, &place, connections) {
        if place.made_room() {
            return tracing::debug!("a shim in process {} said nothing, and others came", peer.pid);
        }
        let Peer { pid, uid, .. } = peer;
        match place.to_tell(uid, REFUSED) {
            Some(0) => tracing::warn!("a shim in process {pid}: {why}"),
            Some(more) => tracing::warn!(
                "a shim in process {pid}: {why} (and {more} of user {uid} before it)"
            ),
            None => tracing::debug!("a shim in process {pid}: {why}"),
        }
        std::thread::sleep(REFUSED);
    }
}

/// One that comes over and over fills the log no faster than one that is refused.
fn tell_of_again(vm: &str, peer: Peer, place: &Handshake) {
    let what = "its shim has come again: their conversation had broken off";
    match place.to_tell(peer.uid, REFUSED) {
        Some(_) => tracing::info!(vm, "{what}"),
        None => tracing::debug!(vm, "{what}"),
    }
}

/// From the first words to a paged VM, or why it is none.
fn shake_hands(
    manager: &Arc<Manager>,
    connection: &Arc<Connection>,
    peer: Peer,
    place: &Handshake,
    connections: &Keeper,
) -> Result<(), String> {
    let (hello, fds) = first_words(manager, connection, peer)?;
    if !place.has_spoken() {
        return Err("it spoke too late".to_owned());
    }
    let since = Instant::now();
    let name = hello.vm.as_str().to_owned();
    if !hello.reconnect {
        manager.wait_for_namesake(&name);
    }
    // It runs on without a manager, unless it comes again: then its pages stay in the pager's hands, or the next one's.
    let turn_away = |why: String| {
        if !hello.reconnect {
            manager.refused.note(peer.pid, Some(&hello), &why);
        }
        refuse(connection, why)
    };
    let known = expected(manager, &name, peer).map_err(turn_away)?;
    // Refused, it is a VM all the same: who announced it goes on with it.
    let is_announced = known.is_some();
    let expected = match known {
        Some(expected) => expected,
        None if hello.reconnect => {
            return rejoin(manager, connection, &hello, &fds, peer, connections)
                .map(|()| tell_of_again(hello.vm.as_str(), peer, place))
                .map_err(|why| refuse(connection, why));
        }
        None => loop {
            // Not refused: hung up on, it tries again for a while.
            manager.wait_for_reopening(since)?;
            match manager.adopt(&hello, peer, since) {
                Ok(expected) => break expected,
                Err(NotTaken::Ending) => {}
                Err(NotTaken::Refused(failure)) => return Err(turn_away(failure.message)),
            }
        },
    };
    match take_charge(manager, connection, &hello, fds, &expected, peer) {
        Ok(paged) => {
            // What it says answers the pager, which reads it. Before anybody hears of it: it may come again at once.
            connections.keep(peer.pid, connection.clone());
            if let Err(Ok(paged)) = expected.answer.send(Ok(paged)) {
                if hello.reconnect {
                    paged.undo_take_over(expected.held.as_deref());
                } else if manager.is_stopping() || runs(peer.pid) {
                    // Its guest runs, and counts on a pager: the next manager finds it as it is.
                    paged.leave();
                } else {
                    // With what was reserved for it: nobody else has that any more.
                    paged.release();
                }
                connections.hang_up(peer.pid);
                return Err("nobody waits for it any more".to_owned());
            }
            Ok(())
        }
        Err(why) => {
            if !hello.reconnect && !is_paged_already(manager, &hello, &expected) {
                manager.note_unpaged(&name, &why);
            }
            let why = if is_announced { refuse(connection, why) } else { turn_away(why) };
            let _ = expected.answer.send(Err(why.clone()));
            Err(why)
        }
    }
}

/// Whether there is such a process; also where that cannot be told.
fn runs(pid: u32) -> bool {
    !matches!(process_started(pid), Ok(None))
}

/// The VM that this shim is of, if it was announced. One that is being started may be a moment ahead
/// of its announcement.
fn expected(manager: &Manager, name: &str, peer: Peer) -> Result<Option<Expected>, String> {
    let deadline = Instant::now() + STEP;
    let waits = lock(&manager.waiting).get(name).cloned();
    if let Some(why) = waits.filter(|waits| waits.refused).and_then(|waits| waits.why) {
        return Err(why);
    }
    loop {
        {
            let mut all = lock(&manager.expected);
            if let Some(pid) = all.get(name).map(|expected| expected.pid) {
                // It stays announced: the right one can still come.
                return if pid == peer.pid {
                    Ok(all.remove(name))
                } else {
                    Err(format!("'{name}' is expected from process {pid}, not {}", peer.pid))
                };
            }
        }
        if !lock(&manager.starting).contains_key(name) || Instant::now() > deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn first_words(
    manager: &Manager,
    connection: &Connection,
    peer: Peer,
) -> Result<(Hello, Vec<OwnedFd>), String> {
    match connection.recv(Some(STEP)) {
        Ok((Message::Hello(hello), fds)) => Ok((hello, fds)),
        Ok((other, _)) => {
            Err(refuse(connection, format!("sent {} instead of Hello", other.name())))
        }
        // Without an answer it would take us for a manager that hangs, and end its VMM.
        Err(ConnectionError::Decode(e @ DecodeError::Version(_))) => {
            let why = e.to_string();
            manager.refused.note(peer.pid, None, &why);
            Err(refuse(connection, why))
        }
        Err(e @ (ConnectionError::Strange { .. } | ConnectionError::Lost(_))) => {
            let why = e.to_string();
            if let ConnectionError::Strange { message, .. } = e
                && let Message::Hello(hello) = *message
                && !hello.reconnect
            {
                manager.refused.note(peer.pid, Some(&hello), &why);
            }
            Err(refuse(connection, why))
        }
        Err(e) => Err(e.to_string()),
    }
}

fn refuse(connection: &Connection, why: String) -> String {
    let _ = connection.send(&Message::refuse(&why), &[]);
    why
}

/// Whether a VMM that says that it was never paged was: the pager has pages of it, for which others pay once their books
/// are thrown away. Whether its start was cut short is its own word alone.
fn is_paged_already(manager: &Manager, hello: &Hello, expected: &Expected) -> bool {
    let is_left = expected.held.is_some() && !hello.reconnect;
    let pmap = manager.folder_of(hello.vm.as_str()).join(PMAP);
    is_left && advance::has_any(&pmap).unwrap_or(true)
}

/// Checks what the shim announces and starts the pager over it, or says why not.
fn take_charge(
    manager: &Manager,
    connection: &Arc<Connection>,
    hello: &Hello,
    fds: Vec<OwnedFd>,
    expected: &Expected,
    peer: Peer,
) -> Result<PagedVm, String> {
    if is_paged_already(manager, hello, expected) {
        return Err("it was paged already, and must come as what it is".to_owned());
    }
    if hello.page_size as usize != PAGE_SIZE {
        return Err(format!("RAM with pages of {} bytes: only 4 KiB pages", hello.page_size));
    }
    let layout = announced(hello, &expected.sizes)?;
    let mut ram_files = fds;
    let rest = ram_files.split_off(hello.parts.len().min(ram_files.len()));
    check_parts(manager, hello, &ram_files, peer)?;
    // Of this thread, which is this handshake's, and of the pager's threads that it starts.
    numa::follow(peer.pid);
    let config = PagerConfig { seed: u64::from(expected.pid), ..expected.pager };
    let domain = manager.commons.domain(&expected.domain)?;
    let seed = config.seed;
    let arrival = Arrival {
        manager,
        connection,
        hello,
        expected,
        pid: peer.pid,
        config,
        domain: &domain,
        ram_files,
        layout,
    };
    let mut paged = if hello.reconnect { arrival.take_over(rest)? } else { arrival.start()? };
    share(manager, hello.vm.as_str(), &mut paged, &domain, seed);
    Ok(paged)
}

/// Each part of the RAM that came is a file that can be paged, and nobody else's memory.
fn check_parts(
    manager: &Manager,
    hello: &Hello,
    ram_files: &[OwnedFd],
    peer: Peer,
) -> Result<(), String> {
    let mut seen = Vec::new();
    for (part, ram_file) in hello.parts.iter().zip(ram_files) {
        check_ram_file(ram_file, part)?;
        let stat = rustix::fs::fstat(ram_file).map_err(|e| format!("its RAM file: {e}"))?;
        let id = (stat.st_dev, stat.st_ino);
        manager.check_ram_is_its_own(id)?;
        if seen.contains(&id) {
            return Err("two parts of its RAM are the same file".into());
        }
        seen.push(id);
        // What it holds would meet no fault, and be in no books. Between the mapping of the first part and that of the last,
        // nobody waits for a pager.
        if !hello.reconnect && stat.st_blocks > 0 {
            return Err(match hello.parts.len() {
                1 => "its RAM file holds something already".into(),
                _ => "a part of its RAM was used before all were there".into(),
            });
        }
        check_evictable(hello, ram_file, peer)?;
    }
    Ok(())
}

/// The pages of a part can be taken: they are neither sealed nor in large pages that nobody asked for. Of a VM that was
/// paged before, it is only said if they are.
fn check_evictable(hello: &Hello, ram_file: &OwnedFd, peer: Peer) -> Result<(), String> {
    let name = hello.vm.as_str();
    match seals_in_the_way(ram_file) {
        // It runs, and its pages are in the pager's hands: without, nobody would serve it.
        Some(why) if hello.reconnect => tracing::error!(vm = name, "{why}"),
        Some(why) => return Err(why),
        None => {}
    }
    match unasked_large_pages(ram_file, peer.pid) {
        Some(why) if hello.reconnect => {
            tracing::error!(vm = name, "its pages may be lost: {why}");
        }
        Some(why) => return Err(why),
        None => {}
    }
    Ok(())
}

/// A VM of which charge is taken, once its RAM was checked.
struct Arrival<'a> {
    manager: &'a Manager,
    connection: &'a Arc<Connection>,
    hello: &'a Hello,
    expected: &'a Expected,
    pid: u32,
    config: PagerConfig,
    /// With whom it shares pages.
    domain: &'a Arc<Domain<GuestRam>>,
    ram_files: Vec<OwnedFd>,
    layout: RamLayout,
}

impl Arrival<'_> {
    /// Of a VM that was paged before: its pager goes on from what the last one left. Its userfaultfd is the first of
    /// `rest`, the descriptors that came behind its RAM.
    fn take_over(self, rest: Vec<OwnedFd>) -> Result<PagedVm, String> {
        let Arrival { manager, connection, hello, expected, pid, domain, .. } = self;
        let name = hello.vm.as_str();
        let folder = manager.folder_of(name);
        let uffd = rest.into_iter().next();
        let uffd = uffd.ok_or("Hello after a restart without the userfaultfd")?;
        let uffd = Uffd::from_fd(uffd).map_err(|e| format!("its userfaultfd: {e}"))?;
        let ram = GuestRam::of_parts(uffd, self.ram_files, self.layout);
        see_accesses(name, &ram, pid);
        if hello.remaps() {
            manager.commons.connect(&ram, connection.clone(), (pid, hello), domain)?;
        }
        let files = VmFiles::new(&folder, open_swap(manager, name, &folder)?);
        let inherited = Inherited { domain: Some(domain), advance: expected.held.as_deref() };
        let (overhead, host) = (expected.overhead, manager.host.clone());
        let (paged, found) =
            PagedVm::take_over(name, self.config, files, ram, overhead, host, inherited)
                .map_err(|e| e.to_string())?;
        tracing::info!(
            vm = name,
            busy = found.busy,
            staged = found.staged.len(),
            absent = found.absent,
            "taken over"
        );
        if let Err(e) = managed(connection) {
            // It is taken over anew, and booked then as its own again.
            paged.undo_take_over(expected.held.as_deref());
            return Err(e);
        }
        Ok(paged)
    }

    /// Of a VM that has just mapped its RAM, and waits in that mmap.
    fn start(self) -> Result<PagedVm, String> {
        let Arrival { manager, connection, hello, expected, pid, domain, .. } = self;
        let name = hello.vm.as_str();
        let folder = manager.folder_of(name);
        let uffd = receive_uffd(connection, hello)?;
        let ram = GuestRam::of_parts(uffd, self.ram_files, self.layout);
        manager.forget_cut_short(name);
        let files = VmFiles::new(&folder, make_swap(manager, name, &folder, expected.swap)?);
        let host = manager.host.clone();
        let paged = PagedVm::start(name, self.config, files, ram, expected.overhead, host)
            .map_err(|e| e.to_string())?;
        // From here on faults are served; only now may the VMM's mmap return.
        if let Err(e) = managed(connection) {
            // Its shim is gone, or has given up while swap files were made, and its guest may run by now: what it has
            // written is its own. What is reserved for it stays so: the caller's.
            paged.give_up();
            manager.host.ledger.adopt(expected.overhead);
            return Err(e);
        }
        see_accesses(name, paged.memory().backend(), pid);
        if hello.remaps() {
            let ram = paged.memory().backend();
            let peer = (pid, hello);
            if let Err(e) = manager.commons.connect(ram, connection.clone(), peer, domain) {
                tracing::error!(vm = name, "{e}: its pages are not shared");
                ram.mappings().reach(Box::new(ShimLink::new(connection.clone(), hello)));
            }
        }
        Ok(paged)
    }
}

/// Has a VM share its pages in its domain from now on.
fn share(
    manager: &Manager,
    name: &str,
    paged: &mut PagedVm,
    domain: &Arc<Domain<GuestRam>>,
    seed: u64,
) {
    if let Err(e) = paged.share_in(domain, manager.commons.control.clone(), seed) {
        // Its pages are in the pager's hands already: it does without.
        tracing::error!(vm = name, "{e}: its pages are not shared");
    }
}

/// The swap files of a VM that runs, and its record with them.
fn open_swap(manager: &Manager, name: &str, folder: &Path) -> Result<SwapSpace, String> {
    let recorded = Record::load(folder)?.and_then(|record| record.swap);
    let swap = manager.swap.open(name, recorded.as_deref()).map_err(|e| e.to_string())?;
    let files = swap::files(&swap);
    if recorded.as_ref() != Some(&files)
        && let Err(e) = Record::must_update(folder, |record| record.swap = Some(files))
    {
        // Found without; the next manager finds them in the same way.
        tracing::warn!(vm = name, "{e}");
    }
    Ok(swap)
}

/// New swap files, noted in the VM's record, as is that its RAM is mapped.
fn make_swap(
    manager: &Manager,
    name: &str,
    folder: &Path,
    size: Pages,
) -> Result<SwapSpace, String> {
    // Once a VM is admitted, its pages have a place to go (OSDI'02 s.6.2).
    let swap = manager.swap.create(name, size).map_err(|e| e.to_string())?;
    manager.swap_made(name);
    let places = swap::files(&swap);
    let noted = Record::must_update(folder, |record| {
        record.swap = Some(places);
        record.mapped_ms = Some(since_boot_ms());
    });
    if let Err(e) = noted {
        swap.remove();
        return Err(e);
    }
    Ok(swap)
}

fn see_accesses(name: &str, ram: &GuestRam, pid: u32) {
    if let Err(e) = ram.see_accesses(pid) {
        tracing::warn!(vm = name, "which pages it uses cannot be seen: process {pid}: {e}");
    }
}

/// Faults are served, and what the shim says from now on answers the pager.
///
/// # Errors
/// The connection has ended.
pub fn managed(connection: &Connection) -> Result<(), String> {
    connection.send(&Message::Managed, &[]).map_err(|e| e.to_string())
}

/// Lends the shim the right to create a userfaultfd that also sees faults in the kernel.
fn receive_uffd(connection: &Connection, hello: &Hello) -> Result<Uffd, String> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")
        .map_err(|e| format!("/dev/userfaultfd: {e}: the manager must be able to open it"))?;
    connection
        .send(&Message::Welcome { version: hello.version }, &[device.as_fd()])
        .map_err(|e| e.to_string())?;
    match connection.recv(Some(STEP)) {
        Ok((Message::Ready { .. }, fds)) => {
            let fd = fds.into_iter().next().ok_or("Ready without a userfaultfd")?;
            Uffd::from_fd(fd).map_err(|e| format!("its userfaultfd: {e}"))
        }
        Ok((Message::Failed { step, errno }, _)) => {
            Err(format!("userfaultfd, step {step:?}: {}", std::io::Error::from_raw_os_error(errno)))
        }
        Ok((other, _)) => Err(format!("expected Ready, got {other:?}")),
        Err(e) => Err(e.to_string()),
    }
}

/// A page of a file that may not be written cannot be freed either.
fn seals_in_the_way(fd: &OwnedFd) -> Option<String> {
    let seals = match rustix::fs::fcntl_get_seals(fd) {
        Ok(seals) => seals,
        Err(e) => return Some(format!("the seals of its RAM file: {e}")),
    };
    let write = SealFlags::WRITE | SealFlags::FUTURE_WRITE;
    let is_open = seals.intersects(write) || !seals.contains(SealFlags::SEAL);
    let advice =
        "leave seal=on of its memory-backend-memfd as it is, or add F_SEAL_SEAL to the file";
    is_open.then(|| format!("its RAM file is, or can be, sealed against writing: {advice}"))
}

/// The parts of the RAM that a shim announces, if they are those that are expected of it.
fn announced(hello: &Hello, sizes: &[Pages]) -> Result<RamLayout, String> {
    let (came, wanted) = (hello.parts.len(), sizes.len());
    if came != wanted {
        let of = |n: usize| if n == 1 { "one part".to_owned() } else { format!("{n} parts") };
        let verb = if wanted == 1 { "was" } else { "were" };
        return Err(format!("its RAM has {}, {} {verb} expected", of(came), of(wanted)));
    }
    let mut parts = Vec::with_capacity(wanted);
    for (n, (part, size)) in hello.parts.iter().zip(sizes).enumerate() {
        if part.len != size.bytes() {
            let which = if wanted == 1 { String::new() } else { format!("part {} of ", n + 1) };
            return Err(format!("{which}its RAM has {}, {} was expected", part.len, size.bytes()));
        }
        parts.push(RamPart { base: part.addr, len: *size, file_offset: part.file_offset });
    }
    RamLayout::new(&parts).map_err(|what| format!("its RAM mapping cannot be paged: {what}"))
}

/// The file that came is one that can be paged: regular, large enough, of 4 KiB pages, writable.
fn check_ram_file(fd: &OwnedFd, part: &Part) -> Result<(), String> {
    let file = File::from(fd.try_clone().map_err(|e| format!("its RAM file: {e}"))?);
    let meta = file.metadata().map_err(|e| format!("its RAM file: {e}"))?;
    if !meta.is_file() {
        return Err("its RAM is not a file".into());
    }
    let end = part.file_offset.checked_add(part.len.0);
    if end.is_none_or(|end| end > meta.len()) {
        return Err(format!("its RAM file has only {}", Bytes(meta.len())));
    }
    let fs = rustix::fs::fstatfs(fd).map_err(|e| format!("its RAM file: {e}"))?;
    if fs.f_type == libc::HUGETLBFS_MAGIC {
        return Err("hugetlb RAM cannot be paged: use memory-backend-memfd without hugetlb".into());
    }
    if fs.f_type != libc::TMPFS_MAGIC {
        return Err("its RAM file is not on a tmpfs, nor a memfd".into());
    }
    let mode = rustix::fs::fcntl_getfl(fd).map_err(|e| format!("its RAM file: {e}"))?;
    if !mode.contains(rustix::fs::OFlags::RDWR) {
        return Err("its RAM file is not open for writing".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    #[test]
    fn the_simulator_books_what_a_pager_takes() {
        let dir = tempfile::tempdir().unwrap();
        let overrides = Overrides {
            run_dir: Some(dir.path().to_owned()),
            swap_dir: Some(dir.path().join("swap")),
            ..Overrides::default()
        };
        let config = Config::load(None, overrides).unwrap();
        let (pager, models) = (pager_config(&config, false), ballast_sim::Models::default());
        for mib in [64, 256, 1 << 10, 64 << 10] {
            let size = Pages::from_mib(mib);
            let (books, simulated) = (pager.overhead(size).0, models.overhead(size.0));
            let tolerated = books / 20;
            assert!(books.abs_diff(simulated) <= tolerated, "{mib} MiB: {books}, {simulated}");
        }
    }
}
