//! How many shims may be in their handshake at one time: in all, of one user, and of one process. Whoever connects
//! and says nothing takes none of the places that others need, and no user takes all.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ballast_shim_proto::{Connection, Peer};
use rustix::net::{Shutdown, shutdown};

use crate::commons::hung_up;
use crate::sync::lock;

/// Of all processes that are not expected.
const MOST: usize = 64;
/// Of these, of one user.
const MOST_OF_USER: usize = 32;
/// Of one process, expected or not: its own, and those of threads that gave up a moment ago.
const MOST_OF_ONE: usize = 4;
/// As many are told of that led to nothing, however soon: a host that starts may have so many VMMs of one user.
const AT_ONCE: f64 = 32.0;

/// Handshakes that are under way, in order of arrival.
#[derive(Default)]
pub struct Handshakes {
    places: Mutex<Vec<Place>>,
    next: AtomicU64,
    /// By user, of those that led to nothing.
    told: Mutex<HashMap<u32, Told>>,
}

/// Of a user's handshakes that led to nothing.
struct Told {
    /// When one was last asked about, and how many may be told of from then on, beside one a pause.
    at: Instant,
    left: f64,
    /// How many were not told of since.
    untold: u64,
}

struct Place {
    id: u64,
    pid: u32,
    /// None of one that is expected: it counts for nobody.
    uid: Option<u32>,
    has_spoken: bool,
    connection: Weak<Connection>,
}

/// A place among them, given back when it is dropped.
pub struct Handshake {
    all: Arc<Handshakes>,
    id: u64,
}

impl Handshakes {
    /// None if there is no place. A VMM that the manager waits for finds one however many others have
    /// come. For any other, who has said nothing for longest makes room: a shim speaks at once. Where its own
    /// user has too many, that is one of those.
    pub fn begin(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        peer: Peer,
        is_expected: bool,
    ) -> Option<Handshake> {
        let Peer { pid, uid, .. } = peer;
        let uid = Some(uid).filter(|_| !is_expected);
        let mut places = lock(&self.places);
        if places.iter().filter(|place| place.pid == pid).count() >= MOST_OF_ONE {
            return None;
        }
        let of_user = places.iter().filter(|place| place.uid == uid).count() >= MOST_OF_USER;
        let others = places.iter().filter(|place| place.uid.is_some()).count();
        if !is_expected && (of_user || others >= MOST) {
            let makes_room =
                |p: &Place| !p.has_spoken && p.uid.is_some() && (!of_user || p.uid == uid);
            let silent = places.iter().position(makes_room)?;
            if let Some(connection) = places.remove(silent).connection.upgrade() {
                // Who waits for its first words hears that there will be none.
                let _ = shutdown(&connection, Shutdown::Both);
            }
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::downgrade(connection);
        places.push(Place { id, pid, uid, has_spoken: false, connection });
        Some(Handshake { all: self.clone(), id })
    }
}

impl Handshake {
    /// It makes room for nobody any more. False: it has done so.
    pub fn has_spoken(&self) -> bool {
        let mut places = lock(&self.all.places);
        let own = places.iter_mut().find(|place| place.id == self.id);
        own.map(|place| place.has_spoken = true).is_some()
    }

    /// Whether it is to be told of one of a user's that led to nothing: of some at once, then of one in so long a time, and how many
    /// were not before it.
    pub fn to_tell(&self, uid: u32, pause: Duration) -> Option<u64> {
        let now = Instant::now();
        let mut all = lock(&self.all.told);
        let told = all.entry(uid).or_insert(Told { at: now, left: AT_ONCE, untold: 0 });
        let more = (now - told.at).as_secs_f64() / pause.as_secs_f64();
        told.left = (told.left + more).min(AT_ONCE);
        told.at = now;
        if told.left < 1.0 {
            told.untold += 1;
            return None;
        }
        told.left -= 1.0;
        Some(std::mem::take(&mut told.untold))
    }

    /// Whether it made room for another.
    pub fn made_room(&self) -> bool {
        lock(&self.all.places).iter().all(|place| place.id != self.id)
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        lock(&self.all.places).retain(|place| place.id != self.id);
    }
}

/// The connections of shims whose VMs are managed, each with its process, kept for as long as both sides live: a shim
/// takes the closing of its as the manager's death.
#[derive(Default)]
pub struct Connections(Mutex<Vec<(u32, Arc<Connection>)>>);

impl Connections {
    /// Until it is pruned, or its process has another: a VMM has one VM, and one conversation about it.
    pub fn keep(&self, pid: u32, connection: Arc<Connection>) {
        let mut all = lock(&self.0);
        end(&mut all, pid);
        all.push((pid, connection));
    }

    /// Ends what is kept of a process: who waits for an answer there hears that none will come.
    pub fn hang_up(&self, pid: u32) {
        end(&mut lock(&self.0), pid);
    }

    /// Lets go of those whose other side is gone.
    pub fn prune(&self) {
        lock(&self.0).retain(|(_, connection)| !hung_up(connection));
    }
}

/// Of one handshake. It may hang on a disk beyond the end of this process, and what its thread has stays open: that is none of the
/// conversations of others.
pub struct Keeper(Weak<Connections>);

impl Keeper {
    /// For as long as there are `connections`.
    pub fn of(connections: &Arc<Connections>) -> Keeper {
        Keeper(Arc::downgrade(connections))
    }

    /// See [`Connections::keep`]. Once they are gone nothing is kept.
    pub fn keep(&self, pid: u32, connection: Arc<Connection>) {
        if let Some(all) = self.0.upgrade() {
            all.keep(pid, connection);
        }
    }

    /// See [`Connections::hang_up`].
    pub fn hang_up(&self, pid: u32) {
        if let Some(all) = self.0.upgrade() {
            all.hang_up(pid);
        }
    }
}

fn end(all: &mut Vec<(u32, Arc<Connection>)>, pid: u32) {
    all.retain(|(of, connection)| {
        if *of == pid {
            let _ = shutdown(connection, Shutdown::Both);
        }
        *of != pid
    });
}

#[cfg(test)]
mod tests {
    use ballast_shim_proto::{ConnectionError, Listener};

    use super::*;

    /// Each of a user of its own.
    fn peer(pid: u32) -> Peer {
        Peer { pid, uid: pid, gid: 0 }
    }

    #[test]
    fn one_process_and_all_together_are_limited_and_the_expected_gets_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let connect = || Arc::new(Connection::connect(&path).unwrap());
        let all = Arc::new(Handshakes::default());
        let mut held = Vec::new();
        let mut begin = |pid, is_expected| {
            let (connection, own) = (connect(), listener.accept(None).unwrap());
            let place = all.begin(&Arc::new(own), peer(pid), is_expected);
            held.push(connection);
            place
        };
        let mut places: Vec<Handshake> =
            (0..MOST_OF_ONE).map(|_| begin(1, false).unwrap()).collect();
        assert!(begin(1, false).is_none() && begin(1, true).is_none());
        for pid in 2..2 + (MOST - MOST_OF_ONE) as u32 {
            places.push(begin(pid, false).unwrap());
        }
        // All have spoken but two: these make room, the older one first, and for one each.
        for (n, place) in places.iter().enumerate() {
            assert!([7, 9].contains(&n) || place.has_spoken());
        }
        places.push(begin(5001, false).unwrap());
        assert!(places[7].made_room() && !places[7].has_spoken() && !places[9].made_room());
        assert!(places[MOST].has_spoken());
        places.push(begin(5002, false).unwrap());
        assert!(places[9].made_room() && places[MOST + 1].has_spoken());
        assert!(begin(5003, false).is_none());
        let expected = begin(5000, true).unwrap();
        assert!(!expected.made_room());
        drop(places);
        assert!(begin(1, false).is_some());
        // Of what leads to nothing each user is told of once in a while.
        let (long, short) = (Duration::from_secs(36_000), Duration::from_nanos(1));
        for _ in 0..AT_ONCE as u32 {
            assert_eq!(expected.to_tell(7, long), Some(0));
        }
        assert_eq!((expected.to_tell(7, long), expected.to_tell(7, long)), (None, None));
        assert_eq!(expected.to_tell(8, long), Some(0));
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!((expected.to_tell(7, short), expected.to_tell(7, short)), (Some(2), Some(0)));
        drop(expected);
        assert!(lock(&all.places).is_empty());
    }

    #[test]
    fn one_user_leaves_places_for_others() {
        let all = Arc::new(Handshakes::default());
        let mut held = Vec::new();
        let mut begin = |pid, uid, is_expected| {
            let (ours, theirs) = Connection::pair().unwrap();
            held.push(theirs);
            all.begin(&Arc::new(ours), Peer { pid, uid, gid: 0 }, is_expected)
        };
        let most = MOST_OF_USER as u32;
        let expected: Vec<_> = (0..most).map(|n| begin(9_000 + n, 7, true).unwrap()).collect();
        let places: Vec<_> = (0..most).map(|pid| begin(pid, 7, false).unwrap()).collect();
        // All have spoken but one, which makes room for one of its own.
        places.iter().skip(1).for_each(|place| assert!(place.has_spoken()));
        let last = begin(most, 7, false).unwrap();
        assert!(places[0].made_room() && last.has_spoken());
        assert!(begin(most + 1, 7, false).is_none());
        // Those that are expected have places beside, and make room for nobody.
        assert!(begin(most + 2, 8, false).is_some() && begin(most + 3, 7, true).is_some());
        assert!(!expected.iter().any(Handshake::made_room));
    }

    #[test]
    fn who_makes_room_is_hung_up_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let all = Arc::new(Handshakes::default());
        let mut silent = Vec::new();
        for pid in 0..=MOST as u32 {
            let other = Connection::connect(&path).unwrap();
            let own = Arc::new(listener.accept(None).unwrap());
            let place = all.begin(&own, peer(pid), false).unwrap();
            silent.push((other, own, place));
        }
        let wait = Some(std::time::Duration::from_secs(60));
        let (first, last) = (&silent[0], &silent[MOST]);
        assert!(matches!(first.1.recv(wait), Err(ConnectionError::Closed)));
        assert!(matches!(first.0.recv(wait), Err(ConnectionError::Closed)));
        assert!(first.2.made_room() && !last.2.made_room());
    }

    #[test]
    fn a_process_has_one_conversation() {
        let kept = Connections::default();
        let pairs: Vec<_> = (0..4).map(|_| Connection::pair().unwrap()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let wait = Some(std::time::Duration::ZERO);
        let is_over = |n: usize| matches!(theirs[n].recv(wait), Err(ConnectionError::Closed));
        for (pid, own) in [7, 8, 7, 9].into_iter().zip(ours) {
            kept.keep(pid, Arc::new(own));
        }
        assert_eq!([0, 1, 2, 3].map(is_over), [true, false, false, false]);
        kept.hang_up(7);
        kept.hang_up(10);
        assert_eq!([0, 1, 2, 3].map(is_over), [true, false, true, false]);
        assert_eq!(lock(&kept.0).len(), 2);
        drop(theirs);
        kept.prune();
        assert!(lock(&kept.0).is_empty());
    }

    /// Its ballastd has ended, as far as its VMs go: the next one gets them.
    #[test]
    fn a_handshake_that_hangs_keeps_the_conversation_of_no_other() {
        let kept = Arc::new(Connections::default());
        let hangs = Keeper::of(&kept);
        let (own, other) = Connection::pair().unwrap();
        hangs.keep(7, Arc::new(own));
        assert_eq!(lock(&kept.0).len(), 1);
        drop(kept);
        let wait = Some(std::time::Duration::from_secs(60));
        assert!(matches!(other.recv(wait), Err(ConnectionError::Closed)));
        hangs.keep(7, Arc::new(other));
        hangs.hang_up(7);
    }
}
