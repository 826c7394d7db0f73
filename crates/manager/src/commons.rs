//! Page sharing on this host: which VMs may share with one another, where their common pages are, and
//! the way to the shims that map them.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::Context;
use ballast_api::Salt;
use ballast_pager::guest_ram::GuestRam;
use ballast_pager::host::Host;
use ballast_pager::mappings::{View, ZERO_RUN};
use ballast_pager::pmap::{Pmap, PmapError};
use ballast_pager::service::PagedVm;
use ballast_pager::sharing::Domain;
use ballast_pager::sharing::control::{Control, Settings};
use ballast_pager::sharing::limit::Limits;
use ballast_pager::sharing::order::Order;
use ballast_pager::word::{State, Word};
use ballast_sharing::{Hasher, StorePage};
use ballast_shim_proto::{Connection, Hello};
use ballast_units::{Bytes, PAGE_SIZE, Pages};

use crate::config::{ScanOrder, SharingSettings};
use crate::layout::{KEY, STORE, ZEROS};
use crate::shim_link::{ANSWER, ShimLink};
use crate::sync::lock;
use crate::whole_file;

/// All domains of a host.
pub struct Commons {
    folder: PathBuf,
    secret: [u8; 32],
    host: Arc<Host>,
    domains: Mutex<HashMap<String, Arc<Domain<GuestRam>>>>,
    /// Of a former manager's, those that cannot be used, and why: what is in them stays.
    unusable: Mutex<HashMap<String, String>>,
    /// Settings of all share threads, and what they spend.
    pub control: Arc<Control>,
    zeros: View,
    /// Whether the stores are where they must be.
    usable: bool,
}

/// What is named of a store by those who share in its domain.
#[derive(Default)]
struct Named {
    words: Vec<Word>,
    /// Which of the store's pages some VM shows nobody knows: all that are there are kept.
    uncounted: bool,
}

/// The same, by domain.
type NamedBy<'a> = HashMap<&'a str, Named>;

impl Commons {
    /// The folder with the stores, the key of the hashes, and the file of zeros: a former manager's,
    /// or new ones. The zeros are charged as overhead.
    ///
    /// # Errors
    /// The folder, the key or the zeros can be neither read nor made.
    pub fn open(
        run_dir: &Path,
        settings: &SharingSettings,
        host: Arc<Host>,
    ) -> anyhow::Result<Commons> {
        let folder = run_dir.join(STORE);
        std::fs::create_dir_all(&folder).with_context(|| format!("folder {}", folder.display()))?;
        // Other files cannot be mapped where faults are to be seen.
        let usable = rustix::fs::statfs(&folder).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC);
        if !usable {
            tracing::warn!("{}: not on a tmpfs: no pages are shared", folder.display());
        }
        if !ballast_uffd::procmap::sees_places() {
            let what = "no pages are shared, and what guests read of memory that they never wrote takes memory";
            tracing::warn!("no CAP_SYS_ADMIN: {what}");
        }
        let secret = secret(&folder.join(KEY))?;
        let zeros = zeros(&folder.join(ZEROS))?;
        host.ledger.adopt(ZERO_RUN);
        let control = Arc::new(Control::new(scan_settings(settings)));
        let domains = Mutex::new(HashMap::new());
        let unusable = Mutex::new(HashMap::new());
        Ok(Commons { folder, secret, host, domains, unusable, control, zeros, usable })
    }

    /// Removes what `open` made, unless pages of VMs are in a store.
    pub fn undo(run_dir: &Path) {
        let stores = std::fs::read_dir(run_dir.join(STORE)).into_iter().flatten().flatten();
        let pages = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".pages");
        if !stores.map(|entry| entry.file_name()).any(pages) {
            Commons::clear(run_dir);
        }
    }

    /// Nobody shares any more: removes what `open` made.
    pub fn clear(run_dir: &Path) {
        let folder = run_dir.join(STORE);
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let _ = std::fs::remove_file(entry.path());
        }
        let _ = std::fs::remove_dir(folder);
    }

    /// The name of a VM's domain: its own without a salt, else that of all with the same salt. What
    /// is in it tells nothing of the salt to who does not know the host's key.
    pub fn domain_name(&self, vm: &str, salt: Option<&Salt>) -> String {
        match salt {
            None => format!("vm-{vm}"),
            Some(salt) => {
                // Two hashes under different keys: no two salts are ever taken for one.
                let half = |what: &str| {
                    let mut page = [0; PAGE_SIZE];
                    let text = salt.secret().as_bytes();
                    page[..text.len()].copy_from_slice(text);
                    page[PAGE_SIZE - 8..].copy_from_slice(&(text.len() as u64).to_le_bytes());
                    Hasher::new(&self.secret, what).page(&page).0
                };
                format!("salt-{:016x}{:016x}", half("salt a"), half("salt b"))
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.pages"))
    }

    /// The domain of this name, empty if it is new.
    ///
    /// # Errors
    /// A former manager's of that name cannot be used, or no store can be made for a new one.
    pub fn domain(&self, name: &str) -> Result<Arc<Domain<GuestRam>>, String> {
        let mut domains = lock(&self.domains);
        if let Some(domain) = domains.get(name) {
            return Ok(domain.clone());
        }
        // What is in it is some VM's memory.
        if let Some(why) = lock(&self.unusable).get(name) {
            return Err(why.clone());
        }
        let path = self.path(name);
        // Without a member it is nobody's: those with members were found at the start.
        let _ = std::fs::remove_file(&path);
        let domain = Domain::create(&path, name, &self.secret, self.host.clone())
            .map_err(|e| e.to_string())?;
        let domain = Arc::new(domain);
        domains.insert(name.to_owned(), domain.clone());
        Ok(domain)
    }

    /// A VM of this name begins anew. What a former one had in a domain of its own, and what was kept because that could not
    /// be read, is nobody's any more: it is not handed to the new one, whose VMM could read all of that store.
    ///
    /// # Errors
    /// The former one is not gone.
    pub fn retire(&self, vm: &str) -> Result<(), String> {
        let name = self.domain_name(vm, None);
        let deadline = Instant::now() + ANSWER;
        loop {
            let mut domains = lock(&self.domains);
            match domains.remove(&name).map(Arc::try_unwrap) {
                None => break,
                Some(Ok(domain)) => {
                    domain.give_up();
                    break;
                }
                // Somebody looks at it just now, and has what nobody else gets any more.
                Some(Err(used)) if used.counts().1.is_zero() => break,
                Some(Err(used)) => {
                    domains.insert(name.clone(), used);
                    if Instant::now() > deadline {
                        return Err(format!("pages that a former '{vm}' shared are still in use"));
                    }
                }
            }
            drop(domains);
            std::thread::sleep(ANSWER / 100);
        }
        lock(&self.unusable).remove(&name);
        let _ = std::fs::remove_file(self.path(&name));
        Ok(())
    }

    /// At the start: the domains of VMs that a former manager left, as (domain, pmap, damage that is known),
    /// all of them together, since a store page may be named by any. What other stores hold is nobody's.
    /// Answers for each why it must wait as it is, if it must: it may not be taken over before the next start.
    /// `keep_all`: there are others of which nothing is known; every page of every store is kept.
    ///
    /// # Errors
    /// A newer manager's pmap, or the folder of stores cannot be read.
    pub fn recover(
        &self,
        left: &[(String, PathBuf, Option<String>)],
        keep_all: bool,
    ) -> anyhow::Result<Vec<Option<String>>> {
        let (mut named, mut damages) = self.named_by_all(left)?;
        let stores = self.stores()?;
        if keep_all {
            for name in &stores {
                named.entry(name).or_default();
            }
            named.values_mut().for_each(|named| named.uncounted = true);
        }
        let mut domains = lock(&self.domains);
        for (name, named) in named {
            match self.recover_domain(name, named) {
                Ok(None) => {}
                Ok(Some(domain)) => drop(domains.insert(name.to_owned(), Arc::new(domain))),
                Err(why) => {
                    tracing::error!("{why}");
                    for ((of, ..), damage) in left.iter().zip(&mut damages) {
                        if of == name {
                            damage.get_or_insert_with(|| why.clone());
                        }
                    }
                    lock(&self.unusable).insert(name.to_owned(), why);
                }
            }
        }
        for name in &stores {
            if !domains.contains_key(name) && !lock(&self.unusable).contains_key(name) {
                let _ = std::fs::remove_file(self.path(name));
            }
        }
        Ok(damages)
    }

    /// What VMs name of each store, by domain; and for each of them what is wrong with it, if there is anything.
    ///
    /// # Errors
    /// A newer manager's pmap.
    fn named_by_all<'a>(
        &self,
        left: &'a [(String, PathBuf, Option<String>)],
    ) -> anyhow::Result<(NamedBy<'a>, Vec<Option<String>>)> {
        let mut all = NamedBy::new();
        let mut damages = Vec::new();
        for (name, pmap, damage) in left {
            let of_domain = all.entry(name).or_default();
            let named = match damage {
                Some(why) => Err(why.clone()),
                None => self.named_by(name, pmap)?,
            };
            damages.push(match named {
                Ok(named) => {
                    of_domain.words.extend(named);
                    None
                }
                Err(why) => {
                    of_domain.uncounted = true;
                    Some(why)
                }
            });
        }
        Ok((all, damages))
    }

    /// A domain of which this is named. None: it has no store, and needs none.
    fn recover_domain(&self, name: &str, named: Named) -> Result<Option<Domain<GuestRam>>, String> {
        let Named { mut words, uncounted } = named;
        let path = self.path(name);
        if !path.exists() && words.is_empty() {
            return Ok(None);
        }
        let what = |e: String| format!("the store of its shared pages, {}: {e}", path.display());
        if uncounted {
            words.extend(pages_in(&path).map_err(|e| what(e.to_string()))?);
        }
        Domain::recover(&path, name, &self.secret, self.host.clone(), words)
            .map(Some)
            .map_err(|e| what(e.to_string()))
    }

    /// Names of the domains that have a store.
    fn stores(&self) -> std::io::Result<Vec<String>> {
        let files = std::fs::read_dir(&self.folder)?.flatten();
        let name = |file: std::fs::DirEntry| {
            Some(file.file_name().to_string_lossy().strip_suffix(".pages")?.to_owned())
        };
        Ok(files.filter_map(name).collect())
    }

    /// The words of a pmap that name pages of a store; or what is wrong with it.
    fn named_by(&self, domain: &str, pmap: &Path) -> anyhow::Result<Result<Vec<Word>, String>> {
        let end = std::fs::metadata(self.path(domain)).map_or(0, |meta| meta.len());
        let (mut named, mut beyond) = (Vec::new(), None);
        let peeked = Pmap::peek(pmap, |ppn, word| {
            let Some(page) = word.store_page() else { return };
            if page.offset() >= end {
                let what = || format!("{}: {ppn}: {page} is not in the store", pmap.display());
                beyond.get_or_insert_with(what);
            }
            named.push(word);
        });
        Ok(match peeked {
            Ok(()) => beyond.map_or(Ok(named), Err),
            // Its VMM had not mapped its RAM yet.
            Err(_) if !pmap.exists() => Ok(Vec::new()),
            Err(e @ PmapError::Version { .. }) => return Err(e.into()),
            Err(e) => Err(e.to_string()),
        })
    }

    /// A VM ended before it was taken over: its references end too. A system call for each page that nobody else has.
    pub fn forget(&self, domain: &str, pmap: &Path) {
        let domain = lock(&self.domains).get(domain).cloned();
        if let Some(domain) = domain {
            let forgotten = Pmap::peek(pmap, |_, word| {
                if let Some(page) = word.store_page() {
                    domain.release(page);
                }
            });
            if let Err(e) = forgotten {
                tracing::debug!("{e}");
            }
            // Else it is one that somebody uses.
            drop(domain);
        }
        self.sweep();
    }

    /// Removes the stores that nobody uses.
    pub fn sweep(&self) {
        lock(&self.domains).retain(|_, domain| {
            // One reference is the map's own; members, and who is about to become one, have others.
            let unused = Arc::strong_count(domain) == 1 && domain.counts().1.is_zero();
            if unused {
                let _ = std::fs::remove_file(domain.file().path());
            }
            !unused
        });
    }

    /// Common pages of all domains, and the memory that their tables take.
    pub fn common_and_metadata(&self) -> (Pages, Bytes) {
        let domains = lock(&self.domains);
        domains.values().map(|domain| domain.stats()).fold(Default::default(), |sum, stats| {
            let (common, metadata): (Pages, Bytes) = sum;
            (common + stats.common, metadata + stats.metadata)
        })
    }

    /// Whether this is one of its files, by device and inode.
    pub fn holds(&self, id: (u64, u64)) -> bool {
        let is_store =
            |domain: &Arc<Domain<GuestRam>>| view(domain).is_ok_and(|store| store.identity() == id);
        self.zeros.identity() == id || lock(&self.domains).values().any(is_store)
    }

    /// The stores and the zeros, as the kernel counts them.
    pub fn measured(&self) -> Bytes {
        let stores: Bytes = lock(&self.domains).values().map(|domain| domain.measured()).sum();
        stores + ZERO_RUN.bytes()
    }

    /// Gives memory of the stores back that nobody booked ([`Domain::trim`]).
    pub fn trim(&self) {
        let domains: Vec<_> = lock(&self.domains).values().cloned().collect();
        for domain in domains {
            let label = crate::domain::label(domain.name());
            match domain.trim() {
                Ok(Pages::ZERO) => {}
                Ok(freed) => tracing::warn!(
                    domain = label,
                    "{freed} of its store were in no page: some VMM reads what it does not share"
                ),
                Err(e) => tracing::warn!(domain = label, "its store: {e}"),
            }
        }
    }

    /// Lets the pager reach a VM's shim, and map other pages in that VM, if the stores are usable.
    ///
    /// # Errors
    /// Its RAM files or its /proc/PID/pagemap cannot be looked at, or there is no descriptor left.
    pub fn connect(
        &self,
        ram: &GuestRam,
        connection: Arc<Connection>,
        (pid, hello): (u32, &Hello),
        domain: &Domain<GuestRam>,
    ) -> Result<(), String> {
        let link = Box::new(ShimLink::new(connection, hello));
        if !self.usable {
            ram.mappings().reach(link);
            return Ok(());
        }
        let homes = ram.identities().map_err(|e| format!("its RAM file: {e}"))?;
        let mappings = ram.mappings();
        // All that can fail first: who is connected waits for zeros to be mapped.
        let zeros = self.zeros.try_clone().map_err(|e| format!("the file of zeros: {e}"))?;
        let store = view(domain)?;
        mappings.connect(link, pid, homes).map_err(|e| format!("/proc/{pid}/pagemap: {e}"))?;
        mappings.set_zeros(zeros);
        mappings.set_store(store);
        Ok(())
    }

    /// Has a VM move into the domain of this name, if it is in another, by its own thread: first its pages
    /// leave that one's store. To be called until it is there. `book` makes the change outlive the manager;
    /// without that it stays where it is. Answers whether it is there.
    ///
    /// # Errors
    /// As of `domain`, or there is no descriptor left: what it shares stays where it is, and nothing is added.
    pub fn move_to(
        &self,
        paged: &PagedVm,
        name: &str,
        book: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<bool, String> {
        match paged.memory().membership() {
            Some(member) if member.domain.name() != name => {}
            _ => {
                if paged.stay() {
                    self.sweep();
                }
                return Ok(true);
            }
        }
        // First: it is no part of that one any more, also while there is no other for it.
        paged.begin_to_leave();
        let domain = self.domain(name)?;
        let view = view(&domain)?;
        paged.move_to(&domain, move |mappings| {
            let booked = book();
            if booked {
                mappings.set_store(view);
            }
            booked
        });
        Ok(false)
    }
}

/// A word for each page that a store has, as if a VM named it.
fn pages_in(store: &Path) -> std::io::Result<Vec<Word>> {
    use rustix::fs::{SeekFrom, seek};
    let file = std::fs::File::open(store)?;
    let (mut words, mut at) = (Vec::new(), 0);
    loop {
        let start = match seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(words),
            Err(e) => return Err(e.into()),
        };
        at = seek(&file, SeekFrom::Hole(start))?;
        let pages = start / PAGE_SIZE as u64..at.div_ceil(PAGE_SIZE as u64);
        let pages = pages.filter_map(StorePage::new);
        words.extend(pages.map(|page| Word::with_slot(State::Shared, page.get().into())));
    }
}

fn view(domain: &Domain<GuestRam>) -> Result<View, String> {
    let fd = domain.file().read_only().map_err(|e| e.to_string())?;
    View::new(fd).map_err(|e| e.to_string())
}

/// The configuration as the pager takes it.
pub fn scan_settings(settings: &SharingSettings) -> Settings {
    let cores = settings.cpu_percent / 100.0;
    Settings {
        enabled: settings.enabled,
        order: match settings.order {
            ScanOrder::Random | ScanOrder::Written => Order::Random,
            ScanOrder::Sequential => Order::Sequential,
        },
        eager: settings.order == ScanOrder::Written,
        host: Limits { pages_per_s: settings.rate.0 as f64, cores },
        vm: Limits { pages_per_s: settings.vm_rate.0 as f64, cores },
        scan_time: settings.scan_time,
        rehome_after: settings.rehome_after,
    }
}

/// The host's key: drawn once, kept for as long as VMs share.
fn secret(path: &Path) -> anyhow::Result<[u8; 32]> {
    let mut key = [0; 32];
    match std::fs::File::open(path) {
        Ok(mut file) => {
            file.read_exact(&mut key).with_context(|| format!("{}", path.display()))?;
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            std::fs::File::open("/dev/urandom")
                .and_then(|mut random| random.read_exact(&mut key))
                .context("/dev/urandom")?;
            whole_file::write(path, &key).with_context(|| format!("{}", path.display()))?;
        }
        Err(e) => return Err(e).with_context(|| format!("{}", path.display())),
    }
    Ok(key)
}

/// The pages of zeros that all VMs read: pages and not holes, which a read would fill.
fn zeros(path: &Path) -> anyhow::Result<View> {
    let whole = ZERO_RUN.bytes().0;
    let make = || -> std::io::Result<View> {
        if std::fs::metadata(path).map(|meta| meta.len()).ok() != Some(whole) {
            whole_file::write(path, &vec![0; whole as usize])?;
        }
        let fd: OwnedFd = std::fs::File::open(path)?.into();
        View::new(fd)
    };
    make().with_context(|| format!("{}", path.display()))
}

/// Whether the other side has closed, without reading what it says to somebody else.
pub fn hung_up(connection: &Connection) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::RDHUP)];
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_pager::ledger::Ledger;

    fn commons(run_dir: &Path) -> Commons {
        let host = Arc::new(Host::new(Ledger::new(Pages::from_mib(64), || {})));
        Commons::open(run_dir, &SharingSettings::default(), host).unwrap()
    }

    #[test]
    fn domains_are_told_apart_by_salt_alone_and_the_key_outlives_the_manager() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let first = commons(dir.path());
        let salt = |text: &str| Salt::try_from(text).unwrap();
        let blue = first.domain_name("a", Some(&salt("blue")));
        assert_eq!(blue, first.domain_name("b", Some(&salt("blue"))));
        assert_ne!(blue, first.domain_name("a", Some(&salt("blu"))));
        assert_ne!(blue, first.domain_name("a", Some(&salt("blue."))));
        assert_eq!(first.domain_name("a", None), "vm-a");
        assert!(!blue.contains("blue"));
        assert_eq!(commons(dir.path()).domain_name("c", Some(&salt("blue"))), blue);
        let other = tempfile::tempdir_in("/dev/shm").unwrap();
        assert_ne!(commons(other.path()).domain_name("a", Some(&salt("blue"))), blue);
        // The zeros are pages and not holes: reading them allocates nothing more.
        assert_eq!(first.measured(), ZERO_RUN.bytes());
        let blocks = std::fs::metadata(dir.path().join(STORE).join(ZEROS)).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&blocks) * 512, ZERO_RUN.bytes().0);
        Commons::clear(dir.path());
        assert!(!dir.path().join(STORE).exists());
    }

    #[test]
    fn stores_that_nobody_uses_are_removed_and_others_stay() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let first = commons(dir.path());
        let used = first.domain("vm-a").unwrap();
        drop(first.domain("vm-b").unwrap());
        first.sweep();
        assert!(dir.path().join("store/vm-a.pages").exists());
        assert!(!dir.path().join("store/vm-b.pages").exists());
        Commons::undo(dir.path());
        assert!(used.file().path().exists(), "pages of VMs are never undone");
        // A manager that finds no VM that uses it removes it.
        drop(used);
        commons(dir.path()).recover(&[], false).unwrap();
        assert!(!dir.path().join("store/vm-a.pages").exists());
        assert!(dir.path().join(STORE).join(KEY).exists());
    }

    #[test]
    fn what_a_former_vm_shared_is_not_handed_to_a_new_one_of_its_name() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        drop(commons(dir.path()).domain("vm-a").unwrap());
        let store = dir.path().join("store/vm-a.pages");
        for damage in ["its pmap", "the store"] {
            std::fs::write(&store, [7; 3 * PAGE_SIZE]).unwrap();
            if damage == "the store" {
                std::fs::remove_file(&store).unwrap();
                std::fs::create_dir(&store).unwrap();
            }
            let later = commons(dir.path());
            let before = later.host.ledger.free();
            let left = [("vm-a".to_owned(), dir.path().join("pmap"), Some(damage.to_owned()))];
            assert!(later.recover(&left, false).unwrap()[0].is_some());
            if damage == "the store" {
                assert!(later.domain("vm-a").is_err());
                std::fs::remove_dir(&store).unwrap();
            } else {
                let kept = later.domain("vm-a").unwrap();
                assert_eq!(kept.counts().1, Pages(3));
                assert_eq!(later.host.ledger.free(), before - Pages(3));
                // Not while anybody may be in it.
                assert!(later.retire("a").is_err());
            }
            later.retire("a").unwrap();
            assert_eq!(later.domain("vm-a").unwrap().counts().1, Pages::ZERO);
            assert_eq!(later.host.ledger.free(), before);
            // One that is empty is not handed on either, be it looked at: who has its descriptor could read on.
            let looked_at = later.domain("vm-a").unwrap();
            later.retire("a").unwrap();
            assert!(!Arc::ptr_eq(&looked_at, &later.domain("vm-a").unwrap()));
            later.sweep();
            drop((looked_at, later));
        }
    }
}
