//! Redis with values of this guest's own, in its memory alone.

use super::content::Content;
use super::place::{self, Daemon, STATE};
use super::wire::{Wire, same};
use super::{Load, Random};

const PORT: u16 = 6379;
const VALUE: usize = 1000;
/// One request in so many writes.
const WRITES: u64 = 5;

struct Redis {
    wire: Wire,
    content: Content,
    /// By key: how often it was written.
    generations: Vec<u32>,
}

pub fn start(content: Content, mb: u64) -> Result<(Daemon, Box<dyn Load>), String> {
    let mut command = place::command("/usr/bin/redis-server")?;
    command.args(["--bind", "127.0.0.1", "--port", &PORT.to_string(), "--dir", STATE]);
    command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
    let mut daemon = Daemon::start(&mut command)?;
    let wire = daemon.until(|| {
        let mut wire = Wire::connect(PORT)?;
        wire.ask(&[b"PING\r\n"], "+PONG").map(|()| wire)
    })?;
    let keys = (mb << 20) as usize / VALUE;
    let mut load = Redis { wire, content, generations: vec![0; keys] };
    (0..keys).try_for_each(|key| load.set(key))?;
    Ok((daemon, Box::new(load)))
}

impl Redis {
    fn set(&mut self, key: usize) -> Result<(), String> {
        self.generations[key] += 1;
        let value = self.content.text(key as u64, self.generations[key], VALUE);
        let name = format!("key:{key}");
        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${VALUE}\r\n", name.len());
        self.wire.ask(&[head.as_bytes(), &value, b"\r\n"], "+OK")
    }

    fn get(&mut self, key: usize) -> Result<(), String> {
        let name = format!("key:{key}");
        let head = format!("*2\r\n$3\r\nGET\r\n${}\r\n{name}\r\n", name.len());
        self.wire.ask(&[head.as_bytes()], &format!("${VALUE}"))?;
        let mut value = self.wire.bytes(VALUE + 2)?;
        value.truncate(VALUE);
        same(&name, &value, &self.content.text(key as u64, self.generations[key], VALUE))
    }
}

impl Load for Redis {
    fn step(&mut self, random: &mut Random) -> Result<u64, String> {
        let key = random.below(self.generations.len() as u64) as usize;
        self.get(key)?;
        if random.below(WRITES) == 0 {
            self.set(key)?;
        }
        Ok(1)
    }
}
