//! A vCPU of /dev/kvm writes and verifies its memory while the pager evicts, samples and brings it
//! back, and shares those that are equal: faults that come from KVM, not from a thread's own access. The payload is flat 32-bit code
//! of a few lines, so that it runs on any KVM. Skipped, loudly, without /dev/kvm.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/remapper.rs"]
mod remapper;
#[path = "support/vmm.rs"]
mod vmm;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_pager::host::Host;
use ballast_pager::ledger::Ledger;
use ballast_pager::service::{Health, PagedVm, PagerConfig, VmFiles};
use ballast_pager::sharing::Domain;
use ballast_pager::sharing::control::{Control, Settings};
use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::swap::SwapSpace;
use ballast_uffd::Uffd;
use ballast_units::{PAGE_SIZE, Pages, Ppn};
use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vmm::{Cell, Guest, Vmm};

const SIZE: u64 = 3072;
const ROOM: u64 = 768;
/// Where the paged memory is in the guest; the code is in a page of its own, at 0.
const BASE: u32 = 1 << 20;
const KEY: u32 = 0x9e37_79b9;
const ROUND_PORT: u16 = 0x10;
const BAD_PORT: u16 = 0x11;

/// In round n: every page must hold what round n - 1 wrote to its first and last word (address and `mask`,
/// xor n * KEY), and is then written anew.
fn payload(mask: u32) -> Vec<u8> {
    let end = BASE + SIZE as u32 * PAGE_SIZE as u32;
    let last = PAGE_SIZE as u32 - 4;
    let with = |code: &[u8], imm: u32| [code, &imm.to_le_bytes()].concat();
    // From `write` to the jump back to `page`.
    let write = [
        vec![0x89, 0xf8],          // write: mov eax, edi
        with(&[0x25], mask),       // and eax, mask
        vec![0x31, 0xd0],          // xor eax, edx
        vec![0x89, 0x07],          // mov [edi], eax
        with(&[0x89, 0x87], last), // mov [edi + last], eax
        with(&[0x81, 0xc7], 4096), // add edi, 4096
        with(&[0x81, 0xff], end),  // cmp edi, end
    ]
    .concat();
    let tail = [0x46, 0x89, 0xf0, 0xe7, ROUND_PORT as u8]; // inc esi; mov eax, esi; out ROUND, eax
    // Bytes from after a jump to `bad`: what is left of the loop, its jump, the tail, its jump.
    let to_bad = (write.len() + 2 + tail.len() + 2) as u8;
    let verify = [
        vec![0x89, 0xf8],          // mov eax, edi
        with(&[0x25], mask),       // and eax, mask
        vec![0x31, 0xe8],          // xor eax, ebp
        vec![0x39, 0x07],          // cmp [edi], eax
        vec![0x75, to_bad + 8],    // jne bad
        with(&[0x39, 0x87], last), // cmp [edi + last], eax
        vec![0x75, to_bad],        // jne bad
    ]
    .concat();
    let page = [vec![0x85, 0xf6, 0x74, verify.len() as u8], verify, write].concat(); // test; jz write
    let round = [
        with(&[0x69, 0xee], KEY), // round: imul ebp, esi, KEY
        vec![0x89, 0xea],         // mov edx, ebp
        with(&[0x81, 0xc2], KEY), // add edx, KEY
        with(&[0xbf], BASE),      // mov edi, BASE
    ]
    .concat();
    let back_to_page = (page.len() as i8 + 2).wrapping_neg() as u8;
    let back_to_round =
        ((round.len() + page.len() + 2 + tail.len() + 2) as i8).wrapping_neg() as u8;
    [
        with(&[0xbe], 0), // mov esi, 0
        round,
        page,
        vec![0x72, back_to_page], // jb page
        tail.to_vec(),
        vec![0xeb, back_to_round],                    // jmp round
        vec![0x89, 0xf8, 0xe7, BAD_PORT as u8, 0xf4], // bad: mov eax, edi; out BAD, eax; hlt
    ]
    .concat()
}

#[test]
#[ignore = "the VMM process of the other tests"]
fn vmm_process() {
    let Some(guest) = Guest::enter() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| remapper::serve(&guest));
        run_vcpu(&guest);
    });
}

fn run_vcpu(guest: &Guest) {
    let kvm = Kvm::new().unwrap();
    let vm = kvm.create_vm().unwrap();
    let code_fd = vmm::memfd("code", PAGE_SIZE);
    let code = vmm::map_shared(std::os::fd::AsFd::as_fd(&code_fd), PAGE_SIZE);
    // Pages that are all different, or of sixteen kinds.
    let payload = payload(if guest.role == "alike" { 0xf000 } else { u32::MAX });
    // SAFETY: a page of ours, and the payload is shorter.
    unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), code, payload.len()) };
    for (slot, at, memory, pages) in
        [(0, 0, code as u64, 1), (1, u64::from(BASE), guest.base as u64, guest.pages)]
    {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: at,
            memory_size: pages * PAGE_SIZE as u64,
            userspace_addr: memory,
        };
        // SAFETY: both mappings live as long as the process.
        unsafe { vm.set_user_memory_region(region).unwrap() };
    }
    let mut vcpu = vm.create_vcpu(0).unwrap();
    make_flat_32_bit(&vcpu);
    vcpu.set_regs(&kvm_regs { rip: 0, rflags: 2, ..Default::default() }).unwrap();
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(ROUND_PORT, _)) => {
                guest.board.add(Cell::Step, 1);
                if guest.board.get(Cell::Stop) == 1 {
                    break;
                }
            }
            Ok(VcpuExit::IoOut(BAD_PORT, data)) => {
                eprintln!("the guest found a wrong page at {data:x?}");
                guest.board.add(Cell::Errors, 1);
                break;
            }
            Err(e) if e.errno() == libc::EINTR => {}
            other => {
                eprintln!("the vCPU stopped: {other:?}");
                guest.board.add(Cell::Errors, 1);
                break;
            }
        }
    }
    guest.board.add(Cell::Done, 1);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn make_flat_32_bit(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 |= 1;
    for (segment, kind) in [
        (&mut sregs.cs, 11),
        (&mut sregs.ds, 3),
        (&mut sregs.es, 3),
        (&mut sregs.fs, 3),
        (&mut sregs.gs, 3),
        (&mut sregs.ss, 3),
    ] {
        segment.base = 0;
        segment.limit = u32::MAX;
        segment.selector = if kind == 11 { 8 } else { 16 };
        segment.type_ = kind;
        (segment.present, segment.s, segment.db, segment.g) = (1, 1, 1, 1);
        (segment.dpl, segment.l) = (0, 0);
    }
    vcpu.set_sregs(&sregs).unwrap();
}

#[test]
fn a_vcpu_keeps_its_memory_in_a_quarter_of_its_size() {
    keeps_its_memory("different", false);
}

#[test]
fn a_vcpu_shares_its_pages_and_keeps_its_memory() {
    keeps_its_memory("alike", true);
}

/// Of this program's tests, one at a time; none, loudly, without what they need.
fn alone() -> Option<MutexGuard<'static, ()>> {
    let missing = match (Kvm::new(), Uffd::open()) {
        (Err(e), _) => Some(format!("/dev/kvm: {e}")),
        (_, Err(e)) => Some(format!("no userfaultfd: {e}")),
        _ => None,
    };
    if let Some(why) = missing {
        let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED").as_deref() == Ok("1");
        assert!(!(required && std::path::Path::new("/dev/kvm").exists()), "{why}");
        eprintln!("SKIPPED: {why}");
        return None;
    }
    static ALONE: Mutex<()> = Mutex::new(());
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

fn keeps_its_memory(role: &str, share: bool) {
    let Some(_alone) = alone() else { return };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let vmm = Vmm::start(role, SIZE);
    let config = PagerConfig::default();
    let overhead = config.overhead(Pages(SIZE));
    let host = Arc::new(Host::new(Ledger::new(Pages(ROOM) + overhead, || {})));
    assert!(host.ledger.try_reserve(overhead));
    host.set_plenty(Pages(ROOM / 8));
    let swap = SwapSpace::create_at(&dir.path().join("swap"), Pages(SIZE)).unwrap();
    let files = VmFiles::new(dir.path(), swap);
    let store = dir.path().join("store");
    let domain = Arc::new(Domain::create(&store, "salt", b"secret", host.clone()).unwrap());
    vmm.board.set(Cell::Go, 1);
    let ram = match share {
        true => remapper::connected(&vmm, dir.path(), domain.file()),
        false => vmm.guest_ram(),
    };
    let mut vm = PagedVm::start("kvm", config, files, ram, overhead, host.clone()).unwrap();
    vm.let_pages_move(true);
    if share {
        let settings =
            Settings { enabled: false, rehome_after: Duration::ZERO, ..Settings::default() };
        vm.share_in(&domain, Arc::new(Control::new(settings)), 1).unwrap();
    }
    let most = pager_at_work(&vmm, &vm, &host, share);
    let c = vm.memory().counters.values();
    assert!(!share || c.shares > 1000 && c.breaks > 1000 && c.homed > 1000);
    assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted");
    assert!(vmm.board.get(Cell::Step) > 2);
    assert!(most <= Pages(ROOM), "{most:?} in room for {ROOM}");
    assert_eq!(vm.health(), Health::Well);
    vm.release();
    domain.check([]).unwrap();
    assert_eq!((host.ledger.used(), vmm.measured()), (Pages(0), Pages(0)));
}

/// Evicts, samples and, if so, shares, until enough has come to pass and the guest has stopped. The most that it had.
fn pager_at_work(vmm: &Vmm, vm: &PagedVm, host: &Host, share: bool) -> Pages {
    let mut examiner = Examiner::default();
    let begun = Instant::now();
    let mut most = Pages(0);
    let mut sample = 0;
    while vmm.board.get(Cell::Done) == 0 {
        let c = vm.memory().counters.values();
        if c.faults + c.evicted >= 120_000 {
            vmm.board.set(Cell::Stop, 1);
        }
        assert!(begun.elapsed() < Duration::from_secs(180), "the guest hangs: {c:?}");
        vm.set_evict_goal(Pages((ROOM / 3).saturating_sub(host.ledger.free().0)));
        sample += 1;
        if sample % 20 == 0 {
            let first = sample * 7 % SIZE;
            vm.begin_sample((0..100).map(|i| Ppn((first + i * 31) % SIZE)).collect());
        }
        if share {
            let first = sample * 64 % SIZE;
            let pages: Vec<Ppn> = (first..first + 64).map(Ppn).collect();
            examiner.examine(vm.memory(), &pages, Marking::Unchanged).unwrap();
        }
        vm.memory_freed();
        most.0 = most.0.max(vmm.measured().0);
        std::thread::sleep(Duration::from_millis(1));
    }
    let c = vm.memory().counters.values();
    println!(
        "kvm: {} rounds over {} pages in {:.1} s: {} faults, {} evicted, {} swapped in, {} touched, \
         {} shared, {} broken, {} home",
        vmm.board.get(Cell::Step),
        SIZE,
        begun.elapsed().as_secs_f64(),
        c.faults,
        c.evicted,
        c.swap_ins,
        c.touched,
        c.shares,
        c.breaks,
        c.homed
    );
    most
}
