//! A domain: the VMs that may share pages with one another, the store with the pages that they
//! share, and the table by which these are found. Each store page is charged to the host's ledger
//! once, however many pages it stands for.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Weak};

use ballast_sharing::{
    Hasher, Match, PageHash, PageId, ShareTable, StoreError, StoreFile, StorePage, StorePages,
    StoreRun, TableStats,
};
use ballast_units::{Bytes, Pages, Ppn};

use crate::backend::{Backend, Errno, MemError, PageBuf};
use crate::host::Host;
use crate::memory::{Membership, Memory};
use crate::sync::{Mutex, lock};
use crate::word::Word;

/// Pages of a VM that leaves, forgotten at one time.
const FORGOTTEN: u64 = 1 << 14;
/// What the store's file may have more than is booked before it is looked through.
const LITTLE: Pages = Pages::from_mib(1);
/// Pages that are punched at once.
const AT_ONCE: u64 = 64;

/// Why a domain cannot be used.
#[allow(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The pmap of a VM names a page that the store does not have.
    #[error("{0}: the store has no such page")]
    Page(StorePage),
    #[error("looking through the store: {0}")]
    Scan(#[from] std::io::Error),
    /// More memory than one table can number.
    #[error("its VMs have more than {} together", Pages(PageId::LIMIT as u64).bytes())]
    Full,
}

/// What a domain holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DomainStats {
    /// Guest pages that common pages stand for.
    pub shared: Pages,
    /// The common pages.
    pub common: Pages,
    /// Pages that can be found by their hash, but are nobody else's yet.
    pub hints: u64,
    /// Memory of the share table.
    pub metadata: Bytes,
}

/// The VMs of one salt, and what they share. Any thread may call it; its lock is held for look-ups and
/// bookings, never across reading, writing or hashing a page; but for pages of the file that are in nobody's books, while some of
/// them are punched.
pub struct Domain<B: Backend> {
    name: String,
    hasher: Hasher,
    host: Arc<Host>,
    file: StoreFile,
    books: Mutex<Books<B>>,
    /// What was last said to be wrong with the store.
    said: Mutex<String>,
}

struct Books<B: Backend> {
    table: ShareTable,
    pages: StorePages,
    /// Allocated, and not published yet.
    fresh: BTreeSet<StorePage>,
    /// Of a former manager's, those that cannot be read.
    unread: BTreeSet<StorePage>,
    members: Vec<Member<B>>,
}

struct Member<B: Backend> {
    base: u32,
    len: u32,
    memory: Weak<Memory<B>>,
}

/// What is known of pages like one that was hashed.
pub(super) enum Known<B: Backend> {
    /// The store has it; a reference was taken.
    Common(StorePage),
    /// Another page had this hash when it was looked at.
    Seen(Arc<Memory<B>>, Ppn),
    /// Nothing; now this page can be found. Whether it had the same hash before.
    New { unchanged: bool },
}

impl<B: Backend> Domain<B> {
    /// A domain without VMs, with an empty store at `path`. `secret` keys the hashes.
    ///
    /// # Errors
    /// The store's file cannot be made.
    pub fn create(
        path: &Path,
        name: &str,
        secret: &[u8],
        host: Arc<Host>,
    ) -> Result<Domain<B>, DomainError> {
        Ok(Domain::over(StoreFile::create(path)?, name, secret, host))
    }

    fn over(file: StoreFile, name: &str, secret: &[u8], host: Arc<Host>) -> Domain<B> {
        let books = Books {
            table: ShareTable::new(),
            pages: StorePages::new(),
            fresh: BTreeSet::new(),
            unread: BTreeSet::new(),
            members: Vec::new(),
        };
        Domain {
            name: name.to_owned(),
            hasher: Hasher::new(secret, name),
            host,
            file,
            books: Mutex::new(books),
            said: Mutex::new(String::new()),
        }
    }

    /// The domain of VMs that a former manager left: `words` are all words of their pmaps. Pages
    /// of the store that none of them names are freed. Those that are named cannot be found before
    /// they are hashed again (`hash_some`).
    ///
    /// # Errors
    /// The store cannot be used, or words name pages that it does not have.
    pub fn recover(
        path: &Path,
        name: &str,
        secret: &[u8],
        host: Arc<Host>,
        words: impl IntoIterator<Item = Word>,
    ) -> Result<Domain<B>, DomainError> {
        let domain = Domain::over(StoreFile::open(path)?, name, secret, host);
        let mut books = lock(&domain.books);
        let end = file_pages(&domain.file)?;
        for page in words.into_iter().filter_map(Word::store_page) {
            if u64::from(page.get()) >= end.0 {
                return Err(DomainError::Page(page));
            }
            if books.table.adopt(page) == 1 {
                books.pages.claim(page);
            }
        }
        domain.host.ledger.adopt(books.pages.used());
        drop(books);
        if let Err(e) = domain.free_unused() {
            // They are the next to be used, or go with the file.
            tracing::warn!(domain = name, "pages that nobody has any more stay in the store: {e}");
        }
        Ok(domain)
    }

    /// Nobody is in it, nor will be: its pages are charged no longer. They are gone with its file.
    pub fn give_up(self) {
        let used = lock(&self.books).pages.used();
        self.host.ledger.release(used);
    }

    /// The salt: beside the secret, what keys its hashes.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The store's file, of which VMs map pages.
    pub fn file(&self) -> &StoreFile {
        &self.file
    }
    /// Of no use in another domain: it is keyed.
    pub fn hash(&self, page: &PageBuf) -> PageHash {
        self.hasher.page(page)
    }

    /// Adds a VM.
    ///
    /// # Errors
    /// The domain has no numbers left for so many pages.
    pub fn join(self: &Arc<Self>, memory: &Arc<Memory<B>>) -> Result<(), DomainError> {
        let len = u32::try_from(memory.pmap().len().0).map_err(|_| DomainError::Full)?;
        self.bury();
        let mut books = lock(&self.books);
        // The first gap that is large enough.
        books.members.sort_by_key(|m| m.base);
        let mut base = 0u32;
        for member in &books.members {
            if member.base - base >= len {
                break;
            }
            base = member.base + member.len;
        }
        if base.checked_add(len).is_none_or(|end| end > PageId::LIMIT) {
            return Err(DomainError::Full);
        }
        books.members.push(Member { base, len, memory: Arc::downgrade(memory) });
        drop(books);
        memory.set_membership(Some(Membership { domain: self.clone(), base }));
        Ok(())
    }

    /// Members that ended without leaving give back their page numbers.
    fn bury(&self) {
        let is_dead = |m: &&Member<B>| m.memory.strong_count() == 0;
        let range = |m: &Member<B>| (m.base, m.len);
        let dead: Vec<(u32, u32)> =
            lock(&self.books).members.iter().filter(is_dead).map(range).collect();
        for (base, len) in dead {
            // First, for whoever gets the numbers next must not be found by them.
            self.forget(base, Pages(len.into()));
            lock(&self.books).members.retain(|m| m.base != base || m.memory.strong_count() > 0);
        }
    }

    /// Removes a VM whose words name no store page any more, or whose VMM is gone.
    pub fn leave(&self, memory: &Memory<B>) {
        let Some(member) = memory.membership() else { return };
        memory.set_membership(None);
        self.forget(member.base, memory.pmap().len());
        lock(&self.books).members.retain(|m| m.base != member.base);
    }
    /// Forgets what is known of the pages of a VM, `len` of them, that are in no store: nobody finds
    /// them any more.
    pub(crate) fn forget(&self, base: u32, len: Pages) {
        // In pieces: others look pages up meanwhile.
        for at in (0..len.0).step_by(FORGOTTEN as usize) {
            if let Some(first) = id(base, Ppn(at)) {
                lock(&self.books).table.forget_pages(first, Pages(FORGOTTEN.min(len.0 - at)));
            }
        }
    }
    /// Tests: the last VM has all numbers that are left.
    #[doc(hidden)]
    pub fn fill(&self) {
        if let Some(last) = lock(&self.books).members.iter_mut().max_by_key(|m| m.base) {
            last.len = PageId::LIMIT - last.base;
        }
    }
    /// Tests: how many VMs are in it.
    pub fn members(&self) -> usize {
        lock(&self.books).members.iter().filter(|m| m.memory.strong_count() > 0).count()
    }

    /// Looks pages up, in one turn at the table: for each what is known of pages like it, those of `among`
    /// and in the store.
    pub(super) fn look_up(
        &self,
        base: u32,
        among: &Range<u32>,
        hashed: &[(Ppn, PageHash)],
    ) -> Vec<Known<B>> {
        let mut books = lock(&self.books);
        books.table.warm(hashed.iter().map(|page| page.1));
        hashed.iter().map(|&(ppn, hash)| books.look_up(base, among, ppn, hash)).collect()
    }

    /// A hint turned out to be of other contents, or its page is in the store.
    pub(super) fn hint_is_stale(&self, base: u32, ppn: Ppn) {
        if let Some(id) = id(base, ppn) {
            lock(&self.books).table.drop_hint(id);
        }
    }
    /// Those of these pages that would not be found by these hashes.
    pub(super) fn unfound(&self, base: u32, hashed: &[(Ppn, PageHash)]) -> Vec<Ppn> {
        let books = lock(&self.books);
        let found = |&&(ppn, hash): &&(Ppn, PageHash)| {
            id(base, ppn).is_some_and(|me| {
                books.table.hinted(me) == Some(hash) || books.table.is_ineligible(me, hash)
            })
        };
        hashed.iter().filter(|page| !found(page)).map(|page| page.0).collect()
    }
    pub(super) fn is_false_match(&self, base: u32, ppn: Ppn, hash: PageHash) {
        if let Some(id) = id(base, ppn) {
            lock(&self.books).table.mark_ineligible(id, hash);
        }
    }
    /// Pages of a VM can be found by these hashes, each unless the store or another page of `own`, the VM's, can: hints of
    /// one hash are in one chain, which is walked under the lock whenever one of them goes.
    pub(super) fn hint_once(&self, base: u32, own: &Range<u32>, hashed: &[(Ppn, PageHash)]) {
        let mut books = lock(&self.books);
        for &(ppn, hash) in hashed {
            let Some(id) = id(base, ppn) else { continue };
            match books.table.find_other_among(hash, id, own.clone()) {
                Match::Nothing => books.table.hint(id, hash),
                // What is known of it may be of what it held before.
                Match::Shared(_) | Match::Hint(_) => {
                    books.table.drop_hint(id);
                }
            }
        }
    }

    /// Takes up to `n` neighbouring free pages of the store, charged to the host.
    pub fn allocate(&self, n: u64) -> Option<StoreRun> {
        let mut n = n;
        while !self.host.ledger.try_reserve(Pages(n)) {
            n /= 2;
            if n == 0 {
                return None;
            }
        }
        let run = {
            let mut books = lock(&self.books);
            let run = books.pages.allocate(n);
            books.fresh.extend(run.iter().flat_map(|run| run.iter()));
            run
        };
        let got = run.map_or(0, |run| run.pages().0);
        if got < n {
            self.host.ledger.release(Pages(n - got));
        }
        run.filter(|run| {
            let reached = self.file.reach(*run);
            if let Err(e) = &reached {
                self.say_once(&e.to_string());
                run.iter().for_each(|page| self.release(page));
            }
            reached.is_ok()
        })
    }

    /// Writes allocated pages that lie side by side and makes each known, with one reference: the caller's. Answers
    /// false for one if another page of the store has become known by its hash meanwhile: of two that two VMs make of
    /// one another's pages at one time, one would be too many for good.
    pub(crate) fn publish(
        &self,
        first: StorePage,
        hashes: impl Iterator<Item = PageHash>,
        contents: &[PageBuf],
    ) -> Vec<Result<bool, MemError>> {
        if let Err(e) = self.file.write_run(first, contents.as_flattened()) {
            return vec![Err(from_store(&e)); contents.len()];
        }
        let mut books = lock(&self.books);
        let pages = StoreRun::new(first, contents.len() as u64);
        let known = pages.into_iter().flat_map(StoreRun::iter).zip(hashes);
        known.map(|(page, hash)| books.publish(page, hash)).collect()
    }

    /// One reference more, unless nobody has one any more.
    pub fn retain(&self, page: StorePage) -> bool {
        lock(&self.books).table.retain(page).is_ok()
    }

    /// One reference less; the last one frees the page. Also gives back what was allocated and never
    /// published.
    pub fn release(&self, page: StorePage) {
        let mut books = lock(&self.books);
        let unused = match books.table.release(page) {
            Ok(left) => left == 0,
            Err(_) if books.fresh.remove(&page) => true,
            // A page too many that stays is better than one too few that is somebody's.
            Err(e) => {
                tracing::error!(domain = self.name, "releasing {page}: {e}: it stays");
                debug_assert!(false, "{page} released once too often: {e}");
                false
            }
        };
        if unused {
            books.unread.remove(&page);
        }
        drop(books);
        if unused {
            self.free(page);
        }
    }

    fn free(&self, page: StorePage) {
        if let Err(e) = self.file.punch(page.into()) {
            tracing::error!(domain = self.name, "freeing {page}: {e}");
        }
        if lock(&self.books).pages.free(page) {
            self.host.ledger.release(Pages(1));
        }
    }

    /// Reads a page of the store; zeros where there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, page: StorePage, into: &mut PageBuf) -> Result<(), MemError> {
        self.file.read(page, into).map_err(|e| from_store(&e))
    }

    /// Neighbouring pages.
    pub(crate) fn read_run(&self, first: StorePage, into: &mut [PageBuf]) -> Result<(), MemError> {
        self.file.read_run(first, into.as_flattened_mut()).map_err(|e| from_store(&e))
    }

    /// After a takeover: hashes up to `n` pages that cannot be found yet. Answers how many are left, but for
    /// those that cannot be read.
    pub(crate) fn hash_some(&self, n: usize) -> usize {
        let unhashed: Vec<StorePage> = {
            let books = lock(&self.books);
            books.table.unhashed().filter(|page| !books.unread.contains(page)).take(n).collect()
        };
        let mut bytes = Box::new([0; ballast_units::PAGE_SIZE]);
        for page in unhashed {
            // Freed meanwhile, it reads as zeros, and is not in the table.
            if let Err(e) = self.file.read(page, &mut bytes) {
                // It stays as it is, and the others are found all the same.
                self.say_once(&e.to_string());
                lock(&self.books).unread.insert(page);
                continue;
            }
            let hash = self.hash(&bytes);
            let _ = lock(&self.books).table.set_hash(page, hash);
        }
        let books = lock(&self.books);
        (books.table.stats().unhashed as usize).saturating_sub(books.unread.len())
    }

    /// What is wrong with the store, unless it was said last.
    fn say_once(&self, what: &str) {
        let mut said = lock(&self.said);
        if *said != what {
            tracing::error!(domain = self.name, "{what}");
            what.clone_into(&mut said);
        }
    }

    /// Guest pages that a store page stands for.
    pub fn refs(&self, page: StorePage) -> u64 {
        lock(&self.books).table.refs(page)
    }

    /// All of one moment.
    pub fn stats(&self) -> DomainStats {
        let books = lock(&self.books);
        let TableStats { shared, references, hints, .. } = books.table.stats();
        DomainStats {
            shared: Pages(references),
            common: Pages(shared),
            hints,
            metadata: books.table.memory_bytes(),
        }
    }

    /// Guest pages that are shared, and the common pages behind them.
    pub fn counts(&self) -> (Pages, Pages) {
        let TableStats { shared, references, .. } = lock(&self.books).table.stats();
        (Pages(references), Pages(shared))
    }

    /// The store as the kernel counts it.
    pub fn measured(&self) -> Bytes {
        self.file.measured().unwrap_or_default()
    }

    /// Gives memory back that is in no page of the store, if it is more than a little: a VMM may read all of the file,
    /// and a hole that is read has memory that nobody booked. Answers how much there was.
    ///
    /// # Errors
    /// The file cannot be looked through.
    pub fn trim(&self) -> Result<Pages, DomainError> {
        let booked = lock(&self.books).pages.used();
        if self.file.measured()?.pages() <= booked + LITTLE {
            return Ok(Pages::ZERO);
        }
        self.free_unused()
    }

    /// Punches what has memory and is in no page that is used; the same what a manager that died had written for nobody.
    fn free_unused(&self) -> Result<Pages, DomainError> {
        use rustix::fs::{SeekFrom, seek};
        const PAGE: u64 = ballast_units::PAGE_SIZE as u64;
        let fd = self.file.read_only()?;
        let (mut at, mut freed) = (0, Pages::ZERO);
        loop {
            let scan = |e: rustix::io::Errno| DomainError::Scan(e.into());
            let start = match seek(&fd, SeekFrom::Data(at * PAGE)) {
                Ok(data) => data / PAGE,
                Err(rustix::io::Errno::NXIO) => return Ok(freed),
                Err(e) => return Err(scan(e)),
            };
            let end = seek(&fd, SeekFrom::Hole(start * PAGE)).map_err(scan)?.div_ceil(PAGE);
            at = start;
            while at < end {
                // Under the lock: nobody takes a page that is about to be punched.
                let books = lock(&self.books);
                let unused =
                    |at: &u64| StorePage::new(*at).is_some_and(|page| !books.pages.is_used(page));
                let n = (at..end.min(at + AT_ONCE)).take_while(unused).count() as u64;
                if let Some(run) = StorePage::new(at).and_then(|first| StoreRun::new(first, n)) {
                    self.file.punch(run)?;
                    freed += Pages(n);
                }
                at += n.max(1);
            }
        }
    }

    /// Invariants, while nothing moves: table and store are whole, the store's file holds what is
    /// used, and every reference is one of `words`, all words of all members' pmaps.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check(&self, words: impl IntoIterator<Item = Word>) -> Result<(), String> {
        let books = lock(&self.books);
        books.table.check()?;
        books.pages.check()?;
        let mut refs = std::collections::BTreeMap::<StorePage, u64>::new();
        for page in words.into_iter().filter_map(Word::store_page) {
            *refs.entry(page).or_default() += 1;
        }
        let booked: std::collections::BTreeMap<_, _> = books.table.shared_pages().collect();
        if refs != booked {
            return Err(format!("references are {refs:?}, booked {booked:?}"));
        }
        if books.pages.used() != Pages(booked.len() as u64) {
            return Err(format!("{} store pages used, {} named", books.pages.used(), booked.len()));
        }
        Ok(())
    }
}

impl<B: Backend> Books<B> {
    /// A page whose contents are written.
    fn publish(&mut self, page: StorePage, hash: PageHash) -> Result<bool, MemError> {
        if self.table.find_shared(hash).is_some() {
            return Ok(false);
        }
        self.table.share(page, hash).map_err(|_| MemError::Os {
            op: "publishing a store page twice",
            ppn: Ppn(0),
            source: Errno(libc::EEXIST),
        })?;
        self.fresh.remove(&page);
        Ok(true)
    }

    fn look_up(&mut self, base: u32, among: &Range<u32>, ppn: Ppn, hash: PageHash) -> Known<B> {
        let Some(me) = id(base, ppn) else { return Known::New { unchanged: false } };
        let unchanged = self.table.hinted(me) == Some(hash) || self.table.is_ineligible(me, hash);
        if self.table.is_ineligible(me, hash) {
            return Known::New { unchanged };
        }
        match self.table.find_other_among(hash, me, among.clone()) {
            Match::Shared(page) if self.table.retain(page).is_ok() => Known::Common(page),
            Match::Hint(other) => match self.whose(other) {
                Some((memory, ppn)) => Known::Seen(memory, ppn),
                None => {
                    self.table.drop_hint(other);
                    self.table.hint(me, hash);
                    Known::New { unchanged }
                }
            },
            _ => {
                self.table.hint(me, hash);
                Known::New { unchanged }
            }
        }
    }

    fn whose(&self, page: PageId) -> Option<(Arc<Memory<B>>, Ppn)> {
        let n = page.get();
        let member = self.members.iter().find(|m| (m.base..m.base + m.len).contains(&n))?;
        Some((member.memory.upgrade()?, Ppn(u64::from(n - member.base))))
    }
}

fn id(base: u32, ppn: Ppn) -> Option<PageId> {
    PageId::new(base.checked_add(u32::try_from(ppn.0).ok()?)?)
}

fn file_pages(file: &StoreFile) -> Result<Pages, DomainError> {
    let stat = rustix::fs::fstat(file.read_only()?).map_err(std::io::Error::from)?;
    Ok(Bytes(stat.st_size as u64).pages())
}

fn from_store(e: &StoreError) -> MemError {
    MemError::Os {
        op: "the store of shared pages",
        ppn: Ppn(0),
        source: Errno(match e {
            StoreError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
            _ => libc::EIO,
        }),
    }
}
