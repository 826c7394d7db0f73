//! What guests do to their memory while managers die: pages of their own, each written whole, changed,
//! filled by the kernel, given up, and verified to the last byte at every look.

use ballast_units::PAGE_SIZE;

use super::vmm::{Cell, Guest, Random};

pub const THREADS: u64 = 2;
/// Pages that are alike, of which the VMs together have many.
const KINDS: u64 = 24;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zeros,
    /// The same bytes, whoever writes them: to be shared.
    Kind(u64),
    /// Nobody else's: words that repeat, so that they can be compressed.
    Plain(u64),
    /// Nobody else's, and as good as random.
    Noise(u64),
}

impl Content {
    fn word(self, i: usize) -> u64 {
        let mix = |n: u64| {
            let n = (n ^ n >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (n ^ n >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        match self {
            Content::Zeros => 0,
            Content::Kind(kind) => mix(kind << 32 | 1) ^ i as u64,
            Content::Plain(own) => (mix(own) & !0xf) | (i as u64 % 16),
            Content::Noise(own) => mix(mix(own) ^ i as u64),
        }
    }

    fn is(self, page: &[u64]) -> bool {
        page.iter().enumerate().all(|(i, &word)| word == self.word(i))
    }
}

/// A page, as its only user knows it.
#[derive(Clone, Copy, Debug)]
struct Page {
    last: Content,
    /// It was given up since: zeros, or what it had, or what it had when it was last shared.
    void: bool,
    /// Of what may be shared, all that it ever had: a bit for each kind. Not what only other pages had.
    kinds: u32,
}

impl Page {
    fn may_be(self, page: &[u64]) -> bool {
        let had = (0..KINDS).filter(|kind| self.kinds >> kind & 1 == 1);
        let others = || had.map(Content::Kind).any(|kind| kind.is(page));
        self.last.is(page) || self.void && (Content::Zeros.is(page) || others())
    }
}

/// One thread of a guest, until it is told to stop; then all is verified once more.
pub fn run(guest: &Guest, thread: u64, seed: u64) {
    let mut random = Random(seed.wrapping_mul(2 * thread + 0x9e37_79b9) | 1);
    let own = guest.pages / THREADS;
    let mut pages = vec![Page { last: Content::Zeros, void: false, kinds: 0 }; own as usize];
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    let mut next = seed.rotate_left(32) ^ thread << 56;
    let verify = |at: u64, page: Page| {
        let ppn = at * THREADS + thread;
        let found = guest.read_page(ppn);
        guest.board.add(Cell::Accesses, 1);
        if !page.may_be(&found) {
            eprintln!("ppn {ppn}: not {page:?}: {:x?} ...", &found[..4]);
            guest.board.add(Cell::Errors, 1);
        }
    };
    while guest.board.get(Cell::Stop) == 0 {
        pause(guest);
        // Half of the accesses go to an eighth of the pages.
        let at = if random.below(2) == 0 { random.below(own / 8) } else { random.below(own) };
        let ppn = at * THREADS + thread;
        let page = &mut pages[at as usize];
        verify(at, *page);
        let mut write = |content: Content| {
            guest.write_page(ppn, |i| content.word(i));
            (page.last, page.void) = (content, false);
            if let Content::Kind(kind) = content {
                page.kinds |= 1 << kind;
            }
        };
        next = next.wrapping_add(1);
        match random.below(100) {
            0..45 => {}
            45..58 => write(Content::Kind(random.below(KINDS))),
            58..68 => write(Content::Plain(next)),
            68..78 => write(Content::Noise(next)),
            78..80 => write(Content::Zeros),
            80..87 if !page.void => change_and_restore(guest, ppn, page.last, &mut random),
            87..91 => {
                // By the kernel, on the VMM's behalf: a fault from inside a system call.
                // SAFETY: a page of this thread's own.
                let n = unsafe {
                    use std::os::fd::AsRawFd;
                    libc::read(zeros.as_raw_fd(), guest.word(ppn, 0).cast(), PAGE_SIZE)
                };
                if n != PAGE_SIZE as isize {
                    eprintln!("ppn {ppn}: read: {}", std::io::Error::last_os_error());
                    guest.board.add(Cell::Errors, 1);
                }
                (page.last, page.void) = (Content::Zeros, false);
            }
            91..96 => {
                discard(guest, ppn);
                page.void = true;
            }
            _ => {}
        }
    }
    for (at, page) in pages.iter().enumerate() {
        verify(at as u64, *page);
    }
    guest.board.add(Cell::Done, 1);
}

fn pause(guest: &Guest) {
    let wanted = || guest.board.get(Cell::Pause) != 0 && guest.board.get(Cell::Stop) == 0;
    // Looked at again when it no longer counts: whoever comes to pause it next must not count it.
    while wanted() {
        guest.board.add(Cell::Paused, 1);
        while wanted() {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        guest.board.subtract(Cell::Paused, 1);
    }
}

/// Writes a single word, sees it, and puts back what was there.
fn change_and_restore(guest: &Guest, ppn: u64, content: Content, random: &mut Random) {
    let i = random.below(PAGE_SIZE as u64 / 8) as usize;
    let changed = content.word(i) ^ 0x5a5a;
    // SAFETY: this thread is the only one that uses the page.
    unsafe {
        guest.word(ppn, i).write_volatile(changed);
        std::thread::yield_now();
        if guest.word(ppn, i).read_volatile() != changed {
            eprintln!("ppn {ppn}: lost word {i}");
            guest.board.add(Cell::Errors, 1);
        }
        guest.word(ppn, i).write_volatile(content.word(i));
    }
}

/// As QEMU does it for a balloon.
fn discard(guest: &Guest, ppn: u64) {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (file, _, at) = guest.part(ppn);
    rustix::fs::fallocate(file, flags, at * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
    // SAFETY: a page of this thread's own.
    if unsafe { libc::madvise(guest.word(ppn, 0).cast(), PAGE_SIZE, libc::MADV_DONTNEED) } != 0 {
        guest.board.add(Cell::Errors, 1);
    }
    guest.board.add(Cell::Discards, 1);
}
