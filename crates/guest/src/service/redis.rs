//! Redis with values of this guest's own, in its memory alone.

use super::Load;
use super::content::Content;
use super::keyed::{Keyed, Protocol, VALUE};
use super::place::{self, Daemon, STATE};
use super::wire::Wire;

const PORT: u16 = 6379;

struct Redis;

pub fn start(content: Content, mb: u64) -> Result<(Daemon, Box<dyn Load>), String> {
    let mut command = place::command("/usr/bin/redis-server")?;
    command.args(["--bind", "127.0.0.1", "--port", &PORT.to_string(), "--dir", STATE]);
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
    let mut daemon = Daemon::start(&mut command)?;
    let wire = daemon.until(|| {
        let mut wire = Wire::connect(PORT)?;
        wire.ask(&[b"PING\r\n"], "+PONG").map(|()| wire)
    })?;
    let load = Keyed::<Redis>::fill(wire, content, mb)?;
    Ok((daemon, Box::new(load)))
}

impl Protocol for Redis {
    const STORED: &'static str = "+OK";
    const END: Option<&'static str> = None;
    fn set(name: &str) -> String {
        format!("*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${VALUE}\r\n", name.len())
    }
    fn get(name: &str) -> String {
        format!("*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len())
    }
    fn head(_: &str) -> String {
        format!("${VALUE}")
    }
}
