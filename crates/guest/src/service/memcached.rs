//! memcached with values of this guest's own.

use super::Load;
use super::content::Content;
use super::keyed::{Keyed, Protocol, VALUE};
use super::place::{self, Daemon};
use super::wire::Wire;

const PORT: u16 = 11211;

struct Memcached;

pub fn start(content: Content, mb: u64) -> Result<(Daemon, Box<dyn Load>), String> {
    let mut command = place::command("/usr/bin/memcached")?;
    // Room for twice the values: none is to be dropped for want of memory.
    let room = (mb * 2).max(16).to_string();
    command.args(["-l", "127.0.0.1", "-p", &PORT.to_string(), "-U", "0", "-t", "2", "-m", &room]);
    let mut daemon = Daemon::start(&mut command)?;
    let wire = daemon.until(|| {
        let mut wire = Wire::connect(PORT)?;
        wire.send(&[b"version\r\n"])?;
        wire.line().map(|_| wire)
    })?;
    let load = Keyed::<Memcached>::fill(wire, content, mb)?;
    Ok((daemon, Box::new(load)))
}

impl Protocol for Memcached {
    const STORED: &'static str = "STORED";
    const END: Option<&'static str> = Some("END");
    fn set(name: &str) -> String {
        format!("set {name} 0 0 {VALUE}\r\n")
    }
    fn get(name: &str) -> String {
        format!("get {name}\r\n")
    }
    fn head(name: &str) -> String {
        format!("VALUE {name} 0 {VALUE}")
    }
}
