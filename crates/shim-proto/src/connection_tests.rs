use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use super::*;
use crate::{Batch, VERSION};

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
