//! One connection to a service on the loopback interface.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub struct Wire {
    stream: BufReader<TcpStream>,
}

impl Wire {
    pub fn connect(port: u16) -> Result<Wire, String> {
        let told = |e: std::io::Error| format!("port {port}: {e}");
        let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).map_err(told)?;
        let patience = Some(Duration::from_secs(120));
        stream.set_read_timeout(patience).map_err(told)?;
        stream.set_write_timeout(patience).map_err(told)?;
        stream.set_nodelay(true).map_err(told)?;
        Ok(Wire { stream: BufReader::new(stream) })
    }

    pub fn send(&mut self, parts: &[&[u8]]) -> Result<(), String> {
        self.stream.get_mut().write_all(&parts.concat()).map_err(|e| format!("sending: {e}"))
    }

    /// A line without its end.
    pub fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err("connection closed".to_owned()),
            Ok(_) => Ok(line.trim_end().to_owned()),
            Err(e) => Err(format!("receiving: {e}")),
        }
    }

    pub fn bytes(&mut self, count: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).map_err(|e| format!("receiving: {e}"))?;
        Ok(bytes)
    }

    /// Sends and expects one line in answer.
    pub fn ask(&mut self, parts: &[&[u8]], want: &str) -> Result<(), String> {
        self.send(parts)?;
        match self.line()? {
            line if line == want => Ok(()),
            line => Err(format!("'{line}' instead of '{want}'")),
        }
    }
}

/// That `got` is what was stored under `name`.
pub fn same(name: &str, got: &[u8], want: &[u8]) -> Result<(), String> {
    if got == want {
        return Ok(());
    }
    let at = got.iter().zip(want).position(|(g, w)| g != w).unwrap_or(got.len().min(want.len()));
    Err(format!("{name}: {} bytes, {} stored, byte {at} is wrong", got.len(), want.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_by_its_place() {
        same("k", b"abc", b"abc").unwrap();
        assert!(same("k", b"axc", b"abc").unwrap_err().contains("byte 1 "));
        assert!(same("k", b"ab", b"abc").unwrap_err().contains("byte 2 "));
    }
}
