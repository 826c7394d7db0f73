//! Values of this guest's own, under keys in a service that has them in its memory alone: all written once, then read and
//! checked at random, and one in some written anew.

use std::marker::PhantomData;

use super::content::Content;
use super::wire::{Wire, same};
use super::{Load, Random};

/// Bytes of a value.
pub const VALUE: usize = 1000;
/// One request in so many writes.
const WRITES: u64 = 5;

/// How a service is told. A value is followed by an end of line, on either way.
pub trait Protocol {
    /// The answer to a value that was stored.
    const STORED: &'static str;
    /// The line behind a value that is read, if there is one.
    const END: Option<&'static str>;
    /// What comes before a value to be stored.
    fn set(name: &str) -> String;
    /// What asks for a value.
    fn get(name: &str) -> String;
    /// The line before a value that is read.
    fn head(name: &str) -> String;
}

pub struct Keyed<P> {
    wire: Wire,
    content: Content,
    /// By key: how often it was written.
    generations: Vec<u32>,
    protocol: PhantomData<P>,
}

impl<P: Protocol> Keyed<P> {
    /// `mb` of them, all stored.
    pub fn fill(wire: Wire, content: Content, mb: u64) -> Result<Keyed<P>, String> {
        let keys = (mb << 20) as usize / VALUE;
        let mut load = Keyed { wire, content, generations: vec![0; keys], protocol: PhantomData };
        (0..keys).try_for_each(|key| load.set(key))?;
        Ok(load)
    }

    fn set(&mut self, key: usize) -> Result<(), String> {
        self.generations[key] += 1;
        let value = self.content.text(key as u64, self.generations[key], VALUE);
        let head = P::set(&format!("key:{key}"));
        self.wire.ask(&[head.as_bytes(), &value, b"\r\n"], P::STORED)
    }

    fn get(&mut self, key: usize) -> Result<(), String> {
        let name = format!("key:{key}");
        self.wire.ask(&[P::get(&name).as_bytes()], &P::head(&name))?;
        let mut value = self.wire.bytes(VALUE + 2)?;
        value.truncate(VALUE);
        same(&name, &value, &self.content.text(key as u64, self.generations[key], VALUE))?;
        let Some(end) = P::END else { return Ok(()) };
        match self.wire.line()? {
            line if line == end => Ok(()),
            line => Err(format!("{name}: '{line}' instead of '{end}'")),
        }
    }
}

impl<P: Protocol> Load for Keyed<P> {
    fn step(&mut self, random: &mut Random) -> Result<u64, String> {
        let key = random.below(self.generations.len() as u64) as usize;
        self.get(key)?;
        if random.below(WRITES) == 0 {
            self.set(key)?;
        }
        Ok(1)
    }
}
