use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use ballast_units::{Bytes, HostAddr};

use super::*;
use crate::{Batch, Op, OpKind, VERSION};

const SOON: Option<Duration> = Some(Duration::from_millis(50));

#[test]
fn messages_arrive_with_their_descriptors_and_nothing_leaks_into_children() {
    let (shim, manager) = Connection::pair().unwrap();
    let null = File::open("/dev/null").unwrap();
    manager.send(&Message::Welcome { version: VERSION }, &[null.as_fd()]).unwrap();
    manager.send(&Message::Managed, &[]).unwrap();

    let (message, fds) = shim.recv(None).unwrap();
    assert_eq!(message, Message::Welcome { version: VERSION });
    assert_eq!(fds.len(), 1);
    let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let received = File::from(fds.into_iter().next().unwrap());
    assert_ne!(received.as_raw_fd(), null.as_raw_fd());
    assert_eq!(received.metadata().unwrap().rdev(), null.metadata().unwrap().rdev());

    let (message, fds) = shim.recv(SOON).unwrap();
    assert_eq!((message, fds.len()), (Message::Managed, 0));
}

#[test]
fn the_wrong_number_of_descriptors_is_refused_at_both_ends() {
    let (a, b) = Connection::pair().unwrap();
    let null = File::open("/dev/null").unwrap();
    let five = [null.as_fd(); 5];
    let batch = Message::Batch(Batch::new(1, vec![]).unwrap());
    assert!(matches!(
        a.send(&batch, &five),
        Err(ConnectionError::Decode(DecodeError::Descriptors { message: "Batch", got: 5 }))
    ));
    assert!(a.send(&Message::Welcome { version: 1 }, &[]).is_err());

    // A hostile peer does not check.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let twenty = [null.as_fd(); 20];
    assert!(control.push(SendAncillaryMessage::ScmRights(&twenty)));
    let bytes = batch.encode();
    rustix::net::sendmsg(&a.fd, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    assert!(matches!(b.recv(SOON), Err(ConnectionError::Decode(DecodeError::Descriptors { .. }))));
}

/// What the manager has of a shim: a connection that a listener gave.
fn accepted(dir: &Path) -> (Connection, Connection) {
    let path = dir.join("shim.sock");
    let listener = Listener::bind(&path).unwrap();
    let shim = Connection::connect(&path).unwrap();
    (shim, listener.accept(None).unwrap())
}

fn userfaultfd() -> Option<OwnedFd> {
    // SAFETY: nothing is registered with it.
    unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) }.ok()
}

#[test]
fn what_may_hang_when_it_is_closed_is_refused_and_left_open() {
    let dir = tempfile::tempdir().unwrap();
    let (shim, manager) = accepted(dir.path());
    let ready = Message::Ready { features: 0, ioctls: 0 };
    let memfd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let on_tmpfs = tempfile::tempfile_in("/dev/shm").unwrap().into();
    for good in [Some(memfd), Some(on_tmpfs), userfaultfd()].into_iter().flatten() {
        shim.send(&ready, &[good.as_fd()]).unwrap();
        assert_eq!(manager.recv(SOON).unwrap().1.len(), 1);
    }
    assert_eq!(crate::strangers::kept_open(), 0);

    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = Connection::pair().unwrap();
    // A file that is called as the kernel calls a userfaultfd. Not in /tmp: what is on a tmpfs is memory.
    let beside = std::env::current_exe().unwrap();
    let on_disk = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
    let named = on_disk.path().join("anon_inode:[userfaultfd]");
    let kinds: [(OwnedFd, &str); 5] = [
        (pipe, "pipe:["),
        (socket.into(), "socket:["),
        (File::create(named).unwrap().into(), "/anon_inode:[userfaultfd]"),
        (File::open(dir.path()).unwrap().into(), dir.path().to_str().unwrap()),
        (File::open("/dev/null").unwrap().into(), "/dev/null"),
    ];
    for (n, (fd, what)) in kinds.iter().enumerate() {
        shim.send(&ready, &[fd.as_fd()]).unwrap();
        let error = manager.recv(SOON).unwrap_err();
        assert!(matches!(error, ConnectionError::Strange { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(crate::strangers::kept_open(), n + 1);
    }
    // Nor is one closed that comes beside good ones, or with no message at all.
    let both = [kinds[0].0.as_fd(), kinds[1].0.as_fd()];
    let send = |bytes: &[u8], fds: &[BorrowedFd<'_>]| {
        let mut space = [MaybeUninit::uninit(); ALL_CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let iov = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&shim.fd, &iov, &mut control, SendFlags::empty()).unwrap();
    };
    send(&[0x42], &both);
    assert!(matches!(manager.recv(SOON), Err(ConnectionError::Decode(DecodeError::Magic))));
    assert_eq!(crate::strangers::kept_open(), 7);
    // As many as there can be; from then on none is taken in, and none counted.
    let beside = tempfile::tempdir().unwrap();
    let (another, waits) = accepted(beside.path());
    let waiting = std::thread::spawn(move || waits.recv(Some(Duration::from_secs(30))));
    std::thread::sleep(Duration::from_millis(50));
    send(&ready.encode(), &[kinds[0].0.as_fd(); 253]);
    assert!(matches!(manager.recv(SOON), Err(ConnectionError::Strange { .. })));
    assert_eq!(crate::strangers::kept_open(), 260);
    shim.send(&ready, &[kinds[0].0.as_fd()]).unwrap();
    let lost = manager.recv(SOON).unwrap_err();
    assert!(matches!(&lost, ConnectionError::Lost(message) if **message == ready), "{lost}");
    assert_eq!(lost.lost_batch(), None);
    // Nor of who waited since before.
    another.send(&ready, &[kinds[0].0.as_fd()]).unwrap();
    let waited = waiting.join().unwrap();
    assert!(matches!(waited, Err(ConnectionError::Lost(_))), "{waited:?}");
    assert_eq!(crate::strangers::kept_open(), 260);
    // What has no descriptors comes in as before.
    shim.send(&Message::Managed, &[]).unwrap();
    assert_eq!(manager.recv(SOON).unwrap().0, Message::Managed);
}

#[test]
fn a_batch_that_lost_its_descriptors_is_known_by_its_number() {
    let op = Op {
        kind: OpKind::MapStore,
        addr: HostAddr(4096),
        len: Bytes(4096),
        file_offset: 0,
        fd_index: 0,
    };
    let batch = Message::Batch(Batch::new(7, vec![op]).unwrap());
    assert_eq!(ConnectionError::Lost(Box::new(batch)).lost_batch(), Some(7));
    assert_eq!(ConnectionError::Lost(Box::new(Message::Managed)).lost_batch(), None);
    assert_eq!(ConnectionError::Closed.lost_batch(), None);
}

/// Who listens and takes nobody in holds nobody up for long.
#[test]
fn who_finds_the_queue_full_gives_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shim.sock");
    let listener = Listener::bind(&path).unwrap();
    let (mut waiting, begun) = (Vec::new(), Instant::now());
    let refused = loop {
        match Connection::connect(&path) {
            Ok(connection) => waiting.push(connection),
            Err(e) => break e,
        }
        assert!(waiting.len() < 1000 && begun.elapsed() < Duration::from_secs(60));
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock, "{refused}");
    // One is taken in: there is a place.
    let first = listener.accept(SOON).unwrap();
    Connection::connect(&path).unwrap();
    drop(first);
}

#[test]
fn a_peer_that_does_not_read_is_waited_for_as_long_as_was_said() {
    let (a, _b) = Connection::pair().unwrap();
    let patience = Duration::from_millis(20);
    let refused = loop {
        if let Err(e) = a.send_within(patience, &Message::Managed, &[]) {
            break e;
        }
    };
    assert!(matches!(refused, ConnectionError::TimedOut(after) if after == patience), "{refused}");
}

#[test]
fn silence_death_and_noise_are_told_apart() {
    let (a, b) = Connection::pair().unwrap();
    assert!(matches!(b.recv(SOON), Err(ConnectionError::TimedOut(_))));
    let noise = [0x42; MAX_MESSAGE + 100];
    rustix::net::send(&a.fd, &noise, SendFlags::empty()).unwrap();
    assert!(matches!(b.recv(SOON), Err(ConnectionError::Decode(DecodeError::Magic))));
    // A message that is longer than any is not cut to one that is good.
    let mut long = Message::Managed.encode();
    long.resize(MAX_MESSAGE + 100, 0);
    rustix::net::send(&a.fd, &long, SendFlags::empty()).unwrap();
    assert!(matches!(b.recv(SOON), Err(ConnectionError::Decode(DecodeError::Length { .. }))));
    drop(a);
    assert!(matches!(b.recv(None), Err(ConnectionError::Closed)));
    assert!(matches!(b.send(&Message::Managed, &[]), Err(ConnectionError::Closed)));
}

#[test]
fn a_listener_knows_its_peer_and_leaves_no_file() {
    let dir = std::env::temp_dir().join(format!("ballast-proto-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("shim.sock");
    let listener = Listener::bind(&path).unwrap();
    assert!(Listener::bind(&path).is_err());
    assert!(matches!(listener.accept(SOON), Err(ConnectionError::TimedOut(_))));
    let client = Connection::connect(&path).unwrap();
    let server = listener.accept(None).unwrap();
    assert_eq!(server.peer().unwrap().pid, std::process::id());
    client.send(&Message::Managed, &[]).unwrap();
    assert_eq!(server.recv(None).unwrap().0, Message::Managed);
    drop(listener);
    assert!(!path.exists(), "removed with the listener");
    assert!(Connection::connect(&path).is_err());
    std::fs::remove_dir(&dir).unwrap();
}

/// In the process that the next test makes, which is alone in a PID namespace; returns at once in any other.
#[test]
#[ignore = "the listener of the other test"]
fn listener_process() {
    let Some(path) = std::env::var_os("LISTENER_SOCKET") else { return };
    let path = Path::new(&path);
    let listener = Listener::bind(path).unwrap();
    // Whoever comes from outside comes first.
    assert!(wait(listener.as_fd(), PollFlags::IN, None).unwrap());
    let _known = Connection::connect(path).unwrap();
    let accepted = listener.accept(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(accepted.peer().unwrap().pid, std::process::id());
}

#[test]
fn a_peer_that_is_not_to_be_seen_is_hung_up_on_and_others_are_listened_to() {
    let unshare = || {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child"]);
        command
    };
    if !unshare().arg("true").output().is_ok_and(|done| done.status.success()) {
        assert!(std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_none_or(|v| v != "1"));
        eprintln!("SKIPPED: no PID namespace can be made here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shim.sock");
    let mut listener = unshare()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "connection::tests::listener_process", "--ignored", "--nocapture"])
        .env("LISTENER_SOCKET", &path)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let unseen = loop {
        match Connection::connect(&path) {
            Ok(connection) => break connection,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(listener.try_wait().unwrap().is_none(), "there is no listener");
    };
    assert!(matches!(unseen.recv(Some(Duration::from_secs(60))), Err(ConnectionError::Closed)));
    assert!(listener.wait().unwrap().success());
}
