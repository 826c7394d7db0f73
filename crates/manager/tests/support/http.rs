//! HTTP by hand: what no well-behaved client sends.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Status, head and body of the answer.
pub fn raw(socket: &Path, method: &str, path: &str, body: &str) -> (u16, String, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: ballast\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_owned())
}

/// A refusal: its status, and the message in its JSON body.
pub fn refusal(socket: &Path, method: &str, path: &str, body: &str) -> (u16, String) {
    let (status, _, body) = raw(socket, method, path, body);
    let body: ballast_api::ErrorBody =
        serde_json::from_str(&body).unwrap_or_else(|e| panic!("{status}: {e}: {body}"));
    assert_eq!(body.code.status(), status);
    (status, body.message)
}
