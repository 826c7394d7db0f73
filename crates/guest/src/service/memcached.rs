//! memcached with values of this guest's own.

use super::content::Content;
use super::place::{self, Daemon};
use super::wire::{Wire, same};
use super::{Load, Random};

const PORT: u16 = 11211;
const VALUE: usize = 1000;
/// One request in so many writes.
const WRITES: u64 = 5;

struct Memcached {
    wire: Wire,
    content: Content,
    /// By key: how often it was written.
    generations: Vec<u32>,
}

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
    let keys = (mb << 20) as usize / VALUE;
    let mut load = Memcached { wire, content, generations: vec![0; keys] };
    (0..keys).try_for_each(|key| load.set(key))?;
    Ok((daemon, Box::new(load)))
}

impl Memcached {
    fn set(&mut self, key: usize) -> Result<(), String> {
        self.generations[key] += 1;
        let value = self.content.text(key as u64, self.generations[key], VALUE);
        let head = format!("set key:{key} 0 0 {VALUE}\r\n");
        self.wire.ask(&[head.as_bytes(), &value, b"\r\n"], "STORED")
    }

    fn get(&mut self, key: usize) -> Result<(), String> {
        let name = format!("key:{key}");
        let head = format!("get {name}\r\n");
        self.wire.ask(&[head.as_bytes()], &format!("VALUE {name} 0 {VALUE}"))?;
        let mut value = self.wire.bytes(VALUE + 2)?;
        value.truncate(VALUE);
        same(&name, &value, &self.content.text(key as u64, self.generations[key], VALUE))?;
        match self.wire.line()?.as_str() {
            "END" => Ok(()),
            other => Err(format!("{name}: '{other}' instead of 'END'")),
        }
    }
}

impl Load for Memcached {
    fn step(&mut self, random: &mut Random) -> Result<u64, String> {
        let key = random.below(self.generations.len() as u64) as usize;
        self.get(key)?;
        if random.below(WRITES) == 0 {
            self.set(key)?;
        }
        Ok(1)
    }
}
