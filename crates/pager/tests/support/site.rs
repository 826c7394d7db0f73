//! A host whose VMs share pages: one ledger, one store, one domain, all of it for doubles.

use std::path::PathBuf;
use std::sync::Arc as StdArc;

use ballast_pager::backend::Place;
use ballast_pager::host::Host;
use ballast_pager::memory::{MOVING, Memory};
use ballast_pager::sharing::Domain;
use ballast_pager::word::{NO_STORE_PAGE, State, Word};
use ballast_sharing::StoreFile;
use ballast_units::{Pages, Ppn};

use super::{Machine, Ram, host};

const NAME: &str = "test";
const SECRET: &[u8] = b"of the tests";

pub struct Site {
    dir: tempfile::TempDir,
    pub machine: StdArc<Machine>,
    pub host: StdArc<Host>,
    pub domain: StdArc<Domain<Ram>>,
    vms: u64,
}

impl Site {
    /// Of `budget` pages, and what each VM sets aside for moves.
    pub fn new(budget: u64, vms: u64) -> Site {
        // Where the kernel's count of the store is exact.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let host = host(budget + vms * MOVING.0);
        let path = dir.path().join("store");
        let domain = Domain::create(&path, NAME, SECRET, host.clone()).unwrap();
        let machine = Machine::new(host.clone(), Some(StoreFile::open(&path).unwrap()));
        let site = Site { dir, machine, host, domain: StdArc::new(domain), vms };
        assert!(site.host.ledger.try_reserve(site.reserve()));
        site
    }

    /// What the VMs have set aside.
    pub fn reserve(&self) -> Pages {
        Pages(self.vms * MOVING.0)
    }

    fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// Another manager's books: nothing but what the words say. The VMs adopt their own pages.
    pub fn recover(&mut self, words: impl IntoIterator<Item = Word>) {
        self.host.ledger.release(self.host.ledger.used());
        self.host.ledger.adopt(self.reserve());
        let domain = Domain::recover(&self.store(), NAME, SECRET, self.host.clone(), words);
        self.domain = StdArc::new(domain.unwrap());
    }

    /// Store and references are what the words of all VMs say, and no page is in the file for nobody.
    pub fn check(&self, words: impl IntoIterator<Item = Word>) {
        self.domain.check(words).unwrap();
        assert_eq!(self.machine.stored(), self.domain.stats().common.0, "the store's file");
    }
}

/// Where each page is mapped is what its word says, and so is what the kernel tells of it.
pub fn check_places(memory: &Memory<Ram>, ram: &Ram) {
    let ram = &ram.0;
    for p in 0..memory.pmap().len().0 {
        let word = memory.pmap().load(Ppn(p));
        if ram.is_present(p) {
            assert_eq!(word.state(), State::Resident, "ppn {p} is at home");
        }
        let place = match (word.state(), word.store_page()) {
            (_, Some(page)) => Place::Store(page),
            (State::Zero, None) => Place::Zeros,
            (State::Broken, None) => {
                assert_eq!(word.slot(), NO_STORE_PAGE);
                Place::Zeros
            }
            _ => Place::Home,
        };
        assert_eq!(ram.place(p), place, "ppn {p}: {word:?}");
        assert!(ram.is_watched(p), "ppn {p}: {word:?}");
        assert!(!ram.has_copy(p) || word.state() == State::Broken, "ppn {p}: {word:?}");
        if matches!(word.state(), State::Shared | State::Zero) {
            assert!(ram.is_protected(p), "ppn {p}: {word:?}");
        }
    }
}
